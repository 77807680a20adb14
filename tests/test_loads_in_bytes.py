# SPDX-License-Identifier: Apache-2.0
"""A load at another layout takes from files what a rank keeps, and no more; each file is opened once. Whole weights and
a conversion hold one part at a time.

That all of it arrives is held by test_resume.py and test_hugging_face_files.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

pytest.importorskip("transformers")

from ds_fsmoe.checkpoint_files import convert
from ds_fsmoe.checkpoint_files import whole as whole_files
from tests.hurry import hurry
from tests.live_memory import LiveMemory
from tests.ranks import run_on_ranks
from tests.sgd_engines import ds_config, engine_of
from tests.taken_bytes import Taken, kept_bytes

pytestmark = pytest.mark.long

MOST = 1.02
"""The bytes taken, of those kept. Headers and indexes are no tensors."""
EXPERTS, WIDTH, LAYERS = 8, 64, 2


class Layout(NamedTuple):
    kind: str
    """Of the model: "hf", or "stock" with DeepSpeed's own layers."""
    world: int
    ep: int
    stage: int
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        return "-".join(map(str, self))


class StockModel(nn.Module):
    """Layers of DeepSpeed's, one behind the other."""

    def __init__(self, layout: Layout) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
        layers = (MoE(WIDTH, expert, EXPERTS, layout.ep, k=1, min_capacity=4) for _ in range(LAYERS))
        self.moes = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.moes:
            x = x + each(x)[0]
        return x.square().mean()


def hugging_face_model() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=512, num_hidden_layers=LAYERS, **sizes, **heads, **experts))


def make(layout: Layout, seed: int) -> Any:
    """An engine that has made a step, so that its optimizer has states."""
    torch.manual_seed(seed)
    is_stock = layout.kind == "stock"
    config = ds_config(layout.stage, **({} if is_stock else {"ep_size": layout.ep}))
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    config["bf16"] = {"enabled": layout.dtype == "bf16"}
    engine = engine_of(StockModel(layout) if is_stock else hugging_face_model(), config)
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


# ---- how much of a model is in one place while its whole weights are put together, or converted

FEW_AND_MANY = (2, 6)
"""Layers."""
SMALL = 16 * 1024
"""Bytes of what is no matrix: counts, norms, indices."""


def save_layers(rank: int, world_size: int, folder: str) -> None:
    """Save models of some layers over two ranks: one part arrives at a time, and the first rank holds the model and one
    parameter more."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    import ds_fsmoe

    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_experts": EXPERTS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    for layers in FEW_AND_MANY:
        torch.manual_seed(0)
        model = OlmoeForCausalLM(OlmoeConfig(**sizes, **heads, **tokens, num_hidden_layers=layers))
        wanted = {name: each.detach().bfloat16() for name, each in model.state_dict().items()}
        engine = engine_of(model, ds_config(1, ep_size=2) | {"bf16": {"enabled": True}})
        engine.save_checkpoint(f"{folder}/{layers}")
        arriving, gather = [], dist.gather

        def counted(
            piece: torch.Tensor, found: Any, arriving: Any = arriving, gather: Any = gather, **named: Any
        ) -> None:
            arriving.append(sum(each.nbytes for each in found or ()))
            gather(piece, found, **named)

        with pytest.MonkeyPatch.context() as patch, LiveMemory() as memory:
            patch.setattr(dist, "gather", counted)
            whole = ds_fsmoe.whole_state_dict(engine)
        largest = max(each.nbytes for each in wanted.values())
        of_model = sum(each.nbytes for each in wanted.values())
        assert of_model > 3 * largest
        assert max(arriving) <= (largest // 2 if rank == 0 else 0)
        assert memory.peak <= SMALL + (of_model + largest if rank == 0 else 0)
        assert (whole is None) == (rank > 0)
        assert [name for name, each in wanted.items() if rank == 0 and not torch.equal(each, whole[name])] == []
        del whole
        engine.destroy()


def held(source: Path, target: Path, form: convert.Form, limit_bytes: int) -> tuple[int, int]:
    """The most bytes of tensors in memory, and the bytes written; each weight is read once. What stays in a file until
    it is used is not held."""
    way, read, read_file = "exact" if form == "fp32" else "weights", [], whole_files.read_file
    take = getattr(whole_files.Whole, way)

    def in_files(*args: Any, **named: Any) -> Any:
        with _disable_current_modes():
            return read_file(*args, **named)

    with pytest.MonkeyPatch.context() as patch, LiveMemory() as memory:
        patch.setattr(whole_files, "read_file", in_files)
        patch.setattr(whole_files.Whole, way, lambda self, name: read.append(name) or take(self, name))
        whole = convert.open_checked(convert.find_tag(source, None))
        written = sum(size for _, size in convert.export_tensors(whole, target, form, [], None, limit_bytes))
    assert 0 < len(read) == len(set(read))
    return memory.peak, written


def test_whole_weights_are_a_model_and_a_parameter_and_convert_holds_a_shard_and_a_layer_of_any_model(
    tmp_path: Path,
) -> None:
    run_on_ranks(save_layers, 2, tmp_path / "ranks", str(tmp_path))
    limit_bytes = 64 * 1024
    for form, itemsize in (("huggingface", 2), ("fp32", 4)):
        layer = itemsize * (EXPERTS * 3 * WIDTH * WIDTH + EXPERTS * WIDTH + 4 * WIDTH * WIDTH)
        # The published form is made of a copy of the gate's and up's weights by transformers.
        copied = itemsize * EXPERTS * 2 * WIDTH * WIDTH if form == "huggingface" else 0
        (few, of_few), (many, of_many) = (
            held(tmp_path / str(layers), tmp_path / f"{form} {layers}", form, limit_bytes) for layers in FEW_AND_MANY
        )
        assert of_many > 2.5 * of_few
        assert many <= few + SMALL
        assert many <= limit_bytes + layer + copied + SMALL
