# SPDX-License-Identifier: Apache-2.0
"""Describes a cluster by numbers: the costs of its operations, measured or published, read from a JSON file.
``ds_fsmoe plan`` and the offline commands load it; :mod:`~ds_fsmoe.planning.cluster_schema` lists the fields.

The files in ``clusters/`` describe the paper's two testbeds, and are examples for your own. The size of a collective is
the bytes of the largest buffer of one rank. That is what an all-to-all sends, an all-gather ends with, a reduce-scatter
starts from, and an all-reduce reduces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.groups import Placement
from ds_fsmoe.planning.schedule import Lane
from ds_fsmoe.planning.timeline import IDEAL, Contention
from ds_fsmoe.untrusted import read_json, suggested

_FOLDER = Path(__file__).parent / "clusters"
_SCHEMA = "cluster.schema"


@dataclass(frozen=True, slots=True)
class Operation:
    """Holds the cost of one operation and its source."""

    cost: LinearCost
    ranks: int | None = None
    """The size of the group in which it was measured; ``None``: unknown, or not a collective."""
    source: str = ""
    alpha_ms_per_rank: float = 0.0
    """By how much every further rank makes it longer: a ring has a step more, an all-to-all a message."""
    alpha_ms_per_doubling: float = 0.0
    """By how much twice as many ranks make it longer: a tree has a level more."""

    def among(self, ranks: int, peers: int | None = None) -> LinearCost:
        """Return the cost in a group of another size.

        A rank sends (N-1)/N of a buffer over the link. The start-up grows only by what the file states.

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
    """Holds the nodes of a cluster and the costs of their operations."""

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
                f"cluster {self.name}: operations.{name} is missing, but {needed_by} needs it: the file has "
                f"{', '.join(self.operations) or 'none'}"
            )
        return self.operations[name]


_INSIDE = {"all_reduce": ("reduce_scatter", "all_gather")}
"""A collective -> those inside each node, where it goes in two levels; others are themselves inside it."""


def cost_among(
    cluster: Cluster, group: str, at: Placement, collective: str, peers: int | None, *, in_slices: bool = False
) -> LinearCost:
    """Return the cost of a collective among the ranks of a group, given by its name in :class:`Groups`.

    Args:
        cluster: the cluster.
        group, at: the group, and its placement.
        collective: the operation.
        peers: the number of messages that a rank starts; ``None``: one for each node.
        in_slices: whether two levels go in slices, of which one is between nodes while another is inside them.

    Raises:
        ValueError: the cluster has no number for the collective.
    """
    lies = f"the {group.upper()} group ({at.size} ranks, at most {at.per_node} in a node)"
    if at.lanes == (Lane.INTRA,):
        return cluster.operation(f"intra.{collective}", lies).among(at.size)
    between = cluster.operation(f"inter.{collective}", lies)
    if collective == "all_to_all":
        return between.among(at.nodes, peers)
    # A ring of all N ranks takes (N-1)/N of a buffer over each node's link; two levels take (n-1)/n for n nodes, and
    # more inside the nodes. The faster way for long messages is taken, as backends and our reduction do.
    ring, levels = between.among(at.size, at.nodes), between.among(at.nodes)
    ways = [LinearCost(ring.alpha_ms, ring.beta_ms / at.per_node)]
    inside = [f"intra.{name}" for name in _INSIDE.get(collective, (collective,))]
    if at.per_node > 1 and cluster.operations.keys() >= {*inside}:
        parts = [cluster.operations[name].among(at.per_node) for name in inside]
        slopes_ms = levels.beta_ms / at.per_node, sum(each.beta_ms for each in parts)
        slope_ms = max(slopes_ms) if in_slices else sum(slopes_ms)
        ways.append(LinearCost(levels.alpha_ms + sum(each.alpha_ms for each in parts), slope_ms))
    return min(ways, key=lambda each: each.beta_ms)


def names() -> tuple[str, ...]:
    """Return the names of the clusters in the package."""
    return tuple(sorted(each.stem for each in _FOLDER.glob("*.json") if each.stem != _SCHEMA))


def load_cluster(name_or_path: str) -> Cluster:
    """Return a cluster by its name, or from your own JSON file.

    Raises:
        ValueError: the name or file does not exist, or a field is wrong; it names the field and the choices.
    """
    from ds_fsmoe.planning.cluster_schema import ClusterFile  # loads pydantic, as all that reads files
    from ds_fsmoe.shapes import wrong_in

    path, data = read_cluster_file(name_or_path)
    if wrong := wrong_in(data, ClusterFile):
        # A misspelt key explains why another one is missing.
        first = next((each for each in wrong if "did you mean" in each), wrong[0])
        raise ValueError(f"cluster file {path}: {first}")
    return cluster_from_json(data, path.stem)


def cluster_from_json(data: Mapping[str, Any], name: str) -> Cluster:
    """Return a cluster from the data of its file, after it was checked.

    Args:
        data: the checked content of the file.
        name: the name, if ``data`` has none.
    """
    from ds_fsmoe.planning.cluster_schema import ClusterFile, slope_of

    said = ClusterFile.model_validate(data).model_dump(exclude_unset=True, exclude={"its_schema", "measured"})
    operations = {
        each: Operation(LinearCost(cost.pop("alpha_ms"), cost.pop(slope_of(each))), **cost)
        for each, cost in said["operations"].items()
    }
    contention = said.get("contention", {})
    contention.pop("source", None)
    read = {"operations": MappingProxyType(operations), "contention": Contention(**contention)}
    return Cluster(**{"name": name} | said | read)


def read_cluster_file(name_or_path: str) -> tuple[Path, Any]:
    """Return the path and the unchecked content of a cluster's file.

    Raises:
        ValueError: the name or file does not exist, or the file is not JSON.
    """
    path = _FOLDER / f"{name_or_path}.json"
    if name_or_path not in names():
        path = Path(name_or_path)
        if not path.is_file():
            listed = f"the choices are {', '.join(names())}, or the path of a JSON file like theirs"
            raise ValueError(f"no cluster or file {name_or_path!r}: {suggested(name_or_path, names(), listed)}")
    try:
        return path, read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"cluster file {path}: cannot be read as JSON: {error}") from error


def cluster_as_json(cluster: Cluster) -> dict[str, Any]:
    """Return the cluster as JSON data, from which :func:`load_cluster` reads an equal one."""
    from ds_fsmoe.planning.cluster_schema import GROWTH, slope_of

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
        "contention": {key: float(value) for key, value in asdict(cluster.contention).items()},
        "host_ms": float(cluster.host_ms),
        **({"layer_wait_ms": float(cluster.layer_wait_ms)} if cluster.layer_wait_ms else {}),
        "operations": operations,
    }
