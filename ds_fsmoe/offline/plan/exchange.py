# SPDX-License-Identifier: Apache-2.0
"""Choose the all-to-all of ``ds_fsmoe plan``, and say what each would take and how often tokens cross."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_fsmoe.terminal.tables import print_table

if TYPE_CHECKING:
    from ds_fsmoe.planning.groups import Crossings


def add_alltoall(how: Any) -> None:
    """Add the arguments about the exchange of tokens."""
    how.add_argument(
        "--alltoall", default="flat", help="flat, 2dh, once_per_node, or auto: the fastest by the shown preset"
    )
    how.add_argument("--expert-groups", type=int, metavar="G", help="groups of experts of which a token takes some (1)")
    how.add_argument("--groups-per-token", type=int, metavar="N", help="so many of them (all)")
    how.add_argument("--routing", type=Path, metavar="FILE", help="a recorded routing, to count how often tokens cross")


def exchange_of(args: argparse.Namespace, job: dict[str, Any]) -> dict[str, Any]:
    """Return the all-to-all and the crossings that the arguments ask for."""
    from ds_fsmoe.planning.workload import ALLTOALLS

    if args.alltoall not in (*ALLTOALLS, "auto"):
        raise ValueError(f"--alltoall = {args.alltoall!r}: the choices are {', '.join(ALLTOALLS)}, auto")
    crossings = _crossings(args, job)
    if args.alltoall != "auto":
        return {"alltoall": args.alltoall, "crossings": crossings}
    steps_ms = _steps_ms(job | {"crossings": crossings}, args.preset)
    return {"alltoall": min(steps_ms, key=steps_ms.__getitem__), "crossings": crossings}


def _steps_ms(job: dict[str, Any], preset: str) -> dict[str, float]:
    """Return the time of a step by a preset with each all-to-all."""
    from ds_fsmoe.offline.plan.report import report
    from ds_fsmoe.planning.workload import ALLTOALLS

    found = {name: report(**(job | {"alltoall": name}), preset_name=preset) for name in ALLTOALLS}
    return {name: sum(each.times_ms[preset]) for name, each in found.items()}


def print_exchanges(job: dict[str, Any], args: argparse.Namespace) -> None:
    """Print what each all-to-all would take, where there is a choice."""
    from ds_fsmoe.planning.groups import crosses_once
    from ds_fsmoe.planning.workload import ALLTOALLS, ONCE_PER_NODE

    if not crosses_once(job["groups"]):
        if job["alltoall"] == ONCE_PER_NODE:
            print("exchange once_per_node is run as flat: it needs whole experts on several ranks of several nodes")
        return
    at, shape, crossings = job["groups"].placements["ep"], job["shape"], job["crossings"]
    between = dict.fromkeys(ALLTOALLS, shape.F * (at.nodes - 1) / at.nodes)
    between[ONCE_PER_NODE] = shape.F * crossings.nodes / shape.K * (at.nodes - 1) / at.nodes
    steps = _steps_ms(job, args.preset)
    rows = [
        (name, f"{between[name]:.2f}", f"{time_ms:.2f}", f"{steps['flat'] / time_ms:.2f}x", "shown below" * is_shown)
        for name, time_ms in steps.items()
        for is_shown in (name == job["alltoall"],)
    ]
    print(f"\nall-to-alls, with {args.preset}")
    print_table(("all-to-all", "a token crosses between nodes", "step ms", "over flat", ""), rows)


def _crossings(args: argparse.Namespace, job: dict[str, Any]) -> Crossings | None:
    from ds_fsmoe.planning.groups import counted_crossings, crosses_once, expected_crossings

    groups, shape = job["groups"], job["shape"]
    if not crosses_once(groups) or shape.E % groups.ep:
        given = {"--expert-groups": args.expert_groups, "--groups-per-token": args.groups_per_token}
        for flag, value in (given | {"--routing": args.routing}).items():
            if value is not None:
                raise ValueError(
                    f"{flag} = {value}: only where whole experts lie on several ranks of several nodes, since it says "
                    "how often tokens cross: --expert-tensor-parallel-size 1, --ep-size a multiple of a node's GPUs"
                )
        return None
    at = groups.placements["ep"]
    sizes = shape.E, at.nodes, at.per_node
    if args.routing is not None:
        return counted_crossings(_recorded(args.routing, shape.E, shape.K), *sizes)
    limits = args.expert_groups or 1, args.groups_per_token or args.expert_groups or 1
    return expected_crossings(shape.E, shape.K, at.nodes, at.per_node, *limits)


def _recorded(path: Path, num_experts: int, k: int) -> Any:
    """Return the choices of all tokens in all layers that have so many experts and choices, [tokens, k]."""
    import numpy as np

    from ds_fsmoe.routes.recorded import read_routing

    recording = read_routing(path)
    found = [
        choices.indices_SK
        for rank, step, micro_batch, layer in recording
        if recording.ranks[rank].layers[layer].num_experts == num_experts
        for choices in (recording.choices(rank, step, micro_batch, layer),)
        if choices.indices_SK.shape[1] == k
    ]
    if not found:
        raise ValueError(f"--routing = {path}: has no layer of {num_experts} experts and {k} choices for a token")
    return np.concatenate(found)
