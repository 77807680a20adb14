# SPDX-License-Identifier: Apache-2.0
"""Where processes that tests start look for modules: in this checkout, and where this process was told to look."""

from __future__ import annotations

import os
from pathlib import Path


def python_path() -> str:
    """A value for PYTHONPATH."""
    of_this = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([str(Path(__file__).resolve().parents[1]), *filter(None, of_this.split(os.pathsep))])
