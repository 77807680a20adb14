# SPDX-License-Identifier: Apache-2.0
"""``ds_fsmoe clusters``: everything that is wrong with a file in one go, what it lacks, and what hardware cannot do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ds_fsmoe import cli
from ds_fsmoe.offline.plan.cluster_check import Finding, check_cluster, gb_per_s
from ds_fsmoe.planning.cluster import Operation, names, read_cluster_file
from ds_fsmoe.planning.cost import LinearCost
from tests.planning.changed import with_change


def checked(tmp_path: Path, *changes: tuple[tuple[str, ...], Any], of: str = "h100_400") -> tuple[Finding, ...]:
    """What is said of a cluster with changes; ``...`` takes a field away."""
    data = read_cluster_file(of)[1]
    for path, value in changes:
        data = with_change(data, path, value)
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    return check_cluster(str(file))


@pytest.mark.parametrize("name", names())
def test_nothing_is_wrong_or_implausible_with_a_cluster_of_the_package(name: str) -> None:
    assert {each.kind for each in check_cluster(name)} <= {"missing"}
    if not name.startswith("testbed"):
        assert check_cluster(name) == ()


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
