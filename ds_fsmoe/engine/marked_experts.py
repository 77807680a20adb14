# SPDX-License-Identifier: Apache-2.0
"""Marks the parameters of experts that are distributed over ranks, and checks loading and saving.

The engine calls it at the end of its construction. :mod:`~ds_fsmoe.layer.expert_shard` has the class of a marked
parameter. A state dict of a script holds marked tensors, too: reading them works, writing them is refused.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from deepspeed.utils import groups as stock_groups
from deepspeed.utils import safe_get_full_grad
from deepspeed.utils.bwc import bwc_pipeline_parallel_world_size, bwc_tensor_model_parallel_world_size
from torch import nn
from torch.nn.utils import clip_grad

from ds_fsmoe.checkpoint_files.expert_parts import part_of, parts_in
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.distributed.partitioned import gathered, is_shared_out
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.engine.shard_experts import adapters_of
from ds_fsmoe.layer.expert_shard import (
    METADATA,
    TRUSTED,
    ExpertShard,
    Origin,
    WholeOfParts,
    asking,
    gradient_of,
    mark,
    origin_of,
    tensors_in,
    unmark,
)
from ds_fsmoe.layer.experts_layer import FSMoEExperts, FSMoEParamWrapper
from ds_fsmoe.layer.parts import LayerError

# ---- Gives scripts whole weights of experts: within ``deepspeed.zero.GatheredParameters``, in a loss, and one
# by one
#
# Within that context an expert weight has all experts on every rank, at every ZeRO stage, and what ``modifier_rank``
# has changed reaches the experts of all ranks, as with a model that is not spread. DeepSpeed and this package, which
# gather for their own purposes, get this rank's part.


class GatheredWeight(nn.Parameter):
    """Represents a parameter of experts while it is whole; a loss on it has the gradient of this rank's part."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            name = func.__name__
            is_told = name in ("__get__", "__set__") or name.strip("_") in METADATA
            if not is_told and not name.startswith("register_") and torch.is_grad_enabled() and name != "detach":
                args, kwargs = _with_gradients(args), _with_gradients(kwargs or {})
            return func(*args, **(kwargs or {}))


def _with_gradients(value: Any) -> Any:
    if isinstance(value, GatheredWeight) and value.requires_grad:
        origin = value.fsmoe_origin
        return WholeOfParts.apply(value, value.data, origin.take, origin.group)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_with_gradients, value))
    return {name: _with_gradients(each) for name, each in value.items()} if isinstance(value, dict) else value


@contextmanager
def _gathering(parameters: Sequence[ExpertShard], modifier_rank: int | None) -> Iterator[None]:
    """Gather marked parameters inside the block. Collective to enter and to leave.

    Args:
        parameters: marked parameters, in an order that is the same on every rank.
        modifier_rank: the rank, among those that have the model, whose changes count; ``None``: each keeps its own.
    """
    shared = [each for each in parameters if is_shared_out(each)]
    # Its broadcast is among ranks that have the same experts, whose parts are alike by then.
    with GatheredParameters(shared, None if modifier_rank is None else 0) if shared else nullcontext():
        before = [each.data for each in parameters]
        for each in parameters:
            each.data = each.fsmoe_origin.whole(each)
            each.__class__ = GatheredWeight
        has_failed = True  # then other ranks may not come here
        try:
            with _own_parts_in_calls():
                yield
            has_failed = False
        finally:
            for each, own in zip(parameters, before, strict=True):
                each.__class__ = ExpertShard
                if not has_failed:
                    _take_changes(each, own, modifier_rank)
                each.data = own


@contextmanager
def _own_parts_in_calls() -> Iterator[None]:
    """Replace whole weights by this rank's part, changes included, while a layer is called, as TRL does to generate."""
    whole: dict[nn.Module, list[tuple[GatheredWeight, torch.Tensor]]] = {}

    def begin(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, (FSMoEExperts, FSMoEParamWrapper)):  # within a wrapper none is left to its experts
            whole[module] = [(each, each.data) for each in module.parameters() if isinstance(each, GatheredWeight)]
            for each, data in whole[module]:
                each.__class__, each.data = ExpertShard, each.fsmoe_origin.take(data)

    def end(module: nn.Module, inputs: Any, output: Any) -> None:
        for each, data in whole.pop(module, ()):
            each.__class__, each.data = GatheredWeight, data

    hooks = (
        nn.modules.module.register_module_forward_pre_hook(begin),
        nn.modules.module.register_module_forward_hook(end, always_call=True),
    )
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


@torch.no_grad()
def _take_changes(parameter: ExpertShard, own: torch.Tensor, modifier_rank: int | None) -> None:
    """Copy changes into this rank's part; at ZeRO 3 without a modifier rank changes are ignored, as DeepSpeed does."""
    if modifier_rank is None and is_shared_out(parameter):
        return
    if modifier_rank is not None:
        group = stock_groups._get_sequence_data_parallel_group()
        whole = parameter.data.contiguous()
        with waiting("a change within GatheredParameters of", parameter.fsmoe_origin.name):
            dist.broadcast(whole, dist.get_global_rank(group, modifier_rank), group=group)
        parameter.data = whole
    own.copy_(parameter.fsmoe_origin.take(parameter.data))


def gather_experts_whole() -> None:
    """Make ``GatheredParameters`` return whole experts, from now on in this process. A second call changes nothing."""
    if hasattr(GatheredParameters, "_ds_fsmoe_gathering"):
        return
    begin, enter, leave = (getattr(GatheredParameters, each) for each in ("__init__", "__enter__", "__exit__"))

    def __init__(
        self: Any, params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
    ) -> None:
        self._ds_fsmoe_gathering = None
        if enabled and asking() not in TRUSTED:
            params = [params] if isinstance(params, torch.Tensor) or not isinstance(params, Iterable) else list(params)
            experts = {id(each): each for each in params if isinstance(each, ExpertShard)}
            if experts:
                params = [each for each in params if id(each) not in experts]
                in_order = sorted(experts.values(), key=lambda each: each.fsmoe_origin.name)
                self._ds_fsmoe_gathering = in_order, modifier_rank
        begin(self, params, modifier_rank, fwd_module, enabled)

    def __enter__(self: Any) -> Any:
        found = enter(self)
        if self._ds_fsmoe_gathering is not None:
            self._ds_fsmoe_experts = _gathering(*self._ds_fsmoe_gathering)
            self._ds_fsmoe_experts.__enter__()
        return found

    def __exit__(self: Any, *error: Any) -> Any:
        if self._ds_fsmoe_gathering is not None:
            self._ds_fsmoe_experts.__exit__(*(error or (None, None, None)))
        return leave(self, *error)

    GatheredParameters._ds_fsmoe_gathering = None
    GatheredParameters.__init__, GatheredParameters.__enter__ = __init__, __enter__
    GatheredParameters.__exit__ = __exit__


def whole_weight(parameter: torch.Tensor) -> torch.Tensor:
    """Return a weight with all experts, for a loss on weights; its gradient reaches the experts of every rank.

    Collective over the ranks that share the experts, in the backward too.

    Args:
        parameter: a parameter of ``engine.module``.

    Returns:
        The weight, [E, ...], with a gradient. A parameter that is not spread over ranks is returned as it is.

    Raises:
        LayerError: ZeRO 3 has partitioned it.

    Examples:
        >>> import torch, ds_fsmoe
        >>> ds_fsmoe.whole_weight(torch.nn.Parameter(torch.ones(4, 2))).sum().item()
        8.0
    """
    origin = origin_of(parameter)
    if origin is None:
        return parameter
    if is_shared_out(parameter):
        raise LayerError(
            f"whole_weight: ZeRO 3 has partitioned {origin.name}; compute the loss inside "
            "deepspeed.zero.GatheredParameters(parameter), where it has all experts and a gradient"
        )
    return WholeOfParts.apply(parameter, origin.whole(parameter), origin.take, origin.group)


def whole_parameters(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return an iterator over a model's whole parameters, on every rank: (name, tensor), one at a time.

    Every rank has to iterate over all of them, since each weight is gathered from all ranks when it is due. A tensor
    yielded earlier may be released then: copy it to keep it.

    Args:
        engine: the engine that ``initialize`` has returned, ours or DeepSpeed's.

    Yields:
        The name of a parameter and the whole tensor, [E, ...] for experts.

    Examples:
        >>> import torch, ds_fsmoe
        >>> model = ds_fsmoe.MoE(8, torch.nn.Linear(8, 8), num_experts=4, k=2)
        >>> ds_config = {"train_micro_batch_size_per_gpu": 2, "fsmoe": {"enabled": True, "ops": "reference"}}
        >>> ds_config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
        >>> engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
        >>> shapes = {name: each.shape for name, each in ds_fsmoe.whole_parameters(engine)}
        >>> shapes["deepspeed_moe.gate.wg.weight"]  # [E, M]
        torch.Size([4, 8])
    """
    for name, each in engine.module.named_parameters():
        origin = origin_of(each)
        with gathered([each]):
            yield name, each.detach() if origin is None else origin.whole(each)


# ---- Marks the parameters of experts that an engine has spread over ranks, and guards what is loaded and saved


WHOLE = (
    "call state_dict = ds_fsmoe.whole_state_dict(engine) on every rank (rank 0 gets it), or "
    "engine.save_16bit_model(folder)"
)


def mark_experts(model: nn.Module) -> Callable[[], None]:
    """Mark the experts of an engine's model; return the function that removes the marks, once.

    Args:
        model: the model, whose experts are already distributed.
    """
    spread = [found for found in parts_in(model) if found[2].num_parts > 1]
    parameters = [parameter for _, parameter, _ in spread]
    # The object with a gradient's shape is made again if it was released, and a parameter may be whole then.
    with torch.enable_grad():  # a script may begin with inference
        accumulators = [
            each.view_as(each).grad_fn.next_functions[0][0]
            for each in parameters
            if each.requires_grad and not is_shared_out(each)
        ]
    experts = [each for each in model.modules() if isinstance(each, FSMoEExperts)]
    owners = {id(own): each for each in experts for own in (*each.parameters(), *adapters_of(each))}
    for name, parameter, part in spread:
        state, group = owners[id(parameter)].fsmoe, stock_groups._get_expert_parallel_group(parameter.group_name)
        mark(parameter, Origin(name, part, group, state.places))
    # Without ZeRO DeepSpeed's safe_get_full_grad would take the plain gradient; so it asks for what it calls this.
    asked = [each for each in parameters if not hasattr(each, "_hp_mapping") and not is_shared_out(each)]
    for each in asked:
        each._hp_grad, each.get_full_hp_grad = True, functools.partial(gradient_of, each)
    handles = [handle for each in model.modules() for handle in _guard(each)]
    if spread:
        gather_experts_whole()
        _refuse_to_save_parts()

    def take_off() -> None:
        for each in asked:
            del each._hp_grad, each.get_full_hp_grad
        for each in parameters:
            unmark(each)
        for each in handles:
            each.remove()
        accumulators.clear()

    return take_off


def refuse_hooks(path: str, module: nn.Module) -> None:
    """Refuse experts with gradient hooks, which expect the gradient of all experts.

    Args:
        path: the path of the experts module, or of a module around it.
        module: the module at this path.

    Raises:
        LayerError: names the parameter and the remedy.
    """
    if hooked := hooks_on(module):
        raise LayerError(
            f"{path}.{hooked[0]} has gradient hooks (register_hook or register_post_accumulate_grad_hook), which "
            "ds_fsmoe cannot keep: each rank will have the gradient of its own experts only. Register them after "
            "initialize() (ds_fsmoe.own_experts_of(parameter) returns the experts of this rank), or set "
            "fsmoe.ep_size = 1"
        )


def hooks_on(module: nn.Module) -> list[str]:
    """Return the names of parameters that have gradient hooks."""
    kinds = "_backward_hooks", "_post_accumulate_grad_hooks"
    return [name for name, each in module.named_parameters() if any(getattr(each, kind, None) for kind in kinds)]


def refuse_parts(name: str) -> None:
    """Refuse to return this rank's experts to a script that expects all of them.

    Args:
        name: the name of a parameter.

    Raises:
        CheckpointError: names the function to call instead.
    """
    raise CheckpointError(
        f"ds_fsmoe has distributed {name} over ranks, and this rank has its own experts only: {WHOLE}"
    )


def _guard(module: nn.Module) -> Iterator[Any]:
    """Make a module with marked parameters load this rank's part of whole weights."""
    own = {name: each for name, each in module.named_parameters(recurse=False) if isinstance(each, ExpertShard)}
    if not own:
        return

    def before_load(_: nn.Module, state_dict: dict[str, Any], prefix: str, *__: Any) -> None:
        for name, parameter in own.items():
            given = state_dict.get(prefix + name)
            is_gone = is_shared_out(parameter) and not parameter.numel()
            if not isinstance(given, torch.Tensor) or not isinstance(parameter, ExpertShard) or is_gone:
                continue
            origin = parameter.fsmoe_origin
            if tuple(given.shape) == origin.part.whole_shape(parameter.shape):
                state_dict[prefix + name] = origin.take(given)

    yield module.register_load_state_dict_pre_hook(before_load)


def _refuse_to_save_parts() -> None:
    """Replace ``torch.save`` in this process by one that raises before it opens a file if an object holds only parts
    of experts. DeepSpeed and this package may save such objects."""
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


def check_whole(given: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse to write weights that are only this rank's part.

    Args:
        given: name -> tensor.
        model: the model of these weights.

    Raises:
        CheckpointError: names the first one.
    """
    for name, parameter, part in parts_in(model):
        found = given.get(name)
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if isinstance(found, torch.Tensor) and part.num_parts > 1 and tuple(found.shape) != part.whole_shape(shape):
            raise CheckpointError(
                f"save_pretrained: {name} in the given state dict is {list(found.shape)}, and the model's is "
                f"{list(part.whole_shape(shape))}: ds_fsmoe has distributed it over ranks: {WHOLE}"
            )


# ---- Computes norms of gradients for scripts that clip by themselves: experts of all ranks count, whoever
# computes
#
# Without ZeRO a script may call torch's ``clip_grad_norm_`` between backward and step. Each rank would find a norm of
# its own there, of its own experts, and would scale dense gradients by another factor than the others.


_engines: weakref.WeakSet[Any] = weakref.WeakSet()
"""Those whose gradients torch's norms are to know."""
_torchs_norm: Callable[..., torch.Tensor]
"""The function that ours has replaced, once there is an engine."""


def count_all_experts(engine: Any) -> None:
    """Make torch's ``clip_grad_norm_`` and ``get_total_norm`` include the experts of all ranks.

    Args:
        engine: our engine; with ZeRO nothing is changed, as parameters have no gradients there for a script to clip.
    """
    global _torchs_norm
    if engine.zero_optimization() or _has_other_parts(engine):
        return
    _engines.add(engine)
    # ``clip_grad_norm_`` looks it up here at every call, so what a script has imported before is right, too.
    if clip_grad._get_total_norm is not _total_norm:
        _torchs_norm = clip_grad._get_total_norm
        clip_grad._get_total_norm = nn.utils.get_total_norm = _total_norm


def gradient_norm(engine: Any, norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all gradients, each counted once, between backward and step; collective over all ranks.

    It replaces a sum over ``engine.module.parameters()``, which has the experts of one rank. At ZeRO 1 to 3 gradients
    are gathered for it, one by one; ``engine.get_global_grad_norm()`` returns the norm of the last step without any
    cost.

    Args:
        engine: the engine that ``initialize`` has returned, with the block enabled or not.
        norm_type: the order of the norm, as in ``torch.nn.utils.get_total_norm``; ``float("inf")`` is the largest
            element.

    Returns:
        A scalar, the same on all ranks. In fp16 it includes DeepSpeed's loss scale, as gradients do.

    Raises:
        ValueError: the engine has pipeline stages or tensor-parallel ranks.

    Examples:
        >>> import torch, ds_fsmoe
        >>> model = ds_fsmoe.MoE(8, torch.nn.Linear(8, 8), num_experts=4, k=2)
        >>> ds_config = {"train_micro_batch_size_per_gpu": 2, "fsmoe": {"enabled": True, "ops": "reference"}}
        >>> ds_config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
        >>> engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
        >>> engine.backward(engine(torch.randn(2, 3, 8))[0].square().mean())
        >>> norm = ds_fsmoe.gradient_norm(engine)
        >>> torch.nn.utils.clip_grads_with_norm_(engine.module.parameters(), 1.0, norm)  # without ZeRO
    """
    if _has_other_parts(engine):
        raise ValueError(
            "ds_fsmoe.gradient_norm: not supported with pipeline stages or tensor-parallel ranks; "
            "engine.get_global_grad_norm() returns the norm of the last step"
        )
    norms, own = [], {}
    for parameter in engine.module.parameters():
        gradient = safe_get_full_grad(parameter)
        if gradient is None:
            continue
        # With ZeRO that of experts of a Hugging Face model has been put together.
        group = _ranks_of(parameter)
        if group is not None and (part_of(parameter) is None or not engine.zero_optimization()):
            own[len(norms)] = group
        norms.append(torch.linalg.vector_norm(gradient.detach(), norm_type, dtype=torch.float32))
    _combine(norms, own, norm_type)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())


def _has_other_parts(engine: Any) -> bool:
    mpu = engine.mpu
    return mpu is not None and max(bwc_tensor_model_parallel_world_size(mpu), bwc_pipeline_parallel_world_size(mpu)) > 1


def _ranks_of(parameter: nn.Parameter) -> dist.ProcessGroup | None:
    """Return the process group over which experts are distributed; ``None`` for other parameters."""
    group = stock_groups._get_expert_parallel_group(parameter.group_name) if is_moe_param(parameter) else None
    return group if group is not None and group.size() > 1 else None


@torch.no_grad()
def _total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Compute torch's total norm, with the norm over all ranks for each gradient of experts.

    The norm of all norms is the total norm. Collective, if gradients of experts are among the tensors.
    """
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    experts = {
        id(each.grad): group
        for engine in _engines
        for each in engine.module.parameters()
        if each.grad is not None and (group := _ranks_of(each)) is not None
    }
    own: dict[int, dist.ProcessGroup] = {}
    for at, each in enumerate(tensors):
        # What a script gets from a marked parameter says itself what it is.
        origin = origin_of(each)
        if origin is not None or id(each) in experts:
            own[at] = experts[id(each)] if origin is None else origin.group
    norms = {at: torch.linalg.vector_norm(tensors[at], norm_type, dtype=torch.float32) for at in own}
    _combine(norms, own, norm_type)
    found = [norms[at].to(each.dtype) if at in norms else each for at, each in enumerate(tensors)]
    return _torchs_norm(found, norm_type, error_if_nonfinite, foreach)


def _combine(norms: Any, own: Mapping[int, dist.ProcessGroup], norm_type: float) -> None:
    """Replace the norms of this rank's experts by those of all ranks, in place. Collective.

    Args:
        norms: number -> norm.
        own: number -> the process group of the other experts, in the same order on all ranks.
        norm_type: the order of the norm.
    """
    numbers: dict[dist.ProcessGroup, list[int]] = defaultdict(list)
    for number, group in own.items():
        numbers[group].append(number)
    # A rank is in one group of each size, so all ranks have the same order.
    for group in sorted(numbers, key=dist.ProcessGroup.size):
        of_rank = torch.stack([norms[each] for each in numbers[group]])
        of_ranks = [torch.empty_like(of_rank) for _ in range(group.size())]
        with waiting("the norm of gradients of a script"):
            dist.all_gather(of_ranks, of_rank, group=group)
        whole = torch.linalg.vector_norm(torch.stack(of_ranks), norm_type, dim=0)
        for number, norm in zip(numbers[group], whole, strict=True):
            norms[number] = norm
