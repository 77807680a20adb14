# SPDX-License-Identifier: Apache-2.0
"""Parts of expert parameters: cut, described and joined again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart, describe_as, part_of
from ds_fsmoe.engine.shard_experts import shard_parameter

EXPERTS, WIDTH, RANK = 6, 5, 2
WHOLES = {
    "a weight": ("stacked", (EXPERTS, 3, WIDTH)),
    "a bias": ("stacked", (EXPERTS, WIDTH)),
    "A of an adapter": ("stacked", (RANK * EXPERTS, WIDTH)),
    "B of an adapter": ("innermost", (WIDTH, RANK * EXPERTS)),
}


@pytest.mark.parametrize("ep_size", [1, 2, 3, 6])
@pytest.mark.parametrize("kind", WHOLES)
def test_parts_joined_in_the_order_of_ranks_are_the_whole(kind: str, ep_size: int) -> None:
    layout, shape = WHOLES[kind]
    whole = torch.randn(shape)
    parts = [ExpertPart(layout, EXPERTS, ep_size, rank) for rank in range(ep_size)]
    cut = [each.take(whole) for each in parts]
    for part, tensor in zip(parts, cut, strict=True):
        assert tuple(tensor.shape) == part.part_shape(shape)
        assert part.whole_shape(tensor.shape) == shape
        assert torch.equal(part.join(cut), whole)
        assert part == replace(parts[0], ep_rank=part.ep_rank)
    assert [expert for each in parts for expert in each.experts] == list(range(EXPERTS))


def test_a_part_of_b_has_the_columns_of_its_experts_alone() -> None:
    """PEFT reads B as [out, r, E]: number each column by its expert."""
    experts_OC = torch.arange(RANK * EXPERTS).remainder(EXPERTS).expand(WIDTH, -1)
    part = ExpertPart("innermost", EXPERTS, 3, 1)
    assert part.take(experts_OC).unique().tolist() == list(part.experts) == [2, 3]


def test_what_holds_no_such_experts_is_refused() -> None:
    part = ExpertPart("innermost", EXPERTS, 2, 0)
    with pytest.raises(ValueError, match=r"shape \[5, 7\]: dimension 1 must be a multiple of 6 experts"):
        part.take(torch.zeros(5, 7))
    with pytest.raises(ValueError, match="1 parts: must be one for each rank"):
        part.join([torch.zeros(5, 3)])
    with pytest.raises(ValueError, match="must be a multiple of 3 experts"):
        part.join([torch.zeros(5, 3), torch.zeros(5, 4)])
    for wrong in (("inner", 6, 2, 0), ("stacked", 6, 4, 0), ("stacked", 6, 2, 2)):
        with pytest.raises(ValueError, match="must"):
            ExpertPart(*wrong)


def test_a_parameter_says_which_part_it_is() -> None:
    parameter, part = torch.nn.Parameter(torch.zeros(3, 2)), ExpertPart("stacked", 6, 2, 1)
    assert part_of(parameter) is None
    describe_as(parameter, part)
    assert part_of(parameter) == part == parameter.fsmoe_part


def test_marks_of_a_parameter_are_on_the_part_that_is_cut_from_it() -> None:
    """A script that groups parameters by a mark of its own finds those of experts by it, too."""
    whole = torch.nn.Parameter(torch.randn(6, 3, 2), requires_grad=False)
    whole.decays = False
    mine = shard_parameter(whole, ExpertPart("stacked", 6, 2, 1), "ep_size_2")
    assert torch.equal(mine, whole[3:])
    assert (mine.decays, mine.requires_grad) == (False, False)


def test_a_parameter_of_which_a_rank_has_all_stays_the_same_object() -> None:
    whole = torch.nn.Parameter(torch.randn(6, 3, 2))
    assert shard_parameter(whole, ExpertPart("stacked", 6, 1, 0), "ep_size_1") is whole
