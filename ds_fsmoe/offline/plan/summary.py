# SPDX-License-Identifier: Apache-2.0
"""The first and the last lines of ``ds_fsmoe plan``: how much faster, how many tokens a second, and how to run it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ds_fsmoe.offline.plan.baselines import Baselines
from ds_fsmoe.offline.plan.fit import Needs, larger_layouts
from ds_fsmoe.offline.plan.model import PlannedModel, is_hugging_face
from ds_fsmoe.offline.plan.stages import is_batch

if TYPE_CHECKING:
    from ds_fsmoe.planning.groups import Groups


def headline(name: str, step_ms: float, of_names: Mapping[str, float], bases: Baselines) -> str:
    """Return the line that says how fast a system is, and over what."""
    if name == "deepspeed":
        return f"{bases.label(name)}: {step_ms:.2f} ms a step"
    over_stock, over_other = bases.ratios(step_ms, of_names)
    return f"{name}: {step_ms:.2f} ms a step, {over_stock} {bases.stock_label}, {over_other} {bases.label(bases.other)}"


def print_summary(
    args: argparse.Namespace, model: PlannedModel, job: dict[str, Any], step_ms: float, fits: bool | None
) -> dict[str, Any]:
    """Print tokens a second, utilisation, and the block that runs the plan; return the same as plain data."""
    from ds_fsmoe.offline.models.model_flops import step_flops

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
    from ds_fsmoe.planning.crossings import crosses_once, expected_crossings
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
