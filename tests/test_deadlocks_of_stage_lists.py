# SPDX-License-Identifier: Apache-2.0
"""No order of device work lets pipeline stages wait for each other for ever: DeepSpeed's list of each stage, with the
collectives of its layers and gradients between its sends and receives."""

from __future__ import annotations

from collections import Counter

import pytest
from deepspeed.runtime.pipe import schedule

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

COMPUTE, LINKS, RANKS_OF_A_STAGE = "compute", ("link 0", "link 1"), 2
LOAD, FORWARD, BACKWARD = "LoadMicroBatch", "ForwardPass", "BackwardPass"
REDUCE_TIED, REDUCE_GRADIENTS, OPTIMIZER_STEP = "ReduceTiedGrads", "ReduceGrads", "OptimizerStep"
SENDS = {"SendActivation": "RecvActivation", "SendGrad": "RecvGrad"}
"""Send -> the receive that is the same transfer on the other stage."""
TRANSFERS = (*SENDS, *SENDS.values())


def list_of(stage: int, num_stages: int, num_micro_batches: int, order: str) -> list[str]:
    """What a stage does in a batch, in DeepSpeed's order; or all of it that is of a forward first."""
    steps = schedule.TrainSchedule(num_micro_batches, num_stages, stage).steps()
    kinds = [type(each).__name__ for step in steps for each in step]
    of_forward = LOAD, FORWARD, "SendActivation", "RecvActivation"
    return kinds if order == "1f1b" else sorted(kinds, key=lambda kind: kind not in of_forward)


class Rank:
    """Writes down what one rank issues: sends in the stream of computation, as DeepSpeed's blocking ones are, and the
    layers' collectives on the streams of their links, which computation waits for."""

    def __init__(self, stage: int, place: int, num_stages: int, *, both_ways: bool) -> None:
        self.stage, self.place, self.num_stages, self.both_ways = stage, place, num_stages, both_ways
        self.program: list[Collective] = []

    def _rank_at(self, stage: int) -> int:
        return stage * RANKS_OF_A_STAGE + self.place

    def _issue(self, stream: str, group: str, ranks: tuple[int, ...], kind: str, after: tuple[str, ...] = ()) -> None:
        issued = Counter(each.stream for each in self.program)
        waits = tuple((each, issued[each]) for each in after if each != stream and issued[each])
        self.program.append(Collective(stream, group, ranks, kind, 8, "float32", waits))

    def of_stage(self, stream: str, kind: str, *after: str) -> None:
        """Issue a collective among the ranks of the stage."""
        ranks = tuple(self.stage * RANKS_OF_A_STAGE + each for each in range(RANKS_OF_A_STAGE))
        self._issue(stream, f"{stream} of stage {self.stage}", ranks, kind, after)

    def layer(self, with_slice: bool = False) -> None:
        """Issue a layer in two chunks, and a slice of gradients that nothing of the backward waits for."""
        for _ in range(2):
            self.of_stage(LINKS[0], "all_to_all", COMPUTE)
            self.of_stage(LINKS[1], "all_gather", LINKS[0])
        if with_slice:
            self.of_stage(LINKS[0], "all_reduce", COMPUTE)
        for _ in range(2):
            self.of_stage(LINKS[1], "reduce_scatter", COMPUTE)
            self.of_stage(LINKS[0], "all_to_all", LINKS[1])

    def run(self, kind: str, with_slice: bool, has_experts: bool) -> None:
        """Issue what a task of the stage's list does."""
        if kind in TRANSFERS:
            other = self.stage + (1 if kind in ("SendActivation", "RecvGrad") else -1)
            pair = tuple(sorted((self._rank_at(self.stage), self._rank_at(other))))
            sent = kind if kind in SENDS else next(each for each, received in SENDS.items() if received == kind)
            # NCCL has one communicator for both ways, Gloo matches those of one direction. What the last layer leaves
            # on its links is waited for before it is sent on.
            self._issue(COMPUTE, f"pair{'' if self.both_ways else f', {sent}'}", pair, sent, LINKS)
        elif kind in (FORWARD, BACKWARD) and has_experts:
            self.layer(with_slice)
        elif kind == REDUCE_TIED and self.stage in (0, self.num_stages - 1) and self.num_stages > 1:
            ends = self._rank_at(0), self._rank_at(self.num_stages - 1)
            self._issue(COMPUTE, f"tied {ends}", ends, "all_reduce", LINKS)
        elif kind == REDUCE_GRADIENTS:
            self.of_stage(COMPUTE, "all_reduce", *LINKS)
        else:
            assert kind in (LOAD, FORWARD, BACKWARD, REDUCE_TIED, OPTIMIZER_STEP)


def programs(
    num_stages: int,
    num_micro_batches: int,
    orders: tuple[str, ...],
    dense: tuple[int, ...] = (),
    both_ways: bool = True,
) -> tuple[Program, ...]:
    """What each rank issues in a batch, with the order of each stage."""
    found = []
    for stage in range(num_stages):
        kinds = list_of(stage, num_stages, num_micro_batches, orders[stage])
        last = max(index for index, kind in enumerate(kinds) if kind == BACKWARD)
        for place in range(RANKS_OF_A_STAGE):
            rank = Rank(stage, place, num_stages, both_ways=both_ways)
            for index, kind in enumerate(kinds):
                rank.run(kind, index == last, stage not in dense)
            found.append(tuple(rank.program))
    return tuple(found)


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
@pytest.mark.parametrize(
    ("num_stages", "num_micro_batches", "dense"), [(2, 1, ()), (2, 4, ()), (3, 3, (1,)), (4, 2, ()), (4, 5, (0, 3))]
)
def test_stages_get_stuck_in_no_order_that_keeps_that_of_issue(
    order: str, num_stages: int, num_micro_batches: int, dense: tuple[int, ...], both_ways: bool
) -> None:
    made = programs(num_stages, num_micro_batches, (order,) * num_stages, dense, both_ways)
    assert difference(made) is None
    assert common_order(made) is not None
    assert all(map(waits_fit_the_order, made))
    assert search(Devices(made, 1, implicit=True)).is_free
    assert search_at_random(Devices(made, 1, implicit=True), range(2)).stuck is None
    # With a slot for each stream nothing is contested.
    assert search(Devices(made, 3)).is_free
    assert slots_needed(made) <= 2


def test_stages_of_different_orders_are_found_out() -> None:
    """The check can fail: a stage that runs all forwards first does not fit one that waits for a gradient."""
    orders = "1f1b", "gpipe"
    assert "SendGrad of float32 and SendActivation" in (difference(programs(2, 3, orders)) or "")
    made = programs(2, 3, orders, both_ways=False)
    assert common_order(made) is None
    stuck = search(Devices(made, 3)).stuck
    assert stuck == [["SendGrad of pair, SendGrad"]] * 2 + [["SendActivation of pair, SendActivation"]] * 2
