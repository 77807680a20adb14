# SPDX-License-Identifier: Apache-2.0
"""Runs layers that belong to no engine of ours."""

from __future__ import annotations

import torch.distributed as dist

from ds_fsmoe.components.alltoall import AllToAllBase
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.lanes import Lanes
from ds_fsmoe.execution.pipeline import Pipeline
from ds_fsmoe.execution.row_sizes import Block
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.phase_plan import PhasePlan


def pipeline_without_engine(
    alltoall: AllToAllBase, group: dist.ProcessGroup | None, lanes: Lanes, degrees: tuple[int, int] = (1, 1)
) -> Pipeline:
    """Return the pipeline of a layer that belongs to no engine of ours.

    Args:
        alltoall: the all-to-all.
        group: the ranks that share the experts; ``None`` for this process alone.
        lanes: the lanes that run tasks.
        degrees: the numbers of chunks (forward, backward).
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    groups = Groups(world=ranks, gpus_per_node=ranks, ep=ranks)
    plans = [PhasePlan(BlockPlan(each), groups, i == 1) for i, each in enumerate(degrees)]
    if ranks == 1:
        return Pipeline(lanes, Collectives(alltoall.exchange, None, None), *plans)
    block = Block(group, tuple((each, 0) for each in range(ranks)), dist.get_rank(group))
    rows = alltoall.exchange_rows if alltoall.takes_rows else None
    return Pipeline(lanes, Collectives(alltoall.exchange, group, None, exchange_rows=rows, block=block), *plans)
