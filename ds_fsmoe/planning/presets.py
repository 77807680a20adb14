# SPDX-License-Identifier: Apache-2.0
"""One MoE layer as a schedule: a few switches that go together in any way, and the named systems as points among them.

The sources are the paper's figure 3 and its section 6.1 (the systems compared); ``reduce_first`` and ``split_dw`` go
beyond it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ds_fsmoe.planning.schedule import (
    A2A_IN,
    A2A_OUT,
    EXPERT,
    EXPERT_DW,
    EXPERT_DX,
    GATHER,
    GRAD,
    REDUCE,
    Draft,
    Lane,
    Schedule,
)


@dataclass(frozen=True, slots=True)
class Switches:
    """What a system does. Every field is usable alone; a named preset is one combination."""

    pipeline: Literal["off", "common", "per_phase"] = "off"
    """Chunks: none, one degree for both phases, a degree per phase."""
    links: Literal["shared", "paper", "reduce_first"] = "shared"
    """Traffic inside and between nodes: in one stream; side by side, all gathers before all reduces; or with each
    reduce ahead of the gathers that come two chunks later."""
    gradients: Literal["exposed", "dense_only", "fixed_chunk", "adaptive"] = "exposed"
    """Dense gradients: after the backward; beside dense computation; in slices of fixed size; in slices that fit."""
    split_dw: bool = False
    """Whether weight gradients of the experts wait until the input gradients are on their way."""


PRESETS: dict[str, Switches] = {
    "deepspeed": Switches(),
    "tutel": Switches(pipeline="common"),
    "tutel_improved": Switches(pipeline="common", gradients="dense_only"),
    "pipemoe_lina": Switches(pipeline="common", gradients="fixed_chunk"),
    "fsmoe_no_iio": Switches(pipeline="per_phase", gradients="adaptive"),
    "fsmoe": Switches(pipeline="per_phase", links="paper", gradients="adaptive"),
}


def preset(name: str) -> Switches:
    """The switches of a named system.

    Raises:
        ValueError: no such name, with those there are.
    """
    if name not in PRESETS:
        raise ValueError(f"no preset is called {name!r}: the choices are {', '.join(PRESETS)}")
    return PRESETS[name]


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The work of one MoE layer in one phase, each in the unit of its cost."""

    a2a: float
    gather: float
    expert: float
    reduce: float
    expert_dw: float = 0.0
    """The part of ``expert`` that is the weight gradient; read where it is split off."""


def layer_schedule(
    sizes: LayerSizes, degree: int, switches: Switches, grad_sizes: tuple[float, ...] = (), layer: int = 0
) -> Schedule:
    """The tasks of one MoE layer in one phase, in the order of issue.

    Args:
        sizes: of the whole layer; chunks are equal.
        degree: number of chunks; 1 if ``switches.pipeline`` is "off".
        switches: which order.
        grad_sizes: gradient slices that travel in this layer, right behind the last token that comes in.
        layer: for the names of the tasks.

    Raises:
        ValueError: a degree below 1, or above 1 without a pipeline.
    """
    if degree < 1 or (degree > 1 and switches.pipeline == "off"):
        raise ValueError(f"degree = {degree} with pipeline = {switches.pipeline!r}: must be 1, or more in a pipeline")
    draft = Draft()
    intra = Lane.INTER if switches.links == "shared" else Lane.INTRA
    split = switches.split_dw and sizes.expert_dw > 0
    enter: dict[int, int] = {}
    gather: dict[int, int] = {}
    expert: dict[int, int] = {}
    reduce: dict[int, int] = {}

    def add(kind: str, lane: Lane, chunk: int, size: float, *after: int) -> int:
        return draft.add(kind, lane, chunk=chunk, size=size / degree, after=after, layer=layer)

    def add_gather(chunk: int) -> None:
        gather[chunk] = add(GATHER, intra, chunk, sizes.gather, enter[chunk])

    def add_expert(chunk: int) -> None:
        kind, size = (EXPERT_DX, sizes.expert - sizes.expert_dw) if split else (EXPERT, sizes.expert)
        expert[chunk] = add(kind, Lane.COMPUTE, chunk, size, gather[chunk])

    def add_reduce(chunk: int) -> None:
        reduce[chunk] = add(REDUCE, intra, chunk, sizes.reduce, expert[chunk])

    for chunk in range(degree):
        enter[chunk] = add(A2A_IN, Lane.INTER, chunk, sizes.a2a)
        if switches.links == "shared":
            add_gather(chunk)
    for chunk, size in enumerate(grad_sizes):
        draft.add(GRAD, Lane.INTER, chunk=chunk, size=size, layer=layer)
    for chunk in range(degree):
        if switches.links != "shared":
            add_gather(chunk)
        if switches.links == "reduce_first" and chunk >= 1:
            add_reduce(chunk - 1)
        add_expert(chunk)
    for chunk in range(degree):
        if chunk not in reduce:
            add_reduce(chunk)
        add(A2A_OUT, Lane.INTER, chunk, sizes.a2a, reduce[chunk])
    if split:
        for chunk in range(degree):
            add(EXPERT_DW, Lane.COMPUTE, chunk, sizes.expert_dw, gather[chunk])
    return draft.finish()
