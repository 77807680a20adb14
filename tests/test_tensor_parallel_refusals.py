# SPDX-License-Identifier: Apache-2.0
"""What cannot be run under tensor parallelism is refused at start, on every rank, with the way out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import ds_fsmoe
from tests.ranks import run_on_ranks
from tests.small_model import WIDTH, Case, SmallModel
from tests.tensor_parallel import begin


def refused(model: nn.Module, world_size: int, monkeypatch: pytest.MonkeyPatch, **block: Any) -> str:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    mpu = SimpleNamespace(get_tensor_model_parallel_world_size=lambda: 2)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the callers look at the message
        ds_fsmoe.initialize(model=model, config=Case().ds_config(fsmoe=block), mpu=mpu)
    assert not dist.is_initialized()
    return str(caught.value)


SPLIT = (("enable_expert_tensor_parallelism", True),)


def test_tensor_parallel_ranks_have_to_divide_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    message = refused(SmallModel(Case(), 0), 3, monkeypatch, enabled=True)
    assert message == "mpu: 2 tensor-parallel ranks: must divide the 3 ranks"


def test_experts_are_split_by_themselves_or_by_us_and_not_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SmallModel(Case(expert="gpt", moe_options=SPLIT), 0)
    message = refused(model, 4, monkeypatch, enabled=True, esp_size=2)
    assert message.startswith("fsmoe.esp_size = 2: with enable_expert_tensor_parallelism = True (moes.0) the experts")
    assert message.endswith("set it to 1, or leave enable_expert_tensor_parallelism out")


def test_split_experts_are_spread_over_data_parallel_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    message = refused(SmallModel(Case(ep_size=4, moe_options=SPLIT), 0), 4, monkeypatch, enabled=True)
    assert "moes.1.ep_size = 4: with enable_expert_tensor_parallelism = True it must divide the 2 data-p" in message
    assert message.endswith("for 4 experts the choices are 1, 2")


def test_layers_have_to_be_split_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SmallModel(Case(), 0)
    model.moes[1].enable_expert_tensor_parallelism = True
    message = refused(model, 4, monkeypatch, enabled=True)
    assert message.startswith("moes.0.enable_expert_tensor_parallelism = False, and moes.1 has True: DeepSpeed goes by")


def test_stocks_layer_is_not_given_parts_of_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleDict({"moe": ds_fsmoe.MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 4, sequence_parallel=True)})
    message = refused(model, 2, monkeypatch, enabled=False)
    assert message.startswith("fsmoe.enabled = false, but sequence_parallel = True in moe and mpu has 2 tensor-paral")


def strided_mpu(rank: int, world_size: int, ranks_of: dict[int, list[int]]) -> str:
    mpu = begin(2)
    for ranks in ([0, 2], [1, 3]):
        group = dist.new_group(ranks)
        if rank in ranks and ranks_of[rank] == ranks:
            mpu.groups["model"] = group
    try:
        ds_fsmoe.initialize(model=SmallModel(Case(), rank), config=Case().ds_config(fsmoe={"enabled": True}), mpu=mpu)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("which", ["all ranks", "two ranks"])
def test_tensor_parallel_ranks_that_are_no_neighbours_are_refused_on_every_rank(which: str, tmp_path: Path) -> None:
    ranks_of = (
        {0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3]} if which == "all ranks" else {0: [0, 2], 2: [0, 2], 1: [], 3: []}
    )
    messages = run_on_ranks(strided_mpu, 4, tmp_path, ranks_of)
    assert len(set(messages)) == 1
    word = "consecutive: ranks 0, 2: 'False'" if which == "two ranks" else "not consecutive"
    assert "tensor-parallel ranks of a group are" in messages[0]
    assert word in messages[0]
    if which == "all ranks":
        assert messages[0].endswith("number them so, or set fsmoe.enabled to false")


def stock_engine(rank: int, world_size: int) -> str:
    import deepspeed

    mpu = begin(2)
    model = nn.ModuleDict({"moe": ds_fsmoe.MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 4, sequence_parallel=True)})
    with pytest.raises(ValueError, match="tensor-parallel") as caught:
        deepspeed.initialize(model=model, config=Case().ds_config(), mpu=mpu)
    return str(caught.value)


def test_our_layer_in_an_engine_of_stocks_says_what_to_call(tmp_path: Path) -> None:
    for message in run_on_ranks(stock_engine, 2, tmp_path):
        assert message.startswith("a ds_fsmoe.MoE with 2 tensor-parallel ranks, in a stock DeepSpeed engine: call")
