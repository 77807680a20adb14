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
MODES = ("adaptive", "fixed_chunk", "dense_only", "micro_ops", "both")
OPEN, CLOSE = "open", "close"
Backward = Sequence[str | int]
"""In order: "open", "close", and the number of a parameter whose gradient arrives."""
Messages = dict[tuple[int, ...], list[tuple[str, int]]]
"""By the ranks of the group: type and elements of each."""


def plan_of(mode: str) -> Callable[[Sequence[BufferReadiness]], GradientPlan]:
    if mode == "both":
        # Cut in the middle of parameters, inside the layers and beside them.
        window = WindowBytes(((GRAD, 20.0), (EXPERT_GRAD, 12.0)), ((GRAD, 36.0), (EXPERT_GRAD, 8.0)))
        return partial(plan_by_bytes, windows=[window] * 3)
    return partial(plan_by_rule, mode=mode, chunk_bytes=28)


def usual(order: Sequence[int] = (5, 4, 3, 2, 1, 0), windows: int = 3) -> list[str | int]:
    """Gradients between windows: two, a window, two, a window, ..."""
    events: list[str | int] = []
    for window in range(windows):
        events += [*order[2 * window : 2 * window + 2], OPEN, CLOSE]
    return events + list(order[2 * windows :])


def rounds_of(world_size: int) -> list[list[Backward]]:
    """Rounds, each with a backward for every rank: in some of them gradients are missing, on one rank or on all, come
    late, behind their slices, or twice, and there are fewer windows than before, or more."""
    plain, rng = usual(), random.Random(11)
    rounds: list[list[Backward]] = [
        [plain] * world_size,
        [plain] * world_size,
        [*[plain] * (world_size - 1), [*plain, 4]],
        [*[plain] * (world_size - 1), [OPEN, CLOSE] * 3],
        [[OPEN, CLOSE, OPEN, CLOSE]] * world_size,
        [[5, OPEN, OPEN, 4, CLOSE, CLOSE, *range(4), OPEN, CLOSE]] * world_size,
    ]
    for _ in range(12):
        numbers = [rng.choices(range(6), k=rng.randrange(10)) for _ in range(world_size)]
        rounds.append([usual(each, rng.randrange(5)) for each in numbers])
    return [*rounds, [plain] * world_size, [plain] * world_size]


def go_through(rank: int, world_size: int, mode: str, delays: bool) -> tuple[Messages, int]:
    """Go through all rounds, on four ranks with two groups; return the messages, and how many gradients were late."""
    groups: list[Any] = [dist.new_group(list(range(world_size)))]
    if world_size == 4:
        # Every rank makes both, as torch wants it; its own comes first, that of all ranks last.
        groups = [[dist.new_group([first, first + 2]) for first in range(2)][rank % 2], *groups]
    parameters = [nn.Parameter(torch.zeros(size)) for size in SIZES]
    half = Scaling(before=lambda message: message.mul_(0.5))
    flats = [
        FlatGradients(kind, parameters[at :: len(groups)], torch.float32, group, half, torch.device("cpu"))
        for at, (kind, group) in enumerate(zip((EXPERT_GRAD, GRAD)[-len(groups) :], groups, strict=True))
    ]
    looks = {"observed_rounds": len(groups)}
    of = lambda p: p.grad, lambda: True, plan_of(mode), lambda p, gradient: setattr(p, "grad", gradient)
    reducer = GradientReducer(flats, *of, **looks)
    messages: Messages = defaultdict(list)
    rng, all_reduce = random.Random(rank), dist.all_reduce

    def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        ranks = dist.get_process_group_ranks(kwargs.get("group") or dist.group.WORLD)
        messages[tuple(ranks)].append((str(tensor.dtype), tensor.numel()))
        if delays:
            pause(rng, 0, 0, 0.001, 0.004)
        return all_reduce(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", noted)
        for number, of_ranks in enumerate(rounds_of(world_size)):
            # Whole numbers, so that every order of adding them up gives the same.
            seeds = torch.Generator().manual_seed(number)
            drawn = [[torch.randint(-500, 500, (size,), generator=seeds).float() for size in SIZES] for _ in of_ranks]
            go_backward(reducer, parameters, of_ranks[rank], drawn[rank])
            present = reducer.finish()
            for at, parameter in enumerate(parameters):
                ranks = dist.get_process_group_ranks(groups[at % len(groups)])
                total = sum(0.5 * list(of_ranks[each]).count(at) * drawn[each][at] for each in ranks)
                assert torch.equal(reducer.value(parameter), total), f"round {number}: parameter {at} is not the sum"
                assert (id(parameter) in present) == any(at in events for events in of_ranks), (number, at)
                assert parameter.grad is None, f"parameter {at} has a gradient beside the one in the buffer"
    return dict(messages), reducer.sent_again


def go_backward(reducer: Any, parameters: list[nn.Parameter], events: Backward, gradients: list[torch.Tensor]) -> None:
    """What happens on this rank; a gradient that comes again is added to what is there."""
    layers = (f"layer {number}" for number in itertools.count())
    for event in events:
        if event == OPEN:
            for parcel in reducer.open(next(layers)):
                for task in reducer.tasks(parcel):
                    reducer.send(parcel, task)
        elif event == CLOSE:
            reducer.close()
        else:
            parameter = parameters[event]
            parameter.grad = gradients[event] + (0.0 if parameter.grad is None else parameter.grad)
            reducer.ready(parameter)


def calm_and_delayed(rank: int, world_size: int) -> list[list[Any]]:
    modes = MODES if world_size < 4 else MODES[-1:]
    return [[go_through(rank, world_size, mode, delays) for delays in (False, True)] for mode in modes]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_sums_are_exact_and_messages_alike_whatever_arrives_when(world_size: int, tmp_path: Path) -> None:
    for of_mode in zip(*run_on_ranks(calm_and_delayed, world_size, tmp_path), strict=True):
        calm, delayed = zip(*of_mode, strict=True)
        assert delayed == calm
        for rank, (messages, late) in enumerate(calm):
            assert late > 0, "something was late, or the test shows nothing"
            assert {len(ranks) for ranks in messages} == {min(world_size, 2), world_size}
            for ranks, of_rank in messages.items():
                assert of_rank == calm[ranks[0]][0][ranks], f"ranks {ranks[0]} and {rank} sent different messages"
