# SPDX-License-Identifier: Apache-2.0
"""Between tensor-parallel layers duplicate tokens are dropped and gathered as stock does, with stock's numbers.

Stock itself runs there on gloo with one line changed, see ``fix_gather`` in ``benchmarks/models/layers.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_fsmoe.distributed.topology import layout
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.small_model import Case, SmallModel, batch
from tests.tensor_parallel import Mpu, SplitFeedForward, begin, degrees

STEPS = 2
# Of the largest number of its kind, in float32 after some steps with a learning rate of 0.5.
TOLERANCE = 2e-5
NO_DRAWS = (("use_rts", False), ("top2_2nd_expert_sampling", False))


def train(
    case: Case,
    initialize: Callable[..., Any],
    block: dict[str, Any] | None,
    tp_size: int,
    *,
    mpu: Mpu | None,
    ep_rank: int,
) -> dict[str, list[torch.Tensor]]:
    """Losses, outputs and gradients of a run in which each rank of a tensor-parallel group has the same batches."""
    torch.manual_seed(0)
    rank, block = dist.get_rank(), block or {}
    model = SmallModel(case, ep_rank)
    for expert in model.modules():
        if isinstance(expert, SplitFeedForward):
            expert.differ()
    config = case.ds_config(**({"fsmoe": block} if block else {}))
    engine, *_ = initialize(model=model, model_parameters=list(model.parameters()), config=config, mpu=mpu)
    seen: dict[str, list[torch.Tensor]] = {"losses": [], "outputs": [], "input gradients": []}
    named = model.named_parameters()
    compared = {name: each for name, each in named if "experts" not in name or block.get("esp_size", 1) == 1}
    for name, parameter in compared.items():
        gradients = seen.setdefault(f"gradient of {name}", [])
        parameter.register_hook(lambda gradient, gradients=gradients: gradients.append(gradient.clone()))
    for step in range(STEPS * case.accumulation):
        x_BLM, target_BLM = batch(step, rank // tp_size, next(model.parameters()).dtype)
        x_BLM.requires_grad_()
        torch.manual_seed(step * 100 + rank // tp_size)
        loss, y_BLM = engine(x_BLM, target_BLM)
        engine.backward(loss)
        engine.step()
        for name, each in (("losses", loss), ("outputs", y_BLM), ("input gradients", x_BLM.grad)):
            seen[name].append(each.detach())
    seen |= {f"parameter {name}": [each.detach().clone()] for name, each in compared.items()}
    engine.destroy()
    return seen


def differences(ours: dict[str, list[torch.Tensor]], theirs: dict[str, list[torch.Tensor]]) -> list[str]:
    """What is not equal to rounding, of what both runs have seen."""
    found = []
    for name in ours.keys() & theirs.keys():
        a, b = (torch.stack([each.float() for each in run[name]]) for run in (ours, theirs))
        off = (a - b).abs().max().item() / max(b.abs().max().item(), 1e-6)
        if not off < TOLERANCE:
            found.append(f"{name} differ by {off:.2g}")
    return found


CHUNKS = degrees(3, 2)
BLOCKS = [degrees(1, 1), CHUNKS]
# With stock's capacity, 14 and 20 slots for k = 2 and 3, for 21 tokens: what 2 ranks can share.
CASES = [
    Case(1, 0, "fp32", 1, 2, True),
    Case(1, 1, "fp32", 1, 3, True, moe_options=NO_DRAWS),
    Case(1, 2, "fp32", 2, 2, False, True),
    Case(1, 1, "fp32", 1, 1, False),
]
Runs = list[tuple[Case, list[dict[str, Any]]]]
"""Cases, each with the blocks by which it is run."""


def plain(ep_size: int, cases: list[Case] = CASES, blocks: list[dict[str, Any]] = BLOCKS) -> Runs:
    return [(replace(case, ep_size=ep_size), blocks) for case in cases]


def split(ep_size: int, blocks: list[dict[str, Any]] = BLOCKS) -> Runs:
    """Experts that are tensor-parallel themselves."""
    options = (("enable_expert_tensor_parallelism", True), *NO_DRAWS)
    return [(replace(case, expert="split", moe_options=options), blocks) for case, _ in plain(ep_size, CASES[:2])]


def sharded(ep_size: int) -> Runs:
    """With ep_size = 2 on four ranks it is the layout of the paper's figure 2: DP = MP = EP = ESP = 2."""
    return [(replace(case, expert="gpt"), [degrees(3, 2, esp_size=2)]) for case, _ in plain(ep_size, CASES[::3])]


def compare_with_stock(rank: int, world_size: int, runs: Runs) -> None:
    """Two tensor-parallel ranks, ours and stock's."""
    import deepspeed

    import ds_fsmoe

    for case, blocks in runs:
        ep_rank = (rank // 2 if case.expert == "split" else rank) % case.ep_size
        stocks = train(case, deepspeed.initialize, None, 2, mpu=begin(2), ep_rank=ep_rank)
        assert not torch.equal(stocks["losses"][0], stocks["losses"][-1])
        for block in blocks:
            ours = train(case, ds_fsmoe.initialize, block, 2, mpu=begin(2), ep_rank=ep_rank)
            assert differences(ours, stocks) == [], (block, case)


@sampled(
    ("world_size", "runs"),
    [
        (4, [*plain(2, CASES[1:3], [CHUNKS]), *split(2, [CHUNKS]), *sharded(2)]),
        *((world_size, plain(ep_size)) for world_size, ep_size in ((2, 2), (4, 2), (2, 1), (4, 1), (4, 4))),
        *((4, split(1)), (4, split(2)), (2, sharded(1))),
    ],
    kept=[0],
)
def test_tensor_parallel_ranks_train_to_stocks_numbers(world_size: int, runs: Runs, tmp_path: Path) -> None:
    run_on_ranks(compare_with_stock, world_size, tmp_path, runs)


def compare_with_no_tensor_parallelism(rank: int, world_size: int, case: Case, tp_size: int) -> list[str]:
    """As many ranks as replicas, with the same batches: the mean over them is that over the different ones."""
    import deepspeed

    import ds_fsmoe

    begin(1)
    ep_rank = rank % case.ep_size
    stocks = train(case, deepspeed.initialize, None, tp_size, mpu=None, ep_rank=ep_rank)
    ours = train(case, ds_fsmoe.initialize, degrees(2, 3), tp_size, mpu=begin(tp_size), ep_rank=ep_rank)
    assert len(ours["losses"]) == STEPS
    # A rank has worked on other tokens in the two runs; what becomes of all gradients of experts, parameters show.
    return differences({name: each for name, each in ours.items() if "gradient of moes" not in name}, stocks)


@pytest.mark.parametrize(
    ("world_size", "tp_size", "case"),
    [
        # A capacity of 7 slots, where stock stops: "input dimension 1 (7) is not divisible".
        (2, 2, Case(2, 0, "fp32", 1, 1, True)),
        # Nothing dropped, and an EP group [2, 3] that has ranks of two tensor-parallel groups: one capacity for all.
        (6, 3, Case(2, 0, "fp32", 1, 1, False)),
    ],
    ids=["odd capacity", "groups across"],
)
def test_what_stock_cannot_do_has_the_numbers_of_no_tensor_parallelism(
    world_size: int, tp_size: int, case: Case, tmp_path: Path
) -> None:
    assert run_on_ranks(compare_with_no_tensor_parallelism, world_size, tmp_path, case, tp_size) == [[]] * world_size


# ---- layouts


@pytest.mark.parametrize("data_before_experts", [False, True])
def test_ep_groups_of_tensor_parallel_experts_are_those_of_deepspeeds_own_table(data_before_experts: bool) -> None:
    from deepspeed.utils.groups import _get_expert_parallel_ranks

    for world, ep, mp, pp in [(4, 2, 2, 1), (12, 2, 2, 1), (12, 3, 2, 2), (24, 2, 3, 2), (16, 4, 2, 1), (6, 1, 3, 1)]:
        found = layout(world, ep, 1, not data_before_experts, mp_size=mp, pp_size=pp, tensor_parallel_experts=True)
        blocks, edp = _get_expert_parallel_ranks(world, mp, ep, pp, data_before_experts)
        assert sorted(found.blocks) == sorted(map(tuple, blocks))
        assert sorted(found.edp) == sorted(map(tuple, edp))
        assert found.esp == found.mp
        assert found.ep == found.blocks


@pytest.mark.parametrize(
    ("sizes", "same_tokens", "groups"),
    [
        # The blocks themselves: all of their tensor-parallel ranks are in them, or they have as many tokens.
        ((4, 2, 1, 2, False), True, ((0, 1), (2, 3))),
        ((4, 2, 1, 2, True), True, ((0, 2), (1, 3))),
        ((4, 2, 1, 2, False), False, ((0, 1), (2, 3))),
        # Block [2, 3] has ranks of both tensor-parallel groups, and these have ranks of all blocks.
        ((6, 2, 1, 3, False), True, ((0, 1, 2, 3, 4, 5),)),
        # Other tokens on each rank, gathered before the experts.
        ((8, 2, 1, 2, True), False, ((0, 1, 2, 3), (4, 5, 6, 7))),
    ],
)
def test_ranks_that_exchange_gather_or_share_tokens_agree_on_a_capacity(
    sizes: tuple, same_tokens: bool, groups: tuple
) -> None:
    world, ep, esp, mp, tensor_parallel_experts = sizes
    found = layout(world, ep, esp, mp_size=mp, tensor_parallel_experts=tensor_parallel_experts)
    assert found.agreeing(same_tokens=same_tokens) == groups
