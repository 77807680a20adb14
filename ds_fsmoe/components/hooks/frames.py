# SPDX-License-Identifier: Apache-2.0
"""A hook for multimodal input: it reshapes a layer's tokens from another model's layout.

It is an example of hooks at a layer's start and end.
"""

from __future__ import annotations

import torch

from ds_fsmoe.components.callback import CallbackArgs, CallbackBase


class FramesAsTokens(CallbackBase):
    """Routes video [B, T, N, M], T frames of N patches, as text [B, T * N, M]. The output has the input's shape.

    Other input stays unchanged. In a config: ``"hooks": ["ds_fsmoe.FramesAsTokens"]``.

    Examples:
        >>> import torch, ds_fsmoe
        >>> layer = ds_fsmoe.MOELayer(
        ...     ds_fsmoe.SwitchGate(), ds_fsmoe.SimpleOrder(), model_dim=8, num_experts=4, expert_dim=16,
        ...     callbacks=[ds_fsmoe.FramesAsTokens()],
        ... )
        >>> layer(torch.randn(2, 3, 5, 8)).shape
        torch.Size([2, 3, 5, 8])
    """

    def __init__(self) -> None:
        # Layer -> shape of its last input. A layer's start and end hooks alternate.
        self._shapes: dict[str, torch.Size] = {}

    def before_moe_start_hook(self, args: CallbackArgs) -> torch.Tensor | None:
        self._shapes[args.layer] = args.tensor.shape
        return args.tensor.flatten(1, 2) if args.tensor.dim() == 4 else None

    def before_moe_end_hook(self, args: CallbackArgs) -> torch.Tensor | None:
        return args.tensor.reshape(self._shapes[args.layer])
