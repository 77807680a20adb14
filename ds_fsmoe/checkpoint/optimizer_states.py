# SPDX-License-Identifier: Apache-2.0
"""Finds the tensors of DeepSpeed's optimizers by parameter and element, whichever wrapper is around them.

One view serves both directions: :func:`index_of` says where a checkpoint will have them; :func:`fill` fills them from
a checkpoint of another layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups as stock_groups
from torch import nn

from ds_fsmoe.checkpoint import shared_out
from ds_fsmoe.checkpoint.live_group import LiveGroup
from ds_fsmoe.checkpoint_files.expert_parts import part_name, part_of, whole_name
from ds_fsmoe.checkpoint_files.numbering import EXPERTS, ExpertName, expert_name
from ds_fsmoe.checkpoint_files.pieces import MASTER, WEIGHTS, Group, Index, Keys, Piece
from ds_fsmoe.checkpoint_files.sources import Copies, Source
from ds_fsmoe.checkpoint_files.tags import CheckpointError

Sources = Callable[[str, str, int, int], Iterable[Source]]
"""Takes this job's name for a parameter, a state, and which elements of it in this job's layout -> where they are."""


def names_in_files(engine: Any) -> dict[nn.Parameter, str]:
    """Map every parameter of this rank -> its name, with the expert's number over all ranks or that of a part."""
    found = {}

    @cache
    def first(path: str) -> int:
        layer = engine.fsmoe.layers[path]
        return stock_groups._get_expert_parallel_rank(layer.expert_group_name) * layer.num_local_experts

    for name, parameter in engine.module.named_parameters():
        expert, part = expert_name(name), part_of(parameter)
        if part is not None:
            name = part_name(name, part.number)
        if expert is not None:
            name = str(ExpertName(expert.layer, first(expert.layer) + expert.number, expert.parameter))
        found[parameter] = name
    return found


def live_groups(engine: Any) -> list[LiveGroup] | None:
    """Return the groups of an engine without tensor parallelism; ``None`` if its optimizer is not known."""
    outer, names = engine.optimizer, names_in_files(engine)
    base = outer if isinstance(outer, torch.optim.Optimizer) else getattr(outer, "optimizer", None)
    if base is None:
        return None
    if isinstance(outer, DeepSpeedZeroOptimizer_Stage3):
        return shared_out.live_groups_at_stage_3(outer, base, names)
    found, at = [], 0
    for number, options in enumerate(base.param_groups):
        for place, tensor in enumerate(options["params"]):
            described = _described(outer, base, number, place, at, tensor, names)
            if described is None:
                return None
            parameters, pieces, master, keys, state_keys = described
            named = tuple(names[each] for each in parameters)
            state = base.state.get(tensor, {})
            found.append(LiveGroup(named, tuple(pieces), tensor, master, state, options, keys, state_keys))
            at += 1
    return found


def _described(
    outer: Any, base: Any, number: int, place: int, at: int, tensor: torch.Tensor, names: Mapping[nn.Parameter, str]
) -> tuple[Iterable[nn.Parameter], list[Piece], torch.Tensor | None, Keys, Keys] | None:
    if isinstance(outer, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        is_zero = isinstance(outer, DeepSpeedZeroOptimizer)
        parameters = (outer.bit16_groups if is_zero else outer.bf16_groups)[number]
        top: Keys = ("optimizer_state_dict",)
        listed = is_zero and outer.elastic_checkpoint
        states: Keys = (*top, "base_optimizer_state", *((number,) if listed else ("state", at)))
        return parameters, _of_fragments(parameters, names), tensor, (*top, _FP32, number), states
    if isinstance(outer, FP16_Optimizer):
        parameters = outer.fp16_groups[number]
        pieces = list(_end_to_end(parameters, names))
        return parameters, pieces, tensor, ("optimizer", "fp32_groups_flat", number), (*_INNER, at)
    if isinstance(outer, FP16_UnfusedOptimizer):
        parameters = [outer.fp16_groups[number][place]]
        pieces = list(_end_to_end(parameters, names))
        return parameters, pieces, tensor, ("optimizer", "fp32_groups", number, place), (*_INNER, at)
    if outer is base and tensor in names:
        return [tensor], list(_end_to_end([tensor], names)), None, (), ("optimizer", "state", at)
    return None


_FP32 = "single_partition_of_fp32_groups"
_INNER: Keys = ("optimizer", "optimizer_state_dict", "state")


def _of_fragments(parameters: Iterable[nn.Parameter], names: Mapping[nn.Parameter, str]) -> list[Piece]:
    found = []
    for each in parameters:
        link = each._hp_mapping
        if link is not None:
            of, at = link.lp_fragment_address, link.get_hp_fragment_address()
            found.append(Piece(names[each], of.start, of.numel, at.start))
    return found


def _end_to_end(parameters: Iterable[nn.Parameter], names: Mapping[nn.Parameter, str]) -> Iterator[Piece]:
    at = 0
    for each in parameters:
        yield Piece(names[each], 0, each.numel(), at)
        at += each.numel()


def index_of(engine: Any, file: str, frozen_file: str | None = None) -> Index | None:
    """Return where this rank's states will be in the checkpoint.

    Args:
        engine: our engine.
        file: the file that DeepSpeed writes them to.
        frozen_file: the file that has this rank's pieces of the parameters that are not optimized, at ZeRO 3.

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
        described += tuple(shared_out.frozen_groups(engine, names_in_files(engine), frozen_file))
    return Index(optimizer_name(engine), described, _numbers(_scaler(engine.optimizer)))


def fill(engine: Any, index: Index, sources: Sources, place: Path, has_masters: bool) -> None:
    """Fill the optimizer with the states of a checkpoint.

    Args:
        engine: the engine, whose parameters are loaded already.
        index: the index of the checkpoint; of this rank's stage, in a pipeline.
        sources: says where the checkpoint's states are.
        place: the checkpoint's folder, for messages.
        has_masters: whether the optimizer has its copies of the parameters already.

    Raises:
        CheckpointError: one of the two lacks parameters of the other, or states cannot be put here.
    """
    groups = live_groups(engine)
    if groups is None:
        raise CheckpointError(f"{place}: the states of {type(engine.optimizer).__name__} cannot be laid out otherwise")
    copies = Copies()
    source = {piece.name: group for group in index.groups for piece in group.pieces if WEIGHTS not in group.items}
    in_source = _in_source(source)
    for group in groups:
        of = next((source[name] for name in map(in_source, group.names) if name is not None), None)
        if of is None:
            raise CheckpointError(f"{place} has no states of the optimizer for {', '.join(group.names[:3])}")
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
        if scaler is not None and type(getattr(scaler, name, None)) in (int, float, bool):
            setattr(scaler, name, type(getattr(scaler, name))(value))


def _in_source(source: Mapping[str, Group]) -> Callable[[str], str | None]:
    """Return a function that finds a name of the same parameter: numbers of experts and ranks differ by layout."""
    by_kind: dict[str, str] = {}
    for name in source:
        by_kind.setdefault(_kind(name), name)
    return lambda name: by_kind.get(_kind(name))


def _kind(name: str) -> str:
    """Return what the names of a parameter of any expert, or of any rank's part, have in common."""
    expert = expert_name(name)
    return whole_name(name) if expert is None else f"{expert.layer}{EXPERTS}*.{expert.parameter}"


def refresh_masters(engine: Any) -> None:
    """Refresh the optimizer's copies after only weights were loaded. DeepSpeed does so with ZeRO only; in a pipeline,
    before stages share what they have in common."""
    is_due = not engine.zero_optimization() or engine.pipeline_parallelism
    if is_due and hasattr(engine.optimizer, "refresh_fp32_params"):
        engine.optimizer.refresh_fp32_params()


def round_weights(engine: Any) -> None:
    """Give the weights the values of the optimizer's copies, in the weights' data type. Collective."""
    if hasattr(engine.optimizer, "update_lp_params"):
        engine.optimizer.update_lp_params()
        return
    parameters = {name: each.data for each, name in names_in_files(engine).items()}
    for group in live_groups(engine) or ():
        for piece in group.pieces if group.master is not None else ():
            values = group.master.detach().view(-1)[piece.at : piece.at + piece.size]
            parameters[piece.name].view(-1)[piece.first : piece.first + piece.size].copy_(values)


def reads_own_states(engine: Any) -> bool:
    """Return whether DeepSpeed reads the states of the optimizer that it has written. What it makes of bf16 in a
    pipeline without ZeRO, it looks for where it has not put it."""
    return engine.zero_optimization() or not isinstance(engine.optimizer, BF16_Optimizer)


def missing_and_unexpected(engine: Any, index: Index) -> tuple[list[str], list[str]]:
    """Return which optimized parameters a checkpoint's states lack, and which of its parameters this job lacks."""

    here = {_kind(name) for group in live_groups(engine) or () for name in group.names}
    names = {piece.name for group in index.groups for piece in group.pieces if WEIGHTS not in group.items}
    there = set(map(_kind, names))
    return sorted(here - there), sorted(there - here)


def optimizer_name(engine: Any) -> str:
    """Return the name of the optimizer class that computes, without DeepSpeed's wrapper."""
    return "none" if engine.optimizer is None else type(_base(engine.optimizer)).__name__


def settings_missing(engine: Any) -> list[str]:
    """Return the settings that an optimizer needs and its groups lack, because they came from another optimizer."""
    base = _base(engine.optimizer)
    groups, wanted = getattr(base, "param_groups", ()), getattr(base, "defaults", {})
    return sorted({name for group in groups for name in wanted if name not in group})


def _base(outer: Any) -> Any:
    return outer if isinstance(outer, torch.optim.Optimizer) else getattr(outer, "optimizer", outer)


def _scaler(outer: Any) -> Any:
    return getattr(outer, "loss_scaler", None) or getattr(outer, "loss_scale_config", None)


def _numbers(thing: Any) -> dict[str, float | bool]:
    found = {} if thing is None else vars(thing)
    return {name: each for name, each in found.items() if type(each) in (int, float, bool)}


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    def is_number(each: Any) -> bool:
        return type(each) in (int, float, bool)

    return {
        name: list(each) if isinstance(each, (list, tuple)) else each
        for name, each in options.items()
        if name != "params" and (is_number(each) or (isinstance(each, (list, tuple)) and all(map(is_number, each))))
    }


def _fill_options(options: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for name, value in saved.items():
        now = options.get(name)
        if isinstance(now, tuple) and isinstance(value, list):
            options[name] = tuple(value)
        elif now is None or type(now) in (int, float, bool):
            options[name] = value


def _as_before(now: Any, value: float) -> Any:
    if isinstance(now, int) and not isinstance(now, bool):
        return int(value)
    return value if isinstance(now, float) else torch.tensor(value)
