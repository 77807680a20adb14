# SPDX-License-Identifier: Apache-2.0
"""Counts what routers do: how many tokens each expert gets, how many choices find no place, how sure the router is.

Counts are kept on the device, only in the steps that are asked about, and shared once when such a step is over:
one all-reduce of the same number of values on every rank, whatever each of them has run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from ds_fsmoe.components.gate import entropy_of, in_backward
from ds_fsmoe.components.routing import RoutingBase
from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.telemetry.router_outputs import RouterOutput, probabilities_of

_PLACED, _ASKED, _AUX_LOSS, _CALLS, _ENTROPY, _ENTROPIES = range(6)
"""The counts kept for a layer besides its experts' tokens."""
_NUM_COUNTS = 6

Gate = Callable[..., RoutingBase]


@dataclass(frozen=True)
class LayerLoad:
    """What the router of one layer did in one step, over all ranks and micro batches."""

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
        """The mean number of tokens per expert."""
        return sum(self.tokens_E) / len(self.tokens_E)

    @property
    def most(self) -> float:
        """The number of tokens of the fullest expert."""
        return max(self.tokens_E)

    @property
    def variation(self) -> float:
        """The standard deviation over the mean: 0 in balance, ``sqrt(E - 1)`` with all tokens on one expert."""
        mean = self.mean
        return math.sqrt(sum((each - mean) ** 2 for each in self.tokens_E) / len(self.tokens_E)) / mean if mean else 0.0

    @property
    def dropped_share(self) -> float:
        """The share of choices that were dropped."""
        return self.dropped / self.asked if self.asked else 0.0


@dataclass(frozen=True)
class _Place:
    """The place of a layer's numbers among those of all layers."""

    first: int
    num_experts: int
    num_copies: int
    """The number of ranks that have the same tokens, and each count them."""

    @property
    def stop(self) -> int:
        return self.first + self.num_experts + _NUM_COUNTS


class RouterMetrics:
    """Metrics of the layers of one engine; with pipeline stages, of all stages, and its constructor is collective.

    Args:
        layers: maps each layer's label -> (E, ranks with the same tokens) on this rank, in an order that is the same
            on every rank that runs them.
        device: the device on which they run.
        stage: the stage of this rank; ``None``: there are no stages.
    """

    def __init__(self, layers: Mapping[str, tuple[int, int]], device: torch.device, stage: int | None = None) -> None:
        self._prefix = "" if stage is None else f"stage{stage}/"
        sizes = {self._prefix + label: size for label, size in layers.items()}
        if stage is not None:
            sizes = {name: size for each in on_every_rank(sizes) for name, size in each.items()}
        self._places: dict[str, _Place] = {}
        first = 0
        for name, (num_experts, num_copies) in sorted(sizes.items()):
            self._places[name] = _Place(first, num_experts, num_copies)
            first = self._places[name].stop
        self._counts = torch.zeros(first, dtype=torch.float64, device=device)
        self.is_listening = False
        self.is_paused = False
        """Whether the present forward is not training: a rank without a batch still goes through the layers."""

    def listen(self, gates: Mapping[str, Any]) -> None:
        """Count from now on, until :meth:`read`.

        Args:
            gates: maps a label -> the gate of each layer of this rank.
        """
        self._counts.zero_()
        self._tell(gates, True)

    def _tell(self, gates: Mapping[str, Any], is_listening: bool) -> None:
        self.is_listening = is_listening
        for gate in gates.values():
            if hasattr(gate, "says_entropy"):
                gate.says_entropy = is_listening

    def after(self, gate: Gate, label: str) -> Gate:
        """Return the gate of a layer, with its decisions counted while they are asked about."""
        if not self.is_listening or self.is_paused or in_backward():
            return gate

        def counted(*args: Any) -> RoutingBase:
            routing = gate(*args)
            self._count(routing, self._places[self._prefix + label])
            return routing

        return counted

    def watch(self, output: RouterOutput, experts: torch.nn.Module, label: str) -> RemovableHandle:
        """Count the entropies of a router that is the model's own, in what a module of its returns, from now on and
        while they are asked about.

        Args:
            output: where its logits come out.
            experts: the experts that it decides for.
            label: the label of their layer.

        Returns:
            The handle of the hook on that module.
        """
        place = self._places[self._prefix + label]
        first = place.first + place.num_experts + _ENTROPY

        def count(module: torch.nn.Module, args: Any, returned: Any) -> None:
            if not self.is_listening or self.is_paused or not experts.training or in_backward():
                return
            logits = output.of(returned)
            if logits is None:
                return
            with torch.no_grad():
                entropy = entropy_of(probabilities_of(logits), None).to(self._counts)
                self._counts[first : first + 2] += torch.stack([entropy, entropy.new_ones(())])

        return output.module.register_forward_hook(count)

    @torch.no_grad()
    def _count(self, routing: RoutingBase, place: _Place) -> None:
        own = self._counts[place.first : place.stop]
        if routing.counts_E is None:
            return  # a user's own gate, which does not say
        own[: place.num_experts] += routing.counts_E.to(own)
        others = [*routing.placed(), routing.aux_loss, own.new_ones(())]
        if routing.entropy is not None:
            others += [routing.entropy, own.new_ones(())]
        # A user's gate may give a loss as a number, or as a tensor of one.
        scalars = [torch.as_tensor(0.0 if each is None else each).detach().to(own).sum() for each in others]
        own[place.num_experts :][: len(others)] += torch.stack(scalars)

    def read(self, gates: Mapping[str, Any]) -> dict[str, LayerLoad]:
        """Return the counts by label (``stage1/L00`` where there are stages), and stop counting.
        Collective over all ranks of the job; it waits for the device.

        Args:
            gates: the gates that :meth:`listen` was given.
        """
        self._tell(gates, False)
        with waiting("the counts of routers"):
            if world_size_now() > 1:
                dist.all_reduce(self._counts)
            numbers = self._counts.tolist()
        return {name: _load(numbers[place.first : place.stop], place) for name, place in self._places.items()}


def _load(numbers: list[float], place: _Place) -> LayerLoad:
    tokens_E, others = numbers[: place.num_experts], numbers[place.num_experts :]
    placed, asked = (others[at] / place.num_copies for at in (_PLACED, _ASKED))
    return LayerLoad(
        tokens_E=tuple(each / place.num_copies for each in tokens_E),
        dropped=asked - placed,
        asked=asked,
        aux_loss=others[_AUX_LOSS] / max(1.0, others[_CALLS]),
        entropy=others[_ENTROPY] / others[_ENTROPIES] if others[_ENTROPIES] else None,
    )
