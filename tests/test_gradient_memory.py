# SPDX-License-Identifier: Apache-2.0
"""A gradient that travels early is in one place: it moves into the buffer, and nothing else holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.gradient_cases import LOOPS, Run, compare, train, training
from tests.ranks import run_on_ranks
from tests.samples import draw
from tests.small_model import Case, SmallModel, small_engine
from tests.small_model import batch as small_batch
from tests.test_gradients_against_stock import BY_RULE, STAGES
from tests.waiting import LIMIT_S

ALL_USED = {"enabled": True, "deterministic": True, "gradient_partition": {"mode": "adaptive", "all_used": True}}


def held_besides(reducer: Any) -> int:
    """Bytes of gradients that parameters hold elsewhere."""
    return sum(
        found.nbytes
        for each in reducer.parameters
        if (found := reducer._gradient_of(each)) is not None and not reducer._is_in_place(each)
    )


def held_twice(rank: int, world_size: int, runs: list[Run]) -> None:
    """When a backward is through, gradients are in the buffers alone."""
    for run in runs:
        beside: list[int] = []
        with training(run, rank) as script:
            reducer = script.engine.fsmoe.reduction.reducer
            finish = reducer.finish

            def looked_at(run: Run = run, reducer: Any = reducer, finish: Any = finish, found: Any = beside) -> Any:
                # Of another type than the wire's, a gradient stays with its parameter until its slice leaves.
                before = held_besides(reducer) if run.dtype == "fp32" else 0
                present = finish()
                found.append(before + held_besides(reducer))
                return present

            reducer.finish = looked_at
            for _ in range(run.steps):
                LOOPS[run.loop](script)
            assert sum(flat.numel * flat.element_bytes for flat in reducer.flats) > 1000
        assert set(beside) == {0}, run.name


def test_no_gradient_is_held_beside_the_buffer(tmp_path: Path) -> None:
    runs = [Run(stage, mode="fixed_chunk", block=BY_RULE, accumulation=1 + stage % 2, steps=3) for stage in STAGES]
    # The wire's type is another than the gradients' there.
    wire = (("communication_data_type", "fp32"),)
    runs += [Run(stage, "bf16", config=wire, block=BY_RULE, steps=3) for stage in (0, 2)]
    run_on_ranks(held_twice, 2, tmp_path, draw("held", runs, 2))


class BrokenOffError(Exception):
    pass


def breaks_off(rank: int, world_size: int, stage: int, by_engine: bool) -> None:
    """A backward ends in an error on all ranks when most of it has travelled; the script goes on with the next one."""
    run = Run(stage, mode="dense_only", block=BY_RULE)
    undisturbed = train(run, rank)

    def fail(_: torch.Tensor) -> None:
        raise BrokenOffError

    with training(run, rank) as script:
        for number in range(run.steps):
            if number == 3:
                handle = script.model.embed.weight.register_hook(fail)
                loss = script.forward()
                with pytest.raises(BrokenOffError):
                    script.engine.backward(loss) if by_engine else loss.backward()
                handle.remove()
                for parameter in script.model.parameters():
                    parameter.grad = None
                script._micro_step -= 1
                script.seen.numbers["losses"].pop()
            LOOPS[run.loop](script)
        assert script.engine.fsmoe.reduction.reducer.rounds == run.steps
    assert compare(script.seen, undisturbed) == []


def test_a_backward_that_ends_in_an_error_leaves_nothing_in_the_next(tmp_path: Path) -> None:
    [(stage, by_engine)] = draw("breaks off", [(0, True), (1, False)], 1)
    run_on_ranks(breaks_off, 2, tmp_path, stage, by_engine)


# ---- where every parameter is known to be used


def step(engine: Any, number: int, spare: bool) -> None:
    loss, y_BLM = engine(*small_batch(number, 0, torch.float32))
    # Used at the end of the forward, its gradient comes first; used at the start, it comes last.
    use = engine.module.spare.sum()
    engine.backward(loss + use * (y_BLM.sum() if spare else 0.0) + 0.0 * use)


def used_by_all(rank: int, world_size: int) -> None:
    """There is no second copy; then a gradient comes again, behind the backward's windows."""
    torch.manual_seed(0)
    case = Case(ep_size=2, k=2)
    model = SmallModel(case, rank)
    model.spare = nn.Parameter(torch.ones(5))
    engine = small_engine(case, rank, ALL_USED, model)
    reducer = engine.fsmoe.reduction.reducer
    for number in range(2):
        step(engine, number, spare=True)
        assert not [each for flat in reducer.flats for each in flat._reduced if each is not None]
        assert all(each.grad is not None for each in reducer.parameters)
        engine.step()
        assert {tuple(each.extra.shape) for each in reducer.flats} == {(0,)}
    assert reducer.plan.hidden() > 0

    def comes_again(*_: Any) -> None:
        model.spare.grad = torch.ones_like(model.spare)
        reducer.ready(model.spare)

    model.first.register_full_backward_hook(comes_again)
    step(engine, 2, spare=True)


def test_where_all_are_used_there_is_no_second_copy_and_a_gradient_that_comes_late_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"\[\(5,\)\] came after their slices were sent") as caught:
        run_on_ranks(used_by_all, 2, tmp_path, grace_s=LIMIT_S)
    assert str(caught.value).count("although fsmoe.gradient_partition.all_used = true: remove it") == 2
