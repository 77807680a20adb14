# SPDX-License-Identifier: Apache-2.0
"""Ranks that share one device: every collective that we or DeepSpeed call, and training, ours against stock.

NCCL takes several ranks on one GPU from 2.30 on. Over gloo the host waits for each collective.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from ds_fsmoe.observing.clock import HOST
from tests.python_path import python_path
from tests.scripts import ROOT, free_port
from tests.waiting import until

SEVERAL_RANKS = (2, 30)
"""The first version of NCCL that takes several ranks on one GPU."""
VARIABLES = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_DEBUG": "WARN"}
COLLECTIVE_S, RESERVE_S, GRACE_S = 40, 12.0, 4.0
STATUSES = ("ok", "skipped", "error", "wrong")
"""What comes of a case, the worst last."""
VERSION = "from ds_fsmoe.distributed.nccl import version; print(*version())"


def cases(world: int, small: bool) -> Iterator[tuple[str, int, str, dict[str, Any], dict[str, Any]]]:
    """(model, ZeRO, type, block, what else of the small model); the default first."""
    nodes: dict[str, Any] = {"topology": {"ranks_per_node": max(1, world // 2)}}
    chunks = nodes | {"num_chunks": 2, "schedule": "fsmoe"}
    yield "small", 1, "fp32", {}, {}
    yield "qwen3_moe", 2, "fp32", nodes | {"ep_size": world}, {}
    if small:
        return
    yield "small", 1, "bf16", {}, {}
    yield "small", 1, "fp32", chunks | {"num_chunks": {"forward": 2, "backward": 3}}, {}
    for preset in ("tutel", "tutel_improved", "pipemoe_lina", "lina", "fsmoe_no_iio", "best"):
        numbers = {} if preset in ("lina", "best") else {"num_chunks": 2}
        yield "small", 1, "fp32", nodes | {"schedule": preset} | numbers, {}
    for alltoall in ("2dh", "node_deduplicated", "1dh"):
        yield "small", 1, "fp32", chunks | {"alltoall": alltoall}, {}
    yield "small", 0, "fp32", nodes, {}
    yield "small", 2, "fp32", nodes, {"accumulation": 2}
    yield "small", 1, "fp32", nodes, {"drop_tokens": True}
    yield "small", 1, "bf16", nodes | {"comm_dtype": "fp8"}, {}
    yield "qwen3_moe", 3, "fp32", nodes | {"ep_size": world}, {}
    yield "qwen3_moe", 1, "bf16", chunks | {"ep_size": world}, {}
    yield "mixtral", 2, "bf16", nodes | {"ep_size": world, "two_batch_overlap": "on"}, {}


def collectives(device: Any, is_nccl: bool) -> dict[str, str]:
    """Return what is wrong with each collective; nothing where all are right."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(4.0 * size) + 100 * torch.arange(size).unsqueeze(1)
    mine, own = whole[rank].to(device), slice(4 * rank, 4 * rank + 4)
    exchanged, sizes = whole[:, own].flatten(), [rank + 1 + each for each in range(size)]
    uneven = torch.full((sum(sizes),), float(rank), device=device)

    def on_two_streams(y: Any) -> None:
        """As lanes do it: two groups, two streams, one thread."""
        streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2)]
        parts = []
        for turn, group in enumerate([dist.new_group(), dist.new_group()] * 3):
            if streams[turn % 2] is not None:
                streams[turn % 2].wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(streams[turn % 2]):
                parts.append(torch.empty_like(mine))
                dist.all_to_all_single(parts[-1], mine, group=group)
        for each in filter(None, streams):
            torch.cuda.current_stream().wait_stream(each)
        y.copy_(parts[-1] if all(torch.equal(each, parts[0]) for each in parts) else parts[0].fill_(-1))

    def sent(y: Any) -> None:
        y.copy_(whole[0])
        if rank < 2:
            dist.send(mine, 1) if rank == 0 else dist.recv(y.zero_(), 0)

    tried: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "all_to_all": (lambda y: dist.all_to_all_single(y, mine), exchanged),
        "all_to_all of bf16": (lambda y: dist.all_to_all_single(y, mine.bfloat16()), exchanged.bfloat16()),
        "uneven all_to_all": (
            lambda y: dist.all_to_all_single(y, uneven, sizes, sizes),
            torch.arange(size).repeat_interleave(torch.tensor(sizes)).float(),
        ),
        "all_gather": (lambda y: dist.all_gather_into_tensor(y, mine), whole.flatten()),
        "reduce_scatter": (lambda y: dist.reduce_scatter_tensor(y, mine), whole.sum(0)[own]),
        "all_reduce": (lambda y: dist.all_reduce(y.copy_(mine)), whole.sum(0)),
        "maximum": (lambda y: dist.all_reduce(y.copy_(mine), dist.ReduceOp.MAX), whole[-1]),
        "broadcast": (lambda y: dist.broadcast(y.copy_(mine), 0), whole[0]),
        "two groups on two streams": (on_two_streams, exchanged),
    }
    if is_nccl:  # gloo would read the device's memory as the host's
        tried["send and recv"] = sent, whole[0]
    wrong = {}
    for name, (work, wanted) in tried.items():
        y = torch.empty_like(wanted, device=device)
        try:
            work(y)
            wrong |= {} if torch.equal(y.cpu(), wanted) else {name: f"{y.tolist()[:8]} for {wanted.tolist()[:8]}"}
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"[:300]
    return wrong


def be_rank(folder: str, backend: str, small: bool, limit_s: float) -> None:
    """Be one of the ranks, and write down what came of each case."""
    import deepspeed
    import torch
    import torch.distributed as dist

    import ds_fsmoe  # noqa: F401  # ahead of the group: it asks NCCL for the order of launches
    from tests.gpu_training import compare, train_hf, train_small
    from tests.small_model import Case

    until_s, rank, world = HOST.monotonic() + limit_s, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", 0) if os.environ["DS_ACCELERATOR"] == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(0)
        torch.cuda.set_per_process_memory_fraction(0.9 / world)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group(backend, timeout=timedelta(seconds=COLLECTIVE_S))
    deepspeed.init_distributed(dist_backend=backend)

    def tell(name: str, status: str, said: str = "") -> None:
        with Path(folder, f"rank{rank}.jsonl").open("a") as opened:
            opened.write(json.dumps((name, status, said[-4000:])) + "\n")

    wrong = collectives(device, backend == "nccl")
    tell("collectives", "wrong" if wrong else "ok", str(wrong))
    steps = 2 if small else 3
    for model, stage, dtype, block, more in cases(world, small):
        name = f"{model}, ZeRO {stage}, {dtype}, {block}, {more}"
        going_on = torch.tensor([float(HOST.monotonic() < until_s)], device=device)
        dist.all_reduce(going_on, dist.ReduceOp.MIN)
        if not going_on.item():
            tell(name, "skipped", "no time left")
            continue
        try:
            if model == "small":
                case = Case(world, stage, dtype, **{"k": 2, "drop_tokens": False} | more)
                found = [train_small(case, each, steps, rank) for each in (block, None)]
            else:
                one_by_one = {"ep_size": 1, "overlap": False, "ops": "reference"}
                found = [train_hf(model, stage, dtype, each, steps, rank) for each in (block, one_by_one)]
            tell(name, "ok", str(compare(*found, dtype, rank)))
        except AssertionError as error:
            tell(name, "wrong", str(error))
        except Exception:  # the others may wait for this rank, and are told by its end
            tell(name, "error", traceback.format_exc())
            os._exit(1)
    os._exit(0)


def nccl_version(**variables: str) -> tuple[int, ...]:
    """Return the version of NCCL that a process with these variables loads."""
    options = {"capture_output": True, "text": True, "timeout": 90, "check": True, "cwd": ROOT}
    done = subprocess.run([sys.executable, "-c", VERSION], env=os.environ | variables, **options)
    return tuple(map(int, done.stdout.split()[-3:]))


def run_ranks(folder: Path, world: int, backend: str, small: bool, limit_s: float, **variables: str) -> dict[str, Any]:
    """Start ranks in an empty folder with variables in their environment, and return for each case what came of it and
    what was said; ``small``: few cases."""
    folder.mkdir(parents=True)
    code = "from tests.gpu_ranks import be_rank; "
    code += f"be_rank({str(folder)!r}, {backend!r}, {small}, {max(1.0, limit_s - RESERVE_S)})"
    environment = os.environ | {"PYTHONPATH": python_path(), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"} | variables
    environment |= {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank in range(world):
        with (folder / f"rank{rank}.txt").open("wb") as log:
            options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT, "cwd": ROOT}
            command = [sys.executable, "-c", code]
            ranks.append(subprocess.Popen(command, env=environment | {"RANK": str(rank)}, **options))
    with contextlib.suppress(TimeoutError):
        until(lambda: _are_over(ranks) or any(each.poll() for each in ranks), limit_s)
        until(lambda: _are_over(ranks), GRACE_S)  # the others may be about to say why
    codes = [each.poll() for each in ranks]
    for each in ranks:
        each.kill()
        each.wait()
    found: dict[str, Any] = {}
    for rank in range(world):
        file = folder / f"rank{rank}.jsonl"
        for line in file.read_text().splitlines() if file.exists() else ():
            name, status, said = json.loads(line)
            if STATUSES.index(status) >= STATUSES.index(found.get(name, STATUSES)[0]):
                found[name] = status, said
    if any(codes) or None in codes:
        logs = [(folder / f"rank{rank}.txt").read_text(errors="replace")[-1500:] for rank in range(world)]
        found["end"] = "error", "\n".join([*logs, f"exit statuses {codes}; None: it had not ended"])
    return found


def _are_over(ranks: list[subprocess.Popen]) -> bool:
    return all(each.poll() is not None for each in ranks)
