# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Hugging Face models go on to the bit, move to other layouts, and give whole weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

pytest.importorskip("transformers")

from ds_fsmoe.checkpoint_files.whole import Whole
from ds_fsmoe.cli import main
from tests.hf_families import batch, model_of
from tests.ranks import run_on_ranks
from tests.test_hugging_face import ds_config, engine_of

SEQUENCES = 4
"""Of all ranks, in every step."""


class Layout(NamedTuple):
    world: int
    ep: int
    stage: int
    dtype: str = "float32"
    family: str = "olmoe"

    @property
    def name(self) -> str:
        return "-".join(map(str, self))


def make(layout: Layout, scale: float = 1.0) -> Any:
    """An engine with weights of the model, times a scale: what is loaded must replace them."""
    model = model_of(layout.family)
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(scale)
    config = ds_config(layout.stage, ep_size=layout.ep)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    if layout.dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    return engine_of(model, config)


def train(engine: Any, first: int, steps: int) -> list[float]:
    """Train some steps on the same sequences whatever the layout; the losses over all ranks."""
    losses = []
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(first, first + steps):
        x = batch(step, SEQUENCES).view(world, SEQUENCES // world, -1)[rank]
        loss = engine(input_ids=x, labels=x).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone().float()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses


def save_each(rank: int, world_size: int, layouts: list[Layout], folder: str) -> dict[str, list[float]]:
    """Save after two steps; the losses of the next two."""
    found = {}
    for layout in layouts:
        engine = make(layout)
        train(engine, 0, 2)
        engine.save_checkpoint(f"{folder}/{layout.name}", client_state={"seen": 17})
        whole = engine.save_16bit_model(f"{folder}/{layout.name}-16bit")
        assert whole
        found[layout.name] = train(engine, 2, 2)
        engine.destroy()
    return found


def load_each(
    rank: int, world_size: int, pairs: list[tuple[Layout, Layout]], folder: str
) -> dict[tuple[str, str], list[float]]:
    """Load into another engine; the losses of the next two steps."""
    found = {}
    for source, target in pairs:
        engine = make(target, scale=1.5)
        train(engine, 7, 1)
        _, client_state = engine.load_checkpoint(f"{folder}/{source.name}")
        assert (client_state["seen"], engine.global_steps) == (17, 2)
        found[source.name, target.name] = train(engine, 2, 2)
        engine.destroy()
    return found


TWO = [Layout(2, 2, 0), Layout(2, 2, 2), Layout(2, 2, 3), Layout(2, 1, 3), Layout(2, 2, 3, "bfloat16")]
FOUR = [Layout(4, 2, 0), Layout(4, 4, 1), Layout(4, 2, 3), Layout(4, 4, 2, "bfloat16")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    folder = tmp_path_factory.mktemp("saved")
    of_ranks = run_on_ranks(save_each, 2, folder, TWO, str(folder))
    return folder, of_ranks[0]


def folder_of(layout: Layout, root: Path) -> dict[str, torch.Tensor]:
    return torch.load(root / f"{layout.name}-16bit" / "pytorch_model.bin", weights_only=True)


@pytest.mark.parametrize("layout", TWO, ids=lambda each: each.name)
def test_one_file_of_weights_has_those_of_the_checkpoint_under_the_models_own_names(
    saved: tuple[Path, dict], layout: Layout
) -> None:
    weights = folder_of(layout, saved[0])
    whole = Whole(saved[0] / layout.name / "global_step2")
    assert list(weights) == list(model_of(layout.family).state_dict())
    assert set(whole.names()) == set(weights)
    assert [name for name, each in weights.items() if not torch.equal(whole.weights(name), each)] == []


@pytest.mark.parametrize("layout", TWO, ids=lambda each: each.name)
def test_convert_writes_what_save_pretrained_of_the_whole_model_writes(
    saved: tuple[Path, dict], layout: Layout, tmp_path: Path
) -> None:
    model = model_of(layout.family).to(getattr(torch, layout.dtype))
    model.load_state_dict(folder_of(layout, saved[0]))
    model.save_pretrained(tmp_path / "theirs")
    assert main(["convert", str(saved[0] / layout.name), str(tmp_path / "ours"), "--to", "huggingface"]) == 0
    theirs, ours = (load_file(tmp_path / each / "model.safetensors") for each in ("theirs", "ours"))
    assert {name: (each.dtype, each.shape) for name, each in ours.items()} == {
        name: (each.dtype, each.shape) for name, each in theirs.items()
    }
    assert [name for name, each in theirs.items() if not torch.equal(ours[name], each)] == []
    loaded, said = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not said["missing_keys"]
    assert [name for name, each in model.state_dict().items() if not torch.equal(loaded.state_dict()[name], each)] == []


def test_a_run_that_is_resumed_goes_on_to_the_bit(saved: tuple[Path, dict], tmp_path: Path) -> None:
    folder, losses = saved
    found = run_on_ranks(load_each, 2, tmp_path, [(each, each) for each in TWO], str(folder))[0]
    assert found == {(each.name, each.name): losses[each.name] for each in TWO}


def test_a_run_goes_on_in_another_layout(saved: tuple[Path, dict], tmp_path: Path) -> None:
    folder, losses = saved
    pairs = [(TWO[0], FOUR[1]), (TWO[1], FOUR[2]), (TWO[2], FOUR[0]), (TWO[3], FOUR[2]), (TWO[4], FOUR[3])]
    found = run_on_ranks(load_each, 4, tmp_path, pairs, str(folder))[0]
    for (source, target), then in found.items():
        rtol = 1e-2 if "bfloat16" in target else 1e-5
        assert then == pytest.approx(losses[source], rel=rtol), (source, target)
