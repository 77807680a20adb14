# SPDX-License-Identifier: Apache-2.0
"""Makes a small OLMoE or Qwen3-MoE with random weights, and a tokenizer of bytes, in a folder, as ``from_pretrained``
reads them.

python examples/hf/make_model.py models/small
python examples/hf/make_model.py models/small-qwen3 --family qwen3_moe
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, ByT5Tokenizer, OlmoeConfig, Qwen3MoeConfig

FAMILIES = {
    "olmoe": (OlmoeConfig, {}),
    "qwen3_moe": (Qwen3MoeConfig, {"moe_intermediate_size": 16, "num_key_value_heads": 2, "head_dim": 8}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--family", choices=FAMILIES, default="olmoe")
    args = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = ByT5Tokenizer(extra_ids=0)
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    of_experts = {"num_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False}
    config_class, more = FAMILIES[args.family]
    words = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "eos_token_id": 1}
    AutoModelForCausalLM.from_config(config_class(**sizes, **of_experts, **words, **more)).save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)


if __name__ == "__main__":
    main()
