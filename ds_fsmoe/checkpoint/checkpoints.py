# SPDX-License-Identifier: Apache-2.0
"""Saves DeepSpeed's checkpoints so that a kill at any moment leaves the last good one, and checks them when reading.

The engine calls it for each save and load; ``saving`` and ``loading`` do the single steps. The files and their names
are DeepSpeed's. Next to them are ``fsmoe.json`` (sizes, versions, checksums) and one small file for each rank, with its
random generators and its plans: a run that loads them continues bit for bit.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_fsmoe.checkpoint.layout import (
    Comparison,
    check_model,
    check_packing,
    check_reach,
    sizes_of,
    stage_of,
    tie,
    without_tying,
)
from ds_fsmoe.checkpoint.loading import Reading
from ds_fsmoe.checkpoint.optimizer_states import (
    check_settings,
    index_of,
    optimizer_name,
    reads_own_states,
    refresh_masters,
)
from ds_fsmoe.checkpoint.plan_state import RankState, go_on_with, read_paths, read_rank_state, set_random_states
from ds_fsmoe.checkpoint.ranks import Ranks
from ds_fsmoe.checkpoint.saving import Saving, state_file, states_file, warn_of_what_is_lost
from ds_fsmoe.checkpoint_files import guards, tags
from ds_fsmoe.checkpoint_files import manifest as manifests
from ds_fsmoe.checkpoint_files.expert_parts import parts_in
from ds_fsmoe.checkpoint_files.manifest import Manifest, PartSizes
from ds_fsmoe.checkpoint_files.pieces import Index
from ds_fsmoe.checkpoint_files.publishing import recover, state_of
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.distributed.agreement import facts_of_versions
from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.log import log_on_rank_0, progress_on_rank_0
from ds_fsmoe.planning.lina.popularity import PathProfile
from ds_fsmoe.terminal.progress import followed


class Checkpoints:
    """Saves and loads the checkpoints of one engine. Every method is collective.

    Args:
        engine: our engine.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._ranks = Ranks(engine)
        self._was = ""
        """What stood at the place of a tag when it was looked at; known to leaders."""

    @cached_property
    def _parts(self) -> dict[str, PartSizes]:
        """Return how each parameter that is spread over ranks is split, from one pass over the model."""
        return {name: PartSizes.of(part, stage_of(self._engine)) for name, _, part in parts_in(self._engine.module)}

    def save(
        self, folder: str | Path, tag: str, write: Callable[[str], Any], save_latest: bool, client_state: Any
    ) -> Any:
        """Write a tag, publish it, and make ``latest`` name it.

        Args:
            folder: the folder of all tags.
            tag: a name, or a path in the folder.
            write: writes DeepSpeed's files into the folder of the given name.
            save_latest: whether ``latest`` names it afterwards.
            client_state: the user's data; a warning is logged for data that could not be read again.

        Returns:
            The result of ``write``.

        Raises:
            CheckpointError: on every rank, if one rank fails; ``latest`` and its tag are unchanged. The new tag exists
                already if only ``latest`` itself could not be written.
        """
        self.check_tag(folder, tag, save_latest)
        place = Path(folder) / tag

        def begun() -> dict[str, PartSizes]:
            warn_of_what_is_lost(self._engine, place, client_state)
            return self._parts

        parts = self._ranks.together(f"saving {place}", begun)
        return Saving(self._engine, self._ranks, Path(folder), tag, parts).save(write, save_latest)

    def check_tag(self, folder: str | Path, tag: str, save_latest: bool) -> None:
        """Check that all ranks save under the same tag, and that it can be found again.

        Raises:
            CheckpointError: on every rank, if tags differ, or if the tag cannot be found again.
        """
        # A folder may be named otherwise on another host.
        facts = {"tag": tag, "save_dir is given": bool(folder), "save_latest": bool(save_latest)}
        self._ranks.agree("what to save", facts)
        if folder:
            tags.check_new(folder, tag)

    def load(self, folder: Path, tag: str | None, read: Callable[..., Any], asked: dict[str, Any]) -> Any:
        """Check a tag, read it, and restore the state of the run from it.

        Args:
            folder: the folder of all tags.
            tag: the tag, or ``None`` for the one in ``latest``.
            read: DeepSpeed's own function that reads a tag of a folder.
            asked: the parts to read, by the argument names of DeepSpeed's ``load_checkpoint``.

        Returns:
            The result of ``read``.

        Raises:
            CheckpointError: on every rank; names each file and its problem.
        """
        ranks = self._ranks
        with_optimizer = asked.get("load_optimizer_states", True) and not asked.get("load_module_only", False)
        with_optimizer = with_optimizer and self._engine.optimizer is not None
        tag, manifest = self.check(folder, tag, asked, with_optimizer)
        place = folder / tag
        reading = ranks.together(f"reading {place}", lambda: Reading(self._engine, place, manifest, bool(self._parts)))
        index = ranks.together(f"reading {place}", lambda: reading.index)
        layout = Comparison(self._engine, ranks, place, manifest, self._parts)
        if manifest is None and with_optimizer:
            ranks.together(f"reading {place}", lambda: self._check_stock_states(place, layout))
        if with_optimizer:
            ranks.together(f"reading {place}", lambda: self._check_optimizer(place, index))
        differences = layout.differences
        if manifest is not None:
            _log_versions(place, manifest)
            if with_optimizer:
                ranks.together(f"reading {place}", lambda: check_packing(self._engine, place, manifest, self._parts))
            # At ZeRO 3 weights too are where the optimizer has them.
            is_laid_out = with_optimizer or self._engine.zero_optimization_partition_weights()
            if is_laid_out and not differences:
                differences = self._hidden_differences(place, index)
        moved = bool(differences) and with_optimizer
        if moved:
            ranks.together(f"moving {place}", lambda: self._check_move(place, differences, reading))
            asked = asked | {"load_optimizer_states": False}
        elif layout.is_resharded_anywhere:
            ranks.together(f"reading {place}", lambda: check_reach(self._engine, place, differences))
        relaid, strict = layout.is_relaid(differences), asked.get("load_module_strict", True)
        if layout.is_compared() and asked.get("custom_load_fn") is None:
            ranks.together(f"comparing {place}", lambda: reading.check_weights(strict))
        dtype = sizes_of(self._engine).dtype
        sharper = moved and manifest is not None and manifest.sizes.dtype != dtype == "float32"
        own = None if asked.get("load_module_only", False) else self._read_state(place, manifest, layout)
        rounds = moved and asked.get("custom_load_fn") is None
        with (
            reading.in_use(layout.is_resharded, sharper, strict, relaid, moved, rounds),
            without_tying(self._engine),
        ):
            result = ranks.together(f"reading {place}", lambda: read(str(folder), tag, **asked))
        if result[1] is not None:
            result[1].pop(guards.KEY, None)  # where another reader than ours has left it in
        tie(self._engine)
        if not with_optimizer or moved:
            ranks.together(f"reading {place}", lambda: refresh_masters(self._engine))
        elif index is None:
            ranks.together(f"reading {place}", lambda: check_settings(self._engine, place))
        if moved:
            ranks.together(f"moving {place}", reading.fill_optimizer)
            reading.round_weights()
            log_on_rank_0(f"{place} was moved to another layout: {'; '.join(differences)}")
            if result[1] is not None:
                result[1].pop("optimizer", None)
        if result[0] is not None and own is not None:
            self._go_on(own)
        ranks.on_leaders(f"reading {place}", lambda: self._check_not_saved_over(place))
        return result

    def check(
        self, folder: Path, tag: str | None, asked: dict[str, Any], with_optimizer: bool
    ) -> tuple[str, Manifest | None]:
        """Find the tag to read, and check that its files are complete, before anything is read.

        Args:
            folder: the folder of all tags.
            tag: the tag, or ``None`` for the one in ``latest``.
            asked: the parts to read.
            with_optimizer: whether states of the optimizer are among them.

        Returns:
            The tag and its manifest; ``None`` for a tag of stock DeepSpeed.

        Raises:
            CheckpointError: on every rank; names each file and its problem.
        """
        ranks = self._ranks
        what = f"reading {folder / tags.LATEST}"
        wanted = ranks.together(what, lambda: tags.latest_there(folder) if tag is None else tag)
        # A function has no text that is the same on every rank.
        facts = {name: each if not callable(each) else "a function" for name, each in asked.items()}
        ranks.agree("what to load", {"tag": wanted} | facts)
        place = folder / wanted
        ranks.on_leaders(f"looking for {place}", lambda: self._find(folder, wanted))
        manifest = ranks.together(f"reading {place}", lambda: manifests.read_manifest(place))
        # All that follows is decided by it.
        ranks.agree(f"what {place} is", {manifests.NAME: hashlib.sha256(repr(manifest).encode()).hexdigest()})
        ranks.on_leaders(f"checking {place}", lambda: _check_all_is_named(place, manifest))
        if manifest is not None:
            ranks.together(f"checking {place}", lambda: check_model(self._engine, place, manifest, self._parts))
            beside = ranks.sharing_files()
            ranks.together(f"checking {place}", lambda: self._check_files(place, manifest, with_optimizer, beside))
        return wanted, manifest

    def _find(self, folder: Path, tag: str) -> None:
        if recover(folder, tag):
            log_on_rank_0(f"{folder / tag} was restored: a save over it was killed", logging.WARNING)
        if not (folder / tag).is_dir():
            raise CheckpointError(f"{folder / tag}: no such checkpoint; {tags.found_in(folder)}")
        self._was = state_of(folder / tag)

    def _check_not_saved_over(self, place: Path) -> None:
        if state_of(place) != self._was:
            raise CheckpointError(f"{place} was overwritten while it was read: load it again")

    def _read_state(self, place: Path, manifest: Manifest | None, layout: Comparison) -> RankState | None:
        """Read the state that this rank continues with after loading, before the engine is changed.

        Returns:
            ``None`` if the checkpoint has no such state.

        Raises:
            CheckpointError: on every rank, if the state of one is damaged.
        """
        own = place / state_file(dist.get_rank())
        if manifest is None or manifest.sizes.world != dist.get_world_size() or state_file(0) not in manifest.files:
            paths = self._paths_of_others(place, manifest)
            log_on_rank_0(
                f"{place}: random generators and plans are not used",
                details="It was saved by stock DeepSpeed, by another number of ranks, or converted; counts of paths "
                + ("are not used either" if paths is None else "are used"),
            )
            return None if paths is None else RankState(None, None, paths)
        fits = not layout.differences
        return self._ranks.together(f"reading {own}", lambda: read_rank_state(own, self._engine.fsmoe, fits))

    def _paths_of_others(self, place: Path, manifest: Manifest | None) -> dict[str, PathProfile] | None:
        """Return the path profiles for this rank from those of a job with another number of ranks; ``None`` if there
        are none.

        Each of the present ranks gets the counts of some saved ranks, since profiles are summed over ranks where they
        are used.
        """
        paths = self._engine.fsmoe.paths
        if paths is None or manifest is None or manifest.sizes.pp > 1 or self._engine.use_node_local_storage():
            return None
        files = [each for rank in range(manifest.sizes.world) if (each := state_file(rank)) in manifest.files]
        if not files:
            return None
        own = [place / each for each in files[dist.get_rank() :: dist.get_world_size()]]
        return self._ranks.together(f"reading counts of paths in {place}", lambda: read_paths(own, paths))

    def _go_on(self, own: RankState) -> None:
        """Restore the random states and the plans of the saved tag. Collective."""
        if own.random is not None:
            set_random_states(own.random)
        if own.paths is not None:
            self._engine.fsmoe.paths.go_on_with(own.paths)
        # Ranks of one stage have the same plans; all make communicators together or none does.
        if all(on_every_rank(own.plans is not None)) and own.plans is not None:
            if changed := max(on_every_rank(own.changed)):
                log_on_rank_0(f"fsmoe.{changed} is not what it was when this was saved: its plans are not used")
            go_on_with(self._engine.fsmoe, own.plans, places_alone=bool(changed))

    def _hidden_differences(self, place: Path, index: Index | None) -> list[str]:
        """Return, in words, why states have to be moved although the layout has the same numbers. Without an index,
        each rank's states are assumed to be where this job would have put them."""
        if not all(on_every_rank(reads_own_states(self._engine))):
            return ["BF16_Optimizer without ZeRO, whose own states DeepSpeed does not find"]

        def lies_alike() -> bool:
            if index is None:
                return True
            file = states_file(self._engine, place)
            there = [each.pieces for each in index.groups if each.file == file]
            found = index_of(self._engine, file)
            return found is None or [each.pieces for each in found.groups] == there

        own = self._ranks.together(f"comparing {place}", lies_alike)
        return [] if all(on_every_rank(own)) else ["the order of ranks or of parameters"]

    def _check_stock_states(self, place: Path, layout: Comparison) -> None:
        """Check that states of the optimizer that stock DeepSpeed has saved can be loaded."""
        why = None
        if layout.has_parts_anywhere:
            why = "whose optimizer states are distributed differently from these experts"
        elif not reads_own_states(self._engine):
            why = "which does not find the states of its BF16_Optimizer again without ZeRO"
        if why is not None:
            raise CheckpointError(
                f"{place} was saved by stock DeepSpeed, {why}: load it with load_optimizer_states=False (weights only)"
            )

    def _check_optimizer(self, place: Path, index: Index | None) -> None:
        """Check, before anything is loaded, that the states belong to this optimizer."""
        now = optimizer_name(self._engine)
        if index is not None and index.optimizer != now:
            raise CheckpointError(
                f"{place} has optimizer states of {index.optimizer}, and this job's optimizer is {now}. Load it "
                "with load_optimizer_states=False (weights only), or with the original optimizer"
            )

    def _check_move(self, place: Path, differences: Sequence[str], reading: Reading) -> None:
        try:
            check_reach(self._engine, place, differences)
            reading.check_states()
        except CheckpointError as error:
            raise CheckpointError(
                f"{place} was saved in another layout ({'; '.join(differences)}) and cannot be converted: {error}. "
                "Load it with load_optimizer_states=False (weights only), or in the original layout"
            ) from error

    def _check_files(self, place: Path, manifest: Manifest, with_optimizer: bool, beside: list[int]) -> None:
        """Check every file once, among the ranks that share this rank's file system."""
        names = manifests.names_read(manifest, with_optimizer)
        if self._engine.use_node_local_storage():
            # Of the files of other nodes nothing can be said here.
            names = [each for each in names if (place / each).exists()]
        mine = names[beside.index(dist.get_rank()) :: len(beside)]
        progress = progress_on_rank_0(f"checking {place.name}", len(mine), "files")
        found = manifests.faults(place, manifest.files, followed(mine, progress))
        if found:
            raise CheckpointError("; ".join(found) + manifests.advice(manifest, found, with_optimizer))


def _log_versions(place: Path, manifest: Manifest) -> None:
    now = facts_of_versions(("torch", "deepspeed"))
    other = [
        f"{name} {each} (now {now[name]})" for name, each in manifest.versions.items() if now.get(name, each) != each
    ]
    if other:
        log_on_rank_0(f"{place} was saved with {', '.join(other)}", logging.WARNING)


def _check_all_is_named(place: Path, manifest: Manifest | None) -> None:
    if omitted := manifests.omissions(place, manifest):
        raise CheckpointError("; ".join(omitted))
