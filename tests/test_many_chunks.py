# SPDX-License-Identifier: Apache-2.0
"""More chunks than slots are said to be empty, once, when the sizes are known."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch

from ds_fsmoe import LinearGate, MOELayer, SimpleOrder
from ds_fsmoe.checks import first_forwards
from ds_fsmoe.checks.first_forwards import FirstForwards
from tests.calls import call_of


@pytest.mark.parametrize(
    ("degrees", "num_tokens", "words"),
    [
        (
            (200, 3),
            16,
            "L00 and 1 other layer(s): use a smaller fsmoe.num_chunks than 200 and 3 (an expert has 4 slots",
        ),
        ((1, 5), 16, "L00 and 1 other layer(s): use a smaller fsmoe.num_chunks than 1 and 5"),
        ((4, 4), 16, ""),
        ((5, 5), 32, ""),
    ],
)
def test_chunks_beyond_the_slots_are_said_to_be_empty(
    degrees: tuple[int, int], num_tokens: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, int]] = []
    monkeypatch.setattr(first_forwards, "log_on_rank_0", lambda text, level=0, details="": said.append((text, level)))
    watching = FirstForwards()
    x = torch.randn(num_tokens, 8)
    for label in ("L00", "L01"):
        layer = MOELayer(
            LinearGate(k=1), SimpleOrder(), model_dim=8, num_experts=4, expert_dim=8, pipeline_degree=degrees
        )
        layer(x)
        state, experts = layer._state, layer.local_experts()
        state.pipeline = call_of(state.pipeline, x, experts, watching, label)
        layer(x)
    watching.log_saved_bytes()
    watching.log_saved_bytes()
    warned = [text for text, level in said if level == logging.WARNING]
    assert [text.startswith(words) for text in warned] == [True] * bool(words)


def test_a_watched_call_is_gone_with_its_last_reader_and_waits_for_no_collection_of_garbage() -> None:
    watching = FirstForwards(keeps_calls=True)
    layer = MOELayer(LinearGate(k=1), SimpleOrder(), model_dim=8, num_experts=4, expert_dim=8)
    x = torch.randn(16, 8)
    layer(x)
    pipeline, experts = layer._state.pipeline, layer.local_experts()
    gc.collect()
    gc.disable()
    try:
        inputs = torch.randn(16, 8)
        gone = weakref.ref(inputs)
        watched = call_of(pipeline, inputs, experts, watching, "L00")
        del inputs
        assert gone() is None
        assert watched.degrees == (1, 1)
    finally:
        gc.enable()
