# SPDX-License-Identifier: Apache-2.0
"""Cluster files: those of the package, what a file of one's own says, and a wrong one, which the reader, the schema and
``ds_fsmoe clusters --check`` refuse alike, where it is wrong."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from ds_fsmoe import cli
from ds_fsmoe.offline.plan.cluster_check import Finding, check_cluster, gb_per_s
from ds_fsmoe.planning import cluster as clusters
from ds_fsmoe.planning.cluster import Cluster, Operation, cluster_as_json, load_cluster, names, read_cluster_file
from ds_fsmoe.planning.cluster_schema import ALL_UNITS, UNITS, schema_of_clusters
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.timeline import Contention
from ds_fsmoe.planning.workload import kind_costs

SCHEMA = Draft202012Validator(schema_of_clusters())


def with_change(data: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return a copy with another value at a path; ``...`` takes the field away."""
    changed = copy.deepcopy(data)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return changed


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


A2A = ("operations", "inter.all_to_all")
PAPERS = ("testbed_a", "testbed_a_printed", "testbed_b", "testbed_b_printed")


def loaded(tmp_path: Path, data: Any) -> Any:
    path = tmp_path / "mine.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return load_cluster(str(path))


@pytest.mark.parametrize("name", names())
def test_a_cluster_of_the_package_has_all_operations_with_a_source_and_is_written_as_it_is_read(
    name: str, tmp_path: Path
) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert set(cluster.operations) >= set(UNITS)
    assert all(each.source for each in cluster.operations.values())
    world = cluster.num_nodes * cluster.gpus_per_node
    costs = kind_costs(cluster, Groups(world, cluster.gpus_per_node, ep=world), "2dh")
    assert costs["EXPERT"] == cluster.operations["gemm"].cost
    # Nothing is wrong or implausible with it, and it is read back as it is written.
    found = check_cluster(name)
    assert {each.kind for each in found} <= {"missing"} if name in PAPERS else found == ()
    assert SCHEMA.is_valid(read_cluster_file(name)[1])
    written = cluster_as_json(cluster)
    assert loaded(tmp_path, written) == cluster
    assert loaded(tmp_path, written | {"measured": {"anything": ["at", 1, None]}}) == cluster
    assert cluster_as_json(loaded(tmp_path, written)) == written


def test_the_package_brings_both_testbeds_in_both_readings_and_three_clusters_of_today() -> None:
    assert names() == ("a100_200", "ethernet_25", "h100_400", *PAPERS)


def test_the_schema_beside_the_clusters_is_of_this_version_and_no_cluster() -> None:
    found = schema_of_clusters()
    file = Path(clusters.__file__).parent / "clusters" / "cluster.schema.json"
    assert json.loads(file.read_text(encoding="utf-8")) == found
    assert "cluster.schema" not in names()
    described = {**found["properties"], **found["$defs"]["Slowing"]["properties"]}
    costs = [each["properties"] for name, each in found["$defs"].items() if "Per" in name]
    assert len(costs) == 4
    for each in (described, *costs):
        assert all(field["description"] for field in each.values())
    assert set(found["$defs"]["Operations"]["properties"]) == set(ALL_UNITS)


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
    data = with_change(GOOD, (*A2A, "alpha_ms_per_rank"), 0.01)
    assert loaded(tmp_path, data).operations["inter.all_to_all"].among(5).alpha_ms == pytest.approx(0.33)
    with pytest.raises(ValueError, match=r"all_to_all: ranks is missing, which alpha_ms_per_rank is relative to"):
        loaded(tmp_path, with_change(data, (*A2A, "ranks"), ...))
    assert not SCHEMA.is_valid(with_change(data, (*A2A, "ranks"), ...))


def test_what_a_file_says_of_its_gpus_is_read(tmp_path: Path) -> None:
    said = {"gpu": "X1", "memory_gb": 80, "dtype": "bf16", "peak_tflops": 989, "date": "2026-11-25"}
    cluster = loaded(tmp_path, GOOD | said | {"link_gb_per_s": {"inter": 50}, "contributed_by": "me"})
    assert {name: getattr(cluster, name) for name in said} == said
    assert (dict(cluster.link_gb_per_s), cluster.contributed_by) == ({"inter": 50.0}, "me")
    silent = loaded(tmp_path, GOOD)
    assert (silent.memory_gb, silent.dtype, silent.peak_tflops, dict(silent.link_gb_per_s)) == (None, None, None, {})


def test_numbers_are_read_back_to_the_last_bit(tmp_path: Path) -> None:
    exact = LinearCost(1 / 3, 2.0**-71 / 3)
    operations = {"gemm": Operation(exact), "intra.all_to_all": Operation(exact, 7, "words", 1 / 19, 1 / 23)}
    how = Contention(1 / 7, 1 / 11, 1 / 13), 1 / 17, "where from"
    cluster = Cluster("mine", 3, 7, operations, *how, layer_wait_ms=1 / 29)
    found = loaded(tmp_path, cluster_as_json(cluster))
    assert found == cluster
    assert found.operations["gemm"].ranks is None
    assert found.contention.traffic == 1 / 13


# ---- what is wrong with a file

NUMBERS = (
    ("operations", "gemm", "alpha_ms"),
    ("operations", "inter.all_to_all", "beta_ms_per_byte"),
    ("contention", "links"),
    ("contention", "compute"),
    ("host_ms",),
)
NO_NUMBER = "must be (a number|a finite number|greater than or equal to 0)"
NO_COUNT = "must be (an integer|a finite number|greater than or equal to 1)"
WRONG = [
    *((path, value, f"{'.'.join(path)} = .*: {NO_NUMBER}") for path in NUMBERS for value in (-1, "0.1", True)),
    *((NUMBERS[1], value, NO_NUMBER) for value in (-1e-30, float("nan"), float("inf"), None, [1.0], 10**400)),
    *(((field,), value, f"{field} = .*: {NO_COUNT}") for field in ("num_nodes", "gpus_per_node") for value in (0, 1.5)),
    *((("num_nodes",), value, NO_COUNT) for value in (-2, True, "4", None, float("nan"))),
    (("memory_gb",), 0, "memory_gb = 0: must be greater than 0"),
    (("memory_gb",), "80", 'memory_gb = "80": must be a number'),
    (("peak_tflops",), -1, "peak_tflops = -1: must be greater than 0"),
    (("dtype",), "bfloat16", "dtype = \"bfloat16\": unknown value; did you mean 'bf16'"),
    (("dtype",), "half", "dtype = \"half\": must be 'fp32', 'bf16', 'fp16' or 'fp8'"),
    (
        ("link_gb_per_s",),
        {"inner": 1},
        "link_gb_per_s.inner: unknown key; did you mean 'inter'",
    ),
    (("link_gb_per_s",), {"inter": 0}, "link_gb_per_s.inter = 0: must be greater than 0"),
    (("num_nodes",), ..., "num_nodes is missing"),
    (("operations",), ..., "operations is missing"),
    (("operations", "gemm", "alpha_ms"), ..., "operations.gemm.alpha_ms is missing"),
    (("operations", "gemm", "beta_ms_per_flop"), ..., "operations.gemm.beta_ms_per_flop is missing"),
    (("gpu_per_node",), 4, "gpu_per_node: unknown key; did you mean 'gpus_per_node'[?]"),
    (("zzz",), 4, "zzz: unknown key; the keys are name, source, num_nodes, "),
    (("operations", "inter.alltoall"), {}, "inter.alltoall: unknown key; did you mean 'inter.all_to_all'[?]"),
    (("operations", "gemms"), {}, "operations.gemms: unknown key"),
    (("operations", "gemm", "beta_ms_per_byte"), 1.0, "gemm.beta_ms_per_byte: unknown key; did you mean"),
    (("operations", "gemm", "ranks"), 2, "operations.gemm.ranks: unknown key; "),
    (("operations", "gemm", "alpha_ms_per_rank"), 0.01, "gemm.alpha_ms_per_rank: unknown key"),
    (("operations", "gemm"), 0.1, "operations.gemm = 0.1: must be an object"),
    ((*A2A, "alpha_ms_per_rank"), -1, "alpha_ms_per_rank = -1: must be greater than or equal to 0"),
    ((*A2A, "ranks"), 1, "inter.all_to_all.ranks = 1: must be greater than or equal to 2"),
    ((*A2A, "ranks"), 1 << 21, "inter.all_to_all.ranks = 2097152: must be"),
    (("operations",), [], r"operations = \[\]: must be an object"),
    (("contention",), 0.5, "contention = 0.5: must be an object"),
    (("contention", "link"), 0.5, "contention.link: unknown key; did you mean 'links'[?]"),
    *((("measured",), value, "measured = .*: must be an object") for value in ([], 3, None, "fast")),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG)
def test_reader_schema_and_check_refuse_what_is_wrong_by_field_and_value_with_the_choices(
    tmp_path: Path, path: tuple[str, ...], value: Any, message: str
) -> None:
    data = with_change(GOOD, path, value)
    with pytest.raises(ValueError, match=rf"mine\.json: .*{message}"):
        loaded(tmp_path, data)
    (found,) = check_cluster(str(tmp_path / "mine.json"))
    assert found.kind == "wrong"
    assert re.search(message, found.sentence)
    # JSON has no numbers that are none.
    assert not SCHEMA.is_valid(data) or value in (float("inf"), 10**400) or value != value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "cannot be read as JSON: ") for text in ("", "{", "num_nodes: 2", "{'num_nodes': 2}")),
        *((text, "must be an object") for text in ("[]", "3", "null", '"testbed_a"')),
    ],
)
def test_a_file_that_is_no_json_or_no_object_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"mine\.json: {message}"):
        loaded(tmp_path, text)


def test_an_unknown_cluster_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    choices = f"the choices are {', '.join(names())}, or the path of a JSON file"
    with pytest.raises(ValueError, match=r"no cluster or file 'testbedb': did you mean 'testbed_b'[?]$"):
        load_cluster("testbedb")
    for nothing in ("zzz", "", str(tmp_path), str(tmp_path / "missing.json")):
        with pytest.raises(ValueError, match=f"no cluster or file .*: {choices}"):
            load_cluster(nothing)


# ---- what is checked beyond that


def checked(tmp_path: Path, *changes: tuple[tuple[str, ...], Any], of: str = "h100_400") -> tuple[Finding, ...]:
    """What is said of a cluster with changes; ``...`` takes a field away."""
    data = read_cluster_file(of)[1]
    for path, value in changes:
        data = with_change(data, path, value)
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    return check_cluster(str(file))


def test_all_that_is_wrong_is_said_at_once_each_by_path_value_and_choices(tmp_path: Path) -> None:
    found = checked(
        tmp_path,
        (("num_nodes",), 0),
        (("gpus_per_nod",), 8),
        (("dtype",), "half"),
        (("operations", "gemm", "alpha_ms"), ...),
        (("operations", "inter.all_to_all", "ranks"), 1),
        (("operations", "inter.alltoall"), {}),
        (("contention", "links"), "much"),
    )
    assert {each.kind for each in found} == {"wrong"}
    expected = (
        r"num_nodes = 0: must be greater than or equal to 1",
        r"gpus_per_nod: unknown key; did you mean 'gpus_per_node'.",
        r"dtype = \"half\": must be 'fp32', 'bf16', 'fp16' or 'fp8'",
        r"operations\.gemm\.alpha_ms is missing",
        r"operations\.inter\.all_to_all\.ranks = 1: must be greater than or equal to 2",
        r"operations\.inter\.alltoall: unknown key; did you mean 'inter.all_to_all'.",
        r"contention\.links = \"much\": must be a number.*",
    )
    for pattern in expected:
        assert sum(bool(re.fullmatch(pattern, each.sentence)) for each in found) == 1, pattern
    assert len(found) == len(expected)


@pytest.mark.parametrize(
    ("path", "value", "kind", "sentence"),
    [
        (
            ("operations", "inter.all_to_all", "beta_ms_per_byte"),
            1e-8,
            "wrong",
            "operations.inter.all_to_all.beta_ms_per_byte = 1e-08: is 87.5 GB/s, more than the port carries, "
            "link_gb_per_s.inter = 50",
        ),
        (
            ("operations", "inter.all_to_all", "beta_ms_per_byte"),
            2e-5,
            "implausible",
            "operations.inter.all_to_all.beta_ms_per_byte = 2e-05: is 0.0437 GB/s, under a hundredth of "
            "link_gb_per_s.inter = 50",
        ),
        (
            ("operations", "intra.all_gather", "beta_ms_per_byte"),
            1e-7,
            "implausible",
            "operations.intra.all_gather is 8.75 GB/s, slower than operations.inter.all_gather at 47 GB/s",
        ),
        (
            ("operations", "gemm", "beta_ms_per_flop"),
            5e-13,
            "wrong",
            "operations.gemm.beta_ms_per_flop = 5e-13: is 2000 TFLOP/s, more than the GPU computes, peak_tflops = 989",
        ),
        (
            ("operations", "gemm", "beta_ms_per_flop"),
            1e-9,
            "implausible",
            "operations.gemm.beta_ms_per_flop = 1e-09: is 1 TFLOP/s, under a hundredth of peak_tflops = 989",
        ),
        (("operations", "gemm", "beta_ms_per_flop"), 0, "implausible", "operations.gemm.beta_ms_per_flop = 0"),
        (("operations", "intra.all_to_all", "beta_ms_per_byte"), 0, "implausible", "operations.intra.all_to_all.beta"),
        (("operations", "gemm", "alpha_ms"), 500, "implausible", "operations.gemm.alpha_ms = 500: a start-up of over"),
        (
            ("operations", "inter.all_to_all", "alpha_ms_per_rank"),
            1.0,
            "implausible",
            "operations.inter.all_to_all.alpha_ms_per_rank = 1: 8 ranks would take 8 ms",
        ),
        (("operations", "softmax"), ..., "missing", "operations.softmax is missing, and every layer needs it"),
        (
            ("operations", "inter.all_reduce"),
            ...,
            "missing",
            "operations.inter.all_reduce is missing: data parallelism over that link cannot be planned",
        ),
        (("operations", "order", "source"), ..., "missing", "operations.order.source is missing"),
        (("operations", "intra.all_reduce", "ranks"), ..., "missing", "operations.intra.all_reduce.ranks is missing"),
        (("memory_gb",), ..., "missing", "memory_gb is missing: whether a model fits cannot be said"),
        (("contention",), ..., "missing", "contention is missing"),
        (("source",), "", "missing", "source is missing"),
    ],
)
def test_what_is_missing_or_cannot_well_be_is_one_sentence(
    tmp_path: Path, path: tuple[str, ...], value: Any, kind: str, sentence: str
) -> None:
    found = checked(tmp_path, (path, value))
    assert [each.kind for each in found if each.sentence.startswith(sentence)] == [kind]


def test_a_single_node_needs_no_collectives_between_nodes(tmp_path: Path) -> None:
    without = [(("operations", f"inter.{each}"), ...) for each in ("all_to_all", "all_gather")]
    assert len(checked(tmp_path, *without)) == 2
    assert checked(tmp_path, *without, (("num_nodes",), 1)) == ()


def test_rates_are_those_of_the_wire() -> None:
    cost = LinearCost(0.1, 2e-8)  # 50 GB of buffer in a second
    assert gb_per_s("inter.all_to_all", Operation(cost, 4)) == pytest.approx(37.5)
    assert gb_per_s("inter.all_to_all", Operation(cost)) == pytest.approx(50.0)
    # Where switches add up, every rank sends its buffer once.
    assert gb_per_s("intra.all_reduce", Operation(cost, 4)) == pytest.approx(50.0)
    assert gb_per_s("intra.all_gather", Operation(LinearCost(0.1, 0.0), 4)) == 0.0


# ---- the command


def test_the_list_has_every_cluster_with_links_and_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["clusters"]) == 0
    text = capsys.readouterr().out
    for name in names():
        assert re.search(rf"(?m)^{name} +\d+ x \d+ ", text), name
        assert re.search(rf"(?m)^{name}: .", text), name
    assert re.search(r"(?m)^h100_400 +8 x 8 +H100 SXM5 +80 +bf16 +335 +45 +770$", text)
    assert cli.main(["clusters", "--sources"]) == 0
    assert "  inter.all_reduce: 47 GB/s" in capsys.readouterr().out


def test_only_what_is_wrong_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["clusters", "--check", "h100_400", "testbed_a"]) == 0
    text = capsys.readouterr().out
    assert "h100_400: no problems found" in text
    assert "testbed_a: missing: peak_tflops is missing" in text
    file = tmp_path / "mine.json"
    data = read_cluster_file("a100_200")[1] | {"num_nodes": "many"}
    file.write_text(json.dumps(data), encoding="utf-8")
    assert cli.main(["clusters", "--check", "h100_400", str(file)]) == 1
    assert f'{file}: wrong: num_nodes = "many": must be an integer' in capsys.readouterr().out


def test_a_file_that_is_not_there_or_no_json_is_a_wrong_argument(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.json"
    file.write_text("{", encoding="utf-8")
    for name, words in ((str(file), "cannot be read as JSON"), ("h100", "did you mean 'h100_400'")):
        assert cli.main(["clusters", "--check", name]) == 2
        assert words in capsys.readouterr().err


def test_the_config_of_a_model_is_called_that_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "qwen3_moe", "num_experts": 128, "hidden_size": 2048}')
    assert cli.main(["clusters", "--check", str(file)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said == [f"{file}: wrong: this is a Hugging Face config, not a cluster file; give it to plan --hf-config"]
