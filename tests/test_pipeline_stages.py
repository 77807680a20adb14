# SPDX-License-Identifier: Apache-2.0
"""A model cut into pipeline stages trains as with stock DeepSpeed, whether or not every stage has an MoE layer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_fsmoe.files.runs import read_run
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.small_model import BATCH, LENGTH, WIDTH

STEPS = 3
TOLERANCE = 1e-6
# Stage of ZeRO, what each of the two pipeline stages has, what is asked for.
CHUNKED = {"enabled": True, "pipeline_degree": {"forward": 2, "backward": 3}}
MICRO_OPS = {"enabled": True, "schedule": "lina", "gradient_partition": {"chunk_bytes": 900}}
CASES = [
    (0, ("moe", "moe"), CHUNKED),
    (0, ("moe", "dense"), CHUNKED),
    (0, ("dense", "moe"), {"enabled": True}),
    (1, ("moe", "moe"), {"enabled": True}),
    (0, ("moe", "dense"), MICRO_OPS),
]


class Dense(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BLM: torch.Tensor) -> torch.Tensor:
        return x_BLM + torch.tanh(self.linear(x_BLM))


class WithExperts(Dense):
    """Experts by global id, the same for every layout."""

    def __init__(self, seed: int, ep_rank: int) -> None:
        from deepspeed.moe.layer import MoE

        from ds_fsmoe.components.experts.gpt import GPTFeedForward

        super().__init__(seed)
        self.moe = MoE(WIDTH, GPTFeedForward(WIDTH, 28), num_experts=4, ep_size=2, k=2, use_rts=False)
        for local, expert in enumerate(self.moe.deepspeed_moe.experts.deepspeed_experts):
            generator = torch.Generator().manual_seed(100 * seed + 2 * ep_rank + local)
            with torch.no_grad():
                for each in expert.parameters():
                    each.copy_(torch.randn(each.shape, generator=generator) * 0.2)

    def forward(self, x_BLM: torch.Tensor) -> torch.Tensor:
        return x_BLM + self.moe(super().forward(x_BLM))[0]


def batches(replica: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for step in range(100):
        generator = torch.Generator().manual_seed(100 * step + replica)
        yield tuple(torch.randn(BATCH, LENGTH, WIDTH, generator=generator) for _ in range(2))


def train(rank: int, zero_stage: int, stages: tuple[str, ...], block: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import ds_fsmoe

    made = [WithExperts(i, rank % 2) if kind == "moe" else Dense(i) for i, kind in enumerate(stages)]
    layers = [each for i, layer in enumerate(made) for each in (layer, Dense(10 + i))]
    torch.manual_seed(0)
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": zero_stage, "reduce_bucket_size": 4096},
        # At stage 0 DeepSpeed's norm leaves the later stages out, and ours does not.
        "gradient_clipping": float(zero_stage),
        "steps_per_print": 1_000_000,
    }
    initialize = deepspeed.initialize if block is None else ds_fsmoe.initialize
    engine, *_ = initialize(
        model=model, model_parameters=list(model.parameters()), config=config | ({"fsmoe": block} if block else {})
    )
    batch = batches(engine.grid.data_parallel_id)
    losses = [engine.train_batch(batch).detach() for _ in range(STEPS)]
    if block is not None:
        assert engine.fsmoe.num_layers == (stages[engine.stage_id] == "moe")
        if block == MICRO_OPS:
            assert all(min(each.pipeline.degrees) > 1 for each in engine.fsmoe.inner_layers.values())
    seen = {name: each.detach().clone() for name, each in model.named_parameters()} | {"losses": torch.stack(losses)}
    engine.destroy()
    return seen


def compare_with_stock(rank: int, world_size: int) -> list[str]:
    import deepspeed

    deepspeed.init_distributed("gloo")
    found = []
    for zero_stage, stages, block in CASES:
        stocks, ours = train(rank, zero_stage, stages, None), train(rank, zero_stage, stages, block)
        for name, theirs in stocks.items():
            off = (ours[name] - theirs).abs().max().item()
            if not off <= (0.0 if block == {"enabled": True} else TOLERANCE):
                found.append(f"ZeRO {zero_stage}, {stages}: {name} differs by {off:.2g}")
    return found


def test_a_pipeline_of_stages_trains_as_stock_does(tmp_path: Path) -> None:
    for rank, found in enumerate(run_on_ranks(compare_with_stock, 4, tmp_path)):
        assert not found, f"rank {rank}: {found}"


def shard(rank: int, world_size: int) -> list[float]:
    import deepspeed

    deepspeed.init_distributed("gloo")
    off = []
    for stages in (("moe", "moe"), ("moe", "dense")):
        stocks, ours = (train(rank, 0, stages, block) for block in (None, CHUNKED | {"esp_size": 2}))
        off.append((ours["losses"] - stocks["losses"]).abs().max().item())
    return off


@pytest.mark.slow
def test_stages_with_sharded_experts_train_as_stock_does(tmp_path: Path) -> None:
    for off in run_on_ranks(shard, 8, tmp_path):
        assert max(off) < TOLERANCE


def what_is_said(rank: int, world_size: int, zero_stage: int, stages: tuple[str, ...]) -> str:
    import deepspeed

    from ds_fsmoe.layer.parts import LayerError

    deepspeed.init_distributed("gloo")
    with pytest.raises(LayerError) as caught:
        train(rank, zero_stage, stages, {"enabled": True})
    return str(caught.value)


@pytest.mark.parametrize(
    ("zero_stage", "stages", "sentence"),
    [(1, ("moe", "dense"), "a stage of the PipelineModule has no MoE layer"), (0, ("dense", "dense"), "no stage")],
)
def test_what_would_hang_or_do_nothing_is_refused_on_every_rank(
    zero_stage: int, stages: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    assert all(sentence in said for said in run_on_ranks(what_is_said, 4, tmp_path, zero_stage, stages))


def record(rank: int, world_size: int, stages: tuple[str, ...], folder: str) -> None:
    import deepspeed

    deepspeed.init_distributed("gloo")
    train(rank, 0, stages, CHUNKED | {"metrics_every": 2, "record": {"dir": folder}})


@sampled("stages", [("moe", "moe"), ("dense", "moe")], kept=[1])
def test_routers_of_all_stages_are_recorded(stages: tuple[str, ...], tmp_path: Path) -> None:
    run_on_ranks(record, 4, tmp_path / "ranks", stages, str(tmp_path / "run"))
    run = read_run(tmp_path / "run")
    assert [row["step"] for row in run.steps] == list(range(1, STEPS + 1))
    assert all(row["step_ms"] > 0 and row["loss"] > 0 for row in run.steps)
    (row,) = run.routers
    assert row["step"] == 2
    assert list(row["layers"]) == [f"stage{i}/L00" for i, kind in enumerate(stages) if kind == "moe"]
    for load in row["layers"].values():
        # Two ranks of the stage, two micro batches, two choices.
        assert sum(load["tokens_E"]) == 2 * 2 * BATCH * LENGTH * 2
