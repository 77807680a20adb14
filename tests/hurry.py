# SPDX-License-Identifier: Apache-2.0
"""For tests in which it is of no matter how well things are measured."""

from __future__ import annotations

from ds_fsmoe.measuring import cluster_profile, stopwatch
from ds_fsmoe.measuring import stopwatch as contention


def hurry() -> None:
    """In this process, measure as briefly as can be."""
    stopwatch.BUDGET_S, stopwatch.FEWEST = 0.0, 1
    cluster_profile.LINK_AIM_MS = cluster_profile.COMPUTING_AIM_MS = 3.0
    contention.SHORTEST_MS, contention.REPEATS = 2.0, 1
