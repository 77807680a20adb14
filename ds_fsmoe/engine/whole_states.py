# SPDX-License-Identifier: Apache-2.0
"""Has DeepSpeed's access to single parameters (``safe_get_full_grad`` and the like) give and take whole experts.

Scripts import those functions before anything of ours runs. So what they call is replaced: at ZeRO 1 and 2 methods that
DeepSpeed puts on a parameter, at ZeRO 3 methods of its optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state
from torch import nn

from ds_fsmoe.checkpoint_files.expert_parts import parts_in
from ds_fsmoe.layer.expert_shard import origin_of


def show_whole_experts(engine: Any) -> None:
    """Let DeepSpeed's functions for single parameters see the experts of all ranks, as they see those of one process.

    Args:
        engine: our engine, complete but for its placement.
    """
    optimizer = engine.optimizer
    view = _Whole(engine)
    if not engine._hf_layers:  # of DeepSpeed's own layers they see what stock has
        return
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        _replace_at_stage_3(optimizer, view)
    elif hasattr(optimizer, "_link_all_hp_params"):
        _replace_on_parameters(optimizer, view)


class _Whole:
    """Puts what belongs to an expert parameter together, and cuts it again.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: Any) -> None:
        self.parameters = [each for _, each, part in parts_in(engine.module) if part.num_parts > 1]

    def of(self, own: torch.Tensor | None, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the whole of what each rank has of a parameter, in the model's own order. Collective."""
        origin = origin_of(parameter)
        return own if own is None or origin is None else origin.whole(own)

    def cut(self, value: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        """Return this rank's part of a whole value.

        Raises:
            ValueError: it is not as large as the whole parameter.
        """
        origin = origin_of(parameter)
        if origin is None:
            return value
        shape = origin.part.whole_shape(getattr(parameter, "ds_shape", parameter.shape))
        if value.numel() != torch.Size(shape).numel():
            raise ValueError(
                f"ds_fsmoe: a value of shape {list(value.shape)} for a parameter of experts that are spread over "
                f"{origin.part.num_parts} ranks: give that of all {origin.part.num_experts} experts, {list(shape)}, on "
                "every rank, as safe_get_full_* returns it"
            )
        return origin.cut(value.reshape(shape))


def _replace_at_stage_3(optimizer: Any, view: _Whole) -> None:
    gather, set_state = optimizer._fp32_state_allgather, optimizer.set_full_hp_param
    set_gradient, update = optimizer.set_fp32_grad_for_param, optimizer.update_fp32_grad_for_param_vectorized

    def update_whole(update_func: Callable[..., torch.Tensor], param_list: Iterable[nn.Parameter]) -> None:
        update(lambda whole, each: view.cut(update_func(whole, each), each), param_list)

    optimizer._fp32_state_allgather = lambda param, partition: view.of(gather(param, partition), param)
    optimizer.set_full_hp_param = lambda value, param, *key, **named: set_state(
        view.cut(value, param), param, *key, **named
    )
    optimizer.set_fp32_grad_for_param = lambda value, param: set_gradient(view.cut(value, param), param)
    optimizer.update_fp32_grad_for_param_vectorized = update_whole


def _replace_on_parameters(optimizer: Any, view: _Whole) -> None:
    link = optimizer._link_all_hp_params
    link_states = _link_states_of_all(optimizer) if isinstance(optimizer, DeepSpeedZeroOptimizer) else None

    def see_whole() -> None:
        for each in view.parameters:
            if hasattr(each, "_hp_mapping"):
                _see_whole(each, view)

    def link_all() -> None:
        link()
        see_whole()
        if link_states is not None:
            link_states(anew=True)

    # DeepSpeed links again whenever its flat tensors have been replaced: after a load, and after an offload.
    optimizer._link_all_hp_params = link_all
    see_whole()


def _see_whole(parameter: nn.Parameter, view: _Whole) -> None:
    get_state, get_gradient = parameter.get_full_hp_param, parameter.get_full_hp_grad
    set_state, set_gradient = parameter.set_full_hp_param, parameter.set_full_hp_grad
    parameter.get_full_hp_param = lambda *key, **named: view.of(get_state(*key, **named), parameter)
    parameter.get_full_hp_grad = lambda: view.of(get_gradient(), parameter)
    parameter.set_full_hp_param = lambda value, *key, **named: set_state(view.cut(value, parameter), *key, **named)
    parameter.set_full_hp_grad = lambda value: set_gradient(view.cut(value, parameter))


def _link_states_of_all(optimizer: DeepSpeedZeroOptimizer) -> Callable[..., None]:
    """Let parameters of all groups find their states, and return what links them.

    DeepSpeed 0.19.8 links all groups once, after the step of the first one: the others have no states by then, and
    experts are in others.
    """
    linked: set[int] = set()

    def link(anew: bool = False) -> None:
        if anew:
            linked.clear()
        for number, flat in enumerate(optimizer.single_partition_of_fp32_groups):
            if number not in linked and optimizer.optimizer.state.get(flat):
                lazy_init_hp_params_optimizer_state(optimizer.bit16_groups[number], flat, optimizer.optimizer.state)
                linked.add(number)

    optimizer._lazy_init_hp_params_optimizer_state = link
    return link
