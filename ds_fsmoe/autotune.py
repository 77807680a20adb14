# SPDX-License-Identifier: Apache-2.0
"""Degrees chosen for the machine at hand: measure, plan, agree, and run so from then on.

The first forward in training runs uncut and tells the sizes of each layer. At the start of the second one, where all
ranks are together and no layer is under way, what the layers' tasks cost is measured, once for layers that are equal.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from ds_fsmoe.autotune_cache import ProfileCache
from ds_fsmoe.autotune_table import Row, describe
from ds_fsmoe.config import FSMoEBlock
from ds_fsmoe.first_forwards import FirstCall
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.planning.block import BlockPlan, equal_shares
from ds_fsmoe.predicted import CallSizes
from ds_fsmoe.runtime.agreement import check_agreement
from ds_fsmoe.runtime.pipeline import PhasePlan, Pipeline
from ds_fsmoe.runtime.profiler import LayerProfile, Subject, is_serial, profile
from ds_fsmoe.runtime.stopwatch import Stopwatch
from ds_fsmoe.runtime.topology import find_topology, world_size_now
from ds_fsmoe.tuned_degrees import Machine, PhaseChoice, Ways, choose_degrees
from ds_fsmoe.versions import VERSION

if TYPE_CHECKING:
    from ds_fsmoe.layer import FSMoELayer
    from ds_fsmoe.running import Running

_T = TypeVar("_T")
_HOST_DEGREE = 4
"""Chunks of the schedule by which the cost of handing out tasks is timed."""


@dataclass
class _Kind:
    """Layers that are equal, and have been called alike."""

    labels: list[str]
    layer: FSMoELayer
    subject: Subject
    text: str
    """What makes them equal, but for the capacity: layers with the same one are measured once."""

    @property
    def pipeline(self) -> Pipeline:
        """Of one of them."""
        assert self.layer.pipeline is not None
        return self.layer.pipeline

    @property
    def sizes(self) -> CallSizes:
        """For the planner. Experts are one product of all their weights: what they cost was measured as a whole."""
        at, subject = self.subject.sizes, self.subject
        return CallSizes(subject.num_experts, at.capacity, at.width, at.dtype.itemsize, 1, subject.num_weights)


class Autotune:
    """The stage, for one engine.

    Args:
        block: what is asked for.
        running: lanes and groups of its layers.
    """

    def __init__(self, block: FSMoEBlock, running: Running) -> None:
        self._block = block
        self._running = running
        self.is_done = False
        self.num_measured = 0
        """Operations that were timed; none where all was known."""
        self.rows: list[Row] = []
        """What was measured and chosen; on rank 0."""

    @property
    def is_due(self) -> bool:
        """Whether a first forward in training has told sizes, and nothing has come of them yet."""
        return not self.is_done and bool(self._running.first_forwards.calls)

    def run(self, layers: Mapping[str, FSMoELayer]) -> None:
        """Measure, choose, and change the layers' plans. Collective over all ranks, between forwards.

        Args:
            layers: of the engine, by label.

        Raises:
            MeasuringError: on every rank, if one has failed.
            DisagreementError: on every rank, if they have run different layers.
        """
        start_s = time.perf_counter()
        self.is_done = True
        calls = self._running.first_forwards.calls
        device = next(next(iter(layers.values())).parameters()).device
        watch = Stopwatch(device)
        kinds = self._kinds({label: layer for label, layer in layers.items() if label in calls}, calls, device)
        profiles, source = self._profiles(watch, kinds)
        self.num_measured = watch.num_timed
        choices: list[tuple[PhaseChoice, PhaseChoice]] = []
        with watch.fate.of("choosing degrees"):
            if _is_first():
                choices = [self._choose(kind, profiles[kind.text], device) for kind in kinds]
        choices = _from_first(choices)
        for kind, pair in zip(kinds, choices, strict=True):
            for label in kind.labels:
                _run_so(layers[label], pair)
        # They hold experts, and are of no use any more.
        calls.clear()
        asked = self._asked()
        self.rows = [
            Row(tuple(kind.labels), profiles[kind.text], pair, asked) for kind, pair in zip(kinds, choices, strict=True)
        ]
        log_on_rank_0(describe(self.rows, time.perf_counter() - start_s, source))

    def _kinds(
        self, layers: Mapping[str, FSMoELayer], calls: Mapping[str, FirstCall], device: torch.device
    ) -> list[_Kind]:
        """The same on every rank, in the same order."""
        subjects = {label: _subject(label, layer, calls[label]) for label, layer in layers.items()}
        texts = {label: _text(subject) for label, subject in subjects.items()}
        check_agreement(
            {f"experts of {label}": text for label, text in texts.items()}, what="the layers to be measured"
        )
        # Where nothing is dropped, blocks of ranks have capacities of their own.
        capacities = torch.tensor([each.sizes.capacity for each in subjects.values()])
        if world_size_now() > 1:
            capacities = capacities.to(device)
            dist.all_reduce(capacities, dist.ReduceOp.MAX)
        found: dict[tuple, _Kind] = {}
        for (label, subject), capacity in zip(subjects.items(), capacities.tolist(), strict=True):
            subject = replace(subject, sizes=replace(subject.sizes, capacity=capacity))
            pipeline = layers[label].pipeline
            assert pipeline is not None
            text = f"{texts[label]}, {_text_of_groups(pipeline)}, recompute {subject.recompute}"
            kind = found.setdefault((text, _rounded(capacity)), _Kind([], layers[label], subject, text))
            kind.labels.append(label)
            if capacity > kind.subject.sizes.capacity:
                kind.subject = subject
        return list(found.values())

    def _profiles(self, watch: Stopwatch, all_kinds: list[_Kind]) -> tuple[dict[str, LayerProfile], str]:
        """Text of a kind -> what its tasks cost; and where that is from."""
        largest: dict[str, _Kind] = {}
        for kind in sorted(all_kinds, key=lambda each: each.subject.sizes.capacity):
            largest[kind.text] = kind
        kinds = list(largest.values())
        cache_dir = self._block.autotune.cache_dir
        known: tuple[list[LayerProfile] | None, str] = (None, "")
        fingerprint = self._fingerprint(watch.device, kinds)
        cache = None
        with watch.fate.of("reading what was measured before"):
            if cache_dir is not None and _is_first():
                cache = ProfileCache(Path(cache_dir))
                found = cache.read(fingerprint, [kind.subject.operations for kind in kinds])
                known = found, f"nothing is measured, all is in {cache.file_of(fingerprint)}"
        profiles, source = _from_first(known)
        if profiles is not None:
            return dict(zip(largest, profiles, strict=True)), source
        profiles = []
        for kind in kinds:
            block = BlockPlan(equal_shares(_HOST_DEGREE), self._running.links)
            schedule = PhasePlan(block, kind.pipeline.forward.groups, backward=False).schedule
            profiles.append(profile(watch, kind.subject, self._running.lanes, schedule))
        with watch.fate.of("keeping what was measured"):
            if cache is not None:
                cache.write(fingerprint, profiles)
        return dict(zip(largest, profiles, strict=True)), f"measured {watch.num_timed} operations"

    def _asked(self) -> tuple[int | None, int | None]:
        asked = self._block.pipeline_degree
        forward, backward = (None if each == "auto" else each for each in (asked.forward, asked.backward))
        return forward, backward

    def _choose(self, kind: _Kind, measured: LayerProfile, device: torch.device) -> tuple[PhaseChoice, PhaseChoice]:
        block, running = self._block, self._running
        machine = Machine(is_serial(running.lanes), issues_ahead=device.type == "cuda")
        ways = Ways.of(block.schedule, block.pipeline_degree.max, running.links)
        groups = kind.pipeline.forward.groups
        return choose_degrees(groups, kind.sizes, measured, machine, ways, self._asked(), running.links)

    def _fingerprint(self, device: torch.device, kinds: list[_Kind]) -> dict[str, Any]:
        """What measurements hold for. Collective."""
        names = [_name_of(device)] * world_size_now()
        if world_size_now() > 1:
            dist.all_gather_object(names, _name_of(device))
        asked = self._block.topology.ranks_per_node
        return {
            "nodes of ranks": list(find_topology(None if asked == "auto" else asked).node_of_rank),
            "devices": names,
            "versions": {name: version(name) for name in ("torch", "deepspeed")} | {"ds_fsmoe": VERSION},
            "backend": _backend(),
            "overlap": self._block.overlap,
            "alltoall": self._block.alltoall,
            "layers": [f"{kind.text}, capacity up to {_rounded(kind.subject.sizes.capacity)}" for kind in kinds],
        }


def _subject(label: str, layer: FSMoELayer, call: FirstCall) -> Subject:
    pipeline = layer.pipeline
    assert pipeline is not None
    weights = sum(each.numel() for each in call.experts.parameters if each.dim() > 1)
    return Subject(
        label,
        pipeline.wires,
        call.experts,
        len(call.experts.experts),
        max(1, weights),
        all(form is not None for form in call.forms),
        pipeline.recompute,
        call.sizes,
        call.autocast.restored,
    )


def _text(subject: Subject) -> str:
    """What has to be the same on every rank, but for the capacity."""
    modules = [type(each).__name__ for each in getattr(subject.experts, "experts", ())]
    shapes = ["x".join(map(str, each.shape)) for each in subject.experts.parameters]
    return (
        f"experts {'/'.join(modules)} of {' '.join(shapes)}, written out {subject.splits}, "
        f"width {subject.sizes.width}, {subject.sizes.dtype}"
    )


def _text_of_groups(pipeline: Pipeline) -> str:
    placements = pipeline.forward.groups.placements
    lies = ", ".join(f"{kind} {placements[kind].size} on {'+'.join(placements[kind].lanes)}" for kind in ("ep", "esp"))
    return f"{lies}, {type(pipeline.wires).__name__}"


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _backend() -> str:
    if world_size_now() == 1:
        return "none"
    name = str(dist.get_backend())
    return f"{name} {'.'.join(map(str, torch.cuda.nccl.version()))}" if name == "nccl" else name


def _rounded(capacity: int) -> int:
    """To a power of two, so that a capacity that follows the tokens does not make every run a new one."""
    return 1 << max(0, capacity - 1).bit_length()


def _run_so(layer: FSMoELayer, choices: tuple[PhaseChoice, PhaseChoice]) -> None:
    pipeline = layer.pipeline
    assert pipeline is not None
    forward, backward = (
        PhasePlan(choice.block, plan.groups, plan.backward)
        for choice, plan in zip(choices, (pipeline.forward, pipeline.backward), strict=True)
    )
    layer.pipeline = replace(pipeline, forward=forward, backward=backward)


def _is_first() -> bool:
    return world_size_now() == 1 or dist.get_rank() == 0


def _from_first(value: _T) -> _T:
    """What rank 0 has. Collective."""
    if world_size_now() == 1:
        return value
    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]
