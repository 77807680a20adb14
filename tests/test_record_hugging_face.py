# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models are recorded, traced, monitored and profiled, and train as they do without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from ds_fsmoe.cli import main
from ds_fsmoe.files.runs import read_run
from ds_fsmoe.files.traces import read_trace
from tests.hf_families import NUM_EXPERTS, batch, loss_of, model_of
from tests.ranks import run_on_ranks
from tests.samples import draw
from tests.sgd_engines import ds_config, engine_of

# Family, stage of ZeRO, and whether its activations are checkpointed.
WATCHED = [("mixtral", 2, False), ("qwen3_moe", 3, False), ("olmoe", 2, True), ("olmoe", 3, True)]
WAYS = ("ours", "stock")
STEPS, ACCUMULATION, LENGTH = 7, 2, 16


def watched(folder: Path, stage: int, enabled: bool) -> dict[str, Any]:
    """A config with all that watches a training."""
    record, trace = {"dir": str(folder / "run")}, {"enabled": True, "start_step": 1, "num_steps": 2}
    block = {"record": record, "trace": trace, "metrics": "detailed", "metrics_every": 1}
    config = ds_config(stage, enabled=enabled, num_chunks=2, **block)
    # DeepSpeed makes the file's folder on each rank that has none yet.
    config["flops_profiler"] = {"enabled": True, "profile_step": 2, "output_file": str(folder / "flops.txt")}
    config["csv_monitor"] = {"enabled": True, "output_path": str(folder), "job_name": "csv"}
    return config


def losses_of(family: str, rank: int, config: dict[str, Any], checkpoints: bool) -> list[float]:
    """Train, with an evaluation after each step, and return the losses of this rank."""
    model = model_of(family)
    if not config["fsmoe"]["enabled"]:
        # The eager one calls a module for each expert that has tokens; ZeRO 3 wants as many calls on every rank.
        model.set_experts_implementation("batched_mm")
    engine = engine_of(model, config | {"gradient_accumulation_steps": ACCUMULATION})
    if checkpoints:
        engine.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
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


def trained(rank: int, world_size: int, folder: str, family: str, stage: int, checkpoints: bool) -> dict[str, Any]:
    found = {}
    for way in ("plain", *WAYS):
        config = ds_config(stage, num_chunks=2, metrics="off")
        config = config if way == "plain" else watched(Path(folder, way), stage, way == "ours")
        found[way] = losses_of(family, rank, config, checkpoints)
    return found


@pytest.mark.daily("commands", 1)
def test_a_model_that_is_watched_trains_as_without_and_is_recorded_traced_reported_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (today,) = draw("trainings that are watched", WATCHED, 1)
    of_ranks = run_on_ranks(trained, 2, tmp_path / "ranks", str(tmp_path), *today)
    for each in of_ranks:
        assert each["ours"] == each["plain"]
        assert each["stock"] == pytest.approx(each["plain"], rel=1e-4)
    for way in WAYS:
        run, losses = read_run(tmp_path / way / "run"), of_ranks[0][way]
        assert not run.problems
        assert [row["step"] for row in run.steps] == list(range(1, STEPS + 1))
        # Neither evaluations nor what is computed again in a backward.
        assert [row["tokens_of_rank"] for row in run.steps] == STEPS * [ACCUMULATION * LENGTH]
        means = [sum(losses[at : at + ACCUMULATION]) / ACCUMULATION for at in range(0, len(losses), ACCUMULATION)]
        assert [row["loss"] for row in run.steps] == pytest.approx(means)
        layers = [(each["experts"], each["ep_size"]) for each in run.facts["layers"].values()]
        assert layers == 2 * [(NUM_EXPERTS, 2 if way == "ours" else 1)]
    stock, ours = (tmp_path / way / "run" for way in ("stock", "ours"))
    for rank in range(2):
        trace = read_trace(ours / "trace" / f"rank{rank}.json")
        assert (trace["otherData"]["complete"], trace["otherData"]["steps"]) == (True, [1, 2])
        names = {each["name"] for each in trace["traceEvents"]}
        assert names >= {f"fsmoe/{layer}/fwd/EXPERT/chunk1" for layer in ("L00", "L01")}
        assert read_trace(stock / "trace" / f"rank{rank}.json")["otherData"]["stock"]
    for run in (stock, ours):
        assert main(["report", str(run)]) == 0
        assert "<html" in (run / "report.html").read_text("utf-8")
    capsys.readouterr()
    # Too few steps to say more than what both lost.
    assert main(["compare", "--recorded", str(stock), str(ours)]) == 0
    assert "losses" in capsys.readouterr().out
