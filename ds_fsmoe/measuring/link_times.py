# SPDX-License-Identifier: Apache-2.0
"""What the collectives of layers cost: each is timed once, however many layers share its ranks, in every way that there
is to do it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ds_fsmoe.distributed.fail_together import MeasuringError
from ds_fsmoe.execution.collectives import REDUCE_METHODS, Collectives, ReduceMethod
from ds_fsmoe.measuring.measurements import Measuring
from ds_fsmoe.measuring.stopwatch import Prepare
from ds_fsmoe.planning.measured import ALL_GATHER, BETWEEN_NODES, IN_NODES, REDUCE_SCATTER, Timing
from ds_fsmoe.planning.schedule import A2A_IN, A2A_IN_NODE

if TYPE_CHECKING:
    from ds_fsmoe.measuring.profiler import Subject

Reduces = tuple[tuple[float, ReduceMethod], ...]
"""The ways to reduce; see :attr:`Collectives.reduces`."""


@dataclass(frozen=True)
class LinkTimes:
    """The times of several layers' collectives, by :meth:`Subject.link_name`."""

    timings: Mapping[str, Timing]
    reduces: Mapping[str, Reduces]
    """The fastest way to reduce-scatter, by size."""


def time_links(measuring: Measuring, subjects: Sequence[Subject]) -> LinkTimes:
    """Time every collective of these layers. Collective.

    Raises:
        MeasuringError: on every rank, if one has failed.
    """
    uses: dict[str, list[tuple[str, Subject]]] = {}
    for subject in subjects:
        for name in subject.links:
            uses.setdefault(subject.link_name(name), []).append((name, subject))
    timings: dict[str, Timing] = {}
    reduces: dict[str, Reduces] = {}
    for full_name, users in uses.items():
        name, subject = users[0]
        sizes_bytes = _sizes_bytes([user.link_bytes(each) for each, user in users])
        methods = _methods(subject.collectives) if name == REDUCE_SCATTER else ()
        if len(methods) < 2:
            timings[full_name] = _time(measuring, full_name, name, subject, subject.collectives, sizes_bytes)
            continue
        found: dict[ReduceMethod, Timing] = {}
        for method in methods:
            collectives = replace(subject.collectives, reduces=((0.0, method),))
            try:
                of_method = f"{full_name} by {method}"
                found[method] = _time(measuring, of_method, name, subject, collectives, sizes_bytes)
            except MeasuringError:
                # On every rank: not each backend has it for each type.
                if method == methods[0]:
                    raise
        reduces[full_name], timings[full_name] = fastest(found)
    return LinkTimes(timings, reduces)


def fastest(found: Mapping[ReduceMethod, Timing]) -> tuple[Reduces, Timing]:
    """Return the best of several ways, with at most one change between them as messages grow, and its times."""
    names = list(found)
    sizes = found[names[0]].sizes
    best_ms, best = float("inf"), (0, names[0], names[0])
    for place in range(len(sizes)):
        for small in names if place else names[:1]:
            for large in names:
                ways = [small] * place + [large] * (len(sizes) - place)
                # A way counts by how much longer it takes, at a small size as much as at a large one.
                total = sum(
                    found[way].times_ms[i] / max(1e-9, min(each.times_ms[i] for each in found.values()))
                    for i, way in enumerate(ways)
                )
                if total < best_ms:
                    best_ms, best = total, (place, small, large)
    place, small, large = best
    times_ms = (*found[small].times_ms[:place], *found[large].times_ms[place:])
    least_ms = (*found[small].least_ms[:place], *found[large].least_ms[place:])
    rule: Reduces = ((0.0, large),) if small == large or not place else ((0.0, small), (sizes[place], large))
    return rule, Timing(found[large].unit, sizes, times_ms, least_ms=least_ms)


def prepared(
    subject: Subject, name: str, collectives: Collectives, device: torch.device
) -> tuple[Prepare, int, dist.ProcessGroup | None]:
    """Return what prepares rows of a collective, the bytes of a row in its buffer, and the ranks whose mean counts.

    The second part of an all-to-all in two needs what the first one gives, so making it ready communicates.
    """
    exchanging, sharing = collectives.num_exchanging, collectives.num_sharing
    width, dtype = subject.sizes.width, subject.sizes.dtype
    blocks = {ALL_GATHER: 1, REDUCE_SCATTER: sharing}.get(name, exchanging)
    group = collectives.esp_group if name in (ALL_GATHER, REDUCE_SCATTER) else collectives.ep_group
    nodes = collectives.nodes
    if nodes is not None and name in (IN_NODES, BETWEEN_NODES):
        is_inside = name == IN_NODES
        blocks = nodes.per_node if is_inside else nodes.num_nodes
        send = nodes.exchange_inside if is_inside else nodes.exchange_between
        row_bytes = blocks * width * dtype.itemsize

        def prepare_level(rows: int) -> Callable[[], object]:
            x_RM = torch.randn(blocks * rows, width, device=device).to(dtype)
            each, order = [rows] * blocks, torch.arange(blocks * rows, device=device)
            # Inside a node rows are copied before they travel, or added up when they have.
            return lambda: send(x_RM.index_select(0, order) if is_inside else x_RM, each, each)

        # Between nodes the groups of all places share the ports of the same nodes. Which of them is through first is
        # another one each time, and in a step they make up for each other: the mean over all of them counts.
        return prepare_level, row_bytes, nodes.inside if is_inside else group

    def prepare(rows: int) -> Callable[[], object]:
        x_BcM = torch.randn(blocks, rows, width, device=device).to(dtype)
        if name == ALL_GATHER:
            return lambda: collectives.gather(x_BcM.unsqueeze(1))
        if name == REDUCE_SCATTER:
            return lambda: collectives.reduce(x_BcM.unsqueeze(1))
        return collectives.ready(A2A_IN_NODE if name == IN_NODES else A2A_IN, x_BcM)

    counted = sharing if name in (ALL_GATHER, REDUCE_SCATTER) else exchanging
    return prepare, counted * width * dtype.itemsize, group


def _time(
    measuring: Measuring,
    full_name: str,
    name: str,
    subject: Subject,
    collectives: Collectives,
    sizes_bytes: Sequence[int],
) -> Timing:
    device = measuring.watch.device
    prepare, row_bytes, group = prepared(subject, name, collectives, device)
    rows = sorted({max(1, size // row_bytes) for size in sizes_bytes})
    while len(rows) < 4:
        rows.append(2 * rows[-1])
    up_to = f"{full_name}, up to {rows[-1] * row_bytes} bytes"
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        return measuring.timing(up_to, "byte", rows, float(row_bytes), prepare, group)


def _sizes_bytes(wanted_bytes: Sequence[int]) -> list[int]:
    """Return the sizes from the largest down to a chunk of the smallest, by halves; at least six."""
    sizes, smallest = [max(wanted_bytes)], min(wanted_bytes) // 32
    while len(sizes) < 6 or (sizes[-1] > smallest and len(sizes) < 10):
        sizes.append(max(1, sizes[-1] // 2))
    return sizes


def _methods(collectives: Collectives) -> tuple[ReduceMethod, ...]:
    # Wires of their own way to reduce have no choice.
    return REDUCE_METHODS if type(collectives).reduce is Collectives.reduce else ()
