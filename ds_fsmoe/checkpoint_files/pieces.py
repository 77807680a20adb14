# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the index ``fsmoe_pieces.json``: where each parameter's optimizer states are in a checkpoint's
files.

It also finds consecutive elements of any tensor in the files. DeepSpeed concatenates parameters and splits the result
by ranks. The place of each parameter is known when saving and is recorded then. So the states can be read in any other
layout, and by programs without ranks. Saving, loading and ``whole`` call this module.

For stock's weights at ZeRO 3 the places follow from the files. DeepSpeed splits each flattened parameter into equal
pieces, one for each rank. It concatenates a rank's pieces of a sub-group of parameters, in the order of
``param_shapes``.
"""

from __future__ import annotations

import bisect
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import StrictBool, StrictFloat, StrictInt, StrictStr

from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart, whole_name
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
    """Represents the elements ``first`` to ``first + size`` of a parameter; they begin at element ``at`` of a group's
    tensors."""

    name: StrictStr
    """The parameter's name in the files: with the number of the expert, over all ranks."""
    first: Counted
    size: Counted
    at: Counted


@dataclass(frozen=True)
class Group:
    """Describes the parameters whose states are in the same tensors of one file.

    Attributes:
        file: the file's name in the folder.
        items: the name of a state (``"fp32"``, ``"exp_avg"``) -> the keys and indices of its tensor in the file.
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
    """Represents the index of a checkpoint's optimizer states.

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
        """Return the number of all elements that are optimized or in pieces; copies count once for each pipeline
        stage."""
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
    """Merge the indices of all ranks; entries of several ranks are kept once."""
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
        CheckpointError: it cannot be read, its pieces are not whole parameters, or the files of the manifest cannot
            have them.
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
    """Check that the pieces of each parameter are consecutive from its first element on, in one file or in copies.

    All experts must have as many pieces.
    """
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
    """Check that the number of pieces is possible for the ranks that saved them, and that files can have them."""
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
    """Return an index of the weights only: the layout of the optimizer states is private to DeepSpeed.

    Args:
        names: the files of the checkpoint.
        main: the content of the first rank's file of weights.
        read: reads a file.

    Raises:
        CheckpointError: files of ranks are missing, or parameters were partitioned over some of the ranks.
    """
    names = list(names)
    states, weights = _by_rank(names, _STATES_OF_RANK), _by_rank(names, _WEIGHTS_OF_RANK)
    world = main["dp_world_size"]
    if sorted(states) != list(range(world)) or sorted(weights) != list(range(world)):
        raise CheckpointError(f"{len(states)} files of the optimizer and {len(weights)} of weights, for {world} ranks")
    if read(states[0])[OPTIMIZER].get("ds_zero_partition_groups") is not None:
        raise CheckpointError("experts were distributed over some of the ranks by DeepSpeed's AutoEP")
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


# ---- Says where in files consecutive elements of a tensor are, and copies no others out of them, file by file
#
# Elements of a part of experts are in the parts of another layout. Experts with the same layout in both follow one
# another, so ranges of one are ranges of the other. Otherwise they are joined expert by expert, or by some rows:
# memory never has more of a parameter.


_OPEN_FILES = 1024
_ROWS = 64
"""The rows of a parameter of layout ``"innermost"`` that are put together at a time."""


@dataclass(frozen=True)
class Source:
    """Represents consecutive elements of a flattened tensor.

    Attributes:
        file: the file that has them, or the first of several.
        read: returns the tensor; for a mapped file this reads no element.
        at: the first element.
        size: the number of elements.
        dtype: the dtype to which they are rounded; ``None``: unchanged.
    """

    file: str
    read: Callable[[], torch.Tensor]
    at: int
    size: int
    dtype: torch.dtype | None = None

    def take(self) -> torch.Tensor:
        """Return the elements; without rounding, a view of the file.

        Raises:
            CheckpointError: the tensor has fewer elements.
        """
        found = self.read().detach().reshape(-1)[self.at : self.at + self.size]
        if len(found) != self.size:
            raise CheckpointError(f"{self.file} has {len(found)} of {self.size} elements from {self.at} on")
        return found if self.dtype is None else found.to(self.dtype)


def joined(sources: Iterable[Source]) -> torch.Tensor:
    """Return the elements of sources, one after the other; for one source, the result of :meth:`Source.take`."""
    taken = [each.take() for each in sources]
    return taken[0] if len(taken) == 1 else torch.cat(taken or [torch.empty(0)])


class Copies:
    """Collects copies out of files, and copies file by file, so that each is opened once."""

    def __init__(self) -> None:
        self._all: list[tuple[Source, torch.Tensor]] = []

    def add(self, sources: Iterable[Source], target: torch.Tensor) -> None:
        """Add the elements of sources, one after the other, to the copies into one flat tensor."""
        at = 0
        for each in sources:
            self._all.append((each, target[at : at + each.size]))
            at += each.size

    def run(self) -> None:
        """Copy all added elements.

        Raises:
            CheckpointError: a file is damaged.
        """
        for source, target in sorted(self._all, key=lambda each: each[0].file):
            target.copy_(source.take())
        self._all.clear()


class OpenFiles:
    """Keeps the last used files of a folder open.

    Args:
        place: the folder.
        read: reads a file whose tensors stay in it until they are used.
    """

    def __init__(self, place: Path, read: Callable[[Path], Any]) -> None:
        self._place = place
        self._opened = lru_cache(_OPEN_FILES)(lambda name: read(place / name))

    def __call__(self, name: str) -> Any:
        """Return the content of a file."""
        return self._opened(name)

    def at(self, name: str, keys: Keys) -> Any:
        """Return the value in a file under keys.

        Raises:
            CheckpointError: the file has no such keys.
        """
        found = self(name)
        try:
            for key in keys:
                found = found[key]
            return found
        except (KeyError, IndexError, TypeError):
            raise CheckpointError(f"{self._place / name} has no {keys[-1]!r}") from None


class SavedPieces:
    """Finds the pieces of parameters and states by their elements.

    Args:
        index: the index; ``None`` if there is none.
        stage: the pipeline stage whose pieces count if several stages have a parameter.
        files: the files.
        place: the folder of the files, for messages.
    """

    def __init__(self, index: Index | None, stage: int, files: OpenFiles, place: Path) -> None:
        self._index, self._stage, self._files, self._place = index, stage, files, place

    @cached_property
    def _of(self) -> dict[str, list[tuple[Group, Piece]]]:
        """Return name of a parameter -> its pieces in order; it is large with many ranks, and not always needed."""
        found: dict[str, list[tuple[Group, Piece]]] = {}
        groups = () if self._index is None else self._index.groups
        stages: dict[str, int] = {}
        known: set[tuple[str, int]] = set()
        for group in sorted(groups, key=lambda each: stage_of_file(each.file) != self._stage):
            number = stage_of_file(group.file)
            for piece in group.pieces:
                # Without ZeRO each rank that writes a file has all that is no expert's; each stage has what they share.
                if stages.setdefault(piece.name, number) == number and (piece.name, piece.first) not in known:
                    known.add((piece.name, piece.first))
                    found.setdefault(piece.name, []).append((group, piece))
        for each in found.values():
            each.sort(key=_first)
        return found

    def has(self, name: str, item: str) -> bool:
        """Return True if a parameter has an item."""
        return any(item in group.items for group, _ in self._of.get(name, ()))

    def sources(
        self, name: str, item: str, first: int, size: int, dtype: torch.dtype | None = None
    ) -> Iterator[Source]:
        """Return where the elements ``first`` to ``first + size`` of an item are.

        Args:
            name: the parameter's name in the files.
            item: the name of the state.
            first: the first element.
            size: the number of elements.
            dtype: see :class:`Source`.

        Raises:
            CheckpointError: elements are missing.
        """
        pieces, at, end = self._of.get(name, ()), first, first + size
        for number in range(max(0, bisect.bisect_right(pieces, first, key=_first) - 1), len(pieces)):
            group, piece = pieces[number]
            if at >= end or piece.first > at:
                break
            stop = min(end, piece.first + piece.size)
            if item in group.items and stop > at:
                keys = group.items[item]
                yield Source(
                    group.file,
                    lambda file=group.file, keys=keys: self._files.at(file, keys),
                    piece.at + at - piece.first,
                    stop - at,
                    dtype,
                )
                at = stop
        if at < end:
            raise CheckpointError(f"{self._place} has {at - first} of the {size} elements of {item} of {name}")


def _first(found: tuple[Group, Piece]) -> int:
    return found[1].first


Saved = Callable[[int, int, int], Iterator[Source]]
"""Takes the number of a saved part, its first element and a number of elements -> where these are."""


def elements_of_part(
    was: ExpertPart, here: ExpertPart, shape: Sequence[int], first: int, size: int, saved: Saved
) -> Iterator[Source]:
    """Return where the elements ``first`` to ``first + size`` of a part are.

    Args:
        was: the first of the saved parts.
        here: the wanted part.
        shape: the shape of the whole parameter.
        first: the first element of the flattened part.
        size: the number of elements.
        saved: returns where the elements of saved parts are.
    """
    if _lie_alike(was, here):
        count, index = (1, 0) if here.shard is None else (here.shard.count, here.shard.index)
        at, end = here.ep_rank * math.prod(here.part_shape(shape)) + first, first + size
        end += at - first
        of_part = math.prod(was.part_shape(shape))
        while at < end:
            number, start = divmod(at, of_part)
            taken = min(end - at, of_part - start)
            yield from saved(number * count + index, start, taken)
            at += taken
        return
    in_block = _expert if was.layout == "stacked" else _some_rows
    local = here.part_shape(shape)
    block = math.prod(local[1:]) * (local[0] // here.num_local if was.layout == "stacked" else _ROWS)
    for number in range(first // block, -(-(first + size) // block)):
        file, read = in_block(was, here, shape, number, saved)
        start, stop = max(first - number * block, 0), min(first + size - number * block, block)
        yield Source(file, read, start, stop - start)


def _lie_alike(was: ExpertPart, here: ExpertPart) -> bool:
    """Return True if the concatenated parts of all ranks are the same in both."""
    if was.layout == "innermost":
        return was.ep_size == here.ep_size
    a, b = was.shard, here.shard
    if a is None or b is None:
        return a is b
    # What is whole in the first shard is zero in the others, whatever they have saved.
    return (a.count, a.dim, a.pieces) == (b.count, b.dim, b.pieces) and (b.dim is not None or not b.index)


def _expert(
    was: ExpertPart, here: ExpertPart, shape: Sequence[int], number: int, saved: Saved
) -> tuple[str, Callable[[], torch.Tensor]]:
    """Return the first file, and a function that reads this rank's shard of one of its experts."""
    part, place = divmod(here.experts[number], was.num_local)
    mine = was.part_shape(shape)
    one = (mine[0] // was.num_local, *mine[1:])
    count = 1 if was.shard is None else was.shard.count
    needed = count if was.shard is not None and was.shard.dim is not None else 1
    numel = math.prod(one)
    sources = [list(saved(part * count + each, place * numel, numel)) for each in range(needed)]

    def read() -> torch.Tensor:
        shards = [joined(each).view(one) for each in sources]
        whole = shards[0] if was.shard is None else was.shard.join(shards)
        return whole if here.shard is None else here.shard.take(whole)

    return sources[0][0].file, read


def _some_rows(
    was: ExpertPart, here: ExpertPart, shape: Sequence[int], number: int, saved: Saved
) -> tuple[str, Callable[[], torch.Tensor]]:
    """Return the first file, and a function that reads this rank's experts in some rows."""
    rank, experts, theirs = shape[1] // was.num_experts, here.experts, was.num_local
    top, rows = number * _ROWS, min(_ROWS, shape[0] - number * _ROWS)
    width = rank * theirs
    parts = range(experts.start // theirs, (experts.stop - 1) // theirs + 1)
    sources = [list(saved(each, top * width, rows * width)) for each in parts]

    def read() -> torch.Tensor:
        found = []
        for part, each in zip(parts, sources, strict=True):
            mine = slice(max(experts.start - part * theirs, 0), experts.stop - part * theirs)
            found.append(joined(each).view(rows, rank, theirs)[..., mine])
        return found[0] if len(found) == 1 else torch.cat(found, dim=2)

    return sources[0][0].file, read
