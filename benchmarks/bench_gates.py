# SPDX-License-Identifier: Apache-2.0
"""Every gate in a small GPT: our layer beside stock's layer with the same gate in it (the paper's Table 6).

``cluster.py up --inter 50mbit --intra 200mbit``, then ``cluster.py run -- benchmarks/bench_gates.py``. Experts are
spread over all ranks in every variant, which is what stock's layer does best. Stock's layer calls the gate through
:class:`InStock`, which writes the decision down as stock's own gate does; a ``softmoe`` slot mixes tokens, which that
form cannot say, so it has no case here. "ours, uncut" is our layer, gate and ops by the schedule of stock, one task
after another: what it gains are kernels; what "ours" gains over it is scheduling. Rows go to
``benchmarks/results/gates.csv``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
# Run as a file, Python looks for modules beside it only.
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from gpt_moe import VOCABULARY, GPTMoE, Sizes  # noqa: E402

import ds_fsmoe  # noqa: E402
from benchmarks.harness import RESULTS, Case, Effort, Grid, Variant, run_grid  # noqa: E402
from ds_fsmoe import registry  # noqa: E402
from ds_fsmoe.components.slot_routing import SlotRouting  # noqa: E402
from ds_fsmoe.reduction import LOOKS  # noqa: E402


@dataclass(frozen=True)
class Model:
    """``layers`` blocks, B sequences of L tokens per rank, E experts of hidden width H in each MoE layer."""

    gate: str
    k: int
    layers: int = 2
    B: int = 1
    L: int = 256
    M: int = 256
    H: int = 1024
    E: int = 8


GRID = Grid(
    "gates",
    tuple(
        Case(f"{gate}, k = {k}", Model(gate, k))
        for gate, k in (
            ("topk", 2),
            ("gshard", 2),
            ("xmoe", 2),
            ("sigmoid", 1),
            ("expert_choice", 2),
            ("switch", 1),
            ("deepseek", 2),
            ("mixtral", 2),
            ("qwen", 2),
        )
    ),
)


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


class TrainingStep:
    """An engine over the model, and a step of it; the same weights and tokens whoever makes it."""

    def __init__(self, model: Model, initialize: Any, block: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        ranks = dist.get_world_size()
        module = GPTMoE(Sizes(model.M, model.layers, 4, model.L, model.E, ranks, min(model.k, 2), 1.0))
        for each in module.blocks:
            expert = ds_fsmoe.GPTFeedForward(model.M, model.H)
            options = {"num_experts": model.E, "ep_size": ranks, "capacity_factor": 1.0, "use_rts": False}
            each.moe = MoE(model.M, expert, k=model.k, **options)
            if block is None and model.gate != "topk":
                gate = registry.lookup("gate", model.gate)(capacity_factor=1.0, k=model.k)
                gate.build_once(model.M, model.E)
                each.moe.deepspeed_moe.gate = InStock(gate)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": model.B,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 1 << 20},
            "steps_per_print": 1_000_000,
        }
        if block is not None:
            gate = {} if model.gate == "topk" else {"gate": {"type": model.gate, "k": model.k}}
            config["fsmoe"] = {"enabled": True} | gate | block
        self.engine = initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]
        torch.manual_seed(dist.get_rank())
        self.tokens_BL = torch.randint(VOCABULARY, (model.B, model.L))
        # In its first steps an engine of ours looks at what there is to reduce, and when.
        for _ in range(0 if block is None else LOOKS):
            self()

    def __call__(self) -> None:
        loss, aux_loss = self.engine(self.tokens_BL, self.tokens_BL)
        self.engine.backward(loss + 0.01 * aux_loss)
        self.engine.step()

    def close(self) -> None:
        self.engine.destroy()


def ours(**block: Any) -> Callable[[Model], TrainingStep]:
    return lambda model: TrainingStep(model, ds_fsmoe.initialize, block)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--degree", type=int, default=4, help="chunks of the MoE layers")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parser.parse_args()
    # Compiled by DeepSpeed at its first process group on a CPU, for a collective of inference only.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=60))
    degrees = {"pipeline_degree": {"forward": args.degree, "backward": args.degree}}
    variants = (
        Variant("stock", lambda model: TrainingStep(model, deepspeed.initialize, None)),
        Variant("ours, uncut", ours(schedule="deepspeed")),
        Variant("ours", ours(schedule="best", **degrees)),
    )
    run_grid(GRID, variants, "stock", Effort(blocks=args.blocks, steps=1, warmup=2), results=args.results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
