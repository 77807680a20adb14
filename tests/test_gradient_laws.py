# SPDX-License-Identifier: Apache-2.0
"""Laws of sums and of updated parameters that no number of a usual run depends on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_fsmoe.gradients import reducer, updated_parameters
from ds_fsmoe.gradients.lazy_parameters import LazyParameter
from tests.gradient_cases import LOOPS, Run, training
from tests.ranks import run_on_ranks
from tests.test_gradient_reducer import Bench
from tests.test_gradients_against_stock import BY_RULE, check, with_stock
from tests.waiting import linger

LAYERS = ("c", "b", "a")


def parcels_of_layers(rank: int, world_size: int) -> list[list[Any]]:
    """What is sent inside each layer: in a round that all ranks go through, and in one in which the last skips "c"."""
    bench = Bench("both")
    found = []
    for skipped in (None, None, None, "c"):
        of_layers: dict[str, Any] = {}
        for number, label in enumerate(LAYERS):
            for at in (5 - 2 * number, 4 - 2 * number):
                bench.parameters[at].grad = bench.gradient(at, rank)
                bench.reducer.ready(bench.parameters[at])
            if label == skipped and rank == world_size - 1:
                continue
            of_layers[label] = bench.reducer.open(label)
            for parcel in of_layers[label]:
                for task in bench.reducer.tasks(parcel):
                    bench.reducer.send(parcel, task)
            bench.reducer.close()
        found.append([of_layers, bench.finish([list(range(6))] * world_size)])
    return found


def test_a_rank_that_skips_a_layer_sends_the_same_inside_the_others(tmp_path: Path) -> None:
    first, last = run_on_ranks(parcels_of_layers, 2, tmp_path)
    for *_, (whole, no_errors), (of_layers, wrong) in (first, last):
        assert whole["b"]
        assert of_layers["b"] == whole["b"]
        assert of_layers["a"] == whole["a"]
        assert not no_errors
        assert not wrong
    assert "c" in first[-1][0]
    assert "c" not in last[-1][0]


def slowly() -> Any:
    """The exchange of messages, slowed down."""
    exchange = updated_parameters.exchange_sized

    def slow(*args: Any) -> torch.Tensor:
        linger(0.2)
        return exchange(*args)

    return slow


def classes_in_layers(rank: int, world_size: int) -> tuple[list[set[str]], list[float], list[float]]:
    """Of which classes the parameters of MoE layers are when these begin, with messages that take long; the losses, and
    those of a gather at the end of the step."""
    seen: list[set[str]] = []
    gathered = (("gradient_partition.gather_parameters", "at_end"),)
    with training(Run(1, block=BY_RULE + gathered), rank) as script:
        for _ in range(3):
            LOOPS["plain"](script)
        wanted = [each.item() for each in script.seen.numbers["losses"]]
    exchange, updated_parameters.exchange_sized = updated_parameters.exchange_sized, slowly()
    try:
        with training(Run(1, block=BY_RULE), rank) as script:

            def look(layer: nn.Module, *_: Any) -> None:
                seen.append({type(each).__name__ for each in layer.parameters()})

            script.engine.fsmoe.running.checks.append(look)
            for _ in range(3):
                LOOPS["plain"](script)
                assert any(type(each) is LazyParameter for each in script.model.parameters())
            losses = [each.item() for each in script.seen.numbers["losses"]]
    finally:
        updated_parameters.exchange_sized = exchange
    return seen, losses, wanted


def test_a_layer_begins_when_its_parameters_have_come(tmp_path: Path) -> None:
    for seen, losses, wanted in run_on_ranks(classes_in_layers, 2, tmp_path):
        assert len(seen) == 9
        assert set.union(*seen) == {"Parameter"}
        assert losses == wanted


def steps_and_messages(rank: int, world_size: int) -> list[str]:
    """Two steps between which nobody reads a parameter, as both forwards come first. Messages are held until somebody
    waits for them, or has gone on without."""
    log: list[str] = []
    may_travel = threading.Event()
    exchange = updated_parameters.exchange_sized

    def held(*args: Any) -> torch.Tensor:
        assert may_travel.wait(60)
        result = exchange(*args)
        log.append("a message has come")
        return result

    ended = reducer.end_gathers

    def ending() -> None:
        may_travel.set()
        ended()

    updated_parameters.exchange_sized, reducer.end_gathers = held, ending
    try:
        with training(Run(1, block=BY_RULE), rank) as script:
            updated = script.engine.fsmoe.updated
            step, wait = updated._step, updated.wait

            def noted(*args: Any, **kwargs: Any) -> Any:
                log.append("step")
                if log.count("step") > 1:
                    may_travel.set()
                return step(*args, **kwargs)

            def waiting() -> None:
                if updated._waits:
                    may_travel.set()
                wait()

            updated._step, updated.wait = noted, waiting
            for loss in [script.forward() for _ in range(2)]:
                # As if nobody read them: experts that get no token, what is used in some steps only.
                for each in script.model.parameters():
                    each.__class__ = nn.Parameter
                script.engine.backward(loss)
                script.engine.step()
    finally:
        updated_parameters.exchange_sized, reducer.end_gathers = exchange, ended
    return log


def test_a_step_begins_when_the_parameters_of_the_last_one_have_come(tmp_path: Path) -> None:
    for log in run_on_ranks(steps_and_messages, 2, tmp_path):
        assert log.count("step") == 2
        assert log[0] == "step"
        assert "a message has come" in log[: log.index("step", 1)]


def test_a_division_ahead_of_the_sum_is_stocks(tmp_path: Path) -> None:
    check(with_stock(Run(0, mode="fixed_chunk", config=(("gradient_predivide_factor", 3.0),), steps=2)), 2, tmp_path)


def before_there_is_a_plan(rank: int, world_size: int) -> tuple[list[str], list[str], int, int]:
    """At stage 2, in the first backward: the layers that are expected, those that come, how many elements are sent
    beside what follows them, and how many gradients came too late for that."""
    with training(Run(2), rank) as script:
        reducer = script.engine.fsmoe.reduction.reducer
        expected, parts = list(reducer._windows), reducer._parts
        LOOPS["plain"](script)
        assert reducer.plan is None
        sent = sum(each.stop - each.first for parcels in parts for each in parcels)
        return expected, reducer._layers_in_order[0], sent, reducer.sent_again


def test_at_stage_2_gradients_leave_in_the_first_backward_too(tmp_path: Path) -> None:
    for expected, passed, sent, late in run_on_ranks(before_there_is_a_plan, 2, tmp_path):
        assert expected == passed
        assert len(passed) == 3
        assert sent > 1009  # the elements of DeepSpeed's bucket here
        assert late == 0
