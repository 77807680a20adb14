# SPDX-License-Identifier: Apache-2.0
"""The notebooks are whole, and the one that trains does so on two ranks and shows both runs. The planner's own test is
in tests/planning, where there is no torch."""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")

from tests.scripts import ROOT  # noqa: E402
from tools.notebooks import FOLDER, KEPT, bare, printed, run  # noqa: E402

pytestmark = pytest.mark.long

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_kept_without_what_differs_from_run_to_run(path: Path) -> None:
    kept = nbformat.read(path, as_version=4)
    nbformat.validate(kept)
    assert bare(nbformat.read(path, as_version=4)) == kept
    assert path.stem in KEPT or not any(printed(cell) for cell in kept.cells)
    assert kept.cells[0].cell_type == "markdown"
    assert f"examples/notebooks/{path.name}" in (ROOT / "docs" / "install.md").read_text()


@pytest.mark.daily("commands", 1)
def test_the_notebook_of_the_report_trains_both_ways_and_shows_the_report(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = run(FOLDER / "report.ipynb", tmp_path)
    text = "".join(map(printed, done.cells))
    assert text.count("step ") >= 5
    assert (tmp_path / "fsmoe_compare" / "report.html").stat().st_size > 10_000
    shown = [each.data for cell in done.cells for each in cell.get("outputs", []) if "data" in each]
    assert any("fsmoe_compare/report.html" in data.get("text/html", "") for data in shown)
