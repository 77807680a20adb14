# SPDX-License-Identifier: Apache-2.0
"""Counts the decisions of routers, finds those of Hugging Face models, and makes numbers of them for DeepSpeed's
monitors.

The engine's telemetry calls it. Counts stay on the device, only in the steps that are reported. They are shared once at
the end of such a step: one all-reduce of the same number of values on every rank, independent of the layers that ran.

A family of Hugging Face declares its recordable outputs:
``_can_record_outputs = {"router_logits": OutputRecorder(ARouter, index=0)}``, or just a class. This module does not
import transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from ds_fsmoe.components.gate import entropy_of, in_backward
from ds_fsmoe.components.routing import RoutingBase
from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.observing.instruments import LayerCall

_DECLARATION, _WORD = "_can_record_outputs", "router_logits"
_INDEX_OF_A_CLASS = 1
"""Which of its outputs is meant where a family names a class and no index."""
_TOLERANCE = 1e-2
"""How far from 1 the sum of probabilities may be, in half precision."""


@dataclass(frozen=True)
class RouterOutput:
    """Describes where a module returns router logits."""

    module: nn.Module
    index: int
    """Which of the module's outputs they are, where it has several."""

    def of(self, output: Any) -> torch.Tensor | None:
        """Return the logits in the output of the module; ``None`` if it has none."""
        if not isinstance(output, (tuple, list)):
            return output
        return output[self.index] if self.index < len(output) else None


def router_outputs(model: nn.Module, experts: Mapping[str, nn.Module]) -> dict[str, RouterOutput]:
    """Return name -> output with the router logits of each experts module, if its family declares it.

    A layer's router is the only declared one in the smallest module around its experts that has any. A module around
    the experts of several layers identifies no router.

    Args:
        model: the whole model.
        experts: the experts modules, by any name.
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
    """Return a router's probabilities, [S, E], of its declared logits, [..., E], without a gradient or a host wait.

    They are the softmax of the logits, unless these are probabilities already, as some families declare.
    """
    logits_SE = logits.detach().reshape(-1, logits.shape[-1]).float()
    is_over = ((logits_SE >= 0).all() & ((logits_SE.sum(dim=1) - 1).abs() < _TOLERANCE).all()).view(1, 1)
    return torch.where(is_over, logits_SE, logits_SE.softmax(dim=1))


def _is_within(name: str, around: str) -> bool:
    return not around or name == around or name.startswith(f"{around}.")


def _declared(model: nn.Module) -> dict[str, RouterOutput]:
    """Return name -> output of every module that the innermost model around it declares as a source of router
    logits."""
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


_PLACED, _ASKED, _AUX_LOSS, _CALLS, _ENTROPY, _ENTROPIES = range(6)
"""The counts kept for a layer besides its experts' tokens."""
_NUM_COUNTS = 6


@dataclass(frozen=True)
class LayerLoad:
    """Holds the counts of one layer's router in one step, over all ranks and micro-batches."""

    tokens_E: tuple[float, ...]
    """[E]: the tokens that chose each expert, before any was dropped."""
    dropped: float
    """The choices that found no place in a full expert; where experts choose, the tokens that no expert took."""
    asked: float
    """The number of all choices."""
    aux_loss: float
    """The mean auxiliary loss over forwards."""
    entropy: float | None
    """The entropy of a token's probabilities, in nats, as a mean over forwards; ``None``: the gate reports none."""

    @property
    def mean(self) -> float:
        """Return the mean number of tokens per expert."""
        return sum(self.tokens_E) / len(self.tokens_E)

    @property
    def most(self) -> float:
        """Return the number of tokens of the fullest expert."""
        return max(self.tokens_E)

    @property
    def variation(self) -> float:
        """Return the standard deviation over the mean: 0 in balance, ``sqrt(E - 1)`` with all tokens on one expert."""
        mean = self.mean
        return math.sqrt(sum((each - mean) ** 2 for each in self.tokens_E) / len(self.tokens_E)) / mean if mean else 0.0

    @property
    def dropped_share(self) -> float:
        """Return the share of choices that were dropped."""
        return self.dropped / self.asked if self.asked else 0.0

    def as_row(self) -> dict[str, Any]:
        """Return its row in the record of a run."""
        return {name: getattr(self, name) for name in ("tokens_E", "dropped_share", "aux_loss", "entropy")}


class RouterMetrics:
    """Counts metrics of the layers of one engine; with pipeline stages, of all stages.

    The constructor is collective with pipeline stages.

    Args:
        layers: label of each layer -> (E, ranks with the same tokens) on this rank, in an order that is the same on
            every rank that runs them.
        device: the device of the layers.
        stage: the stage of this rank; ``None``: there are no stages.
    """

    def __init__(self, layers: Mapping[str, tuple[int, int]], device: torch.device, stage: int | None = None) -> None:
        self._prefix = "" if stage is None else f"stage{stage}/"
        sizes = {self._prefix + label: size for label, size in layers.items()}
        if stage is not None:
            sizes = {name: size for each in on_every_rank(sizes) for name, size in each.items()}
        self._sizes = dict(sorted(sizes.items()))
        self._lengths = [num_experts + _NUM_COUNTS for num_experts, _ in self._sizes.values()]
        self._counts = torch.zeros(sum(self._lengths), dtype=torch.float64, device=device)
        self._own = dict(zip(self._sizes, self._counts.split(self._lengths), strict=True))
        """Label -> the counts of a layer, among those of all."""
        self.is_listening = False
        self.is_paused = False
        """Whether the present forward is not training: a rank without a batch still goes through the layers."""

    def listen(self, gates: Mapping[str, Any]) -> None:
        """Count the routers' choices from 0 until :meth:`read`.

        Args:
            gates: label -> gate of each layer of this rank.
        """
        self._counts.zero_()
        self._set_listening(gates, True)

    def _set_listening(self, gates: Mapping[str, Any], is_listening: bool) -> None:
        self.is_listening = is_listening
        for gate in gates.values():
            if hasattr(gate, "says_entropy"):
                gate.says_entropy = is_listening

    def watch_call(self, call: LayerCall) -> None:
        """Count the decisions of a call in training, while counting is on: an instrument."""
        if call.is_training and self.is_listening and not self.is_paused and not in_backward():
            call.add_routing_callback(partial(self._count, self._own[self._prefix + call.label]))

    def watch(self, output: RouterOutput, experts: torch.nn.Module, label: str) -> RemovableHandle:
        """Count the entropies of the model's own router from the output of a module, from now on while counting is on.

        Args:
            output: the output that has its logits.
            experts: the experts of the router.
            label: the label of the layer.

        Returns:
            The handle of the hook on that module.
        """
        own = self._own[self._prefix + label][_ENTROPY - _NUM_COUNTS :]

        def count(module: torch.nn.Module, args: Any, returned: Any) -> None:
            if not self.is_listening or self.is_paused or not experts.training or in_backward():
                return
            logits = output.of(returned)
            if logits is None:
                return
            with torch.no_grad():
                entropy = entropy_of(probabilities_of(logits), None).to(self._counts)
                own.add_(torch.stack([entropy, entropy.new_ones(())]))

        return output.module.register_forward_hook(count)

    @torch.no_grad()
    def _count(self, own: torch.Tensor, routing: RoutingBase) -> None:
        if routing.counts_E is None:
            return  # a user's own gate, which does not say
        own[:-_NUM_COUNTS] += routing.counts_E.to(own)
        others = [*routing.placed(), routing.aux_loss, own.new_ones(())]
        if routing.entropy is not None:
            others += [routing.entropy, own.new_ones(())]
        # A user's gate may give a loss as a number, or as a tensor of one.
        scalars = [torch.as_tensor(0.0 if each is None else each).detach().to(own).sum() for each in others]
        own[-_NUM_COUNTS:][: len(others)] += torch.stack(scalars)

    def read(self, gates: Mapping[str, Any]) -> dict[str, LayerLoad]:
        """Return the counts by label (``stage1/L00`` where there are stages), and stop counting. Collective over all
        ranks of the job; it waits for the device.

        Args:
            gates: the gates passed to :meth:`listen`.
        """
        self._set_listening(gates, False)
        with waiting("the counts of routers"):
            if world_size_now() > 1:
                dist.all_reduce(self._counts)
            numbers = self._counts.cpu().split(self._lengths)
        return {
            name: _load(own.tolist(), num_copies)
            for own, (name, (_, num_copies)) in zip(numbers, self._sizes.items(), strict=True)
        }


def _load(numbers: list[float], num_copies: int) -> LayerLoad:
    tokens_E, others = numbers[:-_NUM_COUNTS], numbers[-_NUM_COUNTS:]
    placed, asked = (others[at] / num_copies for at in (_PLACED, _ASKED))
    return LayerLoad(
        tokens_E=tuple(each / num_copies for each in tokens_E),
        dropped=asked - placed,
        asked=asked,
        aux_loss=others[_AUX_LOSS] / max(1.0, others[_CALLS]),
        entropy=others[_ENTROPY] / others[_ENTROPIES] if others[_ENTROPIES] else None,
    )


Event = tuple[str, float, int]
"""An event: (name, value, samples trained with)."""


def of_routers(loads: Mapping[str, LayerLoad], is_detailed: bool) -> dict[str, float]:
    """Return the numbers of routers over all layers, and those of each layer if ``is_detailed``.

    ``expert_tokens_mean`` is over all experts of all layers, ``expert_tokens_max`` the fullest of them,
    ``expert_tokens_cv`` the mean over layers of standard deviation over mean, ``dropped_share`` is of all choices,
    ``aux_loss`` the sum over layers, ``router_entropy`` (nats) the mean over the layers whose gates report it.
    """
    if not loads:
        return {}
    layers = list(loads.values())
    found = {
        "expert_tokens_mean": sum(each.mean for each in layers) / len(layers),
        "expert_tokens_max": max(each.most for each in layers),
        "expert_tokens_cv": sum(each.variation for each in layers) / len(layers),
        "dropped_share": sum(each.dropped for each in layers) / max(1.0, sum(each.asked for each in layers)),
        "aux_loss": sum(each.aux_loss for each in layers),
    }
    entropies = [each.entropy for each in layers if each.entropy is not None]
    if entropies:
        found["router_entropy"] = sum(entropies) / len(entropies)
    if is_detailed:
        for name, load in loads.items():
            found |= {f"{name}/{what}": value for what, value in of_routers({name: load}, False).items()}
    return found


def of_placement(rows: Sequence[Mapping[str, Any]], is_detailed: bool) -> dict[str, float]:
    """Return the numbers of one decision on expert placement, and those of each layer if ``is_detailed``.

    ``balance`` is the rows of the fullest rank over the mean, in the layer where it is highest. ``expected_balance`` is
    the same after the decision. ``moved`` is the number of exchanges of two experts. ``gain_ms`` is the predicted
    decrease of the step time; it is left out if times are unknown. Both are sums over layers.

    Args:
        rows: a row of the record for each layer.
        is_detailed: include each layer's own.
    """
    if not rows:
        return {}
    found = {
        "placement/balance": max(row["balance"] for row in rows),
        "placement/expected_balance": max(row["expected_balance"] for row in rows),
        "placement/moved": sum(row["num_swaps"] for row in rows),
    }
    gains_ms = [row["gain_ms"] for row in rows if row["gain_ms"] is not None]
    if gains_ms:
        found["placement/gain_ms"] = sum(gains_ms)
    if is_detailed:
        for row in rows:
            found |= {f"{row['layer']}/{what}": value for what, value in of_placement([row], False).items()}
    return found


def named(values: Mapping[str, float], num_samples: int) -> list[Event]:
    """Return values as events, with ``fsmoe/`` before each name."""
    return [(f"fsmoe/{name}", float(value), num_samples) for name, value in values.items()]
