# SPDX-License-Identifier: Apache-2.0
"""Changes nested data for tests of what is refused."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


def with_change(data: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return a copy with another value at a path; ``...`` takes the field away."""
    changed = copy.deepcopy(dict(data))
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return changed
