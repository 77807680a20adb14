# SPDX-License-Identifier: Apache-2.0
"""Prints in ``ds_fsmoe plan`` whether a model fits, the memory of a rank, and its change with ZeRO stage and EP
size.

If no ZeRO stage is given, the lowest one that fits is planned.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ds_fsmoe.offline.models.memory import LayoutMemory, Memory, largest_batch, memory_of, on_cards, other_memories
from ds_fsmoe.offline.models.training import GB, STAGES, Training
from ds_fsmoe.offline.plan.report import PlannedJob
from ds_fsmoe.terminal.tables import print_table


def print_memory(args: argparse.Namespace, job: PlannedJob) -> dict[str, Any]:
    """Print the memory that a rank needs; return it as plain data.

    Raises:
        ValueError: DeepSpeed or ds_fsmoe refuses the job, or --memory-gb is given without a whole model.
    """
    architecture, groups, memory_gb = job.model.architecture, job.groups, job.memory_gb
    if architecture is None or not job.predicts_memory:
        if args.memory_gb is not None:
            raise ValueError(f"--memory-gb = {args.memory_gb:g}: needs --model or --hf-config, and mp = 1")
        return {}
    training = _training(args, job, args.zero)
    memory = memory_of(architecture, groups, training)
    most = None if memory_gb is None else largest_batch(architecture, groups, training, memory_gb)
    _print_items(memory, training)
    if most is not None:
        print(f"largest micro-batch in {memory_gb:g} GB: {most or 'not even one sample fits'}")
    two_batch = None
    if args.two_batch and training.samples > 1:
        two_batch = memory_of(architecture, groups, replace(training, is_two_batch=True))
        print(f"two-batch overlap: {two_batch.total / GB:.2f} GB, at its fullest: {two_batch.peak.name}")
    choices = other_memories(architecture, groups, training, memory_gb)
    _print_choices(choices, job)
    cards = on_cards(architecture, training, memory_gb)
    _print_cards(cards)
    return {
        "memory": {
            "peak_bytes": round(memory.total),
            "host_bytes": round(memory.on_host),
            "moment": memory.peak.name,
            "items_bytes": {item: round(size) for item, size in memory.peak.items.items()},
            "largest_samples": most,
            "peak_bytes_in_halves": None if two_batch is None else round(two_batch.total),
            "choices": [
                {
                    "zero": each.zero,
                    "ep": each.groups.ep,
                    "esp": each.groups.esp,
                    "peak_bytes": round(each.memory.total),
                    "largest_samples": each.largest_batch,
                }
                for each in choices
            ],
            "cards": [
                {
                    "gpus": each.groups.world,
                    "zero": each.zero,
                    "ep": each.groups.ep,
                    "peak_bytes": round(each.memory.total),
                    "host_bytes": round(each.memory.on_host),
                    "largest_samples": each.largest_batch,
                }
                for each in cards
            ],
        }
    }


def _print_items(memory: Memory, training: Training) -> None:
    words = [f"ZeRO {training.zero}", training.dtype, training.optimizer]
    words += ["checkpointed"] * training.checkpointing + ["recompute"] * training.recompute
    words += [f"LoRA {training.lora} on {training.lora_targets}"] * bool(training.lora)
    words += ["states on the host"] * training.offload
    print(f"\nmemory of a rank: {', '.join(words)}; B = {training.samples}, L = {training.length}")
    rows = sorted(memory.peak.items.items(), key=lambda each: -each[1])
    table = [(item, f"{size / GB:.2f}", f"{100 * size / memory.total:.0f}%") for item, size in rows]
    table.append(("all", f"{memory.total / GB:.2f}", ""))
    print_table((f"at its fullest: {memory.peak.name}", "GB", "of all"), table)
    fullest: dict[str, float] = {}
    for moment in memory.moments:
        name = "backward of a block" if moment.name.startswith("backward of block") else moment.name
        fullest[name] = max(fullest.get(name, 0.0), moment.total)
    if memory.host:
        print(f"on the host: {memory.on_host / GB:.2f} GB a rank")
    if training.lora:
        print("times above are those of training all weights")
    print("moments: " + ", ".join(f"{name} {size / GB:.2f}" for name, size in fullest.items()))


def _print_choices(choices: list[LayoutMemory], job: PlannedJob) -> None:
    print(f"\non the same {job.groups.world} ranks, GB of a rank (<: as asked)")
    heads = ("ZeRO", "ep_size", "expert tensor parallel", "GB", "largest B", "fullest", "")
    rows = [
        (
            each.zero,
            each.groups.ep,
            each.groups.esp,
            f"{each.memory.total / GB:.1f}",
            "" if each.largest_batch is None else each.largest_batch,
            each.memory.peak.name,
            "<" * ((each.zero, each.groups) == (job.zero.stage, job.groups)),
        )
        for each in choices
    ]
    print_table(heads, rows)


def _print_cards(cards: list[LayoutMemory]) -> None:
    print("\ndoes it fit on one node of N GPUs, with the ZeRO stage and ep that need the least memory")
    heads = ("GPUs", "ZeRO", "ep", "GB", "on the host", "largest B", "fits")
    rows = [
        (
            each.groups.world,
            each.zero,
            each.groups.ep,
            f"{each.memory.total / GB:.1f}",
            f"{each.groups.world * each.memory.on_host / GB:.1f}" if each.memory.host else "",
            "" if each.largest_batch is None else each.largest_batch,
            {None: "", True: "yes", False: "no"}[each.fits],
        )
        for each in cards
    ]
    print_table(heads, rows)


def _training(args: argparse.Namespace, job: PlannedJob, stage: int) -> Training:
    """Return the training settings of a job at a ZeRO stage.

    Raises:
        ValueError: DeepSpeed refuses the settings at this stage.
    """
    assert job.model.architecture is not None
    bucket = args.reduce_bucket_size
    return Training(
        samples=job.model.shape.B,
        length=job.model.shape.L,
        zero=stage,
        dtype=args.dtype or job.model.architecture.dtype,
        accumulation="fp32" if args.grad_accum_fp32 else None,
        optimizer=args.optimizer,
        checkpointing=args.activation_checkpointing,
        recompute=args.recompute,
        load=args.imbalance or 1.0,
        lora=args.lora,
        lora_targets=args.lora_targets,
        offload=args.offload_optimizer is not None,
        **({} if bucket is None else {"reduce_bucket": int(bucket)}),
    )


def need_gb(args: argparse.Namespace, job: PlannedJob, stage: int, **changes: bool) -> float:
    """Return the memory of a rank at a ZeRO stage, in 10^9 bytes; ``changes`` are fields of its training settings.

    Raises:
        ValueError: DeepSpeed or ds_fsmoe refuses the settings.
    """
    assert job.model.architecture is not None
    training = replace(_training(args, job, stage), **changes)  # type: ignore[arg-type]
    return memory_of(job.model.architecture, job.groups, training).total / GB


def needs_of(args: argparse.Namespace, job: PlannedJob, **changes: bool) -> dict[int, float]:
    """Return the memory at each stage that is not refused; see :func:`need_gb`."""
    found = {}
    for stage in STAGES:
        with suppress(ValueError):
            found[stage] = need_gb(args, job, stage, **changes)
    return found


def fit_of(args: argparse.Namespace, job: PlannedJob) -> tuple[int, bool | None, str]:
    """Return (stage, whether the job fits, the line about it).

    The stage is the given one, or the lowest one that fits. Fitting is ``None`` if the memory of the GPU or of the job
    is unknown.

    Raises:
        ValueError: the given stage is refused.
    """
    named, stage, architecture = args.zero, args.zero or 0, job.model.architecture
    if named == 3 and architecture is None:
        raise ValueError("--zero = 3: not supported by DeepSpeed's own MoE layers; use 0, 1 or 2")
    if stage > 1 and job.groups.pp > 1:
        raise ValueError(f"--zero = {named}: DeepSpeed's pipelines support ZeRO 0 and 1 only")
    if not job.predicts_memory:
        why = "a model in numbers" if architecture is None else f"mp = {job.groups.mp}"
        return stage, None, f"memory is not predicted for {why}; ZeRO {stage} is planned"
    at, most_gb = f"ep_size {job.groups.ep}", job.memory_gb
    if most_gb is None:
        need = f"{need_gb(args, job, stage):.4g} GB are needed at ZeRO {stage}, {at}"
        return stage, None, f"memory of a GPU is not known (--memory-gb): {need}"
    needs = needs_of(args, job)
    if not needs:  # whatever is refused at every stage is refused with its reason where it is planned
        return stage, None, "no stage of ZeRO takes this layout"
    lowest = _lowest(needs, most_gb)
    of = f"GB of {most_gb:g}"
    if named is not None:
        needed_gb = need_gb(args, job, named)
        if needed_gb <= most_gb:
            return named, True, f"fits: {needed_gb:.1f} {of} at ZeRO {named}, {at}"
        then = _helps(args, job, needs)
        if lowest is not None:
            then = f"the lowest stage that fits is ZeRO {lowest} ({needs[lowest]:.1f} GB)"
        return named, False, f"does not fit: {needed_gb:.1f} {of} at ZeRO {named}, {at}; {then}"
    if lowest is None:
        least = min(needs, key=needs.__getitem__)
        line = f"does not fit at any stage: at least {needs[least]:.1f} {of}, at ZeRO {least}, {at}"
        return least, False, f"{line}; {_helps(args, job, needs)}"
    lower = max((each for each in needs if each < lowest), default=None)
    more = "" if lower is None else f"; the lowest stage that fits, as ZeRO {lower} needs {needs[lower]:.1f} GB"
    return lowest, True, f"fits: {needs[lowest]:.1f} {of} at ZeRO {lowest}, {at}{more}"


def _lowest(needs: dict[int, float], memory_gb: float) -> int | None:
    """Return the lowest stage that fits; None if no stage fits."""
    return next((stage for stage, gb in needs.items() if gb <= memory_gb), None)


def _helps(args: argparse.Namespace, job: PlannedJob, needs: dict[int, float]) -> str:
    """Return changes that make a job fit which does not fit at any stage, or else the nearest miss."""
    assert job.memory_gb is not None
    larger = [job] if job.groups.pp > 1 else larger_layouts(job)
    checkpointed = {} if _training(args, job, max(needs)).checkpointing else {"checkpointing": True}
    tried = []
    for changes in ({}, checkpointed):
        for each in (job, *larger):
            flags = ["--activation-checkpointing"] * bool(changes)
            flags += [f"--ep-size {each.groups.ep}"] * (each.groups != job.groups)
            found = needs_of(args, each, **changes)
            if not flags or not found:
                continue
            lowest = _lowest(found, job.memory_gb)
            if lowest is not None:
                return f"with {' '.join(flags)} it fits: {found[lowest]:.1f} GB at ZeRO {lowest}"
            tried.append((min(found.values()), " ".join(flags)))
    nearest = f" ({min(tried)[0]:.1f} GB with {min(tried)[1]})" if tried else ""
    return f"more GPUs (--nodes) or a shorter --length would help{nearest}"


def larger_layouts(job: PlannedJob) -> list[PlannedJob]:
    """Return the same job on the same ranks with larger EP sizes."""
    groups, experts = job.groups, job.model.num_experts
    sizes = range(groups.ep + 1, groups.stage // groups.esp + 1)
    fitting = [ep for ep in sizes if experts % ep == 0 and groups.stage % (ep * groups.esp) == 0]
    return [replace(job, groups=replace(groups, ep=ep)) for ep in fitting]
