# SPDX-License-Identifier: Apache-2.0
"""What every rank does in the bed's self-test: times transfers alone and together, and leaves the numbers in a file.

``bed_ranks.py RESULT INTER_MBIT INTRA_MBIT RANKS_PER_NODE``; see ``self_test.py``.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.bed.full_duplex import use_both_directions
from benchmarks.harness.cpu_time import cpu_time

REPEATS = 5
LINK_REPEATS = 15
GAP_S = 0.3
SIZES_MS = (5.0, 10.0, 20.0, 40.0)
"""Transfers are as large as a link of the configured rate carries in these times."""
OVERLAP_MS = 60.0
COMPUTE_MS = 30.0
"""Less than the transfers take, because the network needs the cores, too."""


def main() -> None:
    """Measure everything, in the same order on every rank."""
    result, inter_mbit, intra_mbit, per_node = Path(sys.argv[-4]), *map(float, sys.argv[-3:])
    # A transfer that takes this long has failed: the slowest takes under a second.
    use_both_directions()
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    bench = Bench(int(per_node), {"inter": inter_mbit, "intra": intra_mbit})
    found = {
        "links": {link: bench.link(link) for link in bench.groups},
        "collectives": {link: bench.collectives(link) for link in bench.groups},
        "overlap": bench.overlap(),
    }
    if dist.get_rank() == 0:
        result.write_text(json.dumps(found))
    dist.destroy_process_group()


class Bench:
    """The groups of this rank, and clocks that agree."""

    def __init__(self, per_node: int, mbit: dict[str, float]) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.rank, self.per_node, self.mbit = rank, per_node, mbit
        self.groups: dict[str, dist.ProcessGroup] = {}
        if world > per_node:
            for local in range(per_node):
                group = dist.new_group(list(range(local, world, per_node)))
                if rank % per_node == local:
                    self.groups["inter"] = group
        if per_node > 1:
            for first in range(0, world, per_node):
                group = dist.new_group(list(range(first, first + per_node)))
                if rank // per_node == first // per_node:
                    self.groups["intra"] = group

    def num_bytes(self, link: str, time_ms: float) -> int:
        """What an undisturbed link carries in this time, in whole KiB."""
        return max(1, round(self.mbit[link] * 1e6 / 8 * time_ms / 1e3 / 1024)) * 1024

    def time_ms(self, work: Callable[[], object], repeats: int = REPEATS, gap_s: float = 0.0) -> float:
        """Median over repeats of the slowest rank's time; all start together."""
        times_ms = torch.empty(repeats + 1, dtype=torch.float64)
        for repeat in range(repeats + 1):
            dist.barrier()
            if gap_s:
                time.sleep(gap_s)
            start = time.perf_counter()
            work()
            times_ms[repeat] = (time.perf_counter() - start) * 1e3
        dist.all_reduce(times_ms, op=dist.ReduceOp.MAX)
        return float(times_ms[1:].median())

    def link(self, name: str) -> dict[str, object]:
        """One message at a time from rank 0 to its neighbour on this link: back to back, and after a pause."""
        peer = self.per_node if name == "inter" else 1
        reply = torch.zeros(1)

        def send(size_bytes: int) -> Callable[[], None]:
            payload = torch.zeros(size_bytes, dtype=torch.uint8)

            def work() -> None:
                if self.rank == 0:
                    dist.send(payload, peer)
                    dist.recv(reply, peer)
                elif self.rank == peer:
                    dist.recv(payload, 0)
                    dist.send(reply, 0)

            return work

        sizes = [self.num_bytes(name, each) for each in SIZES_MS]
        before = cpu_time()
        times_ms = [self.time_ms(send(size), LINK_REPEATS) for size in sizes]
        share = (cpu_time() - before).busy_share
        again, gap = (self.time_ms(send(sizes[-1]), LINK_REPEATS, pause) for pause in (0.0, GAP_S))
        return {"sizes": sizes, "times_ms": times_ms, "back_to_back_ms": again, "after_gap_ms": gap, "cpu_share": share}

    def collectives(self, name: str) -> dict[str, dict[str, list[float]]]:
        """Every rank's group at once, as in training. Sizes are those of one rank's largest buffer."""
        group = self.groups[name]
        ranks = dist.get_world_size(group)
        found: dict[str, dict[str, list[float]]] = {}
        for operation in ("all_to_all", "all_gather", "reduce_scatter", "reduce_scatter_gloo", "all_reduce"):
            sizes, times_ms = [], []
            for target_ms in SIZES_MS:
                count = max(1, self.num_bytes(name, target_ms) // (4 * ranks * self.per_node)) * ranks
                sizes.append(4.0 * count)
                times_ms.append(self.time_ms(self._collective(operation, group, ranks, count)))
            found[operation] = {"sizes": sizes, "times_ms": times_ms}
        return found

    def _collective(self, operation: str, group: dist.ProcessGroup, ranks: int, count: int) -> Callable[[], object]:
        whole, part = torch.zeros(count), torch.zeros(count // ranks)
        arrived = torch.empty_like(whole)

        def exchange_and_sum() -> torch.Tensor:
            dist.all_to_all_single(arrived, whole, group=group)
            return arrived.view(ranks, -1).sum(0)

        return {
            "all_to_all": lambda: dist.all_to_all_single(arrived, whole, group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(arrived, part, group=group),
            "reduce_scatter": exchange_and_sum,
            "reduce_scatter_gloo": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
            "all_reduce": lambda: dist.all_reduce(whole, group=group),
        }[operation]

    def overlap(self) -> dict[str, dict[str, float]]:
        """Two things alone and together: transfers on both links, and a transfer beside a matrix product."""
        works = {}
        for name, group in self.groups.items():
            ranks = dist.get_world_size(group)
            count = max(1, self.num_bytes(name, OVERLAP_MS) // (4 * ranks * self.per_node)) * ranks
            works[name] = self._collective("all_to_all", group, ranks, count)
        works["compute"] = self._products(self.time_ms(self._products(1)))
        alone_ms = {name: self.time_ms(work) for name, work in works.items()}
        found = {}
        for pair in (("inter", "intra"), ("inter", "compute"), ("intra", "compute")):
            if all(name in works for name in pair):
                before = cpu_time()
                ends_ms = self._together([works[name] for name in pair])
                used = cpu_time() - before
                found[" + ".join(pair)] = {
                    "first_ms": alone_ms[pair[0]],
                    "second_ms": alone_ms[pair[1]],
                    "both_ms": max(ends_ms),
                    "first_beside_ms": ends_ms[0],
                    "second_beside_ms": ends_ms[1],
                    "cpu_share": used.busy_share,
                    "network_cpu_share": used.kernel_share,
                }
        return found

    def _products(self, one_ms: float) -> Callable[[], None]:
        """Matrix products for COMPUTE_MS, all ranks at once; as many on every rank."""
        a = torch.randn(192, 192)
        count = 1 if one_ms == 1 else max(1, round(COMPUTE_MS / max(one_ms, 1e-3)))

        def work() -> None:
            for _ in range(count):
                torch.mm(a, a)

        return work

    def _together(self, works: list[Callable[[], object]]) -> list[float]:
        """Medians of when each ended, the slowest rank's."""
        times_ms = torch.empty(REPEATS + 1, len(works), dtype=torch.float64)
        for repeat in range(REPEATS + 1):
            dist.barrier()
            start = time.perf_counter()

            def run(index: int, row: torch.Tensor = times_ms[repeat], since: float = start) -> None:
                works[index]()
                row[index] = (time.perf_counter() - since) * 1e3

            threads = [threading.Thread(target=run, args=(index,)) for index in range(1, len(works))]
            for thread in threads:
                thread.start()
            run(0)
            for thread in threads:
                thread.join()
        dist.all_reduce(times_ms, op=dist.ReduceOp.MAX)
        return times_ms[1:].median(dim=0).values.tolist()


if __name__ == "__main__":
    main()
