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

from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.checkpoint_files.whole import Whole
from ds_fsmoe.cli import main
from tests.hf_families import batch, model_of
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.test_hugging_face import ds_config, engine_of

pytestmark = pytest.mark.long

SEQUENCES = 4
"""Of all ranks, in every step."""


class Layout(NamedTuple):
    world: int
    ep: int
    stage: int
    dtype: str = "float32"
    family: str = "olmoe"
    frozen: str = ""
    """What is not trained: parameters with this in their names."""
    esp: int = 1

    @property
    def name(self) -> str:
        return "-".join(map(str, self))


def make(layout: Layout, scale: float = 1.0) -> Any:
    """An engine with weights of the model, times a scale: what is loaded must replace them."""
    model = model_of(layout.family)
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(scale)
    for name, each in model.named_parameters():
        each.requires_grad_(not layout.frozen or layout.frozen not in name)
    cut = {"expert_tensor_parallel_size": layout.esp} if layout.esp > 1 else {}
    config = ds_config(layout.stage, ep_size=layout.ep, **cut)
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


def save_stock(rank: int, world_size: int, folder: str, stages: list[int]) -> None:
    """Save with DeepSpeed alone, with nothing of ours, after two steps."""
    import deepspeed

    for stage in stages:
        model = model_of("olmoe")
        model.model.layers[0].mlp.experts.requires_grad_(False)
        config = {key: each for key, each in ds_config(stage).items() if key != "fsmoe"}
        engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
        train(engine, 0, 2)
        engine.save_checkpoint(f"{folder}/stock{stage}", client_state={"seen": 17})
        with deepspeed.zero.GatheredParameters(list(model.parameters()) if stage == 3 else []):
            if rank == 0:
                torch.save(model.state_dict(), f"{folder}/stock{stage}.pt")
        engine.destroy()


def load_stock(rank: int, world_size: int, folder: str, stages: list[tuple[int, int]]) -> list[str]:
    """What differs, in whole weights, after a warm start from what stock DeepSpeed has saved."""
    import ds_fsmoe

    said = []
    for source, target in stages:
        layout = Layout(4, 2, target)
        engine = make(layout, scale=1.5)
        with pytest.raises(CheckpointError, match="load_optimizer_states=False"):
            engine.load_checkpoint(f"{folder}/stock{source}")
        _, client_state = engine.load_checkpoint(f"{folder}/stock{source}", load_optimizer_states=False)
        if (client_state["seen"], engine.global_steps) != (17, 2):
            said.append(f"{source} to {target}: {client_state['seen']}, {engine.global_steps}")
        weights = ds_fsmoe.whole_state_dict(engine)
        if rank == 0:
            wanted = torch.load(f"{folder}/stock{source}.pt", weights_only=True)
            said += [f"{source} to {target}: {each}" for each in wanted if not torch.equal(wanted[each], weights[each])]
        engine.destroy()
    return said


@sampled("stages", [[(3, 2)], [(0, 0), (0, 3), (2, 2), (3, 3), (3, 1)]], kept=[0])
def test_weights_of_stock_deepspeed_are_a_warm_start_at_every_stage(
    stages: list[tuple[int, int]], tmp_path: Path
) -> None:
    folders = tmp_path / "first", tmp_path / "second"
    for each in folders:
        each.mkdir()
    run_on_ranks(save_stock, 2, folders[0], str(tmp_path), sorted({source for source, _ in stages}))
    found = run_on_ranks(load_stock, 4, folders[1], str(tmp_path), stages)
    assert [each for of_rank in found for each in of_rank] == []


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


PARTLY = {"family": "gpt_oss", "frozen": "layers.0."}
TWO = [
    *(Layout(2, 2, 0), Layout(2, 2, 2), Layout(2, 2, 3), Layout(2, 1, 3), Layout(2, 2, 3, "bfloat16")),
    *(Layout(2, 2, 2, **PARTLY), Layout(2, 2, 3, **PARTLY), Layout(2, 1, 2, family="gpt_oss", esp=2)),
]
FOUR = [
    *(Layout(4, 2, 0), Layout(4, 4, 1), Layout(4, 2, 3), Layout(4, 4, 2, "bfloat16")),
    *(Layout(4, 2, 2, **PARTLY), Layout(4, 2, 3, **PARTLY), Layout(4, 2, 1, family="gpt_oss", esp=2)),
    Layout(4, 4, 3, family="gpt_oss"),
]
SAMPLE = [1, 4, 6, 7]
"""Those of two ranks that are saved in every run of the tests."""


class Saved:
    """What was saved on two ranks. The rest of the layouts is saved when one of them is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.losses: dict[str, list[float]] = {}

    def of(self, *layouts: Layout) -> Path:
        """The folder in which these are."""
        sample = [TWO[each] for each in SAMPLE]
        wanted = sample if set(layouts) <= set(sample) else TWO
        missing = [each for each in wanted if each.name not in self.losses]
        if missing:
            ranks = self.folder / f"ranks {len(self.losses)}"
            self.losses |= run_on_ranks(save_each, 2, ranks, missing, str(self.folder))[0]
        return self.folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("saved"))


def folder_of(layout: Layout, root: Path) -> dict[str, torch.Tensor]:
    return torch.load(root / f"{layout.name}-16bit" / "pytorch_model.bin", weights_only=True)


@sampled("layout", TWO, kept=SAMPLE, ids=lambda each: each.name)
def test_one_file_of_weights_has_those_of_the_checkpoint_under_the_models_own_names(
    saved: Saved, layout: Layout
) -> None:
    folder = saved.of(layout)
    weights = folder_of(layout, folder)
    whole = Whole(folder / layout.name / "global_step2")
    assert list(weights) == list(model_of(layout.family).state_dict())
    assert set(whole.names()) == set(weights)
    assert [name for name, each in weights.items() if not torch.equal(whole.weights(name), each)] == []


@sampled("layout", TWO, kept=SAMPLE, ids=lambda each: each.name)
def test_convert_writes_what_save_pretrained_of_the_whole_model_writes(
    saved: Saved, layout: Layout, tmp_path: Path
) -> None:
    folder = saved.of(layout)
    model = model_of(layout.family).to(getattr(torch, layout.dtype))
    model.load_state_dict(folder_of(layout, folder))
    model.save_pretrained(tmp_path / "theirs")
    assert main(["convert", str(folder / layout.name), str(tmp_path / "ours"), "--to", "huggingface"]) == 0
    theirs, ours = (load_file(tmp_path / each / "model.safetensors") for each in ("theirs", "ours"))
    assert {name: (each.dtype, each.shape) for name, each in ours.items()} == {
        name: (each.dtype, each.shape) for name, each in theirs.items()
    }
    assert [name for name, each in theirs.items() if not torch.equal(ours[name], each)] == []
    loaded, said = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not said["missing_keys"]
    assert [name for name, each in model.state_dict().items() if not torch.equal(loaded.state_dict()[name], each)] == []


@pytest.mark.parametrize("layout", [TWO[1], TWO[4]], ids=lambda each: each.name)
def test_convert_takes_the_folder_of_one_tag_and_the_config_names_the_data_type_that_was_asked_for(
    saved: Saved, layout: Layout, tmp_path: Path
) -> None:
    asked = "float32" if layout.dtype == "bfloat16" else "bfloat16"
    source = saved.of(layout) / layout.name / "global_step2"
    assert main(["convert", str(source), str(tmp_path / "ours"), "--to", "huggingface", "--dtype", asked]) == 0
    loaded = type(model_of(layout.family)).from_pretrained(tmp_path / "ours")
    assert {each.dtype for each in loaded.parameters()} == {getattr(torch, asked)}
    whole = Whole(source)
    for name, each in loaded.named_parameters():
        assert torch.equal(each, whole.part(name, "fp32").to(each.dtype)), name


@sampled("layouts", [[TWO[each] for each in SAMPLE], TWO], kept=[0], ids=["a sample", "all"])
def test_a_run_that_is_resumed_goes_on_to_the_bit(layouts: list[Layout], saved: Saved, tmp_path: Path) -> None:
    folder = saved.of(*layouts)
    found = run_on_ranks(load_each, 2, tmp_path, [(each, each) for each in layouts], str(folder))[0]
    assert found == {(each.name, each.name): saved.losses[each.name] for each in layouts}


PAIRS = [(TWO[0], FOUR[1]), (TWO[1], FOUR[2]), (TWO[2], FOUR[0]), (TWO[3], FOUR[2]), (TWO[4], FOUR[3])]
PAIRS += [(TWO[5], FOUR[5]), (TWO[6], FOUR[4]), (TWO[5], FOUR[4]), (TWO[6], FOUR[5])]
PAIRS += [(TWO[7], FOUR[6]), (TWO[7], FOUR[7])]


@sampled("pairs", [[PAIRS[6], PAIRS[9]], PAIRS], kept=[0], ids=["frozen and cut", "all"])
def test_a_run_goes_on_in_another_layout(pairs: list, saved: Saved, tmp_path: Path) -> None:
    folder = saved.of(*(source for source, _ in pairs))
    found = run_on_ranks(load_each, 4, tmp_path, pairs, str(folder))[0]
    for (source, target), then in found.items():
        rtol = 1e-2 if "bfloat16" in target else 1e-5
        assert then == pytest.approx(saved.losses[source], rel=rtol), (source, target)


TO_ONE = [(TWO[1], Layout(1, 1, 3)), (TWO[0], Layout(1, 1, 0)), (TWO[2], Layout(1, 1, 2))]


@sampled("pairs", [TO_ONE[:1], TO_ONE], kept=[0], ids=["from stage 2", "all"])
def test_a_run_goes_on_on_one_rank(pairs: list, saved: Saved, tmp_path: Path) -> None:
    folder = saved.of(*(source for source, _ in pairs))
    found = run_on_ranks(load_each, 1, tmp_path, pairs, str(folder))[0]
    for (source, target), then in found.items():
        assert then == pytest.approx(saved.losses[source], rel=1e-5), (source, target)
