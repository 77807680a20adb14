# SPDX-License-Identifier: Apache-2.0
"""The JSON schema of clusters' files: it is the one of this version, and refuses what the reader refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from ds_fsmoe.planning import cluster as clusters
from ds_fsmoe.planning.cluster import names, read_cluster_file
from ds_fsmoe.planning.cluster_schema import ALL_UNITS, ClusterFile, schema_of_clusters
from ds_fsmoe.shapes import wrong_in
from tests.planning.changed import with_change

FILE = Path(clusters.__file__).parent / "clusters" / "cluster.schema.json"


def refuses(data: Any) -> bool:
    return not Draft202012Validator(schema_of_clusters()).is_valid(data)


def test_the_schema_beside_the_clusters_is_of_this_version() -> None:
    assert json.loads(FILE.read_text(encoding="utf-8")) == schema_of_clusters()


def test_every_field_says_what_it_is() -> None:
    found = schema_of_clusters()
    described = {**found["properties"], **found["$defs"]["Slowing"]["properties"]}
    costs = [each["properties"] for name, each in found["$defs"].items() if "Per" in name]
    assert len(costs) == 4
    for each in (described, *costs):
        assert all(field["description"] for field in each.values())
    assert set(found["$defs"]["Operations"]["properties"]) == set(ALL_UNITS)


@pytest.mark.parametrize("name", names())
def test_the_schema_accepts_every_cluster_of_the_package(name: str) -> None:
    data = read_cluster_file(name)[1]
    assert not refuses(data)
    assert wrong_in(data, ClusterFile) == []


A = ("operations", "inter.all_to_all")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("num_nodes",), 0),
        (("num_nodes",), 2.5),
        (("num_nodes",), ...),
        (("operations",), ...),
        (("nodes",), 3),
        (("its_schema",), "cluster.schema.json"),
        (("memory_gb",), 0),
        (("memory_gb",), "80"),
        (("dtype",), "half"),
        (("host_ms",), -1),
        (("contention", "links"), -0.5),
        (("contention", "linked"), 0.5),
        (("link_gb_per_s",), {"between": 50}),
        ((*A, "alpha_ms"), ...),
        ((*A, "beta_ms_per_byte"), "fast"),
        ((*A, "beta_ms_per_flop"), 1.0),
        ((*A, "ranks"), 1),
        ((*A, "ranks"), 1 << 21),
        ((*A, "ranks"), ...),
        (("operations", "gemm", "ranks"), 8),
        (("operations", "gemms"), {}),
        (("operations", "order"), 3),
        (("measured",), []),
    ],
)
def test_the_schema_and_the_reader_refuse_the_same(path: tuple[str, ...], value: Any) -> None:
    data = with_change(read_cluster_file("h100_400")[1], path, value)
    assert refuses(data)
    assert wrong_in(data, ClusterFile)
