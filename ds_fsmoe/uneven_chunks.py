# SPDX-License-Identifier: Apache-2.0
"""Chunks of different sizes for a layer as it was measured: small where lanes wait for the first or after the last."""

from __future__ import annotations

from dataclasses import replace

from ds_fsmoe.measured_costs import LayerCosts, Machine
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.block_times import BlockTimes, Order
from ds_fsmoe.planning.cost import Cost, LinearCost
from ds_fsmoe.planning.schedule import HOLD
from ds_fsmoe.planning.shares import best_shares
from ds_fsmoe.planning.workload import BlockWork, MoEWork, Work
from ds_fsmoe.predicted import CallSizes, moe_work
from ds_fsmoe.runtime.pipeline import PhasePlan


def best_sizes(plan: PhasePlan, sizes: CallSizes, profile: LayerCosts, machine: Machine) -> BlockPlan | None:
    """The same order of tasks in as many chunks, of the sizes with which lanes that do not slow each other down are
    through first.

    Args:
        plan: of one phase.
        sizes: of a call.
        profile: what its tasks cost.
        machine: how they are run.

    Returns:
        ``None`` where there is nothing to cut otherwise, no sizes were found, or, slowed down as lanes are here, they
        are predicted to gain nothing.
    """
    block = plan.block
    if block.degree == 1 or machine.is_serial:
        return None
    costs = profile.costs(plan.backward)
    work = _launched_once(moe_work(plan.groups, plan.backward, sizes, plan.alltoall))
    if work.expert_dw is not None and work.expert_dw.kind not in costs:  # experts whose backward is one piece
        work = replace(work, expert_dx=None, expert_dw=None)
    task_ms = 0.0 if machine.issues_ahead else profile.task_ms
    lines = {
        each.kind: _line(costs[each.kind], each.size, block.degree).plus(0.0 if each.kind == HOLD else task_ms)
        for each in _works(work)
    }
    shares = best_shares(BlockTimes(BlockWork((), work, ()), lines), Order(block.degree, block.links, block.late_dw))
    if shares is None:
        return None
    found = replace(block, shares=shares)
    then_ms, now_ms = (machine.predict_ms(replace(plan, block=each), sizes, profile) for each in (found, block))
    return found if then_ms < now_ms else None


def _works(moe: MoEWork) -> list[Work]:
    experts = [each for each in (moe.expert, moe.expert_dx, moe.expert_dw) if each is not None]
    return [*moe.enter, *moe.gather, *moe.reduce, *moe.leave, *experts]


def _launched_once(moe: MoEWork) -> MoEWork:
    # Measured are whole operations, with all their launches.
    def once(work: Work | None) -> Work | None:
        return work and replace(work, launches=1)

    first = replace(moe.expert, launches=1)
    return replace(moe, expert=first, expert_dx=once(moe.expert_dx), expert_dw=once(moe.expert_dw))


def _line(cost: Cost, size: float, degree: int) -> LinearCost:
    """Through what the whole takes and what an equal chunk takes, for a program that knows lines only."""
    whole_ms, chunk_ms = cost.ms(size), cost.ms(size / degree)
    beta_ms = max(0.0, whole_ms - chunk_ms) / (size * (1 - 1 / degree)) if size else 0.0
    return LinearCost(max(0.0, whole_ms - beta_ms * size), beta_ms)
