# SPDX-License-Identifier: Apache-2.0
"""Predicts the time of a step or of a stage's step: with the chosen schedule, with stock's, and with other expert
sharding. Training's tuner, what-if and the reports call it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from ds_fsmoe.planning.call_shape import CallShape, layer_of_call
from ds_fsmoe.planning.cluster import Cluster
from ds_fsmoe.planning.cost import LayerCosts
from ds_fsmoe.planning.decide.bounds import busiest_ms, lower_bound_ms, step_bounds_ms
from ds_fsmoe.planning.decide.model_plan import ModelPlan
from ds_fsmoe.planning.decide.plan import Planner
from ds_fsmoe.planning.decide.plan_requests import SearchSpace, stock_request
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.timeline import IDEAL
from ds_fsmoe.planning.workload import Layer, kind_costs


@dataclass(frozen=True)
class StepTimes:
    """Holds the times of all micro-batches of a step, without the optimizer, in ms."""

    chosen_ms: float
    isolated_ms: float
    """The time if lanes did not slow each other down."""
    deepspeed_ms: float
    dense_ms: float | None
    """The measured time that no schedule changes; ``None`` if no whole step has been measured."""
    gradients_ms: float
    """The time of reducing all gradients at once."""
    exposed_ms: float
    """The time by which gradients lengthen the step because they find no idle link."""
    bound_ms: float
    """The lower bound: no schedule takes less."""

    @property
    def speedup(self) -> float:
        """Return the speedup of the chosen schedule over stock's."""
        return self.deepspeed_ms / self.chosen_ms if self.chosen_ms else 1.0

    def repeated(self, count: int) -> StepTimes:
        """Return the times of ``count`` such steps, one after the other."""
        return StepTimes(*(each if each is None else count * each for each in astuple(self)))

    def with_rest(self, rest_ms: float) -> StepTimes:
        """Return the times with the rest of the step as measured in whole steps.

        Args:
            rest_ms: the ms outside the layers in a step with DeepSpeed's schedule; these include its reduction of
                gradients after the backward.
        """
        if self.dense_ms is None:
            return self
        found = self.longer(rest_ms - self.dense_ms - self.gradients_ms)
        return replace(found, dense_ms=max(0.0, rest_ms - self.gradients_ms))

    def longer(self, dense_ms: float) -> StepTimes:
        """Return the times with ``dense_ms`` more, which no schedule changes."""
        return replace(
            self,
            chosen_ms=self.chosen_ms + dense_ms,
            isolated_ms=self.isolated_ms + dense_ms,
            deepspeed_ms=self.deepspeed_ms + dense_ms,
            dense_ms=None if self.dense_ms is None else self.dense_ms + dense_ms,
            bound_ms=self.bound_ms + dense_ms,
        )


def predict_step(
    planner: Planner,
    plan: ModelPlan,
    options: Sequence[Mapping[str, Layer]],
    dense_ms: float | None,
    gradients_ms: float,
    num_micro_batches: int = 1,
) -> StepTimes:
    """Predict the times of a step with a plan.

    Args:
        planner: the planner that made the plan.
        plan: the plan of a model whose layers have costs of their own.
        options: layer by layer, name of an all-to-all -> the layer with it, stock's first.
        dense_ms: the part of the layers that no schedule changes, in both phases; ``None``: not measured.
        gradients_ms: the ms to reduce all gradients at once, after the backward.
        num_micro_batches: the number of micro-batches; the last one sends the gradients.
    """
    earlier = num_micro_batches - 1
    if dense_ms is not None:
        dense_ms *= num_micro_batches
    settings = planner.settings
    if not options:  # a stage of a pipeline without such layers
        rest_ms = dense_ms or 0.0
        whole_ms = rest_ms + gradients_ms
        return StepTimes(whole_ms, whole_ms, whole_ms, dense_ms, gradients_ms, gradients_ms, whole_ms)
    how = {"contention": settings.contention, "is_serial": settings.is_serial}
    stock = planner.plan(stock_request(options)).without_gradients()

    def least(each: Mapping[str, Layer]) -> Layer:
        return min(map(_at_its_fastest, each.values()), key=lambda layer: _least_ms(layer, settings.max_degree))

    def bound_ms(layers: Sequence[Layer]) -> float:
        return sum(busiest_ms(layers, {}) if plan.is_two_batch else step_bounds_ms(layers, {}, settings.max_degree))

    without, fastest = plan.without_gradients(), [least(each) for each in options]
    earlier_ms, last_ms = without.step_ms({}, **how), plan.step_ms({}, **how)
    isolated_ms = plan.step_ms({}, IDEAL, is_serial=settings.is_serial)
    bounds_ms = [bound_ms(fastest)]
    if earlier:
        isolated_ms += earlier * without.step_ms({}, IDEAL, is_serial=settings.is_serial)
        bounds_ms.append(earlier * bound_ms([replace(each, gradients=()) for each in fastest]))
    return StepTimes(
        chosen_ms=last_ms + earlier * earlier_ms,
        isolated_ms=isolated_ms,
        deepspeed_ms=num_micro_batches * stock.step_ms({}, is_serial=settings.is_serial) + gradients_ms,
        dense_ms=dense_ms,
        gradients_ms=gradients_ms,
        exposed_ms=max(0.0, last_ms - earlier_ms),
        bound_ms=sum(bounds_ms),
    )


def _at_its_fastest(layer: Layer) -> Layer:
    """Return the layer with the least costs of its tasks, so that no measured step is below a bound."""
    return layer if layer.costs is None or layer.costs.least is None else replace(layer, costs=layer.costs.least)


def _least_ms(layer: Layer, max_degree: int) -> float:
    assert layer.costs is not None
    return lower_bound_ms(layer.forward, layer.costs.forward, max_degree) + lower_bound_ms(
        layer.backward, layer.costs.backward, max_degree
    )


def other_esp_sizes(
    planner: Planner,
    space: SearchSpace,
    cluster: Cluster,
    kinds: Sequence[tuple[int, Groups, CallShape, LayerCosts]],
    ranks_per_node: int,
) -> dict[int, float]:
    """Return, for every ESP size, the predicted ms of all layers' experts' parts. All use the cluster's numbers, so
    they are comparable.

    Args:
        planner, space: the planner and its choices.
        cluster: the costs of collectives among other ranks.
        kinds: (number of layers, groups, shape of a call, measured costs) of each kind of layer.
        ranks_per_node: the largest ESP size.
    """
    of_sizes: dict[int, float] = {}
    if not kinds:
        return of_sizes
    groups = kinds[0][1]
    for esp_size in range(1, ranks_per_node + 1):
        if groups.stage % (groups.ep * esp_size):
            continue
        times_ms = [sharded_ms(planner, space, cluster, *each, esp_size) for _, *each in kinds]
        if all(each is not None for each in times_ms):
            of_sizes[esp_size] = sum(count * (ms or 0.0) for (count, *_), ms in zip(kinds, times_ms, strict=True))
    return of_sizes


def sharded_ms(
    planner: Planner,
    space: SearchSpace,
    cluster: Cluster,
    groups: Groups,
    shape: CallShape,
    measured: LayerCosts,
    esp_size: int,
) -> float | None:
    """Return the ms of both phases of a layer's experts' part with experts sharded over ``esp_size`` ranks.

    Each rank keeps its tokens. The result is None if the size is impossible or the cluster lacks a number.

    Args:
        planner, space: the planner and its choices.
        cluster: the costs of collectives among other ranks.
        groups: the current groups of the layer.
        shape: the current shape of a call.
        measured: the costs of its experts. Their products keep their size: fewer weights, more ranks' tokens.
        esp_size: the ESP size to predict.
    """
    try:
        others = replace(groups, esp=esp_size)
        links = kind_costs(cluster, others)
    except ValueError:
        return None
    sharded = replace(shape, num_weights=max(1, shape.num_weights * groups.esp // esp_size))
    layer = layer_of_call(others, sharded, measured.among_others(links, lambda kind, own: links[kind]))
    return sum(each.time_ms for each in planner.choose(layer, space))


# ---- the times of one stage of a pipeline


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Holds the times of one stage's own work on one micro-batch, predicted or measured, in ms."""

    forward_ms: float
    backward_ms: float
    """The time of a backward that sends no gradients to be summed: of all micro-batches but the last one."""
    last_backward_ms: float
    """The time of the backward in which gradients travel."""
    gradients_ms: float = 0.0
    """The time of the gradients that are left after it."""

    def busy_ms(self, num_micro_batches: int) -> float:
        """Return the ms of a whole batch of this stage alone, without sends."""
        m = num_micro_batches
        return m * self.forward_ms + (m - 1) * self.backward_ms + self.last_backward_ms + self.gradients_ms


@dataclass(frozen=True)
class StagePlan:
    """Holds the plan of one stage and its times."""

    times: StageTimes
    hidden_bytes: float
    """The gradients that travel beside the last backward."""
    after_bytes: float
    """The gradients that are left after it."""
    plan: ModelPlan | None = None
    """How its layers are run; ``None``: it has none."""


def stage_times(planner: Planner, plan: ModelPlan) -> StagePlan:
    """Return the plan and times of a stage from a plan of its layers."""
    last_forward_ms, to_the_end_ms = planner.phases_ms(plan)
    forward_ms, bare_ms = planner.phases_ms(plan.earlier())
    # What is left over counts as a part of its own, as it does where it is measured.
    last_ms = planner.phases_ms(replace(plan, tail=()))[1] if plan.tail else to_the_end_ms
    hidden = sum(each.size_bytes for block in plan.backward for each in (*block.moe_slices, *block.dense_slices))
    # Gathers of updated parameters make one forward of a step longer, and count once.
    after_ms = to_the_end_ms - last_ms + last_forward_ms - forward_ms
    return StagePlan(StageTimes(forward_ms, bare_ms, last_ms, after_ms), hidden, plan.tail_bytes, plan)
