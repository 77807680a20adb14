# SPDX-License-Identifier: Apache-2.0
"""Reads the model and the ranks that ``ds_fsmoe plan`` plans: a model by name, from its configuration, or in
numbers.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_fsmoe.offline.models.architecture import Architecture
from ds_fsmoe.offline.models.hf_config import read_hf_config
from ds_fsmoe.offline.models.known import DEFAULT_EXPERTS, MODELS, PAPER, PlannedModel, load_model
from ds_fsmoe.offline.models.model_layers import commonest_moe, moe_shape
from ds_fsmoe.offline.models.training import BYTES
from ds_fsmoe.offline.plan.command import LENGTH
from ds_fsmoe.offline.plan.report import PlannedJob
from ds_fsmoe.planning.groups import Groups, can_deduplicate
from ds_fsmoe.planning.workload import Shape


def model_of(args: argparse.Namespace) -> PlannedModel:
    """Return the model of the arguments.

    Raises:
        ValueError: there is no model, there are two, or arguments do not match it.
    """
    if args.hf_config is not None:
        if args.model is not None:
            raise ValueError(f"--hf-config = {args.hf_config}: cannot be combined with --model")
        return _of_architecture(args, _configured(args.hf_config))
    if args.model is not None and args.model not in PAPER:
        return _of_architecture(args, load_model(args.model))
    return _of_numbers(args)


def _of_numbers(args: argparse.Namespace) -> PlannedModel:
    """Return a number of equal layers: the paper's sizes with the given changes, or all sizes given."""
    fields = {
        "B": args.samples,
        "L": args.length,
        "M": args.width,
        "H": args.hidden,
        "E": args.experts,
        "K": args.top_k,
        "ffn": args.ffn,
        "heads": args.heads,
        "kv_heads": args.kv_heads,
        "imbalance": args.imbalance,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    if args.capacity_factor is not None:
        given["capacity_factor"] = _capacity_factor(args.capacity_factor)
    given["dtype_bytes"] = BYTES[args.dtype or "fp32"]
    known = None if args.model is None else MODELS[args.model]
    num_experts = given.get("E", DEFAULT_EXPERTS if known is None else known.shape.E)
    _check_choices(args.top_k, num_experts)
    taken = {} if args.experts is not None else {"experts": num_experts}
    if known is not None:
        num_layers = known.num_layers if args.layers is None else args.layers
        return PlannedModel(replace(known.shape, **given), num_layers, taken=taken)
    needed = {"--width": args.width, "--hidden": args.hidden, "--length": args.length, "--layers": args.layers}
    missing = [flag for flag, value in needed.items() if value is None]
    if missing:
        raise ValueError(
            f"missing: {', '.join(missing)}; or name a model with --model ({', '.join(MODELS)}, mixtral-8x7b, ...) "
            "or --hf-config"
        )
    return PlannedModel(Shape(**({"B": 1, "E": num_experts} | given)), args.layers, taken=taken)


def _of_architecture(args: argparse.Namespace, found: Architecture) -> PlannedModel:
    """Return a model with sizes of its own, with the given changes."""
    of_numbers = {"--width": args.width, "--heads": args.heads, "--kv-heads": args.kv_heads, "--ffn": args.ffn}
    for flag, value in of_numbers.items():
        if value is not None:
            raise ValueError(
                f"{flag} = {value}: {found.name} has its own; remove {flag}, or give all sizes without --model and "
                "--hf-config"
            )
    _check_choices(args.top_k, args.experts or commonest_moe(found).experts.E)  # type: ignore[union-attr]
    given: dict[str, Any] = {"E": args.experts, "K": args.top_k, "H": args.hidden}
    changed = {name: value for name, value in given.items() if value is not None}
    if args.capacity_factor is not None:
        changed["capacity_factor"] = _capacity_factor(args.capacity_factor)
    model = found.with_experts(**changed) if changed else found
    num_layers = len(model.blocks) if args.layers is None else args.layers
    model = model.first(num_layers)
    length = min(LENGTH, model.max_length) if args.length is None else args.length
    dtype = args.dtype or model.dtype
    samples = 1 if args.samples is None else args.samples
    load = 1.0 if args.imbalance is None else args.imbalance
    shape = moe_shape(model, commonest_moe(model), samples, length, BYTES[dtype], imbalance=load)
    notes = []
    if args.length is None:
        notes.append(f"length {length} (default; the model supports {model.max_length})")
    elif length > model.max_length:
        notes.append(f"length {length} is above {model.max_length}, the most that the model supports")
    if num_layers < len(found.blocks):
        notes.append(f"layers: the first {num_layers} of {len(found.blocks)}, with embedding and head")
    if changed:
        notes.append(
            f"given instead of the model's: {', '.join(f'{name} = {value}' for name, value in changed.items())}"
        )
    used = {"samples": samples, "length": length, "dtype": dtype}
    taken = {name: value for name, value in used.items() if getattr(args, name) is None}
    return PlannedModel(shape, num_layers, model, taken, tuple(notes))


def _check_choices(top_k: int | None, num_experts: int) -> None:
    if top_k is not None and top_k > num_experts:
        raise ValueError(f"--top-k = {top_k}: must be at most the number of experts, {num_experts}; --experts sets it")


def _capacity_factor(text: str) -> float | None:
    if text == "none":
        return None
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"--capacity-factor = {text!r}: must be a number, or none") from error


def _configured(name: str) -> Architecture:
    """Return the model of a configuration: a file, a folder, or a name of the Hugging Face Hub."""
    if Path(name).exists():
        return read_hf_config(name)
    neither = f"--hf-config = {name}: there is no such file or folder"
    if name.endswith(".json") or Path(name).is_absolute() or name.count("/") > 1:
        raise ValueError(f"{neither}: give a config.json, a folder that has one, or a name of the Hugging Face Hub")
    try:
        from transformers import AutoConfig
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ValueError(
            f"{neither}, and transformers (for names of the Hugging Face Hub) is not installed: pip install "
            "'ds_fsmoe[hf]', or give the path of a config.json"
        ) from error
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ValueError(f"{neither}, and transformers found no configuration of that name: {first_line}") from error
    return read_hf_config(config.to_dict(), name, f"the configuration of {name} on the Hugging Face Hub")


def planned_groups(args: argparse.Namespace, nodes: int, gpus: int, model: PlannedModel) -> Groups:
    """Return the given group sizes, completed by defaults. ``Groups`` refuses impossible sizes.

    For an architecture, attention and experts are whole on a rank. Experts are spread over as many ranks of a node as
    divide them, as ``fsmoe.ep_size = "auto"`` does in training. Otherwise sizes are the paper's: attention and experts
    are split inside a node, and experts are spread over nodes as far as possible. On a single node they are spread over
    its ranks instead.
    """
    pp = args.pp or 1
    stage = nodes * gpus // max(1, pp)
    mp, esp, ep = args.mp, args.esp, args.ep
    is_own = model.architecture is not None
    inside = gpus if nodes > 1 and not is_own else 1
    if mp is None:
        mp = inside if args.dp is None or args.dp < 1 or stage % args.dp else stage // args.dp
    if esp is None:
        fitting = [size for size in range(1, inside + 1) if inside % size == 0 and stage % (size * (ep or 1)) == 0]
        esp = max(fitting, default=inside)
    if ep is None:
        left = max(1, stage // max(1, esp))
        ep = max(_dividing(left, model.num_experts, gpus // max(1, esp) if is_own else left), default=1)
    return Groups(nodes * gpus, gpus, mp, esp, ep, args.dp, pp)


def _dividing(*numbers: int) -> list[int]:
    """Return the common divisors of some numbers."""
    return [size for size in range(1, min(numbers) + 1) if all(each % size == 0 for each in numbers)]


def other_layouts(args: argparse.Namespace, model: PlannedModel, groups: Groups) -> list[Groups]:
    """Return the layouts to choose the fastest from. There are several only if experts sharded inside each node
    cannot be spread over nodes.
    """
    nodes = groups.stage // groups.gpus_per_node
    given = model.architecture is not None or args.ep is not None or args.esp is not None
    if given or nodes < 2 or groups.ep > 1 or model.shape.E == 1:
        return [groups]
    cuts, spreads = _dividing(groups.gpus_per_node, model.shape.H), _dividing(groups.stage, model.shape.E)
    found = [replace(groups, ep=ep, esp=esp) for ep in spreads for esp in cuts if groups.stage % (ep * esp) == 0]
    # With fewer experts on each rank less has to be held and summed.
    most = max(each.ep * each.esp for each in found)
    return [each for each in found if each.ep * each.esp == most]


def _layout_note(args: argparse.Namespace, model: PlannedModel, groups: Groups) -> str | None:
    """Return why the EP size is what it is, if the usual layout does not fit; otherwise None."""
    experts, gpus = model.num_experts, groups.gpus_per_node
    if args.ep is not None or experts == 1 or groups.stage == 1:
        return None
    if model.architecture is not None:
        why = f"ep_size 1: no larger number divides both {experts} experts and the {gpus} GPUs of a node"
        return None if groups.ep > 1 else why
    nodes = groups.stage // gpus
    usual = gpus if args.esp is None else args.esp
    if nodes < 2 or len(_dividing(groups.stage // usual, experts)) > 1:
        return None
    fitting = [each for each in range(2, 2 * nodes + 1) if len(_dividing(each * gpus // usual, experts)) > 1]
    hint = f"; with --nodes {' or '.join(str(each * groups.pp) for each in fitting)} it does" if fitting else ""
    taken = "" if args.esp else ", the fastest layout"
    parts = f"{groups.stage // usual} groups of {'a stage' if groups.pp > 1 else 'the job'}"
    return (
        f"ep_size {groups.ep} and expert_tensor_parallel_size {groups.esp}{taken}: with experts sharded over {usual} "
        f"GPUs, no ep_size above 1 divides both {experts} experts and the {parts}{hint}"
    )


def take_expert_groups(args: argparse.Namespace, job: PlannedJob) -> None:
    """Set the token's groups of experts to the model's, if none are given and they matter: with node-deduplicated
    dispatch, and groups that do not span nodes.
    """
    given = args.expert_groups, args.groups_per_token, args.routing
    architecture, groups = job.model.architecture, job.groups
    if architecture is None or given != (None, None, None):
        return
    experts = commonest_moe(architecture).experts
    assert experts is not None
    if experts.groups is None or not can_deduplicate(groups) or experts.E % groups.ep:
        return
    at, num_groups = groups.placements["ep"], experts.groups[0]
    if all(max(each, num_groups) % min(each, num_groups) == 0 for each in (at.nodes, at.size)):
        args.expert_groups, args.groups_per_token = experts.groups


def print_taken(args: argparse.Namespace, job: PlannedJob) -> None:
    """Print the defaults used, as arguments, with their reasons."""
    words = {"mp": "mp", "esp": "expert-tensor-parallel-size", "ep": "ep-size"}
    sizes = {word: getattr(job.groups, name) for name, word in words.items() if getattr(args, name) is None}
    taken, notes = {**job.model.taken, **sizes}, [*job.model.notes]
    layout = _layout_note(args, job.model, job.groups)
    if layout is not None:
        notes.append(layout)
    elif job.model.architecture is not None and args.ep is None:
        default = "default: as many ranks of a node as divide the experts, as in training"
        notes.append(f"ep_size {job.groups.ep} ({default})")
    if taken:
        print(f"default  {' '.join(f'--{name} {value}' for name, value in taken.items())}")
    for each in notes:
        print(f"         {each}")
