# SPDX-License-Identifier: Apache-2.0
"""Training by Lina's schedule is training with stock, and what runs is what its rules say."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_fsmoe.config.blocks import FSMoEBlock, GradientPartitionBlock, PlacementBlock
from ds_fsmoe.config.reading import ConfigError, read_block
from ds_fsmoe.engine.convert_experts import check_hugging_face
from ds_fsmoe.execution.pipeline import CallSizes
from ds_fsmoe.planning.block import BlockPlan, LayerPlan
from ds_fsmoe.planning.decide import rules
from ds_fsmoe.planning.decide.gradients import slice_bytes
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.tuning.micro_ops import MicroOps, degree_of_call
from tests.gradient_cases import AwkwardModel, Run, batch
from tests.logged import heard
from tests.planning.test_rules import on_fast_links
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.small_model import Case, SmallModel, train_steps
from tests.test_gradients_against_stock import BY_RULE, check, with_stock

CHUNK_BYTES = 700
SCHEDULE = (("schedule", "lina"), ("gradient_partition.chunk_bytes", CHUNK_BYTES))
TOLERANCE = 2e-5
STEPS = 6


@sampled("stages", [[0, 2], [0, 1, 2]])
def test_slices_of_single_tensors_give_stocks_numbers_bit_for_bit(stages: list[int], tmp_path: Path) -> None:
    check(with_stock(*(Run(stage, mode="micro_ops") for stage in stages)), 2, tmp_path)


@sampled(
    "runs",
    [
        [(1, BY_RULE), (2, (("metrics", "off"),))],
        [(stage, more) for stage in (0, 1, 2) for more in (BY_RULE, (("metrics", "off"),))],
    ],
)
def test_the_whole_schedule_gives_stocks_numbers_to_rounding(runs: list[tuple[int, Any]], tmp_path: Path) -> None:
    every = [Run(stage, mode="unsaid", block=(*SCHEDULE, *more)) for stage, more in runs]
    check(with_stock(*every), 2, tmp_path, TOLERANCE)


def of_a_training(rank: int, world_size: int) -> list[dict[str, Any]]:
    return [of_one(rank, deterministic, stage) for deterministic, stage in ((True, 1), (False, 0))]


def of_one(rank: int, deterministic: bool, stage: int) -> dict[str, Any]:
    """Degrees by step, and where slices lie, of the awkward model."""
    run = Run(stage, mode="unsaid", block=(*SCHEDULE, ("deterministic", deterministic), ("num_chunks.max", 5)))
    said = heard("INFO")
    engine = engine_of(lambda: AwkwardModel(run, rank), run.ds_config() | {"fsmoe": run.fsmoe_block()})
    degrees = []
    for step in range(STEPS):
        engine.backward(engine(*batch(step, rank)))
        engine.step()
        degrees.append({label: each.pipeline.degrees for label, each in engine.fsmoe.inner_layers.items()})
    reducer = engine.fsmoe.reduction.reducer
    parcels = [(each, reducer.flats[each.flat]) for part in reducer.plan.parts for each in part]
    found = {
        "degrees": degrees,
        "plan": reducer.plan,
        "spanning": [
            each for each, flat in parcels if any(each.first < at < each.stop for at in (*flat.starts, flat.numel))
        ],
        "largest": max((each.stop - each.first) * flat.element_bytes for each, flat in parcels),
        "ways": {str(each.algorithm) for each in reducer.flats},
        "said": [each for each in said.lines if "micro-ops" in each],
        "mode": engine.fsmoe.gradients,
    }
    engine.destroy()
    said.end()
    return found


def engine_of(make: Callable[[], torch.nn.Module], config: dict[str, Any]) -> Any:
    import ds_fsmoe

    torch.manual_seed(0)
    model = make()
    return ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def degrees_of(engine: Any) -> list[tuple[int, int]]:
    return [each.pipeline.degrees for each in engine.fsmoe.inner_layers.values()]


def test_layers_are_cut_by_their_bytes_and_slices_keep_to_tensors(tmp_path: Path) -> None:
    # 4 experts of 21 tokens with 1.25 times the room, one and two choices each, of 13 elements of fp32; and a layer
    # whose tokens stay where they are.
    slots = [4 * max(2, -(-21 * k * 5 // 16)) for k in (1, 2)]
    expected = [min(5, -(-count * 13 * 4 // CHUNK_BYTES)) for count in slots]
    assert expected[0] < expected[1]
    for first, second in zip(*run_on_ranks(of_a_training, 2, tmp_path), strict=True):
        for each in (first, second):
            assert each["mode"] == "micro_ops"
            assert list(each["degrees"][0].values()) == [(degree, degree) for degree in (*expected, 1)]
            assert each["degrees"][0] == each["degrees"][-1], "from the second step on"
            assert each["spanning"] == []
            assert each["largest"] <= CHUNK_BYTES
            assert each["ways"] == {"all-reduce"}, "one rank would be sent all of a slice"
            assert not any(each["plan"].moe), "there an all-to-all waits"
        assert (first["plan"], first["degrees"]) == (second["plan"], second["degrees"])
        (said,) = first["said"]
        assert said.startswith("num_chunks by micro-ops of 0.0007 MB: L00 ")
        assert all(len(parcels) <= 1 for parcels in first["plan"].dense)
        assert any(first["plan"].dense)


def with_a_small_step(rank: int, world_size: int, folder: str) -> None:
    """A run that is saved after its first step, and one that goes on from there."""
    case = Case(2, 1, "fp32", 1, 2, True)
    block = {"enabled": True, "schedule": "lina", "gradient_partition": {"chunk_bytes": 400}, "deterministic": True}
    config = case.ds_config(fsmoe=block)
    engine = engine_of(lambda: SmallModel(case, rank), config)
    train_steps(engine, rank, [0])
    engine.save_checkpoint(folder)
    saved = degrees_of(engine)
    assert max(max(each) for each in saved) > 1
    losses = train_steps(engine, rank, [1, 2])
    engine.destroy()
    engine = engine_of(lambda: SmallModel(case, rank), config)
    assert degrees_of(engine) == [(1, 1)] * len(saved)
    engine.load_checkpoint(folder)
    assert degrees_of(engine) == saved
    assert not engine.fsmoe.micro_ops.is_wanted
    assert train_steps(engine, rank, [1, 2]) == losses
    engine.destroy()


def test_a_run_that_goes_on_is_cut_as_it_was_from_its_first_step_on(tmp_path: Path) -> None:
    run_on_ranks(with_a_small_step, 2, tmp_path / "ranks", str(tmp_path / "saved"))


def by_the_tuner(rank: int, world_size: int) -> None:
    case = Case(2, 0, "fp32", 1, 2, True)
    tuning = {"enabled": True, "trials": 1, "watch_every": 0}
    block = {"enabled": True, "schedule": "lina", "gradient_partition": {"chunk_bytes": 400}, "autotune": tuning}
    engine = engine_of(lambda: SmallModel(case, rank), case.ds_config(fsmoe=block))
    # Enough to try its one plan and DeepSpeed's schedule, and to go on with the faster one.
    losses = train_steps(engine, rank, range(20))
    assert torch.tensor(losses).isfinite().all()
    slots = 4 * max(4, -(-21 * 2 * 5 // 16))
    assert degrees_of(engine) == [(min(16, -(-slots * 13 * 4 // 400)),) * 2] * 2
    assert engine.fsmoe.micro_ops is None
    assert not any(engine.fsmoe.reduction.reducer.plan.moe)
    engine.destroy()


@pytest.mark.daily("the autotuner in trainings", 2)
def test_the_autotuner_gives_the_same_degrees_and_does_not_try_others(tmp_path: Path) -> None:
    run_on_ranks(by_the_tuner, 2, tmp_path)


def test_a_slice_has_the_size_that_was_asked_for_or_its_modes_own_and_ranks_that_differ_in_it_do_not_agree() -> None:
    left_out, asked = GradientPartitionBlock(), GradientPartitionBlock(chunk_bytes=31457280)
    for mode, own in (("micro_ops", 30_000_000), ("fixed_chunk", 30 * 2**20)):
        assert slice_bytes(mode, left_out.asked_bytes) == own
        assert slice_bytes(mode, asked.asked_bytes) == 31457280
    # What is written is what another mode has by itself, so each rank would cut by its own.
    blocks = [FSMoEBlock(schedule="lina", gradient_partition=each) for each in (asked, left_out)]
    assert blocks[0].alike() != blocks[1].alike()
    assert blocks[0].alike() == blocks[0].model_copy().alike()


@pytest.mark.parametrize("asked", [{"gradient_partition": {"mode": "micro_ops"}}, {"schedule": "lina"}])
def test_slices_of_single_tensors_are_not_sent_to_their_owners(asked: dict[str, Any]) -> None:
    def read(**partition: Any) -> FSMoEBlock | None:
        partition = {**asked.get("gradient_partition", {}), "collective": "reduce_scatter", **partition}
        block = {"enabled": True, **asked, "gradient_partition": partition}
        return read_block({"zero_optimization": {"stage": 1}, "fsmoe": block})

    with pytest.raises(ConfigError, match="mostly belongs to one rank, whose link alone would carry it"):
        read()
    assert read(mode="adaptive").gradient_partition.collective == "reduce_scatter"


def test_a_model_without_experts_has_none_to_pack() -> None:
    block = FSMoEBlock(placement=PlacementBlock(policy="lina"))
    message = r'placement.policy = "lina" chooses .* has no such experts\. Remove the policy'
    with pytest.raises(ConfigError, match=message):
        check_hugging_face(block, {}, {}, {}, True, None)
    check_hugging_face(FSMoEBlock(), {}, {}, {}, True, None)


def sizes(capacity: int, num_choices: int) -> Any:
    """Of a call of 8 experts, in rows of 16 elements of fp32."""
    tokens = 8 * capacity // num_choices
    return CallSizes(4, capacity, 16, torch.float32, 1, True, 8, tokens, num_choices)


@pytest.mark.parametrize(("alltoall", "k"), [("flat", 3), ("node_deduplicated", 1), ("node_deduplicated", 3)])
def test_tokens_that_cross_once_per_node_are_cut_by_what_crosses(alltoall: str, k: int) -> None:
    call = sizes(99, k)
    if alltoall == "flat":
        crossings = float(k)
    else:
        # Two nodes have four experts each.
        chosen = list(itertools.combinations(range(8), k))
        crossings = sum(len({each // 4 for each in experts}) for experts in chosen) / len(chosen)
    # As many rows as slots: of each of k choices.
    bytes_between = 8 * 99 / k * crossings * 16 * 4
    plan = PhasePlan(BlockPlan(), Groups(4, 2, ep=4), backward=False, alltoall=alltoall)
    for micro_op_bytes in (1000, 2500, 50_000, 1_000_000):
        found = degree_of_call(plan, call, micro_op_bytes, 64)
        assert found == min(64, -int(-bytes_between // micro_op_bytes))


def test_micro_ops_keep_to_the_planners_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    own = list(rules.RULES)

    def degree(groups: Groups, *more: Callable[[Any], bool]) -> int:
        monkeypatch.setattr(rules, "RULES", [*own, *more])
        return degree_of_call(PhasePlan(BlockPlan(), groups, backward=False), sizes(99, 1), 1000, 64)

    groups = Groups(4, 2, ep=4)
    assert degree(groups) > 3
    assert degree(groups, lambda proposal: proposal.order.degree <= 3) == 3
    # Both phases have the same chunks, so that a rule for one of them holds for both.
    assert degree(groups, lambda proposal: not proposal.backward or proposal.order.degree <= 2) == 2
    # Nothing is measured, so that a rule that asks for costs is told of none.
    assert degree(Groups(8, 4, esp=2, ep=4), on_fast_links) > 3


def test_the_largest_call_of_the_first_step_counts() -> None:
    micro_ops = MicroOps(FSMoEBlock(schedule="lina", gradient_partition=GradientPartitionBlock(chunk_bytes=1024)))
    noted: list[Callable[[Any], None]] = []
    pipeline = SimpleNamespace(watched=lambda on_call: noted.append(on_call))
    for is_training, capacity in ((True, 3), (True, 12), (False, 99), (True, 5)):
        noted.clear()
        call: Any = SimpleNamespace(label="L00", is_training=is_training, pipeline=pipeline)
        micro_ops.watch(call)
        for each in noted:
            each(sizes(capacity, 1))
    plan = LayerPlan(BlockPlan(), BlockPlan(), "flat")
    phase = PhasePlan(BlockPlan(), Groups(4, 4, ep=4), backward=False)
    given: list[LayerPlan] = []
    state = SimpleNamespace(plan=plan, apply=given.append)
    layer: Any = SimpleNamespace(pipeline=SimpleNamespace(forward=phase), fsmoe=state)
    assert micro_ops.chunk_layers({"L00": layer})
    # 8 experts of 12 slots of 64 bytes are 6 micro-ops.
    assert given == [replace(plan, forward=BlockPlan(6), backward=BlockPlan(6))]
