# SPDX-License-Identifier: Apache-2.0
"""A cluster is measured by all ranks together, once, on groups that are gone afterwards; slow links take no longer."""

from __future__ import annotations

import functools
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
from ds_fsmoe.measuring import cluster_profile, stopwatch
from ds_fsmoe.measuring.cache import Measurements, Measuring
from ds_fsmoe.measuring.cluster_profile import ProfileNames, lane_groups, profile_cluster
from ds_fsmoe.measuring.stopwatch import Stopwatch, slowdowns
from ds_fsmoe.observing.clock import HOST, Clock
from ds_fsmoe.planning.cluster import Cluster, cluster_as_json, load_cluster
from ds_fsmoe.planning.cluster_schema import UNITS
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.job.measured import Slowdowns
from ds_fsmoe.planning.schedule import Lane
from ds_fsmoe.planning.timeline import IDEAL, Contention
from ds_fsmoe.planning.workload import kind_costs
from tests.fake_clock import FakeClock
from tests.logged import Said as Lines
from tests.ranks import COLLECTIVE_TIMEOUT_S, run_on_ranks

pytestmark = pytest.mark.long

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


def in_haste() -> None:
    """Few repetitions of little work: what is looked at is not how exact it is."""
    stopwatch.BUDGET_S, stopwatch.FEWEST = 0.0, 1
    cluster_profile.COMPUTING_AIM_MS = 1.0
    stopwatch.SHORTEST_MS, stopwatch.REPEATS = 2.0, 1


def profiled(
    topology: Topology, lanes: Lanes, known: Measurements, said: Said, host: Clock = HOST, **options: Any
) -> tuple[Cluster, int]:
    """The cluster, and how many operations were timed."""
    watch = Stopwatch(CPU, host=host)
    measuring = Measuring(watch, known, said.measured.append)
    options = {"max_bytes": MAX_BYTES} | options
    return profile_cluster(measuring, topology, lanes, torch.float32, **options), watch.num_timed


def known_slowdowns(measured: list[set[Lane]], *args: Any) -> Slowdowns:
    """Measured like any other, and then as if that had been the result."""
    measured.append(set(args[2]))
    found = slowdowns(*args)
    return Slowdowns({pair: SLOWED[pair] for pair in found.factors})


def measure(rank: int, world_size: int, hosts: str) -> dict[str, Any]:
    in_haste()
    measured: list[set[Lane]] = []
    cluster_profile.slowdowns = functools.partial(known_slowdowns, measured)
    topology, lanes, known, said = topology_of_hosts(hosts), make_lanes(CPU), Measurements(), Said()
    made: list[Any] = []
    make = dist.new_group
    dist.new_group = lambda *args, **kwargs: (
        made.append((args, kwargs["timeout"].total_seconds())) or make(*args, **kwargs)
    )
    torch.manual_seed(rank)
    state = torch.get_rng_state()
    held = set(map(id, dist.distributed_c10d._world.pg_map))
    cluster, _ = profiled(topology, lanes, known, said, name="ours", source="here")
    first = list(made)
    again, num_timed = profiled(topology, lanes, known, said, name="ours", source="here")
    lanes.close()
    return {
        "cluster": json.dumps(cluster_as_json(cluster)),
        "known": known,
        "again": (again == cluster, num_timed, len(made) - len(first)),
        "names": set(said.measured) == set(ProfileNames(topology, lanes, torch.float32, MAX_BYTES).all()),
        "same state": torch.equal(state, torch.get_rng_state()),
        "left": set(map(id, dist.distributed_c10d._world.pg_map)) - held,
        "made": first,
        "said": said.lines,
        "slowed": (cluster.contention, measured),
    }


@pytest.fixture(scope="module")
def two_by_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(measure, 4, tmp_path_factory.mktemp("even") / "ranks", "abab")


def test_every_operation_is_measured_alike_on_all_ranks_and_can_be_planned_with(
    two_by_two: list[dict[str, Any]], tmp_path: Path
) -> None:
    first = two_by_two[0]
    assert all(each["cluster"] == first["cluster"] and each["known"] == first["known"] for each in two_by_two)
    (tmp_path / "ours.json").write_text(first["cluster"])
    cluster = load_cluster(str(tmp_path / "ours.json"))
    assert (cluster.name, cluster.source, cluster.num_nodes, cluster.gpus_per_node) == ("ours", "here", 2, 2)
    assert tuple(cluster.operations) == tuple(UNITS)
    assert {name for name, each in cluster.operations.items() if each.ranks == 2} == set(LINKED)
    assert all(each.source.startswith("measured: ") for each in cluster.operations.values())
    assert cluster.host_ms > 0
    costs = kind_costs(cluster, Groups(4, 2, mp=2, esp=2, ep=2), "2dh")
    assert costs["A2A_IN"] == cluster.operations["inter.all_to_all"].cost


def test_sizes_are_what_the_planner_takes_them_for(two_by_two: list[dict[str, Any]]) -> None:
    timings = two_by_two[0]["known"].timings
    assert len(timings) == len(UNITS)
    for name, timing in timings.items():
        operation = name.split(",")[0].split(" ")[0]
        assert timing.unit == UNITS[operation], name
        assert len(timing.sizes) >= 5
        assert timing.sizes[-1] / timing.sizes[0] >= 16 * 0.9
        if operation in LINKED:
            assert timing.sizes[-1] <= MAX_BYTES
            assert all(size % (2 * 4) == 0 for size in timing.sizes), "whole elements for two ranks"


def test_what_is_known_is_not_measured_again_and_nothing_is_left_behind(two_by_two: list[dict[str, Any]]) -> None:
    for each in two_by_two:
        assert each["again"] == (True, 0, 0)
        assert each["names"]
        assert each["same state"]
        assert each["left"] == set()
        groups = [sorted(args[0]) for args, _ in each["made"]]
        assert groups == [[0, 1], [2, 3], [0, 2], [1, 3]], "one static order; ranks 0 and 2 share a node"
        assert {timeout_s for _, timeout_s in each["made"]} == {COLLECTIVE_TIMEOUT_S}


def test_how_lanes_slow_each_other_is_part_of_the_cluster_and_measured_once(two_by_two: list[dict[str, Any]]) -> None:
    for each in two_by_two:
        assert each["slowed"] == (Contention(links=0.5, compute=0.125, traffic=0.25), [set(Lane)])


def test_of_uneven_nodes_what_they_have_in_common_is_measured(tmp_path: Path) -> None:
    seen = run_on_ranks(measure, 3, tmp_path / "ranks", "aab")
    assert all(each["cluster"] == seen[0]["cluster"] for each in seen)
    cluster = json.loads(seen[0]["cluster"])
    assert (cluster["num_nodes"], cluster["gpus_per_node"]) == (2, 1)
    assert set(cluster["operations"]) == {name for name in UNITS if not name.startswith("intra")}
    note = "the nodes have 2, 1 ranks; 1 of each are measured, so links inside a node were not measured"
    assert cluster["source"] == f"here; {note}"
    assert note in seen[0]["said"]
    assert all(note not in each["said"] and each["left"] == set() for each in seen[1:])


def test_ranks_that_are_left_over_are_groups_by_themselves() -> None:
    uneven = topology_of_hosts("aaabbc")
    shape = ProfileNames(uneven, SerialLanes(), torch.float32)
    assert (shape.num_nodes, shape.per_node) == (3, 1)
    assert lane_groups(uneven, "inter") == ((0, 3, 5), (1,), (2,), (4,))
    uneven = topology_of_hosts("ababa")
    assert lane_groups(uneven, "inter") == ((0, 1), (2, 3), (4,))
    assert lane_groups(uneven, "intra") == ((0, 2), (1, 3), (4,))


# ---- two ranks, and links that are not what they seem

MBIT_50 = 50e6 / 8 / 1e3  # bytes in a millisecond


def meet_odd_links(rank: int, world_size: int) -> dict[str, Any]:
    in_haste()
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


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(meet_odd_links, 2, tmp_path_factory.mktemp("odd") / "ranks")


def test_on_a_slow_link_the_largest_message_is_over_soon(odd: list[dict[str, Any]]) -> None:
    timing = odd[0]["slow"]
    assert timing == odd[1]["slow"]
    assert 20 < timing.sizes[-1] / MBIT_50 < 200, "milliseconds at 50 Mbit/s"
    assert timing.times_ms[-1] == pytest.approx(timing.sizes[-1] / MBIT_50, abs=1.5)
    assert odd[0]["contention"] == (IDEAL, []), "lanes that do one task after another do not slow each other"


def test_what_is_no_straight_line_is_measured_once_more_and_said(odd: list[dict[str, Any]]) -> None:
    measured, said, source = odd[0]["bad"]
    assert sum(each.startswith("inter.all_to_all") for each in measured) == 2
    (warning,) = [line for line in said if "noisy measurement" in line]
    assert "(off by inter.all_to_all " in warning
    assert source.endswith("; fits poorly")
    assert odd[1]["bad"][0] == measured
    assert odd[1]["bad"][1] == [], "one rank says it"


def test_a_rank_that_fails_ends_the_measuring_on_all_and_the_groups_go_too(odd: list[dict[str, Any]]) -> None:
    for each in odd:
        assert each["error"].startswith("rank 1 failed while ")
        assert each["error"].endswith("OSError: the disk is on fire")
        assert each["left"] == 0
