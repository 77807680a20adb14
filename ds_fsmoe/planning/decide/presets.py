# SPDX-License-Identifier: Apache-2.0
"""Defines the named systems as combinations of three independent switches. Schedules by name look them up here.

The sources are the paper's figure 3 and section 6.1 (the systems compared), and for ``lina`` its own paper.
``reduce_first`` goes beyond them. ``best`` is not listed: it selects the fastest plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ds_fsmoe.planning.block import Links
from ds_fsmoe.planning.decide.gradients import Mode
from ds_fsmoe.untrusted import suggested

BEST = "best"


@dataclass(frozen=True, slots=True)
class Switches:
    """Holds the switches of a system. Every field is usable alone; a named preset is one combination."""

    pipeline: Literal["off", "common", "per_phase", "by_bytes"] = "off"
    """Chunks: none, one degree for both phases, a degree per phase, or one for both phases that follows from the bytes
    of the all-to-all (see :func:`~ds_fsmoe.planning.chunks.degree_by_bytes`)."""
    links: Links = "shared"
    """Traffic inside and between nodes: in one stream; side by side, all gathers before all reduces; or with each
    reduce ahead of the gathers that come two chunks later."""
    gradients: Mode = "off"
    """Gradients: after the backward; beside the dense part of each layer; in slices of one size; in slices of one
    tensor, behind all-to-alls; in slices that fit."""


def deepspeed() -> Switches:
    """Return the switches of DeepSpeed: one task after the other (figure 3a)."""
    return Switches()


def tutel() -> Switches:
    """Return the switches of Tutel with PipeMoE: experts overlap one stream of traffic, with one degree for both
    phases.
    """
    return Switches(pipeline="common")


def tutel_improved() -> Switches:
    """Return the switches of the improved Tutel: gradients are concurrent with the dense parts (figure 3b)."""
    return Switches(pipeline="common", gradients="dense_only")


def pipemoe_lina() -> Switches:
    """Return the switches of PipeMoE with Lina's slices of fixed size, concurrent with experts and dense parts."""
    return Switches(pipeline="common", gradients="fixed_chunk")


def lina() -> Switches:
    """Return the switches of Lina's training (ATC'23, section 4.2): all-to-alls and gradients in micro-ops of one
    size, all-to-alls first.
    """
    return Switches(pipeline="by_bytes", gradients="micro_ops")


def fsmoe_no_iio() -> Switches:
    """Return the switches of the paper's system without overlap of intra-node and inter-node traffic."""
    return Switches(pipeline="per_phase", gradients="adaptive")


def fsmoe() -> Switches:
    """Return the switches of the paper's system (figure 3d)."""
    return Switches(pipeline="per_phase", links="paper", gradients="adaptive")


PRESETS: dict[str, Callable[[], Switches]] = {
    each.__name__: each for each in (deepspeed, tutel, tutel_improved, pipemoe_lina, lina, fsmoe_no_iio, fsmoe)
}
NAMES = (*PRESETS, BEST)


def preset(name: str) -> Switches:
    """Return the switches of a named system.

    Raises:
        ValueError: the name is unknown; the message lists the names.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}: {suggested(name, NAMES)}")
    return PRESETS[name]()
