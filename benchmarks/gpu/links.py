# SPDX-License-Identifier: Apache-2.0
"""Every preset's plan on streams, beside emulated links: predicted, then measured, by ``bench_gpu.py``."""

from __future__ import annotations

import csv
import shutil
import statistics
from dataclasses import replace
from typing import Any

from benchmarks.gpu import bench_gpu
from benchmarks.gpu.checks import Checks, WrongError
from benchmarks.gpu.emulated_plans import Configuration
from ds_fsmoe.planning.workload import Shape

MIXTRAL = Shape(8, 4096, 4096, 14336, 8, K=2, capacity_factor=1.0, ffn="mixtral", heads=32, kv_heads=8, dtype_bytes=2)
NARROW = (768, 128, 8, 32, 8), (1024, 64, 8, 16, 16), (1408, 64, 6, 16, 16)
"""H, E, K and heads of Qwen3-30B-A3B, OLMoE-1B-7B, DeepSeek-V2-Lite."""


def run(checks: Checks) -> None:
    def bench() -> dict[str, Any]:
        narrow = [replace(MIXTRAL, M=2048, H=H, E=E, K=K, heads=n, kv_heads=kv) for H, E, K, n, kv in NARROW]
        bench_gpu.FULL = tuple(Configuration("modern", each, timed=True) for each in (MIXTRAL, *narrow))
        options = ["--device", checks.device_type, "--results", str(checks.folder), "--overhead", "never"]
        options += ["--budget", f"{max(10.0, checks.left_s() - 6):.0f}", *(["--quick"] if checks.small else [])]
        status = bench_gpu.main(options)
        with (checks.folder / "gpu.csv").open(newline="") as opened:
            rows = [each for each in csv.DictReader(opened) if each["phase"] == "step" and each["measured"]]
        if status or not rows:
            raise WrongError(f"exit status {status}, {len(rows)} rows")
        shutil.copyfile(checks.folder / "gpu.csv", checks.folder.parent / "gpu_links.csv")
        off = [abs(float(each["off"])) for each in rows]
        best = {each["configuration"]: each["ratio"] for each in rows if each["preset"] == "best"}
        late = {each["configuration"] for each in rows if float(each["issue_ms"] or 0) > float(each["measured"])}
        found = {"rows": len(rows), "off, median and most": (round(statistics.median(off), 3), round(max(off), 3))}
        return found | {"best over deepspeed": best, "the host was slower": sorted(late)}

    checks.check("bench_gpu", bench, needs_s=15)
