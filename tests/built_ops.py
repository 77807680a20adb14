# SPDX-License-Identifier: Apache-2.0
"""The compiled ops, ready before ranks begin."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path

from tests.python_path import python_path

ROOT = Path(__file__).resolve().parents[1]
_ENVIRONMENT = dict(os.environ)  # before any test changes it


@functools.cache
def build_ops() -> None:
    """Compile the ops unless that has been done, before there are ranks that would run into their limits meanwhile.

    What goes wrong is for the ranks to say, or to do without.
    """
    if not ops_are_built():
        print("compiling the ops, about a minute, once", file=sys.stderr, flush=True)
        command = [sys.executable, "-c", "from ds_fsmoe.ops import load_ops; load_ops('auto', 'cpu')"]
        environment = _ENVIRONMENT | {"PYTHONPATH": python_path(), "DS_ACCELERATOR": "cpu"}
        subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, timeout=900, check=False)


def ops_are_built() -> bool:
    """As the build itself decides it: by dates of files. Imports no DeepSpeed, which takes seconds."""
    from ds_fsmoe.ops.loading import LIBRARIES, import_op_builder

    builders = import_op_builder()
    name = f"{LIBRARIES['cpu']}_{builders.SOURCE_TAG}"
    folder = importlib.import_module(f"{builders.__name__}.locks").extensions_folder()
    library = folder / name / f"{name}.so"
    sources = [each for each in (builders.SOURCE_ROOT / "csrc").rglob("*") if each.is_file()]
    return library.is_file() and library.stat().st_mtime >= max(each.stat().st_mtime for each in sources)


def forget_ops() -> None:
    """Have this process load them again, for tests of how that is done: ranks begin with those of the fork server."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    OpBuilder._loaded_ops.clear()
