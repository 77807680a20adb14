# SPDX-License-Identifier: Apache-2.0
"""Parameters and operations of a model's blocks, against loops and matrices written out; see test_architectures.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_fsmoe.offline.models.architecture import Architecture, Attention, BlockExperts, ModelBlock
from ds_fsmoe.offline.models.known import load_model

M = 7
FULL = Attention(heads=6, kv_heads=2, head_dim=5, value_dim=5, num_other=3)
LATENT = Attention(3, 3, head_dim=11, value_dim=4, kind="latent", query_rank=8, kv_rank=5, rope_dim=2, num_other=13)
LINEAR = Attention(3, 3, 5, 5, kind="linear", window=4, num_other=15, has_output_gate=True)
EXPERTS = BlockExperts(E=10, K=3, H=11, shared_H=13, has_shared_gate=True, has_bias=True, has_router_bias=True)


def elements(*shapes: tuple[int, int]) -> int:
    return sum(rows * columns for rows, columns in shapes)


def products_of(attention: Attention, L: int) -> int:
    """Multiply-adds, position by position and head by head."""
    total = 0
    for _position in range(L):
        total += sum(attention.matrices(M))
        seen = L if attention.window is None else min(L, attention.window)
        for _head in range(attention.heads):
            total += seen * (attention.head_dim + attention.value_dim)
            if attention.kind == "linear":
                total += 2 * attention.head_dim * attention.value_dim
    return total


@pytest.mark.parametrize("L", [1, 4, 9, 13])
@pytest.mark.parametrize("attention", [FULL, LATENT, LINEAR, replace(FULL, kind="sliding", window=4)])
def test_attention_costs_its_matrices_and_what_every_position_sees(attention: Attention, L: int) -> None:
    assert attention.flops(M, L) == 2 * products_of(attention, L)
    seen = L if attention.window is None else min(L, attention.window)
    assert attention.scores(L) == (0 if attention.kind == "linear" else attention.heads * L * seen)


# Of an expert, and what every token uses beside the chosen ones: the router, shared experts and their gate.
ONE = elements((M, 11), (M, 11), (11, M)) + 11 + 11 + M
ALWAYS = elements((M, 10), (M, 13), (M, 13), (13, M), (M, 1)) + 10


def test_a_shard_of_an_expert_has_its_part_of_the_hidden_width_and_the_whole_output_bias() -> None:
    wide = replace(EXPERTS, H=12)
    assert wide.of_one(M, 3) == (elements((M, 4), (M, 4)), 4 + 4, elements((4, M)), M)


def test_a_model_is_the_sum_of_its_blocks() -> None:
    dense = ModelBlock(FULL, None, dense_H=17, num_norms=2 * M)
    sparse = ModelBlock(LATENT, EXPERTS, num_norms=2 * M)
    model = Architecture("odd", "", M, 19, False, 64, (dense, sparse, sparse), num_other=M)
    # The last norm and the others, the matrices of dense blocks, embedding and head.
    rest = M + 3 * 2 * M + FULL.num_parameters(M) + 2 * LATENT.num_parameters(M) + 3 * M * 17 + 2 * 19 * M
    assert model.num_parameters == rest + 2 * (10 * ONE + ALWAYS)
    assert model.num_active_parameters == rest + 2 * (3 * ONE + ALWAYS)
    assert model.num_expert_parameters == 2 * 10 * ONE
    assert replace(model, is_tied=True).num_parameters == model.num_parameters - 19 * M
    assert model.moe_blocks == (1, 2)
    assert model.kinds == {dense: 1, sparse: 2}
    blocks = tuple(ModelBlock(FULL, BlockExperts(E, 1, 3)) for E in (12, 18, 30))
    assert Architecture("odd", "", M, 19, False, 64, blocks).num_experts == 6, "what divides all"
    plain = ModelBlock(FULL, BlockExperts(E=10, K=3, H=11, gemms=2), num_norms=2 * M)
    of_experts = 10 * elements((M, 11), (11, M)) + 10 * M
    assert plain.num_parameters(M) == FULL.num_parameters(M) + 2 * M + of_experts


def test_a_model_is_cut_to_its_first_blocks_and_gets_other_experts() -> None:
    dense, sparse = ModelBlock(FULL, None, dense_H=17), ModelBlock(FULL, EXPERTS)
    model = Architecture("odd", "", M, 19, False, 64, (dense, dense, sparse, sparse))
    assert model.first(3).blocks == (dense, dense, sparse)
    other = replace(sparse, experts=replace(EXPERTS, E=20, K=5))
    assert model.with_experts(E=20, K=5).blocks == (dense, dense, other, other)
    for wrong, sentence in ((0, "must be from 1 to the 4"), (5, "must be from 1 to the 4"), (2, "must be at least 3")):
        with pytest.raises(ValueError, match=f"layers = {wrong}: {sentence}"):
            model.first(wrong)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: replace(FULL, kv_heads=4), "kv_heads = 4: must divide the number of heads, 6"),
        (lambda: replace(FULL, kind="wide"), "kind = 'wide': the choices are full, sliding, latent, linear"),
        (lambda: replace(FULL, kind="sliding"), "window = None: must be at least 1 with sliding attention"),
        (lambda: replace(LATENT, kv_rank=0), "kv_rank = 0: must be at least 1 with latent attention"),
        (lambda: replace(EXPERTS, K=11), "K = 11: must be at most the number of experts, E = 10"),
        (lambda: replace(EXPERTS, gemms=4), "gemms = 4: the choices are 2, 3"),
        (lambda: replace(EXPERTS, groups=(3, 1)), "must be a number that divides the 10 experts"),
        (lambda: ModelBlock(FULL), "dense_H = 0: must be at least 1 without experts"),
        (lambda: ModelBlock(FULL, EXPERTS, dense_H=3), "dense_H = 3: must be at least 1 without experts, and 0 with"),
        (lambda: Architecture("odd", "", M, 19, False, 64, ()), "odd: must have at least one block"),
    ],
)
def test_what_cannot_be_is_one_sentence(make, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


@pytest.mark.parametrize(("name", "like"), [("mixtral-7b", "mixtral-8x7b"), ("mixtral-22b", "mixtral-8x22b")])
def test_the_papers_models_have_the_sizes_of_the_real_ones_and_drop_tokens(name: str, like: str) -> None:
    ours, real = load_model(name), load_model(like)
    assert ours.num_parameters == real.num_parameters
    factors = [{block.experts.capacity_factor for block in each.blocks if block.experts} for each in (ours, real)]
    assert factors == [{1.2}, {None}]
