# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a model on texts with TRL's SFTTrainer. Nothing in it is ours.

deepspeed --num_accelerators 2 --module ds_fsmoe.run examples/hf/sft.py --model_name_or_path models/small \\
    --deepspeed examples/hf/zero3.json --output_dir out-sft --max_steps 4
"""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics

from datasets import Dataset
from transformers import AutoTokenizer, set_seed
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config


def main() -> None:
    args, of_model = TrlParser((SFTConfig, ModelConfig)).parse_args_and_config()
    set_seed(args.seed)
    data = Dataset.from_list([{"text": each[:200]} for each in topics.values()]).select(range(32))
    trainer = SFTTrainer(
        model=of_model.model_name_or_path,
        args=args,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(of_model.model_name_or_path),
        peft_config=get_peft_config(of_model),
    )
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        history = [{key: each[key] for key in ("step", "loss") if key in each} for each in trainer.state.log_history]
        Path(args.output_dir, "history.json").write_text(json.dumps(history))


if __name__ == "__main__":
    main()
