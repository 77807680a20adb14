# SPDX-License-Identifier: Apache-2.0
"""Decides which layers have experts that come and go in inference, and finds memory for their weights.

Letters: E experts, G ranks of an EP group.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_fsmoe.components.routing import Routing, kind_of
from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.distributed.partitioned import gathered
from ds_fsmoe.engine.convert_adapters import adapters_of
from ds_fsmoe.gradients.arriving import wait_for
from ds_fsmoe.layer.expert_forms import ExpertForm, SetForm, StackedForm
from ds_fsmoe.layer.experts_layer import FSMoEExperts
from ds_fsmoe.layer.held_experts import LateExperts, Room, Where, give_back_host_memory, held_experts
from ds_fsmoe.layer.inference import InferenceLayer, Options
from ds_fsmoe.layer.runtime import block_of
from ds_fsmoe.layer.stock_layer import FSMoELayer
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.planning.popularity import PathProfile


@dataclass(frozen=True)
class Coming:
    """A layer whose experts will come and go."""

    module: FSMoEExperts | FSMoELayer
    form: ExpertForm
    homes: tuple[tuple[int, ...], ...]
    """The experts at home on each of G ranks."""
    most: int
    """The most experts that a rank holds."""

    @property
    def num_experts(self) -> int:
        """E."""
        return sum(map(len, self.homes))

    @classmethod
    def of(cls, module: FSMoEExperts | FSMoELayer, options: Options) -> Coming:
        """Return what is known of a layer."""
        state: Any = module.fsmoe
        num_ranks, num_local = module.ep_size, module.num_local_experts
        homes = tuple(tuple(range(rank * num_local, (rank + 1) * num_local)) for rank in range(num_ranks))
        if state.placed is not None:
            homes = tuple(map(tuple, state.placed.placement.by_rank.tolist()))
        form: ExpertForm
        if isinstance(module, FSMoEExperts):
            form = StackedForm(module)
        else:
            form = SetForm(list(module.experts.deepspeed_experts), state.path)
        # As many as ranks_of_experts gives to one.
        most = min(num_ranks * num_local, max(options.most_per_rank, 2 * num_local))
        return cls(module, form, homes, most)

    def room(self, where: Where) -> Room:
        """Return memory for the weights, see :meth:`~ds_fsmoe.layer.held_experts.Room.made`."""
        return Room.made(self.form, self.num_experts, self.most, where)

    def layer(self, room: Room, options: Options, profile: PathProfile | None) -> InferenceLayer:
        """Return the layer, with its weights in this memory. Collective over the ranks that share the experts."""
        state: Any = self.module.fsmoe
        for parameter in self.form.parameters:
            if isinstance(parameter, nn.Parameter):
                wait_for(parameter)
        block = block_of(state.groups)
        with gathered(self.form.parameters if room.stacks else ()):
            held = held_experts(self.form, self.homes, block, room)
        of_layer = state.label, self.homes, block, state.order.ops, held, LateExperts(held, state.path)
        return InferenceLayer(*of_layer, options, profile, state.is_in_slots)


def made_room(layers: Mapping[str, Coming], weights: Where) -> tuple[Where, dict[str, Room]]:
    """Return where weights are taken from, and label -> memory for them. Collective over all ranks of the job.

    Weights are taken from home where the memory of any rank does not suffice for all of them in its host.

    Raises:
        MemoryError: on every rank, if there is no room for those that a rank holds, on any.
    """
    ways: tuple[Where, ...] = ("host", "home") if weights == "host" else ("home",)
    why = ""
    for where in ways:
        rooms: dict[str, Room] = {}
        # All look before any takes.
        why = _first_problem(_lacking(layers, where))
        if not why:
            problem = ""
            try:
                rooms = {label: each.room(where) for label, each in layers.items()}
            except (RuntimeError, MemoryError) as error:
                problem = f"{type(error).__name__}: {error}"
            why = _first_problem(problem)
        if not why:
            return where, rooms
        rooms.clear()
        give_back_host_memory()
        if where != ways[-1]:
            log_on_rank_0(
                f"ds_fsmoe.inference: weights are fetched from the ranks where they are at home, as not every host has "
                f"memory for all: {why}",
                logging.WARNING,
            )
    raise MemoryError(f"ds_fsmoe.inference: experts have no room: {why}; a smaller most_per_rank may need less")


def _first_problem(own: str) -> str:
    """Return what the first rank with a problem says of it; empty: no rank has one. Collective."""
    return next((f"rank {rank}: {each}" for rank, each in enumerate(on_every_rank(own)) if each), "")


def _lacking(layers: Mapping[str, Coming], where: Where) -> str:
    """Return which memory does not suffice on this rank, in words; empty: it does."""
    device = next((each.form.device for each in layers.values()), torch.device("cpu"))
    of_layers = [Room.bytes_of(each.form, each.num_experts, each.most, where) for each in layers.values()]
    on_host, on_device = (sum(each) for each in zip((0, 0), *of_layers, strict=True))
    if device.type == "cpu":
        on_host, on_device = on_host + on_device, 0
    wanted = {"the host's": (on_host, free_bytes(torch.device("cpu")))}
    if device.type == "cuda":
        # What torch keeps for later is free, too.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        wanted["the device's"] = on_device, free_bytes(device) + kept
    for whose, (needed, free) in wanted.items():
        if needed > free:
            return f"{needed / 2**20:,.0f} MiB of {whose} memory are needed, and {free / 2**20:,.0f} are free"
    return ""


def left_by_any(found: Mapping[str, FSMoEExperts | FSMoELayer]) -> dict[str, str]:
    """Return label -> reason of the layers that any rank leaves as they are, such as for a hook that it alone has.
    Collective over all ranks of the job, since all have to run them alike."""
    of_ranks = on_every_rank({label: why_left(module) for label, module in found.items()})
    left = {}
    for label in found:
        reasons = {rank: why for rank, each in enumerate(of_ranks) if (why := each.get(label)) is not None}
        if reasons:
            first = min(reasons)
            left[label] = reasons[first] if len(reasons) == len(of_ranks) else f"on rank {first} {reasons[first]}"
    return left


def why_left(module: FSMoEExperts | FSMoELayer) -> str | None:
    """Return why the experts of a layer stay where they are in inference, in words; ``None`` where they come and go.

    Args:
        module: a converted layer whose groups are there.
    """
    state = module.fsmoe
    if state.groups is None or state.pipeline is None:
        return "its groups were not made"
    if module.ep_size == 1 or state.groups.block_group is None:
        return "one rank has all of its experts"
    if state.groups.esp_group is not None or state.groups.layout.tensor_parallel_experts:
        return "its experts are sharded over ranks"
    if state.duplicates is not None:
        return "its tensor-parallel ranks have the same tokens"
    if isinstance(module, FSMoEExperts):
        return "its experts have adapters" if next(adapters_of(module), None) is not None else None
    if not chooses_experts(module):
        return f"{type(module.gate).__name__} lets experts choose tokens"
    if (reason := module.why_called()) is not None:
        return reason
    if module.local_experts() is None:
        return "its experts are in a module that is not known"
    if state.pipeline.collectives.exchange_rows is None:
        return "its all-to-all is for slots only"
    return None


def chooses_experts(module: FSMoEExperts | FSMoELayer) -> bool:
    """Return whether the tokens of a layer choose experts, and not the other way round."""
    return isinstance(module, FSMoEExperts) or issubclass(kind_of(module.gate), Routing)


def free_bytes(device: torch.device) -> float:
    """Return the memory that is free for a rank: of its device, or its share of the host's; infinite if not known."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    found = {name: float(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return found.get("MemAvailable", math.inf) / max(1, ranks)
