# SPDX-License-Identifier: Apache-2.0
"""Reads the ``"fsmoe"`` block of ds_config.json: its fields, what they may hold, and what this version can do.

Everything that is wrong with a block is found here, on every rank, before any process group is made, and reported in
one error that lists each path with its value and the choices. Every default means "the best that exists by now"; an
option that a user sets to something this version cannot do is refused, never ignored.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from ds_fsmoe import registry
from ds_fsmoe.config.blocks import AutotuneBlock, FSMoEBlock, GateBlock, block_in, words_for
from ds_fsmoe.config.placement import unfit_placement
from ds_fsmoe.config.words import BLOCK, Words, shown, without_gone, words_of


class ConfigError(ValueError):
    """The block cannot be used. The message names every path, its value and the choices."""


def read_block(ds_config: Mapping[str, Any]) -> FSMoEBlock | None:
    """Return the validated block of a DeepSpeed config, or ``None`` where there is none.

    Raises:
        ConfigError: the block is misspelt or wrong, or asks for what this version cannot do.
    """
    _refuse_misspelt_block(ds_config)
    if BLOCK not in ds_config:
        return None
    written = ds_config[BLOCK]
    if not isinstance(written, Mapping):
        raise ConfigError(f'{BLOCK} = {shown(written)}: must be an object, for example {{"enabled": true}}')
    if written and "enabled" not in written and set(written) <= set().union(*_known_keys(FSMoEBlock)):
        raise ConfigError(f'{BLOCK}.enabled is missing: write "enabled": true, or false for stock DeepSpeed')
    words = words_of(written)
    if problems := [*words.twice, *_unfit_null(written)]:
        raise ConfigError(join_problems(problems))
    try:
        block = FSMoEBlock.model_validate(without_gone(written))
    except ValidationError as error:
        raise ConfigError(join_problems(_sentences(error.errors(), words))) from None
    if not block.enabled:
        # Stock DeepSpeed runs, so what this version can do is not asked.
        if problems := _unknown_keys_of_topk(block):
            raise ConfigError(join_problems(problems))
        return block
    _import_plugins(block)
    _import_trusted(block)
    problems = [
        *_missing_parts(block),
        *(_unknown_keys_of_topk(block) or _unknown_gate_options(block, written.get("gate"))),
        *_unfit_degrees(block),
        *_unfit_autotune(block),
        *_unfit_gradients(block),
        *_unfit_packing(block),
        *unfit_placement(block),
        *_unfit_collective(block, ds_config),
        *_unknown_cluster(block),
    ]
    if problems:
        # Two phases that were written as one number have one problem.
        raise ConfigError(join_problems(dict.fromkeys(words.as_written(each) for each in problems)))
    return block


def _unfit_collective(block: FSMoEBlock, ds_config: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a reduce-scatter: every rank updates all parameters, or a slice is of one tensor."""
    zero = ds_config.get("zero_optimization", {})
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    if block.gradient_partition.collective != "reduce_scatter":
        return []
    mode = block.gradient_partition.mode
    if mode == "micro_ops" or (mode == "auto" and _pipeline_of(block.schedule) == "by_bytes"):
        return [
            f'{BLOCK}.gradient_partition.collective = "reduce_scatter": a slice of one tensor (mode "micro_ops", '
            'schedule "lina") mostly belongs to one rank, whose link alone would carry it; the choices there are '
            '"auto" and "all_reduce"'
        ]
    if stage in (1, 2):
        return []
    return [
        f'{BLOCK}.gradient_partition.collective = "reduce_scatter": every rank needs all gradients at '
        f'zero_optimization.stage = {stage}; the choices there are "auto" and "all_reduce"'
    ]


def join_problems(problems: Iterable[str]) -> str:
    """Return one sentence as it is, several under a heading."""
    problems = list(problems)
    return problems[0] if len(problems) == 1 else "\n".join([f"{len(problems)} problems:", *problems])


def _refuse_misspelt_block(ds_config: Mapping[str, Any]) -> None:
    """Refuse a misspelt block: DeepSpeed silently accepts unknown top-level keys, so it would do nothing, unnoticed."""
    for key in ds_config:
        letters = re.sub(r"[^a-z]", "", str(key).lower())
        if key != BLOCK and (BLOCK in letters or difflib.SequenceMatcher(None, letters, BLOCK).ratio() >= 0.8):
            raise ConfigError(f'{key} = ...: no such block in a DeepSpeed config; did you mean "{BLOCK}"?')


def _sentences(errors: Iterable[Mapping[str, Any]], words: Words) -> list[str]:
    """Return Pydantic's errors in this project's form, one per path: ``path = value: must be ...``."""
    musts: dict[str, dict[str, None]] = {}
    listed: set[str] = set()
    for error in errors:
        # A field of two types has an error per type, with the type as the last part of the location.
        location = [part for part in error["loc"] if not _OF_PYDANTIC.match(str(part))]
        path = words.as_written(".".join([BLOCK, *map(str, location)]))
        if error["type"] == "extra_forbidden":
            parent = path.rpartition(".")[0]
            musts[_unknown_key(path, _known_keys(_block_at(location[:-1])), is_listed=parent not in listed)] = {}
            listed.add(parent)
            continue
        must = "must be an object" if error["type"] == "model_type" and "words" not in error["ctx"] else error["msg"]
        must = re.sub(r"^[Ii]nput should be |^must be ", "", must).replace("a valid ", "a ").replace("a int", "an int")
        musts.setdefault(f"{path} = {shown(error['input'])}: must be ", {})[must] = None
    return [start + " or ".join(ends) for start, ends in musts.items()]


_OF_PYDANTIC = re.compile(r"int$|bool$|constrained-int$|literal\['auto'\]$")
"""Matches what Pydantic adds to a location that is not a key."""


# What other projects, or DeepSpeed's layer, call things that are not here under that name.
_OF_THE_MODEL = "it is an argument of MoE(...), where the model is built"
_ELSEWHERE = {
    "expert_model_parallel_size": "it is ep_size, an argument of MoE(...), where the model is built, or "
    f"{BLOCK}.ep_size for the experts of a Hugging Face model",
    "num_experts": _OF_THE_MODEL,
    "hidden_size": _OF_THE_MODEL,
    "use_residual": _OF_THE_MODEL,
    "topk": f"write it as {BLOCK}.gate.top_k",
    "moe_router_topk": f"write it as {BLOCK}.gate.top_k",
    "num_experts_per_tok": f"write it as {BLOCK}.gate.top_k",
    "moe_expert_capacity_factor": f"write it as {BLOCK}.gate.capacity_factor",
    "a2a_ffn_overlap_degree": f"write it as {BLOCK}.num_chunks",
    "autotuning": f"write it as {BLOCK}.autotune; DeepSpeed's own autotuning stands beside {BLOCK}, not in it",
    "solver": "leave it out: degrees are chosen by simulating all of them",
}


def _unknown_key(path: str, choices: list[tuple[str, ...]], is_listed: bool = True) -> str:
    """Return a sentence with the nearest known key, and, unless ``is_listed`` before, all of them."""
    name = path.rpartition(".")[2]
    if hint := elsewhere(path):
        return f"{path}: unknown key; {hint}"
    near = difflib.get_close_matches(name, [word for each in choices for word in each], n=1)
    keys = f"the keys are {', '.join(each[0] for each in choices)}" if is_listed else ""
    hint = f"did you mean {near[0]!r}?{' ' if keys else ''}{keys[:1].upper()}{keys[1:]}" if near else keys
    return f"{path}: unknown key" + (f"; {hint}" if hint else "")


def elsewhere(path: str) -> str | None:
    """Return where to write a well-known option that belongs somewhere else."""
    parent, _, name = path.rpartition(".")
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    # A field of another part of the block, written where it does not belong.
    places = [each for each in _PLACES.get(name, ()) if each.rpartition(".")[0] != parent]
    return f"write it as {places[0]}" if len(places) == 1 else None


_PLACES: dict[str, set[str]] = {}
"""Word of a field -> the paths, in today's words, of the fields that may be written by it."""
for _path, _place in words_of({}).paths.items():
    _PLACES.setdefault(_path.rpartition(".")[2], set()).add(_place)


def _known_keys(block: type[BaseModel]) -> list[tuple[str, ...]]:
    """Return, for every field of a block, the words that it may be written by, today's first."""
    return [words_for(name, field) for name, field in block.model_fields.items()]


def _block_at(location: list[Any]) -> type[BaseModel]:
    block: type[BaseModel] = FSMoEBlock
    for word in location:
        fields = block.model_fields.items()
        block = next(inner for name, field in fields if word in words_for(name, field) and (inner := block_in(field)))
    return block


def _unfit_null(written: Mapping[str, Any]) -> list[str]:
    gate = written.get("gate")
    if (
        not isinstance(gate, Mapping)
        or gate.get("capacity_factor", 0) is not None
        or gate.get("drop_tokens") is not True
    ):
        return []
    path = f"{BLOCK}.gate"
    return [
        f"{path}.capacity_factor = null: must be a number with {path}.drop_tokens = true; null is room for all tokens"
    ]


def _unfit_gradients(block: FSMoEBlock) -> list[str]:
    """Return problems with options of one mode that are written beside another."""
    asked = block.gradient_partition
    of_modes = {"chunk_bytes": ("fixed_chunk", "micro_ops"), "solver": ("adaptive",)}
    if _pipeline_of(block.schedule) == "by_bytes":
        del of_modes["chunk_bytes"]  # it is the size of an all-to-all's micro-op
    return [
        f"{BLOCK}.gradient_partition.{name} = {shown(getattr(asked, name))}: only with mode = "
        f"{' or '.join(map(shown, modes))}, and it is {shown(asked.mode)}; leave it out"
        for name, modes in of_modes.items()
        if name in asked.model_fields_set and asked.mode not in ("auto", *modes)
    ]


def _unfit_autotune(block: FSMoEBlock) -> list[str]:
    """Return problems with options that only the autotuner uses, and with what conflicts with it."""
    enabled = f"{BLOCK}.autotune.enabled"
    by_no_clock = block.deterministic and block.autotune.enabled == "auto"
    if block.autotune.enabled and not by_no_clock:
        why = (
            f"{enabled} = true: degrees that follow from a clock go against {BLOCK}.deterministic = true; turn one off"
        )
        problems = [why] if block.deterministic and block.autotune.enabled is True else []
        if block.autotune.retune_on_drift and not block.autotune.watch_every:
            problems.append(
                f"{BLOCK}.autotune.retune_on_drift = true: only with {BLOCK}.autotune.watch_every above 0, and it is "
                "0, so no step is compared; turn the one off or the other on"
            )
        return problems
    idle = AutotuneBlock()
    max_is_used = _pipeline_of(block.schedule) == "by_bytes" or "max" not in block.pipeline_degree.model_fields_set
    written = {
        **{
            f"autotune.{name}": (getattr(block.autotune, name), getattr(idle, name))
            for name in ("details", "cache_dir", "trials", "watch_every", "drift_threshold", "retune_on_drift")
        },
        "num_chunks.max": (block.pipeline_degree.max, block.pipeline_degree.max if max_is_used else 1),
    }
    why = "it is false; leave it out"
    if by_no_clock:
        why = f"{BLOCK}.deterministic = true measures nothing; leave one of them out"
    return [
        f'{BLOCK}.{path} = {shown(value)}: only with {enabled} = true or "auto", and {why}'
        for path, (value, idle) in written.items()
        if value != idle
    ]


def _unfit_degrees(block: FSMoEBlock) -> list[str]:
    asked = block.pipeline_degree
    degrees = {"forward": asked.forward, "backward": asked.backward}
    path = f"{BLOCK}.num_chunks"
    if block.schedule == "deepspeed":
        return [
            f'{path}.{phase} = {degree}: must be 1 or "auto" with {BLOCK}.schedule = "deepspeed", which does not cut'
            for phase, degree in degrees.items()
            if degree not in ("auto", 1)
        ]
    if block.schedule == "best":
        return []
    pipeline = _pipeline_of(block.schedule)
    is_measured = block.autotune.enabled is True or (block.autotune.enabled == "auto" and not block.deterministic)
    needs_numbers = not is_measured and pipeline != "by_bytes"
    source = f"{BLOCK}.deterministic be false" if block.deterministic else f"{BLOCK}.autotune.enabled be true"
    problems = [
        f'{path}.{phase} = "auto" with {BLOCK}.schedule = {shown(block.schedule)}: must be a number, or '
        f"{source}, so that something is measured that it could follow from"
        for phase, degree in degrees.items()
        if degree == "auto" and needs_numbers
    ]
    if not problems and asked.forward != asked.backward and pipeline in ("common", "by_bytes"):
        problems.append(
            f"{path} = {asked.forward} forward and {asked.backward} backward: must be equal with {BLOCK}.schedule = "
            f"{shown(block.schedule)}, which has one degree for both phases"
        )
    return problems


def _pipeline_of(schedule: str) -> str:
    """Return what the degrees of a schedule follow from, see :class:`~ds_fsmoe.planning.presets.Switches`."""
    if schedule == "best":
        return ""
    from ds_fsmoe.planning.presets import PRESETS

    return PRESETS[schedule]().pipeline if schedule in PRESETS else ""


def _unfit_packing(block: FSMoEBlock) -> list[str]:
    """Return problems with an ``ep_size`` beside the policy that chooses one."""
    if block.placement.policy != "lina" or block.ep_size == "auto":
        return []
    return [
        f'{BLOCK}.ep_size = {block.ep_size}: must be "auto", or left out, with {BLOCK}.placement.policy = "lina", '
        "which chooses it at the start; the other policies go with a number"
    ]


def _unknown_cluster(block: FSMoEBlock) -> list[str]:
    if block.trace.cluster is None:
        return []
    from ds_fsmoe.planning.cluster import load_cluster

    try:
        load_cluster(block.trace.cluster)
    except ValueError as error:
        return [f"{BLOCK}.trace.cluster = {shown(block.trace.cluster)}: {error}"]
    return []


def _import_plugins(block: FSMoEBlock) -> None:
    for name in block.plugins:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever the module, or a name that is none, brings up
            raise ConfigError(f"{BLOCK}.plugins = {shown(name)}: cannot be imported: {error}") from error


def _import_trusted(block: FSMoEBlock) -> None:
    for name in block.checkpoint.trusted:
        module, _, attribute = name.rpartition(".")
        try:
            getattr(importlib.import_module(module), attribute)
        except Exception as error:  # likewise
            raise ConfigError(f"{BLOCK}.checkpoint.trusted = {shown(name)}: cannot be imported: {error}") from error


def _missing_parts(block: FSMoEBlock) -> list[str]:
    wanted = {"order": block.order, "alltoall": block.alltoall, "gate.type": block.gate.type if block.gate else "topk"}
    problems = []
    for path, name in wanted.items():
        names = registry.known(path.split(".")[0])
        auto = () if path == "gate.type" else ("auto",)
        if name not in (*auto, *names):
            problems.append(
                f"{BLOCK}.{path} = {shown(name)}: no such part; the choices are {', '.join((*auto, *names))}"
            )
    return problems


def _unknown_keys_of_topk(block: FSMoEBlock) -> list[str]:
    """Return unknown keys of the layers' own gate: it has no options but those of the block itself."""
    if block.gate is None or block.gate.type != "topk":
        return []
    return [_unknown_key(f"{BLOCK}.gate.{name}", _known_keys(GateBlock)) for name in block.gate.model_extra or ()]


def _unknown_gate_options(block: FSMoEBlock, written: Any) -> list[str]:
    """Return options that the chosen gate does not have, by the signature of its class."""
    if block.gate is None or block.gate.type == "topk" or block.gate.type not in registry.known("gate"):
        return []
    parameters = inspect.signature(registry.lookup("gate", block.gate.type)).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return []  # it takes what it is given, and answers for that itself
    names = [each.name for each in parameters]
    problems = []
    for name, value in block.gate.options(names).items():
        if name in names:
            continue
        if name not in (*written, "k"):
            name, value = "capacity_factor", None  # which stands for drop_tokens = false
        near = difflib.get_close_matches(name, names, n=1)
        listed = f"its options are {', '.join(names) or 'none'}"
        hint = f"did you mean {near[0]!r}? I{listed[1:]}" if near else listed
        problems.append(
            f"{BLOCK}.gate.{name} = {shown(value)}: the gate {shown(block.gate.type)} has no such option; "
            f"{elsewhere(f'{BLOCK}.gate.{name}') or hint}"
        )
    return problems
