# SPDX-License-Identifier: Apache-2.0
"""The recipe of docs/lora.md works as it is printed, with a tiny model under the name of the large one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("trl")
pytest.importorskip("peft")

from tests.pages import PAGES, Reader, blocks_of, files_of
from tests.scripts import ROOT

pytestmark = pytest.mark.daily("pages", 1)

PAGE = PAGES["docs/lora.md"]
FILES = files_of(PAGE)
(MODEL,) = re.findall(r'model="([^"]+)"', FILES["lora.py"])
# Accelerate and Trainer take CPUs for accelerators, bf16 among what they can.
SITE = f"""
import os, runpy
runpy.run_path({str(ROOT / "examples" / "on_cpu" / "sitecustomize.py")!r})
if "LOCAL_RANK" in os.environ:
    import transformers.training_args
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
"""


def prepare(folder: Path) -> Reader:
    """Write what a reader has besides the page: a model, samples; and the config, which the page shows."""
    make = [sys.executable, str(ROOT / "examples" / "hf" / "make_model.py"), MODEL]
    subprocess.run(make, cwd=folder, timeout=300, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    (folder / "ds_config.json").write_text(next(each for language, each in blocks_of(PAGE) if language == "json"))
    samples = ({"text": f"After {number} comes {number + 1}. " * 4} for number in range(4))
    (folder / "train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in samples))
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SITE)
    paths = os.pathsep.join((str(folder / "site"), str(ROOT)))
    return Reader(folder, {"PYTHONPATH": paths, "ACCELERATE_USE_DEEPSPEED": "true"})


def test_the_recipe_trains_saves_and_merges(tmp_path: Path) -> None:
    printed = prepare(tmp_path).follow(PAGE)
    trained = [each for line, each in printed.items() if line.startswith("deepspeed")]
    assert len(trained) == 2, "on one rank and on two"
    assert all("is on for 2 MoE layer(s)" in each for each in trained)
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    of_experts = {name: each.shape for name, each in adapter.items() if "experts" in name}
    assert len(of_experts) == 2 * 2 * 2, "A and B of two weights in two layers"
    # Of all experts, whatever the number of ranks: 8 of them, each with rank 16.
    assert all(16 * 8 in shape for shape in of_experts.values())
    base, merged = (load_file(tmp_path / each / "model.safetensors") for each in (MODEL, "merged"))
    assert base.keys() == merged.keys()
    changed = [name for name, each in base.items() if not torch.equal(each.to(merged[name].dtype), merged[name])]
    assert any("experts" in name for name in changed)
