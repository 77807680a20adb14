# SPDX-License-Identifier: Apache-2.0
"""Compiled in whatever way, a model trains as stock's does, in as many graphs; our layers are one operator in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("transformers")

from tests import sgd_engines
from tests.hf_families import NUM_CHOICES, NUM_EXPERTS, batch, model_of
from tests.ranks import run_on_ranks
from tests.samples import draw
from tests.sgd_engines import stock_config

STEPS = 3
FAMILIES = ("qwen3_moe", "mixtral", "olmoe")


def engine_of(model: Any, stage: int, is_ours: bool = True, parameters: Any = None, **block: Any) -> Any:
    config = stock_config(stage, samples=2) | {"steps_per_print": 10**9}
    config["fsmoe"] = {"enabled": is_ours, "ops": "reference"} | (block if is_ours else {})
    return sgd_engines.engine_of(model, config, parameters)


def loss_in(engine: Any, step: int) -> torch.Tensor:
    x = batch(10 * step + dist.get_rank(), 2)
    return engine(input_ids=x, labels=x).loss


def train(engine: Any, loss_of: Any = loss_in, steps: Any = range(STEPS)) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def counted() -> tuple[int, int]:
    """Breaks and graphs since the last reset."""
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values()), counters["stats"].get("unique_graphs", 0)


def trained(way: str, stage: int, is_ours: bool, family: str, backend: str = "eager") -> tuple[list[float], int, int]:
    """The losses of a run that is compiled in a way, its breaks and its graphs."""
    import torch._dynamo as dynamo
    from accelerate.utils import compile_regions

    dynamo.reset()
    dynamo.utils.counters.clear()
    model, options, loss_of = model_of(family), {"backend": backend}, loss_in
    model.set_experts_implementation("grouped_mm")  # stock's eager one cannot be compiled
    model.config.use_cache = False  # numbers of layers in a cache are compiled anew for each
    if way == "before":
        model = torch.compile(model, **options)
    elif way == "inplace":
        model.compile(dynamic=False, **options)
    elif way == "regions":
        model = compile_regions(model, **options)
    elif way == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for each in model.model.layers:
            each.compile(**options)
    engine = engine_of(model, stage, is_ours)
    if way == "engine":
        engine.compile(**options)
    elif way == "module":
        engine.module.compile(**options)
    elif way in ("layers", "full"):
        for each in engine.module.model.layers:
            each.compile(fullgraph=way == "full", **options)
    elif way == "loss":
        loss_of = torch.compile(loss_in, **options)
    losses = train(engine, loss_of)
    found = losses, *counted()
    engine.destroy()
    return found


def compare(rank: int, world_size: int, pairs: list[tuple[int, str]], backend: str = "eager") -> None:
    """Compare with stock, compiled in the same way and not at all."""
    for number, (stage, way) in enumerate(pairs):
        family, what = FAMILIES[number % len(FAMILIES)], f"{way}, ZeRO {stage}"
        losses, breaks, graphs = trained(way, stage, True, family, backend)
        # DeepSpeed's ZeRO 3 cannot run what is compiled before.
        stocks_way = "engine" if way == "before" and stage == 3 else way
        _, stocks_breaks, stocks_graphs = trained(stocks_way, stage, False, family, backend)
        assert losses == pytest.approx(trained("", stage, False, family)[0], rel=1e-5), what
        assert stocks_graphs > 0, f"{what}: stock compiled nothing"
        # At ZeRO 3 DeepSpeed's hooks break around every module, and the block of a layer has one more. And torch 2.11
        # counts the engine's own forward, which is not to be compiled, as one more break.
        more = 4 * (stage == 3) + (way == "loss" and torch.__version__.startswith("2.11."))
        assert breaks <= stocks_breaks + more, what
        assert graphs <= stocks_graphs + 2 * (stage == 3), what


WAYS = ["engine", "before", "full", "module", "inplace", "layers", "regions", "loss", "checkpointed"]
PAIRS = [*((stage, way) for stage in range(3) for way in WAYS), (3, "engine"), (3, "before"), (3, "layers")]
ONE = draw("a way that compiles fast", [each for each in PAIRS if each[1] in ("engine", "before", "full")], 1)
THREE = draw("ways to compile", PAIRS, 3)


@pytest.mark.parametrize(
    "pairs",
    [ONE, pytest.param(THREE, marks=pytest.mark.long), pytest.param(PAIRS, marks=pytest.mark.slow)],
    ids=["one", "three", "all"],
)
def test_compiled_in_whatever_way_losses_and_graphs_are_stocks(pairs: list[tuple[int, str]], tmp_path: Path) -> None:
    """At ZeRO 3 breaks are those around modules."""
    run_on_ranks(compare, 2, tmp_path, pairs, limit_s=3600)


@pytest.mark.daily("compiled", 1)
def test_compiled_by_inductor_on_four_ranks_losses_are_stocks(tmp_path: Path) -> None:
    run_on_ranks(compare, 4, tmp_path, [(2, "layers")], "inductor", limit_s=600)


class TwoLayers(nn.Module):
    """A model with two layers of DeepSpeed's; its input needs no gradient, and a mask leaves tokens out."""

    def __init__(self) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        torch.manual_seed(3)
        options: dict[str, Any] = {"num_experts": 4, "ep_size": 2, "k": 1, "use_rts": False, "capacity_factor": 4.0}
        self.layers = nn.ModuleList(MoE(16, nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)), **options)
                                    for _ in range(2))  # fmt: skip

    def forward(self, x: torch.Tensor, used: torch.Tensor | None = None) -> torch.Tensor:
        total = torch.zeros(())
        for layer in self.layers:
            y, loss, counts = layer(x, used)
            x, total = x + y, total + loss + 0.0 * counts.sum()
        return (x**2).mean() + total


def in_deepspeeds_layers(rank: int, world_size: int) -> None:
    import torch._dynamo as dynamo
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as in_groups

    def loss_of(engine: Any, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7 * step + rank)
        x, used = torch.randn(6, 16, generator=generator), torch.arange(6).ne(2).float()
        return engine(x, used) if step % 2 else engine(x)

    losses: list[Any] = []
    for is_ours, is_compiled in ((False, False), (True, False), (True, True)):
        model = TwoLayers()
        engine = engine_of(model, 1, is_ours, in_groups({"params": list(model.parameters()), "name": "all"}))
        if is_compiled:
            dynamo.utils.counters.clear()
            for each in engine.module.layers:
                each.compile(fullgraph=True, backend="aot_eager")
        losses.append(train(engine, loss_of, range(4)))
        engine.destroy()
    stock, ours, compiled = losses
    assert compiled == pytest.approx(ours, rel=1e-6)
    assert compiled == pytest.approx(stock, rel=1e-5)
    # One for calls with a mask and one for those without.
    breaks, graphs = counted()
    assert breaks == 0
    assert 0 < graphs <= 4


def test_deepspeeds_layers_are_compiled_with_fullgraph(tmp_path: Path) -> None:
    run_on_ranks(in_deepspeeds_layers, 2, tmp_path)


def replayed_and_recorded(folder: str) -> None:
    """Forwards whose routing is replayed, every other one here, or recorded leave compiled code out."""
    torch._dynamo.reset()
    losses = []
    for is_compiled in (False, True):
        engine = engine_of(model_of("olmoe"), 1)
        if is_compiled:
            torch._dynamo.utils.counters.clear()
            engine.compile(backend="aot_eager")

        def loss_of(engine: Any, step: int) -> torch.Tensor:
            if step % 2:
                scores = torch.rand(32, 2, NUM_EXPERTS, generator=torch.Generator().manual_seed(step))
                engine.fsmoe.replay(scores.argsort(-1)[..., :NUM_CHOICES])
            return loss_in(engine, step)

        losses.append(train(engine, loss_of, range(4)))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert counted() == (0, 1)
    engine = engine_of(model_of("olmoe"), 1, routing={"record": folder})
    engine.module.compile(backend="eager")
    train(engine)
    with pytest.raises(Exception, match="call the engine"):
        loss_in(engine.module, 0)


def two_forwards_in_one_backward() -> None:
    from ds_fsmoe.layer import opaque

    engine = engine_of(model_of("mixtral"), 2)
    engine.compile(backend="aot_eager")
    train(engine, steps=range(1))
    loss_in(engine, 7)  # nothing of it is kept
    with torch.no_grad():
        loss_in(engine, 8)
    assert len(opaque._calls) == 0
    with pytest.raises(RuntimeError, match=r"mlp\.experts: one backward reached two compiled calls"):
        engine.backward(loss_in(engine, 1) + loss_in(engine, 2))


class Marked(nn.Parameter):
    """A parameter that must not be looked at by a compiler."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not torch.compiler.is_dynamo_compiling()
        return super().__torch_function__(func, types, args, kwargs or {})


def other_plans() -> None:
    """Neither another plan nor parameters of another class compile anything again."""
    losses = []
    for is_compiled in (False, True):
        chunks = {"schedule": "best", "num_chunks": {"forward": 2, "backward": 3}}
        engine = engine_of(model_of("qwen3_moe"), 1, **chunks, gradient_partition={"mode": "off"})
        inner = [*engine.fsmoe.layers.values()]
        if is_compiled:
            torch._dynamo.utils.counters.clear()
            engine.compile(backend="aot_eager")
        for each in (parameter for module in inner for parameter in module.parameters()):
            each.__class__ = Marked
        losses.append(train(engine, steps=range(2)))
        assert not is_compiled or counted()[1] == 1
        for each in inner:
            each.fsmoe.run_unchunked("the test says so")
        losses[-1] += train(engine, steps=range(2, 4))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert counted()[1] == 1


def files(rank: int, folder: str) -> None:
    """The weights in the files of a compiled model have the model's names and numbers."""
    import ds_fsmoe

    engine = engine_of(torch.compile(model_of("mixtral"), backend="eager"), 1)
    train(engine, steps=range(1))
    whole = ds_fsmoe.whole_state_dict(engine)
    if rank == 0:
        assert all(name.startswith("_orig_mod.") for name in whole)  # as in stock's checkpoints
        engine.module.save_pretrained(folder, state_dict=whole)
        read = type(engine.module._orig_mod).from_pretrained(folder).state_dict()
        assert [name for name in read if not torch.equal(read[name], whole[f"_orig_mod.{name}"])] == []


def in_turn(rank: int, world_size: int, folder: str, routing: str) -> None:
    two_forwards_in_one_backward()
    other_plans()
    files(rank, folder)
    replayed_and_recorded(routing)


@pytest.mark.daily("compiled", 1)
def test_two_forwards_in_one_backward_are_refused_other_plans_compile_nothing_again_and_files_have_their_names(
    tmp_path: Path,
) -> None:
    run_on_ranks(in_turn, 2, tmp_path / "ranks", str(tmp_path / "model"), str(tmp_path / "routing"))
