# SPDX-License-Identifier: Apache-2.0
"""Every collective that blocks the host outside of lanes is marked as a wait, read from the source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "ds_fsmoe"
BLOCKING = re.compile(
    r"dist\.(all_reduce|reduce|reduce_scatter\w*|all_gather\w*|gather\w*|scatter\w*|broadcast\w*|barrier|monitored_barrier"
    r"|all_to_all\w*|send\w*|recv\w*|new_group|new_subgroups\w*|split_group)"
    # What stands for one of them here, and what waits for one that was only begun.
    r"|all_gather|_reduce_scatter|_gather|_scatter|exchange_(?:sized|flat)|(\w+\.)*(work|_summing\[1\])\.wait"
)
# Files, or functions of files, where they need no mark, each with its reason.
UNMARKED: dict[str, str] = {
    "components/alltoalls/flat.py": "tasks of lanes, which the watchdog sees",
    "components/hierarchical.py": "tasks of lanes",
    "execution/collectives.py": "tasks of lanes",
    "execution/node_links.py": "tasks of lanes; others mark what they exchange by it",
    "gradients/reduction_algorithms.py": "tasks of lanes, or steps that FlatBuffer marks",
    "gradients/updated_parameters.py": "steps that Beside waits for, with a mark",
    "measuring/cluster_profile.py": "timed by the stopwatch, which marks each round",
    "measuring/packing_times.py": "timed by the stopwatch",
    "ops/loading.py:_gathered": "ends every few seconds, however long another rank compiles; there is no watchdog yet",
}


def dotted(node: ast.AST) -> str:
    """The name of a function as it is written, such as ``dist.barrier``; of what is called there, some text."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ast.unparse(node)


def unmarked(source: str) -> list[tuple[str, str]]:
    """The function and the text of each call that blocks outside of a ``with waiting(...)``."""
    found = []
    to_visit: list[tuple[ast.AST, str, bool]] = [(ast.parse(source), "", False)] * bool(BLOCKING.search(source))
    while to_visit:
        node, function, is_marked = to_visit.pop()
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            function = getattr(node, "name", function)
            is_marked = False  # it may be called elsewhere
        if isinstance(node, ast.With):
            contexts = (each.context_expr for each in node.items)
            is_marked |= any(isinstance(each, ast.Call) and dotted(each.func) == "waiting" for each in contexts)
        if isinstance(node, ast.Call) and not is_marked and BLOCKING.fullmatch(dotted(node.func)):
            begins_only = any(each.arg == "async_op" and ast.unparse(each.value) == "True" for each in node.keywords)
            if not begins_only:
                found.append((function, ast.unparse(node)))
        to_visit += [(child, function, is_marked) for child in ast.iter_child_nodes(node)]
    return found


def test_every_collective_that_blocks_outside_of_lanes_is_marked() -> None:
    used, wrong = set(), []
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        for function, text in unmarked(file.read_text()):
            known = {name, f"{name}:{function}"} & UNMARKED.keys()
            used |= known
            wrong += [] if known else [f"{name}, {function}: {text}"]
    assert wrong == []
    assert used == UNMARKED.keys(), "no exception outlives its reason"


def test_the_search_sees_what_is_not_marked() -> None:
    for code in ("dist.all_reduce(x)", "work.wait()", "self.work.wait()", "y = exchange_sized(x, a, b, group)"):
        assert unmarked(f"def f():\n    {code}") != [], code
        assert unmarked(f"def f():\n    with waiting('x'):\n        {code}") == [], code
    assert unmarked("with waiting('x'):\n    run(lambda: dist.barrier())") != []
    assert unmarked("work = dist.all_reduce(x, async_op=True)") == []
