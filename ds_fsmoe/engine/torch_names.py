# SPDX-License-Identifier: Apache-2.0
"""Lists every private name of torch that the package uses.

``compat.check_private_names`` checks them at start. Two names are checked by use where they are replaced: see
``layer/recomputed.py``.
"""

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
    # What ours does beside a module's own way to move and to load.
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

REPLACEABLE_FROM_2_14: dict[str, str] = {
    "torch.autograd.graph:queue_callback": "is public, and could stand for Variable._execution_engine.queue_callback "
    "(gradients/reducer.py)",
    "torch.distributed:register_pre_hook, register_post_hook": "see each collective of a group, with its name and "
    "number, and could stand for the wrappers of collectives in the watchdog and the trace "
    "(observing/deepspeeds_waits.py, observing/trace.py)",
    "torch.distributed:all_gather_single, reduce_scatter_single": "are the names of 2.13 and later; 2.11 has others "
    "(distributed/nccl.py, execution/collectives.py)",
    "torch.utils.cpp_extension": "locks the file of a build, and could wait by itself (op_builder/locks.py)",
}
"""What torch 2.14 and later have in the place of code of ours, for when 2.14 is the oldest that is supported."""
