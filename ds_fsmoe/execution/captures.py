# SPDX-License-Identifier: Apache-2.0
"""Rules for CUDA graph capture: what must not be done meanwhile, and how a thread may still query a device."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

_RELAXED = 2
"""The value of CU_STREAM_CAPTURE_MODE_RELAXED."""


def is_capturing() -> bool:
    """Whether work that this thread gives its current stream becomes part of a graph instead of being done."""
    with suppress(RuntimeError):  # a torch without CUDA, or a device that has failed and says so where it is used
        return torch.cuda.is_current_stream_capturing()
    return False


@contextmanager
def beside_captures() -> Iterator[None]:
    """Let this thread query events inside the block while other threads capture graphs.

    CUDA aborts a capture (unless it was begun in a mode other than the default) if any thread of the process queries an
    event of any stream meanwhile. A thread in relaxed mode is exempt. That is safe here: the queried events were
    recorded outside of captures, and nothing is waited for or allocated.
    """
    exchange = _exchange_capture_mode()
    mode = ctypes.c_int(_RELAXED)
    if exchange is None or exchange(ctypes.byref(mode)) != 0:
        yield
        return
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))  # the mode that there was


@functools.cache
def _exchange_capture_mode() -> Callable[..., int] | None:
    """Return the driver's function if it exists: it is loaded wherever CUDA is used, for any build of torch."""
    with suppress(OSError, AttributeError):
        if torch.version.hip is not None:
            return ctypes.CDLL("libamdhip64.so").hipThreadExchangeStreamCaptureMode
        return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1").cuThreadExchangeStreamCaptureMode
    return None
