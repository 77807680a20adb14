# SPDX-License-Identifier: Apache-2.0
"""What stock's schedule spends a step on, on systems that have a name: simulated, beside the paper's Table 2.

``python benchmarks/cases/bench_proportions.py`` (numpy and scipy are enough; some seconds). Nothing is run: a step,
forward and backward of all layers, is simulated with the numbers of a cluster's file and the preset ``deepspeed``, one
task after another, and divided into all-to-alls, all-gathers with reduce-scatters, experts, gradients and the rest.
Testbeds A and B are in the setting of Table 2; 8 nodes of 8 H100 have one sample of 4096 tokens a GPU in one
micro-batch, over as many ranks as experts divide into and over those of a node. For links that do not slow each other
down (kappa 0) and for links that do (0.45) the same step is simulated with ``tutel`` and ``best``, with the same flat
all-to-all.

Rows go to ``benchmarks/results/proportions.csv``; ``python -m benchmarks.report proportions`` prints them beside what
was measured of stock's step on the testbed (``whole_operations.csv``).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.result_files import RESULTS, append_rows, made_with
from benchmarks.harness.routing import parsed
from benchmarks.reporting.shares import Shares
from benchmarks.reporting.table_2 import COLUMNS, COPIES, LENGTH, SAMPLES, TABLE_2
from benchmarks.simulations.layouts import cluster_of, dtype_bytes_of, ep_sizes, model_of
from benchmarks.simulations.paper import load_bed
from ds_fsmoe.offline.models.known import MODELS
from ds_fsmoe.offline.models.model_layers import model_layers
from ds_fsmoe.planning.cluster import Cluster
from ds_fsmoe.planning.decide.plan import Planner, Settings, plan_by_name
from ds_fsmoe.planning.decide.presets import BEST
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.schedule import (
    A2A_IN,
    A2A_OUT,
    EXPERT,
    EXPERT_GRAD,
    GATHER,
    GRAD,
    MP_GATHER,
    MP_REDUCE,
    REDUCE,
)
from ds_fsmoe.planning.timeline import Contention
from ds_fsmoe.planning.workload import Layer, kind_costs, layer_work

FILE = "proportions.csv"
STOCK, TUTEL = "deepspeed", "tutel"
KAPPAS = (0.0, 0.45)
PART_OF_KIND = {
    **dict.fromkeys((A2A_IN, A2A_OUT), "all_to_all"),
    **dict.fromkeys((GATHER, REDUCE, MP_GATHER, MP_REDUCE), "ag_rs"),
    EXPERT: "experts",
    **dict.fromkeys((GRAD, EXPERT_GRAD), "gradients"),
}
PART_OF_COLUMN = {"a2a": "all_to_all", "all_gather": "ag_rs", "reduce_scatter": "ag_rs", "experts": "experts"}
PART_OF_COLUMN |= {"all_reduce": "gradients"}
OF_H100 = ("mixtral-8x7b", "qwen3-30b-a3b")
LENGTH_ON_H100 = 4096


@dataclass(frozen=True)
class System:
    """A model on a cluster, in one layout."""

    name: str
    model: str
    cluster: Cluster
    groups: Groups
    samples: int
    length: int
    layers: tuple[Layer, ...]
    table_2: Shares | None = None
    """The paper's own figures, where it has them."""


def systems(only: Sequence[str] | None = None) -> Iterator[System]:
    """All of them, or those of some models."""
    for letter in "ab":
        for model, ffn in (("gpt2-xl", "gpt"), ("mixtral-7b", "mixtral")):
            if only is None or model in only:
                yield _of_paper(letter, model, ffn)
    cluster = cluster_of("h100_400")
    world, inside = cluster.num_nodes * cluster.gpus_per_node, cluster.gpus_per_node
    for model in OF_H100:
        if only is not None and model not in only:
            continue
        architecture = model_of(model)
        sizes = ep_sizes(architecture.num_experts, world, inside)
        for ep in dict.fromkeys((sizes[0], sizes[min(1, len(sizes) - 1)])):
            groups = Groups(world, inside, ep=ep)
            layers = model_layers(architecture, groups, 1, LENGTH_ON_H100, dtype_bytes_of(cluster))
            name = f"8 x 8 H100, {model}, EP {ep}"
            yield System(name, model, cluster, groups, 1, LENGTH_ON_H100, layers)


def _of_paper(letter: str, model: str, ffn: str) -> System:
    """Return a model of the paper on its testbed, in the setting of its Table 2."""
    bed, paper = load_bed(letter), MODELS[model]
    factor = COPIES[letter] / paper.shape.K
    shape = replace(paper.shape, B=SAMPLES, L=LENGTH, E=bed.num_experts, capacity_factor=factor)
    layers = (layer_work(shape, bed.groups),) * paper.num_layers
    printed: Counter[str] = Counter()
    for phase in ("forward", "backward"):
        for column, ms in zip(COLUMNS, TABLE_2[letter, ffn, phase], strict=True):
            printed[PART_OF_COLUMN.get(column, "rest")] += ms
    name = f"testbed {letter.upper()}, {model}"
    return System(name, model, bed.cluster, bed.groups, SAMPLES, LENGTH, layers, Shares.of(printed))


def shares_of(system: System) -> tuple[Shares, float]:
    """Return what a step with stock's schedule is spent on, and its milliseconds."""
    costs = kind_costs(system.cluster, system.groups)
    plan = plan_by_name(Planner(costs, Settings(host_ms=system.cluster.host_ms)), STOCK, system.layers)
    times_ms: Counter[str] = Counter()
    timelines = plan.timelines(costs, host_ms=system.cluster.host_ms)
    for timeline in timelines:
        for span in timeline.spans:
            times_ms[PART_OF_KIND.get(span.task.kind, "rest")] += span.end_ms - span.start_ms
    return Shares.of(times_ms), sum(each.makespan_ms for each in timelines)


def rows_of(system: System, made: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Simulate a system: a row for each kappa."""
    shares, _ = shares_of(system)
    groups, printed = system.groups, system.table_2
    costs = kind_costs(system.cluster, groups)
    for kappa in KAPPAS:
        planner = Planner(costs, Settings(Contention(kappa), system.cluster.host_ms))
        times_ms = {name: planner.step_ms(plan_by_name(planner, name, system.layers)) for name in (STOCK, TUTEL, BEST)}
        facts = {
            **{"system": system.name, "model": system.model, "cluster": system.cluster.name},
            **{"nodes": groups.world // groups.gpus_per_node, "ranks_per_node": groups.gpus_per_node},
            **{"mp": groups.mp, "esp": groups.esp, "ep": groups.ep},
            **{"samples": system.samples, "length": system.length, "layers": len(system.layers), "kappa": kappa},
            **_named(shares),
            **{f"table_2_{name}": text for name, text in _named(printed).items()},
            "from_table_2": None if printed is None else shares.distance(printed),
            **{f"{name}_ms": ms for name, ms in times_ms.items()},
            "best_over_deepspeed": times_ms[STOCK] / times_ms[BEST],
            "best_over_tutel": times_ms[TUTEL] / times_ms[BEST],
        }
        yield made | {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in facts.items()}


def _named(shares: Shares | None) -> dict[str, float | None]:
    names = [*asdict(shares or Shares(0, 0, 1, 0, 0)), "communication", "a2a_over_experts", "gradients_over_a2a"]
    return {name: None if shares is None else getattr(shares, name) for name in names}


def main() -> int:
    """Simulate, print, append."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--models", nargs="+", choices=("gpt2-xl", "mixtral-7b", *OF_H100), help="only these")
    args = parsed(parser, no_routers="tokens are spread evenly in the simulated steps")
    # Now, and not at the end: files may be edited meanwhile.
    made = made_with(("numpy", "scipy"))
    rows = []
    for system in systems(args.models):
        for row in rows_of(system, made):
            rows.append(row)
            parts = ", ".join(f"{name} {float(row[name]):.0%}" for name in asdict(shares_of(system)[0]))
            gains = f"best over deepspeed {row['best_over_deepspeed']}, over tutel {row['best_over_tutel']}"
            print(f"{system.name}, kappa {row['kappa']}: {parts}; {gains}", flush=True)
    append_rows(args.results / FILE, tuple(rows[0]), rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
