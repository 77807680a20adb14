# SPDX-License-Identifier: Apache-2.0
"""Nothing in a layer and in an engine depends on when a GPU does what: on streams of a pretended device every rule is
kept. The code is their own, on ``StreamLanes``; what is pretended is the device beneath."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_fsmoe.execution import lanes
from ds_fsmoe.execution.lanes import Step
from ds_fsmoe.execution.phase import PhaseRun
from ds_fsmoe.planning.block import ORDERS
from ds_fsmoe.registry import known, lookup
from tests import gradient_cases, race_cases
from tests.covering import covering
from tests.engine_jobs import GPT, RUNS, TWO_NODES
from tests.gradient_cases import LOOPS, Run, training
from tests.layers_as_programs import PRETENDED
from tests.pretended_gpu import Gpu, pretending
from tests.pretended_nccl import fake_ranks
from tests.race_cases import Case, Layout, assert_kept, counts_come_back, differences, watched
from tests.ranks import run_on_ranks
from tests.samples import draw, sampled
from tests.test_gradients_against_stock import BY_RULE, whole_list
from tests.test_layer_against_loop import DROP, NO_DROP

LAYOUTS = (
    Layout(1, 1),
    Layout(2, 2),
    Layout(2, 1, 2),
    Layout(4, 2, 2),
    Layout(4, 2, 2, ranks_per_node=2),
    *(Layout(4, 4, ranks_per_node=2, alltoall=name) for name in PRETENDED),
)
ONCE = Layout(4, 4, ranks_per_node=2, alltoall="node_deduplicated")
"""It takes rows alone, and :data:`EVERY`."""
EVERY = replace(NO_DROP, k=4)
"""Whoever has a token for every expert sends every rank the same, as the pretended collectives have it."""
AXES = (
    LAYOUTS,
    (1, 2, 3, 4),
    (1, 2, 3, 5),
    (*known("expert"), "module"),
    (DROP, NO_DROP),
    ORDERS,
    (False, True),
    ("", "reentrant", "saved"),
    ("", "rounding", "copying"),
    (False,),
    (False, True),
)


def can_be_run(layout: Layout, forward: int, backward: int, expert: str, *others: Any) -> bool:
    """Only experts of our own are cut, and not every all-to-all takes rows."""
    *_, in_rows = others
    takes_rows = lookup("alltoall", layout.alltoall)().takes_rows if in_rows else True
    return takes_rows and (layout.esp == 1 or expert != "module")


TWO_LINKS = Layout(4, 2, 2, ranks_per_node=2)
IN_LEGS = replace(ONCE, alltoall="2dh")
IN_TURNS = [
    Case(ONCE, 2, 3, "mixtral", EVERY, "reduce_first", in_rows=True, halves="turns"),
    Case(ONCE, 3, 2, "gpt", EVERY, "reduce_first", recompute=True, in_rows=True, halves="again"),
    Case(TWO_LINKS, 2, 3, "gpt", DROP, "reduce_first", halves="turns"),
    Case(IN_LEGS, 3, 2, "mixtral", NO_DROP, in_rows=True, halves="turns"),
    Case(Layout(2, 2), 1, 1, "module", DROP, "shared", hooks="copying", halves="turns"),
    Case(TWO_LINKS, 2, 1, "mixtral", NO_DROP, "reduce_first", in_rows=True, halves="again"),
    Case(Layout(1, 1), 2, 2, "gpt", DROP, "shared", hooks="rounding", halves="again"),
]
CASES = [
    Case(IN_LEGS, 3, 2, "gpt", DROP, "paper", recompute=True, checkpointing="saved", hooks="copying"),
    *IN_TURNS,
    *(Case(*values) for values in covering(*AXES, allowed=can_be_run)),
    Case(Layout(2, 2), 1, 1, whole=True),
    Case(IN_LEGS, 1, 1, "mixtral", whole=True, hooks="copying"),
    Case(Layout(4, 2, 2), 1, 1, "gpt", NO_DROP, "reduce_first", whole=True, recompute=True, checkpointing="saved"),
    Case(Layout(4, 2, 2), 1, 1, "gpt", NO_DROP, whole=True, in_rows=True),
    Case(ONCE, 2, 3, "mixtral", EVERY, "reduce_first", in_rows=True),
    Case(ONCE, 3, 3, "gpt", EVERY, recompute=True, hooks="copying", in_rows=True),
    Case(ONCE, 4, 2, "module", EVERY, checkpointing="saved", in_rows=True),
    Case(ONCE, 1, 1, "gpt", EVERY, whole=True, in_rows=True),
]


@sampled("case", CASES, kept=[0, 1], drawn=2, ids=str)
def test_every_rule_is_kept_and_the_numbers_are_those_of_one_task_after_another(case: Case) -> None:
    """Every pair of values of two axes occurs. Receive buffers begin as NaN, so what was never written would show."""
    gpu, found = watched(case)
    assert_kept(gpu)
    assert differences(found, watched(case, overlap=False)[1]) == []


# Mutations: what is proven by the rules is proven only if they are broken by programs that are wrong.

WRONG = [
    Case(Layout(2, 2), 3, 3),
    Case(Layout(4, 2, 2, ranks_per_node=2), 2, 4, links="reduce_first"),
    Case(Layout(4, 4, ranks_per_node=2, alltoall="2dh"), 2, 2, "mixtral", hooks="copying"),
    Case(Layout(4, 2, 2, ranks_per_node=2), 3, 2, "mixtral", NO_DROP, in_rows=True),
]


@sampled("case", WRONG, ids=str)
def test_chunks_that_nobody_holds_are_reported(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    init = PhaseRun.__init__
    monkeypatch.setattr(PhaseRun, "__init__", lambda self, *args: init(self, *args[:3]))
    gpu, _ = watched(case)
    assert "reuse" in {each.rule for each in gpu.breaches}


@sampled("case", WRONG, ids=str)
def test_waits_that_are_dropped_are_reported(case: Case) -> None:
    """But for those that put in order what others put in order just as well, such as one of two joins."""

    def without(number: int | None) -> Gpu:
        gpu = Gpu()
        gpu.keeps_order, gpu.dropped_wait = True, number
        return watched(case, gpu)[0]

    whole = without(None)
    # Those of the first step; the second is its like.
    dropped = [without(number) for number in draw(f"waits of {case}", range(1, whole.num_waits // 2 + 1), 8)]
    missed = [gpu for gpu in dropped if not gpu.breaches and gpu.order != whole.order]
    # Rows that travel were put in order before the host waited for the counts: each forward's first wait adds nothing.
    assert len(missed) <= (race_cases.LAYERS if case.in_rows else 0)
    assert any(gpu.breaches for gpu in dropped)


@sampled("case", WRONG, ids=str)
def test_a_task_on_a_stream_of_its_own_is_reported_whatever_it_does(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it makes is made on the wrong stream, and what it needs is not waited for."""
    do, kinds = lanes.LaneWork.do, set[str]()

    def noted(self: lanes.LaneWork, step: Step, mark: lanes.Mark) -> None:
        kinds.add(step.task.kind)
        do(self, step, mark)

    monkeypatch.setattr(lanes.LaneWork, "do", noted)
    watched(case)
    for kind in draw(f"kinds of {case}", sorted(kinds), 3):
        gpu = Gpu()
        own = gpu.make_stream()

        def misplaced(
            self: lanes.LaneWork, step: Step, mark: lanes.Mark, kind: str = kind, gpu: Gpu = gpu, own: Any = own
        ) -> None:
            with gpu.on(own if (step.task.kind, step.task.chunk) == (kind, 1) else gpu.current):
                do(self, step, mark)

        monkeypatch.setattr(lanes.LaneWork, "do", misplaced)
        watched(case, gpu)
        assert {"order", "reuse"} & {each.rule for each in gpu.breaches}, kind


def test_a_host_that_waits_between_tasks_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = PhaseRun._dispatch

    def looks(self: PhaseRun, task: Any) -> None:
        gather(self, task)
        self._at[task.chunk].sum().item()

    monkeypatch.setattr(PhaseRun, "_dispatch", looks)
    gpu, _ = watched(Case())
    assert {each.rule for each in gpu.breaches} == {"wait"}


def test_the_host_waits_once_per_layer_on_rows_and_not_in_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the counts of the other ranks."""
    case = Case(Layout(4, 2, 2, ranks_per_node=2), 3, 2, "mixtral", NO_DROP, in_rows=True)

    def waits(steps: int) -> int:
        monkeypatch.setattr(race_cases, "STEPS", steps)
        said: list[str] = []
        gpu = Gpu()
        wait = gpu.host_waits
        monkeypatch.setattr(gpu, "host_waits", lambda what, *args: (said.append(what), wait(what, *args)))
        _, found = watched(case, gpu)
        return len(said) - sum(each is not None for each in found)  # each of these is copied to the host

    # In the first step, tables are copied to the device, which are kept.
    assert waits(3) - waits(2) == race_cases.LAYERS


# ---- bytes of one storage


def breaches(first: list[slice], second: slice, reads: bool, waits: bool = False) -> list[str]:
    """The rules that are broken where a stream writes elements and another one writes or reads elements."""
    with pretending(Gpu()) as gpu:
        memory = torch.zeros(16, device="cuda")
        side = gpu.make_stream()
        side.wait_stream(gpu.current)
        with gpu.on(side):
            for each in first:
                memory[each].fill_(1.0)
        if waits:
            gpu.current.wait_stream(side)
        memory[second].sum() if reads else memory[second].fill_(2.0)
    return [each.rule for each in gpu.breaches]


@pytest.mark.parametrize("reads", [False, True])
def test_two_streams_may_use_different_elements_of_one_storage_and_not_the_same(reads: bool) -> None:
    assert breaches([slice(0, 8)], slice(8, 16), reads) == []
    assert breaches([slice(8, 16)], slice(0, 8), reads) == []
    assert breaches([slice(0, 9)], slice(8, 16), reads) == ["order"]
    assert breaches([slice(4, 5)], slice(0, 16), reads) == ["order"]
    # Of a tensor with gaps the first and the last element count, and what is between.
    assert breaches([slice(0, 16, 5)], slice(8, 9), reads) == ["order"]
    # An earlier write of other elements is not forgotten.
    assert breaches([slice(0, 8), slice(8, 16)], slice(0, 4), reads) == ["order"]
    assert breaches([slice(0, 9)], slice(8, 16), reads, waits=True) == []


# ---- whole engines: each runs as one rank of several, the others of which give what this one gives


@dataclass(frozen=True)
class Found:
    """What a run on the pretended device has left."""

    breaches: tuple[str, ...]
    num_operations: int
    lanes: str
    hidden: int
    losses: tuple[float, ...]


def degrees(forward: int, backward: int) -> tuple[tuple[str, int], ...]:
    return ("pipeline_degree.forward", forward), ("pipeline_degree.backward", backward)


def on_the_device(run: Run, ranks: int, overlap: bool = True) -> Found:
    """One engine of the first of so many ranks, whose device is the second of its machine."""
    from tests.pretended_gpu.accelerator import accelerated

    run = replace(run, block=(*BY_RULE, ("ops", "reference"), ("overlap", overlap), *run.block))
    gpu = Gpu(index=1, is_set=False)
    made = gradient_cases.batch
    os.environ |= {"LOCAL_RANK": "1", "RANK": "0", "WORLD_SIZE": str(ranks)}
    # Engines of earlier runs wait for the device when they are collected, wherever this one is then.
    gc.collect()
    gc.disable()
    with fake_ranks(0, ranks), counts_come_back(), accelerated(), pretending(gpu):
        gradient_cases.batch = lambda step, rank: tuple(each.cuda() for each in made(step, rank))
        try:
            with training(run, 0) as script:
                for _ in range(run.steps):
                    LOOPS[run.loop](script)
                kind = type(script.engine.fsmoe.running.lanes).__name__
        finally:
            gradient_cases.batch = made
            gc.enable()
        losses = tuple(each.item() for each in script.seen.numbers["losses"])
    return Found(tuple(map(str, gpu.breaches)), gpu.num_operations, kind, script.seen.hidden, losses)


def problems(_: int, __: int, runs: list[tuple[int, Run]]) -> list[str]:
    """What is wrong with runs of so many ranks, in words; in a process of its own."""
    dist.destroy_process_group()  # the process's own
    wrong = []
    for ranks, run in runs:
        streams, serial = on_the_device(run, ranks), on_the_device(run, ranks, overlap=False)
        if streams.breaches:
            wrong.append(f"{run.name}: {len(streams.breaches)} breaches, such as {streams.breaches[:3]}")
        if streams.losses != serial.losses:
            wrong.append(f"{run.name}: losses {streams.losses}, and one task after another {serial.losses}")
        if streams.lanes != "StreamLanes" or streams.num_operations < 1000:
            wrong.append(f"{run.name}: {streams.num_operations} operations on {streams.lanes}")
        if run.mode in ("fixed_chunk", "dense_only") and run.loop == "plain" and not streams.hidden:
            wrong.append(f"{run.name}: nothing travels in windows")
    _give_back()
    return wrong


def _give_back() -> None:
    """For whoever called, to be ended."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)


KEPT = [
    (4, Run(0, mode="fixed_chunk", features=GPT, block=(*degrees(2, 3), ("esp_size", 2), *TWO_NODES), steps=3)),
    *draw("kept", [(2, Run(stage, mode="dense_only", block=degrees(2, 2), steps=3)) for stage in (1, 2)], 1),
]
OF_TRAINING = [each for each in whole_list() if "sparse" not in each.features]
"""Those that gradients are compared with stock by. The memory of a sparse tensor's parts is not followed."""
ALL = [
    (1, Run(0, ep_size=1, block=degrees(2, 2))),
    *((4, replace(run, steps=3)) for run in RUNS),
    *((2 + 2 * (n % 2), replace(run, block=degrees(2, 2 + n % 3))) for n, run in enumerate(OF_TRAINING)),
]


def test_engines_keep_every_rule(tmp_path: Path) -> None:
    (wrong,) = run_on_ranks(problems, 1, tmp_path, KEPT)
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
@sampled(("ranks", "run"), ALL, drawn=1, ids=lambda each: getattr(each, "name", str(each)))
def test_engines_of_every_part_and_way_to_train_keep_every_rule(ranks: int, run: Run, tmp_path: Path) -> None:
    (wrong,) = run_on_ranks(problems, 1, tmp_path, [(ranks, run)])
    assert not wrong, "\n".join(wrong)


def breaches_of_wrong_engines(_: int, __: int) -> tuple[list[str], list[str]]:
    """Of one that leaves it to DeepSpeed to set the device, which does so once layers have been replaced; and of one
    whose gradients are sent beside it before they are there."""
    from ds_fsmoe.engine.engine import FSMoEEngine
    from ds_fsmoe.gradients.background_lane import BackgroundStreams

    def give(self: BackgroundStreams, between: bool, step: object, after: object) -> object:
        with torch.cuda.stream(self._streams[between]), torch.no_grad():
            step()
            return self._now()

    dist.destroy_process_group()
    found, right = [], FSMoEEngine._configure_with_arguments
    FSMoEEngine._configure_with_arguments = DeepSpeedEngine._configure_with_arguments
    found.append(list(on_the_device(Run(0, steps=1), 2).breaches))
    FSMoEEngine._configure_with_arguments, BackgroundStreams._give = right, give
    found.append(list(on_the_device(Run(1, mode="dense_only", steps=2, block=degrees(2, 2)), 2).breaches))
    _give_back()
    return found[0], found[1]


@pytest.mark.long
def test_an_engine_on_no_device_and_gradients_that_are_sent_before_they_are_there_are_reported(tmp_path: Path) -> None:
    """The device of a rank is 1, and 0 is current until somebody says otherwise."""
    ((of_device, of_gradients),) = run_on_ranks(breaches_of_wrong_engines, 1, tmp_path)
    assert any("device 0 of a rank whose device is 1" in each for each in of_device)
    assert any("[order]" in each for each in of_gradients)
    assert not any("of a rank whose device" in each for each in of_gradients)
