# SPDX-License-Identifier: Apache-2.0
"""Real prose as bytes: where it comes from, how it is split, and how batches are drawn from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

VALIDATION_PART = 10  # one byte in so many, at the end of the text


class TextError(ValueError):
    """A text that cannot be trained on; the message says why."""


@dataclass(frozen=True)
class Text:
    """A text as bytes, split in two parts that do not overlap."""

    train_L: torch.Tensor
    """uint8; the first nine tenths."""
    validation_L: torch.Tensor
    """uint8; the last tenth."""
    source: str


def load_text(path: str | None, sequence_length: int) -> Text:
    """Read a text file, or the Python language reference that comes with every Python.

    Args:
        path: a file, or ``None``.
        sequence_length: L; each part has to hold one sequence and the byte after it.

    Raises:
        TextError: the file is missing, cannot be read, or is too short.
    """
    if path is None:
        # The text behind `help("with")`: about 700 kB of prose with examples.
        from pydoc_data.topics import topics

        content, source = "\n".join(topics.values()).encode(), "the Python language reference"
    else:
        source = path
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise TextError(f"--text {path}: cannot be read: {error.strerror}") from error
        if not content:
            raise TextError(f"--text {path}: the file is empty")
    cut = len(content) - len(content) // VALIDATION_PART
    needed = VALIDATION_PART * (sequence_length + 1)
    if len(content) < needed:
        raise TextError(
            f"{source} has {len(content)} bytes: too short for sequences of {sequence_length}, of which the last tenth "
            f"of the text, kept for validation, has to hold one; {needed} bytes are needed, or a smaller --seq-len"
        )
    data_L = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return Text(data_L[:cut], data_L[cut:], source)


def draw_batch(
    data_L: torch.Tensor, batch_size: int, sequence_length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows of a text and, for each position, the byte that follows.

    Returns:
        tokens_BL and targets_BL, int64, [batch_size, sequence_length].
    """
    starts_B = torch.randint(len(data_L) - sequence_length, (batch_size,), generator=generator)
    windows = torch.stack([data_L[start : start + sequence_length + 1] for start in starts_B]).long()
    return windows[:, :-1], windows[:, 1:]


def rank_generator(seed: int, rank: int) -> torch.Generator:
    """The stream of one rank: reproducible, and another one than any other rank's."""
    return torch.Generator().manual_seed(seed * 1_000_003 + rank)
