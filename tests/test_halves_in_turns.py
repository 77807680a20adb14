# SPDX-License-Identifier: Apache-2.0
"""Blocks are run by halves in turns: which runs when, in forward and backward, and what ends that."""

from __future__ import annotations

import copy
import sys
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_fsmoe.execution.call import current_sub_batch
from ds_fsmoe.execution.lanes import Lanes
from ds_fsmoe.two_batch.run import CannotSplitError, Collected, Pending, sub_batches_of
from ds_fsmoe.two_batch.splitter import Splitter
from tests.lane_cases import Arithmetic, Log, device_for, in_time, lanes, random_schedule, serial_outcome

FIXTURES = (lanes,)  # which pytest finds by its name here
WIDTH = 4


class Noted(torch.autograd.Function):
    """Hands a tensor on, and notes when it comes by in each direction."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, events: list[str], name: str) -> torch.Tensor:
        ctx.events, ctx.name = events, name
        ctx.save_for_backward(x)
        events.append(name)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # Ahead of it, as our calls do: what is not kept is made again here.
        (_,) = ctx.saved_tensors
        ctx.events.append(f"{ctx.name}'")
        return dy, None, None


class Layer(nn.Module):
    """A layer that pauses as ours do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.pipeline = SimpleNamespace(forward=SimpleNamespace(is_two_batch=True))


class Block(nn.Module):
    def __init__(self, number: int, events: list[str], has_layer: bool = True) -> None:
        super().__init__()
        self.number, self.events = number, events
        self.attention = nn.Linear(WIDTH, WIDTH)
        if has_layer:
            self.layer = Layer()
        self.fails = False

    def note(self, x: torch.Tensor, what: str) -> torch.Tensor:
        half = current_sub_batch()
        who = "" if half is None else "a" if half.is_last_in_backward else "b"
        return Noted.apply(x, self.events, f"{what}{self.number}{who}")

    def forward(self, x_BLM: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x_BLM = self.note(x_BLM + torch.tanh(self.attention(x_BLM)), "attention")
        if mask is not None:
            x_BLM = x_BLM * mask
        if not hasattr(self, "layer"):
            return x_BLM
        half = current_sub_batch()
        y_BLM = self.note(x_BLM, "send")
        if half is not None:
            half.pause()
        if self.fails and half is not None and not half.is_last_in_backward:
            raise RuntimeError("on purpose")
        y_BLM = self.note(self.layer.linear(y_BLM), "experts")
        if half is not None:
            half.pause()
        return x_BLM + self.note(y_BLM, "back")


class Model(nn.Module):
    def __init__(self, events: list[str], kinds: str = "mm") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number, events, kind == "m") for number, kind in enumerate(kinds))

    def forward(self, x_BLM: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.blocks:
            x_BLM = block(x_BLM, mask=mask)
        return x_BLM.square().sum()


def splitter_of(model: Model, named: tuple[str, ...] = (), agree: Any = lambda facts: facts) -> Splitter:
    layers = {f"blocks.{block.number}.layer": block.layer for block in model.blocks if hasattr(block, "layer")}
    return Splitter(model, layers, named, agree=agree, holds=lambda: False)


def split(model: Model) -> Splitter:
    """The splitter of a model, of which one forward has been watched."""
    splitter = splitter_of(model)
    assert splitter.why_not == ""
    forward(model, splitter, torch.randn(2, 3, WIDTH))
    return splitter


def forward(model: Model, splitter: Splitter, x: torch.Tensor, **named: Any) -> torch.Tensor:
    splitter.begin_forward()
    loss = model(x, **named)
    splitter.end_forward(is_training=True)
    return loss


def numbers(model: Model, loss: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return [loss.detach(), *(each.grad.clone() for each in model.parameters())]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for each, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(each, other)


@pytest.mark.parametrize(("kinds", "batch"), [("m", 3), ("mm", 2), ("mdmd", 5), ("dmddmm", 3)])
def test_halves_give_the_numbers_of_the_whole(kinds: str, batch: int) -> None:
    model = Model([], kinds).double()
    x, mask = torch.randn(batch, 3, WIDTH).double(), torch.rand(batch, 3, 1).double()
    wanted = numbers(model, model(x, mask))
    splitter = split(model.float())
    found = numbers(model.double(), forward(model, splitter, x, mask=mask))
    assert splitter.num_runs == 1
    same(found, wanted)


def test_one_half_computes_while_the_tokens_of_the_other_travel_and_goes_straight_on() -> None:
    events: list[str] = []
    model = Model(events)
    splitter = split(model)
    events.clear()
    loss = forward(model, splitter, torch.randn(2, 3, WIDTH))
    first = ["attention0a", "send0a", "attention0b", "send0b", "experts0a", "experts0b"]
    second = ["back0a", "attention1a", "send1a", "back0b", "attention1b", "send1b", "experts1a", "experts1b"]
    assert events == [*first, *second, "back1a", "back1b"]
    events.clear()
    loss.backward()
    # The same backwards: gradients of the second half come first.
    assert events == [f"{each}'" for each in reversed([*first, *second, "back1a", "back1b"])]


def test_whoever_looks_between_two_blocks_sees_the_whole_batch() -> None:
    model = Model([], "mmm")
    splitter, x = split(model), torch.randn(4, 3, WIDTH)
    wanted = numbers(model, forward(model, splitter, x))
    seen: list[torch.Size] = []
    handle = model.blocks[0].register_forward_hook(lambda module, given, result: seen.append(result.shape))
    same(numbers(model, forward(model, splitter, x)), wanted)
    assert seen == [x.shape]
    # The second block began anew.
    assert splitter.num_runs == 1 + 2
    handle.remove()
    forward(model, splitter, x)
    assert splitter.num_runs == 1 + 2 + 1


@pytest.mark.parametrize("place", [0, 1])
def test_ranks_agree_once_in_a_forward_however_often_halves_are_put_together(place: int) -> None:
    """A hook on one rank alone, or a block that hands nothing on there, may not ask the others a second time."""
    model, asked = Model([], "mmm"), []
    splitter = split(model)
    splitter._agree = lambda facts: asked.append(list(facts)) or facts
    model.blocks[place].register_forward_hook(lambda module, given, result: None)
    for samples in (4, 1):
        forward(model, splitter, torch.randn(samples, 3, WIDTH))
    model(torch.randn(4, 3, WIDTH))  # outside of the engine's forward nobody asks
    assert asked == [[True], [False]]


def test_a_rank_without_a_batch_answers_the_others_and_is_watched_later() -> None:
    model, asked = Model([]), []
    splitter = splitter_of(model, agree=lambda facts: asked.append(list(facts)) or facts)
    splitter.decline()
    splitter.end_forward(is_training=True, has_batch=False)
    assert [each[0] for each in asked] == [False]
    forward(model, splitter, torch.randn(1, 3, WIDTH))
    # One sample says nothing against halves of a later batch, but plans in halves are not worth trying.
    assert (splitter.why_not, splitter.is_worth_trying) == ("", False)
    splitter.decline()
    assert asked[2:] == [[False]]


def test_evaluation_copies_of_a_block_and_a_closed_splitter_run_whole_batches() -> None:
    model = Model([])
    splitter, x = split(model), torch.randn(4, 3, WIDTH)
    with torch.no_grad():
        forward(model, splitter, x)
    forward(model.eval(), splitter, x)
    copied = copy.deepcopy(model.train())
    copied(x)
    assert all(each.forward.__self__ is each for each in copied.blocks)
    splitter.close()
    model(x)
    assert splitter.num_runs == 0
    assert "forward" not in vars(model.blocks[0])


def test_dropout_is_said_to_draw_other_masks(caplog: pytest.LogCaptureFixture) -> None:
    model = Model([])
    splitter = split(model)
    model.blocks[1].drop = nn.Dropout(0.1)
    with caplog.at_level("WARNING", logger="ds_fsmoe"):
        for _ in range(2):
            forward(model, splitter, torch.randn(4, 3, WIDTH))
    (said,) = caplog.records
    assert "whose masks differ between two sub-batches and the whole batch" in said.getMessage()


def test_blocks_are_found_by_the_names_of_their_classes() -> None:
    model = nn.ModuleDict({"first": Block(0, []), "second": Block(1, [])})
    layers = {f"{name}.layer": each.layer for name, each in model.items()}

    def splitter(*names: str) -> Splitter:
        return Splitter(model, layers, names, agree=lambda facts: facts, holds=lambda: False)

    assert "it is in no list of modules" in splitter().why_not
    assert [each.path for each in splitter("Block").blocks] == ["first", "second"]
    assert "a Blok" in splitter("Blok").why_not


def test_arguments_are_cut_where_their_rows_are_samples() -> None:
    rows, one, positions = torch.arange(6).view(3, 2), torch.zeros(1, 5), torch.arange(3)
    first, second = sub_batches_of({"x": (rows, one), "p": positions, "n": None, "f": 0.5}, 3, "all")
    assert [each.tolist() for each in (first["x"][0], second["x"][0])] == [[[0, 1], [2, 3]], [[4, 5]]]
    assert first["x"][1] is second["x"][1] is one
    # One number for each position, as many as samples by chance.
    assert first["p"] is second["p"] is positions
    odd = r"mask of shape \[4, 2\] cannot be split for a batch of 3: its first size is neither"
    for value, message in ((torch.zeros(4, 2), odd), (object(), "mask, a object, cannot be split by the batch")):
        with pytest.raises(CannotSplitError, match=message):
            sub_batches_of(value, 3, "mask")


def test_a_pending_result_is_computed_once_when_it_is_looked_at() -> None:
    calls: list[int] = []
    pending = Pending(lambda: calls.append(1) or torch.ones(2, 3))
    assert (pending.is_open, calls) == (True, [])
    results = [pending + 1, 1 + pending, torch.add(pending, 1), pending.add(1), torch.cat([pending, pending])[:2] + 1]
    assert all(torch.equal(each, torch.full((2, 3), 2.0)) for each in results)
    assert pending.shape == (2, 3)
    assert calls == [1]


def test_what_transformers_collects_of_each_half_is_joined_in_the_forwards_own_lists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collector: ContextVar[Any] = ContextVar("collector", default=None)
    module = SimpleNamespace(_active_collector=collector)
    monkeypatch.setitem(sys.modules, "transformers.utils.output_capturing", module)
    whole: dict[str, Any] = {"router_logits": [torch.zeros(2, 3)], "of another kind": None}
    collector.set(whole)
    collected = Collected()
    for half in (0, 1):
        collected.begin(half)
        assert collector.get() == {"router_logits": [], "of another kind": []}
        collector.get()["router_logits"] += [torch.full((1, 3), float(each + half)) for each in (1, 5)]
    collected.end()
    _, first, second = whole["router_logits"]
    assert first.tolist() == [[1.0] * 3, [2.0] * 3]
    assert second.tolist() == [[5.0] * 3, [6.0] * 3]
    assert whole["of another kind"] is None


def test_runs_that_take_turns_compute_what_they_compute_alone(lanes: Lanes) -> None:
    for seed in range(20):
        schedules = [random_schedule(seed + 100 * number, num_tasks=17) for number in range(3)]
        work = [Arithmetic(schedule, device_for(lanes), (0.0, 0.1)) for schedule in schedules]

        def take_turns(schedules: list = schedules, work: list = work) -> None:
            pairs = enumerate(zip(schedules, work, strict=True))
            runs = [lanes.begin(each, case.bodies, f"run {number}", Log()) for number, (each, case) in pairs]
            for stop in (5, 5, 11, 17):
                for run in runs:
                    run.go(stop)
            for run in runs:
                run.finish()

        in_time(take_turns)
        assert [case.outcome() for case in work] == [serial_outcome(schedule) for schedule in schedules]
