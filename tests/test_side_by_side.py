# SPDX-License-Identifier: Apache-2.0
"""Where the weights of several experts lie: found side by side, laid side by side, and left where they must stay."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from deepspeed.moe.layer import MoE
from torch import nn

from ds_fsmoe.components.expert import LocalExperts
from ds_fsmoe.components.expert_compute.gradient_sums import make_contiguous, stacked
from ds_fsmoe.components.expert_compute.written_call import WrittenCall
from ds_fsmoe.components.experts.gpt import GPTFeedForward
from tests.expert_cases import H, M, make_experts
from tests.ranks import run_on_ranks
from tests.small_model import Case


def lie_side_by_side(experts: list[nn.Module]) -> bool:
    kinds = zip(*(expert.parameters() for expert in experts), strict=True)
    return all(stacked(kind) is not None for kind in kinds)


def test_parts_at_equal_distances_of_one_memory_are_one_tensor_without_a_copy_and_others_are_not() -> None:
    memory = torch.randn(6, 5)
    a, b, c, d, *_ = memory
    whole = stacked([b, d])
    assert torch.equal(whole, memory[1:5:2])
    assert whole.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    assert stacked([a[:0], b[:0]]).shape == (2, 0)
    apart = [torch.randn(5) for _ in range(3)]
    for wrong in ([a, b, d], [c, b, a], [b, b], [a, b[:4]], [a[::2], b[:3]], [a, b.view(torch.int32)], apart):
        assert stacked(wrong) is None


# ---- laying


@pytest.mark.parametrize("name", ["gpt gelu", "mixtral", "sequential relu", "bottleneck"])
def test_laying_moves_values_and_nothing_else(name: str) -> None:
    experts = make_experts(name)
    before = [(key, each, each.detach().clone()) for expert in experts for key, each in expert.named_parameters()]
    assert not lie_side_by_side(experts)
    assert make_contiguous(experts)
    assert lie_side_by_side(experts)
    after = [each for expert in experts for each in expert.named_parameters()]
    for (key, parameter, values), (key_now, parameter_now) in zip(before, after, strict=True):
        assert key == key_now
        assert parameter is parameter_now
        assert torch.equal(parameter, values)
        assert parameter.data_ptr() % 64 == 0
    places = [each.data_ptr() for _, each in after]
    assert make_contiguous(experts)
    assert places == [each.data_ptr() for _, each in after]


def test_what_others_rely_on_is_not_moved() -> None:
    def experts() -> list[GPTFeedForward]:
        return [GPTFeedForward(M, H) for _ in range(2)]

    in_a_buffer, tied, differing, shared = experts(), experts(), experts(), experts()
    buffer = torch.randn(3, H, M)
    for expert, values in zip(in_a_buffer, buffer[::2], strict=True):
        expert.fc1.weight.data = values
    in_a_buffer[0].fc1.bias.data = torch.randn(2 * H)[:H]
    tied[0].fc1 = tied[1].fc1
    differing[1].fc1.weight.data = torch.randn(H, M + 1)
    shared[1].fc2.weight.share_memory_()
    for each in (in_a_buffer, tied, differing, shared):
        places = [parameter.data_ptr() for expert in each for parameter in expert.parameters()]
        assert not make_contiguous(each)
        assert places == [parameter.data_ptr() for expert in each for parameter in expert.parameters()]
    assert not make_contiguous([GPTFeedForward(M, H), GPTFeedForward(M, H, bias=False)])


def test_experts_of_a_layer_put_together_by_hand_lie_side_by_side_whatever_is_made_of_it() -> None:
    experts = LocalExperts(GPTFeedForward(M, H), 3)
    # A deep copy has memory of its own for each parameter, until it is moved.
    for made in (experts, experts.double(), copy.deepcopy(experts).float(), experts.bfloat16()):
        assert lie_side_by_side(list(made.experts))
    assert not LocalExperts(nn.Tanh(), 2).state_dict()
    values = {key: each.clone() for key, each in experts.state_dict().items()}
    assert all(torch.equal(each, values[key]) for key, each in experts.bfloat16().state_dict().items())


# ---- in DeepSpeed


class Model(nn.Module):
    """Of widths in which experts go together."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.moe = MoE(32, GPTFeedForward(32, 96, "gelu"), num_experts=6, ep_size=2, k=2, min_capacity=0)
        self.last = nn.Linear(32, 32)
        for index, expert in enumerate(self.moe.deepspeed_moe.experts.deepspeed_experts):
            torch.manual_seed(3 * rank + index + 1)
            for parameter in expert.parameters():
                nn.init.normal_(parameter, std=0.1)

    def forward(self, x_SM: torch.Tensor) -> torch.Tensor:
        y_SM, aux_loss, _ = self.moe(self.first(x_SM))
        return self.last(y_SM).float().square().mean() + 0.01 * aux_loss


def train(initialize, case: Case, rank: int, **blocks) -> list[torch.Tensor]:
    """Losses of four steps, and the parameters."""
    torch.manual_seed(0)
    model = Model(rank)
    config = case.ds_config(gradient_clipping=1.0, **blocks)
    engine, *_ = initialize(model=model, model_parameters=list(model.parameters()), config=config)
    losses = []
    for step in range(4):
        x_SM = torch.randn(43, 32, generator=torch.Generator().manual_seed(10 * step + rank))
        torch.manual_seed(step * 100 + rank)
        loss = engine(x_SM.to(model.first.weight.dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    found = [torch.stack(losses), *(parameter.detach().clone() for parameter in model.parameters())]
    engine.destroy()
    return found


def compare_with_stock(rank: int, world_size: int) -> list[tuple[int, str, bool, int]]:
    """Stage, type, whether all is equal bit for bit, how many backwards were computed together."""
    import deepspeed

    import ds_fsmoe

    at_once: list[int] = []
    method = WrittenCall.backward

    def noted(call, start, stop, dy, *args):
        if dy.ndim == 4:  # of several experts
            at_once.append(1)
        return method(call, start, stop, dy, *args)

    WrittenCall.backward = noted
    found = []
    for stage, dtype in ((0, "fp32"), (1, "fp32"), (2, "fp32"), (1, "bf16")):
        case = Case(2, stage, dtype)
        stocks = train(deepspeed.initialize, case, rank)
        at_once.clear()
        ours = train(ds_fsmoe.initialize, case, rank, fsmoe={"enabled": True, "deterministic": True})
        # At stage 0 DeepSpeed clips by another norm.
        equal = all(map(torch.equal, stocks, ours)) if stage > 0 else torch.equal(stocks[0], ours[0])
        assert stocks[0][0] != stocks[0][3]
        found.append((stage, dtype, equal, len(at_once)))
    return found


def test_at_stages_1_and_2_experts_lie_side_by_side_and_train_as_in_stock_bit_for_bit(tmp_path: Path) -> None:
    for found in run_on_ranks(compare_with_stock, 2, tmp_path):
        assert found == [(0, "fp32", True, 0), (1, "fp32", True, 4), (2, "fp32", True, 4), (1, "bf16", True, 4)]
