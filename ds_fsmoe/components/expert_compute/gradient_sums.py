# SPDX-License-Identifier: Apache-2.0
"""The gradients of one layer call's expert parameters, summed over the chunks of the backward."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

# ---- Tensors that lie at equal distances in one memory are one tensor with a dimension more, without a copy
#
# So do the same weights of several experts in the flat buffers of DeepSpeed's ZeRO stages 1 and 2, and after
# :func:`make_contiguous` elsewhere.


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


def make_contiguous(experts: Sequence[nn.Module]) -> bool:
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


# ---- The gradients of one layer call's expert parameters, summed over the chunks of the backward


_TERMS_IN_A_ROW = 4


class GradientSums:
    """One sum for each parameter that required a gradient when this was made.

    Args:
        parameters: each once.
        wanted: the ids of those that require a gradient, if they are known.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], wanted: Collection[int] | None = None) -> None:
        self._parameters = tuple(parameters)
        # By id: torch computes the hash of a tensor in Python.
        self._wanted = {id(each) for each in self._parameters if each.requires_grad} if wanted is None else wanted
        self._sums: dict[int, _Sum] = {}
        # Of k parameters in one tensor with a dimension more, as long as nothing is added to one of them alone.
        self._groups: dict[int, _Group] = {}

    def wants(self, parameter: nn.Parameter | None) -> bool:
        """Whether anybody will ask for its gradient."""
        return id(parameter) in self._wanted

    def add(
        self, parameters: nn.Parameter | Sequence[nn.Parameter], gradient: torch.Tensor, is_own: bool = False
    ) -> None:
        """Add a gradient.

        Args:
            parameters: one, or k different ones of one shape and type, whose gradients are then one tensor [k, ...].
            gradient: the gradient.
            is_own: whether nobody else has this memory, so that it may be added to in place.
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
        """Add a gradient, in place where there is a sum already and that pays.

        Args:
            parameters: one or k, see :meth:`add`.
            make: returns the gradient in memory of its own.
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
        """Add ``left @ right`` [O, I], from the second on within the matrix product and in place.

        Args:
            parameters: one or k, see :meth:`add`.
            left_OR, right_RI: a matrix, or of each of k a matrix.
        """
        total = self._total_of(parameters)
        if total is not None:
            total.add_product(left_OR, right_RI)
            return
        for parameter, *factors in zip(parameters, left_OR, right_RI, strict=True):
            self.sum_of(parameter).add_product(*factors)

    def take(self) -> tuple[torch.Tensor | None, ...]:
        """The sums in the order of the parameters, ``None`` where there is no gradient, and start over."""
        found = {key: each.value() for key, each in self._sums.items()}
        for group in {id(each): each for each in self._groups.values()}.values():
            found.update(zip(group.ids, group.sum.value().unbind(), strict=True))
        self._sums, self._groups = {}, {}
        return tuple(map(found.get, map(id, self._parameters)))

    def _total_of(self, parameters: nn.Parameter | Sequence[nn.Parameter]) -> _Sum | None:
        """The sum of one, or of k in one tensor; ``None`` where something has been added to some of them in another
        company."""
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
        """The sum of one parameter, to be added to by itself."""
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
    """Parameters by id, and their sum in one tensor."""

    ids: tuple[int, ...]
    sum: _Sum


class _Sum:
    """A sum that is its term where there is one, bit for bit.

    A half-precision sum is rounded with every term that is added. So that many chunks do not err much more than one,
    such terms are added up a few at a time and these sums then to each other; vectors, being small, in float32.
    """

    def __init__(self, dims_before: int = 0) -> None:
        """
        Args:
            dims_before: dimensions before those of a parameter: 1 for the sums of some parameters in one tensor.
        """
        self._dims_before = dims_before
        self._earlier: torch.Tensor | None = None
        self._recent: torch.Tensor | None = None
        # Autograd gives one tensor to both terms of a sum: only what was made here is added to in place.
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
        """The sums of the parameters that this one is for, in the same memory."""
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
        """What may be added to in place, before :meth:`close_row`."""
        return self._recent if self._is_own else None

    def close_row(self) -> None:
        """A term has been added in place."""
        self._num_terms += 1
        if self._recent.dtype.itemsize < 4 and self._num_terms == _TERMS_IN_A_ROW:
            self._earlier = self._recent if self._earlier is None else self._earlier.add_(self._recent)
            self._recent = None
