# SPDX-License-Identifier: Apache-2.0
"""Where in a checkpoint's files each parameter's states of the optimizer lie: ``fsmoe_pieces.json``.

DeepSpeed lays parameters end to end and cuts that by ranks. Where each of them came to lie is known when it is saved,
and written down; so the states can be read in any other layout, and by programs without ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_fsmoe.checkpoint_files.described import read_described

NAME = "fsmoe_pieces.json"
FORMAT = 1
MASTER = "fp32"
"""The item that is the parameter itself, in the precision it is optimized in."""

Keys = tuple[str | int, ...]


@dataclass(frozen=True)
class Piece:
    """Elements ``first`` to ``first + size`` of a parameter, ``at`` so many elements into each tensor of a group."""

    name: str
    """As the files name it: with the number of the expert, over all ranks."""
    first: int
    size: int
    at: int


@dataclass(frozen=True)
class Group:
    """Parameters whose states lie in the same tensors of one file.

    Attributes:
        file: name in the folder.
        items: name of a state (``"fp32"``, ``"exp_avg"``) -> keys and indices that lead to its tensor in the file.
        scalars: states that are one number for all, as ``"step"``.
        options: settings of the optimizer for the group, as ``"lr"``.
        pieces: of which parameters.
    """

    file: str
    items: Mapping[str, Keys]
    scalars: Mapping[str, float]
    options: Mapping[str, Any]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Index:
    """Of a checkpoint.

    Attributes:
        optimizer: the class that the states are of.
        groups: all.
        scaler: numbers of the loss scaler.
    """

    optimizer: str
    groups: tuple[Group, ...]
    scaler: Mapping[str, float | bool]

    def write(self, folder: Path) -> None:
        """Into a folder that is not published yet."""
        groups = [
            asdict(each) | {"pieces": [[piece.name, piece.first, piece.size, piece.at] for piece in each.pieces]}
            for each in self.groups
        ]
        text = json.dumps(
            {
                "format": FORMAT,
                "optimizer": self.optimizer,
                "groups": groups,
                "scaler": self.scaler,
            }
        )
        (folder / NAME).write_text(text)


def merged(indices: Iterable[Index]) -> Index:
    """Of what each rank knows; what several have a copy of is kept once."""
    groups: dict[tuple[str, Keys, tuple[str, ...]], Group] = {}
    scaler: Mapping[str, float | bool] = {}
    optimizer = ""
    for index in indices:
        for group in index.groups:
            names = tuple(piece.name for piece in group.pieces)
            groups.setdefault((group.file, next(iter(group.items.values()), ()), names), group)
        scaler, optimizer = scaler or index.scaler, index.optimizer
    return Index(optimizer, tuple(groups.values()), scaler)


def read_index(folder: Path) -> Index | None:
    """Of a checkpoint; ``None`` if there is none.

    Raises:
        CheckpointError: it cannot be read.
    """
    return read_described(folder / NAME, FORMAT, _index)


def _index(found: Mapping[str, Any]) -> Index:
    groups = tuple(_group(each) for each in found["groups"])
    scaler = {str(name): _number(each) for name, each in found["scaler"].items()}
    return Index(str(found["optimizer"]), groups, scaler)


def _group(found: Mapping[str, Any]) -> Group:
    pieces = []
    for name, *numbers in found["pieces"]:
        first, size, at = numbers
        if not isinstance(name, str) or any(type(each) is not int or each < 0 for each in numbers):
            raise ValueError(f"a piece {[name, *numbers]!r}")
        pieces.append(Piece(name, first, size, at))
    file = str(found["file"])
    if Path(file).is_absolute() or ".." in Path(file).parts:
        raise ValueError(f"a file outside the folder: {file!r}")
    return Group(
        file,
        {str(name): _keys(keys) for name, keys in found["items"].items()},
        {str(name): float(_number(each)) for name, each in found["scalars"].items()},
        dict(found["options"]),
        tuple(pieces),
    )


def _keys(found: Sequence[Any]) -> Keys:
    if not isinstance(found, list) or any(type(each) not in (str, int) for each in found):
        raise ValueError(f"keys {found!r}")
    return tuple(found)


def _number(found: Any) -> float | bool:
    if not isinstance(found, (int, float)):
        raise ValueError(f"a number {found!r}")
    return found
