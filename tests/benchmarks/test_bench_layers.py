# SPDX-License-Identifier: Apache-2.0
"""What bench_layer and bench_gates compare is the same work: the same losses and decisions in the same layout."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe import registry
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.test_alltoalls import on_nodes

pytestmark = pytest.mark.long

TWO_NODES = (0, 0, 1, 1)
TOKENS, CHOICES, LAYERS = 2 * 16, 2, 2
"""Of a node, in a layer, and in all."""
CASES: dict[str, tuple[Any, float | None, str]] = {
    "ranks": ("ranks", 1.25, "gpt"),
    "node": ("node", 1.25, "gpt"),
    "node, no drop": ("node", None, "mixtral"),
}
"""Layout of the ranks, capacity factor, kind of experts."""


@dataclass
class Work:
    """What one step of a rank is made of. Of experts and attention that is the forward: the backward is twice that."""

    slots: int = 0
    """Rows that experts were called on."""
    filled: int = 0
    """Those of them that are a token's."""
    expert_flops: int = 0
    attention_flops: int = 0
    sent_bytes: int = 0
    """By all-to-alls of tokens between nodes."""

    def of_expert(self, module: nn.Module, args: tuple[torch.Tensor, ...], *_: Any) -> None:
        x_RM = args[0].detach().flatten(0, -2)
        self.slots += len(x_RM)
        self.filled += int((x_RM != 0).any(dim=1).sum())
        # Weights as they are on this rank: a part of each, if experts are sharded.
        self.expert_flops += 2 * len(x_RM) * sum(each.numel() for each in module.parameters() if each.dim() == 2)

    def of_attention(self, module: nn.Linear, args: tuple[torch.Tensor, ...], *_: Any) -> None:
        self.attention_flops += 2 * args[0].flatten(0, -2).shape[0] * module.weight.numel()


def work_of(steps: Any) -> tuple[Work, float]:
    """Of a step, and its loss."""
    work, send = Work(), dist.all_to_all_single

    def counted(*args: Any, **options: Any) -> Any:
        ranks = dist.get_process_group_ranks(options["group"])
        is_of_tokens = not options["group"].group_desc.startswith("fsmoe_gradients")
        if is_of_tokens and len({TWO_NODES[rank] for rank in ranks}) > 1:
            work.sent_bytes += (options["input"] if "input" in options else args[1]).nbytes
        return send(*args, **options)

    for moe, attention in zip(steps.engine.module.moes, steps.engine.module.attention, strict=True):
        for expert in moe.deepspeed_moe.experts.deepspeed_experts:
            expert.register_forward_hook(work.of_expert)
        for linear in (attention.qkv, attention.out):
            linear.register_forward_hook(work.of_attention)
    dist.all_to_all_single = counted
    steps()
    dist.all_to_all_single = send
    steps.close()
    return work, float(steps.losses[-1])


def compare_layers(rank: int, world_size: int) -> dict[tuple[str, str], tuple[Work, float]]:
    from benchmarks.models.layer_steps import Found, Steps
    from benchmarks.models.layers import Layer, Mpu, fix_capacity, fix_gather, ranks_per_node

    fix_gather()
    fix_capacity()
    found = {}
    with on_nodes(*TWO_NODES):
        mpu = Mpu(ranks_per_node())
        for case, (layout, f, ffn) in CASES.items():
            layer = Layer(B=2, L=TOKENS // 2, M=16, ratio=2, f=f, ffn=ffn, k=CHOICES, layers=LAYERS)
            # Cut alike, or experts that have hooks would be run once more in the backward.
            cut = {"schedule": "fsmoe", "pipeline_degree": {"forward": 3, "backward": 3}}
            cut |= {"esp_size": 2} if layout == "node" else {}
            for system, block in (("stock", None), ("ours", cut)):
                # Stock takes one step when it is made and ours more, of a tiny learning rate.
                found[case, system] = work_of(Steps(layer, layout, mpu, Found(stage=layout == "node"), block))
    return found


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], tuple[Work, float]]]:
    return run_on_ranks(compare_layers, 4, tmp_path_factory.mktemp("layers") / "ranks")


@pytest.mark.parametrize("case", ["ranks", "node"])
def test_both_systems_do_the_same_work_in_the_same_layout(compared: list, case: str) -> None:
    for found in compared:
        stock, ours = found[case, "stock"][0], found[case, "ours"][0]
        assert min(asdict(stock).values()) > 0
        assert replace(ours, filled=0) == replace(stock, filled=0)
        assert ours.filled == stock.filled or case == "node"
    # About as many tokens are dropped, but not the same ones: of our ranks each drops its own.
    filled = [sum(found[case, system][0].filled for found in compared) for system in ("stock", "ours")]
    assert filled[1] == pytest.approx(filled[0], rel=0.1)


def test_where_nothing_is_dropped_no_token_is_and_ours_sends_no_more_than_stock(compared: list) -> None:
    of_ranks = {system: [found["node, no drop", system][0] for found in compared] for system in ("stock", "ours")}
    for stock, ours in zip(*of_ranks.values(), strict=True):
        assert ours.attention_flops == stock.attention_flops
        # A row more or less is as much more or less of everything, but for the counts that travel ahead.
        slots, flops, sent = (
            getattr(ours, each) / getattr(stock, each) for each in ("slots", "expert_flops", "sent_bytes")
        )
        assert flops == pytest.approx(slots)
        assert 0.5 < slots < sent < 1.0
    for works in of_ranks.values():
        # Every token of both nodes is at k experts, each of which is on two ranks, in every layer.
        assert sum(each.filled for each in works) == 2 * (2 * TOKENS) * CHOICES * LAYERS


def test_both_systems_have_the_same_loss_in_the_same_layout(compared: list) -> None:
    for found in compared:
        (_, stock), (_, ours) = found["ranks", "stock"], found["ranks", "ours"]
        assert ours == pytest.approx(stock, rel=1e-3)
        # In the other layout experts begin with other numbers, so losses say nothing but that it works.
        assert all(math.isfinite(loss) for _, loss in found.values())


def compare_gates(rank: int, world_size: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    from deepspeed.moe.layer import MoE

    import ds_fsmoe
    from benchmarks.cases.bench_gates import GRID, InStock
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
    # All but stock's own and softmoe, whose slots mix tokens.
    assert len(found) == len(registry.known("gate")) - 2
    for name, (of_stock, of_ours) in found.items():
        torch.testing.assert_close(
            of_ours, of_stock, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def compare_models(rank: int, world_size: int, layouts: list[str]) -> dict[str, list[float]]:
    from benchmarks.models.language_model import LanguageModel, batches
    from benchmarks.models.layer_steps import Found, Steps
    from benchmarks.models.layers import Layer, Mpu, fix_capacity, fix_gather, ranks_per_node

    fix_gather()
    fix_capacity()
    found = {}
    with on_nodes(*TWO_NODES):
        mpu = Mpu(ranks_per_node())
        layer = Layer(B=2, L=16, M=16, ratio=2, f=None, ffn="mixtral")
        cut = {"schedule": "fsmoe", "pipeline_degree": {"forward": 2, "backward": 3}}
        for layout in layouts:
            block = {"esp_size": 2} | cut if layout == "node" else cut
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


@sampled("layouts", [["ranks"], ["node", "ranks"]], kept=[0], ids=" and ".join)
def test_language_models_of_both_systems_lose_alike_in_both_layouts(layouts: list[str], tmp_path: Path) -> None:
    (found, *_) = run_on_ranks(compare_models, 4, tmp_path, layouts)
    assert len(found) == 2 * len(layouts)
    first = found[f"stock, {layouts[0]}"]
    assert len(first) == 3
    assert first[2] < first[0]
    for name, losses in found.items():
        for step, (theirs, ours) in enumerate(zip(first, losses, strict=False)):
            # Auxiliary losses are those of a rank's tokens, and layouts differ in which these are.
            assert abs(ours / theirs - 1) < 1e-2, (name, step, found)
    for ours, stock in zip(found["ours, ranks"], found["stock, ranks"], strict=False):
        assert abs(ours / stock - 1) < 1e-5, found
