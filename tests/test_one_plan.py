# SPDX-License-Identifier: Apache-2.0
"""``ds_fsmoe plan --cluster FILE`` prints the plan that an engine applies, field by field, given the same costs.

The engine's own way is walked from what was measured to what is applied to layers; only the measurements are made up,
so that they say what the file says.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_fsmoe import cli
from ds_fsmoe.config.reading import read_block
from ds_fsmoe.layer.runtime import planned_links
from ds_fsmoe.observing.step_timer import DenseTimes
from ds_fsmoe.offline.plan.report import LINKS_IN_WORDS
from ds_fsmoe.planning import cluster as clusters
from ds_fsmoe.planning.block import BlockPlan, LayerPlan
from ds_fsmoe.planning.call_shape import CallShape
from ds_fsmoe.planning.cluster import load_cluster
from ds_fsmoe.planning.cost import LayerCosts
from ds_fsmoe.planning.decide.presets import NAMES
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.job.measured import Slowdowns
from ds_fsmoe.planning.schedule import Lane
from ds_fsmoe.planning.workload import GEMMS, Layer, Shape, Work, kind_costs, layer_work
from ds_fsmoe.tuning.measure import Measured
from ds_fsmoe.tuning.tuned_model import TunedModel
from tests.samples import sampled

LAYERS = 4
MICRO_OP_BYTES = 1_000_000
"""Of Lina: with 30 MB no layer here would be cut."""


@dataclass(frozen=True)
class Model:
    """A model on a cluster, as both sides are told of it."""

    testbed: str
    groups: Groups
    shape: Shape
    kappa: float = 0.0


MODELS = {
    "the paper's groups": Model(
        "testbed_b", Groups(32, 4, mp=4, esp=4, ep=8), Shape(2, 512, 1024, 4096, 8, 2, 1.0, heads=16)
    ),
    "links that contend": Model(
        "testbed_a",
        Groups(48, 8, mp=8, esp=8, ep=2),
        Shape(1, 1024, 4096, 4096, 8, 2, 2.0, "mixtral", heads=32),
        kappa=0.48,
    ),
    "a capacity that chunks do not divide": Model(
        "testbed_b", Groups(32, 4, esp=2, ep=16), Shape(1, 104, 512, 2048, 16, 2, 1.0, heads=16), kappa=0.2
    ),
}


def cluster_file(model: Model, folder: Path) -> Path:
    """The testbed, with orders that cost nothing: an engine knows of no work ahead of the experts' part."""
    data = json.loads((Path(clusters.__file__).parent / "clusters" / f"{model.testbed}.json").read_text())
    data["operations"]["order"] |= {"alpha_ms": 0.0, "beta_ms_per_byte": 0.0}
    data["contention"] |= {"links": model.kappa, "compute": 0.0}
    path = folder / "here.json"
    path.write_text(json.dumps(data))
    return path


def printed(model: Model, name: str, folder: Path) -> dict[str, Any]:
    """What the command writes for programs."""
    out, groups, shape = folder / "plan.json", model.groups, model.shape
    arguments = ["--cluster", str(cluster_file(model, folder)), "--json", str(out), "--preset", name]
    options = {
        **{"dp": groups.stage // groups.mp, "mp": groups.mp, "esp": groups.esp, "ep": groups.ep, "layers": LAYERS},
        **{"samples": shape.B, "length": shape.L, "width": shape.M, "hidden": shape.H, "experts": shape.E},
        **{"capacity-factor": shape.capacity_factor, "heads": shape.heads, "ffn": shape.ffn},
        **({"chunk-bytes": MICRO_OP_BYTES} if name == "lina" else {}),
    }
    words = [word for option, value in options.items() for word in (f"--{option}", str(value))]
    assert cli.main(["plan", *arguments, *words]) == 0
    return json.loads(out.read_text())["plan"]


@dataclass
class Applied:
    """A layer that notes how it is to be run."""

    is_unchunked: bool = False
    plans: list[LayerPlan] = field(default_factory=list)

    def apply(self, plan: LayerPlan) -> None:
        self.plans.append(plan)


def rest_ms(layer: Layer, costs: dict) -> tuple[float, float]:
    """All but the experts' part, forward and backward."""

    def ms(works: tuple[Work, ...]) -> float:
        return sum(costs[each.kind].ms(each.size, each.launches) for each in works)

    forward, backward = (ms((*each.before, *each.after)) for each in (layer.forward, layer.backward))
    return forward, backward


def engine_model(
    model: Model, name: str, folder: Path, wait_ms: float = 0.0, **how: Any
) -> tuple[TunedModel, dict[str, Applied]]:
    """The layers of an engine, as if they had been measured to cost what the file says."""
    shape, groups, cluster = model.shape, model.groups, load_cluster(str(cluster_file(model, folder)))
    costs = kind_costs(cluster, groups)
    layer = layer_work(shape, groups, whole_slots=True)
    local_experts, products = shape.E // groups.ep, GEMMS[shape.ffn]
    capacity = math.ceil(shape.F * shape.B * shape.L / groups.mp / shape.E)
    weights = local_experts * products * shape.M * shape.H // groups.esp
    called = CallShape(shape.E, capacity, shape.M, shape.dtype_bytes, products * local_experts, weights)
    labels = [f"L{number:02d}" for number in range(LAYERS)]
    kind = SimpleNamespace(
        labels=labels,
        layer=SimpleNamespace(fsmoe=SimpleNamespace(is_unchunked=False)),
        subject=SimpleNamespace(kind="experts", link_name=lambda link: link, sizes=SimpleNamespace(num_choices=0)),
        pipeline=SimpleNamespace(forward=SimpleNamespace(groups=groups)),
        sizes=called,
        options={"flat": SimpleNamespace(planned="flat", is_unpadded=False, subject=SimpleNamespace(alltoall="flat"))},
        sizes_with=lambda alltoall: called,
    )
    slowed = {(Lane.INTER, Lane.INTRA): 1 + model.kappa, (Lane.INTRA, Lane.INTER): 1 + model.kappa}
    written = LayerCosts.written(costs, cluster.host_ms)
    profiles: Any = {("experts", "flat"): SimpleNamespace(costs=lambda issues_ahead: written)}
    links: Any = SimpleNamespace(reduces={})
    measured = Measured([kind], profiles, links, Slowdowns(slowed), cluster, None, False, False)  # type: ignore[list-item, arg-type]
    micro_ops = {"gradient_partition": {"chunk_bytes": MICRO_OP_BYTES}} if name == "lina" else {}
    block = read_block({"fsmoe": {"enabled": True, "schedule": name, "autotune": True} | micro_ops})
    assert block is not None
    layers = {label: SimpleNamespace(fsmoe=Applied()) for label in labels}
    gradients = [(each.kind, LAYERS * each.size_bytes) for each in layer.gradients]
    tensors_bytes = {each.kind: LAYERS * each.tensors_bytes for each in layer.gradients}
    forward_ms, backward_ms = rest_ms(layer, costs)
    running: Any = SimpleNamespace(one_link=None, links=planned_links(block))
    dense_ms = DenseTimes(LAYERS * forward_ms, LAYERS * backward_ms, wait_ms)
    of_model = measured, gradients, tensors_bytes, dense_ms
    made = TunedModel(block, running, layers, *of_model, **how)  # type: ignore[arg-type]
    return made, {label: each.fsmoe for label, each in layers.items()}


def as_printed(block: BlockPlan) -> tuple[int, str]:
    return block.degree, LINKS_IN_WORDS[block.links]


def predicted(folder: Path, **how: Any) -> list[dict[str, float]]:
    """Of the best plan and of stock's."""
    model, _ = engine_model(next(iter(MODELS.values())), "best", folder, **how)
    return [asdict(model.predict(each)) for each in (model.search.candidates()[0], model.search.stock())]


def test_a_step_of_several_micro_batches_is_so_many_steps_of_one_and_waits_once(tmp_path: Path) -> None:
    both = {"num_micro_batches": 2}
    each_summed = predicted(tmp_path, **both, sums_each=True)
    for one, last, each in zip(predicted(tmp_path), predicted(tmp_path, **both), each_summed, strict=True):
        assert each == pytest.approx({name: 2 * time_ms for name, time_ms in one.items()})
        assert each["gradients_ms"] == 2 * last["gradients_ms"] > 0
        assert one["chosen_ms"] < last["chosen_ms"] <= each["chosen_ms"]
    longer = {"chosen_ms", "isolated_ms", "deepspeed_ms", "dense_ms", "bound_ms"}
    for one, other in zip(each_summed, predicted(tmp_path, **both, sums_each=True, wait_ms=7.0), strict=True):
        assert other == pytest.approx({name: value + 7.0 * (name in longer) for name, value in one.items()})
    (one, _), (other, _) = (predicted(tmp_path, in_stages=True, wait_ms=wait_ms) for wait_ms in (0.0, 7.0))
    assert one == other, "stages are measured as whole batches"


# Each preset with one of the models, in turns.
EVERY = list(itertools.product(MODELS, NAMES))
IN_TURNS = [EVERY.index((list(MODELS)[at % len(MODELS)], name)) for at, name in enumerate(NAMES)]


@sampled(("case", "name"), EVERY, kept=IN_TURNS)
def test_what_is_printed_is_what_layers_are_run_by_field_by_field(case: str, name: str, tmp_path: Path) -> None:
    model = MODELS[case]
    table = printed(model, name, tmp_path)
    engine, layers = engine_model(model, name, tmp_path)
    plan = engine.search.candidates()[0]
    engine.apply(plan, {})
    rows = {(row["layer"], row["phase"]): row for row in table["layers"]}
    assert len(rows) == 2 * LAYERS
    for index, applied in enumerate(layers.values()):
        (run,) = applied.plans
        assert run.alltoall == "flat"
        for phase, block, decided in (
            ("forward", run.forward, plan.forward[index]),
            ("backward", run.backward, plan.backward[-1 - index]),
        ):
            row = rows[index, phase]
            assert as_printed(block) == as_printed(decided) == (row["degree"], row["order"])
            for part, slices in (("moe_bytes", decided.moe_slices), ("dense_bytes", decided.dense_slices)):
                assert sum(each.size_bytes for each in slices) == row[part], (index, phase, part)
    assert sum(each.size_bytes for each in plan.tail) == table["tail_bytes"]
    is_cut = any(each.degree > 1 for each in (*plan.forward, *plan.backward))
    assert is_cut or name == "deepspeed" or "divide" in case
