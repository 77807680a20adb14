# SPDX-License-Identifier: Apache-2.0
"""Each tutorial can be followed from its first line to its last, and its commands print what it shows."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.pages import FOLLOWED, Reader, blocks_of, missing
from tests.scripts import ROOT

pytestmark = pytest.mark.long

TUTORIALS = {Path(page).stem: text for page, text in FOLLOWED.items()}


def test_there_is_a_tutorial_of_each_kind() -> None:
    assert set(TUTORIALS) >= {"install", "qwen3", "planning", "monitor", "extend", "checkpoints"}


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_has_commands_and_shows_what_they_print(name: str) -> None:
    languages = [language for language, _ in blocks_of(TUTORIALS[name])]
    assert "sh" in languages
    assert "text" in languages[languages.index("sh") :]


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
    paths = os.pathsep.join((str(ROOT), str(ROOT / "examples" / "on_cpu")))
    Reader(tmp_path, {"PYTHONPATH": paths, "ACCELERATE_USE_DEEPSPEED": "true"}).follow(TUTORIALS["qwen3"])
    saved, exported = (load_file(tmp_path / each / "model.safetensors") for each in ("out", "exported"))
    assert saved.keys() == exported.keys()
    assert [name for name, each in saved.items() if not torch.equal(each, exported[name].to(each.dtype))] == []


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
