# SPDX-License-Identifier: Apache-2.0
"""What a run tells of itself besides times: command, commit and config without secrets, tokens, memory, tuning."""

from __future__ import annotations

import mmap
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_fsmoe.telemetry.record import OF_PROCESS, ON_DEVICE, StepLog, TokenCount, commit_of, memory_reader
from tests.waiting import LIMIT_S

# ---- where a run came from


def test_a_commit_is_that_of_the_script_and_says_whether_files_were_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, elsewhere = tmp_path / "repository", tmp_path / "elsewhere"

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")
        command = ["git", *who, "-C", str(repository), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    elsewhere.mkdir()
    repository.mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.setattr("ds_fsmoe.telemetry.record._GIT_S", LIMIT_S)
    monkeypatch.chdir(elsewhere)
    script = repository / "train.py"
    script.write_text("1\n")
    assert commit_of(str(script)) is None
    git("init", "-q")
    assert commit_of(str(script)) is None  # nothing is committed
    git("add", "train.py")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD")
    assert commit_of(str(script)) == commit
    script.write_text("2\n")
    assert commit_of(str(script)) == f"{commit}, with changes"
    assert commit_of("-c") is None
    monkeypatch.chdir(repository)
    assert commit_of("-c") == f"{commit}, with changes"
    monkeypatch.setenv("PATH", str(elsewhere))
    assert commit_of(str(script)) is None


# ---- tokens


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, hidden_states: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.inner(hidden_states) * scale


CALLS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "plain": lambda layer, x: layer(x),
    "by name": lambda layer, x: layer(scale=2.0, hidden_states=x),
    "computed again": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "computed again by a function of torch": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
}


@pytest.mark.parametrize("way", CALLS)
def test_tokens_of_training_are_counted_once_however_they_come(way: str) -> None:
    layer = Layer()
    count = TokenCount(layer)
    x_BLM = torch.randn(2, 3, 4, requires_grad=True)
    for _ in range(2):
        CALLS[way](layer, x_BLM).sum().backward()
    layer.eval()
    layer(torch.randn(5, 4))
    layer.train()
    assert count.take() == 2 * 2 * 3
    assert count.take() == 0


# ---- memory


def test_memory_is_that_of_the_process_where_there_is_no_device_and_none_of_one_that_is_not_known() -> None:
    what, read = memory_reader(torch.device("cpu"))
    now_bytes, peak_bytes = read()
    assert what == OF_PROCESS
    assert 10**7 < now_bytes <= peak_bytes
    # Of the kernel itself: an allocator may have memory to give that the process held all along.
    with mmap.mmap(-1, 64 << 20) as kept:
        kept.write(b"1" * len(kept))
        assert read()[0] >= now_bytes + len(kept) // 2
    assert memory_reader(torch.device("meta")) is None


def test_memory_of_a_device_is_what_its_allocator_has_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"allocated_bytes": {"all": {"current": 5, "peak": 9}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("the host waited for the device"))
    what, read = memory_reader(torch.device("cuda"))
    assert (what, read()) == (ON_DEVICE, (5, 9))


# ---- steps


class Engine:
    """As much of an engine as the log of steps needs, and a tuner that counts its steps down."""

    def __init__(self, to_tune: int = 0) -> None:
        self.device = torch.device("cpu")
        self.module = Layer()
        self.global_steps = self.global_samples = 0
        self.to_tune = to_tune

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x).sum()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.global_steps += 1
        self.global_samples += 8
        self.to_tune -= 1  # inside of the engine's step


def rows_of(log: StepLog, engine: Any, num_steps: int) -> list[dict[str, Any]]:
    for _ in range(num_steps):
        engine.backward(engine.forward(torch.randn(6, 4)))
        engine.step()
    return [{name: each for name, each in row.items() if name not in ("stamps", "parts")} for row in log._waiting]


def test_a_step_is_marked_if_something_was_tried_when_it_began(tmp_path: Path) -> None:
    engine = Engine(3)
    log = StepLog(engine, tmp_path / "steps.jsonl", 100, 0)
    log.mark_tuning(lambda: engine.to_tune > 0)
    assert [row.get("is_tuning", False) for row in rows_of(log, engine, 5)] == [True, True, True, False, False]


@pytest.mark.parametrize(("settled_at", "ends_at"), [(0, 2), (3, 5), (9, 7)], ids=["at once", "later", "never"])
def test_a_job_ends_so_many_steps_after_plans_are_settled_or_at_its_bound(settled_at: int, ends_at: int) -> None:
    engine = Engine(settled_at)
    # A rank that writes nothing ends with the others.
    log = StepLog(engine, None, 100, 7, stop_after_settled=2)
    log.mark_tuning(lambda: False, lambda: engine.to_tune <= 0)
    with pytest.raises(SystemExit):
        rows_of(log, engine, 10)
    assert engine.global_steps == ends_at


def test_a_job_that_is_ended_ends_its_process_groups_behind_all_that_its_script_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr("ds_fsmoe.telemetry.record.atexit.register", at_exit.append)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    engine = Engine(0)
    log = StepLog(engine, None, 100, 2)
    with pytest.raises(SystemExit):
        rows_of(log, engine, 10)
    assert dist.is_initialized()
    (end,) = at_exit
    for _ in range(2):  # the script may have ended them itself
        end()
        assert not dist.is_initialized()
