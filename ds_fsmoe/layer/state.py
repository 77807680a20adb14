# SPDX-License-Identifier: Apache-2.0
"""Holds all of ours that a converted layer has; the one owner of how it is run."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.checkpoint_files.expert_parts import of_one_expert
from ds_fsmoe.checkpoint_files.numbering import Cut
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.shards import cuts_of
from ds_fsmoe.components.gate import in_backward
from ds_fsmoe.components.order import OrderBase
from ds_fsmoe.components.routing import ReplayedRouting
from ds_fsmoe.config.reading import ConfigError
from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.distributed.groups import FSMoEGroups
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.execution.call import GradientWindow
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.counts_exchange import Forward, Forwards
from ds_fsmoe.execution.lanes import Observer, SerialLanes
from ds_fsmoe.execution.pipeline import LayerPipeline
from ds_fsmoe.execution.tensor_parallel import TensorParallelTokens, TensorParallelUse
from ds_fsmoe.layer.expert_shard import TRUSTED, asking
from ds_fsmoe.layer.opaque import Handle, OpaqueModule
from ds_fsmoe.layer.parts import Parts, refuse_copy
from ds_fsmoe.layer.replay import runs_again, take
from ds_fsmoe.layer.row_routing import Placed, sends_rows, takes_rows
from ds_fsmoe.layer.runtime import LayerRuntime, pipeline_without_engine
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.observing.instruments import Check, Instrument
from ds_fsmoe.planning.block import LayerPlan
from ds_fsmoe.planning.expert_placement import ExpertPlacement

# ---- Keeps experts whole until their shards can be cut
#
# A script fills the experts of a layer by DeepSpeed's rule: rank r has those of EP rank ``r % ep`` (``r // (ranks /
# ep)`` with ``use_data_before_expert_parallelism``), and of all ranks with the same ones DeepSpeed lets the first
# decide. Where experts are sharded, the layout differs: neighbours share the experts of one EP rank. So each rank
# keeps its experts whole until the process groups are there, and then every shard is cut from the expert that
# DeepSpeed would have trained.


_SAMPLES = 1024
"""The elements of a tensor by which experts are told apart, for a warning only."""


@torch.no_grad()
def hand_out(
    experts: Sequence[nn.Module],
    shards: Sequence[nn.Module],
    group: dist.ProcessGroup,
    rules: Sequence[int],
    esp: int,
    path: str,
) -> None:
    """Fill this rank's shards from the experts of the ranks that decide on them. Collective over the block.

    Args:
        experts: the whole experts of this rank, as the script has filled them.
        shards: the shards of this rank, as many as its whole experts; in their final types and on their device.
        group: the block: rank i of it holds shard ``i % esp`` of the experts of EP rank ``i // esp``.
        rules: for each rank of the block, the EP rank whose experts it has by DeepSpeed's rule.
        esp: the number of shards of an expert.
        path: the path of the layer, for messages.
    """
    own, ep = dist.get_rank(group), len(rules) // esp
    deciding = [rules.index(ep_rank) for ep_rank in range(ep)]
    _warn_if_filled_otherwise(experts, group, rules, deciding, esp, path)
    receivers = range(rules[own] * esp, (rules[own] + 1) * esp) if deciding[rules[own]] == own else ()
    for whole, shard in zip(experts, shards, strict=True):
        cuts, targets = cuts_of(whole), dict(_tensors(shard))
        sent = [_bytes_of_shard(whole, targets, cuts, index, esp) for index in range(esp)] if receivers else []
        sizes = [target.nbytes for target in targets.values()]
        device = next(shard.parameters()).device
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        with waiting("the shards of experts of", path):
            dist.all_to_all_single(
                received,
                torch.cat(sent) if sent else received.new_empty(0),
                [sum(sizes) if rank == deciding[own // esp] else 0 for rank in range(len(rules))],
                [sum(sizes) if rank in receivers else 0 for rank in range(len(rules))],
                group=group,
            )
        for target, values in zip(targets.values(), received.split(sizes), strict=True):
            # A copy, as a part of a larger buffer need not begin where an element of its type may.
            target.copy_(values.clone().view(target.dtype).view(target.shape))


def _warn_if_filled_otherwise(
    experts: Sequence[nn.Module],
    group: dist.ProcessGroup,
    rules: Sequence[int],
    deciding: Sequence[int],
    esp: int,
    path: str,
) -> None:
    """Warn if ranks have equal experts where shards share one, but not where DeepSpeed's rule makes them equal."""
    digests = on_every_rank(_digest(experts), group)
    by_rule = all(digests[rank] == digests[deciding[rule]] for rank, rule in enumerate(rules))
    by_shards = all(digests[rank] == digests[rank // esp * esp] for rank in range(len(rules)))
    if by_shards and not by_rule:
        log_on_rank_0(
            f"{path}: runs of {esp} neighbouring ranks have the same experts, and ranks that should have the "
            "same ones by DeepSpeed's rule have not. With fsmoe.expert_tensor_parallel_size = "
            f"{esp}, too, rank r has to be filled with the experts of EP rank r % ep_size before "
            "initialize(), and what ranks have by another rule is lost: if these are pretrained weights, "
            "fill them by that rule",
            logging.WARNING,
        )


def _digest(experts: Sequence[nn.Module]) -> str:
    digest = hashlib.sha256()
    for expert in experts:
        for _, tensor in _tensors(expert):
            flat = tensor.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // _SAMPLES)].contiguous().cpu()
            digest.update(_as_bytes(sample).numpy().tobytes())
    return digest.hexdigest()


def _bytes_of_shard(
    whole: nn.Module, targets: Mapping[str, torch.Tensor], cuts: Mapping[str, Cut], index: int, count: int
) -> torch.Tensor:
    """Return the contents of an expert's shard, in the types and on the device of this rank's shard."""
    parts = (
        of_one_expert(cuts.get(name, "whole"), index, count).cut(tensor.detach()[None])[0].to(targets[name])
        for name, tensor in _tensors(whole)
    )
    return torch.cat([_as_bytes(each) for each in parts])


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def facts_of_experts(layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return what, besides the shapes of parameters, has to be alike on all ranks so that each can take over the
    experts of another, as short texts by name."""
    facts = {}
    for name, layer in layers.items():
        for index, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            frozen = [each for each, parameter in expert.named_parameters() if not parameter.requires_grad]
            buffers = [f"{each} {list(buffer.shape)}" for each, buffer in expert.named_buffers()]
            facts[f"{name}: frozen parameters of expert {index}"] = ", ".join(frozen) or "none"
            facts[f"{name}: buffers of expert {index}"] = ", ".join(buffers) or "none"
    return facts


# ---- Holds all of ours that a converted layer has; the one owner of how it is run


@dataclass(eq=False, repr=False)
class LayerState:
    """Holds what a layer inside DeepSpeed has of ours, on its one attribute ``fsmoe``.

    Only this object changes how the layer is run: others call :meth:`apply`, :meth:`run_uncut` and :meth:`attach`. A
    call that is under way, or waits for its backward, keeps the pipeline it began with.
    """

    parts: Parts
    order: OrderBase
    """The order that goes with the layer's gate."""
    running: LayerRuntime | None
    """The runtime that the engine's layers share; ``None`` for a layer outside of an engine."""
    label: str
    """The label of the layer, in traces."""
    path: str
    """The path of the layer in its model, for messages."""
    tensor_parallel: TensorParallelUse

    pipeline: LayerPipeline | None = None
    """The pipeline that runs the layer; set in this class alone. ``None`` until the layer's groups are there."""
    plan: LayerPlan | None = None
    """The plan applied last; a layer that is run uncut has one chunk whatever it says."""
    why_uncut: str = ""
    """The reason why the layer must not be cut, see :class:`~ds_fsmoe.layer.unchunked.Uncut`; empty where it may be."""
    groups: FSMoEGroups | None = None
    """The process groups of a layer in an engine."""
    duplicates: TensorParallelTokens | None = None
    """The tensor-parallel ranks that have the same tokens, if there are any."""
    last_shape: torch.Size | None = None
    """The shape of the last input."""
    unsharded: Sequence[nn.Module] | None = None
    """The whole experts of this rank, where they will be sharded and the groups are not there yet."""
    known_experts: tuple[list, ExpertSet] | None = None
    """The modules and parameters of the experts, and the set that was made of them."""
    is_in_slots: bool = False
    """Whether slots are sent, whatever the all-to-all, as far as was known when groups were made."""
    placed: Placed | None = None
    """Where the experts are; ``None``: in the model's own order."""
    forwards: Forwards | None = None
    """The forwards so far."""
    checks_without_engine: list[Check] = field(default_factory=list)
    """The checks of a layer outside of an engine of ours."""
    opaque: Handle | None = None
    """What stands for the layer in compiled code."""
    _exchanges: dict[str, Collectives] = field(default_factory=dict)

    @property
    def instruments(self) -> Sequence[Instrument]:
        """The instruments that are shown each call of the layer."""
        return () if self.running is None else self.running.instruments

    @property
    def checks(self) -> Sequence[Check]:
        """The checks that are shown the layer itself before each call."""
        return self.checks_without_engine if self.running is None else self.running.checks

    @property
    def capacity_group(self) -> dist.ProcessGroup | None:
        """The ranks that agree on a capacity, see :class:`~ds_fsmoe.distributed.groups.FSMoEGroups`."""
        return None if self.groups is None else self.groups.capacity_group

    def sends_rows(self, gate: Any) -> bool:
        """Whether rows travel in the next call, instead of slots; the same on every rank.

        Args:
            gate: the gate of the layer.
        """
        assert self.pipeline is not None
        return self.duplicates is None and sends_rows(self.parts.dispatch, gate, self.pipeline.collectives)

    def could_send_rows(self, gate: Any) -> bool:
        """Whether slots travel and rows would, if they were asked for; the same on every rank.

        Args:
            gate: the gate of the layer.
        """
        assert self.pipeline is not None
        could = self.duplicates is None and sends_rows("rows", gate, self.pipeline.collectives)
        return could and not self.sends_rows(gate)

    @property
    def mp_group(self) -> dist.ProcessGroup | None:
        """The tensor-parallel ranks, see :class:`~ds_fsmoe.distributed.groups.FSMoEGroups`."""
        return None if self.groups is None else self.groups.mp_group

    def begin_call(self, layer: ConvertedLayer, x: torch.Tensor) -> Forward:
        """Begin a call of the layer, and return its forward, as ranks that share the experts compare it.

        Args:
            layer: the layer.
            x: its input.
        """
        self.last_shape = x.shape
        if self.forwards is None:
            self.forwards = Forwards(self.path or self.label)
        forward = self.forwards.begin(layer.training, in_backward())
        if self.pipeline is None:
            layer.run_alone()
        for check in self.checks:
            check(layer, x)
        return forward

    def next_given(self) -> ReplayedRouting | None:
        """Return the choice by which the call that begins is to go: of its forward, if it runs again; or replayed."""
        if runs_again():
            return take(self)
        return None if self.running is None else self.running.replay.take(self.label)

    def check_given(self, given: ReplayedRouting | None, num_tokens: int) -> None:
        """Look whether a choice is for the tokens of a call. Collective where routing is replayed.

        Raises:
            ReplayError: it is not, on any rank.
        """
        if self.running is not None:
            self.running.replay.check(self.label, given, num_tokens)

    def connect(self, ep_size: int, gate: Any) -> FSMoEGroups:
        """Make the process groups of the layer, and run it as the block of its engine asks for. Collective.

        Args:
            ep_size: the ranks over which its experts are spread.
            gate: the gate of the layer.
        """
        assert self.running is not None
        groups = self.groups = self.running.groups(ep_size, self.tensor_parallel)
        if self.tensor_parallel.same_tokens and groups.mp_group is not None:
            if self.parts.dispatch == "rows":
                raise ConfigError(
                    f'fsmoe.dispatch = "rows": must be "auto" or "slots" with {self.path}, whose tensor-parallel ranks '
                    "have the same tokens and send a part of the slots each"
                )
            self.duplicates = TensorParallelTokens(groups.mp_group)
        self.is_in_slots = self.duplicates is not None or not takes_rows(self.parts.dispatch, gate)
        if self.is_in_slots:
            self.running.say_in_slots(self.path)
        self.apply(self.running.plan)
        self.running.observer.meet(self.pipeline, groups)
        return groups

    def place(self, placement: ExpertPlacement) -> None:
        """Send rows to where this placement has the experts, from the next call on. The same on every rank.

        Args:
            placement: the placement; the experts themselves have been moved already.
        """
        self.placed = None if placement.is_at_start else Placed(placement)

    def run_alone(self, group: dist.ProcessGroup | None) -> None:
        """Run the layer without an engine of ours: one task after another, among the ranks of ``group``."""
        self.pipeline = pipeline_without_engine(self.parts.alltoall, group, SerialLanes())

    def run_on_without_engine(self) -> None:
        """Run the layer from its next call on in one chunk, one task after another, in the groups that it has."""
        if self.pipeline is not None:
            self.pipeline = replace(self.pipeline.uncut(), lanes=SerialLanes(), window=None, observer=None, on_call=())

    def apply(self, plan: LayerPlan) -> None:
        """Run the layer by a plan from its next call on. Collective: an all-to-all may make communicators.

        Args:
            plan: the same on every rank that runs the layer.

        Raises:
            ConfigError: the all-to-all contradicts itself, on every rank.
        """
        assert self.running is not None
        assert self.groups is not None
        if plan.alltoall not in self._exchanges:
            self._exchanges[plan.alltoall] = self.running.exchange(self.groups, plan.alltoall)
        exchange = self._exchanges[plan.alltoall]
        if exchange.nodes is not None and self.is_in_slots:
            exchange = replace(exchange, nodes=None, why_flat="slots are sent")
        if exchange.why_flat:
            self.running.say_flat(plan.alltoall, exchange.why_flat)
        pipeline = self.running.pipeline(self.label, self.groups, plan, exchange)
        if self.is_uncut:
            pipeline = pipeline.uncut()
        if self.pipeline is not None:
            pipeline = replace(pipeline, window=self.pipeline.window, observer=self.pipeline.observer)
        self.pipeline, self.plan = pipeline, plan

    @property
    def is_uncut(self) -> bool:
        """Whether the layer is run in one chunk whatever the plan says."""
        return bool(self.why_uncut)

    def run_uncut(self, reason: str) -> None:
        """Run the layer in one chunk from its next call on, whatever the plan says.

        Args:
            reason: the reason, for messages.
        """
        self.why_uncut = reason
        if self.pipeline is not None and self.pipeline.is_cut:
            self.pipeline = self.pipeline.uncut()

    def attach(self, window: GradientWindow | None, observer: Observer | None = None) -> None:
        """From the next call on, let gradients travel in the layer's backward, and report its tasks to an observer.

        Args:
            window: the window of the gradients; ``None``: none travel.
            observer: told of every task, unless it is ``None``.
        """
        assert self.pipeline is not None
        self.pipeline = replace(self.pipeline, window=window, observer=observer)


class ConvertedLayer(OpaqueModule):
    """Goes before the class of a module in a model, and replaces its forward. Made by conversion, never constructed."""

    fsmoe: LayerState
    """All of our state; without it the module is what it was."""

    @property
    def label(self) -> str:
        """The label of the layer, in traces."""
        return self.fsmoe.label

    @property
    def pipeline(self) -> LayerPipeline | None:
        """The pipeline that runs the layer; changed by :class:`LayerState` alone."""
        return self.fsmoe.pipeline

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle the layer, alone or with the model around, unless it has an engine and a script asks.

        Raises:
            LayerError: it has one.
        """
        may_be_copied = self.fsmoe.running is None or asking() in TRUSTED
        return super().__reduce_ex__(protocol) if may_be_copied else refuse_copy(self.fsmoe.path)

    def run_alone(self) -> None:
        """Run the layer without an engine of ours, and without other ranks."""
        self.fsmoe.run_alone(None)
