# SPDX-License-Identifier: Apache-2.0
"""Waits of DeepSpeed's own that last are hangs; those of the script are not, and neither are many short ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.execution.lanes import SerialLanes
from ds_fsmoe.observing.other_ranks import _collectives_begun
from tests.ranks import run_on_ranks
from tests.waiting import until, until_blocked
from tests.watchdog_cases import LOOKS_FOR_A_HANG, Hangs, file, nobody_looks_after_sigterm

FIXTURES = (file, nobody_looks_after_sigterm)  # which pytest finds by their names here


def deepspeeds_own() -> None:
    from deepspeed.runtime.zero.utils import assert_lst_len_same_as_other_ranks

    assert_lst_len_same_as_other_ranks([1])


def of_the_script() -> None:
    import deepspeed.comm

    deepspeed.comm.barrier()


def at_the_end_of_a_change(late: Callable[[], None]) -> None:
    """Rank 0 is late within the change."""
    import deepspeed
    import torch.distributed as dist

    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 2, "zero_optimization": {"stage": 3}}):
        layer = torch.nn.Linear(2, 2)
    with deepspeed.zero.GatheredParameters(list(layer.parameters()), modifier_rank=0):
        if dist.get_rank() == 0:
            late()


def with_one_late(rank: int, world_size: int, folder: str, name: str) -> tuple[int, str]:
    """How many hangs the rank that waits reports, and its report, when the other one comes only after many looks."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    waits_for_it, looked, report = (Path(folder, each) for each in ("waits", "looked", "report.txt"))
    act: Callable[[], None] = {"DeepSpeed": deepspeeds_own, "script": of_the_script}.get(name, lambda: None)
    is_late = rank == (0 if name == "change" else 1)

    def late() -> None:
        waits_for_it.touch()
        until(looked.exists)

    if is_late:
        at_the_end_of_a_change(late) if name == "change" else (late(), act())
        return 0, ""
    with closing(SerialLanes()) as lanes, Hangs(lanes, report) as hangs:

        def look() -> None:
            until(waits_for_it.exists)
            until_blocked(threading.main_thread())
            hangs.look(2 * LOOKS_FOR_A_HANG)
            looked.touch()

        looking = threading.Thread(target=look)
        looking.start()
        at_the_end_of_a_change(late) if name == "change" else act()
        looking.join()
        hangs.look(1)
        assert waiting.now() == []
        return len(hangs.files), report.read_text() if hangs.files else ""


@pytest.mark.parametrize("name", ["DeepSpeed", "script", "change"])
def test_a_wait_of_deepspeeds_that_lasts_is_a_hang_and_one_of_the_script_is_not(name: str, tmp_path: Path) -> None:
    found = run_on_ranks(with_one_late, 2, tmp_path / "ranks", str(tmp_path), name)
    (num_hangs, report) = found[1 if name == "change" else 0]
    assert num_hangs == (name == "DeepSpeed")
    if num_hangs:
        reason = "hang: waits for other ranks in DeepSpeed's assert_lst_len_same_as_other_ranks (runtime/zero/utils.py:"
        assert f"\nreason: {reason}" in report
        assert "\nrank:   waits for other ranks in DeepSpeed's assert_lst_len_same_as_other_ranks" in report


def many_short_ones(rank: int, world_size: int, folder: str) -> int:
    """Each is looked at, at one place, for less than a hang."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    rounds = 4

    def go(number: int) -> Path:
        return Path(folder, f"go{number}")

    if rank:
        for number in range(rounds):
            until(go(number).exists)
            deepspeeds_own()
        return 0
    with closing(SerialLanes()) as lanes, Hangs(lanes, Path(folder, "report.txt")) as hangs:

        def look() -> None:
            for number in range(rounds):
                until_blocked(threading.main_thread())
                hangs.look(LOOKS_FOR_A_HANG // 2)
                before = _collectives_begun()
                go(number).touch()
                until(lambda before=before, number=number: _collectives_begun() != before or number == rounds - 1)

        looking = threading.Thread(target=look)
        looking.start()
        for _ in range(rounds):
            deepspeeds_own()
        looking.join()
        return len(hangs.files)


def test_many_short_waits_of_deepspeeds_at_one_place_are_no_hang(tmp_path: Path) -> None:
    assert run_on_ranks(many_short_ones, 2, tmp_path / "ranks", str(tmp_path)) == [0, 0]


def test_the_first_run_is_over_though_the_second_has_its_name(file: Path) -> None:
    from tests.watchdog_cases import run_once

    with closing(SerialLanes()) as lanes, Hangs(lanes, file, first_use_s=100) as hangs:
        # Nobody has looked before the second one hangs.
        run_once(lanes)
        run_once(lanes, lambda task: hangs.hang() == LOOKS_FOR_A_HANG or pytest.fail("taken for the first"))
        assert hangs.files == [file]
