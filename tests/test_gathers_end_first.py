# SPDX-License-Identifier: Apache-2.0
"""On a CPU: no gradient is sent before every updated parameter has arrived, whatever a rank has read."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ds_fsmoe.gradients import reducer, reduction_algorithms, updated_parameters
from tests.gradient_cases import LOOPS, Run, let_deepspeed_read_nothing, training
from tests.ranks import run_on_ranks
from tests.waiting import LIMIT_S, pause

RUN = Run(
    1,
    mode="fixed_chunk",
    block=(("deterministic", True), ("topology.ranks_per_node", 2)),
    features=frozenset({"tail"}),
)


class Log:
    """What is sent on each communicator, in the order of the calls, from whichever thread."""

    def __init__(self) -> None:
        self.of: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        self._lock = threading.Lock()

    def note(self, what: str, group: dist.ProcessGroup) -> None:
        with self._lock:
            of = group.group_desc, tuple(dist.get_process_group_ranks(group))
            self.of.setdefault(of, []).append(what)


def train(rank: int, world_size: int, ends_gathers: bool) -> dict[tuple[str, tuple[int, ...]], str]:
    """What this rank sends on each communicator: "p" a message of parameters, "g" one of gradients.

    With the rule, messages of parameters pause at random. Without it, rank 3 holds the last part of the first gather,
    until it begins to send gradients. That call is noted, and then made in the right order. Rank 2 has read everything.
    """
    log, draw = Log(), random.Random(rank)
    is_sending = threading.Event()
    holds = not ends_gathers and rank == 3
    exchange, gather, reduce = reduction_algorithms.exchange_sized, reduction_algorithms.all_gather, dist.all_reduce
    waits: list[Callable[[], None]] = []
    messages: list[int] = []
    """Their number in a step; then, of each one that was passed on inside the node, one more."""

    def parameters(x: Any, sends: Any, receives: Any, group: Any) -> Any:
        if holds and group.group_desc.endswith("intra"):
            messages.append(0)
            if len(messages) == 2:
                is_sending.clear()
            if len(messages) == 1 + messages[0]:
                assert is_sending.wait(LIMIT_S / 4)
        pause(draw, 0.0, 0.001, 0.01)
        log.note("p", group)
        return exchange(x, sends, receives, group)

    def gradients(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            group = options.get("group", args[-1])
            if not ends_gathers and rank == 2:
                for wait in waits:
                    wait()
            log.note("g", group)
            is_sending.set()
            for wait in waits:
                wait()
            return function(*args, **options)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updated_parameters, "exchange_sized", parameters)
        patch.setattr(updated_parameters, "FEWEST_NUMEL", 64)
        let_deepspeed_read_nothing(patch)
        patch.setattr(reduction_algorithms, "exchange_sized", gradients(exchange))
        patch.setattr(reduction_algorithms, "all_gather", gradients(gather))
        patch.setattr(
            reduction_algorithms,
            "dist",
            SimpleNamespace(all_reduce=gradients(reduce), get_world_size=dist.get_world_size),
        )
        if not ends_gathers:
            patch.setattr(reducer, "end_gathers", lambda: None)
        with training(RUN, rank) as script:
            updated = script.engine.fsmoe.updated
            messages.append(sum(len(each.exchanges) > 1 for each in updated._messages))
            for _ in range(4 if ends_gathers else 2):
                LOOPS["plain"](script)
                waits[:] = updated._waits
            script.engine.fsmoe.wait_for_parameters()
            waits.clear()
            assert script.engine.fsmoe.reduction.reducer.plan.hidden() > 0
            return {of: "".join(each) for of, each in log.of.items()}


def unlike(of_ranks: list[dict[tuple[str, tuple[int, ...]], str]]) -> list[tuple[str, tuple[int, ...]]]:
    """The communicators on which not all ranks send in the same order."""
    everything = {of for each in of_ranks for of in each}
    return [of for of in sorted(everything) if len({of_ranks[rank].get(of) for rank in of[1]}) > 1]


def test_parameters_and_gradients_take_turns_on_one_communicator_whoever_has_read_what(tmp_path: Path) -> None:
    sent = run_on_ranks(train, 4, tmp_path, True)
    assert unlike(sent) == []
    both = [each for of_rank in sent for each in of_rank.values() if "p" in each and "g" in each]
    assert both, "they share communicators"


def test_without_the_rule_ranks_that_have_not_read_send_gradients_between_parameters(tmp_path: Path) -> None:
    wrong = unlike(run_on_ranks(train, 4, tmp_path, False))
    assert ("fsmoe_gradients_intra", (2, 3)) in wrong
