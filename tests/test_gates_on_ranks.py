# SPDX-License-Identifier: Apache-2.0
"""Gates chosen by config in a DeepSpeed engine on two ranks: training, the bias of deepseek, checkpoints, bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_fsmoe
from ds_fsmoe.checks.router_checks import RouterInputError
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.small_model import BATCH, LENGTH, Case, SmallModel, batch
from tests.test_pipeline_stages import Dense, WithExperts, batches

DEEPSEEK = {"type": "deepseek", "k": 2, "num_groups": 2, "bias_update_speed": 0.05}


def start(case: Case, rank: int, gate: dict[str, Any], config: Any = None, **block: Any) -> tuple[Any, SmallModel]:
    torch.manual_seed(rank)  # ranks begin with different numbers where DeepSpeed has to make them alike
    model = SmallModel(case, rank)
    written = case.ds_config(fsmoe={"enabled": True, "gate": gate} | block) | (config or {})
    engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=written)
    return engine, model


def one_micro_step(engine: Any, model: SmallModel, step: int, rank: int) -> float:
    dtype = next(model.parameters()).dtype
    loss, _ = engine(*batch(step, rank, dtype))
    engine.backward(loss)
    engine.step()
    return loss.item()


GATES = ("gshard", "sigmoid", "xmoe", "switch", "deepseek", "mixtral", "qwen")
Training = tuple[str, int, str]
"""A gate, a stage of ZeRO and the type of numbers."""


def losses_with(rank: int, world_size: int, trainings: list[Training]) -> dict[str, list[float]]:
    found = {}
    for name, stage, dtype in trainings:
        engine, model = start(Case(ep_size=2, stage=stage, dtype=dtype), rank, {"type": name, "k": 2})
        before = {each: value.clone() for each, value in model.moes[0].deepspeed_moe.gate.named_parameters()}
        found[f"{name} {dtype}"] = [one_micro_step(engine, model, 0, rank) for _ in range(10)]
        after = dict(model.moes[0].deepspeed_moe.gate.named_parameters())
        # In 16 bits a scalar may stay where it is for some steps; the optimizer has it in 32.
        still = [each for each, value in before.items() if dtype == "fp32" and torch.equal(value, after[each])]
        assert not still, f"{name}: {still} did not learn"
        assert f"{type(model.moes[0].deepspeed_moe.gate).__name__}, k = 2" in engine.fsmoe.chosen()["gate"]
        for parameter in after.values():
            both = [torch.empty_like(parameter.data) for _ in range(world_size)]
            dist.all_gather(both, parameter.data)
            assert torch.equal(*both), f"{name}: the ranks have come apart"
        engine.destroy()
    return found


@sampled(
    "trainings",
    [
        [*((name, 1, "fp32") for name in GATES), ("deepseek", 2, "bf16")],
        [(name, stage, dtype) for name in GATES for stage, dtype in ((1, "fp32"), (2, "bf16"))],
    ],
    kept=[0],
    ids=["one in 16 bits", "all"],
)
def test_every_gate_trains_in_an_engine_by_its_name(trainings: list[Training], tmp_path: Path) -> None:
    for found in run_on_ranks(losses_with, 2, tmp_path, trainings):
        assert len(found) == len(trainings)
        for name, losses in found.items():
            assert losses[-1] < 0.97 * losses[0], name


def biases_follow_the_counts(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    engine, model = start(Case(ep_size=2, stage=1, accumulation=2), rank, DEEPSEEK)
    gates = [moe.deepspeed_moe.gate for moe in model.moes]
    expected = [torch.zeros(4) for _ in gates]
    sums: list[int] = []
    stock_all_reduce = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype == torch.int64 and tensor.numel() == 8:
            sums.append(engine.global_steps)
        return stock_all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    for step in range(3):
        counts = [torch.zeros(4, dtype=torch.int64) for _ in gates]
        for micro in range(2):
            one_micro_step(engine, model, 2 * step + micro, rank)
            for total, moe in zip(counts, model.moes, strict=True):
                total += moe.deepspeed_moe.exp_counts
            if micro == 0:
                assert all(torch.equal(gate.balance_bias, bias) for gate, bias in zip(gates, expected, strict=True))
        engine.eval()
        engine(*batch(77, rank, torch.float32))
        engine.train()
        for bias, total in zip(expected, counts, strict=True):
            stock_all_reduce(total)
            bias -= 0.05 * (total * 4 - total.sum()).sign()
    dist.all_reduce = stock_all_reduce
    right = [torch.equal(gate.balance_bias, bias) for gate, bias in zip(gates, expected, strict=True)]

    engine.save_checkpoint(folder, tag="now")
    after = one_micro_step(engine, model, 9, rank)
    other, other_model = start(Case(ep_size=2, stage=1, accumulation=2), rank, DEEPSEEK)
    other.load_checkpoint(folder, tag="now")
    loaded = [
        torch.equal(moe.deepspeed_moe.gate.balance_bias, bias)
        for moe, bias in zip(other_model.moes, expected, strict=True)
    ]
    same = one_micro_step(other, other_model, 9, rank) == after
    biases = [gate.balance_bias.tolist() for gate in gates]
    return {"sums": sums, "right": right, "biases": biases, "loaded": loaded, "same": same}


def test_biases_move_once_a_step_by_the_counts_of_all_ranks_and_are_saved(tmp_path: Path) -> None:
    seen = run_on_ranks(biases_follow_the_counts, 2, tmp_path / "ranks", str(tmp_path / "checkpoint"))
    assert seen[0] == seen[1]
    assert seen[0]["sums"] == [1, 2, 3]  # one sum for both layers, when a step has been taken
    assert seen[0]["right"] == [True, True]
    assert torch.tensor(seen[0]["biases"]).abs().max() > 0
    assert seen[0]["loaded"] == [True, True]
    assert seen[0]["same"]


def biases_after_an_overflow(rank: int, world_size: int) -> tuple[int, float, float]:
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: True
    scale = {"fp16": {"enabled": True, "initial_scale_power": 32, "hysteresis": 1}}
    engine, model = start(Case(ep_size=2, stage=1, dtype="fp16"), rank, DEEPSEEK, scale)
    gate = model.moes[0].deepspeed_moe.gate
    one_micro_step(engine, model, 0, rank)
    after_overflow = gate.balance_bias.abs().max().item(), engine.skipped_steps
    step = 1
    while not engine.was_step_applied():
        one_micro_step(engine, model, step, rank)
        step += 1
    return after_overflow[1], after_overflow[0], gate.balance_bias.abs().max().item()


def test_a_step_that_overflowed_moves_no_bias(tmp_path: Path) -> None:
    for skipped, after_overflow, after_a_step in run_on_ranks(biases_after_an_overflow, 2, tmp_path):
        assert skipped == 1
        assert after_overflow == 0.0
        assert after_a_step == pytest.approx(0.05)


def biases_of_stages(rank: int, world_size: int) -> tuple[int, list[float], list[int]]:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed("gloo")
    made = [WithExperts(i, rank % 2) for i in range(2)]
    layers = [each for i, layer in enumerate(made) for each in (layer, Dense(10 + i))]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    config = Case(stage=1, accumulation=2).ds_config(fsmoe={"enabled": True, "gate": DEEPSEEK})
    engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    inner = made[engine.stage_id].moe.deepspeed_moe
    counts_E = torch.zeros(4, dtype=torch.int64)

    def add(gate: nn.Module, args: Any, routing: Any) -> None:
        counts_E.add_(routing.counts_E)

    inner.gate.register_forward_hook(add)
    engine.train_batch(batches(engine.grid.data_parallel_id))
    return engine.stage_id, inner.gate.balance_bias.tolist(), counts_E.tolist()


def test_in_a_pipeline_of_stages_a_bias_moves_by_the_counts_of_its_stage(tmp_path: Path) -> None:
    seen = run_on_ranks(biases_of_stages, 4, tmp_path)
    for stage in (0, 1):
        of_stage = [(biases, torch.tensor(counts)) for at, biases, counts in seen if at == stage]
        assert len(of_stage) == 2
        total_E = sum(counts for _, counts in of_stage)
        assert total_E.sum() == 2 * 2 * 2 * BATCH * LENGTH  # ranks, micro batches, choices
        expected_E = -0.05 * (4 * total_E - total_E.sum()).sign()
        assert expected_E.abs().max() > 0
        for biases, _ in of_stage:
            assert biases == pytest.approx(expected_E.tolist())


def bad_input(rank: int, world_size: int) -> tuple[str, int]:
    engine, model = start(Case(ep_size=2, stage=1), rank, DEEPSEEK, debug={"check_router": True})
    for step in range(2):
        one_micro_step(engine, model, step, rank)
    x_BLM, target_BLM = batch(2, rank, torch.float32)
    if rank == 1:
        x_BLM[1, 3, 5], x_BLM[2, 6, 0] = float("nan"), float("inf")
    with pytest.raises(RouterInputError) as caught:
        engine(x_BLM, target_BLM)
    # Nobody is waiting in an all-to-all: all ranks meet here, and go on together.
    engine.eval()
    loss, _ = engine(*batch(3, rank, torch.float32))
    return str(caught.value), int(loss.isfinite())


def test_bad_input_of_a_router_stops_all_ranks_and_names_layer_step_and_rank(tmp_path: Path) -> None:
    first, second = run_on_ranks(bad_input, 2, tmp_path)
    assert first == second
    assert first[0].startswith("moes.0, step 2: nan or infinity in the router's input on rank 1 (2 tokens); check")
    assert first[1] == 1


def unchecked(rank: int, world_size: int) -> bool:
    engine, _ = start(Case(ep_size=2, stage=1), rank, DEEPSEEK)
    x_BLM, target_BLM = batch(2, rank, torch.float32)
    if rank == 1:
        x_BLM[1, 3, 5] = float("nan")
    loss, _ = engine(x_BLM, target_BLM)
    return bool(loss.isnan())


def test_without_the_check_bad_input_runs_through_and_nothing_hangs(tmp_path: Path) -> None:
    assert run_on_ranks(unchecked, 2, tmp_path)[1]
