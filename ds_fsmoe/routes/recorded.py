# SPDX-License-Identifier: Apache-2.0
"""Reads recorded routing, from a folder or from one packed file, ``.npz``, with some steps of all ranks.

See :mod:`~ds_fsmoe.routes.written` for what is in the files. Letters: S tokens of a rank, k choices of a token, E
experts.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

import numpy as np

from ds_fsmoe.files.whole_files import new_file
from ds_fsmoe.routes.parts import CutError, RoutingFileError, checked, facts_in, routing_index_of
from ds_fsmoe.routes.written import Choices, RankFacts, RoutedLayer, as_text, parts_of
from ds_fsmoe.untrusted import open_regular

MOST_PACKED_BYTES = 4 * 2**30
"""What a packed file may hold at the most; all of it is read."""
_FACTS = "facts"
_PACKED_FORMAT = 1
Key = tuple[int, int, int, int]
"""(rank, step, micro-batch, number of the layer on that rank)."""


class Recording:
    """Reads recorded routing; choices are read when they are asked for.

    Args:
        ranks: what each rank has recorded.
        sources: reads the choices of a key.
        problems: what could not be read, in words.
        num_bytes: the bytes of its files.
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
    """Return routing that lies in memory as a recording."""
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
        except CutError as error:
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
        raise ValueError(f"it would take {size_bytes / 2**30:.1f} GiB of memory; keep the folder instead")
    with open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
        ranks = {each.rank: each for each in facts_in(arrays[_FACTS], range(1, 1 + _PACKED_FORMAT))}
        names = [each for each in arrays.files if each != _FACTS and not each.endswith("weights")]
        found: dict[Key, Choices] = {}
        for name in names:
            rank, step, micro_batch, layer = map(int, name.split("/"))
            weights = arrays[f"{name}/weights"] if f"{name}/weights" in arrays.files else None
            found[rank, step, micro_batch, layer] = checked(Choices(arrays[name], weights), name)
            if rank not in ranks or not 0 <= layer < len(ranks[rank].layers):
                raise ValueError(f"{name}: there is no such rank or layer")
    _check_ranks(ranks)
    return in_memory(ranks.values(), found)


def _check_ranks(ranks: Mapping[int, RankFacts]) -> None:
    """Check that ranks are of one job.

    Raises:
        ValueError: they differ in what they must have alike.
    """
    if len({each.world_size for each in ranks.values()}) > 1:
        raise ValueError("its ranks are of jobs of different sizes")
    num_experts: dict[str, int] = {}
    for layer in (layer for each in ranks.values() for layer in each.layers):
        if num_experts.setdefault(layer.path, layer.num_experts) != layer.num_experts:
            raise ValueError(f"{layer.path}: its ranks differ in the number of experts")
