# SPDX-License-Identifier: Apache-2.0
"""Layers for the planner's tests: by hand, at random, and in every way that groups can lie; and the reference of what
is chosen, which simulates every plan by itself."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from ds_fsmoe.planning import schedule as kinds
from ds_fsmoe.planning.block import CONVERSIONS, BlockPlan, Slice, block_schedule
from ds_fsmoe.planning.call_shape import layer_of_call
from ds_fsmoe.planning.cost import Cost, HostCost, LayerCosts, LinearCost, SwitchedCost
from ds_fsmoe.planning.decide.block_times import BlockTimes, Order, PhaseTimes
from ds_fsmoe.planning.decide.degree import Load, Phase
from ds_fsmoe.planning.decide.model_plan import ModelPlan
from ds_fsmoe.planning.decide.plan import Planner, Settings
from ds_fsmoe.planning.decide.plan_requests import PlanRequest, SearchSpace
from ds_fsmoe.planning.decide.presets import NAMES, Switches
from ds_fsmoe.planning.decide.rules import Proposal, may_be_chosen
from ds_fsmoe.planning.decide.search import Choice, choose
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.job.measured import BACKWARD, BACKWARD_ANEW, DEQUANTISED, QUANTISED, LayerProfile
from ds_fsmoe.planning.schedule import Lane, Schedule
from ds_fsmoe.planning.timeline import IDEAL, Contention, simulate
from ds_fsmoe.planning.workload import BlockWork, Layer, MoEWork, Shape, Stage, Work, layer_work
from tests.planning.measured_layers import GROUPS, SIZES, line, made_up

KINDS = (
    *(kinds.A2A_IN, kinds.A2A_OUT, kinds.A2A_IN_NODE, kinds.A2A_OUT_NODE, kinds.GATHER, kinds.REDUCE),
    *(kinds.EXPERT, kinds.GRAD, kinds.EXPERT_GRAD, kinds.MP_GATHER, kinds.MP_REDUCE, kinds.ATTENTION, kinds.SOFTMAX),
    *(kinds.ROUTE, kinds.ORDER, kinds.RESTORE),
)
SHAPE = Shape(B=2, L=12, M=8, H=24, E=8, K=2, capacity_factor=1.5, heads=2)

LAYOUTS: dict[str, tuple[Groups, str]] = {
    "the paper's": (Groups(8, 4, mp=4, esp=4, ep=2), "flat"),
    "all-to-all between nodes only": (Groups(4, 1, ep=4), "flat"),
    "all-to-all over both links": (Groups(8, 4, ep=8), "flat"),
    "2dh": (Groups(8, 4, ep=8), "2dh"),
    "2dh with sharded experts": (Groups(8, 4, mp=2, esp=2, ep=4), "2dh"),
    "no sharding": (Groups(8, 4, mp=4, ep=8), "flat"),
    "no expert parallelism": (Groups(8, 4, mp=4, esp=4), "flat"),
    "one node": (Groups(4, 4, mp=2, esp=2, ep=2), "flat"),
    "experts sharded over nodes": (Groups(8, 2, mp=2, esp=4, ep=2), "flat"),
    "model parallelism over nodes": (Groups(8, 2, mp=4, esp=2, ep=4), "flat"),
    "one rank": (Groups(1, 4), "flat"),
}
"""Name -> groups, algorithm of the all-to-all."""
CONTENTIONS = (
    Contention(),
    Contention(links=0.5),
    Contention(links=0.4, compute=0.2),
    Contention(compute=0.7),
    Contention(0.3, 0.2, 0.4),
)


def layer_of(layout: str, shape: Shape = SHAPE, recompute: bool = False) -> Layer:
    """A layer with its groups in this layout."""
    groups, alltoall = LAYOUTS[layout]
    return layer_work(shape, groups, alltoall, recompute)


def grad_lanes_of(layout: str) -> tuple[Lane, ...]:
    """The links that dense gradients cross, or would cross."""
    return LAYOUTS[layout][0].placements["dp"].lanes or (Lane.INTER,)


def plan_by_switches(planner: Planner, switches: Switches, layers: Sequence[Layer]) -> ModelPlan:
    """The plan of a system with these switches, whether it is a preset or not."""
    settings = planner.settings
    space = SearchSpace.of(switches, settings.max_degree, micro_op_bytes=settings.micro_op_bytes)
    space = replace(space, solver=settings.solver)
    return planner.plan(PlanRequest([{"": each} for each in layers], space, switches.gradients))


def random_costs(rng: random.Random, alphas: float = 0.3) -> dict[str, LinearCost]:
    """A cost for every kind, with which a layer of ``SHAPE`` takes milliseconds; some start-ups and slopes are 0."""
    costs = {}
    for kind in KINDS:
        unit = 1e-4 if kind in (kinds.EXPERT, kinds.ATTENTION) else 3e-3
        slope = rng.choice([0.0, *[unit * rng.random()] * 7])
        costs[kind] = LinearCost(rng.choice([0.0, alphas * rng.random()]), slope)
    costs[kinds.A2A_OUT], costs[kinds.A2A_OUT_NODE] = costs[kinds.A2A_IN], costs[kinds.A2A_IN_NODE]
    costs[kinds.HOLD] = LinearCost(0.0, 0.0)
    return costs


def bare_block(phase: Phase) -> tuple[BlockWork, dict[str, LinearCost]]:
    """The MoE part alone, its groups lying as the paper's do."""
    inter, intra = (Lane.INTER,), (Lane.INTRA,)
    moe = MoEWork(
        (
            Stage(kinds.A2A_IN, inter, phase.a2a.size, phase.a2a.launches, group="ep"),
            Stage(kinds.GATHER, intra, phase.gather.size, phase.gather.launches, is_inner=True, group="esp"),
        ),
        Work(kinds.EXPERT, (Lane.COMPUTE,), phase.expert.size, phase.expert.launches),
        (
            Stage(kinds.REDUCE, intra, phase.reduce.size, phase.reduce.launches, is_inner=True, group="esp"),
            Stage(kinds.A2A_OUT, inter, phase.a2a.size, phase.a2a.launches, group="ep"),
        ),
    )
    costs = {
        kinds.A2A_IN: phase.a2a.cost,
        kinds.A2A_OUT: phase.a2a.cost,
        kinds.GATHER: phase.gather.cost,
        kinds.EXPERT: phase.expert.cost,
    }
    costs |= {kinds.REDUCE: phase.reduce.cost, kinds.GRAD: LinearCost(phase.grad_ms, 0.0)}
    return BlockWork((), moe, ()), costs


def choice_of(times: BlockTimes, orders: list[Order], grad_ms: float = 0.0, solver: str = "exact") -> Choice:
    """What is chosen of these orders for one phase alone."""
    phase = PhaseTimes(times, grad_ms=grad_ms)
    return choose(phase, phase, SearchSpace(tuple(orders), solver=solver))[0]


def bare_schedule(phase: Phase, degree: int, with_gradient: bool = True) -> Schedule:
    """The schedule of ``bare_block``, the gradient as one slice behind the last tokens that come in."""
    slices = (Slice(kinds.GRAD, (Lane.INTER,), 0.0),) if with_gradient else ()
    return block_schedule(bare_block(phase)[0], BlockPlan(degree, phase.links, moe_slices=slices))


def simulated_ms(phase: Phase, degree: int, with_gradient: bool = True) -> float:
    """Time of ``bare_schedule``, played."""
    return simulate(bare_schedule(phase, degree, with_gradient), bare_block(phase)[1]).makespan_ms


def random_phase(rng: random.Random) -> Phase:
    """A layer with g != s."""

    def load() -> Load:
        return Load(LinearCost(rng.choice([0.0, 0.3 * rng.random()]), rng.random()), 20 * rng.random())

    gather, a2a, expert, reduce = (load() for _ in range(4))
    return Phase(a2a, gather, expert, reduce, rng.choice([0.0, 30 * rng.random()]))


# ---- the reference: every way to run a layer, each simulated by itself


def played_ms(
    work: BlockWork | MoEWork,
    order: Order,
    costs: Mapping[str, Cost],
    contention: Contention = IDEAL,
    host_ms: HostCost = 0.0,
    *,
    is_serial: bool = False,
    slices: tuple[tuple[Slice, ...], tuple[Slice, ...]] = ((), ()),
) -> float:
    """What one block takes in one phase: its schedule, simulated."""
    block = BlockWork((), work, ()) if isinstance(work, MoEWork) else work
    schedule = block_schedule(block, order.plan(*slices))
    if is_serial:
        return simulate(schedule.in_one_lane(), costs, IDEAL, host_ms).makespan_ms
    return simulate(schedule, costs, contention, host_ms).makespan_ms


Pair = tuple[Order, Order]


@dataclass(frozen=True)
class EveryPlan:
    """All plans of a layer's forward and backward that a system and the rules allow, with their times."""

    times_ms: dict[Pair, tuple[float, float]]
    """(forward, backward) -> what each phase takes."""
    uncut_ms: tuple[float, float]
    """What each phase takes in the first way with one chunk."""
    min_gain: float
    """The share of this that another plan has to gain."""
    must_match: bool
    """Both phases have the same number of chunks."""
    asked: tuple[Order | None, Order | None]
    uncut: Order

    def may_be_chosen(self, pair: Pair) -> bool:
        """Whether a plan gains enough over the uncut one: in each phase, or together where both are cut alike."""

        def gains(of_plan_ms: float, uncut_ms: float) -> bool:
            return of_plan_ms < (1 - self.min_gain) * uncut_ms * (1 + 1e-9)

        times_ms, degrees = self.times_ms[pair], {each.degree for each in pair}
        if self.must_match and degrees != {1}:
            is_uncut_open = any(first.degree == second.degree == 1 for first, second in self.times_ms)
            return not is_uncut_open or gains(sum(times_ms), sum(self.uncut_ms))
        alone = zip(pair, self.asked, times_ms, self.uncut_ms, strict=True)
        return all(order in (asked, self.uncut) or gains(*each_ms) for order, asked, *each_ms in alone)

    @property
    def best_ms(self) -> float:
        """The least that both phases take in a plan that may be chosen."""
        return min(sum(times_ms) for pair, times_ms in self.times_ms.items() if self.may_be_chosen(pair))


def every_plan(planner: Planner, layer: Layer, space: SearchSpace, sent: tuple[Slice, ...] = ()) -> EveryPlan:
    """Simulate all plans of a layer in a space, one by one; of several micro-batches the last one's backward sends
    gradients, and times are their mean."""
    costs, settings = layer.costs or planner.written, planner.settings
    works = layer.forward.moe, layer.backward.moe

    def ms(backward: int, order: Order, same_chunks: bool = True) -> float:
        of_phase, host_ms = costs.of(bool(backward), same_chunks)
        how = works[backward], order, of_phase, settings.contention, host_ms
        alone_ms = played_ms(*how, is_serial=settings.is_serial)
        if not (backward and sent):
            return alone_ms
        last_ms = played_ms(*how, is_serial=settings.is_serial, slices=(sent, ()))
        return alone_ms + (last_ms - alone_ms) / settings.num_micro_batches

    ways = []
    for backward, (moe, asked) in enumerate(zip(works, space.asked, strict=True)):
        of_phase = costs.of(bool(backward))[0]
        orders = [
            replace(each, conversions=where)
            for each in space.orders
            for where in (CONVERSIONS if moe.may_convert_on_compute and each.degree > 1 else ("links",))
        ]
        orders = [each for each in orders if may_be_chosen(Proposal(each, moe, bool(backward), costs=of_phase))]
        ways.append([asked] if asked is not None else orders)
    forward_ms = {order: ms(0, order) for order in ways[0]}
    backward_ms = {(order, same): ms(1, order, same) for order in ways[1] for same in (True, False)}
    times_ms = {(f, b): (forward_ms[f], backward_ms[b, f.degree == b.degree]) for f, b in itertools.product(*ways)}
    must_match = space.common_degree or costs.uses_rng
    alike = {pair: each for pair, each in times_ms.items() if pair[0].degree == pair[1].degree}
    first = Order(1, space.orders[0].links)
    return EveryPlan(
        alike if must_match and alike else times_ms,
        (ms(0, first), ms(1, first)),
        max(space.min_gain, costs.relative_residual) if space.min_gain else 0.0,
        must_match,
        space.asked,
        first,
    )


def noisy(profile: LayerProfile, share: float) -> LayerProfile:
    """Measured off its lines by this share, up and down in turn, so that the lines stay about where they are."""
    operations = {
        name: replace(
            each,
            times_ms=tuple(
                (1 + (share if place % 2 else -share)) * each.fit.cost.ms(size) for place, size in enumerate(each.sizes)
            ),
        )
        for name, each in profile.operations.items()
    }
    return replace(profile, operations=operations)


def cut_anew(profile: LayerProfile, factor: float) -> LayerProfile:
    """A backward that takes so many times as long where its chunks are not those of the forward."""
    at = profile.operations[BACKWARD]
    dearer = replace(at, times_ms=tuple(factor * each for each in at.times_ms))
    return replace(profile, operations={**profile.operations, BACKWARD_ANEW: dearer})


def switched(costs: LayerCosts, layer: Layer) -> LayerCosts:
    """Collectives that go another way from half of their size on, and a worse one."""

    def of(block: BlockWork, own: Mapping[str, Cost]) -> dict[str, Cost]:
        half = {each.kind: each.size / 2 for each in block.moe.collectives}
        above = {kind: LinearCost(3 * own[kind].alpha_ms + 2.0, 1.5 * own[kind].beta_ms) for kind in half}
        return {**own, **{kind: SwitchedCost(own[kind], above[kind], size) for kind, size in half.items()}}

    return replace(
        costs,
        forward=of(layer.forward, costs.forward),
        backward=of(layer.backward, costs.backward),
        rechunked=None if costs.rechunked is None else of(layer.backward, costs.rechunked),
    )


@st.composite
def measured_layers(draw: st.DrawFn, issues_ahead: bool) -> Layer:
    """A layer whose costs were measured: experts of any kind, few slots or many, exact lines or not."""
    is_written = draw(st.booleans())
    uses_rng = not is_written and draw(st.booleans())
    profile = made_up(draw(st.integers(0, 999)), is_written, uses_rng, draw(st.sampled_from((0.0, 0.02, 2.0))))
    if not is_written:
        profile = cut_anew(profile, draw(st.sampled_from((1.0, 1.3, 100.0))))
    if share := draw(st.sampled_from((0.0, 0.0, 0.03, 0.2))):
        profile = noisy(profile, share)
    wires = draw(st.sampled_from(((1.0, 1.0), (1.0, 1.0), (0.3, 0.3))))
    if wires != (1.0, 1.0):
        made_ms = draw(st.sampled_from((0.1, 4.0)))
        operations = {name: line(0.05, made_ms, 1e5) for name in (QUANTISED, DEQUANTISED)}
        profile = replace(profile, operations={**profile.operations, **operations})
    if issues_ahead:
        issued_ms = draw(st.sampled_from((0.0, 0.3, 3.0)))
        operations = {name: replace(each, issued_ms=(issued_ms,) * 3) for name, each in profile.operations.items()}
        profile = replace(profile, operations=operations)
    shape = replace(SIZES, capacity=draw(st.sampled_from((840, 840, 3, 5))), wires=wires)
    layer = layer_of_call(GROUPS, shape, profile.costs(issues_ahead))
    is_switched = draw(st.sampled_from((False, False, True)))
    return replace(layer, costs=switched(layer.costs, layer)) if is_switched else layer


@st.composite
def choices_to_make(draw: st.DrawFn) -> tuple[Planner, Layer, SearchSpace, tuple[Slice, ...]]:
    """A planner, a layer that was measured or is written of in any layout, what a system leaves open of it, and the
    gradients that its backward sends.

    Lina's chunks follow from bytes and not from times: see test_gradients.py.
    """
    settings = Settings(
        draw(st.sampled_from((*CONTENTIONS, Contention(links=0.9)))),
        draw(st.sampled_from((0.0, 0.0, 0.01, 0.2))),
        max_degree=draw(st.integers(1, 7)),
        is_serial=draw(st.sampled_from((False, False, False, True))),
        min_gain=draw(st.sampled_from((0.0, 0.03, 0.1))),
        num_micro_batches=draw(st.sampled_from((1, 1, 2, 5))),
    )
    rng = random.Random(draw(st.integers(0, 10**6)))
    planner = Planner(random_costs(rng), settings)
    sent: tuple[Slice, ...] = ()
    if draw(st.booleans()):
        layout = draw(st.sampled_from(sorted(LAYOUTS)))
        layer, lanes = layer_of(layout), grad_lanes_of(layout)
        sent = tuple(Slice(kinds.GRAD, lanes, size) for size in draw(st.sampled_from(((), (), (60.0,), (900.0,)))))
    else:
        layer = draw(measured_layers(issues_ahead=draw(st.booleans())))
    space = settings.space(draw(st.sampled_from([each for each in NAMES if each != "lina"])))
    degrees = draw(st.sampled_from(((None, None),) * 4 + ((3, None), (None, 2), (1, None), (5, 3))))
    if degrees != (None, None):
        space = space.with_degrees(*degrees, draw(st.sampled_from(("shared", "paper"))))
    elif draw(st.sampled_from((False, False, False, True))):
        space = space.unchunked("reduce_first")
    return planner, layer, space, sent
