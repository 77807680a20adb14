# SPDX-License-Identifier: Apache-2.0
"""The page of a run: whole, without anything from elsewhere, and what it says of runs that are not whole."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_fsmoe.cli import main
from ds_fsmoe.files import runs as run_files
from ds_fsmoe.files.traces import TracedRun, rank_file, trace_of, write_trace
from ds_fsmoe.planning.schedule import Lane, Task
from tests.samples import sampled

TASKS = [Task("A2A_IN", Lane.INTER), Task("EXPERT", Lane.COMPUTE, after=(0,)), Task("A2A_OUT", Lane.INTER, after=(1,))]


def record(folder: Path, schedule: str, step_ms: float = 20.0, num_steps: int = 20, **facts: Any) -> Path:
    """A run as one is recorded."""
    folder.mkdir(parents=True)
    about = {"format": 1, "schedule": schedule, "world_size": 2, "device": "a <CPU>", "host": "here", "layers": {}}
    run_files.write_json(folder / run_files.RUN, about | {"ended": "now"} | facts)
    rows = [
        {"step": n, "samples": 8 * n, "loss": 3.0 / n, "step_ms": step_ms, "forward_ms": 5.0, "backward_ms": 9.0}
        for n in range(1, num_steps + 1)
    ]
    run_files.append_lines(folder / run_files.STEPS, [each | {"optimizer_ms": 1.0} for each in rows])
    for rank in range(2):
        spans_ns = [(0, 2_000_000), (2_000_000, 7_000_000), (7_000_000, 9_000_000)]
        runs = [TracedRun(0, "L00/forward", 5, TASKS, 0, spans_ns)]
        (folder / run_files.TRACE).mkdir(exist_ok=True)
        trace = trace_of(rank, "here", runs, {"world_size": 2, "steps": [5], "complete": True})
        write_trace(trace, rank_file(folder / run_files.TRACE, rank))
    return folder


def placement_rows() -> list[dict[str, Any]]:
    """What was decided twice about two layers: the second one changes once."""
    stays = {"rows_E": [5.0, 4.0, 5.0, 4.0], "num_swaps": 0, "num_replicas": 0, "gain_ms": 0.0, "why": "stays <so>"}
    stays |= {"balance": 1.25, "expected_balance": 1.25}
    places = {"before": [0, 1, -1, 2, 3, -1], "after": [0, 2, -1, 1, 3, 0], "node_of_rank": [0, 0]}
    moves = {"rows_E": [9.0, 8.0, 2.0, 1.0], "balance": 1.7, "expected_balance": 1.15, "num_swaps": 1}
    moves |= {"num_replicas": 1, "gain_ms": 2.75, "why": "1 expert moves", "places": places}
    now = stays | {"balance": 1.35, "expected_balance": 1.35}
    rows = [{"layer": "L00", **stays}, {"layer": "L01", **moves}, {"layer": "L00", **stays}, {"layer": "L01", **now}]
    return [{"step": 10 if at < 2 else 20} | row for at, row in enumerate(rows)]


def record_details(folder: Path) -> None:
    """What ours tells besides."""
    load = {"tokens_E": [7.0, 1.0, 3.0], "dropped_share": 0.125, "aux_loss": 1.5, "entropy": None}
    run_files.append_lines(folder / run_files.ROUTERS, [{"step": step, "layers": {"L00": load}} for step in (10, 20)])
    run_files.append_lines(folder / run_files.PLACEMENT, placement_rows())
    both = {"predicted_ms": 4.0, "measured_ms": 5.0}
    compared = {"step": 10, "whole": both, "rest": both, "phases": {"L00/forward": both, "L00/backward": both}}
    run_files.append_lines(folder / run_files.COMPARED, [compared | {"kinds": {}, "busy": {"compute": 0.5}}])
    fit = {
        "operation": "all-to-all",
        "unit": "byte",
        "sizes": [1e4, 2e4],
        "times_ms": [1.0, 2.0],
        "line_ms": [1.0, 2.0],
        "lines": [{"alpha_ms": 0.1, "beta_ms": 1e-4}],
        "typical_share": 0.3,
        "worst_share": 0.5,
        "is_good": False,
    }
    choice = {
        "layers": ["L00", "L01"],
        "phase": "backward",
        "degree": 3,
        "order": "reduce_first",
        "late_dw": 0,
        "predicted_ms": 4.0,
        "runner_up": 2,
        "runner_up_ms": 4.5,
        "uncut_ms": 6.0,
        "asked": None,
    }
    step = {"chosen_ms": 18.0, "deepspeed_ms": 27.0, "bound_ms": 15.0, "gradients_ms": 2.0, "exposed_ms": 0.5}
    plans = {"layers": [], "choices": [choice], "fits": [fit], "step": step, "num_measured": 8, "took_s": 2.0}
    tried = {"name": "L00.. 3 paper and 3 paper", "step_ms": 17.0, "num_steps": 4, "is_kept": True}
    plans["trials"] = [[tried, tried | {"name": "uncut", "step_ms": 19.5, "is_kept": False}], []]
    run_files.write_json(folder / run_files.PLANS, plans)


@pytest.fixture
def both(tmp_path: Path) -> Path:
    record(tmp_path / "both" / "stock", run_files.STOCK, step_ms=30.0)
    record_details(record(tmp_path / "both" / "ours", "best"))
    return tmp_path / "both"


def test_two_runs_are_shown_beside_each_other(both: Path) -> None:
    assert main(["report", str(both)]) == 0
    page = (both / "report.html").read_text()
    for words in (
        "stock DeepSpeed and ds_fsmoe, best",
        "<b>1.50x</b>",
        "a &lt;CPU&gt;",
        "L00 to L01 (2)",
        "12.5%",
        "No straight line describes all-to-all",
        "critical path, stock DeepSpeed",
        "no schedule takes less than 15 ms",
        "what they took decided",
        "plans tried, round 1",
        "19.5",
        "decided 2 times, once with a change: 1 exchange(s)",
        "Last decision: stays &lt;so&gt;.",
        "<td>1 of 2</td><td>1</td><td>1</td><td>L01</td><td>1.70</td><td>1.15</td><td>1.35</td><td>2.75</td>",
    ):
        assert words in page, words
    names = {file.stem for file in (both / "report").glob("*.png")}
    assert names == {"losses", "steps", "predicted", "timelines", "loads", "fits", "placement", "balance"}
    assert page.count("<img") == len(names)


def test_the_page_needs_nothing_from_elsewhere(both: Path) -> None:
    main(["report", str(both)])
    page = (both / "report.html").read_text()
    addresses = re.findall(r'(?:src|href)="([^"]{0,40})', page)
    assert addresses
    assert all(each.startswith("data:image/png;base64,") for each in addresses)
    assert "http" not in re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", page)
    assert "<script" not in page


def test_all_ranks_are_in_one_file_with_the_critical_path(both: Path) -> None:
    main(["report", str(both)])
    events = json.loads((both / "ours" / "trace" / "trace.json").read_text())["traceEvents"]
    names = {each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert names == {"rank 0, here", "rank 1, here", "critical path"}
    path = [each for each in events if each.get("cat") == "critical path"]
    assert [each["name"].split(":")[1].split(",")[0].strip() for each in path] == ["A2A_IN", "EXPERT", "A2A_OUT"]
    idle = {each["name"] for each in events if each.get("cat") == "idle"}
    assert idle == {"idle: for EXPERT", "idle: for A2A_IN", "idle: nothing left to do"}


def test_a_second_report_of_a_run_is_the_same(both: Path) -> None:
    main(["report", str(both)])
    first = (both / "report.html").read_bytes(), (both / "ours" / "trace" / "trace.json").read_bytes()
    main(["report", str(both)])
    assert ((both / "report.html").read_bytes(), (both / "ours" / "trace" / "trace.json").read_bytes()) == first


def test_a_run_that_died_is_shown_and_said_to_be_incomplete(both: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = both / "ours"
    facts = json.loads((ours / run_files.RUN).read_text())
    del facts["ended"]
    run_files.write_json(ours / run_files.RUN, facts)
    rank_file(ours / run_files.TRACE, 1).write_text('{"half')
    about = {"world_size": 2, "steps": [5], "complete": False, "ended": "closed in step 5"}
    cut = TracedRun(0, "L00/forward", 5, TASKS, 0, [(0, 2_000_000), None, None])
    write_trace(trace_of(0, "here", [cut], about), rank_file(ours / run_files.TRACE, 0))
    assert main(["report", str(ours)]) == 0
    page = (ours / "report.html").read_text()
    assert "goes on, or was killed" in page
    assert "the trace is incomplete: closed in step 5; steps there are: 5 (rank 0)" in page
    assert "the trace is incomplete: rank1.json: unreadable" in page
    assert 'alt="tasks of one step' in page
    assert "goes on, or was killed" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["steps alone", "a trace alone", "facts alone"])
def test_what_there_is_of_a_run_is_shown(what: str, tmp_path: Path) -> None:
    run = record(tmp_path / "run", "best")
    for path in run.iterdir():
        kept = {"steps alone": run_files.STEPS, "a trace alone": run_files.TRACE, "facts alone": run_files.RUN}[what]
        if path.name != kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert ("task by task" in page) == (what == "a trace alone")
    assert 'class="warn"' in page


def test_a_folder_without_data_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "no run has been recorded here" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    run = record(tmp_path / "run", "best")
    assert main(["report", str(run), "--out", str(tmp_path / "no" / "page.html")]) == 2
    assert "there is no folder" in capsys.readouterr().err


# ---- damage


DAMAGES = (None, "x", -1, 10**400, 1e400, [], {}, [None], {"a": "b"}, True)


def places_in(value: Any, place: tuple = ()) -> Iterator[tuple]:
    """Every place in a JSON value, as keys one after another."""
    yield place
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield from places_in(each, (*place, key))


def put(value: Any, place: tuple, new: Any) -> Any:
    """A copy with something else at a place."""
    if not place:
        return new
    copy = list(value) if isinstance(value, list) else dict(value)
    copy[place[0]] = put(value[place[0]], place[1:], new)
    return copy


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are composed, and not drawn, which takes most of the time."""
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", lambda self, out, **_: out.write(b"a picture"))


def damaged(folder: Path) -> Iterator[tuple[Path, str]]:
    """Files of a run with one value in each replaced."""
    ours = folder / "ours"
    names = (run_files.RUN, run_files.PLANS, run_files.STEPS, run_files.ROUTERS, run_files.COMPARED)
    names += (run_files.PLACEMENT,)
    for path in (*(ours / name for name in names), rank_file(ours / run_files.TRACE, 0)):
        whole = path.read_text()
        first, *others = [whole] if path.suffix == ".json" else whole.splitlines(keepends=True)
        for number, place in enumerate(places_in(json.loads(first))):
            for new in (DAMAGES[number % len(DAMAGES)], DAMAGES[(3 * number + 1) % len(DAMAGES)]):
                text = json.dumps(put(json.loads(first), place, new))
                yield path, "\n".join([text, *others])
        path.write_text(whole)


@pytest.mark.parametrize("every", [37, pytest.param(1, marks=pytest.mark.slow)])
def test_a_record_with_any_value_damaged_is_shown_as_far_as_it_goes(
    every: int, both: Path, undrawn: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (path, text) in enumerate(damaged(both)):
        if number % every == 0:
            path.write_text(text)
            assert main(["report", str(both)]) == 0, text[:500]
            assert "stock DeepSpeed" in (both / "report.html").read_text()
            assert not capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[" * 100_000, '{"half', "7" * 5000, "null", "[[1]]", "\x00", '{"step": NaN}'])
def test_a_file_of_a_record_that_is_no_more_what_it_was_is_named(text: str, both: Path, undrawn: None, capsys) -> None:
    names = (run_files.PLANS, run_files.STEPS, run_files.ROUTERS, run_files.COMPARED, run_files.PLACEMENT)
    names += ("trace/rank0.json",)
    for name in names:
        (both / "ours" / name).write_text(text)
    assert main(["report", str(both)]) == 0
    page, said = (both / "report.html").read_text(), capsys.readouterr().out
    for name in names:
        place = name.removeprefix("trace/")
        assert (place in page) or (not text and "jsonl" in name), name
    assert text[:20] not in said or len(text) < 20


def test_numbers_that_contradict_each_other_are_said_to(both: Path, undrawn: None) -> None:
    path = both / "ours" / run_files.ROUTERS
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["layers"]["L00"]["tokens_E"] = [1.0]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["report", str(both)]) == 0
    page = (both / "report.html").read_text()
    assert "ds_fsmoe, best: what was recorded cannot be shown (loads): ValueError" in page
    assert "Load of experts" not in page
    assert "<b>1.50x</b>" in page


def test_places_that_contradict_each_other_are_said_to(both: Path, undrawn: None) -> None:
    path = both / "ours" / run_files.PLACEMENT
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["places"]["after"] = [0, 0, -1, 1, 3, 2]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["report", str(both)]) == 0
    page = (both / "report.html").read_text()
    assert "ds_fsmoe, best: what was recorded cannot be shown (placement): ValueError: experts at home" in page
    assert "Placement of experts" not in page
    assert "Load of experts" in page


# ---- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not shutil.which("chromedriver") or not shutil.which("chromium"):
        pytest.skip("needs chromium and chromedriver (Debian's chromium-driver)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    quiet = ("background-networking", "component-update", "sync", "quic", "gpu")
    for option in ("--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{each}" for each in quiet)):
        options.add_argument(option)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@sampled("width", [390, 1280], kept=[0], ids=["phone", "desk"])
def test_a_browser_shows_every_picture_and_nothing_is_wider_than_the_screen(
    width: int, browser: Any, both: Path
) -> None:
    main(["report", str(both)])
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get((both / "report.html").as_uri())
    assert browser.title == "stock DeepSpeed and ds_fsmoe, best"
    seen = browser.execute_script("return [...document.images].map(i => i.complete && i.naturalWidth)")
    assert len(seen) == 8
    assert all(each > 300 for each in seen)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    size = browser.execute_script("return parseFloat(getComputedStyle(document.querySelector('td')).fontSize)")
    assert size >= 12
    # Nothing was asked of a network.
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert not [each for each in loaded if not each.startswith("data:")]
