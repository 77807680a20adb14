# SPDX-License-Identifier: Apache-2.0
"""The reducer alone, without DeepSpeed and without a layer: a backward is a list of what happens on each rank."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.gradients.flat_buffers import FlatGradients, Scaling
from ds_fsmoe.gradients.reducer import GradientReducer
from ds_fsmoe.planning.decide.gradient_plan import (
    BufferReadiness,
    GradientPlan,
    WindowBytes,
    plan_by_bytes,
    plan_by_rule,
)
from ds_fsmoe.planning.schedule import EXPERT_GRAD, GRAD
from tests.ranks import run_on_ranks
from tests.waiting import pause

SIZES = (13, 7, 1, 29, 11, 3)
MODES = ("adaptive", "fixed_chunk", "dense_only", "micro_ops")
OPEN, CLOSE = "open", "close"
Backward = Sequence[str | int]
"""In order: "open", "close", and the number of a parameter whose gradient arrives."""
CPU = torch.device("cpu")


class Wiretap:
    """Notes the messages of this rank by group, and may delay them."""

    def __init__(self, seed: int | None = None) -> None:
        self.messages: dict[tuple[int, ...], list[tuple[str, int]]] = defaultdict(list)
        self._rng = None if seed is None else random.Random(seed)
        self._all_reduce = dist.all_reduce

    def __enter__(self) -> Wiretap:
        dist.all_reduce = self._noted
        return self

    def __exit__(self, *error: object) -> None:
        dist.all_reduce = self._all_reduce

    def _noted(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group") or dist.group.WORLD
        self.messages[tuple(dist.get_process_group_ranks(group))].append((str(tensor.dtype), tensor.numel()))
        if self._rng is not None:
            pause(self._rng, 0, 0, 0.001, 0.004)
        return self._all_reduce(tensor, *args, **kwargs)


def plan_of(mode: str) -> Callable[[Sequence[BufferReadiness]], GradientPlan]:
    if mode == "both":
        # Cut in the middle of parameters, inside the layers and beside them.
        window = WindowBytes(((GRAD, 20.0), (EXPERT_GRAD, 12.0)), ((GRAD, 36.0), (EXPERT_GRAD, 8.0)))
        return partial(plan_by_bytes, windows=[window] * 3)
    return partial(plan_by_rule, mode=mode, chunk_bytes=28)


class Bench:
    """Parameters, their reducer and backwards on this rank."""

    def __init__(self, mode: str, groups: Sequence[Any] = (None,), looks: int = 1) -> None:
        self.parameters = [nn.Parameter(torch.zeros(size)) for size in SIZES]
        self.groups = groups
        per_flat = [self.parameters[flat :: len(groups)] for flat in range(len(groups))]
        flats = [
            FlatGradients(
                GRAD if flat == len(groups) - 1 else EXPERT_GRAD,
                parameters,
                torch.float32,
                group or dist.group.WORLD,
                Scaling(before=lambda message: message.mul_(0.5)),
                CPU,
            )
            for flat, (parameters, group) in enumerate(zip(per_flat, groups, strict=True))
        ]
        self.reducer = GradientReducer(
            flats,
            lambda p: p.grad,
            lambda: True,
            plan_of(mode),
            lambda p, gradient: setattr(p, "grad", gradient),
            observed_rounds=looks,
        )
        self.round = 0

    def gradient(self, number: int, rank: int) -> torch.Tensor:
        """Whole numbers, so that every order of adding them up gives the same."""
        generator = torch.Generator().manual_seed(97 * self.round + 7 * number + rank)
        return torch.randint(-500, 500, (SIZES[number],), generator=generator).float()

    def backward(self, events: Backward) -> None:
        """What happens on this rank; a gradient that comes again is added to what is there."""
        rank = dist.get_rank()
        layers = (f"layer {number}" for number in itertools.count())
        for event in events:
            if event == OPEN:
                self.parcels = self.reducer.open(next(layers))
                for parcel in self.parcels:
                    for task in self.reducer.tasks(parcel):
                        self.reducer.send(parcel, task)
            elif event == CLOSE:
                self.reducer.close()
            else:
                parameter = self.parameters[event]
                gradient = self.gradient(event, rank)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
                self.reducer.ready(parameter)

    def finish(self, of_ranks: Sequence[Backward]) -> list[str]:
        """What is wrong with the sums, knowing what happened on each rank."""
        present = self.reducer.finish()
        wrong = []
        for number, parameter in enumerate(self.parameters):
            group = self.groups[number % len(self.groups)]
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            total = torch.zeros(SIZES[number])
            for rank in ranks:
                total += 0.5 * list(of_ranks[rank]).count(number) * self.gradient(number, rank)
            if not torch.equal(self.reducer.value(parameter), total):
                wrong.append(f"round {self.round}: parameter {number} is not the sum")
            if (id(parameter) in present) != any(number in events for events in of_ranks):
                wrong.append(f"round {self.round}: parameter {number} is said to be there, or not to be")
            if parameter.grad is not None:
                wrong.append(f"round {self.round}: parameter {number} has a gradient beside the one in the buffer")
                parameter.grad = None
        self.round += 1
        return wrong


def usual(order: Sequence[int] = (5, 4, 3, 2, 1, 0), windows: int = 3) -> list[str | int]:
    """Gradients between windows: two, a window, two, a window, ..."""
    events: list[str | int] = []
    for window in range(windows):
        events += [*order[2 * window : 2 * window + 2], OPEN, CLOSE]
    return events + list(order[2 * windows :])


def without(events: Backward, *numbers: int) -> list[str | int]:
    return [each for each in events if each not in numbers]


def moved(events: Backward, number: int, place: int) -> list[str | int]:
    left = without(events, number)
    return [*left[:place], number, *left[place:]]


def rounds_of(world_size: int, seed: int) -> list[list[Backward]]:
    """Rounds, each with a backward for every rank: first named troubles, then random ones."""
    plain = usual()
    rng = random.Random(seed)

    def on_one(trouble: Backward) -> list[Backward]:
        return [trouble if rank == world_size - 1 else plain for rank in range(world_size)]

    rounds = [
        [plain] * world_size,
        [plain] * world_size,
        on_one(without(plain, 5)),  # missing on a rank
        [without(plain, 3)] * world_size,  # on all
        on_one(moved(plain, 5, 11)),  # late, behind its slice
        [plain] * world_size,
        on_one([*plain, 4]),  # twice, the second time when it was sent
        on_one([4, *plain]),  # twice, both in time
        on_one(without(plain, *range(6))),  # nothing at all
        [[OPEN, CLOSE, OPEN, CLOSE]] * world_size,  # on any rank
        on_one(usual(windows=2)),  # fewer windows
        on_one(usual(windows=0)),
        on_one([*plain, OPEN, CLOSE]),  # more
        [usual(windows=1)] * world_size,
        [[*plain, OPEN, CLOSE]] * world_size,
        [[5, OPEN, OPEN, 4, CLOSE, CLOSE, *range(4), OPEN, CLOSE]] * world_size,  # one inside the other
    ]
    for _ in range(6):
        of_ranks = []
        for _ in range(world_size):
            numbers = [number for number in range(6) if rng.random() < 0.8]
            rng.shuffle(numbers)
            of_ranks.append(usual(numbers, rng.randint(0, 4)))
        rounds.append(of_ranks)
    return [*rounds, [plain] * world_size, [plain] * world_size]


Messages = dict[tuple[int, ...], list[tuple[str, int]]]


def go_through(rank: int, world_size: int, mode: str, kinds: str, delays: bool) -> tuple[list[str], Messages, int, int]:
    groups: list[Any] = [None]
    if kinds == "two groups":
        # Every rank makes both, as torch wants it; its own comes first, that of all ranks last.
        pairs = [dist.new_group([first, first + world_size // 2]) for first in range(world_size // 2)]
        groups = [pairs[rank % (world_size // 2)], dist.new_group(list(range(world_size)))]
    bench = Bench(mode, groups, looks=2 if kinds == "two groups" else 1)
    wrong = []
    with Wiretap(seed=rank if delays else None) as tap:
        for of_ranks in rounds_of(world_size, seed=11):
            bench.backward(of_ranks[rank])
            wrong += bench.finish(of_ranks)
    return wrong, dict(tap.messages), bench.reducer.sent_again, bench.reducer.plan.num_windows


def calm_and_delayed(rank: int, world_size: int, modes: Sequence[str], kinds: str) -> list[list[Any]]:
    return [[go_through(rank, world_size, mode, kinds, delays) for delays in (False, True)] for mode in modes]


@pytest.mark.parametrize(
    ("world_size", "kinds"),
    [(1, "one group"), (2, "one group"), pytest.param(4, "two groups", id="four ranks in two groups")],
)
def test_sums_are_exact_and_messages_alike_whatever_arrives_when(world_size: int, kinds: str, tmp_path: Path) -> None:
    modes = [*MODES, "both"] if world_size < 4 else ["both"]
    for of_mode in zip(*run_on_ranks(calm_and_delayed, world_size, tmp_path, modes, kinds), strict=True):
        calm, delayed = zip(*of_mode, strict=True)
        for rank, (wrong, messages, sent_again, _) in enumerate(calm):
            assert not wrong, f"rank {rank}: {wrong}"
            assert sent_again > 0, "something was late, or the test shows nothing"
            assert {len(ranks) for ranks in messages} == {min(world_size, 2), world_size}
            for ranks, of_rank in messages.items():
                assert of_rank == calm[ranks[0]][1][ranks], f"ranks {ranks[0]} and {rank} sent different messages"
        assert delayed == calm
