# SPDX-License-Identifier: Apache-2.0
"""The experts of one rank that are separate modules: makes a call of them for each forward of their layer.

Layers of stock's kind and :class:`MOELayer` create an :class:`ExpertSet`; ``stacked_experts`` is the counterpart for
one module with stacked weights. The set chooses for each expert between ``written_call``, ``autograd_call`` and
``side_by_side``.

Letters: N ranks the rows came from, e experts on this rank, C slots per expert, c a chunk of them, M width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ds_fsmoe.components.expert_compute.autograd_call import (
    AutocastState,
    AutogradCall,
    OneExpert,
    has_saving_hooks,
)
from ds_fsmoe.components.expert_compute.expert_call import CallRows, ExpertCall, ExpertRun
from ds_fsmoe.components.expert_compute.gradient_sums import GradientSums
from ds_fsmoe.components.expert_compute.manual_ffn import ManualExpert, modules_of
from ds_fsmoe.components.expert_compute.plan import ExpertPlan, PlannedExpert
from ds_fsmoe.components.expert_compute.side_by_side import (
    GroupedExperts,
    SideBySide,
    can_be_grouped,
    has_gain,
    runs_of,
)
from ds_fsmoe.components.expert_compute.written_call import WrittenCall


class ExpertSet:
    """Represents the experts of one rank in one layer. It owns nothing: parameters and hooks stay in the modules.

    Args:
        experts: e row-wise modules.
        keep_expert_dim: call modules with [N, 1, c, M], as stock does, instead of [N, c, M].
        path: of their layer in the model, for messages.
        together: whether several experts are computed together: "auto" where it is faster
            (:func:`~ds_fsmoe.components.expert_compute.side_by_side.has_gain`), "never", or "always" where it is
            possible.
    """

    def __init__(
        self,
        experts: Sequence[nn.Module],
        keep_expert_dim: bool = False,
        path: str = "",
        together: GroupedExperts = "auto",
    ) -> None:
        if not experts:
            raise ValueError("ExpertSet needs at least one expert")
        self.experts = tuple(experts)
        self.keep_expert_dim = keep_expert_dim
        self.path = path
        self.together: GroupedExperts = together
        self.parameters = tuple(dict.fromkeys(each for expert in experts for each in expert.parameters()))
        """All parameters of the experts, each once, in a fixed order, frozen ones included."""
        self._ids = self._present_ids()
        self._plan = ExpertPlan(self.experts, self.parameters)
        self._places: list[tuple[int, int]] | None = None
        """The first and last index of each run of experts that are computed together; ``None`` until it is needed."""

    def __reduce__(self) -> tuple[type[ExpertSet], tuple[object, ...]]:
        # A copy has its own experts: what is cached by identity does not apply to them.
        return type(self), (self.experts, self.keep_expert_dim, self.path, self.together)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the parameters."""
        return [tuple(each.shape) for each in self.parameters]

    @property
    def num_experts(self) -> int:
        """Return the number of experts of this rank."""
        return len(self.experts)

    def written_now(self) -> tuple[ManualExpert | None, ...]:
        """Return the hand-written form of each expert in a call made now; ``None`` where autograd computes it."""
        planned, _, _ = self._now()
        return tuple(None if each is None else each.form for each in planned)

    def call(
        self,
        needs_backward: bool,
        rows: CallRows | None = None,
        x_RM: torch.Tensor | None = None,
        *,
        same_chunks: bool = True,
        recompute: bool = False,
    ) -> ExpertCall:
        """Return one forward call of the layer, under the present autocast settings.

        An expert is computed by its hand-written form if it has one. It is computed through autograd if not, and where
        hooks, autocast or compilation need the calls of its modules.

        Args:
            needs_backward: ``False`` keeps nothing.
            rows: the rows of each expert in each chunk; ``None``: the call is on slots.
            x_RM: rows of the width and dtype of the call; may be ``None`` for slots.
            same_chunks: whether the backward has the forward's chunks. If not, autograd keeps an expert's rows instead
                of graphs. Only memory and time depend on it; results do not.
            recompute: keep the rows only, and compute all else again in the backward.

        Raises:
            RuntimeError: the experts' parameters were replaced after this set was made.
        """
        planned, places, sums = self._now()
        # In an unchunked layer the slots of a single expert are contiguous, those of several are not. It matters: torch
        # adds a bias within the matrix product or after it, with one rounding or two.
        contiguous = rows is None and len(self.experts) == 1
        options = {"needs_backward": needs_backward, "recompute": recompute, "contiguous": contiguous}

        def alone(index: int) -> ExpertRun:
            expert = planned[index]
            if expert is not None:
                return ExpertRun(index, index + 1, WrittenCall(expert, sums, **options), is_single=True)
            return ExpertRun(index, index + 1, self._through_autograd(index, sums, rows, same_chunks, **options), True)

        def settled(x_NeCM: torch.Tensor) -> list[ExpertRun]:
            """Split runs into single experts where computing them together is slower or would copy weights."""
            found = []
            for run in runs:
                if run.is_single or self._go_together(run, planned[run.first], x_NeCM):
                    found.append(run)
                else:
                    found += map(alone, range(run.first, run.last))
            return found

        runs, order = [], None if rows is None else rows.expert_order
        for first, last in places:
            if last - first > 1 and (rows is None or self._can_go_together(planned[first], last - first, rows, x_RM)):
                experts = SideBySide(planned[first:last])
                if rows is None or experts.is_free():
                    call = WrittenCall(experts, sums, order, **options)
                    runs.append(ExpertRun(first, last, call, is_single=False))
                    continue
            runs += map(alone, range(first, last))
        are_open = rows is None and len(runs) < len(self.experts)
        autocast = AutocastState.now(self._device_types())
        return ExpertCall(runs, sums, autocast, needs_backward, rows, settled if are_open else None)

    def _can_go_together(self, planned: PlannedExpert, count: int, rows: CallRows, x_RM: torch.Tensor) -> bool:
        """Return True if ``count`` experts can be computed together on such rows."""
        # Rows of a part of the experts can be picked from other chunks only expert by expert.
        are_picked = rows.forward is rows.backward or count == len(self.experts)
        return are_picked and can_be_grouped(planned, x_RM)

    def _go_together(self, run: ExpertRun, planned: PlannedExpert, x_NeCM: torch.Tensor) -> bool:
        """Return True if experts are computed together on slots of this shape."""
        return (self.together == "always" or has_gain(planned, x_NeCM)) and run.call.experts.is_free(x_NeCM.shape[0])

    def _now(self) -> tuple[Sequence[PlannedExpert | None], list[tuple[int, int]], GradientSums]:
        """Return the experts as planned for a call made now, the runs that are computed together, and the gradient
        sums."""
        plan = self._plan_now()
        sums = GradientSums(self.parameters, plan.wanted)
        # Under autocast on their device no expert is computed by its hand-written form.
        if any(map(torch.is_autocast_enabled, plan.device_types)):
            planned = (None,) * len(self.experts)
            return planned, runs_of(planned, self.together), sums
        if self._places is None:
            self._places = runs_of(plan.planned, self.together)
        return plan.planned, self._places, sums

    def _through_autograd(
        self,
        index: int,
        sums: GradientSums,
        rows: CallRows | None,
        same_chunks: bool,
        *,
        needs_backward: bool,
        recompute: bool,
        contiguous: bool,
    ) -> AutogradCall:
        """Return the call of one expert that autograd differentiates."""
        where = f"{self.path}: expert {index}: " if self.path else ""
        expert = OneExpert(
            self.experts[index], keep_expert_dim=self.keep_expert_dim, contiguous=contiguous, where=where
        )
        keeps_graph = needs_backward and same_chunks and not recompute and not has_saving_hooks()
        keeps = {"needs_backward": needs_backward, "keeps_graph": keeps_graph, "keeps_results": rows is not None}
        return AutogradCall(expert, sums, **keeps)

    def _plan_now(self) -> ExpertPlan:
        if not self._plan.still_holds():
            if self._ids != self._present_ids():
                raise RuntimeError("the experts' parameters were replaced after ExpertSet(...): call it again")
            self._plan, self._places = ExpertPlan(self.experts, self.parameters), None
        return self._plan

    def _present_ids(self) -> list[int]:
        modules = (module for expert in self.experts for module in modules_of(expert))
        return [id(parameter) for module in modules for parameter in module._parameters.values()]

    def _device_types(self) -> list[str]:
        """Return the device types that autocast may be on for: the host, and the device of the experts."""
        if self.parameters:  # a layer's experts share a device
            accelerator = self.parameters[0].device
        else:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
        return ["cpu"] if accelerator is None or accelerator.type == "cpu" else ["cpu", accelerator.type]
