# SPDX-License-Identifier: Apache-2.0
"""Cuts layers into chunks by rule: their all-to-alls are micro-ops of one size, as in Lina (ATC'23, section 4.2).

Nothing is measured. The first optimizer step in training runs uncut and tells the bytes that each layer exchanges; from
the second step on each layer has the degree that follows from them, the same on every rank.
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
from ds_fsmoe.planning.presets import BEST, preset


def cuts_by_bytes(block: FSMoEBlock) -> bool:
    """Return whether degrees follow from bytes by rule: a schedule says so, and nobody else chooses them."""
    asked = block.pipeline_degree
    is_open = (asked.forward, asked.backward) == ("auto", "auto") and not block.autotune.enabled
    return is_open and block.schedule != BEST and preset(block.schedule).pipeline == "by_bytes"


class MicroOps:
    """Cuts the layers of one engine, once.

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
        """Label of a layer -> the sizes of its first call in training."""
        self.is_wanted = True
        """Whether layers are still to be cut; the same on every rank."""

    def watch(self, call: LayerCall) -> None:
        """Record the sizes of a layer's first call in training."""
        if self.is_wanted and call.is_training and call.label not in self._sizes:
            call.pipeline = call.pipeline.watched(on_call=partial(self._note, call.label))

    def _note(self, label: str, sizes: CallSizes) -> None:
        self._sizes.setdefault(label, sizes)

    def need_not_run(self) -> None:
        """Take note that plans came from somewhere else."""
        self.is_wanted = False

    def cut(self, layers: Mapping[str, FSMoELayer]) -> bool:
        """Cut the layers, and tell whether any was. Collective over the ranks of the group, between steps; whoever has
        the most bytes of a layer counts.

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
        log_on_rank_0(f"all-to-alls travel in micro-ops of {self._micro_op_bytes / 1e6:.4g} MB, so in chunks: {chunks}")
        return max(degrees.values(), default=1) > 1

    def _degree(self, layer: FSMoELayer, sizes: CallSizes) -> int:
        """Return the degree of a layer by what this rank has sent."""
        assert layer.pipeline is not None
        plan = layer.pipeline.forward
        called = sizes.num_experts, sizes.capacity, sizes.width, sizes.dtype.itemsize
        shape = CallShape(*called, num_products=1, num_weights=1, num_tokens=sizes.num_tokens, wires=sizes.wires)
        return degree_by_bytes(
            moe_work(plan.groups, False, shape, plan.alltoall), self._micro_op_bytes, self._max_degree
        )
