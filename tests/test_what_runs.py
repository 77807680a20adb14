# SPDX-License-Identifier: Apache-2.0
"""What is printed is what runs: log, ``engine.fsmoe.chosen()``, record and page say one thing of one run."""

from __future__ import annotations

import html
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fsmoe.files import runs as run_files
from ds_fsmoe.files.traces import TracedRun, rank_file, trace_of, write_trace
from ds_fsmoe.log import log_on_rank_0, show_details
from ds_fsmoe.offline.report.run_page import portable
from tests.hurry import hurry
from tests.logged import Said
from tests.ranks import run_on_ranks
from tests.report_runs import TASKS, charts_of, record, record_details, without_programs
from tests.samples import draw
from tests.small_model import Case, SmallModel, batch
from tests.test_no_longer_said import OLD
from tests.test_report_conclusion import page_of, section

CASE = Case(2, 1, "fp32", 1, 2, True, expert="gpt")
STEPS = 60


def tuned(rank: int, world_size: int, folder: str, keeps_stock: bool) -> dict[str, Any]:
    """A run whose trials keep DeepSpeed's schedule, or the plan that comes first."""
    import ds_fsmoe
    from ds_fsmoe.tuning.trials import Trials

    hurry()
    said = Said()
    logging.getLogger("ds_fsmoe").addHandler(said)
    Trials._best = lambda self: self.baseline if keeps_stock else 0  # type: ignore[method-assign,return-value]
    torch.manual_seed(0)
    model = SmallModel(CASE, rank)
    block = {"enabled": True, "autotune": {"enabled": True, "trials": 1}, "record": {"dir": folder}}
    if not keeps_stock:
        block["num_chunks"] = {"forward": 2, "backward": 2}
    config = CASE.ds_config(fsmoe=block)
    engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    first = engine.fsmoe.chosen()
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        loss, _ = engine(*batch(step, rank, torch.float32))
        engine.backward(loss)
        engine.step()
        if engine.fsmoe.autotune.is_settled and step > STEPS // 3:
            break
    found = {"said": said.lines, "first": first, "chosen": engine.fsmoe.chosen()}
    engine.destroy()
    return found


BOTH = [True, False]
TODAY = draw("what is kept", BOTH, 1)


@pytest.fixture(
    scope="module",
    params=[each if each in TODAY else pytest.param(each, marks=pytest.mark.long) for each in BOTH],
    ids=["DeepSpeed's schedule", "chunks"],
)
def tuned_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tuned")
    found, _ = run_on_ranks(tuned, 2, folder / "ranks", str(folder / "run"), request.param)
    plans = json.loads((folder / "run" / run_files.PLANS).read_text())
    return found | {"plans": plans, "page": page_of(folder / "run"), "keeps_stock": request.param}


def number(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found, f"{pattern} in {text}"
    return found[1]


def test_after_tuning_the_table_says_what_runs(tuned_run: dict[str, Any]) -> None:
    chosen, plans = tuned_run["chosen"], tuned_run["plans"]
    count = plans["num_plans"]
    assert count > 1
    if tuned_run["keeps_stock"]:
        assert chosen["schedule"] == f"DeepSpeed's (kept by the autotuner: none of {count - 1} other plans was faster)"
        assert chosen["num_chunks"] == "forward 1, backward 1"
        assert chosen["links"] == "one at a time (layers run in one chunk)"
        assert chosen["gradients"].endswith("all reduced after the backward")
    else:
        assert chosen["schedule"] == f"best (chosen by the autotuner from {count} plans)"
        assert chosen["num_chunks"] == "forward 2, backward 2"
        assert not chosen["links"].startswith(("one after another", "one at a time"))
    assert tuned_run["first"]["schedule"] != chosen["schedule"]


def test_the_record_and_its_page_have_the_words_of_the_engine(tuned_run: dict[str, Any]) -> None:
    assert tuned_run["plans"]["chosen"] == tuned_run["chosen"]
    said = section(tuned_run["page"], "what-was-decided")
    for name, words in tuned_run["chosen"].items():
        assert f"{name} {words}" in said


def test_log_and_page_of_one_run_have_the_same_numbers(tuned_run: dict[str, Any]) -> None:
    (screen,) = (each for each in tuned_run["said"] if "more: " in each and each.startswith("autotune"))
    (measured,) = (each for each in tuned_run["said"] if "now trying" in each)
    page = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", without_programs(tuned_run["page"]))))
    for in_log, text, on_page in (
        (r"tried (\d+) plans in", screen, r"(\d+) plans were tried in"),
        (r"tried \d+ plans in (\d+) steps", screen, r"plans were tried in (\d+) steps"),
        (r"measuring took ([\d.]+) s", screen, r"measuring and planning took ([\d.]+) s"),
        (r"measured (\d+) operations", measured, r"(\d+) operations were measured"),
        (
            r"(?:bound +|less than the )([\d.]+)",
            screen,
            r"(?:lower bound of these tasks is|steps take less than the) ([\d.]+?)\.? ms",
        ),
        (
            r"DeepSpeed's schedule +[\d.]+ +([\d.]+)",
            screen,
            r"(?:DeepSpeed's schedule|predicted to take) ([\d.]+) ms; ",
        ),
    ):
        assert number(in_log, text) == number(on_page, page)


def test_the_layers_of_a_plan_that_does_not_run_are_in_no_table(tuned_run: dict[str, Any]) -> None:
    (screen,) = (each for each in tuned_run["said"] if "more: " in each and each.startswith("autotune"))
    is_there = "order of tasks" in screen
    assert is_there != tuned_run["keeps_stock"]
    assert ("  why: bottleneck of the layers:" in screen) == tuned_run["keeps_stock"]
    assert ("chunks order of tasks" in section(tuned_run["page"], "what-was-decided")) == is_there


def test_the_table_at_the_start_has_what_was_asked_for_or_differs_from_stock(tuned_run: dict[str, Any]) -> None:
    (table,) = (each for each in tuned_run["said"] if " is on for " in each)
    names = [line.split()[0] for line in table.splitlines()[1:]]
    # Half of the slots stay empty, and gradients are ours to reduce; chunks are asked for in one of the runs.
    wanted = ["schedule", "autotune", "dispatch", "gradients"]
    assert [each for each in names if each not in ("num_chunks", "links")] == wanted
    assert ("num_chunks" in names) != tuned_run["keeps_stock"]


def test_no_word_of_before_is_in_a_log_a_table_or_a_page(tuned_run: dict[str, Any]) -> None:
    shown = [*tuned_run["said"], *tuned_run["chosen"], *tuned_run["chosen"].values()]
    shown.append(html.unescape(re.sub(r"(?s)<script.*?</script>|<[^>]+>", " ", tuned_run["page"])))
    assert [each for each in shown if OLD.search(each)] == []


def test_the_log_of_a_run_is_a_screen_of_short_lines(tuned_run: dict[str, Any]) -> None:
    lines = [line for each in tuned_run["said"] for line in each.splitlines()]
    assert [line for line in lines if len(line) > 120] == []
    assert 10 < len(lines) <= 50


def test_details_follow_a_line_only_where_they_are_asked_for_and_the_level_stays_the_user_s() -> None:
    logger, said = logging.getLogger("ds_fsmoe"), Said()
    logger.addHandler(said)
    before = logger.level
    for level, is_shown in ((logging.INFO, False), (logging.DEBUG, False), (logging.INFO, True), (logging.ERROR, True)):
        logger.setLevel(level)
        show_details(is_shown)
        log_on_rank_0("drift: a step took longer", details="Its largest difference is known")
        assert logger.level == level
    show_details(False)
    logger.setLevel(before)
    logger.removeHandler(said)
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


def test_of_two_runs_on_a_machine_that_was_not_equally_busy_no_ratio_stands_large(tmp_path: Path) -> None:
    for name, schedule, ms, optimizer_ms in (("stock", run_files.STOCK, 25.0, 9.0), ("ours", "best", 20.0, 3.0)):
        folder = record(tmp_path / name, schedule)
        (folder / run_files.STEPS).unlink()
        rows = [{"step": n, "step_ms": ms, "optimizer_ms": optimizer_ms} for n in range(1, 81)]
        run_files.append_lines(folder / run_files.STEPS, rows)
    said = section(page_of(tmp_path), "conclusion")
    assert "do not rely on this comparison" in said
    assert said.strip().startswith("Conclusion not comparable the machine was not equally busy in the two runs")
    assert "1.25x" not in said


def timed(folder: Path, times_ms: dict[int, float], traced: list[int]) -> Path:
    """A run of steps of 20 ms but for some, of which some are traced; steps are counted from 0 on, as traces do."""
    run = record(folder, "best", num_steps=0)
    rows = [{"step": n + 1, "step_ms": times_ms.get(n, 20.0)} for n in range(40)]
    run_files.append_lines(run / run_files.STEPS, rows)
    spans_ns = [(0, 2_000_000), (2_000_000, 7_000_000), (7_000_000, 9_000_000)]
    for rank in range(2):
        runs = [TracedRun(at, "L00/forward", step, TASKS, 0, spans_ns) for at, step in enumerate(traced)]
        about = {"world_size": 2, "steps": traced, "complete": True}
        write_trace(trace_of(rank, "here", runs, about), rank_file(run / run_files.TRACE, rank))
    return run


def test_the_timeline_shows_the_traced_step_that_is_nearest_to_the_median(tmp_path: Path) -> None:
    page = page_of(timed(tmp_path / "run", {30: 90.0, 31: 21.0, 32: 60.0}, [30, 31, 32]))
    assert any("step 31, rank 0" in each for each in charts_of(page))
    assert "medians" not in section(page, "one-step-task-by-task")


def test_a_step_unlike_the_others_is_said_to_be_that(tmp_path: Path) -> None:
    page = page_of(timed(tmp_path / "run", {30: 90.0, 31: 48.0}, [30, 31]))
    said = section(page, "one-step-task-by-task")
    assert "ds_fsmoe, best: this step took 2.4 medians; none nearer was traced." in said


def test_a_page_of_before_is_shown_with_the_words_of_today(tmp_path: Path) -> None:
    run = record(tmp_path / "run", "best")
    record_details(run)
    plans = json.loads((run / run_files.PLANS).read_text())
    chosen = {"pipeline_degree": "forward 2, backward 3", "esp_size": "2", "order": "sparse"}
    chosen |= {"dispatch": "slots, of which at least 30% are empty", "alltoall": "once_per_node, run as flat"}
    run_files.write_json(run / run_files.PLANS, plans | {"chosen": chosen})
    said = section(page_of(run), "what-was-decided")
    assert "num_chunks forward 2, backward 3 expert_tensor_parallel_size 2 order sparse" in said
    assert "dispatch padded, of which at least 30% are empty alltoall node_deduplicated, run as flat" in said
    assert "order of tasks predicted ms" in said
    assert "3 reduces first 4" in said
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


def test_a_page_says_from_which_step_on_losses_are_apart(tmp_path: Path) -> None:
    for name, schedule, apart in (("stock", run_files.STOCK, 0.0), ("ours", "best", 1.0)):
        folder = record(tmp_path / "both" / name, schedule, num_steps=0)
        losses = [2.0 * (1 + apart * each) for each in (0.0, 1e-7, 3e-7, 4e-5, 2e-2, 1e-3)]
        run_files.append_lines(
            folder / run_files.STEPS, [{"step": n, "step_ms": 20.0, "loss": each} for n, each in enumerate(losses, 1)]
        )
    said = section(page_of(tmp_path / "both"), "conclusion")
    assert "Losses are equal to rounding before step 4, and at most 0.02 apart (step 5)" in said


def test_memory_that_came_with_measuring_is_said_to(tmp_path: Path) -> None:
    run = record(tmp_path / "run", "best", num_steps=0)
    rows = [
        {"step": n, "step_ms": 20.0, "memory_bytes": (2 if n < 5 else 3) << 30}
        | ({"is_tuning": True} if 5 <= n < 9 else {})
        for n in range(1, 21)
    ]
    run_files.append_lines(run / run_files.STEPS, rows)
    said = section(page_of(run), "memory")
    assert "1 GiB of it came in steps 5 to 8, while the autotuner measured or tried plans" in said


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
