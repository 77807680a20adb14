# SPDX-License-Identifier: Apache-2.0
"""Layers of Hugging Face models in pipeline stages train as their own eager experts do on one process."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("transformers")

from tests.hf_families import NUM_EXPERTS, WIDTH, config_of
from tests.ranks import run_on_ranks
from tests.samples import sampled

STEPS, LENGTH, WORDS = 3, 8, 128
OF_LOSSES, OF_WEIGHTS = 1e-5, 2e-5
FAMILIES = {"olmoe": "Olmoe", "mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe"}
CHUNKED = {"enabled": True, "num_chunks": {"forward": 2, "backward": 3}}


class Words(nn.Module):
    """The first layer of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)

    def forward(self, x_BL: torch.Tensor) -> torch.Tensor:
        return self.embedding(x_BL)


class Block(nn.Module):
    """A decoder layer of a family, which makes all for itself that a model would give it."""

    def __init__(self, family: str, index: int, num_experts: int = NUM_EXPERTS) -> None:
        super().__init__()
        config = config_of(family)
        config._attn_implementation = config._experts_implementation = "eager"
        for name in ("num_experts", "num_local_experts"):
            if hasattr(config, name):
                setattr(config, name, num_experts)
        models = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        self.layer = getattr(models, f"{FAMILIES[family]}DecoderLayer")(config, index)
        self.rotary = getattr(models, f"{FAMILIES[family]}RotaryEmbedding")(config)

    def forward(self, x_BLM: torch.Tensor) -> torch.Tensor:
        places_BL = torch.arange(x_BLM.shape[1])[None].expand(len(x_BLM), -1)
        later_LL = torch.full((x_BLM.shape[1],) * 2, torch.finfo(x_BLM.dtype).min, dtype=x_BLM.dtype).triu(1)
        found = self.layer(
            x_BLM,
            attention_mask=later_LL[None, None],
            position_ids=places_BL,
            position_embeddings=self.rotary(x_BLM, places_BL),
        )
        return found[0] if isinstance(found, tuple) else found


class Dense(nn.Module):
    """A layer without experts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BLM: torch.Tensor) -> torch.Tensor:
        return x_BLM + torch.tanh(self.linear(x_BLM))


class WithMoE(Dense):
    """A layer with experts of DeepSpeed's kind: by global id the same for every layout.

    Args:
        index: the number of the layer.
        ranks: the ranks of a stage, over which they are spread.
        drop_tokens: whether slots are sent, some tokens finding none.
    """

    def __init__(self, index: int, ranks: int, drop_tokens: bool) -> None:
        from deepspeed.moe.layer import MoE

        from ds_fsmoe.components.experts.gpt import GPTFeedForward

        super().__init__()
        self.moe = MoE(WIDTH, GPTFeedForward(WIDTH, 28), 8, ranks, k=2, use_rts=False, drop_tokens=drop_tokens)
        experts = self.moe.deepspeed_moe.experts.deepspeed_experts
        self.first = dist.get_rank() % ranks * len(experts)
        self.index = index

    def fill(self) -> None:
        """Make each expert what it is on any rank."""
        for local, expert in enumerate(self.moe.deepspeed_moe.experts.deepspeed_experts):
            generator = torch.Generator().manual_seed(100 * self.index + self.first + local)
            with torch.no_grad():
                for each in expert.parameters():
                    each.copy_(torch.randn(each.shape, generator=generator) * 0.2)

    def forward(self, x_BLM: torch.Tensor) -> torch.Tensor:
        return x_BLM + self.moe(super().forward(x_BLM))[0]


class Answer(nn.Module):
    """The last layer of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x_BLM: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x_BLM))


def loss_of(logits_BLV: torch.Tensor, wanted_BL: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits_BLV.float().flatten(0, 1), wanted_BL.flatten())


def layer_of(kind: str, index: int, ranks: int = 1) -> nn.Module:
    """``"olmoe"``, ``"olmoe of 8"`` experts, ``"dense"``, ``"slots"``, ``"dropless"``, ``"words"`` or ``"answer"``."""
    torch.manual_seed(index)
    family, _, num_experts = kind.partition(" of ")
    if family in FAMILIES:
        made: nn.Module = Block(family, index, int(num_experts or NUM_EXPERTS))
    elif kind in ("slots", "dropless"):
        made = WithMoE(index, ranks, kind == "slots")
    else:
        made = {"words": Words, "dense": Dense, "answer": Answer}[family]()
    generator = torch.Generator().manual_seed(index)
    with torch.no_grad():
        for each in made.parameters():
            if each.dim() > 1:
                each.copy_(torch.randn(each.shape, generator=generator) * 0.15)
    if isinstance(made, WithMoE):
        made.fill()
    return made


def layers_of(kinds: tuple[str, ...], ranks: int = 1) -> list[nn.Module]:
    """All layers, with the words first and the answer last."""
    return [layer_of(kind, index, ranks) for index, kind in enumerate(("words", *kinds, "answer"))]


def batches(replica: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for number in range(1000):
        generator = torch.Generator().manual_seed(1000 * replica + number)
        yield tuple(torch.randint(0, WORDS, (2, LENGTH), generator=generator) for _ in range(2))


def eager(kinds: tuple[str, ...], replicas: int, accumulation: int, clipping: float) -> dict[str, torch.Tensor]:
    """What all weights and losses are when one process trains all layers on the batches of all ranks."""
    model = nn.Sequential(*layers_of(kinds))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = [batches(each) for each in range(replicas)]
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        of_all = [loss_of(model(x), y) for each in data for x, y in (next(each) for _ in range(accumulation))]
        loss = torch.stack(of_all).mean()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clipping or torch.inf))
        optimizer.step()
        losses.append(loss.detach())
    weights = {name: each.detach().clone() for name, each in model.named_parameters()}
    return weights | {"losses": torch.stack(losses), "norms": torch.stack(norms)}


def config_for(accumulation: int, zero_stage: int, clipping: float, block: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": zero_stage, "reduce_bucket_size": 4096},
        "gradient_clipping": clipping,
        "steps_per_print": 1_000_000,
    } | ({} if block is None else {"fsmoe": block})


def engine_of(layers: list[nn.Module], num_stages: int, config: dict[str, Any]) -> Any:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import ds_fsmoe

    model = PipelineModule(layers, num_stages=num_stages, loss_fn=loss_of, partition_method="uniform")
    initialize = ds_fsmoe.initialize if "fsmoe" in config else deepspeed.initialize
    return initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def train(
    kinds: tuple[str, ...],
    num_stages: int,
    accumulation: int,
    zero_stage: int,
    block: dict[str, Any] | None,
    clipping: float = 0.0,
) -> dict[str, torch.Tensor]:
    """What this rank has of weights, losses and norms after some steps in stages; on the first rank the weights of
    all."""
    import ds_fsmoe

    engine = engine_of(
        layers_of(kinds, dist.get_world_size() // num_stages),
        num_stages,
        config_for(accumulation, zero_stage, clipping, block),
    )
    data = batches(engine.grid.data_parallel_id)
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(engine.train_batch(data).detach())
        norms.append(torch.tensor(float(engine.get_global_grad_norm() or 0.0)))
    own = {f"own {name}": each.detach().clone() for name, each in engine.module.named_parameters()}
    weights = own | ({} if block is None else ds_fsmoe.whole_state_dict(engine) or {})
    engine.destroy()
    return weights | {"losses": torch.stack(losses), "norms": torch.stack(norms)}


def differences(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], with_norms: bool) -> Iterator[str]:
    for name, value in found.items():
        if name not in wanted or (name == "norms" and not with_norms):
            continue
        off = (value.float() - wanted[name]).abs().max().item()
        if not off <= (OF_LOSSES if name == "losses" else OF_WEIGHTS):
            yield f"{name} differs by {off:.2g}"


Case = tuple[tuple[str, ...], int, int, int, dict[str, Any], float]


def compare_with_eager(rank: int, world_size: int, cases: list[Case]) -> list[str]:
    import deepspeed

    deepspeed.init_distributed("gloo")
    said = []
    for case in cases:
        kinds, num_stages, accumulation, zero_stage, block, clipping = case
        wanted = eager(kinds, world_size // num_stages, accumulation, clipping)
        found = train(kinds, num_stages, accumulation, zero_stage, block, clipping)
        missing = {name for name in wanted if name not in found} if rank == 0 else set()
        said += [f"{case}: {each}" for each in (*missing, *differences(found, wanted, clipping > 0))]
    return said


@sampled(
    "cases",
    [
        [
            (("olmoe", "mixtral"), 2, 4, 1, CHUNKED, 0.5),
            (("olmoe", "dense"), 2, 1, 0, {"enabled": True}, 0.5),
        ],
    ],
    kept=[0],
)
def test_stages_train_as_eager_experts_on_one_process(cases: list[Case], tmp_path: Path) -> None:
    assert [each for of_rank in run_on_ranks(compare_with_eager, 4, tmp_path, cases) for each in of_rank] == []


def in_stages(rank: int, world_size: int, cases: list[Case], is_ours: bool) -> list[dict[str, torch.Tensor]]:
    import deepspeed

    deepspeed.init_distributed("gloo")
    return [
        train(kinds, num_stages, accumulation, zero_stage, block if is_ours else None, clipping)
        for kinds, num_stages, accumulation, zero_stage, block, clipping in cases
    ]


def compare_with_stock(cases: list[Case], world_size: int, folder: Path, tolerance: float = OF_WEIGHTS) -> None:
    """Stock DeepSpeed trains all experts of Hugging Face layers on each rank; other layers are cut as ours are."""
    stocks, ours = (
        run_on_ranks(in_stages, world_size, folder / name, cases, name == "ours") for name in ("stock", "ours")
    )
    said = []
    for number, case in enumerate(cases):
        wholes = ours[0][number]
        for rank, (theirs, found) in enumerate(zip(stocks, ours, strict=True)):
            for name, wanted in theirs[number].items():
                if name == "norms":  # not the norm of all, without ZeRO
                    continue
                mine = found[number][name]
                whole = wholes[name.removeprefix("own ")] if mine.shape != wanted.shape else mine
                off = (whole - wanted).abs().max().item()
                if not off <= tolerance:
                    said.append(f"{case}, rank {rank}: {name} differs by {off:.2g}")
    assert said == []


@sampled(
    "cases",
    [
        [(("olmoe", "slots", "dropless", "mixtral"), 2, 2, 0, CHUNKED, 0.0)],
        [(("slots", "olmoe"), 2, 2, 0, CHUNKED, 0.0)],
    ],
    kept=[0],
    ids=str,
)
def test_stages_with_experts_of_both_kinds_train_as_stock_does(cases: list[Case], tmp_path: Path) -> None:
    compare_with_stock(cases, 4, tmp_path)


def stop_and_go_on(rank: int, world_size: int, cases: list[Case], folder: str) -> list[str]:
    """How a run that was stopped goes on otherwise than one that was not."""
    import deepspeed

    import ds_fsmoe

    deepspeed.init_distributed("gloo")
    said = []
    for number, (kinds, num_stages, accumulation, zero_stage, block, clipping) in enumerate(cases):
        config = config_for(accumulation, zero_stage, clipping, block)
        config["optimizer"] = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}
        layers = layers_of(kinds)
        engine = engine_of(layers, num_stages, config)
        data = batches(engine.grid.data_parallel_id)
        losses = [engine.train_batch(data).item() for _ in range(STEPS)]
        engine.save_checkpoint(f"{folder}/{number}")
        saved = ds_fsmoe.whole_state_dict(engine) or {}
        wanted = [engine.train_batch(data).item() for _ in range(2)]
        engine.destroy()
        layers = layers_of(kinds)
        with torch.no_grad():
            for layer in layers:
                for each in layer.parameters():
                    each.mul_(0.5)
        engine = engine_of(layers, num_stages, config)
        data = batches(engine.grid.data_parallel_id)
        for _ in range(STEPS * accumulation):
            next(data)
        if engine.load_checkpoint(f"{folder}/{number}")[0] is None:
            said.append(f"{kinds}: nothing was loaded")
        loaded = ds_fsmoe.whole_state_dict(engine) or {}
        said += [f"{kinds}: {name} was not kept" for name in saved if not torch.equal(saved[name], loaded[name])]
        found = [engine.train_batch(data).item() for _ in range(2)]
        engine.destroy()
        if found != wanted or losses[0] in found:
            said.append(f"{kinds}, ZeRO {zero_stage}: losses {found} for {wanted}")
    return said


@sampled(
    "cases",
    [
        [(("olmoe", "mixtral of 8"), 2, 2, 0, {"enabled": True}, 0.5)],
        [(("dense", "olmoe"), 2, 1, 1, {"enabled": True}, 0.5), (("olmoe", "dense"), 2, 2, 0, CHUNKED, 0.5)],
    ],
    kept=[0],
    ids=str,
)
def test_stages_that_were_stopped_go_on_to_the_bit(cases: list[Case], tmp_path: Path) -> None:
    found = run_on_ranks(stop_and_go_on, 4, tmp_path / "ranks", cases, str(tmp_path / "saved"))
    assert [each for of_rank in found for each in of_rank] == []
