# SPDX-License-Identifier: Apache-2.0
"""The contract by which transformers' models store a layer's experts: one module, one tensor of each kind of weight.

Such a module is called as ``experts(hidden_states, top_k_index, top_k_weights)``, and declares the layout of its
weights by flags (``transformers.integrations.use_experts_implementation``). The engine checks modules here before it
converts them. This module imports nothing of transformers.

Letters: E experts, M width of a token, H width of an expert, F = 2 * H where experts are gated, else H.
"""

from __future__ import annotations

import functools
import math
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from torch import nn

OWN_NAMES = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")
"""All names of weights in the contract."""


class ContractError(ValueError):
    """Reports a module that declares the contract and does not follow it."""


@dataclass(frozen=True)
class Contract:
    """Describes the layout of the weights that a module of experts declares."""

    has_bias: bool
    is_transposed: bool
    """Whether a weight is [E, in, out] instead of [E, out, in]."""
    # Flags that earlier releases of transformers 5 lack; the defaults are their behaviour.
    has_gate: bool = True
    """Whether the first product returns gate and value, ``gate_up_proj``, or the value alone, ``up_proj``."""
    is_concatenated: bool = True
    """True: gate and value are concatenated. False: they are interleaved."""
    has_post_expert_norm: bool = False
    adds_down_bias: bool = True
    """Whether the second bias is added; of an expert's shards only the first adds it."""

    @functools.cached_property
    def up(self) -> str:
        """Return the name of the first weight, [E, F, M], or [E, M, F] where it is transposed."""
        return "gate_up_proj" if self.has_gate else "up_proj"

    down = "down_proj"
    """The name of the second weight, [E, M, H], or [E, H, M] where it is transposed."""

    @functools.cached_property
    def weights(self) -> tuple[str, ...]:
        """Return the names of all tensors whose first dimension is the experts."""
        names = self.up, self.down
        return (*names, *(f"{each}_bias" for each in names)) if self.has_bias else names


def follows_contract(module: nn.Module) -> bool:
    """Return True if a module is the experts of a layer by the contract."""
    said = (each.name for each in fields(Contract) if each.default is MISSING)
    return hasattr(type(module), "_apply_gate") and all(hasattr(module, each) for each in said)


def contract_of(module: nn.Module) -> Contract:
    """Return a module's declaration of its weights, checked against their shapes.

    Raises:
        ContractError: the weights do not match the declaration.
    """
    said = {each.name: getattr(module, each.name, each.default) for each in fields(Contract)}
    found = Contract(**{name: bool(value) for name, value in said.items()})
    shapes = {name: shape_of(getattr(module, name, None)) for name in found.weights}
    missing = [name for name, shape in shapes.items() if shape is None]
    if missing:
        raise ContractError(f"has no {' and no '.join(missing)}")
    own = {name for name, _ in module.named_parameters(recurse=False)}
    if unknown := sorted(own - set(found.weights)):
        kind = "more weights than known" if set(unknown) <= set(OWN_NAMES) else "weights that are not known"
        raise ContractError(f"has {kind}: {', '.join(unknown)}")
    sizes = _sizes(found, shapes[found.up])
    if sizes is None or shapes != _expected(found, *sizes):
        said = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items() if shape is not None)
        raise ContractError(f"has weights whose shapes do not match its flags: {said}")
    if (num_experts := getattr(module, "num_experts", sizes[0])) != sizes[0]:
        raise ContractError(f"declares {num_experts} experts, but its weights have {sizes[0]}")
    if not found.has_gate and not callable(getattr(module, "act_fn", None)):
        raise ContractError("has no act_fn")
    if found.has_post_expert_norm and not callable(getattr(module, "post_expert_norm", None)):
        raise ContractError("has no post_expert_norm")
    return found


def shape_of(weight: Any) -> tuple[int, ...] | None:
    """Return the whole shape of a parameter, also where ZeRO 3 partitions it; ``None`` for an object that is no
    tensor."""
    shape = getattr(weight, "ds_shape", getattr(weight, "shape", None))
    return None if shape is None else tuple(shape)


def numel_of(weight: torch.Tensor) -> int:
    """Return the number of elements of a whole parameter."""
    return math.prod(shape_of(weight) or (0,))


def _sizes(contract: Contract, up: tuple[int, ...] | None) -> tuple[int, int, int] | None:
    """Return (E, M, H) by the shape of the first weight; ``None`` if it cannot be such a weight."""
    if up is None or len(up) != 3:
        return None
    width, hidden = (up[1], up[2]) if contract.is_transposed else (up[2], up[1])
    if contract.has_gate:
        if hidden % 2:
            return None
        hidden //= 2
    return up[0], width, hidden


def _expected(contract: Contract, num_experts: int, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    outs = (2 * hidden if contract.has_gate else hidden), width
    ins = width, hidden
    found: dict[str, tuple[int, ...]] = {}
    for name, size_in, size_out in zip((contract.up, contract.down), ins, outs, strict=True):
        found[name] = (num_experts, *((size_in, size_out) if contract.is_transposed else (size_out, size_in)))
        if contract.has_bias:
            found[f"{name}_bias"] = (num_experts, size_out)
    return {name: found[name] for name in contract.weights}
