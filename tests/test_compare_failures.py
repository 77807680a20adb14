# SPDX-License-Identifier: Apache-2.0
"""What ``compare`` says of trainings that fail, and how it keeps them apart from other jobs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ds_fsmoe.cli import main
from ds_fsmoe.files.whole_files import OF_COMPARISON, Ownership
from ds_fsmoe.offline.commands.training_command import first_error, with_free_port

OF_OTHERS = (
    "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4190. This is "
    "typically caused by a remote worker crashing. Check the logs of the remote worker before reporting an error. GLHF!"
)


def traceback(error: str, where: str = "train.py") -> list[str]:
    return ["Traceback (most recent call last):", f'  File "{where}", line 1, in <module>', "    train()", error]


def found_in(folder: Path, lines: list[str], since_s: float = 0.0) -> str:
    (folder / "log.txt").write_text("\n".join(lines))
    found = first_error(folder / "log.txt", folder / "fsmoe_reports", since_s)
    return "" if found is None else f"{found.of}: {found.lines[-1]}"


ONE, OTHER = traceback("ValueError: mine", "one.py"), traceback(OF_OTHERS, "other.py")
RESET = "torch.distributed.DistNetworkError: Connection reset by peer"
IN_USE = "torch.distributed.DistNetworkError: The server socket has failed to listen: EADDRINUSE"
CHAIN = [*traceback("KeyError: 'x'"), "", "The above exception was the direct cause of the following exception:", ""]
MINE = "ValueError: mine"


def of_rank(rank: int, lines: list[str]) -> list[str]:
    return [f"[rank{rank}]: {each}" for each in lines]


def in_turns(*of_ranks: list[str]) -> list[str]:
    return [line for lines in zip(*of_ranks, strict=True) for line in lines]


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([*OTHER, "a line", *ONE, "more"], f"log.txt: {MINE}"),
        (of_rank(1, OTHER) + of_rank(0, ONE), f"rank 0, in log.txt: {MINE}"),
        (in_turns(of_rank(1, OTHER), of_rank(0, ONE)), f"rank 0, in log.txt: {MINE}"),
        (in_turns(ONE, OTHER), f"log.txt: {MINE}"),
        (in_turns(OTHER, ONE), f"log.txt: {MINE}"),
        (traceback(RESET) + traceback(IN_USE), f"log.txt: {IN_USE}"),
        ([*CHAIN, *traceback("ConfigError: must be y")], "log.txt: ConfigError: must be y"),
        (["exits with return code = -9"], ""),
    ],
    ids=["after", "by rank", "in turns", "apart by nothing", "other first", "address in use", "chain", "none"],
)
def test_the_error_of_the_rank_that_died_is_told_and_not_what_others_saw_of_it(
    lines: list[str], error: str, tmp_path: Path
) -> None:
    found = found_in(tmp_path, lines)
    assert found.replace(f"{tmp_path}{os.sep}", "") == error


def test_a_cause_that_stands_in_a_report_alone_is_told_unless_it_is_of_an_earlier_job(tmp_path: Path) -> None:
    reports = tmp_path / "fsmoe_reports"
    reports.mkdir()
    cause = "ConfigError: fsmoe.num_chunks = 0: must be 1 or more"
    (reports / "rank0.txt").write_text(
        "\n".join(["ds_fsmoe: what rank 0 was doing", "error:", *traceback(cause), "===="])
    )
    assert found_in(tmp_path, traceback(OF_OTHERS)) == f"rank 0, in {reports / 'rank0.txt'}: {cause}"
    assert found_in(tmp_path, traceback(OF_OTHERS), 1e12) == f"{tmp_path / 'log.txt'}: {OF_OTHERS}"


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("deepspeed PORT train.py", "--master_port 7"),
        ("deepspeed PORT --module ds_fsmoe.run train.py --master_port 1", "--master_port 7"),
        ("deepspeed --master_port=29 train.py", ""),
        ("torchrun PORT --nproc-per-node 2 train.py", "--master-port 7"),
        ("torchrun --standalone train.py", ""),
        ("torchrun --nnodes=2 train.py", ""),
        ("python -m torch.distributed.run PORT train.py", "--master-port 7"),
        ("accelerate launch PORT -m ds_fsmoe.run train.py", "--main_process_port 7"),
        ("accelerate launch --config_file c.yaml train.py", ""),
        ("srun -n 2 deepspeed PORT train.py", "--master_port 7"),
        ("conda run -n deepspeed deepspeed PORT train.py", "--master_port 7"),
        ("conda run -n deepspeed python train.py", ""),
        ("python train.py --output_dir out/deepspeed", ""),
        ("python train.py", ""),
    ],
)
def test_a_launcher_gets_a_free_port_unless_the_port_is_the_user_s(command: str, option: str) -> None:
    assert with_free_port(command.replace("PORT ", "").split(), 7) == command.replace("PORT", option).split()


FAILS = """
import pathlib, sys
print("my secret is", sys.argv[3], pathlib.Path(sys.argv[2]).read_text())
raise RuntimeError("no more memory")
"""


def test_a_training_that_fails_leaves_no_secret_and_its_error_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script, config = tmp_path / "train.py", tmp_path / "ds_config.json"
    script.write_text(FAILS)
    config.write_text(json.dumps({"comet": {"api_key": "first-secret"}, "fsmoe": {"enabled": True}}))
    command = [sys.executable, str(script), "--", str(config), "hf_token=second-secret"]
    assert main(["compare", "--out", "out", "--", *command]) == 1
    said = capsys.readouterr().err
    assert "the first error" in said
    assert "RuntimeError: no more memory" in said
    texts = {each.name: each.read_text() for each in (tmp_path / "out").rglob("*") if each.is_file()}
    assert [name for name, text in texts.items() if "-secret" in text] == []
    assert "my secret is hf_token=(hidden)" in texts["log.txt"]
    assert '"api_key": "(hidden)"' in texts["log.txt"]


def test_two_comparisons_in_one_folder_are_refused_and_an_owner_that_was_killed_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (config := tmp_path / "ds_config.json").write_text('{"fsmoe": {"enabled": true}}')
    (out := tmp_path / "out").mkdir()
    owner = Ownership(out, name=OF_COMPARISON)
    assert main(["compare", "--out", str(out), "--", "python", str(config)]) == 2
    assert f"process {os.getpid()} on {socket.gethostname()} (this one) writes there" in capsys.readouterr().err
    owner.release()
    code = "import os, pathlib, sys; from ds_fsmoe.files.whole_files import OF_COMPARISON, Ownership; "
    code += "held = Ownership(pathlib.Path(sys.argv[1]), name=OF_COMPARISON); os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", code, str(out)], check=False)
    assert done.returncode == -9
    Ownership(out, name=OF_COMPARISON).release()
