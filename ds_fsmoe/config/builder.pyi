# SPDX-License-Identifier: Apache-2.0
# Written by `python -m ds_fsmoe.config.hints > ds_fsmoe/config/builder.pyi`, from the fields in config/blocks.py.
from typing import Any, Literal

class Written(dict[str, Any]):
    def as_dict(self) -> dict[str, Any]: ...

class Config(Written):
    class Gate(Written):
        def __init__(
            self,
            *,
            type: str = ...,
            top_k: int = ...,
            capacity_factor: float | None = ...,
            eval_capacity_factor: float = ...,
            min_capacity: int = ...,
            drop_tokens: bool = ...,
            drop_policy: Literal["probs", "position"] = ...,
            **options: Any,
        ) -> None:
            """
            Args:
                type: name of a gate: DeepSpeed's (topk), one of the package, or your own
                top_k: experts per token, from 1 to the layer's num_experts
                capacity_factor: slots per expert in training, relative to the mean; null: drop_tokens is false
                eval_capacity_factor: the same in evaluation
                min_capacity: least number of slots per expert
                drop_tokens: false: as many slots as the fullest expert needs
                drop_policy: which tokens a full expert keeps: the most probable or the first
            """

    class CommDtype(Written):
        def __init__(
            self,
            *,
            dispatch: Literal["model", "fp8"] = ...,
            combine: Literal["model", "fp8"] = ...,
        ) -> None:
            """
            Args:
                dispatch: dtype of rows sent to the experts, and of the gradients of these rows
                combine: dtype of rows returned by the experts, and of their gradients
            """

    class NumChunks(Written):
        def __init__(
            self,
            *,
            forward: int | Literal["auto"] | None = ...,
            backward: int | Literal["auto"] | None = ...,
            max: int = ...,
        ) -> None:
            """
            Args:
                forward: chunks in the forward phase
                backward: chunks in the backward phase
                max: largest number of chunks that auto chooses
            """

    class GradientPartition(Written):
        def __init__(
            self,
            *,
            mode: Literal["auto", "adaptive", "fixed_chunk", "micro_ops", "dense_only", "off"] | None = ...,
            solver: Literal["dp", "de"] = ...,
            chunk_bytes: int = ...,
            collective: Literal["auto", "all_reduce", "reduce_scatter"] | None = ...,
            levels: Literal["auto", 1, 2] | None = ...,
            gather_parameters: Literal["auto", "overlapped", "at_end"] | None = ...,
            accumulate: Literal["auto", "before_sum", "after_sum"] | None = ...,
            all_used: bool = ...,
        ) -> None:
            """
            Args:
                mode: when gradients are reduced; auto: by the schedule, off: by DeepSpeed
                solver: with autotune: how slices of mode adaptive are chosen, by a dynamic program or by evolution
                chunk_bytes: slice size of fixed_chunk, of micro_ops, and of all-to-alls with the schedule lina (there
                    30000000 if left out)
                collective: which ranks get a sum: all of them, or each the part that it updates; auto: the latter at
                    ZeRO 1 and 2, except in mode micro_ops
                levels: 2: reduce inside each node, then between nodes; auto: the faster one, as measured
                gather_parameters: when updated parameters are gathered at ZeRO 1 and 2: during the next forward or at
                    the end of the step; auto: the former where ds_fsmoe reduces the gradients
                accumulate: ZeRO 2 with gradient accumulation: before_sum adds micro-batches on each rank (memory for
                    all gradients) and reduces once a step, after_sum reduces each, as DeepSpeed does; auto: after_sum,
                    and before_sum on a GPU with enough memory
                all_used: true: every parameter gets one gradient in every backward, so ranks need not check for late
                    ones
            """

    class Autotune(Written):
        def __init__(
            self,
            *,
            enabled: bool | Literal["auto"] | None = ...,
            details: bool = ...,
            cache_dir: str | None = ...,
            trials: int = ...,
            watch_every: int = ...,
            drift_threshold: float = ...,
            retune_on_drift: bool = ...,
        ) -> None:
            """
            Args:
                enabled: measure and choose how layers run; true: at once; auto: after ten steps, if there is something
                    to gain; false: never
                details: log all measurements, and explanations behind log lines
                cache_dir: folder where rank 0 keeps measurements
                trials: steps of training with each of the best plans; 1: one step with each of the best three; 0: take
                    the plan that is predicted to be fastest
                watch_every: compare every n-th step with its prediction; 0: never
                drift_threshold: share by which a step may differ from its prediction
                retune_on_drift: measure again if steps no longer match the prediction
            """

    class Topology(Written):
        def __init__(
            self,
            *,
            ranks_per_node: int | Literal["auto"] | None = ...,
        ) -> None:
            """
            Args:
                ranks_per_node: ranks per host
            """

    class Trace(Written):
        def __init__(
            self,
            *,
            enabled: bool = ...,
            start_step: int = ...,
            num_steps: int = ...,
            path: str = ...,
            cluster: str | None = ...,
        ) -> None:
            """
            Args:
                enabled: write a trace
                start_step: first traced step
                num_steps: number of traced steps
                path: folder for the trace files; default: trace inside the folder of record
                cluster: cluster for predicted times in the trace, next to the measured ones: a name or a JSON file
            """

    class Record(Written):
        def __init__(
            self,
            *,
            dir: str | None = ...,
            stop_after: int = ...,
            stop_after_settled: int = ...,
        ) -> None:
            """
            Args:
                dir: folder for the record, the same on every rank; an older record in it is replaced
                stop_after: stop after this many optimizer steps; 0: never
                stop_after_settled: stop this many optimizer steps after the autotuner has chosen; 0: never
            """

    class Routing(Written):
        def __init__(
            self,
            *,
            record: str | None = ...,
            weights: bool = ...,
            every: int = ...,
            replay: str | None = ...,
        ) -> None:
            """
            Args:
                record: folder where each rank records the experts of its tokens
                weights: record the weights as well
                every: record every n-th optimizer step
                replay: folder or packed file of a recording that training replays
            """

    class Placement(Written):
        def __init__(
            self,
            *,
            policy: str = ...,
            spare_experts: int = ...,
            every: int = ...,
            moves_per_step: int = ...,
            break_even_within: int = ...,
            file: str | None = ...,
            profile_paths: bool = ...,
        ) -> None:
            """
            Args:
                policy: off, balanced, lina (chooses ep_size at the start), or your own function as package.module.name
                spare_experts: ignored: experts had replicas in version 0.2.0
                every: optimizer steps between decisions; loads are measured over them
                moves_per_step: expert swaps per step, over all layers
                break_even_within: largest number of optimizer steps until a move breaks even
                file: initial placement, a file written by engine.fsmoe.placement.save
                profile_paths: count which experts follow which, for ds_fsmoe.inference: up to 4096 tokens of every 16th
                    forward
            """

    class Checkpoint(Written):
        def __init__(
            self,
            *,
            trusted: list[str] = ...,
        ) -> None:
            """
            Args:
                trusted: classes that checkpoint files may contain, as package.module.Name
            """

    class Debug(Written):
        def __init__(
            self,
            *,
            check_every: int = ...,
            hang_timeout_s: float = ...,
            check_experts: bool = ...,
            check_results: bool = ...,
            check_router: bool = ...,
        ) -> None:
            """
            Args:
                check_every: compare plans across ranks every n steps; 0: at the start only
                hang_timeout_s: seconds without progress after which the stacks are written and the job ends
                check_experts: check at the first training forward that experts are row-wise
                check_results: find the expert that returns nan or infinity for finite numbers
                check_router: stop all ranks if a router's input has nan or infinity
            """

    Wires = CommDtype  # its name in version 0.2.0

    def __init__(
        self,
        *,
        enabled: bool = ...,
        schedule: Literal[
            "deepspeed", "tutel", "tutel_improved", "pipemoe_lina", "lina", "fsmoe_no_iio", "fsmoe", "best"
        ] = ...,
        gate: Config.Gate | dict[str, Any] | str | None = ...,
        order: str | None = ...,
        alltoall: str | None = ...,
        dispatch: Literal["auto", "unpadded", "padded"] | None = ...,
        comm_dtype: Config.CommDtype | dict[str, Any] | Literal["model", "fp8"] = ...,
        ep_size: int | Literal["auto"] | None = ...,
        sequence_length: int | Literal["auto"] | None = ...,
        expert_tensor_parallel_size: int = ...,
        num_chunks: Config.NumChunks | dict[str, Any] | int | Literal["auto"] | None = ...,
        gradient_partition: Config.GradientPartition | dict[str, Any] = ...,
        autotune: Config.Autotune | dict[str, Any] | bool | Literal["auto"] = ...,
        topology: Config.Topology | dict[str, Any] = ...,
        overlap: bool = ...,
        two_batch_overlap: Literal["auto", "on", "off"] = ...,
        two_batch_blocks: list[str] = ...,
        max_ctas: int | Literal["auto"] | None = ...,
        recompute: bool = ...,
        deterministic: bool = ...,
        ops: Literal["auto", "plain", "reference", "required"] | None = ...,
        hooks: list[str] = ...,
        plugins: list[str] = ...,
        metrics: Literal["off", "brief", "detailed"] = ...,
        metrics_every: int = ...,
        trace: Config.Trace | dict[str, Any] | bool = ...,
        record: Config.Record | dict[str, Any] = ...,
        routing: Config.Routing | dict[str, Any] = ...,
        placement: Config.Placement | dict[str, Any] | str = ...,
        checkpoint: Config.Checkpoint | dict[str, Any] = ...,
        debug: Config.Debug | dict[str, Any] = ...,
    ) -> None:
        """
        Args:
            enabled: false: exactly stock DeepSpeed
            schedule: order and overlap of a layer's communication and computation
            gate: routing; left out: each layer keeps its own gate
            order: layout of rows: auto (by the gate), or a name
            alltoall: all-to-all algorithm: auto (as measured), or a name
            dispatch: unpadded: send the rows that tokens chose; padded: send as many slots as the fullest expert has;
                auto: unpadded where nothing is dropped, else padded until autotune finds unpadded faster
            comm_dtype: dtype of rows in the all-to-alls: model (the layer's own), or fp8 (8-bit with a scale per row)
            ep_size: ranks that share the experts of a Hugging Face model; auto: as predicted to be fastest for
                sequence_length or for what the last run saw, else the largest divisor of the experts inside a node.
                deepspeed.moe.layer.MoE has its own
            sequence_length: tokens of one sample in training, padding included, for the choice of ep_size; auto: not
                known
            expert_tensor_parallel_size: ranks that share one expert, along its hidden width
            num_chunks: number of chunks into which the tokens of a layer are split
            gradient_partition: how dense gradients are sliced and when they are sent
            autotune: measuring this cluster and choosing numbers of chunks from it
            topology: nodes of the ranks
            overlap: false: one lane and one task after another, as a reference
            two_batch_overlap: two-batch overlap: split each batch in two, and compute one part while the tokens of the
                other are sent; auto: try it with the other plans, on: always where possible
            two_batch_blocks: class names of the blocks that run in two-batch overlap; default: the elements of the
                model's module lists
            max_ctas: most thread blocks of a collective on NCCL; auto: NCCL's choice
            recompute: keep only the input of experts, and compute the rest again in the backward
            deterministic: reproducible rounding: no decision by timings, no sum in order of arrival
            ops: compiled ops; auto: if available, required: stop without them; plain: torch operators; reference: slow
            hooks: callback classes, as dotted names
            plugins: modules with your own gates, orders or all-to-alls, imported first
            metrics: metrics for DeepSpeed's monitors: brief (sums over layers) or detailed (each layer as well)
            metrics_every: optimizer steps between two reports to monitors
            trace: a timeline of chosen steps
            record: the data that ``ds_fsmoe report`` shows of a run. It works with ``enabled`` false too
            routing: recording and replay of the experts that tokens choose
            placement: which ranks hold which experts, and when experts move
            checkpoint: limits for reading untrusted checkpoint files
            debug: checks during training
        """
