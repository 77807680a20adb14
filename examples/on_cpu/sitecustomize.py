# SPDX-License-Identifier: Apache-2.0
"""Lets Accelerate, and so Trainer, train with DeepSpeed on CPUs, to try a script where there is no accelerator.

Accelerate knows DeepSpeed with accelerators only: on CPUs it takes each process for a job of its own. With this folder
on PYTHONPATH the processes that a launcher starts are one job, over gloo. Not for anything else.
"""

import os

if "LOCAL_RANK" in os.environ:
    from accelerate.state import DistributedType, PartialState

    PartialState._prepare_backend = lambda self, *args, **options: ("gloo", DistributedType.MULTI_CPU)
