# SPDX-License-Identifier: Apache-2.0
"""Scripts that clip by themselves find the same norm on every rank, that of stock, and keep dense weights alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

# As early as scripts import them.
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.clip_grad import clip_grad_norm_ as of_module

pytest.importorskip("transformers")

from tests.distances import furthest
from tests.hf_families import backward, model_of
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.sgd_engines import ds_config, engine_of

NORM_TYPES = (2.0, 1, float("inf"), 3.5, 0)
EVERYTHING = "everything"
CHOICES: dict[str, Callable[[str], bool]] = {
    EVERYTHING: lambda name: True,
    "experts alone": lambda name: ".experts." in name,
    "all but experts": lambda name: ".experts." not in name,
    "one weight of experts": lambda name: name.endswith("layers.1.mlp.experts.down_proj"),
}


def with_large_experts() -> nn.Module:
    model = model_of("mixtral")
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.mul_(4 if ".experts." in name else 1)
    return model


def chosen(engine: Any, choice: str) -> list[nn.Parameter]:
    return [each for name, each in engine.module.named_parameters() if CHOICES[choice](name)]


def norms_and_weights(engine: Any, rank: int, world_size: int) -> dict[str, Any]:
    import ds_fsmoe

    found: dict[str, Any] = {}
    backward(engine, 0, rank, world_size)
    for norm_type in NORM_TYPES:
        for choice in CHOICES:
            for foreach in (True, False) if norm_type == 2 else (None,):
                # So large that nothing is clipped yet.
                norm = clip_grad_norm_(chosen(engine, choice), 1e9, norm_type, True, foreach)
                found[f"{choice}, {norm_type}, {foreach}"] = norm.item()
        found[f"at once, {norm_type}"] = ds_fsmoe.gradient_norm(engine, norm_type).item()
    gradients = [each.grad for each in engine.module.parameters()]
    found["public"] = nn.utils.get_total_norm(gradients).item()
    found["one tensor"] = nn.utils.get_total_norm(chosen(engine, "one weight of experts")[0].grad).item()
    nn.utils.clip_grads_with_norm_(engine.module.parameters(), 1.0, ds_fsmoe.gradient_norm(engine))
    found["clipped"] = of_module(engine.module.parameters(), 1e9).item()
    engine.step()
    for step in range(1, 5):
        backward(engine, step, rank, world_size)
        found[f"step {step}"] = clip_grad_norm_(engine.module.parameters(), 0.5).item()
        engine.step()
    found |= {n: each.detach().norm().item() for n, each in engine.module.named_parameters() if ".experts." not in n}
    return found


def with_gradients(rank: int, world_size: int) -> list[dict[str, Any]]:
    """At stage 0: what stock finds, and ours."""
    found = []
    for block in ({"enabled": False}, {"enabled": True, "ep_size": 2}):
        engine = engine_of(with_large_experts(), ds_config(0) | {"fsmoe": block})
        found.append(norms_and_weights(engine, rank, world_size))
        dense = [each.detach().view(-1) for each in chosen(engine, "all but experts")]
        of_ranks = [None] * world_size
        dist.all_gather_object(of_ranks, torch.cat(dense))
        found[-1]["ranks apart"] = max(furthest(each, of_ranks[0]) for each in of_ranks)
        engine.destroy()
    return found


def at_a_stage(rank: int, world_size: int, stage: int) -> list[list[float]]:
    import ds_fsmoe

    found = []
    for block in ({"enabled": False}, {"enabled": True, "ep_size": 2}):
        engine = engine_of(with_large_experts(), ds_config(stage) | {"fsmoe": block})
        backward(engine, 0, rank, world_size)
        norms = [ds_fsmoe.gradient_norm(engine, each).item() for each in (2.0, float("inf"))]
        # Parameters have no gradients at these stages, so torch's function has nothing to do, here as there.
        norms.append(clip_grad_norm_(engine.module.parameters(), 0.1).item())
        engine.step()
        found.append([*norms, float(engine.get_global_grad_norm())])
        engine.destroy()
    return found


def not_finite(rank: int, world_size: int) -> tuple[str, bool]:
    """What a rank is told, and whether other models have a norm of their own: an expert of the last rank alone, and of
    those that have the same experts, has a gradient that is none."""
    import ds_fsmoe

    engine = engine_of(model_of("mixtral"), ds_config(0, ep_size=2))
    backward(engine, 0, rank, world_size)
    if rank % 2:
        ds_fsmoe.own_part(chosen(engine, "one weight of experts")[0].grad)[0, 0, 0] = float("nan")
    with pytest.raises(RuntimeError) as said:
        clip_grad_norm_(engine.module.parameters(), 1.0, error_if_nonfinite=True)
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    norm = clip_grad_norm_(other.parameters(), 1.0) if rank == 0 else None  # one rank alone
    engine.destroy()
    return str(said.value).split(" for")[0], norm is None or abs(norm.item() - 6**0.5) < 1e-6


def compared(rank: int, world_size: int, stage: int) -> tuple[Any, ...]:
    return with_gradients(rank, world_size), at_a_stage(rank, world_size, stage), not_finite(rank, world_size)


@sampled(("world_size", "stage"), [(2, 1), (4, 2), (2, 3)])
def test_a_scripts_own_clipping_has_the_norms_of_stock_on_every_rank_and_keeps_dense_weights_alike(
    world_size: int, stage: int, tmp_path: Path
) -> None:
    for (stock, ours), (stock_norms, norms), told in run_on_ranks(compared, world_size, tmp_path, stage):
        assert ours == pytest.approx(stock, rel=2e-5, abs=1e-9)
        assert ours["ranks apart"] == 0
        # It is the experts' part that is in question, and everything is clipped.
        assert stock["experts alone, 2.0, True"] > 0.05 * stock["everything, 2.0, True"]
        assert stock["step 4"] > 0.5
        assert norms == pytest.approx(stock_norms, rel=2e-5)
        assert norms[0] == pytest.approx(norms[3], rel=2e-5)
        assert norms[2] == 0
        assert told == ("The total norm of order 2.0", True)
