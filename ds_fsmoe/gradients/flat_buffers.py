# SPDX-License-Identifier: Apache-2.0
"""Puts gradients end to end in one buffer, so that any stretch of them can travel as one message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.execution.node_links import NodeLinks
from ds_fsmoe.gradients.beside import Beside
from ds_fsmoe.gradients.ways import (
    AllReduce,
    AllReduceByNodes,
    ReduceScatter,
    ReduceScatterByNodes,
    Steps,
    Stretch,
    Way,
)
from ds_fsmoe.planning.gradient_plan import ALIGNED_ELEMENTS, BufferReadiness
from ds_fsmoe.planning.schedule import GRAD

MOST_PIECES, PIECE_NUMEL = 8, 1 << 16
"""A message in two levels travels in up to so many pieces beside the caller, of so many elements at the least: while
one is between nodes, the next is added up inside."""

Owners = Callable[[nn.Parameter], Sequence[tuple[int, int]] | None]
"""A parameter to its elements in memory, as (how many, which rank of the group updates them); ``None``: they cannot be
told apart."""


@dataclass(frozen=True)
class Scaling:
    """Scales a message so that a sum over ranks becomes the gradient wanted; both functions work in place."""

    before: Callable[[torch.Tensor], object] | None = None
    after: Callable[[torch.Tensor], object] | None = None


class FlatGradients:
    """Holds the gradients that travel over one group in one type.

    Args:
        kind: the planner's GRAD or EXPERT_GRAD.
        parameters: the parameters in the order of their gradients in the buffer; all on one device.
        dtype: the type on the wire.
        group: the ranks that are summed over, for this traffic alone.
        scaling: what is done before and after the sum.
        extra: the number of elements at the end that belong to no parameter, and are not scaled.
        beside: runs started reductions beside the caller; ``None``: they are sent in its stream.
        nodes: the ranks node by node, where they can be added up in two levels.
        owners: tells who needs which elements; ``None``: everybody all of them. What a rank does not own is not the
            sum then.
    """

    def __init__(
        self,
        kind: str,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        scaling: Scaling,
        device: torch.device,
        extra: int = 0,
        beside: Beside | None = None,
        nodes: NodeLinks | None = None,
        owners: Owners | None = None,
    ) -> None:
        self.kind = kind
        self._beside = beside
        self.nodes = nodes
        self._owners = owners
        self.group = group
        self._scaling = scaling
        self.numel = sum(each.numel() for each in parameters)
        self._in_one_message = nodes is None and owners is None
        together = torch.zeros(self.numel + extra, dtype=dtype, device=device)
        self._buffer = together if self._in_one_message else together[: self.numel].clone()
        self.extra = together[self.numel :] if self._in_one_message else together[self.numel :].clone()
        self._given = tuple(parameters)
        self.arrange(parameters)

    @property
    def dtype(self) -> torch.dtype:
        """The type on the wire."""
        return self._buffer.dtype

    @property
    def device(self) -> torch.device:
        """The device of the buffer."""
        return self._buffer.device

    @property
    def element_bytes(self) -> int:
        """The bytes of one gradient element on the wire."""
        return self._buffer.element_size()

    def arrange(self, parameters: Sequence[nn.Parameter], in_levels: bool = False) -> None:
        """Put gradients in another order. The contents of the buffer are lost.

        Args:
            parameters: the same ones in that order.
            in_levels: whether they are added up inside nodes first, and then between them.
        """
        self.parameters = tuple(parameters)
        self.starts: list[int] = []
        """The index at which each parameter's gradient begins."""
        at = 0
        for each in self.parameters:
            self.starts.append(at)
            at += each.numel()
        self.way = self.way_in(in_levels)
        """The way in which stretches are added up."""
        self._steps: dict[tuple[int, int], Steps] = {}

    @cached_property
    def _owned(self) -> dict[int, Sequence[tuple[int, int]]] | None:
        if self._owners is None:
            return None
        found = {id(each): self._owners(each) for each in self.parameters}
        return None if any(each is None for each in found.values()) else found

    def way_in(self, in_levels: bool) -> Way:
        """Return how stretches would be added up in one level or, where that can be, in two."""
        nodes = self.nodes if in_levels else None
        if self._owned is None:
            return AllReduce(self.group) if nodes is None else AllReduceByNodes(nodes)
        stretches, at = [], 0
        for parameter in self.parameters:
            for numel, owner in self._owned[id(parameter)]:
                stretches.append(Stretch(at, at + numel, owner))
                at += numel
        return ReduceScatter(self.group, stretches) if nodes is None else ReduceScatterByNodes(nodes, stretches)

    def reducing(self, task: str, way: Way | None = None) -> Callable[[int], Callable[[], object]]:
        """Return what makes ready to measure a task: of a stretch of so many elements, at present or in another way."""

        def prepare(numel: int) -> Callable[[], object]:
            return (way or self.way).alone(task, torch.zeros(numel, dtype=self.dtype, device=self.device))

        return prepare

    def readiness(self, ready_of: Callable[[nn.Parameter], int], num_windows: int) -> BufferReadiness:
        """Return how much there is before each window, if ``ready_of`` tells ahead of which one a gradient comes."""
        ready = tuple(
            sum(each.numel() for each in self.parameters if ready_of(each) <= window) for window in range(num_windows)
        )
        ends = accumulate(each.numel() for each in self.in_order(ready_of))
        return BufferReadiness(self.kind, self.element_bytes, ready, self.numel, tuple(ends))

    def in_order(self, ready_of: Callable[[nn.Parameter], int]) -> list[nn.Parameter]:
        """Return the parameters in the order in which their gradients come, those of one window spread over owners."""
        in_order = sorted(self._given, key=ready_of)
        return [each for _, those in groupby(in_order, ready_of) for each in self.spread(list(those))]

    def spread(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return parameters in an order in which those of one owner do not come all at once."""
        if self._owned is None:
            return list(parameters)
        of_owner: dict[int, list[nn.Parameter]] = {}
        for each in parameters:
            of_owner.setdefault(self._owned[id(each)][0][1], []).append(each)
        placed = []
        for owner, own in of_owner.items():
            total, before = sum(each.numel() for each in own), 0
            for each in own:
                placed.append((before / total, owner, each))
                before += each.numel()
        return [each for _, _, each in sorted(placed, key=lambda place: place[:2])]

    def value(self, index: int) -> torch.Tensor:
        """Return the gradient of a parameter in the buffer: [numel]."""
        start = self.starts[index]
        return self._buffer[start : start + self.parameters[index].numel()]

    def place(self, index: int) -> torch.Tensor:
        """Return the gradient in the shape of the parameter and its layout in memory."""
        return _laid_out(self.value(index), self.parameters[index])

    def add(self, index: int, late: torch.Tensor | None) -> None:
        """Reduce what arrived of a gradient after its place was sent, ``None`` for nothing, and add it there."""
        place = self.value(index)
        message = torch.zeros_like(place)
        if late is not None:
            _laid_out(message, self.parameters[index]).copy_(late)
        self._reduce(message)
        place.add_(message)

    def tasks(self, first: int, stop: int) -> tuple[str, ...]:
        """Return the kinds of tasks that reduce elements [first, stop), in their order; the same on every rank."""
        return tuple(self.kind if each == GRAD else each for each in self._prepared(first, stop))

    def send(self, first: int, stop: int, task: str) -> None:
        """Do one of the tasks that reduce elements [first, stop), in the calling thread and on its current stream."""
        steps = self._prepared(first, stop)
        kinds = tuple(steps)
        kind = GRAD if task == self.kind else task
        if kind == kinds[0]:
            self._scale(self._buffer[first:stop])
        steps[kind]()
        if kind == kinds[-1]:
            self._finish(self._buffer[first:stop])

    def _prepared(self, first: int, stop: int) -> Steps:
        """Return what its tasks do; a stretch of the plan is the same in every round."""
        if (first, stop) not in self._steps:
            self._steps[first, stop] = self.way.steps(self._buffer, first, stop)
        return self._steps[first, stop]

    def _reduce(self, gradients: torch.Tensor) -> None:
        self._scale(gradients)
        with waiting("gradients that came late"):
            dist.all_reduce(gradients, group=self.group)
        self._finish(gradients)

    def start(self, first: int, stop: int, with_extra: bool = False) -> Callable[[], None]:
        """Begin to reduce elements [first, stop); return a function that waits for the end, for the same thread.

        Args:
            first, stop: the range of the gradients.
            with_extra: whether the extra elements follow them in the same message.
        """
        gradients = self._buffer[first:stop]
        self._scale(gradients)
        waits: list[Callable[[], object]] = []

        def all_reduce(message: torch.Tensor) -> None:
            with waiting("the reduction of gradients"):
                work = dist.all_reduce(message, group=self.group, async_op=self._beside is not None)
            waits.extend([] if work is None else [work.wait])

        if self._in_one_message:
            all_reduce(self._buffer[first:] if with_extra else gradients)
        else:
            for piece in self._pieces(first, stop):
                self._run(self._prepared(*piece), waits)
            if with_extra and len(self.extra):
                # Behind what ranks of this group are sending, on the same lane.
                extra = AllReduce(self.group).steps(self.extra, 0, len(self.extra))
                self._run(extra, waits)

        def wait() -> None:
            with waiting("the reduction of gradients"):
                for each in waits:
                    each()
            self._finish(gradients)

        return wait

    def _run(self, steps: Steps, waits: list[Callable[[], object]]) -> None:
        """Begin with a message, or send it."""
        if self._beside is not None:
            waits.append(self._beside.start(steps))
            return
        with waiting("the reduction of gradients"):
            for step in steps.values():
                step()

    def _pieces(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Return the pieces in which a message travels; the same on every rank."""
        count = min(MOST_PIECES, (stop - first) // PIECE_NUMEL) if len(self.way.most_kinds) > 1 else 1
        if count < 2:
            return [(first, stop)] if stop > first else []
        each = -(-(stop - first) // count // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS
        return [(at, min(stop, at + each)) for at in range(first, stop, each)]

    def _scale(self, gradients: torch.Tensor) -> None:
        if self._scaling.before is not None:
            self._scaling.before(gradients)

    def _finish(self, gradients: torch.Tensor) -> None:
        if self._scaling.after is not None:
            self._scaling.after(gradients)


def _laid_out(values: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return [numel] values in autograd's layout of a gradient: fused optimizers go through memory, not by index."""
    if parameter.is_contiguous():
        return values.view(parameter.shape)
    strides = torch.empty_like(parameter, device="meta").stride()
    return values.as_strided(parameter.shape, strides, values.storage_offset())
