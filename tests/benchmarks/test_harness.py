# SPDX-License-Identifier: Apache-2.0
"""The harness of the benchmarks: its cases, its runs, its ranks, its files."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness import harness, rank_group
from benchmarks.harness.cpu_time import CpuTime, cpu_time
from benchmarks.harness.harness import AA, Case, Effort, Goal, Grid, RunError, Variant, run_grid
from benchmarks.harness.outcome import ADDED, COLUMNS
from benchmarks.harness.result_files import append_rows, commit
from tests.benchmarks.harness_cases import GRID, QUICK, Settings, grid_of, read, sleeper
from tests.fake_clock import FakeClock
from tests.ranks import run_on_ranks
from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Loose:
    k: int = 1


@dataclass(frozen=True)
class Holds:
    inside: Any


# ---- cases


def test_the_hash_lasts_and_changes_with_every_setting() -> None:
    # Written down: another process, another version of Python, another order of the cases must give the same.
    pair = (Case("a", Settings()), Case("b", Settings(k=2)))
    assert Grid("example", pair).digest == Grid("renamed", pair[::-1]).digest == "444028060850"
    others = [{"k": 2}, {"dtype": "bf16"}, {"rates": (1.0,)}, {"rates": (2.5, 1.0)}, {"k": 1.0}, {"k": True}]
    digests = [grid_of(**settings).digest for settings in ({}, *others)]
    digests.append(Grid("example", (Case("other name", Settings()),)).digest)
    assert len(set(digests)) == len(digests)
    assert all(len(digest) == 12 and int(digest, 16) >= 0 for digest in digests)


@pytest.mark.parametrize(
    "settings",
    [Loose(), {"k": 1}, Settings, None, Holds([1]), Holds({1: 2}), Holds((1, [2])), Holds(Loose()), Holds(np.ones(1))],
)
def test_settings_that_could_change_are_refused(settings: Any) -> None:
    with pytest.raises(ValueError, match="case 'bad': settings"):
        Case("bad", settings)


def test_a_case_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GRID.cases[0].settings.k = 3
    assert hash(GRID) == hash(grid_of())


@pytest.mark.parametrize("cases", [(), (Case("a", Settings()), Case("a", Settings(k=2)))])
def test_a_grid_needs_cases_of_different_names(cases: tuple[Case, ...]) -> None:
    with pytest.raises(ValueError, match="a name of its own"):
        Grid("example", cases)


def test_without_ranks_neither_torch_nor_deepspeed_is_loaded(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from benchmarks.harness.harness import run_grid\n"
        "from tests.benchmarks.harness_cases import GRID, QUICK, FakeClock, sleeper\n"
        "run_grid(GRID, [sleeper(FakeClock(), 'stock', 1)], 'stock', QUICK, results=Path(sys.argv[1]))\n"
        "assert not {'torch', 'deepspeed'} & set(sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "example.csv").exists()


# ---- runs


def test_really_faster_passes_and_no_faster_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock = FakeClock()
    variants = [sleeper(clock, "fast", 8), sleeper(clock, "stock", 12), sleeper(clock, "same", 12)]
    goals = [Goal("fast", 1.2), Goal("same", 1.2)]
    (result,) = run_grid(GRID, variants, "stock", Effort(blocks=10, steps=3, warmup=1), goals, tmp_path, clock)
    assert [row.name for row in result.variants] == ["stock", AA, "fast", "same"]
    assert [row.passed for row in result.variants] == [None, None, True, False]
    assert result.variants[2].speedup.middle == pytest.approx(1.5)
    said = capsys.readouterr().out
    lines = [line.split()[0] for line in said.splitlines() if " to " in line]
    assert lines == ["stock", AA, "fast", "same"]
    assert "p50 ms" in said
    assert GRID.digest in said
    assert "goal 1.2: reached" in said
    assert "goal 1.2: NOT reached" in said
    # What failed is written, too.
    written = read(tmp_path / "example.csv")
    assert [(row["variant"], row["goal"], row["passed"]) for row in written] == [
        ("stock", "", ""),
        (AA, "", ""),
        ("fast", "1.2", "True"),
        ("same", "1.2", "False"),
    ]


def test_rows_say_what_was_measured_on_what(tmp_path: Path) -> None:
    clock, effort = FakeClock(), Effort(blocks=3, steps=2, warmup=0)
    run_grid(grid_of(k=2), [sleeper(clock, "stock", 2)], "stock", effort, results=tmp_path, host=clock)
    stock, aa = read(tmp_path / "example.csv")
    assert tuple(stock) == COLUMNS
    assert json.loads(stock["settings"]) == {"k": 2, "dtype": "fp32", "rates": [1.0, 2.5]}
    said = [stock[column] for column in ("ranks", "grid", "case", "variant", "unit", "steps", "ratio")]
    assert said == ["1", grid_of(k=2).digest, "only", "stock", "ms", "6", "1.0000"]
    assert aa["variant"] == AA
    assert [float(stock[each]) for each in ("p20", "p50", "p80")] == [2.0] * 3
    assert all(stock[column] for column in ("date", "commit", "hardware", "python", "torch", "ds_fsmoe"))
    # It slept.
    assert float(stock["cpu_share"]) == 0.0
    assert stock["cpu_bound"] == "False"


def test_the_cpu_share_is_that_of_the_steps(tmp_path: Path) -> None:
    clock = FakeClock()

    def burn() -> None:
        clock.compute(0.02)
        clock.sleep(0.01)

    variants = [Variant("stock", lambda settings: burn), sleeper(clock, "idle", 20)]
    (result,) = run_grid(GRID, variants, "stock", Effort(blocks=2, steps=3, warmup=0), results=tmp_path, host=clock)
    busy, _, idle = result.variants
    # 20 ms of CPU in steps of 30 ms, on all cores together.
    assert busy.cpu.ranks * rank_group.Ranks().num_cores == pytest.approx(20 / 30)
    assert idle.cpu.ranks == 0.0
    assert 0.0 <= busy.cpu.network <= busy.cpu.machine < 1.001


def test_what_a_step_leaves_under_way_is_timed_with_its_own_turn_and_by_step(tmp_path: Path) -> None:
    clock, order = FakeClock(), []

    class Leaves:
        def __init__(self, name: str, rest_s: float) -> None:
            self.name, self._rest_s = name, rest_s

        def __call__(self) -> None:
            order.append(self.name)
            clock.sleep(0.01)

        def finish(self) -> None:
            order.append(f"{self.name} waits")
            clock.sleep(self._rest_s)

    variants = [
        Variant("stock", lambda settings: Leaves("stock", 0.0)),
        Variant("ours", lambda settings: Leaves("ours", 0.02)),
    ]
    effort = Effort(blocks=2, steps=1, warmup=0, in_a_row=2)
    (result,) = run_grid(GRID, variants, "stock", effort, results=tmp_path, host=clock)
    stock, _, ours = result.variants
    assert (stock.p50_ms, ours.p50_ms) == pytest.approx((10.0, 20.0))
    assert order[:6] == ["stock", "stock", "stock waits"] * 2
    assert order[6:9] == ["ours", "ours", "ours waits"]


def test_the_machines_time_is_read_from_the_kernels_count(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 30 800 50 5 15 0 0 0\ncpu0 1 2 3\n")
    tick = os.sysconf("SC_CLK_TCK")
    found = cpu_time(stat)
    assert (found.total_s, found.busy_s, found.kernel_s) == (1000 / tick, 150 / tick, 50 / tick)
    assert ((found - CpuTime(0, 0, 0)).busy_share, found.kernel_share) == (0.15, 0.05)
    assert CpuTime(0.4, 0.4, 0.4).busy_share == 0.0
    assert cpu_time(tmp_path / "none").busy_share == 0.0


def test_each_case_has_its_own_instances_and_closes_them(tmp_path: Path) -> None:
    log: list[tuple[str, int]] = []

    class Step:
        def __init__(self, settings: Settings) -> None:
            self.k = settings.k
            log.append(("made", self.k))

        def __call__(self) -> None:
            log.append(("step", self.k))

        def close(self) -> None:
            log.append(("closed", self.k))

    grid = Grid("example", (Case("one", Settings(k=1)), Case("two", Settings(k=2))))
    run_grid(grid, [Variant("stock", Step)], "stock", Effort(blocks=2, steps=3, warmup=2), results=tmp_path)
    # The baseline and A/A: 2 + 2 * 3 steps of each.
    expected = [[("made", k)] * 2 + [("step", k)] * 16 + [("closed", k)] * 2 for k in (1, 2)]
    assert log == expected[0] + expected[1]


def test_every_variant_is_as_often_in_every_place() -> None:
    for num in (2, 3, 4):
        orders = [harness.block_order(num, block) for block in range(4 * num)]
        assert all(sorted(order) == list(range(num)) for order in orders)
        assert all(sum(order[place] == i for order in orders) == 4 for place in range(num) for i in range(num))
    assert harness.block_order(3, 0) == [0, 1, 2]
    assert harness.block_order(3, 1) == [2, 1, 0]
    assert harness.block_order(3, 2) == [1, 2, 0]


def test_a_budget_ends_a_case_after_the_blocks_that_its_results_need(tmp_path: Path) -> None:
    effort = Effort(blocks=1000, steps=1, warmup=0, budget_s=0.0)
    clock = FakeClock()
    variants = [sleeper(clock, "stock", 1), sleeper(clock, "ours", 1)]
    (short,) = run_grid(GRID, variants, "stock", effort, results=tmp_path, host=clock)
    (judged,) = run_grid(GRID, variants, "stock", effort, [Goal("ours", 1.2)], tmp_path, clock)
    assert (short.steps, judged.steps) == (2, 10)


# ---- ranks


def two_ranks(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    called: list[str] = []
    clock = FakeClock()

    def make(name: str, ms: float) -> Variant:
        # Rank 1 is the slow one of "ours", rank 0 of stock.
        slow = rank == (name == "ours")

        def step() -> None:
            called.append(name)
            clock.sleep(ms / 1e3 if slow else 0.001)

        return Variant(name, lambda settings: step)

    variants = [make("stock", 15), make("ours", 30)]
    effort = Effort(blocks=4, steps=1, warmup=0)
    (result,) = run_grid(GRID, variants, "stock", effort, results=Path(folder), host=clock)
    # Clocks that disagree: what rank 0 thinks of the time counts.
    clock.monotonic = clock.perf_counter if rank == 0 else lambda: -1e9
    budget = Effort(blocks=50, steps=1, warmup=0, budget_s=0.15)
    (ended,) = run_grid(GRID, variants, "stock", budget, results=Path(folder), host=clock)
    return {"called": called, "result": result, "steps": ended.steps}


def test_two_ranks_take_the_same_turns_and_a_step_is_as_long_as_its_slowest_rank(tmp_path: Path) -> None:
    first, second = run_on_ranks(two_ranks, 2, tmp_path / "ranks", str(tmp_path))
    names = ["stock", "stock", "ours"]
    assert first["called"] == second["called"]
    assert first["called"][:12] == [names[i] for block in range(4) for i in harness.block_order(3, block)]
    # Equal to the last bit, percentiles, ratios and shares of the CPU.
    assert first["result"] == second["result"]
    stock, aa, ours = first["result"].variants
    assert [stock.p20_ms, stock.p80_ms, aa.p20_ms] == pytest.approx([15.0] * 3)
    assert [ours.p20_ms, ours.p80_ms] == pytest.approx([30.0] * 2)
    # A block of the baseline, A/A and ours takes rank 0 15 + 15 + 1 ms, and 150 ms are over in the fifth.
    assert first["steps"] == second["steps"] == 5
    written = read(tmp_path / "example.csv")
    assert {row["ranks"] for row in written} == {"2"}
    assert len(written) == 6


def failing_ranks(rank: int, world_size: int, folder: str, with_collective: bool) -> str:
    import torch
    import torch.distributed as dist

    # So long the failed rank waits for the others, which come if they are not in a collective.
    rank_group.FAILURE_WAIT_S = 1.0 if with_collective else LIMIT_S
    count = iter(range(100))

    def step() -> None:
        if next(count) == 2 and rank == 1:
            raise MemoryError("no room")
        if with_collective:
            dist.all_reduce(torch.zeros(1))

    variants = [sleeper(FakeClock(), "stock", 1), Variant("ours", lambda settings: step)]
    try:
        run_grid(GRID, variants, "stock", Effort(blocks=4, steps=1, warmup=1), results=Path(folder))
    except RunError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("with_collective", [False, True])
def test_a_variant_that_fails_on_one_rank_ends_the_run_on_all(tmp_path: Path, with_collective: bool) -> None:
    waiting, failed = run_on_ranks(failing_ranks, 2, tmp_path / "ranks", str(tmp_path), with_collective)
    where = "case 'only', variant 'ours', step 0 of block 1"
    assert failed == f"{where}, rank 1: MemoryError: no room"
    assert waiting.startswith(where)
    if not with_collective:
        assert waiting == f"{where}: rank 1 failed, and says why"
    # Nothing half-measured is written.
    assert not (tmp_path / "example.csv").exists()


# ---- files


def test_a_file_with_other_columns_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "example.csv"
    before = "date,commit,speed\n2026-01-01,abc,3\n"
    file.write_text(before)
    called = []
    variants = [Variant("stock", lambda settings: lambda: called.append(1))]
    with pytest.raises(RunError, match=r"example.csv has other columns: it lacks .*'hardware'.* and has \['speed'\]"):
        run_grid(GRID, variants, "stock", QUICK, results=tmp_path)
    assert file.read_text() == before
    assert called == []
    with pytest.raises(ValueError, match=r"example.csv has other columns: they stand in another order"):
        append_rows(file, ("commit", "date", "speed"), [{"date": 1, "commit": 2, "speed": 3}])
    assert file.read_text() == before


def test_rows_with_other_columns_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    for row in ({"a": 1}, {"a": 1, "b": 2, "c": 3}):
        with pytest.raises(ValueError, match="a row for"):
            append_rows(tmp_path / "x.csv", ("a", "b"), [{"a": 1, "b": 2}, row])
    assert not (tmp_path / "x.csv").exists()


def test_rows_are_appended_after_those_that_are_there_even_after_a_line_that_was_cut(tmp_path: Path) -> None:
    file = tmp_path / "deeper" / "x.csv"
    append_rows(file, ("a", "b"), [{"a": 1, "b": 'says "x, y"'}])
    append_rows(file, ("a", "b"), [{"b": 3, "a": 2}])
    assert read(file) == [{"a": "1", "b": 'says "x, y"'}, {"a": "2", "b": "3"}]
    with file.open("a") as opened:
        opened.write("4")
    append_rows(file, ("a", "b"), [{"a": 5, "b": 6}])
    assert read(file)[2:] == [{"a": "4", "b": None}, {"a": "5", "b": "6"}]


def test_a_commit_says_when_the_tree_has_changed_but_new_results_do_not_count(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=x", "-c", "user.email=x")
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    assert commit(tmp_path) == "unknown"
    git("init", "-q")
    (tmp_path / "code.py").write_text("1")
    git("add", "code.py")
    git("commit", "-q", "-m", "x")
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    (tmp_path / "benchmarks/results/x.csv").write_text("a")
    clean = commit(tmp_path)
    assert int(clean, 16) >= 0
    (tmp_path / "code.py").write_text("2")
    assert commit(tmp_path) == f"{clean}+dirty"


def test_a_file_without_the_columns_that_were_added_of_late_gets_them_and_keeps_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "example.csv"
    old = [each for each in COLUMNS if each not in ADDED]
    append_rows(file, old, [dict.fromkeys(old, 'before, "quoted"\r\nand in two lines')])
    clock = FakeClock()
    run_grid(GRID, [sleeper(clock, "stock", 1)], "stock", QUICK, results=tmp_path, host=clock)
    rows = read(file)
    assert tuple(rows[0]) == COLUMNS
    assert [rows[0][each] for each in ADDED] == [""] * len(ADDED)
    assert {rows[0][each] for each in old} == {'before, "quoted"\r\nand in two lines'}
    assert [(row["blocks"], row["variant"]) for row in rows[1:]] == [("2", "stock"), ("2", AA)]
    assert list(tmp_path.iterdir()) == [file]


# ---- further baselines


def test_every_baseline_that_a_ratio_uses_is_measured_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock, made = FakeClock(), []

    def counted(name: str, ms: float) -> Variant:
        one = sleeper(clock, name, ms)
        return Variant(name, lambda settings: made.append(name) or one.make(settings))

    variants = [counted("stock", 12), counted("stock elsewhere", 8), counted("ours elsewhere", 4)]
    effort = Effort(blocks=10, steps=1, warmup=0, judged=True)
    further = {"stock elsewhere": ["ours elsewhere"]}
    (result,) = run_grid(GRID, variants, "stock", effort, results=tmp_path, host=clock, further=further)
    assert sorted(made) == ["ours elsewhere", "stock", "stock", "stock elsewhere", "stock elsewhere"]
    assert [row.name for row in result.variants] == ["stock", AA, "stock elsewhere", "ours elsewhere"]
    assert result.variants[3].speedup.middle == pytest.approx(3)
    (beside,) = result.further
    assert [row.name for row in beside.variants] == ["stock elsewhere", AA, "ours elsewhere"]
    assert beside.variants[2].speedup.middle == pytest.approx(2)
    rows = [row for row in read(tmp_path / "example.csv") if row["over"]]
    assert [(row["over"], row["variant"], row["ratio"]) for row in rows] == [
        ("stock elsewhere", "stock elsewhere", "1.0000"),
        ("stock elsewhere", AA, "1.0000"),
        ("stock elsewhere", "ours elsewhere", "2.0000"),
    ]
    assert "times faster than stock elsewhere" in capsys.readouterr().out


def test_of_two_variants_each_goes_first_in_half_of_an_even_number_of_blocks() -> None:
    for num in (2, 3, 14):
        orders = [harness.block_order(num, block) for block in range(10)]
        for one in range(num):
            for other in set(range(num)) - {one}:
                assert sum(order.index(one) < order.index(other) for order in orders) == 5


def test_what_is_judged_ends_after_an_even_number_of_blocks_when_its_time_is_over(tmp_path: Path) -> None:
    clock = FakeClock()
    # Both together take 20 s a block: the 11th begins ahead of the end of the budget.
    effort = Effort(blocks=40, steps=1, warmup=0, budget_s=210, judged=True)
    (result,) = run_grid(GRID, [sleeper(clock, "stock", 10_000)], "stock", effort, results=tmp_path, host=clock)
    assert result.blocks == 12


# ---- memory


def faults_of(option: str) -> tuple[int, str]:
    """How many pages a process gets from the system for buffers that it makes and drops, and what its rows say."""
    program = (
        "import ctypes, resource, sys; from argparse import ArgumentParser\n"
        "from benchmarks.harness.routing import parsed\n"
        "parsed(ArgumentParser(), sys.argv[1:])\n"
        "from benchmarks.harness.allocator import described\n"
        "libc = ctypes.CDLL(None); libc.malloc.restype = ctypes.c_void_p; libc.free.argtypes = [ctypes.c_void_p]\n"
        "size = 1 << 26\n"
        "def once():\n"
        "    buffer = libc.malloc(ctypes.c_size_t(size)); ctypes.memset(buffer, 1, size); libc.free(buffer)\n"
        "once()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(4): once()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, described(), sep='|')"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", program, "--allocator", option]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=clean | {"THP_MEM_ALLOC_ENABLE": "0"})
    assert found.returncode == 0, found.stderr
    count, said = found.stdout.strip().split("|")
    return int(count), said


def test_the_allocator_keeps_large_buffers_and_a_row_says_whether_it_does() -> None:
    kept, own = faults_of("kept"), faults_of("own")
    # Buffers of 64 MiB, four times: by itself malloc gets all pages of each anew.
    assert kept[0] < 100 < own[0]
    assert kept[1] == "malloc keeps memory; THP_MEM_ALLOC_ENABLE=0"
    assert own[1] == "malloc's own; THP_MEM_ALLOC_ENABLE=0"


def differs_by_rank(rank: int, world_size: int, folder: str) -> str:
    os.environ["MALLOC_ARENA_MAX"] = str(rank)
    try:
        run_grid(GRID, [sleeper(FakeClock(), "stock", 1)], "stock", QUICK, results=Path(folder))
    except RunError as error:
        return str(error)
    finally:
        del os.environ["MALLOC_ARENA_MAX"]
    return ""


def test_ranks_whose_allocators_differ_are_refused_on_every_rank(tmp_path: Path) -> None:
    said = run_on_ranks(differs_by_rank, 2, tmp_path / "ranks", str(tmp_path))
    assert all("the allocator differs between ranks" in each for each in said)
    assert all("MALLOC_ARENA_MAX=0" in each and "MALLOC_ARENA_MAX=1" in each for each in said)
