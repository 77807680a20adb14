# SPDX-License-Identifier: Apache-2.0
"""What our layer costs or saves where there is nothing to overlap: one training step, ours beside stock's.

``deepspeed --num_accelerators 2 benchmarks/bench_unchunked.py`` (or 1). Both models live in the same processes and take
turns step by step, so a machine that gets slower or faster meanwhile does so for both; the figure to quote is the
median of the ratios of neighbouring steps. Rows go to ``benchmarks/results/unchunked.csv``.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import platform
import statistics
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE

import ds_fsmoe

RESULTS = Path(__file__).parent / "results" / "unchunked.csv"
S, M, H, E = 2048, 256, 1024, 8


def make_engine(initialize: Any, k: int, dtype: str, enabled: bool) -> Any:
    """An engine over one MoE layer; the same weights whoever makes it."""
    torch.manual_seed(0)
    expert = ds_fsmoe.GPTFeedForward(M, H, activation="relu")
    model = MoE(M, expert, num_experts=E, ep_size=dist.get_world_size(), k=k, capacity_factor=1.2, use_rts=False)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1 << 20},
        "fsmoe": {"enabled": enabled},
        "steps_per_print": 1_000_000,
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    return initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def step_ms(engine: Any, x_SM: torch.Tensor) -> float:
    """Milliseconds of forward, backward and update on this rank, all ranks starting together."""
    dist.barrier()
    start = time.perf_counter()
    y_SM, aux_loss, _ = engine(x_SM)
    engine.backward(y_SM.float().square().mean() + 0.01 * aux_loss)
    engine.step()
    if x_SM.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def measure(k: int, dtype: str, steps: int) -> tuple[list[float], list[float]]:
    """Interleaved step times in ms: stock's, ours."""
    stock = make_engine(deepspeed.initialize, k, dtype, enabled=False)
    ours = make_engine(ds_fsmoe.initialize, k, dtype, enabled=True)
    torch.manual_seed(dist.get_rank())
    parameter = next(ours.module.parameters())
    x_SM = torch.randn(S, M, dtype=parameter.dtype, device=parameter.device)
    stock_ms, ours_ms = [], []
    for step in range(steps + 3):
        # Who goes first alternates, because the second of a pair may find the caches warm.
        order = ((stock, stock_ms), (ours, ours_ms))
        for engine, times_ms in order if step % 2 else reversed(order):
            times_ms.append(step_ms(engine, x_SM))
    stock.destroy()
    ours.destroy()
    return stock_ms[3:], ours_ms[3:]


def append_row(row: dict[str, Any]) -> None:
    new = not RESULTS.exists()
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if new:
            writer.writeheader()
        writer.writerow(row)


def hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    with open("/proc/cpuinfo") as file:
        names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} x{os.cpu_count()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="counted steps of each")
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    steps = parser.parse_args().steps
    # Compiled by DeepSpeed at its first process group on a CPU, for a collective of inference only.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    for k, dtype in itertools.product((1, 2), ("fp32", "bf16")):
        stock_ms, ours_ms = measure(k, dtype, steps)
        if dist.get_rank():
            continue
        ratios = [ours / stock for ours, stock in zip(ours_ms, stock_ms, strict=True)]
        row = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
            "commit": commit,
            "hardware": hardware(),
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
            "ranks": dist.get_world_size(),
            "S": S,
            "M": M,
            "H": H,
            "E": E,
            "k": k,
            "dtype": dtype,
            "steps": steps,
            "stock_ms": round(statistics.median(stock_ms), 2),
            "ours_ms": round(statistics.median(ours_ms), 2),
            "ratio": round(statistics.median(ratios), 3),
            "ratio_low": round(statistics.quantiles(ratios, n=4)[0], 3),
            "ratio_high": round(statistics.quantiles(ratios, n=4)[2], 3),
        }
        append_row(row)
        print(
            f"{row['ranks']} rank(s), k = {k}, {dtype}: stock {row['stock_ms']} ms, ours {row['ours_ms']} ms, "
            f"ours / stock {row['ratio']} (quartiles {row['ratio_low']} to {row['ratio_high']})",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
