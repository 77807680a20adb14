# SPDX-License-Identifier: Apache-2.0
"""The experts of one rank in one module with stacked weights, one tensor of each kind, computed chunk by chunk.

Converted modules of transformers use it; ``calls`` is the counterpart for experts that are separate modules. An expert
computes ``down(act(up(x)))``: products and their gradients are hand-written, and autograd differentiates the module's
own function between them (activation, gate, norm). A module whose forward computes something else is called itself, and
autograd differentiates all of it.

Letters: R rows, expert by expert; M width, H width of an expert, F = 2 * H where experts are gated, else H; N ranks
that rows came from, e experts on this rank, c slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ds_fsmoe.components.expert_compute.adapters import Adapter
from ds_fsmoe.components.expert_compute.autograd_call import AutocastState, AutogradCall
from ds_fsmoe.components.expert_compute.contract import Contract, shape_of
from ds_fsmoe.components.expert_compute.expert_call import CallRows, ExpertCall, ExpertRun, sizes_of_call
from ds_fsmoe.components.expert_compute.gated_forms import Gate
from ds_fsmoe.components.expert_compute.gradient_sums import GradientSums
from ds_fsmoe.components.expert_compute.stacked_forms import ModuleExperts, OwnExperts, OwnForward
from ds_fsmoe.components.expert_compute.written_call import WrittenCall
from ds_fsmoe.ops import Ops


class StackedExperts:
    """Has the interface of :class:`~ds_fsmoe.components.expert_compute.calls.ExpertSet` for one module of experts.

    Args:
        module: the module of the experts, with the weights of this rank's experts. Its parameters are read at each
            call, as ZeRO 3 allocates their memory only then.
        contract: the layout of its weights.
        own_forward: the module's own forward, where it computes something else than the contract; ``None`` where the
            hand-written form is right.
        path: of the layer in the model, for messages.
        adapters: the adapters on its weights.
        ops: the operators to use; ``None``: torch's.
    """

    keep_expert_dim = False
    is_row_wise = True
    """By the contract each row is computed independently."""

    def __init__(
        self,
        module: nn.Module,
        contract: Contract,
        own_forward: OwnForward | None = None,
        path: str = "",
        adapters: Sequence[Adapter] = (),
        ops: Ops | None = None,
    ) -> None:
        self.experts = (module,)
        self.path = path
        self.module, self.contract, self.own_forward = module, contract, own_forward
        self._adapters = tuple(adapters)
        self.gate = Gate(module, contract.has_gate, ops)
        """Computes the part between the two products."""
        of_adapters = [parameter for each in self._adapters for parameter in each.parameters]
        self.parameters = tuple(dict.fromkeys((*module.parameters(), *of_adapters)))
        """All parameters of the experts, each once, in a fixed order, frozen ones included."""

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Return the whole shapes of the parameters."""
        return [shape_of(each) or () for each in self.parameters]

    @property
    def num_experts(self) -> int:
        """Return the number of experts of this rank."""
        return int(self.module.num_experts)

    def written_now(self) -> tuple[Any, ...]:
        """Return a tuple of one element: the contract if the hand-written form computes the experts, ``None`` if
        autograd does."""
        return (self.contract if self.own_forward is None else None,)

    def kept_of_a_row(self, recompute: bool) -> tuple[int, int]:
        """Return the number of values per row that a call keeps for its backward: of the rows, and of the first
        product."""
        contract = self.contract
        up = shape_of(getattr(self.module, contract.up)) or (0, 0, 0)
        width, hidden = up[1:] if contract.is_transposed else up[:0:-1]
        of_up = [each.parameters for each in self._adapters if each.weight == contract.up]
        trains = any(each.requires_grad for each in (getattr(self.module, contract.up), *itertools.chain(*of_up)))
        is_kept = recompute or self.own_forward is not None or trains
        return width if is_kept else 0, 0 if recompute or self.own_forward is not None else hidden

    def call(
        self,
        needs_backward: bool,
        rows: CallRows | None = None,
        x_RM: torch.Tensor | None = None,
        *,
        same_chunks: bool = True,
        recompute: bool = False,
    ) -> ExpertCall:
        """Return one forward call; see :meth:`ds_fsmoe.components.expert_compute.calls.ExpertSet.call`.

        Such a layer never uses slots in training, only in measurements. Their backward must have the chunks of the
        forward.
        """
        with torch._C.DisableTorchFunctionSubclass():  # parameters may be marked, for scripts
            like = getattr(self.module, self.contract.up) if x_RM is None else x_RM
            sums, order, device = GradientSums(self.parameters), None, like.device.type
            if rows is not None:
                order = rows.expert_order
            engine: WrittenCall | AutogradCall
            if self.own_forward is None:
                dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
                experts = ModuleExperts(self.module, self.contract, sums, dtype, self.gate, self._adapters)
                engine = WrittenCall(experts, sums, order, needs_backward=needs_backward, recompute=recompute)
            else:
                own = OwnExperts(self.module, self.own_forward, self._adapters, self.contract.is_transposed)
                keeps = {"keeps_graph": needs_backward and same_chunks and not recompute, "keeps_results": True}
                engine = AutogradCall(own, sums, order, needs_backward=needs_backward, **keeps)
            run = ExpertRun(0, self.num_experts, engine, is_single=False)
            autocast = AutocastState.now(dict.fromkeys(("cpu", device)))
            return ExpertCall([run], sums, autocast, needs_backward, rows)

    def on_few_rows(self, x_RM: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """Return the results of rows that are sorted by expert, and keep nothing.

        Args:
            x_RM: the rows.
            sizes: the number of rows of each expert.
        """
        ends = torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32, device=x_RM.device)
        return self.call(False, sizes_of_call([sizes], ends.unsqueeze(0)), x_RM).forward(0, len(x_RM), x_RM)
