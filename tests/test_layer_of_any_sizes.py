# SPDX-License-Identifier: Apache-2.0
"""Whatever the sizes of a layer, it computes what a loop over tokens does."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import ds_fsmoe
from tests.reference import LayerSettings, moe_layer
from tests.samples import draw


@pytest.mark.parametrize("seed", draw("sizes of a layer", range(10_000), 16))
def test_a_layer_of_any_sizes_is_a_loop_over_its_tokens(seed: int) -> None:
    drawn = random.Random(seed)
    num_experts, width = drawn.randint(1, 7), drawn.randint(1, 9)
    k = drawn.randint(1, min(2, num_experts))
    tokens, hidden = drawn.randint(1, 23), drawn.randint(1, 11)
    # With k = 1 the caller of the loop has to say who stays.
    factor, drops = drawn.choice((0.25, 0.75, 1.0, 2.0)), k == 2 and drawn.random() < 0.7
    degrees = drawn.randint(1, 5), drawn.randint(1, 5)
    torch.manual_seed(seed)
    options = {"capacity_factor": factor, "drop_tokens": drops, "min_capacity": drawn.choice((0, 1, 4))}
    gate = ds_fsmoe.LinearGate(k=k, use_rts=False, top2_2nd_expert_sampling=False, **options)
    layer = ds_fsmoe.MOELayer(
        gate, ds_fsmoe.SimpleOrder(), model_dim=width, num_experts=num_experts, expert_dim=hidden,
        pipeline_degree=degrees, overlap=drawn.random() < 0.5,
    )  # fmt: skip
    layer.double()
    x_SM = torch.randn(tokens, width, dtype=torch.float64, requires_grad=True)
    target_SM = torch.randn_like(x_SM)
    y_SM = layer(x_SM)
    (y_SM * target_SM).sum().backward()
    found = x_SM.grad.clone(), [each.grad for each in layer.experts.parameters()]
    x_SM.grad = None
    layer.zero_grad()
    experts: list[nn.Module] = list(layer.experts.experts)
    settings = LayerSettings(k=k, **options)
    (expected,) = moe_layer([x_SM], gate.wg.weight, experts, settings)
    torch.testing.assert_close(y_SM, expected.output_SM)
    (expected.output_SM * target_SM).sum().backward()
    torch.testing.assert_close(found[0], x_SM.grad)
    for ours, parameter in zip(found[1], layer.experts.parameters(), strict=True):
        # An expert that nobody chose may have no gradient, or zeros.
        zeros = torch.zeros_like(parameter)
        theirs = zeros if parameter.grad is None else parameter.grad
        torch.testing.assert_close(zeros if ours is None else ours, theirs)
