# SPDX-License-Identifier: Apache-2.0
"""Whole layers of every gate, with every order that reads its decision and every set of ops: the numbers are the same
with slots for all tokens, some or none, on one rank or several; with ``deterministic`` nothing is left to chance."""

from __future__ import annotations

import inspect
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_fsmoe import MOELayer, registry
from ds_fsmoe.components.gates.expert_choice import ExpertChoiceGate
from ds_fsmoe.components.order import OrderBase
from ds_fsmoe.components.routing import Routing, kind_of
from ds_fsmoe.ops import REFERENCE, Ops, deterministic, load_ops, loading
from tests.covering import covering
from tests.ops_cases import compiled_ops
from tests.ranks import run_on_ranks
from tests.samples import draw, sampled
from tests.small_model import Case, small_engine, train_steps

S, M, H, E = 23, 7, 5, 4
GATES = registry.known("gate")
PAIRS = [
    (gate, order)
    for gate, order in itertools.product(GATES, registry.known("order"))
    if issubclass(kind_of(registry.lookup("gate", gate)), registry.lookup("order", order).reads)
]
USED_S = torch.arange(S) % 4 > 0
FEWEST_SLOTS = {"k": 2, "drop_tokens": False, "min_capacity": 0, "slots_per_expert": 1}


def options_of(gate: str, **wanted: Any) -> dict[str, Any]:
    """Those that the gate has: of ``wanted``, and those with which it asks for as few slots as it can."""
    known = inspect.signature(registry.lookup("gate", gate)).parameters
    return {name: value for name, value in (FEWEST_SLOTS | wanted).items() if name in known}


def layer_of(gate: str, order: str | OrderBase, options: dict[str, Any], **how: Any) -> MOELayer:
    """The same parameters each time."""
    torch.manual_seed(0)
    sizes = {"model_dim": M, "num_experts": E, "expert_dim": H, "return_stats": True}
    order = registry.lookup("order", order)() if isinstance(order, str) else order
    return MOELayer(registry.lookup("gate", gate)(**options), order, **sizes | how)


def tokens(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(S, M, dtype=dtype, generator=torch.Generator().manual_seed(2))


def gradients_of(layer: MOELayer, x_SM: torch.Tensor, used_S: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The result and the gradients of the tokens and of all parameters."""
    x_SM.requires_grad_()
    torch.manual_seed(1)
    result = layer(x_SM, used_S)
    loss = result.output.square().sum() + result.aux_loss
    return [result.output, *torch.autograd.grad(loss, [x_SM, *layer.parameters()], allow_unused=True)]


def assert_same(found: list[torch.Tensor | None], expected: list[torch.Tensor | None], tolerance: float = 0.0) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("gate", "order"), [pair for pair in PAIRS if pair[1] not in ("sparse", "dense")])
def test_a_layer_is_the_same_with_every_order_that_reads_its_gate(gate: str, order: str) -> None:
    for dropping in ({"drop_tokens": True, "capacity_factor": 0.6}, {"drop_tokens": False}):
        for used_S in (None, USED_S):
            found, expected = (
                gradients_of(
                    layer_of(gate, each, options_of(gate, **dropping), pipeline_degree=(3, 2)).double(),
                    tokens(),
                    used_S,
                )
                for each in (order, "sparse")
            )
            assert expected[0].abs().max() > 1e-3
            assert_same(found, expected, 1e-13)


class Products(OrderBase):
    """As a user may write one: products of every slot with masks, of which most numbers are zero."""

    def arrange(self, x_SM: torch.Tensor, routing: Routing) -> torch.Tensor:
        x_RM = self.masks(routing, torch.ones_like(routing.weights_KS)).t().to(x_SM) @ x_SM
        return x_RM.view(routing.num_experts, routing.capacity, -1)

    def restore(self, y_ECM: torch.Tensor, routing: Routing) -> torch.Tensor:
        return self.masks(routing, routing.weights_KS).to(y_ECM) @ y_ECM.flatten(0, 1)

    def masks(self, routing: Routing, weights_KS: torch.Tensor) -> torch.Tensor:
        masks_SR = weights_KS.new_zeros(weights_KS.shape[1], routing.num_slots + 1)
        return masks_SR.scatter_add(1, routing.slots_KS.t(), weights_KS.t())[:, :-1]


@pytest.mark.parametrize("dispatch", ["unpadded", "padded"])
def test_memory_that_no_token_took_has_numbers_for_an_order_that_reads_it(dispatch: str) -> None:
    """Whatever lay there before: new memory is nan here."""
    torch.use_deterministic_algorithms(True)
    try:
        for degrees in (1, (3, 2)):
            how = {"pipeline_degree": degrees, "dispatch": dispatch}
            layers = [layer_of("topk", order, options_of("topk"), **how).double() for order in (Products(), "sparse")]
            assert_same(*(gradients_of(layer, tokens(), USED_S) for layer in layers), 1e-12)
    finally:
        torch.use_deterministic_algorithms(False)


# ---- where no rank has a token that takes part, a gate that drops nothing asks for no slots, and nothing travels

# Each pair with one of them, in turns.
TOKENS = {"padding alone": 6, "no token": 0}
CASES = [(gate, order, kind) for gate, order in PAIRS for kind in TOKENS]


def without_slots(gate: str, order: str, num_tokens: int, is_training: bool = True, **how: Any) -> list[Any]:
    layer = layer_of(gate, order, options_of(gate), **how).train(is_training)
    capacities: list[int] = []
    layer.gate.register_forward_hook(lambda module, args, routing: capacities.append(routing.capacity))
    found = gradients_of(layer, torch.randn(num_tokens, M), torch.zeros(num_tokens))
    # Others have slots by the number of tokens, used or not, and rows need none.
    if "drop_tokens" in options_of(gate) and how["dispatch"] == "padded":
        assert capacities == [0]
    return found


@sampled(("gate", "order", "kind"), CASES, kept=[2 * at + at % 2 for at in range(len(PAIRS))])
def test_a_layer_with_no_slots_is_the_same_in_any_number_of_chunks(gate: str, order: str, kind: str) -> None:
    for is_training in (True, False):
        case = gate, order, TOKENS[kind], is_training
        whole = without_slots(*case, pipeline_degree=(1, 1), dispatch="padded")
        for degrees, dispatch in (((1, 3), "padded"), ((4, 2), "padded"), ((1, 1), "auto"), ((3, 2), "auto")):
            assert_same(without_slots(*case, pipeline_degree=degrees, dispatch=dispatch), whole)


# ---- on ranks

ON_RANKS = covering(PAIRS, [(1, 1), (3, 2), (2, 5)], (False, True))
TODAYS = [draw(f"{pair} on ranks", [each for each in ON_RANKS if each[0] == pair], 1)[0] for pair in PAIRS]
OTHERS = [each for each in ON_RANKS if each not in TODAYS]


def compare_with_one_rank(rank: int, world_size: int, cases: list[tuple[Any, tuple[int, int], bool]]) -> None:
    """Compare a layer whose experts are spread over ranks with a layer on one rank."""
    for (gate, order), degrees, masked in cases:
        options = options_of(gate, drop_tokens=True, capacity_factor=1.1, agree_capacity=True, slots_per_expert=3)
        whole = layer_of(gate, order, options, dispatch="padded").double()
        spread = layer_of(gate, order, options, pipeline_degree=degrees, group=dist.group.WORLD).double()
        spread.gate.load_state_dict(whole.gate.state_dict())
        for number, parameter in enumerate(whole.experts.parameters()):  # made as copies of one
            nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(number))
        here = E // world_size
        local = [*whole.experts.experts][rank * here : (rank + 1) * here]
        for ours, theirs in zip(spread.experts.experts, local, strict=True):
            ours.load_state_dict(theirs.state_dict())
        # Ranks may have different numbers of tokens where a capacity is agreed on or does not follow from them.
        num_tokens = S - 5 * rank if {"agree_capacity", "slots_per_expert"} & {*options} else S
        x_SM = torch.randn(num_tokens, M, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        used_S = torch.arange(num_tokens) % 3 > 0 if masked else None
        results = [gradients_of(layer, x_SM.clone(), used_S) for layer in (spread, whole)]
        shared = 2 + len([*whole.gate.parameters()])
        # Experts' gradients are sums over all ranks' tokens.
        of_whole = dict(zip(whole.parameters(), results[1][2:], strict=True))
        for parameter, gradient in of_whole.items():
            of_whole[parameter] = torch.zeros_like(parameter) if gradient is None else gradient.clone()
        for parameter in whole.experts.parameters():
            dist.all_reduce(of_whole[parameter])
        expected = [*results[1][:2], *(of_whole[each] for each in whole.gate.parameters())]
        expected += [of_whole[each] for expert in local for each in expert.parameters()]
        of_spread = dict(zip(spread.parameters(), results[0][2:], strict=True))
        ours = [*results[0][:2], *(of_spread[each] for each in spread.gate.parameters())]
        ours += [of_spread[each] for each in spread.experts.parameters()]
        for number, (one, other) in enumerate(zip(ours, expected, strict=True)):
            one = torch.zeros_like(other) if one is None else one
            what = ("output", "dx")[number] if number < 2 else ("router" if number < shared else "experts")
            assert (one - other).abs().max() < 1e-12, (gate, order, degrees, masked, what)
        assert expected[1].abs().max() > 1e-3


def exchange_nothing() -> None:
    """Run layers of ranks none of which has a token that takes part."""
    for gate, degrees, num_tokens in (("topk", (2, 3), 6), ("expert_choice", (3, 2), 0)):
        case = gate, "sparse", num_tokens, True
        whole = without_slots(*case, pipeline_degree=(1, 1), dispatch="padded", group=dist.group.WORLD)
        for dispatch in ("padded", "auto"):
            cut = without_slots(*case, pipeline_degree=degrees, dispatch=dispatch, group=dist.group.WORLD)
            assert_same(cut, whole)


def agree_on_capacity(rank: int) -> None:
    """All have the largest capacity, and what an expert takes of a rank's tokens does not depend on those of others."""
    num_tokens, taken = ((3, 2), (23, 12), (1, 1), (11, 6))[rank]
    gate = ExpertChoiceGate(k=2, agree_capacity=True)
    gate.build(M, E)
    routing = gate(torch.randn(num_tokens, M), None, dist.group.WORLD)
    assert (routing.capacity, routing.counts_E.tolist()) == (12, [taken] * 4)
    assert (routing.tokens_R == num_tokens).sum() == 4 * (12 - taken)


def on_ranks(rank: int, world_size: int, cases: list[Any]) -> None:
    exchange_nothing()
    compare_with_one_rank(rank, world_size, cases)
    agree_on_capacity(rank)


@sampled("world_size", [2, 4])
@sampled("cases", [TODAYS, OTHERS], kept=[0], drawn=0, ids=["today's", "others"])
def test_a_layer_whose_experts_are_spread_over_ranks_equals_the_layer_on_one_whatever_tokens_ranks_have(
    cases: list[Any], world_size: int, tmp_path: Path
) -> None:
    assert {pair for pair, _, _ in cases} == set(PAIRS)
    run_on_ranks(on_ranks, world_size, tmp_path, cases)


# ---- with compiled ops

COMPILED = covering(GATES, (1, 2, 3), (torch.float32, torch.float64, torch.bfloat16))
ONE_OF_EACH_GATE = [next(at for at, case in enumerate(COMPILED) if case[0] == gate) for gate in GATES]
DROPS = [{"drop_tokens": False}, {"drop_policy": "probs"}, {"drop_policy": "position"}]


@sampled(("gate", "k", "dtype"), COMPILED, kept=ONE_OF_EACH_GATE, drawn=3, ids=str)
def test_a_layer_computes_the_same_with_compiled_ops(gate: str, k: int, dtype: torch.dtype) -> None:
    k = max(k, 2) if gate in ("gshard", "mixtral") else k  # with one choice their routers learn nothing
    order = kind_of(registry.lookup("gate", gate)).order
    for drop, used_S in itertools.product(DROPS, (None, USED_S)):
        options = options_of(gate, k=k, capacity_factor=0.8, min_capacity=1, **{"drop_tokens": True} | drop)
        compiled, plain = (
            layer_of(gate, order, options, ops=ops, pipeline_degree=(2, 3)).to(dtype)
            for ops in (compiled_ops(), REFERENCE)
        )
        assert_same(*(gradients_of(layer, tokens(dtype), used_S) for layer in (compiled, plain)))


OF_EACH_KIND: list[dict[str, Any] | None] = [None, {"type": "expert_choice"}, {"type": "sigmoid", "k": 2}]


def trained(rank: int, world_size: int, gate: dict[str, Any] | None) -> dict[str, Any]:
    found = {}
    for ops in ("reference", "required", "auto"):
        torch.manual_seed(rank)
        engine = small_engine(Case(ep_size=2, stage=1), rank, {"ops": ops} | ({"gate": gate} if gate else {}))
        losses, inner = train_steps(engine, rank, range(3)), engine.module.moes[0].deepspeed_moe
        found[ops] = losses, {inner.gate.ops.name, inner.fsmoe.order.ops.name, engine.fsmoe.chosen()["ops"]}
        engine.destroy()
    return found


@pytest.mark.long
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler")
def test_training_is_the_same_and_the_report_says_which_ops_it_has(tmp_path: Path) -> None:
    (gate,) = draw("gates of trainings with each set of ops", OF_EACH_KIND, 1)
    for found in run_on_ranks(trained, 2, tmp_path, gate):
        for ops, (losses, names) in found.items():
            assert losses == found["reference"][0]
            assert names == {"reference" if ops == "reference" else "compiled"}


# ---- with ``deterministic``

# What adds on CUDA by atomics, by torch.use_deterministic_algorithms' list; those that index dimension 0 or another.
ADDS = {"index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_reduce"}
# What has no fixed order there whatever its arguments are, if it is not of whole numbers.
NEVER = {"cumsum", "cumsum_", "put_", "histc", "bincount", "embedding_dense_backward", "_index_put_impl_"}


class Chance(TorchDispatchMode):
    """Notes operations whose result on CUDA depends on which of two terms comes first.

    Terms that go to places of their own, or that are whole numbers and so add up exactly, do not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ADDS:
            _, dim, index, terms, *_ = args
            if not adds_exactly(terms_that_meet(index, terms, dim)):
                self.found.append(name)
        elif name in NEVER and args[0].is_floating_point():
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def terms_that_meet(index: torch.Tensor, terms: torch.Tensor, dim: int) -> torch.Tensor:
    """Those that go to one place with another."""
    if index.dim() < terms.dim():
        index = index.view(*[-1 if each == dim else 1 for each in range(terms.dim())]).expand(terms.shape)
    in_order, order = index.sort(dim=dim)
    same = in_order.diff(dim=dim) == 0
    none = torch.zeros_like(same.narrow(dim, 0, 1))
    meets = torch.cat([same, none], dim=dim) | torch.cat([none, same], dim=dim)
    return terms.gather(dim, order)[meets]


def adds_exactly(terms: torch.Tensor) -> bool:
    return not terms.is_floating_point() or bool((terms == terms.round()).all() and terms.abs().sum() < 2**20)


def left_to_chance(gate: str, order: str, ops: Ops, dtype: torch.dtype) -> tuple[list[torch.Tensor | None], list[str]]:
    """Result and gradients, and what was left to chance on the way."""
    options = options_of(gate, drop_tokens=True)
    layer = layer_of(gate, order, options, pipeline_degree=(2, 3), ops=ops).to(dtype)
    with Chance() as chance:
        return gradients_of(layer, tokens(dtype), USED_S), chance.found


# As for CUDA: on a CPU sums have their order.
IN_ORDER = load_ops("reference", "cuda", deterministic=True)


# Each pair in one type of numbers, in turns.
OF_TYPES = [(*pair, (torch.float32, torch.float64)[at % 2]) for at, pair in enumerate(PAIRS)]


@pytest.mark.parametrize(("gate", "order", "dtype"), OF_TYPES, ids=str)
def test_a_deterministic_layer_leaves_nothing_to_chance_and_has_the_same_numbers(
    gate: str, order: str, dtype: torch.dtype
) -> None:
    plain, _ = left_to_chance(gate, order, REFERENCE, dtype)
    fixed, by_chance = left_to_chance(gate, order, IN_ORDER, dtype)
    assert by_chance == []
    assert plain[1].abs().max() > 0
    assert_same(fixed, plain)


def test_what_is_left_to_chance_otherwise_is_noticed() -> None:
    assert set(left_to_chance("expert_choice", "sparse", REFERENCE, torch.float32)[1]) >= {"index_add"}
    assert left_to_chance("topk", "sparse", REFERENCE, torch.float32)[1] != []


def test_on_cuda_the_compiled_ops_gather_and_add_in_order_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_load_on_every_rank", lambda device_type: None)
    plain, fixed = load_ops("required", "cuda"), load_ops("required", "cuda", deterministic=True)
    assert plain is loading.COMPILED["cuda"]
    in_order = deterministic.gather_rows, deterministic.add_rows, "compiled"
    assert (fixed.gather_rows, fixed.add_rows, fixed.name) == in_order
    # Their float64 goes by the reference, and that in order.
    x_SM, slots_KS = torch.randn(5, 3, dtype=torch.float64, requires_grad=True), torch.arange(15).view(3, 5)
    with Chance() as chance:
        y_NM = fixed.arrange(x_SM, slots_KS, 15, None)
        fixed.restore(y_NM, slots_KS, torch.rand(3, 5, dtype=torch.float64), None).sum().backward()
    assert chance.found == []
    assert load_ops("required", "cpu", deterministic=True) is loading.COMPILED["cpu"]


def test_halves_are_added_up_in_float32_in_order_and_rounded_once() -> None:
    halves_NM, index_N = torch.randn(400, 3).bfloat16(), torch.randint(-1, 8, (400,))
    exact = REFERENCE.add_rows(halves_NM.float(), index_N, 7)
    assert torch.equal(IN_ORDER.add_rows(halves_NM, index_N, 7), exact.bfloat16())
    for num_rows in (0, 3):
        assert IN_ORDER.add_rows(torch.ones(0, 2), index_N[:0], num_rows).shape == (num_rows, 2)
