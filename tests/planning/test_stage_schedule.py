# SPDX-License-Identifier: Apache-2.0
"""What a pipeline's stages do in a batch is one static list each, and the lists fit together."""

from __future__ import annotations

import itertools

import pytest

from ds_fsmoe.planning.schedule import BACKWARD, FORWARD, RECV_GRADIENT, SEND_ACTIVATION, Lane
from ds_fsmoe.planning.stage_schedule import AT_THE_END, ORDERS, SENDS, TOWARDS_NEXT, peer, stage_schedule

SIZES = list(itertools.product(ORDERS, range(1, 7), (1, 2, 3, 4, 7, 12)))


def test_two_stages_take_turns_in_the_order_written_out_by_hand() -> None:
    first, last = (ORDERS["1f1b"](stage, 2, 2) for stage in range(2))
    assert first == (
        *(("LOAD", 0), ("FORWARD", 0), ("SEND_ACTIVATION", 0), ("LOAD", 1), ("FORWARD", 1)),
        *(("RECV_GRADIENT", 0), ("SEND_ACTIVATION", 1), ("BACKWARD", 0), ("RECV_GRADIENT", 1), ("BACKWARD", 1)),
        *(("REDUCE_TIED", 0), ("REDUCE_GRADIENTS", 0), ("OPTIMIZER_STEP", 0)),
    )
    assert last == (
        *(("RECV_ACTIVATION", 0), ("LOAD", 0), ("FORWARD", 0), ("BACKWARD", 0)),
        *(("SEND_GRADIENT", 0), ("RECV_ACTIVATION", 1), ("LOAD", 1), ("FORWARD", 1), ("BACKWARD", 1)),
        *(("SEND_GRADIENT", 1), ("REDUCE_TIED", 0), ("REDUCE_GRADIENTS", 0), ("OPTIMIZER_STEP", 0)),
    )


@pytest.mark.parametrize(("order", "stages", "batches"), SIZES)
def test_every_micro_batch_runs_forward_and_then_backward_once(order: str, stages: int, batches: int) -> None:
    for stage in range(stages):
        found = ORDERS[order](stage, stages, batches)
        assert len(set(found)) == len(found)
        for each in range(batches):
            assert found.index((FORWARD, each)) < found.index((BACKWARD, each))
        assert tuple(kind for kind, _ in found[-3:]) == AT_THE_END


@pytest.mark.parametrize(("order", "stages", "batches"), SIZES)
def test_every_send_has_its_receive_on_the_neighbour_in_the_same_order(order: str, stages: int, batches: int) -> None:
    lists = [ORDERS[order](stage, stages, batches) for stage in range(stages)]
    for stage, found in enumerate(lists):
        for sent, received in SENDS.items():
            sends = [each for kind, each in found if kind == sent]
            other = peer(stage, sent)
            assert bool(sends) == (0 <= other < stages)
            if sends:
                assert sends == [each for kind, each in lists[other] if kind == received]
    assert {kind for kind, _ in lists[-1]}.isdisjoint(TOWARDS_NEXT)


@pytest.mark.parametrize(("stages", "batches"), [(1, 4), (4, 2), (4, 9)])
def test_no_more_micro_batches_are_in_flight_than_stages_are_left(stages: int, batches: int) -> None:
    for stage in range(stages):
        flying = most = 0
        for kind, _ in ORDERS["1f1b"](stage, stages, batches):
            flying += (kind == FORWARD) - (kind == BACKWARD)
            most = max(most, flying)
        assert most == min(stages - stage, batches)


def test_a_transfer_is_on_the_link_to_the_stage_that_it_is_with() -> None:
    schedule = stage_schedule(1, 3, 4, (Lane.INTRA, Lane.INTER))
    lanes = {task.kind: task.lane for task in schedule.tasks}
    assert (lanes["RECV_ACTIVATION"], lanes["SEND_GRADIENT"]) == (Lane.INTRA, Lane.INTRA)
    assert (lanes[SEND_ACTIVATION], lanes[RECV_GRADIENT]) == (Lane.INTER, Lane.INTER)
    assert lanes[FORWARD] is Lane.COMPUTE
    assert [task.after for task in schedule.tasks] == [(), *((index,) for index in range(len(schedule.tasks) - 1))]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((2, 2, 1), "stage = 2: must be from 0 to 1"),
        ((0, 2, 0), "num_micro_batches = 0: must be at least 1"),
        ((0, 3, 1, (Lane.INTER,)), "1 links: must be one between each of 3 stages and the next"),
        ((0, 2, 1, (), "2f2b"), "order = '2f2b': the choices are 1f1b, gpipe"),
    ],
)
def test_what_is_no_stage_is_refused(arguments: tuple, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        stage_schedule(*arguments)
