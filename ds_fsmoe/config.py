# SPDX-License-Identifier: Apache-2.0
"""The ``"fsmoe"`` block of ds_config.json: its fields, what they may hold, and what this version can do.

Everything that is wrong with a block is found here, on every rank, before any process group is made, and said in one
error that lists each path with its value and the choices. Every default means "the best that exists by now"; an
option that a user sets to something this version cannot do is refused, never ignored.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from ds_fsmoe import registry
from ds_fsmoe.blocks import AutotuneBlock, FSMoEBlock, GateBlock

BLOCK = "fsmoe"


class ConfigError(ValueError):
    """A block that cannot be used. The message names every path, its value and the choices."""


# What the options ask for that this version cannot do yet: path -> (values that are true of this version, why not the
# others). Only what a user wrote is held against it, so a default never is. Whoever brings a machine removes its row.
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "solver": ((), "degrees are searched by simulating all of them in this version"),
}


def read_block(ds_config: Mapping[str, Any]) -> FSMoEBlock | None:
    """The validated block of a DeepSpeed config, or ``None`` where there is none.

    Raises:
        ConfigError: the block is misspelt or wrong, or asks for what this version cannot do.
    """
    _refuse_misspelt_block(ds_config)
    if BLOCK not in ds_config:
        return None
    written = ds_config[BLOCK]
    if not isinstance(written, Mapping):
        raise ConfigError(f'{BLOCK} = {shown(written)}: must be an object, for example {{"enabled": true}}')
    if written and "enabled" not in written and set(written) <= set(FSMoEBlock.model_fields):
        raise ConfigError(f'{BLOCK}.enabled is missing: write "enabled": true, or false for stock DeepSpeed')
    try:
        block = FSMoEBlock.model_validate(dict(written))
    except ValidationError as error:
        raise ConfigError(join_problems(_sentences(error.errors()))) from None
    if not block.enabled:
        # Stock DeepSpeed runs, so what this version can do is not asked.
        if problems := _unknown_keys_of_topk(block):
            raise ConfigError(join_problems(problems))
        return block
    _import_plugins(block)
    _import_trusted(block)
    problems = [
        *_refused(block),
        *_missing_parts(block),
        *(_unknown_keys_of_topk(block) or _unknown_gate_options(block)),
        *_unfit_degrees(block),
        *_unfit_autotune(block),
        *_unfit_gradients(block),
        *_unknown_cluster(block),
    ]
    if problems:
        raise ConfigError(join_problems(problems))
    return block


def join_problems(problems: Iterable[str]) -> str:
    """One sentence as it is, several under a heading."""
    problems = list(problems)
    return problems[0] if len(problems) == 1 else "\n".join([f"{len(problems)} problems:", *problems])


def _refuse_misspelt_block(ds_config: Mapping[str, Any]) -> None:
    """DeepSpeed accepts unknown top-level keys in silence, so a misspelt block would do nothing, unnoticed."""
    for key in ds_config:
        letters = re.sub(r"[^a-z]", "", str(key).lower())
        if key != BLOCK and (BLOCK in letters or difflib.SequenceMatcher(None, letters, BLOCK).ratio() >= 0.8):
            raise ConfigError(f'{key} = ...: no such block in a DeepSpeed config; did you mean "{BLOCK}"?')


def _sentences(errors: Iterable[Mapping[str, Any]]) -> list[str]:
    """Pydantic's errors in this project's form, one per path: ``path = value: must be ...``."""
    musts: dict[str, list[str]] = {}
    listed: set[str] = set()
    for error in errors:
        # A field of two types has an error per type, with the type as the last part of the location.
        location = [part for part in error["loc"] if part not in ("int", "constrained-int", "literal['auto']")]
        path = ".".join([BLOCK, *map(str, location)])
        if error["type"] == "extra_forbidden":
            parent = path.rpartition(".")[0]
            musts[_unknown_key(path, _fields_at(location[:-1]), is_listed=parent not in listed)] = []
            listed.add(parent)
            continue
        must = "must be an object" if error["type"] == "model_type" else error["msg"]
        must = re.sub(r"^[Ii]nput should be |^must be ", "", must).replace("a valid ", "a ").replace("a int", "an int")
        musts.setdefault(f"{path} = {shown(error['input'])}: must be ", []).append(must)
    return [start + " or ".join(ends) for start, ends in musts.items()]


# What other projects, or DeepSpeed's layer, call things that are not here under that name.
_OF_THE_MODEL = "it is an argument of MoE(...), where the model is built"
_ELSEWHERE = {
    "ep_size": f"{_OF_THE_MODEL}; {BLOCK}.esp_size is another thing: how many ranks share one expert",
    "num_experts": _OF_THE_MODEL,
    "hidden_size": _OF_THE_MODEL,
    "use_residual": _OF_THE_MODEL,
    "top_k": f"write it as {BLOCK}.gate.k",
    "topk": f"write it as {BLOCK}.gate.k",
    "moe_router_topk": f"write it as {BLOCK}.gate.k",
    "num_chunks": f"write it as {BLOCK}.pipeline_degree.forward and .backward",
    "expert_tensor_parallel_size": f"write it as {BLOCK}.esp_size",
    "autotuning": f"write it as {BLOCK}.autotune; DeepSpeed's own autotuning stands beside {BLOCK}, not in it",
}


def _unknown_key(path: str, choices: list[str], is_listed: bool = True) -> str:
    """A sentence with the nearest key there is, and, where they were not ``is_listed`` before, all of them."""
    name = path.rpartition(".")[2]
    if hint := elsewhere(path):
        return f"{path}: unknown key; {hint}"
    near = difflib.get_close_matches(name, choices, n=1)
    keys = f"the keys are {', '.join(choices)}" if is_listed else ""
    hint = f"did you mean {near[0]!r}?{' ' if keys else ''}{keys[:1].upper()}{keys[1:]}" if near else keys
    return f"{path}: unknown key" + (f"; {hint}" if hint else "")


def elsewhere(path: str) -> str | None:
    """Where to write what a key with a well-known name stands for, if it has its place somewhere else."""
    name = path.rpartition(".")[2]
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    # A field of another part of the block, written where it does not belong.
    owners = [each for each in _FIELDS_OF_BLOCKS.get(name, ()) if f"{each}.{name}" != path]
    return f"write it as {owners[0]}.{name}" if len(owners) == 1 else None


def _fields_of_blocks(block: type[BaseModel], path: str) -> Iterator[tuple[str, str]]:
    for name, field in block.model_fields.items():
        yield name, path
        for each in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(each, type) and issubclass(each, BaseModel):
                yield from _fields_of_blocks(each, f"{path}.{name}")


_FIELDS_OF_BLOCKS: dict[str, list[str]] = {}
for _name, _path in _fields_of_blocks(FSMoEBlock, BLOCK):
    _FIELDS_OF_BLOCKS.setdefault(_name, []).append(_path)


def shown(value: Any) -> str:
    """A value as it stands in the JSON file."""
    return json.dumps(value, default=repr)


def _fields_at(location: list[Any]) -> list[str]:
    block: Any = FSMoEBlock
    for name in location:
        annotation = block.model_fields[name].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        block = next(each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel))
    return list(block.model_fields)


def _written(block: BaseModel, prefix: str = "") -> dict[str, Any]:
    """Path -> value of every field that the user wrote, without the defaults."""
    found: dict[str, Any] = {}
    for name in block.model_fields_set:
        value = getattr(block, name)
        found |= _written(value, f"{prefix}{name}.") if isinstance(value, BaseModel) else {prefix + name: value}
    return found


def _refused(block: FSMoEBlock) -> list[str]:
    problems = []
    for path, value in sorted(_written(block).items()):
        values, why = _ONLY.get(path, ((value,), ""))
        # 1 == True in Python, so the type is compared as well.
        if not any(value == each and type(value) is type(each) for each in values):
            instead = f"use {' or '.join(map(shown, values))}, or leave it out" if values else "leave it out"
            problems.append(f"{BLOCK}.{path} = {shown(value)}: not yet: {why}; {instead}")
    return problems


# Schedule -> what its degrees have to be. Those not named take a degree per phase.
_COMMON_DEGREE = ("tutel", "tutel_improved", "pipemoe_lina")


def _unfit_gradients(block: FSMoEBlock) -> list[str]:
    """Options of one mode, written beside another."""
    asked = block.gradient_partition
    of_mode = {"chunk_bytes": "fixed_chunk", "solver": "adaptive"}
    return [
        f"{BLOCK}.gradient_partition.{name} = {shown(getattr(asked, name))}: only with mode = {shown(mode)}, and it is "
        f"{shown(asked.mode)}; leave it out"
        for name, mode in of_mode.items()
        if name in asked.model_fields_set and asked.mode not in ("auto", mode)
    ]


def _unfit_autotune(block: FSMoEBlock) -> list[str]:
    """Options that mean something to the autotuner alone, and what goes against it."""
    enabled = f"{BLOCK}.autotune.enabled"
    if block.autotune.enabled:
        why = (
            f"{enabled} = true: degrees that follow from a clock go against {BLOCK}.deterministic = true; turn one off"
        )
        problems = [why] if block.deterministic else []
        if block.autotune.retune_on_drift and not block.autotune.watch_every:
            problems.append(
                f"{BLOCK}.autotune.retune_on_drift = true: only with {BLOCK}.autotune.watch_every above 0, and it is "
                "0, so no step is compared; turn the one off or the other on"
            )
        return problems
    idle = AutotuneBlock()
    written = {
        **{
            f"autotune.{name}": (getattr(block.autotune, name), getattr(idle, name))
            for name in ("cache_dir", "trials", "watch_every", "drift_threshold", "retune_on_drift")
        },
        "pipeline_degree.max": (
            block.pipeline_degree.max,
            1 if "max" in block.pipeline_degree.model_fields_set else 16,
        ),
    }
    return [
        f"{BLOCK}.{path} = {shown(value)}: only with {enabled} = true, and it is false; leave it out"
        for path, (value, idle) in written.items()
        if value != idle
    ]


def _unfit_degrees(block: FSMoEBlock) -> list[str]:
    asked = block.pipeline_degree
    degrees = {"forward": asked.forward, "backward": asked.backward}
    path = f"{BLOCK}.pipeline_degree"
    if block.schedule == "deepspeed":
        return [
            f'{path}.{phase} = {degree}: must be 1 or "auto" with {BLOCK}.schedule = "deepspeed", which does not cut'
            for phase, degree in degrees.items()
            if degree not in ("auto", 1)
        ]
    if block.schedule == "best":
        return []
    problems = [
        f'{path}.{phase} = "auto" with {BLOCK}.schedule = {shown(block.schedule)}: must be a number, or '
        f"{BLOCK}.autotune.enabled be true, so that something is measured that it could follow from"
        for phase, degree in degrees.items()
        if degree == "auto" and not block.autotune.enabled
    ]
    if not problems and block.schedule in _COMMON_DEGREE and asked.forward != asked.backward:
        problems.append(
            f"{path} = {asked.forward} forward and {asked.backward} backward: must be equal with {BLOCK}.schedule = "
            f"{shown(block.schedule)}, which has one degree for both phases"
        )
    return problems


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
    """For the layers' own gate there are no options but those of the block itself."""
    if block.gate is None or block.gate.type != "topk":
        return []
    return [_unknown_key(f"{BLOCK}.gate.{name}", list(GateBlock.model_fields)) for name in block.gate.model_extra or ()]


def _unknown_gate_options(block: FSMoEBlock) -> list[str]:
    """Options that the chosen gate does not have, by the signature of its class."""
    if block.gate is None or block.gate.type == "topk" or block.gate.type not in registry.known("gate"):
        return []
    parameters = inspect.signature(registry.lookup("gate", block.gate.type)).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return []  # it takes what it is given, and answers for that itself
    names = [each.name for each in parameters]
    problems = []
    for name, value in block.gate.options().items():
        if name in names:
            continue
        near = difflib.get_close_matches(name, names, n=1)
        listed = f"its options are {', '.join(names) or 'none'}"
        hint = f"did you mean {near[0]!r}? I{listed[1:]}" if near else listed
        problems.append(
            f"{BLOCK}.gate.{name} = {shown(value)}: the gate {shown(block.gate.type)} has no such option; "
            f"{elsewhere(f'{BLOCK}.gate.{name}') or hint}"
        )
    return problems
