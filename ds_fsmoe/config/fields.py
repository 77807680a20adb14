# SPDX-License-Identifier: Apache-2.0
"""Says how the fields of the ``"fsmoe"`` block may be written: strictly, by either of their words, and short."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import CoreSchema, no_info_before_validator_function


class NullIsAuto:
    """Marks a field that takes ``null`` for "auto". In a DeepSpeed config "auto" is a word of Accelerate's too, which
    gives it another meaning, so it can be avoided."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_before_validator_function(lambda value: "auto" if value is None else value, handler(source))

    def __get_pydantic_json_schema__(self, of: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(of), {"type": "null"}]}


class OrAlone:
    """Marks a block that may be written as the value of one of its fields, or of two that are mostly the same, alone.

    Args:
        names: the fields.
        kinds: the Python types of such a value.
        words: for these types in an error, and their JSON schema.
    """

    def __init__(
        self, *names: str, kinds: tuple[type, ...], words: str, json_types: tuple[dict[str, Any], ...]
    ) -> None:
        self.names, self._kinds, self._words, self.json_types = names, kinds, words, json_types

    def _spelt_out(self, value: Any) -> Any:
        if type(value) in self._kinds:
            return dict.fromkeys(self.names, value)
        if isinstance(value, Mapping | BaseModel) or value is None:
            return value
        raise PydanticCustomError("model_type", "must be an object or {words}", {"words": self._words})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_before_validator_function(self._spelt_out, handler(source))

    def __get_pydantic_json_schema__(self, of: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(of), *self.json_types]}


def switch(*, has_auto: bool = False) -> OrAlone:
    """Return the mark of a block that may be written as the value of its ``enabled``, with "auto" or without."""
    json_types: tuple[dict[str, Any], ...] = ({"type": "boolean"},)
    if not has_auto:
        return OrAlone("enabled", kinds=(bool,), words="true or false", json_types=json_types)
    return OrAlone(
        "enabled", kinds=(bool, str), words='"auto", true or false', json_types=(*json_types, {"enum": ["auto"]})
    )


class Block(BaseModel):
    """Reads one block strictly: an unknown key and a value of another kind are errors."""

    # Strict: "2" is not 2 and 1 is not true; a config says what it means. A field with an alias is written by that, the
    # field's word; its own name is the word that this project had for it before, and is read as well.
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, written: Any) -> Any:
        """Take a whole number that JSON has as a float, such as 3e7, for the integer that it is."""
        if not isinstance(written, Mapping):
            return written
        fields = {word: field for name, field in cls.model_fields.items() for word in words_for(name, field)}
        return {
            word: int(value)
            if type(value) is float and value.is_integer() and word in fields and _may_be(int, fields[word].annotation)
            else value
            for word, value in written.items()
        }


def _may_be(kind: type, annotation: Any) -> bool:
    return annotation is kind or any(_may_be(kind, each) for each in get_args(annotation))


def words_for(name: str, field: FieldInfo) -> tuple[str, ...]:
    """Return the words under which a field may be written, today's first."""
    return tuple(dict.fromkeys((field.alias or name, name)))


def block_in(field: FieldInfo) -> type[BaseModel] | None:
    """Return the block that a field holds, if it holds one."""
    kinds = (field.annotation, *getattr(field.annotation, "__args__", ()))
    return next((each for each in kinds if isinstance(each, type) and issubclass(each, BaseModel)), None)


def alone_in(field: FieldInfo) -> tuple[str, ...]:
    """Return the fields of the block in ``field`` that a value in place of the whole block stands for."""
    return next((each.names for each in field.metadata if isinstance(each, OrAlone)), ())


def example_of(field: FieldInfo) -> Any:
    """Return a value that a field may have, as it is written in JSON: its first example, or else its default."""
    return field.examples[0] if field.examples else field.default
