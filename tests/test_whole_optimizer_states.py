# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's functions for single parameters give and take whole experts at ZeRO 1 to 3, as with stock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.hf_families import batch, model_of
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.test_hugging_face import ds_config, engine_of, furthest

TOLERANCE = 2e-5
Seen = dict[str, torch.Tensor]


def config_of(stage: int, **block: Any) -> dict[str, Any]:
    config = ds_config(stage, **block)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3, "torch_adam": True}}
    return config


def backward(engine: Any, seed: int, rank: int, world_size: int) -> None:
    x = batch(seed, world_size)[rank : rank + 1]
    engine.backward(engine(input_ids=x, labels=x).loss)


def look_and_set(engine: Any, rank: int, world_size: int) -> Seen:
    """All that the functions return, name by name, of three steps with gradients, states and weights set in between."""
    from deepspeed import utils

    seen: Seen = {}
    named = dict(engine.module.named_parameters())

    def keep(what: str, function: Callable[..., torch.Tensor | None], *of: str) -> None:
        for name, each in named.items():
            value = function(each, *of)
            seen[f"{what} {name}"] = torch.zeros(()) if value is None else value.detach().float().clone()

    backward(engine, 0, rank, world_size)
    keep("gradient", utils.safe_get_full_grad)
    for name, each in named.items():
        if "down_proj" in name or "q_proj" in name:
            found = utils.safe_get_full_grad(each)
            # Another factor for each row: that a part goes to the experts that it is of can be told.
            utils.safe_set_full_grad(each, found * torch.arange(1.0, len(found) + 1).view(-1, *[1] * (found.dim() - 1)))
    engine.step()
    keep("first moment", utils.safe_get_full_optimizer_state, "exp_avg")
    keep("weights", utils.safe_get_full_fp32_param)
    for name, each in named.items():
        found = utils.safe_get_full_fp32_param(each)
        if found is not None and "gate_up" in name:
            utils.safe_set_full_fp32_param(each, found.flip(0))
            state = utils.safe_get_full_optimizer_state(each, "exp_avg_sq")
            utils.safe_set_full_optimizer_state(each, state.flip(0), "exp_avg_sq")
    backward(engine, 1, rank, world_size)
    trained = [each for each in named.values() if each.requires_grad]
    utils.safe_update_full_grad_vectorized(trained, lambda gradient, _: gradient.flip(0))
    keep("flipped gradient", utils.safe_get_full_grad)
    engine.step()
    keep("second moment", utils.safe_get_full_optimizer_state, "exp_avg_sq")
    keep("weights at the end", utils.safe_get_full_fp32_param)
    return seen


def engine_with(stage: int, block: dict[str, Any]) -> Any:
    """Of a model with a frozen weight of experts, and a group of all that is one-dimensional."""
    model = model_of("mixtral")
    model.model.layers[0].mlp.experts.gate_up_proj.requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad]
    decayed, others = ([each for each in trained if (each.dim() > 1) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return engine_of(model, config_of(stage) | {"fsmoe": block}, groups)


def compare(rank: int, world_size: int, stage: int) -> None:
    seen = []
    for block in ({"enabled": False}, {"enabled": True, "ep_size": 2}):
        engine = engine_with(stage, block)
        seen.append(look_and_set(engine, rank, world_size))
        engine.destroy()
    wanted, found = seen
    for name, each in wanted.items():
        assert found[name].shape == each.shape, name
        assert furthest(found[name], each) <= TOLERANCE, name


@sampled(("stage", "world_size"), [(1, 2), (2, 2), (3, 2), (1, 4), (2, 4), (3, 4)])
def test_gradients_states_and_weights_of_experts_are_read_and_set_whole_as_with_stock(
    stage: int, world_size: int, tmp_path: Path
) -> None:
    run_on_ranks(compare, world_size, tmp_path, stage)


def moved_and_refused(rank: int, world_size: int, stage: int) -> None:
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    from tests.test_moved_experts import drawn, placements_of

    engine = engine_of(model_of("mixtral"), config_of(stage, ep_size=2))
    backward(engine, 0, rank, world_size)
    engine.step()
    experts = {name: each for name, each in engine.module.named_parameters() if ".experts." in name}
    before = {name: safe_get_full_fp32_param(each).clone() for name, each in experts.items()}
    placements = placements_of(engine)
    placements.go_to({label: drawn(now, 3) for label, now in placements.now.items()})
    assert not all(each.is_at_start for each in placements.now.values())
    for name, each in experts.items():
        assert torch.equal(safe_get_full_fp32_param(each), before[name])
        safe_set_full_fp32_param(each, 2 * before[name])
    placements.restore_model_order()
    for name, each in experts.items():
        assert torch.equal(safe_get_full_fp32_param(each), 2 * before[name])
        with pytest.raises(ValueError, match=r"ds_fsmoe: a value of shape .* give that of all 4 experts"):
            safe_set_full_fp32_param(each, before[name][:2])
    engine.destroy()


@sampled("stage", [1, 3])
def test_experts_that_have_moved_are_in_the_models_own_order_and_a_part_is_refused(stage: int, tmp_path: Path) -> None:
    run_on_ranks(moved_and_refused, 2, tmp_path, stage)
