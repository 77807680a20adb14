# SPDX-License-Identifier: Apache-2.0
"""How fast the planner decides, and whether it is right: every claim about it, measured.

``python benchmarks/cases/bench_planner.py`` (numpy and scipy are enough; a quarter of an hour). Rows go to
``benchmarks/results/planner.csv``: what was asked, what came out, what was wanted, whether it was reached. ``--quick``
asks for less of everything, says so in the rows, and is no result to quote.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.result_files import RESULTS, append_rows, made_with
from benchmarks.harness.routing import parsed
from benchmarks.simulations import paper
from ds_fsmoe.planning.batch import Template, makespans_ms
from ds_fsmoe.planning.block import BlockPlan, Slice, block_schedule
from ds_fsmoe.planning.block_times import BlockTimes, PhaseTimes
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.degree import Load, Phase, choose_exact, choose_slsqp, makespan_ms, smallest_of_best
from ds_fsmoe.planning.paper_models import MODELS
from ds_fsmoe.planning.plan import Planner, Settings, plan_by_name
from ds_fsmoe.planning.presets import NAMES, PRESETS
from ds_fsmoe.planning.schedule import A2A_IN, A2A_OUT, EXPERT, GATHER, GRAD, REDUCE, Lane
from ds_fsmoe.planning.search import SearchSpace, choose
from ds_fsmoe.planning.timeline import Contention
from ds_fsmoe.planning.workload import BlockWork, MoEWork, Work, layer_work

FILE = RESULTS / "planner.csv"
KAPPAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
DEGREES = 64


@dataclass(frozen=True)
class Row:
    """One claim."""

    claim: str
    cases: str
    value: float
    unit: str
    wanted: str
    reached: bool


def main() -> int:
    """Measure, print, append. Returns 1 if something that was wanted was not reached."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    quick = parsed(parser, no_routers="plans are made for counts that its cases give, without a router").quick
    # Now, and not at the end: files may be edited meanwhile.
    made = made_with(("numpy", "scipy")) | {"quick": quick}
    rows: list[Row] = []
    for part in (speed, exactness, table_5, best_over_all, papers_method):
        for row in part(quick):
            mark = "" if row.reached else "   <-- not reached"
            print(f"{row.claim} ({row.cases}): {row.value:.4g} {row.unit}, wanted {row.wanted}{mark}", flush=True)
            rows.append(row)
    claims = [made | asdict(row) | {"value": f"{row.value:.6g}"} for row in rows]
    append_rows(FILE, [*made, *(field.name for field in fields(Row))], claims)
    missed = [row for row in rows if not row.reached]
    print(f"\n{len(rows) - len(missed)} of {len(rows)} reached; rows in {FILE}")
    return 1 if missed else 0


# ---- how fast


def median_ms(work: Callable[[], object], repeats: int) -> float:
    """Median over repeats, each timed alone."""
    times_ms = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times_ms.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times_ms)


def speed(quick: bool) -> list[Row]:
    """Time per decision."""
    repeats = 5 if quick else 30
    rows = []
    for letter in "ab":
        bed = paper.load_bed(letter)
        layer = layer_work(paper.layers_of(bed, 1)[0], bed.groups)
        phase = BlockTimes(layer.backward, bed.costs).phase(grad_ms=3.0)
        took_ms = median_ms(lambda p=phase: choose_exact(p, DEGREES), 10 * repeats)
        rows.append(Row(f"closed form, testbed {letter}", f"degrees 1 to {DEGREES}", took_ms, "ms", "< 1", took_ms < 1))
        for name, settings in (("contended", Settings(bed.cluster.contention)), ("host cost", Settings(host_ms=0.05))):
            times = BlockTimes(layer.backward, bed.costs, settings.contention, settings.host_ms)
            phase, space = PhaseTimes(times, grad_ms=3.0), SearchSpace.of("fsmoe", 16)
            took_ms = median_ms(lambda p=phase, s=space: choose(p, p, s), repeats)
            claim = f"event simulation, {name}, testbed {letter}"
            rows.append(Row(claim, "degrees 1 to 16, both phases", took_ms, "ms", "< 50", took_ms < 50))
        # 32 layers of Mixtral-7B, from nothing: no plan of another layer is reused.
        layers = (layer_work(replace(MODELS["mixtral-7b"].shape, E=bed.num_experts), bed.groups),) * 32
        for name in ("fsmoe", "best"):
            for what, contention in (("ideal", Contention()), ("contended", bed.cluster.contention)):
                took_ms = median_ms(
                    lambda n=name, c=contention, ls=layers, b=bed: plan_by_name(Planner(b.costs, Settings(c)), n, ls),
                    max(3, repeats // 6),
                )
                claim = f"32 layers with gradients, {name}, {what}, testbed {letter}"
                rows.append(Row(claim, "1 model", took_ms / 1e3, "s", "< 1", took_ms < 1e3))
    return rows


# ---- whether it is right


def simulated_ms(phases: list[Phase], degree: int) -> np.ndarray:
    """The order that the closed form speaks of, as tasks, played for all layers at once."""
    lane_of = {A2A_IN: Lane.INTER, GATHER: Lane.INTRA, EXPERT: Lane.COMPUTE, REDUCE: Lane.INTRA, A2A_OUT: Lane.INTER}
    enter, gather, expert, reduce, leave = (Work(kind, (lane,)) for kind, lane in lane_of.items())
    block = BlockWork((), MoEWork((enter,), (gather,), expert, (reduce,), (leave,)), ())
    plan = BlockPlan(degree, "paper", moe_slices=(Slice(GRAD, (Lane.INTER,), 0.0),))
    schedule = block_schedule(block, plan)
    a, g, e, s = np.array([phase.chunk_times_ms(degree) for phase in phases]).T
    # A gradient that is not there takes no time where it would stand, and holds nothing up: the lane has its order.
    of_kind = {A2A_IN: a, GATHER: g, EXPERT: e, REDUCE: s, A2A_OUT: a, GRAD: np.array([p.grad_ms for p in phases])}
    task_ms = np.stack([of_kind[task.kind] for task in schedule.tasks])
    return makespans_ms([(Template.of(schedule), task_ms)])[0]


def exactness(quick: bool) -> list[Row]:
    """Closed form against event simulation, and the choice against brute force over all degrees by simulation."""
    rows = []
    for letter in "ab":
        bed = paper.load_bed(letter)
        phases = [phase for shape in paper.layers_of(bed, 50 if quick else None) for phase in paper.phases(bed, shape)]
        rows += compared(f"layers of table 4, testbed {letter}, both phases", phases)
    rng = random.Random(0)
    rows += compared(
        "random layers, gather and reduce differ", [random_phase(rng) for _ in range(100 if quick else 10_000)]
    )
    return rows


def random_phase(rng: random.Random) -> Phase:
    """Any layer: every alpha may be 0, and a gradient may travel in it."""

    def load() -> Load:
        return Load(LinearCost(rng.choice([0.0, 0.3 * rng.random()]), rng.random()), 20 * rng.random())

    return Phase(load(), load(), load(), load(), rng.choice([0.0, 30 * rng.random()]))


def compared(name: str, phases: list[Phase]) -> list[Row]:
    """Two claims about a list of layers."""
    played_ms = np.stack([simulated_ms(phases, degree) for degree in range(1, DEGREES + 1)], axis=1)
    off = wrong = 0
    for phase, times_ms in zip(phases, played_ms, strict=True):
        closed_ms = np.array([makespan_ms(phase, degree) for degree in range(1, DEGREES + 1)])
        off += int((np.abs(closed_ms - times_ms) > 1e-9 * closed_ms).sum())
        wrong += choose_exact(phase, DEGREES).degree != 1 + smallest_of_best(times_ms)
    cases = f"{len(phases)} phases x {DEGREES} degrees"
    return [
        Row(f"closed form differs from simulation: {name}", cases, off, "cases", "0", off == 0),
        Row(f"choice differs from brute force: {name}", cases, wrong, "cases", "0", wrong == 0),
    ]


# ---- what it says


def table_5(quick: bool) -> list[Row]:
    """The paper's table 5, and who is never slower than whom on ideal links."""
    rows = []
    for letter, wanted in (("a", 1.38), ("b", 1.41)):
        bed = paper.load_bed(letter)
        table = paper.table_5(bed, sample=60 if quick else None)
        cases = f"{table.num_layers} layers"
        ideal = table.ideal["fsmoe"]
        near = abs(ideal - wanted) < 0.015
        rows.append(Row(f"fsmoe over tutel, ideal, testbed {letter}", cases, ideal, "x", f"about {wanted}", near))
        for name, printed in paper.TABLE_5[letter].items():
            value = table.contended[name]
            claim = f"{name} over tutel, contended, testbed {letter}"
            rows.append(Row(claim, cases, value, "x", f"{printed} +- 0.04", abs(value - printed) <= 0.04))
        for name in ("fsmoe_no_iio", "tutel_improved", "tutel", "deepspeed"):
            pairs = zip(table.layers_ms["fsmoe"], table.layers_ms[name], strict=True)
            slower = sum(a > b * (1 + 1e-9) for a, b in pairs)
            claim = f"fsmoe slower than {name} on ideal links, testbed {letter}"
            rows.append(Row(claim, cases, slower, "layers", "0", slower == 0))
    return rows


def best_over_all(quick: bool) -> list[Row]:
    """``best`` against every preset, planned and played at every kappa; and what it gains over fsmoe."""
    rows = []
    for letter in "ab":
        bed = paper.load_bed(letter)
        shapes = paper.layers_of(bed, 6 if quick else 120)
        gains: list[float] = []
        for kappa in KAPPAS:
            contention, losses = Contention(kappa), 0
            for shape in shapes if kappa == 0 else shapes[: len(shapes) // 4]:
                layer = layer_work(shape, bed.groups)
                planner = Planner(bed.costs, Settings(contention))
                times_ms = {
                    name: plan_by_name(planner, name, paper.steady_state(layer), layer.gradients).step_ms(
                        bed.costs, contention
                    )
                    for name in NAMES
                }
                losses += times_ms["best"] > min(times_ms.values()) * (1 + 1e-9)
                if kappa == 0:
                    gains.append(times_ms["fsmoe"] / times_ms["best"])
            cases = f"{len(shapes) if kappa == 0 else len(shapes) // 4} layers x {len(PRESETS)} presets"
            claim = f"best slower than a preset at kappa = {kappa}, testbed {letter}"
            rows.append(Row(claim, cases, losses, "layers", "0", losses == 0))
        mean = statistics.fmean(gains)
        rows.append(
            Row(f"best over fsmoe, ideal, testbed {letter}", f"{len(gains)} layers", mean, "x", ">= 1.03", mean >= 1.03)
        )
    return rows


def papers_method(quick: bool) -> list[Row]:
    """Algorithm 1 with SLSQP beside the exact search: what it loses, what it takes."""
    rows = []
    for letter in "ab":
        bed = paper.load_bed(letter)
        losses, took_ms = [], []
        for shape in paper.layers_of(bed, 5 if quick else 100):
            for phase in paper.phases(bed, shape):
                start = time.perf_counter()
                found = choose_slsqp(phase)
                took_ms.append((time.perf_counter() - start) * 1e3)
                losses.append(found.makespan_ms / choose_exact(phase).makespan_ms - 1)
        cases = f"{len(losses)} phases"
        mean, worst = statistics.fmean(losses), max(losses)
        rows.append(Row(f"slsqp slower than exact, mean, testbed {letter}", cases, 100 * mean, "%", ">= 0", mean >= 0))
        rows.append(
            Row(f"slsqp slower than exact, worst, testbed {letter}", cases, 100 * worst, "%", ">= 0", worst >= 0)
        )
        time_ms = statistics.median(took_ms)
        rows.append(Row(f"slsqp, testbed {letter}", cases, time_ms, "ms", "the paper: 193", True))
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
