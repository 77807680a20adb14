# SPDX-License-Identifier: Apache-2.0
"""The experts of one rank in one forward call of a layer, on rows instead of slots, chunk by chunk.

The rows of a chunk come expert by expert, and of each expert segment by segment of the tokens. So all rows that an
expert has in a call are one run, of which a chunk of either phase is a part: an expert that is computed alone is
computed as on slots, each chunk being a range of its rows.

Letters: e experts on this rank, R rows of a chunk, M width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from ds_fsmoe.components.expert_compute.autograd_call import AutocastState
from ds_fsmoe.components.expert_compute.gradient_sums import GradientSums
from ds_fsmoe.components.expert_compute.grouped_products import RowGroups
from ds_fsmoe.components.expert_compute.linears import RowWeights
from ds_fsmoe.components.expert_compute.saved import SavedRows


class ChunkRows(Protocol):
    """The sizes of one chunk."""

    of_experts: list[int]
    """The rows of each of e experts."""


class PhaseRows(Protocol):
    """The sizes of one phase."""

    @property
    def chunks(self) -> Sequence[ChunkRows]:
        """The chunks."""

    @property
    def ends(self) -> torch.Tensor:
        """[chunks, e] int32: where the rows of each expert end in a chunk."""


class CallRows(Protocol):
    """The sizes of a call."""

    @property
    def forward(self) -> PhaseRows:
        """Those of the forward."""

    @property
    def backward(self) -> PhaseRows:
        """Those of the backward; the same object where the chunks are the same."""

    @property
    def expert_order(self) -> torch.Tensor | None:
        """[rows] int64: of each row in the backward's chunks its number among those of the forward."""


def sizes_of_call(sizes: Sequence[list[int]], ends: torch.Tensor) -> CallRows:
    """Return the sizes of a call whose backward has the chunks of the forward.

    Args:
        sizes: for each chunk the rows of each expert.
        ends: [chunks, e] int32: where the rows of each expert end in a chunk.
    """
    phase: Any = SimpleNamespace(chunks=[SimpleNamespace(of_experts=each) for each in sizes], ends=ends)
    call: Any = SimpleNamespace(forward=phase, backward=phase, expert_order=None)
    return call


def saved_rows(rows: CallRows) -> SavedRows:
    """Return where to keep what a call makes of its rows."""
    sizes = (sum(each.of_experts) for each in rows.backward.chunks)
    return SavedRows(rows.expert_order, (0, *itertools.accumulate(sizes)))


@dataclass(frozen=True)
class ExpertRun:
    """Experts first to last (exclusive) of a rank, one alone or neighbours together."""

    first: int
    last: int
    call: Any
    is_single: bool
    """Whether it is the call of one expert, which is told the places of its rows among all that it has in a call."""


class KeptCall:
    """A call of experts whose runs keep something for the backward.

    Args:
        runs: the experts, one alone or neighbours together.
        sums: where weight gradients go.
        autocast: as it stands in the call.
        needs_backward: whether to keep anything.
    """

    def __init__(
        self, runs: Sequence[ExpertRun], sums: GradientSums, autocast: AutocastState, needs_backward: bool
    ) -> None:
        self._runs = tuple(runs)
        self._sums = sums
        self._autocast = autocast
        self._needs_backward = needs_backward

    def release(self) -> list[torch.Tensor | None]:
        """Give away the tensors that are kept for the backward, so that autograd can keep them: with its checks of
        versions, and for those who move or drop what it keeps (checkpointing, offloading)."""
        released: list[torch.Tensor | None] = []
        for run in self._runs:
            if hasattr(run.call, "forget"):
                run.call.forget()
            for store in run.call.stores:
                released += store.release()
        return released

    def restore(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Take back what :meth:`release` gave, ahead of the backward."""
        remaining = iter(tensors)
        for run in self._runs:
            for store in run.call.stores:
                store.restore(remaining)

    def rows(self) -> list[torch.Tensor]:
        """Of what has been restored, the rows that came to the experts; the rest they have made themselves."""
        return [rows for run in self._runs for store in run.call.stores for rows in store.first_of_each()]

    def _check_is_kept(self) -> None:
        if not self._needs_backward:
            raise RuntimeError("this call has kept nothing for a backward: it was made with needs_backward=False")


class RowCall(KeptCall):
    """Made by :meth:`ExpertSet.call_rows`; keeps what its backward needs until it is dropped.

    As :class:`~ds_fsmoe.components.expert_compute.calls.ExpertCall`, with chunks by their number: ``forward`` is called
    for every chunk of the forward, then ``backward`` for every chunk of the backward, and last
    ``gradients``.
    """

    def __init__(
        self,
        runs: Sequence[ExpertRun],
        sums: GradientSums,
        autocast: AutocastState,
        needs_backward: bool,
        rows: CallRows,
    ) -> None:
        super().__init__(runs, sums, autocast, needs_backward)
        self._rows = rows
        self._ranges: dict[int, list[list[tuple[int, int]]]] = {}
        if any(run.is_single for run in self._runs):
            self._ranges = {id(each): _ranges(each) for each in (rows.forward, rows.backward)}
        self._returned: set[int] = set()

    @torch.no_grad()
    def forward(self, chunk: int, x_RM: torch.Tensor) -> torch.Tensor:
        """[R, M] to the same shape, new memory."""
        return self._through("forward", self._rows.forward, chunk, x_RM.detach())

    @torch.no_grad()
    def backward(
        self,
        chunk: int,
        dy_RM: torch.Tensor,
        weights_R: torch.Tensor | None = None,
        gradients_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The gradient of the results to that of the rows; adds to the weights' gradients.

        Args:
            chunk: of the backward.
            dy_RM: the gradient of the results; with weights, that of the sums in which they have these weights.
            weights_R: of the results in the sums of their tokens.
            gradients_R: what the gradients of these are added to.
        """
        self._check_is_kept()
        if chunk in self._returned:
            raise ValueError(f"chunk {chunk} came back twice")
        self._returned.add(chunk)
        weights = None if weights_R is None or gradients_R is None else RowWeights(weights_R, gradients_R)
        return self._through("backward", self._rows.backward, chunk, dy_RM, weights)

    def gradients(self) -> tuple[torch.Tensor | None, ...]:
        """The gradient of each parameter of the experts, and start over.

        ``None`` where the parameter requires none or no result depends on it.

        Raises:
            RuntimeError: not every chunk has come back.
        """
        missing = set(range(len(self._rows.backward.chunks))) - self._returned
        if missing:
            raise RuntimeError(f"gradients are incomplete: chunks {sorted(missing)} have not come back")
        self._returned = set()
        return self._sums.take()

    def _through(
        self, way: str, phase: PhaseRows, chunk: int, tensor_RM: torch.Tensor, weights: RowWeights | None = None
    ) -> torch.Tensor:
        sizes = phase.chunks[chunk].of_experts
        if tensor_RM.shape[0] != sum(sizes):
            raise ValueError(f"chunk {chunk} has {len(tensor_RM)} rows: must have {sum(sizes)}")
        with self._autocast.restored():
            if len(self._runs) == 1:
                return self._of_run(self._runs[0], way, phase, chunk, tensor_RM, weights)
            places = (0, *itertools.accumulate(sizes))
            ranges = ((run, places[run.first], places[run.last]) for run in self._runs)
            parts = (
                self._of_run(run, way, phase, chunk, tensor_RM[start:stop], weights and weights.part(start, stop))
                for run, start, stop in ranges
            )
            return joined_parts(parts, len(tensor_RM), dim=0)

    def _of_run(
        self,
        run: ExpertRun,
        way: str,
        phase: PhaseRows,
        chunk: int,
        tensor_RM: torch.Tensor,
        weights: RowWeights | None,
    ) -> torch.Tensor:
        do: Callable[..., torch.Tensor] = getattr(run.call, way)
        options = {} if weights is None else {"weights": weights}
        if run.is_single:
            return do(*self._ranges[id(phase)][chunk][run.first], tensor_RM.unsqueeze(0), **options)[0]
        sizes, ends = phase.chunks[chunk].of_experts, phase.ends[chunk, run.first : run.last]
        if run.first:
            ends = ends - phase.ends[chunk, run.first - 1]
        return do(chunk, tensor_RM, RowGroups(sizes[run.first : run.last], ends, run.call.is_grouped), **options)


def _ranges(phase: PhaseRows) -> list[list[tuple[int, int]]]:
    """Of each chunk the [start, stop) of each expert's rows among all that it has in a call."""
    starts = [0] * len(phase.chunks[0].of_experts)
    found = []
    for chunk in phase.chunks:
        stops = [start + size for start, size in zip(starts, chunk.of_experts, strict=True)]
        found.append(list(zip(starts, stops, strict=True)))
        starts = stops
    return found


def joined_parts(parts: Iterable[torch.Tensor], size: int, dim: int = 1) -> torch.Tensor:
    """Return results of some experts each, [N, k, c, M], as one tensor [N, e, c, M] in new memory. A part goes before
    the next is made.

    Args:
        parts: along the dimension one behind the other.
        size: of the dimension in the whole.
        dim: the dimension of experts, or of the rows of all of them.
    """
    whole: Any = None
    first = 0
    for part in parts:
        if whole is None:
            whole = part.new_empty(*part.shape[:dim], size, *part.shape[dim + 1 :])
        elif part.dtype != whole.dtype:
            whole = whole.to(torch.promote_types(part.dtype, whole.dtype))
        whole.narrow(dim, first, part.shape[dim]).copy_(part)
        first += part.shape[dim]
        del part
    return whole
