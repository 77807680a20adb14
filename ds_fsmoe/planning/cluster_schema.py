# SPDX-License-Identifier: Apache-2.0
"""Lists what a cluster's file may say: every field with its meaning, by which it is read and which editors get as a
JSON schema.

``python -m ds_fsmoe.planning.cluster_schema > ds_fsmoe/planning/clusters/cluster.schema.json`` writes the one that
comes along.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from ds_fsmoe.shapes import StrictShape
from ds_fsmoe.untrusted import MOST_RANKS

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
GROWTH = ("alpha_ms_per_rank", "alpha_ms_per_doubling")
"""How the start-up of a collective grows with its ranks; needs ``ranks``."""

_AtLeast0 = Annotated[float, Field(ge=0)]
_Above0 = Annotated[float, Field(gt=0)]
_Count = Annotated[int, Field(ge=1, le=MOST_RANKS)]
_Several = Annotated[int, Field(ge=2, le=MOST_RANKS)]
_Text = Annotated[str, BeforeValidator(lambda value: f"{value}")]


def slope_of(operation: str) -> str:
    """Return the name of the field of an operation's slope."""
    return f"beta_ms_per_{ALL_UNITS[operation]}"


class _Operation(StrictShape):
    alpha_ms: _AtLeast0 = Field(description="the start-up, in milliseconds")
    source: _Text = Field("", description="where the numbers come from, or that they were not measured")


class _Collective(_Operation):
    model_config = ConfigDict(json_schema_extra={"dependentRequired": {each: ["ranks"] for each in GROWTH}})

    ranks: _Several | None = Field(None, description="the size of the group that it is of")
    alpha_ms_per_rank: _AtLeast0 = Field(
        0.0, description="milliseconds by which every further rank makes it longer: steps of a ring, messages"
    )
    alpha_ms_per_doubling: _AtLeast0 = Field(
        0.0, description="milliseconds by which twice as many ranks make it longer: levels of a tree"
    )

    @model_validator(mode="after")
    def _counts_from_ranks(self) -> _Collective:
        if self.ranks is None and (growth := [each for each in GROWTH if each in self.model_fields_set]):
            raise ValueError(f"ranks is missing, and {' and '.join(growth)} counts from there")
        return self


@functools.cache
def _cost(base: type[StrictShape], unit: str) -> type[BaseModel]:
    slope = (_AtLeast0, Field(description=f"the milliseconds of each {unit}"))
    return create_model(f"{base.__name__[1:]}Per{unit.title()}", __base__=base, **{f"beta_ms_per_{unit}": slope})


_LinkRates = create_model("LinkRates", __base__=StrictShape, **dict.fromkeys(LINKS, (_Above0, None)))
_Operations = create_model(
    "Operations",
    __base__=StrictShape,
    **{name: (_cost(_Collective if "." in name else _Operation, unit), None) for name, unit in ALL_UNITS.items()},
)


class Slowing(StrictShape):
    """``contention``: how lanes slow each other down."""

    links: _AtLeast0 = Field(0.0, description="kappa: how much longer a transfer takes while both links are busy")
    compute: _AtLeast0 = Field(0.0, description="how much longer computation takes while a link is busy")
    traffic: _AtLeast0 = Field(0.0, description="how much longer a transfer takes while something is computed")
    source: _Text = Field("", description="where the numbers come from")


class ClusterFile(StrictShape):
    """Costs of a cluster, for ds_fsmoe plan."""

    model_config = ConfigDict(populate_by_name=False)  # its_schema is no word of the file

    name: _Text = Field("", description="the name; without it, that of the file")
    source: _Text = Field("", description="what the cluster is, and where its numbers come from")
    num_nodes: _Count = Field(description="the number of nodes")
    gpus_per_node: _Count = Field(description="the GPUs of a node")
    gpu: _Text = Field("", description="the name of the GPU")
    memory_gb: _Above0 = Field(None, description="the memory of a GPU in GB, as it is sold")
    dtype: Literal["fp32", "bf16", "fp16", "fp8"] | None = Field(
        None, description="the type of numbers that the costs of computing hold for"
    )
    peak_tflops: _Above0 = Field(
        None,
        description="what a GPU computes in that type at the most, in 10^12 floating-point operations a second",
    )
    link_gb_per_s: _LinkRates = Field(
        None,
        description="what a GPU's share of the links' ports carries one way at the most, in 10^9 bytes a second",
    )
    contention: Slowing = Field(None, description="how lanes slow each other down; without it, not at all")
    host_ms: _AtLeast0 = Field(0.0, description="milliseconds that the host takes to launch one operation")
    layer_wait_ms: _AtLeast0 = Field(
        0.0, description="milliseconds that a GPU waits for the host in each phase of a layer with experts"
    )
    operations: _Operations = Field(description="operation -> its cost, alpha + size x beta")
    measured: dict = Field(None, description="the data from which the rest was made; not read")
    date: _Text = Field("", description="when the numbers were taken, as 2026-11-25")
    contributed_by: _Text = Field("", description="who vouches for them")
    its_schema: _Text = Field("", alias="$schema", description="the path of this schema, for editors")


def schema_of_clusters() -> dict[str, Any]:
    """Return the JSON schema of a cluster's file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | ClusterFile.model_json_schema()


if __name__ == "__main__":
    print(json.dumps(schema_of_clusters(), indent=2))
