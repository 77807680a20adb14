# SPDX-License-Identifier: Apache-2.0
"""Every benchmark takes a routing, and forces the same on all systems that it compares."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.harness.routing import FOLDER, Routing, drawn, parsed
from ds_fsmoe.routes.made import NAMES
from ds_fsmoe.routes.recorded import read_routing
from tests.ranks import run_on_ranks
from tests.sgd_engines import engine_of
from tests.small_model import NUM_EXPERTS, Case, SmallModel, batch

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = sorted([*ROOT.glob("benchmarks/*/bench_*.py"), ROOT / "benchmarks/faults/soak_job.py"])


@pytest.mark.parametrize("file", BENCHMARKS, ids=lambda each: each.stem)
def test_a_benchmark_reads_its_options_where_routing_is_one(file: Path) -> None:
    text = file.read_text("utf-8")
    assert "parse_args(" not in text
    assert "parsed(parser" in text or "join_on_gloo(__doc__" in text


@pytest.mark.parametrize("name", ["gpt", "olmoe"])
def test_recorded_routing_of_the_examples_is_skewed_and_taken_as_it_is_where_sizes_fit(name: str) -> None:
    recording, routing = read_routing(FOLDER / f"{name}.npz"), Routing(name)
    layer = recording.layers[1]
    load_E = recording.counts(layer.path, recording.steps[-1]).sum(axis=0)
    assert load_E.max() / load_E.mean() > (2 if layer.num_experts == 64 else 1.1)
    wanted = recording.choices(2, recording.steps[3], 0, 1).indices_SK
    found = routing.choices(len(wanted) + 3, layer.num_experts, wanted.shape[1], step=3, rank=2, layer=1)
    assert np.array_equal(found[:-3], wanted)
    assert np.array_equal(found[-3:], wanted[:3])


def test_another_number_of_experts_gets_the_load_of_the_recorded_one() -> None:
    recording = read_routing(FOLDER / "olmoe.npz")
    load_E = recording.counts(recording.layers[0].path, recording.steps[0]).sum(axis=0)
    found = Routing("olmoe").choices(5000, 16, 1)
    counts = np.sort(np.bincount(found.reshape(-1), minlength=16))[::-1]
    wanted = np.interp(np.linspace(0, 63, 16), np.arange(64), np.sort(load_E)[::-1])
    assert counts / counts.sum() == pytest.approx(wanted / wanted.sum(), abs=0.03)
    several = drawn(load_E, 101, 16, 4, [0, 0, 0])
    assert (np.sort(several, axis=1)[:, 1:] > np.sort(several, axis=1)[:, :-1]).all()


def test_what_is_no_routing_is_an_error_that_names_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("zipf", "nowhere/at.npz"):
        with pytest.raises(SystemExit):
            parsed(argparse.ArgumentParser(), ["--routing", text, "--allocator", "own"])
        said = capsys.readouterr().err
        assert all(each in said for each in (*NAMES, "gpt", "olmoe"))


def test_a_benchmark_without_routers_says_why_routing_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    parsed(argparse.ArgumentParser(), ["--routing", "balanced", "--allocator", "own"], no_routers="it has no layer")
    assert capsys.readouterr().out == "--routing balanced changes nothing here: it has no layer\n"


def counted(rank: int, world_size: int) -> list[str]:
    """What is not as forced, in stock's layers, ours, and one put together by hand."""
    import ds_fsmoe
    from benchmarks.harness import routing

    routing.force(Routing("hot_expert"))
    said = []
    for k in (1, 2, 3):
        counts: dict[str, list[Any]] = {}
        for system in ("stock", "ours"):
            case = Case(ep_size=2, k=k, drop_tokens=False, moe_options=(("top2_2nd_expert_sampling", False),))
            config = case.ds_config(gradient_clipping=0.0, fsmoe={"enabled": system == "ours"})
            engine = engine_of(SmallModel(case, rank), config)
            for step in range(2):
                routing.at_step(step)
                loss, _ = engine(*batch(0, rank, torch.float32))
                engine.backward(loss)
                engine.step()
                found = counts.setdefault(system, [])
                found.append([each.deepspeed_moe.exp_counts.tolist() for each in engine.module.moes])
            engine.destroy()
        if counts["stock"] != counts["ours"]:
            said.append(f"k = {k}: {counts}")
        hot = np.array(counts["ours"]).max(axis=-1)
        if not (hot >= 10).all() or (k == 1 and np.array(counts["ours"]).sum(axis=-1).tolist() != [[21, 21]] * 2):
            said.append(f"k = {k}: {counts['ours']} of 21 tokens")
    said += auto_ep(routing)
    gate = ds_fsmoe.LinearGate(k=2, drop_tokens=False)
    layer = ds_fsmoe.MOELayer(
        gate, ds_fsmoe.SimpleOrder(), model_dim=13, num_experts=NUM_EXPERTS, expert_dim=5, return_stats=True
    )
    routing.at_step(0)
    if layer(torch.randn(40, 13)).counts_E.max() < 20:
        said.append("a layer put together by hand is not forced")
    return said


def auto_ep(routing: Any) -> list[str]:
    """What AutoEP's router does that was not forced."""
    from deepspeed.moe.ep_router import TokenChoiceTopKRouter

    router = TokenChoiceTopKRouter(13, NUM_EXPERTS, None, None, 2, "softmax", True, 1.0, False)
    # Small, so that no weight is rounded to 1.
    torch.nn.init.normal_(router.gate.weight, std=0.1)
    router.train()
    routing.at_step(0)
    weights_SK, index_SK, counts_E = router(torch.randn(40, 13))
    wanted_SK = routing.forced.choices(router, router.gate.weight, 40, 2)
    is_same = torch.equal(index_SK.sort(dim=1).values, wanted_SK.sort(dim=1).values)
    is_live = bool(((weights_SK > 0) & (weights_SK < 1)).all()) and weights_SK[:, 0].unique().numel() > 30
    return [] if is_same and is_live and counts_E.sum() == 80 else [f"AutoEP's router chose {index_SK[:5].tolist()}"]


def test_stocks_layers_and_ours_are_forced_to_the_same_counts(tmp_path: Path) -> None:
    found = run_on_ranks(counted, 2, tmp_path)
    assert [each for of_rank in found for each in of_rank] == []
