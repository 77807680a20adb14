# SPDX-License-Identifier: Apache-2.0
"""What ds_fsmoe has to say. A logger of its own, because DeepSpeed's shows warnings only unless it is told otherwise.

``logging.getLogger("ds_fsmoe").setLevel(...)`` makes it quieter; an application that configures logging before it
imports us keeps its own handlers.
"""

from __future__ import annotations

import logging
import sys

import torch.distributed as dist

logger = logging.getLogger("ds_fsmoe")
if not logger.handlers and not logging.getLogger().handlers:
    _handler = logging.StreamHandler(sys.stdout)
    _handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [ds_fsmoe] %(message)s"))
    logger.addHandler(_handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def log_on_rank_0(message: str, level: int = logging.INFO) -> None:
    """Log once per job: on rank 0, or on every process where there is no process group yet to tell them apart."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.log(level, message)
