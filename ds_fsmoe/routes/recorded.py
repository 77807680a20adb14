# SPDX-License-Identifier: Apache-2.0
"""Reads recorded routing, from a folder or from one packed file, ``.npz``, with some steps of all ranks.

See :mod:`~ds_fsmoe.routes.written` for what is in the files. Letters: S tokens of a rank, k choices of a token, E
experts.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from ds_fsmoe.files.whole_files import new_file
from ds_fsmoe.routes.written import FORMAT, Choices, RankFacts, RoutedLayer, as_text, parts_of

MOST_PACKED_BYTES = 4 * 2**30
"""What a packed file may hold at the most; all of it is read."""
_FACTS = "facts"


class RoutingFileError(ValueError):
    """Raised when there is no recorded routing, or not the one asked for. The message names path and choices."""


Key = tuple[int, int, int, int]
"""(rank, step, micro-batch, number of the layer on that rank)."""


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
    """Read what the ranks of a job have recorded of its routing.

    Args:
        path: the folder of ``"routing": {"record": ...}``, or a packed file.

    Returns:
        What was recorded, with ``steps``, ``layers``, ``choices(rank, step, micro_batch, layer)`` [S, k] and
        ``counts(layer, step)`` [R, E].

    Raises:
        RoutingFileError: there is none, or it is damaged from its beginning.

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
    arrays = {_FACTS: as_text({"format": FORMAT, "ranks": ranks})}
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
        except Exception as error:  # NumPy reads headers as Python: damage makes errors of all kinds
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
            except Exception as error:
                return facts, found, f"it ends at byte {begin} of {size}: {error}"
            if not 0 <= layer < len(facts.layers) or step < 0 or micro_batch < 0:
                return facts, found, f"layer {layer} of {len(facts.layers)} at byte {begin}"
            found[step, micro_batch, layer] = _Reads(path, places)
    return facts, found, ""


@dataclass(frozen=True)
class _Reads:
    """Reads choices that begin at these bytes of a file."""

    path: Path
    places: list[int]

    def __call__(self) -> Choices:
        try:
            with self.path.open("rb") as file:
                arrays = []
                for place in self.places:
                    file.seek(place)
                    arrays.append(np.load(file, allow_pickle=False))
            return _checked(Choices(*arrays), str(self.path))
        except Exception as error:  # changed since it was looked through
            raise RoutingFileError(f"{self.path}: {error}") from error


def _skip(file: IO[bytes], size: int) -> int:
    """Return where the next array begins, and go behind it."""
    begin = file.tell()
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("an array of another version of NumPy's format")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype.kind not in "uf" or len(shape) != 2 or min(shape) < 0:
        raise ValueError(f"an array {list(shape)} of {dtype}, where choices [S, k] must be")
    end = file.tell() + int(np.prod(shape)) * dtype.itemsize
    if end > size:
        raise EOFError("an array is cut short")
    file.seek(end)
    return begin


def _read_packed(path: Path) -> Recording:
    with zipfile.ZipFile(path) as archive:
        size_bytes = sum(each.file_size for each in archive.infolist())
    if size_bytes > MOST_PACKED_BYTES:
        raise ValueError(f"it would take {size_bytes / 2**30:.1f} GiB of memory; keep the folder instead")
    with np.load(path, allow_pickle=False) as arrays:
        ranks = {each.rank: each for each in _facts(arrays[_FACTS])}
        names = [each for each in arrays.files if each != _FACTS and not each.endswith("weights")]
        found: dict[Key, Choices] = {}
        for name in names:
            rank, step, micro_batch, layer = map(int, name.split("/"))
            weights = arrays[f"{name}/weights"] if f"{name}/weights" in arrays.files else None
            found[rank, step, micro_batch, layer] = _checked(Choices(arrays[name], weights), name)
            if rank not in ranks or not 0 <= layer < len(ranks[rank].layers):
                raise ValueError(f"{name}: there is no such rank or layer")
    return in_memory(ranks.values(), found)


def _checked(choices: Choices, name: str) -> Choices:
    shape, weights_SK = choices.indices_SK.shape, choices.weights_SK
    if (
        choices.indices_SK.dtype.kind != "u"
        or len(shape) != 2
        or (weights_SK is not None and weights_SK.shape != shape)
    ):
        raise ValueError(f"{name}: choices must be [S, k] unsigned integers, and weights as many")
    return choices


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
