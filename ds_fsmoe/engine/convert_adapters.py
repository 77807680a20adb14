# SPDX-License-Identifier: Apache-2.0
"""Takes over PEFT's adapters of experts: each rank keeps those of its own experts, beneath PEFT's own modules.

PEFT wraps the module of the experts once for each weight it adapts, and the wrappers lie around each other. Nothing of
PEFT is imported here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import nn

from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart
from ds_fsmoe.components.expert_compute.contract import Contract, shape_of
from ds_fsmoe.config.imported_later import Finder
from ds_fsmoe.distributed.partitioned import gather_module_by_module, gather_with, run_compiled
from ds_fsmoe.engine.cut_experts import cut_parameter
from ds_fsmoe.layer.experts_layer import FSMoEExperts, FSMoEParamWrapper, HuggingFaceLayer, loaded_part
from ds_fsmoe.layer.opaque import Handle
from ds_fsmoe.layer.parts import LayerError

_WRAPPER = ("peft.tuners.lora.layer", "ParamWrapper")
_OF_PEFT = {
    "BaseTunerLayer": "an adapter of another kind; use LoRA's target_parameters",
    "AuxiliaryTrainingWrapper": "a second copy of them; train the experts themselves, or use LoRA's target_parameters",
}


def wrappers_around(model: nn.Module, path: str) -> dict[str, nn.Module]:
    """Return path -> PEFT's wrappers of parameters around a module of experts, the outermost first.

    Args:
        model: the model.
        path: of the module of the experts.

    Raises:
        LayerError: PEFT has put something else around the experts, which could not be run by ranks; names it.
    """
    found: dict[str, nn.Module] = {}
    parent, _, own_name = path.rpartition(".")
    while parent:
        module = model.get_submodule(parent)
        if own_name == "base_layer" and _is_wrapper(module):
            found = {parent: module, **found}
        elif what := next((_OF_PEFT[each.__name__] for each in _peft_bases(module) if each.__name__ in _OF_PEFT), None):
            raise LayerError(f"{path}: PEFT has put a {type(module).__name__} around the experts, {what}")
        parent, _, own_name = parent.rpartition(".")
    return found


def with_wrappers(model: nn.Module, experts: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules of experts by path, or what PEFT has put around them, the outermost of each."""
    return {path: next(iter(wrappers_around(model, path).values()), module) for path, module in experts.items()}


def check_wrappers(wrappers: Mapping[str, nn.Module], contract: Contract, num_experts: int) -> None:
    """Refuse adapters of experts that could not be cut rightly.

    Args:
        wrappers: path -> a wrapper, around one module of experts.
        contract: of these experts.
        num_experts: the number of experts.

    Raises:
        LayerError: names the adapter and the reason.
    """
    for path, wrapper in wrappers.items():
        name = wrapper.parameter_name
        if name not in (contract.up, contract.down):
            raise LayerError(
                f"{path}: an adapter of {name} has one A for all experts, which cannot be cut; "
                f"target_parameters may have {contract.up} and {contract.down}"
            )
        known = {f"{kind}.{adapter}.weight" for kind in ("lora_A", "lora_B") for adapter in wrapper.lora_A}
        present = {each for each, _ in wrapper.named_parameters() if not each.startswith("base_layer.")}
        if present != known:
            raise LayerError(
                f"{path}: has parameters {', '.join(sorted(present ^ known))} other than A and B of plain LoRA, which "
                "is not supported for experts"
            )
        weight = shape_of(getattr(wrapper.get_base_layer(), name)) or ()
        size_in, size_out = weight[1:] if contract.is_transposed else weight[:0:-1]
        for adapter, a in wrapper.lora_A.items():
            rank = wrapper.r[adapter] * num_experts
            shapes = shape_of(a.weight), shape_of(wrapper.lora_B[adapter].weight)
            is_swapped = getattr(wrapper, "_did_swap_in_out_features", not contract.is_transposed)
            if shapes != ((rank, size_in), (size_out, rank)) or is_swapped == contract.is_transposed:
                raise LayerError(
                    f"{path}: A and B of adapter {adapter!r} are {list(shapes[0] or ())} and {list(shapes[1] or ())}: "
                    f"must be {[rank, size_in]} and {[size_out, rank]} for {name}, as a later peft makes them"
                )


def convert_wrappers(
    wrappers: Mapping[str, nn.Module], experts: FSMoEExperts, ep_rank: int
) -> dict[nn.Parameter, nn.Parameter]:
    """Make PEFT's wrappers ours, in place, with the adapters of this rank's experts only.

    Args:
        wrappers: path -> a wrapper, the outermost first; checked by :func:`check_wrappers`.
        experts: the module beneath, which is ours already.
        ep_rank: which of the ranks that share the experts this is.

    Returns:
        New parameter -> the one it replaces.
    """
    state, replaced = experts.fsmoe, {}
    for path, wrapper in wrappers.items():
        for modules, layout in ((wrapper.lora_A, "stacked"), (wrapper.lora_B, "innermost")):
            part = ExpertPart(layout, state.total_experts, state.ep_size, ep_rank)
            for linear in modules.values():
                whole = linear.weight
                mine = cut_parameter(whole, part, state.group_name)
                if mine is not whole:
                    linear.weight = mine
                    linear.out_features, linear.in_features = shape_of(mine)
                    replaced[mine] = whole
        wrapper.num_experts = experts.num_local_experts
        wrapper.__class__ = _ours(type(wrapper))
        wrapper.opaque = Handle(wrapper, path)
    state.outermost = tuple(wrappers.values())[:1]
    return replaced


def adapters_of(experts: FSMoEExperts) -> Iterator[nn.Parameter]:
    """Return the A and B of all adapters that a module of experts was converted with."""
    module = next(iter(experts.fsmoe.outermost), experts)
    while module is not experts:
        for of_adapters in (module.lora_A, module.lora_B):
            yield from of_adapters.parameters()
        module = module.base_layer


def gather_as_they_run(model: nn.Module, layers: Iterable[HuggingFaceLayer]) -> None:
    """Let ZeRO 3 gather what a layer needs for the calls of its experts.

    A and B are in modules that nobody calls, for which it has no hooks: they are gathered with the experts. So is what
    modules within the experts have, such as a norm behind them, which is called chunk by chunk.

    Args:
        model: the model.
        layers: the layers taken over.
    """
    experts = [each.deepspeed_moe for each in layers]
    gather_module_by_module(model, experts)
    run_compiled(model)
    for each in experts:
        within = [parameter for child in each.children() for parameter in child.parameters()]
        gather_with(each, [*adapters_of(each), *within])


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _ours(own_class: type[nn.Module]) -> type[nn.Module]:
    """Return the class of converted wrappers of a class: the same for all of them, under its name, which PEFT asks."""
    if own_class not in _classes:
        bases = FSMoEParamWrapper, own_class
        _classes[own_class] = type(own_class.__name__, bases, {"__module__": own_class.__module__})
    return _classes[own_class]


def _is_wrapper(module: nn.Module) -> bool:
    return any((each.__module__, each.__name__) == _WRAPPER for each in type(module).__mro__)


def _peft_bases(module: nn.Module) -> list[type]:
    return [each for each in type(module).__mro__ if each.__module__.partition(".")[0] == "peft"]


# ---- Lets PEFT make adapters for all experts of a model that was loaded with this rank's experts only
#
# Then each rank draws, or reads, the adapters of all experts, as one process does, and keeps those of its own when
# the model gets its engine: they are small beside the experts.


def adapt_all_experts() -> None:
    """Let PEFT count all experts where only some are, from now on, whether it is imported already or later."""
    _finder.begin()


def _change(module: ModuleType) -> None:
    wrapper = getattr(module, "ParamWrapper", None)
    theirs = getattr(wrapper, "_get_in_out_features", None)
    # A PEFT that does it another way makes adapters of another shape, which are refused by theirs.
    if theirs is None or hasattr(theirs, "__wrapped__"):
        return

    @functools.wraps(theirs)
    def sizes(self: Any, *args: Any, **options: Any) -> Any:
        found = theirs(self, *args, **options)
        part = loaded_part(self.get_base_layer())
        if part is not None:
            self.num_experts = part.num_experts
        return found

    wrapper._get_in_out_features = sizes


_finder = Finder("peft.tuners.lora.layer", _change)
