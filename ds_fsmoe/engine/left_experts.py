# SPDX-License-Identifier: Apache-2.0
"""Turns modules of experts back: to their own class, as they lie, when their engine has ended; and to all experts.

What an engine leaves is a module of its own class with this rank's experts, each parameter with the description of its
part. The next engine takes that as it is, where it is to have the same part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart, part_of
from ds_fsmoe.components.expert_compute.contract import OWN_NAMES
from ds_fsmoe.distributed.partitioned import gathered
from ds_fsmoe.engine.cut_parameters import join_parts
from ds_fsmoe.layer.experts_layer import FSMoEExperts, own_class_of
from ds_fsmoe.layer.parts import LayerError

_LEFT = "fsmoe_left"
"""The attribute of a module that an engine has left, and no other has taken up: (the hook by which it refuses to run,
where each of its experts lies, if they have moved)."""
_DEEPSPEEDS = (
    *("_dp_group", "_hp_mapping", "_index_in_param_group", "_z3_optimizer", "grad_accum", "is_external_param"),
    *("nvme_swapper", "param_idx_in_group"),
)
"""The attributes of parameters that are DeepSpeed's engines', besides functions of its and those that begin with
``ds_``."""
OURS = ("allreduce", "group_name", "fsmoe_part")
"""The attributes of a parameter of experts that are ours, besides those that DeepSpeed gives to all."""


def leave(module: FSMoEExperts) -> None:
    """Take all of ours off a converted module, and off PEFT's wrappers around it, whose experts stay as they lie.

    Args:
        module: a module whose engine has ended.
    """
    state = module.fsmoe
    for handle in () if state.watch is None else state.watch.handles:
        handle.remove()
    around = next(iter(state.outermost), module)
    while around is not module:
        around.__class__ = type(around).__bases__[1]
        del around.opaque
        around = around.base_layer
    module.__class__ = own_class_of(module)
    del module.fsmoe
    setattr(module, _LEFT, (module.register_forward_pre_hook(_refuse), state.places()))


def is_left(module: nn.Module) -> bool:
    """Return whether an engine has left a module, which no other one has taken up since."""
    return hasattr(module, _LEFT)


def take_up(
    module: nn.Module, wrappers: Iterable[nn.Module], wanted: Mapping[str, ExpertPart] | None = None
) -> dict[nn.Parameter, nn.Parameter]:
    """Take up a module that :func:`leave` has left: as it lies, or with all of its experts, and of the wrappers around
    it all adapters, put together one parameter at a time. Collective over the ranks that share them.

    Args:
        module: the module; nothing happens to another one.
        wrappers: PEFT's wrappers of its parameters.
        wanted: name of a weight -> the part of it with which it stays as it lies; ``None``: it gets all experts.

    Returns:
        New parameter -> the part that it replaces. A part that is all experts stays the parameter that it is.
    """
    if not is_left(module):
        return {}
    handle, places = vars(module).pop(_LEFT)
    handle.remove()
    if places is None and wanted and all(part_of(getattr(module, name)) == part for name, part in wanted.items()):
        return {}
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    wrappers = list(wrappers)
    for holder, name in list(_held(module, wrappers)):
        left = getattr(holder, name)
        part = part_of(left)
        if part is None:
            continue
        for each in (module, *wrappers):
            if hasattr(each, "num_experts"):
                each.num_experts = part.num_experts
        if part.num_parts > 1 or places is not None:
            with gathered([left]):
                whole = nn.Parameter(join_parts(left, places), requires_grad=left.requires_grad)
            vars(whole).update(vars(left))
            strip(whole)
            setattr(holder, name, whole)
            replaced[whole] = left
        else:
            strip(left)
        if isinstance(holder, nn.Linear):
            holder.out_features, holder.in_features = getattr(holder, name).shape
    return replaced


def _held(module: nn.Module, wrappers: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """Return (module, name) of each parameter that is one of experts."""
    yield from ((module, name) for name in OWN_NAMES if name in module._parameters)
    for wrapper in wrappers:
        for of_adapters in (wrapper.lora_A, wrapper.lora_B):
            yield from ((linear, "weight") for linear in of_adapters.values())


def strip(parameter: nn.Parameter, keeps: Collection[str] = ()) -> None:
    """Take off a parameter what engines have put on it.

    Args:
        parameter: the parameter.
        keeps: names of attributes that stay.
    """
    for name, value in list(vars(parameter).items()):
        if name not in keeps and _is_put_on(name, value):
            delattr(parameter, name)


def _is_put_on(name: str, value: Any) -> bool:
    owner = getattr(getattr(value, "__func__", value), "__module__", None) or ""
    is_a_function = owner.startswith(("deepspeed.", "ds_fsmoe."))
    return is_a_function or name in OURS or name in _DEEPSPEEDS or name.startswith("ds_")


def _refuse(module: nn.Module, inputs: Any) -> None:
    raise LayerError(
        f"{type(module).__name__} has this rank's experts only and no engine any more: give the model to "
        "ds_fsmoe.initialize, or call ds_fsmoe.make_whole(model) on every rank"
    )
