# SPDX-License-Identifier: Apache-2.0
"""Runs the blocks of one model by halves of the batch, where its layers' plans say so and the blocks can be.

The first forward in training is run as it is, and watched: which block's result goes straight into the next one, what
the blocks are called with and what they return. Where a result does, the halves go on into the next block without being
put together. Before each forward in halves all ranks agree that each can cut its batch.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from ds_fsmoe.halves import collected
from ds_fsmoe.halves.arguments import CannotSplitError, check_cache, check_output, halves_of
from ds_fsmoe.halves.blocks import Block, find_chains
from ds_fsmoe.halves.pending import Pending, looked_at
from ds_fsmoe.halves.run import HalvesRun
from ds_fsmoe.layer.recomputed import is_kept, runs_again
from ds_fsmoe.log import log_on_rank_0

_Given = TypeVar("_Given")


class Splitter:
    """Runs blocks by halves, for one engine.

    Args:
        model: the model.
        layers: path -> its layers with experts, in the order of the forward.
        named: names of the blocks' classes; empty: they are found.
        agree: returns whether all ranks say yes. Collective over the ranks that run the same blocks.
        holds: returns whether batches have to stay whole for now, the same on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        named: Sequence[str],
        agree: Callable[[bool], bool],
        holds: Callable[[], bool],
    ) -> None:
        self._layers = layers
        self._agree = agree
        self._holds = holds
        self._chains, self.why_not = find_chains(model, layers, named)
        self._next: dict[Block, Block] = {
            block: after for chain in self._chains for block, after in itertools.pairwise(chain)
        }
        self._is_watched = False
        """Whether a forward has been watched."""
        self._called: list[Block] = []
        """The blocks of the forward that is watched."""
        self._returned: Any = None
        """What the block before returned, in the forward that is watched."""
        self._version = 0
        """How often that had been changed in place by then."""
        self._run: HalvesRun | None = None
        self._pending: Pending | None = None
        self._said: set[str] = set()
        self.num_runs = 0
        """The forwards of chains that were run by halves."""
        for block in self.blocks:
            block.take(self._call)

    @property
    def blocks(self) -> list[Block]:
        """The blocks of all chains."""
        return [block for chain in self._chains for block in chain]

    @property
    def can_split(self) -> bool:
        """Whether the blocks can be run by halves, as far as is known: the same on every rank."""
        return bool(self._chains) and not self.why_not

    @property
    def is_wanted(self) -> bool:
        """Whether layers' plans say so."""
        return any(layer.pipeline is not None and layer.pipeline.forward.in_halves for layer in self._layers.values())

    def begin_forward(self) -> None:
        """Take note that a forward of the model begins: what an earlier one left behind is given up."""
        if self._run is not None:
            self._run.close()
        self._run = self._pending = self._returned = None
        self._called = []

    def end_forward(self, is_training: bool) -> None:
        """Take note that a forward of the model has ended. Collective where it was the one that is watched."""
        if self._is_watched or not is_training or not self.can_split or not self._called:
            return
        self._is_watched = True
        why = self.why_not or self._why_not_as_called()
        if not self._agree(not why):
            self.why_not = why or "another rank cannot"
        self._returned = None

    def close(self) -> None:
        """Give the blocks their forwards back."""
        for block in self.blocks:
            block.give_back()

    def _call(self, block: Block, *args: Any, **kwargs: Any) -> Any:
        """Run a block, in the place of its forward."""
        given, rest, named = _first(block, args, kwargs)
        if torch.compiler.is_compiling() or not (block.module.training and torch.is_grad_enabled()) or is_again():
            return block.forward(*looked_at(args), **_all_looked_at(kwargs))
        if not self._is_watched:
            return self._watch(block, given, args, kwargs)
        if isinstance(given, Pending) and given is self._pending and given.is_open:
            parts = self._parts(block, rest, named, None)
            if parts is not None:
                return self._go_on(block, parts)
        elif self.is_wanted and self.can_split and not self._holds() and not isinstance(given, Pending):
            parts = self._parts(block, rest, named, given)
            if self._agree(parts is not None) and parts is not None:
                return self._begin(block, given, parts)
        return block.forward(*looked_at(args), **_all_looked_at(kwargs))

    def _begin(self, block: Block, given: torch.Tensor, parts: list) -> Any:
        self.begin_forward()
        self._batch = len(given)
        first, second = halves_of(given, self._batch, block.name_of_first)
        self._collected = collected.Halves()
        self._run = HalvesRun((first, second), self._collected.begin)
        self.num_runs += 1
        if self._drops_out():
            self._say("blocks drop out at random, and two halves draw other masks than the whole batch would")
        return self._go_on(block, parts)

    def _drops_out(self) -> bool:
        if self.num_runs > 1:
            return False
        modules = [each for block in self.blocks for each in block.module.modules()]
        shares = [getattr(each, name, 0) for each in modules for name in ("p", "attention_dropout")]
        return any(isinstance(each, float) and each > 0 for each in shares)

    def _go_on(self, block: Block, parts: list) -> Any:
        run = self._run
        assert run is not None
        run.add(block.forward, parts)
        after = self._next.get(block)
        if block.layers:
            run.advance()
        is_looked_at = after is None or block.is_looked_at() or after.is_looked_at() or collected.wants_blocks()
        if not block.has_next or is_looked_at:
            return self._complete()
        if block.num_returned is None:
            self._pending = Pending(self._complete)
            return self._pending
        self._pending = Pending(lambda: self._complete()[0])
        return (self._pending, *(None,) * (block.num_returned - 1))

    def _complete(self) -> Any:
        run, self._run, self._pending = self._run, None, None
        assert run is not None
        found = run.complete()
        self._collected.end()
        return found

    def _parts(
        self, block: Block, rest: tuple, named: dict[str, Any], given: Any
    ) -> list[tuple[tuple, dict[str, Any]]] | None:
        """Return the other arguments of a block for each half; ``None`` where it cannot cut them, and says so."""
        try:
            batch = self._batch if given is None else _batch_of(given)
            check_cache(named)
            if is_kept() or getattr(block.module, "gradient_checkpointing", False):
                raise CannotSplitError("its activations are checkpointed, and it runs again alone")
            pairs = [halves_of(each, batch, f"argument {place + 2}") for place, each in enumerate(rest)]
            of_names = {name: halves_of(each, batch, name) for name, each in named.items()}
        except CannotSplitError as error:
            self._say(f"{block.path} is run with the whole batch: {error}")
            return None
        return [
            (tuple(pair[half] for pair in pairs), {name: pair[half] for name, pair in of_names.items()})
            for half in (0, 1)
        ]

    def _say(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            log_on_rank_0(f"fsmoe.split_batch: {sentence}", logging.WARNING)

    def _watch(self, block: Block, given: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a block as it is and note what it is called with and returns."""
        returned = block.forward(*args, **kwargs)
        before = self._called[-1] if self._called else None
        if block in self._called:
            self.why_not = f"{block.path} is called several times in a forward"
        elif before is not None and self._next.get(before) is block:
            before.has_next = before.hands_on and self._is_returned(given)
        self._called.append(block)
        try:
            check_output(returned, _batch_of(given, is_first=False))
        except CannotSplitError as error:
            self.why_not = f"{block.path}: {error}"
        is_tuple = isinstance(returned, tuple)
        block.num_returned = len(returned) if is_tuple else None
        block.hands_on = not is_tuple or all(each is None for each in returned[1:])
        self._returned = returned[0] if is_tuple and returned else returned
        self._version = getattr(self._returned, "_version", 0)
        return returned

    def _is_returned(self, given: Any) -> bool:
        """Whether this is what the block before returned. ZeRO 3 hands on another tensor over the same memory."""
        returned = self._returned
        if given is returned or not (isinstance(given, torch.Tensor) and isinstance(returned, torch.Tensor)):
            return given is returned
        is_same_memory = given.data_ptr() == returned.data_ptr() and given.stride() == returned.stride()
        return is_same_memory and given.shape == returned.shape and given._version == self._version

    def _why_not_as_called(self) -> str:
        """Return why blocks cannot be split, after a forward that was watched; empty where they can."""
        missing = [block.path for block in self.blocks if block.layers and block not in self._called]
        if missing:
            return f"{missing[0]} was not called in a forward"
        for block in self.blocks:
            if len(block.layers) > 1:
                return f"{block.path} has {len(block.layers)} layers with experts: must be one"
        return ""


def is_again() -> bool:
    """Whether a forward runs again, for a backward."""
    return runs_again()


def _first(block: Block, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, tuple, dict[str, Any]]:
    """Return the first argument of a block, and the others by place and by name."""
    if args:
        return args[0], args[1:], kwargs
    return (
        kwargs.get(block.name_of_first),
        (),
        {name: each for name, each in kwargs.items() if name != block.name_of_first},
    )


def _batch_of(given: Any, is_first: bool = True) -> int:
    """Return the samples of what a block is called with.

    Raises:
        CannotSplitError: there is one, or it has no dimension for them.
    """
    if not isinstance(given, torch.Tensor) or given.dim() < 3:
        raise CannotSplitError("it is not called with samples, positions and width")
    if is_first and len(given) < 2:
        raise CannotSplitError(f"there are {len(given)} samples in a batch of this rank: must be two or more")
    return len(given)


def _all_looked_at(named: dict[str, _Given]) -> dict[str, _Given]:
    return {name: looked_at(each) for name, each in named.items()}
