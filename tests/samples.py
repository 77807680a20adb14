# SPDX-License-Identifier: Apache-2.0
"""A sample of a matrix for ``make test``; ``make nightly`` takes all of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def sampled(
    names: str | tuple[str, ...], values: Sequence[Any], kept: Collection[int], **options: Any
) -> pytest.MarkDecorator:
    """Return ``pytest.mark.parametrize`` over all values, of which those not at the indices ``kept`` are slow.

    Raises:
        IndexError: if there is no value at an index, so that a sample cannot become empty unnoticed.
    """
    indices = {range(len(values))[index] for index in kept}

    def marked(number: int, value: Any) -> Any:
        if number in indices:
            return value
        return pytest.param(*(value if isinstance(names, tuple) else (value,)), marks=pytest.mark.slow)

    return pytest.mark.parametrize(names, [marked(*each) for each in enumerate(values)], **options)
