# SPDX-License-Identifier: Apache-2.0
"""Gates chosen by config in DeepSpeed engines: every one trains, the bias of deepseek moves, bad input stops all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

import ds_fsmoe
from ds_fsmoe import registry
from ds_fsmoe.checks.router_checks import RouterInputError
from ds_fsmoe.components.gates.softmoe import SoftMoEGate
from ds_fsmoe.components.gates.topk import LinearGate
from ds_fsmoe.components.routing import kind_of
from ds_fsmoe.engine import convert_layers
from tests.covering import covering
from tests.ranks import run_on_ranks
from tests.samples import draw, sampled
from tests.small_model import BATCH, LENGTH, WIDTH, Case, SmallModel, batch, small_engine
from tests.tensor_parallel import begin, degrees
from tests.test_duplicates import differences, train
from tests.test_pipeline_stages import batches, make_engine

DEEPSEEK = {"type": "deepseek", "k": 2, "num_groups": 2, "bias_update_speed": 0.05}
# Of those that do not take two experts per token.
OPTIONS: dict[str, dict[str, Any]] = {
    "expert_choice": {"k": 2, "capacity_factor": 1.1, "causal": False},
    "softmoe": {"slots_per_expert": 5, "causal": False},
}
SLOTS_CHOOSE = list(OPTIONS)


class ScaledGate(LinearGate):
    """A user's gate: the choice of topk, its scores scaled by a parameter of its own."""

    def build(self, model_dim: int, num_experts: int) -> None:
        super().build(model_dim, num_experts)
        self.scale = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, x_SM, used_token_S=None, group=None):
        return super().forward(x_SM * self.scale, used_token_S, group)


def start(case: Case, rank: int, gate: dict[str, Any] | None, config: Any = None, **block: Any) -> tuple[Any, Any]:
    torch.manual_seed(rank)  # ranks begin with different numbers where DeepSpeed has to make them alike
    model = SmallModel(case, rank)
    fsmoe = {"enabled": True} | ({} if gate is None else {"gate": gate}) | block
    written = case.ds_config(fsmoe=fsmoe) | (config or {})
    arguments: dict[str, Any] = {"model_parameters": list(model.parameters())}
    if written["optimizer"] is None:  # a script's own
        del written["optimizer"]
        groups = [{"params": list(model.parameters()), "name": "all"}]
        groups = split_params_into_different_moe_groups_for_optimizer(groups)
        arguments = {"optimizer": torch.optim.SGD(groups, lr=0.5)}
    engine, *_ = ds_fsmoe.initialize(model=model, config=written, **arguments)
    return engine, model


def one_micro_step(engine: Any, model: SmallModel, step: int, rank: int) -> float:
    dtype = next(model.parameters()).dtype
    loss, _ = engine(*batch(step, rank, dtype))
    engine.backward(loss)
    engine.step()
    return loss.item()


# ---- every registered gate

Way = tuple[str, int, str, str]
"""A gate, a stage of ZeRO, the type of numbers, and whose the optimizer is."""
NAMES = (*registry.known("gate"), "scaled")
WAYS: list[Way] = covering(
    NAMES,
    (0, 1, 2),
    ("fp32", "bf16"),
    ("by config", "by the client"),
    allowed=lambda name, stage, dtype, optimizer: dtype == "fp32" or (stage == 2 and optimizer == "by config"),
)
TODAYS = draw("ways in which gates train", WAYS, 3)


def train_each(rank: int, world_size: int, ways: list[Way]) -> None:
    registry.register_gate("scaled")(ScaledGate)
    said: list[str] = []
    convert_layers.log_on_rank_0 = lambda message, *_: said.append(message)
    for way in ways:
        name, stage, dtype, optimizer = way
        config = {} if optimizer == "by config" else {"optimizer": None}
        options = {"type": name} | OPTIONS.get(name, {"k": 2})
        engine, model = start(Case(ep_size=2, stage=stage, dtype=dtype), rank, options, config, **degrees(3, 2))
        gate, chosen = model.moes[0].deepspeed_moe.gate, engine.fsmoe.chosen()
        before = {each: value.clone() for each, value in gate.named_parameters()}
        losses = [one_micro_step(engine, model, 0, rank) for _ in range(10)]
        assert losses[-1] < 0.985 * losses[0], (way, losses)
        assert name == "topk" or type(gate) is registry.lookup("gate", name), way
        assert chosen["gate"].startswith("topk" if name == "topk" else type(gate).__name__), (way, chosen)
        assert chosen["order"] == kind_of(gate).order, (way, chosen)
        assert name != "scaled" or "deepspeed_moe.gate.scale" in model.moes[0].state_dict(), way
        for each, value in gate.named_parameters():
            both = [torch.empty_like(value.data) for _ in range(world_size)]
            dist.all_gather(both, value.data)
            assert torch.equal(*both), (way, each)
            # In 16 bits a scalar may stay where it is for some steps; the optimizer has it in 32.
            assert dtype != "fp32" or not torch.equal(before[each], value), (way, each)
        engine.destroy()
    assert said == []


@sampled("ways", [TODAYS, [way for way in WAYS if way not in TODAYS]], kept=[0], drawn=0, ids=["today's", "others"])
def test_every_gate_trains_in_an_engine_by_its_name(ways: list[Way], tmp_path: Path) -> None:
    run_on_ranks(train_each, 2, tmp_path, ways)


def train_in_every_layout(rank: int, name: str) -> None:
    """On one batch again and again; without tensor parallelism, later tokens are warned of."""
    said: list[str] = []
    convert_layers.log_on_rank_0 = lambda message, *_: said.append(message)
    gate = {"type": name} | {each: value for each, value in OPTIONS[name].items() if each != "causal"}
    ways: dict[str, tuple[int, dict[str, Any]]] = {
        "whole": (1, {}),
        "spread, in chunks": (2, degrees(3, 2)),
        "sharded, in chunks": (1, degrees(2, 3, esp_size=2)),
    }
    losses: dict[str, list[float]] = {}
    for way, (ep_size, block) in ways.items():
        engine, model = start(Case(ep_size=ep_size, expert="gpt"), rank, gate, **block)
        for number, each in enumerate(model.moes):  # the same for every layout
            weight = each.deepspeed_moe.gate.wg.weight
            torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(number))
        losses[way] = [one_micro_step(engine, model, 0, rank) for _ in range(3)]
        engine.destroy()
        assert losses[way] == pytest.approx(losses["whole"], rel=2e-6), way
    assert losses["whole"][0] != losses["whole"][-1]
    (warning,) = said
    assert warning.startswith(f"{registry.lookup('gate', name).__name__}: a causal model sees the future")
    assert 'set "causal": false in fsmoe.gate' in warning


def train_under_tensor_parallelism(rank: int, name: str) -> None:
    case, block = Case(2, 0, "fp32"), {"gate": {"type": name} | OPTIONS[name]}
    begin(1)
    theirs = train(case, ds_fsmoe.initialize, degrees(1, 1, **block), 2, mpu=None, ep_rank=rank)
    mpu = begin(2)
    ours = train(case, ds_fsmoe.initialize, degrees(3, 2, **block), 2, mpu=mpu, ep_rank=rank)
    assert not torch.equal(ours["losses"][0], ours["losses"][-1])
    # A rank has worked on other tokens in the two runs; what becomes of all gradients of experts, parameters show.
    found = differences({each: ours[each] for each in ours if "gradient of moes" not in each}, theirs)
    assert found == [], found


def train_where_slots_choose(rank: int, world_size: int, name: str) -> None:
    train_in_every_layout(rank, name)
    train_under_tensor_parallelism(rank, name)


@sampled("name", SLOTS_CHOOSE)
def test_where_slots_choose_layouts_train_alike_and_later_tokens_are_warned_of_once(name: str, tmp_path: Path) -> None:
    run_on_ranks(train_where_slots_choose, 2, tmp_path, name)


# ---- a model's own gates


class CallersGate(deepspeed.moe.sharded_moe.TopKGate):
    """A user's own subclass of stock's gate: everything to expert 1."""

    def forward(self, input, used_token=None, sparse_routes=False, use_tutel=False):
        tokens = torch.arange(input.shape[0])
        weights = torch.softmax(input.float() @ self.wg.weight.float().t(), dim=1)[:, 1]
        counts = torch.tensor([0, input.shape[0], 0, 0])
        return weights.sum() * 0, input.shape[0], 4, torch.ones_like(tokens)[None], tokens[None], weights[None], counts


class WrappedGate(nn.Module):
    """A user's module around stock's gate, as one that logs would be."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def _set_ep_group(self, group) -> None:
        self.inner._set_ep_group(group)

    def forward(self, *args):
        return self.inner(*args)


def own_gates(rank: int, world_size: int) -> None:
    """What gates do that a script has put into its layers."""
    for kind, case in (("subclass", Case(2, 1)), ("wrapped", Case(2, 1, k=2, drop_tokens=False))):
        outputs = []
        for block in (None, {}):
            model = SmallModel(case, rank)
            for moe in model.moes:
                if kind == "subclass":
                    moe.deepspeed_moe.gate.__class__ = CallersGate
                else:
                    moe.deepspeed_moe.gate = WrappedGate(moe.deepspeed_moe.gate)
            engine = small_engine(case, rank, block, model)
            torch.manual_seed(rank)
            outputs.append(engine(*batch(0, rank, torch.float32))[1])
            engine.destroy()
        # The wrapped one agrees with the other ranks on the capacity, or outputs would differ.
        assert torch.equal(*outputs), kind
        inner = model.moes[0].deepspeed_moe
        assert type(inner.gate) is (CallersGate if kind == "subclass" else WrappedGate)
        assert kind != "subclass" or inner.exp_counts.tolist() == [0, 21, 0, 0]

    # Each layer has the order of its own gate, and a replaced gate is trained.
    model, gate = SmallModel(Case(2), rank), SoftMoEGate(slots_per_expert=3)
    gate.build_once(WIDTH, 4)
    model.moes[0].deepspeed_moe.gate = gate
    engine = small_engine(Case(2), rank, {}, model)
    before = gate.wg.weight.detach().clone()
    one_micro_step(engine, model, 0, rank)
    assert engine.fsmoe.chosen()["order"] == "dense; sparse"
    assert not torch.equal(before, gate.wg.weight)


@pytest.mark.long
def test_gates_that_a_script_has_put_into_its_layers_keep_their_say(tmp_path: Path) -> None:
    run_on_ranks(own_gates, 2, tmp_path)


# ---- the bias of deepseek


def biases_follow_the_counts(rank: int, folder: str) -> None:
    engine, model = start(Case(ep_size=2, stage=1, accumulation=2), rank, DEEPSEEK)
    gates = [moe.deepspeed_moe.gate for moe in model.moes]
    expected = [torch.zeros(4) for _ in gates]
    sums: list[int] = []
    stock_all_reduce = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype == torch.int64 and tensor.numel() == 8:
            sums.append(engine.global_steps)
        return stock_all_reduce(tensor, *args, **kwargs)

    def are_as_expected(gates: list[nn.Module]) -> bool:
        return all(torch.equal(gate.balance_bias, bias) for gate, bias in zip(gates, expected, strict=True))

    dist.all_reduce = all_reduce
    for step in range(3):
        counts = [torch.zeros(4, dtype=torch.int64) for _ in gates]
        for micro in range(2):
            one_micro_step(engine, model, 2 * step + micro, rank)
            for total, moe in zip(counts, model.moes, strict=True):
                total += moe.deepspeed_moe.exp_counts
            assert micro == 1 or are_as_expected(gates)
        engine.eval()
        engine(*batch(77, rank, torch.float32))
        engine.train()
        for bias, total in zip(expected, counts, strict=True):
            stock_all_reduce(total)
            bias -= 0.05 * (total * 4 - total.sum()).sign()
    dist.all_reduce = stock_all_reduce
    assert are_as_expected(gates)
    assert torch.stack(expected).abs().max() > 0
    assert sums == [1, 2, 3], "one sum for both layers, when a step has been taken"

    engine.save_checkpoint(folder, tag="now")
    after = one_micro_step(engine, model, 9, rank)
    other, other_model = start(Case(ep_size=2, stage=1, accumulation=2), rank, DEEPSEEK)
    other.load_checkpoint(folder, tag="now")
    assert are_as_expected([moe.deepspeed_moe.gate for moe in other_model.moes])
    assert one_micro_step(other, other_model, 9, rank) == after


def bad_input_stops_all_ranks(rank: int) -> None:
    """With the check; without it, it runs through."""
    x_BLM, target_BLM = batch(2, rank, torch.float32)
    if rank == 1:
        x_BLM[1, 3, 5], x_BLM[2, 6, 0] = float("nan"), float("inf")
    for is_checked in (True, False):
        engine, model = start(Case(ep_size=2, stage=1), rank, DEEPSEEK, debug={"check_router": is_checked})
        for step in range(2):
            one_micro_step(engine, model, step, rank)
        if is_checked:
            said = r"^moes\.0, step 2: nan or infinity in the router's input on rank 1 \(2 tokens\); check"
            with pytest.raises(RouterInputError, match=said):
                engine(x_BLM, target_BLM)
            # Nobody is waiting in an all-to-all: all ranks meet here, and go on together.
            engine.eval()
            assert engine(*batch(3, rank, torch.float32))[0].isfinite()
        else:
            assert engine(x_BLM, target_BLM)[0].isnan() or rank == 0


def an_overflow_moves_no_bias(rank: int) -> None:
    type(get_accelerator()).is_fp16_supported = lambda self: True
    scale = {"fp16": {"enabled": True, "initial_scale_power": 32, "hysteresis": 1}}
    engine, model = start(Case(ep_size=2, stage=1, dtype="fp16"), rank, DEEPSEEK, scale)
    gate = model.moes[0].deepspeed_moe.gate
    one_micro_step(engine, model, 0, rank)
    assert (engine.skipped_steps, gate.balance_bias.abs().max().item()) == (1, 0.0)
    step = 1
    while not engine.was_step_applied():
        one_micro_step(engine, model, step, rank)
        step += 1
    assert gate.balance_bias.abs().max().item() == pytest.approx(0.05)


def in_engines(rank: int, world_size: int, folder: str) -> None:
    biases_follow_the_counts(rank, folder)
    bad_input_stops_all_ranks(rank)
    an_overflow_moves_no_bias(rank)


def test_biases_move_once_a_step_by_the_counts_of_all_ranks_and_bad_input_stops_all(tmp_path: Path) -> None:
    run_on_ranks(in_engines, 2, tmp_path / "ranks", str(tmp_path / "checkpoint"))


def biases_of_stages(rank: int, world_size: int) -> tuple[int, list[float], list[int]]:
    deepspeed.init_distributed("gloo")
    engine = make_engine(rank, 1, ("moe", "moe"), {"enabled": True, "gate": DEEPSEEK})
    (inner,) = engine.fsmoe.inner_layers.values()
    counts_E = torch.zeros(4, dtype=torch.int64)

    def add(gate: nn.Module, args: Any, routing: Any) -> None:
        counts_E.add_(routing.counts_E)

    inner.gate.register_forward_hook(add)
    engine.train_batch(batches(engine.grid.data_parallel_id))
    return engine.stage_id, inner.gate.balance_bias.tolist(), counts_E.tolist()


def test_in_a_pipeline_of_stages_a_bias_moves_by_the_counts_of_its_stage(tmp_path: Path) -> None:
    seen = run_on_ranks(biases_of_stages, 4, tmp_path)
    for stage in (0, 1):
        biases, counts = zip(*((biases, counts) for at, biases, counts in seen if at == stage), strict=True)
        total_E = torch.tensor(counts).sum(dim=0)
        assert total_E.sum() == 2 * 2 * 2 * BATCH * LENGTH  # ranks, micro batches, choices
        expected_E = -0.05 * (4 * total_E - total_E.sum()).sign()
        assert expected_E.abs().max() > 0
        assert len(biases) == 2
        assert all(each == pytest.approx(expected_E.tolist()) for each in biases)
