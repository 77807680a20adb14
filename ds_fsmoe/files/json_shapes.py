# SPDX-License-Identifier: Apache-2.0
"""Checks that a JSON file has the form that was written: part of a file may be lost, or somebody may have edited it.

A shape is a test of a value, a list with the shape of its elements, a dictionary with the shapes of its fields
(a name that ends in "?" may be absent, and more fields may be there), or a :class:`Map`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_LARGEST = 1 << 63


@dataclass(frozen=True)
class Map:
    """A dictionary with any names, whose values have one shape."""

    value: Shape


Shape = Callable[[Any], bool] | list | dict | Map


def is_text(value: Any) -> bool:
    """Return whether a value is text."""
    return isinstance(value, str)


def is_whole(value: Any) -> bool:
    """Return whether a value is a whole number, such as a number of steps or ranks."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


def is_number(value: Any) -> bool:
    """Return whether a value is any number, finite or not: losses diverge."""
    return isinstance(value, float) or (
        isinstance(value, int) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST
    )


def or_none(shape: Shape) -> Shape:
    """Return a shape that also allows ``None``."""
    return lambda value: value is None or fits(value, shape)


def some(shape: Shape) -> Shape:
    """Return the shape of a list with at least one element."""
    return lambda value: bool(value) and fits(value, [shape])


def fits(value: Any, shape: Shape) -> bool:
    """Return whether a value has a shape."""
    if isinstance(shape, Map):
        return isinstance(value, dict) and all(fits(each, shape.value) for each in value.values())
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(each, shape[0]) for each in value)
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(_field_fits(value, *field) for field in shape.items())
    return shape(value)


def _field_fits(value: Mapping[str, Any], name: str, shape: Shape) -> bool:
    plain = name.removesuffix("?")
    return fits(value[plain], shape) if plain in value else name != plain
