# SPDX-License-Identifier: Apache-2.0
"""What ``ds_fsmoe plan`` says that a rank needs of memory is what its tensors take: at most 5% less, and 10% more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from ds_fsmoe.offline.models.hf_config import read_hf_config
from ds_fsmoe.offline.models.memory import Memory, memory_of
from ds_fsmoe.offline.models.memory_activations import block_keeps
from ds_fsmoe.offline.models.training import Training
from ds_fsmoe.planning.groups import Groups
from tests.memory_cases import BUCKET, FAMILIES, PERSISTENCE, Case, config_of, kept_by_a_block, peak_of
from tests.ranks import run_on_ranks
from tests.samples import sampled

MOST_BELOW, MOST_ABOVE = 0.05, 0.10
"""A message of gradients is counted whether it is there at that moment or not."""
ALL = [(zero, checkpointing) for zero in (0, 1, 2, 3) for checkpointing in (False, True)]
IN_HALVES = {"two_batch_overlap": "on", "autotune": False}
OFF = {"gradient_partition": {"mode": "off"}}


def training_of(case: Case, load: float) -> Training:
    return Training(
        samples=case.samples,
        length=case.length,
        zero=case.zero,
        dtype=case.dtype,
        accumulation=case.accumulation,
        optimizer=case.optimizer,
        checkpointing=case.checkpointing,
        recompute=case.block.get("recompute", False),
        degree=case.block.get("num_chunks", 1),
        is_two_batch=case.block.get("two_batch_overlap") == "on",
        early_gradients="gradient_partition" not in case.block,
        load=load,
        lora=case.lora,
        lora_targets=case.lora_targets,
        offload=case.offload,
        device="cpu",
        reduce_bucket=BUCKET,
        prefetch_bucket=case.prefetch,
        persistence=PERSISTENCE,
    )


def groups_of(case: Case, world_size: int) -> Groups:
    return Groups(world=world_size, gpus_per_node=world_size, ep=case.ep, esp=case.esp)


def predicted(case: Case, world_size: int, load: float) -> Memory:
    model = read_hf_config(config_of(case.family).to_dict())
    return memory_of(model, groups_of(case, world_size), training_of(case, load))


def measured(rank: int, world_size: int, cases: list[Case]) -> list[int]:
    return [peak_of(each, rank, world_size)[0] for each in cases]


def wrong_peaks(case: Case, of_ranks: Sequence[int]) -> list[str]:
    """Of ranks with as many rows the fullest one counts: which gradients lie in whose part of ZeRO's differs."""
    peaks: dict[float, int] = {}
    for rank, peak in enumerate(of_ranks):
        load = case.load if rank % case.ep < case.ep / 2 else 2 - case.load
        peaks[load] = max(peaks.get(load, 0), peak)
    wrong = []
    for load, peak in peaks.items():
        memory = predicted(case, len(of_ranks), load)
        print(f"{case.name}, load {load:.2g}: {peak} measured, {round(memory.total)} predicted")
        if not -MOST_BELOW <= memory.total / peak - 1 <= MOST_ABOVE:
            wrong.append(f"{case.name}, load {load:.2g}: {peak} for {memory.total:.0f}, {memory.peak}")
    return wrong


def check(cases: list[Case], world_size: int, folder: Path) -> None:
    found = run_on_ranks(measured, world_size, folder, cases, limit_s=900)
    of_cases = zip(cases, zip(*found, strict=True), strict=True)
    assert [each for case, peaks in of_cases for each in wrong_peaks(case, peaks)] == []


def with_few_tokens(prefetch: int) -> Case:
    """A peak with all parameters gathered, with messages of so many elements."""
    return Case("olmoe", 3, samples=1, length=16, optimizer="sgd", prefetch=prefetch)


BLOCKS = [
    Case(family, 0, samples=2, length=50, optimizer="sgd", block={"autotune": False})
    for family in ("olmoe", "qwen3_moe")
]


def kept_and_peak(rank: int, world_size: int, block: Case, whole: Case) -> tuple[float, int]:
    return kept_by_a_block(block), peak_of(whole, rank, world_size)[0]


@sampled("case", BLOCKS, ids=lambda case: case.family)
def test_what_a_block_keeps_and_a_peak_at_stage_3_with_one_message_of_all_are_as_predicted(
    case: Case, tmp_path: Path
) -> None:
    model = read_hf_config(config_of(case.family, num_hidden_layers=3).to_dict())
    keeps = block_keeps(model.blocks[-1], model.M, groups_of(case, 2), training_of(case, 1.0))
    whole = with_few_tokens(2_000_000)
    kept, peaks = zip(*run_on_ranks(kept_and_peak, 2, tmp_path, case, whole), strict=True)
    assert kept == (pytest.approx(sum(keeps.values()), rel=3e-3),) * 2
    assert wrong_peaks(whole, peaks) == []


KINDS: dict[str, list[Case]] = {
    # The stages of ZeRO, both types, three ways of attention, ranks with unequal rows, and halves in turns.
    "some of each": [
        Case("gpt_oss", 1, checkpointing=True),
        Case("mixtral", 2, checkpointing=True, load=1.5),
        Case("deepseek_v3", 3, dtype="bf16", samples=3, length=61),
        Case("olmoe", 1, samples=4, block=IN_HALVES),
        Case("qwen3_moe", 2, checkpointing=True, samples=5, length=101, block=IN_HALVES),
    ],
    "families": [Case(family, *how) for family in FAMILIES for how in ALL],
    "messages of almost nothing": [with_few_tokens(1000)],
    "bf16": [Case(each, zero, c, 3, 101, "bf16") for each in ("olmoe", "gpt_oss") for zero, c in ALL],
    "gradients in fp32": [Case("olmoe", zero, True, 2, 90, "bf16", "fp32") for zero in (1, 2, 3)],
    "no optimizer states": [Case("qwen3_moe", zero, True, 2, 110, optimizer="sgd") for zero in (0, 2)],
    "DeepSpeed's own reduction": [Case("olmoe", zero, c, 2, 110, block=OFF) for zero, c in ALL if zero < 3],
    "whole experts on every rank": [Case("olmoe", zero, True, 2, 90, ep=1) for zero in (0, 2, 3)],
    "experts cut in two": [Case("mixtral", zero, c, 2, 110, ep=1, esp=2) for zero, c in ALL if zero < 3],
    "recompute": [Case("olmoe", 1, c, 2, 150, block={"recompute": True}) for c in (False, True)],
    "chunks": [Case("mixtral", 1, c, 4, 150, block={"num_chunks": 3}) for c in (False, True)],
    "halves": [
        Case(each, zero, c, 4, 110, block=IN_HALVES)
        for each in ("olmoe", "mixtral", "deepseek_v3")
        for zero, c in ALL
        if zero < 3 or each == "olmoe"
    ],
    "halves in chunks": [Case("mixtral", 1, c, 6, 110, block=IN_HALVES | {"num_chunks": 3}) for c in (False, True)],
    "unequal rows": [Case("mixtral", zero, c, load=1.7) for zero, c in ALL],
}


OF_TWO = [each for cases in KINDS.values() for each in cases]
WITH_REPLICAS = [Case("mixtral", *how, length=60) for how in ALL]
"""On four ranks: of experts on other ranks."""


@pytest.mark.long
@sampled("case", OF_TWO, drawn=5, ids=lambda case: case.name)
def test_the_peak_of_a_rank_is_as_predicted(case: Case, tmp_path: Path) -> None:
    check([case], 2, tmp_path)


@pytest.mark.long
@sampled("case", WITH_REPLICAS, ids=lambda case: case.name)
def test_the_peak_is_as_predicted_with_replicas_of_experts_on_other_ranks(case: Case, tmp_path: Path) -> None:
    check([case], 4, tmp_path)
