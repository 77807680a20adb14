# SPDX-License-Identifier: Apache-2.0
"""The experts of one rank where one module has their weights as one tensor of each kind, computed chunk by chunk.

What an expert computes is ``down(act(up(x)))``: the products and their gradients are written out, and what lies between
them (activation, gate, norm) is the module's own function, differentiated by autograd on the spot. A module whose
forward computes something else is called itself, and autograd differentiates all of it.

Letters: R rows, expert by expert; M width, H width of an expert, F = 2 * H where experts are gated, else H; N ranks
that rows came from, e experts on this rank, c slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from ds_fsmoe.components.expert_compute import grouped_products as products
from ds_fsmoe.components.expert_compute.call_context import AutocastState
from ds_fsmoe.components.expert_compute.contract import Contract
from ds_fsmoe.components.expert_compute.gradient_sums import GradientSums
from ds_fsmoe.components.expert_compute.grouped_products import Groups
from ds_fsmoe.components.expert_compute.row_call import CallRows, PhaseRows
from ds_fsmoe.components.expert_compute.saved_rows import SavedRows
from ds_fsmoe.distributed.partitioned import shape_of

OwnForward = Callable[..., torch.Tensor]
"""``(hidden_states, top_k_index, top_k_weights) -> hidden_states`` of the module of the experts."""


class StackedExperts:
    """Takes the place of an :class:`~ds_fsmoe.components.expert_compute.calls.ExpertSet` where there is one module.

    Args:
        module: the module of the experts, with the weights of this rank's experts. Its parameters are looked up at each
            call: ZeRO 3 gives them their memory only then.
        contract: how its weights lie.
        own_forward: the module's own forward, where it computes something else than the contract says; ``None`` where
            the written form is right.
        path: of the layer in the model, for messages.
    """

    keep_expert_dim = False
    is_row_wise = True
    """The contract says so: each row is computed by itself."""

    def __init__(
        self, module: nn.Module, contract: Contract, own_forward: OwnForward | None = None, path: str = ""
    ) -> None:
        self.experts = (module,)
        self.path = path
        self._module = module
        self._contract = contract
        self._own_forward = own_forward
        self.parameters = tuple(dict.fromkeys(module.parameters()))
        """All parameters of the experts, each once, in a fixed order; whether they require a gradient or not."""

    @property
    def num_experts(self) -> int:
        """The number of experts of this rank."""
        return int(self._module.num_experts)

    @property
    def splits(self) -> bool:
        """Whether a call leaves the weights' gradients to ``backward_dw``."""
        return self._own_forward is None

    def written_now(self) -> tuple[Any, ...]:
        """Return the contract where the experts are computed by the written form, ``None`` where by autograd."""
        return (self._contract if self._own_forward is None else None,)

    def kept_of_a_row(self, recompute: bool) -> tuple[int, int]:
        """Return how many numbers of a row, and of what is made of it, a call keeps for its backward."""
        contract = self._contract
        up = shape_of(getattr(self._module, contract.up)) or (0, 0, 0)
        width, hidden = up[1:] if contract.is_transposed else up[:0:-1]
        is_kept = recompute or self._own_forward is not None or getattr(self._module, contract.up).requires_grad
        return width if is_kept else 0, 0 if recompute or self._own_forward is not None else hidden

    def call_rows(
        self, needs_backward: bool, rows: CallRows, x_RM: torch.Tensor, *, recompute: bool = False
    ) -> StackedCall:
        """See :meth:`ds_fsmoe.components.expert_compute.calls.ExpertSet.call_rows`."""
        bounds = (0, *itertools.accumulate(sum(each.of_experts) for each in rows.backward.chunks))
        saved = SavedRows(rows.expert_order, bounds)
        device_types = dict.fromkeys(("cpu", x_RM.device.type))
        sums = GradientSums(self.parameters)
        autocast = AutocastState.now(device_types)
        same_cuts = rows.forward is rows.backward
        form: _Written | _Called
        if self._own_forward is None:
            dtype = torch.get_autocast_dtype(x_RM.device.type) if torch.is_autocast_enabled(x_RM.device.type) else None
            form = _Written(self._module, self._contract, sums, saved, needs_backward, recompute, dtype)
        else:
            keeps_graph = needs_backward and same_cuts and not recompute
            form = _Called(self._module, self._own_forward, sums, saved, needs_backward, keeps_graph)
        return StackedCall(form, saved, rows, sums, autocast, needs_backward, self.parameters)

    def on_few_rows(self, x_RM: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """Return the results of rows that lie expert by expert, with nothing kept; ``sizes`` says how many of each."""
        ends = torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32, device=x_RM.device)
        phase = _Phase([_Chunk(sizes)], ends.unsqueeze(0))
        return self.call_rows(False, _Rows(phase, phase), x_RM).forward(0, x_RM)

    def call(self, needs_backward: bool, *, same_cuts: bool = True, recompute: bool = False) -> SlotsCall:
        """One call on slots, all of one cut: to be measured, since such a layer always sends rows."""
        del same_cuts
        return SlotsCall(self, needs_backward, recompute)


class StackedCall:
    """One forward call; see :class:`~ds_fsmoe.components.expert_compute.row_call.RowCall`."""

    def __init__(
        self,
        form: _Written | _Called,
        saved: SavedRows,
        rows: CallRows,
        sums: GradientSums,
        autocast: AutocastState,
        needs_backward: bool,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self._form = form
        self._saved = saved
        self._rows = rows
        self._sums = sums
        self._autocast = autocast
        self._needs_backward = needs_backward
        self._parameters = parameters
        self._returned: set[int] = set()
        self._without_dw: set[int] = set()

    @property
    def splits(self) -> bool:
        """Whether :meth:`backward_dx` leaves the weights' gradients to :meth:`backward_dw`."""
        return isinstance(self._form, _Written)

    @torch.no_grad()
    def forward(self, chunk: int, x_RM: torch.Tensor) -> torch.Tensor:
        """[R, M] to the same shape, new memory."""
        groups = self._groups(self._rows.forward, chunk, x_RM)
        with self._autocast.restored():
            return self._form.forward(chunk, x_RM.detach(), groups)

    @torch.no_grad()
    def backward(self, chunk: int, dy_RM: torch.Tensor) -> torch.Tensor:
        """The gradient of the results to that of the rows; adds to the weights' gradients."""
        dx_RM = self.backward_dx(chunk, dy_RM)
        self.backward_dw(chunk)
        return dx_RM

    @torch.no_grad()
    def backward_dx(self, chunk: int, dy_RM: torch.Tensor) -> torch.Tensor:
        """As :meth:`backward`, with the weights' gradients left to :meth:`backward_dw` of the same chunk."""
        if not self._needs_backward:
            raise RuntimeError("this call has kept nothing for a backward: it was made with needs_backward=False")
        if chunk in self._returned:
            raise ValueError(f"chunk {chunk} came back twice")
        self._returned.add(chunk)
        self._without_dw.add(chunk)
        groups = self._groups(self._rows.backward, chunk, dy_RM)
        with self._autocast.restored():
            return self._form.backward_dx(chunk, dy_RM, groups)

    @torch.no_grad()
    def backward_dw(self, chunk: int) -> None:
        """Add to the weights' gradients what :meth:`backward_dx` of this chunk has left.

        Raises:
            RuntimeError: it has left nothing.
        """
        if chunk not in self._without_dw:
            raise RuntimeError(f"backward_dw of chunk {chunk} without a backward_dx of it before")
        self._without_dw.remove(chunk)
        with self._autocast.restored():
            self._form.backward_dw(chunk)

    def release(self) -> list[torch.Tensor | None]:
        """Give away the tensors that are kept for the backward, so that autograd can keep them."""
        return self._saved.release()

    def restore(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Take back what :meth:`release` gave, ahead of the backward."""
        self._saved.restore(iter(tensors))

    def rows(self) -> list[torch.Tensor]:
        """Of what has been restored, the rows that came to the experts; the rest they have made themselves."""
        return self._saved.first_of_each()

    def gradients(self) -> tuple[torch.Tensor | None, ...]:
        """The gradient of each parameter that requires one, zeros where no row came to any expert, and start over.

        Raises:
            RuntimeError: not every chunk has come back.
        """
        missing = set(range(len(self._rows.backward.chunks))) - self._returned
        if missing or self._without_dw:
            raise RuntimeError(
                f"gradients are incomplete: chunks {sorted(missing | self._without_dw)} have not come back"
            )
        self._returned = set()
        return self._sums.take()

    def _groups(self, phase: PhaseRows, chunk: int, tensor_RM: torch.Tensor) -> Groups:
        sizes = phase.chunks[chunk].of_experts
        if len(tensor_RM) != sum(sizes):
            raise ValueError(f"chunk {chunk} has {len(tensor_RM)} rows: must have {sum(sizes)}")
        return Groups(sizes, phase.ends[chunk])


@dataclass
class _Pending:
    """What the weights' gradients of a chunk still need."""

    x_RM: torch.Tensor | None
    dup_RF: torch.Tensor
    h_RH: torch.Tensor
    dy_RM: torch.Tensor
    groups: Groups


class _Written:
    """The products written out. Kept are the rows and what the first product makes of them; the rest is made again.

    Args:
        module, contract: see :class:`StackedExperts`.
        sums: where weight gradients go.
        saved: where to keep what the backward needs.
        needs_backward: whether to keep anything.
        recompute: keep the rows alone.
        dtype: the type that autocast asks for; ``None``: that of the weights.
    """

    def __init__(
        self,
        module: nn.Module,
        contract: Contract,
        sums: GradientSums,
        saved: SavedRows,
        needs_backward: bool,
        recompute: bool,
        dtype: torch.dtype | None,
    ) -> None:
        self._module, self._contract, self._sums, self._saved = module, contract, sums, saved
        self._needs_backward, self._recompute, self._dtype = needs_backward, recompute, dtype
        self._row_dtype: torch.dtype | None = None
        self._pending: dict[int, _Pending] = {}

    def forward(self, chunk: int, x_RM: torch.Tensor, groups: Groups) -> torch.Tensor:
        """[R, M] to the same."""
        self._row_dtype = x_RM.dtype
        x_RM = self._cast(x_RM)
        up_RF = self._up(x_RM, groups)
        if self._needs_backward:
            keeps_rows = self._recompute or self._wants(self._contract.up)
            kept = x_RM if keeps_rows else None, None if self._recompute else up_RF
            self._saved.put(chunk, tuple(None if each is None else each.unsqueeze(0) for each in kept))
        y_RM = self._down(self._act(up_RF), groups)
        return self._module.post_expert_norm(y_RM) if self._contract.has_post_expert_norm else y_RM

    def backward_dx(self, chunk: int, dy_RM: torch.Tensor, groups: Groups) -> torch.Tensor:
        """[R, M] to the same; leaves the weights."""
        x_1RM, up_1RF = self._saved.take(chunk)
        x_RM = None if x_1RM is None else x_1RM[0]
        up_RF = self._up(x_RM, groups) if up_1RF is None else up_1RF[0]
        dy_RM = dy_RM.to(up_RF.dtype)
        with torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):
            leaf_RF = up_RF.detach().requires_grad_()
            of_leaf_RH = self._act(leaf_RF)
        h_RH = of_leaf_RH.detach()
        if self._contract.has_post_expert_norm:
            dy_RM = self._before_norm(h_RH, dy_RM, groups)
        transposed = self._contract.is_transposed
        dh_RH = products.rows_gradient(dy_RM, self._weight(self._contract.down), transposed, groups)
        (dup_RF,) = torch.autograd.grad(of_leaf_RH, leaf_RF, dh_RH.to(h_RH.dtype))
        self._pending[chunk] = _Pending(x_RM, dup_RF, h_RH, dy_RM, groups)
        dx_RM = products.rows_gradient(dup_RF, self._weight(self._contract.up), transposed, groups)
        return dx_RM if self._row_dtype is None else dx_RM.to(self._row_dtype)

    def backward_dw(self, chunk: int) -> None:
        """Add to the weights' gradients what :meth:`backward_dx` of the same chunk left."""
        left, transposed = self._pending.pop(chunk), self._contract.is_transposed
        of_weights = ((self._contract.up, left.x_RM, left.dup_RF), (self._contract.down, left.h_RH, left.dy_RM))
        for name, x_RI, dy_RO in of_weights:
            if x_RI is not None and self._wants(name):
                self._add(name, products.weight_gradient(x_RI, dy_RO, transposed, left.groups))
            if self._contract.has_bias and self._wants(f"{name}_bias"):
                self._add(f"{name}_bias", products.bias_gradient(dy_RO, left.groups))

    def _up(self, x_RM: torch.Tensor, groups: Groups) -> torch.Tensor:
        return self._linear(self._contract.up, x_RM, groups)

    def _down(self, h_RH: torch.Tensor, groups: Groups) -> torch.Tensor:
        return self._linear(self._contract.down, h_RH, groups)

    def _linear(self, name: str, x_RI: torch.Tensor, groups: Groups) -> torch.Tensor:
        weight_k = self._weight(name)
        y_RO = products.product(x_RI.to(weight_k.dtype), weight_k, self._contract.is_transposed, groups)
        if self._contract.has_bias:
            y_RO.add_(groups.rows_of_each(self._weight(f"{name}_bias")))
        return y_RO

    def _act(self, up_RF: torch.Tensor) -> torch.Tensor:
        return self._module._apply_gate(up_RF) if self._contract.has_gate else self._module.act_fn(up_RF)

    def _before_norm(self, h_RH: torch.Tensor, dy_RM: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Return the gradient ahead of the norm, and add to the gradients of the norm's own weights."""
        norm = self._module.post_expert_norm
        own = [each for each in norm.parameters() if self._sums.wants(each)]
        leaf_RM = self._down(h_RH, groups).requires_grad_()
        with torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):
            normed_RM = norm(leaf_RM)
        before_RM, *of_own = torch.autograd.grad(normed_RM, [leaf_RM, *own], dy_RM.to(normed_RM.dtype))
        for parameter, gradient in zip(own, of_own, strict=True):
            self._sums.add(parameter, gradient)
        return before_RM

    def _weight(self, name: str) -> torch.Tensor:
        return self._cast(getattr(self._module, name))

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._dtype is None or not tensor.is_floating_point() else tensor.to(self._dtype)

    def _wants(self, name: str) -> bool:
        return self._sums.wants(getattr(self._module, name))

    def _add(self, name: str, gradient: torch.Tensor) -> None:
        parameter = getattr(self._module, name)
        self._sums.add(parameter, gradient.to(parameter.dtype), is_own=True)


class _Called:
    """The module's own forward, differentiated by autograd.

    Args:
        module, own_forward: see :class:`StackedExperts`.
        sums: where weight gradients go.
        saved: where to keep the rows.
        needs_backward: whether to keep anything.
        keeps_graph: whether to keep graphs, or the rows alone.
    """

    def __init__(
        self,
        module: nn.Module,
        own_forward: OwnForward,
        sums: GradientSums,
        saved: SavedRows,
        needs_backward: bool,
        keeps_graph: bool,
    ) -> None:
        self._module, self._own_forward, self._sums, self._saved = module, own_forward, sums, saved
        self._needs_backward, self._keeps_graph = needs_backward, keeps_graph
        self._graphs: dict[int, tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]] = {}

    def forward(self, chunk: int, x_RM: torch.Tensor, groups: Groups) -> torch.Tensor:
        """[R, M] to the same."""
        if self._needs_backward:
            self._saved.put(chunk, (x_RM.unsqueeze(0),))
        if self._keeps_graph:
            self._graphs[chunk] = self._recorded(x_RM, groups)
            return self._graphs[chunk][1].detach()
        return self._own(x_RM, groups, {})

    def backward_dx(self, chunk: int, dy_RM: torch.Tensor, groups: Groups) -> torch.Tensor:
        """[R, M] to the same; adds to the weights' gradients, as a graph is walked once."""
        (x_1RM,) = self._saved.take(chunk)
        leaf_RM, y_RM, aliases = self._graphs.pop(chunk, None) or self._recorded(x_1RM[0], groups)
        named = dict(self._module.named_parameters())
        inputs = leaf_RM, *aliases.values()
        dx_RM, *gradients = torch.autograd.grad(y_RM, inputs, dy_RM.to(y_RM.dtype), allow_unused=True)
        for name, gradient in zip(aliases, gradients, strict=True):
            self._sums.add(named[name], torch.zeros_like(aliases[name]) if gradient is None else gradient)
        return torch.zeros_like(leaf_RM) if dx_RM is None else dx_RM

    def backward_dw(self, chunk: int) -> None:
        """Nothing is left to do."""

    def _recorded(
        self, x_RM: torch.Tensor, groups: Groups
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        # Hooks on a parameter are for the gradient that the layer returns: the graph leads to aliases.
        wanted = {name: each for name, each in self._module.named_parameters() if self._sums.wants(each)}
        with torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):
            aliases = {name: each.detach().requires_grad_() for name, each in wanted.items()}
            leaf_RM = x_RM.detach().requires_grad_()
            return leaf_RM, self._own(leaf_RM.view_as(leaf_RM), groups, aliases), aliases

    def _own(self, x_RM: torch.Tensor, groups: Groups, aliases: dict[str, torch.Tensor]) -> torch.Tensor:
        of_row_R = groups.rows_of_each(torch.arange(len(groups.sizes), device=x_RM.device))
        arguments = x_RM, of_row_R.unsqueeze(1), x_RM.new_ones(len(x_RM), 1)
        if not aliases:
            return self._own_forward(*arguments)
        return functional_call(_ForwardOf(self._module, self._own_forward), _prefixed(aliases), arguments)


class _ForwardOf(nn.Module):
    """A module whose forward is another function on the module inside it."""

    def __init__(self, inner: nn.Module, forward: OwnForward) -> None:
        super().__init__()
        self.inner = inner
        self._own_forward = forward

    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        return self._own_forward(*arguments)


def _prefixed(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"inner.{name}": each for name, each in named.items()}


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True)
class _Chunk:
    of_experts: list[int]


@dataclass(frozen=True)
class _Phase:
    chunks: list[_Chunk]
    ends: torch.Tensor


@dataclass(frozen=True)
class _Rows:
    forward: _Phase
    backward: _Phase
    expert_order: torch.Tensor | None = None


class SlotsCall:
    """One call of :class:`StackedExperts` on slots [N, e, c, M], as one chunk; each slot once."""

    def __init__(self, experts: StackedExperts, needs_backward: bool, recompute: bool) -> None:
        self._experts, self._needs_backward, self._recompute = experts, needs_backward, recompute
        self._call: StackedCall | None = None

    @property
    def splits(self) -> bool:
        """Whether :meth:`backward_dx` leaves the weights' gradients to :meth:`backward_dw`."""
        return self._experts.splits

    def forward(self, start: int, stop: int, x_NecM: torch.Tensor) -> torch.Tensor:
        """[N, e, c, M] to the same."""
        ranks, num_experts, slots, _ = x_NecM.shape
        ends = torch.arange(1, num_experts + 1, dtype=torch.int32, device=x_NecM.device) * (ranks * slots)
        phase = _Phase([_Chunk([ranks * slots] * num_experts)], ends.unsqueeze(0))
        x_RM = _as_rows(x_NecM)
        self._call = self._experts.call_rows(self._needs_backward, _Rows(phase, phase), x_RM, recompute=self._recompute)
        return _as_slots(self._call.forward(0, x_RM), x_NecM.shape)

    def backward(self, start: int, stop: int, dy_NecM: torch.Tensor) -> torch.Tensor:
        """The gradient of the results to that of the slots."""
        return _as_slots(self._made().backward(0, _as_rows(dy_NecM)), dy_NecM.shape)

    def backward_dx(self, start: int, stop: int, dy_NecM: torch.Tensor) -> torch.Tensor:
        """As :meth:`backward`, without the weights."""
        return _as_slots(self._made().backward_dx(0, _as_rows(dy_NecM)), dy_NecM.shape)

    def backward_dw(self, start: int, stop: int) -> None:
        """What :meth:`backward_dx` has left."""
        self._made().backward_dw(0)

    def gradients(self) -> tuple[torch.Tensor | None, ...]:
        """See :meth:`StackedCall.gradients`."""
        return self._made().gradients()

    def release(self) -> list[torch.Tensor | None]:
        """See :meth:`StackedCall.release`."""
        return self._made().release()

    def _made(self) -> StackedCall:
        if self._call is None:
            raise RuntimeError("nothing has come through the forward yet")
        return self._call


def _as_rows(x_NecM: torch.Tensor) -> torch.Tensor:
    return x_NecM.transpose(0, 1).reshape(-1, x_NecM.shape[-1])


def _as_slots(y_RM: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    ranks, num_experts, slots, _ = shape
    return y_RM.view(num_experts, ranks, slots, -1).transpose(0, 1)
