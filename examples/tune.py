# SPDX-License-Identifier: Apache-2.0
"""Measure, choose, look at it: the autotuner in a run, its cluster file in the planner, and the report of the run.

deepspeed --num_accelerators 2 examples/tune.py --folder runs/tuned
ds_fsmoe report runs/tuned/run
ds_fsmoe plan --ep-size 2 --width 256 --hidden 1024 --length 512 --layers 4 --cluster CLUSTER.json

The first prints the name of the file that CLUSTER.json stands for.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

import ds_fsmoe

WIDTH, HIDDEN, EXPERTS, TOKENS = 64, 256, 4, 256


class Model(nn.Module):
    """Two MoE layers, each behind a linear one."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.moes = nn.ModuleList(
            ds_fsmoe.MoE(WIDTH, ds_fsmoe.GPTFeedForward(WIDTH, HIDDEN), num_experts=EXPERTS, ep_size=ep_size, k=2)
            for _ in range(2)
        )

    def forward(self, x_SM: torch.Tensor) -> torch.Tensor:
        """The loss."""
        target_SM, total = torch.sin(3 * x_SM), x_SM.new_zeros(())
        for linear, moe in zip(self.linears, self.moes, strict=True):
            y_SM, aux_loss, _ = moe(linear(x_SM))
            x_SM, total = x_SM + y_SM, total + aux_loss
        return (x_SM - target_SM).square().mean() + 0.01 * total


def main() -> None:
    """Train for as long as it takes to try the best few plans, and a little more."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/tuned"), help="for all that is kept (%(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (%(default)s)")
    parser.add_argument("--trials", type=int, default=2, help="steps with each plan that is tried (%(default)s)")
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parser.parse_args()
    if get_accelerator().device_name() == "cpu":
        # Compiled by DeepSpeed at its first process group on a CPU, for a collective of inference only.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Model(ep_size=dist.get_world_size())
    config = {
        "train_micro_batch_size_per_gpu": TOKENS,
        "optimizer": {"type": "Adam", "params": {"lr": 0.003, "torch_adam": True}},
        "steps_per_print": 1_000_000,
        "fsmoe": {
            "enabled": True,
            "autotune": {"enabled": True, "cache_dir": str(args.folder / "cache"), "trials": args.trials},
            "num_chunks": {"max": 4},
            "record": {"dir": str(args.folder / "run")},
            "trace": {"enabled": True, "start_step": args.steps - 3, "num_steps": 2},
        },
    }
    engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(args.steps):
        engine.backward(engine(torch.randn(TOKENS, WIDTH, device=engine.device)))
        engine.step()
    chosen = engine.fsmoe.chosen()
    engine.destroy()
    if dist.get_rank() == 0:
        print(f"chosen: {chosen['num_chunks']}, gradients {chosen['gradients']}")
        for file in (args.folder / "cache").glob("*.json"):
            print(f"measured: {file}")
        print(f"recorded: {args.folder / 'run'}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
