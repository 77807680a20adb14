# SPDX-License-Identifier: Apache-2.0
"""How much of a model is in one place while its whole weights are put together, and while a checkpoint is converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

pytest.importorskip("transformers")

from ds_fsmoe.checkpoint_files import convert
from ds_fsmoe.checkpoint_files import whole as whole_files
from tests.live_memory import LiveMemory
from tests.ranks import run_on_ranks
from tests.test_hugging_face import ds_config, engine_of

pytestmark = pytest.mark.long

WIDTH, EXPERTS = 64, 8
SMALL = 16 * 1024
"""Bytes of what is no matrix: counts, norms, indices."""


def save(rank: int, world_size: int, layers: int, folder: str) -> dict[str, int]:
    """Save a model of some layers over two ranks; what was held meanwhile, in bytes."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    import ds_fsmoe

    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_experts": EXPERTS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    model = OlmoeForCausalLM(OlmoeConfig(**sizes, **heads, **tokens, num_hidden_layers=layers))
    wanted = {name: each.detach().bfloat16() for name, each in model.state_dict().items()}
    engine = engine_of(model, ds_config(1, ep_size=2) | {"bf16": {"enabled": True}})
    engine.save_checkpoint(folder)
    arriving, gather = [], dist.gather

    def counted(piece: torch.Tensor, found: list[torch.Tensor] | None, **named: Any) -> None:
        arriving.append(sum(each.nbytes for each in found or ()))
        gather(piece, found, **named)

    dist.gather = counted
    try:
        with LiveMemory() as memory:
            whole = ds_fsmoe.whole_state_dict(engine)
    finally:
        dist.gather = gather
    if rank == 0:
        assert [name for name, each in wanted.items() if not torch.equal(each, whole[name])] == []
    else:
        assert whole is None
    engine.destroy()
    largest = max(each.nbytes for each in wanted.values())
    of_model = sum(each.nbytes for each in wanted.values())
    return {"peak": memory.peak, "arriving": max(arriving), "largest": largest, "model": of_model}


def test_one_part_arrives_at_a_time_and_the_first_rank_holds_the_model_and_one_parameter_more(tmp_path: Path) -> None:
    first, second = run_on_ranks(save, 2, tmp_path, 2, str(tmp_path / "saved"))
    part = first["largest"] // 2
    assert first["model"] > 3 * first["largest"]
    assert first["arriving"] <= part
    assert first["peak"] <= first["model"] + first["largest"] + SMALL
    assert second["arriving"] == 0
    assert second["peak"] <= SMALL


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Number of layers -> a checkpoint."""
    root = tmp_path_factory.mktemp("saved")
    for layers in (2, 6):
        work = root / f"work{layers}"
        work.mkdir()
        run_on_ranks(save, 2, work, layers, str(root / str(layers)))
    return {layers: root / str(layers) for layers in (2, 6)}


def held(source: Path, target: Path, form: convert.Form, limit_bytes: int) -> tuple[int, int]:
    """The most bytes of tensors in memory, and the bytes written. What stays in a file until it is used is not held."""
    read_file = whole_files.read_file

    def in_files(*args: Any, **named: Any) -> Any:
        with _disable_current_modes():
            return read_file(*args, **named)

    whole_files.read_file = in_files
    try:
        with LiveMemory() as memory:
            whole = convert.open_checked(convert.find_tag(source, None))
            written = sum(size for _, size in convert.export_tensors(whole, target, form, [], None, limit_bytes))
    finally:
        whole_files.read_file = read_file
    return memory.peak, written


@pytest.mark.parametrize("form", ["huggingface", "fp32"])
def test_convert_holds_a_shard_and_a_layer_whatever_the_size_of_the_model(
    checkpoints: dict[int, Path], form: convert.Form, tmp_path: Path
) -> None:
    limit_bytes = 64 * 1024
    itemsize = 4 if form == "fp32" else 2
    layer = itemsize * (EXPERTS * 3 * WIDTH * WIDTH + EXPERTS * WIDTH + 4 * WIDTH * WIDTH)
    # The published form is made of a copy of the gate's and up's weights by transformers.
    copied = itemsize * EXPERTS * 2 * WIDTH * WIDTH if form == "huggingface" else 0
    few, of_few = held(checkpoints[2], tmp_path / "few", form, limit_bytes)
    many, of_many = held(checkpoints[6], tmp_path / "many", form, limit_bytes)
    assert of_many > 2.5 * of_few
    assert many <= few + SMALL
    assert many <= limit_bytes + layer + copied + SMALL


@pytest.mark.parametrize("form", ["huggingface", "fp32"])
def test_convert_reads_each_weight_once(
    checkpoints: dict[int, Path], form: convert.Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined, weights, part = [], whole_files.Whole.weights, whole_files.Whole.part

    def of_weights(self: whole_files.Whole, name: str) -> torch.Tensor:
        joined.append(name)
        return weights(self, name)

    def of_part(self: whole_files.Whole, name: str, item: str | None, *more: Any) -> torch.Tensor:
        if item is not None:  # weights are counted above
            joined.append(name)
        return part(self, name, item, *more)

    monkeypatch.setattr(whole_files.Whole, "weights", of_weights)
    monkeypatch.setattr(whole_files.Whole, "part", of_part)
    held(checkpoints[2], tmp_path / "out", form, 64 * 1024)
    assert joined
    assert len(joined) == len(set(joined))
