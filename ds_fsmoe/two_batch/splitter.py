# SPDX-License-Identifier: Apache-2.0
"""Decides which forwards of a model run with two-batch overlap, and runs its blocks accordingly.

The engine creates a :class:`Splitter`, whose calls replace the blocks' forwards; ``run`` executes them. The first
forward in training runs unchanged and is observed: the blocks' arguments and results, and which result goes directly
into the next block. Ranks agree on the observations. After such a result the sub-batches continue into the next block
without being joined.

Ranks agree once per forward, at its first block, whether it is split: different numbers of calls of layers would
deadlock. Each rank alone decides whether sub-batches are joined between two blocks: the calls of
layers, and their order, are the same.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from ds_fsmoe.layer.replay import is_kept, runs_again
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.two_batch.run import (
    CannotSplitError,
    Pending,
    Rest,
    TwoBatchRun,
    check_cache,
    check_output,
    resolved,
    sub_batches_of,
    wants_blocks,
)

_AT_RANDOM = ("p", "attention_dropout", "jitter_noise", "router_jitter_noise")
"""Names of attributes with the probability of dropout or jitter."""
Agree = Callable[[Sequence[bool]], Sequence[bool]]
"""Returns for each of some facts whether it is true on all ranks. Collective over ranks that run the same blocks."""


class Splitter:
    """Runs blocks in sub-batches, for one engine.

    Args:
        model: the model.
        layers: path -> its layer with experts, in the order of the forward.
        named: names of the blocks' classes; empty: they are found.
        agree: returns the agreement of all ranks.
        holds: returns whether batches must stay whole for now, the same on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        named: Sequence[str],
        agree: Agree,
        holds: Callable[[], bool],
    ) -> None:
        self._layers = layers
        self._agree = agree
        self._holds = holds
        self._chains, self.why_not = find_chains(model, layers, named)
        self.why_whole = ""
        """The reason why the last forward that might have been split, or was observed, ran with the whole batch; empty
        without one."""
        self.is_worth_trying = False
        """True if also every rank had more than one sample in the observed forward."""
        self._next: dict[Block, Block] = {
            block: after for chain in self._chains for block, after in itertools.pairwise(chain)
        }
        self._is_watched = False
        self._watch = _Watch(self._next)
        self._is_agreed: bool | None = False
        """The ranks' decision about this forward; ``None`` ahead of its first block, False outside of forwards."""
        self._run: TwoBatchRun | None = None
        self._pending: Pending | None = None
        self._logged: set[str] = set()
        self.num_runs = 0
        """The number of runs in sub-batches that were started."""
        for block in self.blocks:
            block.take(self._call)

    @property
    def blocks(self) -> list[Block]:
        """Return the blocks of all chains."""
        return [block for chain in self._chains for block in chain]

    @property
    def is_wanted(self) -> bool:
        """Return True if layers' plans want two-batch overlap and no obstacle is known; the same on every rank."""
        return self.is_planned and self._is_watched and not self.why_not and not self._holds()

    @property
    def is_planned(self) -> bool:
        """Return True if a layer's plan wants two-batch overlap."""
        pipelines = (layer.pipeline for layer in self._layers.values())
        return any(each is not None and each.forward.is_two_batch for each in pipelines)

    def begin_forward(self) -> None:
        """Start a forward of the model, and drop the remains of an earlier one."""
        if self._run is not None:
            self._run.close()
        self._run = self._pending = self._is_agreed = None
        self._watch = _Watch(self._next)

    def end_forward(self, is_training: bool, has_batch: bool = True) -> None:
        """End a forward of the model. Collective after the observed one.

        Args:
            is_training: whether it was a forward in training.
            has_batch: whether this rank had a batch in it; if a rank had none, the next forward is observed.
        """
        self._is_agreed = False
        if self._is_watched or not is_training or not self._chains:
            return
        watch, self._watch = self._watch, _Watch(self._next)
        why = watch.why_not or _why_not_as_called(self.blocks, watch.called)
        facts = [has_batch, not why, watch.has_samples, *(block.has_next for block in self.blocks)]
        self._is_watched, can_split, is_worth_trying, *have_next = self._agree(facts)
        if not self._is_watched:
            return
        self.is_worth_trying = is_worth_trying
        self.why_whole = "" if is_worth_trying else "a rank has fewer than two samples in a batch"
        for block, has_next in zip(self.blocks, have_next, strict=True):
            block.has_next = has_next
        if not can_split:
            self.why_not, self.is_worth_trying = why or "another rank cannot", False
            if self.is_planned:
                self._warn_first_time(f"two-batch overlap is off: {self.why_not}")

    def decline(self) -> None:
        """Vote against a split forward on a rank that has no batch. Collective if there is a decision to take."""
        if self.is_wanted and torch.is_grad_enabled():
            self._agree([False])

    def close(self) -> None:
        """Restore the blocks' own forwards."""
        for block in self.blocks:
            block.give_back()

    def _call(self, block: Block, *args: Any, **kwargs: Any) -> Any:
        """Run a block, in place of its forward."""
        given, rest = _first(block, args, kwargs)
        if torch.compiler.is_compiling() or not (block.module.training and torch.is_grad_enabled()) or runs_again():
            return _whole(block, args, kwargs)
        if not self._is_watched:
            return self._watch.run(block, given, rest, args, kwargs)
        is_next = isinstance(given, Pending) and given is self._pending and given.is_open
        if not is_next and (not self.is_wanted or isinstance(given, Pending)):
            return _whole(block, args, kwargs)
        batch = self._run.batch if is_next and self._run is not None else _samples(given)
        rests, why = _rests(block, rest, batch)
        if self._is_agreed is None:
            (self._is_agreed,) = self._agree([not why])
            self.why_whole = "" if self._is_agreed else why or "another rank cannot cut its batch"
        if not self._is_agreed:
            if why:
                self._warn_first_time(f"{block.path} runs with the whole batch: {why}")
            return _whole(block, args, kwargs)
        if why:
            raise RuntimeError(
                f"{block.path} cannot run in sub-batches, but the blocks before it do, and so do other ranks: {why}. "
                'Set fsmoe.two_batch_overlap to "off"'
            )
        if not is_next:
            self._begin(given)
        return self._go_on(block, rests)

    def _begin(self, x_BLM: torch.Tensor) -> None:
        if self._run is not None:
            self._run.close()
        self._run = TwoBatchRun(x_BLM)
        self.num_runs += 1
        if self.num_runs == 1 and _drop_out(self.blocks):
            self._warn_first_time("blocks have dropout, whose masks differ between two sub-batches and the whole batch")

    def _go_on(self, block: Block, rests: Sequence[Rest]) -> Any:
        run = self._run
        run.add((block.forward_alone() if block.runs_again else None) or block.forward, rests, block.runs_again)
        if block.layers:
            run.advance()
        after = self._next.get(block)
        if not block.has_next or after is None or block.is_observed() or after.is_observed() or wants_blocks():
            return self._complete()
        if block.num_returned is None:
            self._pending = Pending(self._complete)
            return self._pending
        self._pending = Pending(lambda: self._complete()[0])
        return (self._pending, *(None,) * (block.num_returned - 1))

    def _complete(self) -> Any:
        run, self._run, self._pending = self._run, None, None
        return run.complete()

    def _warn_first_time(self, sentence: str) -> None:
        if sentence not in self._logged:
            self._logged.add(sentence)
            log_on_rank_0(f"fsmoe.two_batch_overlap: {sentence}", logging.WARNING)


class _Watch:
    """Runs blocks unchanged, and records their arguments and results.

    Args:
        after: block -> the one behind it in its chain.
    """

    def __init__(self, after: Mapping[Block, Block]) -> None:
        self._after = after
        self.called: list[Block] = []
        self.why_not = ""
        """The first reason why a block cannot be split, whatever the batch."""
        self.has_samples = True
        """False if a block was called with fewer than two samples."""
        self._returned: Any = None
        self._version = 0
        """torch's version counter of the last result when it was returned."""

    def run(self, block: Block, given: Any, rest: Rest, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a block unchanged, and record the call."""
        batch = _samples(given)
        # Whether arguments can be split does not depend on the number of samples.
        why = _rests(block, rest, batch)[1] if batch != 1 else ""
        returned = block.forward(*args, **kwargs)
        before = self.called[-1] if self.called else None
        if block in self.called:
            why = f"{block.path} is called several times in one forward"
        elif before is not None and self._after.get(before) is block:
            before.has_next = before.hands_on and self._is_returned(given)
        self.called.append(block)
        self.has_samples = self.has_samples and batch > 1
        try:
            check_output(returned, batch)
        except CannotSplitError as error:
            why = why or str(error)
        self.why_not = self.why_not or (f"{block.path}: {why}" if why else "")
        is_tuple = isinstance(returned, tuple)
        block.num_returned = len(returned) if is_tuple else None
        block.hands_on = not is_tuple or all(each is None for each in returned[1:])
        self._returned = returned[0] if is_tuple and returned else returned
        self._version = getattr(self._returned, "_version", 0)
        return returned

    def _is_returned(self, given: Any) -> bool:
        """Return True if a tensor is the result of the block before; ZeRO 3 passes another tensor on the same
        memory."""
        returned = self._returned
        if given is returned or not (isinstance(given, torch.Tensor) and isinstance(returned, torch.Tensor)):
            return given is returned
        is_same_memory = given.data_ptr() == returned.data_ptr() and given.stride() == returned.stride()
        return is_same_memory and given.shape == returned.shape and given._version == self._version


def _why_not_as_called(blocks: Sequence[Block], called: Sequence[Block]) -> str:
    """Return the reason why blocks cannot be split, after a forward that called some of them; empty if there is
    none."""
    for block in blocks:
        if block.layers and block not in called:
            return f"{block.path} was not called in a forward"
        if len(block.layers) > 1:
            return f"{block.path} has {len(block.layers)} layers with experts: must be one"
    return ""


def _whole(block: Block, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a block with the whole batch."""
    return block.forward(*resolved(args), **{name: resolved(each) for name, each in kwargs.items()})


def _first(block: Block, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Rest]:
    """Return the first argument of a block, and the others."""
    if args:
        return args[0], (args[1:], kwargs)
    others = {name: each for name, each in kwargs.items() if name != block.name_of_first}
    return kwargs.get(block.name_of_first), ((), others)


def _samples(given: Any) -> int:
    """Return the number of samples in the input of a block; 0 if it has no dimension for them."""
    return len(given) if isinstance(given, torch.Tensor) and given.dim() > 2 else 0


def _rests(block: Block, rest: Rest, batch: int) -> tuple[Sequence[Rest], str]:
    """Return the other arguments of a block for each sub-batch, and the reason if it cannot be split.

    Args:
        block: the block.
        rest: its other arguments.
        batch: the samples of its first argument, see :func:`_samples`.
    """
    args, named = rest
    try:
        check_cache(named)
        _check_again(block)
        if batch == 0:
            raise CannotSplitError("its input has no samples, positions and width")
        if batch == 1:
            raise CannotSplitError("this rank has one sample per batch: two-batch overlap needs at least two")
        by_place = [sub_batches_of(each, batch, f"argument {place + 2}") for place, each in enumerate(args)]
        by_name = {name: sub_batches_of(each, batch, name) for name, each in named.items()}
    except CannotSplitError as error:
        return (), str(error)

    def of(sub_batch: int) -> Rest:
        return tuple(pair[sub_batch] for pair in by_place), {name: pair[sub_batch] for name, pair in by_name.items()}

    return (of(0), of(1)), ""


def _check_again(block: Block) -> None:
    """Refuse a block whose checkpointing prevents sub-batches from being recomputed together.

    Raises:
        CannotSplitError: the block is checkpointed like that.
    """
    if is_kept():
        raise CannotSplitError("the module around it is checkpointed, and recomputes it alone")
    if block.runs_again and block.forward_alone() is None:
        raise CannotSplitError(f"it is checkpointed by itself, and recomputed alone{block.why_alone()}")
    if block.runs_again and _drop_out([block]):
        raise CannotSplitError("it has dropout and is checkpointed: recomputed sub-batches would draw other masks")


def _drop_out(blocks: Sequence[Block]) -> bool:
    modules = [each for block in blocks for each in block.module.modules()]
    shares = [getattr(each, name, 0) for each in modules for name in _AT_RANDOM]
    return any(isinstance(each, float) and each > 0 for each in shares)


# ---- The blocks of a model that may run in sub-batches, and replacements of their forwards


@dataclass(eq=False)
class Block:
    """Represents a block of a chain, whose result is the input of the next one."""

    path: str
    """Its path in the model."""
    module: nn.Module
    layers: tuple[nn.Module, ...]
    """Its layers with experts: one, or none in a block between two that have one."""
    forward: Callable[..., Any]
    """Its own forward."""
    has_next: bool = False
    """True if on all ranks its result was passed to the block after it unchanged."""
    num_returned: int | None = None
    """The length of the returned tuple; ``None``: it returns a tensor."""
    hands_on: bool = False
    """True if it returns one tensor, or a tuple whose other elements are ``None``."""
    name_of_first: str = "hidden_states"
    """The name of its first argument."""

    def take(self, call: Callable[..., Any]) -> None:
        """Replace the block's forward by ``call(block, *args, **kwargs)``."""
        self.module.forward = Before(self, call)

    def give_back(self) -> None:
        """Undo :meth:`take`, unless other code has wrapped the forward since."""
        if isinstance(vars(self.module).get("forward"), Before):
            own = self.forward
            if getattr(own, "__func__", None) is type(self.module).forward:
                del self.module.forward
            else:
                self.module.forward = own

    @property
    def runs_again(self) -> bool:
        """Return True if the model drops the block's activations, so that it runs again in the backward."""
        return bool(getattr(self.module, "gradient_checkpointing", False))

    def forward_alone(self) -> Callable[..., Any] | None:
        """Return its forward without the checkpointing wrapper of transformers; ``None`` if it has no such wrapper."""
        wrapper = getattr(self.forward, "__func__", None)
        inside = getattr(wrapper, "__wrapped__", None)
        if inside is None or wrapper.__globals__.get("__name__") != "transformers.modeling_layers":
            return None
        return types.MethodType(inside, self.module)

    def why_alone(self) -> str:
        """Return the version of transformers that makes a checkpointed block recompute alone, in words; empty if
        not."""
        if not any(each.__module__ == "transformers.modeling_layers" for each in type(self.module).mro()):
            return ""
        return f", as blocks of transformers before 5.23 do ({version('transformers')} is installed)"

    def is_observed(self) -> bool:
        """Return True if code other than DeepSpeed reads the block's result or arguments, which then must exist."""
        if not isinstance(vars(self.module).get("forward"), Before):
            return True
        of_all = torch.nn.modules.module
        if of_all._global_forward_hooks or of_all._global_forward_pre_hooks:
            return True
        hooks = (*self.module._forward_hooks.values(), *self.module._forward_pre_hooks.values())
        return not all(_acts_on_tensors_alone(each) for each in hooks)


class Before:
    """Replaces a block's forward. Copies of the block have their own forward again."""

    def __init__(self, block: Block, call: Callable[..., Any]) -> None:
        self._block = block
        self._call = call
        self.__signature__ = inspect.signature(block.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._block, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self._block.module)]
        return types.MethodType(type(copied).forward, copied)

    def __reduce__(self) -> tuple:
        module = self._block.module
        return types.MethodType, (type(module).forward, module)


def _acts_on_tensors_alone(hook: Any) -> bool:
    """Return True if a hook ignores values that are no tensors.

    Hooks of DeepSpeed do; for those of transformers :func:`wants_blocks` is checked in each forward.
    """
    if isinstance(hook, types.MethodType):
        hook = hook.__func__
    name = getattr(hook, "__module__", "") or ""
    return name.startswith(("deepspeed.", "transformers.utils.output_capturing"))


def find_chains(
    model: nn.Module, layers: Mapping[str, nn.Module], named: Sequence[str] = ()
) -> tuple[list[list[Block]], str]:
    """Return the chains of blocks of a model that contain layers with experts, or the reason why there are none.

    A block is the innermost element of a list of modules around a layer, or the nearest module around it with a named
    class. Elements of the list between two such belong to the chain too.

    Args:
        model: the model.
        layers: path -> the layer with experts.
        named: names of classes; empty: search lists of modules.

    Returns:
        (chains, the reason why there are none).
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    chains: dict[str, dict[str, list[nn.Module]]] = {}
    for path, layer in layers.items():
        found = _block_around(path, modules, named)
        if found is None:
            around = f"no module around it is a {' or a '.join(named)}" if named else "it is in no list of modules"
            return [], f"{path}: {around}"
        of_list, block = found
        chains.setdefault(of_list, {}).setdefault(block, []).append(layer)
    return [_chain(of_list, blocks, modules) for of_list, blocks in chains.items()], ""


def _block_around(path: str, modules: Mapping[str, nn.Module], named: Sequence[str]) -> tuple[str, str] | None:
    """Return the paths of the block around a layer and of the block's container: (container, block)."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        at, above = ".".join(parts[:length]), ".".join(parts[: length - 1])
        if named:
            # Its class may be a subclass, as ours are.
            if any(each.__name__ in named for each in type(modules[at]).__mro__):
                return above, at
        elif isinstance(modules[above], (nn.ModuleList, nn.Sequential)):
            return above, at
    return None


def _chain(of_list: str, blocks: Mapping[str, Sequence[nn.Module]], modules: Mapping[str, nn.Module]) -> list[Block]:
    holder = modules[of_list]
    paths = list(blocks)
    if isinstance(holder, (nn.ModuleList, nn.Sequential)):
        all_paths = [f"{of_list}.{name}" if of_list else name for name, _ in holder.named_children()]
        places = [all_paths.index(each) for each in paths]
        paths = all_paths[min(places) : max(places) + 1]
    return [_block(path, modules[path], blocks.get(path, ())) for path in paths]


def _block(path: str, module: nn.Module, layers: Sequence[nn.Module]) -> Block:
    parameters = list(inspect.signature(module.forward).parameters)
    return Block(path, module, tuple(layers), module.forward, name_of_first=parameters[0] if parameters else "")
