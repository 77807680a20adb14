# SPDX-License-Identifier: Apache-2.0
"""The scale rule of gradients, held against the gradient of the global mean loss in one process.

The distributed side is a one-layer MoE written here with plain collectives: every token goes to every expert, weighted
by a softmax gate, so nothing hides behind routing. It knows nothing of the rule but what it is asked to apply.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.runtime.groups import make_groups, stock_names
from ds_fsmoe.runtime.scale import Kind, ScaleRule, Tokens, scale_rule
from ds_fsmoe.runtime.topology import layout
from tests.ranks import run_on_ranks

# M width, H expert width (4 shards of 7), E experts, S tokens of one replica of the model (a multiple of mp).
M, H, E, S = 5, 28, 4, 6
TOLERANCE = 1e-12


@dataclass(frozen=True)
class Case:
    """Sizes, and what the ranks of a tensor-parallel group are given."""

    world: int
    ep: int
    esp: int
    mp: int = 1
    tokens: Tokens = Tokens.DROPPED

    @property
    def dp(self) -> int:
        return self.world // self.mp

    def rule(self, kind: Kind) -> ScaleRule:
        return scale_rule(
            kind,
            dp_size=self.dp,
            edp_size=self.world // (self.ep * self.esp),
            ep_size=self.ep,
            esp_size=self.esp,
            mp_size=self.mp,
            tokens=self.tokens,
        )


# ---- the model, and its gradients in one process


def full_parameters(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The unsharded model. ``W2`` and ``b2`` lead to the output, so ``b2`` is held whole by every shard."""
    generator = torch.Generator().manual_seed(11)
    shapes = {"dense": (M, M), "gate": (E, M), "W1": (E, M, H), "b1": (E, H), "W2": (E, H, M), "b2": (E, M)}
    full = {name: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5 for name, shape in shapes.items()}
    return {name: value.to(dtype) for name, value in full.items()}


def batch(replica: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of one data-parallel rank."""
    generator = torch.Generator().manual_seed(100 + replica)
    x_SM, target_SM = (torch.randn(S, M, generator=generator, dtype=torch.float64) for _ in range(2))
    return x_SM.to(dtype), target_SM.to(dtype)


def expert(x_eCM: torch.Tensor, w: dict[str, torch.Tensor], bias_share: float = 1.0) -> torch.Tensor:
    """[e, C, M] to the same; for a shard a part of it."""
    hidden_eCH = torch.tanh(torch.einsum("ecm,emh->ech", x_eCM, w["W1"]) + w["b1"][:, None])
    return torch.einsum("ech,ehm->ecm", hidden_eCH, w["W2"]) + bias_share * w["b2"][:, None]


def loss_of(y_SM: torch.Tensor, x_SM: torch.Tensor, target_SM: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    return ((y_SM + x_SM @ dense - target_SM) ** 2).mean()


def gradients_in_one_process(num_replicas: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Of the mean over all replicas of their losses."""
    w = {name: value.requires_grad_() for name, value in full_parameters(dtype).items()}
    total = torch.zeros((), dtype=dtype)
    for replica in range(num_replicas):
        x_SM, target_SM = batch(replica, dtype)
        weights_SE = torch.softmax(x_SM @ w["gate"].T, dim=-1)
        y_SM = torch.einsum("se,esm->sm", weights_SE, expert(x_SM.expand(E, S, M), w))
        total = total + loss_of(y_SM, x_SM, target_SM, w["dense"]) / num_replicas
    total.backward()
    return {name: value.grad for name, value in w.items()}


# ---- the same over ranks


class AllToAll(torch.autograd.Function):
    """[G, ...]: block g goes to rank g."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        x = x.contiguous()  # first, because what is like x has its strides
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return AllToAll.apply(gradient, ctx.group), None


def gathered(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """[...] to [P, ...]."""
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return torch.stack(parts)


def summed(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


class Gather(torch.autograd.Function):
    """ESP all-gather, [...] to [P, ...]: what comes back from P shards is added."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return summed(gradient, ctx.group)[dist.get_rank(ctx.group)], None


class Reduce(torch.autograd.Function):
    """ESP reduce-scatter, [P, ...] to [...]: parts of P shards are added."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        return summed(y, group)[dist.get_rank(group)]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gathered(gradient, ctx.group), None


class Take(torch.autograd.Function):
    """This rank's part along a dimension of what all tensor-parallel ranks have: gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return torch.cat(list(gathered(gradient, ctx.group)), ctx.dim), None, None


class Join(torch.autograd.Function):
    """The inverse of :class:`Take`, for computations that all tensor-parallel ranks repeat."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return torch.cat(list(gathered(x, group)), dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        part = gradient.chunk(dist.get_world_size(ctx.group), ctx.dim)[dist.get_rank(ctx.group)]
        return part.contiguous(), None, None


Place = dict[str, tuple[dist.ProcessGroup | None, int]]
"""Kind of group -> (this rank's communicator, which of its ranks this rank is)."""


def communicators(case: Case, rank: int) -> Place:
    found = layout(case.world, case.ep, case.esp, mp_size=case.mp)
    place: Place = {}
    for kind in ("ep", "esp", "edp", "mp", "dp"):
        for ranks in getattr(found, kind):
            group = dist.new_group(list(ranks))
            if rank in ranks:
                place[kind] = group, ranks.index(rank)
    return place


def own_part(name: str, full: torch.Tensor, case: Case, place: Place) -> torch.Tensor:
    """What a rank holds of a parameter of the model."""
    if name in ("dense", "gate"):
        return full
    full = full.chunk(case.ep, dim=0)[place["ep"][1]]
    hidden = {"W1": 2, "b1": 1, "W2": 1}.get(name)
    return full if hidden is None else full.chunk(case.esp, dim=hidden)[place["esp"][1]]


def kind_of(name: str) -> Kind:
    return {"dense": Kind.DENSE, "gate": Kind.GATE, "b2": Kind.EXPERT}.get(name, Kind.EXPERT_SHARD)


def forward_on_rank(x_SM: torch.Tensor, w: dict[str, torch.Tensor], case: Case, place: Place) -> torch.Tensor:
    """[S, M] to the same, through gate, all-to-all, all-gather, experts, reduce-scatter, all-to-all."""
    if case.tokens is Tokens.DISTINCT:
        x_SM = Take.apply(x_SM, 0, place["mp"][0])
    weights_SE = torch.softmax(x_SM @ w["gate"].T, dim=-1)
    x_ECM = x_SM.expand(E, *x_SM.shape)
    if case.tokens is Tokens.DROPPED:
        x_ECM = Take.apply(x_ECM, 1, place["mp"][0])
    local, rows = E // case.ep, x_ECM.shape[1]
    x_GeCM = AllToAll.apply(x_ECM.reshape(case.ep, local, rows, M), place["ep"][0])
    x_PGeCM = Gather.apply(x_GeCM, place["esp"][0])
    x_eNM = x_PGeCM.permute(2, 0, 1, 3, 4).reshape(local, -1, M)
    # The whole bias of the output, in unequal shares: equal ones would hide a missing sum over ESP.
    share = 2 * (place["esp"][1] + 1) / (case.esp * (case.esp + 1))
    y_eNM = expert(x_eNM, w, share)
    y_PGeCM = y_eNM.reshape(local, case.esp, case.ep, rows, M).permute(1, 2, 0, 3, 4)
    y_GeCM = Reduce.apply(y_PGeCM, place["esp"][0])
    y_ECM = AllToAll.apply(y_GeCM, place["ep"][0]).reshape(E, rows, M)
    if case.tokens is Tokens.DROPPED:
        y_ECM = Join.apply(y_ECM, 1, place["mp"][0])
    y_SM = torch.einsum("se,esm->sm", weights_SE, y_ECM)
    return Join.apply(y_SM, 0, place["mp"][0]) if case.tokens is Tokens.DISTINCT else y_SM


def summed_over(x: torch.Tensor, kinds: tuple[str, ...], place: Place) -> torch.Tensor:
    for kind in kinds:
        x = summed(x, place[kind][0])
    return x


def errors_of_rules(rank: int, world_size: int, cases: list[Case]) -> list[dict[str, tuple[float, float, float]]]:
    """Per case and parameter, the largest error against one process: of the rule, of what DeepSpeed makes of the
    gradient after our part, and of the gradient as the rank has it, summed over nobody."""
    found = []
    for case in cases:
        place = communicators(case, rank)
        w = {name: own_part(name, full, case, place) for name, full in full_parameters(torch.float64).items()}
        w = {name: value.clone().requires_grad_() for name, value in w.items()}
        x_SM, target_SM = batch(place["dp"][1], torch.float64)
        loss_of(forward_on_rank(x_SM, w, case, place), x_SM, target_SM, w["dense"]).backward()
        reference = gradients_in_one_process(case.dp, torch.float64)
        errors = {}
        for name, value in w.items():
            rule, true = case.rule(kind_of(name)), own_part(name, reference[name], case, place)
            ruled = summed_over(value.grad, rule.sum_over, place) / rule.divisor
            prepared = summed_over(rule.correction * value.grad, rule.sum_first, place)
            by_deepspeed = summed_over(prepared, ("edp",) if name[0] in "Wb" else ("dp",), place) / case.dp
            errors[name] = tuple(float((each - true).abs().max()) for each in (ruled, by_deepspeed, value.grad))
        found.append(errors)
    return found


def hold_against_one_process(cases: list[Case], folder: Path) -> None:
    per_rank = run_on_ranks(errors_of_rules, cases[0].world, folder, cases)
    smallest = {name: float(grad.abs().max()) for name, grad in gradients_in_one_process(1, torch.float64).items()}
    assert min(smallest.values()) > 1e-2, "gradients worth comparing"
    for errors_per_case in per_rank:
        for case, errors in zip(cases, errors_per_case, strict=True):
            assert set(errors) == {"dense", "gate", "W1", "b1", "W2", "b2"}
            for name, (ruled, by_deepspeed, unsummed) in errors.items():
                assert ruled < TOLERANCE, (case, name)
                assert by_deepspeed < TOLERANCE, (case, name)
                assert unsummed > 1e-3, (case, name)


def test_gradients_by_the_rule_are_those_of_the_mean_loss_for_every_ep_and_esp_of_four_ranks(tmp_path: Path) -> None:
    sizes = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4))
    hold_against_one_process([Case(4, ep, esp) for ep, esp in sizes], tmp_path)


def test_gradients_by_the_rule_are_those_of_the_mean_loss_on_eight_ranks(tmp_path: Path) -> None:
    hold_against_one_process([Case(8, 4, 2), Case(8, 2, 2)], tmp_path)


def test_with_tensor_parallelism_the_rule_holds_for_dropped_distinct_and_duplicate_tokens(tmp_path: Path) -> None:
    """The paper's Fig. 2 (DP = MP = EP = ESP = 2) is among them, with its distinct tokens."""
    sizes = ((2, 2), (1, 2), (2, 1), (4, 1), (1, 4))
    hold_against_one_process([Case(4, *each, 2, tokens) for each in sizes for tokens in Tokens], tmp_path)


# ---- the rule as data


def test_experts_are_divided_by_the_full_dp_size_whatever_ep_and_esp_are() -> None:
    for ep, esp in itertools.product((1, 2, 4), (1, 2, 3)):
        rule = Case(24, ep, esp).rule(Kind.EXPERT_SHARD)
        assert rule == ScaleRule(("edp",), 24, (), 1.0)


@pytest.mark.parametrize(
    ("kind", "case", "expected"),
    [
        (Kind.DENSE, Case(8, 2, 2), ScaleRule(("dp",), 8, (), 1.0)),
        (Kind.GATE, Case(8, 2, 2), ScaleRule(("dp",), 8, (), 1.0)),
        (Kind.EXPERT, Case(8, 4, 1), ScaleRule(("edp",), 8, (), 1.0)),
        (Kind.EXPERT, Case(8, 2, 2), ScaleRule(("esp", "edp"), 8, ("esp",), 1.0)),
        (Kind.EXPERT_SHARD, Case(8, 2, 2, 2), ScaleRule(("edp",), 4, (), 1.0)),
        (Kind.GATE, Case(8, 2, 2, 2), ScaleRule(("dp",), 4, (), 1.0)),
        (Kind.EXPERT_SHARD, Case(8, 2, 2, 2, Tokens.DISTINCT), ScaleRule(("edp",), 4, (), 1.0)),
        (Kind.GATE, Case(8, 2, 2, 2, Tokens.DISTINCT), ScaleRule(("mp", "dp"), 4, ("mp",), 1.0)),
        (Kind.GATE, Case(8, 2, 2, 1, Tokens.DISTINCT), ScaleRule(("dp",), 8, (), 1.0)),
        (Kind.DENSE, Case(8, 2, 2, 2, Tokens.DISTINCT), ScaleRule(("dp",), 4, (), 1.0)),
        (Kind.EXPERT_SHARD, Case(8, 2, 2, 2, Tokens.DUPLICATE), ScaleRule(("edp",), 8, (), 0.5)),
        (Kind.GATE, Case(8, 2, 2, 2, Tokens.DUPLICATE), ScaleRule(("dp",), 4, (), 1.0)),
    ],
)
def test_the_rule_of_every_kind_written_out(kind: Kind, case: Case, expected: ScaleRule) -> None:
    assert case.rule(kind) == expected


def test_the_sum_of_a_rule_reaches_every_rank_that_holds_the_parameter_once() -> None:
    """Summing over one kind of group after the other adds each rank of their product exactly once."""
    for case in (Case(8, 2, 2, 2), Case(8, 2, 2, 2, Tokens.DISTINCT), Case(12, 3, 2, 2), Case(12, 2, 3)):
        found = layout(case.world, case.ep, case.esp, mp_size=case.mp)
        for kind in Kind:
            rule = case.rule(kind)
            for rank in range(case.world):
                reached = [rank]
                for name in rule.sum_over:
                    reached = [other for each in reached for other in found.group_of(name, each)]
                assert len(reached) == len(set(reached))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dp_size": 4}, r"mp x dp = 1 x 4 and ep x esp x edp = 2 x 2 x 2: both must be the ranks of one pipeline"),
        ({"mp_size": 2}, r"mp x dp = 2 x 8 and ep x esp x edp"),
        ({"esp_size": 0}, r"esp_size = 0: must be a whole number of at least 1"),
        ({"edp_size": 2.0}, r"edp_size = 2.0: must be a whole number"),
        ({"kind": "bias"}, r"'bias' is not a valid Kind"),
        ({"tokens": "all"}, r"'all' is not a valid Tokens"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(changes: dict, message: str) -> None:
    sizes = {"kind": Kind.EXPERT, "dp_size": 8, "ep_size": 2, "esp_size": 2, "edp_size": 2}
    with pytest.raises(ValueError, match=message):
        scale_rule(**sizes | changes)


# ---- what DeepSpeed itself makes of such gradients


class Shard(nn.Module):
    """One expert as this rank holds it."""

    def __init__(self, width_H: int) -> None:
        super().__init__()
        self.W1 = nn.Parameter(torch.empty(M, width_H))
        self.b1 = nn.Parameter(torch.empty(width_H))
        self.W2 = nn.Parameter(torch.empty(width_H, M))
        self.b2 = nn.Parameter(torch.empty(M))


class ShardedModel(nn.Module):
    """The model above, its parameters where DeepSpeed looks for those of its own MoE layer."""

    def __init__(self, case: Case, place: Place) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.case, self.place = case, place
        self.dense = nn.Parameter(torch.empty(M, M))
        self.moe = MoE(M, Shard(H // case.esp), num_experts=E, ep_size=case.ep)
        stock_names(case.ep, case.esp).put_on(self.moe)
        with torch.no_grad():
            for name, full in full_parameters(torch.float32).items():
                for held, part in self.held(name, own_part(name, full, case, place)):
                    held.copy_(part)

    def held(self, name: str, part: torch.Tensor) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """The Parameters that hold a parameter of the model, with their pieces of a tensor of its shape."""
        if name == "dense":
            return [(self.dense, part)]
        if name == "gate":
            return [(self.moe.deepspeed_moe.gate.wg.weight, part)]
        experts = self.moe.deepspeed_moe.experts.deepspeed_experts
        return [(getattr(each, name), part[i]) for i, each in enumerate(experts)]

    def forward(self, x_SM: torch.Tensor, target_SM: torch.Tensor) -> torch.Tensor:
        experts = self.moe.deepspeed_moe.experts.deepspeed_experts
        w = {name: torch.stack([getattr(each, name) for each in experts]) for name in ("W1", "b1", "W2", "b2")}
        w |= {"gate": self.moe.deepspeed_moe.gate.wg.weight}
        return loss_of(forward_on_rank(x_SM, w, self.case, self.place), x_SM, target_SM, self.dense)


class TensorParallelUnit:
    """What Megatron calls an mpu, over the groups of a case."""

    def __init__(self, case: Case, place: Place) -> None:
        self.case, self.place = case, place

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self.place["dp"][0]

    def get_data_parallel_world_size(self) -> int:
        return self.case.dp

    def get_data_parallel_rank(self) -> int:
        return self.place["dp"][1]

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self.place["mp"][0]

    def get_model_parallel_world_size(self) -> int:
        return self.case.mp

    def get_model_parallel_rank(self) -> int:
        return self.place["mp"][1]


def prepare(parameter: nn.Parameter, rule: ScaleRule, place: Place) -> None:
    """Our part of a rule, before DeepSpeed's hooks."""
    if rule.sum_first or rule.correction != 1.0:
        parameter.register_hook(lambda gradient: summed_over(rule.correction * gradient, rule.sum_first, place))


def errors_of_one_step(rank: int, world_size: int, cases: list[Case]) -> list[dict[str, float]]:
    """Per stage, case and parameter: relative error of a step of SGD with lr 1, so of the gradient DeepSpeed used."""
    import deepspeed

    found = []
    for stage, case in itertools.product((0, 1, 2), cases):
        place = communicators(case, rank)
        model = ShardedModel(case, place)
        for name in full_parameters(torch.float32):
            for parameter, _ in model.held(name, torch.empty(E)):
                prepare(parameter, case.rule(kind_of(name)), place)
        config = {
            "train_micro_batch_size_per_gpu": S,
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            "gradient_clipping": 0.0,  # 1.0 by default
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 4096},
        }
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config=config,
            mpu=TensorParallelUnit(case, place) if case.mp > 1 else None,
        )
        made = make_groups(case.ep, case.esp)
        assert (made.planned.mp, made.ranks_of("dp")) == (case.mp, tuple(dist.get_process_group_ranks(place["dp"][0])))
        assert made.dp_group is None or dist.get_world_size(made.dp_group) == case.dp
        engine.backward(engine(*batch(place["dp"][1], torch.float32)))
        engine.step()
        reference = gradients_in_one_process(case.dp, torch.float64)
        errors = {}
        for name, full in full_parameters(torch.float32).items():
            true, before = (own_part(name, each, case, place) for each in (reference[name], full))
            pieces = zip(model.held(name, true), model.held(name, before), strict=True)
            largest = max((old - held.detach() - gradient).abs().max() for (held, gradient), (_, old) in pieces)
            errors[name] = float(largest / true.abs().max())
        engine.destroy()
        found.append(errors)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        [Case(4, 2, 2), Case(4, 1, 2), Case(4, 2, 1)],
        [Case(4, 1, 2, 2), Case(4, 2, 2, 2, Tokens.DISTINCT), Case(4, 1, 2, 2, Tokens.DUPLICATE)],
    ],
    ids=["mp1", "mp2"],
)
def test_at_stages_0_1_and_2_deepspeed_follows_the_rule_once_its_gaps_are_summed_over(
    cases: list[Case], tmp_path: Path
) -> None:
    for per_rank in run_on_ranks(errors_of_one_step, 4, tmp_path, cases):
        for (stage, case), errors in zip(itertools.product((0, 1, 2), cases), per_rank, strict=True):
            assert set(errors) == {"dense", "gate", "W1", "b1", "W2", "b2"}
            assert max(errors.values()) < 1e-5, (stage, case, errors)
