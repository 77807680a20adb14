# SPDX-License-Identifier: Apache-2.0
"""Lets layers route by choices that are given, or as they did the first time where a forward is computed again."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ds_fsmoe.components.gate import GateBase, in_backward
from ds_fsmoe.components.routing import ReplayedRouting, RoutingBase
from ds_fsmoe.distributed.fail_together import raise_on_all_ranks
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.layer.parts import LayerError
from ds_fsmoe.observing.instruments import Gate

# ---- Holds the choices by which the layers of an engine are to route in the next forward


class ReplayError(ValueError):
    """Recorded choices do not fit the layers that replay them. Raised on every rank."""


class Replay:
    """Hands out choices, a forward at a time.

    All ranks are armed for the same forwards; the first layer of such a forward looks on all ranks whether the choices
    are for as many tokens as there are.
    """

    def __init__(self) -> None:
        self._choices: dict[str, ReplayedRouting | None] | None = None
        self._names: dict[str, str] = {}
        self._is_checked = False
        self._has_any = False
        self._replayed: set[str] = set()

    @property
    def is_armed(self) -> bool:
        """Whether the next forward, or the one that is under way, is one of those that are replayed."""
        return self._choices is not None

    @functools.cached_property
    def control_group(self) -> dist.ProcessGroup | None:
        """The ranks of the job, in a group that does not wait for devices. Collective the first time."""
        if world_size_now() == 1 or dist.get_backend() == dist.Backend.GLOO:
            return None
        with waiting("a new process group"):
            return dist.new_group(backend="gloo")

    def arm(self, choices: Mapping[str, ReplayedRouting | None] | None, names: Mapping[str, str]) -> None:
        """Replay the next forward; the same on every rank, whatever each has.

        Args:
            choices: label of a layer -> its choices, ``None`` if it chooses by itself; ``None`` in place of all: the
                layers of this rank do.
            names: label -> path of every layer, for messages.
        """
        self._choices = dict(choices or {})
        self._has_any = bool(choices)
        self._names = dict(names)
        self._is_checked = False

    def disarm(self) -> None:
        """End the replay: layers choose by themselves again."""
        self._choices = None

    def finish(self) -> None:
        """End a forward that was replayed.

        Raises:
            ReplayError: a layer did not run in it.
        """
        choices, self._choices = self._choices, None
        left = [label for label, replayed in (choices or {}).items() if replayed is not None]
        if left:
            names = ", ".join(self._names[label] for label in left)
            raise ReplayError(
                f"the routing of {names} was to be replayed, but these layers did not run in this forward"
            )

    def take(self, label: str) -> ReplayedRouting | None:
        """Return the choices of a layer in this forward.

        Raises:
            ReplayError: the layer has run in this forward before, or runs again within the backward in a way that is
                not known here.
        """
        if in_backward():
            if label in self._replayed:
                raise ReplayError(
                    f"{self._names[label]} is recomputed in the backward by an activation checkpointing that is "
                    "neither torch's nor DeepSpeed's: its routing was replayed in the forward, and cannot be in "
                    "the recomputation"
                )
            return None
        self._replayed.discard(label)
        if self._choices is None or not self._has_any:
            return None
        if label not in self._choices:
            raise ReplayError(f"{self._names[label]} runs twice in a forward, but the replay has one choice for it")
        replayed = self._choices.pop(label)
        if replayed is not None:
            self._replayed.add(label)
        return replayed

    def check(self, label: str, replayed: ReplayedRouting | None, num_tokens: int) -> None:
        """Check that a layer's choices are for its tokens. Collective at the first layer of a forward.

        Raises:
            ReplayError: they are not, on any rank.
        """
        if self._choices is None or in_backward():
            return
        is_first, self._is_checked = not self._is_checked, True
        problem = None
        if replayed is not None and replayed.experts_KS is not None and replayed.experts_KS.shape[1] != num_tokens:
            problem = ReplayError(
                f"choices of {replayed.experts_KS.shape[1]} tokens were given for {self._names[label]}, which has "
                f"{num_tokens} tokens in this forward (all those of a batch, padding too)"
            )
        if is_first:
            with raise_on_all_ranks(self.control_group, "routing was replayed", ReplayError):
                if problem is not None:
                    raise problem
        elif problem is not None:
            raise problem


def choices_on_device(
    array: Any, device: torch.device, num_experts: list[int], is_own: bool = False
) -> list[ReplayedRouting | None]:
    """Return the choices of layers, on a device; ``None`` for one in which all tokens choose by themselves.

    Args:
        array: [S, L, k] integers on the host.
        device: the device of the layers.
        num_experts: E of each of the L layers.
        is_own: whether routers of these layers made the choices, which may then be of classes beyond E.
    """
    on_host = torch.as_tensor(array).permute(1, 2, 0).to(torch.int64).contiguous()
    leaves = [
        bool((each < 0).any() or (not is_own and (each >= E).any()))
        for each, E in zip(on_host, num_experts, strict=True)
    ]
    # Without tokens there is nothing that they say.
    alone, sizes = [bool((each < 0).all()) for each in on_host], [each.shape[-1] for each in on_host]
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    on_device = on_host.to(device, non_blocking=True)
    return [
        None if tokens and is_live else ReplayedRouting(each, leaves_some=some)
        for each, some, is_live, tokens in zip(on_device, leaves, alone, sizes, strict=True)
    ]


# ---- Lets the router of a Hugging Face model decide by a choice that is given
#
# The routers of transformers choose with ``torch.topk``, in their own ways before and after it: scores of all kinds,
# a bias for the choice alone, groups, weights that are normalised, scaled, or a softmax over the chosen. So the
# router runs as it is, and only the result of this one operator is replaced: the experts by those that are given, its
# values by the scores of these, with their gradients. Where scores were masked for the choice, such as those of
# groups that are out, values are taken from before the mask.
#
# Letters: S tokens, E classes that a router has, k choices.


_TOP_K = (torch.topk, torch.Tensor.topk)
_MASKS = (torch.masked_fill, torch.Tensor.masked_fill)
_MASKS_IN_PLACE = (torch.Tensor.masked_fill_,)


class _ScoresOf(torch.autograd.Function):
    """Gathers scores [..., E] at [..., k].

    It keeps one tensor of indices for the backward, as ``topk`` does and ``gather`` does not: torch's checkpointing
    compares what a forward keeps with what it keeps when it runs again.
    """

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.shape = scores.shape
        return scores.gather(-1, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).scatter_add_(-1, index, grad), None


class RouterChoice(TorchFunctionMode):
    """Observes a router's choice from the call of its block on, and replaces or records it.

    Args:
        num_experts: the fewest classes that a choice is made among.
        replayed: the choice to go by; ``None``: the router's own is remembered.
    """

    def __init__(self, num_experts: int, replayed: ReplayedRouting | None) -> None:
        super().__init__()
        self.replayed = replayed
        self.chosen_KS: torch.Tensor | None = None
        """[k, S]: the choice as the router made it, or as it was given; ``None`` as long as there was none."""
        self.index: torch.Tensor | None = None
        """The indices that the operator has returned to the router."""
        self.version = 0
        self._num_experts = num_experts
        self._unmasked: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._is_on = False

    def begin(self) -> None:
        """Watch from now on, in this thread."""
        self.__enter__()
        self._is_on = True

    def end(self) -> None:
        """Stop watching."""
        if self._is_on:
            self._is_on = False
            self.__exit__(None, None, None)
        self._unmasked.clear()

    @property
    def is_passed_on(self) -> bool:
        """Whether the operator's result is unchanged."""
        return self.index is not None and self.index._version == self.version

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator of the router, or its replacement."""
        kwargs = kwargs or {}
        if func in _TOP_K:
            return self._top_k(func, *args, **kwargs)
        if self.replayed is not None and func in (*_MASKS, *_MASKS_IN_PLACE):
            scores = args[0].clone() if func in _MASKS_IN_PLACE else args[0]
            masked = func(*args, **kwargs)
            self._unmasked[id(masked)] = masked, self._unmasked.get(id(args[0]), (None, scores))[1]
            return masked
        return func(*args, **kwargs)

    def _top_k(self, func: Any, input: torch.Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
        is_among_experts = dim in (-1, input.dim() - 1) and input.shape[-1] >= self._num_experts
        num_tokens = input.numel() // max(1, input.shape[-1])
        if self.replayed is None or not is_among_experts or tuple(self.replayed.experts_KS.shape) != (k, num_tokens):
            found = func(input, k, dim, *args, **kwargs)
        else:
            with torch.no_grad():
                own = func(input, k, dim, *args, **kwargs)
            found = self._replayed(input, own)
        if is_among_experts and (self.replayed is None or found.indices.numel() == self.replayed.experts_KS.numel()):
            self.index, self.version = found.indices, found.indices._version
            self.chosen_KS = found.indices.detach().reshape(-1, k).t()
        return found

    def _replayed(self, scores: torch.Tensor, own: Any) -> Any:
        index = self.replayed.experts_KS.t().reshape(own.indices.shape).to(own.indices.dtype)
        if self.replayed.leaves_some:
            index = torch.where((index < 0) | (index >= scores.shape[-1]), own.indices, index)
        unmasked = self._unmasked.get(id(scores), (None, scores))[1]
        return type(own)((_ScoresOf.apply(unmasked, index), index))


_NAME: Any = "ds_fsmoe.router_choice"
"""The key of the hooks in a block: what a compiler makes of one block depends on the keys, and is to run the others."""


def _rename(number: int, *hooks: dict[Any, Any]) -> None:
    for each in hooks:
        each[_NAME] = each.pop(number)


class RouterWatch:
    """Begins to watch a router where the block around its experts is called, and ends if the experts are not reached.

    Args:
        block: the module that calls router and experts.
        experts: the module of experts, whose state says what is wanted.
    """

    def __init__(self, block: nn.Module, experts: Any) -> None:
        self._experts = experts
        self.block = block
        self.handles: list[RemovableHandle] = [
            block.register_forward_pre_hook(self._begin),
            block.register_forward_hook(self._end, always_call=True),
        ]
        begin, end = (handle.id for handle in self.handles)
        _rename(begin, block._forward_pre_hooks)
        _rename(end, block._forward_hooks, block._forward_hooks_always_called)
        for handle in self.handles:
            handle.id = _NAME

    def _begin(self, block: nn.Module, args: Any) -> None:
        # In compiled code, only what is plain to read. A block that runs again computes there what it computed before.
        if not torch.compiler.is_compiling():
            self._experts.fsmoe.begin_choice()
        elif self._experts.fsmoe.running.needs_routers:
            _refuse_compiled(self._experts.fsmoe.path)

    def _end(self, block: nn.Module, args: Any, result: Any) -> None:
        if not torch.compiler.is_compiling():
            self._experts.fsmoe.end_choice()


@torch._disable_dynamo
def _refuse_compiled(path: str) -> None:
    raise LayerError(
        f"{path}: routing is recorded and replayed in forwards of the engine only: call the engine that "
        "ds_fsmoe.initialize returned, not its module"
    )


# ---- Lets a forward that is computed again route as it did the first time
#
# Under activation checkpointing a layer runs once more within the backward. Rounding may differ there, and two scores
# that are close change places: gradients would be those of another forward. So each checkpointed function has a tape,
# on which layers keep what they decided, and from which they take it when the function runs again.
#
# A function is given its tape where torch's checkpointing takes it, of either kind. Whether torch calls what stands
# there is tried when it is put there, as a name that is still there may be called by nobody.


_GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
"""The names of what runs a function without reentrance: that of torch 2.14 and later first."""


class Tape:
    """Holds the decisions of layers in a checkpointed function, by layer, in the order of their calls."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Any]] = {}
        self._num_taken: dict[int, int] = {}

    def keep(self, layer: int, replayed: Any) -> None:
        """Keep the next decision of a layer."""
        self._kept.setdefault(layer, []).append(replayed)

    def take(self, layer: int) -> Any:
        """Return the next decision of a layer in this run; ``None``: it kept none."""
        number = self._num_taken.get(layer, 0)
        self._num_taken[layer] = number + 1
        kept = self._kept.get(layer, [])
        return kept[number] if number < len(kept) else None

    @contextmanager
    def running(self, is_again: bool) -> Iterator[None]:
        """Record the decisions of layers on this tape inside the block.

        Args:
            is_again: whether they take it from the tape instead, from its beginning on.
        """
        if is_again:
            self._num_taken.clear()
        _tapes.set((*_tapes.get(), (self, is_again)))
        try:
            yield
        finally:
            _tapes.set(_tapes.get()[:-1])


_tapes: ContextVar[tuple[tuple[Tape, bool], ...]] = ContextVar("tapes", default=())
"""The tapes of the functions that run in this context, the innermost last, and whether they run again."""


def is_kept() -> bool:
    """Return whether a decision that is made now is kept for a function that may run again."""
    tapes = _tapes.get()
    return bool(tapes) and any(not is_again for _, is_again in tapes)


def runs_again() -> bool:
    """Return whether a checkpointed function runs again now."""
    tapes = _tapes.get()
    return bool(tapes) and any(is_again for _, is_again in tapes)


def keep(layer: object, replayed: Any) -> None:
    """Keep a layer's decision for all functions around it that may be recomputed."""
    for tape, is_again in _tapes.get():
        if not is_again:
            tape.keep(id(layer), replayed)


def take(layer: object) -> Any:
    """Return a layer's decision in the first run of the innermost function that is recomputed."""
    tape = next((tape for tape, is_again in reversed(_tapes.get()) if is_again), None)
    return None if tape is None else tape.take(id(layer))


def as_first(layer: object, decided: bool) -> bool:
    """Return a layer's decision in a function's first run, unless this is the first; and keep it."""
    if _tapes.get():
        found = take(layer)
        decided = decided if found is None else found
        keep(layer, decided)
    return decided


def remembering(route: Gate, gate: Any, layer: object, replayed: ReplayedRouting | None) -> Gate:
    """Return a layer's way to decide that goes by what is given, and is kept for functions that may run again.

    Args:
        route: the layer's way to decide.
        gate: the module that decides; a gate that takes nothing decides by itself.
        layer: the layer, as a key.
        replayed: the choice to go by.
    """
    can_take = isinstance(gate, GateBase) or getattr(gate, "can_replay", False)
    replayed = replayed if can_take else None
    if replayed is None and not is_kept():
        return route

    def routed(*args: Any) -> RoutingBase:
        if replayed is not None:
            gate.replayed = replayed
        try:
            routing = route(*args)
        finally:
            if replayed is not None:
                gate.replayed = None
        keep(layer, routing.given() if can_take else None)
        return routing

    return routed


class Taped:
    """Calls a function: the first call is its forward, and keeps decisions; later ones take them.

    Args:
        function: a function that checkpointing will call again.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function = function
        self._tape = Tape()
        self._has_run = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function with its tape."""
        is_again, self._has_run = self._has_run, True
        with self._tape.running(is_again):
            return self._function(*args, **kwargs)


def tape_torchs_functions() -> None:
    """Give functions that torch checkpoints their tapes, from now on in this process. Without effect the second time.

    Raises:
        RuntimeError: this torch does not call what is replaced, or does not take what is given to it.
    """
    if getattr(torch_checkpoint, "_ds_fsmoe_tapes", False):
        return
    reentrant = torch_checkpoint.CheckpointFunction
    forward = reentrant.forward
    name = next((each for each in _GENERATORS if hasattr(torch_checkpoint, each)), _GENERATORS[-1])
    generator = getattr(torch_checkpoint, name, None)
    signature = None if generator is None else inspect.signature(generator)
    if signature is None or "context_fn" not in signature.parameters:
        raise RuntimeError(_refused(name, "takes no context_fn"))

    @functools.wraps(forward)
    def taped_forward(ctx: Any, run_function: Any, *args: Any) -> Any:
        return forward(ctx, Taped(run_function), *args)

    @functools.wraps(generator)
    def taped_generator(*args: Any, **kwargs: Any) -> Any:
        # A compiler takes contexts that are its own only, and runs no layer of ours.
        if torch.compiler.is_compiling():
            return generator(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.arguments["context_fn"] = _with_tape(bound.arguments.get("context_fn", torch_checkpoint.noop_context_fn))
        return generator(*bound.args, **bound.kwargs)

    reentrant.forward = staticmethod(taped_forward)
    setattr(torch_checkpoint, name, taped_generator)
    for use_reentrant, seam in ((True, "CheckpointFunction.forward"), (False, name)):
        if not _has_tape(use_reentrant):
            reentrant.forward = staticmethod(forward)
            setattr(torch_checkpoint, name, generator)
            raise RuntimeError(_refused(seam, f"is not called by checkpoint(use_reentrant={use_reentrant})"))
    torch_checkpoint._ds_fsmoe_tapes = True


def _refused(name: str, why: str) -> str:
    return (
        f"torch {torch.__version__}: torch.utils.checkpoint.{name} {why}: under activation checkpointing layers "
        "would choose new experts when they are recomputed"
    )


def _has_tape(use_reentrant: bool) -> bool:
    """Return whether a function has a tape when torch checkpoints it, and the same one when it runs again."""
    taped: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        taped.append(runs_again() if taped else is_kept())
        return x * x

    with torch.enable_grad():
        x = torch.ones((), device="cpu", requires_grad=True)
        options = {"use_reentrant": use_reentrant, "preserve_rng_state": False}
        torch_checkpoint.checkpoint(function, x, **options).backward()
    return taped == [True, True]


def _with_tape(context_fn: Callable[[], tuple[Any, Any]]) -> Callable[[], tuple[Any, Any]]:
    """Return a function that makes a user's two contexts, with those of a tape around them."""

    def contexts() -> tuple[Any, Any]:
        tape, (first, again) = Tape(), context_fn()
        return _both(partial(tape.running, False), first), _both(partial(tape.running, True), again)

    return contexts


class _both:
    """Enters a context that is made anew each time, and one that is there, as often as it is asked to."""

    def __init__(self, make: Callable[[], Any], other: Any) -> None:
        self._make, self._other = make, other
        self._stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        stack.enter_context(self._make())
        stack.enter_context(self._other)
        self._stacks.append(stack)

    def __exit__(self, *error: Any) -> bool | None:
        return self._stacks.pop().__exit__(*error)
