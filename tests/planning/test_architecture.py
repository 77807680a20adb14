# SPDX-License-Identifier: Apache-2.0
"""Parameters and operations of a model's blocks, against matrices written out one by one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ds_fsmoe.offline.models.architecture import Architecture, Attention, BlockExperts, ModelBlock
from ds_fsmoe.offline.models.known import PAPER, load_model, model_names

M = 7
FULL = Attention(heads=6, kv_heads=2, head_dim=5, value_dim=5, num_other=3)
LATENT = Attention(3, 3, head_dim=11, value_dim=4, kind="latent", query_rank=8, kv_rank=5, rope_dim=2, num_other=13)
LINEAR = Attention(3, 3, 5, 5, kind="linear", window=4, num_other=15, has_output_gate=True)
EXPERTS = BlockExperts(E=10, K=3, H=11, shared_H=13, has_shared_gate=True, has_bias=True, has_router_bias=True)


def elements(*shapes: tuple[int, int]) -> int:
    return sum(rows * columns for rows, columns in shapes)


@pytest.mark.parametrize(
    ("attention", "shapes"),
    [
        (FULL, [(M, 30), (M, 10), (M, 10), (30, M)]),
        (replace(FULL, value_dim=3), [(M, 30), (M, 10), (M, 6), (18, M)]),
        (replace(FULL, kind="sliding", window=9), [(M, 30), (M, 10), (M, 10), (30, M)]),
        # Queries down and up, keys and values down with the shared part, up for all heads but that part, and out.
        (LATENT, [(M, 8), (8, 33), (M, 5 + 2), (5, 3 * (11 - 2 + 4)), (12, M)]),
        (replace(LATENT, query_rank=None), [(M, 33), (M, 5 + 2), (5, 3 * (11 - 2 + 4)), (12, M)]),
        (LINEAR, [(M, 15), (M, 15), (M, 15), (M, 15), (15, M)]),
    ],
)
def test_the_matrices_of_attention_are_those_of_its_kind(attention: Attention, shapes: list[tuple[int, int]]) -> None:
    assert attention.num_weights(M) == elements(*shapes)
    assert attention.num_parameters(M) == elements(*shapes) + attention.num_other
    assert sorted(attention.matrices(M)) == sorted(rows * columns for rows, columns in shapes)


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


def test_a_window_bounds_what_long_samples_cost() -> None:
    sliding = replace(FULL, kind="sliding", window=16)
    assert sliding.flops(M, 16) == FULL.flops(M, 16)
    assert sliding.flops(M, 64) == 4 * sliding.flops(M, 16)
    assert FULL.flops(M, 64) > 2 * sliding.flops(M, 64)


# Of an expert, and what every token uses beside the chosen ones: the router, shared experts and their gate.
ONE = elements((M, 11), (M, 11), (11, M)) + 11 + 11 + M
ALWAYS = elements((M, 10), (M, 13), (M, 13), (13, M), (M, 1)) + 10


def test_experts_have_their_matrices_their_biases_and_what_all_tokens_use() -> None:
    rest = FULL.num_parameters(M) + 2 * M
    block = ModelBlock(FULL, EXPERTS, num_norms=2 * M)
    assert sum(EXPERTS.of_one(M)) == ONE
    assert block.num_parameters(M) == rest + 10 * ONE + ALWAYS
    assert block.num_active(M) == rest + 3 * ONE + ALWAYS
    plain = replace(block, experts=BlockExperts(E=10, K=3, H=11, gemms=2))
    assert plain.num_parameters(M) == rest + 10 * elements((M, 11), (11, M)) + 10 * M


def test_a_shard_of_an_expert_has_its_part_of_the_hidden_width_and_the_whole_output_bias() -> None:
    wide = replace(EXPERTS, H=12)
    assert wide.of_one(M, 3) == (elements((M, 4), (M, 4)), 4 + 4, elements((4, M)), M)


def test_a_model_is_the_sum_of_its_blocks() -> None:
    dense = ModelBlock(FULL, None, dense_H=17, num_norms=2 * M)
    sparse = ModelBlock(LATENT, EXPERTS, num_norms=2 * M)
    model = Architecture(
        "odd", "", M, vocab=19, is_tied=False, max_length=64, blocks=(dense, sparse, sparse), num_other=M
    )
    total, in_experts, active = M, 0, M
    for block in model.blocks:
        rest = block.attention.num_parameters(M) + 3 * M * block.dense_H + 2 * M
        total += rest + (10 * ONE + ALWAYS if block.experts else 0)
        active += rest + (3 * ONE + ALWAYS if block.experts else 0)
        in_experts += 10 * ONE if block.experts else 0
    assert model.num_parameters == total + 2 * 19 * M
    assert model.num_active_parameters == active + 2 * 19 * M
    assert model.num_expert_parameters == in_experts
    assert replace(model, is_tied=True).num_parameters == total + 19 * M
    assert model.moe_blocks == (1, 2)
    assert model.kinds == {dense: 1, sparse: 2}


def test_experts_of_several_numbers_are_spread_over_what_divides_all() -> None:
    blocks = tuple(ModelBlock(FULL, BlockExperts(E, 1, 3)) for E in (12, 18, 30))
    model = Architecture("odd", "", M, 19, False, 64, blocks)
    assert model.num_experts == math.gcd(12, 18, 30) == 6


def test_a_model_is_cut_to_its_first_blocks_and_gets_other_experts() -> None:
    dense, sparse = ModelBlock(FULL, None, dense_H=17), ModelBlock(FULL, EXPERTS)
    model = Architecture("odd", "", M, 19, False, 64, (dense, dense, sparse, sparse))
    assert model.first(3).blocks == (dense, dense, sparse)
    changed = model.with_experts(E=20, K=5)
    assert changed.blocks[:2] == (dense, dense)
    assert {(each.experts.E, each.experts.K, each.experts.H) for each in changed.blocks if each.experts} == {
        (20, 5, 11)
    }
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
        (lambda: replace(FULL, heads=True), "heads = True: must be a whole number"),
        (lambda: replace(EXPERTS, K=11), "K = 11: must be at most the number of experts, E = 10"),
        (lambda: replace(EXPERTS, gemms=4), "gemms = 4: the choices are 2, 3"),
        (lambda: replace(EXPERTS, groups=(3, 1)), "must be a number that divides the 10 experts"),
        (lambda: ModelBlock(FULL), "dense_H = 0: must be at least 1 without experts"),
        (
            lambda: ModelBlock(FULL, EXPERTS, dense_H=3),
            "dense_H = 3: must be at least 1 without experts, and 0 with them",
        ),
        (lambda: Architecture("odd", "", M, 19, False, 64, ()), "odd: must have at least one block"),
        (lambda: load_model("mixtral-8x7"), "no model or file 'mixtral-8x7': did you mean 'mixtral-8x7b'?"),
    ],
)
def test_what_cannot_be_is_one_sentence(make, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


PUBLISHED = {
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (140.6, 39.2),
    "qwen3-30b-a3b": (30.5, 3.4),
    "qwen3-235b-a22b": (235.1, 22.2),
    "deepseek-v3": (671.0, 37.6),
    "deepseek-v2-lite": (15.7, 2.7),
    "olmoe": (6.9, 1.3),
    "gpt-oss-20b": (20.9, 4.2),
    "gpt-oss-120b": (116.8, 5.7),
    "phi-3.5-moe": (41.9, 6.6),
}
"""Billions of parameters, and of those that a token uses: what their authors say, with embedding and head counted."""


@pytest.mark.parametrize("name", sorted({*model_names()} - {*PAPER}))
def test_a_model_that_comes_with_the_package_is_as_large_as_its_authors_say(name: str) -> None:
    model = load_model(name)
    whole, active = PUBLISHED[name]
    assert round(model.num_parameters / 1e9, 1) == whole
    assert round(model.num_active_parameters / 1e9, 1) == active
    assert all(block.experts is None or block.experts.capacity_factor is None for block in model.blocks)


@pytest.mark.parametrize(("name", "like"), [("mixtral-7b", "mixtral-8x7b"), ("mixtral-22b", "mixtral-8x22b")])
def test_the_papers_models_have_the_sizes_of_the_real_ones_and_drop_tokens(name: str, like: str) -> None:
    ours, real = load_model(name), load_model(like)
    assert ours.num_parameters == real.num_parameters
    assert {block.experts.capacity_factor for block in ours.blocks if block.experts} == {1.2}
