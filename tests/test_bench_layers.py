# SPDX-License-Identifier: Apache-2.0
"""What bench_layer and bench_gates compare is the same work: the same losses and decisions in the same layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.ranks import run_on_ranks
from tests.test_alltoalls import on_nodes

TWO_NODES = (0, 0, 1, 1)


def losses(steps: Any, count: int = 2) -> list[float]:
    for _ in range(count):
        steps()
    steps.close()
    return [float(each) for each in steps.losses[-count:]]


def compare_layers(rank: int, world_size: int) -> dict[str, list[float]]:
    from benchmarks.layer_steps import Found, Steps
    from benchmarks.layers import Layer, Mpu, fix_capacity, fix_gather, ranks_per_node

    fix_gather()
    fix_capacity()
    found = {}
    with on_nodes(*TWO_NODES):
        mpu = Mpu(ranks_per_node())
        ours = {"schedule": "fsmoe", "pipeline_degree": {"forward": 2, "backward": 3}}
        layer = Layer(B=2, L=16, M=16, ratio=2, f=1.25, ffn="gpt")
        # Stock takes one step when it is made and ours more, of a tiny learning rate.
        found["stock, ranks"] = losses(Steps(layer, "ranks", None, Found(stage=0), None))
        found["ours, ranks"] = losses(Steps(layer, "ranks", None, Found(stage=0), ours))
        layer = replace(layer, f=None, ffn="mixtral")
        found["stock, node"] = losses(Steps(layer, "node", mpu, Found(stage=1), None))
        found["ours, node"] = losses(Steps(layer, "node", mpu, Found(stage=1), ours | {"esp_size": 2}))
    return found


def test_both_systems_have_the_same_loss_in_the_same_layout(tmp_path: Path) -> None:
    for found in run_on_ranks(compare_layers, 4, tmp_path):
        for name, values in found.items():
            assert all(torch.isfinite(torch.tensor(values))), name
        assert abs(found["stock, ranks"][0] / found["ours, ranks"][0] - 1) < 1e-3
        # The same tokens per node, other ranks that hold them, and experts that begin with other numbers.
        assert 0.5 < found["stock, node"][0] / found["ours, node"][0] < 2


def compare_gates(rank: int, world_size: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    from deepspeed.moe.layer import MoE

    import ds_fsmoe
    from benchmarks.bench_gates import GRID, InStock
    from ds_fsmoe import registry

    found = {}
    for case in GRID.cases:
        gated = case.settings
        if gated.gate == "topk":
            continue
        torch.manual_seed(0)
        experts, x_SM = ds_fsmoe.GPTFeedForward(16, 24), torch.randn(40, 16)
        stock = MoE(16, experts, num_experts=4, ep_size=1, k=gated.k)
        gate = registry.lookup("gate", gated.gate)(**gated.options)
        gate.build_once(16, 4)
        stock.deepspeed_moe.gate = InStock(gate)
        own = ds_fsmoe.MOELayer(
            registry.lookup("gate", gated.gate)(**gated.options),
            ds_fsmoe.SimpleOrder(),
            model_dim=16,
            num_experts=4,
            expert_impl=experts,
        )
        own.gate.load_state_dict(gate.state_dict())
        for mine, theirs in zip(own.experts.experts, stock.deepspeed_moe.experts.deepspeed_experts, strict=True):
            mine.load_state_dict(theirs.state_dict())
        for each in (stock, own):
            each.train()
        torch.manual_seed(1)
        of_stock = stock(x_SM)[0]
        torch.manual_seed(1)
        found[case.name] = of_stock.detach(), own(x_SM).detach()
    return found


def test_a_gate_in_stocks_layer_decides_as_in_ours(tmp_path: Path) -> None:
    (found,) = run_on_ranks(compare_gates, 1, tmp_path)
    assert len(found) == 8
    for name, (of_stock, of_ours) in found.items():
        torch.testing.assert_close(
            of_ours, of_stock, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def compare_models(rank: int, world_size: int) -> dict[str, list[float]]:
    from benchmarks.language_model import LanguageModel, batches
    from benchmarks.layer_steps import Found, Steps
    from benchmarks.layers import Layer, Mpu, fix_capacity, fix_gather, ranks_per_node

    fix_gather()
    fix_capacity()
    found = {}
    with on_nodes(*TWO_NODES):
        mpu = Mpu(ranks_per_node())
        layer = Layer(B=2, L=16, M=16, ratio=2, f=None, ffn="mixtral")
        cut = {"schedule": "fsmoe", "pipeline_degree": {"forward": 2, "backward": 3}}
        for layout, block in (("node", {"esp_size": 2} | cut), ("ranks", cut)):
            for name, of in (("stock", None), ("ours", block)):
                read = batches(layer, layout)
                steps = Steps(layer, layout, mpu, Found(), of, make_model=LanguageModel, batches=read, lr=0.2)
                for _ in range(2):
                    steps()
                losses = torch.stack(steps.losses)
                torch.distributed.all_reduce(losses)
                found[f"{name}, {layout}"] = (losses / world_size).tolist()
                steps.close()
    return found


def test_language_models_of_both_systems_lose_alike_in_both_layouts(tmp_path: Path) -> None:
    (found, *_) = run_on_ranks(compare_models, 4, tmp_path)
    first = found["stock, node"]
    assert len(first) == 3
    assert first[2] < first[0]
    for name, losses in found.items():
        for step, (theirs, ours) in enumerate(zip(first, losses, strict=False)):
            # Auxiliary losses are those of a rank's tokens, and layouts differ in which these are.
            assert abs(ours / theirs - 1) < 1e-2, (name, step, found)
    for ours, stock in zip(found["ours, ranks"], found["stock, ranks"], strict=False):
        assert abs(ours / stock - 1) < 1e-5, found
