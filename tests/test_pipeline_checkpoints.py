# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of pipeline stages goes on with other ranks within each stage; every number arrives, to the bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ds_fsmoe.checkpoint_files.convert import export_stock, export_tensors, open_checked
from ds_fsmoe.checkpoint_files.huggingface import read_tensors
from ds_fsmoe.checkpoint_files.pieces import MASTER
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.checkpoint_files.whole import Whole
from tests.hurry import hurry
from tests.ranks import run_on_ranks
from tests.samples import draw
from tests.small_model import BATCH, LENGTH, WIDTH
from tests.test_pipeline_stages import Dense, WithExperts, engine_in_stages

pytestmark = pytest.mark.long

BEFORE, AFTER = 2, 2
MICRO_BATCHES = 4
"""Of a step, on all ranks: so a step is the same on any number of them."""
OPTIMIZERS = {
    "adam": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    "sgd": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
}
STATES = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


class Layout(NamedTuple):
    """How a job of two stages is laid out."""

    ranks: int
    """Those of a stage."""
    ep: int
    zero: int
    dtype: str = "fp32"
    esp: int = 1


class Routed(WithExperts):
    """By numbers alone: other ranks would draw other random ones."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.moe.deepspeed_moe.gate.top2_2nd_expert_sampling = False


class Source(NamedTuple):
    """A job that is saved."""

    layout: Layout
    optimizer: str
    kinds: tuple[str, ...]
    """What each stage has; "tied": both have one more layer, with a weight in common."""


SOURCES = [
    Source(Layout(2, 2, 0), "adam", ("dense", "moe")),
    Source(Layout(2, 2, 1), "sgd", ("moe", "moe")),
    Source(Layout(2, 2, 0), "sgd", ("moe", "moe", "tied")),
    Source(Layout(2, 2, 1), "adam", ("dense", "moe", "tied")),
    Source(Layout(2, 2, 0, "bf16"), "adam", ("moe", "moe")),
    Source(Layout(2, 1, 1, "fp32", 2), "adam", ("moe", "dense")),
    Source(Layout(1, 1, 0), "adam", ("moe", "dense")),
]
TARGETS = [
    Layout(2, 1, 0),
    Layout(2, 2, 1),
    Layout(1, 1, 1),
    Layout(4, 2, 0),
    Layout(4, 4, 1),
    Layout(2, 1, 1, "bf16"),
    Layout(2, 1, 0, "fp32", 2),
]
OTHERS = [
    (source, target)
    for source, each in enumerate(SOURCES)
    for target, layout in enumerate(TARGETS)
    if layout != each.layout and (layout.ranks < 4 or (source + target) % 3 == 0) and (source, target) != (0, 1)
]
# The first source is looked at as well, and one with weights in common.
MOVES = [
    (0, 1),
    *draw("moves of stages", OTHERS, 2),
    *draw("moves of shared weights", [each for each in OTHERS if each[0] in (2, 3)], 1),
]


def make(rank: int, layout: Layout, optimizer: str, kinds: tuple[str, ...], scale: float = 1.0, **options: Any) -> Any:
    import deepspeed
    from deepspeed.pipe import TiedLayerSpec

    deepspeed.init_distributed("gloo")
    of_stages = [each for each in kinds if each != "tied"]
    made = [Routed(i, rank % layout.ep, layout.ep) if kind == "moe" else Dense(i) for i, kind in enumerate(of_stages)]
    layers: list[Any] = [each for i, layer in enumerate(made) for each in (layer, Dense(10 + i))]
    if "tied" in kinds:
        # What is not named as tied has one name on both stages, and a value of its own on each.
        tied = TiedLayerSpec("edge", Dense, 50, tied_weight_attr="linear.weight")
        layers = [tied, *layers, tied]
    config = {
        "gradient_accumulation_steps": MICRO_BATCHES // layout.ranks,
        "optimizer": OPTIMIZERS[optimizer],
        "zero_optimization": {"stage": layout.zero, "reduce_bucket_size": 4096},
    }
    if layout.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    block = {"enabled": True, "autotune": False, "esp_size": layout.esp}
    return engine_in_stages(layers, config, block, scale, **options)


def train(engine: Any, rank: int, layout: Layout, first: int, steps: int) -> list[float]:
    def batches() -> Iterator[tuple[torch.Tensor, ...]]:
        for step in range(first, first + steps):
            for number in range(rank % layout.ranks, MICRO_BATCHES, layout.ranks):
                generator = torch.Generator().manual_seed(1000 * step + number)
                made = (torch.randn(BATCH, LENGTH, WIDTH, generator=generator) for _ in range(2))
                yield tuple(each.to(torch.bfloat16 if layout.dtype == "bf16" else torch.float32) for each in made)

    data = batches()
    return [engine.train_batch(data).item() for _ in range(steps)]


def save(rank: int, world_size: int, numbers: list[int], folder: str) -> None:
    """Save some sources, and the losses of each as it goes on."""
    hurry()
    for number in numbers:
        layout, optimizer, kinds = SOURCES[number]
        engine = make(rank, layout, optimizer, kinds)
        train(engine, rank, layout, 0, BEFORE)
        engine.save_checkpoint(f"{folder}/{number}", "tag", client_state={"mine": number})
        losses = train(engine, rank, layout, BEFORE, AFTER)
        if rank == 0:
            Path(folder, f"{number}.json").write_text(json.dumps(losses))
        engine.destroy()


def move(rank: int, world_size: int, pairs: list[tuple[int, int]], folder: str) -> None:
    """Go on from sources in other layouts, with the losses of the runs that went on."""
    hurry()
    for source, target in pairs:
        layout, (saved, optimizer, kinds) = TARGETS[target], SOURCES[source]
        engine = make(rank, layout, optimizer, kinds, scale=0.3)
        _, client_state = engine.load_checkpoint(f"{folder}/{source}", "tag")
        assert client_state["mine"] == source
        assert "optimizer" not in client_state
        assert engine.global_steps == BEFORE
        engine.save_checkpoint(f"{folder}/{source}-{target}", "tag")
        losses, wanted = train(engine, rank, layout, BEFORE, AFTER), Path(folder, f"{source}.json").read_text()
        if saved.dtype == layout.dtype == "fp32":
            assert losses == pytest.approx(json.loads(wanted), rel=1e-6), (saved, layout)
        engine.destroy()


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources, each in some of the targets."""
    root = tmp_path_factory.mktemp("moved")
    for ranks in (1, 2):
        numbers = [
            each for each in sorted({1, *(source for source, _ in MOVES)}) if SOURCES[each].layout.ranks == ranks
        ]
        run_on_ranks(save, 2 * ranks, root / f"from{ranks}", numbers, str(root))
    for ranks in (1, 2, 4):
        pairs = [pair for pair in dict.fromkeys(MOVES) if TARGETS[pair[1]].ranks == ranks]
        run_on_ranks(move, 2 * ranks, root / f"to{ranks}", pairs, str(root))
    return root


def test_weights_and_states_of_all_stages_arrive_to_the_bit_and_the_run_goes_on(moved: Path) -> None:
    for source, target in MOVES:
        _, optimizer, kinds = SOURCES[source]
        for stage in range(2):
            was, now = (Whole(moved / each / "tag", stage=stage) for each in (f"{source}", f"{source}-{target}"))
            assert was.num_stages == now.num_stages == 2
            assert sorted(was.names()) == sorted(now.names())
            of_experts = sum(each == "moe" for each in kinds) * (1 + 4 * 4)
            assert len(list(now.names())) == of_experts + 2 * (4 + ("tied" in kinds))
            for name in was.names():
                for item in (MASTER, *STATES[optimizer]):
                    assert torch.equal(was.part(name, item), now.part(name, item)), (source, target, name, item)
                expected = was.part(name, MASTER).to(now.weights(name).dtype)
                assert torch.equal(now.weights(name), expected), (source, target, name)


def test_what_is_not_tied_has_a_value_on_each_stage(moved: Path, tmp_path: Path) -> None:
    for source in {source for source, _ in MOVES if "tied" in SOURCES[source].kinds}:
        first, last = (Whole(moved / str(source) / "tag", stage=stage) for stage in range(2))
        weight, bias = (f"tied_modules.edge.linear.{each}" for each in ("weight", "bias"))
        assert torch.equal(first.weights(weight), last.weights(weight))
        assert not torch.equal(first.weights(bias), last.weights(bias))
        with pytest.raises(CheckpointError, match=r"edge\.linear\.bias differs between the stages 0, 1"):
            list(export_tensors(first, tmp_path / str(source), "fp32", (), None, 1 << 30))


OF_FOUR = (
    "has 2 pipeline stages, and this job has 4",
    "Load it into PipelineModule(num_stages=2)",
    "ds_fsmoe convert --to fp32",
)
CUT_ELSEWHERE = (
    "stage 0 of the pipeline had layers 0 to 1 and has layers 0 to 2 now",
    "stage 1 of the pipeline had layers 2 to 3 and has layers 3 to 3 now",
    "partition_method",
)


def refusals(rank: int, world_size: int, folder: str) -> None:
    hurry()
    layout, optimizer, kinds = SOURCES[0]
    for to, options, with_states, words in (
        (layout, {"partition_method": "type:routed"}, True, CUT_ELSEWHERE),
        (Layout(1, 1, 0), {"num_stages": 4}, True, OF_FOUR),
        (Layout(1, 1, 0), {"num_stages": 4}, False, OF_FOUR),
    ):
        engine = make(rank, to, optimizer, kinds, **options)
        weights = [each.detach().clone() for each in engine.module.parameters()]
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(f"{folder}/0", "tag", load_optimizer_states=with_states)
        assert [each for each in words if each not in str(caught.value)] == []
        assert all(map(torch.equal, weights, engine.module.parameters()))
        engine.destroy()


def test_other_stages_are_refused_on_every_rank_before_anything_is_loaded(moved: Path, tmp_path: Path) -> None:
    run_on_ranks(refusals, 4, tmp_path, str(moved))


def test_a_checkpoint_of_stages_is_converted(moved: Path, tmp_path: Path) -> None:
    for source in (0, 1):
        whole = open_checked(moved / str(source) / "tag")
        list(export_tensors(whole, tmp_path / f"fp32 {source}", "fp32", (), None, 1 << 30))
        written = {name: each.read() for name, each in read_tensors(tmp_path / f"fp32 {source}").items()}
        assert sorted(written) == sorted(whole.names())
        for name, each in written.items():
            assert torch.equal(each, whole.part(name, MASTER)), name
        list(export_stock(whole, tmp_path / f"stock {source}"))
        copied = {each.name: each.read_bytes() for each in (tmp_path / f"stock {source}" / "tag").iterdir()}
        assert copied == {each.name: each.read_bytes() for each in whole.place.glob("[!f]*")}
