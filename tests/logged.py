# SPDX-License-Identifier: Apache-2.0
"""What was logged, for tests of messages on ranks, which have no ``caplog``."""

from __future__ import annotations

import logging


class Said(logging.Handler):
    """Keeps the messages of the loggers that it is added to."""

    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
