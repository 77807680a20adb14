# SPDX-License-Identifier: Apache-2.0
"""Where no rank has a token that takes part, a gate that drops nothing asks for no slots, and nothing travels."""

from __future__ import annotations

import inspect
import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_fsmoe import MOELayer, registry
from ds_fsmoe.components.routing import kind_of
from tests.ranks import run_on_ranks
from tests.samples import sampled

S, M, H, E = 6, 8, 5, 4
DEGREES = [(1, 1), (2, 2), (1, 3), (3, 1), (4, 2)]
PAIRS = [
    (gate, order)
    for gate, order in itertools.product(registry.known("gate"), registry.known("order"))
    if issubclass(kind_of(registry.lookup("gate", gate)), registry.lookup("order", order).reads)
]


def options_of(gate: str) -> dict[str, Any]:
    """Those with which it asks for as few slots as it can."""
    known = inspect.signature(registry.lookup("gate", gate)).parameters
    return {
        name: value
        for name, value in {"k": 2, "drop_tokens": False, "min_capacity": 0, "slots_per_expert": 1}.items()
        if name in known
    }


def gradients_of(
    gate: str,
    order: str,
    degrees: tuple[int, int],
    is_training: bool,
    num_tokens: int,
    group: dist.ProcessGroup | None = None,
    dispatch: Any = "padded",
) -> tuple[list[torch.Tensor | None], int]:
    """The result and the gradients of the tokens and of all parameters; how many slots there were."""
    torch.manual_seed(0)
    layer = MOELayer(
        registry.lookup("gate", gate)(**options_of(gate)),
        registry.lookup("order", order)(),
        model_dim=M,
        num_experts=E,
        expert_dim=H,
        return_stats=True,
        pipeline_degree=degrees,
        group=group,
        dispatch=dispatch,
    ).train(is_training)
    capacities: list[int] = []
    layer.gate.register_forward_hook(lambda module, args, routing: capacities.append(routing.capacity))
    x_SM = torch.randn(num_tokens, M, requires_grad=True)
    torch.manual_seed(1)
    result = layer(x_SM, torch.zeros(num_tokens))
    loss = result.output.square().sum() + result.aux_loss
    found = torch.autograd.grad(loss, [x_SM, *layer.parameters()], allow_unused=True)
    return [result.output, *found], capacities[0]


# Each pair with one of them, in turns.
TOKENS = {"padding alone": S, "no token": 0}
CASES = [(gate, order, kind) for gate, order in PAIRS for kind in TOKENS]


@sampled(("gate", "order", "kind"), CASES, kept=[2 * at + at % 2 for at in range(len(PAIRS))])
def test_a_layer_with_no_slots_is_the_same_in_any_number_of_chunks(gate: str, order: str, kind: str) -> None:
    num_tokens = TOKENS[kind]
    for is_training in (True, False):
        whole, capacity = gradients_of(gate, order, DEGREES[0], is_training, num_tokens)
        if "drop_tokens" in options_of(gate):  # others have slots by the number of tokens, used or not
            assert capacity == 0
        for degrees in DEGREES[1:]:
            cut, _ = gradients_of(gate, order, degrees, is_training, num_tokens)
            for one, other in zip(cut, whole, strict=True):
                assert (one is None) == (other is None)
                assert one is None or torch.equal(one, other)
            on_rows, _ = gradients_of(gate, order, degrees, is_training, num_tokens, dispatch="auto")
            for one, other in zip(on_rows, whole, strict=True):
                assert (one is None) == (other is None)
                assert one is None or torch.equal(one, other)


def with_no_slots(rank: int, world_size: int) -> None:
    for gate, degrees, num_tokens in (("topk", (2, 3), S), ("expert_choice", (3, 2), 0)):
        whole, capacity = gradients_of(gate, "sparse", (1, 1), True, num_tokens, dist.group.WORLD)
        assert capacity == 0
        cut, _ = gradients_of(gate, "sparse", degrees, True, num_tokens, dist.group.WORLD)
        for one, other in zip(cut, whole, strict=True):
            assert one is None or torch.equal(one, other)
        on_rows, _ = gradients_of(gate, "sparse", degrees, True, num_tokens, dist.group.WORLD, "auto")
        for one, other in zip(on_rows, whole, strict=True):
            assert one is None or torch.equal(one, other)


def test_ranks_without_a_token_exchange_nothing_and_go_on(tmp_path: Path) -> None:
    run_on_ranks(with_no_slots, 2, tmp_path)
