# SPDX-License-Identifier: Apache-2.0
"""Gives functions that DeepSpeed's activation checkpointing runs again a tape of how layers routed.

See :mod:`~ds_fsmoe.layer.recomputed`; DeepSpeed's own checkpointing is another one than torch's.
"""

from __future__ import annotations

import functools
from typing import Any

from deepspeed.runtime.activation_checkpointing import checkpointing

from ds_fsmoe.layer.recomputed import Taped


def tape_deepspeeds_functions() -> None:
    """Give functions that DeepSpeed checkpoints their tapes, from now on in this process. Without effect the second
    time."""
    if getattr(checkpointing, "_ds_fsmoe_tapes", False):
        return
    forward, non_reentrant = checkpointing.CheckpointFunction.forward, checkpointing.non_reentrant_checkpoint

    @functools.wraps(forward)
    def taped_forward(ctx: Any, run_function: Any, *args: Any) -> Any:
        return forward(ctx, Taped(run_function), *args)

    @functools.wraps(non_reentrant)
    def taped_non_reentrant(function: Any, *args: Any) -> Any:
        return non_reentrant(Taped(function), *args)

    checkpointing.CheckpointFunction.forward = staticmethod(taped_forward)
    checkpointing.non_reentrant_checkpoint = taped_non_reentrant
    checkpointing._ds_fsmoe_tapes = True
