# SPDX-License-Identifier: Apache-2.0
"""Print what ``ds_fsmoe plan --halves`` asks for: what two halves of a micro-batch that take turns would give."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ds_fsmoe.terminal.tables import print_table

if TYPE_CHECKING:
    from ds_fsmoe.offline.plan.report import Report
    from ds_fsmoe.planning.decide.model_plan import ModelPlan


@dataclass(frozen=True)
class _Row:
    """A plan with one all-to-all."""

    alltoall: str
    name: str
    plan: ModelPlan
    phases_ms: tuple[float, float]

    @property
    def step_ms(self) -> float:
        return sum(self.phases_ms)


def add_halves(out: Any) -> None:
    """Add the argument."""
    out.add_argument(
        "--halves",
        action="store_true",
        help="what two halves of a micro-batch that take turns would give over best (with --gantt: two layers of both)",
    )


def print_halves(args: argparse.Namespace, result: Report, job: dict[str, Any]) -> dict[str, Any]:
    """Print what halves give over ``best`` with each all-to-all, where they are asked for; return it in plain types."""
    if not args.halves:
        return {}
    samples = job["shape"].B
    if samples == 1:
        print("\n--halves: the batch is halved, and one sample has no halves; --samples 2 or more shows them")
        return {}
    from ds_fsmoe.offline.plan.report import report
    from ds_fsmoe.planning.decide.bounds import busiest_ms

    print("\ntwo halves of a micro-batch that take turns, over best")
    if job["zero"].stage:
        job = job | {"zero": replace(job["zero"], gathers=False)}
        result = report(**job, preset_name="best")
        scatters = " and the reduce-scatters of gradients" if job["zero"].stage == 3 else ""
        print(f"  both without the gathers of parameters{scatters} of ZeRO {job['zero'].stage}")
    if samples % 2:
        print(f"--samples {samples}: taken as if both halves had {samples / 2:g}")
    rows = [row for name in _alltoalls(job) for row in _rows(result, job, name)]
    best_ms = min(row.step_ms for row in rows if not row.plan.in_halves)
    cells = [
        (
            row.name,
            row.alltoall,
            *_chunks(row.plan),
            *(f"{each:.2f}" for each in (*row.phases_ms, row.step_ms)),
            f"{best_ms / row.step_ms:.3f}x",
        )
        for row in rows
    ]
    bounds_ms = busiest_ms(result.zero.layers("best", result.layers), result.costs)
    bounds = (f"{each:.2f}" for each in (*bounds_ms, sum(bounds_ms)))
    cells.append(("(lower bound)", job["alltoall"], "", "", *bounds, f"{best_ms / sum(bounds_ms):.3f}x"))
    heads = ("plan", "all-to-all", "chunks", "in the backward", "forward ms", "backward ms", "step ms", "over best")
    print_table(heads, cells)
    if args.gantt:
        for row in (each for each in rows if each.alltoall == job["alltoall"]):
            for phase, timeline in result.pair_timelines(row.plan):
                print(f"\ntwo layers, {phase}, {row.name}:\n{timeline.gantt(110)}")
    return {
        "halves": [
            {
                "plan": row.name,
                "alltoall": row.alltoall,
                "forward_ms": row.phases_ms[0],
                "backward_ms": row.phases_ms[1],
                "step_ms": row.step_ms,
                "over_best": best_ms / row.step_ms,
            }
            for row in rows
        ]
    }


def halves_to_draw(args: argparse.Namespace, drawn: Report, job: dict[str, Any]) -> ModelPlan | None:
    """Return the plan in halves that is drawn with the others, if it is asked for."""
    return drawn.in_halves() if args.halves and job["shape"].B > 1 else None


def _alltoalls(job: dict[str, Any]) -> tuple[str, ...]:
    from ds_fsmoe.planning.groups import crosses_once
    from ds_fsmoe.planning.workload import ALLTOALLS

    return ALLTOALLS if crosses_once(job["groups"]) else (job["alltoall"],)


def _rows(result: Report, job: dict[str, Any], alltoall: str) -> list[_Row]:
    from ds_fsmoe.offline.plan.report import report

    found = result if alltoall == job["alltoall"] else report(**(job | {"alltoall": alltoall}), preset_name="best")
    halves = found.in_halves()
    best = found.plans["best"]
    rows = [_Row(alltoall, "best", best, found.times_ms["best"])]
    if halves is not None:
        rows.append(_Row(alltoall, "best, in halves", halves, found.phases_ms(halves)))
    return rows


def _chunks(plan: ModelPlan) -> tuple[str, str]:
    """Return the numbers of chunks of the layers, forward and backward."""

    def of(degrees: list[int]) -> str:
        return " or ".join(map(str, sorted(set(degrees))))

    return of([each.degree for each in plan.forward]), of([each.degree for each in plan.backward])
