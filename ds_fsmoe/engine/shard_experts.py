# SPDX-License-Identifier: Apache-2.0
"""Splits experts of Hugging Face models, with adapters: over ranks, and along their width, one weight at a time.

``convert_experts`` calls it for each module, ``restore_model`` when an engine has ended. It decides which part a rank
has; ``ds_fsmoe/checkpoint_files/expert_parts.py`` describes a part.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from deepspeed.utils import groups as stock_groups
from torch import nn

from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart, Shard, describe_as, part_of
from ds_fsmoe.components.expert_compute.contract import Contract, contract_of, shape_of
from ds_fsmoe.components.expert_compute.grouped_products import takes_grouped
from ds_fsmoe.components.expert_compute.stacked_experts import StackedExperts
from ds_fsmoe.components.expert_compute.stacked_forms import OwnForward
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.imported_later import Finder
from ds_fsmoe.config.reading import BLOCK, ConfigError
from ds_fsmoe.distributed.partitioned import gather_module_by_module, gather_with, gathered, is_shared_out, run_compiled
from ds_fsmoe.distributed.topology import layout, world_size_now
from ds_fsmoe.layer.expert_cache import with_weights
from ds_fsmoe.layer.experts_layer import FSMoEExperts, FSMoEParamWrapper, loaded_part
from ds_fsmoe.layer.opaque import Handle
from ds_fsmoe.layer.parts import LayerError
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.measuring.packing_times import ExpertSizes, pack_by_times
from ds_fsmoe.measuring.stopwatch import Stopwatch
from ds_fsmoe.planning.chunks import MICRO_OP_BYTES
from ds_fsmoe.planning.lina.packing import packings
from ds_fsmoe.terminal.tables import Message

# ---- Cuts one parameter of experts to this rank's part, tagged so that DeepSpeed knows it for one of experts


PLACEMENT = "autoep_expert"
"""The family of parameters that DeepSpeed's ZeRO 3 shards over the ranks that hold the same experts."""


def shard_parameter(whole: nn.Parameter, part: ExpertPart, group_name: str) -> nn.Parameter:
    """Return this rank's part of a parameter, tagged for DeepSpeed as one of experts.

    If the part is the whole, it returns the parameter itself, with its attributes.

    Args:
        whole: the parameter, which ``zero.Init`` may have partitioned over all ranks.
        part: this rank's part.
        group_name: DeepSpeed's name of the ranks that share the experts.
    """
    if part_of(whole) == part or (part.num_parts == 1 and not is_shared_out(whole)):
        tag_as_experts(whole, part, group_name)
        return whole
    with gathered([whole]):
        mine = nn.Parameter(part.take(whole.data).clone(), requires_grad=whole.requires_grad)
    if not is_shared_out(whole):
        vars(mine).update(vars(whole))
    tag_as_experts(mine, part, group_name)
    return mine


def tag_as_experts(mine: nn.Parameter, part: ExpertPart, group_name: str) -> None:
    """Tag a parameter for DeepSpeed as one of experts, and for us as a part."""
    mine.allreduce, mine.group_name = False, group_name
    mine.ds_zero_placement_family, mine.ds_zero_partition_group_name = PLACEMENT, group_name
    describe_as(mine, part)


def share_out_over_replicas(parameters: Sequence[nn.Parameter], of_zero: nn.Parameter) -> None:
    """Partition parameters of experts over the ranks that have the same experts. Collective over these.

    Args:
        parameters: the parameters, tagged as experts.
        of_zero: any parameter that ``zero.Init`` has partitioned.
    """
    for each in parameters:
        each.ds_zero_partition_process_group = stock_groups._get_expert_data_parallel_group(each.group_name)
    of_zero.convert_to_zero_parameters(param_list=list(parameters))


# ---- Shards the experts of Hugging Face models along their hidden width, and refuses those that cannot be sharded
# rightly


_FEW = 3
"""As many experts and rows are tried."""
_TOLERANCE = 1e-3


def shards_of(contract: Contract, count: int, index: int) -> dict[str, Shard | None]:
    """Return weight -> the shard of each of its experts on one of ``count`` ranks; ``None`` for a whole weight.

    The first product is split along its outputs, gate and value alike, the second along its inputs. The results of all
    shards add up to the expert's, so only the first shard adds the last bias.
    """
    if count == 1:
        return dict.fromkeys(contract.weights)
    pieces = 2 if contract.has_gate and contract.is_concatenated else 1
    up, down = (2, 1) if contract.is_transposed else (1, 2)
    found: dict[str, Shard | None] = {
        contract.up: Shard(count, index, up, pieces),
        contract.down: Shard(count, index, down),
    }
    if contract.has_bias:
        found[f"{contract.up}_bias"] = Shard(count, index, 1, pieces)
        found[f"{contract.down}_bias"] = Shard(count, index, None)
    return found


def contract_of_shard(contract: Contract, index: int) -> Contract:
    """Return the contract of the weights of a module of shards."""
    return contract if index == 0 else replace(contract, adds_down_bias=False)


def check_shards_of_experts(
    block: FSMoEBlock, ds_config: Mapping[str, Any], experts: Mapping[str, nn.Module], adapted: Iterable[str] = ()
) -> None:
    """Refuse experts that cannot be split into as many shards as a block asks for. It needs no process group.

    Args:
        block: the block.
        ds_config: the whole DeepSpeed config.
        experts: the modules of experts, by name.
        adapted: the names of modules with adapters.

    Raises:
        ConfigError, LayerError: name the experts and the remedy.
    """
    count = block.esp_size
    if count == 1 or not experts:
        return
    said = f"{BLOCK}.expert_tensor_parallel_size = {count}"
    if ds_config.get("zero_optimization", {}).get("stage", 0) == 3:
        raise ConfigError(
            f"{said}: not supported at ZeRO 3 with experts of a Hugging Face model ({next(iter(experts))}); remove "
            "it, or use stage 2"
        )
    for name in adapted:
        raise ConfigError(f"{said}: not supported for {name}, whose experts have adapters; remove it")
    for name, module in experts.items():
        contract = contract_of(module)
        if loaded_part(module) is not None:
            raise LayerError(
                f"{said}: not supported for {name}, which was loaded with this rank's experts only; remove it"
            )
        if contract.has_post_expert_norm:
            raise LayerError(
                f"{said}: {name} normalizes the output of its experts, of which a shard has only a part; use 1"
            )
        part = part_of(getattr(module, contract.down))
        if part is not None and part.shard is not None:
            if part.shard.count == count:
                continue  # tried when they were cut
            raise LayerError(
                f"{said}: an earlier engine left {name} in {part.shard.count} shards: call "
                "ds_fsmoe.make_whole(model) on every rank first, and pass its parameters to initialize()"
            )
        down = shape_of(getattr(module, contract.down)) or (0, 0, 0)
        hidden = down[1] if contract.is_transposed else down[2]
        if hidden % count:
            choices = ", ".join(str(each) for each in range(1, hidden + 1) if hidden % each == 0)
            raise LayerError(f"{said}: must divide the hidden width of {name} ({hidden}); the choices are {choices}")
        if not computes_by_contract(module, contract, count):
            raise LayerError(
                f"{said}: the experts of {name}, a {type(module).__name__}, give other results in shards: their "
                "forward differs from transformers' contract, or mixes elements of the hidden width; use 1"
            )


@torch.no_grad()
def computes_by_contract(module: nn.Module, contract: Contract, count: int = 1) -> bool:
    """Return True if a module's own forward follows the contract of its weights, tested on a few rows.

    Args:
        module: a module of experts with weights on this rank; without weights the result is True.
        contract: the contract of its weights.
        count: the number of shards of each expert, whose results have to add up to the whole.
    """
    weights = {name: getattr(module, name).detach() for name in contract.weights}
    down = weights[contract.down]
    if down.is_meta or not down.numel():
        return True
    few = {name: each[:_FEW] for name, each in weights.items()}
    num_rows = len(few[contract.down])
    width = down.shape[2] if contract.is_transposed else down.shape[1]
    x_RM = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(0)).to(down)
    index_R1 = torch.arange(num_rows, device=down.device).unsqueeze(1)
    ours = torch.zeros_like(x_RM, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        own = eager_forward(with_weights(module, few), type(module))
        theirs = own(x_RM, index_R1, x_RM.new_ones(num_rows, 1)).float()
        for index in range(count):
            shards = shards_of(contract, count, index)
            cut = {name: each if shards[name] is None else shards[name].take(each) for name, each in few.items()}
            shard = StackedExperts(with_weights(module, cut), contract_of_shard(contract, index))
            ours += shard.on_few_rows(x_RM, [1] * num_rows).float()
    if not theirs.isfinite().all():  # memory without weights: these come later
        return True
    scale, tolerance = theirs.abs().max().clamp(min=1e-6), max(_TOLERANCE, 4 * torch.finfo(down.dtype).eps)
    return theirs.shape == ours.shape and bool((theirs - ours).abs().max() / scale <= tolerance)


def eager_forward(module: nn.Module, own_class: type[nn.Module]) -> OwnForward:
    """Return the forward that the model family wrote, below transformers' choice among implementations."""
    forward = own_class.forward
    return getattr(forward, "__wrapped__", forward).__get__(module)


# ---- Chooses over how many ranks the experts of a Hugging Face model are spread, by expert packing (Lina,
# ATC'23)


CHOSEN = "fsmoe_packed_over"
"""The attribute of a module of experts with the number of ranks that was chosen for it, before it has an engine."""
_TYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "half"), torch.float16),
    **dict.fromkeys(("fp32", "float32", "float"), torch.float32),
}
"""DeepSpeed's words for the types in which one may train."""


def type_of_run(ds_config: Mapping[str, Any], device_type: str) -> torch.dtype | None:
    """Return the dtype in which experts compute under a DeepSpeed config; ``None`` for the dtype of their weights.

    Args:
        ds_config: the config.
        device_type: the kind of device, such as "cuda": each has its own dtype for autocast.
    """
    for name in ("bf16", "bfloat16", "fp16"):
        if _is_on(ds_config.get(name)):
            return _TYPES[name]
    autocast = ds_config.get("torch_autocast") or {}
    if not _is_on(autocast):
        return None
    own = torch.get_autocast_dtype(device_type)
    return _TYPES.get(str(autocast["dtype"]).removeprefix("torch."), own) if "dtype" in autocast else own


def _is_on(block: Any) -> bool:
    return isinstance(block, Mapping) and block.get("enabled") is True


def packed_ep_size(
    block: FSMoEBlock,
    experts: Iterable[nn.Module],
    ep_sizes: Iterable[int],
    device: torch.device,
    expert_before_data: bool,
    dtype: torch.dtype | None = None,
) -> int:
    """Return the number of ranks over which experts are spread so that their micro-ops take as long as the
    all-to-all's.

    Collective over all ranks of the job, unless it was chosen when the modules were made.

    Args:
        block: the options.
        experts: the modules of experts.
        ep_sizes: the numbers of ranks over which all of them can be spread.
        device: the device of this rank.
        expert_before_data: see :func:`~ds_fsmoe.distributed.topology.layout`.
        dtype: the dtype in which experts will compute; ``None``: the dtype of their weights.

    Raises:
        ConfigError: on every rank, if the config forbids choices by measurement; names the size that would be chosen.
        MeasuringError: on every rank, if a measurement has failed.
    """
    modules, sizes = list(experts), list(ep_sizes)
    ep_size = noted_ep_size(modules, sizes)
    if ep_size is None:
        ep_size = _chosen(block, modules, sizes, device, expert_before_data, dtype)
    note_ep_size(modules, ep_size)
    return ep_size


def noted_ep_size(modules: Iterable[nn.Module], sizes: Iterable[int]) -> int | None:
    """Return the number of ranks that was chosen for modules of experts when they were made; ``None``: none was.

    Args:
        modules: the modules.
        sizes: the numbers of ranks over which all of them can be spread.
    """
    modules = list(modules)
    loaded = {part.ep_size for each in modules if (part := loaded_part(each)) is not None}
    # With all experts on every rank there is no part to tell.
    return max(loaded | ({getattr(each, CHOSEN, 0) for each in modules} & set(sizes)), default=None)


def num_experts_of(module: nn.Module) -> int:
    """Return the number of experts of a module over all ranks, also for a module that has only this rank's part."""
    part = loaded_part(module) or part_of(module.down_proj)
    return (shape_of(module.down_proj) or (0,))[0] if part is None else part.num_experts


def note_ep_size(modules: Iterable[nn.Module], ep_size: int) -> None:
    """Keep the number of ranks that was chosen for modules of experts, on these."""
    for each in modules:
        setattr(each, CHOSEN, ep_size)


def _chosen(
    block: FSMoEBlock,
    modules: list[nn.Module],
    sizes: list[int],
    device: torch.device,
    expert_before_data: bool,
    dtype: torch.dtype | None,
) -> int:
    if len(packings(sizes)) == 1:
        log_on_rank_0(
            f"expert packing (lina): ep_size = {max(sizes)}, the only size that these ranks and experts allow"
        )
        return max(sizes)
    asked = block.gradient_partition.asked_bytes
    found = pack_by_times(
        Stopwatch(device),
        Counter(expert_sizes_of(each, dtype, block.esp_size, device) for each in modules),
        {each: layout(world_size_now(), each, block.esp_size, expert_before_data) for each in sizes},
        MICRO_OP_BYTES if asked is None else asked,
    )
    wanted = f'write "ep_size": {found.ep_size}'
    if block.deterministic:
        raise ConfigError(
            f'{BLOCK}.placement.policy = "lina" and {BLOCK}.deterministic = true cannot both be on: packing depends '
            f"on timings. It would choose ep_size = {found.ep_size}: {wanted} and remove the policy"
        )
    per_rank = " or ".join(map(str, found.experts_per_rank(found.ep_size)))
    head = (
        f"expert packing (lina): ep_size = {found.ep_size}, {per_rank} experts of a layer on each rank; {wanted} to "
        "keep it in later runs"
    )
    log_on_rank_0(Message([head, found.table()]))
    return found.ep_size


def expert_sizes_of(module: nn.Module, dtype: torch.dtype | None, sharing: int, device: torch.device) -> ExpertSizes:
    """Return the sizes of a module that has all of its experts; ``sharing`` ranks will share each."""
    contract = contract_of(module)
    up = getattr(module, contract.up)
    num_experts, *inner = shape_of(up) or (0, 0, 0)
    width, inside = inner if contract.is_transposed else inner[::-1]
    dtype, hidden = dtype or up.dtype, inside // (1 + contract.has_gate)
    is_grouped = takes_grouped((width, inside // sharing, hidden // sharing), (dtype,), device)
    return ExpertSizes(num_experts, width, hidden, contract.has_gate, dtype, is_grouped)


# ---- Takes over PEFT's adapters of experts: each rank keeps those of its own experts, beneath PEFT's own modules
#
# PEFT wraps the module of the experts once for each weight it adapts, and the wrappers lie around each other. Nothing
# of PEFT is imported here.


_WRAPPER = ("peft.tuners.lora.layer", "ParamWrapper")
_OF_PEFT = {
    "BaseTunerLayer": "an adapter of another kind; use LoRA's target_parameters",
    "AuxiliaryTrainingWrapper": "a second copy of them; train the experts themselves, or use LoRA's target_parameters",
}


def wrappers_around(model: nn.Module, path: str) -> dict[str, nn.Module]:
    """Return path -> PEFT's wrapper of parameters around an experts module, the outermost first.

    Args:
        model: the model.
        path: the path of the experts module.

    Raises:
        LayerError: PEFT has put another wrapper around the experts, which cannot run on parts of them; names it.
    """
    found: dict[str, nn.Module] = {}
    parent, _, own_name = path.rpartition(".")
    while parent:
        module = model.get_submodule(parent)
        bases = [(each.__module__, each.__name__) for each in type(module).__mro__]
        of_peft = [name for package, name in bases if package.partition(".")[0] == "peft"]
        if own_name == "base_layer" and _WRAPPER in bases:
            found = {parent: module, **found}
        elif what := next((_OF_PEFT[each] for each in of_peft if each in _OF_PEFT), None):
            raise LayerError(f"{path}: PEFT has wrapped the experts in a {type(module).__name__}, {what}")
        parent, _, own_name = parent.rpartition(".")
    return found


def check_wrappers(wrappers: Mapping[str, nn.Module], contract: Contract, num_experts: int) -> None:
    """Refuse adapters of experts that cannot be split correctly.

    Args:
        wrappers: path -> wrapper around one experts module.
        contract: the contract of the experts' weights.
        num_experts: the number of experts.

    Raises:
        LayerError: names the adapter and the reason.
    """
    for path, wrapper in wrappers.items():
        name = wrapper.parameter_name
        if name not in (contract.up, contract.down):
            raise LayerError(
                f"{path}: an adapter of {name} has one A for all experts, which cannot be distributed; "
                f"target_parameters can be {contract.up} and {contract.down}"
            )
        known = {f"{kind}.{adapter}.weight" for kind in ("lora_A", "lora_B") for adapter in wrapper.lora_A}
        present = {each for each, _ in wrapper.named_parameters() if not each.startswith("base_layer.")}
        if present != known:
            raise LayerError(
                f"{path}: has parameters {', '.join(sorted(present ^ known))} besides A and B of plain LoRA, which "
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
    """Convert PEFT's wrappers in place, so that they have the adapters of this rank's experts only.

    Args:
        wrappers: path -> a wrapper, the outermost first; checked by :func:`check_wrappers`.
        experts: the module inside, which is already converted.
        ep_rank: the index of this rank among those that share the experts.

    Returns:
        New parameter -> the one it replaces.
    """
    state, replaced = experts.fsmoe, {}
    for path, wrapper in wrappers.items():
        for modules, kind in ((wrapper.lora_A, "stacked"), (wrapper.lora_B, "innermost")):
            part = ExpertPart(kind, state.total_experts, state.ep_size, ep_rank)
            for linear in modules.values():
                whole = linear.weight
                mine = shard_parameter(whole, part, state.group_name)
                if mine is not whole:
                    linear.weight = mine
                    linear.out_features, linear.in_features = shape_of(mine)
                    replaced[mine] = whole
        wrapper.num_experts = experts.num_local_experts
        wrapper.__class__ = converted_class(FSMoEParamWrapper, type(wrapper))
        wrapper.opaque = Handle(wrapper, path)
    state.outermost = tuple(wrappers.values())[:1]
    return replaced


def adapters_of(experts: FSMoEExperts) -> Iterator[nn.Parameter]:
    """Return A and B of all adapters with which an experts module was converted."""
    module = next(iter(experts.fsmoe.outermost), experts)
    while module is not experts:
        for of_adapters in (module.lora_A, module.lora_B):
            yield from of_adapters.parameters()
        module = module.base_layer


def gather_as_they_run(model: nn.Module, layers: Sequence[FSMoEExperts]) -> None:
    """Make ZeRO 3 gather the weights of a layer for the calls of its experts.

    A and B are in modules without calls and therefore without hooks of ZeRO: they are gathered with the experts. So are
    the parameters of modules within the experts, such as a norm after them, which is called chunk by chunk.

    Args:
        model: the model.
        layers: the converted layers.
    """
    gather_module_by_module(model, layers)
    run_compiled(model)
    for each in layers:
        within = [parameter for child in each.children() for parameter in child.parameters()]
        gather_with(each, [*adapters_of(each), *within])


@functools.cache
def converted_class(ours: type[nn.Module], own_class: type[nn.Module]) -> type[nn.Module]:
    """Return the class of converted modules of a class: one for all of them, with the same name, which PEFT reads."""
    return type(own_class.__name__, (ours, own_class), {"__module__": own_class.__module__})


# ---- Lets PEFT make adapters for all experts of a model that was loaded with this rank's experts only
#
# Then each rank draws, or reads, the adapters of all experts, as one process does, and keeps those of its own when
# the model gets its engine: they are small compared with the experts.


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


PEFT_COUNTS_ALL = Finder("peft.tuners.lora.layer", _change)
"""Lets PEFT count all experts where only some are, from when it begins, whether PEFT is imported already or later."""
