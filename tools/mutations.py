# SPDX-License-Identifier: Apache-2.0
"""Break the package in one small place after the other, and see which test says so.

python tools/mutations.py --seed 2026-11-29 --count 100

Operators and places are drawn from the seed. Each mutation runs in a copy of the tree, first against the quick tests
that call its function and a few others (one run of ``make test`` tells which, see ``tools/reached.py``), two
mutations side by side; and what survives those against all of ``make test``: the survivors together, once, and each
alone against the tests that failed then, until none fails. ``tools/mutations_results.csv`` keeps what a seed has drawn
and who caught it; a second run goes on where the first stopped, also in later code. Mutations that change no result are
listed with the reason in ``tools/mutations_equivalent.toml``. ``--known`` takes those of
``tools/mutations_known.toml``, which tests have missed once.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import csv
import functools
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT, KNOWN = (Path(__file__).with_name(f"mutations_{each}.toml") for each in ("equivalent", "known"))
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//"}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "floor": "ceil", "ceil": "floor"}
# Calls of methods that the mutation leaves out: x.clamp(...) becomes x.
LEFT_OUT = {"clamp", "clone", "detach", "contiguous", "abs", "copy", "to"}
# Words are no behavior: what stands in these is not changed.
WORDS = (ast.Raise, ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom)
LOGS = re.compile(r"(?i)\b_?log(ger)?\b")
REACHED = ROOT / ".mutations" / "reached"
RESULTS = Path(__file__).with_name("mutations_results.csv")
COLUMNS = ("seed", "mutation", "kind", "by", "against")
OUT_OF_TIME = "the limit of time"
QUICK_S, FEW_S, OF_A_FILE = 2.0, 100.0, 1
"""The seconds of a quick test, those of all quick ones and again of all others that a mutation runs against first, and
how many of the others are of one file."""


@dataclass(frozen=True)
class Mutation:
    """One change: lines and columns are those of the unchanged file, from 1 and 0, the end excluded."""

    path: str
    function: str
    kind: str
    start: tuple[int, int]
    end: tuple[int, int]
    before: str
    after: str

    @property
    def name(self) -> str:
        """The mutation as the list of equivalents has it: without the line, which moves."""
        return f"{self.path} {self.function}: {' '.join(self.before.split())} -> {' '.join(self.after.split())}"

    def applied(self, source: str) -> str:
        """Return the changed source."""
        lines = source.splitlines(keepends=True)
        head, tail = between(lines, (1, 0), self.start), between(lines, self.end, (len(lines) + 1, 0))
        return head + self.after + tail


def between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    """Return the text from one place to another, as ast counts them: lines from 1, columns in bytes."""
    (first, left), (last, right) = start, end
    text = [line.encode() for line in lines[first - 1 : last]]
    if last <= len(lines):
        text[-1] = text[-1][:right]
    text[0] = text[0][left:]
    return b"".join(text).decode()


def changes(node: ast.AST, text: str) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield the changes of one node: the kind, the node that is replaced, and what stands there then."""

    def said(part: ast.AST) -> str:
        return ast.unparse(part)

    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield "comparison", node, f"({said(left)} {COMPARISONS[type(op)]} {said(right)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            yield "arithmetic", node, f"({said(left)} {ARITHMETIC[type(op)]} {said(right)})"
            if isinstance(op, ast.Add | ast.Sub | ast.Mult):
                yield "term left out", node, f"({said(left)})"
        case ast.Constant(value=bool(value)):
            yield "constant", node, str(not value)
        case ast.Constant(value=int(value)):
            yield "constant", node, str(value + 1)
        case ast.Constant(value=float(value)) if value:
            yield "constant", node, repr(value * 1.03)
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            if not isinstance(node, ast.While):
                yield "condition", test, f"(not ({said(test)}))"
                yield "condition", test, "False"
        case ast.BoolOp(values=[first, *others]):
            yield "part of a condition", node, f"({said(first)})"
            yield "part of a condition", node, f"({said(others[-1])})"
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "sign", node, f"({said(operand)})"
        case ast.Expr(value=ast.Call()):
            yield "statement left out", node, "pass"
        case ast.AugAssign(target=target, value=value):
            yield "sum", node, f"{said(target)} = {said(value)}"
        case ast.Call(func=ast.Name(id=name)) if name in NAMES:
            yield "function", node.func, NAMES[name]
        case ast.Call(func=ast.Attribute(value=value, attr=attribute)) if attribute in LEFT_OUT:
            yield "method left out", node, f"({said(value)})"
        case ast.Subscript(slice=ast.Tuple(elts=[first, *others])) if not isinstance(first, ast.Constant | ast.Slice):
            if isinstance(node.ctx, ast.Load):
                yield "index", node, f"{said(node.value)}[0, {', '.join(map(said, others))}]"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "result", value, "None"


def mutations_of(path: str, source: str) -> list[Mutation]:
    """Return every mutation of a file: of what its functions do, not of its words or its constants."""
    found: list[Mutation] = []
    lines = source.splitlines(keepends=True)

    def visit(node: ast.AST, function: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, WORDS):
                continue
            if isinstance(child, ast.FunctionDef):
                if child.name.startswith("__r") or any("abstract" in ast.unparse(d) for d in child.decorator_list):
                    continue
                for statement in child.body:
                    look(statement, child.name)
            elif isinstance(child, ast.ClassDef) or not function:
                visit(child, function)
            else:
                look(child, function)

    def look(node: ast.AST, function: str) -> None:
        if isinstance(node, WORDS) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            return
        called = node.value if isinstance(node, ast.Expr) else node
        if isinstance(called, ast.Call) and LOGS.search(ast.unparse(called.func)):
            return
        if isinstance(node, ast.FunctionDef):
            for statement in node.body:
                look(statement, function)
            return
        if isinstance(node, ast.AnnAssign):
            if node.value:
                look(node.value, function)
            return
        for kind, replaced, after in changes(node, source):
            start, end = (replaced.lineno, replaced.col_offset), (replaced.end_lineno, replaced.end_col_offset)
            found.append(Mutation(path, function, kind, start, end, between(lines, start, end), after))
        visit(node, function)

    visit(ast.parse(source), "")
    return found


def drawn(seed: str, count: int) -> list[Mutation]:
    """Return so many mutations: the file by its number of places, then a kind that it has, then a place."""
    listed = equivalent()
    by_file = [found for file in sorted((ROOT / "ds_fsmoe").rglob("*.py")) if (found := mutations_in(file))]
    draw = random.Random(seed)
    chosen: dict[str, Mutation] = {}
    while len(chosen) < count:
        places = draw.choices(by_file, [len(each) for each in by_file])[0]
        kind = draw.choice(sorted({each.kind for each in places}))
        mutation = draw.choice([each for each in places if each.kind == kind])
        if mutation.name not in listed:
            chosen.setdefault(mutation.name, mutation)
    return list(chosen.values())


class Results:
    """Keeps in a file who caught the mutations of a seed.

    Args:
        seed: the seed, or "known".
        mutations: those of the seed, as they are in the code of today.
    """

    def __init__(self, seed: str, mutations: list[Mutation]) -> None:
        self.seed, self.mutations = seed, mutations
        self._others = [row for row in rows_kept() if row["seed"] != seed]
        before = {row["mutation"]: row for row in rows_kept() if row["seed"] == seed}
        new = {"seed": seed, "by": "", "against": ""}
        self._rows = {
            each.name: before.get(each.name, {**new, "mutation": each.name, "kind": each.kind}) for each in mutations
        }

    def by(self, mutation: Mutation) -> str:
        """Return the test that caught it, if one did."""
        return self._rows[mutation.name]["by"]

    def against(self, mutation: Mutation) -> str:
        """Return what it was run against: "reached", "all", "by hand" one test, or nothing yet."""
        return self._rows[mutation.name]["against"]

    def keep(self, mutation: Mutation, by: list[str], against: str) -> None:
        """Keep a result."""
        self._rows[mutation.name] |= {"by": by[0][:200] if by else "", "against": against}
        with RESULTS.open("w", newline="") as file:
            rows = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            rows.writeheader()
            rows.writerows([*self._others, *self._rows.values()])


def rows_kept() -> list[dict[str, str]]:
    """Return the rows of the file of results."""
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


def drawn_before(seed: str) -> list[Mutation]:
    """Return the mutations that a seed has drawn, as they are in the code of today; those whose code is gone are
    missing, and those that are equivalent."""
    names = [row["mutation"] for row in rows_kept() if row["seed"] == seed]
    paths = {name.partition(" ")[0] for name in names}
    found = {each.name: each for path in sorted(paths) if (ROOT / path).exists() for each in mutations_in(ROOT / path)}
    return [found[name] for name in names if name in found and name not in equivalent()]


def mutations_in(file: Path) -> list[Mutation]:
    """Return every mutation of a file of the package."""
    return mutations_of(str(file.relative_to(ROOT)), file.read_text())


def equivalent() -> set[str]:
    """Return the names of mutations that change no result."""
    return {each["mutation"] for each in tomllib.loads(EQUIVALENT.read_text()).get("equivalent", [])}


def known() -> list[Mutation]:
    """Return the mutations that an earlier state of the tests has missed.

    Raises:
        ValueError: the code of one is not there once.
    """
    found = []
    for each in tomllib.loads(KNOWN.read_text())["known"]:
        source = (ROOT / each["path"]).read_text()
        if source.count(each["before"]) != 1:
            raise ValueError(
                f"{KNOWN.name}: {each['name']}: its code is {source.count(each['before'])} times in the file"
            )
        head = source[: source.index(each["before"])]
        start, end = (at(text) for text in (head, head + each["before"]))
        found.append(Mutation(each["path"], each["function"], each["name"], start, end, each["before"], each["after"]))
    return found


def at(text: str) -> tuple[int, int]:
    """Return the place at the end of a text, as ast counts it."""
    return text.count("\n") + 1, len(text.rpartition("\n")[2].encode())


def tests_of(mutation: Mutation) -> dict[str, float]:
    """Return the tests of ``make test`` that call a mutation's function, with their seconds, the quickest first."""
    return reached_by().get(f"{mutation.path} {mutation.function}", {})


def few_tests_of(mutation: Mutation) -> list[str]:
    """Return the quick ones of these tests, and some of the others, of several files."""
    found: list[str] = []
    of_file: Counter[str] = Counter()
    left_s = {True: FEW_S, False: FEW_S}
    for test, seconds in tests_of(mutation).items():
        file, is_quick = test.partition("::")[0], seconds < QUICK_S
        if seconds <= left_s[is_quick] and (is_quick or of_file[file] < OF_A_FILE):
            found.append(test)
            of_file[file] += not is_quick
            left_s[is_quick] -= seconds
    return found


@functools.cache
def reached_by() -> dict[str, dict[str, float]]:
    """Return function -> the tests that call it and their seconds, the quickest first; see :func:`look_who_reaches`."""
    rows = [json.loads(line) for file in REACHED.glob("*.jsonl") for line in file.read_text().splitlines()]
    found: dict[str, dict[str, float]] = {}
    for row in sorted(rows, key=lambda row: row["seconds"]):
        for each in row["calls"]:
            found.setdefault(each, {})[row["test"]] = row["seconds"]
    return found


def look_who_reaches(tree: Path, workers: int, limit_s: int) -> None:
    """Run all of ``make test`` once, and keep which functions each test calls."""
    shutil.rmtree(REACHED, ignore_errors=True)
    part = REACHED.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    failed = run_tests(tree, all_files(), workers, limit_s, False, "-p", "tools.reached", DS_FSMOE_REACHED=str(part))
    print(f"{len(failed)} tests fail without any mutation: {failed}", flush=True)
    part.rename(REACHED)


def run_tests(
    tree: Path, tests: list[str], workers: int, limit_s: int, stops: bool = True, *options: str, **more: str
) -> list[str]:
    """Run tests of a tree in this order, each in the environment that ``make test`` gives it.

    Args:
        tests: their files, or single ones.
        stops: whether the first failure ends the run.
        options, more: further options of pytest, and variables of its environment.

    Returns:
        The tests that fail; empty if none does. A run out of time counts as one.
    """
    environments: dict[str, list[str]] = {}
    for each in tests:
        environments.setdefault(".venv-planning" if each.startswith("tests/planning") else ".venv", []).append(each)
    found: list[str] = []
    for environment, names in environments.items():
        folder, cache = ROOT / environment / "bin", tree.parent / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        command = [str(folder / "python"), "-m", "pytest", "-q", "-o", f"cache_dir={cache}", *["-x"] * stops]
        command += [
            "-m",
            "not slow and not long",
            "-n",
            str(workers),
            *["--dist", "load", "--maxschedchunk", "2"] * (workers > 0),
        ]
        command += [*options, *names]
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        variables = {"PYTHONPATH": str(tree), "PATH": path, "OMP_NUM_THREADS": "1", **more}
        if environment == ".venv-planning":
            variables["DS_FSMOE_EXPECT_NO_TORCH"] = "1"
        run = subprocess.Popen(
            command, cwd=tree, env=os.environ | variables, stdout=subprocess.DEVNULL, start_new_session=True
        )
        try:
            run.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)  # with the ranks that it has started
            run.wait()
            return [OUT_OF_TIME]
        if run.returncode not in (0, 5):
            failed = cache / "v" / "cache" / "lastfailed"
            found += json.loads(failed.read_text()) if failed.exists() else [f"status {run.returncode}"]
            if stops:
                break
    return found


def run_together(
    tree: Path, survivors: list[Mutation], workers: int, limit_s: int
) -> Iterator[tuple[Mutation, list[str]]]:
    """Run all of ``make test`` with several mutations at once, and each alone against the tests that fail then, and
    that do not without any.

    Yields:
        A mutation, and the test that catches it; none if none does.
    """
    left = survivors
    while left:
        with mutated(tree, left):
            failed = run_tests(tree, all_files(), workers, limit_s, stops=False)
        suspects = [each for each in failed if each.startswith("tests")]
        if failed and not suspects:  # out of time, or no test could run
            if len(left) == 1:
                yield left[0], failed
                return
            for half in (left[: len(left) // 2], left[len(left) // 2 :]):
                yield from run_together(tree, half, workers, limit_s)
            return
        flaky = run_tests(tree, suspects, workers, limit_s, stops=False) if suspects else []
        suspects = [each for each in suspects if each not in flaky]
        print(f"{len(left)} together: {len(suspects)} tests fail; without any mutation: {flaky}", flush=True)
        missed = []
        for each in left:
            reaching = tests_of(each)
            ordered = sorted(suspects, key=lambda test: test not in reaching)
            with mutated(tree, [each]):
                by = run_tests(tree, ordered, workers, limit_s) if ordered else []
            if by:
                yield each, by
            else:
                missed.append(each)
        if len(missed) == len(left):
            yield from ((each, []) for each in missed)
            return
        left = missed


@contextlib.contextmanager
def mutated(tree: Path, mutations: list[Mutation]) -> Iterator[None]:
    """Have some mutations in the tree; of two that overlap, the first."""
    sources: dict[str, str] = {}
    for path in {each.path for each in mutations}:
        text = sources[path] = (tree / path).read_text()
        below = (sys.maxsize, 0)
        for each in sorted((each for each in mutations if each.path == path), key=lambda each: each.end, reverse=True):
            if each.end <= below:
                text, below = each.applied(text), each.start
        (tree / path).write_text(text)
    try:
        yield
    finally:
        for path, source in sources.items():
            (tree / path).write_text(source)


def copied(tree: Path) -> Path:
    """Copy what is in the repository into a folder, and return that."""
    shutil.rmtree(tree, ignore_errors=True)
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for file in filter(None, files.split("\0")):
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, tree / file)
    return tree


def all_files() -> list[str]:
    """Return the test files of ``make test``, but not this tool's own: that fails wherever known mutations' code is
    another."""
    files = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py"))
    return [each for each in files if not each.startswith(("tests/benchmarks/", "tests/test_mutations.py"))]


def main() -> int:
    """Run the mutations that have no result yet, and say how many were caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", default=time.strftime("%Y-%m-%d"), help="default: the date")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument(
        "--known", action="store_true", help="those that tests have missed once, in place of drawn ones"
    )
    parser.add_argument("--only", default="", help="only mutations of files whose path has this in it")
    parser.add_argument("--reached-only", action="store_true", help="do not run all of make test for what survives")
    parser.add_argument("--list", action="store_true", help="print the mutations, run nothing")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--limit-s", type=int, default=900, help="for each run of a few tests")
    parser.add_argument("--limit-all-s", type=int, default=3600, help="for each run of all tests")
    options = parser.parse_args()
    seed = "known" if options.known else options.seed
    print(f"seed {seed}", flush=True)
    results = Results(seed, known() if options.known else drawn_before(seed) or drawn(seed, options.count))
    mutations = [each for each in results.mutations if options.only in each.path]
    if options.list:
        for each in mutations:
            print(f"{each.path}:{each.start[0]} {each.kind}: {each.before!r} -> {each.after!r}")
        return 0
    tree, other = (copied(ROOT / ".mutations" / name) for name in ("tree", "second/tree"))
    if not REACHED.exists():
        look_who_reaches(tree, options.workers, options.limit_all_s)
    waiting = [each for each in mutations if not results.against(each)]
    free: queue.Queue[Path] = queue.Queue()
    for each in (tree, other):
        free.put(each)

    def first(mutation: Mutation) -> tuple[Mutation, list[str], float]:
        mine, began, tests = free.get(), time.monotonic(), few_tests_of(mutation)
        try:
            with mutated(mine, [mutation]):
                found = run_tests(mine, tests, 0, options.limit_s) if tests else []
        finally:
            free.put(mine)
        # Out of time is a test that hangs, or many tests: the run of all of them tells.
        return mutation, [] if found == [OUT_OF_TIME] else found, time.monotonic() - began

    with ThreadPoolExecutor(2) as pool:
        for number, (each, by, seconds) in enumerate(pool.map(first, waiting), 1):
            results.keep(each, by, "reached")
            print(f"{number:3} {seconds:4.0f} s {each.name} {by[:1] or 'survives'}", flush=True)
    survivors = [each for each in mutations if not results.by(each) and results.against(each) == "reached"]
    if survivors and not options.reached_only:
        for each, by in run_together(tree, survivors, options.workers, options.limit_all_s):
            results.keep(each, by, "all")
            print(f"{each.name} {by[:1] or 'SURVIVES'}", flush=True)
    left = [each for each in mutations if not results.by(each)]
    by_few = sum(results.against(each) == "reached" for each in mutations if results.by(each))
    print(f"{len(mutations) - len(left)} of {len(mutations)} are caught, {by_few} by tests that call the function")
    print(Counter(each.kind for each in left) or "none survives")
    return int(len(left) > 0.05 * len(mutations))


if __name__ == "__main__":
    sys.exit(main())
