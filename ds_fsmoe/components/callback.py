# SPDX-License-Identifier: Apache-2.0
"""The paper's six hooks: where user code may look at, or replace, what travels through a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_fsmoe.components.routing import Routing


@dataclass(frozen=True)
class CallbackArgs:
    """What a hook is given."""

    tensor: torch.Tensor
    """The data at this point of the way; each hook says its shape."""
    routing: Routing | None
    """The gate's decision; ``None`` before the gate has run."""


class CallbackBase:
    """Six hooks, all of which do nothing here. Each returns a tensor to go on with, or ``None`` to change nothing.

    Hooks run under autograd, so what they do to the tensor has its gradient.
    """

    def before_moe_start_hook(self, args: CallbackArgs) -> torch.Tensor | None:
        """Before the gate: the layer's input [..., M]. What is returned may have other leading dimensions."""

    def before_dispatch_hook(self, args: CallbackArgs) -> torch.Tensor | None:
        """Before the first all-to-all: [E, C, M]."""

    def after_dispatch_hook(self, args: CallbackArgs) -> torch.Tensor | None:
        """After the first all-to-all: [E, C, M], rows of this rank's experts from every rank."""

    def before_combine_hook(self, args: CallbackArgs) -> torch.Tensor | None:
        """After the experts, before the second all-to-all: [E, C, M]."""

    def after_combine_hook(self, args: CallbackArgs) -> torch.Tensor | None:
        """After the second all-to-all: [E, C, M], this rank's rows from every expert."""

    def before_moe_end_hook(self, args: CallbackArgs) -> torch.Tensor | None:
        """The layer's output, in the shape ``before_moe_start_hook`` left."""
