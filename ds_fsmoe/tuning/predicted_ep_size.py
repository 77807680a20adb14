# SPDX-License-Identifier: Apache-2.0
"""Predicts a job with its experts over each possible number of ranks: before it runs, to choose ``ep_size``, and once
its batches are known, to choose that of the next start.

Links have the costs of a cluster file, those that an earlier run has measured, or they are measured at that moment.
"""

from __future__ import annotations

import logging
import math
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ds_fsmoe.components.gate import in_backward
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.distributed.fail_together import MeasuringError, from_first_rank, on_every_rank, raise_on_all_ranks
from ds_fsmoe.distributed.nccl import why_one_link
from ds_fsmoe.distributed.topology import Topology, rank_now
from ds_fsmoe.files.learned_batches import LearnedBatches, UselessLearnedError, remember, remembered
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.measuring.cache import MeasurementCache, cluster_fingerprint
from ds_fsmoe.measuring.cluster_profile import measure_links
from ds_fsmoe.measuring.stopwatch import Stopwatch
from ds_fsmoe.observing.instruments import LayerCall
from ds_fsmoe.planning.cluster import Cluster, Operation, load_cluster
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.ep_size import (
    EpChoice,
    EpSize,
    ExpertJob,
    choose_ep_size,
    likely_ep_sizes,
    states_bytes,
)
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.timeline import Contention
from ds_fsmoe.tuning.when import STEPS_BEFORE

OFF = 0.2
"""The share by which tokens of a micro-batch may differ from what was assumed before sizes are predicted again."""
_STATES, _RESERVED = 0.75, 0.9
"""The share of a device's memory that a size which needs more than the usual one may have: for states, before a job has
run, and for all that torch has reserved in a run. Communicators and the device's own context come on top."""
_MOST_STEPS = 1000
"""The optimizer steps from one look at the batches to the next, at the most."""
_measured: dict[tuple[Topology, torch.dtype], Cluster] = {}
"""The links that this process has measured. Of the same ones, two models of a job have the same size."""


@dataclass(frozen=True)
class EpSizePredictor:
    """Predicts a job with each size. All methods but :meth:`planned` are collective over all ranks of the job."""

    block: FSMoEBlock
    job: ExpertJob
    """The job. Its length is 1 where that is not known."""
    topology: Topology
    device: torch.device
    dtype: torch.dtype
    """The type in which experts compute."""
    optimizer_bytes: float | None
    """The optimizer's bytes per element; ``None``: the host has a part of them."""
    batch: tuple[int | None, int | None]
    """The samples of a micro-batch and the micro-batches of a step as they were known at the start, by which the next
    start finds what is kept; ``None`` for what was not."""

    @property
    def schedule(self) -> str:
        """Return the schedule that is planned. Without overlap no schedule gains anything over DeepSpeed's order."""
        return self.block.schedule if self.block.overlap else "deepspeed"

    @property
    def tokens(self) -> int:
        """Return the tokens of a micro-batch of a rank."""
        return self.job.shapes[0].B * self.job.shapes[0].L

    def for_tokens(self, tokens: float) -> EpSizePredictor:
        """Return predictions of the same job whose micro-batches have about so many tokens."""
        shapes = tuple(replace(each, L=max(1, round(tokens / each.B))) for each in self.job.shapes)
        return replace(self, job=replace(self.job, shapes=shapes))

    def for_batch(self, samples: int, micro_batches: int, *, keeps_length: bool) -> EpSizePredictor:
        """Return predictions of the same job with so many samples in a micro-batch: as long as before, or with as many
        tokens together."""
        shapes = tuple(replace(each, B=samples) for each in self.job.shapes)
        found = replace(self, job=replace(self.job, shapes=shapes, micro_batches=micro_batches))
        return found if keeps_length else found.for_tokens(self.tokens)

    def predicted(self, usual: int | None = None, used_bytes: float = 0.0) -> tuple[list[EpSize], str]:
        """Return what is predicted of the likely sizes, ascending, and what costs of links it is from; the same on
        every rank.

        Args:
            usual, used_bytes: see :meth:`planned`.

        Raises:
            MeasuringError: on every rank, if links could not be measured, or there is no prediction.
        """
        cluster, source = self._known_links()
        if not source:
            source = "measured links"
            watch = Stopwatch(self.device, budget_s=0.0)
            cluster = _cluster_of(*measure_links(watch, self.topology, self.dtype, self._max_ctas()), self.topology)
            _measured[self.topology, self.dtype] = cluster
        found: list[EpSize] = []
        with raise_on_all_ranks(None, "predicting a step with each ep_size"):
            if rank_now() == 0:
                assert cluster is not None
                found = self.planned(cluster, usual, used_bytes)
        return from_first_rank(found), source

    def planned(self, cluster: Cluster, usual: int | None = None, used_bytes: float = 0.0) -> list[EpSize]:
        """Predict the likely sizes on a cluster, on this rank; see :meth:`predicted`.

        Args:
            cluster: the links.
            usual: a size that is among them in any case.
            used_bytes: the memory that a rank has needed with that size; 0: not known, so states alone count.

        Raises:
            ValueError: the cluster lacks a number for every size.
        """
        most_bytes = self._most_bytes() if used_bytes or self.optimizer_bytes is not None else None

        states = {each.ep: states_bytes(self.job, each, self.optimizer_bytes or 0.0) for each in self.job.layouts()}
        of_usual = states.get(usual or 0, math.inf)
        # Of what it has needed, other sizes change the states alone. The host may have some of these.
        others = used_bytes - of_usual if used_bytes and usual in states else 0.0

        def memory_of(groups: Groups) -> float:
            needed = states[groups.ep] + others
            # What activations take is not known at the start. Whoever has more states than usual leaves room for them.
            return needed / (_RESERVED if used_bytes else _STATES) if states[groups.ep] > of_usual else needed

        return likely_ep_sizes(self.job, cluster, self.schedule, memory_of, most_bytes, usual)

    def _most_bytes(self) -> float | None:
        """Return the memory of the device; ``None``: it is the host's."""
        if self.device.type != "cuda":
            return None
        return float(torch.cuda.get_device_properties(self.device).total_memory)

    def used_bytes(self) -> float:
        """Return the most memory that this process has taken of its device so far; 0 on the CPU."""
        return float(torch.cuda.max_memory_reserved(self.device)) if self.device.type == "cuda" else 0.0

    def learned(self) -> LearnedBatches | None:
        """Return what the last run of this job has learned; ``None``: nothing, or it must not be used. A line names a
        useless file."""
        if self.block.deterministic:
            return None
        key, found = self._key(), None
        with raise_on_all_ranks(None, "reading what the last run has learned"):
            if rank_now() == 0:
                try:
                    found = remembered(key)
                except UselessLearnedError as error:
                    log_on_rank_0(f"ep_size: what the last run has learned is ignored: {error}", logging.WARNING)
        return from_first_rank(found)

    def keep(self, learned: LearnedBatches) -> None:
        """Keep what was learned for the next start of this job."""
        key = self._key()
        if rank_now() == 0:
            try:
                remember(key, learned)
            except (OSError, RuntimeError) as error:
                log_on_rank_0(f"ep_size: the next start will not know of this: {error}", logging.WARNING)

    def _key(self) -> dict[str, Any]:
        """Return what a job is known by: all but the length of its samples."""
        job, (samples, micro_batches) = self.job, self.batch
        layers = Counter(replace(each, B=1, L=1) for each in job.shapes)
        return {
            "layers": [{"count": count, **asdict(shape)} for shape, count in layers.items()],
            "dense": job.num_dense,
            "ranks": job.world,
            "ranks_per_node": job.ranks_per_node,
            "hosts": list(dict.fromkeys(on_every_rank(socket.gethostname()))),
            "zero": job.zero,
            "samples": samples,
            "micro_batches": micro_batches,
            "schedule": self.schedule,
            "chunks": job.max_degree,
            "alltoall": job.alltoall,
            "windows": job.has_windows,
            "slices": job.sums_in_slices,
            "overlap_comm": job.overlap_comm,
            # A size that fits one device or optimizer need not fit another.
            "device": self.device.type,
            "memory": self._most_bytes(),
            "optimizer_bytes": self.optimizer_bytes,
        }

    def _known_links(self) -> tuple[Cluster | None, str]:
        """Return the costs of the links, on rank 0, and where they are from; "" if nothing is known."""
        block, cluster, source = self.block, None, ""
        # Each rank has its own names of files; the first rank decides.
        is_kept = from_first_rank(block.trace.cluster is None and block.autotune.cache_dir is not None)
        fingerprint = None
        if is_kept and not block.deterministic:
            one_link = self.device.type == "cuda" and why_one_link() is not None
            fingerprint = cluster_fingerprint(self.device, self.topology, max_ctas=self._max_ctas(), one_link=one_link)
        with raise_on_all_ranks(None, "reading the costs of links"):
            if rank_now() == 0 and fingerprint is not None:
                cache = MeasurementCache(Path(block.autotune.cache_dir or ""))
                if cache.read(fingerprint) is not None:
                    cluster, source = load_cluster(str(cache.file_of(fingerprint))), "links measured before"
                    # Products of a job with another type have another rate.
                    other = {*map(_name_of, (torch.float32, torch.bfloat16, torch.float16))} - {_name_of(self.dtype)}
                    if any(f", {each};" in cluster.source for each in other):
                        cluster, source = None, ""
            if rank_now() == 0 and block.trace.cluster is not None:
                cluster = load_cluster(block.trace.cluster)
                source = f"the links of {cluster.name}"
            if rank_now() == 0 and not source and (cluster := _measured.get((self.topology, self.dtype))) is not None:
                source = "measured links"
        return cluster, from_first_rank(source)

    def _max_ctas(self) -> int | None:
        return None if self.block.max_ctas == "auto" else self.block.max_ctas


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cluster_of(operations: Mapping[str, Operation], contention: Contention, topology: Topology) -> Cluster:
    """Return a cluster of measured links. What no size of ``ep_size`` changes is at the rate of a product, or takes no
    time."""
    gemm = operations["gemm"]
    others = {"attention": gemm, "routing": gemm} | dict.fromkeys(("softmax", "order"), Operation(LinearCost(0.0, 0.0)))
    nodes = topology.node_sizes
    return Cluster("measured", len(nodes), nodes[0], {**operations, **others}, contention=contention)


def learned_of(choice: EpChoice, tokens: int) -> LearnedBatches:
    """Return a choice as it is kept for the next start."""
    runner_up = None if choice.runner_up is None else choice.runner_up.ep
    return LearnedBatches(tokens, choice.best.ep, runner_up, choice.runner_up_costs)


class BatchLengths:
    """Compares the batches of an engine with the length that its ``ep_size`` was chosen for, and finds the size for the
    next start where they differ.

    It compares when the first plans have settled, then after ten times the steps, and every :data:`_MOST_STEPS` at the
    latest: all ranks at the same step, by counts alone.

    Args:
        predictor: the job, with the length that was assumed.
        is_known: whether any length was assumed.
        is_given: whether the config has the length; nothing is kept for the next start then.
        ep_size: the size that the job runs with.
        label: the label of the first layer.
    """

    def __init__(self, predictor: EpSizePredictor, ep_size: int, label: str, *, is_known: bool, is_given: bool) -> None:
        self._predictor, self._ep_size, self._label = predictor, ep_size, label
        self._is_known, self._is_given, self._at_start = is_known, is_given, predictor.tokens
        self._steps, self._due = 0, STEPS_BEFORE
        self._has_batch = self._has_warned = False
        self._begin()

    @property
    def has_compared(self) -> bool:
        """Return True once batches have been compared."""
        return self._due > STEPS_BEFORE

    def _begin(self) -> None:
        self._forwards = self._tokens = self._of_forward = self._most = 0

    def watch(self, call: LayerCall) -> None:
        """Count the tokens of a call: an instrument. A batch may come in parts, and a forward may be repeated."""
        if call.is_training and call.label == self._label and self._has_batch and not in_backward():
            self._of_forward += call.x.shape[:-1].numel()

    def begin_forward(self, has_batch: bool) -> None:
        """Count a forward in training."""
        # Another one may have ended in an error.
        self._of_forward, self._has_batch = 0, has_batch

    def end_forward(self) -> None:
        """End that forward. What a script does with the model itself, such as generating, is no micro-batch."""
        self._forwards += self._has_batch
        self._has_batch = False
        self._tokens, self._most = self._tokens + self._of_forward, max(self._most, self._of_forward)
        self._of_forward = 0

    def step_is_over(self, is_tuned: bool) -> bool:
        """Count an optimizer step; return True if it is time for :meth:`compare`, the same on every rank.

        Args:
            is_tuned: whether the autotuner, if there is one, has settled: it is the same on every rank.
        """
        self._steps += 1
        is_due = self._steps >= self._due and is_tuned
        if is_due:
            self._due = self._steps + min(9 * self._steps, _MOST_STEPS)
        return is_due

    def compare(self) -> None:
        """Compare batches since the last time, and predict sizes where that is due. Collective, between two steps."""
        of_ranks = on_every_rank((self._tokens, self._forwards, self._most, self._predictor.used_bytes()))
        self._begin()
        tokens, forwards, most, used_bytes = (list(each) for each in zip(*of_ranks, strict=True))
        if sum(tokens):
            self._predict_again(sum(tokens) / sum(forwards), max(most), max(used_bytes))

    def _predict_again(self, mean: float, most: int, used_bytes: float) -> None:
        assumed = self._predictor.tokens
        is_longer = self._is_given and most > self._at_start and not self._has_warned
        if self._is_known and not is_longer and abs(mean - assumed) <= OFF * assumed:
            return
        self._has_warned, self._is_known = self._has_warned or is_longer, True
        self._predictor = self._predictor.for_tokens(mean)
        try:
            sizes, _ = self._predictor.predicted(self._ep_size, used_bytes)
        except MeasuringError as error:
            words = self._in_words(round(mean), most)
            log_on_rank_0(f"ep_size: {words}, and no size is predicted for them: {error}", logging.WARNING)
            return
        choice = choose_ep_size(sizes, self._ep_size)
        self._log(choice, sizes, round(mean), most, is_longer)
        if not self._is_given:
            self._predictor.keep(learned_of(choice, round(mean)))

    def _in_words(self, mean: int, most: int) -> str:
        """Return what micro-batches were like, beside what the config has."""
        words = f"micro-batches have {mean} tokens on average"
        if self._is_given:
            asked = self._at_start // self._predictor.job.shapes[0].B
            words += f', {most} at the most, not {self._at_start} ("sequence_length": {asked})'
        return words

    def _log(self, choice: EpChoice, sizes: Sequence[EpSize], mean: int, most: int, is_longer: bool) -> None:
        best, samples = choice.best, self._predictor.job.shapes[0].B
        now_ms = next((each.step_ms for each in sizes if each.ep == self._ep_size), math.nan)
        ratio = now_ms / best.step_ms if best.step_ms else math.nan
        gain = "the best size" if math.isnan(ratio) else f"{ratio:.2f} times as fast as {self._ep_size}"
        line = f"ep_size: {self._in_words(mean, most)}"
        if best.ep == self._ep_size:
            if is_longer:
                log_on_rank_0(f"{line}; {best.ep} is predicted to be the best size all the same")
        elif self._is_given:
            log_on_rank_0(
                f'{line}: {best.ep} is predicted to be {gain}; set "sequence_length": {-(-mean // samples)} and '
                "restart from a checkpoint to have it",
                logging.WARNING,
            )
        else:
            log_on_rank_0(
                f"{line}: the next start will use ep_size = {best.ep} (predicted to be {gain}); restart from a "
                "checkpoint to have it now",
                logging.WARNING,
            )
