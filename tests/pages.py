# SPDX-License-Identifier: Apache-2.0
"""Follows a page as a reader would: writes its files, runs its commands one after the other, compares what they print.

In a page to be followed, a block of Python that begins with ``# name.py`` is a file, a block of sh has commands, and a
block of text is what the commands before it print: not all of it, and numbers may be others.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

from tests.built_ops import build_ops
from tests.python_path import python_path
from tests.scripts import ROOT, free_port

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", flags=re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# (\w+\.py)\n")
NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("benchmarks/notes/*.md")))
}
"""What people read, by path: the front page, the pages of the site, and what is written about benchmarks."""


def part(page: str, heading: str) -> str:
    """The section of a page with this heading, its subsections included."""
    (text,) = re.findall(rf"(?ms)^## {re.escape(heading)}\n.*?(?=^## |\Z)", PAGES[page])
    return text


FOLLOWED = {
    "docs/qwen3.md": PAGES["docs/qwen3.md"],
    "docs/lora.md": PAGES["docs/lora.md"],
    "docs/install.md": part("docs/install.md", "First run"),
    "docs/checkpoints.md": part("docs/checkpoints.md", "Try it: save, move, damage, convert"),
    "docs/monitor.md": part("docs/monitor.md", "The report"),
    "docs/planning.md": PAGES["docs/planning.md"],
    "docs/extend.md": PAGES["docs/extend.md"].split("\n## Add a gate\n")[0],
}
"""Pages, or parts of pages, whose files are written and whose commands are run in tests/test_tutorials.py."""
VARIABLES = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
TIME_LIMIT_S = 900


def blocks_of(page: str) -> list[tuple[str, str]]:
    """(language, content) of each block of code, those inside lists included."""
    return [(found[2], textwrap.dedent(found[3])) for found in FENCE.finditer(page)]


def files_of(page: str) -> dict[str, str]:
    """The files that a page has its reader write."""
    return {
        found[1]: content
        for language, content in blocks_of(page)
        if language == "python" and (found := FILE.match(content))
    }


@dataclass
class Reader:
    """Follows a page in a folder that has the examples and ready configs, as a checkout has.

    Attributes:
        folder: where files are written and commands run.
        variables: of the environment, besides those of a CPU.
    """

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def follow(self, page: str) -> dict[str, str]:
        """Return what each command has printed.

        Raises:
            AssertionError: a command failed that should not, or the other way round; or the page shows a line that no
                command before it has printed.
        """
        build_ops()
        for name in ("examples", "ds_configs"):
            (self.folder / name).symlink_to(ROOT / name)
        printed, since_shown, files = {}, "", files_of(page)
        for language, content in blocks_of(page):
            if language == "python" and (found := FILE.match(content)):
                (self.folder / found[1]).write_text(files[found[1]])
            elif language == "sh":
                since_shown = ""
                for line in content.splitlines():
                    printed[line] = self._run(line)
                    since_shown += printed[line]
            elif language == "text":
                assert missing(content, since_shown) == [], since_shown[-3000:]
        return printed

    def _run(self, line: str) -> str:
        command, _, about = line.partition("#")
        if command.startswith("make "):  # runs in a checkout, and for minutes: .ci/run has it
            return ""
        # Commands that start ranks need a port of their own: others are running tests, too.
        command = command.replace("--num_accelerators", f"--master_port {free_port()} --num_accelerators")
        beside = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        environment = os.environ | VARIABLES | {"PYTHONPATH": python_path(), "PATH": beside} | self.variables
        done = subprocess.run(
            shlex.split(command),
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
        said = done.stdout + done.stderr
        assert bool(done.returncode) == ("error" in about), f"{line}: exit status {done.returncode}\n{said[-4000:]}"
        return said


def missing(shown: str, printed: str) -> list[str]:
    """The shown lines that were not printed: numbers may be others, and ``...`` stands for anything."""
    lines = [_masked(line) for line in printed.splitlines()]
    return [
        line
        for line in shown.splitlines()
        if line.strip(" .") and not any(_pattern(line).search(each) for each in lines)
    ]


def _masked(line: str) -> str:
    return " ".join(NUMBER.sub("0", line).split())


def _pattern(line: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(each) for each in _masked(line.replace("...", "\0")).split("\0")))
