# SPDX-License-Identifier: Apache-2.0
"""Holds a job as its run's folder records it: its layers, and the measured costs of their tasks.

:class:`~ds_fsmoe.planning.job.what_if.WhatIf` plans it again without the machine. A run that was not tuned records its
layers without costs; :mod:`~ds_fsmoe.offline.plan.traced_costs` fits these to its trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast, get_args

from ds_fsmoe.planning.block import ORDERS, Links
from ds_fsmoe.planning.call_shape import CallShape, layer_of_call
from ds_fsmoe.planning.cost import Cost, LayerCosts
from ds_fsmoe.planning.decide.gradients import Mode
from ds_fsmoe.planning.decide.plan import Settings
from ds_fsmoe.planning.groups import Fanout, Groups, PlacedGroups, Placement
from ds_fsmoe.planning.job.measured import LayerProfile, Slowdowns, Timing
from ds_fsmoe.planning.phase_plan import gradient_lanes
from ds_fsmoe.planning.schedule import GRADIENT_TASKS, REST, Lane
from ds_fsmoe.planning.timeline import IDEAL, Contention
from ds_fsmoe.planning.workload import ALLTOALLS, ALLTOALLS_OF_BEFORE, AllToAll, Gradient, Layer, Work
from ds_fsmoe.untrusted import MOST_LAYERS, MOST_POSITIONS


@dataclass(frozen=True)
class RecordedAllToAll:
    """Holds one all-to-all of a kind of layer, with the costs of its tasks."""

    planned: AllToAll
    """The planner's name for it."""
    profile: LayerProfile | None = None
    """What was measured; ``None``: nothing."""
    fitted: LayerCosts | None = None
    """What was fitted to a trace instead."""
    rows: CallShape | None = None
    """The sizes of a call if dispatch is unpadded with it, and padded otherwise; ``None``: as in the whole kind."""


@dataclass(frozen=True)
class RecordedKind:
    """Describes layers that are equal and were called alike."""

    labels: tuple[str, ...]
    groups: Groups
    shape: CallShape
    """The sizes of a call, experts as one product of all their weights."""
    alltoalls: Mapping[str, RecordedAllToAll]
    """Name of an all-to-all -> what it costs; the one that was run at first comes first."""
    is_unchunked: bool = False
    """Whether the layers may not be cut."""
    num_choices: int | None = None
    """The experts of a token, k; ``None``: not known."""


@dataclass(frozen=True)
class RecordedJob:
    """Describes a job: its layers, and what its planner knew of the machine and the options."""

    kinds: tuple[RecordedKind, ...]
    labels: tuple[str, ...]
    """The labels of the layers in the order of the forward."""
    schedule: str
    """The schedule by name."""
    mode: Mode
    """When gradients were sent."""
    links: Links
    """The order of traffic within a layer whose degrees are given."""
    rest_ms: tuple[float, float] | None = None
    """The time of all but the experts' parts, forward and backward, without gradients; ``None``: not measured."""
    gradients_bytes: Mapping[str, int] = field(default_factory=dict)
    """Kind of gradient -> the bytes that we reduce; nothing where DeepSpeed does."""
    tensors_bytes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Kind of gradient -> the bytes of its tensors."""
    slowed: Slowdowns = field(default_factory=lambda: Slowdowns({}))
    is_serial: bool = False
    issues_ahead: bool = False
    shared_link: bool = False
    max_degree: int = 16
    gradient_solver: str = "dp"
    chunk_bytes: int | None = None
    micro_batches: int = 1
    """The forwards and backwards of an optimizer step."""
    gradient_factor: float = 1.0
    """What gradients take by the way that was chosen for them in training, over what was measured. Where DeepSpeed
    reduces them, by the one way that it has, they take no less than was measured."""
    _costs: dict[tuple[int, str], LayerCosts] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_measured(self) -> bool:
        """Return True if the costs of tasks were measured, and False if only the layers are known."""
        return bool(self.kinds) and all(
            way.profile is not None for kind in self.kinds for way in kind.alltoalls.values()
        )

    @property
    def contention(self) -> Contention:
        """Return the contention of lanes."""
        return self.slowed.contention()

    @property
    def settings(self) -> Settings:
        """Return the planner's settings, as the autotuner makes them."""
        return Settings(
            self.contention,
            max_degree=self.max_degree,
            gradient_solver=self.gradient_solver,
            chunk_bytes=self.chunk_bytes,
            is_serial=self.is_serial,
            shared_link=self.shared_link,
        )

    @property
    def unchunked(self) -> list[bool]:
        """Return for each layer, in the order of the forward, whether it must not be chunked."""
        return [self.kind_of(label).is_unchunked for label in self.labels]

    def kind_of(self, label: str) -> RecordedKind:
        """Return the kind of a layer."""
        return next(kind for kind in self.kinds if label in kind.labels)

    def costs_of(self, kind: RecordedKind, name: str) -> LayerCosts:
        """Return the costs of tasks with an all-to-all; always the same object.

        Raises:
            ValueError: the costs were neither measured nor fitted.
        """
        key = self.kinds.index(kind), name
        if key not in self._costs:
            way = kind.alltoalls[name]
            found = way.fitted if way.profile is None else way.profile.costs(self.issues_ahead)
            if found is None:
                raise ValueError(f"{', '.join(kind.labels)}: no costs are known for the tasks of these layers")
            self._costs[key] = found
        return self._costs[key]

    def options(self, mode: Mode, rest_ms: tuple[float, float]) -> list[dict[str, Layer]]:
        """Return the model for the planner: for each layer, name of an all-to-all -> the layer with it.

        Args:
            mode: when gradients are sent; micro-ops do not span tensors.
            rest_ms: the ms outside the experts' parts, (forward, backward); each layer is followed by its share.
        """
        count = max(1, len(self.labels))
        shares_ms = rest_ms[0] / count, rest_ms[1] / count
        found: dict[int, dict[str, Layer]] = {}
        for number, kind in enumerate(self.kinds):
            gradients = self._gradients(kind.groups, count, keeps_tensors=mode == "micro_ops")
            found[number] = {}
            for name, way in kind.alltoalls.items():
                of_call = kind.groups, way.rows or kind.shape, self._sending(kind, name, mode), way.planned
                layer = layer_of_call(*of_call, shares_ms, gradients)
                found[number][name] = layer if way.rows is None else _exchanging_counts(layer)
        return [found[self.kinds.index(self.kind_of(label))] for label in self.labels]

    def _sending(self, kind: RecordedKind, name: str, mode: Mode) -> LayerCosts:
        """Return the costs of tasks for a mode of sending gradients."""
        costs = self.costs_of(kind, name)
        # DeepSpeed has one reduction algorithm; ours is the faster of two.
        factor = max(1.0, self.gradient_factor) if mode == "off" else self.gradient_factor
        if factor == 1.0:
            return costs

        def slower(own: Mapping[str, Cost]) -> dict[str, Cost]:
            factors = dict.fromkeys(GRADIENT_TASKS, self.gradient_factor)
            return {each: cost.times(factors.get(each, 1.0)) for each, cost in own.items()}

        rechunked = None if costs.rechunked is None else slower(costs.rechunked)
        return replace(costs, backward=slower(costs.backward), rechunked=rechunked)

    def _gradients(self, groups: Groups, count: int, keeps_tensors: bool) -> tuple[Gradient, ...]:
        """Return the gradients of each of ``count`` layers: an equal share of all."""
        return tuple(
            Gradient(
                kind,
                lanes,
                self.gradients_bytes[kind] // count,
                _middle_share(self.tensors_bytes.get(kind, ()), count) if keeps_tensors else (),
            )
            for kind, lanes in gradient_lanes(groups).items()
            if self.gradients_bytes.get(kind, 0) >= count and lanes
        )

    def with_fitted(self, fitted: Mapping[str, LayerCosts], contention: Contention = IDEAL) -> RecordedJob:
        """Return the job with costs that were fitted to a trace.

        Args:
            fitted: label of a layer -> the costs of its tasks.
            contention: how lanes slow each other down.
        """
        kinds = tuple(
            replace(
                kind,
                alltoalls={name: replace(way, fitted=fitted[kind.labels[0]]) for name, way in kind.alltoalls.items()},
            )
            for kind in self.kinds
        )
        compute, *links = Lane
        factors = {(compute, each): 1 + contention.compute for each in links}
        factors |= {(each, compute): 1 + contention.traffic for each in links}
        factors |= {(links[0], links[1]): 1 + contention.links, (links[1], links[0]): 1 + contention.links}
        return replace(self, kinds=kinds, slowed=Slowdowns(factors), _costs={})


def _exchanging_counts(layer: Layer) -> Layer:
    """Return a layer that waits for numbers of rows ahead of its forward: for as many messages, of no size."""
    assert layer.costs is not None
    sends = [each.kind for each in layer.forward.moe.ahead if each.group == "ep"]
    time_ms = sum(layer.costs.forward[kind].ms(0.0) for kind in sends)
    waits = Work(REST, (Lane.COMPUTE,), time_ms, launches=0)
    return replace(layer, forward=replace(layer.forward, before=(waits,)))


def _middle_share(tensors_bytes: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the bytes of the tensors in the middle one of ``count`` equal parts."""
    share = sum(tensors_bytes) // count
    first, last, start, found = count // 2 * share, (count // 2 + 1) * share, 0, []
    for size in tensors_bytes:
        found.append(min(start + size, last) - max(start, first))
        start += size
    return tuple(each for each in found if each > 0)


# ---- a recorded job as plain data, for the folder of its run, and read back from it


_MOST_DEGREE = 1024
FORMAT = 1
"""The version of what :func:`job_as_data` returns."""


def job_as_data(job: RecordedJob) -> dict[str, Any]:
    """Return a job as JSON data, from which :func:`job_from_data` reads an equal one."""
    return {
        "format": FORMAT,
        "layers": list(job.labels),
        "kinds": [_kind_as_data(kind) for kind in job.kinds],
        "schedule": job.schedule,
        "mode": job.mode,
        "links": job.links,
        "rest_ms": None if job.rest_ms is None else list(job.rest_ms),
        "gradients_bytes": dict(job.gradients_bytes),
        "tensors_bytes": {kind: list(sizes) for kind, sizes in job.tensors_bytes.items()},
        "slowed": [[str(lane), str(by), factor] for (lane, by), factor in job.slowed.factors.items()],
        **{name: getattr(job, name) for name in _PLAIN},
    }


_PLAIN = (
    *("is_serial", "issues_ahead", "shared_link"),
    *("max_degree", "gradient_solver", "chunk_bytes", "micro_batches"),
)


def _kind_as_data(kind: RecordedKind) -> dict[str, Any]:
    return {
        "labels": list(kind.labels),
        "groups": _groups_as_data(kind.groups),
        "shape": asdict(kind.shape),
        "ways": {
            name: {"planned": way.planned}
            | ({} if way.profile is None else {"measured": _profile_as_data(way.profile)})
            | ({} if way.rows is None else {"rows": asdict(way.rows)})
            for name, way in kind.alltoalls.items()
        },
        "is_uncut": kind.is_unchunked,
        "num_choices": kind.num_choices,
    }


def _groups_as_data(groups: Groups) -> dict[str, Any]:
    placed = {
        kind: {"size": at.size, "per_node": at.per_node, "lanes": list(map(str, at.lanes)), "nodes": at.nodes}
        for kind, at in groups.placements.items()
    }
    sizes = {name: getattr(groups, name) for name in ("world", "gpus_per_node", "mp", "esp", "ep", "dp", "pp")}
    return sizes | ({} if Groups(**sizes).placements == groups.placements else {"placed": placed})


_NUMBERS = ("sizes", "times_ms", "issued_ms", "least_ms")
"""The fields of a timing that have a number for each size."""


def _profile_as_data(profile: LayerProfile) -> dict[str, Any]:
    operations = {
        name: {"unit": at.unit} | {key: list(getattr(at, key)) for key in _NUMBERS}
        for name, at in profile.operations.items()
    }
    return {"operations": operations, "task_ms": profile.task_ms, "uses_rng": profile.uses_rng}


def job_from_data(data: Any) -> RecordedJob:
    """Return the job in the data of a run.

    Raises:
        ValueError: the data has another version, or was not written by a run.
    """
    try:
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']!r} is not supported; this version reads {FORMAT}")
        job = RecordedJob(
            kinds=tuple(_kind(each) for each in data["kinds"]),
            labels=tuple(data["layers"]),
            schedule=data["schedule"],
            mode=_one_of(data["mode"], get_args(Mode)),
            links=_one_of(data["links"], ORDERS),
            rest_ms=None if data["rest_ms"] is None else (float(data["rest_ms"][0]), float(data["rest_ms"][1])),
            gradients_bytes={str(kind): int(size) for kind, size in data["gradients_bytes"].items()},
            tensors_bytes={str(kind): tuple(map(int, sizes)) for kind, sizes in data["tensors_bytes"].items()},
            slowed=Slowdowns({(Lane(lane), Lane(by)): float(factor) for lane, by, factor in data["slowed"]}),
            **{name: data[name] for name in _PLAIN},
        )
        for name, most in (("max_degree", _MOST_DEGREE), ("micro_batches", MOST_POSITIONS)):
            if not 1 <= data[name] <= most:
                raise ValueError(f"{name} = {data[name]}: must be from 1 to {most}")
        if len(job.labels) > MOST_LAYERS:
            raise ValueError(f"{len(job.labels)} layers: must be at most {MOST_LAYERS}")
        known = {label for kind in job.kinds for label in kind.labels}
        if not known.issuperset(job.labels):
            raise ValueError(f"no costs for {', '.join(sorted(set(job.labels) - known))}")
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise ValueError(f"not a costs file of a run: {type(error).__name__}: {error}") from error
    return job


def _one_of(value: Any, choices: tuple[str, ...]) -> Any:
    if value not in choices:
        raise ValueError(f"unknown value {value!r}: choose from {', '.join(choices)}")
    return value


def _shape(data: Any) -> CallShape:
    fanout = None if data["crossings"] is None else Fanout(**data["crossings"])
    return CallShape(**(data | {"slices_bytes": (), "wires": tuple(map(float, data["wires"])), "crossings": fanout}))


def _kind(data: Any) -> RecordedKind:
    ways = {
        ALLTOALLS_OF_BEFORE.get(name, name): RecordedAllToAll(
            cast(AllToAll, _one_of(ALLTOALLS_OF_BEFORE.get(way["planned"], way["planned"]), ALLTOALLS)),
            _profile(way["measured"]) if "measured" in way else None,
            rows=_shape(way["rows"]) if "rows" in way else None,
        )
        for name, way in data["ways"].items()
    }
    return RecordedKind(
        tuple(data["labels"]),
        _groups(data["groups"]),
        _shape(data["shape"]),
        ways,
        bool(data["is_uncut"]),
        data["num_choices"],
    )


def _groups(data: Any) -> Groups:
    if "placed" not in data:
        return Groups(**data)
    placed = tuple(
        (kind, Placement(at["size"], at["per_node"], tuple(map(Lane, at["lanes"])), at["nodes"]))
        for kind, at in data["placed"].items()
    )
    return PlacedGroups(**(data | {"placed": placed}))


def _profile(data: Any) -> LayerProfile:
    operations = {}
    for name, at in data["operations"].items():
        sizes, times_ms, issued_ms, least_ms = (tuple(map(float, at[key])) for key in _NUMBERS)
        operations[name] = Timing(str(at["unit"]), sizes, times_ms, issued_ms, least_ms)
    for each in operations.values():
        each.best_fit  # noqa: B018 - what cannot be fitted says why
    return LayerProfile(operations, float(data["task_ms"]), bool(data["uses_rng"]))
