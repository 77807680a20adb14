# SPDX-License-Identifier: Apache-2.0
"""A script's own optimizer and its schedulers go on as before once its groups have been split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from ds_fsmoe.engine import optimizer_groups


def two_groups(monkeypatch: pytest.MonkeyPatch) -> tuple[torch.optim.Optimizer, torch.nn.Parameter]:
    expert, *others = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    expert.group_name = "ep_size_2"
    monkeypatch.setattr(optimizer_groups, "part_of", lambda each: each if each is expert else None)
    groups = [{"params": [expert, others[0]], "weight_decay": 0.1}, {"params": others[1:], "lr": 0.5}]
    return torch.optim.SGD(groups, lr=1.0), expert


SCHEDULERS: list[Any] = [
    lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer, 0.5), lr_scheduler.StepLR(optimizer, 1)], [2]
    ),
]


@pytest.mark.parametrize("make", SCHEDULERS)
@pytest.mark.parametrize("made_first", [True, False])
def test_experts_follow_the_rate_of_the_group_they_came_off(make: Any, made_first: bool, monkeypatch) -> None:
    optimizer, expert = two_groups(monkeypatch)
    scheduler = make(optimizer) if made_first else None
    optimizer_groups.with_expert_groups(optimizer)
    scheduler = scheduler or make(optimizer)
    alone, _ = two_groups(monkeypatch)
    alone_scheduler = make(alone)
    for _ in range(4):
        for each in (optimizer, alone):
            for group in each.param_groups:
                for weight in group["params"]:
                    weight.grad = torch.ones_like(weight)
            each.step()
        scheduler.step()
        alone_scheduler.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1, 1]
    assert torch.equal(expert, alone.param_groups[0]["params"][0])
    assert torch.equal(optimizer.param_groups[1]["params"][0], alone.param_groups[1]["params"][0])


def test_experts_and_schedulers_keep_their_groups_through_a_load_and_steps_of_one_group(monkeypatch) -> None:
    optimizer, _ = two_groups(monkeypatch)
    optimizer.add_param_group({"params": []})
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    optimizer_groups.with_expert_groups(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler.step()
    everything = optimizer.param_groups
    for group in everything:
        optimizer.param_groups = [group]  # as DeepSpeed's stages 1 and 2 do it
        optimizer.step()
    optimizer.param_groups = everything
    assert [(group["lr"], group["weight_decay"]) for group in everything] == [(0.5, 0.1), (0.25, 0), (0.5, 0.1)]
    assert [len(group["params"]) for group in everything] == [1, 1, 1]
