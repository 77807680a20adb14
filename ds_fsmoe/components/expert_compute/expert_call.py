# SPDX-License-Identifier: Apache-2.0
"""The experts of one rank in one forward call of a layer, computed chunk by chunk.

The pipeline of a layer calls :meth:`ExpertCall.forward` and :meth:`ExpertCall.backward` for each chunk. This module
splits chunks by expert; ``written_call`` and ``autograd_call`` compute them.

A chunk has slots, equally many of each expert, or rows, as many of each expert as tokens chose it. The rows of a chunk
are sorted by expert, and within an expert by segment of the tokens. So all rows of an expert in a call are one run. A
chunk of either phase is a range of it. An expert that is computed alone is computed as on slots.

Letters: N ranks the rows came from, e experts on this rank, k of them together, C slots per expert, c a chunk of them,
R rows of a chunk, M width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ds_fsmoe.components.expert_compute.autograd_call import AutocastState
from ds_fsmoe.components.expert_compute.gradient_sums import GradientSums
from ds_fsmoe.components.expert_compute.grouped_products import RowGroups
from ds_fsmoe.components.expert_compute.linears import RowWeights

if TYPE_CHECKING:
    from ds_fsmoe.components.expert_compute.autograd_call import AutogradCall
    from ds_fsmoe.components.expert_compute.written_call import WrittenCall


class PhaseRows(Protocol):
    """Holds the sizes of one phase of a call on rows."""

    @property
    def places(self) -> Sequence[int]:
        """Return the first row of each chunk, and last the number of all rows."""

    @property
    def of_experts(self) -> Sequence[list[int]]:
        """Return the number of rows of each of e experts, chunk by chunk."""

    @property
    def ends(self) -> torch.Tensor:
        """Return the end of the rows of each expert in each chunk, [chunks, e] int32."""


class CallRows(Protocol):
    """Holds the sizes of a call on rows."""

    @property
    def forward(self) -> PhaseRows:
        """Return the sizes of the forward."""

    @property
    def backward(self) -> PhaseRows:
        """Return the sizes of the backward; the same object where the chunks are the same."""

    @property
    def expert_order(self) -> torch.Tensor | None:
        """Return the number in the forward's chunks of each row in the backward's chunks, [rows] int64."""


def sizes_of_call(sizes: Sequence[list[int]], ends: torch.Tensor) -> CallRows:
    """Return the sizes of a call whose backward has the chunks of the forward.

    Args:
        sizes: for each chunk the rows of each expert.
        ends: [chunks, e] int32: the end of the rows of each expert in a chunk.
    """
    places = list(itertools.accumulate(map(sum, sizes), initial=0))
    phase: Any = SimpleNamespace(places=places, of_experts=sizes, ends=ends)
    call: Any = SimpleNamespace(forward=phase, backward=phase, expert_order=None)
    return call


@dataclass(frozen=True)
class ExpertRun:
    """Experts first to last (exclusive) of a rank: a single one, or neighbours that are computed together."""

    first: int
    last: int
    call: WrittenCall | AutogradCall
    is_single: bool
    """Whether it computes one expert, whose slots or rows have no dimension of experts."""


class ExpertCall:
    """Computes the chunks of one forward call; made by :meth:`ExpertSet.call`. It keeps what its backward needs.

    ``forward`` is called for chunks that together contain each slot once. Then ``backward`` is called likewise, with
    the same chunks or others, in any order, and last ``gradients``. A chunk may be empty. Experts are row-wise by law,
    which permits other chunks. Chunks of rows are those that were announced. After ``gradients`` the backward may run
    again.

    Nothing is recorded on the caller's graph, whatever its grad mode. Results are new memory. The rows passed to
    ``forward`` are kept without a copy, and must not be overwritten before the backward.

    Args:
        runs: the experts, single ones or neighbours together.
        sums: the sums of weight gradients.
        autocast: the settings of the call.
        needs_backward: whether to keep anything.
        rows: the sizes of its chunks; ``None``: it has slots.
        settled: returns the final runs for the first slots [N, e, c, M], whose sizes decide.
    """

    def __init__(
        self,
        runs: Sequence[ExpertRun],
        sums: GradientSums,
        autocast: AutocastState,
        needs_backward: bool,
        rows: CallRows | None = None,
        settled: Callable[[torch.Tensor], Sequence[ExpertRun]] | None = None,
    ) -> None:
        self._runs = tuple(runs)
        self._num_experts = self._runs[-1].last
        self._sums = sums
        self._autocast = autocast
        self._needs_backward = needs_backward
        self._settled = settled
        self._phases: dict[str, _PhaseOfRows] = {}
        if rows is not None:
            forward = _PhaseOfRows(rows.forward, self._runs)
            backward = forward if rows.backward is rows.forward else _PhaseOfRows(rows.backward, self._runs)
            self._phases = {"forward": forward, "backward": backward}
        self._num_forward = self._num_backward = 0
        self._returned: list[tuple[int, int]] = []

    @torch.no_grad()
    def forward(self, start: int, stop: int, x: torch.Tensor) -> torch.Tensor:
        """Compute slots [N, e, stop - start, M], or rows [stop - start, M], to the same shape; each slot once.

        Raises:
            ValueError: rows of another shape, slots that were passed before, or an expert that returns another shape.
        """
        y = self._through("forward", start, stop, x.detach())
        self._num_forward += stop - start
        return y

    @torch.no_grad()
    def backward(
        self,
        start: int,
        stop: int,
        dy: torch.Tensor,
        weights_R: torch.Tensor | None = None,
        gradients_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the gradient of the rows, and add to the weights' gradients. Each slot once.

        Args:
            start, stop: of slots; for rows, of the backward's rows.
            dy: the gradient of the results; with weights, that of their weighted sums.
            weights_R: the weights of the results in the sums of their tokens, for rows.
            gradients_R: the memory that the gradients of the weights are added to.

        Raises:
            ValueError: gradients of another shape, or slots that were returned before or never passed the forward.
            RuntimeError: made without ``needs_backward``, or a weight was changed in place since.
        """
        if not self._needs_backward:
            raise RuntimeError("this call kept no tensors for a backward: it was made with needs_backward=False")
        for first, last in self._returned:
            if first < stop and start < last and start < stop and first < last:
                raise ValueError(f"slots [{start}, {stop}) came back twice: [{first}, {last}) came before")
        weights = None if weights_R is None or gradients_R is None else RowWeights(weights_R, gradients_R)
        dx = self._through("backward", start, stop, dy, weights)
        self._returned.append((start, stop))
        self._num_backward += stop - start
        return dx

    def gradients(self) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of each parameter of :attr:`ExpertSet.parameters`, and start over.

        ``None`` where the parameter requires none or no result depends on it.

        Raises:
            RuntimeError: some slots have not passed the backward.
        """
        if self._num_backward != self._num_forward:
            raise RuntimeError(
                f"gradients are incomplete: {self._num_forward} slots went through the forward and "
                f"{self._num_backward} through the backward"
            )
        self._returned, self._num_backward = [], 0
        return self._sums.take()

    def release(self) -> list[torch.Tensor | None]:
        """Return the tensors that are kept for the backward, and drop them, so that autograd can save them.

        Autograd then checks their versions, and hooks can move or drop them (checkpointing, offloading).
        """
        released: list[torch.Tensor | None] = []
        for run in self._runs:
            run.call.forget()
            released += run.call.saved.release()
        return released

    def restore(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Restore the tensors that :meth:`release` returned, ahead of the backward."""
        remaining = iter(tensors)
        for run in self._runs:
            run.call.saved.restore(remaining)

    def rows(self) -> list[torch.Tensor]:
        """Return the restored rows that the experts received, without tensors that the experts computed."""
        return [rows for run in self._runs for rows in run.call.saved.first_of_each()]

    def _through(
        self, way: str, start: int, stop: int, tensor: torch.Tensor, weights: RowWeights | None = None
    ) -> torch.Tensor:
        """Compute slots or rows through the runs' method ``way``, and return the joined results."""
        with self._autocast.restored():
            if self._phases:
                parts = self._of_rows(way, start, stop, tensor, weights)
                return next(parts) if len(self._runs) == 1 else joined_parts(parts, len(tensor), dim=0)
            self._check_slots("rows" if way == "forward" else "gradients", start, stop, tensor)
            if self._settled is not None:
                self._runs, self._settled = tuple(self._settled(tensor)), None
            parts = self._of_slots(way, start, stop, tensor)
            if len(self._runs) == 1 and self._runs[0].call.makes_memory:
                return next(parts).contiguous()
            return joined_parts(parts, self._num_experts)

    def _of_slots(self, way: str, start: int, stop: int, x_NeCM: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the results of each run, [N, k, c, M]."""
        for run in self._runs:
            do = getattr(run.call, way)
            if run.is_single:
                yield do(start, stop, x_NeCM[:, run.first]).unsqueeze(1)
                continue
            x_kNcM = x_NeCM[:, run.first : run.last].transpose(0, 1)
            if not run.call.takes_rows:
                yield do(start, stop, x_kNcM).transpose(0, 1)
                continue
            k, num_ranks, slots, width = x_kNcM.shape
            groups = RowGroups.equal(k, num_ranks * slots, x_kNcM.device, run.call.is_grouped)
            y_RM = do(start, stop, x_kNcM.reshape(-1, width), groups)
            yield y_RM.view(k, num_ranks, slots, y_RM.shape[-1]).transpose(0, 1)

    def _of_rows(
        self, way: str, start: int, stop: int, x_RM: torch.Tensor, weights: RowWeights | None
    ) -> Iterator[torch.Tensor]:
        """Yield the results of each run, rows of [R, M]."""
        phase = self._phases[way]
        if (start, stop) not in phase.chunks or x_RM.shape[0] != stop - start:
            known = ", ".join(f"[{first}, {last})" for first, last in phase.chunks)
            raise ValueError(f"{x_RM.shape[0]} rows for [{start}, {stop}): the chunks are {known}")
        chunk = phase.chunks[start, stop]
        last = 0
        for run, place in zip(self._runs, phase.ranges[chunk], strict=True):
            first, last = last, last + place[1] - place[0]
            part, of_part = x_RM, weights
            if len(self._runs) > 1:
                part, of_part = x_RM[first:last], weights and weights.part(first, last)
            options = {} if of_part is None else {"weights": of_part}
            do = getattr(run.call, way)
            if run.is_single:
                yield do(*place, part.unsqueeze(0), **options)[0]
            else:
                yield do(*place, part, phase.groups(chunk, run), **options)

    def _check_slots(self, what: str, start: int, stop: int, tensor_NeCM: torch.Tensor) -> None:
        shape = tuple(tensor_NeCM.shape)
        if len(shape) != 4 or shape[1] != self._num_experts or shape[2] != stop - start:
            raise ValueError(
                f"{what} of slots [{start}, {stop}) are {shape}: must be [N, {self._num_experts} experts, "
                f"{stop - start} slots, M]"
            )


class _PhaseOfRows:
    """Holds the ranges of each run's rows in the chunks of one phase.

    Args:
        rows: the sizes of the phase.
        runs: the experts.
    """

    def __init__(self, rows: PhaseRows, runs: Sequence[ExpertRun]) -> None:
        self._ends, self._of_experts = rows.ends, rows.of_experts
        chunks = list(itertools.pairwise(rows.places))
        self.chunks = dict(zip(chunks, itertools.count()))
        """[start, stop) of rows -> the number of the chunk; empty chunks at one place share an entry."""
        self.ranges = [[each] for each in chunks] if len(runs) == 1 else _ranges(self._of_experts, runs)
        """For each chunk, the [start, stop) of each run's rows among all rows of the run in a call."""

    def groups(self, chunk: int, run: ExpertRun) -> RowGroups:
        """Return the rows of each of a run's experts in its part of a chunk."""
        ends = self._ends[chunk, run.first : run.last]
        if run.first:
            ends = ends - self._ends[chunk, run.first - 1]
        return RowGroups(self._of_experts[chunk][run.first : run.last], ends, run.call.is_grouped)


def _ranges(of_experts: Sequence[list[int]], runs: Sequence[ExpertRun]) -> list[list[tuple[int, int]]]:
    starts, found = [0] * len(runs), []
    for sizes in of_experts:
        stops = [start + sum(sizes[run.first : run.last]) for start, run in zip(starts, runs, strict=True)]
        found.append(list(zip(starts, stops, strict=True)))
        starts = stops
    return found


def joined_parts(parts: Iterable[torch.Tensor], size: int, dim: int = 1) -> torch.Tensor:
    """Join results of some experts each, [N, k, c, M], into one tensor [N, e, c, M] in new memory.

    A part is freed before the next is computed.

    Args:
        parts: consecutive along the dimension.
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
