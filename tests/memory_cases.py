# SPDX-License-Identifier: Apache-2.0
"""Models in a size of which both weights and activations are seen, trained for some steps and counted."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
import torch
from deepspeed.moe.layer import MoE
from torch import nn
from torch.nn import functional as F

from tests.hf_lora import lora_config
from tests.live_memory import LiveMemory
from tests.waiting import linger

COMMON: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,  # as Trainer has it; a cache would keep another copy of keys and values
}
FAMILIES: dict[str, dict[str, Any]] = {
    "olmoe": {"intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "mixtral": {"intermediate_size": 160, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "head_dim": 24,
    },
    "deepseek_v3": {
        "intermediate_size": 224,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 48,
        "kv_lora_rank": 40,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 24,
        "v_head_dim": 32,
        "num_key_value_heads": 4,
    },
    "gpt_oss": {
        "intermediate_size": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 32,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
"""One with experts of all its blocks, one with grouped heads, one with normed heads, one with latent attention, shared
experts and a dense block, one with eager attention, sinks and biases."""
BUCKET, PREFETCH, PERSISTENCE = 100_000, 50_000, 1000
"""DeepSpeed's own sizes would hide a tiny model: buckets alone are gigabytes, and one message would have all of it."""


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    family: str
    """Of Hugging Face's, or "gpt", with DeepSpeed's MoE layers."""
    zero: int
    checkpointing: bool = False
    samples: int = 2
    length: int = 128
    dtype: str = "fp32"
    accumulation: str | None = None
    optimizer: str = "torch_adam"
    ep: int = 2
    esp: int = 1
    load: float | None = 1.0
    """Rows at the first half of the ranks, over the mean; None: as the router chooses."""
    micro_batches: int = 1
    prefetch: int = PREFETCH
    """The elements of a message of ZeRO 3 that is sent ahead."""
    lora: int = 0
    lora_targets: str = "attention"
    offload: bool = False
    block: dict[str, Any] = field(default_factory=dict)
    """Of the fsmoe block."""

    @property
    def name(self) -> str:
        """All that differs from the defaults."""
        given = asdict(self)
        return " ".join(f"{key}={value}" for key, value in given.items() if value != _DEFAULTS.get(key))


_DEFAULTS = asdict(Case("", -1))


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.moe = MoE(width, Expert(width), num_experts=4, ep_size=2, k=2, capacity_factor=1.25)

    def forward(self, x_BLM: torch.Tensor) -> torch.Tensor:
        heads = [each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(self.norm_1(x_BLM)).chunk(3, -1)]
        y_BHLm = F.scaled_dot_product_attention(*heads, is_causal=True)
        x_BLM = x_BLM + self.out(y_BHLm.transpose(1, 2).flatten(-2))
        return x_BLM + self.moe(self.norm_2(x_BLM))[0]


class GPT(nn.Module):
    """A GPT with DeepSpeed's MoE layers."""

    def __init__(self, width: int = 128, depth: int = 4, vocabulary: int = 1000) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x_BLM = self.embed(input_ids)
        for block in self.blocks:
            x_BLM = block(x_BLM)
        return F.cross_entropy(self.head(x_BLM).float().flatten(0, 1), labels.flatten())


def config_of(family: str, **other: Any) -> Any:
    """The configuration of a family.

    Args:
        family: its name.
        other: what is other than in the cases.
    """
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[family](**COMMON | FAMILIES[family] | other)


def ds_config(case: Case) -> dict[str, Any]:
    """DeepSpeed's configuration of a case."""
    zero = {"stage": case.zero, "reduce_bucket_size": BUCKET}
    if case.zero == 3:
        zero |= {"stage3_param_persistence_threshold": PERSISTENCE, "stage3_prefetch_bucket_size": case.prefetch}
        zero |= {"stage3_max_reuse_distance": 0}
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    if case.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    spread = {} if case.family == "gpt" else {"ep_size": case.ep, "expert_tensor_parallel_size": case.esp}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case.samples,
        "gradient_accumulation_steps": case.micro_batches,
        "optimizer": adam if case.optimizer == "torch_adam" else {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        "fsmoe": {"enabled": True} | spread | case.block,
    }
    if case.offload:
        config["zero_force_ds_cpu_optimizer"] = False  # its own is compiled, and keeps the same
    if case.dtype != "fp32":
        config[case.dtype] = {"enabled": True}
    if case.accumulation is not None:
        config["data_types"] = {"grad_accum_dtype": case.accumulation}
    return config


def with_adapters(model: nn.Module, case: Case) -> nn.Module:
    """Adapters of all of attention's projections, and where a case asks for it of experts."""
    from peft import get_peft_model

    projections = [
        name for name, each in model.named_modules() if ".self_attn." in name and isinstance(each, nn.Linear)
    ]
    weights = ("up", "down") if case.lora_targets == "all" else ()
    return get_peft_model(model, lora_config(model, weights, r=case.lora, target_modules=projections))


def spread(load: float) -> Any:
    """A hook that gives a layer's experts other choices: those of the first half of them so many rows, over the mean.

    How many rows come to a rank is then known beforehand. Weights stay the router's, and so do all sizes.
    """

    def chosen(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, index, weights = args
        experts = module.fsmoe.total_experts
        at, half = torch.arange(index.numel()), experts // 2
        # As evenly over the tokens as can be, so that chunks have as many rows each.
        first = ((at + 1) * (load / 2)).floor() > (at * (load / 2)).floor()
        return hidden, (at % half + half * ~first).view_as(index).to(index.dtype), weights

    return chosen


def spread_rows(engine: Any, load: float) -> None:
    """Give all layers of an engine such choices."""
    for each in engine.fsmoe.layers.values():
        each.register_forward_pre_hook(spread(load))


def count_lanes(engine: Any, memory: LiveMemory) -> None:
    """Count what the lanes of an engine make as well."""

    def watched(call: Any) -> None:
        call.pipeline = call.pipeline.watched(memory.in_every_thread())

    layers = [*engine.fsmoe.layers.values()]
    layers[0].fsmoe.running.instruments.append(watched)


def on_the_host(optimizer: Any) -> int:
    """The bytes of all that DeepSpeed keeps on the host where it offloads the optimizer."""
    masters = optimizer.single_partition_of_fp32_groups
    states = [each for of in optimizer.state.values() for each in of.values() if isinstance(each, torch.Tensor)]
    copies = [*optimizer.param_buffer_of_bit16_for_cpu_offload_groups, optimizer.temp_grad_buffer_for_cpu_offload]
    tensors = [*masters, *(each.grad for each in masters), *states, *copies]
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors if each is not None}
    return sum(storages.values())


def model_of(case: Case) -> nn.Module:
    from transformers import AutoModelForCausalLM

    if case.family == "gpt":
        return GPT()
    model = AutoModelForCausalLM.from_config(config_of(case.family))
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    return with_adapters(model, case) if case.lora else model


@contextmanager
def counted_beside(memory: LiveMemory) -> Iterator[None]:
    """Count what messages make that travel beside the caller, too."""
    from ds_fsmoe.gradients.background_lane import BackgroundThreads

    give = BackgroundThreads._give

    def counted(self: Any, between: bool, step: Any, after: Any) -> Any:
        def run() -> None:
            with memory.in_this_thread():
                step()

        return give(self, between, run, after)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BackgroundThreads, "_give", counted)
        yield


def peaks_of(
    case: Case, rank: int, world_size: int, steps: int, stock: bool = False, beside: bool = False
) -> tuple[list[int], int]:
    """The peaks of the steps of a case, in bytes, and what the host keeps, which is in all peaks; ``beside``: with what
    messages make."""
    import deepspeed

    import ds_fsmoe

    peaks = []
    with LiveMemory() as memory, counted_beside(memory) if beside else nullcontext():
        torch.manual_seed(0)
        model, config = model_of(case), ds_config(case)
        if stock:
            del config["fsmoe"]
        parameters = [each for each in model.parameters() if each.requires_grad]
        initialize = deepspeed.initialize if stock else ds_fsmoe.initialize
        engine = initialize(model=model, model_parameters=parameters, config=config)[0]
        del parameters
        if not stock:
            count_lanes(engine, memory)
            if case.load is not None:
                spread_rows(engine, case.load)
        for step in range(steps):
            # What a first call is told is in a ring, and holds the call before it: the collector takes one at a time.
            for _ in range(16):
                gc.collect()
            memory.begin_again()
            for micro in range(case.micro_batches):
                generator = torch.Generator().manual_seed((step * 7 + micro) * world_size + rank)
                x = torch.randint(3, 900, (case.samples, case.length), generator=generator)
                loss = engine(input_ids=x, labels=x)
                loss = getattr(loss, "loss", loss)
                engine.backward(loss)
                del loss
                engine.step()
            peaks.append(memory.peak)
        host = on_the_host(engine.optimizer) if case.offload else 0
        engine.destroy()
        del engine, model
    gc.collect()
    return peaks, host


def peak_of(case: Case, rank: int, world_size: int) -> tuple[int, int]:
    """The peak of a step of a case without what the host keeps, and what the host keeps: the least of three steps after
    the first, as gloo's thread holds a message for a moment after that has been waited for."""
    peaks, host = peaks_of(case, rank, world_size, steps=4)
    return min(peaks[1:]) - host, host


def kept_by_a_block(case: Case) -> float:
    """What a forward of a case keeps for its backward in each block with experts, in bytes."""
    from transformers import AutoModelForCausalLM

    import ds_fsmoe

    kept: dict[int, int] = {1: sys.maxsize, 3: sys.maxsize}
    for num_blocks in (1, 3):
        with LiveMemory() as memory:
            model = AutoModelForCausalLM.from_config(config_of(case.family, num_hidden_layers=num_blocks))
            engine = ds_fsmoe.initialize(model=model, model_parameters=model.parameters(), config=ds_config(case))[0]
            count_lanes(engine, memory)
            spread_rows(engine, case.load or 1.0)
            x = torch.randint(3, 900, (case.samples, case.length))
            for _ in range(3):  # what the first calls make stays: it is in no later call
                for _ in range(2 * num_blocks):  # see peak_of
                    gc.collect()
                linger()  # as below
                before = memory.live
                loss = engine(input_ids=x, labels=x).loss
                gc.collect()
                linger()  # as in peak_of
                kept[num_blocks] = min(kept[num_blocks], memory.live - before)
                engine.backward(loss)
                del loss
                engine.step()
            engine.destroy()
            del engine, model
    return (kept[3] - kept[1]) / 2
