# SPDX-License-Identifier: Apache-2.0
"""Makes a small OLMoE with random weights, and a tokenizer of bytes, in a folder, as ``from_pretrained`` reads them.

python examples/hf/make_model.py models/small
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, ByT5Tokenizer, OlmoeConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    folder = parser.parse_args().folder
    torch.manual_seed(0)
    tokenizer = ByT5Tokenizer(extra_ids=0)
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    of_experts = {"num_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False}
    words = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "eos_token_id": 1}
    AutoModelForCausalLM.from_config(OlmoeConfig(**sizes, **of_experts, **words)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
