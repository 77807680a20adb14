# SPDX-License-Identifier: Apache-2.0
"""Splits layers into chunks by rule: their all-to-alls are micro-ops of one size, as in Lina (ATC'23, section 4.2).

The engine calls it after the first optimizer step in training, without measuring. That step runs unchunked and shows
the bytes that each layer exchanges. From the second step on each layer has the number of chunks that follows from them,
the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.execution.pipeline import CallSizes
from ds_fsmoe.layer.stock_layer import FSMoELayer
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.observing.instruments import LayerCall
from ds_fsmoe.planning.call_shape import CallShape, moe_work
from ds_fsmoe.planning.chunks import MICRO_OP_BYTES, degree_by_bytes
from ds_fsmoe.planning.decide.block_times import Order
from ds_fsmoe.planning.decide.presets import BEST, preset
from ds_fsmoe.planning.decide.rules import allowed
from ds_fsmoe.planning.groups import Fanout, can_deduplicate, expected_fanout
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.workload import NODE_DEDUPLICATED


def chunks_by_bytes(block: FSMoEBlock) -> bool:
    """Return True if numbers of chunks follow from bytes by the rule of a schedule, and are not chosen otherwise."""
    asked = block.pipeline_degree
    is_open = (asked.forward, asked.backward) == ("auto", "auto") and not block.autotune.enabled
    return is_open and block.schedule != BEST and preset(block.schedule).pipeline == "by_bytes"


class MicroOps:
    """Splits the layers of one engine into chunks, once.

    Args:
        block: the options of the stage.
        group: the ranks that run the same layers; ``None``: all of the job.
    """

    def __init__(self, block: FSMoEBlock, group: dist.ProcessGroup | None = None) -> None:
        asked = block.gradient_partition.asked_bytes
        self._micro_op_bytes = MICRO_OP_BYTES if asked is None else asked
        self._max_degree = block.pipeline_degree.max
        self._group = group
        self._sizes: dict[str, CallSizes] = {}
        """Label of a layer -> the sizes of its largest call in training so far."""
        self.is_wanted = True
        """Whether layers are still to be split into chunks; the same on every rank."""

    def watch(self, call: LayerCall) -> None:
        """Record the sizes of a layer's largest call in training."""
        if self.is_wanted and call.is_training:
            call.pipeline = call.pipeline.watched(on_call=partial(self._note, call.label))

    def _note(self, label: str, sizes: CallSizes) -> None:
        if label not in self._sizes or sizes.capacity > self._sizes[label].capacity:
            self._sizes[label] = sizes

    def need_not_run(self) -> None:
        """Skip measuring: plans came from elsewhere."""
        self.is_wanted = False

    def chunk_layers(self, layers: Mapping[str, FSMoELayer]) -> bool:
        """Split the layers into chunks; return True if any has several. Collective over the ranks of the group, between
        steps; the rank with the most bytes of a layer counts.

        Args:
            layers: the engine's layers by label.
        """
        self.is_wanted = False
        own = {label: self._degree(layers[label], sizes) for label, sizes in self._sizes.items() if label in layers}
        of_ranks = on_every_rank(own, self._group)
        self._sizes.clear()
        degrees = {label: max(each.get(label, 1) for each in of_ranks) for label in layers}
        for label, degree in degrees.items():
            state = layers[label].fsmoe
            if state.plan is not None and degree > 1:
                forward, backward = (replace(each, degree=degree) for each in (state.plan.forward, state.plan.backward))
                state.apply(replace(state.plan, forward=forward, backward=backward))
        chunks = ", ".join(f"{label} {degree}" for label, degree in degrees.items())
        log_on_rank_0(f"num_chunks by micro-ops of {self._micro_op_bytes / 1e6:.4g} MB: {chunks}")
        return max(degrees.values(), default=1) > 1

    def _degree(self, layer: FSMoELayer, sizes: CallSizes) -> int:
        """Return the number of chunks of a layer by the bytes that this rank has sent."""
        assert layer.pipeline is not None
        return degree_of_call(layer.pipeline.forward, sizes, self._micro_op_bytes, self._max_degree)


def degree_of_call(plan: PhasePlan, sizes: CallSizes, micro_op_bytes: int, max_degree: int) -> int:
    """Return the number of chunks in which the all-to-alls of a call are micro-ops, or the most that rules allow.

    Args:
        plan: the plan of one of the layer's phases.
        sizes: the sizes of the call.
        micro_op_bytes, max_degree: see :func:`~ds_fsmoe.planning.chunks.degree_by_bytes`.
    """
    called = sizes.num_experts, sizes.capacity, sizes.width, sizes.dtype.itemsize
    shape = CallShape(
        *called,
        num_products=1,
        num_weights=1,
        num_tokens=sizes.num_tokens,
        crossings=_fanout(plan, sizes),
        wires=sizes.comm_byte_shares,
    )
    wanted = degree_by_bytes(moe_work(plan.groups, False, shape, plan.alltoall), micro_op_bytes, max_degree)
    orders = [Order(each, plan.block.links) for each in range(1, wanted + 1)]
    for backward in (False, True):
        orders = allowed(orders, moe_work(plan.groups, backward, shape, plan.alltoall), backward)
    return max(each.degree for each in orders)


def _fanout(plan: PhasePlan, sizes: CallSizes) -> Fanout | None:
    """Return the fan-out of a token for each of its choices, with balanced routing; ``None``: once for each."""
    if plan.alltoall != NODE_DEDUPLICATED or not sizes.num_choices or not can_deduplicate(plan.groups):
        return None
    at, k = plan.groups.placements["ep"], min(sizes.num_choices, sizes.num_experts)
    found = expected_fanout(sizes.num_experts, k, at.nodes, at.per_node)
    return Fanout(found.nodes / k, found.ranks / k)
