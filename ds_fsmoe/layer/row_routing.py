# SPDX-License-Identifier: Apache-2.0
"""Numbers the rows of a gate's decision in the order in which they are sent.

Letters: S tokens on this rank, E experts of all ranks, K choices per token, T segments of the tokens, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ds_fsmoe.components.routing import BareRouting, Routing, kind_of
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
    segments = segments_with_queues(cuts, num_experts, num_tokens, slots_KS)
    limits_E = None if is_trusted else routing.limits_E
    found = ops.number_rows(slots_KS, num_experts, routing.capacity, segments, limits_E)
    if segments is None:
        counts_ET = found.counts_V.view(num_experts, 1)
    else:
        counts_ET = found.counts_V[_places(cuts, num_experts, slots_KS)]
    as_one = BareRouting.of(found.rows_KS, routing.weights_KS, 1, num_choices * num_tokens)
    return RowRouting(as_one, counts_ET, found.fault)


def segments_with_queues(cuts: TokenCuts, num_experts: int, num_tokens: int, like: torch.Tensor) -> torch.Tensor | None:
    """Return [3, T]: where each segment ends, its queue of expert 0, and the step from one expert's to the next."""
    if cuts.num_segments == 1:
        return None

    def make(device: torch.device) -> torch.Tensor:
        ends_T = np.cumsum(cuts.lengths(num_tokens))
        return torch.from_numpy(np.stack([ends_T, *_queues(cuts, num_experts)])).to(device)

    return TABLES.get(("segments of tokens and their queues", cuts, num_experts, num_tokens), like, make)


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
