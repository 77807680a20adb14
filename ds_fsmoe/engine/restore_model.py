# SPDX-License-Identifier: Apache-2.0
"""Restores a model when its engine has ended: whole for a script, distributed for the next engine.

Scripts call :func:`make_whole`; the entry points call :func:`take_back` before they make the next engine. It undoes the
changes of ``convert_layers`` and ``convert_experts``.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups as stock_groups
from torch import nn

from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart, part_of
from ds_fsmoe.components.expert_compute.contract import OWN_NAMES
from ds_fsmoe.config.reading import BLOCK
from ds_fsmoe.distributed.partitioned import gathered, is_shared_out
from ds_fsmoe.engine.convert_layers import check_left, restore_stock
from ds_fsmoe.engine.shard_experts import wrappers_around
from ds_fsmoe.layer.expert_shard import Origin
from ds_fsmoe.layer.experts_layer import (
    FSMoEExperts,
    is_left,
    leave_alone,
    let_run,
    loaded_in,
    own_class_of,
    replace_all,
)
from ds_fsmoe.layer.parts import LayerError
from ds_fsmoe.layer.runtime import LayerRuntime
from ds_fsmoe.layer.stock_layer import FSMoEGate, FSMoELayer, StockMoE

_HOOKS = "module_forward_pre_hook", "module_forward_post_hook"
"""The hooks that DeepSpeed's engine puts on its model, and leaves there."""
_USES = (
    *("forward", "backward", "step", "train_batch", "eval_batch"),
    *("save_checkpoint", "load_checkpoint", "save_16bit_model"),
)
"""The methods that refuse once an engine has lost its model."""
_OF_STAGE_3 = (
    *("_external_params", "_original_parameters", "all_parameters", "applied_pre_backward_ref_cnt"),
    *("post_bwd_fn", "pre_bwd_fn"),
)
"""Attributes of modules that DeepSpeed puts there at ZeRO 3, besides those that begin with ``ds_``."""


def make_whole(model: nn.Module) -> nn.Module:
    """Make a model whole again on every rank when its engine has ended: plain modules with all experts, trained, and
    plain parameters at every stage of ZeRO. Collective over all ranks.

    Experts are gathered weight by weight, so memory never holds a second copy of the model. Afterwards the model has no
    attributes of ours or of the engine: one rank alone runs, saves, copies and pickles it, and ``initialize`` accepts
    it again. Weights of experts are [E, ...] again, and new objects where ranks had parts of them.

    Args:
        model: the model that was given to ``initialize``, or its engine, after ``engine.destroy()``. A model that is
            already whole is unchanged.

    Returns:
        The model itself.

    Raises:
        RuntimeError: its engine has not ended; raised on every rank.
        LayerError: it has experts that cannot be gathered: sharded or moved ones of a ``deepspeed.moe.layer.MoE``, or
            those of a model that was loaded by parts and has had no engine.

    Examples:
        >>> import torch, ds_fsmoe
        >>> model = ds_fsmoe.MoE(8, torch.nn.Linear(8, 8), num_experts=4, k=2)
        >>> ds_config = {"train_micro_batch_size_per_gpu": 2, "fsmoe": {"enabled": True, "ops": "reference"}}
        >>> ds_config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
        >>> engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
        >>> engine.destroy()
        >>> model = ds_fsmoe.make_whole(model)
        >>> type(model.deepspeed_moe)  # stock's layer again
        <class 'deepspeed.moe.sharded_moe.MOELayer'>
    """
    if isinstance(model, DeepSpeedEngine):
        model = model.module
    for name, _, part in loaded_in(model):
        raise LayerError(
            f"make_whole: {name} was loaded with {part.num_local} of {part.num_experts} experts and has had no engine: "
            'load it within ds_fsmoe.own_experts({"fsmoe": {"enabled": False}})'
        )
    runtimes = _runtimes(model)
    if _alive(runtimes):
        raise RuntimeError(
            "make_whole: the engine of this model is still active: call engine.destroy() on every rank first, or "
            "use ds_fsmoe.whole_state_dict(engine) for the weights"
        )
    stock = _stock_layers(model)
    check_left(stock)
    _take_off(model, runtimes, "was made whole by ds_fsmoe.make_whole(): call the model itself")
    unshare(model)
    for name, experts in _experts_in(model):
        wrappers = wrappers_around(model, name)
        replace_all(take_up(experts, wrappers.values()), *next(iter(wrappers.items()), (name, experts)))
    for layer in stock.values():
        if isinstance(layer.deepspeed_moe.gate, FSMoEGate):  # with a gate of ours it runs on as ours
            restore_stock(layer)
    # What an engine has put on parameters is taken off, and they out of the buffers where it had them side by side.
    for parameter in model.parameters():
        # By these DeepSpeed knows the experts of its own layers.
        strip(parameter, keeps=("allreduce", "group_name"))
        if parameter.untyped_storage().nbytes() != parameter.numel() * parameter.element_size():
            parameter.data = parameter.data.clone()
    return model


def take_back(model: nn.Module, ds_config: Mapping[str, Any], is_enabled: bool) -> None:
    """Release a model from its earlier engine, so that another one can use it. Collective if there was an engine.

    An engine that has not ended is destroyed. Experts stay distributed as they are.

    Args:
        model: the model.
        ds_config: the config of the next engine.
        is_enabled: True if the next engine is ours.

    Raises:
        LayerError: the next engine cannot use the model as it is distributed; names the function to call first.
    """
    runtimes = _runtimes(model)
    stock = _stock_layers(model)
    for name, experts in () if is_enabled else _experts_in(model):
        if part_of(experts.down_proj).num_parts > 1:
            raise LayerError(
                f"{name} has this rank's experts only (from an earlier engine of ds_fsmoe), and {BLOCK}.enabled = "
                "false needs all of them: call engine.destroy() and ds_fsmoe.make_whole(model) on every rank "
                "first, and pass the model's new parameters to initialize()"
            )
    alive = _alive(runtimes)
    for engine in alive:
        if engine.fsmoe.placement is not None:
            engine.fsmoe.placement.restore_model_order()
    check_left(stock, is_enabled)
    for engine in alive:
        engine.destroy()
    _take_off(model, runtimes, "was given to another engine by ds_fsmoe.initialize(): use that one")
    if (runtimes or _experts_in(model)) and (ds_config.get("zero_optimization") or {}).get("stage", 0) != 3:
        unshare(model)
    for name, experts in () if is_enabled else _experts_in(model):
        take_up(experts, wrappers_around(model, name).values())
    for layer in (each for each in model.modules() if isinstance(each, StockMoE)) if is_enabled else stock.values():
        # DeepSpeed refuses to give a layer another group.
        for holder in (layer.deepspeed_moe, layer.deepspeed_moe.gate):
            if hasattr(holder, "ep_group"):
                holder.ep_group = None


def refuse_while_shared_out(model: nn.Module, running: LayerRuntime) -> None:
    """Make a model that lost its ZeRO 3 engine raise when it is called while its parameters are partitioned.

    Args:
        model: the model, of any stage.
        running: the runtime that its layers share.
    """
    if not any(map(is_shared_out, model.parameters())):
        return

    def refuse(module: nn.Module, inputs: Any) -> None:
        if any(is_shared_out(each) and each.numel() != each.ds_numel for each in module.parameters()):
            raise LayerError(
                f"{type(module).__name__}: its engine was destroyed, and each rank has a ZeRO 3 partition of every "
                "parameter: call ds_fsmoe.make_whole(model) on every rank first"
            )

    running.put_on_model.append(model.register_forward_pre_hook(refuse, prepend=True).remove)


def unshare(model: nn.Module) -> None:
    """Replace ZeRO 3 partitions by plain parameters, in place, one at a time. Collective over the ranks that share
    them.

    A part of the experts stays a part.

    Args:
        model: a model without an engine.
    """
    for parameter in filter(is_shared_out, model.parameters()):
        with gathered([parameter]):
            whole = parameter.data.clone()
        strip(parameter, keeps=OURS)
        parameter.data = whole
    for module in model.modules():
        if hasattr(module, "_original_parameters"):  # a container of DeepSpeed's is in their place
            module._parameters = type(nn.Module()._parameters)(module._parameters)
        for name in [each for each in vars(module) if each in _OF_STAGE_3 or each.startswith("ds_")]:
            delattr(module, name)


def _runtimes(model: nn.Module) -> list[LayerRuntime]:
    """Return the runtimes that a model's engines, ended ones included, have attached to its layers."""
    inner = (each for each in model.modules() if isinstance(each, (FSMoEExperts, FSMoELayer)))
    return list({id(each.fsmoe.running): each.fsmoe.running for each in inner if each.fsmoe.running}.values())


def _alive(runtimes: Iterable[LayerRuntime]) -> list[Any]:
    """Return the engines that have not ended; for an engine that was never complete, only its layers are released."""
    engines = [each.engine() for each in runtimes if not each.is_over]
    return [each for each in engines if each is not None and "fsmoe" in vars(each)]


def _experts_in(model: nn.Module) -> list[tuple[str, Any]]:
    """Return (name, module) of the experts that have, or had, an engine of ours."""
    return [(name, each) for name, each in model.named_modules() if isinstance(each, FSMoEExperts) or is_left(each)]


def _stock_layers(model: nn.Module) -> dict[str, StockMoE]:
    """Return name -> layer of DeepSpeed's kind that has, or had, an engine of ours."""
    named = ((name, each) for name, each in model.named_modules() if isinstance(each, StockMoE))
    return {
        name: each
        for name, each in named
        if isinstance(each.deepspeed_moe, FSMoELayer) and each.deepspeed_moe.fsmoe.running is not None
    }


def _take_off(model: nn.Module, runtimes: Iterable[LayerRuntime], why: str) -> None:
    """Remove all hooks of ds_fsmoe from a model; its experts stay distributed. Later uses of its engine raise the
    reason."""

    def refuse(*args: Any, **options: Any) -> NoReturn:
        raise RuntimeError(f"this engine no longer has a model, which {why}")

    for running in runtimes:
        if not running.is_over:
            running.close()
        while running.put_on_model:
            running.put_on_model.pop()()
        engine = running.engine()
        for name in _HOOKS if engine is not None else ():
            if (hook := vars(engine).get(name)) is not None:  # through it the model would hold the engine
                hook.remove()
                setattr(engine, name, None)
        for name in _USES if engine is not None else ():
            setattr(engine, name, refuse)
    for _, experts in _experts_in(model):
        if not is_left(experts):
            leave_experts(experts)


# ---- Turns modules of experts back: to their own class, as they lie, when their engine has ended; and to all
# experts
#
# What an engine leaves is a module of its own class with this rank's experts, each parameter with the description of
# its part. The next engine takes that as it is, where it is to have the same part.


_DEEPSPEEDS = (
    *("_dp_group", "_hp_mapping", "_index_in_param_group", "_z3_optimizer", "grad_accum", "is_external_param"),
    *("nvme_swapper", "param_idx_in_group"),
)
"""The attributes of parameters that are DeepSpeed's engines', besides functions of its and those that begin with
``ds_``."""
OURS = ("allreduce", "group_name", "fsmoe_part")
"""The attributes of a parameter of experts that are ours, besides those that DeepSpeed gives to all."""


def leave_experts(module: FSMoEExperts) -> None:
    """Remove our attributes from a converted module and from PEFT's wrappers around it; its experts stay distributed.

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
    leave_alone(module, places=state.places())


def take_up(
    module: nn.Module, wrappers: Iterable[nn.Module], wanted: Mapping[str, ExpertPart] | None = None
) -> dict[nn.Parameter, nn.Parameter]:
    """Prepare a module that :func:`leave_experts` has left, and its wrappers, for the next engine.

    Its experts and adapters stay distributed, or are gathered one parameter at a time. Collective over the ranks that
    share them.

    Args:
        module: the module; any other module is unchanged.
        wrappers: PEFT's wrappers of its parameters.
        wanted: name of a weight -> the part of it with which it stays distributed; ``None``: it gets all experts.

    Returns:
        New parameter -> the part that it replaces. A part that has all experts stays the same parameter.
    """
    if not is_left(module):
        return {}
    places = let_run(module)
    if places is None and wanted and all(part_of(getattr(module, name)) == part for name, part in wanted.items()):
        return {}
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    wrappers = list(wrappers)
    for holder, name in list(_expert_parameters(module, wrappers)):
        left = getattr(holder, name)
        part = part_of(left)
        if part is None:
            continue
        for each in (module, *wrappers):
            if hasattr(each, "num_experts"):
                each.num_experts = part.num_experts
        if part.num_parts > 1 or places is not None:
            origin = Origin(name, part, stock_groups._get_expert_parallel_group(left.group_name), lambda: places)
            with gathered([left]):
                whole = nn.Parameter(origin.whole(left), requires_grad=left.requires_grad)
            vars(whole).update(vars(left))
            strip(whole)
            setattr(holder, name, whole)
            replaced[whole] = left
        else:
            strip(left)
        if isinstance(holder, nn.Linear):
            holder.out_features, holder.in_features = getattr(holder, name).shape
    return replaced


def _expert_parameters(module: nn.Module, wrappers: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """Return (module, name) of each parameter of experts."""
    yield from ((module, name) for name in OWN_NAMES if name in module._parameters)
    for wrapper in wrappers:
        for of_adapters in (wrapper.lora_A, wrapper.lora_B):
            yield from ((linear, "weight") for linear in of_adapters.values())


def strip(parameter: nn.Parameter, keeps: Collection[str] = ()) -> None:
    """Remove the attributes that engines have attached to a parameter.

    Args:
        parameter: the parameter.
        keeps: names of attributes to keep.
    """
    for name, value in list(vars(parameter).items()):
        owner = getattr(getattr(value, "__func__", value), "__module__", None) or ""
        is_known = name in (*OURS, *_DEEPSPEEDS) or name.startswith("ds_")
        if name not in keeps and (is_known or owner.startswith(("deepspeed.", "ds_fsmoe."))):
            delattr(parameter, name)


# ---- Lets an engine go that a script drops without ending it, with its model, its threads and its files


_RELEASED = "_PartitionedParameterCoordinator__params_to_release"


def free_when_dropped(optimizer: Any) -> None:
    """Release DeepSpeed's optimizer from outside references, and the engine with it.

    Args:
        optimizer: DeepSpeed's optimizer of any kind, or its placeholder where nothing is optimized.
    """
    _hold_hooks(optimizer)
    offload = getattr(optimizer, "parameter_offload", optimizer)
    if hasattr(offload, "get_param_coordinator"):
        _remember_by_itself(offload.get_param_coordinator())
        _stand_weakly(sys.modules[type(offload).__module__].FWD_MODULE_STACK, offload.module)


def forget_graph(layer: Any) -> None:
    """Release the graph of a layer's loss after the step, and the engine that the graph refers to."""
    if (loss := getattr(layer, "l_aux", None)) is not None:
        layer.l_aux = loss.detach()


def _hold_hooks(optimizer: Any) -> None:
    """Make the optimizer own its gradient hooks, so that parameters refer to them weakly.

    Python's garbage collector cannot see the hooks of a parameter. A hook of DeepSpeed refers to its optimizer, which
    refers to the parameters: the collector would never release them.
    """
    kept: list[Callable[..., Any]] = []
    for handle in getattr(optimizer, "_grad_acc_hooks", ()):
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            kept.append(hooks[handle.id])
            hooks[handle.id] = _weakly(hooks[handle.id])
    if kept:
        optimizer.fsmoe_hooks = kept


def _remember_by_itself(coordinator: Any) -> None:
    """Make ZeRO 3 record released parameters in its coordinator, not for the whole process."""
    parts = [each.cell_contents for each in getattr(type(coordinator), _RELEASED).__closure__ or ()]
    cached = next((each for each in parts if hasattr(each, "cache_clear")), None)
    if cached is not None:
        own = functools.partial(cached.__wrapped__, coordinator)
        setattr(coordinator, _RELEASED, functools.lru_cache(maxsize=None)(own))


def _stand_weakly(stack: list[Any], model: Any) -> None:
    """Keep only a weak reference to the model at the bottom of ZeRO 3's stack of running modules."""

    def leave(dead: Any) -> None:
        stack[:] = [each for each in stack if each is not dead]

    stack[:] = [weakref.proxy(model, leave) if each is model else each for each in stack]


def _weakly(hook: Callable[..., Any]) -> Callable[..., Any]:
    known = weakref.ref(hook)

    @functools.wraps(hook, updated=())
    def call(*args: Any) -> Any:
        found = known()
        return None if found is None else found(*args)

    del call.__wrapped__
    return call
