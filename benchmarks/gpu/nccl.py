# SPDX-License-Identifier: Apache-2.0
"""2 and 4 ranks on this GPU, over NCCL where it takes them, else over gloo: collectives and training.

Ranks take turns on the GPU, so no time of this means anything.
"""

from __future__ import annotations

from importlib.metadata import version as version_of

from benchmarks.gpu.checks import Checks, SkipCheckError

SECOND = "TORCH_DIST_USE_NCCL2"
"""The variable by which torch 2.14 and later choose between two implementations of NCCL."""


def has_two_implementations() -> bool:
    """Return whether the installed torch has them."""
    return tuple(int(each) for each in version_of("torch").split("+")[0].split(".")[:2]) >= (2, 14)


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
    runs = [("", {}, 2, checks.left_s() * 0.5), ("", {}, 4, checks.left_s() - 8)]
    if backend == "nccl" and has_two_implementations():
        # The newer one is what torch 2.15 takes; 2.14 takes it when asked.
        share_s = checks.left_s() * 0.3
        named = ((", older", {SECOND: "0"}), (", newer", {SECOND: "1"}))
        runs = [(*each, 2, share_s) for each in named] + [(*named[1], 4, checks.left_s() - 2 * share_s - 8)]
    for implementation, chosen, world, limit_s in runs:
        if world == 2 or (not checks.small and limit_s > 30):
            label = f"{backend}{implementation}, {world} ranks"
            found = run_ranks(checks.folder / label, world, backend, checks.small, limit_s, **variables, **chosen)
            for name, (status, said) in found.items():
                checks.note(f"{label}: {name}", status, said)
            if "end" in found:
                return
