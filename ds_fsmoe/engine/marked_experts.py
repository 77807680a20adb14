# SPDX-License-Identifier: Apache-2.0
"""Marks the parameters of experts that an engine has spread over ranks, and guards what is loaded and saved.

See :mod:`~ds_fsmoe.layer.expert_shard` for what a marked parameter does. A state dict that a script takes holds marked
tensors, too: it can be looked at, and is refused where it would be written.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from deepspeed.utils import groups as stock_groups
from torch import nn

from ds_fsmoe.checkpoint_files.expert_parts import parts_in
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.distributed.partitioned import is_shared_out
from ds_fsmoe.engine.convert_adapters import adapters_of
from ds_fsmoe.engine.gathered_experts import gather_experts_whole
from ds_fsmoe.layer.expert_shard import TRUSTED, ExpertShard, asking, gradient_of, mark, origin_of, tensors_in, unmark
from ds_fsmoe.layer.experts_layer import FSMoEExperts
from ds_fsmoe.layer.over_ranks import Origin
from ds_fsmoe.layer.parts import LayerError

WHOLE = (
    "call state_dict = ds_fsmoe.whole_state_dict(engine) on every rank, which the first one gets, or engine.save_16bit_"
    "model(folder)"
)


class MarkedExperts:
    """Holds the marks of one engine.

    Args:
        model: the model, whose experts are in their final place.
    """

    def __init__(self, model: nn.Module) -> None:
        spread = [found for found in parts_in(model) if found[2].num_parts > 1]
        self._parameters = [parameter for _, parameter, _ in spread]
        # What knows the shape of a gradient is made anew while nobody holds it, and a parameter may be whole then.
        self._accumulators = [
            each.view_as(each).grad_fn.next_functions[0][0]
            for each in self._parameters
            if each.requires_grad and not is_shared_out(each)
        ]
        experts = [each for each in model.modules() if isinstance(each, FSMoEExperts)]
        owners = {id(own): each for each in experts for own in (*each.parameters(), *adapters_of(each))}
        for name, parameter, part in spread:
            state, group = owners[id(parameter)].fsmoe, stock_groups._get_expert_parallel_group(parameter.group_name)
            mark(parameter, Origin(name, part, group, state.places))
        # Without ZeRO DeepSpeed's safe_get_full_grad would take the plain gradient; so it asks for what it calls this.
        self._asked = [
            each for each in self._parameters if not hasattr(each, "_hp_mapping") and not is_shared_out(each)
        ]
        for each in self._asked:
            each._hp_grad, each.get_full_hp_grad = True, functools.partial(gradient_of, each)
        self._handles = [handle for each in model.modules() for handle in _guard(each)]
        if spread:
            gather_experts_whole()
            _save_whole()

    def close(self) -> None:
        """Take the marks and guards off."""
        for each in self._asked:
            del each._hp_grad, each.get_full_hp_grad
        for each in self._parameters:
            unmark(each)
        for each in self._handles:
            each.remove()
        self._parameters, self._asked, self._handles, self._accumulators = [], [], [], []


def refuse_hooks(path: str, module: nn.Module) -> None:
    """Refuse experts with gradient hooks, which were made for the gradient of all of them.

    Args:
        path: the path of the module of experts, or of what is around it.
        module: that module.

    Raises:
        LayerError: names the parameter and what to do.
    """
    if hooked := hooks_on(module):
        raise LayerError(
            f"{path}.{hooked[0]} has gradient hooks (register_hook or register_post_accumulate_grad_hook), which ds_"
            "fsmoe cannot keep, as each rank will have the gradient of its own experts only: put them on after "
            "initialize(), where ds_fsmoe.own_experts_of(parameter) says which experts these are, or set "
            "fsmoe.ep_size = 1"
        )


def hooks_on(module: nn.Module) -> list[str]:
    """Return the names of parameters that have gradient hooks."""
    kinds = "_backward_hooks", "_post_accumulate_grad_hooks"
    return [name for name, each in module.named_parameters() if any(getattr(each, kind, None) for kind in kinds)]


def refuse_parts(name: str) -> None:
    """Refuse to give this rank's experts to a script that takes them for all.

    Args:
        name: of a parameter.

    Raises:
        CheckpointError: says what to call instead.
    """
    raise CheckpointError(f"ds_fsmoe has spread {name} over ranks, and this rank has its own experts only: {WHOLE}")


def _guard(module: nn.Module) -> Iterator[Any]:
    """Guard the state dict of a module that has marked parameters itself."""
    own = {name: each for name, each in module.named_parameters(recurse=False) if isinstance(each, ExpertShard)}
    if not own:
        return

    def before_load(_: nn.Module, state_dict: dict[str, Any], prefix: str, *__: Any) -> None:
        for name, parameter in own.items():
            given = state_dict.get(prefix + name)
            if isinstance(given, torch.Tensor) and isinstance(parameter, ExpertShard):
                state_dict[prefix + name] = _own_of(given, parameter)

    yield module.register_load_state_dict_pre_hook(before_load)


def _save_whole() -> None:
    """Let ``torch.save`` refuse this rank's experts before it begins a file, from now on in this process."""
    if hasattr(torch.save, "_ds_fsmoe_checked"):
        return
    save = torch.save

    @functools.wraps(save)
    def checked(obj: Any, *args: Any, **options: Any) -> None:
        if asking() not in TRUSTED:
            for each in tensors_in((obj,)):
                if (origin := origin_of(each)) is not None:
                    refuse_parts(origin.name)
        save(obj, *args, **options)

    checked._ds_fsmoe_checked = True
    torch.save = torch.serialization.save = checked


def _own_of(given: torch.Tensor, parameter: ExpertShard) -> torch.Tensor:
    """Return this rank's part of a whole weight that is loaded; anything else as it is."""
    if is_shared_out(parameter) and not parameter.numel():
        return given
    origin = parameter.fsmoe_origin
    is_whole = tuple(given.shape) == origin.part.whole_shape(parameter.shape)
    return origin.cut(given) if is_whole else given


def check_whole(given: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse to write weights that are those of this rank alone.

    Args:
        given: name -> tensor.
        model: the model that they are of.

    Raises:
        CheckpointError: names the first one.
    """
    for name, parameter, part in parts_in(model):
        found = given.get(name)
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if isinstance(found, torch.Tensor) and part.num_parts > 1 and tuple(found.shape) != part.whole_shape(shape):
            raise CheckpointError(
                f"save_pretrained: {name} in the state dict given is {list(found.shape)}, and the model has "
                f"{list(part.whole_shape(shape))}: ds_fsmoe has spread it over ranks: {WHOLE}"
            )
