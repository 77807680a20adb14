# SPDX-License-Identifier: Apache-2.0
"""Gives scripts whole weights of experts: within ``deepspeed.zero.GatheredParameters``, in a loss, and one by one.

Within that context an expert weight has all experts on every rank, at every ZeRO stage, and what ``modifier_rank`` has
changed reaches the experts of all ranks, as with a model that is not spread. DeepSpeed and this package, which gather
for their own purposes, get this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from deepspeed.utils import groups as stock_groups
from torch import nn

from ds_fsmoe.distributed.partitioned import gathered, is_shared_out
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.layer.expert_shard import TRUSTED, ExpertShard, asking, origin_of
from ds_fsmoe.layer.over_ranks import WholeOfParts
from ds_fsmoe.layer.parts import LayerError
from ds_fsmoe.layer.shard_functions import METADATA


class WholeExperts(nn.Parameter):
    """Stands for a parameter of experts while it is whole. A loss on it has the gradient of this rank's part."""

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
    if isinstance(value, WholeExperts) and value.requires_grad:
        origin = value.fsmoe_origin
        return WholeOfParts.apply(value, value.data, origin.cut, origin.group)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_with_gradients, value))
    return {name: _with_gradients(each) for name, each in value.items()} if isinstance(value, dict) else value


class _Gathering:
    """Has marked parameters whole for a while. Collective to enter and to leave.

    Args:
        parameters: marked ones, in an order that is the same on every rank.
        modifier_rank: the rank, among those that have the model, whose changes count; ``None``: each keeps its own.
    """

    def __init__(self, parameters: Sequence[ExpertShard], modifier_rank: int | None) -> None:
        self._parameters, self._modifier = parameters, modifier_rank
        self._own: list[torch.Tensor] = []
        shared = [each for each in parameters if is_shared_out(each)]
        # Its broadcast is among ranks that have the same experts, whose parts are alike by then.
        self._of_zero = GatheredParameters(shared, None if modifier_rank is None else 0) if shared else nullcontext()

    def __enter__(self) -> None:
        self._of_zero.__enter__()
        for each in self._parameters:
            self._own.append(each.data)
            each.data = each.fsmoe_origin.whole(each)
            each.__class__ = WholeExperts

    def __exit__(self, *error: Any) -> None:
        has_failed = error and error[0] is not None
        for each, own in zip(self._parameters, self._own, strict=True):
            each.__class__ = ExpertShard
            if not has_failed:  # other ranks may not come here
                self._take_changes(each, own)
            each.data = own
        self._own = []
        self._of_zero.__exit__(*error)

    @torch.no_grad()
    def _take_changes(self, parameter: ExpertShard, own: torch.Tensor) -> None:
        """Bring what was changed into this rank's part; at ZeRO 3 without a modifier nothing counts, as with others."""
        if self._modifier is None and is_shared_out(parameter):
            return
        if self._modifier is not None:
            group = stock_groups._get_sequence_data_parallel_group()
            whole = parameter.data.contiguous()
            with waiting("a change within GatheredParameters of", parameter.fsmoe_origin.name):
                dist.broadcast(whole, dist.get_global_rank(group, self._modifier), group=group)
            parameter.data = whole
        own.copy_(parameter.fsmoe_origin.cut(parameter.data))


def gather_experts_whole() -> None:
    """Let ``GatheredParameters`` give whole experts, from now on in this process. Without effect the second time."""
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
                self._ds_fsmoe_gathering = _Gathering(in_order, modifier_rank)
        begin(self, params, modifier_rank, fwd_module, enabled)

    def __enter__(self: Any) -> Any:
        found = enter(self)
        if self._ds_fsmoe_gathering is not None:
            self._ds_fsmoe_gathering.__enter__()
        return found

    def __exit__(self: Any, *error: Any) -> Any:
        if self._ds_fsmoe_gathering is not None:
            self._ds_fsmoe_gathering.__exit__(*error)
        return leave(self, *error)

    GatheredParameters._ds_fsmoe_gathering = None
    GatheredParameters.__init__, GatheredParameters.__enter__ = __init__, __enter__
    GatheredParameters.__exit__ = __exit__


def whole_weight(parameter: torch.Tensor) -> torch.Tensor:
    """Return a weight with all experts, for a loss on weights; its gradient reaches the experts of every rank.

    Collective over the ranks that share the experts, in the backward too.

    Args:
        parameter: of ``engine.module``.

    Returns:
        [E, ...], with a gradient; a parameter that is not spread over ranks as it is.

    Raises:
        LayerError: ZeRO 3 has shared it out.

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
            f"whole_weight: ZeRO 3 has shared {origin.name} out; compute the loss within "
            "deepspeed.zero.GatheredParameters(parameter), where it has all experts and a gradient"
        )
    return WholeOfParts.apply(parameter, origin.whole(parameter), origin.cut, origin.group)


def whole_parameters(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Walk over a model's whole parameters, on every rank: (name, tensor), one at a time.

    Every rank has to go through all of them, since a weight is put together from all ranks as it comes. What was
    yielded before may be given back then: copy what is to be kept.

    Args:
        engine: the engine that ``initialize`` has returned, ours or DeepSpeed's.

    Yields:
        The name of a parameter and the whole tensor, [E, ...] where it is one of experts.

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
