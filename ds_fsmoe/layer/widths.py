# SPDX-License-Identifier: Apache-2.0
"""Explains widths that do not fit, in terms of the layer: torch names two matrices and neither of their owners."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.stacked_experts import StackedExperts
from ds_fsmoe.layer.parts import LayerError

_OF_SHAPES = re.compile(r"shapes? |size of tensor|input of size")
"""Matches what torch says of shapes that do not fit, and of no other failure."""


def check_width(layer: str, x: torch.Tensor, width: int | None) -> None:
    """Check that the input of a layer has the width it was made for.

    Args:
        layer: the layer's name, for the message.
        x: the input, [..., M].
        width: M; ``None`` where the gate does not say.

    Raises:
        LayerError: the input has another width, or no width at all.
    """
    if x.dim() == 0 or (width is not None and x.shape[-1] != width):
        made_for = "M" if width is None else f"M = {width}"
        raise LayerError(f"{layer}: its input has shape {list(x.shape)}: must be [..., {made_for}]")


@contextmanager
def naming_widths(layer: str, experts: ExpertSet, x: torch.Tensor) -> Iterator[None]:
    """Explain a failure inside this context that an expert causes by not taking or making rows of the layer's width.

    The experts are tried, with one row each, only once something has failed.

    Args:
        layer: the layer's name, for the message.
        experts: the experts of this rank.
        x: [..., M], the rows they get.

    Raises:
        LayerError: names the layer, the expert, M and the shape.
    """
    try:
        yield
    except RuntimeError as error:
        # Experts with stacked weights are no modules that rows could be given to, and have the model's own width.
        alone = () if isinstance(experts, StackedExperts) else experts.experts
        for index, expert in enumerate(alone):
            if problem := _wrong_width(expert, x, experts.keep_expert_dim):
                raise LayerError(f"{layer}: expert {index}, a {type(expert).__name__}, {problem}") from error
        raise


def _wrong_width(expert: nn.Module, x: torch.Tensor, keep_expert_dim: bool) -> str | None:
    shape = (1, 1, 1, x.shape[-1]) if keep_expert_dim else (1, 1, x.shape[-1])
    devices = [x.device] if x.device.type == "cuda" else []
    must = f"an expert must return a row of the layer's width, M = {x.shape[-1]}, for every row"
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        try:
            made = expert(x.new_zeros(shape))
        except RuntimeError as error:
            if not _OF_SHAPES.search(str(error)):
                return None
            return f"does not take rows of shape {list(shape)}: {error}; {must}"
    made = made[0] if isinstance(made, tuple) else made
    if isinstance(made, torch.Tensor) and made.shape != shape:
        return f"made {list(made.shape)} of {list(shape)}: {must}"
    return None
