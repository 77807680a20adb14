# SPDX-License-Identifier: Apache-2.0
"""Writes down what type checkers and editors have to know of ``ds_fsmoe.Config``, from the fields of the block.

``python -m ds_fsmoe.config.hints > ds_fsmoe/config/builder.pyi`` writes the file that comes along.
"""

from __future__ import annotations

import textwrap
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ds_fsmoe.config.blocks import FSMoEBlock, NullIsAuto, OrAlone
from ds_fsmoe.shapes import shape_in, words_for

_WIDTH = 120
_OF_JSON = {"string": "str", "boolean": "bool", "integer": "int"}
_HEAD = """\
# SPDX-License-Identifier: Apache-2.0
# Written by `python -m ds_fsmoe.config.hints > ds_fsmoe/config/builder.pyi`, from the fields in config/blocks.py.
from typing import Any, Literal

class Written(dict[str, Any]):
    def as_dict(self) -> dict[str, Any]: ...

class Config(Written):
"""


def class_name(word: str) -> str:
    """Return the name of the class for the block that is written under a word: ``num_chunks`` is ``NumChunks``."""
    return "".join(each.capitalize() for each in word.split("_"))


def hints_of(block: type[BaseModel]) -> dict[str, str]:
    """Return, by its word of today, what each field of a block may be given, as a type hint."""
    return {words_for(name, field)[0]: _hint(name, field) for name, field in block.model_fields.items()}


def _hint(name: str, field: FieldInfo) -> str:
    kinds = [*_kinds(field.annotation)]
    if shape_in(field):
        kinds = [f"Config.{class_name(words_for(name, field)[0])}", "dict[str, Any]"]
    for each in field.metadata:
        if isinstance(each, NullIsAuto):
            kinds.append("None")
        if isinstance(each, OrAlone):
            kinds += [kind for json_type in each.json_types for kind in _kinds_of_json(json_type)]
    if isinstance(field.json_schema_extra, Mapping) and "null" in field.json_schema_extra["type"]:
        kinds.append("None")
    return " | ".join(dict.fromkeys(kinds))


def _kinds(annotation: Any) -> Iterator[str]:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _kinds(args[0])
    elif origin in (Union, types.UnionType):
        for each in args:
            yield from _kinds(each)
    elif origin is Literal:
        yield _literal(args)
    elif annotation is type(None):
        yield "None"
    else:
        yield str(annotation) if args else annotation.__name__


def _kinds_of_json(json_type: Mapping[str, Any]) -> Iterator[str]:
    if "type" in json_type:
        yield _OF_JSON[json_type["type"]]
        return
    if words := [each for each in json_type["enum"] if each is not None]:
        yield _literal(words)
    if None in json_type["enum"]:
        yield "None"


def _literal(values: Any) -> str:
    return f"Literal[{', '.join(map(_quoted, values))}]"


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _init(block: type[BaseModel], indent: str) -> Iterator[str]:
    yield f"{indent}def __init__("
    yield f"{indent}    self,"
    yield f"{indent}    *,"
    for word, hint in hints_of(block).items():
        line = f"{indent}    {word}: {hint} = ...,"
        if len(line) > _WIDTH:  # one list of words, laid out as ruff does it
            head, _, tail = line.partition("[")
            listed, _, end = tail.partition("]")
            line = f"{head}[\n{indent}        {listed}\n{indent}    ]{end}"
        yield line
    if block.model_config["extra"] == "allow":
        yield f"{indent}    **options: Any,"
    yield f"{indent}) -> None:"
    yield f'{indent}    """'
    yield f"{indent}    Args:"
    for name, field in block.model_fields.items():
        text = f"{words_for(name, field)[0]}: {_said_of(field)}"
        yield textwrap.fill(text, _WIDTH, initial_indent=f"{indent}        ", subsequent_indent=f"{indent}            ")
    yield f'{indent}    """'


def _said_of(field: FieldInfo) -> str:
    inner = shape_in(field)
    return field.description or ((inner and inner.__doc__) or "").split("``: ")[-1].rstrip(".").strip()


def stub() -> str:
    """Return the hints for ``ds_fsmoe/config/builder.py``, as a file."""
    lines = []
    for name, field in FSMoEBlock.model_fields.items():
        if inner := shape_in(field):
            lines += [f"    class {class_name(words_for(name, field)[0])}(Written):", *_init(inner, "        "), ""]
    return _HEAD + "\n".join([*lines, *_init(FSMoEBlock, "    ")]) + "\n"


if __name__ == "__main__":
    print(stub(), end="")
