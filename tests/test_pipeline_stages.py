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

pytestmark = pytest.mark.long

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

    def __init__(self, seed: int, ep_rank: int, ep_size: int = 2) -> None:
        from deepspeed.moe.layer import MoE

        from ds_fsmoe.components.experts.gpt import GPTFeedForward

        super().__init__(seed)
        self.moe = MoE(WIDTH, GPTFeedForward(WIDTH, 28), num_experts=4, ep_size=ep_size, k=2, use_rts=False)
        for local, expert in enumerate(self.moe.deepspeed_moe.experts.deepspeed_experts):
            generator = torch.Generator().manual_seed(100 * seed + 4 // ep_size * ep_rank + local)
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
) -> Any:
    """Stock's without a block."""
    import deepspeed
    from deepspeed.pipe import PipelineModule, TiedLayerSpec

    import ds_fsmoe

    ep_size = 4 // num_stages if ep_size is None else ep_size
    made = [WithExperts(i, rank % ep_size, ep_size) if kind == "moe" else Dense(i) for i, kind in enumerate(stages)]
    layers = [each for i, layer in enumerate(made) for each in (layer, Dense(10 + i))]
    if shares_weights:
        first, last = (TiedLayerSpec("shared", Shared, forward_fn=each) for each in (None, as_last))
        layers = [first, *layers, last]
    torch.manual_seed(0)
    model = PipelineModule(layers, num_stages=num_stages, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": zero_stage, "reduce_bucket_size": 4096},
        # At stage 0 DeepSpeed's norm leaves the later stages out, and ours does not.
        "gradient_clipping": float(zero_stage) if clipping is None else clipping,
        "steps_per_print": 1_000_000,
    }
    initialize = deepspeed.initialize if block is None else ds_fsmoe.initialize
    engine, *_ = initialize(
        model=model, model_parameters=list(model.parameters()), config=config | ({"fsmoe": block} if block else {})
    )
    return engine


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
        if block is EARLY and engine.fsmoe.num_layers and engine.grid.data_parallel_size > 1:
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


def test_stages_of_which_none_has_a_layer_are_refused_on_every_rank(tmp_path: Path) -> None:
    assert all("no stage" in said for said in run_on_ranks(what_is_said, 4, tmp_path, 0, ("dense", "dense")))


def without_layers(rank: int, world_size: int, stages: tuple[str, ...]) -> float:
    """How far ZeRO 1 is from no ZeRO, where gradients are clipped to far less than they are."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    plain, zeros = (train(rank, zero_stage, stages, CHUNKED, clipping=0.01) for zero_stage in (0, 1))
    return max((zeros[name] - each).abs().max().item() for name, each in plain.items())


@sampled("stages", [("moe", "dense"), ("dense", "moe")], kept=[1])
def test_at_zero_1_a_stage_without_layers_clips_by_the_norm_of_all(stages: tuple[str, ...], tmp_path: Path) -> None:
    """DeepSpeed's own optimizer waits there for ever."""
    assert max(run_on_ranks(without_layers, 4, tmp_path, stages)) < TOLERANCE


EARLY = CHUNKED | {"deterministic": True, "autotune": False}


def send_early(rank: int, world_size: int, cases: list[tuple[int, tuple[str, ...], int, int]]) -> list[str]:
    import deepspeed

    deepspeed.init_distributed("gloo")
    found = []
    for zero_stage, stages, accumulation, num_stages in cases:
        how = {"accumulation": accumulation, "num_stages": num_stages}
        stocks, ours = (train(rank, zero_stage, stages, each, **how) for each in (None, EARLY))
        for name, theirs in stocks.items():
            off = (ours[name] - theirs).abs().max().item()
            if not off <= TOLERANCE:
                found.append(f"ZeRO {zero_stage}, {stages}, {how}: {name} differs by {off:.2g}")
    return found


@sampled(
    "cases",
    [
        [(0, ("moe", "moe"), 1, 2), (1, ("moe", "moe"), 4, 2)],
        # Stock makes groups on stages with layers only, so one where all have some comes first.
        [(1, ("moe", "moe"), 1, 2), (0, ("moe", "dense"), 7, 2), (0, ("moe", "moe"), 7, 2)],
        [(0, ("moe",) * 4, accumulation, 4) for accumulation in (1, 4, 7)],
    ],
    kept=[0],
    ids=str,
)
def test_gradients_travel_in_the_last_micro_batchs_backward_and_sum_to_stocks(
    cases: list[tuple[int, tuple[str, ...], int, int]], tmp_path: Path
) -> None:
    for rank, found in enumerate(run_on_ranks(send_early, 4, tmp_path, cases)):
        assert not found, f"rank {rank}: {found}"


def share(rank: int, world_size: int, cases: list[tuple[int, tuple[str, ...]]]) -> list[str]:
    import deepspeed

    deepspeed.init_distributed("gloo")
    found = []
    for zero_stage, stages in cases:
        stocks, ours = (train(rank, zero_stage, stages, each, shares_weights=True) for each in (None, EARLY))
        assert "tied_modules.shared.weight" in stocks
        for name, theirs in stocks.items():
            off = (ours[name] - theirs).abs().max().item()
            if not off <= TOLERANCE:
                found.append(f"ZeRO {zero_stage}, {stages}: {name} differs by {off:.2g}")
    return found


def test_weights_that_stages_share_are_summed_over_stages_while_all_others_travel_early(tmp_path: Path) -> None:
    cases = [(0, ("moe", "moe")), (1, ("moe", "moe")), (0, ("moe", "dense"))]
    for rank, found in enumerate(run_on_ranks(share, 4, tmp_path, cases)):
        assert not found, f"rank {rank}: {found}"


TUNED = {"enabled": True, "autotune": {"enabled": True, "trials": 1}, "num_chunks": {"max": 2}}
UNASKED = {"enabled": True, "autotune": {"enabled": "auto", "trials": 1}, "num_chunks": {"max": 2}}


def tune(rank: int, world_size: int, zero_stage: int, stages: tuple[str, ...], block: dict[str, Any]) -> float:
    """How far a tuned run is from one that is not; from stock's where every stage has a layer: stock makes groups on
    those stages alone, and no other engine can be made in the process after that."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    plain = {"enabled": True, "autotune": False} if "dense" in stages else None
    wanted, ours = (train(rank, zero_stage, stages, each, steps=40) for each in (plain, block))
    return max((ours[name] - each).abs().max().item() for name, each in wanted.items())


@sampled(
    ("zero_stage", "stages", "block"),
    [
        (1, ("dense", "moe"), TUNED),
        (0, ("moe", "moe"), TUNED),
        (0, ("moe", "dense"), UNASKED),
        (1, ("moe", "moe"), TUNED | {"schedule": "fsmoe"}),
    ],
    kept=[2],
    ids=str,
)
def test_plans_of_stages_are_measured_between_batches_and_tried_by_whole_ones(
    zero_stage: int, stages: tuple[str, ...], block: dict[str, Any], tmp_path: Path
) -> None:
    assert max(run_on_ranks(tune, 4, tmp_path, zero_stage, stages, block)) < 20 * TOLERANCE


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
