# SPDX-License-Identifier: Apache-2.0
"""What the machine has; the ops, compiled for the device and for the CPU at the same time; the card's ceilings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

from benchmarks.gpu.checks import Checks, WrongError, end, median_ms, start, tail

TOOLS = ("c++", "ninja", "nvcc", "torchrun", "compute-sanitizer", "ncu", "cuda-gdb", "ip")
OF_GPU = "name,driver_version,memory.total,memory.used,compute_mode,mig.mode.current"
BUILD = "import sys; from ds_fsmoe.ops import load_ops; print('OPS', load_ops('required', sys.argv[1]).name)"


def said(*command: str) -> str:
    """Return what a command prints, or that it is not there."""
    if shutil.which(command[0]) is None:
        return "not found"
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return (done.stdout + done.stderr).strip()


def run(checks: Checks) -> None:
    builds = {}
    for device in dict.fromkeys((checks.device_type, "cpu")) if checks.only is None else ():
        log = checks.folder / f"build_{device}.txt"
        builds[device] = log, start(["-c", BUILD, device], log, DS_ACCELERATOR=device)

    def machine() -> dict[str, Any]:
        variables = {
            name: each for name, each in os.environ.items() if name.startswith(("TORCH", "CUDA", "NCCL", "DS_"))
        }
        gpu = said("nvidia-smi", f"--query-gpu={OF_GPU}", "--format=csv,noheader")
        found = {"gpu": gpu, "variables": variables, "tools": {each: shutil.which(each) for each in TOOLS}}
        return found | {"env": said(sys.executable, "-m", "ds_fsmoe", "env", "--brief")}

    checks.check("machine", machine)

    def ceilings() -> dict[str, Any]:
        """The rates that all others are held against."""
        import torch

        from ds_fsmoe.observing.device_time import elapsed_ms

        device, size = checks.device, 8192 if checks.is_cuda else 128
        found = {"torch": torch.__version__, "cuda": torch.version.cuda}
        if checks.is_cuda:
            found |= {"card": str(torch.cuda.get_device_properties(device)), "built for": torch.cuda.get_arch_list()}
        a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
        x = torch.randn(2**30 if checks.is_cuda else 2**12, device=device)
        y = torch.empty_like(x)
        product_ms, copy_ms = (median_ms(elapsed_ms, device, each) for each in (lambda: a @ b, lambda: y.copy_(x)))
        rates = {"bf16_tflops": 2 * size**3 / 1e9 / product_ms, "copy_tb_s": 2 * x.nbytes / 1e9 / copy_ms}
        return found | {name: round(rate, 3) for name, rate in rates.items()}

    checks.check("ceilings", ceilings)
    for device, (log, process) in builds.items():

        def built(log: Any = log, process: Any = process) -> None:
            if not end(process, checks.left_s() - 3) or process.returncode or "OPS compiled" not in tail(log):
                raise WrongError(f"exit status {process.returncode}: {tail(log, 5000)}")

        checks.check(f"ops for {device}", built, needs_s=1.0)
