# SPDX-License-Identifier: Apache-2.0
"""Cluster files: those of the package, what a file of one's own says, and a wrong one, which the reader, the schema and
``ds_fsmoe clusters --check`` refuse alike, where it is wrong."""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from ds_fsmoe import cli
from ds_fsmoe.offline.plan.cluster_check import Finding, check_cluster
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


A2A, GEMM = ("operations", "inter.all_to_all"), ("operations", "gemm")
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
    # The paper says nothing of growth.
    for operation, each in cluster.operations.items():
        grows = operation.startswith("inter.") and name not in PAPERS
        assert not grows or each.alpha_ms_per_rank or each.alpha_ms_per_doubling
        assert name not in PAPERS or each.alpha_ms_per_rank == each.alpha_ms_per_doubling == 0
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


def test_the_schema_beside_the_seven_clusters_is_of_this_version_and_no_cluster() -> None:
    assert names() == ("a100_200", "ethernet_25", "h100_400", *PAPERS)
    found = schema_of_clusters()
    file = Path(clusters.__file__).parent / "clusters" / "cluster.schema.json"
    assert json.loads(file.read_text(encoding="utf-8")) == found
    described = {**found["properties"], **found["$defs"]["Slowing"]["properties"]}
    costs = [each["properties"] for name, each in found["$defs"].items() if "Per" in name]
    assert len(costs) == 4
    for each in (described, *costs):
        assert all(field["description"] for field in each.values())
    assert set(found["$defs"]["Operations"]["properties"]) == set(ALL_UNITS)


# PAPER.md, section 6: alpha in ms, and beta in ms per fp32 element or per multiply-add, as read and as printed: B's per
# byte (so four of them per element), A's per element with two exponents exchanged.
PAPERS_COSTS = {
    "testbed_a": {
        "inter.all_to_all": (0.287, 2.087e-6, 2.21e-6),
        "intra.all_gather": (0.337, 2.148e-7, 2.32e-7),
        "intra.reduce_scatter": (0.395, 2.452e-7, 2.34e-7),
        "inter.all_reduce": (0.511, 4.284e-6, 4.95e-6),
        "gemm": (0.0426, 1.110e-10, 9.16e-11),
        "attention": (0.2, 7.2e-11, 7.2e-11),
    },
    "testbed_b": {
        "inter.all_to_all": (0.175, 1.384e-6, 4 * 3.06e-7),
        "intra.all_gather": (0.0320, 6.929e-7, 4 * 1.68e-7),
        "intra.reduce_scatter": (0.0391, 7.075e-7, 4 * 1.67e-7),
        "inter.all_reduce": (0.0837, 2.934e-6, 4 * 5.99e-7),
        "gemm": (0.0924, 1.319e-10, 1.77e-10),
        "attention": (0.3, 1.35e-10, 1.35e-10),
    },
}


@pytest.mark.parametrize("name", PAPERS)
def test_the_testbeds_are_the_papers_in_bytes_and_flops(name: str) -> None:
    cluster, is_a = load_cluster(name), "_a" in name
    for operation, (alpha_ms, *betas) in PAPERS_COSTS["testbed_a" if is_a else "testbed_b"].items():
        units = 4 if UNITS[operation] == "byte" else 2
        assert cluster.operations[operation].cost.alpha_ms == alpha_ms, operation
        beta = pytest.approx(betas["printed" in name] / units, rel=1e-9)
        assert cluster.operations[operation].cost.beta_ms == beta, operation
    assert (cluster.num_nodes, cluster.gpus_per_node) == ((6, 8) if is_a else (8, 4))
    assert cluster.contention.links == (0.48 if is_a else 0.445)
    assert cluster.operations["softmax"].cost == LinearCost(0.0, 9.5e-8 if is_a else 7.8e-8)
    assert cluster.operations["routing"].cost == LinearCost(0.1, 0.0)
    assert cluster.operations["order"].cost.alpha_ms * 2 == pytest.approx(0.3)
    assert cluster.operations["inter.all_to_all"].ranks == cluster.num_nodes
    assert cluster.operations["intra.all_gather"].ranks == cluster.gpus_per_node


def test_among_other_ranks_a_buffer_costs_what_goes_over_the_wire() -> None:
    measured = Operation(LinearCost(0.5, 0.75), 4)
    assert [measured.among(ranks).beta_ms for ranks in (1, 2, 4, 8)] == pytest.approx([0.0, 0.5, 0.75, 0.875])
    assert [measured.among(ranks).alpha_ms for ranks in (1, 2, 4, 8)] == [0.0, 0.5, 0.5, 0.5]
    assert Operation(LinearCost(0.5, 0.75)).among(8) == LinearCost(0.5, 0.75)
    # Messages count by peers, bytes by nodes.
    grows = replace(measured, alpha_ms_per_rank=0.01).among(4, peers=32)
    assert (grows.alpha_ms, grows.beta_ms) == pytest.approx((0.5 + 0.01 * 28, 0.75))
    assert measured.among(8, peers=64) == measured.among(8)


@pytest.mark.parametrize("ranks", [2, 4, 7, 4096])
def test_a_start_up_grows_as_the_file_says_by_every_rank_and_by_every_doubling(ranks: int) -> None:
    plain = Operation(LinearCost(0.5, 0.75), 4)
    ring, tree = replace(plain, alpha_ms_per_rank=0.01), replace(plain, alpha_ms_per_doubling=0.1)
    assert ring.among(ranks).alpha_ms == pytest.approx(0.5 + 0.01 * (ranks - 4))
    assert tree.among(ranks).alpha_ms == pytest.approx(0.5 + 0.1 * math.log2(ranks / 4))
    assert ring.among(ranks).beta_ms == tree.among(ranks).beta_ms == plain.among(ranks).beta_ms
    assert Operation(LinearCost(0.1, 1.0), 5000, alpha_ms_per_rank=0.01).among(ranks).alpha_ms == 0.0


def test_what_a_file_of_ones_own_says_is_read(tmp_path: Path) -> None:
    said = {"gpu": "X1", "memory_gb": 80, "dtype": "bf16", "peak_tflops": 989, "date": "2026-11-25"}
    cluster = loaded(tmp_path, GOOD | said | {"link_gb_per_s": {"inter": 50}, "contributed_by": "me"})
    said |= {"name": "mine", "num_nodes": 2, "gpus_per_node": 4, "host_ms": 0.02, "contributed_by": "me"}
    assert {name: getattr(cluster, name) for name in said} == said
    assert (dict(cluster.link_gb_per_s), cluster.contention) == ({"inter": 50.0}, Contention(links=0.25))
    assert cluster.operations["inter.all_to_all"] == Operation(LinearCost(0.3, 5e-7), 2, "measured")
    assert cluster.operations["gemm"].ranks is None
    silent = loaded(tmp_path, GOOD)
    assert (silent.memory_gb, silent.dtype, silent.peak_tflops, dict(silent.link_gb_per_s)) == (None, None, None, {})


def test_numbers_are_read_back_to_the_last_bit(tmp_path: Path) -> None:
    exact = LinearCost(1 / 3, 2.0**-71 / 3)
    operations = {"gemm": Operation(exact), "intra.all_to_all": Operation(exact, 7, "words", 1 / 19, 1 / 23)}
    how = Contention(1 / 7, 1 / 11, 1 / 13), 1 / 17, "where from"
    cluster = Cluster("mine", 3, 7, operations, *how, layer_wait_ms=1 / 29)
    assert loaded(tmp_path, cluster_as_json(cluster)) == cluster


# ---- what is wrong with a file

NUMBERS = (
    ("operations", "gemm", "alpha_ms"),
    ("operations", "inter.all_to_all", "beta_ms_per_byte"),
    ("contention", "links"),
    ("contention", "compute"),
    ("host_ms",),
)
GROWING = {"alpha_ms": 0.3, "beta_ms_per_byte": 5e-7, "alpha_ms_per_rank": 0.01}
NO_NUMBER = "must be (a number|a finite number|greater than or equal to 0)"
NO_COUNT = "must be (an integer|a finite number|greater than or equal to 1)"
WRONG = [
    *((path, -1, f"{'.'.join(path)} = -1: {NO_NUMBER}") for path in NUMBERS),
    *((NUMBERS[1], value, NO_NUMBER) for value in ("0.1", True, float("nan"), float("inf"), None, [1.0], 10**400)),
    *(((field,), value, f"{field} = .*: {NO_COUNT}") for field in ("num_nodes", "gpus_per_node") for value in (0, 1.5)),
    *((("num_nodes",), value, NO_COUNT) for value in (True, "4", None, float("nan"))),
    (("memory_gb",), 0, "memory_gb = 0: must be greater than 0"),
    (("peak_tflops",), -1, "peak_tflops = -1: must be greater than 0"),
    (("dtype",), "bfloat16", "dtype = \"bfloat16\": unknown value; did you mean 'bf16'"),
    (("dtype",), "half", "dtype = \"half\": must be 'fp32', 'bf16', 'fp16' or 'fp8'"),
    (("link_gb_per_s",), {"inner": 1}, "link_gb_per_s.inner: unknown key; did you mean 'inter'"),
    (("link_gb_per_s",), {"inter": 0}, "link_gb_per_s.inter = 0: must be greater than 0"),
    (("operations",), ..., "operations is missing"),
    (("operations", "gemm", "alpha_ms"), ..., "operations.gemm.alpha_ms is missing"),
    (("gpu_per_node",), 4, "gpu_per_node: unknown key; did you mean 'gpus_per_node'[?]"),
    (("operations", "inter.alltoall"), {}, "inter.alltoall: unknown key; did you mean 'inter.all_to_all'[?]"),
    (("operations", "gemm", "beta_ms_per_byte"), 1.0, "gemm.beta_ms_per_byte: unknown key; did you mean"),
    (("operations", "gemm", "alpha_ms_per_rank"), 0.01, "gemm.alpha_ms_per_rank: unknown key"),
    (("operations", "gemm"), 0.1, "operations.gemm = 0.1: must be an object"),
    ((*A2A, "alpha_ms_per_rank"), -1, "alpha_ms_per_rank = -1: must be greater than or equal to 0"),
    ((*A2A, "ranks"), 1, "inter.all_to_all.ranks = 1: must be greater than or equal to 2"),
    ((*A2A, "ranks"), 1 << 21, "inter.all_to_all.ranks = 2097152: must be"),
    (A2A, GROWING, "all_to_all: ranks is missing, which alpha_ms_per_rank is relative to"),
    (("contention",), 0.5, "contention = 0.5: must be an object"),
    (("contention", "link"), 0.5, "contention.link: unknown key; did you mean 'links'[?]"),
    (("measured",), 3, "measured = .*: must be an object"),
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
    [("", "cannot be read as JSON: "), ("{'num_nodes': 2}", "cannot be read as JSON: "), ("[]", "must be an object")],
)
def test_a_file_that_is_no_json_or_no_object_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"mine\.json: {message}"):
        loaded(tmp_path, text)


# ---- what is checked beyond that


def checked(tmp_path: Path, *changes: tuple[tuple[str, ...], Any], of: str = "h100_400") -> tuple[Finding, ...]:
    """What is said of a cluster with changes; ``...`` takes a field away."""
    data = read_cluster_file(of)[1]
    for path, value in changes:
        data = with_change(data, path, value)
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    return check_cluster(str(file))


def test_all_that_is_wrong_is_said_at_once_each_by_path_and_value(tmp_path: Path) -> None:
    found = checked(tmp_path, (("num_nodes",), 0), (("gpus_per_nod",), 8), (("contention", "links"), "much"))
    assert [each.kind for each in found] == ["wrong"] * 3
    for said in ("num_nodes = 0: ", "gpus_per_nod: unknown key", 'contention.links = "much": '):
        assert sum(each.sentence.startswith(said) for each in found) == 1, said


FLOP, BYTE = "beta_ms_per_flop", "beta_ms_per_byte"


@pytest.mark.parametrize(
    ("path", "value", "kind", "sentence"),
    [
        ((*A2A, BYTE), 1e-8, "wrong", " = 1e-08: is 87.5 GB/s, more than the port carries, link_gb_per_s.inter = 50"),
        ((*A2A, BYTE), 2e-5, "implausible", " = 2e-05: is 0.0437 GB/s, under a hundredth of link_gb_per_s.inter = 50"),
        (("operations", "intra.all_gather", BYTE), 1e-7, "implausible", " is 8.75 GB/s, slower than operations.inter"),
        ((*GEMM, FLOP), 5e-13, "wrong", " = 5e-13: is 2000 TFLOP/s, more than the GPU computes, peak_tflops = 989"),
        ((*GEMM, FLOP), 1e-9, "implausible", " = 1e-09: is 1 TFLOP/s, under a hundredth of peak_tflops = 989"),
        ((*GEMM, FLOP), 0, "implausible", " = 0"),
        ((*A2A, BYTE), 0, "implausible", " = 0"),
        ((*GEMM, "alpha_ms"), 500, "implausible", " = 500: a start-up of over"),
        ((*A2A, "alpha_ms_per_rank"), 1.0, "implausible", " = 1: 8 ranks would take 8 ms"),
        (("operations", "softmax"), ..., "missing", " is missing, and every layer needs it"),
        (("operations", "inter.all_reduce"), ..., "missing", " is missing: data parallelism over that link cannot be"),
        (("operations", "order", "source"), ..., "missing", " is missing"),
        (("operations", "intra.all_reduce", "ranks"), ..., "missing", " is missing"),
        (("memory_gb",), ..., "missing", " is missing: whether a model fits cannot be said"),
        (("contention",), ..., "missing", " is missing"),
        (("source",), "", "missing", " is missing"),
    ],
)
def test_what_is_missing_or_cannot_well_be_is_one_sentence(
    tmp_path: Path, path: tuple[str, ...], value: Any, kind: str, sentence: str
) -> None:
    found = checked(tmp_path, (path, value))
    said = [each for each in found if each.sentence.startswith(".".join(path[:2])) and sentence in each.sentence]
    assert [each.kind for each in said] == [kind]


def test_a_single_node_needs_no_collectives_between_nodes(tmp_path: Path) -> None:
    without = [(("operations", f"inter.{each}"), ...) for each in ("all_to_all", "all_gather")]
    assert len(checked(tmp_path, *without)) == 2
    assert checked(tmp_path, *without, (("num_nodes",), 1)) == ()


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


def test_only_what_is_wrong_is_a_failure_and_no_file_or_json_is_a_wrong_argument(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["clusters", "--check", "h100_400", "testbed_a"]) == 0
    text = capsys.readouterr().out
    assert "h100_400: no problems found" in text
    assert "testbed_a: missing: peak_tflops is missing" in text
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(read_cluster_file("a100_200")[1] | {"num_nodes": "many"}), encoding="utf-8")
    assert cli.main(["clusters", "--check", "h100_400", str(file)]) == 1
    assert f'{file}: wrong: num_nodes = "many": must be an integer' in capsys.readouterr().out
    file.write_text("{", encoding="utf-8")
    for name, words in ((str(file), "cannot be read as JSON"), ("h100", "did you mean 'h100_400'")):
        assert cli.main(["clusters", "--check", name]) == 2
        assert words in capsys.readouterr().err
    file.write_text('{"model_type": "qwen3_moe", "num_experts": 128, "hidden_size": 2048}')
    assert cli.main(["clusters", "--check", str(file)]) == 1
    said = "wrong: this is a Hugging Face config, not a cluster file; give it to plan --hf-config"
    assert capsys.readouterr().out.splitlines() == [f"{file}: {said}"]
