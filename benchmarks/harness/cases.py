# SPDX-License-Identifier: Apache-2.0
"""What a benchmark is run on: cases with frozen settings, and a grid of them with a hash that lasts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One configuration.

    Args:
        name: unique in its grid.
        settings: a frozen dataclass of numbers, strings, bools, None, tuples and other frozen dataclasses.

    Raises:
        ValueError: settings of any other kind: they could change under way, or have no hash that lasts.
    """

    name: str
    settings: Any

    def __post_init__(self) -> None:
        if not dataclasses.is_dataclass(self.settings) or isinstance(self.settings, type):
            raise ValueError(f"case {self.name!r}: settings must be a frozen dataclass, found {self.settings!r}")
        self.plain()

    def plain(self) -> dict[str, Any]:
        """The settings as what JSON knows."""
        return _plain(self.settings, f"case {self.name!r}: settings")


def _plain(value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if not type(value).__dataclass_params__.frozen:
            raise ValueError(f"{where} must be a frozen dataclass: {type(value).__name__} can be changed")
        return {f.name: _plain(getattr(value, f.name), f"{where}.{f.name}") for f in dataclasses.fields(value)}
    if type(value) is tuple:
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if value is None or type(value) in (str, int, float, bool):
        return value
    raise ValueError(
        f"{where} is a {type(value).__name__}: use numbers, strings, bools, None, tuples, frozen dataclasses"
    )


@dataclass(frozen=True)
class Grid:
    """The cases of one benchmark; ``name`` is that of its file of results.

    Raises:
        ValueError: no case, or two of one name.
    """

    name: str
    cases: tuple[Case, ...]

    def __post_init__(self) -> None:
        check_unique(f"grid {self.name!r}: cases", [case.name for case in self.cases])

    @property
    def digest(self) -> str:
        """12 hex digits: the same for the same cases in any order, in any process and version of Python."""
        cases = [[case.name, case.plain()] for case in sorted(self.cases, key=lambda case: case.name)]
        text = json.dumps(cases, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def check_unique(what: str, names: Sequence[str]) -> None:
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{what} must be there, each with a name of its own: found {list(names)}")
