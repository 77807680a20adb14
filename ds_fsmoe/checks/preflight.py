# SPDX-License-Identifier: Apache-2.0
"""Checks an enabled block before training against the model's layers, DeepSpeed's own blocks and the environment.

The entry points and the engine call it. The checks run on every rank before any process group is made, so a mistake
costs seconds and not an allocation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from math import gcd
from typing import Any

from ds_fsmoe.config.blocks import FSMoEBlock, GateBlock
from ds_fsmoe.config.reading import BLOCK, ConfigError, join_problems, shown
from ds_fsmoe.distributed.topology import find_topology, layout, sizes_that_divide, why_not_sharded
from ds_fsmoe.planning.schedule import Lane


def check_experts(layers: Mapping[str, Any], world_size: int | None, gate: GateBlock | None, esp_size: int = 1) -> None:
    """Check a model's MoE layers against the number of ranks and the gate of the block.

    Args:
        layers: name -> a ``deepspeed.moe.layer.MoE``, whose ``num_experts``, ``ep_size`` and gate's ``k`` are read.
        world_size: the number of ranks of the job; ``None`` if it is not known yet.
        gate: the block's gate, or ``None``.
        esp_size: the ranks that share an expert.

    Raises:
        ConfigError: names layer, value and choices.
    """
    problems = []
    for name, layer in layers.items():
        if world_size is not None and (layer.ep_size < 1 or world_size % layer.ep_size):
            problems.append(
                f"{name}.ep_size = {layer.ep_size}: must divide the {world_size} ranks; for {layer.num_experts} "
                f"experts the choices are {sizes_that_divide(gcd(world_size, layer.num_experts))}"
            )
        elif world_size is not None and world_size // layer.ep_size % esp_size:
            problems.append(
                f"{BLOCK}.expert_tensor_parallel_size = {esp_size}: times ep_size, it must divide the {world_size} "
                f"ranks; with ep_size = {layer.ep_size} ({name}) the choices are "
                f"{sizes_that_divide(world_size // layer.ep_size)}"
            )
        own_k = getattr(layer.deepspeed_moe.gate, "k", 1)
        k = own_k if gate is None or gate.k is None else gate.k
        if not 1 <= k <= layer.num_experts:
            where = f"{BLOCK}.gate.top_k" if k != own_k else f"{name}: k"
            problems.append(f"{where} = {k}: must be between 1 and num_experts ({layer.num_experts} in {name})")
        if gate is not None and gate.type == "topk" and gate.drop_policy is not None and k in (1, 2):
            problems.append(
                f"{BLOCK}.gate.drop_policy = {shown(gate.drop_policy)}: for k >= 3 only; k = {k} in {name} has its own "
                "rule (k = 1: at random or first come, k = 2: first come); leave it out"
            )
    if problems:
        raise ConfigError(join_problems(problems))


def check_gate_hooks(layers: Mapping[str, Any], gate: GateBlock | None) -> None:
    """Refuse to replace a gate with a user's hooks, which would be lost.

    Raises:
        ConfigError: names the layer and the remedy.
    """
    if gate is None or gate.type == "topk":
        return
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for name, layer in layers.items():
        if any(getattr(layer.deepspeed_moe.gate, kind) for kind in kinds):
            raise ConfigError(
                f"{BLOCK}.gate.type = {shown(gate.type)}: {name}.deepspeed_moe.gate has hooks, which the new gate "
                f"would not have. Register them after initialize(), or remove {BLOCK}.gate"
            )


def check_tensor_parallel(layers: Mapping[str, Any], world_size: int | None, mp_size: int, esp_size: int) -> None:
    """Check a model's MoE layers against the tensor-parallel ranks of its ``mpu``.

    Args:
        layers: name -> a ``deepspeed.moe.layer.MoE``; ``ep_size`` and ``enable_expert_tensor_parallelism`` are read.
        world_size: the number of ranks of the job; ``None`` if it is not known yet.
        mp_size: the number of tensor-parallel ranks.
        esp_size: the ranks that share an expert.

    Raises:
        ConfigError: names layer, value and remedy.
    """
    if mp_size == 1:
        return
    problems = []
    if world_size is not None and world_size % mp_size:
        problems.append(f"mpu: {mp_size} tensor-parallel ranks: must divide the {world_size} ranks")
    flags = {name: layer.enable_expert_tensor_parallelism for name, layer in layers.items()}
    split = next((name for name, flag in flags.items() if flag), None)
    whole = next((name for name, flag in flags.items() if not flag), None)
    if split is not None and whole is not None:
        problems.append(
            f"{whole}.enable_expert_tensor_parallelism = False, and {split} has True: DeepSpeed goes by one of them "
            "for all layers; set it alike in all"
        )
    if split is not None and esp_size > 1:
        problems.append(
            f"{BLOCK}.expert_tensor_parallel_size = {esp_size}: with enable_expert_tensor_parallelism = True ({split}) "
            "the experts split themselves over the tensor-parallel ranks already; set it to 1, or leave "
            "enable_expert_tensor_parallelism out"
        )
    for name, layer in layers.items() if world_size is not None else ():
        dp_size = world_size // mp_size
        if flags[name] and dp_size % layer.ep_size:
            problems.append(
                f"{name}.ep_size = {layer.ep_size}: with enable_expert_tensor_parallelism = True it must divide the "
                f"{dp_size} data-parallel ranks; for {layer.num_experts} experts the choices are "
                f"{sizes_that_divide(gcd(dp_size, layer.num_experts))}"
            )
    if problems:
        raise ConfigError(join_problems(problems))


def check_nodes(
    block: FSMoEBlock, layers: Mapping[str, Any], expert_before_data: bool, mp_size: int, pp_size: int
) -> list[str]:
    """Check the sharding of experts against the nodes of the ranks. Collective over all ranks of the job.

    Args:
        block: the block, whose ``esp_size`` and ``topology`` are read.
        layers: name -> a ``deepspeed.moe.layer.MoE``, whose ``deepspeed_moe.ep_size`` is read.
        expert_before_data, mp_size, pp_size: sizes, see :func:`ds_fsmoe.distributed.topology.layout`.

    Returns:
        A sentence for each allowed setting with an avoidable cost.

    Raises:
        ConfigError: the nodes have unequal sizes; raised on every rank.
    """
    if block.esp_size == 1:
        return []
    asked = block.topology.ranks_per_node
    topology = find_topology(None if asked == "auto" else asked)
    if reason := why_not_sharded(topology, block.esp_size):
        raise ConfigError(reason)
    sentences = []
    for ep_size in sorted({layer.deepspeed_moe.ep_size for layer in layers.values()}):
        largest = topology.world_size // pp_size // ep_size
        # The nodes of the ranks that would share an expert, for each size.
        at = {
            size: topology.place(
                layout(
                    *(topology.world_size, ep_size, size, expert_before_data),
                    mp_size=mp_size,
                    pp_size=pp_size,
                ).esp
            )
            for size in range(1, largest + 1)
            if largest % size == 0
        }
        if Lane.INTER in at[block.esp_size].lanes:
            inside = ", ".join(str(size) for size, place in at.items() if Lane.INTER not in place.lanes)
            sentences.append(
                f"{BLOCK}.expert_tensor_parallel_size = {block.esp_size} spans {at[block.esp_size].nodes} nodes "
                f"(at ep_size = {ep_size} one node holds {inside})\nAll-gathers and reduce-scatters of "
                f"{block.esp_size} times the bytes of an all-to-all go over the link between nodes"
            )
    return sentences


def check_zero_stage(ds_config: Mapping[str, Any], stock: Mapping[str, Any]) -> None:
    """Refuse ZeRO 3 for layers of DeepSpeed's own class.

    Args:
        ds_config: the whole DeepSpeed config.
        stock: name -> a ``deepspeed.moe.layer.MoE``.

    Raises:
        ConfigError: names the setting to change.
    """
    if stock and _zero_stage(ds_config) == 3:
        raise ConfigError(
            "zero_optimization.stage = 3: ZeRO 3 does not support deepspeed.moe.layer.MoE (found: "
            f"{next(iter(stock))}). Use stage 0, 1 or 2. (Hugging Face MoE models do work with ZeRO 3.)"
        )


def check_sequence_parallel(layers: Mapping[str, Any], mp_size: int) -> None:
    """Refuse layers that stock DeepSpeed would compute wrongly.

    Raises:
        ConfigError: names the layers.
    """
    names = [name for name, layer in layers.items() if getattr(layer, "sequence_parallel", False)]
    if names and mp_size > 1:
        raise ConfigError(
            f"{BLOCK}.enabled = false, but sequence_parallel = True in {', '.join(names)} and mpu has {mp_size} "
            "tensor-parallel ranks: DeepSpeed's layer assumes that these have equal tokens and drops all but a "
            f"part. Set {BLOCK}.enabled to true, or pass whole sequences and remove sequence_parallel"
        )


def _at(ds_config: Any, *path: str, default: Any = None) -> Any:
    """Return an option of DeepSpeed's; one whose block is no object is left for DeepSpeed to refuse."""
    for key in path:
        ds_config = ds_config.get(key, default) if isinstance(ds_config, Mapping) else default
    return ds_config


def _zero_stage(ds_config: Mapping[str, Any]) -> Any:
    return _at(ds_config, "zero_optimization", "stage", default=0)


# Blocks of DeepSpeed itself that do not go together with ours: a test of the config, and the sentence.
_CLASHES: tuple[tuple[Callable[[Mapping[str, Any]], Any], str], ...] = (
    (
        lambda c: _at(c, "fp16", "enabled") and _zero_stage(c) == 0,
        "fp16.enabled = true with zero_optimization.stage = 0: DeepSpeed 0.19.8 divides by a loss scale that it never "
        "multiplied with; use stage 1 or 2, or bf16",
    ),
    (
        lambda c: _at(c, "zero_optimization", "contiguous_gradients") is False,
        "zero_optimization.contiguous_gradients = false: DeepSpeed averages expert gradients over the wrong ranks or "
        "stops; leave it out",
    ),
    (
        lambda c: _at(c, "expert_parallel", "enabled"),
        "expert_parallel.enabled = true: AutoEP brings MoE layers of its own; take one of the two off, expert_parallel "
        "or fsmoe",
    ),
    (
        lambda c: _at(c, "tensor_parallel", "autotp_size", default=0) not in (0, 1),
        "tensor_parallel.autotp_size: DeepSpeed would split the layers' own matrices as well; set it to 1, and give "
        "initialize() an mpu with the tensor-parallel ranks of a model that splits its own",
    ),
    (
        lambda c: _at(c, "compile", "deepcompile"),
        "compile.deepcompile = true: not supported together with fsmoe; set it to false",
    ),
    (
        lambda c: _at(c, "hybrid_engine", "enabled"),
        "hybrid_engine.enabled = true: not supported together with fsmoe; set it to false",
    ),
    (
        lambda c: _at(c, "zero_optimization", "zenflow"),
        "zero_optimization.zenflow: not supported together with fsmoe; leave it out",
    ),
)


def check_deepspeed_blocks(ds_config: Mapping[str, Any]) -> None:
    """Refuse settings of DeepSpeed's own blocks that conflict with an enabled ``fsmoe`` block.

    Raises:
        ConfigError: names the settings to change, for all conflicts at once.
    """
    problems = [sentence for clashes, sentence in _CLASHES if clashes(ds_config)]
    if problems:
        raise ConfigError(join_problems(f"with {BLOCK}.enabled = true: {problem}" for problem in problems))


def untested(ds_config: Mapping[str, Any], device_type: str) -> list[str]:
    """Return a sentence for each setting that runs but is untested.

    Args:
        ds_config: the whole DeepSpeed config.
        device_type: "cpu" or "cuda".
    """
    autocast = ds_config.get("torch_autocast")
    is_half = isinstance(autocast, Mapping) and autocast.get("enabled") and autocast.get("dtype") == "float16"
    if device_type != "cpu" or not (_at(ds_config, "fp16", "enabled") or is_half):
        return []
    name = "torch_autocast.dtype = float16" if is_half else "fp16.enabled = true"
    return [
        f"{name} on a CPU is untested and slow: use bf16 or fp32\nIts range is small; it is of use to try a config "
        "that is meant for GPUs"
    ]


# ---- Warns, when an engine is made, of what is known to go wrong or to cost speed in its surroundings


_SHARES_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def launcher_warnings(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return a sentence for each setting of the launcher that will prevent a restart."""
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    keeps_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and environment.get(_SHARES_STORE) != "1"
    if restarts.isdigit() and int(restarts) > 0 and keeps_store:
        return [
            f"torchrun restarts this job up to {restarts} times: set {_SHARES_STORE}=1, or restarts hang\nIts store is "
            "kept, so restarted processes find the addresses of those before them, and wait"
        ]
    return []


def accelerate_warnings(world_size: int) -> list[str]:
    """Return a sentence if Accelerate, on which Trainer is built, counts other processes than the job has.

    Args:
        world_size: the number of ranks of the job.
    """
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    counted = getattr(state, "_shared_state", {}).get("num_processes")
    if counted in (None, world_size):
        return []
    return [
        f"Accelerate counts {counted} process(es) in a job of {world_size} ranks: it gives every rank the same data\n"
        "It does so with DeepSpeed where there is no accelerator (examples/on_cpu is for trying that)"
    ]


def speed_warnings(
    ds_config: Mapping[str, Any],
    block: FSMoEBlock,
    device_type: str,
    environment: Mapping[str, str] = os.environ,
) -> list[str]:
    """Return a sentence for each setting that silently costs speed.

    Args:
        ds_config: the whole DeepSpeed config.
        block: our block in it.
        device_type: "cpu" or "cuda".
        environment: the environment of this process.
    """
    logger = ds_config.get("comms_logger")
    degrees = block.pipeline_degree.forward, block.pipeline_degree.backward
    of_settings = {
        "comms_logger.enabled = true: DeepSpeed waits for the device around each collective; use fsmoe.trace instead\n"
        "It waits to time them; fsmoe.trace shows when collectives run without that": isinstance(logger, Mapping)
        and logger.get("enabled") is True,
        "wall_clock_breakdown = true: every layer waits for the device; switch it off when you measure speed\n"
        "It reads timers, so links and experts overlap less": ds_config.get("wall_clock_breakdown"),
    }
    of_block = {
        "fsmoe.overlap = false: one task runs after another, on one lane": not block.overlap,
        "fsmoe.debug.check_results = true: an all-reduce, and a wait for the device, before each step": (
            block.debug.check_results
        ),
        "fsmoe.debug.check_router = true: the host waits for the device in every layer's forward": (
            block.debug.check_router
        ),
        'fsmoe.autotune.enabled = false: nothing is measured, so num_chunks = "auto" is 1\nGradients are still sent '
        "during the backward": block.schedule == "best" and "auto" in degrees and not block.autotune.enabled,
    }
    of_process = _of_environment(environment) if device_type == "cuda" else {}
    return [sentence for sentence, applies in (of_settings | of_process | of_block).items() if applies]


def _of_environment(environment: Mapping[str, str]) -> dict[str, bool]:
    """Return sentence -> True if it applies, about the variables that CUDA, NCCL and torch read."""
    return {
        "CUDA_DEVICE_MAX_CONNECTIONS = 1: links and experts hardly overlap; leave it out, or use 8 or more\n"
        "Kernels of all streams queue up in one line; keep it if something else of the model needs it": (
            environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
        ),
        "CUDA_LAUNCH_BLOCKING = 1: the host waits for every kernel, so nothing overlaps; leave it out\n"
        "No two streams work at a time; keep it to look for a kernel that fails": (
            _is_set(environment.get("CUDA_LAUNCH_BLOCKING"))
        ),
        # The second name is an older one that torch still reads.
        **{
            f"{name} = {environment.get(name)}: the host waits for every collective, so nothing overlaps; leave it out"
            "\nExperts begin only when a link has gone idle; TORCH_NCCL_ASYNC_ERROR_HANDLING, on by default, ends a "
            "job that hangs": _is_set(environment.get(name))
            for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
        },
        "TORCH_DISTRIBUTED_DEBUG = DETAIL: the host waits in every collective; use INFO, or leave it out\n"
        "All ranks compare kind and shapes over gloo before each, so the host cannot run ahead of the "
        "device": environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL",
        "NCCL_LAUNCH_MODE = GROUP: a launch may wait for others, so links depend on each other; leave it out\n"
        "Collectives are launched together with those of the other GPUs of a process, which a process with one GPU "
        "does not have, and NCCL gave it up in 2.9": environment.get("NCCL_LAUNCH_MODE", "").upper() == "GROUP",
    }


def _is_set(value: str | None) -> bool:
    """Return True if a flag is set, by torch's reading of its environment."""
    return value is not None and value.strip().lower() in {"1", "y", "yes", "t", "true", "on"}
