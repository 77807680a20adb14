# SPDX-License-Identifier: Apache-2.0
"""A cluster described by numbers: the costs of its operations, measured or published, read from a JSON file.

The files in ``clusters/`` are the paper's two testbeds, and also examples for writing your own.
What a size means, for every collective: the bytes of the largest buffer of one rank (what an all-to-all sends, what an
all-gather ends with, what a reduce-scatter starts from, what an all-reduce reduces).
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.timeline import IDEAL, Contention

_FOLDER = Path(__file__).parent / "clusters"
_FIELDS = ("name", "source", "num_nodes", "gpus_per_node", "contention", "host_ms", "operations", "measured")
"""The fields of a file. ``measured`` is the data from which the rest was made; this module does not read it."""
_CONTENTION = ("links", "compute", "traffic")
_COLLECTIVES = ("all_to_all", "all_reduce", "all_gather", "reduce_scatter")
UNITS: Mapping[str, str] = MappingProxyType(
    {f"{link}.{name}": "byte" for link in ("inter", "intra") for name in _COLLECTIVES}
    | {"gemm": "flop", "attention": "flop", "softmax": "score", "routing": "flop", "order": "byte"}
)
"""Operation -> the unit of its slope. ``inter`` is a group with one rank per node, ``intra`` one inside a node."""


@dataclass(frozen=True, slots=True)
class Operation:
    """The cost of one operation and its source."""

    cost: LinearCost
    ranks: int | None = None
    """The size of the group in which it was measured; ``None``: unknown, or not a collective."""
    source: str = ""

    def among(self, ranks: int) -> LinearCost:
        """Return the cost in a group of another size: (N-1)/N of a buffer is sent over the link."""
        if ranks == 1:
            return LinearCost(0.0, 0.0)
        if self.ranks in (None, ranks):
            return self.cost
        share = ((ranks - 1) / ranks) / ((self.ranks - 1) / self.ranks)
        return LinearCost(self.cost.alpha_ms, self.cost.beta_ms * share)


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

    def operation(self, name: str, needed_by: str) -> Operation:
        """Return the cost of one operation.

        Args:
            name: the name of the operation in ``UNITS``.
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
    return tuple(sorted(each.stem for each in _FOLDER.glob("*.json")))


def load_cluster(name_or_path: str) -> Cluster:
    """Return a cluster by its name or from your own JSON file.

    Raises:
        ValueError: no such name or file, or a file with a wrong field; it names the field and the choices.
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
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cluster file {path}: cannot be read as JSON: {error}") from error
    return _Reader(f"cluster file {path}").cluster(data)


def cluster_as_json(cluster: Cluster) -> dict[str, Any]:
    """Return the cluster in JSON's types, so that :func:`load_cluster` reads an equal one back."""
    operations = {}
    for name, operation in cluster.operations.items():
        cost = {"alpha_ms": float(operation.cost.alpha_ms), f"beta_ms_per_{UNITS[name]}": float(operation.cost.beta_ms)}
        ranks = {} if operation.ranks is None else {"ranks": operation.ranks}
        operations[name] = cost | ranks | {"source": operation.source}
    return {
        "name": cluster.name,
        "source": cluster.source,
        "num_nodes": cluster.num_nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "contention": {key: float(getattr(cluster.contention, key)) for key in _CONTENTION},
        "host_ms": float(cluster.host_ms),
        "operations": operations,
    }


class _Reader:
    """This class reads a cluster file field by field and reports where a wrong one is."""

    def __init__(self, file: str) -> None:
        self._file = file

    def wrong(self, path: str, sentence: str) -> ValueError:
        return ValueError(f"{self._file}: {path}{sentence}")

    def cluster(self, data: Any) -> Cluster:
        self.known("", data, _FIELDS)
        for needed in ("num_nodes", "gpus_per_node", "operations"):
            if needed not in data:
                raise self.wrong(needed, " is missing")
        if not isinstance(data.get("measured", {}), dict):
            raise self.wrong("measured", " must be a JSON object")
        contention = data.get("contention", {})
        self.known("contention", contention, (*_CONTENTION, "source"))
        self.known("operations", data["operations"], tuple(UNITS))
        return Cluster(
            name=str(data.get("name", Path(self._file).stem)),
            num_nodes=self.count("num_nodes", data["num_nodes"]),
            gpus_per_node=self.count("gpus_per_node", data["gpus_per_node"]),
            operations=MappingProxyType(
                {name: self.operation(name, value) for name, value in data["operations"].items()}
            ),
            contention=Contention(*(self.number(f"contention.{key}", contention.get(key, 0.0)) for key in _CONTENTION)),
            host_ms=self.number("host_ms", data.get("host_ms", 0.0)),
            source=str(data.get("source", "")),
        )

    def operation(self, name: str, data: Any) -> Operation:
        path, slope = f"operations.{name}", f"beta_ms_per_{UNITS[name]}"
        collective = "." in name
        self.known(path, data, ("alpha_ms", slope, "source", *(("ranks",) if collective else ())))
        for needed in ("alpha_ms", slope):
            if needed not in data:
                raise self.wrong(f"{path}.{needed}", " is missing")
        cost = LinearCost(*(self.number(f"{path}.{key}", data[key]) for key in ("alpha_ms", slope)))
        ranks = data.get("ranks")
        if ranks is not None and self.count(f"{path}.ranks", ranks) < 2:
            raise self.wrong(f"{path}.ranks", f" = {ranks}: a collective is measured among at least 2")
        return Operation(cost, ranks, str(data.get("source", "")))

    def known(self, path: str, data: Any, fields: tuple[str, ...]) -> None:
        if not isinstance(data, dict):
            raise self.wrong(path, f"{' ' if path else ''}must be a JSON object")
        for key in data:
            if key not in fields:
                near = difflib.get_close_matches(key, fields, 1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                where = f"{path}.{key}" if path else key
                raise self.wrong(where, f": no such field: {hint}the choices are {', '.join(fields)}")

    def number(self, path: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # Whole numbers have no limit in JSON; what no float can hold is not finite here.
        if not is_number or not 0 <= value <= sys.float_info.max:
            raise self.wrong(path, f" = {json.dumps(value)[:40]}: must be a finite number of at least 0")
        return float(value)

    def count(self, path: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(path, f" = {json.dumps(value)}: must be a whole number of at least 1")
        return value
