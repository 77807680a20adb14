# SPDX-License-Identifier: Apache-2.0
"""What the table at the start says of slots that stay empty."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from deepspeed.moe.sharded_moe import TopKGate

from ds_fsmoe.components.gates.expert_choice import ExpertChoiceGate
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.engine.state import describe_alltoall, describe_dispatch
from ds_fsmoe.layer.state import LayerState
from ds_fsmoe.planning.workload import NODE_DEDUPLICATED


def said(
    *gates: Any, dispatch: str = "auto", duplicates: Any = None, tuner: Any = None, plan: Any = None, **block: Any
) -> str:
    """What is said of layers with these gates."""
    alone = SimpleNamespace(collectives=SimpleNamespace(ep_group=None))
    parts: Any = SimpleNamespace(dispatch=dispatch, callbacks=())
    running: Any = SimpleNamespace(block=FSMoEBlock(enabled=True, **block))
    state = LayerState(parts, parts, running, "L00", "moe", None, alone, plan, duplicates=duplicates)  # type: ignore[arg-type]
    layers = {str(number): SimpleNamespace(gate=gate, fsmoe=state) for number, gate in enumerate(gates)}
    return describe_dispatch(
        SimpleNamespace(inner_layers=layers, block=SimpleNamespace(dispatch=dispatch), autotune=tuner)  # type: ignore[arg-type]
    )


def topk(factor: float, drops: bool = True) -> TopKGate:
    return TopKGate(8, 4, k=2, capacity_factor=factor, drop_tokens=drops)


EMPTY = "padded: at least 20% of the slots are empty; "
BY_HAND = f'{EMPTY}"dispatch": "unpadded" does not send these'


def test_slots_that_stay_empty_are_named_with_the_word_that_sends_none_of_them() -> None:
    assert said(topk(1.25)) == said(topk(2.0), topk(1.25)) == BY_HAND
    for factor in (0.5, 1.0, 1.1):
        assert said(topk(factor)) == said(topk(factor), topk(1.25)) == "padded", "all may be taken"
    # What was asked for or has no rows is only named.
    for dispatch in ("padded", "unpadded"):
        assert said(topk(1.25), dispatch=dispatch) == dispatch
    assert said(topk(1.25, drops=False)) == "unpadded"
    assert said(ExpertChoiceGate(capacity_factor=2.0)) == said(topk(1.25), duplicates=object()) == "padded"
    assert said() == "auto"


def test_what_the_autotuner_will_find_or_has_found_is_said_where_it_may_choose() -> None:
    result = SimpleNamespace(rows=[SimpleNamespace(labels=("L00",), empty_share=0.31)])
    tuner = SimpleNamespace(is_settled=False, has_chosen=False, result=result)
    assert said(topk(1.25), tuner=tuner) == f'{EMPTY}the autotuner compares "unpadded", which does not send these'
    assert said(topk(1.25), tuner=tuner, num_chunks=1) == BY_HAND
    tuner.is_settled = True
    assert said(topk(1.25), tuner=tuner) == BY_HAND
    tuner.has_chosen = True
    no_faster = f'{EMPTY}the autotuner found "unpadded", which does not send these, no faster'
    assert said(topk(1.25), tuner=tuner) == no_faster
    plan, chosen = SimpleNamespace(is_unpadded=True), "unpadded, chosen by the autotuner: "
    share = f"{chosen}31% of the slots are empty; equal to padded to rounding"
    assert said(topk(1.25), tuner=tuner, plan=plan) == share
    assert said(topk(1.25), plan=plan) == f"{chosen}empty slots are not sent"


def test_an_alltoall_that_runs_as_it_was_asked_for_is_named_once() -> None:
    of = lambda name: SimpleNamespace(alltoall=name)  # noqa: E731
    for run, words in ((NODE_DEDUPLICATED, NODE_DEDUPLICATED), ("flat", f"{NODE_DEDUPLICATED}, run as flat")):
        layers: Any = {"L00": SimpleNamespace(pipeline=SimpleNamespace(forward=of(run)))}
        running: Any = SimpleNamespace(plan=of(NODE_DEDUPLICATED))
        assert describe_alltoall(SimpleNamespace(running=running, inner_layers=layers)) == words  # type: ignore[arg-type]
