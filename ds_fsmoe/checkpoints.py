# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's checkpoints, saved so that a kill at any moment leaves the last good one, and checked when they are read.

The files and their names are DeepSpeed's. Beside them lie ``fsmoe.json`` (sizes, versions, checksums) and one small
file for each rank, with its random generators and the plans it runs by: who goes on with them goes on to the bit.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups as stock_groups

from ds_fsmoe.checkpoint_reading import Reading, caught_writes
from ds_fsmoe.components.shards import cuts_of
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.optimizer_pieces import index_of, refresh_masters
from ds_fsmoe.plan_state import STATE_FORMAT, RankState, go_on_with, is_settled, plans_of, read_rank_state
from ds_fsmoe.progress import shown
from ds_fsmoe.runtime.agreement import facts_of_versions
from ds_fsmoe.saving import manifest as manifests
from ds_fsmoe.saving import pieces, tags
from ds_fsmoe.saving.manifest import LayerSizes, Manifest, Sizes
from ds_fsmoe.saving.numbering import Numbering
from ds_fsmoe.saving.pieces import Index, merged, read_index
from ds_fsmoe.saving.random_states import random_states, set_random_states
from ds_fsmoe.saving.tags import CheckpointError


def state_file(rank: int) -> str:
    """In the folder of a tag."""
    return f"fsmoe_rank_{rank:05d}.pt"


def sizes_of(engine: Any) -> Sizes:
    """How an engine's job is laid out."""
    running = engine.fsmoe.running
    dtype = next((str(each.dtype) for each in engine.module.parameters()), "none")
    return Sizes(
        world=dist.get_world_size(),
        mp=running.mp_size,
        pp=running.pp_size,
        zero_stage=engine.zero_optimization_stage(),
        esp=engine.fsmoe.block.esp_size,
        dtype=dtype.removeprefix("torch."),
    )


class Checkpoints:
    """Of one engine. Every method is collective.

    Args:
        engine: of ours.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def save(self, folder: Path, tag: str, write: Callable[[str], Any], save_latest: bool) -> Any:
        """Write a tag, publish it, and let ``latest`` name it.

        Args:
            folder: of all tags.
            tag: a name, or a path in the folder.
            write: writes DeepSpeed's files into the folder under the name it is given.
            save_latest: whether ``latest`` is to name it.

        Returns:
            What ``write`` has returned.

        Raises:
            CheckpointError: on every rank, if one could not write; ``latest`` and its tag are as they were.
        """
        unfinished = tags.unfinished_name(tag)
        self._on_leaders(f"making room for {folder / unfinished}", lambda: tags.clear(folder, tag))
        with caught_writes(self._engine.checkpoint_engine) as failed:
            result = write(unfinished)
        self._together(f"writing {folder / unfinished}", failed.raise_first)
        own = folder / unfinished / state_file(dist.get_rank())
        self._together(f"writing {own}", lambda: torch.save(self._state(), own))
        self._write_index(folder / unfinished)
        self._describe(folder / unfinished)
        self._on_leaders(f"publishing {folder / tag}", lambda: self._publish(folder, tag))
        if save_latest:
            self._on_leaders(f"writing {folder / tags.LATEST}", lambda: tags.point(folder, tag))
        return result

    def load(self, folder: Path, tag: str | None, read: Callable[..., Any], asked: dict[str, Any]) -> Any:
        """Check a tag, read it, and go on from it.

        Args:
            folder: of all tags.
            tag: or ``None`` for what ``latest`` names.
            read: DeepSpeed's own reading of a tag of a folder.
            asked: what of it is to be read, as DeepSpeed's ``load_checkpoint`` names that.

        Returns:
            What ``read`` has returned.

        Raises:
            CheckpointError: on every rank, with what is wrong with which file.
        """
        with_optimizer = asked.get("load_optimizer_states", True) and not asked.get("load_module_only", False)
        if tag is None:
            self._together(f"looking for {folder}", lambda: tags.check_there(folder))
        found = self.check(folder, tag)
        if found is None:
            return read(str(folder), None, **asked)
        place = folder / found
        manifest = manifests.read_manifest(place)
        reading = Reading(self._engine, place)
        sizes = sizes_of(self._engine)
        # Stock's, and whatever else has no manifest, has whole experts.
        differences = [f"esp_size 1 -> {sizes.esp}"] if manifest is None and sizes.esp > 1 else []
        recut = manifest is None and sizes.esp > 1
        if manifest is not None:
            differences, recut = self._differences(manifest), self._is_recut(manifest)
            _tell_versions(place, manifest)
            if with_optimizer and not differences and not self._lies_alike(place):
                differences = ["the order of ranks or of parameters"]
        moved = bool(differences) and with_optimizer
        if moved:
            self._together(f"moving {place}", lambda: self._check_move(place, differences, reading))
            asked = asked | {"load_optimizer_states": False}
        elif recut:
            self._together(f"reading {place}", lambda: self._check_one_stage(place, differences))
        sharper = moved and manifest is not None and manifest.sizes.dtype != sizes.dtype == "float32"
        own = None if asked.get("load_module_only", False) else self._read_state(place, manifest)
        results: list[Any] = []
        with reading.in_use(recut, sharper, asked.get("load_module_strict", True)):
            self._together(f"reading {place}", lambda: results.append(read(str(folder), found, **asked)))
        result = results[0]
        if not with_optimizer or moved:
            refresh_masters(self._engine)
        if moved:
            self._together(f"moving {place}", reading.fill_optimizer)
            log_on_rank_0(f"{place} was moved to another layout: {'; '.join(differences)}")
            if result[1] is not None:
                result[1].pop("optimizer", None)
        if result[0] is not None and own is not None:
            self._go_on(own)
        return result

    def check(self, folder: Path, tag: str | None) -> str | None:
        """Before a tag is read: which one, and whether it is whole.

        Args:
            folder: of all tags.
            tag: or ``None`` for what ``latest`` names.

        Returns:
            The tag; ``None`` if there is none to be read.

        Raises:
            CheckpointError: on every rank, with what is wrong with which file.
        """
        found: list[str | None] = [tag]
        if tag is None:
            self._together(f"reading {folder / tags.LATEST}", lambda: found.__setitem__(0, tags.latest(folder)))
            tag = found[0]
            if tag is None:
                return None
        wanted = tag
        self._on_leaders(f"looking for {folder / tag}", lambda: _recover(folder, wanted))
        place = folder / tag
        described: list[Manifest | None] = [None]
        self._together(f"reading {place}", lambda: described.__setitem__(0, manifests.read_manifest(place)))
        manifest = described[0]
        if manifest is None:
            return tag
        self._together(f"checking {place}", lambda: self._check_layers(place, manifest))
        self._together(f"checking {place}", lambda: self._check_files(place, manifest))
        return tag

    def _read_state(self, place: Path, manifest: Manifest | None) -> RankState | None:
        """What this rank goes on with, once the tag has been read: looked at before, as an error should find the engine
        as it was.

        Returns:
            ``None`` where there is nothing of that kind.

        Raises:
            CheckpointError: on every rank, if the state of one is damaged.
        """
        own = place / state_file(dist.get_rank())
        if manifest is None or manifest.sizes.world != dist.get_world_size():
            log_on_rank_0(
                f"{place} was saved by stock DeepSpeed or by another number of ranks: random generators and plans are "
                "not taken from it"
            )
            return None
        found: list[RankState] = []
        fits = not self._differences(manifest)
        self._together(f"reading {own}", lambda: found.append(read_rank_state(own, self._engine.fsmoe, fits)))
        return found[0]

    def _go_on(self, own: RankState) -> None:
        """Draw and plan as when the tag was saved. Collective."""
        set_random_states(own.random)
        # Ranks of one stage have the same plans; all make communicators together or none does.
        every = [own.plans is not None] * dist.get_world_size()
        dist.all_gather_object(every, every[0])
        if all(every) and own.plans is not None:
            go_on_with(self._engine.fsmoe, own.plans)

    def _state(self) -> dict[str, Any]:
        state = self._engine.fsmoe
        plans = plans_of(state) if is_settled(state) else None
        return {"format": STATE_FORMAT, "random": random_states(), "plans": json.dumps(plans)}

    def _describe(self, place: Path) -> None:
        """Sum up every file, each rank some of those it sees, and write the manifest."""
        names = manifests.names_in(place)
        seen: list[Sequence[str]] = [names] * dist.get_world_size()
        dist.all_gather_object(seen, names)
        own = {}

        def sum_up() -> None:
            names = sorted({each for every in seen for each in every})
            owners_of = {name: [rank for rank, every in enumerate(seen) if name in every] for name in names}
            mine = [
                name
                for at, (name, owners) in enumerate(owners_of.items())
                if owners[at % len(owners)] == dist.get_rank()
            ]
            own.update({name: manifests.sum_of(place / name) for name in shown(mine, f"summing up {place.name}")})

        self._together(f"summing up {place}", sum_up)
        of_ranks: list[dict[str, Any]] = [own] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
        files = {name: each for every in of_ranks for name, each in every.items()}
        engine = self._engine
        layers = tuple(
            LayerSizes(
                name,
                layer.num_experts,
                layer.deepspeed_moe.ep_size,
                cuts_of(layer.deepspeed_moe.experts.deepspeed_experts[0]),
            )
            for name, layer in engine.fsmoe.layers.items()
        )
        manifest = Manifest(
            sizes_of(engine), layers, facts_of_versions(("torch", "deepspeed")), dict(sorted(files.items()))
        )
        self._on_leaders(f"writing {place / manifests.NAME}", lambda: manifest.write(place))

    def _lies_alike(self, place: Path) -> bool:
        """Whether each rank's states lie where this job would have put them; without an index that is not known."""
        index, own = read_index(place), None
        if index is not None:
            file = self._states_file(place)
            there = [each.pieces for each in index.groups if each.file == file]
            found = index_of(self._engine, file)
            own = found is None or [each.pieces for each in found.groups] == there
        every = [own] * dist.get_world_size()
        dist.all_gather_object(every, own)
        return all(each is None or each for each in every)

    def _states_file(self, place: Path) -> str:
        """Where DeepSpeed has the states of this rank."""
        engine = self._engine
        if engine.zero_optimization():
            return Path(engine._get_zero_ckpt_name(str(place.parent), place.name)).name
        expert_rank = stock_groups._get_expert_parallel_rank(stock_groups._get_max_expert_size_name())
        return Path(engine._get_optimizer_ckpt_name(str(place.parent), place.name, expert_rank)).name

    def _publish(self, folder: Path, tag: str) -> None:
        """What a user has put beside the files of a tag stays there when it is saved over."""
        known: set[str] = set()
        if (folder / tag).is_dir():
            with suppress(CheckpointError):
                before = manifests.read_manifest(folder / tag)
                known = {manifests.NAME, *before.files} if before is not None else set()
        tags.publish(folder, tag, known)

    def _is_recut(self, manifest: Manifest) -> bool:
        """Whether the files of experts would be other ones, had this job saved them."""
        was = {each.path: Numbering(each.num_experts, each.ep, manifest.sizes.esp) for each in manifest.layers}
        esp = sizes_of(self._engine).esp
        layers = self._engine.fsmoe.layers.items()
        now = {name: Numbering(layer.num_experts, layer.deepspeed_moe.ep_size, esp) for name, layer in layers}
        return any(was.get(name) != each and max(was[name].esp, esp) > 1 for name, each in now.items() if name in was)

    def _write_index(self, place: Path) -> None:
        """Where states of the optimizer lie, gathered from all ranks."""
        engine, sizes = self._engine, sizes_of(self._engine)
        if sizes.mp > 1 or sizes.pp > 1 or engine.optimizer is None:
            return
        own: list[Index | None] = [None]

        def look() -> None:
            own[0] = index_of(engine, self._states_file(place))

        self._together(f"describing {place}", look)
        of_ranks: list[Index | None] = own * dist.get_world_size()
        dist.all_gather_object(of_ranks, own[0])
        indices = [each for each in of_ranks if each is not None]
        if len(indices) == len(of_ranks):
            self._on_leaders(f"writing {place / pieces.NAME}", lambda: merged(indices).write(place))
        else:
            log_on_rank_0(
                f"{type(engine.optimizer).__name__} keeps states of which nothing is known: {place} can be loaded in "
                "the layout of this job only"
            )

    def _check_layers(self, place: Path, manifest: Manifest) -> None:
        now = {name: layer.num_experts for name, layer in self._engine.fsmoe.layers.items()}
        saved = {each.path: each.num_experts for each in manifest.layers}
        if saved != now and self._engine.fsmoe.running.pp_size == 1:
            raise CheckpointError(f"{place} has MoE layers (path: experts) {saved}, and the model has {now}")

    def _check_move(self, place: Path, differences: Sequence[str], reading: Reading) -> None:
        try:
            self._check_one_stage(place, differences)
            reading.check_states()
        except CheckpointError as error:
            raise CheckpointError(
                f"{place} was saved in another layout ({'; '.join(differences)}), to which it cannot be moved: "
                f"{error}. Load it with load_optimizer_states=False, which takes the weights, or in the layout of then"
            ) from error

    def _check_one_stage(self, place: Path, differences: Sequence[str]) -> None:
        sizes = sizes_of(self._engine)
        if sizes.mp > 1 or sizes.pp > 1 or any(each.startswith(("mp ", "pp ")) for each in differences):
            raise CheckpointError(f"{place}: tensor-parallel ranks and pipeline stages stay as they are")
        if self._engine.use_node_local_storage():
            raise CheckpointError(f"{place} lies on several nodes, and its files are needed on all")

    def _differences(self, manifest: Manifest) -> list[str]:
        """What of the layout is not as it was, in words."""
        differences = manifest.sizes.differences(sizes_of(self._engine))
        ep = {each.path: each.ep for each in manifest.layers}
        ep_now = {name: layer.deepspeed_moe.ep_size for name, layer in self._engine.fsmoe.layers.items()}
        if ep != ep_now and self._engine.fsmoe.running.pp_size == 1:
            differences.append(f"ep_size {sorted(set(ep.values()))} -> {sorted(set(ep_now.values()))}")
        return differences

    def _check_files(self, place: Path, manifest: Manifest) -> None:
        names, rank, size = sorted(manifest.files), dist.get_rank(), dist.get_world_size()
        if self._engine.use_node_local_storage():
            # Of the files of other nodes nothing can be said here.
            names, rank, size = [each for each in names if (place / each).exists()], self._engine.local_rank, 1
        found = manifests.faults(place, manifest.files, shown(names[rank % size :: size], f"checking {place.name}"))
        if found:
            raise CheckpointError("; ".join(found))

    def _on_leaders(self, what: str, act: Callable[[], Any]) -> None:
        """On one rank of each file system."""
        engine = self._engine
        leads = engine.local_rank == 0 if engine.use_node_local_storage() else engine.global_rank == 0
        self._together(what, act if leads else lambda: None)

    def _together(self, what: str, act: Callable[[], Any]) -> None:
        """All ranks go on, or all raise what the first has met."""
        problem = ""
        try:
            act()
        except CheckpointError as error:
            problem = str(error)
        except Exception as error:  # whatever it is, the others have to hear of it
            problem = f"{what} failed: {type(error).__name__}: {error}"
        problems = [problem] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        told = "; ".join(dict.fromkeys(each for each in problems if each))
        if told:
            raise CheckpointError(told)


def _tell_versions(place: Path, manifest: Manifest) -> None:
    now = facts_of_versions(("torch", "deepspeed"))
    other = [
        f"{name} {each} (now {now[name]})" for name, each in manifest.versions.items() if now.get(name, each) != each
    ]
    if other:
        log_on_rank_0(f"{place} was saved with {', '.join(other)}", logging.WARNING)


def _recover(folder: Path, tag: str) -> None:
    if tags.recover(folder, tag):
        log_on_rank_0(f"{folder / tag} was put back: a save over it was killed", logging.WARNING)
    if not (folder / tag).is_dir():
        known = ", ".join(sorted(each.name for each in folder.iterdir() if each.is_dir())) if folder.is_dir() else ""
        raise CheckpointError(f"{folder / tag}: no such checkpoint; there are: {known or 'none'}")
