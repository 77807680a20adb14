# SPDX-License-Identifier: Apache-2.0
"""Vision: a small transformer with MoE layers learns to read scikit-learn's handwritten digits (8 x 8 pixels).

deepspeed --num_accelerators 2 examples/digits.py

Each picture is cut into 16 patches of 2 x 2 pixels, which are its tokens. What the routers did is printed at the end.
"""

from __future__ import annotations

import argparse
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from sklearn.datasets import load_digits
from torch import nn

import ds_fsmoe

WIDTH, HEADS, LAYERS, EXPERTS = 32, 4, 2, 4
PATCHES, PIXELS = 16, 4  # of a picture, of a patch
BATCH, HELD_OUT = 64, 297


class Block(nn.Module):
    """Attention over the patches of a picture, then experts; each behind a norm and added to its input."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_moe = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        expert = ds_fsmoe.GPTFeedForward(WIDTH, 2 * WIDTH)
        self.moe = ds_fsmoe.MoE(WIDTH, expert, num_experts=EXPERTS, ep_size=ep_size, k=2, capacity_factor=1.5)

    def forward(self, x_BLM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, L, M] to the same, and the gate's auxiliary loss."""
        normed = self.norm_attention(x_BLM)
        x_BLM = x_BLM + self.attention(normed, normed, normed, need_weights=False)[0]
        y_BLM, aux_loss, _ = self.moe(self.norm_moe(x_BLM))
        return x_BLM + y_BLM, aux_loss


class Reader(nn.Module):
    """Pictures in, scores of the ten digits out."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.embed = nn.Linear(PIXELS, WIDTH)
        self.place_LM = nn.Parameter(0.02 * torch.randn(PATCHES, WIDTH))
        self.blocks = nn.ModuleList(Block(ep_size) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, patches_BLP: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, patches, pixels] to [B, 10], and the auxiliary losses of all layers."""
        x_BLM = self.embed(patches_BLP) + self.place_LM
        total = x_BLM.new_zeros(())
        for block in self.blocks:
            x_BLM, aux_loss = block(x_BLM)
            total = total + aux_loss
        return self.head(x_BLM.mean(dim=1)), total


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """[N, patches, pixels] between 0 and 1, and [N] digits."""
    images, digits = load_digits(return_X_y=True)
    pictures = torch.tensor(images, dtype=torch.float32).view(-1, 4, 2, 4, 2) / 16
    return pictures.permute(0, 1, 3, 2, 4).reshape(-1, PATCHES, PIXELS), torch.tensor(digits)


@torch.no_grad()
def accuracy(engine: Any, patches: torch.Tensor, digits: torch.Tensor) -> float:
    """The share of pictures read right; every rank reads all of them."""
    engine.eval()
    scores, _ = engine(patches.to(engine.device))
    engine.train()
    return (scores.argmax(dim=1).cpu() == digits).float().mean().item()


def main() -> None:
    """Train, and read pictures that were not seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps (%(default)s)")
    parser.add_argument("--gate", default="gshard", help="name of a gate that takes k (%(default)s)")
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parser.parse_args()
    if get_accelerator().device_name() == "cpu":
        # Compiled by DeepSpeed at its first process group on a CPU, for a collective of inference only.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Reader(ep_size=dist.get_world_size())
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "torch_adam": True}},
        "steps_per_print": 1_000_000,
        "fsmoe": {
            "enabled": True,
            "gate": {"type": args.gate, "top_k": 2},
            "num_chunks": 2,
        },
    }
    engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    patches, digits = load()
    seen, unseen = slice(None, -HELD_OUT), slice(-HELD_OUT, None)
    generator = torch.Generator().manual_seed(dist.get_rank())
    loss = torch.zeros(())
    for _ in range(args.steps):
        rows = torch.randint(len(digits) - HELD_OUT, (BATCH,), generator=generator)
        scores, aux_loss = engine(patches[seen][rows].to(engine.device))
        loss = F.cross_entropy(scores, digits[seen][rows].to(engine.device))
        engine.backward(loss + 0.01 * aux_loss)
        engine.step()
    right = accuracy(engine, patches[unseen], digits[unseen])
    if dist.get_rank() == 0:
        print(f"after {args.steps} steps: loss {loss.item():.3f}, {right:.1%} of {HELD_OUT} unseen digits read right")
        for index, block in enumerate(model.blocks):
            print(f"layer {index}: tokens per expert {block.moe.deepspeed_moe.exp_counts.tolist()}", flush=True)
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
