# SPDX-License-Identifier: Apache-2.0
"""Expert packing chooses the ep_size of a Hugging Face model on the ranks of a job, here by pretended times."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed.moe.layer import MoE
from torch import nn

pytest.importorskip("transformers")

from ds_fsmoe.config.reading import ConfigError, read_block
from ds_fsmoe.distributed.topology import layout
from ds_fsmoe.engine import shard_experts
from ds_fsmoe.engine.shard_experts import packed_ep_size
from ds_fsmoe.measuring import packing_times
from ds_fsmoe.measuring.packing_times import ExpertSizes, pack_by_times
from ds_fsmoe.measuring.stopwatch import Stopwatch
from tests.call_counts import Operations
from tests.hf_families import NUM_EXPERTS, losses_of_steps, model_of
from tests.logged import heard
from tests.ranks import run_on_ranks
from tests.sgd_engines import ds_config, engine_of

LINA = {"policy": "lina"}
SIZES = ExpertSizes(8, 16, 24, True, torch.float32)


@contextmanager
def pretending(alltoall_ms: dict[int, float], experts_ms: dict[int, float], works: bool = True) -> Iterator[list[str]]:
    """Let micro-ops take so long by the number of ranks, on whatever they are timed; work is done once for each size.

    Yields:
        What was timed, in its order.
    """
    timed: list[str] = []

    def times_ms(self: Any, what: str, sizes: Sequence[int], prepare: Any, group: Any = None) -> list[float]:
        timed.append(what)
        for size in sizes if works else ():
            prepare(size)()
        of_what = alltoall_ms if what.startswith("an all-to-all") else experts_ms
        # A line through the origin, so that a micro-op of the largest size takes as long as asked for.
        ranks = int(re.findall(r"\d+", what)[0])
        return [of_what[ranks] * size / sizes[-1] for size in sizes]

    with patch.object(Stopwatch, "times_ms", times_ms):
        yield timed


def packed(rank: int, world_size: int, stage: int) -> dict[str, Any]:
    """An engine that packs, ranks having measured otherwise: its layout, what it says, and its training beside that of
    one by hand."""
    from deepspeed.utils import groups as stock_groups

    said = heard("INFO")
    # The first rank has 2 < 4 and then 2 >= 1; by the others' times nothing would be packed.
    alltoall_ms, experts_ms = {4: 4.0, 2: 1.0}, {4: 2.0, 2: 2.0, 1: 2.0}
    if rank:
        alltoall_ms = dict.fromkeys(alltoall_ms, 0.5)
    with pretending(alltoall_ms, experts_ms) as timed:
        engine = engine_of(model_of("olmoe"), ds_config(stage, placement=LINA))
    layers = engine.fsmoe.inner_layers.values()
    found = {
        "layout": {(each.ep_size, each.num_local_experts) for each in layers},
        "timed": timed,
        "said": [each for each in said.lines if each.startswith("expert packing")],
        "losses": losses_of_steps(engine, rank, world_size, range(3)),
        "groups": sorted(stock_groups._get_expert_parallel_group_dict()),
    }
    engine.destroy()
    engine = engine_of(model_of("olmoe"), ds_config(stage, ep_size=2))
    found["by hand"] = losses_of_steps(engine, rank, world_size, range(3))
    engine.destroy()
    return found


def test_the_first_rank_decides_and_training_is_that_of_this_ep_size(tmp_path: Path) -> None:
    of_ranks = run_on_ranks(packed, 4, tmp_path, 1)
    for found in of_ranks:
        assert found["layout"] == {(2, NUM_EXPERTS // 2)}
        assert found["timed"] == [
            *("experts of 4 ranks", "an all-to-all of 4 ranks", "experts of 2 ranks", "an all-to-all of 2 ranks")
        ]
        assert found["losses"] == found["by hand"]
        # What was measured among other ranks leaves DeepSpeed no groups.
        assert found["groups"] == ["ep_size_2"]
    (said,) = of_ranks[0]["said"]
    head, *table = said.splitlines()
    assert head == (
        "expert packing (lina): ep_size = 2, 2 experts of a layer on each rank; "
        'write "ep_size": 2 to keep it in later runs'
    )
    # Two layers, whose micro-ops of 30 MB are added up, olmoe's rows being of 32 elements of fp32; on CPUs a megabyte
    # is timed. The second row is as long as the all-to-all, and ends it.
    times = (2 * 30_000_000 // 128) / ((1 << 20) // 128)
    wanted = [["1", "4", 2, 4], ["2", "2", 2, 1]]
    shown = [[*line, f"{experts * times:.3f}", f"{alltoall * times:.3f}"] for *line, experts, alltoall in wanted]
    assert [line.split() for line in table[1:]] == shown


def made_and_converted(rank: int, world_size: int) -> list[dict[str, Any]]:
    """A model in fp32 that trains in bf16 and is made with its own experts only, spread or all, and one made before."""
    from transformers import AutoModelForCausalLM

    import ds_fsmoe
    from tests.hf_families import config_of

    config = ds_config(1, placement=LINA) | {"bf16": {"enabled": True}}
    kinds: list[ExpertSizes] = []

    def noting(watch: Any, layers: Any, *args: Any) -> Any:
        kinds.extend(layers)
        return pack_by_times(watch, layers, *args)

    found = []
    for alltoall_ms, is_made_before in ((0.5, False), (4.0, False), (4.0, True)):
        kinds.clear()
        with (
            pretending({2: alltoall_ms}, {2: 1.0, 1: 1.0}) as timed,
            patch.object(shard_experts, "pack_by_times", noting),
        ):
            with nullcontext() if is_made_before else ds_fsmoe.own_experts(config):
                model = AutoModelForCausalLM.from_config(config_of("olmoe"))
            made_in = {each.dtype for each in model.parameters()}
            first = len(timed)
            engine = engine_of(model, config)
        ep = {each.ep_size for each in engine.fsmoe.inner_layers.values()}
        losses = losses_of_steps(engine, rank, world_size, range(1))
        engine.destroy()
        of_kinds = [(each.dtype, each.is_grouped) for each in kinds]
        found.append({"ep": ep, "timed": (first, len(timed)), "kinds": of_kinds, "made in": made_in, "losses": losses})
    return found


@pytest.mark.long
def test_experts_are_timed_once_when_a_model_is_made_and_in_the_type_in_which_they_train(tmp_path: Path) -> None:
    for found in run_on_ranks(made_and_converted, 2, tmp_path):
        assert [each["ep"] for each in found] == [{2}, {1}, {1}]
        assert [each["timed"] for each in found] == [(2, 2), (3, 3), (0, 3)]
        for each in found:
            assert each["kinds"] == [(torch.bfloat16, True)]
            assert each["made in"] == {torch.float32}
            assert each["losses"][0] > 0


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("sharing", [1, 2])
def test_experts_are_timed_by_the_products_with_which_they_train(has_gate: bool, sharing: int) -> None:
    rows, hidden = 7 * sharing, 24 // sharing
    inside = hidden * (1 + has_gate)
    # Grouped, or three experts on each of two ranks, of two or three rows.
    shares = [rows * (at + 1) // 3 - rows * at // 3 for at in range(3)]
    one_by_one = [("mm", (share, width)) for width in (inside, 16) for share in shares]
    grouped = [("_grouped_mm", (rows, width)) for width in (inside, 16)]
    for is_grouped, expected in ((True, grouped), (False, one_by_one)):
        kind = replace(SIZES, num_experts=6, has_gate=has_gate, is_grouped=is_grouped)
        run = packing_times._experts(kind, 2, sharing, torch.device("cpu"))(7)
        with Operations("mm", "_grouped_mm") as products:
            run()
        assert products.found == expected


def timed_and_chosen(rank: int, world_size: int) -> tuple[list[int], int, list[float]]:
    """The packing by what is really measured here, whatever that is."""
    layouts = {each: layout(world_size, each) for each in (1, 2)}
    found = pack_by_times(Stopwatch(torch.device("cpu")), {SIZES: 2}, layouts, 1 << 16)
    times_ms = [each for row in found.rows for each in (row.experts_ms, row.alltoall_ms)]
    return [row.ep_size for row in found.rows], found.ep_size, times_ms


def test_ranks_that_really_measure_choose_alike(tmp_path: Path) -> None:
    first, second = run_on_ranks(timed_and_chosen, 2, tmp_path)
    assert first == second
    assert first[0] in ([2], [2, 1])
    assert first[1] == first[0][-1]
    assert all(each >= 0 for each in first[2])


def refused(rank: int, world_size: int, folder: str) -> list[str]:
    """What is said where the choice must not follow from a clock, and where a checkpoint is of another."""
    from ds_fsmoe.checkpoint_files.tags import CheckpointError

    def choosing(alltoall_ms: float, **options: bool) -> Any:
        with pretending({2: alltoall_ms}, {2: 1.0, 1: 1.0}, works=False):
            return engine_of(model_of("olmoe"), ds_config(0, placement=LINA, **options))

    with pytest.raises(ConfigError) as caught:
        choosing(4.0, deterministic=True)
    engine = engine_of(model_of("olmoe"), ds_config(0, ep_size=2))
    losses_of_steps(engine, rank, world_size, range(1))
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = choosing(4.0)
    with pytest.raises(CheckpointError) as error:
        engine.load_checkpoint(folder)
    engine.load_checkpoint(folder, load_optimizer_states=False)
    engine.destroy()
    engine = choosing(0.5)
    engine.load_checkpoint(folder)
    found = [str(caught.value), str(error.value), str({each.ep_size for each in engine.fsmoe.inner_layers.values()})]
    engine.destroy()
    return found


@pytest.mark.long
def test_a_choice_that_must_be_the_same_is_to_be_written_down(tmp_path: Path) -> None:
    for deterministic, resumed, same in run_on_ranks(refused, 2, tmp_path / "ranks", str(tmp_path / "saved")):
        assert 'fsmoe.placement.policy = "lina" and fsmoe.deterministic = true cannot both be on' in deterministic
        assert 'It would choose ep_size = 1: write "ep_size": 1 and remove the policy' in deterministic
        assert "was saved with ep_size = 2" in resumed
        assert 'has chosen 1 now: set "ep_size": 2 in the fsmoe block and remove the policy' in resumed
        assert same == "{2}"


def test_stock_layers_have_the_ep_size_of_the_script() -> None:
    model = nn.Sequential(MoE(16, nn.Linear(16, 16), num_experts=4))
    with pytest.raises(ConfigError, match=r'placement.policy = "lina" chooses .* and 0 is a deepspeed.moe.layer.MoE'):
        engine_of(model, ds_config(0, placement=LINA))


@pytest.mark.parametrize(("sizes", "largest"), [([1, 3], 3), ([1], 1)])
def test_where_the_largest_number_of_ranks_cannot_be_halved_it_stays(sizes: list[int], largest: int) -> None:
    block = read_block({"fsmoe": {"enabled": True, "placement": LINA}})
    assert packed_ep_size(block, [], sizes, torch.device("cpu"), False) == largest
