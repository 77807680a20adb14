# SPDX-License-Identifier: Apache-2.0
"""``make soak``, second part: thousands of steps of all kinds, after which a rank holds no more than in the beginning.

``deepspeed --num_accelerators 2 benchmarks/faults/soak_job.py``. Every step draws its batch size and length, and where
its tokens go: spread evenly, half of them to one expert, or all to one so that others stay empty. Steps accumulate,
between some there is an evaluation, and the last batch of an epoch is smaller. Memory, threads, file descriptors and
process groups are counted in the first tenth and at the end. With ``"deterministic": true`` the first steps are done
twice, with the same losses to the bit.

A row goes to ``benchmarks/results/soak.csv``.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import ds_fsmoe
from benchmarks.harness.outcome import PACKAGES
from benchmarks.harness.result_files import RESULTS, append_rows, made_with
from benchmarks.harness.routing import parsed

WIDTH, NUM_EXPERTS, EPOCH = 24, 4, 50
MAX_BATCH, MAX_LENGTH = 4, 40
GROWTH_MB = 24.0
"""That memory may have grown by: what an allocator keeps varies by so much."""
ROUTINGS = ("even", "half to one", "all to one")


@dataclass(frozen=True)
class Held:
    """By this process."""

    memory_mb: float
    threads: int
    files: int
    groups: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        files = len(os.listdir("/proc/self/fd"))
        groups = len(dist.distributed_c10d._world.pg_map)
        return cls(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, threading.active_count(), files, groups)


class Network(nn.Module):
    """Two MoE layers, one that drops tokens and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            ds_fsmoe.MoE(
                WIDTH,
                ds_fsmoe.GPTFeedForward(WIDTH, 2 * WIDTH),
                num_experts=NUM_EXPERTS,
                ep_size=dist.get_world_size(),
                k=1 + number,
                drop_tokens=number == 0,
            )
            for number in range(2)
        )

    def forward(self, x_BLM: torch.Tensor) -> torch.Tensor:
        """The loss."""
        y_BLM, aux_losses = self.first(x_BLM), torch.zeros(())
        for layer in self.layers:
            out_BLM, aux_loss, _ = layer(y_BLM)
            y_BLM, aux_losses = y_BLM + out_BLM, aux_losses + aux_loss
        return (y_BLM - x_BLM.roll(1, 1)).square().sum() / y_BLM.numel() + 0.01 * aux_losses


def make(deterministic: bool, accumulation: int) -> Any:
    """A new engine."""
    torch.manual_seed(0)
    model = Network()
    config = {
        "train_micro_batch_size_per_gpu": MAX_BATCH,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 4096},
        "steps_per_print": 1_000_000,
        "fsmoe": {
            "enabled": True,
            "pipeline_degree": {"forward": 3, "backward": 2},
            "deterministic": deterministic,
            "debug": {"hang_timeout_s": 60.0, "check_every": 100},
        },
    }
    return ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def batch(step: int) -> torch.Tensor:
    """[B, L, M]: of the same size on all ranks, with tokens of each rank's own."""
    common = random.Random(step)
    size = 1 if step % EPOCH == EPOCH - 1 else common.randint(1, MAX_BATCH)
    length, routing = common.randint(1, MAX_LENGTH), common.choice(ROUTINGS)
    generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
    x_BLM = torch.randn(size, length, WIDTH, generator=generator)
    if routing != "even":
        hot = torch.randn(WIDTH, generator=torch.Generator().manual_seed(step))
        is_hot_BL = torch.rand(size, length, 1, generator=generator) < (0.5 if routing == "half to one" else 2)
        x_BLM = x_BLM + is_hot_BL * 5 * hot
    return x_BLM


def train(engine: Any, steps: range) -> list[float]:
    """Losses of this rank."""
    found = []
    for step in steps:
        loss = engine(batch(step))
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
        if step % 17 == 16:
            engine.eval()
            with torch.no_grad():
                engine(batch(step + 1))
            engine.train()
    return found


def main() -> int:
    """Exit status 0 if nothing grew and what is to be equal is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    twice = []
    for _ in range(2):
        engine = make(deterministic=True, accumulation=2)
        twice.append(train(engine, range(min(200, args.steps))))
        engine.destroy()
    engine = make(deterministic=False, accumulation=3)
    train(engine, range(args.steps // 10))
    before = Held.now()
    last = train(engine, range(args.steps // 10, args.steps))[-1]
    after = Held.now()
    engine.destroy()
    found = [(before, after, twice[0] == twice[1])] * dist.get_world_size()
    dist.all_gather_object(found, found[0])
    passed = all(is_same and not grown(first, now) for first, now, is_same in found)
    if dist.get_rank() == 0:
        print(f"{args.steps} steps, last loss {last:.4f}; the first {len(twice[0])} twice, ", end="")
        print("with equal losses" if all(each[2] for each in found) else "with DIFFERENT LOSSES")
        rows = []
        for rank, (first, now, is_same) in enumerate(found):
            facts = {"rank": rank, "steps": args.steps, "deterministic": is_same}
            facts |= {f"{name}_before": f"{value:.5g}" for name, value in asdict(first).items()}
            facts |= {f"{name}_after": f"{value:.5g}" for name, value in asdict(now).items()}
            print(f"  rank {rank}: after a tenth {first}, at the end {now}; {grown(first, now) or 'nothing grew'}")
            rows.append(made_with(PACKAGES) | facts | {"passed": not grown(first, now) and is_same})
        append_rows(args.results / "soak.csv", tuple(rows[0]), rows)
    dist.destroy_process_group()
    return 0 if passed else 1


def grown(first: Held, now: Held) -> str:
    """What there is more of, in words."""
    names = [name for name in ("threads", "files", "groups") if getattr(now, name) > getattr(first, name)]
    names += ["memory"] if now.memory_mb > first.memory_mb + GROWTH_MB else []
    return f"GROWN: {', '.join(names)}" if names else ""


if __name__ == "__main__":
    raise SystemExit(main())
