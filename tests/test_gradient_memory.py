# SPDX-License-Identifier: Apache-2.0
"""A gradient that travels early is in one place: it moves into the buffer, and nothing else holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gradient_cases import LOOPS, Run, compare, train, training
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.test_gradients_against_stock import BY_RULE, STAGES


def held_besides(reducer: Any) -> int:
    """Bytes of gradients that parameters hold elsewhere."""
    return sum(
        found.nbytes
        for each in reducer.parameters
        if (found := reducer._gradient_of(each)) is not None and not reducer._is_in_place(each)
    )


def held_twice(rank: int, world_size: int, runs: list[Run]) -> list[tuple[int, int]]:
    """Of each run: (bytes of gradients held beside the buffers, bytes of the buffers), when a backward is through."""
    found = []
    for run in runs:
        most, total = 0, 0
        with training(run, rank) as script:
            reducer = script.engine.fsmoe.reduction.reducer
            finish = reducer.finish

            def looked_at(run: Run = run, reducer: Any = reducer, finish: Any = finish) -> Any:
                nonlocal most, total
                # Of another type than the wire's, a gradient stays with its parameter until its slice leaves.
                before = held_besides(reducer) if run.dtype == "fp32" else 0
                present = finish()
                most = max(most, before, held_besides(reducer))
                total = sum(flat.numel * flat.element_bytes for flat in reducer.flats)
                return present

            reducer.finish = looked_at
            for _ in range(run.steps):
                LOOPS[run.loop](script)
        found.append((most, total))
    return found


def test_no_gradient_is_held_beside_the_buffer(tmp_path: Path) -> None:
    runs = [Run(stage, mode="fixed_chunk", block=BY_RULE, accumulation=1 + stage % 2) for stage in STAGES]
    # The wire's type is another than the gradients' there.
    runs += [Run(stage, "bf16", config=(("communication_data_type", "fp32"),), block=BY_RULE) for stage in (0, 2)]
    for of_runs in run_on_ranks(held_twice, 2, tmp_path, runs):
        assert len(of_runs) == len(runs)
        for run, (beside, total) in zip(runs, of_runs, strict=True):
            assert total > 1000
            assert beside == 0, run.name


class BrokenOffError(Exception):
    pass


def breaks_off(rank: int, world_size: int, stage: int, by_engine: bool) -> list[str]:
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
        rounds = script.engine.fsmoe.reduction.reducer.rounds
    return compare(script.seen, undisturbed) + ([] if rounds == run.steps else [f"{rounds} rounds"])


@sampled(("stage", "by_engine"), [(0, True), (1, False)], kept=[1])
def test_a_backward_that_ends_in_an_error_leaves_nothing_in_the_next(
    stage: int, by_engine: bool, tmp_path: Path
) -> None:
    for wrong in run_on_ranks(breaks_off, 2, tmp_path, stage, by_engine):
        assert not wrong
