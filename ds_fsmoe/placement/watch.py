# SPDX-License-Identifier: Apache-2.0
"""Counts which experts tokens choose, decides from that where experts should be, and has them moved, some per step.

Ranks count by themselves and share their counts once in ``every`` steps. One rank decides about each layer, and all do
as it says: so nothing depends on what one rank alone has seen, and every rank issues the same messages at the same
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ds_fsmoe.components.gate import in_backward
from ds_fsmoe.config.blocks import PlacementBlock
from ds_fsmoe.distributed.fail_together import device_of, on_every_rank, raise_on_all_ranks
from ds_fsmoe.distributed.topology import rank_now, world_size_now
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.observing.instruments import Gate, LayerCall
from ds_fsmoe.placement.moving import Mover, PlacementError
from ds_fsmoe.placement.placements import Placements, next_swaps
from ds_fsmoe.planning.expert_placement import ExpertPlacement
from ds_fsmoe.planning.placement_costs import Prices, Seen
from ds_fsmoe.planning.placement_policies import Decision, decide, policy

_COUNTS = "counts"
SAMPLE = 256
"""The tokens of each rank by which it is counted how often tokens cross."""
LASTING = 0.5
"""Of what the fullest rank is to have less, how much it must have had less in either of two stretches of steps."""

_Left = tuple[int | None, dict[str, np.ndarray], dict[str, list[tuple[int, int]]], dict[str, ExpertPlacement]]
"""(the step since which rows are counted, those of the stretch before, the exchanges left, the placements wanted)."""

PriceOf = Callable[[str, int, np.ndarray], Prices | None]
"""(label, bytes of an expert with its states, rows of a call [G, E]) -> what a layer's steps and moves cost; ``None``:
nothing was measured."""


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


@dataclass(frozen=True)
class Event:
    """What happened to the placement of one layer at one step."""

    step: int
    layer: str
    """The label of the layer."""
    rows_E: tuple[float, ...]
    """[E]: the rows of a call for each expert, on average over the steps that were counted."""
    balance: float
    """The rows of the fullest rank over the mean, in these steps."""
    expected_balance: float
    """The same with what was decided."""
    num_swaps: int
    gain_ms: float | None
    """What a step is predicted to become shorter by; ``None``: nothing is known of times."""
    why: str


class PlacementWatch:
    """Decides for one engine.

    Args:
        block: the options.
        placements: the layers whose experts may move.
        price_of: what is known of costs; ``None`` where decisions must not depend on a clock.
        group: the ranks that run the layers; ``None``: all.
    """

    def __init__(
        self,
        block: PlacementBlock,
        placements: Placements,
        price_of: PriceOf | None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._block, self._placements, self._group = block, placements, group
        self._price_of = price_of
        self._policy = policy(block.policy)
        self._loads = Loads(placements, group)
        self.watch = self._loads.watch
        self._since: int | None = None
        self._rows_before: dict[str, np.ndarray] = {}
        self._pending: dict[str, list[tuple[int, int]]] = {}
        self.wanted: dict[str, ExpertPlacement] = {}
        """Label -> placement that was decided and is not there yet."""
        self._mover: Mover | None = None
        self._bytes_of_expert: dict[str, int] = {}
        self.on_event: list[Callable[[Sequence[Event]], None]] = []
        """Functions that receive the events of each decision, on every rank."""

    def step_is_over(self, step: int, is_tuned: bool) -> None:
        """Decide, or go on with what was decided. Collective where something is due, the same on every rank.

        Args:
            step: the number of the next optimizer step.
            is_tuned: whether the plans of layers are settled.

        Raises:
            PlacementError: on every rank, where experts cannot be moved.
        """
        if self.wanted:
            self._go_on()
            return
        if self._since is None or not is_tuned:
            self._begin(step)
        elif step - self._since >= self._block.every:
            self._decide(step)
            self._begin(step)

    def _begin(self, step: int) -> None:
        self._since = step
        self._loads.begin()

    def _decide(self, step: int) -> None:
        rows_of, tokens_of = self._loads.shared_counts(), self._loads.shared_tokens()
        before, self._rows_before = self._rows_before, rows_of
        if not before:
            # What holds for one stretch of steps may be over in the next.
            return
        if not self._bytes_of_expert:
            mover = self._placements.mover()
            self._bytes_of_expert = {label: mover.bytes_of_expert(label) for label in rows_of}
        decided: tuple[dict[str, Decision], list[Event]] = {}, []
        ranks = 1 if world_size_now() == 1 else dist.get_world_size(self._group)
        with raise_on_all_ranks(self._group, "deciding where experts should be", PlacementError):
            # Each rank decides about some of the layers: in large groups that takes a while.
            own = {label: rows_of[label] for label in list(rows_of)[rank_now(self._group) :: ranks]}
            decided = self._decisions(step, before, own, tokens_of)
        of_ranks = on_every_rank(decided, self._group)
        decisions = dict(sorted((label, each) for of_rank, _ in of_ranks for label, each in of_rank.items()))
        events = sorted((each for _, of_rank in of_ranks for each in of_rank), key=lambda each: each.layer)
        for tell in self.on_event:
            tell(events)
        self.wanted = {label: each.placement for label, each in decisions.items()}
        self._pending = {
            label: self._placements.now[label].swaps_to(placement) for label, placement in self.wanted.items()
        }
        self._mover = self._placements.mover() if self.wanted else None
        log_on_rank_0(in_one_line(step, decisions, events))

    def _decisions(
        self,
        step: int,
        before: Mapping[str, np.ndarray],
        rows_of: Mapping[str, np.ndarray],
        tokens_of: Mapping[str, tuple[np.ndarray, ...]],
    ) -> tuple[dict[str, Decision], list[Event]]:
        decisions: dict[str, Decision] = {}
        events = []
        for label, lately_GE in rows_of.items():
            now = self._placements.now[label]
            nodes = self._node_of_rank(label)
            rows_GE = (before[label] + lately_GE) / 2
            seen = Seen(rows_GE, nodes, tokens_of[label])
            prices = self._prices(label, rows_GE)
            found = decide(now, seen, self._policy, prices, self._block.pays_within, label)
            found = if_it_lasts(now, found, (before[label], lately_GE), label)
            swaps = now.swaps_to(found.placement)
            if found.placement != now:
                decisions[label] = found
            events.append(
                Event(
                    step,
                    label,
                    tuple(rows_GE.sum(0).round(2).tolist()),
                    found.before,
                    found.after,
                    len(swaps),
                    found.gain_ms_per_step,
                    found.why,
                )
            )
        return decisions, events

    def _prices(self, label: str, rows_GE: np.ndarray) -> Prices | None:
        return None if self._price_of is None else self._price_of(label, self._bytes_of_expert[label], rows_GE)

    def _node_of_rank(self, label: str) -> tuple[int, ...]:
        groups = self._placements.layer(label).fsmoe.groups
        return tuple(groups.topology.node_of_rank[each] for each in groups.ranks_of("ep"))

    def _go_on(self) -> None:
        """Make the exchanges of one step."""
        assert self._mover is not None
        swaps = next_swaps(self._pending, self._block.moves_per_step)
        if swaps:
            predicted_ms = self._predicted_ms(swaps)
            num_bytes, took_ms = self._placements.swap(self._mover, swaps)
            expected = "" if predicted_ms is None else f" (predicted {predicted_ms:.1f})"
            log_on_rank_0(
                f"placement: {len(swaps)} exchange(s) of experts, {num_bytes / 1e6:.1f} MB from the rank with most to "
                f"send, in {took_ms:.1f} ms{expected}"
            )
        for label in [each for each, left in self._pending.items() if not left]:
            del self.wanted[label], self._pending[label]
        if not self.wanted:
            self._mover, self._since, self._rows_before = None, None, {}

    def _predicted_ms(self, swaps: Sequence[tuple[str, int, int]]) -> float | None:
        """Return what exchanges are predicted to take; ``None`` where nothing was measured."""
        total_ms = 0.0
        for label in dict.fromkeys(each for each, _, _ in swaps):
            now = self._placements.now[label]
            if label not in self._bytes_of_expert:  # another job has decided
                return None
            prices = self._prices(label, np.ones((now.num_ranks, now.num_experts)))
            if prices is None:
                return None
            of_layer = [(first, second) for each, first, second in swaps if each == label]
            after = now
            for each in of_layer:
                after = after.swapped(*each)
            seen = Seen(np.ones((now.num_ranks, now.num_experts)), self._node_of_rank(label))
            total_ms += prices.moves_ms(now, after, seen)
        return total_ms

    def forget(self) -> None:
        """Take back what was decided and is not done yet, and count anew: a checkpoint is there instead."""
        self._pending, self.wanted, self._rows_before = {}, {}, {}
        self._mover, self._since, self._bytes_of_expert = None, None, {}

    def as_data(self) -> dict[str, Any]:
        """Return what has been counted since the last decision, on this rank, and what is left of it to be done."""
        return self._loads.as_data() | {
            "since": self._since,
            "before": {label: rows_GE.tolist() for label, rows_GE in self._rows_before.items()},
            "pending": {label: [list(each) for each in swaps] for label, swaps in self._pending.items()},
            "wanted": {label: each.as_dict() for label, each in self.wanted.items()},
        }

    def check_data(self, found: Mapping[str, Any]) -> None:
        """Check what :meth:`as_data` gave.

        Raises:
            KeyError, TypeError, ValueError: it is not that.
        """
        if _COUNTS in found:  # else a job that does not decide has saved it
            self._loads.check_data(found)
            _left_in(found, self._placements)

    def go_on_with(self, found: Mapping[str, Any]) -> None:
        """Go on counting, and moving, where another job has ended. Collective where experts were being moved."""
        if _COUNTS not in found:
            return
        self._loads.go_on_with(found)
        self._since, self._rows_before, self._pending, self.wanted = _left_in(found, self._placements)
        self._mover = self._placements.mover() if self.wanted else None


def _left_in(found: Mapping[str, Any], placements: Placements) -> _Left:
    """Return what a job has left to be done by the one that resumes it.

    Raises:
        KeyError, TypeError, ValueError: it is not that, or is of other layers.
    """
    since, pending, wanted = found["since"], found["pending"], found["wanted"]
    if set(pending) != set(wanted) or not set(wanted) <= set(placements.now):
        raise ValueError("what is left of a placement does not fit what was decided")
    if not (since is None or type(since) is int):
        raise ValueError(f"counted since step {since!r}")
    before = {label: np.array(each, dtype=float) for label, each in found["before"].items()}
    if before:
        shapes = {label: (each.num_ranks, each.num_experts) for label, each in placements.now.items()}
        if {label: each.shape for label, each in before.items()} != shapes:
            raise ValueError("rows of earlier steps are not of these layers")
    placed = {label: ExpertPlacement.from_dict(each) for label, each in wanted.items()}
    swaps = {label: [(int(a), int(b)) for a, b in each] for label, each in pending.items()}
    if any(len(wanted[label]["expert_of_place"]) != each.num_experts for label, each in placed.items()):
        # Ranks had places for replicas, so places have other numbers here: it is decided anew.
        return since, before, {}, {}
    for label, each in swaps.items():
        if any(not 0 <= place < placements.now[label].num_experts for pair in each for place in pair):
            raise ValueError(f"exchanges of places that {label} does not have")
    return since, before, swaps, placed


def if_it_lasts(now: ExpertPlacement, found: Decision, stretches: Sequence[np.ndarray], label: str) -> Decision:
    """Return a decision, or that nothing moves where its gain would not have been there in every stretch of steps.

    Args:
        now: the placement now.
        found: what was decided by all steps together.
        stretches: the rows that each rank had for each expert in each of several stretches.
        label: the label of the layer.
    """
    falls = [now.over_mean(each) - found.placement.over_mean(each) for each in stretches]
    if found.placement == now or min(falls) >= LASTING * (found.before - found.after):
        return found
    told = f"{label}: stays: the load has moved on, from where {falls[0]:.2f} of the mean were to be gained to where "
    return found.stays(now, f"{told}{falls[-1]:.2f} are")


def in_one_line(step: int, decisions: Mapping[str, Decision], events: Sequence[Event]) -> str:
    """Return what was decided at a step about all layers, in one line for the log.

    Args:
        step: the number of the next optimizer step.
        decisions: label -> decision, of the layers that change.
        events: those of all layers.
    """
    worst = max(events, key=lambda each: each.balance)
    if not decisions:
        return (
            f"placement at step {step}: nothing moves; the fullest rank has {worst.balance:.2f} times the mean "
            f"({worst.layer}): {worst.why}"
        )
    of_moved = [each for each in events if each.layer in decisions]
    swaps = sum(each.num_swaps for each in of_moved)
    gain_ms = sum(each.gain_ms or 0.0 for each in of_moved)
    pays = max(each.pays_after_steps or 0 for each in decisions.values())
    first = max(of_moved, key=lambda each: each.balance)
    gain = f", {gain_ms:.1f} ms a step less, pays after {pays} step(s)" if gain_ms else ""
    return (
        f"placement at step {step}: {swaps} exchange(s) of experts in {len(decisions)} layer(s){gain}; {first.layer}: "
        f"the fullest rank {first.balance:.2f} -> {first.expected_balance:.2f} times the mean"
    )


def _as_wide(experts_SK: np.ndarray, width: int) -> np.ndarray:
    """Return choices with more columns, in which there is no choice."""
    return np.pad(experts_SK, ((0, 0), (0, width - experts_SK.shape[1])), constant_values=-1)
