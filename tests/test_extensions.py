# SPDX-License-Identifier: Apache-2.0
"""The examples of parts of one's own train, each named in the config and nothing else edited."""

from __future__ import annotations

import re
from pathlib import Path

from tests.samples import sampled
from tests.scripts import ROOT, START, Start

SCRIPT = ROOT / "examples" / "extend.py"
KINDS = ("gate", "order", "alltoall", "expert", "hook")


@START
@sampled("kinds", [*((kind,) for kind in KINDS), KINDS], ids=" ".join)
def test_a_model_learns_with_each_kind_of_part_of_ones_own(
    kinds: tuple[str, ...], start: Start, tmp_path: Path
) -> None:
    printed = start(tmp_path, str(SCRIPT), *kinds)
    for kind in kinds:
        found = re.search(rf"^{kind} .*: loss ([\d.]+) -> ([\d.]+)$", printed, re.MULTILINE)
        assert found, printed[-2000:]
        assert float(found[2]) < 0.8 * float(found[1]), kind
    if "hook" not in kinds:
        return
    sent = re.search(r"forward: ([\d.]+) kB sent, backward: ([\d.]+) kB sent", printed)
    assert sent, printed[-2000:]
    assert float(sent[1]) == float(sent[2]) > 0
