# SPDX-License-Identifier: Apache-2.0
"""Writes the type hints of ``ds_fsmoe.Config`` for editors and type checkers, from the fields of the block.

``python -m ds_fsmoe.config.hints > ds_fsmoe/config/builder.pyi`` writes the file of the package.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.shapes import shape_in, shown, words_for

_WIDTH = 120
_OF_JSON = {"string": "str", "boolean": "bool", "integer": "int", "number": "float", "null": "None"}
_HEAD = """\
# SPDX-License-Identifier: Apache-2.0
# Written by `python -m ds_fsmoe.config.hints > ds_fsmoe/config/builder.pyi`, from the fields in config/blocks.py.
from typing import Any, Literal

class Written(dict[str, Any]):
    def as_dict(self) -> dict[str, Any]: ...

class Config(Written):
"""
_OF_BEFORE = "    Wires = CommDtype  # its name in version 0.2.0\n\n"


def class_name(word: str) -> str:
    """Return the name of the class for the block that is written under a word: ``NumChunks`` for ``num_chunks``."""
    return "".join(each.capitalize() for each in word.split("_"))


def hints_of(block: type[BaseModel]) -> dict[str, str]:
    """Return field -> type hint of its values, by the present name of each field of a block."""
    whole = _schema()
    described = whole if block is FSMoEBlock else whole["$defs"][block.__name__]
    kinds_of = {word: dict.fromkeys(_kinds(word, each)) for word, each in described["properties"].items()}
    return {word: " | ".join(sorted(kinds, key="None".__eq__)) for word, kinds in kinds_of.items()}  # None comes last


@cache
def _schema() -> dict[str, Any]:
    return FSMoEBlock.model_json_schema()


def _kinds(word: str, said: Mapping[str, Any]) -> Iterator[str]:
    """Return the types of a field by its JSON schema."""
    for each in said.get("anyOf", ()):
        yield from _kinds(word, each)
    if "$ref" in said:
        yield from (f"Config.{class_name(word)}", "dict[str, Any]")
    elif "items" in said:
        yield f"list[{' | '.join(_kinds(word, said['items']))}]"
    elif "enum" in said or "const" in said:
        words = said.get("enum", [said.get("const")])
        yield f"Literal[{', '.join(shown(each) for each in words if each is not None)}]"
        yield from ["None"] if None in words else []
    elif "type" in said:
        kinds = said["type"] if isinstance(said["type"], list) else [said["type"]]
        yield from (_OF_JSON[each] for each in kinds)


def _init(block: type[BaseModel], indent: str) -> str:
    """Return the method whose arguments are the fields of a block, with their types and descriptions."""
    width = _WIDTH - len(indent)
    taken = [f"    {word}: {hint} = ...," for word, hint in hints_of(block).items()]
    taken += ["    **options: Any,"] if block.model_config["extra"] == "allow" else []
    for index, line in enumerate(taken):
        if len(line) > width:  # one list of words, laid out as ruff does it
            taken[index] = re.sub(r"\[(.*?)\]", r"[\n        \1\n    ]", line, count=1)
    said = [
        textwrap.fill(
            f"{words_for(name, field)[0]}: {_description_of(field)}",
            width,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
        )
        for name, field in block.model_fields.items()
    ]
    lines = ["def __init__(", "    self,", "    *,", *taken, ") -> None:", '    """', "    Args:", *said, '    """']
    return textwrap.indent("\n".join(lines), indent)


def _description_of(field: FieldInfo) -> str:
    inner = shape_in(field)
    return field.description or ((inner and inner.__doc__) or "").split("``: ")[-1].rstrip(".").strip()


def stub() -> str:
    """Return the hints for ``ds_fsmoe/config/builder.py``, as a file."""
    parts = [
        f"    class {class_name(words_for(name, field)[0])}(Written):\n{_init(inner, ' ' * 8)}\n\n"
        for name, field in FSMoEBlock.model_fields.items()
        if (inner := shape_in(field))
    ]
    return _HEAD + "".join(parts) + _OF_BEFORE + _init(FSMoEBlock, " " * 4) + "\n"


if __name__ == "__main__":
    print(stub(), end="")
