# SPDX-License-Identifier: Apache-2.0
"""Chooses over how many ranks the experts of a Hugging Face model are spread where ``ep_size`` is "auto": every size
that fits is predicted, from the model, the batch and the costs of the links, before the model runs.

``convert_experts`` calls it, once when a model is built and once when it gets its engine; the latter takes what the
former has noted on the modules of experts. What it cannot predict, it leaves at the largest size inside a node.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_fsmoe.components.expert_compute.contract import numel_of
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.distributed.fail_together import MeasuringError, from_first_rank, raise_on_all_ranks
from ds_fsmoe.distributed.nccl import why_one_link
from ds_fsmoe.distributed.topology import Topology, rank_now, topology_of_size
from ds_fsmoe.engine.shard_experts import CHOSEN, expert_sizes_of, note_ep_size, noted_ep_size, num_experts_of
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.measuring.cache import MeasurementCache, cluster_fingerprint
from ds_fsmoe.measuring.cluster_profile import measure_links
from ds_fsmoe.measuring.stopwatch import Stopwatch
from ds_fsmoe.planning.cluster import Cluster, Operation, load_cluster
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.ep_size import ExpertJob, choose_ep_size, likely_ep_sizes, states_bytes
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.workload import CHOICES, Shape

_REASON = "fsmoe_ep_size_reason"
"""The attribute of a module of experts with the words about the choice."""


@dataclass(frozen=True)
class AutoEpSize:
    """Holds what the choice depends on, the same on every rank."""

    block: FSMoEBlock
    ds_config: Mapping[str, Any]
    model: nn.Module
    modules: Sequence[nn.Module]
    """The modules of experts, with all of them."""
    fitting: Sequence[int]
    """The sizes that divide ranks and experts."""
    cautious: int
    """The largest size inside a node."""
    topology: Topology
    device: torch.device
    dtype: torch.dtype | None
    """The type in which experts will compute; ``None``: that of their weights."""

    def choose(self) -> int:
        """Return the number of ranks for the experts, and note it with its reason. Collective over all ranks of the
        job, unless it is known without a prediction.
        """
        if (noted := noted_ep_size(self.modules, self.fitting)) is not None:
            return noted
        if len(self.fitting) == 1 or self._cannot_predict():
            return self._note(self.cautious, "")
        samples, _ = _batch(self.ds_config, self.topology.world_size)
        lacking = "train_micro_batch_size_per_gpu" if samples is None else "sequence_length"
        if samples is None or self.block.sequence_length == "auto":
            reason = f'{self.cautious}, the largest inside a node: set "{lacking}" to have it chosen'
            return self._note(self.cautious, reason)
        try:
            found, reason = self._predicted(self._job())
        # Of sizes that the planner refuses every rank hears alike.
        except (MeasuringError, ValueError) as error:
            log_on_rank_0(f"ep_size = {self.cautious}, the largest inside a node: {error}", logging.WARNING)
            return self._note(self.cautious, "")
        note_ep_size(self.modules, found)
        return self._note(found, reason)

    def _note(self, ep_size: int, reason: str) -> int:
        for each in self.modules:
            setattr(each, _REASON, reason)
        return ep_size

    def _cannot_predict(self) -> bool:
        world, per_node = self.topology.world_size, self.topology.ranks_per_node
        expert_before_data = not self.ds_config.get("use_data_before_expert_parallelism", False)
        # Without training there are no gradients to send, and the planner knows nodes of one size, one after another.
        is_frozen = not all(each.requires_grad for module in self.modules for each in module.parameters())
        in_turn = world % per_node == 0 and self.topology == topology_of_size(world, per_node)
        by_timings = self.block.trace.cluster is None
        return is_frozen or not in_turn or not expert_before_data or (self.block.deterministic and by_timings)

    def _job(self) -> ExpertJob:
        """Return the job.

        Raises:
            ValueError: a size is out of bounds, or the model's configuration does not say how many experts a token has.
        """
        world = self.topology.world_size
        samples, micro_batches = _batch(self.ds_config, world)
        config = getattr(self.model, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        num_choices = next(filter(_is_count, (getattr(config, name, None) for name in CHOICES)), None)
        if num_choices is None:
            raise ValueError(f"the configuration of {type(self.model).__name__} has none of {', '.join(CHOICES)}")
        heads = getattr(config, "num_attention_heads", 1)
        shapes = []
        for module in self.modules:
            sizes = expert_sizes_of(module, self.dtype, 1, self.device)
            shapes.append(
                Shape(
                    *(samples, self.block.sequence_length, sizes.width, sizes.hidden, num_experts_of(module)),
                    K=num_choices,
                    capacity_factor=None,
                    ffn="mixtral" if sizes.has_gate else "gpt",
                    heads=heads if _is_count(heads) else 1,
                    dtype_bytes=sizes.dtype.itemsize,
                )
            )
        zero = self.ds_config.get("zero_optimization") or {}
        numel = sum(numel_of(each) for each in self.model.parameters())
        return ExpertJob(
            tuple(shapes),
            world,
            self.topology.ranks_per_node,
            numel - sum(numel_of(each) for module in self.modules for each in module.parameters()),
            zero=zero.get("stage", 0),
            micro_batches=micro_batches,
            overlap_comm=zero.get("overlap_comm") is not False,
        )

    def _predicted(self, job: ExpertJob) -> tuple[int, str]:
        """Return the chosen size, and what was chosen from what.

        Raises:
            MeasuringError: on every rank, if links could not be measured, or there is no prediction.
        """
        cluster, source = self._known_links()
        if not source:
            source = "measured links"
            max_ctas = None if self.block.max_ctas == "auto" else self.block.max_ctas
            dtype = self.dtype or next(self.modules[0].parameters()).dtype
            operations = measure_links(Stopwatch(self.device, budget_s=0.0), self.topology, dtype, max_ctas)
            cluster = _cluster_of(operations, self.topology)
        found = 0, ""
        with raise_on_all_ranks(None, "predicting a step with each ep_size"):
            if rank_now() == 0:
                assert cluster is not None
                found = self._planned(job, cluster, source)
        return from_first_rank(found)

    def _planned(self, job: ExpertJob, cluster: Cluster, source: str) -> tuple[int, str]:
        optimizer_bytes, most_bytes = _optimizer_bytes(self.ds_config, job.shapes[0].dtype_bytes), None
        if self.device.type == "cuda" and optimizer_bytes is not None:
            most_bytes = float(torch.cuda.get_device_properties(self.device).total_memory)

        def memory_of(groups: Groups) -> float:
            return states_bytes(job, groups, optimizer_bytes or 0.0)

        sizes = likely_ep_sizes(job, cluster, self.block.schedule, memory_of, most_bytes)
        choice = choose_ep_size(sizes, self.cautious)
        tokens = job.shapes[0].B * job.shapes[0].L
        reason = (
            f"{choice.best.ep} of {', '.join(map(str, self.fitting))} for {tokens} tokens a micro-batch on {source}"
        )
        if choice.runner_up is not None:
            reason += f"; {choice.runner_up.ep} is predicted to take {choice.runner_up_costs:.2f}x"
        elif not choice.best.fits:
            reason += "; no size is predicted to fit into memory"
        return choice.best.ep, reason

    def _known_links(self) -> tuple[Cluster | None, str]:
        """Return the costs of the links, on rank 0, and where they are from; "" if nothing is known. Collective."""
        block, cluster, source = self.block, None, ""
        # Each rank has its own name of the folder; the first rank decides whether there is one.
        is_kept = not block.deterministic and from_first_rank(block.autotune.cache_dir is not None)
        fingerprint = None
        if is_kept:
            max_ctas = None if block.max_ctas == "auto" else block.max_ctas
            one_link = self.device.type == "cuda" and why_one_link() is not None
            fingerprint = cluster_fingerprint(self.device, self.topology, max_ctas=max_ctas, one_link=one_link)
        with raise_on_all_ranks(None, "reading the costs of links"):
            if rank_now() == 0 and fingerprint is not None:
                cache = MeasurementCache(Path(block.autotune.cache_dir or ""))
                if cache.read(fingerprint) is not None:
                    cluster, source = load_cluster(str(cache.file_of(fingerprint))), "links measured before"
            if rank_now() == 0 and cluster is None and block.trace.cluster is not None:
                cluster = load_cluster(block.trace.cluster)
                source = f"the links of {cluster.name}"
        return cluster, from_first_rank(source)


def reason_of(modules: Iterable[nn.Module]) -> str:
    """Return the size of these modules of experts with the reason for it; "" where there is none."""
    return next(filter(None, (getattr(each, _REASON, "") for each in modules)), "")


def forget_ep_size(modules: Iterable[nn.Module]) -> None:
    """Remove from modules of experts what was noted about the choice, also by expert packing."""
    for each in modules:
        vars(each).pop(_REASON, None)
        vars(each).pop(CHOSEN, None)


def _is_count(value: Any) -> bool:
    """Return True for a whole number of at least 1, as opposed to "auto" or nothing."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _batch(ds_config: Mapping[str, Any], world: int) -> tuple[int | None, int]:
    """Return the samples of a micro-batch, if they are known, and the micro-batches of a step: DeepSpeed has each from
    the other two."""
    names = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    whole, samples, steps = (each if _is_count(each) else None for each in map(ds_config.get, names))
    if samples is None:
        samples = None if whole is None else max(1, whole // (world * (steps or 1)))
    if steps is None:
        steps = 1 if whole is None or samples is None else max(1, whole // (world * samples))
    return samples, steps


def _optimizer_bytes(ds_config: Mapping[str, Any], number_bytes: int) -> float | None:
    """Return the bytes of the optimizer per element, at the least; ``None`` where the host has a part of the states."""
    zero = ds_config.get("zero_optimization") or {}
    if any((zero.get(each) or {}).get("device", "none") != "none" for each in ("offload_optimizer", "offload_param")):
        return None
    kind = str((ds_config.get("optimizer") or {}).get("type", "")).lower()
    return 4.0 * (number_bytes < 4) + 8.0 * ("adam" in kind)


def _cluster_of(operations: Mapping[str, Operation], topology: Topology) -> Cluster:
    """Return a cluster of measured links. What no size of ``ep_size`` changes is at the rate of a product, or takes no
    time."""
    gemm = operations["gemm"]
    others = {"attention": gemm, "routing": gemm} | dict.fromkeys(("softmax", "order"), Operation(LinearCost(0.0, 0.0)))
    nodes = topology.node_sizes
    return Cluster("measured", len(nodes), nodes[0], {**operations, **others})
