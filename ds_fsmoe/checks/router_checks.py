# SPDX-License-Identifier: Apache-2.0
"""Stops all ranks when nan or infinity enters a router (``fsmoe.debug.check_router``), and names its origin.

The engine's state attaches it. A router chooses for such a token as for any other. The number then spreads over the
ranks with the experts' results, without an error. A rank that stopped alone would leave the others waiting in their
next all-to-all, so all of them check together.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ds_fsmoe.components.gate import in_backward
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.observing.instruments import LayerCall

_MOST_RANKS = 8  # that a message names


class RouterInputError(RuntimeError):
    """Says that a router received nan or infinity. The message, the same on all ranks, names layer, step and ranks."""


class RouterCheck:
    """Checks the layers of one engine. The cost in each layer is a wait for the device and an all-gather of one number.

    Args:
        group: the ranks that run the same layers; ``None``: all.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.step = 0
        """The optimizer step that is under way."""

    def watch(self, call: LayerCall) -> None:
        """Check the input of a layer's gate before the gate runs, in training forwards, which all ranks run
        together."""
        if not call.is_training:
            return
        gate = call.gate

        def checked(x_SM: torch.Tensor, *args: Any) -> Any:
            if not in_backward():
                self.check(x_SM, call.path)
            return gate(x_SM, *args)

        call.gate = checked

    def check(self, x_SM: torch.Tensor, path: str) -> None:
        """Check tokens for nan and infinity. Collective.

        Raises:
            RouterInputError: raised on every rank, if one of them has such a number.
        """
        is_bad_S = ~torch.isfinite(x_SM.detach()).all(dim=1)
        counts = [is_bad_S.sum()]
        if world_size_now() > 1:
            counts = [torch.zeros_like(counts[0]) for _ in range(dist.get_world_size(self._group))]
            with waiting("the check of the router's input of", path):
                dist.all_gather(counts, is_bad_S.sum(), group=self._group)
        tokens_of = {place: tokens for place, tokens in enumerate(torch.stack(counts).tolist()) if tokens}
        if not tokens_of:
            return
        ranks = range(len(counts)) if self._group is None else dist.get_process_group_ranks(self._group)
        parts = [f"rank {ranks[place]} ({tokens} tokens)" for place, tokens in list(tokens_of.items())[:_MOST_RANKS]]
        if len(tokens_of) > _MOST_RANKS:
            parts.append(f"{len(tokens_of) - _MOST_RANKS} more ranks")
        raise RouterInputError(
            f"{path}, step {self.step}: nan or infinity in the router's input on {', '.join(parts)}; check the "
            "layers before this one, the loss scale and the learning rate"
        )
