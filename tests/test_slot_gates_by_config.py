# SPDX-License-Identifier: Apache-2.0
"""Expert choice and SoftMoE chosen by config: trained, with the order that goes with them, however they are run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

import ds_fsmoe
from ds_fsmoe.components.gates.softmoe import SoftMoEGate
from ds_fsmoe.config.reading import ConfigError, read_block
from ds_fsmoe.engine import convert_layers
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.small_model import WIDTH, Case, SmallModel, batch
from tests.tensor_parallel import begin, degrees
from tests.test_duplicates import differences, train

GATES: dict[str, dict[str, Any]] = {
    "expert_choice": {"type": "expert_choice", "k": 2, "capacity_factor": 1.1, "causal": False},
    "softmoe": {"type": "softmoe", "slots_per_expert": 5, "causal": False},
}
ORDER_OF = {"expert_choice": "sparse", "softmoe": "dense"}


def run(rank: int, case: Case, block: dict[str, Any], num_steps: int, client_optimizer: bool = False) -> dict[str, Any]:
    """Losses on one batch again and again, and what of the gate has changed."""
    model = SmallModel(case, rank)
    config = case.ds_config(fsmoe={"enabled": True} | block)
    arguments: dict[str, Any] = {"model_parameters": list(model.parameters())}
    if client_optimizer:
        del config["optimizer"]
        groups = [{"params": list(model.parameters()), "name": "all"}]
        groups = split_params_into_different_moe_groups_for_optimizer(groups)
        arguments = {"optimizer": torch.optim.SGD(groups, lr=0.5)}
    torch.manual_seed(7)
    engine, *_ = ds_fsmoe.initialize(model=model, config=config, **arguments)
    inner = [moe.deepspeed_moe for moe in model.moes]
    if case.stage == 0:
        for number, each in enumerate(inner):  # the same for every layout
            torch.nn.init.normal_(each.gate.wg.weight, generator=torch.Generator().manual_seed(number))
    before = inner[0].gate.wg.weight.detach().clone()
    losses, counts = [], []
    for _ in range(num_steps):
        loss, _ = engine(*batch(0, rank, torch.float32))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        counts.append(inner[0].exp_counts.tolist())
    seen = {
        "losses": losses,
        "counts": counts,
        "gate": inner[0].gate.wg.weight.detach().clone(),
        "change": (inner[0].gate.wg.weight - before).abs().max().item(),
        "chosen": engine.fsmoe.chosen(),
    }
    engine.destroy()
    return seen


def train_by_config(rank: int, world_size: int, name: str, ways: list[tuple[int, bool]]) -> list[dict[str, Any]]:
    return [
        run(rank, Case(ep_size=2, stage=stage), {"gate": GATES[name]} | degrees(3, 2), 12, client_optimizer)
        for stage, client_optimizer in ways
    ]


WAYS = [(0, True), (1, False), (2, True)]
"""(stage, whether the optimizer is the script's own)"""


@sampled(
    ("name", "ways"),
    [("expert_choice", WAYS[:2]), ("softmoe", WAYS[2:]), *((name, WAYS) for name in GATES)],
    kept=[0, 1],
)
def test_a_config_trains_it_at_every_stage(name: str, ways: list[tuple[int, bool]], tmp_path: Path) -> None:
    for of_one, of_other in zip(*run_on_ranks(train_by_config, 2, tmp_path, name, ways), strict=True):
        assert torch.equal(of_one["gate"], of_other["gate"])
        for seen in (of_one, of_other):
            assert seen["chosen"]["order"] == ORDER_OF[name]
            assert seen["losses"][-1] < 0.985 * seen["losses"][0], seen["losses"]
            assert seen["change"] > 1e-5
            # 21 tokens: every expert takes ceil(21 / 4 * 2.2) of them, or all of them in part.
            assert seen["counts"] == [[12 if name == "expert_choice" else 21] * 4] * 12


def train_in_every_way(rank: int, world_size: int, name: str) -> dict[str, list[float]]:
    ways: dict[str, tuple[int, dict[str, Any]]] = {
        "whole": (1, {}),
        "spread, in chunks": (2, degrees(3, 2)),
        "sharded, in chunks": (1, degrees(2, 3, esp_size=2)),
    }
    if name == "expert_choice":
        ways["einsum"] = (2, {"order": "einsum"} | degrees(2, 3))
    return {
        way: run(rank, Case(ep_size=ep_size, expert="gpt"), {"gate": GATES[name]} | block, 4)["losses"]
        for way, (ep_size, block) in ways.items()
    }


@sampled("name", list(GATES), kept=[0])
def test_however_it_is_run_the_training_is_the_same(name: str, tmp_path: Path) -> None:
    for of_rank in run_on_ranks(train_in_every_way, 2, tmp_path, name):
        whole = of_rank.pop("whole")
        assert whole[0] != whole[-1]
        for way, losses in of_rank.items():
            assert losses == pytest.approx(whole, rel=2e-6), way


def compare_with_no_tensor_parallelism(rank: int, world_size: int, name: str) -> list[str]:
    case = Case(2, 0, "fp32")
    block = {"gate": GATES[name]}
    begin(1)
    theirs = train(case, ds_fsmoe.initialize, degrees(1, 1, **block), 2, mpu=None, ep_rank=rank)
    mpu = begin(2)
    ours = train(case, ds_fsmoe.initialize, degrees(3, 2, **block), 2, mpu=mpu, ep_rank=rank)
    assert not torch.equal(ours["losses"][0], ours["losses"][-1])
    # A rank has worked on other tokens in the two runs; what becomes of all gradients of experts, parameters show.
    return differences({each: ours[each] for each in ours if "gradient of moes" not in each}, theirs)


@sampled("name", list(GATES), kept=[1])
def test_tensor_parallel_ranks_share_the_slots_out(name: str, tmp_path: Path) -> None:
    assert run_on_ranks(compare_with_no_tensor_parallelism, 2, tmp_path, name) == [[], []]


def what_is_warned_of(rank: int, world_size: int) -> list[list[str]]:
    said: list[str] = []
    convert_layers.log_on_rank_0 = lambda message, *_: said.append(message)
    found = []
    for name in GATES:
        found.append([])
        for options in ({"causal": False}, {"causal": True}, {}):
            said.clear()
            gate = {option: value for option, value in GATES[name].items() if option != "causal"} | options
            run(rank, Case(ep_size=2), {"gate": gate}, 1)
            found[-1].append(" ".join(said))
    return found


def test_take_over_warns_once_that_later_tokens_are_looked_at_unless_told_not_to(tmp_path: Path) -> None:
    for of_gates in run_on_ranks(what_is_warned_of, 2, tmp_path):
        for gate_class, (silenced, first, again) in zip(("ExpertChoiceGate", "SoftMoEGate"), of_gates, strict=True):
            assert silenced == again == ""
            assert first.startswith(f"{gate_class}: a causal model sees the future")
            assert first.count(gate_class) == 1
            assert 'set "causal": false in fsmoe.gate' in first


@pytest.mark.parametrize(
    ("block", "sentence"),
    [
        (
            {"gate": {"type": "softmoe"}, "order": "sparse"},
            'fsmoe.order = "sparse": must be "auto" or "dense" with SoftMoEGate, which returns a DenseRouting',
        ),
        (
            {"gate": {"type": "expert_choice"}, "order": "dense"},
            'fsmoe.order = "dense": must be "auto" or "einsum" or ',
        ),
        ({"order": "dense"}, 'fsmoe.order = "dense": must be "auto" or "einsum" or '),
        ({"gate": {"type": "softmoe", "slots": 3}}, "fsmoe.gate.slots = 3.*slots_per_expert"),
        ({"gate": {"type": "softmoe", "slots_per_expert": 0}}, "fsmoe.gate.slots_per_expert = 0: must be an integer"),
        ({"gate": {"type": "expert_choice", "k": 5}}, r"k = 5: must be between 1 and num_experts \(4"),
        ({"gate": {"type": "expert_choice", "min_capacity": 4}}, "fsmoe.gate.min_capacity = 4.*no such option"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused_before_anything_starts(block: dict[str, Any], sentence: str) -> None:
    case = Case()
    model = SmallModel(case, 0)
    with pytest.raises(ConfigError, match=sentence):
        ds_fsmoe.initialize(model=model, config=case.ds_config(fsmoe={"enabled": True} | block))
    assert type(model.moes[0].deepspeed_moe).__name__ == "MOELayer"


def layers_with_gates_of_their_own(rank: int, world_size: int) -> tuple[str, bool]:
    case = Case(ep_size=2)
    model = SmallModel(case, rank)
    torch.manual_seed(1)
    gate = SoftMoEGate(slots_per_expert=3)
    gate.build_once(WIDTH, 4)
    model.moes[0].deepspeed_moe.gate = gate
    engine, *_ = ds_fsmoe.initialize(
        model=model, model_parameters=list(model.parameters()), config=case.ds_config(fsmoe={"enabled": True})
    )
    before = gate.wg.weight.detach().clone()
    loss, _ = engine(*batch(0, rank, torch.float32))
    engine.backward(loss)
    engine.step()
    return engine.fsmoe.chosen()["order"], torch.equal(before, gate.wg.weight)


def test_each_layer_has_the_order_of_its_own_gate(tmp_path: Path) -> None:
    assert run_on_ranks(layers_with_gates_of_their_own, 2, tmp_path) == [("dense; sparse", False)] * 2


def test_blocks_for_them_are_valid() -> None:
    for name, gate in GATES.items():
        block = read_block({"fsmoe": {"enabled": True, "gate": gate, "order": ORDER_OF[name]}})
        assert block.gate.options() == {option: value for option, value in gate.items() if option != "type"}
