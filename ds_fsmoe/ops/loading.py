# SPDX-License-Identifier: Apache-2.0
"""Chooses between the reference ops and the compiled ones, and builds the latter when they are asked for."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from ds_fsmoe.ops import reference, rows

MODES = ("auto", "reference", "required")
LIBRARY = "fsmoe_rows"

_OP_BUILDER = "ds_fsmoe.ops.op_builder"
# A failed compile can print thousands of lines; the exception it is raised from has all of them.
_REASON_CHARACTERS = 2000


@dataclass(frozen=True)
class RowOps:
    """Row operators of one origin.

    Attributes:
        name: "reference" or "compiled".
        gather_rows: (x_RM: [R, M], index_N: [N] int64) -> [N, M]; zeros where the index is outside 0..R-1.
    """

    name: str
    gather_rows: Callable[[Tensor, Tensor], Tensor]


def load_row_ops(mode: str, device_type: str) -> RowOps:
    """The row operators to train with. With "required" this is a collective: every rank has to call it.

    "required" takes the library from the installed wheel if that brings one, and otherwise builds it: the rank with
    LOCAL_RANK 0 on each node first, so that one process per node compiles, then the others load the result. Ranks
    agree on the outcome: either all return or all raise.

    Args:
        mode: "reference" for plain torch operators, "required" for the compiled ones, "auto" to leave the choice to
            this package. For now "auto" means the reference: the gather alone does not repay a build.
        device_type: torch device type of the tensors, such as "cpu" or "cuda".

    Raises:
        ValueError: an unknown mode, or "required" for a device type that has no compiled ops.
        RuntimeError: building or loading failed on some rank; raised on every rank, with the reason.
    """
    if mode not in MODES:
        raise ValueError(f"ops = {mode!r}: must be one of {', '.join(map(repr, MODES))}")
    if mode != "required":
        return RowOps("reference", reference.gather_rows)
    if device_type != "cpu":
        raise ValueError(
            f"ops = 'required': there are compiled row ops for the CPU only, and this run is on {device_type!r}; "
            "use 'auto' or 'reference'"
        )
    _load_on_every_rank()
    rows.register_formulas()
    return RowOps("compiled", rows.gather_rows)


def import_op_builder() -> ModuleType:
    """The package of op builders, from the installation or from the source checkout. Does not import DeepSpeed.

    It always goes by the name ``ds_fsmoe.ops.op_builder``. The top-level name ``op_builder`` is not used, since a
    checkout of DeepSpeed on ``sys.path`` answers to it too.

    Raises:
        RuntimeError: the builders are not there.
    """
    if _OP_BUILDER in sys.modules or importlib.util.find_spec(_OP_BUILDER) is not None:
        return importlib.import_module(_OP_BUILDER)
    folder = Path(__file__).resolve().parents[2] / "op_builder"
    if not (folder / "__init__.py").is_file():
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


def _load_on_every_rank() -> None:
    builds = os.environ.get("LOCAL_RANK", "0") == "0"
    for my_turn in (builds, not builds):
        # Every rank takes part in both agreements, whatever happened to it; the first one is also the barrier that
        # keeps the other ranks of a node from building.
        failure = _try_to_load() if my_turn else None
        _raise_if_any_rank_failed(failure)


def _try_to_load() -> Exception | None:
    try:
        import_op_builder().builders("cpu")[LIBRARY].load()
    except Exception as err:  # of any kind: the other ranks are waiting to hear of it
        return err
    return None


def _raise_if_any_rank_failed(failure: Exception | None) -> None:
    reason = None if failure is None else f"{type(failure).__name__}: {failure}"[:_REASON_CHARACTERS]
    if dist.is_available() and dist.is_initialized():
        success = torch.tensor([failure is None], dtype=torch.int32)
        dist.all_reduce(success, op=dist.ReduceOp.MIN)
        if not success.item():
            reasons: list[str | None] = [None] * dist.get_world_size()
            dist.all_gather_object(reasons, reason)
            rank, reason = next((rank, text) for rank, text in enumerate(reasons) if text is not None)
            reason = f"on rank {rank}, {reason}"
    if reason is not None:
        raise RuntimeError(
            f"ops = 'required': the compiled op {LIBRARY} could not be loaded: {reason}\n"
            "Mend that, or do without compiled ops: set ops to 'auto' or 'reference'."
        ) from failure
