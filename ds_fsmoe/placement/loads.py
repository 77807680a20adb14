# SPDX-License-Identifier: Apache-2.0
"""Counts which experts tokens choose, and shares the counts of all ranks when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ds_fsmoe.components.gate import in_backward
from ds_fsmoe.distributed.fail_together import device_of, on_every_rank
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.observing.instruments import Gate, LayerCall
from ds_fsmoe.placement.placements import Placements

SAMPLE = 256
"""The tokens of each rank by which it is counted how often tokens cross."""


class Loads:
    """The loads of the layers of one engine since :meth:`begin`.

    Args:
        placements: the layers.
        group: the ranks that run them; ``None``: all.
    """

    def __init__(self, placements: Placements, group: dist.ProcessGroup | None = None) -> None:
        self._placements, self._group = placements, group
        self._counts: dict[str, torch.Tensor] = {}
        self._num_calls: dict[str, int] = dict.fromkeys(placements.now, 0)
        self._last: dict[str, torch.Tensor] = {}

    def watch(self, call: LayerCall) -> None:
        """Count what the gate of a layer decides in training, once for each forward."""
        if call.is_training and call.label in self._num_calls and not in_backward():
            call.gate = self._counted(call.gate, call.label)

    def _counted(self, gate: Gate, label: str) -> Gate:
        def counted(*args: Any) -> Any:
            routing = gate(*args)
            self._last[label] = routing.chosen()
            with torch.no_grad():
                if label not in self._counts:
                    self._counts[label] = torch.zeros_like(routing.counts_E, dtype=torch.int64)
                self._counts[label] += routing.counts_E
            self._num_calls[label] += 1
            return routing

        return counted

    def begin(self) -> None:
        """Forget what has been counted."""
        for counts in self._counts.values():
            counts.zero_()
        self._num_calls = dict.fromkeys(self._num_calls, 0)

    def shared_counts(self) -> dict[str, np.ndarray]:
        """Return label -> [G, E], the rows of a call that each rank of an EP group has for each expert. Collective."""
        parts = []
        device = device_of(self._group)
        for label, calls in self._num_calls.items():
            counts = self._counts.get(label)
            num_experts = self._placements.now[label].num_experts
            own = torch.zeros(num_experts, dtype=torch.int64) if counts is None else counts
            parts += [own.to(device), torch.tensor([calls], device=device)]
        own = torch.cat(parts)
        every = own.unsqueeze(0)
        if world_size_now() > 1:
            every = own.new_empty(dist.get_world_size(self._group), len(own))
            with waiting("the loads of experts"):
                dist.all_gather(list(every.unbind()), own, group=self._group)
        table, found, at = every.cpu().numpy(), {}, 0
        for label in self._num_calls:
            now = self._placements.now[label]
            stop = at + now.num_experts
            index_of = self._ep_indices(label)
            rows_GE = np.zeros((now.num_ranks, now.num_experts))
            np.add.at(rows_GE, index_of, table[:, at:stop])
            calls = np.zeros(now.num_ranks)
            np.add.at(calls, index_of, table[:, stop])
            found[label] = rows_GE / np.maximum(calls, 1)[:, None]
            at = stop + 1
        return found

    def _ep_indices(self, label: str) -> list[int]:
        """Return for each rank of the group its index in its EP group."""
        layout = self._placements.layer(label).fsmoe.groups.layout
        ranks = range(world_size_now()) if self._group is None else dist.get_process_group_ranks(self._group)
        return [layout.group_of("ep", rank).index(rank) for rank in ranks]

    def shared_tokens(self) -> dict[str, tuple[np.ndarray, ...]]:
        """Return label -> for each rank of an EP group the experts of some tokens of its last call. Collective."""
        own = {label: choices[:, :SAMPLE].t().to(torch.int32).cpu().numpy() for label, choices in self._last.items()}
        self._last = {}
        every, found = on_every_rank(own, self._group), {}
        for label in self._num_calls:
            of_ranks: list[list[np.ndarray]] = [[] for _ in range(self._placements.now[label].num_ranks)]
            for index, told in zip(self._ep_indices(label), every, strict=True):
                of_ranks[index] += [told[label]] if label in told else []
            width = max((each.shape[1] for parts in of_ranks for each in parts), default=1)
            found[label] = tuple(
                np.concatenate([_as_wide(each, width) for each in parts]) if parts else np.empty((0, width), np.int32)
                for parts in of_ranks
            )
        return found

    def as_data(self) -> dict[str, Any]:
        """Return the counts of this rank as plain data."""
        return {
            "counts": {label: counts.tolist() for label, counts in self._counts.items()},
            "calls": dict(self._num_calls),
        }

    def check_data(self, found: Mapping[str, Any]) -> None:
        """Check what :meth:`as_data` gave.

        Raises:
            KeyError, TypeError, ValueError: it is not that, or is of other layers.
        """
        counts, calls, now = found["counts"], found["calls"], self._placements.now
        if (
            set(calls) != set(now)
            or not set(counts) <= set(now)
            or any(type(each) is not int for each in calls.values())
        ):
            raise ValueError(f"counts of layers {sorted(calls)}: must be of {sorted(now)}")
        for label, each in counts.items():
            if len(each) != now[label].num_experts or any(type(count) is not int for count in each):
                raise ValueError(f"counts of {len(each)} experts in {label}")

    def go_on_with(self, found: Mapping[str, Any]) -> None:
        """Go on counting from what :meth:`as_data` gave."""
        device = next(self._placements.layer(next(iter(self._num_calls))).parameters()).device
        self._counts = {label: torch.tensor(each, device=device) for label, each in found["counts"].items()}
        self._num_calls = dict(found["calls"])


def _as_wide(experts_SK: np.ndarray, width: int) -> np.ndarray:
    """Return choices with more columns, in which there is no choice."""
    return np.pad(experts_SK, ((0, 0), (0, width - experts_SK.shape[1])), constant_values=-1)
