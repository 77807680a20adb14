# SPDX-License-Identifier: Apache-2.0
"""Trains a model in a loop of one's own with Accelerate. One line is ours.

deepspeed --num_accelerators 2 examples/hf/accelerate_loop.py --model models/small --deepspeed examples/hf/zero2.json
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from transformers import AutoModelForCausalLM, AutoTokenizer, get_linear_schedule_with_warmup

import ds_fsmoe

LENGTH, STEPS = 32, 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--deepspeed", help="a DeepSpeed config; none: one process without DeepSpeed")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a process (%(default)s)")
    parser.add_argument("--save", help="folder for the model that was trained")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    args = parser.parse_args()

    ds_fsmoe.install()
    plugin = DeepSpeedPlugin(hf_ds_config=args.deepspeed) if args.deepspeed else None
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=1)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Accelerate takes a step of the scheduler for each process.
    steps = (each * accelerator.num_processes for each in (2, STEPS))
    scheduler = get_linear_schedule_with_warmup(optimizer, *steps)
    content = AutoTokenizer.from_pretrained(args.model)("\n".join(topics.values())[:20_000])["input_ids"]
    rows = torch.tensor(content[: len(content) // LENGTH * LENGTH]).view(-1, LENGTH)
    batches = torch.utils.data.DataLoader(rows, batch_size=args.batch, shuffle=False)
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)
    for step, inputs in zip(range(1, STEPS + 1), batches, strict=False):
        with accelerator.accumulate(model):
            loss = model(input_ids=inputs, labels=inputs).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean")
        accelerator.print(f"step {step}: loss {mean.item():.6f}")
    if args.save:
        weights = accelerator.get_state_dict(model)
        whole = accelerator.unwrap_model(model)
        whole.save_pretrained(args.save, state_dict=weights, is_main_process=accelerator.is_main_process)


if __name__ == "__main__":
    main()
