# SPDX-License-Identifier: Apache-2.0
"""A load at another layout takes from files what a rank keeps, and no more; each file is opened once. That all of it
arrives is held by test_moved_layouts.py and test_hugging_face_files.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.hurry import hurry
from tests.ranks import run_on_ranks
from tests.taken_bytes import Taken, kept_bytes

pytestmark = pytest.mark.long

MOST = 1.02
"""The bytes taken, of those kept. Headers and indexes are no tensors."""
EXPERTS, WIDTH = 8, 64


class Layout(NamedTuple):
    kind: str
    """Of the model: "hf", or "stock" with DeepSpeed's own layers."""
    world: int
    ep: int
    stage: int
    dtype: str = "bf16"
    layers: int = 2

    @property
    def name(self) -> str:
        return "-".join(map(str, self))


class StockModel(nn.Module):
    def __init__(self, layout: Layout) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.moes = nn.ModuleList(
            MoE(WIDTH, FeedForward(), EXPERTS, layout.ep, k=1, min_capacity=4) for _ in range(layout.layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for each in self.moes:
            x = x + each(x)[0]
        return x.square().mean()


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def hugging_face_model(layout: Layout) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(vocab_size=512, num_hidden_layers=layout.layers, **sizes, **heads, **experts)
    )


def make(layout: Layout, seed: int) -> Any:
    """An engine that has made a step, so that its optimizer has states."""
    import ds_fsmoe

    torch.manual_seed(seed)
    is_stock = layout.kind == "stock"
    model = StockModel(layout) if is_stock else hugging_face_model(layout)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": layout.stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
        "fsmoe": {"enabled": True} | ({} if is_stock else {"ep_size": layout.ep}),
        "bf16": {"enabled": layout.dtype == "bf16"},
    }
    engine = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    tokens = torch.randint(0, 512, (1, 16))
    x = torch.randn(1, 16, WIDTH).to(next(engine.module.parameters()).dtype)
    engine.backward(engine(x) if is_stock else engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    return engine


def save(rank: int, world_size: int, layouts: list[Layout], folder: str) -> None:
    hurry()
    for layout in layouts:
        engine = make(layout, seed=0)
        engine.save_checkpoint(f"{folder}/{layout.name}", "tag")
        engine.destroy()


def load(rank: int, world_size: int, pairs: list[tuple[Layout, Layout]], folder: str) -> None:
    hurry()
    for source, target in pairs:
        engine = make(target, seed=1)
        with Taken() as taken:
            engine.load_checkpoint(f"{folder}/{source.name}", "tag")
        kept = kept_bytes(engine)
        assert kept > 1 << 19, "so much that a part of it is seen"
        assert taken.size_bytes <= MOST * kept, (source.name, target.name, taken.size_bytes, kept, taken.largest_bytes)
        assert max(taken.opened.values()) == 1, (source.name, target.name, taken.opened)
        engine.destroy()


TO_OTHERS = [
    (Layout("hf", 2, 2, 1), Layout("hf", 2, 1, 1)),
    (Layout("hf", 2, 2, 1), Layout("hf", 4, 2, 3)),
    (Layout("hf", 2, 2, 1), Layout("hf", 4, 2, 0, "fp32")),
    (Layout("hf", 4, 4, 1), Layout("hf", 2, 2, 1)),
    (Layout("hf", 4, 2, 3), Layout("hf", 2, 2, 1)),
    (Layout("hf", 4, 2, 3), Layout("hf", 4, 4, 2)),
    (Layout("hf", 4, 2, 3), Layout("hf", 2, 1, 3)),
    (Layout("stock", 2, 1, 1), Layout("stock", 2, 2, 2)),
    (Layout("stock", 4, 4, 1), Layout("stock", 2, 2, 1)),
    (Layout("stock", 4, 4, 1), Layout("stock", 2, 1, 0, "fp32")),
]


def test_a_load_takes_from_files_what_a_rank_keeps_and_opens_each_once(tmp_path: Path) -> None:
    for world in (2, 4):
        sources = dict.fromkeys(source for source, _ in TO_OTHERS if source.world == world)
        run_on_ranks(save, world, tmp_path / f"from{world}", list(sources), str(tmp_path))
    for world in (2, 4):
        pairs = [each for each in TO_OTHERS if each[1].world == world]
        run_on_ranks(load, world, tmp_path / f"to{world}", pairs, str(tmp_path))


def calls(rank: int, world_size: int, layouts: list[Layout], folder: str) -> list[int]:
    """The calls of functions of each load, whoever makes them."""
    hurry()
    found = []
    for layout in layouts:
        engine = make(layout, seed=0)
        engine.save_checkpoint(f"{folder}/{layout.name}", "tag")
        engine.destroy()
        engine = make(layout._replace(ep=1), seed=1)
        count = 0

        def note(frame: Any, event: str, arg: Any) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(note)
        engine.load_checkpoint(f"{folder}/{layout.name}", "tag")
        sys.setprofile(None)
        found.append(count)
        engine.destroy()
    return found


def test_the_work_of_a_load_grows_with_the_parameters_and_no_faster(tmp_path: Path) -> None:
    layouts = [Layout("stock", 2, 2, 1, layers=layers) for layers in (4, 8)]
    for few, many in run_on_ranks(calls, 2, tmp_path / "ranks", layouts, str(tmp_path / "saved")):
        assert many <= 2.2 * few
