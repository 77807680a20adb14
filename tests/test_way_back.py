# SPDX-License-Identifier: Apache-2.0
"""A model outlives its engine: it runs on, is made whole, and is given to another engine, as with stock DeepSpeed."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("transformers")

import ds_fsmoe
from tests.distances import furthest
from tests.hf_families import batch, loss_of, losses_of_steps, model_of
from tests.hf_lora import lora_of, trained
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.sgd_engines import ds_config, engine_of
from tests.small_model import Case, SmallModel, train_steps
from tests.small_model import batch as small_batch

STOCK = {"enabled": False}
EXACT = 1e-6


def config(stage: int, **block: Any) -> dict[str, Any]:
    return ds_config(stage, lr=0.2, **block)


def logits_of(model: nn.Module, seed: int = 9) -> torch.Tensor:
    with torch.no_grad():
        model.eval()
        return model(input_ids=batch(seed, 1)).logits


def differing(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = EXACT) -> list[str]:
    if found.keys() != wanted.keys():
        return [f"names {sorted(found.keys() ^ wanted.keys())}"]
    shapes = [f"{name} is {list(found[name].shape)}" for name in found if found[name].shape != wanted[name].shape]
    return shapes or [name for name in found if furthest(found[name], wanted[name].float()) > tolerance]


def left_on(model: nn.Module) -> set[tuple[str, Any]]:
    """What hangs on a model: classes, attributes and hooks of its modules and parameters."""
    found: set[tuple[str, Any]] = set()
    for name, module in model.named_modules():
        found |= {(name, type(module)), (name, type(module._parameters))}
        found |= {(name, each) for each in vars(module) if each != "_z3_leaf"}
        found |= {(name, (each, len(value))) for each, value in vars(module).items() if each.endswith("_hooks")}
    for name, each in model.named_parameters():
        found |= {
            (name, type(each)),
            (name, each.requires_grad),
            (name, each.shape),
            *((name, of) for of in vars(each)),
        }
    return found


def run_on(rank: int, world_size: int, stage: int, chunks: int) -> None:
    """A model that is used when its engine has ended is stock's."""
    found = {}
    for side, block in (("stock", STOCK), ("ours", {"num_chunks": chunks})):
        engine = engine_of(model_of("mixtral"), config(stage, **block))
        losses_of_steps(engine, rank, world_size, (0, 1))
        engine.destroy()
        model = engine.module
        generated = model.eval().generate(batch(rank, 1, 3 + rank), max_new_tokens=4, do_sample=False)
        with torch.no_grad():
            through_engine = engine(input_ids=batch(9, 1)).logits
        found[side] = logits_of(model, rank), generated, through_engine
    with pytest.raises(ds_fsmoe.LayerError, match=r"experts: backward after engine.destroy\(\).*make_whole"):
        loss_of(model.train(), batch(rank, 1)).backward()
    for ours, theirs in zip(found["ours"], found["stock"], strict=True):
        assert ours.shape == theirs.shape
        assert furthest(ours, theirs.float()) <= 1e-5


@sampled(("stage", "chunks"), [(0, 1), (1, 2), (2, 2)])
def test_after_destroy_a_model_runs_and_generates_on_all_ranks_as_stocks_does(
    stage: int, chunks: int, tmp_path: Path
) -> None:
    run_on_ranks(run_on, 2, tmp_path, stage, chunks)


def made(kind: str) -> nn.Module:
    return lora_of("mixtral", ("up", "down")) if kind == "lora" else model_of(kind)


Links = tuple[tuple[int, int], ...]
"""Of each engine that a model is given to: its stage of ZeRO, and the ranks that share experts."""


def from_engine_to_engine(rank: int, world_size: int, kind: str, links: Links, moves: bool) -> None:
    """A model that is given to one engine after the other trains as on one process: every second one has ended before,
    and where experts move they are elsewhere then. Stock's ZeRO 3 leaves what its other stages cannot take."""
    from tests.test_moved_experts import drawn, placements_of

    engine, model = None, made(kind)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(trained(reference), lr=0.2)
    for step, (stage, ep_size) in enumerate(links):
        block = {"placement": {"policy": "balanced", "every": 1000}} if moves else {"num_chunks": 1 + step % 2}
        before, given = engine, trained(model)
        engine = engine_of(model, config(stage, ep_size=ep_size, **block), given)
        if step and links[step] == links[step - 1] and stage < 3:  # parameters that lie as they are to lie stay
            assert {*map(id, given)} == {*map(id, trained(model))}
        if before is not None:
            with pytest.raises(RuntimeError, match="given to another engine by ds_fsmoe"):
                before(input_ids=batch(0, 1))
        losses = [loss_of(reference, each[None]) for each in batch(step, world_size)]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
        assert losses_of_steps(engine, rank, world_size, [step]) == [pytest.approx(losses[rank].item(), rel=1e-5)], step
        if moves:
            placements = placements_of(engine)
            placements.go_to({name: drawn(now, at + step) for at, (name, now) in enumerate(placements.now.items(), 3)})
            assert not all(each.is_at_start for each in placements.now.values())
        if step % 2 or step == len(links) - 1:
            engine.destroy()
    whole = dict(ds_fsmoe.make_whole(model).named_parameters())
    assert differing(whole, dict(reference.named_parameters()), 1e-5) == []


@sampled(
    ("world_size", "kind", "links", "moves"),
    [
        (2, "gpt_oss", ((3, 2), (3, 2)), True),
        (2, "gpt_oss", ((3, 2), (2, 1), (3, 2)), False),
        (4, "gpt_oss", ((3, 2), (3, 4), (1, 2)), False),
        (4, "mixtral", ((2, 4), (3, 2), (0, 4)), False),
        (4, "lora", ((2, 2), (2, 2), (2, 4)), False),
        (2, "lora", ((2, 2), (1, 2)), True),
    ],
    kept=[0],
    ids=str,
)
def test_a_model_trains_on_from_engine_to_engine_as_on_one_process(
    world_size: int, kind: str, links: Links, moves: bool, tmp_path: Path
) -> None:
    run_on_ranks(from_engine_to_engine, world_size, tmp_path, kind, links, moves)


def whole(rank: int, world_size: int, folder: str, kind: str, stage: int, block: dict[str, Any]) -> None:
    """A model that was made whole is what its engine had, and nothing else hangs on it."""
    model, fresh = made(kind), made(kind)
    engine = engine_of(model, config(stage, **block), trained(model))
    losses_of_steps(engine, rank, world_size, (0, 1))
    with pytest.raises(RuntimeError, match=r"make_whole: the engine .* is still active: call engine.destroy\(\)"):
        ds_fsmoe.make_whole(engine)
    wanted_logits = logits_of(engine)
    told = [ds_fsmoe.whole_state_dict(engine)]
    dist.broadcast_object_list(told)
    engine.destroy()
    if stage == 3:
        with pytest.raises(ds_fsmoe.LayerError, match=r"each rank has a ZeRO 3 partition.*make_whole"):
            model(input_ids=batch(0, 1))
    assert ds_fsmoe.make_whole(engine) is model
    with pytest.raises(RuntimeError, match="made whole by ds_fsmoe"):
        engine(input_ids=batch(0, 1))
    ds_fsmoe.make_whole(model)  # changes nothing
    assert differing(model.state_dict(), told[0]) == []
    assert left_on(model) ^ left_on(fresh) == set()
    if rank == 0:  # alone
        for each in (model.train(), fresh):
            loss_of(each, batch(5, 1)).backward()
        assert [p.grad is None for p in model.parameters()] == [p.grad is None for p in fresh.parameters()]
        model.save_pretrained(folder)
        for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert furthest(logits_of(copied), wanted_logits) <= EXACT
    dist.barrier()


@sampled(
    ("world_size", "kind", "stage", "block"),
    [
        (2, "gpt_oss", 0, {}),
        (2, "gpt_oss", 1, {"num_chunks": 2}),
        (2, "lora", 2, {}),
        (2, "lora", 3, {}),
        (2, "gpt_oss", 2, {"esp_size": 2}),
        (4, "gpt_oss", 3, {"ep_size": 2}),
        (4, "lora", 1, {"ep_size": 2}),
        (4, "gpt_oss", 1, {"ep_size": 2, "esp_size": 2}),
    ],
    drawn=2,
)
def test_make_whole_leaves_a_model_as_if_it_had_never_had_an_engine(
    world_size: int, kind: str, stage: int, block: dict[str, Any], tmp_path: Path
) -> None:
    run_on_ranks(whole, world_size, tmp_path / "ranks", str(tmp_path / "saved"), kind, stage, block)
    if kind == "gpt_oss":
        from transformers import AutoModelForCausalLM

        read = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert sum(each.numel() for each in read.parameters()) == sum(
            p.numel() for p in model_of("gpt_oss").parameters()
        )


def piles(rank: int, world_size: int, stage: int) -> None:
    """No engine that a model is given to leaves more than the one before."""
    model, found = model_of("qwen3_moe"), []
    for number in range(3):
        engine = engine_of(model, config(stage, metrics="detailed", num_chunks=2, two_batch_overlap="on"))
        losses_of_steps(engine, rank, world_size, [number])
        depth, method = 0, model.save_pretrained
        while method := getattr(method, "__wrapped__", None):
            depth += 1
        counts = {
            "process groups": len(dist.distributed_c10d._world.pg_map),
            "threads": sum(each.name.startswith("fsmoe") for each in threading.enumerate()),
            "hooks": sum(len(v) for each in model.modules() for name, v in vars(each).items() if "_hooks" in name),
            "hooks of parameters": sum(len(each._post_accumulate_grad_hooks or ()) for each in model.parameters()),
            "save_pretrained": depth,
        }
        found.append(counts)
    engine.destroy()
    assert found[1] == found[-1]


@sampled("stage", [0, 2, 3])
def test_engines_one_after_the_other_leave_no_more_on_a_model_than_one(stage: int, tmp_path: Path) -> None:
    run_on_ranks(piles, 2, tmp_path, stage)


def copied(rank: int, world_size: int) -> None:
    """A copy of a converted model is refused by name, and one of another model is not."""
    engine = engine_of(model_of("mixtral"), config(1))
    for _ in range(2):
        for copy_of, part in (
            *((each, engine.module) for each in (copy.deepcopy, pickle.dumps, torch.optim.swa_utils.AveragedModel)),
            (copy.deepcopy, engine.module.model),
        ):
            with pytest.raises(ds_fsmoe.LayerError, match=r"cannot be copied or pickled.*make_whole"):
                copy_of(part)
        engine.destroy()
        assert isinstance(copy.deepcopy(SmallModel(Case(), rank, ds_fsmoe.MoE)), SmallModel)
    native = SmallModel(Case(ep_size=2), rank)
    engine_of(native, Case(ep_size=2).ds_config(fsmoe={"enabled": True}))
    for each in (native, native.moes):
        with pytest.raises(ds_fsmoe.LayerError, match=r"cannot be copied or pickled"):
            pickle.dumps(each)


def of_deepspeeds_kind(rank: int, world_size: int, gate: dict[str, Any]) -> None:
    """Layers of DeepSpeed's kind that go from engine to engine, the last one stock's, train on as in one engine.

    Stock itself refuses them a second time: "Attempting to override an existing ep_group"."""
    case, ours = Case(ep_size=2, stage=1, moe_options=(("use_rts", False),)), {"enabled": True} | gate

    def engine_for(model: nn.Module, block: dict[str, Any]) -> Any:
        return engine_of(model, case.ds_config(fsmoe=block))

    def steps(engine: Any, first: int) -> list[float]:
        return train_steps(engine, rank, (first, first + 1))

    def seen(model: nn.Module) -> float:
        return model(*small_batch(50, rank, torch.float32))[0].item()

    other = SmallModel(case, rank)
    engine = engine_for(other, ours if gate else STOCK)
    wanted = [*steps(engine, 0), seen(other), *steps(engine, 2), seen(other)]
    model, found = SmallModel(case, rank), []
    for first, block in ((0, ours), (2, ours | {"num_chunks": 2})):
        engine = engine_for(model, block)
        found += steps(engine, first)
        engine.destroy()
        found.append(seen(model))
    if gate:
        with pytest.raises(ds_fsmoe.LayerError, match="which DeepSpeed's own layer does not run"):
            engine_for(model, STOCK)
    else:
        other_engine = engine_for(ds_fsmoe.make_whole(other), ours)
        wanted += steps(other_engine, 4)
        found += steps(engine_for(model, STOCK), 4)
        other_engine.destroy()
    kinds = {type(each.deepspeed_moe).__module__.split(".")[0] for each in ds_fsmoe.make_whole(model).moes}
    assert kinds == {"ds_fsmoe" if gate else "deepspeed"}
    assert furthest(torch.tensor(found), torch.tensor(wanted)) <= 1e-5


@sampled("gate", [{}, {"gate": {"type": "sigmoid"}}])
def test_layers_of_deepspeeds_kind_outlive_their_engine(gate: dict[str, Any], tmp_path: Path) -> None:
    run_on_ranks(of_deepspeeds_kind, 2, tmp_path, gate)


def refused(rank: int, world_size: int) -> None:
    """A model that one engine has left and another one has not taken says what it needs."""
    model = model_of("mixtral")
    engine = engine_of(model, config(0))
    with pytest.raises(ds_fsmoe.LayerError, match=r"experts has this rank's experts only.*make_whole\(model\)"):
        ds_fsmoe.initialize(model=model, config=config(0, enabled=False))
    losses_of_steps(engine, rank, world_size, (0, 1))  # it has not lost its model
    told = [ds_fsmoe.whole_state_dict(engine)]
    dist.broadcast_object_list(told)
    with pytest.raises(ds_fsmoe.ConfigError, match="ep_size"):
        engine_of(model, config(0, ep_size=3))
    with pytest.raises(ds_fsmoe.LayerError, match="has this rank's experts only, and its engine has ended"):
        model(input_ids=batch(0, 1))
    engine_of(ds_fsmoe.make_whole(model), config(0, enabled=False)).destroy()
    assert differing(model.state_dict(), told[0]) == []


def loaded_by_parts(rank: int, world_size: int) -> None:
    """A model that was loaded by parts is never whole between two engines."""
    from transformers import AutoModelForCausalLM

    from tests.hf_families import config_of

    with ds_fsmoe.own_experts(config(1)):
        model = AutoModelForCausalLM.from_config(config_of("mixtral"))
    with pytest.raises(ds_fsmoe.LayerError, match=r"make_whole: .* 2 of 4 experts and has had no engine"):
        ds_fsmoe.make_whole(model)
    for number in range(2):
        given = list(model.parameters())
        engine = engine_of(model, config(1))
        losses_of_steps(engine, rank, world_size, (number, number + 1))
        engine.destroy()
        assert all(each is other for each, other in zip(given, model.parameters(), strict=True))
    experts = model.get_submodule("model.layers.0.mlp.experts")
    assert experts.down_proj.shape[0] == 2
    ds_fsmoe.make_whole(model)
    assert experts.down_proj.shape[0] == 4


def between_engines(rank: int, world_size: int) -> None:
    for uses in (refused, loaded_by_parts, copied):
        uses(rank, world_size)


def test_a_model_between_two_engines_says_what_it_needs_is_never_whole_by_itself_and_is_not_copied(
    tmp_path: Path,
) -> None:
    run_on_ranks(between_engines, 2, tmp_path)
