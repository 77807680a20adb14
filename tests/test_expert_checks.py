# SPDX-License-Identifier: Apache-2.0
"""Experts that break their law are named, with the layer they are in: a change of shape always, the rest if asked.

So are widths that do not fit, in a layer by hand and in an engine, and layers with more chunks than slots.
"""

from __future__ import annotations

import gc
import itertools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ds_fsmoe import (
    DenseOrder,
    GPTFeedForward,
    LayerError,
    LinearGate,
    MixtralFeedForward,
    MOELayer,
    SimpleOrder,
    SoftMoEGate,
)
from ds_fsmoe.checks import first_forwards
from ds_fsmoe.checks.first_forwards import FirstForwards
from tests.calls import call_of
from tests.logged import heard
from tests.ranks import run_on_ranks
from tests.small_model import WIDTH, Case, batch, small_engine

CASE = Case(1, 0, "fp32", 1, 2, True)


class Forgets(nn.Sequential):
    """Its last row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., :-1, :]


class Centers(nn.Module):
    """Takes the mean of all rows out of each."""

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        self.inner = like

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) - x.mean(dim=-2, keepdim=True)


def with_dropout(expert: nn.Module) -> nn.Module:
    return nn.Sequential(expert, nn.Dropout(0.5))


def trained(
    rank: int, change: Callable[[nn.Module], nn.Module], block: dict[str, Any], on_rank: int | None
) -> dict[str, Any]:
    """Three steps; the second expert of the second layer is changed, on every rank or on one."""
    said = heard()
    engine = small_engine(CASE, 0, block)
    experts = engine.module.moes[1].deepspeed_moe.experts.deepspeed_experts
    if on_rank in (None, rank):
        experts[1] = change(experts[1])
    calls: list[int] = []
    experts[0].register_forward_hook(lambda *_: calls.append(len(calls)))
    found: dict[str, Any] = {"error": "", "calls of each step": [], "losses": []}
    try:
        engine.eval()
        engine(*batch(0, rank, torch.float32))
        engine.train()
        torch.manual_seed(rank)
        for step in range(3):
            calls.clear()
            loss, _ = engine(*batch(step, rank, torch.float32))
            found["calls of each step"].append(len(calls))
            engine.backward(loss)
            engine.step()
            found["losses"].append(loss.item())
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    with pytest.raises(LayerError) as wide:
        engine.module.moes[1](torch.randn(7, WIDTH + 1))
    found["wide"] = str(wide.value)
    said.end()
    engine.destroy()
    words = ("row-wise", "run in one chunk", "runs in one chunk")
    return found | {"said": [each for each in said.lines if any(word in each for word in words)]}


CHECKED = {"debug": {"check_experts": True}}


RUNS: dict[str, tuple[Callable[[nn.Module], nn.Module], dict[str, Any], int | None]] = {
    "centers": (Centers, CHECKED, None),
    "one rank centers": (Centers, CHECKED, 1),
    "nobody asks": (Centers, {}, None),
    "good": (lambda expert: expert, CHECKED, None),
    "good, nobody asks": (lambda expert: expert, {}, None),
    "dropout in chunks": (with_dropout, CHECKED | {"num_chunks": {"forward": 3, "backward": 2}}, None),
    "dropout and centers": (lambda expert: Centers(with_dropout(expert)), CHECKED | {"num_chunks": 2}, None),
    "forgets": (Forgets, {}, None),
    "forgets in chunks": (Forgets, {"num_chunks": {"forward": 3, "backward": 2}}, None),
}


def train_all(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    return {name: trained(rank, *run) for name, run in RUNS.items()}


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_on_ranks(train_all, 2, tmp_path_factory.mktemp("ranks"))


def test_an_expert_that_looks_at_other_rows_is_named_with_its_layer(of_ranks: list) -> None:
    for found in of_ranks:
        for name in ("centers", "dropout and centers"):
            assert found[name]["error"].startswith(
                "LayerError: moes.1: expert 1: expert Centers is not row-wise: a row"
            )
            assert found[name]["losses"] == []


def test_all_ranks_raise_if_one_has_to(of_ranks: list) -> None:
    for found in of_ranks:
        error = found["one rank centers"]["error"]
        assert error.startswith("DisagreementError: the ranks disagree about whether experts are row-wise")
        assert "experts of moes.1: rank 0: 'row-wise'; rank 1: 'moes.1: expert 1: expert Centers" in error


def test_good_experts_are_tried_once_and_others_unless_asked_not_at_all(of_ranks: list) -> None:
    for found in of_ranks:
        checked, unchecked, wrong = found["good"], found["good, nobody asks"], found["nobody asks"]
        assert checked["error"] == unchecked["error"] == wrong["error"] == ""
        assert checked["losses"] == unchecked["losses"]
        assert checked["said"] == []
        first, *later = checked["calls of each step"]
        assert first > 1
        assert later == [1, 1]
        assert wrong["calls of each step"] == [1, 1, 1]


def test_an_expert_that_changes_the_number_of_rows_is_named_without_being_asked(of_ranks: list) -> None:
    for found, name in itertools.product(of_ranks, ("forgets", "forgets in chunks")):
        error = found[name]["error"].split("\n")[0]
        assert "moes.1: expert 1: expert Forgets returned (" in error
        assert error.endswith("an expert must return a row of the same width for every row")


def test_dropout_is_no_error_where_it_would_be_wrong_in_chunks_for_it_is_not_cut(of_ranks: list) -> None:
    said = "moes.1 runs in one chunk (expert 1: 1, a Dropout, draws random numbers, and in chunks it would draw others)"
    for rank, found in enumerate(of_ranks):
        assert found["dropout in chunks"]["error"] == ""
        assert found["dropout in chunks"]["said"] == ([said] if rank == 0 else [])


# ---- widths


def layer_of(gate: Any = None, order: Any = None, width: int = 16, **options: Any) -> MOELayer:
    return MOELayer(gate or LinearGate(k=2), order or SimpleOrder(), model_dim=width, num_experts=4, **options)


@pytest.mark.parametrize(
    ("expert", "words"),
    [
        (nn.Linear(4, 16), "does not accept rows of shape [1, 1, 16]: "),
        (nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), "returned [1, 1, 8] for [1, 1, 16]"),
        (nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(33, 16)), "does not accept rows of shape [1, 1, 16]"),
        (GPTFeedForward(8, 32), "does not accept rows of shape [1, 1, 16]"),
        (MixtralFeedForward(8, 32), "does not accept rows of shape [1, 1, 16]"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, nn.Module) else "",
)
def test_an_expert_of_another_width_is_named(expert: nn.Module, words: str) -> None:
    with pytest.raises(LayerError) as caught:
        layer_of(expert_impl=expert)(torch.randn(3, 5, 16))
    assert str(caught.value).startswith(f"MOELayer: expert 0, a {type(expert).__name__}, {words}")
    assert str(caught.value).endswith("must return a row of the layer's width, M = 16, for every row")


@pytest.mark.parametrize(("gate", "order"), [(LinearGate(), SimpleOrder()), (SoftMoEGate(), DenseOrder())])
def test_an_input_of_another_width_is_named(gate: nn.Module, order: nn.Module) -> None:
    layer = layer_of(gate, order, expert_dim=8)
    for shape in ((3, 5, 6), (3, 32), ()):
        with pytest.raises(LayerError) as caught:
            layer(torch.randn(shape))
        assert str(caught.value) == f"MOELayer: its input has shape {list(shape)}: must be [..., M = 16]"


def test_in_an_engine_the_layer_of_an_input_of_another_width_is_named_by_its_path(of_ranks: list) -> None:
    for found in of_ranks:
        assert found["good"]["wide"] == f"moes.1: its input has shape [7, {WIDTH + 1}]: must be [..., M = {WIDTH}]"


@pytest.mark.parametrize("degree", [1, 2])
def test_an_expert_that_autograd_runs_is_named_with_the_rows_it_had_and_other_failures_are_left(degree: int) -> None:
    layer = layer_of(expert_impl=nn.Linear(16, 8), pipeline_degree=degree)
    sentence = r"^MOELayer: expert 0: expert Linear returned \(\d, \d, 8\) for \(\d, \d, 16\): an expert"
    with pytest.raises(ValueError, match=sentence):
        layer(torch.randn(3, 5, 16))

    def fails(*_: Any) -> None:
        raise RuntimeError("the disk is on fire")

    layer = layer_of(expert_impl=nn.Linear(16, 16), pipeline_degree=degree)
    layer.local_experts().experts[0].register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match=r"^the disk is on fire"):
        layer(torch.randn(3, 16))


# ---- chunks


@pytest.mark.parametrize(
    ("degrees", "num_tokens", "words"),
    [
        ((200, 3), 16, "L00 and 1 other layer(s): use a smaller fsmoe.num_chunks than 200 and 3 (an expert has 4"),
        ((1, 5), 16, "L00 and 1 other layer(s): use a smaller fsmoe.num_chunks than 1 and 5"),
        ((4, 4), 16, ""),
        ((5, 5), 32, ""),
    ],
)
def test_chunks_beyond_the_slots_are_said_once_to_be_empty(
    degrees: tuple[int, int], num_tokens: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, int]] = []
    monkeypatch.setattr(first_forwards, "log_on_rank_0", lambda text, level=0, details="": said.append((text, level)))
    watching, x = FirstForwards(), torch.randn(num_tokens, 8)
    for label in ("L00", "L01"):
        layer = layer_of(LinearGate(k=1), width=8, expert_dim=8, pipeline_degree=degrees)
        layer(x)
        state = layer._state
        state.pipeline = call_of(state.pipeline, x, layer.local_experts(), watching, label)
        layer(x)
    for _ in range(2):
        watching.log_saved_bytes()
    warned = [text for text, level in said if level == logging.WARNING]
    assert [text.startswith(words) for text in warned] == [True] * bool(words)


def test_a_watched_call_is_gone_with_its_last_reader_and_waits_for_no_collection_of_garbage() -> None:
    watching, layer = FirstForwards(keeps_calls=True), layer_of(LinearGate(k=1), width=8, expert_dim=8)
    layer(torch.randn(16, 8))
    gc.collect()
    gc.disable()
    try:
        inputs = torch.randn(16, 8)
        gone = weakref.ref(inputs)
        watched = call_of(layer._state.pipeline, inputs, layer.local_experts(), watching, "L00")
        del inputs
        assert gone() is None
        assert watched.degrees == (1, 1)
    finally:
        gc.enable()
