# SPDX-License-Identifier: Apache-2.0
"""Counts what a layer asks of its host: calls of functions, and operations that a GPU would be given a kernel for.

Neither has any noise, and on a GPU both are paid for by one thread: a call takes 0.1 to 0.15 us, a launch about 5 us.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_fsmoe import MOELayer
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.experts.mixtral import MixtralFeedForward
from ds_fsmoe.components.gates.topk import LinearGate
from ds_fsmoe.components.orders.sparse import SimpleOrder
from ds_fsmoe.execution.counts_exchange import CountsExchange
from ds_fsmoe.execution.lanes import SerialLanes
from ds_fsmoe.execution.row_chunks import RowLayout
from ds_fsmoe.execution.row_sizes import ALONE, TokenChunks
from ds_fsmoe.execution.slot_chunks import SlotLayout
from tests.layer_runs import token_path

ON_A_GPU = {"number_rows": 4, "arrange": 3, "restore": 1, "restore_backward": 3}
ON_A_GPU |= {"gated": 1, "gated_backward": 1, "top_k_slots": 4, "take_slots": 3}
"""For each operator of ours the kernels, memsets and copies of its CUDA form, of dense tensors in two choices a token;
tests/test_ops_cuda_launches.py holds it against the launchers."""


@dataclass(frozen=True)
class Counts:
    """Of one part of a step."""

    calls: int
    """Of functions, in Python and in C, from Python."""
    launches: int
    """Operations that are no views and make more than room."""


class Launches(TorchDispatchMode):
    """Counts operations that write to memory."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = {each.untyped_storage()._cdata for each in tensors_in((args, kwargs))}
        result = func(*args, **kwargs)
        makes = any(each.untyped_storage()._cdata not in before for each in tensors_in(result))
        writes = any(each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments)
        self.number += (makes or writes) and "empty" not in func.overloadpacket.__name__
        return result


class Operations(TorchDispatchMode):
    """Notes operations of the given names, without names all, and the shape of the result of each."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names, self.found = names, list[tuple[str, Any]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if not self.names or name in self.names:
            self.found.append((name, getattr(result, "shape", None)))
        return result


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def num_calls(function: Callable[[], Any], events: tuple[str, ...] = ("call", "c_call")) -> int:
    """Calls that a function makes, of Python and of C, in this thread and its own not counted."""
    number = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal number
        number += event in events

    before = sys.getprofile()
    # What the collector finds, and when, has to do with all that ran before: others' callbacks would be counted.
    gc.collect()
    gc.disable()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
        gc.enable()
    return number - len(events)  # of the function, and of what ends this, which is of C


def counts_of(forward: Callable[[], torch.Tensor], parameters: Iterable[torch.Tensor]) -> tuple[Counts, Counts]:
    """Of a forward and of its backward, each the third of its kind, so that what is done once has been done."""
    parameters = tuple(parameters)
    results: list[torch.Tensor] = []
    dy = torch.ones_like(forward())

    def backward() -> None:
        # In this thread: so the backward of what is on a CPU runs.
        results.pop().backward(dy)

    def forget_gradients() -> None:
        for each in parameters:
            each.grad = None

    for _ in range(2):
        results.append(forward())
        backward()
        forget_gradients()
    calls_forward, calls_backward = num_calls(lambda: results.append(forward())), num_calls(backward)
    forget_gradients()
    with Launches() as launches:
        results.append(forward())
        launches_forward = launches.number
        backward()
    return Counts(calls_forward, launches_forward), Counts(calls_backward, launches.number - launches_forward)


def layer_counts(num_experts: int, degree: int, together: str, k: int = 2) -> dict[str, Counts]:
    """Of the experts' part alone and of a whole layer (gate, order, experts, back), forward and backward.

    Args:
        num_experts: all of them on this rank.
        degree: chunks, in both phases.
        together: whether experts are computed together, see :class:`ExpertSet`; ``"rows"``: on rows instead of slots.
        k: choices of a token.
    """
    in_rows = together == "rows"
    torch.manual_seed(0)
    width = 16
    layer = MOELayer(
        LinearGate(k=min(k, num_experts), drop_tokens=not in_rows),
        SimpleOrder(),
        model_dim=width,
        num_experts=num_experts,
        expert_impl=MixtralFeedForward(width, width),
        pipeline_degree=degree,
        overlap=False,
        return_stats=True,
    )
    x_SM = torch.randn(4 * num_experts, width, requires_grad=True)
    layer(x_SM)
    pipeline = layer._state.pipeline
    assert isinstance(pipeline.lanes, SerialLanes)
    experts = ExpertSet(list(layer.experts.experts), together="auto" if in_rows else together)
    capacity = 8
    x_RM = torch.randn(num_experts * capacity, width, requires_grad=True)
    layout: RowLayout | SlotLayout = SlotLayout(num_experts, capacity, pipeline.degrees)
    if in_rows:
        counts_ET = torch.full((num_experts, degree), capacity // degree)
        counts = CountsExchange.begin(counts_ET, torch.zeros((), dtype=torch.long), ALONE, TokenChunks(degree, degree))
        layout = RowLayout(counts.wait(), num_experts, capacity)
    part = counts_of(lambda: pipeline.run(x_RM, layout, experts), [x_RM, *layer.parameters()])
    parts = {"gate": layer.gate, "order": SimpleOrder(), "pipeline": pipeline, "experts": experts, "group": None}
    whole = counts_of(lambda: token_path(x_SM, None, **parts, in_rows=in_rows).output, [x_SM, *layer.parameters()])
    return dict(zip(("part forward", "part backward", "layer forward", "layer backward"), (*part, *whole), strict=True))
