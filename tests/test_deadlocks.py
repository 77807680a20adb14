# SPDX-License-Identifier: Apache-2.0
"""Layers and engines get stuck in no order in which devices may begin what was issued; what they need without one; and
the search for such orders leaves out none.

Layers are run rank by rank (``tests/layers_as_programs.py``), engines on real ranks (``tests/engine_jobs.py``). A send
is over when its receive has begun, and no earlier. It is looked at in two ways: in a stream of each pair of ranks
beside the lanes, as NCCL has it; and with a host that does nothing else until it is over, as with gloo, to which no
sharing of streams can add a wait.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from ds_fsmoe.planning.decide.presets import NAMES
from ds_fsmoe.planning.schedule import GRAD
from tests.deadlocks import (
    Collective,
    Devices,
    Program,
    assert_free,
    common_order,
    difference,
    search,
    slots_needed,
    waits_fit_the_order,
    with_a_host_that_waits,
    with_all_slots,
)
from tests.engine_jobs import (
    BATCHES,
    CUT,
    FOUR_LAYERS,
    GPT,
    MODELS,
    OVERLAP,
    SHARDED,
    STEPS,
    TAIL,
    Batches,
    Job,
    OfModel,
    Step,
    recorded,
)
from tests.gradient_cases import Run
from tests.layers_as_programs import Layout, Way, deadlock_table, layouts, needs, programs, unlike, ways
from tests.ranks import run_on_ranks
from tests.recorded_collectives import COMPUTE
from tests.samples import sampled

# ---- layers

FOUR = Layout(4, 2, 2, 2)
"""EP between two nodes, ESP inside them."""
EIGHT = [Layout(8, 4, 2, 4, "2dh"), Layout(8, 2, 2, 4), Layout(8, 8, 1, 4, "2dh")]
ALL = layouts((2, 3, 4))
ONCE = [Layout(*sizes, 2, "node_deduplicated") for sizes in ((4, 4, 1), (8, 4, 1), (6, 6, 1))]
"""Which takes rows alone. What 1dh sends depends on what has come: real ranks alone tell, in :data:`STEPS`."""
HOW = ("slots", "rows", "three chunks", "turns")
"""What travels, and whether links take turns."""
LAYERS = [(layout, how) for layout in ALL for how in HOW if how != "three chunks" or layout.world_size == 4]
LAYERS += [*((layout, "rows") for layout in ONCE), *((layout, "gradients") for layout in EIGHT)]
KEPT = [(FOUR, "slots"), (ONCE[0], "rows"), (FOUR, "turns"), (EIGHT[0], "gradients")]


def ways_of(layout: Layout, how: str) -> list[Way]:
    if how == "rows":
        return [replace(each, in_rows=True) for each in ways(2) if each.degree == 2 and len(each.slices) < 2]
    if how == "three chunks":
        return [each for each in ways(3) if each.degree == 3]
    if how == "gradients":
        return [Way(links, 3, True, (GRAD,)) for links in ("paper", "reduce_first")]
    return ways(2 if layout.world_size == 4 or how == "turns" else 3)


@sampled(("layout", "how"), LAYERS, [LAYERS.index(each) for each in KEPT], drawn=2, ids=str)
def test_no_layer_gets_stuck_in_the_order_of_issue_and_two_slots_do_without_it(layout: Layout, how: str) -> None:
    found = list(programs(layout, ways_of(layout, how), one_link=how == "turns").values())
    for each in unlike(found):
        assert difference(each) is None
        assert common_order(each) is not None
        assert all(map(waits_fit_the_order, each))
    slots, is_free = needs(found)
    assert is_free
    assert slots <= (1 if how == "turns" else 2)


def test_a_link_of_its_own_for_gradients_needs_a_second_slot_even_where_tokens_are_in_one_stream() -> None:
    """Tokens inside a node, gradients between nodes: ``shared`` has two streams all the same."""
    within, way = Layout(4, 2, 1, 2), Way("shared", 2, True, (GRAD,))
    assert [slots_needed(programs(within, [way], one_link)[way]) for one_link in (False, True)] == [2, 1]


def test_the_table_says_what_each_preset_needs() -> None:
    rows = [line.split() for line in deadlock_table((2,), 1).splitlines()]
    assert [row[0] for row in rows[1:]] == list(NAMES)
    assert {row[2] for row in rows[1:]} == {"free"}
    assert {row[1] for row in rows[1:]} <= {"1", "2"}


# ---- engines


def is_send(each: Collective) -> bool:
    return each.kind.startswith("send")


def sends_that_block(program: Program) -> Program:
    """The host waits for what it has not given to a lane."""
    return with_a_host_that_waits(program, lambda each: is_send(each) or each.stream == COMPUTE)


def check(job: Job, parts: list[tuple[Program, ...]]) -> None:
    """No part of a job gets stuck; batches through stages in neither way of sends."""
    for each in parts:
        assert_free(each)
    if isinstance(job, Batches):
        assert len(parts) == 1 + job.count
        for each in parts:
            assert_free(tuple(map(sends_that_block, each)))
        # Each micro batch goes from stage to stage and comes back, from each of its ranks.
        per_stage = len(parts[-1]) // job.num_stages
        between = sum(is_send(each) for program in parts[-1] for each in program) // 2
        assert between == 2 * job.accumulation * (job.num_stages - 1) * per_stage
        lengths = [len(each[-1]) for each in parts]
        assert (max(lengths) > 10 * lengths[-1]) == (job.how == "tuned")
    if isinstance(job, Step) and job.one_link:
        # Where DeepSpeed reduces, in a stream of its own, links that take turns are not enough: a warning says so.
        assert slots_needed(parts[0]) == (2 if job.run.mode == "off" else 1)


ON_LINKS = {COMPUTE, "link 0", "link 1"}


def test_engines_get_stuck_in_no_order_that_keeps_that_of_issue(tmp_path: Path) -> None:
    """Two links, a layer that one rank skips, experts that move, parameters that one rank reads."""
    two_links = Step(Run(0, block=SHARDED, features=GPT))
    stage_2 = Step(Run(2, block=CUT, config=OVERLAP, features=frozenset({"skips"})), count=4)
    moving = next(each for each in STEPS if each.moves)
    jobs = two_links, stage_2, moving, TAIL
    *found, [taken_out] = recorded(tmp_path, *jobs, replace(TAIL, ends_gathers=False))
    for job, parts in zip(jobs, found, strict=True):
        check(job, parts)
    [links], [of_zero], *_ = found
    # Without an order both get stuck if one fits.
    assert slots_needed(links) == slots_needed(of_zero) == 2
    beside = {each.stream for each in of_zero[0]} - ON_LINKS
    assert len(beside) == 2, "between layers, gradients and updated parameters have the same two streams"
    # Without a wait of those who have not read, each communicator still sees the same calls, and the ranks get stuck.
    assert difference(taken_out) is None
    stuck = search(with_all_slots(taken_out))
    assert stuck is not None
    assert any("fsmoe_gradients" in name for names in stuck for name in names)


@pytest.mark.long
def test_batches_leave_while_gradients_are_under_way_and_all_ranks_meet_between_them_only(tmp_path: Path) -> None:
    job = Batches(FOUR_LAYERS, 4)
    [parts] = recorded(tmp_path, job)
    check(job, parts)
    last = parts[-1]
    assert {"link 0", COMPUTE} < {each.stream for each in last[2]}
    of_gradients = [at for at, each in enumerate(last[2]) if "gradients" in each.group]
    last_send = max(at for at, each in enumerate(last[2]) if is_send(each))
    assert sum(at < last_send for at in of_gradients) > 1, "gradients are under way before the last micro batch is back"
    # A stage of two ranks has one link; sends wait for what is on it, and it waits for them.
    assert slots_needed(last) == 1
    check_that_all_ranks_meet_between_batches_only(last)


def check_that_all_ranks_meet_between_batches_only(last: Sequence[Program]) -> None:
    """A stage begins its third forward when the next one has its second input, and hands the third on after it: what
    all ranks did in it would get stuck, though each communicator sees what it should."""

    def with_all_at(program: Program, at: int) -> Program:
        counts = {name: sum(each.stream == name for each in program[:at]) for name in {x.stream for x in program[:at]}}
        of_all = Collective(COMPUTE, "all", (0, 1, 2, 3), "all_reduce", 8, "float64", tuple(sorted(counts.items())))
        return (*program[:at], of_all, *program[at:])

    def is_stuck(programs: Sequence[Program]) -> bool:
        assert difference(programs) is None
        found = search(Devices(tuple(map(sends_that_block, programs)), 1, implicit=True)) is not None
        assert found == (common_order(programs) is None)
        return found

    kinds = [[each.kind for each in program] for program in last]
    third = []
    for rank, of_rank in enumerate(kinds):
        name = f"send from {rank % 2} to {rank % 2 + 2}"
        third.append([at for at, kind in enumerate(of_rank) if kind == name][2])
    # The first stage before it sends, the second when it has received.
    assert is_stuck([with_all_at(program, third[rank] + (rank >= 2)) for rank, program in enumerate(last)])
    for at in (0, -1):
        assert not is_stuck([with_all_at(program, range(len(program) + 1)[at]) for program in last])


JOBS: list[Job] = [*STEPS, *MODELS, *BATCHES]


@pytest.mark.long
@sampled("job", JOBS, kept=[JOBS.index(MODELS[1])], drawn=3, ids=str)
def test_steps_of_every_stage_mode_and_part_of_models_by_halves_and_through_stages_get_stuck_in_no_order(
    job: Job, tmp_path: Path
) -> None:
    check(job, *recorded(tmp_path, job))


WIDE = (*SHARDED[:1], ("topology.ranks_per_node", 4), *SHARDED[2:])
ON_EIGHT: list[Job] = [
    Step(Run(1, block=WIDE, features=GPT)),
    Step(Run(0, ep_size=4, block=WIDE[:-1])),
    *(Batches(FOUR_LAYERS, 4, zero_stage, how="sharded") for zero_stage in (0, 1)),
]


@pytest.mark.daily("engines of eight ranks", 1)
@pytest.mark.parametrize("job", ON_EIGHT, ids=str)
def test_engines_of_eight_ranks_get_stuck_in_no_order(job: Job, tmp_path: Path) -> None:
    [parts] = recorded(tmp_path, job, ranks=8)
    check(job, parts)


@pytest.mark.long
def test_parameters_gathered_ahead_get_stuck_without_the_fence_and_not_with_it(tmp_path: Path) -> None:
    """One parameter ahead is in :data:`MODELS`; here are several, beside the collectives of the lanes."""
    job = OfModel("qwen3_moe", 3, "flat", 2, 1, halves="off", ahead=5000)
    [fenced], [as_it_comes] = recorded(tmp_path, job, replace(job, is_fenced=False))
    assert_free(fenced)
    gathers = [at for at, each in enumerate(fenced[0]) if each.kind.startswith("all_gather")]
    rows = [at for at, each in enumerate(fenced[0]) if each.stream == "link 1"]
    assert any(rows[0] < at < rows[-1] for at in gathers), "nothing is gathered between the lanes' collectives"
    groups = {fenced[0][at].group for at in gathers}
    assert len(groups) == 2, "dense parameters and experts' are gathered in communicators of their own"
    # Each communicator's collectives are the same on all of its ranks; they are mixed in other orders.
    assert difference(as_it_comes) is None
    assert common_order(as_it_comes) is None
    assert search(Devices(as_it_comes, 1, implicit=True)) is not None


# ---- modules within experts


def lopsided(rank: int, world_size: int) -> list[str]:
    """What is off of four losses at stage 3, where all tokens choose two experts of the first rank."""
    from tests.sgd_engines import ds_config, engine_of
    from tests.test_hugging_face import WIDTH, OfTwice, Twice

    class OnlyHit(Twice):
        """As families write it: an expert without a token is not computed, nor its activation called."""

        def __init__(self) -> None:
            super().__init__()
            self.act_fn = nn.Sigmoid()

        def _apply_gate(self, up: torch.Tensor) -> torch.Tensor:
            gate, value = up.chunk(2, dim=-1)
            return self.act_fn(gate) * value

        def forward(self, x_SM: torch.Tensor, index_SK: torch.Tensor, weights_SK: torch.Tensor) -> torch.Tensor:
            y_SM = torch.zeros_like(x_SM)
            for expert in index_SK.unique().tolist():
                tokens, choices = torch.where(index_SK == expert)
                h = self._apply_gate(x_SM[tokens] @ self.gate_up_proj[expert].t())
                y = 2 * h @ self.down_proj[expert].t() * weights_SK[tokens, choices, None]
                y_SM = y_SM.index_add(0, tokens, y)
            return y_SM

    reference = OfTwice(OnlyHit)
    with torch.no_grad():
        reference.router.bias.copy_(torch.tensor([9.0, 7.0, 0.0, 5.0]))
    engine = engine_of(copy.deepcopy(reference), ds_config(3, lr=0.1, ep_size=2))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    said = []
    for step in range(4):
        xs = torch.randn(world_size, 5, WIDTH, generator=torch.Generator().manual_seed(step)) / 10
        losses = torch.stack([reference(each) for each in xs])
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        loss = engine(xs[rank])
        engine.backward(loss)
        engine.step()
        if not abs(loss.item() - losses[rank].item()) <= 1e-5 * losses[rank].item():
            said.append(f"step {step}: loss {loss.item()} for {losses[rank].item()}")
    engine.destroy()
    return said


@pytest.mark.long
def test_modules_within_experts_may_be_called_a_different_number_of_times_on_each_rank(tmp_path: Path) -> None:
    assert run_on_ranks(lopsided, 2, tmp_path) == [[], []]


# ---- the search

FIRST = Collective("link 0", "a", (0, 1), "all_reduce", 4, "float32")
UNEVEN = replace(FIRST, kind="all_to_all_single", num_bytes=((0, 8), (0, 12)))


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ((FIRST,), (replace(FIRST, num_bytes=8),), "a, call 0: 4 and 8 bytes"),
        ((FIRST,), (replace(FIRST, dtype="bfloat16"),), "a, call 0: all_reduce of float32 and all_reduce of bfloat16"),
        ((FIRST,), (FIRST, FIRST), "a: calls of each rank {0: 1, 1: 2}"),
        ((FIRST,), (), "a: rank 1 issues nothing"),
        ((UNEVEN,), (replace(UNEVEN, num_bytes=((12, 0), (8, 0))),), None),
        (
            (UNEVEN,),
            (replace(UNEVEN, num_bytes=((12, 0), (16, 0))),),
            "a, call 0: 8 bytes from 0 to 1, where 16 are received",
        ),
    ],
)
def test_a_rank_that_issues_something_else_is_named(first: Program, second: Program, said: str | None) -> None:
    assert difference([first, second]) == said


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
    calls = [
        [(each.group, sum(other.group == each.group for other in program[:at])) for at, each in enumerate(program)]
        for program in programs
    ]
    ranks_of = {
        call: each.ranks
        for program, own in zip(programs, calls, strict=True)
        for each, call in zip(program, own, strict=True)
    }

    def may_begin(rank: int, at: int) -> bool:
        program, own, each = programs[rank], calls[rank], programs[rank][at]
        resident = [index for index in range(len(program)) if (rank, index) in begun and own[index] not in over]
        on_streams = {name: [i for i, other in enumerate(program) if other.stream == name] for name, _ in each.after}
        needed = [index for index in range(at) if program[index].stream == each.stream]
        needed += [index for name, count in each.after for index in on_streams[name][:count]]
        return (
            (rank, at) not in begun
            and len(resident) < slots
            and not (implicit and any((rank, index) not in begun for index in range(at)))
            and (one_of is None or all(program[index].group != each.group for index in resident))
            and all(own[index] in over for index in needed)
        )

    def may_end(call: tuple[str, int]) -> bool:
        return all(call in calls[rank] and (rank, calls[rank].index(call)) in begun for rank in ranks_of[call])

    start = frozenset(), frozenset()
    seen, stack = {start}, [start]
    while stack:
        begun, over = stack.pop()
        every = [(rank, at) for rank, program in enumerate(programs) for at in range(len(program))]
        following = [(begun | {each}, over) for each in every if may_begin(*each)]
        following += [(begun, over | {call}) for call in ranks_of if call not in over and may_end(call)]
        if not following and len(over) < len(ranks_of):
            return True
        stack += [each for each in following if each not in seen]
        seen.update(following)
    return False


def test_the_search_leaves_out_no_order() -> None:
    for slots, implicit, one_of in itertools.product((1, 2, 3), (False, True), (None, "")):
        outcomes = set()
        for seed in range(60):
            found = random_programs(seed)
            expected = gets_stuck(found, slots, implicit, one_of)
            assert (search(Devices(found, slots, implicit, one_of)) is not None) == expected, seed
            outcomes.add(expected)
        assert outcomes == {False, True}
