# SPDX-License-Identifier: Apache-2.0
"""Runs the notebooks in examples/notebooks, and writes down what they print wherever that is the same on every machine.

``python -m tools.notebooks`` writes the planner's notebook again. One that measures something is kept without results.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "notebooks"
KEPT = ("planner",)
"""The notebooks that are kept with what they print."""


def run(path: Path, folder: Path, more: str = "") -> NotebookNode:
    """Run a notebook, and return it with its results.

    Args:
        path: the notebook.
        folder: the folder in which it runs, and in which it leaves its files.
        more: code that is run as a last cell.

    Raises:
        CellExecutionError: a cell has failed.
    """
    notebook = nbformat.read(path, as_version=4)
    if more:
        notebook.cells.append(nbformat.v4.new_code_cell(more))
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def printed(cell: NotebookNode) -> str:
    """Return what a cell has printed."""
    return "".join(
        each.text for each in cell.get("outputs", []) if each.output_type == "stream" and each.name == "stdout"
    )


def bare(notebook: NotebookNode) -> NotebookNode:
    """Return a notebook with nothing of a run but the text that was printed."""
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            text = printed(cell)
            cell.execution_count = None
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []
    return notebook


if __name__ == "__main__":
    for name in KEPT:
        with TemporaryDirectory() as folder:
            nbformat.write(bare(run(FOLDER / f"{name}.ipynb", Path(folder))), FOLDER / f"{name}.ipynb")
