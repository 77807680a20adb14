# SPDX-License-Identifier: Apache-2.0
"""Tensors that lie at equal distances in one memory are one tensor with a dimension more, without a copy.

So do the same weights of several experts in the flat buffers of DeepSpeed's ZeRO stages 1 and 2, and after
:func:`lay_side_by_side` elsewhere.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import nn

# As torch itself places memory: products of float32 have other last bits where their rows begin elsewhere.
_ALIGNED_BYTES = 64
_KIND = operator.attrgetter("shape", "dtype")


def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """k tensors as [k, ...] in the same memory, or ``None`` if they are not alike or do not lie at equal distances.

    Strided ones may reach into each other's gaps.
    """
    # Asked of all experts' weights in every call: what is asked of each of them goes through map, not through Python.
    first = tensors[0]
    shape, strides, size, count = first.shape, first.stride(), first.element_size(), len(tensors)
    kinds = list(map(_KIND, tensors))
    if kinds.count(kinds[0]) != count or list(map(torch.Tensor.stride, tensors)).count(strides) != count:
        return None
    if count == 1:
        return first.detach().unsqueeze(0)
    if first.numel() == 0:  # addresses say nothing, and there is nothing to copy
        return first.new_empty(count, *shape)
    addresses = list(map(torch.Tensor.data_ptr, tensors))
    address, distance = addresses[0], addresses[1] - addresses[0]
    if distance <= 0 or distance % size:
        return None
    if addresses != list(range(address, address + count * distance, distance)):
        return None
    reach = size * (1 + sum([(length - 1) * stride for length, stride in zip(shape, strides, strict=True)]))
    # Who has an address inside this memory has this memory: no two live ones overlap.
    storage = first.untyped_storage()
    if addresses[-1] + reach > storage.data_ptr() + storage.nbytes():
        return None
    return first.detach().as_strided((count, *shape), (distance // size, *strides))


def lay_side_by_side(experts: Sequence[nn.Module]) -> bool:
    """Move the parameters of experts of one structure so that equal ones lie side by side, for :func:`stacked`.

    The Parameter objects, their values and names stay; their memory is new. One kind of parameter is moved at a time,
    so that much memory is needed besides. Whoever holds the old memory by another name (a ``detach()`` of a parameter)
    no longer sees the parameter, so nothing is moved whose memory is more than the parameter, as in a flat buffer, or
    that other processes share. Saving the state of one expert alone then saves the memory of all.

    Returns:
        Whether they lie so now.
    """
    kinds = list(zip(*(expert.parameters() for expert in experts), strict=False))
    every = [each for expert in experts for each in expert.parameters()]
    # Neither subclasses nor tensors that have no memory.
    if not all(type(each) is nn.Parameter and type(each.data) is torch.Tensor and not each.is_meta for each in every):
        return False
    if len({id(each) for kind in kinds for each in kind}) != len(every):  # tied, or more in one than in another
        return False
    if any(len({(each.shape, each.dtype, each.device, each.layout) for each in kind}) != 1 for kind in kinds):
        return False
    if all(stacked(kind) is not None and kind[0].is_contiguous() for kind in kinds):
        return True
    if not all(_has_memory_of_its_own(each) for each in every):
        return False
    with torch.no_grad():
        for kind in kinds:
            first = kind[0]
            length = -(-first.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES // first.element_size()
            together_kX = first.new_empty(len(kind), length)
            for parameter, place_X in zip(kind, together_kX, strict=True):
                values = place_X[: parameter.numel()].view(parameter.shape)
                parameter.data = values.copy_(parameter)
    return True


def _has_memory_of_its_own(parameter: nn.Parameter) -> bool:
    is_all = parameter.layout is torch.strided and parameter.untyped_storage().nbytes() == parameter.nbytes
    return is_all and not (parameter.device.type == "cpu" and parameter.is_shared())
