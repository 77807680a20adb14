# SPDX-License-Identifier: Apache-2.0
"""Calls as a layer makes them, for instruments that are tested without one."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ds_fsmoe.execution.pipeline import LayerPipeline
from ds_fsmoe.observing.instruments import LayerCall


class Watches(Protocol):
    def watch(self, call: LayerCall) -> None: ...


def no_gate(*_: Any) -> Any:
    """In the place of a gate that is not asked."""
    raise AssertionError("there is no gate")


def call_of(
    pipeline: LayerPipeline, x: torch.Tensor, experts: Any, watching: Watches, label: str = "L07"
) -> LayerPipeline:
    """The pipeline of a call in training that was shown to an instrument."""
    call = LayerCall(label, "", True, x, None, no_gate, pipeline, experts, experts)
    watching.watch(call)
    return call.pipeline
