# SPDX-License-Identifier: Apache-2.0
"""Which ranks make up which groups, which links those cross, and that DeepSpeed and ours agree about them."""

from __future__ import annotations

import itertools
import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.distributed import groups as ours
from ds_fsmoe.distributed.groups import make_groups, stock_names
from ds_fsmoe.distributed.topology import Layout, Topology, layout, placed_groups, topology_of_hosts, topology_of_size
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.schedule import Lane
from ds_fsmoe.planning.workload import Shape, layer_work
from tests.ranks import COLLECTIVE_TIMEOUT_S, run_on_ranks
from tests.samples import sampled

INSIDE, BETWEEN, BOTH = (Lane.INTRA,), (Lane.INTER,), (Lane.INTER, Lane.INTRA)
KINDS = ("blocks", "ep", "esp", "edp", "mp", "dp")


def divisors(total: int) -> list[int]:
    return [size for size in range(1, total + 1) if total % size == 0]


def every_layout(sizes: tuple[int, ...] = (1, 4, 6, 8, 12)) -> list[tuple[bool, Layout]]:
    """(experts before data, layout) for all (pp, mp, ep, esp) that fit so many ranks, in both orders."""
    found = []
    for world_size in sizes:
        for pp_size in divisors(world_size):
            stage = divisors(world_size // pp_size)
            for mp_size, ep_size, esp_size in itertools.product(stage, repeat=3):
                if world_size // pp_size % (ep_size * esp_size) == 0:
                    for order in (True, False):
                        one = layout(world_size, ep_size, esp_size, order, mp_size=mp_size, pp_size=pp_size)
                        found.append((order, one))
    return found


# ---- layouts


def test_figure_2_of_the_paper() -> None:
    """DP = MP = EP = ESP = 2 on GPU1 .. GPU4: EP is GPU1 with GPU3 and GPU2 with GPU4."""
    found = layout(4, 2, 2, mp_size=2)
    assert found.ep == found.dp == ((0, 2), (1, 3))
    assert found.esp == found.mp == ((0, 1), (2, 3))
    assert found.edp == ((0,), (1,), (2,), (3,))
    assert found.blocks == ((0, 1, 2, 3),)


def test_every_rank_is_in_one_group_of_each_kind_and_blocks_are_ep_times_esp_and_deepspeeds() -> None:
    from deepspeed.utils.groups import _get_expert_parallel_ranks

    layouts = every_layout()
    assert len(layouts) > 500
    for order, found in layouts:
        for kind in KINDS:
            members = sorted(rank for ranks in getattr(found, kind) for rank in ranks)
            assert members == list(range(found.world_size)), (found, kind)
        for block in found.blocks:
            rows = [found.group_of("ep", rank) for rank in found.group_of("esp", block[0])]
            assert sorted(rank for row in rows for rank in row) == sorted(block)
            for i, rank in enumerate(block):
                ep_rank = found.group_of("ep", rank).index(rank)
                shard = found.group_of("esp", rank).index(rank)
                assert i == ep_rank * found.esp_size + shard, "the rank by which DeepSpeed names the files of experts"
        block_size = found.ep_size * found.esp_size
        ep, edp = _get_expert_parallel_ranks(found.world_size, 1, block_size, found.pp_size, not order)
        assert sorted(map(tuple, ep)) == sorted(found.blocks)
        assert sorted(map(tuple, edp)) == sorted(found.edp)
        assert found.esp_size > 1 or found.ep == found.blocks


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"ep_size": 2, "esp_size": 3},
            r"^fsmoe.expert_tensor_parallel_size = 3: times ep_size, it must divide the 8 ranks; "
            r"with ep_size = 2 the choices are 1, 2, 4$",
        ),
        ({"esp_size": 0}, r"fsmoe.expert_tensor_parallel_size = 0: .* the choices are 1, 2, 4, 8$"),
        ({"esp_size": True}, r"fsmoe.expert_tensor_parallel_size = True: "),
        ({"ep_size": 8, "pp_size": 2}, r"^ep_size = 8: must divide the 4 ranks of a pipeline stage; .* 1, 2, 4$"),
        ({"ep_size": 2, "esp_size": 4, "pp_size": 2}, r"_size = 4: .* a pipeline stage; .* choices are 1, 2$"),
        ({"mp_size": 3}, r"tensor-parallel size = 3: must divide the 8 ranks; the choices are 1, 2, 4, 8$"),
        ({"pp_size": 3}, r"3 pipeline stages: must divide the 8 ranks; the choices are 1, 2, 4, 8$"),
        *(
            ({"ranks_per_node": size}, rf"ranks_per_node = {size}: must divide the 8 ranks; the choices are 1, 2, 4, 8")
            for size in (0, 3, 16, True)
        ),
    ],
)
def test_sizes_that_do_not_divide_the_ranks_are_refused_with_those_that_do(sizes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        topology_of_size(8, *sizes.values()) if "ranks_per_node" in sizes else layout(8, **sizes)


# ---- hosts


def test_ranks_with_one_host_name_share_a_node_wherever_they_stand() -> None:
    assert topology_of_hosts(["b", "a", "b", "a"]).node_of_rank == (0, 1, 0, 1)
    uneven = topology_of_hosts(["x", "x", "x", "y"])
    assert (uneven.world_size, uneven.ranks_per_node) == (4, 3)


def test_links_follow_from_the_nodes_of_the_ranks_alike_for_all_groups_of_a_kind() -> None:
    for ranks, lanes in (((3,), ()), ((4, 5, 6, 7), INSIDE), ((1, 5), BETWEEN), ((0, 1, 4), BOTH), (range(8), BOTH)):
        assert topology_of_size(8, 4).lanes_of(tuple(ranks)) == lanes
    # Otherwise two ranks would run one schedule on different lanes, and wait for each other for ever.
    one_leaves_its_node = Topology((0, 0, 0, 1)).place([(0, 1), (2, 3)])
    assert (one_leaves_its_node.lanes, one_leaves_its_node.nodes) == (BOTH, 2)


# ---- for the planner


def test_on_even_nodes_of_neighbours_the_planner_is_told_what_it_works_out_itself() -> None:
    for found in (each for order, each in every_layout((4, 8, 12)) if order):
        for ranks_per_node in divisors(found.world_size):
            told = placed_groups(found, topology_of_size(found.world_size, ranks_per_node))
            own = Groups(
                found.world_size, ranks_per_node, found.mp_size, found.esp_size, found.ep_size, pp=found.pp_size
            )
            assert told.placements == own.placements
            assert (told.edp, told.gpus_per_node) == (own.edp, ranks_per_node)


def test_the_planner_plans_for_hosts_that_do_not_hold_neighbours() -> None:
    shape = Shape(B=2, L=24, M=8, H=48, E=24, K=2, heads=4)
    found = layout(4, 2, 2)
    neighbours = layer_work(shape, placed_groups(found, topology_of_hosts("aabb")))
    assert neighbours == layer_work(shape, Groups(4, 2, esp=2, ep=2))
    moe = layer_work(shape, placed_groups(found, topology_of_hosts("abab"))).forward.moe
    assert [each.lanes for each in moe.ahead] == [INSIDE, BETWEEN]
    assert [each.lanes for each in neighbours.forward.moe.ahead if not each.is_inner] == [BETWEEN]


# ---- communicators


def test_without_other_ranks_there_are_no_communicators() -> None:
    assert not dist.is_initialized()
    alone = make_groups()
    assert alone == make_groups()
    assert (alone.ep_group, alone.esp_group, alone.block_group, alone.edp_group, alone.dp_group) == (None,) * 5
    assert {at.lanes for at in alone.planned.placements.values()} == {()}
    assert (alone.rank, alone.ranks_of("ep"), alone.index_in("blocks")) == (0, (0,), 0)


def reach(made: ours.FSMoEGroups) -> bool:
    """Whether an all-reduce over each group adds up the numbers of the ranks of the layout."""
    found, expected = {}, {}
    for kind, group in (
        *(("ep", made.ep_group), ("esp", made.esp_group), ("blocks", made.block_group)),
        *(("edp", made.edp_group), ("dp", made.dp_group)),
    ):
        ranks = made.ranks_of(kind)
        if len(ranks) > 1:
            expected[kind] = sum(10**rank for rank in ranks)
        if group is not None:
            number = torch.tensor([10 ** dist.get_rank()])
            dist.all_reduce(number, group=group)
            found[kind] = int(number)
    return bool(found) and found == expected


def start_again(folder: str, rank: int, world_size: int, timeout_s: int) -> None:
    store = dist.FileStore(f"{folder}/again{timeout_s}", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s))


def timeout_s_of(group: dist.ProcessGroup) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def make_and_make_again(rank: int, world_size: int, folder: str) -> dict:
    socket.gethostname = lambda: f"node{rank // 2}"
    reached = []
    for ep_size, esp_size, order in ((2, 2, True), (1, 2, True), (2, 1, True), (2, 1, False), (1, 1, True)):
        made = make_groups(ep_size, esp_size, expert_before_data=order)
        assert make_groups(ep_size, esp_size, expert_before_data=order) is made, "once only"
        reached.append(reach(made))
    first, overridden = make_groups(2, 2), make_groups(2, 2, ranks_per_node=4)
    refusals = []
    for arguments in ({"ranks_per_node": 3}, {"ep_size": 3}, {"ep_size": 2, "esp_size": 4}, {"mp_size": 3}):
        with pytest.raises(ValueError, match="the choices are") as refusal:
            make_groups(**arguments)
        refusals.append(str(refusal.value))
    found = {
        "faked": {kind: at.lanes for kind, at in first.planned.placements.items()},
        "overridden": {kind: at.lanes for kind, at in overridden.planned.placements.items()},
        "timeouts": [timeout_s_of(first.ep_group), timeout_s_of(first.esp_group)],
        "refusals": refusals,
        "held": len(ours._made().groups),
    }
    dist.barrier()
    dist.destroy_process_group()
    assert not ours._made_under
    start_again(folder, rank, world_size, 51)
    again = make_groups(2, 2)
    reached.append(reach(again))
    found |= {"second timeout": timeout_s_of(again.ep_group)}
    found |= {"indices": [again.index_in(kind) for kind in ("ep", "esp", "blocks")]}
    somebody_keeps = dist.group.WORLD
    dist.destroy_process_group()
    start_again(folder, rank, world_size, 52)
    third = make_groups(2, 2)
    reached.append(reach(third))
    assert first is not again is not third
    del somebody_keeps  # the end of the old default group is no reason to forget the new ones
    assert make_groups(2, 2) is third
    return found | {"reached": reached, "held at last": len(ours._made().groups)}


def test_communicators_join_the_ranks_of_the_layout_once_and_again_after_a_second_start(tmp_path: Path) -> None:
    seen = run_on_ranks(make_and_make_again, 4, tmp_path, str(tmp_path))
    for rank, each in enumerate(seen):
        assert each == {
            "reached": [True] * 7,
            "faked": {"mp": (), "dp": BOTH, "esp": INSIDE, "ep": BETWEEN, "edp": ()},
            "overridden": {"mp": (), "dp": INSIDE, "esp": INSIDE, "ep": INSIDE, "edp": ()},
            "timeouts": [COLLECTIVE_TIMEOUT_S] * 2,
            "second timeout": 51,
            "held": 6,
            "held at last": 1,
            "indices": [rank // 2, rank % 2, rank],
            "refusals": seen[0]["refusals"],
        }


# ---- beside DeepSpeed


SIZES = ((2, 2), (2, 1), (1, 2), (1, 1))
"""Of layers with three block sizes: experts spread and sharded, spread, sharded, and neither."""


def train_beside_deepspeed(rank: int, world_size: int, order: bool, stage: int) -> tuple[list[set[float]], str]:
    """The values of each layer's experts after DeepSpeed has made replicas alike, and what is said of another order."""
    import deepspeed
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups as stock

    moes = nn.ModuleList(MoE(5, nn.Linear(5, 5), num_experts=4, ep_size=ep_size) for ep_size, _ in SIZES)
    for moe, sizes in zip(moes, SIZES, strict=True):
        stock_names(*sizes).put_on(moe)
    with torch.no_grad():
        for parameter in moes.parameters():
            parameter.fill_(rank)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 4096},
        "use_data_before_expert_parallelism": not order,
    }
    engine, *_ = deepspeed.initialize(model=moes, model_parameters=list(moes.parameters()), config=config)
    of_experts = [{float(each.mean()) for each in moe.deepspeed_moe.experts.parameters()} for moe in moes]
    assert {float(moe.deepspeed_moe.gate.wg.weight.mean()) for moe in moes} == {0.0}
    stocks = stock._get_expert_parallel_group_dict(), stock._get_expert_data_parallel_group_dict()
    keys = [set(each) for each in stocks]
    made = [make_groups(*sizes, expert_before_data=order) for sizes in SIZES]
    assert made[0].edp_group is None, "nobody holds what this rank holds"
    assert made[1].edp_group is stock._get_expert_data_parallel_group("ep_size_2")
    assert made[0].block_group is moes[0].deepspeed_moe.ep_group
    assert made[1].block_group is made[2].block_group is moes[1].deepspeed_moe.ep_group
    assert made[1].ep_group is not made[1].block_group, "its own communicator"
    assert made[2].esp_group is not made[2].block_group
    assert made[3].dp_group is engine.data_parallel_group
    assert keys == [set(each) for each in stocks] == [{"ep_size_1", "ep_size_2", "ep_size_4"}] * 2
    assert stock._get_max_expert_size() == 4
    assert all(reach(each) for each in made)
    replicas = layout(4, 2, 1, order).group_of("edp", rank)
    assert [each.ranks_of("edp") for each in made] == [(rank,), replicas, replicas, (0, 1, 2, 3)]
    engine.destroy()
    with pytest.raises(RuntimeError, match="use_data_before_expert_parallelism") as refusal:
        make_groups(2, 1, expert_before_data=not order)
    return of_experts, str(refusal.value)


@sampled(("order", "stage"), [(True, 2), (False, 0)])
def test_deepspeed_makes_its_groups_beside_ours_and_overwrites_true_replicas_only(
    order: bool, stage: int, tmp_path: Path
) -> None:
    seen = run_on_ranks(train_beside_deepspeed, 4, tmp_path, order, stage)
    for rank, (of_experts, _) in enumerate(seen):
        # Every parameter was its rank's number: now it is that of the first rank that holds the same parameter.
        first = float(layout(4, 2, 1, order).group_of("edp", rank)[0])
        assert of_experts == [{float(rank)}, {first}, {first}, {0.0}]
    block = "[0, 1], and [0, 2] for data" if order else "[0, 2], and [0, 1] for data"
    assert f"DeepSpeed's group ep_size_2 of rank 0 has the ranks {block}; ds_fsmoe needs" in seen[0][1]


def end_and_start_deepspeed(rank: int, world_size: int, folder: str) -> str:
    import deepspeed
    from deepspeed.utils import groups as stock

    deepspeed.init_distributed("gloo", verbose=False)
    assert not stock._get_expert_parallel_group_dict()
    first = make_groups(1, 2)  # before any layer has asked
    assert first.block_group is stock._get_expert_parallel_group("ep_size_2")
    assert reach(first)
    deepspeed.comm.destroy_process_group()
    start_again(folder, rank, world_size, 52)
    deepspeed.init_distributed("gloo", verbose=False)
    second = make_groups(1, 2)
    assert second is not first
    assert reach(second)
    # Two pipeline stages, each of two tensor-parallel ranks.
    stock.mpu = SimpleNamespace(
        get_tensor_model_parallel_world_size=lambda: 2,
        get_pipeline_model_parallel_world_size=lambda: 2,
        get_data_parallel_group=lambda: None,
    )
    staged = make_groups()
    assert reach(staged)
    assert (staged.planned.mp, staged.planned.pp, staged.planned.dp) == (2, 2, None)
    assert staged.ranks_of("edp") == ((0, 1), (2, 3))[rank // 2], "no replicas in another stage"
    stock.mpu = None
    dist.destroy_process_group()  # DeepSpeed is not told
    start_again(folder, rank, world_size, 53)
    with pytest.raises(RuntimeError, match=r"deepspeed\.comm\.destroy_process_group") as refusal:
        make_groups(1, 2)
    return str(refusal.value)


def test_a_second_start_of_deepspeed_works_and_groups_it_kept_too_long_are_named(tmp_path: Path) -> None:
    for refusal in run_on_ranks(end_and_start_deepspeed, 4, tmp_path, str(tmp_path)):
        assert refusal.startswith("DeepSpeed's group ep_size_2 belongs to a process group that was destroyed")
