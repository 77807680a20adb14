# SPDX-License-Identifier: Apache-2.0
"""Exchanges objects between the ranks of a group: a value of one or of each, and an error that ends them all.

Measurements, checkpoints and the engine call it where one rank may fail. ``agreement`` compares facts instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.distributed.waits import waiting

_T = TypeVar("_T")

NCCL_BACKENDS = ("nccl", "nccl-legacy", "nccl2", "nccl-lazy")
"""The names by which torch's implementations of NCCL are asked for; up to 2.13 there is one, called by the first."""


class MeasuringError(RuntimeError):
    """Says that a rank failed during a measurement. The message, the same on all ranks, names it and its error."""


@contextmanager
def raise_on_all_ranks(
    group: dist.ProcessGroup | None, what: str, kind: type[Exception] = MeasuringError
) -> Iterator[None]:
    """Make all ranks leave this context, or all raise. Collective; inside, all ranks must reach the same collectives.

    Args:
        group: the ranks; ``None``: all of the job.
        what: the work inside, for the message.
        kind: the class of the error.

    Raises:
        kind: raised on every rank, if one has failed inside.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # whatever it is, the others have to hear of it
        error = caught
    own = None if error is None else f"{type(error).__name__}: {error}"
    if world_size_now() == 1:
        if error is not None:
            raise kind(f"failed while {what}: {own}") from error
        return
    if not has_failed_anywhere(error is not None, what, group):
        return
    texts = {index: text for index, text in enumerate(on_every_rank(own, group)) if text is not None}
    index, others = min(texts), len(texts) - 1
    first = index if group is None else dist.get_global_rank(group, index)
    more = f" (and {others} more rank{'s' if others > 1 else ''})" if others else ""
    raise kind(f"rank {first}{more} failed while {what}: {texts[index]}") from error


def has_failed_anywhere(has_failed: bool, what: str, group: dist.ProcessGroup | None = None) -> bool:
    """Return True if a rank of a group has failed. Collective. Mostly none has, so a single number is exchanged."""
    return bool(most_of([float(has_failed)], None, group, "whether a rank has failed while", what)[0])


def most_of(
    numbers: list[float],
    device: torch.device | None = None,
    group: dist.ProcessGroup | None = None,
    *what: str,
) -> list[float]:
    """Return the largest of each number over ranks. Collective.

    Args:
        numbers: the numbers, as many on every rank.
        device: the device of the tensor that is sent; ``None``: the device of the group.
        group: the ranks; ``None``: all of the job.
        what: the purpose in words, for the watchdog.
    """
    if world_size_now() == 1:
        return numbers
    held = torch.tensor(numbers, dtype=torch.float64, device=device or device_of(group))
    with waiting(*(what or ("numbers that ranks compare",))):
        dist.all_reduce(held, dist.ReduceOp.MAX, group=group)
        return held.tolist()


def from_first_rank(value: _T, group: dist.ProcessGroup | None = None) -> _T:
    """Return the first rank's value on every rank of a group. Collective."""
    if world_size_now() == 1:
        return value
    held = [value]
    with waiting("what the first rank says"):
        dist.broadcast_object_list(held, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
    return held[0]


def on_every_rank(value: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
    """Return the values of all ranks of a group, in the order of the ranks. Collective."""
    if world_size_now() == 1:
        return [value]
    of_ranks = [value] * dist.get_world_size(group)
    with waiting("what every rank says"):
        dist.all_gather_object(of_ranks, value, group=group)
    return of_ranks


def on_first_rank(value: _T) -> list[_T] | None:
    """Return the values of all ranks of the job on rank 0, and ``None`` on the others. Collective."""
    if world_size_now() == 1:
        return [value]
    of_ranks: list[_T] | None = [value] * dist.get_world_size() if dist.get_rank() == 0 else None
    with waiting("the reports of all ranks to rank 0"):
        dist.gather_object(value, of_ranks)
    return of_ranks


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device for tensors of a group's collectives: NCCL only accepts the current GPU's."""
    if dist.get_backend(group) in NCCL_BACKENDS:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
