# SPDX-License-Identifier: Apache-2.0
"""Records the routing of an engine's layers, and replays routing that was recorded or passed by a script.

The engine's state calls it around each forward. ``ds_fsmoe/telemetry/routing_recorder.py`` writes the files;
``ds_fsmoe/layer/replay.py`` replaces the choices in a layer.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from ds_fsmoe.components.routing import ReplayedRouting
from ds_fsmoe.config.reading import BLOCK, ConfigError
from ds_fsmoe.distributed.fail_together import from_first_rank, on_every_rank
from ds_fsmoe.distributed.topology import rank_now, world_size_now
from ds_fsmoe.files.whole_files import OF_ROUTING, ONE_EACH, OwnedError, Ownership
from ds_fsmoe.layer.experts_layer import FSMoEExperts
from ds_fsmoe.layer.replay import ReplayError, choices_on_device
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.routes.recorded import Recording, RoutingFileError, read_routing
from ds_fsmoe.routes.written import RankFacts, RoutedLayer
from ds_fsmoe.telemetry.routing_recorder import RoutingRecorder

if TYPE_CHECKING:
    from ds_fsmoe.engine.state import FSMoEState

_NUMBERED = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


class RoutingData:
    """Records and replays routing for one engine, by its block. Collective to make.

    Args:
        state: the state of the engine, with its layers' groups made.
        model: the model.
        step: the number of the next optimizer step.
        has_stages: whether the model is a pipeline of stages.

    Raises:
        ConfigError: the recording to be replayed cannot be read, or has other ranks or layers, or another job writes to
            the folder of the recording; on every rank.
    """

    def __init__(self, state: FSMoEState, model: Any, step: int, has_stages: bool) -> None:
        self._state, self._model, self._has_stages = state, model, has_stages
        self._layers = state.inner_layers
        self._replay = state.running.replay
        self._step, self._num_forwards = step, 0
        block = state.block.routing
        self._recording: Recording | None = None
        self._folder = ""
        if block.replay is not None:
            self._recording, self._folder = self._read(Path(block.replay)), block.replay
        self.recorder: RoutingRecorder | None = None
        owner = None if block.record is None else _claim(block.record)
        if block.record is not None and not self._is_copy():
            numbers = {label: number for number, label in enumerate(self._layers)}
            self.recorder = RoutingRecorder(
                Path(block.record),
                self._facts(),
                numbers,
                with_weights=block.weights,
                every=block.every,
                step=step,
                owner=owner,
            )
            state.running.instruments.append(self.recorder.watch)
            state.running.records_routing = True

    def replay(self, indices: Any) -> None:
        """Replay these choices in the next forward. Collective over all ranks of the job.

        Args:
            indices: [S, L, k] integers, as an array or a tensor: for each token of this rank's batch, in the order in
                which layers process them, its experts in each MoE layer; -1 where the gate chooses for a token. L is
                the number of MoE layers, or of all layers of the model; layers without experts are skipped. A list of L
                arrays [S, k], where layers differ in k. ``None``: this rank's gates choose; if it is ``None`` on all
                ranks, nothing is replayed.

        Raises:
            ReplayError: the choices of any rank do not fit the model; on every rank, with every problem.
        """
        self._agree(None if indices is None else lambda: self._choices(indices))

    def _agree(self, choose: Callable[[], dict[str, ReplayedRouting | None]] | None, said: str = "") -> None:
        """Replay the choices that all ranks have, or none. Collective.

        Args:
            choose: returns this rank's choices; ``None``: it has none.
            said: the start of its error messages.

        Raises:
            ReplayError: ``choose`` has raised it on any rank; on every rank.
        """
        choices: dict[str, ReplayedRouting | None] | None = None
        problem: str | None = None
        try:
            choices = None if choose is None else choose()
        except (RoutingFileError, ReplayError, OSError) as error:
            problem = f"{said}{error}"
        of_ranks = on_every_rank((problem, choices is not None), self._replay.control_group)
        problems = {rank: text for rank, (text, _) in enumerate(of_ranks) if text is not None}
        if problems:
            self._replay.disarm()
            first = min(problems)
            more = f" (and {len(problems) - 1} more rank(s))" if len(problems) > 1 else ""
            raise ReplayError(f"rank {first}{more}: {problems[first]}")
        if any(has_choices for _, has_choices in of_ranks):
            self._replay.arm(choices, {label: each.fsmoe.path for label, each in self._layers.items()})
        else:
            self._replay.disarm()

    def begin_forward(self, is_training: bool, has_batch: bool = True) -> None:
        """Prepare a forward: read its choices from the recording, if one is replayed. Collective in that case.

        Raises:
            ReplayError: the recording lacks this forward; on every rank.
        """
        if self.recorder is not None:
            self.recorder.is_paused = not has_batch
        if not is_training:
            return
        micro_batch, self._num_forwards = self._num_forwards, self._num_forwards + 1
        if self._recording is not None:
            choose = (lambda: self._recorded(micro_batch)) if has_batch else None
            self._agree(choose, f"{BLOCK}.routing.replay = {self._folder!r}: ")

    def end_forward(self, has_batch: bool = True) -> None:
        """End a forward.

        Raises:
            ReplayError: a layer did not run in a replayed forward.
        """
        if self.recorder is not None:
            self.recorder.is_paused = False
        if self._replay.is_armed:
            if has_batch:
                self._replay.finish()
            else:
                self._replay.disarm()

    def at_step(self, step: int) -> None:
        """Start, or continue, optimizer step ``step``."""
        if step != self._step:
            self._step, self._num_forwards = step, 0
        if self.recorder is not None:
            self.recorder.at_step(step)

    def close(self) -> None:
        """Write all recorded data to the files."""
        if self.recorder is not None:
            self.recorder.close()

    def _is_copy(self) -> bool:
        """Return True if another rank has the same tokens and records them."""
        states = [each.fsmoe for each in self._layers.values()]
        return any(
            each.mp_group is not None and each.tensor_parallel.same_tokens and dist.get_rank(each.mp_group) > 0
            for each in states
        )

    def _facts(self) -> RankFacts:
        layers, node = [], 0
        for name, layer in self._state.layers.items():
            groups = layer.fsmoe.groups
            ep_ranks = (0,) if groups is None else groups.ranks_of("ep")
            node = 0 if groups is None else groups.topology.node_of_rank[groups.rank]
            layers.append(RoutedLayer(name, layer.total_experts, tuple(ep_ranks)))
        return RankFacts(rank_now(), world_size_now(), tuple(layers), node)

    def _read(self, path: Path) -> Recording:
        """Read the recording to replay.

        Raises:
            ConfigError: the recording does not fit; on every rank.
        """
        problem: str | None = None
        recording: Recording | None = None
        try:
            if self._has_stages:
                raise ReplayError("must be removed with a PipelineModule, whose stages run forwards one by one")
            recording = read_routing(path)
            self._check_gates()
            self._check_recording(recording)
        except (RoutingFileError, ReplayError, OSError) as error:
            problem = str(error)
        problems = [each for each in on_every_rank(problem) if each is not None]
        if problems:
            raise ConfigError(f"{BLOCK}.routing.replay = {str(path)!r}: {problems[0]}")
        if recording.problems:
            more = f" (and {len(recording.problems) - 1} more files)" if len(recording.problems) > 1 else ""
            log_on_rank_0(f"{BLOCK}.routing.replay: {recording.problems[0]}{more}", logging.WARNING)
        return recording

    def _check_recording(self, recording: Recording) -> None:
        rank, world_size = rank_now(), world_size_now()
        if recording.world_size != world_size or rank not in recording.ranks:
            raise ReplayError(
                f"it was recorded on {recording.world_size} rank(s), of which files of "
                f"{', '.join(map(str, recording.ranks))} exist, and this job has {world_size}"
            )
        here = {name: each.total_experts for name, each in self._state.layers.items()}
        there = {each.path: each.num_experts for each in recording.ranks[rank].layers}
        if here != there:
            wrong = [f"{name} has {there.get(name, 'no')} experts there and {here.get(name, 'no')} here"
                     for name in dict.fromkeys([*here, *there]) if here.get(name) != there.get(name)]  # fmt: skip
            raise ReplayError(f"it was recorded with another model: {'; '.join(wrong[:3])}")

    def _check_gates(self) -> None:
        for layer in self._layers.values():
            if not isinstance(layer, FSMoEExperts) and not getattr(layer.gate, "takes_given", False):
                raise ReplayError(
                    f"{layer.fsmoe.path}: the choices of a {type(layer.gate).__name__} cannot be replaced; use a "
                    'gate in which each token chooses (a TokenChoiceGate, DeepSpeed\'s, or "topk")'
                )

    def _recorded(self, micro_batch: int) -> dict[str, ReplayedRouting | None]:
        rank, step = rank_now(), self._step
        numbers = [self._recording.number_of(name, rank) for name in self._state.layers]
        arrays = [self._recording.choices(rank, step, micro_batch, number).indices_SK for number in numbers]
        # Beyond E are classes that a router has besides experts.
        return self._on_device([each.astype(np.int64) for each in arrays], is_own=True)

    def _choices(self, indices: Any) -> dict[str, ReplayedRouting | None]:
        """Return the choices of each layer.

        Raises:
            ReplayError: they do not fit.
        """
        if self._has_stages:
            raise ReplayError("routing cannot be replayed in a PipelineModule, whose stages run forwards one by one")
        self._check_gates()
        return self._on_device(self._of_layers(indices))

    def _of_layers(self, indices: Any) -> list[np.ndarray]:
        """Return the choices of each layer, [S, k]."""
        if isinstance(indices, Sequence) and not isinstance(indices, str):
            arrays = [_integers(each) for each in indices]
            what = f"{len(arrays)} arrays of {[list(each.shape) for each in arrays[:4]]}"
        else:
            whole = _integers(indices)
            what = f"an array {list(whole.shape)}"
            arrays = list(whole.transpose(1, 0, 2)) if whole.ndim == 3 else []
        num_layers, all_layers = len(self._layers), self._num_hidden_layers()
        if len(arrays) != num_layers and len(arrays) == all_layers:
            # The decoder layer around an MoE layer is the first number in its path.
            found = [_NUMBERED.search(each.fsmoe.path) for each in self._layers.values()]
            places = [None if each is None else int(each[1]) for each in found]
            if all(each is not None and each < all_layers for each in places):
                arrays = [arrays[each] for each in places]
        fits = all(each.ndim == 2 and len(each) == len(arrays[0]) for each in arrays)
        if len(arrays) != num_layers or not fits:
            others = "" if all_layers in (None, num_layers) else f", or all {all_layers} layers"
            raise ReplayError(
                f"routing to be replayed is {what}: must be [tokens, layers, k], with {num_layers} MoE layers{others}"
            )
        return arrays

    def _on_device(self, arrays: list[np.ndarray], is_own: bool = False) -> dict[str, ReplayedRouting | None]:
        for array, layer in zip(arrays, self._layers.values(), strict=True):
            self._check(array, layer, is_own)
        by_k: dict[int, list[int]] = {}
        for number, array in enumerate(arrays):
            by_k.setdefault(array.shape[1], []).append(number)
        layers = list(self._layers.items())
        found = {}
        for numbers in by_k.values():
            stacked = np.stack([arrays[each] for each in numbers], axis=1)
            num_experts = [layers[each][1].total_experts for each in numbers]
            given = choices_on_device(stacked, self._state.running.device, num_experts, is_own)
            found |= {layers[each][0]: one for each, one in zip(numbers, given, strict=True)}
        return {label: found[label] for label in self._layers}

    def _check(self, array: np.ndarray, layer: Any, is_own: bool) -> None:
        path, num_experts, gate = layer.fsmoe.path, layer.total_experts, layer.gate
        # The choices of a token; ``None``: a Hugging Face model's router has not run yet.
        k = getattr(getattr(gate, "settings", gate), "k", None)
        if k is not None and array.shape[1] != k:
            raise ReplayError(f"{path}: the replayed routing has {array.shape[1]} choices per token: must be k = {k}")
        is_stock = not isinstance(layer, FSMoEExperts)
        if not array.size:
            return
        low, high = int(array.min()), int(array.max())
        if low < -1 or (high >= num_experts and (is_stock or not is_own)):
            wrong = low if low < -1 else high
            raise ReplayError(
                f"{path}: the replayed routing has expert {wrong}: must be 0 to {num_experts - 1}, or -1 for a "
                "token that the router decides"
            )
        is_live = array < 0
        if low < 0 and (is_live.any(axis=1) != is_live.all(axis=1)).any():
            token = int(np.flatnonzero(is_live.any(axis=1) != is_live.all(axis=1))[0])
            raise ReplayError(
                f"{path}: the replayed routing of token {token} is {array[token].tolist()}: -1 must be in all its "
                "choices, or in none"
            )
        if is_stock and array.shape[1] > 1:
            ordered = np.sort(array, axis=1)
            is_twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1)
            if is_twice.any():
                token = int(np.flatnonzero(is_twice)[0])
                raise ReplayError(
                    f"{path}: the replayed routing of token {token} is {array[token].tolist()}: must be different "
                    "experts; use -1 for padding"
                )

    def _num_hidden_layers(self) -> int | None:
        config = getattr(self._model, "config", None)
        config = getattr(config, "text_config", None) or config
        found = getattr(config, "num_hidden_layers", None)
        return found if isinstance(found, int) else None


def _claim(folder: str) -> Ownership | None:
    """Claim a folder for this job, in which all ranks record; the first rank owns it. Collective.

    Raises:
        ConfigError: another job writes there; on every rank.
    """
    problem, owner = "", None
    if rank_now() == 0:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            owner = Ownership(Path(folder), name=OF_ROUTING)
        except OwnedError as error:
            problem = str(error)
        except OSError:
            pass  # training goes on without it, and the recorder says so
    if problem := from_first_rank(problem):
        raise ConfigError(f"{BLOCK}.routing.record = {folder!r}: {problem}: {ONE_EACH}")
    return owner


def _integers(value: Any) -> np.ndarray:
    """Return an array of integers on the host.

    Raises:
        ReplayError: the value is no array of integers.
    """
    array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    if array.dtype.kind not in "iu":
        raise ReplayError(f"routing to be replayed has dtype {array.dtype}: must be integers [tokens, layers, k]")
    return array
