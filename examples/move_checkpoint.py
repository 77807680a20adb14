# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that moves: saved by two ranks that share the experts, gone on with by one that has them all.

deepspeed --num_accelerators 2 examples/move_checkpoint.py --save runs/moving
deepspeed --num_accelerators 1 examples/move_checkpoint.py --load runs/moving --stage 2

Both print the loss over the same tokens, and the moments of the optimizer move too: the loss after ten more steps is
that of a run that was never moved (`--save` prints it).
"""

from __future__ import annotations

import argparse
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from torch import nn

import ds_fsmoe

WIDTH, EXPERTS, TOKENS = 16, 4, 96


class Model(nn.Module):
    """An MoE layer of DeepSpeed's between two linear ones."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        expert = ds_fsmoe.GPTFeedForward(WIDTH, 2 * WIDTH)
        # Nothing is dropped, so that what is computed does not depend on how tokens are spread over ranks.
        self.moe = MoE(WIDTH, expert, num_experts=EXPERTS, ep_size=ep_size, k=3, drop_tokens=False)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_SM: torch.Tensor) -> torch.Tensor:
        """The loss."""
        y_SM, _, _ = self.moe(x_SM)
        return (self.head(x_SM + y_SM) - torch.sin(3 * x_SM)).square().mean()


def tokens_of(step: int) -> torch.Tensor:
    """[S, M]: this rank's part of the tokens of a step, which are the same for any number of ranks."""
    everyone = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))
    return everyone.chunk(dist.get_world_size())[dist.get_rank()].contiguous()


def mean_loss(engine: Any, step: int) -> float:
    """Over the tokens of a step, without training on them."""
    with torch.no_grad():
        loss = engine(tokens_of(step).to(engine.device))
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def train(engine: Any, steps: range) -> None:
    """On the tokens of these steps."""
    for step in steps:
        engine.backward(engine(tokens_of(step).to(engine.device)))
        engine.step()


def main() -> None:
    """Save, or load and go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--save", metavar="FOLDER", help="train 20 steps, save, train 10 more")
    which.add_argument("--load", metavar="FOLDER", help="load what --save has left, train 10 steps")
    parser.add_argument("--stage", type=int, default=0, choices=(0, 1, 2), help="of ZeRO (%(default)s)")
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parser.parse_args()
    if get_accelerator().device_name() == "cpu":
        # Compiled by DeepSpeed at its first process group on a CPU, for a collective of inference only.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Model(ep_size=dist.get_world_size())
    config = {
        "train_micro_batch_size_per_gpu": TOKENS // dist.get_world_size(),
        "optimizer": {"type": "Adam", "params": {"lr": 0.003, "torch_adam": True}},
        "zero_optimization": {"stage": args.stage},
        "steps_per_print": 1_000_000,
        "fsmoe": {"enabled": True, "num_chunks": 2},
    }
    engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    if args.save:
        train(engine, range(20))
        engine.save_checkpoint(args.save)
    else:
        engine.load_checkpoint(args.load)
    before = mean_loss(engine, 1000)
    train(engine, range(20, 30))
    after = mean_loss(engine, 1000)
    if dist.get_rank() == 0:
        what = "saved" if args.save else "loaded"
        where = f"{dist.get_world_size()} rank(s), ZeRO stage {args.stage}"
        print(f"{where}: loss when {what} {before:.6f}, ten steps later {after:.6f}", flush=True)
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
