# SPDX-License-Identifier: Apache-2.0
"""Parameters that are updated by their owners and arrive while the next forward runs already."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_fsmoe.gradients import reducer, updated_parameters
from ds_fsmoe.gradients.lazy_parameters import LazyParameter, gather_on_first_read, wait_for
from ds_fsmoe.gradients.updated_parameters import ParameterPart, in_messages
from tests.gradient_cases import LOOPS, Run, let_deepspeed_read_nothing, training
from tests.ranks import run_on_ranks
from tests.samples import draw
from tests.test_gradients_against_stock import BY_RULE
from tests.waiting import LIMIT_S, linger

NODES = (("topology.ranks_per_node", 2),)


# ---- waiting


def on_its_way() -> tuple[nn.Parameter, list[str]]:
    """A parameter whose value is zero until it has arrived, and what was waited for."""
    parameter, waited = nn.Parameter(torch.zeros(2, 3)), []

    def arrives() -> None:
        waited.append("arrived")
        with torch.no_grad():
            torch.as_strided(storage, (2, 3), (3, 1)).fill_(1.0)

    storage = parameter.detach()
    gather_on_first_read(parameter, arrives)
    return parameter, waited


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "in an operation": lambda p: p.sum(),
    "its data": lambda p: p.data.sum(),
    "in a list": lambda p: torch.cat([torch.zeros(1, 3), p]).sum(),
    "by foreach": lambda p: torch._foreach_mul([p], 1.0)[0].sum(),
    "in a dict": lambda p: _sum_in({"weight": p}),
    "by name": lambda p: torch.mul(input=p, other=1.0).sum(),
    "in place": lambda p: p.data.mul_(1.0).sum(),
    "in a state dict": lambda p: _holding(p).state_dict()["weight"].sum(),
    "copied": lambda p: copy.deepcopy(p).sum(),
    "pickled": lambda p: pickle.loads(pickle.dumps(p)).sum(),
    "saved": lambda p: _saved(p).sum(),
    "printed": lambda p: torch.tensor(6.0) if "1." in repr(p) else torch.tensor(0.0),
    "as numbers": lambda p: torch.tensor(sum(map(sum, p.tolist()))),
    "as an array": lambda p: torch.tensor(p.detach().numpy().sum()),
    "by its memory": lambda p: torch.tensor(6.0 * (p.data_ptr() > 0)),
}


def _sum_in(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Add up a weight in a dict, as a function of a user's that lets torch's subclasses take part."""
    (weight,) = weights.values()
    if torch.overrides.has_torch_function((weight,)):
        return torch.overrides.handle_torch_function(_sum_in, (weight,), weights)
    return weight.sum()


def _holding(parameter: nn.Parameter) -> nn.Module:
    module = nn.Linear(3, 2, bias=False)
    module.weight = parameter
    return module


def _saved(parameter: nn.Parameter) -> torch.Tensor:
    file = io.BytesIO()
    torch.save({"weight": parameter}, file)
    file.seek(0)
    return torch.load(file)["weight"]


@pytest.mark.parametrize("how", READS)
def test_whoever_reads_a_parameter_waits_for_it(how: str) -> None:
    parameter, waited = on_its_way()
    assert READS[how](parameter).item() == 6.0
    assert waited == ["arrived"]
    assert type(parameter) is nn.Parameter
    assert READS[how](parameter).item() == 6.0
    assert waited == ["arrived"], "it has arrived once and for all"


def test_what_is_no_value_is_told_at_once_and_gradients_come_to_the_same_parameter() -> None:
    parameter, waited = on_its_way()
    seen = {parameter: "as a key"}
    facts = (parameter.shape, parameter.numel(), parameter.dtype, parameter.device, parameter.dim(), parameter.size(0))
    assert facts == (torch.Size([2, 3]), 6, torch.float32, torch.device("cpu"), 2, 2)
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert isinstance(parameter, nn.Parameter)
    parameter.grad = torch.ones(2, 3)
    parameter.grad = None
    assert parameter.grad is None
    parameter.register_hook(lambda gradient: gradient)
    assert seen[parameter] == "as a key"
    assert waited == []
    assert type(parameter) is LazyParameter
    (2 * parameter).sum().backward()
    assert torch.equal(parameter.grad, torch.full((2, 3), 2.0))


def test_two_threads_may_read_at_once() -> None:
    parameter, waited = on_its_way()
    both = threading.Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        sums = threads.map(lambda _: (both.wait(), parameter.sum().item())[1], range(2))
        assert list(sums) == [6.0, 6.0]
    assert waited
    wait_for(parameter)


# ---- messages


def test_messages_bring_everything_once_in_the_order_of_the_layers_from_all_nodes_at_once() -> None:
    # Two nodes of two ranks: the first layers belong to the first node, as ZeRO cuts them.
    parts = [ParameterPart(layer, 0, 10 * layer, 10 * layer + 10, layer // 2) for layer in range(8)]
    node_of = [0, 0, 1, 1]
    messages = in_messages(parts, node_of, fewest_numel=7, most=100)
    elements = sorted((part.group, at) for each in messages for part in each for at in range(part.first, part.stop))
    assert elements == [(0, at) for at in range(80)]
    for node, layers in ((0, range(4)), (1, range(4, 8))):
        order = [part for each in messages for part in each if node_of[part.owner] == node]
        assert [part.number for part in order] == sorted(part.number for part in order)
        assert {part.number for part in order} == set(layers)
        of_messages = [sum(p.stop - p.first for p in each if node_of[p.owner] == node) for each in messages]
        assert of_messages == [7] * 5 + [5]
    assert len(in_messages(parts, node_of, fewest_numel=1, most=3)) == 3
    assert in_messages([], node_of, 7, 3) == []


# ---- in training


def classes_in_layers(rank: int, world_size: int) -> None:
    """When MoE layers begin, their parameters have come, though messages take long; losses are those of a gather at the
    end of the step."""
    seen: list[set[str]] = []
    gathered = (("gradient_partition.gather_parameters", "at_end"),)
    with training(Run(1, block=BY_RULE + gathered), rank) as script:
        for _ in range(2):
            LOOPS["plain"](script)
        wanted = [each.item() for each in script.seen.numbers["losses"]]
    exchange = updated_parameters.exchange_sized

    def slow(*args: Any) -> torch.Tensor:
        linger(0.2)
        return exchange(*args)

    def look(layer: nn.Module, *_: Any) -> None:
        seen.append({type(each).__name__ for each in layer.parameters()})

    with pytest.MonkeyPatch.context() as patch, training(Run(1, block=BY_RULE), rank) as script:
        patch.setattr(updated_parameters, "exchange_sized", slow)
        script.engine.fsmoe.running.checks.append(look)
        for _ in range(2):
            LOOPS["plain"](script)
            assert any(type(each) is LazyParameter for each in script.model.parameters())
        assert seen == [{"Parameter"}] * 6
        assert [each.item() for each in script.seen.numbers["losses"]] == wanted


def test_a_layer_begins_when_its_parameters_have_come(tmp_path: Path) -> None:
    run_on_ranks(classes_in_layers, 2, tmp_path)


def steps_and_messages(rank: int, world_size: int) -> None:
    """Two steps between which nobody reads a parameter, as both forwards come first; messages are held until somebody
    waits for them, or has gone on without."""
    log: list[str] = []
    may_travel, exchange, ended = threading.Event(), updated_parameters.exchange_sized, reducer.end_gathers

    def held(*args: Any) -> torch.Tensor:
        assert may_travel.wait(LIMIT_S)
        result = exchange(*args)
        log.append("a message has come")
        return result

    def ending() -> None:
        may_travel.set()
        ended()

    with pytest.MonkeyPatch.context() as patch, training(Run(1, block=BY_RULE), rank) as script:
        let_deepspeed_read_nothing(patch)
        patch.setattr(updated_parameters, "exchange_sized", held)
        patch.setattr(reducer, "end_gathers", ending)
        updated = script.engine.fsmoe.updated
        step, wait = updated._step, updated.wait

        def noted(*args: Any, **kwargs: Any) -> Any:
            log.append("a step begins")
            may_travel.clear()
            result = step(*args, **kwargs)
            log.append("a step ends")
            return result

        def waiting() -> None:
            if updated._waits:
                may_travel.set()
            wait()

        updated._step, updated.wait = noted, waiting
        for loss in [script.forward() for _ in range(2)]:
            # As if nobody read them: experts that get no token, what is used in some steps only.
            for each in set(script.model.parameters()) - {script.model.unused.weight}:
                each.__class__ = nn.Parameter
            script.engine.backward(loss)
            script.engine.step()
        may_travel.set()
        updated.wait()
    first, second = (at for at, each in enumerate(log) if each == "a step begins")
    assert first == 0
    assert "a message has come" in log[:second]
    assert log[1] == log[second + 1] == "a step ends"


def test_a_step_begins_when_the_parameters_of_the_last_one_have_come_and_waits_for_none_of_its_own(
    tmp_path: Path,
) -> None:
    run_on_ranks(steps_and_messages, 2, tmp_path)


def saved(rank: int, world_size: int, stage: int, folder: str) -> None:
    """A checkpoint, a state dict and another round of training, each right behind a step."""
    with training(Run(stage, block=BY_RULE + NODES), rank) as script:
        LOOPS["plain"](script)
        state = {name: each.clone() for name, each in script.engine.module.state_dict().items()}
        LOOPS["plain"](script)
        script.engine.save_checkpoint(folder)
        wanted = {name: each.clone() for name, each in script.engine.module.state_dict().items()}
        LOOPS["plain"](script)
        # Into the middle of what is on its way.
        script.engine.load_checkpoint(folder)
        now = script.engine.module.state_dict()
        assert [name for name, each in wanted.items() if not torch.equal(now[name], each)] == []
        assert any(not torch.equal(state[name], each) for name, each in wanted.items())


def test_what_is_saved_and_loaded_right_behind_a_step_is_whole(tmp_path: Path) -> None:
    [stage] = draw("saved behind a step", [1, 2], 1)
    run_on_ranks(saved, 4, tmp_path, stage, str(tmp_path / "saved"))
