# SPDX-License-Identifier: Apache-2.0
"""Parts of one's own at work: a small model is trained with each of the files in ``extensions/``, named in the config.

deepspeed --num_accelerators 2 examples/extend.py gate order alltoall expert hook
"""

from __future__ import annotations

import argparse
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

import ds_fsmoe
from ds_fsmoe import registry

WIDTH, HIDDEN, EXPERTS, TOKENS, STEPS = 16, 32, 4, 64, 30
BLOCKS: dict[str, dict[str, Any]] = {
    "gate": {"plugins": ["extensions.tempered_gate"], "gate": {"type": "tempered", "start": 2.0}},
    "order": {"plugins": ["extensions.scatter_order"], "order": "scatter"},
    "alltoall": {"plugins": ["extensions.ring_alltoall"], "alltoall": "ring"},
    "expert": {"plugins": ["extensions.bottleneck_expert"]},
    "hook": {"hooks": ["extensions.traffic_hook.TRAFFIC"]},
}
"""Kind of part -> the fsmoe block that uses the example of it."""


class Regressor(nn.Module):
    """An MoE layer and a linear one, to learn a fixed function of random tokens."""

    def __init__(self, expert: nn.Module) -> None:
        super().__init__()
        self.moe = ds_fsmoe.MoE(WIDTH, expert, num_experts=EXPERTS, ep_size=dist.get_world_size(), k=2)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_SM: torch.Tensor) -> torch.Tensor:
        """The loss."""
        y_SM, aux_loss, _ = self.moe(x_SM)
        error = self.head(x_SM + y_SM) - torch.sin(3 * x_SM).roll(1, dims=1)
        return error.square().mean() + 0.01 * aux_loss


def train(kind: str) -> tuple[float, float]:
    """The first and the last loss."""
    block = {"enabled": True, "num_chunks": {"forward": 2, "backward": 3}} | BLOCKS[kind]
    if kind == "expert":
        import extensions.bottleneck_expert  # noqa: F401 - a model is built before initialize() imports its plugins

        expert = registry.lookup("expert", "bottleneck")(WIDTH, HIDDEN)
    else:
        expert = ds_fsmoe.GPTFeedForward(WIDTH, HIDDEN)
    torch.manual_seed(0)
    model = Regressor(expert)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 1_000_000,
        "fsmoe": block,
    }
    engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        loss = engine(torch.randn(TOKENS, WIDTH, device=engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses[0], losses[-1]


def main() -> None:
    """Train with each kind that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{', '.join(BLOCKS)} (all)")
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parser.parse_args()
    unknown = [kind for kind in args.kinds if kind not in BLOCKS]
    if unknown:
        parser.error(f"{unknown[0]!r}: the choices are {', '.join(BLOCKS)}")
    if get_accelerator().device_name() == "cpu":
        # Compiled by DeepSpeed at its first process group on a CPU, for a collective of inference only.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    for kind in args.kinds or BLOCKS:
        first, last = train(kind)
        if dist.get_rank() == 0:
            print(f"{kind:9s} {BLOCKS[kind]}: loss {first:.4f} -> {last:.4f}", flush=True)
    if dist.get_rank() == 0 and "hook" in (args.kinds or BLOCKS):
        from extensions.traffic_hook import TRAFFIC

        print(", ".join(f"{direction}: {sent / 1e3:.1f} kB sent" for direction, sent in TRAFFIC.sent_bytes.items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
