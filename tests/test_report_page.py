# SPDX-License-Identifier: Apache-2.0
"""The page of a run: whole, without anything from elsewhere, and what it says of runs that are not whole. What files
say is in it as text and as data, and never as something that a browser would run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ds_fsmoe.files import runs as run_files
from ds_fsmoe.files.traces import TracedRun, rank_file, trace_of, write_trace
from ds_fsmoe.offline.report.charts import TracedStep, draw_timeline
from ds_fsmoe.offline.report.critical_path import MeasuredTask
from ds_fsmoe.planning.schedule import Lane
from tests.report_runs import TASKS, charts_of, page_of, record, record_both, without_programs
from tests.samples import sampled


@pytest.fixture
def both(tmp_path: Path) -> Path:
    return record_both(tmp_path / "both")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Two runs that nothing is wrong with, and their page."""
    folder = record_both(tmp_path_factory.mktemp("shown") / "both")
    return folder, page_of(folder)


def test_two_runs_are_shown_beside_each_other(shown: tuple[Path, str]) -> None:
    _, page = shown
    for words in (
        *("stock DeepSpeed and ds_fsmoe, best", "<b>undecided</b>", "a &lt;CPU&gt;", "L00 to L01 (2)", "12.5%"),
        "No straight line describes all-to-all",
        "<th>critical path, ms</th><th>stock DeepSpeed</th><th>ds_fsmoe, best</th>",
        "the link &lt;between&gt; nodes",
        "<li>&lt;more&gt; micro-batches.</li>",
        "<td>fsmoe.enabled</td><td>false</td><td>true</td>",
        "python &#39;train it.py&#39; &#39;--lr=&lt;1&gt;&#39;",
        "<td>commit</td><td>abc1234, with changes</td>",
        *("<b>3 GiB</b>", "<b>51,200</b>", "what they took decided", "plans tried, round 1", "19.5"),
        "the lower bound of these tasks is 15 ms",
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


def test_the_page_is_one_file_with_the_programs_that_its_policy_names_and_needs_nothing_from_elsewhere(
    shown: tuple[Path, str],
) -> None:
    folder, page = shown
    assert sorted(each.name for each in folder.iterdir()) == ["ours", "report.html", "stock"]
    own = without_programs(page)
    links = re.findall(r'(?:src|href)="([^"]{0,40})', own)
    assert links
    assert all(each.startswith("#") for each in links)
    assert "http" not in re.sub(r"http-equiv", "", own)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none'; script-src 'unsafe-eval' 'sha256-")
    assert "http" not in policy
    programs = re.findall(r"(?s)<script>(.*?)</script>", page)
    hashes = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in programs]
    assert len(hashes) == 2
    assert re.findall(r"'sha256-([^']+)'", page) == hashes
    others = re.findall(r"<script([^>]+)>", page)
    assert all(each.startswith(' type="application/json" id="spec-') for each in others)
    anchors = re.findall(r'<a href="#([^"]+)">', own)
    assert anchors == re.findall(r'<section id="([^"]+)">', own)
    assert anchors[0] == "conclusion"
    assert {"step-times", "losses", "tokens-per-second", "memory", "plans-that-were-tried", "what-ran"} < set(anchors)


def test_all_ranks_are_in_one_file_with_the_critical_path_and_a_second_report_is_the_same(
    shown: tuple[Path, str],
) -> None:
    folder, page = shown
    merged = (folder / "ours" / "trace" / "trace.json").read_text()
    events = json.loads(merged)["traceEvents"]
    names = {each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert names == {"rank 0, here", "rank 1, here", "critical path"}
    path = [each for each in events if each.get("cat") == "critical path"]
    assert [each["name"].split(":")[1].split(",")[0].strip() for each in path] == ["A2A_IN", "EXPERT", "A2A_OUT"]
    idle = {each["name"] for each in events if each.get("cat") == "idle"}
    assert idle == {"idle: for EXPERT", "idle: for A2A_IN", "idle: nothing left to do"}
    assert page_of(folder) == page
    assert (folder / "ours" / "trace" / "trace.json").read_text() == merged


def test_a_run_that_died_is_shown_and_said_to_be_incomplete(both: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = both / "ours"
    facts = json.loads((ours / run_files.RUN).read_text())
    del facts["ended"]
    run_files.write_json(ours / run_files.RUN, facts)
    rank_file(ours / run_files.TRACE, 1).write_text('{"half')
    about = {"world_size": 2, "steps": [5], "complete": False, "ended": "closed in step 5"}
    cut = TracedRun(0, "L00/forward", 5, TASKS, 0, [(0, 2_000_000), None, None])
    write_trace(trace_of(0, "here", [cut], about), rank_file(ours / run_files.TRACE, 0))
    page = page_of(ours)
    assert "goes on, or was killed" in page
    assert "the trace is incomplete: closed in step 5; steps there are: 5 (rank 0)" in page
    assert "the trace is incomplete: rank1.json: unreadable" in page
    assert 'aria-label="tasks of one step' in page
    assert "goes on, or was killed" in capsys.readouterr().out


def test_the_axis_of_a_step_has_a_length_whatever_its_tasks_took() -> None:
    for took_us, length_ms in ((0, 1.0), (2000, 2.0)):
        task = MeasuredTask("L00", "fwd", 5, 0, "EXPERT", 0, Lane.COMPUTE, 7, 7 + took_us, took_us / 1e3)
        chart = draw_timeline([TracedStep("a run", [task])])
        assert chart.spec["layer"][0]["encoding"]["x"]["scale"]["domain"] == [0.0, length_ms]


@pytest.mark.parametrize("what", ["steps alone", "a trace alone", "facts alone"])
def test_what_there_is_of_a_run_is_shown(what: str, tmp_path: Path) -> None:
    run = record(tmp_path / "run", "best")
    for path in run.iterdir():
        kept = {"steps alone": run_files.STEPS, "a trace alone": run_files.TRACE, "facts alone": run_files.RUN}[what]
        if path.name != kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = page_of(run)
    assert ("task by task" in page) == (what == "a trace alone")
    assert 'class="warn"' in page


def test_of_many_layers_those_with_the_fullest_experts_are_drawn_and_all_are_in_the_table(both: Path) -> None:
    path = both / "ours" / run_files.ROUTERS
    row = json.loads(path.read_text().splitlines()[-1])
    load = row["layers"]["L00"]
    for number in range(14):
        row["layers"][f"L{number:02}"] = load | {"tokens_E": [float(number), 4.0, 16.0 - number]}
    path.write_text(json.dumps(row) + "\n")
    page = page_of(both)
    heats = {name for name in charts_of(page) if name.startswith("tokens per expert")}
    # Their fullest experts have 16, 15, ... 9, 8, 9, ... 13 of 20 tokens: 8 and the later 9 are the least.
    assert heats == {f"tokens per expert of L{number:02} over steps" for number in range(14) if number not in (8, 9)}
    assert "<td>L13</td><td>6.7</td><td>13</td><td>0.67</td><td>12.5%</td>" in page


def test_numbers_and_places_that_contradict_each_other_are_said_to(both: Path) -> None:
    for name, change in (
        (run_files.ROUTERS, lambda rows: rows[0]["layers"]["L00"].update(tokens_E=[1.0])),
        (run_files.PLACEMENT, lambda rows: rows[1]["places"].update(after=[0, 0, -1, 1, 3, 2])),
    ):
        rows = [json.loads(line) for line in (both / "ours" / name).read_text().splitlines()]
        change(rows)
        (both / "ours" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = page_of(both)
    for what, title in (("loads", "Load of experts"), ("placement", "Placement of experts")):
        assert f"ds_fsmoe, best: the record cannot be shown ({what}): ValueError" in page
        assert title not in page
    assert "<b>undecided</b>" in page


# ---- attacks


ATTACKS = (
    "</script><script>bad()</script>",
    "<img src=x onerror=bad()>",
    "\"'><svg onload=bad()>",
    "{{ 7 * 7 }}{% raw %}",
    "<!--<script>",
    "</style><style>*{display:none}",
    "'+bad()+'",
    "\u2028 \x00 \ud7ff javascript:bad()",
)


class Tags(HTMLParser):
    """The tags and attributes of a page, data blocks and programs being text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[str, ...]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, tuple(name for name, _ in attrs)))


def texts_replaced(value: Any, by: str) -> Any:
    """A value of JSON with every text in it replaced, names of layers too, apart from those that are choices."""
    if isinstance(value, dict):
        return {
            key if re.fullmatch(r"[a-zA-Z_]+|tokens_E|rows_E", key) else f"{by}/backward": texts_replaced(each, by)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [texts_replaced(each, by) for each in value]
    return by if isinstance(value, str) else value


def attacked(folder: Path, by: str) -> None:
    """Put a text in the place of all that runs say."""
    for run in ("stock", "ours"):
        names = (run_files.RUN, run_files.PLANS, run_files.ROUTERS, run_files.COMPARED, run_files.PLACEMENT)
        for path in (folder / run / name for name in names):
            if path.is_file():
                lines = [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines()
                values = [texts_replaced(json.loads(each), by) for each in lines]
                if path.name == run_files.RUN and run == "stock":
                    values[0]["schedule"] = run_files.STOCK
                path.write_text("\n".join(map(json.dumps, values)))
        trace = folder / run / run_files.TRACE / "rank0.json"
        value = json.loads(trace.read_text())
        for event in value["traceEvents"]:
            if event["ph"] == "X":
                event["args"] |= {"kind": by, "layer": by, "phase": by}
        trace.write_text(json.dumps(value))


def texts_in(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text in a JSON value, with the name of what it is of."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, list | dict):
        for name, each in value.items() if isinstance(value, dict) else ((key, each) for each in value):
            yield from texts_in(each, name)


@sampled("attack", ATTACKS, ids=range(len(ATTACKS)))
def test_whatever_files_say_the_page_has_the_tags_of_plain_words_and_no_expression_of_a_chart_has_any_of_it(
    attack: str, tmp_path: Path
) -> None:
    pages = []
    for name, words in (("plain", "plain"), ("attacked", attack)):
        folder = record_both(tmp_path / name)
        attacked(folder, words)
        pages.append(page_of(folder))
    plain, page = pages
    assert Tags(page).found == Tags(plain).found
    assert "bad()" not in "".join(re.findall(r"(?s)<script>(.*?)</script>", page))
    charts = charts_of(page).values()
    # It is there, and whole: in charts as data.
    assert any(attack in text for each in charts for _, text in texts_in(each)) or not attack.isprintable()
    rest = [{name: each for name, each in chart.items() if name != "datasets"} for chart in charts]
    keys = {key for each in rest for key, text in texts_in(each) if attack in text}
    assert keys <= {"description", "domain", "sort", "title", "text"}
