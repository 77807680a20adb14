# SPDX-License-Identifier: Apache-2.0
"""Reads the ``"fsmoe"`` block of ds_config.json: its fields, what they may hold, and what this version can do.

Everything that is wrong with a block is found here, on every rank, before any process group is made, and reported in
one error that lists each path with its value and the choices. Every default means "the best that exists by now"; an
option that a user sets to something this version cannot do is refused, never ignored.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.together import NotImported, not_imported, problems_together, unknown_keys_of_topk
from ds_fsmoe.config.words import BLOCK, Words, elsewhere, words_of
from ds_fsmoe.shapes import known_keys, sentences, shown, words_for

_SCHEDULES = '"best", or a system of docs/schedules.md to compare with'


class ConfigError(ValueError):
    """The block cannot be used. The message has a line for each mistake, with its path, its value and the choices.

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
    """Return the validated block of a DeepSpeed config, or ``None`` where there is none.

    Raises:
        ConfigError: the block is misspelt or wrong, or asks for what this version cannot do; one line for each mistake.
    """
    refuse_misspelt_block(ds_config)
    if BLOCK not in ds_config:
        return None
    written = ds_config[BLOCK]
    if not isinstance(written, Mapping):
        raise ConfigError(f'{BLOCK} = {shown(written)}: must be an object, for example {{"enabled": true}}')
    words = words_of(written)
    unfit = {**words.twice, **_unfit_null(written)}
    problems = [*_beside_the_block(ds_config), *_missing_switch(written), *unfit.values()]
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
    """Return the block with these words, the names of its wrong fields, which have their defaults in it, and a sentence
    about each."""
    try:
        return FSMoEBlock.model_validate(words.once), set(), []
    except ValidationError as error:
        wrong = {_field_of(each["loc"][0]) for each in error.errors()}
        found = sentences(error, FSMoEBlock, (BLOCK,), elsewhere, {f"{BLOCK}.schedule": _SCHEDULES})
    right = {word: value for word, value in words.once.items() if _field_of(word) not in wrong}
    # A block that was written as one value has an error for each field that it stands for.
    return FSMoEBlock.model_validate(right), wrong, list(dict.fromkeys(map(words.as_written, found)))


def _field_of(word: Any) -> str:
    """Return the name of the field of the block that is written by a word; a word of no field is its own."""
    return next((name for name, field in FSMoEBlock.model_fields.items() if word in words_for(name, field)), str(word))


def join_problems(problems: Iterable[str]) -> str:
    """Return one sentence as it is, several under a heading."""
    problems = list(problems)
    return problems[0] if len(problems) == 1 else "\n".join([f"{len(problems)} problems:", *problems])


def refuse_misspelt_block(ds_config: Mapping[str, Any]) -> None:
    """Refuse a misspelt block: DeepSpeed silently accepts unknown top-level keys, so it would do nothing, unnoticed."""
    for key in ds_config:
        letters = re.sub(r"[^a-z]", "", str(key).lower())
        if key != BLOCK and (BLOCK in letters or difflib.SequenceMatcher(None, letters, BLOCK).ratio() >= 0.8):
            raise ConfigError(f'{key} = ...: no such block in a DeepSpeed config; did you mean "{BLOCK}"?')


def _beside_the_block(ds_config: Mapping[str, Any]) -> list[str]:
    """Return a sentence about our autotuner where it is written beside our block, in the place of DeepSpeed's."""
    return [
        f"{key} = ...: no such block in a DeepSpeed config; {BLOCK}.autotune, which chooses how layers are run, "
        f"stands in {BLOCK}; DeepSpeed's own search for batch sizes and ZeRO settings is called autotuning and "
        "stands beside it"
        for key in ds_config
        if re.sub(r"[^a-z]", "", str(key).lower()) in ("autotune", "autotuner")
    ]


def _missing_switch(written: Mapping[str, Any]) -> list[str]:
    """Return a sentence where nothing says whether the block is on, unless a misspelt key was meant to."""
    keys = [word for words in known_keys(FSMoEBlock) for word in words]
    misspelt = [difflib.get_close_matches(str(each), keys, n=1) for each in set(written) - set(keys)]
    if "enabled" in written or ["enabled"] in misspelt:
        return []
    return [f'{BLOCK}.enabled is missing: write "enabled": true, or false for stock DeepSpeed']


def _unfit_null(written: Mapping[str, Any]) -> dict[str, str]:
    """Return a sentence, by its path, about a gate that is to drop tokens and to have room for all."""
    gate = written.get("gate")
    if (
        not isinstance(gate, Mapping)
        or gate.get("capacity_factor", 0) is not None
        or gate.get("drop_tokens") is not True
    ):
        return {}
    path = f"{BLOCK}.gate"
    return {
        path: f"{path}.capacity_factor = null: must be a number with {path}.drop_tokens = true; null is room for all "
        "tokens"
    }
