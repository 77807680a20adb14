# SPDX-License-Identifier: Apache-2.0
"""What a variant of a training step costs besides its time: memory, and what finding its plans has taken."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.harness import Case, CaseResult
from benchmarks.harness.outcome import PACKAGES
from benchmarks.harness.result_files import append_rows, made_with
from ds_fsmoe.execution.lanes import Together
from tests.live_memory import LiveMemory

NEVER = "never"
UNTUNED = {"ours": "deepspeed", "fsmoe": "deepspeed"}
"""Tuned variant -> the one with the same layers in the same layout whose plans nobody has looked for."""
ADDED_TO_TUNING = ("paid_after_steps", "paid_after_steps_untuned")
"""The columns that files of earlier versions lack."""


@dataclass(frozen=True)
class StepMemory:
    """The bytes of a variant's tensors on one rank."""

    held: int
    """Between steps: parameters, states of the optimizer, buffers, and gradients if they stay."""
    peak: int
    """The most that lives at once during a step, what is held among it."""
    bucket: int = 0
    """Of one buffer for gradients that is as large as DeepSpeed's config says, 2 GB if it says nothing, whatever fills
    it: in a small model it would hide all else, so it is in neither of the others."""


class _WithoutBuckets(LiveMemory):
    """Counts no tensors of so many elements."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        self._sizes_of_buckets = {num_elements * each for each in (2, 4)} - {0}
        self.bucket = 0

    def size_of(self, storage: torch.UntypedStorage) -> int:
        size = super().size_of(storage)
        if size not in self._sizes_of_buckets:
            return size
        self.bucket = size
        return 0


def storages_now() -> set[int]:
    """Return the storages of all tensors that live now, by their addresses."""
    gc.collect()
    return {each._cdata for each in _storages()}


def step_memory(
    step: Callable[[], object], layers: Collection[Any], before: Collection[int], bucket_elements: int = 0
) -> StepMemory:
    """Run one more step of a variant, and count its tensors: not those of others that live in the same process.

    Counted are this thread and the tasks of our layers, in whatever thread they run.

    Args:
        step: of the variant, which has made some before.
        layers: the MoE layers of ours that it has.
        before: the storages that were there before the variant was made.
        bucket_elements: the elements of DeepSpeed's buffers for gradients; 0: it has none.
    """
    gc.collect()
    memory = _WithoutBuckets(bucket_elements)
    memory.count(each for each in _storages() if each._cdata not in before)
    held = memory.live
    observers = [layer.pipeline.observer for layer in layers]
    with memory:
        for layer, observer in zip(layers, observers, strict=True):
            counting = memory.in_every_thread()
            both = counting if observer is None else Together(observer, counting)
            layer.fsmoe.attach(layer.pipeline.window, both)
        step()
    for layer, observer in zip(layers, observers, strict=True):
        layer.fsmoe.attach(layer.pipeline.window, observer)
    return StepMemory(held, memory.peak, memory.bucket)


def _storages() -> Iterator[torch.UntypedStorage]:
    # Asking an object for its class may load modules that are loaded when needed: its type is asked for.
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    # A gradient that autograd has made is an object once somebody has asked for it.
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    for tensor in tensors:
        if tensor.layout is torch.strided:
            yield tensor.untyped_storage()


def write_memory(case: Case, memories: Mapping[str, StepMemory], file: Path) -> None:
    """Append the memory of every variant, of the rank that has the most, and print it. Collective.

    Args:
        case: the case.
        memories: variant -> its memory on this rank, stock's among them.
        file: of the rows.
    """
    most = torch.tensor([[each.held, each.peak, each.bucket] for each in memories.values()])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if dist.get_rank():
        return
    of_variants = dict(zip(memories, most.tolist(), strict=True))
    made = made_with(PACKAGES) | {"ranks": dist.get_world_size(), "case": case.name}
    rows = [
        made
        | {"variant": name, "unit": "MB", "held": f"{held / 1e6:.6g}", "peak": f"{peak / 1e6:.6g}"}
        | {"bucket": f"{bucket / 1e6:.6g}", "times_stock": f"{peak / of_variants['stock'][1]:.4f}"}
        for name, (held, peak, bucket) in of_variants.items()
    ]
    append_rows(file, tuple(rows[0]), rows)
    width = max(len(f"{case.name}: tensors of"), *map(len, of_variants))
    print(
        f"{case.name + ': tensors of':<{width}}  {'held MB':>9}  {'peak MB':>9}  {'bucket MB':>9}  times stock's peak"
    )
    for row in rows:
        sizes = "  ".join(f"{float(row[name]):>9.4g}" for name in ("held", "peak", "bucket"))
        print(f"{row['variant']:<{width}}  {sizes}  {float(row['times_stock']):.2f}", flush=True)


def paid_after_steps(outcome: Any, before_ms: float, now_ms: float) -> int | None:
    """Return after how many steps a gain has made up for measuring and for trying plans; ``None``: nothing is gained.

    Args:
        outcome: of tuning. Its times are of forwards and backwards alone, so what trials took longer than the plan
            that stays is added to whole steps with that.
        before_ms: a whole step without what was tuned.
        now_ms: a whole step with the plan that stays.
    """
    gain_ms = before_ms - now_ms
    if gain_ms <= 0:
        return None
    kept_ms = outcome.baseline_ms if outcome.is_stock else outcome.kept_ms
    longer_ms = 0.0 if kept_ms is None else outcome.total_ms - outcome.num_steps * kept_ms
    lost_ms = 1e3 * outcome.took_s + longer_ms - outcome.num_steps * gain_ms
    return max(0, math.ceil(lost_ms / gain_ms))


def write_tuning(case: Case, engines: Mapping[str, Any], result: CaseResult, file: Path) -> None:
    """Append what tuning took of each engine that was tuned, and print it.

    Args:
        case: the case.
        engines: variant -> its engine.
        result: the steps of all variants, which say after how many of them tuning has paid.
        file: of the rows.
    """
    p50_ms = {each.name: each.p50_ms for each in result.variants}
    for name, engine in engines.items():
        tuner = getattr(getattr(engine, "fsmoe", None), "autotune", None)
        if tuner is None or not tuner.result.outcome.num_steps:
            continue
        kept_ms = tuner.result.outcome.baseline_ms if tuner.result.outcome.is_stock else tuner.result.outcome.kept_ms
        paid = [
            _shown(paid_after_steps(tuner.result.outcome, p50_ms[before], p50_ms[name])) if before in p50_ms else ""
            for before in ("stock", UNTUNED.get(name, ""))
        ]
        facts = {
            "measured_s": f"{tuner.result.outcome.took_s:.1f}",
            "operations": str(tuner.result.num_measured),
            "steps_of_trials": str(tuner.result.outcome.num_steps),
            # Of forwards and backwards of a step, as trials see them: without the optimizer and what follows it.
            "predicted_ms": "" if tuner.result.step is None else f"{tuner.result.step.chosen_ms:.1f}",
            "bound_ms": "" if tuner.result.step is None else f"{tuner.result.step.bound_ms:.1f}",
            "in_trials_ms": "" if kept_ms is None else f"{kept_ms:.1f}",
            "said": tuner.describe(),
            **dict(zip(ADDED_TO_TUNING, paid, strict=True)),
        }
        row = made_with(PACKAGES) | {"ranks": dist.get_world_size(), "case": case.name, "variant": name} | facts
        append_rows(file, tuple(row), [row], ADDED_TO_TUNING)
        print("  ".join((name, *(f"{key} {text}" for key, text in facts.items()))), flush=True)


def write_slowdowns(case: Case, engines: Mapping[str, Any], file: Path) -> None:
    """Append how much lanes slow each other down where layers of an engine were measured: the share by which each kind
    of task takes longer (:class:`~ds_fsmoe.planning.timeline.Contention`)."""
    for name, engine in engines.items():
        tuner = getattr(getattr(engine, "fsmoe", None), "autotune", None)
        if tuner is None or tuner.result.measured is None or not tuner.result.measured.slowed.factors:
            continue
        shares = {key: f"{share:.3f}" for key, share in asdict(tuner.result.measured.slowed.contention()).items()}
        row = made_with(PACKAGES) | {"ranks": dist.get_world_size(), "case": case.name, "variant": name} | shares
        append_rows(file, tuple(row), [row])


def _shown(steps: int | None) -> str:
    return NEVER if steps is None else str(steps)
