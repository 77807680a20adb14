# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a model on a text with transformers' Trainer. Nothing in it is ours, and nothing knows of experts but the
names that LoRA is given.

deepspeed --num_accelerators 2 --module ds_fsmoe.run examples/hf/trainer.py --model models/small \\
    --deepspeed examples/hf/zero3.json --output_dir out --max_steps 4
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments, set_seed

LENGTH = 32
ATTENTION = ["q_proj", "v_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@dataclass
class Arguments:
    """What the script adds to Trainer's arguments."""

    model: str
    lora: str = ""
    """"attention" or "experts"; all weights are trained without it."""
    resume: bool = False


def texts(tokenizer: object, count: int) -> Dataset:
    """Return windows of the Python language reference."""
    content = tokenizer("\n".join(topics.values())[: count * LENGTH * 4])["input_ids"]
    rows = [content[start : start + LENGTH] for start in range(0, count * LENGTH, LENGTH)]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def main() -> None:
    own, args = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(own.model)
    if own.lora:
        from peft import LoraConfig, get_peft_model

        on_experts = EXPERTS if own.lora == "experts" else None
        lora = LoraConfig(r=4, lora_alpha=8, target_modules=ATTENTION, target_parameters=on_experts)
        model = get_peft_model(model, lora)
    tokenizer = AutoTokenizer.from_pretrained(own.model)
    data = texts(tokenizer, 64)
    few = data.select(range(8))
    trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=few, processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=own.resume)
    trainer.save_model()
    if trainer.is_world_process_zero():
        kept = ("step", "loss", "grad_norm", "eval_loss")
        history = [{key: each[key] for key in kept if key in each} for each in trainer.state.log_history]
        Path(args.output_dir, "history.json").write_text(json.dumps(history))


if __name__ == "__main__":
    main()
