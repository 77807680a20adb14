# SPDX-License-Identifier: Apache-2.0
"""What a step takes with experts over 1, 2 and 4 ranks: predicted before a job has run, beside what was measured.

``python -m benchmarks.simulations.ep_sizes`` prints the table. Measured are the rows of ``whole.csv`` and
``ladder.csv``. Nothing is fitted to them: links are as the bed was set, what experts' products take is a line through
stock's experts in ``whole_operations.csv``, what no size changes is stock's attention, routing and rest there, and how
much computing and links slow each other down is in ``whole_slowdowns.csv``.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np
from scipy.optimize import nnls

from ds_fsmoe.planning.cluster import Cluster, Operation
from ds_fsmoe.planning.cluster_schema import COLLECTIVES, LINKS
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.ep_size import ExpertJob, alltoalls_of, step_ms
from ds_fsmoe.planning.decide.presets import BEST
from ds_fsmoe.planning.timeline import Contention
from ds_fsmoe.planning.workload import GEMMS, NODE_DEDUPLICATED, Shape
from ds_fsmoe.terminal.tables import print_table

RESULTS = Path(__file__).resolve().parents[1] / "results"
STOCK = "stock"
_CHOSEN, _OVER_ALL, _OTHERS = "ours, chosen", "ours, over all ranks", ("ours", "ours, ep_size 1", "ours, ep_size 2")
_SYSTEMS: Mapping[str, tuple[int, str, str | None]] = {
    STOCK: (1, "deepspeed", None),
    "ours": (2, BEST, None),
    "ours, over all ranks": (4, BEST, None),
    _CHOSEN: (4, BEST, None),
    "ours, ep_size 1": (1, BEST, None),
    "ours, ep_size 2": (2, BEST, None),
    "AutoEP over 2": (2, "deepspeed", "flat"),
    "AutoEP over 4": (4, "deepspeed", "flat"),
    "ep_size": (4, "deepspeed", "flat"),
    "once per node": (4, "deepspeed", NODE_DEDUPLICATED),
    "schedule": (4, BEST, NODE_DEDUPLICATED),
}
"""Variant -> (its ``ep_size``, its schedule, its all-to-all; ``None``: the fastest)."""
_OF_COLLECTIVES = {"all_to_all": 1, "all_gather": 1, "all_reduce": 2, "reduce_scatter": 2}
"""Among two ranks, the halves of a buffer that a rank sends. gloo sums the whole buffer for a reduce-scatter."""
_A_RUN = timedelta(minutes=40)
_FIXED = "attention", "routing", "other"
Row = Mapping[str, str]


@dataclass(frozen=True)
class Measured:
    """A variant of a model as it was measured, with its prediction."""

    source: str
    date: str
    """The time of the run."""
    case: str
    variant: str
    zero: int
    ep: int
    measured_ms: float
    predicted_ms: float


@dataclass(frozen=True)
class Gain:
    """How many times as fast a variant is as another one of the same run."""

    of: Measured
    over: Measured

    @property
    def measured(self) -> float:
        """Return the measured ratio."""
        return self.over.measured_ms / self.of.measured_ms

    @property
    def predicted(self) -> float:
        """Return the predicted ratio."""
        return self.over.predicted_ms / self.of.predicted_ms

    @property
    def error(self) -> float:
        """Return by what share the prediction is off."""
        return self.predicted / self.measured - 1


@cache
def rows(name: str) -> tuple[Row, ...]:
    """Return the rows of a file of results."""
    with (RESULTS / name).open() as file:
        return tuple(csv.DictReader(file))


def shape_of(settings: Mapping) -> Shape:
    """Return a layer of a whole model."""
    is_gpt, family = settings["family"] == "gpt", settings["family"]
    return Shape(
        *(settings[name] for name in ("B", "L", "M", "H", "E")),
        K=settings["k"],
        capacity_factor=settings["capacity_factor"] if is_gpt else None,
        ffn="gpt" if is_gpt else "mixtral",
        heads=settings["heads"],
        kv_heads=settings["heads"] // (1 if family in ("gpt", "olmoe") else 2),
    )


def job_of(case: str, day: str = "") -> ExpertJob:
    """Return a whole model as a job of the bed on a day, with the settings of DeepSpeed that stock is fastest with."""
    settings, cluster = _settings(case), bed_of(case, day)
    shape, layers = shape_of(settings), settings["layers"]
    dense = layers * (shape.attention_weights + shape.M * shape.E) + 2 * settings["vocabulary"] * shape.M
    # With samples of another length, or other links, stock has the settings of the model's own.
    own = re.sub(r", (L \d+|one node|\d+ and \d+ Mbit/s)", "", case)
    swept = [row for row in rows("whole_sweep.csv") if row["case"] == own and row["variant"] == STOCK]
    fastest = min(swept, key=lambda row: float(row["ms"]))
    # At ZeRO 3 what is not told apart has the waits for parameters in it.
    alike = [
        each
        for each in _cases()
        if {**_settings(each), "stages": 0} == {**settings, "stages": 0} and _hardware(each) == _hardware(case)
    ]
    rest_ms = sum(min(_operation_ms(each, name, day) for each in alike) for name in _FIXED)
    return ExpertJob(
        (shape,) * layers,
        cluster.num_nodes * cluster.gpus_per_node,
        cluster.gpus_per_node,
        round(dense),
        zero=int(fastest["stage"]),
        overlap_comm=fastest["overlap"] == "True",
        micro_batches=settings["micro_batches"],
        rest_ms=rest_ms,
    )


def bed_of(case: str, day: str = "") -> Cluster:
    """Return the bed on which a model was measured on a day. A link carries what all ranks of a node send over it."""
    nodes, per_node, *rates = map(
        int, re.findall(r"(\d+) nodes x (\d+) ranks, (\d+)mbit between, (\d+)mbit inside", _hardware(case))[0]
    )
    operations = {
        f"{link}.{name}": Operation(
            LinearCost(_start_ms(), _OF_COLLECTIVES[name] * per_node / 2 / (mbit * 1e6 / 8e3)), 2
        )
        for link, mbit in zip(LINKS, rates, strict=True)
        for name in COLLECTIVES
    }
    operations["gemm"] = Operation(_products(day, layout := f"{nodes} nodes x {per_node} ranks"))
    # On slower links computing is slowed less.
    links = f"{layout}, {rates[0]}mbit between, {rates[1]}mbit inside"
    # What they take is in what no size changes.
    free = dict.fromkeys(("attention", "softmax", "routing", "order"), Operation(LinearCost(0.0, 0.0)))
    return Cluster("bed", nodes, per_node, operations | free, _contention(links))


@cache
def _contention(links: str) -> Contention:
    """Return how much lanes slow each other down, as the autotuner has measured it in jobs on such a bed."""
    of_jobs = [row for row in rows("whole_slowdowns.csv") if links in row["hardware"]]
    shares = {field.name: [float(row[field.name]) for row in of_jobs] for field in fields(Contention)}
    return Contention(**{name: median(of_name) for name, of_name in shares.items()})


def measured_rows() -> list[Measured]:
    """Return all variants of whole models with several ways to spread their experts."""
    found = []
    for source in ("whole.csv", "ladder.csv"):
        for row in rows(source):
            # A GPT of DeepSpeed's layers is over all ranks in every row. What is compared with others than stock is
            # there twice.
            if row["variant"] not in _SYSTEMS or row["over"] or json.loads(row["settings"])["family"] == "gpt":
                continue
            case, variant = row["case"], row["variant"]
            day = row["date"][: len("2026-11-30")]
            job, ep, of_run = job_of(case, day), _ep_of(row), (source, row["date"])
            times_ms = float(row["p50"]), predicted_ms(case, variant, ep, day)
            found.append(Measured(*of_run, case, variant, job.zero, ep, *times_ms))
    return found


def _ep_of(row: Row) -> int:
    """Return the ``ep_size`` of a row, which has the time of its start. What was chosen is in a file of its own, with
    the time of the end. Before there was such a file, it was all ranks."""
    began = datetime.fromisoformat(row["date"])
    of_run = [
        int(each["ep_size"])
        for each in rows("whole_chosen.csv")
        if (each["case"], each["commit"]) == (row["case"], row["commit"])
        and timedelta() <= datetime.fromisoformat(each["date"]) - began < _A_RUN
    ]
    return of_run[0] if of_run and row["variant"] == _CHOSEN else _SYSTEMS[row["variant"]][0]


@cache
def predicted_ms(case: str, variant: str, ep: int, day: str) -> float:
    """Return the ms of a step of a variant with experts over so many ranks on a day."""
    job, cluster = job_of(case, day), bed_of(case, day)
    _, schedule, alltoall = _SYSTEMS[variant]
    job = replace(job, sums_in_slices=schedule == BEST)
    groups = next(each for each in job.layouts() if each.ep == ep)
    ways = alltoalls_of(job, groups)
    return min(step_ms(job, cluster, groups, way, schedule) for way in ways if alltoall in (None, way))


def gains(found: Sequence[Measured]) -> Iterator[Gain]:
    """Yield what each variant gains over stock of its run, and ours over all ranks over ours of smaller sizes."""
    at = {(each.source, each.date, each.case, each.variant): each for each in found}
    for (*of_case, variant), each in at.items():
        if variant != STOCK:
            yield Gain(each, at[*of_case, STOCK])
        if variant == _OVER_ALL:
            yield from (Gain(each, at[*of_case, other]) for other in _OTHERS if (*of_case, other) in at)


def stages_of_stock() -> list[tuple[str, int, float, float]]:
    """Return (model, ZeRO stage, measured, predicted): how many times as long as at stage 0 stock's step takes, each
    stage with the buckets and ``overlap_comm`` that it is fastest with.
    """
    found = []
    for case in _cases():
        of_stages: dict[int, float] = {}
        for row in rows("whole_sweep.csv"):
            if row["case"] == case and row["variant"] == STOCK:
                stage = int(row["stage"])
                of_stages[stage] = min(of_stages.get(stage, float("inf")), float(row["ms"]))
        if 0 not in of_stages or _settings(case)["family"] == "gpt":
            continue
        job, cluster = job_of(case), bed_of(case)
        times_ms = {
            stage: step_ms(replace(job, zero=stage), cluster, job.layouts()[0], "flat", "deepspeed")
            for stage in of_stages
        }
        found += [(case, s, of_stages[s] / of_stages[0], times_ms[s] / times_ms[0]) for s in of_stages if s]
    return found


@cache
def _cases() -> tuple[str, ...]:
    return tuple(dict.fromkeys(row["case"] for row in rows("whole.csv")))


@cache
def _settings(case: str) -> dict:
    return json.loads(next(row["settings"] for row in rows("whole.csv") if row["case"] == case))


@cache
def _hardware(case: str) -> str:
    return next(row["hardware"] for row in rows("whole.csv") if row["case"] == case)


def _operation_ms(case: str, name: str, day: str) -> float:
    """Return what an operation takes in stock's step, on a day if it was measured then: the machine is not the same
    every day."""
    found = [row for row in rows("whole_operations.csv") if (row["case"], row["operation"]) == (case, name)]
    of_day = [row for row in found if row["date"].startswith(day)]
    return median(float(row["ms"]) for row in of_day or found)


@cache
def _start_ms() -> float:
    """Return the ms of the smallest all-to-alls that were timed on a bed."""
    sizes: dict[str, list[tuple[float, float]]] = {}
    for row in rows("fits.csv"):
        if row["operation"] == "all-to-all":
            sizes.setdefault(row["case"], []).append((float(row["size"]), float(row["measured_ms"])))
    return median(min(each)[1] for each in sizes.values())


@cache
def _products(day: str, layout: str) -> LinearCost:
    """Return what products of experts take, by the number of products and of operations in stock's steps of a day."""
    counted, times_ms = [], []
    for case in _cases_of(day, layout):
        settings = _settings(case)
        shape = shape_of(settings)
        # The backward has two products for each of the forward.
        times = 3 * settings["layers"] * settings["micro_batches"] * GEMMS[shape.ffn]
        counted.append((times * shape.E, times * 2 * shape.K * shape.B * shape.L * shape.M * shape.H))
        times_ms.append(_operation_ms(case, "experts", day))
    scale = np.max(counted, axis=0)
    alpha, beta = nnls(np.array(counted) / scale, np.array(times_ms))[0] / scale
    return LinearCost(float(alpha), float(beta))


def _cases_of(day: str, layout: str) -> list[str]:
    """Return the models whose stock has experts that ZeRO leaves whole, as far as they were measured on a day on such a
    bed. A line needs two of them: otherwise they are those of all days and beds."""
    fitting = [each for each in _cases() if _settings(each)["family"] != "gpt" and 0 in _settings(each)["stages"]]
    of_day = {
        row["case"] for row in rows("whole_operations.csv") if row["date"].startswith(day) and layout in row["hardware"]
    }
    found = [each for each in fitting if each in of_day]
    return found if len(found) > 1 else fitting


def main() -> None:
    """Print the tables."""
    found = measured_rows()
    print_table(
        ("model", "ZeRO", "variant", "ep_size", "measured ms", "predicted ms", "off"),
        [
            (e.case, str(e.zero), e.variant, str(e.ep), f"{e.measured_ms:.0f}", f"{e.predicted_ms:.0f}",
             f"{e.predicted_ms / e.measured_ms - 1:+.0%}")
            for e in found
        ],
    )  # fmt: skip
    print()
    of = list(gains(found))
    print_table(
        ("model", "ZeRO", "of", "ep_size", "over", "ep_size", "measured", "predicted", "off"),
        [
            (e.of.case, str(e.of.zero), e.of.variant, str(e.of.ep), e.over.variant, str(e.over.ep),
             f"{e.measured:.2f}", f"{e.predicted:.2f}", f"{e.error:+.0%}")
            for e in of
        ],
    )  # fmt: skip
    print(f"\noff by {np.mean([abs(each.error) for each in of]):.1%} on average\n")
    stages = stages_of_stock()
    print_table(
        ("model", "ZeRO of stock", "measured, times stage 0", "predicted", "off"),
        [(case, str(s), f"{was:.2f}", f"{is_:.2f}", f"{is_ / was - 1:+.0%}") for case, s, was, is_ in stages],
    )


if __name__ == "__main__":
    main()
