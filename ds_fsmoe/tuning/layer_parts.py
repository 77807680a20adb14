# SPDX-License-Identifier: Apache-2.0
"""Times what a layer does besides the experts' part, alone: gate, order, and the sums of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ds_fsmoe.measuring.cache import Measuring
from ds_fsmoe.measuring.profiler import untouched
from ds_fsmoe.measuring.stopwatch import Prepare
from ds_fsmoe.planning.job.measured import EXPERT_GRADIENTS, GATE, GATHERED, GRADIENTS, ORDER, SCATTERED, Timing
from ds_fsmoe.planning.schedule import EXPERT_GRAD, GRAD, GRAD_GATHER, GRAD_SCATTER
from ds_fsmoe.tuning.layer_kinds import LayerKind

if TYPE_CHECKING:
    from ds_fsmoe.gradients.flat_buffers import FlatGradients
    from ds_fsmoe.gradients.reduction import Reduction

LARGEST_NUMEL = 1 << 20
"""The most elements of gradients that are summed to measure the cost."""
_NAMES = {GRAD: GRADIENTS, EXPERT_GRAD: EXPERT_GRADIENTS, GRAD_SCATTER: SCATTERED, GRAD_GATHER: GATHERED}


def time_gate_and_order(measuring: Measuring, kind: LayerKind) -> dict[str, Timing]:
    """Time the forward of a layer's gate, and of its order there and back, per token. Collective.

    Raises:
        MeasuringError: on every rank, if one has failed.
    """
    layer, device = kind.layer, measuring.watch.device
    width, dtype = kind.subject.sizes.width, kind.subject.sizes.dtype
    # As many tokens as the fullest rank has, so that all measure the same.
    num_tokens = int(measuring.watch.slowest([[float(kind.num_tokens)]])[0][0])
    sizes = _sizes_up_to(num_tokens, 4)

    def tokens(size: int) -> torch.Tensor:
        return torch.randn(size, width, device=device).to(dtype)

    def gate(size: int) -> Callable[[], object]:
        x_SM = tokens(size)
        return lambda: layer.route_unheard(x_SM, None, None)

    def order(size: int) -> Callable[[], object]:
        x_SM = tokens(size)
        routing = layer.route_unheard(x_SM, None, None)
        return lambda: layer.fsmoe.order.restore(layer.fsmoe.order.arrange(x_SM, routing), routing)

    was_training = layer.gate.training
    # A gate that counts what it routes in training does not count this.
    layer.gate.eval()
    found: dict[str, Timing] = {}
    jobs: dict[str, Prepare] = {GATE: gate, ORDER: order}
    try:
        with untouched(device, layer.gate), kind.subject.surroundings():
            for name, prepare in jobs.items():
                parts = f"{name} {type(layer.gate).__name__}, {type(layer.fsmoe.order).__name__}"
                of_kind = f"{parts}, {layer.num_local_experts}"
                full_name = f"{of_kind} experts a rank, width {width}, {dtype}, up to {sizes[-1]} tokens"
                found[name] = measuring.timing(full_name, "token", sizes, 1.0, prepare)
    finally:
        layer.gate.train(was_training)
    return found


def time_gradients(measuring: Measuring, kind: LayerKind, reduction: Reduction | None) -> dict[str, Timing]:
    """Time the sums of gradients, per byte: dense ones, and the experts' where several ranks hold them. Collective.

    Args:
        measuring: the measuring of this job.
        kind: a layer.
        reduction: its groups are used; without one, DeepSpeed's for dense gradients.

    Raises:
        MeasuringError: on every rank, if one has failed.
    """
    largest: dict[str, FlatGradients] = {}
    for flat in () if reduction is None else reduction.reducer.flats:
        if flat.kind not in largest or flat.numel > largest[flat.kind].numel:
            largest[flat.kind] = flat
    found: dict[str, Timing] = {}
    placements = kind.pipeline.forward.groups.placements
    for grad_kind, flat in largest.items():
        sizes = _sizes_up_to(min(LARGEST_NUMEL, flat.numel), 6)
        at = placements["dp" if grad_kind == GRAD else "edp"]
        of_kind = f"of {flat.dtype} among {at.size} ({at.per_node} in a node), up to {sizes[-1]} elements"
        for task in flat.way.most_kinds:
            name = _NAMES[grad_kind if task == GRAD else task]
            if name not in found:
                found[name] = measuring.timing(
                    f"{name} {of_kind}, {flat.way}",
                    *("byte", sizes, float(flat.dtype.itemsize), flat.reducing(task), flat.group),
                )
    return found


def _sizes_up_to(largest: int, count: int) -> list[int]:
    """Return so many sizes by halves, fewer where they would repeat, but at least the three that a line needs."""
    sizes = sorted({max(1, largest >> halvings) for halvings in range(count)})
    while len(sizes) < 3:
        sizes.append(2 * sizes[-1])
    return sizes
