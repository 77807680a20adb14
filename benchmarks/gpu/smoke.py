# SPDX-License-Identifier: Apache-2.0
"""The shortest way through everything, in the order in which things depend on each other."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from benchmarks.gpu.checks import Checks, alone
from ds_fsmoe.ops import load_ops
from tests import test_gpu_layer, test_gpu_ops
from tests import test_gpu_one_rank as one_rank
from tests.gpu_training import against_stock, train_hf, train_small
from tests.small_model import Case


def run(checks: Checks) -> None:
    os.environ |= alone()
    device = checks.device

    def ops() -> dict[str, Any]:
        compiled = load_ops("required", device.type)
        test_gpu_ops.check_rows(compiled, device, (31, 16, 3, 31), torch.bfloat16, torch.float32)
        test_gpu_ops.check_slots(compiled, device, (13, 5, 2, 4), "score")
        return {"gated products with other bits": one_rank.compare_gated(compiled, device)}

    checks.check("ops", ops)
    checks.check("ops refuse", lambda: {"refusals": one_rank.refuse_once(device)})
    compiled = load_ops("auto", device.type)
    checks.check("rows of 384 experts", lambda: {"queues": one_rank.compare_numbers(compiled, device)})
    for each in test_gpu_layer.CASES[:6] if checks.small else test_gpu_layer.CASES:
        checks.check(f"layer {each}", lambda at=each: {"off": test_gpu_layer.distance(device, *at)})
    checks.check("grouped products", lambda: test_gpu_layer.grouped_products(device))
    for name in ("required", "plain"):
        checks.check(f"waits, ops {name}", lambda at=name: {"why general": one_rank.wait_for_nothing(device, at)})

    checks.check("choices of no expert", lambda: {"compared": one_rank.leave_no_trace_of_none(device)})
    steps = 2 if checks.small else 4
    for dtype in ("fp32", "bf16"):
        engine = functools.partial(against_stock, train_small, Case(1, 1, dtype, k=2), steps=steps, bounds=dtype)
        checks.check(f"engine, {dtype}", engine)
    for each in (("qwen3_moe", 0, "fp32"), ("qwen3_moe", 2, "bf16"), ("mixtral", 3, "bf16")):
        model = functools.partial(against_stock, train_hf, *each, steps=steps, bounds=each[2])
        checks.check(f"model {each}", model)
    tuned, steps = {"autotune": {"enabled": True}}, 3 if checks.small else 14
    checks.check("autotuned", lambda: {"losses": train_hf("qwen3_moe", 1, "fp32", tuned, steps)["losses"]})
