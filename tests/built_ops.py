# SPDX-License-Identifier: Apache-2.0
"""The compiled ops, ready before ranks begin."""

from __future__ import annotations

import functools


@functools.cache
def build_ops() -> None:
    """Compile the ops, unless that has been done or cannot be.

    Otherwise the first rank of a job would, and the others would wait for it in a collective, whose time is limited: on
    a busy machine a minute of compiling is several.
    """
    from ds_fsmoe.ops import load_ops

    load_ops("auto", "cpu")
