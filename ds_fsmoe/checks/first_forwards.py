# SPDX-License-Identifier: Apache-2.0
"""Records and logs facts that are known once the layers of an engine have run in training, such as sizes.

The runtime of layers attaches it; the autotuner reads the calls.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ds_fsmoe.components.expert_compute.autograd_call import AutocastState, RandomState
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.manual_ffn import ManualExpert
from ds_fsmoe.components.expert_compute.stacked_experts import StackedExperts
from ds_fsmoe.components.gate import in_backward
from ds_fsmoe.components.routing import Routing, RoutingBase
from ds_fsmoe.distributed.agreement import DisagreementError, check_agreement
from ds_fsmoe.execution.pipeline import CallSizes
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.observing.instruments import Gate, LayerCall


@dataclass(frozen=True)
class FirstCall:
    """Describes the first call of a layer, from which its kept memory is estimated."""

    experts: ExpertSet
    forms: tuple[ManualExpert | None, ...]
    """The forms by which the experts were computed."""
    sizes: CallSizes
    autocast: AutocastState
    num_tokens: int
    """The number of tokens S on this rank."""
    expert_KS: torch.Tensor | None = None
    """[K, S] int64: the expert of each choice, E where it was dropped; ``None``: the gate's experts choose tokens."""


class FirstForwards:
    """Watches the first forwards of the layers of one engine.

    Args:
        keeps_calls: whether :attr:`calls` is filled.
    """

    def __init__(self, keeps_calls: bool = False) -> None:
        self._keeps_calls = keeps_calls
        self.calls: dict[str, FirstCall] = {}
        """Label of the layer -> its first call."""
        self._checked: set[str] = set()
        self._expert_KS: dict[str, torch.Tensor] = {}
        """Label of the layer -> see :attr:`FirstCall.expert_KS`."""
        self._compared: set[tuple[str, bool]] = set()
        self._kept: dict[bool, list[SavedBytes]] = {False: [], True: []}
        """Bytes kept per call, by whether all but the rows is computed again."""
        self._many: list[tuple[str, int, tuple[int, int]]] = []
        """(label, slots of an expert or tokens, chunks forward and backward) of layers with more chunks than these."""
        self._recompute = False
        self._is_logged = False

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the type of the tokens of the first layer that was called; ``None`` if there is none."""
        return next((each.sizes.dtype for each in self.calls.values()), None)

    def watch(self, call: LayerCall) -> None:
        """Compare the sizes that a layer's ranks exchange, before its call, and record the call.

        In the first forward in training, and in the first in evaluation, ranks compare the sizes of their messages:
            different sizes would end the process, or hang.

        Args:
            call: the call of the layer.
        """
        key = call.label, call.is_training
        if call.capacity_group is not None and key not in self._compared and not in_backward():
            call.gate = self._comparing(call.gate, key, call.path, call.capacity_group, call.in_rows)
        if call.is_training and call.local_experts is not None and call.label not in self._checked:
            self._checked.add(call.label)
            self._recompute = call.pipeline.recompute
            if self._keeps_calls:
                call.add_routing_callback(partial(self._keep_choices, call.label))
            # Nothing of the call itself: its pipeline would hold it, and with its input the whole graph of a forward,
            # until garbage is collected.
            seen = call.label, call.x.shape[:-1].numel(), call.x.device, call.pipeline.degrees, call.in_rows
            call.pipeline = call.pipeline.watched(on_call=partial(self._note, *seen, call.local_experts))

    def _note(
        self,
        label: str,
        num_tokens: int,
        device: torch.device,
        degrees: tuple[int, int],
        in_rows: bool,
        experts: ExpertSet,
        sizes: CallSizes,
    ) -> None:
        # Slots are chunked by their number for each expert, and rows by tokens.
        can_be_cut_into = num_tokens if in_rows else sizes.capacity
        if max(degrees) > max(1, can_be_cut_into):
            self._many.append((label, can_be_cut_into, degrees))
        for recompute, kept in self._kept.items() if not self._is_logged else ():
            kept.append(saved_bytes(experts, sizes, device, recompute))
        if self._keeps_calls:
            autocast = AutocastState.now(dict.fromkeys(("cpu", device.type)))
            forms, expert_KS = experts.written_now(), self._expert_KS.pop(label, None)
            self.calls[label] = FirstCall(experts, forms, sizes, autocast, num_tokens, expert_KS)

    def _keep_choices(self, label: str, routing: RoutingBase) -> None:
        if isinstance(routing, Routing):
            self._expert_KS[label] = routing.slots_KS.div(max(1, routing.capacity), rounding_mode="floor")

    def _comparing(self, gate: Gate, key: tuple[str, bool], path: str, group: dist.ProcessGroup, in_rows: bool) -> Gate:
        def compared(x_SM: torch.Tensor, *args: Any) -> Any:
            routing = gate(x_SM, *args)
            _compare(None if in_rows else routing.capacity, x_SM, path, group)
            self._compared.add(key)
            return routing

        return compared

    def watch_again(self) -> None:
        """Record the next call of each layer as its first one."""
        self._keeps_calls = True
        self._checked.clear()
        self.calls.clear()

    def log_saved_bytes(self) -> None:
        """Log once, after a forward of the engine, the memory that is kept for its backward."""
        if self._is_logged or not self._checked:
            return
        self._is_logged = True
        kept, otherwise = self._kept[self._recompute], self._kept[not self._recompute]
        details = '"recompute" computes experts once more in the backward; autograd keeps an unknown size'
        log_on_rank_0(describe(kept, otherwise, self._recompute), details=details)
        if self._many:
            log_on_rank_0(_too_many_chunks(self._many), logging.WARNING, "Empty chunks still cost their collectives")


def _too_many_chunks(layers: list[tuple[str, int, tuple[int, int]]]) -> str:
    """Return a sentence about layers with empty chunks."""
    label, num_slots, degrees = min(layers, key=lambda each: each[1])
    others = f" and {len(layers) - 1} other layer(s)" if len(layers) > 1 else ""
    return (
        f"{label}{others}: use a smaller fsmoe.num_chunks than {degrees[0]} and {degrees[1]} (an expert has "
        f"{num_slots} slots or tokens)"
    )


def _compare(capacity: int | None, x_SM: torch.Tensor, path: str, group: dist.ProcessGroup) -> None:
    """Compare slots and tokens between ranks. Collective over the group.

    Args:
        capacity: the slots of an expert; ``None`` for unpadded dispatch, where ranks may have different numbers of
            rows.
        x_SM: the tokens.
        path: the path of the layer in its model.
        group: the ranks.

    Raises:
        DisagreementError: raised on every rank, if numbers of slots or dtypes of tokens differ.
    """
    exchanged = {"dtype": str(x_SM.dtype).removeprefix("torch.")}
    if capacity is not None:
        exchanged = {"slots of each expert": str(capacity)} | exchanged
    what = f"the batch size in {path} (give each rank the same number of tokens, or set drop_tokens = False)"
    try:
        check_agreement(exchanged, group, what)
    except DisagreementError:
        # All of these ranks are here. Where nothing is dropped they may have different numbers of tokens, so these are
        # not compared, and only named.
        check_agreement(exchanged | {"tokens": str(len(x_SM))}, group, what)


# ---- how many bytes the experts' part of a layer keeps from a forward to its backward, from sizes alone
# Letters: N ranks the rows came from, e experts on this rank, C slots per expert, M width, H hidden width.


@dataclass(frozen=True)
class SavedBytes:
    """Holds the bytes kept for one call, or summed over several."""

    rows: int
    """The rows that came to the experts: [N, e, C, M]. N = ranks of the EP group x ranks of the ESP group."""
    hidden: int
    """The hidden layers of experts whose gradients are written out: [N, C, H / esp] for each tensor kept."""
    rest: int
    """The states of random-number generators, for experts that autograd differentiates."""
    num_graphs: int
    """The number of experts that also keep a graph of autograd, whose size is not known beforehand."""

    @property
    def total(self) -> int:
        """Return the sum of the known bytes."""
        return self.rows + self.hidden + self.rest

    def __add__(self, other: SavedBytes) -> SavedBytes:
        return SavedBytes(
            self.rows + other.rows,
            self.hidden + other.hidden,
            self.rest + other.rest,
            self.num_graphs + other.num_graphs,
        )


def saved_bytes(
    experts: ExpertSet | StackedExperts, sizes: CallSizes, device: torch.device, recompute: bool
) -> SavedBytes:
    """Return the bytes that a call of these experts would keep now, under the current autocast.

    Under activation checkpointing they are kept only during the layer's own backward.

    Args:
        experts: the experts of this rank.
        sizes: the sizes of the call.
        device: the device of the rows.
        recompute: whether all except the rows is recomputed in the backward.
    """
    if isinstance(experts, StackedExperts):
        return _of_stacked(experts, sizes, recompute)
    forms = experts.written_now()
    keeps_graphs = sizes.same_chunks and not recompute
    needs_rows = [
        not keeps_graphs if form is None else recompute or any(up.weight.requires_grad for up in form.up)
        for form in forms
    ]
    rows = sizes.num_ranks * len(forms) * sizes.capacity * sizes.width * sizes.dtype.itemsize if any(needs_rows) else 0
    hidden = 0
    if not recompute:
        a_row = sum(_hidden_bytes_of_a_row(form, sizes, device) for form in forms if form is not None)
        hidden = sizes.num_ranks * sizes.capacity * a_row
    num_through_autograd = sum(form is None for form in forms)
    rest = 0 if keeps_graphs else sizes.num_chunks * num_through_autograd * RandomState.now(device).nbytes
    return SavedBytes(rows, hidden, rest, num_through_autograd if keeps_graphs else 0)


def _of_stacked(experts: StackedExperts, sizes: CallSizes, recompute: bool) -> SavedBytes:
    num_rows = sizes.num_ranks * experts.num_experts * sizes.capacity
    rows, hidden = (num_rows * each * sizes.dtype.itemsize for each in experts.kept_of_a_row(recompute))
    is_graph = experts.own_forward is not None and sizes.same_chunks and not recompute
    return SavedBytes(rows, hidden, 0, experts.num_experts if is_graph else 0)


def _hidden_bytes_of_a_row(form: ManualExpert, sizes: CallSizes, device: torch.device) -> int:
    # Asked of the expert itself, with one row: what is kept depends on the activation, and is a user's to write.
    with torch.no_grad():
        kept = form.kept(torch.zeros(1, 1, sizes.width, dtype=sizes.dtype, device=device))
    return sum(each.nbytes for each in kept)


def describe(kept: Iterable[SavedBytes], otherwise: Iterable[SavedBytes], recompute: bool) -> str:
    """Return a sentence or two for the log.

    Args:
        kept: the bytes of each layer.
        otherwise: the bytes of each layer with the other choice of ``recompute``.
        recompute: the choice of ``recompute``.
    """
    other = 'without "recompute"' if recompute else '"recompute": true'
    return f"MoE activations kept for the backward: {_in_words(kept)} per rank ({other}: {_in_words(otherwise)})"


def _in_words(each: Iterable[SavedBytes]) -> str:
    """Return the total memory of the layers as text in MB.

    Graphs that autograd keeps for single experts are counted as unknown.
    """
    total = sum(each, SavedBytes(0, 0, 0, 0))
    graphs = f" and unknown MB of {total.num_graphs} expert(s)" if total.num_graphs else ""
    return f"{total.total / 1e6:.4g} MB{graphs}"
