# SPDX-License-Identifier: Apache-2.0
"""What two halves of a micro-batch that take turns would give, simulated: models, clusters, layouts.

``python benchmarks/cases/bench_split_plan.py`` (numpy and scipy are enough; ten minutes). Nothing is run: every step
is simulated with the numbers of a cluster's file, eight like layers of a model's middle, without embedding and head,
and compared with ``best`` of the all-to-all that is faster with whole micro-batches. Rows go to ``halves_plan.csv``;
``split_plan.csv`` has those of an earlier version, which also simulated what no engine runs.

``--quick`` simulates one model on one cluster, says so in the rows, and is no result to quote.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.result_files import RESULTS, append_rows, made_with
from benchmarks.harness.routing import parsed
from benchmarks.simulations.layouts import cluster_of, crossings_of, dtype_bytes_of, model_of
from ds_fsmoe.offline.models.known import MODELS
from ds_fsmoe.offline.models.model_layers import model_layers
from ds_fsmoe.planning.cluster import Cluster
from ds_fsmoe.planning.decide.candidates import Search
from ds_fsmoe.planning.decide.model_plan import ModelPlan
from ds_fsmoe.planning.decide.plan import Planner, Settings, mode_of, plan_by_name
from ds_fsmoe.planning.decide.plan_requests import PlanRequest
from ds_fsmoe.planning.decide.presets import BEST
from ds_fsmoe.planning.groups import Groups, can_deduplicate
from ds_fsmoe.planning.workload import NODE_DEDUPLICATED, AllToAll, Layer, kind_costs, layer_work

FILE = "halves_plan.csv"
NUM_LAYERS = 8
SAMPLES = 2
LENGTH = 4096
"""The positions of a sample, as far as a model is made for as many; the paper's models have its own length."""
REAL = ("qwen3-30b-a3b", "olmoe", "deepseek-v3", "gpt-oss-20b", "mixtral-8x7b")
PAPERS = ("gpt2-xl", "mixtral-7b")
CLUSTERS = ("h100_400", "a100_200", "testbed_a", "testbed_b", "ethernet_25")


@dataclass(frozen=True)
class Case:
    """What is simulated."""

    model: str
    cluster: str
    nodes: int
    ranks_per_node: int
    gradients: bool

    def groups(self) -> Groups:
        """Return the paper's layout for its models (attention and experts split inside nodes), and for the others
        whole experts over as many ranks as there are, or as experts are."""
        world, inside = self.nodes * self.ranks_per_node, self.ranks_per_node
        if self.model in PAPERS:
            return Groups(world, inside, mp=inside, esp=inside, ep=self.nodes)
        return Groups(world, inside, ep=min(world, model_of(self.model).num_experts))

    def layers(self, groups: Groups, alltoall: AllToAll) -> tuple[Layer, ...]:
        """Return layers of the model's middle."""
        cluster = cluster_of(self.cluster)
        if self.model in PAPERS:
            shape = replace(MODELS[self.model].shape, B=SAMPLES, dtype_bytes=dtype_bytes_of(cluster))
            found = (layer_work(shape, groups, alltoall, whole_slots=True),) * NUM_LAYERS
        else:
            model = model_of(self.model)
            step = SAMPLES, min(LENGTH, model.max_length), dtype_bytes_of(cluster)
            crossings = crossings_of(model, groups) if alltoall == NODE_DEDUPLICATED else None
            # The first has the embedding, and sometimes blocks without experts; the last has the head.
            found = model_layers(model, groups, *step, alltoall, fanout=crossings)[1 : 1 + NUM_LAYERS]
        assert len(found) == NUM_LAYERS
        return found if self.gradients else tuple(replace(each, gradients=()) for each in found)


@dataclass(frozen=True)
class Row:
    """One case with one all-to-all."""

    model: str
    cluster: str
    nodes: int
    ranks_per_node: int
    ep: int
    esp: int
    mp: int
    gradients: bool
    alltoall: str
    best_ms: float
    """Of ``best`` with this all-to-all; all times are of a forward and a backward of eight layers."""
    baseline_ms: float
    """Of ``best`` with the faster all-to-all, with which all are compared."""
    carried_ms: float
    """Of halves, each of which goes straight on from one layer to the next."""
    carried: float
    """How many times as fast as the baseline; above 1 is a gain."""
    forward_chunks: int
    """Of a half."""
    backward_chunks: int


def cases(quick: bool) -> Iterator[Case]:
    """All cases, or a few."""
    for model, cluster, nodes in itertools.product((*REAL, *PAPERS), CLUSTERS, (2, 4, 8, (8, 1))):
        whole = cluster_of(cluster).gpus_per_node
        of_nodes, inside = nodes if isinstance(nodes, tuple) else (nodes, whole)
        if quick and (model, cluster, of_nodes) not in (("olmoe", "testbed_b", 2), ("gpt2-xl", "testbed_b", 2)):
            continue
        for gradients in (True, False):
            yield Case(model, cluster, of_nodes, inside, gradients)


def rows_of(case: Case) -> list[Row]:
    """Simulate a case with every all-to-all."""
    groups, cluster = case.groups(), cluster_of(case.cluster)
    alltoalls: tuple[AllToAll, ...] = ("flat", NODE_DEDUPLICATED) if can_deduplicate(groups) else ("flat",)
    found = [(each, *_simulated(case, cluster, groups, each)) for each in alltoalls]
    baseline_ms = min(best_ms for _, best_ms, *_ in found)
    return [
        Row(
            *(case.model, case.cluster, case.nodes, case.ranks_per_node, groups.ep, groups.esp, groups.mp),
            *(case.gradients, alltoall, best_ms, baseline_ms, carried_ms, baseline_ms / carried_ms),
            *(plan.forward[0].degree, plan.backward[0].degree),
        )
        for alltoall, best_ms, carried_ms, plan in found
    ]


def _simulated(case: Case, cluster: Cluster, groups: Groups, alltoall: AllToAll) -> tuple[float, float, ModelPlan]:
    """Return the times of ``best`` and of halves, and the plan of these."""
    layers, costs = case.layers(groups, alltoall), kind_costs(cluster, groups, alltoall)
    planner = Planner(costs, Settings(cluster.contention, cluster.host_ms))
    options, space = [{alltoall: each} for each in layers], planner.settings.space(BEST)
    request = PlanRequest(options, space, mode_of(BEST) if case.gradients else "off", can_split=True)
    carried = Search(planner, request).best_two_batch()
    assert carried is not None
    return planner.step_ms(plan_by_name(planner, BEST, layers)), planner.step_ms(carried), carried


def main() -> int:
    """Simulate, print, append."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--models", nargs="+", choices=(*REAL, *PAPERS), help="only these")
    args = parsed(parser, no_routers="tokens are spread evenly in the simulated steps")
    # Now, and not at the end: files may be edited meanwhile.
    made = made_with(("numpy", "scipy")) | {"quick": args.quick}
    columns = [*made, *(field.name for field in fields(Row))]
    for model, of_model in itertools.groupby(cases(args.quick), key=lambda each: each.model):
        if args.models and model not in args.models:
            continue
        rows = []
        for case in of_model:
            for row in rows_of(case):
                rows.append(row)
                where = f"{row.model} on {row.nodes} x {row.ranks_per_node} of {row.cluster}"
                sent = "with gradients" if row.gradients else "without"
                print(f"{where}, {sent}, {row.alltoall}: {row.carried:.3f}", flush=True)
        written = [
            {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in vars(row).items()}
            for row in rows
        ]
        append_rows(args.results / FILE, columns, [made | row for row in written])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
