# SPDX-License-Identifier: Apache-2.0
"""Where ``ep_size`` is "auto" and the tokens are known, the planner's choice for the links is taken, once and by all
ranks; where something is not known, it is the largest size inside a node.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("transformers")

from ds_fsmoe.config.accelerate import leave_block_alone, watch_block_again
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.distributed.agreement import DisagreementError
from ds_fsmoe.distributed.fail_together import MeasuringError, raise_on_all_ranks
from ds_fsmoe.distributed.topology import Topology, topology_of_size
from ds_fsmoe.engine import auto_ep_size, own_experts
from ds_fsmoe.engine.auto_ep_size import AutoEpSize, choice_of, forget_ep_size, watched_lengths
from ds_fsmoe.measuring import cluster_profile
from ds_fsmoe.measuring.cache import MeasurementCache, Measurements, cluster_fingerprint, write_measurements
from ds_fsmoe.measuring.stopwatch import Stopwatch, Times
from ds_fsmoe.planning.cluster import cluster_as_json
from ds_fsmoe.planning.cluster_schema import COLLECTIVES, LINKS
from ds_fsmoe.planning.decide.ep_size import EpSize, choose_ep_size, ep_sizes, states_bytes
from ds_fsmoe.planning.job.measured import Slowdowns
from ds_fsmoe.planning.schedule import Lane
from ds_fsmoe.planning.timeline import Contention
from ds_fsmoe.tuning import predicted_ep_size
from ds_fsmoe.tuning.predicted_ep_size import learned_of
from tests.ep_size_cases import FAST, SLOW, choice, chosen, links
from tests.hf_families import NUM_EXPERTS, config_of, losses_of_steps, model_of
from tests.logged import heard
from tests.ranks import run_on_ranks
from tests.sgd_engines import ds_config, engine_of


def on_links(folder: Path) -> dict[str, Any]:
    """A block that names a cluster with slow links between nodes."""
    (folder / "mine.json").write_text(json.dumps(cluster_as_json(links(SLOW, FAST))))
    return {"trace": {"cluster": str(folder / "mine.json")}}


def config_with(length: int | str, **block: Any) -> dict[str, Any]:
    return ds_config(1, sequence_length=length, topology={"ranks_per_node": 2}, **block)


# ---- on ranks

LENGTHS = {1: 4, 128: 2, 4096: 1}
"""Tokens of a sample -> the ranks for experts, with the slow links between nodes: few rows are less than gradients."""


def made(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Sizes and losses of models that are made in each way, by a cache with made-up links, and what is said."""
    from transformers import AutoModelForCausalLM

    import ds_fsmoe

    fingerprint = cluster_fingerprint(torch.device("cpu"), topology_of_size(world_size, 2))
    if rank == 0:
        model_of("olmoe").save_pretrained(folder)
        file = MeasurementCache(Path(folder)).file_of(fingerprint)
        write_measurements(file, fingerprint, Measurements(), links(SLOW, FAST))
    torch.distributed.barrier()
    cache = {"autotune": {"cache_dir": folder}}

    def run(model: Any, config: dict[str, Any]) -> tuple[set[int], str, list[float]]:
        engine = engine_of(model, config)
        ep_sizes = {each.ep_size for each in engine.fsmoe.inner_layers.values()}
        losses, said = losses_of_steps(engine, rank, world_size, range(1)), engine.fsmoe.chosen().get("ep_size", "")
        engine.destroy()
        return ep_sizes, said, losses

    found: dict[str, Any] = {}
    for way, length in (("files", 1), ("config", 128), ("initialize", 4096), ("files", 4096), ("initialize", 1)):
        config = config_with(length, **cache)
        with ds_fsmoe.own_experts(config) if way != "initialize" else nullcontext():
            if way == "files":
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            else:
                model = AutoModelForCausalLM.from_config(config_of("olmoe")) if way == "config" else model_of("olmoe")
        local = len(model.model.layers[0].mlp.experts.down_proj)
        assert local == NUM_EXPERTS // (1 if way == "initialize" else LENGTHS[length])
        found[way, length] = run(model, config)
    return found | {size: run(model_of("olmoe"), config_with(1, ep_size=size))[2] for size in (1, 4)}


@pytest.mark.long
def test_a_model_has_the_planners_size_in_whatever_way_it_is_made_and_trains_as_with_this_size(tmp_path: Path) -> None:
    of_ranks = run_on_ranks(made, 4, tmp_path / "ranks", str(tmp_path / "model"))
    for found in of_ranks:
        for (way, length), (sizes, said, loss) in ((key, found[key]) for key in found if isinstance(key, tuple)):
            size = LENGTHS[length]
            assert (way, length, sizes) == (way, length, {size})
            assert said == of_ranks[0][way, length][1]
            assert said.startswith(f"{size} of 1, 2, 4 for {length} tokens a micro-batch on links measured before; ")
            assert way == "config" or loss == found[size]


SLOWEST = 1e-3 * 100.0 / (2 * 4)
"""The pretended ms of a byte between nodes: a size of 1 is one number for each of two ranks."""


SLOWED = {(Lane.COMPUTE, Lane.INTER): 1.5, (Lane.INTER, Lane.COMPUTE): 1.25}


@contextmanager
def pretending(num_in_time: int = 99) -> Iterator[list[str]]:
    """Let operations take so long by their sizes, alone and side by side; the work itself is done once per size, and
    the clock is not asked.

    Yields:
        What was timed, in its order.
    """
    timed: list[str] = []

    def times(self: Any, what: str, sizes: Any, prepare: Any, group: Any = None) -> Times:
        timed.append(what)
        for size in sizes:
            prepare(size)()
        slope = 1.0 if what.startswith("gemm") else 100.0 if "inter" in what else 10.0
        found_ms = [1e-3 * slope * size for size in sizes]
        return Times(found_ms, [], found_ms)

    def slowdowns(watch: Any, lanes: Any, work: Any, what: str) -> Slowdowns:
        for prepare in work.values():
            prepare()()
        return Slowdowns({pair: factor for pair, factor in SLOWED.items() if set(pair) <= set(work)})

    is_over = patch.object(Stopwatch, "any_rank", lambda *_: len(timed) >= num_in_time)
    with patch.object(Stopwatch, "times", times), patch.object(cluster_profile, "slowdowns", slowdowns), is_over:
        yield timed


def measured(rank: int, world_size: int) -> dict[str, Any]:
    """Sizes by links that are measured at that moment, and where something is not known."""
    from transformers import AutoModelForCausalLM

    import ds_fsmoe

    said = heard("WARNING")
    found: dict[str, Any] = {}

    def sizes_of(config: dict[str, Any]) -> tuple[set[int], str | None]:
        engine = engine_of(model_of("olmoe"), config)
        sizes = {each.ep_size for each in engine.fsmoe.inner_layers.values()}
        words = engine.fsmoe.chosen().get("ep_size")
        engine.destroy()
        return sizes, words

    def sentences() -> list[str]:
        return [each for each in said.lines if "ep_size" in each]

    with pretending() as timed:
        found["measured"] = sizes_of(config_with(1))
        found["timed"] = list(timed)
        # Another model of the job has the same size, by the same links.
        found["second"] = sizes_of(config_with(1))
        found["unknown"] = sizes_of(config_with("auto"))
        found["more"] = len(timed) - len(found["timed"])
        found["learns"] = *learned(rank, world_size), sentences()
    few, own = topology_of_size(world_size, 2), predicted_ep_size.measure_links
    with pretending(num_in_time=8) as timed:
        costs, found["contention"] = own(Stopwatch(torch.device("cpu")), few, torch.float32)
        found["in time"], found["by others"] = timed, {name: each.cost.beta_ms for name, each in costs.items()}
    with pretending(num_in_time=3), pytest.raises(MeasuringError, match="could not be measured within"):
        own(Stopwatch(torch.device("cpu")), few, torch.float32)
    predicted_ep_size._measured.clear()
    with patch.object(predicted_ep_size, "measure_links", fails_on_one_rank):
        found["failed"] = sizes_of(config_with(1))
    with pytest.raises(DisagreementError) as told, ds_fsmoe.own_experts(config_with(1, deterministic=rank == 1)):
        AutoModelForCausalLM.from_config(config_of("olmoe"))
    found["told"] = str(told.value)
    found["warned of"] = sentences()
    return found


def learned(rank: int, world_size: int) -> tuple[list[int], bool]:
    """Sizes of a start that knows no batches, of the next and by hand, and whether the last two train alike."""
    losses, sizes = [], []
    for block in ({}, {}, {"ep_size": 4}):
        engine = engine_of(model_of("olmoe"), config_with("auto", autotune=False, **block))
        sizes.append(next(iter(engine.fsmoe.inner_layers.values())).ep_size)
        losses.append(losses_of_steps(engine, rank, world_size, range(10)))
        engine.destroy()
    return sizes, losses[1] == losses[2]


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
        failed = "2, the largest inside a node: rank 1 failed while measuring links: OSError: no link"
        assert found["failed"] == ({2}, failed)
        assert "fsmoe.deterministic: ranks 0, 2-3: 'False'; rank 1: 'True'" in found["told"]
        assert found["unknown"] == ({2}, '2, the largest inside a node: set "sequence_length" to have it chosen')
        assert (found["second"], found["more"]) == (found["measured"], 0)
        sizes, is_as_by_hand, lines = found["learns"]
        assert (sizes, is_as_by_hand) == ([2, 4, 4], True)
        assert [each.partition(" (")[0] for each in lines] == [
            "ep_size: micro-batches have 16 tokens on average: the next start will use ep_size = 4"
        ] * (found is of_ranks[0])
        assert found["in time"][-1] == "inter.all_reduce"
        assert found["contention"] == Contention(compute=0.5, traffic=0.25)
        wanted = {"inter.all_to_all": 1.0, "inter.all_reduce": 1.0, "intra.all_to_all": 0.1, "intra.all_reduce": 0.2}
        for name, times in (wanted | {"intra.all_gather": 0.1, "intra.reduce_scatter": 0.1}).items():
            assert found["by others"][name] == pytest.approx(times * SLOWEST)
    *_, warned = of_ranks[0]["warned of"]
    assert warned == ("ep_size = 2, the largest inside a node: rank 1 failed while measuring links: OSError: no link")


# ---- without ranks


def test_a_cluster_that_the_config_names_is_taken_also_where_nothing_may_depend_on_timings(tmp_path: Path) -> None:
    # The cache has links that are alike.
    fingerprint = cluster_fingerprint(torch.device("cpu"), topology_of_size(4, 2))
    file = MeasurementCache(tmp_path).file_of(fingerprint)
    write_measurements(file, fingerprint, Measurements(), links(FAST, FAST))
    for length, size in LENGTHS.items():
        named = {"sequence_length": length} | on_links(tmp_path)
        made, cached = choice(named | {"deterministic": True}), named | {"autotune": {"cache_dir": str(tmp_path)}}
        assert made.choose() == size
        # A second one takes what is noted, and needs nothing of the first.
        assert replace(made, block=FSMoEBlock(), ds_config={}).choose() == size
        wanted = f"{size} of 1, 2, 4 for {length} tokens a micro-batch on the links of mine"
        assert choice_of(made.modules).reason.startswith(wanted)
        assert chosen(cached)[1].startswith(wanted)
        # A model that has been given back knows nothing of it.
        forget_ep_size(made.modules)
        assert not any(name.startswith("fsmoe") for each in made.modules for name in vars(each))


def test_it_is_the_planners_choice_among_all_sizes() -> None:
    job, of_links = choice({}), itertools.cycle([(SLOW, FAST), (SLOW, SLOW), (FAST, FAST)])
    for length, slopes in zip([1, 128, 512, 4096], of_links, strict=False):
        made, cluster = job._predictor(length), links(*slopes)
        found, of_all = (choose_ep_size(each, 2) for each in (made.planned(cluster), ep_sizes(made.job, cluster)))
        assert learned_of(found, length) == learned_of(of_all, length)


def test_without_overlap_it_is_that_of_deepspeeds_order_and_in_one_chunk_gradients_alone_overlap() -> None:
    def steps_ms(block: dict[str, Any]) -> list[float]:
        return [each.step_ms for each in choice(block)._predictor(512).planned(links(SLOW, FAST), usual=4)]

    in_deepspeeds_order = steps_ms({"schedule": "deepspeed", "gradient_partition": {"mode": "adaptive"}})
    assert steps_ms({"overlap": False}) == in_deepspeeds_order
    in_one_chunk = steps_ms({"autotune": False})
    at_most_one = {"num_chunks": {"max": 1}, "alltoall": "flat"}  # with which the autotuner still measures all-to-alls
    for block in ({"num_chunks": 1}, at_most_one, {"deterministic": True}):
        assert steps_ms(block) == in_one_chunk
    assert sum(steps_ms({})) < sum(in_one_chunk) < sum(in_deepspeeds_order)
    # A short run of a job starts as the job does.
    assert steps_ms({"record": {"dir": "x", "stop_after": 50}}) == steps_ms({})


def test_it_is_that_of_the_all_to_all_and_the_sums_of_gradients_that_are_asked_for() -> None:
    def planned(block: dict[str, Any], stage: int = 1) -> list[EpSize]:
        config = ds_config(stage) | {"gradient_accumulation_steps": 4}
        return choice(block, ds_config=config)._predictor(512).planned(links(SLOW, FAST), usual=4)

    for name, wanted in (("flat", "flat"), ("2dh", "2dh"), ("node_deduplicated", "node_deduplicated"), ("1dh", "flat")):
        # Inside a node there is one way.
        assert {each.ep: each.alltoall for each in planned({"alltoall": name})} == {1: "flat", 2: "flat", 4: wanted}
    once = {"gradient_partition": {"accumulate": "before_sum"}}
    each_time, at_stage_1 = planned({}, stage=2), planned({}, stage=1)
    assert planned(once, stage=2) == at_stage_1
    by_deepspeed = {"mode": "off"}, {"mode": "off", "accumulate": "before_sum"}  # which knows no such word
    each_time_by_deepspeed, asked_once = (planned({"gradient_partition": each}, stage=2) for each in by_deepspeed)
    assert each_time_by_deepspeed == asked_once
    assert sum(each.step_ms for each in each_time) > 1.1 * sum(each.step_ms for each in at_stage_1)
    behind = planned({"gradient_partition": {"mode": "off"}})
    assert sum(each.step_ms for each in behind) > sum(each.step_ms for each in at_stage_1)


def test_what_a_choice_is_made_from_is_the_model_and_the_config() -> None:
    config = ds_config(2) | {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}
    made = choice({"sequence_length": 7}, ds_config=config)
    job = made._predictor(7).job
    assert {(each.B, each.L, each.M, each.H, each.E, each.K, each.ffn, each.heads) for each in job.shapes} == {
        (3, 7, 32, 24, NUM_EXPERTS, 2, "mixtral", 4)
    }
    assert (job.world, job.ranks_per_node, job.zero, job.micro_batches) == (4, 2, 2, 5)
    of_experts = sum(3 * each.M * each.H * each.E for each in job.shapes)
    assert job.num_dense + of_experts == sum(each.numel() for each in made.model.parameters())
    # The samples of a micro-batch and the micro-batches of a step, as DeepSpeed's config may have them.
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    for *values, expected in (
        (2, None, None, (2, 1)),
        (2, 3, None, (2, 3)),
        (None, 3, 24, (2, 3)),
        (2, None, 24, (2, 3)),
        (None, None, 24, (6, 1)),
        (None, None, None, (None, 1)),
        # What a trainer has not written yet is not known.
        ("auto", "auto", None, (None, None)),
        (2, "auto", None, (2, None)),
        (None, "auto", 24, (None, None)),
        (2, "auto", 24, (2, 3)),
    ):
        written = {name: value for name, value in zip(names, values, strict=True) if value}
        assert auto_ep_size._batch(written, 4) == expected


def test_a_size_that_does_not_fit_into_memory_is_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = {"sequence_length": 4096} | on_links(tmp_path)
    made, own = choice(block), AutoEpSize._predictor
    job = own(made, 4096).job
    found = {g.ep: states_bytes(job, g, 0.0) for g in job.layouts()}
    assert found[1] > found[2] > found[4]
    assert made.choose() == 1
    most = SimpleNamespace(total_memory=(found[1] + found[2]) / 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: most)
    on_gpu = torch.device("cuda")
    monkeypatch.setattr(AutoEpSize, "_predictor", lambda self, length: replace(own(self, length), device=on_gpu))
    assert choice(block).choose() == 2
    # With the largest size in a node a job is as it was; one that needs more has to leave room for activations.
    for times, size in ((1.1, 2), (1.5, 1)):
        most.total_memory = times * found[1]
        assert choice(block).choose() == size
    most.total_memory = 1.0
    said = "4 of 1, 2, 4 for 4096 tokens a micro-batch on the links of mine; no size is predicted to fit into memory"
    assert chosen(block) == (4, said)
    # Of an optimizer that the config does not name, the states are Adam's.
    most.total_memory = (found[1] + found[2]) / 2
    unnamed = {name: value for name, value in ds_config(1).items() if name != "optimizer"}
    assert choice(block, ds_config=unnamed).choose() == 4
    # What the host keeps is in no memory of the device.
    away = ds_config(1)
    away["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    assert choice(block, ds_config=away).choose() == 1


def test_the_next_start_has_no_size_for_which_the_memory_that_the_job_took_leaves_no_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    predictor = replace(choice({})._predictor(4096), device=torch.device("cuda"))
    states = {g.ep: states_bytes(predictor.job, g, 0.0) for g in predictor.job.layouts()}
    memory = SimpleNamespace(total_memory=2 * states[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    best = {}
    for left, optimizer_bytes in itertools.product(("room", "none"), (0.0, None)):
        # Activations come on top of the states, with any size. With None the host has the optimizer's.
        # A tenth of the memory is left for communicators and the context of the device.
        used_bytes = 0.9 * memory.total_memory - (states[1] - states[2]) * {"room": 1.1, "none": 0.9}[left]
        found = replace(predictor, optimizer_bytes=optimizer_bytes).planned(links(SLOW, FAST), 2, used_bytes)
        best[left, optimizer_bytes] = choose_ep_size(found, 2).best.ep
    assert best == {("room", 0.0): 1, ("room", None): 1, ("none", 0.0): 2, ("none", None): 2}
    # A job that holds less than its states, as the host has them, fits all the same.
    memory.total_memory = states[2] / 2
    least = replace(predictor, optimizer_bytes=None).planned(links(SLOW, FAST), 2, memory.total_memory / 2)
    assert 2 in [each.ep for each in least if each.fits]


def test_a_run_that_the_config_ends_learns_nothing_for_the_next_one() -> None:
    """``ds_fsmoe tune`` and ``compare`` start the same script several times, and all of their runs start alike."""
    made = choice({})
    made.choose()
    for block, is_watched in (({}, True), ({"record": {"dir": "x", "stop_after": 150}}, False)):
        running = SimpleNamespace(block=FSMoEBlock(**block), instruments=[])
        found = watched_lengths(made.modules, made.ds_config, 2, "L00", running)
        assert (found is not None) == is_watched == bool(running.instruments)


def test_experts_that_are_frozen_once_they_are_loaded_learn_no_size_and_one_that_was_chosen_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for block, is_said in (({}, False), ({"sequence_length": 4096} | on_links(tmp_path), True)):
        made = choice(block)
        size = made.choose()
        made.modules[0].down_proj.requires_grad_(False)
        running = SimpleNamespace(block=made.block, instruments=[])
        assert watched_lengths(made.modules, made.ds_config, size, "L00", running) is None
        assert running.instruments == []
        assert ("ep_size = 1 was chosen as if all parameters of experts were trained" in caplog.text) == is_said


def test_numbers_that_accelerate_writes_until_the_loader_is_known_are_no_batch() -> None:
    accelerate = pytest.importorskip("accelerate.utils")
    from transformers.integrations import deepspeed as theirs

    leave_block_alone()
    try:
        names = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
        both: dict[str, Any] = dict.fromkeys(names, "auto")
        for written, filled, wanted in (
            ({}, (1, 1), ("auto", 1)),  # without a word on accumulation there is none
            (both, (1, 1), ("auto", "auto")),
            (both | {names[1]: 4}, (1, 4), ("auto", 4)),
            (both | {names[0]: 2}, (2, 1), (2, "auto")),
        ):
            config = ds_config(1) | {"zero_optimization": {"stage": 3}}
            config = {name: value for name, value in config.items() if name not in auto_ep_size._BATCH} | written
            plugin = accelerate.DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=True)
            plugin.set_deepspeed_weakref()
            given = theirs.deepspeed_config()
            assert tuple(given[name] for name in names) == filled  # what zero.Init reads
            assert tuple(own_experts._ds_config(theirs)[name] for name in names) == wanted
    finally:
        theirs.unset_hf_deepspeed_config()
        watch_block_again()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"topology": Topology((0, 0, 0, 1))}, "numbered node by node"),
        ({"topology": Topology((0, 1, 0, 1))}, "numbered node by node"),
        ({"ds_config": ds_config(1) | {"use_data_before_expert_parallelism": True}}, "use_data_before_expert"),
        ({"fitting": [1]}, ""),
        ({"frozen": True}, "none is chosen for frozen experts"),
        ({"has_stages": True}, "none is chosen with pipeline stages"),
        ({"esp_size": 2}, "none is chosen with expert_tensor_parallel_size"),
        ({"deterministic": True}, "if trace.cluster names the links"),
        ({"ds_config": {}}, 'set "train_micro_batch_size_per_gpu" to have it chosen'),
        (
            {"ds_config": ds_config(1) | {"gradient_accumulation_steps": "auto"}},
            'set "gradient_accumulation_steps" to have it chosen',
        ),
    ],
)
def test_what_the_planner_does_not_know_leaves_the_largest_size_in_a_node_and_the_start_table_says_why(
    changes: dict[str, Any], sentence: str
) -> None:
    of_block = ("deterministic", "esp_size")
    block = {"sequence_length": 4096} | {name: changes[name] for name in of_block if name in changes}
    given = {name: value for name, value in changes.items() if name not in ("frozen", *of_block)}
    made = choice(block, **given)
    for each in made.modules:
        each.requires_grad_("frozen" not in changes)
    assert made.choose() == 2
    found = choice_of(made.modules).reason
    assert found.startswith("2, the largest inside a node: ") == bool(sentence)
    assert sentence in found


def test_a_configuration_without_the_choices_of_a_token_and_a_size_out_of_bounds_are_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = choice({"sequence_length": 4096})
    made.model.config = SimpleNamespace()
    assert made.choose() == 2
    assert "the configuration of OlmoeForCausalLM has none of num_experts_per_tok, " in caplog.text
    assert choice({"sequence_length": 10**15}).choose() == 2
    assert "L = 1000000000000000: must be at most" in caplog.text
