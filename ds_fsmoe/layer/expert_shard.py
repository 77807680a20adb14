# SPDX-License-Identifier: Apache-2.0
"""Marks the weights of experts that are spread over ranks, so that a script cannot mistake this rank's part for the
whole.

A marked parameter has the model's name and the experts of this rank. Operations of a script on it return their value
for all experts, or raise an error that names the parameter:

- Element by element, with scalars and with tensors of the same part: allowed; the result is marked too.
- A sum, a mean or a 2-norm with a gradient, such as a penalty on weights: added up over the ranks, value and gradient.
- The same without a gradient, and other statistics: of this rank's part, with one warning.
- Any other operation, such as a copy onto all experts, an index of an expert, a broadcast or pickling: refused.

DeepSpeed and this package see a plain parameter: the innermost frame outside of torch identifies the calling code.
``engine.marked_experts`` marks and unmarks parameters.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.checkpoint_files.expert_parts import LAYOUTS, ExpertPart
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.layer.parts import LayerError
from ds_fsmoe.log import log_line

# ---- torch's functions by their effect on the experts of a weight; names are without the underscores around them


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


METADATA = _names(
    "size dim stride numel nelement is_contiguous element_size storage_offset is_floating_point is_complex "
    "get_device is_signed is_same_size untyped_storage data_ptr record_stream requires_grad retain_grad hash repr len "
    "backward is_pinned is_shared is_inference has_names format new_zeros new_ones new_empty new_full new_tensor "
    "result_type can_cast is_conj is_neg is_set_to has_compatible_shallow_copy_type"
)
"""Functions that return properties of a tensor, not its values; without the underscores around their names."""
ELEMENTWISE = _names(
    "add iadd radd sub isub rsub subtract mul imul rmul multiply div idiv rdiv truediv itruediv rtruediv true_divide "
    "divide floordiv ifloordiv floor_divide pow ipow rpow neg negative pos abs absolute sqrt rsqrt square exp log "
    "log1p log2 sign sgn reciprocal clamp clamp_min clamp_max clip maximum minimum lerp addcmul addcdiv where "
    "masked_fill eq ne lt le gt ge isnan isinf isfinite logical_and logical_or logical_not nan_to_num round floor ceil "
    "trunc tanh sigmoid relu detach clone to type float half bfloat16 double cpu cuda contiguous type_as pin_memory "
    "alias isclose copy fill zero zeros_like ones_like empty_like full_like invert and or xor"
)
"""Functions that compute each element independently."""
SUMS = frozenset(("sum", "mean", "norm", "linalg_vector_norm", "mse_loss"))
TRUTHS = _names("any all count_nonzero allclose equal argmax argmin")
"""Functions without a gradient."""
STATISTICS = SUMS | TRUTHS | _names("max min amax amin std var prod median histc")
"""Functions that return a value of this rank's part, with a warning, where no gradient is wanted."""
DIMS = {
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), (1, 2)),
    **dict.fromkeys(("chunk", "split"), (2,)),
    **dict.fromkeys(("narrow", "select", "softmax", "cumsum"), (1,)),
}
"""Function -> the positions of its arguments that name the dimensions that it changes."""


# ---- Whole weights of experts, and sums over ranks, with exact gradients
#
# Every rank has its own loss, and the wanted gradient is that of their mean. A rank's loss may depend on other ranks'
# experts, whose gradients belong to those ranks. So the backward sums the gradients over the ranks.


@dataclass(frozen=True)
class Origin:
    """Identifies the weight of which a tensor is this rank's part."""

    name: str
    part: ExpertPart
    group: dist.ProcessGroup
    """The ranks that have the other parts."""
    places: Callable[[], Sequence[int] | None] = lambda: None
    """Returns the position of each expert among those of all ranks; ``None``: the model's own order."""

    @property
    def times(self) -> int:
        """Return the ratio of elements in the whole weight to those in this part."""
        shard = self.part.shard
        return self.part.ep_size * (1 if shard is None or shard.dim is None else shard.count)

    @property
    def experts(self) -> list[int]:
        """Return the numbers of this rank's experts, in their order in memory."""
        places, own = self.places(), self.part.experts
        return [*own] if places is None else [places.index(each) for each in own]

    def describe(self) -> str:
        """Return the parameter and this rank's part of it, for messages."""
        which = ", ".join(map(str, self.experts))
        return f"{self.name} has experts {which} of {self.part.num_experts} on this rank"

    def whole(self, own: torch.Tensor) -> torch.Tensor:
        """Return the whole parameter from the parts of all ranks, with experts in the model's own order. Collective."""
        whole, places = joined_over_ranks(own, self.part, self.group), self.places()
        return whole if places is None else self.part.in_order(whole, places)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole tensor."""
        if (places := self.places()) is None:
            return self.part.take(whole)
        inverse = sorted(range(len(places)), key=places.__getitem__)
        return self.part.take(self.part.in_order(whole, inverse))


class SumOverRanks(torch.autograd.Function):
    """Sums a tensor over ranks; so does its backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _sum(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(gradient, ctx.group), None


class WholeOfParts(torch.autograd.Function):
    """Represents a whole weight where a gradient is wanted; its backward returns each rank the gradient of its part."""

    @staticmethod
    def forward(
        ctx: Any,
        parameter: torch.Tensor,
        whole: torch.Tensor,
        cut: Callable[[torch.Tensor], torch.Tensor],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.cut, ctx.group = cut, group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.cut(_sum(gradient, ctx.group)).contiguous(), None, None, None


@torch.no_grad()
def joined_over_ranks(part: torch.Tensor, description: ExpertPart, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a whole weight, of which each rank of a group has a part. Collective over the group.

    Args:
        part: this rank's part.
        description: describes the part.
        group: the ranks, in the order of the parts.
    """
    own = part.detach().contiguous()
    parts = [torch.empty_like(own) for _ in range(description.num_parts)]
    with waiting("all parts of a weight of experts"):
        dist.all_gather(parts, own, group=group)
    return description.join(parts)


def _sum(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = value.clone(memory_format=torch.contiguous_format)
    with waiting("the sum of a loss on weights of experts"):
        dist.all_reduce(total, group=group)
    return total


# ---- Marked tensors


TRUSTED = ("deepspeed", "ds_fsmoe")
_PASSING_ON = frozenset(("torch", "copy", "copyreg", "functools", "contextlib", "_pickle", "pickle"))
"""Packages whose functions act for their callers."""
_LOOKING = frozenset(("storage_ptr", "storage_size", "_end_ptr", "_is_complete", "_filter_shared_not_shared"))
"""Functions that only read addresses of tensors, as transformers does on ranks that write nothing."""
_INSTEAD = (
    "Use instead: deepspeed.zero.GatheredParameters(parameter), inside which it has all experts (modifier_rank=0 "
    "to change them); ds_fsmoe.whole_parameters(engine), which iterates over whole weights; "
    "ds_fsmoe.whole_weight(parameter) in a loss. Every rank has to call these. For this rank's experts alone: "
    "ds_fsmoe.own_part(parameter)"
)
_warned: set[str] = set()


class _Marked:
    """Intercepts torch's functions on tensors that are this rank's part of a weight."""

    fsmoe_origin: Origin
    fsmoe_dim: int | None
    """The dimension of experts; ``None`` where it was flattened."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        asked_by = asking()
        with torch._C.DisableTorchFunctionSubclass():
            if asked_by in TRUSTED:
                return func(*args, **(kwargs or {}))
            return _answer(func, args, kwargs or {}, asked_by)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if asking() in TRUSTED:
            return super().__reduce_ex__(protocol)  # type: ignore[misc]
        raise LayerError(
            f"pickle: {self.fsmoe_origin.describe()}, so the others would be lost: save "
            "ds_fsmoe.whole_state_dict(engine), which every rank calls, or iterate over "
            "ds_fsmoe.whole_parameters(engine)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # The script gets a new tensor, without DeepSpeed's attributes on the parameter.
        with torch._C.DisableTorchFunctionSubclass():
            copied = self.detach().clone()  # type: ignore[attr-defined]
            memo[id(self)] = made = _mark(copied, self.fsmoe_origin, self.fsmoe_dim)
        return made.requires_grad_(self.requires_grad)  # type: ignore[attr-defined]


class ExpertShard(_Marked, nn.Parameter):
    """Represents a parameter of experts of which other ranks have other parts. Made by :func:`mark`."""


class ShardValue(_Marked, torch.Tensor):
    """Represents a tensor that a script computed from an ExpertShard, for each expert by itself; it covers this rank's
    experts only."""


_COLLECTIVES = _names("broadcast reduce reduce_scatter send recv scatter gather all_to_all")
"""Functions of torch.distributed that call ``__torch_function__`` from torch 2.13 on, and not before. ``isend`` and
``irecv`` are not among them: torch compares them by identity."""


@functools.cache
def ask_in_collectives() -> None:
    """Check marked tensors in all collectives of scripts."""
    for name in _COLLECTIVES:
        call = getattr(dist, name)
        if "handle_torch_function" not in inspect.unwrap(call).__code__.co_names:
            setattr(dist, name, _asking(call))


def _asking(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def asked(*args: Any, **kwargs: Any) -> Any:
        asked_by = asking()
        if asked_by in TRUSTED or not any(isinstance(each, _Marked) for each in tensors_in((*args, kwargs))):
            return call(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return _answer(call, args, kwargs, asked_by)

    return asked


def mark(parameter: nn.Parameter, origin: Origin) -> None:
    """Mark a parameter of experts from now on."""
    ask_in_collectives()
    parameter.fsmoe_origin, parameter.fsmoe_dim = origin, LAYOUTS.index(origin.part.layout)
    parameter.__class__ = ExpertShard


def gradient_of(parameter: ExpertShard) -> torch.Tensor | None:
    """Return the gradient of a marked parameter, marked too."""
    return _mark(parameter.grad, parameter.fsmoe_origin, parameter.fsmoe_dim)


def unmark(parameter: nn.Parameter) -> None:
    """Turn a marked parameter into a plain one again."""
    if isinstance(parameter, ExpertShard):
        parameter.__class__ = nn.Parameter
        del parameter.fsmoe_origin, parameter.fsmoe_dim


def origin_of(tensor: Any) -> Origin | None:
    """Return the origin of a tensor that is a part of a weight; ``None`` for a whole tensor."""
    return getattr(tensor, "fsmoe_origin", None)


def own_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's experts of a weight as a plain tensor, which shares its memory.

    Args:
        parameter: of ``engine.module``.

    Returns:
        [e, ...], the experts of this rank, in their order; for a whole parameter, all of it.

    Examples:
        >>> import torch, ds_fsmoe
        >>> ds_fsmoe.own_part(torch.nn.Parameter(torch.ones(4, 2))).shape
        torch.Size([4, 2])
    """
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.detach()


def own_experts_of(parameter: torch.Tensor) -> list[int] | None:
    """Return the experts of this rank in a weight. They may change where ``fsmoe.placement`` moves experts.

    Args:
        parameter: of ``engine.module``.

    Returns:
        Their numbers among all experts, in their order in memory; ``None`` for a whole parameter.

    Examples:
        >>> import torch, ds_fsmoe
        >>> ds_fsmoe.own_experts_of(torch.nn.Parameter(torch.ones(4, 2))) is None
        True
    """
    origin = origin_of(parameter)
    return None if origin is None else origin.experts


def asking() -> str:
    """Return the package that calls the caller: that of the innermost frame outside of torch and similar packages."""
    frame = sys._getframe(2)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        looks_only = package in ("safetensors", "transformers") and frame.f_code.co_name in _LOOKING
        if package not in _PASSING_ON:
            return TRUSTED[0] if looks_only else package
        frame = frame.f_back
    return TRUSTED[0]  # a thread of torch


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a list, tuple or dict, nested ones included."""
    for each in values.values() if isinstance(values, dict) else values:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, (list, tuple, dict)):
            yield from tensors_in(each)


def _mark(value: Any, origin: Origin, dim: int | None) -> Any:
    """Mark the result of a function, or those in a list or tuple."""
    if isinstance(value, (list, tuple)):
        return type(value)(_mark(each, origin, dim) for each in value)
    if not isinstance(value, torch.Tensor) or isinstance(value, _Marked):
        return value
    marked = value.as_subclass(ShardValue)
    marked.fsmoe_origin, marked.fsmoe_dim = origin, dim
    return marked


def _answer(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], asked_by: str) -> Any:
    """Compute the operation that a script calls, or refuse it."""
    marked = next(each for each in tensors_in((*args, kwargs)) if isinstance(each, _Marked))
    origin, dim, name = marked.fsmoe_origin, marked.fsmoe_dim, func.__name__
    plain = name.removeprefix("_foreach_").strip("_")
    if hasattr(marked, "ds_id") and not marked.numel():  # not gathered: empty, as any parameter at ZeRO 3
        return func(*args, **kwargs)
    if name in ("__get__", "__set__", "__delete__"):
        return _attribute(func, args, marked)
    if name.startswith("register_"):
        return func(args[0], _with_marked_parts(args[1], origin, dim), *args[2:], **kwargs)
    if asked_by == "safetensors" and plain not in ("size", "dim"):
        raise _refusal(name, marked)
    if plain in METADATA:
        return func(*args, **kwargs)
    if name == "grad":
        return _mark_like(func(*args, **kwargs), kwargs.get("inputs", args[1] if len(args) > 1 else ()))
    if plain in ELEMENTWISE:
        return _by_elements(func, args, kwargs, marked)
    if name == "_foreach_norm":
        more = {"ord": args[1] if len(args) > 1 else kwargs.get("ord", 2)}
        return tuple(
            _reduced(torch.linalg.vector_norm, (each,), more, each)
            if isinstance(each, _Marked)
            else torch.linalg.vector_norm(each, **more)
            for each in args[0]
        )
    if plain in STATISTICS:
        return _reduced(func, args, kwargs, marked)
    return _viewed(func, plain, args, kwargs, marked)


def _attribute(func: Any, args: Sequence[Any], marked: Any) -> Any:
    """Return or set an attribute of a part."""
    name, is_set = func.__self__.__name__, func.__name__ == "__set__"
    if is_set and isinstance(args[1], torch.Tensor):
        if args[1].shape != marked.shape:
            raise _mixed(f"{name} =", marked, args[1])
        return func(args[0], args[1].as_subclass(torch.Tensor))
    if not is_set and name in ("T", "H", "mT", "mH") and (marked.ndim == 2 or name in ("T", "H")):
        raise _refusal(name, marked)
    return _mark(func(*args), marked.fsmoe_origin, marked.fsmoe_dim)


def _with_marked_parts(hook: Callable[[Any], Any], origin: Origin, dim: int | None) -> Callable[[Any], Any]:
    """Return a script's hook for gradients of a part, which receives marked gradients."""

    def on_part(given: Any) -> Any:
        made = hook(_mark(given, origin, dim))
        return made.as_subclass(torch.Tensor) if isinstance(made, ShardValue) else made

    return on_part


def _mark_like(results: Any, inputs: Any) -> Any:
    """Mark gradients of parts."""
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    return tuple(
        _mark(value, each.fsmoe_origin, each.fsmoe_dim) if isinstance(each, _Marked) else value
        for value, each in zip(results, inputs, strict=True)
    )


def _by_elements(func: Any, args: Sequence[Any], kwargs: dict[str, Any], marked: Any) -> Any:
    """Compute element by element, with operands in the part's layout."""
    name = func.__name__
    if not name.startswith("_foreach_"):
        _check_others(func, marked, (*args, kwargs))
        result = func(*args, **kwargs)
        changes_first = result is args[0] if args else False
        return result if changes_first else _mark(result, marked.fsmoe_origin, marked.fsmoe_dim)
    found = []
    for together in zip(*(each for each in args if isinstance(each, (list, tuple))), strict=False):
        found.append(next((each for each in together if isinstance(each, _Marked)), None))
        if found[-1] is not None:
            _check_others(func, found[-1], together)
    results = func(*args, **kwargs)
    return results and tuple(
        value if each is None else _mark(value, each.fsmoe_origin, each.fsmoe_dim)
        for value, each in zip(results, found, strict=True)
    )


def _check_others(func: Any, marked: Any, values: Any) -> None:
    """Refuse tensors in another layout than a part's: those of all experts, or of other ones.

    Raises:
        LayerError: names the parameter and a replacement.
    """
    part, dim = marked.fsmoe_origin.part, marked.fsmoe_dim
    for each in tensors_in(values):
        if isinstance(each, _Marked):
            fits = each.fsmoe_origin.part == part and each.fsmoe_origin.experts == marked.fsmoe_origin.experts
        elif each.ndim == 0 or dim is None:
            fits = each.numel() in (1, marked.numel())
        else:
            at = each.ndim - (marked.ndim - dim)
            fits = at < 0 or (each.ndim <= marked.ndim and each.shape[at] in (1, marked.shape[dim]))
        if not fits:
            raise _mixed(func.__name__, marked, each)


def _reduced(func: Any, args: Sequence[Any], kwargs: dict[str, Any], marked: Any) -> Any:
    """Compute a sum or another statistic. Collective where a gradient is wanted and experts are summed."""
    plain, origin = func.__name__.strip("_"), marked.fsmoe_origin
    if any(isinstance(each, torch.Tensor) for each in args[1:]):
        _check_others(func, marked, args)
        if plain in ("max", "min"):
            return _mark(func(*args, **kwargs), origin, marked.fsmoe_dim)
    at = 2 if "norm" in plain else 1
    dims = kwargs.get("dim", args[at] if len(args) > at else None)
    dims = (dims,) if isinstance(dims, int) and not isinstance(dims, bool) else dims
    dims = dims if isinstance(dims, (list, tuple)) and dims else None
    if dims and marked.fsmoe_dim == 0 and all(each % marked.ndim for each in dims):
        return _mark(func(*args, **kwargs), origin, 0)
    has_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in tensors_in((*args, kwargs)))
    if plain in TRUTHS or not has_gradient:
        _warn(plain, origin)
        return func(*args, **kwargs)
    if plain in SUMS and (dims is None or (marked.fsmoe_dim == 0 and plain in ("sum", "mean"))):
        return _summed(func, args, kwargs, marked)
    raise _refusal(plain, marked)


def _summed(func: Any, args: Sequence[Any], kwargs: dict[str, Any], marked: Any) -> torch.Tensor:
    """Compute a sum, mean, ``mse_loss`` or norm over the experts of all ranks. Collective, forward and backward.

    Raises for any other reduction.
    """
    plain, origin = func.__name__.strip("_"), marked.fsmoe_origin
    order = kwargs.get("p", kwargs.get("ord", args[1] if len(args) > 1 else 2))
    if plain in ("sum", "mean"):
        total = SumOverRanks.apply(func(*args, **kwargs), origin.group)
        return total if plain == "sum" else total / origin.times
    if plain == "mse_loss" and (how := kwargs.get("reduction", "mean")) in ("sum", "mean"):
        square = (args[0] - args[1]).square()
        total = SumOverRanks.apply(square.sum(), origin.group)
        return total if how == "sum" else total / (origin.times * square.numel())
    if "norm" in plain and order in (None, "fro", 1, 2):
        powers = args[0].abs() if order == 1 else args[0].square()
        total = SumOverRanks.apply(powers.sum(), origin.group)
        return total if order == 1 else total.sqrt()
    raise _refusal(plain, marked)


def _warn(function: str, origin: Origin) -> None:
    if function not in _warned:
        _warned.add(function)
        log_line(
            f"torch.{function} differs on each rank: use ds_fsmoe.gradient_norm(engine) or "
            "ds_fsmoe.whole_parameters(engine)",
            details=f"{origin.describe()}, so it returns a value of these alone. For all experts use "
            "ds_fsmoe.gradient_norm(engine) (norm of gradients) or ds_fsmoe.whole_parameters(engine) (weights); "
            "for this rank's use ds_fsmoe.own_part(parameter)",
        )


def _viewed(func: Any, plain: str, args: Sequence[Any], kwargs: dict[str, Any], marked: Any) -> Any:
    """Return another view of a part, or a product expert by expert, in which experts stay separate.

    Raises:
        LayerError: the operation mixes experts.
    """
    dim, origin = marked.fsmoe_dim, marked.fsmoe_origin
    if plain in ("view", "reshape", "flatten", "ravel"):
        result = func(*args, **kwargs)
        if result.ndim == 1:
            return _mark(result, origin, None if marked.ndim > 1 else dim)
        if dim is not None and result.shape[: dim + 1] == marked.shape[: dim + 1]:
            return _mark(result, origin, dim)
    elif plain in ("getitem", "setitem") and args[0] is marked and dim == 0:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        first = index[0] if index else None
        is_all = first is Ellipsis and len(index) <= marked.ndim
        if is_all or (isinstance(first, slice) and first == slice(None)):
            _check_others(func, marked, args[2:])
            return _mark(func(*args, **kwargs), origin, 0)
    elif plain in DIMS and dim == 0:
        of_function = [args[at] for at in DIMS[plain] if len(args) > at]
        touched = [kwargs[each] for each in ("dim", "dim0", "dim1") if each in kwargs] + of_function
        if touched and all(isinstance(each, int) and each % marked.ndim for each in touched):
            return _mark(func(*args, **kwargs), origin, 0)
    elif plain in ("bmm", "matmul", "rmatmul") and dim == 0 and marked.ndim == 3:
        _check_others(func, marked, args)
        return _mark(func(*args, **kwargs), origin, 0)
    raise _refusal(plain, marked)


def _refusal(function: str, marked: Any) -> LayerError:
    return LayerError(
        f"{function}: {marked.fsmoe_origin.describe()}, and ds_fsmoe cannot do with these alone "
        f"what this would do with all. {_INSTEAD}"
    )


def _mixed(function: str, marked: Any, other: torch.Tensor) -> LayerError:
    return LayerError(
        f"{function}: {marked.fsmoe_origin.describe()}, {list(marked.shape)}, and cannot be taken together "
        f"with a tensor {list(other.shape)} of other experts. {_INSTEAD}"
    )
