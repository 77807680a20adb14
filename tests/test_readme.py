# SPDX-License-Identifier: Apache-2.0
"""What the README shows is true: its code runs, its files and errors exist."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ds_fsmoe.cli import COMMANDS
from ds_fsmoe.config import ConfigError, read_block

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_code_block_runs(number: int) -> None:
    exec(compile(BLOCKS[number], f"README.md, python block {number}", "exec"), {"__name__": "readme"})


def test_the_first_lines_say_that_the_block_alone_does_nothing() -> None:
    assert 'The `"fsmoe"` block in `ds_config.json` does nothing by itself' in "\n".join(README.splitlines()[:8])


def test_every_path_of_the_tree_exists() -> None:
    tree = README.split("## Where things are")[1].split("```")[1]
    for line in tree.strip().splitlines():
        folder = "ds_fsmoe/" if line.startswith("  ") else ""
        names = re.split(r"\s{2,}|\s(?=[a-z]+ )", line.strip(), maxsplit=1)[0]
        for name in re.split(r",\s|\s", names):
            assert (ROOT / folder / name).exists(), name


@pytest.mark.parametrize(
    ("block", "shown"),
    [
        ({"gat": {}}, "fsmoe.gat: unknown key; did you mean 'gate'? The keys are enabled, schedule, gate, order, "),
        (
            {"schedule": "tutel", "pipeline_degree": {"forward": 2, "backward": 3}},
            "fsmoe.pipeline_degree = 2 forward and 3 backward: must be equal with fsmoe.schedule = ",
        ),
        (
            {"autotune": {"retune_on_drift": True}},
            "fsmoe.autotune.retune_on_drift = true: ",
        ),
    ],
)
def test_an_error_reads_as_the_readme_shows_it(block: dict, shown: str) -> None:
    assert shown in README
    with pytest.raises(ConfigError) as caught:
        read_block({"fsmoe": {"enabled": True} | block})
    assert str(caught.value).startswith(shown)


def test_every_field_of_the_block_is_in_the_readme() -> None:
    from ds_fsmoe.blocks import FSMoEBlock, GateBlock

    for name in [*FSMoEBlock.model_fields, *GateBlock.model_fields]:
        assert f"`{name}`" in README, name


# ---- commands

LINES = [
    line.split("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
    for line in block.splitlines()
    if line.split("#")[0].strip()
]
RUN_BY_CI = (ROOT / ".ci" / "run").read_text()
TESTS = "\n".join(file.read_text() for file in sorted((ROOT / "tests").rglob("test_*.py")))
MEASURE_FOR_MINUTES = tuple(
    f"benchmarks/bench_{name}.py"
    for name in (
        "pipeline",
        "gradients",
        "wire",
        "alltoall",
        "autotune",
        "unchunked",
        "ops",
        "experts",
        "planner",
        "metrics",
    )
)
TOO_LONG = ("make soak", "make bench", "make cluster-demo")
"""An hour and more, or minutes of a bed: what they call has tests of its own."""


def test_the_readme_has_commands() -> None:
    assert len(LINES) > 30


@pytest.mark.parametrize("line", LINES)
def test_a_command_is_one_that_ci_runs(line: str) -> None:
    words = shlex.split(line)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert line in TOO_LONG or line in RUN_BY_CI
    elif words[0] == "ds_fsmoe" or "ds_fsmoe" in words[:4]:
        parse_as_command(words[words.index("ds_fsmoe") + 1 :])
        assert f'["{words[words.index("ds_fsmoe") + 1]}"' in TESTS or f'main("{words[1]}"' in TESTS, words
    else:
        scripts = [word for word in words if word.endswith(".py")]
        scripts += [f"{word.replace('.', '/')}.py" for word in words if word.startswith("benchmarks.")]
        assert scripts
        for script in scripts:
            assert (ROOT / script).is_file()
            used = re.search(rf"\b{Path(script).stem}\b", TESTS)
            assert used or script in MEASURE_FOR_MINUTES, f"no test runs {script}"


def test_benchmarks_that_take_minutes_can_at_least_be_asked_for_help() -> None:
    code = "import runpy, sys\nfor script in sys.argv[1:]:\n    sys.argv = [script, '--help']\n"
    code += "    try: runpy.run_path(script, run_name='__main__')\n"
    code += "    except SystemExit as end: assert not end.code, script\n"
    command = [sys.executable, "-c", code, *MEASURE_FOR_MINUTES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("--help") == len(MEASURE_FOR_MINUTES)


def parse_as_command(arguments: list[str]) -> None:
    """Its words are those that the command takes."""
    module = importlib.import_module(COMMANDS[arguments[0]])
    parser = argparse.ArgumentParser(exit_on_error=False)
    module.add_arguments(parser)
    parser.parse_args(arguments[1:])


# ---- what it says of errors

NOT_OURS = (
    "Connection closed by peer",
    "NCCL error",
    "fsmoe_reports/rank",
    "not found in kwargs",
    "fsmoe",
    "_CanRecordRegistry.get() takes 2 positional arguments",
)
SOURCES = "\n".join(file.read_text() for file in (ROOT / "ds_fsmoe").rglob("*.py"))


def test_every_error_it_explains_is_one_that_is_raised() -> None:
    section = README.split("## When it says")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    texts = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    assert len(texts) > 15
    joined = re.sub(r'"\s*\n\s*f?"', "", SOURCES)
    for text in texts:
        assert text in NOT_OURS or text in joined, text


def test_blocks_of_json_are_configs() -> None:
    for block in re.findall(r"```json\n(.*?)```", README, flags=re.DOTALL):
        read_block(json.loads(block))


def test_every_metric_it_lists_is_one_that_is_written() -> None:
    table = README.split("under `fsmoe/`:")[1].split("The rows of")[0]
    names = re.findall(
        r"`([a-z_/]+)`", "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    )
    assert len(names) > 10
    for name in names:
        assert f'"{name}"' in SOURCES or name in ("busy/compute", "busy/intra", "busy/inter"), name
