# SPDX-License-Identifier: Apache-2.0
"""Merges an adapter into its model, in one process, and lets the result write. Nothing in it is ours.

python examples/hf/merge.py --model models/small --adapter out --to merged
"""

from __future__ import annotations

import argparse

from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the model that was adapted")
    parser.add_argument("--adapter", help="the adapter; without it the model is read as it is")
    parser.add_argument("--to", help="folder for the merged model")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model)
    if args.adapter:
        model = PeftModel.from_pretrained(model, args.adapter).merge_and_unload()
    if args.to:
        model.save_pretrained(args.to)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompt = tokenizer("The ", return_tensors="pt", add_special_tokens=False)
    written = model.generate(input_ids=prompt["input_ids"], max_new_tokens=12, do_sample=False)
    print(f"it writes: {tokenizer.decode(written[0])!r}")


if __name__ == "__main__":
    main()
