# SPDX-License-Identifier: Apache-2.0
"""Trains a model by preferences with TRL's DPOTrainer, whose reference follows it. Nothing in it is ours.

deepspeed --num_accelerators 2 --module ds_fsmoe.run examples/hf/dpo.py --model_name_or_path models/small \\
    --deepspeed examples/hf/zero3.json --output_dir out-dpo --max_steps 4 --sync_ref_model=true --ref_model_sync_steps 2
"""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import DPOConfig, DPOTrainer, ModelConfig, TrlParser


def main() -> None:
    args, of_model = TrlParser((DPOConfig, ModelConfig)).parse_args_and_config()
    set_seed(args.seed)
    texts = [each[:150] for each in topics.values() if len(each) > 150][:32]
    rows = [{"prompt": each[:50], "chosen": each[50:100], "rejected": each[100:]} for each in texts]
    models = [AutoModelForCausalLM.from_pretrained(of_model.model_name_or_path) for _ in range(2)]
    trainer = DPOTrainer(
        model=models[0],
        ref_model=models[1],
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(of_model.model_name_or_path),
    )
    trainer.train()
    trainer.save_model()
    reference = trainer.accelerator.get_state_dict(trainer.ref_model)
    if trainer.is_world_process_zero():
        torch.save(reference, Path(args.output_dir, "reference.pt"))
        history = [{key: each[key] for key in ("step", "loss") if key in each} for each in trainer.state.log_history]
        Path(args.output_dir, "history.json").write_text(json.dumps(history))


if __name__ == "__main__":
    main()
