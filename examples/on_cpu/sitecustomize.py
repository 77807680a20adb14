# SPDX-License-Identifier: Apache-2.0
"""Lets Accelerate, and so Trainer, train with DeepSpeed on CPUs, to try a script where there is no accelerator.

Accelerate knows DeepSpeed with accelerators only: on CPUs it takes each process for a job of its own. With this folder
on PYTHONPATH the processes that a launcher starts are one job, over gloo, and ``bf16=True``, which Trainer allows with
an accelerator only, trains in bf16. Not for anything else.
"""

import atexit
import os


def leave() -> None:
    """End the process groups, as scripts with Trainer do not: gloo's threads may abort a process that is ending."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


if "LOCAL_RANK" in os.environ:
    import transformers.utils
    from accelerate.state import DistributedType, PartialState

    PartialState._prepare_backend = lambda self, *args, **options: ("gloo", DistributedType.MULTI_CPU)
    transformers.utils.is_torch_bf16_gpu_available = lambda: True
    atexit.register(leave)
