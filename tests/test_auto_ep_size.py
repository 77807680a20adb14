# SPDX-License-Identifier: Apache-2.0
"""Where ``ep_size`` is "auto" and the tokens are known, the planner's choice for the links is taken, once and by all
ranks; where something is not known, it is the largest size inside a node.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.distributed.fail_together import MeasuringError, raise_on_all_ranks
from ds_fsmoe.distributed.topology import Topology, topology_of_size
from ds_fsmoe.engine import auto_ep_size
from ds_fsmoe.engine.auto_ep_size import AutoEpSize, forget_ep_size, reason_of
from ds_fsmoe.engine.convert_experts import find_experts, fitting_ep_sizes
from ds_fsmoe.measuring.cache import Measurements, cluster_fingerprint, write_measurements
from ds_fsmoe.measuring.stopwatch import Stopwatch
from ds_fsmoe.measuring.stopwatch import Times as Timed
from ds_fsmoe.planning.cluster import Cluster, Operation, cluster_as_json
from ds_fsmoe.planning.cluster_schema import COLLECTIVES, LINKS
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.ep_size import choose_ep_size, ep_sizes, states_bytes
from tests.hf_families import NUM_EXPERTS, batch, config_of, loss_of, model_of
from tests.logged import Said
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


SLOWEST = 1e-3 * 100.0 / (2 * 4)
"""The pretended ms of a byte between nodes: a size of 1 is one number for each of two ranks."""


class Times:
    """Lets operations take so long by their sizes in place of a stopwatch; the work itself is done once per size."""

    def __init__(self, num_in_time: int = 99) -> None:
        self.timed: list[str] = []
        self._num_in_time = num_in_time

    def __enter__(self) -> Times:
        def times(watch: Any, what: str, sizes: Any, prepare: Any, group: Any = None) -> Timed:
            self.timed.append(what)
            for size in sizes:
                prepare(size)()
            found_ms = [1e-3 * self.slope_of(what) * size for size in sizes]
            return Timed(found_ms, [], found_ms)

        self._own = Stopwatch.times, Stopwatch.any_rank
        Stopwatch.times = times  # type: ignore[method-assign]
        # The clock is not asked.
        Stopwatch.any_rank = lambda *_: len(self.timed) >= self._num_in_time  # type: ignore[method-assign]
        return self

    def slope_of(self, what: str) -> float:
        return 1.0 if what.startswith("gemm") else 100.0 if "inter" in what else 10.0

    def __exit__(self, *error: Any) -> None:
        Stopwatch.times, Stopwatch.any_rank = self._own  # type: ignore[method-assign]


def measured(rank: int, world_size: int) -> dict[str, Any]:
    """Sizes by links that are measured at that moment, and where something is not known."""
    said = Said(logging.WARNING)
    logging.getLogger("ds_fsmoe").addHandler(said)
    found: dict[str, Any] = {}

    def sizes_of(model: Any, config: dict[str, Any]) -> tuple[set[int], str | None]:
        engine = engine_of(model, config)
        sizes = {each.ep_size for each in engine.fsmoe.inner_layers.values()}
        words = engine.fsmoe.chosen().get("ep_size")
        engine.destroy()
        return sizes, words

    with Times() as times:
        found["measured"] = sizes_of(model_of("olmoe"), config_with(1))
        found["timed"] = list(times.timed)
        found["deterministic"] = sizes_of(model_of("olmoe"), config_with(1, deterministic=True))
        found["unknown"] = sizes_of(model_of("olmoe"), ds_config(1, topology={"ranks_per_node": 2}))
        frozen = model_of("olmoe")
        for each in find_experts(frozen).values():
            each.requires_grad_(False)
        found["frozen"] = sizes_of(frozen, config_with(1))
        found["more"] = len(times.timed) - len(found["timed"])
    found["warned"] = [each for each in said.lines if "ep_size" in each]
    few, own = topology_of_size(world_size, 2), auto_ep_size.measure_links
    with Times(num_in_time=8) as times:
        costs = own(Stopwatch(torch.device("cpu")), few, torch.float32)
        found["in time"], found["by others"] = times.timed, {name: each.cost.beta_ms for name, each in costs.items()}
    with Times(num_in_time=3) as times, pytest.raises(MeasuringError, match="could not be measured within"):
        own(Stopwatch(torch.device("cpu")), few, torch.float32)
    auto_ep_size.measure_links = fails_on_one_rank
    found["failed"] = sizes_of(model_of("olmoe"), config_with(1))
    auto_ep_size.measure_links = own
    found["warned of"] = [each for each in said.lines if "ep_size" in each]
    return found


def fails_on_one_rank(*args: Any, **options: Any) -> Any:
    with raise_on_all_ranks(None, "measuring links"):
        if torch.distributed.get_rank() == 1:
            raise OSError("no link")


@pytest.mark.long
def test_links_are_measured_once_and_without_them_or_the_tokens_it_is_the_largest_size_in_a_node(
    tmp_path: Path,
) -> None:
    of_ranks = run_on_ranks(measured, 4, tmp_path / "ranks")
    for found in of_ranks:
        sizes, said = found["measured"]
        assert sizes == {4}
        assert said == of_ranks[0]["measured"][1]
        assert said.startswith("4 of 1, 2, 4 for 1 tokens a micro-batch on measured links; ")
        assert {f"{link}.{name}" for link in LINKS for name in COLLECTIVES} | {"gemm"} <= set(found["timed"])
        assert found["deterministic"] == ({2}, None)
        assert found["unknown"] == ({2}, '2, the largest inside a node: set "sequence_length" to have it chosen')
        assert found["frozen"] == ({2}, None)
        assert found["more"] == 0
        assert found["warned"] == []
        assert found["failed"] == ({2}, None)
        assert found["in time"][-1] == "inter.all_reduce"
        assert {name: found["by others"][name] for name in ("inter.all_to_all", "inter.all_reduce")} == {
            "inter.all_to_all": pytest.approx(SLOWEST),
            "inter.all_reduce": pytest.approx(SLOWEST),
        }
        for name, times in (("all_to_all", 1), ("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)):
            assert found["by others"][f"intra.{name}"] == pytest.approx(times * SLOWEST / 10)
    (warned,) = of_ranks[0]["warned of"]
    assert warned == ("ep_size = 2, the largest inside a node: rank 1 failed while measuring links: OSError: no link")


# ---- without ranks


def choice(block: dict[str, Any], experts: int = NUM_EXPERTS, world: int = 4, **changes: Any) -> AutoEpSize:
    """What a choice depends on, of a small model on nodes of two ranks."""
    model = model_of("olmoe")
    modules, written = list(find_experts(model).values()), FSMoEBlock(**block)
    fitting = fitting_ep_sizes(written, [experts], world)
    topology = topology_of_size(world, 2)
    given = {"ds_config": ds_config(1), "model": model, "cautious": 2, "fitting": fitting, "topology": topology}
    return AutoEpSize(written, modules=modules, device=torch.device("cpu"), dtype=None, **(given | changes))


def test_a_cluster_that_the_config_names_is_taken_also_where_nothing_may_depend_on_timings(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(cluster_as_json(links(SLOW, FAST))))
    for length, size in LENGTHS.items():
        made = choice({"sequence_length": length, "deterministic": True, "trace": {"cluster": str(file)}})
        assert made.choose() == size
        # A second one takes what is noted, and needs nothing of the first.
        assert replace(made, block=FSMoEBlock(), ds_config={}).choose() == size
        assert reason_of(made.modules).startswith(
            f"{size} of 1, 2, 4 for {length} tokens a micro-batch on the links of "
        )
        # A model that has been given back knows nothing of it.
        forget_ep_size(made.modules)
        assert not any(name.startswith("fsmoe") for each in made.modules for name in vars(each))


@pytest.mark.parametrize("length", [1, 16, 64, 100, 128, 200, 512, 4096])
@pytest.mark.parametrize("slopes", [(SLOW, FAST), (SLOW, SLOW), (FAST, FAST)])
def test_it_is_the_planners_choice_among_all_sizes(length: int, slopes: tuple[float, float]) -> None:
    made, cluster = choice({"sequence_length": length}), links(*slopes)
    found, said = made._planned(made._job(), cluster, "these links")
    of_all = choose_ep_size(ep_sizes(made._job(), cluster), made.cautious)
    assert found == of_all.best.ep
    assert said.endswith(f"; {of_all.runner_up.ep} is predicted to take {of_all.runner_up_costs:.2f}x")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"train_micro_batch_size_per_gpu": 2}, (2, 1)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, (2, 3)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 3}, (2, 3)),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}, (2, 3)),
        ({"train_batch_size": 24}, (6, 1)),
        ({"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}, (None, 1)),
        ({}, (None, 1)),
    ],
)
def test_the_samples_of_a_micro_batch_are_those_of_deepspeeds_config(
    written: dict[str, Any], expected: tuple[int | None, int]
) -> None:
    assert auto_ep_size._batch(written, 4) == expected


def test_what_a_choice_is_made_from_is_the_model_and_the_config() -> None:
    config = ds_config(2) | {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}
    made = choice({"sequence_length": 7}, ds_config=config)
    job = made._job()
    assert {(each.B, each.L, each.M, each.H, each.E, each.K, each.ffn, each.heads) for each in job.shapes} == {
        (3, 7, 32, 24, NUM_EXPERTS, 2, "mixtral", 4)
    }
    assert (job.world, job.ranks_per_node, job.zero, job.micro_batches) == (4, 2, 2, 5)
    of_experts = sum(3 * each.M * each.H * each.E for each in job.shapes)
    assert job.num_dense + of_experts == sum(each.numel() for each in made.model.parameters())


def test_a_size_that_does_not_fit_into_memory_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    made, cluster = choice({"sequence_length": 4096}), links(SLOW, FAST)
    job = made._job()
    found = {g.ep: states_bytes(job, g, 0.0) for g in job.layouts()}
    assert found[1] > found[2] > found[4]
    most = SimpleNamespace(total_memory=(found[1] + found[2]) / 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: most)
    assert made._planned(job, cluster, "links")[0] == 1
    on_gpu = replace(made, device=torch.device("cuda"))
    assert on_gpu._planned(job, cluster, "links")[0] == 2
    most.total_memory = 1.0
    assert on_gpu._planned(job, cluster, "links") == (
        4,
        "4 of 1, 2, 4 for 4096 tokens a micro-batch on links; no size is predicted to fit into memory",
    )
    # What the host keeps is in no memory of the device.
    away = ds_config(1)
    away["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    assert replace(on_gpu, ds_config=away)._planned(job, cluster, "links")[0] == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"topology": Topology((0, 0, 0, 1))}, None),
        ({"topology": Topology((0, 1, 0, 1))}, None),
        ({"ds_config": ds_config(1) | {"use_data_before_expert_parallelism": True}}, None),
        ({"fitting": [1]}, None),
        ({"ds_config": {}}, '2, the largest inside a node: set "train_micro_batch_size_per_gpu" to have it chosen'),
    ],
)
def test_what_the_planner_does_not_know_leaves_the_largest_size_in_a_node(
    changes: dict[str, Any], sentence: str | None
) -> None:
    made = choice({"sequence_length": 4096}, **changes)
    assert (made.choose(), reason_of(made.modules) or None) == (2, sentence)


def test_a_configuration_without_the_choices_of_a_token_and_a_size_out_of_bounds_are_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = choice({"sequence_length": 4096})
    made.model.config = SimpleNamespace()
    assert made.choose() == 2
    assert "the configuration of OlmoeForCausalLM has none of num_experts_per_tok, " in caplog.text
    assert choice({"sequence_length": 10**15}).choose() == 2
    assert "L = 1000000000000000: must be at most" in caplog.text
