# SPDX-License-Identifier: Apache-2.0
"""Cluster files: those that come with the package, and a wrong one, which is refused where it is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_fsmoe.planning.cluster import Cluster, Operation, cluster_as_json, load_cluster, names
from ds_fsmoe.planning.cluster_schema import UNITS
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.timeline import Contention
from ds_fsmoe.planning.workload import kind_costs
from tests.planning.changed import with_change

GOOD: dict[str, Any] = {
    "name": "mine",
    "num_nodes": 2,
    "gpus_per_node": 4,
    "contention": {"links": 0.25},
    "host_ms": 0.02,
    "operations": {
        "gemm": {"alpha_ms": 0.1, "beta_ms_per_flop": 1e-10},
        "inter.all_to_all": {"alpha_ms": 0.3, "beta_ms_per_byte": 5e-7, "ranks": 2, "source": "measured"},
    },
}


def loaded(tmp_path: Path, data: Any) -> Any:
    path = tmp_path / "mine.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return load_cluster(str(path))


@pytest.mark.parametrize("name", names())
def test_every_cluster_of_the_package_has_all_operations_with_a_source(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert set(cluster.operations) >= set(UNITS)
    assert all(each.source for each in cluster.operations.values())
    world = cluster.num_nodes * cluster.gpus_per_node
    costs = kind_costs(cluster, Groups(world, cluster.gpus_per_node, ep=world), "2dh")
    assert costs["EXPERT"] == cluster.operations["gemm"].cost


PAPERS = ("testbed_a", "testbed_a_printed", "testbed_b", "testbed_b_printed")


def test_the_package_brings_both_testbeds_in_both_readings_and_three_clusters_of_today() -> None:
    assert names() == ("a100_200", "ethernet_25", "h100_400", *PAPERS)


def test_the_schema_beside_the_clusters_is_no_cluster() -> None:
    assert "cluster.schema" not in names()
    with pytest.raises(ValueError, match=r"no cluster or file 'cluster.schema'"):
        load_cluster("cluster.schema")


# PAPER.md, section 6: (alpha in ms, beta), betas in ms per fp32 element or per multiply-add.
REFERENCE = {
    "testbed_a": {
        "inter.all_to_all": (0.287, 2.087e-6),
        "intra.all_gather": (0.337, 2.148e-7),
        "intra.reduce_scatter": (0.395, 2.452e-7),
        "inter.all_reduce": (0.511, 4.284e-6),
        "gemm": (0.0426, 1.110e-10),
        "attention": (0.2, 7.2e-11),
    },
    "testbed_b": {
        "inter.all_to_all": (0.175, 1.384e-6),
        "intra.all_gather": (0.0320, 6.929e-7),
        "intra.reduce_scatter": (0.0391, 7.075e-7),
        "inter.all_reduce": (0.0837, 2.934e-6),
        "gemm": (0.0924, 1.319e-10),
        "attention": (0.3, 1.35e-10),
    },
    # As printed: B's per byte (so four of them per element), A's per element with two exponents exchanged.
    "testbed_a_printed": {
        "inter.all_to_all": (0.287, 2.21e-6),
        "intra.all_gather": (0.337, 2.32e-7),
        "intra.reduce_scatter": (0.395, 2.34e-7),
        "inter.all_reduce": (0.511, 4.95e-6),
        "gemm": (0.0426, 9.16e-11),
        "attention": (0.2, 7.2e-11),
    },
    "testbed_b_printed": {
        "inter.all_to_all": (0.175, 4 * 3.06e-7),
        "intra.all_gather": (0.0320, 4 * 1.68e-7),
        "intra.reduce_scatter": (0.0391, 4 * 1.67e-7),
        "inter.all_reduce": (0.0837, 4 * 5.99e-7),
        "gemm": (0.0924, 1.77e-10),
        "attention": (0.3, 1.35e-10),
    },
}


@pytest.mark.parametrize("name", REFERENCE)
def test_the_testbeds_are_the_papers_in_bytes_and_flops(name: str) -> None:
    cluster = load_cluster(name)
    for operation, (alpha_ms, beta) in REFERENCE[name].items():
        units = 4 if UNITS[operation] == "byte" else 2
        assert cluster.operations[operation].cost.alpha_ms == alpha_ms, operation
        assert cluster.operations[operation].cost.beta_ms == pytest.approx(beta / units, rel=1e-9), operation
    is_a = "_a" in name
    assert (cluster.num_nodes, cluster.gpus_per_node) == ((6, 8) if is_a else (8, 4))
    assert cluster.contention.links == (0.48 if is_a else 0.445)
    assert cluster.operations["softmax"].cost == LinearCost(0.0, 9.5e-8 if is_a else 7.8e-8)
    assert cluster.operations["routing"].cost == LinearCost(0.1, 0.0)
    assert cluster.operations["order"].cost.alpha_ms * 2 == pytest.approx(0.3)
    assert cluster.operations["inter.all_to_all"].ranks == cluster.num_nodes
    assert cluster.operations["intra.all_gather"].ranks == cluster.gpus_per_node


def test_a_file_of_ones_own_is_read(tmp_path: Path) -> None:
    cluster = loaded(tmp_path, GOOD)
    assert (cluster.name, cluster.num_nodes, cluster.gpus_per_node, cluster.host_ms) == ("mine", 2, 4, 0.02)
    assert (cluster.contention.links, cluster.contention.compute) == (0.25, 0.0)
    assert cluster.operations["inter.all_to_all"] == Operation(LinearCost(0.3, 5e-7), 2, "measured")
    assert cluster.operations["gemm"].ranks is None


def test_among_other_ranks_a_buffer_costs_what_goes_over_the_wire() -> None:
    measured = Operation(LinearCost(0.5, 0.75), 4)
    assert measured.among(4) == LinearCost(0.5, 0.75)
    assert (measured.among(2).alpha_ms, measured.among(2).beta_ms) == pytest.approx((0.5, 0.5))
    assert (measured.among(8).alpha_ms, measured.among(8).beta_ms) == pytest.approx((0.5, 0.875))
    assert measured.among(1) == LinearCost(0.0, 0.0)
    assert Operation(LinearCost(0.5, 0.75)).among(8) == LinearCost(0.5, 0.75)


# ---- more ranks


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 64, 4096])
def test_a_start_up_grows_as_the_file_says_by_every_rank_and_by_every_doubling(ranks: int) -> None:
    ring = Operation(LinearCost(0.5, 0.75), 4, alpha_ms_per_rank=0.01)
    assert ring.among(ranks).alpha_ms == pytest.approx(0.5 + 0.01 * (ranks - 4))
    tree = Operation(LinearCost(0.5, 0.75), 4, alpha_ms_per_doubling=0.1)
    levels, reached = 0.0, 4.0
    while reached * 2 <= ranks:
        levels, reached = levels + 1, reached * 2
    assert tree.among(ranks).alpha_ms >= (0.5 + 0.1 * levels if ranks >= 4 else 0.0) - 1e-12
    if ranks in (2, 4, 64, 4096):
        assert tree.among(ranks).alpha_ms == pytest.approx(0.5 + 0.1 * (ranks.bit_length() - 3))
    plain = Operation(LinearCost(0.5, 0.75), 4)
    assert ring.among(ranks).beta_ms == tree.among(ranks).beta_ms == plain.among(ranks).beta_ms
    assert plain.among(ranks).alpha_ms == 0.5


def test_few_ranks_cost_no_less_than_nothing_and_one_rank_nothing() -> None:
    steep = Operation(LinearCost(0.1, 1.0), 100, alpha_ms_per_rank=0.01)
    assert steep.among(2).alpha_ms == 0.0
    assert steep.among(1) == LinearCost(0.0, 0.0)


def test_messages_count_by_peers_and_bytes_by_nodes() -> None:
    measured = Operation(LinearCost(0.5, 0.75), 4, alpha_ms_per_rank=0.01)
    among = measured.among(4, peers=32)
    assert (among.alpha_ms, among.beta_ms) == pytest.approx((0.5 + 0.01 * 28, 0.75))
    assert measured.among(4, peers=4) == LinearCost(0.5, 0.75)
    assert Operation(LinearCost(0.5, 0.75), 4).among(8, peers=64) == Operation(LinearCost(0.5, 0.75), 4).among(8)


def test_the_papers_clusters_say_nothing_of_growth_and_the_others_do() -> None:
    for name in names():
        operations = load_cluster(name).operations
        grows = {each: bool(of.alpha_ms_per_rank or of.alpha_ms_per_doubling) for each, of in operations.items()}
        if name in PAPERS:
            assert not any(grows.values()), name
        else:
            assert all(grow for each, grow in grows.items() if each.startswith("inter.")), name


def test_growth_without_the_ranks_that_it_counts_from_is_refused(tmp_path: Path) -> None:
    path = ("operations", "inter.all_to_all")
    data = with_change(GOOD, (*path, "alpha_ms_per_rank"), 0.01)
    assert loaded(tmp_path, data).operations["inter.all_to_all"].among(5).alpha_ms == pytest.approx(0.33)
    del data["operations"]["inter.all_to_all"]["ranks"]
    with pytest.raises(ValueError, match=r"all_to_all: ranks is missing, which alpha_ms_per_rank is relative to"):
        loaded(tmp_path, data)
    with pytest.raises(ValueError, match=r"gemm.alpha_ms_per_rank: unknown key"):
        loaded(tmp_path, with_change(GOOD, ("operations", "gemm", "alpha_ms_per_rank"), 0.01))
    with pytest.raises(ValueError, match=r"alpha_ms_per_rank = -1: must be greater than or equal to 0"):
        loaded(tmp_path, with_change(GOOD, (*path, "alpha_ms_per_rank"), -1))


# ---- what else a file says


def test_what_a_file_says_of_its_gpus_is_read(tmp_path: Path) -> None:
    said = {"gpu": "X1", "memory_gb": 80, "dtype": "bf16", "peak_tflops": 989, "date": "2026-11-25"}
    cluster = loaded(tmp_path, GOOD | said | {"link_gb_per_s": {"inter": 50}, "contributed_by": "me"})
    assert {name: getattr(cluster, name) for name in said} == said
    assert (dict(cluster.link_gb_per_s), cluster.contributed_by) == ({"inter": 50.0}, "me")
    silent = loaded(tmp_path, GOOD)
    assert (silent.memory_gb, silent.dtype, silent.peak_tflops, dict(silent.link_gb_per_s)) == (None, None, None, {})


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("memory_gb",), 0, "memory_gb = 0: must be greater than 0"),
        (("memory_gb",), "80", 'memory_gb = "80": must be a number'),
        (("peak_tflops",), -1, "peak_tflops = -1: must be greater than 0"),
        (("dtype",), "bfloat16", "dtype = \"bfloat16\": unknown value; did you mean 'bf16'"),
        (("link_gb_per_s",), {"inner": 1}, "link_gb_per_s.inner: unknown key; did you mean 'inter'[?]"),
        (("link_gb_per_s",), {"inter": 0}, "link_gb_per_s.inter = 0: must be greater than 0"),
    ],
)
def test_a_wrong_word_about_gpus_is_refused(tmp_path: Path, path: tuple[str, ...], value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loaded(tmp_path, with_change(GOOD, path, value))


@pytest.mark.parametrize(
    "value", [-1, -1e-30, float("nan"), float("inf"), True, "0.1", None, [1.0], 10**400], ids=lambda each: str(each)[:9]
)
@pytest.mark.parametrize(
    "path",
    [
        ("operations", "gemm", "alpha_ms"),
        ("operations", "inter.all_to_all", "beta_ms_per_byte"),
        ("contention", "links"),
        ("contention", "compute"),
        ("host_ms",),
    ],
)
def test_a_number_that_is_none_is_refused_by_field_and_value(tmp_path: Path, path: tuple[str, ...], value: Any) -> None:
    message = rf"mine\.json: {'.'.join(path)} = .*: must be (a number|a finite number|greater than or equal to 0)"
    with pytest.raises(ValueError, match=message):
        loaded(tmp_path, with_change(GOOD, path, value))


@pytest.mark.parametrize("value", [0, -2, 1.5, True, "4", None, float("nan")])
@pytest.mark.parametrize("field", ["num_nodes", "gpus_per_node"])
def test_a_count_that_is_none_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    must = "(an integer|a finite number|greater than or equal to 1)"
    with pytest.raises(ValueError, match=rf"mine\.json: {field} = .*: must be {must}"):
        loaded(tmp_path, with_change(GOOD, (field,), value))


def test_a_collective_among_one_rank_is_no_measurement(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"inter.all_to_all.ranks = 1: must be greater than or equal to 2"):
        loaded(tmp_path, with_change(GOOD, ("operations", "inter.all_to_all", "ranks"), 1))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("num_nodes",), ..., "num_nodes is missing"),
        (("operations",), ..., "operations is missing"),
        (("operations", "gemm", "alpha_ms"), ..., "operations.gemm.alpha_ms is missing"),
        (("operations", "gemm", "beta_ms_per_flop"), ..., "operations.gemm.beta_ms_per_flop is missing"),
        (("gpu_per_node",), 4, "gpu_per_node: unknown key; did you mean 'gpus_per_node'[?]"),
        (("zzz",), 4, "zzz: unknown key; the keys are name, source, num_nodes, "),
        (
            ("operations", "inter.alltoall"),
            {},
            "operations.inter.alltoall: unknown key; did you mean 'inter.all_to_all'[?]",
        ),
        (
            ("operations", "gemm", "beta_ms_per_byte"),
            1.0,
            "operations.gemm.beta_ms_per_byte: unknown key; did you mean 'beta_ms_per_flop'[?]",
        ),
        (("operations", "gemm", "ranks"), 2, "operations.gemm.ranks: unknown key; "),
        (("operations", "gemm"), 0.1, "operations.gemm = 0.1: must be an object"),
        (("operations",), [], r"operations = \[\]: must be an object"),
        (("contention",), 0.5, "contention = 0.5: must be an object"),
        (("contention", "link"), 0.5, "contention.link: unknown key; did you mean 'links'[?]"),
    ],
)
def test_a_field_that_is_missing_unknown_or_misspelt_is_named_with_the_choices(
    tmp_path: Path, path: tuple[str, ...], value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=rf"mine\.json: {message}"):
        loaded(tmp_path, with_change(GOOD, path, value))


@pytest.mark.parametrize("text", ["", "{", "num_nodes: 2", "{'num_nodes': 2}"])
def test_a_file_that_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"mine\.json: cannot be read as JSON: "):
        loaded(tmp_path, text)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"testbed_a"'])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"mine\.json: must be an object"):
        loaded(tmp_path, text)


def test_an_unknown_cluster_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    choices = f"the choices are {', '.join(names())}, or the path of a JSON file"
    with pytest.raises(ValueError, match=r"no cluster or file 'testbedb': did you mean 'testbed_b'[?]$"):
        load_cluster("testbedb")
    for nothing in ("zzz", "", str(tmp_path), str(tmp_path / "missing.json")):
        with pytest.raises(ValueError, match=f"no cluster or file .*: {choices}"):
            load_cluster(nothing)


# ---- written


@pytest.mark.parametrize("name", names())
def test_a_cluster_that_is_written_is_read_back_equal(tmp_path: Path, name: str) -> None:
    cluster = load_cluster(name)
    written = cluster_as_json(cluster)
    assert loaded(tmp_path, written) == cluster
    assert loaded(tmp_path, json.dumps(written | {"measured": {"anything": ["at", 1, None]}})) == cluster
    assert cluster_as_json(loaded(tmp_path, written)) == written


def test_numbers_are_read_back_to_the_last_bit(tmp_path: Path) -> None:
    exact = LinearCost(1 / 3, 2.0**-71 / 3)
    operations = {"gemm": Operation(exact), "intra.all_to_all": Operation(exact, 7, "words", 1 / 19, 1 / 23)}
    how = Contention(1 / 7, 1 / 11, 1 / 13), 1 / 17, "where from"
    cluster = Cluster("mine", 3, 7, operations, *how, layer_wait_ms=1 / 29)
    found = loaded(tmp_path, cluster_as_json(cluster))
    assert found == cluster
    assert found.operations["gemm"].ranks is None
    assert found.contention.traffic == 1 / 13


@pytest.mark.parametrize("value", [[], 3, None, "fast"])
def test_what_was_measured_is_an_object_if_it_is_there(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ValueError, match=r"mine\.json: measured = .*: must be an object"):
        loaded(tmp_path, GOOD | {"measured": value})
