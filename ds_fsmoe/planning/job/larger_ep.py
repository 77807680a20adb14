# SPDX-License-Identifier: Apache-2.0
"""Predicts a measured job with its experts spread over more ranks.

More ranks make all-to-alls longer and experts' gradients fewer, and each rank keeps fewer experts. Which is faster
depends on the links, and on the tokens of a step: nobody knows these before a job has run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ds_fsmoe.planning.cluster import Cluster
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.job.other_ranks import OtherRanks, on_other_ranks
from ds_fsmoe.planning.job.recorded_costs import RecordedJob
from ds_fsmoe.planning.job.what_if import WhatIf
from ds_fsmoe.planning.workload import ONCE_PER_NODE, AllToAll


def sizes_from(groups: Groups, num_experts: Sequence[int]) -> list[int]:
    """Return over how many ranks experts can be spread, from the number as it is upwards.

    Args:
        groups: the groups of the layers as they are.
        num_experts: the numbers of experts of the layers.
    """
    return [
        ep
        for ep in range(groups.ep, groups.stage // groups.esp + 1)
        if groups.stage % (ep * groups.esp) == 0 and not any(each % ep for each in num_experts)
    ]


def larger_ep_sizes(job: RecordedJob, cluster: Cluster) -> dict[int, float]:
    """Predict a step of a job with experts over as many ranks as they are, and over more.

    Args:
        job: the job, with costs.
        cluster: what collectives cost among other ranks.

    Returns:
        EP size -> the time of a step in milliseconds, the size as it is first; of the all-to-alls that rows can take,
        the fastest. Sizes of which the cluster says nothing are left out; empty if no other is left.
    """
    layouts = {(kind.groups.ep, kind.groups.esp) for kind in job.kinds}
    sizes = sizes_from(job.kinds[0].groups, [kind.shape.num_experts for kind in job.kinds]) if len(layouts) == 1 else []
    if len(sizes) < 2:
        return {}
    # Slots that nobody fills travel as well: they do not cross to a node once.
    has_rows = all(kind.shape.num_tokens is not None for kind in job.kinds)
    alltoalls: tuple[AllToAll | None, ...] = (None, ONCE_PER_NODE) if has_rows else (None,)

    def step_ms(ep: int, alltoall: AllToAll | None) -> float:
        try:
            other = on_other_ranks(job, cluster, OtherRanks(ep=ep, alltoall=alltoall))
        except ValueError:
            return math.inf
        return WhatIf(other).by_schedule(job.schedule).step_ms

    found = {ep: min(step_ms(ep, each) for each in alltoalls) for ep in sizes}
    known = {ep: ms for ep, ms in found.items() if math.isfinite(ms)}
    return known if len(known) > 1 and sizes[0] in known else {}
