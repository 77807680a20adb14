# SPDX-License-Identifier: Apache-2.0
"""Where ``ep_size`` is "auto" and the tokens are known, the planner's choice for the links is taken, once and by all
ranks; where something is not known, it is the largest size inside a node.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from ds_fsmoe.distributed.topology import topology_of_size
from ds_fsmoe.engine import auto_ep_size
from ds_fsmoe.measuring.cache import Measurements, cluster_fingerprint, write_measurements
from ds_fsmoe.planning.cluster import Cluster, Operation
from ds_fsmoe.planning.cluster_schema import COLLECTIVES, LINKS
from ds_fsmoe.planning.cost import LinearCost
from tests.hf_families import NUM_EXPERTS, batch, config_of, loss_of, model_of
from tests.ranks import run_on_ranks
from tests.test_hugging_face import ds_config, engine_of

FREE = Operation(LinearCost(0.0, 0.0))
PER_BYTE = {"all_to_all": 1, "all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
SLOW, FAST = 1e-3, 1e-4
"""The ms of a byte."""


def links(inter: float, intra: float, per_node: int = 2) -> Cluster:
    """Two nodes whose collectives take so many ms a byte, and whose processors take no time."""
    costs = {
        f"{link}.{name}": Operation(LinearCost(0.01, slope * PER_BYTE[name]), 2)
        for link, slope in zip(LINKS, (inter, intra), strict=True)
        for name in COLLECTIVES
    }
    free = dict.fromkeys(("gemm", "attention", "softmax", "routing", "order"), FREE)
    return Cluster("mine", 2, per_node, costs | free)


def kept(folder: Path, cluster: Cluster) -> None:
    """Put a cluster into the cache of this job, on rank 0."""
    import torch.distributed as dist

    fingerprint = cluster_fingerprint(torch.device("cpu"), topology_of_size(dist.get_world_size(), 2))
    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        path = auto_ep_size.MeasurementCache(folder).file_of(fingerprint)
        write_measurements(path, fingerprint, Measurements(), cluster)
    dist.barrier()


def config_with(length: int, folder: Path | None = None, **block: Any) -> dict[str, Any]:
    cache = {} if folder is None else {"autotune": {"cache_dir": str(folder)}}
    return ds_config(1, sequence_length=length, topology={"ranks_per_node": 2}, **cache, **block)


# ---- on ranks

LENGTHS = {1: 4, 128: 2, 4096: 1}
"""Tokens of a sample -> the ranks for experts, with the slow links between nodes: few rows are less than gradients."""


def made(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Sizes of models that are made in each way, by a cache with made-up links, and what is said."""
    from transformers import AutoModelForCausalLM

    import ds_fsmoe

    kept(Path(folder), links(SLOW, FAST))
    found: dict[str, Any] = {}
    saved = Path(folder) / "model"
    if rank == 0:
        model_of("olmoe").save_pretrained(saved)
    torch.distributed.barrier()
    for length in LENGTHS:
        config = config_with(length, Path(folder))
        with ds_fsmoe.own_experts(config):
            models = {
                "files": AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32),
                "config": AutoModelForCausalLM.from_config(config_of("olmoe")),
            }
        local = {way: len(each.model.layers[0].mlp.experts.down_proj) for way, each in models.items()}
        models["initialize"] = model_of("olmoe")
        for way, model in models.items():
            engine = engine_of(model, config)
            ep_sizes = {each.ep_size for each in engine.fsmoe.inner_layers.values()}
            loss = loss_of(engine, batch(0, world_size)[rank : rank + 1])
            found[f"{way}, {length}"] = ep_sizes, local.get(way), engine.fsmoe.chosen()["ep_size"], loss.item()
            engine.destroy()
    for size in LENGTHS.values():
        engine = engine_of(model_of("olmoe"), config_with(1, ep_size=size))
        found[f"by hand, {size}"] = loss_of(engine, batch(0, world_size)[rank : rank + 1]).item()
        engine.destroy()
    return found


@pytest.mark.long
def test_a_model_has_the_planners_size_in_whatever_way_it_is_made_and_trains_as_with_this_size(tmp_path: Path) -> None:
    of_ranks = run_on_ranks(made, 4, tmp_path / "ranks", str(tmp_path / "cache"))
    for found in of_ranks:
        for way in ("files", "config", "initialize"):
            for length, size in LENGTHS.items():
                sizes, local, said, loss = found[f"{way}, {length}"]
                assert (way, length, sizes) == (way, length, {size})
                assert said == of_ranks[0][f"initialize, {length}"][2]
                assert said.startswith(
                    f"{size} of 1, 2, 4 for {length} tokens a micro-batch on links measured before; "
                )
                assert local in (None, NUM_EXPERTS // size)
                if way != "config":
                    assert loss == found[f"by hand, {size}"]
