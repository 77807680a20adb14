# SPDX-License-Identifier: Apache-2.0
"""Computes the work of a layer: the bytes and floating-point operations of every task of a generalised MoE layer.
The planner and ``ds_fsmoe plan`` call it; :mod:`~ds_fsmoe.planning.call_shape` uses sizes of real calls instead.

A generalised layer is a transformer block as in the paper's figure 2. It has the all-gather of model parallelism,
attention, the reduce-scatter, gate and order. Then come, chunk by chunk, dispatch, gather, experts, reduce and combine,
and at the end the order back. Volumes are those of the paper's section 2, with independent group sizes. Norms, biases
and embeddings are left out; they are a thousandth of the whole.

Letters (GShard's): B samples, L positions, S tokens on a rank, M width, H expert width, E experts, K experts per token,
F = K * capacity factor, the copies that each token is sent as.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Literal

from ds_fsmoe.planning.cluster import Cluster, cost_among
from ds_fsmoe.planning.cost import LayerCosts, LinearCost
from ds_fsmoe.planning.groups import Fanout, Groups, Placement, can_deduplicate, expected_fanout
from ds_fsmoe.planning.schedule import (
    A2A_IN,
    A2A_IN_NODE,
    A2A_OUT,
    A2A_OUT_NODE,
    ATTENTION,
    COLLECT,
    DENSE,
    DEQUANTISING,
    ELEMENTWISE,
    EXPERT,
    EXPERT_GRAD,
    GATHER,
    GRAD,
    HOLD,
    MP_GATHER,
    MP_REDUCE,
    ORDER,
    QUANTISE_IN,
    QUANTISING,
    REDUCE,
    REST,
    RESTORE,
    ROUTE,
    SOFTMAX,
    SPREAD,
    Lane,
)
from ds_fsmoe.untrusted import MOST_EXPERTS, MOST_POSITIONS, MOST_WIDTH, NAMES_OF_BEFORE

GEMMS = {"gpt": 2, "mixtral": 3}
"""The matrix products of an expert: two layers, or the three of SwiGLU."""
CHOICES = "num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"
"""The names of K in configurations of Hugging Face's models."""
AllToAll = Literal["flat", "2dh", "node_deduplicated"]
NODE_DEDUPLICATED: AllToAll = "node_deduplicated"
UNPADDED = "unpadded "
"""What is ahead of the name of an all-to-all that sends rows in a layer whose dispatch is padded otherwise."""
ALLTOALLS: tuple[AllToAll, ...] = ("flat", "2dh", NODE_DEDUPLICATED)
ALLTOALLS_OF_BEFORE: Mapping[str, AllToAll] = NAMES_OF_BEFORE["alltoall"]
"""Name of an all-to-all in version 0.2.0 -> its name today. Configs, commands and files may have either."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Holds the sizes of a generalised layer.

    Raises:
        ValueError: a size is below 1, heads do not divide, or the kind of expert is unknown.
    """

    B: int
    """The number of samples per model-parallel group."""
    L: int
    M: int
    H: int
    E: int
    K: int = 2
    capacity_factor: float | None = 1.2
    """The capacity factor; ``None``: no token is dropped."""
    ffn: str = "gpt"
    heads: int = 16
    kv_heads: int | None = None
    """The number of heads of keys and values; ``None``: as many as of queries."""
    dtype_bytes: int = 4
    imbalance: float = 1.0
    """The rows of the fullest rank over those of the mean rank, where no token is dropped."""

    def __post_init__(self) -> None:
        for name in ("B", "L", "M", "H", "E", "K", "heads", "dtype_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} = {value}: must be a whole number of at least 1")
            most = {"E": MOST_EXPERTS, "B": MOST_POSITIONS, "L": MOST_POSITIONS}.get(name, MOST_WIDTH)
            if value > most:
                raise ValueError(f"{name} = {value}: must be at most {most}")
        factor = self.capacity_factor
        is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if factor is not None and not (is_number and 0 < factor < math.inf):
            raise ValueError(f"capacity_factor = {factor!r}: must be above 0, or none where nothing drops")
        load = self.imbalance
        if isinstance(load, bool) or not isinstance(load, int | float) or not 1 <= load < math.inf:
            raise ValueError(f"imbalance = {load!r}: must be a number of at least 1")
        if load > 1 and factor is not None:
            raise ValueError(
                f"imbalance = {load:g}: must be 1 with a capacity factor (padded dispatch); use capacity_factor = "
                "none (unpadded dispatch)"
            )
        if self.K > self.E:
            raise ValueError(f"K = {self.K}: must be at most the number of experts, E = {self.E}")
        if self.ffn not in GEMMS:
            raise ValueError(f"ffn = {self.ffn!r}: the choices are {', '.join(GEMMS)}")
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise ValueError(f"kv_heads = {self.kv_heads}: must divide the number of heads, {self.heads}")

    @property
    def F(self) -> float:
        """Return the number of copies that a token is sent as."""
        return self.K * (1.0 if self.capacity_factor is None else self.capacity_factor)

    @property
    def fullest_F(self) -> float:
        """Return the copies per token that reach the experts of the fullest rank, which all ranks wait for."""
        return self.F * self.imbalance

    @property
    def attention_weights(self) -> float:
        """Return the number of elements of the four projections."""
        return (2 + 2 * (self.kv_heads or self.heads) / self.heads) * self.M**2


@dataclass(frozen=True, slots=True)
class Work:
    """Describes one operation, unchunked."""

    kind: str
    lanes: tuple[Lane, ...]
    size: float = 0.0
    """The size: bytes of traffic, floating-point operations of computation."""
    launches: int = 1


@dataclass(frozen=True, slots=True)
class Stage(Work):
    """Describes one operation that every chunk of the experts' part passes, to the experts or back.

    Its position in :class:`MoEWork` is its order; the fields allow other positions.
    """

    is_inner: bool = False
    """Whether it gathers what the experts need, or adds up what they return, and is no part of the exchange."""
    offset: int = 0
    """By how many chunks it is issued ahead of the other stages on the way in, and behind them on the way out, where
    links have streams of their own."""
    group: str = ""
    """The group whose ranks it sends among, ``"ep"`` or ``"esp"``; empty: it sends nothing."""
    offset_on_compute: int | None = None
    """Its offset where it runs on COMPUTE instead of its own lane; ``None``: it may not."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Lists what ZeRO sends for one layer, besides what its schedule places."""

    forward: tuple[Work, ...] = ()
    """The gathers of parameters that its forward waits for."""
    backward: tuple[Work, ...] = ()
    gradients: tuple[Work, ...] = ()
    """The reduce-scatters of its gradients, when its backward is through."""
    is_ahead: bool = True
    """Whether gathers begin with the layer that runs before; otherwise when that one is through."""
    is_waited_for: bool = False
    """Whether the next layer's backward begins when the gradients are sent; otherwise both are concurrent."""
    in_all: bool = True
    """Whether this happens in every micro-batch; otherwise once a step."""


@dataclass(frozen=True)
class MoEWork:
    """Holds the chunked part of a layer, in the order of time. Collectives in a group of one rank are left out."""

    ahead: tuple[Stage, ...]
    """The stages that bring rows to the experts; those that are inner come last."""
    expert: Work
    behind: tuple[Stage, ...]
    """The stages that bring results back; those that are inner come first."""
    capacity: int | None = None
    """Slots per expert, C: chunks are whole slots. ``None``: rows can be cut anywhere."""

    @cached_property
    def stages(self) -> tuple[Work, ...]:
        """Return all stages, with the experts."""
        return (*self.ahead, self.expert, *self.behind)

    @cached_property
    def collectives(self) -> tuple[Stage, ...]:
        """Return the stages that send data."""
        return tuple(each for each in (*self.ahead, *self.behind) if each.group)

    @cached_property
    def exchange(self) -> tuple[Stage, ...]:
        """Return the stages that send rows to the ranks of their experts and back."""
        return tuple(each for each in self.collectives if not each.is_inner)

    def each(self, change: Callable[[Stage], Stage]) -> MoEWork:
        """Return the same part with every stage around the experts replaced by ``change(stage)``."""
        return replace(self, ahead=tuple(map(change, self.ahead)), behind=tuple(map(change, self.behind)))

    @cached_property
    def may_convert_on_compute(self) -> bool:
        """Return True if rows are converted for a link, and conversions may be concurrent with the experts."""
        return any(each.offset_on_compute is not None for each in (*self.ahead, *self.behind))

    def converting_on_compute(self) -> MoEWork:
        """Return the same part with the allowed conversions on COMPUTE."""

        def moved(stage: Stage) -> Stage:
            if stage.offset_on_compute is None:
                return stage
            return replace(stage, lanes=(Lane.COMPUTE,), offset=stage.offset_on_compute, offset_on_compute=None)

        return self.each(moved)


@dataclass(frozen=True, slots=True)
class BlockWork:
    """Holds one layer in one phase, in the order of time."""

    before: tuple[Work, ...]
    moe: MoEWork
    after: tuple[Work, ...]


@dataclass(frozen=True, slots=True)
class Gradient:
    """Describes gradients of one layer's backward that are reduced over ranks."""

    kind: str
    """GRAD: exists when the layer is through. EXPERT_GRAD: exists when its experts' weight gradients do."""
    lanes: tuple[Lane, ...]
    size_bytes: int
    tensors_bytes: tuple[int, ...] = ()
    """The bytes of its tensors, in the order in which they exist; empty: it is one tensor."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Holds the work of one layer in a training step."""

    forward: BlockWork
    backward: BlockWork
    gradients: tuple[Gradient, ...]
    recompute: bool = False
    """Whether the forward runs once more ahead of the backward."""
    costs: LayerCosts | None = None
    """The measured task costs for this kind of layer; ``None``: the costs of the planner's cluster."""
    numel: int = 0
    """The elements of its parameters on a rank, before ZeRO shares them out."""
    sharing: Sharing | None = None
    """What ZeRO sends for it; ``None``: nothing."""


def layer_work(
    shape: Shape,
    groups: Groups,
    alltoall: AllToAll = "flat",
    recompute: bool = False,
    whole_slots: bool = False,
    fanout: Fanout | None = None,
    narrow: tuple[bool, bool] = (False, False),
) -> Layer:
    """Count the bytes and floating-point operations of one layer on one rank (paper, section 2; bytes, not
    elements).

    Args:
        shape: the sizes of the layer.
        groups: the ranks that run it.
        alltoall: the kind of all-to-all.
        recompute: whether the forward runs once more ahead of the backward.
        whole_slots: whether chunks are whole slots of the capacity, or whole tokens in unpadded dispatch, as in
            execution; the paper's formulas split anywhere.
        fanout: the fan-out of a token in node-deduplicated dispatch; ``None``: that of balanced routing.
        narrow: whether rows are converted for (dispatch, combine). Bytes on links are counted without conversion.

    Raises:
        ValueError: the experts do not divide over the EP ranks, or their width over the ESP ranks.
    """
    check_divides(shape, groups)
    at = groups.placements
    # With model parallelism each of its ranks holds its share of the tokens after the reduce-scatter.
    tokens_S = shape.B * shape.L / groups.mp
    row_bytes = shape.M * shape.dtype_bytes
    forward_moe, backward_moe = moe_works(shape, groups, alltoall, tokens_S, whole_slots, fanout, narrow)
    mp_gather, mp_reduce = (
        collective(kind, at["mp"], shape.B * shape.L * row_bytes) for kind in (MP_GATHER, MP_REDUCE)
    )
    products = shape.B * shape.L * shape.attention_weights + 2 * shape.B * shape.L**2 * shape.M
    attention = Work(ATTENTION, (Lane.COMPUTE,), 2 * products / groups.mp)
    softmax = Work(SOFTMAX, (Lane.COMPUTE,), shape.B * shape.heads * shape.L**2 / groups.mp)
    route, order, restore = arranging(shape, tokens_S)

    forward = BlockWork((*mp_gather, attention, softmax, *mp_reduce, route, order), forward_moe, (restore,))
    backward = BlockWork(
        (restore,),
        backward_moe,
        # The backward gathers what the forward reduced, and vice versa.
        (
            order,
            route,
            *mp_gather,
            replace(softmax, size=2 * softmax.size, launches=2),
            replace(attention, size=2 * attention.size, launches=2),
            *mp_reduce,
        ),
    )
    dense, of_experts = _tensors(shape, groups)
    gradients = summed(groups, shape.dtype_bytes, dense, of_experts)
    return Layer(forward, backward, gradients, recompute, numel=sum(dense) + sum(of_experts))


def check_divides(shape: Shape, groups: Groups) -> None:
    """Check that experts divide over the EP ranks, and their width over the ESP ranks.

    Raises:
        ValueError: one of them does not divide.
    """
    if shape.E % groups.ep:
        raise ValueError(f"ep_size = {groups.ep}: must divide the {shape.E} experts")
    if shape.H % groups.esp:
        raise ValueError(f"expert_tensor_parallel_size = {groups.esp}: must divide the hidden width, {shape.H}")


def arranging(shape: Shape, tokens_S: float) -> tuple[Work, Work, Work]:
    """Return the work of the gate, the permute and the un-permute of ``tokens_S`` tokens of one rank."""
    moved_bytes = (shape.F + 1) * tokens_S * shape.M * shape.dtype_bytes
    order, restore = (Work(kind, (Lane.COMPUTE,), moved_bytes) for kind in (ORDER, RESTORE))
    return Work(ROUTE, (Lane.COMPUTE,), 2 * tokens_S * shape.M * shape.E), order, restore


def moe_works(
    shape: Shape,
    groups: Groups,
    alltoall: AllToAll,
    tokens_S: float,
    whole_slots: bool,
    fanout: Fanout | None,
    narrow: tuple[bool, bool] = (False, False),
) -> tuple[MoEWork, MoEWork]:
    """Return the chunked part of a layer, (forward, backward); see :func:`layer_work`."""
    gemms = GEMMS[shape.ffn]
    # The others wait for the fullest rank, which receives, computes and returns more than the mean.
    sent_bytes = shape.fullest_F * tokens_S * shape.M * shape.dtype_bytes
    # Each gathers the rows of esp ranks, and multiplies them with its esp-th part of H.
    expert_flops = 2 * gemms * shape.fullest_F * tokens_S * shape.M * shape.H
    expert = Work(EXPERT, (Lane.COMPUTE,), expert_flops, gemms * (shape.E // groups.ep))
    around = _around(shape, groups, alltoall, sent_bytes, fanout)
    # Rows are split by tokens, slots by their number for each expert.
    cut = tokens_S if shape.capacity_factor is None else shape.F * tokens_S / shape.E
    capacity = max(1, math.ceil(cut)) if whole_slots else None
    twice = replace(expert, size=2 * expert.size, launches=2 * expert.launches)
    # Gradients use the links in the other direction.
    (ahead, behind), (back_ahead, back_behind) = (
        tuple(_converting(stages) if is_narrow else stages for stages, is_narrow in zip(around, wires, strict=True))
        for wires in (narrow, narrow[::-1])
    )
    return MoEWork(ahead, expert, behind, capacity), MoEWork(back_ahead, twice, back_behind, capacity)


def _around(
    shape: Shape, groups: Groups, alltoall: AllToAll, sent_bytes: float, fanout: Fanout | None
) -> tuple[tuple[Stage, ...], tuple[Stage, ...]]:
    """Return the stages ahead of the experts and behind them: the all-to-all, and the gathers and reduces of shards."""
    if alltoall not in ALLTOALLS:
        raise ValueError(f"alltoall = {alltoall!r}: the choices are {', '.join(ALLTOALLS)}")
    at, esp = groups.placements["ep"], groups.placements["esp"]
    inter, intra, sends = (Lane.INTER,), (Lane.INTRA,), partial(Stage, group="ep")
    if alltoall == NODE_DEDUPLICATED and can_deduplicate(groups):
        found = fanout or expected_fanout(shape.E, shape.K, at.nodes, at.per_node)
        between_bytes, inside_bytes = (sent_bytes * each / shape.K for each in (found.nodes, found.ranks))
        ahead = sends(A2A_IN, inter, between_bytes), sends(SPREAD, intra, inside_bytes, is_inner=True)
        behind = sends(COLLECT, intra, inside_bytes, is_inner=True), sends(A2A_OUT, inter, between_bytes)
        return ahead, behind
    gather, reduce = (
        (Stage(kind, esp.lanes, sent_bytes * groups.esp, is_inner=True, group="esp"),) if esp.size > 1 else ()
        for kind in (GATHER, REDUCE)
    )
    if len(at.lanes) == 2 and alltoall == "2dh":
        # Exchange inside the node first, then among equals of other nodes; combine does the reverse. The step
        # inside is a chunk apart from the others: with its own chunk it would wait for a gather or reduce on its link.
        enter = sends(A2A_IN_NODE, intra, sent_bytes, offset=1), sends(A2A_IN, inter, sent_bytes)
        leave = sends(A2A_OUT, inter, sent_bytes), sends(A2A_OUT_NODE, intra, sent_bytes, offset=1)
        return (*enter, *gather), (*reduce, *leave)
    flat = [(sends(kind, at.lanes, sent_bytes),) if at.size > 1 else () for kind in (A2A_IN, A2A_OUT)]
    return (*flat[0], *gather), (*reduce, *flat[1])


_QUANTISED = A2A_IN, SPREAD, COLLECT, A2A_OUT
_CONVERSIONS = dict(zip(_QUANTISED, zip(QUANTISING, DEQUANTISING, strict=True), strict=True))
"""Stage whose rows may be narrow -> what makes them so ahead of it, or of its first step, and wide again behind."""
_EARLY = 2
"""Chunks by which conversions on COMPUTE precede their link: with one, both would wait for each other."""


def _converting(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """Return the stages of a direction with the conversions of the rows that they send in an EP group.

    A conversion is on the lane of its link, or at either end on the lane of the experts or of the rest of the model.
    """
    found: list[Stage] = []
    for (group, is_inner), steps in itertools.groupby(stages, key=lambda each: (each.group, each.is_inner)):
        links = tuple(steps)
        if group == "ep":
            names = next(_CONVERSIONS[each.kind] for each in links if each.kind in _CONVERSIONS)
            first, last = (
                Stage(name, at.lanes[:1], at.size, is_inner=is_inner, offset=at.offset)
                for name, at in zip(names, (links[0], links[-1]), strict=True)
            )
            links = (first, *links, last)
        found += links
    for place in (0, -1) if found else ():
        if found[place].kind in (*QUANTISING, *DEQUANTISING):
            early = _EARLY if found[place].kind == QUANTISE_IN else 0
            found[place] = replace(found[place], offset_on_compute=found[place].offset + early)
    return tuple(found)


def _tensors(shape: Shape, groups: Groups) -> tuple[list[int], list[int]]:
    """Return the elements of a layer's tensors: (on all ranks, of this rank's experts), in the gradients' order."""
    dense = round(shape.attention_weights / groups.mp + shape.M * shape.E)
    # The backward comes to the gate first, then to what attention gives, its values and keys, and its queries.
    kv_share = (shape.kv_heads or shape.heads) / shape.heads
    projections = [int(share * shape.M**2 / groups.mp) for share in (1.0, kv_share, kv_share, 1.0)]
    of_expert = [shape.M * (shape.H // groups.esp)] * GEMMS[shape.ffn] * (shape.E // groups.ep)
    return [dense - sum(projections), *projections], of_expert


def summed(groups: Groups, dtype_bytes: int, dense: Sequence[int], of_experts: Sequence[int]) -> tuple[Gradient, ...]:
    """Return the gradients of a layer that are reduced over ranks. Groups of one rank reduce none.

    Args:
        groups: the ranks.
        dtype_bytes: the bytes of an element.
        dense: the elements of each tensor on all ranks, in the order in which the gradients exist.
        of_experts: the elements of each tensor of this rank's experts.
    """
    at = groups.placements
    return tuple(
        # If a group uses both kinds of links, slices occupy only the slower one.
        Gradient(kind, at[group].lanes[:1], sum(tensors) * dtype_bytes, tuple(each * dtype_bytes for each in tensors))
        for kind, group, tensors in ((GRAD, "dp", dense), (EXPERT_GRAD, "edp", of_experts))
        if at[group].size > 1
    )


def collective(kind: str, at: Placement, size_bytes: float) -> tuple[Work, ...]:
    """Return a collective among the ranks of a group; empty in a group of one."""
    return (Work(kind, at.lanes, size_bytes),) if at.size > 1 else ()


@lru_cache(maxsize=1)
def stage_kinds() -> Mapping[str, str]:
    """Return kind of task -> the group in which it communicates ("": none), for the experts' part, in time order."""
    shape = Shape(B=2, L=1, M=1, H=2, E=4, K=1, heads=1)
    # Two nodes of two ranks, with whole experts and with sharded ones, have all stages that there are.
    whole, sharded = Groups(4, 2, ep=4), Groups(8, 4, mp=2, esp=2, ep=4)
    narrow = True, True
    moes = [
        moe_works(shape, groups, each, 1.0, False, None, narrow)[0] for groups in (sharded, whole) for each in ALLTOALLS
    ]
    moes.sort(key=lambda moe: len(moe.exchange), reverse=True)
    ahead = {each.kind: each.group for moe in moes for each in moe.ahead}
    return ahead | {EXPERT: ""} | {each.kind: each.group for moe in moes for each in moe.behind}


def kind_costs(
    cluster: Cluster, groups: Groups, alltoall: AllToAll = "flat", shape: Shape | None = None, in_slices: bool = False
) -> Mapping[str, LinearCost]:
    """Return the cost of each kind of task in these groups on this cluster.

    A group that spans nodes, with several ranks in a node, is charged for its inter-node traffic. An all-to-all is
    charged for all that is sent to other nodes. Another collective goes in a ring of all ranks, or in two levels, as is
    faster.

    Args:
        cluster, groups, alltoall: the cluster, the groups and the kind of all-to-all.
        shape: the shape of the layers, which sets the speed of the experts' products; ``None``: that of any product.
        in_slices: whether gradients are summed in slices that follow each other over both links.

    Raises:
        ValueError: the cluster has no number for an operation that a group needs.
    """
    costs = {HOLD: LinearCost(0.0, 0.0), REST: LinearCost(0.0, 1.0), **computing_costs(cluster)}
    if shape is not None:
        costs[EXPERT] = experts_cost(cluster, shape, GEMMS[shape.ffn], groups)
    for kinds, group, collective in (
        ((A2A_IN, A2A_OUT), "ep", "all_to_all"),
        ((GATHER,), "esp", "all_gather"),
        ((REDUCE,), "esp", "reduce_scatter"),
        ((MP_GATHER,), "mp", "all_gather"),
        ((MP_REDUCE,), "mp", "reduce_scatter"),
        ((GRAD,), "dp", "all_reduce"),
        ((EXPERT_GRAD,), "edp", "all_reduce"),
    ):
        at = groups.placements[group]
        if at.size > 1:
            # A flat all-to-all starts a message to each rank, whatever its node; others go node by node.
            peers = at.size if collective == "all_to_all" and alltoall == "flat" else None
            is_sum = in_slices and collective == "all_reduce"
            costs |= dict.fromkeys(kinds, cost_among(cluster, group, at, collective, peers, in_slices=is_sum))
    at = groups.placements["ep"]
    if len(at.lanes) == 2 and alltoall == "2dh":
        inside = cluster.operation("intra.all_to_all", f"2dh over the EP group ({at.per_node} ranks in a node)")
        costs |= dict.fromkeys((A2A_IN_NODE, A2A_OUT_NODE), inside.among(at.per_node))
    if alltoall == NODE_DEDUPLICATED and can_deduplicate(groups):
        inside = cluster.operation("intra.all_to_all", f"{NODE_DEDUPLICATED} ({at.per_node} ranks in a node)")
        costs |= dict.fromkeys((SPREAD, COLLECT), inside.among(at.per_node))
    # Rows are read and written, as they are where they are put in order.
    costs |= dict.fromkeys((*QUANTISING, *DEQUANTISING), costs[ORDER])
    return costs


# ---- The traffic of experts' weights and of activations. Products run at the rate of large products, and read their
# weights at the rate of memory: experts with few rows are slower, by 1 + (FLOP/s / bytes/s) / rows in bf16. Activations
# cost rows x H, products rows x M x H: narrow models are slower. Each of torch's kernels reads its inputs and writes
# its result once.

_OPERATIONS = {
    **dict.fromkeys((EXPERT, DENSE), "gemm"),
    ATTENTION: "attention",
    SOFTMAX: "softmax",
    ROUTE: "routing",
    ORDER: "order",
    RESTORE: "order",
}
_ACTIVATION_PASSES = {3: 19, 2: 7}
"""Products of a feed-forward -> reads and writes of [rows, H] in forward and backward. SwiGLU: an activation (2), a
product (3); in the backward two products of the gradient (3, 3), one backward (3), the activation again (2, 3)."""
_WEIGHT_PASSES = 2
"""Reads and writes of a product's weights, on average over forward and backward: each phase reads them, the gradient is
written and accumulated (3), six for three products."""
_PHASES = 3
"""The backward takes two forwards, so a third of the bytes of both is the forward's."""


def computing_costs(cluster: Cluster) -> dict[str, LinearCost]:
    """Return the cost of each kind of computing task, with experts at the rate of any product."""
    costs = {kind: cluster.operation(name, "every layer").cost for kind, name in _OPERATIONS.items()}
    costs[ROUTE] = costs[ROUTE].plus(cluster.layer_wait_ms)
    has_bytes = "elementwise" in cluster.operations
    costs[ELEMENTWISE] = cluster.operations["elementwise"].cost if has_bytes else LinearCost(0.0, 0.0)
    return costs


def experts_cost(cluster: Cluster, shape: Shape, gemms: int, groups: Groups) -> LinearCost:
    """Return the cost of the experts per floating-point operation, with the start-up of one product of one expert.

    Args:
        cluster: without ``elementwise`` activations take no time, without ``grouped_gemm`` weights take none, and each
            expert's product starts by itself.
        shape: the shape of the layer.
        gemms: the number of products of an expert.
        groups: the ranks over which experts are spread and sharded.
    """
    gemm = cluster.operation("gemm", "every layer").cost
    alpha_ms, beta_ms = gemm.alpha_ms, gemm.beta_ms
    if "elementwise" in cluster.operations:
        passes = _ACTIVATION_PASSES[gemms] / (_PHASES * 2 * gemms * shape.M)
        beta_ms += passes * shape.dtype_bytes * cluster.operations["elementwise"].cost.beta_ms
    if "grouped_gemm" in cluster.operations:
        grouped = cluster.operations["grouped_gemm"].cost
        weight_bytes = shape.M * (shape.H // groups.esp) * shape.dtype_bytes
        alpha_ms = grouped.alpha_ms * groups.ep / shape.E + _WEIGHT_PASSES * weight_bytes * grouped.beta_ms
    return LinearCost(alpha_ms, beta_ms)


def activation_bytes(rows: float, hidden: int, gemms: int, dtype_bytes: int) -> float:
    """Return a third of the bytes of the activations of a dense feed-forward, forward and backward."""
    return rows * hidden * dtype_bytes * _ACTIVATION_PASSES[gemms] / _PHASES
