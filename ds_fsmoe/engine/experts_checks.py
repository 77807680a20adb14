# SPDX-License-Identifier: Apache-2.0
"""Finds the experts of Hugging Face models, and refuses those that could not be taken over rightly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ds_fsmoe.checkpoint_files.expert_parts import part_of
from ds_fsmoe.checks.preflight import check_zero_stage
from ds_fsmoe.components.expert_compute.contract import ContractError, contract_of, follows_contract, shape_of
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.reading import BLOCK, ConfigError, shown
from ds_fsmoe.distributed.groups import sequence_ranks_of_mpu, sizes_of_mpu
from ds_fsmoe.engine.convert_adapters import check_wrappers, wrappers_around
from ds_fsmoe.engine.convert_experts import num_experts_of, refuse_ep_size
from ds_fsmoe.layer.own_experts_marks import loaded_part
from ds_fsmoe.layer.parts import LayerError


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
        wrappers = wrappers_around(model, name)
        try:
            contract = contract_of(module)
        except ContractError as error:
            raise LayerError(
                f"{name}, a {type(module).__name__}, follows the contract of transformers' experts by name, but {error}"
            ) from error
        # Beside experts that were loaded by parts adapters are of all; beside those that an engine has left, of these.
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
    """Refuse what does not go with the experts of a Hugging Face model, or with their absence.

    Args:
        block: the block.
        ds_config: the whole DeepSpeed config.
        experts: the modules of experts, by name.
        stock: the stock layers, by name.
        has_stages: whether the model is a ``PipelineModule``.
        mpu: the script's ``mpu``, if there is one.
        adapted: the names of those experts that have adapters.

    Raises:
        ConfigError, LayerError: say what to change.
    """
    check_zero_stage(ds_config, stock)
    if stock and block.placement.policy == "lina":
        raise ConfigError(
            f'{BLOCK}.placement.policy = "lina": chooses the ep_size of Hugging Face models, and {next(iter(stock))} '
            "is a deepspeed.moe.layer.MoE, whose ep_size is the script's: write it in MoE(..., ep_size=...), with as "
            "many experts on each rank as you want, and leave the policy out"
        )
    if not experts:
        if not has_stages:  # another stage may have some
            refuse_ep_size(block)
        if block.placement.policy == "lina":
            raise ConfigError(
                f'{BLOCK}.placement.policy = "lina": chooses the ep_size of Hugging Face models, and this model, or '
                "this stage of one, has no experts of theirs: leave the policy out"
            )
        return
    first = next(iter(experts))
    for name, module in experts.items():
        if any(each.is_meta for each in module.parameters(recurse=False)):
            raise LayerError(
                f"{name} is on the meta device and has no weights: make the model with from_pretrained or from_config "
                "within ds_fsmoe.own_experts(config), where no rank holds all experts"
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
    for name, value, wanted in (
        ("dispatch", block.dispatch, "rows"),
        ("gate", block.gate, None),
    ):
        if value not in (wanted, "auto"):
            shown_value = shown(value.type) if name == "gate" else shown(value)
            raise ConfigError(
                f"{BLOCK}.{name} = {shown_value}: not with experts of a Hugging Face model ({first}), {_WHY[name]}; "
                "leave it out"
            )


def _check_in_stages(block: FSMoEBlock, experts: Mapping[str, nn.Module], adapted: Sequence[str]) -> None:
    """Refuse what experts in a ``PipelineModule`` cannot have."""
    if adapted:
        raise LayerError(
            f"{adapted[0]}: adapters on experts are not supported in a PipelineModule; leave target_parameters out, or "
            "give initialize() the whole model"
        )
    if block.placement.policy == "lina":
        raise ConfigError(
            f'{BLOCK}.placement.policy = "lina": measures the experts of a whole model, and a stage of a '
            f"PipelineModule has a part of them ({next(iter(experts))}): write {BLOCK}.ep_size, or leave it out for "
            "the largest inside a node, and leave the policy out"
        )
    for name, module in experts.items():
        if name.split(".")[0] == "tied_modules":
            raise LayerError(
                f"{name}: experts in a TiedLayerSpec cannot be spread over ranks, as stages would share them; use a "
                "LayerSpec for layers with experts"
            )
        if loaded_part(module) is not None:
            raise LayerError(
                f"{name} was made within ds_fsmoe.own_experts, which knows nothing of the stages of a PipelineModule: "
                "make its layers without it"
            )


_WHY = {
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
