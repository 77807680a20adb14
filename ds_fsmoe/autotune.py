# SPDX-License-Identifier: Apache-2.0
"""Degrees chosen for the machine at hand: measure, plan, agree, and run so from then on.

The first forward in training runs uncut and tells the sizes of each layer; the second shows what the rest of the model
takes. At the start of the third, where all ranks are together and no layer is under way, what the layers' tasks cost is
measured: each collective once for all layers that share its ranks, experts once for layers that are equal.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ds_fsmoe.autotune_cache import MeasurementCache
from ds_fsmoe.autotune_choice import (
    Choice,
    Found,
    candidates,
    describe_choice,
    other_esp_sizes,
    predict,
    refinements,
)
from ds_fsmoe.autotune_subjects import Kind, find_kinds, largest_of_each
from ds_fsmoe.autotune_table import Row, Told, bad_fits, describe
from ds_fsmoe.blocks import FSMoEBlock
from ds_fsmoe.fingerprint import cluster_fingerprint
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.measured_costs import Machine, MeasuredPredictor
from ds_fsmoe.other_times import time_gate_and_order, time_gradients
from ds_fsmoe.planning.block import BlockPlan, equal_shares
from ds_fsmoe.planning.cluster import Cluster
from ds_fsmoe.progress import Progress
from ds_fsmoe.runtime.cluster_profile import profile_cluster
from ds_fsmoe.runtime.corun import Slowdowns
from ds_fsmoe.runtime.link_times import time_links
from ds_fsmoe.runtime.measurements import Measurements, Measuring
from ds_fsmoe.runtime.one_fate import from_first_rank, raise_on_all_ranks
from ds_fsmoe.runtime.pipeline import PhasePlan
from ds_fsmoe.runtime.profiler import is_serial, issues_ahead, profile, slowdowns_of
from ds_fsmoe.runtime.stopwatch import Stopwatch
from ds_fsmoe.runtime.topology import find_topology, rank_now, world_size_now
from ds_fsmoe.step_prediction import StepTimes
from ds_fsmoe.trials import Trials, Tried
from ds_fsmoe.tuned_degrees import Ways

if TYPE_CHECKING:
    from ds_fsmoe.layer import FSMoELayer
    from ds_fsmoe.reduction import Reduction
    from ds_fsmoe.running import Running

_HOST_DEGREE = 4
"""Chunks of the schedule by which the cost of handing out tasks is timed."""
FORWARDS_BEFORE = 2
"""In training, before it is measured: one is slow, one shows what the rest of the model takes."""
ONE_WIRE = 0.8
"""From this slowdown on two links are one: both at once gain less than a tenth."""


class Autotune:
    """The stage, for one engine.

    Args:
        block: what is asked for.
        running: lanes and groups of its layers.
        group: the ranks that run the same layers; ``None``: all of the job.
    """

    def __init__(self, block: FSMoEBlock, running: Running, group: dist.ProcessGroup | None = None) -> None:
        self._block = block
        self._running = running
        self._group = group
        self._num_forwards = 0
        self._is_wanted = True
        self._why_again: str | None = None
        self.took_s = 0.0
        """Of the stage, when it ran last."""
        self.num_measured = 0
        """Operations that were timed; none where all was known."""
        self.rows: list[Row] = []
        """What was measured and chosen."""
        self.step: StepTimes | None = None
        """Predicted."""
        self.trials: Trials | None = None
        self.tried: list[list[Tried]] = []
        """Rounds of trials -> what each plan took: the last word on what is run."""
        """Under way, ahead of which plans are not settled."""
        self._refine: Callable[[int, tuple[int, int]], Trials | None] | None = None
        """The round to come: plan that is kept, and those of the fastest phases -> what is tried beside it."""
        self.predictors: dict[str, MeasuredPredictor] = {}
        """Label of a layer -> what its phases should take, since the stage has run."""

    def counts_forward(self) -> bool:
        """A forward in training is about to begin: whether the stage is due ahead of it. The same on every rank."""
        self._num_forwards += 1
        return self._is_wanted and self._num_forwards > FORWARDS_BEFORE

    def need_not_run(self) -> None:
        """Plans have come from elsewhere."""
        self._is_wanted, self.trials, self._refine = False, None, None

    def request_again(self, reason: str) -> None:
        """Measure and plan anew, one training forward from now. Every rank asks for it at the same step.

        Args:
            reason: is said when it is done.
        """
        self._is_wanted, self._why_again = True, reason
        self._num_forwards = FORWARDS_BEFORE - 1
        self.trials = self._refine = None
        self._running.first_forwards.watch_again()
        self._running.uncut.look_again()

    def run(
        self,
        layers: Mapping[str, FSMoELayer],
        reduction: Reduction | None = None,
        dense_ms: tuple[float, float] | None = None,
    ) -> None:
        """Measure, choose, and change the layers' plans. Collective over all ranks, between forwards.

        Args:
            layers: of the engine, by label.
            reduction: of its gradients, if we do it.
            dense_ms: what the rest of the model takes, forward and backward.

        Raises:
            MeasuringError: on every rank, if one has failed.
            DisagreementError: on every rank, if they have run different layers.
        """
        start_s = time.perf_counter()
        self._is_wanted = False
        calls = self._running.first_forwards.calls
        device = self._running.device
        everyone, stage = Stopwatch(device), Stopwatch(device, self._group)
        asked_nodes = self._block.topology.ranks_per_node
        topology = find_topology(None if asked_nodes == "auto" else asked_nodes)
        kinds = find_kinds({label: layer for label, layer in layers.items() if label in calls}, calls, self._group)
        max_ctas, one_link = self._running.max_ctas, self._running.one_link is not None
        fingerprint = cluster_fingerprint(device, topology, max_ctas=max_ctas, one_link=one_link)
        known, source = self._known(everyone, fingerprint)
        with Progress(rank_now() == 0) as progress:
            for_all, of_stage = (Measuring(watch, known, progress) for watch in (everyone, stage))
            dtype = self._dtype(kinds)
            cluster = profile_cluster(for_all, topology, self._running.lanes, dtype, max_ctas=max_ctas)
            found = self._measure(of_stage, kinds, reduction)
        self.num_measured = everyone.num_timed + stage.num_timed
        self._keep(everyone, fingerprint, known, cluster)
        machine = Machine(
            is_serial(self._running.lanes), issues_ahead(self._running.lanes, device), found.slowed.contention()
        )
        ways, asked = self._ways(machine), self._asked()
        decided: tuple[list[list[Choice]], dict[int, float]] = [], {}
        with raise_on_all_ranks(stage.group, "choosing degrees"):
            if self._is_first():
                tried = candidates(kinds, found, machine, ways, asked, self._running.links)
                decided = tried, other_esp_sizes(kinds, found, machine, ways, cluster, topology)
        tried, sharded = from_first_rank(decided, self._group)

        def use(choices: Sequence[Choice]) -> None:
            self._run_so(layers, kinds, choices, found, machine)
            self.step = predict(kinds, choices, found, machine, dense_ms, reduction)
            self.rows = [row_of(kind, choice) for kind, choice in zip(kinds, choices, strict=True)]

        def row_of(kind: Kind, choice: Choice) -> Row:
            measured = found.profiles[kind.subject.kind, choice.alltoall]
            way = choice.alltoall, choice.alltoalls_ms
            uncut = self._running.uncut.reasons.get(kind.labels[0], "")
            given = (None, None) if uncut else asked
            return Row(tuple(kind.labels), measured, choice.phases, given, *way, found.reduces(kind), uncut)

        def trials_of(plans: Sequence[Sequence[Choice]]) -> Trials | None:
            use(plans[0])
            rounds, clock = self._block.autotune.trials, self._running.step_clock
            if not rounds or clock is None or not kinds or len(plans) == 1:
                return None
            names = [" and ".join(map(describe_choice, kinds, choices)) for choices in plans]
            return Trials(names, rounds, lambda number: use(plans[number]), clock, self._group)

        def refine(kept: int, halves: tuple[int, int]) -> Trials | None:
            forward, backward = (tried[number] for number in halves)
            near: list[list[Choice]] = []
            with raise_on_all_ranks(stage.group, "choosing degrees"):
                if self._is_first():
                    near = refinements(kinds, tried[kept], (forward, backward), found, machine, ways)
            return trials_of(from_first_rank(near, self._group))

        self.trials = trials_of(tried)
        self._refine = refine if self.trials is not None and asked == (None, None) else None
        # They hold experts, and are of no use any more.
        calls.clear()
        slowed = found.slowed
        told = Told(
            *(self.step, slowed, sharded, self._block.esp_size, self._block.schedule, cluster, self._why_again),
            is_tried=self.trials is not None,
        )
        self.tried.clear()
        source = source or f"measured {self.num_measured} operations"
        self.took_s = time.perf_counter() - start_s
        log_on_rank_0(describe(self.rows, told, self.took_s, source))
        if bad := bad_fits(self.rows):
            log_on_rank_0(bad, logging.WARNING)
        self._why_again = None

    def trial_is_over(self) -> bool:
        """An optimizer step is over and plans are being tried: whether one has been settled on. Collective."""
        assert self.trials is not None
        kept = self.trials.step_is_over()
        if kept is None:
            return False
        log_on_rank_0(self.trials.describe(kept))
        self.tried.append(self.trials.results(kept))
        halves, refine = self.trials.fastest_phases(kept), self._refine
        self._refine = None
        self.trials = None if refine is None else refine(kept, halves)
        return self.trials is None

    def _dtype(self, kinds: Sequence[Kind]) -> torch.dtype:
        """Of the tokens, the same on every rank; a stage of a pipeline may have no layer of ours."""
        own = kinds[0].subject.sizes.dtype if kinds else None
        of_ranks = [own]
        if self._group is not None:
            of_ranks = [own] * world_size_now()
            dist.all_gather_object(of_ranks, own)
        return next((each for each in of_ranks if each is not None), torch.float32)

    def _known(self, everyone: Stopwatch, fingerprint: Mapping[str, object]) -> tuple[Measurements, str]:
        """What need not be measured, the same on every rank, and where it is from."""
        known, source = Measurements(), ""
        cache_dir = self._block.autotune.cache_dir
        with raise_on_all_ranks(everyone.group, "reading what was measured before"):
            if cache_dir is not None and rank_now() == 0 and self._why_again is None:
                cache = MeasurementCache(Path(cache_dir))
                found = cache.read(fingerprint)
                if found is not None:
                    known, source = found, str(cache.file_of(fingerprint))
        known, source = from_first_rank((known, source))
        return known, source and f"what {source} has is not measured again"

    def _keep(
        self, everyone: Stopwatch, fingerprint: Mapping[str, object], known: Measurements, cluster: Cluster
    ) -> None:
        cache_dir = self._block.autotune.cache_dir
        if cache_dir is None or not everyone.any_rank(self.num_measured > 0):
            return
        of_ranks = [known]
        if world_size_now() > 1 and self._group is not None:  # stages have measured layers of their own
            of_ranks = [known] * world_size_now()
            dist.all_gather_object(of_ranks, known)
        with raise_on_all_ranks(everyone.group, "keeping what was measured"):
            if rank_now() == 0:
                joined = Measurements()
                for each in of_ranks:
                    joined.timings |= each.timings
                    joined.numbers |= each.numbers
                MeasurementCache(Path(cache_dir)).write(fingerprint, joined, cluster)

    def _measure(self, measuring: Measuring, kinds: list[Kind], reduction: Reduction | None) -> Found:
        largest = largest_of_each(kinds)
        for kind in largest:
            kind.find_ways(self._running)
        links = time_links(measuring, [way.subject for kind in largest for way in kind.ways.values()])
        profiles = {}
        for kind in largest:
            block = BlockPlan(equal_shares(_HOST_DEGREE), self._running.links)
            schedule = PhasePlan(block, kind.pipeline.forward.groups, backward=False).schedule
            measured = profile(measuring, kind.subject, self._running.lanes, schedule)
            others = time_gate_and_order(measuring, kind) | time_gradients(measuring, kind, reduction)
            for name, way in kind.ways.items():
                of_links = {each: links.timings[way.subject.link_name(each)] for each in way.subject.links}
                operations = {**of_links, **measured.operations, **others}
                profiles[kind.subject.kind, name] = replace(measured, operations=operations)
        found = Found({kind.subject.kind: kind.ways for kind in largest}, profiles, links, Slowdowns({}))
        if not largest or is_serial(self._running.lanes):
            return found
        heaviest = max(largest, key=lambda kind: kind.subject.measured_capacity * kind.subject.sizes.width)
        # One with a part on each link, if there is one.
        way = max(heaviest.ways.values(), key=lambda each: len(each.subject.links))
        slowed = slowdowns_of(measuring, way.subject, self._running.lanes, heaviest.lane_of)
        return replace(found, slowed=slowed)

    def _asked(self) -> tuple[int | None, int | None]:
        asked = self._block.pipeline_degree
        forward, backward = (None if each == "auto" else each for each in (asked.forward, asked.backward))
        return forward, backward

    def _ways(self, machine: Machine) -> Ways:
        block = self._block
        one_wire = self._running.one_link is not None or machine.contention.links >= ONE_WIRE
        return Ways.of(block.schedule, block.pipeline_degree.max, one_wire)

    def _run_so(
        self,
        layers: Mapping[str, FSMoELayer],
        kinds: Sequence[Kind],
        choices: Sequence[Choice],
        found: Found,
        machine: Machine,
    ) -> None:
        for kind, choice in zip(kinds, choices, strict=True):
            way = found.ways[kind.subject.kind][choice.alltoall]
            measured = found.profiles[kind.subject.kind, choice.alltoall]
            same_cuts = choice.phases[0].block.shares == choice.phases[1].block.shares
            for label in kind.labels:
                pipeline = layers[label].pipeline
                assert pipeline is not None
                forward, backward = (
                    replace(plan, block=phase.block, alltoall=way.planned)
                    for phase, plan in zip(choice.phases, (pipeline.forward, pipeline.backward), strict=True)
                )
                exchange, legs = way.subject.wires.exchange, way.subject.wires.legs
                wires = replace(pipeline.wires, exchange=exchange, legs=legs, reduces=found.reduces(kind))
                layers[label].pipeline = replace(pipeline, wires=wires, forward=forward, backward=backward)
                self.predictors[label] = MeasuredPredictor(machine, measured, same_cuts)

    def _is_first(self) -> bool:
        return rank_now(self._group) == 0
