# SPDX-License-Identifier: Apache-2.0
"""Bounds the gradients that wait to be sent, where a rank is not to hold what others update (ZeRO 2)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ds_fsmoe.gradients.flat_buffers import FlatGradients
from ds_fsmoe.layer.stock_layer import FSMoELayer
from ds_fsmoe.planning.decide.gradient_plan import BufferReadiness, GradientPlan, GradientSlice, never_above


@dataclass(frozen=True)
class WaitingGradients:
    """Bounds what may wait. Until a backward has been seen, gradients are taken to come in the order of the model, from
    its end to its start; what comes later than that is sent again, as ever."""

    most: int
    """The elements of a buffer that may wait behind a layer."""
    layers: tuple[str, ...]
    """The MoE layers in the order of the backward."""
    ready_of: Callable[[nn.Parameter], int]
    """A parameter to the number of layers whose backward begins before its gradient comes."""

    def bounded(self, plan: GradientPlan, supplies: Sequence[BufferReadiness]) -> GradientPlan:
        """Return a plan by which no more waits."""
        return never_above(plan, supplies, self.most)

    def guessed(self, flats: Sequence[FlatGradients]) -> tuple[tuple[str, ...], tuple[tuple[GradientSlice, ...], ...]]:
        """Return the windows, and what is sent in each part of them, as long as there is no plan; none, if nothing
        would wait for too long. Arranges the buffers."""
        for flat in flats:
            flat.arrange(flat.in_order(self.ready_of))
        count = len(self.layers)
        supplies = [flat.readiness(self.ready_of, count) for flat in flats]
        nothing = GradientPlan(((),) * count, ((),) * count, tuple(flat.numel for flat in flats))
        parts = self.bounded(nothing, supplies).parts
        return (self.layers, parts) if any(parts) else ((), ())


def waiting_gradients(engine: Any, most: int | None, layers: Sequence[FSMoELayer]) -> WaitingGradients | None:
    """Return what bounds gradients that wait; ``None``: nothing does.

    Args:
        engine: the engine.
        most: the elements of a buffer that may wait; ``None``: any number.
        layers: its MoE layers.
    """
    if most is None:
        return None
    number_of = {id(each): number for number, each in enumerate(engine.module.parameters())}
    ends = sorted(
        (max((number_of.get(id(each), -1) for each in layer.parameters()), default=-1), layer.label) for layer in layers
    )
    places = [end for end, _ in ends]

    def ready_of(parameter: nn.Parameter) -> int:
        return len(places) - bisect_left(places, number_of[id(parameter)])

    return WaitingGradients(most, tuple(label for _, label in reversed(ends)), ready_of)
