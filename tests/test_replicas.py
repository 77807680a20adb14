# SPDX-License-Identifier: Apache-2.0
"""Replicas of experts: they change no loss, no gradient and no norm, and are refused where they have no room."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from ds_fsmoe.config.reading import ConfigError
from tests.placed_models import BALANCED, made, small_model, trained
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.small_model import Case, SmallModel, train_steps
from tests.small_model import batch as small_batch
from tests.test_alltoalls import on_nodes
from tests.test_hugging_face import OfTwice, ds_config, engine_of, furthest, own_part
from tests.test_moved_experts import adam, drawn


def replicas_take_part(
    rank: int, world_size: int, ep: int, stage: int, degrees: tuple[int, int], accumulation: int
) -> list[str]:
    """Replicas at random places, changed between steps: the losses of a job without."""
    import random

    said, losses = [], {}
    for spare in (0, 2):
        chunks = {"forward": degrees[0], "backward": degrees[1]}
        placement = {"policy": "balanced", "every": 1000, "spare_experts": spare}
        config = adam(stage, accumulation=accumulation, ep_size=ep, num_chunks=chunks)
        config["fsmoe"]["placement"] = placement
        with on_nodes(*(at * 2 // world_size for at in range(world_size))):
            engine = engine_of(small_model("gpt_oss"), config)
        losses[spare] = []
        for step in range(4):
            losses[spare] += trained(engine, rank, range(step, step + 1), None, world_size, accumulation)
            if not spare:
                continue
            draw, wanted = random.Random(step), {}
            for label, now in engine.fsmoe.placement.now.items():
                filled = {}
                for at in range(now.num_ranks):
                    own = set(now.by_rank[at, : now.num_local].tolist())
                    others = [each for each in range(now.num_experts) if each not in own]
                    for number, expert in enumerate(draw.sample(others, min(2, len(others)))):
                        filled[at * now.per_rank + now.num_local + number] = expert
                wanted[label] = now.with_replicas(filled)
            engine.fsmoe.placement.go_to(wanted)
        engine.destroy()
    for at, (ours, theirs) in enumerate(zip(losses[2], losses[0], strict=True)):
        if not abs(ours - theirs) <= 2e-5 * abs(theirs):
            said.append(f"loss {at} is {ours} for {theirs}")
    return said


@sampled(
    ("world_size", "ep", "stage", "degrees", "accumulation"),
    [
        (4, 2, 2, (2, 3), 2),
        (4, 4, 2, (2, 3), 2),
        (4, 2, 0, (2, 2), 1),
        (4, 2, 1, (1, 3), 1),
        (4, 2, 3, (2, 2), 1),
        (2, 2, 0, (1, 1), 1),
        (2, 2, 3, (3, 2), 1),
        (4, 4, 1, (1, 2), 1),
        (3, 3, 2, (2, 2), 2),
    ],
    kept=[6],
)
def test_replicas_change_no_loss(
    world_size: int, ep: int, stage: int, degrees: tuple[int, int], accumulation: int, tmp_path: Path
) -> None:
    found = run_on_ranks(replicas_take_part, world_size, tmp_path, ep, stage, degrees, accumulation)
    assert [each for of_rank in found for each in of_rank] == []


def too_many_replicas(rank: int, world_size: int) -> list[str]:
    from unittest.mock import patch

    said = []
    for spare, free in ((7, math.inf), (2, 1000.0 if rank == 1 else math.inf)):
        try:
            with patch("ds_fsmoe.engine.expert_placing.free_bytes", return_value=free):
                made(2, world_size, BALANCED | {"spare_experts": spare})
            said.append("made")
        except ConfigError as error:
            said.append(str(error))
    return said


@pytest.mark.slow
def test_more_replicas_than_experts_elsewhere_or_than_memory_are_refused_on_every_rank(tmp_path: Path) -> None:
    found = run_on_ranks(too_many_replicas, 2, tmp_path)
    assert found[0] == found[1]
    assert "fsmoe.placement.spare_experts = 7: must be at most 6" in found[0][0]
    assert "rank 1" in found[0][1]
    assert "fsmoe.placement.spare_experts = 2: replicas of 2 layer(s) need" in found[0][1]


def called_replicas(rank: int, world_size: int) -> list[str]:
    """Experts that are called themselves, of which each rank has a replica of one of the other."""
    from deepspeed.utils import safe_get_full_grad

    reference, said = OfTwice(), []
    config = ds_config(1, num_chunks={"forward": 2, "backward": 3})
    config["fsmoe"]["placement"] = {"policy": "balanced", "every": 1000, "spare_experts": 1}
    engine = engine_of(copy.deepcopy(reference), config)
    placement = engine.fsmoe.placement
    placement.go_to({label: now.with_replicas({2: 3, 5: 0}) for label, now in placement.now.items()})
    xs = torch.randn(world_size, 9, 32, generator=torch.Generator().manual_seed(1))
    losses = [reference(each) for each in xs]
    torch.stack(losses).mean().backward()
    with torch.no_grad():
        alone = engine(xs[rank])
    loss = engine(xs[rank])
    engine.backward(loss)
    for name, found in (("in training", loss), ("without a gradient", alone)):
        if not abs(found.item() - losses[rank].item()) <= 1e-5 * abs(losses[rank].item()):
            said.append(f"loss {name}: {found.item()} for {losses[rank].item()}")
    for name, parameter in engine.module.named_parameters():
        found = safe_get_full_grad(parameter)
        wanted = own_part(dict(reference.named_parameters())[name].grad, found.shape, rank)
        if not furthest(found, wanted) <= 1e-5:
            said.append(f"{name} is off by {furthest(found, wanted):.1e}")
    engine.destroy()
    return said


def test_replicas_of_experts_that_are_called_themselves_compute_with_their_own_weights(tmp_path: Path) -> None:
    assert run_on_ranks(called_replicas, 2, tmp_path) == [[], []]


def experts_of_deepspeed(rank: int, world_size: int, stage: int) -> list[str]:
    """Replicas of DeepSpeed's experts, with dropout, which evaluation turns off in them too."""
    import ds_fsmoe

    said, results = [], {}
    case = Case(ep_size=world_size, stage=stage, k=2, drop_tokens=False, expert="smooth")
    for spare in (0, 1):
        torch.manual_seed(0)
        block = {"enabled": True, "dispatch": "rows", "num_chunks": {"forward": 2, "backward": 3}}
        block["placement"] = {"policy": "balanced", "every": 1000, "spare_experts": spare}
        model = SmallModel(case, rank)
        config = case.ds_config(fsmoe=block)
        engine = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
        placement, losses = engine.fsmoe.placement, []
        if spare:
            wanted = {}
            for label, now in placement.now.items():
                others = [int(now.by_rank[(at + 1) % world_size, 0]) for at in range(world_size)]
                filled = {at * now.per_rank + now.num_local: each for at, each in enumerate(others)}
                wanted[label] = now.with_replicas(filled)
            placement.go_to(wanted)
        losses += train_steps(engine, rank, range(3))
        engine.eval()
        layer = next(iter(engine.fsmoe.inner_layers.values()))
        with torch.no_grad():
            losses.append(engine(*small_batch(9, rank, torch.float32))[0].item())
        if spare and any(each.training for each in layer.fsmoe.replicas.modules):
            said.append("replicas are in training while the model is evaluated")
        results[spare] = losses
        engine.destroy()
    if not np.allclose(results[1], results[0], rtol=1e-5):
        said.append(f"losses {results[1]} for {results[0]}")
    return said


@sampled(("world_size", "stage"), [(2, 2), (4, 0), (2, 1)], kept=[])
def test_experts_of_deepspeeds_own_layers_have_replicas_too(world_size: int, stage: int, tmp_path: Path) -> None:
    found = run_on_ranks(experts_of_deepspeed, world_size, tmp_path, stage)
    assert [each for of_rank in found for each in of_rank] == []


def norms_of_a_step(rank: int, world_size: int, stage: int, spare: int) -> dict[str, float]:
    """The norm of the first step, experts and replicas in places that are drawn before it."""
    found = {}
    for name in ("stays", "placed"):
        engine = made(stage, world_size, {"policy": "balanced", "every": 1000, "spare_experts": spare})
        if name == "placed":
            placement, wanted = engine.fsmoe.placement, {}
            for at, (label, now) in enumerate(placement.now.items()):
                homes = drawn(now, 3 + at)
                spare_places = [p for p in range(now.num_places) if p % now.per_rank >= now.num_local]
                rank_of = [homes.rank_of_place(homes.home_of_expert[0])]
                filled = {p: 0 for p in spare_places if homes.rank_of_place(p) not in rank_of}
                wanted[label] = homes.with_replicas(filled)
            placement.go_to(wanted)
        trained(engine, rank, range(1), None, world_size)
        found[name] = engine.get_global_grad_norm()
        engine.destroy()
    return found


@sampled(("stage", "spare"), [(2, 1), (0, 1), (1, 0), (3, 1)], kept=[])
def test_the_norm_of_a_step_does_not_depend_on_where_experts_are(stage: int, spare: int, tmp_path: Path) -> None:
    for found in run_on_ranks(norms_of_a_step, 2, tmp_path, stage, spare):
        assert found["placed"] == pytest.approx(found["stays"], rel=1e-6)
