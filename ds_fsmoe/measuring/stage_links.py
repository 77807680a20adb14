# SPDX-License-Identifier: Apache-2.0
"""How long stages of a pipeline take to send each other what belongs to one micro batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.distributed.stages import Stages
from ds_fsmoe.measuring.measurements import Measuring
from ds_fsmoe.planning.stage_batch import StageLink


def time_sends(measuring: Measuring, stages: Stages) -> list[StageLink]:
    """Time the sends of one micro batch between each stage and the next, of all ranks of the two at once. Collective
    over all ranks, between batches.

    Args:
        measuring: with all ranks of the job.
        stages: where this rank is.

    Raises:
        MeasuringError: on every rank, if one has failed.
    """
    of_ranks = on_every_rank((stages.stage, stages.received_bytes()))
    most: dict[int, tuple[int, int]] = {}
    for stage, (activation, gradient) in of_ranks:
        before = most.get(stage, (0, 0))
        most[stage] = max(before[0], activation), max(before[1], gradient)
    links = []
    for first in range(stages.num_stages - 1):
        activation, gradient = most[first + 1]
        there_ms = _send_ms(measuring, stages, "activations", first, first + 1, activation)
        back_ms = _send_ms(measuring, stages, "gradients", first + 1, first, gradient)
        links.append(StageLink(there_ms, back_ms))
    return links


def _send_ms(measuring: Measuring, stages: Stages, what: str, source: int, target: int, num_bytes: int) -> float:
    """Return the time on the slowest rank; a receive is not over before its send is."""
    if not num_bytes:
        return 0.0

    def prepare(size: int) -> Callable[[], object]:
        held = torch.zeros(size, dtype=torch.uint8, device=measuring.watch.device)
        if stages.stage == source:
            return lambda: dist.send(held, stages.ranks[target])
        if stages.stage == target:
            return lambda: dist.recv(held, stages.ranks[source])
        return lambda: None

    name = f"{what} from stage {source} to {target} of {stages.num_stages}, {num_bytes} bytes"
    return measuring.timing(name, "byte", [num_bytes], 1.0, prepare).times_ms[0]
