# SPDX-License-Identifier: Apache-2.0
"""Each tutorial can be followed from its first line to its last, as can recipes, and commands print what it shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from safetensors.torch import load_file

from tests.pages import FOLLOWED, PAGES, Reader, blocks_of, files_of, missing
from tests.scripts import ROOT, launch

pytestmark = pytest.mark.long

ON_CPU = {
    "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "examples" / "on_cpu"))),
    "ACCELERATE_USE_DEEPSPEED": "true",
}
TUTORIALS = {Path(page).stem: text for page, text in FOLLOWED.items()}


def test_a_tutorial_of_each_kind_has_commands_and_shows_what_they_print() -> None:
    assert set(TUTORIALS) >= {"install", "qwen3", "planning", "monitor", "extend", "checkpoints"}
    for text in TUTORIALS.values():
        languages = [language for language, _ in blocks_of(text)]
        assert "text" in languages[languages.index("sh") :]


@pytest.mark.daily("pages", 1)
def test_a_gate_of_ones_own_is_checked_and_trains(tmp_path: Path) -> None:
    Reader(tmp_path).follow(TUTORIALS["extend"])


@pytest.mark.daily("pages", 1)
@pytest.mark.parametrize("name", ["install", "checkpoints", "planning", "monitor"])
def test_a_tutorial_does_what_it_says(name: str, tmp_path: Path) -> None:
    Reader(tmp_path).follow(TUTORIALS[name])


@pytest.mark.daily("pages", 1)
def test_qwen3_is_fine_tuned_saved_and_exported_with_a_tiny_model_under_its_name(tmp_path: Path) -> None:
    """The script as the page prints it, its config with torch's own AdamW, and 32 lines to train on."""
    (config,) = (json.loads(content) for language, content in blocks_of(TUTORIALS["qwen3"]) if language == "json")
    config["optimizer"]["params"]["torch_adam"] = True
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"text": "word " * (3 + each)}) + "\n" for each in range(32))
    )
    Reader(tmp_path, ON_CPU).follow(TUTORIALS["qwen3"])
    saved, exported = (load_file(tmp_path / each / "model.safetensors") for each in ("out", "exported"))
    assert saved.keys() == exported.keys()
    assert [name for name, each in saved.items() if not torch.equal(each, exported[name].to(each.dtype))] == []


# ---- the recipes of docs/trainer.md

TRAINER = PAGES["docs/trainer.md"]
RECIPES = files_of(TRAINER)
SHOWN = {
    found[1]: found[2]
    for language, content in blocks_of(TRAINER)
    if language == "console"
    and (found := re.fullmatch(r"\$ deepspeed --module ds_fsmoe.run (\w+\.py)\n(.*)", content, re.DOTALL))
}
"""What the page shows of each script's output."""


def test_each_recipe_has_a_script_a_command_and_its_output() -> None:
    assert list(RECIPES) == list(SHOWN) == ["train.py", "loop.py", "sft.py", "dpo.py", "grpo.py"]
    assert all("is on for 2 MoE layer(s)" in each for each in SHOWN.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has the page's config and scripts, a small model under the name of the large one, and data."""
    pytest.importorskip("trl")
    folder = tmp_path_factory.mktemp("recipes")
    (name,) = {found for each in RECIPES.values() for found in re.findall(r'"(Qwen/[^"]+)"', each)}
    make = [sys.executable, ROOT / "examples" / "hf" / "make_model.py", folder / name, "--family", "qwen3_moe"]
    subprocess.run(make, check=True, timeout=600)
    texts = [each[:180] for each in topics.values() if len(each) > 180][:64]
    for file, rows in {
        "texts.jsonl": [{"text": each} for each in texts],
        "sft.jsonl": [{"prompt": each[:60], "completion": each[60:120]} for each in texts],
        "dpo.jsonl": [{"prompt": each[:60], "chosen": each[60:120], "rejected": each[120:]} for each in texts],
        "grpo.jsonl": [{"prompt": each[:40]} for each in texts],
    }.items():
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (config_block,) = (content for language, content in blocks_of(TRAINER) if language == "json")
    (folder / "ds_config.json").write_text(config_block)
    for file, script in RECIPES.items():
        (folder / file).write_text(script)
    return folder


@pytest.mark.daily("pages", 1)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_and_prints_what_the_page_shows(name: str, folder: Path) -> None:
    printed = launch(folder, "--module", "ds_fsmoe.run", name, **ON_CPU, HF_HUB_OFFLINE="1")
    assert missing(SHOWN[name], printed) == [], printed[-3000:]
    assert list(folder.glob(f"out-{'trainer' if name == 'train.py' else Path(name).stem}/*.safetensors"))


# ---- what the reader would notice


def test_a_shown_line_that_was_not_printed_is_found_whatever_its_numbers() -> None:
    printed = "[INFO] step 100: loss 1.3233, by MOELayer\n  a   table   7\n"
    assert missing("step 1: loss 2.5, by MOELayer\n...\na table 8\n", printed) == []
    assert missing("step 1: ... by MOELayer\n", printed) == []
    assert missing("step 1: loss 2.5, by FSMoELayer\n", printed) == ["step 1: loss 2.5, by FSMoELayer"]


def test_a_command_that_fails_and_one_that_should_and_does_not_are_noticed(tmp_path: Path) -> None:
    for number, line in enumerate(("python -c 'raise SystemExit(3)'", "python -c pass    # ends with an error")):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(AssertionError, match="exit status"):
            Reader(folder).follow(f"```sh\n{line}\n```\n")
