# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face MoE model in a plain training loop: a small OLMoE, made from its configuration, learns to write bytes.

deepspeed --num_accelerators 2 examples/hf_finetune.py --stage 3

The one line that is ours is ``ds_fsmoe.initialize`` in place of ``deepspeed.initialize``; ``--stock`` leaves it out,
and every rank then has all experts.
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
import torch.distributed as dist
from text_data import draw_batch, load_text, rank_generator
from transformers import AutoModelForCausalLM, OlmoeConfig

import ds_fsmoe

LENGTH = 64


def small_olmoe(seed: int) -> torch.nn.Module:
    """An OLMoE with 16 narrow experts, of which each byte takes 4."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    of_experts = {"num_experts": 16, "num_experts_per_tok": 4, "output_router_logits": True}
    words = {"vocab_size": 256, "pad_token_id": 0, "eos_token_id": 0, "max_position_embeddings": LENGTH}
    return AutoModelForCausalLM.from_config(OlmoeConfig(**sizes, **of_experts, **words))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="of ZeRO (%(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (%(default)s)")
    parser.add_argument("--chunks", default="auto", help='number of chunks, or "auto": measured (%(default)s)')
    parser.add_argument("--stock", action="store_true", help="DeepSpeed's own initialize")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    args = parser.parse_args()

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
        "zero_optimization": {"stage": args.stage},
        "steps_per_print": args.steps + 1,
        "fsmoe": {
            "enabled": not args.stock,
            "num_chunks": args.chunks if args.chunks == "auto" else int(args.chunks),
            "autotune": {"enabled": args.chunks == "auto" and not args.stock},
        },
    }
    model = small_olmoe(seed=1)
    initialize = deepspeed.initialize if args.stock else ds_fsmoe.initialize
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)

    text, generator = load_text(None, LENGTH), rank_generator(1, dist.get_rank())
    for step in range(1, args.steps + 1):
        inputs, _ = draw_batch(text.train_L, 4, LENGTH, generator)
        inputs = inputs.to(engine.device)
        loss = engine(input_ids=inputs, labels=inputs).loss
        engine.backward(loss)
        engine.step()
        if step % 10 == 0 or step == 1:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"step {step:3}: loss {mean.item() / dist.get_world_size():.4f}", flush=True)
    engine.destroy()


if __name__ == "__main__":
    main()
