# SPDX-License-Identifier: Apache-2.0
"""Describes the parameters that lie in the same tensors of an optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ds_fsmoe.checkpoint_files.pieces import Keys, Piece


@dataclass
class LiveGroup:
    """The parameters that are in the same tensors of an optimizer.

    Attributes:
        names: the names of all parameters in the group, on any rank.
        pieces: the pieces of them that are on this rank.
        master: the tensor that is optimized; ``None``: the parameter itself.
        state: the optimizer's state for it.
        options: the optimizer's settings.
        keys: the keys of the master in the file.
        state_keys: the keys of the states in the file.
    """

    names: tuple[str, ...]
    pieces: tuple[Piece, ...]
    tensor: torch.Tensor
    master: torch.Tensor | None
    state: dict[str, Any]
    options: dict[str, Any]
    keys: Keys
    state_keys: Keys

    def per_element(self) -> dict[str, torch.Tensor]:
        """Return the states that have a number for each element."""
        size = self.tensor.numel()
        found = {name: each for name, each in self.state.items() if torch.is_tensor(each) and each.numel() == size}
        return {name: each for name, each in found.items() if each.dim() > 0}

    def scalars(self) -> dict[str, float]:
        """Return the states that are one number."""
        found = {name: each for name, each in self.state.items() if name not in self.per_element()}
        return {
            name: float(each)
            for name, each in found.items()
            if isinstance(each, (int, float)) or (torch.is_tensor(each) and each.numel() == 1)
        }

    def others(self) -> list[str]:
        """Return the names of all other states, which cannot be interpreted."""
        known = {*self.per_element(), *self.scalars()}
        return [name for name, each in self.state.items() if name not in known and each is not None]
