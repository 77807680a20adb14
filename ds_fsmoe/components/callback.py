# SPDX-License-Identifier: Apache-2.0
"""Defines the paper's six hooks, by which user code reads or replaces tokens between the stages of a layer.

A layer calls them in forward and backward; ``hooks`` holds the hooks of the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ds_fsmoe.components.routing import RoutingBase


@dataclass(frozen=True)
class CallbackArgs:
    """Holds the arguments of a hook.

    Args:
        tensor: the data at this stage; its shape is documented at each hook of :class:`CallbackBase`.
        routing: the gate's decision; ``None`` before the gate has run.
        direction: ``"forward"``, with tokens, or ``"backward"``, with gradients.
        layer: the name of the layer in its model.
        chunk: the number of the chunk: of the tokens in unpadded dispatch, of the capacity in padded dispatch.

    Examples:
        >>> import torch, ds_fsmoe
        >>> args = ds_fsmoe.CallbackArgs(torch.ones(4, 2, 8), routing=None, layer="blocks.0.moe", chunk=1)
        >>> args.direction, args.tensor.shape
        ('forward', torch.Size([4, 2, 8]))
    """

    tensor: torch.Tensor
    routing: RoutingBase | None
    direction: Literal["forward", "backward"] = "forward"
    layer: str = ""
    chunk: int = 0


class CallbackBase:
    """Defines six hooks, each of which does nothing here. A hook returns a replacement tensor, or ``None`` to change
    nothing.

    The first and the last hook are called once per forward, under autograd. The four between them are called for each
    chunk on the chunk's lane: in the forward with tokens, in the backward with gradients. Their order is the same in
    both directions: dispatch goes to the experts, combine returns. They are not under autograd, so a hook that changes
    values must apply its adjoint in the other direction.

    The four receive slots, [E, c, M], or in unpadded dispatch (docs/dispatch.md) rows, [rows, M]. A result with another
    number of rows is refused, since the other ranks have the old number.

    Examples:
        >>> import torch, ds_fsmoe
        >>> class Shapes(ds_fsmoe.CallbackBase):
        ...     def before_dispatch_hook(self, args):
        ...         print(args.direction, args.chunk, list(args.tensor.shape))
        >>> layer = ds_fsmoe.MOELayer(
        ...     ds_fsmoe.SwitchGate(capacity_factor=2.0), ds_fsmoe.SimpleOrder(), model_dim=8, num_experts=4,
        ...     expert_dim=16, callbacks=[Shapes()], pipeline_degree=2, overlap=False,
        ... )
        >>> y = layer(torch.randn(16, 8))  # 8 slots for each of 4 experts, in two chunks
        forward 0 [4, 4, 8]
        forward 1 [4, 4, 8]
    """

    def before_moe_start_hook(self, args: CallbackArgs) -> torch.Tensor | None:
        """Read or replace the layer's input [..., M], ahead of the gate. The result may have other leading
        dimensions."""

    def before_dispatch_hook(self, args: CallbackArgs) -> torch.Tensor | None:
        """Read or replace [E, c, M] or [rows, M], contiguous, ahead of the first all-to-all.

        A result of another dtype or width is sent as it is.
        """

    def after_dispatch_hook(self, args: CallbackArgs) -> torch.Tensor | None:
        """Read or replace the rows for this rank's experts after the first all-to-all: [E, c, M] or [rows, M]."""

    def before_combine_hook(self, args: CallbackArgs) -> torch.Tensor | None:
        """Read or replace the experts' results ahead of the second all-to-all: [E, c, M] or [rows, M]."""

    def after_combine_hook(self, args: CallbackArgs) -> torch.Tensor | None:
        """Read or replace the results of this rank's tokens after the second all-to-all: [E, c, M] or [rows, M]."""

    def before_moe_end_hook(self, args: CallbackArgs) -> torch.Tensor | None:
        """Read or replace the layer's output, in the shape that ``before_moe_start_hook`` returned."""
