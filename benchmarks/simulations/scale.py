# SPDX-License-Identifier: Apache-2.0
"""Known models on known clusters, simulated from few GPUs to thousands: how well they scale, and what limits them.

Scaling is weak: every GPU has the same samples at every size. A model is tried with its experts inside a node, spread
over as many ranks as can be, and over what lies between by doubling; and where they lie on several ranks of several
nodes with a flat all-to-all and with one that crosses to each node once.

``python -m benchmarks.simulations.scale`` simulates five models on five clusters from 8 to 4096 GPUs, in twelve minutes
of processor time (numpy and scipy are enough). ``benchmarks/notes/scale.md`` says what comes out.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from benchmarks.simulations.layouts import (
    Job,
    Variant,
    cluster_of,
    crossings_of,
    dtype_bytes_of,
    model_of,
    variants,
)
from benchmarks.simulations.steady_state import ComposedPlan, plan_composed
from ds_fsmoe.offline.models.model_layers import commonest_moe, model_layers, moe_shape
from ds_fsmoe.planning.cost import Cost, LinearCost
from ds_fsmoe.planning.decide.bounds import step_bounds_ms
from ds_fsmoe.planning.decide.plan import Planner, Settings
from ds_fsmoe.planning.decide.presets import BEST, NAMES
from ds_fsmoe.planning.schedule import EXPERT_GRAD, GRAD, Lane
from ds_fsmoe.planning.workload import NODE_DEDUPLICATED, Layer, kind_costs
from ds_fsmoe.terminal.tables import print_table

MODELS = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "olmoe", "gpt-oss-20b")
CLUSTERS = ("h100_400", "a100_200", "ethernet_25", "testbed_a", "testbed_b")
"""The clusters that are simulated unless others are asked for; the paper's as calibrated, not as printed."""
SIZES = tuple(8 << step for step in range(10))
LIMITS = ("inter", "intra", "compute", "start_up", "gradients")
"""What a step could be limited by: bytes between nodes and inside one (without gradients), operations of computing,
start-ups, gradients."""
ASSUMPTIONS = (
    "simulated from the costs in the clusters' files, extrapolated to sizes at which nothing was measured",
    "weak scaling: every GPU has the same samples at every size; gradients are summed in the last micro-batch of a "
    "step, of which there is one unless more are asked for",
    "attention and experts whole on their ranks (mp = esp = pp = 1), experts over ep ranks, routing balanced, nothing "
    "dropped, nothing recomputed unless asked for",
    "gradients and what is sent: in the type that the cluster's costs of computing hold for (bf16, or fp32 on the "
    "paper's)",
    "memory: as ds_fsmoe plan predicts it for the same step, with ZeRO stage 2 and Adam unless asked otherwise",
    "a fabric without contention: other jobs, failures, oversubscribed switches and stragglers are not there",
    "steps are forward and backward, without the optimizer and without reading data",
)
Row: TypeAlias = dict[str, Any]
Exact = Literal["none", "chosen", "all"]


def simulate_job(job: Job, presets: Sequence[str] = NAMES, exact: Exact = "chosen") -> list[Row]:
    """Simulate every variant of a job with ``best``, and the chosen ones under every system: the fastest of those that
    fit, or, where none does, of those that need least; of all, and of those with a flat all-to-all.

    Args:
        job: what is simulated.
        presets: the systems; ``best`` is always among them.
        exact: of which variants every layer is planned, rather than one of each kind.
    """
    found = [_Simulated(job, each, exact == "all") for each in variants(job)]
    best = [each.row(BEST) for each in found]

    def key(place: int) -> tuple[float, float]:
        row = best[place]
        return (0.0 if row["fits"] is not False else row["memory_gb"], row["step_ms"])

    choice = min(range(len(found)), key=key)
    flat = min((place for place, row in enumerate(best) if row["alltoall"] == "flat"), key=key)
    if exact == "chosen":
        for place in {choice, flat}:
            found[place].plan_all_layers()
            best[place] = found[place].row(BEST)
        # What was close may be the other way round.
        choice = min(choice, flat, key=key)
    rows = []
    for place, each in enumerate(found):
        is_chosen = place in (choice, flat)
        names = [*(name for name in presets if is_chosen and name != BEST), BEST]
        for name in names:
            row = best[place] if name == BEST else each.row(name)
            shares = each.limits() if is_chosen and name == BEST else {}
            row |= {f"without_{limit}": round(shares[limit], 4) if shares else None for limit in LIMITS}
            rows.append(row | {"is_choice": place == choice, "is_flat_choice": place == flat})
    return rows


class _Simulated:
    """This class simulates one variant of a job."""

    def __init__(self, job: Job, variant: Variant, exact: bool) -> None:
        cluster, model = cluster_of(job.cluster), model_of(job.model)
        groups, alltoall = variant.groups, variant.alltoall
        self._job, self._variant, self._exact = job, variant, exact
        self._length = min(job.length, model.max_length)
        self._settings = Settings(cluster.contention, cluster.host_ms)
        shape = moe_shape(model, commonest_moe(model), job.samples, self._length, dtype_bytes_of(cluster))
        self._costs = kind_costs(cluster, groups, alltoall, shape)
        crossings = crossings_of(model, groups) if alltoall == NODE_DEDUPLICATED else None
        sizes = job.samples, self._length, dtype_bytes_of(cluster)
        self._layers = model_layers(model, groups, *sizes, alltoall, job.checkpointing, crossings)
        self._planner = Planner(self._costs, self._settings)
        self._bound_ms = _bound_ms(self._layers, self._costs, self._settings, job.micro_batches)
        self._plans: dict[str, ComposedPlan] = {}

    def plan_all_layers(self) -> None:
        """Plan every layer from here on."""
        self._exact = True
        self._plans.clear()

    def _plan(self, name: str) -> ComposedPlan:
        if name not in self._plans:
            plan = plan_composed(self._planner, name, self._layers, self._exact)
            self._plans[name] = plan.accumulating(self._job.micro_batches)
        return self._plans[name]

    def row(self, name: str) -> Row:
        """Return what a step takes under a system."""
        job, groups = self._job, self._variant.groups
        times_ms = self._plan(name).times_ms(self._costs, self._settings.contention, self._settings.host_ms)
        step_ms = sum(times_ms)
        return {
            "model": job.model,
            "cluster": job.cluster,
            "ranks": job.ranks,
            "ep": groups.ep,
            "ep_over": "nodes" if Lane.INTER in groups.placements["ep"].lanes else "a node",
            "alltoall": self._variant.alltoall,
            "memory_gb": round(self._variant.memory_gb, 3),
            "fits": self._variant.fits,
            "preset": name,
            "is_exact": self._exact,
            "forward_ms": round(times_ms[0], 4),
            "backward_ms": round(times_ms[1], 4),
            "step_ms": round(step_ms, 4),
            "bound_ms": round(self._bound_ms, 4),
            "tokens_per_s_per_gpu": round(job.micro_batches * job.samples * self._length / step_ms * 1e3, 2),
        }

    def limits(self) -> dict[str, float]:
        """Return what limits ``best``."""
        return limits(self._plan(BEST), self._layers, self._costs, self._settings)


def _bound_ms(layers: Sequence[Layer], costs: Mapping[str, Cost], settings: Settings, micro_batches: int) -> float:
    """Return what no plan of a step could beat."""
    bound_ms = sum(step_bounds_ms(layers, costs, settings.max_degree))
    if micro_batches == 1:
        return bound_ms
    alone = [replace(each, gradients=()) for each in layers]
    return bound_ms + (micro_batches - 1) * sum(step_bounds_ms(alone, costs, settings.max_degree))


def limits(
    plan: ComposedPlan, layers: Sequence[Layer], costs: Mapping[str, Cost], settings: Settings
) -> dict[str, float]:
    """Return the share of a step that would be saved if one thing cost nothing, the plan being what it is: the bytes
    between nodes or inside one, the operations of computing, all start-ups, or gradients.

    What runs beside something longer saves nothing, so that these shares do not sum to 1.
    """

    def step_ms(of_plan: ComposedPlan, of_costs: Mapping[str, Cost], host_ms: float) -> float:
        return sum(of_plan.times_ms(of_costs, settings.contention, host_ms))

    lanes = _lanes_of(layers)
    whole_ms = step_ms(plan, costs, settings.host_ms)
    found = {}
    for name, lane in (("inter", Lane.INTER), ("intra", Lane.INTRA), ("compute", Lane.COMPUTE)):
        free = {kind: _without_size(cost) if lanes.get(kind) is lane else cost for kind, cost in costs.items()}
        found[name] = step_ms(plan, free, settings.host_ms)
    found["start_up"] = step_ms(plan, {kind: _without_start_up(cost) for kind, cost in costs.items()}, 0.0)
    found["gradients"] = step_ms(plan.without_gradients(), costs, settings.host_ms)
    return {name: 1 - found[name] / whole_ms for name in LIMITS}


def _lanes_of(layers: Iterable[Layer]) -> dict[str, Lane]:
    """Return the lane of every kind of task but gradients; of those that hold two links, the slower one."""
    found = {}
    for layer in set(layers):
        for work in (layer.forward, layer.backward):
            for each in (*work.before, *work.moe.stages, *work.after):
                if each.kind not in (GRAD, EXPERT_GRAD):
                    found[each.kind] = each.lanes[0]
    return found


def _without_size(cost: Cost) -> Cost:
    assert isinstance(cost, LinearCost)
    return replace(cost, beta_ms=0.0)


def _without_start_up(cost: Cost) -> Cost:
    assert isinstance(cost, LinearCost)
    return replace(cost, alpha_ms=0.0)


def sweep(
    jobs: Sequence[Job], presets: Sequence[str] = NAMES, processes: int = 1, exact: Exact = "chosen"
) -> Iterator[list[Row]]:
    """Simulate many jobs, and give the rows of each as it is done, in the order of the jobs.

    Args:
        jobs: what is simulated.
        presets: the systems.
        processes: how many to use; 1: this one alone.
        exact: see :func:`simulate_job`.
    """
    if processes == 1 or len(jobs) < 2:
        yield from (simulate_job(job, presets, exact) for job in jobs)
        return
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(simulate_job, jobs, [tuple(presets)] * len(jobs), [exact] * len(jobs))


def job_of(row: Row) -> tuple[str, str, int]:
    """Return the model, the cluster and the number of ranks of a row."""
    return row["model"], row["cluster"], row["ranks"]


def with_efficiency(rows: Iterable[Row]) -> list[Row]:
    """Return rows with the tokens of a GPU and second over those at the smallest size that was simulated: the same
    model, cluster and system, there with the variant that is the choice."""
    rows = list(rows)
    base: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        key = row["model"], row["cluster"], row["preset"]
        if row["is_choice"] and (key not in base or row["ranks"] < base[key]["ranks"]):
            base[key] = row
    for row in rows:
        smallest = base[row["model"], row["cluster"], row["preset"]]
        row["efficiency"] = round(row["tokens_per_s_per_gpu"] / smallest["tokens_per_s_per_gpu"], 4)
    return rows


def limit_of(row: Row) -> str:
    """Return what the step of a row of ``best`` is limited by most."""
    return max(LIMITS, key=lambda each: row[f"without_{each}"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print a line for each size, and write all rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=MODELS, help="names, or config.json files (five of them)")
    parser.add_argument("--cluster", nargs="+", default=CLUSTERS, help="names, or JSON files (five of them)")
    parser.add_argument("--ranks", nargs="+", type=int, default=SIZES, metavar="N", help="numbers of GPUs (8 to 4096)")
    parser.add_argument("--samples", type=int, default=1, metavar="B", help="samples per GPU and micro-batch (1)")
    parser.add_argument("--micro-batches", type=int, default=1, metavar="N", help="micro-batches of a step (1)")
    parser.add_argument("--exact", choices=("none", "chosen", "all"), default="chosen", help="see simulate_job")
    parser.add_argument("--out", type=Path, metavar="FILE", help="every simulated step as CSV")
    args = parser.parse_args(arguments)
    jobs = [
        Job(model, cluster, ranks, args.samples, micro_batches=args.micro_batches)
        for model in args.model
        for cluster in args.cluster
        for ranks in args.ranks
    ]
    found = sweep(jobs, processes=min(os.cpu_count() or 1, len(jobs)), exact=args.exact)
    rows = with_efficiency(row for of_job in found for row in of_job)
    print("assumed:", *ASSUMPTIONS, sep="\n  - ")
    print_rows(rows)
    if args.out is not None:
        with open(args.out, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return 0


def print_rows(rows: Sequence[Row]) -> None:
    """Print the choice of each model, cluster and size, with what the other exchange or layout would take."""
    step_ms = {(*job_of(row), row["preset"]): row["step_ms"] for row in rows if row["is_choice"]}
    best = [row for row in rows if row["preset"] == BEST]
    flat_ms = {job_of(row): row["step_ms"] for row in best if row["is_flat_choice"]}
    cells = [
        (
            *job_of(row),
            f"{row['ep']} over nodes" if row["ep_over"] == "nodes" else f"{row['ep']} in a node",
            row["alltoall"],
            *(f"{step_ms[(*job_of(row), name)]:.1f}" for name in ("deepspeed", "tutel", BEST)),
            f"{row['bound_ms']:.1f}",
            f"{flat_ms[job_of(row)] / row['step_ms']:.2f}x",
            f"{row['tokens_per_s_per_gpu']:.0f}",
            f"{row['efficiency']:.0%}",
            limit_of(row),
            "" if row["fits"] is not False else f"no: {row['memory_gb']:.0f} GB",
        )
        for row in best
        if row["is_choice"]
    ]
    heads = ("model", "cluster", "GPUs", "experts", "exchange", "deepspeed ms", "tutel ms", "best ms", "bound ms")
    print()
    print_table((*heads, "over flat", "tokens/s/GPU", "efficiency", "limit", "fits"), cells)


if __name__ == "__main__":
    raise SystemExit(main())
