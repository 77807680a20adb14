# SPDX-License-Identifier: Apache-2.0
"""2 and 4 ranks on this GPU, over NCCL where it takes them, else over gloo: collectives and training.

Ranks take turns on the GPU, so no time of this means anything.
"""

from __future__ import annotations

from benchmarks.gpu.checks import Checks, SkipCheckError


def run(checks: Checks) -> None:
    from tests.gpu_ranks import SEVERAL_RANKS, VARIABLES, nccl_version, run_ranks

    if checks.only is not None:
        return
    preload = {"LD_PRELOAD": checks.nccl} if checks.nccl else {}

    def version() -> dict[str, str]:
        found = nccl_version(**preload) if checks.is_cuda else (0,)
        if found < SEVERAL_RANKS:
            raise SkipCheckError(f"NCCL {found} does not take several ranks on one GPU: over gloo")
        return {"nccl": str(found)}

    backend, variables = ("nccl", preload | VARIABLES) if checks.check("NCCL", version) else ("gloo", {})
    for world, limit_s in ((2, checks.left_s() * 0.5), (4, checks.left_s() - 8)):
        if world == 2 or (not checks.small and limit_s > 30):
            label = f"{backend}, {world} ranks"
            found = run_ranks(checks.folder / label, world, backend, checks.small, limit_s, **variables)
            for name, (status, said) in found.items():
                checks.note(f"{label}: {name}", status, said)
            if "end" in found:
                return
