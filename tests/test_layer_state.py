# SPDX-License-Identifier: Apache-2.0
"""A layer inside DeepSpeed has one owner of how it is run, and gives back all that it was given."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deepspeed.moe.layer import MoE
from torch import nn

from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.engine.convert_layers import convert, restore_stock
from ds_fsmoe.execution.lanes import Observer
from ds_fsmoe.layer.parts import choose_parts
from ds_fsmoe.layer.runtime import LayerRuntime
from ds_fsmoe.layer.stock_layer import FSMoELayer
from ds_fsmoe.observing.instruments import LayerCall
from ds_fsmoe.planning.block import BlockPlan, LayerPlan
from ds_fsmoe.planning.schedule import EXPERT, Schedule
from tests.lane_cases import CPU
from tests.sources import FILES, named

WIDTH, NUM_EXPERTS = 8, 4


def stock_layer() -> MoE:
    torch.manual_seed(0)
    return MoE(WIDTH, nn.Linear(WIDTH, WIDTH), NUM_EXPERTS, k=2, use_rts=False)


def run(layer: MoE) -> torch.Tensor:
    torch.manual_seed(1)
    y_SM, aux_loss, _ = layer(torch.randn(12, WIDTH))
    (y_SM.square().sum() + aux_loss).backward()
    return y_SM.detach()


@pytest.fixture
def running() -> Iterator[LayerRuntime]:
    made = LayerRuntime(FSMoEBlock.model_validate({"pipeline_degree": {"forward": 2, "backward": 2}}), CPU)
    yield made
    made.close()


@pytest.fixture
def layer(running: LayerRuntime) -> FSMoELayer:
    """In an engine that consists of what layers share, its groups made."""
    made = stock_layer()
    convert(made, choose_parts(running.block, "cpu"), running=running, label="L00", path="moes.0")
    made.deepspeed_moe._set_ep_group(None)
    return made.deepspeed_moe


def plan(forward: int, backward: int) -> LayerPlan:
    return LayerPlan(BlockPlan(forward), BlockPlan(backward), "flat")


def attributes(layer: MoE) -> list[dict[str, Any]]:
    """Of all modules, with the results of the last call left out."""
    results = ("l_aux", "exp_counts")
    return [{name: value for name, value in vars(each).items() if name not in results} for each in layer.modules()]


def test_a_layer_given_back_has_what_it_had_before_and_nothing_else() -> None:
    layer = stock_layer()
    y_SM, classes, before = run(layer), [type(each) for each in layer.modules()], attributes(layer)
    convert(layer, choose_parts(FSMoEBlock(), "cpu"))
    assert isinstance(layer.deepspeed_moe, FSMoELayer)
    assert attributes(layer) != before
    layer.deepspeed_moe.gate.says_entropy = True
    run(layer)
    restore_stock(layer)
    assert [type(each) for each in layer.modules()] == classes
    assert attributes(layer) == before
    assert torch.equal(run(layer), y_SM)


def test_all_of_ours_is_in_one_attribute_and_nobody_assigns_how_a_layer_is_run(layer: FSMoELayer) -> None:
    layer(torch.randn(12, WIDTH))
    assert vars(layer).keys() - vars(stock_layer().deepspeed_moe).keys() == {"fsmoe", "l_aux", "exp_counts"}
    with pytest.raises(AttributeError):
        layer.pipeline = layer.pipeline.unchunked()
    assigns = re.compile(r"(fsmoe|layer|inner|state)\.pipeline(, \S+)? = ")
    assert [named(file) for file in FILES if assigns.search(file.read_text())] == []


def test_a_plan_that_is_applied_keeps_what_is_attached_and_cuts_no_layer_that_may_not_be(layer: FSMoELayer) -> None:
    assert layer.pipeline.degrees == (2, 2)
    window, observer = object(), object()
    layer.fsmoe.attach(window, observer)
    layer.fsmoe.apply(plan(3, 1))
    assert layer.pipeline.degrees == (3, 1)
    assert (layer.pipeline.window, layer.pipeline.observer) == (window, observer)
    layer.fsmoe.attach(None)
    assert (layer.pipeline.window, layer.pipeline.observer) == (None, None)
    layer.fsmoe.run_unchunked("dropout")
    assert layer.pipeline.degrees == (1, 1)
    layer.fsmoe.apply(plan(3, 4))
    assert layer.pipeline.degrees == (1, 1)
    assert layer.fsmoe.is_unchunked


def test_a_call_keeps_the_plan_it_began_with(layer: FSMoELayer) -> None:
    chunks = []

    class Spy(Observer):
        def start(self, schedule: Schedule, label: str) -> None:
            chunks.append((label, sum(task.kind == EXPERT for task in schedule.tasks)))

    layer.fsmoe.attach(None, Spy())
    y_SM = layer(torch.randn(12, WIDTH))
    layer.fsmoe.apply(plan(1, 5))
    y_SM.sum().backward()
    layer(torch.randn(12, WIDTH)).sum().backward()
    assert chunks == [("L00/forward", 2), ("L00/backward", 2), ("L00/forward", 1), ("L00/backward", 5)]


def test_an_instrument_is_shown_every_call_and_may_replace_its_parts(layer: FSMoELayer) -> None:
    seen = []

    def notes(call: LayerCall) -> None:
        gate = call.gate

        def noted(x_SM: torch.Tensor, *others: Any) -> Any:
            seen.append((call.label, call.path, call.is_training, len(x_SM)))
            return gate(x_SM, *others)

        call.gate = noted

    x_SM = torch.randn(12, WIDTH)
    layer(x_SM)
    layer.fsmoe.running.instruments.append(notes)
    layer(x_SM)
    layer.eval()
    layer(x_SM[:5])
    assert seen == [("L00", "moes.0", True, 12), ("L00", "moes.0", False, 5)]
