# SPDX-License-Identifier: Apache-2.0
"""The layer put together by hand: a normal nn.Module, the paper's listings, parts of one's own, mistakes."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe import (
    BFloat16Communication,
    CallbackArgs,
    CallbackBase,
    ExpertArgs,
    ExpertBase,
    FramesAsTokens,
    GateBase,
    GPTFeedForward,
    LinearGate,
    MOELayer,
    MoEOutput,
    OrderBase,
    Routing,
    SimpleOrder,
    register_expert,
    register_gate,
    register_order,
    registry,
)
from tests.ranks import run_on_ranks

M, H, S = 13, 29, 23


def make_layer(gate: GateBase | None = None, num_experts: int = 5, **options: Any) -> MOELayer:
    torch.manual_seed(0)
    options = {"expert_dim": H} | options
    return MOELayer(gate or LinearGate(k=2), SimpleOrder(), model_dim=M, num_experts=num_experts, **options)


# ---- a normal nn.Module


def test_the_layer_works_in_a_sequential() -> None:
    model = nn.Sequential(nn.Linear(M, M), make_layer(), nn.Linear(M, 3))
    x_BLM = torch.randn(2, 7, M, requires_grad=True)
    y = model(x_BLM)
    assert y.shape == (2, 7, 3)
    y.square().sum().backward()
    assert all(tensor.grad is not None for tensor in (x_BLM, *model.parameters()))
    assert min(x_BLM.grad.norm(), model[1].gate.wg.weight.grad.norm()) > 0


def test_state_goes_to_another_layer_and_back() -> None:
    layer, other = make_layer(LinearGate(k=3)), make_layer(LinearGate(k=3))
    for each in other.parameters():
        torch.nn.init.normal_(each)
    torch.save(layer.state_dict(), file := io.BytesIO())
    file.seek(0)
    x_SM = torch.randn(S, M)
    assert not torch.equal(other(x_SM), layer(x_SM))
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(x_SM), layer(x_SM))
    names = {f"experts.experts.{i}.fc{j}.{kind}" for i in range(5) for j in (1, 2) for kind in ("weight", "bias")}
    assert set(layer.state_dict()) == names | {"gate.wg.weight"}


class LearnedOrder(SimpleOrder, nn.Module):
    """An order that has a parameter."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def restore(self, y_ECM: torch.Tensor, routing: Routing) -> torch.Tensor:
        return self.scale * super().restore(y_ECM, routing)


def test_parts_that_are_put_into_the_layer_later_are_used_in_turn_and_their_parameters_are_the_layers() -> None:
    x_SM, layer = torch.randn(S, M), make_layer(LinearGate(k=3))
    plain = layer(x_SM)
    adds, multiplies = (
        hooks(before_moe_end_hook=do) for do in (lambda args: args.tensor + 1, lambda args: args.tensor * 10)
    )
    layer.callbacks = (adds, CallbackBase(), multiplies)
    assert torch.equal(layer(x_SM), (plain + 1) * 10)
    layer.callbacks, layer.order = (), LearnedOrder()
    y_SM = layer(x_SM)
    assert torch.equal(y_SM, 2.0 * plain)
    y_SM.sum().backward()
    assert layer.order.scale.grad is not None
    assert "order.scale" in layer.state_dict()


def test_statistics_come_when_they_are_asked_for() -> None:
    x_BLM = torch.randn(2, 7, M)
    result = make_layer(LinearGate(k=3), return_stats=True)(x_BLM)
    assert type(result) is MoEOutput
    assert torch.equal(result.output, make_layer(LinearGate(k=3))(x_BLM))
    assert (result.aux_loss.shape, result.counts_E.shape) == ((), (5,))
    assert result.aux_loss > 0
    assert result.counts_E.sum() == 3 * 14


@pytest.mark.parametrize(("num_tokens", "every"), [(S, 3), (S, 1), (0, 1)], ids=["some", "none used", "no token"])
def test_unused_tokens_come_back_as_zeros(num_tokens: int, every: int) -> None:
    used_S = torch.arange(num_tokens) % every > 0
    y_SM = make_layer(LinearGate(k=2, drop_tokens=False))(torch.randn(num_tokens, M), used_S)
    assert y_SM.shape == (num_tokens, M)
    assert not y_SM[~used_S].any()
    assert (y_SM[used_S] != 0).any(dim=1).all()


# ---- the paper's listings


class CustomizedExpert(ExpertBase):
    """Listing 1, with something in its body."""

    def do_experts(self, args: ExpertArgs) -> torch.Tensor:
        return 3 * args.tokens


class CustomizedCallback(CallbackBase):
    """Listing 1 as it is printed: ``pass`` changes nothing."""

    def before_moe_start_hook(self, args: CallbackArgs) -> None:
        pass


def test_the_papers_listings_run() -> None:
    gate_impl, order_impl = LinearGate(), SimpleOrder()
    kwargs = {"expert_impl": CustomizedExpert(), "callbacks": [CustomizedCallback()]}
    moe_module = MOELayer(gate_impl, order_impl, model_dim=M, num_experts=5, **kwargs)
    assert isinstance(moe_module, nn.Module)
    # One expert is enough for every token at a capacity factor of 5; the weight is the gate's probability.
    gate_impl.settings = LinearGate(capacity_factor=5.0).settings
    x_SM = torch.randn(S, M)
    prob_S1 = torch.softmax(x_SM @ gate_impl.wg.weight.t(), dim=1).amax(dim=1, keepdim=True)
    torch.testing.assert_close(moe_module(x_SM), 3 * x_SM * prob_S1)


INNER = ["before_dispatch_hook", "after_dispatch_hook", "before_combine_hook", "after_combine_hook"]
POINTS = ["before_moe_start_hook", *INNER, "before_moe_end_hook"]


def hooks(**at: Callable[[CallbackArgs], torch.Tensor | None]) -> CallbackBase:
    """A callback with these hooks."""
    methods = {name: lambda self, args, do=do: do(args) for name, do in at.items()}
    return type("Hooks", (CallbackBase,), methods)()


def test_each_of_the_six_points_is_called_in_order_and_inner_ones_for_every_chunk_in_both_directions() -> None:
    seen: list[tuple[Any, ...]] = []

    def note(name: str) -> Callable[[CallbackArgs], None]:
        return lambda args: seen.append(
            (name, args.direction, args.chunk, tuple(args.tensor.shape), args.routing is None)
        )

    options: dict[str, Any] = {"callbacks": [hooks(**{name: note(name) for name in POINTS})]}
    layer = make_layer(LinearGate(k=2, capacity_factor=1.5, min_capacity=0), **options)
    layer(torch.randn(2, 7, M))
    capacity = 9  # ceil(14 / 5 * 1.5 * 2)
    shapes = [(2, 7, M), *[(5, capacity, M)] * 4, (2, 7, M)]
    assert seen == [(name, "forward", 0, shape, name == POINTS[0]) for name, shape in zip(POINTS, shapes, strict=True)]
    seen.clear()
    layer = make_layer(LinearGate(k=3), pipeline_degree=(3, 2), **options)
    layer(torch.randn(S, M, requires_grad=True)).sum().backward()
    expected = [(POINTS[0], "forward", 0), (POINTS[5], "forward", 0)]
    for direction, chunks in (("forward", 3), ("backward", 2)):
        expected += [(name, direction, chunk) for name in INNER for chunk in range(chunks)]
    assert sorted(each[:3] for each in seen) == sorted(expected)


@pytest.mark.parametrize("point", [POINTS[0], POINTS[-1]])
def test_what_an_outer_hook_returns_travels_on_with_its_gradient(point: str) -> None:
    factor = torch.full((), 0.5, requires_grad=True)
    layer = make_layer(LinearGate(k=3), callbacks=[hooks(**{point: lambda args: args.tensor * factor})])
    x_SM = torch.randn(S, M)
    y_SM = layer(x_SM)
    assert not torch.allclose(y_SM, make_layer(LinearGate(k=3))(x_SM))
    y_SM.square().sum().backward()
    assert factor.grad.abs() > 1e-4


# What a hook on the way does to tokens, its partner does to gradients: (here forward, there backward).
ADJOINTS = dict(zip(INNER, reversed(INNER), strict=True))


@pytest.mark.parametrize("degrees", [(1, 1), (3, 2)])
@pytest.mark.parametrize("point", ADJOINTS)
def test_an_inner_hook_sees_tokens_and_gradients_and_may_change_both(point: str, degrees: tuple[int, int]) -> None:
    def doubles(direction: str) -> Callable[[CallbackArgs], torch.Tensor | None]:
        return lambda args: 2 * args.tensor if args.direction == direction else None

    callback = hooks(**{point: doubles("forward"), ADJOINTS[point]: doubles("backward")})
    layer = make_layer(LinearGate(k=3), callbacks=[callback], pipeline_degree=degrees)
    # The same layer, with the factor where autograd sees it.
    plain = make_layer(LinearGate(k=3))
    for expert in plain.experts.experts:
        if "dispatch" in point:
            expert.register_forward_pre_hook(lambda _, args: (2 * args[0],))
        else:
            expert.register_forward_hook(lambda _, __, y: 2 * y)
    xs = [torch.randn(S, M, generator=torch.Generator().manual_seed(1), requires_grad=True) for _ in range(2)]
    for each, x_SM in zip((layer, plain), xs, strict=True):
        each(x_SM).square().sum().backward()
    for ours, theirs in zip((xs[0], *layer.parameters()), (xs[1], *plain.parameters()), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_hook_may_give_the_input_other_leading_dimensions_and_frames_are_routed_as_tokens() -> None:
    shapes = hooks(
        before_moe_start_hook=lambda args: args.tensor.flatten(0, 1)[: 3 * 4].view(3, 4, M),
        before_moe_end_hook=lambda args: args.tensor.view(12, M),
    )
    x_BLM, plain = torch.randn(2, 7, M), make_layer(LinearGate(k=3))
    assert torch.equal(make_layer(LinearGate(k=3), callbacks=[shapes])(x_BLM), plain(x_BLM.view(14, M)[:12]))
    x_BTNM = torch.randn(2, 3, 5, M)
    y_BTNM = make_layer(LinearGate(k=3), callbacks=[FramesAsTokens()])(x_BTNM)
    assert torch.equal(y_BTNM, plain(x_BTNM.flatten(1, 2)).view(2, 3, 5, M))


def send_as_bfloat16(rank: int, world_size: int) -> None:
    """Half the experts are on another rank; of each token there and back, and of gradients, bfloat16 arrives."""
    arrived = []
    narrow = lambda args: args.tensor.bfloat16()  # noqa: E731
    widen = lambda args: arrived.append(args.tensor.dtype) or args.tensor.double()  # noqa: E731
    compress = hooks(**dict(zip(INNER, (narrow, widen) * 2, strict=True)))
    outputs = []
    for callbacks in ([], [compress]):
        layer = make_layer(LinearGate(k=3), num_experts=4, callbacks=callbacks, group=dist.group.WORLD).double()
        x_SM = torch.randn(S, M, dtype=torch.float64, generator=torch.Generator().manual_seed(rank), requires_grad=True)
        outputs.append(layer(x_SM))
        outputs[-1].sum().backward()
        assert x_SM.grad.dtype == torch.float64
    assert arrived == [torch.bfloat16] * 4
    assert 0 < (outputs[0] - outputs[1]).abs().max() < 2**-6 * max(outputs[0].abs().max().item(), 1.0)
    with pytest.raises(ValueError, match="MOELayer: num_experts = 5: must be a multiple of the 2 rank"):
        make_layer(num_experts=5, group=dist.group.WORLD)


def test_hooks_may_compress_what_is_sent_and_experts_that_cannot_be_spread_evenly_are_refused(tmp_path: Path) -> None:
    run_on_ranks(send_as_bfloat16, 2, tmp_path)


def test_the_wire_in_bfloat16_rounds_four_times_and_no_more() -> None:
    x_SM = torch.randn(S, M, requires_grad=True)
    exact, rounded = (
        make_layer(callbacks=callbacks, pipeline_degree=(3, 2)) for callbacks in ([], [BFloat16Communication()])
    )
    outputs = [each(x_SM) for each in (exact, rounded)]
    gradients = [torch.autograd.grad(each.sum(), [x_SM])[0] for each in outputs]
    for one, other in (outputs, gradients):
        assert one.dtype == other.dtype == torch.float32
        assert 0 < (one - other).abs().max() / one.abs().max() < 4 * 2**-8


# ---- parts of one's own


class RoundRobinGate(GateBase):
    """Token s to expert s mod E, with a weight that says which token it was."""

    def build(self, model_dim: int, num_experts: int) -> None:
        self.num_experts = num_experts

    def forward(self, x_SM, used_token_S=None, group=None) -> Routing:
        tokens_S = torch.arange(x_SM.shape[0])
        capacity = -(-x_SM.shape[0] // self.num_experts)
        slots_KS = (tokens_S % self.num_experts * capacity + tokens_S // self.num_experts)[None]
        weights_KS = tokens_S[None] + 1.0
        counts_E = torch.bincount(tokens_S % self.num_experts, minlength=self.num_experts)
        return Routing(slots_KS, weights_KS, torch.zeros(()), counts_E, capacity, self.num_experts)


class LoudOrder(OrderBase):
    """The sparse order, its results negated."""

    def arrange(self, x_SM, routing) -> torch.Tensor:
        return SimpleOrder().arrange(x_SM, routing)

    def restore(self, y_ECM, routing) -> torch.Tensor:
        return -SimpleOrder().restore(y_ECM, routing)


class TenfoldExpert(ExpertBase):
    def __init__(self, model_dim: int, expert_dim: int) -> None:
        super().__init__()

    def do_experts(self, args: ExpertArgs) -> torch.Tensor:
        return 10 * args.tokens


@pytest.fixture
def own_shelf(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the shelf, so that parts of a test are gone after it."""
    parts = {kind: {name: registry.lookup(kind, name) for name in registry.known(kind)} for kind in registry._PARTS}
    monkeypatch.setattr(registry, "_PARTS", parts)


def test_parts_of_ones_own_are_found_by_name(own_shelf: None) -> None:
    register_gate("round_robin")(RoundRobinGate)
    register_order("loud")(LoudOrder)
    register_expert("tenfold")(TenfoldExpert)
    gate, order = registry.lookup("gate", "round_robin")(), registry.lookup("order", "loud")()
    options = {"expert_impl": "tenfold", "expert_dim": H, "return_stats": True}
    x_SM = torch.randn(S, M)
    result = MOELayer(gate, order, model_dim=M, num_experts=5, **options)(x_SM)
    torch.testing.assert_close(result.output, -10 * x_SM * torch.arange(1.0, S + 1)[:, None])
    assert result.counts_E.tolist() == [5, 5, 5, 4, 4]


def test_a_name_belongs_to_one_class_and_a_kind_is_one_of_four(own_shelf: None) -> None:
    register_order("loud")(LoudOrder)
    assert register_order("loud")(LoudOrder) is LoudOrder  # a reload is no clash
    with pytest.raises(ValueError, match=r"order 'loud' is taken by tests\.test_layer_by_hand\.LoudOrder"):
        register_order("loud")(SimpleOrder)
    with pytest.raises(ValueError, match="the kinds of part are gate, order, alltoall, expert"):
        registry.register("router", "mine")
    with pytest.raises(ValueError, match=r"no order 'quiet': the choices are .*loud"):
        registry.lookup("order", "quiet")


# ---- mistakes


@pytest.mark.parametrize(
    ("wrong", "error", "sentence"),
    [
        ({"gate_impl": nn.Linear(M, 5)}, TypeError, "gate_impl = Linear.*must be an instance of GateBase"),
        ({"order_impl": SimpleOrder}, TypeError, "order_impl = .*must be an instance of OrderBase"),
        ({"alltoall_impl": 3}, TypeError, "alltoall_impl = 3"),
        ({"callbacks": [3]}, TypeError, "callbacks = 3"),
        ({"gate_impl": LinearGate(k=6)}, ValueError, r"k = 6: must be between 1 and num_experts \(5\)"),
        ({"num_experts": 0}, ValueError, "num_experts = 0: must be a multiple"),
        ({"expert_dim": None}, ValueError, "expert_impl = 'gpt' needs expert_dim"),
        ({"expert_impl": "gpt2"}, ValueError, "no expert 'gpt2': did you mean 'gpt'?"),
        ({"expert_impl": GPTFeedForward}, TypeError, "GPTFeedForward is not a Module"),
    ],
    ids=str,
)
def test_a_wrong_part_is_refused_by_name(wrong: dict[str, Any], error: type[Exception], sentence: str) -> None:
    options = {"gate_impl": LinearGate(), "order_impl": SimpleOrder(), "model_dim": M, "num_experts": 5}
    with pytest.raises(error, match=sentence):
        MOELayer(**(options | {"expert_dim": H} | wrong))


def test_a_gate_is_not_taken_from_the_layer_that_has_it() -> None:
    first = make_layer(gate := LinearGate(k=2))
    weight = first.gate.wg.weight
    with pytest.raises(ValueError, match="gate"):
        make_layer(gate, num_experts=7)
    assert first.gate.wg.weight is weight


def test_a_hook_that_loses_rows_is_found_out_and_a_mask_has_one_entry_per_token() -> None:
    loses = hooks(before_dispatch_hook=lambda args: args.tensor[:, :1])
    with pytest.raises(ValueError, match=r"\(1, 5, 1, 13\): must be \[N, 5 experts, 7 slots, M\]"):
        make_layer(callbacks=[loses])(torch.randn(17, M))
    with pytest.raises(ValueError, match="used_token has 1 entries for 17 tokens"):
        make_layer(LinearGate(k=1))(torch.randn(17, M), torch.zeros(1))
