# SPDX-License-Identifier: Apache-2.0
"""What must not be done while somebody captures a CUDA graph, and how a thread may look at a device all the same."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""


def is_capturing() -> bool:
    """Whether what this thread gives its current stream becomes part of a graph instead of being done."""
    with suppress(RuntimeError):  # a torch without CUDA, or a device that has failed and says so where it is used
        return torch.cuda.is_current_stream_capturing()
    return False


@contextmanager
def beside_captures() -> Iterator[None]:
    """Inside, this thread may ask for events while other threads capture what they like.

    CUDA gives up a capture, unless it was begun in another mode than the usual one, if any thread of the process asks
    for an event meanwhile, of whatever stream. A thread that says it knows what it does is exempted: here an event is
    asked that was recorded outside of captures, and nothing is waited for or allocated.
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
    """The driver's function, where there is one: it is loaded wherever CUDA is used, whatever torch was built with."""
    with suppress(OSError, AttributeError):
        if torch.version.hip is not None:
            return ctypes.CDLL("libamdhip64.so").hipThreadExchangeStreamCaptureMode
        return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1").cuThreadExchangeStreamCaptureMode
    return None
