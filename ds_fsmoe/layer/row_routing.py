# SPDX-License-Identifier: Apache-2.0
"""Numbers the rows of a gate's decision in the order in which they are sent.

Letters: S tokens on this rank, E experts of all ranks, K choices per token, T segments of the tokens, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ds_fsmoe.components.routing import Routing, kind_of
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.device_tables import TABLES
from ds_fsmoe.execution.token_cuts import TokenCuts
from ds_fsmoe.ops import Ops


def drops_nothing(gate: Any) -> bool:
    """Whether a gate gives every choice a place, as its settings say now; a gate of one's own by ``drop_tokens``."""
    return getattr(getattr(gate, "settings", gate), "drop_tokens", True) is False


def sends_rows(dispatch: str, gate: Any, collectives: Collectives) -> bool:
    """Whether rows travel, instead of slots.

    Args:
        dispatch: what was asked for, see :attr:`~ds_fsmoe.config.blocks.FSMoEBlock.dispatch`.
        gate: the gate of the layer.
        collectives: those of the layer.
    """
    if collectives.ep_group is not None and collectives.exchange_rows is None:
        return False
    return takes_rows(dispatch, gate)


def takes_rows(dispatch: str, gate: Any) -> bool:
    """Whether rows travel as far as the gate is concerned; see :func:`sends_rows`."""
    if dispatch == "slots" or not issubclass(kind_of(gate), Routing):
        return False
    return dispatch == "rows" or drops_nothing(gate)


@dataclass(frozen=True)
class RowRouting:
    """A decision as rows."""

    routing: Routing
    """The decision, with all rows as the slots of one expert: what an order needs to put them in order."""
    counts_ET: torch.Tensor
    """[E, T] int64: the rows for each expert in each segment."""
    fault: torch.Tensor
    """Scalar int64: what is wrong with the decision, see :data:`~ds_fsmoe.execution.counts_exchange.FAULTS`."""


def number_rows(routing: Routing, cuts: TokenCuts, ops: Ops, *, is_trusted: bool = False) -> RowRouting:
    """Number the rows of a decision; nothing waits for the device.

    Args:
        routing: the decision. What it drops is no row.
        cuts: the cuts of the tokens.
        ops: the operators to use.
        is_trusted: whether the decision need not be checked.
    """
    slots_KS, num_experts = routing.slots_KS, routing.num_experts
    num_choices, num_tokens = slots_KS.shape
    num_queues = num_experts * cuts.num_segments
    # A slot that stands for none, num_experts * capacity, is of an expert behind the last.
    expert_KS = slots_KS.div(max(1, routing.capacity), rounding_mode="floor")
    is_row_KS = (slots_KS >= 0) & (slots_KS < routing.num_slots)
    queue_KS = expert_KS
    if cuts.num_segments > 1:
        first_S, step_S = _tables(cuts, num_experts, num_tokens, slots_KS).unbind()
        queue_KS = expert_KS * step_S + first_S
    queue_KS = torch.where(is_row_KS, queue_KS, num_queues)
    rows_KS, counts_V = in_queues(queue_KS, num_queues, ops)
    if cuts.num_segments > 1:
        counts_ET = counts_V[_places(cuts, num_experts, slots_KS)]
    else:
        counts_ET = counts_V.view(num_experts, 1)
    fault = counts_V.new_zeros(())
    if not is_trusted:
        is_out = ((slots_KS < 0) | (slots_KS > routing.num_slots)).any()
        fault = is_out + 2 * (routing.counts_E < counts_ET.sum(1)).any().long()
    as_one = replace(routing, slots_KS=rows_KS, capacity=num_choices * num_tokens, num_experts=1)
    return RowRouting(as_one, counts_ET, fault)


def in_queues(queue_KS: torch.Tensor, num_queues: int, ops: Ops) -> tuple[torch.Tensor, torch.Tensor]:
    """Put choices into queues, and those of a queue in the order of their tokens; nothing waits for the device.

    Args:
        queue_KS: [K, S] int64: the queue of each choice, ``num_queues`` for none.
        num_queues: the number of queues.
        ops: the operators to use.

    Returns:
        [K, S] int64, the number of each choice among all that are in queues, K * S for none; and the length of each
        queue.
    """
    # A router may name an expert twice for a token, such as one that looks its tokens up in a table.
    most, none = max(1, queue_KS.numel()), queue_KS.numel()
    found = ops.take_slots(queue_KS, num_queues, most, None, "token")
    ends_V = found.counts_E.cumsum(0)
    starts_V = torch.cat([ends_V - found.counts_E, ends_V.new_full((1,), none)])
    return starts_V[queue_KS] + found.slots_KS - queue_KS * most, found.counts_E


def _tables(cuts: TokenCuts, num_experts: int, num_tokens: int, like: torch.Tensor) -> torch.Tensor:
    """Return [2, S]: expert x of a token has the queue ``x * step + first``; the table holds (first, step)."""

    def make(device: torch.device) -> torch.Tensor:
        first_T, step_T = _queues(cuts, num_experts)
        lengths = cuts.lengths(num_tokens)
        return torch.from_numpy(np.repeat(np.stack([first_T, step_T]), lengths, axis=1)).to(device)

    return TABLES.get(("queues of tokens", cuts, num_experts, num_tokens), like, make)


def _places(cuts: TokenCuts, num_experts: int, like: torch.Tensor) -> torch.Tensor:
    """Return [E, T]: the queue of each expert in each segment."""

    def make(device: torch.device) -> torch.Tensor:
        first_T, step_T = _queues(cuts, num_experts)
        return torch.from_numpy(np.arange(num_experts)[:, None] * step_T + first_T).to(device)

    return TABLES.get(("queues of experts", cuts, num_experts), like, make)


def _queues(cuts: TokenCuts, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return for each segment the queue of expert 0, and the step from one expert to the next. Queues are numbered as
    rows are sent: chunk by chunk of the forward, expert by expert, segment by segment."""
    chunks = cuts.chunks(cuts.forward)
    lengths = [last - first for first, last in chunks]
    first_of_chunk = np.repeat([first for first, _ in chunks], lengths)
    return num_experts * first_of_chunk + np.arange(cuts.num_segments) - first_of_chunk, np.repeat(lengths, lengths)
