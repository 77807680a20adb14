# SPDX-License-Identifier: Apache-2.0
"""The page of a run: whole, without anything from elsewhere, and what it says of runs that are not whole."""

from __future__ import annotations

import base64
import hashlib
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
from tests.report_runs import TASKS, charts_of, record, record_both, without_programs
from tests.samples import draw, sampled


@pytest.fixture
def both(tmp_path: Path) -> Path:
    return record_both(tmp_path / "both")


def test_two_runs_are_shown_beside_each_other(both: Path) -> None:
    assert main(["report", str(both)]) == 0
    page = (both / "report.html").read_text()
    for words in (
        "stock DeepSpeed and ds_fsmoe, best",
        "<b>undecided</b>",
        "a &lt;CPU&gt;",
        "L00 to L01 (2)",
        "12.5%",
        "No straight line describes all-to-all",
        "<th>critical path, ms</th><th>stock DeepSpeed</th><th>ds_fsmoe, best</th>",
        "the link &lt;between&gt; nodes",
        "<li>&lt;more&gt; micro-batches.</li>",
        "<td>fsmoe.enabled</td><td>false</td><td>true</td>",
        "python &#39;train it.py&#39; &#39;--lr=&lt;1&gt;&#39;",
        "<td>commit</td><td>abc1234, with changes</td>",
        "<b>3 GiB</b>",
        "<b>51,200</b>",
        "the lower bound of these tasks is 15 ms",
        "what they took decided",
        "plans tried, round 1",
        "19.5",
        "decided 2 times, once with a change: 1 exchange(s)",
        "Last decision: stays &lt;so&gt;.",
        "<td>1 of 2</td><td>1</td><td>L01</td><td>1.70</td><td>1.15</td><td>1.35</td><td>2.75</td>",
    ):
        assert words in page, words
    assert set(charts_of(page)) == {
        "tasks of one step on their lanes: stock DeepSpeed, step 5, rank 0 and ds_fsmoe, best, step 5, rank 0",
        *("time of each step", "loss over steps", "tokens per second over steps", "memory at the end of each step"),
        *("what steps took with each plan, round 1", "measured times and line of all-to-all"),
        *("predicted and measured steps", "phases of layers, predicted against measured"),
        *("tokens per expert of L00 over steps", "rows of the fullest rank over the mean, over steps"),
        *("rows of each rank by expert, L01 until step 10", "rows of each rank by expert, as was decided then"),
    }


def test_the_page_is_one_file_and_needs_nothing_from_elsewhere(both: Path) -> None:
    main(["report", str(both)])
    page = (both / "report.html").read_text()
    assert sorted(each.name for each in both.iterdir()) == ["ours", "report.html", "stock"]
    links = re.findall(r'(?:src|href)="([^"]{0,40})', without_programs(page))
    assert links
    assert all(each.startswith("#") for each in links)
    assert "http" not in re.sub(r"http-equiv", "", without_programs(page))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none'; script-src 'unsafe-eval' 'sha256-")
    assert "http" not in policy


def test_only_the_programs_that_the_policy_names_are_in_the_page(both: Path) -> None:
    main(["report", str(both)])
    page = (both / "report.html").read_text()
    programs = re.findall(r"(?s)<script>(.*?)</script>", page)
    hashes = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in programs]
    assert len(hashes) == 2
    assert re.findall(r"'sha256-([^']+)'", page) == hashes
    others = re.findall(r"<script([^>]+)>", page)
    assert all(each.startswith(' type="application/json" id="spec-') for each in others)


def test_every_section_is_in_the_table_of_contents(both: Path) -> None:
    main(["report", str(both)])
    page = without_programs((both / "report.html").read_text())
    anchors = re.findall(r'<a href="#([^"]+)">', page)
    assert anchors == re.findall(r'<section id="([^"]+)">', page)
    assert anchors[0] == "conclusion"
    for each in ("step-times", "losses", "tokens-per-second", "memory", "plans-that-were-tried", "what-ran"):
        assert each in anchors


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
    assert 'aria-label="tasks of one step' in page
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
    assert "nowhere: no such folder" in capsys.readouterr().err
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


@pytest.mark.parametrize("count", [3, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_record_with_any_value_damaged_is_shown_as_far_as_it_goes(
    count: int, both: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, text in draw("damaged records", list(damaged(both)), count):
        whole = path.read_text()
        path.write_text(text)
        assert main(["report", str(both)]) == 0, text[:500]
        assert "stock DeepSpeed" in (both / "report.html").read_text()
        assert not capsys.readouterr().err
        path.write_text(whole)


@sampled("text", ["", "[" * 100_000, '{"half', "7" * 5000, "null", "[[1]]", "\x00", '{"step": NaN}'], drawn=2)
def test_a_file_of_a_record_that_is_no_more_what_it_was_is_named(text: str, both: Path, capsys) -> None:
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


def test_numbers_that_contradict_each_other_are_said_to(both: Path) -> None:
    path = both / "ours" / run_files.ROUTERS
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["layers"]["L00"]["tokens_E"] = [1.0]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["report", str(both)]) == 0
    page = (both / "report.html").read_text()
    assert "ds_fsmoe, best: the record cannot be shown (loads): ValueError" in page
    assert "Load of experts" not in page
    assert "<b>undecided</b>" in page


def test_of_many_layers_those_with_the_fullest_experts_are_drawn_and_all_are_in_the_table(both: Path) -> None:
    path = both / "ours" / run_files.ROUTERS
    row = json.loads(path.read_text().splitlines()[-1])
    load = row["layers"]["L00"]
    for number in range(14):
        row["layers"][f"L{number:02}"] = load | {"tokens_E": [float(number), 4.0, 16.0 - number]}
    path.write_text(json.dumps(row) + "\n")
    assert main(["report", str(both)]) == 0
    page = (both / "report.html").read_text()
    heats = {name for name in charts_of(page) if name.startswith("tokens per expert")}
    # Their fullest experts have 16, 15, ... 9, 8, 9, ... 13 of 20 tokens: 8 and the later 9 are the least.
    assert heats == {f"tokens per expert of L{number:02} over steps" for number in range(14) if number not in (8, 9)}
    assert "<td>L13</td><td>6.7</td><td>13</td><td>0.67</td><td>12.5%</td>" in page


def test_places_that_contradict_each_other_are_said_to(both: Path) -> None:
    path = both / "ours" / run_files.PLACEMENT
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["places"]["after"] = [0, 0, -1, 1, 3, 2]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["report", str(both)]) == 0
    page = (both / "report.html").read_text()
    assert "ds_fsmoe, best: the record cannot be shown (placement): ValueError: " in page
    assert "Placement of experts" not in page
    assert "Load of experts" in page
