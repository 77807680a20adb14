# SPDX-License-Identifier: Apache-2.0
"""Formats what the autotuner has measured and chosen: as tables to be read, and as plain data for a run's folder.

The autotuner calls it after measuring, and again once plans are settled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ds_fsmoe.measuring.profiler import Reduces
from ds_fsmoe.planning.cost import Cost, LinearCost, SwitchedCost
from ds_fsmoe.planning.decide.block_times import Order, order_words
from ds_fsmoe.planning.decide.plan import ModelPlan, mode_of
from ds_fsmoe.planning.decide.plan_requests import MIN_GAIN, Degree
from ds_fsmoe.planning.decide.search import Choice, chunks_text
from ds_fsmoe.planning.decide.step_time import StepTimes
from ds_fsmoe.planning.job.measured import LayerProfile, Slowdowns, Timing
from ds_fsmoe.planning.job.recorded_costs import RecordedAllToAll, RecordedJob, RecordedKind, job_as_data
from ds_fsmoe.terminal.tables import Message, Table

if TYPE_CHECKING:
    from ds_fsmoe.config.blocks import FSMoEBlock
    from ds_fsmoe.execution.pipeline import LayerPipeline
    from ds_fsmoe.layer.runtime import LayerRuntime
    from ds_fsmoe.layer.stock_layer import FSMoELayer
    from ds_fsmoe.planning.block import Links
    from ds_fsmoe.planning.call_shape import CallShape
    from ds_fsmoe.planning.decide.gradients import Mode
    from ds_fsmoe.tuning.autotune import Autotune
    from ds_fsmoe.tuning.measure import Measured

MIN_OVERLAP_GAIN = 1.1
"""The ratio of work of two lanes at once to one after the other, below which overlap is said not to pay."""

_HEADS = {
    "layers": "layers",
    "phase": "phase",
    "chunks": "degree",
    "order of tasks": "order",
    "all-to-all": "alltoall",
    "predicted ms": "predicted_ms",
    "1 chunk": "uncut_ms",
}
"""The columns of every table of choices: head -> key."""
_EQUAL = 1e-3
"""The share below which times count as equal."""


@dataclass(frozen=True)
class Row:
    """Holds one row of the table, for equal layers."""

    labels: tuple[str, ...]
    """The labels of the layers, such as "L03"."""
    profile: LayerProfile
    choices: tuple[Choice, Choice]
    """The choices for (forward, backward)."""
    asked: tuple[Degree, Degree]
    """The degrees given by hand."""
    alltoall: str
    alltoalls_ms: Mapping[str, float]
    """All-to-all -> what both phases are predicted to take with it."""
    reduces: Reduces
    """The methods of the reduce-scatters, by size."""
    why_unchunked: str = ""
    """The reason why the layers run in one chunk whatever is chosen; empty: there is none."""
    empty_share: float = 0.0
    """The share of slots that were empty and are not sent, as dispatch is unpadded by choice; else 0."""

    def phases(self) -> Iterator[tuple[str, Choice, Degree]]:
        """Yield each phase with its choice and the degree that was given for it."""
        yield from zip(("forward", "backward"), self.choices, self.asked, strict=True)


@dataclass(frozen=True)
class TuningContext:
    """Holds facts that are the same for all layers."""

    step: StepTimes
    slowed: Slowdowns
    sharded_ms: Mapping[int, float]
    """ESP size -> the time of all experts' parts of a step, by the cluster's numbers."""
    esp_size: int
    """The current ESP size."""
    why_again: str | None = None
    """The reason for measuring again."""
    is_tried: bool = False
    """Whether trials follow: steps with these and other plans, after which the fastest is kept."""


def rows_of_plan(
    measured: Measured,
    labels: Sequence[str],
    plan: ModelPlan,
    asked: tuple[Degree, Degree],
) -> list[Row]:
    """Return a row for all layers that are equal and run alike.

    Args:
        measured: what was measured of the layers.
        labels: the labels of the plan's layers.
        plan: the plan by which they run.
        asked: the degrees given by hand.
    """
    found: dict[tuple, Row] = {}
    for index, label in enumerate(labels):
        kind, alltoall, choices = measured.kind_of[label], plan.alltoalls[index], plan.choices(index)
        reason = kind.layer.fsmoe.why_unchunked
        row = Row(
            (label,),
            measured.profile_of(kind, alltoall),
            choices,
            (None, None) if reason else asked,
            alltoall,
            plan.alltoalls_ms[index],
            measured.reduces(kind),
            reason,
            kind.empty_share(alltoall),
        )
        key = id(kind), alltoall, *(each.order for each in choices)
        before = found.get(key)
        # Gradients that travel in them may differ: the first of the layers is shown.
        found[key] = row if before is None else replace(before, labels=(*before.labels, label))
    return list(found.values())


def describe_plan(labels: Sequence[str], plan: ModelPlan) -> str:
    """Describe in one line how a plan runs its layers: chunks and order of both phases."""
    texts: dict[str, list[str]] = {}
    for index, label in enumerate(labels):
        forward, backward = (each.order for each in plan.choices(index))
        alltoall = plan.alltoalls[index]
        words = [
            f"{forward.degree} and {backward.degree} chunks",
            *dict.fromkeys(_order_words(each) for each in (forward, backward) if each.degree > 1),
            *([] if alltoall == "flat" else [alltoall]),
            *(["two-batch overlap"] if plan.is_two_batch else []),
            *([] if plan.sending == "placed" else [f"gradients {plan.sending.replace('_', ' ')}"]),
        ]
        texts.setdefault(", ".join(words), []).append(label)
    if len(texts) == 1:
        return next(iter(texts))
    return "; ".join(f"{span(users)} {text}" for text, users in texts.items())


def _order_words(order: Order) -> str:
    return order_words(order.degree, order.links, order.conversions)


def describe_rows(rows: Sequence[Row], context: TuningContext, took_s: float, source: str) -> Message:
    """Return tables: what operations cost, how lanes slow each other down, how layers run, what a step should take.

    Args:
        rows: the rows, one per kind of layer.
        context: the facts that hold for all of them.
        took_s: the seconds that the stage took.
        source: where the numbers come from.
    """
    lines = [
        f"autotune: {source}; the stage took {took_s:.2f} s",
        *([f"measured again because {context.why_again}"] if context.why_again else []),
        *_costs(rows),
        "",
        *_slowed(context),
        *_plans(rows),
        "",
        *_step(context),
    ]
    if context.is_tried:
        lines.append("this is predicted: the next steps try this plan and others in turns, and what they take decides")
    return Message(lines)


def choices_as_data(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the choices, an entry per row and phase: for the folder of a run and for all tables."""
    return [
        {
            "layers": row.labels,
            "phase": phase,
            "degree": choice.order.degree,
            "order": choice.order.links,
            "conversions": choice.order.conversions,
            "predicted_ms": choice.time_ms,
            "isolated_ms": choice.isolated_ms,
            "runner_up": choice.runner_up,
            "runner_up_ms": choice.runner_up_ms,
            "uncut_ms": choice.unchunked_ms,
            "bound_by": choice.bottleneck,
            "alltoall": row.alltoall,
            "asked": asked,
        }
        for row in rows
        for phase, choice, asked in row.phases()
    ]


def choices_table(rows: Sequence[Row], more: Mapping[str, str] = MappingProxyType({}), indent: str = "") -> Table:
    """Return the table of what was chosen.

    Args:
        rows: the rows, each with both phases.
        more: further columns: head -> key of :func:`choices_as_data`.
        indent: what is put ahead of each line.
    """
    heads = _HEADS | more | {"bound by": "bound_by"}
    cells = []
    for row in rows:
        why = {"bound_by": f"in one chunk: {row.why_unchunked}"} if row.why_unchunked else {}
        cells += [[_cell(each | why, key) for key in heads.values()] for each in choices_as_data([row])]
    return Table(tuple(heads), cells, indent, has_rule=False)


def _cell(choice: Mapping[str, Any], key: str) -> str:
    value = choice[key]
    if key == "layers":
        return span(value)
    if key == "order":
        return order_words(choice["degree"], value, choice["conversions"])
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def timings_of(rows: Sequence[Row]) -> list[tuple[str, Timing, list[str]]]:
    """Return each operation that was measured, with its timing and the layers that have it."""
    found: dict[tuple[str, int], tuple[str, Timing, set[str]]] = {}
    for row in rows:
        for name, timing in row.profile.operations.items():
            found.setdefault((name, id(timing)), (name, timing, set()))[2].update(row.labels)
    return [(name, timing, sorted(labels)) for name, timing, labels in found.values()]


def _costs(rows: Sequence[Row]) -> list[str | Table]:
    cells = [("layers", "operation", "alpha [ms]", "beta [ms per unit]", "unit", "typically off", "at most")]
    bad: dict[str, list[str]] = {}
    profiles: dict[int, tuple[LayerProfile, list[str]]] = {}
    for row in rows:
        profiles.setdefault(id(row.profile), (row.profile, []))[1].extend(row.labels)
    for name, timing, labels in timings_of(rows):
        fit, layers = timing.best_fit, span(labels)
        for cost, from_size in _lines(fit.cost):
            unit = timing.unit if from_size is None else f"{timing.unit}, {from_size}"
            line = (f"{cost.alpha_ms:.4f}", f"{cost.beta_ms:.3e}", unit, f"{fit.typical_share:.1%}")
            cells.append((layers, name, *line, f"{fit.worst_share:.1%}"))
        if not fit.is_good:
            bad.setdefault(layers, []).append(name)
    notes = [
        f"{layers}: no straight line describes what was measured of {', '.join(names)}" for layers, names in bad.items()
    ]
    for measured, labels in profiles.values():
        layers = span(sorted(set(labels)))
        if measured.relative_residual > MIN_GAIN:
            notes.append(
                f"{layers}: chunks have to gain more than {measured.relative_residual:.0%}, as far as fits are off"
            )
        cells.append((layers, "each task, besides", f"{measured.task_ms:.4f}", "", "", "", ""))
        issued = [f"{name} {each.issue_ms:.3f}" for name, each in measured.operations.items() if each.issued_ms]
        if issued:
            notes.append(f"{layers}: one thread issues all of it, and needs for a task, in ms: {', '.join(issued)}")
        if measured.uses_rng:
            notes.append(f"{layers}: experts draw random numbers, so both phases have as many chunks")
    return [aligned(cells), *notes]


def _lines(cost: Cost) -> list[tuple[LinearCost, str | None]]:
    if isinstance(cost, SwitchedCost):
        return [(cost.below, f"below {cost.switch_size:.3g}"), (cost.above, f"from {cost.switch_size:.3g}")]
    return [(cost, None)]


def _slowed(context: TuningContext) -> list[str | Table]:
    factors = context.slowed.factors
    if not factors:
        return ["one task runs after another here: no lane slows another down", ""]
    lanes = list(dict.fromkeys(lane for pair in factors for lane in pair))
    cells = [("slowed down", *(f"by {lane}" for lane in lanes))]
    for slowed in lanes:
        shown = (f"{factors[slowed, by]:.2f}" if (slowed, by) in factors else "-" for by in lanes)
        cells.append((str(slowed), *shown))
    lines: list[str | Table] = [aligned(cells)]
    for (a, b), both in context.slowed.overlap_gains().items():
        if both < MIN_OVERLAP_GAIN:
            lines.append(f"{a} and {b} at once do {both:.2f} of what one does alone: overlap of these will not pay")
    return [*lines, ""]


def _plans(rows: Sequence[Row]) -> list[str | Table]:
    notes: list[str] = []
    for row in rows:
        layers = span(row.labels)
        if len(row.alltoalls_ms) > 1:
            each = ", ".join(f"{name} {time_ms:.3f} ms" for name, time_ms in row.alltoalls_ms.items())
            notes.append(f"{layers}: all-to-all {row.alltoall} of {each} for both phases")
        if row.reduces:
            names = {"exchange": "an all-to-all and a sum", "backend": "the backend's own"}
            each = ", ".join(f"from {from_bytes:.3g} bytes on {names[name]}" for from_bytes, name in row.reduces)
            notes.append(f"{layers}: reduce-scatter: {each}")
        for phase, choice, asked in row.phases():
            if asked is not None:
                notes.append(
                    f"{layers} {phase}: num_chunks = {asked} is given by hand; auto would have chosen "
                    f"{choice.auto_degree}, predicted {choice.auto_ms:.3f} ms"
                )
            elif reason := _why_not_runner_up(choice, max(MIN_GAIN, row.profile.relative_residual)):
                notes.append(f"{layers} {phase}: {reason}")
    more = {"isolated ms": "isolated_ms", "runner-up": "runner_up", "its ms": "runner_up_ms"}
    return [choices_table(rows, more), *notes]


def _why_not_runner_up(choice: Choice, margin: float) -> str | None:
    """Return why a number of chunks is not chosen that would make its phase faster; ``None`` if there is none.

    Args:
        choice: the choice for one phase.
        margin: the gain that a cut has to bring.
    """
    if choice.runner_up is None or choice.runner_up_ms is None or choice.runner_up_both_ms is None:
        return None
    # Of equals, which differ by rounding, the smaller degree is taken.
    if choice.runner_up_ms >= (1 - _EQUAL) * choice.time_ms:
        return None
    other = f"with {chunks_text(choice.runner_up)} it would take"
    if choice.runner_up_both_ms >= choice.both_ms:
        return (
            f"{other} less, but {choice.runner_up_both_ms:.3f} ms instead of {choice.both_ms:.3f} in both phases "
            "together"
        )
    gain = 1 - choice.runner_up_ms / choice.time_ms
    return f"{other} {gain:.1%} less; chunks have to gain more than {margin:.0%}"


def _step(context: TuningContext) -> list[str]:
    step = context.step
    rest = "not seen yet, so left out" if step.dense_ms is None else f"{step.dense_ms:.3f} ms, as measured"
    lines = [
        f"a step without the optimizer, predicted: {step.chosen_ms:.3f} ms ({step.isolated_ms:.3f} if lanes did not "
        f"slow each other down), deepspeed {step.deepspeed_ms:.3f} ms: {step.speedup:.2f} times as fast",
        f"  the busiest lanes alone would take {step.bound_ms:.3f} ms: no schedule takes less",
        f"  in it: all but the experts' parts {rest}; gradients {step.gradients_ms:.3f} ms, of which "
        f"{step.exposed_ms:.3f} find no idle link",
    ]
    if len(context.sharded_ms) > 1:
        sizes = ", ".join(
            f"{size}{' (as it is)' if size == context.esp_size else ''} {time_ms:.3f} ms"
            for size, time_ms in context.sharded_ms.items()
        )
        lines.append(
            "  experts' parts of a step with another fsmoe.expert_tensor_parallel_size, by the cluster's numbers: "
            f"{sizes}"
        )
    return lines


def aligned(rows: Sequence[Sequence[str]]) -> Table:
    """Return a table, the first row of which are its heads."""
    return Table(rows[0], rows[1:], has_rule=False)


def span(labels: Sequence[str]) -> str:
    """Return ``L00..L03`` for three or more consecutive layers, else a list ``L00, L01``; ``stage1/`` is kept in
    front."""
    names = [each.rpartition("/")[2] for each in labels]
    numbers = [int(each.removeprefix("L")) for each in names]
    if len(labels) > 2 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{labels[0]}..{names[-1]}"
    return ", ".join(labels)


# ---- what was measured and decided, as plain data for the folder of a run


def plans_as_data(pipelines: Mapping[str, LayerPipeline], autotune: Autotune | None) -> dict[str, Any]:
    """Return the plans that run now and, where layers were measured, what the plans follow from.

    Args:
        pipelines: label -> how each layer is run.
        autotune: the stage; ``None``, or one that has not run, if degrees were given.
    """
    rows = [] if autotune is None else autotune.result.rows
    ways = {label: row.alltoall for row in rows for label in row.labels}
    layers = [
        {
            "layer": label,
            "phase": phase,
            "degree": plan.block.degree,
            "order": plan.block.links,
            "conversions": plan.block.conversions,
            "alltoall": plan.alltoall,
            "way": ways.get(label),
            "tasks": len(plan.schedule.tasks),
        }
        for label, pipeline in pipelines.items()
        for phase, plan in (("forward", pipeline.forward), ("backward", pipeline.backward))
    ]
    if autotune is None or not autotune.result.rows:
        return {"layers": layers}
    result = autotune.result
    return {
        "layers": layers,
        **result.outcome.as_data(result.step),
        "num_measured": result.num_measured,
        "choices": choices_as_data(result.rows),
        "trials": [[asdict(each) for each in of_round] for of_round in result.tried],
        "hints": list(result.hints),
        "fits": _fits(result.rows),
    }


def measured_job(
    measured: Measured,
    block: FSMoEBlock,
    running: LayerRuntime,
    labels: Sequence[str],
    tensors_bytes: Mapping[str, Sequence[int]],
    micro_batches: int,
) -> RecordedJob:
    """Return the job that plans are searched from, so that they can be searched again without the machine. It has not
    yet the time of the rest of the model, and the bytes of its gradients.

    Args:
        measured: what was measured.
        block: the options of the stage.
        running: the lanes and links of the layers.
        labels: the labels of the layers in the order of the forward.
        tensors_bytes: kind of gradient -> the bytes of each tensor that we reduce.
        micro_batches: the forwards and backwards of an optimizer step.
    """
    kinds = tuple(
        RecordedKind(
            tuple(kind.labels),
            kind.pipeline.forward.groups,
            kind.sizes,
            {
                name: RecordedAllToAll(
                    way.planned,
                    measured.profile_of(kind, name),
                    rows=kind.sizes_with(name) if way.is_unpadded else None,
                )
                for name, way in kind.options.items()
            },
            kind.layer.fsmoe.is_unchunked,
            kind.subject.sizes.num_choices or None,
        )
        for kind in measured.kinds
    )
    return RecordedJob(
        kinds,
        tuple(labels),
        mode=mode_of(block.schedule, block.gradient_partition.mode),
        links=running.links,
        tensors_bytes={kind: tuple(sizes) for kind, sizes in tensors_bytes.items()},
        slowed=measured.slowed,
        is_serial=measured.is_serial,
        issues_ahead=measured.issues_ahead,
        shared_link=running.one_link is not None,
        **_of_block(block, micro_batches),
    )


def called_as_data(
    shapes: Mapping[str, CallShape],
    layers: Mapping[str, FSMoELayer],
    block: FSMoEBlock,
    links: Links,
    mode: Mode,
    micro_batches: int,
    choices: Mapping[str, int | None],
) -> dict[str, Any]:
    """Return the layers of a run that was not measured: the costs of their tasks are in its trace, if anywhere.

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
        key = forward.groups, shape, forward.alltoall, inner.fsmoe.is_unchunked, choices.get(label)
        kinds.setdefault(key, []).append(label)
    job = RecordedJob(
        kinds=tuple(
            RecordedKind(tuple(labels), groups, shape, {alltoall: RecordedAllToAll(alltoall)}, *others)
            for (groups, shape, alltoall, *others), labels in kinds.items()
        ),
        labels=tuple(label for label in choices if label in shapes),
        mode=mode,
        links=links,
        is_serial=not block.overlap,
        **_of_block(block, micro_batches),
    )
    return job_as_data(job)


def _of_block(block: FSMoEBlock, micro_batches: int) -> dict[str, Any]:
    return {
        "schedule": block.schedule,
        "max_degree": block.pipeline_degree.max,
        "gradient_solver": block.gradient_partition.solver,
        "chunk_bytes": block.gradient_partition.asked_bytes,
        "micro_batches": micro_batches,
    }


def _fits(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        {
            "operation": name,
            "layers": labels,
            "unit": timing.unit,
            "sizes": timing.sizes,
            "times_ms": timing.times_ms,
            "line_ms": [timing.cost.ms(size) for size in timing.sizes],
            "lines": [asdict(each) for each, _ in _lines(timing.cost)],
            "typical_share": timing.best_fit.typical_share,
            "worst_share": timing.best_fit.worst_share,
            "is_good": timing.best_fit.is_good,
        }
        for name, timing, labels in timings_of(rows)
    ]
