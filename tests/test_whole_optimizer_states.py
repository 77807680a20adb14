# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's functions for single parameters give and take whole experts at ZeRO 1 to 3, as with stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from tests.distances import furthest
from tests.hf_families import backward, model_of
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.sgd_engines import ds_config, engine_of

TOLERANCE = 2e-5
Seen = dict[str, torch.Tensor]


def config_of(stage: int, **block: Any) -> dict[str, Any]:
    config = ds_config(stage, **block)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3, "torch_adam": True}}
    return config


def kept(seen: Seen, name: str, value: torch.Tensor | None) -> None:
    seen[name] = torch.zeros(()) if value is None else value.detach().float().clone()


def look_and_set(engine: Any, rank: int, world_size: int) -> Seen:
    """All that the functions return, name by name, of three steps with gradients, states and weights set in between."""
    from deepspeed import utils

    seen: Seen = {}
    named = dict(engine.module.named_parameters())
    backward(engine, 0, rank, world_size)
    for name, each in named.items():
        found = utils.safe_get_full_grad(each)
        kept(seen, f"gradient {name}", found)
        if "down_proj" in name or "q_proj" in name:
            # Another factor for each row: that a part goes to the experts that it is of can be told.
            utils.safe_set_full_grad(each, found * torch.arange(1.0, len(found) + 1).view(-1, *[1] * (found.dim() - 1)))
    engine.step()
    for name, each in named.items():
        kept(seen, f"first moment {name}", utils.safe_get_full_optimizer_state(each, "exp_avg"))
        kept(seen, f"weights {name}", found := utils.safe_get_full_fp32_param(each))
        if found is not None and "gate_up" in name:
            utils.safe_set_full_fp32_param(each, found.flip(0))
            state = utils.safe_get_full_optimizer_state(each, "exp_avg_sq")
            utils.safe_set_full_optimizer_state(each, state.flip(0), "exp_avg_sq")
    backward(engine, 1, rank, world_size)
    trained = [each for each in named.values() if each.requires_grad]
    utils.safe_update_full_grad_vectorized(trained, lambda gradient, _: gradient.flip(0))
    for name, each in named.items():
        kept(seen, f"flipped gradient {name}", utils.safe_get_full_grad(each))
    engine.step()
    for name, each in named.items():
        kept(seen, f"second moment {name}", utils.safe_get_full_optimizer_state(each, "exp_avg_sq"))
        kept(seen, f"weights at the end {name}", utils.safe_get_full_fp32_param(each))
    return seen


def tiny() -> nn.Module:
    model = model_of("mixtral")
    model.model.layers[0].mlp.experts.gate_up_proj.requires_grad_(False)
    return model


def differing(rank: int, world_size: int, stage: int, ep_size: int) -> list[str]:
    stock = engine_of(tiny(), config_of(stage) | {"fsmoe": {"enabled": False}})
    wanted = look_and_set(stock, rank, world_size)
    stock.destroy()
    engine = engine_of(tiny(), config_of(stage, ep_size=ep_size))
    found = look_and_set(engine, rank, world_size)
    engine.destroy()
    return [
        f"{name}: {list(found[name].shape)}, {list(each.shape)}"
        for name, each in wanted.items()
        if found[name].shape != each.shape or not furthest(found[name], each) <= TOLERANCE
    ]


@sampled(("stage", "world_size"), [(1, 2), (2, 2), (3, 2), (1, 4), (2, 4), (3, 4)])
def test_gradients_states_and_weights_of_experts_are_read_and_set_whole_as_with_stock(
    stage: int, world_size: int, tmp_path: Path
) -> None:
    assert run_on_ranks(differing, world_size, tmp_path, stage, 2) == [[]] * world_size


def states_of_groups(rank: int, world_size: int, folder: str) -> list[str]:
    """What cannot be read after a step, and right after a load, with a group of all that is one-dimensional."""
    from deepspeed.utils import safe_get_full_optimizer_state

    said = []
    for again in (False, True):
        model = model_of("mixtral")
        groups = [
            {"params": [each for each in model.parameters() if each.dim() > 1], "weight_decay": 0.1},
            {"params": [each for each in model.parameters() if each.dim() == 1], "weight_decay": 0.0},
        ]
        engine = engine_of(model, config_of(1, ep_size=2), groups)
        if again:
            engine.load_checkpoint(folder)
        else:
            backward(engine, 0, rank, world_size)
            engine.step()
        found = {n: safe_get_full_optimizer_state(each, "exp_avg") for n, each in engine.module.named_parameters()}
        said += [name for name, each in found.items() if not each.abs().max() > 0 and "router" not in name]
        said += [name for name, each in found.items() if ".experts." in name and len(each) != 4]
        engine.save_checkpoint(folder)
        engine.destroy()
    return said


def test_states_of_every_group_are_there_after_one_step_and_after_a_load(tmp_path: Path) -> None:
    assert run_on_ranks(states_of_groups, 2, tmp_path / "ranks", str(tmp_path)) == [[], []]


def moved_and_refused(rank: int, world_size: int, stage: int) -> list[Any]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    from tests.test_moved_experts import drawn, placements_of

    engine = engine_of(model_of("mixtral"), config_of(stage, ep_size=2))
    backward(engine, 0, rank, world_size)
    engine.step()
    experts = {name: each for name, each in engine.module.named_parameters() if ".experts." in name}
    before = {name: safe_get_full_fp32_param(each).clone() for name, each in experts.items()}
    placements = placements_of(engine)
    placements.go_to({label: drawn(now, 3) for label, now in placements.now.items()})
    said = [not all(each.is_at_start for each in placements.now.values())]
    said += [torch.equal(safe_get_full_fp32_param(each), before[name]) for name, each in experts.items()]
    for name, each in experts.items():
        safe_set_full_fp32_param(each, 2 * before[name])
    placements.restore_model_order()
    said += [torch.equal(safe_get_full_fp32_param(each), 2 * before[name]) for name, each in experts.items()]
    name, first = next(iter(experts.items()))
    with pytest.raises(ValueError, match=r"ds_fsmoe: a value of shape .* give that of all 4 experts"):
        safe_set_full_fp32_param(first, before[name][:2])
    engine.destroy()
    return said


@sampled("stage", [1, 3])
def test_experts_that_have_moved_are_in_the_models_own_order_and_a_part_is_refused(stage: int, tmp_path: Path) -> None:
    assert all(all(each) for each in run_on_ranks(moved_and_refused, 2, tmp_path, stage))
