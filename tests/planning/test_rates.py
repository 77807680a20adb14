# SPDX-License-Identifier: Apache-2.0
"""What layers and models take by the rates of a cluster, against what an H100 took and what others have published."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.simulations.layouts import Job
from benchmarks.simulations.scale import simulate_job
from ds_fsmoe.offline.models.known import PlannedModel, load_model
from ds_fsmoe.offline.models.model_layers import commonest_moe, model_layers, moe_shape
from ds_fsmoe.offline.plan.report import PlannedJob, report
from ds_fsmoe.planning.cluster import load_cluster
from ds_fsmoe.planning.decide.plan import Settings
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.schedule import EXPERT, ORDER, RESTORE, ROUTE
from ds_fsmoe.planning.workload import Shape, experts_cost, kind_costs

H100, ALONE = load_cluster("h100_400"), Groups(1, 1)
TOLERANCE = 0.1
LAYERS_MS = {
    "qwen3-30b-a3b": (4.692, 10.429, 6.7),
    "olmoe": (4.820, 10.182, 7.0),
    "mixtral-8x7b": (12.985, 37.214, 32.5),
}
"""Model -> forward, both phases, and their kernels alone: one layer of ours with compiled ops, 8192 tokens in bf16, on
one H100."""
PUBLISHED = {"qwen3-30b-a3b": 12_040, "gpt-oss-20b": 13_058}
"""Model -> tokens/s and GPU on 8 H100 with 4 samples of 4096 and 16 micro-batches (NVIDIA NeMo AutoModel,
docs/performance-summary.mdx)."""


def phases_ms(name: str) -> list[float]:
    """What a layer with experts takes on one GPU, without attention."""
    model = load_model(name)
    costs = kind_costs(H100, ALONE, shape=moe_shape(model, commonest_moe(model), 1, 8192, 2))
    layer = model_layers(model, ALONE, 1, 8192, 2)[-2]
    return [
        sum(
            costs[each.kind].ms(each.size, each.launches)
            for each in (*work.before, work.moe.expert, *work.after)
            if each.kind in (ROUTE, ORDER, RESTORE, EXPERT)
        )
        for work in (layer.forward, layer.backward)
    ]


@pytest.mark.parametrize("name", LAYERS_MS)
def test_a_layer_takes_what_it_took_on_an_h100(name: str) -> None:
    forward_ms, both_ms, kernels_ms = LAYERS_MS[name]
    found = phases_ms(name)
    assert sum(found) == pytest.approx(both_ms, rel=TOLERANCE)
    assert found[0] == pytest.approx(forward_ms, rel=TOLERANCE)
    assert sum(found) - 2 * H100.layer_wait_ms == pytest.approx(kernels_ms, rel=TOLERANCE)


@pytest.mark.parametrize(("name", "layers", "step_ms"), [("qwen3-30b-a3b", 3, 146.3), ("olmoe", 5, 189.3)])
def test_a_cut_model_takes_less_than_its_measured_step_which_has_the_optimizer_too(
    name: str, layers: int, step_ms: float
) -> None:
    model = replace(load_model(name).first(layers), vocab=1024)
    shape = moe_shape(model, commonest_moe(model), 4, 2048, 2)
    settings = Settings(H100.contention, max_degree=1)
    found = report(PlannedJob(H100, ALONE, PlannedModel(shape, layers, model), settings), "best")
    layers_ms = layers * LAYERS_MS[name][1]
    assert layers_ms < sum(found.times_ms["best"]) < step_ms


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize(("samples", "micro_batches"), [(1, 1), (4, 16)])
def test_nothing_is_predicted_above_the_best_that_was_published(name: str, samples: int, micro_batches: int) -> None:
    rows = simulate_job(Job(name, "h100_400", 8, samples, 4096, micro_batches), ("best",), "none")
    assert max(row["tokens_per_s_per_gpu"] for row in rows) <= PUBLISHED[name]


def test_narrow_experts_and_experts_with_few_rows_are_slower() -> None:
    def tflops(M: int, H: int, rows: int) -> float:
        shape = Shape(1, rows, M, H, 1, 1, None, "mixtral", dtype_bytes=2)
        flops = 6 * rows * M * H
        return flops / experts_cost(H100, shape, 3, ALONE).ms(flops, 3) * 1e-9

    assert tflops(4096, 14336, 2048) > tflops(2048, 1024, 2048) > tflops(1024, 1024, 2048)
    assert tflops(2048, 768, 4096) > tflops(2048, 768, 512) > tflops(2048, 768, 64)
    assert tflops(8192, 8192, 8192) < 770
    # Weights are passed over twice a product, on average: as many rows are computed while they are read.
    rows = 2 * 770 / 3.0
    assert tflops(8192, 8192, 1 << 20) / tflops(8192, 8192, round(rows)) == pytest.approx(2, rel=0.05)


def test_a_file_without_these_numbers_has_one_rate_for_all_products() -> None:
    paper = load_cluster("testbed_a")
    for H in (768, 14336):
        shape = Shape(1, 4096, 2048, H, 8, 2, None, "mixtral")
        assert experts_cost(paper, shape, 3, ALONE) == paper.operations["gemm"].cost
        assert kind_costs(paper, ALONE, shape=shape) == kind_costs(paper, ALONE)
    slow = replace(H100, layer_wait_ms=H100.layer_wait_ms + 1)
    assert kind_costs(slow, ALONE)[ROUTE].alpha_ms == kind_costs(H100, ALONE)[ROUTE].alpha_ms + 1
