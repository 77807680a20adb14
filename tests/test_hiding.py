# SPDX-License-Identifier: Apache-2.0
"""Pages of runs are shown around: what may be secret is in none of their files, however it is spelled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_fsmoe.cli import main
from ds_fsmoe.files.hiding import HIDDEN, command_of, config_of, secrets_of, text_of, without
from ds_fsmoe.files.runs import RUN, STEPS, read_run

# In no file of this repository but this one, and nothing that a rule could know by its look.
SECRET = "xq7Zv-pL0"

NAMES = (
    *("wandb_key", "secret-key", "hftoken", "hfToken", "HFToken", "tokens", "auth"),
    *("bearer", "pass", "pwd", "passphrase", "openai-key", "api_key"),
)
COMMANDS = [
    *([f"--{name}", SECRET] for name in NAMES),
    *([f"HF_TOKEN={SECRET}"], [f"++model.auth.hfToken={SECRET}"], [f"MY_SETTING={SECRET}"]),
    *(["--config", f'{{"hf_token": "{SECRET}"}}'], [f'--config={{"a": [{{"hf_token": "{SECRET}"}}]}}']),
    *([f"model={{token: {SECRET}, layers: 2}}"], [f"{{'hf_token': '{SECRET}'}}"]),
    *([f"--wandb-key={SECRET}"], ["--token", f"-{SECRET}"], ["-token", SECRET]),
    *([f"https://user:{SECRET}@host/path"], ["--url", f"https://{SECRET}@host/path"]),
    *([f"--store=redis://:{SECRET}@host:6379/0"], [f"https://host/path?access_token={SECRET}&n=1"]),
    *(["--note", f"see: token={SECRET}"], ["--header", f"Authorization: Bearer {SECRET}"]),
    *(["env", f"AWS_SECRET_ACCESS_KEY={SECRET}", "train.py"], ["--options", f'["--hf-token", "{SECRET}"]']),
    ["--token=" + SECRET + " and more " + SECRET],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda each: " ".join(each)[:40])
def test_a_command_is_told_without_its_secrets(arguments: list[str]) -> None:
    told = command_of(["python", "train.py", *arguments, "--lr", "0.1"])
    assert SECRET not in " ".join(told)
    assert HIDDEN in " ".join(told)
    assert told[:2] + told[-2:] == ["python", "train.py", "--lr", "0.1"]
    assert command_of(told) == told, "what was hidden once stays as it is"


def test_code_on_the_command_line_and_secrets_in_an_error_are_not_told() -> None:
    for option in (["-c", SECRET], [f"-c{SECRET}"], ["-u", "-c", SECRET], ["-X", "dev", "-Ic", SECRET]):
        told = command_of(["python", *option, "more"])
        assert SECRET not in " ".join(told)
        assert told[-1] == "more"
    told = text_of(f"HTTPError: 401 of https://me:{SECRET}@host: token={SECRET}, tried 3 times")
    assert told == f"HTTPError: 401 of https://{HIDDEN}@host: token={HIDDEN}, tried 3 times"


@pytest.mark.parametrize(
    "config",
    [
        *({name: SECRET} for name in ("secret_key", "hfToken", "HFToken", "authorization")),
        {"url": f"https://user:{SECRET}@host"},
        {"arguments": ["--hf-token", SECRET]},
        {"tokens": [SECRET, "other"]},
        {"job": [{"environment": {"OMP_NUM_THREADS": "1", "HF_TOKEN": SECRET}}]},
        {"text": json.dumps({"hf_token": SECRET})},
        {"pin": "hf_" + 3 * SECRET.replace("-", "")},
    ],
    ids=str,
)
def test_a_config_is_told_without_its_secrets_however_deep(config: dict[str, Any]) -> None:
    for given in (config, {"a": [{"b": config}]}):
        told = json.dumps(config_of(given))
        assert SECRET.replace("-", "") not in told.replace("-", "")
        assert HIDDEN in told


SHOWN = [
    ["--lr", "0.1", "--steps=3", "--tokenizer", "gpt2", "--max-tokens", "8", "--max_new_tokens=64"],
    ["--pad-token-id", "0", "trainer.optimizer.lr=1e-3", "+model.num_key_value_heads=8", "--use-auth=false"],
    ["--deepspeed_config", "ds.json", "--fsmoe", '{"enabled": true, "num_chunks": 2}', "hf_finetune_qwen3_moe_30b.py"],
    ["OMP_NUM_THREADS=4", "NCCL_DEBUG=INFO", "--url=https://host:8080/path?n=1", "s3://bucket/key", "C:\\data"],
    ["--password", "--steps", "3"],
    ["a token", "b"],
]


def test_what_is_no_secret_is_told_as_it_is() -> None:
    for arguments in SHOWN:
        command = ["python", "-u", "-m", "ds_fsmoe.run", *arguments]
        assert command_of(command) == command
    config = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        "fsmoe": {"gate": {"type": "switch"}, "num_chunks": {"forward": 2}, "record": {"dir": "runs/one"}},
        "env": {"OMP_NUM_THREADS": "1"},
        "a": [["tokens", 3], None, 1.5],
        "num_tokens": 4,
    }
    assert config_of(config) == config


def test_a_text_is_left_without_the_secrets_of_a_config_and_is_else_as_it_was() -> None:
    config = {"hf_token": 'a "quoted" one', "list": ["--key", "train"], "options": f'{{"key": "{SECRET}"}}'}
    found = secrets_of(config, config_of(config))
    assert found == {'a "quoted" one', 'a \\"quoted\\" one', SECRET}
    text = f"training {SECRET}: {SECRET}x {json.dumps(config['hf_token'])}"
    assert without(text, found) == f'training {HIDDEN}: {SECRET}x "{HIDDEN}"'
    assert without(text, set()) == text


SCRIPT = """
import sys
import torch
import ds_fsmoe

config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "comet": {"enabled": False, "api_key": "SECRET"},
    "fsmoe": {"enabled": False, "record": {"dir": sys.argv[1]}},
}
model = torch.nn.Linear(4, 4)
engine = ds_fsmoe.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
for _ in range(3):
    loss = engine(torch.ones(2, 4)).sum()
    engine.backward(loss)
    engine.step()
raise RuntimeError("https://me:SECRET@host")
"""


@pytest.mark.long
def test_no_file_of_a_run_or_of_its_report_has_a_secret(tmp_path: Path) -> None:
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT.replace("SECRET", SECRET))
    arguments = [each for of_case in COMMANDS for each in of_case]
    done = subprocess.run(
        [sys.executable, str(script), str(run), *arguments], capture_output=True, text=True, check=False, timeout=300
    )
    assert f"RuntimeError: https://me:{SECRET}@host" in done.stderr
    assert main(["report", str(run)]) == 0
    files = [each for each in run.rglob("*") if each.is_file()]
    assert {RUN, STEPS, "report.html"} <= {each.name for each in files}
    assert [each.name for each in files if SECRET in each.read_text("utf-8")] == []
    assert HIDDEN in read_run(run).facts["failed"]


def test_secrets_that_an_earlier_version_has_recorded_are_not_on_the_page(tmp_path: Path) -> None:
    facts = {"format": 1, "command": ["python", "train.py", f"HF_TOKEN={SECRET}"], "config": {"wandb_key": SECRET}}
    (tmp_path / RUN).write_text(json.dumps(facts))
    (tmp_path / STEPS).write_text('{"step": 1, "step_ms": 1.0}\n')
    assert main(["report", str(tmp_path)]) == 0
    assert SECRET not in (tmp_path / "report.html").read_text("utf-8")
