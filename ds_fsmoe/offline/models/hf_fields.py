# SPDX-License-Identifier: Apache-2.0
"""Fields of a configuration, read one by one with checks that say where a wrong one is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ds_fsmoe.untrusted import MOST_POSITIONS


class Fields:
    """The fields of one configuration, read with checks.

    Raises:
        ValueError: by every method, for a field of a wrong value; it names the file, the field, and the value.
    """

    def __init__(self, data: Mapping[str, Any], source: str, defaults: Mapping[str, Any]) -> None:
        self._data = data
        self._source = source
        self._defaults = defaults

    def wrong(self, name: str, sentence: str) -> ValueError:
        """Return the error of a field."""
        shown = json.dumps(self._data.get(name, self._defaults.get(name)), default=str)
        return ValueError(f"{self._source}: {name} = {shown[:60]}: {sentence}")

    def value(self, *names: str) -> Any:
        """Return a field as it is written, under any of its names; where it is not, what transformers takes."""
        said = [name for name in names if name in self._data]
        if not said:
            return self._defaults.get(names[0])
        for other in said[1:]:
            if self._data[other] != self._data[said[0]]:
                raise self.wrong(other, f"must be {self._data[said[0]]}, as {said[0]} says")
        return self._data[said[0]]

    def written(self, *names: str) -> str:
        """Return the name under which a field is written; where it is not, its first."""
        return next((each for each in names if each in self._data), names[0])

    def count(self, *names: str, least: int = 1, most: int = MOST_POSITIONS) -> int:
        """Return a whole number of at least ``least`` and at most ``most``."""
        value = self.value(*names)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(self.written(*names), f"must be a whole number of at least {least}")
        if value > most:
            raise self.wrong(self.written(*names), f"must be at most {most}")
        return value

    def optional(self, *names: str) -> int | None:
        """Return a whole number of at least 1; ``None`` where the field is null or 0."""
        return self.count(*names) if self.value(*names) not in (None, 0) else None

    def flag(self, name: str) -> bool:
        """Return whether a switch is on."""
        value = self.value(name)
        if value not in (None, True, False):
            raise self.wrong(name, "must be true or false")
        return bool(value)

    def of_layer(self, layer: int, *names: str) -> int:
        """Return a whole number that may be one for all layers or one for each."""
        value = self.value(*names)
        if not isinstance(value, list):
            return self.count(*names)
        if layer >= len(value) or not isinstance(value[layer], int) or value[layer] < 1:
            raise self.wrong(self.written(*names), f"must have a whole number of at least 1 for layer {layer}")
        return value[layer]

    def layers(self, name: str) -> frozenset[int] | None:
        """Return the places of layers that a field lists; ``None`` where it is null."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
            raise self.wrong(name, "must be a list of whole numbers, the places of layers")
        return frozenset(value)

    def layer_type(self, layer: int, known: tuple[str, ...]) -> str | None:
        """Return what kind of layer one is; ``None`` where the field is null.

        Args:
            layer: the place of the layer.
            known: the kinds that the family has.
        """
        value = self.value("layer_types")
        if value is None:
            return None
        if not isinstance(value, list) or layer >= len(value) or value[layer] not in known:
            raise self.wrong("layer_types", f"must have one for layer {layer}; the choices are {', '.join(known)}")
        return value[layer]
