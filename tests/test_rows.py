# SPDX-License-Identifier: Apache-2.0
"""Layers on ranks, in rows and in slots, through every all-to-all: the same numbers; what travels; wrong decisions."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe import LinearGate, MOELayer, SimpleOrder, registry
from ds_fsmoe.components.alltoall import AllToAllBase
from ds_fsmoe.components.callback import CallbackArgs, CallbackBase
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.gradient_sums import make_contiguous
from ds_fsmoe.components.expert_compute.shards import shard_expert
from ds_fsmoe.components.experts.gpt import GPTFeedForward
from ds_fsmoe.components.experts.mixtral import MixtralFeedForward
from ds_fsmoe.components.gate import GateBase
from ds_fsmoe.components.gates.expert_choice import ExpertChoiceGate
from ds_fsmoe.components.routing import Routing
from ds_fsmoe.distributed.groups import FSMoEGroups, make_groups
from ds_fsmoe.execution.collectives import FULL, CommDtypes
from ds_fsmoe.execution.counts_exchange import RoutingError
from ds_fsmoe.execution.lanes import Lanes, Observer, make_lanes
from ds_fsmoe.execution.pipeline import LayerPipeline, WholeExperts
from ds_fsmoe.execution.tensor_parallel import SelfSplitCollectives
from ds_fsmoe.layer.parts import exchange_in
from ds_fsmoe.layer.runtime import block_of
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.phase_plan import PhasePlan
from tests.covering import covering
from tests.layer_runs import token_path
from tests.live_memory import LiveMemory
from tests.ranks import run_on_ranks
from tests.reference import LayerSettings, moe_layer
from tests.samples import sampled
from tests.test_alltoalls import on_nodes
from tests.test_layer_against_loop import local_experts

WIDTH, HIDDEN = 8, 16


# ---- layers on ranks


@dataclass(frozen=True)
class Case:
    """How a layer is run; on rows and on slots."""

    degrees: tuple[int, int] = (3, 2)
    tokens: tuple[int, ...] = (11, 7, 13, 5, 9, 3, 17, 1)
    k: int = 2
    links: str = "paper"
    recompute: bool = False
    expert: Callable[[], nn.Module] = lambda: GPTFeedForward(WIDTH, HIDDEN)
    experts_per_rank: int = 2
    masked: bool = False
    dtype: torch.dtype = torch.float64
    side_by_side: bool = False
    crowded: bool = False
    drops: bool = False


def mixtral() -> nn.Module:
    return MixtralFeedForward(WIDTH, HIDDEN)


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))


class Sum(nn.Module):
    """An expert that is the same on all ranks of its group, as one is that splits itself and sums its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


CASES = [
    Case(),
    Case((1, 1)),
    Case((2, 5), links="reduce_first"),
    Case((4, 3), links="shared", recompute=True, expert=mixtral),
    # Ranks without tokens, nobody with a token, one token each.
    Case((3, 4), tokens=(0, 7, 0, 5, 9, 0, 17, 1)),
    Case((2, 2), tokens=(0,) * 8),
    Case((7, 5), tokens=(1,) * 8, k=1),
    Case((3, 2), masked=True, expert=module),
    Case((3, 3), crowded=True, k=1, expert=module),
    Case((2, 3), k=4, experts_per_rank=3),
    Case((5, 4), k=2, drops=True, tokens=(13,) * 8),
    Case((2, 7), k=3, drops=True, tokens=(7,) * 8, links="reduce_first", expert=mixtral, recompute=True),
    Case((3, 2), dtype=torch.float32, side_by_side=True, expert=mixtral, experts_per_rank=3),
    Case((4, 4), dtype=torch.float32, side_by_side=True),
    Case((4, 4), dtype=torch.bfloat16, side_by_side=True, expert=mixtral),
    # More experts of a token than a node has.
    Case((5, 4), k=5, experts_per_rank=3),
    Case((1, 5), k=8, experts_per_rank=2, expert=mixtral, recompute=True),
    Case((4, 1), k=3, masked=True, links="reduce_first"),
    Case((2, 3), k=4, expert=module, experts_per_rank=1, tokens=(0, 0, 5, 0, 1, 0, 2, 3)),
]
CAPACITY_FACTOR, MIN_CAPACITY = 1.1, 2
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.1}


def tokens_of(case: Case, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """A rank's tokens, the gradients of their outputs, and which of them take part."""
    generator = torch.Generator().manual_seed(rank)
    x_SM, dy_SM = torch.randn(2, case.tokens[rank], WIDTH, dtype=torch.float64, generator=generator).to(case.dtype)
    used_S = torch.rand(case.tokens[rank], generator=generator) < (0.0 if rank == 1 else 0.6)
    return x_SM.abs() if case.crowded else x_SM, dy_SM, used_S if case.masked else None


def experts_of(case: Case, ep_rank: int, make: Callable[[], nn.Module] | None = None) -> list[nn.Module]:
    """The whole experts of one of the ranks that share a layer's."""
    experts = []
    for number in range(case.experts_per_rank):
        torch.manual_seed(100 * ep_rank + number)
        experts.append((make or case.expert)().to(case.dtype))
    return experts


def gate_weight_of(case: Case, num_experts: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    weight_EM = torch.randn(num_experts, WIDTH, generator=generator, dtype=torch.float64)
    if case.crowded:
        weight_EM[1:] *= 1e-3
        weight_EM[0] = 100.0
    return weight_EM.to(case.dtype)


def by_loop(case: Case, groups: FSMoEGroups) -> list[torch.Tensor]:
    """What a layer's rank has by the loop over tokens, in float64: its output, and the gradients of tokens, gate and
    its experts or shards, which are those of all ranks that share them."""
    layout, rank = groups.layout, groups.rank
    experts = [each.double() for ep_rank in range(layout.ep_size) for each in experts_of(case, ep_rank)]
    weight_EM = gate_weight_of(case, len(experts)).double().requires_grad_()
    settings = LayerSettings(min(case.k, len(experts)), CAPACITY_FACTOR, MIN_CAPACITY, case.drops)
    losses = []
    for each in layout.group_of("blocks", rank):
        x_SM, dy_SM, used_S = tokens_of(case, each)
        x_SM = x_SM.double().requires_grad_()
        y_SM, aux_loss = x_SM, 0.0
        if len(x_SM):
            used = None if used_S is None else [used_S.tolist()]
            (result,) = moe_layer([x_SM], weight_EM, experts, settings, used)
            y_SM, aux_loss = result.output_SM, result.aux_loss
        losses.append((y_SM * dy_SM.double()).sum() + 0.1 * aux_loss)
        if each == rank:
            own_SM, own_y_SM, own_loss = x_SM, y_SM, losses[-1]
    parameters = [each for expert in experts for each in expert.parameters()]
    found = torch.autograd.grad(own_loss, (own_SM, weight_EM), retain_graph=True, materialize_grads=True)
    gradients = torch.autograd.grad(sum(losses), parameters, materialize_grads=True)
    # Shards of the gradients are the gradients of the shards.
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.data.copy_(gradient)
    mine = local_experts(experts, groups, layout.ep_size, layout.esp_size)
    return [own_y_SM.detach(), *found, *(each.detach() for expert in mine for each in expert.parameters())]


def run_layer(
    case: Case,
    groups: FSMoEGroups,
    lanes: Lanes,
    in_rows: bool,
    *,
    alltoall: str = "flat",
    self_split: bool = False,
    agreeing: dist.ProcessGroup | None = None,
    whole: bool = False,
    callbacks: tuple[CallbackBase, ...] = (),
    wires: CommDtypes = FULL,
    conversions: str = "links",
    observer: Observer | None = None,
) -> list[torch.Tensor]:
    """Output and gradients of one forward and backward of this rank."""
    layout = groups.layout
    experts = experts_of(case, groups.index_in("ep"), Sum if self_split else None)
    if layout.esp_size > 1 and not self_split:
        experts = [shard_expert(each, groups.index_in("esp"), layout.esp_size)[0] for each in experts]
    if case.side_by_side:
        assert make_contiguous(experts)
    exchange = exchange_in(groups, named(alltoall))
    blocks = (BlockPlan(each, case.links, conversions=conversions) for each in case.degrees)
    plans = [
        PhasePlan(block, groups.planned, bool(backward), exchange.planned, narrow=wires.narrow)
        for backward, block in enumerate(blocks)
    ]
    collectives = SelfSplitCollectives(**vars(exchange)) if self_split else exchange
    collectives = replace(collectives, block=block_of(groups), comm_dtypes=wires)
    pipeline = LayerPipeline(lanes, collectives, *plans, recompute=case.recompute, observer=observer)
    num_experts = case.experts_per_rank * layout.ep_size
    capacity = {"capacity_factor": CAPACITY_FACTOR, "min_capacity": MIN_CAPACITY, "drop_tokens": case.drops}
    gate = LinearGate(k=min(case.k, num_experts), top2_2nd_expert_sampling=False, **capacity)
    gate.build_once(WIDTH, num_experts)
    gate.wg.weight.data = gate_weight_of(case, num_experts)
    gate.needs_capacity = not in_rows
    x_SM, dy_SM, used_S = tokens_of(case, groups.rank)
    x_SM.requires_grad_()
    parameters = [each for expert in experts for each in expert.parameters()]
    local: Any = ExpertSet(experts, keep_expert_dim=True)
    if whole:
        local = WholeExperts(lambda x: in_stocks_way(experts, x), tuple(parameters), "experts")
    result = token_path(
        x_SM,
        used_S,
        gate=gate,
        order=SimpleOrder(),
        pipeline=pipeline,
        experts=local,
        group=agreeing or groups.block_group,
        callbacks=callbacks,
        in_rows=in_rows,
    )
    ((result.output * dy_SM).sum() + 0.1 * result.aux_loss).backward()
    of_experts = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
    return [result.output.detach(), x_SM.grad, gate.wg.weight.grad, *of_experts]


def in_stocks_way(experts: list[nn.Module], x_NecM: torch.Tensor) -> torch.Tensor:
    chunks = x_NecM.chunk(len(experts), dim=1)
    return torch.cat([expert(chunk) for expert, chunk in zip(experts, chunks, strict=True)], dim=1)


def differences(ours: list[torch.Tensor], theirs: list[torch.Tensor], tolerance: float) -> list[str]:
    found = []
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        worst = (one.double() - other.double()).abs().max().item() if one.numel() else 0.0
        if one.shape != other.shape or not worst <= tolerance * max(
            1.0, other.abs().max().item() if one.numel() else 1
        ):
            found.append(f"tensor {number} differs by {worst:.2g}")
    return found


def named(name: str) -> AllToAllBase:
    return registry.lookup("alltoall", name)()


ALLTOALLS = tuple(registry.known("alltoall"))
SUMS_IN_NODES = ("node_deduplicated",)
"""Of these rows the results are added up in another order; all others bring each rank the rows that flat brings."""
# (ranks, EP, ESP, node of each rank): one link and both; unequal nodes; a group inside a node beside one that spans
# two; groups of three, sharing experts across nodes too; ESP within the nodes.
LAYOUTS = [
    (4, 4, 1, (0, 0, 1, 1)),
    (6, 3, 2, (0, 0, 0, 1, 1, 1)),
    (1, 1, 1, (0,)),
    (2, 2, 1, (0, 0)),
    (2, 1, 2, (0, 0)),
    (3, 3, 1, (0, 0, 0)),
    (4, 4, 1, (0, 1, 0, 1)),
    (4, 4, 1, (0, 1, 1, 1)),
    (4, 2, 1, (0, 0, 0, 1)),
    (4, 2, 2, (0, 0, 1, 1)),
    (6, 6, 1, (0, 1, 1, 2, 2, 2)),
    (6, 6, 1, (0, 0, 1, 1, 2, 2)),
    (6, 6, 1, (0, 0, 0, 1, 1, 1)),
    (6, 3, 1, (0, 0, 0, 0, 1, 1)),
    (8, 4, 2, (0, 0, 0, 0, 1, 1, 1, 1)),
    (8, 4, 1, (0, 0, 1, 1, 2, 2, 3, 3)),
]


def can_be(layout: tuple, number: int, alltoall: str, in_rows: bool, overlap: bool) -> bool:
    if layout[2] > 1 and CASES[number].expert is module:  # cannot be sharded
        return False
    return named(alltoall).takes_rows if in_rows else alltoall not in SUMS_IN_NODES


Way = tuple[int, str, bool, bool]
"""Number of a case, all-to-all, whether in rows, whether on lanes."""


def ways_of(layout: tuple) -> list[Way]:
    """Those of one layout, where the layouts together have every pair of values of two axes, theirs being one."""
    found = covering(LAYOUTS, range(len(CASES)), ALLTOALLS, (True, False), (True, False), allowed=can_be)
    return [way for at, *way in found if at == layout]


def compare(rank: int, world_size: int, ep: int, esp: int, nodes: tuple[int, ...], ways: list[Way]) -> list[str]:
    """What differs from the loop over tokens; and by a bit from the flat all-to-all, cut and sent alike."""
    with on_nodes(*nodes):
        groups = make_groups(ep, esp)
    lanes, serial, found = make_lanes(torch.device("cpu")), make_lanes(torch.device("cpu"), overlap=False), []
    for number, alltoall, in_rows, overlap in ways:
        case = CASES[number]
        ours = run_layer(case, groups, lanes if overlap else serial, in_rows, alltoall=alltoall)
        name = f"{case}, {'rows' if in_rows else 'slots'}, {alltoall}, {'on lanes' if overlap else 'in turns'}"
        found += [f"{name}: {each}" for each in differences(ours, by_loop(case, groups), TOLERANCE[case.dtype])]
        if alltoall not in SUMS_IN_NODES:
            flat = run_layer(case, groups, serial, in_rows)
            found += [f"{name}, beside flat: {each}" for each in differences(ours, flat, 0.0)]
    lanes.close()
    return found


@sampled("layout", LAYOUTS, kept=[0], ids=str)
def test_chunks_rows_and_all_to_alls_change_no_number_of_a_layer(layout: tuple, tmp_path: Path) -> None:
    for rank, found in enumerate(run_on_ranks(compare, layout[0], tmp_path, *layout[1:], ways_of(layout))):
        assert not found, f"rank {rank}: {len(found)}, the first are {found[:5]}"


def other_ways(rank: int, world_size: int) -> list[str]:
    """The same of experts that are called as one module, on all ranks or on one, and of those that split themselves."""
    lanes, found = make_lanes(torch.device("cpu")), []
    with on_nodes(0, 0, 1, 1):
        layouts = [make_groups(4, 1), make_groups(1, 4)]
    cases = (
        Case((1, 1)),
        Case((1, 1), tokens=(0, 0, 0, 0)),
        Case((1, 1), tokens=(0, 3, 0, 1), recompute=True, masked=True, k=4),
    )
    for groups, case in itertools.product(layouts, cases):
        exact = by_loop(case, groups)
        for alltoall, is_whole in itertools.product(("flat", *SUMS_IN_NODES), (True, rank == 0)):
            ours = run_layer(case, groups, lanes, True, whole=is_whole, alltoall=alltoall)
            found += [f"{case}, as one module, {alltoall}: {each}" for each in differences(ours, exact, 1e-12)]
    cases = Case(), Case((1, 4), tokens=(0, 5, 0, 5))
    with on_nodes(0, 0, 1, 1):
        groups = make_groups(1, 4, tensor_parallel_experts=False)
    for case in cases:
        rows = run_layer(case, groups, lanes, True, self_split=True)
        slots = run_layer(case, groups, lanes, False, self_split=True)
        found += [f"{case}, split by themselves, in rows: {each}" for each in differences(rows, slots, 1e-12)]
    with on_nodes(0, 0, 0, 1):
        groups = make_groups(2, mp_size=2, tensor_parallel_experts=True)
    # Ranks whose tokens are gathered agree on a capacity.
    how = {"self_split": True, "agreeing": dist.group.WORLD}
    flat, two = (run_layer(Case(), groups, lanes, False, alltoall=name, **how) for name in ("flat", "2dh"))
    found += [f"split by themselves, 2dh: {each}" for each in differences(two, flat, 0.0)]
    lanes.close()
    return found


def test_experts_called_as_one_module_and_those_that_split_themselves_have_these_numbers(tmp_path: Path) -> None:
    assert run_on_ranks(other_ways, 4, tmp_path) == [[]] * 4


# ---- what travels


class Rows(CallbackBase):
    """Notes the rows at every point."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, int, int]] = []

    def note(self, point: str, args: CallbackArgs) -> None:
        self.seen.append((args.direction, point, args.chunk, args.tensor.numel() // WIDTH))

    before_dispatch_hook = partialmethod(note, "sent")
    after_dispatch_hook = partialmethod(note, "received")
    after_combine_hook = partialmethod(note, "back")


def payload(rank: int, world_size: int) -> tuple[list[tuple[str, str, int, int]], int]:
    """The rows at every point, and the bytes that were sent."""
    groups, lanes, rows = make_groups(world_size), make_lanes(torch.device("cpu")), Rows()
    sent: list[int] = []
    exchange = dist.all_to_all_single

    def counted(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if input.dtype == torch.float64:
            sent.append(input.nbytes)
        return exchange(output, input, *args, **kwargs)

    with patch.object(dist, "all_to_all_single", counted):
        run_layer(Case((3, 2)), groups, lanes, True, callbacks=(rows,))
    lanes.close()
    return rows.seen, sum(sent)


def test_exactly_the_rows_that_were_chosen_travel(tmp_path: Path) -> None:
    all_arrived = 0
    for (seen, sent_bytes), tokens in zip(run_on_ranks(payload, 2, tmp_path), Case().tokens, strict=False):
        of = Counter[tuple[str, str]]()
        for direction, point, _, number in seen:
            of[direction, point] += number
        assert of["forward", "sent"] == of["backward", "sent"] == of["forward", "back"] == 2 * tokens
        arrived = of["forward", "received"]
        assert of["backward", "received"] == arrived
        # Dispatch and combine in both directions: twice what is sent, and twice what has come, and not a row more.
        assert sent_bytes == 2 * (2 * tokens + arrived) * WIDTH * 8
        all_arrived += arrived
    assert all_arrived == 36


def layer_of(gate: GateBase, **options: Any) -> MOELayer:
    sizes = {"model_dim": WIDTH, "num_experts": 4, "expert_dim": HIDDEN}
    return MOELayer(gate, SimpleOrder(), **(sizes | options))


def test_auto_sends_rows_where_nothing_is_dropped_and_slots_elsewhere() -> None:
    sent = {}
    for name, gate, options in (
        ("drops", LinearGate(k=2), {}),
        ("drops nothing", LinearGate(k=2, drop_tokens=False), {}),
        ("no factor", LinearGate(k=2, capacity_factor=None), {}),
        ("unpadded", LinearGate(k=2), {"dispatch": "unpadded"}),
        ("slots", ExpertChoiceGate(k=2, agree_capacity=False), {}),
    ):
        rows = Rows()
        layer_of(gate, callbacks=[rows], **options)(torch.randn(9, WIDTH))
        sent[name] = sum(number for _, point, _, number in rows.seen if point == "sent")
    assert sent["drops nothing"] == sent["no factor"] == 18
    assert sent["drops"] == 4 * 5
    assert sent["unpadded"] <= 18


def test_rows_of_slots_alone_are_refused_by_name_and_values_of_before_are_taken() -> None:
    sentence = r"dispatch = 'unpadded': must be \"auto\" or \"padded\" with ExpertChoiceGate"
    for dispatch in ("unpadded", "rows"):  # the latter is its name in version 0.2.0
        with pytest.raises(ValueError, match=sentence):
            layer_of(ExpertChoiceGate(), dispatch=dispatch)
    wrong: Any = ["rows"]
    for dispatch, said in (("row", "'row'"), (wrong, r"\['rows'\]")):
        with pytest.raises(ValueError, match=f"dispatch = {said}: must be"):
            layer_of(LinearGate(), dispatch=dispatch)
    found = []
    for first, then, alltoall in (("padded", "unpadded", "node_deduplicated"), ("slots", "rows", "once_per_node")):
        torch.manual_seed(0)
        layer: Any = layer_of(LinearGate(k=2, drop_tokens=False), dispatch=first, alltoall_impl=alltoall)
        x_SM = torch.randn(9, WIDTH)
        of_slots = layer(x_SM)
        assert layer.dispatch == "padded"
        layer.dispatch = then
        found.append((of_slots, layer(x_SM)))
    assert all(torch.equal(*each) for each in zip(*found, strict=True))


# ---- wrong decisions


class Wrong(GateBase):
    """A gate of one's own that is wrong on one rank."""

    def __init__(self, wrong: str, on_rank: int) -> None:
        super().__init__()
        self.wrong, self.on_rank = wrong, on_rank
        self.drop_tokens = False

    def build(self, model_dim: int, num_experts: int) -> None:
        self.num_experts = num_experts

    def forward(self, x_SM: torch.Tensor, used_token_S: Any = None, group: Any = None) -> Routing:
        num_tokens = len(x_SM)
        position_S = torch.arange(num_tokens)
        slots_KS = (position_S % self.num_experts * num_tokens + position_S).unsqueeze(0)
        counts_E = torch.bincount(position_S % self.num_experts, minlength=self.num_experts)
        if dist.get_rank() == self.on_rank and self.wrong == "range":
            slots_KS[0, 1] = self.num_experts * num_tokens + 3
        if dist.get_rank() == self.on_rank and self.wrong == "negative":
            slots_KS[0, 1] = -2
        if dist.get_rank() == self.on_rank and self.wrong == "counts":
            counts_E[0] -= 1
        weights_KS = torch.ones(1, num_tokens)
        return Routing(slots_KS, weights_KS, x_SM.new_zeros(()), counts_E, num_tokens, self.num_experts)


class Shorter(CallbackBase):
    """Leaves out a row."""

    def before_dispatch_hook(self, args: CallbackArgs) -> torch.Tensor:
        return args.tensor[:-1]


def wrong_decisions(rank: int, world_size: int) -> dict[str, str]:
    found, world = {}, {"group": dist.group.WORLD}
    layers = {wrong: layer_of(Wrong(wrong, 1), pipeline_degree=2, **world) for wrong in ("range", "negative", "counts")}
    layers["hook"] = layer_of(LinearGate(drop_tokens=False), callbacks=[Shorter()], **world)
    for wrong, layer in layers.items():
        with pytest.raises(ValueError if wrong == "hook" else RoutingError) as caught:
            layer(torch.randn(9, WIDTH))
        found[wrong] = str(caught.value)
    layer_of(Wrong("nothing", 1), pipeline_degree=2, **world)(torch.randn(9, WIDTH))
    return found


def test_a_wrong_decision_on_one_rank_is_named_on_all(tmp_path: Path) -> None:
    first, second = run_on_ranks(wrong_decisions, 2, tmp_path)
    for found in (first, second):
        for wrong in ("range", "negative"):
            assert "the gate's result on rank 1: slots_KS must be in 0..num_experts * capacity" in found[wrong]
        assert "the gate's result on rank 1: counts_E must be at least" in found["counts"]
        assert "before_dispatch_hook returned (8, 8) for (9, 8): must keep the number of rows" in found["hook"]


# ---- memory


@pytest.mark.parametrize("degrees", [(1, 1), (3, 2)])
def test_memory_kept_for_the_backward_falls_as_the_rows_do(degrees: tuple[int, int]) -> None:
    """With wide experts, whose rows are nearly all that is kept."""
    kept, wide = {}, {"num_experts": 16, "expert_dim": 32 * WIDTH, "pipeline_degree": degrees, "overlap": False}
    for dispatch in ("unpadded", "padded"):
        torch.manual_seed(1)
        gate = LinearGate(k=4, drop_tokens=False)
        layer = layer_of(gate, dispatch=dispatch, **wide)
        with torch.no_grad():
            gate.wg.weight[:2] *= 8
        x_SM = torch.randn(64, WIDTH, requires_grad=True)
        layer(x_SM)
        with LiveMemory() as memory:
            y_SM = layer(x_SM)
            kept[dispatch] = memory.live
        share = 16 * gate(x_SM).capacity / (4 * 64)
        del y_SM
    assert share > 1.5
    assert kept["padded"] / kept["unpadded"] > 0.9 * share
