# SPDX-License-Identifier: Apache-2.0
"""Expert packing chooses the ep_size of a Hugging Face model on the ranks of a job, here by pretended times."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from ds_fsmoe.config.reading import read_block
from ds_fsmoe.engine.shard_experts import packed_ep_size, type_of_run
from ds_fsmoe.measuring import packing_times
from ds_fsmoe.measuring.packing_times import ExpertSizes, pack_by_times
from ds_fsmoe.measuring.stopwatch import Stopwatch
from tests.hf_families import NUM_EXPERTS, batch, loss_of, model_of
from tests.logged import Said
from tests.ranks import run_on_ranks
from tests.test_hugging_face import ds_config, engine_of

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
        if works:
            for size in sizes:
                prepare(size)()
        of_what = alltoall_ms if what.startswith("an all-to-all") else experts_ms
        # A line through the origin, so that a micro-op of the largest size takes as long as asked for.
        ranks = int(re.findall(r"\d+", what)[0])
        return [of_what[ranks] * size / sizes[-1] for size in sizes]

    own = Stopwatch.times_ms
    Stopwatch.times_ms = times_ms  # type: ignore[method-assign]
    try:
        yield timed
    finally:
        Stopwatch.times_ms = own  # type: ignore[method-assign]


def packed(rank: int, world_size: int, stage: int) -> dict[str, Any]:
    """An engine that packs, ranks having measured otherwise; its layout, its training, and what it says."""
    from deepspeed.utils import groups as stock_groups

    said = Said(logging.INFO)
    logging.getLogger("ds_fsmoe").addHandler(said)
    # The first rank has 2 < 4 and then 2 >= 1; by the others' times nothing would be packed.
    alltoall_ms, experts_ms = {4: 4.0, 2: 1.0}, {4: 2.0, 2: 2.0, 1: 2.0}
    if rank:
        alltoall_ms = dict.fromkeys(alltoall_ms, 0.5)
    with pretending(alltoall_ms, experts_ms) as timed:
        engine = engine_of(model_of("olmoe"), ds_config(stage, placement={"policy": "lina"}))
    losses = []
    for step in range(3):
        loss = loss_of(engine, batch(step, world_size)[rank : rank + 1])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    layers = engine.fsmoe.inner_layers.values()
    found = {
        "ep": {each.ep_size for each in layers},
        "local": {each.num_local_experts for each in layers},
        "timed": timed,
        "said": [each for each in said.lines if each.startswith("expert packing")],
        "losses": losses,
        "groups": sorted(stock_groups._get_expert_parallel_group_dict()),
    }
    engine.destroy()
    return found


def by_hand(rank: int, world_size: int, stage: int) -> list[float]:
    engine = engine_of(model_of("olmoe"), ds_config(stage, ep_size=2))
    losses = []
    for step in range(3):
        loss = loss_of(engine, batch(step, world_size)[rank : rank + 1])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def test_the_first_rank_decides_and_training_is_that_of_this_ep_size(tmp_path: Path) -> None:
    of_ranks = run_on_ranks(packed, 4, tmp_path / "packed", 1)
    wanted = run_on_ranks(by_hand, 4, tmp_path / "by hand", 1)
    for found, losses in zip(of_ranks, wanted, strict=True):
        assert found["ep"] == {2}
        assert found["local"] == {NUM_EXPERTS // 2}
        assert found["timed"] == [
            *("experts of 4 ranks", "an all-to-all of 4 ranks", "experts of 2 ranks", "an all-to-all of 2 ranks")
        ]
        assert found["losses"] == losses
        # What was measured among other ranks leaves DeepSpeed no groups.
        assert found["groups"] == ["ep_size_2"]
    (said,) = of_ranks[0]["said"]
    head, *table = said.splitlines()
    assert head == (
        "expert packing (lina): ep_size = 2, 2 experts of a layer on each rank; "
        'write "ep_size": 2 to keep it in later runs'
    )
    # Two layers, whose micro-ops are added up; the second row is as long as the all-to-all, and ends it.
    assert [line.split() for line in table[1:]] == [["1", "4", *shown(2, 4)], ["2", "2", *shown(2, 1)]]


def shown(experts_ms: float, alltoall_ms: float) -> list[str]:
    """What the table says: of both layers, as a micro-op of 30 MB would take."""
    # olmoe's rows here are of 32 elements of fp32; on CPUs a megabyte is timed.
    rows, timed = 30_000_000 // 128, (1 << 20) // 128
    return [f"{2 * each * rows / timed:.3f}" for each in (experts_ms, alltoall_ms)]


def made_and_converted(rank: int, world_size: int) -> dict[str, Any]:
    """A model that is made with its own experts only, and then gets its engine."""
    from transformers import AutoModelForCausalLM

    import ds_fsmoe
    from tests.hf_families import config_of

    config = ds_config(1, placement={"policy": "lina"})
    torch.manual_seed(3)
    with pretending({4: 4.0, 2: 1.0}, {4: 2.0, 2: 2.0, 1: 2.0}) as timed:
        with ds_fsmoe.own_experts(config):
            model = AutoModelForCausalLM.from_config(config_of("olmoe"))
        count = len(timed)
        engine = engine_of(model, config)
    loss = loss_of(engine, batch(0, world_size)[rank : rank + 1])
    engine.backward(loss)
    engine.step()
    found = {
        "ep": {each.ep_size for each in engine.fsmoe.inner_layers.values()},
        "first": count,
        "all": len(timed),
        "loss": loss.item(),
    }
    engine.destroy()
    return found


@pytest.mark.long
def test_what_was_chosen_when_a_model_was_made_is_not_chosen_again(tmp_path: Path) -> None:
    for found in run_on_ranks(made_and_converted, 4, tmp_path):
        assert found["ep"] == {2}
        assert found["first"] == found["all"] == 4
        assert found["loss"] > 0


@contextmanager
def told() -> Iterator[list[ExpertSizes]]:
    """Yields:
    The kinds of experts that are timed.
    """
    from ds_fsmoe.engine import shard_experts as packed_experts

    own, kinds = packed_experts.pack_by_times, []

    def noting(watch: Any, layers: Any, *args: Any) -> Any:
        kinds.extend(layers)
        return own(watch, layers, *args)

    packed_experts.pack_by_times = noting
    try:
        yield kinds
    finally:
        packed_experts.pack_by_times = own


def whole_on_each_rank(rank: int, world_size: int) -> dict[str, Any]:
    """A model in fp32 that trains in bf16, made with its own experts only, which are all, and one made before."""
    from transformers import AutoModelForCausalLM

    import ds_fsmoe
    from tests.hf_families import config_of

    config = ds_config(1, placement={"policy": "lina"}) | {"bf16": {"enabled": True}}
    found: dict[str, Any] = {}
    with pretending({2: 4.0}, {2: 1.0, 1: 1.0}) as timed, told() as kinds:
        with ds_fsmoe.own_experts(config):
            model = AutoModelForCausalLM.from_config(config_of("olmoe"))
        found["first"] = len(timed)
        engine = engine_of(model, config)
        found["then"] = len(timed)
        found["ep"] = [each.ep_size for each in engine.fsmoe.inner_layers.values()]
        engine.destroy()
        model = model_of("olmoe")
        found["made in"] = {each.dtype for each in model.parameters()}
        engine_of(model, config).destroy()
        found["all"] = len(timed)
    found["kinds"] = [(each.dtype, each.is_grouped) for each in kinds]
    return found


@pytest.mark.long
def test_experts_are_timed_once_and_in_the_type_in_which_they_train(tmp_path: Path) -> None:
    for found in run_on_ranks(whole_on_each_rank, 2, tmp_path):
        assert found["ep"] == [1, 1]
        assert (found["first"], found["then"], found["all"]) == (3, 3, 6)
        assert found["made in"] == {torch.float32}
        assert found["kinds"] == [(torch.bfloat16, True)] * 2


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"bf16": {"enabled": True}}, torch.bfloat16),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": True}}, torch.float16),
        ({"bf16": {"enabled": "auto"}}, None),
        ({"torch_autocast": {"enabled": True, "dtype": "torch.float16"}}, torch.float16),
        ({"torch_autocast": {"enabled": True}}, torch.bfloat16),
        ({"torch_autocast": {"enabled": False, "dtype": "float16"}}, None),
    ],
)
def test_the_type_of_a_run_is_that_of_its_config(config: dict[str, Any], expected: torch.dtype | None) -> None:
    assert type_of_run(config, "cpu") == expected


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("sharing", [1, 2])
def test_experts_are_timed_by_the_products_with_which_they_train(has_gate: bool, sharing: int) -> None:
    cpu = torch.device("cpu")
    for is_grouped in (True, False):
        kind = replace(SIZES, num_experts=6, has_gate=has_gate, is_grouped=is_grouped)
        run = packing_times._experts(kind, 2, sharing, cpu)(7)
        with Products() as products:
            run()
        rows, hidden = 7 * sharing, 24 // sharing
        inside = hidden * (1 + has_gate)
        if is_grouped:
            assert [each[0] for each in products.found] == ["_grouped_mm"] * 2
            assert [each[1] for each in products.found] == [(rows, inside), (rows, 16)]
        else:
            # Three experts on each of two ranks, of two or three rows.
            assert [each[0] for each in products.found] == ["mm"] * 6
            expected = [(len(each), n) for n in (inside, 16) for each in part(range(rows), 3)]
            assert [each[1] for each in products.found] == expected


def part(values: Sequence[int], count: int) -> list[Sequence[int]]:
    """In parts as equal as can be."""
    return [values[len(values) * at // count : len(values) * (at + 1) // count] for at in range(count)]


class Products(TorchDispatchMode):
    """Notes each product of matrices and the shape of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "_grouped_mm"):
            self.found.append((name, tuple(result.shape)))
        return result


def timed_and_chosen(rank: int, world_size: int) -> tuple[list[int], int, list[float]]:
    """The packing by what is really measured here, whatever that is."""
    from ds_fsmoe.distributed.topology import layout

    found = pack_by_times(
        Stopwatch(torch.device("cpu")), {SIZES: 2}, {each: layout(world_size, each) for each in (1, 2)}, 1 << 16
    )
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
    from ds_fsmoe.config.reading import ConfigError

    said = []
    experts_ms = {2: 1.0, 1: 1.0}
    with pretending({2: 4.0}, experts_ms, works=False), pytest.raises(ConfigError) as caught:
        engine_of(model_of("olmoe"), ds_config(0, placement={"policy": "lina"}, deterministic=True))
    said.append(str(caught.value))
    engine = engine_of(model_of("olmoe"), ds_config(0, ep_size=2))
    loss = loss_of(engine, batch(0, world_size)[rank : rank + 1])
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(folder)
    engine.destroy()
    with pretending({2: 4.0}, experts_ms, works=False):
        engine = engine_of(model_of("olmoe"), ds_config(0, placement={"policy": "lina"}))
    with pytest.raises(CheckpointError) as error:
        engine.load_checkpoint(folder)
    said.append(str(error.value))
    engine.load_checkpoint(folder, load_optimizer_states=False)
    engine.destroy()
    with pretending({2: 0.5}, experts_ms, works=False):
        engine = engine_of(model_of("olmoe"), ds_config(0, placement={"policy": "lina"}))
    engine.load_checkpoint(folder)
    said.append(str({each.ep_size for each in engine.fsmoe.inner_layers.values()}))
    engine.destroy()
    return said


@pytest.mark.long
def test_a_choice_that_must_be_the_same_is_to_be_written_down(tmp_path: Path) -> None:
    for deterministic, resumed, same in run_on_ranks(refused, 2, tmp_path / "ranks", str(tmp_path / "saved")):
        assert 'fsmoe.placement.policy = "lina" and fsmoe.deterministic = true cannot both be on' in deterministic
        assert 'It would choose ep_size = 1: write "ep_size": 1 and remove the policy' in deterministic
        assert "was saved with ep_size = 2" in resumed
        assert 'has chosen 1 now: set "ep_size": 2 in the fsmoe block and remove the policy' in resumed
        assert same == "{2}"


def test_stock_layers_have_the_ep_size_of_the_script() -> None:
    from deepspeed.moe.layer import MoE

    from ds_fsmoe.config.reading import ConfigError

    model = nn.Sequential(MoE(16, nn.Linear(16, 16), num_experts=4))
    with pytest.raises(ConfigError, match=r'placement.policy = "lina" chooses .* and 0 is a deepspeed.moe.layer.MoE'):
        engine_of(model, ds_config(0, placement={"policy": "lina"}))


def test_one_rank_has_nothing_to_choose(tmp_path: Path) -> None:
    assert run_on_ranks(alone, 1, tmp_path) == [({1}, [])]


def test_where_the_largest_number_of_ranks_cannot_be_halved_it_stays() -> None:
    block = read_block({"fsmoe": {"enabled": True, "placement": {"policy": "lina"}}})
    assert packed_ep_size(block, [], [1, 3], torch.device("cpu"), False) == 3


def alone(rank: int, world_size: int) -> tuple[set[int], list[str]]:
    with pretending({}, {}) as timed:
        engine = engine_of(model_of("olmoe"), ds_config(0, placement={"policy": "lina"}))
    found = {each.ep_size for each in engine.fsmoe.inner_layers.values()}
    engine.destroy()
    return found, timed
