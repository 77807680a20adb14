# SPDX-License-Identifier: Apache-2.0
"""What every gate is."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.components.routing import Given, Routing, RoutingBase
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.ops import REFERENCE, Ops


class GateBase(nn.Module):
    """Decides for every token which experts it goes to.

    A gate is made without sizes (``LinearGate(k=2)``) and gets them from the layer that takes it in, through
    :meth:`build`; that is how the paper's listing 2 writes it. Its :meth:`forward` takes x_SM [S, M] and returns a
    decision, :class:`RoutingBase`.

    A gate's law: every slot names a token in range or is empty, no expert takes a token twice, the capacity is
    respected, the weights match the gate's formula.

    Examples:
        One that sends token i to expert i % E, whatever it is, and drops none:

        >>> import torch, ds_fsmoe
        >>> class InTurn(ds_fsmoe.GateBase):
        ...     def build(self, model_dim, num_experts):
        ...         self.num_experts = num_experts
        ...     def forward(self, x_SM, used_token_S=None, group=None):
        ...         token_S = torch.arange(len(x_SM))
        ...         capacity, expert_S = -(-len(x_SM) // self.num_experts), token_S % self.num_experts
        ...         slot_S = expert_S * capacity + token_S // self.num_experts
        ...         counts = expert_S.bincount(minlength=self.num_experts), capacity, self.num_experts
        ...         ones_S = torch.ones(1, len(x_SM))
        ...         return ds_fsmoe.Routing(slot_S[None], ones_S, x_SM.new_zeros(()), *counts)
        >>> layer = ds_fsmoe.MOELayer(InTurn(), ds_fsmoe.SimpleOrder(), model_dim=8, num_experts=4, expert_dim=16)
        >>> layer(torch.randn(6, 8)).shape
        torch.Size([6, 8])
    """

    gives: ClassVar[type[RoutingBase]] = Routing
    """The kind of its decision; "auto" takes the order that goes with it."""
    ops: Ops = REFERENCE
    """The operators to use, where there are any for what it does; whoever takes the gate in says which."""
    says_entropy: bool = False
    """Whether somebody wants to know the entropy of its decisions; whoever does says so."""
    needs_capacity: bool = True
    """Whether ranks have to agree on a capacity that drops nothing; not where rows travel instead of slots. Whoever
    calls the gate says so."""
    takes_given: ClassVar[bool] = False
    """Whether each token chooses experts here, and the choice can be :attr:`given`."""
    given: Given | None = None
    """The choice to go by in the next call, instead of the highest scores; whoever calls the gate says so. Weights,
    losses and what is drawn at random stay those of the call."""
    takes_width: int | None = None
    """M of the tokens it is for; ``None`` before it is built."""
    _is_built = False

    def __init__(self) -> None:
        # Written out, so that a gate's signature names its options: that of nn.Module takes anything.
        super().__init__()

    def build_once(self, model_dim: int, num_experts: int) -> None:
        """What a layer calls when it takes the gate in: :meth:`build`, and never again.

        Args:
            model_dim: M, the width of a token.
            num_experts: E, over all ranks.

        Raises:
            ValueError: impossible sizes, or a gate that another layer has already.
        """
        if self._is_built:
            raise ValueError(f"this {type(self).__name__} belongs to another layer: make a gate for every layer")
        if model_dim < 1 or num_experts < 1:
            raise ValueError(f"model_dim = {model_dim}, num_experts = {num_experts}: both must be at least 1")
        self.build(model_dim, num_experts)
        self.takes_width = model_dim
        self._is_built = True

    def build(self, model_dim: int, num_experts: int) -> None:
        """Create the gate's parameters.

        Args:
            model_dim: M, the width of a token.
            num_experts: E, over all ranks.
        """
        raise TypeError(f"{type(self).__name__} must define build(model_dim, num_experts)")

    def forward(
        self,
        x_SM: torch.Tensor,
        used_token_S: torch.Tensor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> RoutingBase:
        """Route the tokens.

        Args:
            x_SM: [S, M], this rank's tokens.
            used_token_S: [S], nonzero for tokens that take part; ``None`` means all do.
            group: the ranks that exchange tokens with this one and so must agree on the capacity.
        """
        raise TypeError(f"{type(self).__name__} must define forward(x_SM, used_token_S, group)")

    def counts_to_sum(self) -> torch.Tensor | None:
        """What this rank has counted since the last optimizer step, for a gate that learns from counts.

        Returns:
            Integers, of the same shape on all ranks; ``None``, on all of them, if there is nothing to learn.
        """
        return None

    def after_optimizer_step(self, counts: torch.Tensor) -> None:
        """An optimizer step was taken. Called if there are counts to sum, on all ranks with the same numbers.

        Args:
            counts: the sum over all ranks of what :meth:`counts_to_sum` gave; over ranks with the same tokens too, so
                only proportions mean something.
        """

    def describe(self) -> str:
        """A few words for a report."""
        return type(self).__name__


def update_gates(gates: Iterable[GateBase], groups: Sequence[dist.ProcessGroup | None] = (None,)) -> None:
    """Let gates learn from what they have counted: to be called after each optimizer step, by every rank.

    An engine of ours does that by itself. Collective where a gate has counts: one all-reduce over each of the groups
    for all gates together.

    Args:
        gates: in the same order on all ranks.
        groups: the ranks to sum over, one group after another; ``None`` means all there are.

    Examples:
        >>> import torch, ds_fsmoe
        >>> gate = ds_fsmoe.DeepSeekGate(k=2, bias_update_speed=0.1)
        >>> gate.build_once(model_dim=8, num_experts=4)
        >>> with torch.no_grad():
        ...     _ = gate.wg.weight.fill_(0.0)  # all experts are alike, and the first are taken
        >>> routing = gate(torch.randn(6, 8))
        >>> ds_fsmoe.update_gates([gate])
        >>> bool((gate.balance_bias != 0).all())
        True
    """
    counted = [(gate, counts) for gate in gates if (counts := gate.counts_to_sum()) is not None]
    if not counted:
        return
    total = torch.cat([counts.reshape(-1) for _, counts in counted])
    if dist.is_available() and dist.is_initialized():
        for group in groups:
            with waiting("the counts by which gates are balanced"):
                dist.all_reduce(total, group=group)
    parts = total.split([counts.numel() for _, counts in counted])
    for (gate, counts), part in zip(counted, parts, strict=True):
        gate.after_optimizer_step(part.view_as(counts))


def in_backward() -> bool:
    """Whether this thread is within a backward: a forward there is one computed again (activation checkpointing)."""
    return torch._C._current_graph_task_id() != -1


@functools.lru_cache(maxsize=256)
def dropping_capacity(num_tokens: int, num_experts: int, factor: float, min_capacity: int) -> int:
    """C when tokens are dropped: ``max(ceil(S / E * factor), min_capacity)``.

    S / E, the factor and their product are each rounded to float32 before the product is rounded up, as in stock
    DeepSpeed: 10 tokens on one expert at a factor of 1.1 get 11 slots, where float64 would give 12.
    """
    exact = torch.tensor(factor, dtype=torch.float32, device="cpu") * (num_tokens / num_experts)
    return max(int(torch.ceil(exact)), min_capacity)


def dropless_capacity(counts_E: torch.Tensor, group: dist.ProcessGroup | None) -> int:
    """C when nothing is dropped: the largest count of tokens that any rank of ``group`` sends to any expert.

    The one place in a step where the host has to wait for the device: buffers cannot be sized otherwise.
    """
    largest = counts_E.max()
    with waiting("the capacity that ranks agree on"):
        if group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return int(largest)
