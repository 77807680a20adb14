# SPDX-License-Identifier: Apache-2.0
"""Lists layouts of a training that its config can choose, with what each changes in the config. ``ds_fsmoe tune`` tries
them.

A layout is what a job cannot change while it runs: over how many ranks experts are spread, how many share the width of
one, the ZeRO stage and the micro-batch. Everything else the autotuner chooses in the job itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_fsmoe.files.runs import Run
from ds_fsmoe.offline.commands.training_command import TrainingCommand
from ds_fsmoe.offline.plan.from_trace import calibrated, what_if_on
from ds_fsmoe.planning.job.other_ranks import OtherRanks
from ds_fsmoe.planning.workload import NODE_DEDUPLICATED, AllToAll

Change = tuple[tuple[str, ...], Any]
"""The path of a field in the config, and its value."""
ESP_NAMES = "expert_tensor_parallel_size", "esp_size"
MICRO_BATCH, ACCUMULATION = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
FAR = 4.0
"""How many times as long as the fastest a step may be predicted to take for its layout to be tried."""
BEHIND = 1.3
"""How many times as long as the fastest took a step may be predicted to take for its layout to be tried, unless its
sizes were asked for. Predictions have been off by up to a fifth, at ZeRO 3 by up to a third."""
_LAST_OF_ESP = 2
"""The last ZeRO stage at which ranks may share an expert."""
_ALLTOALLS: tuple[AllToAll | None, ...] = (None, "flat", NODE_DEDUPLICATED)


@dataclass(frozen=True)
class ExpertLayout:
    """Holds the sizes of a layout."""

    ep_size: int
    esp_size: int
    zero_stage: int
    micro_batch: int | None = None
    """``None``: the config's own."""


@dataclass(frozen=True)
class AllowedSizes:
    """Holds the sizes that a user allows; ``None``: what :func:`layouts_of` finds."""

    ep_sizes: Sequence[int] | None = None
    esp_sizes: Sequence[int] | None = None
    zero_stages: Sequence[int] = ()
    """Empty: the config's own, as for the micro-batches."""
    micro_batches: Sequence[int | None] = ()

    def names(self, layout: ExpertLayout, own: ExpertLayout) -> bool:
        """Return True if the user asked for a layout's experts to lie so, and not as they do."""
        is_shared_anew = layout.esp_size != own.esp_size and layout.esp_size in (self.esp_sizes or ())
        return is_shared_anew or layout.ep_size in (self.ep_sizes or ())


@dataclass(frozen=True)
class Job:
    """Holds what a first run says about a job."""

    ranks: int
    """Of the job, or of one of its pipeline stages."""
    experts: tuple[int, ...]
    """The number of each layer."""
    own_ep_size: bool
    """Whether the layers are DeepSpeed's, whose size is the script's."""
    layout: ExpertLayout
    """As the config is."""

    @classmethod
    def of(cls, run: Run) -> Job:
        """Return the job of a recorded run.

        Raises:
            ValueError: the model has no MoE layers, or layers of different layouts.
        """
        facts = run.facts
        layers = list(facts.get("layers", {}).values())
        sizes = {(each.get("ep_size", 1), bool(each.get("own_ep_size"))) for each in layers}
        if len(sizes) != 1:
            found = "has no MoE layers" if not layers else "has MoE layers with different ep_sizes"
            raise ValueError(f"{run.folder}: the model {found}: there is no layout to choose")
        ((ep_size, own_ep_size),) = sizes
        block = facts.get("block", {})
        esp_size = next((block[name] for name in ESP_NAMES if name in block), 1)
        kinds = run.measured.get("kinds") or [{}]
        stages = (kinds[0].get("groups") or {}).get("pp", 1)
        layout = ExpertLayout(ep_size, esp_size, facts.get("zero_stage", 0))
        experts = tuple(each["experts"] for each in layers)
        return cls(facts.get("world_size", 1) // stages, experts, own_ep_size, layout)

    def fits(self, layout: ExpertLayout) -> bool:
        """Return True if the ranks and the experts can be divided so."""
        is_divided = self.ranks % (layout.ep_size * layout.esp_size) == 0
        return is_divided and not any(each % layout.ep_size for each in self.experts)


def layouts_of(job: Job, asked: AllowedSizes) -> list[ExpertLayout]:
    """Return the layouts that are allowed and possible, without the present one.

    Raises:
        ValueError: a size that was asked for by name is impossible.
    """
    own, ranks = job.layout, range(1, job.ranks + 1)
    if job.own_ep_size and asked.ep_sizes is not None:
        raise ValueError(
            "--ep-sizes: these layers are deepspeed.moe.layer.MoE, whose ep_size is an argument in the script; leave "
            "it out, and change --expert-tensor-parallel-sizes"
        )
    esp_sizes = asked.esp_sizes or (ranks if job.own_ep_size else (own.esp_size,))
    ep_sizes = asked.ep_sizes or ((own.ep_size,) if job.own_ep_size else ranks)
    stages = asked.zero_stages or (own.zero_stage,)
    for flag, sizes, name in (
        ("--ep-sizes", asked.ep_sizes, "ep_size"),
        ("--expert-tensor-parallel-sizes", asked.esp_sizes, "esp_size"),
    ):
        others = {"esp_size": 1} if name == "ep_size" else {"ep_size": own.ep_size if job.own_ep_size else 1}
        for each in sizes or ():
            if not job.fits(replace(own, **others | {name: each})):
                experts = ", ".join(map(str, sorted(set(job.experts))))
                raise ValueError(
                    f"{flag} {each}: must divide the {job.ranks} ranks and the {experts} experts of a layer"
                )
    found = [
        ExpertLayout(ep_size, esp_size, stage, micro_batch)
        for stage in stages
        for micro_batch in asked.micro_batches or (None,)
        for esp_size in esp_sizes
        for ep_size in ep_sizes
    ]
    fitting = [each for each in found if job.fits(each) and (each.esp_size == 1 or each.zero_stage <= _LAST_OF_ESP)]
    return [each for each in fitting if each != own]


def predicted_ms(folder: Path, job: Job, layouts: Iterable[ExpertLayout]) -> dict[tuple[int, int], float]:
    """Predict a step with experts over other ranks from the measurements of a run.

    Args:
        folder: the folder of the run.
        job: the job.
        layouts: the layouts.

    Returns:
        (EP size, ESP size) -> ms, with the optimizer; empty where the run has not measured what that takes.
    """
    found: dict[tuple[int, int], float] = {}
    try:
        run = calibrated(folder)
        # What the others are predicted from.
        found[job.layout.ep_size, job.layout.esp_size] = run.times.step_ms
    except ValueError:
        return {}
    for ep, esp in dict.fromkeys((each.ep_size, each.esp_size) for each in layouts):
        ways_ms = [found.get((ep, esp), math.inf)]
        for alltoall in _ALLTOALLS if (ep, esp) not in found else ():
            with suppress(ValueError):  # these ranks cannot have it, or the cluster lacks a number
                what_if = what_if_on(run, OtherRanks(ep=ep, esp=esp, alltoall=alltoall))
                ways_ms.append(run.step_of(what_if.by_schedule(what_if.job.schedule)))
        if math.isfinite(min(ways_ms)):
            found[ep, esp] = min(ways_ms)
    return found


def in_order(
    layouts: Sequence[ExpertLayout], job: Job, known_ms: Mapping[tuple[int, int], float]
) -> list[ExpertLayout]:
    """Return layouts, those that are predicted to be fastest first; those without a prediction follow, the nearest to
    the present one first. Other ZeRO stages and micro-batches have no prediction of their own, and come behind."""

    def key(layout: ExpertLayout) -> tuple[float, ...]:
        own = job.layout
        ms = known_ms.get((layout.ep_size, layout.esp_size), math.inf)
        ep, esp = (abs(math.log(each)) for each in (layout.ep_size / own.ep_size, layout.esp_size / own.esp_size))
        others = (layout.zero_stage != own.zero_stage) + (layout.micro_batch is not None)
        return others, ms, ep + esp, abs(layout.zero_stage - own.zero_stage), layout.micro_batch or 0, -layout.ep_size

    return sorted(layouts, key=key)


# ---- what a layout changes in the config


def changes_of(layout: ExpertLayout, job: Job, config: Mapping[str, Any]) -> list[Change]:
    """Return the fields of a config that a layout sets to another value."""
    block, own = config.get("fsmoe", {}), job.layout
    esp_name = next((each for each in ESP_NAMES if each in block), ESP_NAMES[0])
    found: list[Change] = [] if block.get("enabled") else [(("fsmoe", "enabled"), True)]
    # Where it is "auto", another stage or batch could have another size chosen.
    if not job.own_ep_size and layout.ep_size != block.get("ep_size"):
        found.append((("fsmoe", "ep_size"), layout.ep_size))
    if layout.esp_size != own.esp_size:
        found.append((("fsmoe", esp_name), layout.esp_size))
    if layout.zero_stage != own.zero_stage:
        found.append((("zero_optimization", "stage"), layout.zero_stage))
    if layout.micro_batch is not None:
        of_rank = config[MICRO_BATCH] * config.get(ACCUMULATION, 1)
        found.append(((MICRO_BATCH,), layout.micro_batch))
        found.append(((ACCUMULATION,), of_rank // layout.micro_batch))
    return found


def words_of_changes(changes: Iterable[Change]) -> str:
    """Return changes in the words of the config."""
    return ", ".join(
        f"{path[-1] if path[0] == 'fsmoe' else '.'.join(path)} = {json.dumps(value)}" for path, value in changes
    )


def with_changes(subject: TrainingCommand, changes: Iterable[Change]) -> TrainingCommand:
    """Return a training command with changes in its config, and in those of its arguments that
    ``autotuning.arg_mappings`` names, as DeepSpeed's own autotuner does."""
    config = json.loads(json.dumps(subject.config))
    mapped = (config.get("autotuning") or {}).get("arg_mappings") or {}
    after = list(subject.after)
    before = list(subject.before)
    for path, value in changes:
        *blocks, name = path
        block = config
        for each in blocks:
            block = block.setdefault(each, {})
        block[name] = value
        option = mapped.get(".".join(path)) or mapped.get(name)
        if option:
            places = [_set_option(arguments, option, str(value)) for arguments in (before, after)]
            # One that the command leaves out has a default, so it is added, as DeepSpeed does.
            after += [] if any(places) else [option, str(value)]
    return replace(subject, config=config, before=before, after=after)


def _set_option(arguments: list[str], option: str, value: str) -> bool:
    """Set an option wherever it is among arguments; return whether it is."""
    is_there = False
    for place, each in enumerate(arguments):
        if each == option and place + 1 < len(arguments):
            arguments[place + 1], is_there = value, True
        elif each.startswith(f"{option}="):
            arguments[place], is_there = f"{option}={value}", True
    return is_there


def micro_batches_of(config: Mapping[str, Any], sizes: Sequence[int], of: str) -> list[int | None]:
    """Return micro-batches, ``None`` for the config's own; refuse those that would change the batch of a step.

    Args:
        config: the config.
        sizes: the micro-batches.
        of: the name of the config, for the error.

    Raises:
        ValueError: the config lacks a number, or a size does not divide the batch of a rank.
    """
    if not sizes:
        return []
    own, steps = config.get(MICRO_BATCH), config.get(ACCUMULATION, None if "train_batch_size" in config else 1)
    if not isinstance(own, int) or not isinstance(steps, int):
        raise ValueError(
            f"--micro-batch-sizes: {of}: {MICRO_BATCH} and {ACCUMULATION} must be numbers, so that the batch of a step "
            "can stay the same; write both"
        )
    for each in sizes:
        if own * steps % each:
            raise ValueError(
                f"--micro-batch-sizes {each}: must divide the {own * steps} samples of a rank and step in {of} "
                f"({MICRO_BATCH} {own} x {ACCUMULATION} {steps}); leave it out"
            )
    return [None if each == own else each for each in sizes]
