# SPDX-License-Identifier: Apache-2.0
"""Layers of Hugging Face models in pipeline stages train as their own eager experts do on one process, and go on from
their checkpoints."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("transformers")

from ds_fsmoe.config.reading import ConfigError
from ds_fsmoe.layer.parts import LayerError
from tests.hf_families import NUM_EXPERTS, WIDTH, config_of
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.test_pipeline_stages import Dense, WithExperts

pytestmark = pytest.mark.long

STEPS, LENGTH, WORDS = 3, 8, 128
OF_LOSSES, OF_WEIGHTS = 1e-5, 2e-5
FAMILIES = {"olmoe": "Olmoe", "mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe"}
CHUNKED = {"enabled": True, "num_chunks": {"forward": 2, "backward": 3}}

NOT_TUNED = {"enabled": True, "autotune": False}
EARLY = CHUNKED | {"deterministic": True, "autotune": False}
ONCE_PER_NODE = CHUNKED | {"dispatch": "unpadded", "alltoall": "node_deduplicated", "topology": {"ranks_per_node": 2}}


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
    """A layer by its kind: ``"olmoe"`` and other families, ``"olmoe of 8"`` experts, ``"frozen olmoe"``, ``"dense"``,
    with experts of DeepSpeed's kind ``"slots"`` or ``"slots without noise"``, and the ends, ``"words"`` and
    ``"answer"``."""
    if kind.startswith("slots"):
        of_stock = WithExperts(index, dist.get_rank() % ranks, ranks, WIDTH, 8)
        of_stock.moe.deepspeed_moe.gate.top2_2nd_expert_sampling = kind == "slots"
        return of_stock
    torch.manual_seed(index)
    family, _, num_experts = kind.removeprefix("frozen ").partition(" of ")
    if family in FAMILIES:
        made: nn.Module = Block(family, index, int(num_experts or NUM_EXPERTS))
    else:
        made = Dense(index, WIDTH) if family == "dense" else {"words": Words, "answer": Answer}[family]()
    generator = torch.Generator().manual_seed(index)
    with torch.no_grad():
        for each in made.parameters():
            if each.dim() > 1:
                each.copy_(torch.randn(each.shape, generator=generator) * 0.15)
    if kind.startswith("frozen "):
        made.layer.mlp.experts.requires_grad_(False)
    return made


def layers_of(kinds: tuple[str, ...], ranks: int = 1) -> list[nn.Module]:
    """All layers, with the words first and the answer last."""
    return [layer_of(kind, index, ranks) for index, kind in enumerate(("words", *kinds, "answer"))]


def batches(replica: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for number in range(1000):
        generator = torch.Generator().manual_seed(1000 * replica + number)
        yield tuple(torch.randint(0, WORDS, (2, LENGTH), generator=generator) for _ in range(2))


def of_same_words(words: Words, x_BLM: torch.Tensor) -> torch.Tensor:
    return x_BLM @ words.embedding.weight.t()


@dataclass(frozen=True)
class Job:
    """What is trained in stages."""

    kinds: tuple[str, ...]
    """Of the layers between the words and the answer."""
    num_stages: int = 2
    accumulation: int = 2
    zero: int = 0
    block: dict[str, Any] = field(default_factory=lambda: CHUNKED)
    clipping: float = 0.0
    shares_words: bool = False
    """The answer is given by the words' own vectors."""
    more: dict[str, Any] = field(default_factory=dict)
    """Of DeepSpeed's configuration."""


def eager(job: Job, replicas: int) -> dict[str, torch.Tensor]:
    """What all weights and losses are when one process trains all layers on the batches of all ranks, experts of
    DeepSpeed's kind in its own layers."""
    layers = layers_of(job.kinds)
    for each in layers:
        if isinstance(each, WithExperts):
            each.moe.set_deepspeed_parallelism()
    model = nn.Sequential(*layers[:-1] if job.shares_words else layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = [batches(each) for each in range(replicas)]
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        of_all = []
        for x, y in (next(each) for each in data for _ in range(job.accumulation)):
            found = model(x)
            of_all.append(loss_of(of_same_words(layers[0], found) if job.shares_words else found, y))
        loss = torch.stack(of_all).mean()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), job.clipping or torch.inf))
        optimizer.step()
        losses.append(loss.detach())
    weights = {name: each.detach().clone() for name, each in model.named_parameters()}
    return weights | {"losses": torch.stack(losses), "norms": torch.stack(norms)}


def config_for(job: Job) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": job.accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": job.zero, "reduce_bucket_size": 4096},
        "gradient_clipping": job.clipping,
        "steps_per_print": 1_000_000,
    }
    return config | job.more | {"fsmoe": job.block}


def engine_of(layers: list[nn.Module], num_stages: int, config: dict[str, Any]) -> Any:
    from deepspeed.pipe import PipelineModule

    import ds_fsmoe

    how = {"partition_method": "uniform", "checkpointable_layers": ["Block"]}
    model = PipelineModule(layers, num_stages=num_stages, loss_fn=loss_of, **how)
    return ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def train(job: Job) -> dict[str, torch.Tensor]:
    """Losses and norms of some steps in stages, and on the first rank the weights of all."""
    from deepspeed.pipe import TiedLayerSpec

    import ds_fsmoe

    layers: list[Any] = layers_of(job.kinds, dist.get_world_size() // job.num_stages)
    if job.shares_words:
        shared = {"tied_weight_attr": ["embedding.weight"]}
        layers[0] = TiedLayerSpec("words", SharedWords, **shared)
        layers[-1] = TiedLayerSpec("words", SharedWords, forward_fn=of_same_words, **shared)
    engine = engine_of(layers, job.num_stages, config_for(job))
    data = batches(engine.grid.data_parallel_id)
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(engine.train_batch(data).detach())
        norms.append(torch.tensor(float(engine.get_global_grad_norm() or 0.0)))
    check_what_was_asked_for(engine, job.block)
    whole = ds_fsmoe.whole_state_dict(engine) or {}
    engine.destroy()
    whole = {name.replace("tied_modules.words.", "0."): each for name, each in whole.items()}
    return whole | {"losses": torch.stack(losses), "norms": torch.stack(norms)}


class SharedWords(Words):
    """The first layer where it is the last as well."""

    def __init__(self) -> None:
        super().__init__()
        self.load_state_dict(layer_of("words", 0).state_dict())


def check_what_was_asked_for(engine: Any, block: dict[str, Any]) -> None:
    if "alltoall" in block:
        planned = [each.pipeline.forward.alltoall for each in engine.fsmoe.inner_layers.values()]
        assert set(planned) <= {block["alltoall"]}, planned
    # In the last stage there are gradients of the answer when experts begin.
    is_last = engine.is_last_stage() and engine.fsmoe.num_layers
    if block == EARLY and is_last and engine.grid.data_parallel_size > 1:
        everything, early = engine.fsmoe.reduction.bytes_of_plan()
        assert 0 < early <= everything


def check(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], job: Job) -> None:
    for name in found.keys() & wanted.keys() - ({"norms"} if not job.clipping else set()):
        if "bf16" in job.more:  # losses and norms, against how large they are
            of, most = wanted[name].abs() if name in ("losses", "norms") else torch.inf, 0.03
        else:
            of, most = 1.0, OF_LOSSES if name == "losses" else OF_WEIGHTS
        assert ((found[name].float() - wanted[name]).abs() / of).max().item() <= most, (job, name)


def compare_with_eager(rank: int, world_size: int, jobs: list[Job]) -> None:
    import deepspeed

    deepspeed.init_distributed("gloo")
    for job in jobs:
        wanted, found = eager(job, world_size // job.num_stages), train(job)
        # Of DeepSpeed's experts the first rank has its own.
        assert rank or {name for name in wanted if ".deepspeed_experts." not in name} <= found.keys(), job
        check(found, wanted, job)


AGAIN = [{"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": each}} for each in (True, False)]
HALF = {"bf16": {"enabled": True}}
OF_ALL_FAMILIES = ("olmoe", "dense", "mixtral", "mixtral", "qwen3_moe", "dense")
WITH_EAGER: dict[str, list[Job]] = {
    "experts of both kinds": [Job(("olmoe", *["slots without noise"] * 2, "mixtral"))],
    "two families": [Job(("olmoe", "mixtral of 8"), 2, 4, 1, EARLY, 0.5)],
    "behind a dense stage": [Job(("dense", "qwen3_moe"), 2, 1, 0, {"enabled": True}, 0.5)],
    "each family": [Job((family, family), 2, 4, 0, EARLY) for family in FAMILIES],
    "before a dense stage": [Job((family, "dense"), 2, 1, 1, EARLY, 0.5) for family in FAMILIES],
    "ZeRO 1": [Job((family, family), 2, 4, 1, {"enabled": True}, 0.5) for family in FAMILIES],
    "four stages": [Job(OF_ALL_FAMILIES, 4, 4, zero, EARLY, 0.5) for zero in (0, 1)],
    "sharded": [Job(("olmoe", "dense"), zero=1, block=CHUNKED | {"esp_size": 2}, clipping=0.5)],
    "frozen": [Job(("frozen olmoe", "mixtral"), zero=zero, clipping=0.5) for zero in (0, 1)],
    "shared words": [Job(("olmoe", "mixtral"), zero=zero, clipping=0.5, shares_words=True) for zero in (0, 1)],
    "computed again by DeepSpeed": [Job(("olmoe", "mixtral"), more=each) for each in AGAIN],
    # Without ZeRO DeepSpeed's own optimizer for bf16 waits for ever beside a stage without experts.
    "half precision": [
        Job(kinds, zero=zero, clipping=0.5, more=HALF)
        for zero, kinds in ((0, ("olmoe", "mixtral")), (1, ("dense", "olmoe")))
    ],
    "tokens that cross once to another node, on two nodes": [
        Job((kind, "mixtral"), block=ONCE_PER_NODE | {"ep_size": 4}, clipping=0.5) for kind in ("olmoe", "dense")
    ],
}


@sampled("name", list(WITH_EAGER), drawn=3)
def test_stages_train_as_eager_experts_on_one_process(name: str, tmp_path: Path) -> None:
    run_on_ranks(compare_with_eager, 8 if "two nodes" in name else 4, tmp_path, WITH_EAGER[name])


def refused(rank: int, world_size: int) -> None:
    import deepspeed
    from deepspeed.pipe import PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology

    import ds_fsmoe

    peft = pytest.importorskip("peft")
    deepspeed.init_distributed("gloo")
    tied = TiedLayerSpec("experts", Block, "olmoe", 1, tied_weight_attr=["layer.input_layernorm.weight"])
    adapted = peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, target_parameters=["mlp.experts.down_proj"]), Block("olmoe", 1), adapter_name="default"
    )
    by_data = {"topology": ProcessTopology(["data", "pipe"], [2, 2])}
    by_tensors = {"topology": PipeModelDataParallelTopology(2, 2, 1)}
    two: dict[str, Any] = {"num_stages": 2}
    # Only the ranks with the layer see what is wrong with it.
    by_layer = "must divide the 2 ranks" if rank < 2 else "in another stage of the PipelineModule, refused"
    jobs: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
        (layers_of(("olmoe", "dense")), two, {"ep_size": 4}, by_layer),
        (layers_of(("dense", "dense")), two, {"ep_size": 2}, "this model has no such experts"),
        (layers_of(("dense", "dense")), two, {}, "no stage"),
        (layers_of(("dense", "olmoe")), two, {"placement": {"policy": "lina"}}, 'placement.policy = "lina" '),
        ([Words(), tied, nn.Identity(), Answer()], two, {}, "experts in a TiedLayerSpec cannot be distributed"),
        ([Words(), adapted, nn.Identity(), Answer()], two, {}, "adapters on experts are not supported"),
        (layers_of(("olmoe", "olmoe")), by_data, {}, "make pipe the first axis"),
        (layers_of(("dense", "olmoe")), by_tensors, {}, "tensor-parallel ranks are not supported with experts"),
        (layers_of(("slots", "olmoe"), 2), two, {"ep_size": 1}, "must be equal in all stages"),
    ]
    for layers, how, block, wanted in jobs:
        model = PipelineModule(layers, loss_fn=loss_of, partition_method="uniform", **how)
        config = config_for(Job((), accumulation=1, block={"enabled": True} | block))
        with pytest.raises((LayerError, ConfigError), match=re.escape(wanted)):
            ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)


def test_what_stages_cannot_have_is_refused_on_every_rank(tmp_path: Path) -> None:
    run_on_ranks(refused, 4, tmp_path)


# ---- checkpoints


def engine_with_adam(job: Job, ranks: int, scale: float = 1.0) -> tuple[Any, Any]:
    """An engine, and its batches; weights other than they were, by a factor."""
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}}
    layers = layers_of(job.kinds, ranks)
    with torch.no_grad():
        for each in (each for layer in layers for each in layer.parameters()):
            each.mul_(scale)
    engine = engine_of(layers, job.num_stages, config_for(job) | adam)
    return engine, batches(engine.grid.data_parallel_id)


def stop_and_go_on(rank: int, world_size: int, jobs: list[Job], folder: str) -> None:
    """The first job, once it was stopped, goes on as each of these as it went on without a stop; in the layout that it
    had to the bit."""
    import deepspeed

    import ds_fsmoe

    deepspeed.init_distributed("gloo")
    ranks = world_size // jobs[0].num_stages
    engine, data = engine_with_adam(jobs[0], ranks)
    losses = [engine.train_batch(data).item() for _ in range(STEPS)]
    engine.save_checkpoint(folder)
    saved = ds_fsmoe.whole_state_dict(engine) or {}
    wanted = [engine.train_batch(data).item() for _ in range(2)]
    engine.destroy()
    for job in jobs:
        engine, data = engine_with_adam(job, ranks, scale=0.5)
        for _ in range(STEPS * job.accumulation):
            next(data)
        assert engine.load_checkpoint(folder)[0] is not None
        loaded = ds_fsmoe.whole_state_dict(engine) or {}
        assert [name for name in saved if not torch.equal(saved[name], loaded[name])] == [], job
        found = [engine.train_batch(data).item() for _ in range(2)]
        engine.destroy()
        assert found == (wanted if job == jobs[0] else pytest.approx(wanted, rel=1e-5)), job
        assert losses[0] not in found


MOVING = Job(("olmoe", "dense", "mixtral of 8", "dense"), block=NOT_TUNED, clipping=0.5)
STOPPED: dict[str, list[Job]] = {
    "nothing asked for": [Job(("olmoe", "mixtral of 8"), block={"enabled": True}, clipping=0.5)],
    "behind a dense stage": [Job(("dense", "olmoe"), 2, 1, 1, {"enabled": True}, 0.5)],
    "slots at ZeRO 1": [Job(("slots", "olmoe"), zero=1)],
    "four stages": [Job(("olmoe", "dense", "olmoe", "mixtral", "olmoe", "dense"), 4, 2, 1, CHUNKED, 0.5)],
    "moving within its stages": [
        MOVING,
        replace(MOVING, block=NOT_TUNED | {"ep_size": 1}),
        replace(MOVING, zero=1),
        replace(MOVING, zero=1, block=NOT_TUNED | {"ep_size": 1}),
    ],
}


@sampled("name", list(STOPPED), drawn=2)
def test_stages_that_were_stopped_go_on_to_the_bit_or_within_other_ranks(name: str, tmp_path: Path) -> None:
    run_on_ranks(stop_and_go_on, 4, tmp_path / "ranks", STOPPED[name], str(tmp_path / "saved"))
