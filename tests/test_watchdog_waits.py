# SPDX-License-Identifier: Apache-2.0
"""The watchdog and waits outside of lanes: what is a hang there, what is none, and what ranks hear of each other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ds_fsmoe.distributed import waits
from ds_fsmoe.distributed.waits import at_work, waiting, working
from ds_fsmoe.execution.lanes import SerialLanes
from ds_fsmoe.observing import other_ranks
from ds_fsmoe.observing.other_ranks import PeerReports
from ds_fsmoe.observing.watchdog import Watchdog
from tests.fake_clock import SteppedClock
from tests.ranks import run_on_ranks
from tests.waiting import until
from tests.watchdog_cases import LOOKS_FOR_A_HANG, TIMEOUT_S, Hangs, file, nobody_looks_after_sigterm

FIXTURES = (file, nobody_looks_after_sigterm)  # which pytest finds by their names here


@pytest.fixture
def hangs(file: Path) -> Iterator[Hangs]:
    with closing(SerialLanes()) as lanes, Hangs(lanes, file) as made:
        yield made


def test_a_wait_outside_of_lanes_that_lasts_is_a_hang_that_is_said_once(hangs: Hangs, file: Path) -> None:
    with waiting("the counts of", "model.layers.0"):
        # In the first look it is seen.
        assert hangs.hang() == 1 + int(TIMEOUT_S)
        hangs.look(3 * LOOKS_FOR_A_HANG)
    assert hangs.files == [file]
    report = file.read_text()
    assert (
        "\nreason: hang: waits for other ranks in the counts of model.layers.0 (fsmoe.debug.hang_timeout_s = 4)\n"
        in report
    )
    assert "\nrank:   waits for other ranks in the counts of model.layers.0, since " in report
    assert ", called from " in report
    with waiting("another"):
        hangs.hang()
    assert len(hangs.files) == 2


def test_many_short_waits_are_no_hang(hangs: Hangs) -> None:
    for _ in range(5):
        with waiting("the counts of", "model.layers.0"):
            hangs.look(int(TIMEOUT_S))
    assert hangs.files == []
    assert waiting.now() == []


def test_a_wait_of_any_thread_is_seen_and_an_error_ends_it(hangs: Hangs) -> None:
    ends = threading.Event()

    def wait() -> None:
        with suppress(ValueError), waiting("gradients"):
            ends.wait()
            raise ValueError

    thread = threading.Thread(target=wait)
    thread.start()
    until(waiting.now)
    hangs.hang()
    ends.set()
    thread.join()
    assert waiting.now() == []


def test_a_wait_within_work_with_files_is_said_once_and_goes_on(hangs: Hangs, file: Path) -> None:
    @at_work("saving a checkpoint")
    def save() -> int:
        with waiting("whether a rank has failed"):
            hangs.look(5 * LOOKS_FOR_A_HANG)
        return 3

    assert save() == 3
    assert hangs.files == []
    assert file.read_text().count("files are written or read meanwhile, so it goes on waiting") == 1
    assert "; is saving a checkpoint, since " in file.read_text()
    assert working.now() == []


def test_what_is_said_names_the_last_forward_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits._Last, "forward", None)
    monkeypatch.setattr(waits._Last, "step", None)
    assert waits.describe_waits() == "is in no wait of ds_fsmoe; has run no forward"
    waits.forward_begins("forward 2 (training) of L00")
    waits.at_step(7)
    assert waits.describe_waits().startswith(
        "is in no wait of ds_fsmoe; last forward: forward 2 (training) of L00, since "
    )
    assert waits.describe_waits().endswith("; at step 7")


def test_a_store_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    class Store:
        def set(self, key: str, value: str) -> None:
            answers.wait()

    monkeypatch.setattr(other_ranks, "world_size_now", lambda: 2)
    monkeypatch.setattr(other_ranks, "_own_store", Store)
    clock = SteppedClock()
    clock.gives_up = lambda thread: thread.name == "fsmoe-store"
    others = PeerReports(clock, 1.0, 1)
    assert others.check(True) is None
    assert others.states() == []
    answers.set()


def beside_work(rank: int, world_size: int, folder: str, is_at_work: bool) -> list[str]:
    """Rank 0 waits for rank 1, which is at work with files, or is not, until rank 0 has said so."""
    report, ended = Path(folder, "rank0.txt"), list[Any]()
    with (
        closing(SerialLanes()) as lanes,
        closing(Watchdog(lanes, 2.0, Path(folder, f"rank{rank}.txt"), ended.append, 0)),
    ):
        dist.barrier()
        if rank == 0:
            with waiting("what every rank says"):
                dist.barrier()
        elif is_at_work:
            with working("saving a checkpoint"):
                until(report.exists)
        else:
            until(lambda: Path(folder, "rank1.txt").exists())
        if rank:
            dist.barrier()
    return [str(each) for each in ended]


@pytest.mark.parametrize("is_at_work", [True, False])
def test_a_rank_that_waits_for_one_at_work_with_files_is_not_ended(is_at_work: bool, tmp_path: Path) -> None:
    ended, of_other = run_on_ranks(beside_work, 2, tmp_path / "ranks", str(tmp_path), is_at_work)
    report = (tmp_path / "rank0.txt").read_text()
    assert ended == ([] if is_at_work else [str(tmp_path / "rank0.txt")])
    assert of_other == []
    assert "reason: hang: waits for other ranks in what every rank says" in report
    assert ("\n        rank 1: is in no wait of ds_fsmoe; is saving a checkpoint, since " in report) == is_at_work
    assert (tmp_path / "rank1.txt").exists() != is_at_work
