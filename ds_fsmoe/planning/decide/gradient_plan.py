# SPDX-License-Identifier: Apache-2.0
"""Assigns gradient slices to windows of the backward, as data that is the same on every rank. The engine's gradient
buffers carry it out; :mod:`~ds_fsmoe.planning.decide.gradients` makes plans from predicted times.

A window opens with the backward of each MoE layer and has two parts. One is inside the layer's schedule (``moe``). The
other is concurrent with the operations up to the next MoE layer (``dense``). Gradients in no window are sent after the
backward.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ds_fsmoe.planning.chunks import micro_op_ends, num_micro_ops
from ds_fsmoe.planning.decide.gradients import Mode

# Where a slice begins in its buffer, which is itself aligned to more: at 256 bytes or 512, so that NCCL loads 16 bytes
# at a time and can let NVLink's switches add up.
ALIGNED_ELEMENTS = 128
# Latency dominates a smaller buffer, however it is split, and an aligned slice would be too large a part of it.
_SMALL_ELEMENTS = 64 * ALIGNED_ELEMENTS


@dataclass(frozen=True, slots=True)
class GradientSlice:
    """Describes a range of one of the buffers, sent as one message.

    A plan for the whole model knows bytes only (:class:`~ds_fsmoe.planning.block.Slice`), because it is made before
    buffers exist. This slice says where in a buffer those bytes are.
    """

    kind: str
    """The planner's kind of gradient: GRAD or EXPERT_GRAD."""
    flat: int
    """The index of the buffer."""
    first: int
    stop: int


@dataclass(frozen=True)
class BufferReadiness:
    """Describes a gradient buffer for the planner: how many elements exist at each window, where it may be split."""

    kind: str
    element_bytes: int
    ready: tuple[int, ...]
    """Window -> how many elements, counted from the start, exist when it opens; it never falls."""
    numel: int
    tensor_ends: tuple[int, ...] = ()
    """Where each tensor ends, ascending, the last at ``numel``; empty: it is one tensor."""

    @property
    def step(self) -> int:
        """Return the granularity in elements: slices end at a multiple of it, or at the end of the buffer."""
        return 1 if self.numel < _SMALL_ELEMENTS else ALIGNED_ELEMENTS

    def end(self, stop: int) -> int:
        """Return the last allowed end of a slice at or before ``stop``. The remainder goes with the next slice."""
        return stop if stop >= self.numel else stop // self.step * self.step

    def micro_ops(self, chunk_bytes: int) -> list[int]:
        """Return the ends of slices of single tensors, ascending. Those of a tensor are as equal as steps allow.

        Args:
            chunk_bytes: the bytes of a slice, to within a step.
        """
        found, first = [0], 0
        for end in self.tensor_ends or (self.numel,):
            count = min(end - first, num_micro_ops((end - first) * self.element_bytes, chunk_bytes))
            ends = [self.end(first + each) for each in micro_op_ends(end - first, count)] if count else []
            # A tensor's own end need not be a whole step.
            found += dict.fromkeys(each for each in (*ends[:-1], end) if each > found[-1])
            first = end
        return found[1:]


@dataclass(frozen=True)
class GradientPlan:
    """Holds the gradient slices of every window.

    Raises:
        ValueError: a buffer is not sent exactly once, from start to end.
    """

    moe: tuple[tuple[GradientSlice, ...], ...]
    dense: tuple[tuple[GradientSlice, ...], ...]
    sizes: tuple[int, ...]
    """The number of elements of each buffer."""
    two_levels: tuple[bool, ...] = ()
    """Of each buffer, whether it is added up inside nodes first, and then between them; none where nothing is."""

    def __post_init__(self) -> None:
        sent = [0] * len(self.sizes)
        for grad_slices in self.parts:
            for each in grad_slices:
                if each.first != sent[each.flat] or not each.first < each.stop <= self.sizes[each.flat]:
                    raise ValueError(f"{each} does not continue at element {sent[each.flat]} of its buffer")
                sent[each.flat] = each.stop

    @property
    def parts(self) -> tuple[tuple[GradientSlice, ...], ...]:
        """Return the slices in sending order: inside the first layer, after it, inside the second, ..."""
        return tuple(grad_slices for window in zip(self.moe, self.dense, strict=True) for grad_slices in window)

    def is_in_levels(self, flat: int) -> bool:
        """Return True if a buffer is reduced inside nodes first, and then between them."""
        return flat < len(self.two_levels) and self.two_levels[flat]

    @property
    def num_windows(self) -> int:
        """Return the number of MoE layers whose backward the plan expects."""
        return len(self.moe)

    def hidden(self) -> int:
        """Return the number of elements that are sent in windows."""
        return sum(each.stop - each.first for grad_slices in self.parts for each in grad_slices)


def plan_by_rule(readiness: Sequence[BufferReadiness], mode: Mode, chunk_bytes: int) -> GradientPlan:
    """Return a plan by a fixed rule, for the case that window lengths were not measured.

    ``adaptive`` gives each remaining window the same share of the existing gradients. ``fixed_chunk`` gives each window
    one slice of ``chunk_bytes`` from each buffer (at least :attr:`BufferReadiness.step` elements). ``dense_only`` gives
    all existing gradients to the dense windows. ``micro_ops`` gives each dense window the oldest slice of a tensor, so
    that the next all-to-all waits for one slice at most. Slices end at whole steps.

    Args:
        readiness: the readiness of the buffers.
        mode: any mode but "off".
        chunk_bytes: the slice size for ``fixed_chunk`` and ``micro_ops``.

    Raises:
        ValueError: the mode is unknown.
    """
    num_windows = max((len(each.ready) for each in readiness), default=0)
    if mode == "micro_ops":
        return plan_micro_ops(readiness, [(0.0, 1.0)] * num_windows, lambda each: 1.0, chunk_bytes)
    if mode not in ("adaptive", "fixed_chunk", "dense_only"):
        raise ValueError(f"mode = {mode!r}: the choices are adaptive, fixed_chunk, dense_only, micro_ops")
    sent = [0] * len(readiness)
    moe: list[tuple[GradientSlice, ...]] = []
    dense: list[tuple[GradientSlice, ...]] = []
    for window in range(num_windows):
        grad_slices: list[GradientSlice] = []
        for index, supply in enumerate(readiness):
            there = supply.ready[window] - sent[index]
            if mode == "adaptive":
                count = -(-there // (num_windows - window))
            elif mode == "fixed_chunk":
                count = min(there, max(supply.step, chunk_bytes // supply.element_bytes))
            else:
                count = there
            stop = supply.end(sent[index] + count)
            if stop > sent[index]:
                grad_slices.append(GradientSlice(supply.kind, index, sent[index], stop))
                sent[index] = stop
        beside = mode == "dense_only"
        moe.append(() if beside else tuple(grad_slices))
        dense.append(tuple(grad_slices) if beside else ())
    return GradientPlan(tuple(moe), tuple(dense), tuple(each.numel for each in readiness))


@dataclass(frozen=True, slots=True)
class WindowBytes:
    """Holds the slices that a planner wants to send in one window: (kind of gradient, bytes) of each."""

    moe: tuple[tuple[str, float], ...] = ()
    dense: tuple[tuple[str, float], ...] = ()


def plan_by_bytes(readiness: Sequence[BufferReadiness], windows: Sequence[WindowBytes]) -> GradientPlan:
    """Return a plan with the slice sizes of a planner, limited to the gradients that exist by then.

    Args:
        readiness: the readiness of the buffers.
        windows: the windows in the order of the backward; missing ones send nothing.
    """
    num_windows = max((len(each.ready) for each in readiness), default=0)
    sent = [0] * len(readiness)

    def take(slices: Sequence[tuple[str, float]], window: int) -> tuple[GradientSlice, ...]:
        grad_slices = []
        for kind, size_bytes in slices:
            for index, supply in enumerate(readiness):
                if supply.kind != kind or size_bytes < supply.element_bytes:
                    continue
                first = sent[index]
                count = min(int(size_bytes) // supply.element_bytes, supply.ready[window] - first)
                stop = supply.end(first + count)
                if stop > first:
                    grad_slices.append(GradientSlice(supply.kind, index, first, stop))
                    sent[index] = stop
                    size_bytes -= (stop - first) * supply.element_bytes
        return tuple(grad_slices)

    moe, dense = [], []
    for window in range(num_windows):
        wanted = windows[window] if window < len(windows) else WindowBytes()
        moe.append(take(wanted.moe, window))
        dense.append(take(wanted.dense, window))
    return GradientPlan(tuple(moe), tuple(dense), tuple(each.numel for each in readiness))


def never_above(plan: GradientPlan, readiness: Sequence[BufferReadiness], most: int) -> GradientPlan:
    """Return a plan that keeps at most ``most`` elements of a buffer waiting.

    Where more would wait, all existing elements of the buffer are sent in the dense window. So a rank need not hold
    gradients for longer that other ranks update.

    Args:
        plan: the slices with their latest windows.
        readiness: the readiness of the buffers.
        most: the largest number of waiting elements of a buffer.
    """
    sent = [0] * len(readiness)

    def left(grad_slices: Sequence[GradientSlice]) -> list[GradientSlice]:
        found = []
        for each in grad_slices:
            if each.stop > sent[each.flat]:
                found.append(replace(each, first=sent[each.flat]))
                sent[each.flat] = each.stop
        return found

    moe, dense = [], []
    for window in range(plan.num_windows):
        moe.append(tuple(left(plan.moe[window])))
        beside = left(plan.dense[window])
        for index, supply in enumerate(readiness):
            stop = supply.end(supply.ready[window])
            if stop - sent[index] > most:
                beside += left([GradientSlice(supply.kind, index, sent[index], stop)])
        dense.append(tuple(beside))
    return replace(plan, moe=tuple(moe), dense=tuple(dense))


def plan_micro_ops(
    readiness: Sequence[BufferReadiness],
    window_bytes: Sequence[tuple[float, float]],
    cost_of: Callable[[GradientSlice], float],
    chunk_bytes: int,
) -> GradientPlan:
    """Return a plan whose slices each hold a part of one tensor, the oldest first (Lina, sections 4.2 and 6.1).

    Args:
        readiness: the readiness of the buffers.
        window_bytes: for each window in the order of the backward, its capacity (inside the layer, after it), in the
            unit of ``cost_of``. A slice is sent where those before it left capacity. Missing windows have none.
        cost_of: the capacity that a slice uses.
        chunk_bytes: the bytes of a slice.
    """
    num_windows = max((len(each.ready) for each in readiness), default=0)
    ends = [each.micro_ops(chunk_bytes) for each in readiness]
    # A slice exists from the first window on that finds its end there; in no window it is left for the end.
    oldest = sorted(
        (bisect_left(supply.ready, end), index, place)
        for index, supply in enumerate(readiness)
        for place, end in enumerate(ends[index])
    )
    parts: list[tuple[tuple[GradientSlice, ...], ...]] = []
    at = 0
    for window in range(num_windows):
        num_there = bisect_right(oldest, window, key=lambda each: each[0])
        of_window = []
        for left in window_bytes[window] if window < len(window_bytes) else (0.0, 0.0):
            grad_slices: list[GradientSlice] = []
            while at < num_there and left > 0:
                _, index, place = oldest[at]
                first = ends[index][place - 1] if place else 0
                grad_slices.append(GradientSlice(readiness[index].kind, index, first, ends[index][place]))
                left -= cost_of(grad_slices[-1])
                at += 1
            of_window.append(tuple(grad_slices))
        parts.append(tuple(of_window))
    moe, dense = (tuple(each[part] for each in parts) for part in (0, 1))
    return GradientPlan(moe, dense, tuple(each.numel for each in readiness))
