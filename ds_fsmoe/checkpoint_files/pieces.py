# SPDX-License-Identifier: Apache-2.0
"""The index ``fsmoe_pieces.json``: where in a checkpoint's files each parameter's optimizer states are.

DeepSpeed lays parameters end to end and cuts the result by ranks. Where each parameter is becomes known on saving,
and is written down; so the states can be read in any other layout, and by programs without ranks.
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
"""The item that is the parameter itself, in the precision in which it is optimized."""
WEIGHTS = "weights"
"""The item that is a parameter which is not optimized, where a rank's file has a piece of it."""

Keys = tuple[str | int, ...]


@dataclass(frozen=True)
class Piece:
    """The elements ``first`` to ``first + size`` of a parameter; they begin at element ``at`` of a group's tensors."""

    name: str
    """The parameter's name in the files: with the number of the expert, over all ranks."""
    first: int
    size: int
    at: int


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

    file: str
    items: Mapping[str, Keys]
    scalars: Mapping[str, float]
    options: Mapping[str, Any]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Index:
    """The index of a checkpoint's optimizer states.

    Attributes:
        optimizer: the name of the optimizer's class.
        groups: all groups.
        scaler: the numbers of the loss scaler.
    """

    optimizer: str
    groups: tuple[Group, ...]
    scaler: Mapping[str, float | bool]

    def write(self, folder: Path) -> None:
        """Write the index into a folder that is not published yet."""
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
    """Merge what each rank knows; what several ranks have a copy of is kept once."""
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
    """Read the index of a checkpoint; return ``None`` if there is none.

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
