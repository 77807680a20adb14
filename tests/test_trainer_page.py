# SPDX-License-Identifier: Apache-2.0
"""The recipes of docs/trainer.md train as they stand, and print what it shows.

On two ranks of a CPU, with a small model under the name of the large one.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from pydoc_data.topics import topics

import pytest

pytest.importorskip("trl")

from tests.pages import PAGES, blocks_of, files_of, missing
from tests.scripts import ROOT, launch

pytestmark = pytest.mark.long

PAGE = PAGES["docs/trainer.md"]
RECIPES = files_of(PAGE)
SHOWN = {
    found[1]: found[2]
    for language, content in blocks_of(PAGE)
    if language == "console"
    and (found := re.fullmatch(r"\$ deepspeed --module ds_fsmoe.run (\w+\.py)\n(.*)", content, re.DOTALL))
}
"""What the page shows of each script's output."""


def test_each_recipe_has_a_script_a_command_and_its_output() -> None:
    assert list(RECIPES) == list(SHOWN) == ["train.py", "loop.py", "sft.py", "dpo.py", "grpo.py"]
    assert all("is on for 2 MoE layer(s)" in each for each in SHOWN.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has the page's config and scripts, a model, and data."""
    import torch
    from transformers import AutoModelForCausalLM, ByT5Tokenizer, Qwen3MoeConfig

    folder = tmp_path_factory.mktemp("recipes")
    (name,) = {found for each in RECIPES.values() for found in re.findall(r'"(Qwen/[^"]+)"', each)}
    torch.manual_seed(0)
    tokenizer = ByT5Tokenizer(extra_ids=0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    words = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "eos_token_id": 1}
    config = Qwen3MoeConfig(**sizes, **heads, **words, num_experts=8, num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)
    texts = [each[:180] for each in topics.values() if len(each) > 180][:64]
    for file, rows in {
        "texts.jsonl": [{"text": each} for each in texts],
        "sft.jsonl": [{"prompt": each[:60], "completion": each[60:120]} for each in texts],
        "dpo.jsonl": [{"prompt": each[:60], "chosen": each[60:120], "rejected": each[120:]} for each in texts],
        "grpo.jsonl": [{"prompt": each[:40]} for each in texts],
    }.items():
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (config_block,) = (content for language, content in blocks_of(PAGE) if language == "json")
    (folder / "ds_config.json").write_text(config_block)
    for file, script in RECIPES.items():
        (folder / file).write_text(script)
    return folder


@pytest.mark.daily("recipes", 1)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_and_prints_what_the_page_shows(name: str, folder: Path) -> None:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "examples" / "on_cpu")))
    variables = {"PYTHONPATH": paths, "ACCELERATE_USE_DEEPSPEED": "true", "HF_HUB_OFFLINE": "1"}
    printed = launch(folder, "--module", "ds_fsmoe.run", name, **variables)
    assert missing(SHOWN[name], printed) == [], printed[-3000:]
    assert list(folder.glob(f"out-{'trainer' if name == 'train.py' else Path(name).stem}/*.safetensors"))
