# SPDX-License-Identifier: Apache-2.0
"""One rank trains as stock DeepSpeed does: families, ZeRO stages and types, then presets and degrees."""

from __future__ import annotations

import functools
import os
from typing import Any

from benchmarks.gpu.checks import Checks, alone
from ds_fsmoe.planning.decide.presets import NAMES
from tests.gpu_training import compare, train_hf, train_small
from tests.small_model import Case

FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss")
TYPES = ("fp32", "bf16")
BLOCKS: tuple[dict[str, Any], ...] = (
    *({"ops": "plain"}, {"ops": "reference"}, {"recompute": True}, {"deterministic": True}, {"overlap": False}),
    *({"num_chunks": 2, "schedule": "fsmoe"}, {"two_batch_overlap": "on"}),
)
"""What has code of its own on a GPU, besides the default."""


def run(checks: Checks) -> None:
    os.environ |= alone()
    small, steps = checks.small, 2 if checks.small else 3
    stock_hf = functools.cache(lambda *at: train_hf(*at, None, steps))
    stock_small = functools.cache(lambda case: train_small(case, None, steps))

    def hugging_face(family: str, stage: int, dtype: str, block: dict[str, Any]) -> None:
        def work() -> dict[str, Any]:
            bounds = "loosely" if (family, dtype) == ("gpt_oss", "bf16") else dtype
            return compare(train_hf(family, stage, dtype, block, steps), stock_hf(family, stage, dtype), bounds)

        checks.check(f"{family}, ZeRO {stage}, {dtype}, {block}", work)

    def layers(preset: str, degrees: tuple[int, int], k: int, drops: bool, dtype: str) -> None:
        case, block = Case(1, 2, dtype, accumulation=2, k=k, drop_tokens=drops), {"schedule": preset}
        if preset != "deepspeed":  # some have one number for both phases
            block["num_chunks"] = {"forward": degrees[0], "backward": degrees[preset in ("fsmoe", "best")]}
        if preset in ("tutel_improved", "fsmoe") and not drops:
            block["dispatch"] = "padded"
        name = f"{block}, {'drops' if drops else 'drops nothing'}, {dtype}"
        checks.check(name, lambda: compare(train_small(case, block, steps), stock_small(case), dtype))

    # What users have first: the time may not be enough for all.
    for family in FAMILIES[:2] if small else FAMILIES:
        for dtype in TYPES:
            hugging_face(family, 2, dtype, {})
    for block in BLOCKS[:2] if small else BLOCKS:
        for family in FAMILIES[:2]:
            for dtype in TYPES:
                hugging_face(family, 2, dtype, block)
    for k, drops in ((2, False), (1, True)):
        for preset in NAMES[-2:] if small else NAMES:
            for degrees in ((1, 1), (3, 2)) if preset != "deepspeed" else ((1, 1),):
                for dtype in TYPES:
                    layers(preset, degrees, k, drops, dtype)
    for stage in () if small else (3, 1, 0):
        for family in FAMILIES:
            for dtype in TYPES:
                hugging_face(family, stage, dtype, {})
