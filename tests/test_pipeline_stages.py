# SPDX-License-Identifier: Apache-2.0
"""A model cut into pipeline stages trains as with stock DeepSpeed, whether or not every stage has an MoE layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_fsmoe.files.runs import read_run
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.small_model import BATCH, LENGTH, WIDTH, scaled

pytestmark = pytest.mark.long

STEPS = 3
TOLERANCE = 1e-6
SGD = {"type": "SGD", "params": {"lr": 0.1}}
CHUNKED = {"enabled": True, "pipeline_degree": {"forward": 2, "backward": 3}}
MICRO_OPS = {"enabled": True, "schedule": "lina", "gradient_partition": {"chunk_bytes": 900}}
EARLY = CHUNKED | {"deterministic": True, "autotune": False}
TUNED = {"enabled": True, "autotune": {"enabled": True, "trials": 1}, "num_chunks": {"max": 2}}


class Dense(nn.Module):
    def __init__(self, seed: int, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(width, width)

    def forward(self, x_BLM: torch.Tensor) -> torch.Tensor:
        return x_BLM + torch.tanh(self.linear(x_BLM))


class WithExperts(Dense):
    """Experts by global id, the same for every layout."""

    def __init__(
        self,
        seed: int,
        ep_rank: int,
        ep_size: int = 2,
        width: int = WIDTH,
        num_experts: int = 4,
        drop_tokens: bool = True,
    ) -> None:
        from deepspeed.moe.layer import MoE

        from ds_fsmoe.components.experts.gpt import GPTFeedForward

        super().__init__(seed, width)
        expert = GPTFeedForward(width, 28)
        self.moe = MoE(width, expert, num_experts, ep_size, k=2, use_rts=False, drop_tokens=drop_tokens)
        for local, expert in enumerate(self.moe.deepspeed_moe.experts.deepspeed_experts):
            generator = torch.Generator().manual_seed(100 * seed + num_experts // ep_size * ep_rank + local)
            with torch.no_grad():
                for each in expert.parameters():
                    each.copy_(torch.randn(each.shape, generator=generator) * 0.2)

    def forward(self, x_BLM: torch.Tensor) -> torch.Tensor:
        return x_BLM + self.moe(super().forward(x_BLM))[0]


class Shared(nn.Module):
    """A first layer whose weight is the last layer's too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(77)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x_BLM: torch.Tensor) -> torch.Tensor:
        return x_BLM @ self.weight


def as_last(shared: Shared, x_BLM: torch.Tensor) -> torch.Tensor:
    return x_BLM @ shared.weight.t()


def batches(replica: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for step in range(100):
        generator = torch.Generator().manual_seed(100 * step + replica)
        yield tuple(torch.randn(BATCH, LENGTH, WIDTH, generator=generator) for _ in range(2))


def engine_in_stages(
    layers: list[Any], config: dict[str, Any], block: dict[str, Any] | None, scale: float = 1.0, **how: Any
) -> Any:
    """Return an engine of two stages, or as is said otherwise, of layers whose weights are scaled; stock's without a
    block."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import ds_fsmoe

    torch.manual_seed(0)
    how = {"num_stages": 2, "partition_method": "uniform"} | how
    model = scaled(PipelineModule(layers, loss_fn=nn.functional.mse_loss, **how), scale)
    whole = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
        **config,
        **({} if block is None else {"fsmoe": block}),
    }
    initialize = deepspeed.initialize if block is None else ds_fsmoe.initialize
    return initialize(model=model, model_parameters=list(model.parameters()), config=whole)[0]


def make_engine(
    rank: int,
    zero_stage: int,
    stages: tuple[str, ...],
    block: dict[str, Any] | None,
    clipping: float | None = None,
    accumulation: int = 2,
    num_stages: int = 2,
    ep_size: int | None = None,
    shares_weights: bool = False,
    drop_tokens: bool = True,
    optimizer: dict[str, Any] = SGD,
    scale: float = 1.0,
) -> Any:
    """Stock's without a block."""
    from deepspeed.pipe import TiedLayerSpec

    ep_size = 4 // num_stages if ep_size is None else ep_size
    made = [
        WithExperts(i, rank % ep_size, ep_size, drop_tokens=drop_tokens) if kind == "moe" else Dense(i)
        for i, kind in enumerate(stages)
    ]
    layers = [each for i, layer in enumerate(made) for each in (layer, Dense(10 + i))]
    if shares_weights:
        first, last = (TiedLayerSpec("shared", Shared, forward_fn=each) for each in (None, as_last))
        layers = [first, *layers, last]
    config = {
        "gradient_accumulation_steps": accumulation,
        "optimizer": optimizer,
        "zero_optimization": {"stage": zero_stage, "reduce_bucket_size": 4096},
        # At stage 0 DeepSpeed's norm leaves the later stages out, and ours does not.
        "gradient_clipping": float(zero_stage) if clipping is None else clipping,
    }
    return engine_in_stages(layers, config, block, scale, num_stages=num_stages)


def train(
    rank: int,
    zero_stage: int,
    stages: tuple[str, ...],
    block: dict[str, Any] | None,
    steps: int = STEPS,
    num_stages: int = 2,
    **how: Any,
) -> dict[str, torch.Tensor]:
    engine = make_engine(rank, zero_stage, stages, block, num_stages=num_stages, **how)
    batch = batches(engine.grid.data_parallel_id)
    losses = [engine.train_batch(batch).detach() for _ in range(steps)]
    if block is not None:
        if num_stages == len(stages):
            assert engine.fsmoe.num_layers == (stages[engine.stage_id] == "moe")
        if block == MICRO_OPS:
            assert all(min(each.pipeline.degrees) > 1 for each in engine.fsmoe.inner_layers.values())
        if block == EARLY and engine.fsmoe.num_layers and engine.grid.data_parallel_size > 1:
            everything, early = engine.fsmoe.reduction.bytes_of_plan()
            assert 0 < early <= everything
        if block.get("autotune"):
            tuner = engine.fsmoe.autotune
            assert tuner.is_settled
            assert tuner.result.outcome.num_steps > 0
            assert bool(tuner.result.rows) == bool(engine.fsmoe.num_layers)
    named = engine.module.named_parameters()
    seen = {name: each.detach().clone() for name, each in named} | {"losses": torch.stack(losses)}
    engine.destroy()
    return seen


@dataclass(frozen=True)
class Job:
    """A pipeline, and what is asked for."""

    stages: tuple[str, ...] = ("moe", "moe")
    """What each has."""
    zero: int = 0
    block: dict[str, Any] = field(default_factory=lambda: EARLY)
    how: dict[str, Any] = field(default_factory=dict)
    """Of :func:`make_engine`."""
    steps: int = STEPS
    against: dict[str, Any] | None = None
    """The block of what it is held against; stock without."""
    zero_of_other: int | None = None

    @property
    def tolerance(self) -> float:
        if self.block == {"enabled": True} and self.against is None:
            return 0.0
        return TOLERANCE if self.steps == STEPS else 20 * TOLERANCE


NOT_TUNED = {"enabled": True, "autotune": False}
ON_ROWS = CHUNKED | {"dispatch": "unpadded"}
ONCE_PER_NODE = ON_ROWS | {"alltoall": "node_deduplicated", "topology": {"ranks_per_node": 2}}
ROWS_OF_FOUR = {"drop_tokens": False, "ep_size": 4}
FIRST, LAST = ("moe", "dense"), ("dense", "moe")
# Stock makes groups on stages with layers only, and no other engine can be made in the process after that: so what has
# a stage without layers is held against stock behind what has none, at most twice; otherwise against ours.
BATCHES = {
    "chunks": [Job(block=CHUNKED), Job(FIRST, block=CHUNKED)],
    "nothing asked for": [Job(zero=1, block={"enabled": True}), Job(LAST, block={"enabled": True})],
    "micro ops": [Job(zero=1), Job(FIRST, block=MICRO_OPS)],
    "micro-batches": [Job(how={"accumulation": 1}), Job(zero=1, how={"accumulation": 4}), Job(how={"accumulation": 7})],
    "early beside a dense stage": [Job(zero=1, how={"accumulation": 1}), Job(FIRST, how={"accumulation": 7})],
    "four stages": [Job(("moe",) * 4, how={"accumulation": n, "num_stages": 4}) for n in (1, 4, 7)],
    "shared weights": [Job(zero=zero, how={"shares_weights": True}) for zero in (0, 1)],
    "shared weights beside a dense stage": [Job(block=CHUNKED), Job(FIRST, how={"shares_weights": True})],
    "rows": [Job(zero=zero, block=ON_ROWS, how={"drop_tokens": False}) for zero in (0, 1)],
    "rows on two nodes": [Job(stages, block=ONCE_PER_NODE, how=ROWS_OF_FOUR) for stages in (("moe", "moe"), FIRST)],
    "sharded": [Job(block=CHUNKED | {"esp_size": 2}, how={"ep_size": 1})],
    # Clipped to far less than gradients are, by the norm of all; DeepSpeed's own optimizer waits for ever there.
    "clipped": [
        Job(stages, 1, CHUNKED, {"clipping": 0.01}, against=CHUNKED, zero_of_other=0) for stages in (FIRST, LAST)
    ],
    # Plans are measured between batches and tried by whole ones.
    "tuned": [Job(LAST, 1, TUNED, steps=40, against=NOT_TUNED)],
}


def compared(rank: int, world_size: int, jobs: list[Job]) -> None:
    import deepspeed

    deepspeed.init_distributed("gloo")
    for job in jobs:
        zero = job.zero if job.zero_of_other is None else job.zero_of_other
        theirs = train(rank, zero, job.stages, job.against, job.steps, **job.how)
        ours = train(rank, job.zero, job.stages, job.block, job.steps, **job.how)
        if job.how.get("shares_weights"):
            assert "tied_modules.shared.weight" in theirs
        for name, each in theirs.items():
            if "experts" not in name or "esp_size" not in job.block:  # else it is of a shard
                assert (ours[name] - each).abs().max().item() <= job.tolerance, (job, name)


@sampled("name", list(BATCHES), kept=[3], drawn=2)
def test_a_pipeline_of_stages_trains_as_stock_does(name: str, tmp_path: Path) -> None:
    run_on_ranks(compared, 8 if "nodes" in name else 4, tmp_path, BATCHES[name])


def record(rank: int, world_size: int, folder: str) -> None:
    import deepspeed

    deepspeed.init_distributed("gloo")
    train(rank, 0, LAST, CHUNKED | {"metrics_every": 2, "record": {"dir": folder}})


def test_routers_of_all_stages_are_recorded(tmp_path: Path) -> None:
    run_on_ranks(record, 4, tmp_path / "ranks", str(tmp_path / "run"))
    run = read_run(tmp_path / "run")
    assert [row["step"] for row in run.steps] == list(range(1, STEPS + 1))
    assert all(row["step_ms"] > 0 and row["loss"] > 0 for row in run.steps)
    (row,) = run.routers
    assert row["step"] == 2
    assert list(row["layers"]) == ["stage1/L00"]
    # Two ranks of the stage, two micro batches, two choices.
    assert sum(row["layers"]["stage1/L00"]["tokens_E"]) == 2 * 2 * BATCH * LENGTH * 2
