# SPDX-License-Identifier: Apache-2.0
"""Experts cut along their hidden width: the shards together are the expert."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.shards import shard_expert
from ds_fsmoe.components.experts.gpt import GPTFeedForward
from tests.expert_cases import M, backward, forward, is_written, make_experts, rows
from tests.test_expert_plans import NOT_WHAT_THEY_SEEM

H = 30  # of 1, 2, 3, 5, 6, ... equal parts


EXPERTS = ("gpt relu", "gpt gelu without bias", "mixtral", "sequential relu", "sequential silu")
# Which dimension of a parameter runs over H; None: it is whole in every shard.
HIDDEN_DIM: dict[str, int | None] = {
    **dict.fromkeys(("fc1.weight", "fc1.bias", "w1.weight", "w3.weight", "0.weight", "0.bias"), 0),
    **dict.fromkeys(("fc2.weight", "w2.weight", "2.weight"), 1),
    **dict.fromkeys(("fc2.bias", "2.bias"), None),
}
EVERY = pytest.mark.parametrize("name", EXPERTS)
COUNTS = (1, 2, 3, 5, 30)


def make_expert(name: str) -> nn.Module:
    return make_experts(name, 1, hidden=H)[0]


def make_shards(expert: nn.Module, count: int) -> list[nn.Module]:
    return [shard_expert(expert, index, count)[0] for index in range(count)]


def joined(name: str, of_shards: list[torch.Tensor]) -> torch.Tensor:
    """One parameter's tensors of all shards put back together."""
    dim = HIDDEN_DIM[name]
    return sum(of_shards) if dim is None else torch.cat(of_shards, dim)


@EVERY
def test_shards_are_pieces_of_the_expert_under_its_names_and_draw_no_random_numbers(name: str) -> None:
    expert = make_expert(name)
    state = torch.get_rng_state()
    for count in COUNTS:
        shards = make_shards(expert, count)
        for parameter, values in expert.state_dict().items():
            assert torch.equal(joined(parameter, [shard.state_dict()[parameter] for shard in shards]), values)
        for shard in shards:
            assert list(shard.state_dict()) == list(expert.state_dict())
            assert type(shard) is type(expert)
            widths = {(each.in_features, each.out_features) for each in shard.modules() if isinstance(each, nn.Linear)}
            assert widths == {(M, H // count), (H // count, M)}
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("hooked", [False, True], ids=["written out", "through autograd"])
@EVERY
def test_results_and_gradients_of_all_shards_are_those_of_the_expert(name: str, hooked: bool) -> None:
    expert, x_NeCM, dy_NeCM = make_expert(name), rows(2, 1, 11, M), rows(2, 1, 11, M, seed=2)
    leaf = x_NeCM.clone().requires_grad_()
    wanted_NeCM = expert(leaf)
    wanted_NeCM.backward(dy_NeCM)
    for count in (2, 5) if hooked else COUNTS:
        y_NeCM, dx_NeCM = torch.zeros_like(x_NeCM), torch.zeros_like(x_NeCM)
        gradients: dict[str, list[torch.Tensor]] = {each: [] for each, _ in expert.named_parameters()}
        for shard in make_shards(expert, count):
            if hooked:
                shard.register_forward_hook(lambda *_: None)
            layer = ExpertSet([shard])
            assert is_written(layer) is not hooked
            call = layer.call(True, same_chunks=False)
            y_NeCM += forward(call, x_NeCM, (4, 7))
            dx_NeCM += backward(call, dy_NeCM, (9, 2))
            for (parameter, tensor), gradient in zip(shard.named_parameters(), call.gradients(), strict=True):
                assert gradient.shape == tensor.shape
                gradients[parameter].append(gradient)
        torch.testing.assert_close(y_NeCM, wanted_NeCM.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(dx_NeCM, leaf.grad, rtol=0, atol=1e-12)
        for parameter, tensor in expert.named_parameters():
            torch.testing.assert_close(joined(parameter, gradients[parameter]), tensor.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["gpt relu", "sequential relu"])
def test_the_last_bias_counts_once_whatever_the_others_hold_also_of_shards_of_shards(name: str) -> None:
    expert, x = make_expert(name), rows(5, M)
    shards = make_shards(expert, 3)
    for shard in shards[1:]:
        bias = [*shard.parameters()][-1]
        assert bias.shape == (M,)
        assert (bias == 0).all()
        bias.data.fill_(100.0)
        shard(x).sum().backward()
        assert (bias.grad == 0).all()
        assert (next(shard.parameters()).grad != 0).any()
        bias.requires_grad_(False)
        expert_call = ExpertSet([shard]).call(True)
        expert_call.forward(0, 5, x.view(1, 1, 5, M))
        expert_call.backward(0, 5, x.view(1, 1, 5, M))
        assert expert_call.gradients()[-1] is None
    torch.testing.assert_close(sum(shard(x) for shard in shards), expert(x), rtol=0, atol=1e-13)
    smaller = [piece for shard in make_shards(expert, 3) for piece in make_shards(shard, 2)]
    torch.testing.assert_close(sum(shard(x) for shard in smaller), expert(x), rtol=0, atol=1e-13)


@EVERY
def test_shards_have_memory_of_their_own_and_know_the_experts_parameters_which_stay_as_they_were(name: str) -> None:
    expert = make_expert(name)
    before = {each: tensor.clone() for each, tensor in expert.state_dict().items()}
    parameters = [*expert.parameters()]
    for index, count in ((0, 1), (0, 3), (2, 3)):
        shard, sources = shard_expert(expert, index, count)
        assert set(sources) == set(shard.parameters())
        for parameter, tensor in shard.named_parameters():
            assert sources[tensor] is expert.get_parameter(parameter)
            assert type(tensor) is nn.Parameter
            assert tensor.is_contiguous()
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
            tensor.data.fill_(9.0)
    assert [*map(id, expert.parameters())] == [*map(id, parameters)]
    assert all(torch.equal(tensor, before[each]) for each, tensor in expert.state_dict().items())


@EVERY
def test_attributes_of_parameters_and_the_mode_stay(name: str) -> None:
    expert = make_expert(name).eval()
    for position, parameter in enumerate(expert.parameters()):
        parameter.allreduce, parameter.group_name, parameter.tag = False, "ep_size_4", position
        parameter.requires_grad_(position % 2 == 1)
    for shard in make_shards(expert, 2):
        assert not any(module.training for module in shard.modules())
        for position, parameter in enumerate(shard.parameters()):
            assert (parameter.allreduce, parameter.group_name, parameter.tag) == (False, "ep_size_4", position)
            assert parameter.requires_grad is (position % 2 == 1)
    assert all(module.training for module in make_shards(expert.train(), 2)[1].modules())


def test_parameters_beside_the_known_ones_are_whole_in_every_shard() -> None:
    class Tagged(GPTFeedForward):
        def __init__(self) -> None:
            super().__init__(M, H)
            self.scale = nn.Parameter(torch.ones(H))
            self.scale.tag = "mine"
            self.register_buffer("seen", torch.zeros(3))

    expert = Tagged()
    shard, sources = shard_expert(expert, 1, 2)
    assert shard.scale.shape == (H,)
    assert shard.scale.tag == "mine"
    assert sources[shard.scale] is expert.scale
    assert shard.scale.data_ptr() != expert.scale.data_ptr()
    assert shard.seen.data_ptr() != expert.seen.data_ptr()


# ---- refusals


def test_a_count_that_does_not_divide_the_hidden_width_and_an_index_out_of_range_are_refused() -> None:
    for name, count in itertools.product(EXPERTS, (0, -1, 4, 60)):
        message = rf"hidden width of 30, which {count} shards do not divide: choose from 1, 2, 3, 5, 6, 10, 15, 30$"
        with pytest.raises(ValueError, match=message):
            shard_expert(make_expert(name), 0, count)
    for index in (-1, 3):
        with pytest.raises(ValueError, match=f"shard {index} of 3: the index must be between 0 and 2"):
            shard_expert(make_expert("mixtral"), index, 3)


@pytest.mark.parametrize("kind", NOT_WHAT_THEY_SEEM)
def test_an_expert_of_unknown_structure_is_refused_by_name(kind: str) -> None:
    expert = NOT_WHAT_THEY_SEEM[kind]()
    message = f"expert {type(expert).__name__} cannot be sharded: .*GPTFeedForward, MixtralFeedForward, .*nn.Sequential"
    with pytest.raises(ValueError, match=message):
        shard_expert(expert, 0, 1)
