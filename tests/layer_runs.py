# SPDX-License-Identifier: Apache-2.0
"""A call of a layer from parts that a test has, without the layer around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ds_fsmoe.components.callback import CallbackBase
from ds_fsmoe.execution.tensor_parallel import PLAIN
from ds_fsmoe.layer.moe_layer import MoEOutput
from ds_fsmoe.layer.parts import Parts
from ds_fsmoe.layer.state import LayerRun, LayerState


def token_path(
    x: torch.Tensor,
    used_token_S: torch.Tensor | None,
    *,
    gate: Any,
    order: Any,
    pipeline: Any,
    experts: Any,
    group: Any,
    in_rows: bool = False,
    callbacks: Sequence[CallbackBase] = (),
    duplicates: Any = None,
) -> MoEOutput:
    """What a layer returns that has these parts."""
    parts = Parts(None, tuple(callbacks), "auto", order.ops)
    state = LayerState(parts, order, None, "", "", PLAIN, duplicates=duplicates)
    of_call = "", "", True, x, group, gate, pipeline, experts, experts
    run = LayerRun(*of_call, in_rows, state=state, used_token_S=used_token_S)
    output = run.token_path(x)
    return MoEOutput(output, run.routing.aux_loss, run.routing.counts_E)
