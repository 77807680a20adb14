# SPDX-License-Identifier: Apache-2.0
"""What monitors are told of routers, held against what the layers themselves say."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fsmoe.components.routing import Routing
from ds_fsmoe.observing.instruments import LayerCall
from ds_fsmoe.registry import lookup
from ds_fsmoe.telemetry.routers import RouterMetrics
from tests.ranks import run_on_ranks
from tests.small_model import BATCH, NUM_EXPERTS, Case, batch, small_engine

STEPS, ACCUMULATION = 4, 2


def train(rank: int, folder: str, metrics: str) -> dict[str, Any]:
    """Some steps with an evaluation between; what each layer said of each micro batch of each step."""
    case = Case(2, 0, "fp32", ACCUMULATION, 3)
    monitor = {"enabled": True, "output_path": folder, "job_name": metrics}
    block = {"metrics": metrics, "metrics_every": 2, "gate": {"type": "topk", "capacity_factor": 0.5}}
    engine = small_engine(case, rank, block, csv_monitor=monitor)
    said: dict[str, Any] = {"counts": [], "aux": [], "kept": []}
    kept: list[int] = []
    for layer in engine.fsmoe.layers.values():
        route = layer.route

        def noting(*args: Any, route: Any = route) -> Any:
            routing = route(*args)
            kept.append(int((routing.slots_KS < routing.num_slots).sum()))
            return routing

        layer.route = noting
    for step in range(STEPS):
        said["counts"].append([torch.zeros(NUM_EXPERTS, dtype=torch.int64) for _ in range(2)])
        said["aux"].append(0.0)
        kept.clear()
        for micro in range(ACCUMULATION):
            loss, _ = engine(*batch(10 * step + micro, rank, torch.float32))
            for index, layer in enumerate(engine.fsmoe.layers.values()):
                said["counts"][-1][index] += layer.exp_counts
                said["aux"][-1] += float(layer.l_aux) / ACCUMULATION
            engine.backward(loss)
            engine.step()
        said["kept"].append(sum(kept))
        engine.eval()
        engine(*batch(77, rank, torch.float32))
        engine.train()
    said["listens"] = engine.fsmoe.telemetry.routers is not None
    said["bytes"] = engine.fsmoe.reduction.bytes_of_plan()
    said["dense bytes"] = sum(
        4 * each.numel() for name, each in engine.module.named_parameters() if "experts" not in name
    )
    engine.destroy()
    return said


def train_at_every_level(rank: int, world_size: int, folder: str) -> dict[str, dict[str, Any]]:
    return {level: train(rank, folder, level) for level in ("off", "brief", "detailed")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("monitored")


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, list[dict[str, Any]]]:
    of_ranks = run_on_ranks(train_at_every_level, 2, folder / "ranks", str(folder))
    return {level: [each[level] for each in of_ranks] for level in of_ranks[0]}


def written(folder: Path, level: str, name: str) -> dict[int, float]:
    """Samples -> value."""
    with (folder / level / f"fsmoe_{name}.csv").open() as file:
        rows = list(csv.reader(file))[1:]
    return {int(samples): float(value) for samples, value in rows}


def test_tokens_choices_and_losses_are_those_of_all_ranks_and_micro_batches_of_every_nth_step(
    folder: Path, said: dict[str, Any]
) -> None:
    a_step = 2 * ACCUMULATION * BATCH
    assert list(written(folder, "brief", "expert_tokens_mean")) == [2 * a_step, 4 * a_step]
    for step in (1, 3):
        samples = (step + 1) * a_step
        for index in range(2):
            counts_E = sum(each["counts"][step][index] for each in said["detailed"]).double()
            found = [
                written(folder, "detailed", f"L0{index}_expert_tokens_{what}")[samples]
                for what in ("mean", "max", "cv")
            ]
            assert found[:2] == [counts_E.mean(), counts_E.max()]
            assert found[2] == pytest.approx(float(counts_E.std(correction=0) / counts_E.mean()))
        # Dropped choices are counted and auxiliary losses added up over layers.
        asked = sum(int(sum(each["counts"][step]).sum()) for each in said["brief"])
        placed = sum(each["kept"][step] for each in said["brief"])
        assert 0 < placed < asked
        assert written(folder, "brief", "dropped_share")[samples] == pytest.approx(1 - placed / asked)
        mean = sum(each["aux"][step] for each in said["brief"]) / 2
        assert written(folder, "brief", "aux_loss")[samples] == pytest.approx(mean, rel=1e-5)


def test_brief_is_silent_on_single_layers_and_off_on_everything(folder: Path, said: dict[str, Any]) -> None:
    names = {level: {file.stem for file in (folder / level).glob("fsmoe_*")} for level in ("off", "brief", "detailed")}
    assert not names["off"]
    assert not any("L00" in name for name in names["brief"])
    assert "fsmoe_router_entropy" in names["brief"]
    assert "fsmoe_L01_backward_num_chunks" in names["detailed"]
    assert names["brief"] < names["detailed"]
    assert [each["listens"] for each in said["off"]] == [False, False]


def test_bytes_of_gradients_are_those_of_the_plan(folder: Path, said: dict[str, Any]) -> None:
    total, hidden = said["brief"][0]["bytes"]
    # Experts have no replica here.
    assert total == said["brief"][0]["dense bytes"]
    assert 0 <= hidden <= total
    last = 2 * ACCUMULATION * BATCH * STEPS
    names = ("gradients_bytes", "gradients_hidden_bytes", "plans_made_again")
    assert [written(folder, "brief", name)[last] for name in names] == [total, hidden, 0]


def counted(metrics: RouterMetrics, gate: Any, *, is_training: bool = True) -> Any:
    """The gate of a layer as a call of it has the gate."""
    call = LayerCall("L00", "", is_training, torch.empty(0), None, gate, None, None, None)
    metrics.watch_call(call)
    return call.gate


def test_a_users_gate_may_give_its_loss_as_a_number_and_no_counts() -> None:
    metrics = RouterMetrics({"L00": (2, 1)}, torch.device("cpu"))
    metrics.listen({})
    slots_KS, weights_KS = torch.tensor([[0, 1, 4]]), torch.ones(1, 3)
    for aux_loss, counts_E in ((0.5, torch.tensor([2, 1])), (torch.tensor([1.5]), torch.tensor([2, 1])), (9.0, None)):
        counted(metrics, lambda: Routing(slots_KS, weights_KS, aux_loss, counts_E, 2, 2))()  # noqa: B023
    load = metrics.read({})["L00"]
    assert load.tokens_E == (4.0, 2.0)
    assert (load.dropped, load.asked, load.aux_loss) == (2.0, 6.0, 1.0)


def test_no_counting_goes_on_where_nobody_listens_and_tokens_that_two_ranks_have_count_once() -> None:
    metrics = RouterMetrics({"L00": (5, 2)}, torch.device("cpu"))
    gate = lookup("gate", "switch")()
    gate.build_once(7, 5)
    assert counted(metrics, gate) is gate
    metrics.listen({"L00": gate})
    assert counted(metrics, gate, is_training=False) is gate
    for _ in range(2):
        counted(metrics, gate)(torch.randn(11, 7))
    load = metrics.read({"L00": gate})["L00"]
    assert sum(load.tokens_E) == load.asked == 11
    assert not gate.says_entropy
    assert counted(metrics, gate) is gate


def test_tokens_that_no_expert_takes_are_dropped_ones() -> None:
    gate = lookup("gate", "expert_choice")(k=1, capacity_factor=0.5)
    gate.build_once(7, 5)
    routing = gate(torch.randn(20, 7))
    placed, asked = routing.placed()
    taken = set(routing.tokens_R.tolist()) - {20}
    assert (int(placed), int(asked)) == (len(taken), 20)
