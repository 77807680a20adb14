# SPDX-License-Identifier: Apache-2.0
"""Runs an MoE layer between tensor-parallel layers, whose ranks have the same tokens, or each a part of a sequence.

``ds_fsmoe.layer.state`` calls :class:`TensorParallelTokens` around the experts' part of such a layer.

*The same tokens.* Tensor-parallel attention ends in an all-reduce. So the ``mp`` ranks of a group have the same tokens
at the layer, and their gates decide alike. Each rank sends ``1/mp`` of the slots to the experts, and the results are
gathered. Stock's ``drop_tokens`` and ``gather_tokens`` do this on the capacity (sharded_moe.py:686-742), whether or not
the experts are tensor-parallel. A rank has the same part as in stock, and so the same numbers. The drop's backward
gathers gradients, so that every rank has the whole gradient of its tokens. The gather's backward takes the rank's own
part: all ranks have the same gradient there, and each slot must count once.

Two things differ from stock. Where ``mp`` does not divide the capacity, stock stops with an assertion; here empty slots
are added, which changes no number. And slots are numbered so that a rank's part is contiguous, chunk by chunk within
it. So the gather is one all-gather, without the copies that a gather along the capacity needs. (With k >= 3 choices
this changes the order in which a token's gradient is summed, so its last bits differ from stock's.)

*Parts of a sequence.* No token is dropped or gathered; ``gradients/zero_stages.py`` handles the gradients.

Letters: E experts of all ranks, C slots per expert, c those of this rank, P ranks of an MP group, M width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.execution.collectives import Collectives, all_gather
from ds_fsmoe.execution.row_sizes import ChunkSizes
from ds_fsmoe.execution.slot_chunks import CapacityChunks


@dataclass(frozen=True)
class TensorParallelUse:
    """Describes how a layer takes part in the tensor parallelism around it; ignored without tensor parallelism."""

    same_tokens: bool = True
    """Whether the ranks of an MP group have the same tokens; otherwise each has a part of a sequence."""
    experts: bool = False
    """Whether the experts are sharded over these ranks: DeepSpeed's ``enable_expert_tensor_parallelism``."""


PLAIN = TensorParallelUse()
_Rows = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]


@dataclass(frozen=True)
class TensorParallelTokens:
    """Splits slots between the ranks that have the same tokens."""

    group: dist.ProcessGroup
    """The group, used on the calling stream; never on a lane."""

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks, P."""
        return self.group.size()

    def part(self, capacity: int) -> int:
        """Return the number of slots of each expert that a rank sends, c, for a total capacity."""
        return -(-capacity // self.num_ranks)

    def slots(
        self, slots: torch.Tensor, num_experts: int, capacity: int, capacity_chunks: CapacityChunks
    ) -> torch.Tensor:
        """Return the rows of slots, ordered by rank, and for each rank chunk by chunk.

        Args:
            slots: any shape, int64: ``expert * C + position``, or ``E * C`` for "no slot".
            num_experts: E.
            capacity: C.
            capacity_chunks: the chunks of one rank's part, ``self.part(capacity)`` slots.

        Returns:
            The same shape: row numbers, ``P * E * c`` for "no slot".
        """
        part = self.part(capacity)
        if part == 0:
            return slots
        expert = slots.div(capacity, rounding_mode="floor")
        position = slots - expert * capacity
        rank = position.div(part, rounding_mode="floor")
        own = capacity_chunks.chunked_slots(expert * part + position - rank * part, num_experts)
        num_rows = num_experts * part
        return torch.where(slots < num_experts * capacity, rank * num_rows + own, self.num_ranks * num_rows)

    def drop(self, x_RM: torch.Tensor) -> torch.Tensor:
        """Return the part [E * c, M] of [P * E * c, M] that this rank sends."""
        return _Through.apply(x_RM, self.group, _own_part, _all_parts)

    def gather(self, y_RM: torch.Tensor) -> torch.Tensor:
        """Gather [E * c, M] of each rank, and return [P * E * c, M], the same on all."""
        return _Through.apply(y_RM, self.group, _all_parts, _own_part)


def _own_part(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a copy of this rank's part, so that the memory of the others can be freed."""
    return rows.chunk(group.size())[group.rank()].clone() if rows.shape[0] else rows.clone()


def _all_parts(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    gathered = rows.new_empty(group.size() * rows.shape[0], *rows.shape[1:])
    with waiting("the slots of tensor-parallel ranks"):
        all_gather(gathered, rows.contiguous(), group=group)
    return gathered


class _Through(torch.autograd.Function):
    """Runs one of the two functions above forward and the other backward: ``apply(rows, group, forwards,
    backwards)``."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup, forwards: _Rows, backwards: _Rows):
        ctx.group, ctx.backwards = group, backwards
        return forwards(rows, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.backwards(gradient, ctx.group), None, None, None


@dataclass(frozen=True)
class SelfSplitCollectives(Collectives):
    """Runs the collectives for experts that shard themselves over the ranks of the ESP group and sum their own parts.

    Their results are the same on all of these ranks. After the experts' own sum, so are the gradients of their input.
    Each rank continues with its own part, and nothing is summed a second time.
    """

    def reduce(self, y_NecM: torch.Tensor) -> torch.Tensor:
        """Return this rank's block [G, e, c, M] of [P * G, e, c, M], which is the same on all P ranks."""
        return y_NecM if self.esp_group is None else y_NecM.chunk(self.esp_group.size())[self.esp_group.rank()]

    def reduce_rows(self, y_RM: torch.Tensor, sizes: ChunkSizes) -> torch.Tensor:
        """Return this rank's rows of those of all P ranks, which are the same on all of them."""
        return y_RM if self.esp_group is None else y_RM.split(sizes.gathered)[self.esp_group.rank()]


def sum_gradients(parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace the gradient of each parameter by the sum over a group, before other hooks receive it.

    This is for parameters that are equal on all ranks of the group, where each rank's tokens contribute a part of the
    gradient. Every backward that uses one of them must run on all ranks.
    """

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        with waiting("the gradients of a gate"):
            dist.all_reduce(total, group=group)
        return total

    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_hook(summed)
