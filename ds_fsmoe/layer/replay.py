# SPDX-License-Identifier: Apache-2.0
"""Holds the choices by which the layers of an engine are to route in the next forward."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ds_fsmoe.components.gate import in_backward
from ds_fsmoe.components.routing import ReplayedRouting
from ds_fsmoe.distributed.fail_together import raise_on_all_ranks
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.layer.parts import LayerError


class ReplayError(ValueError):
    """Choices do not fit what is to go by them. Raised on every rank."""


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
        """Let layers choose by themselves again."""
        self._choices = None

    def finish(self) -> None:
        """End a forward that was replayed.

        Raises:
            ReplayError: a layer did not run in it.
        """
        choices, self._choices = self._choices, None
        left = [label for label, given in (choices or {}).items() if given is not None]
        if left:
            names = ", ".join(self._names[label] for label in left)
            raise ReplayError(f"routing was to be replayed in {names}, which did not run in this forward")

    def take(self, label: str) -> ReplayedRouting | None:
        """Return the choices of a layer in this forward.

        Raises:
            ReplayError: the layer has run in this forward before, or runs again within the backward in a way that is
                not known here.
        """
        if in_backward():
            if label in self._replayed:
                raise ReplayError(
                    f"{self._names[label]} is computed again within the backward, by another activation checkpointing "
                    "than torch's and DeepSpeed's: its routing was replayed in the forward, and would be the router's "
                    "own now"
                )
            return None
        self._replayed.discard(label)
        if self._choices is None or not self._has_any:
            return None
        if label not in self._choices:
            raise ReplayError(f"{self._names[label]} runs twice in a forward, and there is one choice to be replayed")
        given = self._choices.pop(label)
        if given is not None:
            self._replayed.add(label)
        return given

    def check(self, label: str, given: ReplayedRouting | None, num_tokens: int) -> None:
        """Look whether a layer's choices are for its tokens. Collective at the first layer of a forward.

        Raises:
            ReplayError: they are not, on any rank.
        """
        if self._choices is None or in_backward():
            return
        is_first, self._is_checked = not self._is_checked, True
        problem = None
        if given is not None and given.experts_KS is not None and given.experts_KS.shape[1] != num_tokens:
            problem = ReplayError(
                f"choices of {given.experts_KS.shape[1]} tokens were given for {self._names[label]}, which has "
                f"{num_tokens} tokens in this forward (all those of a batch, padding too)"
            )
        if is_first:
            with raise_on_all_ranks(self.control_group, "routing was replayed", ReplayError):
                _raise(problem)
        _raise(problem)


def _raise(problem: Exception | None) -> None:
    if problem is not None:
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
    """Watches what a router does from the call of its block on, and replaces its choice or remembers it.

    Args:
        num_experts: the fewest classes that a choice is made among.
        given: the choice to go by; ``None``: the router's own is remembered.
    """

    def __init__(self, num_experts: int, given: ReplayedRouting | None) -> None:
        super().__init__()
        self.given = given
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
        """Whether what the operator returned is as it was."""
        return self.index is not None and self.index._version == self.version

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator of the router, or what stands for it."""
        kwargs = kwargs or {}
        if func in _TOP_K:
            return self._top_k(func, *args, **kwargs)
        if self.given is not None and func in (*_MASKS, *_MASKS_IN_PLACE):
            scores = args[0].clone() if func in _MASKS_IN_PLACE else args[0]
            masked = func(*args, **kwargs)
            self._unmasked[id(masked)] = masked, self._unmasked.get(id(args[0]), (None, scores))[1]
            return masked
        return func(*args, **kwargs)

    def _top_k(self, func: Any, input: torch.Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
        is_among_experts = dim in (-1, input.dim() - 1) and input.shape[-1] >= self._num_experts
        num_tokens = input.numel() // max(1, input.shape[-1])
        if self.given is None or not is_among_experts or tuple(self.given.experts_KS.shape) != (k, num_tokens):
            found = func(input, k, dim, *args, **kwargs)
        else:
            with torch.no_grad():
                own = func(input, k, dim, *args, **kwargs)
            found = self._given(input, own)
        if is_among_experts and (self.given is None or found.indices.numel() == self.given.experts_KS.numel()):
            self.index, self.version = found.indices, found.indices._version
            self.chosen_KS = found.indices.detach().reshape(-1, k).t()
        return found

    def _given(self, scores: torch.Tensor, own: Any) -> Any:
        index = self.given.experts_KS.t().reshape(own.indices.shape).to(own.indices.dtype)
        if self.given.leaves_some:
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
        f"{path}: routing is recorded or replayed, which is done in forwards of the engine, where compiled code is "
        "left out: call the engine that ds_fsmoe.initialize returned, and not its module"
    )
