# SPDX-License-Identifier: Apache-2.0
"""Observes a layer's calls in steps that are traced and in steps that are timed.

The runtime of layers makes one for each engine. The tracer receives the predicted time of each phase. The clock of
steps receives the phases with the data for predicting them. In all other steps calls run without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.distributed.groups import FSMoEGroups
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.execution.lanes import Observer, Together
from ds_fsmoe.execution.pipeline import CallSizes as CalledWith
from ds_fsmoe.execution.pipeline import LayerExperts, LayerPipeline, WholeExperts
from ds_fsmoe.files.runs import TRACE
from ds_fsmoe.observing.instruments import Instrument, LayerCall
from ds_fsmoe.observing.predicted import MeasuredPredictor, Predictor, Predictors
from ds_fsmoe.observing.step_timer import StepClock
from ds_fsmoe.observing.trace import Tracer
from ds_fsmoe.planning.call_shape import CallShape
from ds_fsmoe.planning.schedule import EXPERT_GRAD, GRAD, GRAD_GATHER, GRAD_SCATTER, Schedule
from ds_fsmoe.planning.workload import stage_kinds

if TYPE_CHECKING:
    from ds_fsmoe.gradients.reducer import GradientReducer

_GROUP_OF_GRADIENTS = {GRAD: "dp", GRAD_SCATTER: "dp", GRAD_GATHER: "dp", EXPERT_GRAD: "edp"}


def folder_of_trace(block: FSMoEBlock) -> Path:
    """Return the folder of the ranks' traces: the block's, or else the ``trace`` folder of the run's record."""
    if block.record.dir is None or "path" in block.trace.model_fields_set:
        return Path(block.trace.path)
    return Path(block.record.dir) / TRACE


@dataclass
class CallObserver:
    """Observes the layers of one engine for traces and timed steps: an instrument."""

    tracer: Tracer | None = None
    clock: StepClock | None = None
    predictor: Predictor | MeasuredPredictor | None = None
    """The predictor of all layers, for the trace."""
    predictors: Predictors = dict
    """Predictors of layers from what was measured here: for the trace where there is no other."""

    @classmethod
    def of(cls, block: FSMoEBlock, device: torch.device) -> CallObserver:
        """Make the observer that a block asks for.

        Raises:
            OSError: the folder of the trace is not writable.
            ValueError: there is no such cluster, or its file is wrong.
        """
        trace, tracer = block.trace, None
        if trace.enabled:
            rank = dist.get_rank() if world_size_now() > 1 else 0
            tracer = Tracer(folder_of_trace(block), rank, trace.start_step, trace.num_steps, device)
        clock = StepClock(device) if block.autotune.enabled else None
        return cls(tracer, clock, None if tracer is None or trace.cluster is None else Predictor(trace.cluster))

    @property
    def instruments(self) -> tuple[Instrument, ...]:
        """Return the instruments for the calls of layers."""
        return () if self.tracer is None and self.clock is None else (self.watch,)

    def add_groups(self, pipeline: LayerPipeline, groups: FSMoEGroups) -> None:
        """Register the groups of a layer.

        Raises:
            ConfigError: the cluster lacks a number for one of them.
        """
        if self.tracer is not None:
            self.tracer.peers[pipeline.label] = {
                kind: list(groups.ranks_of(group))
                for kind, group in (stage_kinds() | _GROUP_OF_GRADIENTS).items()
                if group
            }
        if isinstance(self.predictor, Predictor):
            self.predictor.of(pipeline.forward.groups, pipeline.forward.alltoall)

    def watch(self, call: LayerCall) -> None:
        """Record a call in a step that is traced or timed. An evaluation before a traced step does not count."""
        is_timed = not isinstance(call.experts, WholeExperts) or call.experts.is_timed
        clock = self.clock if is_timed and self.clock is not None and self.clock.is_listening else None
        tracer = self.tracer if call.is_training and self.tracer is not None and self.tracer.is_recording else None
        if clock is None and tracer is None:
            return
        # For this call alone: another one may come before its backward.
        window = None if call.pipeline.window is None else _MeasuredWindow(call.pipeline.window)
        of_call = _OfCall(self, call.pipeline, call.experts, window, clock, tracer)
        call.pipeline = replace(call.pipeline, window=window).watched(of_call, of_call.called)


def call_sizes(at: CalledWith, experts: LayerExperts | WholeExperts) -> CallShape:
    """Return the sizes of the data that a call sends and multiplies."""
    matrices = [each.numel() for each in experts.parameters if each.dim() > 1]
    products = len(matrices), sum(matrices)
    of_rows = at.num_experts, at.capacity, at.width, at.dtype.itemsize, *products
    return CallShape(*of_rows, num_tokens=at.num_tokens, wires=at.comm_byte_shares)


class _MeasuredWindow:
    """Wraps the window of a layer's backward, and records the sizes of the gradients that it sends."""

    def __init__(self, window: Any) -> None:
        self._window: GradientReducer = window
        self.tasks, self.send, self.close = window.tasks, window.send, window.close
        self.slices_bytes: tuple[int, ...] = ()

    def open(self, label: str) -> Sequence[Any]:
        grad_slices = self._window.open(label)
        flats = self._window.flats
        self.slices_bytes = tuple((each.stop - each.first) * flats[each.flat].element_bytes for each in grad_slices)
        return grad_slices


@dataclass
class _OfCall(Observer):
    """Connects one call with the tracer and the clock, and gives them the data to predict each run beforehand."""

    asked: CallObserver
    pipeline: LayerPipeline
    experts: LayerExperts | WholeExperts
    window: _MeasuredWindow | None
    clock: StepClock | None
    tracer: Tracer | None

    def called(self, at: CalledWith) -> None:
        self.sizes = call_sizes(at, self.experts)

    def of_run(self, schedule: Schedule, label: str) -> Observer:
        of, sizes, listeners = self.pipeline.label, self.sizes, []
        plan = self.pipeline.backward if label.endswith("/backward") else self.pipeline.forward
        if plan.backward and self.window is not None:
            sizes = replace(sizes, slices_bytes=self.window.slices_bytes)
        if self.tracer is not None and self.tracer.is_recording:
            predictor = self.asked.predictor or self.asked.predictors().get(of)
            expected = None if predictor is None else partial(predictor.timeline, schedule, plan, sizes)
            listeners.append(self.tracer.of_run(schedule, label, expected))
        if (
            self.clock is not None
            and (recorder := self.clock.run(schedule, label, (of, plan, sizes), plan.is_two_batch)) is not None
        ):
            listeners.append(recorder)
        return Together(*listeners)
