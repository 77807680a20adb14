# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's checkpoints, saved so that a kill at any moment leaves the last good one, and checked when they are read.

The files and their names are DeepSpeed's. Beside them lie ``fsmoe.json`` (sizes, versions, checksums) and one small
file for each rank, with its random generators and the plans it runs by: who goes on with them goes on to the bit.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.plan_state import go_on_with, is_settled, plans_of
from ds_fsmoe.runtime.agreement import facts_of_versions
from ds_fsmoe.saving import manifest as manifests
from ds_fsmoe.saving import tags
from ds_fsmoe.saving.manifest import LayerSizes, Manifest, Sizes
from ds_fsmoe.saving.random_states import random_states, set_random_states
from ds_fsmoe.saving.tags import CheckpointError

_STATE_FORMAT = 1


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
        result = write(unfinished)
        own = folder / unfinished / state_file(dist.get_rank())
        self._together(f"writing {own}", lambda: torch.save(self._state(), own))
        self._describe(folder / unfinished)
        self._on_leaders(f"publishing {folder / tag}", lambda: tags.publish(folder, tag))
        if save_latest:
            self._on_leaders(f"writing {folder / tags.LATEST}", lambda: tags.point(folder, tag))
        return result

    def check(self, folder: Path, tag: str | None, with_optimizer: bool) -> str | None:
        """Before a tag is read: which one, and whether it is whole.

        Args:
            folder: of all tags.
            tag: or ``None`` for what ``latest`` names.
            with_optimizer: whether states of optimizers are to be read, which are cut by the layout.

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
        self._together(f"checking {place}", lambda: self._check_layout(place, manifest, with_optimizer))
        self._together(f"checking {place}", lambda: self._check_files(place, manifest))
        return tag

    def go_on(self, folder: Path, tag: str) -> None:
        """After a tag has been read: draw and plan as when it was saved.

        Raises:
            CheckpointError: on every rank, if the state of one is damaged.
        """
        own = folder / tag / state_file(dist.get_rank())
        manifest = manifests.read_manifest(folder / tag)
        if manifest is None or manifest.sizes.world != dist.get_world_size():
            log_on_rank_0(
                f"{folder / tag} was saved by stock DeepSpeed or by another number of ranks: random generators and "
                "plans are not taken from it"
            )
            return
        loaded: dict[str, Any] = {}

        def read() -> None:
            loaded.update(torch.load(own, map_location="cpu", weights_only=True))
            if loaded["format"] != _STATE_FORMAT:
                raise CheckpointError(f"{own} is of format {loaded['format']!r}: this version reads {_STATE_FORMAT}")
            set_random_states(loaded["random"])

        self._together(f"reading {own}", read)
        plans = json.loads(loaded["plans"])
        is_settled_here = plans is not None and not self._differences(manifest)
        # Ranks of one stage have the same plans; all make communicators together or none does.
        every = [is_settled_here] * dist.get_world_size()
        dist.all_gather_object(every, is_settled_here)
        if all(every):
            self._together(f"taking plans from {own}", lambda: go_on_with(self._engine.fsmoe, plans))

    def _state(self) -> dict[str, Any]:
        state = self._engine.fsmoe
        plans = plans_of(state) if is_settled(state) else None
        return {"format": _STATE_FORMAT, "random": random_states(), "plans": json.dumps(plans)}

    def _describe(self, place: Path) -> None:
        """Sum up every file, each rank some of those it sees, and write the manifest."""
        names = manifests.names_in(place)
        seen: list[Sequence[str]] = [names] * dist.get_world_size()
        dist.all_gather_object(seen, names)
        own = {}

        def sum_up() -> None:
            for at, name in enumerate(sorted({each for every in seen for each in every})):
                owners = [rank for rank, every in enumerate(seen) if name in every]
                if owners[at % len(owners)] == dist.get_rank():
                    own[name] = manifests.sum_of(place / name)

        self._together(f"summing up {place}", sum_up)
        of_ranks: list[dict[str, Any]] = [own] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
        files = {name: each for every in of_ranks for name, each in every.items()}
        engine = self._engine
        layers = tuple(
            LayerSizes(name, layer.num_experts, layer.ep_size) for name, layer in engine.fsmoe.layers.items()
        )
        manifest = Manifest(
            sizes_of(engine), layers, facts_of_versions(("torch", "deepspeed")), dict(sorted(files.items()))
        )
        self._on_leaders(f"writing {place / manifests.NAME}", lambda: manifest.write(place))

    def _check_layout(self, place: Path, manifest: Manifest, with_optimizer: bool) -> None:
        now = {name: layer.num_experts for name, layer in self._engine.fsmoe.layers.items()}
        saved = {each.path: each.num_experts for each in manifest.layers}
        if saved != now and self._engine.fsmoe.running.pp_size == 1:
            raise CheckpointError(f"{place} has MoE layers (path: experts) {saved}, and the model has {now}")
        sizes = sizes_of(self._engine)
        if manifest.sizes.esp != sizes.esp:
            raise CheckpointError(
                f"{place} was saved with esp_size {manifest.sizes.esp}, and this job has {sizes.esp}: its experts are "
                "cut otherwise"
            )
        differences = self._differences(manifest)
        if differences and with_optimizer:
            raise CheckpointError(
                f"{place} was saved in another layout ({'; '.join(differences)}), by which states of optimizers are "
                "cut: load it with load_optimizer_states=False, which takes the weights, or with the layout of then"
            )

    def _differences(self, manifest: Manifest) -> list[str]:
        """What of the layout is not as it was, in words."""
        differences = manifest.sizes.differences(sizes_of(self._engine))
        ep = {each.path: each.ep for each in manifest.layers}
        ep_now = {name: layer.ep_size for name, layer in self._engine.fsmoe.layers.items()}
        if ep != ep_now and self._engine.fsmoe.running.pp_size == 1:
            differences.append(f"ep_size {sorted(set(ep.values()))} -> {sorted(set(ep_now.values()))}")
        return differences

    def _check_files(self, place: Path, manifest: Manifest) -> None:
        names, rank, size = sorted(manifest.files), dist.get_rank(), dist.get_world_size()
        if self._engine.use_node_local_storage():
            # Of the files of other nodes nothing can be said here.
            names, rank, size = [each for each in names if (place / each).exists()], self._engine.local_rank, 1
        found = manifests.faults(place, manifest.files, names[rank % size :: size])
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


def _recover(folder: Path, tag: str) -> None:
    if tags.recover(folder, tag):
        log_on_rank_0(f"{folder / tag} was put back: a save over it was killed", logging.WARNING)
    if not (folder / tag).is_dir():
        known = ", ".join(sorted(each.name for each in folder.iterdir() if each.is_dir())) if folder.is_dir() else ""
        raise CheckpointError(f"{folder / tag}: no such checkpoint; there are: {known or 'none'}")
