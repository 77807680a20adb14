# SPDX-License-Identifier: Apache-2.0
"""Provides the logger of ds_fsmoe. It is separate from DeepSpeed's, which shows only warnings by default.

``logging.getLogger("ds_fsmoe").setLevel(...)`` makes it quieter. An application that configures logging before it
imports us keeps its own handlers.
"""

from __future__ import annotations

import logging
import sys

import torch.distributed as dist

from ds_fsmoe.terminal.progress import Progress
from ds_fsmoe.terminal.screen import RED, YELLOW, is_terminal
from ds_fsmoe.terminal.tables import Message, print_parts


class Handler(logging.StreamHandler):
    """Writes lines; on a terminal warnings and errors are coloured, and the tables of a :class:`Message` drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        if not is_terminal(self.stream):
            super().emit(record)
            return
        try:
            style = RED if record.levelno >= logging.ERROR else YELLOW if record.levelno >= logging.WARNING else ""
            first, *rest = record.msg.parts if isinstance(record.msg, Message) else [record.getMessage()]
            head = logging.makeLogRecord({**record.__dict__, "msg": str(first), "args": ()})
            print_parts([self.format(head), *rest], self.stream, style)
        except Exception:  # as logging's own handlers: what cannot be written must not end a training
            self.handleError(record)


logger = logging.getLogger("ds_fsmoe")
if not logger.handlers and not logging.getLogger().handlers:
    _handler = Handler(sys.stdout)
    _handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [ds_fsmoe] %(message)s"))
    logger.addHandler(_handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


_shows_details = False


def show_details(is_shown: bool) -> None:
    """Set whether lines have their details, by the ``fsmoe.autotune.details`` of the engine made last."""
    global _shows_details
    _shows_details = is_shown


def log_line(message: str, level: int = logging.WARNING, details: str = "") -> None:
    """Log a message of at most 120 characters, and its details where :func:`show_details` or the level DEBUG asks."""
    is_long = details and (_shows_details or logger.isEnabledFor(logging.DEBUG))
    logger.log(level, f"{message}. {details}" if is_long else message)


def log_on_rank_0(message: str, level: int = logging.INFO, details: str = "") -> None:
    """Log once per job as :func:`log_line`: on rank 0, or on every process where there is no process group yet."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        log_line(message, level, details)


def progress_on_rank_0(what: str, total: int | None = None, unit: str = "steps") -> Progress:
    """Return the progress of long work of a job, which rank 0 shows: as a bar, or as lines in the log.

    Args:
        what: the work.
        total: the number of units in all; ``None`` if unknown.
        unit: the unit of the count, as a plural.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    return Progress(what, total, unit, is_shown=is_first, say=log_on_rank_0)
