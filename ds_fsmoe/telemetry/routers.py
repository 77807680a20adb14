# SPDX-License-Identifier: Apache-2.0
"""What routers do: how many tokens each expert gets, how many choices find no place, how sure the router is.

Counted on the device, in the steps that somebody asks about and in no others, and shared once when such a step is over:
one all-reduce of as many numbers on every rank, whatever each of them has run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ds_fsmoe.components.gate import in_backward
from ds_fsmoe.components.routing import RoutingBase
from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.distributed.topology import world_size_now

_PLACED, _ASKED, _AUX_LOSS, _CALLS, _ENTROPY, _ENTROPIES = range(6)
"""What is counted of a layer besides its experts' tokens."""
_NUM_COUNTS = 6

Gate = Callable[..., RoutingBase]


@dataclass(frozen=True)
class LayerLoad:
    """What the router of one layer did in one step, over all ranks and micro batches."""

    tokens_E: tuple[float, ...]
    """[E]: tokens that chose each expert, before any was dropped."""
    dropped: float
    """Choices that found no place in a full expert; where experts choose, tokens that none of them took."""
    asked: float
    """Of how many."""
    aux_loss: float
    """As a mean over forwards."""
    entropy: float | None
    """Of a token's probabilities, in nats, as a mean over forwards; ``None``: the gate does not say."""

    @property
    def mean(self) -> float:
        """Tokens per expert."""
        return sum(self.tokens_E) / len(self.tokens_E)

    @property
    def most(self) -> float:
        """Tokens of the fullest expert."""
        return max(self.tokens_E)

    @property
    def variation(self) -> float:
        """Standard deviation over mean: 0 in balance, ``sqrt(E - 1)`` with all tokens on one expert."""
        mean = self.mean
        return math.sqrt(sum((each - mean) ** 2 for each in self.tokens_E) / len(self.tokens_E)) / mean if mean else 0.0

    @property
    def dropped_share(self) -> float:
        """Of the choices."""
        return self.dropped / self.asked if self.asked else 0.0


@dataclass(frozen=True)
class _Place:
    """Of a layer's numbers among those of all."""

    first: int
    num_experts: int
    num_copies: int
    """Ranks that have the same tokens, and count each of them."""

    @property
    def stop(self) -> int:
        return self.first + self.num_experts + _NUM_COUNTS


class RouterMetrics:
    """Of the layers of one engine; with stages of a pipeline, of all of them. Collective to make there.

    Args:
        layers: label -> (E, ranks that have the same tokens) of each layer of this rank, in an order that is the same
            on every rank that runs them.
        device: on which they run.
        stage: of this rank; ``None``: there are no stages.
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
        """Whether what happens now is no training: a rank without a batch goes through the layers all the same."""

    def listen(self, gates: Mapping[str, Any]) -> None:
        """Count from here on, until :meth:`read`.

        Args:
            gates: label -> gate of each layer of this rank.
        """
        self._counts.zero_()
        self._tell(gates, True)

    def _tell(self, gates: Mapping[str, Any], is_listening: bool) -> None:
        self.is_listening = is_listening
        for gate in gates.values():
            if hasattr(gate, "says_entropy"):
                gate.says_entropy = is_listening

    def after(self, gate: Gate, label: str) -> Gate:
        """The gate of a layer, its decisions counted where they are asked about."""
        if not self.is_listening or self.is_paused or in_backward():
            return gate

        def counted(*args: Any) -> RoutingBase:
            routing = gate(*args)
            self._count(routing, self._places[self._prefix + label])
            return routing

        return counted

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
        """What has been counted, by label (``stage1/L00`` where there are stages), and no counting from here on.
        Collective over all ranks of the job; it waits for the device.

        Args:
            gates: as :meth:`listen` was given them.
        """
        self._tell(gates, False)
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
