# SPDX-License-Identifier: Apache-2.0
"""Replays the routing of layers: from a recording, or in a forward that is recomputed under activation checkpointing.

``engine.routing_data`` arms a :class:`Replay`; ``state`` takes a layer's choice from it in each call.
:class:`RouterChoice` replaces the choice of a Hugging Face router. A :class:`Tape` keeps the decisions of checkpointed
functions.
"""

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

# ---- Recorded choices for the layers of an engine


class ReplayError(ValueError):
    """Reports recorded choices that do not fit the layers that replay them. Raised on every rank."""


class Replay:
    """Supplies recorded choices to layers, one forward at a time.

    All ranks are armed for the same forwards. The first layer of such a forward checks on all ranks that the choices
    are for the number of tokens.
    """

    def __init__(self) -> None:
        self._choices: dict[str, ReplayedRouting | None] | None = None
        self._names: dict[str, str] = {}
        self._is_checked = False
        self._has_any = False
        self._replayed: set[str] = set()

    @property
    def is_armed(self) -> bool:
        """Return True if the next or the present forward is replayed."""
        return self._choices is not None

    @functools.cached_property
    def control_group(self) -> dist.ProcessGroup | None:
        """Return the ranks of the job in a group that does not wait for devices. Collective the first time."""
        if world_size_now() == 1 or dist.get_backend() == dist.Backend.GLOO:
            return None
        with waiting("a new process group"):
            return dist.new_group(backend="gloo")

    def arm(self, choices: Mapping[str, ReplayedRouting | None] | None, names: Mapping[str, str]) -> None:
        """Replay the next forward; called on every rank, whatever choices it has.

        Args:
            choices: label of a layer -> its choices, ``None`` if it chooses by itself; ``None`` in place of all: the
                layers of this rank choose by themselves.
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
        """End a replayed forward.

        Raises:
            ReplayError: a layer with choices did not run in it.
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
            ReplayError: the layer has run in this forward before, or is recomputed within the backward by an unknown
                kind of checkpointing.
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
        """Check that a layer's choices fit its tokens. Collective at the first layer of a forward.

        Raises:
            ReplayError: they do not fit, on any rank.
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
    """Return the choices of layers on a device; ``None`` for a layer whose tokens all choose by themselves.

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
    # Without tokens the choices contain no information.
    alone, sizes = [bool((each < 0).all()) for each in on_host], [each.shape[-1] for each in on_host]
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    on_device = on_host.to(device, non_blocking=True)
    return [
        None if tokens and is_live else ReplayedRouting(each, leaves_some=some)
        for each, some, is_live, tokens in zip(on_device, leaves, alone, sizes, strict=True)
    ]


# ---- Replay in the router of a Hugging Face model
#
# The routers of transformers choose with ``torch.topk``, with different code around it: scores of all kinds, a bias for
# the choice alone, groups, weights that are normalised, scaled, or a softmax over the chosen. So the router runs
# unchanged, and only the result of this operator is replaced: the experts by the replayed ones, its values by their
# scores, with gradients. Where scores were masked for the choice, such as those of excluded groups, values are those
# before the mask.
#
# Letters: S tokens, E classes of a router, k choices.


_TOP_K = (torch.topk, torch.Tensor.topk)
_MASKS = (torch.masked_fill, torch.Tensor.masked_fill)
_MASKS_IN_PLACE = (torch.Tensor.masked_fill_,)


class _ScoresOf(torch.autograd.Function):
    """Gathers scores [..., E] at [..., k].

    It saves one tensor of indices for the backward, as ``topk`` does and ``gather`` does not. torch's checkpointing
    compares the tensors that a forward saves with those of its recomputation.
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
        num_experts: the minimum number of classes of a choice.
        replayed: the choice to replay; ``None``: the router's own is recorded.
    """

    def __init__(self, num_experts: int, replayed: ReplayedRouting | None) -> None:
        super().__init__()
        self.replayed = replayed
        self.chosen_KS: torch.Tensor | None = None
        """[k, S]: the choice of the router, or the replayed one; ``None`` before there was one."""
        self.index: torch.Tensor | None = None
        """The indices that the operator returned to the router."""
        self.version = 0
        self._num_experts = num_experts
        self._unmasked: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._is_on = False

    def begin(self) -> None:
        """Start to observe, in this thread."""
        self.__enter__()
        self._is_on = True

    def end(self) -> None:
        """Stop observing."""
        if self._is_on:
            self._is_on = False
            self.__exit__(None, None, None)
        self._unmasked.clear()

    @property
    def is_passed_on(self) -> bool:
        """Return True if the operator's result is unchanged."""
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
"""The key of the hooks in a block: compiled code of one block depends on the keys, and must run for the others."""


def _rename(number: int, *hooks: dict[Any, Any]) -> None:
    for each in hooks:
        each[_NAME] = each.pop(number)


class RouterWatch:
    """Starts to observe a router at the call of the block around its experts, and stops if the experts are not reached.

    Args:
        block: the module that calls router and experts.
        experts: the module of experts, whose state decides what is observed.
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
        # In compiled code only plain attributes are read. There a recomputed block computes the same as before.
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


# ---- Replay in a recomputed forward
#
# Under activation checkpointing a layer runs once more within the backward. Rounding may differ there, and two close
# scores may change their order: gradients would be those of another forward. So each checkpointed function has a tape,
# on which layers keep their decisions, and from which they take them when the function runs again.
#
# Both kinds of torch's checkpointing are wrapped so that a function gets its tape. A trial checks that torch calls the
# wrappers, as an existing name may be unused.


_GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
"""The names of torch's generator of non-reentrant checkpointing: that of torch 2.14 and later first."""


class Tape:
    """Keeps the decisions of layers in a checkpointed function, by layer, in the order of their calls."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Any]] = {}
        self._num_taken: dict[int, int] = {}

    def keep(self, layer: int, replayed: Any) -> None:
        """Keep the next decision of a layer."""
        self._kept.setdefault(layer, []).append(replayed)

    def take(self, layer: int) -> Any:
        """Return the next decision of a layer in this run; ``None`` if it kept none."""
        number = self._num_taken.get(layer, 0)
        self._num_taken[layer] = number + 1
        kept = self._kept.get(layer, [])
        return kept[number] if number < len(kept) else None

    @contextmanager
    def running(self, is_again: bool) -> Iterator[None]:
        """Record the decisions of layers on this tape inside the block.

        Args:
            is_again: whether layers take decisions from the tape instead, from its beginning.
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
    """Return True if a decision that is made now is kept for a function that may run again."""
    tapes = _tapes.get()
    return bool(tapes) and any(not is_again for _, is_again in tapes)


def runs_again() -> bool:
    """Return True if a checkpointed function is being recomputed."""
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
    """Return ``decided`` and keep it for a recomputation; in a recomputed function, return the first run's."""
    if _tapes.get():
        found = take(layer)
        decided = decided if found is None else found
        keep(layer, decided)
    return decided


def remembering(route: Gate, gate: Any, layer: object, replayed: ReplayedRouting | None) -> Gate:
    """Return a layer's routing function that replays a choice, and keeps its decision for functions that may run again.

    Args:
        route: the layer's routing function.
        gate: the module that decides; one that accepts no choice decides by itself.
        layer: the layer, as a key.
        replayed: the choice to replay.
    """
    can_take = isinstance(gate, GateBase) or getattr(gate, "takes_given", False)
    replayed = replayed if can_take else None
    if replayed is None and not is_kept():
        return route

    def routed(*args: Any) -> RoutingBase:
        if replayed is not None:
            gate.given = replayed
        try:
            routing = route(*args)
        finally:
            if replayed is not None:
                gate.given = None
        keep(layer, routing.given() if can_take else None)
        return routing

    return routed


class Taped:
    """Calls a function: the first call is its forward, and keeps decisions; later calls take them.

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
    """Wrap torch's checkpointing so that functions have tapes, in this process. A second call has no effect.

    Raises:
        RuntimeError: this torch does not call the wrapped functions, or lacks their arguments.
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
        # A compiler accepts its own contexts only, and runs no layer of ours.
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
    """Return True if a function has a tape when torch checkpoints it, and the same one when it runs again."""
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
    """Return a function that creates a user's two contexts, inside those of a tape."""

    def contexts() -> tuple[Any, Any]:
        tape, (first, again) = Tape(), context_fn()
        return _both(partial(tape.running, False), first), _both(partial(tape.running, True), again)

    return contexts


class _both:
    """Enters a new context each time, and a given one inside it; may be entered repeatedly."""

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
