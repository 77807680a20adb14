# SPDX-License-Identifier: Apache-2.0
"""Reads and writes ``fsmoe.json``, the manifest of a checkpoint: its layout, versions, and a checksum of every file.

Saving writes it, loading and ``convert`` check files by it. It is JSON, as the other files that describe a checkpoint:
any content is either understood or refused with a clear message. Reading it runs no code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, StrictStr

from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart, Layout, Shard, parts_file
from ds_fsmoe.checkpoint_files.numbering import ShardDim, StageOfLayers, expert_file, main_file
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.files.whole_files import OWNER
from ds_fsmoe.shapes import Counted, Listed, Positive, made
from ds_fsmoe.untrusted import problem_of, read_regular
from ds_fsmoe.versions import VERSION

_T = TypeVar("_T")

NAME = "fsmoe.json"
OURS = "fsmoe_"
"""The prefix of the names of our other files."""
FORMAT = 1
_STATES = "optim_states.pt"
"""The end of the names of files with states of the optimizer."""
_WEIGHTS = re.compile(r"(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")
FIRST = "first"
STAGE_3 = 3
"""The ZeRO stage whose files hold the weights by ranks."""


@dataclass(frozen=True)
class Sizes:
    """Describes the layout of a job, by which states of optimizers are split."""

    world: Positive
    mp: Positive
    pp: Positive
    zero_stage: Counted
    esp: Positive
    dtype: StrictStr

    def differences(self, now: Sizes) -> list[str]:
        """Return the differences between this layout and the present one, in words."""
        after = vars(now)
        return [f"{name} {before} -> {after[name]}" for name, before in vars(self).items() if before != after[name]]


def _not_alike(cut: Any) -> Any:
    if isinstance(cut, (bool, float)):  # Pydantic takes False and 0.0 for the choice 0
        raise ValueError("must be a dimension or a word")
    return cut


@dataclass(frozen=True)
class LayerSizes:
    """Describes the sizes of one MoE layer."""

    path: StrictStr
    num_experts: Positive
    ep: Positive
    cuts: Mapping[StrictStr, Annotated[ShardDim, BeforeValidator(_not_alike)]] = field(default_factory=dict)
    """Maps a parameter of its experts -> how shards are cut from it; empty where that is not known."""
    stage: Counted = 0
    """The stage of the pipeline that has it."""


@dataclass(frozen=True)
class PartSizes:
    """Describes how one parameter of a Hugging Face model's experts was spread over ranks."""

    layout: Layout
    num_experts: Positive
    ep: Positive
    shards: Positive = 1
    """The ranks that shared an expert."""
    cut: StrictStr = FIRST
    """The dimension that was cut into shards, as text; "first": whole in the first shard and zero in the others."""
    pieces: Positive = 1
    """See :class:`~ds_fsmoe.checkpoint_files.expert_parts.Shard`."""
    stage: Counted = 0
    """The stage of the pipeline that has it."""

    @staticmethod
    def of(part: ExpertPart, stage: int = 0) -> PartSizes:
        """Return the data that all parts of a parameter share."""
        sizes = part.layout, part.num_experts, part.ep_size
        if part.shard is None:
            return PartSizes(*sizes, stage=stage)
        cut = FIRST if part.shard.dim is None else str(part.shard.dim)
        return PartSizes(*sizes, part.shard.count, cut, part.shard.pieces, stage)

    def first(self) -> ExpertPart:
        """Return the description of the first part.

        Raises:
            ValueError: there is no first part.
        """
        dim = None if self.cut == FIRST else int(self.cut)
        shard = None if self.shards == 1 else Shard(self.shards, 0, dim, self.pieces)
        return ExpertPart(self.layout, self.num_experts, self.ep, 0, shard)


@dataclass(frozen=True)
class FileSum:
    """Holds the size and the checksum of one file."""

    size_bytes: Counted
    sha256: StrictStr


def _in_folder(name: str) -> str:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"a file outside the folder: {name!r}")
    return name


FileName = Annotated[StrictStr, AfterValidator(_in_folder)]
"""The name of a file in the folder of a tag, or in a folder there."""


@dataclass(frozen=True)
class Manifest:
    """Represents the whole manifest of a checkpoint."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    sizes: Sizes
    layers: Listed[LayerSizes]
    versions: Mapping[str, Any]
    files: Mapping[FileName, FileSum]
    """Maps a name in the folder -> what the file has to be."""
    parts: Mapping[StrictStr, PartSizes] = field(default_factory=dict)
    """Maps the name of a parameter that is spread over ranks -> how; those of Hugging Face models' experts."""
    stages: Listed[StageOfLayers] = ()
    """The stages of a pipeline; empty without one, and where an older version has saved it, which did not say."""

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder that is not published yet."""
        text = json.dumps({"format": FORMAT, "ds_fsmoe": VERSION} | vars(self), default=vars)
        (folder / NAME).write_text(text)


def read_described(path: Path, version: int, make: Callable[[Any], _T]) -> _T | None:
    """Return the content of a file, or ``None`` if there is no file.

    Args:
        path: the file.
        version: the version of its format.
        make: builds the result from the JSON data; may raise any error on a wrong value.

    Raises:
        CheckpointError: the file cannot be read, has another format, or is refused by ``make``.
    """
    if not os.path.lexists(path):
        return None
    if (problem := problem_of(path, path.parent)) is not None:
        raise CheckpointError(problem)
    try:
        found = json.loads(read_regular(path), object_pairs_hook=_without_doubles)
    except FileNotFoundError:  # removed since
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        if found["format"] != version:
            raise CheckpointError(
                f"{path} has format {found['format']!r}, and this version of ds_fsmoe ({VERSION}) reads {version}"
            )
        return make(found)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged, or not a manifest: {error!r}") from error


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is listed twice")
    return found


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a checkpoint; return ``None`` if there is none, as stock DeepSpeed writes none.

    Raises:
        CheckpointError: the manifest cannot be read.
    """
    return read_described(folder / NAME, FORMAT, _manifest)


def _manifest(found: Mapping[str, Any]) -> Manifest:
    # A later version may say more.
    manifest = made(Manifest, {each.name: found[each.name] for each in fields(Manifest) if each.name in found})
    for layer in manifest.layers:
        if layer.num_experts % layer.ep:
            raise ValueError(f"{layer.path}: num_experts = {layer.num_experts}: must be divisible by ep = {layer.ep}")
    for part in manifest.parts.values():
        first = part.first()  # refuses experts that do not divide
        if first.num_parts > len(manifest.files):
            raise ValueError(f"{first.num_parts} parts in {len(manifest.files)} files")
    if manifest.stages and len(manifest.stages) != manifest.sizes.pp:
        raise ValueError(f"{len(manifest.stages)} stages described, of {manifest.sizes.pp}")
    return manifest


def sum_of(path: Path) -> FileSum:
    """Return the size and the checksum of a file as it is now.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb", buffering=0) as opened:
        digest = hashlib.file_digest(opened, "sha256")
        return FileSum(opened.tell(), digest.hexdigest())


def names_in(folder: Path) -> list[str]:
    """Return every file of a checkpoint being written, except those that describe it, in the same order on every
    rank."""
    return sorted(each for each in _files_in(folder) if each.rpartition("/")[2] not in (NAME, OWNER))


def _files_in(folder: Path | str, before: str = "") -> Iterator[str]:
    # Every rank lists all files: it asks a shared file system for their names, not for each file's state.
    with os.scandir(folder) as found:
        for each in found:
            if each.is_dir(follow_symlinks=False):
                yield from _files_in(each.path, f"{before}{each.name}/")
            elif each.is_file():
                yield before + each.name


def names_read(manifest: Manifest, with_optimizer: bool) -> list[str]:
    """Return the files that a load reads, sorted. Below ZeRO 3 only states of the optimizer are in separate files.

    Args:
        manifest: the manifest of the checkpoint.
        with_optimizer: whether states of the optimizer are to be loaded.
    """
    is_needed = with_optimizer or manifest.sizes.zero_stage >= STAGE_3
    return sorted(each for each in manifest.files if is_needed or not each.endswith(_STATES))


def advice(manifest: Manifest, found: Sequence[str], with_optimizer: bool) -> str:
    """Return the advice for faults in files of optimizer states alone."""
    if not all(f"{_STATES} " in each for each in found):
        return ""
    if manifest.sizes.zero_stage >= STAGE_3:
        return ": at ZeRO 3 these files hold the weights as well, so nothing can be loaded without them"
    return ": load_optimizer_states=False loads the weights without them" if with_optimizer else ""


def faults(folder: Path, files: Mapping[str, FileSum], names: Iterable[str]) -> list[str]:
    """Return the faults of some of the files, one sentence for each."""
    found = []
    for name in names:
        path, wanted = folder / name, files[name]
        if (problem := problem_of(path, folder)) is not None:
            found.append(problem)
            continue
        try:
            size_bytes = path.stat().st_size
            if size_bytes != wanted.size_bytes:
                found.append(f"{path} has {size_bytes} bytes and should have {wanted.size_bytes}: it is cut short")
            elif sum_of(path) != wanted:
                found.append(f"{path} is not what was saved: its checksum differs")
        except OSError as error:
            found.append(f"{path} cannot be read: {error.strerror}")
    return found


def omissions(folder: Path, manifest: Manifest | None) -> list[str]:
    """Return a sentence for each file that a manifest lacks, since its changes would be unnoticed.

    Args:
        folder: the folder of the checkpoint.
        manifest: its manifest; ``None`` if there is none, as for stock DeepSpeed.
    """
    ours = sorted(each.name for each in folder.glob(f"{OURS}*") if each.name != OWNER)
    if manifest is None:
        return [
            f"{folder / NAME} is missing, and {each} says that ds_fsmoe has saved this checkpoint: it is unknown "
            f"whether its files are whole. To load them all the same, as stock DeepSpeed would, remove {OURS}* from it"
            for each in ours[:1]
        ]
    unnamed = [each for each in ours if each not in manifest.files]
    found = [f"{folder / NAME} does not name {each}, a file of the same folder" for each in unnamed]
    if not any(_WEIGHTS.fullmatch(each) for each in manifest.files):
        found.append(f"{folder / NAME} names no file of weights (mp_rank_00_model_states.pt)")
    of_stages = [
        *map(main_file, range(len(manifest.stages))),
        *(file for each in manifest.stages for file in each.files),
    ]
    wanted = dict.fromkeys(of_stages, "the weights of a pipeline stage")
    if manifest.sizes.zero_stage < STAGE_3:
        parts = {parts_file(at, each.stage) for each in manifest.parts.values() for at in range(each.first().num_parts)}
        wanted |= dict.fromkeys(sorted(parts), "the experts of a rank")
    found += [
        f"{folder / NAME} does not name {each}, {what}" for each, what in wanted.items() if each not in manifest.files
    ]
    # An older version named the layers of the first stage only.
    layers = manifest.layers if manifest.stages or manifest.sizes.pp == 1 else ()
    numbers = Counter[int]()
    experts = defaultdict[tuple[int, int], list[int]](list)
    for each in filter(None, map(expert_file, manifest.files)):
        experts[each.stage, each.layer].append(each.number)
    for layer in layers:
        at = numbers[layer.stage]
        numbers[layer.stage] += 1
        should = layer.num_experts * manifest.sizes.esp
        named = sum(number < should for number in experts[layer.stage, at])
        if named < should:
            found.append(
                f"{folder} has {named} files of experts of {layer.path}, and should have {should} by its {NAME}"
            )
    return found
