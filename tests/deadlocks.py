# SPDX-License-Identifier: Apache-2.0
"""Can ranks wait for each other for ever? Every order in which devices may begin what they were given.

A *program* is what one rank has issued: collectives in the order of the host, each on a stream of its device, with what
the stream has to have waited for by then. On a device

- a stream begins a collective when the one before it on the stream is over, and all that it waits for;
- from then on it is resident, until all ranks of its communicator have it resident: then it is over on all of them;
- no more than ``slots`` collectives are resident at a time, and if so asked, no more than one of a communicator: two of
  them that begin in another order on another rank never meet;
- with ``implicit`` order none begins before those issued earlier have begun (NCCL_LAUNCH_ORDER_IMPLICIT).

Computation always ends, so nothing of it is left but the waits it passes on. A host that waits for its device takes
orders away and adds none, as every rank issues alike.

**One order is enough where nothing competes.** A collective that may begin never loses that right but for want of a
slot or of its communicator, and beginning or ending one can only give others the right to. So as long as neither is
contested it does not matter who begins first, and one run stands for all. Slots are contested only where a device has
more collectives left that no wait puts in an order than slots, a communicator where two of its own are left so, and
with ``implicit`` order nothing is: the next to begin is given. What all have resident ends, which takes nothing from
anybody. Where something is contested, every choice is tried.

**Implicit order and equal programs.** If all ranks issue alike, there is a numbering of all collectives of the job that
every host follows (:func:`common_order` finds it). Take the first one in it that is not over. On each of its ranks all
that was issued before it is over: it waits for nothing, the stream is free, and so is at least one slot, for of those
behind it none may begin before it has. So it begins everywhere, and ends: with implicit order one slot will do, for
any number of ranks.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class Collective:
    """One that a rank has issued."""

    stream: str
    group: str
    """Its communicator: by name, alike on all of its ranks."""
    ranks: tuple[int, ...]
    kind: str
    num_bytes: int | tuple[tuple[int, ...], tuple[int, ...]]
    """That it sends; or, to and from each rank of the group, where they are not alike."""
    dtype: str
    after: tuple[tuple[str, int], ...] = ()
    """(stream, how many of its collectives have to be over first), of other streams."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.kind} of {self.group}"


Program = tuple[Collective, ...]


def difference(programs: Sequence[Program]) -> str | None:
    """Where the ranks of a communicator do not issue alike: kinds, bytes or types; ``None``: nowhere."""
    issued: dict[tuple[str, tuple[int, ...]], dict[int, list[Collective]]] = defaultdict(dict)
    for rank, program in enumerate(programs):
        for each in program:
            issued[each.group, each.ranks].setdefault(rank, []).append(each)
    for (group, ranks), of_ranks in issued.items():
        if missing := set(ranks) - set(of_ranks):
            return f"{group}: rank {min(missing)} issues nothing"
        counts = {rank: len(each) for rank, each in of_ranks.items()}
        for at, calls in enumerate(zip(*(of_ranks[rank] for rank in ranks), strict=False)):
            if said := _unlike(calls):
                return f"{group}, call {at}: {said}"
        if len(set(counts.values())) > 1:
            return f"{group}: calls of each rank {counts}"
    return None


def _unlike(calls: Sequence[Collective]) -> str | None:
    first = calls[0]
    for each in calls[1:]:
        if (each.kind, each.dtype) != (first.kind, first.dtype):
            return f"{first.kind} of {first.dtype} and {each.kind} of {each.dtype}"
    if isinstance(first.num_bytes, int):
        sizes = sorted({str(each.num_bytes) for each in calls})
        return f"{' and '.join(sizes)} bytes" if len(sizes) > 1 else None
    for i, sender in enumerate(calls):
        for j, receiver in enumerate(calls):
            sent, received = sender.num_bytes[0][j], receiver.num_bytes[1][i]
            if sent != received:
                return f"{sent} bytes from {first.ranks[i]} to {first.ranks[j]}, where {received} are received"
    return None


def common_order(programs: Sequence[Program]) -> list[tuple[str, int]] | None:
    """All collectives as (communicator, call), in an order that every host follows; ``None`` if there is none."""
    of_ranks = [list(_calls(program)) for program in programs]
    behind: dict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
    ahead: dict[tuple[str, int], int] = {call: 0 for calls in of_ranks for call in calls}
    for calls in of_ranks:
        for one, other in itertools.pairwise(calls):
            if other not in behind[one]:
                behind[one].add(other)
                ahead[other] += 1
    found: list[tuple[str, int]] = []
    free = [call for call, count in ahead.items() if not count]
    while free:
        call = free.pop()
        found.append(call)
        for other in behind[call]:
            ahead[other] -= 1
            if not ahead[other]:
                free.append(other)
    return found if len(found) == len(ahead) else None


def _calls(program: Program) -> Iterator[tuple[str, int]]:
    counts: dict[str, int] = defaultdict(int)
    for each in program:
        name = f"{each.group} {each.ranks}"
        yield name, counts[name]
        counts[name] += 1


def waits_fit_the_order(program: Program) -> bool:
    """Whether each collective waits for earlier ones of its host only, as events make it."""
    issued: dict[str, int] = defaultdict(int)
    for each in program:
        if any(issued[stream] < count for stream, count in each.after):
            return False
        issued[each.stream] += 1
    return True


def with_a_host_that_waits(program: Program, waits_for: Callable[[Collective], bool]) -> Program:
    """The same, where nothing is begun while a collective that the host waits for is not over."""
    counts: dict[str, int] = defaultdict(int)
    over: dict[str, int] = {}
    found = []
    for each in program:
        own = dict(each.after)
        after = own | {name: max(count, own.get(name, 0)) for name, count in over.items() if name != each.stream}
        found.append(replace(each, after=tuple(sorted(after.items()))))
        counts[each.stream] += 1
        if waits_for(each):
            over[each.stream] = counts[each.stream]
    return tuple(found)


@dataclass(frozen=True)
class _Op:
    """A collective, as a search goes by it."""

    index: int
    """In the order of the host."""
    call: int
    """Number over all ranks: the same for what is one collective."""
    group: str
    """Its communicator."""
    stream: int
    after: tuple[tuple[int, int], ...]


def _unordered(
    streams: Sequence[Sequence[_Op]], size: int, are_meant: Callable[[_Op, _Op], bool] = lambda *_: True
) -> list[tuple[tuple[int, int], ...]]:
    """Sets of so many collectives of one rank, one a stream, that no wait puts in an order; of those that lie before
    another set in all streams, none. ``are_meant`` tells of two whether a set may have both."""
    over = _all_waits(streams)
    found = []
    for chosen in itertools.combinations(range(len(streams)), size):
        sets: list[tuple[int, ...]] = [()]
        for depth, stream in enumerate(chosen):
            sets = [
                (*places, place)
                for places in sets
                for place in range(len(streams[stream]))
                if all(
                    over[stream, place].get(other, 0) <= at
                    and over[other, at].get(stream, 0) <= place
                    and are_meant(streams[stream][place], streams[other][at])
                    for other, at in zip(chosen[:depth], places, strict=True)
                )
            ]
        last: list[tuple[int, ...]] = []
        for places in sorted(sets, reverse=True):
            if not any(all(a <= b for a, b in zip(places, other, strict=True)) for other in last):
                last.append(places)
        found += [tuple(zip(chosen, places, strict=True)) for places in last]
    return found


def _all_waits(streams: Sequence[Sequence[_Op]]) -> dict[tuple[int, int], dict[int, int]]:
    """(stream, place) -> how many of each stream are over before it begins, by waits of waits as well."""
    found: dict[tuple[int, int], dict[int, int]] = {}
    in_order = sorted((op.index, stream, at) for stream, ops in enumerate(streams) for at, op in enumerate(ops))
    for _, stream, at in in_order:
        over = dict(found.get((stream, at - 1), {}))
        for other, count in streams[stream][at].after:
            for each, number in {**found.get((other, count - 1), {}), other: count}.items():
                over[each] = max(number, over.get(each, 0))
        found[stream, at] = over
    return found


_Heads = tuple[int, ...]
State = tuple[tuple[_Heads, int], ...]
"""Of each rank: how many collectives of each stream are over, and which streams have one resident, as bits."""


class Devices:
    """All devices of a job with what they were given. ``one_of``: of communicators whose names begin so one collective
    is resident at a time."""

    def __init__(
        self, programs: Sequence[Program], slots: int, implicit: bool = False, one_of: str | None = None
    ) -> None:
        self._programs = programs
        self._one_of = one_of
        self._slots = slots
        self._implicit = implicit
        numbers: dict[tuple[str, int], int] = {}
        self._ranks_of: dict[int, tuple[int, ...]] = {}
        self._streams: list[list[list[_Op]]] = []
        """Rank -> stream -> its collectives."""
        self._unordered: list[list[tuple[tuple[int, int], ...]]] = []
        """Rank -> the last sets of (stream, place) that no wait puts in an order, and that are one more than fit or two
        of one communicator."""
        self._stream_of: list[dict[int, int]] = []
        """Rank -> call -> its stream."""
        for program in programs:
            names = {name: at for at, name in enumerate(dict.fromkeys(each.stream for each in program))}
            streams: list[list[_Op]] = [[] for _ in names]
            for index, (each, key) in enumerate(zip(program, _calls(program), strict=True)):
                call = numbers.setdefault(key, len(numbers))
                self._ranks_of[call] = each.ranks
                # A stream that never gets anything is over at once.
                after = tuple((names[stream], count) for stream, count in each.after if stream in names)
                streams[names[each.stream]].append(_Op(index, call, key[0], names[each.stream], after))
            self._streams.append(streams)
            contested = [] if implicit else _unordered(streams, slots + 1) + _unordered(streams, 2, self._are_apart)
            self._unordered.append(contested)
            self._stream_of.append({op.call: op.stream for each in streams for op in each})

    def _are_apart(self, one: _Op, other: _Op) -> bool:
        """Whether only one of the two may be resident."""
        return self._one_of is not None and one.group == other.group and one.group.startswith(self._one_of)

    @cached_property
    def start(self) -> State:
        """Nothing has begun."""
        return tuple(((0,) * len(streams), 0) for streams in self._streams)

    def is_over(self, state: State) -> bool:
        """Whether all is done."""
        return all(heads == tuple(map(len, streams)) for (heads, _), streams in zip(state, self._streams, strict=True))

    def resident(self, state: State) -> list[list[str]]:
        """Rank -> what is resident."""
        return [
            [self._programs[rank][streams[at][heads[at]].index].name for at in range(len(streams)) if mask >> at & 1]
            for rank, ((heads, mask), streams) in enumerate(zip(state, self._streams, strict=True))
        ]

    def _ready(self, rank: int, heads: _Heads, mask: int) -> list[_Op]:
        """What may begin on a rank that has a slot free."""
        if mask.bit_count() >= self._slots:
            return []
        found = []
        streams = self._streams[rank]
        resident = [ops[heads[at]] for at, ops in enumerate(streams) if mask >> at & 1]
        for at, ops in enumerate(streams):
            if heads[at] < len(ops) and not mask >> at & 1:
                op = ops[heads[at]]
                is_due = all(heads[other] >= count for other, count in op.after)
                is_due = is_due and not any(self._are_apart(op, other) for other in resident)
                if is_due and self._is_next(rank, op, heads, mask):
                    found.append(op)
        return found

    def _is_next(self, rank: int, op: _Op, heads: _Heads, mask: int) -> bool:
        if not self._implicit:
            return True
        begun = sum(heads) + mask.bit_count()
        return op.index == begun

    def _is_contested(self, rank: int, heads: _Heads) -> bool:
        """Whether it matters who begins first."""
        return any(all(heads[stream] <= at for stream, at in each) for each in self._unordered[rank])

    def _begin(self, state: list[tuple[_Heads, int]], rank: int, op: _Op) -> bool:
        """Let it begin; returns whether it has ended with that."""
        heads, mask = state[rank]
        state[rank] = heads, mask | 1 << op.stream
        ranks = self._ranks_of[op.call]
        if not all(self._has_begun(state, each, op.call) for each in ranks):
            return False
        for each in ranks:
            at = self._stream_of[each][op.call]
            heads, mask = state[each]
            state[each] = (*heads[:at], heads[at] + 1, *heads[at + 1 :]), mask & ~(1 << at)
        return True

    def _has_begun(self, state: Sequence[tuple[_Heads, int]], rank: int, call: int) -> bool:
        at = self._stream_of[rank].get(call)
        if at is None:
            return False
        heads, mask = state[rank]
        return bool(mask >> at & 1) and self._streams[rank][at][heads[at]].call == call

    def settle(self, state: State) -> State:
        """All that may begin without harm has begun."""
        now = list(state)
        waiting = set(range(len(now)))
        while waiting:
            rank = waiting.pop()
            ready = self._ready(rank, *now[rank])
            if ready and not self._is_contested(rank, now[rank][0]):
                ended = self._begin(now, rank, ready[0])
                waiting |= set(range(len(now))) if ended else {rank}
        return tuple(now)

    def choices(self, state: State) -> list[tuple[int, _Op]]:
        """What may begin next, where it matters."""
        return [(rank, op) for rank, (heads, mask) in enumerate(state) for op in self._ready(rank, heads, mask)]

    def after(self, state: State, choice: tuple[int, _Op]) -> State:
        """The state when it has begun, settled."""
        now = list(state)
        self._begin(now, *choice)
        return self.settle(tuple(now))


MOST_STATES = 200_000


def search(devices: Devices) -> list[list[str]] | None:
    """Try every order; raises RuntimeError where there are too many.

    Returns:
        Rank -> what is resident, in a state that nothing leads out of; ``None`` where no order gets stuck.
    """
    start = devices.settle(devices.start)
    seen, stack = {start}, [start]
    while stack:
        state = stack.pop()
        choices = devices.choices(state)
        if not choices and not devices.is_over(state):
            return devices.resident(state)
        for choice in choices:
            following = devices.after(state, choice)
            if following not in seen:
                seen.add(following)
                stack.append(following)
        if len(seen) > MOST_STATES:
            raise RuntimeError(f"more than {MOST_STATES} states")
    return None


def slots_needed(programs: Sequence[Program]) -> int:
    """How many collectives a device has to have room for where it may begin them in any order."""
    most = max(len({each.stream for each in program}) for program in programs)
    return next(slots for slots in range(1, max(most, 1) + 1) if search(Devices(programs, slots)) is None)


def with_all_slots(programs: Sequence[Program]) -> Devices:
    """Devices with a slot for each stream, where a communicator of ours has one collective at a time."""
    streams = max(len({each.stream for each in program}) for program in programs)
    return Devices(programs, streams, one_of="fsmoe_")


def assert_free(programs: Sequence[Program]) -> None:
    """Ranks issue alike, in an order that all have in common, and get stuck in no order that keeps that of issue."""
    assert difference(programs) is None
    assert common_order(programs) is not None
    assert all(map(waits_fit_the_order, programs))
    assert search(Devices(programs, 1, implicit=True)) is None
    # With a slot for each stream no slot is contested, and no communicator of ours: so this is a proof as well.
    assert search(with_all_slots(programs)) is None
