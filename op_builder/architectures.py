# SPDX-License-Identifier: Apache-2.0
"""Which GPUs CUDA ops are compiled for: TORCH_CUDA_ARCH_LIST as torch reads it, and whether this machine's cards can
run what it names.

torch's own parser makes the flags. DeepSpeed's knows numbers only: ``9.0a`` and ``Hopper`` end it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.utils import cpp_extension

VARIABLE = "TORCH_CUDA_ARCH_LIST"
_VARIANTS = ("", "a", "+PTX")
"""Spellings of a number that torch may take."""
Capability = tuple[int, int]


class ArchitectureError(RuntimeError):
    """Raised when a list names something that this torch does not know."""


def asked() -> str:
    """Return TORCH_CUDA_ARCH_LIST with one semicolon between entries; empty: it is not set."""
    return ";".join(re.split(r"[\s;]+", os.environ.get(VARIABLE, "").strip("; \t\n")))


def flags(architectures: str) -> list[str]:
    """Return nvcc's ``-gencode`` flags for a list.

    Args:
        architectures: as in TORCH_CUDA_ARCH_LIST; empty or ``"native"``: those of the visible cards.

    Raises:
        ArchitectureError: torch refuses an entry, or there is no card to ask.
    """
    if not architectures.replace("native", "") and not torch.cuda.device_count():
        raise ArchitectureError(f"no GPU is visible to compile for: name some in {VARIABLE}, such as 9.0")
    try:
        return _of_torch(architectures)
    except ValueError as error:
        raise ArchitectureError(f"{VARIABLE} = {architectures!r}: {error}{_remedy(architectures)}") from error


def unfit(architectures: str, made: Sequence[str]) -> str | None:
    """Return why a visible card could run nothing of what is compiled; ``None`` if each can run something.

    Args:
        architectures: the list, for the sentence.
        made: the flags that :func:`flags` made of it.
    """
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_capability(index)
        if not any(_runs(flag, card) for flag in made):
            number = f"{card[0]}.{card[1]}"
            name = torch.cuda.get_device_name(index)
            found = f"{VARIABLE} = {architectures!r} names nothing that GPU {index} ({name}, {number}) can run"
            return f"{found}: add {number}"
    return None


def _runs(flag: str, card: Capability) -> bool:
    """Whether a card runs what a flag makes: code of its own generation, or PTX of an older one or its own.

    What has a letter behind the number (sm_90a) runs on exactly that.
    """
    found = re.fullmatch(r"-gencode=arch=compute_\w+,code=(sm|compute)_(\d+)(\d)([a-z]?)", flag)
    if found is None:
        return False
    made_for = (int(found[2]), int(found[3]))
    if found[4]:
        return made_for == card
    return made_for <= card and (found[1] == "compute" or made_for[0] == card[0])


def _of_torch(architectures: str) -> list[str]:
    with _set(architectures):
        return cpp_extension._get_cuda_arch_flags()


@contextmanager
def _set(architectures: str) -> Iterator[None]:
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = architectures
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def _remedy(architectures: str) -> str:
    """What to write in place of the first entry that torch refuses."""
    for entry in architectures.split(";"):
        if _is_known(entry):
            continue
        number = re.match(r"\d+\.\d", entry)
        known = [number[0] + end for end in _VARIANTS if _is_known(number[0] + end)] if number else []
        if known:
            return f"; in place of {entry} write {' or '.join(known)}"
        return f"; in place of {entry!r} write a number such as 9.0 or 9.0+PTX, or a generation such as Hopper"
    return ""


def _is_known(entry: str) -> bool:
    try:
        _of_torch(entry)
    except ValueError:
        return False
    return bool(entry)
