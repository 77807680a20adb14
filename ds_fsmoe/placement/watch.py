# SPDX-License-Identifier: Apache-2.0
"""Counts the tokens of each expert, decides where experts should be, and has them moved, some per step. The engine
calls it after each optimizer step. :mod:`~ds_fsmoe.planning.placement_policies` decides;
:mod:`~ds_fsmoe.placement.placements` moves.

Each rank counts for itself, and ranks share counts once in ``every`` steps. One rank decides about each layer, and all
follow. So a decision never depends on one rank's state, and every rank issues the same messages at the same steps.
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
from ds_fsmoe.distributed.fail_together import on_every_rank, raise_on_all_ranks
from ds_fsmoe.distributed.topology import rank_now, world_size_now
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.observing.instruments import Gate, LayerCall
from ds_fsmoe.placement.moving import Mover, PlacementError
from ds_fsmoe.placement.placements import Placements, next_swaps
from ds_fsmoe.planning.expert_placement import ExpertPlacement
from ds_fsmoe.planning.placement_costs import ObservedRouting, Prices
from ds_fsmoe.planning.placement_policies import Decision, decide, policy

_COUNTS = "counts"
SAMPLE = 256
"""The tokens of each rank by which it is counted how often tokens cross."""
LASTING = 0.5
"""Of what the fullest rank is to have less, how much it must have had less in either of two stretches of steps."""

PriceOf = Callable[[str, int, np.ndarray], Prices | None]
"""(label, bytes of an expert with its states, rows of a call [G, E]) -> what a layer's steps and moves cost; ``None``:
nothing was measured."""


class Loads:
    """Counts the rows of each expert in the layers of one engine, since :meth:`begin`.

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
        """Count the experts that the gate of a layer chooses in training, once for each forward."""
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
        """Set all counts to zero."""
        for counts in self._counts.values():
            counts.zero_()
        self._num_calls = dict.fromkeys(self._num_calls, 0)

    def shared(self) -> dict[str, tuple[np.ndarray, tuple[np.ndarray, ...]]]:
        """Return the loads of each layer by its label. Collective.

        Returns:
            label -> (rows, tokens). ``rows`` are the mean rows per call of each rank of an EP group for each expert,
            [G, E].
            ``tokens`` are, for each of these ranks, the experts of some tokens of its last call.
        """
        own: dict[str, tuple[int, Any, Any]] = {}
        for label, calls in self._num_calls.items():
            counts, chosen_KS = self._counts.get(label), self._last.get(label)
            tokens = None if chosen_KS is None else chosen_KS[:, :SAMPLE].t().to(torch.int32).cpu().numpy()
            own[label] = calls, 0 if counts is None else counts.cpu().numpy(), tokens
        self._last = {}
        every, found = on_every_rank(own, self._group), {}
        for label in self._num_calls:
            now = self._placements.now[label]
            rows_GE, calls_G = np.zeros((now.num_ranks, now.num_experts)), np.zeros(now.num_ranks)
            of_ranks: list[list[np.ndarray]] = [[] for _ in range(now.num_ranks)]
            for index, told in zip(self._ep_indices(label), every, strict=True):
                calls, counts_E, tokens = told[label]
                calls_G[index] += calls
                rows_GE[index] += counts_E
                of_ranks[index] += [] if tokens is None else [tokens]
            width = max((each.shape[1] for parts in of_ranks for each in parts), default=1)
            tokens_G = tuple(
                np.concatenate([np.empty((0, width), np.int32), *(_as_wide(each, width) for each in parts)])
                for parts in of_ranks
            )
            found[label] = rows_GE / np.maximum(calls_G, 1)[:, None], tokens_G
        return found

    def _ep_indices(self, label: str) -> list[int]:
        """Return the index of each rank of the group in its EP group."""
        layout = self._placements.layer(label).fsmoe.groups.layout
        ranks = range(world_size_now()) if self._group is None else dist.get_process_group_ranks(self._group)
        return [layout.group_of("ep", rank).index(rank) for rank in ranks]

    def as_data(self) -> dict[str, Any]:
        """Return the counts of this rank as plain data."""
        return {
            "counts": {label: counts.tolist() for label, counts in self._counts.items()},
            "calls": dict(self._num_calls),
        }

    def check_data(self, found: Mapping[str, Any]) -> None:
        """Check data of :meth:`as_data`.

        Raises:
            KeyError, TypeError, ValueError: the data is malformed, or is of other layers.
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
        """Continue counting from data of :meth:`as_data`."""
        device = next(self._placements.layer(next(iter(self._num_calls))).parameters()).device
        self._counts = {label: torch.tensor(each, device=device) for label, each in found["counts"].items()}
        self._num_calls = dict(found["calls"])


@dataclass(frozen=True)
class Event:
    """Records what happened to the placement of one layer at one step."""

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
    """Decides about the placements of one engine.

    Args:
        block: the options ``fsmoe.placement``.
        placements: the layers whose experts may move.
        price_of: returns the measured costs; ``None`` where decisions must not depend on a clock.
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
        self.wanted: dict[str, ExpertPlacement] = {}
        """Label -> placement that was decided and is not there yet."""
        self._mover: Mover | None = None
        self._bytes_of_expert: dict[str, int] = {}
        self.on_event: list[Callable[[Sequence[Event]], None]] = []
        """Functions that receive the events of each decision, on every rank."""

    def step_is_over(self, step: int, is_tuned: bool) -> None:
        """Decide about placements, or continue moving experts.

        Collective at the steps where a decision or a move is due; these are the same on every rank.

        Args:
            step: the number of the next optimizer step.
            is_tuned: whether the plans of layers are final.

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
        seen = self._loads.shared()
        before, self._rows_before = self._rows_before, {label: rows_GE for label, (rows_GE, _) in seen.items()}
        if not before:
            # What holds for one stretch of steps may be over in the next.
            return
        if not self._bytes_of_expert:
            mover = self._placements.mover()
            self._bytes_of_expert = {label: mover.bytes_of_expert(label) for label in seen}
        ranks = 1 if world_size_now() == 1 else dist.get_world_size(self._group)
        decided: dict[str, Decision] = {}
        with raise_on_all_ranks(self._group, "deciding where experts should be", PlacementError):
            # Each rank decides about some of the layers: in large groups that takes a while.
            for label in list(seen)[rank_now(self._group) :: ranks]:
                decided[label] = self._decision(label, (before[label], seen[label][0]), seen[label][1])
        for of_rank in on_every_rank(decided, self._group):
            decided |= of_rank
        events = []
        for label, each in sorted(decided.items()):
            rows_E = np.mean((before[label], seen[label][0]), axis=0).sum(axis=0)
            num_swaps = len(self._placements.now[label].swaps_to(each.placement))
            facts = each.before, each.after, num_swaps, each.gain_ms_per_step, each.why
            events.append(Event(step, label, tuple(rows_E.round(2).tolist()), *facts))
        for tell in self.on_event:
            tell(events)
        self.wanted = {each.layer: decided[each.layer].placement for each in events if each.num_swaps}
        self._mover = self._placements.mover() if self.wanted else None
        log_on_rank_0(in_one_line(step, events), details="; ".join(each.why for each in events))

    def _decision(self, label: str, stretches: Sequence[np.ndarray], tokens: tuple[np.ndarray, ...]) -> Decision:
        """Return the decision about one layer, from the rows of two stretches of steps."""
        now, rows_GE = self._placements.now[label], np.mean(stretches, axis=0)
        seen = ObservedRouting(rows_GE, self._node_of_rank(label), tokens)
        prices = self._prices(label, rows_GE)
        found = decide(now, seen, self._policy, prices, self._block.pays_within, label)
        return if_it_lasts(now, found, stretches, label)

    def _prices(self, label: str, rows_GE: np.ndarray) -> Prices | None:
        return None if self._price_of is None else self._price_of(label, self._bytes_of_expert[label], rows_GE)

    def _node_of_rank(self, label: str) -> tuple[int, ...]:
        groups = self._placements.layer(label).fsmoe.groups
        return tuple(groups.topology.node_of_rank[each] for each in groups.ranks_of("ep"))

    def _go_on(self) -> None:
        """Make the exchanges of one step."""
        assert self._mover is not None
        now = self._placements.now
        left = ((label, now[label].swaps_to(placement)) for label, placement in self.wanted.items())
        swaps = next_swaps(left, self._block.moves_per_step)
        if swaps:
            predicted_ms = self._predicted_ms(swaps)
            num_bytes, took_ms = self._placements.swap(self._mover, swaps)
            expected = "" if predicted_ms is None else f" (predicted {predicted_ms:.1f})"
            log_on_rank_0(
                f"placement: {len(swaps)} exchange(s) of experts, at most {num_bytes / 1000000.0:.1f} MB per rank, "
                f"in {took_ms:.1f} ms{expected}"
            )
        self.wanted = {label: placement for label, placement in self.wanted.items() if now[label].num_moved(placement)}
        if not self.wanted:
            self._mover, self._since, self._rows_before = None, None, {}

    def _predicted_ms(self, swaps: Sequence[tuple[str, int, int]]) -> float | None:
        """Return the predicted milliseconds of exchanges; None if costs were not measured."""
        after: dict[str, ExpertPlacement] = {}
        for label, first, second in swaps:
            after[label] = after.get(label, self._placements.now[label]).swapped(first, second)
        total_ms = 0.0
        for label, placement in after.items():
            if label not in self._bytes_of_expert:  # another job has decided
                return None
            prices = self._prices(label, np.ones((placement.num_ranks, placement.num_experts)))
            if prices is None:
                return None
            total_ms += prices.moves_ms(self._placements.now[label], placement, self._node_of_rank(label))
        return total_ms

    def forget(self) -> None:
        """Cancel open decisions and restart counting, after a checkpoint was loaded."""
        self.wanted, self._rows_before = {}, {}
        self._mover, self._since, self._bytes_of_expert = None, None, {}

    def as_data(self) -> dict[str, Any]:
        """Return this rank's counts since the last decision, and the open moves, as plain data."""
        return self._loads.as_data() | {
            "since": self._since,
            "before": {label: rows_GE.tolist() for label, rows_GE in self._rows_before.items()},
            "wanted": {label: each.as_dict() for label, each in self.wanted.items()},
        }

    def check_data(self, found: Mapping[str, Any]) -> None:
        """Check data of :meth:`as_data`.

        Raises:
            KeyError, TypeError, ValueError: the data is malformed.
        """
        if _COUNTS in found:  # else a job that does not decide has saved it
            self._loads.check_data(found)
            _left_in(found, self._placements)

    def go_on_with(self, found: Mapping[str, Any]) -> None:
        """Continue counting and moving from data of another job. Collective where moves are open."""
        if _COUNTS not in found:
            return
        self._loads.go_on_with(found)
        self._since, self._rows_before, self.wanted = _left_in(found, self._placements)
        self._mover = self._placements.mover() if self.wanted else None


def _left_in(
    found: Mapping[str, Any], placements: Placements
) -> tuple[int | None, dict[str, np.ndarray], dict[str, ExpertPlacement]]:
    """Return the open work of a saved job.

    Returns:
        The step since which rows are counted, the rows of the stretch before, and the placements that were decided and
        not reached.

    Raises:
        KeyError, TypeError, ValueError: the data is malformed, or is of other layers.
    """
    since, wanted = found["since"], found["wanted"]
    shapes = {label: (each.num_ranks, each.num_experts) for label, each in placements.now.items()}
    if not (since is None or type(since) is int):
        raise ValueError(f"counted since step {since!r}")
    before = {label: np.array(each, dtype=float) for label, each in found["before"].items()}
    if before and {label: each.shape for label, each in before.items()} != shapes:
        raise ValueError("rows of earlier steps are not of these layers")
    placed = {label: ExpertPlacement.from_dict(each) for label, each in wanted.items()}
    if any(shapes.get(label) != (each.num_ranks, each.num_experts) for label, each in placed.items()):
        raise ValueError("what was decided and is left to be done is not of these layers")
    if any(len(wanted[label]["expert_of_place"]) != each.num_experts for label, each in placed.items()):
        # Ranks had places for replicas, which took part of the rows: it is decided anew.
        placed = {}
    return since, before, placed


def if_it_lasts(now: ExpertPlacement, found: Decision, stretches: Sequence[np.ndarray], label: str) -> Decision:
    """Return a decision, or one without moves if its gain is missing in a stretch of steps.

    Args:
        now: the placement now.
        found: the decision from the mean over all stretches.
        stretches: for each stretch of steps, the rows of each rank for each expert, [G, E].
        label: the label of the layer.
    """
    falls = [now.over_mean(each) - found.placement.over_mean(each) for each in stretches]
    if found.placement == now or min(falls) >= LASTING * (found.before - found.after):
        return found
    told = f"{label}: not moved: the load has changed, from {falls[0]:.2f} of the mean to be gained to "
    return found.without_moves(now, f"{told}{falls[-1]:.2f} are")


def in_one_line(step: int, events: Sequence[Event]) -> str:
    """Return one log line with the decisions about all layers at a step.

    Args:
        step: the number of the next optimizer step.
        events: the events of all layers.
    """
    moved = [each for each in events if each.num_swaps]
    worst = max(moved or events, key=lambda each: each.balance)
    if not moved:
        return (
            f"placement at step {step}: no expert moves ({worst.layer}: the fullest rank has {worst.balance:.2f} times "
            "the mean)"
        )
    swaps = sum(each.num_swaps for each in moved)
    gain_ms = sum(each.gain_ms or 0.0 for each in moved)
    gain = f", {gain_ms:.1f} ms a step less" if gain_ms else ""
    return (
        f"placement at step {step}: {swaps} exchange(s) of experts in {len(moved)} layer(s){gain} "
        f"({worst.layer}: fullest rank {worst.balance:.2f} -> {worst.expected_balance:.2f} times the mean)"
    )


def _as_wide(experts_SK: np.ndarray, width: int) -> np.ndarray:
    """Return choices padded to ``width`` columns with -1, which means no choice."""
    return np.pad(experts_SK, ((0, 0), (0, width - experts_SK.shape[1])), constant_values=-1)
