# SPDX-License-Identifier: Apache-2.0
"""Layers on ranks, in rows and in slots, through every all-to-all: the same numbers; what travels; wrong decisions."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from ds_fsmoe.execution.collectives import FULL, Collectives, CommDtypes
from ds_fsmoe.execution.counts_exchange import RoutingError
from ds_fsmoe.execution.lanes import Lanes, Observer, make_lanes
from ds_fsmoe.execution.pipeline import LayerPipeline, WholeExperts
from ds_fsmoe.execution.row_sizes import TokenChunks
from ds_fsmoe.execution.tensor_parallel import SelfSplitCollectives
from ds_fsmoe.layer.parts import exchange_in
from ds_fsmoe.layer.runtime import block_of
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.phase_plan import PhasePlan
from tests.covering import covering
from tests.layer_runs import token_path
from tests.live_memory import LiveMemory
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.test_alltoalls import on_nodes

WIDTH, HIDDEN = 8, 16


# ---- cuts


@pytest.mark.parametrize("degrees", [(1, 1), (3, 2), (4, 2), (5, 7), (6, 4)])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 23, 64])
def test_chunk_i_holds_the_tokens_between_two_shares(degrees: tuple[int, int], num_tokens: int) -> None:
    cuts = TokenChunks(*degrees)
    lengths = cuts.lengths(num_tokens)
    assert len(lengths) == cuts.num_segments <= sum(degrees) - 1
    for degree in degrees:
        first = 0
        for i, (start, stop) in enumerate(cuts.chunks(degree)):
            stop_token = first + sum(lengths[start:stop])
            assert (first, stop_token) == (i * num_tokens // degree, (i + 1) * num_tokens // degree)
            first = stop_token


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
    Case((3, 2), dtype=torch.float32, side_by_side=True, expert=mixtral, experts_per_rank=3),
    Case((4, 4), dtype=torch.float32, side_by_side=True),
    Case((4, 4), dtype=torch.bfloat16, side_by_side=True, expert=mixtral),
    # More experts of a token than a node has.
    Case((5, 4), k=5, experts_per_rank=3),
    Case((1, 5), k=8, experts_per_rank=2, expert=mixtral, recompute=True),
    Case((4, 1), k=3, masked=True, links="reduce_first"),
    Case((2, 3), k=4, expert=module, experts_per_rank=1, tokens=(0, 0, 5, 0, 1, 0, 2, 3)),
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.1}


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
    exact: bool = False,
    wires: CommDtypes = FULL,
    conversions: str = "links",
    observer: Observer | None = None,
) -> list[torch.Tensor]:
    """Output and gradients of one forward and backward of this rank; ``exact`` in float64."""
    rank, layout = groups.rank, groups.layout
    dtype = torch.float64 if exact else case.dtype
    ep_rank, shard = groups.index_in("ep"), groups.index_in("esp")
    experts = []
    for number in range(case.experts_per_rank):
        torch.manual_seed(100 * ep_rank + number)
        expert = Sum() if self_split else case.expert()
        expert = expert.to(case.dtype).to(dtype)
        experts.append(
            expert if self_split or layout.esp_size == 1 else shard_expert(expert, shard, layout.esp_size)[0]
        )
    if case.side_by_side:
        assert make_contiguous(experts)
    exchange = exchange_in(groups, named(alltoall))
    blocks = (BlockPlan(each, case.links, conversions=conversions) for each in case.degrees)
    plans = [
        PhasePlan(block, groups.planned, bool(backward), exchange.planned, narrow=wires.narrow)
        for backward, block in enumerate(blocks)
    ]
    kind = SelfSplitCollectives if self_split else Collectives
    collectives = kind(
        exchange.exchange,
        groups.ep_group,
        groups.esp_group,
        exchange.legs,
        exchange_rows=exchange.exchange_rows,
        row_legs=exchange.row_legs,
        block=block_of(groups),
        forwarded=exchange.forwarded,
        nodes=exchange.nodes,
        comm_dtypes=wires,
    )
    pipeline = LayerPipeline(lanes, collectives, *plans, recompute=case.recompute, observer=observer)
    num_experts = case.experts_per_rank * layout.ep_size
    gate = LinearGate(k=min(case.k, num_experts), drop_tokens=False, top2_2nd_expert_sampling=False)
    gate.build_once(WIDTH, num_experts)
    generator = torch.Generator().manual_seed(7)
    weight_EM = torch.randn(num_experts, WIDTH, generator=generator, dtype=torch.float64)
    if case.crowded:
        weight_EM[1:] *= 1e-3
        weight_EM[0] = 100.0
    gate.wg.weight.data = weight_EM.to(case.dtype).to(dtype)
    gate.needs_capacity = not in_rows
    generator = torch.Generator().manual_seed(rank)
    x_SM, dy_SM = torch.randn(2, case.tokens[rank], WIDTH, dtype=torch.float64, generator=generator).to(case.dtype)
    if case.crowded:
        x_SM = x_SM.abs()
    x_SM, dy_SM = x_SM.to(dtype).requires_grad_(), dy_SM.to(dtype)
    used_S = None
    if case.masked:
        used_S = torch.rand(case.tokens[rank], generator=generator) < (0.0 if rank == 1 else 0.6)
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


def can_be(number: int, alltoall: str, in_rows: bool, overlap: bool) -> bool:
    return named(alltoall).takes_rows if in_rows else alltoall not in SUMS_IN_NODES


def compare(rank: int, world_size: int, ep: int, esp: int, nodes: tuple[int, ...]) -> list[str]:
    """What differs from slots in one chunk in float64; and by a bit from the flat all-to-all, cut and sent alike."""
    with on_nodes(*nodes):
        groups = make_groups(ep, esp)
    lanes, serial, found = make_lanes(torch.device("cpu")), make_lanes(torch.device("cpu"), overlap=False), []
    ways = covering(range(len(CASES)), ALLTOALLS, (True, False), (True, False), allowed=can_be)
    for number, case in enumerate(CASES):
        if esp > 1 and case.expert is module:  # cannot be sharded
            continue
        exact = run_layer(replace(case, degrees=(1, 1)), groups, serial, False, exact=True)
        flat = {in_rows: run_layer(case, groups, serial, in_rows) for in_rows in (True, False)}
        for in_rows, ours in flat.items():
            name = f"{case}, {'rows' if in_rows else 'slots'}, flat"
            found += [f"{name}: {each}" for each in differences(ours, exact, TOLERANCE[case.dtype])]
        for _, alltoall, in_rows, overlap in (each for each in ways if each[0] == number):
            ours = run_layer(case, groups, lanes if overlap else serial, in_rows, alltoall=alltoall)
            name = f"{case}, {'rows' if in_rows else 'slots'}, {alltoall}, {'on lanes' if overlap else 'in turns'}"
            wanted = (exact, TOLERANCE[case.dtype]) if alltoall in SUMS_IN_NODES else (flat[in_rows], 0.0)
            found += [f"{name}: {each}" for each in differences(ours, *wanted)]
    lanes.close()
    return found


@sampled(("world_size", "ep", "esp", "nodes"), LAYOUTS, kept=[0])
def test_chunks_rows_and_all_to_alls_change_no_number_of_a_layer(
    world_size: int, ep: int, esp: int, nodes: tuple[int, ...], tmp_path: Path
) -> None:
    for rank, found in enumerate(run_on_ranks(compare, world_size, tmp_path, ep, esp, nodes)):
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
        exact = run_layer(case, groups, lanes, False, exact=True)
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

    def before_dispatch_hook(self, args: CallbackArgs) -> None:
        self.note("sent", args)

    def after_dispatch_hook(self, args: CallbackArgs) -> None:
        self.note("received", args)

    def after_combine_hook(self, args: CallbackArgs) -> None:
        self.note("back", args)


def payload(rank: int, world_size: int) -> dict[str, Any]:
    groups, lanes, rows = make_groups(world_size), make_lanes(torch.device("cpu")), Rows()
    sent: list[int] = []
    exchange = dist.all_to_all_single

    def counted(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if input.dtype == torch.float64:
            sent.append(input.nbytes)
        return exchange(output, input, *args, **kwargs)

    dist.all_to_all_single = counted
    run_layer(Case((3, 2)), groups, lanes, True, callbacks=(rows,))
    dist.all_to_all_single = exchange
    lanes.close()
    return {"seen": rows.seen, "sent": sent}


def test_exactly_the_rows_that_were_chosen_travel(tmp_path: Path) -> None:
    found = run_on_ranks(payload, 2, tmp_path)
    for of_rank, tokens in zip(found, Case().tokens, strict=False):
        of = {
            (direction, point): sum(each[3] for each in of_rank["seen"] if each[:2] == (direction, point))
            for direction in ("forward", "backward")
            for point in ("sent", "received", "back")
        }
        assert of["forward", "sent"] == of["backward", "sent"] == of["forward", "back"] == 2 * tokens
        arrived = of["forward", "received"]
        assert of["backward", "received"] == arrived
        # Dispatch and combine in both directions: twice what is sent, and twice what has come, and not a row more.
        assert sum(of_rank["sent"]) == 2 * (2 * tokens + arrived) * WIDTH * 8
    assert sum(each[3] for of_rank in found for each in of_rank["seen"] if each[:2] == ("forward", "received")) == 36


def test_auto_sends_rows_where_nothing_is_dropped_and_slots_elsewhere() -> None:
    sent = {}
    for name, gate in {
        "drops": LinearGate(k=2),
        "drops nothing": LinearGate(k=2, drop_tokens=False),
        "no factor": LinearGate(k=2, capacity_factor=None),
        "slots": ExpertChoiceGate(k=2, agree_capacity=False),
    }.items():
        rows = Rows()
        layer = MOELayer(gate, SimpleOrder(), model_dim=WIDTH, num_experts=4, expert_dim=HIDDEN, callbacks=[rows])
        layer(torch.randn(9, WIDTH))
        sent[name] = sum(number for _, point, _, number in rows.seen if point == "sent")
    assert sent["drops nothing"] == sent["no factor"] == 18
    assert sent["drops"] == 4 * 5
    rows = Rows()
    layer = MOELayer(
        LinearGate(k=2),
        SimpleOrder(),
        model_dim=WIDTH,
        num_experts=4,
        expert_dim=HIDDEN,
        callbacks=[rows],
        dispatch="unpadded",
    )
    layer(torch.randn(9, WIDTH))
    kept = sum(number for _, point, _, number in rows.seen if point == "sent")
    assert kept <= 18


def test_rows_of_slots_alone_are_refused_by_name() -> None:
    sizes: dict[str, Any] = {"model_dim": WIDTH, "num_experts": 4, "expert_dim": HIDDEN}
    sentence = r"dispatch = 'unpadded': must be \"auto\" or \"padded\" with ExpertChoiceGate"
    for dispatch in ("unpadded", "rows"):  # the latter is its name in version 0.2.0
        with pytest.raises(ValueError, match=sentence):
            MOELayer(ExpertChoiceGate(), SimpleOrder(), dispatch=dispatch, **sizes)
    with pytest.raises(ValueError, match="dispatch = 'row': must be"):
        MOELayer(LinearGate(), SimpleOrder(), dispatch="row", **sizes)
    wrong: Any = ["rows"]
    with pytest.raises(ValueError, match=r"dispatch = \['rows'\]: must be"):
        MOELayer(LinearGate(), SimpleOrder(), dispatch=wrong, **sizes)


def test_a_layer_by_hand_takes_the_values_of_before() -> None:
    sizes: dict[str, Any] = {"model_dim": WIDTH, "num_experts": 4, "expert_dim": HIDDEN}
    found = []
    for first, then, alltoall in (("padded", "unpadded", "node_deduplicated"), ("slots", "rows", "once_per_node")):
        torch.manual_seed(0)
        gate = LinearGate(k=2, drop_tokens=False)
        layer: Any = MOELayer(gate, SimpleOrder(), dispatch=first, alltoall_impl=alltoall, **sizes)
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
    found = {}
    for wrong in ("range", "negative", "counts", "nothing"):
        layer = MOELayer(
            Wrong(wrong, 1),
            SimpleOrder(),
            model_dim=WIDTH,
            num_experts=4,
            expert_dim=HIDDEN,
            group=dist.group.WORLD,
            pipeline_degree=2,
        )
        try:
            layer(torch.randn(9, WIDTH))
            found[wrong] = "went through"
        except RoutingError as error:
            found[wrong] = str(error)
    layer = MOELayer(
        LinearGate(drop_tokens=False),
        SimpleOrder(),
        model_dim=WIDTH,
        num_experts=4,
        expert_dim=HIDDEN,
        group=dist.group.WORLD,
        callbacks=[Shorter()],
    )
    try:
        layer(torch.randn(9, WIDTH))
        found["hook"] = "went through"
    except ValueError as error:
        found["hook"] = str(error)
    return found


def test_a_wrong_decision_on_one_rank_is_named_on_all(tmp_path: Path) -> None:
    first, second = run_on_ranks(wrong_decisions, 2, tmp_path)
    for found in (first, second):
        for wrong in ("range", "negative"):
            assert "the gate's result on rank 1: slots_KS must be in 0..num_experts * capacity" in found[wrong]
        assert "the gate's result on rank 1: counts_E must be at least" in found["counts"]
        assert found["nothing"] == "went through"
        assert "before_dispatch_hook returned (8, 8) for (9, 8): must keep the number of rows" in found["hook"]


# ---- graphs and memory


def test_a_layer_on_rows_goes_back_twice_over_a_kept_graph() -> None:
    torch.manual_seed(0)
    layer = MOELayer(
        LinearGate(k=2, drop_tokens=False),
        SimpleOrder(),
        model_dim=WIDTH,
        num_experts=4,
        expert_dim=HIDDEN,
        pipeline_degree=(3, 2),
    )
    x_SM = torch.randn(11, WIDTH, requires_grad=True)
    y_SM = layer(x_SM)
    y_SM.sum().backward(retain_graph=True)
    once = copy.deepcopy([each.grad for each in layer.parameters()])
    y_SM.sum().backward()
    for each, before in zip(layer.parameters(), once, strict=True):
        torch.testing.assert_close(each.grad, 2 * before)


@pytest.mark.parametrize("degrees", [(1, 1), (3, 2)])
def test_memory_kept_for_the_backward_falls_as_the_rows_do(degrees: tuple[int, int]) -> None:
    """With wide experts, whose rows are nearly all that is kept."""
    num_experts, num_tokens = 16, 64
    kept, padded = {}, 0
    for dispatch in ("unpadded", "padded"):
        torch.manual_seed(1)
        gate = LinearGate(k=4, drop_tokens=False)
        layer = MOELayer(
            gate,
            SimpleOrder(),
            model_dim=WIDTH,
            num_experts=num_experts,
            expert_dim=32 * WIDTH,
            pipeline_degree=degrees,
            overlap=False,
            dispatch=dispatch,
        )
        with torch.no_grad():
            gate.wg.weight[:2] *= 8
        x_SM = torch.randn(num_tokens, WIDTH, requires_grad=True)
        layer(x_SM)
        with LiveMemory() as memory:
            y_SM = layer(x_SM)
            kept[dispatch] = memory.live
        padded = num_experts * gate(x_SM).capacity
        del y_SM
    assert padded > 1.5 * 4 * num_tokens
    assert kept["padded"] / kept["unpadded"] > 0.9 * padded / (4 * num_tokens)
