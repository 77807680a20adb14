# SPDX-License-Identifier: Apache-2.0
"""The paper's six hooks: user code may read or replace the tokens on their way through a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ds_fsmoe.components.routing import RoutingBase


@dataclass(frozen=True)
class CallbackArgs:
    """The arguments of a hook.

    Args:
        tensor: the data at this point of the way, in the shape that each hook of :class:`CallbackBase` says.
        routing: the gate's decision; ``None`` before the gate has run.
        direction: ``"forward"``, with tokens, or ``"backward"``, with gradients.
        layer: the name of the layer in its model.
        chunk: which chunk ``tensor`` is: of the tokens where rows travel, of the capacity where slots do.

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
    """Six hooks, all of which do nothing here. Each returns a tensor to go on with, or ``None`` to change nothing.

    The first and the last are called once per forward, under autograd. The four between them are called for each chunk
    on the chunk's lane, in the forward with tokens and in the backward with gradients, in the same order of travel:
    dispatch is the way to the experts, combine the way back. They are not under autograd, so a hook that is no
    identity has to do in one direction what is the adjoint of what it does in the other.

    The four are given slots, [E, c, M], or, where rows travel instead (docs/rows.md), as many as there are, [rows, M].
    A tensor with another number of rows is refused then: the other ranks know how many come.

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
        """Before the gate: the layer's input [..., M]. The result may have other leading dimensions."""

    def before_dispatch_hook(self, args: CallbackArgs) -> torch.Tensor | None:
        """Before the first all-to-all: [E, c, M] or [rows, M], contiguous. Another type or width travels as it is."""

    def after_dispatch_hook(self, args: CallbackArgs) -> torch.Tensor | None:
        """After the first all-to-all: [E, c, M] or [rows, M], for this rank's experts from every rank."""

    def before_combine_hook(self, args: CallbackArgs) -> torch.Tensor | None:
        """After the experts, before the second all-to-all: [E, c, M] or [rows, M]."""

    def after_combine_hook(self, args: CallbackArgs) -> torch.Tensor | None:
        """After the second all-to-all: [E, c, M] or [rows, M], this rank's rows from every expert."""

    def before_moe_end_hook(self, args: CallbackArgs) -> torch.Tensor | None:
        """The layer's output, in the shape ``before_moe_start_hook`` left."""
