# SPDX-License-Identifier: Apache-2.0
"""The base class of gates."""

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


class _NowCalled:
    """Reads and sets an attribute by the name that it had in version 0.2.0.

    Args:
        name: its name today.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, gate: Any, kind: type) -> Any:
        return getattr(kind if gate is None else gate, self.name)

    def __set__(self, gate: Any, value: Any) -> None:
        setattr(gate, self.name, value)


class GateCallOptions:
    """Holds the options that a layer sets on its gate for the next call, whether the gate is ours or stock's."""

    ops: Ops = REFERENCE
    """The operators to use, where there are any for what it does; whoever takes the gate in says which."""
    reports_entropy: bool = False
    """The routing has the entropy of its decisions."""
    needs_capacity: bool = True
    """Ranks have to agree on a capacity that drops nothing. False where rows are sent instead of slots."""
    can_replay: ClassVar[bool] = False
    """Each token chooses experts here, so the choice can be :attr:`replayed`."""
    replayed: ReplayedRouting | None = None
    """The choice to go by in the next call, instead of the highest scores; whoever calls the gate says so. Weights,
    losses and what is drawn at random stay those of the call."""
    takes_width: int | None = None
    """M of the tokens it is for; ``None`` before it is built."""

    # A gate of a user may read, set or define these by their names of version 0.2.0.
    says_entropy = _NowCalled("reports_entropy")
    takes_given = _NowCalled("can_replay")
    given = _NowCalled("replayed")

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for old, alias in vars(GateCallOptions).items():
            if isinstance(alias, _NowCalled) and old in vars(cls):
                setattr(cls, alias.name, vars(cls)[old])
                delattr(cls, old)


class GateBase(GateCallOptions, nn.Module):
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
    _is_built = False

    def __init__(self) -> None:
        # Written out, so that a gate's signature names its options: that of nn.Module takes anything.
        super().__init__()

    def build_once(self, model_dim: int, num_experts: int) -> None:
        """Build the gate for a layer by :meth:`build`, and refuse a second time.

        Args:
            model_dim: M, the width of a token.
            num_experts: E, over all ranks.

        Raises:
            ValueError: impossible sizes, or a gate that another layer has already.
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
        """Route the tokens.

        Args:
            x_SM: [S, M], this rank's tokens.
            used_token_S: [S], nonzero for tokens that take part; ``None`` means all do.
            group: the ranks that exchange tokens with this one and so must agree on the capacity.
        """
        raise TypeError(f"{type(self).__name__} must define forward(x_SM, used_token_S, group)")

    def counts_to_sum(self) -> torch.Tensor | None:
        """The counts of this rank since the last optimizer step, for a gate that learns from counts.

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
    """Update gates by their counts; every rank calls this after each optimizer step.

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


# ---- Options of a gate as the fields of a dataclass beside it: typed, checked when the gate is made, named in
# every error
#
# What a config may write under ``fsmoe.gate`` is read from the gate's signature, and for a gate of this kind that is
# the signature of its settings.


_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string", NoneType: "null"}


class OptionError(ValueError):
    """A value that an option of a part cannot have.

    Args:
        owner: the name of the part's class.
        name: the option.
        value: what was given for it.
        problem: what it has to be instead.

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
    """A field of settings, with limits besides its type."""
    return field(default=default, metadata={"least": least, "above": above, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class CapacitySettings:
    """How many experts a token takes, how many tokens an expert takes, and who stays when it is full."""

    k: int = 1
    """Experts per token."""
    capacity_factor: float | None = option(1.0, above=0)
    """Slots per expert over the mean number of choices, while training; ``None``: nothing is dropped."""
    eval_capacity_factor: float = option(1.0, above=0)
    """The same while evaluating."""
    min_capacity: int = option(4, least=0)
    """Slots per expert at the least."""
    drop_tokens: bool = True
    """False: as many slots as the fullest expert needs on any rank."""
    drop_policy: str = option("probs", choices=("probs", "position"))
    """Who stays in a full expert: the largest ``"probs"``, or first come by ``"position"``."""

    def __post_init__(self) -> None:
        if self.capacity_factor is None:
            object.__setattr__(self, "drop_tokens", False)

    def factor(self, training: bool) -> float:
        """The capacity factor in force, where tokens are dropped."""
        return (self.capacity_factor if training else self.eval_capacity_factor) or 1.0

    def check(self, owner: str) -> None:
        """Hold every field against its type and its bounds.

        Raises:
            OptionError: the first that does not fit.
        """
        types = typing.get_type_hints(type(self))
        for each in fields(self):
            value = getattr(self, each.name)
            problem = _problem(value, typing.get_args(types[each.name]) or (types[each.name],), each.metadata)
            if problem:
                raise OptionError(owner, each.name, value, problem)


def _problem(value: Any, kinds: tuple[type, ...], bounds: typing.Mapping[str, Any]) -> str | None:
    """Return the problem of a value; ``None`` if there is none."""
    # True is an int in Python, and here it is not.
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
    """A decorator that gives a gate's ``__init__`` the fields of its settings for keyword parameters.

    So an editor, ``help`` and a type checker know the options of a gate, and they are written down once. What is
    decorated is ``def __init__(self) -> None: ...``, whose body does not run.
    """

    def takes_options(declared: Any) -> Callable[Concatenate[Any, P], None]:
        @functools.wraps(declared)
        def __init__(self: Any, *args: P.args, **options: P.kwargs) -> None:
            SettingsGate.__init__(self, *args, **options)

        __init__._takes_settings = True  # type: ignore[attr-defined]
        return __init__

    return takes_options


class SettingsGate(GateBase):
    """A gate whose options are the fields of :attr:`Settings`, given by name.

    Raises:
        ValueError: an option that it does not have, or a value that the option cannot have, with what is possible.
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
        """What the settings alone cannot tell.

        Raises:
            OptionError: more choices than experts, or none.
        """
        if not 1 <= self.settings.k <= num_experts:
            raise self.wrong("k", f"must be between 1 and num_experts ({num_experts})")

    def wrong(self, name: str, problem: str) -> OptionError:
        """The error to raise for a setting that does not fit the layer."""
        return OptionError(type(self).__name__, name, getattr(self.settings, name), problem)

    def describe(self) -> str:
        settings = self.settings
        capacity = f"capacity factor {settings.capacity_factor}" if settings.drop_tokens else "nothing dropped"
        return f"{super().describe()}, k = {settings.k}, {capacity}"


# ---- A router's arithmetic: in float32 at the least, whatever the model computes in


def without_autocast(device: torch.device) -> AbstractContextManager:
    """In which matrix products keep the type of their factors."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def linear_scores(x_SM: torch.Tensor, weight_NM: torch.Tensor) -> torch.Tensor:
    """``x * W^T`` [S, N] in float32, for float64 tokens in float64; under autocast too.

    Args:
        x_SM: [S, M], of any float type.
        weight_NM: [N, M].
    """
    dtype = torch.promote_types(x_SM.dtype, torch.float32)
    with without_autocast(x_SM.device):
        return F.linear(x_SM.to(dtype), weight_NM.to(dtype))


def mix(weights_NR: torch.Tensor, rows_RM: torch.Tensor) -> torch.Tensor:
    """Weighted sums of rows [N, M], in the type of the rows; products and sums are in float32 at the least.

    Args:
        weights_NR: [N, R], of any float type.
        rows_RM: [R, M].
    """
    dtype = torch.promote_types(torch.promote_types(weights_NR.dtype, rows_RM.dtype), torch.float32)
    with without_autocast(rows_RM.device):
        return (weights_NR.to(dtype) @ rows_RM.to(dtype)).to(rows_RM.dtype)


def which_are_used(used_token_S: torch.Tensor | None, num_tokens: int) -> torch.Tensor | None:
    """The mask of a layer's caller as [S] booleans.

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
    """Over the first dimension, as far as it is used; 0 where nothing is."""
    if used_S is None:
        return values_S.sum(dim=0) / max(len(values_S), 1)
    masked_S = values_S.masked_fill(~used_S.view(-1, *[1] * (values_S.dim() - 1)), 0.0)
    return masked_S.sum(dim=0) / used_S.sum().clamp(min=1)


def entropy_of(weights_SE: torch.Tensor, used_S: torch.Tensor | None) -> torch.Tensor:
    """Scalar, in nats, without a gradient: of a token's probabilities, as a mean over the tokens that take part.

    Args:
        weights_SE: [S, E], not negative; over their sum they are a token's probabilities.
        used_S: [S] booleans; ``None``: all take part.
    """
    weights_SE = weights_SE.detach().to(torch.promote_types(weights_SE.dtype, torch.float32))
    tiny = torch.finfo(weights_SE.dtype).tiny
    probs_SE = weights_SE / weights_SE.sum(dim=1, keepdim=True).clamp(min=tiny)
    return mean_over_used(torch.special.entr(probs_SE).sum(dim=1), used_S)
