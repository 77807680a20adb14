# SPDX-License-Identifier: Apache-2.0
"""A whole step, predicted: with the schedule that was chosen, with stock's, and with experts sharded otherwise.

The experts' parts of the layers and the gradients are predicted from what was measured of their operations. The rest
of the model (dense layers, gates, orders, the loss) is measured as a whole, in a forward and a backward of the model:
no schedule changes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ds_fsmoe.measured_costs import Machine
from ds_fsmoe.planning.cluster import Cluster
from ds_fsmoe.planning.cost import Cost, least_ms
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.schedule import EXPERT, EXPERT_DW, EXPERT_DX, HOLD, Lane
from ds_fsmoe.planning.timeline import IDEAL
from ds_fsmoe.planning.workload import kind_costs
from ds_fsmoe.predicted import CallSizes
from ds_fsmoe.runtime.pipeline import PhasePlan
from ds_fsmoe.runtime.profiler import LayerProfile
from ds_fsmoe.tuned_degrees import PhaseChoice, Ways, choose_degrees


@dataclass(frozen=True)
class Bounds:
    """Of one layer, in milliseconds."""

    bound_ms: float
    """What the busiest lane has to do in each phase, undisturbed and cut as suits each task best: no schedule takes
    less."""
    sent_ms: float
    """The same of the forward, and of the backward what the lane of gradients has to do."""


@dataclass(frozen=True)
class LayerTimes:
    """Equal layers, in milliseconds of one."""

    num_layers: int
    chosen_ms: float
    """Both phases of the experts' part."""
    isolated_ms: float
    """The same if lanes did not slow each other down."""
    uncut_ms: float
    """As stock runs it: uncut, one task after another."""
    room_ms: float
    """Of the lane of gradients, idle in the chosen backward."""
    bound_ms: float
    """See :class:`Bounds`."""
    sent_ms: float


@dataclass(frozen=True)
class StepTimes:
    """A step without the optimizer, in milliseconds."""

    chosen_ms: float
    isolated_ms: float
    deepspeed_ms: float
    dense_ms: float | None
    """What no schedule changes, measured; ``None`` if no whole step has been seen."""
    gradients_ms: float
    """Reducing all gradients at once."""
    exposed_ms: float
    """What is left of that when all idle times have been filled."""
    bound_ms: float
    """No schedule takes less."""

    @property
    def speedup(self) -> float:
        """Of the chosen schedule over stock's."""
        return self.deepspeed_ms / self.chosen_ms if self.chosen_ms else 1.0


def predict_step(
    layers: Sequence[LayerTimes], dense_ms: tuple[float, float] | None, gradients_ms: float, in_windows: bool
) -> StepTimes:
    """Of a model.

    Args:
        layers: its kinds of MoE layers.
        dense_ms: (forward, backward) of all the rest, gradients included: they were not hidden when it was measured.
        gradients_ms: of reducing them.
        in_windows: whether gradients may travel while the backward runs.
    """
    forward_ms, backward_ms = dense_ms or (0.0, 0.0)
    rest_ms = forward_ms + max(0.0, backward_ms - gradients_ms)
    count = sum(each.num_layers for each in layers)
    # Ahead of the first layer of the backward there is nothing to send yet.
    room_ms = (sum(each.num_layers * each.room_ms for each in layers) + max(0.0, backward_ms - gradients_ms)) * (
        (count - 1) / count if count else 0.0
    )
    exposed_ms = max(0.0, gradients_ms - room_ms) if in_windows else gradients_ms

    def step_ms(part: str, sent_ms: float) -> float:
        return rest_ms + sent_ms + sum(each.num_layers * getattr(each, part) for each in layers)

    return StepTimes(
        chosen_ms=step_ms("chosen_ms", exposed_ms),
        isolated_ms=step_ms("isolated_ms", exposed_ms),
        deepspeed_ms=step_ms("uncut_ms", gradients_ms),
        dense_ms=None if dense_ms is None else rest_ms,
        gradients_ms=gradients_ms,
        exposed_ms=exposed_ms,
        bound_ms=max(step_ms("bound_ms", 0.0), step_ms("sent_ms", gradients_ms) - rest_ms),
    )


def layer_times(
    choices: tuple[PhaseChoice, PhaseChoice], num_layers: int, uncut_ms: float, room_ms: float, bounds: Bounds
) -> LayerTimes:
    """Of equal layers."""
    chosen_ms, isolated_ms = sum(each.time_ms for each in choices), sum(each.isolated_ms for each in choices)
    return LayerTimes(num_layers, chosen_ms, isolated_ms, uncut_ms, room_ms, bounds.bound_ms, bounds.sent_ms)


def bounds_of(machine: Machine, plans: Sequence[PhasePlan], sizes: CallSizes, profile: LayerProfile) -> Bounds:
    """Of a layer whose phases, uncut, are these."""
    bound_ms = sent_ms = 0.0
    for plan in plans:
        # In one stream, a lane would be charged with the traffic of both links.
        plan = replace(plan, block=replace(plan.block, links="paper"))
        busy_ms = _least_busy_ms(machine, plan, sizes, profile)
        busiest_ms = max(busy_ms.values())
        bound_ms += busiest_ms
        lanes = plan.groups.placements["dp"].lanes
        sent_ms += busy_ms[lanes[0]] if plan.backward and lanes else busiest_ms
    return Bounds(bound_ms, sent_ms)


def _least_busy_ms(machine: Machine, plan: PhasePlan, sizes: CallSizes, profile: LayerProfile) -> dict[Lane, float]:
    """Lane -> the least that its tasks take, were lanes not in each other's way."""
    timeline = replace(machine, contention=IDEAL).timeline(plan.schedule, plan, sizes, profile)
    costs = profile.costs(plan.backward)
    busy_ms = dict.fromkeys(Lane, 0.0)
    for span in timeline.spans:
        cost, task = costs.get(span.task.kind), span.task
        whole_ms = span.end_ms - span.start_ms
        # What cutting saves of the task itself; its own cost, besides, comes once more with every cut.
        saved_ms = 0.0 if cost is None else cost.ms(task.size) - least_ms(cost, task.size)
        busy_ms[task.lane] += whole_ms - saved_ms
    return busy_ms


@dataclass(frozen=True)
class _AmongOthers:
    """A layer whose collectives cost what they do among other ranks."""

    measured: LayerProfile
    links: Mapping[str, Cost]

    @property
    def task_ms(self) -> float:
        return self.measured.task_ms

    @property
    def draws(self) -> bool:
        return self.measured.draws

    @property
    def splits(self) -> bool:
        return self.measured.splits

    @property
    def costs_more_cut_anew(self) -> bool:
        return self.measured.costs_more_cut_anew

    @property
    def doubt(self) -> float:
        return self.measured.doubt

    def costs(self, backward: bool, same_cuts: bool = True) -> dict[str, Cost]:
        own = self.measured.costs(backward, same_cuts)
        computed = {kind: cost for kind, cost in own.items() if kind in (HOLD, EXPERT, EXPERT_DX, EXPERT_DW)}
        return dict(self.links) | computed

    def issue_ms(self, backward: bool, same_cuts: bool = True) -> dict[str, float]:
        own = self.measured.issue_ms(backward, same_cuts)
        # To issue a collective takes the host as long among other ranks, and one kind of them as long as another.
        of_links = {kind: each_ms for kind, each_ms in own.items() if kind not in (EXPERT, EXPERT_DX, EXPERT_DW)}
        return dict.fromkeys(self.links, max(of_links.values(), default=self.task_ms)) | own


def sharded_ms(
    cluster: Cluster,
    groups: Groups,
    sizes: CallSizes,
    measured: LayerProfile,
    machine: Machine,
    ways: Ways,
    esp_size: int,
) -> float | None:
    """Both phases of a layer's experts' part with experts sharded over so many ranks, the tokens of a rank staying what
    they are; ``None`` where that cannot be, or the cluster has no number for it.

    Args:
        cluster: what collectives cost among other ranks.
        groups: of the layer as it is.
        sizes: of a call as it is.
        measured: what its experts cost. Their products stay as large: fewer weights, of more ranks' tokens.
        machine, ways: see :func:`~ds_fsmoe.tuned_degrees.choose_degrees`.
        esp_size: the other one.
    """
    try:
        others = Groups(
            world=groups.world,
            gpus_per_node=groups.gpus_per_node,
            mp=groups.mp,
            esp=esp_size,
            ep=groups.ep,
            dp=groups.dp,
            pp=groups.pp,
        )
        costs = kind_costs(cluster, others)
    except ValueError:
        return None
    weights = sizes.num_weights * groups.esp // esp_size
    sharded = replace(sizes, num_weights=max(1, weights))
    pair = choose_degrees(others, sharded, _AmongOthers(measured, costs), machine, ways)
    return sum(each.time_ms for each in pair)


def idle_ms(
    machine: Machine, plan: PhasePlan, sizes: CallSizes, profile: LayerProfile, same_cuts: bool = True
) -> float:
    """How long the lane of gradients has nothing to do in a backward."""
    lanes = plan.groups.placements["dp"].lanes
    if not lanes or machine.is_serial:
        return 0.0
    return machine.timeline(plan.schedule, plan, sizes, profile, same_cuts).idle_ms(lanes[0])
