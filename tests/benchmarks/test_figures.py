# SPDX-License-Identifier: Apache-2.0
"""Every figure that README and docs/ give of a measurement has a row, which says the same."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.harness.outcome import COLUMNS
from benchmarks.harness.result_files import RESULTS
from benchmarks.reporting.claims import NOT_MEASURED, claims
from benchmarks.reporting.figures import (
    TOKEN,
    Claim,
    Excuse,
    NoRowError,
    Results,
    Section,
    plain,
    sections,
    shown,
    unexplained,
)
from benchmarks.reporting.page import NAME, page
from tests.pages import PAGES

ROOT = Path(__file__).resolve().parents[2]
OF = Results()
CLAIMS = tuple(claims(OF))
SECTIONS = [section for name, text in PAGES.items() for section in sections(name, text)]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.page}, {claim.template[:40]}")
def test_a_page_says_what_the_rows_say(claim: Claim) -> None:
    assert claim.text in plain(PAGES[claim.page])


def test_no_claim_has_a_figure_that_is_not_read_from_a_row() -> None:
    assert {
        claim.template: found for claim in CLAIMS if (found := TOKEN.findall(claim.template.replace("{}", "")))
    } == {}


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_page_has_no_figure_without_a_row(name: str) -> None:
    found = [
        each for section in SECTIONS if section.page == name for each in unexplained(section, CLAIMS, NOT_MEASURED)
    ]
    assert found == [], "benchmarks/reporting/claims.py says where figures are from, or what they are"


@pytest.mark.parametrize("excuse", NOT_MEASURED, ids=lambda excuse: f"{excuse.page}, {excuse.where[:40]}")
def test_nothing_is_excused_that_is_not_there(excuse: Excuse) -> None:
    others = [each for each in NOT_MEASURED if each is not excuse]
    assert any(unexplained(section, CLAIMS, others) for section in SECTIONS if section.page == excuse.page)


def test_sections_that_claim_measurements_are_not_excused_as_a_whole() -> None:
    claimed = {
        (section.page, f"# {section.heading}") for section in SECTIONS for claim in CLAIMS if claim.text in section.text
    }
    assert claimed & {(each.page, each.where) for each in NOT_MEASURED} == set()
    assert len(claimed) >= 10


def test_the_page_of_all_figures_is_that_of_the_rows() -> None:
    written = (RESULTS / NAME).read_text()
    assert written == page(OF), "python -m benchmarks.report --page writes it again"
    assert written.count("\n| ") > 100
    assert "fewer than 10" not in written, "a page shows no ratio of too few blocks for an interval"
    assert re.search(r"\| 1\.10 \(1\.09 to 1\.12\) \| .* \| halves\.csv \| 1\.09 to 1\.1\d \(20 steps", written)


# ---- what the test would find


def section(text: str) -> Section:
    (found,) = sections("docs/some.md", f"## Measured\n\n{text}\n")
    return found


def test_a_figure_in_no_claim_is_found_in_running_text_and_tables_but_not_in_code() -> None:
    text = "It is 1.23 times as fast,\nor 2x, in 45 ms or 6%; `9.9` is code, 0.19.8 a version, [a link](1.5.md).\n"
    text += "\n| a | 0.75 |\n"
    found = unexplained(section(text + "```\n7.77\n```\n"), [], [])
    assert len(found) == 5
    assert TOKEN.findall(section(text).shown) == ["1.23", "2", "45", "6", "0.75"]
    claim = Claim("docs/some.md", "It is 1.23 times as fast, or 2x, in 45 ms or 6%", ())
    (left,) = unexplained(section(text), [claim], [])
    assert "| a | 0.75 |" in left
    assert unexplained(section(text), [], [Excuse("docs/some.md", "# Measured", "")]) == []
    assert len(unexplained(section(text), [], [Excuse("docs/other.md", "# Measured", "")])) == 5


def written(folder: Path, *rows: dict[str, str]) -> Results:
    with (folder / "some.csv").open("w", newline="") as opened:
        writer = csv.DictWriter(opened, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return Results(folder)


ROW = {"case": "one", "variant": "ours", "ratio": "1.2350", "ratio_low": "1.1", "ratio_high": "1.4", "steps": "20"}
ROW |= {"blocks": "10", "settings": '{"L": 64}'}


def test_the_newest_row_counts_and_settings_can_tell_rows_apart(tmp_path: Path) -> None:
    of = written(tmp_path, ROW, ROW | {"ratio": "2.5", "settings": '{"L": 128}'}, ROW | {"over": "tutel", "ratio": "9"})
    assert of.ratio("some", "one", "ours").text == "2.50"
    assert of.ratio("some", "one", "ours", L=64).text == "1.24"
    assert of.ratio("some", "one", "ours", over="tutel").text == "9.00"


def test_a_figure_without_a_row_is_an_error_and_so_is_an_interval_of_few_blocks(tmp_path: Path) -> None:
    of = written(tmp_path, ROW, ROW | {"case": "few", "blocks": "9"}, ROW | {"case": "none", "ratio_low": ""})
    assert of.interval("some", "one", "ours").text == "1.10 to 1.40"
    for case in ("few", "none"):
        with pytest.raises(NoRowError, match=f"{case}: ours has no interval"):
            of.ratio_in("some", case, "ours")
    with pytest.raises(NoRowError, match=r"some.csv has no row with .*'two'"):
        of.ratio("some", "two", "ours")
    with pytest.raises(NoRowError, match="has no row"):
        of.ratio("some", "one", "ours", L=1)
    with pytest.raises(NoRowError, match=r"other.csv: there is no such file"):
        of.ratio("other", "one", "ours")


def test_the_page_is_not_written_where_a_figure_has_no_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.write_page(tmp_path) == 2
    assert "the page is not written" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_halves_are_rounded_up_as_on_paper() -> None:
    assert [shown(each, ".2f") for each in ("1.1150", "1.1149", "0.9661")] == ["1.12", "1.11", "0.97"]
    assert shown("0.3795", ".1%") == "38.0%"
    assert shown("16719872", ".2f", 1e-6) == "16.72"
