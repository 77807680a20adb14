# SPDX-License-Identifier: Apache-2.0
"""Results as Markdown tables, beside the paper's where there are such."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from benchmarks.reporting.rows import Comparison, Row, line, made_with_words, newest

PAPER = {"tutel_improved": (1.09, 1.08), "fsmoe_no_iio": (1.12, 1.16), "fsmoe": (1.18, 1.22)}
"""Table 5: times faster than Tutel on testbeds A and B, over 1458 layers."""
OF_COMMUNICATION = ("all-to-all", "all-reduce", "all-gather", "reduce-scatter", "reduce", "broadcast")


def beside_table_5(found: Comparison, over: str = "tutel") -> str:
    """Presets over Tutel's schedule: the paper's means, and ours over the layers measured."""
    lines = [line([f"times faster than {over}", "paper, A", "paper, B", "here"]), line(["---", "---:", "---:", "---:"])]
    for variant, (a, b) in PAPER.items():
        if variant in found.variants and over in found.variants:
            lines.append(line([variant, f"{a:.2f}", f"{b:.2f}", f"{found.mean(variant) / found.mean(over):.2f}"]))
    if "best" in found.variants and over in found.variants:
        lines.append(line(["best", "", "", f"{found.mean('best') / found.mean(over):.2f}"]))
    return "\n".join(lines)


def gains_in_two(found: Comparison, ours: str = "deepspeed", fsmoe: str = "fsmoe") -> str:
    """The gain over stock, in what our runtime gains with stock's schedule and what the schedule gains over that."""
    runtime, whole = found.mean(ours), found.mean(fsmoe)
    return (
        f"`{fsmoe}` over {found.baseline} {whole:.3f}: our runtime with stock's schedule {runtime:.3f}, "
        f"the schedule {whole / runtime:.3f} over that"
    )


def predictions(rows: Sequence[Row]) -> str:
    """How far steps were from what was predicted of them, and from what no schedule could beat."""
    lines = [
        line(["schedule", "layers", "predicted, off by", "at worst", "measured over bound", "gain over predicted"])
    ]
    lines.append(line(["---", *["---:"] * 5]))
    for variant in dict.fromkeys(row["variant"] for row in rows):
        own = [
            {key: float(row[key]) for key in row if key.endswith("_ms")} for row in rows if row["variant"] == variant
        ]
        off = [abs(each["predicted_ms"] / each["measured_ms"] - 1) for each in own]
        bound = fmean(each["measured_ms"] / each["bound_ms"] for each in own)
        gains = [
            (each["uncut_measured_ms"] / each["measured_ms"]) / (each["uncut_predicted_ms"] / each["predicted_ms"])
            for each in own
            # Where all-to-alls are compared, there is no schedule that cuts nothing.
            if "uncut_measured_ms" in each
        ]
        gain = f"{math.exp(fmean(map(math.log, gains))):.2f}" if gains else "-"
        cells = [variant, str(len(own)), f"{fmean(off):.1%}", f"{max(off):.1%}", f"{bound:.2f}", gain]
        lines.append(line(cells))
    return "\n".join([made_with_words(rows), "", *lines])


def operations(rows: Sequence[Row]) -> str:
    """The bed's own Table 2: shares of stock's step, case by case."""
    names = list(dict.fromkeys(row["operation"] for row in rows))
    lines = [
        line(["share of stock's step", "ms", *names, "communication"]),
        line(["---", *["---:"] * (len(names) + 2)]),
    ]
    for key in dict.fromkeys((row["case"], row["layout"]) for row in rows):
        own = [row for row in rows if (row["case"], row["layout"]) == key]
        share = {name: sum(float(row["share"]) for row in own if row["operation"] == name) for name in names}
        sent = sum(share.get(name, 0.0) for name in OF_COMMUNICATION)
        shares = [f"{share[name]:.0%}" if share[name] else "" for name in names]
        total_ms = sum(float(row["ms"]) for row in own)
        lines.append(line([", ".join(key), f"{total_ms:.0f}", *shares, f"**{sent:.0%}**"]))
    return "\n".join([made_with_words(rows), "", *lines])


def losses(rows: Sequence[Row]) -> str:
    """First and last loss of every variant, and how far from stock's it was at most."""
    lines = [line(["losses in nats per byte", "first", "last", "from stock's at most"]), line(["---", *["---:"] * 3])]
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in newest(rows, ("case", "variant", "step")):
        found.setdefault((row["case"], row["variant"]), {})[int(row["step"])] = float(row["loss"])
    for (case, variant), own in found.items():
        alike = (case, "stock, best layout" if variant.endswith("best layout") else "stock")
        stock = found.get(alike, found[case, "stock"])
        off = max(abs(own[step] / stock[step] - 1) for step in own if step in stock)
        lines.append(line([f"{case}: {variant}", f"{own[min(own)]:.4f}", f"{own[max(own)]:.4f}", f"{off:.2%}"]))
    return "\n".join([made_with_words(rows), "", *lines])
