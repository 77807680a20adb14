# SPDX-License-Identifier: Apache-2.0
"""The work of a whole model, against plain loops over its blocks: nothing is forgotten, and nothing counted twice."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from ds_fsmoe.offline.models.architecture import Architecture, Attention, BlockExperts, ModelBlock
from ds_fsmoe.offline.models.known import load_model, model_names
from ds_fsmoe.offline.models.model_layers import (
    DenseStage,
    ModelStage,
    busiest_stage,
    dense_stage,
    model_layers,
    moe_shape,
    stage_flops,
    stages,
)
from ds_fsmoe.planning import schedule as kinds
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.workload import BlockWork, Layer, layer_work

M, VOCAB, B, L = 6, 19, 3, 5
FULL = Attention(heads=3, kv_heads=1, head_dim=2, value_dim=2, num_other=4)
SLIDING = replace(FULL, kind="sliding", window=2)
LINEAR = Attention(3, 3, 2, 2, kind="linear", window=4, num_other=6, has_output_gate=True)
EXPERTS = BlockExperts(E=4, K=2, H=10, shared_H=7, has_shared_gate=True, has_bias=True, has_router_bias=True)
DENSE_BLOCK = ModelBlock(SLIDING, None, dense_H=11, dense_gemms=2, num_norms=12)
PLAIN, SHARING = ModelBlock(FULL, BlockExperts(4, 2, 10), num_norms=12), ModelBlock(LINEAR, EXPERTS, num_norms=12)
PLACED = (DENSE_BLOCK, DENSE_BLOCK, PLAIN, SHARING, DENSE_BLOCK, PLAIN, PLAIN, DENSE_BLOCK)
ODD = Architecture("odd", "", M, VOCAB, is_tied=False, max_length=64, blocks=PLACED, num_other=M)
ALONE = Groups(world=8, gpus_per_node=4, ep=2)


def works(made: tuple[Layer, ...] | DenseStage, phase: str, *named: str) -> list[float]:
    """The sizes of the tasks of some kinds in one phase."""
    blocks = [] if isinstance(made, DenseStage) else [getattr(layer, phase) for layer in made]
    of_layers = [each for block in blocks for each in (*block.before, *block.moe.stages, *block.after)]
    return [each.size for each in (of_layers if blocks else getattr(made, phase)) if each.kind in named]


def stage_of(model: Architecture, groups: Groups, stage: ModelStage) -> tuple[Layer, ...] | DenseStage:
    """The layers of a stage, or what it does without any experts."""
    is_dense = all(model.blocks[place].experts is None for place in stage.places)
    return (dense_stage if is_dense else model_layers)(model, groups, B, L, 2, stage=stage)


def expected(architecture: Architecture, places: range, mp: int = 1, has_head: bool = True) -> dict[str, float]:
    """Kind -> the forward's computation on one rank, block by block."""
    sums = dict.fromkeys((kinds.ATTENTION, kinds.SOFTMAX, kinds.DENSE, kinds.ROUTE, kinds.EXPERT), 0.0)
    for place in places:
        block = architecture.blocks[place]
        sums[kinds.ATTENTION] += B * block.attention.flops(M, L) / mp
        sums[kinds.SOFTMAX] += B * block.attention.scores(L) / mp
        sums[kinds.DENSE] += 2 * block.dense_gemms * B * L * M * block.dense_H / mp
        if block.experts is not None:
            sums[kinds.DENSE] += 2 * block.experts.gemms * B * L / mp * M * block.experts.shared_H
            sums[kinds.ROUTE] += 2 * B * L / mp * M * block.experts.E
            sums[kinds.EXPERT] += 2 * block.experts.gemms * B * L / mp * block.experts.K * M * block.experts.H
    if has_head:
        sums[kinds.DENSE] += 2 * B * L * M * VOCAB / mp
        sums[kinds.SOFTMAX] += B * L * VOCAB / mp
    return sums


@pytest.mark.parametrize("mp", [1, 2])
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
def test_all_blocks_are_computed_once_forward_and_twice_backward(pp: int, mp: int) -> None:
    groups = Groups(world=24 * pp, gpus_per_node=4, mp=mp, ep=2, pp=pp)
    gathered: list[float] = []
    for stage in stages(ODD, pp):
        layers = stage_of(ODD, groups, stage)
        for kind, size in expected(ODD, stage.places, mp, stage.has_head).items():
            assert sum(works(layers, "forward", kind)) == pytest.approx(size), kind
            assert sum(works(layers, "backward", kind)) == pytest.approx((1 if kind == kinds.ROUTE else 2) * size), kind
        gathered += works(layers, "forward", kinds.MP_GATHER)
        for phase, kind in itertools.product(("forward", "backward"), (kinds.MP_GATHER, kinds.MP_REDUCE)):
            assert works(layers, phase, kind) == works(layers, "forward", kinds.MP_GATHER)
    # Model parallelism gathers and reduces around every part that it divides: attention, dense blocks and the head.
    assert gathered == [B * L * M * 2] * ((8 + 4 + 1) if mp > 1 else 0)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_every_parameter_has_one_gradient_on_the_stages_that_hold_it(pp: int, is_tied: bool) -> None:
    model = replace(ODD, is_tied=is_tied)
    groups = Groups(world=8 * pp, gpus_per_node=4, ep=2, pp=pp)
    sums = {kinds.GRAD: 0, kinds.EXPERT_GRAD: 0}
    for stage in stages(model, pp):
        made = stage_of(model, groups, stage)
        for each in (each for layer in ((made,) if isinstance(made, DenseStage) else made) for each in layer.gradients):
            assert sum(each.tensors_bytes) == each.size_bytes
            sums[each.kind] += each.size_bytes
    # The first stage looks words up in it and the last multiplies with it.
    twice_held = M * VOCAB if is_tied and pp > 1 else 0
    in_experts = sum(each.experts.E * sum(each.experts.of_one(M)) for each in model.blocks if each.experts)
    dense = model.num_parameters - in_experts + twice_held
    assert sums == {kinds.GRAD: 2 * dense, kinds.EXPERT_GRAD: 2 * in_experts / groups.ep}


@pytest.mark.parametrize("name", model_names())
def test_every_parameter_of_a_known_model_has_a_gradient(name: str) -> None:
    model = load_model(name)
    layers = model_layers(model, Groups(32, 4, ep=4), 1, 128, 2)
    sent = sum(each.size_bytes for layer in layers for each in layer.gradients)
    assert sent == 2 * (model.num_parameters - model.num_expert_parameters * 3 // 4)
    assert len(layers) == len(model.moe_blocks)
    # However many blocks: what is planned is planned once for each kind, and for the two ends.
    assert len({id(each) for each in layers}) <= len(model.kinds) + 2


def test_blocks_without_experts_come_before_the_next_one_with_experts_or_behind_the_last() -> None:
    layers = model_layers(ODD, ALONE, B, L, 2)

    def attentions(phase: str, part: str) -> list[int]:
        return [sum(each.kind == kinds.ATTENTION for each in getattr(getattr(layer, phase), part)) for layer in layers]

    # The backward comes the other way.
    assert attentions("forward", "before") == attentions("backward", "after") == [3, 1, 2, 1]
    assert attentions("forward", "after") == attentions("backward", "before") == [0, 0, 0, 1]
    # So the head's gradient comes first and the embedding's last.
    first, last = (
        next(each for each in layer.gradients if each.kind == kinds.GRAD) for layer in (layers[0], layers[-1])
    )
    embedding = 2 * M * VOCAB
    assert (first.tensors_bytes[-1], last.tensors_bytes[0]) == (embedding, embedding)
    assert embedding not in (*first.tensors_bytes[:-1], *last.tensors_bytes[1:])


def test_a_block_that_a_generalised_layer_can_be_is_that_layer() -> None:
    model = Architecture("even", "", M, VOCAB, False, 64, (replace(PLAIN, attention=replace(FULL, num_other=0)),) * 3)
    for groups in (ALONE, Groups(12, 4, mp=2, esp=2, ep=2)):
        shape = moe_shape(model, model.blocks[1], B, L, 2)
        one = layer_work(shape, groups, whole_slots=True)
        middle = model_layers(model, groups, B, L, 2)[1]
        for phase in ("forward", "backward"):
            found: BlockWork = getattr(middle, phase)
            before, after = (
                tuple(each for each in of if each.kind != kinds.ELEMENTWISE) for of in (found.before, found.after)
            )
            # What is element-wise is that of a model alone.
            assert len(before) + len(after) < len(found.before) + len(found.after)
            assert BlockWork(before, found.moe, after) == getattr(one, phase)


def test_blocks_that_recompute_run_their_forward_again_and_the_head_does_not() -> None:
    layers = model_layers(ODD, ALONE, B, L, 2, recompute=True)
    again = sum(works(layers, "forward", kinds.DENSE) + works(layers, "backward", kinds.DENSE))
    with_head, without = (expected(ODD, range(8), has_head=each)[kinds.DENSE] for each in (True, False))
    assert all(layer.recompute for layer in layers)
    assert again == pytest.approx(3 * without + 2 * (with_head - without))


@pytest.mark.parametrize("pp", [1, 2, 3, 5, 8])
def test_stages_hold_all_blocks_in_order_and_differ_by_one_at_most(pp: int) -> None:
    found = stages(ODD, pp)
    assert [place for each in found for place in each.places] == list(range(8))
    sizes = [len(each.places) for each in found]
    assert max(sizes) - min(sizes) <= 1
    assert [each.has_embedding for each in found] == [True] + [False] * (pp - 1)
    assert [each.has_head for each in found] == [False] * (pp - 1) + [True]


def test_the_stage_that_computes_the_most_is_the_one_that_is_planned() -> None:
    big = replace(ODD, vocab=1)
    heavy = ModelBlock(FULL, BlockExperts(4, 2, 1000))
    for at in (2, 3, 5, 6):
        blocks = (*big.blocks[:at], heavy, *big.blocks[at + 1 :])
        model = replace(big, blocks=blocks)
        chosen = busiest_stage(model, 4, L)
        assert at in chosen.places
        assert stage_flops(model, chosen, L) == max(stage_flops(model, each, L) for each in stages(model, 4))
        planned = model_layers(model, Groups(8, 4, pp=4), B, L, 2)
        assert planned == model_layers(model, Groups(8, 4, pp=4), B, L, 2, stage=chosen)
    # A large vocabulary makes it the last one, with the head; but one without experts cannot be planned.
    assert busiest_stage(replace(ODD, vocab=10**6), 4, L).has_head
    assert 7 not in busiest_stage(replace(ODD, vocab=10**6), 8, L).places


@pytest.mark.parametrize(("how", "share"), [({"imbalance": 1.5}, 1.5), ({"capacity_factor": 2.0}, 2.0)])
def test_another_capacity_and_a_fuller_rank_change_what_is_sent(how: dict, share: float) -> None:
    even, other = (model_layers(ODD, ALONE, B, L, 2, **each)[0].forward for each in ({}, how))
    assert other.moe.ahead[0].size == pytest.approx(share * even.moe.ahead[0].size)
    assert other.before[:2] == even.before[:2]


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ValueError, match="pp = 9: must be at most the number of blocks, 8"):
        model_layers(ODD, Groups(9, 4, pp=9), B, L, 2)
    with pytest.raises(ValueError, match="stage 1 of 1: none of its blocks has experts"):
        model_layers(ODD, ALONE, B, L, 2, stage=ModelStage(0, range(2), True, False))
