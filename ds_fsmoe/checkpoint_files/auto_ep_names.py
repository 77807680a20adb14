# SPDX-License-Identifier: Apache-2.0
"""Reads the weights of a checkpoint that DeepSpeed's AutoEP has saved, under the names of the Hugging Face model.

AutoEP puts a layer of its own in the place of an MoE block. Each expert has a file, with ``w1`` (gate), ``w3`` (value)
and ``w2`` (down); the router is ``router.gate``, and once more under the name that the block had for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

LAYERS = "ds_autoep_layers"
"""Where AutoEP's file of weights describes its layers."""
_ROUTER, _GATE = "router.", "gate."


class AutoEPNames:
    """Knows what AutoEP calls the parameters of a model.

    Args:
        main: what the file of weights holds.
        expert: returns what the file of an expert holds, by the number of its layer and its own.
    """

    def __init__(self, main: Mapping[str, Any], expert: Callable[[int, int], Mapping[str, torch.Tensor]]) -> None:
        self._weights: Mapping[str, torch.Tensor] = main["module"]
        self._expert = expert
        self._stacked: dict[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {}
        self._renamed = {name: name for name in self._weights}
        for layer in main[LAYERS]:
            prefix = str(layer["expert_key_prefix"])
            self._stacked[f"{prefix}.gate_up_proj"] = layer, ("w1", "w3")
            self._stacked[f"{prefix}.down_proj"] = layer, ("w2",)
            self._rename(f"{layer['module_path']}.")

    def _rename(self, path: str) -> None:
        """Give what is around the experts of a layer the names that the model has for it."""
        inner = {name.removeprefix(path): name for name in self._renamed if name.startswith(path)}
        # The same router by its own name, "gate" for example.
        aliases = {name.partition(".")[0] for name in inner if f".{_GATE}" in name and not name.startswith(_ROUTER)}
        for short, name in inner.items():
            first, _, rest = short.partition(".")
            if aliases and short.startswith(_ROUTER):
                del self._renamed[name]
            elif first in aliases or short.startswith(_ROUTER):
                del self._renamed[name]
                self._renamed[f"{path}{first}.{rest.removeprefix(_GATE)}"] = name

    def __iter__(self) -> Iterator[str]:
        yield from self._renamed
        yield from self._stacked

    def num_experts(self) -> dict[str, int]:
        """Return name -> number of experts, of every parameter of experts."""
        return {name: int(layer["num_experts"]) for name, (layer, _) in self._stacked.items()}

    def weights(self, name: str, number: int | None = None) -> torch.Tensor:
        """Return a parameter, or buffer, of the model.

        Args:
            name: its name in the model.
            number: that of an expert, of whose weights alone a tensor [1, ...] is returned.

        Raises:
            KeyError: there is no such parameter.
        """
        if number is None:
            return self._weights[self._renamed[name]]
        layer, kinds = self._stacked[name]
        prefix, file = layer["expert_key_prefix"], self._expert(int(layer["moe_layer_id"]), number)
        return torch.cat([file[f"{prefix}.{kind}.{number}"] for kind in kinds]).unsqueeze(0)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole shape of a parameter, without making it."""
        if name not in self._stacked:
            return tuple(self._weights[self._renamed[name]].shape)
        layer, kinds = self._stacked[name]
        prefix, file = layer["expert_key_prefix"], self._expert(int(layer["moe_layer_id"]), 0)
        matrices = [file[f"{prefix}.{kind}.0"] for kind in kinds]
        return int(layer["num_experts"]), sum(each.shape[0] for each in matrices), *matrices[0].shape[1:]
