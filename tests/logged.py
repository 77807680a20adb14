# SPDX-License-Identifier: Apache-2.0
"""What was logged, for tests of messages on ranks, which have no ``caplog``."""

from __future__ import annotations

import logging


class Said(logging.Handler):
    """Keeps the messages of the loggers that it is added to, each behind the name of its level if asked for."""

    def __init__(self, level: int | str = logging.NOTSET, names_level: bool = False) -> None:
        super().__init__(level)
        self.lines: list[str] = []
        self._names_level = names_level

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname}: " * self._names_level + record.getMessage())

    def end(self) -> None:
        """Hear no more."""
        logging.getLogger("ds_fsmoe").removeHandler(self)


def heard(level: int | str = logging.NOTSET, names_level: bool = False) -> Said:
    """Return what the package's logger says from now on."""
    said = Said(level, names_level)
    logging.getLogger("ds_fsmoe").addHandler(said)
    return said
