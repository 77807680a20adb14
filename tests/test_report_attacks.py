# SPDX-License-Identifier: Apache-2.0
"""What is in a run's files gets into its page as text and as data, and never as something that a browser would run."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from ds_fsmoe.cli import main
from ds_fsmoe.files import runs as run_files
from tests.report_runs import charts_of, record, record_both, without_programs
from tests.samples import sampled

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


@sampled("attack", ATTACKS, ids=range(len(ATTACKS)))
def test_whatever_files_say_the_page_has_the_tags_it_has_for_plain_words(attack: str, tmp_path: Path) -> None:
    pages = []
    for name, words in (("plain", "plain"), ("attacked", attack)):
        folder = record_both(tmp_path / name)
        attacked(folder, words)
        assert main(["report", str(folder)]) == 0
        pages.append((folder / "report.html").read_text())
    plain, page = pages
    assert Tags(page).found == Tags(plain).found
    assert "bad()" not in "".join(re.findall(r"(?s)<script>(.*?)</script>", page))
    # It is there, and whole: in charts as data.
    assert (
        attack in json.dumps(list(charts_of(page).values()), ensure_ascii=False).encode().decode()
        or "\\" in repr(attack)
        or '"' in attack
    )


def test_an_attack_is_shown_as_the_text_that_it_is(tmp_path: Path) -> None:
    record(tmp_path / "run", "<script>bad()</script>", host="</title><b>", command=["a'b", "<i>"])
    assert main(["report", str(tmp_path / "run")]) == 0
    page = without_programs((tmp_path / "run" / "report.html").read_text())
    assert "<title>ds_fsmoe, &lt;script&gt;bad()&lt;/script&gt;</title>" in page
    assert "<td>&lt;/title&gt;&lt;b&gt;</td>" in page
    assert "&lt;i&gt;" in page
    assert not re.search(r"<(i|b)>(?!ds_fsmoe|[\d.])", page)


def test_no_expression_of_a_chart_has_anything_of_a_file_in_it(tmp_path: Path) -> None:
    folder = record_both(tmp_path / "both")
    attacked(folder, "'+bad()+'")
    main(["report", str(folder)])
    for about, chart in charts_of((folder / "report.html").read_text()).items():
        rest = {name: each for name, each in chart.items() if name != "datasets"}

        def look(value: Any, key: str = "", about: str = about) -> None:
            if isinstance(value, dict):
                for name, each in value.items():
                    look(each, name)
            elif isinstance(value, list):
                for each in value:
                    look(each, key)
            elif isinstance(value, str) and "bad()" in value:
                assert key in ("description", "domain", "sort", "title", "text"), (about, key)

        look(rest)
