# SPDX-License-Identifier: Apache-2.0
"""How a plan compares, and how to run it: the first and the last lines of ``ds_fsmoe plan``.

Stock trains a Hugging Face model with every expert on every rank. AutoEP is DeepSpeed's schedule with experts spread
like ours. A model with DeepSpeed's own MoE layers is spread by its script, and its stock is DeepSpeed's schedule.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ds_fsmoe.offline.plan.memory import Needs, larger_layouts
from ds_fsmoe.offline.plan.model import PlannedModel, is_hugging_face
from ds_fsmoe.offline.plan.stages import batch_of, is_batch

if TYPE_CHECKING:
    from ds_fsmoe.offline.plan.report import Report
    from ds_fsmoe.planning.groups import Groups


@dataclass(frozen=True)
class Baselines:
    """Knows what others are compared with."""

    groups: Groups
    stock: Report | None
    """Every expert on every rank, by DeepSpeed's schedule; ``None``: stock is that schedule in the layout at hand."""
    stock_batch_ms: float | None = None
    """The time of a batch of stock, where a whole batch is planned."""
    stock_fits: bool = True
    notes: tuple[str, ...] = ()

    def label(self, name: str) -> str:
        """Return what a row is called."""
        if name != "deepspeed":
            return name
        kind = "stock" if self.stock is None else "AutoEP"
        return f"{kind} (ep_size {self.groups.ep})"

    @property
    def stock_label(self) -> str:
        """Return the name of stock's row."""
        if self.stock is None:
            return self.label("deepspeed")
        return f"stock (ep_size 1, ZeRO {self.stock.zero.stage}{'' if self.stock_fits else ', does not fit'})"

    @property
    def other(self) -> str:
        """The other system over which ratios are printed."""
        return "tutel" if self.stock is None else "deepspeed"

    @property
    def heads(self) -> tuple[str, str]:
        """The heads of the columns of ratios."""
        return "over stock", "over tutel" if self.stock is None else "over AutoEP"

    def in_one_step(self) -> Baselines:
        """Return the same for a single micro-batch."""
        return replace(self, stock_batch_ms=None)

    def stock_ms(self, of_names: Any) -> float:
        """Return the time of stock's step; ``of_names`` has those of the other systems."""
        if self.stock is None:
            return of_names["deepspeed"]
        return sum(self.stock.times_ms["deepspeed"]) if self.stock_batch_ms is None else self.stock_batch_ms

    def ratios(self, step_ms: float, of_names: Any) -> tuple[str, str]:
        """Return how many times as fast as the baselines something is."""
        bases = self.stock_ms(of_names), of_names[self.other]
        return f"{bases[0] / step_ms:.2f}x", f"{bases[1] / step_ms:.2f}x"


def baselines_of(args: argparse.Namespace, model: PlannedModel, job: dict[str, Any]) -> Baselines:
    """Return the baselines of a job: of a Hugging Face model stock, at the lowest stage of ZeRO that it fits at, from
    the planned one upwards."""
    from ds_fsmoe.offline.plan.report import report

    groups, stage = job["groups"], job["zero"].stage
    if not is_hugging_face(args) or groups.ep * groups.esp == 1:
        return Baselines(groups, None)
    alone = replace(groups, ep=1, esp=1)
    needed, notes, fits = Needs(args, model, alone), [], True
    if needed.is_known and needed.memory_gb is not None:
        needs = needed.of_stages(early_gradients=False)
        fitting = [each for each, gb in needs.items() if each >= stage and gb <= needed.memory_gb]
        fits = bool(fitting)
        if stage in needs and fitting[:1] != [stage]:
            text = f"stock needs {needs[stage]:.1f} GB of {needed.memory_gb:g} at ZeRO {stage}"
            stage = fitting[0] if fitting else max(needs)
            end = f"its row is at ZeRO {stage}, the lowest that it fits at" if fits else "it fits at no stage"
            notes.append(f"{text}; {end}")
    zero = replace(job["zero"], stage=stage)
    changed = {"groups": alone, "alltoall": "flat", "crossings": None, "zero": zero}
    stock = report(**(job | changed), preset_name="deepspeed", names=("deepspeed",))
    found = batch_of(stock, job | changed) if is_batch(args) else None
    return Baselines(groups, stock, None if found is None else found.batch_ms("deepspeed"), fits, tuple(notes))


def other_stages(
    args: argparse.Namespace, model: PlannedModel, job: dict[str, Any], of_names: Mapping[str, float]
) -> list[str]:
    """Return which systems are faster at a higher stage of ZeRO that fits, where no stage is named.

    Args:
        args: of the command; ``named_zero`` is the stage that is named.
        model, job: what is planned.
        of_names: the time of a step by each system at the planned stage.
    """
    from ds_fsmoe.offline.plan.report import report

    needed, stage, found = Needs(args, model, job["groups"]), job["zero"].stage, []
    if args.named_zero is not None or not needed.is_known or needed.memory_gb is None or is_batch(args):
        return []
    for name, label in (("deepspeed", "AutoEP" if is_hugging_face(args) else "stock"), (args.preset, args.preset)):
        needs = needed.of_stages(early_gradients=name != "deepspeed")
        times = {}
        for other in (each for each, gb in needs.items() if each > stage and gb <= needed.memory_gb):
            zero = replace(job["zero"], stage=other)
            times[other] = sum(report(**(job | {"zero": zero}), preset_name=name, names=(name,)).times_ms[name])
        least = min(times, key=times.__getitem__, default=stage)
        if times and times[least] < 0.97 * of_names[name]:
            ratio = times[least] / of_names[args.preset]
            over = "" if name == args.preset else f"; {args.preset} at ZeRO {stage} is {ratio:.2f}x as fast as that"
            found.append(f"{label} is faster at ZeRO {least}: {times[least]:.2f} ms{over}")
    return found


def first_line(name: str, step_ms: float, of_names: Mapping[str, float], bases: Baselines) -> str:
    """Return the line that says how fast a system is, and over what."""
    if name == "deepspeed":
        return f"{bases.label(name)}: {step_ms:.2f} ms a step"
    over_stock, over_other = bases.ratios(step_ms, of_names)
    return f"{name}: {step_ms:.2f} ms a step, {over_stock} {bases.stock_label}, {over_other} {bases.label(bases.other)}"


def print_summary(
    args: argparse.Namespace, model: PlannedModel, job: dict[str, Any], step_ms: float, fits: bool | None
) -> dict[str, Any]:
    """Print tokens a second, utilisation, and the block that runs the plan; return the same as plain data."""
    from ds_fsmoe.offline.models.architecture import step_flops

    cluster, groups, micro_batches = job["cluster"], job["groups"], job["settings"].num_micro_batches
    ranks = groups.mp * groups.pp
    tokens = micro_batches * job["shape"].B * job["shape"].L / ranks
    flops = micro_batches * step_flops(job["shape"], job["num_layers"], job["architecture"]) / ranks
    tokens_per_s, tflops = tokens / step_ms * 1e3, flops / step_ms / 1e9
    print(f"\ntokens: {tokens_per_s:.0f} a second per GPU, without the optimizer")
    peak, utilisation = cluster.peak_tflops, None
    if peak is None:
        print(f"model FLOPs: {tflops:.1f} TFLOP/s per GPU; utilisation is not known: {cluster.name} has no peak_tflops")
    else:
        utilisation = tflops / peak
        print(f"model FLOPs utilisation: {utilisation:.1%} ({tflops:.1f} of {peak:g} TFLOP/s per GPU)")
    print("  6 x active parameters x tokens + attention (docs/planning.md)")
    config = ds_config(args, job)
    print(f"\n{'this does not fit' if fits is False else 'to run this'}, in ds_config.json:\n{json.dumps(config)}")
    if not is_hugging_face(args):
        print(f'  "ep_size" is an argument of your MoE(...) layers: {groups.ep}')
    if args.activation_checkpointing:
        print("  and model.gradient_checkpointing_enable() in your script")
    print("  The autotuner finds numbers of chunks and the order in the first steps; you set none of them.")
    return {
        "tokens_per_s_per_gpu": tokens_per_s,
        "model_tflops_per_gpu": tflops,
        "model_flops_utilisation": utilisation,
        "ds_config": config,
    }


def ds_config(args: argparse.Namespace, job: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of DeepSpeed that runs a plan."""
    groups, shape = job["groups"], job["shape"]
    dtype = args.dtype or ("fp32" if job["architecture"] is None else job["architecture"].dtype)
    block: dict[str, Any] = {"enabled": True}
    if is_hugging_face(args):
        block["ep_size"] = groups.ep
    if groups.esp > 1:
        block["expert_tensor_parallel_size"] = groups.esp
    if args.preset != "best":
        block["schedule"] = args.preset
    if args.recompute:
        block["recompute"] = True
    return {
        "train_micro_batch_size_per_gpu": shape.B,
        "gradient_accumulation_steps": job["settings"].num_micro_batches,
        "zero_optimization": {"stage": job["zero"].stage},
        **({dtype: {"enabled": True}} if dtype != "fp32" else {}),
        **({"data_types": {"grad_accum_dtype": "fp32"}} if args.grad_accum_fp32 else {}),
        "fsmoe": block,
    }


def print_larger_ep(args: argparse.Namespace, model: PlannedModel, job: dict[str, Any], step_ms: float) -> None:
    """Print which larger ``ep_size`` is predicted to be faster, where none is given and one fits."""
    if args.ep is not None or args.preset != "best" or not is_hugging_face(args) or is_batch(args):
        return
    for groups in larger_layouts(job["groups"], model)[-1:]:
        needed = Needs(args, model, groups)
        if needed.is_known and needed.memory_gb is not None and needed.gb(job["zero"].stage) > needed.memory_gb:
            continue
        ms, alltoall = _fastest(groups, job)
        flags = f"--ep-size {groups.ep} --alltoall {alltoall}"
        if ms < 0.97 * step_ms:
            print(f'  "ep_size": {groups.ep} is predicted to be {step_ms / ms:.2f}x as fast ({flags})')


def _fastest(groups: Groups, job: dict[str, Any]) -> tuple[float, str]:
    """Return the time of ``best`` in other groups, with the all-to-all that is the fastest there."""
    from ds_fsmoe.offline.plan.report import report
    from ds_fsmoe.planning.groups import crosses_once, expected_crossings
    from ds_fsmoe.planning.workload import ALLTOALLS

    at, shape, crossings = groups.placements["ep"], job["shape"], None
    if crosses_once(groups):
        crossings = expected_crossings(shape.E, shape.K, at.nodes, at.per_node)
    names = ALLTOALLS if crosses_once(groups) else ("flat",)
    tried = []
    for name in names:
        changed = {"groups": groups, "alltoall": name, "crossings": crossings}
        found = report(**(job | changed), preset_name="best", names=("best",))
        tried.append((sum(found.times_ms["best"]), name))
    return min(tried)
