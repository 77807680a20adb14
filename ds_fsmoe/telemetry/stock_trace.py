# SPDX-License-Identifier: Apache-2.0
"""Traces stock DeepSpeed's steps in the form of ours: its all-to-alls, experts and gradients, task by task.

The engine's telemetry makes it with ``"enabled": false`` and a trace in the block. DeepSpeed's own engine and layers
run then; functions of its communication module are distinguished by their callers, experts by hooks on their module. No
computation changes. Stock's other work appears as idle time between tasks, as in our own traces.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import deepspeed.comm
import torch
from deepspeed.moe.layer import MoE

from ds_fsmoe.distributed.topology import Topology, find_topology
from ds_fsmoe.observing.trace import RunningTrace, Tracer
from ds_fsmoe.planning.schedule import A2A_IN, A2A_OUT, EXPERT, GATHER, GRAD, Lane, Task

_REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_fn", "reduce_scatter_tensor", "broadcast")
_GATHERING = ("all_gather", "all_gather_into_tensor")
_EXCHANGING = "all_to_all_single"
GRADIENTS = "gradients/backward"
"""The label of what is reduced in a backward outside of MoE layers: a run for each message, as what is between two
messages belongs to other tasks."""


class StockTracer(Tracer):
    """Traces one engine of DeepSpeed's own. The constructor is collective, as ranks find out which share a node.

    Args:
        engine: the complete engine.
        folder: the folder for the trace.
        rank: the rank of this process.
        start_step: the first step to record.
        num_steps: the number of steps to record.

    Raises:
        OSError: the folder is not writable.
    """

    _of = " of stock DeepSpeed"
    _more_about: ClassVar[Mapping[str, Any]] = {"stock": True}

    def __init__(self, engine: Any, folder: Path, rank: int, start_step: int, num_steps: int) -> None:
        # Ahead of the tracer, which is closed at exit from then on and has made its folder.
        self._undo: list[Callable[[], None]] = []
        self._topology: Topology = find_topology()
        super().__init__(folder, rank, start_step, num_steps, engine.device)
        self._engine = engine
        self._in_layer: str | None = None
        self._went_forward: list[str] = []
        """The layers whose backward is still to come."""
        self._backward: RunningTrace | None = None
        self._in_step = False
        self._inside = False
        """Whether a collective is under way: those that DeepSpeed uses inside it are not separate tasks."""
        self._watch()

    # ---- hooks and wrapped functions

    def _watch(self) -> None:
        module, step = self._engine.module, self._engine.step

        @functools.wraps(step)
        def outer(*args: Any, **kwargs: Any) -> Any:
            self._in_step = True
            try:
                return step(*args, **kwargs)
            finally:
                self._in_step = False

        self._engine.step = outer
        self._hook(module.register_forward_pre_hook(lambda *_: self._forward_begins()))
        layers = (each for each in module.modules() if isinstance(each, MoE))
        for index, layer in enumerate(layers):
            label, inner = f"L{index:02d}", layer.deepspeed_moe
            if inner.ep_group is not None:
                ranks = torch.distributed.get_process_group_ranks(inner.ep_group)
                self.peers[label] = dict.fromkeys((A2A_IN, A2A_OUT), ranks)
            self._hook(inner.register_forward_pre_hook(lambda *_, label=label: self._enter(label)))
            self._hook(inner.register_forward_hook(lambda *_: self._leave()))
            begun: list[Any] = []
            begin = functools.partial(self._note_begin, begun)
            self._hook(inner.experts.register_forward_pre_hook(lambda *_, begin=begin: begin()))
            self._hook(inner.experts.register_forward_hook(lambda *_, b=begun: self._experts_forward(b)))
            self._hook(inner.experts.register_full_backward_pre_hook(lambda *_, begin=begin: begin()))
            self._hook(
                inner.experts.register_full_backward_hook(
                    lambda *_, b=begun, label=label: self._experts_backward(b, label)
                )
            )
        for name in (*_REDUCING, *_GATHERING, _EXCHANGING):
            self._wrap(name)

    def _hook(self, handle: Any) -> None:
        self._undo.append(handle.remove)

    def _wrap(self, name: str) -> None:
        inner = getattr(deepspeed.comm, name, None)
        if inner is None:
            return
        takes = inspect.signature(inner)

        @functools.wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            if not self._is_traced or self._inside:
                return inner(*args, **kwargs)
            self._inside = True
            try:
                begin = self._clock.now()
                result = inner(*args, **kwargs)
                end = self._clock.now()
                self._communicated(name, takes.bind(*args, **kwargs).arguments.get("group"), begin, end)
            finally:
                self._inside = False
            return result

        def undo() -> None:
            # Another one may have come over it; then this one passes on.
            if getattr(deepspeed.comm, name) is outer:
                setattr(deepspeed.comm, name, inner)

        setattr(deepspeed.comm, name, outer)
        self._undo.append(undo)

    @property
    def _is_traced(self) -> bool:
        """Return True in a forward or backward of training in one of the steps; the optimizer is in neither."""
        is_training = self.is_recording and not self._in_step and self._engine.module.training
        return is_training and self._engine.global_steps in self._wanted

    def _forward_begins(self) -> None:
        if not self._engine.module.training:
            return
        self._backward = None
        if self._engine.global_steps != self._step:
            self._went_forward.clear()
        self.step(self._engine.global_steps)

    # ---- tasks

    def _enter(self, label: str) -> None:
        self._in_layer = label
        if self._is_traced:
            self._begin_run(f"{label}/forward")
            if torch.is_grad_enabled():
                self._went_forward.append(label)

    def _leave(self) -> None:
        self._in_layer = None

    def _begin_run(self, label: str) -> RunningTrace:
        run = RunningTrace(label, self._engine.global_steps, [], self._clock.now)
        self._runs.append(run)
        return run

    def _note_begin(self, begun: list[Any]) -> None:
        if self._is_traced:
            begun[:] = [self._clock.now()]

    def _experts_forward(self, begun: list[Any]) -> None:
        if begun and self._runs:
            self._add(self._runs[-1], EXPERT, Lane.COMPUTE, begun.pop(), self._clock.now())

    def _experts_backward(self, begun: list[Any], label: str) -> None:
        if not begun:
            return
        if self._backward is None or self._backward.label != f"{label}/backward":
            # Nobody to exchange tokens with: this is all of the layer.
            self._backward = self._begin_run(f"{label}/backward")
            if label in self._went_forward:
                self._went_forward.remove(label)
        self._add(self._backward, EXPERT, Lane.COMPUTE, begun.pop(), self._clock.now())

    def _communicated(self, name: str, group: Any, begin: Any, end: Any) -> None:
        lane = self._lane_of(group)
        if self._in_layer is not None:
            run = self._runs[-1]
            first = not any(each.kind == A2A_IN for each in run.tasks)
            self._add(run, (A2A_IN if first else A2A_OUT) if name == _EXCHANGING else GATHER, lane, begin, end)
        elif name == _EXCHANGING:
            if self._backward is None or any(each.kind == A2A_OUT for each in self._backward.tasks):
                label = self._went_forward.pop() if self._went_forward else "L00"
                self._backward = self._begin_run(f"{label}/backward")
                self._backward.start = begin
            first = not self._backward.tasks
            self._add(self._backward, A2A_IN if first else A2A_OUT, lane, begin, end)
        else:
            run = self._begin_run(GRADIENTS)
            run.start = begin
            self._add(run, GRAD if name in _REDUCING else GATHER, lane, begin, end)

    def _add(self, run: RunningTrace, kind: str, lane: Lane, begin: Any, end: Any) -> None:
        after = (len(run.tasks) - 1,) if run.tasks else ()
        chunk = sum(each.kind == kind for each in run.tasks)
        run.tasks.append(Task(kind, lane, chunk, after=after))
        run.begins.append(begin)
        run.ends.append(end)

    def _lane_of(self, group: Any) -> Lane:
        everyone = range(self._topology.world_size)
        ranks = everyone if group is None else torch.distributed.get_process_group_ranks(group)
        lanes = self._topology.lanes_of(ranks)
        return lanes[0] if lanes else Lane.INTRA

    def _write(self, ended: str, patience_s: float, is_early: bool) -> None:
        super()._write(ended, patience_s, is_early)
        while self._is_written and self._undo:
            self._undo.pop()()
