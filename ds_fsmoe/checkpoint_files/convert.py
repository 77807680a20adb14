# SPDX-License-Identifier: Apache-2.0
"""Converts a checkpoint to other forms and back: stock DeepSpeed's files, one set of fp32 weights, Mixtral's names.

The command ``ds_fsmoe convert`` calls it. ``whole`` reads the checkpoint, ``huggingface`` writes safetensors.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch

from ds_fsmoe.checkpoint_files import tags
from ds_fsmoe.checkpoint_files.huggingface import (
    CONFIG,
    UnreadTensor,
    read_tensors,
    write_pretrained,
    write_tensors,
)
from ds_fsmoe.checkpoint_files.manifest import (
    NAME,
    LayerSizes,
    Manifest,
    Sizes,
    faults,
    names_in,
    omissions,
    read_manifest,
    sum_of,
)
from ds_fsmoe.checkpoint_files.numbering import (
    ExpertFile,
    ExpertName,
    Rename,
    expert_name,
    from_huggingface,
    renamed,
    to_huggingface,
)
from ds_fsmoe.checkpoint_files.publishing import Publication, recover
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.checkpoint_files.whole import DENSE_FILE, SHARED_OUT_FILE, Whole

Form = Literal["fp32", "huggingface", "stock", "deepspeed"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LOW = (torch.bfloat16, torch.float16)

ConversionProgress = Iterator[tuple[str, int]]
"""The files as they are written, each with the number of bytes that it holds."""


def find_tag(source: Path, tag: str | None) -> Path:
    """Return the folder of a tag: the given one, or the one in ``latest``, or ``source`` itself.

    Raises:
        CheckpointError: there is no such tag, or it could lead out of the folder.
    """
    source = Path(os.path.abspath(source))  # "." has no name, and what is made of a tag has that of its folder
    if tag is not None:
        check_tag(tag)
    if tag is None and any((source / each).is_file() for each in (DENSE_FILE, SHARED_OUT_FILE)):
        return source
    tag = tags.latest(source) if tag is None else tag
    if tag is None:
        raise CheckpointError(
            f"{source} has neither a {tags.LATEST} nor a {DENSE_FILE}: "
            f"{'give' if source.is_dir() else 'there is no such folder; give'} a folder of checkpoints"
        )
    recover(source, tag)
    if not (source / tag).is_dir():
        raise CheckpointError(f"{source / tag}: no such checkpoint")
    return source / tag


def check_tag(tag: str) -> None:
    """Check that a user's tag is the name of a folder next to the others.

    Raises:
        CheckpointError: the tag is not such a name.
    """
    if not tags.is_inside(tag) or tag != tag.strip():
        raise CheckpointError(f"--tag {tag!r}: must be the name of a folder, without .. and surrounding blanks")
    if tag in (tags.LATEST, f"{tags.LATEST}{tags.SAVING}") or tag.endswith((tags.SAVING, tags.BEFORE)):
        raise CheckpointError(f"--tag {tag!r}: this name is reserved for files next to a checkpoint")


def open_checked(place: Path) -> Whole:
    """Open a tag, and check every file that has a checksum against it.

    Raises:
        CheckpointError: a file is damaged; names the file and the problem.
    """
    if place.is_dir():
        manifest = read_manifest(place)
        wrong = omissions(place, manifest)
        if manifest is not None:
            wrong += faults(place, manifest.files, manifest.files)
        if wrong:
            raise CheckpointError("; ".join(wrong))
    return Whole(place)


def export_tensors(
    whole: Whole, target: Path, form: Form, renames: Sequence[Rename], dtype: str | None, limit_bytes: int
) -> ConversionProgress:
    """Write the weights of a checkpoint as safetensors, in the optimizer's precision if that is known.

    Args:
        whole: the checkpoint.
        target: the new folder.
        form: ``"fp32"`` keeps the model's names, ``"huggingface"`` writes Mixtral's.
        renames: the renames that are applied to the names after that.
        dtype: the type of floating numbers; by default fp32 for ``"fp32"``, the model's types for ``"huggingface"``.
        limit_bytes: the largest size of a file.

    Raises:
        CheckpointError: two parameters would have one name, or two pipeline stages have one name already.
        FileExistsError: the folder exists and is not empty.
    """
    whole.check_shared()
    if form == "huggingface" and (whole.place / CONFIG).is_file():
        if renames:
            raise CheckpointError("--rename: the names are those of the model's own save_pretrained; remove it")

        def like(name: str) -> torch.Tensor:
            found = whole.like(name)
            return found if dtype is None or not found.is_floating_point() else found.to(DTYPES[dtype])

        def read(name: str) -> torch.Tensor:
            wanted = like(name)
            is_cast = dtype is not None and wanted.is_floating_point()
            return whole.exact(name).to(wanted.dtype) if is_cast else whole.weights(name)

        yield from _into(target, lambda folder: write_pretrained(whole, folder, like, read, limit_bytes, dtype), whole)
        return
    sources: dict[str, UnreadTensor] = {}
    for name in whole.names():
        like = whole.like(name)
        if form == "fp32" and dtype is None and whole.index is None and like.dtype in _LOW:
            raise CheckpointError(
                f"{whole.place} does not contain the place of its fp32 weights (stock DeepSpeed's does not), and "
                f"{name} is less than fp32: --dtype float32 converts it anyway"
            )
        wanted = like.dtype
        if like.is_floating_point():
            wanted = DTYPES[dtype or "float32"] if form == "fp32" or dtype else like.dtype
        new = renamed(to_huggingface(name) if form == "huggingface" else name, renames)
        if new in sources:
            raise CheckpointError(f"{name} would get the name {new}, which another parameter has")
        sources[new] = UnreadTensor(
            like.shape,
            like.numel() * wanted.itemsize,
            lambda name=name, wanted=wanted: whole.exact(name).to(wanted),
        )
    yield from _into(target, lambda folder: write_tensors(sources, folder, limit_bytes), whole)


def export_stock(whole: Whole, target: Path) -> ConversionProgress:
    """Write files that stock DeepSpeed loads, with shards and parts of experts joined.

    If any are joined, the optimizer's states are left out, since they are split in the same way.

    Args:
        whole: the checkpoint.
        target: the new folder of checkpoints; the tag keeps its name.

    Raises:
        FileExistsError: the folder exists and is not empty.
    """

    def write(folder: Path) -> ConversionProgress:
        place = folder / whole.place.name
        place.mkdir()
        if whole.parts and whole.num_stages > 1:
            raise CheckpointError(
                f"{whole.place}: experts of a Hugging Face model in pipeline stages cannot be written for stock "
                "DeepSpeed; --to fp32 writes them whole"
            )
        if whole.parts or whole.is_shared_out:
            dense = {name: whole.weights(name) for name in whole.names() if expert_name(name) is None}
            torch.save(_dense_state(dense, []), place / DENSE_FILE)
            yield DENSE_FILE, sum(each.numel() * each.itemsize for each in dense.values())
            (folder / tags.LATEST).write_text(place.name)
            return
        cut = any(each.esp > 1 for each in whole.numbering.values())
        for file in sorted(each for each in whole.files() if each.parent == whole.place):
            if not cut or file.name in whole.dense_files:
                shutil.copy2(file, place / file.name)
                yield file.name, file.stat().st_size
        if cut:
            names = [each for each in map(expert_name, whole.names()) if each is not None]
            sources = {each: lambda name=str(each): whole.weights(name) for each in names}
            yield from _write_experts(place, sources, whole.file_of)
        (folder / tags.LATEST).write_text(place.name)

    yield from _into(target, write, whole)


def _write_experts(
    place: Path, sources: dict[ExpertName, Callable[[], torch.Tensor]], file_of: Callable[[str, int], str]
) -> ConversionProgress:
    by_file: dict[str, dict[str, Callable[[], torch.Tensor]]] = defaultdict(dict)
    for name, read in sources.items():
        by_file[file_of(name.layer, name.number)][str(name)] = read
    for file, reads in by_file.items():
        state = {name: read().clone() for name, read in reads.items()}
        torch.save(state, place / file)
        yield file, sum(each.numel() * each.itemsize for each in state.values())


def import_tensors(source: Path, target: Path, tag: str, renames: Sequence[Rename]) -> ConversionProgress:
    """Write safetensors with Mixtral's or DeepSpeed's names as a checkpoint of weights only.

    Args:
        source: a safetensors file, or a folder of them.
        target: the new folder of checkpoints.
        tag: the checkpoint's name.
        renames: the renames that are applied before the names are made DeepSpeed's.

    Raises:
        CheckpointError: no experts, unequal numbers of a parameter's experts, two parameters of one name, or a tag that
            is not valid.
        FileExistsError: the folder exists and is not empty.
    """
    check_tag(tag)
    found: dict[str, UnreadTensor] = {}
    for name, each in read_tensors(source).items():
        new = renamed(name, renames)
        if new in found:
            raise CheckpointError(f"{name} would get the name {new}, which another parameter has")
        found[new] = each
    names = from_huggingface(found)
    experts = {each: found[name] for name in found if (each := expert_name(names[name])) is not None}
    # In the order in which a model would have them: 2 before 10.
    layers = sorted({each.layer for each in experts}, key=_by_numbers)
    if not layers:
        raise CheckpointError(
            f"{source} has no experts: no name like <layer>.experts.0.w1.weight; is a --rename missing?"
        )
    shapes: dict[str, set[torch.Size]] = defaultdict(set)
    for each, tensor in experts.items():
        shapes[f"{each.layer}.{each.parameter}"].add(tensor.shape)
    for parameter, of_experts in shapes.items():
        if len(of_experts) > 1:
            raise CheckpointError(f"{parameter} has shapes {sorted(map(list, of_experts))} in different experts")
    counts = [_num_experts(layer, [each for each in experts if each.layer == layer]) for layer in layers]

    def write(folder: Path) -> ConversionProgress:
        place = folder / tag
        place.mkdir(parents=True)
        dense = {names[name]: each.read() for name, each in found.items() if expert_name(names[name]) is None}
        dtype = next(iter(dense.values()), torch.empty(0)).dtype
        torch.save(_dense_state(dense, counts), place / DENSE_FILE)
        yield DENSE_FILE, sum(each.numel() * each.itemsize for each in dense.values())
        reads = {each: tensor.read for each, tensor in experts.items()}
        yield from _write_experts(place, reads, lambda layer, number: str(ExpertFile(0, layers.index(layer), number)))
        sizes = Sizes(world=1, mp=1, pp=1, zero_stage=0, esp=1, dtype=str(dtype).removeprefix("torch."))
        of_layers = tuple(LayerSizes(layer, count, 1) for layer, count in zip(layers, counts, strict=True))
        sums = {name: sum_of(place / name) for name in names_in(place)}
        Manifest(sizes, of_layers, {"torch": torch.__version__}, sums).write(place)
        yield NAME, 0
        (folder / tags.LATEST).write_text(tag)

    yield from _into(target, write)


def _num_experts(layer: str, names: Sequence[ExpertName]) -> int:
    by_parameter: dict[str, set[int]] = defaultdict(set)
    for each in names:
        by_parameter[each.parameter].add(each.number)
    count = max(map(len, by_parameter.values()))
    for parameter, numbers in by_parameter.items():
        if numbers != set(range(count)):
            missing = sorted(set(range(count)) - numbers)
            raise CheckpointError(f"{layer} has {count} experts, but no {parameter} of {missing or sorted(numbers)}")
    return count


def _dense_state(dense: dict[str, torch.Tensor], num_experts: Sequence[int]) -> dict[str, object]:
    """Return the state that DeepSpeed expects in this file when it loads weights."""
    state: dict[str, object] = dict.fromkeys(("optimizer", "lr_scheduler", "param_shapes", "ds_autoep_layers"))
    counts = dict.fromkeys(("global_steps", "global_samples", "skipped_steps"), 0)
    sizes = {"dp_world_size": 1, "mp_world_size": 1}
    return state | counts | sizes | {"module": dense, "num_experts": list(num_experts), "buffer_names": []}


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders names by the values of their numbers: 10 comes after 9."""
    texts = re.split(r"([0-9]+)", name)
    return [(len(each.lstrip("0")), each.lstrip("0")) if i % 2 else (-1, each) for i, each in enumerate(texts)]


def _into(target: Path, write: Callable[[Path], ConversionProgress], source: Whole | None = None) -> ConversionProgress:
    """Write a folder completely or not at all, from one checkpoint only."""
    target = Path(os.path.abspath(target))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not empty")
    publication = Publication(target.parent, target.name, secrets.token_hex(4))
    publication.begin()
    try:
        yield from write(publication.unfinished)
        if source is not None and read_manifest(source.place) != source.manifest:
            raise CheckpointError(f"{source.place} was overwritten while it was read: convert it again")
        publication.sync()
        publication.publish()
    except BaseException:  # whatever it is, nothing half written stays
        publication.abandon()
        raise
