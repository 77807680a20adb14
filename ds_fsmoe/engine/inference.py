# SPDX-License-Identifier: Apache-2.0
"""Opens the door to inference with experts that come and go: ``ds_fsmoe.inference``."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import nn

from ds_fsmoe.components.routing import Routing, kind_of
from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.distributed.partitioned import gathered
from ds_fsmoe.engine.convert_adapters import adapters_of
from ds_fsmoe.gradients.arriving import wait_for
from ds_fsmoe.layer.expert_forms import ExpertForm, SetForm, StackedForm
from ds_fsmoe.layer.experts_layer import FSMoEExperts
from ds_fsmoe.layer.held_experts import LateExperts, Where, held_experts
from ds_fsmoe.layer.inference import InferenceLayer, InferenceRun, LayerRecord, Options
from ds_fsmoe.layer.runtime import LayerRuntime, block_of
from ds_fsmoe.layer.state import LayerState
from ds_fsmoe.layer.stock_layer import FSMoELayer
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.planning.popularity import PathProfile
from ds_fsmoe.telemetry.paths import PathProfiler


@dataclass
class Inference:
    """Says what happens in the layers meanwhile."""

    layers: dict[str, LayerRecord] = field(default_factory=dict)
    """Label -> what happened, of the layers whose experts come and go."""
    left: dict[str, str] = field(default_factory=dict)
    """Label -> the reason why a layer runs as it always does."""

    def _sum(self, name: str) -> int:
        return sum(getattr(each, name) for each in self.layers.values())

    @property
    def accuracy(self) -> float | None:
        """The share of estimates with the same experts on top as the gate's; ``None``: none was compared."""
        return self._sum("accurate") / self._sum("compared") if self._sum("compared") else None

    @property
    def second_phases(self) -> float:
        """The share of calls whose table was made after the gate."""
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
    """Run a trained model's MoE layers with popular experts on several ranks and unpopular ones packed, as Lina does.

    Collective to begin, and so is every forward meanwhile, as it is anyhow. The model is in evaluation, without
    gradients; ``model.generate`` works. Afterwards all is as it was before, also after an error.

    Args:
        engine: the engine that ``initialize`` has returned, or its model.
        path_length: the layers of a path by which popularity is estimated, at most as many as were profiled.
        most_per_rank: the most experts of a rank, raised to twice as many as are at home there.
        estimate: whether popularity is estimated ahead of a gate, from what ``fsmoe.placement.profile_paths`` has
            counted in training; else experts are scheduled by what the gate decides.
        second_phase: whether an estimate is corrected after the gate, where other experts are on top.
        weights: ``"host"``: the weights of all experts are gathered once, into the memory of each rank's host;
            ``"home"``: those that change are fetched from the ranks that have them, call by call.
        profiles: label -> profile, the same on every rank; those of the engine unless given.

    Raises:
        ValueError: an option that cannot be, profiles of other layers, or neither an estimate nor a second phase.
    """
    if path_length < 0 or most_per_rank < 1 or weights not in get_args(Where):
        raise ValueError(
            f"path_length = {path_length}, most_per_rank = {most_per_rank}, weights = {weights!r}: must be at least 0 "
            f"and 1, and one of {', '.join(get_args(Where))}"
        )
    if not estimate and not second_phase:
        raise ValueError("estimate = False, second_phase = False: one of them must be on, or nothing is known of loads")
    model = getattr(engine, "module", engine)
    found = {
        module.fsmoe.label: module
        for module in model.modules()
        if isinstance(getattr(module, "fsmoe", None), LayerState) and module.fsmoe.running is not None
    }
    record = Inference()
    with ExitStack() as stack:
        stack.enter_context(_evaluating(model))
        stack.enter_context(torch.no_grad())
        if not found:
            log_on_rank_0("ds_fsmoe.inference: the model has no MoE layer of ours", logging.WARNING)
            yield record
            return
        running = next(iter(found.values())).fsmoe.running
        if profiles is None:
            profiles = _profiles_of(running) if estimate else {}
        if estimate and not any(each.num_counted for each in profiles.values()):
            reason = "no paths of tokens were counted in training (fsmoe.placement.profile_paths)"
            if not second_phase:
                raise ValueError(f"second_phase = False: nothing can be estimated, as {reason}")
            log_on_rank_0(f"ds_fsmoe.inference: experts are scheduled after each gate, as {reason}", logging.WARNING)
            profiles = {}
        options = Options(most_per_rank, second_phase)
        layers = {}
        for label, module in found.items():
            why = why_left(module)
            if why is not None:
                record.left[label] = why
                continue
            layers[label] = _inference_layer(module, weights, options, profiles.get(label) if estimate else None)
            record.layers[label] = layers[label].record
        routed = [label for label, module in found.items() if _chooses_experts(module)]
        sizes = _sizes_of(profiles, layers.values())
        run = InferenceRun(routed, layers, min(path_length, sizes[1]), sizes[0], running.one_link is None)
        for label, layer in layers.items():
            stack.enter_context(_installed(found[label], layer, run))
        running.instruments.append(run.watch)
        stack.callback(running.instruments.remove, run.watch)
        yield record


def why_left(module: FSMoEExperts | FSMoELayer) -> str | None:
    """Return why the experts of a layer stay where they are in inference, in words; ``None`` where they come and go.

    Args:
        module: a converted layer whose groups are there.
    """
    state = module.fsmoe
    if state.groups is None or state.pipeline is None:
        return "its groups were not made"
    if module.ep_size == 1 or state.groups.block_group is None:
        return "one rank has all of its experts"
    if state.groups.esp_group is not None or state.groups.layout.tensor_parallel_experts:
        return "its experts are sharded over ranks"
    if state.duplicates is not None:
        return "its tensor-parallel ranks have the same tokens"
    if isinstance(module, FSMoEExperts):
        return "its experts have adapters" if next(adapters_of(module), None) is not None else None
    if not _chooses_experts(module):
        return f"{type(module.gate).__name__} lets experts choose tokens"
    if (reason := module.why_called()) is not None:
        return reason
    if module.local_experts() is None:
        return "its experts are in a module that is not known"
    if state.pipeline.collectives.exchange_rows is None:
        return "its all-to-all is for slots only"
    return None


def _chooses_experts(module: FSMoEExperts | FSMoELayer) -> bool:
    return isinstance(module, FSMoEExperts) or issubclass(kind_of(module.gate), Routing)


def _sizes_of(profiles: Mapping[str, PathProfile], layers: Iterable[InferenceLayer]) -> tuple[int, int]:
    """Return the number of experts and the length of paths that all profiles are for.

    Raises:
        ValueError: they are for several, or for fewer experts than a layer has.
    """
    sizes = {(each.num_experts, each.path_length) for each in profiles.values()}
    most = max((each.num_experts for each in layers), default=1)
    if len(sizes) > 1 or any(num_experts < most for num_experts, _ in sizes):
        raise ValueError(f"profiles of (experts, path_length) {sorted(sizes)}: must all be of the same, {most} or more")
    return sizes.pop() if sizes else (most, 0)


def _profiles_of(running: LayerRuntime) -> dict[str, PathProfile]:
    """Return label -> what all ranks have counted in training. Collective over all ranks of the job."""
    watching = (getattr(each, "__self__", None) for each in running.instruments)
    profiler = next((each for each in watching if isinstance(each, PathProfiler)), None)
    own = {} if profiler is None else {label: each.as_arrays() for label, each in profiler.profiles().items()}
    of_ranks = [
        {label: PathProfile.from_arrays(each) for label, each in profiles.items()} for profiles in on_every_rank(own)
    ]
    return {label: PathProfile.merged(each[label] for each in of_ranks if label in each) for label in own}


def _inference_layer(
    module: FSMoEExperts | FSMoELayer, weights: Where, options: Options, profile: PathProfile | None
) -> InferenceLayer:
    """Return a layer with experts that come and go. Collective over the ranks that share them."""
    state = module.fsmoe
    assert state.groups is not None
    assert state.running is not None
    num_ranks, num_local = module.ep_size, module.num_local_experts
    homes = tuple(tuple(range(rank * num_local, (rank + 1) * num_local)) for rank in range(num_ranks))
    if state.placed is not None:
        placement = state.placed.placement
        homes = tuple(tuple(each[: placement.num_local]) for each in placement.by_rank.tolist())
    form: ExpertForm
    if isinstance(module, FSMoEExperts):
        form = StackedForm(module)
    else:
        form = SetForm(list(module.experts.deepspeed_experts), state.path)
    for parameter in form.parameters:
        if isinstance(parameter, nn.Parameter):
            wait_for(parameter)
    block = block_of(state.groups)
    with gathered(form.parameters if weights == "host" else ()):
        held = held_experts(form, homes, block, weights)
    late = LateExperts(held, state.path)
    return InferenceLayer(state.label, homes, block, state.order.ops, held, late, options, profile)


@contextmanager
def _installed(module: FSMoEExperts | FSMoELayer, layer: InferenceLayer, run: InferenceRun) -> Iterator[None]:
    """Let a layer's calls go by tables meanwhile."""
    state: Any = module.fsmoe
    before = state.placed, state.replicas, state.parts
    state.placed, state.replicas, state.parts = layer, None, replace(state.parts, dispatch="rows")
    hook = module.register_forward_hook(run.after)
    try:
        yield
    finally:
        hook.remove()
        state.placed, state.replicas, state.parts = before


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Have a model in evaluation meanwhile, and each of its modules as before afterwards."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was_training in training.items():
            module.training = was_training
