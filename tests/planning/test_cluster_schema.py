# SPDX-License-Identifier: Apache-2.0
"""The JSON schema of clusters' files: it is the one of this version, and refuses what the reader refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_fsmoe.planning import cluster as clusters
from ds_fsmoe.planning.cluster import errors_in, names, read_file
from ds_fsmoe.planning.cluster_schema import ALL_UNITS, FIELDS, operation_fields, schema
from tests.planning.changed import with_change

FILE = Path(clusters.__file__).parent / "clusters" / "cluster.schema.json"
TYPES: dict[str, Any] = {"string": str, "number": (int, float), "integer": int, "object": dict}


def refuses(data: Any, rule: dict[str, Any]) -> bool:
    """Whether a schema refuses data, for the words that ours uses."""
    known = {"description", "type", "enum", "minimum", "exclusiveMinimum", "properties", "additionalProperties"}
    assert set(rule) <= known | {"required", "dependentRequired", "$schema", "title"}
    if "enum" in rule and data not in rule["enum"]:
        return True
    if "type" in rule and (isinstance(data, bool) or not isinstance(data, TYPES[rule["type"]])):
        return True
    if "minimum" in rule and data < rule["minimum"]:
        return True
    if "exclusiveMinimum" in rule and data <= rule["exclusiveMinimum"]:
        return True
    if not isinstance(data, dict):
        return False
    properties = rule.get("properties", {})
    if any(each not in data for each in rule.get("required", ())):
        return True
    if rule.get("additionalProperties", True) is False and set(data) - set(properties):
        return True
    for name, needed in rule.get("dependentRequired", {}).items():
        if name in data and not set(needed) <= set(data):
            return True
    return any(refuses(data[name], properties[name]) for name in data if name in properties)


def test_the_schema_beside_the_clusters_is_of_this_version() -> None:
    assert json.loads(FILE.read_text(encoding="utf-8")) == schema()


def test_every_field_says_what_it_is() -> None:
    found = schema()["properties"]
    assert set(found) == set(FIELDS)
    assert all(each["description"] for each in found.values())
    for name, operation in found["operations"]["properties"].items():
        assert set(operation["properties"]) == set(operation_fields(name))
        assert all(each["description"] for each in operation["properties"].values())
    assert set(found["operations"]["properties"]) == set(ALL_UNITS)


@pytest.mark.parametrize("name", names())
def test_the_schema_accepts_every_cluster_of_the_package(name: str) -> None:
    data = read_file(name)[1]
    assert not refuses(data, schema())
    assert errors_in(data) == ()


A = ("operations", "inter.all_to_all")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("num_nodes",), 0),
        (("num_nodes",), 2.5),
        (("num_nodes",), ...),
        (("operations",), ...),
        (("nodes",), 3),
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
        ((*A, "ranks"), ...),
        (("operations", "gemm", "ranks"), 8),
        (("operations", "gemms"), {}),
        (("operations", "order"), 3),
        (("measured",), []),
    ],
)
def test_the_schema_and_the_reader_refuse_the_same(path: tuple[str, ...], value: Any) -> None:
    data = with_change(read_file("h100_400")[1], path, value)
    assert refuses(data, schema())
    assert errors_in(data)
