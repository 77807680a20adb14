# SPDX-License-Identifier: Apache-2.0
"""What all ranks try together and one of them fails at, all of them fail at, with that rank's error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ds_fsmoe.runtime.topology import world_size_now


class MeasuringError(RuntimeError):
    """A rank failed while something was measured. The message, the same on all ranks, names it and its error."""


class OneFate:
    """Of some ranks.

    Args:
        device: where their process group carries tensors.
        group: the ranks; ``None``: all of the job.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._device = device
        self._group = group

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Collective: all ranks leave it, or all raise. What is inside may not be a collective that only some reach.

        Args:
            what: is done, for the message.

        Raises:
            MeasuringError: on every rank, if one has failed inside.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # whatever it is, the others have to hear of it
            error = caught
        self._compare(what, error)

    def _compare(self, what: str, error: Exception | None) -> None:
        if world_size_now() == 1:
            if error is not None:
                raise MeasuringError(f"failed while {what}: {_said(error)}") from error
            return
        failed = torch.tensor([float(error is not None)], device=self._device)
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._group)
        if not failed.item():
            return
        texts: list[str | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(texts, None if error is None else _said(error), group=self._group)
        index, text = next((index, text) for index, text in enumerate(texts) if text is not None)
        first = index if self._group is None else dist.get_global_rank(self._group, index)
        others = sum(each is not None for each in texts) - 1
        more = f" (and {others} more rank{'s' if others > 1 else ''})" if others else ""
        raise MeasuringError(f"rank {first}{more} failed while {what}: {text}") from error


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
