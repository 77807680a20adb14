# SPDX-License-Identifier: Apache-2.0
"""Returns what was measured and decided, as plain data for the folder of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ds_fsmoe.planning.cost import LinearCost, SwitchedCost

if TYPE_CHECKING:
    from ds_fsmoe.execution.pipeline import Pipeline
    from ds_fsmoe.planning.measured import Timing
    from ds_fsmoe.tuning.autotune import Autotune
    from ds_fsmoe.tuning.table import Row


def plans_as_data(pipelines: Mapping[str, Pipeline], autotune: Autotune | None) -> dict[str, Any]:
    """Return the plans that run now and, where layers were measured, what the plans follow from.

    Args:
        pipelines: label -> how each layer is run.
        autotune: the stage; ``None``, or one that has not run, if degrees were given.
    """
    layers = [
        {
            "layer": label,
            "phase": phase,
            "degree": plan.block.degree,
            "order": plan.block.links,
            "late_dw": plan.block.late_dw,
            "tasks": len(plan.schedule.tasks),
        }
        for label, pipeline in pipelines.items()
        for phase, plan in (("forward", pipeline.forward), ("backward", pipeline.backward))
    ]
    if autotune is None or not autotune.rows:
        return {"layers": layers}
    return {
        "layers": layers,
        "step": None if autotune.step is None else asdict(autotune.step),
        "took_s": autotune.took_s,
        "num_measured": autotune.num_measured,
        "choices": [each for row in autotune.rows for each in _choices(row)],
        "trials": [[asdict(each) for each in of_round] for of_round in autotune.tried],
        "fits": _fits(autotune.rows),
    }


def _choices(row: Row) -> list[dict[str, Any]]:
    return [
        {
            "layers": row.labels,
            "phase": phase,
            "degree": choice.block.degree,
            "order": choice.block.links,
            "late_dw": choice.block.late_dw,
            "predicted_ms": choice.time_ms,
            "isolated_ms": choice.isolated_ms,
            "runner_up": choice.runner_up,
            "runner_up_ms": choice.runner_up_ms,
            "uncut_ms": choice.uncut_ms,
            "alltoall": row.alltoall,
            "asked": asked,
        }
        for phase, choice, asked in zip(("forward", "backward"), row.choices, row.asked, strict=True)
    ]


def _fits(rows: Sequence[Row]) -> list[dict[str, Any]]:
    found: dict[tuple[str, int], tuple[Timing, list[str]]] = {}
    for row in rows:
        for name, timing in row.profile.operations.items():
            found.setdefault((name, id(timing)), (timing, []))[1].extend(row.labels)
    return [
        {
            "operation": name,
            "layers": sorted(set(labels)),
            "unit": timing.unit,
            "sizes": timing.sizes,
            "times_ms": timing.times_ms,
            "line_ms": [timing.cost.ms(size) for size in timing.sizes],
            "lines": [_line(each) for each in _parts(timing.cost)],
            "r2": timing.best_fit.r2,
            "worst_residual_ms": timing.best_fit.worst_residual_ms,
            "is_good": timing.best_fit.is_good,
        }
        for (name, _), (timing, labels) in found.items()
    ]


def _parts(cost: Any) -> Sequence[LinearCost]:
    return (cost.below, cost.above) if isinstance(cost, SwitchedCost) else (cost,)


def _line(cost: LinearCost) -> dict[str, float]:
    return {"alpha_ms": cost.alpha_ms, "beta_ms": cost.beta_ms}
