# SPDX-License-Identifier: Apache-2.0
"""Returns everything that the autotuner measures, as data.

:class:`~ds_fsmoe.tuning.autotune.Autotune` calls :func:`measure` between two forwards, on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ds_fsmoe.distributed.fail_together import from_first_rank, on_every_rank, raise_on_all_ranks
from ds_fsmoe.distributed.partitioned import gathered
from ds_fsmoe.distributed.topology import Topology, find_topology, rank_now
from ds_fsmoe.log import progress_on_rank_0
from ds_fsmoe.measuring.cache import MeasurementCache, Measurements, Measuring, Timeable, cluster_fingerprint, source_of
from ds_fsmoe.measuring.cluster_profile import profile_cluster
from ds_fsmoe.measuring.profiler import (
    LinkTimes,
    Reduces,
    is_serial,
    issues_ahead,
    profile,
    slowdowns_of,
    time_links,
    untouched,
)
from ds_fsmoe.measuring.stopwatch import Stopwatch, at_least
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.cluster import Cluster
from ds_fsmoe.planning.job.measured import (
    EXPERT_GRADIENTS,
    GATE,
    GATHERED,
    GRADIENTS,
    ORDER,
    REDUCE_SCATTER,
    SCATTERED,
    LayerProfile,
    Slowdowns,
)
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import EXPERT_GRAD, GRAD, GRAD_GATHER, GRAD_SCATTER
from ds_fsmoe.tuning.layer_kinds import LayerKind, find_layers_to_measure

if TYPE_CHECKING:
    from ds_fsmoe.gradients.flat_buffers import FlatGradients
    from ds_fsmoe.gradients.reduction import Reduction
    from ds_fsmoe.layer.runtime import LayerRuntime
    from ds_fsmoe.layer.stock_layer import FSMoELayer

_HOST_DEGREE = 4
"""The number of chunks of the schedule that times the cost of handing out tasks."""


@dataclass(frozen=True)
class Measured:
    """Holds the measurements, and the layers and machine that they are of."""

    kinds: Sequence[LayerKind]
    profiles: Mapping[tuple[str, str], LayerProfile]
    """(kind of layer, all-to-all) -> the times of its operations."""
    links: LinkTimes
    slowed: Slowdowns
    cluster: Cluster | None
    """The cluster's own operations; ``None`` where they are not needed."""
    topology: Topology
    is_serial: bool
    """Whether lanes run one after another."""
    issues_ahead: bool
    """Whether one thread issues for all lanes, ahead of them."""
    num_measured: int = 0
    """The number of operations that were timed; 0 where all was known."""
    source: str = ""
    """The origin of what was not measured again."""

    @cached_property
    def kind_of(self) -> dict[str, LayerKind]:
        """Return label of a layer -> its kind."""
        return {label: kind for kind in self.kinds for label in kind.labels}

    def profile_of(self, kind: LayerKind, alltoall: str) -> LayerProfile:
        """Return the times of layers with an all-to-all."""
        return self.profiles[kind.subject.kind, alltoall]

    def reduces(self, kind: LayerKind) -> Reduces:
        """Return the methods of the reduce-scatters of these layers, by size."""
        return self.links.reduces.get(kind.subject.link_name(REDUCE_SCATTER), ())


def tensors_of(reduction: Reduction | None) -> dict[str, list[int]]:
    """Return kind of gradient -> the bytes of each tensor that we reduce, in the order of the buffers."""
    found: dict[str, list[int]] = {}
    for flat in () if reduction is None else reduction.reducer.flats:
        found.setdefault(flat.kind, []).extend(each.numel() * flat.element_bytes for each in flat.parameters)
    return found


def gradients_of(reduction: Reduction | None) -> list[tuple[str, int]]:
    """Return the kind and the bytes of every buffer that we reduce."""
    flats = () if reduction is None else reduction.reducer.flats
    return [(each.kind, each.numel * each.element_bytes) for each in flats]


def measure(
    running: LayerRuntime,
    layers: Mapping[str, FSMoELayer],
    reduction: Reduction | None,
    group: dist.ProcessGroup | None,
    *,
    reads_cache: bool,
) -> Measured:
    """Measure the costs that plans depend on. Collective over all ranks, between forwards.

    Args:
        running: the lanes and groups of the layers.
        layers: the engine's layers, by label; those that were called are measured.
        reduction: the reduction of its gradients, if we do it.
        group: the ranks that run the same layers; ``None``: all of the job.
        reads_cache: whether earlier measurements are used instead of measuring again.

    Raises:
        MeasuringError: on every rank, if one has failed.
        DisagreementError: on every rank, if they have run different layers.
    """
    device, block, max_ctas, lanes = running.device, running.block, running.max_ctas, running.lanes
    everyone, stage = Stopwatch(device), Stopwatch(device, group)
    asked_nodes = block.topology.ranks_per_node
    topology = find_topology(None if asked_nodes == "auto" else asked_nodes)
    # A stage of a pipeline may have no layer of ours.
    dtype = next(filter(None, on_every_rank(running.first_forwards.dtype)), torch.float32)
    found = find_layers_to_measure(layers, running, group)
    fingerprint = cluster_fingerprint(device, topology, max_ctas=max_ctas, one_link=running.one_link is not None)
    cache = None if block.autotune.cache_dir is None else MeasurementCache(Path(block.autotune.cache_dir))
    # Each rank has its own name of the folder; the first rank decides whether there is one.
    is_kept = from_first_rank(cache is not None)
    # It takes as long as all the rest, and no plan follows from it.
    wants_cluster = block.autotune.enabled is True or is_kept or block.record.dir is not None
    known, source = _known(everyone, cache if reads_cache else None, fingerprint)
    with progress_on_rank_0("autotune: measuring", unit="operations") as progress:
        for_all, of_stage = (Measuring(watch, known, lambda _: progress()) for watch in (everyone, stage))
        cluster = None
        if wants_cluster:
            origin = source_of(fingerprint, str(dtype).removeprefix("torch."))
            cluster = profile_cluster(for_all, topology, lanes, dtype, max_ctas=max_ctas, source=origin)
        with nullcontext() if group is None else raise_on_all_ranks(None, "measuring the layers of a stage"):
            profiles, links, slowed = _layers(of_stage, found.largest, reduction, running)
    num_measured = everyone.num_timed + stage.num_timed
    if is_kept and cluster is not None and everyone.any_rank(num_measured > 0):
        _keep(everyone, cache, fingerprint, known, cluster, group)
    # They hold experts, and are of no use any more.
    running.first_forwards.calls.clear()
    of_machine = cluster, topology, is_serial(lanes), issues_ahead(lanes, device)
    return Measured(found.kinds, profiles, links, slowed, *of_machine, num_measured, source)


def _layers(
    measuring: Measuring, largest: list[LayerKind], reduction: Reduction | None, running: LayerRuntime
) -> tuple[dict[tuple[str, str], LayerProfile], LinkTimes, Slowdowns]:
    """Measure each collective once for all layers that share its ranks, and experts once for layers that are equal."""
    others = []
    for kind in largest:
        works = _sums_of_gradients(kind, reduction) | _gate_and_order(measuring.watch, kind)
        others.append(measuring.timings(works))
    links = time_links(measuring, [option.subject for kind in largest for option in kind.options.values()])
    profiles: dict[tuple[str, str], LayerProfile] = {}
    for kind, of_others in zip(largest, others, strict=True):
        block = BlockPlan(_HOST_DEGREE, running.links)
        schedule = PhasePlan(block, kind.pipeline.forward.groups, backward=False).schedule
        with gathered(kind.subject.experts.parameters):
            measured = profile(measuring, kind.subject, running.lanes, schedule)
        for name, option in kind.options.items():
            of_links = {each: links.timings[option.subject.link_name(each)] for each in option.subject.links}
            profiles[kind.subject.kind, name] = replace(
                measured, operations={**of_links, **measured.operations, **of_others}
            )
    if not largest or is_serial(running.lanes):
        return profiles, links, Slowdowns({})
    heaviest = max(largest, key=lambda kind: kind.subject.measured_capacity * kind.subject.sizes.width)
    # One with a part on each link, if there is one.
    option = max(heaviest.options.values(), key=lambda each: len(each.subject.links))
    with gathered(option.subject.experts.parameters):
        return profiles, links, slowdowns_of(measuring, option.subject, running.lanes, heaviest.lane_of)


def _known(
    everyone: Stopwatch, cache: MeasurementCache | None, fingerprint: Mapping[str, object]
) -> tuple[Measurements, str]:
    """Return the measurements that are known, the same on every rank, and their source."""
    known, source = Measurements(), ""
    with raise_on_all_ranks(everyone.group, "reading what was measured before"):
        if cache is not None and rank_now() == 0:
            found = cache.read(fingerprint)
            if found is not None:
                known, source = found, str(cache.file_of(fingerprint))
    known, source = from_first_rank((known, source))
    return known, source and f"what {source} has is not measured again"


def _keep(
    everyone: Stopwatch,
    cache: MeasurementCache | None,
    fingerprint: Mapping[str, object],
    known: Measurements,
    cluster: Cluster,
    group: dist.ProcessGroup | None,
) -> None:
    # Stages have measured layers of their own.
    of_ranks = [known] if group is None else on_every_rank(known)
    with raise_on_all_ranks(everyone.group, "keeping what was measured"):
        if cache is not None and rank_now() == 0:
            joined = Measurements()
            for each in of_ranks:
                joined.timings |= each.timings
                joined.numbers |= each.numbers
            cache.write(fingerprint, joined, cluster)


# ---- what a layer does besides the experts' part, alone: gate, order, and the sums of gradients


LARGEST_NUMEL = 1 << 20
"""The most elements of gradients that are summed to measure the cost."""
_NAMES = {GRAD: GRADIENTS, EXPERT_GRAD: EXPERT_GRADIENTS, GRAD_SCATTER: SCATTERED, GRAD_GATHER: GATHERED}


def _gate_and_order(watch: Stopwatch, kind: LayerKind) -> dict[str, Timeable]:
    """Return the forward of a layer's gate, and of its order there and back, to be timed per token. Collective."""
    layer, device = kind.layer, watch.device
    width, dtype = kind.subject.sizes.width, kind.subject.sizes.dtype
    # As many tokens as the fullest rank has, so that all measure the same.
    num_tokens = int(watch.slowest([[float(kind.num_tokens)]])[0][0])
    sizes = _sizes_up_to(num_tokens, 4)

    def tokens(size: int) -> torch.Tensor:
        return torch.randn(size, width, device=device).to(dtype)

    def gate(size: int) -> Callable[[], object]:
        x_SM = tokens(size)
        return lambda: layer.route_without_hooks(x_SM, None, None)

    def order(size: int) -> Callable[[], object]:
        x_SM = tokens(size)
        routing = layer.route_without_hooks(x_SM, None, None)
        return lambda: layer.fsmoe.order.restore(layer.fsmoe.order.arrange(x_SM, routing), routing)

    @contextmanager
    def in_evaluation() -> Iterator[None]:
        was_training = layer.gate.training
        # A gate that counts what it routes in training does not count this.
        layer.gate.eval()
        try:
            with untouched(device, layer.gate), kind.subject.surroundings():
                yield
        finally:
            layer.gate.train(was_training)

    of_kind = f"{type(layer.gate).__name__}, {type(layer.fsmoe.order).__name__}, {layer.num_local_experts}"
    of_kind = f"{of_kind} experts a rank, width {width}, {dtype}, up to {sizes[-1]} tokens"
    return {
        name: Timeable(f"{name} {of_kind}", "token", sizes, 1.0, prepare, within=in_evaluation)
        for name, prepare in ((GATE, gate), (ORDER, order))
    }


def _sums_of_gradients(kind: LayerKind, reduction: Reduction | None) -> dict[str, Timeable]:
    """Return the sums of gradients, to be timed per byte: dense ones, and the experts' where several ranks hold them.

    Args:
        kind: a layer.
        reduction: its groups are used; without one, nothing is summed.
    """
    largest: dict[str, FlatGradients] = {}
    for flat in () if reduction is None else reduction.reducer.flats:
        if flat.kind not in largest or flat.numel > largest[flat.kind].numel:
            largest[flat.kind] = flat
    found: dict[str, Timeable] = {}
    placements = kind.pipeline.forward.groups.placements
    for grad_kind, flat in largest.items():
        sizes = _sizes_up_to(min(LARGEST_NUMEL, flat.numel), 6)
        at = placements["dp" if grad_kind == GRAD else "edp"]
        of_kind = f"of {flat.dtype} among {at.size} ({at.per_node} in a node), up to {sizes[-1]} elements"
        for task in flat.algorithm.most_kinds:
            name = _NAMES[grad_kind if task == GRAD else task]
            of_one = f"{name} {of_kind}, {flat.algorithm}", "byte", sizes, float(flat.dtype.itemsize)
            found.setdefault(name, Timeable(*of_one, flat.reducing(task), flat.group))
    return found


def _sizes_up_to(largest: int, count: int) -> list[int]:
    """Return so many sizes, each half of the next, fewer where they would repeat, but at least three for a line."""
    return at_least(3, (max(1, largest >> halvings) for halvings in range(count)))
