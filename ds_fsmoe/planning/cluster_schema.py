# SPDX-License-Identifier: Apache-2.0
"""Lists the fields of a cluster's file with their meaning. :mod:`~ds_fsmoe.planning.cluster` checks files by it, and
editors read it as a JSON schema.

``python -m ds_fsmoe.planning.cluster_schema > ds_fsmoe/planning/clusters/cluster.schema.json`` writes the schema that
is in the package.
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
    """Return the name of the field with an operation's slope."""
    return f"beta_ms_per_{ALL_UNITS[operation]}"


class _Operation(StrictShape):
    alpha_ms: _AtLeast0 = Field(description="start-up time, in milliseconds")
    source: _Text = Field("", description="source of the numbers, or a note that they were not measured")


class _Collective(_Operation):
    model_config = ConfigDict(json_schema_extra={"dependentRequired": {each: ["ranks"] for each in GROWTH}})

    ranks: _Several | None = Field(None, description="size of the group")
    alpha_ms_per_rank: _AtLeast0 = Field(0.0, description="milliseconds per further rank: steps of a ring, messages")
    alpha_ms_per_doubling: _AtLeast0 = Field(
        0.0, description="milliseconds per doubling of the ranks: levels of a tree"
    )

    @model_validator(mode="after")
    def _counts_from_ranks(self) -> _Collective:
        if self.ranks is None and (growth := [each for each in GROWTH if each in self.model_fields_set]):
            raise ValueError(f"ranks is missing, which {' and '.join(growth)} is relative to")
        return self


@functools.cache
def _cost(base: type[StrictShape], unit: str) -> type[BaseModel]:
    slope = (_AtLeast0, Field(description=f"milliseconds per {unit}"))
    return create_model(f"{base.__name__[1:]}Per{unit.title()}", __base__=base, **{f"beta_ms_per_{unit}": slope})


_LinkRates = create_model("LinkRates", __base__=StrictShape, **dict.fromkeys(LINKS, (_Above0, None)))
_Operations = create_model(
    "Operations",
    __base__=StrictShape,
    **{name: (_cost(_Collective if "." in name else _Operation, unit), None) for name, unit in ALL_UNITS.items()},
)


class Slowing(StrictShape):
    """``contention``: how lanes slow each other down."""

    links: _AtLeast0 = Field(0.0, description="kappa: slowdown of a transfer while both links are busy")
    compute: _AtLeast0 = Field(0.0, description="slowdown of computation while a link is busy")
    traffic: _AtLeast0 = Field(0.0, description="slowdown of a transfer during computation")
    source: _Text = Field("", description="source of the numbers")


class ClusterFile(StrictShape):
    """Costs of a cluster, for ds_fsmoe plan."""

    model_config = ConfigDict(populate_by_name=False)  # its_schema is no word of the file

    name: _Text = Field("", description="name; default: that of the file")
    source: _Text = Field("", description="description of the cluster and the source of its numbers")
    num_nodes: _Count = Field(description="number of nodes")
    gpus_per_node: _Count = Field(description="GPUs per node")
    gpu: _Text = Field("", description="name of the GPU")
    memory_gb: _Above0 = Field(None, description="memory of a GPU in GB, as sold")
    dtype: Literal["fp32", "bf16", "fp16", "fp8"] | None = Field(None, description="dtype of the computation costs")
    peak_tflops: _Above0 = Field(
        None,
        description="peak of a GPU in that dtype, in 10^12 floating-point operations per second",
    )
    link_gb_per_s: _LinkRates = Field(
        None,
        description="peak of a GPU's share of the links in one direction, in 10^9 bytes per second",
    )
    contention: Slowing = Field(None, description="how lanes slow each other down; default: not at all")
    host_ms: _AtLeast0 = Field(0.0, description="milliseconds of the host to launch one operation")
    layer_wait_ms: _AtLeast0 = Field(
        0.0, description="milliseconds that a GPU waits for the host in each phase of a layer with experts"
    )
    operations: _Operations = Field(description="operation -> cost, alpha + size x beta")
    measured: dict = Field(None, description="raw data of the numbers; not read")
    date: _Text = Field("", description="date of the measurement, as 2026-11-25")
    contributed_by: _Text = Field("", description="person or team responsible for the numbers")
    its_schema: _Text = Field("", alias="$schema", description="path of this schema, for editors")


def schema_of_clusters() -> dict[str, Any]:
    """Return the JSON schema of a cluster's file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | ClusterFile.model_json_schema()


if __name__ == "__main__":
    print(json.dumps(schema_of_clusters(), indent=2))
