# SPDX-License-Identifier: Apache-2.0
"""Training with gradients that travel early is training with DeepSpeed's own reduction.

On two ranks bit for bit; on four a sum of slices differs from a sum of buckets in the last bits. DeepSpeed's norm at
stage 0 with ep_size > 1 is not the true one, so it is left out where DeepSpeed works one out.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gradient_cases import LOOPS, STEPS, Run, Seen, compare, in_modes, train, training
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.test_gradient_reducer import Wiretap
from tests.waiting import pause

pytestmark = pytest.mark.long

# Of the largest number of its kind, in fp32 after some steps on four ranks.
TOLERANCE = 2e-5
STAGES = (0, 1, 2)
MODES = ("adaptive", "fixed_chunk", "dense_only")
BY_RULE = (("deterministic", True),)
"""The same plan in every run: nothing is measured."""
NO_CLIPPING = (("gradient_clipping", 0.0),)

AFTER_SUM = (("gradient_partition.accumulate", "after_sum"),)
"""At stage 2 every micro-batch is summed over ranks, as in stock."""

BEFORE_SUM = (("gradient_partition.accumulate", "before_sum"),)
"""And here micro-batches are added up first, in room for all gradients."""

Pair = tuple[Run, Run]
"""What is run, and what it is held against: stock, if that has no mode."""


def with_stock(*runs: Run) -> list[Pair]:
    return [
        (replace(run, block=(run.block or BY_RULE) + AFTER_SUM * _adds_up(run)), replace(run, mode="", block=()))
        for run in runs
    ]


def _adds_up(run: Run) -> bool:
    """Whether it has micro-batches that ours would add up before the sum over ranks; at stage 2 stock does not."""
    return run.stage == 2 and (run.accumulation > 1 or run.loop == "by hand")


def with_mode_off(*runs: Run) -> list[Pair]:
    """For what stock cannot do."""
    return [(each, replace(each, mode="off")) for each in (replace(run, block=BY_RULE + run.block) for run in runs)]


def with_stage(stage: int, *runs: Run) -> list[Pair]:
    """For gradients that come in another order on each rank, or on one rank only: stock sorts them out at stage 0, and
    at stage 1 unless it overlaps."""
    return [
        (replace(each, block=BY_RULE, config=NO_CLIPPING + each.config), replace(each, mode="", stage=stage))
        for each in (replace(run, config=NO_CLIPPING + run.config) for run in runs)
    ]


def run_pairs(rank: int, world_size: int, pairs: list[Pair], tolerance: float) -> list[str]:
    """What is wrong, in words. A run that something is held against is run once."""
    references: dict[Run, Seen] = {}
    found: list[str] = []
    for run, other in pairs:
        if other not in references:
            references[other] = train(other, rank, stock=not other.mode)
        found += [f"{run.name}: {each}" for each in problems(run, other, references[other], rank, tolerance)]
    return found


def problems(run: Run, other: Run, theirs: Seen, rank: int, tolerance: float) -> list[str]:
    ours = train(run, rank)
    has_norms = run.stage == other.stage and (run.stage > 0 or run.dtype == "fp32")
    wrong = [each for each in compare(ours, theirs, tolerance) if has_norms or not each.startswith("norms")]
    if run.mode in MODES and ours.mode != run.mode:
        wrong.append(f"gradients are {ours.mode}")
    all_at_end = run.loop in ("coalesced", "unmanaged", "peeking") or (run.loop, run.stage) == ("reduced by hand", 0)
    if run.mode in MODES and not all_at_end and not ours.hidden:
        wrong.append("nothing travels in windows")
    # Stage 2 sends before there is a plan, and takes each layer to run once in a backward: so once, in one round.
    was_misjudged = run.loop == "forwards first" and run.stage == 2 and ours.sent_again <= ours.num_gradients
    if ours.sent_again and not ({"wanders"} & run.features or run.loop == "peeking" or was_misjudged):
        wrong.append(f"{ours.sent_again} gradients were sent twice")
    if "wanders" in run.features and not ours.sent_again:
        wrong.append("no gradient was late")
    if not all(torch.stack(theirs.numbers["losses"]).diff()):
        wrong.append("the loss does not change")
    return wrong


def check(pairs: list[Pair], world_size: int, folder: Path, tolerance: float = 0.0) -> None:
    outcomes = run_on_ranks(run_pairs, world_size, folder, pairs, tolerance)
    for rank, found in enumerate(outcomes):
        assert not found, f"rank {rank}: not what it is held against: {found}"


IN_TURNS = [Run(stage, mode=mode) for stage, mode in zip(STAGES, MODES, strict=True)]
IN_BF16 = [Run(stage, "bf16", mode) for stage, mode in zip(STAGES, (*MODES[1:], MODES[0]), strict=True)]
# As users have it: nothing said, so the plan is made from what is measured, after some steps.
MEASURED = [Run(stage, mode="unsaid", block=(("metrics", "off"),)) for stage in (0, 2)]
IN_EVERY_MODE = [run for stage in STAGES for run in in_modes(Run(stage), *MODES)]


@sampled(
    "runs",
    [[*IN_TURNS, *IN_BF16, MEASURED[1]], [*IN_EVERY_MODE, *IN_BF16, *MEASURED]],
    kept=[0],
    ids=["in turns", "all"],
)
def test_every_mode_and_stage_equals_stock_bit_for_bit(runs: list[Run], tmp_path: Path) -> None:
    check(with_stock(*runs), 2, tmp_path)


def wire_runs() -> list[Run]:
    """Types and divisions."""
    runs = [
        Run(0, "bf16", config=(("prescale_gradients", True),)),
        Run(0, mode="fixed_chunk", config=(("gradient_predivide_factor", 3.0),)),
    ]
    for stage in STAGES:
        runs.append(Run(stage, mode="fixed_chunk", config=(("communication_data_type", "bf16"),)))
        runs.append(Run(stage, "bf16", "fixed_chunk", config=(("communication_data_type", "fp32"),)))
        clipping = ("gradient_clipping", 0.5 if stage else 0.0)
        runs.append(Run(stage, config=(("gradient_allreduce_op", "sum"), clipping)))
    return runs


def accumulating_runs() -> list[Run]:
    """Several backwards to a step."""
    runs = []
    for stage in STAGES:
        runs.append(Run(stage, "bf16", "fixed_chunk", accumulation=3))
        runs.append(Run(stage, loop="by hand"))
        runs.append(Run(stage, loop="unmanaged", config=(("managed_gradient_accumulation", False),)))
        runs.append(Run(stage, mode="dense_only", loop="retained", accumulation=2))
        runs.append(Run(stage, mode="dense_only", loop="coalesced") if stage else Run(stage, loop="no_sync"))
    runs.append(Run(1, loop="no_sync"))
    runs.append(Run(2, "bf16", accumulation=2, config=(("data_types.grad_accum_dtype", "fp32"),)))
    return runs


def graph_runs() -> list[Run]:
    """Unusual forwards and backwards."""
    runs = []
    for stage in STAGES:
        runs.append(Run(stage, mode="dense_only", loop="forwards first"))
        runs.append(Run(stage, mode="dense_only", loop="peeking"))
        runs.append(Run(stage, mode="fixed_chunk", features=frozenset({"sometimes", "twice"})))
        runs.append(Run(stage, loop="evaluating", checkpointing="saved"))
        runs.append(Run(stage, loop="reduced by hand", checkpointing="reentrant"))
    runs += [Run(stage, loop="torch style", checkpointing="reentrant") for stage in (1, 2)]
    runs.append(Run(0, mode="fixed_chunk", features=frozenset({"sparse"})))
    return runs


def zero_runs() -> list[Run]:
    """What ZeRO can be told."""
    settings: list[tuple[str, Any]] = [
        ("overlap_comm", True),
        ("reduce_bucket_size", 53),
        ("reduce_bucket_size", 100_003),
        ("round_robin_gradients", True),
        ("offload_optimizer.device", "cpu"),
        ("use_multi_rank_bucket_allreduce", False),
    ]
    return [
        Run(stage, mode="fixed_chunk", config=((f"zero_optimization.{path}", value),))
        for stage in (1, 2)
        for path, value in settings
    ]


def whole_list() -> list[Run]:
    return [*wire_runs(), *accumulating_runs(), *graph_runs(), *zero_runs()]


def covering(runs: list[Run]) -> list[Run]:
    """Each kind of run at one stage, in turns."""
    kinds = defaultdict(list)
    for run in runs:
        kinds[run.loop, run.dtype, run.checkpointing, run.features, run.config].append(run)
    return [same[index % len(same)] for index, same in enumerate(kinds.values())]


@sampled(("first", "every"), [(2, 4), (0, 1)], kept=[0])
def test_training_equals_stock_bit_for_bit(first: int, every: int, tmp_path: Path) -> None:
    check(with_stock(*covering(whole_list())[first::every]), 2, tmp_path)


def adding_up_pairs(is_all: bool) -> list[Pair]:
    """Stage 2, in which micro-batches are added up before the sum over ranks, as stock does at stage 1."""
    runs = [
        Run(2, accumulation=3),
        Run(2, "bf16", "fixed_chunk", accumulation=3),
        Run(2, mode="dense_only", loop="by hand", ep_size=1, features=frozenset({"sometimes", "twice"})),
        Run(2, accumulation=2, loop="torch style", checkpointing="reentrant"),
        Run(2, mode="dense_only", loop="retained", accumulation=2),
        Run(2, ep_size=1, accumulation=2, config=(("zero_optimization.overlap_comm", True),)),
        Run(
            2,
            mode="fixed_chunk",
            ep_size=1,
            accumulation=2,
            config=(("zero_optimization.round_robin_gradients", True),),
        ),
    ]
    runs = [each for run in runs for each in in_modes(run, *MODES)] if is_all else runs
    pairs = [(replace(run, block=BY_RULE + BEFORE_SUM), replace(run, mode="", stage=1, config=())) for run in runs]
    return [(replace(run, config=NO_CLIPPING + run.config), replace(other, config=NO_CLIPPING)) for run, other in pairs]


@sampled("is_all", [False, True], kept=[0])
def test_stage_2_adds_micro_batches_up_before_the_sum_over_ranks_as_stock_does_at_stage_1(
    is_all: bool, tmp_path: Path
) -> None:
    check(adding_up_pairs(is_all), 2, tmp_path)


def sums_of_a_step(rank: int, world_size: int) -> dict[str, int]:
    """How many rounds of sums over ranks three steps of three micro-batches take."""
    found = {}
    for name, run in {
        "auto": Run(2, accumulation=3, block=BY_RULE, steps=3),
        "before_sum": Run(2, accumulation=3, block=BY_RULE + BEFORE_SUM, steps=3),
        "after_sum": Run(2, accumulation=3, block=BY_RULE + AFTER_SUM, steps=3),
        "stage 1": Run(1, accumulation=3, block=BY_RULE, steps=3),
        "in another type": Run(
            2, "bf16", accumulation=3, block=BY_RULE, steps=3, config=(("data_types.grad_accum_dtype", "fp32"),)
        ),
    }.items():
        found[name] = train(run, rank).rounds
    return found


def test_stage_2_sums_over_ranks_once_a_step_where_it_is_told_to(tmp_path: Path) -> None:
    for found in run_on_ranks(sums_of_a_step, 2, tmp_path):
        assert found == {"auto": 9, "before_sum": 3, "after_sum": 9, "stage 1": 3, "in another type": 9}


def refused_to_add_up(rank: int, world_size: int) -> list[str]:
    """What is said where micro-batches cannot be added up as asked for."""
    from ds_fsmoe.config.reading import ConfigError

    before = BY_RULE + BEFORE_SUM
    found = []
    for run in (
        Run(1, block=BY_RULE + AFTER_SUM),
        Run(0, block=BY_RULE + AFTER_SUM),
        Run(2, block=before, config=(("managed_gradient_accumulation", False),)),
        Run(2, "bf16", block=before, config=(("data_types.grad_accum_dtype", "fp32"),)),
        Run(2, block=before, config=(("zero_optimization.offload_optimizer.device", "cpu"),)),
    ):
        with pytest.raises(ConfigError) as error, training(run, rank):
            pass
        found.append(str(error.value))
    return found


def test_what_cannot_be_added_up_as_asked_for_is_said_on_every_rank(tmp_path: Path) -> None:
    path = "fsmoe.gradient_partition.accumulate"
    for found in run_on_ranks(refused_to_add_up, 2, tmp_path):
        for said in found[:2]:
            assert said.startswith(f'{path} = "after_sum" needs zero_optimization.stage 2')
        for said, reason in zip(
            found[2:], ("managed_gradient_accumulation", "grad_accum_dtype", "offload"), strict=True
        ):
            assert said.startswith(f'{path} = "before_sum" is not possible here, because')
            assert reason in said
            assert said.endswith('use "auto" or "after_sum"')


def restless_pairs() -> list[Pair]:
    """Gradients that come late, from elsewhere, or on one rank only."""
    pairs = []
    for stage, mode in zip(STAGES, MODES, strict=True):
        wandering = Run(stage, mode=mode, features=frozenset({"wanders", "sometimes"}), steps=9)
        skipping = Run(stage, mode=mode, ep_size=1, features=frozenset({"skips"}), steps=9)
        twice_there = Run(stage, features=frozenset({"shared"}), checkpointing="reentrant")
        pairs += [*with_stage(0, wandering, skipping), *with_stage(min(stage, 1), twice_there)]
    return pairs


def beyond_stock() -> list[Pair]:
    """What stock has no word for."""
    degrees = (("pipeline_degree.forward", 2), ("pipeline_degree.backward", 3))
    pairs = []
    for stage in STAGES:
        pairs += with_mode_off(
            Run(stage, block=degrees),
            Run(stage, mode="fixed_chunk", block=(*degrees, ("overlap", False))),
        )
    return pairs


@pytest.mark.slow
@sampled("is_all", [False, True], kept=[0])
def test_late_missing_and_unheard_of_gradients_are_exact(is_all: bool, tmp_path: Path) -> None:
    # Without a batch there are no dense gradients, and DeepSpeed's own reduction only knows at stage 0 what that means.
    absent = Run(block=BY_RULE, loop="without a batch", steps=7, config=NO_CLIPPING)
    without = [
        (replace(absent, stage=stage, mode=mode), replace(absent, mode="off"))
        for stage, mode in zip(STAGES, MODES, strict=True)
    ]
    restless, beyond = restless_pairs(), beyond_stock()
    # Of each kind one, at several stages and in all modes.
    pairs = [*restless, *beyond, *without] if is_all else [*restless[4::2], *beyond[::3], *without[::2]]
    check(pairs, 2, tmp_path)


def runs_of_four() -> list[Pair]:
    """Expert gradients travel over two ranks, and over all."""
    degrees = (("pipeline_degree.forward", 2), ("pipeline_degree.backward", 3))
    features = frozenset({"gpt"})
    # Stock leaves it sparse, and adds up what comes twice in another order.
    pairs = with_stock(Run(0, features=frozenset({"sparse function"})))
    for stage, mode in zip(STAGES, MODES, strict=True):
        wandering = Run(stage, mode=mode, features=frozenset({"wanders"}), steps=9)
        pairs += with_stock(Run(stage, mode=mode, features=frozenset({"sometimes", "twice"})))
        pairs += with_stage(0, wandering)
        pairs += with_mode_off(Run(stage, mode=mode, features=features, block=(("esp_size", 2), *degrees)))
    return pairs


@pytest.mark.slow
def test_four_ranks_equal_stock_to_rounding(tmp_path: Path) -> None:
    check(runs_of_four()[::2], 4, tmp_path, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_training_equals_stock_in_the_whole_product(mode: str, dtype: str, tmp_path: Path) -> None:
    runs = [replace(run, mode=mode, dtype=dtype) for run in whole_list() if "communication_" not in run.name]
    runs = [run for run in runs if dtype == "bf16" or "data_types" not in run.name]
    check(with_stock(*runs), 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_four_ranks_equal_stock_to_rounding_in_the_whole_product(mode: str, tmp_path: Path) -> None:
    runs = whole_list()
    runs = [replace(run, mode=mode) for run in runs if run.dtype == "fp32" and "data_type" not in run.name]
    check([*with_stock(*runs), *runs_of_four()], 4, tmp_path, TOLERANCE)


def break_something(rank: int, world_size: int) -> list[str]:
    from ds_fsmoe.gradients.flat_buffers import FlatGradients

    run = Run(1, mode="fixed_chunk", block=BY_RULE)
    theirs = train(replace(run, mode="", block=()), rank, stock=True)
    send = FlatGradients.send
    FlatGradients.send = lambda self, first, stop, task: None if first == 0 else send(self, first, stop, task)
    return compare(train(run, rank), theirs)


def test_the_comparison_sees_one_slice_that_is_not_sent(tmp_path: Path) -> None:
    for found in run_on_ranks(break_something, 2, tmp_path):
        assert any(each.startswith("losses") for each in found)
        assert any(each.startswith("parameter") for each in found)


Overflows = dict[str, tuple[list[str], list[float], int]]


def fp16_runs(rank: int, world_size: int, modes: list[tuple[int, str]]) -> Overflows:
    """Dynamic loss scale, and in one step an overflow on one rank."""
    from deepspeed.accelerator import get_accelerator

    # Here the CPU says no, for want of speed; the arithmetic is there.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    config = (("fp16.initial_scale_power", 8), ("fp16.loss_scale_window", 2), ("fp16.hysteresis", 1))

    def run(stage: int, mode: str, stock: bool) -> tuple[Seen, list[float], int]:
        scales = []
        with training(Run(stage, "fp16", mode, config=config, block=BY_RULE), rank, stock) as script:
            for step in range(STEPS + 1):
                if step == 3 and rank == 1:
                    handle = script.model.last.weight.register_hook(lambda gradient: gradient * float("inf"))
                LOOPS["plain"](script)
                if step == 3 and rank == 1:
                    handle.remove()
                scales.append(float(script.engine.optimizer.cur_scale))
        return script.seen, scales, script.engine.skipped_steps

    of_stock = {stage: run(stage, "", True) for stage in sorted({stage for stage, _ in modes})}
    outcomes: Overflows = {}
    for stage, mode in modes:
        (seen, scales, skipped), (theirs, their_scales, they_skipped) = run(stage, mode, False), of_stock[stage]
        wrong = compare(seen, theirs)
        wrong += [f"scales {scales} and {their_scales}"] if scales != their_scales else []
        wrong += [f"{skipped} and {they_skipped} steps skipped"] if skipped != they_skipped else []
        wrong += [] if seen.hidden else ["nothing travels in windows"]
        outcomes[f"{stage} {mode}"] = wrong, scales, skipped
    return outcomes


@sampled(
    "modes",
    [[(1, "adaptive"), (2, "fixed_chunk"), (1, "dense_only")], [(stage, mode) for stage in (1, 2) for mode in MODES]],
    kept=[0],
    ids=["in turns", "all"],
)
def test_an_overflow_skips_the_same_step_as_stock(modes: list[tuple[int, str]], tmp_path: Path) -> None:
    for outcomes in run_on_ranks(fp16_runs, 2, tmp_path, modes):
        assert len(outcomes) == len(modes)
        for name, (wrong, scales, skipped) in outcomes.items():
            assert not wrong, f"{name}: {wrong}"
            assert skipped == 1
            assert scales[3] < scales[2]


Messages = list[dict[tuple[int, ...], list]]
"""Of each run, what one rank has sent, by group."""


def calm_and_delayed(rank: int, world_size: int, runs: list[Run]) -> tuple[Messages, Messages]:
    return taps(rank, runs, False), taps(rank, runs, True)


def taps(rank: int, runs: list[Run], delays: bool) -> Messages:
    """The messages of this rank in each run; ``delays``: with a pause before some of them and some gradients."""
    seen = []
    for run in runs:
        with Wiretap(seed=rank if delays else None) as tap, training(run, rank) as script:
            rng = random.Random(rank + 5)
            for parameter in script.model.parameters():
                if delays and parameter.requires_grad:
                    parameter.register_hook(lambda gradient, rng=rng: pause(rng, 0, 0, 0.002))
            for _ in range(run.steps):
                LOOPS[run.loop](script)
        seen.append(dict(tap.messages))
    return seen


@pytest.mark.slow
@sampled(
    "modes", [[(0, "adaptive"), (2, "dense_only")], [*zip(STAGES, MODES, strict=True)]], kept=[0], ids=["two", "all"]
)
def test_ranks_send_the_same_messages_however_they_are_delayed(modes: list[tuple[int, str]], tmp_path: Path) -> None:
    features = frozenset({"sometimes", "wanders"})
    runs = [Run(stage, mode=mode, features=features, block=BY_RULE) for stage, mode in modes]
    calm, delayed = zip(*run_on_ranks(calm_and_delayed, 4, tmp_path, runs), strict=True)
    for of_run in zip(*calm, strict=True):
        sizes = [len(messages) for messages in of_run[0].values()]
        assert len(sizes) > 1
        assert min(sizes) >= STEPS
        for messages in of_run:
            for ranks, of_rank in messages.items():
                assert of_rank == of_run[ranks[0]][ranks]
    assert delayed == calm


def traced(rank: int, world_size: int, folder: str) -> None:
    trace = {"enabled": True, "start_step": 3, "num_steps": 1, "path": folder}
    train(Run(1, block=(*BY_RULE, *((f"trace.{key}", value) for key, value in trace.items()))), rank)


def test_slices_travel_inside_the_backwards_of_moe_layers(tmp_path: Path) -> None:
    run_on_ranks(traced, 4, tmp_path / "run", str(tmp_path / "trace"))
    for rank in range(4):
        trace = json.loads((tmp_path / "trace" / f"rank{rank}.json").read_text())
        found = defaultdict(list)
        for each in trace["traceEvents"]:
            if each["ph"] == "X" and each["cat"] == "measured":
                _, layer, phase, kind, *_ = each["name"].split("/")
                found[layer, phase, kind].append((each["ts"], each["ts"] + each["dur"]))
        assert {phase for _, phase, kind in found if kind in ("GRAD", "EXPERT_GRAD")} == {"bwd"}
        # Tokens of the third layer stay where they are.
        for layer in ("L00", "L01"):
            slices = found[layer, "bwd", "GRAD"] + found[layer, "bwd", "EXPERT_GRAD"]
            assert found[layer, "bwd", "GRAD"]
            assert found[layer, "bwd", "EXPERT_GRAD"]
            assert max(stop for _, stop in found[layer, "bwd", "A2A_IN"]) <= min(start for start, _ in slices)
            assert max(stop for _, stop in slices) <= min(start for start, _ in found[layer, "bwd", "A2A_OUT"])


def take_over_and_give_back(rank: int, world_size: int, every: int) -> list[str]:
    import deepspeed

    wrong = []
    for stage, mode in [*itertools.product(STAGES, (*MODES, "off"))][::every]:
        run = Run(stage, mode=mode, block=BY_RULE, steps=2)
        with training(run, rank) as script:
            LOOPS["plain"](script)
            engine, model = script.engine, script.model
            layers = list(engine.fsmoe.layers.values())
            has_windows = [layer.pipeline.window is not None for layer in layers]
        wrong += [f"{run.name}: a window is missing, or too many"] if set(has_windows) != {mode != "off"} else []
        left = [name for name in vars(engine) if name in dir(type(engine)) and callable(getattr(engine, name))]
        optimizer = vars(engine).get("optimizer")
        left += [name for name in vars(optimizer) if name in dir(type(optimizer))] if stage else []
        left += [
            f"a hook of {name}"
            for name, parameter in model.named_parameters()
            if any(
                getattr(hook, "__module__", "").startswith("ds_fsmoe")
                for hook in (parameter._post_accumulate_grad_hooks or {}).values()
            )
        ]
        left += ["a window"] if any(layer.pipeline.window is not None for layer in layers) else []
        wrong += [f"{run.name}: {left} left behind"] if [each for each in left if each not in _OF_STOCK] else []
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    return wrong


# DeepSpeed's own: attributes of an engine or optimizer that stand in front of methods or class attributes.
_OF_STOCK: set[str] = set()


@sampled("every", [3, 1], kept=[0])
def test_closing_an_engine_gives_everything_back_and_another_works(every: int, tmp_path: Path) -> None:
    for wrong in run_on_ranks(take_over_and_give_back, 2, tmp_path, every):
        assert not wrong


def refused(rank: int, world_size: int) -> tuple[str, str]:
    """In words: an explicit mode where gradients stay DeepSpeed's; and what is said where none was asked for."""
    from ds_fsmoe.config.reading import ConfigError

    run = Run(1, "bf16", "adaptive", config=(("data_types.grad_accum_dtype", "fp32"),))
    theirs = train(replace(run, mode=""), rank, stock=True)
    ours = train(replace(run, mode="unsaid"), rank)
    assert not compare(ours, theirs)
    try:
        train(run, rank)
    except ConfigError as error:
        return str(error), ours.mode
    return "nothing", ours.mode


def test_where_gradients_stay_deepspeeds_an_explicit_mode_is_refused(tmp_path: Path) -> None:
    for message, mode in run_on_ranks(refused, 2, tmp_path):
        assert "BF16_Optimizer" in message
        assert "off" in message
        assert "not overlapped" in mode
