# SPDX-License-Identifier: Apache-2.0
"""A cluster is measured by all ranks together, once, on groups that are gone afterwards; slow links take no longer."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_fsmoe.distributed.fail_together import MeasuringError
from ds_fsmoe.distributed.topology import Topology, topology_of_hosts
from ds_fsmoe.execution.lanes import Lanes, SerialLanes, make_lanes
from ds_fsmoe.measuring import cluster_profile
from ds_fsmoe.measuring.cache import Measurements, Measuring
from ds_fsmoe.measuring.cluster_profile import LINK_AIM_MS, ProfileNames, lane_groups, profile_cluster
from ds_fsmoe.measuring.stopwatch import Stopwatch, slowdowns
from ds_fsmoe.observing.clock import HOST, Clock
from ds_fsmoe.planning.cluster import Cluster, cluster_as_json, load_cluster
from ds_fsmoe.planning.cluster_schema import UNITS
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.job.measured import Slowdowns, Timing
from ds_fsmoe.planning.schedule import Lane
from ds_fsmoe.planning.timeline import IDEAL, Contention
from ds_fsmoe.planning.workload import kind_costs
from tests.fake_clock import FakeClock
from tests.hurry import hurry
from tests.logged import Said as Lines
from tests.logged import heard
from tests.ranks import COLLECTIVE_TIMEOUT_S, run_on_ranks

CPU = torch.device("cpu")
MAX_BYTES = 40_009
INTER, INTRA, COMPUTE = Lane.INTER, Lane.INTRA, Lane.COMPUTE
SLOWED = {(INTER, INTRA): 1.75, (INTRA, INTER): 1.25, (COMPUTE, INTER): 1.0, (COMPUTE, INTRA): 1.25}
SLOWED |= {(INTER, COMPUTE): 1.125, (INTRA, COMPUTE): 1.375}
LINKED = tuple(name for name in UNITS if "." in name)


class Said(Lines):
    """What was logged, and what was said to be measured."""

    def __init__(self) -> None:
        super().__init__()
        self.measured: list[str] = []
        logging.getLogger("ds_fsmoe").addHandler(self)


def profiled(
    topology: Topology, lanes: Lanes, known: Measurements, said: Said, host: Clock = HOST, **options: Any
) -> tuple[Cluster, int]:
    """The cluster, and how many operations were timed."""
    watch = Stopwatch(CPU, host=host)
    measuring = Measuring(watch, known, said.measured.append)
    options = {"max_bytes": MAX_BYTES} | options
    return profile_cluster(measuring, topology, lanes, torch.float32, **options), watch.num_timed


def measure(rank: int, world_size: int, hosts: str) -> dict[str, Any]:
    hurry()
    measured: list[set[Lane]] = []

    def known_slowdowns(*args: Any) -> Slowdowns:
        """Measured like any other, and then as if that had been the result."""
        measured.append(set(args[2]))
        return Slowdowns({pair: SLOWED[pair] for pair in slowdowns(*args).factors})

    cluster_profile.slowdowns = known_slowdowns
    topology, lanes, known, said = topology_of_hosts(hosts), make_lanes(CPU), Measurements(), Said()
    made: list[Any] = []
    make = dist.new_group
    dist.new_group = lambda *args, **kwargs: (
        made.append((sorted(args[0]), kwargs["timeout"].total_seconds())) or make(*args, **kwargs)
    )
    torch.manual_seed(rank)
    state = torch.get_rng_state()
    held = set(map(id, dist.distributed_c10d._world.pg_map))
    cluster, _ = profiled(topology, lanes, known, said, name="ours", source="here")
    first = list(made)
    again, num_timed = profiled(topology, lanes, known, said, name="ours", source="here")
    lanes.close()
    # What is known is not measured again, and nothing is left behind.
    assert (again == cluster, num_timed, len(made)) == (True, 0, len(first))
    assert set(said.measured) == set(ProfileNames(topology, lanes, torch.float32, MAX_BYTES).all())
    assert torch.equal(state, torch.get_rng_state())
    assert set(map(id, dist.distributed_c10d._world.pg_map)) == held
    found = {"cluster": json.dumps(cluster_as_json(cluster)), "known": known, "said": said.lines}
    return found | {"made": first, "slowed": (cluster.contention, measured)}


@pytest.mark.long
def test_every_operation_is_measured_alike_on_all_ranks_and_can_be_planned_with(tmp_path: Path) -> None:
    every = run_on_ranks(measure, 4, tmp_path / "ranks", "abab")
    first = every[0]
    for each in every:
        assert (each["cluster"], each["known"]) == (first["cluster"], first["known"])
        groups = ([0, 1], [2, 3], [0, 2], [1, 3])  # in one static order; ranks 0 and 2 share a node
        assert each["made"] == [(group, COLLECTIVE_TIMEOUT_S) for group in groups]
        assert each["slowed"] == (Contention(links=0.5, compute=0.125, traffic=0.25), [set(Lane)]), "measured once"
    (tmp_path / "ours.json").write_text(first["cluster"])
    cluster = load_cluster(str(tmp_path / "ours.json"))
    assert (cluster.name, cluster.source, cluster.num_nodes, cluster.gpus_per_node) == ("ours", "here", 2, 2)
    assert tuple(cluster.operations) == tuple(UNITS)
    assert {name for name, each in cluster.operations.items() if each.ranks == 2} == set(LINKED)
    assert all(each.source.startswith("measured: ") for each in cluster.operations.values())
    assert cluster.host_ms > 0
    costs = kind_costs(cluster, Groups(4, 2, mp=2, esp=2, ep=2), "2dh")
    assert costs["A2A_IN"] == cluster.operations["inter.all_to_all"].cost
    # Sizes are what the planner takes them for.
    timings = first["known"].timings
    assert len(timings) == len(UNITS)
    for name, timing in timings.items():
        operation = name.split(",")[0].split(" ")[0]
        assert timing.unit == UNITS[operation], name
        assert len(timing.sizes) >= 5
        assert timing.sizes[-1] / timing.sizes[0] >= 16 * 0.9
        if operation in LINKED:
            assert timing.sizes[-1] <= MAX_BYTES
            assert all(size % (2 * 4) == 0 for size in timing.sizes), "whole elements for two ranks"


@pytest.mark.long
def test_of_uneven_nodes_what_they_have_in_common_is_measured(tmp_path: Path) -> None:
    seen = run_on_ranks(measure, 3, tmp_path / "ranks", "aab")
    assert all(each["cluster"] == seen[0]["cluster"] for each in seen)
    cluster = json.loads(seen[0]["cluster"])
    assert (cluster["num_nodes"], cluster["gpus_per_node"]) == (2, 1)
    assert set(cluster["operations"]) == {name for name in UNITS if not name.startswith("intra")}
    note = "the nodes have 2, 1 ranks; 1 of each are measured, so links inside a node were not measured"
    assert cluster["source"] == f"here; {note}"
    assert note in seen[0]["said"]
    assert all(note not in each["said"] for each in seen[1:])


def test_ranks_that_are_left_over_are_groups_by_themselves() -> None:
    uneven = topology_of_hosts("aaabbc")
    shape = ProfileNames(uneven, SerialLanes(), torch.float32)
    assert (shape.num_nodes, shape.per_node) == (3, 1)
    assert lane_groups(uneven, "inter") == ((0, 3, 5), (1,), (2,), (4,))
    uneven = topology_of_hosts("ababa")
    assert lane_groups(uneven, "inter") == ((0, 1), (2, 3), (4,))
    assert lane_groups(uneven, "intra") == ((0, 2), (1, 3), (4,))


def test_of_several_bad_fits_the_worst_is_named_and_the_others_are_counted() -> None:
    topology, lanes, said = topology_of_hosts("a"), SerialLanes(), heard()
    names = ProfileNames(topology, lanes, torch.float32)
    bad = {names.of(each): Timing("flop", (1, 2, 3), (1, 9 + at, 1)) for at, each in enumerate(names.operations)}
    known = Measurements(bad, dict.fromkeys(names.all(), 1.0))
    profile_cluster(Measuring(Stopwatch(CPU), known), topology, lanes, torch.float32)
    said.end()
    worst = f"{names.operations[-1]} {list(bad.values())[-1].fit.worst_share:.0%}"
    assert sum(f"(off by {worst}, {len(bad) - 1} more)" in line for line in said.lines) == 1


# ---- two ranks, and links that are not what they seem

MBIT_50 = 50e6 / 8 / 1e3  # bytes in a millisecond


def meet_odd_links(rank: int, world_size: int) -> dict[str, Any]:
    hurry()
    cluster_profile.LINK_AIM_MS = LINK_AIM_MS
    topology, send = topology_of_hosts("ab"), dist.all_to_all_single
    # All that is not slowed takes a tick, whatever its size.
    clock = FakeClock(tick_ns=10**6)
    found: dict[str, Any] = {}

    def after(delay_ms: Any) -> Said:
        def slow(y: torch.Tensor, x: torch.Tensor, **options: Any) -> None:
            clock.sleep(delay_ms(x.numel() * 4) / 1e3)
            send(y, x, **options)

        dist.all_to_all_single = slow
        return Said()

    known = Measurements()
    said = after(lambda num_bytes: num_bytes / MBIT_50)
    cluster, _ = profiled(topology, SerialLanes(), known, said, clock, max_bytes=1 << 26)
    name = ProfileNames(topology, SerialLanes(), torch.float32, 1 << 26).of("inter.all_to_all")
    found["slow"] = known.timings[name]
    found["contention"] = cluster.contention, [each for each in known.numbers if "contention" in each]

    known, said = Measurements(), after(lambda num_bytes: 20 if num_bytes < MAX_BYTES / 3 else 1)
    cluster, _ = profiled(topology, SerialLanes(), known, said, clock)
    found["bad"] = [*said.measured], [*said.lines], cluster.operations["inter.all_to_all"].source
    dist.all_to_all_single = send

    def fails(*_: Any) -> None:
        raise OSError("the disk is on fire")

    held = len(dist.distributed_c10d._world.pg_map)
    if rank == 1:
        cluster_profile.F.one_hot = fails
    try:
        profiled(topology, SerialLanes(), Measurements(), said)
    except MeasuringError as error:
        found["error"] = str(error)
    found["left"] = len(dist.distributed_c10d._world.pg_map) - held
    return found


@pytest.mark.long
def test_links_that_are_not_what_they_seem_are_measured_in_no_longer_and_a_rank_that_fails_ends_it_on_all(
    tmp_path: Path,
) -> None:
    odd = run_on_ranks(meet_odd_links, 2, tmp_path)
    timing = odd[0]["slow"]
    assert timing == odd[1]["slow"]
    assert 20 < timing.sizes[-1] / MBIT_50 < 200, "milliseconds at 50 Mbit/s"
    assert timing.times_ms[-1] == pytest.approx(timing.sizes[-1] / MBIT_50, abs=1.5)
    assert odd[0]["contention"] == (IDEAL, []), "lanes that do one task after another do not slow each other"
    # What is no straight line is measured once more, and said by one rank.
    measured, said, source = odd[0]["bad"]
    assert sum(each.startswith("inter.all_to_all") for each in measured) == 2
    (warning,) = [line for line in said if "noisy measurement" in line]
    assert "(off by inter.all_to_all " in warning
    assert source.endswith("; fits poorly")
    assert odd[1]["bad"][:2] == (measured, [])
    for each in odd:
        assert each["error"].startswith("rank 1 failed while ")
        assert each["error"].endswith("OSError: the disk is on fire")
        assert each["left"] == 0
