# SPDX-License-Identifier: Apache-2.0
"""The device: streams with vector clocks, memory that knows who uses it, and the rules that both have to keep.

A stream's clock says, for each stream, up to which of its operations everything is done before the stream's next one.
An event is a clock that was copied. An operation X is ordered before what a stream does next if the stream's clock has
reached X; otherwise the device may do the two in either order, or at once, whatever the host did first.

The rules:

1. a read comes after the last writes, a write after all uses of the same bytes (of a tensor with gaps, from its first
   byte to its last);
2. memory that was freed goes to the next one who asks on the stream it was made on, of whatever size; all uses of it
   elsewhere have to be ordered before that;
3. memory is read only when it was written (it is filled with NaN, which shows in the results);
4. within a run of lanes the host does not wait for the device;
5. a stream, the tensors used on it and the device of the rank are one device, and that was set before anything.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True)
class Breach:
    """A rule that was broken."""

    rule: str
    """"order" (1), "reuse" (2), "wait" (4) or "device" (5)."""
    what: str
    """Was done."""
    stream: str
    """On which."""
    memory: str = ""
    """Where the memory was made, if it is about memory."""
    others: tuple[str, ...] = ()
    """The operations that it is not ordered after."""

    def __str__(self) -> str:
        against = f", not ordered after {'; '.join(self.others)}" if self.others else ""
        memory = f", in memory of {self.memory}" if self.memory else ""
        return f"[{self.rule}] {self.what} on {self.stream}{memory}{against}"


@dataclass(frozen=True, slots=True)
class Operation:
    """What was issued to a stream as its ``number``-th."""

    stream: Stream
    number: int
    what: str

    def __str__(self) -> str:
        return f"{self.stream.name}: {self.what}"


def _merge(clock: dict[Stream, int], seen: dict[Stream, int]) -> None:
    for stream, number in seen.items():
        clock[stream] = max(clock.get(stream, 0), number)


class Stream:
    """Stands for ``torch.cuda.Stream``."""

    def __init__(self, gpu: Gpu, index: int, name: str) -> None:
        self.gpu, self.device_index, self.name = gpu, index, name
        self.device = torch.device("cuda", index)
        self.cuda_stream = id(self)
        self.clock: dict[Stream, int] = {}
        self.freed: list[Block] = []
        """Memory that was made here, and is free."""

    def has_seen(self, operation: Operation) -> bool:
        """Whether that one is done before this stream's next."""
        return operation.stream is self or self.known().get(operation.stream, 0) >= operation.number

    def known(self) -> dict[Stream, int]:
        """What is done before this stream's next, after what it and the host have waited for."""
        known = dict(self.clock)
        _merge(known, self.gpu.host_clock)
        return known

    def see(self, clock: dict[Stream, int]) -> None:
        """Order the next operation after all that a clock has seen."""
        _merge(self.clock, clock)

    def wait_event(self, event: Event) -> None:
        assert event.clock is not None, "waits for an event that was never recorded"
        known = self.known()
        if all(known.get(stream, 0) >= number for stream, number in event.clock.items()):
            return  # it orders nothing that was not in order
        self.gpu.num_waits += 1
        if self.gpu.obeys_wait():
            self.see(event.clock)

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.gpu)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.gpu.host_waits(f"synchronize {self.name}", self)

    def query(self) -> bool:
        return True


class Event:
    """Stands for ``torch.cuda.Event``."""

    def __init__(self, gpu: Gpu, **_: Any) -> None:
        self.gpu = gpu
        self.clock: dict[Stream, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.gpu.current
        self.clock = {**stream.clock}
        self.time = self.gpu.num_operations

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.gpu.current).wait_event(self)

    def synchronize(self) -> None:
        assert self.clock is not None
        self.gpu.host_waits("synchronize an event", self.clock)

    def query(self) -> bool:
        """Whether the host knows that it has come: the device is as late as can be."""
        return self.clock is None or all(self.gpu.host_clock.get(each, 0) >= at for each, at in self.clock.items())

    def elapsed_time(self, end: Event) -> float:
        return float(end.time - self.time)


class Extent(NamedTuple):
    """Bytes [first, stop) of a storage."""

    address: int
    """Of the storage."""
    first: int
    stop: int

    def meets(self, other: Extent) -> bool:
        """Whether two have a byte in common."""
        return self.address == other.address and self.first < other.stop and other.first < self.stop

    def is_within(self, other: Extent) -> bool:
        """Whether the other one has all bytes of this one."""
        return self.address == other.address and other.first <= self.first and self.stop <= other.stop


def extent_of(tensor: torch.Tensor) -> Extent:
    """From the first byte of a tensor to its last; none of an empty one."""
    first, size = tensor.storage_offset() * tensor.element_size(), tensor.element_size()
    reach = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    stop = first + reach * size if tensor.numel() else first
    return Extent(tensor.untyped_storage()._cdata, first, stop)


class Use(NamedTuple):
    """What an operation has used."""

    operation: Operation
    extent: Extent


@dataclass(eq=False)
class Block:
    """Memory of one storage."""

    home: Stream
    """The stream that was current when it was made: the allocator knows no other."""
    born: str
    num_bytes: int
    uses: list[Use] = field(default_factory=list)
    writes: list[Use] = field(default_factory=list)
    recorded: set[Stream] = field(default_factory=set)
    """Streams that ``record_stream`` has named: what they were given by the time of the free is waited for."""


class Gpu:
    """The device of one rank.

    Args:
        index: which device of the machine is this rank's: what ``set_device`` has to be called with.
        is_set: whether it was called already.
    """

    def __init__(self, index: int = 0, is_set: bool = True) -> None:
        self.index = index
        self.is_set = is_set
        self.chosen = index if is_set else 0
        """The current device, as CUDA has it: 0 until somebody says otherwise."""
        self.task = "the program"
        """What is under way, for messages."""
        self.is_in_run = False
        """Whether lanes are between their first and their last task."""
        self.breaches: list[Breach] = []
        self.num_operations = 0
        self.num_waits = 0
        """How many waits have put something in order."""
        self.keeps_order = False
        self.order: list[tuple[Any, ...]] = []
        """If it is to be kept: every operation, with what it was ordered after."""
        self.dropped_wait: int | None = None
        """A mutation: the wait of that number, from 1 on, is not obeyed."""
        self.host_clock: dict[Stream, int] = {}
        """What the host knows to be done. All it issues from then on comes after it."""
        self._streams: list[Stream] = []
        self.blocks: dict[int, Block] = {}
        """Of each storage on the device, by its address."""
        self.default = self.current = self._stream("compute")
        self._of_groups: dict[Any, Stream] = {}

    def obeys_wait(self) -> bool:
        """Whether the wait that was counted last is to be obeyed."""
        return self.num_waits != self.dropped_wait

    def _stream(self, name: str) -> Stream:
        self._streams.append(Stream(self, self.chosen, name))
        return self._streams[-1]

    def make_stream(self, device: torch.device | int | None = None, priority: int = 0, **_: Any) -> Stream:
        """``torch.cuda.Stream(...)``."""
        index = device.index if isinstance(device, torch.device) else device
        self.touch("make a stream", self.chosen if index is None else index)
        return self._stream(f"stream {len(self._streams)}")

    def stream_of_group(self, group: Any) -> Stream:
        """Where a process group does what is asked for with ``async_op=True``."""
        if group not in self._of_groups:
            self._of_groups[group] = self._stream(f"stream of group {len(self._of_groups)}")
        return self._of_groups[group]

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """``torch.cuda.stream(...)``."""
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def touch(self, what: str, index: int | None = None) -> None:
        """Somebody uses the device: it has to be this rank's, and chosen (rule 5)."""
        index = self.chosen if index is None else index
        if not self.is_set or index != self.index:
            state = "" if self.is_set else ", and none was chosen"
            self._break("device", f"{what} on device {index} of a rank whose device is {self.index}{state}")

    def host_waits(self, what: str, of: Stream | dict[Stream, int] | None = None) -> None:
        """The host waits for the device (rule 4): for a stream, an event's clock, or all there is."""
        if self.is_in_run:
            self._break("wait", f"{self.task} {what}")
        streams = [of] if isinstance(of, Stream) else [] if of is not None else self._streams
        for clock in (stream.clock for stream in streams):
            _merge(self.host_clock, clock)
        if isinstance(of, dict):
            _merge(self.host_clock, of)

    def allocate(self, storage: torch.UntypedStorage) -> None:
        """A storage was made on the current stream (rule 2). One of no bytes is on the device, and takes no memory."""
        home = self.current
        self.blocks[storage._cdata] = Block(home, f"{home.name}: {self.task}", storage.nbytes())
        weakref.finalize(storage, self._free, storage._cdata).atexit = False
        if not storage.nbytes():
            return
        for block in home.freed:
            used = {use.operation for use in block.uses}
            unseen = [each for each in used if each.stream not in block.recorded and not home.has_seen(each)]
            if unseen:
                self._break("reuse", self.task, block, unseen)
        home.freed.clear()

    def _free(self, address: int) -> None:
        block = self.blocks.pop(address, None)
        if block is not None and block.num_bytes:
            block.home.freed.append(block)

    def do(self, what: str, read: Iterable[Extent], written: Iterable[Extent], stream: Stream | None = None) -> None:
        """An operation on memory (rule 1)."""
        stream = stream or self.current
        self.touch(what, stream.device_index)
        self.num_operations += 1
        number = stream.clock[stream] = stream.clock.get(stream, 0) + 1
        operation = Operation(stream, number, f"{self.task} {what}")
        if self.keeps_order:
            seen = sorted((each.name, count) for each, count in stream.known().items())
            self.order.append((stream.name, operation.what, *seen))
        written = set(written)
        for extent in {*read, *written}:
            block = self.blocks.get(extent.address)
            if block is None or extent.first == extent.stop:
                continue
            is_written = extent in written
            before = [use.operation for use in (block.uses if is_written else block.writes) if use.extent.meets(extent)]
            # An operation reads what it writes, and is done with it by then.
            unseen = [each for each in before if each is not operation and not stream.has_seen(each)]
            if unseen:
                self._break("order", operation.what, block, unseen, stream)
            use = Use(operation, extent)
            block.uses = [each for each in block.uses if not self._covers(use, each)] + [use]
            if is_written:
                block.writes = [each for each in block.writes if not each.extent.is_within(extent)] + [use]

    @staticmethod
    def _covers(later: Use, earlier: Use) -> bool:
        """Whether whoever has to see the earlier one has to see the later one, and has seen both then."""
        return earlier.extent.is_within(later.extent) and later.operation.stream.has_seen(earlier.operation)

    def _break(
        self,
        rule: str,
        what: str,
        block: Block | None = None,
        unseen: Iterable[Operation] = (),
        stream: Stream | None = None,
    ) -> None:
        others = tuple(sorted({str(each) for each in unseen}))
        born = "" if block is None else block.born
        self.breaches.append(Breach(rule, what, (stream or self.current).name, born, others))
