# SPDX-License-Identifier: Apache-2.0
"""Provides ``ds_fsmoe.inference``: inference with an expert cache, whose experts change with popularity.

Scripts call it with a trained engine. ``ds_fsmoe/layer/inference.py`` runs one layer by it; here layers are chosen, and
memory is reserved on all ranks.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import torch
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.distributed.partitioned import gathered
from ds_fsmoe.engine.shard_experts import adapters_of
from ds_fsmoe.gradients.lazy_parameters import wait_for
from ds_fsmoe.layer.expert_cache import (
    ExpertCacheMemory,
    ExpertForm,
    Where,
    form_of_module,
    form_of_set,
    give_back_host_memory,
    make_expert_cache,
)
from ds_fsmoe.layer.experts_layer import FSMoEExperts
from ds_fsmoe.layer.inference import InferenceLayer, InferenceRun, LayerRecord, Options, is_running_inference
from ds_fsmoe.layer.runtime import LayerRuntime, block_of
from ds_fsmoe.layer.state import LayerState
from ds_fsmoe.layer.stock_layer import FSMoELayer
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.placement.placements import chooses_experts, obstacle_to_placement
from ds_fsmoe.planning.expert_placement import ExpertPlacement
from ds_fsmoe.planning.lina.popularity import PathProfile
from ds_fsmoe.telemetry.paths import PathProfiler


@dataclass
class Inference:
    """Describes how the layers run inside :func:`inference`."""

    layers: dict[str, LayerRecord] = field(default_factory=dict)
    """Label -> what happened, of the layers whose experts come and go."""
    left: dict[str, str] = field(default_factory=dict)
    """Label -> the reason why a layer runs as it always does."""
    weights: Where = "host"
    """Where weights are taken from; ``"home"``, whatever was asked for, where the memory of any rank does not suffice
    for the other."""

    def _sum(self, name: str) -> int:
        return sum(getattr(each, name) for each in self.layers.values())

    @property
    def accuracy(self) -> float | None:
        """Return the share of estimates whose top experts equal the gate's; ``None`` if none was compared."""
        return self._sum("accurate") / self._sum("compared") if self._sum("compared") else None

    @property
    def second_phases(self) -> float:
        """Return the share of calls whose table was made after the gate."""
        return self._sum("second_phases") / max(1, self._sum("calls"))


@contextmanager
def inference(
    engine: Any,
    *,
    path_length: int = 3,
    most_per_rank: int = 4,
    estimate: bool = True,
    second_phase: bool = True,
    weights: Where = "host",
    profiles: Mapping[str, PathProfile] | None = None,
) -> Iterator[Inference]:
    """Run a trained model's MoE layers with popular experts on several ranks and unpopular ones packed, as in Lina.

    Entering is collective, and so is every forward inside. The model is in evaluation mode, without gradients;
    ``model.generate`` works. Leaving restores the earlier state, also after an error.

    Args:
        engine: the engine that ``initialize`` has returned, or its model.
        path_length: the layers of a path by which popularity is estimated, at most as many as were profiled.
        most_per_rank: the maximum of experts of a rank; at least twice its number of primary experts.
        estimate: whether popularity is estimated ahead of a gate, from the counts of ``fsmoe.placement.profile_paths``
            in training. Otherwise experts are scheduled by the gate's choices.
        second_phase: whether an estimate is corrected after the gate, where other experts are the most popular.
        weights: ``"host"``: the weights of all experts are gathered once, into the memory of each rank's host, where
            that suffices on all ranks. ``"home"``: weights that change are fetched from the primary ranks, call by
            call.
        profiles: label -> profile, the same on every rank; those of the engine unless given.

    Yields:
        The record of the layers' calls inside the block: ``layers``, ``left``, ``accuracy`` and ``second_phases``.

    Raises:
        ValueError: an impossible option, profiles of other layers, neither an estimate nor a second phase, or a model
            in pipeline stages.
        RuntimeError: the model is in inference already.
        MemoryError: memory for the expert cache is insufficient on any rank; raised on every rank.

    Examples:
        >>> import torch, ds_fsmoe
        >>> model = ds_fsmoe.MoE(8, torch.nn.Linear(8, 8), num_experts=4, k=2)
        >>> ds_config = {"train_micro_batch_size_per_gpu": 2, "fsmoe": {"enabled": True, "ops": "reference"}}
        >>> ds_config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
        >>> engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
        >>> with ds_fsmoe.inference(engine, estimate=False) as happened:
        ...     output, *_ = engine(torch.randn(2, 3, 8))
        >>> output.shape, output.requires_grad
        (torch.Size([2, 3, 8]), False)
    """
    if path_length < 0 or most_per_rank < 1 or weights not in get_args(Where):
        raise ValueError(
            f"path_length = {path_length}, most_per_rank = {most_per_rank}, weights = {weights!r}: must be at least 0 "
            f"and 1, and one of {', '.join(get_args(Where))}"
        )
    if not estimate and not second_phase:
        raise ValueError("estimate = False, second_phase = False: one of them must be true, or loads are unknown")
    model = getattr(engine, "module", engine)
    if isinstance(model, PipelineModule):
        raise ValueError(
            "ds_fsmoe.inference: not supported with a PipelineModule, whose stages run on different ranks; "
            "evaluate it with engine.eval_batch"
        )
    found = {
        module.fsmoe.label: module
        for module in model.modules()
        if isinstance(getattr(module, "fsmoe", None), LayerState) and module.fsmoe.running is not None
    }
    record = Inference(weights=weights)
    if not found:
        log_on_rank_0("ds_fsmoe.inference: the model has no MoE layer of ds_fsmoe", logging.WARNING)
    elif is_running_inference(next(iter(found.values())).fsmoe.running):
        raise RuntimeError("ds_fsmoe.inference: already active for this model; leave it before entering again")
    with ExitStack() as stack:
        stack.enter_context(_evaluating(model))
        stack.enter_context(torch.no_grad())
        if found:
            stack.callback(give_back_host_memory)
            options = Options(most_per_rank, second_phase)
            _cache_experts(stack, found, record, options, path_length, estimate, profiles)
        yield record


def _cache_experts(
    stack: ExitStack,
    found: Mapping[str, FSMoEExperts | FSMoELayer],
    record: Inference,
    options: Options,
    path_length: int,
    estimate: bool,
    profiles: Mapping[str, PathProfile] | None,
) -> None:
    """Run layers with an expert cache until a stack is left. Collective.

    Args:
        stack: receives the functions that end it.
        found: label -> converted layer, of all layers, at least one.
        record: the record of the calls, to be filled.
        options: the options of all layers.
        path_length, estimate, profiles: see :func:`inference`.
    """
    running = next(iter(found.values())).fsmoe.running
    if profiles is None:
        profiles = _profiles_of(running) if estimate else {}
    if estimate and not any(each.num_counted for each in profiles.values()):
        reason = "training counted no paths of tokens (fsmoe.placement.profile_paths)"
        if not options.second_phase:
            raise ValueError(f"second_phase = False: loads cannot be estimated, as {reason}")
        log_on_rank_0(f"ds_fsmoe.inference: experts are scheduled after each gate, as {reason}", logging.WARNING)
        profiles = {}
    record.left |= left_by_any(found)
    coming = {label: LayerToCache.of(module, options) for label, module in found.items() if label not in record.left}
    sizes = _sizes_of(profiles, max((each.placement.num_experts for each in coming.values()), default=1))
    record.weights, rooms = allocate_expert_memory(coming, record.weights)
    layers = {
        label: each.layer(rooms.pop(label), options, profiles.get(label) if estimate else None)
        for label, each in coming.items()
    }
    record.layers |= {label: each.record for label, each in layers.items()}
    routed = [label for label, module in found.items() if chooses_experts(module)]
    run = InferenceRun(routed, layers, min(path_length, sizes[1]), sizes[0], running.one_link is None)
    stack.callback(run.close)
    for label, layer in layers.items():
        stack.enter_context(_installed(found[label], layer, run))
    running.instruments.append(run.watch)
    stack.callback(running.instruments.remove, run.watch)


def _sizes_of(profiles: Mapping[str, PathProfile], most: int) -> tuple[int, int]:
    """Return the number of experts and the length of paths of all profiles.

    Args:
        profiles: label -> profile.
        most: the largest number of experts of a layer.

    Raises:
        ValueError: the profiles differ in them, or have fewer experts than a layer.
    """
    sizes = {(each.num_experts, each.path_length) for each in profiles.values()}
    if len(sizes) > 1 or any(num_experts < most for num_experts, _ in sizes):
        raise ValueError(f"profiles of (experts, path_length) {sorted(sizes)}: must all be of the same, {most} or more")
    return sizes.pop() if sizes else (most, 0)


def _profiles_of(running: LayerRuntime) -> dict[str, PathProfile]:
    """Return label -> the path profile that all ranks have counted in training. Collective over all ranks of the job.

    It runs layer by layer, so a rank holds at most one profile for each rank at a time.
    """
    watching = (getattr(each, "__self__", None) for each in running.instruments)
    profiler = next((each for each in watching if isinstance(each, PathProfiler)), None)
    merged = {}
    for label, own in ({} if profiler is None else profiler.profiles()).items():
        merged[label] = PathProfile.merged(map(PathProfile.from_arrays, on_every_rank(own.as_arrays())))
    return merged


@contextmanager
def _installed(module: FSMoEExperts | FSMoELayer, layer: InferenceLayer, run: InferenceRun) -> Iterator[None]:
    """Run a layer's calls by expert tables inside the block."""
    state: Any = module.fsmoe
    before = state.placed, state.parts
    state.placed, state.parts = layer, replace(state.parts, dispatch="unpadded")
    hook = module.register_forward_hook(run.after)
    try:
        yield
    finally:
        hook.remove()
        state.placed, state.parts = before


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode inside the block, and restore the mode of each module afterwards."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was_training in training.items():
            module.training = was_training


# ---- Decides which layers have experts that come and go in inference, and finds memory for their weights
#
# Letters: E experts, G ranks of an EP group.


@dataclass(frozen=True)
class LayerToCache:
    """Represents a layer that will run with an expert cache."""

    module: FSMoEExperts | FSMoELayer
    form: ExpertForm
    placement: ExpertPlacement
    """Where experts are at home."""
    most: int
    """The most experts that a rank holds."""

    @classmethod
    def of(cls, module: FSMoEExperts | FSMoELayer, options: Options) -> LayerToCache:
        """Return the data of a layer."""
        state: Any = module.fsmoe
        num_ranks, num_local = module.ep_size, module.num_local_experts
        at_start = ExpertPlacement.at_start(num_ranks * num_local, num_ranks)
        placement = at_start if state.placed is None else state.placed.placement
        is_stacked = isinstance(module, FSMoEExperts)
        form = form_of_module(module) if is_stacked else form_of_set(list(module.experts.deepspeed_experts), state.path)
        # As many as ranks_of_experts gives to one.
        most = min(placement.num_experts, max(options.most_per_rank, 2 * num_local))
        return cls(module, form, placement, most)

    def layer(self, memory: ExpertCacheMemory, options: Options, profile: PathProfile | None) -> InferenceLayer:
        """Return the layer with its weights in this memory. Collective over the ranks that share the experts."""
        state: Any = self.module.fsmoe
        for parameter in self.form.parameters:
            if isinstance(parameter, nn.Parameter):
                wait_for(parameter)
        block, homes = block_of(state.groups), tuple(map(tuple, self.placement.by_rank.tolist()))
        with gathered(self.form.parameters if memory.stacks else ()):
            held = make_expert_cache(self.form, homes, block, memory)
        of_layer = state.label, homes, block, state.order.ops, held, state.path
        return InferenceLayer(*of_layer, options, profile)


def allocate_expert_memory(
    layers: Mapping[str, LayerToCache], weights: Where
) -> tuple[Where, dict[str, ExpertCacheMemory]]:
    """Return the source of weights, and label -> memory for them. Collective over all ranks of the job.

    The source is the primary ranks where the host memory of any rank is insufficient for all weights.

    Raises:
        MemoryError: on every rank, if the memory of any rank is insufficient for its expert cache.
    """
    ways: tuple[Where, ...] = ("host", "home") if weights == "host" else ("home",)
    why = ""
    for where in ways:
        rooms: dict[str, ExpertCacheMemory] = {}
        # All look before any takes.
        why = _first_problem(_lacking(layers, where))
        if not why:
            problem = ""
            try:
                rooms = {
                    label: ExpertCacheMemory.made(each.form, each.placement.num_experts, each.most, where)
                    for label, each in layers.items()
                }
            except (RuntimeError, MemoryError) as error:
                problem = f"{type(error).__name__}: {error}"
            why = _first_problem(problem)
        if not why:
            return where, rooms
        rooms.clear()
        give_back_host_memory()
        if where != ways[-1]:
            log_on_rank_0(
                f"ds_fsmoe.inference fetches weights from ranks ({why})",
                logging.WARNING,
                "Not every host has memory for all experts, so weights come from the ranks that own them",
            )
    raise MemoryError(
        f"ds_fsmoe.inference: not enough memory for experts: {why}; a smaller most_per_rank may need less"
    )


def _first_problem(own: str) -> str:
    """Return the problem of the first rank that has one; empty if no rank has. Collective."""
    return next((f"rank {rank}: {each}" for rank, each in enumerate(on_every_rank(own)) if each), "")


def _lacking(layers: Mapping[str, LayerToCache], where: Where) -> str:
    """Return which memory of this rank is insufficient, in words; empty if all suffices."""
    device = next((each.form.device for each in layers.values()), torch.device("cpu"))
    of_layers = [
        ExpertCacheMemory.bytes_of(each.form, each.placement.num_experts, each.most, where) for each in layers.values()
    ]
    on_host, on_device = (sum(each) for each in zip((0, 0), *of_layers, strict=True))
    if device.type == "cpu":
        on_host, on_device = on_host + on_device, 0
    wanted = {"the host's": (on_host, free_bytes(torch.device("cpu")))}
    if device.type == "cuda":
        # What torch keeps for later is free, too.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        wanted["the device's"] = on_device, free_bytes(device) + kept
    for whose, (needed, free) in wanted.items():
        if needed > free:
            return f"{needed / 2**20:,.0f} MiB of {whose} memory are needed, {free / 2**20:,.0f} are free"
    return ""


def left_by_any(found: Mapping[str, FSMoEExperts | FSMoELayer]) -> dict[str, str]:
    """Return label -> reason of the layers that any rank cannot run with an expert cache. Collective over all ranks.

    Reasons may differ by rank, such as a hook on one of them. All ranks have to run a layer in the same form.
    """
    of_ranks = on_every_rank({label: why_left(module) for label, module in found.items()})
    left = {}
    for label in found:
        reasons = {rank: why for rank, each in enumerate(of_ranks) if (why := each.get(label)) is not None}
        if reasons:
            first = min(reasons)
            left[label] = reasons[first] if len(reasons) == len(of_ranks) else f"on rank {first} {reasons[first]}"
    return left


def why_left(module: FSMoEExperts | FSMoELayer) -> str | None:
    """Return the reason against an expert cache for a layer, in words; ``None`` if there is none.

    Args:
        module: a converted layer that has its groups.
    """
    state = module.fsmoe
    if state.groups is None or state.pipeline is None:
        return "its process groups do not exist yet"
    if (reason := obstacle_to_placement(module)) is not None:
        return reason
    if isinstance(module, FSMoEExperts):
        return "its experts have adapters" if next(adapters_of(module), None) is not None else None
    if (reason := module.why_called()) is not None:
        return reason
    if module.local_experts() is None:
        return "its experts are in a module of unknown type"
    if state.pipeline.collectives.exchange_rows is None:
        return "its all-to-all supports padded dispatch only"
    return None


def free_bytes(device: torch.device) -> float:
    """Return the free memory of a rank in bytes: of its device, or its share of the host's; infinite if unknown."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    found = {name: float(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return found.get("MemAvailable", math.inf) / max(1, ranks)
