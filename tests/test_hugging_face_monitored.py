# SPDX-License-Identifier: Apache-2.0
"""Monitors are told of Hugging Face's own routers what these say themselves: ``output_router_logits``."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from ds_fsmoe.telemetry.routers import probabilities_of, router_outputs
from tests.hf_families import NUM_CHOICES, batch, model_of
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.sgd_engines import ds_config, engine_of

LENGTH, ACCUMULATION = 16, 2


def entropies(logits: tuple[torch.Tensor, ...]) -> list[float]:
    """Of each layer, as the words have it."""
    found = []
    for each in logits:
        log_probs = each.detach().reshape(-1, each.shape[-1]).float().log_softmax(-1)
        found.append(float(-(log_probs.exp() * log_probs).sum(-1).mean()))
    return found


def monitored(rank: int, world_size: int, folder: str, checkpoints: bool) -> list[list[float]]:
    """Two micro batches with monitors, an evaluation between; what the model itself says of each."""
    monitor = {"enabled": True, "output_path": folder, "job_name": "hf"}
    config = ds_config(2, metrics="detailed", metrics_every=1)
    config |= {"csv_monitor": monitor, "gradient_accumulation_steps": ACCUMULATION}
    engine = engine_of(model_of("olmoe"), config)
    if checkpoints:
        engine.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    said = []
    for micro in range(ACCUMULATION):
        x = batch(10 * micro + rank, 1, LENGTH)
        found = engine(input_ids=x, labels=x, output_router_logits=True)
        said.append(entropies(found.router_logits))
        engine.eval()
        engine(input_ids=x[:, :5])
        engine.train()
        engine.backward(found.loss)
        engine.step()
    engine.destroy()
    return said


def written(folder: Path, name: str) -> float:
    with (folder / "hf" / f"fsmoe_{name}.csv").open() as file:
        rows = list(csv.reader(file))[1:]
    assert len(rows) == 1
    return float(rows[0][1])


@sampled("checkpoints", [False, True])
def test_load_and_entropy_of_the_model_s_own_routers_are_those_of_its_router_logits(
    checkpoints: bool, tmp_path: Path
) -> None:
    said = run_on_ranks(monitored, 2, tmp_path, str(tmp_path), checkpoints)
    for layer in range(2):
        each = [of_micro[layer] for of_rank in said for of_micro in of_rank]
        assert written(tmp_path, f"L0{layer}_router_entropy") == pytest.approx(sum(each) / len(each), rel=1e-5)
        tokens = 2 * ACCUMULATION * LENGTH * NUM_CHOICES / 4
        assert written(tmp_path, f"L0{layer}_expert_tokens_mean") == tokens


def test_probabilities_that_a_family_declares_as_logits_are_taken_as_they_are() -> None:
    logits = torch.randn(3, 5, 4)
    probs = logits.softmax(-1).view(15, 4)
    assert torch.allclose(probabilities_of(logits), probs)
    assert torch.equal(probabilities_of(probs), probs)
    assert torch.allclose(probabilities_of(probs.bfloat16()), probs, atol=1e-2)


class Alone(nn.Module):
    """A block that declares nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts, self.more = nn.Linear(4, 2), nn.Linear(4, 4), nn.Linear(4, 4)


class Around(nn.Module):
    _can_record_outputs: ClassVar = {"router_logits": Alone}

    def __init__(self) -> None:
        super().__init__()
        self.block = Alone()


def test_a_router_that_nobody_declares_is_not_guessed_and_a_module_around_several_layers_speaks_for_none() -> None:
    block = Alone()
    assert router_outputs(block, {"L00": block.experts}) == {}
    model = Around()
    assert router_outputs(model, {"L00": model.block.experts, "L01": model.block.more}) == {}
    (found,) = router_outputs(model, {"L00": model.block.experts}).values()
    assert found.module is model.block
    assert found.of((1, 2)) == 2
