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

from ds_fsmoe.config.reading import ConfigError
from ds_fsmoe.files.runs import read_run
from ds_fsmoe.layer.parts import LayerError
from tests.hf_families import NUM_EXPERTS, WIDTH, config_of
from tests.ranks import run_on_ranks
from tests.samples import sampled

pytestmark = pytest.mark.long

STEPS, LENGTH, WORDS = 3, 8, 128
OF_LOSSES, OF_WEIGHTS = 1e-5, 2e-5
FAMILIES = {"olmoe": "Olmoe", "mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe"}
CHUNKED = {"enabled": True, "num_chunks": {"forward": 2, "backward": 3}}

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
    """A layer by its kind: ``"olmoe"`` and other families, ``"olmoe of 8"`` experts, ``"frozen olmoe"``, ``"dense"``,
    with experts of DeepSpeed's kind ``"slots"`` and ``"dropless"``, and the ends, ``"words"`` and ``"answer"``."""
    torch.manual_seed(index)
    family, _, num_experts = kind.removeprefix("frozen ").partition(" of ")
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

    model = PipelineModule(
        layers,
        num_stages=num_stages,
        loss_fn=loss_of,
        partition_method="uniform",
        checkpointable_layers=["Block"],
    )
    initialize = ds_fsmoe.initialize if "fsmoe" in config else deepspeed.initialize
    return initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def train(
    kinds: tuple[str, ...],
    num_stages: int,
    accumulation: int,
    zero_stage: int,
    block: dict[str, Any] | None,
    clipping: float = 0.0,
    steps: int = STEPS,
    **more: Any,
) -> dict[str, torch.Tensor]:
    """What this rank has of weights, losses and norms after some steps in stages; on the first rank the weights of
    all."""
    import ds_fsmoe

    config = config_for(accumulation, zero_stage, clipping, block) | more
    engine = engine_of(layers_of(kinds, dist.get_world_size() // num_stages), num_stages, config)
    data = batches(engine.grid.data_parallel_id)
    losses, norms = [], []
    for _ in range(steps):
        losses.append(engine.train_batch(data).detach())
        norms.append(torch.tensor(float(engine.get_global_grad_norm() or 0.0)))
    if block is not None and "alltoall" in block:
        planned = [each.pipeline.forward.alltoall for each in engine.fsmoe.inner_layers.values()]
        assert set(planned) <= {block["alltoall"]}, planned
    if block is not None and block.get("autotune"):
        tuner = engine.fsmoe.autotune
        assert tuner.is_settled
        assert bool(tuner.result.rows) == bool(engine.fsmoe.num_layers)
    if block is EARLY and engine.fsmoe.num_layers and engine.grid.data_parallel_size > 1:
        everything, early = engine.fsmoe.reduction.bytes_of_plan()
        assert 0 < early <= everything
    own = {f"own {name}": ds_fsmoe.own_part(each).clone() for name, each in engine.module.named_parameters()}
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
            (("olmoe", "mixtral of 8"), 2, 4, 1, EARLY, 0.5),
            (("dense", "qwen3_moe"), 2, 1, 0, {"enabled": True}, 0.5),
        ],
        [((family, family), 2, 4, 0, EARLY, 0.0) for family in FAMILIES],
        [((family, "dense"), 2, 1, 1, EARLY, 0.5) for family in FAMILIES],
        [((family, family), 2, 4, 1, {"enabled": True}, 0.5) for family in FAMILIES],
        [(("olmoe", "dense", "mixtral", "mixtral", "qwen3_moe", "dense"), 4, 4, stage, EARLY, 0.5) for stage in (0, 1)],
        [(("olmoe", "dense"), 2, 2, 1, CHUNKED | {"esp_size": 2}, 0.5)],
        [(("frozen olmoe", "mixtral"), 2, 2, stage, CHUNKED, 0.5) for stage in (0, 1)],
    ],
    kept=[0],
    ids=str,
)
def test_stages_train_as_eager_experts_on_one_process(cases: list[Case], tmp_path: Path) -> None:
    assert [each for of_rank in run_on_ranks(compare_with_eager, 4, tmp_path, cases) for each in of_rank] == []


@pytest.mark.slow
def test_tokens_of_a_stage_on_two_nodes_cross_once_and_train_as_eager_experts(tmp_path: Path) -> None:
    cases = [((kind, "mixtral"), 2, 2, 0, ONCE_PER_NODE | {"ep_size": 4}, 0.5) for kind in ("olmoe", "dense")]
    assert [each for of_rank in run_on_ranks(compare_with_eager, 8, tmp_path, cases) for each in of_rank] == []


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


@sampled(
    ("world_size", "cases"),
    [
        (4, [(("dropless", "dropless"), 2, 2, stage, CHUNKED | {"dispatch": "unpadded"}, 0.0) for stage in (0, 1)]),
        (8, [(("dropless", "dropless"), 2, 2, stage, ONCE_PER_NODE, 0.0) for stage in (0, 1)]),
        (8, [(("dropless", "dense"), 2, 2, 0, ONCE_PER_NODE, 0.0)]),
    ],
    kept=[],
    ids=str,
)
def test_rows_of_deepspeeds_layers_in_stages_train_as_stock_does(
    world_size: int, cases: list[Case], tmp_path: Path
) -> None:
    compare_with_stock(cases, world_size, tmp_path, tolerance=1e-6)


def of_same_words(words: Words, x_BLM: torch.Tensor) -> torch.Tensor:
    return x_BLM @ words.embedding.weight.t()


def share_words(rank: int, world_size: int, zero_stage: int) -> list[str]:
    import deepspeed
    from deepspeed.pipe import TiedLayerSpec

    import ds_fsmoe

    deepspeed.init_distributed("gloo")
    kinds = ("olmoe", "mixtral")
    shared = {"tied_weight_attr": ["embedding.weight"]}
    layers = [layer_of(kind, index) for index, kind in enumerate(kinds, 1)]
    torch.manual_seed(0)
    layers = [TiedLayerSpec("words", Words, **shared), *layers]
    layers.append(TiedLayerSpec("words", Words, forward_fn=of_same_words, **shared))
    engine = engine_of(layers, 2, config_for(2, zero_stage, 0.5, CHUNKED))
    data = batches(engine.grid.data_parallel_id)
    losses = torch.stack([engine.train_batch(data).detach() for _ in range(STEPS)])
    weights = ds_fsmoe.whole_state_dict(engine) or {}
    norm = engine.get_global_grad_norm()
    engine.destroy()
    wanted, norms = words_on_one_process(kinds)
    found = {name.replace("tied_modules.words.", "0."): each for name, each in weights.items()} | {"losses": losses}
    missing = [name for name in wanted if name not in found] if rank == 0 else []
    said = [*missing, *differences(found, wanted, with_norms=False)]
    return said if abs(norm - norms[-1]) < 1e-4 else [*said, f"norm {norm} for {norms[-1]}"]


def words_on_one_process(kinds: tuple[str, ...]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights, losses and norms of a model whose answers are by the words' own vectors."""
    torch.manual_seed(0)
    model = nn.Sequential(Words(), *(layer_of(kind, index) for index, kind in enumerate(kinds, 1)))
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.5), [batches(0), batches(1)]
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        of_all = [
            loss_of(of_same_words(model[0], model(x)), y) for each in data for x, y in (next(each) for _ in range(2))
        ]
        loss = torch.stack(of_all).mean()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        losses.append(loss.detach())
    return dict(model.named_parameters()) | {"losses": torch.stack(losses)}, norms


@sampled("zero_stage", [0, 1], kept=[])
def test_stages_with_experts_that_share_the_words_train_as_one_process(zero_stage: int, tmp_path: Path) -> None:
    assert run_on_ranks(share_words, 4, tmp_path, zero_stage) == [[]] * 4


def compute_again(rank: int, world_size: int) -> list[str]:
    import deepspeed

    deepspeed.init_distributed("gloo")
    kinds, said = ("olmoe", "mixtral"), []
    wanted = eager(kinds, 2, 2, 0.0)
    for is_reentrant in (True, False):
        again = {"activation_checkpoint_interval": 1, "use_reentrant": is_reentrant}
        said += differences(train(kinds, 2, 2, 0, CHUNKED, pipeline=again), wanted, with_norms=False)
    return said


@pytest.mark.slow
def test_layers_that_deepspeed_computes_again_in_a_stages_backward_train_as_eager_experts(tmp_path: Path) -> None:
    assert run_on_ranks(compute_again, 4, tmp_path) == [[]] * 4


HALF = {"bf16": {"enabled": True}}


def in_half_precision(rank: int, world_size: int, zero_stage: int, kinds: tuple[str, ...]) -> dict[str, float]:
    """How far losses and norms in bf16 are from those of float32, against how large they are."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    wanted = eager(kinds, 2, 2, 0.5)
    found = train(kinds, 2, 2, zero_stage, CHUNKED, 0.5, **HALF)
    return {name: ((found[name] - wanted[name]).abs() / wanted[name]).max().item() for name in ("losses", "norms")}


@sampled(
    ("zero_stage", "kinds"),
    [(stage, kinds) for stage in (0, 1) for kinds in (("olmoe", "mixtral"), ("dense", "olmoe"))],
    kept=[],
    ids=str,
)
def test_stages_in_half_precision_have_nearly_the_losses_and_norms_of_float32(
    zero_stage: int, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    """Without ZeRO DeepSpeed's own optimizer for bf16 waits for ever beside a stage without experts."""
    for found in run_on_ranks(in_half_precision, 4, tmp_path, zero_stage, kinds):
        assert max(found.values()) < 0.03


def record(rank: int, world_size: int, folder: str) -> None:
    import deepspeed

    deepspeed.init_distributed("gloo")
    block = CHUNKED | {"metrics_every": 2, "record": {"dir": folder}}
    train(("dense", "olmoe"), 2, 2, 0, block)


@pytest.mark.slow
def test_what_routers_of_a_later_stage_choose_is_recorded(tmp_path: Path) -> None:
    run_on_ranks(record, 4, tmp_path / "ranks", str(tmp_path / "run"))
    run = read_run(tmp_path / "run")
    (row,) = run.routers
    assert list(row["layers"]) == ["stage1/L00"]
    # Two ranks of the stage, two micro batches of two sequences, two choices.
    assert sum(row["layers"]["stage1/L00"]["tokens_E"]) == 2 * 2 * 2 * LENGTH * 2


def what_is_said(rank: int, world_size: int) -> list[str]:
    """What each of these is refused with on this rank."""
    import deepspeed
    from deepspeed.pipe import PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology

    import ds_fsmoe

    peft = pytest.importorskip("peft")
    deepspeed.init_distributed("gloo")
    by_data = ProcessTopology(["data", "pipe"], [2, 2])
    tied = [
        TiedLayerSpec("experts", Block, "olmoe", 1, tied_weight_attr=["layer.input_layernorm.weight"]),
        nn.Identity(),
    ]
    adapted = peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, target_parameters=["mlp.experts.down_proj"]), Block("olmoe", 1), adapter_name="default"
    )
    refused: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (layers_of(("olmoe", "dense")), {"num_stages": 2}, {"ep_size": 4}),
        (layers_of(("dense", "dense")), {"num_stages": 2}, {"ep_size": 2}),
        (layers_of(("dense", "olmoe")), {"num_stages": 2}, {"placement": {"policy": "lina"}}),
        ([Words(), *tied, Answer()], {"num_stages": 2}, {}),
        ([Words(), adapted, nn.Identity(), Answer()], {"num_stages": 2}, {}),
        (layers_of(("olmoe", "olmoe")), {"topology": by_data}, {}),
        (layers_of(("dense", "olmoe")), {"topology": PipeModelDataParallelTopology(2, 2, 1)}, {}),
        (layers_of(("slots", "olmoe"), 2), {"num_stages": 2}, {"ep_size": 1}),
    ]
    said = []
    for layers, how, block in refused:
        model = PipelineModule(layers, loss_fn=loss_of, partition_method="uniform", **how)
        config = config_for(1, 0, 0.0, {"enabled": True} | block)
        with pytest.raises((LayerError, ConfigError)) as caught:
            ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        said.append(str(caught.value))
    return said


def test_what_stages_cannot_have_is_refused_on_every_rank(tmp_path: Path) -> None:
    wanted = [
        "must divide the 2 ranks",
        "this model has no such experts",
        'placement.policy = "lina" ',
        "experts in a TiedLayerSpec cannot be distributed",
        "adapters on experts are not supported",
        "make pipe the first axis",
        "tensor-parallel ranks are not supported with experts",
        "must be equal in all stages",
    ]
    of_ranks = run_on_ranks(what_is_said, 4, tmp_path)
    for said in of_ranks:
        assert [(each, text) for each, text in zip(wanted, said, strict=True) if each not in text] == []
    # Only the ranks with the layer see what is wrong with it.
    assert "in another stage of the PipelineModule, refused" in of_ranks[3][0]
    assert "in another stage" not in of_ranks[0][0]


TUNED = {"enabled": True, "autotune": {"enabled": True, "trials": 1}, "num_chunks": {"max": 2}}


def tune(rank: int, world_size: int, kinds: tuple[str, ...], block: dict[str, Any]) -> float:
    """How far a tuned run is from one that is not."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    plain, tuned = (
        train(kinds, 2, 2, 0, each | block, steps=30) for each in ({"enabled": True, "autotune": False}, TUNED)
    )
    return max((tuned[name] - each).abs().max().item() for name, each in plain.items())


@sampled(
    ("world_size", "kinds", "block"),
    [(4, ("olmoe", "dense"), {}), (8, ("dense", "mixtral"), {"ep_size": 4, "topology": {"ranks_per_node": 2}})],
    kept=[],
    ids=str,
)
def test_plans_for_experts_in_stages_are_measured_between_batches(
    world_size: int, kinds: tuple[str, ...], block: dict[str, Any], tmp_path: Path
) -> None:
    assert max(run_on_ranks(tune, world_size, tmp_path, kinds, block)) < 2e-4
