# SPDX-License-Identifier: Apache-2.0
"""For tests in which it is of no matter how well things are measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds_fsmoe.measuring import cluster_profile, stopwatch


def hurry(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """In this process, measure as briefly as can be; ``put`` sets a name of a module."""
    put(stopwatch, "BUDGET_S", 0.0)
    put(stopwatch, "FEWEST", 1)
    put(stopwatch, "SHORTEST_MS", 2.0)
    put(stopwatch, "REPEATS", 1)
    for name in ("LINK_AIM_MS", "COMPUTING_AIM_MS"):
        put(cluster_profile, name, 3.0)
