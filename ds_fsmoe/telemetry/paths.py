# SPDX-License-Identifier: Apache-2.0
"""Counts, concurrently with training, the experts that the tokens of each path choose: for Lina's inference scheduler.

The engine's state attaches it; ``ds_fsmoe.inference`` reads the profiles. A token's path is its first choices in the
layers before, see :class:`~ds_fsmoe.planning.lina.popularity.PathProfile`. Counting costs the host milliseconds for
each layer, so only a sample is counted: some tokens of one forward in many. Their choices are copied to the host
without waiting, and counted there when the next forward begins.

Letters: S tokens, K choices of a token, L layers of a path, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from ds_fsmoe.components.gate import in_backward
from ds_fsmoe.components.routing import Routing, RoutingBase
from ds_fsmoe.execution.device_tables import HostCopy
from ds_fsmoe.observing.instruments import LayerCall
from ds_fsmoe.planning.lina.popularity import PathProfile

STATE_FORMAT = 1
"""The version of what :meth:`PathProfiler.as_state` returns."""
EVERY = 16
"""The forwards from one that is counted to the next, unless said otherwise."""
MOST_TOKENS = 4096
"""The most tokens of a forward that are counted, unless said otherwise."""


class TokenPaths:
    """Keeps the first choices of the tokens of one forward, layer by layer.

    Args:
        labels: the labels of the layers, in the order of their calls.
        path_length: L.
    """

    def __init__(self, labels: Iterable[str], path_length: int) -> None:
        self._numbers = {label: number for number, label in enumerate(labels)}
        self._path_length = path_length
        self._last = len(self._numbers)
        self._chosen: list[torch.Tensor] = []

    def begins_forward(self, label: str) -> bool:
        """Return True if a call of this layer starts a new forward, and record the call."""
        number = self._numbers[label]
        is_new = number <= self._last
        if is_new:
            self._chosen = []
        self._last = number
        return is_new

    def of(self, num_tokens: int) -> torch.Tensor:
        """Return the paths so far of ``num_tokens`` tokens, [S, up to L] int64; empty if earlier layers had
        another number of tokens."""
        if any(len(each) != num_tokens for each in self._chosen):
            self._chosen = []
        if not self._chosen:
            return torch.empty(num_tokens, 0, dtype=torch.int64)
        return torch.stack(self._chosen, dim=1)

    def add(self, first_S: torch.Tensor) -> None:
        """Record the first choices in a layer.

        Args:
            first_S: [S] int64, on the host: the first choice of each token; E for none.
        """
        if self._path_length:
            self._chosen = [*self._chosen, first_S][-self._path_length :]


class PathProfiler:
    """Fills the profiles of an engine's layers from their routers' choices in training: :meth:`watch` is an instrument.

    A recomputed forward does not count, nor does one without a batch.

    Args:
        layers: label -> E, in the order of the layers' calls.
        path_length: L.
        every: the number of forwards from one counted forward to the next.
        most_tokens: the maximum of counted tokens of a forward, evenly spread over it.
    """

    def __init__(
        self, layers: Mapping[str, int], path_length: int = 3, every: int = EVERY, most_tokens: int = MOST_TOKENS
    ) -> None:
        self._layers = dict(layers)
        self._most_experts = max(self._layers.values(), default=1)
        self._every, self._most_tokens = every, most_tokens
        self._paths = TokenPaths(self._layers, path_length)
        self._forwards = 0
        self._arriving: list[tuple[str, int, HostCopy]] = []
        self.path_length = path_length
        self._profiles = {label: PathProfile(self._most_experts, path_length) for label in self._layers}
        self.is_paused = False
        """Whether the forward that is under way has no batch."""

    def watch(self, call: LayerCall) -> None:
        """Count the choices of a call in training: an instrument."""
        if not call.is_training or self.is_paused or call.label not in self._layers or in_backward():
            return
        if self._paths.begins_forward(call.label):
            self._count()
            self._forwards += 1
        if (self._forwards - 1) % self._every:
            return
        call.add_routing_callback(partial(self._note, call.label))

    def _note(self, label: str, routing: RoutingBase) -> None:
        if isinstance(routing, Routing):
            choices_KS = choices_of(routing, self._most_experts)
            num_tokens = choices_KS.shape[1]
            sample_KS = choices_KS[:, :: max(1, -(-num_tokens // self._most_tokens))]
            self._arriving.append((label, num_tokens, HostCopy(sample_KS)))

    def profiles(self) -> dict[str, PathProfile]:
        """Return label -> profile of all choices that this rank has counted so far."""
        self._count()
        return dict(self._profiles)

    def as_state(self) -> dict[str, Any]:
        """Return the counts as plain data and tensors, to be stored with a checkpoint."""
        layers = {}
        for label, profile in self.profiles().items():
            found = profile.as_arrays()
            layers[label] = {
                name: each if isinstance(each, int) else torch.from_numpy(each) for name, each in found.items()
            }
        return {"format": STATE_FORMAT, "layers": layers}

    def read_state(self, state: Any) -> dict[str, PathProfile]:
        """Check a state of :meth:`as_state`; return label -> profile. Does not change this profiler.

        Raises:
            ValueError: the format, layers, number of experts or path length differ.
        """
        if not isinstance(state, Mapping) or state.get("format") != STATE_FORMAT:
            raise ValueError(f"unknown format of token paths: this version reads {STATE_FORMAT}")
        layers = state.get("layers")
        if not isinstance(layers, Mapping) or set(layers) != set(self._layers):
            known = sorted(layers) if isinstance(layers, Mapping) else layers
            raise ValueError(f"paths of tokens in layers {known}: there are {sorted(self._layers)}")
        found = {}
        for label, arrays in layers.items():
            if not isinstance(arrays, Mapping):
                raise ValueError(f"paths of tokens in {label}: must be arrays by name")
            plain = {name: each.numpy() if torch.is_tensor(each) else each for name, each in arrays.items()}
            found[label] = PathProfile.from_arrays(plain)
            sizes = found[label].num_experts, found[label].path_length
            if sizes != (self._most_experts, self.path_length):
                raise ValueError(
                    f"paths of tokens in {label} of (experts, length) {sizes}: must be of "
                    f"{self._most_experts, self.path_length}"
                )
        return found

    def go_on_with(self, profiles: Mapping[str, PathProfile]) -> None:
        """Continue counting from the result of :meth:`read_state`."""
        self._arriving = []
        self._profiles = dict(profiles)

    def _count(self) -> None:
        """Count the choices of the last forward."""
        arrived, self._arriving = self._arriving, []
        paths, before = TokenPaths(self._layers, self.path_length), 0
        for label, num_tokens, copy in arrived:
            if num_tokens != before:
                # Of other tokens, though the sample may be as large.
                paths, before = TokenPaths(self._layers, self.path_length), num_tokens
            choices_KS = copy.wait()
            self._profiles[label].add(paths.of(choices_KS.shape[1]).numpy(), choices_KS.t().numpy())
            paths.add(choices_KS[0])


def choices_of(routing: Routing, num_experts: int) -> torch.Tensor:
    """Return the expert of each choice, [K, S] int64, ``num_experts`` for none, without a wait.

    Args:
        routing: the decision.
        num_experts: E, or more.
    """
    chosen_KS = routing.chosen().long()
    # Some routers have null choices numbered from E on.
    is_one_KS = (chosen_KS >= 0) & (chosen_KS < routing.num_experts)
    return torch.where(is_one_KS, chosen_KS, num_experts)
