# SPDX-License-Identifier: Apache-2.0
"""The fields of the ``"fsmoe"`` block of ds_config.json, what they may hold, and their defaults.

Every default means "the best that exists by now". What a field means together with others is checked in ``config.py``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core.core_schema import CoreSchema, no_info_before_validator_function

Auto = Literal["auto"]


class _NullIsAuto:
    """Marks a field that takes ``null`` for "auto". In a DeepSpeed config "auto" is a word of Accelerate's too, which
    gives it another meaning, so it can be avoided."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_before_validator_function(lambda value: "auto" if value is None else value, handler(source))

    def __get_pydantic_json_schema__(self, of: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(of), {"type": "null"}]}


MOST_CHUNKS = 256
"""The planner plans with no more chunks than this."""
Degree = Annotated[Annotated[int, Field(ge=1, le=MOST_CHUNKS)] | Auto, _NullIsAuto()]
Count = Annotated[Annotated[int, Field(ge=1)] | Auto, _NullIsAuto()]
ThreadBlocks = Annotated[Annotated[int, Field(ge=1, le=64)] | Auto, _NullIsAuto()]
Part = Annotated[str, _NullIsAuto()]


class _Block(BaseModel):
    # Strict: "2" is not 2 and 1 is not true; a config says what it means.
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class GateBlock(_Block):
    """``fsmoe.gate``. What is left out (``None`` here) stays as the layer's own gate has it; ``null`` is an error.

    A gate's own options stand beside these, and are held against the signature of its class.
    """

    model_config = ConfigDict(extra="allow")

    type: str = Field("topk", description="name of a gate on the shelf")
    k: int = Field(None, description="experts per token, between 1 and the layer's num_experts")
    capacity_factor: float = Field(None, gt=0, description="slots per expert while training, over the mean")
    eval_capacity_factor: float = Field(None, gt=0, description="the same while evaluating")
    min_capacity: int = Field(None, ge=0, description="slots per expert at the least")
    drop_tokens: bool = Field(None, description="false: as many slots as the fullest expert needs")
    drop_policy: Literal["probs", "position"] = Field(None, description="who stays in a full expert")

    def options(self) -> dict[str, Any]:
        """What a user wrote for the gate."""
        return {name: getattr(self, name) for name in self.model_fields_set - {"type"}}


class PipelineDegreeBlock(_Block):
    """``fsmoe.pipeline_degree``: into how many chunks the tokens of a layer are cut."""

    forward: Degree = Field("auto", description="chunks in the forward phase")
    backward: Degree = Field("auto", description="chunks in the backward phase")
    max: int = Field(16, ge=1, le=MOST_CHUNKS, description="the largest degree that auto may choose")


class GradientPartitionBlock(_Block):
    """``fsmoe.gradient_partition``: how dense gradients are sliced and when they travel."""

    mode: Annotated[Literal["auto", "adaptive", "fixed_chunk", "dense_only", "off"], _NullIsAuto()] = Field(
        "auto", description="when gradients travel; auto: as the schedule has it, off: DeepSpeed's own reduction"
    )
    solver: Literal["dp", "de"] = Field("dp", description="how adaptive slices are placed")
    chunk_bytes: int = Field(31457280, ge=1, description="slice size of fixed_chunk")
    all_used: bool = Field(
        False, description="every parameter gets its gradient once in every backward: ranks need not look for late ones"
    )


class AutotuneBlock(_Block):
    """``fsmoe.autotune``: measuring this cluster and choosing degrees from it."""

    enabled: bool = Field(False, description="measure after the first training forward, and choose degrees by it")
    cache_dir: str | None = Field(None, description="folder in which rank 0 keeps measurements")
    trials: int = Field(3, ge=0, description="steps to train with each of the best few plans; 0: as predicted")
    watch_every: int = Field(10, ge=0, description="compare every n-th step with what was predicted; 0: never")
    drift_threshold: float = Field(0.25, gt=0, description="by which share of it a step may differ from the prediction")
    retune_on_drift: bool = Field(False, description="measure again when steps no longer match the prediction")


class TopologyBlock(_Block):
    """``fsmoe.topology``."""

    ranks_per_node: Count = Field("auto", description="ranks that share a host")


class TraceBlock(_Block):
    """``fsmoe.trace``: a timeline of chosen steps."""

    enabled: bool = Field(False, description="write a trace")
    start_step: int = Field(10, ge=0, description="first traced step")
    num_steps: int = Field(3, ge=1, description="how many steps are traced")
    path: str = Field("fsmoe_trace", description="folder of the trace files")
    cluster: str | None = Field(None, description="what it should take, from a cluster's name or its JSON file")


class RecordBlock(_Block):
    """``fsmoe.record``: what ``ds_fsmoe report`` shows of a run. It works with ``enabled`` false too."""

    dir: str | None = Field(None, description="folder for it, the same on every rank; what it has of a run is replaced")
    stop_after: int = Field(0, ge=0, description="end the job after so many optimizer steps; 0: never")


class CheckpointBlock(_Block):
    """``fsmoe.checkpoint``: what is read from files that somebody may have changed."""

    trusted: list[str] = Field([], description="classes, as package.module.Name, that files of checkpoints may hold")


class DebugBlock(_Block):
    """``fsmoe.debug``."""

    check_every: int = Field(0, ge=0, description="compare plans over ranks every n steps; 0: at start only")
    hang_timeout_s: float = Field(300, gt=0, description="write what each rank was doing after this long")
    check_experts: bool = Field(False, description="try at the first training forward whether experts are row-wise")
    check_results: bool = Field(False, description="find the expert that makes nan or infinity of finite numbers")
    check_router: bool = Field(False, description="stop all ranks at nan or infinity in a router's input")


class FSMoEBlock(_Block):
    """The whole block."""

    enabled: bool = Field(False, description="false is exactly stock DeepSpeed")
    schedule: Literal["deepspeed", "tutel", "tutel_improved", "pipemoe_lina", "fsmoe_no_iio", "fsmoe", "best"] = "best"
    gate: GateBlock | None = Field(None, description="left out: each layer keeps its own gate")
    order: Part = Field("auto", description="name of an order on the shelf")
    alltoall: Part = Field("auto", description="name of an all-to-all on the shelf")
    esp_size: int = Field(1, ge=1, description="ranks that share one expert's hidden width")
    pipeline_degree: PipelineDegreeBlock = PipelineDegreeBlock()
    gradient_partition: GradientPartitionBlock = GradientPartitionBlock()
    solver: Literal["exact", "slsqp"] = Field("exact", description="how degrees are searched")
    autotune: AutotuneBlock = AutotuneBlock()
    topology: TopologyBlock = TopologyBlock()
    overlap: bool = Field(True, description="false: one lane, blocking")
    max_ctas: ThreadBlocks = Field(
        16, description="thread blocks that a collective of a link may take on NCCL; auto: as many as NCCL likes"
    )
    recompute: bool = Field(False, description="recompute expert inputs instead of saving them")
    deterministic: bool = Field(
        False,
        description="every run rounds alike: nothing is decided by a clock, nothing added up in the order of arrival",
    )
    ops: Annotated[Literal["auto", "reference", "required"], _NullIsAuto()] = Field(
        "auto", description="compiled ops or plain torch"
    )
    hooks: list[str] = Field([], description="callbacks by dotted name")
    plugins: list[str] = Field([], description="modules with parts of your own, imported before parts are looked up")
    metrics: Literal["off", "brief", "detailed"] = Field(
        "brief", description="what DeepSpeed's monitors are told: sums over layers, and of each layer too if detailed"
    )
    metrics_every: int = Field(10, ge=1, description="optimizer steps; the others are not looked at")
    trace: TraceBlock = TraceBlock()
    record: RecordBlock = RecordBlock()
    checkpoint: CheckpointBlock = CheckpointBlock()
    debug: DebugBlock = DebugBlock()
