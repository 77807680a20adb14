# SPDX-License-Identifier: Apache-2.0
"""Checks the experts' law for the experts of a layer: each row of a result depends on the same row of the input."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.manual_ffn import manual_form
from ds_fsmoe.components.expert_compute.row_wise import NotRowWiseError, RowShapeError, check_row_wise
from ds_fsmoe.distributed.agreement import check_agreement
from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.layer.parts import LayerError
from ds_fsmoe.observing.step_timer import most_of

Kind = Literal["none", "draws", "called", "mixes", "unknown", "shape"]


@dataclass(frozen=True)
class Finding:
    """A reason against running the experts of a layer in chunks, if there is one."""

    kind: Kind = "none"
    """The kind of the reason. "shape": no way to run them is right; "unknown": they could not be tried."""
    text: str = ""
    """The reason in words, such as "expert 1: ..."; empty if there is none."""


def by_class(experts: ExpertSet) -> Finding:
    """Return what the experts' modules say of themselves, in the mode they are in: nothing is computed."""
    for index, expert in enumerate(experts.experts):
        for name, module in expert.named_modules():
            what = f"expert {index}: {name or 'the expert itself'}, a {type(module).__name__},"
            if _draws(module):
                return Finding("draws", f"{what} draws random numbers, and in chunks it would draw others")
            if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
                return Finding("mixes", f"{what} is not row-wise: it normalises over all rows")
    return Finding()


def _draws(module: nn.Module) -> bool:
    if not module.training:
        return False
    if isinstance(module, nn.RReLU):
        return module.lower != module.upper
    return isinstance(module, _DropoutNd) and 0 < module.p < 1


def by_trial(experts: ExpertSet, x: torch.Tensor) -> Finding:
    """Return the worst result of a few rows of random numbers, the same on every rank, for experts that are not known
    to be row-wise.

    Args:
        experts: the experts of this rank, in the mode in which they are to run.
        x: [..., M], whose width, dtype and device the rows have.
    """
    if getattr(experts, "is_row_wise", False):
        return Finding()
    found = [
        _tried(index, expert, x, experts.keep_expert_dim)
        for index, expert in enumerate(experts.experts)
        if manual_form(expert) is None
    ]
    return worst_of(Finding(), *found)


def worst_of(*found: Finding) -> Finding:
    """Return the first of the worst findings."""
    return max(found, key=lambda each: get_args(Kind).index(each.kind))


def _tried(index: int, expert: nn.Module, x: torch.Tensor, keep_expert_dim: bool) -> Finding:
    kind = type(expert).__name__
    try:
        with uncompiled():
            draws = check_row_wise(expert, x.shape[-1], dtype=x.dtype, device=x.device, keep_expert_dim=keep_expert_dim)
    except RowShapeError as error:
        return Finding("shape", f"expert {index}: {error}")
    except NotRowWiseError as error:
        return Finding("mixes", f"expert {index}: {error}")
    except Exception as error:  # whatever an expert has against so few rows
        said = f"{type(error).__name__}: {error}".split("\n")[0]
        return Finding("unknown", f"expert {index}: expert {kind} could not be tried on a few rows ({said})")
    if draws:
        return Finding(
            "draws", f"expert {index}: expert {kind} draws random numbers, and in chunks it would draw others"
        )
    return Finding()


def uncompiled(is_wanted: bool = True) -> AbstractContextManager:
    """Leave compiled code out, and compile nothing, where torch can be told so."""
    # Where nothing has been compiled this would import the compiler, which takes seconds.
    is_wanted = is_wanted and "torch._dynamo" in sys.modules
    set_stance = getattr(torch.compiler, "set_stance", None) if is_wanted else None
    return nullcontext() if set_stance is None else set_stance("force_eager")


def agreed(
    found: Finding,
    is_error: bool,
    path: str,
    group: dist.ProcessGroup | None,
    is_alone: bool,
    device: torch.device,
) -> str:
    """Return the first finding of any rank; empty if there is none. Collective, unless this rank is alone.

    Args:
        found: the finding on this rank.
        is_error: whether the finding is an error that cannot be avoided.
        path: the path of the layer, for messages.
        group: the ranks; ``None``: all.
        is_alone: whether other ranks need not be asked.
        device: the device for the numbers that ranks exchange.

    Raises:
        LayerError, DisagreementError: on every rank, if it is an error on any.
    """
    worst, texts = 2 if is_error else int(bool(found.text)), [found.text]
    if not is_alone:
        worst = int(most_of([float(worst)], device, group, f"the first look at the experts of {path}")[0])
        if worst:
            texts = on_every_rank(found.text, group)
    if worst == 2:
        problem = f"{path}: {found.text}" if is_error else "row-wise"
        if not is_alone:
            check_agreement({f"experts of {path}": problem}, group, what="whether experts are row-wise")
        raise LayerError(problem)
    return next((text for text in texts if text), "")
