# SPDX-License-Identifier: Apache-2.0
"""The part of ``ds_fsmoe plan`` about pipeline stages: a whole batch through all of them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ds_fsmoe.terminal.tables import print_table

if TYPE_CHECKING:
    from ds_fsmoe.offline.plan.baselines import Baselines
    from ds_fsmoe.offline.plan.report import BatchReport, Report

MICRO_BATCHES_PER_STAGE = 4
"""The micro-batches of a batch for each stage, where no number is given."""


def add_micro_batches(group: argparse._ArgumentGroup) -> None:
    """Add the argument about batches."""
    group.add_argument(
        "--micro-batches",
        type=int,
        metavar="M",
        help=f"micro-batches of a batch ({MICRO_BATCHES_PER_STAGE} for each stage; without stages, one)",
    )


def is_batch(args: argparse.Namespace) -> bool:
    """Whether a whole batch is planned, and not one micro-batch alone."""
    return (args.pp or 1) > 1 or args.micro_batches is not None


def batch_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the planner that follow from batches and stages.

    Raises:
        ValueError: a batch of nothing.
    """
    asked, pp = args.micro_batches, args.pp or 1
    if asked is not None and asked < 1:
        raise ValueError(f"--micro-batches = {asked}: must be at least 1")
    default = MICRO_BATCHES_PER_STAGE * pp if pp > 1 else 1
    return {"num_micro_batches": default if asked is None else asked}


def batch_of(report: Report, job: dict[str, Any]) -> BatchReport:
    """Return the plans of a whole batch, of which one stage is planned."""
    from ds_fsmoe.offline.plan.report import batch_report

    return batch_report(report, **{name: job[name] for name in ("alltoall", "recompute", "crossings") if name in job})


def print_batch(
    args: argparse.Namespace, report: Report, found: BatchReport | None, bases: Baselines
) -> tuple[Report, dict[str, Any]]:
    """Print what a batch takes by every system, and what the stages do by the shown one.

    Args:
        args: of the command.
        report: of one stage.
        found: of the batch; ``None``: one micro-batch alone is planned.
        bases: what others are compared with.

    Returns:
        The report with the plans that the stage has in the batch, and what is written about the batch.
    """
    if found is None:
        return report, {}
    _print_presets(found, bases, is_default=args.micro_batches is None)
    _print_stages(found)
    return found.on_stage(report), {"batch": found.as_dict()}


def _print_presets(found: BatchReport, bases: Baselines, is_default: bool) -> None:
    count, stages = found.num_micro_batches, len(found.places)
    default = ", the default" if is_default else ""
    through = f" through {stages} stages, in DeepSpeed's order" if stages > 1 else ""
    print(f"\none batch of {count} micro-batches (--micro-batches {count}{default}){through}, without the optimizer")
    batches_ms = {name: found.batch_ms(name) for name in found.plans}
    rows = []
    if bases.stock is not None:
        batch_ms = bases.stock_ms(batches_ms)
        rows.append((bases.stock_label, f"{batch_ms:.2f}", "", *bases.ratios(batch_ms, batches_ms)))
    for name, batch_ms in batches_ms.items():
        ratios = bases.ratios(batch_ms, batches_ms)
        rows.append((bases.label(name), f"{batch_ms:.2f}", f"{found.bubble_share(name):.1%}", *ratios))
    rows.append(("(lower bound)", f"{found.bound_ms:.2f}", "", *bases.ratios(found.bound_ms, batches_ms)))
    print_table(("system", "batch ms", "bubbles", *bases.heads), rows)


def _print_stages(found: BatchReport) -> None:
    print(f"\nthe stages by {found.preset_name}: times of a micro-batch, sends and bubbles of a batch")
    heads = (
        *("stage", "blocks", "forward ms", "backward ms", "last ms", "gradients MB", "after ms", "sends MB", "ms"),
        *("bubbles ms", "share"),
    )
    rows = []
    for row in found.rows(found.preset_name):
        times = (row[name] for name in ("forward_ms", "backward_ms", "last_backward_ms"))
        rows.append(
            (
                str(row["stage"] + 1),
                "{}-{}".format(*row["blocks"]),
                *(f"{each:.2f}" for each in times),
                f"{row['hidden_gradient_bytes'] / 1e6:.1f} + {row['later_gradient_bytes'] / 1e6:.1f}",
                f"{row['gradients_ms']:.2f}",
                f"{row['send_bytes'] / 1e6:.1f}",
                f"{row['sends_ms']:.2f}",
                f"{row['bubbles_ms']:.2f}",
                f"{row['bubble_share']:.1%}",
            )
        )
    print_table(heads, rows)
    print("  gradients: beside the last micro-batch's backward + after it, which takes after ms")
    if found.pipeline.lanes:
        lanes = sorted({each.value for each in found.pipeline.lanes})
        print(
            f"  sends: {found.pipeline.send_bytes / 1e6:.2f} MB a micro-batch and direction over the "
            f"{' and the '.join(f'{each}-node' for each in lanes)} link, {found.pipeline.sends_ms[0]:.3f} ms from the "
            "first stage to the second; both stages wait meanwhile"
        )
    if found.pipeline.tied_ms:
        print(
            "  the first and the last stage share the embedding: DeepSpeed sums its gradients when all backwards are "
            f"over, in {found.pipeline.tied_ms:.2f} ms"
        )
