# SPDX-License-Identifier: Apache-2.0
"""Paths of tokens are counted in training, of some forwards once each, and survive a checkpoint."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from ds_fsmoe.checkpoint.plan_state import read_paths
from ds_fsmoe.components.routing import BareRouting
from ds_fsmoe.engine import inference
from ds_fsmoe.observing.instruments import LayerCall
from ds_fsmoe.planning.lina.popularity import PathProfile
from ds_fsmoe.telemetry.paths import EVERY, MOST_TOKENS, PathProfiler
from tests.inference_models import Model, ds_config, tokens
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.sgd_engines import engine_of

LAYERS = {"L00": 5, "L01": 7, "L02": 5}


def forward(profiler: PathProfiler, choices: dict[str, torch.Tensor], is_training: bool = True) -> None:
    """A forward in which layers choose this; label -> [S, K]."""
    for label, index_SK in choices.items():
        call: Any = LayerCall(label, label, is_training, *[None] * 7)  # type: ignore[arg-type]
        call.gate = lambda index=index_SK, label=label: BareRouting.of(
            index.t().long(), torch.ones(index.shape).t(), LAYERS[label]
        )
        profiler.watch(call)
        call.gate()


def drawn(seed: int, num_tokens: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {label: torch.rand(num_tokens, each, generator=generator).topk(2).indices for label, each in LAYERS.items()}


def counted(forwards: list[dict[str, torch.Tensor]], length: int) -> dict[str, PathProfile]:
    """The profiles, layer by layer out of whole forwards."""
    found = {label: PathProfile(7, length) for label in LAYERS}
    for choices in forwards:
        firsts = [index[:, 0].numpy() for index in choices.values()]
        for number, (label, index) in enumerate(choices.items()):
            before = firsts[max(0, number - length) : number]
            paths = np.stack(before, 1) if before else np.zeros((len(index), 0), int)
            found[label].add(paths, index.numpy())
    return found


def same(found: dict[str, PathProfile], wanted: dict[str, PathProfile]) -> bool:
    arrays = [{label: each.as_arrays() for label, each in profiles.items()} for profiles in (found, wanted)]
    return all(
        np.array_equal(arrays[0][label][name], arrays[1][label][name]) for label in LAYERS for name in arrays[0][label]
    )


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from(("trains", "trains", "evaluates", "is paused"))), max_size=6
    ),
    *(st.integers(0, 3), st.integers(1, 3), st.sampled_from((1, 4, 8, 28, 29, 1000))),
)
def test_paths_are_counted_of_every_nth_forward_in_training_and_of_tokens_spread_over_it(
    forwards: list[tuple[int, str]], length: int, every: int, most: int
) -> None:
    profiler, wanted, number = PathProfiler(LAYERS, length, every=every, most_tokens=most), [], 0
    for seed, (size, what) in enumerate(forwards):
        choices = drawn(seed, size)
        profiler.is_paused = what == "is paused"
        forward(profiler, choices, is_training=what != "evaluates")
        if what == "trains":
            step = max(1, -(-size // most))
            wanted += [{label: each[::step] for label, each in choices.items()}] if number % every == 0 else []
            number += 1
    assert same(profiler.profiles(), counted(wanted, length))


def test_unless_said_otherwise_some_tokens_of_few_forwards_are_counted() -> None:
    profiler = PathProfiler(LAYERS)
    forwards = [drawn(seed, 3) for seed in range(2 * EVERY + 2)]
    for each in forwards:
        forward(profiler, each)
    assert same(profiler.profiles(), counted(forwards[::EVERY], 3))
    profiler = PathProfiler(LAYERS)
    forward(profiler, drawn(0, 2 * MOST_TOKENS + 1))
    assert 0 < profiler.profiles()["L01"].num_counted <= 2 * MOST_TOKENS


def test_other_tokens_in_the_middle_of_a_model_begin_new_paths_though_a_sample_of_them_is_as_large() -> None:
    for sizes, most in (((4, 4, 8), 4), ((8, 8, 5), 1000)):
        profiler = PathProfiler(LAYERS, 2, most_tokens=most)
        forward(profiler, {label: drawn(0, size)[label] for label, size in zip(LAYERS, sizes, strict=True)})
        assert profiler.profiles()["L02"].num_paths == 1
        assert profiler.profiles()["L01"].num_paths > 1


def test_a_forward_that_is_run_again_does_not_count() -> None:
    profiler = PathProfiler(LAYERS)
    choices = drawn(0, 11)

    def run(x: torch.Tensor) -> torch.Tensor:
        forward(profiler, choices)
        return x.square()

    x = torch.ones(1, requires_grad=True)
    checkpoint(run, x, use_reentrant=False).sum().backward()
    assert same(profiler.profiles(), counted([choices], 3))


def test_a_profile_is_the_same_after_a_checkpoint_and_a_state_of_another_kind_is_refused() -> None:
    profiler, forwards = PathProfiler(LAYERS, every=1), [drawn(seed, 19) for seed in range(2)]
    forward(profiler, forwards[0])
    file = io.BytesIO()
    torch.save(profiler.as_state(), file)
    file.seek(0)
    again = PathProfiler(LAYERS, every=1)
    again.go_on_with(again.read_state(torch.load(file, weights_only=True)))
    forward(again, forwards[1])
    assert same(again.profiles(), counted(forwards, 3))
    state = profiler.as_state()
    layers = state["layers"]
    for wrong in (
        *(None, state | {"format": 2}, state | {"layers": [1]}, state | {"layers": layers | {"L00": 3}}),
        state | {"layers": layers | {"L03": layers["L00"]}},
        state | {"layers": layers | {"L01": layers["L01"] | {"counts": torch.zeros(3)}}},
        PathProfiler(dict.fromkeys(LAYERS, 9)).as_state(),
        PathProfiler(LAYERS, 1).as_state(),
    ):
        with pytest.raises(ValueError, match="paths"):
            profiler.read_state(wrong)


def test_counts_of_several_ranks_are_added_up_for_one_of_another_number_of_them(tmp_path: Path) -> None:
    saved, files = [], []
    for rank in range(3):
        profiler = PathProfiler(LAYERS)
        forward(profiler, drawn(rank, 11 + rank))
        saved.append(drawn(rank, 11 + rank))
        files.append(tmp_path / f"{rank}.pt")
        torch.save({"paths": profiler.as_state()}, files[-1])
    torch.save({"paths": None}, tmp_path / "none.pt")
    now = PathProfiler(LAYERS)
    forward(now, drawn(9, 5))
    assert same(read_paths([*files, tmp_path / "none.pt"], now), counted(saved, 3))
    assert same(read_paths([files[2]], now), counted(saved[2:], 3))
    assert same(read_paths([], now), counted([], 3))


def test_profiles_travel_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    profiler, sent = PathProfiler(LAYERS), []
    forward(profiler, drawn(0, 11))

    def thrice(value: Any) -> list[Any]:
        sent.append(value)
        return [value] * 3

    monkeypatch.setattr(inference, "on_every_rank", thrice)
    running: Any = SimpleNamespace(instruments=[print, profiler.watch])
    assert same(inference._profiles_of(running), counted([drawn(0, 11)] * 3, 3))
    assert [set(each) for each in sent] == [set(PathProfile(5).as_arrays())] * len(LAYERS)


def on_fewer_or_more_ranks(rank: int, world_size: int, folder: str, saves: bool) -> dict[str, list[int]]:
    """Counts of experts, by layer, that this rank has saved or goes on with."""
    engine = engine_of(Model(6, 2), ds_config(2, placement={"profile_paths": True}))
    # What a job had counted before it loads is not what it goes on with.
    engine.backward(engine(tokens(rank, 5 + rank)).square().mean())
    engine.step()
    if saves:
        engine.save_checkpoint(folder, tag="saved")
    else:
        engine.load_checkpoint(folder, tag="saved")
    found = {label: each.as_arrays()["experts"].tolist() for label, each in engine.fsmoe.paths.profiles().items()}
    engine.destroy()
    return found


@sampled(("before", "after"), [(2, 4), (4, 2)])
@pytest.mark.long
def test_counts_go_on_over_another_number_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    place = str(tmp_path / "saved")
    saved = run_on_ranks(on_fewer_or_more_ranks, before, tmp_path / "first", place, True)
    found = run_on_ranks(on_fewer_or_more_ranks, after, tmp_path / "second", place, False)
    for label in saved[0]:
        there, here = (np.array([each[label] for each in of_ranks]).sum(0) for of_ranks in (saved, found))
        assert there.sum() == 2 * sum(5 + rank for rank in range(before))
        assert there.tolist() == here.tolist()
