# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models are recorded, traced, monitored and profiled, and train as they do without."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from ds_fsmoe.cli import main
from ds_fsmoe.files.runs import Run, read_run
from ds_fsmoe.files.traces import read_trace
from tests.built_ops import build_ops
from tests.hf_families import NUM_CHOICES, NUM_EXPERTS, WIDTH, batch, loss_of, model_of
from tests.python_path import python_path
from tests.ranks import run_on_ranks
from tests.samples import draw
from tests.scripts import ROOT
from tests.test_flops_profiler import macs_of
from tests.test_hugging_face import ds_config, engine_of

FAMILIES = (*draw("families that are watched", ["mixtral", "qwen3_moe"], 1), "olmoe")
STEPS, ACCUMULATION, LENGTH, PROFILED = 7, 2, 16, 2
TOKENS = ACCUMULATION * LENGTH


def watched(folder: Path, stage: int, enabled: bool) -> dict[str, Any]:
    """A config with all that watches a training."""
    record, trace = {"dir": str(folder / "run")}, {"enabled": True, "start_step": 1, "num_steps": 2}
    block = {"record": record, "trace": trace, "metrics": "detailed", "metrics_every": 1}
    config = ds_config(stage, enabled=enabled, num_chunks=2, **block)
    # DeepSpeed makes the file's folder on each rank that has none yet.
    config["flops_profiler"] = {"enabled": True, "profile_step": PROFILED, "output_file": str(folder / "flops.txt")}
    config["csv_monitor"] = {"enabled": True, "output_path": str(folder), "job_name": "csv"}
    return config


def losses_of(
    family: str, rank: int, config: dict[str, Any], checkpoints: bool, rows: list[int] | None = None
) -> list[float]:
    """Train, with an evaluation after each step, and return the losses of this rank.

    Args:
        rows: a list to be filled with the choices of this rank for experts of rank 0, of each forward of a layer.
    """
    model = model_of(family)
    if not config["fsmoe"]["enabled"]:
        # The eager one calls a module for each expert that has tokens; ZeRO 3 wants as many calls on every rank.
        model.set_experts_implementation("batched_mm")
    engine = engine_of(model, config | {"gradient_accumulation_steps": ACCUMULATION})
    if checkpoints:
        engine.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for each in engine.module.modules() if rows is not None else ():
        if hasattr(type(each), "local_experts"):
            each.register_forward_pre_hook(lambda _, args: rows.append(int((args[1] < NUM_EXPERTS // 2).sum())))
    found = []
    for micro in range(STEPS * ACCUMULATION):
        loss = loss_of(engine, batch(10 * micro + rank, 1, LENGTH))
        found.append(loss.item())
        engine.backward(loss)
        engine.step()
        engine.eval()
        loss_of(engine, batch(micro, 1, 5))
        engine.train()
    engine.destroy()
    return found


def trained(rank: int, world_size: int, folder: str, stage: int) -> dict[str, dict[str, Any]]:
    found = {}
    for family in FAMILIES:
        into = Path(folder, family)
        ways = {
            "plain": ds_config(stage, num_chunks=2, metrics="off"),
            "ours": watched(into / "ours", stage, True),
            "stock": watched(into / "stock", stage, False),
        }
        rows: list[int] = []
        found[family] = {
            way: losses_of(family, rank, config, family == "olmoe", rows if way == "ours" else None)
            for way, config in ways.items()
        }
        found[family]["rows"] = rows
    return found


@pytest.fixture(scope="module", params=draw("stage of trainings that are watched", [2, 3], 1))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp(f"stage{request.param}")
    return folder, run_on_ranks(trained, 2, folder / "ranks", str(folder), request.param)


def run_of(folder: Path, family: str, way: str) -> Run:
    return read_run(folder / family / way / "run")


@pytest.mark.long
def test_losses_are_those_of_a_run_that_nobody_watches(case: tuple[Path, list[Any]]) -> None:
    for of_rank in case[1]:
        for family in FAMILIES:
            assert of_rank[family]["ours"] == of_rank[family]["plain"]
            assert of_rank[family]["stock"] == pytest.approx(of_rank[family]["plain"], rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("way", ["ours", "stock"])
def test_every_step_is_recorded_with_its_loss_and_the_tokens_that_came(case: tuple[Path, list[Any]], way: str) -> None:
    for family in FAMILIES:
        run, losses = run_of(case[0], family, way), case[1][0][family][way]
        assert [row["step"] for row in run.steps] == list(range(1, STEPS + 1))
        # Neither evaluations nor what is computed again in a backward.
        assert [row["tokens_of_rank"] for row in run.steps] == STEPS * [TOKENS]
        means = [sum(losses[at : at + ACCUMULATION]) / ACCUMULATION for at in range(0, len(losses), ACCUMULATION)]
        assert [row["loss"] for row in run.steps] == pytest.approx(means)
        assert not run.problems
        layers = run.facts["layers"].values()
        assert [each["experts"] for each in layers] == [NUM_EXPERTS, NUM_EXPERTS]
        assert {each["ep_size"] for each in layers} == {2 if way == "ours" else 1}


@pytest.mark.long
def test_there_is_a_page_and_a_comparison_of_both_runs(
    case: tuple[Path, list[Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for family in FAMILIES:
        stock, ours = (case[0] / family / way / "run" for way in ("stock", "ours"))
        for run in (stock, ours):
            assert main(["report", str(run)]) == 0
            assert "<html" in (run / "report.html").read_text("utf-8")
        capsys.readouterr()
        # Too few steps to say more than what both lost.
        assert main(["compare", "--recorded", str(stock), str(ours)]) == 0
        assert "losses" in capsys.readouterr().out


@pytest.mark.long
def test_traces_have_the_tasks_of_the_experts(case: tuple[Path, list[Any]]) -> None:
    for family in FAMILIES:
        for rank in range(2):
            trace = read_trace(case[0] / family / "ours" / "run" / "trace" / f"rank{rank}.json")
            assert trace["otherData"]["complete"]
            assert trace["otherData"]["steps"] == [1, 2]
            names = {each["name"] for each in trace["traceEvents"]}
            for layer in ("L00", "L01"):
                assert f"fsmoe/{layer}/fwd/EXPERT/chunk1" in names
            assert read_trace(case[0] / family / "stock" / "run" / "trace" / f"rank{rank}.json")["otherData"]["stock"]


@pytest.mark.long
def test_deepspeeds_flops_profiler_counts_the_products_of_the_experts(case: tuple[Path, list[Any]]) -> None:
    for family in FAMILIES:
        stock, ours = (macs_of(case[0] / family / way / "flops.txt") for way in ("stock", "ours"))
        of_choice = 3 * WIDTH * 24
        of_layers = 2 * LENGTH * NUM_CHOICES * of_choice
        assert stock > of_layers
        # The last forward in training of the step; an evaluation follows each one, of two layers as well, and what is
        # computed again in the backward comes in between.
        size = 6 if family == "olmoe" else 4
        last = [each[family]["rows"][: -(STEPS - PROFILED - 1) * ACCUMULATION * size] for each in case[1]]
        computed = sum(sum(of_rank[-size : len(of_rank) - size + 2]) for of_rank in last)
        assert ours == pytest.approx(stock - of_layers + computed * of_choice, rel=1e-3)


@pytest.mark.daily("a plain loop compared with itself", 1)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_plain_loop_over_a_hugging_face_model_is_compared_with_itself(
    stage: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"DS_ACCELERATOR": "cpu", "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    build_ops()
    command = [sys.executable, str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", "2"]
    command += ["--module", "ds_fsmoe.run", str(ROOT / "examples" / "hf_finetune.py"), "--stage", str(stage), "--stock"]
    given = ["--fsmoe", '{"enabled": true, "num_chunks": 2}', "--turns", "0", "--timeout", "900"]
    assert main(["compare", *given, "--steps", "12", "--out", "out", "--", *command]) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert "times as fast as stock DeepSpeed" in said
    assert "losses: identical" in said or float(said.split("losses: differ by at most ")[1].split()[0]) < 1e-4
    for kind in ("stock", "ours"):
        # Four sequences of 64 bytes.
        assert {row["tokens_of_rank"] for row in read_run(tmp_path / "out" / kind).steps} == {256}
    assert main(["report", "out"]) == 0
