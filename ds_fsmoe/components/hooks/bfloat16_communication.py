# SPDX-License-Identifier: Apache-2.0
"""Halves the communication volume: rows are sent in bfloat16, and computed in their own dtype."""

from __future__ import annotations

import torch

from ds_fsmoe.components.callback import CallbackArgs, CallbackBase


class BFloat16Communication(CallbackBase):
    """Tokens and gradients are rounded to bfloat16 before each all-to-all, and widened after it.

    Rounding is the same in both directions and is taken for its own adjoint, as mixed precision does. A relative error
    of up to 2^-9 per crossing is the price; activations that are narrow already stay as they are. Each hook takes and
    returns [E, c, M] or [rows, M], see :class:`CallbackBase`. In a config: ``"hooks":
    ["ds_fsmoe.BFloat16Communication"]``.

    Examples:
        >>> import torch, ds_fsmoe
        >>> hook = ds_fsmoe.BFloat16Communication()
        >>> sent = hook.before_dispatch_hook(ds_fsmoe.CallbackArgs(torch.randn(4, 2, 8), routing=None))
        >>> came = hook.after_dispatch_hook(ds_fsmoe.CallbackArgs(sent, routing=None))
        >>> sent.dtype, came.dtype
        (torch.bfloat16, torch.float32)
    """

    def __init__(self) -> None:
        # Direction -> the type to return to. A layer's parts run one after another on a rank, chunks in any order.
        self._wide: dict[str, torch.dtype] = {}

    def before_dispatch_hook(self, args: CallbackArgs) -> torch.Tensor | None:
        self._wide[args.direction] = args.tensor.dtype
        return args.tensor.bfloat16() if args.tensor.dtype.itemsize > 2 else None

    def after_dispatch_hook(self, args: CallbackArgs) -> torch.Tensor | None:
        return args.tensor.to(self._wide[args.direction])

    before_combine_hook = before_dispatch_hook
    after_combine_hook = after_dispatch_hook
