# SPDX-License-Identifier: Apache-2.0
"""Numbers gradients from end to end, so that any stretch of them can be sent as one message.

Each gradient keeps its own memory. ``reduction`` makes these buffers, ``reducer`` fills and sends them, and
``reduction_algorithms`` adds them up over ranks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.execution.node_links import NodeLinks
from ds_fsmoe.gradients.background_lane import BackgroundLane
from ds_fsmoe.gradients.reduction_algorithms import (
    MOST_NUMEL,
    AllReduce,
    AllReduceByNodes,
    Range,
    ReduceScatter,
    ReduceScatterByNodes,
    ReductionAlgorithm,
    Steps,
    Stretch,
)
from ds_fsmoe.planning.decide.gradient_plan import ALIGNED_ELEMENTS, BufferReadiness
from ds_fsmoe.planning.schedule import GRAD

MOST_RANGES, RANGE_NUMEL = 8, 1 << 16
"""A message in two levels travels in up to so many pieces beside the caller, of so many elements at the least: while
one is between nodes, the next is added up inside."""

Owners = Callable[[nn.Parameter], Sequence[tuple[int, int]] | None]
"""A parameter to its elements in memory, as (how many, which rank of the group updates them); ``None``: they cannot be
told apart."""


@dataclass(frozen=True)
class Scaling:
    """Scales a message so that the sum over ranks becomes the wanted gradient; both functions work in place."""

    before: Callable[[torch.Tensor], object] | None = None
    after: Callable[[torch.Tensor], object] | None = None


class FlatGradients:
    """Holds the gradients that are sent over one group in one dtype, from their creation until the sums are read.

    Args:
        kind: the planner's GRAD or EXPERT_GRAD.
        parameters: the parameters in the order of their gradients; all on one device.
        dtype: the communication dtype.
        group: the ranks of the sum, in a communicator for this traffic alone.
        scaling: the scaling before and after the sum.
        beside: the lane that runs reductions concurrently with the caller; ``None``: they are sent in its stream.
        nodes: the ranks node by node, where they can be added up in two levels.
        owners: returns which rank needs which elements; ``None``: every rank needs all. Elements that a rank does not
            own are undefined after the sum.
        is_needed: returns whether this rank needs any of a parameter's sum; other gradients are released when they are
            sent.
        most: the maximum of elements of a message in one level.
    """

    def __init__(
        self,
        kind: str,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        scaling: Scaling,
        device: torch.device,
        background: BackgroundLane | None = None,
        nodes: NodeLinks | None = None,
        owners: Owners | None = None,
        is_needed: Callable[[nn.Parameter], bool] = lambda _: True,
        most: int = MOST_NUMEL,
    ) -> None:
        self.kind = kind
        self._background = background
        self.nodes = nodes
        self._owners = owners
        self.group = group
        self._scaling = scaling
        self.dtype, self.device = dtype, device
        self.numel = sum(each.numel() for each in parameters)
        self.reserve_extra(0)
        self._is_needed = is_needed
        self._most = most
        self._given = tuple(parameters)
        self.arrange(parameters)

    def reserve_extra(self, num_extra: int) -> None:
        """Reserve elements at the end that belong to no parameter and are not scaled."""
        self.extra = torch.zeros(num_extra, dtype=self.dtype, device=self.device)

    @property
    def element_bytes(self) -> int:
        """Return the bytes of one gradient element in the communication dtype."""
        return self.dtype.itemsize

    def arrange(self, parameters: Sequence[nn.Parameter], in_levels: bool = False) -> None:
        """Reorder the gradients; the buffer holds none at that time.

        Args:
            parameters: the same parameters in the new order.
            in_levels: True if they are added up inside nodes first, and then between them.
        """
        self.parameters = tuple(parameters)
        self.starts = [*accumulate((each.numel() for each in parameters), initial=0)][:-1]
        """The index at which each parameter's gradient begins."""
        self.algorithm = self.algorithm_in(in_levels)
        """The way in which stretches are added up."""
        self._steps: dict[tuple[int, int], Steps] = {}
        self.release()

    def release(self) -> None:
        """Release all gradients."""
        self._reduced: list[torch.Tensor | None] = [None] * len(self.parameters)
        self._addresses: set[int] = set()

    def release_sent(self, first: int, stop: int) -> None:
        """Release gradients that this rank does not need and that end in [first, stop)."""
        for index in self._between(first, stop):
            ends = self.starts[index] + self.parameters[index].numel()
            if first < ends <= stop and not self._is_needed(self.parameters[index]):
                self.release_gradient(index)

    def _between(self, first: int, stop: int) -> range:
        """Return the parameters that may have any of the elements [first, stop)."""
        return range(max(0, bisect_right(self.starts, first) - 1), bisect_left(self.starts, stop))

    def release_gradient(self, index: int) -> None:
        """Release the gradient of a parameter."""
        held = self._reduced[index]
        if held is not None:
            self._addresses.discard(held.data_ptr())
            self._reduced[index] = None

    @cached_property
    def _owned(self) -> dict[int, Sequence[tuple[int, int]]] | None:
        if self._owners is None:
            return None
        found = {id(each): self._owners(each) for each in self.parameters}
        return None if any(each is None for each in found.values()) else found

    def algorithm_in(self, in_levels: bool) -> ReductionAlgorithm:
        """Return the algorithm that would add up stretches in one level or, where possible, in two."""
        nodes = self.nodes if in_levels else None
        if self._owned is None:
            return AllReduce(self.group, self._most) if nodes is None else AllReduceByNodes(nodes)
        stretches, at = [], 0
        for parameter in self.parameters:
            for numel, owner in self._owned[id(parameter)]:
                stretches.append(Stretch(at, at + numel, owner))
                at += numel
        if nodes is not None:
            return ReduceScatterByNodes(nodes, stretches)
        return ReduceScatter(self.group, stretches, self._most)

    def reducing(self, task: str, algorithm: ReductionAlgorithm | None = None) -> Callable[[int], Callable[[], object]]:
        """Return a function that prepares the measurement of a task: of a stretch of so many elements, by the current
        or another algorithm."""

        def prepare(numel: int) -> Callable[[], object]:
            return (algorithm or self.algorithm).alone(task, torch.zeros(numel, dtype=self.dtype, device=self.device))

        return prepare

    def readiness(self, ready_of: Callable[[nn.Parameter], int], num_windows: int) -> BufferReadiness:
        """Return how many elements exist before each window; ``ready_of`` returns the window before which a gradient
        comes."""
        ready = tuple(
            sum(each.numel() for each in self.parameters if ready_of(each) <= window) for window in range(num_windows)
        )
        ends = accumulate(each.numel() for each in self.in_order(ready_of))
        return BufferReadiness(self.kind, self.element_bytes, ready, self.numel, tuple(ends))

    def in_order(self, ready_of: Callable[[nn.Parameter], int]) -> list[nn.Parameter]:
        """Return the parameters in the order in which their gradients come; those of one window are spread over
        owners."""
        in_order = sorted(self._given, key=ready_of)
        return [each for _, those in groupby(in_order, ready_of) for each in self.spread(list(those))]

    def spread(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return parameters with those of different owners interleaved evenly, so that no owner's follow in a block."""
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

    def take(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Store a gradient of the communication dtype; return the tensor that has it from now on.

        This is the same tensor unless it shares memory, or its layout differs from the parameter's.
        """
        parameter = self.parameters[index]
        is_alone = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
        is_alone = is_alone and gradient.data_ptr() not in self._addresses
        if parameter.is_contiguous():
            is_laid_out = gradient.is_contiguous()
        else:
            is_laid_out = gradient.stride() == torch.empty_like(parameter, device="meta").stride()
        if is_alone and is_laid_out:
            self.release_gradient(index)
            self._reduced[index] = gradient.detach().as_strided((gradient.numel(),), (1,))
            self._addresses.add(gradient.data_ptr())
            return gradient
        place = self.place(index)
        place.copy_(gradient)
        return place

    def holds(self, index: int, gradient: torch.Tensor) -> bool:
        """Return True if a gradient is the one in the buffer."""
        held = self._reduced[index]
        return held is not None and held.data_ptr() == gradient.data_ptr()

    def value(self, index: int) -> torch.Tensor:
        """Return the gradient of a parameter, [numel]; zeros if the buffer has none."""
        held = self._reduced[index]
        if held is None:
            held = torch.zeros(self.parameters[index].numel(), dtype=self.dtype, device=self.device)
            self._reduced[index] = held
            self._addresses.add(held.data_ptr())
        return held

    def place(self, index: int) -> torch.Tensor:
        """Return the buffer's gradient of parameter ``index`` as a view in the parameter's shape and layout."""
        return _laid_out(self.value(index), self.parameters[index])

    def packed(self, ranges: Sequence[Range]) -> torch.Tensor:
        """Return a new tensor with the elements of ranges, one after the other, scaled for the sum."""
        views = [view for each in ranges for view in self._views(*each)]
        message = torch.cat(views) if views else self.extra[:0].clone()
        if self._scaling.before is not None:
            self._scaling.before(message[: self._num_gradients(ranges)])
        return message

    def put(self, ranges: Sequence[Range], sums: torch.Tensor) -> None:
        """Write sums to the ranges that :meth:`packed` has read."""
        if self._scaling.after is not None:
            self._scaling.after(sums[: self._num_gradients(ranges)])
        at = 0
        for view in (view for each in ranges for view in self._views(*each)):
            view.copy_(sums[at : at + len(view)])
            at += len(view)

    def _num_gradients(self, ranges: Sequence[Range]) -> int:
        """Return the number of elements of ranges that are gradients; extra elements come after them."""
        return sum(min(stop, self.numel) - min(first, self.numel) for first, stop in ranges)

    def _views(self, first: int, stop: int) -> list[torch.Tensor]:
        """Return elements [first, stop) as tensors; extra elements follow the gradients."""
        found = []
        for index in self._between(first, stop):
            start, value = self.starts[index], self.value(index)
            if first < start + len(value):
                found.append(value[max(0, first - start) : stop - start])
        if stop > self.numel:
            found.append(self.extra[max(0, first - self.numel) : stop - self.numel])
        return found

    def add(self, index: int, late: torch.Tensor | None) -> None:
        """Reduce the late part of a gradient, ``None`` for none, and add it to the part that was sent."""
        message = torch.zeros(self.parameters[index].numel(), dtype=self.dtype, device=self.device)
        if late is not None:
            _laid_out(message, self.parameters[index]).copy_(late)
        if self._scaling.before is not None:
            self._scaling.before(message)
        with waiting("gradients that came late"):
            dist.all_reduce(message, group=self.group)
        if self._scaling.after is not None:
            self._scaling.after(message)
        if self._is_needed(self.parameters[index]):
            self.value(index).add_(message)

    def tasks(self, first: int, stop: int) -> tuple[str, ...]:
        """Return the kinds of tasks that reduce elements [first, stop), in their order; the same on every rank."""
        return tuple(self.kind if each == GRAD else each for each in self._prepared(first, stop))

    def send(self, first: int, stop: int, task: str) -> None:
        """Run one of the tasks that reduce elements [first, stop), in the calling thread and on its current stream."""
        self._prepared(first, stop)[GRAD if task == self.kind else task]()

    def _prepared(self, first: int, stop: int) -> Steps:
        """Return the functions of the tasks of a stretch; a planned stretch is the same in every round."""
        if (first, stop) not in self._steps:
            self._steps[first, stop] = self.algorithm.steps(self, first, stop)
        return self._steps[first, stop]

    def start(self, first: int, stop: int, with_extra: bool = False) -> Callable[[], None]:
        """Begin to reduce elements [first, stop); return a function that waits for the end, to be called in the same
        thread.

        Args:
            first, stop: the range of the gradients.
            with_extra: whether the extra elements are sent after them, in the same message if all ranks get all sums.
        """
        waits: list[Callable[[], object]] = []
        extra = len(self.extra) if with_extra else 0
        in_one_message = isinstance(self.algorithm, AllReduce)
        for piece in self._ranges(first, stop + extra * in_one_message):
            self._run(self._prepared(*piece), waits)
        if extra and not in_one_message:
            # Behind what ranks of this group are sending, on the same lane.
            self._run(AllReduce(self.group).steps(self, self.numel, self.numel + extra), waits)

        def wait() -> None:
            with waiting("the reduction of gradients"):
                for each in waits:
                    each()

        return wait

    def _run(self, steps: Steps, waits: list[Callable[[], object]]) -> None:
        """Begin a message in the background lane, or send it."""
        if self._background is not None:
            waits.append(self._background.start(steps))
            return
        with waiting("the reduction of gradients"), torch.no_grad():
            for step in steps.values():
                step()

    def _ranges(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Return the ranges in which a message is sent; the same on every rank."""
        count = min(MOST_RANGES, (stop - first) // RANGE_NUMEL) if len(self.algorithm.most_kinds) > 1 else 1
        if count < 2:
            return [(first, stop)] if stop > first else []
        each = -(-(stop - first) // count // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS
        return [(at, min(stop, at + each)) for at in range(first, stop, each)]


def _laid_out(values: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return [numel] values in autograd's layout of a gradient: fused optimizers read memory in order, not by index."""
    if parameter.is_contiguous():
        return values.view(parameter.shape)
    strides = torch.empty_like(parameter, device="meta").stride()
    return values.as_strided(parameter.shape, strides, values.storage_offset())
