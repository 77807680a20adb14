# SPDX-License-Identifier: Apache-2.0
"""Who takes part in a comparison, each as fast as it can be: stock DeepSpeed and every preset, in both layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness.harness import Variant
from benchmarks.models.layer_steps import Found, Steps
from benchmarks.models.layers import Layer, Layout, Mpu, ranks_per_node
from ds_fsmoe.planning.decide.step_time import StepTimes

PRESETS = ("deepspeed", "tutel", "tutel_improved", "pipemoe_lina", "lina", "fsmoe_no_iio", "fsmoe", "best")
COMMON_DEGREE = ("tutel", "tutel_improved", "pipemoe_lina")
TUNED = ("fsmoe_no_iio", "fsmoe", "best")
MAX_DEGREE = 4
FEW = ("stock", "deepspeed", "best", "best, best layout")
FEW_BLOCKS = 5
"""The blocks of what is not judged."""
IN_ALL_RANKS = ("deepspeed, best layout", "best, best layout", "AutoEP, best layout")


def further(variants: Sequence[Variant], is_judged: bool) -> dict[str, list[str]]:
    """Baselines besides stock in the layout of the paper -> what is compared with them. Each is measured twice, which
    takes long: what is not judged has only the one that the most depends on."""
    over = {"stock, best layout": IN_ALL_RANKS}
    if is_judged:
        over |= {"deepspeed": ("fsmoe", "best"), "tutel": ("fsmoe", "best"), "fsmoe": ("best",)}
    names = {each.name for each in variants}
    found = {each: [other for other in others if other in names] for each, others in over.items() if each in names}
    return {each: others for each, others in found.items() if others}


def timed(make: Callable[[Any], Steps], settings: list[Any]) -> dict[Any, float]:
    """Return the seconds of a step with each of some settings, the fastest first; all ranks have the same, because a
    step takes as long as its slowest rank."""
    times_s = []
    for each in settings:
        steps = make(each)
        times_s.append(steps.timed_s())
        steps.close()
    return dict(sorted(zip(settings, times_s, strict=True), key=lambda each: each[1]))


class Contenders:
    """Makes them, for layers.

    Args:
        cache: folder in which autotuners keep what they have measured.
        is_smoke: whether only a few are to take part.

    Attributes:
        found: layout -> what stock and ``pipemoe_lina`` are fastest with.
        predicted: (layout, layer, schedule) -> what the autotuner expects of a step.
    """

    def __init__(self, cache: str, is_smoke: bool = False) -> None:
        self.is_smoke = is_smoke
        self.mpu = Mpu(ranks_per_node())
        self.cache = cache
        self.found = {"node": Found(), "ranks": Found()}
        self.predicted: dict[tuple[Layout, Layer, str], StepTimes] = {}
        self._degree_of: dict[tuple[Layout, Layer], int] = {}

    def steps(self, layer: Layer, layout: Layout, block: dict[str, Any] | None) -> Steps:
        """Of stock's engine, or of ours with a block; the only place that makes any."""
        return Steps(layer, layout, self.mpu, self.found[layout], block)

    def stock(self, layout: Layout, layer: Layer) -> Steps:
        """Stock DeepSpeed."""
        return self.steps(layer, layout, None)

    def ours(
        self, layout: Layout, schedule: str, layer: Layer, gradients: str = "auto", dispatch: str = "auto"
    ) -> Steps:
        """One of the presets."""
        block: dict[str, Any] = {"schedule": schedule, "gradient_partition": {"mode": gradients}}
        block["dispatch"] = dispatch
        if layout == "node":
            block["esp_size"] = ranks_per_node()
        if schedule == "pipemoe_lina":
            block["gradient_partition"] = {"mode": "fixed_chunk", "chunk_bytes": self.found[layout].chunk_bytes}
        if schedule == "lina":
            # Its micro-ops are as long as the slices of the other: 30 MB are more than any layer here sends.
            block["gradient_partition"] |= {"chunk_bytes": self.found[layout].chunk_bytes}
            block["pipeline_degree"] = {"max": MAX_DEGREE}
        elif schedule in COMMON_DEGREE:
            degree = self.common_degree(layout, layer)
            block["pipeline_degree"] = {"forward": degree, "backward": degree}
        elif schedule != "deepspeed":
            block["autotune"] = {"enabled": True, "cache_dir": self.cache, "watch_every": 0}
            block["pipeline_degree"] = {"max": MAX_DEGREE}
        steps = self.steps(layer, layout, block)
        if "autotune" in block:
            self.predicted[layout, layer, schedule] = steps.engine.fsmoe.autotune.result.step
        return steps

    def common_degree(self, layout: Layout, layer: Layer) -> int:
        """The fastest with one degree for both phases and one stream of traffic."""
        if (layout, layer) not in self._degree_of:
            steps = self.ours(layout, "deepspeed", layer)
            times_s = []
            for degree in range(1, MAX_DEGREE + 1):
                steps.set_degree(degree)
                steps()
                times_s.append(steps.timed_s())
            steps.close()
            self._degree_of[layout, layer] = 1 + int(np.argmin(times_s))
        return self._degree_of[layout, layer]

    def sweep(self, layer: Layer, layouts: Sequence[Layout]) -> list[dict[str, Any]]:
        """Find and keep what stock, and ``pipemoe_lina`` with that, are best with in each layout.

        Returns:
            A row for each setting that was tried.
        """
        rows = []
        for layout in layouts:

            def stock_with(found: Found, layout: Layout = layout) -> Steps:
                self.found[layout] = found
                return self.stock(layout, layer)

            def lina_with(found: Found, layout: Layout = layout) -> Steps:
                self.found[layout] = found
                return self.ours(layout, "pipemoe_lina", layer)

            times_s = timed(stock_with, [Found(stage, bucket) for stage in (0, 1, 2) for bucket in (1 << 16, 1 << 20)])
            rows += _rows("stock", layout, times_s)
            best = next(iter(times_s))
            times_s = timed(lina_with, [replace(best, chunk_bytes=1 << bits) for bits in (15, 17, 19, 21)])
            rows += _rows("pipemoe_lina", layout, times_s)
            self.found[layout] = next(iter(times_s))
        return rows

    def variants(self) -> list[Variant]:
        """All of them, the baseline first; a few, if it is but to be seen that they run."""
        every = self._every_variant()
        return [each for each in every if each.name in FEW] if self.is_smoke else every

    def in_best_layout(self) -> list[Variant]:
        """All of them in the layout in which stock is the fastest, stock first; a few, if it is but a smoke test."""
        schedules = ("deepspeed", "best") if self.is_smoke else ("deepspeed", "tutel", "pipemoe_lina", "fsmoe", "best")
        return [
            Variant("stock", partial(self.stock, "ranks")),
            *(Variant(name, partial(self.ours, "ranks", name)) for name in schedules),
        ]

    def _every_variant(self) -> list[Variant]:
        return [
            Variant("stock", partial(self.stock, "node")),
            Variant("stock, best layout", partial(self.stock, "ranks")),
            *(Variant(name, partial(self.ours, "node", name)) for name in PRESETS),
            Variant("deepspeed, best layout", partial(self.ours, "ranks", "deepspeed")),
            Variant("best, best layout", partial(self.ours, "ranks", "best")),
        ]


def _rows(variant: str, layout: Layout, times_s: dict[Found, float]) -> list[dict[str, Any]]:
    return [
        {"variant": variant, "layout": layout, **vars(found), "ms": f"{time_s * 1e3:.1f}", "fastest": int(i == 0)}
        for i, (found, time_s) in enumerate(times_s.items())
    ]
