# SPDX-License-Identifier: Apache-2.0
"""Saves DeepSpeed's checkpoints so that a kill at any moment leaves the last good one, and checks them when reading.

The files and their names are DeepSpeed's. Beside them are ``fsmoe.json`` (sizes, versions, checksums) and one small
file for each rank, with its random generators and its plans: a run that loads them continues bit for bit.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_fsmoe.checkpoint.expert_files import parts_of
from ds_fsmoe.checkpoint.loading import Reading
from ds_fsmoe.checkpoint.optimizer_states import index_of, optimizer_name, refresh_masters, settings_missing
from ds_fsmoe.checkpoint.plan_state import RankState, go_on_with, read_paths, read_rank_state
from ds_fsmoe.checkpoint.ranks import Ranks
from ds_fsmoe.checkpoint.saving import Saving, sizes_of, state_file, states_file, stock_layers, warn_of_what_is_lost
from ds_fsmoe.checkpoint_files import manifest as manifests
from ds_fsmoe.checkpoint_files import tags
from ds_fsmoe.checkpoint_files.manifest import Manifest
from ds_fsmoe.checkpoint_files.numbering import Numbering
from ds_fsmoe.checkpoint_files.pieces import Index, read_index
from ds_fsmoe.checkpoint_files.publishing import recover
from ds_fsmoe.checkpoint_files.random_states import set_random_states
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.distributed.agreement import facts_of_versions
from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.planning.popularity import PathProfile
from ds_fsmoe.telemetry.progress import shown


class Checkpoints:
    """Saves and loads the checkpoints of one engine. Every method is collective.

    Args:
        engine: our engine.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._ranks = Ranks(engine)

    def save(
        self, folder: str | Path, tag: str, write: Callable[[str], Any], save_latest: bool, client_state: Any
    ) -> Any:
        """Write a tag, publish it, and make ``latest`` name it.

        Args:
            folder: the folder of all tags.
            tag: a name, or a path in the folder.
            write: writes DeepSpeed's files into the folder under the name it is given.
            save_latest: whether ``latest`` is to name it.
            client_state: what the user saves with it; a warning is logged for what could not be read again.

        Returns:
            What ``write`` has returned.

        Raises:
            CheckpointError: on every rank, if one could not do its part; ``latest`` and its tag are unchanged. Only
                where ``latest`` itself cannot be written is the new tag there already.
        """
        self.check_tag(folder, tag, save_latest)
        place = Path(folder) / tag
        self._ranks.together(f"saving {place}", lambda: warn_of_what_is_lost(self._engine, place, client_state))
        return Saving(self._engine, self._ranks, Path(folder), tag).save(write, save_latest)

    def check_tag(self, folder: str | Path, tag: str, save_latest: bool) -> None:
        """Check that all ranks save under the same tag, and that it can be found again.

        Raises:
            CheckpointError: on every rank, if they do not, or if it cannot be.
        """
        # A folder may be named otherwise on another host.
        facts = {"tag": tag, "save_dir is given": bool(folder), "save_latest": bool(save_latest)}
        self._ranks.agree("what to save", facts)
        if folder:
            tags.check_new(folder, tag)

    def load(self, folder: Path, tag: str | None, read: Callable[..., Any], asked: dict[str, Any]) -> Any:
        """Check a tag, read it, and continue from it.

        Args:
            folder: the folder of all tags.
            tag: the tag, or ``None`` for what ``latest`` names.
            read: DeepSpeed's own function that reads a tag of a folder.
            asked: which parts of it to read, by the argument names of DeepSpeed's ``load_checkpoint``.

        Returns:
            What ``read`` has returned.

        Raises:
            CheckpointError: on every rank, with what is wrong with which file.
        """
        ranks = self._ranks
        with_optimizer = asked.get("load_optimizer_states", True) and not asked.get("load_module_only", False)
        if tag is None:
            ranks.together(f"looking for {folder}", lambda: tags.check_there(folder))
        with_optimizer = with_optimizer and self._engine.optimizer is not None
        found = self.check(folder, tag, asked)
        if found is None:
            return read(str(folder), None, **asked)
        tag, manifest = found
        place = folder / tag
        reading = ranks.together(f"reading {place}", lambda: Reading(self._engine, place, manifest))
        index = ranks.together(f"reading {place}", lambda: read_index(place))
        if manifest is None and with_optimizer and self._engine.spreads_experts:
            raise CheckpointError(
                f"{place} was saved by stock DeepSpeed, whose states of the optimizer are not spread as these experts "
                "are: load it with load_optimizer_states=False, which takes the weights"
            )
        sizes = sizes_of(self._engine)
        if self._engine.spreads_experts and sizes.pp > 1:
            ranks.together(f"reading {place}", lambda: self._check_same_stages(place, manifest))
        # Stock's, and whatever else has no manifest, has whole experts.
        differences = [f"esp_size 1 -> {sizes.esp}"] if manifest is None and sizes.esp > 1 else []
        recut = manifest is None and sizes.esp > 1
        if manifest is not None:
            differences, recut = self._differences(manifest), self._is_recut(manifest)
            _tell_versions(place, manifest)
            if with_optimizer:
                self._check_packing(place, manifest)
            if with_optimizer and not differences:
                ranks.together(f"reading {place}", lambda: self._check_optimizer(place, index))
            # At ZeRO 3 weights too are where the optimizer has them.
            is_laid_out = with_optimizer or self._engine.zero_optimization_partition_weights()
            if is_laid_out and not differences and not self._lies_alike(place, index):
                differences = ["the order of ranks or of parameters"]
        moved = bool(differences) and with_optimizer
        if moved:
            ranks.together(f"moving {place}", lambda: self._check_move(place, differences, reading))
            asked = asked | {"load_optimizer_states": False}
        elif recut:
            ranks.together(f"reading {place}", lambda: self._check_one_stage(place, differences))
        relaid, strict = self._is_relaid(manifest, differences), asked.get("load_module_strict", True)
        if self._is_compared(manifest, relaid) and asked.get("custom_load_fn") is None:
            ranks.together(f"comparing {place}", lambda: reading.check_weights(strict))
        sharper = moved and manifest is not None and manifest.sizes.dtype != sizes.dtype == "float32"
        own = None if asked.get("load_module_only", False) else self._read_state(place, manifest)
        with reading.in_use(recut, sharper, strict, relaid):
            result = ranks.together(f"reading {place}", lambda: read(str(folder), tag, **asked))
        if not with_optimizer or moved:
            ranks.together(f"reading {place}", lambda: refresh_masters(self._engine))
        elif index is None:
            ranks.together(f"reading {place}", lambda: self._check_settings(place))
        if moved:
            self._fill_optimizer(place, reading, differences, result[1])
        if result[0] is not None and own is not None:
            self._go_on(own)
        ranks.on_leaders(f"reading {place}", lambda: _check_not_saved_over(place, manifest))
        return result

    def _fill_optimizer(self, place: Path, reading: Reading, differences: Sequence[str], client_state: Any) -> None:
        """Put the optimizer's states where this job has them. Collective."""
        self._ranks.together(f"moving {place}", reading.fill_optimizer)
        log_on_rank_0(f"{place} was moved to another layout: {'; '.join(differences)}")
        if client_state is not None:
            client_state.pop("optimizer", None)

    def check(self, folder: Path, tag: str | None, asked: dict[str, Any]) -> tuple[str, Manifest | None] | None:
        """Find out, before anything is read, which tag to read, and check that it is whole.

        Args:
            folder: the folder of all tags.
            tag: the tag, or ``None`` for what ``latest`` names.
            asked: which parts of it to read.

        Returns:
            The tag and what was read of it before loading; ``None`` if there is no tag to read.

        Raises:
            CheckpointError: on every rank, with what is wrong with which file.
        """
        ranks = self._ranks
        wanted = ranks.together(f"reading {folder / tags.LATEST}", lambda: tags.latest(folder) if tag is None else tag)
        # A function has no text that is the same on every rank.
        facts = {name: each if not callable(each) else "a function" for name, each in asked.items()}
        ranks.agree("what to load", {"tag": wanted} | facts)
        if wanted is None:
            return None
        place = folder / wanted
        ranks.on_leaders(f"looking for {place}", lambda: _recover(folder, wanted))
        manifest = ranks.together(f"reading {place}", lambda: manifests.read_manifest(place))
        # All that follows is decided by it.
        ranks.agree(f"what {place} is", {manifests.NAME: hashlib.sha256(repr(manifest).encode()).hexdigest()})
        ranks.on_leaders(f"checking {place}", lambda: _check_all_is_named(place, manifest))
        if manifest is not None:
            ranks.together(f"checking {place}", lambda: self._check_layers(place, manifest))
            ranks.together(f"checking {place}", lambda: self._check_files(place, manifest))
        return wanted, manifest

    def _read_state(self, place: Path, manifest: Manifest | None) -> RankState | None:
        """Return what this rank continues with after loading. It is read before, so that an error leaves the engine
        unchanged.

        Returns:
            ``None`` where the checkpoint has no such state.

        Raises:
            CheckpointError: on every rank, if the state of one is damaged.
        """
        own = place / state_file(dist.get_rank())
        if manifest is None or manifest.sizes.world != dist.get_world_size() or state_file(0) not in manifest.files:
            paths = self._paths_of_others(place, manifest)
            log_on_rank_0(
                f"{place} was saved by stock DeepSpeed or by another number of ranks, or converted: random generators "
                f"and plans are not taken from it, and counts of paths are{' not either' if paths is None else ''}"
            )
            return None if paths is None else RankState(None, None, paths)
        fits = not self._differences(manifest)
        return self._ranks.together(f"reading {own}", lambda: read_rank_state(own, self._engine.fsmoe, fits))

    def _paths_of_others(self, place: Path, manifest: Manifest | None) -> dict[str, PathProfile] | None:
        """Return which experts had followed which, of ranks that were not as many: each of those now takes what some of
        them had counted, since all that is summed over ranks where it is used. ``None``: nothing of that is there."""
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
            go_on_with(self._engine.fsmoe, own.plans)

    def _lies_alike(self, place: Path, index: Index | None) -> bool:
        """Return whether each rank's states are where this job would have put them; without an index, assume so."""

        def compare() -> bool | None:
            if index is None:
                return None
            file = states_file(self._engine, place)
            there = [each.pieces for each in index.groups if each.file == file]
            found = index_of(self._engine, file)
            return found is None or [each.pieces for each in found.groups] == there

        own = self._ranks.together(f"comparing {place}", compare)
        return all(each is None or each for each in on_every_rank(own))

    def _check_optimizer(self, place: Path, index: Index | None) -> None:
        """Check, before anything is loaded, that the states are of this optimizer."""
        now = optimizer_name(self._engine)
        if index is not None and index.optimizer != now:
            raise CheckpointError(
                f"{place} has states of {index.optimizer}, and this job's optimizer is {now}. Load it with "
                "load_optimizer_states=False, which takes the weights, or with the optimizer of then"
            )

    def _check_settings(self, place: Path) -> None:
        """Check, after loading, states whose optimizer is not known, such as those of stock DeepSpeed."""
        missing = settings_missing(self._engine)
        if missing:
            raise CheckpointError(
                f"{place} has states of another optimizer than {optimizer_name(self._engine)}: its groups lack "
                f"{', '.join(missing)}. Load it with load_optimizer_states=False, which takes the weights"
            )

    def _is_recut(self, manifest: Manifest) -> bool:
        """Return whether the experts' files would differ, had this job saved them."""
        was = {each.path: Numbering(each.num_experts, each.ep, manifest.sizes.esp) for each in manifest.layers}
        esp = sizes_of(self._engine).esp
        layers = stock_layers(self._engine).items()
        now = {name: Numbering(layer.num_experts, layer.deepspeed_moe.ep_size, esp) for name, layer in layers}
        return any(was.get(name) != each and max(was[name].esp, esp) > 1 for name, each in now.items() if name in was)

    def _is_relaid(self, manifest: Manifest | None, differences: Sequence[str]) -> bool:
        """Return whether the files of weights would differ, had this job saved them."""
        if manifest is None:
            return bool(parts_of(self._engine))
        stages = manifest.sizes.zero_stage, self._engine.zero_optimization_stage()
        return bool(differences) and (bool(parts_of(self._engine)) or manifests.STAGE_3 in stages)

    def _is_compared(self, manifest: Manifest | None, relaid: bool) -> bool:
        """Return whether to compare parameters with the model's before any is changed: pieces and parts of one model
        could be put into another without an error."""
        sizes = sizes_of(self._engine)
        if sizes.mp > 1 or sizes.pp > 1 or self._engine.use_node_local_storage():
            return False
        is_in_pieces = manifest is not None and manifests.STAGE_3 in (manifest.sizes.zero_stage, sizes.zero_stage)
        return relaid or is_in_pieces or bool(parts_of(self._engine)) or bool(manifest is not None and manifest.parts)

    def _check_layers(self, place: Path, manifest: Manifest) -> None:
        now = {name: layer.num_experts for name, layer in stock_layers(self._engine).items()}
        saved = {each.path: each.num_experts for each in manifest.layers}
        if saved != now and self._engine.fsmoe.running.pp_size == 1:
            raise CheckpointError(f"{place} has MoE layers (path: experts) {saved}, and the model has {now}")
        parts = parts_of(self._engine)
        for name, each in manifest.parts.items():
            if name in parts and parts[name].num_experts != each.num_experts:
                raise CheckpointError(
                    f"{place} has {each.num_experts} experts in {name}, and the model has {parts[name].num_experts}"
                )

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

    def _check_same_stages(self, place: Path, manifest: Manifest | None) -> None:
        """Refuse, for a pipeline with experts of Hugging Face models, what was not saved in the layout of this job."""
        sizes, parts = sizes_of(self._engine), parts_of(self._engine)
        differences = ["not saved by ds_fsmoe"] if manifest is None else manifest.sizes.differences(sizes)
        was = {each.ep for name, each in ({} if manifest is None else manifest.parts).items() if name in parts}
        now = {each.ep for each in parts.values()}
        if was and was != now:
            differences.append(f"ep_size {max(was)} -> {max(now)}")
        if differences:
            raise CheckpointError(
                f"{place}: {'; '.join(differences)}: pipeline stages with experts of Hugging Face models load what was "
                "saved in their own layout"
            )

    def _differences(self, manifest: Manifest) -> list[str]:
        """Return how the layout differs from the saved one, in words."""
        differences = manifest.sizes.differences(sizes_of(self._engine))
        parts = parts_of(self._engine)
        ep = {each.path: each.ep for each in manifest.layers}
        ep |= {name: each.ep for name, each in manifest.parts.items() if name in parts}
        ep_now = {name: layer.deepspeed_moe.ep_size for name, layer in stock_layers(self._engine).items()}
        ep_now |= {name: each.ep for name, each in parts.items() if name in manifest.parts}
        if ep != ep_now and self._engine.fsmoe.running.pp_size == 1:
            differences.append(f"ep_size {sorted(set(ep.values()))} -> {sorted(set(ep_now.values()))}")
        return differences

    def _check_packing(self, place: Path, manifest: Manifest) -> None:
        """Refuse to go on with another ``ep_size`` than then, where times have chosen it: a job that goes on as it was
        keeps its layout."""
        block, parts = self._engine.fsmoe.block, parts_of(self._engine)
        was = {each.ep for name, each in manifest.parts.items() if name in parts}
        now = {each.ep for name, each in parts.items() if name in manifest.parts}
        if block.placement.policy == "lina" and was != now and manifest.sizes.world == dist.get_world_size():
            raise CheckpointError(
                f'{place} was saved with ep_size = {max(was)}, and fsmoe.placement.policy = "lina" has chosen '
                f'{max(now)} now: write "ep_size": {max(was)} in the fsmoe block and leave the policy out, or load it '
                "with load_optimizer_states=False"
            )

    def _check_files(self, place: Path, manifest: Manifest) -> None:
        names, rank, size = sorted(manifest.files), dist.get_rank(), dist.get_world_size()
        if self._engine.use_node_local_storage():
            # Of the files of other nodes nothing can be said here.
            names, rank, size = [each for each in names if (place / each).exists()], self._engine.local_rank, 1
        found = manifests.faults(place, manifest.files, shown(names[rank % size :: size], f"checking {place.name}"))
        if found:
            raise CheckpointError("; ".join(found))


def _tell_versions(place: Path, manifest: Manifest) -> None:
    now = facts_of_versions(("torch", "deepspeed"))
    other = [
        f"{name} {each} (now {now[name]})" for name, each in manifest.versions.items() if now.get(name, each) != each
    ]
    if other:
        log_on_rank_0(f"{place} was saved with {', '.join(other)}", logging.WARNING)


def _recover(folder: Path, tag: str) -> None:
    if recover(folder, tag):
        log_on_rank_0(f"{folder / tag} was put back: a save over it was killed", logging.WARNING)
    if not (folder / tag).is_dir():
        raise CheckpointError(f"{folder / tag}: no such checkpoint; there are: {tags.known_tags(folder)}")


def _check_all_is_named(place: Path, manifest: Manifest | None) -> None:
    if omitted := manifests.omissions(place, manifest):
        raise CheckpointError("; ".join(omitted))


def _check_not_saved_over(place: Path, manifest: Manifest | None) -> None:
    if manifests.read_manifest(place) != manifest:
        raise CheckpointError(f"{place} was saved over while it was read: load it again")
