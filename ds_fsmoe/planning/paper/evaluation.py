# SPDX-License-Identifier: Apache-2.0
"""The paper's evaluation, simulated: its table 5, its figures 6 to 8, how often the degrees of the phases differ, and
how much the plan loses when the cost models are off.

Its clusters are the reference sets (``clusters/testbed_a.json``, ``testbed_b.json``), its groups mp = esp = GPUs of a
node, ep = dp = nodes = number of experts. A layer is taken in the steady state of a large model: the gradients of the
layer before it, an equal one, are reduced in its backward, and its own in the next. Its clusters gained about a quarter
of what overlap of the two links gives on ideal links; "contended" plans as if they were ideal and plays the plan with
the contention that its table 5 points to.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from ds_fsmoe.planning.block_times import BlockTimes
from ds_fsmoe.planning.cluster import Cluster, load_cluster
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.degree import Load, Phase, choose_exact, makespan_ms
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.paper.grid import MODELS, table_4
from ds_fsmoe.planning.plan import Planner, Settings, plan_by_name
from ds_fsmoe.planning.presets import PRESETS
from ds_fsmoe.planning.stage_plan import pipeline_of_layers, stage_times
from ds_fsmoe.planning.timeline import IDEAL, Contention
from ds_fsmoe.planning.workload import Layer, Shape, kind_costs, layer_work

TABLE_5 = {
    "a": {"tutel": 1.00, "tutel_improved": 1.09, "fsmoe_no_iio": 1.12, "fsmoe": 1.18},
    "b": {"tutel": 1.00, "tutel_improved": 1.08, "fsmoe_no_iio": 1.16, "fsmoe": 1.22},
}
"""The average speedups over tutel, as printed."""
DEGREES_DIFFER = 912
"""The number of its 1458 configurations whose phases have different degrees."""
Progress = Callable[[int, int], None]


def _silent(_done: int, _total: int) -> None:
    pass


@dataclass(frozen=True)
class Bed:
    """One of the paper's two clusters, or a part of it."""

    letter: str
    cluster: Cluster
    groups: Groups
    costs: Mapping[str, LinearCost]

    @property
    def num_experts(self) -> int:
        """The number of experts: one per node."""
        return self.groups.world // self.groups.gpus_per_node


def load_bed(letter: str, nodes: int | None = None, pp: int = 1, costs: str = "reference") -> Bed:
    """Return a testbed.

    Args:
        letter: "a" or "b".
        nodes: the number of nodes; ``None``: all.
        pp: the number of pipeline stages.
        costs: "reference" or "printed".

    Raises:
        ValueError: another letter or set of costs.
    """
    if letter not in TABLE_5:
        raise ValueError(f"testbed = {letter!r}: the choices are a, b")
    if costs not in ("reference", "printed"):
        raise ValueError(f"costs = {costs!r}: the choices are reference, printed")
    cluster = load_cluster(f"testbed_{letter}" + ("_printed" if costs == "printed" else ""))
    nodes, gpus = nodes or cluster.num_nodes, cluster.gpus_per_node
    groups = Groups(nodes * gpus, gpus, mp=gpus, esp=gpus, ep=nodes // pp, dp=nodes // pp, pp=pp)
    return Bed(letter, cluster, groups, kind_costs(cluster, groups))


def steady_state(layer: Layer) -> tuple[Layer, ...]:
    """Return one layer in the middle of many: the next one sends its gradients, and it carries the earlier ones."""
    return (replace(layer, gradients=()),)


def layers_of(bed: Bed, sample: int | None = None) -> list[Shape]:
    """Return the layers of table 4 for this testbed, or a sample of them drawn with a fixed seed."""
    shapes = list(table_4(bed.letter, bed.num_experts))
    return shapes if sample is None or sample >= len(shapes) else random.Random(0).sample(shapes, sample)


@dataclass
class Table5:
    """The mean speedups over tutel and the times behind them."""

    letter: str
    num_layers: int
    ideal: dict[str, float]
    contended: dict[str, float]
    degrees_differ: int
    """The number of layers whose two phases have different degrees under fsmoe."""
    layers_ms: dict[str, list[float]] = field(default_factory=dict)
    """System -> its time for every layer, on ideal links."""


def table_5(
    bed: Bed, names: Sequence[str] = tuple(PRESETS), sample: int | None = None, progress: Progress = _silent
) -> Table5:
    """Simulate the layers of table 4.

    Args:
        bed: the testbed.
        names: the systems; tutel is always among them.
        sample: the number of layers to draw, always the same ones; ``None``: all.
        progress: called with the number of layers that are done, and of all.
    """
    names = tuple(dict.fromkeys(("tutel", *names)))
    shapes = layers_of(bed, sample)
    ideal: dict[str, list[float]] = {name: [] for name in names}
    contended: dict[str, list[float]] = {name: [] for name in names}
    differ = 0
    for index, shape in enumerate(shapes):
        layer = layer_work(shape, bed.groups)
        planner = Planner(bed.costs)
        for name in names:
            plan = plan_by_name(planner, name, steady_state(layer), layer.gradients)
            ideal[name].append(plan.step_ms(bed.costs))
            contended[name].append(plan.step_ms(bed.costs, bed.cluster.contention))
            differ += name == "fsmoe" and plan.forward[0].degree != plan.backward[0].degree
        progress(index + 1, len(shapes))
    speedups = (
        {name: fmean(t / x for t, x in zip(times["tutel"], times[name], strict=True)) for name in names}
        for times in (ideal, contended)
    )
    return Table5(bed.letter, len(shapes), *speedups, differ, ideal)


@dataclass(frozen=True)
class ModelRow:
    """One model in one setting."""

    model: str
    setting: str
    step_ms: dict[str, float]

    def over(self, base: str) -> dict[str, float]:
        """Return system -> its speedup over one of them."""
        return {name: self.step_ms[base] / time_ms for name, time_ms in self.step_ms.items()}


def simulate_model(
    bed: Bed, name: str, length: int, num_layers: int, contention: Contention, setting: str, names: Sequence[str]
) -> ModelRow:
    """Simulate a whole model, B = 1, k = 2, f = 1.2. It is planned as if links were ideal, as in the paper."""
    shape = replace(MODELS[name].shape, L=length, E=bed.num_experts)
    layers = (layer_work(shape, bed.groups),) * (num_layers // bed.groups.pp)
    planner = Planner(bed.costs)
    times_ms = {each: plan_by_name(planner, each, layers).step_ms(bed.costs, contention) for each in names}
    return ModelRow(name, setting, times_ms)


FIGURE_8_MICRO_BATCHES = (1, 2, 4, 8)
"""The paper does not say how many micro-batches a batch of its figure 8 has; these are simulated."""


def simulate_stages(
    bed: Bed,
    name: str,
    length: int,
    num_layers: int,
    num_micro_batches: int,
    contention: Contention,
    names: Sequence[str],
) -> ModelRow:
    """Simulate a batch of a model in pipeline stages, in GPipe's order, as the paper has it.

    Each stage is planned as if links were ideal, by its systems' own rules: no stage minds another. It is played with
    contention, all forwards first, then all backwards, the last of which sends gradients; sends between stages block.
    """
    shape = replace(MODELS[name].shape, L=length, E=bed.num_experts)
    layers = (layer_work(shape, bed.groups),) * (num_layers // bed.groups.pp)
    pipeline = pipeline_of_layers(bed.cluster, bed.groups, layers, shape)
    ideal = Planner(bed.costs, Settings(num_micro_batches=num_micro_batches))
    player = Planner(bed.costs, Settings(contention, num_micro_batches=num_micro_batches))
    times_ms = {}
    for each in names:
        stage = stage_times(player, plan_by_name(ideal, each, layers))
        batch = pipeline.batch([stage] * bed.groups.pp, num_micro_batches, "gpipe")
        times_ms[each] = batch.timeline.makespan_ms
    return ModelRow(name, f"{bed.groups.pp} stages, {num_micro_batches} micro-batches", times_ms)


def figures(names: Sequence[str] = tuple(PRESETS), contended: bool = True) -> Iterator[tuple[str, list[ModelRow]]]:
    """Yield the settings of figures 6, 7 and 8, one figure (or part of one) at a time.

    Figure 8's stages are half of the nodes each; the 6 experts are spread over the 3 nodes of a stage. A whole batch of
    both stages is simulated, for several numbers of micro-batches; on ideal links, too, where systems differ more.
    """

    def row(letter: str, model: str, length: int, layers: int, setting: str, nodes: int | None = None, pp: int = 1):
        bed = load_bed(letter, nodes, pp)
        contention = bed.cluster.contention if contended else IDEAL
        return simulate_model(bed, model, length, layers, contention, setting, names)

    on_a = {"gpt2-xl": 48, "mixtral-7b": 32, "mixtral-22b": 33}
    on_b = {"gpt2-xl": 48, "mixtral-7b": 7}
    rows = [row("a", model, 1024, layers, "testbed A") for model, layers in on_a.items()]
    yield "figure 6", rows + [row("b", model, 256, layers, "testbed B") for model, layers in on_b.items()]
    yield (
        "figure 7, by length",
        [row("a", m, length, n, f"L = {length}") for length in (512, 1024, 2048) for m, n in on_a.items()],
    )
    yield (
        "figure 7, by size",
        [row("a", m, 1024, n, f"P = {8 * nodes}", nodes) for nodes in (2, 4, 6) for m, n in on_a.items()],
    )
    bed = load_bed("a", pp=2)
    for title, contention in (("", bed.cluster.contention), (", on ideal links", IDEAL)):
        if contended or contention == IDEAL:
            yield (
                f"figure 8, by micro-batches{title}",
                [
                    simulate_stages(bed, model, 1024, layers - layers % 2, count, contention, names)
                    for count in FIGURE_8_MICRO_BATCHES
                    for model, layers in on_a.items()
                ],
            )


@dataclass(frozen=True)
class Regret:
    """The loss from cost models that are off."""

    what: str
    """The coefficients that are off: "alpha", "beta" or "both"."""
    off_by: float
    mean: float
    """How much longer layers take at the degree chosen from the wrong numbers, as a mean share."""
    worst: float
    changed: float
    """The share of phases for which another degree is chosen."""


def sensitivity(
    bed: Bed,
    sample: int | None = None,
    off_by: Sequence[float] = (0.1, 0.3, 0.5),
    seed: int = 0,
    progress: Progress = _silent,
) -> list[Regret]:
    """Plan with every operation's alpha, beta or both off by a share, up or down at random for each; take the time from
    the true numbers. The order is fsmoe's, in both phases, with no gradient."""
    coin = random.Random(seed)
    shapes = layers_of(bed, sample)
    cases = [(what, share) for what in ("alpha", "beta", "both") for share in off_by]
    losses: dict[tuple[str, float], list[float]] = {case: [] for case in cases}
    changed = dict.fromkeys(cases, 0)
    for index, shape in enumerate(shapes):
        for phase in phases(bed, shape):
            true = choose_exact(phase)
            for what, share in cases:
                wrong = choose_exact(_off(phase, what, share, coin)).degree
                losses[what, share].append(makespan_ms(phase, wrong) / true.makespan_ms - 1)
                changed[what, share] += wrong != true.degree
        progress(index + 1, len(shapes))
    return [
        Regret(what, share, fmean(lost), max(lost), changed[what, share] / len(lost))
        for (what, share), lost in losses.items()
    ]


def phases(bed: Bed, shape: Shape) -> tuple[Phase, Phase]:
    """Return forward and backward of a layer's MoE part, without gradients."""
    layer = layer_work(shape, bed.groups)
    forward, backward = (BlockTimes(work, bed.costs).phase() for work in (layer.forward, layer.backward))
    return forward, backward


def _off(phase: Phase, what: str, share: float, coin: random.Random) -> Phase:
    def wrong(load: Load) -> Load:
        def factor(name: str) -> float:
            return 1 + coin.choice((-share, share)) if what in (name, "both") else 1.0

        cost = load.cost
        return replace(load, cost=LinearCost(cost.alpha_ms * factor("alpha"), cost.beta_ms * factor("beta")))

    parts = {name: wrong(getattr(phase, name)) for name in ("a2a", "gather", "expert", "reduce")}
    return replace(phase, **parts)


def mean_over(rows: Iterable[ModelRow], base: str) -> dict[str, float]:
    """Return the average speedups over one system."""
    speedups = [row.over(base) for row in rows]
    return {name: fmean(each[name] for each in speedups) for name in speedups[0]}
