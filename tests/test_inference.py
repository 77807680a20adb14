# SPDX-License-Identifier: Apache-2.0
"""Inference with experts that come and go gives the outputs of the plain forward, whatever table it goes by.

It begins where training has left the experts, and leaves all as it was.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ds_fsmoe.components.routing import BareRouting
from ds_fsmoe.layer import inference as layer_inference
from ds_fsmoe.layer.expert_cache import ExpertCacheMemory
from ds_fsmoe.layer.inference import InferenceLayer, InferenceRun
from ds_fsmoe.observing.instruments import LayerCall
from ds_fsmoe.planning.lina.popularity import PathProfile
from tests.distances import furthest
from tests.inference_models import (
    HIDDEN,
    WAYS,
    WIDTH,
    CalledExperts,
    Experts,
    Model,
    ds_config,
    plain,
    tokens,
    watched,
)
from tests.ranks import run_on_ranks
from tests.sgd_engines import engine_of
from tests.small_model import Case, SmallModel, batch


def counted(rank: int, model: torch.nn.Module, config: dict[str, Any]) -> Any:
    """An engine that has taken one step, in which the paths of its tokens were counted."""
    engine = engine_of(model, config)
    watched(engine)
    engine.backward(engine(tokens(rank, 64)).square().mean())
    engine.step()
    return engine


def by_both(engine: Any, way: str, run: Callable[[int], Any], count: int) -> tuple[float, Any]:
    """How far the outputs of some forwards are from those of the plain ones, and what happened."""
    import ds_fsmoe

    engine.eval()
    with torch.no_grad():
        wanted = [run(number) for number in range(count)]
    engine.train()
    with ds_fsmoe.inference(engine, **WAYS[way]) as happened:
        found = [run(number) for number in range(count)]
    ours, theirs = (
        [x for each in every for x in (each if isinstance(each, tuple) else (each,))] for every in (found, wanted)
    )
    assert not any(each.requires_grad for each in ours)
    return max(map(furthest, ours, theirs)), happened


def ways(rank: int, world_size: int, num_experts: int, k: int, experts: type[Experts], chunks: int) -> None:
    """With as many tokens as a rank's number allows: none on the first."""
    engine = engine_of(Model(num_experts, k, experts=experts), ds_config(world_size, num_chunks=chunks))
    profiler = watched(engine)
    # Without a step: with one, the experts that are called grow beyond all numbers.
    engine.backward(engine(tokens(rank, 64)).square().mean())
    assert profiler.profiles()["L01"].num_counted == 64 * k, "every choice was counted"
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        engine.module.to(dtype)
        for name in WAYS if dtype == torch.float32 else ("both", "weights from home"):
            xs = [tokens(rank, size, seed, dtype) for seed, size in enumerate((29 * rank, 17, 5 * (world_size - rank)))]
            off, happened = by_both(engine, name, lambda number, xs=xs: engine(xs[number]), 3)
            assert off <= tolerance, (name, dtype)
            records = list(happened.layers.values())
            assert [each.calls for each in records] == [3] * 3
            assert not happened.left
            has_second = name != "no second phase"
            assert (sum(each.second_phases for each in records) > 0) == has_second
            # Where tokens choose most of all experts, loads are even as they are.
            if k < num_experts / 2:
                assert max(each.copies for each in records) > 3 * num_experts, "some expert was on several ranks"
                assert not has_second or any(each.fullest < each.fullest_primary for each in records)
    engine.destroy()


@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "num_experts", "k", "experts", "chunks"),
    [(2, 6, 1, Experts, 1), (2, 10, 8, CalledExperts, 2), (4, 12, 2, Experts, 2)],
)
def test_outputs_are_those_of_the_plain_forward(
    world_size: int, num_experts: int, k: int, experts: type[Experts], chunks: int, tmp_path: Path
) -> None:
    run_on_ranks(ways, world_size, tmp_path, num_experts, k, experts, chunks)


def in_groups(rank: int, world_size: int) -> None:
    """The same where ZeRO shares experts out over two groups of ranks that share them, or tokens cross once."""
    for ep_size, stage, alltoall in ((2, 3, "flat"), (4, 2, "node_deduplicated")):
        block = {"alltoall": alltoall, "topology": {"ranks_per_node": 2}}
        engine = counted(rank, Model(8, 2), ds_config(ep_size, stage, **block))
        for name in WAYS:
            off, happened = by_both(engine, name, lambda seed, of=engine: of(tokens(rank, 11 + 5 * rank, seed)), 3)
            assert off <= 1e-5, (alltoall, name)
            assert len(happened.layers) == 3
        engine.destroy()


@pytest.mark.long
def test_zero_3_and_tokens_that_cross_once_change_nothing(tmp_path: Path) -> None:
    run_on_ranks(in_groups, 4, tmp_path)


def by_rule(rank: int, world_size: int) -> dict[str, Any]:
    """What happened with routing in which a path says all, on the tokens that were trained with."""
    import ds_fsmoe

    engine = engine_of(Model(12, 2, layers=5, is_ruled=True), ds_config(world_size))
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


@pytest.mark.long
def test_estimates_are_right_where_the_path_decides_about_everything(tmp_path: Path) -> None:
    first, *others = run_on_ranks(by_rule, 4, tmp_path)
    assert all(each == first for each in others)
    assert first["both, shares"] == (1.0, 0.0)
    assert first["no estimate, shares"] == (None, 1.0)
    assert first["no second phase, shares"] == (None, 0.0)
    # The table by the estimate is that by the true counts.
    for label, record in first["both"].items():
        assert record["compared"] == record["counted"] == 1
        assert record["fullest"] == pytest.approx(first["no estimate"][label]["fullest"])
        assert record["copies"] == first["no second phase"][label]["copies"] > 12
        assert record["fullest"] < 1.2 < record["fullest_primary"]


def any_tables(rank: int, world_size: int) -> None:
    """The outputs by tables that nobody would make, others in each call."""
    for weights in ("host", "home", "copies of the host's"):
        by_any_table(rank, world_size, weights)


def by_any_table(rank: int, world_size: int, weights: str) -> None:
    import ds_fsmoe
    from ds_fsmoe.layer import expert_cache, inference

    engine = counted(rank, Model(12, 2), ds_config(world_size, num_chunks=2))
    draw, seen = np.random.default_rng(5), []

    def drawn(popularity_E: np.ndarray, num_ranks: int, *_: Any) -> tuple[tuple[int, ...], ...]:
        # Every fifth leaves the first rank without an expert.
        first = int(len(seen) % 5 == 0)
        is_there = draw.random((num_ranks, 12)) < draw.random()
        is_there[:first] = False
        is_there[draw.integers(first, num_ranks, 12), np.arange(12)] = True
        seen.append(tuple(tuple(np.flatnonzero(each).tolist()) for each in is_there))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inference, "ranks_of_experts", drawn)
        if weights == "copies of the host's":
            # As on a device with memory of its own.
            patch.setattr(expert_cache, "computes_on_host", lambda device: False)
        with ds_fsmoe.inference(engine, weights="home" if weights == "home" else "host"):
            kinds = {type(each.fsmoe.placed.cache).__name__ for each in engine.fsmoe.inner_layers.values()}
            found = [engine(tokens(rank, 23, seed)) for seed in range(8)]
    assert kinds == {"AllOnHost" if weights == "host" else "Buffered"}
    assert max(furthest(each, plain(engine, tokens(rank, 23, seed))) for seed, each in enumerate(found)) <= 1e-5
    assert len(set(seen)) >= 24, "there are many tables"
    assert {0, 12} < {len(each) for table in seen for each in table}
    engine.destroy()


@pytest.mark.long
def test_outputs_do_not_depend_on_the_table(tmp_path: Path) -> None:
    run_on_ranks(any_tables, 4, tmp_path)


def deepspeeds_layers(rank: int, world_size: int, k: int, drop_tokens: bool, expert: str, wire: str) -> None:
    """``deepspeed.moe.layer.MoE``, whose experts are modules, gives the same, whether rows travel or slots."""
    # Nothing is drawn at random, so that two forwards can be compared.
    options = ("use_rts", False), ("top2_2nd_expert_sampling", False)
    case = Case(world_size, 0, k=k, drop_tokens=drop_tokens, expert=expert, moe_options=options)
    block = {"enabled": True, "comm_dtype": {"dispatch": wire, "combine": wire}}
    engine = engine_of(SmallModel(case, rank), case.ds_config(fsmoe=block))
    watched(engine)
    xs = [batch(seed, rank, torch.float32) for seed in range(3)]
    engine.backward(engine(*xs[0])[0])
    engine.step()
    plain(engine, *xs[-1])
    counts = [each.exp_counts for each in engine.fsmoe.inner_layers.values()]
    for name in ("both", "weights from home"):
        off, happened = by_both(engine, name, lambda number: engine(*xs[number]), 3)
        assert off <= 1e-5, name
        assert len(happened.layers) == 2
        assert all(map(torch.equal, counts, (each.exp_counts for each in engine.fsmoe.inner_layers.values()))), name
    engine.destroy()


def without_a_batch(rank: int, world_size: int, k: int) -> list[dict[str, Any]]:
    """What happened where the last rank has no batch, which changes nothing."""
    engine = counted(rank, Model(12, k), ds_config(world_size))

    def run(seed: int) -> torch.Tensor:
        if rank == world_size - 1:
            return 1 + engine.fsmoe_dummy_forward()
        return engine(tokens(rank, 23, seed))

    happenings = []
    for name in ("weights from home", "both"):
        off, happened = by_both(engine, name, run, 6)
        assert off <= 1e-5, name
        happenings += map(asdict, happened.layers.values())
    engine.destroy()
    return happenings


def on_two_ranks(rank: int, world_size: int) -> list[dict[str, Any]]:
    # What sends slots in training sends them in their own type, and so does inference.
    deepspeeds_layers(rank, world_size, 1, True, "module", "fp8")
    deepspeeds_layers(rank, world_size, 2, False, "gpt", "model")
    return without_a_batch(rank, world_size, 3)


@pytest.mark.long
def test_deepspeeds_own_layers_give_the_same_and_a_rank_without_a_batch_goes_by_the_tables_of_the_others(
    tmp_path: Path,
) -> None:
    happened, elsewhere = run_on_ranks(on_two_ranks, 2, tmp_path)
    assert happened == elsewhere
    assert {each["accurate"] for each in happened} != {6}


# ---- where it begins, and what it leaves

EXPERT_BYTES = 4 * 3 * HIDDEN * WIDTH


def moved(rank: int, world_size: int, folder: str) -> None:
    """Experts that have moved in training are found, and stay where they are."""
    import ds_fsmoe

    asked = {"policy": "balanced", "every": 1000}
    engine = engine_of(Model(6, 2, layers=2), ds_config(world_size, placement=asked))
    placement = engine.fsmoe.placement.now["L01"]
    wanted = placement.swapped(0, placement.num_local + 1)
    engine.fsmoe.placement.go_to({"L01": wanted})
    x_SM = tokens(rank, 31)
    outputs = []
    for name in ("no estimate", "no estimate", "weights from home, no estimate"):
        with ds_fsmoe.inference(engine, **WAYS[name]) as happened:
            outputs.append(engine(x_SM))
        assert len(happened.layers) == 2
    by_plain = plain(engine, x_SM)
    place = f"{folder}/saved"
    refused = {
        "save_checkpoint": lambda: engine.save_checkpoint(place),
        "load_checkpoint": lambda: engine.load_checkpoint(place),
        "save_16bit_model": lambda: engine.save_16bit_model(place),
        "whole_state_dict": lambda: ds_fsmoe.whole_state_dict(engine),
        "ds_fsmoe.inference": lambda: ds_fsmoe.inference(engine).__enter__(),
    }
    with ds_fsmoe.inference(engine, estimate=False):
        for name, act in refused.items():
            with pytest.raises(RuntimeError, match="leave it") as caught:
                act()
            assert name in str(caught.value)
        outputs.append(engine(x_SM))
    assert max(furthest(each, by_plain) for each in outputs) < 1e-5
    assert torch.equal(plain(engine, x_SM), by_plain)
    assert engine.fsmoe.placement.now["L01"] == wanted
    engine.save_checkpoint(place)
    ds_fsmoe.whole_state_dict(engine)
    engine.destroy()


def comes_and_goes(rank: int, world_size: int) -> None:
    """All is as it was after inference, ended by itself or by an error."""
    import ds_fsmoe
    from ds_fsmoe.engine import inference

    alive: list[weakref.ref] = []
    there_at_end: list[bool] = []
    engine = counted(rank, Model(6, 2), ds_config(world_size))
    engine.module.blocks[1].eval()
    running, layers = engine.fsmoe.running, list(engine.fsmoe.inner_layers.values())

    def as_it_is() -> list[Any]:
        states = [(each.fsmoe.placed, each.fsmoe.parts, len(each._forward_hooks)) for each in layers]
        training = [each.training for each in engine.module.modules()]
        return [states, training, list(running.instruments), torch.is_grad_enabled()]

    before = as_it_is()
    with pytest.MonkeyPatch.context() as patch:
        given_back = lambda: there_at_end.append(any(each() is not None for each in alive))  # noqa: E731
        patch.setattr(inference, "give_back_host_memory", given_back)
        for error in (None, KeyError("of the script")):
            with suppress(KeyError), ds_fsmoe.inference(engine) as happened:
                engine(tokens(rank, 9))
                alive += [weakref.ref(each.fsmoe.placed.cache) for each in layers]
                assert not any(each.training for each in engine.module.modules())
                assert not torch.is_grad_enabled()
                if error is not None:
                    raise error
            assert as_it_is() == before
            gc.collect()
            assert len(alive) >= 3
            assert not any(each() is not None for each in alive), "weights are still there"
            assert [each.calls for each in happened.layers.values()] == [1] * 3
    # An error still has the frames that it came through.
    assert len(there_at_end) == 2
    assert not there_at_end[0]
    engine.backward(engine(tokens(rank, 32)).square().mean())
    engine.step()
    engine.destroy()


def decided_together(rank: int, world_size: int) -> list[Any]:
    """What all ranks do when one of them leaves a layer, or has no memory."""
    import ds_fsmoe
    from ds_fsmoe.engine import inference as inference_layers

    engine = engine_of(Model(6, 2), ds_config(world_size))
    x_SM = tokens(rank, 9)
    by_plain = plain(engine, x_SM)
    found: list[Any] = []
    last = rank == world_size - 1
    why_left, made = inference_layers.why_left, inference_layers.ExpertCacheMemory.made

    def leaves_one(module: Any) -> str | None:
        return "it says so" if last and module.label == "L01" else why_left(module)

    def fails_on_host(form: Any, num_experts: int, most: int, where: str) -> Any:
        if last and where == "host":
            raise RuntimeError("no pinned memory")
        return made(form, num_experts, most, where)

    # Twice as many as are at home are all six of them on two ranks, so that neither way has room for less.
    of_all = 3 * 6 * EXPERT_BYTES
    patches: list[tuple[Any, str, Any]] = [
        (inference_layers, "why_left", leaves_one),
        (inference_layers.ExpertCacheMemory, "made", fails_on_host),
        (inference_layers, "free_bytes", lambda device: of_all),
        (inference_layers, "free_bytes", lambda device: of_all - last),
    ]
    for each in patches:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*each)
            try:
                with ds_fsmoe.inference(engine, estimate=False) as happened:
                    found.append([furthest(engine(x_SM), by_plain) < 1e-5, happened.weights, happened.left])
            except MemoryError as error:
                found.append(str(error))
    engine.destroy()
    return found


def test_where_all_experts_have_no_memory_those_of_a_rank_may_have() -> None:
    form: Any = SimpleNamespace(names=("up", "down"), device=torch.device("cpu"))
    form.shapes, form.dtype_of = {"up": (7, 5), "down": (5, 7)}, {"up": torch.bfloat16, "down": torch.float32}.get
    of_expert = 35 * (2 + 4)
    for where, expected in {"host": (12 * of_expert, 0), "home": (0, 8 * of_expert)}.items():
        assert ExpertCacheMemory.bytes_of(form, 12, 8, where) == expected
        made = ExpertCacheMemory.made(form, 12, 8, where)
        found = [sum(each.nbytes for each in tensors.values()) for tensors in (made.stacks, made.buffers)]
        assert tuple(found) == expected


def test_a_model_in_pipeline_stages_is_refused() -> None:
    from deepspeed.pipe import PipelineModule

    import ds_fsmoe

    engine = SimpleNamespace(module=PipelineModule.__new__(PipelineModule))
    with pytest.raises(ValueError, match="not supported with a PipelineModule"), ds_fsmoe.inference(engine):
        pass


def test_a_layer_without_a_path_is_expected_to_be_as_popular_as_in_training() -> None:
    profile, expected = PathProfile(4), []
    profile.add(np.zeros((10, 0), int), np.repeat([0, 1, 2], [7, 2, 1])[:, None])
    layer: Any = SimpleNamespace(profile=profile, num_experts=3, expect=expected.append)
    InferenceLayer.begin(layer, is_expected=False)
    assert expected[0] / expected[0].sum() == pytest.approx([0.7, 0.2, 0.1], abs=1e-5)


@pytest.mark.parametrize(("then", "is_expected"), [("L02", True), ("L00", False), ("L03", False)])
def test_a_table_is_made_for_the_layer_that_comes_and_not_after_a_forward_that_was_broken_off(
    then: str, is_expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    summing = SimpleNamespace(wait=lambda: events.append("waits"))
    monkeypatch.setattr(layer_inference.dist, "all_reduce", lambda *_, **options: summing)
    profile = PathProfile(5)
    profile.add(np.zeros((1, 0), int), np.zeros((1, 1), int))

    class Layer(SimpleNamespace):
        def begin(self, is_expected: bool) -> None:
            events.append(("begins", self.label, is_expected))

        def expect(self, estimate_E: np.ndarray) -> None:
            events.append(("is expected", self.label))

    same: dict[str, Any] = {"profile": profile, "k": 1, "num_experts": 5, "experts": None}
    same |= {"block": SimpleNamespace(group=None), "cache": SimpleNamespace(may_be_early=False)}
    layers: dict[str, Any] = {label: Layer(label=label, **same) for label in ("L00", "L01", "L02", "L03")}
    run = InferenceRun(layers, layers, 2, 5)
    choices = BareRouting.of(torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 3), 5)
    calls = {label: LayerCall(label, label, False, *[None] * 7) for label in layers}  # type: ignore[arg-type]
    run.watch(calls["L01"])
    run.routed("L01", choices)
    run.after()
    del events[:]
    run.watch(calls[then])
    assert events == ["waits", *[("is expected", "L02")] * is_expected, ("begins", then, is_expected)]


def refused(rank: int, world_size: int) -> None:
    """Wrong options are refused, and a model of one rank's experts is left."""
    import ds_fsmoe

    engine = engine_of(Model(6, 2), ds_config(world_size))
    profile = PathProfile(4)
    profile.add(np.zeros((1, 0), int), np.zeros((1, 1), int))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"path_length": -1}, "path_length = -1"),
        ({"most_per_rank": 0}, "most_per_rank = 0"),
        ({"weights": "disk"}, "weights = 'disk'"),
        ({"estimate": False, "second_phase": False}, "one of them must be true"),
        ({"second_phase": False}, "training counted no paths of tokens"),
        ({"profiles": {"L00": profile, "L01": PathProfile(6)}}, r"\(4, 3\), \(6, 3\)"),
        ({"profiles": {"L00": profile}}, "6 or more"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message), ds_fsmoe.inference(engine, **options):
            pass
    assert engine.module.training
    engine.destroy()
    engine = engine_of(Model(6, 2), ds_config(1))
    x_SM = tokens(rank, 7)
    wanted = plain(engine, x_SM)
    with ds_fsmoe.inference(engine) as happened:
        assert torch.equal(engine(x_SM), wanted)
    assert [*happened.left.values()] == ["one rank has all its experts"] * 3
    engine.destroy()


def generating(rank: int, world_size: int) -> None:
    """Texts that are unlike on each rank in number and length are those that are generated without."""
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
        assert torch.equal(engine.module.generate(input_ids=prompt, **how), wanted)
    assert all(each.calls >= 5 + 6 * (world_size - 1) for each in happened.layers.values())
    engine.destroy()


def in_turn(rank: int, world_size: int, folder: str) -> list[Any]:
    moved(rank, world_size, folder)
    comes_and_goes(rank, world_size)
    refused(rank, world_size)
    generating(rank, world_size)
    deepspeeds_layers(rank, world_size, 2, False, "gpt", "model")
    return decided_together(rank, world_size)


def test_it_begins_where_training_is_ends_as_it_was_generates_the_same_and_ranks_decide_together(
    tmp_path: Path,
) -> None:
    """Experts that have moved are found and stay; wrong options are refused; what one rank leaves, all leave."""
    pytest.importorskip("transformers")
    found, other = run_on_ranks(in_turn, 2, tmp_path / "ranks", str(tmp_path))
    assert found == other
    leaves_one, fails_on_host, just_enough, too_little = found
    assert leaves_one == [True, "host", {"L01": "on rank 1 it says so"}]
    assert fails_on_host == [True, "home", {}]
    assert just_enough == [True, "host", {}]
    assert "rank 1: 0 MiB of the host's memory are needed" in too_little
