# SPDX-License-Identifier: Apache-2.0
"""Inference with experts that come and go begins where training has left them, and leaves all as it was."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_fsmoe.planning.popularity import PathProfile
from tests.inference_models import WAYS, Model, ds_config, engine_of, furthest, plain, tokens, watched
from tests.ranks import run_on_ranks


def moved(rank: int, world_size: int) -> list[str]:
    """What differs where experts have moved in training, and one has a replica."""
    import ds_fsmoe

    asked = {"policy": "balanced", "spare_experts": 1, "every": 1000}
    engine = engine_of(Model(6, 2), ds_config(world_size, placement=asked))
    placement = engine.fsmoe.placement.now["L01"]
    wanted = placement.swapped(0, placement.per_rank + 1)
    wanted = wanted.with_replicas({placement.num_local: wanted.expert_of_place[placement.per_rank]})
    engine.fsmoe.placement.go_to({"L01": wanted})
    x_SM = tokens(rank, 31)
    by_plain = plain(engine, x_SM)
    said = []
    for name in ("no estimate", "weights from home, no estimate"):
        with ds_fsmoe.inference(engine, **WAYS[name]) as happened:
            found = engine(x_SM)
        if furthest(found, by_plain) > 1e-5 or len(happened.layers) != 3:
            said.append(f"{name}: off by {furthest(found, by_plain):.1e}, {happened}")
    if not torch.equal(plain(engine, x_SM), by_plain) or engine.fsmoe.placement.now["L01"] != wanted:
        said.append("the placement is not as before")
    engine.destroy()
    return said


def test_experts_that_have_moved_in_training_are_found(tmp_path: Path) -> None:
    assert run_on_ranks(moved, 2, tmp_path) == [[], []]


def comes_and_goes(rank: int, world_size: int) -> list[str]:
    """What is not as it was after inference, ended by itself or by an error."""
    import ds_fsmoe

    said = []
    engine = engine_of(Model(6, 2), ds_config(world_size))
    watched(engine)
    engine.backward(engine(tokens(rank, 32)).square().mean())
    engine.step()
    engine.module.blocks[1].eval()
    running, layers = engine.fsmoe.running, list(engine.fsmoe.inner_layers.values())

    def as_it_is() -> list[Any]:
        states = [
            (each.fsmoe.placed, each.fsmoe.replicas, each.fsmoe.parts, len(each._forward_hooks)) for each in layers
        ]
        training = [each.training for each in engine.module.modules()]
        return [states, training, list(running.instruments), torch.is_grad_enabled()]

    before, alive = as_it_is(), []
    for error in (None, KeyError("of the script")):
        try:
            with ds_fsmoe.inference(engine) as happened:
                engine(tokens(rank, 9))
                alive += [weakref.ref(each.fsmoe.placed.held) for each in layers]
                if any(each.training for each in engine.module.modules()) or torch.is_grad_enabled():
                    said.append("it is not in evaluation")
                if error is not None:
                    raise error
        except KeyError:
            pass
        if as_it_is() != before:
            said.append(f"after {error!r}: {as_it_is()} for {before}")
        gc.collect()
        if any(each() is not None for each in alive) or len(alive) < 3:
            said.append(f"after {error!r}: weights are still there")
        if any(each.calls != 1 for each in happened.layers.values()):
            said.append(f"{happened}")
    loss = engine(tokens(rank, 32)).square().mean()
    engine.backward(loss)
    engine.step()
    engine.destroy()
    return said


def test_all_is_as_before_when_it_has_ended(tmp_path: Path) -> None:
    assert run_on_ranks(comes_and_goes, 2, tmp_path) == [[], []]


def refused(rank: int, world_size: int) -> list[str]:
    """What is said of wrong options, and of a model of one rank's experts."""
    import ds_fsmoe

    engine = engine_of(Model(6, 2), ds_config(world_size))
    counted = PathProfile(4)
    counted.add(np.zeros((1, 0), int), np.zeros((1, 1), int))
    said = []
    wrong: list[dict[str, Any]] = [
        {"path_length": -1},
        {"most_per_rank": 0},
        {"weights": "disk"},
        {"estimate": False, "second_phase": False},
        {"second_phase": False},
        {"profiles": {"L00": counted, "L01": PathProfile(6)}},
        {"profiles": {"L00": counted}},
    ]
    for options in wrong:
        try:
            with ds_fsmoe.inference(engine, **options):
                said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    said.append(str(engine.module.training))
    engine.destroy()
    engine = engine_of(Model(6, 2), ds_config(1))
    x_SM = tokens(rank, 7)
    wanted = plain(engine, x_SM)
    with ds_fsmoe.inference(engine) as happened:
        found = engine(x_SM)
    said += [str(torch.equal(found, wanted)), *happened.left.values()]
    engine.destroy()
    return said


def test_wrong_options_are_refused_and_layers_of_one_rank_left(tmp_path: Path) -> None:
    found, other = run_on_ranks(refused, 2, tmp_path)
    assert found == other
    assert "path_length = -1" in found[0]
    assert "most_per_rank = 0" in found[1]
    assert "weights = 'disk'" in found[2]
    assert "one of them must be on" in found[3]
    assert "no paths of tokens were counted" in found[4]
    assert "(4, 3), (6, 3)" in found[5]
    assert "6 or more" in found[6]
    assert found[7:9] == ["True", "True"]
    assert found[9:] == ["one rank has all of its experts"] * 3


def generating(rank: int, world_size: int) -> list[str]:
    """What differs of texts that are unlike on each rank in number and length."""
    import ds_fsmoe
    from tests.hf_families import batch as texts
    from tests.hf_families import model_of

    model = model_of("olmoe")
    model.generation_config.eos_token_id = None
    engine = engine_of(model, ds_config(world_size, stage=1, num_chunks=2))
    watched(engine)
    x = texts(0, world_size)[rank : rank + 1]
    engine.backward(engine(input_ids=x, labels=x).loss)
    engine.step()
    prompt = texts(7 + rank, 1 + rank, 3 + 4 * rank)
    how = {"max_new_tokens": 5 + 6 * rank, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    engine.eval()
    wanted = engine.module.generate(input_ids=prompt, **how)
    engine.train()
    with ds_fsmoe.inference(engine.module) as happened:
        found = engine.module.generate(input_ids=prompt, **how)
    said = [] if torch.equal(found, wanted) else [f"{found.tolist()} for {wanted.tolist()}"]
    if any(each.calls < 5 + 6 * (world_size - 1) for each in happened.layers.values()):
        said.append(f"{happened}")
    engine.destroy()
    return said


def test_texts_are_those_that_are_generated_without(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert run_on_ranks(generating, 2, tmp_path) == [[], []]
