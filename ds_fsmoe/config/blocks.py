# SPDX-License-Identifier: Apache-2.0
"""Defines the fields of the ``"fsmoe"`` block of ds_config.json, their types and defaults.

Every default means "the best that exists by now". ``reading.py`` checks combinations of fields. The engine, the layers
and the autotuner read the result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import NoneType
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import CoreSchema, no_info_before_validator_function

from ds_fsmoe.planning.workload import ALLTOALLS_OF_BEFORE
from ds_fsmoe.shapes import OldValues, StrictShape

# ---- how a field may be written

_WHOLE = BeforeValidator(lambda value: int(value) if type(value) is float and value.is_integer() else value)
"""Takes a whole number that JSON has as a float, such as 3e7."""
Int = Annotated[int, _WHOLE]


class NullIsAuto:
    """Marks a field that accepts ``null`` for "auto". Accelerate gives "auto" in a DeepSpeed config another meaning, so
    users can avoid the word."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_before_validator_function(lambda value: "auto" if value is None else value, handler(source))

    def __get_pydantic_json_schema__(self, of: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(of), {"type": "null"}]}


class OrAlone:
    """Marks a block that may be written as a single value: that of one of its fields, or of two with mostly equal
    values.

    Args:
        names: the fields.
        kinds: the Python types of such a value.
        words: the words for these types in an error, and their JSON schema.
    """

    def __init__(
        self, *names: str, kinds: tuple[type, ...], words: str, json_types: tuple[dict[str, Any], ...]
    ) -> None:
        self.names, self._kinds, self._words, self.json_types = names, kinds, words, json_types

    def _spelt_out(self, value: Any) -> Any:
        if type(value) in self._kinds:
            return dict.fromkeys(self.names, value)
        if isinstance(value, Mapping | BaseModel) or value is None:
            return value
        raise PydanticCustomError("model_type", "must be an object or {words}", {"words": self._words})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_before_validator_function(self._spelt_out, handler(source))

    def __get_pydantic_json_schema__(self, of: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(of), *self.json_types]}


SWITCH = OrAlone("enabled", kinds=(bool,), words="true or false", json_types=({"type": "boolean"},))
"""Marks a block that may be written as the value of its ``enabled``."""
AUTO_SWITCH = OrAlone(
    "enabled",
    kinds=(bool, str),
    words='"auto", true or false',
    json_types=({"type": "boolean"}, {"enum": ["auto"]}),
)
"""The same, which may be "auto"."""


def alone_in(field: FieldInfo) -> tuple[str, ...]:
    """Return the fields of the block in ``field`` that a single value in place of the block sets."""
    return next((each.names for each in field.metadata if isinstance(each, OrAlone)), ())


# ---- the fields

Auto = Literal["auto"]
MOST_CHUNKS = 256
"""The most chunks with which the planner plans."""
Degree = Annotated[Annotated[int, Field(ge=1, le=MOST_CHUNKS)] | Auto, _WHOLE, NullIsAuto()]
Count = Annotated[Annotated[int, Field(ge=1)] | Auto, _WHOLE, NullIsAuto()]
ThreadBlocks = Annotated[Annotated[int, Field(ge=1, le=64)] | Auto, _WHOLE, NullIsAuto()]
Part = Annotated[str, NullIsAuto()]


class GateBlock(StrictShape):
    """``fsmoe.gate``: which experts a token goes to.

    Options that are left out (``None`` here) keep the value of the layer's own gate; ``null`` is an error. A gate's own
    options are written next to these, and are checked against the signature of its class.
    """

    model_config = ConfigDict(extra="allow")

    type: str = Field(
        "topk", description="name of a gate: DeepSpeed's (topk), one of the package, or your own", examples=["mixtral"]
    )
    k: Int = Field(
        None, alias="top_k", description="experts per token, from 1 to the layer's num_experts", examples=[2]
    )
    capacity_factor: float = Field(
        None,
        gt=0,
        description="slots per expert in training, relative to the mean; null: drop_tokens is false",
        json_schema_extra={"type": ["number", "null"]},
        examples=[1.25],
    )
    eval_capacity_factor: float = Field(None, gt=0, description="the same in evaluation", examples=[2.0])
    min_capacity: Int = Field(None, ge=0, description="least number of slots per expert", examples=[4])
    drop_tokens: bool = Field(None, description="false: as many slots as the fullest expert needs", examples=[False])
    drop_policy: Literal["probs", "position"] = Field(
        None, description="which tokens a full expert keeps: the most probable or the first", examples=["probs"]
    )

    @model_validator(mode="before")
    @classmethod
    def _null_drops_nothing(cls, written: Any) -> Any:
        if not isinstance(written, Mapping) or written.get("capacity_factor", 0) is not None:
            return written
        factors = ("capacity_factor", "eval_capacity_factor")
        return {"drop_tokens": False} | {
            name: value for name, value in written.items() if name not in factors or value is not None
        }

    def options(self, names: Collection[str] = ("k",)) -> dict[str, Any]:
        """Return the options that a user has set for the gate, as keyword arguments.

        Args:
            names: the names of options in the gate's constructor; a user's gate may use ``top_k`` like the block.
        """
        options = {name: getattr(self, name) for name in self.model_fields_set - {"type"}}
        if "k" in options and "k" not in names and "top_k" in names:
            options["top_k"] = options.pop("k")
        return options


class PipelineDegreeBlock(StrictShape):
    """``fsmoe.num_chunks``: number of chunks into which the tokens of a layer are split."""

    forward: Degree = Field("auto", description="chunks in the forward phase", examples=[2])
    backward: Degree = Field("auto", description="chunks in the backward phase", examples=[2])
    max: Int = Field(16, ge=1, le=MOST_CHUNKS, description="largest number of chunks that auto chooses")

    @property
    def most(self) -> tuple[int, ...]:
        """Return the most chunks that the forward and the backward may have."""
        return tuple(self.max if each == "auto" else each for each in (self.forward, self.backward))


class GradientPartitionBlock(StrictShape):
    """``fsmoe.gradient_partition``: how dense gradients are sliced and when they are sent."""

    mode: Annotated[Literal["auto", "adaptive", "fixed_chunk", "micro_ops", "dense_only", "off"], NullIsAuto()] = Field(
        "auto", description="when gradients are reduced; auto: by the schedule, off: by DeepSpeed"
    )
    solver: Literal["dp", "de"] = Field(
        "dp",
        description=("with autotune: how slices of mode adaptive are chosen, by a dynamic program or by evolution"),
    )
    chunk_bytes: Int = Field(
        31457280,
        ge=1,
        description="slice size of fixed_chunk, of micro_ops, and of all-to-alls with the schedule lina (there "
        "30000000 if left out)",
    )
    collective: Annotated[Literal["auto", "all_reduce", "reduce_scatter"], NullIsAuto()] = Field(
        "auto",
        description="which ranks get a sum: all of them, or each the part that it updates; auto: the latter at "
        "ZeRO 1 and 2, except in mode micro_ops",
    )
    levels: Annotated[Literal["auto", 1, 2], NullIsAuto()] = Field(
        "auto",
        description="2: reduce inside each node, then between nodes; auto: the faster one, as measured",
    )
    gather_parameters: Annotated[Literal["auto", "overlapped", "at_end"], NullIsAuto()] = Field(
        "auto",
        description="when updated parameters are gathered at ZeRO 1 and 2: during the next forward or at the end "
        "of the step; auto: the former where ds_fsmoe reduces the gradients",
    )
    accumulate: Annotated[Literal["auto", "before_sum", "after_sum"], NullIsAuto()] = Field(
        "auto",
        description="ZeRO 2 with gradient accumulation: before_sum adds micro-batches on each rank (memory for all "
        "gradients) and reduces once a step, after_sum reduces each, as DeepSpeed does; auto: "
        "after_sum, and before_sum on a GPU with enough memory",
    )
    all_used: bool = Field(
        False,
        description=(
            "true: every parameter gets one gradient in every backward, so ranks need not check for late ones"
        ),
    )

    @property
    def asked_bytes(self) -> int | None:
        """Return the configured slice size; ``None`` if each mode uses its own."""
        return self.chunk_bytes if "chunk_bytes" in self.model_fields_set else None


CommDtype = Literal["model", "fp8"]


class CommDtypeBlock(StrictShape):
    """``fsmoe.comm_dtype``: dtype of rows between the ranks that share the experts."""

    dispatch: CommDtype = Field(
        "model", description=("dtype of rows sent to the experts, and of the gradients of these rows")
    )
    combine: CommDtype = Field("model", description="dtype of rows returned by the experts, and of their gradients")


class AutotuneBlock(StrictShape):
    """``fsmoe.autotune``: measuring this cluster and choosing numbers of chunks from it."""

    enabled: Annotated[bool | Auto, NullIsAuto()] = Field(
        "auto",
        description="measure and choose how layers run; true: at once; auto: after ten steps, if there is "
        "something to gain; false: never",
        examples=[True],
    )
    details: bool = Field(False, description="log all measurements, and explanations behind log lines")
    cache_dir: str | None = Field(None, description="folder where rank 0 keeps measurements", examples=["fsmoe_cache"])
    trials: Int = Field(
        3,
        ge=0,
        description="steps of training with each of the best plans; 1: one step with each of the best three; 0: take "
        "the plan that is predicted to be fastest",
    )
    watch_every: Int = Field(10, ge=0, description="compare every n-th step with its prediction; 0: never")
    drift_threshold: float = Field(0.25, gt=0, description="share by which a step may differ from its prediction")
    retune_on_drift: bool = Field(False, description="measure again if steps no longer match the prediction")


class TopologyBlock(StrictShape):
    """``fsmoe.topology``: nodes of the ranks."""

    ranks_per_node: Count = Field("auto", description="ranks per host", examples=[8])


class TraceBlock(StrictShape):
    """``fsmoe.trace``: a timeline of chosen steps."""

    enabled: bool = Field(False, description="write a trace")
    start_step: Int = Field(10, ge=0, description="first traced step")
    num_steps: Int = Field(3, ge=1, description="number of traced steps")
    path: str = Field(
        "fsmoe_trace", description=("folder for the trace files; default: trace inside the folder of record")
    )
    cluster: str | None = Field(
        None,
        description=("cluster for predicted times in the trace, next to the measured ones: a name or a JSON file"),
        examples=["testbed_a"],
    )


class RecordBlock(StrictShape):
    """``fsmoe.record``: the data that ``ds_fsmoe report`` shows of a run. It works with ``enabled`` false too."""

    dir: str | None = Field(
        None,
        description="folder for the record, the same on every rank; an older record in it is replaced",
        examples=["runs/one"],
    )
    stop_after: Int = Field(0, ge=0, description="stop after this many optimizer steps; 0: never")
    stop_after_settled: Int = Field(
        0, ge=0, description="stop this many optimizer steps after the autotuner has chosen; 0: never"
    )


class RoutingBlock(StrictShape):
    """``fsmoe.routing``: recording and replay of the experts that tokens choose."""

    record: str | None = Field(
        None, description="folder where each rank records the experts of its tokens", examples=["routes"]
    )
    weights: bool = Field(False, description="record the weights as well")
    every: Int = Field(1, ge=1, description="record every n-th optimizer step")
    replay: str | None = Field(
        None, description="folder or packed file of a recording that training replays", examples=["routes"]
    )


class PlacementBlock(StrictShape):
    """``fsmoe.placement``: placement of experts on the ranks where that makes steps shorter."""

    policy: str = Field(
        "off",
        description=("off, balanced, lina (chooses ep_size at the start), or your own function as package.module.name"),
        examples=["balanced"],
    )
    spare_experts: Int = Field(0, ge=0, description="ignored: experts had replicas in version 0.2.0")
    every: Int = Field(50, ge=1, description="optimizer steps between decisions; loads are measured over them")
    moves_per_step: Int = Field(2, ge=1, description="expert swaps per step, over all layers")
    pays_within: Int = Field(
        1000,
        ge=1,
        alias="break_even_within",
        description="largest number of optimizer steps until a move breaks even",
    )
    file: str | None = Field(
        None,
        description="initial placement, a file written by engine.fsmoe.placement.save",
        examples=["placement.json"],
    )
    profile_paths: bool = Field(
        False,
        description=(
            "count which experts follow which, for ds_fsmoe.inference: up to 4096 tokens of every 16th forward"
        ),
    )


class CheckpointBlock(StrictShape):
    """``fsmoe.checkpoint``: limits for reading untrusted checkpoint files."""

    trusted: list[str] = Field(
        [],
        description="classes that checkpoint files may contain, as package.module.Name",
        examples=[["my_package.Settings"]],
    )


class DebugBlock(StrictShape):
    """``fsmoe.debug``: checks during training."""

    check_every: Int = Field(0, ge=0, description="compare plans across ranks every n steps; 0: at the start only")
    hang_timeout_s: float = Field(
        300, gt=0, description=("seconds without progress after which the stacks are written and the job ends")
    )
    check_experts: bool = Field(False, description="check at the first training forward that experts are row-wise")
    check_results: bool = Field(False, description="find the expert that returns nan or infinity for finite numbers")
    check_router: bool = Field(False, description="stop all ranks if a router's input has nan or infinity")


Dispatch = Literal["auto", "unpadded", "padded"]
"""What is sent to the experts."""
DISPATCH_OF_BEFORE: Mapping[str, Dispatch] = {"rows": "unpadded", "slots": "padded"}
"""Value of ``dispatch`` in version 0.2.0 -> today's."""


class FSMoEBlock(StrictShape):
    """Represents the whole block."""

    enabled: bool = Field(False, description="false: exactly stock DeepSpeed", examples=[True])
    schedule: Literal[
        "deepspeed", "tutel", "tutel_improved", "pipemoe_lina", "lina", "fsmoe_no_iio", "fsmoe", "best"
    ] = Field("best", description="order and overlap of a layer's communication and computation")
    gate: Annotated[
        GateBlock | None,
        OrAlone("type", kinds=(str,), words="the name of a gate", json_types=({"type": "string"},)),
    ] = Field(None, description="routing; left out: each layer keeps its own gate", examples=[{"type": "mixtral"}])
    order: Part = Field("auto", description="layout of rows: auto (by the gate), or a name", examples=["einsum"])
    alltoall: Annotated[Part, OldValues(ALLTOALLS_OF_BEFORE)] = Field(
        "auto", description="all-to-all algorithm: auto (as measured), or a name", examples=["2dh"]
    )
    dispatch: Annotated[Dispatch, NullIsAuto(), OldValues(DISPATCH_OF_BEFORE)] = Field(
        "auto",
        description="unpadded: send the rows that tokens chose; padded: send as many slots as the fullest expert "
        "has; auto: unpadded where nothing is dropped, else padded until autotune finds unpadded faster",
    )
    wires: Annotated[
        CommDtypeBlock,
        OrAlone(
            *("dispatch", "combine"), kinds=(str,), words='"model" or "fp8"', json_types=({"enum": ["model", "fp8"]},)
        ),
    ] = Field(
        CommDtypeBlock(),
        alias="comm_dtype",
        description="dtype of rows in the all-to-alls: model (the layer's own), or fp8 (8-bit with a scale per row)",
        examples=[{"dispatch": "fp8"}],
    )
    ep_size: Count = Field(
        "auto",
        description="ranks that share the experts of a Hugging Face model; auto: as predicted to be fastest for "
        "sequence_length or for what the last run saw, else the largest divisor of the experts inside a node. "
        "deepspeed.moe.layer.MoE has its own",
        examples=[8],
    )
    sequence_length: Count = Field(
        "auto",
        description="tokens of one sample in training, padding included, for the choice of ep_size; auto: not known",
        examples=[4096],
    )
    esp_size: Int = Field(
        1,
        ge=1,
        alias="expert_tensor_parallel_size",
        description=("ranks that share one expert, along its hidden width"),
    )
    pipeline_degree: Annotated[
        PipelineDegreeBlock,
        OrAlone(
            *("forward", "backward"),
            kinds=(int, float, str, NoneType),
            words='a number or "auto"',
            json_types=({"type": "integer", "minimum": 1, "maximum": MOST_CHUNKS}, {"enum": ["auto", None]}),
        ),
    ] = Field(PipelineDegreeBlock(), alias="num_chunks", examples=[{"forward": 2, "backward": 4}])
    gradient_partition: GradientPartitionBlock = Field(GradientPartitionBlock(), examples=[{"mode": "adaptive"}])
    autotune: Annotated[AutotuneBlock, AUTO_SWITCH] = Field(AutotuneBlock(), examples=[{"enabled": True}])
    topology: TopologyBlock = Field(TopologyBlock(), examples=[{"ranks_per_node": 8}])
    overlap: bool = Field(True, description="false: one lane and one task after another, as a reference")
    split_batch: Literal["auto", "on", "off"] = Field(
        "auto",
        alias="two_batch_overlap",
        description="two-batch overlap: split each batch in two, and compute one part while the tokens of the "
        "other are sent; auto: try it with the other plans, on: always where possible",
    )
    split_blocks: list[str] = Field(
        [],
        alias="two_batch_blocks",
        description=(
            "class names of the blocks that run in two-batch overlap; default: the elements of the model's module lists"
        ),
        examples=[["MyBlock"]],
    )
    max_ctas: ThreadBlocks = Field(16, description="most thread blocks of a collective on NCCL; auto: NCCL's choice")
    recompute: bool = Field(
        False, description=("keep only the input of experts, and compute the rest again in the backward")
    )
    deterministic: bool = Field(
        False,
        description="reproducible rounding: no decision by timings, no sum in order of arrival",
    )
    ops: Annotated[Literal["auto", "plain", "reference", "required"], NullIsAuto()] = Field(
        "auto",
        description=(
            "compiled ops; auto: if available, required: stop without them; plain: torch operators; reference: slow"
        ),
        examples=["plain"],
    )
    hooks: list[str] = Field(
        [], description="callback classes, as dotted names", examples=[["ds_fsmoe.BFloat16Communication"]]
    )
    plugins: list[str] = Field(
        [],
        description="modules with your own gates, orders or all-to-alls, imported first",
        examples=[["my_package.my_parts"]],
    )
    metrics: Literal["off", "brief", "detailed"] = Field(
        "brief",
        description=("metrics for DeepSpeed's monitors: brief (sums over layers) or detailed (each layer as well)"),
    )
    metrics_every: Int = Field(10, ge=1, description="optimizer steps between two reports to monitors")
    trace: Annotated[TraceBlock, SWITCH] = Field(TraceBlock(), examples=[{"enabled": True}])
    record: RecordBlock = Field(RecordBlock(), examples=[{"dir": "runs/one"}])
    routing: RoutingBlock = Field(RoutingBlock(), examples=[{"record": "routes"}])
    placement: Annotated[
        PlacementBlock,
        OrAlone("policy", kinds=(str,), words="the name of a policy", json_types=({"type": "string"},)),
    ] = Field(
        PlacementBlock(),
        description="which ranks hold which experts, and when experts move",
        examples=[{"policy": "balanced"}],
    )
    checkpoint: CheckpointBlock = Field(CheckpointBlock(), examples=[{"trusted": ["my_package.Settings"]}])
    debug: DebugBlock = Field(DebugBlock(), examples=[{"check_router": True}])

    def alike(self) -> dict[str, Any]:
        """Return the part of the block that has to be equal on every rank."""
        own = {"trace": {"path"}, "autotune": {"cache_dir"}, "routing": {"record"}}
        found = self.model_dump(by_alias=True, exclude=own)
        # A size that is written is each mode's; left out, it is another for each.
        found["gradient_partition"]["chunk_bytes"] = self.gradient_partition.asked_bytes
        return found
