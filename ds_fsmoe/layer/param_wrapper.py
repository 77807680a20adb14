# SPDX-License-Identifier: Apache-2.0
"""Stands before PEFT's wrapper around a parameter of experts, which on each rank has the adapters of its own experts.

PEFT makes a weight with its adapters' change added, anew in each call. Here the experts beneath are told of the
adapters instead, and add what they give to rows: see ``components/expert_compute/adapters.py``.
"""

from __future__ import annotations

from typing import Any

import torch

from ds_fsmoe.checkpoint_files.expert_parts import part_of
from ds_fsmoe.components.expert_compute.adapters import Adapter
from ds_fsmoe.components.expert_compute.contract import shape_of
from ds_fsmoe.layer.experts_layer import FSMoEExperts
from ds_fsmoe.layer.opaque import Handle, OpaqueModule
from ds_fsmoe.layer.parts import LayerError


class FSMoEParamWrapper(OpaqueModule):
    """Goes before PEFT's class, and replaces its forward. Made by conversion, never constructed."""

    opaque: Handle | None = None

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return what the experts beneath give with the active adapters; arguments are those of the experts.

        Raises:
            ValueError: what PEFT's own wrapper does not take, such as other adapters for each sample.
            LayerError: an adapter was added after the model had been given to ``initialize``.
        """
        self._check_forward_args(x, *args, **kwargs)
        kwargs.pop("adapter_names", None)
        if self.disable_adapters and self.merged:
            self.unmerge()
        if self.disable_adapters or self.merged:
            return self.base_layer(x, *args, **kwargs)
        active = [self.adapter(name) for name in self.active_adapters if name in self.lora_A]
        with self.experts_beneath.adapted(active):
            return self.base_layer(x, *args, **kwargs)

    @property
    def experts_beneath(self) -> FSMoEExperts:
        """Return the experts that are wrapped."""
        return self.get_base_layer()

    def adapter(self, name: str) -> Adapter:
        """Return an adapter, with the A and B of this rank's experts.

        Args:
            name: PEFT's name of it.

        Raises:
            LayerError: it was added after the model had been given to ``initialize``.
        """
        experts = self.experts_beneath
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        if part_of(a) is None or part_of(b) is None:
            raise LayerError(
                f"{experts.fsmoe.path}: adapter {name!r} of {self.parameter_name} was added after initialize(): its "
                "parameters are not in the optimizer; add it before"
            )
        # Within GatheredParameters they have all experts.
        num_experts = (shape_of(a) or (0,))[0] // self.r[name]
        return Adapter(self.parameter_name, a, b, self.scaling[name], num_experts)

    def get_delta_weight(self, adapter_name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return what an adapter adds to this rank's part of the weight; within ``deepspeed.zero.GatheredParameters``,
        as has to be at ZeRO 3, to the whole weight."""
        weight, contract = self.get_param(), self.experts_beneath.fsmoe.contract
        assert contract is not None
        return self.adapter(adapter_name).delta(contract.is_transposed).to(weight.device, weight.dtype)
