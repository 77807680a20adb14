# SPDX-License-Identifier: Apache-2.0
"""Writes and reads recorded routing: the experts that tokens chose, of every layer, step and micro-batch.

A folder has a file for each rank and each start of its job, ``rank_00003.0000.npy``: arrays in NumPy's own format, one
after another. The first is a JSON text, with the ranks and layers. Then come, for each layer of each micro-batch, the
numbers (step, micro-batch, layer, whether there are weights), the choices [S, k] in the smallest unsigned type, and on
request their weights [S, k] in float16. A job that is killed leaves all that it had written.

A packed file, ``.npz``, has the same of some steps and all ranks.

Letters: S tokens of a rank, k choices of a token, E experts.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from ds_fsmoe.files.whole_files import create, new_file

FORMAT = 1
_PART = re.compile(r"rank_(\d{5,})\.(\d{4,})\.npy")
_FACTS = "facts"


class RoutingFileError(ValueError):
    """Raised when there is no recorded routing, or not the one asked for. The message names path and choices."""


@dataclass(frozen=True)
class RoutedLayer:
    """Says what is recorded of a layer."""

    path: str
    """The path of the layer in its model."""
    num_experts: int
    """E, of all ranks."""
    ep_ranks: tuple[int, ...] = (0,)
    """The ranks over which the experts are spread, in the order of their experts."""


@dataclass(frozen=True)
class RankFacts:
    """Says what one rank has recorded."""

    rank: int
    world_size: int
    layers: tuple[RoutedLayer, ...]
    node: int = 0
    """The number of the node on which the rank ran."""


@dataclass(frozen=True)
class Choices:
    """Holds what the tokens of one rank chose, in one layer of one micro-batch."""

    indices_SK: np.ndarray
    """[S, k] unsigned integers: experts of all ranks; E for a choice that was not made."""
    weights_SK: np.ndarray | None = None
    """[S, k] float16, where they were asked for."""

    def counts(self, num_experts: int) -> np.ndarray:
        """Return [E] int64: the tokens that chose each expert."""
        return np.bincount(self.indices_SK.reshape(-1), minlength=num_experts + 1)[:num_experts]


Key = tuple[int, int, int, int]
"""(rank, step, micro-batch, number of the layer on that rank)."""


def index_type(num_experts: int) -> np.dtype:
    """Return the smallest unsigned type that holds an expert's number, and E for none."""
    return np.min_scalar_type(num_experts)


def part_file(folder: Path, rank: int, part: int) -> Path:
    """Return the path of the file of a rank and a start of its job."""
    return folder / f"rank_{rank:05d}.{part:04d}.npy"


def parts_of(folder: Path) -> list[tuple[int, int, Path]]:
    """Return (rank, part, path) of all files of recorded routing in a folder, parts in order."""
    found = ((_PART.fullmatch(each.name), each) for each in folder.iterdir()) if folder.is_dir() else ()
    return sorted((int(match[1]), int(match[2]), each) for match, each in found if match)


class Part:
    """Writes what one rank records from one start of its job on.

    Args:
        path: a file that is not there yet.
        facts: what the rank records.

    Raises:
        OSError: it cannot be written, or is there.
    """

    def __init__(self, path: Path, facts: RankFacts) -> None:
        self._file: IO[bytes] = create(path)
        self._types = [index_type(each.num_experts) for each in facts.layers]
        _save(self._file, _as_text({"format": FORMAT, "ranks": [asdict(facts)]}))
        self._file.flush()

    def add(self, step: int, micro_batch: int, layer: int, choices: Choices) -> None:
        """Write what was chosen in a layer, given by its number among those of the rank.

        Raises:
            OSError: it cannot be written.
        """
        has_weights = choices.weights_SK is not None
        _save(self._file, np.array([step, micro_batch, layer, has_weights], dtype=np.int64))
        _save(self._file, choices.indices_SK.astype(self._types[layer], copy=False))
        if has_weights:
            _save(self._file, choices.weights_SK.astype(np.float16, copy=False))

    def flush(self) -> None:
        """Give all that was written to the system."""
        self._file.flush()

    def close(self) -> None:
        """Write what is left, and close the file."""
        self._file.close()


class Recording:
    """Reads recorded routing; choices are read when they are asked for.

    Args:
        ranks: what each rank has recorded.
        sources: reads the choices of a key.
        problems: what could not be read, in words.
    """

    def __init__(
        self, ranks: Mapping[int, RankFacts], sources: Mapping[Key, Callable[[], Choices]], problems: Iterable[str] = ()
    ) -> None:
        self.ranks = dict(sorted(ranks.items()))
        self.problems = tuple(problems)
        self._sources = sources

    @property
    def world_size(self) -> int:
        """The number of ranks of the job."""
        return max(each.world_size for each in self.ranks.values())

    @cached_property
    def layers(self) -> tuple[RoutedLayer, ...]:
        """The layers of all ranks, in the order in which ranks have them."""
        return tuple({each.path: each for facts in self.ranks.values() for each in facts.layers}.values())

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The steps that were recorded."""
        return tuple(sorted({step for _, step, _, _ in self._sources}))

    @cached_property
    def _micro_batches(self) -> dict[tuple[int, int], int]:
        most: dict[tuple[int, int], int] = {}
        for rank, step, micro_batch, _ in self._sources:
            most[rank, step] = max(most.get((rank, step), 0), micro_batch + 1)
        return most

    def micro_batches(self, step: int, rank: int = 0) -> int:
        """Return how many micro-batches a rank had in a step; 0 where nothing of it was recorded."""
        return self._micro_batches.get((rank, step), 0)

    def number_of(self, path: str, rank: int) -> int | None:
        """Return the number of a layer among those of a rank; ``None``: the rank does not have it."""
        paths = [each.path for each in self.ranks[rank].layers]
        return paths.index(path) if path in paths else None

    def __iter__(self) -> Iterator[Key]:
        """Return the keys of all that was recorded, in the order of ranks and time."""
        return iter(sorted(self._sources))

    def __len__(self) -> int:
        return len(self._sources)

    def choices(self, rank: int, step: int, micro_batch: int, layer: int | str) -> Choices:
        """Return what was chosen.

        Args:
            rank: the rank of the tokens.
            step: the optimizer step, from 0 on.
            micro_batch: which of the step's micro-batches, from 0 on.
            layer: the path of the layer, or its number among those of the rank.

        Raises:
            RoutingFileError: it was not recorded.
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
        """Return [S, L, k], the choices in all L layers of a rank, as ``engine.fsmoe.replay`` takes them.

        Raises:
            RoutingFileError: they were not recorded.
            ValueError: layers differ in tokens or k.
        """
        layers = range(len(self.ranks[rank].layers))
        return np.stack([self.choices(rank, step, micro_batch, each).indices_SK for each in layers], axis=1)

    def counts(self, path: str, step: int) -> np.ndarray:
        """Return [R, E] int64, the tokens of each rank that chose each expert in a step, over its micro-batches.

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
    """Read recorded routing.

    Args:
        path: the folder of ``"routing": {"record": ...}``, or a packed file.

    Raises:
        RoutingFileError: there is none, or it is damaged from its beginning.
    """
    path = Path(path)
    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        raise RoutingFileError(f"{path}: no such folder or file of recorded routing")
    try:
        return _read_packed(path)
    except (ValueError, KeyError, TypeError, OSError, zipfile.BadZipFile) as error:
        raise RoutingFileError(f"{path}: no recorded routing: {type(error).__name__}: {error}") from error


def write_packed(path: Path, recording: Recording, steps: Iterable[int] | None = None) -> None:
    """Write routing into one file, whole or not at all.

    Args:
        path: the file, ``.npz``.
        recording: the routing.
        steps: the steps to write; ``None``: all.

    Raises:
        OSError: it cannot be written.
    """
    wanted = None if steps is None else set(steps)
    ranks = [asdict(each) for each in recording.ranks.values()]
    arrays = {_FACTS: _as_text({"format": FORMAT, "ranks": ranks})}
    for key in recording:
        if wanted is None or key[1] in wanted:
            choices, name = recording.choices(*key), "/".join(map(str, key))
            arrays[name] = choices.indices_SK
            if choices.weights_SK is not None:
                arrays[f"{name}/weights"] = choices.weights_SK
    with new_file(path, "wb") as file:
        np.savez_compressed(file, **arrays)


def in_memory(ranks: Iterable[RankFacts], choices: Mapping[Key, Choices]) -> Recording:
    """Return routing that lies in memory as a recording."""
    sources = {key: (lambda found=found: found) for key, found in choices.items()}
    return Recording({each.rank: each for each in ranks}, sources)


def _read_folder(folder: Path) -> Recording:
    ranks: dict[int, RankFacts] = {}
    sources: dict[Key, Callable[[], Choices]] = {}
    problems: list[str] = []
    for rank, _, path in parts_of(folder):
        try:
            facts, found, problem = _index(path)
        except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
            problems.append(f"{path}: {type(error).__name__}: {error}")
            continue
        if problem:
            problems.append(f"{path}: {problem}")
        # A job that went on from a checkpoint may have done steps again: what it did last counts.
        first = min((step for step, _, _ in found), default=None)
        for key in [each for each in sources if first is not None and each[0] == rank and each[1] >= first]:
            del sources[key]
        ranks[rank] = facts
        sources |= {(rank, *key): source for key, source in found.items()}
    if not ranks:
        what = "; ".join(problems) or "it has no files rank_*.npy"
        raise RoutingFileError(f"{folder}: no recorded routing: {what}")
    return Recording(ranks, sources, problems)


def _index(path: Path) -> tuple[RankFacts, dict[tuple[int, int, int], Callable[[], Choices]], str]:
    """Return what a part is about, where its choices are, and what is wrong with its end."""
    found: dict[tuple[int, int, int], Callable[[], Choices]] = {}
    size = path.stat().st_size
    with path.open("rb") as file:
        (facts,) = _facts(np.load(file, allow_pickle=False))
        while file.tell() < size:
            begin = file.tell()
            try:
                step, micro_batch, layer, has_weights = map(int, np.load(file, allow_pickle=False))
                places = [_skip(file, size) for _ in range(1 + has_weights)]
            except (ValueError, EOFError, OSError) as error:
                return facts, found, f"it ends at byte {begin} of {size}: {error}"
            if not 0 <= layer < len(facts.layers):
                return facts, found, f"layer {layer} of {len(facts.layers)} at byte {begin}"
            found[step, micro_batch, layer] = _Reads(path, places)
    return facts, found, ""


@dataclass(frozen=True)
class _Reads:
    """Reads choices that begin at these bytes of a file."""

    path: Path
    places: list[int]

    def __call__(self) -> Choices:
        with self.path.open("rb") as file:
            arrays = []
            for place in self.places:
                file.seek(place)
                arrays.append(np.load(file, allow_pickle=False))
        return Choices(*arrays)


def _skip(file: IO[bytes], size: int) -> int:
    """Return where the next array begins, and go behind it."""
    begin = file.tell()
    major, _ = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.kind not in "uf" or len(shape) != 2:
        raise ValueError(f"an array {list(shape)} of {dtype}, where choices [S, k] must be")
    end = file.tell() + int(np.prod(shape)) * dtype.itemsize
    if end > size:
        raise EOFError("an array is cut short")
    file.seek(end)
    return begin


def _read_packed(path: Path) -> Recording:
    with np.load(path, allow_pickle=False) as arrays:
        ranks = {each.rank: each for each in _facts(arrays[_FACTS])}
        names = [each for each in arrays.files if each != _FACTS and not each.endswith("weights")]
        found: dict[Key, Choices] = {}
        for name in names:
            rank, step, micro_batch, layer = map(int, name.split("/"))
            weights = arrays[f"{name}/weights"] if f"{name}/weights" in arrays.files else None
            found[rank, step, micro_batch, layer] = Choices(arrays[name], weights)
    return in_memory(ranks.values(), found)


def _facts(text: np.ndarray) -> list[RankFacts]:
    said: dict[str, Any] = json.loads(text.astype(np.uint8).tobytes().decode("utf-8"))
    if said.get("format") != FORMAT:
        raise ValueError(f"format {said.get('format')!r}: this version reads {FORMAT}")
    return [_of_rank(each) for each in said["ranks"]]


def _of_rank(said: Mapping[str, Any]) -> RankFacts:
    layers = tuple(
        RoutedLayer(str(each["path"]), int(each["num_experts"]), tuple(map(int, each["ep_ranks"])))
        for each in said["layers"]
    )
    return RankFacts(int(said["rank"]), int(said["world_size"]), layers, int(said.get("node", 0)))


def _as_text(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode("utf-8"), dtype=np.uint8)


def _save(file: IO[bytes], array: np.ndarray) -> None:
    np.save(file, array, allow_pickle=False)
