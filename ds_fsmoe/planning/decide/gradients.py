# SPDX-License-Identifier: Apache-2.0
"""Decides which gradients are sent in which layer's backward (paper, section 5), in bytes. The planner calls it with
predicted times; :mod:`~ds_fsmoe.planning.decide.gradient_plan` maps bytes to buffers.

Gradients are produced layer by layer and wait in a first-in, first-out queue. The backward passes two windows per
layer, in which gradients can be sent concurrently with the layer's own work. That is free up to a point; beyond it the
layer takes longer. The rest is sent alone at the end. A window only sends what the queue holds by then.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ds_fsmoe.planning.block import Slice
from ds_fsmoe.planning.chunks import MICRO_OP_BYTES, micro_op_ends, num_micro_ops
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.block_times import BlockTimes, Order
from ds_fsmoe.planning.schedule import EXPERT_GRAD, Lane
from ds_fsmoe.untrusted import suggested

CHUNK_BYTES = 30 * 2**20
"""The size of the slices of ``fixed_chunk``: the paper's reading of Lina's 30 MB."""
Mode = Literal["off", "dense_only", "fixed_chunk", "micro_ops", "adaptive"]
MODES: tuple[Mode, ...] = ("off", "dense_only", "fixed_chunk", "micro_ops", "adaptive")
SOLVERS = ("dp", "de")
MOST_SLICES = 100_000
"""The slices of all gradients of a backward, at the most."""


@dataclass(frozen=True, slots=True)
class QueuedGradient:
    """Describes the gradients of one layer and one kind, which wait in the queue."""

    kind: str
    lanes: tuple[Lane, ...]
    size_bytes: int
    cost: LinearCost
    layer: int = -1
    """The layer in the order of the backward; -1: the gradients existed before."""
    tensors_bytes: tuple[int, ...] = ()
    """The bytes of its tensors, in the order in which they exist; empty: it is one tensor."""


@dataclass(frozen=True, slots=True)
class SendWindow:
    """Describes a part of the backward during which gradients can be sent."""

    layer: int
    kind: Literal["moe", "dense"]
    num_slices: int
    """How many pieces of the queue exist when the window opens."""
    extra_ms: Callable[[np.ndarray], np.ndarray]
    """Time of gradients sent in it -> how much longer the layer gets. The function never falls and is 0 for nothing."""
    idle_ms: float = 0.0
    """The time in which no all-to-all waits, or is about to wait, for the link of the gradients."""


@dataclass(frozen=True)
class Partition:
    """Holds the gradient slices that each window sends."""

    slices: tuple[tuple[Slice, ...], ...]
    """The slices of each window, one entry per window."""
    tail: tuple[Slice, ...]
    """The slices that are sent after the backward."""
    extra_ms: float
    """How much longer all layers get, including the tail."""


class _Queue:
    """Holds the gradients end to end, measured by their time to send and divided into equal steps."""

    def __init__(self, pieces: Sequence[QueuedGradient], num_steps: int) -> None:
        self.parts = [each for each in pieces if each.size_bytes > 0]
        lengths = [each.size_bytes * each.cost.beta_ms for each in self.parts]
        # A gradient that costs nothing per byte still has a length, or it could not be told from none.
        shortest = 1e-4 * sum(lengths) or 1e-6
        lengths = [each or shortest for each in lengths]
        self.ends = np.concatenate([[0.0], np.cumsum(lengths)])
        self.num_steps = num_steps if self.parts else 0
        self.step_ms = float(self.ends[-1]) / self.num_steps if self.num_steps else 0.0
        self._counts = np.cumsum([0, *(each.size_bytes > 0 for each in pieces)])
        at_ms = np.arange(self.num_steps + 1) * self.step_ms
        is_expert = [each.kind == EXPERT_GRAD for each in self.parts]
        self.expert_ms = np.interp(at_ms, self.ends, np.concatenate([[0.0], np.cumsum(lengths * np.array(is_expert))]))
        self.alphas_ms = [
            max(
                (each.cost.alpha_ms for each, that in zip(self.parts, is_expert, strict=True) if that is kind),
                default=0.0,
            )
            for kind in (False, True)
        ]
        self.has = [False in is_expert, True in is_expert]

    def num_ready_steps(self, num_slices: int) -> int:
        """Return how many steps of the queue can be sent once the first ``num_slices`` gradients are computed."""
        if not self.num_steps:
            return 0
        return int(self.ends[self._counts[num_slices]] / self.step_ms * (1 + 1e-12) + 1e-9)

    def start_up_ms(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Return the ms to launch the slices between two steps: one launch per kind of gradient in that range."""
        expert_ms = self.expert_ms[last] - self.expert_ms[first]
        tiny = 1e-9 * max(self.step_ms, 1e-300)
        dense_ms = (last - first) * self.step_ms - expert_ms
        return self.alphas_ms[0] * (dense_ms > tiny) + self.alphas_ms[1] * (expert_ms > tiny)

    def kinds_between(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Return the kinds between two steps: 0 for dense gradients only, or if the queue has one kind; 1 for
        experts' gradients only; 2 for both.
        """
        if not all(self.has):
            return np.zeros_like(first)
        tiny = 1e-9 * self.step_ms
        expert_ms = self.expert_ms[last] - self.expert_ms[first]
        dense_ms = (last - first) * self.step_ms - expert_ms
        return np.where(expert_ms <= tiny, 0, np.where(dense_ms <= tiny, 1, 2))

    def slices(self, first: int, last: int) -> tuple[Slice, ...]:
        """Return the slices between two steps, one per kind. Slices of adjacent ranges sum exactly."""
        if first == last:
            return ()
        found: dict[str, Slice] = {}
        # One piece more at either end, as steps and ends of pieces are rounded apart.
        begin, stop = np.searchsorted(self.ends, (first * self.step_ms, last * self.step_ms)).tolist()
        for place in range(max(0, begin - 2), min(stop + 1, len(self.parts))):
            piece, start, end = self.parts[place], self.ends[place], self.ends[place + 1]
            cuts = []
            for step in (first, last):
                share = (step * self.step_ms - start) / (end - start)
                at_end = step == self.num_steps
                cuts.append(piece.size_bytes if at_end else round(piece.size_bytes * min(1.0, max(0.0, share))))
            size_bytes = cuts[1] - cuts[0]
            if size_bytes > 0:
                before = found[piece.kind].size_bytes if piece.kind in found else 0
                found[piece.kind] = Slice(piece.kind, piece.lanes, before + size_bytes, piece.layer)
        return tuple(found.values())

    def partition(self, cuts: Sequence[int], extra_ms: float) -> Partition:
        """Return the partition, given the step up to which each window has emptied the queue."""
        bounds = [0, *cuts]
        slices = tuple(self.slices(a, b) for a, b in zip(bounds, cuts, strict=False))
        return Partition(slices, self.slices(bounds[-1], self.num_steps), extra_ms)

    def tail_ms(self, first: int) -> float:
        """Return the ms to send the rest alone."""
        rest = np.array([first]), np.array([self.num_steps])
        return float(self.start_up_ms(*rest)[0]) + (self.num_steps - first) * self.step_ms


def partition(
    pieces: Sequence[QueuedGradient],
    windows: Sequence[SendWindow],
    mode: Mode,
    *,
    solver: str = "dp",
    chunk_bytes: int | None = None,
    num_steps: int | None = None,
    seed: int = 0,
) -> Partition:
    """Assign gradient slices to every window.

    Args:
        pieces: the queue, in the order in which the gradients are produced.
        windows: the windows, in the order of the backward.
        mode: where to send. "off": all at the end. "dense_only": all that exists in each dense window.
            "fixed_chunk": slices of one size where the link would be idle. "micro_ops": slices of single tensors
            where no all-to-all waits (Lina). "adaptive": slices where they cost least.
        solver: the solver for ``adaptive``: "dp", exact up to the queue's steps, or "de", the paper's two steps with
            differential evolution.
        chunk_bytes: the slice size for ``fixed_chunk`` and ``micro_ops``; ``None``: the mode's default.
        num_steps: the number of steps in the queue; ``None``: 16 to 256 per layer, so that large models stay fast.
        seed: the random seed for "de".

    Raises:
        ValueError: the mode or solver is unknown, or a chunk is below one byte.
    """
    if mode not in MODES:
        raise ValueError(f"gradient_partition.mode = {mode!r}: {suggested(mode, MODES)}")
    check_solver(solver, chunk_bytes)
    if num_steps is not None and num_steps < 1:
        raise ValueError(f"num_steps = {num_steps}: must be at least 1")
    if num_steps is None:
        # Many layers have a step or a few each: time grows with steps times windows.
        num_steps = max(len(pieces), min(4096, max(1, len(pieces)) * max(16, min(256, 2048 // max(1, len(pieces))))))
    queue = _Queue(pieces, num_steps)
    if not queue.parts:
        return Partition(((),) * len(windows), (), 0.0)
    if mode == "off":
        return queue.partition([0] * len(windows), queue.tail_ms(0))
    if mode == "dense_only":
        return _evaluated(queue, windows, _dense_only(queue, windows))
    if mode in ("fixed_chunk", "micro_ops"):
        chunk_bytes = slice_bytes(mode, chunk_bytes)
        _check_number(sum(each.size_bytes for each in pieces), chunk_bytes)
        one_by_one = _of_one_size if mode == "fixed_chunk" else _by_priority
        return one_by_one(pieces, windows, chunk_bytes)
    cuts = _dp(queue, windows) if solver == "dp" else _de(queue, windows, seed)
    return _evaluated(queue, windows, cuts)


def slice_bytes(mode: Mode, asked: int | None) -> int:
    """Return the requested slice size in bytes, or the mode's default if ``asked`` is None."""
    own = MICRO_OP_BYTES if mode == "micro_ops" else CHUNK_BYTES
    return own if asked is None else asked


def check_solver(solver: str, chunk_bytes: int | None) -> None:
    """Check the settings for placing gradients.

    Raises:
        ValueError: the solver is unknown, or a chunk is below one byte.
    """
    if solver not in SOLVERS:
        raise ValueError(f"gradient_partition.solver = {solver!r}: {suggested(solver, SOLVERS)}")
    if chunk_bytes is None:
        return
    if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or chunk_bytes < 1:
        raise ValueError(f"gradient_partition.chunk_bytes = {chunk_bytes}: must be a whole number of at least 1")


def _evaluated(queue: _Queue, windows: Sequence[SendWindow], cuts: Sequence[int]) -> Partition:
    return queue.partition(cuts, _evaluated_ms(queue, windows, cuts))


def _dense_only(queue: _Queue, windows: Sequence[SendWindow]) -> list[int]:
    cuts, sent = [], 0
    for window in windows:
        sent = queue.num_ready_steps(window.num_slices) if window.kind == "dense" else sent
        cuts.append(sent)
    return cuts


def _dp(queue: _Queue, windows: Sequence[SendWindow]) -> list[int]:
    """Return the cheapest cuts of the queue, by dynamic programming over windows and the steps sent so far."""
    steps = queue.num_steps
    best_ms = np.full(steps + 1, np.inf)
    best_ms[0] = 0.0
    choices = []
    # A tie goes to even slices over layers: a millionth favours many small slices over few large ones.
    even_ms = 1e-6 * queue.step_ms * np.arange(steps + 1) ** 2 / steps**2
    two_kinds, kinds_between = all(queue.has), queue.kinds_between
    dense_ms, experts_ms = queue.alphas_ms
    # Of dense gradients, of experts' and of both, or of the one kind that there is.
    of_one = [experts_ms if queue.has[1] else dense_ms]
    alphas_ms = [dense_ms, experts_ms, dense_ms + experts_ms] if two_kinds else of_one
    seen: dict[int, np.ndarray] = {}
    kinds, num_mixed = np.zeros((steps + 1, 0), dtype=np.int8), 0

    for window in windows:
        exists = queue.num_ready_steps(window.num_slices)
        size = np.arange(exists + 1)
        # Equal layers share their function, so a window's prices are asked for once.
        key = id(window.extra_ms)
        if key not in seen:
            seen[key] = np.stack([_prices(window, queue, np.arange(steps + 1), alpha_ms) for alpha_ms in alphas_ms])
        extra_ms = seen[key][:, : exists + 1]
        longest = min(_worth_sending(extra_ms, queue.step_ms), exists)
        # candidates[j, m]: emptied up to j, of which m in this window; nothing is emptied that does not exist.
        padded = np.concatenate([np.full(longest, np.inf), best_ms[: exists + 1]])
        before_ms = np.lib.stride_tricks.sliding_window_view(padded, longest + 1)[:, ::-1]
        if two_kinds:
            if kinds.shape[1] <= longest:
                last = np.arange(steps + 1)[:, None]
                kinds = kinds_between(np.maximum(0, last - size[: longest + 1]), last).astype(np.int8)
                # Behind the longest stretch of one kind there are both; a slice longer than all is none.
                is_one = ((kinds != 2) & (last >= size[: longest + 1])).any(axis=0)
                num_mixed = int(np.flatnonzero(is_one)[-1]) + 1
            total_ms = before_ms + extra_ms[2, : longest + 1]
            few = slice(0, min(num_mixed, longest + 1))
            total_ms[:, few] = before_ms[:, few] + np.choose(kinds[: exists + 1, few], extra_ms[:, None, few])
        else:
            total_ms = before_ms + extra_ms[0, : longest + 1]
        total_ms += even_ms[: longest + 1]
        choice, then_ms = np.zeros(steps + 1, dtype=np.int64), np.full(steps + 1, np.inf)
        choice[: exists + 1] = total_ms.argmin(axis=1)
        then_ms[: exists + 1] = total_ms[np.arange(exists + 1), choice[: exists + 1]]
        if exists == steps and longest < steps:
            # More than is worth while, but all that is left: that saves every later launch.
            first = np.arange(steps + 1)
            rest = kinds_between(first, np.full(steps + 1, steps))
            last_ms = best_ms + extra_ms[rest, steps - first] + even_ms[::-1]
            if last_ms.min() < then_ms[steps]:
                choice[steps] = steps - int(last_ms.argmin())
                then_ms[steps] = last_ms.min()
        best_ms = then_ms
        choices.append(choice)
    first = np.arange(steps + 1)
    rest_ms = queue.start_up_ms(first, np.full(steps + 1, steps)) + (steps - first) * queue.step_ms
    at = int((best_ms + rest_ms + even_ms[::-1]).argmin())
    cuts = []
    for choice in reversed(choices):
        cuts.append(at)
        at -= int(choice[at])
    return cuts[::-1]


def _prices(window: SendWindow, queue: _Queue, size: np.ndarray, alpha_ms: float) -> np.ndarray:
    extra_ms = window.extra_ms(np.where(size > 0, alpha_ms + size * queue.step_ms, 0.0))
    extra_ms[0] = 0.0
    return extra_ms


def _worth_sending(extra_ms: np.ndarray, step_ms: float) -> int:
    """Return the number of steps worth sending. Each further one costs as much as at the very end."""
    rises = np.diff(extra_ms, axis=1) < step_ms * (1 - 1e-9)
    useful = np.flatnonzero(rises.any(axis=0))
    return int(useful[-1]) + 1 if len(useful) else 1


def _free_steps(queue: _Queue, window: SendWindow, first: int, exists: int) -> int:
    """Return the number of steps from ``first`` on that can be sent for free."""
    last = np.arange(first, exists + 1)
    time_ms = queue.start_up_ms(np.full(len(last), first), last) + (last - first) * queue.step_ms
    free = window.extra_ms(time_ms) <= 1e-9 * max(1.0, queue.step_ms)
    free[0] = True
    return int(np.flatnonzero(free)[-1])


def _de(queue: _Queue, windows: Sequence[SendWindow], seed: int) -> list[int]:
    """Run the paper's two steps: first the slices that are free, then the rest over the MoE parts by evolution."""
    from scipy.optimize import differential_evolution

    moe = [index for index, window in enumerate(windows) if window.kind == "moe"]

    def cuts(shares: np.ndarray) -> list[int]:
        share_of = dict(zip(moe, shares, strict=True))
        result, sent = [], 0
        for index, window in enumerate(windows):
            exists = max(sent, queue.num_ready_steps(window.num_slices))
            sent += _free_steps(queue, window, sent, exists)
            sent += round(share_of.get(index, 0.0) * (exists - sent))
            result.append(sent)
        return result

    none = cuts(np.zeros(len(moe)))
    if not moe or none[-1] == queue.num_steps:
        return none
    found = differential_evolution(
        lambda shares: _evaluated_ms(queue, windows, cuts(shares)),
        [(0.0, 1.0)] * len(moe),
        seed=seed,
        maxiter=30,
        popsize=8,
        polish=False,
    )
    return min((none, cuts(found.x)), key=lambda each: _evaluated_ms(queue, windows, each))


def _evaluated_ms(queue: _Queue, windows: Sequence[SendWindow], cuts: Sequence[int]) -> float:
    bounds = np.array([0, *cuts])
    before, last = bounds[:-1], bounds[1:]
    times_ms = queue.start_up_ms(before, last) + (last - before) * queue.step_ms
    pairs = zip(windows, times_ms, strict=True)
    extra_ms = sum(float(window.extra_ms(np.array([time_ms]))[0]) for window, time_ms in pairs)
    return extra_ms + queue.tail_ms(int(bounds[-1]))


def _of_one_size(pieces: Sequence[QueuedGradient], windows: Sequence[SendWindow], chunk_bytes: int) -> Partition:
    """Send slices of one size while a window's link would be idle; the last slice may overrun.

    Args:
        pieces, windows: see :func:`partition`.
        chunk_bytes: the size of a slice; the last one of a gradient has the rest.
    """
    moment_ms = 1e-6 * max((each.cost.ms(each.size_bytes) for each in pieces), default=0.0) or 1e-9

    def cut(piece: QueuedGradient) -> list[int]:
        whole, rest = divmod(piece.size_bytes, chunk_bytes)
        return [chunk_bytes] * whole + ([rest] if rest else [])

    def may_begin(window: SendWindow, before_ms: float) -> bool:
        # Idle is a link on which a moment more would cost nothing.
        return float(window.extra_ms(np.array([before_ms + moment_ms]))[0]) <= 0.5 * moment_ms

    return _one_by_one(pieces, windows, cut, may_begin)


def _by_priority(pieces: Sequence[QueuedGradient], windows: Sequence[SendWindow], chunk_bytes: int) -> Partition:
    """Send slices of single tensors in the order of Lina's priority (sections 4.2 and 6.1), as a static list.

    A slice is sent while no all-to-all waits or is about to. So an all-to-all waits for one slice at most.

    Args:
        pieces, windows: see :func:`partition`.
        chunk_bytes: the largest bytes of a slice; those of one tensor are equal.
    """

    def cut(piece: QueuedGradient) -> list[int]:
        tensors = piece.tensors_bytes or (piece.size_bytes,)
        ends = [(0, *micro_op_ends(each, num_micro_ops(each, chunk_bytes))) for each in tensors]
        return [stop - first for each in ends for first, stop in itertools.pairwise(each) if stop > first]

    return _one_by_one(pieces, windows, cut, lambda window, before_ms: before_ms < window.idle_ms)


def _check_number(size_bytes: float, chunk_bytes: int) -> None:
    number = size_bytes // chunk_bytes
    if number > MOST_SLICES:
        raise ValueError(
            f"gradient_partition.chunk_bytes = {chunk_bytes}: makes {number:.0f} slices of "
            f"{size_bytes / 1000000000.0:.0f} GB of gradients: must be at least "
            f"{math.ceil(size_bytes / MOST_SLICES)}"
        )


def _one_by_one(
    pieces: Sequence[QueuedGradient],
    windows: Sequence[SendWindow],
    cut: Callable[[QueuedGradient], Sequence[int]],
    may_begin: Callable[[SendWindow, float], bool],
) -> Partition:
    """Send slices in the order of the queue, each in the first window in which it may begin.

    Args:
        pieces, windows: see :func:`partition`.
        cut: a gradient -> the bytes of its slices.
        may_begin: (a window, the ms of earlier slices in it) -> whether one more may begin.
    """
    waiting: deque[Slice] = deque()
    costs = {each.kind: each.cost for each in pieces}

    def arrive(first: int, last: int) -> None:
        for piece in pieces[first:last]:
            waiting.extend(Slice(piece.kind, piece.lanes, size, piece.layer) for size in cut(piece))

    def ms(each: Slice) -> float:
        return costs[each.kind].ms(each.size_bytes)

    sent, total_ms, arrived = [], 0.0, 0
    for window in windows:
        arrive(arrived, window.num_slices)
        arrived = max(arrived, window.num_slices)
        here: list[Slice] = []
        here_ms = 0.0
        while waiting and may_begin(window, here_ms):
            here.append(waiting.popleft())
            here_ms += ms(here[-1])
        total_ms += float(window.extra_ms(np.array([here_ms]))[0]) if here else 0.0
        sent.append(tuple(here))
    arrive(arrived, len(pieces))
    return Partition(tuple(sent), tuple(waiting), total_ms + sum(map(ms, waiting)))


# ---- what gradients cost in the two windows of a layer's backward: how much longer it gets


_CURVE_POINTS = 17
_FEW = 24
"""So many orders are all looked at for a curve."""
Price = Callable[[np.ndarray], np.ndarray]
"""Time of gradients in a window -> how much longer the layer gets."""


def window_prices(
    orders: Sequence[Order], alone: Order, moe: BlockTimes, whole: BlockTimes, num_micro_batches: int = 1
) -> tuple[Price, Price]:
    """Return the prices of a layer's windows: inside its experts' part, and in the rest of it.

    Args:
        orders: the orders of the layer; the best one is chosen for each time of gradients.
        alone: the order without gradients.
        moe: the times of the experts' part.
        whole: the times of the whole layer.
        num_micro_batches: the number of micro-batches. All have the same order and only the last sends gradients,
            so the others bear the cost of an order that is worse without gradients.
    """
    alone_ms = moe.with_ms(orders, 0.0)
    base_ms = float(alone_ms.min())
    others_ms = (num_micro_batches - 1) * (alone_ms - base_ms)[:, None]
    if all(moe.has_closed_form(order) for order in orders):

        def priced(grad_ms: np.ndarray) -> np.ndarray:
            return (moe.times_ms(orders, grad_ms) + others_ms).min(axis=0) - base_ms

        def dense(grad_ms: np.ndarray) -> np.ndarray:
            return np.maximum(0.0, grad_ms - whole.after_ms)

        return priced, dense
    grid_ms = np.linspace(0.0, 1.5 * max(base_ms, whole.after_ms), _CURVE_POINTS)
    kept = list(range(len(orders)))
    if len(orders) > _FEW:
        kept = _promising(orders, alone_ms, moe.times_ms(orders, grid_ms[[_CURVE_POINTS // 3, -1]]))
    few = [orders[index] for index in kept]
    of_orders_ms = np.column_stack([alone_ms[kept], moe.times_ms(few, grid_ms[1:])])
    moe_ms = (of_orders_ms + others_ms[kept]).min(axis=0)
    dense_ms = whole.times_ms([alone], 0.0, grid_ms)[0]
    return _Curve(grid_ms, moe_ms - moe_ms[0]), _Curve(grid_ms, dense_ms - dense_ms[0])


def _promising(orders: Sequence[Order], *times_ms: np.ndarray) -> list[int]:
    """Return the indices of the orders that matter for a curve. For few, more and many gradients, these are the best
    eight of the best orders of each degree.
    """
    kept: set[int] = set()
    for column_ms in np.column_stack([each.reshape(len(orders), -1) for each in times_ms]).T:
        of_degree: dict[int, int] = {}
        for index in np.argsort(column_ms, kind="stable"):
            of_degree.setdefault(orders[index].degree, int(index))
        kept.update(list(of_degree.values())[:8])
    return sorted(kept)


@dataclass(frozen=True)
class _Curve:
    """Interpolates a function linearly between its points, with slope 1 behind the last."""

    at_ms: np.ndarray
    extra_ms: np.ndarray

    def __call__(self, grad_ms: np.ndarray) -> np.ndarray:
        beyond_ms = np.maximum(0.0, grad_ms - self.at_ms[-1])
        return np.interp(grad_ms, self.at_ms, np.maximum.accumulate(np.maximum(self.extra_ms, 0.0))) + beyond_ms
