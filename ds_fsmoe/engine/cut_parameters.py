# SPDX-License-Identifier: Apache-2.0
"""Cuts one parameter of experts to this rank's part, tagged so that DeepSpeed knows it for one of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from deepspeed.utils import groups as stock_groups
from torch import nn

from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart, describe_as, part_of
from ds_fsmoe.distributed.partitioned import gathered, is_shared_out
from ds_fsmoe.layer.over_ranks import joined

PLACEMENT = "autoep_expert"
"""The family of parameters that DeepSpeed's ZeRO 3 shards over the ranks that hold the same experts."""


def cut_parameter(whole: nn.Parameter, part: ExpertPart, group_name: str) -> nn.Parameter:
    """Return this rank's part of a parameter, tagged for DeepSpeed as one of experts; the parameter itself, with all
    that hangs on it, where that is all of it.

    Args:
        whole: the parameter, which zero.Init may have shared out over all ranks.
        part: which part this rank has.
        group_name: DeepSpeed's name of the ranks that share the experts.
    """
    if part_of(whole) == part or (part.num_parts == 1 and not is_shared_out(whole)):
        tag_as_experts(whole, part, group_name)
        return whole
    with gathered([whole]):
        mine = nn.Parameter(part.cut(whole.data).clone(), requires_grad=whole.requires_grad)
    if not is_shared_out(whole):
        vars(mine).update(vars(whole))
    tag_as_experts(mine, part, group_name)
    return mine


def tag_as_experts(mine: nn.Parameter, part: ExpertPart, group_name: str) -> None:
    """Tag a parameter for DeepSpeed as one of experts, and for us as a part."""
    mine.allreduce, mine.group_name = False, group_name
    mine.ds_zero_placement_family, mine.ds_zero_partition_group_name = PLACEMENT, group_name
    describe_as(mine, part)


def join_parts(parameter: nn.Parameter, places: Sequence[int] | None = None) -> torch.Tensor:
    """Return the whole of a parameter of which ranks have parts, on each of them. Collective over these ranks.

    Args:
        parameter: tagged as one of experts; not shared out at the time.
        places: where each expert lies among those of all ranks, see
            :meth:`~ds_fsmoe.checkpoint_files.expert_parts.ExpertPart.in_order`; ``None``: in the model's own order.
    """
    part = part_of(parameter)
    assert part is not None
    whole = parameter.detach().clone()
    if part.num_parts > 1:
        whole = joined(parameter, part, stock_groups._get_expert_parallel_group(parameter.group_name))
    return whole if places is None else part.in_order(whole, places)


def share_out(replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Share out the parts of what zero.Init had shared out over all ranks, over those that hold the same experts.

    Args:
        replaced: new parameter -> the one it replaces, of one module.
    """
    of_zero = {new: old for new, old in replaced.items() if is_shared_out(old)}
    if of_zero:
        share_out_over_replicas(list(of_zero), next(iter(of_zero.values())))


def share_out_over_replicas(parameters: Sequence[nn.Parameter], of_zero: nn.Parameter) -> None:
    """Share parameters of experts out over the ranks that hold the same experts. Collective over these.

    Args:
        parameters: tagged as those of experts.
        of_zero: any parameter that zero.Init has shared out.
    """
    for each in parameters:
        each.ds_zero_partition_process_group = stock_groups._get_expert_data_parallel_group(each.group_name)
    of_zero.convert_to_zero_parameters(param_list=list(parameters))
