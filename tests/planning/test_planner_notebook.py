# SPDX-License-Identifier: Apache-2.0
"""The notebook that plans runs from numpy and scipy alone, and is kept with what it prints."""

from __future__ import annotations

from pathlib import Path

import nbformat

from tools.notebooks import FOLDER, bare, printed, run

NOTEBOOK = FOLDER / "planner.ipynb"


def test_it_runs_without_torch_draws_a_step_and_prints_what_it_is_kept_with(tmp_path: Path) -> None:
    no_torch = "import sys\nprint([name for name in ('torch', 'deepspeed') if name in sys.modules])"
    done = run(NOTEBOOK, tmp_path, no_torch)
    assert printed(done.cells.pop()) == "[]\n"
    drawn = [each.data for cell in done.cells for each in cell.get("outputs", []) if "data" in each]
    assert any("image/png" in data for data in drawn)
    assert (tmp_path / "planned" / "step.png").read_bytes().startswith(b"\x89PNG")
    kept = nbformat.read(NOTEBOOK, as_version=4)
    assert [printed(cell) for cell in done.cells] == [printed(cell) for cell in kept.cells], (
        "python -m tools.notebooks writes it again"
    )


def test_it_is_kept_without_pictures_and_numbers_of_runs() -> None:
    kept = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(kept)
    assert bare(nbformat.from_dict(kept)) == kept
    assert sum(bool(printed(cell)) for cell in kept.cells) >= 3
