# SPDX-License-Identifier: Apache-2.0
"""Runs the steps of a save or load on all ranks or none: an error on one ends them on all, with its cause.

``checkpoints``, ``saving`` and the engine call it. A failed rank takes part in the next comparison of errors, wherever
the others reach it. Between two comparisons there must be no other collective: DeepSpeed's barriers become comparisons,
too.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from deepspeed.runtime import engine as stock_engine

from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.distributed.agreement import DisagreementError, check_agreement, in_words
from ds_fsmoe.distributed.fail_together import from_first_rank, has_failed_anywhere, on_every_rank
from ds_fsmoe.distributed.waits import waiting

_T = TypeVar("_T")


class Ranks:
    """Represents the ranks of an engine's job during one save or load. Every method is collective.

    Args:
        engine: our engine.

    Attributes:
        is_leader: whether this rank acts for all ranks that share its file system.
    """

    def __init__(self, engine: Any) -> None:
        self._is_local = engine.use_node_local_storage()
        self._local_rank = engine.local_rank
        self.is_leader = engine.local_rank == 0 if self._is_local else engine.global_rank == 0
        self._reported: CheckpointError | None = None

    def agree(self, what: str, facts: Mapping[str, object]) -> None:
        """Check that all ranks are about to do the same thing.

        Args:
            what: the operation, for the message.
            facts: the values to compare, by name.

        Raises:
            CheckpointError: on every rank; names each rank and its value.
        """
        try:
            check_agreement({name: str(each) for name, each in facts.items()}, None, what)
        except DisagreementError as error:
            raise CheckpointError(str(error)) from error

    def together(self, what: str, act: Callable[[], _T]) -> _T:
        """Run a function on each rank, and raise the errors of all on every rank.

        Args:
            what: the operation, for the message.
            act: the function, without collectives other than :meth:`barrier`.

        Returns:
            The result of ``act``.

        Raises:
            CheckpointError: on every rank, with the errors of those that failed.
        """
        result: list[_T] = []
        caught: Exception | None = None
        try:
            result.append(act())
        except Exception as error:  # whatever it is, the others have to hear of it
            caught = error
        if self._reported is not None:
            raise self._reported  # all have heard of it, inside of act
        self._compare(what, caught)
        return result[0]

    def on_leaders(self, what: str, act: Callable[[], Any]) -> None:
        """Run a function on one rank of each file system; see :meth:`together`."""
        self.together(what, act if self.is_leader else lambda: None)

    def for_leaders(self, value: _T) -> _T:
        """Return rank 0's value, at least on one rank of each file system."""
        return from_first_rank(value) if self._is_local else value

    def sharing_files(self) -> list[int]:
        """Return the ranks that share this rank's file system, itself included, in ascending order."""
        if not self._is_local:
            return list(range(dist.get_world_size()))
        found: dict[object, list[int]] = {}
        seen = Counter[object]()
        for rank, place in enumerate(on_every_rank((socket.gethostname(), self._local_rank))):
            # Hosts may have one name: then the second rank with the same local number is on another one.
            found.setdefault((place[0], seen[place]), []).append(rank)
            seen[place] += 1
        return next(each for each in found.values() if dist.get_rank() in each)

    def barrier(self) -> None:
        """Wait until all ranks are here, or raise the error of one; for use inside of :meth:`together`."""
        self._compare("saving or loading", None)

    @contextmanager
    def at_barriers(self) -> Iterator[None]:
        """Make ranks run :meth:`barrier` where DeepSpeed's engine waits at a barrier, within the block."""
        with replaced(stock_engine, "dist", _Barrier(stock_engine.dist, self.barrier)):
            yield

    def _compare(self, what: str, error: Exception | None) -> None:
        if not has_failed_anywhere(error is not None, what):
            return
        own = None
        if isinstance(error, CheckpointError):
            own = str(error), ""
        elif error is not None:
            own = f"{what} failed", f"{type(error).__name__}: {error}"
        ranks_of: dict[tuple[str, str], list[int]] = {}
        for rank, problem in enumerate(on_every_rank(own)):
            if problem is not None:
                ranks_of.setdefault(problem, []).append(rank)
        told = [
            f"{begin} on {in_words(ranks)}: {cause}" if cause else begin for (begin, cause), ranks in ranks_of.items()
        ]
        self._reported = CheckpointError("; ".join(told))
        raise self._reported from error


@contextmanager
def replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an object or module within the block; then restore the original, if there was one."""
    own = {each: found for each, found in vars(thing).items() if each == name}
    setattr(thing, name, value)
    try:
        yield
    finally:
        delattr(thing, name)
        for found in own.values():
            setattr(thing, name, found)


class _Barrier:
    """Wraps ``deepspeed.comm`` with another barrier."""

    def __init__(self, comm: Any, meet: Callable[[], None]) -> None:
        self._comm = comm
        self._wait = meet

    def barrier(self, *args: Any, **options: Any) -> None:
        if args or options:  # of some ranks only
            with waiting("a barrier of a save or load"):
                self._comm.barrier(*args, **options)
        else:
            self._wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)
