# SPDX-License-Identifier: Apache-2.0
"""What data of others is held against: a line for each mistake, with its path, its value and what to write."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, create_model

from ds_fsmoe.shapes import Items, Known, Named, Number, StrictShape, Whole, error_in, fits, wrong_in


class Inner(StrictShape):
    """An object in another."""

    rate: Annotated[float, Field(gt=0)] = Field(1.0, examples=[2.5])
    kind: Literal["a2a", "reduce"] = "a2a"


class Outer(StrictShape):
    """It has a field with an older word, too."""

    count: Annotated[int, Field(ge=1)]
    size: int | Literal["auto"] = Field("auto", alias="num_bytes")
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"count": 2, "size": 3, "inner": {}}, []),
        ({"count": 2, "num_bytes": "auto"}, []),
        ({}, ["count is missing"]),
        ({"count": 0}, ["count = 0: must be greater than or equal to 1"]),
        ({"count": 1, "num_bytes": "much"}, ['num_bytes = "much": must be an integer or \'auto\', for example "auto"']),
        ({"count": 1, "inner": {"rate": "x"}}, ['inner.rate = "x": must be a number, for example 2.5']),
        ({"count": 1, "inner": {"kind": "a2"}}, ["inner.kind = \"a2\": unknown value; did you mean 'a2a'?"]),
        ({"count": 1, "sizes": 3}, ["sizes: unknown key; did you mean 'num_bytes'?"]),
        ({"count": 1, "zz": 3, "yy": 4}, ["zz: unknown key; the keys are count, num_bytes, inner", "yy: unknown key"]),
        (
            {"count": -1, "inner": {"rates": 1}},
            ["count = -1: must be", "inner.rates: unknown key; did you mean 'rate'?"],
        ),
    ],
)
def test_each_mistake_is_one_line_with_its_path_its_value_and_what_to_write(value: Any, expected: list[str]) -> None:
    found = wrong_in(value, Outer)
    assert len(found) == len(expected)
    assert all(sentence.startswith(wanted) for sentence, wanted in zip(found, expected, strict=True))


def test_of_what_is_huge_or_wrong_a_million_times_a_part_is_shown() -> None:
    (sentence,) = wrong_in({"count": "9" * 100_000}, Outer)
    assert len(sentence) < 500
    many = {"count": 1} | dict.fromkeys(map(str, range(100_000)), 0)
    assert wrong_in(many, Outer) == ["100001 keys: must be at most 3"]
    assert wrong_in({"count": 1, "inner": many}, Outer) == ["inner: 100001 keys: must be at most 2"]


NUMBERED = create_model("NUMBERED", __base__=Known, number=(Number, ...), whole=(Whole, 0))


def test_any_number_fits_finite_or_not_beside_what_is_unknown_and_what_is_none_does_not() -> None:
    for number in (0, -3, 2.5, float("nan"), float("-inf"), 1e300, 2**62):
        assert fits({"number": number, "more": "x"}, NUMBERED)
    # Nor does what fits no array.
    for number in (True, "1", None, [1], 2**63, 10**400):
        assert not fits({"number": number}, NUMBERED)
        assert not fits({"number": 1, "whole": number}, NUMBERED)


LISTED = create_model("LISTED", __base__=Known, items=(Items[Items[Number]], []), named=(Named[Named[Number]], {}))


@pytest.mark.parametrize("value", [[["x"] * 1000] * 1000, [[1] * 1000, *[["x"]] * 1000]])
def test_lists_and_objects_are_read_up_to_their_first_mistake(value: list[list[Any]]) -> None:
    named = {str(row): dict(enumerate(each)) for row, each in enumerate(value)}
    for found in (error_in({"items": value}, LISTED), error_in({"named": named}, LISTED)):
        assert found is not None
        assert found.error_count() == 2  # it is no integer, and no other number
    assert fits({"named": {"a": {"b": 1.5}}}, LISTED)
    assert not any(fits({"named": each}, LISTED) for each in ([], [[1]], {"a": [1]}, {"a": {"b": "x"}}, None))
