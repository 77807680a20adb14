# SPDX-License-Identifier: Apache-2.0
"""Looks through one file of recorded routing, and reads choices in it; whatever the file says, it takes little memory.

See :mod:`~ds_fsmoe.routes.written` for what is in it.
"""

from __future__ import annotations

import io
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from ds_fsmoe.routes.written import CLOSED, FORMAT, KEY_BYTES, Choices, RankFacts, RoutedLayer, saved, sealed
from ds_fsmoe.untrusted import MOST_EXPERTS, MOST_LAYERS, MOST_RANKS, open_regular, parsed

_LEAST_BYTES = 80
"""The bytes of an empty array: a header is padded to a multiple of 16, or of 64 since NumPy 1.14."""


class RoutingFileError(ValueError):
    """Raised when there is no recorded routing, or not the one asked for. The message names path and choices."""


class CutError(ValueError):
    """Raised where a file ends too early, as those of killed jobs do."""


@dataclass(frozen=True)
class RoutingIndex:
    """What a file of one rank and one start of its job has."""

    facts: RankFacts
    sources: dict[tuple[int, int, int], Callable[[], Choices]]
    """(step, micro-batch, layer) -> reads what was chosen."""
    problem: str
    """What is wrong with its end, in words."""
    has_checksums: bool


def routing_index_of(path: Path) -> RoutingIndex:
    """Look through a file.

    Raises:
        CutError: it ends before its first lines do.
        ValueError: it was changed since it was written, or is no such file.
        OSError: it cannot be read, or is no regular file.
    """
    sources: dict[tuple[int, int, int], Callable[[], Choices]] = {}
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        text, has_checksums = _first_lines(file, size)
        (facts,) = facts_in(text, range(1, FORMAT + 1))
        problem = "it was not closed: its job goes on, or was killed, or it was cut" if has_checksums else ""
        while file.tell() < size:
            begin = file.tell()
            try:
                step, micro_batch, layer, source = (_block if has_checksums else _block_of_1)(file, path, size)
                if step == CLOSED and has_checksums and file.tell() == size:
                    problem = ""
                    break
                if not 0 <= layer < len(facts.layers) or step < 0 or micro_batch < 0:
                    raise ValueError(f"layer {layer} of {len(facts.layers)}")
            except Exception as error:  # NumPy reads headers as Python: damage makes errors of all kinds
                if has_checksums and not isinstance(error, CutError):
                    raise ValueError(
                        f"it was changed since it was written: byte {begin} of {size} begins what was not recorded "
                        f"({error}); cut there, it has what was recorded before"
                    ) from error
                problem = f"it ends at byte {begin} of {size}: {error}"
                break
            sources[step, micro_batch, layer] = source
    return RoutingIndex(facts, sources, problem, has_checksums)


def _first_lines(file: IO[bytes], size: int) -> tuple[np.ndarray, bool]:
    """Return the first array, and whether its checksum follows, as it does since format 2."""
    begin, end = _skip(file, size, 1)
    text = _loaded(file, [(begin, end)])[0]
    sum_ = _loaded(file, [_skip(file, size, 1)])[0]
    if sum_.size != 1:
        file.seek(end)
        return text, False
    file.seek(begin)
    if sum_[0] != zlib.crc32(file.read(end - begin)):
        raise ValueError("it was changed since it was written: its first lines do not fit their checksum")
    _skip(file, size, 1)
    return text, True


def _block(file: IO[bytes], path: Path, size: int) -> tuple[int, int, int, _Reads]:
    data = file.read(KEY_BYTES)
    if len(data) < KEY_BYTES:
        raise CutError("it is cut short")
    key = np.load(io.BytesIO(data), allow_pickle=False)
    if data != saved(sealed(key[:-1])):
        raise ValueError("a checksum does not fit")
    step, micro_batch, layer, has_weights, num_bytes, sum_, _ = key.tolist()
    begin, end = file.tell(), file.tell() + num_bytes
    if end > size:
        raise CutError("an array is cut short")
    file.seek(end)
    return step, micro_batch, layer, _Reads(path, begin, end, 1 + has_weights, sum_)


def _block_of_1(file: IO[bytes], path: Path, size: int) -> tuple[int, int, int, _Reads]:
    """Return a block of format 1."""
    step, micro_batch, layer, has_weights = map(int, _loaded(file, [_skip(file, size, 1)])[0])
    places = [_skip(file, size, 2) for _ in range(1 + bool(has_weights))]
    return step, micro_batch, layer, _Reads(path, places[0][0], places[-1][1], len(places), None)


@dataclass(frozen=True)
class _Reads:
    """Reads choices that lie between two bytes of a file."""

    path: Path
    begin: int
    end: int
    num_arrays: int
    sum: int | None
    """The checksum of these bytes; ``None``: there is none."""

    def __call__(self) -> Choices:
        try:
            with open_regular(self.path) as file:
                file.seek(self.begin)
                data = io.BytesIO(file.read(self.end - self.begin))
            if self.sum is not None and zlib.crc32(data.getvalue()) != self.sum:
                raise ValueError(f"it was changed since it was written: the choices at byte {self.begin}")
            places = [_skip(data, self.end - self.begin, 2) for _ in range(self.num_arrays)]
            return checked(Choices(*_loaded(data, places)), str(self.path))
        except Exception as error:  # changed since it was looked through
            raise RoutingFileError(f"{self.path}: {error}") from error


def _loaded(file: IO[bytes], places: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """Return arrays by their places, and go behind the last."""
    found = []
    for begin, end in places:
        file.seek(begin)
        found.append(np.load(file, allow_pickle=False))
        file.seek(end)
    return found


def _skip(file: IO[bytes], size: int, num_dimensions: int) -> tuple[int, int]:
    """Return where the next array begins and ends, and go behind it.

    Raises:
        CutError: it ends behind the end of the file.
        ValueError: it is no array of numbers with so many dimensions.
    """
    begin = file.tell()
    if size - begin < _LEAST_BYTES:
        raise CutError("an array is cut short")
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("an array of another version of NumPy's format")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype.kind not in "iuf" or len(shape) != num_dimensions or min(shape) < 0:
        raise ValueError(f"an array {list(shape)} of {dtype}, where choices [S, k] must be")
    end = file.tell() + math.prod(shape) * dtype.itemsize
    if end > size:
        raise CutError("an array is cut short")
    file.seek(end)
    return begin, end


def checked(choices: Choices, name: str) -> Choices:
    """Return choices if they are such.

    Raises:
        ValueError: they are not.
    """
    shape, weights_SK = choices.indices_SK.shape, choices.weights_SK
    if (
        choices.indices_SK.dtype.kind != "u"
        or len(shape) != 2
        or (weights_SK is not None and weights_SK.shape != shape)
    ):
        raise ValueError(f"{name}: choices must be [S, k] unsigned integers, and weights as many")
    return choices


def facts_in(text: np.ndarray, versions: range) -> list[RankFacts]:
    """Return what each rank has recorded, from a text in one of these versions of its format.

    Raises:
        ValueError: it is of another version, or not what is recorded.
    """
    said: dict[str, Any] = parsed(text.astype(np.uint8).tobytes().decode("utf-8"))
    if said.get("format") not in versions:
        raise ValueError(f"format {said.get('format')!r}: this version reads {versions[-1]}")
    return [_of_rank(each) for each in said["ranks"]]


def _of_rank(said: Mapping[str, Any]) -> RankFacts:
    world_size = _within("world_size", said["world_size"], 1, MOST_RANKS)
    if len(said["layers"]) > MOST_LAYERS:
        raise ValueError(f"{len(said['layers'])} layers: must be at most {MOST_LAYERS}")
    layers = tuple(
        RoutedLayer(
            str(each["path"]),
            _within("num_experts", each["num_experts"], 1, MOST_EXPERTS),
            tuple(_within("ep_ranks", rank, 0, world_size - 1) for rank in each["ep_ranks"]),
        )
        for each in said["layers"]
    )
    if not all(each.ep_ranks for each in layers):
        raise ValueError("ep_ranks = []: must be the ranks that share the experts")
    rank = _within("rank", said["rank"], 0, world_size - 1)
    return RankFacts(rank, world_size, layers, _within("node", said.get("node", 0), 0, world_size - 1))


def _within(name: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} = {str(value)[:40]}: must be a whole number from {least} to {most}")
    return value
