# SPDX-License-Identifier: Apache-2.0
"""Computes from sizes alone how many bytes the experts' part of a layer keeps from a forward to its backward.

Letters: N ranks the rows came from, e experts on this rank, C slots per expert, M width, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ds_fsmoe.components.expert_compute.autograd_call import RandomState
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.manual_ffn import ManualExpert
from ds_fsmoe.components.expert_compute.stacked_experts import StackedExperts
from ds_fsmoe.execution.pipeline import CallSizes


@dataclass(frozen=True)
class SavedBytes:
    """The bytes kept for one call, or summed over several."""

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
        """The bytes that are known."""
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

    Under activation checkpointing it is kept only while the layer's own backward lasts.

    Args:
        experts: the experts of this rank.
        sizes: the sizes of the call.
        device: the device of the rows.
        recompute: whether all but the rows is computed again in the backward.
    """
    if isinstance(experts, StackedExperts):
        return _of_stacked(experts, sizes, recompute)
    forms = experts.written_now()
    keeps_graphs = sizes.same_cuts and not recompute
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
    is_graph = experts.own_forward is not None and sizes.same_cuts and not recompute
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
        otherwise: the bytes with the other choice of ``recompute``.
        recompute: the choice of ``recompute``.
    """
    kept = list(kept)
    total, other = _sum(kept), _sum(otherwise)

    def graphs(saved: SavedBytes) -> str:
        return f" and what autograd keeps of {saved.num_graphs} expert(s), unknown" if saved.num_graphs else ""

    said = f"MoE activations kept for the backward: {_megabytes(total.total)} per rank{graphs(total)}"
    if recompute:
        return said + f' (without "recompute": {_megabytes(other.total)}{graphs(other)})'
    return said + f' ("recompute": true keeps {_megabytes(other.total)}, and computes experts once more)'


def _sum(each: Iterable[SavedBytes]) -> SavedBytes:
    return sum(each, SavedBytes(0, 0, 0, 0))


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.4g} MB"
