# SPDX-License-Identifier: Apache-2.0
"""A cluster described by numbers: the costs of its operations, measured or published, read from a JSON file.

The files in ``clusters/`` are the paper's two testbeds, and also examples for writing your own.
What a size means, for every collective: the bytes of the largest buffer of one rank (what an all-to-all sends, what an
all-gather ends with, what a reduce-scatter starts from, what an all-reduce reduces).
"""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from ds_fsmoe.planning.cluster_schema import (
    ALL_UNITS,
    CONTENTION,
    DTYPES,
    FIELDS,
    GROWTH,
    LINKS,
    NEEDED,
    operation_fields,
    slope_of,
)
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.timeline import IDEAL, Contention
from ds_fsmoe.untrusted import MOST_RANKS, read_json

_FOLDER = Path(__file__).parent / "clusters"
_SCHEMA = "cluster.schema"
_CONTENTION = tuple(each for each in CONTENTION if each != "source")
_TEXTS = ("source", "date", "contributed_by", "gpu")
_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class Operation:
    """The cost of one operation and its source."""

    cost: LinearCost
    ranks: int | None = None
    """The size of the group in which it was measured; ``None``: unknown, or not a collective."""
    source: str = ""
    alpha_ms_per_rank: float = 0.0
    """By how much every further rank makes it longer: a ring has a step more, an all-to-all a message."""
    alpha_ms_per_doubling: float = 0.0
    """By how much twice as many ranks make it longer: a tree has a level more."""

    def among(self, ranks: int, peers: int | None = None) -> LinearCost:
        """Return the cost in a group of another size: (N-1)/N of a buffer is sent over the link, and the start-up is
        as much longer as the file says, which is not at all unless it says something.

        Args:
            ranks: the ranks that share the link's traffic.
            peers: the ranks that exchange messages, for the start-up; ``None``: as many.
        """
        if ranks == 1:
            return LinearCost(0.0, 0.0)
        peers = ranks if peers is None else peers
        if self.ranks is None or self.ranks == ranks == peers:
            return self.cost
        share = ((ranks - 1) / ranks) / ((self.ranks - 1) / self.ranks)
        longer_ms = self.alpha_ms_per_rank * (peers - self.ranks)
        longer_ms += self.alpha_ms_per_doubling * math.log2(peers / self.ranks)
        return LinearCost(max(0.0, self.cost.alpha_ms + longer_ms), self.cost.beta_ms * share)


@dataclass(frozen=True)
class Cluster:
    """The nodes of a cluster and the costs of their operations."""

    name: str
    num_nodes: int
    gpus_per_node: int
    operations: Mapping[str, Operation]
    contention: Contention = IDEAL
    host_ms: float = 0.0
    """The host time to launch one operation."""
    source: str = ""
    gpu: str = ""
    memory_gb: float | None = None
    """The memory of a GPU in 10^9 bytes; ``None``: the file does not say."""
    dtype: str | None = None
    """The type of numbers that the costs of computing hold for; ``None``: the file does not say."""
    peak_tflops: float | None = None
    """What a GPU computes in that type at the most, in 10^12 floating-point operations a second."""
    link_gb_per_s: Mapping[str, float] = field(default_factory=dict)
    """Link -> what a GPU's share of its ports carries one way at the most, in 10^9 bytes a second."""
    date: str = ""
    contributed_by: str = ""
    layer_wait_ms: float = 0.0
    """The time that a GPU waits for the host in each phase of a layer with experts."""

    def operation(self, name: str, needed_by: str) -> Operation:
        """Return the cost of one operation.

        Args:
            name: the name of the operation in ``ALL_UNITS``.
            needed_by: the caller, for the message.

        Raises:
            ValueError: the cluster has no number for it.
        """
        if name not in self.operations:
            raise ValueError(
                f"cluster {self.name}: operations.{name} is missing, and {needed_by} needs it: "
                f"there are {', '.join(self.operations) or 'none'}"
            )
        return self.operations[name]


def names() -> tuple[str, ...]:
    """Return the names of the clusters that come with the package."""
    return tuple(sorted(each.stem for each in _FOLDER.glob("*.json") if each.stem != _SCHEMA))


def load_cluster(name_or_path: str) -> Cluster:
    """Return a cluster by its name or from your own JSON file.

    Raises:
        ValueError: no such name or file, or a file with a wrong field; it names the field and the choices.
    """
    path, data = read_file(name_or_path)
    return _Reader(f"cluster file {path}").cluster(data)


def read_file(name_or_path: str) -> tuple[Path, Any]:
    """Return the path of a cluster's file and what is in it, unread.

    Raises:
        ValueError: no such name or file, or no JSON.
    """
    path = _FOLDER / f"{name_or_path}.json"
    if name_or_path not in names():
        path = Path(name_or_path)
        if not path.is_file():
            near = difflib.get_close_matches(name_or_path, names(), 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"no cluster is called {name_or_path!r}, and there is no such file: {hint}"
                f"the choices are {', '.join(names())}, or the path of a JSON file written like one of them"
            )
    try:
        return path, read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"cluster file {path}: cannot be read as JSON: {error}") from error


def errors_in(data: Any) -> tuple[str, ...]:
    """Return everything for which a file would be refused, each as a sentence that begins with the field."""
    found: list[str] = []
    reader = _Reader("", found)
    reader.attempt(lambda: reader.cluster(data))
    return tuple(found)


def cluster_as_json(cluster: Cluster) -> dict[str, Any]:
    """Return the cluster in JSON's types, so that :func:`load_cluster` reads an equal one back."""
    operations = {}
    for name, operation in cluster.operations.items():
        cost = {"alpha_ms": float(operation.cost.alpha_ms), slope_of(name): float(operation.cost.beta_ms)}
        ranks = {} if operation.ranks is None else {"ranks": operation.ranks}
        growth = {each: float(getattr(operation, each)) for each in GROWTH if getattr(operation, each)}
        operations[name] = cost | ranks | growth | {"source": operation.source}
    said = {name: getattr(cluster, name) for name in ("date", "contributed_by", "gpu", "memory_gb", "dtype")}
    said |= {"peak_tflops": cluster.peak_tflops, "link_gb_per_s": dict(cluster.link_gb_per_s)}
    return {
        "name": cluster.name,
        "source": cluster.source,
        "num_nodes": cluster.num_nodes,
        "gpus_per_node": cluster.gpus_per_node,
        **{name: value for name, value in said.items() if value},
        "contention": {key: float(getattr(cluster.contention, key)) for key in _CONTENTION},
        "host_ms": float(cluster.host_ms),
        **({"layer_wait_ms": float(cluster.layer_wait_ms)} if cluster.layer_wait_ms else {}),
        "operations": operations,
    }


class _Reader:
    """This class reads a cluster file field by field and reports where a wrong one is: it raises for the first, or
    collects all."""

    def __init__(self, file: str, found: list[str] | None = None) -> None:
        self._file = file
        self._found = found

    def wrong(self, path: str, sentence: str) -> ValueError:
        return ValueError(f"{self._file}: {path}{sentence}" if self._file else f"{path}{sentence}".strip())

    def attempt(self, read: Callable[[], _Read]) -> _Read | None:
        """Return what is read; if it is wrong and errors are collected, nothing."""
        if self._found is None:
            return read()
        try:
            return read()
        except ValueError as error:
            self._found.append(str(error))
            return None

    def cluster(self, data: Any) -> Cluster:
        if not isinstance(data, dict):
            raise self.wrong("", "must be a JSON object")
        self.known("", data, tuple(FIELDS))
        for needed in NEEDED:
            if needed not in data:
                self.refuse(needed, " is missing")
        if not isinstance(data.get("measured", {}), dict):
            self.refuse("measured", " must be a JSON object")
        contention = self.part("contention", data, tuple(CONTENTION))
        operations = self.part("operations", data, tuple(ALL_UNITS))
        links = self.part("link_gb_per_s", data, LINKS)
        counts = {name: self.count(name, data[name]) for name in ("num_nodes", "gpus_per_node") if name in data}
        read = {name: self.operation(name, value) for name, value in operations.items()}
        kappas = (self.number(f"contention.{key}", contention.get(key, 0.0)) for key in _CONTENTION)
        return Cluster(
            name=str(data.get("name", Path(self._file).stem)),
            num_nodes=counts.get("num_nodes", 1),
            gpus_per_node=counts.get("gpus_per_node", 1),
            operations=MappingProxyType(read),
            contention=Contention(*kappas),
            host_ms=self.number("host_ms", data.get("host_ms", 0.0)),
            layer_wait_ms=self.number("layer_wait_ms", data.get("layer_wait_ms", 0.0)),
            **{name: str(data.get(name, "")) for name in _TEXTS},
            memory_gb=self.above_0("memory_gb", data),
            dtype=self.choice("dtype", data, DTYPES),
            peak_tflops=self.above_0("peak_tflops", data),
            link_gb_per_s=MappingProxyType(
                {link: self.above_0(f"link_gb_per_s.{link}", links, link) or 0.0 for link in links}
            ),
        )

    def refuse(self, path: str, sentence: str) -> None:
        def wrong() -> None:
            raise self.wrong(path, sentence)

        self.attempt(wrong)

    def part(self, name: str, data: Mapping[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
        """Return an object inside the file, without what is wrong in it."""
        part = data.get(name, {})
        self.known(name, part, fields)
        return {key: value for key, value in part.items() if key in fields} if isinstance(part, dict) else {}

    def operation(self, name: str, data: Any) -> Operation:
        path, slope = f"operations.{name}", slope_of(name)
        self.known(path, data, operation_fields(name))
        data = data if isinstance(data, dict) else {"alpha_ms": 0.0, slope: 0.0}
        for needed in ("alpha_ms", slope):
            if needed not in data:
                self.refuse(f"{path}.{needed}", " is missing")
        cost = LinearCost(*(self.number(f"{path}.{key}", data.get(key, 0.0)) for key in ("alpha_ms", slope)))
        growth = {key: self.number(f"{path}.{key}", data[key]) for key in GROWTH if key in data}
        ranks = data.get("ranks")
        if ranks is not None:
            ranks = self.count(f"{path}.ranks", ranks)
            if ranks < 2:
                self.refuse(f"{path}.ranks", f" = {ranks}: a collective is measured among at least 2")
        elif growth:
            self.refuse(f"{path}.ranks", f" is missing, and {' and '.join(growth)} counts from there")
        return Operation(cost, ranks, str(data.get("source", "")), **growth)

    def known(self, path: str, data: Any, fields: tuple[str, ...]) -> None:
        if not isinstance(data, dict):
            self.refuse(path, f"{' ' if path else ''}must be a JSON object")
            return
        for key in data:
            if key not in fields:
                near = difflib.get_close_matches(key, fields, 1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                where = f"{path}.{key}" if path else key
                self.refuse(where, f": no such field: {hint}the choices are {', '.join(fields)}")

    def number(self, path: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # Whole numbers have no limit in JSON; what no float can hold is not finite here.
        if not is_number or not 0 <= value <= sys.float_info.max:
            self.refuse(path, f" = {json.dumps(value)[:40]}: must be a finite number of at least 0")
            return 0.0
        return float(value)

    def above_0(self, path: str, data: Mapping[str, Any], key: str = "") -> float | None:
        """Return a number that may be missing, but not be 0."""
        key = key or path
        if key not in data:
            return None
        value = self.number(path, data[key])
        if value == 0 and data[key] == 0:
            self.refuse(path, " = 0: must be above 0")
        return value

    def choice(self, path: str, data: Mapping[str, Any], choices: tuple[str, ...]) -> str | None:
        value = data.get(path)
        if value is not None and value not in choices:
            self.refuse(path, f" = {json.dumps(value)[:40]}: the choices are {', '.join(choices)}")
            return None
        return value

    def count(self, path: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_RANKS:
            sentence = f"must be a whole number of at least 1 and at most {MOST_RANKS}"
            self.refuse(path, f" = {json.dumps(value)[:40]}: {sentence}")
            return 2
        return value
