# SPDX-License-Identifier: Apache-2.0
"""Returns what was measured and decided, as plain data for the folder of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ds_fsmoe.planning.cost import LinearCost, SwitchedCost
from ds_fsmoe.planning.job.recorded_costs import RecordedJob, RecordedKind, RecordedWay
from ds_fsmoe.planning.job.recorded_data import job_as_data
from ds_fsmoe.tuning.table import choices_as_data, timings_of

if TYPE_CHECKING:
    from ds_fsmoe.config.blocks import FSMoEBlock
    from ds_fsmoe.execution.pipeline import LayerPipeline
    from ds_fsmoe.layer.stock_layer import FSMoELayer
    from ds_fsmoe.planning.block import Links
    from ds_fsmoe.planning.call_shape import CallShape
    from ds_fsmoe.planning.decide.candidates import Search
    from ds_fsmoe.planning.decide.gradients import Mode
    from ds_fsmoe.planning.workload import BlockWork
    from ds_fsmoe.tuning.autotune import Autotune
    from ds_fsmoe.tuning.measure import Measured
    from ds_fsmoe.tuning.table import Row


def plans_as_data(pipelines: Mapping[str, LayerPipeline], autotune: Autotune | None) -> dict[str, Any]:
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
            "alltoall": plan.alltoall,
            "tasks": len(plan.schedule.tasks),
        }
        for label, pipeline in pipelines.items()
        for phase, plan in (("forward", pipeline.forward), ("backward", pipeline.backward))
    ]
    if autotune is None or not autotune.rows:
        return {"layers": layers}
    return {
        "layers": layers,
        **autotune.outcome.as_data(autotune.step),
        "num_measured": autotune.num_measured,
        "choices": choices_as_data(autotune.rows),
        "trials": [[asdict(each) for each in of_round] for of_round in autotune.tried],
        "hints": list(autotune.hints),
        "fits": _fits(autotune.rows),
    }


def measured_job(
    measured: Measured,
    search: Search,
    schedule: str,
    tensors_bytes: Mapping[str, Sequence[int]],
    micro_batches: int,
    choices: Mapping[str, int | None],
) -> RecordedJob:
    """Return all that the autotuner's search started from, so that it can be made again without the machine.

    Args:
        measured: what was measured.
        search: what was made of it.
        schedule: the schedule by name.
        tensors_bytes: kind of gradient -> the bytes of each tensor that we reduce.
        micro_batches: the forwards and backwards of an optimizer step.
        choices: label of a layer, in the order of the forward -> the experts of a token, where that is known.
    """
    stocks = [next(iter(each.values())) for each in search.options]
    gradients_bytes: dict[str, int] = {}
    for layer in stocks:
        for each in layer.gradients:
            gradients_bytes[each.kind] = gradients_bytes.get(each.kind, 0) + each.size_bytes
    settings = search.planner.settings
    return RecordedJob(
        kinds=tuple(
            RecordedKind(
                tuple(kind.labels),
                kind.pipeline.forward.groups,
                kind.sizes,
                {name: RecordedWay(way.planned, measured.profile_of(kind, name)) for name, way in kind.ways.items()},
                kind.layer.fsmoe.is_uncut,
                choices.get(kind.labels[0]),
            )
            for kind in measured.kinds
        ),
        labels=tuple(label for label in choices if label in measured.kind_of),
        schedule=schedule,
        mode=search.mode,
        links=search.links,
        rest_ms=(sum(_rest_ms(each.forward) for each in stocks), sum(_rest_ms(each.backward) for each in stocks)),
        gradients_bytes=gradients_bytes,
        tensors_bytes={kind: tuple(sizes) for kind, sizes in tensors_bytes.items()},
        slowed=measured.slowed,
        is_serial=measured.is_serial,
        issues_ahead=measured.issues_ahead,
        shared_link=settings.shared_link,
        max_degree=settings.max_degree,
        gradient_solver=settings.gradient_solver,
        chunk_bytes=settings.chunk_bytes,
        micro_batches=micro_batches,
    )


def _rest_ms(work: BlockWork) -> float:
    return sum(each.size for each in work.after)


def called_as_data(
    shapes: Mapping[str, CallShape],
    layers: Mapping[str, FSMoELayer],
    block: FSMoEBlock,
    links: Links,
    mode: Mode,
    micro_batches: int,
    choices: Mapping[str, int | None],
) -> dict[str, Any]:
    """Return what the layers of a run are that was not measured: what their tasks cost is in its trace, if anywhere.

    Args:
        shapes: label of a layer -> the sizes of its first call.
        layers: the layers by label.
        block: the block of the engine.
        links: the order of traffic within a layer.
        mode: when gradients are sent.
        micro_batches: the forwards and backwards of an optimizer step.
        choices: label of a layer, in the order of the forward -> the experts of a token, where that is known.
    """
    kinds: dict[tuple[Any, ...], list[str]] = {}
    for label, shape in shapes.items():
        inner = layers[label]
        assert inner.pipeline is not None
        forward = inner.pipeline.forward
        key = forward.groups, shape, forward.alltoall, inner.fsmoe.is_uncut, choices.get(label)
        kinds.setdefault(key, []).append(label)
    job = RecordedJob(
        kinds=tuple(
            RecordedKind(tuple(labels), groups, shape, {alltoall: RecordedWay(alltoall)}, *others)
            for (groups, shape, alltoall, *others), labels in kinds.items()
        ),
        labels=tuple(label for label in choices if label in shapes),
        schedule=block.schedule,
        mode=mode,
        links=links,
        is_serial=not block.overlap,
        max_degree=block.pipeline_degree.max,
        gradient_solver=block.gradient_partition.solver,
        chunk_bytes=block.gradient_partition.asked_bytes,
        micro_batches=micro_batches,
    )
    return job_as_data(job)


def _fits(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        {
            "operation": name,
            "layers": labels,
            "unit": timing.unit,
            "sizes": timing.sizes,
            "times_ms": timing.times_ms,
            "line_ms": [timing.cost.ms(size) for size in timing.sizes],
            "lines": [asdict(each) for each in _parts(timing.cost)],
            "typical_share": timing.best_fit.typical_share,
            "worst_share": timing.best_fit.worst_share,
            "is_good": timing.best_fit.is_good,
        }
        for name, timing, labels in timings_of(rows)
    ]


def _parts(cost: Any) -> Sequence[LinearCost]:
    return (cost.below, cost.above) if isinstance(cost, SwitchedCost) else (cost,)
