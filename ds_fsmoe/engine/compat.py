# SPDX-License-Identifier: Apache-2.0
"""Lists every private name of DeepSpeed that we use, and checks all of them before training starts.

DeepSpeed has no plugin interface. An upgrade may move any of these names. The check names the one that moved; without
it, an error would come from deep inside DeepSpeed, possibly an hour later. The entry points and commands call it.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ds_fsmoe.versions import REASONS, RUN, SUPPORTED, VERSION

# ---- Lists every private name of torch that the package uses
#
# ``compat.check_private_names`` checks them at start. Two names are checked by use where they are replaced: see
# ``layer/replay.py``.


TORCH_NAMES: dict[str, tuple[str, ...] | None] = {
    # How far groups have come, for the watchdog; and where ranks meet outside of collectives.
    "torch.distributed.distributed_c10d:_world.pg_map": None,
    "torch.distributed.distributed_c10d:_get_default_store": (),
    "torch.distributed:ProcessGroup._get_sequence_number_for_group": None,
    # The default group's timeout, and the implementation of NCCL.
    "torch.distributed.distributed_c10d:_get_default_group": (),
    "torch.distributed:ProcessGroup._get_backend": None,
    "torch.distributed:ProcessGroup._device_types": None,
    # clip_grad_norm_ looks it up among its module's globals.
    "torch.nn.utils.clip_grad:_get_total_norm": ("tensors", "norm_type", "error_if_nonfinite", "foreach"),
    # Which backward runs, whether it keeps its graph, and what is called at its end.
    "torch._C:_current_graph_task_id": None,
    "torch._C._autograd:_get_current_graph_task_keep_graph": None,
    "torch.autograd:Variable._execution_engine.queue_callback": None,
    # Tensors that are marked for scripts, taken as they are.
    "torch._C:DisableTorchFunctionSubclass": None,
    "torch._C:_AutoDispatchBelowAutograd": None,
    "torch._C:_ForceDispatchKeyGuard": None,
    "torch._C:_dispatch_tls_local_include_set": None,
    "torch._C:_dispatch_tls_local_exclude_set": None,
    "torch:_disable_dynamo": ("fn", "recursive"),
    # Whether hooks would see a call, which is then made as the module itself would.
    "torch.nn.modules.module:_has_any_global_hook": (),
    "torch.nn.modules.module:_global_forward_hooks": None,
    "torch.nn.modules.module:_global_forward_pre_hooks": None,
    "torch.nn.modules.module:_global_backward_hooks": None,
    "torch.nn.modules.module:_global_backward_pre_hooks": None,
    **{
        f"torch.nn:Module().{name}": None
        for name in (
            *("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks"),
            *("_backward_pre_hooks", "_forward_hooks_always_called", "_call_impl", "_compiled_call_impl"),
        )
    },
    # The additions of ours to a module's own methods for moving and loading.
    "torch.nn:Module()._apply": ("fn", "recurse"),
    "torch.nn:Module()._load_from_state_dict": ("state_dict", "prefix"),
    # Copies the parameters of a message by one call.
    "torch:_foreach_copy_": None,
    "torch:Tensor._base": None,
    "torch:Tensor._version": None,
    "torch:Tensor._post_accumulate_grad_hooks": None,
    # Modules that draw random numbers, or keep statistics.
    "torch.nn.modules.dropout:_DropoutNd": None,
    "torch.nn.modules.batchnorm:_BatchNorm": None,
    "torch._weights_only_unpickler:_get_allowed_globals": (),
}
"""``module:attribute`` -> the leading parameters that are relied on; ``None`` for what is not called, and for what is
written in C. ``Module()`` is an instance."""

OPTIONAL: dict[str, str] = {
    "torch.utils.checkpoint:_checkpoint_without_reentrant_generator_impl": "from 2.14 on; before it the next one",
    "torch.utils.checkpoint:_checkpoint_without_reentrant_generator": "from 2.14 on nothing calls it",
    "torch.utils.cpp_extension:FileBaton": "up to 2.13, where the file of a build lock is the lock",
    "torch.utils.cpp_extension:_get_cuda_arch_flags": "for building CUDA ops: a build without it names it",
    "torch._C._autograd:_top_saved_tensors_default_hooks": "without it hooks of saved tensors are not seen",
    "torch.autograd.profiler:_is_profiler_enabled": "without it traces name nothing for torch's profiler",
    "torch.cuda:_sleep": "for measuring alone",
}
"""``module:attribute`` -> what holds without it: names that some versions do not have."""

# What torch 2.14 and later have in the place of code of ours, for when 2.14 is the oldest that is supported:
#
# - torch.autograd.graph:queue_callback is public, and could stand for Variable._execution_engine.queue_callback
#   (gradients/reducer.py).
# - torch.distributed:register_pre_hook, register_post_hook see each collective of a group, with its name and number,
#   and could stand for the wrappers of collectives in the watchdog and the trace (observing/other_ranks.py,
#   observing/trace.py).
# - torch.distributed:all_gather_single, reduce_scatter_single are the names of 2.13 and later; 2.11 has others
#   (distributed/nccl.py, execution/collectives.py).
# - torch.utils.cpp_extension locks the file of a build, and could wait by itself (op_builder/locks.py).


# ---- Lists everything private of DeepSpeed that we touch, in one place, and checks it before training starts


class IncompatibleError(RuntimeError):
    """Says that the installed DeepSpeed, torch or Python does not work with this package."""


_INITIALIZE = (
    "args",
    "model",
    "optimizer",
    "model_parameters",
    "training_data",
    "lr_scheduler",
    "distributed_port",
    "mpu",
    "dist_init_required",
    "collate_fn",
    "config",
    "mesh_param",
    "config_params",
)
"""The arguments of DeepSpeed's ``initialize``; ours passes on by name what it is given."""

# "module:attribute" -> the leading parameters we rely on; None for what is not called.
_PRIVATE_NAMES: dict[str, tuple[str, ...] | None] = {
    "deepspeed.runtime.activation_checkpointing.checkpointing:CheckpointFunction.forward": (
        *("ctx", "run_function", "all_outputs"),
    ),
    "deepspeed.runtime.activation_checkpointing.checkpointing:non_reentrant_checkpoint": ("function",),
    # deepspeed.initialize looks these classes up among its module's globals when it is called.
    "deepspeed:DeepSpeedEngine": None,
    "deepspeed:PipelineEngine": None,
    "deepspeed.runtime.engine:DeepSpeedEngine._configure_expert_parallel": ("self", "model", "collect_sources"),
    "deepspeed.runtime.engine:DeepSpeedEngine._get_gradients_for_reduction": ("self",),
    "deepspeed.runtime.engine:DeepSpeedEngine._flush_coalesced_reduction_zero12": ("self",),
    "deepspeed.runtime.engine:DeepSpeedEngine._get_non_moe_state_dict": ("self", "full_state_dict"),
    "deepspeed.runtime.engine:DeepSpeedEngine._take_model_step": ("self", "lr_kwargs"),
    "deepspeed.runtime.engine:DeepSpeedEngine.clip_fp32_gradients": ("self",),
    "deepspeed.runtime.engine:DeepSpeedEngine.postscale_gradients": ("self",),
    "deepspeed.runtime.engine:DeepSpeedEngine.gradient_predivide_factor": ("self",),
    "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer.unscale_and_clip_grads": (
        "self",
        "total_norm",
        "apply_scale",
    ),
    "deepspeed.runtime.utils:is_model_parallel_parameter": ("p",),
    "deepspeed.runtime.zero.partitioned_param_coordinator:"
    "PartitionedParameterCoordinator._PartitionedParameterCoordinator__all_gather_params": None,
    "deepspeed.runtime.zero.partitioned_param_coordinator:"
    "PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release": None,
    "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload.get_param_coordinator": ("self",),
    "deepspeed.runtime.zero.parameter_offload:FWD_MODULE_STACK": None,
    "deepspeed.runtime.zero.parameter_offload:ZeROOrderedDict": ("parent_module",),
    "deepspeed.runtime.engine:DeepSpeedEngine.load_checkpoint": (
        "self",
        "load_dir",
        "tag",
        "load_module_strict",
        "load_optimizer_states",
        "load_lr_scheduler_states",
        "load_module_only",
        "custom_load_fn",
    ),
    "deepspeed.runtime.engine:DeepSpeedEngine._checkpoint_tag_validation": ("self", "tag"),
    # Its save waits for other ranks by this name, and by no other.
    "deepspeed.runtime.engine:dist.barrier": None,
    "deepspeed.runtime.engine:DeepSpeedEngine._get_zero_ckpt_name": ("self", "checkpoints_path", "tag"),
    "deepspeed.runtime.engine:DeepSpeedEngine._get_optimizer_ckpt_name": (
        "self",
        "checkpoints_path",
        "tag",
        "expp_rank",
    ),
    **{
        f"deepspeed.runtime.engine:DeepSpeedEngine.{name}": ("self", *parameters)
        for name, parameters in {
            "_save_moe_checkpoint": ("save_dir", "tag", "client_state", "exclude_frozen_parameters"),
            "_copy_recovery_script": ("save_path",),
            "_configure_optimizer": ("client_optimizer", "model_parameters"),
            "_configure_basic_optimizer": ("model_parameters",),
            "_configure_lr_scheduler": (),
            "_get_optimizer_param": ("param_name",),
            "_zero3_consolidated_16bit_state_dict": ("exclude_frozen_parameters",),
            "_get_all_ckpt_names": ("checkpoints_path", "tag"),
            "_get_zero_frozen_param_attributes": ("attr_func",),
            "save_16bit_model": ("save_dir", "save_filename", "exclude_frozen_parameters"),
        }.items()
    },
    "deepspeed.profiling.flops_profiler.profiler:wrapFunc": ("func", "funcFlopCompute"),
    "deepspeed.profiling.flops_profiler.profiler:FlopsProfiler.start_profile": ("self",),
    "deepspeed.profiling.flops_profiler.profiler:FlopsProfiler.stop_profile": ("self",),
    "deepspeed.runtime.pipe.engine:PipelineEngine._INSTRUCTION_MAP": None,
    "deepspeed.runtime.pipe.engine:PipelineEngine._exec_forward_pass": ("self", "buffer_id"),
    "deepspeed.runtime.pipe.engine:PipelineEngine._exec_backward_pass": ("self", "buffer_id"),
    "deepspeed.runtime.pipe.module:PipelineModule.get_tied_weights_and_groups": ("self",),
    "deepspeed.runtime.pipe.engine:PipelineEngine.is_gradient_accumulation_boundary": ("self",),
    "deepspeed.runtime.pipe.module:PipelineModule._synchronize_tied_weights": ("self",),
    "deepspeed.runtime.pipe.module:PipelineModule.ckpt_layer_path": ("self", "ckpt_dir", "local_layer_idx"),
    "deepspeed.runtime.utils:combine_grad_norm_groups": ("norm_groups",),
    "deepspeed.runtime.utils:is_optimized_parameter": ("param",),
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": None,
    **{
        f"deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.{name}": ("self", *parameters)
        for name, parameters in {
            "_fp32_state_allgather": ("param", "fp32_state_partition"),
            "set_full_hp_param": ("value", "param", "optim_state_key"),
            "set_fp32_grad_for_param": ("value", "param"),
            "update_fp32_grad_for_param_vectorized": ("update_func", "param_list"),
        }.items()
    },
    # DeepSpeed puts these on parameters.
    "deepspeed.utils.mixed_precision_linkage:get_full_hp_param": ("self", "optim_state_key"),
    "deepspeed.utils.mixed_precision_linkage:get_full_hp_grad": ("self",),
    "deepspeed.utils.mixed_precision_linkage:set_full_hp_param": ("self", "value", "optim_state_key"),
    "deepspeed.utils.mixed_precision_linkage:set_full_hp_grad": ("self", "value"),
    "deepspeed.utils.mixed_precision_linkage:lazy_init_hp_params_optimizer_state": (
        *("lp_param_list", "flat_hp_partition", "optimizer_state"),
    ),
    "deepspeed.utils.groups:_get_expert_data_parallel_rank": ("group_name",),
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine:TorchCheckpointEngine.load": (
        "self",
        "path",
        "map_location",
    ),
    "deepspeed.runtime.bf16_optimizer:BF16_Optimizer": None,
    "deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer": None,
    "deepspeed.runtime.fp16.loss_scaler:LossScaler": None,
    "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler": None,
    "deepspeed.runtime.zero.config:ZeroStageEnum": None,
    "deepspeed.runtime.zero.partition_parameters:Init._post_init_method": ("self", "module"),
    "deepspeed.utils.tensor_fragment:fragment_address": ("numel", "start"),
    "deepspeed.utils.groups:_get_expert_parallel_rank": ("group_name",),
    "deepspeed.utils.groups:_get_max_expert_size_name": (),
    "deepspeed.runtime.utils:PIPE_REPLICATED": None,
    # The step looks it up among its module's globals.
    "deepspeed.runtime.zero.stage_1_and_2:all_gather_dp_groups": (
        *("groups_flat", "partitioned_param_groups", "dp_process_group"),
    ),
    **{
        f"deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.{name}": ("self", *parameters)
        for name, parameters in {
            "process_gradients": ("param", "i"),
            "scaled_global_norm": ("norm_type",),
            "_model_parallel_all_reduce": ("tensor", "op"),
            "average_tensor": ("tensor", "communication_data_type"),
            "overlapping_partition_gradients_reduce_epilogue": (),
            "reduce_gradients": ("pipeline_parallel",),
            "reduce_ready_partitions_and_remove_grads": ("param", "i"),
            "reduce_ipg_grads": ("comm_dtype",),
            "setup_buckets": (),
            "get_gradient_for_reduction": ("param",),
            "get_param_comm_dtype": ("param",),
            "_fill_param_grad_accum_attribute": ("param",),
            "_gradient_reduction_buffer_dtype": (),
            "_add_full_reduction_to_compact_grad_partition": ("reduced_tensor", "communication_data_type"),
            "step": ("closure",),
            "load_state_dict": (),
            "update_lp_params": (),
            "refresh_fp32_params": (),
            "_link_all_hp_params": (),
            "_lazy_init_hp_params_optimizer_state": (),
            "offload_states": (),
            "reload_states": (),
        }.items()
    },
    "deepspeed.runtime.tensor_parallel.init_utils:load_ds_config": ("config",),
    "deepspeed.module_inject.auto_ep_layer:ReplacementSourceMap": (),
    "deepspeed.moe.experts:Experts.forward": ("self", "inputs"),
    "deepspeed.moe.layer:MoE.__init__": ("self", "hidden_size", "expert", "num_experts", "ep_size", "k"),
    "deepspeed.moe.layer:MoE.forward": ("self", "hidden_states", "used_token"),
    "deepspeed.moe.sharded_moe:MOELayer.__init__": ("self", "gate", "experts", "ep_group_name", "ep_size"),
    "deepspeed.moe.sharded_moe:MOELayer._set_ep_group": ("self", "ep_group"),
    "deepspeed.moe.sharded_moe:TopKGate.__init__": (
        "self",
        "model_dim",
        "num_experts",
        "k",
        "capacity_factor",
        "eval_capacity_factor",
        "min_capacity",
        "noisy_gate_policy",
        "drop_tokens",
        "use_rts",
        "ep_group",
        "top2_2nd_expert_sampling",
    ),
    "deepspeed.moe.sharded_moe:TopKGate.forward": ("self", "input", "used_token", "sparse_routes", "use_tutel"),
    "deepspeed.moe.sharded_moe:MOE_TIMER": None,
    "deepspeed.moe.sharded_moe:TOPK_GATE_TIMER": None,
    "deepspeed.utils.groups:mpu": None,
    "deepspeed.utils.groups:_create_expert_and_data_parallel": ("expert_parallel_size_",),
    "deepspeed.utils.groups:_create_expert_data_and_model_parallel": ("expert_parallel_size_", "mpu"),
    "deepspeed.utils.groups:_get_expert_parallel_group_dict": (),
    "deepspeed.utils.groups:_get_expert_parallel_group": ("group_name",),
    "deepspeed.utils.groups:_get_expert_data_parallel_group": ("group_name",),
    "deepspeed.utils.groups:_get_expert_parallel_group_ranks": ("group_name",),
    "deepspeed.utils.groups:_get_expert_data_parallel_group_ranks": ("group_name",),
    "deepspeed.utils.groups:_get_sequence_data_parallel_group": (),
    "deepspeed.utils.bwc:bwc_tensor_model_parallel_rank": ("mpu",),
    "deepspeed.utils.bwc:bwc_tensor_model_parallel_group": ("mpu",),
    "deepspeed.utils.bwc:bwc_tensor_model_parallel_world_size": ("mpu",),
    "deepspeed.utils.bwc:bwc_pipeline_parallel_world_size": ("mpu",),
    **TORCH_NAMES,
}


def in_range(name: str, found: str, supported: Mapping[str, str] = SUPPORTED) -> bool:
    """Return True if this package works with a version of "python", "torch" or "deepspeed"; a "+cpu" is ignored."""
    return SpecifierSet(supported[name]).contains(Version(found).base_version, prereleases=True)


def check_versions(supported: Mapping[str, str] = SUPPORTED) -> list[tuple[int, str]]:
    """Check the installed versions against the supported ranges.

    Returns:
        (logging level, sentence) for a torch above its range, and for a Python and a torch that are in range but were
        not tested together.

    Raises:
        IncompatibleError: versions are out of range; one line each, with the range and its reason.
    """
    installed = {"python": ".".join(map(str, sys.version_info[:3])), "torch": version("torch")}
    installed["deepspeed"] = version("deepspeed")
    refused = [
        f"{name} {found} is installed; ds_fsmoe {VERSION} works with {name} {supported[name]}: {REASONS[name]}"
        for name, found in installed.items()
        if not in_range(name, found, supported) and not is_newer_torch(name, found, supported)
    ]
    if refused:
        raise IncompatibleError("\n".join([*refused, _remedy(supported)]))
    if is_newer_torch("torch", installed["torch"], supported):
        return [
            (
                logging.WARNING,
                f"torch {installed['torch']} is newer than ds_fsmoe {VERSION} knows ({supported['torch']}): names "
                "exist; order of collectives and streams untested",
            )
        ]
    pair = tuple(".".join(installed[name].split(".")[:2]) for name in ("python", "torch"))
    if pair in RUN:
        return []
    run = ", ".join(f"{python} with {torch}" for python, torch in RUN)
    return [(logging.INFO, f"the tests of ds_fsmoe were not run on Python {pair[0]} with torch {pair[1]}; on {run}")]


def is_newer_torch(name: str, found: str, supported: Mapping[str, str] = SUPPORTED) -> bool:
    """Return True if a version is that of a torch above the supported range, with which training is tried."""
    bounds = [Version(each.version) for each in SpecifierSet(supported[name]) if each.operator == "<"]
    return name == "torch" and bool(bounds) and Version(Version(found).base_version) >= max(bounds)


def _remedy(supported: Mapping[str, str]) -> str:
    if not in_range("python", ".".join(map(str, sys.version_info[:3])), supported):
        return f"Make an environment with Python {supported['python']}"
    python = ".".join(map(str, sys.version_info[:2]))
    return f"On Python {python} these fit: pip install 'torch{supported['torch']}' 'deepspeed{supported['deepspeed']}'"


def check_private_names(expected: Mapping[str, tuple[str, ...] | None] = _PRIVATE_NAMES) -> None:
    """Check that every private name still exists and still takes the parameters we pass.

    Raises:
        IncompatibleError: names the first one that is missing or differs.
    """
    if (problem := problem_with(expected)) is not None:
        package = problem.partition(" ")[0]
        raise IncompatibleError(f"{problem}; ds_fsmoe works with {package} {SUPPORTED[package]}")


def problem_with(expected: Mapping[str, tuple[str, ...] | None]) -> str | None:
    """Return which name of a package is missing, or lacks a parameter that we pass; ``None`` if all are present.

    The text begins with the package and its version.

    Args:
        expected: ``module:attribute`` -> its leading parameters; ``None`` for a name that is not called.
    """
    for name, parameters in expected.items():
        package = name.partition(".")[0]
        module, _, path = name.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for attribute in path.split("."):
                found = getattr(found, attribute.removesuffix("()"))
                found = found() if attribute.endswith("()") else found
        except (ImportError, AttributeError) as error:
            return f"{package} {version(package)} has no {name} ({error})"
        takes = tuple(inspect.signature(found).parameters)[: len(parameters)] if parameters else ()
        if parameters and takes != parameters:
            return f"{package} {version(package)}: {name} takes ({', '.join(takes)}), not ({', '.join(parameters)})"
    return None


def check_initialize(function: Callable[..., Any], arguments: Iterable[str] = ()) -> None:
    """Check that DeepSpeed's ``initialize``, or its replacement by another library, takes our arguments.

    Args:
        function: the function to check.
        arguments: the names of the script's arguments.

    Raises:
        IncompatibleError: names the function and the parameters that it lacks.
    """
    if _is_deepspeeds(function):
        takes = tuple(inspect.signature(function).parameters)
        if takes[: len(_INITIALIZE)] != _INITIALIZE:
            raise IncompatibleError(
                f"deepspeed {version('deepspeed')}: initialize takes ({', '.join(takes)}), not "
                f"({', '.join(_INITIALIZE)}); ds_fsmoe works with deepspeed {SUPPORTED['deepspeed']}"
            )
        return
    try:
        # Its own signature: functools.wraps would show that of DeepSpeed's function, whatever this one takes.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return  # nothing is known of it, so nothing is known against it
    try:
        signature.bind(**dict.fromkeys(arguments))
    except TypeError as error:
        raise IncompatibleError(
            f"{name_and_place(function)} replaces deepspeed.initialize and does not accept its arguments: it takes "
            f"{signature} ({error}). ds_fsmoe passes them by name; remove this wrapper, or let it accept **kwargs"
        ) from error


def _is_deepspeeds(function: Callable[..., Any]) -> bool:
    # Not by __module__, which functools.wraps copies.
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == sys.modules["deepspeed"].__file__


def name_and_place(function: Callable[..., Any]) -> str:
    """Return a function's own name and place, also behind ``functools.wraps``: ``tracked (acme/patch.py, line 12)``."""
    if _is_deepspeeds(function):
        return "deepspeed.initialize"
    called = function if hasattr(function, "__code__") else type(function).__call__
    code = getattr(called, "__code__", None)
    if code is None:
        return repr(function)
    return f"{code.co_qualname} ({code.co_filename}, line {code.co_firstlineno})"


def load_ds_config(config: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """Read a DeepSpeed config as DeepSpeed itself does: a dict, a path (JSON with comments) or base64.

    Raises:
        ValueError: it is none of these. DeepSpeed itself reports a missing file as invalid base64.
    """
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config as read

    path = Path(config) if isinstance(config, str) and config.endswith(".json") else None
    if path is not None and not path.is_file():
        raise ValueError(f"{config}: not found")
    try:
        return read(config)
    except ValueError as error:
        lines = path.read_text().splitlines() if path is not None else []
        found = ((at, word) for at, line in enumerate(lines, 1) for word in re.findall(_OF_PYTHON, line))
        at, word = next(found, (0, ""))
        if not word:
            raise
        raise ValueError(f"{config}, line {at}: JSON writes {_IN_JSON[word]}, not {word}") from error


_IN_JSON = {"True": "true", "False": "false", "None": "null"}
_OF_PYTHON = re.compile(rf"[:,[]\s*({'|'.join(_IN_JSON)})\b")
