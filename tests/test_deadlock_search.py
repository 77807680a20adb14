# SPDX-License-Identifier: Apache-2.0
"""The search for orders in which ranks get stuck leaves out none; and what it finds where somebody errs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from ds_fsmoe.planning.schedule import GRAD
from tests.deadlocks import Collective, Devices, Program, common_order, difference, search, slots_needed
from tests.layers_as_programs import Layout, Way, programs

FOUR = Layout(4, 2, 2, 2)
"""EP between two nodes, ESP inside them."""
FIRST = Collective("link 0", "a", (0, 1), "all_reduce", 4, "float32")

# ---- what is found where somebody errs


@pytest.fixture(scope="module")
def recorded() -> tuple[Program, ...]:
    """A backward with gradients on four ranks."""
    (found,) = programs(FOUR, [Way("paper", 3, True, (GRAD,))]).values()
    return found


def swap_two_of_a_communicator(program: list[Collective]) -> None:
    """Two whose sizes differ."""
    pairs = [
        (at, other)
        for at, each in enumerate(program)
        for other in range(at)
        if program[other].group == each.group and program[other].num_bytes != each.num_bytes
    ]
    at, other = pairs[0]
    program[at], program[other] = program[other], program[at]


def send_more(program: list[Collective]) -> None:
    program[2] = replace(program[2], num_bytes=program[2].num_bytes + 4)


def send_another_type(program: list[Collective]) -> None:
    program[0] = replace(program[0], dtype="bfloat16")


def run_another_plan(program: list[Collective]) -> None:
    program[:] = programs(FOUR, [Way("reduce_first", 3, True, (GRAD,))]).popitem()[1][1]


WRONG = [
    (swap_two_of_a_communicator, "bytes"),
    (send_more, "bytes"),
    (send_another_type, "float32"),
    (list.pop, "calls of each rank"),
    (run_another_plan, ""),
]


@pytest.mark.parametrize(("change", "said"), WRONG, ids=lambda each: getattr(each, "__name__", each))
def test_a_rank_that_issues_something_else_is_named(
    recorded: tuple[Program, ...], change: Callable[[list[Collective]], object], said: str
) -> None:
    assert difference(recorded) is None
    changed = list(recorded[1])
    change(changed)
    assert said in (difference([recorded[0], tuple(changed), *recorded[2:]]) or "nothing")
    assert tuple(changed) != recorded[1]


def test_swapped_communicators_get_stuck_even_in_the_order_of_issue(recorded: tuple[Program, ...]) -> None:
    """Each communicator sees what it should, and still no order of all is kept."""
    program = list(recorded[1])
    dp = next(at for at, each in enumerate(program) if "gradients" in each.group)
    esp = min((at for at, each in enumerate(program) if "esp" in each.group), key=lambda at: abs(at - dp))
    program[esp], program[dp] = replace(program[dp], after=()), replace(program[esp], after=())
    swapped = [recorded[0], tuple(program), *recorded[2:]]
    assert difference(swapped) is None
    assert common_order(swapped) is None
    assert search(Devices(swapped, 1, implicit=True)).stuck is not None


def test_uneven_pieces_are_compared_pair_by_pair() -> None:
    pieces = replace(FIRST, kind="all_to_all_single", num_bytes=((0, 8), (0, 12)))
    assert difference([(pieces,), (replace(pieces, num_bytes=((12, 0), (8, 0))),)]) is None
    wrong = [(pieces,), (replace(pieces, num_bytes=((12, 0), (16, 0))),)]
    assert difference(wrong) == "a, call 0: 8 bytes from 0 to 1, where 16 are received"


def test_a_dropped_wait_that_closes_a_cycle_gets_stuck() -> None:
    """Two communicators on two streams, ordered by an event on both ranks; one of them has lost it."""
    second = replace(FIRST, stream="link 1", group="b", after=(("link 0", 1),))
    assert slots_needed([(FIRST, second)] * 2) == 1
    assert search(Devices([(FIRST, second), (FIRST, replace(second, after=()))], 1)).stuck == [
        ["all_reduce of a"],
        ["all_reduce of b"],
    ]


def test_a_dropped_wait_of_a_real_layer_gets_stuck_where_it_was_in_order() -> None:
    """Links that take turns by events alone: without those of one rank, it begins with what the others come to last."""
    (layer,) = programs(FOUR, [Way("shared", 2, False)], one_link=True).values()
    on_two = [_with_streams_per_kind(each) for each in layer]
    assert slots_needed(on_two) == 1
    dropped = [tuple(replace(each, after=()) for each in on_two[0]), *on_two[1:]]
    assert search(Devices(dropped, 1)).stuck is not None


def _with_streams_per_kind(program: Program) -> Program:
    """The same, in which a communicator has a stream and waits for all before it."""
    counts: dict[str, int] = {}
    found = []
    for each in program:
        after = tuple((stream, count) for stream, count in counts.items() if stream != each.group)
        found.append(replace(each, stream=each.group, after=after))
        counts[each.group] = counts.get(each.group, 0) + 1
    return tuple(found)


def test_two_of_a_communicator_that_no_wait_puts_in_an_order_get_stuck() -> None:
    ordered = FIRST, replace(FIRST, stream="link 1", after=(("link 0", 1),))
    loose = FIRST, replace(FIRST, stream="link 1")
    assert search(Devices([ordered, ordered], 2, one_of="a")).is_free
    assert search(Devices([ordered, loose], 2)).is_free, "where communicators do not count, nothing is seen"
    assert search(Devices([ordered, loose], 2, one_of="a")).stuck is not None


# ---- the search itself


def random_programs(seed: int) -> list[Program]:
    """Three ranks, three streams, random communicators and waits for what was issued before; often not alike."""
    draw = random.Random(seed)
    groups = [(0, 1), (1, 2), (0, 2), (0, 1, 2)]
    calls = [(draw.choice(groups), f"s{draw.randrange(3)}", draw.random()) for _ in range(draw.randrange(2, 6))]
    found: list[Program] = []
    for rank in range(3):
        issued: dict[str, int] = {}
        program: list[Collective] = []
        own = [each for each in calls if rank in each[0]]
        if draw.random() < 0.3:
            draw.shuffle(own)
        for ranks, stream, chance in own:
            waits = [(s, n) for s, n in issued.items() if s != stream and chance < 0.5]
            # A third of the programs use a communicator on several streams.
            name = f"{stream} {ranks}" if seed % 3 else f"{ranks}"
            program.append(Collective(stream, name, ranks, "all_reduce", 4, "float32", tuple(waits)))
            issued[stream] = issued.get(stream, 0) + 1
        found.append(tuple(program))
    return found


def gets_stuck(programs: Sequence[Program], slots: int, implicit: bool, one_of: str | None) -> bool:
    """By hand: every order, ends of collectives as choices of their own, and nothing left out."""
    numbered = []
    for program in programs:
        groups = [each.group for each in program]
        numbered.append([groups[:at].count(group) for at, group in enumerate(groups)])
    start = tuple((frozenset(), frozenset()) for _ in programs)
    seen, stack = {start}, [start]
    while stack:
        state = stack.pop()
        following = []
        for rank, (over, resident) in enumerate(state):
            program = programs[rank]
            for at, each in enumerate(program):
                if at in over or at in resident:
                    continue
                if len(resident) == slots or (implicit and at != len(over) + len(resident)):
                    continue
                if one_of is not None and any(program[other].group == each.group for other in resident):
                    continue
                streams: dict[str, list[int]] = {}
                for index, other in enumerate(program):
                    streams.setdefault(other.stream, []).append(index)
                before = streams[each.stream][: streams[each.stream].index(at)]
                waits = [index for stream, count in each.after for index in streams[stream][:count]]
                if all(index in over for index in (*before, *waits)):
                    new = list(state)
                    new[rank] = over, resident | {at}
                    following.append(tuple(new))
            for at in resident:
                key = program[at].group, numbered[rank][at]
                held = [
                    next((i for i in state[r][1] if (programs[r][i].group, numbered[r][i]) == key), None)
                    for r in program[at].ranks
                ]
                if None not in held:
                    new = list(state)
                    for r, index in zip(program[at].ranks, held, strict=True):
                        new[r] = new[r][0] | {index}, new[r][1] - {index}
                    following.append(tuple(new))
        if not following and any(len(over) < len(p) for (over, _), p in zip(state, programs, strict=True)):
            return True
        for each in following:
            if each not in seen:
                seen.add(each)
                stack.append(each)
    return False


@pytest.mark.parametrize("one_of", [None, ""])
@pytest.mark.parametrize("implicit", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_what_the_search_leaves_out_changes_nothing(slots: int, implicit: bool, one_of: str | None) -> None:
    outcomes = set()
    for seed in range(60):
        found = random_programs(seed)
        expected = gets_stuck(found, slots, implicit, one_of)
        assert (search(Devices(found, slots, implicit, one_of)).stuck is not None) == expected, seed
        outcomes.add(expected)
    assert outcomes == {False, True}
