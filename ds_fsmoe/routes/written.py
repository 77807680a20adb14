# SPDX-License-Identifier: Apache-2.0
"""Writes recorded routing: the experts that tokens chose, of every layer, step and micro-batch. A training run with
``"routing": {"record": ...}`` uses it; :mod:`~ds_fsmoe.routes.recorded` reads the files.

A folder has a file for each rank and each start of its job, ``rank_00003.0000.npy``. It holds arrays in NumPy's own
format, one after another. The first is a JSON text with the ranks and layers, the second its checksum.

Then each layer of each micro-batch has two or three arrays. The first has these numbers: step, micro-batch, layer,
whether there are weights, the bytes of the arrays that follow, their checksum, and the checksum of the numbers before.
The second has the choices [S, k], in the smallest unsigned type. The third, on request, has their weights [S, k] in
float16. A step of -1 ends a file that was closed. A killed job leaves all that it had written. Checksums are CRC-32, of
arrays with their headers. Format 1 had none.

Letters: S tokens of a rank, k choices of a token, E experts.
"""

from __future__ import annotations

import io
import json
import re
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from ds_fsmoe.files.whole_files import create

FORMAT = 2
CLOSED = -1
"""The step of the last numbers in a file, if it was closed."""
_PART = re.compile(r"rank_(\d{5,})\.(\d{4,})\.npy")


@dataclass(frozen=True)
class RoutedLayer:
    """Describes a recorded layer: its path, number of experts and EP ranks."""

    path: str
    """The path of the layer in its model."""
    num_experts: int
    """E, of all ranks."""
    ep_ranks: tuple[int, ...] = (0,)
    """The ranks over which the experts are spread, in the order of their experts."""


@dataclass(frozen=True)
class RankFacts:
    """Describes a recorded rank: its number, the world size, its layers and its node."""

    rank: int
    world_size: int
    layers: tuple[RoutedLayer, ...]
    node: int = 0
    """The number of the node on which the rank ran."""


@dataclass(frozen=True)
class Choices:
    """Holds the experts [S, k] and weights [S, k] that the tokens of one rank chose in one layer of one micro-batch."""

    indices_SK: np.ndarray
    """[S, k] unsigned integers: experts of all ranks; E for a choice that was not made."""
    weights_SK: np.ndarray | None = None
    """[S, k] float16, where they were asked for."""

    def counts(self, num_experts: int) -> np.ndarray:
        """Return the number of tokens that chose each expert, [E] int64."""
        # Whatever a damaged file says: nothing is made larger than E.
        index = np.minimum(self.indices_SK.reshape(-1), num_experts).astype(np.int64)
        return np.bincount(index, minlength=num_experts + 1)[:num_experts]


def index_type(num_experts: int) -> np.dtype:
    """Return the smallest unsigned type that holds 0 to E; E stands for "no expert"."""
    return np.min_scalar_type(num_experts)


def part_file(folder: Path, rank: int, part: int) -> Path:
    """Return the path of the file of a rank and of a start of its job."""
    return folder / f"rank_{rank:05d}.{part:04d}.npy"


def parts_of(folder: Path) -> list[tuple[int, int, Path]]:
    """Return (rank, part, path) of all files of recorded routing in a folder, sorted."""
    found = ((_PART.fullmatch(each.name), each) for each in folder.iterdir()) if folder.is_dir() else ()
    return sorted((int(match[1]), int(match[2]), each) for match, each in found if match)


class Part:
    """Writes the routing of one rank, from one start of its job on.

    Args:
        path: a file that does not exist yet.
        facts: the description of the rank and its layers.

    Raises:
        OSError: the file cannot be written, or exists.
    """

    def __init__(self, path: Path, facts: RankFacts) -> None:
        self._file: IO[bytes] = create(path)
        self._is_truncated = False
        self._types = [index_type(each.num_experts) for each in facts.layers]
        head = saved(as_text({"format": FORMAT, "ranks": [asdict(facts)]}))
        self._file.write(head + saved(np.array([zlib.crc32(head)], dtype=np.int64)))
        self._file.flush()

    def add(self, step: int, micro_batch: int, layer: int, choices: Choices) -> None:
        """Write the choices of a layer, given by its index among those of the rank.

        Raises:
            OSError: the file cannot be written.
        """
        has_weights = choices.weights_SK is not None
        arrays = saved(choices.indices_SK.astype(self._types[layer], copy=False))
        if has_weights:
            arrays += saved(choices.weights_SK.astype(np.float16, copy=False))
        self._is_truncated = True  # unless all of it is written
        self._file.write(_key(step, micro_batch, layer, has_weights, arrays) + arrays)
        self._is_truncated = False

    def flush(self) -> None:
        """Flush all written data to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Write the end mark and close the file."""
        if not self._file.closed and not self._is_truncated:
            self._file.write(_key(CLOSED, 0, 0, False, b""))
        self._file.close()


def as_text(value: Any) -> np.ndarray:
    """Return a value as JSON, in an array of bytes."""
    return np.frombuffer(json.dumps(value).encode("utf-8"), dtype=np.uint8)


def sealed(numbers: Any) -> np.ndarray:
    """Return integers followed by their checksum, int64."""
    said = np.array(numbers, dtype="<i8")
    return np.append(said, zlib.crc32(said.tobytes()))


def _key(step: int, micro_batch: int, layer: int, has_weights: bool, arrays: bytes) -> bytes:
    return saved(sealed([step, micro_batch, layer, has_weights, len(arrays), zlib.crc32(arrays)]))


def saved(array: np.ndarray) -> bytes:
    """Return the bytes of an array in NumPy's file format."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


KEY_BYTES = len(_key(CLOSED, 0, 0, False, b""))
