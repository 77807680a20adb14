# SPDX-License-Identifier: Apache-2.0
"""The models of the paper's figures 6 to 8."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ds_fsmoe.planning.workload import Shape

DEFAULT_EXPERTS = 8
"""The number of experts of a model that does not state it."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model by its name."""

    num_layers: int
    shape: Shape

    def with_(self, **changes: Any) -> Model:
        """Return the same model with another shape."""
        return Model(self.num_layers, replace(self.shape, **changes))


# Samples and length are the paper's for its testbed A (its section 6.4); they are meant to be replaced. So are the
# experts of GPT2-XL, which has none of its own; the paper has as many as nodes.
MODELS: dict[str, Model] = {
    "gpt2-xl": Model(48, Shape(1, 1024, 1600, 6400, DEFAULT_EXPERTS, 2, 1.2, "gpt", 25)),
    "mixtral-7b": Model(32, Shape(1, 1024, 4096, 14336, 8, 2, 1.2, "mixtral", 32, 8)),
    "mixtral-22b": Model(56, Shape(1, 1024, 6144, 16384, 8, 2, 1.2, "mixtral", 48, 8)),
}


def model(name: str) -> Model:
    """Return a model of the paper by its name there.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    if name not in MODELS:
        raise ValueError(f"no model is called {name!r}: the choices are {', '.join(MODELS)}")
    return MODELS[name]
