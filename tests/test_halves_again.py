# SPDX-License-Identifier: Apache-2.0
"""Blocks whose activations are checkpointed run again by halves, in turns, when the backward comes to them.

Whole models are trained so in tests/test_halves.py.
"""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ds_fsmoe.execution.call import current_sub_batch
from ds_fsmoe.layer.replay import is_kept, runs_again, tape_torchs_functions
from tests.test_halves_in_turns import WIDTH, Model, forward, numbers, same, split
from tests.test_halves_in_turns import Block as PlainBlock


class Block(GradientCheckpointingLayer, PlainBlock):
    """A block as transformers' are, which notes what its forward makes besides, and in which kind of run."""

    def __init__(self, number: int, events: list[str]) -> None:
        PlainBlock.__init__(self, number, events)
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.kinds: list[tuple[bool, bool]] = []
        self.results: list[torch.Tensor] = []
        self.forwards = 0

    def forward(self, x_BLM: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        self.forwards += 1
        self.kinds.append((is_kept(), runs_again()))
        extra = torch.exp(x_BLM)
        self.made.append(weakref.ref(extra))
        y_BLM = PlainBlock.forward(self, x_BLM + torch.sigmoid(extra), mask)
        self.results.append(y_BLM.detach().clone())
        return y_BLM


def model_of(events: list[str], count: int = 2, use_reentrant: bool = False) -> Model:
    """A model whose blocks are checkpointed."""
    model = Model(events, "")
    model.blocks = nn.ModuleList(Block(number, events) for number in range(count))
    for block in model.blocks:
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=use_reentrant)
    return model


@pytest.mark.parametrize(("count", "use_reentrant", "batch"), [(1, False, 5), (3, True, 2), (3, False, 2)])
def test_numbers_are_those_of_the_whole_batch(count: int, use_reentrant: bool, batch: int) -> None:
    model = model_of([], count, use_reentrant)
    x, mask = torch.randn(batch, 3, WIDTH, requires_grad=True), torch.rand(batch, 3, 1)
    wanted = [*numbers(model, model(x, mask)), x.grad.clone()]
    splitter = split(model)
    x.grad = None
    found = [*numbers(model, forward(model, splitter, x, mask=mask)), x.grad]
    assert splitter.num_runs == 1
    same(found, wanted)
    # Twice when the whole batch was run and when it was watched, of which there was no backward; by halves four times.
    assert [block.forwards for block in model.blocks] == [2 + 1 + 4] * count


def test_a_block_runs_again_in_turns_once_and_the_order_of_the_backward_stays() -> None:
    events: list[str] = []
    model = model_of(events)
    splitter = split(model)
    events.clear()
    loss = forward(model, splitter, torch.randn(2, 3, WIDTH, requires_grad=True))
    forwards, _ = list(events), events.clear()
    loss.backward()
    assert [each for each in events if each.endswith("'")] == [f"{each}'" for each in reversed(forwards)]
    for number in (1, 0):
        again = [each for each in events if str(number) in each and not each.endswith("'")]
        at = [events.index(each) for each in again]
        names = ("attention{}a", "send{}a", "attention{}b", "send{}b", "experts{}a", "experts{}b", "back{}a", "back{}b")
        assert again == [each.format(number) for each in names]
        assert at == list(range(at[0], at[0] + len(at)))
    # The second block's tokens' gradients are under way when the first block runs again.
    assert events.index("send1b'") < events.index("attention0a") < events.index("send1a'")


def test_what_a_block_makes_is_not_kept_for_the_backward() -> None:
    model = model_of([])
    splitter = split(model)
    loss = forward(model, splitter, torch.randn(4, 3, WIDTH, requires_grad=True))
    gc.collect()
    assert [[each() for each in block.made[-2:]] for block in model.blocks] == [[None] * 2] * 2
    assert [block.kinds[-2:] for block in model.blocks] == [[(True, False)] * 2] * 2
    loss.backward()
    assert [block.kinds[-2:] for block in model.blocks] == [[(False, True)] * 2] * 2
    assert (is_kept(), runs_again(), current_sub_batch()) == (False, False, None)
    gc.collect()
    assert not any(each() is not None for block in model.blocks for each in block.made)


@pytest.mark.parametrize("casts", [True, False])
def test_a_block_runs_again_with_autocasting_as_it_was(casts: bool) -> None:
    model = model_of([])
    splitter, x = split(model), torch.randn(2, 3, WIDTH)
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        loss = forward(model, splitter, x)
    with torch.autocast("cpu", torch.bfloat16, enabled=not casts):
        loss.backward()
    assert splitter.num_runs == 1
    for block in model.blocks:
        assert all(map(torch.equal, block.results[-4:-2], block.results[-2:]))


@pytest.mark.parametrize(("place", "number"), [("forward", 0), ("again", 0), ("not checkpointed", 1)])
def test_a_half_that_fails_leaves_nothing_behind(place: str, number: int) -> None:
    model = Model([], "mmm") if place == "not checkpointed" else model_of([])
    splitter, x = split(model), torch.randn(4, 3, WIDTH)
    wanted = numbers(model, forward(model, splitter, x))
    once_more = place == "again"
    run = forward(model, splitter, x).backward if once_more else partial(forward, model, splitter, x)
    model.blocks[number].fails = True
    with pytest.raises(RuntimeError, match="on purpose"):
        run()
    assert (is_kept(), runs_again(), current_sub_batch()) == (False, False, None)
    model.blocks[number].fails = False
    same(numbers(model, forward(model, splitter, x)), wanted)


def test_a_graph_that_is_kept_has_a_second_backward_and_a_forward_that_differs_the_second_time_is_told() -> None:
    model = model_of([], 1)
    splitter = split(model)
    loss = forward(model, splitter, torch.randn(2, 3, WIDTH))
    loss.backward(retain_graph=True)
    first, forwards = [each.grad.clone() for each in model.parameters()], model.blocks[0].forwards
    loss.backward()
    same([each.grad for each in model.parameters()], [2 * each for each in first])
    assert model.blocks[0].forwards == forwards
    loss = forward(model, splitter, torch.randn(2, 3, WIDTH), mask=None)
    model.blocks[0].attention.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="its forward must be deterministic"):
        loss.backward()


def test_hooks_of_a_user_around_the_model_see_what_is_saved_of_neither_run_of_a_block() -> None:
    model = model_of([])
    splitter, x = split(model), torch.randn(2, 3, WIDTH)
    seen: list[torch.Size] = []
    noted = lambda tensor: seen.append(tensor.shape) or tensor  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        loss = forward(model, splitter, x)
    # What the loss saves, once.
    assert seen == [x.shape]
    loss.backward()


def test_blocks_that_drop_out_or_are_checkpointed_otherwise_stay_whole() -> None:
    model = model_of([])
    model.blocks[0].dropout = nn.Dropout(0.1)
    splitter, x = split(model), torch.randn(2, 3, WIDTH)
    assert "would draw other masks" in splitter.why_not
    tape_torchs_functions()
    model = model_of([])
    splitter = split(model)
    by_torch = checkpoint(partial(forward, model, splitter), x, use_reentrant=False)
    by_torch.backward()
    assert splitter.num_runs == 0
    plain = Model([])
    plain.blocks[1].gradient_checkpointing = True
    assert split(plain).why_not.endswith("it is checkpointed by itself, and recomputed alone")


def test_blocks_that_an_older_transformers_checkpoints_stay_whole_and_its_version_is_named(monkeypatch) -> None:
    # Before 5.23 the wrapper was around __call__ and not around forward.
    monkeypatch.setattr(Block, "forward", PlainBlock.forward)
    model = model_of([])
    monkeypatch.setattr("ds_fsmoe.two_batch.splitter.version", {"transformers": "5.17.0"}.get)
    said = "recomputed alone, as blocks of transformers before 5.23 do (5.17.0 is installed)"
    assert said in split(model).why_not
