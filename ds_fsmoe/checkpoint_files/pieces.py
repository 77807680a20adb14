# SPDX-License-Identifier: Apache-2.0
"""The index ``fsmoe_pieces.json``: where in a checkpoint's files each parameter's optimizer states are.

DeepSpeed lays parameters end to end and cuts the result by ranks. Where each parameter is becomes known on saving,
and is written down; so the states can be read in any other layout, and by programs without ranks.

Of stock's weights at ZeRO 3 it follows from the files. DeepSpeed cuts each flattened parameter into equal pieces, one
for each rank, and lays a rank's pieces of a sub-group of parameters end to end, in the order of ``param_shapes``.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import StrictBool, StrictFloat, StrictInt, StrictStr

from ds_fsmoe.checkpoint_files.expert_parts import whole_name
from ds_fsmoe.checkpoint_files.manifest import NAME as MANIFEST
from ds_fsmoe.checkpoint_files.manifest import FileName, Manifest, read_described
from ds_fsmoe.checkpoint_files.numbering import expert_name, stage_of_file
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.shapes import Counted, Listed, made

NAME = "fsmoe_pieces.json"
FORMAT = 1
MASTER = "fp32"
"""The item that is the parameter itself, in the precision in which it is optimized."""
WEIGHTS = "weights"
"""The item that is a parameter which is not optimized, where a rank's file has a piece of it."""
OPTIMIZER = "optimizer_state_dict"
"""Where a file has DeepSpeed's optimizer, and that has the one that computes."""
FLAT = "fp32_flat_groups"
"""Where a file of ZeRO 3 has the optimized tensors, one for each sub-group."""
FROZEN = "frozen_param_fragments"
"""Where a rank's file has its pieces of what is not optimized, by name."""

Keys = tuple[StrictStr | StrictInt, ...]


class Piece(NamedTuple):
    """The elements ``first`` to ``first + size`` of a parameter; they begin at element ``at`` of a group's tensors."""

    name: StrictStr
    """The parameter's name in the files: with the number of the expert, over all ranks."""
    first: Counted
    size: Counted
    at: Counted


@dataclass(frozen=True)
class Group:
    """The parameters whose states are in the same tensors of one file.

    Attributes:
        file: the file's name in the folder.
        items: maps the name of a state (``"fp32"``, ``"exp_avg"``) -> the keys and indices of its tensor in the file.
        scalars: the states that are one number for all parameters, such as ``"step"``.
        options: the optimizer's settings for the group, such as ``"lr"``.
        pieces: the pieces of parameters in these tensors.
    """

    file: FileName
    items: Mapping[StrictStr, Keys]
    scalars: Mapping[StrictStr, StrictFloat]
    options: Mapping[StrictStr, Any]
    pieces: Listed[Piece]


@dataclass(frozen=True)
class Index:
    """The index of a checkpoint's optimizer states.

    Attributes:
        optimizer: the name of the optimizer's class.
        groups: all groups.
        scaler: the numbers of the loss scaler.
    """

    optimizer: StrictStr
    groups: Listed[Group]
    scaler: Mapping[StrictStr, StrictBool | StrictInt | StrictFloat]

    @property
    def numel(self) -> int:
        """The number of all elements that are optimized or in pieces; of copies once, of each pipeline stage."""
        found = {
            (stage, piece.name, piece.first, piece.size)
            for group in self.groups
            for stage in (stage_of_file(group.file),)
            for piece in group.pieces
        }
        return sum(size for *_, size in found)

    def as_json(self) -> str:
        """Return the text of the file."""
        return json.dumps({"format": FORMAT} | vars(self) | {"numel": self.numel}, default=vars)


def merged(indices: Iterable[Index]) -> Index:
    """Merge what each rank knows; what several ranks have a copy of is kept once."""
    groups: dict[tuple[str, Keys, tuple[str, ...]], Group] = {}
    scaler: Mapping[str, float | bool] = {}
    optimizer = ""
    for index in indices:
        for group in index.groups:
            names = tuple(piece.name for piece in group.pieces)
            groups.setdefault((group.file, next(iter(group.items.values()), ()), names), group)
        scaler, optimizer = scaler or index.scaler, index.optimizer
    return Index(optimizer, tuple(groups.values()), scaler)


def read_index(folder: Path, manifest: Manifest | None) -> Index | None:
    """Read the index of a checkpoint; return ``None`` if there is none.

    Args:
        folder: the checkpoint's folder.
        manifest: the manifest there; ``None`` if there is none.

    Raises:
        CheckpointError: it cannot be read, or its pieces do not make up whole parameters, or the files that the
            manifest names cannot have them.
    """

    def make(found: Mapping[str, Any]) -> Index:
        index = made(Index, found)
        _check_cover(index)
        if manifest is not None:
            _check_bounds(index, manifest)
        # An older version did not say so.
        if "numel" in found and found["numel"] != (numel := index.numel):
            raise ValueError(f"pieces of {numel} elements, of {found['numel']!r} that were saved")
        return index

    return read_described(folder / NAME, FORMAT, make)


def _check_cover(index: Index) -> None:
    """Check that the pieces of each parameter lie end to end from its first element on, in one file or in copies, and
    that all experts have as many of them."""
    # Each pipeline stage has a parameter that several share.
    sizes: dict[tuple[str, int], dict[int, int]] = {}
    in_files: set[tuple[str, str, int]] = set()
    for group in index.groups:
        stage, end = stage_of_file(group.file), 0
        filled = [each for each in group.pieces if each.size]
        for each in sorted(filled, key=lambda piece: piece.at):
            if each.at < end:
                raise ValueError(f"{each.name} overlaps another parameter in {group.file}, at element {each.at}")
            end = each.at + each.size
        for each in filled:
            if (group.file, each.name, each.first) in in_files:
                raise ValueError(f"{each.name} from element {each.first} on is there twice in {group.file}")
            in_files.add((group.file, each.name, each.first))
            if sizes.setdefault((each.name, stage), {}).setdefault(each.first, each.size) != each.size:
                raise ValueError(f"pieces of {each.name} overlap at element {each.first}")
    ends: dict[tuple[str | int, ...], int] = {}
    for (name, stage), size_at in sizes.items():
        end, expert = 0, expert_name(name)
        for first in sorted(size_at):
            if first != end:
                raise ValueError(f"pieces of {name} {'overlap' if first < end else 'leave a hole'} at element {end}")
            end = first + size_at[first]
        kind = (stage, whole_name(name)) if expert is None else (stage, expert.layer, expert.parameter)
        if end != ends.setdefault(kind, end):
            raise ValueError(f"pieces of {name} have {end} elements, and another expert's have {ends[kind]}")


def _check_bounds(index: Index, manifest: Manifest) -> None:
    """Check that there are no more pieces than the ranks of then can have made, and that files can have them."""
    num_pieces = sum(len(group.pieces) for group in index.groups)
    most = len({piece.name for group in index.groups for piece in group.pieces}) * manifest.sizes.world
    if num_pieces > most:
        raise ValueError(f"{num_pieces} pieces, and its parameters on {manifest.sizes.world} ranks have at most {most}")
    ends: dict[tuple[str, Keys], int] = {}
    for group in index.groups:
        end = max((piece.at + piece.size for piece in group.pieces), default=0)
        for keys in group.items.values():
            ends[group.file, keys] = max(end, ends.get((group.file, keys), 0))
    numel_in = Counter[str]()
    for (file, _), end in ends.items():
        numel_in[file] += end
    for file, numel in numel_in.items():
        if file not in manifest.files:
            raise ValueError(f"pieces in {file!r}, which {MANIFEST} does not name")
        if numel > manifest.files[file].size_bytes:  # an element has a byte at least
            raise ValueError(f"pieces of {numel} elements in {file}, which has {manifest.files[file].size_bytes} bytes")


_STATES_OF_RANK = re.compile(r"^(?:bf16_)?zero_pp_rank_(?P<rank>[0-9]{1,9})_mp_rank_00_optim_states\.pt$")
_WEIGHTS_OF_RANK = re.compile(r"^zero_pp_rank_(?P<rank>[0-9]{1,9})_mp_rank_00_model_states\.pt$")


def stock_index(names: Iterable[str], main: Mapping[str, Any], read: Callable[[str], Any]) -> Index:
    """Return an index of the weights alone: of the optimizer's states only DeepSpeed itself knows what they mean.

    Args:
        names: the files of the checkpoint.
        main: what the first rank's file of weights holds.
        read: reads a file.

    Raises:
        CheckpointError: files of ranks are missing, or parameters were shared out over some of the ranks.
    """
    names = list(names)
    states, weights = _by_rank(names, _STATES_OF_RANK), _by_rank(names, _WEIGHTS_OF_RANK)
    world = main["dp_world_size"]
    if sorted(states) != list(range(world)) or sorted(weights) != list(range(world)):
        raise CheckpointError(f"{len(states)} files of the optimizer and {len(weights)} of weights, for {world} ranks")
    if read(states[0])[OPTIMIZER].get("ds_zero_partition_groups") is not None:
        raise CheckpointError("experts were shared out over some of the ranks, by DeepSpeed's AutoEP")
    groups: list[Group] = []
    for rank in range(world):
        for number, shapes in enumerate(main["param_shapes"] or ()):
            items = {MASTER: (OPTIMIZER, FLAT, number)}
            groups.append(Group(states[rank], items, {}, {}, tuple(_end_to_end(shapes, rank, world))))
        for name, shape in (main["frozen_param_shapes"] or {}).items():
            pieces = tuple(_end_to_end({name: shape}, rank, world))
            groups.append(Group(weights[rank], {WEIGHTS: (FROZEN, name)}, {}, {}, pieces))
    return Index("", tuple(groups), {})


def _by_rank(names: list[str], pattern: re.Pattern[str]) -> dict[int, str]:
    found = ((pattern.match(each), each) for each in names)
    return {int(match["rank"]): name for match, name in found if match is not None}


def _end_to_end(shapes: Mapping[str, Any], rank: int, world: int) -> Iterator[Piece]:
    at = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        size = -(-numel // world)
        if numel > rank * size:
            yield Piece(name, rank * size, min(size, numel - rank * size), at)
        at += size
