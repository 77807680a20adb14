# SPDX-License-Identifier: Apache-2.0
"""Runs that tune themselves. ``{"enabled": true}`` alone measures and chooses once a job is under way, where there is
something to gain; and what is printed is what runs: log, ``engine.fsmoe.chosen()``, record and page say one thing."""

from __future__ import annotations

import html
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fsmoe.config.reading import read_block
from ds_fsmoe.files import runs as run_files
from ds_fsmoe.files.traces import TracedRun, rank_file, trace_of, write_trace
from ds_fsmoe.log import log_on_rank_0, show_details
from ds_fsmoe.offline.report.run_page import portable
from ds_fsmoe.tuning import autotune as stage
from ds_fsmoe.tuning.when import STEPS_BEFORE, known_steps, settled
from tests.hurry import hurry
from tests.logged import heard
from tests.ranks import run_on_ranks
from tests.report_runs import TASKS, charts_of, page_of, record, record_details, without_programs
from tests.samples import sampled
from tests.small_model import Case, SmallModel, batch
from tests.test_no_longer_said import OLD
from tests.test_report_conclusion import section

CASE = Case(2, 1, "fp32", 1, 2, True, expert="gpt")
MOST_STEPS = 84


# ---- what is measured unasked


def why_not(block: dict[str, Any], num_ranks: int = 2, **config: Any) -> str | None:
    found, why = settled(read_block({"fsmoe": {"enabled": True} | block}), config, num_ranks)
    assert (found.autotune.enabled is False) == (why is not None or block.get("autotune") is False)
    return why


@pytest.mark.parametrize(
    ("block", "others", "reason"),
    [
        ({"deterministic": True}, {}, "fsmoe.deterministic = true"),
        ({}, {"num_ranks": 1}, "a single rank has no communication to hide"),
        ({"overlap": False}, {}, "fsmoe.overlap = false"),
        ({"schedule": "deepspeed"}, {}, "has nothing to choose"),
        ({"schedule": "lina"}, {}, "has nothing to choose"),
        ({"num_chunks": {"forward": 2, "backward": 3}}, {}, "fsmoe.num_chunks is set"),
        ({"record": {"dir": "x", "stop_after": 60}}, {}, "the job ends after 60 steps"),
        ({}, {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 99}}}, "ends after 99 steps"),
        ({}, {"autotuning": {"enabled": True}}, "DeepSpeed's own autotuner"),
    ],
)
def test_where_nothing_can_be_gained_nothing_is_measured_and_the_reason_is_told(
    block: dict[str, Any], others: dict[str, Any], reason: str
) -> None:
    assert reason in (why_not(block, **others) or "")


def test_a_job_that_may_gain_is_measured() -> None:
    assert why_not({}) is None
    assert why_not({"num_chunks": {"forward": 2, "backward": "auto"}}) is None
    assert why_not({}, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}}) is None
    assert why_not({}, scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 100}}) is None
    assert why_not({}, scheduler={"type": "x", "params": {"total_num_steps": "auto"}}) is None
    assert why_not({"autotune": False}, scheduler=None) is None
    # A schedule that cannot run without numbers gets them, however short the job is; so does who asks for it.
    for asked in ({"schedule": "fsmoe"}, {"autotune": True}):
        assert why_not(asked | {"record": {"dir": "x", "stop_after": 20}}) is None
    both_known = read_block({"fsmoe": {"enabled": True, "record": {"dir": "x", "stop_after": 60}}})
    assert known_steps(both_known, {"scheduler": {"type": "x", "params": {"total_num_steps": 400}}}) == 60


def train(
    rank: int,
    block: dict[str, Any],
    steps: int,
    fails: bool = False,
    is_training: bool = True,
    save: str | None = None,
    load: str | None = None,
) -> dict[str, Any]:
    """Steps of an engine, up to some after it has settled on a plan; from a checkpoint, and with one at the end."""
    import ds_fsmoe

    said, warned = heard(), heard("WARNING")
    torch.manual_seed(0)
    model = SmallModel(CASE, rank).train(is_training)
    measured_at, measure = [], stage.measure

    def watched(*args: Any, **kwargs: Any) -> Any:
        measured_at.append(engine.global_steps)
        if fails:
            raise stage.MeasuringError("rank 1 failed while measuring: out of memory")
        return measure(*args, **kwargs)

    stage.measure = watched
    try:
        engine, *_ = ds_fsmoe.initialize(model=model, config=CASE.ds_config(fsmoe={"enabled": True} | block))
        tuner, first = engine.fsmoe.autotune, engine.fsmoe.chosen()
        if load is not None:
            engine.load_checkpoint(load)
        losses, settled_for = [], 0
        for step in range(steps):
            torch.manual_seed(100 * step + rank)
            loss, _ = engine(*batch(step, rank, torch.float32))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            settled_for += tuner is not None and tuner.is_settled
            if settled_for >= 6 and step > 20:
                break
        found = {
            "losses": losses,
            "measured_at": measured_at,
            "is_settled": settled_for > 0,
            "cluster": None if tuner is None or tuner.result.measured is None else tuner.result.measured.cluster,
            "plans": {name: text for name, text in engine.fsmoe.facts().items() if name.startswith("plan ")},
            "first": first,
            "chosen": engine.fsmoe.chosen(),
        }
        if save is not None:
            engine.save_checkpoint(save)
        engine.destroy()
    finally:
        stage.measure = measure
        said.end()
        warned.end()
    return found | {"said": said.lines, "warned": warned.lines}


def train_all(rank: int, world_size: int, folder: str) -> dict[str, dict[str, Any]]:
    hurry()
    unasked = train(rank, {}, MOST_STEPS)
    untried = {"autotune": {"trials": 0}}
    return {
        "unasked": unasked,
        "off": train(rank, {"autotune": False}, len(unasked["losses"])),
        "short": train(rank, {}, STEPS_BEFORE - 2),
        "failed": train(rank, {}, STEPS_BEFORE + 4, fails=True),
        "evaluation": train(rank, {}, STEPS_BEFORE + 5, is_training=False),
        "saved": train(rank, untried, 5, save=folder),
        "resumed": train(rank, untried, STEPS_BEFORE + 3, load=folder),
    }


def test_unasked_a_job_settles_on_a_plan_after_some_steps_and_trains_as_it_did_or_says_why_nothing_was_measured(
    tmp_path: Path,
) -> None:
    first, second = runs = run_on_ranks(train_all, 2, tmp_path / "ranks", str(tmp_path / "saved"))
    for each in runs:
        unasked, off = each["unasked"], each["off"]
        measured_at = {name: run["measured_at"] for name, run in each.items()}
        # Two more forwards tell the sizes. A checkpoint of before the measuring does not keep it from happening.
        begins = STEPS_BEFORE + 2
        assert measured_at == {
            **{"unasked": [begins], "off": [], "short": [], "failed": [begins]},
            **{"evaluation": [], "saved": [], "resumed": [5 + begins]},
        }
        assert (unasked["is_settled"], unasked["cluster"]) == (True, None)
        assert unasked["plans"] == first["unasked"]["plans"]
        assert unasked["losses"] == pytest.approx(off["losses"], rel=1e-5)
        assert each["failed"]["losses"] == pytest.approx(off["losses"][: STEPS_BEFORE + 4], rel=1e-6)
    (screen,) = (line for line in first["unasked"]["said"] if "autotune: " in line and "measuring took" in line)
    assert "  DeepSpeed's schedule" in screen
    assert not [line for line in second["unasked"]["said"] if "autotune" in line]
    assert "the job ended after 8 steps, before measuring begins (step 10)" in first["short"]["said"][-1]
    (warning,) = (line for line in first["failed"]["warned"] if line.startswith("autotune"))
    assert "measuring failed, so the schedule is unchanged" in warning
    assert "out of memory" in warning
    warned = [[line for line in each["evaluation"]["said"] if "evaluation mode" in line] for each in runs]
    assert [len(each) for each in warned] == [1, 0]
    assert "call model.train()" in warned[0][0]


# ---- what is said of a run that was asked to tune itself


def tuned(rank: int, world_size: int, folder: str, keeps_stock: bool) -> dict[str, Any]:
    """A run whose trials keep DeepSpeed's schedule, or the plan that comes first."""
    from ds_fsmoe.tuning.trials import Trials

    hurry()
    Trials._best = lambda self: self.baseline if keeps_stock else 0  # type: ignore[method-assign,return-value]
    block = {"autotune": {"enabled": True, "trials": 1}, "record": {"dir": folder}}
    if not keeps_stock:
        block["num_chunks"] = {"forward": 2, "backward": 2}
    return train(rank, block, MOST_STEPS)


def number(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found, f"{pattern} in {text}"
    return found[1]


# Of a number: where it is in the log, and where on the page.
NUMBERS = [
    (r"tried (\d+) plans in", r"(\d+) plans were tried in"),
    (r"tried \d+ plans in (\d+) steps", r"plans were tried in (\d+) steps"),
    (r"measuring took ([\d.]+) s", r"measuring and planning took ([\d.]+) s"),
    (r"measured (\d+) operations", r"(\d+) operations were measured"),
    (
        r"(?:bound +|less than the )([\d.]+)",
        r"(?:lower bound of these tasks is|steps take less than the) ([\d.]+?)\.? ms",
    ),
    (r"DeepSpeed's schedule +[\d.]+ +([\d.]+)", r"(?:DeepSpeed's schedule|predicted to take) ([\d.]+) ms; "),
]


@sampled("keeps_stock", [True, False], ids=["DeepSpeed's schedule", "chunks"])
def test_log_table_record_and_page_of_a_tuned_run_say_what_runs_in_the_same_words_and_numbers(
    keeps_stock: bool, tmp_path: Path
) -> None:
    run, _ = run_on_ranks(tuned, 2, tmp_path / "ranks", str(tmp_path / "run"), keeps_stock)
    said, chosen, page = run["said"], run["chosen"], page_of(tmp_path / "run")
    plans = json.loads((tmp_path / "run" / run_files.PLANS).read_text())
    count = plans["num_plans"]
    # With a single turn few plans are tried, once each.
    assert 1 < count == plans["num_steps"] <= 4
    if keeps_stock:
        assert chosen["schedule"] == f"DeepSpeed's (kept by the autotuner: none of {count - 1} other plans was faster)"
        assert chosen["num_chunks"] == "forward 1, backward 1"
        assert chosen["links"] == "one at a time (layers run in one chunk)"
        assert chosen["gradients"].endswith("all reduced after the backward")
    else:
        assert chosen["schedule"] == f"best (chosen by the autotuner from {count} plans)"
        assert chosen["num_chunks"] == "forward 2, backward 2"
        assert not chosen["links"].startswith(("one after another", "one at a time"))
    assert run["first"]["schedule"] != chosen["schedule"]
    # The record and its page have the words of the engine.
    assert plans["chosen"] == chosen
    decided = section(page, "what-was-decided")
    assert all(f"{name} {words}" in decided for name, words in chosen.items())
    # Log and page have the same numbers.
    (screen,) = (each for each in said if "more: " in each and each.startswith("autotune"))
    (measured,) = (each for each in said if "now trying" in each)
    text = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", without_programs(page))))
    for in_log, on_page in NUMBERS:
        assert number(in_log, measured if "operations" in in_log else screen) == number(on_page, text)
    # The layers of a plan that does not run are in no table.
    assert ("order of tasks" in screen) != keeps_stock
    assert ("  why: bottleneck of the layers:" in screen) == keeps_stock
    assert ("chunks order of tasks" in decided) != keeps_stock
    # The table at the start has what was asked for, or differs from stock: half of the slots stay empty, and gradients
    # are ours to reduce.
    (table,) = (each for each in said if " is on for " in each)
    names = [line.split()[0] for line in table.splitlines()[1:]]
    assert [each for each in names if each not in ("num_chunks", "links")] == [
        *("schedule", "autotune", "dispatch", "gradients")
    ]
    assert ("num_chunks" in names) != keeps_stock
    shown = [*said, *chosen, *chosen.values(), re.sub(r"(?s)<script.*?</script>|<[^>]+>", " ", page)]
    assert [each for each in shown if OLD.search(html.unescape(each))] == [], "words of before"
    lines = [line for each in said for line in each.splitlines()]
    assert [line for line in lines if len(line) > 120] == []
    assert 10 < len(lines) <= 50


def test_details_follow_a_line_only_where_they_are_asked_for_and_the_level_stays_the_user_s() -> None:
    logger, said = logging.getLogger("ds_fsmoe"), heard()
    before = logger.level
    for level, is_shown in ((logging.INFO, False), (logging.DEBUG, False), (logging.INFO, True), (logging.ERROR, True)):
        logger.setLevel(level)
        show_details(is_shown)
        log_on_rank_0("drift: a step took longer", details="Its largest difference is known")
        assert logger.level == level
    show_details(False)
    logger.setLevel(before)
    said.end()
    long = "drift: a step took longer. Its largest difference is known"
    assert said.lines == ["drift: a step took longer", long, long]


# ---- pages of made-up runs


def test_a_run_that_kept_deepspeeds_schedule_is_not_headed_by_a_plan_that_was_thrown_away(tmp_path: Path) -> None:
    run = record(tmp_path / "run", "best")
    stock = {"name": "DeepSpeed's schedule", "step_ms": 17.0, "num_steps": 4, "is_kept": True, "is_baseline": True}
    other = stock | {"name": "2 and 2 chunks", "step_ms": 19.5, "is_kept": False, "is_baseline": False}
    gain = {"ratio": 0.86, "low": 0.47, "high": 1.08, "num_turns": 5}
    for plans in ({"is_stock": True}, {}):  # earlier versions have the trials alone
        run_files.write_json(run / run_files.PLANS, {"gain": gain, "trials": [[stock, other]]} | plans)
        said = section(page_of(run), "conclusion")
        assert "No plan was faster than DeepSpeed's schedule, which is kept" in said
        assert "the best other plan was 0.86 times as fast (0.47 to 1.08)" in said
        assert "0.86x" not in said
        assert said.strip().startswith("Conclusion DeepSpeed's schedule is used: no plan that was tried was faster")


def test_two_runs_on_a_machine_that_was_not_equally_busy_have_no_large_ratio_and_losses_are_told_apart_by_step(
    tmp_path: Path,
) -> None:
    losses = [2.0, 2.0 * (1 + 1e-7), 2.0 * (1 + 3e-7), 2.0 * (1 + 4e-5), 2.0 * (1 + 2e-2), 2.0 * (1 + 1e-3)]
    for name, schedule, ms, optimizer_ms in (("stock", run_files.STOCK, 25.0, 9.0), ("ours", "best", 20.0, 3.0)):
        folder = record(tmp_path / name, schedule, num_steps=0)
        own = losses if name == "ours" else [2.0] * len(losses)
        rows = [{"step": n, "step_ms": ms, "optimizer_ms": optimizer_ms} for n in range(1, 81)]
        rows[: len(own)] = [row | {"loss": loss} for row, loss in zip(rows, own, strict=False)]
        run_files.append_lines(folder / run_files.STEPS, rows)
    said = section(page_of(tmp_path), "conclusion")
    assert "do not rely on this comparison" in said
    assert said.strip().startswith("Conclusion not comparable the machine was not equally busy in the two runs")
    assert "1.25x" not in said
    assert "Losses are equal to rounding before step 4, and at most 0.02 apart (step 5)" in said


def timed(folder: Path, times_ms: dict[int, float]) -> str:
    """The page of a run of steps of 20 ms but for some, which are traced; steps are counted from 0 on, as traces do.
    The autotuner is at work in some, from which on there is more memory in use."""
    run = record(folder, "best", num_steps=0)
    rows = [
        {"step": n, "step_ms": times_ms.get(n - 1, 20.0), "memory_bytes": (2 if n < 5 else 3) << 30}
        | ({"is_tuning": True} if 5 <= n < 9 else {})
        for n in range(1, 41)
    ]
    run_files.append_lines(run / run_files.STEPS, rows)
    spans_ns = [(0, 2_000_000), (2_000_000, 7_000_000), (7_000_000, 9_000_000)]
    for rank in range(2):
        runs = [TracedRun(at, "L00/forward", step, TASKS, 0, spans_ns) for at, step in enumerate(times_ms)]
        about = {"world_size": 2, "steps": list(times_ms), "complete": True}
        write_trace(trace_of(rank, "here", runs, about), rank_file(run / run_files.TRACE, rank))
    return page_of(run)


def test_the_timeline_is_of_the_traced_step_nearest_to_the_median_and_memory_that_came_with_measuring_is_said_to(
    tmp_path: Path,
) -> None:
    page = timed(tmp_path / "near", {30: 90.0, 31: 21.0, 32: 60.0})
    assert any("step 31, rank 0" in each for each in charts_of(page))
    assert "medians" not in section(page, "one-step-task-by-task")
    said = section(page, "memory")
    assert "1 GiB of it came in steps 5 to 8, while the autotuner measured or tried plans" in said
    said = section(timed(tmp_path / "far", {30: 90.0, 31: 48.0}), "one-step-task-by-task")
    assert "ds_fsmoe, best: this step took 2.4 medians; none nearer was traced." in said


def test_a_page_of_before_is_shown_with_the_words_of_today(tmp_path: Path) -> None:
    run = record(tmp_path / "run", "best")
    record_details(run)
    plans = json.loads((run / run_files.PLANS).read_text())
    chosen = {"pipeline_degree": "forward 2, backward 3", "esp_size": "2", "order": "sparse"}
    chosen |= {"dispatch": "slots, of which at least 30% are empty", "alltoall": "once_per_node, run as flat"}
    run_files.write_json(run / run_files.PLANS, plans | {"chosen": chosen})
    said = section(page_of(run), "what-was-decided")
    for words in (
        "num_chunks forward 2, backward 3 expert_tensor_parallel_size 2 order sparse",
        "dispatch padded, of which at least 30% are empty alltoall node_deduplicated, run as flat",
        "order of tasks predicted ms",
        "3 reduces first 4",
    ):
        assert words in said
    assert not OLD.search(said)


def test_paths_on_a_page_are_those_from_the_folder_of_the_run(tmp_path: Path) -> None:
    cwd = "/home/somebody/project"
    assert portable([f"{cwd}/train.py", f"--out={cwd}/runs/a", "--lr=1/2", "/usr/bin/python3", 3], cwd) == [
        *("train.py", "--out=runs/a", "--lr=1/2", ".../python3", 3)
    ]
    assert portable({"record": {"dir": f"{cwd}/runs"}}, cwd) == {"record": {"dir": "runs"}}
    assert portable(f"{cwd}/runs", None) == ".../runs"
    command = ["/usr/bin/python", f"{cwd}/train.py"]
    for name, schedule in (("stock", run_files.STOCK), ("ours", "best")):
        config = {"fsmoe": {"record": {"dir": f"{cwd}/runs/{name}"}}}
        record(tmp_path / "both" / name, schedule, command=command, cwd=cwd, config=config)
    page = page_of(tmp_path / "both")
    assert "somebody" not in page
    assert "runs/stock" in section(page, "configuration-difference")


# ---- halves


def one_sample(rank: int, world_size: int) -> list[str]:
    from tests.hf_families import batch as tokens
    from tests.hf_families import model_of
    from tests.test_halves import called, ds_config, engine_of

    config = ds_config(1, two_batch_overlap="on", autotune=False) | {"train_micro_batch_size_per_gpu": 1}
    engine = engine_of(model_of("olmoe"), config)
    found = []
    for samples in (1, 1, 2, 1):
        engine.backward(called(engine, tokens(samples, samples)).loss)
        engine.step()
        found.append(engine.fsmoe.chosen()["two_batch_overlap"])
    return found


@pytest.mark.long
def test_a_batch_of_one_sample_is_said_to_stay_whole(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    first, second, third, fourth = run_on_ranks(one_sample, 1, tmp_path)[0]
    whole = "on: batches stay whole: this rank has one sample per batch: two-batch overlap needs at least two"
    assert (second, third, fourth) == (whole, "on: on", whole)
    assert first == "on: batches stay whole: a rank has fewer than two samples in a batch"
