# SPDX-License-Identifier: Apache-2.0
"""Finds the tensors of DeepSpeed's optimizers by parameter and element, under every wrapper.

Saving and loading call it, and so does the placement of experts when it moves them. One view serves both directions:
:func:`index_of` describes where a checkpoint will have them; :func:`fill` fills them from a checkpoint of another
layout.

At ZeRO 3 DeepSpeed flattens each parameter and splits it into one piece for each of its ranks. A rank's pieces of a
sub-group of parameters are concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import is_optimized_parameter
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups as stock_groups
from torch import nn

from ds_fsmoe.checkpoint_files.expert_parts import part_name, part_of, whole_name
from ds_fsmoe.checkpoint_files.numbering import EXPERTS, ExpertName, expert_name
from ds_fsmoe.checkpoint_files.pieces import (
    FLAT,
    FROZEN,
    MASTER,
    OPTIMIZER,
    WEIGHTS,
    Copies,
    Group,
    Index,
    Keys,
    Piece,
    Source,
)
from ds_fsmoe.checkpoint_files.tags import CheckpointError

Sources = Callable[[str, str, int, int], Iterable[Source]]
"""Takes this job's name for a parameter, a state, and which elements of it in this job's layout -> where they are."""


@dataclass
class LiveGroup:
    """Describes the parameters that share tensors of an optimizer.

    Attributes:
        names: the names of all parameters in the group, on any rank.
        pieces: their pieces on this rank.
        master: the tensor that is optimized; ``None``: the parameter itself.
        state: the optimizer's state for it.
        options: the optimizer's settings.
        keys: the keys of the master in the file.
        state_keys: the keys of the states in the file.
    """

    names: tuple[str, ...]
    pieces: tuple[Piece, ...]
    tensor: torch.Tensor
    master: torch.Tensor | None
    state: dict[str, Any]
    options: dict[str, Any]
    keys: Keys
    state_keys: Keys

    def per_element(self) -> dict[str, torch.Tensor]:
        """Return the states that have a number for each element."""
        size = self.tensor.numel()
        found = {name: each for name, each in self.state.items() if torch.is_tensor(each) and each.numel() == size}
        return {name: each for name, each in found.items() if each.dim() > 0}

    def scalars(self) -> dict[str, float]:
        """Return the states that are one number."""
        found = {name: each for name, each in self.state.items() if name not in self.per_element()}
        return {
            name: float(each)
            for name, each in found.items()
            if isinstance(each, (int, float)) or (torch.is_tensor(each) and each.numel() == 1)
        }

    def others(self) -> list[str]:
        """Return the names of all other states, which cannot be interpreted."""
        known = {*self.per_element(), *self.scalars()}
        return [name for name, each in self.state.items() if name not in known and each is not None]


def names_in_files(engine: Any) -> dict[nn.Parameter, str]:
    """Return this rank's parameters -> names in files, with the expert's number over all ranks or that of a part."""
    found = {}

    @cache
    def first(path: str) -> int:
        layer = engine.fsmoe.layers[path]
        return stock_groups._get_expert_parallel_rank(layer.ep_group_name) * layer.num_local_experts

    for name, parameter in engine.module.named_parameters():
        expert, part = expert_name(name), part_of(parameter)
        if part is not None:
            name = part_name(name, part.number)
        if expert is not None:
            name = str(ExpertName(expert.layer, first(expert.layer) + expert.number, expert.parameter))
        found[parameter] = name
    return found


def live_groups(engine: Any) -> list[LiveGroup] | None:
    """Return the groups of an engine without tensor parallelism; ``None`` for an unknown optimizer."""
    outer, names = engine.optimizer, names_in_files(engine)
    base = outer if isinstance(outer, torch.optim.Optimizer) else getattr(outer, "optimizer", None)
    if base is None:
        return None
    if isinstance(outer, DeepSpeedZeroOptimizer_Stage3):
        return _at_stage_3(outer, base, names)
    found: list[LiveGroup] = []
    for number, options in enumerate(base.param_groups):
        for place, tensor in enumerate(options["params"]):
            described = _described(outer, base, number, place, len(found), tensor, names)
            if described is None:
                return None
            parameters, pieces, master, keys, state_keys = described
            named = tuple(names[each] for each in parameters)
            state = base.state.get(tensor, {})
            found.append(LiveGroup(named, tuple(pieces), tensor, master, state, options, keys, state_keys))
    return found


def _at_stage_3(outer: Any, base: Any, names: Mapping[nn.Parameter, str]) -> list[LiveGroup] | None:
    """Return the groups of ZeRO 3's optimizer; ``None`` if its tensors are not in memory."""
    found: list[LiveGroup] = []
    # In this order the states are numbered in the file.
    order = sorted(range(len(outer.fp16_groups)), key=outer.sub_group_to_group_id.__getitem__)
    for at, number in enumerate(order):
        parameters, tensor = outer.fp16_groups[number], outer.fp32_partitioned_groups_flat[number]
        if tensor.numel() != sum(each.ds_tensor.ds_numel for each in parameters):
            return None  # swapped out
        named, pieces = tuple(names[each] for each in parameters), tuple(_end_to_end(parameters, names))
        state, options = base.state.get(tensor, {}), base.param_groups[outer.sub_group_to_group_id[number]]
        keys, state_keys = (OPTIMIZER, FLAT, number), (OPTIMIZER, OPTIMIZER, "state", at)
        found.append(LiveGroup(named, pieces, tensor, tensor, state, options, keys, state_keys))
    return found


def _described(
    outer: Any, base: Any, number: int, place: int, at: int, tensor: torch.Tensor, names: Mapping[nn.Parameter, str]
) -> tuple[Iterable[nn.Parameter], Iterable[Piece], torch.Tensor | None, Keys, Keys] | None:
    if isinstance(outer, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        is_zero = isinstance(outer, DeepSpeedZeroOptimizer)
        parameters = (outer.bit16_groups if is_zero else outer.bf16_groups)[number]
        listed = is_zero and outer.elastic_checkpoint
        states: Keys = (OPTIMIZER, "base_optimizer_state", *((number,) if listed else ("state", at)))
        return parameters, _of_fragments(parameters, names), tensor, (OPTIMIZER, _FP32, number), states
    if isinstance(outer, FP16_Optimizer):
        parameters, keys = outer.fp16_groups[number], ("optimizer", "fp32_groups_flat", number)
        return parameters, _end_to_end(parameters, names), tensor, keys, (*_INNER, at)
    if isinstance(outer, FP16_UnfusedOptimizer):
        parameters, keys = [outer.fp16_groups[number][place]], ("optimizer", "fp32_groups", number, place)
        return parameters, _end_to_end(parameters, names), tensor, keys, (*_INNER, at)
    if outer is base and tensor in names:
        return [tensor], _end_to_end([tensor], names), None, (), ("optimizer", "state", at)
    return None


_FP32 = "single_partition_of_fp32_groups"
_INNER: Keys = ("optimizer", OPTIMIZER, "state")


def _of_fragments(parameters: Iterable[nn.Parameter], names: Mapping[nn.Parameter, str]) -> Iterator[Piece]:
    for each in parameters:
        if (link := each._hp_mapping) is not None:
            of, at = link.lp_fragment_address, link.get_hp_fragment_address()
            yield Piece(names[each], of.start, of.numel, at.start)


def _end_to_end(parameters: Iterable[nn.Parameter], names: Mapping[nn.Parameter, str]) -> Iterator[Piece]:
    at = 0
    for each in parameters:
        if (piece := piece_of(each, names[each], at)) is not None:
            yield piece
        at += each.ds_tensor.ds_numel if hasattr(each, "ds_tensor") else each.numel()


def piece_of(parameter: nn.Parameter, name: str, at: int = 0) -> Piece | None:
    """Return this rank's elements of a parameter; ``None`` if it has only padding.

    Args:
        parameter: a parameter, which ZeRO 3 may have partitioned.
        name: its name in the files.
        at: the start of its piece in the tensor that has it.
    """
    if not hasattr(parameter, "ds_tensor"):
        return Piece(name, 0, parameter.numel(), at)
    first = parameter.ds_zero_partition_rank * parameter.ds_tensor.ds_numel
    size = min(parameter.ds_tensor.ds_numel, parameter.ds_numel - first)
    return Piece(name, first, size, at) if size > 0 else None


def index_of(engine: Any, file: str, frozen_file: str | None = None) -> Index | None:
    """Return where this rank's states will be in the checkpoint.

    Args:
        engine: our engine.
        file: the file that DeepSpeed writes them to.
        frozen_file: the file with this rank's pieces of frozen parameters, at ZeRO 3.

    Returns:
        ``None`` if the optimizer has states that cannot be moved to another layout.
    """
    groups = live_groups(engine) if engine.optimizer is not None else []
    if groups is None or any(each.others() for each in groups):
        return None
    described = tuple(
        Group(
            file,
            ({} if each.master is None else {MASTER: each.keys})
            | {name: (*each.state_keys, name) for name in each.per_element()},
            each.scalars(),
            _plain(each.options),
            each.pieces,
        )
        for each in groups
    )
    if frozen_file is not None:
        described += tuple(_frozen_groups(engine, frozen_file))
    scaler = _scaler(engine.optimizer)
    numbers = {} if scaler is None else {name: each for name, each in vars(scaler).items() if _is_number(each)}
    return Index(optimizer_name(engine), described, numbers)


def _frozen_groups(engine: Any, file: str) -> Iterator[Group]:
    """Return where this rank's pieces of frozen parameters will be at ZeRO 3: in its file of weights."""
    for parameter, name in names_in_files(engine).items():
        if is_optimized_parameter(parameter) or not hasattr(parameter, "ds_id"):
            continue
        if (piece := piece_of(parameter, name)) is not None:
            yield Group(file, {WEIGHTS: (FROZEN, engine.param_names[parameter])}, {}, {}, (piece,))


def fill(engine: Any, index: Index, sources: Sources, place: Path, has_masters: bool) -> None:
    """Fill the optimizer with the states of a checkpoint.

    Args:
        engine: the engine, whose parameters are loaded already.
        index: the index of the checkpoint; of this rank's stage, in a pipeline.
        sources: returns where the checkpoint's states are.
        place: the checkpoint's folder, for messages.
        has_masters: whether the optimizer has its copies of the parameters already.

    Raises:
        CheckpointError: one of the two lacks parameters of the other, or states do not fit here.
    """
    groups = live_groups(engine)
    if groups is None:
        raise CheckpointError(
            f"{place}: the states of {type(engine.optimizer).__name__} cannot be converted to another layout"
        )
    copies, saved = Copies(), _with_states(index)
    for group in groups:
        of = next((saved[kind] for kind in map(_kind, group.names) if kind in saved), None)
        if of is None:
            raise CheckpointError(f"{place} has no optimizer states for {', '.join(group.names[:3])}")
        _fill_options(group.options, of.options)
        items = [name for name in of.items if name != MASTER]
        for item in items:
            if item not in group.per_element():
                group.state[item] = torch.zeros_like(group.tensor, memory_format=torch.preserve_format)
        for name, value in of.scalars.items():
            group.state[name] = _as_before(group.state.get(name), value)
        targets = {item: group.state[item].detach().view(-1) for item in items}
        if group.master is not None and not has_masters:  # else the parameter itself, which is loaded
            targets[MASTER] = group.master.detach().view(-1)
        for piece in group.pieces:
            for item, target in targets.items():
                found = sources(piece.name, item, piece.first, piece.size)
                copies.add(found, target[piece.at : piece.at + piece.size])
        if group.state:
            _base(engine.optimizer).state[group.tensor] = group.state
    copies.run()
    scaler = _scaler(engine.optimizer)
    for name, value in index.scaler.items():
        if scaler is not None and _is_number(getattr(scaler, name, None)):
            setattr(scaler, name, type(getattr(scaler, name))(value))


def _with_states(index: Index) -> dict[str, Group]:
    """Return kind -> group with states of it: numbers of experts and ranks differ by layout."""
    of_names = {piece.name: group for group in index.groups for piece in group.pieces if WEIGHTS not in group.items}
    found: dict[str, Group] = {}
    for name, group in of_names.items():
        found.setdefault(_kind(name), group)
    return found


def _kind(name: str) -> str:
    """Return the common part of the names of a parameter, over experts and ranks."""
    expert = expert_name(name)
    return whole_name(name) if expert is None else f"{expert.layer}{EXPERTS}*.{expert.parameter}"


def refresh_masters(engine: Any) -> None:
    """Refresh the optimizer's copies after only weights were loaded. DeepSpeed does so with ZeRO only; in a pipeline,
    before stages share their common parameters."""
    is_due = not engine.zero_optimization() or engine.pipeline_parallelism
    if is_due and hasattr(engine.optimizer, "refresh_fp32_params"):
        engine.optimizer.refresh_fp32_params()


def round_weights(engine: Any) -> None:
    """Copy the optimizer's master copies into the weights, in the weights' dtype. Collective."""
    if hasattr(engine.optimizer, "update_lp_params"):
        engine.optimizer.update_lp_params()
        return
    parameters = {name: each.data for each, name in names_in_files(engine).items()}
    for group in live_groups(engine) or ():
        for piece in group.pieces if group.master is not None else ():
            values = group.master.detach().view(-1)[piece.at : piece.at + piece.size]
            parameters[piece.name].view(-1)[piece.first : piece.first + piece.size].copy_(values)


def reads_own_states(engine: Any) -> bool:
    """Return True if DeepSpeed can read the optimizer states that it has written.

    For bf16 in a pipeline without ZeRO, it looks for them in another place than it wrote them to.
    """
    return engine.zero_optimization() or not isinstance(engine.optimizer, BF16_Optimizer)


def check_states(engine: Any, index: Index | None, place: Path) -> None:
    """Check, before anything is loaded, that the optimizer's states can be moved to this job's layout.

    Args:
        engine: our engine.
        index: the index of the checkpoint; of this rank's stage, in a pipeline.
        place: the checkpoint's folder, for messages.

    Raises:
        CheckpointError: they cannot be moved; names the reason.
    """
    if index is None:
        raise CheckpointError(
            f"{place} does not contain the layout of its optimizer states (saved by stock DeepSpeed, by an older "
            "version, or with an unknown optimizer)"
        )
    here = {_kind(name) for group in live_groups(engine) or () for name in group.names}
    there = _with_states(index).keys()
    if here != there:
        raise CheckpointError(
            f"{place}: parameters with optimizer states in the job only: {', '.join(sorted(here - there)) or 'none'}; "
            f"in the checkpoint only: {', '.join(sorted(there - here)) or 'none'}"
        )


def optimizer_name(engine: Any) -> str:
    """Return the name of the optimizer class that computes, inside DeepSpeed's wrapper."""
    return "none" if engine.optimizer is None else type(_base(engine.optimizer)).__name__


def check_settings(engine: Any, place: Path) -> None:
    """Check, after loading, states of an unknown optimizer, such as those of stock DeepSpeed.

    Raises:
        CheckpointError: the optimizer's groups lack settings that it needs, because they came from another one.
    """
    base = _base(engine.optimizer)
    groups, wanted = getattr(base, "param_groups", ()), getattr(base, "defaults", {})
    missing = sorted({name for group in groups for name in wanted if name not in group})
    if missing:
        raise CheckpointError(
            f"{place} has states of another optimizer than {optimizer_name(engine)}: its groups lack "
            f"{', '.join(missing)}. Load it with load_optimizer_states=False (weights only)"
        )


def _base(outer: Any) -> Any:
    return outer if isinstance(outer, torch.optim.Optimizer) else getattr(outer, "optimizer", outer)


def _scaler(outer: Any) -> Any:
    return getattr(outer, "loss_scaler", None) or getattr(outer, "loss_scale_config", None)


def _is_number(each: Any) -> bool:
    return type(each) in (int, float, bool)


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: list(each) if isinstance(each, (list, tuple)) else each
        for name, each in options.items()
        if name != "params" and (_is_number(each) or (isinstance(each, (list, tuple)) and all(map(_is_number, each))))
    }


def _fill_options(options: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for name, value in saved.items():
        now = options.get(name)
        if isinstance(now, tuple) and isinstance(value, list):
            options[name] = tuple(value)
        elif now is None or _is_number(now):
            options[name] = value


def _as_before(now: Any, value: float) -> Any:
    if isinstance(now, int) and not isinstance(now, bool):
        return int(value)
    return value if isinstance(now, float) else torch.tensor(value)
