# SPDX-License-Identifier: Apache-2.0
"""Makes the experts modules of Hugging Face models ours: cut to this rank's part, tagged for DeepSpeed, run our way.

Routers, shared experts, auxiliary losses and recorded logits are around them and stay as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart, part_of
from ds_fsmoe.components.expert_compute.contract import (
    Contract,
    contract_of,
    numel_of,
    shape_of,
)
from ds_fsmoe.components.expert_compute.stacked_experts import StackedExperts
from ds_fsmoe.components.expert_compute.stacked_forms import OwnForward
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.reading import BLOCK, ConfigError, shown
from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.distributed.partitioned import gathered, is_shared_out
from ds_fsmoe.distributed.topology import find_topology, world_size_now
from ds_fsmoe.engine.convert_adapters import adapters_of, convert_wrappers, wrappers_around
from ds_fsmoe.engine.cut_parameters import cut_parameter, share_out, tag_as_experts
from ds_fsmoe.engine.experts_shards import contract_of_shard, shards_of
from ds_fsmoe.engine.left_experts import take_up
from ds_fsmoe.engine.packed_experts import packed_ep_size
from ds_fsmoe.execution.tensor_parallel import PLAIN
from ds_fsmoe.layer.experts_layer import FSMoEExperts, HuggingFaceLayer, own_class_of
from ds_fsmoe.layer.experts_state import ExpertsState, GivenRouter
from ds_fsmoe.layer.opaque import Handle
from ds_fsmoe.layer.own_experts_marks import loaded_part, unmark
from ds_fsmoe.layer.parts import LayerError, Parts
from ds_fsmoe.layer.replaced_parameters import replace_all
from ds_fsmoe.layer.router_choice import RouterWatch
from ds_fsmoe.layer.runtime import LayerRuntime
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.terminal.tables import Message, Table

_FEW_ROWS = 3
_TOLERANCE = 1e-3


def chosen_ep_size(block: FSMoEBlock, num_experts: list[int], world_size: int, ranks_per_node: int) -> int:
    """Return over how many ranks experts are spread: as asked, or the largest size inside a node that divides all.

    Args:
        block: the block, whose ``ep_size`` is read.
        num_experts: the numbers of experts of the layers.
        world_size: the number of ranks of the job, or of one of its stages.
        ranks_per_node: the number of ranks of a node.

    Raises:
        ConfigError: the size asked for does not divide the experts or the ranks; names the choices.
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
) -> int:
    """Return over how many ranks the experts of a model are spread: 1 for a model without any. Collective where the
    nodes have to be found, experts are packed by what is measured, or the model has stages.

    Args:
        block: the options.
        experts: the modules of experts, by name.
        device: the device of this rank.
        expert_before_data: see :func:`~ds_fsmoe.distributed.topology.layout`.
        dtype: the type in which experts will compute; ``None``: that of their weights.
        num_stages: the stages of a ``PipelineModule``, of which ``experts`` are those of this rank's stage: what is
            chosen fits the experts of all stages and is the same in each. ``None``: all ranks have the same experts.

    Raises:
        ConfigError: see :func:`chosen_ep_size` and :func:`~ds_fsmoe.engine.packed_experts.packed_ep_size`; on every
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
    return chosen_ep_size(block, num_experts, topology.world_size // (num_stages or 1), topology.ranks_per_node)


def refuse_ep_size(block: FSMoEBlock) -> None:
    """Refuse an ``ep_size`` for a model without experts of Hugging Face's kind.

    Raises:
        ConfigError: there is one.
    """
    if block.ep_size != "auto":
        raise ConfigError(
            f"{BLOCK}.ep_size = {shown(block.ep_size)}: is for the experts of Hugging Face models, and this model "
            "has none: deepspeed.moe.layer.MoE(..., ep_size=...) has it"
        )


def num_experts_of(module: nn.Module) -> int:
    """Return the number of experts of all ranks, of a module that has all of them, or a part since it was loaded or had
    an engine."""
    part = loaded_part(module) or part_of(module.down_proj)
    return (shape_of(module.down_proj) or (0,))[0] if part is None else part.num_experts


def convert_experts(
    module: nn.Module,
    parts: Parts,
    running: LayerRuntime,
    label: str,
    path: str,
    ep_size: int,
    wrappers: Mapping[str, nn.Module] | None = None,
) -> tuple[HuggingFaceLayer, dict[nn.Parameter, nn.Parameter]]:
    """Make a module of experts ours, in place, with this rank's experts only.

    Args:
        module: a module checked by :func:`~ds_fsmoe.engine.experts_checks.check_experts_modules`.
        parts: order, all-to-all, ops, hooks.
        running: the runtime of the engine.
        label: the label of the layer, in traces.
        path: the path of the layer in its model.
        ep_size: the ranks over which experts are spread.
        wrappers: path -> PEFT's wrappers of its parameters, the outermost first; checked as well.

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
        esp_size=running.block.esp_size,
        gate=gate,
    )
    index = running.shard_index(ep_size)
    state.contract = contract_of_shard(contract, index)
    part = ExpertPart("stacked", num_experts, ep_size, running.ep_rank(ep_size))
    shards = shards_of(contract, state.esp_size, index)
    wanted = {name: replace(part, shard=shard) for name, shard in shards.items()}
    before = take_up(module, (wrappers or {}).values(), wanted)
    if loaded_part(module) is None:
        replaced = _cut(module, wanted, state.group_name)
    else:
        replaced = {}
        _take_loaded(module, contract, part, state.group_name, path)
    if state.esp_size == 1:  # what shards compute has been tried
        with gathered(module.parameters()):
            state.own_forward = _own_forward_if_other(module, contract)
    module.__class__ = _ours(own_class)
    module.fsmoe = state
    replaced |= convert_wrappers(wrappers or {}, module, part.ep_rank)
    state.opaque = Handle(module, path)
    if any(map(is_shared_out, replaced.values())):
        running.groups(ep_size)
        share_out(replaced)
    found = {new: before.pop(old, old) for new, old in replaced.items()} | before
    replace_all(found, *next(iter((wrappers or {}).items()), (path, module)))
    return HuggingFaceLayer(module), found


def watch_router(model: nn.Module, path: str, module: FSMoEExperts) -> None:
    """Let what the router before a converted module chooses be seen and replaced, where the block around both runs.

    Args:
        model: the model.
        path: the path of the module of experts.
        module: that module.
    """
    outermost = next(iter(wrappers_around(model, path)), path)
    around = outermost.rpartition(".")[0]
    if model.get_submodule(around) is not module:
        module.fsmoe.watch = RouterWatch(model.get_submodule(around), module)


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _ours(own_class: type[nn.Module]) -> type[nn.Module]:
    """Return the class of converted modules of a class: the same for all of them."""
    if own_class not in _classes:
        _classes[own_class] = type(own_class.__name__, (FSMoEExperts, own_class), {"__module__": own_class.__module__})
    return _classes[own_class]


def _cut(module: nn.Module, parts: Mapping[str, ExpertPart], group_name: str) -> dict[nn.Parameter, nn.Parameter]:
    """Put this rank's experts, or shards of them, in the place of all of them, one weight at a time."""
    replaced = {}
    for name, part in parts.items():
        whole = getattr(module, name)
        mine = cut_parameter(whole, part, group_name)
        if mine is not whole:
            setattr(module, name, mine)
            replaced[mine] = whole
    if hasattr(module, "num_experts"):
        module.num_experts = part.num_local
    return replaced


def _take_loaded(module: nn.Module, contract: Contract, part: ExpertPart, group_name: str, path: str) -> None:
    """Take a module that was loaded with this rank's experts only.

    Raises:
        LayerError: it was loaded with others, or has no weights.
    """
    loaded = loaded_part(module)
    if loaded != part:
        raise LayerError(
            f"{path} was loaded with {loaded}, and here has to be {part}: give own_experts() and initialize() the same "
            "config"
        )
    for name in contract.weights:
        tag_as_experts(getattr(module, name), part, group_name)
    unmark(module)


def _own_forward_if_other(module: nn.Module, contract: Contract) -> OwnForward | None:
    """Return the module's own forward if it computes something else than the contract says, tried on a few rows."""
    own = _eager_forward(module, type(module))
    weight = getattr(module, contract.down)
    if weight.is_meta or not weight.numel():
        return None
    width = shape_of(weight)[2 if contract.is_transposed else 1]
    num_local = weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    x_RM = torch.randn(min(_FEW_ROWS, num_local), width, generator=generator).to(weight)
    of_row_R = torch.arange(len(x_RM), device=weight.device)
    arguments = x_RM, of_row_R.unsqueeze(1), x_RM.new_ones(len(x_RM), 1)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        theirs = own(*arguments)
        ours = StackedExperts(module, contract).on_few_rows(x_RM, [1] * len(x_RM) + [0] * (num_local - len(x_RM)))
    if not theirs.isfinite().all():  # memory without weights: these come later
        return None
    scale = theirs.abs().max().clamp(min=1e-6)
    is_same = theirs.shape == ours.shape and bool(((theirs - ours).abs().max() / scale) <= _tolerance(weight.dtype))
    return None if is_same else own


def agree_on_forms(layers: Sequence[HuggingFaceLayer], group: dist.ProcessGroup | None = None) -> None:
    """Let all ranks compute the experts of a layer alike: where any rank has to call the module itself, all do, since
    its schedule has other tasks. Collective.

    Args:
        layers: the layers of these ranks.
        group: the ranks that run the layers; ``None``: all of the job.
    """
    if not layers or world_size_now() == 1:
        return
    of_ranks = on_every_rank([each.deepspeed_moe.fsmoe.own_forward is not None for each in layers], group)
    for layer, *is_called in zip(layers, *of_ranks, strict=True):
        if any(is_called):
            module = layer.deepspeed_moe
            module.fsmoe.own_forward = _eager_forward(module, own_class_of(module))


def _tolerance(dtype: torch.dtype) -> float:
    return max(_TOLERANCE, 4 * torch.finfo(dtype).eps)


def _eager_forward(module: nn.Module, own_class: type[nn.Module]) -> OwnForward:
    """Return the forward that the family wrote, beneath transformers' choice among implementations."""
    forward = own_class.forward
    return getattr(forward, "__wrapped__", forward).__get__(module)


def table_of(layers: Sequence[HuggingFaceLayer], model: nn.Module, stock: int) -> Message:
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
        own = own_class_of(inner).__name__
        parameters = [*inner.parameters(), *adapters_of(inner)]
        num_local = sum(map(numel_of, parameters))
        num_trained = sum(numel_of(each) for each in parameters if each.requires_grad)
        size_bytes = sum(numel_of(each) * each.element_size() for each in parameters)
        way = "written out" if inner.fsmoe.own_forward is None else "by autograd"
        kinds[own, layer.num_experts, layer.num_local_experts, num_local, num_trained, size_bytes, way] += 1
    heads = ("experts", "layers", "experts each", "of them here", "parameters here", "trained", "MiB here", "backward")
    rows = [
        (own, str(n), str(total), str(local), f"{n * numel:,}", f"{n * trained:,}", f"{n * size / 2**20:,.1f}", way)
        for (own, total, local, numel, trained, size, way), n in kinds.items()
    ]
    left = f"; {stock} layer(s) of deepspeed.moe.layer.MoE besides" if stock else ""
    family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    head = f"ds_fsmoe takes over the experts of {family}, over ep_size = {ep_size} rank(s){left}; all else is theirs"
    return Message([head, Table(heads, rows, indent="  ", has_rule=False)])


def log_table(layers: Sequence[HuggingFaceLayer], model: nn.Module, stock: int, has_stages: bool = False) -> None:
    """Log what was taken over, if anything was, on the first rank: of each stage, where the model has stages, which
    takes all ranks.

    Args:
        layers: the layers of this rank.
        model: the model.
        stock: the number of layers of ``deepspeed.moe.layer.MoE`` besides.
        has_stages: whether it is a ``PipelineModule``.
    """
    own = table_of(layers, model, stock) if layers else None
    stage = getattr(model, "stage_id", 0) if has_stages else 0
    told = dict(on_every_rank((stage, own))) if has_stages else {0: own}
    for number, table in sorted(told.items()):
        if table is not None:
            first, *rest = table.parts
            log_on_rank_0(Message([f"stage {number}: {first}", *rest]) if has_stages else table)
