# SPDX-License-Identifier: Apache-2.0
"""A recorded job as plain data, for the folder of its run, and read back from it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, cast, get_args

from ds_fsmoe.planning.block import ORDERS
from ds_fsmoe.planning.call_shape import CallShape
from ds_fsmoe.planning.crossings import Crossings
from ds_fsmoe.planning.decide.gradients import Mode
from ds_fsmoe.planning.groups import Groups, Placement
from ds_fsmoe.planning.job.measured import LayerProfile, Slowdowns, Timing
from ds_fsmoe.planning.job.recorded_costs import RecordedGroups, RecordedJob, RecordedKind, RecordedWay
from ds_fsmoe.planning.schedule import Lane
from ds_fsmoe.planning.workload import ALLTOALLS, AllToAll
from ds_fsmoe.untrusted import MOST_LAYERS, MOST_POSITIONS

_MOST_DEGREE = 1024
FORMAT = 1
"""The version of what :func:`job_as_data` returns."""


def job_as_data(job: RecordedJob) -> dict[str, Any]:
    """Return a job in JSON's types, so that :func:`job_from_data` reads an equal one back."""
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
            for name, way in kind.ways.items()
        },
        "is_uncut": kind.is_uncut,
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
    """Return the job that a run has recorded.

    Raises:
        ValueError: it is of another version, or not what a run writes.
    """
    try:
        if data["format"] != FORMAT:
            raise ValueError(f"it has format {data['format']!r}, and this version reads {FORMAT}")
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
            raise ValueError(f"it says nothing of {', '.join(sorted(set(job.labels) - known))}")
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise ValueError(f"it is not what a run writes: {type(error).__name__}: {error}") from error
    return job


def _one_of(value: Any, choices: tuple[str, ...]) -> Any:
    if value not in choices:
        raise ValueError(f"it has {value!r} where the choices are {', '.join(choices)}")
    return value


def _kind(data: Any) -> RecordedKind:
    shape = data["shape"] | {"slices_bytes": (), "wires": tuple(map(float, data["shape"]["wires"]))}
    if shape["crossings"] is not None:
        shape["crossings"] = Crossings(**shape["crossings"])
    ways = {
        name: RecordedWay(
            cast(AllToAll, _one_of(way["planned"], ALLTOALLS)),
            _profile(way["measured"]) if "measured" in way else None,
        )
        for name, way in data["ways"].items()
    }
    return RecordedKind(
        tuple(data["labels"]),
        _groups(data["groups"]),
        CallShape(**shape),
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
    return RecordedGroups(**(data | {"placed": placed}))


def _profile(data: Any) -> LayerProfile:
    operations = {}
    for name, at in data["operations"].items():
        sizes, times_ms, issued_ms, least_ms = (tuple(map(float, at[key])) for key in _NUMBERS)
        operations[name] = Timing(str(at["unit"]), sizes, times_ms, issued_ms, least_ms)
    for each in operations.values():
        each.best_fit  # noqa: B018 - what cannot be fitted says why
    return LayerProfile(operations, float(data["task_ms"]), bool(data["uses_rng"]))
