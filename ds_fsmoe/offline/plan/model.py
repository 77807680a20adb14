# SPDX-License-Identifier: Apache-2.0
"""Reads what ``ds_fsmoe plan`` is to plan: a model by name, from its configuration, or in numbers, and its ranks."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_fsmoe.offline.models.training import BYTES

if TYPE_CHECKING:
    from ds_fsmoe.offline.models.architecture import Architecture
    from ds_fsmoe.planning.groups import Groups
    from ds_fsmoe.planning.workload import Shape

LENGTH = 4096
"""The positions of a sample of a model that is made for as many, where none are given."""


@dataclass(frozen=True)
class PlannedModel:
    """Holds what is planned, and what was assumed about it."""

    shape: Shape
    """A layer; of an architecture, the one that most of its blocks with experts have."""
    num_layers: int
    architecture: Architecture | None
    """The model block by block; ``None``: all layers are alike, and there is nothing else."""
    taken: dict[str, object]
    """Argument that was not given -> what was taken."""
    notes: tuple[str, ...] = ()
    """Why it was taken, and what is unusual."""


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the arguments about the model."""
    model = parser.add_argument_group("the model (a known one, your own, or all of it in numbers)")
    model.add_argument(
        "--model", metavar="NAME", help="mixtral-8x7b, deepseek-v3, ...; or the paper's, like mixtral-7b"
    )
    model.add_argument(
        "--hf-config", metavar="PATH", help="a config.json, a folder that has one, or a name of the Hugging Face Hub"
    )
    model.add_argument("--layers", type=int, help="number of layers; of a model that has its own, the first so many")
    model.add_argument("--samples", type=int, metavar="B", help="samples per model-parallel group (1)")
    model.add_argument(
        "--length", type=int, metavar="L", help=f"positions of a sample (a real model's, up to {LENGTH})"
    )
    model.add_argument("--width", type=int, metavar="M", help="width of the model")
    model.add_argument("--hidden", type=int, metavar="H", help="width inside an expert")
    model.add_argument("--experts", type=int, metavar="E", help="number of experts (the model's, or 8)")
    model.add_argument("--top-k", type=int, metavar="K", help="experts per token")
    model.add_argument("--capacity-factor", metavar="F", help="a number, or none where no token is dropped")
    model.add_argument(
        "--imbalance",
        type=float,
        metavar="X",
        help="rows of the fullest rank over those of the mean rank, where no token is dropped (1)",
    )
    model.add_argument("--ffn", help="gpt (two products) or mixtral (three)")
    model.add_argument("--heads", type=int, help="attention heads")
    model.add_argument("--kv-heads", type=int, help="heads of keys and values (as many)")
    model.add_argument(
        "--dtype",
        choices=BYTES,
        help="number type of communication (default: the model's own, else fp32)",
    )


def add_groups(parser: argparse.ArgumentParser) -> None:
    """Add the arguments about the sizes of groups."""
    groups = parser.add_argument_group(
        "group sizes (of real models mp = expert_tensor_parallel_size = 1, and ep_size as many ranks of a node as "
        "divide the experts; else those of the paper, as far as they fit: mp = expert_tensor_parallel_size = GPUs of a "
        "node, ep_size = nodes; on one node 1, 1 and its GPUs)"
    )
    for names, what in (
        (("--mp",), "model parallel"),
        (("--expert-tensor-parallel-size", "--esp"), "ranks over which each expert is cut"),
        (("--ep-size", "--ep"), "ranks over which experts are spread"),
        (("--dp",), "data parallel (what is left)"),
        (("--pp",), "pipeline stages (1)"),
    ):
        groups.add_argument(*names, dest=names[-1].strip("-"), type=int, metavar="N", help=what)


def model_of(args: argparse.Namespace) -> PlannedModel:
    """Return the model that the arguments name.

    Raises:
        ValueError: none, two, or arguments that do not go with it.
    """
    from ds_fsmoe.offline.models.known import PAPER, load_model

    if args.hf_config is not None:
        if args.model is not None:
            raise ValueError(f"--hf-config = {args.hf_config}: not with --model, which is another model")
        return _of_architecture(args, _configured(args.hf_config))
    if args.model is not None and args.model not in PAPER:
        return _of_architecture(args, load_model(args.model))
    return _of_numbers(args)


def is_hugging_face(args: argparse.Namespace) -> bool:
    """Return whether a model of Hugging Face is planned; all others have MoE layers of DeepSpeed."""
    from ds_fsmoe.offline.models.known import PAPER

    return args.hf_config is not None or (args.model is not None and args.model not in PAPER)


def _of_numbers(args: argparse.Namespace) -> PlannedModel:
    """Return so many equal layers: the paper's and what is given instead, or all of it given."""
    from ds_fsmoe.offline.models.known import DEFAULT_EXPERTS, MODELS, model
    from ds_fsmoe.planning.workload import Shape

    given = {
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
    given = {name: value for name, value in given.items() if value is not None}
    if args.capacity_factor is not None:
        given["capacity_factor"] = _capacity_factor(args.capacity_factor)
    given["dtype_bytes"] = BYTES[args.dtype or "fp32"]
    known = None if args.model is None else model(args.model)
    num_experts = given.get("E", DEFAULT_EXPERTS if known is None else known.shape.E)
    _check_choices(args.top_k, num_experts)
    taken: dict[str, object] = {} if args.experts is not None else {"experts": num_experts}
    if known is not None:
        num_layers = known.num_layers if args.layers is None else args.layers
        return PlannedModel(known.with_(**given).shape, num_layers, None, taken)
    missing = [flag for flag, name in (("--width", "M"), ("--hidden", "H"), ("--length", "L")) if name not in given]
    if args.layers is None:
        missing.append("--layers")
    if missing:
        raise ValueError(
            f"without --hf-config or --model ({', '.join(MODELS)}, mixtral-8x7b, ...) also needed: {', '.join(missing)}"
        )
    return PlannedModel(Shape(**({"B": 1, "E": num_experts} | given)), args.layers, None, taken)


def _of_architecture(args: argparse.Namespace, found: Architecture) -> PlannedModel:
    """Return a model that has sizes of its own, with what is given instead."""
    from ds_fsmoe.offline.models.model_layers import commonest_moe, moe_shape

    for flag, value in (
        ("--width", args.width),
        ("--heads", args.heads),
        ("--kv-heads", args.kv_heads),
        ("--ffn", args.ffn),
    ):
        if value is not None:
            raise ValueError(
                f"{flag} = {value}: {found.name} has its own; it can be given where all sizes are, without --model and "
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
    taken: dict[str, object] = {"samples": samples, "length": length, "dtype": dtype}
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
    taken = {name: value for name, value in taken.items() if getattr(args, name) is None}
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
    from ds_fsmoe.offline.models.hf_config import read_hf_config

    if Path(name).exists():
        return read_hf_config(name)
    neither = f"--hf-config = {name}: there is no such file or folder"
    if name.endswith(".json") or Path(name).is_absolute() or name.count("/") > 1:
        raise ValueError(f"{neither}: the choices are a config.json, a folder that has one, or a name of the Hub")
    try:
        from transformers import AutoConfig
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ValueError(
            f"{neither}, and transformers, which looks names of the Hugging Face Hub up, is not installed: "
            "pip install 'ds_fsmoe[hf]', or give the path of a config.json"
        ) from error
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ValueError(f"{neither}, and transformers finds no configuration of that name: {first_line}") from error
    return read_hf_config(config.to_dict(), name, f"the configuration of {name} on the Hugging Face Hub")


def planned_groups(args: argparse.Namespace, nodes: int, gpus: int, model: PlannedModel) -> Groups:
    """Return the given sizes, and for the others what fits them; where no size does, ``Groups`` says so.

    Of an architecture attention and experts are whole on a rank, and experts are spread over as many ranks of a node as
    divide them, as ``fsmoe.ep_size = "auto"`` does in training. Otherwise sizes are the paper's: attention and experts
    split inside a node, experts spread over nodes as far as there are experts; on a single node they are spread over
    its ranks instead.
    """
    from ds_fsmoe.planning.groups import Groups

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
        num_experts, left = _num_experts(model), max(1, stage // max(1, esp))
        ep = max(_dividing(left, num_experts, gpus // max(1, esp) if is_own else left), default=1)
    return Groups(nodes * gpus, gpus, mp, esp, ep, args.dp, pp)


def _num_experts(model: PlannedModel) -> int:
    return model.shape.E if model.architecture is None else model.architecture.num_experts


def _dividing(*numbers: int) -> list[int]:
    """Return what divides all of some numbers."""
    return [size for size in range(1, min(numbers) + 1) if all(each % size == 0 for each in numbers)]


def other_layouts(args: argparse.Namespace, model: PlannedModel, groups: Groups) -> list[Groups]:
    """Return the layouts among which the fastest is taken, where experts that are cut inside each node cannot be spread
    over nodes; else the usual one alone."""
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
    """Return why experts are spread over so many ranks, where the usual layout does not fit; ``None``: it does."""
    experts, gpus = _num_experts(model), groups.gpus_per_node
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
    taken = "" if args.esp else ", the fastest layout there is"
    parts = f"{groups.stage // usual} groups of {'a stage' if groups.pp > 1 else 'the job'}"
    return (
        f"ep_size {groups.ep} and expert_tensor_parallel_size {groups.esp}{taken}: with experts cut over {usual} GPUs, "
        f"no ep_size above 1 divides both {experts} experts and the {parts}{hint}"
    )


def take_expert_groups(args: argparse.Namespace, model: PlannedModel, groups: Groups) -> None:
    """Set the groups of experts that a token chooses from to the model's, where they matter and none are given."""
    found = _expert_groups(model, groups)
    if found is not None and args.expert_groups is None and args.groups_per_token is None and args.routing is None:
        args.expert_groups, args.groups_per_token = found


def _expert_groups(model: PlannedModel, groups: Groups) -> tuple[int, int] | None:
    """Return the model's groups of experts and how many of them a token takes; ``None``: it has none, they make no
    difference, or they lie across nodes."""
    from ds_fsmoe.offline.models.model_layers import commonest_moe
    from ds_fsmoe.planning.groups import crosses_once

    experts = None if model.architecture is None else commonest_moe(model.architecture).experts
    if experts is None or experts.groups is None or not crosses_once(groups) or experts.E % groups.ep:
        return None
    at, num_groups = groups.placements["ep"], experts.groups[0]
    places = at.nodes, at.size
    return experts.groups if all(max(each, num_groups) % min(each, num_groups) == 0 for each in places) else None


def print_taken(args: argparse.Namespace, model: PlannedModel, groups: Groups) -> None:
    """Print what was not given as it would be given, and why it is that."""
    words = {"mp": "mp", "esp": "expert-tensor-parallel-size", "ep": "ep-size"}
    sizes = {word: getattr(groups, name) for name, word in words.items() if getattr(args, name) is None}
    taken, notes = model.taken | sizes, [*model.notes]
    layout = _layout_note(args, model, groups)
    if layout is not None:
        notes.append(layout)
    elif model.architecture is not None and args.ep is None:
        notes.append(f"ep_size {groups.ep} (default: as many ranks of a node as divide the experts, as in training)")
    if taken:
        print(f"default  {' '.join(f'--{name} {value}' for name, value in taken.items())}")
    for each in notes:
        print(f"         {each}")
