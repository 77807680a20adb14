# SPDX-License-Identifier: Apache-2.0
"""Lists what a cluster's file may say: every field with its meaning, from which the reader takes its names and editors
their JSON schema.

``python -m ds_fsmoe.planning.cluster_schema > ds_fsmoe/planning/clusters/cluster.schema.json`` writes the one that
comes along.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

LINKS = ("inter", "intra")
"""The links: ``inter`` is a group with one rank per node, ``intra`` one inside a node."""
COLLECTIVES = ("all_to_all", "all_reduce", "all_gather", "reduce_scatter")
UNITS: Mapping[str, str] = MappingProxyType(
    {f"{link}.{name}": "byte" for link in LINKS for name in COLLECTIVES}
    | {"gemm": "flop", "attention": "flop", "softmax": "score", "routing": "flop", "order": "byte"}
)
"""Operation -> the unit of its slope."""
OPTIONAL_UNITS: Mapping[str, str] = MappingProxyType({"elementwise": "byte", "grouped_gemm": "byte"})
"""Operations that a file may have besides, with the units of their slopes. Without ``elementwise``, norms, activations
and the loss take no time. Without ``grouped_gemm`` each expert's product starts by itself, at one rate."""
ALL_UNITS = MappingProxyType({**UNITS, **OPTIONAL_UNITS})
DTYPES = ("fp32", "bf16", "fp16", "fp8")

_AT_LEAST_0: dict[str, Any] = {"type": "number", "minimum": 0}
_ABOVE_0: dict[str, Any] = {"type": "number", "exclusiveMinimum": 0}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 1}
_TEXT: dict[str, Any] = {"type": "string"}

CONTENTION: Mapping[str, Any] = MappingProxyType(
    {
        "links": _AT_LEAST_0 | {"description": "kappa: how much longer a transfer takes while both links are busy"},
        "compute": _AT_LEAST_0 | {"description": "how much longer computation takes while a link is busy"},
        "traffic": _AT_LEAST_0 | {"description": "how much longer a transfer takes while something is computed"},
        "source": _TEXT | {"description": "where the numbers come from"},
    }
)
"""The fields of ``contention``."""
GROWTH: Mapping[str, Any] = MappingProxyType(
    {
        "alpha_ms_per_rank": _AT_LEAST_0
        | {"description": "milliseconds by which every further rank makes it longer: steps of a ring, messages"},
        "alpha_ms_per_doubling": _AT_LEAST_0
        | {"description": "milliseconds by which twice as many ranks make it longer: levels of a tree"},
    }
)
"""How the start-up of a collective grows with its ranks; needs ``ranks``."""
FIELDS: Mapping[str, Any] = MappingProxyType(
    {
        "name": _TEXT | {"description": "the name; without it, that of the file"},
        "source": _TEXT | {"description": "what the cluster is, and where its numbers come from"},
        "num_nodes": _COUNT | {"description": "the number of nodes"},
        "gpus_per_node": _COUNT | {"description": "the GPUs of a node"},
        "gpu": _TEXT | {"description": "the name of the GPU"},
        "memory_gb": _ABOVE_0 | {"description": "the memory of a GPU in GB, as it is sold"},
        "dtype": {"enum": list(DTYPES), "description": "the type of numbers that the costs of computing hold for"},
        "peak_tflops": _ABOVE_0
        | {"description": "what a GPU computes in that type at the most, in 10^12 floating-point operations a second"},
        "link_gb_per_s": {
            "type": "object",
            "description": "what a GPU's share of the links' ports carries one way at the most, in 10^9 bytes a second",
            "properties": dict.fromkeys(LINKS, _ABOVE_0),
            "additionalProperties": False,
        },
        "contention": {
            "type": "object",
            "description": "how lanes slow each other down; without it, not at all",
            "properties": dict(CONTENTION),
            "additionalProperties": False,
        },
        "host_ms": _AT_LEAST_0 | {"description": "milliseconds that the host takes to launch one operation"},
        "layer_wait_ms": _AT_LEAST_0
        | {"description": "milliseconds that a GPU waits for the host in each phase of a layer with experts"},
        "operations": {"type": "object", "description": "operation -> its cost, alpha + size x beta"},
        "measured": {"type": "object", "description": "the data from which the rest was made; not read"},
        "date": _TEXT | {"description": "when the numbers were taken, as 2026-11-25"},
        "contributed_by": _TEXT | {"description": "who vouches for them"},
        "$schema": _TEXT | {"description": "the path of this schema, for editors"},
    }
)
"""The fields of a file."""
NEEDED = ("num_nodes", "gpus_per_node", "operations")


def slope_of(operation: str) -> str:
    """Return the name of the field of an operation's slope."""
    return f"beta_ms_per_{ALL_UNITS[operation]}"


def operation_fields(operation: str) -> tuple[str, ...]:
    """Return the names of the fields of an operation."""
    return ("alpha_ms", slope_of(operation), "source", *(("ranks", *GROWTH) if "." in operation else ()))


def schema() -> dict[str, Any]:
    """Return the JSON schema of a cluster's file."""
    fields = {name: dict(each) for name, each in FIELDS.items()}
    fields["operations"] |= {
        "properties": {name: _operation(name) for name in ALL_UNITS},
        "additionalProperties": False,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Costs of a cluster, for ds_fsmoe plan",
        "type": "object",
        "properties": fields,
        "required": list(NEEDED),
        "additionalProperties": False,
    }


def _operation(name: str) -> dict[str, Any]:
    slope = slope_of(name)
    fields = {
        "alpha_ms": _AT_LEAST_0 | {"description": "the start-up, in milliseconds"},
        slope: _AT_LEAST_0 | {"description": f"the milliseconds of each {ALL_UNITS[name]}"},
        "source": _TEXT | {"description": "where the numbers come from, or that they were not measured"},
    }
    found: dict[str, Any] = {"type": "object", "required": ["alpha_ms", slope], "additionalProperties": False}
    if "." in name:
        fields["ranks"] = {"type": "integer", "minimum": 2, "description": "the size of the group that it is of"}
        fields |= GROWTH
        found["dependentRequired"] = {each: ["ranks"] for each in GROWTH}
    return found | {"properties": fields}


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
