# SPDX-License-Identifier: Apache-2.0
"""Draws docs/placement.png: the rows of ranks before and after experts have moved, by the policy that comes along.

python tools/draw_placement.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import vl_convert

from ds_fsmoe.offline.report.charts import Chart, draw_ranks
from ds_fsmoe.offline.report.decisions import rows_of_ranks
from ds_fsmoe.planning.expert_placement import ExpertPlacement
from ds_fsmoe.planning.placement_costs import ObservedRouting
from ds_fsmoe.planning.placement_policies import Allowed, balanced
from ds_fsmoe.routes.made import choices

FILE = Path(__file__).resolve().parents[1] / "docs" / "placement.png"
ROUTING, NUM_TOKENS, NUM_EXPERTS, K = "zipf_1.5", 2048, 32, 2
NODE_OF_RANK = (0, 0, 0, 0, 1, 1, 1, 1)


def rows() -> np.ndarray:
    """Return [G, E]: the rows that each rank has for each expert."""
    sizes = {"num_tokens": NUM_TOKENS, "num_experts": NUM_EXPERTS, "k": K, "ep_size": len(NODE_OF_RANK)}
    of_ranks = [choices(ROUTING, **sizes, rank=rank) for rank in range(len(NODE_OF_RANK))]
    return np.stack([np.bincount(each.ravel(), minlength=NUM_EXPERTS) for each in of_ranks])


def placements() -> dict[str, ExpertPlacement]:
    """Return title -> placement."""
    now = ExpertPlacement.at_start(NUM_EXPERTS, len(NODE_OF_RANK))
    return {
        "the model's own order": now,
        "experts moved": balanced(now, ObservedRouting(rows(), NODE_OF_RANK), Allowed()),
    }


def above_each_other(charts: Sequence[Chart]) -> dict[str, Any]:
    """Return one chart of several, on white; the names of their data get numbers, so that they are told apart."""

    def numbered(value: Any, number: int) -> Any:
        if isinstance(value, list):
            return [numbered(each, number) for each in value]
        if not isinstance(value, dict):
            return value
        data = {"data": {"name": f"{number} {value['data']['name']}"}} if "data" in value else {}
        return {name: numbered(each, number) for name, each in value.items() if name != "data"} | data

    parts, datasets = [], {}
    for number, each in enumerate(charts):
        rest = {name: value for name, value in each.spec.items() if name not in ("datasets", "autosize")}
        parts.append(numbered(rest, number) | {"width": 640})
        datasets |= {f"{number} {name}": rows for name, rows in each.spec["datasets"].items()}
    return {"vconcat": parts, "datasets": datasets, "config": {"view": {"stroke": None}, "title": {"anchor": "start"}}}


def main() -> None:
    """Write the picture, and print what the fullest rank has and how many experts have moved."""
    panels, start = [], ExpertPlacement.at_start(NUM_EXPERTS, len(NODE_OF_RANK))
    for title, each in placements().items():
        panels.append((title, rows_of_ranks(each, rows().sum(axis=0))))
        loads = [sum(part for _, part in parts) for parts in panels[-1][1]]
        over = max(loads) / (sum(loads) / len(loads))
        print(f"{title}: fullest rank {over:.2f}, {start.num_moved(each)} experts moved")
    FILE.write_bytes(vl_convert.vegalite_to_png(above_each_other(draw_ranks(panels)), scale=1.5))
    print(FILE)


if __name__ == "__main__":
    main()
