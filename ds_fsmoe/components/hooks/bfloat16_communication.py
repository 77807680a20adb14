# SPDX-License-Identifier: Apache-2.0
"""A hook that halves the communication volume of float32 models: rows are sent in bfloat16, and computed in their
dtype.

The option ``fsmoe.comm_dtype`` sends 8-bit rows instead, without a hook.
"""

from __future__ import annotations

import torch

from ds_fsmoe.components.callback import CallbackArgs, CallbackBase


class BFloat16Communication(CallbackBase):
    """Rounds tokens and gradients to bfloat16 ahead of each all-to-all, and casts them back after it.

    Rounding is the same in both directions, and its gradient is taken as the identity, as in mixed precision. The
    relative error is up to 2^-9 per all-to-all. Activations of 16 bits or less stay unchanged. Each hook takes and
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
