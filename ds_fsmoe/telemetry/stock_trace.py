# SPDX-License-Identifier: Apache-2.0
"""Traces stock DeepSpeed's steps in the form of ours: its all-to-alls, experts and gradients, task by task.

With ``"enabled": false`` and a trace asked for, DeepSpeed's own engine and layers run; the functions of its
communication module are told apart by their callers, and experts by hooks on their module. No computation
changes. What stock does between these tasks appears as gaps between them, as in our own traces.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed.comm
import torch
from deepspeed.moe.layer import MoE

from ds_fsmoe.distributed.topology import Topology, find_topology, world_size_now
from ds_fsmoe.files.traces import TracedRun, rank_file, trace_of, write_trace
from ds_fsmoe.observing.spans import clock_of, set_clock
from ds_fsmoe.planning.schedule import A2A_IN, A2A_OUT, EXPERT, GATHER, GRAD, Lane, Task

logger = logging.getLogger("ds_fsmoe")

_REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_fn", "reduce_scatter_tensor", "broadcast")
_GATHERING = ("all_gather", "all_gather_into_tensor")
_EXCHANGING = "all_to_all_single"
GRADIENTS = "gradients/backward"
"""The label of what is reduced in a backward outside of MoE layers: a run for each message, as what is between two
messages belongs to other tasks."""


@dataclass
class _Run:
    label: str
    step: int
    start: Any
    tasks: list[Task] = field(default_factory=list)
    stamps: list[tuple[Any, Any]] = field(default_factory=list)


class StockTracer:
    """Traces one engine of DeepSpeed's own. The constructor is collective, as ranks find out which share a node.

    Args:
        engine: the complete engine.
        folder: the folder for the trace.
        rank: the rank of this process.
        start_step: the first step to record.
        num_steps: the number of steps to record.

    Raises:
        OSError: the folder cannot be written to.
    """

    def __init__(self, engine: Any, folder: Path, rank: int, start_step: int, num_steps: int) -> None:
        self._engine = engine
        self._rank = rank
        self._process = os.getpid()
        self._file = rank_file(Path(folder), rank)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.unlink(missing_ok=True)
        self._wanted = range(start_step, start_step + num_steps)
        self._clock = clock_of(engine.device)
        self._topology: Topology = find_topology()
        self._reference: tuple[Any, int] | None = None
        self._runs: list[_Run] = []
        self._in_layer: str | None = None
        self._went_forward: list[str] = []
        """The layers whose backward is still to come."""
        self._backward: _Run | None = None
        self._in_step = False
        self._inside = False
        """Whether a collective is under way: those that DeepSpeed uses inside it are not separate tasks."""
        self._seen: list[int] = []
        self._peers: dict[str, dict[str, list[int]]] = {}
        self._is_over = False
        self._undo: list[Callable[[], None]] = []
        self._watch()
        atexit.register(self.close)

    # ---- who is told of what

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
                self._peers[label] = dict.fromkeys((A2A_IN, A2A_OUT), ranks)
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
            if not self._is_on or self._inside:
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
    def _is_on(self) -> bool:
        """Return whether this is a forward or backward of training in one of the steps; the optimizer is in neither."""
        if self._reference is None or self._is_over or self._in_step:
            return False
        return self._engine.module.training and self._engine.global_steps in self._wanted

    def _forward_begins(self) -> None:
        if not self._engine.module.training:
            return
        number = self._engine.global_steps
        if number >= self._wanted.stop:
            self._write("after the last step", is_complete=self._seen == list(self._wanted))
        elif number in self._wanted:
            if self._reference is None:
                self._reference = set_clock(self._clock)
            if number not in self._seen:
                self._seen.append(number)
                self._went_forward.clear()
            self._backward = None

    # ---- tasks

    def _enter(self, label: str) -> None:
        self._in_layer = label
        if self._is_on:
            self._begin_run(f"{label}/forward")
            if torch.is_grad_enabled():
                self._went_forward.append(label)

    def _leave(self) -> None:
        self._in_layer = None

    def _begin_run(self, label: str) -> _Run:
        run = _Run(label, self._engine.global_steps, self._clock.now())
        self._runs.append(run)
        return run

    def _note_begin(self, begun: list[Any]) -> None:
        if self._is_on:
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

    def _add(self, run: _Run, kind: str, lane: Lane, begin: Any, end: Any) -> None:
        after = (len(run.tasks) - 1,) if run.tasks else ()
        chunk = sum(each.kind == kind for each in run.tasks)
        run.tasks.append(Task(kind, lane, chunk, after=after))
        run.stamps.append((begin, end))

    def _lane_of(self, group: Any) -> Lane:
        everyone = range(self._topology.world_size)
        ranks = everyone if group is None else torch.distributed.get_process_group_ranks(group)
        lanes = self._topology.lanes_of(ranks)
        return lanes[0] if lanes else Lane.INTRA

    # ---- the end

    def close(self) -> None:
        """Write the trace, unless it has been written."""
        self._write("closed before the last step was over", is_complete=False)

    def _write(self, ended: str, is_complete: bool) -> None:
        # The end of a forked process is not that of the traced one.
        if self._is_over or os.getpid() != self._process:
            return
        self._is_over = True
        atexit.unregister(self.close)
        for undo in reversed(self._undo):
            undo()
        trace = trace_of(self._rank, socket.gethostname(), self._read(), self._about(ended, is_complete))
        with suppress(OSError):
            write_trace(trace, self._file)
        if self._rank == 0:
            logger.info("the trace of stock DeepSpeed is in %s", self._file.parent)

    def _read(self) -> list[TracedRun]:
        if self._reference is None:
            return []
        stamp, unix_ns = self._reference

        def ns(other: Any) -> int:
            self._clock.wait_for(other)
            return unix_ns + self._clock.elapsed_ns(stamp, other)

        found = []
        with suppress(RuntimeError):  # a device that has failed
            for run in self._runs:
                spans = [(ns(begin), ns(end)) for begin, end in run.stamps]
                found.append(TracedRun(len(found), run.label, run.step, run.tasks, ns(run.start), spans))
        return found

    def _about(self, ended: str, is_complete: bool) -> Mapping[str, Any]:
        return {
            "world_size": world_size_now(),
            "device": str(self._engine.device),
            "asked_for": f"steps {self._wanted[0]} to {self._wanted[-1]}",
            "steps": self._seen,
            "complete": is_complete,
            "ended": ended,
            "peers": self._peers,
            "runs": len(self._runs),
            "unfinished": [],
            "stock": True,
        }
