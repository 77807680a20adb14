# SPDX-License-Identifier: Apache-2.0
"""Whatever its sizes, cut in any number of chunks, forward and backward differently, a layer equals the loop over
tokens.

Float64 against the loop, to 1e-12; every case trains nothing and looks at every value and gradient. The same on ranks
is in test_rows.py.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass

import pytest
import torch
from torch import nn

from ds_fsmoe import LinearGate, MOELayer, SimpleOrder, registry
from ds_fsmoe.components.expert_compute.shards import shard_expert
from ds_fsmoe.distributed.groups import FSMoEGroups
from tests.covering import covering
from tests.reference import LayerSettings, moe_layer
from tests.samples import draw

M, H, S = 13, 29, 13
AUX_FACTOR = 0.37
FORWARD, BACKWARD = (1, 2, 3, 4, 7), (1, 2, 3, 5)
DROP = LayerSettings(k=2, capacity_factor=1.1, min_capacity=2)
NO_DROP = LayerSettings(k=3, drop_tokens=False)

OF_SHARDS = 28
"""Divisible by the 4 shards there are at the most, and by little else."""

EXPERTS: dict[str, Callable[[int], nn.Module]] = {
    **{name: lambda hidden, name=name: registry.lookup("expert", name)(M, hidden) for name in registry.known("expert")},
    "module": lambda hidden: nn.Sequential(nn.Linear(M, hidden), nn.Tanh(), nn.Linear(hidden, M)),
}


@dataclass(frozen=True)
class Case:
    """One layer on one rank, or the tokens and weights of several."""

    forward: int
    backward: int
    expert: str = "gpt"
    settings: LayerSettings = DROP
    num_tokens: int = S
    """Of each rank."""
    crowded: bool = False
    """Every token wants expert 1 first."""
    masked: bool = False
    """Some tokens take no part."""
    num_experts: int = 4
    hidden: int = H


@dataclass(frozen=True)
class Problem:
    """Everything that goes into a case; all ranks make the same."""

    weight_EM: torch.Tensor
    experts: list[nn.Module]
    x_per_rank: list[torch.Tensor]
    dy_per_rank: list[torch.Tensor]


def problem_of(case: Case, world_size: int) -> Problem:
    torch.manual_seed(17)
    weight_EM = 0.4 * torch.randn(case.num_experts, M, dtype=torch.float64)
    experts = [EXPERTS[case.expert](case.hidden).double() for _ in range(case.num_experts)]
    x_per_rank = [torch.randn(case.num_tokens, M, dtype=torch.float64) for _ in range(world_size)]
    if case.crowded:
        weight_EM[1, 0] = 4.5
        for x_SM in x_per_rank:
            x_SM[:, 0] = 2.0
    dy_per_rank = [torch.randn(case.num_tokens, M, dtype=torch.float64) for _ in range(world_size)]
    return Problem(weight_EM, experts, x_per_rank, dy_per_rank)


def local_experts(experts: list[nn.Module], groups: FSMoEGroups, ep: int, esp: int) -> list[nn.Module]:
    """Copies of those of this rank, or of its part of each."""
    block = groups.layout.group_of("blocks", groups.rank)
    ep_rank, shard = divmod(block.index(groups.rank), esp)
    each = len(experts) // ep
    mine = copy.deepcopy(experts[ep_rank * each : (ep_rank + 1) * each])
    return mine if esp == 1 else [shard_expert(expert, shard, esp)[0] for expert in mine]


def loop_cases() -> list[Case]:
    found = covering((1, 2, 3), (True, False), tuple(EXPERTS), ("plain", "crowded", "masked"), ((1, 1), (3, 2)))
    return [
        Case(
            *(*degrees, expert, LayerSettings(k, 0.6, 2) if drop else LayerSettings(k, drop_tokens=False)),
            crowded=kind == "crowded",
            masked=kind == "masked",
            num_experts=8 if kind == "masked" else 4,
        )
        for k, drop, expert, kind, degrees in found
    ]


def drawn_case(seed: int) -> Case:
    """A layer of sizes that nobody chose; where they are few, slots and experts are empty."""
    drawn = random.Random(seed)
    num_experts, k = drawn.randint(1, 7), drawn.randint(1, 3)
    settings = LayerSettings(
        min(k, num_experts), drawn.choice((0.25, 0.75, 1.0, 2.0)), drawn.choice((0, 1, 4)), drawn.random() < 0.7
    )
    degrees, experts = (drawn.randint(1, 5), drawn.randint(1, 5)), drawn.choice(list(EXPERTS))
    return Case(*degrees, experts, settings, drawn.randint(2, 23), num_experts=num_experts, hidden=drawn.randint(3, 11))


CASES = [
    *loop_cases(),
    Case(1, 1, "module", LayerSettings(3, 0.6, 2, drop_policy="position"), num_experts=8),
    Case(1, 1, settings=LayerSettings(4)),
    Case(1, 1, settings=LayerSettings(1, min_capacity=31), num_experts=8),
    Case(1, 1, settings=LayerSettings(2), num_experts=1 + 2, num_tokens=1),
    Case(1, 1, settings=LayerSettings(1), num_experts=1),
    Case(1, 1, "mixtral", LayerSettings(3, 0.5), num_experts=7),
    # Every pair of degrees, the other axes in turn.
    *(
        Case(*degrees, expert, settings)
        for degrees, settings, expert in zip(
            itertools.product(FORWARD, BACKWARD), itertools.cycle((DROP, NO_DROP)), itertools.cycle(EXPERTS)
        )
    ),
    *map(drawn_case, draw("sizes of a layer", range(10_000), 16)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_process_equals_the_loop_over_tokens(case: Case) -> None:
    problem = problem_of(case, 1)
    (x_SM,), (dy_SM,) = problem.x_per_rank, problem.dy_per_rank
    used_S = torch.rand(case.num_tokens) > 0.3 if case.masked else None
    gate = LinearGate(**asdict(case.settings), top2_2nd_expert_sampling=False)
    options = {"expert_impl": EXPERTS[case.expert](case.hidden), "return_stats": True}
    options["pipeline_degree"] = case.forward, case.backward
    layer = MOELayer(gate, SimpleOrder(), model_dim=M, num_experts=case.num_experts, **options).double()
    state = {"gate.wg.weight": problem.weight_EM}
    for number, expert in enumerate(problem.experts):
        state |= {f"experts.experts.{number}.{name}": tensor for name, tensor in expert.state_dict().items()}
    layer.load_state_dict(state)
    torch.manual_seed(900)
    ours = layer(x_SM.requires_grad_(), used_S)

    # Random token selection: one uniform number per token and expert, the largest stay.
    torch.manual_seed(900)
    priority_SE = torch.rand(case.num_tokens, case.num_experts)
    weight_EM, used = problem.weight_EM.requires_grad_(), None if used_S is None else used_S.tolist()
    (loop,) = moe_layer([x_SM], weight_EM, problem.experts, case.settings, [used], [priority_SE])

    of_both = []
    for output, aux_loss, gate_weight_EM, experts in (
        (ours.output, ours.aux_loss, gate.wg.weight, layer.experts.experts),
        (loop.output_SM, loop.aux_loss, weight_EM, problem.experts),
    ):
        inputs = [x_SM, gate_weight_EM, *(each for expert in experts for each in expert.parameters())]
        loss = (output * dy_SM).sum() + AUX_FACTOR * aux_loss
        of_both.append([output, aux_loss, *torch.autograd.grad(loss, inputs, materialize_grads=True)])
    assert ours.counts_E.tolist() == loop.counts_E
    for number, pair in enumerate(zip(*of_both, strict=True)):
        torch.testing.assert_close(*pair, rtol=0, atol=1e-12, msg=lambda text, number=number: f"{number}: {text}")
    assert ours.output.abs().max() > 1e-2
    if case.crowded:
        assert loop.counts_E[1] == S
        assert case.settings.k > 1 or sum(loop.counts_E) == S
