# SPDX-License-Identifier: Apache-2.0
"""What ``ds_fsmoe plan`` says of adapters, and of an optimizer on the host, is what tensors take, within 5%."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.memory_cases import Case, peak_of
from tests.ranks import run_on_ranks
from tests.test_memory_plans import check, predicted

ADAPTERS = [
    Case("mixtral", 1, lora=8),
    Case("mixtral", 0, lora=8, lora_targets="all"),
    Case("olmoe", 2, checkpointing=True, lora=8),
]
MORE_ADAPTERS = [
    Case("mixtral", 0, lora=8),
    Case("mixtral", 1, lora=8, lora_targets="all"),
    Case("mixtral", 3, lora=8, lora_targets="all"),
    Case("deepseek_v3", 1, dtype="bf16", lora=8),
    Case("qwen3_moe", 2, lora=16, lora_targets="all"),
]
ON_THE_HOST = [
    Case("mixtral", 1, offload=True),
    Case("mixtral", 2, offload=True, dtype="bf16"),
    Case("olmoe", 2, offload=True, checkpointing=True),
]


@pytest.mark.long
def test_adapters_take_what_is_predicted(tmp_path: Path) -> None:
    check(ADAPTERS, 2, tmp_path)


@pytest.mark.long
def test_adapters_of_other_families_and_stages_take_what_is_predicted(tmp_path: Path) -> None:
    check(MORE_ADAPTERS, 2, tmp_path)


def peaks(rank: int, world_size: int, cases: list[Case]) -> list[tuple[int, int]]:
    return [peak_of(each, rank, world_size) for each in cases]


@pytest.mark.long
def test_an_optimizer_on_the_host_takes_there_and_on_the_device_what_is_predicted(tmp_path: Path) -> None:
    found = run_on_ranks(peaks, 2, tmp_path, ON_THE_HOST, limit_s=900)
    for number, case in enumerate(ON_THE_HOST):
        memory = predicted(case, 2, 1.0)
        device, host = (max(of_rank[number][place] for of_rank in found) for place in (0, 1))
        print(f"{case.name}: device {device}, {memory.total:.0f}; host {host}, {sum(memory.host.values()):.0f}")
        assert memory.total == pytest.approx(device, rel=0.05), (case.name, memory.peak)
        assert sum(memory.host.values()) == pytest.approx(host, rel=0.05), case.name
