# SPDX-License-Identifier: Apache-2.0
"""Writes recorded routing: the experts that tokens chose, of every layer, step and micro-batch.

A folder has a file for each rank and each start of its job, ``rank_00003.0000.npy``: arrays in NumPy's own format, one
after another. The first is a JSON text, with the ranks and layers, the second its checksum. Then come, for each layer
of each micro-batch, the numbers (step, micro-batch, layer, whether there are weights, the bytes of the arrays that
follow, their checksum, that of the numbers before), the choices [S, k] in the smallest unsigned type, and on request
their weights [S, k] in float16. A step of -1 ends a file that was closed. A job that is killed leaves all that it had
written. Checksums are CRC-32, of arrays with their headers. Format 1 had none.

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
        # Whatever a damaged file says: nothing is made larger than E.
        index = np.minimum(self.indices_SK.reshape(-1), num_experts).astype(np.int64)
        return np.bincount(index, minlength=num_experts + 1)[:num_experts]


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
        self._is_truncated = False
        self._types = [index_type(each.num_experts) for each in facts.layers]
        head = saved(as_text({"format": FORMAT, "ranks": [asdict(facts)]}))
        self._file.write(head + saved(np.array([zlib.crc32(head)], dtype=np.int64)))
        self._file.flush()

    def add(self, step: int, micro_batch: int, layer: int, choices: Choices) -> None:
        """Write what was chosen in a layer, given by its number among those of the rank.

        Raises:
            OSError: it cannot be written.
        """
        has_weights = choices.weights_SK is not None
        arrays = saved(choices.indices_SK.astype(self._types[layer], copy=False))
        if has_weights:
            arrays += saved(choices.weights_SK.astype(np.float16, copy=False))
        self._is_truncated = True  # unless all of it is written
        self._file.write(_key(step, micro_batch, layer, has_weights, arrays) + arrays)
        self._is_truncated = False

    def flush(self) -> None:
        """Flush all written data to the system."""
        self._file.flush()

    def close(self) -> None:
        """Write what is left, and close the file."""
        if not self._file.closed and not self._is_truncated:
            self._file.write(_key(CLOSED, 0, 0, False, b""))
        self._file.close()


def as_text(value: Any) -> np.ndarray:
    """Return a value as JSON, in an array of bytes."""
    return np.frombuffer(json.dumps(value).encode("utf-8"), dtype=np.uint8)


def sealed(numbers: Any) -> np.ndarray:
    """Return whole numbers with their checksum behind them."""
    said = np.array(numbers, dtype="<i8")
    return np.append(said, zlib.crc32(said.tobytes()))


def _key(step: int, micro_batch: int, layer: int, has_weights: bool, arrays: bytes) -> bytes:
    return saved(sealed([step, micro_batch, layer, has_weights, len(arrays), zlib.crc32(arrays)]))


def saved(array: np.ndarray) -> bytes:
    """Return an array as it is in a file."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


KEY_BYTES = len(_key(CLOSED, 0, 0, False, b""))
