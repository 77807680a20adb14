# SPDX-License-Identifier: Apache-2.0
"""What variants cost besides their time, as Markdown tables: memory, and what finding their plans has taken."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.reporting.rows import Row, line, made_with_words, newest


def memory(rows: Sequence[Row]) -> str:
    """The tensors of one step of each variant, of the rank with the most, without DeepSpeed's buffer for gradients."""
    rows = newest(rows, ("case", "variant"))
    lines = [
        line(
            [
                "tensors of one step",
                "held between steps, MB",
                "peak, MB",
                "buffer for gradients, MB",
                "times stock's peak",
            ]
        )
    ]
    lines.append(line(["---", *["---:"] * 4]))
    for row in rows:
        sizes = [f"{float(row[name]):.1f}" for name in ("held", "peak", "bucket")]
        lines.append(line([f"{row['case']}: {row['variant']}", *sizes, f"{float(row['times_stock']):.2f}"]))
    return "\n".join([made_with_words(rows), "", *lines])


def tuning(rows: Sequence[Row]) -> str:
    """What measuring and trials took, and after how many steps that has paid."""
    rows = newest(rows, ("case", "variant"))
    heads = ["tuning", "measuring, s", "steps of trials", "paid after steps, over stock", "over untuned"]
    lines = [line(heads), line(["---", *["---:"] * 4])]
    for row in rows:
        # Rows of before do not say.
        paid = [row.get(name) or "" for name in ("paid_after_steps", "paid_after_steps_untuned")]
        lines.append(line([f"{row['case']}: {row['variant']}", row["measured_s"], row["steps_of_trials"], *paid]))
    return "\n".join([made_with_words(rows), "", *lines])
