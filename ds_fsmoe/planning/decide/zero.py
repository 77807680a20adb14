# SPDX-License-Identifier: Apache-2.0
"""Adds ZeRO's collectives to the layers and plans of a step, for each stage as in DeepSpeed 0.19.8 and as in ours.
``ds_fsmoe plan`` and the choice of ``ep_size`` call it.

- Stage 0: gradients of all ranks are reduced once a step, by an all-reduce. DeepSpeed does so after the backward; ours
  sends them in windows of the last backward.
- Stage 1: the same, and the updated parameters are gathered. DeepSpeed gathers them at the end of the step; ours while
  the next forward runs.
- Stage 2: as stage 1, but gradients are reduced in every micro-batch. Ours does so too, unless the config has
  ``"accumulate": "before_sum"`` or a GPU has memory for all gradients, which is not predicted.
- Stage 3: in every micro-batch, each layer's parameters are gathered for its forward and again for its backward. Its
  gradients are reduce-scattered, by DeepSpeed for both. Gathers run ahead, and reduce-scatters are concurrent with the
  backward (``overlap_comm``, on by default at this stage; without it both are waited for). There are no windows.

A gather runs ahead by one layer. If the parameters of one layer fill ``stage3_max_live_parameters``, DeepSpeed does not
prefetch concurrently: the gather begins after the layer. Parameters that the backward soon needs again
(``stage3_max_reuse_distance``) stay, and small tensors (``stage3_param_persistence_threshold``) are never released.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_fsmoe.planning.block import Slice
from ds_fsmoe.planning.cluster import Cluster, cost_among
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.model_plan import ModelPlan
from ds_fsmoe.planning.decide.plan import Planner, mode_of, plan_by_name
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.schedule import EXPERT_GRAD, EXPERT_GRAD_PARTS, EXPERT_PARAMETERS, GRAD_PARTS, PARAMETERS
from ds_fsmoe.planning.workload import Gradient, Layer, Sharing, Work

PREFETCH = 50_000_000
"""``zero_optimization.stage3_prefetch_bucket_size``, in elements: a message is about as large."""


@dataclass(frozen=True)
class Zero:
    """Describes a ZeRO stage, with the options of DeepSpeed that change what is sent."""

    stage: int = 0
    dtype_bytes: int = 2
    has_windows: bool = True
    """Whether gradients of ours may be sent in windows below stage 3; otherwise DeepSpeed sums them."""
    gathers: bool = True
    """Whether gathers of parameters count, and the reduce-scatters of stage 3."""
    persistence: int = 100_000
    """``stage3_param_persistence_threshold``, in elements."""
    max_live: int = 1_000_000_000
    """``stage3_max_live_parameters``, in elements."""
    max_reuse: int = 1_000_000_000
    """``stage3_max_reuse_distance``, in elements."""
    overlap_comm: bool = True
    """``overlap_comm``, at stage 3."""

    def has_windows_of(self, name: str) -> bool:
        """Return True if a system by name sends gradients before the backward ends."""
        return self.has_windows and self.stage < 3 and mode_of(name) != "off"

    def layers(self, name: str, layers: Sequence[Layer]) -> tuple[Layer, ...]:
        """Return the layers, in the order of the forward, with ZeRO's collectives under a system by name."""
        if self.stage == 3:
            return self._sharded(layers)
        if self.stage == 0 or not self.gathers or not self.has_windows_of(name):
            return tuple(layers)
        gathers = (tuple(map(_shared_work, each.gradients)) for each in layers)
        return tuple(
            replace(each, sharing=Sharing(forward=of, in_all=False)) for each, of in zip(layers, gathers, strict=True)
        )

    def plan(self, planner: Planner, name: str, layers: Sequence[Layer]) -> ModelPlan:
        """Plan a step of layers as a named system would.

        Args:
            planner: the planner with the costs.
            name: the system.
            layers: the layers without ZeRO, in the order of the forward.

        Raises:
            ValueError: the name is unknown; the message lists the names.
        """
        found = plan_by_name(planner, name, self.layers(name, layers))
        if self.stage == 3:
            return found
        if not self.has_windows_of(name):
            found = found.sending_at_the_end() if found.has_gradients else found
            if self.stage and self.gathers:
                found = replace(
                    found, tail=(*found.tail, *gathers_of([each for layer in layers for each in layer.gradients]))
                )
        return replace(found, sums_each=self.stage == 2)

    def _sharded(self, layers: Sequence[Layer]) -> tuple[Layer, ...]:
        if not self.gathers:
            return tuple(replace(each, gradients=()) for each in layers)
        behind, before, found = 0, 0, []
        for place in reversed(range(len(layers))):
            layer = layers[place]
            gathers = tuple(work for each in layer.gradients for work in self._gathers(each))
            # From a module's forward to its backward DeepSpeed counts all that runs between them.
            stays = 2 * behind + layer.numel < self.max_reuse
            before = layers[place - 1].numel if place else 0
            is_ahead = self.overlap_comm and max(before, layer.numel) < self.max_live
            scatters = tuple(_shared_work(each, EXPERT_GRAD_PARTS, GRAD_PARTS) for each in layer.gradients)
            sharing = Sharing(gathers, () if stays else gathers, scatters, is_ahead, not self.overlap_comm)
            found.append(replace(layer, gradients=(), sharing=sharing))
            behind += layer.numel
        return tuple(found[::-1])

    def _gathers(self, gradient: Gradient) -> tuple[Work, ...]:
        """Return the gather of the parameters of these gradients, without those that stay whole."""
        tensors = gradient.tensors_bytes or (gradient.size_bytes,)
        # The weights of all experts of a rank are one tensor each.
        small = 0 if gradient.kind == EXPERT_GRAD else self.persistence * self.dtype_bytes
        size_bytes = sum(each for each in tensors if each >= small)
        launches = max(1, round(size_bytes / (PREFETCH * self.dtype_bytes)))
        return (replace(_shared_work(gradient), size=size_bytes, launches=launches),) if size_bytes else ()


NO_ZERO = Zero()


def _shared_work(gradient: Gradient, of_experts: str = EXPERT_PARAMETERS, of_others: str = PARAMETERS) -> Work:
    """Return the gather of the parameters of these gradients, or another collective over as many bytes."""
    return Work(of_experts if gradient.kind == EXPERT_GRAD else of_others, gradient.lanes, gradient.size_bytes)


def gathers_of(gradients: Sequence[Gradient]) -> tuple[Slice, ...]:
    """Return the gathers of the parameters of these gradients at the end of a step, one for each kind."""
    whole: dict[str, Slice] = {}
    for each in map(_shared_work, gradients):
        before = whole[each.kind].size_bytes if each.kind in whole else 0
        whole[each.kind] = Slice(each.kind, each.lanes, before + each.size)
    return tuple(whole.values())


def sharing_costs(cluster: Cluster, groups: Groups, in_slices: bool = False) -> dict[str, LinearCost]:
    """Return the cost of each kind of task of :class:`Sharing`; see
    :func:`~ds_fsmoe.planning.workload.kind_costs`."""
    costs = {}
    for kind, group, collective in (
        (PARAMETERS, "dp", "all_gather"),
        (EXPERT_PARAMETERS, "edp", "all_gather"),
        (GRAD_PARTS, "dp", "reduce_scatter"),
        (EXPERT_GRAD_PARTS, "edp", "reduce_scatter"),
    ):
        at = groups.placements[group]
        if at.size > 1:
            is_sum = in_slices and collective == "reduce_scatter"
            costs[kind] = cost_among(cluster, group, at, collective, None, in_slices=is_sum)
    return costs
