# SPDX-License-Identifier: Apache-2.0
"""Gates, orders and layers compute the same numbers with the compiled ops as with the plain ones, bit for bit."""

from __future__ import annotations

import itertools
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

import ds_fsmoe  # noqa: E402
from ds_fsmoe import registry  # noqa: E402
from ds_fsmoe.components.routing import Routing, SlotRouting, kind_of  # noqa: E402
from ds_fsmoe.ops import REFERENCE, Ops  # noqa: E402
from tests.covering import covering  # noqa: E402
from tests.ops_cases import compiled_ops  # noqa: E402
from tests.ranks import run_on_ranks  # noqa: E402
from tests.samples import draw, sampled  # noqa: E402
from tests.small_model import Case, SmallModel, train_steps  # noqa: E402
from tests.test_orders_in_layers import options_of  # noqa: E402

S, M, E, H = 61, 13, 7, 17
GATES = registry.known("gate")
needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler")


def layer_with(ops: Ops, gate: str, options: dict[str, Any], dtype: torch.dtype) -> ds_fsmoe.MOELayer:
    torch.manual_seed(3)
    layer = ds_fsmoe.MOELayer(
        registry.lookup("gate", gate)(**options),
        registry.lookup("order", kind_of(registry.lookup("gate", gate)).order)(),
        model_dim=M,
        num_experts=E,
        expert_dim=H,
        return_stats=True,
        ops=ops,
        pipeline_degree=(2, 3),
    )
    return layer.to(dtype)


def run_layer(layer: ds_fsmoe.MOELayer, masked: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output, loss, counts and all gradients."""
    torch.manual_seed(5)
    x_SM = torch.randn(S, M).to(dtype).requires_grad_()
    used_S = torch.arange(S) % 5 != 2 if masked else None
    torch.manual_seed(7)
    result = layer(x_SM, used_S)
    (result.output.square().sum() + 0.3 * result.aux_loss).backward()
    return [result.output, result.aux_loss, result.counts_E, x_SM.grad, *(each.grad for each in layer.parameters())]


CASES = covering(GATES, (1, 2, 3), (torch.float32, torch.float64, torch.bfloat16))
ONE_OF_EACH_GATE = [next(at for at, case in enumerate(CASES) if case[0] == gate) for gate in GATES]
DROPS = [{"drop_tokens": False}, {"drop_policy": "probs"}, {"drop_policy": "position"}]


@sampled(("gate", "k", "dtype"), CASES, kept=ONE_OF_EACH_GATE, drawn=3, ids=str)
def test_a_layer_computes_the_same_with_compiled_ops(gate: str, k: int, dtype: torch.dtype) -> None:
    k = max(k, 2) if gate in ("gshard", "mixtral") else k  # with one choice their routers learn nothing
    for drop, masked in itertools.product(DROPS, (False, True)):
        options = options_of(gate, k=k, capacity_factor=0.8, min_capacity=1, **{"drop_tokens": True} | drop)
        plain, fused = (
            run_layer(layer_with(ops, gate, options, dtype), masked, dtype) for ops in (REFERENCE, compiled_ops())
        )
        for i, (one, other) in enumerate(zip(plain, fused, strict=True)):
            assert torch.equal(one, other), (drop, masked, i)


def test_a_part_that_nobody_gave_ops_takes_the_plain_ones() -> None:
    assert ds_fsmoe.LinearGate().ops is REFERENCE
    assert ds_fsmoe.SimpleOrder().ops is REFERENCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_weights_of_a_users_gate_may_be_in_16_bits(dtype: torch.dtype) -> None:
    slots_KS = torch.tensor([[0, 2, 1]])
    routing = Routing(slots_KS, torch.ones(1, 3, dtype=dtype), torch.zeros(()), torch.tensor([3]), 3, 1)
    order, x_SM = ds_fsmoe.SimpleOrder(), torch.randn(3, 5, dtype=dtype)
    restored_SM = order.restore(order.arrange(x_SM, routing), routing)
    assert restored_SM.dtype == dtype
    assert torch.equal(restored_SM, x_SM)


OF_EACH_KIND: list[dict[str, Any] | None] = [None, {"type": "expert_choice"}, {"type": "sigmoid", "k": 2}]


def trained(rank: int, world_size: int, gates: list[dict[str, Any] | None]) -> dict[str, Any]:
    found = {}
    for ops in ("reference", "required", "auto"):
        for gate in gates:
            torch.manual_seed(rank)
            case = Case(ep_size=2, stage=1)
            model = SmallModel(case, rank)
            block = {"enabled": True, "ops": ops} | ({"gate": gate} if gate else {})
            engine, *_ = ds_fsmoe.initialize(
                model=model, model_parameters=list(model.parameters()), config=case.ds_config(fsmoe=block)
            )
            losses = train_steps(engine, rank, range(3))
            name = "own" if gate is None else gate["type"]
            inner = model.moes[0].deepspeed_moe
            names = {inner.gate.ops.name, inner.fsmoe.order.ops.name, engine.fsmoe.chosen()["ops"]}
            found[ops, name] = losses, names
            engine.destroy()
    return found


@pytest.mark.long
@needs_compiler
def test_training_is_the_same_and_the_report_says_which_ops_it_has(tmp_path: Path) -> None:
    gates = draw("gates of trainings with each set of ops", OF_EACH_KIND, 1)
    for found in run_on_ranks(trained, 2, tmp_path, gates):
        assert len(found) == 3 * len(gates)
        for (ops, gate), (losses, names) in found.items():
            assert losses == found["reference", gate][0]
            assert names == {"reference" if ops == "reference" else "compiled"}


def test_slot_routing_reads_by_the_ops_gather() -> None:
    seen = []

    def gather_rows(x_RM: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
        seen.append(index_N)
        return REFERENCE.gather_rows(x_RM, index_N)

    order = ds_fsmoe.SimpleOrder()
    order.ops = replace(REFERENCE, name="mine", gather_rows=gather_rows)
    tokens_R = torch.tensor([1, 0, 2, 1])
    routing = SlotRouting(tokens_R, torch.ones(4), 2, torch.zeros(()), torch.ones(2), 2, 2)
    order.arrange(torch.randn(2, 3), routing)
    assert seen[0] is tokens_R
