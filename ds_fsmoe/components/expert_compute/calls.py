# SPDX-License-Identifier: Apache-2.0
"""The experts of one rank that are modules, and how a call of them is made.

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
    """The experts of one rank in one layer. Owns nothing: parameters and hooks stay where they are.

    Args:
        experts: e row-wise modules.
        keep_expert_dim: call modules with [N, 1, c, M], as stock does, instead of [N, c, M].
        path: of their layer in the model, for messages.
        together: whether several experts are computed together: "auto" where that is faster
            (:func:`~ds_fsmoe.components.expert_compute.side_by_side.has_gain`), "never", or "always" where it can be
            done at all.
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
        """All parameters of the experts, each once, in a fixed order; whether they require a gradient or not."""
        self._ids = self._present_ids()
        self._plan = ExpertPlan(self.experts, self.parameters)
        self._places: list[tuple[int, int]] | None = None
        """These are the first and last of the experts that go together, as the plan has them."""

    def __reduce__(self) -> tuple[type[ExpertSet], tuple[object, ...]]:
        # A copy has experts of its own, and what is known of these by identity is not known of those.
        return type(self), (self.experts, self.keep_expert_dim, self.path, self.together)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the parameters."""
        return [tuple(each.shape) for each in self.parameters]

    @property
    def num_experts(self) -> int:
        """The number of experts of this rank."""
        return len(self.experts)

    def written_now(self) -> tuple[ManualExpert | None, ...]:
        """Of each expert the written-out form by which a call made now would compute it, if it would."""
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
        """One forward call of the layer, under the autocast that holds now.

        Each expert is computed by its written-out form if it has one and nothing would miss the calls of its modules
        (hooks, autocast, compilation), else through autograd.

        Args:
            needs_backward: ``False`` keeps nothing.
            rows: how many there are of each expert in each chunk; ``None``: the call is on slots.
            x_RM: rows of this width and type; may be ``None`` for slots.
            same_cuts: whether the backward will have the forward's cuts. If not, an expert that autograd
                differentiates keeps its rows alone, since its graphs would be of no use. Only memory and time depend
                on it: any cuts are computed rightly either way.
            recompute: keep the rows alone and compute all else again in the backward.

        Raises:
            RuntimeError: the experts' parameters are not those that this set was made with.
        """
        planned, places, sums = self._now()
        # In an unchunked layer the slots of an only expert are contiguous, those of several are not. It matters: torch
        # adds a bias within the matrix product or after it, with one rounding or two.
        contiguous = rows is None and len(self.experts) == 1
        options = {"needs_backward": needs_backward, "recompute": recompute, "contiguous": contiguous}

        def alone(index: int) -> ExpertRun:
            expert = planned[index]
            if expert is not None:
                return ExpertRun(index, index + 1, WrittenCall(expert, sums, **options), is_single=True)
            return ExpertRun(index, index + 1, self._through_autograd(index, sums, rows, same_chunks, **options), True)

        def settled(x_NeCM: torch.Tensor) -> list[ExpertRun]:
            """Compute experts alone after all where together does not pay or would copy weights."""
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
        """Return whether experts can be computed together on such rows."""
        # Rows of some of the experts can be picked from other chunks only one by one.
        are_picked = rows.forward is rows.backward or count == len(self.experts)
        return are_picked and can_be_grouped(planned, x_RM)

    def _go_together(self, run: ExpertRun, planned: PlannedExpert, x_NeCM: torch.Tensor) -> bool:
        """Return whether experts are computed together on slots of this shape."""
        return (self.together == "always" or has_gain(planned, x_NeCM)) and run.call.experts.is_free(x_NeCM.shape[0])

    def _now(self) -> tuple[Sequence[PlannedExpert | None], list[tuple[int, int]], GradientSums]:
        """The experts as a call made now computes them, which of them go together, and where gradients go."""
        plan = self._plan_now()
        sums = GradientSums(self.parameters, plan.wanted)
        # Where autocast holds where they are, none is computed by its written-out form.
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
        """The call of one expert that autograd differentiates."""
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
        """Those that autocast may be on for: the host, and where the experts are."""
        if self.parameters:  # a layer's experts share a device
            accelerator = self.parameters[0].device
        else:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
        return ["cpu"] if accelerator is None or accelerator.type == "cpu" else ["cpu", accelerator.type]
