# SPDX-License-Identifier: Apache-2.0
"""Stores the state that a rank continues with as plain data: its random generators and the plans of its engine.

``saving`` writes it and ``checkpoints`` reads it. A restored run continues its random numbers, and skips measuring. The
contents of each message decide the order in which numbers are summed: a run with other plans has other last bits.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ds_fsmoe import registry
from ds_fsmoe.checkpoint_files.reading import read_file
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.config.blocks import PipelineDegreeBlock
from ds_fsmoe.planning.block import BlockPlan, LayerPlan
from ds_fsmoe.planning.decide.gradient_plan import GradientPlan, GradientSlice
from ds_fsmoe.planning.expert_placement import ExpertPlacement
from ds_fsmoe.planning.lina.popularity import PathProfile
from ds_fsmoe.planning.workload import ALLTOALLS_OF_BEFORE

if TYPE_CHECKING:
    from ds_fsmoe.engine.state import FSMoEState
    from ds_fsmoe.layer.state import ConvertedLayer
    from ds_fsmoe.telemetry.paths import PathProfiler

STATE_FORMAT = 1
"""The version of the format of a rank's file."""

_MIN_MAX_CHUNKS = 64
"""The number of chunks that any job may have, whatever it would choose itself."""
_MOST_MESSAGES = 100_000


def random_states() -> dict[str, Any]:
    """Return the states of Python, numpy, torch, and the GPUs that this process uses."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "name": name,
            "keys": torch.from_numpy(keys.astype(np.int64)),
            "position": position,
            "has_gauss": has_gauss,
            "cached": cached,
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Restore the states that :func:`random_states` returned.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: the states have another form.
    """
    python, numpy = states["python"], states["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def check_random_states(states: dict[str, Any]) -> None:
    """Check that :func:`set_random_states` would succeed; every generator keeps its state.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: the generators refuse them.
    """
    before = random_states()
    try:
        set_random_states(states)
    finally:
        set_random_states(before)


def is_settled(state: FSMoEState) -> bool:
    """Return True if there are plans to keep.

    The autotuner, if there is one, has then chosen and tried them, and layers that are chunked by their bytes are
    chunked.
    """
    tuner = state.autotune
    if state.micro_ops is not None and state.micro_ops.is_wanted:
        return False
    return tuner is None or tuner.is_waiting or tuner.is_settled


def plans_of(state: FSMoEState) -> dict[str, Any]:
    """Return the plans of layers and gradients, which are the same on every rank of a stage."""
    is_chosen = state.has_tuned_plans or (state.autotune is not None and state.autotune.has_chosen)
    layers = {}
    for label, layer in state.inner_layers.items():
        pipeline = layer.pipeline
        layers[label] = {
            "forward": asdict(pipeline.forward.block),
            "backward": asdict(pipeline.backward.block),
            "reduces": [list(each) for each in pipeline.collectives.reduces],
            "alltoall": layer.fsmoe.plan.alltoall if is_chosen else None,
            "is_unpadded": layer.fsmoe.is_unpadded_by_choice,
            "is_two_batch": layer.fsmoe.plan.is_two_batch,
        }
    reducer = None if state.reduction is None else state.reduction.reducer
    gradients = None
    if reducer is not None and reducer.next_plan is not None:
        gradients = reducer.memory() | {"plan": asdict(reducer.next_plan)}
    watch = state.placement_watch
    placement = None if state.placement is None else {"layers": state.placement.as_data()}
    if placement is not None and watch is not None:
        placement |= watch.as_data()
    # Plans of before the autotuner has begun do not keep it from beginning.
    plans = {"layers": layers, "gradients": gradients, "placement": placement, "is_tuned": is_chosen}
    return plans | {"asked": _asked(state)}


def _asked(state: FSMoEState) -> dict[str, Any]:
    """Return the options that decide which plans run. What only the job has turned off is as it was asked for."""
    block = state.block
    return {
        "schedule": block.schedule,
        "num_chunks": block.pipeline_degree.model_dump(),
        "alltoall": block.alltoall,
        "gradient_partition": block.gradient_partition.model_dump(),
        "overlap": block.overlap,
        "two_batch_overlap": block.split_batch,
        "deterministic": block.deterministic,
        "autotune": bool(block.autotune.enabled) or state.why_untuned is not None,
    }


@dataclass(frozen=True)
class ReadPlans:
    """Holds the plans that were read from a checkpoint and can be run."""

    layers: Mapping[str, LayerPlan]
    """Maps each layer's label -> its plan."""
    gradients: tuple[GradientPlan, Any, Any] | None
    placements: Mapping[str, ExpertPlacement] | None = None
    """Maps each layer's label -> where its experts were; ``None``: they could not move then, or cannot now."""
    is_tuned: bool = True
    """Tells whether the autotuner has chosen them."""
    watched: Mapping[str, Any] | None = None
    """The counts that the next decision about them is to take into account."""


def read_plans(state: FSMoEState, plans: Mapping[str, Any]) -> ReadPlans:
    """Turn the result of :func:`plans_of` into plans again.

    Raises:
        KeyError, TypeError, ValueError: they have another form, or belong to another model.
    """
    inner, layers, gradients = state.inner_layers, plans["layers"], plans["gradients"]
    if set(layers) != inner.keys():
        raise ValueError(f"plans of layers {sorted(layers)}: the model has {sorted(inner)}")
    most = _most_chunks(state.block.pipeline_degree)
    for label, each in layers.items():
        chunks = max(*(_degree(each[phase]) for phase in ("forward", "backward")))
        if chunks > most:
            raise ValueError(f"a plan of {chunks} chunks for {label}: fsmoe.num_chunks allows {most}")
        alltoall = ALLTOALLS_OF_BEFORE.get(each["alltoall"], each["alltoall"])
        if alltoall is not None and alltoall not in registry.known("alltoall"):
            raise ValueError(f"an all-to-all {each['alltoall']!r}")
    read = None
    if gradients is not None:
        read = _gradient_plan(gradients["plan"]), gradients["windows"], gradients["ready_at"]
    placements, watched = None, plans.get("placement")
    if state.placement is not None and watched is not None:
        placements = state.placement.read_data(watched["layers"])
        if state.placement_watch is not None:
            state.placement_watch.check_data(watched)
    of_layers = {label: _layer(layers[label], layer) for label, layer in inner.items()}
    # Older files do not say so: there only what was measured has an all-to-all.
    is_tuned = plans.get("is_tuned", any(each["alltoall"] is not None for each in layers.values()))
    return ReadPlans(of_layers, read, placements, is_tuned is True, watched)


@dataclass(frozen=True)
class RankState:
    """Holds the random states and the plans of one rank."""

    random: dict[str, Any] | None
    """The random states; ``None``: they are not for this layout."""
    plans: ReadPlans | None
    """The plans; ``None``: they were not settled then, or are not for this layout."""
    paths: Mapping[str, PathProfile] | None = None
    """Which experts had followed which, by layer; ``None``: nobody counted then, or counts now."""
    changed: str = ""
    """The first option that is not what it was when plans were saved; "": none."""


def read_rank_state(file: Path, state: FSMoEState, plans_fit: bool) -> RankState:
    """Read and check a rank's file, before anything in the engine is changed.

    Args:
        file: the file of this rank.
        state: the state of the engine that will continue with it.
        plans_fit: whether the layout is the one of the plans.

    Raises:
        CheckpointError: the file has another version.
        Exception: the file is damaged in another way.
    """
    loaded = read_file(file)
    if loaded["format"] != STATE_FORMAT:
        raise CheckpointError(f"{file} has format {loaded['format']!r}: this version reads {STATE_FORMAT}")
    check_random_states(loaded["random"])
    plans = json.loads(loaded["plans"])
    counted, paths, asked = loaded.get("paths"), state.paths, _asked(state)
    # Older files do not say what was asked for.
    of_file = {} if plans is None else plans.get("asked", {})
    return RankState(
        loaded["random"],
        read_plans(state, plans) if plans is not None and plans_fit else None,
        None if counted is None or paths is None else paths.read_state(counted),
        next((name for name, value in asked.items() if of_file.get(name, value) != value), ""),
    )


def read_paths(files: Iterable[Path], profiler: PathProfiler) -> dict[str, PathProfile]:
    """Read the path profiles of ranks and add them up: label -> profile, empty where nothing was counted.

    Args:
        files: the files of these ranks.
        profiler: the profiler of this job.

    Raises:
        Exception: a file is damaged.
    """
    states = [state for file in files if (state := read_file(file).get("paths")) is not None]
    none = {
        label: PathProfile(each.num_experts, each.path_length, each.most_pairs)
        for label, each in profiler.profiles().items()
    }
    each_read = [none, *map(profiler.read_state, states)]
    return {label: PathProfile.merged(read[label] for read in each_read) for label in none}


def _most_chunks(allowed: PipelineDegreeBlock) -> int:
    """Return the largest number of chunks that a plan may have; to write a schedule of very many would take hours."""
    return max(_MIN_MAX_CHUNKS, *allowed.most)


def go_on_with(state: FSMoEState, plans: ReadPlans, *, places_alone: bool) -> None:
    """Use plans from now on, without measuring. Collective; called before the next forward.

    Args:
        state: the state of the engine.
        plans: the plans.
        places_alone: whether to use where experts are, and nothing else; the same on every rank.

    Raises:
        DisagreementError: on every rank, if ranks have different plans.
    """
    if state.stage_group is not None and not places_alone:
        # A stage has plans of its own, and all ranks of the job make the communicators of all stages.
        state.running.alltoalls_to_compare()
    for label, layer in state.inner_layers.items() if not places_alone else ():
        layer.fsmoe.apply(plans.layers[label])
    if state.placement is not None and plans.placements is not None:
        state.placement.go_to(plans.placements)
        state.placement.was_read = True
        if state.placement_watch is not None and plans.watched is not None:
            state.placement_watch.forget()
            state.placement_watch.go_on_with(plans.watched)
    if places_alone:
        return state.plans_changed()
    state.has_tuned_plans = plans.is_tuned
    if state.autotune is not None and plans.is_tuned:
        state.autotune.need_not_run()
    if state.micro_ops is not None:
        state.micro_ops.need_not_run()
    if plans.gradients is not None and state.reduction is not None:
        state.reduction.go_on_with(*plans.gradients)
    state.plans_changed()


def _degree(facts: Mapping[str, Any]) -> int:
    """Return the number of chunks; older plans have a share for each chunk instead (unequal shares brought no gain)."""
    return len(facts["shares"]) if "shares" in facts else facts["degree"]


def _layer(facts: Mapping[str, Any], layer: ConvertedLayer) -> LayerPlan:
    reduces = tuple((float(size), str(name)) for size, name in facts["reduces"])
    # Where nothing was measured there is no all-to-all that was chosen.
    alltoall = ALLTOALLS_OF_BEFORE.get(facts["alltoall"], facts["alltoall"])
    state, phases = layer.fsmoe, (_block(facts["forward"]), _block(facts["backward"]))
    # A config that has changed since then may not allow it.
    is_unpadded = facts.get("is_unpadded", False) is True and state.may_be_unpadded(layer.gate)
    is_two_batch = facts.get("is_two_batch", state.plan.is_two_batch) is True
    return LayerPlan(*phases, alltoall or state.plan.alltoall, reduces, is_two_batch, is_unpadded=is_unpadded)


def _block(facts: Mapping[str, Any]) -> BlockPlan:
    if facts["moe_slices"] or facts["dense_slices"]:
        raise ValueError("slices of gradients in the plan of a layer that is run")
    degree = _degree(facts)
    if type(degree) is not int:
        raise ValueError(f"num_chunks = {degree!r}: must be a number of chunks")
    # 0.2.0 also wrote late_dw, weight gradients that were put off, and nothing of conversions.
    return BlockPlan(degree, facts["links"], conversions=facts.get("conversions", "links"))


def _gradient_plan(facts: Mapping[str, Any]) -> GradientPlan:
    def parts(name: str) -> tuple[tuple[GradientSlice, ...], ...]:
        return tuple(tuple(GradientSlice(**each) for each in parcels) for parcels in facts[name])

    two_levels = tuple(map(bool, facts.get("two_levels", ())))
    plan = GradientPlan(parts("moe"), parts("dense"), tuple(map(int, facts["sizes"])), two_levels)
    messages = sum(map(len, plan.parts))
    if messages > _MOST_MESSAGES:
        raise ValueError(f"gradients in {messages} messages: at most {_MOST_MESSAGES} are read")
    return plan
