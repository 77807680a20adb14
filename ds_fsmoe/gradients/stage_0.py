# SPDX-License-Identifier: Apache-2.0
"""Replaces DeepSpeed's own reduction of gradients without ZeRO; see :mod:`ds_fsmoe.gradients.zero_stages`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.utils import groups as stock_groups
from torch import nn

from ds_fsmoe.gradients.adding_up import refuse_before_stage_2
from ds_fsmoe.gradients.flat_buffers import Scaling
from ds_fsmoe.gradients.reducer import GradientReducer


class Stage0:
    """Handles gradients without ZeRO: DeepSpeed collects those of all parameters when the backward is over.

    Args:
        engine: the engine, with its optimizer.
        accumulate: the option of that name.
    """

    sums_each = False
    """Whether every micro-batch is summed over ranks, and not the last one of a step alone."""

    def __init__(self, engine: Any, accumulate: str = "auto") -> None:
        refuse_before_stage_2(accumulate)
        self._engine = engine
        self.device = engine.device
        self._handles: list[Any] = []

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients we reduce, in module order. Sparse ones, and those that stages share,
        are left to DeepSpeed."""
        sparse = {
            id(module.weight)
            for module in self._engine.module.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        }
        left = sparse | shared_by_stages(self._engine)
        return [
            each
            for each in self._engine.module.parameters()
            if each.requires_grad and each.numel() and id(each) not in left
        ]

    def wire_type(self, parameter: nn.Parameter) -> torch.dtype:
        return self._engine.communication_data_type

    def gradient_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        if parameter.grad is not None and parameter.grad.is_sparse:
            # Made so by a function, and not by a module that says so beforehand.
            parameter.grad = parameter.grad.to_dense()
        return parameter.grad

    def replace(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        parameter.grad = gradient

    def is_sending(self) -> bool:
        engine = self._engine
        # Who asks for the reduction later may want to see to the gradients before.
        reduces = engine.pipeline_parallelism or engine.enable_backward_allreduce
        return reduces and not engine.inside_no_sync_ctxt and engine.is_gradient_accumulation_boundary()

    owners = None
    """Every rank updates all parameters."""
    most = 500_000_000
    """The elements of a message: as many as DeepSpeed sends at a time."""
    most_waiting = None
    """Gradients stay with their parameters until the step."""

    def is_needed(self, parameter: nn.Parameter) -> bool:
        return True

    def scaling(self) -> Scaling:
        """Divide as ``DeepSpeedEngine.allreduce_bucket`` does, for experts too: by the data-parallel size."""
        engine = self._engine
        size = dist.get_world_size(stock_groups._get_sequence_data_parallel_group())
        if not engine.gradient_average:
            return Scaling()
        if not engine.postscale_gradients():
            return Scaling(before=lambda message: message.mul_(1.0 / size))
        first = engine.gradient_predivide_factor()
        return Scaling(
            before=None if first == 1.0 else lambda message: message.mul_(1.0 / first),
            after=None if first == size else lambda message: message.mul_(first / size),
        )

    def take(self, reducer: GradientReducer) -> None:
        def on_gradient(parameter: nn.Parameter) -> None:
            if self.is_sending():
                reducer.ready(parameter)

        for parameter in reducer.parameters:
            self._handles.append(parameter.register_post_accumulate_grad_hook(on_gradient))

        def gradients_for_reduction() -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]]:
            reducer.finish()
            found = self._write_back(reducer)
            reducer.release()
            return found

        self._engine._get_gradients_for_reduction = gradients_for_reduction

    def _write_back(self, reducer: GradientReducer) -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]]:
        """Put reduced gradients where DeepSpeed looks for them; return what it still has to reduce."""
        dense: list[torch.Tensor] = []
        experts: dict[str, list[torch.Tensor]] = {name: [] for name in self._engine.expert_data_parallel_group}
        for parameter in self._engine.module.parameters():
            if not parameter.requires_grad or not parameter.numel():
                continue
            if parameter in reducer:
                # Where it was reduced, if its type is the parameter's; one that is missing is zero there.
                parameter.grad = reducer.place(parameter).to(parameter.dtype)
                continue
            if parameter.grad is None:
                # A gradient that is missing is zero, as DeepSpeed has it.
                parameter.grad = torch.zeros_like(parameter)
            if is_moe_param(parameter):
                experts[parameter.group_name].append(parameter.grad.data)
            else:
                dense.append(_as_deepspeed_has_it(parameter))
        return dense, experts

    def give_back(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        vars(self._engine).pop("_get_gradients_for_reduction", None)


def _as_deepspeed_has_it(parameter: nn.Parameter) -> Any:
    from deepspeed.runtime.sparse_tensor import SparseTensor

    return SparseTensor(parameter.grad) if parameter.grad.is_sparse else parameter.grad.data


def shared_by_stages(engine: Any) -> set[int]:
    """Return the ids of the parameters that several stages of a pipeline share. DeepSpeed sums their gradients over
    these stages when all micro batches are through, and over the ranks of a stage after that."""
    if not engine.pipeline_parallelism:
        return set()
    return {id(weight) for weight, _ in engine.module.get_tied_weights_and_groups()}
