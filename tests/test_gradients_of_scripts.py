# SPDX-License-Identifier: Apache-2.0
"""Scripts that do something with gradients themselves train as they do with DeepSpeed's own reduction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

from tests.gradient_cases import LOOPS, Run, Script, batch, compare, train
from tests.ranks import run_on_ranks
from tests.test_gradients_against_stock import BY_RULE, NO_CLIPPING


def changed_before_the_reduction(script: Script) -> None:
    """In place, by another tensor, and taken away, in turns; for all of them on this rank."""
    script.engine.enable_backward_allreduce = False
    script.engine.backward(script.forward())
    for number, parameter in enumerate(script.model.parameters()):
        if parameter.grad is not None:
            change(parameter, number + script.num_steps)
    script.engine.allreduce_gradients()
    script.step()


def changed_by_hooks(script: Script) -> None:
    """As soon as they are there."""
    if script.num_steps == 0:
        for number, parameter in enumerate(script.model.parameters()):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda each, number=number: change(each, number))
    script.engine.backward(script.forward())
    script.step()


def change(parameter: torch.nn.Parameter, number: int) -> None:
    if number % 3 == 0:
        parameter.grad.clamp_(-1e-3, 1e-3)
    elif number % 3 == 1:
        parameter.grad = parameter.grad * 0.25
    else:
        parameter.grad = None


def laid_out_otherwise(script: Script) -> None:
    """Some weights lie in memory column by column, as a fused optimizer has to see."""
    weights = script.model.first.weight, script.model.last.weight, script.model.wanderer.weight
    if script.num_steps == 0:
        for each in weights:
            each.data = each.data.t().contiguous().t()
    script.engine.backward(script.forward())
    assert all(each.grad.stride() == each.stride() == (1, len(each)) for each in weights)
    script.step()


def checkpointed_whole(script: Script) -> None:
    """Two forwards of the engine, which run again within the backward once there is a plan; one of them uses what the
    other does not, and so has its gradient, which has travelled when the other begins."""
    total = torch.zeros(())
    for use in (None, 0.5):
        args = *batch(2 * script.num_steps + (use is None), script.rank), use
        if script.num_steps >= 3:
            total = total + checkpoint(script.engine, *args, use_reentrant=False)
        elif use is not None:
            total = total + script.engine(*args)
    script.seen.add("losses", total)
    script.engine.backward(total)
    script.step()


def compare_all(rank: int, world_size: int, runs: list[tuple[Run, Callable[[Script], None]]]) -> None:
    for run, loop in runs:
        LOOPS[run.loop] = loop
        wrong = compare(train(run, rank), train(replace(run, mode="", block=()), rank, stock=True))
        assert [each for each in wrong if not each.startswith("norms")] == [], run.name


WIDE_WIRE = ("communication_data_type", "fp32")
FUSED = ("optimizer", {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True, "fused": True}})
RUNS = [
    (changed_before_the_reduction, Run()),
    (changed_by_hooks, Run(dtype="bf16", config=(WIDE_WIRE,))),
    (laid_out_otherwise, Run(features=frozenset({"wanders"}), config=(FUSED,), steps=8)),
    # A forward within the backward is no new round.
    (checkpointed_whole, Run(features=frozenset({"sometimes"}))),
]


def test_what_hooks_and_scripts_do_to_gradients_counts(tmp_path: Path) -> None:
    runs = [
        (replace(run, mode="dense_only", block=BY_RULE, config=NO_CLIPPING + run.config, loop=loop.__name__), loop)
        for loop, run in RUNS
    ]
    run_on_ranks(compare_all, 2, tmp_path, runs)
