# SPDX-License-Identifier: Apache-2.0
"""Sharded experts need nodes that are equally large, and are told what it costs to share an expert between nodes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from ds_fsmoe.distributed.groups import make_groups
from tests.logged import heard
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.small_model import Case, small_engine, train_steps


def start_on(rank: int, world_size: int, hosts: str, ep_size: int, esp_size: int, block: dict) -> tuple:
    """(error, warnings, groups that were made) of a start, and of a step where it is none."""
    import ds_fsmoe

    socket.gethostname = lambda: f"node{hosts[rank]}"
    error, said, made = "", heard("WARNING"), []
    make = dist.new_group
    dist.new_group = lambda ranks=None, *args, **kwargs: made.append(list(ranks)) or make(ranks, *args, **kwargs)
    try:
        engine = small_engine(Case(ep_size, expert="gpt"), rank, {"esp_size": esp_size} | block)
        train_steps(engine, rank, range(1))
        engine.destroy()
    except ds_fsmoe.ConfigError as caught:
        error = str(caught)
        with pytest.raises(ValueError, match=r"^fsmoe\.expert_tensor_parallel_size = 2: the nodes have different"):
            make_groups(1, esp_size)  # as a layer put together by hand does
    return error, "\n".join(said.lines), made


def test_uneven_nodes_are_refused_for_shards_on_every_rank_before_any_group_is_made(tmp_path: Path) -> None:
    for error, _, made in run_on_ranks(start_on, 4, tmp_path, "aaab", 1, 2, {}):
        assert error == (
            "fsmoe.esp_size = 2: the nodes have different numbers of ranks (1 of 1 rank, 1 of 3 ranks), so "
            "ranks of two nodes would share an expert; use 1, or as many ranks on every node. If host names do not "
            "identify the nodes, set fsmoe.topology.ranks_per_node"
        )
        assert made == []


@sampled(
    ("hosts", "esp_size", "block"),
    [("aaab", 1, {}), ("aaab", 2, {"topology": {"ranks_per_node": 2}}), ("abba", 1, {})],
)
def test_uneven_nodes_do_without_shards_and_the_config_knows_better_than_host_names(
    tmp_path: Path, hosts: str, esp_size: int, block: dict
) -> None:
    for error, warnings, made in run_on_ranks(start_on, 4, tmp_path, hosts, 2, esp_size, block):
        assert error == ""
        assert "spans" not in warnings
        assert made


def test_an_expert_shared_between_nodes_is_allowed_and_its_price_is_said(tmp_path: Path) -> None:
    seen = run_on_ranks(start_on, 4, tmp_path, "aabb", 1, 4, {})
    assert [error for error, _, _ in seen] == [""] * 4
    assert ("fsmoe.esp_size = 4 spans 2 nodes (at ep_size = 1 one node holds 1, 2)") in seen[0][1]
    assert all("spans" not in warnings for _, warnings, _ in seen[1:])
