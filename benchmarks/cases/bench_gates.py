# SPDX-License-Identifier: Apache-2.0
"""Every gate in a small GPT: our layer beside stock's layer with the same gate in it (the paper's Table 6).

``cluster.py up --inter 25mbit --intra 100mbit``, then ``cluster.py run -- benchmarks/cases/bench_gates.py``. Stock's
layer calls the gate through :class:`InStock`, which writes the decision down as stock's own gate does; a slot of
``softmoe`` mixes tokens, which that form cannot say, so it has no case here. Layouts and fixes of stock are those of
``bench_layer.py``. "ours, uncut" is our layer, gate and ops by the schedule of stock, one task after another: what it
gains over stock is not scheduling; what "ours" gains over it is. Rows go to ``benchmarks/results/gates.csv``.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ds_fsmoe
from benchmarks.harness.harness import RESULTS, Case, Effort, Grid, Variant, run_grid
from benchmarks.harness.routing import parsed
from benchmarks.models.layer_steps import Found, Steps
from benchmarks.models.layers import TINY, Layer, Layout, Model, Mpu, begin, ranks_per_node
from ds_fsmoe import registry
from ds_fsmoe.components.routing import DenseRouting, SlotRouting, kind_of
from ds_fsmoe.registry import known


@dataclass(frozen=True)
class Gated:
    """Layers with a gate by name, that takes each token to k experts."""

    gate: str
    k: int
    layer: Layer

    @property
    def options(self) -> dict[str, Any]:
        """Of the gate: as many slots for each expert in all cases of one k."""
        least = {} if self.gate == "expert_choice" else {"min_capacity": 0}
        return {"k": self.k, "capacity_factor": self.layer.f} | least


def case(gate: str, k: int) -> Case:
    """The same layers for all, each token to k experts."""
    layer = Layer(B=2, L=128, M=64, ratio=64, f=1.25, ffn="gpt", k=k)
    return Case(f"{gate}, k = {k}, stock fixed", Gated(gate, k, layer))


ONE_EXPERT = ("switch",)
"""Gates that take each token to one expert."""
GATES = [each for each in known("gate") if kind_of(registry.lookup("gate", each)) is not DenseRouting]
GRID = Grid("gates", tuple(case(gate, 1 if gate in ONE_EXPERT else 2) for gate in GATES))


class InStock(nn.Module):
    """A gate of ours in the form in which stock's layer asks its own."""

    def __init__(self, gate: ds_fsmoe.GateBase) -> None:
        super().__init__()
        self.gate, self.group = gate, None

    def _set_ep_group(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def forward(self, x_SM: torch.Tensor, used_token_S: torch.Tensor | None, *_: bool) -> tuple[Any, ...]:
        """(loss, C, E, [K, S] experts, [K, S] positions, [K, S] weights, [E] counts); expert -1 is a choice dropped."""
        routing = self.gate(x_SM, used_token_S, self.group)
        num_experts, capacity = routing.num_experts, routing.capacity
        if isinstance(routing, SlotRouting):
            # One choice per expert, nearly all of them dropped.
            rows = torch.arange(routing.num_slots)
            place = (rows // capacity, routing.tokens_R)
            size = (num_experts, routing.num_tokens + 1)
            slots_KS = torch.full(size, routing.num_slots).index_put(place, rows)[:, :-1]
            weights_KS = torch.zeros(size).index_put(place, routing.weights_R)[:, :-1]
        else:
            slots_KS, weights_KS = routing.slots_KS, routing.weights_KS
        expert_KS = torch.where(slots_KS < routing.num_slots, slots_KS // capacity, -1)
        return routing.aux_loss, capacity, num_experts, expert_KS, slots_KS % capacity, weights_KS, routing.counts_E


def stock(mpu: Mpu, layout: Layout, gated: Gated) -> Steps:
    """Stock's layers, with the gate in them."""

    def take_in(model: Model) -> None:
        for moe in model.moes:
            gate = registry.lookup("gate", gated.gate)(**gated.options)
            gate.build_once(gated.layer.M, gated.layer.E)
            moe.deepspeed_moe.gate = InStock(gate)

    return Steps(gated.layer, layout, mpu, Found(), None, take_in if gated.gate != "topk" else lambda _: None)


def ours(mpu: Mpu, layout: Layout, block: dict[str, Any], gated: Gated) -> Steps:
    """Ours."""
    if gated.gate != "topk":
        block = block | {"gate": {"type": gated.gate} | gated.options}
    if layout == "node":
        block = block | {"esp_size": ranks_per_node()}
    return Steps(gated.layer, layout, mpu, Found(), block)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--degree", type=int, default=3, help="chunks of the MoE layers")
    parser.add_argument("--only", nargs="*", help="gates to measure (all)")
    parser.add_argument("--smoke", action="store_true", help="tiny layers, to see that all runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    begin()
    mpu = Mpu(ranks_per_node())
    uncut = {"schedule": "deepspeed"}
    cut = {"schedule": "best", "pipeline_degree": {"forward": args.degree, "backward": args.degree}}
    variants = (
        Variant("stock", partial(stock, mpu, "node")),
        Variant("ours, uncut", partial(ours, mpu, "node", uncut)),
        Variant("ours", partial(ours, mpu, "node", cut)),
        Variant("stock, best layout", partial(stock, mpu, "ranks")),
        Variant("ours, best layout", partial(ours, mpu, "ranks", cut)),
    )
    chosen = tuple(each for each in GRID.cases if args.only is None or each.settings.gate in args.only)
    effort = Effort(blocks=args.blocks, steps=1, warmup=2)
    if args.smoke:
        chosen = tuple(Case(f"tiny {each.name}", replace(each.settings, layer=TINY)) for each in chosen)
        effort = Effort(blocks=2, steps=1, warmup=1)
    over = {"stock, best layout": ["ours, best layout"]}
    run_grid(Grid(GRID.name, chosen), variants, "stock", effort, results=args.results, further=over)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
