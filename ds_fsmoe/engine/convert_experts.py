# SPDX-License-Identifier: Apache-2.0
"""Makes the experts modules of Hugging Face models ours: found by their contract, checked, and cut to this rank's part.

Routers, shared experts, auxiliary losses and recorded logits are around them and stay as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed.utils import groups as stock_groups
from torch import nn

from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.checks.preflight import check_zero_stage
from ds_fsmoe.components.expert_compute.contract import (
    Contract,
    ContractError,
    contract_of,
    follows_contract,
    numel_of,
    shape_of,
)
from ds_fsmoe.components.expert_compute.stacked_experts import StackedExperts
from ds_fsmoe.components.expert_compute.stacked_forms import OwnForward
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.reading import BLOCK, ConfigError, shown
from ds_fsmoe.distributed.groups import sizes_of_mpu
from ds_fsmoe.distributed.partitioned import gathered, is_shared_out
from ds_fsmoe.distributed.topology import find_topology
from ds_fsmoe.execution.tensor_parallel import PLAIN
from ds_fsmoe.layer.experts_layer import ExpertsState, FSMoEExperts, GivenRouter, HuggingFaceLayer
from ds_fsmoe.layer.parts import LayerError, Parts
from ds_fsmoe.layer.runtime import LayerRuntime
from ds_fsmoe.log import log_on_rank_0

PLACEMENT = "autoep_expert"
"""The family of parameters that DeepSpeed's ZeRO 3 shards over the ranks that hold the same experts."""
_FEW_ROWS = 3
_TOLERANCE = 1e-3


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return name -> every module of experts that follows transformers' contract, in module order."""
    return {name: module for name, module in model.named_modules() if follows_contract(module)}


def find_left_out(model: nn.Module, taken: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return name -> class of the modules that look like experts of an MoE block and are not taken over: stacked
    weights under the name ``experts``, or a list of alike modules under it.

    Args:
        model: the model.
        taken: the modules of experts and the stock layers that are taken over, by name.
    """
    found = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] != "experts" or any(name == own or name.startswith(f"{own}.") for own in taken):
            continue
        children = [type(each) for each in module.children()]
        is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(children) > 1 and len(set(children)) == 1
        is_stacked = any(len(shape_of(each) or ()) == 3 for each in module.parameters(recurse=False))
        if is_list or is_stacked:
            found[name] = (
                f"{type(module).__name__} of {len(children)} {children[0].__name__}"
                if is_list
                else (type(module).__name__)
            )
    return found


def check_experts_modules(model: nn.Module, experts: Mapping[str, nn.Module], stock: Mapping[str, nn.Module]) -> None:
    """Refuse modules of experts that could not be taken over rightly. Nothing is computed and no group is needed.

    Args:
        model: the model.
        experts: the modules that follow the contract, by name.
        stock: the stock layers, by name.

    Raises:
        LayerError: names the modules and what to do.
    """
    left_out = find_left_out(model, {**experts, **stock})
    if left_out:
        named = "; ".join(f"{name}, a {kind}" for name, kind in list(left_out.items())[:4])
        more = f" and {len(left_out) - 4} more" if len(left_out) > 4 else ""
        raise LayerError(
            f"{type(model).__name__} has experts that ds_fsmoe cannot take over ({named}{more}): every rank would "
            "train all of them by itself. ds_fsmoe takes over deepspeed.moe.layer.MoE, and the experts modules of "
            "transformers 5 (one module with stacked weights, decorated with use_experts_implementation); build the "
            f"model with one of these, or set {BLOCK}.enabled to false"
        )
    if experts and (wrapper := wrapped_by(model)) is not None:
        raise LayerError(f"{wrapper}: give initialize() the model itself, DeepSpeed shares it out")
    owners: dict[int, str] = {}
    for name, module in experts.items():
        if isinstance(module, FSMoEExperts):
            raise LayerError(f"{name} was given to initialize() before; build a new model for every call")
        for parameter_name, parameter in module.named_parameters():
            path = f"{name}.{parameter_name}"
            if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
                raise LayerError(
                    f"{path} is {str(parameter.dtype).removeprefix('torch.')}: quantised experts cannot be trained "
                    "here; load the model without a quantization_config"
                )
            if id(parameter) in owners:
                raise LayerError(
                    f"{path} is the same parameter as {owners[id(parameter)]}: tied experts cannot be spread over "
                    "ranks; give each layer its own"
                )
            owners[id(parameter)] = path
        try:
            contract_of(module)
        except ContractError as error:
            raise LayerError(
                f"{name}, a {type(module).__name__}, follows the contract of transformers' experts by name, but {error}"
            ) from error


def check_hugging_face(
    block: FSMoEBlock,
    ds_config: Mapping[str, Any],
    experts: Mapping[str, nn.Module],
    stock: Mapping[str, nn.Module],
    has_stages: bool,
    mpu: Any,
) -> None:
    """Refuse what does not go with the experts of a Hugging Face model, or with their absence.

    Args:
        block: the block.
        ds_config: the whole DeepSpeed config.
        experts: the modules of experts, by name.
        stock: the stock layers, by name.
        has_stages: whether the model is a ``PipelineModule``.
        mpu: the script's ``mpu``, if there is one.

    Raises:
        ConfigError, LayerError: say what to change.
    """
    check_zero_stage(ds_config, stock)
    if not experts:
        if block.ep_size != "auto":
            raise ConfigError(
                f"{BLOCK}.ep_size = {shown(block.ep_size)}: is for the experts of Hugging Face models, and this model "
                "has none: deepspeed.moe.layer.MoE(..., ep_size=...) has it"
            )
        return
    first = next(iter(experts))
    if has_stages:
        raise LayerError(f"{first}: experts of Hugging Face models are not supported in a PipelineModule")
    if sizes_of_mpu(mpu)[0] > 1:
        raise LayerError(f"mpu: tensor-parallel ranks are not supported with experts of Hugging Face models ({first})")
    for name, value, wanted in (
        ("expert_tensor_parallel_size", block.esp_size, 1),
        ("dispatch", block.dispatch, "rows"),
        ("gate", block.gate, None),
    ):
        if value not in (wanted, "auto"):
            shown_value = shown(value.type) if name == "gate" else shown(value)
            raise ConfigError(
                f"{BLOCK}.{name} = {shown_value}: not with experts of a Hugging Face model ({first}), {_WHY[name]}; "
                "leave it out"
            )


_WHY = {
    "expert_tensor_parallel_size": "which are not cut themselves",
    "dispatch": "which are always sent rows",
    "gate": "whose router is the model's own",
}


def wrapped_by(model: nn.Module) -> str | None:
    """Return the wrapper that shares out or copies a model's parameters already, if there is one."""
    for name, module in model.named_modules():
        kind = type(module)
        if kind.__name__ in ("FullyShardedDataParallel", "DistributedDataParallel", "DataParallel", "FSDPModule"):
            return f"{name or 'the model'} is a {kind.__name__}"
        if any(base.__name__ == "FSDPModule" for base in kind.__mro__):
            return f"{name or 'the model'} was given to fully_shard"
    return None


def chosen_ep_size(block: FSMoEBlock, num_experts: list[int], world_size: int, ranks_per_node: int) -> int:
    """Return over how many ranks experts are spread: as asked, or the largest size inside a node that divides all.

    Args:
        block: the block, whose ``ep_size`` is read.
        num_experts: the numbers of experts of the layers.
        world_size: the number of ranks of the job.
        ranks_per_node: the number of ranks of a node.

    Raises:
        ConfigError: the size asked for does not divide the experts or the ranks; names the choices.
    """
    fitting = [
        size
        for size in range(1, world_size + 1)
        if world_size % size == 0 and not any(each % size for each in num_experts)
    ]
    if block.ep_size == "auto":
        return max(size for size in fitting if size <= ranks_per_node and ranks_per_node % size == 0)
    if block.ep_size not in fitting:
        kinds = ", ".join(map(str, sorted(set(num_experts))))
        raise ConfigError(
            f"{BLOCK}.ep_size = {shown(block.ep_size)}: must divide the {world_size} ranks and the {kinds} experts of "
            f"the layers; the choices are {', '.join(map(str, fitting))}"
        )
    return block.ep_size


def ep_size_of(block: FSMoEBlock, experts: Mapping[str, nn.Module]) -> int:
    """Return over how many ranks the experts of a model are spread. Collective where the nodes have to be found.

    Raises:
        ConfigError: see :func:`chosen_ep_size`; on every rank.
    """
    asked = block.topology.ranks_per_node
    topology = find_topology(None if asked == "auto" else asked)
    return chosen_ep_size(
        block, [num_experts_of(each) for each in experts.values()], topology.world_size, topology.ranks_per_node
    )


def num_experts_of(module: nn.Module) -> int:
    """Return the number of experts of a module that has all of them."""
    return (shape_of(module.down_proj) or (0,))[0]


def convert_experts(
    module: nn.Module, parts: Parts, running: LayerRuntime, label: str, path: str, ep_size: int
) -> tuple[HuggingFaceLayer, dict[nn.Parameter, nn.Parameter]]:
    """Make a module of experts ours, in place, with this rank's experts only.

    Args:
        module: a module checked by :func:`check_experts_modules`.
        parts: order, all-to-all, ops, hooks.
        running: the runtime of the engine.
        label: the label of the layer, in traces.
        path: the path of the layer in its model.
        ep_size: the ranks over which experts are spread.

    Returns:
        The layer, and new parameter -> the one it replaces.
    """
    contract = contract_of(module)
    num_experts = num_experts_of(module)
    own_class, gate = type(module), GivenRouter()
    state = ExpertsState(
        parts,
        parts.order_for(gate),
        running,
        label,
        path,
        PLAIN,
        contract=contract,
        total_experts=num_experts,
        ep_size=ep_size,
        gate=gate,
    )
    replaced = _cut(module, contract, num_experts // ep_size, running.ep_rank(ep_size), state.group_name)
    state.own_forward = _own_forward_if_other(module, contract)
    if any(map(is_shared_out, replaced.values())):
        running.groups(ep_size)
        share_out(replaced)
    module.__class__ = _ours(own_class)
    module.fsmoe = state
    return HuggingFaceLayer(module), replaced


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _ours(own_class: type[nn.Module]) -> type[nn.Module]:
    """Return the class of converted modules of a class: the same for all of them."""
    if own_class not in _classes:
        _classes[own_class] = type(own_class.__name__, (FSMoEExperts, own_class), {"__module__": own_class.__module__})
    return _classes[own_class]


def _cut(
    module: nn.Module, contract: Contract, num_local: int, ep_rank: int, group_name: str
) -> dict[nn.Parameter, nn.Parameter]:
    """Put this rank's experts in the place of all of them, one weight at a time; tag them for DeepSpeed."""
    replaced = {}
    mine = slice(ep_rank * num_local, (ep_rank + 1) * num_local)
    for name in contract.weights:
        whole = getattr(module, name)
        with gathered([whole]):  # zero.Init may have shared it out over all ranks
            part = nn.Parameter(whole.data[mine].clone(), requires_grad=whole.requires_grad)
        if not is_shared_out(whole):
            vars(part).update(vars(whole))
        part.allreduce, part.group_name = False, group_name
        part.ds_zero_placement_family, part.ds_zero_partition_group_name = PLACEMENT, group_name
        setattr(module, name, part)
        replaced[part] = whole
    if hasattr(module, "num_experts"):
        module.num_experts = num_local
    return replaced


def share_out(replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Share out the parts of what zero.Init had shared out over all ranks, over those that hold the same experts.

    Args:
        replaced: new parameter -> the one it replaces, of one module.
    """
    of_zero = {new: old for new, old in replaced.items() if is_shared_out(old)}
    for new in of_zero:
        new.ds_zero_partition_process_group = stock_groups._get_expert_data_parallel_group(new.group_name)
    if of_zero:
        next(iter(of_zero.values())).convert_to_zero_parameters(param_list=list(of_zero))


def _own_forward_if_other(module: nn.Module, contract: Contract) -> OwnForward | None:
    """Return the module's own forward if it computes something else than the contract says, tried on a few rows."""
    own = _eager_forward(module)
    weight = getattr(module, contract.down)
    if weight.is_meta or not weight.numel():
        return None
    width = shape_of(weight)[2 if contract.is_transposed else 1]
    num_local = weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    x_RM = torch.randn(min(_FEW_ROWS, num_local), width, generator=generator).to(weight)
    of_row_R = torch.arange(len(x_RM), device=weight.device)
    arguments = x_RM, of_row_R.unsqueeze(1), x_RM.new_ones(len(x_RM), 1)
    was_training = module.training
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            theirs = own(*arguments)
            ours = StackedExperts(module, contract).on_few_rows(x_RM, [1] * len(x_RM) + [0] * (num_local - len(x_RM)))
    finally:
        module.train(was_training)
    scale = theirs.abs().max().clamp(min=1e-6)
    is_same = theirs.shape == ours.shape and bool(((theirs - ours).abs().max() / scale) <= _tolerance(weight.dtype))
    return None if is_same else own


def _tolerance(dtype: torch.dtype) -> float:
    return max(_TOLERANCE, 4 * torch.finfo(dtype).eps)


def _eager_forward(module: nn.Module) -> OwnForward:
    """Return the forward that the family wrote, beneath transformers' choice among implementations."""
    forward = type(module).forward
    return getattr(forward, "__wrapped__", forward).__get__(module)


def table_of(layers: Sequence[HuggingFaceLayer], model: nn.Module, stock: int) -> str:
    """Return what was taken over, as a table for the log.

    Args:
        layers: the layers taken over, at least one.
        model: the model.
        stock: the number of layers of ``deepspeed.moe.layer.MoE`` besides.
    """
    ep_size = layers[0].ep_size
    kinds: dict[tuple[Any, ...], int] = defaultdict(int)
    for layer in layers:
        inner = layer.deepspeed_moe
        own = type(inner).__mro__[2].__name__
        num_local = sum(numel_of(each) for each in inner.parameters())
        size_bytes = sum(numel_of(each) * each.element_size() for each in inner.parameters())
        way = "written out" if inner.fsmoe.own_forward is None else "by autograd"
        kinds[own, layer.num_experts, layer.num_local_experts, num_local, size_bytes, way] += 1
    rows = [("experts", "layers", "experts each", "of them here", "parameters here", "MiB here", "backward")]
    rows += [
        (own, str(count), str(total), str(local), f"{count * numel:,}", f"{count * size / 2**20:,.1f}", way)
        for (own, total, local, numel, size, way), count in kinds.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(f"{each:{width}}" for each, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    left = f"; {stock} layer(s) of deepspeed.moe.layer.MoE besides" if stock else ""
    family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    head = f"ds_fsmoe takes over the experts of {family}, over ep_size = {ep_size} rank(s){left}; all else is theirs"
    return "\n".join([head, *(f"  {line}" for line in lines)])


def log_table(layers: Sequence[HuggingFaceLayer], model: nn.Module, stock: int) -> None:
    """Log what was taken over, if anything was, on the first rank."""
    if layers:
        log_on_rank_0(table_of(layers, model, stock))


def refuse_files(layers: Sequence[HuggingFaceLayer], what: str) -> None:
    """Refuse files that would hold the experts of some ranks alone.

    Args:
        layers: the layers taken over.
        what: what is asked for, for the message.

    Raises:
        CheckpointError: experts are spread over ranks.
    """
    if layers and layers[0].ep_size > 1:
        raise CheckpointError(
            f"{what} is not supported in this version with experts of a Hugging Face model over ep_size = "
            f"{layers[0].ep_size} ranks: DeepSpeed would write those of the first rank alone. Each rank has its own "
            "experts in engine.module.state_dict() (at ZeRO 3 within deepspeed.zero.GatheredParameters)"
        )
