# SPDX-License-Identifier: Apache-2.0
"""Compares whether all ranks have come to one of our entry points, before any of them enters a collective of ours.

A rank that has come to DeepSpeed's own instead, for want of ``DS_FSMOE``, of ``install()`` or of an enabled block, runs
nothing of ours and would sit in another collective than its peers. So it is missed in the store by which ranks found
each other.
"""

from __future__ import annotations

import logging
from collections import Counter
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ds_fsmoe.distributed.agreement import DisagreementError, in_words
from ds_fsmoe.log import logger

_num_calls: Counter[str] = Counter()
"""The number of calls in this process, the same on all ranks. It only grows, as a store may outlive a process group."""


def wait_for_all_ranks(what: str, limit_s: float) -> None:
    """Wait until every rank has called this as often. Where all do, it takes four messages to the store.

    Args:
        what: the entry point.
        limit_s: after a tenth of it a warning names the ranks that are missed, after all of it the error does.

    Raises:
        DisagreementError: names the ranks that have not come.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    _num_calls[what] += 1
    store = distributed_c10d._get_default_store()
    place, ranks = f"ds_fsmoe/{what}/{_num_calls[what]}", range(dist.get_world_size())
    try:
        store.set(f"{place}/{dist.get_rank()}", "")
    except RuntimeError:  # of a pretended process group, whose store is none
        return
    if store.add(place, 1) == len(ranks):
        store.set(f"{place}/all", "")
    for part_s in (0.1 * limit_s, 0.9 * limit_s):
        try:
            store.wait([f"{place}/all"], timedelta(seconds=part_s))
            return
        except dist.DistStoreError:
            missing = [rank for rank in ranks if not store.check([f"{place}/{rank}"])]
            said = f"{in_words(missing)} of {len(ranks)} did not come to {what} with ds_fsmoe and an enabled block"
            if part_s < 0.5 * limit_s and dist.get_rank() == min({*ranks} - {*missing}):
                logger.log(logging.WARNING, f"{said} within {part_s:g} s; the others wait for {limit_s:g} s")
    raise DisagreementError(
        f"{said}, and rank {dist.get_rank()} did: a rank that trains with stock DeepSpeed would make all others wait. "
        "Every rank needs DS_FSMOE=1 in its environment (DeepSpeed's launcher takes it to other nodes from a file "
        ".deepspeed_env), or has to call ds_fsmoe.install() or ds_fsmoe.initialize, with the same block. For a rank "
        f"that only takes longer to get there raise fsmoe.debug.hang_timeout_s (now {limit_s:g})"
    )
