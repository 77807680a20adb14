# SPDX-License-Identifier: Apache-2.0
"""Builders of the compiled ops: one short file per library, in one folder per device type.

While DeepSpeed is being imported it tries ``from op_builder import __deepspeed__`` to learn whether it runs from its
own source tree. With this repository's root on ``sys.path`` that import lands here, with DeepSpeed half initialised.
So this file imports nothing of DeepSpeed and must never define that name: DeepSpeed then gets the ImportError it
expects and goes on. In an installed package this folder is ``ds_fsmoe.ops.op_builder``.
"""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .builder import FSMoEBuilder

FOLDER = Path(__file__).resolve().parent
# The builders name their files relative to this folder: the repository in a checkout, ds_fsmoe/ops when installed.
SOURCE_ROOT = FOLDER.parent
# Checkouts that share a folder of builds have one each in it, and do not build over one another.
SOURCE_TAG = hashlib.sha256(str(SOURCE_ROOT).encode()).hexdigest()[:8]

DEVICE_TYPES = ("cpu", "cuda")


def builders(device_type: str) -> dict[str, FSMoEBuilder]:
    """One builder per library that exists for a kind of device, by name. Builds and loads nothing.

    Args:
        device_type: a torch device type; one of ``DEVICE_TYPES``.

    Raises:
        ValueError: there are no compiled ops for this device type.
        ImportError: DeepSpeed or torch is not installed.
    """
    if device_type not in DEVICE_TYPES:
        raise ValueError(f"device_type = {device_type!r}: there are compiled ops for {', '.join(DEVICE_TYPES)} only")
    found = {}
    for file in pkgutil.iter_modules([str(FOLDER / device_type)]):
        builder = importlib.import_module(f"{__name__}.{device_type}.{file.name}").BUILDER()
        found[builder.NAME] = builder
    return found
