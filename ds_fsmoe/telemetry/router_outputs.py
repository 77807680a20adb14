# SPDX-License-Identifier: Apache-2.0
"""Finds which module of a Hugging Face model gives a layer's router logits, as the family itself declares it.

A family says what may be recorded of it: ``_can_record_outputs = {"router_logits": OutputRecorder(ARouter, index=0)}``,
or just a class. Nothing of transformers is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_DECLARATION, _WORD = "_can_record_outputs", "router_logits"
_INDEX_OF_A_CLASS = 1
"""Which of its outputs is meant where a family names a class and no index."""
_TOLERANCE = 1e-2
"""How far from 1 the sum of probabilities may be, in half precision."""


@dataclass(frozen=True)
class RouterOutput:
    """Says where router logits come out."""

    module: nn.Module
    index: int
    """Which of the module's outputs they are, where it has several."""

    def of(self, output: Any) -> torch.Tensor | None:
        """Return the logits among what the module has returned, ``None`` where it gave none."""
        if not isinstance(output, (tuple, list)):
            return output
        return output[self.index] if self.index < len(output) else None


def router_outputs(model: nn.Module, experts: Mapping[str, nn.Module]) -> dict[str, RouterOutput]:
    """Return name -> where the router logits of each module of experts come out, as far as its family declares it.

    A layer's router is the only declared one in the smallest module around its experts that has any; a module around
    the experts of several layers says nothing of either.

    Args:
        model: the whole model.
        experts: the modules of experts, by a name of one's choice.
    """
    names = {id(module): name for name, module in model.named_modules()}
    declared = _declared(model)
    paths = {label: names[id(module)] for label, module in experts.items() if id(module) in names}
    found = {}
    for label, path in paths.items():
        around = path
        while around and label not in found:
            around = around.rpartition(".")[0]
            if any(_is_within(other, around) for other in paths.values() if other != path):
                break
            routers = [output for name, output in declared.items() if _is_within(name, around)]
            if len(routers) > 1:
                break
            if routers:
                found[label] = routers[0]
    return found


def probabilities_of(logits: torch.Tensor) -> torch.Tensor:
    """Return a router's probabilities [S, E] of its declared logits [..., E], without a gradient or a host wait: their
    softmax, unless they are probabilities already, which is what some families declare."""
    logits_SE = logits.detach().reshape(-1, logits.shape[-1]).float()
    is_over = ((logits_SE >= 0).all() & ((logits_SE.sum(dim=1) - 1).abs() < _TOLERANCE).all()).view(1, 1)
    return torch.where(is_over, logits_SE, logits_SE.softmax(dim=1))


def _is_within(name: str, around: str) -> bool:
    return not around or name == around or name.startswith(f"{around}.")


def _declared(model: nn.Module) -> dict[str, RouterOutput]:
    """Return name -> output of every module that the innermost model around it declares to give router logits."""
    rules: dict[str, list[Any]] = {}
    found = {}
    for name, module in model.named_modules():
        own = getattr(type(module), _DECLARATION, None)
        parent = rules.get(name.rpartition(".")[0], []) if name else []
        rules[name] = _rules(own) if isinstance(own, Mapping) else parent
        for rule in rules[name]:
            if (output := _by_rule(rule, name, module)) is not None:
                found[name] = output
    return found


def _rules(declaration: Mapping[str, Any]) -> list[Any]:
    said = declaration.get(_WORD, [])
    return list(said) if isinstance(said, (list, tuple)) else [said]


def _by_rule(rule: Any, name: str, module: nn.Module) -> RouterOutput | None:
    if isinstance(rule, type):
        return RouterOutput(module, _INDEX_OF_A_CLASS) if isinstance(module, rule) else None
    target, ending = getattr(rule, "target_class", None), rule if isinstance(rule, str) else rule.class_name
    is_meant = target is not None and isinstance(module, target)
    is_meant = is_meant or (ending is not None and name.endswith(ending))
    within = getattr(rule, "layer_name", None)
    if within is not None and f".{within.strip('.')}." not in f".{name}.":
        return None
    return RouterOutput(module, getattr(rule, "index", _INDEX_OF_A_CLASS)) if is_meant else None
