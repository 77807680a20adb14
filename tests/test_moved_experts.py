# SPDX-License-Identifier: Apache-2.0
"""Experts change ranks with all that belongs to them, bit for bit, and training goes on as if they had stayed."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart
from ds_fsmoe.placement.moving import ExpertTensor, fragments_of
from ds_fsmoe.placement.placements import Placements
from ds_fsmoe.planning.expert_placement import ExpertPlacement
from tests.hf_families import batch, loss_of, model_of
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.small_model import Case, SmallModel, train_steps
from tests.test_alltoalls import on_nodes
from tests.test_hugging_face import engine_of


def adam(stage: int, dtype: str = "float32", accumulation: int = 1, **block: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": zero,
        "fsmoe": {"enabled": True} | block,
    }
    return config | ({"bf16": {"enabled": True}} if dtype == "bfloat16" else {})


def placements_of(engine: Any) -> Placements:
    """The placements of an engine whose config asks for none."""
    layers = engine.fsmoe.inner_layers
    paths = {layer.label: path for path, layer in engine.fsmoe.layers.items()}
    engine.fsmoe.placement = Placements(engine, layers, paths)
    return engine.fsmoe.placement


def drawn(placement: ExpertPlacement, seed: int) -> ExpertPlacement:
    """Experts in an order that is drawn, the same on every rank."""
    experts = list(range(placement.num_experts))
    random.Random(seed).shuffle(experts)
    return ExpertPlacement(tuple(experts), placement.num_experts, placement.num_ranks)


def contents(placements: Placements) -> dict[tuple[str, str, int, int], bytes]:
    """(layer, name, expert, first element) -> the bytes of each fragment of this rank."""
    placements.mover()  # waits for what is on its way
    rank, found = placements.expert_ranks(), {}
    for each in fragments_of(placements._engine, placements._tensors()):
        now = placements.now[each.layer]
        expert = now.expert_of_place[rank[each.layer].ep_rank * now.num_local + each.index]
        key = each.layer, each.name, expert, each.first
        found[key] = each.values.contiguous().view(torch.uint8).numpy().tobytes()
    return found


def everywhere(placements: Placements) -> dict[tuple[str, str, int], bytes]:
    """(layer, name, expert) -> all its elements in their order, of all ranks of the first EP group or their copies."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, contents(placements))
    pieces: dict[tuple[str, str, int], dict[int, bytes]] = {}
    for of_rank in every:
        for (layer, name, expert, first), values in of_rank.items():
            known = pieces.setdefault((layer, name, expert), {})
            assert known.setdefault(first, values) == values, f"copies of {name} of expert {expert} differ"
    return {key: b"".join(of[at] for at in sorted(of)) for key, of in pieces.items()}


@pytest.mark.parametrize(("layout", "shape"), [("stacked", (3, 2, 5)), ("stacked", (6, 5)), ("innermost", (5, 6))])
def test_the_elements_of_an_expert_are_those_that_a_checkpoint_calls_its_own(
    layout: Any, shape: tuple[int, ...]
) -> None:
    tensor = torch.randn(shape)
    found = ExpertTensor("L00", "weight", tensor, None, num_local=3, layout=layout)
    for index in range(3):
        first, step, count = found.local_range(index)
        own = ExpertPart(layout, 3, 3, index).take(tensor).flatten()
        assert torch.equal(tensor.flatten()[first::step][:count], own)


FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3")


def moves_through_training(
    rank: int, world_size: int, family: str, stage: int, ep: int, dtype: str, accumulation: int
) -> list[str]:
    """What differs between a job whose experts move at random and one whose experts stay."""
    said = []
    losses: dict[bool, list[float]] = {}
    for moves in (False, True):
        model = model_of(family)
        with on_nodes(*(at * 2 // world_size for at in range(world_size))):
            engine = engine_of(copy.deepcopy(model), adam(stage, dtype, accumulation, ep_size=ep, num_chunks=2))
        placements = placements_of(engine)
        losses[moves] = []
        for step in range(4):
            for micro in range(accumulation):
                x = batch(7 * step + micro, world_size)[rank : rank + 1]
                loss = loss_of(engine, x)
                engine.backward(loss)
                engine.step()
                losses[moves].append(loss.item())
            if moves:
                before = everywhere(placements)
                placements.go_to(
                    {label: drawn(now, 5 * step + at) for at, (label, now) in enumerate(placements.now.items())}
                )
                if everywhere(placements) != before:
                    said.append(f"{family}: states differ after the moves of step {step}")
        if moves:
            with placements.in_model_order():
                if not all(each.is_at_start for each in placements.now.values()):
                    said.append("not at home")
        engine.destroy()
    tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
    for at, (ours, theirs) in enumerate(zip(losses[True], losses[False], strict=True)):
        if not abs(ours - theirs) <= tolerance * abs(theirs):
            said.append(f"{family}: loss {at} is {ours} for {theirs}")
    return said


@sampled(
    ("world_size", "ep", "stage", "family", "dtype", "accumulation"),
    [
        (4, 2, 2, "qwen3_moe", "float32", 2),
        (4, 2, 3, "gpt_oss", "bfloat16", 1),
        (2, 2, 0, "deepseek_v3", "float32", 1),
        (4, 4, 1, "qwen3_moe", "bfloat16", 1),
        (4, 2, 0, "gpt_oss", "float32", 1),
        (4, 4, 3, "qwen3_moe", "float32", 2),
    ],
    kept=[0],
)
def test_training_goes_on_as_if_experts_had_stayed(
    world_size: int, ep: int, stage: int, family: str, dtype: str, accumulation: int, tmp_path: Path
) -> None:
    args = family, stage, ep, dtype, accumulation
    found = run_on_ranks(moves_through_training, world_size, tmp_path, *args)
    assert [each for of_rank in found for each in of_rank] == []


def stock_moves(rank: int, world_size: int, stage: int, dispatch: str) -> list[str]:
    import ds_fsmoe

    said, losses = [], {}
    case = Case(ep_size=2, stage=stage, k=2, drop_tokens=dispatch != "unpadded", expert="smooth")
    for moves in (False, True):
        torch.manual_seed(0)
        config = case.ds_config(fsmoe={"enabled": True, "dispatch": dispatch})
        config["optimizer"] = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}
        model = SmallModel(case, rank)
        engine = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
        placements = placements_of(engine)
        losses[moves] = []
        for step in range(3):
            losses[moves] += train_steps(engine, rank, [step])
            if moves:
                before = everywhere(placements)
                placements.go_to({label: drawn(now, step) for label, now in placements.now.items()})
                if everywhere(placements) != before:
                    said.append(f"states differ after the moves of step {step}")
        engine.destroy()
    if not torch.allclose(torch.tensor(losses[True]), torch.tensor(losses[False]), rtol=1e-5):
        said.append(f"losses {losses[True]} for {losses[False]}")
    return said


@sampled(
    ("world_size", "stage", "dispatch"),
    [(4, 2, "padded"), (4, 0, "unpadded"), (2, 1, "unpadded"), (2, 0, "padded")],
    kept=[2],
)
def test_experts_of_deepspeeds_own_layers_move_too(world_size: int, stage: int, dispatch: str, tmp_path: Path) -> None:
    found = run_on_ranks(stock_moves, world_size, tmp_path, stage, dispatch)
    assert [each for of_rank in found for each in of_rank] == []


def adapters_move(rank: int, world_size: int, stage: int, ep: int) -> list[str]:
    """As moves_through_training, of a model whose experts are frozen and have adapters."""
    from tests.hf_lora import BOTH, engine_with, lora_of

    said = []
    losses: dict[bool, list[float]] = {}
    for moves in (False, True):
        engine = engine_with(lora_of("qwen3_moe", BOTH), adam(stage, ep_size=ep, num_chunks=2))
        placements = placements_of(engine)
        losses[moves] = []
        for step in range(3):
            x = batch(7 * step, world_size)[rank : rank + 1]
            loss = engine(input_ids=x, labels=x).loss
            engine.backward(loss)
            engine.step()
            losses[moves].append(loss.item())
            if moves:
                before = everywhere(placements)
                names = {name for _, name, _ in before}
                if not any("lora_B" in each and "exp_avg" in each for each in names):
                    said.append(f"no state of an adapter among {sorted(names)}")
                placements.go_to({label: drawn(now, step) for label, now in placements.now.items()})
                if everywhere(placements) != before:
                    said.append(f"states differ after the moves of step {step}")
        engine.destroy()
    if not torch.allclose(torch.tensor(losses[True]), torch.tensor(losses[False]), rtol=1e-5):
        said.append(f"losses {losses[True]} for {losses[False]}")
    return said


@sampled(("world_size", "stage", "ep"), [(4, 2, 2), (2, 3, 2), (2, 0, 2)], kept=[])
def test_adapters_of_experts_move_with_them(world_size: int, stage: int, ep: int, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    found = run_on_ranks(adapters_move, world_size, tmp_path, stage, ep)
    assert [each for of_rank in found for each in of_rank] == []
