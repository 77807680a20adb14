# SPDX-License-Identifier: Apache-2.0
"""Chooses over how many ranks the experts of a Hugging Face model are spread where ``ep_size`` is "auto": every size
that fits is predicted, from the model, the batch and the costs of the links, before the model runs.

``convert_experts`` calls it, once when a model is built and once when it gets its engine; the latter takes what the
former has noted on the modules of experts. What it cannot predict, it leaves at the largest size inside a node.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import nn

from ds_fsmoe.components.expert_compute.contract import numel_of
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.distributed.agreement import check_agreement, facts_of_config
from ds_fsmoe.distributed.fail_together import MeasuringError, from_first_rank
from ds_fsmoe.distributed.topology import Topology, topology_of_size
from ds_fsmoe.engine.shard_experts import CHOSEN, expert_sizes_of, note_ep_size, noted_ep_size, num_experts_of
from ds_fsmoe.layer.runtime import LayerRuntime
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.planning.decide.ep_size import ExpertJob, choose_ep_size
from ds_fsmoe.planning.decide.plan import mode_of
from ds_fsmoe.planning.workload import CHOICES, AllToAll, Shape
from ds_fsmoe.tuning.predicted_ep_size import BatchLengths, EpSizePredictor, learned_of
from ds_fsmoe.tuning.when import FEWEST_STEPS, known_steps, runs_whole, settled

_BATCH = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_SHARED = "use_data_before_expert_parallelism"
_NOTE = "fsmoe_ep_size_choice"
"""The attribute of a module of experts with the :class:`NotedChoice` of its ``ep_size``."""


@dataclass(frozen=True)
class NotedChoice:
    """Holds what is known of a choice, for the start table and for the engine that compares batches with it."""

    reason: str = ""
    """The words about it; "" where there is nothing to choose."""
    predictor: EpSizePredictor | None = None
    """What predicts the job again; ``None``: nothing can. Its samples are 1 where their number was not known."""
    is_known: bool = False
    """Whether the predictor has a length that batches are expected to have."""
    is_given: bool = False
    """Whether the config has that length."""


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
    has_stages: bool = False
    """Whether the modules are those of a pipeline stage."""

    def choose(self) -> int:
        """Return the number of ranks for the experts, and note it with its reason. Collective over all ranks of the
        job, unless it was noted before, or there is one size alone.

        Raises:
            DisagreementError: on every rank, if their blocks differ.
        """
        if not self.has_stages and (noted := noted_ep_size(self.modules, self.fitting)) is not None:
            return noted
        if len(self.fitting) == 1:
            return self._note(self.cautious)
        if self.has_stages:  # of which some may have no experts
            return self._usual("none is chosen with pipeline stages")
        # Ranks with other blocks or batches would take part in other collectives, and wait for each other for ever.
        facts = facts_of_config(self.block.alike()) | {_SHARED: str(self.ds_config.get(_SHARED, False))}
        check_agreement(facts, what="the config")
        if obstacle := self._obstacle():
            return self._usual(obstacle)
        batch = from_first_rank({name: self.ds_config.get(name) for name in _BATCH})
        return replace(self, ds_config={**self.ds_config, **batch})._choose()

    def _choose(self) -> int:
        batch = dict(zip(_BATCH[1:], _batch(self.ds_config, self.topology.world_size), strict=True))
        # Of a batch that is not known yet, the length tells nothing; what the last run saw does.
        lacking = next((name for name, count in batch.items() if count is None), "sequence_length")
        is_given = self.block.sequence_length != "auto" and lacking == "sequence_length"
        # Of sizes that the planner refuses every rank hears alike.
        try:
            predictor, unfit = self._predictor(self.block.sequence_length if is_given else 1), ""
            if is_given:
                sizes, source = predictor.predicted(self.cautious)
                choice = choose_ep_size(sizes, self.cautious)
                learned = learned_of(choice, predictor.tokens)
                unfit = "" if choice.best.fits else "; no size is predicted to fit into memory"
            else:
                learned, source = predictor.learned(), "what the last run saw"
                if learned is not None and learned.ep_size not in self.fitting:
                    words = f"its ep_size = {learned.ep_size} is none of {', '.join(map(str, self.fitting))}"
                    log_on_rank_0(f"ep_size: what the last run has learned is ignored: {words}", logging.WARNING)
                    learned = None
                if learned is None:
                    # What nothing may be kept of is not promised either.
                    return self._usual(
                        f'set "{lacking}" to have it chosen', None if self.block.deterministic else predictor
                    )
        except (MeasuringError, ValueError) as error:
            if is_given:
                log_on_rank_0(f"ep_size = {self.cautious}, the largest inside a node: {error}", logging.WARNING)
            return self._usual(str(error))
        others = ", ".join(map(str, self.fitting))
        reason = f"{learned.ep_size} of {others} for {learned.tokens} tokens a micro-batch on {source}{unfit}"
        if learned.runner_up is not None:
            reason += f"; {learned.runner_up} is predicted to take {learned.runner_up_costs:.2f}x"
        note_ep_size(self.modules, learned.ep_size)
        return self._note(learned.ep_size, NotedChoice(reason, predictor.for_tokens(learned.tokens), True, is_given))

    def _usual(self, why: str, predictor: EpSizePredictor | None = None) -> int:
        return self._note(self.cautious, NotedChoice(f"{self.cautious}, the largest inside a node: {why}", predictor))

    def _note(self, ep_size: int, choice: NotedChoice | None = None) -> int:
        for each in self.modules:
            setattr(each, _NOTE, choice or NotedChoice())
        return ep_size

    def _obstacle(self) -> str:
        """Return why sizes cannot be predicted for this job; "" if they can."""
        world, per_node = self.topology.world_size, self.topology.ranks_per_node
        obstacles = {
            "none is chosen with expert_tensor_parallel_size": self.block.esp_size > 1,
            # Without training there are no gradients to send.
            "none is chosen for frozen experts": _has_frozen(self.modules),
            f"none is chosen with {_SHARED}": bool(self.ds_config.get(_SHARED, False)),
            "none is chosen unless ranks are numbered node by node, and nodes have equally many": world % per_node != 0
            or self.topology != topology_of_size(world, per_node),
            "with deterministic one is chosen if trace.cluster names the links": self.block.deterministic
            and self.block.trace.cluster is None,
        }
        return next((words for words, stands in obstacles.items() if stands), "")

    def _predictor(self, length: int) -> EpSizePredictor:
        """Return the predictor of the job whose samples have a length.

        Raises:
            ValueError: a size is out of bounds, or the model's configuration does not say how many experts a token has.
        """
        world = self.topology.world_size
        batch = samples, micro_batches = _batch(self.ds_config, world)
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
                    *(samples or 1, length, sizes.width, sizes.hidden, num_experts_of(module)),
                    K=num_choices,
                    capacity_factor=None,
                    ffn="mixtral" if sizes.has_gate else "gpt",
                    heads=heads if _is_count(heads) else 1,
                    dtype_bytes=sizes.dtype.itemsize,
                )
            )
        # A short run of a job is to start as the job does, so that it is planned as long as that.
        long = self.block.model_copy(update={"record": self.block.record.model_copy(update={"stop_after": 0})})
        block, _ = settled(long, {}, world)
        zero, asked = self.ds_config.get("zero_optimization") or {}, block.gradient_partition
        stage, mode = zero.get("stage", 0), mode_of(block.schedule, asked.mode)
        numel = sum(numel_of(each) for each in self.model.parameters())
        job = ExpertJob(
            tuple(shapes),
            world,
            self.topology.ranks_per_node,
            numel - sum(numel_of(each) for module in self.modules for each in module.parameters()),
            # Sums once a step are those of stage 1, and so is the memory for them.
            zero=1 if stage == 2 and mode != "off" and asked.accumulate == "before_sum" else stage,
            micro_batches=micro_batches or 1,
            overlap_comm=zero.get("overlap_comm") is not False,
            sums_in_slices=mode != "off" and asked.levels != 1,
            has_windows=mode != "off",
            max_degree=1 if runs_whole(block) else max(block.pipeline_degree.most),
            alltoall=_asked_alltoall(block),
        )
        dtype = self.dtype or next(self.modules[0].parameters()).dtype
        optimizer_bytes = _optimizer_bytes(self.ds_config, job.shapes[0].dtype_bytes)
        return EpSizePredictor(block, job, self.topology, self.device, dtype, optimizer_bytes, batch)


def choice_of(modules: Iterable[nn.Module]) -> NotedChoice:
    """Return what these modules of experts have noted; an empty choice where there is none."""
    return next((found for each in modules if (found := getattr(each, _NOTE, None)) is not None), NotedChoice())


def watched_lengths(
    modules: Sequence[nn.Module], ds_config: Mapping[str, Any], ep_size: int, label: str, running: LayerRuntime
) -> BatchLengths | None:
    """Return what compares the batches of an engine with the length that its ``ep_size`` was chosen for; ``None`` where
    there was nothing to choose, or where the job is over too soon or is a trial. Collective.

    Args:
        modules: the modules of experts.
        ds_config: the whole DeepSpeed config.
        ep_size: the size that was chosen.
        label: the label of the first of the modules.
        running: what layers run with.
    """
    choice, steps = choice_of(modules), known_steps(running.block, ds_config)
    if choice.predictor is None:
        return None
    # A run that the config ends is a trial, as those of `compare` and `tune`: the next one is to start like it.
    is_short = bool(running.block.record.stop_after) or (steps is not None and steps < FEWEST_STEPS)
    # At the start the trainer may not have written the batch yet.
    samples, micro_batches, is_short = from_first_rank((*_batch(ds_config, choice.predictor.job.world), is_short))
    if is_short:
        return None
    # A model is loaded before adapters freeze its experts, and predictions have the gradients of all parameters.
    if _has_frozen(modules):
        if choice.is_known:
            words = "was chosen as if all parameters of experts were trained, and some are frozen"
            log_on_rank_0(f'ep_size = {ep_size} {words}; set "ep_size" if another is faster', logging.WARNING)
        return None
    predictor = choice.predictor.for_batch(samples or 1, micro_batches or 1, keeps_length=choice.is_given)
    # What the last run has learned is predicted again: links, or what is no part of a job's key, may have changed.
    found = BatchLengths(predictor, ep_size, label, is_known=choice.is_given, is_given=choice.is_given)
    running.instruments.append(found.watch)
    return found


def forget_ep_size(modules: Iterable[nn.Module]) -> None:
    """Remove from modules of experts what was noted about the choice, also by expert packing."""
    for each in modules:
        vars(each).pop(_NOTE, None)
        vars(each).pop(CHOSEN, None)


def _has_frozen(modules: Iterable[nn.Module]) -> bool:
    """Return True if a parameter of these modules is not trained."""
    return not all(each.requires_grad for module in modules for each in module.parameters())


def _asked_alltoall(block: FSMoEBlock) -> AllToAll | None:
    """Return the all-to-all that layers will have; ``None``: the one that is measured to be the fastest. For the
    planner those that it does not know are flat."""
    if block.alltoall == "auto":
        return None if block.autotune.enabled else "flat"
    return next((each for each in get_args(AllToAll) if each == block.alltoall), "flat")


def _is_count(value: Any) -> bool:
    """Return True for a whole number of at least 1, as opposed to "auto" or nothing."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _batch(ds_config: Mapping[str, Any], world: int) -> tuple[int | None, int | None]:
    """Return the samples of a micro-batch and the micro-batches of a step, ``None`` for what a trainer has not written
    yet: DeepSpeed has each from the other two."""
    whole, samples, steps = (each if _is_count(each) else None for each in map(ds_config.get, _BATCH))
    is_open = steps is None and ds_config.get(_BATCH[2]) == "auto"
    if samples is None and whole is not None and not is_open:
        samples = max(1, whole // (world * (steps or 1)))
    if steps is None and whole is not None and samples is not None:
        steps = max(1, whole // (world * samples))
    return samples, None if is_open and steps is None else steps or 1


def _optimizer_bytes(ds_config: Mapping[str, Any], number_bytes: int) -> float | None:
    """Return the bytes of the optimizer per element; ``None`` where the host has a part of the states. One that the
    config does not name is the script's or the trainer's, and is taken for Adam."""
    zero = ds_config.get("zero_optimization") or {}
    if any((zero.get(each) or {}).get("device", "none") != "none" for each in ("offload_optimizer", "offload_param")):
        return None
    kind = str((ds_config.get("optimizer") or {}).get("type", "adam")).lower()
    return 4.0 * (number_bytes < 4) + 8.0 * ("adam" in kind)
