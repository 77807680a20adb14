# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's flops profiler on an engine of ours: it sees the products of experts, and changes nothing."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ds_fsmoe.telemetry.flops import count_grouped_products
from tests.ranks import run_on_ranks
from tests.small_model import BATCH, LENGTH, NUM_EXPERTS, WIDTH, Case, small_engine, train_steps


def macs_of(file: Path) -> float:
    """The multiply-accumulates of a rank's forward of one micro batch, as the profiler has written them."""
    number, unit = re.search(r"fwd MACs per GPU:\s+([\d.]+) (\w*)MACs", file.read_text()).groups()
    return float(number) * {"": 1.0, "K": 1e3, "M": 1e6}[unit]


class Counted:
    """A module as DeepSpeed's profiler takes it, within an engine."""

    def __init__(self) -> None:
        from deepspeed.profiling.flops_profiler import FlopsProfiler

        class Grouped(torch.nn.Module):
            def forward(self, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
                return F.grouped_mm(x, weight, offs=ends)

        self.module = Grouped()
        self.flops_profiler = FlopsProfiler(self.module)


def test_a_grouped_product_counts_as_the_products_that_it_is() -> None:
    engine, grouped_mm = Counted(), F.grouped_mm
    count_grouped_products(engine)
    x, weight, ends = torch.ones(6, 8), torch.ones(2, 8, 4), torch.tensor([2, 6], dtype=torch.int32)
    for _ in range(2):
        engine.flops_profiler.start_profile()
        assert torch.equal(engine.module(x, weight, ends), torch.full((6, 4), 8.0))
        engine.flops_profiler.stop_profile()
        assert engine.flops_profiler.get_total_macs() == 6 * 8 * 4
        assert engine.flops_profiler.get_total_flops() == 2 * 6 * 8 * 4
        assert F.grouped_mm is grouped_mm
    engine.flops_profiler.end_profile()


def profiled(rank: int, world_size: int, folder: str) -> list[bool]:
    """Whether layers are cut when a step has been profiled."""
    profiler = {"enabled": True, "profile_step": 1, "output_file": f"{folder}/flops.txt"}
    block = {"num_chunks": 2, "autotune": False}
    engine = small_engine(Case(2, 1, expert="gpt"), rank, block, flops_profiler=profiler)
    train_steps(engine, rank, range(3))
    return [each.pipeline.is_chunked for each in engine.fsmoe.layers.values()]


@pytest.mark.long
def test_layers_stay_cut_where_rank_0_is_profiled_and_the_products_of_experts_count(tmp_path: Path) -> None:
    assert run_on_ranks(profiled, 2, tmp_path / "ranks", str(tmp_path)) == [[True, True]] * 2
    tokens, slots = BATCH * LENGTH, NUM_EXPERTS * math.ceil(BATCH * LENGTH * 1.25 / NUM_EXPERTS)
    of_a_layer = tokens * WIDTH * (WIDTH + NUM_EXPERTS) + slots * 2 * WIDTH * 28
    assert macs_of(tmp_path / "flops.txt") == 2 * of_a_layer == 50_050
