# SPDX-License-Identifier: Apache-2.0
"""Reads the ``"fsmoe"`` block of ds_config.json: fields, values and the limits of this version.

The entry points and the builder call it. All mistakes of a block are found here, on every rank, before any process
group is made. One error lists each path with its value and the remedy. Every default means "the best that exists by
now". An option with a value that this version does not support is refused, never ignored.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ds_fsmoe import registry
from ds_fsmoe.config.blocks import AutotuneBlock, FSMoEBlock, GateBlock, PlacementBlock
from ds_fsmoe.config.words import BLOCK, Words, elsewhere, words_of
from ds_fsmoe.planning.placement_policies import policy
from ds_fsmoe.shapes import known_keys, sentences, shown, unknown_key, words_for
from ds_fsmoe.untrusted import NAMES_OF_BEFORE, suggested

_DESCRIBED = {
    BLOCK: "docs/config.md describes all keys",
    f"{BLOCK}.schedule": '"best", or a system of docs/schedules.md to compare with',
}
"""Path in the block -> the description of the keys or values there, which are too many for a list."""


class ConfigError(ValueError):
    """Says that the block cannot be used. The message has a line for each mistake, with its path, its value and the
    choices.

    It is a ``ValueError``, raised on every rank before any process group is made.

    Examples:
        >>> import ds_fsmoe
        >>> try:
        ...     ds_fsmoe.Config(max_ctas=100, gate=3)
        ... except ds_fsmoe.ConfigError as error:
        ...     print(error)
        2 problems:
        fsmoe.gate = 3: must be an object or the name of a gate, for example {"type": "mixtral"}
        fsmoe.max_ctas = 100: must be less than or equal to 64 or 'auto'
    """


def read_block(ds_config: Mapping[str, Any]) -> FSMoEBlock | None:
    """Return the validated block of a DeepSpeed config; ``None`` if there is none.

    Raises:
        ConfigError: the block is misspelt or wrong, or has a value that this version does not support; one line for
            each mistake.
    """
    refuse_misspelt_block(ds_config)
    if BLOCK not in ds_config:
        return None
    written = ds_config[BLOCK]
    if not isinstance(written, Mapping):
        raise ConfigError(f'{BLOCK} = {shown(written)}: must be an object, for example {{"enabled": true}}')
    words = words_of(written)
    unfit = {**words.twice, **_unfit_null(written)}
    problems = [*_misplaced_autotuner(ds_config), *_missing_switch(written), *unfit.values()]
    block, wrong, mistakes = _validated(words)
    problems += mistakes
    failed: list[NotImported] = []
    if block.enabled:
        failed = not_imported(block)
        wrong |= {each.field for each in failed} | {_field_of(path.split(".")[1]) for path in unfit}
        found = problems_together(block, written, ds_config, wrong)
        # Two phases that were written as one number have one problem.
        found = list(dict.fromkeys(map(words.as_written, found)))
        problems += [*(each.sentence for each in failed), *found]
    else:
        # Stock DeepSpeed runs, so what this version can do is not asked.
        problems += unknown_keys_of_topk(block)
    if problems:
        raise ConfigError(join_problems(problems)) from next((each.cause for each in failed), None)
    return block


def _validated(words: Words) -> tuple[FSMoEBlock, set[str], list[str]]:
    """Return (block, names of its wrong fields, a sentence about each). Wrong fields have their defaults in the
    block."""
    try:
        return FSMoEBlock.model_validate(words.normalized), set(), []
    except ValidationError as error:
        wrong = {_field_of(each["loc"][0]) for each in error.errors()}
        found = sentences(error, FSMoEBlock, (BLOCK,), elsewhere, _DESCRIBED)
    right = {word: value for word, value in words.normalized.items() if _field_of(word) not in wrong}
    # A block that was written as one value has an error for each field that it sets.
    return FSMoEBlock.model_validate(right), wrong, list(dict.fromkeys(map(words.as_written, found)))


def _field_of(word: Any) -> str:
    """Return the name of the field of the block for a word; an unknown word is returned as it is."""
    return next((name for name, field in FSMoEBlock.model_fields.items() if word in words_for(name, field)), str(word))


def join_problems(problems: Iterable[str]) -> str:
    """Return one sentence as it is, several under a heading."""
    problems = list(problems)
    return problems[0] if len(problems) == 1 else "\n".join([f"{len(problems)} problems:", *problems])


def refuse_misspelt_block(ds_config: Mapping[str, Any]) -> None:
    """Refuse a misspelt block: DeepSpeed accepts unknown top-level keys without a message, so it would have no
    effect."""
    for key in ds_config:
        letters = re.sub(r"[^a-z]", "", str(key).lower())
        if key != BLOCK and (BLOCK in letters or difflib.SequenceMatcher(None, letters, BLOCK).ratio() >= 0.8):
            raise ConfigError(f'{key} = ...: no such block in a DeepSpeed config; did you mean "{BLOCK}"?')


def _misplaced_autotuner(ds_config: Mapping[str, Any]) -> list[str]:
    """Return a sentence if our autotuner is written outside of our block, in the place of DeepSpeed's."""
    return [
        f"{key} = ...: no such block in a DeepSpeed config; write it as {BLOCK}.autotune, which chooses how layers "
        "run. DeepSpeed's search for batch sizes and ZeRO settings is the key autotuning"
        for key in ds_config
        if re.sub(r"[^a-z]", "", str(key).lower()) in ("autotune", "autotuner")
    ]


def _missing_switch(written: Mapping[str, Any]) -> list[str]:
    """Return a sentence if ``enabled`` is missing, unless a misspelt key was meant as ``enabled``."""
    keys = [word for words in known_keys(FSMoEBlock) for word in words]
    misspelt = [difflib.get_close_matches(str(each), keys, n=1) for each in set(written) - set(keys)]
    if "enabled" in written or ["enabled"] in misspelt:
        return []
    return [f'{BLOCK}.enabled is missing: write "enabled": true, or false for stock DeepSpeed']


def _unfit_null(written: Mapping[str, Any]) -> dict[str, str]:
    """Return path -> sentence for a gate that should both drop tokens and have capacity for all."""
    gate = written.get("gate")
    if (
        not isinstance(gate, Mapping)
        or gate.get("capacity_factor", 0) is not None
        or gate.get("drop_tokens") is not True
    ):
        return {}
    path = f"{BLOCK}.gate"
    return {
        path: f"{path}.capacity_factor = null: must be a number with {path}.drop_tokens = true; null drops no tokens"
    }


# ---- Checks what the fields of an enabled block mean together, and with the parts that there are


STAY = ("off", "lina")
"""The policies by which no expert moves while training goes on."""
_OF_MOVES = ("every", "moves_per_step", "pays_within")


@dataclass(frozen=True)
class Asked:
    """Holds the input of a check."""

    block: FSMoEBlock
    written_gate: Any
    """The gate as the user has written it; ``None`` without one."""
    stage: Any
    """The stage of ZeRO that the DeepSpeed config asks for."""


def problems_together(
    block: FSMoEBlock, written: Mapping[str, Any], ds_config: Mapping[str, Any], wrong: Collection[str]
) -> list[str]:
    """Return problems with combinations of fields that are valid individually.

    Args:
        block: the block, enabled, in which wrong fields have their defaults.
        written: the block in the user's form.
        ds_config: the DeepSpeed config.
        wrong: names of wrong fields. Their combinations are not checked, since the intended value is unknown.
    """
    zero = ds_config.get("zero_optimization", {})
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    asked = Asked(block, written.get("gate"), stage)
    return [problem for check, reads in CHECKS.items() if not {*reads} & {*wrong} for problem in check(asked)]


def _unfit_collective(asked: Asked) -> list[str]:
    """Return problems with a reduce-scatter: if every rank updates all parameters, or a slice is of one tensor."""
    block, stage = asked.block, asked.stage
    if block.gradient_partition.collective != "reduce_scatter":
        return []
    mode = block.gradient_partition.mode
    if mode == "micro_ops" or (mode == "auto" and _pipeline_of(block.schedule) == "by_bytes"):
        return [
            f'{BLOCK}.gradient_partition.collective = "reduce_scatter": a slice of one tensor (mode "micro_ops", '
            'schedule "lina") mostly belongs to one rank, whose link alone would carry it; use "auto" or "all_reduce"'
        ]
    if stage in (1, 2):
        return []
    return [
        f'{BLOCK}.gradient_partition.collective = "reduce_scatter": every rank needs all gradients at '
        f'zero_optimization.stage = {stage}; use "auto" or "all_reduce", or stage 1 or 2'
    ]


def _unfit_gradients(of: Asked) -> list[str]:
    """Return problems with options of one mode that are written with another mode."""
    block, asked = of.block, of.block.gradient_partition
    of_modes = {"chunk_bytes": ("fixed_chunk", "micro_ops"), "solver": ("adaptive",)}
    if _pipeline_of(block.schedule) == "by_bytes":
        del of_modes["chunk_bytes"]  # it is the size of an all-to-all's micro-op
    return [
        f"{BLOCK}.gradient_partition.{name} = {shown(getattr(asked, name))}: only with mode = "
        f"{' or '.join(map(shown, modes))}, and it is {shown(asked.mode)}; leave it out"
        for name, modes in of_modes.items()
        if name in asked.model_fields_set and asked.mode not in ("auto", *modes)
    ]


def _unfit_autotune(asked: Asked) -> list[str]:
    """Return problems with options that only the autotuner uses, and conflicts with it."""
    block = asked.block
    enabled = f"{BLOCK}.autotune.enabled"
    by_no_clock = block.deterministic and block.autotune.enabled == "auto"
    if block.autotune.enabled and not by_no_clock:
        why = f"{enabled} = true and {BLOCK}.deterministic = true: tuning depends on timings; remove one of them"
        problems = [why] if block.deterministic and block.autotune.enabled is True else []
        if block.autotune.retune_on_drift and not block.autotune.watch_every:
            problems.append(
                f"{BLOCK}.autotune.retune_on_drift = true: only with {BLOCK}.autotune.watch_every above 0, and it is "
                "0; set watch_every, or remove retune_on_drift"
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
    why = "it is false; remove it"
    if by_no_clock:
        why = f"{BLOCK}.deterministic = true measures nothing; remove one of them"
    return [
        f'{BLOCK}.{path} = {shown(value)}: only with {enabled} = true or "auto", and {why}'
        for path, (value, idle) in written.items()
        if value != idle
    ]


def _unfit_degrees(of: Asked) -> list[str]:
    block, asked = of.block, of.block.pipeline_degree
    degrees = {"forward": asked.forward, "backward": asked.backward}
    path = f"{BLOCK}.num_chunks"
    if block.schedule == "deepspeed":
        return [
            f'{path}.{phase} = {degree}: must be 1 or "auto" with {BLOCK}.schedule = "deepspeed", which has one chunk'
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
        f"{source}, as a choice needs measurements"
        for phase, degree in degrees.items()
        if degree == "auto" and needs_numbers
    ]
    if not problems and asked.forward != asked.backward and pipeline in ("common", "by_bytes"):
        problems.append(
            f"{path} = {asked.forward} forward and {asked.backward} backward: must be equal with {BLOCK}.schedule = "
            f"{shown(block.schedule)}, which has the same number in both phases"
        )
    return problems


def _pipeline_of(schedule: str) -> str:
    """Return the rule by which a schedule chooses its numbers of chunks, see
    :class:`~ds_fsmoe.planning.decide.presets.Switches`."""
    if schedule == "best":
        return ""
    from ds_fsmoe.planning.decide.presets import PRESETS

    return PRESETS[schedule]().pipeline if schedule in PRESETS else ""


def _unfit_packing(asked: Asked) -> list[str]:
    """Return problems with an ``ep_size`` next to the policy that chooses one."""
    block = asked.block
    if block.placement.policy != "lina" or block.ep_size == "auto":
        return []
    return [
        f'{BLOCK}.ep_size = {block.ep_size}: must be "auto" with {BLOCK}.placement.policy = "lina", which '
        "chooses it at the start; remove one of them"
    ]


def _unknown_cluster(asked: Asked) -> list[str]:
    block = asked.block
    if block.trace.cluster is None:
        return []
    from ds_fsmoe.planning.cluster import load_cluster

    try:
        load_cluster(block.trace.cluster)
    except ValueError as error:
        return [f"{BLOCK}.trace.cluster = {shown(block.trace.cluster)}: {error}"]
    return []


@dataclass(frozen=True)
class NotImported:
    """Holds the reason why a module or class could not be imported."""

    field: str
    """The field of the block that names it."""
    sentence: str
    cause: Exception


def not_imported(block: FSMoEBlock) -> list[NotImported]:
    """Import the modules and classes that a block names; return those that fail.

    Args:
        block: the block, enabled.
    """
    # Without torch nothing runs, and hooks are of no use.
    hooks = block.hooks if importlib.util.find_spec("torch") is not None else ()
    named = [("plugins", "plugins", each) for each in block.plugins]
    named += [("hooks", "hooks", each) for each in hooks]
    named += [("checkpoint", "checkpoint.trusted", each) for each in block.checkpoint.trusted]
    failed = []
    for field, path, name in named:
        module, _, attribute = name.rpartition(".")
        try:
            if field == "plugins":
                importlib.import_module(name)
            else:
                getattr(importlib.import_module(module), attribute)
        except Exception as error:  # whatever the module, or a name that is none, brings up
            failed.append(NotImported(field, f"{BLOCK}.{path} = {shown(name)}: cannot be imported: {error}", error))
    return failed


def _missing_part(kind: str, path: str, name: str, own: str) -> list[str]:
    # Without torch nothing runs, and there are no parts to choose from: what plans has no use for them.
    if name == own or importlib.util.find_spec("torch") is None:
        return []
    names = registry.known(kind)
    if name in names:
        return []
    choices = names if own in names else (own, *names)
    return [
        f"{BLOCK}.{path} = {shown(name)}: no such part; "
        f"{suggested(name, choices, before=NAMES_OF_BEFORE.get(kind, {}))}"
    ]


def _missing_order(asked: Asked) -> list[str]:
    return _missing_part("order", "order", asked.block.order, "auto")


def _missing_alltoall(asked: Asked) -> list[str]:
    return _missing_part("alltoall", "alltoall", asked.block.alltoall, "auto")


def _missing_gate(asked: Asked) -> list[str]:
    gate = asked.block.gate
    return [] if gate is None else _missing_part("gate", "gate.type", gate.type, "topk")


def unknown_keys_of_topk(block: FSMoEBlock) -> list[str]:
    """Return unknown keys of the layers' own gate, whose only options are those of the block itself."""
    if block.gate is None or block.gate.type != "topk":
        return []
    path, keys = f"{BLOCK}.gate", known_keys(GateBlock)
    return [unknown_key(path, each, keys, elsewhere(f"{path}.{each}")) for each in block.gate.model_extra or ()]


def _unknown_gate_options(asked: Asked) -> list[str]:
    """Return options that the chosen gate lacks, by the signature of its class."""
    block = asked.block
    if block.gate is None or block.gate.type == "topk":
        return unknown_keys_of_topk(block)
    if not block.gate.options() or _missing_gate(asked) or importlib.util.find_spec("torch") is None:
        return []
    parameters = inspect.signature(registry.lookup("gate", block.gate.type)).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return []  # it takes what it is given, and answers for that itself
    names = [each.name for each in parameters]
    problems = []
    for name, value in block.gate.options(names).items():
        if name in names:
            continue
        if name not in (*asked.written_gate, "k"):
            name, value = "capacity_factor", None  # which stands for drop_tokens = false
        hint = suggested(name, names, f"its options are {', '.join(names) or 'none'}")
        problems.append(
            f"{BLOCK}.gate.{name} = {shown(value)}: the gate {shown(block.gate.type)} has no such option; "
            f"{elsewhere(f'{BLOCK}.gate.{name}') or hint}"
        )
    return problems


def _unfit_placement(of: Asked) -> list[str]:
    """Return problems with the placement of a block."""
    block, asked, path = of.block, of.block.placement, f"{BLOCK}.placement"
    problems = []
    if asked.policy not in STAY:
        try:
            policy(asked.policy)
        except ValueError as error:
            return [f"{path}.policy = {shown(asked.policy)}: {error}"]
        if block.esp_size > 1:
            problems.append(
                f"{path}.policy = {shown(asked.policy)}: sharded experts cannot move; use "
                f'{BLOCK}.expert_tensor_parallel_size = 1, or the policy "off"'
            )
    else:
        idle = PlacementBlock()
        problems += [
            f"{path}.{name} = {shown(getattr(asked, name))}: only with a policy by which experts move, such as "
            f"balanced, and it is {shown(asked.policy)}; leave it out"
            for name in _OF_MOVES
            if name in asked.model_fields_set and getattr(asked, name) != getattr(idle, name)
        ]
    return problems


CHECKS: dict[Callable[[Asked], list[str]], tuple[str, ...]] = {
    _missing_order: ("plugins", "order"),
    _missing_alltoall: ("plugins", "alltoall"),
    _missing_gate: ("plugins", "gate"),
    _unknown_gate_options: ("plugins", "gate"),
    _unfit_degrees: ("pipeline_degree", "schedule", "autotune", "deterministic"),
    _unfit_autotune: ("autotune", "deterministic", "pipeline_degree", "schedule"),
    _unfit_gradients: ("gradient_partition", "schedule"),
    _unfit_packing: ("placement", "ep_size"),
    _unfit_placement: ("placement", "esp_size"),
    _unfit_collective: ("gradient_partition", "schedule"),
    _unknown_cluster: ("trace",),
}
"""Each check -> the fields of the block that it reads."""
