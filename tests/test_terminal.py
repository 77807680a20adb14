# SPDX-License-Identifier: Apache-2.0
"""What is printed on terminals is drawn by rich; elsewhere it is plain text, with a line now and then of long work."""

from __future__ import annotations

import io
import logging
import pickle
from types import SimpleNamespace

import pytest

from ds_fsmoe.terminal import progress as progress_module
from ds_fsmoe.terminal import screen, tables
from ds_fsmoe.terminal.progress import Progress, followed
from ds_fsmoe.terminal.screen import RED, YELLOW, is_terminal, print_coloured, print_marked
from ds_fsmoe.terminal.tables import Message, Table, print_parts, print_table

ROWS = [("flat", "12.5", "[OKAY]"), ("once_per_node", "8", "[FAIL]")]
PLAIN = [
    "all-to-all       ms  state",
    "-------------  ----  ------",
    "flat           12.5  [OKAY]",
    "once_per_node     8  [FAIL]",
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard output and standard error, on a terminal, for those who print. (The process's own are replaced once
    more when a test begins.)"""
    found = Terminal()
    for module in (progress_module, screen, tables):
        monkeypatch.setattr(module, "sys", SimpleNamespace(stdout=found, stderr=found))
    return found


class Hands:
    """A clock that a test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def table() -> Table:
    return Table(("all-to-all", "ms", "state"), ROWS)


# ---- tables


def test_a_table_is_plain_text_outside_of_terminals(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("all-to-all", "ms", "state"), ROWS)
    assert capsys.readouterr().out.splitlines() == PLAIN
    assert str(table()) == "\n".join(PLAIN)
    assert str(table()).isascii()
    assert Table(("a", "b"), [("x", 1)], indent="  ", has_rule=False).lines() == ["  a  b", "  x  1"]
    assert Table((), [("name", "value"), ("longer", "another")]).lines() == ["name    value", "longer  another"]
    assert Table(("a", "b"), []).lines() == ["a  b", "-  -"]


def test_rich_draws_a_table_on_a_terminal(terminal: Terminal) -> None:
    print_table(("all-to-all", "ms", "state"), ROWS)
    drawn = terminal.getvalue()
    assert "\033[1m" in drawn, "heads are bold"
    assert "\033[92m[OKAY]" in drawn
    assert "\033[91m[FAIL]" in drawn
    assert "─" in drawn
    print_table(("[bold]head",), [("[red]cell[/red] :smile:",)])
    assert "[bold]head" in terminal.getvalue(), "what looks like markup is printed as it is"
    assert "[red]cell[/red] :smile:" in terminal.getvalue()


def test_no_color_leaves_the_colours_out_and_a_dumb_terminal_gets_plain_text(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    print_table(("all-to-all", "ms", "state"), ROWS)
    print_coloured("careful", YELLOW)
    assert not any(f"\033[{code}m" in terminal.getvalue() for code in (33, 91, 92))
    monkeypatch.setenv("TERM", "dumb")
    assert not is_terminal(terminal)
    terminal.truncate(0)
    terminal.seek(0)
    print_table(("all-to-all", "ms", "state"), ROWS)
    assert terminal.getvalue().splitlines() == PLAIN


# ---- warnings and the log


def logged(stream: io.StringIO, message: str, level: int = logging.INFO) -> str:
    from ds_fsmoe.log import Handler

    handler = Handler(stream)
    handler.setFormatter(logging.Formatter("[%(levelname)s] %(message)s"))
    handler.handle(logging.LogRecord("ds_fsmoe", level, "", 0, message, None, None))
    return stream.getvalue()


def test_warnings_and_errors_are_coloured_and_tables_drawn_on_a_terminal_only(terminal: Terminal) -> None:
    print_coloured("careful", YELLOW)
    print_coloured("wrong", RED)
    print_marked("op [NO]")
    for words in ("\033[33mcareful", "\033[1;31mwrong", "op \033[93m[NO]"):
        assert words in terminal.getvalue()
    # What is longer than the terminal is wide is for this to break.
    print_coloured("long " * 40, YELLOW)
    assert "long " * 40 in terminal.getvalue()
    file = io.StringIO()
    print_coloured("careful", YELLOW, file)
    assert file.getvalue() == "careful\n"
    # In the log too.
    pytest.importorskip("torch")
    message = Message(["autotune: chosen", table(), "next: nothing"])
    plain = "\n".join(["[INFO] autotune: chosen", *PLAIN, "next: nothing", ""])
    assert logged(io.StringIO(), message) == plain
    drawn = logged(Terminal(), message)
    assert drawn.startswith("[INFO] autotune: chosen\n")
    assert "\033[92m[OKAY]" in drawn
    assert drawn.endswith("next: nothing\n")
    assert "\033[33m[WARNING] slow" in logged(Terminal(), "slow", logging.WARNING)
    assert "\033[1;31m[ERROR] wrong" in logged(Terminal(), "wrong", logging.ERROR)
    assert logged(io.StringIO(), "slow", logging.WARNING) == "[WARNING] slow\n"
    # A message is a string, and arrives whole on other ranks.
    arrived, stream = pickle.loads(pickle.dumps(message)), io.StringIO()
    assert arrived == message
    print_parts(arrived.parts, stream)
    assert stream.getvalue() == message + "\n"


# ---- progress


def test_outside_of_terminals_a_line_of_long_work_comes_now_and_then_from_one_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Hands()
    with Progress("measuring", 40, "operations", now_s=clock) as progress:
        for second in range(1, 26):
            clock.now_s = second
            progress(f"operation {second}")
    assert capsys.readouterr().err.splitlines() == [
        "measuring: 10 of 40 operations after 10 s (operation 10)",
        "measuring: 20 of 40 operations after 20 s (operation 20)",
    ]
    assert list(followed(range(3), Progress("converting", unit="files", now_s=clock))) == [0, 1, 2]
    with Progress("measuring", is_shown=False, now_s=clock) as progress:
        clock.now_s += 1000
        progress()
    lines: list[str] = []
    with Progress("reading", unit="choices", say=lines.append, now_s=clock) as progress:
        clock.now_s += 11
        progress.update(5, 7)
        progress.reached(6)
    assert lines == ["reading: 5 of 7 choices after 11 s"]
    assert capsys.readouterr() == ("", "")


def test_a_terminal_has_a_bar_for_long_work_the_log_goes_above_it_and_an_error_ends_it(terminal: Terminal) -> None:
    clock = Hands()
    with Progress("measuring", 4, "operations", now_s=clock) as progress:
        progress("quick")
        assert terminal.getvalue() == "", "short work shows none"
        clock.now_s = progress_module.PATIENCE_S
        progress("[red]all-to-all")
        print_coloured("careful", YELLOW)
        with Progress("inside", 2, "files", now_s=clock) as inside:
            clock.now_s += progress_module.PATIENCE_S
            inside("one")
            drawn = screen.bar_now()
            tasks = [(task.description, task.completed, task.total) for task in drawn.tasks]
            assert tasks == [("measuring", 2, 4), ("inside", 1, 2)]
        assert [task.description for task in drawn.tasks] == ["measuring"]
    assert screen.bar_now() is None
    for words in ("measuring", "[red]all-to-all", "careful"):
        assert words in terminal.getvalue()

    def breaks() -> None:
        with Progress("measuring", now_s=clock) as progress:
            clock.now_s += progress_module.PATIENCE_S
            progress()
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        breaks()
    assert screen.bar_now() is None
