# SPDX-License-Identifier: Apache-2.0
"""Measures variants of a training step side by side, so that what it prints can be believed.

::

    grid = Grid("unchunked", (Case("k = 1", Settings(k=1)), Case("k = 2", Settings(k=2))))
    run_grid(grid, [Variant("stock", make_stock), Variant("ours", make_ours)], baseline="stock",
             goals=[Goal("ours", at_least=1.2)])

Every rank calls it with the same arguments, in a process group or without one. The variants take turns step by step in
blocks, and the baseline is in the table twice: the row "A/A" says how far from 1 a ratio gets by chance. Further
baselines have tables and A/A rows of their own. A step takes as long as its slowest rank. All variants run in the same
process of a rank, so they have the same allocator; that ranks have the same is checked, and rows say which. Rows go to
``benchmarks/results/<grid name>.csv``, good or bad. Ratios have an interval from ``MIN_BLOCKS_TO_JUDGE`` blocks on; of
fewer there is none.
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import routing
from benchmarks.harness.allocator import described
from benchmarks.harness.cases import Case, Grid, check_unique
from benchmarks.harness.cpu_time import CpuTime, cpu_time
from benchmarks.harness.intervals import MIN_BLOCKS, MIN_BLOCKS_TO_JUDGE, check_blocks
from benchmarks.harness.outcome import (
    AA,
    ADDED,
    COLUMNS,
    PACKAGES,
    CaseResult,
    CpuShares,
    Goal,
    evaluate,
    rows,
    table,
)
from benchmarks.harness.rank_group import Ranks, RunError
from benchmarks.harness.result_files import RESULTS, append_rows, check_columns, hardware, made_with
from benchmarks.harness.routing import parsed
from ds_fsmoe.observing.clock import HOST, Clock

# All that a benchmark needs, from one place.
__all__ = [
    "AA",
    "RESULTS",
    "Case",
    "CaseResult",
    "Effort",
    "Goal",
    "Grid",
    "RunError",
    "Variant",
    "join_on_gloo",
    "run_grid",
]


def join_on_gloo(about: str, blocks: int = 10, no_routers: str = "") -> argparse.Namespace:
    """Join this rank to a job of a benchmark that needs no DeepSpeed, and return its options: blocks and results.

    Args:
        about: the benchmark, in its first line.
        blocks: unless others are asked for.
        no_routers: why routing changes nothing in it, if that is so.
    """
    import torch.distributed as dist

    from benchmarks.bed.full_duplex import use_both_directions

    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=blocks)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser, no_routers=no_routers)
    use_both_directions()
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    return args


@dataclass(frozen=True)
class Variant:
    """A way to do the step.

    Args:
        name: as in the table.
        make: called once per case with its settings, twice for the baseline; returns a callable that does one step. If
            that has a ``finish``, it is called after the steps of a turn, and timed with them: it waits for what a step
            has left under way, so that no other variant pays for it. If it has a ``close``, that is called when the
            case is done; not after a failure, which ends the run. What
            variants share must be made the same way by each, weights and random seeds too.
    """

    name: str
    make: Callable[[Any], Callable[[], object]]


@dataclass(frozen=True)
class Effort:
    """How long to measure: ``blocks`` of ``steps`` turns of every variant, after ``warmup`` turns of each.

    A turn is ``in_a_row`` steps of one variant, one unless more are asked for: what a step leaves under way for the
    next one of the same engine to hide (updated parameters) is hidden in all but the last. Times are turns', by step.

    With ``budget_s`` a case begins no further block after that many seconds by the clock of rank 0, but does as many as
    its results need. With ``judged`` its ratios are to have intervals, for somebody to judge by, and blocks are even
    in number, so that of two variants each goes ahead of the other as often.

    Raises:
        ValueError: fewer than 2 blocks, or than 10 or an odd number where it is judged, or no step in a block or turn.
    """

    blocks: int = 20
    steps: int = 4
    warmup: int = 3
    budget_s: float | None = None
    judged: bool = False
    in_a_row: int = 1

    def __post_init__(self) -> None:
        check_blocks(self.blocks)
        if self.judged:
            check_judged(self.blocks)
            if self.blocks % 2:
                raise ValueError(f"{self.blocks} blocks: to judge takes an even number, as every second goes backwards")
        if self.steps < 1 or self.warmup < 0:
            raise ValueError(f"blocks need at least 1 step, and warm-up at least 0: found {self.steps}, {self.warmup}")
        if self.in_a_row < 1:
            raise ValueError(f"in_a_row = {self.in_a_row}: a turn is at least 1 step")


def check_judged(blocks: int) -> None:
    """Refuse to judge by few blocks.

    Raises:
        ValueError: there are fewer than it takes.
    """
    if blocks < MIN_BLOCKS_TO_JUDGE:
        raise ValueError(f"{blocks} blocks: to judge by an interval takes {MIN_BLOCKS_TO_JUDGE} or more")


def block_order(num_variants: int, block: int) -> list[int]:
    """Who goes when in a block: every second block backwards, every two blocks another one first.

    By number alone, so that every rank does the same; whoever follows a heavy step never always does.
    """
    first = block // 2 % num_variants
    order = [(first + i) % num_variants for i in range(num_variants)]
    return order[::-1] if block % 2 else order


def run_grid(
    grid: Grid,
    variants: Sequence[Variant],
    baseline: str,
    effort: Effort | None = None,
    goals: Sequence[Goal] = (),
    results: Path = RESULTS,
    host: Clock = HOST,
    further: Mapping[str, Sequence[str]] | None = None,
) -> list[CaseResult]:
    """Measures every variant in every case, appends the rows of each case when it is done, prints the table at the end.

    Args:
        baseline: name of the variant that the others are compared with.
        effort: how long; the same on every rank.
        goals: what is to be reached; nothing but ``passed`` depends on it.
        results: folder of the CSV file.
        host: the clock of this rank.
        further: other baselines -> variants that are compared with each; each baseline is measured twice.

    Returns:
        The results, the same on every rank.

    Raises:
        ValueError: no such baseline, two variants of one name, a goal for what is not there or that cannot be judged.
        RunError: on every rank, if a variant fails on one, ranks differ in their allocator, or the file of results has
            other columns.
    """
    effort = effort or Effort()
    further = further or {}
    ordered = _check_run(grid, variants, baseline, effort, goals, further)
    file, done, made = results / f"{grid.name}.csv", [], {}
    ranks = Ranks()
    try:
        # Before anything is measured: an hour of work must not end at a file that cannot be written.
        with ranks.together("before the first case"):
            if ranks.rank == 0:
                check_columns(file, COLUMNS, ADDED)
                # Now, and not at the end: files may be edited while this process runs what it has loaded.
                made = made_with(PACKAGES)
        ranks.check_alike("the allocator", described())
        for case in grid.cases:
            done.append(_measure(case, ordered, effort, goals, ranks, host, further))
            with ranks.together(f"case {case.name!r}, rows"):
                if ranks.rank == 0:
                    # Now a GPU has been used, if there is to be one.
                    made["hardware"] = hardware()
                    append_rows(file, COLUMNS, rows(grid, done[-1], made, ranks.size), ADDED)
        if ranks.rank == 0:
            print(table(grid, done, made, ranks.size) + f"\nrows in {file}", flush=True)
    finally:
        ranks.close()
    return done


def _check_run(
    grid: Grid,
    variants: Sequence[Variant],
    baseline: str,
    effort: Effort,
    goals: Sequence[Goal],
    further: Mapping[str, Sequence[str]],
) -> list[Variant]:
    """The variants in the order of the table, the baseline twice, and the twins of further ones at the end."""
    names = [variant.name for variant in variants]
    if baseline not in names:
        raise ValueError(f"no baseline: there is no variant {baseline!r} among {names}")
    if AA in names:
        raise ValueError(f"{AA!r} is the name of the row that the harness adds: call the variant something else")
    check_unique("variants", names)
    compared = [name for name in names if name != baseline]
    for goal in goals:
        if goal.variant not in compared:
            raise ValueError(f"a goal for {goal.variant!r}, which is not compared with the baseline: {compared} are")
        if goal.case not in (None, *(case.name for case in grid.cases)):
            raise ValueError(f"a goal in case {goal.case!r}: there are {[case.name for case in grid.cases]}")
    if goals:
        check_judged(effort.blocks)
    for over, others in further.items():
        if over == baseline or not others or not {over, *others} <= set(names) or {over, baseline} & set(others):
            raise ValueError(
                f"further baseline {over!r} for {list(others)}: must be variants among {names}, all others"
            )
    first = variants[names.index(baseline)]
    others = [variant for variant in variants if variant is not first]
    twins = [Variant(_twin(each.name), each.make) for each in variants if each.name in further]
    return [first, Variant(AA, first.make), *others, *twins]


def _twin(baseline: str) -> str:
    return f"{AA} of {baseline}"


def _measure(
    case: Case,
    variants: Sequence[Variant],
    effort: Effort,
    goals: Sequence[Goal],
    ranks: Ranks,
    host: Clock,
    further: Mapping[str, Sequence[str]],
) -> CaseResult:
    """One case. Between the steps there is nothing but the one small all-reduce that lets all ranks start together."""
    of_case, num = f"case {case.name!r}, variant", len(variants)
    steps: list[Callable[[], object]] = []
    for variant in variants:
        with ranks.together(f"{of_case} {variant.name!r}, making it"):
            steps.append(variant.make(case.settings))
    # Not counted: what is compiled, allocated and connected in first steps.
    for step in range(effort.warmup):
        routing.at_step(step)
        for i in block_order(num, step):
            with ranks.together(f"{of_case} {variants[i].name!r}, warm-up step {step}"):
                _turn(steps[i], effort.in_a_row)
    times_ms, own_s = np.zeros((num, effort.blocks, effort.steps)), np.zeros(num)
    machine = [CpuTime(0.0, 0.0, 0.0)] * num
    began_s, blocks = host.monotonic(), 0
    while blocks < effort.blocks:
        for step in range(effort.steps):
            routing.at_step(effort.warmup + blocks * effort.steps + step)
            for i in block_order(num, blocks):
                with ranks.together(f"{of_case} {variants[i].name!r}, step {step} of block {blocks}"):
                    own_before_s, machine_before = _cpu_s(host), cpu_time()
                    _synchronize()
                    start_s = host.perf_counter()
                    _turn(steps[i], effort.in_a_row)
                    times_ms[i, blocks, step] = (host.perf_counter() - start_s) * 1e3 / effort.in_a_row
                    own_s[i] += (_cpu_s(host) - own_before_s) / effort.in_a_row
                    machine[i] += cpu_time() - machine_before
        blocks += 1
        enough = effort.budget_s is not None and blocks >= (
            MIN_BLOCKS_TO_JUDGE if goals or effort.judged else MIN_BLOCKS
        )
        if effort.judged and blocks % 2:
            continue
        # Rank 0 decides for all: clocks differ, and a rank that stopped alone would leave the others waiting.
        if enough and ranks.agree(host.monotonic() - began_s >= effort.budget_s):
            break
    for step in steps:
        getattr(step, "close", lambda: None)()
    times_ms = ranks.reduce(times_ms, "MAX")[:, :blocks]
    own_shares = ranks.reduce(own_s, "SUM") / (times_ms.sum(axis=(1, 2)) / 1e3 * ranks.num_cores)
    # Of several machines, the one that is busiest.
    of_machine = ranks.reduce(np.array([(each.busy_share, each.kernel_share) for each in machine]), "MAX")
    shares = [CpuShares(own, *of) for own, of in zip(own_shares.tolist(), of_machine.tolist(), strict=True)]
    names = [variant.name for variant in variants]

    def over(baseline: str, others: Sequence[str]) -> CaseResult:
        at = [names.index(each) for each in (baseline, _twin(baseline), *others)]
        chosen = times_ms[at], [shares[i] for i in at]
        return evaluate(case, [baseline, AA, *others], *chosen, over=baseline)

    own = num - len(further)
    found = evaluate(case, names[:own], times_ms[:own], shares[:own], goals)
    return replace(found, further=tuple(over(*each) for each in further.items()))


def _turn(step: Callable[[], object], in_a_row: int) -> None:
    """Do some steps of one variant, and wait for what they have left under way."""
    for _ in range(in_a_row):
        step()
    getattr(step, "finish", lambda: None)()
    _synchronize()


def _cpu_s(host: Clock) -> float:
    """Seconds of CPU used by this process so far: all threads, and children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return host.process_time() + children.ru_utime + children.ru_stime


def _synchronize() -> None:
    """Waits for the GPU, if this process uses one; nothing is loaded or set up to find out."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
