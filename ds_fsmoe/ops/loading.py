# SPDX-License-Identifier: Apache-2.0
"""Chooses between the reference ops, torch's and the compiled ones, and builds the latter on request.

Engines and users call :func:`load_ops` once. ``reference``, ``plain``, ``compiled`` and ``deterministic`` contain the
operators.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_fsmoe.ops import compiled, plain, reference
from ds_fsmoe.ops import deterministic as in_order

MODES = ("auto", "plain", "reference", "required")
# Device type -> the library with all ops for it, by the name of its builder.
LIBRARIES = {"cpu": "fsmoe_cpu", "cuda": "fsmoe_cuda"}

_OP_BUILDER = "ds_fsmoe.ops.op_builder"
# A failed compile can print thousands of lines: so many of its first and last characters are shown. The exception's
# cause has all of them.
_REASON_CHARACTERS = (300, 1700)
_LOG = logging.getLogger("ds_fsmoe")
# The message of a rank that is building, and its interval.
_AT_WORK = "at work"
_ANSWER_EVERY_S = 1.0


@dataclass(frozen=True)
class Ops:
    """Holds the operators of an MoE layer, all of one origin.

    Attributes:
        name: "reference", "plain" or "compiled".
        top_k_slots: (scores_SE, k, capacity, used_S, priority) -> ``reference.Slots``: experts, slots and counts.
        take_slots: (experts_KS, num_experts, capacity, used_S, priority, scores_KS) -> ``reference.Slots``.
        number_rows: (choices_KS, num_experts, capacity, segments_3T, limits_E) -> ``reference.Rows``.
        arrange: (x_SM, slots_KS, num_slots, dtype) -> [N, M].
        restore: (y_NM, slots_KS, weights_KS, dtype, by_slot) -> [S, M].
        restore_backward: (d_out_SM, y_NM, slots_KS, weights_KS) -> [N, M], [K, S].
        gated: (x_RF, form, interleaved, limit, alpha) -> [R, H].
        gated_backward: (x_RF, dh_RH, form, interleaved, limit, alpha) -> [R, F], [R, H].
        gather_rows: (x_RM, index_N) -> [N, M]; zeros where the index is outside 0..R-1.
        add_rows: (y_NM, index_N, num_rows) -> [R, M]; rows whose index is outside 0..R-1 are ignored.
    """

    name: str
    top_k_slots: Callable[..., reference.Slots]
    take_slots: Callable[..., reference.Slots]
    number_rows: Callable[..., reference.Rows]
    arrange: Callable[..., Tensor]
    restore: Callable[..., Tensor]
    restore_backward: Callable[..., tuple[Tensor, Tensor]]
    gated: Callable[..., Tensor]
    gated_backward: Callable[..., tuple[Tensor, Tensor]]
    gather_rows: Callable[[Tensor, Tensor], Tensor]
    add_rows: Callable[[Tensor, Tensor, int], Tensor] = reference.add_rows


REFERENCE = Ops(
    "reference",
    reference.top_k_slots,
    reference.take_slots,
    reference.number_rows,
    reference.arrange,
    reference.restore,
    reference.restore_backward,
    reference.gated,
    reference.gated_backward,
    reference.gather_rows,
)
PLAIN = replace(
    REFERENCE,
    name="plain",
    number_rows=plain.number_rows,
    arrange=plain.arrange,
    restore=plain.restore,
    restore_backward=plain.restore_backward,
    gated_backward=plain.gated_backward,
)
_ON_CPU = Ops(
    "compiled",
    compiled.top_k_slots,
    compiled.take_slots,
    compiled.number_rows,
    compiled.arrange,
    compiled.restore,
    compiled.restore_backward,
    compiled.gated,
    compiled.gated_backward,
    compiled.gather_rows,
)


def _unless_double(compiled: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator that uses the reference for float64, which the kernel does not support."""

    def operator(*args: Any) -> Any:
        # "in" would compare tensors with a dtype, which takes longer than the operator.
        is_double = any(each is torch.float64 or getattr(each, "dtype", None) is torch.float64 for each in args)
        return (plain if is_double else compiled)(*args)

    return operator


# Device type -> its compiled operators. On CUDA torch's own gather is as fast as a custom one.
COMPILED = {
    "cpu": _ON_CPU,
    "cuda": Ops(
        "compiled",
        _unless_double(compiled.top_k_slots, reference.top_k_slots),
        _unless_double(compiled.take_slots, reference.take_slots),
        compiled.number_rows,
        _unless_double(compiled.arrange, reference.arrange),
        _unless_double(compiled.restore, reference.restore),
        _unless_double(compiled.restore_backward, reference.restore_backward),
        _unless_double(compiled.gated, reference.gated),
        _unless_double(compiled.gated_backward, reference.gated_backward),
        reference.gather_rows,
    ),
}

# Operators that add up in one order on every device. The compiled ones for CUDA use atomics for integers only, so only
# the other operators differ.
_IN_ORDER = {
    "gather_rows": in_order.gather_rows,
    "add_rows": in_order.add_rows,
}
_OF_REFERENCE = {
    "arrange": partial(reference.arrange, gather=in_order.gather_rows),
    "restore": partial(reference.restore, gather=in_order.gather_rows),
}
_REFERENCE_IN_ORDER = replace(REFERENCE, **_OF_REFERENCE, **_IN_ORDER)
# The gradients of PLAIN gather rows, and torch sums a dimension of one tensor in one order.
_PLAIN_IN_ORDER = replace(PLAIN, **_IN_ORDER)
_CUDA_IN_ORDER = replace(
    COMPILED["cuda"],
    arrange=_unless_double(compiled.arrange, _OF_REFERENCE["arrange"]),
    restore=_unless_double(compiled.restore, _OF_REFERENCE["restore"]),
    **_IN_ORDER,
)


def adding_in_order(ops: Ops, device_type: str) -> Ops:
    """Return the same operators with deterministic sums: equal inputs have equal gradients in every run, in every bit.

    On a CPU all operators are deterministic.
    """
    if device_type == "cpu":
        return ops
    return {id(COMPILED["cuda"]): _CUDA_IN_ORDER, id(REFERENCE): _REFERENCE_IN_ORDER}.get(id(ops), _PLAIN_IN_ORDER)


# Device types for which "auto" has failed to load a library, on all ranks. It does not build again.
_failed: set[str] = set()


def load_ops(mode: str, device_type: str, deterministic: bool = False) -> Ops:
    """Return the operators to train with. Collective for "auto" and "required": every rank must call it.

    The library comes from the installed wheel if that contains one, and is built otherwise. The rank with LOCAL_RANK 0
    on each node builds first, so that one process per node compiles. The others then load the result. Ranks agree on
    the outcome, so all compute with the same operators.

    Args:
        mode: "plain" for torch's own operators, "reference" for the slower ones that define the results, "required" for
            the compiled ones, "auto" for the compiled ones where they can be loaded. Otherwise "auto" uses "plain", and
            rank 0 warns once with the reason.
        device_type: torch device type of the tensors, such as "cpu" or "cuda".
        deterministic: use :func:`adding_in_order`.

    Raises:
        ValueError: an unknown mode, or "required" for a device type that has no compiled ops.
        RuntimeError: "required", and building or loading failed on some rank; on every rank, with the reason.

    Returns:
        The operators, for ``MOELayer(ops=...)``; their ``name`` identifies them.

    Examples:
        >>> import ds_fsmoe
        >>> ds_fsmoe.load_ops("reference", "cpu").name
        'reference'
    """
    ops = _loaded(mode, device_type)
    return adding_in_order(ops, device_type) if deterministic else ops


def _loaded(mode: str, device_type: str) -> Ops:
    _check(mode, device_type)
    if mode == "reference":
        return REFERENCE
    if mode == "plain" or (mode == "auto" and device_type in _failed):
        return PLAIN
    if device_type not in LIBRARIES:
        return _give_up(device_type, f"there are none for {device_type!r}, only for {', '.join(LIBRARIES)}")
    failure = _load_on_every_rank(device_type)
    if failure is None:
        return COMPILED[device_type]
    if mode == "auto":
        return _give_up(device_type, str(failure))
    raise _refusal(device_type, failure) from failure.__cause__


def import_op_builder() -> ModuleType:
    """Import the package of op builders of this package, installed or in a checkout, without DeepSpeed.

    An editable installation of one checkout resolves names for all others, so the neighbour of this file comes first.
    The name is always ``ds_fsmoe.ops.op_builder``. The top-level name ``op_builder`` is not used, since a checkout of
    DeepSpeed on ``sys.path`` has it too.

    Raises:
        RuntimeError: the builders are missing.
    """
    folder = Path(__file__).resolve().parents[2] / "op_builder"
    is_checkout = not Path(__file__).with_name("op_builder").is_dir() and (folder / "__init__.py").is_file()
    if _OP_BUILDER in sys.modules or (not is_checkout and importlib.util.find_spec(_OP_BUILDER) is not None):
        return importlib.import_module(_OP_BUILDER)
    if not is_checkout:
        raise RuntimeError(f"the op builders are missing: neither {_OP_BUILDER} nor {folder} exists")
    spec = importlib.util.spec_from_file_location(
        _OP_BUILDER, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_OP_BUILDER] = module
    spec.loader.exec_module(module)
    return module


def _check(mode: str, device_type: str) -> None:
    if mode not in MODES:
        raise ValueError(f"ops = {mode!r}: must be one of {', '.join(map(repr, MODES))}")
    if mode == "required" and device_type not in LIBRARIES:
        raise ValueError(
            f"ops = 'required': compiled ops exist for {', '.join(LIBRARIES)} only, and this run is on "
            f"{device_type!r}; use 'auto' or 'plain'"
        )


def _is_rank_0() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def _give_up(device_type: str, reason: str) -> Ops:
    _failed.add(device_type)
    if _is_rank_0():
        _LOG.warning(
            "compiled ops are not available, so all ranks use torch operators, which are slower: %s\nSet ops to "
            "'plain' to silence this warning, or to 'required' to stop instead.",
            reason,
        )
    return PLAIN


def _refusal(device_type: str, failure: RuntimeError) -> RuntimeError:
    return RuntimeError(
        f"ops = 'required': the compiled ops ({LIBRARIES[device_type]}) could not be loaded: {failure}\n"
        "Mend that, or do without compiled ops: set ops to 'auto' or 'plain'."
    )


def _load_on_every_rank(device_type: str) -> RuntimeError | None:
    """Load the library on all ranks, or return the reason of a failure, the same on all ranks. Collective."""
    builds = os.environ.get("LOCAL_RANK", "0") == "0"
    for my_turn in (builds, not builds):
        # Every rank takes part in both agreements, failed or not; the first is also the barrier that keeps the other
        # ranks of a node from building.
        failure = _agree_after(partial(_try_to_load, device_type) if my_turn else None)
        if failure is not None:
            return failure
    compiled.define()
    return None


def _try_to_load(device_type: str) -> Exception | None:
    try:
        builder = import_op_builder().builders(device_type)[LIBRARIES[device_type]]
        if _is_rank_0() and builder.will_compile():
            _LOG.info("compiling the ops for %s: about a minute, once per machine", device_type)
        builder.load()
    except Exception as err:  # of any kind: the other ranks wait for the result
        return err
    return None


def _agree_after(work: Callable[[], Exception | None] | None) -> RuntimeError | None:
    """Run ``work`` on some ranks while the others wait, then agree on the outcome. Collective.

    A build may take longer than a collective's timeout. So ranks repeatedly exchange whether they are still at work,
    every ``_ANSWER_EVERY_S`` seconds. A dead rank is then detected as in any other collective.

    Args:
        work: the work of this rank, which returns its error or ``None``; ``None`` for a rank that waits.
    """
    failure = None
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        if work is not None:
            with _answering_peers():
                failure = work()
        while _AT_WORK in (told := _gathered(_reason_of(failure))):
            pass
        rank = next((rank for rank, text in enumerate(told) if text is not None), None)
        reason = None if rank is None else f"on rank {rank}, {told[rank]}"
    else:
        failure = None if work is None else work()
        reason = _reason_of(failure)
    if reason is None:
        return None
    agreed = RuntimeError(reason)
    agreed.__cause__ = failure
    return agreed


@contextmanager
def _answering_peers() -> Iterator[None]:
    """Answer the waiting ranks from a thread inside the block. No other communication may run in the block."""
    is_over = threading.Event()
    errors: list[BaseException] = []
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def tell() -> None:
        try:
            if device is not None:  # each thread has its own current device
                torch.cuda.set_device(device)
            while not is_over.wait(_ANSWER_EVERY_S):
                _gathered(_AT_WORK)
        except BaseException as error:
            errors.append(error)

    teller = threading.Thread(target=tell, name="fsmoe-building", daemon=True)
    teller.start()
    try:
        yield
    finally:
        is_over.set()
        teller.join()
    if errors:
        raise errors[0]


def _gathered(own: str | None) -> list[str | None]:
    """Return the message of each rank. Collective."""
    told: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    return told


def _reason_of(failure: Exception | None) -> str | None:
    return None if failure is None else _shortened(f"{type(failure).__name__}: {failure}")


def _shortened(text: str) -> str:
    first, last = _REASON_CHARACTERS
    return text if len(text) <= first + last else f"{text[:first]}\n...\n{text[-last:]}"
