# SPDX-License-Identifier: Apache-2.0
"""Training steps of whole models on one GPU: stock DeepSpeed with Hugging Face's grouped_mm, and ours.

Layers have their full sizes, as many as fit with Adam in fp32; ZeRO 1, bf16. The stage ``trace`` profiles some steps.
"""

from __future__ import annotations

import functools
import gc
import os
import statistics
import time
from typing import Any

import torch

from benchmarks.gpu.checks import Checks, WrongError, alone
from benchmarks.gpu.speed import SIZES as LAYERS
from benchmarks.gpu.speed import kernels, model_of
from tests.gpu_training import Block, config_of, engine_of

SIZES = {
    "olmoe, 5 of 16 layers": (("olmoe", 2048, 1024, 64, 8), 5, 4, 2048),
    "qwen3-30b-a3b, 3 of 48 layers": (("qwen3_moe", 2048, 768, 128, 8), 3, 4, 2048),
    "olmoe's shape at an eighth, 24 layers": (("olmoe", 512, 256, 32, 4), 24, 4, 512),
}
"""((family, M, H, E, k), layers, samples, length)."""
SMALL = ("qwen3_moe", 64, 32, 8, 2), 2, 2, 32
STOCK = "stock, grouped_mm"
WAYS: dict[str, Block] = {
    STOCK: None,
    "ours, autotune off": {},
    "ours": {"autotune": True},
    "ours, plain ops": {"ops": "plain"},
    "ours, recompute": {"recompute": True},
}
LORA = STOCK, "ours, autotune off"
OF_ROW = ("ops", "step_ms", "least_ms", "most_ms", "tokens_s", "forward_issued_ms", "peak_gib")
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}}, "gradient_clipping": 1.0}


def trained(checks: Checks, size: tuple[Any, ...], block: Block, lora: bool) -> dict[str, Any]:
    """Train, and return the times of steps and the losses."""
    sizes, num_layers, samples, length = SMALL if checks.small else size
    model = model_of(sizes, checks.device, num_layers, 1024, max(1, sizes[1] // 128))
    if block is None:
        model.set_experts_implementation("grouped_mm")
    if lora:
        from peft import LoraConfig, get_peft_model

        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"], target_parameters=names))
    engine = engine_of(model, config_of(block, train_micro_batch_size_per_gpu=samples, **ADAM))
    x = torch.randint(0, 1024, (samples, length), generator=torch.Generator().manual_seed(3)).to(checks.device)
    losses, times, forwards = [], [], []
    if checks.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3 if checks.small else 12):
        began = time.perf_counter()
        loss = engine(input_ids=x, labels=x).loss
        forwards.append((time.perf_counter() - began) * 1e3)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())  # waits for the device
        times.append((time.perf_counter() - began) * 1e3)
    step_ms = [round(each(times[len(times) // 3 :]), 2) for each in (statistics.median, min, max)]
    found = dict(zip(("step_ms", "least_ms", "most_ms"), step_ms, strict=True))
    found |= {"tokens_s": round(samples * length / step_ms[0] * 1e3), "losses": losses}
    found["forward_issued_ms"] = round(statistics.median(forwards[len(times) // 3 :]), 2)
    found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2) if checks.is_cuda else ""
    layers = [] if block is None else list(engine.fsmoe.layers.values())
    found["ops"] = layers[0].fsmoe.order.ops.name if layers else ""
    engine.destroy()
    return found


def compared(checks: Checks, name: str, way: str, lora: bool, wanted: list[float]) -> dict[str, Any]:
    """Train in one way, add its row, and hold its losses against stock's, which come first."""
    found = trained(checks, SIZES[name], WAYS[way], lora)
    variant = f"{way}, LoRA on experts" if lora else way
    checks.append("gpu_model.csv", {"case": name, "variant": variant} | {each: found[each] for each in OF_ROW})
    if way == STOCK:
        wanted[:] = found["losses"]
    # One batch again and again: later on a rounding decides how fast it is learned by heart.
    pairs = zip(found["losses"][:8], wanted[:8], strict=True)
    if (off := max(abs(a - b) / abs(b) for a, b in pairs)) > 0.01:
        raise WrongError(f"losses are off by {off:.3f}: {found}, stock's are {wanted}")
    return found


def profiled(checks: Checks) -> dict[str, Any]:
    """Leave a profile of two steps to read, torch's in Chrome's format and ours, and count the kernels of another."""
    ours = {"trace": {"enabled": True, "start_step": 2, "num_steps": 2, "path": str(checks.folder / "fsmoe_trace")}}
    model = model_of(SMALL[0] if checks.small else LAYERS["qwen3-30b-a3b"], checks.device)
    engine = engine_of(model, config_of(ours, train_micro_batch_size_per_gpu=1, **ADAM))
    x = torch.randint(0, 128, (1, 64 if checks.small else 4096), device=checks.device)

    def step() -> None:
        engine.backward(engine(input_ids=x, labels=x).loss)
        engine.step()

    for _ in range(5):
        step()
    with torch.profiler.profile() as seen:
        step()
        step()
    seen.export_chrome_trace(str(checks.folder / "steps.json.gz"))
    found = kernels(step, checks)
    engine.destroy()
    return found


def run(checks: Checks) -> None:
    os.environ |= alone()
    if checks.folder.name == "trace":
        checks.check("training steps", functools.partial(profiled, checks), needs_s=15)
        return
    for name in list(SIZES)[1:2] if checks.small else SIZES:
        wanted: list[float] = []
        ways = [(way, False) for way in WAYS] + [(way, True) for way in LORA if "qwen3" in name]
        for way, lora in ways:
            work = functools.partial(compared, checks, name, way, lora, wanted)
            checks.check(f"{name}: {way}{', LoRA on experts' if lora else ''}", work, needs_s=8)
            gc.collect()
            torch.cuda.empty_cache()
