# SPDX-License-Identifier: Apache-2.0
"""Whether the bed can show overlap: traffic on both links and a matrix product, one after another and side by side.

``cluster.py up``, then ``cluster.py run -- benchmarks/cases/bench_bed.py``. What is gained here is the most that any
schedule of these three could gain on this bed. Rows go to ``benchmarks/results/bed.csv``.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.harness import Case, Effort, Grid, Variant, join_on_gloo, run_grid


@dataclass(frozen=True)
class Load:
    """What each rank sends in an all-to-all between nodes and in an all-gather within its own, and how many matrix
    products of that width it computes."""

    inter_kib: int
    intra_kib: int
    products: int
    width: int = 192


GRID = Grid(
    "bed",
    (
        Case("links alone", Load(256, 1024, 0)),
        Case("links and compute", Load(256, 1024, 60)),
        Case("between nodes and compute", Load(512, 0, 120)),
    ),
)


class Works:
    """The three things one rank does. Every rank of the world makes the groups, in the same order."""

    def __init__(self, load: Load, inter: dist.ProcessGroup | None, intra: dist.ProcessGroup | None) -> None:
        self.works: list[Callable[[], object]] = []
        if inter is not None and load.inter_kib:
            sent = torch.zeros(load.inter_kib * 256 // inter.size() * inter.size())
            came = torch.empty_like(sent)
            self.works.append(lambda: dist.all_to_all_single(came, sent, group=inter))
        if intra is not None and load.intra_kib:
            part = torch.zeros(load.intra_kib * 256)
            whole = torch.empty(load.intra_kib * 256 * intra.size())
            self.works.append(lambda: dist.all_gather_into_tensor(whole, part, group=intra))
        matrix = torch.randn(load.width, load.width)
        self.works.append(lambda: [torch.mm(matrix, matrix) for _ in range(load.products)])

    def one_after_another(self) -> None:
        for work in self.works:
            work()


class SideBySide(Works):
    """Each in a thread of its own, as lanes are."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.threads = ThreadPoolExecutor(len(self.works))

    def __call__(self) -> None:
        for running in [self.threads.submit(work) for work in self.works]:
            running.result()

    def close(self) -> None:
        self.threads.shutdown()


def node_groups() -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """This rank's group between nodes (the ranks with its place in their nodes) and within its node."""
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    nodes = [[rank for rank, name in enumerate(names) if name == each] for each in dict.fromkeys(names)]
    found: list[dist.ProcessGroup | None] = []
    for groups in (list(zip(*nodes, strict=True)), nodes):
        made = [dist.new_group(list(ranks)) for ranks in groups]
        mine = next(i for i, ranks in enumerate(groups) if dist.get_rank() in ranks)
        found.append(made[mine] if made[mine].size() > 1 else None)
    return found[0], found[1]


def main() -> None:
    args = join_on_gloo(__doc__, no_routers="it sends tensors of fixed sizes over both links, and has no layer")
    groups = node_groups()
    variants = (
        Variant("one after another", lambda load: Works(load, *groups).one_after_another),
        Variant("side by side", lambda load: SideBySide(load, *groups)),
    )
    run_grid(GRID, variants, "one after another", Effort(blocks=args.blocks, steps=2), results=args.results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
