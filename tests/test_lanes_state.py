# SPDX-License-Identifier: Apache-2.0
"""Lanes: what they keep of a run, and the caller's modes in the bodies."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ds_fsmoe.execution import lanes as crossings_module
from ds_fsmoe.execution.lanes import Lanes, dependencies_of
from ds_fsmoe.execution.thread_lanes import ThreadLanes
from ds_fsmoe.planning.schedule import Lane, Task
from tests.lane_cases import (
    COMPUTE,
    INTER,
    INTRA,
    LINKS,
    BodyError,
    Log,
    lanes,
    overlapping,
    random_schedule,
    schedule_of,
    threads,
)

FIXTURES = (lanes, overlapping, threads)  # which pytest finds by their names here


# ---- what is kept


class Held:
    """Stands for a tensor that a body holds."""


@pytest.mark.parametrize("fails_on", [None, *Lane])
def test_nothing_of_a_run_is_kept_once_it_is_over(overlapping: Lanes, fails_on: Lane | None) -> None:
    schedule = schedule_of(*(("EXPERT", lane, ()) for lane in Lane), ("EXPERT", COMPUTE, (1, 2)))

    def run() -> weakref.ref:
        held = Held()

        def body(task: Task, held: Held = held) -> None:
            if task.lane is fails_on:
                raise BodyError(task.lane)

        try:
            overlapping.run(schedule, {"EXPERT": body}, observer=Log())
        except BodyError as error:
            assert fails_on in error.args  # noqa: PT017
        return weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        assert [run()() for _ in range(20)] == [None] * 20
    finally:
        gc.enable()


def test_what_is_worked_out_for_a_schedule_lives_as_long_as_it_does() -> None:
    gc.collect()
    before = len(crossings_module._known)
    schedule = random_schedule(2)
    assert dependencies_of(schedule) is dependencies_of(schedule)
    assert dependencies_of(random_schedule(2)) is not dependencies_of(schedule)
    assert len(crossings_module._known) == before + 1
    del schedule
    assert len(crossings_module._known) == before


def test_a_lane_waits_once_and_for_the_last_only() -> None:
    schedule = schedule_of(
        ("A2A_IN", INTER, ()),
        ("A2A_IN", INTER, ()),
        ("EXPERT", COMPUTE, (0, 1)),  # 1 is enough: 0 is before it on its lane
        ("EXPERT", COMPUTE, (0, 2)),  # has been waited for; is on the same lane
        ("A2A_OUT", INTER, (2, 3)),
        ("GATHER", INTRA, (1,)),
    )
    crossings = dependencies_of(schedule)
    assert [step.needs for step in crossings.steps] == [(), (), (0,), (), (1,), (2,)]
    assert [step.feeds for step in crossings.steps] == [(), (0, 2), (), (1,), (4,), (3,)]
    assert (crossings.joins, crossings.count, crossings.links) == ((3, 4), 5, (INTRA, INTER))


# ---- thread-local state


@contextmanager
def autocast_for_cuda() -> Iterator[None]:
    """As ``torch.autocast("cuda")`` leaves it, also where there is no GPU."""
    was = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", was[0])
        torch.set_autocast_dtype("cuda", was[1])


MODES: dict[str, Callable[[], Any]] = {
    "plain": lambda: torch.enable_grad(),
    "no_grad": lambda: torch.no_grad(),
    "inference_mode": lambda: torch.inference_mode(),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast_fp16": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
    "autocast_cuda": autocast_for_cuda,
}


def state_here() -> dict[str, Any]:
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        "cache": torch.is_autocast_cache_enabled(),
    }


def test_bodies_run_under_the_callers_modes_and_those_of_this_run_only(lanes: Lanes) -> None:
    schedule = schedule_of(*(("EXPERT", lane, ()) for lane in (*Lane, *Lane)))
    states = set()
    for mode in (*MODES, *reversed(MODES)):
        seen: list[dict[str, Any]] = []
        with MODES[mode]():
            lanes.run(schedule, {"EXPERT": lambda task: seen.append(state_here())})  # noqa: B023
            assert seen == [state_here()] * 6, mode
        states.add(str(seen[0]))
    assert len(states) == len(MODES)


@LINKS
def test_what_a_link_computes_follows_the_callers_modes(threads: ThreadLanes, link: Lane) -> None:
    weight_MM = torch.randn(13, 13, requires_grad=True)
    found: dict[str, torch.Tensor] = {}

    def run_in(mode: str) -> torch.Tensor:
        with MODES[mode]():
            bodies = {"EXPERT": lambda task: found.update({mode: weight_MM @ weight_MM})}
            threads.run(schedule_of(("EXPERT", link, ())), bodies)
        return found[mode]

    assert run_in("no_grad").requires_grad is False
    assert run_in("inference_mode").is_inference()
    assert run_in("autocast").dtype is torch.bfloat16
    assert run_in("autocast_fp16").dtype is torch.float16
    plain = run_in("plain")
    assert (plain.requires_grad, plain.is_inference(), plain.dtype) == (True, False, torch.float32)
    plain.sum().backward()
    assert weight_MM.grad is not None


@LINKS
def test_an_autocast_block_in_a_body_does_not_clear_the_callers_cache_of_casts(
    threads: ThreadLanes, link: Lane
) -> None:
    weight_MM = torch.randn(13, 13, requires_grad=True)

    def body(task: Task) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pass

    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = weight_MM @ torch.ones(13, 13)
        threads.run(schedule_of(("EXPERT", link, ())), {"EXPERT": body})
        after = weight_MM @ torch.ones(13, 13)

    def cast_of(product: torch.Tensor) -> Any:
        return product.grad_fn.next_functions[0][0]

    assert cast_of(before).name() == "ToCopyBackward0"
    assert cast_of(before) is cast_of(after)
