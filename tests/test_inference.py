# SPDX-License-Identifier: Apache-2.0
"""Inference with experts that come and go gives the outputs of the plain forward, whatever table it goes by."""

from __future__ import annotations

import gc
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.inference_models import CalledExperts, Experts, Model, ds_config, engine_of, tokens
from tests.ranks import run_on_ranks
from tests.small_model import Case, SmallModel, batch

WAYS: dict[str, dict[str, Any]] = {
    "both": {},
    "no estimate": {"estimate": False},
    "no second phase": {"second_phase": False},
    "weights from home": {"weights": "home"},
    "weights from home, no estimate": {"weights": "home", "estimate": False},
    "short paths": {"path_length": 1, "most_per_rank": 1},
}


def watched(engine: Any) -> Any:
    """Count paths in training from now on."""
    from ds_fsmoe.telemetry.paths import PathProfiler

    layers = {label: each.fsmoe.total_experts for label, each in engine.fsmoe.inner_layers.items()}
    profiler = PathProfiler(layers)
    engine.fsmoe.running.instruments.append(profiler.watch)
    return profiler


def plain(engine: Any, *x: Any) -> torch.Tensor:
    """The output of the plain forward."""
    engine.eval()
    with torch.no_grad():
        result = engine(*x)
    engine.train()
    return result


def furthest(found: torch.Tensor, wanted: torch.Tensor) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    scale = wanted.abs().max().item() if wanted.numel() else 1.0
    return (found - wanted).abs().max().item() / scale if wanted.numel() else 0.0


def ways(rank: int, world_size: int, num_experts: int, k: int, experts: type[Experts], chunks: int) -> list[str]:
    """What differs from the plain forward, with as many tokens as a rank's number allows: none on the first."""
    import ds_fsmoe

    engine = engine_of(Model(num_experts, k, experts=experts), ds_config(world_size, num_chunks=chunks))
    profiler = watched(engine)
    engine.backward(engine(tokens(rank, 64)).square().mean())
    engine.step()
    said = [] if profiler.profiles()["L01"].num_counted == 64 * k else ["not every choice was counted"]
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        engine.module.to(dtype)
        for name in WAYS if dtype == torch.float32 else ("both", "weights from home"):
            options = WAYS[name]
            xs = [tokens(rank, size, seed, dtype) for seed, size in enumerate((29 * rank, 17, 5 * (world_size - rank)))]
            wanted = [plain(engine, each) for each in xs]
            with ds_fsmoe.inference(engine, **options) as happened:
                found = [engine(each) for each in xs]
            off = max(map(furthest, found, wanted))
            if off > tolerance or any(each.requires_grad for each in found):
                said.append(f"{name}, {dtype}: off by {off:.1e}")
            records = list(happened.layers.values())
            if len(records) != 3 or any(each.calls != 3 for each in records) or happened.left:
                said.append(f"{name}: {happened}")
            if (sum(each.second_phases for each in records) == 0) != (name == "no second phase"):
                said.append(f"{name}: {happened}")
            # Where tokens choose most of all experts, loads are even as they are.
            if k < num_experts / 2 and max(each.copies for each in records) <= 3 * num_experts:
                said.append(f"{name}: no expert was on several ranks")
            is_even = all(each.fullest >= each.fullest_at_home for each in records)
            if k < num_experts / 2 and name != "no second phase" and is_even:
                said.append(f"{name}: no load has become more even: {happened}")
    engine.destroy()
    return said


@pytest.mark.parametrize(
    ("world_size", "num_experts", "k", "experts", "chunks"),
    [(2, 6, 1, Experts, 1), (2, 10, 8, CalledExperts, 2), (4, 12, 2, Experts, 2)],
)
def test_outputs_are_those_of_the_plain_forward(
    world_size: int, num_experts: int, k: int, experts: type[Experts], chunks: int, tmp_path: Path
) -> None:
    found = run_on_ranks(ways, world_size, tmp_path, num_experts, k, experts, chunks)
    assert [each for of_rank in found for each in of_rank] == []


def in_groups(rank: int, world_size: int, stage: int, alltoall: str) -> list[str]:
    """The same where ZeRO shares experts out over two groups of ranks that share them, or tokens cross once."""
    import ds_fsmoe

    ep_size = 2 if stage == 3 else 4
    topology = {"ranks_per_node": 2}
    block = {"alltoall": alltoall, "topology": topology}
    engine = engine_of(Model(8, 2), ds_config(ep_size, stage, **block))
    watched(engine)
    engine.backward(engine(tokens(rank, 64)).square().mean())
    engine.step()
    said = []
    for name, options in WAYS.items():
        xs = [tokens(rank, 11 + 5 * rank, seed) for seed in range(3)]
        wanted = [plain(engine, each) for each in xs]
        with ds_fsmoe.inference(engine, **options) as happened:
            found = [engine(each) for each in xs]
        off = max(map(furthest, found, wanted))
        if off > 1e-5 or len(happened.layers) != 3:
            said.append(f"{name}: off by {off:.1e}, {happened}")
    engine.destroy()
    return said


@pytest.mark.parametrize(("stage", "alltoall"), [(3, "flat"), (2, "once_per_node")])
def test_zero_3_and_tokens_that_cross_once_change_nothing(stage: int, alltoall: str, tmp_path: Path) -> None:
    found = run_on_ranks(in_groups, 4, tmp_path, stage, alltoall)
    assert [each for of_rank in found for each in of_rank] == []


def by_rule(rank: int, world_size: int, k: int) -> dict[str, Any]:
    """What happened with routing in which a path says all, on the tokens that were trained with."""
    import ds_fsmoe

    engine = engine_of(Model(12, k, layers=5, is_ruled=True), ds_config(world_size))
    watched(engine)
    x_SM = tokens(rank, 300)
    engine.backward(engine(x_SM).square().mean())
    result = {}
    for name in ("both", "no estimate", "no second phase"):
        with ds_fsmoe.inference(engine, **WAYS[name]) as happened:
            engine(x_SM)
        result[name] = {label: asdict(each) for label, each in happened.layers.items()}
        result[f"{name}, shares"] = happened.accuracy, happened.second_phases
    engine.destroy()
    return result


@pytest.mark.parametrize("k", [1, 2])
def test_estimates_are_right_where_the_path_decides_about_everything(k: int, tmp_path: Path) -> None:
    first, *others = run_on_ranks(by_rule, 4, tmp_path, k)
    assert all(each == first for each in others)
    assert first["both, shares"] == (1.0, 0.0)
    assert first["no estimate, shares"] == (None, 1.0)
    assert first["no second phase, shares"] == (None, 0.0)
    # The table by the estimate is that by the true counts.
    for label, record in first["both"].items():
        assert record["compared"] == record["counted"] == 1
        assert record["fullest"] == pytest.approx(first["no estimate"][label]["fullest"])
        assert record["copies"] == first["no second phase"][label]["copies"] > 12
        assert record["fullest"] < 1.2 < record["fullest_at_home"]


def any_table(rank: int, world_size: int, weights: str) -> list[str]:
    """The outputs by tables that nobody would make, others in each call."""
    import ds_fsmoe
    from ds_fsmoe.layer import inference

    engine = engine_of(Model(12, 2), ds_config(world_size, num_chunks=2))
    watched(engine)
    engine.backward(engine(tokens(rank, 64)).square().mean())
    draw, seen = np.random.default_rng(5), []

    def drawn(popularity_E: np.ndarray, num_ranks: int, *_: Any) -> tuple[tuple[int, ...], ...]:
        # Every fifth leaves the first rank without an expert.
        first = int(len(seen) % 5 == 0)
        is_there = draw.random((num_ranks, 12)) < draw.random()
        is_there[:first] = False
        is_there[draw.integers(first, num_ranks, 12), np.arange(12)] = True
        seen.append(tuple(tuple(np.flatnonzero(each).tolist()) for each in is_there))
        return seen[-1]

    theirs, inference.ranks_of_experts = inference.ranks_of_experts, drawn
    said = []
    try:
        with ds_fsmoe.inference(engine, weights=weights):
            found = [engine(tokens(rank, 23, seed)) for seed in range(8)]
    finally:
        inference.ranks_of_experts = theirs
    for seed, each in enumerate(found):
        off = furthest(each, plain(engine, tokens(rank, 23, seed)))
        if off > 1e-5:
            said.append(f"forward {seed}: off by {off:.1e}")
    sizes = {len(each) for table in seen for each in table}
    engine.destroy()
    return said + ([] if len(set(seen)) >= 24 and {0, 12} < sizes else [f"few kinds of tables: {sizes}"])


@pytest.mark.parametrize("weights", ["host", "home"])
def test_outputs_do_not_depend_on_the_table(weights: str, tmp_path: Path) -> None:
    assert run_on_ranks(any_table, 4, tmp_path, weights) == [[]] * 4


def moved(rank: int, world_size: int) -> list[str]:
    """What differs where experts have moved in training, and one has a replica."""
    import ds_fsmoe

    asked = {"policy": "balanced", "spare_experts": 1, "every": 1000}
    engine = engine_of(Model(6, 2), ds_config(world_size, placement=asked))
    placement = engine.fsmoe.placement.now["L01"]
    wanted = placement.swapped(0, placement.per_rank + 1)
    wanted = wanted.with_replicas({placement.num_local: wanted.expert_of_place[placement.per_rank]})
    engine.fsmoe.placement.go_to({"L01": wanted})
    x_SM = tokens(rank, 31)
    by_plain = plain(engine, x_SM)
    said = []
    for name in ("no estimate", "weights from home, no estimate"):
        with ds_fsmoe.inference(engine, **WAYS[name]) as happened:
            found = engine(x_SM)
        if furthest(found, by_plain) > 1e-5 or len(happened.layers) != 3:
            said.append(f"{name}: off by {furthest(found, by_plain):.1e}, {happened}")
    if not torch.equal(plain(engine, x_SM), by_plain) or engine.fsmoe.placement.now["L01"] != wanted:
        said.append("the placement is not as before")
    engine.destroy()
    return said


def test_experts_that_have_moved_in_training_are_found(tmp_path: Path) -> None:
    assert run_on_ranks(moved, 2, tmp_path) == [[], []]


def deepspeeds_layers(rank: int, world_size: int, k: int, drop_tokens: bool, expert: str) -> list[str]:
    """What differs with ``deepspeed.moe.layer.MoE``, whose experts are modules, whether rows travel or slots."""
    import ds_fsmoe

    # Nothing is drawn at random, so that two forwards can be compared.
    options = ("use_rts", False), ("top2_2nd_expert_sampling", False)
    case = Case(world_size, 0, k=k, drop_tokens=drop_tokens, expert=expert, moe_options=options)
    engine = engine_of(SmallModel(case, rank), case.ds_config(fsmoe={"enabled": True}))
    said = []
    xs = [batch(seed, rank, torch.float32) for seed in range(3)]
    wanted = [plain(engine, *each) for each in xs]
    counts = [each.exp_counts for each in engine.fsmoe.inner_layers.values()]
    for name in ("no estimate", "weights from home, no estimate"):
        with ds_fsmoe.inference(engine, **WAYS[name]) as happened:
            found = [engine(*each) for each in xs]
        pairs = [pair for both in zip(found, wanted, strict=True) for pair in zip(*both, strict=True)]
        off = max(furthest(*each) for each in pairs)
        if off > 1e-5 or len(happened.layers) != 2:
            said.append(f"{name}: off by {off:.1e}, {happened}")
        counts_now = [each.exp_counts for each in engine.fsmoe.inner_layers.values()]
        if not all(map(torch.equal, counts, counts_now)):
            said.append(f"{name}: tokens of experts {counts_now} for {counts}")
    engine.destroy()
    return said


@pytest.mark.parametrize(("k", "drop_tokens", "expert"), [(1, True, "module"), (2, False, "gpt")])
def test_deepspeeds_own_layers_give_the_same(k: int, drop_tokens: bool, expert: str, tmp_path: Path) -> None:
    assert run_on_ranks(deepspeeds_layers, 2, tmp_path, k, drop_tokens, expert) == [[], []]


def comes_and_goes(rank: int, world_size: int) -> list[str]:
    """What is not as it was after inference, ended by itself or by an error."""
    import ds_fsmoe

    said = []
    engine = engine_of(Model(6, 2), ds_config(world_size))
    watched(engine)
    engine.backward(engine(tokens(rank, 32)).square().mean())
    engine.step()
    engine.module.blocks[1].eval()
    running, layers = engine.fsmoe.running, list(engine.fsmoe.inner_layers.values())

    def as_it_is() -> list[Any]:
        states = [
            (each.fsmoe.placed, each.fsmoe.replicas, each.fsmoe.parts, len(each._forward_hooks)) for each in layers
        ]
        training = [each.training for each in engine.module.modules()]
        return [states, training, list(running.instruments), torch.is_grad_enabled()]

    before, alive = as_it_is(), []
    for error in (None, KeyError("of the script")):
        try:
            with ds_fsmoe.inference(engine) as happened:
                engine(tokens(rank, 9))
                alive += [weakref.ref(each.fsmoe.placed.held) for each in layers]
                if any(each.training for each in engine.module.modules()) or torch.is_grad_enabled():
                    said.append("it is not in evaluation")
                if error is not None:
                    raise error
        except KeyError:
            pass
        if as_it_is() != before:
            said.append(f"after {error!r}: {as_it_is()} for {before}")
        gc.collect()
        if any(each() is not None for each in alive) or len(alive) < 3:
            said.append(f"after {error!r}: weights are still there")
        if any(each.calls != 1 for each in happened.layers.values()):
            said.append(f"{happened}")
    loss = engine(tokens(rank, 32)).square().mean()
    engine.backward(loss)
    engine.step()
    engine.destroy()
    return said


def test_all_is_as_before_when_it_has_ended(tmp_path: Path) -> None:
    assert run_on_ranks(comes_and_goes, 2, tmp_path) == [[], []]


def refused(rank: int, world_size: int) -> list[str]:
    """What is said of wrong options, and of a model of one rank's experts."""
    import ds_fsmoe

    engine = engine_of(Model(6, 2), ds_config(world_size))
    said = []
    wrong: list[dict[str, Any]] = [
        {"path_length": -1},
        {"most_per_rank": 0},
        {"weights": "disk"},
        {"estimate": False, "second_phase": False},
        {"second_phase": False},
    ]
    for options in wrong:
        try:
            with ds_fsmoe.inference(engine, **options):
                said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    said.append(str(engine.module.training))
    engine.destroy()
    engine = engine_of(Model(6, 2), ds_config(1))
    x_SM = tokens(rank, 7)
    wanted = plain(engine, x_SM)
    with ds_fsmoe.inference(engine) as happened:
        found = engine(x_SM)
    said += [str(torch.equal(found, wanted)), *happened.left.values()]
    engine.destroy()
    return said


def test_wrong_options_are_refused_and_layers_of_one_rank_left(tmp_path: Path) -> None:
    found, other = run_on_ranks(refused, 2, tmp_path)
    assert found == other
    assert "path_length = -1" in found[0]
    assert "most_per_rank = 0" in found[1]
    assert "weights = 'disk'" in found[2]
    assert "one of them must be on" in found[3]
    assert "no paths of tokens were counted" in found[4]
    assert found[5:7] == ["True", "True"]
    assert found[7:] == ["one rank has all of its experts"] * 3


def generating(rank: int, world_size: int) -> list[str]:
    """What differs of texts that are unlike on each rank in number and length."""
    import ds_fsmoe
    from tests.hf_families import batch as texts
    from tests.hf_families import model_of

    model = model_of("olmoe")
    model.generation_config.eos_token_id = None
    engine = engine_of(model, ds_config(world_size, stage=1, num_chunks=2))
    watched(engine)
    x = texts(0, world_size)[rank : rank + 1]
    engine.backward(engine(input_ids=x, labels=x).loss)
    engine.step()
    prompt = texts(7 + rank, 1 + rank, 3 + 4 * rank)
    how = {"max_new_tokens": 5 + 6 * rank, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    engine.eval()
    wanted = engine.module.generate(input_ids=prompt, **how)
    engine.train()
    with ds_fsmoe.inference(engine.module) as happened:
        found = engine.module.generate(input_ids=prompt, **how)
    said = [] if torch.equal(found, wanted) else [f"{found.tolist()} for {wanted.tolist()}"]
    if any(each.calls < 5 + 6 * (world_size - 1) for each in happened.layers.values()):
        said.append(f"{happened}")
    engine.destroy()
    return said


def test_texts_are_those_that_are_generated_without(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert run_on_ranks(generating, 2, tmp_path) == [[], []]
