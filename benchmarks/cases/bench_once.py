# SPDX-License-Identifier: Apache-2.0
"""A layer whose tokens cross to each node once for each choice (flat) or once (node_deduplicated): times and bytes.

``cluster.py up --nodes 2 --ranks-per-node 2 --inter 25mbit --intra 100mbit``, then
``cluster.py run -- benchmarks/cases/bench_once.py``. Experts are spread over all ranks, nothing is dropped; whole steps
of an engine, forward, backward and optimizer. Times go to ``benchmarks/results/once.csv``; what the collectives'
arguments send to other nodes, and what the node's interface has sent meanwhile, to ``once_counted.csv`` beside it. A
step has gradients and DeepSpeed's own messages in it, too: what the interface sends in a forward and backward without
them stands in ``once_interfaces.csv``, beside what it sends for as many bytes in a plain transfer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.harness import RESULTS, Case, Effort, Grid, Variant, run_grid
from benchmarks.harness.join import join
from benchmarks.harness.outcome import PACKAGES
from benchmarks.harness.result_files import append_rows, made_with
from benchmarks.harness.routing import parsed
from benchmarks.models.moe_steps import MoEModel, MoESteps


@dataclass(frozen=True)
class Sizes:
    """S tokens per rank of width M; E experts of hidden width H, each token to k of them."""

    S: int
    M: int
    H: int
    E: int
    k: int


GRID = Grid(
    "once",
    (
        Case("k 8 of 64, width 512", Sizes(128, 512, 128, 64, 8)),
        Case("k 8 of 64, width 1024", Sizes(64, 1024, 256, 64, 8)),
        Case("k 4 of 16, width 512", Sizes(128, 512, 256, 16, 4)),
        Case("k 2 of 8, width 512", Sizes(256, 512, 512, 8, 2)),
        Case("k 1 of 8, width 512", Sizes(256, 512, 512, 8, 1)),
    ),
)


def _way(alltoall: str, degree: int, schedule: str = "fsmoe") -> dict[str, Any]:
    return {"alltoall": alltoall, "pipeline_degree": {"forward": degree, "backward": degree}, "schedule": schedule}


WAYS = {
    "flat, uncut": _way("flat", 1),
    "flat, 2 chunks": _way("flat", 2),
    "once, uncut": _way("node_deduplicated", 1),
    "once, 2 chunks": _way("node_deduplicated", 2),
    "once, 4 chunks, reduces first": _way("node_deduplicated", 4, "best"),
}


def training_step(block: dict[str, Any], sizes: Sizes) -> MoESteps:
    """An engine that runs its layer this way."""
    torch.manual_seed(0)
    model = MoEModel(1, sizes.M, sizes.H, sizes.E, k=sizes.k, drop_tokens=False)
    of_engine = {"metrics": "off", "autotune": {"enabled": False}, "topology": {"ranks_per_node": 2}}
    return MoESteps(model, sizes.S, sizes.M, of_engine | block, gradient_clipping=0.0)


@contextmanager
def counting(ranks_per_node: int) -> Iterator[dict[str, int]]:
    """Count the bytes that this rank's all-to-alls send to other nodes: rows, and all else."""
    sent = {"rows": 0, "else": 0}
    send: Callable[..., Any] = dist.all_to_all_single
    node = dist.get_rank() // ranks_per_node

    def counted(
        y: torch.Tensor, x: torch.Tensor, receives: Any = None, sends: Any = None, group: Any = None, **options: Any
    ) -> Any:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        sends_now = sends or [len(x) // len(ranks)] * len(ranks)
        rows = sum(size for size, rank in zip(sends_now, ranks, strict=True) if rank // ranks_per_node != node)
        sent["rows" if x.is_floating_point() and x.dim() > 1 else "else"] += rows * x[:1].numel() * x.itemsize
        return send(y, x, receives, sends, group=group, **options)

    dist.all_to_all_single = counted
    try:
        yield sent
    finally:
        dist.all_to_all_single = send


def interface_bytes() -> int:
    """What this node's interface has sent; 0 where there is none."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    return 0


def count(case: Case, name: str, results: Path) -> None:
    """Write the bytes of one step."""
    step = training_step(WAYS[name], case.settings)
    step()
    dist.barrier()
    before = interface_bytes()
    with counting(2) as sent:
        step()
    dist.barrier()
    found = torch.tensor([sent["rows"], sent["else"], (interface_bytes() - before) / 2], dtype=torch.float64)
    dist.all_reduce(found)
    step.close()
    if dist.get_rank() == 0:
        row = made_with(PACKAGES) | {"ranks": dist.get_world_size(), "grid": GRID.digest, "case": case.name}
        row |= {"settings": json.dumps(case.plain(), sort_keys=True), "variant": name}
        row |= dict(zip(("row_bytes", "other_bytes", "interface_bytes"), map(int, found.tolist()), strict=True))
        append_rows(results / "once_counted.csv", tuple(row), [row])
        print(f"{case.name}, {name}: rows {found[0]:.0f}, other {found[1]:.0f}, interface {found[2]:.0f} bytes")


def compare_interfaces(case: Case, name: str, results: Path) -> None:
    """Write what the interfaces send for the all-to-alls of a forward and backward, and for a transfer of as much."""
    step = training_step(WAYS[name], case.settings)
    step()
    engine = step.engine

    def run() -> None:
        # Gradients stay where they are, so that all-to-alls are all that travels.
        with engine.no_sync():
            engine.backward(engine(step.x_SM))

    with counting(2) as sent:
        of_layer = _sent_by_interfaces(run)
    payload = torch.tensor(float(sum(sent.values())), dtype=torch.float64)
    dist.all_reduce(payload)
    step.close()
    of_transfer, transferred = _transfer(int(payload) // dist.get_world_size())
    if dist.get_rank() == 0:
        row = made_with(PACKAGES) | {"ranks": dist.get_world_size(), "grid": GRID.digest, "case": case.name}
        row |= {"variant": name, "payload_bytes": int(payload), "interface_bytes": int(of_layer)}
        off = of_layer / float(payload) / (of_transfer / transferred)
        row |= {"transfer": f"{of_transfer / transferred:.4f}", "over_transfer": f"{off:.4f}"}
        append_rows(results / "once_interfaces.csv", tuple(row), [row])
        print(f"{case.name}, {name}: interfaces send {off:.4f} times what they send in a plain transfer", flush=True)


def _sent_by_interfaces(run: Callable[[], object]) -> float:
    """What all nodes' interfaces send while all ranks run this."""
    dist.barrier()
    before = interface_bytes()
    run()
    dist.barrier()
    # Each node is counted once, by the first of its two ranks.
    sent = torch.tensor(float(interface_bytes() - before) * (dist.get_rank() % 2 == 0), dtype=torch.float64)
    dist.all_reduce(sent)
    return sent.item()


def _transfer(bytes_of_rank: int, times: int = 8) -> tuple[float, float]:
    """Send so many bytes from each rank to other nodes, in messages as long as those of rows; what was sent, and it."""
    ranks = dist.get_world_size()
    others = ranks - 2
    each = max(1, bytes_of_rank // (4 * others * times))
    x = torch.zeros(ranks * each)
    y = torch.empty_like(x)

    def run() -> None:
        for _ in range(times):
            dist.all_to_all_single(y, x)

    return _sent_by_interfaces(run), 4.0 * each * others * times * ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10, help="of 1 step of each variant")
    parser.add_argument("--only-bytes", action="store_true", help="count, and time nothing")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    join()
    for case in GRID.cases:
        for name in ("flat, uncut", "once, uncut"):
            count(case, name, args.results)
            compare_interfaces(case, name, args.results)
    if not args.only_bytes:
        variants = tuple(Variant(name, partial(training_step, block)) for name, block in WAYS.items())
        run_grid(GRID, variants, baseline="flat, uncut", effort=Effort(args.blocks, 1), results=args.results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
