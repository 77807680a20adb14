# SPDX-License-Identifier: Apache-2.0
"""Trains with LLaMA-Factory's own command, unmodified, with and without DS_FSMOE=1, and compares the losses.

``make test-clients`` makes the environment first, since LLaMA-Factory pins older versions than the tests use. Each
of the families, made tiny, is trained on two ranks of this machine's CPUs:

    .venv-llamafactory/bin/python tools/try_llamafactory.py [mixtral:2 deepseek_v3:3 ...]    family:ZeRO stage
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = ["mixtral:2", "qwen3_moe:2", "glm4_moe:3", "deepseek_v3:3"]
SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 16, "moe_intermediate_size": 16, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 64, "pad_token_id": 0},
    **{"bos_token_id": 1, "eos_token_id": 2, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4},
    **{"num_experts_per_tok": 2, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
TRAINING: dict[str, Any] = {
    **{"model_name_or_path": "model", "stage": "sft", "do_train": True, "finetuning_type": "full"},
    **{"deepspeed": "ds.json", "dataset_dir": ".", "dataset": "sums", "template": "empty", "cutoff_len": 64},
    **{"per_device_train_batch_size": 2, "learning_rate": 1e-2, "max_steps": 6, "logging_steps": 1},
    **{"save_strategy": "no", "overwrite_output_dir": True, "report_to": "none", "bf16": False},
}
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789+= "


def write_files(folder: Path, family: str, stage: int) -> None:
    """Write a tiny model with a tokenizer of letters, data, and the two configs."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *LETTERS])}
    letters = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=letters, **names).save_pretrained(folder / "model")
    known = AutoConfig.for_model(family)
    sizes = SIZES | (LATENT | {"head_dim": 4} if hasattr(known, "kv_lora_rank") else {})
    config = AutoConfig.for_model(family, **{key: value for key, value in sizes.items() if hasattr(known, key)})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    data = [{"instruction": f"add {i} + {i % 7}", "input": "", "output": f"= {i + i % 7}"} for i in range(64)]
    ds_config = json.loads((ROOT / "examples" / "hf" / "zero2.json").read_text())
    ds_config["zero_optimization"]["stage"] = stage
    for name, written in {
        "data.json": data,
        "dataset_info.json": {"sums": {"file_name": "data.json"}},
        "ds.json": ds_config,
        "train.yaml": TRAINING | {"output_dir": "out"},  # JSON is YAML
    }.items():
        (folder / name).write_text(json.dumps(written))


def train(folder: Path, variables: dict[str, str]) -> tuple[list[str], str]:
    """The losses and norms that LLaMA-Factory printed, and all that it printed."""
    here = Path(sys.executable).parent
    environment = {name: value for name, value in os.environ.items() if name != "DS_FSMOE"} | variables
    environment |= {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment |= {"PATH": f"{here}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(folder)
    done = subprocess.run(
        ["llamafactory-cli", "train", "train.yaml"], cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"llamafactory-cli train ended with {done.returncode}:\n{done.stdout}\n{done.stderr[-6000:]}")
    return re.findall(r"'loss': '?([\d.]+)'?, 'grad_norm': '?([\d.]+)", done.stdout), done.stdout


def main() -> None:
    shim = (ROOT / "examples" / "on_cpu" / "sitecustomize.py").read_text()
    # LLaMA-Factory makes its model before there is a process group, and Accelerate on a CPU would never make one.
    shim += "\n    import deepspeed\n\n    deepspeed.init_distributed()\n"
    failed = []
    for each in sys.argv[1:] or FAMILIES:
        family, stage = each.split(":")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "sitecustomize.py").write_text(shim)
            write_files(folder, family, int(stage))
            stock, said_by_stock = train(folder, {})
            ours, said = train(folder, {"DS_FSMOE": "1"})
        is_on = "is on for 2 MoE layer(s)" in said and "[ds_fsmoe]" not in said_by_stock
        print(
            f"{family}, ZeRO {stage}: (loss, norm) of stock {stock}\n  with DS_FSMOE=1 {ours}; on: {is_on}", flush=True
        )
        if not is_on or len(stock) != TRAINING["max_steps"] or ours != stock:
            failed.append(each)
    if failed:
        raise SystemExit(f"not alike: {', '.join(failed)}")
    print("alike")


if __name__ == "__main__":
    main()
