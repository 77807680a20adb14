# SPDX-License-Identifier: Apache-2.0
"""Makes files whose experts only ds_fsmoe can join refuse other readers, with the command to use.

``saving`` adds guards, ``reading`` skips them. DeepSpeed's ``zero_to_fp32`` and ``ds_to_universal`` would take a rank's
experts for all of them. They and stock's engine unpickle a whole file, and a guard raises an error when it is
unpickled.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.files.whole_files import write_whole

KEY = "read_by_ds_fsmoe_only"
"""The key of the guard in a file; the first, so that no tensor is read before the error."""
_SENTENCE = (
    "ds_fsmoe has saved this checkpoint, with experts that are spread over ranks, and other programs would put them "
    "together wrongly. Run 'ds_fsmoe convert CHECKPOINTS FOLDER --to fp32' for fp32 weights, '--to huggingface' "
    "for what from_pretrained reads, '--to stock' for a checkpoint of weights that stock DeepSpeed loads. To train on "
    "with other ranks, another ep_size or ZeRO stage, load it as it is with ds_fsmoe"
)
_SCRIPT = '''#!/usr/bin/env python
"""Writes fp32 weights: python zero_to_fp32.py . FOLDER [--tag TAG] is ds_fsmoe convert . FOLDER [--tag TAG] --to fp32.

DeepSpeed's script of this name would take the experts of one rank for all of them.
"""
import sys

from ds_fsmoe.cli import main

given = ["--tag" if each == "-t" else each for each in sys.argv[1:] if each != "--safe_serialization"]
raise SystemExit(main(["convert", *given, "--to", "fp32"]))
'''


def use_ds_fsmoe_convert(sentence: str) -> None:
    """Refuse to be unpickled: files name this function.

    Raises:
        CheckpointError: always.
    """
    raise CheckpointError(sentence)


def skip_guard(sentence: str) -> None:
    """Skip a guard: our own reader unpickles this function in its place."""


SKIPPED_GUARD = (skip_guard, f"{__name__}.{use_ds_fsmoe_convert.__name__}")
"""Names what our reader calls instead, as it stands in files."""


class _Guard:
    def __reduce__(self) -> tuple[Any, ...]:
        return use_ds_fsmoe_convert, (_SENTENCE,)


def guarded(state: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a file, with a guard as its first entry."""
    return {KEY: _Guard()} | state


def write_script(folder: Path) -> None:
    """Write a script into a folder of checkpoints that makes fp32 weights of them, under the name of DeepSpeed's
    script."""
    script = folder / "zero_to_fp32.py"
    write_whole(script, _SCRIPT)
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
