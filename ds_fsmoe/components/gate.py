# SPDX-License-Identifier: Apache-2.0
"""Defines the base class of gates, their typed options, and the arithmetic that routers share.

Layers call a gate once per forward; ``token_choice`` adds what gates have in common in which tokens choose.
``update_gates`` runs after each optimizer step.
"""

from __future__ import annotations

import functools
import inspect
import math
import typing
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, ClassVar, Concatenate, ParamSpec

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ds_fsmoe.components.routing import ReplayedRouting, Routing, RoutingBase
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.ops import REFERENCE, Ops


class GateCallOptions:
    """Holds the options that a layer sets on its gate for the next call, whether the gate is ours or stock's."""

    ops: Ops = REFERENCE
    """The custom operators to use; the layer sets them."""
    says_entropy: bool = False
    """The routing contains the entropy of its decisions."""
    needs_capacity: bool = True
    """Ranks must agree on a capacity that drops nothing. False for unpadded dispatch."""
    takes_given: ClassVar[bool] = False
    """Each token chooses its experts, so that a choice can be :attr:`given`."""
    given: ReplayedRouting | None = None
    """The choice to replay in the next call, instead of the highest scores; the caller of the gate sets it. Weights,
    losses and random numbers are those of the call."""
    takes_width: int | None = None
    """M of the tokens; ``None`` before the gate is built."""


class GateBase(GateCallOptions, nn.Module):
    """Decides for every token which experts it goes to.

    A gate is created without sizes (``LinearGate(k=2)``), as in the paper's listing 2. Its layer passes the sizes to
    :meth:`build`. Its :meth:`forward` takes x_SM [S, M] and returns a decision, :class:`RoutingBase`.

    A gate's law: every slot names a token in range or is empty, no expert takes a token twice, the capacity is
    respected, the weights match the gate's formula.

    Examples:
        One that sends token i to expert i % E, and drops none:

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
    """The kind of its decision; ``"auto"`` chooses the order for this kind."""
    _is_built = False

    def __init__(self) -> None:
        # Defined here so that a gate's signature names its options: that of nn.Module accepts anything.
        super().__init__()

    def build_once(self, model_dim: int, num_experts: int) -> None:
        """Build the gate for a layer by :meth:`build`, and refuse a second time.

        Args:
            model_dim: M, the width of a token.
            num_experts: E, over all ranks.

        Raises:
            ValueError: a size below 1, or a gate that already belongs to a layer.
        """
        if self._is_built:
            raise ValueError(f"this {type(self).__name__} belongs to another layer: create a gate per layer")
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
        """Route the tokens, and return the decision.

        Args:
            x_SM: [S, M], this rank's tokens.
            used_token_S: [S], nonzero for tokens that take part; ``None`` means all do.
            group: the ranks that exchange tokens and must agree on the capacity.
        """
        raise TypeError(f"{type(self).__name__} must define forward(x_SM, used_token_S, group)")

    def counts_to_sum(self) -> torch.Tensor | None:
        """Return this rank's counts since the last optimizer step, for a gate that learns from counts.

        Returns:
            Integers of the same shape on all ranks; ``None`` on all ranks if the gate learns nothing.
        """
        return None

    def after_optimizer_step(self, counts: torch.Tensor) -> None:
        """Update the gate after an optimizer step, by counts that are equal on all ranks. Called only if there are
        counts.

        Args:
            counts: the sum over all ranks of :meth:`counts_to_sum`. Ranks with the same tokens count too, so only
                proportions mean something.
        """

    def describe(self) -> str:
        """Return a few words about the gate for a report."""
        return type(self).__name__


def update_gates(gates: Iterable[GateBase], groups: Sequence[dist.ProcessGroup | None] = (None,)) -> None:
    """Update gates by their counts; every rank calls this after each optimizer step.

    An engine of ours calls it by itself. Collective where a gate has counts: one all-reduce over each group for all
    gates together.

    Args:
        gates: in the same order on all ranks.
        groups: the groups to sum over, one after another; ``None`` means all ranks.

    Examples:
        >>> import torch, ds_fsmoe
        >>> gate = ds_fsmoe.DeepSeekGate(k=2, bias_update_speed=0.1)
        >>> gate.build_once(model_dim=8, num_experts=4)
        >>> with torch.no_grad():
        ...     _ = gate.wg.weight.fill_(0.0)  # all experts score the same, and the first two are chosen
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
    """Return True within a backward of this thread: a forward there is a recomputed one (activation checkpointing)."""
    return torch._C._current_graph_task_id() != -1


@functools.lru_cache(maxsize=256)
def dropping_capacity(num_tokens: int, num_experts: int, factor: float, min_capacity: int) -> int:
    """Return the capacity C when tokens are dropped: ``max(ceil(S / E * factor), min_capacity)``.

    S / E, the factor and their product are each rounded to float32, as in stock DeepSpeed. So 10 tokens on one expert
    at a factor of 1.1 get 11 slots, where float64 would give 12.
    """
    exact = torch.tensor(factor, dtype=torch.float32, device="cpu") * (num_tokens / num_experts)
    return max(int(torch.ceil(exact)), min_capacity)


def dropless_capacity(counts_E: torch.Tensor, group: dist.ProcessGroup | None) -> int:
    """Return the capacity C when no token is dropped: the largest count of tokens from any rank of ``group`` to any
    expert.

    The host waits for the device here, and nowhere else in a step: the size of buffers depends on it.
    """
    largest = counts_E.max()
    with waiting("the capacity that ranks agree on"):
        if group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return int(largest)


# ---- Options of a gate as the fields of a dataclass: typed, checked when the gate is created, named in every error
# The config's options under ``fsmoe.gate`` are read from the gate's signature, here that of its settings.


_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string", NoneType: "null"}


class OptionError(ValueError):
    """Reports a value that an option of a part does not allow.

    Args:
        owner: the name of the part's class.
        name: the option.
        value: the refused value.
        problem: what the value must be instead.

    Examples:
        >>> import ds_fsmoe
        >>> try:
        ...     ds_fsmoe.SwitchGate(capacity_factor=-1.0)
        ... except ds_fsmoe.OptionError as error:
        ...     print(error.name, error.value)
        capacity_factor -1.0
    """

    def __init__(self, owner: str, name: str, value: Any, problem: str) -> None:
        super().__init__(f"{owner}: {name} = {value!r}: {problem}")
        self.name, self.value, self.problem = name, value, problem


def option(
    default: Any, *, least: float | None = None, above: float | None = None, choices: tuple[str, ...] = ()
) -> Any:
    """Return a dataclass field with limits on its value besides its type."""
    return field(default=default, metadata={"least": least, "above": above, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class CapacitySettings:
    """Holds the options of a gate's capacity: experts per token, slots per expert, and which tokens a full expert
    drops."""

    k: int = 1
    """Experts per token."""
    capacity_factor: float | None = option(1.0, above=0)
    """Slots per expert over the mean number of choices, in training; ``None``: nothing is dropped."""
    eval_capacity_factor: float = option(1.0, above=0)
    """The same in evaluation."""
    min_capacity: int = option(4, least=0)
    """Minimum number of slots per expert."""
    drop_tokens: bool = True
    """False: as many slots as the fullest expert of all ranks needs."""
    drop_policy: str = option("probs", choices=("probs", "position"))
    """Which tokens a full expert keeps: the largest ``"probs"``, or the first by ``"position"``."""

    def __post_init__(self) -> None:
        if self.capacity_factor is None:
            object.__setattr__(self, "drop_tokens", False)

    def factor(self, training: bool) -> float:
        """Return the capacity factor for training or evaluation, where tokens are dropped."""
        return (self.capacity_factor if training else self.eval_capacity_factor) or 1.0

    def check(self, owner: str) -> None:
        """Check every field's type and bounds.

        Raises:
            OptionError: the first field that does not fit.
        """
        types = typing.get_type_hints(type(self))
        for each in fields(self):
            value = getattr(self, each.name)
            problem = _problem(value, typing.get_args(types[each.name]) or (types[each.name],), each.metadata)
            if problem:
                raise OptionError(owner, each.name, value, problem)


def _problem(value: Any, kinds: tuple[type, ...], bounds: typing.Mapping[str, Any]) -> str | None:
    """Return the problem of a value; ``None`` if there is none."""
    # True is an int in Python, but not a number here.
    fits = type(value) in kinds or (type(value) is int and float in kinds)
    if bounds.get("choices"):
        return None if value in bounds["choices"] else f"the choices are {', '.join(map(repr, bounds['choices']))}"
    if not fits:
        return f"must be {' or '.join(_WORDS[kind] for kind in kinds)}"
    if type(value) not in (int, float):
        return None
    above, least = bounds.get("above"), bounds.get("least")
    if above is not None and not above < value < math.inf:
        return f"must be above {above} and finite"
    if least is not None and not least <= value < math.inf:
        return f"must be at least {least}" + (" and finite" if float in kinds else "")
    return None if math.isfinite(value) else "must be finite"


P = ParamSpec("P")


def takes_options_of(settings: Callable[P, CapacitySettings]) -> Callable[[Any], Callable[Concatenate[Any, P], None]]:
    """Return a decorator that gives a gate's ``__init__`` the fields of its settings as keyword parameters.

    An editor, ``help`` and a type checker then know the options of a gate, which are defined only once. The decorated
    function is ``def __init__(self) -> None: ...``; its body does not run.
    """

    def takes_options(declared: Any) -> Callable[Concatenate[Any, P], None]:
        @functools.wraps(declared)
        def __init__(self: Any, *args: P.args, **options: P.kwargs) -> None:
            SettingsGate.__init__(self, *args, **options)

        __init__._takes_settings = True  # type: ignore[attr-defined]
        return __init__

    return takes_options


class SettingsGate(GateBase):
    """A gate whose options are the fields of :attr:`Settings`, passed by name.

    Raises:
        ValueError: an unknown option, or a value that the option does not allow; the message says what is allowed.
    """

    Settings: ClassVar[type[CapacitySettings]] = CapacitySettings
    settings: CapacitySettings

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        has_own = not getattr(cls.__init__, "_takes_settings", cls.__init__ is SettingsGate.__init__)
        signature = inspect.signature(cls.__init__ if has_own else cls.Settings)
        cls.__signature__ = inspect.Signature(list(signature.parameters.values())[int(has_own) :])

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        names = [each.name for each in fields(self.Settings)]
        unknown = sorted(set(settings) - set(names))
        if unknown:
            raise ValueError(
                f"{type(self).__name__} has no setting {', '.join(map(repr, unknown))}: choose from {', '.join(names)}"
            )
        self.settings = self.Settings(**settings)
        self.settings.check(type(self).__name__)

    def check_k(self, num_experts: int) -> None:
        """Check k against the number of experts.

        Raises:
            OptionError: k below 1 or above the number of experts.
        """
        if not 1 <= self.settings.k <= num_experts:
            raise self.wrong("k", f"must be between 1 and num_experts ({num_experts})")

    def wrong(self, name: str, problem: str) -> OptionError:
        """Return the error for a setting that does not fit the layer."""
        return OptionError(type(self).__name__, name, getattr(self.settings, name), problem)

    def describe(self) -> str:
        settings = self.settings
        capacity = f"capacity factor {settings.capacity_factor}" if settings.drop_tokens else "nothing dropped"
        return f"{super().describe()}, k = {settings.k}, {capacity}"


# ---- A router's arithmetic: in float32 or wider, whatever the model's dtype


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Return a context without autocast, in which matrix products keep the dtype of their factors."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def linear_scores(x_SM: torch.Tensor, weight_NM: torch.Tensor) -> torch.Tensor:
    """Compute ``x * W^T`` [S, N] in float32, or in float64 for float64 tokens; under autocast too.

    Args:
        x_SM: [S, M], of any float type.
        weight_NM: [N, M].
    """
    dtype = torch.promote_types(x_SM.dtype, torch.float32)
    with without_autocast(x_SM.device):
        return F.linear(x_SM.to(dtype), weight_NM.to(dtype))


def mix(weights_NR: torch.Tensor, rows_RM: torch.Tensor) -> torch.Tensor:
    """Compute weighted sums of rows [N, M], in the dtype of the rows; products and sums are in float32 or wider.

    Args:
        weights_NR: [N, R], of any float type.
        rows_RM: [R, M].
    """
    dtype = torch.promote_types(torch.promote_types(weights_NR.dtype, rows_RM.dtype), torch.float32)
    with without_autocast(rows_RM.device):
        return (weights_NR.to(dtype) @ rows_RM.to(dtype)).to(rows_RM.dtype)


def which_are_used(used_token_S: torch.Tensor | None, num_tokens: int) -> torch.Tensor | None:
    """Return the caller's token mask as [S] booleans; ``None`` if all tokens take part.

    Raises:
        ValueError: a mask of another length than the tokens.
    """
    if used_token_S is None:
        return None
    used_S = used_token_S.reshape(-1).ne(0)
    if len(used_S) != num_tokens:
        raise ValueError(f"used_token has {len(used_S)} entries for {num_tokens} tokens: must be one per token")
    return used_S


def mean_over_used(values_S: torch.Tensor, used_S: torch.Tensor | None) -> torch.Tensor:
    """Return the mean over the first dimension of the used entries; 0 if none is used."""
    if used_S is None:
        return values_S.sum(dim=0) / max(len(values_S), 1)
    masked_S = values_S.masked_fill(~used_S.view(-1, *[1] * (values_S.dim() - 1)), 0.0)
    return masked_S.sum(dim=0) / used_S.sum().clamp(min=1)


def entropy_of(weights_SE: torch.Tensor, used_S: torch.Tensor | None) -> torch.Tensor:
    """Return the entropy of a token's probabilities, a scalar in nats without gradient, as a mean over the used tokens.

    Args:
        weights_SE: [S, E], not negative; divided by their sum they are a token's probabilities.
        used_S: [S] booleans; ``None``: all tokens take part.
    """
    weights_SE = weights_SE.detach().to(torch.promote_types(weights_SE.dtype, torch.float32))
    tiny = torch.finfo(weights_SE.dtype).tiny
    probs_SE = weights_SE / weights_SE.sum(dim=1, keepdim=True).clamp(min=tiny)
    return mean_over_used(torch.special.entr(probs_SE).sum(dim=1), used_S)
