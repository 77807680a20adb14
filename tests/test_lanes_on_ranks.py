# SPDX-License-Identifier: Apache-2.0
"""Lanes: collectives on both links and compute beside them, on two ranks."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist

from ds_fsmoe.execution.lanes import Body, Lanes, SerialLanes
from ds_fsmoe.execution.thread_lanes import ThreadLanes
from ds_fsmoe.planning.schedule import Draft, Schedule, Task
from tests.lane_cases import COMPUTE, INTER, INTRA, Log, lanes, schedule_of
from tests.ranks import run_on_ranks
from tests.waiting import until

FIXTURES = (lanes,)  # which pytest finds by their names here
NUM_CHUNKS, ROWS, WIDTH = 5, 7, 13


def layer_schedule() -> Schedule:
    draft = Draft()
    rows = range(NUM_CHUNKS)
    a2a_in = [draft.add("A2A_IN", INTER, chunk=chunk) for chunk in rows]
    gather = [draft.add("GATHER", INTRA, chunk=chunk, after=[a2a_in[chunk]]) for chunk in rows]
    expert = [draft.add("EXPERT", COMPUTE, chunk=chunk, after=[gather[chunk]]) for chunk in rows]
    reduce = [draft.add("REDUCE", INTRA, chunk=chunk, after=[expert[chunk]]) for chunk in rows]
    for chunk in rows:
        draft.add("A2A_OUT", INTER, chunk=chunk, after=[reduce[chunk]])
    return draft.finish()


def layer_on_a_rank(rank: int, world_size: int, folder: Path) -> tuple[bool, bool, list[int]]:
    """Chunks through all five kinds, serial and on threads, with a process group per link; and a late rank.

    Returns:
        whether the two agree; whether all of it was computed; the tasks of the run with the late rank, as they ended.
    """
    groups = {INTRA: dist.new_group(), INTER: dist.new_group()}
    x_cNM = torch.randn(NUM_CHUNKS, world_size * ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))
    weight_MM = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(99))
    schedule = layer_schedule()

    def through(lanes: Lanes) -> torch.Tensor:
        arrived_cNM = torch.empty_like(x_cNM)
        gathered_cPNM = x_cNM.new_empty(NUM_CHUNKS, world_size * world_size * ROWS, WIDTH)
        computed_cPNM, shared_cPNM = torch.empty_like(gathered_cPNM), torch.empty_like(gathered_cPNM)
        reduced_cNM, out_cNM = torch.empty_like(x_cNM), torch.full_like(x_cNM, torch.nan)

        def reduce(task: Task) -> None:
            shared = shared_cPNM[task.chunk]
            dist.all_to_all_single(shared, computed_cPNM[task.chunk], group=groups[INTRA])
            torch.sum(shared.view(world_size, -1, WIDTH), 0, out=reduced_cNM[task.chunk])

        bodies: dict[str, Body] = {
            "A2A_IN": lambda t: dist.all_to_all_single(arrived_cNM[t.chunk], x_cNM[t.chunk], group=groups[INTER]),
            "GATHER": lambda t: dist.all_gather_into_tensor(
                gathered_cPNM[t.chunk], arrived_cNM[t.chunk], group=groups[INTRA]
            ),
            "EXPERT": lambda t: torch.mm(gathered_cPNM[t.chunk], weight_MM, out=computed_cPNM[t.chunk]),
            "REDUCE": reduce,
            "A2A_OUT": lambda t: dist.all_to_all_single(out_cNM[t.chunk], reduced_cNM[t.chunk], group=groups[INTER]),
        }
        lanes.run(schedule, bodies)
        return out_cNM

    expected = through(SerialLanes())
    # An all-gather of what the other rank has too, and a sum over ranks: every row comes back world_size times.
    is_right = torch.allclose(expected, world_size * (x_cNM @ weight_MM), rtol=1e-5, atol=1e-4)
    with closing(ThreadLanes()) as lanes:
        is_equal = all(torch.equal(through(lanes), expected) for _ in range(20))
        late, log = schedule_of(("A2A_IN", INTER, ()), ("EXPERT", COMPUTE, ())), Log()

        def exchange(task: Task) -> None:
            if rank == 1:  # comes when both ranks have computed
                until(lambda: all((folder / f"computed{each}").exists() for each in range(world_size)))
            dist.all_to_all_single(torch.empty_like(x_cNM[0]), x_cNM[0], group=groups[INTER])

        def compute(task: Task) -> None:
            (folder / f"computed{rank}").touch()

        lanes.run(late, {"A2A_IN": exchange, "EXPERT": compute}, observer=log)
    return is_equal, is_right, [index for what, index in log.events if what == "end"]


def test_two_ranks_run_collectives_on_both_links_and_compute_beside_them(tmp_path: Path) -> None:
    for is_equal, is_right, ended in run_on_ranks(layer_on_a_rank, 2, tmp_path / "ranks", tmp_path):
        assert is_equal
        assert is_right
        # The all-to-all came first on the list; it waits for the late rank, which waits for what is computed meanwhile.
        assert ended == [1, 0]
