# SPDX-License-Identifier: Apache-2.0
"""What the README and the pages in docs/ show is true: their code runs, their files and errors exist."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ds_fsmoe.cli import COMMANDS
from ds_fsmoe.config.reading import ConfigError, read_block
from tests.pages import FILE, FOLLOWED, PAGES, files_of
from tests.scripts import on_ranks

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[1]


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, code) of every block of code in a language, those inside lists included."""
    pattern = re.compile(rf"^( *)```{language}\n(.*?)^\1```$", flags=re.DOTALL | re.MULTILINE)
    return [(page, textwrap.dedent(found[2])) for page, text in PAGES.items() for found in pattern.finditer(text)]


EXAMPLE = next(code for page, code in blocks("python") if page == "README.md")
SCRIPTS = (*FOLLOWED, "docs/trainer.md")
"""Pages whose scripts are files that tests/test_tutorials.py runs."""
CODE = [each for each in blocks("python") if each[1] != EXAMPLE and not (each[0] in SCRIPTS and FILE.match(each[1]))]


@pytest.mark.parametrize(("page", "code"), [pytest.param(*each, id=each[0]) for each in CODE])
def test_a_code_block_runs(page: str, code: str) -> None:
    exec(compile(code, page, "exec"), {"__name__": "page"})


def test_the_example_of_the_front_page_trains_with_the_autotuner(tmp_path: Path) -> None:
    """On two ranks, with a small model under the name of the large one, torch's own Adam, and made-up batches."""
    (name,) = re.findall(r'from_pretrained\("([^"]+)"\)', EXAMPLE)
    subprocess.run([sys.executable, ROOT / "examples/hf/make_model.py", name], cwd=tmp_path, timeout=300, check=True)
    config = json.loads(next(block for page, block in blocks("json") if page == "README.md"))
    assert config["fsmoe"] == {"enabled": True}
    config["optimizer"]["params"]["torch_adam"] = True
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    before = "import deepspeed, torch\ntorch.manual_seed(0)\n"
    before += "deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False\n"
    before += (
        "batches = [{key: words for key in ('input_ids', 'labels')} for words in torch.randint(3, 200, (90, 2, 32))]\n"
    )
    (tmp_path / "train.py").write_text(before + EXAMPLE)
    printed = on_ranks(tmp_path, str(tmp_path / "train.py"), HF_HUB_OFFLINE="1")
    assert "is on for 2 MoE layer(s)" in printed
    assert re.search(r"autotune: .*(DeepSpeed's schedule|trying)", printed), printed[-3000:]


def test_the_front_page_is_short_and_says_first_that_the_block_alone_does_nothing() -> None:
    lines = PAGES["README.md"].splitlines()
    assert 'the `"fsmoe"` block in `ds_config.json` does nothing by itself' in "\n".join(lines[:8])
    assert len([line for line in EXAMPLE.splitlines() if line]) == 8
    assert len(lines) <= 110
    assert max(len(line) for line in lines if not line.startswith(("|", "!"))) <= 132
    assert len(re.findall(r"!\[", PAGES["README.md"])) <= 1


def test_every_path_of_the_tree_exists() -> None:
    tree = PAGES["docs/architecture.md"].split("## Where things are")[1].split("```")[1]
    for line in tree.strip().splitlines():
        folder = "ds_fsmoe/" if line.startswith("  ") else ""
        names = re.split(r"\s{2,}|\s(?=[a-z]+ )", line.strip(), maxsplit=1)[0]
        for name in re.split(r",\s|\s", names):
            assert (ROOT / folder / name).exists(), name


@pytest.mark.parametrize(
    ("block", "shown"),
    [
        ({"gat": {}}, "fsmoe.gat: unknown key; did you mean 'gate'?"),
        (
            {"schedule": "tutel", "num_chunks": {"forward": 2, "backward": 3}},
            "fsmoe.num_chunks = 2 forward and 3 backward: must be equal with fsmoe.schedule = ",
        ),
        ({"autotune": {"enabled": False, "retune_on_drift": True}}, "fsmoe.autotune.retune_on_drift = true: "),
    ],
)
def test_an_error_reads_as_the_docs_show_it(block: dict, shown: str) -> None:
    assert shown in PAGES["docs/config.md"]
    with pytest.raises(ConfigError) as caught:
        read_block({"fsmoe": {"enabled": True} | block})
    assert str(caught.value).startswith(shown)


# ---- commands

LINES = [
    (page, line.split("#")[0].strip())
    for page, block in blocks("sh")
    for line in block.splitlines()
    if line.split("#")[0].strip()
]
RUN_BY_CI = (ROOT / ".ci" / "run").read_text()
TESTS = "\n".join(file.read_text() for file in sorted((ROOT / "tests").rglob("test_*.py")))
_CASES = "halves once levels placement inference fp8 ops hf split_plan"
MEASURE_FOR_MINUTES = tuple(f"benchmarks/cases/bench_{name}.py" for name in _CASES.split())
NOT_IN_CI = (
    *("make soak", "make bench", "make cluster-demo", "make docs", "make test-clients"),
    "make test-newest",  # downloads 3 GB
)
"""Half an hour, minutes of a bed, or another environment to install: what they call has tests of its own."""


@pytest.mark.parametrize(("page", "line"), LINES)
def test_a_command_is_one_that_ci_runs(page: str, line: str) -> None:
    words = shlex.split(line)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert line in NOT_IN_CI or line in RUN_BY_CI
    elif words[0] == "ds_fsmoe" or "ds_fsmoe" in words[:5]:
        command, *arguments = words[words.index("ds_fsmoe") + 1 :]
        parser = argparse.ArgumentParser(exit_on_error=False)
        importlib.import_module(COMMANDS[command]).add_arguments(parser)
        parser.parse_args(arguments)
        assert f'["{command}"' in TESTS or f'main("{words[1]}"' in TESTS, words
    else:
        scripts = [word for word in words if word.endswith(".py")]
        scripts += [f"{word.replace('.', '/')}.py" for word in words if word.startswith("benchmarks.")]
        assert scripts
        written = files_of(PAGES[page]) if page in FOLLOWED else {}
        for script in set(scripts) - set(written):
            assert (ROOT / script).is_file()
            used = re.search(rf"\b{Path(script).stem}\b", TESTS)
            assert used or script in MEASURE_FOR_MINUTES, f"no test runs {script}"


@pytest.mark.long
def test_benchmarks_that_take_minutes_can_at_least_be_asked_for_help() -> None:
    code = "import runpy, sys\nfor script in sys.argv[1:]:\n    sys.argv = [script, '--help']\n"
    code += "    try: runpy.run_path(script, run_name='__main__')\n"
    code += "    except SystemExit as end: assert not end.code, script\n"
    command = [sys.executable, "-c", code, *MEASURE_FOR_MINUTES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("--help") == len(MEASURE_FOR_MINUTES)


# ---- what it says of errors

NOT_OURS = (
    "cannot schedule new futures after shutdown",
    "Bus error",
    "No space left on device",
    "Connection closed by peer",
    "NCCL error",
    "fsmoe_reports/rank",
    "not found in kwargs",
    "fsmoe",
    "_CanRecordRegistry.get() takes 2 positional arguments",
)
SOURCES = "\n".join(file.read_text() for file in (ROOT / "ds_fsmoe").rglob("*.py"))


def test_every_error_it_explains_is_one_that_is_raised() -> None:
    rows = [line.split("|")[1] for line in PAGES["docs/troubleshooting.md"].splitlines() if line.startswith("| `")]
    texts = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    assert len(texts) > 15
    joined = re.sub(r'"\s*\n\s*f?"', "", SOURCES)
    for text in texts:
        assert text in NOT_OURS or text in joined, text


def test_blocks_of_json_are_configs() -> None:
    assert blocks("json")
    for _, block in blocks("json"):
        read_block(json.loads(block))


def test_every_metric_it_lists_is_one_that_is_written() -> None:
    table = PAGES["docs/monitor.md"].split("under `fsmoe/`:")[1].split("The rows of")[0]
    names = re.findall(
        r"`([a-z_/]+)`", "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    )
    assert len(names) > 10
    for name in names:
        assert f'"{name}"' in SOURCES or name in ("busy/compute", "busy/intra", "busy/inter"), name
