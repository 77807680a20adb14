# SPDX-License-Identifier: Apache-2.0
"""Experts change ranks with all that belongs to them, bit for bit, and training goes on as if they had stayed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

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
from tests.sgd_engines import ds_config, engine_of
from tests.small_model import Case, small_engine, train_steps
from tests.test_alltoalls import on_nodes


def adam(stage: int, dtype: str = "float32", accumulation: int = 1, **block: Any) -> dict[str, Any]:
    optimizer = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}
    of_steps = {"gradient_accumulation_steps": accumulation, "gradient_clipping": 0.1}
    return ds_config(stage, **block) | of_steps | {"optimizer": optimizer, "bf16": {"enabled": dtype == "bfloat16"}}


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


class Moves(NamedTuple):
    """A job whose experts move after each step."""

    model: str
    """A family; with ``lora`` behind it, of frozen experts with adapters; ``stock``: of DeepSpeed's own layers."""
    world_size: int
    stage: int
    ep: int = 2
    dtype: str = "float32"
    accumulation: int = 1
    dispatch: str = "padded"

    def engine(self, rank: int) -> Any:
        config = adam(self.stage, self.dtype, self.accumulation, num_chunks=2)
        if self.model != "stock":
            config["fsmoe"]["ep_size"] = self.ep
            if "lora" in self.model:
                from tests.hf_lora import BOTH, engine_with, lora_of

                return engine_with(lora_of(self.model.split()[0], BOTH), config)
            return engine_of(model_of(self.model), config)
        drops = self.dispatch != "unpadded"
        case = Case(ep_size=self.ep, stage=self.stage, k=2, drop_tokens=drops, expert="smooth")
        torch.manual_seed(0)
        return small_engine(case, rank, {"dispatch": self.dispatch}, optimizer=config["optimizer"])

    def step(self, engine: Any, rank: int, number: int) -> list[float]:
        if self.model == "stock":
            return train_steps(engine, rank, [number])
        losses = []
        for micro in range(self.accumulation):
            x = batch(7 * number + micro, self.world_size)[rank : rank + 1]
            losses.append(loss_of(engine, x))
            engine.backward(losses[-1])
            engine.step()
        return [each.item() for each in losses]


def moves_through_training(rank: int, world_size: int, job: Moves) -> list[str]:
    """What differs between a job whose experts move at random and one whose experts stay."""
    said = []
    losses: dict[bool, list[float]] = {}
    for moves in (False, True):
        with on_nodes(*(at * 2 // world_size for at in range(world_size))):
            engine = job.engine(rank)
        placements = placements_of(engine)
        losses[moves] = []
        for number in range(3):
            losses[moves] += job.step(engine, rank, number)
            if moves:
                before = everywhere(placements)
                if "lora" in job.model and not any("lora_B" in name and "exp_avg" in name for _, name, _ in before):
                    said.append(f"no state of an adapter among {sorted({name for _, name, _ in before})}")
                placements.go_to(
                    {label: drawn(now, 5 * number + at) for at, (label, now) in enumerate(placements.now.items())}
                )
                if everywhere(placements) != before:
                    said.append(f"states differ after the moves of step {number}")
        if moves:
            with placements.in_model_order():
                if not all(each.is_at_start for each in placements.now.values()):
                    said.append("not at home")
        engine.destroy()
    tolerance = 2e-2 if job.dtype == "bfloat16" else 1e-5
    for at, (ours, theirs) in enumerate(zip(losses[True], losses[False], strict=True)):
        if not abs(ours - theirs) <= tolerance * abs(theirs):
            said.append(f"loss {at} is {ours} for {theirs}")
    return said


MOVES = [
    *(Moves("qwen3_moe lora", 2, stage) for stage in (2, 3, 0)),
    Moves("qwen3_moe", 4, 2, accumulation=2),
    Moves("gpt_oss", 4, 3, dtype="bfloat16"),
    Moves("deepseek_v3", 2, 0),
    Moves("qwen3_moe", 4, 1, ep=4, dtype="bfloat16"),
    Moves("gpt_oss", 4, 0),
    Moves("stock", 2, 1, dispatch="unpadded"),
    Moves("stock", 4, 2),
]


# Replicas of experts whose gradients accumulate; adapters, with states of their own; DeepSpeed's own layers.
@sampled("job", MOVES, kept=[0], ids=lambda job: "-".join(map(str, job)))
def test_training_goes_on_as_if_experts_had_stayed(job: Moves, tmp_path: Path) -> None:
    if "lora" in job.model:
        pytest.importorskip("peft")
    found = run_on_ranks(moves_through_training, job.world_size, tmp_path, job)
    assert [each for of_rank in found for each in of_rank] == []
