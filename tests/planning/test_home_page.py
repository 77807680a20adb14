# SPDX-License-Identifier: Apache-2.0
"""The three numbers, the bound and the gain on the front page are those that ``ds_fsmoe plan`` gives."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ds_fsmoe import cli

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
SECTION = README.split("## How much on my cluster?")[1].split("\n## ")[0]
LANES = ("compute", "inter", "intra")


def planned(tmp_path: Path, *args: str) -> tuple[dict[str, Any], dict[str, float]]:
    """Run the command of the page with more arguments; return what it writes, and the ms of each lane in a step of
    DeepSpeed's order.
    """
    (command,) = re.findall(r"`ds_fsmoe (plan --model [^`]+)`", " ".join(SECTION.split()))
    files = ["--json", str(tmp_path / "plan.json"), "--trace", str(tmp_path / "trace.json")]
    assert cli.main([*command.split(), *args, "--preset", "deepspeed", *files]) == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [each for each in events if each["ph"] == "X"]
    lanes_ms = {lane: sum(each["dur"] for each in spans if each["tid"] == lane) / 1e3 for lane in LANES}
    return json.loads((tmp_path / "plan.json").read_text()), lanes_ms


@pytest.mark.parametrize("stage", [1, 3])
def test_a_line_of_the_table_is_what_the_planner_says(stage: int, tmp_path: Path) -> None:
    # Side by side, computation and traffic slow each other down; the three numbers are those of each by itself.
    _, lanes_ms = planned(tmp_path, "--zero", str(stage), "--contention", "ideal")
    plan, _ = planned(tmp_path, "--zero", str(stage))
    step_ms, best_ms = (plan["presets"][name]["step_ms"] for name in ("deepspeed", "best"))
    bound = step_ms / max(lanes_ms.values())
    cells = [f"{each:.0f} ms" for each in (*lanes_ms.values(), step_ms)]
    row = " | ".join([f"| ZeRO {stage}", *cells, f"{bound:.2f}", f"{step_ms / best_ms:.2f} |"])
    assert row in SECTION
    assert step_ms / sum(plan["lower_bound_ms"].values()) <= bound + 0.01
    assert (plan["groups"]["ep"], plan["zero"], plan["stock"]["zero"]) == (8, stage, 3)
    if stage == 1:
        assert sum(lanes_ms.values()) == pytest.approx(step_ms), "nothing is overlapped: the formula of the page"
    stock_ms = plan["stock"]["step_ms"]
    said = " ".join(SECTION.split())
    assert f"It takes {stock_ms:.0f} ms, so ours gains {stock_ms / best_ms:.2f}." in said
    assert plan["shape"]["B"] == 1
