# SPDX-License-Identifier: Apache-2.0
"""What a run tells of itself besides times: command, commit and config without secrets, tokens, memory, tuning."""

from __future__ import annotations

import mmap
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_fsmoe.telemetry.record import OF_PROCESS, ON_DEVICE, StepLog, TokenCount, commit_of, memory_reader

# ---- where a run came from


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")
    command = ["git", *who, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_commit_is_that_of_the_script_and_says_whether_files_were_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, elsewhere = tmp_path / "repository", tmp_path / "elsewhere"
    elsewhere.mkdir()
    repository.mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.chdir(elsewhere)
    script = repository / "train.py"
    script.write_text("1\n")
    assert commit_of(str(script)) is None
    git(repository, "init", "-q")
    assert commit_of(str(script)) is None  # nothing is committed
    git(repository, "add", "train.py")
    git(repository, "commit", "-qm", "one")
    commit = git(repository, "rev-parse", "HEAD")
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


@pytest.mark.parametrize("ahead", ["plain", "by name", "computed again", "computed again by a function of torch"])
def test_tokens_are_counted_once_however_they_come(ahead: str) -> None:
    layer = Layer()
    count = TokenCount(layer)
    x_BLM = torch.randn(2, 3, 4, requires_grad=True)
    for _ in range(2):
        if ahead == "plain":
            y = layer(x_BLM)
        elif ahead == "by name":
            y = layer(scale=2.0, hidden_states=x_BLM)
        else:
            y = checkpoint(layer, x_BLM, use_reentrant=ahead.endswith("torch"))
        y.sum().backward()
    assert count.take() == 2 * 2 * 3
    assert count.take() == 0


def test_tokens_of_an_evaluation_are_not_counted() -> None:
    layer = Layer()
    count = TokenCount(layer)
    layer.eval()
    layer(torch.randn(5, 4))
    layer.train()
    layer(torch.randn(7, 4))
    assert count.take() == 7


# ---- memory


def test_memory_of_a_process_is_read_where_there_is_no_device() -> None:
    what, read = memory_reader(torch.device("cpu"))
    now_bytes, peak_bytes = read()
    assert what == OF_PROCESS
    assert 10**7 < now_bytes <= peak_bytes
    # Of the kernel itself: an allocator may have memory to give that the process held all along.
    with mmap.mmap(-1, 64 << 20) as kept:
        kept.write(b"1" * len(kept))
        assert read()[0] >= now_bytes + len(kept) // 2


def test_memory_of_a_device_is_what_its_allocator_has_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"allocated_bytes": {"all": {"current": 5, "peak": 9}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("the host waited for the device"))
    what, read = memory_reader(torch.device("cuda"))
    assert (what, read()) == (ON_DEVICE, (5, 9))


def test_of_a_device_that_is_not_known_no_memory_is_told() -> None:
    assert memory_reader(torch.device("meta")) is None


# ---- steps


class Engine:
    """As much of an engine as the log of steps needs."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.module = Layer()
        self.global_steps = self.global_samples = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x).sum()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.global_steps += 1
        self.global_samples += 8


def rows_of(log: StepLog, engine: Any, num_steps: int) -> list[dict[str, Any]]:
    for _ in range(num_steps):
        engine.backward(engine.forward(torch.randn(6, 4)))
        engine.step()
    return [{name: each for name, each in row.items() if name not in ("stamps", "parts")} for row in log._waiting]


def test_a_step_has_its_tokens_and_memory(tmp_path: Path) -> None:
    engine = Engine()
    log = StepLog(engine, tmp_path / "steps.jsonl", 100, 0, TokenCount(engine.module))
    for row in rows_of(log, engine, 3):
        assert row["tokens_of_rank"] == 6
        assert 0 < row["memory_bytes"] <= row["memory_peak_bytes"]
        assert "is_tuning" not in row


def test_a_step_is_marked_if_something_was_tried_when_it_began(tmp_path: Path) -> None:
    engine, tuner = Engine(), SimpleNamespace(left=3)

    def step(inner: Any = engine.step) -> None:
        inner()
        tuner.left -= 1  # as the autotuner does, inside of the engine's step

    engine.step = step
    log = StepLog(engine, tmp_path / "steps.jsonl", 100, 0)
    log.mark_tuning(lambda: tuner.left > 0)
    assert [row.get("is_tuning", False) for row in rows_of(log, engine, 5)] == [True, True, True, False, False]


@pytest.mark.parametrize(("settled_at", "ends_at"), [(0, 2), (3, 5), (9, 7)], ids=["at once", "later", "never"])
def test_a_job_ends_so_many_steps_after_plans_are_settled_or_at_its_bound(
    settled_at: int, ends_at: int, tmp_path: Path
) -> None:
    engine, tuner = Engine(), SimpleNamespace(left=settled_at)

    def step(inner: Any = engine.step) -> None:
        inner()
        tuner.left -= 1

    engine.step = step
    # A rank that writes nothing ends with the others.
    log = StepLog(engine, None, 100, 7, stop_after_settled=2)
    log.mark_tuning(lambda: False, lambda: tuner.left <= 0)
    with pytest.raises(SystemExit):
        rows_of(log, engine, 10)
    assert engine.global_steps == ends_at
