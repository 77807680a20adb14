# SPDX-License-Identifier: Apache-2.0
"""One MoE layer, forward and backward, at the sizes of real models: ours, Hugging Face's three ways, stock DeepSpeed.

Times are by the clock of the device, the median of ten. Beside them: what the host needs to issue a step, the peak of
memory, kernels, and where the host waited.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.checks import Checks, SkipCheckError, WrongError, alone, median_ms
from ds_fsmoe.observing.device_time import elapsed_ms, issued_ms
from tests.gpu_training import engine_of, ours

SIZES = {
    "qwen3-30b-a3b": ("qwen3_moe", 2048, 768, 128, 8),
    "mixtral-8x7b": ("mixtral", 4096, 14336, 8, 2),
    "olmoe-1b-7b": ("olmoe", 2048, 1024, 64, 8),
    "deepseek-v2-lite": ("deepseek_v2", 2048, 1408, 64, 6),
}
"""(family, M, H, E, k)."""
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
MOST_BYTES = 20e9
"""Above it a way is left out: batched_mm copies the weights for each choice, stock's masks are one-hot."""
OURS = {"ours": {}, "ours, plain ops": {"ops": "plain"}, "ours, reference ops": {"ops": "reference"}}
OF_ROW = ("ms", "forward_ms", "host_ms", "device_ms", "kernels", "waits", "peak_mib", "tflops")


def model_of(sizes: tuple[Any, ...], device: Any, layers: int = 1, vocabulary: int = 128, heads: int = 4) -> Any:
    """Return a model in bf16 with experts of given sizes and little else."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    family, M, H, E, k = sizes
    named = {"vocab_size": vocabulary, "hidden_size": M, "intermediate_size": H, "moe_intermediate_size": H}
    named |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads}
    named |= {"num_experts": E, "num_local_experts": E, "n_routed_experts": E, "num_experts_per_tok": k}
    named |= {"max_position_embeddings": 8192, "pad_token_id": 0, "decoder_sparse_step": 1, "mlp_only_layers": []}
    named |= {"norm_topk_prob": True, "router_jitter_noise": 0.0, "output_router_logits": False}
    if family.startswith("deepseek"):
        named |= {"q_lora_rank": None, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32}
        named |= {"v_head_dim": 32, "n_shared_experts": 2, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
    elif family == "qwen3_moe":
        named["head_dim"] = 128 if M >= 512 else 16
    kind = CONFIG_MAPPING[family]
    base = kind()
    torch.manual_seed(0)
    with torch.device(device):
        config = kind(**{name: value for name, value in named.items() if hasattr(base, name)})
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def block_of(model: Any) -> Any:
    """Return the block with the router and the experts."""
    layer = model.model.layers[0]
    return next(getattr(layer, each) for each in ("mlp", "block_sparse_moe") if hasattr(layer, each))


def kernels(work: Callable[[], object], checks: Checks) -> dict[str, Any]:
    """Profile a step: its kernels, how long they take, where the host waits, and what takes the longest."""
    from torch.profiler import ProfilerActivity, profile

    if not checks.is_cuda:
        work()
        return {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    events = seen.events()
    sums: dict[str, float] = {}
    for each in (each for each in events if "CUDA" in str(each.device_type)):
        sums[each.name] = sums.get(each.name, 0.0) + each.time_range.elapsed_us() / 1e3
    found = {"kernels": sum("CUDA" in str(each.device_type) for each in events)}
    found |= {"device_ms": round(sum(sums.values()), 3), "waits": sum(each.name in WAITS for each in events) - 1}
    longest = sorted(sums.items(), key=lambda pair: -pair[1])[:20]
    return found | {"longest": [(name[:100], round(ms, 3)) for name, ms in longest]}


def run(checks: Checks) -> None:
    os.environ |= alone()
    device, tokens = checks.device, 8192 if checks.is_cuda else 64
    for name, sizes in list(SIZES.items())[: 1 if checks.small else None]:
        Layer(checks, name, (sizes[0], 64, 32, 8, 4) if checks.small else sizes, device, tokens).run()


class Layer:
    """Measures one layer in every way."""

    def __init__(self, checks: Checks, name: str, sizes: tuple[Any, ...], device: Any, tokens: int) -> None:
        self.checks, self.name, self.sizes, self.device, self.tokens = checks, name, sizes, device, tokens
        _, M, H, _, k = sizes
        self.weights, shared = tokens * k * 3 * M * H, 2 * ("deepseek" in name)
        self.flops = 3 * 2 * self.weights * (k + shared) / k
        torch.manual_seed(1)
        self.x, self.dy = (torch.randn(1, tokens, M, device=device, dtype=torch.bfloat16) for _ in range(2))
        self.eager: list[torch.Tensor] = []

    def run(self) -> None:
        ways = {each: lambda at=each: self.hugging_face(at) for each in ("eager", "grouped_mm")}
        ways |= {each: lambda at=each: self.ours(at) for each in OURS}
        ways |= {"batched_mm": lambda: self.hugging_face("batched_mm"), "stock deepspeed": self.stock}
        for way, work in ways.items():
            self.checks.check(f"{self.name}, {way}", work, needs_s=6)
            gc.collect()
            torch.cuda.empty_cache()

    def step(self, block: Any) -> list[torch.Tensor]:
        """Return the result and the gradient of the tokens."""
        x = self.x.detach().requires_grad_()
        y = block(x)
        y = y[0] if isinstance(y, tuple) else y
        y.backward(self.dy)
        return [y.detach(), x.grad]

    def measured(self, way: str, block: Any) -> dict[str, Any]:
        def work() -> None:
            self.step(block)

        work()  # gradients are there from now on, as in training
        found = self.step(block)
        if way == "eager":
            self.eager = found
        off = [float((a - b).double().norm() / b.double().norm()) for a, b in zip(found, self.eager, strict=False)]
        facts: dict[str, Any] = dict.fromkeys(OF_ROW, "") | {"off": max(off, default=None)}
        del found
        if self.checks.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            work()
            torch.cuda.synchronize()
            facts["peak_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
        facts |= {"ms": median_ms(elapsed_ms, self.device, work), "host_ms": median_ms(issued_ms, self.device, work, 3)}
        facts["forward_ms"] = median_ms(elapsed_ms, self.device, lambda: block(self.x))
        facts["tflops"] = round(self.flops / facts["ms"] / 1e9, 1)
        facts |= kernels(work, self.checks)
        row = {"case": self.name, "tokens": self.tokens, "variant": way, "ops": "", "general_because": ""}
        if (state := getattr(getattr(block, "experts", None), "fsmoe", None)) is not None:
            why = "not asked" if state.fast_path is None else state.fast_path.why_general
            row |= {"ops": state.order.ops.name, "general_because": why}
        self.checks.append("gpu_layer.csv", row | {each: facts[each] for each in OF_ROW})
        if way != "stock deepspeed" and off and max(off) > 3e-2:  # stock's layer is another
            raise WrongError(f"off from eager by {off}: {facts}")
        return facts

    def hugging_face(self, way: str) -> dict[str, Any]:
        if way == "batched_mm" and 2 * self.weights > MOST_BYTES:
            raise SkipCheckError("it copies the weights for each choice of each token")
        model = model_of(self.sizes, self.device)
        model.set_experts_implementation(way)
        return self.measured(way, block_of(model))

    def ours(self, way: str) -> dict[str, Any]:
        # Without an optimizer, whose hooks on gradients the others do not have.
        config = {"train_micro_batch_size_per_gpu": 1, "steps_per_print": 10**9} | ours(OURS[way])
        engine = engine_of(model_of(self.sizes, self.device), config)
        try:
            return self.measured(way, block_of(engine.module))
        finally:
            engine.destroy()

    def stock(self) -> dict[str, Any]:
        from deepspeed.moe.layer import MoE

        import ds_fsmoe

        _, M, H, E, k = self.sizes
        if "deepseek" in self.name or self.tokens**2 * k * 8 > MOST_BYTES:
            raise SkipCheckError("it has no shared experts, or its one-hot masks are too large")
        with torch.device(self.device):
            expert = ds_fsmoe.MixtralFeedForward(M, H)
            block = MoE(M, expert, num_experts=E, k=k, drop_tokens=True, capacity_factor=1.0).to(torch.bfloat16)
        block.set_deepspeed_parallelism()
        return self.measured("stock deepspeed", block)
