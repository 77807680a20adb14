# SPDX-License-Identifier: Apache-2.0
"""The work that is timed to measure a cluster: one plain piece for each operation that the planner uses.

Letters: S tokens, M width, E experts, L positions of a sample, n blocks of elements for one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional as F

from ds_fsmoe.distributed.topology import Ranks, Topology
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.lanes import Lanes, SerialLanes
from ds_fsmoe.measuring.stopwatch import Prepare
from ds_fsmoe.planning.cluster_schema import UNITS

COMPUTING = tuple(name for name in UNITS if "." not in name)
LINKS = ("inter", "intra")
CONTENTION = ("links", "compute", "traffic")
"""The slowdowns of lanes by each other, with the names of ``planning.timeline.Contention``."""
MAX_BYTES = 1 << 26
"""The size of the largest buffer."""
FEWEST = 16
"""The least ratio of the largest size to the smallest step, so that there are five different sizes."""
_FIRST_BYTES = 1 << 16
_HEAD = 64
"""The width of an attention head."""
_CPU_BYTES = 1 << 24
"""The size of the largest input on a CPU: making it takes longer than what is timed."""
_DRAWN = 512
"""The number of random rows, which are repeated."""
_COPIES = 2
"""The number of experts per token."""


@dataclass(frozen=True)
class Trial:
    """An operation, ready to be timed at any size."""

    operation: str
    """The name in ``planning.cluster.UNITS``, which gives the unit."""
    prepare: Prepare
    size_of_one: float
    """The number of units in a size of 1."""
    first: int
    """A first size that takes hardly any time."""
    most: int
    """The largest size to try."""
    ranks: int | None = None
    group: dist.ProcessGroup | None = None
    """The group of this rank for a collective. A left-over rank has one of its own."""

    @property
    def is_collective(self) -> bool:
        """Whether the ranks do it together."""
        return self.ranks is not None


# ---- which ranks


@dataclass(frozen=True)
class Shape:
    """The shape of the measured cluster: its nodes, and the ranks of each."""

    num_nodes: int
    per_node: int
    """The number of ranks of the smallest node."""

    @classmethod
    def of(cls, topology: Topology) -> Shape:
        """Return the shape that all nodes have in common."""
        nodes = _nodes(topology)
        return cls(len(nodes), min(map(len, nodes)))

    def ranks_of(self, link: str) -> int:
        """Return the size of the groups of a link; 1 if there is no other rank."""
        return self.num_nodes if link == "inter" else self.per_node


def groups_of(topology: Topology, link: str) -> tuple[Ranks, ...]:
    """All groups that use a link at the same time, as they do in training: of ``inter`` each has one rank per node, of
    ``intra`` the ranks of a node. Where nodes are not equally large, ranks are left over, each a group by itself."""
    nodes, per_node = _nodes(topology), Shape.of(topology).per_node
    measured = [ranks[:per_node] for ranks in nodes]
    groups = list(zip(*measured, strict=True)) if link == "inter" else measured
    return tuple(groups) + tuple((rank,) for ranks in nodes for rank in ranks[per_node:])


def _nodes(topology: Topology) -> list[Ranks]:
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(topology.node_of_rank):
        nodes.setdefault(node, []).append(rank)
    return [tuple(ranks) for ranks in nodes.values()]


# ---- collectives


def collectives(
    link: str, ranks: int, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, max_bytes: int
) -> list[Trial]:
    """Return the four collectives of one link. A size of 1 is one element for each rank in the largest buffer.

    Args:
        link: ``inter`` or ``intra``.
        ranks: the number of ranks of a group.
        group: this rank's; of one rank, if it is left over.
        device, dtype: the device and type of the buffers.
        max_bytes: the size of the largest buffer.
    """
    unit_bytes = ranks * dtype.itemsize
    takes_part = group.size() == ranks
    collectives = Collectives(_exchange, group, group)
    bodies: Mapping[str, tuple[Callable[[torch.Tensor], object], int]] = {
        "all_to_all": (collectives.to_experts, ranks),
        "all_reduce": (lambda x: dist.all_reduce(x, group=group), ranks),
        "all_gather": (collectives.gather, 1),
        "reduce_scatter": (collectives.reduce, ranks),
    }

    def preparing(body: Callable[[torch.Tensor], object], blocks: int) -> Prepare:
        def prepare(size: int) -> Callable[[], object]:
            if not takes_part:
                return lambda: None
            x_n = torch.zeros(blocks, size, device=device, dtype=dtype)
            return lambda: body(x_n)

        return prepare

    most = max(FEWEST, max_bytes // unit_bytes)
    first = min(most, max(FEWEST, _FIRST_BYTES // unit_bytes))
    return [
        Trial(f"{link}.{name}", preparing(*body), float(unit_bytes), first, most, ranks, group)
        for name, body in bodies.items()
    ]


def _exchange(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    y = torch.empty_like(x)
    dist.all_to_all_single(y, x, group=group)
    return y


# ---- computation


def computations(device: torch.device, dtype: torch.dtype, max_bytes: int) -> list[Trial]:
    """Return the operations that one rank does alone; ``planning.workload`` says what a size means.

    Args:
        device, dtype: of the tensors.
        max_bytes: of the largest input.
    """
    # Large enough to be what a model of today does, small enough for a fraction of a second.
    width, length, num_experts = (2048, 512, 64) if device.type == "cuda" else (256, 32, 16)
    max_bytes = min(max_bytes, MAX_BYTES if device.type == "cuda" else _CPU_BYTES)
    at = {"device": device, "dtype": dtype}
    row_bytes = width * dtype.itemsize

    def rows(size: int, columns: int = width) -> torch.Tensor:
        # Drawing all of them takes long.
        drawn = torch.randn(min(size, _DRAWN), columns, **at)
        return drawn.repeat(-(-size // _DRAWN), 1)[:size]

    def weights(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, **at) / math.sqrt(shape[0])

    def gemm(size: int) -> Callable[[], object]:
        x_SM, w_MM = rows(size), weights(width, width)
        return lambda: x_SM @ w_MM

    def attention(size: int) -> Callable[[], object]:
        return partial(_attention, rows(size * length), [weights(width, width) for _ in range(4)], length)

    def softmax(size: int) -> Callable[[], object]:
        scores = rows(size * length, length)
        return lambda: scores.softmax(-1)

    def routing(size: int) -> Callable[[], object]:
        return partial(_routing, rows(size), weights(width, num_experts))

    def order(size: int) -> Callable[[], object]:
        x_SM = rows(size)
        row_N = torch.randperm(_COPIES * size, device=device) % size
        return lambda: x_SM.index_select(0, row_N)

    attention_flops = 2.0 * (length * 4 * width**2 + 2 * length**2 * width)
    table: Sequence[tuple[str, Prepare, float, int, int]] = (
        ("gemm", gemm, 2.0 * width**2, row_bytes, 256),
        ("attention", attention, attention_flops, length * row_bytes, FEWEST),
        ("softmax", softmax, float(length**2), length**2 * dtype.itemsize, FEWEST),
        ("routing", routing, 2.0 * width * num_experts, row_bytes, 256),
        ("order", order, float((_COPIES + 1) * row_bytes), row_bytes, 256),
    )
    return [
        Trial(name, prepare, size_of_one, first, max(first, max_bytes // unit_bytes))
        for name, prepare, size_of_one, unit_bytes, first in table
    ]


def _attention(x_SM: torch.Tensor, projections: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    """Run attention without the softmax, which has a cost of its own."""
    width = x_SM.shape[-1]

    def heads(x_SM: torch.Tensor) -> torch.Tensor:
        return x_SM.view(-1, length, width // _HEAD, _HEAD).transpose(1, 2)

    q, k, v = (heads(x_SM @ each) for each in projections[:3])
    return ((q @ k.transpose(2, 3)) @ v).transpose(1, 2).reshape(-1, width) @ projections[3]


def _routing(x_SM: torch.Tensor, w_ME: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight_SK, expert_SK = (x_SM @ w_ME).float().softmax(-1).topk(_COPIES)
    chosen_NE = F.one_hot(expert_SK.T.reshape(-1), w_ME.shape[1])
    return weight_SK, (chosen_NE.cumsum(0) * chosen_NE).sum(-1)


# ---- names


class ProfileNames:
    """Under which measurements of a cluster are kept: they say all that these depend on, but for the cluster.

    Args:
        topology, lanes, dtype, max_bytes: see :func:`ds_fsmoe.measuring.cluster_profile.profile_cluster`.
    """

    def __init__(self, topology: Topology, lanes: Lanes, dtype: torch.dtype, max_bytes: int = MAX_BYTES) -> None:
        self.shape = Shape.of(topology)
        self.links = [link for link in LINKS if self.shape.ranks_of(link) > 1]
        self.overlap = bool(self.links) and not isinstance(lanes, SerialLanes)
        """Return whether there are lanes that could slow each other down."""
        self._lanes = type(lanes).__name__
        self._how = f"{str(dtype).removeprefix('torch.')}, at most {max_bytes} bytes"

    @property
    def operations(self) -> list[str]:
        """The operations that can be timed here, in the order of ``UNITS``."""
        return [each for each in UNITS if "." not in each or each.split(".")[0] in self.links]

    def all(self) -> list[str]:
        """Return the names of everything that is measured."""
        found = [self.of(each) for each in self.operations]
        found += [self.largest(each) for each in (*self.links, *COMPUTING)]
        return [*found, self.host, *(self.contention(each) for each in CONTENTION if self.overlap)]

    def of(self, operation: str) -> str:
        """Return the name of a timing."""
        return f"{operation}{self._among(operation)}, {self._how}"

    def largest(self, operation_or_link: str) -> str:
        """Return the name of the largest timed size, which is itself found by measuring."""
        return f"largest size of {operation_or_link}{self._among(operation_or_link)}, {self._how}"

    def contention(self, kind: str) -> str:
        """Return the name of the slowdown of lanes."""
        shape = f"{self.shape.num_nodes} nodes x {self.shape.per_node} ranks"
        return f"contention of {kind}, {shape}, {self._lanes}, {self._how}"

    @property
    def host(self) -> str:
        """The name of the host cost of a task."""
        return f"host ms per task, {self._lanes}"

    def _among(self, operation: str) -> str:
        link = operation.split(".")[0]
        return f" among {self.shape.ranks_of(link)} ranks" if link in LINKS else ""
