# SPDX-License-Identifier: Apache-2.0
"""Inference with experts that come and go gives the outputs of the plain forward, whatever table it goes by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.inference_models import (
    WAYS,
    CalledExperts,
    Experts,
    Model,
    ds_config,
    engine_of,
    furthest,
    plain,
    tokens,
    watched,
)
from tests.ranks import run_on_ranks
from tests.small_model import Case, SmallModel, batch

pytestmark = pytest.mark.long


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
    engine.backward(engine(tokens(rank, 64)).square().mean())
    engine.step()
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


def test_deepspeeds_own_layers_give_the_same_and_a_rank_without_a_batch_goes_by_the_tables_of_the_others(
    tmp_path: Path,
) -> None:
    happened, elsewhere = run_on_ranks(on_two_ranks, 2, tmp_path)
    assert happened == elsewhere
    assert {each["accurate"] for each in happened} != {6}
