# SPDX-License-Identifier: Apache-2.0
"""A script as users write it: one step, and what it found of its place. Started by the launchers under test."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE

import ds_fsmoe
from ds_fsmoe.distributed.groups import make_groups


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--local_rank", type=int, default=-1)
    folder = parser.parse_args().folder
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    moe = MoE(8, torch.nn.Linear(8, 8), num_experts=2, ep_size=dist.get_world_size(), k=1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "fsmoe": {"enabled": True, "pipeline_degree": {"forward": 2, "backward": 2}},
    }
    engine, *_ = ds_fsmoe.initialize(model=moe, model_parameters=list(moe.parameters()), config=config)
    loss = engine(torch.ones(4, 8))[0].square().mean()
    engine.backward(loss)
    engine.step()
    topology = make_groups().topology
    place = f"{dist.get_rank()} of {dist.get_world_size()}, nodes {list(topology.node_of_rank)}"
    (folder / f"rank{dist.get_rank()}.txt").write_text(place)
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
