# SPDX-License-Identifier: Apache-2.0
"""Trains tiny models with stock DeepSpeed and with ours on the same device, and says how far they are apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ds_fsmoe.execution.stream_lanes import StreamLanes
from tests.hf_families import batch as tokens
from tests.hf_families import model_of
from tests.sgd_engines import stock_config
from tests.small_model import Case, SmallModel, batch

TOLERANCE = {"fp32": 2e-5, "bf16": 3e-2, "loosely": 0.15}
"""Of the norm of a parameter. In fp32 sums differ in their order; in bf16 one rounding is 4e-3."""
OF_LOSS = {"fp32": 1e-5, "bf16": 1e-2, "loosely": 1e-2}
LEAST = 0.01
"""The least that an element counts in a norm: what is nothing but rounding has no share."""
Block = dict[str, Any] | None
"""What stands under "fsmoe"; None for stock DeepSpeed."""


def config_of(block: Block, dtype: str = "bf16", stage: int = 1, **more: Any) -> dict[str, Any]:
    """Return a config of DeepSpeed."""
    found = stock_config(stage, 0.1, 2) | {"steps_per_print": 10**9}
    found |= {"bf16": {"enabled": True}} if dtype == "bf16" else {}
    return found | ours(block) | more


def ours(block: Block) -> dict[str, Any]:
    """Return the part of a config that is ours."""
    return {} if block is None else {"fsmoe": {"enabled": True, "autotune": False} | block}


def engine_of(model: nn.Module, config: dict[str, Any]) -> Any:
    """Return an engine: ours where the config has our block."""
    import deepspeed

    import ds_fsmoe

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    initialize = ds_fsmoe.initialize if "fsmoe" in config else deepspeed.initialize
    trained = [p for p in model.parameters() if p.requires_grad]
    return initialize(model=model, model_parameters=trained, config=config)[0]


def train_hf(family: str, stage: int, dtype: str, block: Block, steps: int, rank: int = 0) -> dict[str, Any]:
    """Train a tiny Hugging Face model, and return what became of it."""
    engine = engine_of(model_of(family), config_of(block, dtype, stage))
    batches = (tokens(100 * step + rank, 2, 24).to(engine.device) for step in range(steps))
    return _trained(engine, (engine(input_ids=x, labels=x).loss for x in batches))


def train_small(case: Case, block: Block, steps: int, rank: int = 0) -> dict[str, Any]:
    """Train a small model with DeepSpeed's MoE layers, and return what became of it."""
    torch.manual_seed(0)
    engine = engine_of(SmallModel(case, rank), case.ds_config(**ours(block)))
    dtype = next(engine.module.parameters()).dtype

    def losses() -> Iterable[torch.Tensor]:
        for step in range(steps * case.accumulation):
            torch.manual_seed(step * 100 + rank)
            yield engine(*(each.to(engine.device) for each in batch(step, rank, dtype)))[0]

    return _trained(engine, losses())


def _trained(engine: Any, losses: Iterable[torch.Tensor]) -> dict[str, Any]:
    from deepspeed.utils import safe_get_full_fp32_param

    found: dict[str, Any] = {"losses": [], "parameters": {}, "layers": None}
    gradients: set[torch.device] = set()
    for loss in losses:
        engine.backward(loss)
        gradients |= {each.grad.device for each in engine.module.parameters() if each.grad is not None}
        engine.step()
        found["losses"].append(loss.item())
    for name, each in engine.module.named_parameters():
        whole = safe_get_full_fp32_param(each) if engine.zero_optimization_stage() else each
        found["parameters"][name] = whole.detach().cpu().double()
    if hasattr(engine, "fsmoe"):
        found |= {"layers": len(engine.fsmoe.layers), "lanes": type(engine.fsmoe.running.lanes).__name__}
        found["devices"] = _devices_of(engine, gradients)
    engine.destroy()
    return found


def _devices_of(engine: Any, gradients: set[torch.device]) -> dict[str, list[str]]:
    """Return what is where; ZeRO has taken the gradients away when a backward is over."""
    found = {"parameters": {each.device for each in engine.module.parameters()}, "gradients": gradients}
    if isinstance(engine.fsmoe.running.lanes, StreamLanes):
        found["streams"] = {each.device for each in engine.fsmoe.running.lanes._links.values()}
        found["current"] = {torch.device("cuda", torch.cuda.current_device())}
    return {name: sorted(map(str, each)) for name, each in found.items()}


def compare(ours: dict[str, Any], stock: dict[str, Any], bounds: str, rank: int = 0) -> dict[str, Any]:
    """Return how far ours is from stock; raises AssertionError where that is more than rounding.

    Where ours has a part of the experts that stock has whole, it is this rank's. ``bounds``: "fp32", "bf16", or
    "loosely" for families whose own numbers are large where they are tiny.
    """
    if set(ours["parameters"]) != set(stock["parameters"]) or ours["layers"] == 0:
        raise AssertionError(f"{ours['layers']} layers; parameters {sorted(ours['parameters'])[:6]}")
    off = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours["losses"], stock["losses"], strict=True))
    far = {}
    for name, own in ours["parameters"].items():
        whole = stock["parameters"][name]
        whole = whole[rank * len(own) : (rank + 1) * len(own)] if len(own) < len(whole) else whole
        far[name] = float((own - whole).norm() / max(float(whole.norm()), LEAST * whole.numel() ** 0.5))
    worst = max(far, key=lambda name: far[name])
    facts = {"loss_off": f"{off:.1e}", "worst": worst, "off": f"{far[worst]:.1e}", "lanes": ours.get("lanes")}
    are_finite = all(map(math.isfinite, [*ours["losses"], *far.values()]))
    if not are_finite or off > OF_LOSS[bounds] or far[worst] > TOLERANCE[bounds]:
        raise AssertionError(str(facts))
    return facts


def against_stock(train: Callable[..., dict[str, Any]], *at: Any, steps: int, bounds: str) -> dict[str, Any]:
    """Train something with ours and with stock, and return how far they are apart."""
    return compare(train(*at, {}, steps), train(*at, None, steps), bounds)
