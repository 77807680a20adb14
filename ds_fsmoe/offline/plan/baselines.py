# SPDX-License-Identifier: Apache-2.0
"""Compares a plan with baselines, and prints how to run it: the first and the last lines of ``ds_fsmoe plan``.

Stock trains a Hugging Face model with every expert on every rank. AutoEP is DeepSpeed's schedule with experts spread
like ours. A model with DeepSpeed's own MoE layers is spread by its script, and its stock is DeepSpeed's schedule.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ds_fsmoe.offline.models.architecture import step_flops
from ds_fsmoe.offline.plan.memory import larger_layouts, need_gb, needs_of
from ds_fsmoe.offline.plan.report import STOCK, PlannedJob, Report, report
from ds_fsmoe.offline.plan.stages import batch_of, is_batch
from ds_fsmoe.planning.groups import Groups, can_deduplicate, expected_fanout
from ds_fsmoe.planning.workload import ALLTOALLS

_MIN_GAIN = 0.97
"""The share of a step's time below which another way to run it is worth a line."""


@dataclass(frozen=True)
class Baselines:
    """Holds the baselines of a comparison."""

    groups: Groups
    stock: Report | None
    """Every expert on every rank, by DeepSpeed's schedule; ``None``: stock is that schedule in the layout at hand."""
    stock_batch_ms: float | None = None
    """The time of a batch of stock, where a whole batch is planned."""
    stock_fits: bool = True
    notes: tuple[str, ...] = ()

    def label(self, name: str) -> str:
        """Return the label of a system's row."""
        if name != STOCK:
            return name
        kind = "stock" if self.stock is None else "AutoEP"
        return f"{kind} (ep_size {self.groups.ep})"

    @property
    def stock_label(self) -> str:
        """Return the label of stock's row."""
        if self.stock is None:
            return self.label(STOCK)
        return f"stock (ep_size 1, ZeRO {self.stock.job.zero.stage}{'' if self.stock_fits else ', does not fit'})"

    @property
    def other(self) -> str:
        """Return the second system that ratios refer to."""
        return "tutel" if self.stock is None else STOCK

    @property
    def heads(self) -> tuple[str, str]:
        """Return the heads of the columns of ratios."""
        return "over stock", "over tutel" if self.stock is None else "over AutoEP"

    def stock_ms(self, of_names: Mapping[str, float]) -> float:
        """Return the ms of stock's step; ``of_names`` has those of the other systems."""
        if self.stock is None:
            return of_names[STOCK]
        return self.stock.step_ms(STOCK) if self.stock_batch_ms is None else self.stock_batch_ms

    def ratios(self, step_ms: float, of_names: Mapping[str, float]) -> tuple[str, str]:
        """Return the speedups over both baselines, as text."""
        bases = self.stock_ms(of_names), of_names[self.other]
        return f"{bases[0] / step_ms:.2f}x", f"{bases[1] / step_ms:.2f}x"


def baselines_of(args: argparse.Namespace, job: PlannedJob) -> Baselines:
    """Return the baselines of a job. For a Hugging Face model, stock has the lowest ZeRO stage that fits, from the
    planned one upwards.
    """
    groups, stage = job.groups, job.zero.stage
    if job.model.architecture is None or groups.ep * groups.esp == 1:
        return Baselines(groups, None)
    alone = replace(job, groups=replace(groups, ep=1, esp=1), alltoall="flat", fanout=None)
    notes: tuple[str, ...] = ()
    fits = True
    if job.memory_gb is not None and job.predicts_memory:
        needs = needs_of(args, alone, early_gradients=False)
        fitting = [each for each, gb in needs.items() if each >= stage and gb <= job.memory_gb]
        fits = bool(fitting)
        if stage in needs and fitting[:1] != [stage]:
            text = f"stock needs {needs[stage]:.1f} GB of {job.memory_gb:g} at ZeRO {stage}"
            stage = fitting[0] if fitting else max(needs)
            end = f"its row is at ZeRO {stage}, the lowest that it fits at" if fits else "it fits at no stage"
            notes = (f"{text}; {end}",)
    stock = report(replace(alone, zero=replace(job.zero, stage=stage)), STOCK, (STOCK,))
    batch_ms = batch_of(stock).batch_ms(STOCK) if is_batch(args) else None
    return Baselines(groups, stock, batch_ms, fits, notes)


def other_stages(args: argparse.Namespace, job: PlannedJob, of_names: Mapping[str, float]) -> list[str]:
    """Return lines about systems that are faster at a higher ZeRO stage that fits, unless a stage was given.

    Args:
        args: the arguments of the command; ``named_zero`` is the given stage.
        job: the planned job.
        of_names: the ms of a step by each system at the planned stage.
    """
    stage, found = job.zero.stage, []
    if args.named_zero is not None or job.memory_gb is None or not job.predicts_memory or is_batch(args):
        return []
    for name, label in ((STOCK, "stock" if job.model.architecture is None else "AutoEP"), (args.preset, args.preset)):
        needs = needs_of(args, job, early_gradients=name != STOCK)
        times = {}
        for other in (each for each, gb in needs.items() if each > stage and gb <= job.memory_gb):
            times[other] = report(replace(job, zero=replace(job.zero, stage=other)), name, (name,)).step_ms(name)
        least = min(times, key=times.__getitem__, default=stage)
        if times and times[least] < _MIN_GAIN * of_names[name]:
            ratio = times[least] / of_names[args.preset]
            over = "" if name == args.preset else f"; {args.preset} at ZeRO {stage} is {ratio:.2f}x as fast as that"
            found.append(f"{label} is faster at ZeRO {least}: {times[least]:.2f} ms{over}")
    return found


def first_line(name: str, step_ms: float, of_names: Mapping[str, float], bases: Baselines) -> str:
    """Return the line with the speed of a system, and its speedup over the baselines."""
    if name == STOCK:
        return f"{bases.label(name)}: {step_ms:.2f} ms a step"
    over_stock, over_other = bases.ratios(step_ms, of_names)
    return f"{name}: {step_ms:.2f} ms a step, {over_stock} {bases.stock_label}, {over_other} {bases.label(bases.other)}"


def print_summary(args: argparse.Namespace, job: PlannedJob, step_ms: float, fits: bool | None) -> dict[str, Any]:
    """Print tokens per second, utilisation, and the config that runs the plan; return the same as plain data."""
    cluster, groups, model, micro_batches = job.cluster, job.groups, job.model, job.settings.num_micro_batches
    ranks = groups.mp * groups.pp
    tokens = micro_batches * model.shape.B * model.shape.L / ranks
    flops = micro_batches * step_flops(model.shape, model.num_layers, model.architecture) / ranks
    tokens_per_s, tflops = tokens / step_ms * 1e3, flops / step_ms / 1e9
    print(f"\ntokens: {tokens_per_s:.0f} a second per GPU, without the optimizer")
    peak, utilisation = cluster.peak_tflops, None
    if peak is None:
        print(f"model FLOPs: {tflops:.1f} TFLOP/s per GPU; utilisation is not known: {cluster.name} has no peak_tflops")
    else:
        utilisation = tflops / peak
        print(f"model FLOPs utilisation: {utilisation:.1%} ({tflops:.1f} of {peak:g} TFLOP/s per GPU)")
    print("  6 x active parameters x tokens + attention (docs/planning.md)")
    config = _ds_config(args, job)
    print(f"\n{'this does not fit' if fits is False else 'to run this'}, in ds_config.json:\n{json.dumps(config)}")
    if model.architecture is None:
        print(f'  "ep_size" is an argument of your MoE(...) layers: {groups.ep}')
    if args.activation_checkpointing:
        print("  and model.gradient_checkpointing_enable() in your script")
    print("  The autotuner chooses numbers of chunks and the order in the first steps.")
    return {
        "tokens_per_s_per_gpu": tokens_per_s,
        "model_tflops_per_gpu": tflops,
        "model_flops_utilisation": utilisation,
        "ds_config": config,
    }


def _ds_config(args: argparse.Namespace, job: PlannedJob) -> dict[str, Any]:
    """Return the DeepSpeed config that runs a plan."""
    architecture, esp = job.model.architecture, job.groups.esp
    dtype = args.dtype or ("fp32" if architecture is None else architecture.dtype)
    return {
        "train_micro_batch_size_per_gpu": job.model.shape.B,
        "gradient_accumulation_steps": job.settings.num_micro_batches,
        "zero_optimization": {"stage": job.zero.stage},
        **({dtype: {"enabled": True}} if dtype != "fp32" else {}),
        **({"data_types": {"grad_accum_dtype": "fp32"}} if args.grad_accum_fp32 else {}),
        "fsmoe": {
            "enabled": True,
            **({} if architecture is None else {"ep_size": job.groups.ep}),
            **({"expert_tensor_parallel_size": esp} if esp > 1 else {}),
            **({"schedule": args.preset} if args.preset != "best" else {}),
            **({"recompute": True} if args.recompute else {}),
        },
    }


def print_larger_ep(args: argparse.Namespace, job: PlannedJob, step_ms: float) -> None:
    """Print which larger ``ep_size`` is predicted to be faster, if none was given and one fits."""
    if args.ep is not None or args.preset != "best" or job.model.architecture is None or is_batch(args):
        return
    for larger in larger_layouts(job)[-1:]:
        if job.memory_gb is not None and job.predicts_memory and need_gb(args, larger, job.zero.stage) > job.memory_gb:
            continue
        ms, alltoall = _fastest(larger)
        flags = f"--ep-size {larger.groups.ep} --alltoall {alltoall}"
        if ms < _MIN_GAIN * step_ms:
            print(f'  "ep_size": {larger.groups.ep} is predicted to be {step_ms / ms:.2f}x as fast ({flags})')


def _fastest(job: PlannedJob) -> tuple[float, str]:
    """Return (the ms of ``best`` with the fastest all-to-all, that all-to-all)."""
    at, shape, fanout, names = job.groups.placements["ep"], job.model.shape, None, ("flat",)
    if can_deduplicate(job.groups):
        fanout, names = expected_fanout(shape.E, shape.K, at.nodes, at.per_node), ALLTOALLS
    ways = (replace(job, alltoall=name, fanout=fanout) for name in names)
    return min((report(each, "best", ("best",)).step_ms("best"), each.alltoall) for each in ways)
