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
                type: stock's gate (topk), one of the package, or your own
                top_k: experts per token, between 1 and the layer's num_experts
                capacity_factor: slots per expert while training, over the mean; null: drop_tokens is false
                eval_capacity_factor: the same while evaluating
                min_capacity: slots per expert at the least
                drop_tokens: false: as many slots as the fullest expert needs
                drop_policy: who stays in a full expert: the likeliest or the first
            """

    class Wires(Written):
        def __init__(
            self,
            *,
            dispatch: Literal["model", "fp8"] = ...,
            combine: Literal["model", "fp8"] = ...,
        ) -> None:
            """
            Args:
                dispatch: to the experts, and of gradients back from them
                combine: from the experts, and of gradients to them
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
                max: the most chunks that auto may choose
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
                mode: when gradients travel; auto: as the schedule has it, off: DeepSpeed's own reduction
                solver: with autotune, adaptive slices by a dynamic program or by evolution
                chunk_bytes: slice size of fixed_chunk; of micro_ops, and of all-to-alls with the schedule lina, which
                    is 30000000 where this is left out
                collective: who gets a sum: all ranks, or each the part that it updates; auto: the latter at ZeRO 1 and
                    2, but for slices of micro_ops
                levels: 2: add up inside each node, then between nodes; auto: whichever is measured to be faster
                gather_parameters: when updated parameters travel at ZeRO 1 and 2: under the next forward or at the end
                    of the step; auto: the former where gradients are ours to reduce
                accumulate: at ZeRO 2 with gradient accumulation: add micro-batches up on each rank, in room for all
                    gradients, and sum over ranks once a step, or sum each as DeepSpeed does; auto: the latter, and the
                    former once a GPU is known to have the room
                all_used: every parameter gets its gradient once in every backward: ranks need not look for late ones
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
                enabled: measure, and choose by it how layers are run: true: at once; auto: after ten steps, where there
                    is something to gain; false: never
                details: log all that was measured, and not only what was chosen and why
                cache_dir: folder in which rank 0 keeps measurements
                trials: steps to train with each of the best few plans; 0: as predicted
                watch_every: compare every n-th step with what was predicted; 0: never
                drift_threshold: by which share of it a step may differ from the prediction
                retune_on_drift: measure again when steps no longer match the prediction
            """

    class Topology(Written):
        def __init__(
            self,
            *,
            ranks_per_node: int | Literal["auto"] | None = ...,
        ) -> None:
            """
            Args:
                ranks_per_node: ranks that share a host
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
                num_steps: how many steps are traced
                path: folder of the files; trace in that of a record
                cluster: what it should take, from a cluster's name or its JSON file
            """

    class Record(Written):
        def __init__(
            self,
            *,
            dir: str | None = ...,
            stop_after: int = ...,
        ) -> None:
            """
            Args:
                dir: folder for it, the same on every rank; what it has of a run is replaced
                stop_after: end the job after so many optimizer steps; 0: never
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
                record: folder in which each rank records the choices of its tokens
                weights: record the weights of choices, too
                every: optimizer steps from one that is recorded to the next
                replay: folder or packed file of recorded choices, by which training goes
            """

    class Placement(Written):
        def __init__(
            self,
            *,
            policy: str = ...,
            spare_experts: int = ...,
            every: int = ...,
            moves_per_step: int = ...,
            pays_within: int = ...,
            file: str | None = ...,
            profile_paths: bool = ...,
        ) -> None:
            """
            Args:
                policy: off, balanced, lina (chooses ep_size at start), or a function of your own as package.module.name
                spare_experts: read and ignored: experts had replicas in version 0.2.0
                every: optimizer steps of which loads are measured before each decision
                moves_per_step: exchanges of two experts in one step, over all layers
                pays_within: optimizer steps within which what is moved has to pay
                file: a placement to begin with, as engine.fsmoe.placement.save writes it
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
                trusted: classes, as package.module.Name, that files of checkpoints may hold
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
                check_every: compare plans over ranks every n steps; 0: at start only
                hang_timeout_s: seconds without progress: say where, and end
                check_experts: try at the first training forward whether experts are row-wise
                check_results: find the expert that makes nan or infinity of finite numbers
                check_router: stop all ranks at nan or infinity in a router's input
            """

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
        dispatch: Literal["auto", "rows", "slots"] | None = ...,
        wires: Config.Wires | dict[str, Any] | Literal["model", "fp8"] = ...,
        ep_size: int | Literal["auto"] | None = ...,
        expert_tensor_parallel_size: int = ...,
        num_chunks: Config.NumChunks | dict[str, Any] | int | Literal["auto"] | None = ...,
        gradient_partition: Config.GradientPartition | dict[str, Any] = ...,
        autotune: Config.Autotune | dict[str, Any] | bool | Literal["auto"] = ...,
        topology: Config.Topology | dict[str, Any] = ...,
        overlap: bool = ...,
        split_batch: Literal["auto", "on", "off"] = ...,
        split_blocks: list[str] = ...,
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
            enabled: false is exactly stock DeepSpeed
            schedule: in which order a layer's traffic and computation run, and what overlaps
            gate: left out: each layer keeps its own gate
            order: how rows are laid out: auto, as the gate is read, or a name
            alltoall: how rows travel: auto, as was measured, or a name
            dispatch: what travels: rows, as many as tokens have chosen an expert, or slots, as many as the fullest
                expert has; auto: rows where nothing is dropped
            wires: what rows are on their way: of the layer's own type (model), or 8-bit with a scale for each (fp8)
            ep_size: ranks over which the experts of a Hugging Face model are spread; auto: as many of a node as divide
                its experts. deepspeed.moe.layer.MoE has its own
            expert_tensor_parallel_size: ranks that share one expert's width
            num_chunks: into how many chunks the tokens of a layer are cut
            gradient_partition: how dense gradients are sliced and when they travel
            autotune: measuring this cluster and choosing numbers of chunks from it
            topology: where ranks lie
            overlap: false: one lane and one task after another, which is the reference
            split_batch: two halves of each batch take turns, and one computes while the tokens of the other travel:
                auto tries it where plans are tried, on does it wherever it can be done
            split_blocks: class names of the blocks to run by halves; none: the elements of the model's lists of modules
            max_ctas: thread blocks that a collective of a link may take on NCCL; auto: as many as NCCL likes
            recompute: keep only the input of experts; compute the rest again
            deterministic: every run rounds alike: nothing is decided by a clock, nothing added up in the order of
                arrival
            ops: compiled ops: auto: where they can be had, required: or stop; plain: torch's; reference: slow
            hooks: callbacks by dotted name
            plugins: modules with parts of your own, imported before parts are looked up
            metrics: what DeepSpeed's monitors are told: sums over layers, and of each layer too if detailed
            metrics_every: optimizer steps from one that monitors hear of to the next
            trace: a timeline of chosen steps
            record: what ``ds_fsmoe report`` shows of a run. It works with ``enabled`` false too
            routing: which token goes to which experts, as data
            placement: which ranks hold which experts, and when experts move
            checkpoint: what is read from files that somebody may have changed
            debug: what is checked while training goes on
        """
