# SPDX-License-Identifier: Apache-2.0
"""Writes the reference of the ``"fsmoe"`` block in docs/config.md from its fields.

``python -m tools.config_page`` writes the page again: what stands between marks is made from
``ds_fsmoe/config/blocks.py``, and what stands behind them, such as a link, is left as it is. A field that is new gets a
section at its place.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from ds_fsmoe import TokenChoiceGate, registry
from ds_fsmoe.config.blocks import FSMoEBlock, GateBlock
from ds_fsmoe.config.schema import schema
from ds_fsmoe.shapes import example_of, old_values, shape_in, words_for

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config.md"
BEGIN, END = "<!-- {}: made by tools/config_page.py -->", "<!-- end of {} -->"
OVERVIEW, GATES = "the fields", "options of gates"
SCHEMA = schema()
OF_STOCK = "topk"
"""The gate whose options are arguments of DeepSpeed's layer, and no fields of ours."""
NAMES = {"order": ("order", "auto"), "alltoall": ("alltoall", "auto"), "gate.type": ("gate", OF_STOCK)}
"""Fields that name a part: the kind of part, and the word that is none of the parts' names."""
_AS_THE_LAYER_HAS_IT = "as the layer has it"


def page(text: str) -> str:
    """Return the page with everything that is made from the fields made again.

    Args:
        text: the page as it is.
    """
    text = _put(text, OVERVIEW, _overview(), after="")
    before = OVERVIEW
    for name, field in FSMoEBlock.model_fields.items():
        word = words_for(name, field)[0]
        text = _put(text, word, _section(name, field), after=before)
        before = word
    return _put(text, GATES, _options_of_gates(), after="gate")


def _put(text: str, mark: str, made: str, after: str) -> str:
    """Return ``text`` with what is made between its marks, or, if it has none, behind the section ``after``."""
    begin, end = BEGIN.format(mark), END.format(mark)
    whole = f"{begin}\n\n{made}\n\n{end}"
    if begin in text:
        start, stop = text.index(begin), text.index(end) + len(end)
        return text[:start] + whole + text[stop:]
    behind = text.index(END.format(after)) + len(END.format(after))
    following = re.compile(r"\n(?=#|<!-- )").search(text, behind)
    place = following.start() if following else len(text)
    return f"{text[:place].rstrip()}\n\n{whole}\n\n{text[place:].lstrip()}"


def _overview() -> str:
    rows = []
    for name, field in FSMoEBlock.model_fields.items():
        word = words_for(name, field)[0]
        default = "a block" if shape_in(field) and field.default is not None else _default(field)
        rows.append(f"| [`{word}`](#{word}) | {default} | {_does(field)} |")
    return "\n".join(["| field | default | what it is for |", "|---|---|---|", *rows])


def _section(name: str, field: FieldInfo) -> str:
    word, *before = words_for(name, field)
    older = "".join(f" Before: `{each}`." for each in before)
    if values := ", ".join(f"{_shown(old)} for {_shown(now)}" for old, now in old_values(field).items()):
        older += f" Before: {values}."
    block = shape_in(field)
    takes = _takes(SCHEMA["properties"]["fsmoe"]["properties"][word], word)
    lines = [f"### {word}", "", f"{_sentence(_does(field))}{older}", ""]
    if block is None:
        lines += [
            f"- Takes {takes}.",
            f"- Default: {_default(field)}.",
            f"- Example: {_shown({word: _example(field)})}.",
        ]
        return "\n".join(lines)
    lines += [f"Takes {takes}. Example: {_shown({word: _example(field)})}.", ""]
    lines += ["| field of it | takes | default | what it does | example |", "|---|---|---|---|---|"]
    described = SCHEMA["$defs"][block.__name__]["properties"]
    for inner, each in block.model_fields.items():
        own, *older_words = words_for(inner, each)
        also = "".join(f" (before: `{old}`)" for old in older_words)
        default = _AS_THE_LAYER_HAS_IT if block is GateBlock and each.default is None else _default(each)
        cells = (_takes(described[own], f"{word}.{own}"), default, _does(each), _shown({own: _example(each)}))
        lines.append(f"| `{own}`{also} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _options_of_gates() -> str:
    """Return what each gate of the package takes besides the fields of ``gate``, from its signature and docstring."""
    base = _arguments(TokenChoiceGate)
    gates: dict[str, list[str]] = {}
    for name in filter(lambda each: _is_ours("gate", each), registry.known("gate")):
        gate = registry.lookup("gate", name)
        said = _arguments(gate)
        for each in inspect.signature(gate).parameters.values() if name != OF_STOCK else ():
            if each.name not in GateBlock.model_fields:
                # What a gate inherits is said once, by the base.
                does = said.get(each.name, "see there").replace("see there", base.get(each.name, ""))
                gates.setdefault(f"`{each.name}` | {_shown(each.default)} | {does} |", []).append(name)
    rows = [f"| {', '.join(f'`{each}`' for each in names)} | {row}" for row, names in gates.items()]
    return "\n".join(["| `type` | option | default | what it does |", "|---|---|---|---|", *rows])


def _arguments(of: type) -> dict[str, str]:
    """Return what a class says of its arguments."""
    found = re.findall(r"(?ms)^    (\w+): (.*?)(?=^    \w|^\S|\Z)", inspect.cleandoc(of.__doc__ or ""))
    return {name: _markdown(text).rstrip(".") for name, text in found}


def _markdown(text: str) -> str:
    """Return a piece of a docstring in one line of Markdown."""
    return re.sub(r":\w+:(?=`)", "", " ".join(text.split()).replace("``", "`"))


def _does(field: FieldInfo) -> str:
    block = shape_in(field)
    text = field.description or (block.__doc__ or "" if block else "").split("\n")[0].split("``: ")[-1]
    return _markdown(text).rstrip(".")


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _default(field: FieldInfo) -> str:
    return "none" if field.default is None or field.default == [] else _shown(field.default)


def _example(field: FieldInfo) -> Any:
    """Return a value that a field may have and that is not its default, so that it shows something."""
    if field.examples:
        return field.examples[0]
    default = field.default
    if isinstance(default, bool):
        return not default
    if choices := [each for each in _literals(field.annotation) if each != default]:
        return choices[0]
    if isinstance(default, int | float):
        return 2 * default or 1
    return example_of(field)


def _literals(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    for each in get_args(annotation):
        if get_origin(annotation) is not Literal:
            yield from _literals(each)


def _shown(value: Any) -> str:
    return f"`{json.dumps(value)}`"


def _takes(described: Mapping[str, Any], path: str) -> str:
    """Return what a field takes, in words, from its JSON schema."""
    if path in NAMES:
        kind, word = NAMES[path]
        names = dict.fromkeys([word, *(each for each in registry.known(kind) if _is_ours(kind, each))])
        return f"{', '.join(map(_shown, names))}, or the name of one of your own"
    kinds = list(dict.fromkeys(_kinds(described)))
    return " or ".join(filter(None, [", ".join(kinds[:-1]), kinds[-1]]))


def _is_ours(kind: str, name: str) -> bool:
    return registry.lookup(kind, name).__module__.startswith("ds_fsmoe.")


def _kinds(described: Mapping[str, Any]) -> Iterator[str]:
    if "$ref" in described:
        yield "an object"
    elif "anyOf" in described:
        for each in described["anyOf"]:
            yield from () if each.get("deprecated") else _kinds(each)
    elif "enum" in described:
        yield from map(_shown, described["enum"])
    elif "const" in described:
        yield _shown(described["const"])
    else:
        types = described["type"] if isinstance(described["type"], list) else [described["type"]]
        yield from (kind for each in types for kind in _of_type(each, described))


_OF_TYPES = {
    "boolean": ["`true`", "`false`"],
    "null": ["`null`"],
    "array": ["a list of strings"],
    "string": ["a string"],
    "integer": ["an integer"],
    "number": ["a number"],
}


def _of_type(kind: str, described: Mapping[str, Any]) -> list[str]:
    words = _OF_TYPES[kind]
    low, above, high = (described.get(each) for each in ("minimum", "exclusiveMinimum", "maximum"))
    if kind not in ("integer", "number") or (low is None and above is None):
        return words
    if low is not None:
        return [f"{words[0]} from {low:g} to {high:g}" if high is not None else f"{words[0]} of {low:g} or more"]
    return [f"{words[0]} above {above:g}"]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
