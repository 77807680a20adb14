# SPDX-License-Identifier: Apache-2.0
"""Makes the experts modules of Hugging Face models ours: reduced to this rank's experts, tagged for DeepSpeed, and run
by our schedule.

Routers, shared experts, auxiliary losses and recorded logits are around them and stay as they are. The engine calls
this where it replaces layers; ``convert_layers`` does the same for DeepSpeed's own MoE layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart, describe_as, part_of
from ds_fsmoe.checks.preflight import check_zero_stage
from ds_fsmoe.components.expert_compute.contract import (
    ContractError,
    contract_of,
    follows_contract,
    numel_of,
    shape_of,
)
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.reading import BLOCK, ConfigError, shown
from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.distributed.groups import sequence_ranks_of_mpu, sizes_of_mpu
from ds_fsmoe.distributed.partitioned import gathered, is_shared_out
from ds_fsmoe.distributed.topology import find_topology, world_size_now
from ds_fsmoe.engine.auto_ep_size import AutoEpSize
from ds_fsmoe.engine.restore_model import take_up
from ds_fsmoe.engine.shard_experts import (
    adapters_of,
    check_wrappers,
    computes_by_contract,
    contract_of_shard,
    convert_wrappers,
    converted_class,
    eager_forward,
    num_experts_of,
    packed_ep_size,
    shard_parameter,
    shards_of,
    share_out_over_replicas,
    wrappers_around,
)
from ds_fsmoe.execution.tensor_parallel import PLAIN
from ds_fsmoe.layer.experts_layer import (
    FSMoEExperts,
    let_run,
    loaded_part,
    own_class_of,
    replace_all,
)
from ds_fsmoe.layer.experts_state import ExpertsState, ExternalRouter
from ds_fsmoe.layer.opaque import Handle
from ds_fsmoe.layer.parts import LayerError, Parts
from ds_fsmoe.layer.replay import RouterWatch
from ds_fsmoe.layer.runtime import LayerRuntime
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.terminal.tables import Message, Table

# ---- Finds the experts of Hugging Face models, and refuses those that could not be taken over rightly


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return name -> experts module that follows transformers' contract, in module order."""
    return {name: module for name, module in model.named_modules() if follows_contract(module)}


def find_left_out(model: nn.Module, taken: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return name -> class of the modules that look like experts of an MoE block but are not converted.

    Such a module has stacked weights, or a list of equal modules, under the name ``experts``.

    Args:
        model: the model.
        taken: the experts modules and the stock layers that are converted, by name.
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
    """Refuse experts modules that cannot be converted correctly. It computes nothing and needs no process group.

    Args:
        model: the model.
        experts: the experts modules that follow the contract, by name.
        stock: the stock layers, by name.

    Raises:
        LayerError: names the modules and the remedy.
    """
    left_out = find_left_out(model, {**experts, **stock})
    if left_out:
        named = "; ".join(f"{name}, a {kind}" for name, kind in list(left_out.items())[:4])
        more = f" and {len(left_out) - 4} more" if len(left_out) > 4 else ""
        raise LayerError(
            f"{type(model).__name__} has experts that ds_fsmoe cannot convert ({named}{more}): every rank would "
            "train all of them. ds_fsmoe supports deepspeed.moe.layer.MoE, and the experts modules of transformers "
            "5 (one module with stacked weights, decorated with use_experts_implementation). Build the model with "
            f"one of these, or set {BLOCK}.enabled to false"
        )
    if experts and (wrapper := wrapped_by(model)) is not None:
        raise LayerError(f"{wrapper}: pass the model itself to initialize(); DeepSpeed partitions it")
    owners: dict[int, str] = {}
    for name, module in experts.items():
        for parameter_name, parameter in module.named_parameters():
            path = f"{name}.{parameter_name}"
            if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
                raise LayerError(
                    f"{path} is {str(parameter.dtype).removeprefix('torch.')}: quantized experts cannot be trained; "
                    "load the model without quantization_config"
                )
            if id(parameter) in owners:
                raise LayerError(
                    f"{path} is the same parameter as {owners[id(parameter)]}: tied experts cannot be distributed "
                    "over ranks; give each layer its own"
                )
            owners[id(parameter)] = path
        wrappers = wrappers_around(model, name)
        try:
            contract = contract_of(module)
        except ContractError as error:
            raise LayerError(
                f"{name}, a {type(module).__name__}, has the attributes of transformers' experts modules, but {error}"
            ) from error
        # Experts loaded by parts have adapters of all experts; experts that an engine has left have only their own.
        left = part_of(module.down_proj) if loaded_part(module) is None else None
        check_wrappers(wrappers, contract, num_experts_of(module) if left is None else left.num_local)


def check_hugging_face(
    block: FSMoEBlock,
    ds_config: Mapping[str, Any],
    experts: Mapping[str, nn.Module],
    stock: Mapping[str, nn.Module],
    has_stages: bool,
    mpu: Any,
    adapted: Sequence[str] = (),
) -> None:
    """Refuse settings that conflict with the experts of a Hugging Face model, or with their absence.

    Args:
        block: the block.
        ds_config: the whole DeepSpeed config.
        experts: the modules of experts, by name.
        stock: the stock layers, by name.
        has_stages: whether the model is a ``PipelineModule``.
        mpu: the script's ``mpu``, if there is one.
        adapted: the names of the experts that have adapters.

    Raises:
        ConfigError, LayerError: name the setting to change.
    """
    check_zero_stage(ds_config, stock)
    if stock and block.placement.policy == "lina":
        raise ConfigError(
            f'{BLOCK}.placement.policy = "lina" chooses the ep_size of Hugging Face models, and {next(iter(stock))} '
            "is a deepspeed.moe.layer.MoE. Remove the policy, and set MoE(..., ep_size=...) in the script"
        )
    if not experts:
        if not has_stages:  # another stage may have some
            refuse_ep_size(block)
        if block.placement.policy == "lina":
            raise ConfigError(
                f'{BLOCK}.placement.policy = "lina" chooses the ep_size of Hugging Face models, and this model (or '
                "pipeline stage) has no such experts. Remove the policy"
            )
        return
    first = next(iter(experts))
    for name, module in experts.items():
        if any(each.is_meta for each in module.parameters(recurse=False)):
            raise LayerError(
                f"{name} is on the meta device and has no weights: create the model with from_pretrained or "
                "from_config inside ds_fsmoe.own_experts(config), where no rank holds all experts"
            )
    if has_stages:
        _check_in_stages(block, experts, adapted)
    if (size := sequence_ranks_of_mpu(mpu)) > 1:
        raise LayerError(
            f"mpu: sequence parallelism, here over {size} ranks, is not supported with experts of Hugging Face models "
            f"({first}): train with whole sequences (leave mpu and sequence_parallel_size out, or sp_size 1 where "
            f"Accelerate or Trainer makes it), or set {BLOCK}.enabled to false for stock DeepSpeed"
        )
    if sizes_of_mpu(mpu)[0] > 1:
        raise LayerError(f"mpu: tensor-parallel ranks are not supported with experts of Hugging Face models ({first})")
    for name, asked, why in (
        ("dispatch", block.dispatch if block.dispatch == "padded" else None, "whose dispatch is always unpadded"),
        ("gate", None if block.gate is None else block.gate.type, "whose router is the model's own"),
    ):
        if asked is not None:
            raise ConfigError(
                f"{BLOCK}.{name} = {shown(asked)}: not with experts of a Hugging Face model ({first}), {why}; leave it "
                "out"
            )


def _check_in_stages(block: FSMoEBlock, experts: Mapping[str, nn.Module], adapted: Sequence[str]) -> None:
    """Refuse settings that experts in a ``PipelineModule`` do not support."""
    if adapted:
        raise LayerError(
            f"{adapted[0]}: adapters on experts are not supported in a PipelineModule; leave target_parameters out, or "
            "give initialize() the whole model"
        )
    if block.placement.policy == "lina":
        raise ConfigError(
            f'{BLOCK}.placement.policy = "lina" measures the experts of a whole model, and a stage of a '
            f"PipelineModule has only a part of them ({next(iter(experts))}). Remove the policy; set "
            f"{BLOCK}.ep_size or leave it to auto"
        )
    for name, module in experts.items():
        if name.split(".")[0] == "tied_modules":
            raise LayerError(
                f"{name}: experts in a TiedLayerSpec cannot be distributed over ranks, as stages would share them; "
                "use a LayerSpec for layers with experts"
            )
        if loaded_part(module) is not None:
            raise LayerError(
                f"{name} was created inside ds_fsmoe.own_experts, which does not support PipelineModule: create its "
                "layers outside of it"
            )


def wrapped_by(model: nn.Module) -> str | None:
    """Return the name of the wrapper that already shards or copies a model's parameters; ``None`` if there is none."""
    for name, module in model.named_modules():
        kind = type(module)
        if kind.__name__ in ("FullyShardedDataParallel", "DistributedDataParallel", "DataParallel", "FSDPModule"):
            return f"{name or 'the model'} is a {kind.__name__}"
        if any(base.__name__ == "FSDPModule" for base in kind.__mro__):
            return f"{name or 'the model'} was given to fully_shard"
    return None


# ---- Makes the experts modules of Hugging Face models ours: split to this rank's part, tagged for DeepSpeed, run
# our way


def chosen_ep_size(block: FSMoEBlock, num_experts: list[int], world_size: int, ranks_per_node: int) -> int:
    """Return the number of ranks over which experts are spread: ``ep_size``, or the largest fitting size within a node.

    Args:
        block: the block, whose ``ep_size`` is read.
        num_experts: the numbers of experts of the layers.
        world_size: the number of ranks of the job, or of one of its stages.
        ranks_per_node: the number of ranks of a node.

    Raises:
        ConfigError: the configured size does not divide the experts or the ranks; names the sizes that fit.
    """
    fitting = fitting_ep_sizes(block, num_experts, world_size)
    esp_size = block.esp_size
    if block.ep_size == "auto":
        inside = (size for size in fitting if ranks_per_node % (size * esp_size) == 0)
        return max(inside, default=1)
    if block.ep_size not in fitting and world_size == 1:
        raise ConfigError(f"{BLOCK}.ep_size = {shown(block.ep_size)}: with 1 rank it can only be 1")
    if block.ep_size not in fitting:
        kinds = ", ".join(map(str, sorted(set(num_experts))))
        raise ConfigError(
            f"{BLOCK}.ep_size = {shown(block.ep_size)}: must divide the {world_size // esp_size} "
            f"{'ranks' if esp_size == 1 else 'groups of ranks that share an expert'} and the {kinds} experts of "
            f"the layers; the choices are {', '.join(map(str, fitting))}"
        )
    return block.ep_size


def fitting_ep_sizes(block: FSMoEBlock, num_experts: list[int], world_size: int) -> list[int]:
    """Return the numbers of ranks that divide the job and all experts, ascending; see :func:`chosen_ep_size`.

    Raises:
        ConfigError: the ranks that share an expert do not divide the job.
    """
    esp_size = block.esp_size
    if world_size % esp_size:
        sizes = ", ".join(str(size) for size in range(1, world_size + 1) if world_size % size == 0)
        raise ConfigError(
            f"{BLOCK}.expert_tensor_parallel_size = {esp_size}: must divide the {world_size} ranks; the choices are "
            f"{sizes}"
        )
    return [
        size
        for size in range(1, world_size + 1)
        if world_size % (size * esp_size) == 0 and not any(each % size for each in num_experts)
    ]


def ep_size_of(
    block: FSMoEBlock,
    experts: Mapping[str, nn.Module],
    device: torch.device,
    expert_before_data: bool,
    dtype: torch.dtype | None = None,
    num_stages: int | None = None,
    *,
    model: nn.Module,
    ds_config: Mapping[str, Any],
) -> int:
    """Return the number of ranks over which the experts of a model are spread; 1 for a model without experts.

    Collective where the nodes have to be found, experts are packed by measurements, links are measured, or the model
    has stages.

    Args:
        block: the options.
        experts: the modules of experts, by name.
        device: the device of this rank.
        expert_before_data: see :func:`~ds_fsmoe.distributed.topology.layout`.
        dtype: the type in which experts will compute; ``None``: that of their weights.
        num_stages: the stages of a ``PipelineModule``; ``experts`` then belong to this rank's stage. The result fits
            the experts of all stages and is the same in each. ``None``: all ranks have the same experts.
        model: the model.
        ds_config: the whole DeepSpeed config.

    Raises:
        ConfigError: see :func:`chosen_ep_size` and :func:`~ds_fsmoe.engine.shard_experts.packed_ep_size`; on every
            rank.
    """
    num_experts = [num_experts_of(each) for each in experts.values()]
    if num_stages is not None:
        num_experts = sorted(set().union(*on_every_rank(set(num_experts))))
    if not num_experts:
        refuse_ep_size(block)
        return 1
    if block.placement.policy == "lina":
        fitting = fitting_ep_sizes(block, num_experts, world_size_now())
        return packed_ep_size(block, experts.values(), fitting, device, expert_before_data, dtype)
    asked = block.topology.ranks_per_node
    topology = find_topology(None if asked == "auto" else asked)
    ep_size = chosen_ep_size(block, num_experts, topology.world_size // (num_stages or 1), topology.ranks_per_node)
    if block.ep_size != "auto":
        return ep_size
    fitting, modules = fitting_ep_sizes(block, num_experts, topology.world_size), list(experts.values())
    of_job = block, ds_config, model, modules, fitting, ep_size, topology, device, dtype
    return AutoEpSize(*of_job, has_stages=num_stages is not None).choose()


def refuse_ep_size(block: FSMoEBlock) -> None:
    """Refuse an ``ep_size`` for a model without experts of Hugging Face's kind.

    Raises:
        ConfigError: the block has an ``ep_size``.
    """
    if block.ep_size != "auto":
        raise ConfigError(
            f"{BLOCK}.ep_size = {shown(block.ep_size)} applies to Hugging Face models, and this model has no such "
            "experts; set deepspeed.moe.layer.MoE(..., ep_size=...)"
        )


def convert_experts(
    module: nn.Module,
    parts: Parts,
    running: LayerRuntime,
    label: str,
    path: str,
    ep_size: int,
    wrappers: Mapping[str, nn.Module] | None = None,
) -> dict[nn.Parameter, nn.Parameter]:
    """Convert an experts module in place, so that it has this rank's experts only.

    Args:
        module: a module checked by :func:`check_experts_modules`.
        parts: order, all-to-all, ops, hooks.
        running: the runtime of the engine.
        label: the label of the layer, in traces.
        path: the path of the layer in its model.
        ep_size: the ranks over which experts are spread.
        wrappers: path -> PEFT's wrappers of its parameters, the outermost first; checked as well.

    Returns:
        New parameter -> the one it replaces.

    Raises:
        LayerError: the module was loaded with another set of experts.
    """
    contract = contract_of(module)
    num_experts = num_experts_of(module)
    own_class, gate = type(module), ExternalRouter()
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
        esp_size=running.block.esp_size,
        gate=gate,
    )
    index = running.index_in("esp", ep_size)
    state.contract = contract_of_shard(contract, index)
    part = ExpertPart("stacked", num_experts, ep_size, running.index_in("ep", ep_size))
    shards = shards_of(contract, state.esp_size, index)
    wanted = {name: replace(part, shard=shard) for name, shard in shards.items()}
    before = take_up(module, (wrappers or {}).values(), wanted)
    if (loaded := loaded_part(module)) is not None:
        if loaded != part:
            raise LayerError(
                f"{path} was loaded with {loaded}, but needs {part}: pass the same config to own_experts() and "
                "initialize()"
            )
        for name in contract.weights:
            describe_as(getattr(module, name), part)
        let_run(module)
    replaced = keep_own_weights(module, wanted, state.group_name)
    if state.esp_size == 1:  # what shards compute has been tried
        with gathered(module.parameters()):
            if not computes_by_contract(module, contract):
                state.own_forward = eager_forward(module, own_class)
    module.__class__ = converted_class(FSMoEExperts, own_class)
    module.fsmoe = state
    replaced |= convert_wrappers(wrappers or {}, module, part.ep_rank)
    state.opaque = Handle(module, path)
    if of_zero := {new: old for new, old in replaced.items() if is_shared_out(old)}:
        running.groups(ep_size)
        share_out_over_replicas(list(of_zero), next(iter(of_zero.values())))
    found = {new: before.pop(old, old) for new, old in replaced.items()} | before
    replace_all(found, *next(iter((wrappers or {}).items()), (path, module)))
    return found


def watch_router(model: nn.Module, path: str, module: FSMoEExperts) -> None:
    """Make the router's choices for a converted module visible and replaceable, if the block around both runs.

    Args:
        model: the model.
        path: the path of the experts module.
        module: the experts module.
    """
    outermost = next(iter(wrappers_around(model, path)), path)
    around = outermost.rpartition(".")[0]
    if model.get_submodule(around) is not module:
        module.fsmoe.watch = RouterWatch(model.get_submodule(around), module)


def keep_own_weights(
    module: nn.Module, parts: Mapping[str, ExpertPart], group_name: str
) -> dict[nn.Parameter, nn.Parameter]:
    """Replace all experts of a module by this rank's experts, or shards of them, one weight at a time."""
    replaced = {}
    for name, part in parts.items():
        whole = getattr(module, name)
        mine = shard_parameter(whole, part, group_name)
        if mine is not whole:
            setattr(module, name, mine)
            replaced[mine] = whole
    if hasattr(module, "num_experts"):
        module.num_experts = part.num_local
    return replaced


def agree_on_forms(layers: Sequence[FSMoEExperts], group: dist.ProcessGroup | None = None) -> None:
    """Make all ranks compute the experts of a layer in the same form. Collective.

    If any rank has to call the module itself, all ranks do, since that schedule has other tasks.

    Args:
        layers: the layers of these ranks.
        group: the ranks that run the layers; ``None``: all of the job.
    """
    if not layers or world_size_now() == 1:
        return
    of_ranks = on_every_rank([each.fsmoe.own_forward is not None for each in layers], group)
    for layer, *is_called in zip(layers, *of_ranks, strict=True):
        if any(is_called):
            layer.fsmoe.own_forward = eager_forward(layer, own_class_of(layer))


def table_of(layers: Sequence[FSMoEExperts], model: nn.Module, stock: int) -> Message:
    """Return the converted experts as a table for the log.

    Args:
        layers: the converted layers, at least one.
        model: the model.
        stock: the number of layers of ``deepspeed.moe.layer.MoE`` besides.
    """
    ep_size = layers[0].ep_size
    kinds: dict[tuple[Any, ...], int] = defaultdict(int)
    for layer in layers:
        own = own_class_of(layer).__name__
        parameters = [*layer.parameters(), *adapters_of(layer)]
        num_local = sum(map(numel_of, parameters))
        num_trained = sum(numel_of(each) for each in parameters if each.requires_grad)
        size_bytes = sum(numel_of(each) * each.element_size() for each in parameters)
        way = "written out" if layer.fsmoe.own_forward is None else "by autograd"
        kinds[own, layer.total_experts, layer.num_local_experts, num_local, num_trained, size_bytes, way] += 1
    heads = ("experts", "layers", "experts each", "of them here", "parameters here", "trained", "MiB here", "backward")
    rows = [
        (own, str(n), str(total), str(local), f"{n * numel:,}", f"{n * trained:,}", f"{n * size / 2**20:,.1f}", way)
        for (own, total, local, numel, trained, size, way), n in kinds.items()
    ]
    left = f", {stock} layer(s) of deepspeed.moe.layer.MoE" if stock else ""
    family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    return Message(
        [
            f"ds_fsmoe converted the experts of {family}: ep_size = {ep_size}{left} (the rest is unchanged)",
            Table(heads, rows, indent="  ", has_rule=False),
        ]
    )


def log_table(layers: Sequence[FSMoEExperts], model: nn.Module, stock: int, has_stages: bool = False) -> None:
    """Log the converted layers, if there are any, on the first rank of the job or of each stage.

    Collective over all ranks where the model has stages.

    Args:
        layers: the layers of this rank.
        model: the model.
        stock: the number of layers of ``deepspeed.moe.layer.MoE`` besides.
        has_stages: True if it is a ``PipelineModule``.
    """
    own = table_of(layers, model, stock) if layers else None
    stage = getattr(model, "stage_id", 0) if has_stages else 0
    told = dict(on_every_rank((stage, own))) if has_stages else {0: own}
    for number, table in sorted(told.items()):
        if table is not None:
            first, *rest = table.parts
            log_on_rank_0(Message([f"stage {number}: {first}", *rest]) if has_stages else table)
