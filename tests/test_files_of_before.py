# SPDX-License-Identifier: Apache-2.0
"""What earlier versions have written stays readable: a checkpoint of 0.1.0, and blocks in the words of then.

``data/before/checkpoint.tar.xz`` is what two ranks had saved after :data:`STEPS` steps of ``make(0)``;
``checkpoint.json`` has the facts of then. Neither is ever written again, whatever modules and fields are called by now.
"""

from __future__ import annotations

import json
import tarfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.moe.layer import MoE
from torch import nn

import ds_fsmoe
from ds_fsmoe import registry
from ds_fsmoe.checkpoint.plan_state import ReadPlans, read_plans
from ds_fsmoe.config.blocks import PipelineDegreeBlock
from ds_fsmoe.config.reading import read_block
from ds_fsmoe.config.words import words_of
from ds_fsmoe.engine.state import FSMoEState
from ds_fsmoe.layer.inference import LayerRecord
from ds_fsmoe.planning.block import BlockPlan, LayerPlan
from tests.hurry import hurry
from tests.ranks import run_on_ranks

BEFORE = Path(__file__).parent / "data" / "before"
BLOCKS = json.loads((BEFORE / "blocks.json").read_text())
WIDTH, TOKENS, STEPS = 4, 6, 6


class Model(nn.Module):
    """One MoE layer between two linear ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(WIDTH, ds_fsmoe.GPTFeedForward(WIDTH, 2 * WIDTH), num_experts=2, ep_size=2, k=1)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_SM: torch.Tensor) -> torch.Tensor:
        y_SM, balance, _ = self.moe(self.first(x_SM))
        return (self.last(y_SM) - x_SM.sin()).square().mean() + 0.01 * balance


def make(seed: int) -> Any:
    torch.manual_seed(seed)
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": TOKENS,
        "optimizer": {"type": "Adam", "params": {"lr": 0.02, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 1_000_000,
        "fsmoe": {"enabled": True, "pipeline_degree": {"forward": 2, "backward": 3}},
    }
    return ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def train(engine: Any, rank: int, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        x_SM = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(2 * step + rank))
        loss = engine(x_SM)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def facts(engine: Any, rank: int) -> dict[str, Any]:
    """What a rank is to find after loading, before it trains on."""
    weights = [value for parameter in engine.module.parameters() for value in parameter.flatten().tolist()]
    return {"weights": sha256(repr(weights).encode()).hexdigest(), "losses": train(engine, rank, STEPS, 2)}


def load(rank: int, world_size: int, place: str) -> dict[str, Any]:
    hurry()
    engine = make(5 + rank)
    path, client_state = engine.load_checkpoint(place)
    assert path is not None
    assert client_state["mine"] == 7
    assert engine.global_steps == STEPS
    return facts(engine, rank)


def test_a_checkpoint_of_before_is_loaded_and_trained_on(tmp_path: Path) -> None:
    with tarfile.open(BEFORE / "checkpoint.tar.xz") as archive:
        archive.extractall(tmp_path / "checkpoint", filter="data")
    found = run_on_ranks(load, 2, tmp_path / "ranks", str(tmp_path / "checkpoint"))
    for now, then in zip(found, json.loads((BEFORE / "checkpoint.json").read_text()), strict=True):
        assert now["weights"] == then["weights"]
        assert now["losses"] == pytest.approx(then["losses"], rel=1e-5)


RENAMED = "every word that has another today"


@pytest.mark.parametrize("name", [each for each in BLOCKS if each != RENAMED])
def test_a_block_of_before_is_read_and_means_what_it_says(name: str) -> None:
    """Every value that was written is found again, under whatever name; those of the larger block are all different."""
    block = read_block({"fsmoe": BLOCKS[name]})
    missing = Counter(values(BLOCKS[name])) - Counter(values(block.model_dump()))
    assert not missing


def test_a_block_in_the_words_of_before_is_the_one_in_todays_words_and_each_is_said_once() -> None:
    today = {"enabled": True, "dispatch": "unpadded", "alltoall": "node_deduplicated", "comm_dtype": "fp8"}
    today |= {"two_batch_overlap": "on", "two_batch_blocks": ["MyBlock"], "hooks": BLOCKS[RENAMED]["hooks"]}
    today["placement"] = {"policy": "balanced", "break_even_within": 10}
    words = words_of(BLOCKS[RENAMED])
    assert words.normalized == today
    assert read_block({"fsmoe": BLOCKS[RENAMED]}) == read_block({"fsmoe": today})
    assert read_block({"fsmoe": BLOCKS[RENAMED]}).alike() == read_block({"fsmoe": today}).alike()
    assert words.old == [
        'fsmoe.alltoall = "once_per_node" is now called "node_deduplicated"; both work',
        'fsmoe.dispatch = "rows" is now called "unpadded"; both work',
        "fsmoe.wires is now called fsmoe.comm_dtype; both work",
        "fsmoe.split_batch is now called fsmoe.two_batch_overlap; both work",
        "fsmoe.split_blocks is now called fsmoe.two_batch_blocks; both work",
        "fsmoe.placement.pays_within is now called fsmoe.placement.break_even_within; both work",
        "fsmoe.hooks: BFloat16Wire is now called BFloat16Communication; both work",
    ]
    assert words_of(today | {"hooks": ["ds_fsmoe.BFloat16Communication", "mine.BFloat16Wire"]}).old == []


def test_names_of_before_are_those_of_today_and_public_names_are_taken_without_a_warning() -> None:
    from ds_fsmoe.components.hooks.bfloat16_wire import BFloat16Wire

    assert BFloat16Wire is ds_fsmoe.BFloat16Wire is ds_fsmoe.BFloat16Communication
    assert FSMoEState.look_again is FSMoEState.recheck_chunking
    assert LayerRecord(fullest_primary=2.5).fullest_at_home == 2.5
    assert ds_fsmoe.Config.Wires is ds_fsmoe.Config.CommDtype
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for name in ds_fsmoe.__all__:
            getattr(ds_fsmoe, name)
        read_block({"fsmoe": {"enabled": True, "hooks": ["ds_fsmoe.BFloat16Wire"]}})
    # What other libraries say while they are imported is no matter.
    assert [each for each in said if "ds_fsmoe" in str(each.message) or each.filename == __file__] == []


def test_the_registry_keeps_the_names_of_before() -> None:
    today = registry.lookup("alltoall", "node_deduplicated")
    assert registry.lookup("alltoall", "once_per_node") is today
    assert "once_per_node" not in registry.known("alltoall")
    with pytest.raises(ValueError, match="'once_per_node' is an older name of 'node_deduplicated': choose another"):
        ds_fsmoe.register_alltoall("once_per_node")
    with pytest.raises(ValueError, match="no alltoall 'once_per_nod': did you mean 'node_deduplicated'"):
        registry.lookup("alltoall", "once_per_nod")
    ds_fsmoe.register_gate("once_per_node")  # of another kind; no class is registered yet


def test_plans_of_before_name_all_to_alls_as_they_did_then() -> None:
    now = LayerPlan(BlockPlan(1), BlockPlan(1), "flat")
    layers = {"L00": SimpleNamespace(fsmoe=SimpleNamespace(plan=now))}
    block = SimpleNamespace(pipeline_degree=PipelineDegreeBlock())
    state: Any = SimpleNamespace(inner_layers=layers, block=block, placement=None)

    def read(alltoall: str, **others: Any) -> ReadPlans:
        facts: dict[str, Any] = {phase: asdict(BlockPlan(2)) for phase in ("forward", "backward")}
        facts |= {"reduces": [], "alltoall": alltoall}
        return read_plans(state, {"layers": {"L00": facts | others}, "gradients": None})

    # Two-batch overlap was not saved: it is as the config has it.
    for saved, wanted in (({}, False), ({"is_two_batch": True}, True)):
        assert read("flat", **saved).layers["L00"].is_two_batch is wanted

    assert read("once_per_node") == read("node_deduplicated")
    assert read("once_per_node").layers["L00"].alltoall == "node_deduplicated"
    with pytest.raises(ValueError, match="an all-to-all 'once_per_rank'"):
        read("once_per_rank")


def values(found: Any) -> Iterator[Any]:
    if isinstance(found, dict):
        for each in found.values():
            yield from values(each)
    elif isinstance(found, (list, tuple)):
        for each in found:
            yield from values(each)
    elif found is not None:  # null is another word for "auto"
        yield type(found).__name__, found
