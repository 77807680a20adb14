# SPDX-License-Identifier: Apache-2.0
"""No layer can get stuck in the order of issue; what it needs without; and what a search finds where somebody errs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from ds_fsmoe.planning.decide.presets import NAMES
from ds_fsmoe.planning.schedule import GRAD
from tests.deadlocks import (
    Collective,
    Devices,
    Program,
    common_order,
    difference,
    search,
    search_at_random,
    slots_needed,
    waits_fit_the_order,
)
from tests.layers_as_programs import Layout, Way, deadlock_table, layouts, needs, programs, unlike, ways
from tests.samples import sampled

FOUR = Layout(4, 2, 2, 2)
"""EP between two nodes, ESP inside them."""
EIGHT = Layout(8, 4, 2, 4, "2dh")
ALL = layouts((2, 3, 4))
ONCE = [
    Layout(4, 4, 1, 2, "node_deduplicated"),
    Layout(8, 4, 1, 2, "node_deduplicated"),
    Layout(6, 6, 1, 2, "node_deduplicated"),
]
WINDOW = Way("paper", 3, True, (GRAD,))


# ---- layers


@sampled("layout", ALL, [ALL.index(each) for each in (FOUR, Layout(4, 4, 1, 2, "2dh"), Layout(3, 1, 1, 1))], ids=str)
def test_in_the_order_of_issue_no_layer_gets_stuck_and_two_slots_do_without_it(layout: Layout) -> None:
    asked = ways(3 if layout.world_size < 4 else 2)
    recorded = list(programs(layout, asked).values())
    for each in unlike(recorded):
        assert difference(each) is None
        assert common_order(each) is not None
        assert all(map(waits_fit_the_order, each))
    slots, is_free = needs(recorded)
    assert is_free
    assert slots <= 2


ON_ROWS = [*ALL, *ONCE]


@sampled("layout", ON_ROWS, [ON_ROWS.index(each) for each in (FOUR, Layout(4, 4, 1, 2, "2dh"), ONCE[-1])], ids=str)
def test_layers_on_rows_get_stuck_no_more_than_those_on_slots(layout: Layout) -> None:
    asked = [replace(each, in_rows=True) for each in ways(2) if each.degree == 2 and len(each.slices) < 2]
    recorded = list(programs(layout, asked).values())
    for each in unlike(recorded):
        assert difference(each) is None
        assert common_order(each) is not None
    slots, is_free = needs(recorded)
    assert is_free
    assert slots <= 2


@pytest.mark.slow
@pytest.mark.parametrize("layout", [each for each in ALL if each.world_size == 4], ids=str)
def test_four_ranks_and_three_chunks_are_no_different(layout: Layout) -> None:
    slots, is_free = needs(list(programs(layout, [each for each in ways(3) if each.degree == 3]).values()))
    assert is_free
    assert slots <= 2


@pytest.mark.parametrize("layout", [EIGHT, Layout(8, 2, 2, 4), Layout(8, 8, 1, 4, "2dh")], ids=str)
def test_eight_ranks_have_one_order_in_common_and_get_stuck_in_none(layout: Layout) -> None:
    for each in programs(layout, [WINDOW, Way("reduce_first", 3, True, (GRAD,))]).values():
        assert difference(each) is None
        assert common_order(each) is not None
        assert search(Devices(each, 1, implicit=True)).is_free
        assert search(Devices(each, 2)).is_free
        assert search_at_random(Devices(each, 1, implicit=True), range(3)).stuck is None


@sampled("layout", ALL, [ALL.index(FOUR)], ids=str)
def test_links_that_take_turns_need_one_slot_in_any_order(layout: Layout) -> None:
    assert needs(list(programs(layout, ways(2), one_link=True).values())) == (1, True)


def test_a_link_of_its_own_for_gradients_needs_a_second_slot_even_where_tokens_are_in_one_stream() -> None:
    """Tokens inside a node, gradients between nodes: ``shared`` has two streams all the same."""
    within = Layout(4, 2, 1, 2)
    (recorded,) = programs(within, [Way("shared", 2, True, (GRAD,))]).values()
    assert slots_needed(recorded) == 2
    (turns,) = programs(within, [Way("shared", 2, True, (GRAD,))], one_link=True).values()
    assert slots_needed(turns) == 1


def test_the_table_says_what_each_preset_needs() -> None:
    rows = [line.split() for line in deadlock_table((2,), 1).splitlines()]
    assert [row[0] for row in rows[1:]] == list(NAMES)
    assert {row[2] for row in rows[1:]} == {"free"}
    assert {row[1] for row in rows[1:]} <= {"1", "2"}


def test_two_links_get_stuck_with_one_slot() -> None:
    (recorded,) = programs(FOUR, [Way("paper", 3, False)]).values()
    found = search(Devices(recorded, 1))
    assert found.stuck is not None
    assert all(len(each) == 1 for each in found.stuck), "each has begun one, and waits for another's"
    assert search_at_random(Devices(recorded, 1), range(200)).stuck is not None


# ---- what is found where somebody errs


@pytest.fixture(scope="module")
def recorded() -> tuple[Program, ...]:
    """A backward with gradients on four ranks."""
    (found,) = programs(FOUR, [WINDOW]).values()
    return found


def changed(recorded: Sequence[Program], rank: int, change: Callable[[list[Collective]], None]) -> list[Program]:
    programs = [list(each) for each in recorded]
    change(programs[rank])
    return [tuple(each) for each in programs]


def test_swapped_collectives_are_named(recorded: tuple[Program, ...]) -> None:
    def swap(program: list[Collective]) -> None:
        kinds = [each.kind for each in program]
        group = program[kinds.index("all_to_all_single")].group
        for at, each in enumerate(program):  # two of one communicator with unlike sizes
            for other in range(at):
                if program[other].group == each.group and program[other].num_bytes != each.num_bytes:
                    program[at], program[other] = program[other], program[at]
                    return
        pytest.fail(f"all of {group} are alike")

    assert difference(recorded) is None
    assert "bytes" in difference(changed(recorded, 1, swap))


def test_swapped_communicators_get_stuck_even_in_the_order_of_issue(recorded: tuple[Program, ...]) -> None:
    """Each communicator sees what it should, and still no order of all is kept."""

    def swap(program: list[Collective]) -> None:
        dp = next(at for at, each in enumerate(program) if "gradients" in each.group)
        esp = min((at for at, each in enumerate(program) if "esp" in each.group), key=lambda at: abs(at - dp))
        program[esp], program[dp] = replace(program[dp], after=()), replace(program[esp], after=())

    swapped = changed(recorded, 1, swap)
    assert difference(swapped) is None
    assert common_order(swapped) is None
    assert search(Devices(swapped, 1, implicit=True)).stuck is not None


@pytest.mark.parametrize("other", [Way("reduce_first", 3, False), Way("paper", 2, False)], ids=str)
def test_a_rank_that_runs_another_plan_is_named(other: Way) -> None:
    own, others = programs(FOUR, [Way("paper", 3, False), other]).values()
    assert difference([own[0], others[1], *own[2:]]) is not None


def test_another_number_of_bytes_is_named(recorded: tuple[Program, ...]) -> None:
    def add(program: list[Collective]) -> None:
        program[2] = replace(program[2], num_bytes=program[2].num_bytes + 4)

    assert f"{recorded[0][2].num_bytes} and {recorded[0][2].num_bytes + 4} bytes" in difference(
        changed(recorded, 0, add)
    )


def test_another_type_and_a_missing_call_are_named(recorded: tuple[Program, ...]) -> None:
    def retype(program: list[Collective]) -> None:
        program[0] = replace(program[0], dtype="bfloat16")

    assert "float32" in difference(changed(recorded, 3, retype))
    assert "calls of each rank" in difference(changed(recorded, 3, lambda program: program.pop() and None))


def test_uneven_pieces_are_compared_pair_by_pair() -> None:
    pieces = Collective("link 0", "a2a", (0, 1), "all_to_all_single", ((0, 8), (0, 12)), "float32")
    programs = [(pieces,), (replace(pieces, num_bytes=((12, 0), (8, 0))),)]
    assert difference(programs) is None
    wrong = [(pieces,), (replace(pieces, num_bytes=((12, 0), (16, 0))),)]
    assert difference(wrong) == "a2a, call 0: 8 bytes from 0 to 1, where 16 are received"


def test_a_dropped_wait_that_closes_a_cycle_gets_stuck() -> None:
    """Two communicators on two streams, ordered by an event on both ranks; one of them has lost it."""
    first = Collective("link 0", "a", (0, 1), "all_reduce", 4, "float32")
    second = replace(first, stream="link 1", group="b", after=(("link 0", 1),))
    assert slots_needed([(first, second)] * 2) == 1
    assert search(Devices([(first, second), (first, replace(second, after=()))], 1)).stuck == [
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


def test_two_of_a_communicator_that_no_wait_puts_in_an_order_get_stuck() -> None:
    first = Collective("link 0", "a", (0, 1), "all_reduce", 4, "float32")
    ordered = first, replace(first, stream="link 1", after=(("link 0", 1),))
    loose = first, replace(first, stream="link 1")
    assert search(Devices([ordered, ordered], 2, one_of="a")).is_free
    assert search(Devices([ordered, loose], 2)).is_free, "where communicators do not count, nothing is seen"
    assert search(Devices([ordered, loose], 2, one_of="a")).stuck is not None
