# SPDX-License-Identifier: Apache-2.0
"""The bed's self-test: does a link carry what it is set to, also after a pause; do collectives follow a line; do
the links and the computation run side by side, and how much do they slow each other down."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.bed.bed import Bed, BedError, rate_mbit
from benchmarks.bed.job import run_job
from ds_fsmoe.planning.cost import Fit, fit
from ds_fsmoe.terminal.tables import print_table

RATE_OFF, GAP_OFF = 0.10, 0.05
"""How far a link may be from its rate, and a message after a pause from one without."""
PAYLOAD = 1448 / 1514
"""Of a full packet of 1500 bytes and its Ethernet header, what TCP carries for us; the rate is that of the whole."""
HIDDEN_LEAST = 0.3
"""Of the shorter of two, side by side, so much is to vanish behind the longer; less is one after the other."""
CPU_BOUND = 0.9
"""From this share of the cores on, overlap cannot show: there is nothing left to overlap with."""
TIMEOUT_S = 240.0


def self_test(bed: Bed, result: Path | None = None) -> int:
    """Measure, print, judge.

    Args:
        bed: up.
        result: a file for everything, as JSON.

    Returns:
        0 if the bed can be believed, else 1.

    Raises:
        BedError: the measuring itself failed; with the last lines of it.
    """
    found = measure(bed)
    print(f"{bed}")
    problems = [*_links(bed, found), *_collectives(found), *_overlap(bed, found)]
    for problem in problems:
        print(f"PROBLEM: {problem}")
    print("the bed can be believed" if not problems else f"{len(problems)} problems")
    if result is not None:
        result.write_text(json.dumps(found | {"problems": problems}, indent=1) + "\n")
    return 1 if problems else 0


def measure(bed: Bed) -> dict[str, Any]:
    """What the ranks measured.

    Raises:
        BedError: they did not get through.
    """
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        script = str(Path(__file__).with_name("ranks.py"))
        sizes = (str(rate_mbit(bed.inter)), str(rate_mbit(bed.intra)), str(bed.ranks_per_node))
        status = run_job(bed, [script, str(file), *sizes], TIMEOUT_S, lines.append)
        if status or not file.exists():
            raise BedError("\n".join([f"the self-test failed with status {status}:", *lines[-20:]]))
        return json.loads(file.read_text())


def _links(bed: Bed, found: dict[str, Any]) -> list[str]:
    problems, rows = [], []
    for name, link in found["links"].items():
        wanted = rate_mbit(getattr(bed, name))
        line = fit(link["sizes"], link["times_ms"])
        got = 8e-3 / line.cost.beta_ms if line.cost.beta_ms else float("inf")
        gap = link["after_gap_ms"] / link["back_to_back_ms"] - 1
        bound = " CPU-BOUND" if link["cpu_share"] > CPU_BOUND else ""
        rows.append((name, wanted, f"{got:.1f}", *_line(line), f"{gap:+.1%}", f"{link['cpu_share']:.0%}{bound}"))
        if abs(got / (PAYLOAD * wanted) - 1) > RATE_OFF:
            problems.append(f"the {name} link carries {got:.1f} Mbit/s, {PAYLOAD * wanted:.1f} are to be expected")
        if abs(gap) > GAP_OFF:
            problems.append(
                f"{name}: a message after a pause takes {gap:+.1%}, so chunks look better or worse than they are"
            )
    print("\nlinks, one message at a time")
    print_table(("link", "set Mbit/s", "found", "alpha ms", "ms per MB", "r^2", "after a pause", "CPU share"), rows)
    return problems


def _line(line: Fit) -> tuple[str, str, str]:
    return f"{line.cost.alpha_ms:.2f}", f"{line.cost.beta_ms * 1e6:.1f}", f"{line.r2:.4f}"


def _collectives(found: dict[str, Any]) -> list[str]:
    rows = []
    for link, operations in found["collectives"].items():
        for name, measured in operations.items():
            rows.append((link, name, *_line(fit(measured["sizes"], measured["times_ms"]))))
    print("\ncollectives, all groups at once; sizes are those of a rank's largest buffer")
    print_table(("link", "operation", "alpha ms", "ms per MB", "r^2"), rows)
    print("reduce_scatter is an all-to-all and a sum; reduce_scatter_gloo is gloo's own, an all-reduce inside")
    return []


def _overlap(bed: Bed, found: dict[str, Any]) -> list[str]:
    problems, rows = [], []
    for pair, times in found["overlap"].items():
        total_ms, longer_ms = times["first_ms"] + times["second_ms"], max(times["first_ms"], times["second_ms"])
        # 1: the longer hides the shorter wholly; 0: as if one after the other.
        hidden = (total_ms - times["both_ms"]) / (total_ms - longer_ms)
        kappa = ""
        if pair == "inter + intra":
            kappa = f"{contention(times):.2f}"
        cpu_bound = times["cpu_share"] > CPU_BOUND
        bound = " CPU-BOUND" if cpu_bound else ""
        alone = (f"{times[f'{each}_ms']:.1f}" for each in ("first", "second", "both"))
        used = (f"{times['cpu_share']:.0%}{bound}", f"{times['network_cpu_share']:.0%}")
        rows.append((pair, *alone, f"{hidden:.0%}", kappa, *used))
        # Ports that are shared are meant to hold each other up.
        if hidden < HIDDEN_LEAST and not cpu_bound and not (bed.mode == "shared" and pair == "inter + intra"):
            problems.append(f"{pair}: only {hidden:.0%} of the shorter is hidden")
    print("\nside by side")
    print_table(("what", "first ms", "second ms", "both ms", "hidden", "kappa", "CPU share", "of it network"), rows)
    if any(times["cpu_share"] > CPU_BOUND for times in found["overlap"].values()):
        print(
            "CPU-BOUND: the cores have no time left, so this bed cannot show the overlap of that pair; slower links can"
        )
    return problems


def contention(times: dict[str, float]) -> float:
    """kappa: while both links are busy each task takes 1 + kappa times as long. Read off the one that ends first, which
    is never alone."""
    shorter = "first" if times["first_ms"] <= times["second_ms"] else "second"
    return max(0.0, times[f"{shorter}_beside_ms"] / times[f"{shorter}_ms"] - 1)
