# SPDX-License-Identifier: Apache-2.0
"""Sums the gradients of expert parameters over the chunks of a backward, and stacks weights without a copy.

Each call of experts owns one :class:`GradientSums`; ``linears`` and ``adapters`` add to it. :func:`stacked` and
:func:`make_contiguous` let a batched product read the weights of several experts as one tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

# ---- Tensors at equal distances in one memory are one tensor with an extra dimension, without a copy
#
# This holds for the same weight of several experts in the flat buffers of DeepSpeed's ZeRO stages 1 and 2, and after
# :func:`make_contiguous` elsewhere.


# torch's own alignment: float32 products have other last bits where their rows begin at other addresses.
_ALIGNED_BYTES = 64
_KIND = operator.attrgetter("shape", "dtype")


def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return k tensors as [k, ...] in the same memory; ``None`` if they differ in kind or are not at equal distances.

    Strided tensors may interleave.
    """
    # Runs for all experts' weights in every call, so loops over them use map.
    first = tensors[0]
    shape, strides, size, count = first.shape, first.stride(), first.element_size(), len(tensors)
    kinds = list(map(_KIND, tensors))
    if kinds.count(kinds[0]) != count or list(map(torch.Tensor.stride, tensors)).count(strides) != count:
        return None
    if count == 1:
        return first.detach().unsqueeze(0)
    if first.numel() == 0:  # empty tensors have no useful addresses, and no data to copy
        return first.new_empty(count, *shape)
    addresses = list(map(torch.Tensor.data_ptr, tensors))
    address, distance = addresses[0], addresses[1] - addresses[0]
    if distance <= 0 or distance % size:
        return None
    if addresses != list(range(address, address + count * distance, distance)):
        return None
    reach = size * (1 + sum([(length - 1) * stride for length, stride in zip(shape, strides, strict=True)]))
    # An address inside this storage belongs to it: no two live storages overlap.
    storage = first.untyped_storage()
    if addresses[-1] + reach > storage.data_ptr() + storage.nbytes():
        return None
    return first.detach().as_strided((count, *shape), (distance // size, *strides))


def make_contiguous(experts: Sequence[nn.Module]) -> bool:
    """Move the parameters of experts of one structure so that equal ones are adjacent in memory, for :func:`stacked`.

    The Parameter objects, their values and names stay; their memory is new. One kind of parameter is moved at a time,
    which needs that much extra memory. Other names of the old memory (a ``detach()`` of a parameter) no longer show the
    parameter. So no parameter is moved whose memory is shared: with a flat buffer, or with other processes. A
    checkpoint of one expert alone then stores the memory of all.

    Returns:
        True if they are adjacent now.
    """
    kinds = list(zip(*(expert.parameters() for expert in experts), strict=False))
    every = [each for expert in experts for each in expert.parameters()]
    # No subclasses, and no tensors without memory.
    if not all(type(each) is nn.Parameter and type(each.data) is torch.Tensor and not each.is_meta for each in every):
        return False
    if len({id(each) for kind in kinds for each in kind}) != len(every):  # tied, or experts of different structure
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


# ---- Sums of gradients


_TERMS_IN_A_ROW = 4


class GradientSums:
    """Holds one sum for each parameter that required a gradient when this was made.

    Args:
        parameters: each once.
        wanted: the ids of those that require a gradient, if they are known.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], wanted: Collection[int] | None = None) -> None:
        self._parameters = tuple(parameters)
        # By id: torch computes the hash of a tensor in Python.
        self._wanted = {id(each) for each in self._parameters if each.requires_grad} if wanted is None else wanted
        self._sums: dict[int, _Sum] = {}
        # The sums of k parameters in one stacked tensor, until a gradient is added to one of them alone.
        self._groups: dict[int, _Group] = {}

    def wants(self, parameter: nn.Parameter | None) -> bool:
        """Return True if the parameter wants a gradient."""
        return id(parameter) in self._wanted

    def add(
        self, parameters: nn.Parameter | Sequence[nn.Parameter], gradient: torch.Tensor, is_own: bool = False
    ) -> None:
        """Add a gradient.

        Args:
            parameters: one, or k different ones of one shape and dtype, whose gradients are then one tensor [k, ...].
            gradient: the gradient.
            is_own: whether the memory has no other owner, so that it may be added to in place.
        """
        total = self._total_of(parameters)
        if total is not None:
            total.add(gradient, is_own)
            return
        for parameter, part in zip(parameters, gradient.unbind(), strict=True):
            self.sum_of(parameter).add(part)

    def add_made(
        self,
        parameters: nn.Parameter | Sequence[nn.Parameter],
        make: Callable[[], torch.Tensor],
        add_to: Callable[[torch.Tensor], bool],
    ) -> None:
        """Add a gradient, in place where a sum exists and that is faster.

        Args:
            parameters: one or k, see :meth:`add`.
            make: returns the gradient in new memory.
            add_to: adds the gradient to a tensor, or returns ``False``.
        """
        total = self._total_of(parameters)
        if total is None:
            self.add(parameters, make())
        elif total.own_recent is not None and add_to(total.own_recent):
            total.close_row()
        else:
            total.add(make(), is_own=True)

    def add_product(
        self, parameters: nn.Parameter | Sequence[nn.Parameter], left_OR: torch.Tensor, right_RI: torch.Tensor
    ) -> None:
        """Add ``left @ right`` [O, I]; from the second term on, the matrix product adds in place.

        Args:
            parameters: one or k, see :meth:`add`.
            left_OR, right_RI: a matrix, or one for each of k.
        """
        total = self._total_of(parameters)
        if total is not None:
            total.add_product(left_OR, right_RI)
            return
        for parameter, *factors in zip(parameters, left_OR, right_RI, strict=True):
            self.sum_of(parameter).add_product(*factors)

    def take(self) -> tuple[torch.Tensor | None, ...]:
        """Return the sums in the order of the parameters, ``None`` where there is no gradient, and start over."""
        found = {key: each.value() for key, each in self._sums.items()}
        for group in {id(each): each for each in self._groups.values()}.values():
            found.update(zip(group.ids, group.sum.value().unbind(), strict=True))
        self._sums, self._groups = {}, {}
        return tuple(map(found.get, map(id, self._parameters)))

    def _total_of(self, parameters: nn.Parameter | Sequence[nn.Parameter]) -> _Sum | None:
        """Return the sum of one parameter, or of k in one tensor; ``None`` if some of the k have sums in other
        groups."""
        if isinstance(parameters, torch.Tensor):
            return self.sum_of(parameters)
        ids = tuple(map(id, parameters))
        group = self._groups.get(ids[0])
        if group is not None and group.ids == ids:
            return group.sum
        if not self._sums.keys().isdisjoint(ids) or not self._groups.keys().isdisjoint(ids):
            return None
        group = _Group(ids, _Sum(dims_before=1))
        self._groups.update(dict.fromkeys(ids, group))
        return group.sum

    def sum_of(self, parameter: nn.Parameter) -> _Sum:
        """Return the sum of one parameter, separated from its group."""
        key = id(parameter)
        if key in self._groups:
            group = self._groups[key]
            for each in group.ids:
                del self._groups[each]
            self._sums.update(zip(group.ids, group.sum.parts(len(group.ids)), strict=True))
        if key not in self._sums:
            self._sums[key] = _Sum()
        return self._sums[key]


@dataclass(frozen=True)
class _Group:
    """Holds parameters by id, and their sum in one tensor."""

    ids: tuple[int, ...]
    sum: _Sum


class _Sum:
    """Sums up terms; a sum of one term is that term, bit for bit.

    A 16-bit sum is rounded at every addition. To keep the error small, matrices are summed a few at a time, and these
    partial sums are then added up. Vectors, being small, are summed in float32.
    """

    def __init__(self, dims_before: int = 0) -> None:
        """Start without terms.

        Args:
            dims_before: dimensions ahead of those of a parameter: 1 for sums of several parameters in one tensor.
        """
        self._dims_before = dims_before
        self._earlier: torch.Tensor | None = None
        self._recent: torch.Tensor | None = None
        # Autograd passes one tensor to both terms of a sum, so only tensors made here are added to in place.
        self._is_own = False
        self._num_terms = 0
        self._dtype: torch.dtype | None = None

    def add(self, term: torch.Tensor, is_own: bool = False) -> None:
        if self._recent is None:
            self._recent, self._is_own, self._num_terms, self._dtype = term, is_own, 1, term.dtype
            return
        if term.dim() - self._dims_before < 2 and self._recent.dtype.itemsize < 4:
            self._recent, self._is_own = self._recent.float(), True
        if self._is_own:
            self._recent.add_(term)
        else:
            self._recent, self._is_own = self._recent + term, True
        self.close_row()

    def add_product(self, left_OR: torch.Tensor, right_RI: torch.Tensor) -> None:
        if self._recent is not None and self._is_own:
            (self._recent.baddbmm_ if self._dims_before else self._recent.addmm_)(left_OR, right_RI)
            self.close_row()
        else:
            self.add(left_OR @ right_RI, is_own=True)

    def value(self) -> torch.Tensor:
        if self._earlier is None:
            return self._recent.to(self._dtype)
        return self._earlier if self._recent is None else self._earlier.add_(self._recent)

    def parts(self, count: int) -> list[_Sum]:
        """Return the sums of the single parameters, in the same memory."""
        found = [_Sum() for _ in range(count)]
        for name in ("_earlier", "_recent"):
            tensor = getattr(self, name)
            for each, part in zip(found, [None] * count if tensor is None else tensor.unbind(), strict=True):
                setattr(each, name, part)
        for each in found:
            each._is_own, each._num_terms, each._dtype = self._is_own, self._num_terms, self._dtype
        return found

    @property
    def own_recent(self) -> torch.Tensor | None:
        """Return the tensor that may be added to in place, ahead of :meth:`close_row`; ``None`` if it is not owned."""
        return self._recent if self._is_own else None

    def close_row(self) -> None:
        """Count a term that was added in place."""
        self._num_terms += 1
        if self._recent.dtype.itemsize < 4 and self._num_terms == _TERMS_IN_A_ROW:
            self._earlier = self._recent if self._earlier is None else self._earlier.add_(self._recent)
            self._recent = None
