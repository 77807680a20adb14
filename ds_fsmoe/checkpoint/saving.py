# SPDX-License-Identifier: Apache-2.0
"""Saves a checkpoint: all ranks write it into a new folder and describe it; then one of them publishes it.

It also gathers the whole weights of a model on the first rank. ``checkpoints`` and the engine call it. Experts of
Hugging Face models, which are spread over ranks, have one file for each part of them. At ZeRO 3 there are no such
files, since the files of all ranks have the pieces of all parameters.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.utils import groups as stock_groups

from ds_fsmoe.checkpoint.layout import described, has_known_stages, sizes_of, stage_of, stock_layers
from ds_fsmoe.checkpoint.optimizer_states import index_of
from ds_fsmoe.checkpoint.plan_state import STATE_FORMAT, is_settled, plans_of, random_states
from ds_fsmoe.checkpoint.ranks import Ranks, replaced
from ds_fsmoe.checkpoint_files import manifest as manifests
from ds_fsmoe.checkpoint_files import pieces, tags
from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart, part_name, part_of, parts_file, parts_in
from ds_fsmoe.checkpoint_files.guards import guarded
from ds_fsmoe.checkpoint_files.huggingface import CONFIG, config_text
from ds_fsmoe.checkpoint_files.manifest import STAGE_3, FileSum, LayerSizes, Manifest, PartSizes, Sizes
from ds_fsmoe.checkpoint_files.numbering import StageOfLayers, main_file
from ds_fsmoe.checkpoint_files.pieces import FROZEN, merged
from ds_fsmoe.checkpoint_files.publishing import Publication
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.components.expert_compute.shards import shard_dims_of
from ds_fsmoe.distributed.agreement import facts_of_versions
from ds_fsmoe.distributed.fail_together import device_of, from_first_rank, on_every_rank, on_first_rank
from ds_fsmoe.distributed.partitioned import gathered
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.files.whole_files import to_disk
from ds_fsmoe.layer.inference import refuse_within
from ds_fsmoe.log import log_on_rank_0, progress_on_rank_0
from ds_fsmoe.terminal.progress import followed

_OfStage = tuple[Sizes, int, StageOfLayers | None, list[LayerSizes], dict[str, PartSizes]]
"""How the job is laid out, the number of a pipeline stage, its layers, its MoE layers, and what of it is spread over
ranks."""


def state_file(rank: int) -> str:
    """Return the name of a rank's state file in the folder of a tag."""
    return f"fsmoe_rank_{rank:05d}.pt"


def states_file(engine: Any, place: Path) -> str:
    """Return the file in the folder of a tag to which DeepSpeed writes the states of this rank's optimizer."""
    if engine.zero_optimization() or isinstance(engine.optimizer, BF16_Optimizer):
        return Path(engine._get_zero_ckpt_name(str(place.parent), place.name)).name
    if not engine.has_moe_layers:  # a stage of a pipeline
        return main_file(engine.checkpoint_mp_rank)
    expert_rank = stock_groups._get_expert_parallel_rank(stock_groups._get_max_expert_size_name())
    return Path(engine._get_optimizer_ckpt_name(str(place.parent), place.name, expert_rank)).name


class Saving:
    """Runs one save. Every method is collective.

    Args:
        engine: our engine.
        ranks: the ranks of its job.
        folder: the folder of all tags.
        tag: a name, or a path in the folder, the same on all ranks.
        parts: name -> the split of each parameter that is spread over ranks.
    """

    def __init__(self, engine: Any, ranks: Ranks, folder: Path, tag: str, parts: dict[str, PartSizes]) -> None:
        self._engine, self._ranks, self._folder, self._tag, self._parts = engine, ranks, folder, tag, parts
        # Not from a generator that the training draws from.
        self._publication = Publication(folder, tag, from_first_rank(secrets.token_hex(4)))
        self._place = self._publication.unfinished
        self._written: list[Path] = []
        self._frozen_file: str | None = None
        """The file with this rank's pieces of what is not optimized, at ZeRO 3."""

    def save(self, write: Callable[[str], Any], save_latest: bool) -> Any:
        """Write a tag, publish it, and make ``latest`` name it.

        Args:
            write: writes DeepSpeed's files into the folder of the given name.
            save_latest: whether ``latest`` names it afterwards.

        Returns:
            The result of ``write``.

        Raises:
            CheckpointError: on every rank; see :meth:`~ds_fsmoe.checkpoint.checkpoints.Checkpoints.save`.
        """
        ranks, folder, tag, publication = self._ranks, self._folder, self._tag, self._publication
        try:
            ranks.on_leaders(f"preparing {folder / tag}", publication.begin)
            ranks.together(f"looking for {self._place}", self._check_folder)
            files = self._engine.checkpoint_engine
            with ranks.at_barriers(), replaced(files, "save", self._noting_writes(files.save)):
                result = ranks.together(f"writing {self._place}", lambda: write(str(self._place.relative_to(folder))))
            own = self._place / state_file(dist.get_rank())
            ranks.together(f"writing {own}", lambda: self._write_state(own))
            self._write_index()
            self._describe()
            ranks.together(f"syncing {self._place}", self._sync)
            ranks.on_leaders(f"publishing {folder / tag}", publication.publish)
        except CheckpointError:
            publication.abandon()
            raise
        finally:
            publication.end()
        if save_latest:
            ranks.on_leaders(f"writing {folder / tags.LATEST}", lambda: tags.point(folder, tag))
        return result

    def _check_folder(self) -> None:
        if not self._place.is_dir():
            raise FileNotFoundError(
                f"{self._folder.absolute()} is not the folder that rank 0 writes to: use one folder for all ranks "
                "on a shared file system, or set checkpoint.use_node_local_storage"
            )

    def _noting_writes(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Record the files that this rank writes, since it has to sync them: another host may not have them in memory.
        The parts of one rank are left out of the file of all ranks."""
        parts, own_main_file = set(self._parts), main_file(stage_of(self._engine))
        is_misleading = bool(parts) and misleads_others(self._engine)

        def noted(state_dict: Any, path: str, *args: Any, **options: Any) -> Any:
            if Path(path).name == own_main_file and parts:
                state_dict = without_parts(state_dict, parts)
            elif isinstance(state_dict, dict) and state_dict.get(FROZEN):
                self._frozen_file = Path(path).name
            if parts and isinstance(state_dict, dict):
                state_dict = for_others(state_dict, is_misleading)
            result = save(state_dict, path, *args, **options)
            self._written.append(Path(path))
            return result

        return noted

    def _write_state(self, own: Path) -> None:
        """Write the state that a rank continues with, and the config of a Hugging Face model.

        The weights of such a model can be written under published names by its config.
        """
        text = config_text(self._engine.module) if self._parts and self._ranks.is_leader else None
        if text is not None:
            (self._place / CONFIG).write_text(text, "utf-8")
        state = self._engine.fsmoe
        plans = plans_of(state) if is_settled(state) else None
        paths = None if state.paths is None else state.paths.as_state()
        kept = {"format": STATE_FORMAT, "random": random_states(), "plans": json.dumps(plans), "paths": paths}
        torch.save(kept, own)
        self._written.append(own)

    def _write_index(self) -> None:
        """Write the index of the optimizer states, gathered from all ranks."""
        engine, place = self._engine, self._place
        running = engine.fsmoe.running
        if running.mp_size > 1 or (running.pp_size > 1 and not has_known_stages(engine)) or engine.optimizer is None:
            return
        own = self._ranks.together(
            f"describing {place}", lambda: index_of(engine, states_file(engine, place), self._frozen_file)
        )
        indices = self._ranks.for_leaders(on_first_rank(own))

        def write() -> None:
            if all(indices):
                (place / pieces.NAME).write_text(merged(indices).as_json())

        self._ranks.on_leaders(f"writing {place / pieces.NAME}", write)
        if indices and not all(indices):
            log_on_rank_0(
                f"{self._folder / self._tag} can be loaded in this job's layout only",
                details=f"{type(engine.optimizer).__name__} has states of unknown kind",
            )

    def _describe(self) -> None:
        """Compute every file's checksum, on each rank for a part of the files on its file system, and write the
        manifest."""
        place, ranks = self._place, self._ranks
        mine = _share(ranks.together(f"listing {place}", lambda: manifests.names_in(place)))

        def sum_up() -> tuple[dict[str, FileSum], _OfStage | None]:
            progress = progress_on_rank_0(f"summing up {self._tag}", len(mine), "files")
            return {name: manifests.sum_of(place / name) for name in followed(mine, progress)}, self._of_stage()

        of_ranks = ranks.for_leaders(on_first_rank(ranks.together(f"summing up {place}", sum_up)))
        ranks.on_leaders(f"writing {place / manifests.NAME}", lambda: self._manifest(of_ranks).write(place))

    def _sync(self) -> None:
        for each in self._written:
            to_disk(each)
        if self._ranks.is_leader:
            self._publication.sync(self._written)

    def _of_stage(self) -> _OfStage | None:
        """Describe the state that ranks of the same pipeline stage share, on the first of them."""
        if stock_groups._get_data_parallel_rank() > 0:
            return None
        layers = [
            LayerSizes(
                name,
                layer.total_experts,
                layer.ep_size,
                shard_dims_of(layer.experts.deepspeed_experts[0]),
                stage_of(self._engine),
            )
            for name, layer in stock_layers(self._engine).items()
        ]
        return sizes_of(self._engine), stage_of(self._engine), described(self._engine), layers, self._parts

    def _manifest(self, of_ranks: Sequence[tuple[Mapping[str, FileSum], _OfStage | None]]) -> Manifest:
        files = {name: each for sums, _ in of_ranks for name, each in sums.items()}
        of_stages = [each for _, each in of_ranks if each is not None]
        stages = {number: stage for _, number, stage, *_ in of_stages if stage is not None}
        layers = {each.path: each for *_, layers, _ in of_stages for each in layers}
        return Manifest(
            of_stages[0][0],  # rank 0's: stages may differ in their first dtype
            tuple(sorted(layers.values(), key=lambda each: each.stage)),
            facts_of_versions(("torch", "deepspeed")),
            dict(sorted(files.items())),
            {name: each for *_, parts in of_stages for name, each in parts.items()},
            tuple(stages[number] for number in sorted(stages)),
        )


def _share(names: Sequence[str]) -> list[str]:
    """Return the files whose checksum this rank computes: each once, by a rank that can read it. Collective.

    Args:
        names: the files that this rank can read.
    """
    own = dist.get_rank()
    ranks_of: dict[str, list[int]] = {}
    for rank, view in enumerate(on_every_rank(hashlib.sha256("\0".join(names).encode()).hexdigest())):
        ranks_of.setdefault(view, []).append(rank)
    is_first = any(ranks[0] == own for ranks in ranks_of.values())
    # Ranks that share a file system have one list, which none has to send.
    lists = [names] if len(ranks_of) == 1 else on_every_rank(names if is_first else ())
    mine: list[str] = []
    taken: set[str] = set()
    for ranks in ranks_of.values():
        new = [each for each in lists[ranks[0]] if each not in taken]
        taken.update(new)
        if own in ranks:
            mine = new[ranks.index(own) :: len(ranks)]
    return mine


def warn_of_what_is_lost(engine: Any, place: Path, client_state: Any) -> None:
    """Warn of the parts of a job that a checkpoint will not restore."""
    if engine.has_partial_gradients:
        log_on_rank_0(
            f"{place} is saved in the middle of a step, whose gradients are lost: save after engine.step()",
            logging.WARNING,
            "A resumed run repeats that step. Save after engine.step() of the last micro-batch",
        )
    for path in _arrays_not_read("client_state", client_state):
        log_on_rank_0(
            f"{place}: {path} is a numpy array of objects, which load_checkpoint does not read: save it as a list",
            logging.WARNING,
        )


def _arrays_not_read(path: str, value: Any, depth: int = 5) -> Iterator[str]:
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind not in "biufc":
            yield path
    elif depth and isinstance(value, (Mapping, list, tuple)):
        for name, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _arrays_not_read(f"{path}[{name!r}]", each, depth - 1)


# ---- Writes the experts of Hugging Face models, which are spread over ranks: one file for each part of them


_SHAPES, _FROZEN_SHAPES = "param_shapes", "frozen_param_shapes"
_TOPS = {"module", "optimizer", "optimizer_state_dict"}
"""The keys by one of which files of weights and of the optimizer's states are known."""


def write_parts(engine: Any, place: Path, exclude_frozen: bool) -> None:
    """Write this rank's experts, on one of the ranks that have the same ones.

    Args:
        engine: our engine.
        place: the folder of the tag.
        exclude_frozen: whether to leave out frozen parameters.
    """
    parts = list(parts_in(engine.module))
    if not parts or engine.zero_optimization_partition_weights():
        return
    _, first, of_all = parts[0]
    rank = stock_groups._get_expert_data_parallel_rank(first.group_name)
    if not engine.checkpoint_engine.is_data_parallel_writer(rank):
        return
    state = {
        part_name(name, part.number): parameter.detach().to("cpu", copy=True)
        for name, parameter, part in parts
        if parameter.requires_grad or not exclude_frozen
    }
    engine.checkpoint_engine.save(guarded(state), str(place / parts_file(of_all.number, stage_of(engine))))


def without_parts(state: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Return the state that DeepSpeed writes for all ranks, without the parts of one rank.

    Args:
        state: the content of the file of weights at a ZeRO stage below 3.
        names: the parameters that are spread over ranks.
    """
    kept = {
        each: {name: value for name, value in state[each].items() if name not in names}
        for each in ("module", FROZEN, _FROZEN_SHAPES)
        if isinstance(state.get(each), dict)
    }
    return state | kept


def misleads_others(engine: Any) -> bool:
    """Return True if DeepSpeed's own readers would mistake parts of experts for whole ones, or would miss some."""
    is_below_3 = engine.zero_optimization_stage() < STAGE_3
    return any(
        part.num_parts > 1 or (is_below_3 and not parameter.requires_grad)
        for _, parameter, part in parts_in(engine.module)
    )


def for_others(state: dict[str, Any], is_misleading: bool) -> dict[str, Any]:
    """Return the state of a file so that DeepSpeed's own readers read it correctly, or refuse it."""
    if not _TOPS & state.keys():  # one layer of a pipeline, or one expert of DeepSpeed's
        return state
    # Where a model has experts, DeepSpeed makes tuples of these shapes, and its reader of ZeRO 3 asks them for numel().
    groups, frozen = state.get(_SHAPES), state.get(_FROZEN_SHAPES)
    shapes = {
        _SHAPES: groups and [{name: torch.Size(each) for name, each in group.items()} for group in groups],
        _FROZEN_SHAPES: frozen and {name: torch.Size(each) for name, each in frozen.items()},
    }
    state = state | {name: each for name, each in shapes.items() if each}
    return guarded(state) if is_misleading else state


# ---- Puts the whole weights of a model together on the first rank, from experts and pieces that are spread over
# ranks


def whole_state_dict(engine: Any, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
    """Return the state dict that the model would have in one process, on the CPU; collective over all ranks.

    Parameters are gathered one at a time, and only the first rank keeps them; in a pipeline, the first rank of each
    stage until the first of all has them. Names are those of a ``PipelineModule`` with all layers.

    Args:
        engine: the engine that ``initialize`` has returned.
        exclude_frozen_parameters: whether to leave out frozen parameters.

    Returns:
        Name -> tensor, in the model's own shapes; ``None`` on all ranks but the first.

    Raises:
        RuntimeError: experts would have to move, and the engine is in inference.

    Examples:
        >>> import torch, ds_fsmoe
        >>> model = ds_fsmoe.MoE(8, torch.nn.Linear(8, 8), num_experts=4, k=2)
        >>> ds_config = {"train_micro_batch_size_per_gpu": 2, "fsmoe": {"enabled": True, "ops": "reference"}}
        >>> ds_config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
        >>> engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
        >>> weights = ds_fsmoe.whole_state_dict(engine)  # on rank 0; with four experts over two ranks all four, too
        >>> weights["deepspeed_moe.gate.wg.weight"].shape  # [E, M]
        torch.Size([4, 8])
    """
    placement = getattr(getattr(engine, "fsmoe", None), "placement", None)
    if placement is not None:
        refuse_within(engine.fsmoe.running, "whole_state_dict")
    with nullcontext() if placement is None else placement.in_model_order():
        group = getattr(getattr(engine, "fsmoe", None), "stage_group", None)
        if group is None:
            return _gathered_state_dict(engine, exclude_frozen_parameters)
        first = dist.get_process_group_ranks(group)[0]
        return _of_all_stages(_gathered_state_dict(engine, exclude_frozen_parameters, first))


def _of_all_stages(own: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
    """Return the weights of all stages on the first rank, from the first rank of each. Collective over all ranks."""
    of_ranks = on_every_rank([(name, each.shape, each.dtype) for name, each in (own or {}).items()])
    rank, device = dist.get_rank(), device_of(None)
    found = dict(own or {})
    for sender, tensors in enumerate(of_ranks[1:], 1):
        for name, shape, dtype in tensors:
            if sender == rank:
                assert own is not None
                with waiting("the whole weights of stages"):
                    dist.send(own[name].to(device).contiguous(), 0)
            elif rank == 0:
                arrived = torch.empty(shape, dtype=dtype, device=device)
                with waiting("the whole weights of stages"):
                    dist.recv(arrived, sender)
                # What stages share is alike in them.
                found.setdefault(name, arrived.cpu())
    return found if rank == 0 else None


def _gathered_state_dict(
    engine: Any, exclude_frozen_parameters: bool, first: int = 0
) -> dict[str, torch.Tensor] | None:
    """Return the whole weights of this rank's module, on one of the ranks that have it."""
    is_first = dist.get_rank() == first
    result: dict[str, torch.Tensor] = {}
    known: dict[int, torch.Tensor] = {}
    for name, value in engine.module.state_dict(keep_vars=True).items():
        is_parameter = isinstance(value, torch.nn.Parameter)
        if not torch.is_tensor(value) or (exclude_frozen_parameters and is_parameter and not value.requires_grad):
            continue
        if id(value) not in known:
            with gathered([value]):
                whole = _whole(value, part_of(value), first)
                known[id(value)] = value if whole is None else whole
        if is_first:
            result[name] = known[id(value)]
    return result if is_first else None


def _whole(value: torch.Tensor, part: ExpertPart | None, first: int) -> torch.Tensor | None:
    """Return a whole parameter of which ranks have parts, on the CPU of one rank; ``None`` on the others."""
    own, is_first = value.detach(), dist.get_rank() == first
    if part is None or part.num_parts == 1:
        # In separate memory: ZeRO 3 releases gathered parameters, and training continues with the rest.
        return own.to("cpu", copy=True) if is_first else None
    group = stock_groups._get_expert_parallel_group(value.group_name)
    if first not in dist.get_process_group_ranks(group):
        return None
    parts = [torch.empty(own.shape, dtype=own.dtype) for _ in range(part.num_parts)] if is_first else []
    # A stretch of every part at a time: on a device, all of these are one part.
    stretch, at = max(1, -(-own.numel() // part.num_parts)), 0
    for piece in own.contiguous().view(-1).split(stretch):
        arrived = [torch.empty_like(piece) for _ in parts]
        with waiting("the whole weights of experts"):
            dist.gather(piece, arrived if is_first else None, dst=first, group=group)
        for each, found in zip(parts, arrived, strict=True):
            each.view(-1)[at : at + piece.numel()] = found
        at += piece.numel()
    # Handed over one by one: shards are let go once they are joined.
    return part.join(parts.pop(0) for _ in range(part.num_parts)) if is_first else None
