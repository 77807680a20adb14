# SPDX-License-Identifier: Apache-2.0
"""Tracks where the experts of an engine's layers are, and moves them between two steps, on all ranks together. The
engine, its checkpoints and :mod:`~ds_fsmoe.placement.watch` call it; :mod:`~ds_fsmoe.placement.moving` sends the
data.

Checkpoints and all else that reads every expert see the model's own order. While one is written, experts are at their
primary ranks, and they return afterwards. So only routing depends on a placement.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_fsmoe.components.routing import Routing, kind_of
from ds_fsmoe.config.reading import ConfigError
from ds_fsmoe.distributed.fail_together import device_of, from_first_rank
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.files.whole_files import write_whole
from ds_fsmoe.layer.experts_layer import FSMoEExperts
from ds_fsmoe.layer.inference import refuse_within
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.observing.step_timer import most_of
from ds_fsmoe.placement.moving import ExpertRank, ExpertTensor, Mover, expert_tensors
from ds_fsmoe.planning.expert_placement import ExpertPlacement
from ds_fsmoe.untrusted import read_json

FORMAT = 1
"""The version of the format of a placement's file."""
_MOST_BYTES = 1 << 28
"""The bytes exchanged at once where experts go home or back, if an expert has fewer: they take memory twice."""


def obstacle_to_placement(layer: Any) -> str | None:
    """Return the reason why the experts of a layer cannot move, or None if they can.

    Args:
        layer: a converted layer with groups.
    """
    state = layer.fsmoe
    if layer.ep_size == 1:
        return "one rank has all its experts"
    if state.groups is None or state.groups.layout.tensor_parallel_experts or state.duplicates is not None:
        return "its tensor-parallel ranks share tokens or experts"
    if state.groups.esp_group is not None:
        return "its experts are sharded (fsmoe.expert_tensor_parallel_size)"
    if not chooses_experts(layer):
        return f"{type(layer.gate).__name__} lets experts choose tokens"
    return None


def chooses_experts(layer: Any) -> bool:
    """Return True if the tokens of a converted layer choose experts; False if experts choose tokens."""
    return isinstance(layer, FSMoEExperts) or issubclass(kind_of(layer.gate), Routing)


class Placements:
    """Holds the placements of the layers of one engine. Construction is collective over the ranks that run the layers.

    Args:
        engine: our engine, after its construction.
        layers: label -> converted layer with movable experts.
        paths: label -> path of the layer in the model, used in files.
        group: the ranks that run the layers; ``None``: all.
    """

    def __init__(
        self,
        engine: Any,
        layers: Mapping[str, Any],
        paths: Mapping[str, str],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._engine, self._layers, self._paths, self._group = engine, dict(layers), dict(paths), group
        self.now: dict[str, ExpertPlacement] = {}
        """Label of a layer -> its placement."""
        self.was_read = False
        """Whether the checkpoint that is being loaded says where experts were."""
        self._intended: dict[str, ExpertPlacement] | None = None
        """What experts go back to, while they are at home."""
        for label, layer in self._layers.items():
            self._place(label, ExpertPlacement.at_start(layer.num_local_experts * layer.ep_size, layer.ep_size))

    def layer(self, label: str) -> Any:
        """Return a layer by its label."""
        return self._layers[label]

    def expert_ranks(self) -> dict[str, ExpertRank]:
        """Return this rank's position among those that share the experts, by the label of the layer."""
        found = {}
        for label, layer in self._layers.items():
            groups = layer.fsmoe.groups
            ranks = groups.ranks_of("ep")
            found[label] = ExpertRank(groups.layout.ep.index(ranks), ranks.index(groups.rank))
        return found

    def mover(self) -> Mover:
        """Return a mover for the optimizer's current states. Collective.

        Raises:
            PlacementError: on every rank, where states cannot be moved.
        """
        self._engine.fsmoe.wait_for_parameters()
        return Mover(self._engine, self._tensors(), self.expert_ranks(), self._group)

    def _tensors(self) -> list[ExpertTensor]:
        return [each for label, layer in self._layers.items() for each in expert_tensors(label, layer)]

    def swap(self, mover: Mover, swaps: Sequence[tuple[str, int, int]]) -> tuple[int, float]:
        """Exchange experts, and update the routing to match. Collective, between two steps.

        Args:
            mover: a mover made after the optimizer's states were last made or loaded.
            swaps: (label, place, place), each place at most once; the same on every rank.

        Returns:
            (the bytes sent by the rank that sends most, the milliseconds of the slowest rank).

        Raises:
            PlacementError: on every rank, before any change.
        """
        self._engine.fsmoe.wait_for_parameters()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began_s = time.perf_counter()
        homes = [(label, *(divmod(each, self.now[label].num_local) for each in places)) for label, *places in swaps]
        num_bytes = mover.swap(homes)
        for label, first, second in swaps:
            self._place(label, self.now[label].swapped(first, second))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        # Of the rank that was at it for the longest: others have nothing to send.
        (took_ms,) = most_of([(time.perf_counter() - began_s) * 1e3], device_of(self._group), self._group)
        return num_bytes, took_ms

    def go_to(self, wanted: Mapping[str, ExpertPlacement]) -> None:
        """Move experts to the wanted placements, in as many exchanges as needed. Collective, between two steps.

        Args:
            wanted: label -> placement, the same on every rank.

        Raises:
            PlacementError: on every rank.
            RuntimeError: on every rank, within inference, which places experts differently.
        """
        refuse_within(self._engine.fsmoe.running, "moving experts")
        left = {label: self.now[label].swaps_to(placement, exactly=True) for label, placement in wanted.items()}
        if any(left.values()):
            mover = self.mover()
            # The same on every rank.
            largest = max(mover.bytes_of_expert(label) for label, swaps in left.items() if swaps)
            while any(left.values()):
                self.swap(mover, next_swaps(left.items(), max(1, _MOST_BYTES // max(1, largest))))

    @contextmanager
    def in_model_order(self) -> Iterator[None]:
        """Restore the model's own order of experts inside the block. Collective, between two steps."""
        if self._intended is not None or all(each.is_at_start for each in self.now.values()):
            yield
            return
        self._intended = dict(self.now)
        try:
            self.restore_model_order()
            yield
        finally:
            intended, self._intended = self._intended, None
            self.go_to(intended)

    def restore_model_order(self) -> None:
        """Restore the model's own order of experts permanently. Collective, between two steps."""
        self.go_to(self._model_order())
        assert all(each.is_at_start for each in self.now.values())

    def _model_order(self) -> dict[str, ExpertPlacement]:
        return {label: ExpertPlacement.at_start(each.num_experts, each.num_ranks) for label, each in self.now.items()}

    def facts(self) -> dict[str, str]:
        """Return a short hash of each layer's placement by name; all ranks must have the same."""
        return {
            f"placement of {label}": hashlib.sha256(str(each.expert_of_place).encode()).hexdigest()[:16]
            for label, each in self.now.items()
        }

    def as_data(self) -> dict[str, Any]:
        """Return the placements used in training as plain data, by label."""
        return {label: each.as_dict() for label, each in (self._intended or self.now).items()}

    def read_data(self, found: Any) -> dict[str, ExpertPlacement]:
        """Return the placements in data of :meth:`as_data`.

        Raises:
            ValueError: the data is malformed, or is of another model or layout.
        """
        if not isinstance(found, Mapping) or set(found) != set(self.now):
            names = sorted(found) if isinstance(found, Mapping) else found
            raise ValueError(f"placements of layers {names}: must be of {sorted(self.now)}")
        read = {label: ExpertPlacement.from_dict(found[label]) for label in self.now}
        for label, each in read.items():
            sizes = each.num_experts, each.num_ranks
            here = self.now[label].num_experts, self.now[label].num_ranks
            if sizes != here:
                raise ValueError(
                    f"{self._paths[label]}: a placement of {sizes[0]} experts on {sizes[1]} ranks: there are {here[0]} "
                    f"on {here[1]}"
                )
        return read

    def save(self, path: str | Path) -> None:
        """Write the placements to a file for ``fsmoe.placement.file``, on the first rank.

        Args:
            path: the file; an existing one is replaced.
        """
        if world_size_now() == 1 or dist.get_rank(self._group) == 0:
            data = {self._paths[label]: each for label, each in self.as_data().items()}
            write_whole(Path(path), json.dumps({"format": FORMAT, "layers": data}, indent=1) + "\n")

    def load(self, path: str) -> None:
        """Move experts to the placements of a file. Collective: the first rank reads it.

        Args:
            path: the file, as :meth:`save` writes it.

        Raises:
            ConfigError: on every rank, if the file cannot be read or is of another model.
        """
        told: tuple[dict[str, ExpertPlacement], str] = {}, ""
        if world_size_now() == 1 or dist.get_rank(self._group) == 0:
            try:
                found = read_json(Path(path))
                if not isinstance(found, dict) or found.get("format") != FORMAT:
                    raise ValueError(f"is not a placement of format {FORMAT}")
                labels = {path: label for label, path in self._paths.items()}
                layers = found["layers"]
                told = self.read_data({labels.get(name, name): each for name, each in layers.items()}), ""
            except Exception as error:  # whatever the file says, the others have to hear of it
                told = {}, f"{error}" or type(error).__name__
        wanted, problem = from_first_rank(told, self._group)
        if problem:
            raise ConfigError(f"fsmoe.placement.file = {path!r}: {problem}")
        self.go_to(wanted)
        moved = sum(len(start.swaps_to(wanted[label])) for label, start in self._model_order().items())
        log_on_rank_0(f"{path}: placed the experts of {len(wanted)} layer(s), with {moved} exchange(s)", logging.INFO)

    def _place(self, label: str, placement: ExpertPlacement) -> None:
        self.now[label] = placement
        layer = self._layers[label]
        layer.fsmoe.place(placement)
        results = self._engine.fsmoe.expert_results
        if results is not None:
            groups = layer.fsmoe.groups
            own = placement.by_rank[groups.ranks_of("ep").index(groups.rank)]
            results.place(self._paths[label], own.tolist())


def next_swaps(left: Iterable[tuple[str, list[tuple[int, int]]]], most: int) -> list[tuple[str, int, int]]:
    """Remove the exchanges that can be made at once from ``left``, and return them. Each place occurs at most once.

    Args:
        left: (label, exchanges in their order) of each layer; changed in place.
        most: the largest number of exchanges to return, at least 1.
    """
    taken: list[tuple[str, int, int]] = []
    for label, swaps in left:
        used: set[int] = set()
        while swaps and len(taken) < most and not used & set(swaps[0]):
            first, second = swaps.pop(0)
            used |= {first, second}
            taken.append((label, first, second))
        if len(taken) == most:
            break
    return taken
