# SPDX-License-Identifier: Apache-2.0
"""How the C library of a benchmark's ranks handles memory, the same for all variants, and said in every row.

glibc gives large buffers back to the system as they are freed, and gets them back page by page: a program that makes
and drops large tensors pays for that, one that keeps its buffers does not, and no GPU's allocator does it at all. So
``--allocator kept``, the default, has malloc keep what it has; ``--allocator own`` leaves it as the environment has it.
All variants of a case run in the same process of a rank, so none can have another setting than the others; that ranks
have the same is checked.
"""

from __future__ import annotations

import argparse
import ctypes
import os

KEPT, OWN = "kept", "own"
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch's variable: with 1 it asks for huge pages for every tensor."""
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_VARIABLES = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", HUGE_PAGES, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""What names of variables begin with that change how memory is handled."""
_is_kept = False


def add_allocator(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    about = f"malloc keeps freed memory ({KEPT}, the default), or is left as the environment has it ({OWN})"
    parser.add_argument("--allocator", choices=(KEPT, OWN), default=KEPT, help=about)


def keep_memory() -> None:
    """Have malloc keep what it has from now on: nothing is mapped by itself, and nothing is given back.

    Raises:
        ValueError: this C library cannot be told so.
    """
    global _is_kept
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not (mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, -1)):
        raise ValueError(f"--allocator {KEPT}: this C library has no mallopt that does it; use --allocator {OWN}")
    _is_kept = True


def described() -> str:
    """What a row says: what this process does with freed memory, and the variables that have to do with it."""
    found = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_VARIABLES))
    return "; ".join(["malloc keeps memory" if _is_kept else "malloc's own", *found])
