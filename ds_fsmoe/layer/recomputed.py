# SPDX-License-Identifier: Apache-2.0
"""Lets a forward that is computed again route as it did the first time.

Under activation checkpointing a layer runs once more within the backward. Rounding may differ there, and two scores
that are close change places: gradients would be those of another forward. So each checkpointed function has a tape, on
which layers keep what they decided, and from which they take it when the function runs again.

A function is given its tape where torch's checkpointing takes it, of either kind. Whether torch calls what stands there
is tried when it is put there, as a name that is still there may be called by nobody.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

from ds_fsmoe.components.gate import GateBase
from ds_fsmoe.components.routing import ReplayedRouting, RoutingBase
from ds_fsmoe.observing.instruments import Gate

_GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
"""The names of what runs a function without reentrance: that of torch 2.14 and later first."""


class Tape:
    """Holds what layers decided in a checkpointed function, by layer, in the order of their calls."""

    def __init__(self) -> None:
        self._kept: dict[int, list[ReplayedRouting | None]] = {}
        self._num_taken: dict[int, int] = {}

    def keep(self, layer: int, given: ReplayedRouting | None) -> None:
        """Keep the next decision of a layer."""
        self._kept.setdefault(layer, []).append(given)

    def take(self, layer: int) -> ReplayedRouting | None:
        """Return the next decision of a layer in this run; ``None``: it kept none."""
        number = self._num_taken.get(layer, 0)
        self._num_taken[layer] = number + 1
        kept = self._kept.get(layer, [])
        return kept[number] if number < len(kept) else None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep on this tape what layers decide meanwhile."""
        with _put_in(self, is_again=False):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Let layers take from this tape meanwhile, from its beginning on."""
        self._num_taken.clear()
        with _put_in(self, is_again=True):
            yield


_tapes: ContextVar[tuple[tuple[Tape, bool], ...]] = ContextVar("tapes", default=())
"""The tapes of the functions that run in this context, the innermost last, and whether they run again."""


@contextmanager
def _put_in(tape: Tape, is_again: bool) -> Iterator[None]:
    _tapes.set((*_tapes.get(), (tape, is_again)))
    try:
        yield
    finally:
        _tapes.set(_tapes.get()[:-1])


def is_kept() -> bool:
    """Return whether a decision that is made now is kept for a function that may run again."""
    tapes = _tapes.get()
    return bool(tapes) and any(not is_again for _, is_again in tapes)


def runs_again() -> bool:
    """Return whether a checkpointed function runs again now."""
    tapes = _tapes.get()
    return bool(tapes) and any(is_again for _, is_again in tapes)


def keep(layer: object, given: ReplayedRouting | None) -> None:
    """Keep what a layer decided for all functions around it that may run again."""
    for tape, is_again in _tapes.get():
        if not is_again:
            tape.keep(id(layer), given)


def take(layer: object) -> ReplayedRouting | None:
    """Return what a layer decided when the innermost function that runs again ran first."""
    tape = next((tape for tape, is_again in reversed(_tapes.get()) if is_again), None)
    return None if tape is None else tape.take(id(layer))


def remembering(route: Gate, gate: Any, layer: object, given: ReplayedRouting | None) -> Gate:
    """Return a layer's way to decide that goes by what is given, and is kept for functions that may run again.

    Args:
        route: the layer's way to decide.
        gate: the module that decides; a gate that takes nothing decides by itself.
        layer: the layer, as a key.
        given: the choice to go by.
    """
    can_take = isinstance(gate, GateBase) or getattr(gate, "takes_given", False)
    given = given if can_take else None
    if given is None and not is_kept():
        return route

    def routed(*args: Any) -> RoutingBase:
        if given is not None:
            gate.given = given
        try:
            routing = route(*args)
        finally:
            if given is not None:
                gate.given = None
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
        context = self._tape.replaying() if self._has_run else self._tape.recording()
        self._has_run = True
        with context:
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
        given = signature.bind(*args, **kwargs)
        given.arguments["context_fn"] = _with_tape(given.arguments.get("context_fn", torch_checkpoint.noop_context_fn))
        return generator(*given.args, **given.kwargs)

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
        f"torch {torch.__version__}: torch.utils.checkpoint.{name} {why}: under activation checkpointing layers would "
        "route by themselves when they run again"
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
        return _both(tape.recording, first), _both(tape.replaying, again)

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
