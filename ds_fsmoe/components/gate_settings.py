# SPDX-License-Identifier: Apache-2.0
"""Options of a gate as the fields of a dataclass beside it: typed, checked when the gate is made, named in every error.

What a config may write under ``fsmoe.gate`` is read from the gate's signature, and for a gate of this kind that is the
signature of its settings.
"""

from __future__ import annotations

import functools
import inspect
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, ClassVar, Concatenate, ParamSpec

from ds_fsmoe.components.gate import GateBase

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
    """A field of settings, with what it may hold besides what its type says."""
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
    """What is wrong with a value; ``None`` for nothing."""
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
                f"{type(self).__name__} has no setting {', '.join(map(repr, unknown))}: the choices are "
                f"{', '.join(names)}"
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
