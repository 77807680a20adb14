# SPDX-License-Identifier: Apache-2.0
"""The index ``fsmoe_pieces.json``: where in a checkpoint's files each parameter's optimizer states are; and where any
consecutive elements of a tensor are.

DeepSpeed lays parameters end to end and cuts the result by ranks. Where each parameter is becomes known on saving,
and is written down; so the states can be read in any other layout, and by programs without ranks.

Of stock's weights at ZeRO 3 it follows from the files. DeepSpeed cuts each flattened parameter into equal pieces, one
for each rank, and lays a rank's pieces of a sub-group of parameters end to end, in the order of ``param_shapes``.
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
    """Merge the indices of all ranks; entries that several ranks have are kept once."""
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
    """Return an index of the weights alone: only DeepSpeed knows the layout of the optimizer states.

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
# Of a part of experts they are in the parts that another layout has saved. Experts that lie alike in both follow one
# another, so ranges of one are ranges of the other. Else they are put together expert by expert, or by some rows: never
# more of a parameter is in memory.


_OPEN_FILES = 1024
_ROWS = 64
"""The rows of a parameter of layout ``"innermost"`` that are put together at a time."""


@dataclass(frozen=True)
class Source:
    """Consecutive elements of a flattened tensor.

    Attributes:
        file: the file that has them, or the first of several.
        read: returns the tensor; of a mapped file no element is read by that.
        at: the first element.
        size: the number of elements.
        dtype: the data type to which they are rounded; ``None``: as they are.
    """

    file: str
    read: Callable[[], torch.Tensor]
    at: int
    size: int
    dtype: torch.dtype | None = None

    def take(self) -> torch.Tensor:
        """Return the elements: a view of the file where they are not rounded.

        Raises:
            CheckpointError: the tensor has not as many.
        """
        found = self.read().detach().reshape(-1)[self.at : self.at + self.size]
        if len(found) != self.size:
            raise CheckpointError(f"{self.file} has {len(found)} of {self.size} elements from {self.at} on")
        return found if self.dtype is None else found.to(self.dtype)


def joined(sources: Iterable[Source]) -> torch.Tensor:
    """Return the elements of sources, one behind the other: of a single one as :meth:`Source.take` returns them."""
    taken = [each.take() for each in sources]
    return taken[0] if len(taken) == 1 else torch.cat(taken or [torch.empty(0)])


class Copies:
    """Collects copies out of files, and copies file by file, so that each is opened once."""

    def __init__(self) -> None:
        self._all: list[tuple[Source, torch.Tensor]] = []

    def add(self, sources: Iterable[Source], target: torch.Tensor) -> None:
        """Copy the elements of sources into one flat tensor, one behind the other."""
        at = 0
        for each in sources:
            self._all.append((each, target[at : at + each.size]))
            at += each.size

    def run(self) -> None:
        """Copy all that was added.

        Raises:
            CheckpointError: a file is damaged.
        """
        for source, target in sorted(self._all, key=lambda each: each[0].file):
            target.copy_(source.take())
        self._all.clear()


class OpenFiles:
    """Keeps the files of a folder open that were used last.

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
            CheckpointError: it has nothing there.
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
        index: where they are; ``None`` where that was not written down.
        stage: the pipeline stage whose pieces count of what several have.
        files: the files.
        place: their folder, for messages.
    """

    def __init__(self, index: Index | None, stage: int, files: OpenFiles, place: Path) -> None:
        self._index, self._stage, self._files, self._place = index, stage, files, place

    @cached_property
    def _of(self) -> dict[str, list[tuple[Group, Piece]]]:
        """Maps the name of a parameter -> its pieces in order. It is large with many ranks, and not needed by all."""
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
        """Return whether there is an item of a parameter."""
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
            CheckpointError: some are missing.
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
        here: the part that is wanted.
        shape: the shape of the whole parameter.
        first: the first element of the flattened part.
        size: the number of elements.
        saved: says where the elements of saved parts are.
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
    """Return whether the parts of all ranks, one behind the other, are the same in both."""
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
