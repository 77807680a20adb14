# SPDX-License-Identifier: Apache-2.0
"""What a rank issues to its device, written down while real code runs on CPU tensors: streams, events, collectives.

A collective with ``async_op=False`` is on the current stream, as torch has it since 2.8; with ``async_op=True`` it is
on a stream of its communicator, which waits for the current one, and ``wait()`` makes the current one wait for it. Host
waits are not written down, and neither are DeepSpeed's own streams: on a CPU it has none (``overlap_comm``).

A send and its receive are one collective of two ranks, in a communicator and a stream of that pair, which the current
stream waits for: neither is over before the other has begun.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.distributed import distributed_c10d

from ds_fsmoe.execution import collectives
from ds_fsmoe.execution.stream_lanes import StreamLanes
from ds_fsmoe.gradients.background_lane import BackgroundStreams
from tests.deadlocks import Collective, Program

KINDS = (
    *("all_reduce", "all_to_all_single", "all_to_all", "all_gather_into_tensor", "all_gather_single", "all_gather"),
    *("reduce_scatter_tensor", "reduce_scatter_single", "reduce_scatter", "broadcast", "reduce", "gather"),
    *("scatter", "barrier"),
)
COMPUTE = "compute"


class Stream:
    """Knows how many collectives of each stream are over before what it is given next."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.over: dict[str, int] = {}

    def wait_event(self, event: Event) -> None:
        for stream, count in event.over.items():
            self.over[stream] = max(count, self.over.get(stream, 0))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(Event().record(stream))

    def synchronize(self) -> None:
        """A host wait, which is not written down."""


class Event:
    """What is over when it comes to pass."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.over: dict[str, int] = {}

    def record(self, stream: Stream) -> Event:
        self.over = dict(stream.over)
        return self

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """A host wait, which is not written down."""


class Tape:
    """Of one rank."""

    def __init__(self) -> None:
        self.compute = Stream(COMPUTE)
        self.current = self.compute
        self._issued: list[Collective] = []
        self._links: tuple[Stream, ...] = ()
        self._of_groups: dict[str, Stream] = {}
        self._is_inside = False

    def take(self) -> Program:
        """What was issued since the last time; the device is idle then."""
        taken, self._issued = tuple(self._issued), []
        for stream in (self.compute, *self._links, *self._of_groups.values()):
            stream.over = {}
        return taken

    def make_stream(self, device: torch.device, priority: int = 0) -> Stream:
        """Another one."""
        made = Stream(f"link {len(self._links)}")
        self._links = (*self._links, made)
        return made

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Stands for ``torch.cuda.stream``."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def issue(self, kind: str, group: dist.ProcessGroup, num_bytes: Any, dtype: str, is_async: bool) -> Stream:
        """A collective begins to be under way; returns its stream."""
        ranks = tuple(dist.get_process_group_ranks(group))
        name = f"{group.group_desc} {group.group_name}"
        stream = self.current
        if is_async:
            stream = self._of_groups.setdefault(name, Stream(f"of {name}"))
            stream.wait_stream(self.current)
        if len(ranks) > 1:
            self._note(stream, name, ranks, kind, num_bytes, dtype)
        return stream

    def _note(self, stream: Stream, group: str, ranks: tuple[int, ...], kind: str, num_bytes: Any, dtype: str) -> None:
        after = tuple(sorted((other, count) for other, count in stream.over.items() if other != stream.name))
        self._issued.append(Collective(stream.name, group, ranks, kind, num_bytes, dtype, after))
        stream.over[stream.name] = stream.over.get(stream.name, 0) + 1

    def wrapped_between_two(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``send`` or ``recv``, written down alike on both ranks."""
        signature = inspect.signature(function)

        @functools.wraps(function)
        def between_two(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            tensor, own = given["tensor"], dist.get_rank()
            sender, receiver = (own, given["dst"]) if kind == "send" else (given["src"], own)
            pair = tuple(sorted((sender, receiver)))
            named = f"send from {sender} to {receiver}"
            stream = self._of_groups.setdefault(f"{pair}", Stream(f"of {pair}"))
            stream.wait_stream(self.current)
            self._note(stream, f"pair {pair}", pair, named, tensor.nbytes, str(tensor.dtype).removeprefix("torch."))
            self.current.wait_stream(stream)
            return function(*args, **kwargs)

        return between_two

    def wrapped(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of torch.distributed that is written down."""
        signature = inspect.signature(function)

        @functools.wraps(function)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:  # one is made of another
                return function(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            group, is_async = given.get("group") or dist.group.WORLD, bool(given.get("async_op"))
            named = kind + "".join(f" {each} {given[each]}" for each in ("src", "dst") if given.get(each) is not None)
            stream = self.issue(named, group, *_sizes(kind, given), is_async)
            self._is_inside = True
            try:
                work = function(*args, **kwargs)
            finally:
                self._is_inside = False
            return Pending(self, stream, work) if is_async else work

        return collective


class Pending:
    """What an asynchronous collective gives back."""

    def __init__(self, tape: Tape, stream: Stream, work: Any) -> None:
        self._tape, self._event, self._work = tape, Event().record(stream), work

    def wait(self, *args: Any) -> Any:
        self._tape.current.wait_event(self._event)
        return self._work.wait(*args) if self._work is not None else True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _sizes(kind: str, given: dict[str, Any]) -> tuple[Any, str]:
    """(bytes, type) of what a rank gives."""
    tensors: list[torch.Tensor] = []
    for value in given.values():
        found = value if isinstance(value, (list, tuple)) else [value]
        tensors += [each for each in found if isinstance(each, torch.Tensor)]
    if not tensors:
        return 0, ""
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    if kind != "all_to_all_single":
        return min(each.nbytes for each in tensors), dtype
    output, sent = tensors
    splits = [value for name, value in given.items() if name.endswith("split_sizes")]
    if not any(splits):
        return sent.nbytes, dtype
    rows = [each.nbytes // max(len(each), 1) for each in (sent, output)]
    received_by, sent_to = splits
    return (tuple(n * rows[0] for n in sent_to), tuple(n * rows[1] for n in received_by)), dtype


def record(patch: pytest.MonkeyPatch) -> Tape:
    """From now on everything this process issues is written down; ``patch`` takes it back."""
    tape = Tape()
    for name, value in {
        "Stream": tape.make_stream,
        "Event": Event,
        "stream": tape.on,
        "current_stream": lambda device=None: tape.current,
        "current_device": lambda: 0,
        "synchronize": lambda device=None: None,
    }.items():
        patch.setattr(torch.cuda, name, value)
    wrapped: dict[Any, Callable[..., Any]] = {}
    for kind in KINDS:
        function = getattr(dist, kind, None)
        if function is None:
            continue
        wrapped.setdefault(function, tape.wrapped(kind, function))
        for module in (dist, distributed_c10d):
            patch.setattr(module, kind, wrapped[function])
    for kind in ("send", "recv"):
        function = getattr(dist, kind)
        for module in (dist, distributed_c10d):
            patch.setattr(module, kind, tape.wrapped_between_two(kind, function))
    # Taken when they were imported.
    for name in ("all_gather", "_reduce_scatter"):
        patch.setattr(collectives, name, wrapped[getattr(collectives, name)])
    return tape


@contextmanager
def engines_on_streams(one_link: bool = False) -> Iterator[tuple[pytest.MonkeyPatch, Tape]]:
    """Within this, engines issue to streams as they do on a GPU, DeepSpeed's own too, and all of it is written down.
    With ``one_link`` the links take turns."""
    cuda = torch.device("cuda", 0)
    with pytest.MonkeyPatch.context() as patch:
        tape = record(patch)
        _record_deepspeed(patch, tape)
        # On a CPU lanes would be threads.
        patch.setattr("ds_fsmoe.layer.runtime.make_lanes", lambda *_: StreamLanes(device=cuda, one_link=one_link))
        patch.setattr("ds_fsmoe.gradients.reduction.make_background_lane", lambda _: BackgroundStreams(cuda))
        if one_link:
            stated = property(lambda _: "it is asked for", lambda *_: None)
            patch.setattr("ds_fsmoe.layer.runtime.LayerRuntime.one_link", stated, raising=False)
        yield patch, tape


def _record_deepspeed(patch: pytest.MonkeyPatch, tape: Tape) -> None:
    """DeepSpeed's own streams, too: on a CPU it would have none, and issue what it overlaps in one line."""

    class OfCurrent(Event):
        def record(self, stream: Stream | None = None) -> Event:
            return super().record(stream or tape.current)

    accelerator = type(get_accelerator())
    for name, value in {
        "Stream": property(lambda _: lambda *_, **__: tape.make_stream(torch.device("cuda", 0))),
        "Event": property(lambda _: OfCurrent),
        "stream": lambda _, stream: tape.on(stream),
        "current_stream": lambda *_: tape.current,
        "default_stream": lambda *_: tape.compute,
        "is_synchronized_device": lambda _: False,
        "resolves_data_dependency": lambda _: False,
        "synchronize": lambda *_: None,
    }.items():
        patch.setattr(accelerator, name, value)
    patch.setattr(torch.Tensor, "record_stream", lambda *_: None)
