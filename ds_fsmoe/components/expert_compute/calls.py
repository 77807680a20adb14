# SPDX-License-Identifier: Apache-2.0
"""The experts of one rank in one forward call of a layer, computed chunk by chunk, forward and backward by hand.

Letters: N ranks the rows came from, e experts on this rank, C slots per expert, c a chunk of them, M width. A cut
[start, stop) is a chunk's place in the capacity.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ds_fsmoe.components.expert_compute.autograd_call import AutocastState, GraphCall
from ds_fsmoe.components.expert_compute.gradient_sums import GradientSums
from ds_fsmoe.components.expert_compute.grouped_call import (
    GroupedCall,
    GroupedExperts,
    GroupedRowsCall,
    can_be_grouped,
    runs_of,
)
from ds_fsmoe.components.expert_compute.manual_call import ManualCall
from ds_fsmoe.components.expert_compute.manual_ffn import ManualExpert, modules_of
from ds_fsmoe.components.expert_compute.plan import ExpertPlan, PlannedExpert
from ds_fsmoe.components.expert_compute.row_call import (
    CallRows,
    ExpertRun,
    KeptCall,
    RowCall,
    joined_parts,
    saved_rows,
)


class ExpertCall(KeptCall):
    """Made by :meth:`ExpertSet.call`; keeps what its backward needs until it is dropped.

    ``forward`` is called for cuts that together hold each slot once, then ``backward`` for cuts that do the same, equal
    or not, in any order, and last ``gradients``. A cut may be empty. Experts are row-wise by law, which makes cutting
    anew legal. After ``gradients`` the backward may be walked again.

    Nothing is recorded on the caller's graph, whatever its grad mode. Results are new memory. The rows given to
    ``forward`` are kept without copying, and may not be overwritten meanwhile.
    """

    def __init__(
        self,
        runs: Sequence[ExpertRun],
        sums: GradientSums,
        autocast: AutocastState,
        needs_backward: bool,
    ) -> None:
        super().__init__(runs, sums, autocast, needs_backward)
        self._num_experts = self._runs[-1].last
        self._slots_forward = 0
        self._returned: list[tuple[int, int]] = []

    @torch.no_grad()
    def forward(self, start: int, stop: int, x_NeCM: torch.Tensor) -> torch.Tensor:
        """[N, e, stop - start, M] to the same shape; each slot once.

        Raises:
            ValueError: rows of another shape, slots given before, or an expert that returns another shape.
        """
        self._check("rows", start, stop, x_NeCM)
        result_NeCM = self._through("forward", start, stop, x_NeCM.detach())
        self._slots_forward += stop - start
        return result_NeCM

    @torch.no_grad()
    def backward(self, start: int, stop: int, dy_NeCM: torch.Tensor) -> torch.Tensor:
        """The gradient of the results to that of the rows; adds to the weights' gradients. Each slot once.

        Raises:
            ValueError: gradients of another shape, or slots that came back before or never went through the forward.
            RuntimeError: made without ``needs_backward``, or a weight was changed in place since.
        """
        self._check_is_kept()
        self._check("gradients", start, stop, dy_NeCM)
        for first, last in self._returned:
            if max(first, start) < min(last, stop):
                raise ValueError(f"slots [{start}, {stop}) came back twice: [{first}, {last}) came before")
        result_NeCM = self._through("backward", start, stop, dy_NeCM)
        self._returned.append((start, stop))
        return result_NeCM

    def gradients(self) -> tuple[torch.Tensor | None, ...]:
        """The gradient of each parameter of :attr:`ExpertSet.parameters`, and start over.

        ``None`` where the parameter requires none or no result depends on it.

        Raises:
            RuntimeError: not every slot has come back.
        """
        if (slots_backward := sum(stop - start for start, stop in self._returned)) != self._slots_forward:
            raise RuntimeError(
                f"gradients are incomplete: {self._slots_forward} slots went through the forward and {slots_backward} "
                "through the backward"
            )
        self._returned = []
        return self._sums.take()

    def _check(self, what: str, start: int, stop: int, tensor_NeCM: torch.Tensor) -> None:
        shape = tuple(tensor_NeCM.shape)
        if len(shape) != 4 or shape[1] != self._num_experts or shape[2] != stop - start:
            raise ValueError(
                f"{what} of slots [{start}, {stop}) are {shape}: must be [N, {self._num_experts} experts, "
                f"{stop - start} slots, M]"
            )

    def _through(self, way: str, start: int, stop: int, tensor_NeCM: torch.Tensor) -> torch.Tensor:
        """[N, e, c, M] to the same in new memory, through the calls' method ``way``."""
        parts = (_of_run(run, way, start, stop, tensor_NeCM) for run in self._runs)
        with self._autocast.restored():
            if len(self._runs) == 1 and not isinstance(self._runs[0].call, GraphCall):  # written out: new memory
                return next(parts).contiguous()
            return joined_parts(parts, self._num_experts)


def _of_run(run: ExpertRun, way: str, start: int, stop: int, tensor_NeCM: torch.Tensor) -> torch.Tensor:
    """The results of a run's part of [N, e, c, M]; [N, k, c, M]."""
    do = getattr(run.call, way)
    if run.is_single:
        return do(start, stop, tensor_NeCM[:, run.first]).unsqueeze(1)
    return do(start, stop, tensor_NeCM[:, run.first : run.last])


class ExpertSet:
    """The experts of one rank in one layer. Owns nothing: parameters and hooks stay where they are.

    Args:
        experts: e row-wise modules.
        keep_expert_dim: call modules with [N, 1, c, M], as stock does, instead of [N, c, M].
        path: of their layer in the model, for messages.
        together: whether several experts are computed together: "auto" where it pays
            (:func:`~ds_fsmoe.components.expert_compute.grouped_call.pays`), "never", or "always" where it can be done
            at all.
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

    def call(self, needs_backward: bool, *, same_cuts: bool = True, recompute: bool = False) -> ExpertCall:
        """One forward call of the layer, under the autocast that holds now.

        Each expert is computed by its written-out form if it has one and nothing would miss the calls of its modules
        (hooks, autocast, compilation), else through autograd.

        Args:
            needs_backward: ``False`` keeps nothing.
            same_cuts: whether the backward will have the forward's cuts. If not, an expert that autograd
                differentiates keeps its rows alone, since its graphs would be of no use. Only memory and time depend
                on it: any cuts are computed rightly either way.
            recompute: keep the rows alone and compute all else again in the backward.

        Raises:
            RuntimeError: the experts' parameters are not those that this set was made with.
        """
        planned, places, sums = self._now()
        options = {"needs_backward": needs_backward, "recompute": recompute}
        # In an unchunked layer the rows of an only expert are contiguous, those of several are not. It matters: torch
        # adds a bias within the matrix product or after it, with one rounding or two.
        contiguous = len(self.experts) == 1
        runs = []
        for first, last in places:
            if last - first > 1:
                call = GroupedCall(planned[first:last], sums, always=self.together == "always", **options)
                runs.append(ExpertRun(first, last, call, is_single=False))
            else:
                runs.append(self._alone(first, planned, sums, same_cuts, contiguous=contiguous, **options))
        return ExpertCall(runs, sums, AutocastState.now(self._device_types()), needs_backward)

    def call_rows(
        self, needs_backward: bool, rows: CallRows, x_RM: torch.Tensor, *, recompute: bool = False
    ) -> RowCall:
        """One forward call of the layer on rows instead of slots; see :meth:`call`.

        Args:
            needs_backward: ``False`` keeps nothing.
            rows: how many there are of each expert in each chunk.
            x_RM: rows of this width and type.
            recompute: keep the rows alone and compute all else again in the backward.

        Raises:
            RuntimeError: the experts' parameters are not those that this set was made with.
        """
        planned, places, sums = self._now()
        options = {"needs_backward": needs_backward, "recompute": recompute}
        is_same = rows.forward is rows.backward
        runs = []
        for first, last in places:
            # Rows of some of the experts can be picked from other chunks only one by one.
            are_picked = is_same or last - first == len(self.experts)
            if last - first > 1 and are_picked and can_be_grouped(planned[first], x_RM):
                call = GroupedRowsCall(planned[first:last], sums, saved_rows(rows), **options)
                if call.lie_side_by_side():
                    runs.append(ExpertRun(first, last, call, is_single=False))
                    continue
            alone = {**options, "contiguous": False, "keeps_results": True}
            runs += [self._alone(each, planned, sums, is_same, **alone) for each in range(first, last)]
        return RowCall(runs, sums, AutocastState.now(self._device_types()), needs_backward, rows)

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

    def _alone(
        self,
        index: int,
        planned: Sequence[PlannedExpert | None],
        sums: GradientSums,
        same_cuts: bool,
        *,
        needs_backward: bool,
        recompute: bool,
        contiguous: bool,
        keeps_results: bool = False,
    ) -> ExpertRun:
        """The call of one expert: by its written-out form, or through autograd."""
        options = {"needs_backward": needs_backward, "contiguous": contiguous}
        expert = planned[index]
        if expert is not None:
            return ExpertRun(index, index + 1, ManualCall(expert, sums, recompute=recompute, **options), is_single=True)
        call = GraphCall(
            self.experts[index],
            sums,
            keep_expert_dim=self.keep_expert_dim,
            where=f"{self.path}: expert {index}: " if self.path else "",
            keeps_graph=needs_backward and same_cuts and not recompute,
            keeps_results=keeps_results,
            **options,
        )
        return ExpertRun(index, index + 1, call, is_single=True)

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
