# SPDX-License-Identifier: Apache-2.0
"""Runs trained layers over many ranks in inference, with experts that change in each call, as in Lina (ATC'23).

After a layer has routed, the paths of its tokens predict how popular the next layer's experts will be. The sum over
ranks starts there and is finished when the layer's call ends. Then all ranks compute the same table of experts per
rank, and start to load their experts. After the gate of the next layer the true counts are summed; if other experts are
on top than predicted, a new table is made. Every rank has the same integers and computes the same table, so the paper's
scheduler on device 0 is not needed. ``engine.inference`` creates an :class:`InferenceRun`; ``expert_cache`` loads the
weights.

Letters: S tokens, K choices of a token, E experts, G ranks of an EP group.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.components.expert_compute.expert_call import CallRows, ExpertCall
from ds_fsmoe.components.routing import Routing
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.execution.row_sizes import RowBlock
from ds_fsmoe.layer.expert_cache import ExpertCache, ExpertCacheTable, route_to_copies, rows_of_experts
from ds_fsmoe.layer.runtime import LayerRuntime
from ds_fsmoe.observing.instruments import LayerCall
from ds_fsmoe.ops import Ops
from ds_fsmoe.planning.lina.expert_ranks import differs, num_top, ranks_of_experts
from ds_fsmoe.planning.lina.popularity import PathProfile
from ds_fsmoe.telemetry.paths import TokenPaths, choices_of

_UNITS = 1 << 20
"""The units per token in which popularity is summed over ranks: integers, so that all ranks get the same bits."""


@dataclass
class LayerRecord:
    """Holds statistics of the calls of one layer, the same on every rank."""

    calls: int = 0
    compared: int = 0
    """The calls in which an estimate was compared with the gate's decision."""
    accurate: int = 0
    """The calls among these in which the same experts were on top."""
    second_phases: int = 0
    """The calls in which the table was made after the gate."""
    copies: int = 0
    """The experts of all ranks, copies included, summed over calls."""
    fullest_primary: float = 0.0
    """The rows of the fullest rank relative to the mean, with primary experts only; summed over calls with known
    counts."""
    fullest: float = 0.0
    """The rows of the fullest rank relative to the mean, with the experts placed as in the call; summed likewise."""
    counted: int = 0
    """The calls whose counts are known."""

    @property
    def fullest_at_home(self) -> float:
        """Return :attr:`fullest_primary`, by its name of version 0.2.0."""
        return self.fullest_primary

    @property
    def accuracy(self) -> float | None:
        """Return the share of estimates with the same experts on top; ``None`` without a comparison."""
        return self.accurate / self.compared if self.compared else None


@dataclass(frozen=True)
class Options:
    """Holds the options of a user, the same for all layers."""

    most_per_rank: int = 4
    """The maximum number of experts of a rank, see :func:`~ds_fsmoe.planning.lina.expert_ranks.ranks_of_experts`."""
    second_phase: bool = True
    """Whether estimates are compared with the gates' decisions."""


@dataclass(eq=False)
class InferenceLayer:
    """Represents one layer whose experts change in each call.

    It acts as the layer's placement, and replaces the layer's experts in a call: these are known only when the rows
    are.
    """

    experts: ClassVar[tuple[nn.Module, ...]] = ()
    parameters: ClassVar[tuple[nn.Parameter, ...]] = ()
    keep_expert_dim: ClassVar[bool] = False

    label: str
    primary_experts: tuple[tuple[int, ...], ...]
    """The primary experts of each of G ranks."""
    block: RowBlock
    ops: Ops
    cache: ExpertCache
    path: str
    """The path of the layer in the model, for messages."""
    options: Options
    profile: PathProfile | None = None
    """The profile of paths; ``None``: no estimates are made."""
    record: LayerRecord = field(default_factory=LayerRecord)
    k: int | None = None
    """The number of choices of a token in the last call."""
    owner: InferenceRun | None = None
    _estimate_E: np.ndarray | None = None
    _table: ExpertCacheTable | None = None
    _before: ExpertCacheTable | None = None
    """The table of the call before."""

    @property
    def num_experts(self) -> int:
        """Return the number of experts, E."""
        return sum(map(len, self.primary_experts))

    def expect(self, estimate_E: np.ndarray) -> None:
        """Make the table by an estimate, the same on every rank, ahead of the gate."""
        self._estimate_E = estimate_E
        self._load_experts(estimate_E)

    def begin(self, is_expected: bool) -> None:
        """Start a call.

        Args:
            is_expected: whether :meth:`expect` was called for it; otherwise the estimate is the layer's whole
                distribution.
        """
        if not is_expected:
            self._estimate_E = self._table = None
            if self.profile is not None and self.profile.num_counted:
                no_path = np.zeros((1, 0), np.int64)
                self.expect(_in_units(self.profile.estimate(no_path, 1), self.num_experts))

    def routing(self, routing: Routing) -> Routing:
        """Return the decision with places for experts. Collective over the block where counts are summed."""
        self.k = routing.slots_KS.shape[0]
        rows_E = rows_of_experts(routing)
        self.record.calls += 1
        if self.options.second_phase or self._table is None:
            # A rank without a batch may have no k, so ranks agree on it with the counts.
            *actual, ks = self.summed(torch.cat([rows_E, rows_E.new_full((1,), self.k)])).tolist()
            self._correct(np.array(actual), -(-ks // len(self.block.places)))
        self.record.copies += int(self._table.copies_E.sum())
        result = route_to_copies(routing, rows_E, self._table, self.block.ep_index, self.ops)
        self._estimate_E = None
        if self.owner is not None:
            self.owner.routed(self.label, routing)
        return result

    def call(self, needs_backward: bool, rows: CallRows, x_RM: torch.Tensor, **options: bool) -> ExpertCall:
        """Return one call of the experts; see :meth:`ds_fsmoe.components.expert_compute.calls.ExpertSet.call`.

        Raises:
            RuntimeError: a backward is needed.
        """
        if needs_backward:
            raise RuntimeError(f"{self.path}: backward inside ds_fsmoe.inference, which is for torch.no_grad()")
        return self.cache.call_rows(rows, x_RM)

    def summed(self, counts: torch.Tensor) -> torch.Tensor:
        """Return counts summed over the block. Collective, with a wait."""
        counts = counts.clone()
        with waiting("the counts of choices of", self.label):
            dist.all_reduce(counts, group=self.block.group)
        return counts

    def _correct(self, actual_E: np.ndarray, k: int) -> None:
        """Compare the estimate with the true counts, and make another table if other experts are on top.

        Args:
            actual_E: [E], the rows of all ranks for each expert.
            k: the number of choices of a token, the same on every rank.
        """
        record = self.record
        is_off = True
        if self._estimate_E is not None:
            is_off = differs(self._estimate_E, actual_E, num_top(k, self.num_experts))
            record.compared += 1
            record.accurate += not is_off
        if self._table is None or is_off:
            record.second_phases += 1
            self._load_experts(actual_E)
        if total := actual_E.sum():
            mean = total / len(self.primary_experts)
            record.counted += 1
            record.fullest_primary += float(max(actual_E[list(each)].sum() for each in self.primary_experts) / mean)
            record.fullest += float(self._table.load_of_ranks(actual_E).max() / mean)

    def _load_experts(self, popularity_E: np.ndarray) -> None:
        held = self.primary_experts if self._before is None else self._before.experts_of_rank
        ranks = ranks_of_experts(popularity_E, len(self.primary_experts), self.options.most_per_rank, held)
        # A rank without an expert gets one of its primary experts.
        ranks = tuple(each or home[:1] for each, home in zip(ranks, self.primary_experts, strict=True))
        self._table = self._before = self.cache.arranged(ExpertCacheTable(ranks, self.num_experts))
        self.cache.prepare(self._table)


class InferenceRun:
    """Runs the calls of an engine's layers: :meth:`watch` is an instrument, :meth:`after` a hook after a layer's call.

    Args:
        labels: the labels of all layers whose tokens choose experts, in the order of their calls.
        layers: label -> those of them whose experts change.
        path_length: the number of layers in a path.
        most_experts: the maximum number of experts of a layer.
        overlaps: whether a sum may be concurrent with the communication of a layer.
    """

    def __init__(
        self,
        labels: Iterable[str],
        layers: Mapping[str, InferenceLayer],
        path_length: int,
        most_experts: int,
        overlaps: bool = True,
    ) -> None:
        every = list(labels)
        self.layers = dict(layers)
        self._next = {label: self.layers.get(after) for label, after in itertools.pairwise(every)}
        self._labels = set(every)
        self._paths = TokenPaths(every, path_length)
        self._most_experts, self._overlaps = most_experts, overlaps
        self._summing: tuple[InferenceLayer, Any, torch.Tensor] | None = None
        self._expected: InferenceLayer | None = None
        for layer in self.layers.values():
            layer.owner = self

    def watch(self, call: LayerCall) -> None:
        """Start a call of a layer."""
        if call.label not in self._labels:
            return
        layer = self.layers.get(call.label)
        if self._paths.begins_forward(call.label) or (self._summing is not None and self._summing[0] is not layer):
            # A forward was aborted, or skips a layer, whose weights may be whole in its own forward only.
            self._forget()
        self._settle()
        expected, self._expected = self._expected, None
        if layer is not None:
            layer.begin(expected is layer)
            call.experts = layer  # type: ignore[assignment]
            return
        gate, label = call.gate, call.label

        def noted(*args: Any) -> Any:
            routing = gate(*args)
            if isinstance(routing, Routing):
                self.routed(label, routing)
            return routing

        call.gate = noted

    def routed(self, label: str, routing: Routing) -> None:
        """Record the choices of a layer's tokens, and start to estimate those of the next layer. Collective there."""
        coming = self._next.get(label)
        needs_paths = any(each.profile is not None for each in self.layers.values())
        if not needs_paths:
            return
        first_S = choices_of(routing, self._most_experts)[0].cpu()
        paths = self._paths
        paths.of(len(first_S))
        paths.add(first_S)
        if coming is None or coming.profile is None:
            return
        estimate_E = coming.profile.estimate(paths.of(len(first_S)).numpy(), coming.k or routing.slots_KS.shape[0])
        units_E = torch.from_numpy(_in_units(estimate_E, coming.num_experts)).to(routing.slots_KS.device)
        work = dist.all_reduce(units_E, group=coming.block.group, async_op=True)
        self._summing = coming, work, units_E
        if not self._overlaps:
            with waiting("the estimate of choices of", coming.label):
                work.wait()

    def after(self, *_: Any) -> None:
        """End a call of a layer: make the table of the next layer, and start to load its experts."""
        if self._summing is not None and self._summing[0].cache.may_be_early:
            self._settle()

    def close(self) -> None:
        """Release the layers at once, so that their weights do not wait for the garbage collector."""
        # After an error some ranks may not have started a sum, so this does not wait for it.
        self._summing = self._expected = None
        for layer in self.layers.values():
            layer.owner = None
        self.layers, self._next = {}, {}

    def _forget(self) -> None:
        """Wait for a running sum, if any, and drop the expected call."""
        if self._summing is not None:
            with waiting("the estimate of choices of", self._summing[0].label):
                self._summing[1].wait()
        self._summing = self._expected = None

    def _settle(self) -> None:
        """Wait for a running sum, if any, and make the table of its layer."""
        if self._summing is None:
            return
        (layer, work, units_E), self._summing = self._summing, None
        with waiting("the estimate of choices of", layer.label):
            work.wait()
            units_E = units_E.cpu()
        layer.expect(units_E.numpy())
        self._expected = layer


def is_running_inference(running: LayerRuntime) -> bool:
    """Return True if the layers of an engine are in inference with changing experts.

    Args:
        running: the runtime that the engine's layers share.
    """
    return any(isinstance(getattr(each, "__self__", None), InferenceRun) for each in running.instruments)


def refuse_within(running: LayerRuntime, what: str) -> None:
    """Refuse changes of weights or of the positions of experts inside inference.

    Args:
        running: the runtime that the engine's layers share.
        what: the refused action, for the message.

    Raises:
        RuntimeError: inference is running; on every rank, as all take part in it.
    """
    if is_running_inference(running):
        raise RuntimeError(
            f"{what} inside ds_fsmoe.inference, where experts are not on the ranks that train them: leave it first"
        )


def _in_units(estimate_E: np.ndarray, num_experts: int) -> np.ndarray:
    """Return popularity as integers, [E] int64. A profile may have more experts than this layer."""
    return np.rint(estimate_E[:num_experts] * _UNITS).astype(np.int64)
