# SPDX-License-Identifier: Apache-2.0
"""Checks untrusted data against pydantic models, and describes each mistake in one line.

The config, the files of runs and of checkpoints, and plans are read through it.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    InstanceOf,
    StrictInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

_LARGEST = 1 << 63
Whole = Annotated[int, Field(ge=0, lt=_LARGEST)]
"""A whole number, such as a number of steps or ranks."""
Number = Annotated[int, Field(gt=-_LARGEST, lt=_LARGEST)] | InstanceOf[float]
"""Any number, finite or not: losses diverge."""
_T = TypeVar("_T")
Items = Annotated[list[_T], FailFast()]
"""A list that is read up to its first mistake: it may have millions."""
Listed = Annotated[tuple[_T, ...], FailFast()]
"""A list of a dataclass that :func:`made` makes, read up to its first mistake."""
Counted = Annotated[StrictInt, Field(ge=0, lt=_LARGEST)]
"""A whole number of such a dataclass, where only what is marked as strict is read strictly."""
Positive = Annotated[StrictInt, Field(ge=1, lt=_LARGEST)]
"""Such a number from 1 on."""
_OF_PYDANTIC = re.compile(r"(int|float|bool|constrained-int|literal\[.*\]|function-\w+\[.*\])$")
"""Matches what Pydantic adds to a location that is not a key."""
_MOST_SHOWN = 200
"""The characters of a wrong value that are shown."""
_MOST_KEYS = 1000
"""The keys of an object whose keys are known."""
_MOST_ERRORS = 200
"""The mistakes that are looked at: a file may have millions."""


class StrictShape(BaseModel):
    """Reads an object strictly: an unknown key or a value of another kind is an error."""

    # Strict: "2" is not 2 and 1 is not true; data says what it means. A field with an alias is written by that, the
    # field's word; its own name is the word that this project had for it before, and is read as well.
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True, defer_build=True
    )

    @model_validator(mode="before")
    @classmethod
    def _has_few_keys(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > _MOST_KEYS:  # each unknown one is an error, with its value
            raise ValueError(f"{len(value)} keys: must be at most {len(cls.model_fields)}")
        return value


def _values(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    return list(value.values())


Named = Annotated[list[_T], FailFast(), BeforeValidator(_values)]
"""The values of an object with any keys, read up to the first mistake; for shapes whose data is only held against
them."""


class Known(BaseModel):
    """Reads the known fields of an object and ignores the others; numbers need not be finite."""

    model_config = ConfigDict(strict=True, defer_build=True)


def error_in(value: Any, shape: type[BaseModel]) -> ValidationError | None:
    """Return pydantic's error for a value that does not have a shape; ``None`` if it has."""
    try:
        shape.model_validate(value)
    except ValidationError as error:
        return error
    return None


def fits(value: Any, shape: type[BaseModel]) -> bool:
    """Return True if a value has a shape."""
    return error_in(value, shape) is None


def made(kind: type[_T], value: Any) -> _T:
    """Return the object of a dataclass that data describes.

    Raises:
        ValueError: the data does not fit the fields; the message has the first mistake in one line.
    """
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path, found = ".".join(map(str, first["loc"])), shown(first["input"])[:_MOST_SHOWN]
        raise ValueError(f"{path} = {found}: {first['msg']}") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def wrong_in(value: Any, shape: type[BaseModel]) -> list[str]:
    """Return a sentence about each mistake in a value."""
    error = error_in(value, shape)
    return [] if error is None else sentences(error, shape)


def sentences(
    error: ValidationError,
    shape: type[BaseModel],
    root: tuple[str, ...] = (),
    elsewhere: Callable[[str], str | None] = lambda path: None,
    musts: Mapping[str, str] = {},
) -> list[str]:
    """Return pydantic's errors in this project's form, one per path: ``path = value: must be ...``.

    Args:
        error: pydantic's error.
        shape: the shape by which the value was read.
        root: the prefix of every path.
        elsewhere: returns where to write a well-known key that belongs somewhere else.
        musts: path of a field of words, or of an object -> the description of its choices or keys.
    """
    found: dict[str, list[str]] = {}
    nearest: dict[str, str] = {}
    lines: list[str] = []
    ends: dict[str, str] = {}
    listed = set()
    for each in error.errors(include_url=False)[:_MOST_ERRORS]:
        kind = each["type"]
        # A field of two types has an error per type, with the type as the last part of the location.
        location = [part for part in each["loc"] if kind == "extra_forbidden" or not _OF_PYDANTIC.match(str(part))]
        path = ".".join(map(str, [*root, *location]))
        if kind == "extra_forbidden":
            parent = ".".join(map(str, [*root, *location[:-1]]))
            words = known_keys(shape_at(shape, location[:-1]))
            described = "" if parent in listed else musts.get(parent)
            sentence = unknown_key(parent, location[-1], words, elsewhere(path), described)
            found[sentence] = []
            if "did you mean" not in sentence:
                listed.add(parent)
            continue
        if kind in ("missing", "value_error"):
            start = f"{path}: " if path else ""
            found[f"{path} is missing" if kind == "missing" else f"{start}{each['ctx']['error']}"] = []
            continue
        value = shown(each["input"])
        value = value if len(value) <= _MOST_SHOWN else f"{value[:_MOST_SHOWN]}..."
        start = f"{path} = {value}: must be " if path else "must be "
        is_object = kind == "dict_type" or (kind == "model_type" and "words" not in each["ctx"])
        must = "an object" if is_object else re.sub(r"^[Ii]nput should be |^must be ", "", each["msg"])
        found.setdefault(start, []).append(must.replace("a valid ", "a ").replace("a int", "an int"))
        if kind == "literal_error":
            before = old_values(field_at(shape, location))
            choices = [*re.findall(r"'([^']+)'", each["ctx"]["expected"]), *before]
            if isinstance(each["input"], str) and (close := difflib.get_close_matches(each["input"], choices, n=1)):
                nearest[start] = f"did you mean {before.get(close[0], close[0])!r}?"
            found[start] = [musts[path]] if path in musts else found[start]
        example = example_of(field_at(shape, location)) if kind.endswith("_type") else None
        if example is not None:  # of another kind, so one of the right kind says more
            example = example[0] if isinstance(location[-1], int) else example
            ends.setdefault(start, f", for example {shown(example)}")
    for start, either in found.items():
        must = start + " or ".join(dict.fromkeys(either)) + ends.get(start, "")
        if start in nearest:  # which says more than all choices of a word
            must = f"{start.removesuffix('must be ')}unknown value" if len(either) == 1 else must
            must = f"{must}; {nearest[start]}"
        lines.append(must)
    return lines


def unknown_key(
    parent: str, key: str, words: list[tuple[str, ...]], elsewhere: str | None = None, described: str | None = None
) -> str:
    """Return a sentence with the nearest known key, or, if none is near, with a description of all.

    Args:
        parent: the path of the key's object.
        key: the key.
        words: the words of each known key, today's first.
        elsewhere: the right place of the key, if known.
        described: the description of the known keys; ``None``: their list.
    """
    today = {word: each[0] for each in words for word in each}
    found = elsewhere and f"; {elsewhere}"
    if not found and (close := difflib.get_close_matches(key, today, n=1)):
        found = f"; did you mean {today[close[0]]!r}?"
    listed = f"the keys are {', '.join(each[0] for each in words)}" if described is None else described
    return f"{parent}{'.' * bool(parent)}{key}: unknown key{found or (listed and f'; {listed}')}"


def shown(value: Any) -> str:
    """Return a value in JSON."""
    return json.dumps(value, default=repr)


@dataclass(frozen=True)
class OldValues:
    """Marks a field some of whose values had other names in version 0.2.0: ``config/words.py`` reads these as well."""

    today: Mapping[str, str]
    """Name of a value then -> its name today."""


def old_values(field: FieldInfo | None) -> Mapping[str, str]:
    """Return name of a value in version 0.2.0 -> its name today, for the values of ``field`` that were renamed."""
    return next((each.today for each in (field.metadata if field else ()) if isinstance(each, OldValues)), {})


def words_for(name: str, field: FieldInfo) -> tuple[str, ...]:
    """Return the words under which a field may be written, today's first."""
    return tuple(dict.fromkeys((field.alias or name, name)))


def known_keys(shape: type[BaseModel]) -> list[tuple[str, ...]]:
    """Return, for every field of a shape, the words by which it may be written, today's first."""
    return [words_for(name, field) for name, field in shape.model_fields.items()]


def shape_in(field: FieldInfo) -> type[BaseModel] | None:
    """Return the shape inside a field; ``None`` if it has none."""
    kinds = (field.annotation, *getattr(field.annotation, "__args__", ()))
    return next((each for each in kinds if isinstance(each, type) and issubclass(each, BaseModel)), None)


def shape_at(shape: type[BaseModel], location: Sequence[Any]) -> type[BaseModel]:
    """Return the shape of the object at a location: the words of the path to it."""
    for word in location:
        fields = shape.model_fields.items()
        shape = next(inner for name, field in fields if word in words_for(name, field) and (inner := shape_in(field)))
    return shape


def field_at(shape: type[BaseModel], location: Sequence[Any]) -> FieldInfo | None:
    """Return the field at a location, or the field whose list has an element there; ``None`` if there is none."""
    words = [each for each in location if not isinstance(each, int)]
    fields = shape_at(shape, words[:-1]).model_fields.items() if words else ()
    return next((field for name, field in fields if words[-1] in words_for(name, field)), None)


def example_of(field: FieldInfo | None) -> Any:
    """Return a valid value of a field in JSON: its first example, or else its default."""
    if field is None or field.examples:
        return field and field.examples and field.examples[0]
    return None if field.default is PydanticUndefined else field.default
