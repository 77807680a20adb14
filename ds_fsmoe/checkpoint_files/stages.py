# SPDX-License-Identifier: Apache-2.0
"""Says which files of a checkpoint belong to which stage of a pipeline, and which layers a stage has.

DeepSpeed writes the number of the stage where other jobs have that of a tensor-parallel rank (``mp_rank_01``), in the
names of experts' files too, so no stage writes over another. A stage with MoE layers has its other weights in one file;
a stage without has a file for each of its layers, in which names begin at the layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_STAGE = re.compile(r"(?:^|_)mp_rank_(?P<stage>[0-9]{1,9})_")


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline."""

    first: int
    """The number of its first layer in the pipeline."""
    end: int
    """The number of the layer after its last."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Maps the file of a layer -> the path of its module in the model; empty for a stage with one file."""

    def __post_init__(self) -> None:
        if type(self.first) is not int or type(self.end) is not int or not 0 <= self.first <= self.end:
            raise ValueError(f"layers {self.first!r} to {self.end!r} of a stage")
        for file, path in self.files.items():
            if type(path) is not str or not path or Path(file).name != file:
                raise ValueError(f"a layer {path!r} in {file!r}")

    @property
    def layers(self) -> str:
        """Its layers, in words."""
        return f"layers {self.first} to {self.end - 1}" if self.end > self.first else "no layers"


def main_file(stage: int) -> str:
    """Return DeepSpeed's name for the file with what a stage has beside its experts; 0 without stages."""
    return f"mp_rank_{stage:02d}_model_states.pt"


def stage_of_file(name: str) -> int:
    """Return the stage that a file belongs to; 0 for a file whose name does not say so."""
    found = _STAGE.search(name)
    return 0 if found is None else int(found["stage"])
