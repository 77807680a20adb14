# SPDX-License-Identifier: Apache-2.0
"""Counts the work that describing a checkpoint takes, at made-up lists of files and ranks. A count has no noise."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import ds_fsmoe
from ds_fsmoe.checkpoint_files.manifest import FileSum, LayerSizes, Manifest, Sizes
from ds_fsmoe.checkpoint_files.pieces import Group, Index, Piece

_PACKAGE = str(Path(ds_fsmoe.__file__).parent / "checkpoint")
ZERO_3 = Sizes(world=1, mp=1, pp=1, zero_stage=3, esp=1, dtype="bfloat16")


class Name(str):
    """A name that counts how often it is compared, ordered or looked up."""

    uses = 0

    def __eq__(self, other: object) -> bool:
        Name.uses += 1
        return str.__eq__(self, other)

    def __lt__(self, other: str) -> bool:
        Name.uses += 1
        return str.__lt__(self, other)

    def __hash__(self) -> int:
        Name.uses += 1
        return str.__hash__(self)


def work_of(call: Callable[[], Any]) -> int:
    """The lines of the package's checkpoint folders that a call executes, and what it does with names."""
    lines, before = 0, Name.uses

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        lines += event == "line"
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(outer)
    return lines + Name.uses - before


def stock_files(layers: int, experts: int, world: int) -> list[Name]:
    """The files of DeepSpeed's own MoE layers, sorted."""
    found = [f"layer_{at}_expert_{each}_mp_rank_00_model_states.pt" for at in range(layers) for each in range(experts)]
    found += [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(world)]
    found += [f"fsmoe_rank_{rank:05d}.pt" for rank in range(world)]
    return [Name(each) for each in sorted([*found, "mp_rank_00_model_states.pt", "fsmoe_pieces.json"])]


def manifest_of(files: list[Name], layers: int, experts: int, ep: int = 8) -> Manifest:
    """A manifest that names these files."""
    sizes = Sizes(world=1, mp=1, pp=1, zero_stage=1, esp=1, dtype="bfloat16")
    of_layers = tuple(LayerSizes(f"blocks.{at}.moe", experts, ep) for at in range(layers))
    return Manifest(sizes, of_layers, {}, {each: FileSum(1, "") for each in files})


def states_file(rank: int) -> str:
    """The file with a rank's optimizer states at ZeRO 3."""
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


NAMES = "blocks.{}.weight"


def shared_out(rank: int, parameters: int, world: int, size: int = 4, names: str = NAMES) -> Index:
    """The index of one rank at ZeRO 3: a piece of each parameter, end to end."""
    pieces = tuple(Piece(Name(names.format(at)), rank * size, size, at * size) for at in range(parameters))
    items = {item: ("optimizer_state_dict", item, 0) for item in ("fp32", "exp_avg", "exp_avg_sq")}
    return Index("Adam", (Group(states_file(rank), items, {"step": 1.0}, {"lr": 0.1}, pieces),), {})
