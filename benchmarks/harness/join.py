# SPDX-License-Identifier: Apache-2.0
"""Lets a rank of a benchmark join its job, on the ground that is the same for everything that is measured."""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta

from benchmarks.bed.full_duplex import use_both_directions


def join(timeout_s: float = 600) -> None:
    """Join this rank to a job on gloo through DeepSpeed, with a cache folder of its own. Collective.

    Args:
        timeout_s: how long a collective may take.
    """
    import deepspeed

    use_both_directions()
    # Each run is a job's first: what an earlier one has learned of its batches does not count.
    os.environ["XDG_CACHE_HOME"] = f"{tempfile.gettempdir()}/ds_fsmoe_bench_{os.getpid()}"
    # Compiled by DeepSpeed at its first process group on a CPU, for a collective of inference only.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=timeout_s))
