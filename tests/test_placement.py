# SPDX-License-Identifier: Apache-2.0
"""The placement of experts in training: what is decided from loads, what is done, saved, resumed and refused."""

from __future__ import annotations

import copy
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("transformers")

from ds_fsmoe.config.reading import ConfigError, read_block
from ds_fsmoe.placement.events import Event
from ds_fsmoe.placement.holdings import PlacementError
from ds_fsmoe.planning.expert_placement import EMPTY, ExpertPlacement
from tests.hf_families import batch, loss_of
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.small_model import Case, SmallModel, train_steps
from tests.small_model import batch as small_batch
from tests.test_alltoalls import on_nodes
from tests.test_hugging_face import OfTwice, ds_config, engine_of, furthest, own_part
from tests.test_moved_experts import adam, drawn, everywhere

NUM_EXPERTS = 12
BALANCED = {"policy": "balanced", "every": 2, "moves_per_step": 1}


def small_model(family: str = "qwen3_moe") -> nn.Module:
    """Two blocks with twelve experts, which two, three and four ranks can share."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "num_experts_per_tok": 2}
    of_family = {
        "qwen3_moe": {"moe_intermediate_size": 24, "num_experts": NUM_EXPERTS, "decoder_sparse_step": 1},
        "gpt_oss": {"num_local_experts": NUM_EXPERTS},
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **sizes, **of_family[family])
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()


def skewed(engine: Any, x: torch.Tensor, hot: tuple[int, ...]) -> None:
    """Let the next forward choose these experts only, token by token in turn."""
    num_layers = engine.fsmoe.num_layers
    some = next(iter(engine.fsmoe.layers.values())).deepspeed_moe
    k = some.fsmoe.gate.k or 2
    tokens = np.arange(x.numel())
    chosen = np.stack([np.array(hot)[(tokens + at) % len(hot)] for at in range(k)], axis=1)
    engine.fsmoe.replay(np.repeat(chosen[:, None, :], num_layers, axis=1))


def trained(
    engine: Any, rank: int, steps: range, hot: tuple[int, ...] | None, world_size: int, accumulation: int = 1
) -> list[float]:
    losses = []
    for step in steps:
        for micro in range(accumulation):
            x = batch(11 * step + micro, world_size)[rank : rank + 1]
            if hot is not None:
                skewed(engine, x, hot)
            loss = loss_of(engine, x)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def made(stage: int, world_size: int, placement: Any, **more: Any) -> Any:
    config = adam(stage, **({"ep_size": world_size, "num_chunks": {"forward": 2, "backward": 3}} | more))
    if placement is not None:
        config["fsmoe"]["placement"] = placement
    with on_nodes(*(at * 2 // world_size for at in range(world_size))):
        return engine_of(small_model(), config)


def hot_experts_spread(rank: int, world_size: int, stage: int, spare: int) -> dict[str, Any]:
    """Experts 0 and 1, at home on the first rank, are all that tokens choose."""
    losses, norms, events = {}, {}, []
    for placement in (None, BALANCED | {"spare_experts": spare}):
        engine = made(stage, world_size, placement)
        name = "placed" if placement else "stays"
        if placement:
            engine.fsmoe.placement_watch.on_event.append(events.extend)
        losses[name] = trained(engine, rank, range(9), (0, 1), world_size)
        norms[name] = engine.get_global_grad_norm()
        if placement:
            now = {label: each.as_dict() for label, each in engine.fsmoe.placement.now.items()}
            with torch.no_grad():
                loss_of(engine, batch(0, world_size)[rank : rank + 1])
            copies = replicas_are_equal(engine)
        engine.destroy()
    return {"losses": losses, "norms": norms, "events": events, "now": now, "copies": copies}


def replicas_are_equal(engine: Any) -> bool:
    """Whether every replica has the bits of its expert at home, after the forward that follows a step."""
    held: dict[tuple[str, int], list[bytes]] = {}
    every: list[Any] = [None] * dist.get_world_size()
    own = []
    for label, now in engine.fsmoe.placement.now.items():
        layer = engine.fsmoe.placement.layer(label)
        replicas = layer.fsmoe.replicas
        if replicas is None:
            continue
        rank = layer.fsmoe.groups.ranks_of("ep").index(dist.get_rank())
        for number, expert in enumerate(now.by_rank[rank].tolist()):
            if expert == EMPTY:
                continue
            is_home = number < now.num_local
            weights = replicas._parameters_of(layer if is_home else replicas.modules[0])
            index = number if is_home else number - now.num_local
            own.append(
                (label, expert, b"".join(each.detach()[index].contiguous().numpy().tobytes() for each in weights))
            )
    dist.all_gather_object(every, own)
    for of_rank in every:
        for label, expert, values in of_rank:
            held.setdefault((label, expert), []).append(values)
    return all(len(set(each)) == 1 for each in held.values())


@sampled(("world_size", "stage", "spare"), [(2, 2, 0), (4, 2, 1), (2, 0, 1), (4, 3, 0), (2, 1, 1)], kept=[2])
def test_experts_move_to_where_the_tokens_are_and_losses_stay(
    world_size: int, stage: int, spare: int, tmp_path: Path
) -> None:
    found = run_on_ranks(hot_experts_spread, world_size, tmp_path, stage, spare)
    for of_rank in found:
        losses = of_rank["losses"]
        assert np.allclose(losses["placed"], losses["stays"], rtol=2e-5)
        assert of_rank["norms"]["placed"] == pytest.approx(of_rank["norms"]["stays"], rel=1e-4)
        assert of_rank["now"] == found[0]["now"]
        events: list[Event] = of_rank["events"]
        moved = [each for each in events if each.num_swaps or each.num_replicas]
        assert moved
        assert all(each.balance == pytest.approx(world_size) for each in moved)
        for label, each in of_rank["now"].items():
            placement = ExpertPlacement.from_dict(each)
            assert placement.rank_of_place(placement.home_of_expert[0]) != placement.rank_of_place(
                placement.home_of_expert[1]
            ), label
        assert of_rank["copies"]


def replicas_take_part(
    rank: int, world_size: int, ep: int, stage: int, degrees: tuple[int, int], accumulation: int
) -> list[str]:
    """Replicas at random places, changed between steps: the losses of a job without."""
    import random

    said, losses = [], {}
    for spare in (0, 2):
        chunks = {"forward": degrees[0], "backward": degrees[1]}
        placement = {"policy": "balanced", "every": 1000, "spare_experts": spare}
        config = adam(stage, accumulation=accumulation, ep_size=ep, num_chunks=chunks)
        config["fsmoe"]["placement"] = placement
        with on_nodes(*(at * 2 // world_size for at in range(world_size))):
            engine = engine_of(small_model("gpt_oss"), config)
        losses[spare] = []
        for step in range(4):
            losses[spare] += trained(engine, rank, range(step, step + 1), None, world_size, accumulation)
            if not spare:
                continue
            draw, wanted = random.Random(step), {}
            for label, now in engine.fsmoe.placement.now.items():
                filled = {}
                for at in range(now.num_ranks):
                    own = set(now.by_rank[at, : now.num_local].tolist())
                    others = [each for each in range(now.num_experts) if each not in own]
                    for number, expert in enumerate(draw.sample(others, min(2, len(others)))):
                        filled[at * now.per_rank + now.num_local + number] = expert
                wanted[label] = now.with_replicas(filled)
            engine.fsmoe.placement.go_to(wanted)
        engine.destroy()
    for at, (ours, theirs) in enumerate(zip(losses[2], losses[0], strict=True)):
        if not abs(ours - theirs) <= 2e-5 * abs(theirs):
            said.append(f"loss {at} is {ours} for {theirs}")
    return said


@sampled(
    ("world_size", "ep", "stage", "degrees", "accumulation"),
    [
        (4, 2, 2, (2, 3), 2),
        (4, 4, 2, (2, 3), 2),
        (4, 2, 0, (2, 2), 1),
        (4, 2, 1, (1, 3), 1),
        (4, 2, 3, (2, 2), 1),
        (2, 2, 0, (1, 1), 1),
        (2, 2, 3, (3, 2), 1),
        (4, 4, 1, (1, 2), 1),
        (3, 3, 2, (2, 2), 2),
    ],
    kept=[6],
)
def test_replicas_change_no_loss(
    world_size: int, ep: int, stage: int, degrees: tuple[int, int], accumulation: int, tmp_path: Path
) -> None:
    found = run_on_ranks(replicas_take_part, world_size, tmp_path, ep, stage, degrees, accumulation)
    assert [each for of_rank in found for each in of_rank] == []


def resumed(rank: int, world_size: int, folder: str, stage: int) -> list[str]:
    """A checkpoint between two moves; a job that resumes has the losses of the job that goes on."""
    said = []
    engine = made(stage, world_size, BALANCED)
    trained(engine, rank, range(6), (0, 1, 2), world_size)
    watch = engine.fsmoe.placement_watch
    if not watch._pending or all(each.is_at_start for each in engine.fsmoe.placement.now.values()):
        said.append("the checkpoint is not between two moves")
    before, where = everywhere(engine.fsmoe.placement), dict(engine.fsmoe.placement.now)
    engine.save_checkpoint(folder, tag="between")
    if everywhere(engine.fsmoe.placement) != before or engine.fsmoe.placement.now != where:
        said.append("saving has changed where experts are, or what they hold")
    wanted = trained(engine, rank, range(6, 10), (0, 1, 2), world_size)
    at_end = dict(engine.fsmoe.placement.now)
    engine.destroy()
    again = made(stage, world_size, BALANCED)
    again.load_checkpoint(folder, tag="between")
    if everywhere(again.fsmoe.placement) != before or again.fsmoe.placement.now != where:
        said.append("loading has not brought everything back")
    found = trained(again, rank, range(6, 10), (0, 1, 2), world_size)
    if found != wanted:
        said.append(f"losses {found} for {wanted}")
    if again.fsmoe.placement.now != at_end:
        said.append("experts went elsewhere")
    again.destroy()
    # One whose experts stay reads the same checkpoint.
    plain = made(stage, world_size, None)
    plain.load_checkpoint(folder, tag="between")
    if not np.allclose(trained(plain, rank, range(6, 10), (0, 1, 2), world_size), wanted, rtol=2e-5):
        said.append("a job whose experts stay goes on otherwise")
    plain.destroy()
    return said


@sampled(("world_size", "stage"), [(2, 2), (2, 3), (4, 0)], kept=[0])
def test_a_checkpoint_between_two_moves_is_whole_and_resumes(world_size: int, stage: int, tmp_path: Path) -> None:
    found = run_on_ranks(resumed, world_size, tmp_path, str(tmp_path / "saved"), stage)
    assert [each for of_rank in found for each in of_rank] == []


def files_of_placements(rank: int, world_size: int, folder: str) -> list[str]:
    said = []
    file = Path(folder) / "placement.json"
    engine = made(2, world_size, BALANCED)
    trained(engine, rank, range(8), (0, 1), world_size)
    engine.fsmoe.placement.save(file)
    dist.barrier()
    where = dict(engine.fsmoe.placement.now)
    engine.destroy()
    engine = made(2, world_size, {"file": str(file)})
    if engine.fsmoe.placement.now != where or engine.fsmoe.placement_watch is not None:
        said.append("experts are not where the file says")
    engine.destroy()
    whole = json.loads(file.read_text())
    paths = list(whole["layers"])
    damaged = {
        "other.json": {"format": 1, "layers": {"model.other": whole["layers"][paths[0]]}},
        "format.json": whole | {"format": 99},
        "twice.json": {
            "format": 1,
            "layers": {each: whole["layers"][each] | {"expert_of_place": [0] * NUM_EXPERTS} for each in paths},
        },
        "fewer.json": {
            "format": 1,
            "layers": {each: ExpertPlacement.at_start(4 * world_size, world_size).as_dict() for each in paths},
        },
    }
    for name, content in damaged.items():
        bad = Path(folder) / name
        if rank == 0:
            bad.write_text(json.dumps(content))
        dist.barrier()
        try:
            made(2, world_size, {"file": str(bad)})
            said.append(f"{name} was taken")
        except ConfigError as error:
            if str(bad) not in str(error) or "fsmoe.placement.file" not in str(error):
                said.append(f"{name}: {error}")
    return said


def test_a_placement_is_read_from_a_file_and_one_of_another_model_is_refused(tmp_path: Path) -> None:
    found = run_on_ranks(files_of_placements, 2, tmp_path, str(tmp_path))
    assert [each for of_rank in found for each in of_rank] == []


def too_many_replicas(rank: int, world_size: int) -> list[str]:
    from unittest.mock import patch

    said = []
    for spare, free in ((7, math.inf), (2, 1000.0 if rank == 1 else math.inf)):
        try:
            with patch("ds_fsmoe.engine.expert_placing.free_bytes", return_value=free):
                made(2, world_size, BALANCED | {"spare_experts": spare})
            said.append("made")
        except ConfigError as error:
            said.append(str(error))
    return said


@pytest.mark.slow
def test_more_replicas_than_experts_elsewhere_or_than_memory_are_refused_on_every_rank(tmp_path: Path) -> None:
    found = run_on_ranks(too_many_replicas, 2, tmp_path)
    assert found[0] == found[1]
    assert "fsmoe.placement.spare_experts = 7: must be at most 6" in found[0][0]
    assert "rank 1" in found[0][1]
    assert "fsmoe.placement.spare_experts = 2: replicas of 2 layer(s) need" in found[0][1]


def norms_of_a_step(rank: int, world_size: int, stage: int, spare: int) -> dict[str, float]:
    """The norm of the first step, experts and replicas in places that are drawn before it."""
    found = {}
    for name in ("stays", "placed"):
        engine = made(stage, world_size, {"policy": "balanced", "every": 1000, "spare_experts": spare})
        if name == "placed":
            placement, wanted = engine.fsmoe.placement, {}
            for at, (label, now) in enumerate(placement.now.items()):
                homes = drawn(now, 3 + at)
                spare_places = [p for p in range(now.num_places) if p % now.per_rank >= now.num_local]
                rank_of = [homes.rank_of_place(homes.home_of_expert[0])]
                filled = {p: 0 for p in spare_places if homes.rank_of_place(p) not in rank_of}
                wanted[label] = homes.with_replicas(filled)
            placement.go_to(wanted)
        trained(engine, rank, range(1), None, world_size)
        found[name] = engine.get_global_grad_norm()
        engine.destroy()
    return found


@sampled(("stage", "spare"), [(2, 1), (0, 1), (1, 0), (3, 1)], kept=[])
def test_the_norm_of_a_step_does_not_depend_on_where_experts_are(stage: int, spare: int, tmp_path: Path) -> None:
    for found in run_on_ranks(norms_of_a_step, 2, tmp_path, stage, spare):
        assert found["placed"] == pytest.approx(found["stays"], rel=1e-6)


def states_out_of_reach(rank: int, world_size: int) -> str:
    from unittest.mock import patch

    engine = made(2, world_size, BALANCED)
    trained(engine, rank, range(2), (0, 1), world_size)
    try:
        with patch("ds_fsmoe.placement.holdings.live_groups", return_value=None if rank == 1 else []):
            engine.fsmoe.placement.mover()
    except PlacementError as error:
        return str(error)
    return "moved"


@pytest.mark.slow
def test_states_that_one_rank_cannot_reach_are_an_error_on_every_rank(tmp_path: Path) -> None:
    found = run_on_ranks(states_out_of_reach, 2, tmp_path)
    assert found[0] == found[1]
    assert "rank 1" in found[0]
    assert "not in memory" in found[0]


def moving_loads(rank: int, world_size: int) -> tuple[int, list[str]]:
    """The hot experts change with every stretch of steps."""
    engine, events = made(2, world_size, BALANCED), []
    engine.fsmoe.placement_watch.on_event.append(events.extend)
    for stretch in range(4):
        first = (stretch * NUM_EXPERTS // 2) % NUM_EXPERTS
        trained(engine, rank, range(2 * stretch, 2 * stretch + 2), (first, first + 1), world_size)
    return sum(each.num_swaps for each in events), [each.why for each in events]


def test_nothing_moves_for_a_load_that_moves_on(tmp_path: Path) -> None:
    swaps, whys = run_on_ranks(moving_loads, 2, tmp_path)[0]
    assert whys
    assert swaps == 0


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ({"placement": {"policy": "ballanced"}}, 'fsmoe.placement.policy = "ballanced"'),
        ({"placement": {"policy": "nowhere.at.all"}}, "nowhere.at.all"),
        ({"placement": {"spare_experts": 2}}, "fsmoe.placement.spare_experts = 2"),
        ({"placement": {"every": 5}}, "fsmoe.placement.every = 5"),
        ({"placement": {"policy": "balanced", "spare_experts": 1}, "dispatch": "slots"}, "spare_experts = 1"),
        ({"placement": "balanced", "esp_size": 2}, 'fsmoe.placement = "balanced"'),
        ({"placement": {"policy": "balanced", "everry": 5}}, "everry"),
    ],
)
def test_what_cannot_be_is_refused_with_path_and_value(written: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_block({"fsmoe": {"enabled": True} | written})
    assert named in str(caught.value)


def test_the_name_of_a_policy_alone_is_a_placement() -> None:
    assert read_block({"fsmoe": {"enabled": True, "placement": "balanced"}}).placement.policy == "balanced"
    assert read_block({"fsmoe": {"enabled": True}}).placement.policy == "off"


def ends_while_moving(rank: int, world_size: int, folder: str) -> None:
    engine = made(2, world_size, BALANCED)
    trained(engine, rank, range(3), (0, 1, 2), world_size)
    engine.save_checkpoint(folder, tag="before")

    def ends(operations: Any) -> Any:
        if rank == 1:
            os._exit(9)
        return exchange(operations)

    exchange, dist.batch_isend_irecv = dist.batch_isend_irecv, ends
    trained(engine, rank, range(3, 9), (0, 1, 2), world_size)


def goes_on(rank: int, world_size: int, folder: str) -> tuple[list[float], list[float], bool]:
    losses, has_moved = [], False
    for placement in (BALANCED, None):
        engine = made(2, world_size, placement)
        engine.load_checkpoint(folder)
        losses.append(trained(engine, rank, range(3, 9), (0, 1, 2), world_size))
        if placement is not None:
            has_moved = not all(each.is_at_start for each in engine.fsmoe.placement.now.values())
        engine.destroy()
    return losses[0], losses[1], has_moved


def test_the_last_checkpoint_is_whole_after_a_rank_has_ended_in_the_middle_of_a_move(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    with pytest.raises(RuntimeError):
        run_on_ranks(ends_while_moving, 2, tmp_path / "first", folder)
    for placed, stays, moved in run_on_ranks(goes_on, 2, tmp_path / "second", folder):
        assert moved
        assert np.allclose(placed, stays, rtol=2e-5)


def paths_resume(rank: int, world_size: int, folder: str) -> list[str]:
    said = []
    engine = made(2, world_size, {"profile_paths": True})
    trained(engine, rank, range(3), None, world_size)
    counted = {label: each.as_arrays() for label, each in engine.fsmoe.paths.profiles().items()}
    if not all(int(each["counts"].sum()) for each in counted.values()):
        said.append("nothing was counted")
    engine.save_checkpoint(folder, tag="counted")
    engine.destroy()
    again = made(2, world_size, {"profile_paths": True})
    again.load_checkpoint(folder, tag="counted")
    found = {label: each.as_arrays() for label, each in again.fsmoe.paths.profiles().items()}
    for label, arrays in counted.items():
        said += [f"{label}: {name}" for name, each in arrays.items() if not np.array_equal(each, found[label][name])]
    again.destroy()
    plain = made(2, world_size, None)
    plain.load_checkpoint(folder, tag="counted")
    plain.destroy()
    return said


@pytest.mark.slow
def test_counts_of_paths_are_saved_and_go_on(tmp_path: Path) -> None:
    found = run_on_ranks(paths_resume, 2, tmp_path, str(tmp_path / "saved"))
    assert [each for of_rank in found for each in of_rank] == []


def spoiled_expert(rank: int, world_size: int) -> str:
    """Expert 5 makes nan where it has been moved to, and a replica of another is beside it."""
    from ds_fsmoe.checks.expert_results import ExpertResultError

    placed = {"policy": "balanced", "every": 1000, "spare_experts": 1}
    engine = made(1, world_size, placed, debug={"check_results": True})
    trained(engine, rank, range(1), (0, 5), world_size)
    placement, wanted = engine.fsmoe.placement, {}
    for label, now in placement.now.items():
        homes = now.swapped(now.home_of_expert[5], now.home_of_expert[6])
        wanted[label] = homes.with_replicas({now.num_local: 7})
    placement.go_to(wanted)
    trained(engine, rank, range(1, 2), (0, 5), world_size)
    label = max(placement.now)
    home, index = divmod(placement.now[label].home_of_expert[5], placement.now[label].per_rank)
    if placement.seats()[label].ep_rank == home:
        with torch.no_grad():
            placement.layer(label).down_proj[index, 0, 0] = float("nan")
    try:
        trained(engine, rank, range(2, 3), (0, 5), world_size)
    except ExpertResultError as error:
        return str(error)
    return "nothing was found"


@pytest.mark.slow
def test_an_expert_that_has_moved_is_named_by_its_own_number(tmp_path: Path) -> None:
    found = run_on_ranks(spoiled_expert, 2, tmp_path)
    assert found[0] == found[1]
    assert "expert 5 made nan" in found[0]


def called_replicas(rank: int, world_size: int) -> list[str]:
    """Experts that are called themselves, of which each rank has a replica of one of the other."""
    from deepspeed.utils import safe_get_full_grad

    reference, said = OfTwice(), []
    config = ds_config(1, num_chunks={"forward": 2, "backward": 3})
    config["fsmoe"]["placement"] = {"policy": "balanced", "every": 1000, "spare_experts": 1}
    engine = engine_of(copy.deepcopy(reference), config)
    placement = engine.fsmoe.placement
    placement.go_to({label: now.with_replicas({2: 3, 5: 0}) for label, now in placement.now.items()})
    xs = torch.randn(world_size, 9, 32, generator=torch.Generator().manual_seed(1))
    losses = [reference(each) for each in xs]
    torch.stack(losses).mean().backward()
    with torch.no_grad():
        alone = engine(xs[rank])
    loss = engine(xs[rank])
    engine.backward(loss)
    for name, found in (("in training", loss), ("without a gradient", alone)):
        if not abs(found.item() - losses[rank].item()) <= 1e-5 * abs(losses[rank].item()):
            said.append(f"loss {name}: {found.item()} for {losses[rank].item()}")
    for name, parameter in engine.module.named_parameters():
        found = safe_get_full_grad(parameter)
        wanted = own_part(dict(reference.named_parameters())[name].grad, found.shape, rank)
        if not furthest(found, wanted) <= 1e-5:
            said.append(f"{name} is off by {furthest(found, wanted):.1e}")
    engine.destroy()
    return said


def test_replicas_of_experts_that_are_called_themselves_compute_with_their_own_weights(tmp_path: Path) -> None:
    assert run_on_ranks(called_replicas, 2, tmp_path) == [[], []]


def experts_of_deepspeed(rank: int, world_size: int, stage: int) -> list[str]:
    """Replicas of DeepSpeed's experts, with dropout, which evaluation turns off in them too."""
    import ds_fsmoe

    said, results = [], {}
    case = Case(ep_size=world_size, stage=stage, k=2, drop_tokens=False, expert="smooth")
    for spare in (0, 1):
        torch.manual_seed(0)
        block = {"enabled": True, "dispatch": "rows", "num_chunks": {"forward": 2, "backward": 3}}
        block["placement"] = {"policy": "balanced", "every": 1000, "spare_experts": spare}
        model = SmallModel(case, rank)
        config = case.ds_config(fsmoe=block)
        engine = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
        placement, losses = engine.fsmoe.placement, []
        if spare:
            wanted = {}
            for label, now in placement.now.items():
                others = [int(now.by_rank[(at + 1) % world_size, 0]) for at in range(world_size)]
                filled = {at * now.per_rank + now.num_local: each for at, each in enumerate(others)}
                wanted[label] = now.with_replicas(filled)
            placement.go_to(wanted)
        losses += train_steps(engine, rank, range(3))
        engine.eval()
        layer = next(iter(engine.fsmoe.inner_layers.values()))
        with torch.no_grad():
            losses.append(engine(*small_batch(9, rank, torch.float32))[0].item())
        if spare and any(each.training for each in layer.fsmoe.replicas.modules):
            said.append("replicas are in training while the model is evaluated")
        results[spare] = losses
        engine.destroy()
    if not np.allclose(results[1], results[0], rtol=1e-5):
        said.append(f"losses {results[1]} for {results[0]}")
    return said


@sampled(("world_size", "stage"), [(2, 2), (4, 0), (2, 1)], kept=[])
def test_experts_of_deepspeeds_own_layers_have_replicas_too(world_size: int, stage: int, tmp_path: Path) -> None:
    found = run_on_ranks(experts_of_deepspeed, world_size, tmp_path, stage)
    assert [each for of_rank in found for each in of_rank] == []


def decided_often(rank: int, world_size: int, folder: str) -> list[str]:
    """Experts change places again and again, within ranks too; what is saved is in the model's own order."""
    said = []
    engine = made(2, world_size, {"policy": "balanced", "every": 1000})
    placement = engine.fsmoe.placement
    for step in range(5):
        trained(engine, rank, range(step, step + 1), None, world_size)
        # As decisions do it, who do not care for places within a rank.
        mover = placement.mover()
        for label, now in list(placement.now.items()):
            for first, second in now.swaps_to(drawn(now, 17 * step + len(label))):
                placement.swap(mover, [(label, first, second)])
    where = dict(placement.now)
    engine.save_checkpoint(folder, tag="often")
    if placement.now != where:
        said.append("experts did not come back to their places")
    wanted = trained(engine, rank, range(5, 8), None, world_size)
    engine.destroy()
    plain = made(2, world_size, None)
    plain.load_checkpoint(folder, tag="often")
    if not np.allclose(trained(plain, rank, range(5, 8), None, world_size), wanted, rtol=2e-5):
        said.append("a job whose experts stay goes on otherwise")
    plain.destroy()
    return said


def test_what_is_saved_after_many_moves_is_in_the_models_own_order(tmp_path: Path) -> None:
    found = run_on_ranks(decided_often, 3, tmp_path, str(tmp_path / "saved"))
    assert [each for of_rank in found for each in of_rank] == []
