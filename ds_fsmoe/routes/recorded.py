# SPDX-License-Identifier: Apache-2.0
"""Reads recorded routing from a folder or from one packed file (``.npz``) with some steps of all ranks. The engine's
replay, ``ds_fsmoe plan`` and ``ds_fsmoe report`` use it. Files are untrusted: damaged ones are refused, and the
index takes little memory. :mod:`~ds_fsmoe.routes.written` writes the files and describes their format.

Letters: S tokens of a rank, k choices of a token, E experts.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from ds_fsmoe.files.whole_files import new_file
from ds_fsmoe.routes.written import (
    CLOSED,
    FORMAT,
    KEY_BYTES,
    Choices,
    RankFacts,
    RoutedLayer,
    as_text,
    parts_of,
    saved,
    sealed,
)
from ds_fsmoe.untrusted import MOST_EXPERTS, MOST_LAYERS, MOST_RANKS, open_regular, parsed

MOST_PACKED_BYTES = 4 * 2**30
"""What a packed file may hold at the most; all of it is read."""
_FACTS = "facts"
_PACKED_FORMAT = 1
_LEAST_BYTES = 80
"""The bytes of an empty array: a header is padded to a multiple of 16, or of 64 since NumPy 1.14."""
Key = tuple[int, int, int, int]
"""(rank, step, micro-batch, number of the layer on that rank)."""


class RoutingFileError(ValueError):
    """Raised when recorded routing is missing or incomplete. The message names the path and the choices."""


class TruncatedError(ValueError):
    """Raised when a file ends too early, as files of killed jobs do."""


class Recording:
    """Holds the index of recorded routing; choices are read on request.

    Args:
        ranks: the facts that each rank recorded.
        sources: key -> function that reads its choices.
        problems: descriptions of what could not be read.
        num_bytes: the size of the files, in bytes.
    """

    def __init__(
        self,
        ranks: Mapping[int, RankFacts],
        sources: Mapping[Key, Callable[[], Choices]],
        problems: Iterable[str] = (),
        num_bytes: int = 0,
    ) -> None:
        self.num_bytes = num_bytes
        self.ranks = dict(sorted(ranks.items()))
        self.problems = tuple(problems)
        self._sources = sources

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the job."""
        return max(each.world_size for each in self.ranks.values())

    @cached_property
    def layers(self) -> tuple[RoutedLayer, ...]:
        """Return the layers of all ranks, in the ranks' order."""
        return tuple({each.path: each for facts in self.ranks.values() for each in facts.layers}.values())

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """Return the recorded optimizer steps, ascending."""
        return tuple(sorted({step for _, step, _, _ in self._sources}))

    @cached_property
    def _micro_batches(self) -> dict[tuple[int, int], int]:
        most: dict[tuple[int, int], int] = {}
        for rank, step, micro_batch, _ in self._sources:
            most[rank, step] = max(most.get((rank, step), 0), micro_batch + 1)
        return most

    def micro_batches(self, step: int, rank: int = 0) -> int:
        """Return the number of micro-batches of a rank in a step; 0 if the step was not recorded."""
        return self._micro_batches.get((rank, step), 0)

    def number_of(self, path: str, rank: int) -> int | None:
        """Return the index of a layer among those of a rank, or None if the rank does not have it."""
        paths = [each.path for each in self.ranks[rank].layers]
        return paths.index(path) if path in paths else None

    def __iter__(self) -> Iterator[Key]:
        """Iterate over the keys of all recorded choices, by rank and time."""
        return iter(sorted(self._sources))

    def __len__(self) -> int:
        return len(self._sources)

    def choices(self, rank: int, step: int, micro_batch: int, layer: int | str) -> Choices:
        """Return the choices of one rank in one layer of one micro-batch.

        Args:
            rank: the rank of the tokens.
            step: the optimizer step, from 0 on.
            micro_batch: the index of the micro-batch in the step, from 0 on.
            layer: the path of the layer, or its index among those of the rank.

        Raises:
            RoutingFileError: the choices were not recorded.
        """
        number = self.number_of(layer, rank) if isinstance(layer, str) and rank in self.ranks else layer
        source = self._sources.get((rank, step, micro_batch, number))
        if source is None:
            first, last = (self.steps[0], self.steps[-1]) if self.steps else (None, None)
            raise RoutingFileError(
                f"no routing was recorded of rank {rank}, step {step}, micro-batch {micro_batch}, layer {layer}: there "
                f"are {len(self.ranks)} rank(s), steps {first} to {last}, {self.micro_batches(step, rank)} "
                f"micro-batch(es) of this step, layers {', '.join(each.path for each in self.layers)}"
            )
        return source()

    def stacked(self, rank: int, step: int, micro_batch: int = 0) -> np.ndarray:
        """Return the choices in all L layers of a rank, [S, L, k], as input of ``engine.fsmoe.replay``.

        Raises:
            RoutingFileError: the choices were not recorded.
            ValueError: layers differ in S or k.
        """
        layers = range(len(self.ranks[rank].layers))
        return np.stack([self.choices(rank, step, micro_batch, each).indices_SK for each in layers], axis=1)

    def counts(self, path: str, step: int) -> np.ndarray:
        """Return the tokens of each rank that chose each expert in a step, summed over micro-batches, [R, E] int64.

        Args:
            path: the path of the layer.
            step: the optimizer step.
        """
        num_experts = next(each.num_experts for each in self.layers if each.path == path)
        found = np.zeros((len(self.ranks), num_experts), dtype=np.int64)
        for row, rank in enumerate(self.ranks):
            number = self.number_of(path, rank)
            for micro_batch in range(self.micro_batches(step, rank) if number is not None else 0):
                found[row] += self.choices(rank, step, micro_batch, number).counts(num_experts)
        return found


def read_routing(path: str | Path) -> Recording:
    """Read the recorded routing of a job.

    Args:
        path: the folder of ``"routing": {"record": ...}``, or a packed file.

    Returns:
        The recording, with ``steps``, ``layers``, ``choices(rank, step, micro_batch, layer)`` [S, k] and
        ``counts(layer, step)`` [R, E].

    Raises:
        RoutingFileError: the path has no recorded routing, or its first lines are damaged.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import numpy as np, ds_fsmoe
        >>> from ds_fsmoe.routes.written import Choices, Part, RankFacts, RoutedLayer, part_file
        >>> folder = Path(tempfile.mkdtemp())  # what a job of one rank with one layer of 4 experts leaves behind:
        >>> part = Part(part_file(folder, rank=0, part=0), RankFacts(0, 1, (RoutedLayer("blocks.0.moe", 4),)))
        >>> part.add(step=0, micro_batch=0, layer=0, choices=Choices(np.array([[0, 3], [0, 1], [2, 0]])))
        >>> part.close()
        >>> recording = ds_fsmoe.read_routing(folder)
        >>> recording.choices(rank=0, step=0, micro_batch=0, layer="blocks.0.moe").indices_SK.shape
        (3, 2)
        >>> recording.counts("blocks.0.moe", step=0).tolist()
        [[3, 1, 1, 1]]
    """
    path = Path(path)
    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        raise RoutingFileError(f"{path}: no such folder or file of recorded routing")
    try:
        return _read_packed(path)
    except Exception as error:  # there are many ways in which an archive can be damaged
        raise RoutingFileError(f"{path}: no recorded routing: {type(error).__name__}: {error}") from error


def write_packed(path: Path, recording: Recording, steps: Iterable[int] | None = None) -> None:
    """Write routing into one file, atomically.

    Args:
        path: the file, ``.npz``.
        recording: the routing.
        steps: the steps to write; ``None``: all.

    Raises:
        OSError: the file cannot be written.
    """
    wanted = None if steps is None else set(steps)
    ranks = [asdict(each) for each in recording.ranks.values()]
    arrays = {_FACTS: as_text({"format": _PACKED_FORMAT, "ranks": ranks})}
    for key in recording:
        if wanted is None or key[1] in wanted:
            choices, name = recording.choices(*key), "/".join(map(str, key))
            arrays[name] = choices.indices_SK
            if choices.weights_SK is not None:
                arrays[f"{name}/weights"] = choices.weights_SK
    with new_file(path, "wb") as file:
        np.savez_compressed(file, **arrays)


def in_memory(ranks: Iterable[RankFacts], choices: Mapping[Key, Choices]) -> Recording:
    """Return a recording of choices that are in memory."""
    sources = {key: (lambda found=found: found) for key, found in choices.items()}
    return Recording({each.rank: each for each in ranks}, sources)


def _read_folder(folder: Path) -> Recording:
    ranks: dict[int, RankFacts] = {}
    sources: dict[Key, Callable[[], Choices]] = {}
    problems: list[str] = []
    have_checksums = True
    for rank, _, path in parts_of(folder):
        try:
            found = routing_index_of(path)
            if found.facts.rank != rank:
                raise ValueError(f"it is of rank {found.facts.rank}")
        except TruncatedError as error:
            problems.append(f"{path}: {error}")
            continue
        except Exception as error:  # NumPy reads headers as Python: damage makes errors of all kinds
            raise RoutingFileError(f"{path}: {error}") from error
        if found.problem:
            problems.append(f"{path}: {found.problem}")
        have_checksums &= found.has_checksums
        # A job that went on from a checkpoint may have done steps again: what it did last counts.
        first = min((step for step, _, _ in found.sources), default=None)
        for key in [each for each in sources if first is not None and each[0] == rank and each[1] >= first]:
            del sources[key]
        ranks[rank] = found.facts
        sources |= {(rank, *key): source for key, source in found.sources.items()}
    if not ranks:
        what = "; ".join(problems) or "it has no files rank_*.npy"
        raise RoutingFileError(f"{folder}: no recorded routing: {what}")
    try:
        _check_ranks(ranks)
    except ValueError as error:
        raise RoutingFileError(f"{folder}: {error}") from error
    if not have_checksums:
        problems.append(f"{folder}: it was written before recordings had checksums: a change in it is not noticed")
    return Recording(ranks, sources, problems, sum(path.stat().st_size for _, _, path in parts_of(folder)))


def _read_packed(path: Path) -> Recording:
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        size_bytes = sum(each.file_size for each in archive.infolist())
    if size_bytes > MOST_PACKED_BYTES:
        raise ValueError(f"it would need {size_bytes / 2**30:.1f} GiB of memory; keep the folder instead")
    with open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
        ranks = {each.rank: each for each in facts_in(arrays[_FACTS], range(1, 1 + _PACKED_FORMAT))}
        names = [each for each in arrays.files if each != _FACTS and not each.endswith("weights")]
        found: dict[Key, Choices] = {}
        for name in names:
            rank, step, micro_batch, layer = map(int, name.split("/"))
            weights = arrays[f"{name}/weights"] if f"{name}/weights" in arrays.files else None
            found[rank, step, micro_batch, layer] = checked(Choices(arrays[name], weights), name)
            if rank not in ranks or not 0 <= layer < len(ranks[rank].layers):
                raise ValueError(f"{name}: no such rank or layer")
    _check_ranks(ranks)
    return in_memory(ranks.values(), found)


def _check_ranks(ranks: Mapping[int, RankFacts]) -> None:
    """Check that the ranks are of one job.

    Raises:
        ValueError: ranks differ in world size, or in the number of experts of a layer.
    """
    if len({each.world_size for each in ranks.values()}) > 1:
        raise ValueError("its ranks are from jobs of different sizes")
    num_experts: dict[str, int] = {}
    for layer in (layer for each in ranks.values() for layer in each.layers):
        if num_experts.setdefault(layer.path, layer.num_experts) != layer.num_experts:
            raise ValueError(f"{layer.path}: its ranks differ in the number of experts")


# ---- one file of a rank: whatever it says, it takes little memory


@dataclass(frozen=True)
class RoutingIndex:
    """Holds the index of one file: one rank from one start of its job."""

    facts: RankFacts
    sources: dict[tuple[int, int, int], Callable[[], Choices]]
    """(step, micro-batch, layer) -> reads what was chosen."""
    problem: str
    """What is wrong with its end, in words."""
    has_checksums: bool


def routing_index_of(path: Path) -> RoutingIndex:
    """Read the index of a file.

    Raises:
        TruncatedError: the file ends within its first lines.
        ValueError: the file was changed, or is not recorded routing.
        OSError: the file cannot be read, or is not a regular file.
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
                if has_checksums and not isinstance(error, TruncatedError):
                    raise ValueError(
                        f"it was changed after it was written: byte {begin} of {size} begins unknown data ({error}); "
                        "truncated there, it has the recorded part"
                    ) from error
                problem = f"it ends at byte {begin} of {size}: {error}"
                break
            sources[step, micro_batch, layer] = source
    return RoutingIndex(facts, sources, problem, has_checksums)


def _first_lines(file: IO[bytes], size: int) -> tuple[np.ndarray, bool]:
    """Return the first array, and whether its checksum follows (since format 2)."""
    begin, end = _skip(file, size, 1)
    text = _loaded(file, [(begin, end)])[0]
    sum_ = _loaded(file, [_skip(file, size, 1)])[0]
    if sum_.size != 1:
        file.seek(end)
        return text, False
    file.seek(begin)
    if sum_[0] != zlib.crc32(file.read(end - begin)):
        raise ValueError("it was changed after it was written: its first lines do not match their checksum")
    _skip(file, size, 1)
    return text, True


def _block(file: IO[bytes], path: Path, size: int) -> tuple[int, int, int, _Reads]:
    data = file.read(KEY_BYTES)
    if len(data) < KEY_BYTES:
        raise TruncatedError("it is truncated")
    key = np.load(io.BytesIO(data), allow_pickle=False)
    if data != saved(sealed(key[:-1])):
        raise ValueError("a checksum does not match")
    step, micro_batch, layer, has_weights, num_bytes, sum_, _ = key.tolist()
    begin, end = file.tell(), file.tell() + num_bytes
    if end > size:
        raise TruncatedError("an array is truncated")
    file.seek(end)
    return step, micro_batch, layer, _Reads(path, begin, end, 1 + has_weights, sum_)


def _block_of_1(file: IO[bytes], path: Path, size: int) -> tuple[int, int, int, _Reads]:
    """Return the step, micro-batch, layer and reader of a block of format 1."""
    step, micro_batch, layer, has_weights = map(int, _loaded(file, [_skip(file, size, 1)])[0])
    places = [_skip(file, size, 2) for _ in range(1 + bool(has_weights))]
    return step, micro_batch, layer, _Reads(path, places[0][0], places[-1][1], len(places), None)


@dataclass(frozen=True)
class _Reads:
    """Reads choices between two bytes of a file, when called."""

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
                raise ValueError(f"it was changed after it was written: the choices at byte {self.begin}")
            places = [_skip(data, self.end - self.begin, 2) for _ in range(self.num_arrays)]
            return checked(Choices(*_loaded(data, places)), str(self.path))
        except Exception as error:  # changed since it was looked through
            raise RoutingFileError(f"{self.path}: {error}") from error


def _loaded(file: IO[bytes], places: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """Return the arrays at these byte ranges, and move the file's position behind the last."""
    found = []
    for begin, end in places:
        file.seek(begin)
        found.append(np.load(file, allow_pickle=False))
        file.seek(end)
    return found


def _skip(file: IO[bytes], size: int, num_dimensions: int) -> tuple[int, int]:
    """Return where the next array begins and ends, in bytes, and move the file's position behind it.

    Raises:
        TruncatedError: the array ends behind the end of the file.
        ValueError: this is not an array of numbers with ``num_dimensions`` dimensions.
    """
    begin = file.tell()
    if size - begin < _LEAST_BYTES:
        raise TruncatedError("an array is truncated")
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("an array of another version of NumPy's format")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype.kind not in "iuf" or len(shape) != num_dimensions or min(shape) < 0:
        raise ValueError(f"an array {list(shape)} of {dtype}: must be choices [S, k]")
    end = file.tell() + math.prod(shape) * dtype.itemsize
    if end > size:
        raise TruncatedError("an array is cut short")
    file.seek(end)
    return begin, end


def checked(choices: Choices, name: str) -> Choices:
    """Check the shape and dtype of choices, and return them.

    Raises:
        ValueError: indices are not [S, k] unsigned integers, or weights have another shape.
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
    """Return the facts that each rank recorded, from JSON text in one of these format versions.

    Raises:
        ValueError: the text has another version, or is not such facts.
    """
    said: dict[str, Any] = parsed(text.astype(np.uint8).tobytes().decode("utf-8"))
    if said.get("format") not in versions:
        raise ValueError(f"format {said.get('format')!r} is not supported: this version reads {versions[-1]}")
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
