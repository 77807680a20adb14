# SPDX-License-Identifier: Apache-2.0
"""Say in ``ds_fsmoe plan --from-trace`` what other ranks, all-to-alls and places of experts would have given."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from ds_fsmoe.offline.plan.placement import PAYS_WITHIN, read_loads
from ds_fsmoe.terminal.tables import print_table

if TYPE_CHECKING:
    from ds_fsmoe.offline.plan.recorded_run import Calibrated
    from ds_fsmoe.planning.groups import Groups
    from ds_fsmoe.planning.other_ranks import OtherRanks
    from ds_fsmoe.planning.placement_costs import Prices
    from ds_fsmoe.planning.recorded_costs import RecordedJob, RecordedKind
    from ds_fsmoe.planning.what_if import WhatIf


def print_elsewhere(found: Calibrated, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Print what the same schedule would have given with other all-to-alls and on other ranks."""
    wanted = _wanted(found.what_if.job, args)
    timed = next(iter(found.what_if.job.kinds)).ways
    rows: list[tuple[str, ...]] = []
    data: list[dict[str, Any]] = []
    for name, other in wanted:
        try:
            what_if = _elsewhere(found, other)
        except ValueError as error:
            rows.append((name, "", "", "", str(error)))
            data.append({"name": name, "why_not": str(error)})
            continue
        prediction = what_if.by_schedule(what_if.job.schedule)
        step_ms = found.step_of(prediction)
        was, now = found.what_if.job.kinds[0].groups, what_if.job.kinds[0].groups
        gain = found.step_ms / step_ms * now.world / was.world
        is_timed = now == was and other.alltoall in timed
        note = "timed in the job" if is_timed else "extrapolated by the cluster's numbers"
        rows.append((name, _describe(now), f"{step_ms:.1f}", f"{gain:.2f}x", note))
        data.append(
            {
                "name": name,
                "groups": _sizes(now),
                "step_ms": step_ms,
                "tokens_gain": gain,
                "is_extrapolated": not is_timed,
            }
        )
    if rows:
        print(f"\na step by {found.what_if.job.schedule} with other all-to-alls and ranks; each rank keeps its tokens")
        print_table(("", "ranks", "predicted ms", "tokens a second", ""), rows)
    return data


def _wanted(job: RecordedJob, args: argparse.Namespace) -> list[tuple[str, OtherRanks]]:
    """Return what is looked at: what was asked for, each all-to-all, and other layouts of the same ranks."""
    from ds_fsmoe.planning.other_ranks import OtherRanks
    from ds_fsmoe.planning.workload import ALLTOALLS

    kind = job.kinds[0]
    groups, num_experts = kind.groups, kind.shape.num_experts
    asked = {"nodes": args.nodes, "per_node": args.ranks_per_node, "ep": args.ep, "esp": args.esp}
    found: list[tuple[str, OtherRanks]] = []
    if any(each is not None for each in asked.values()):
        words = {
            "nodes": "--nodes",
            "per_node": "--ranks-per-node",
            "ep": "--ep-size",
            "esp": "--expert-tensor-parallel-size",
        }
        name = " ".join(f"{words[each]} {size}" for each, size in asked.items() if size is not None)
        found.append((name, OtherRanks(**asked)))
    if len(groups.placements["ep"].lanes) == 2:
        found += [(f"all-to-all {name}", OtherRanks(alltoall=name)) for name in ALLTOALLS]
    layouts = [
        (ep, esp)
        for esp in range(1, groups.gpus_per_node + 1)
        for ep in range(1, groups.stage + 1)
        if groups.stage % (ep * esp) == 0 and num_experts % ep == 0 and (ep, esp) != (groups.ep, groups.esp)
    ]
    found += [
        (f"ep_size {ep}, expert_tensor_parallel_size {esp}", OtherRanks(ep=ep, esp=esp))
        for ep, esp in layouts
        if ep * esp > 1
    ]
    if args.nodes is None:
        found.append(("twice the nodes", OtherRanks(nodes=2 * max(1, groups.world // groups.gpus_per_node))))
    return found


def _elsewhere(found: Calibrated, other: OtherRanks) -> WhatIf:
    """Return predictions for the job on other ranks.

    Raises:
        ValueError: it cannot be there, or nothing is known of the cluster.
    """
    from ds_fsmoe.planning.other_ranks import OtherRanks, on_other_ranks
    from ds_fsmoe.planning.what_if import WhatIf

    job = found.what_if.job
    kinds, name = job.kinds, other.alltoall
    if name is not None and other == OtherRanks(alltoall=name) and all(name in kind.ways for kind in kinds):
        only = tuple(replace(kind, ways={name: kind.ways[name]}) for kind in kinds)
        return WhatIf(replace(job, kinds=only, _costs={}), found.what_if.rest_ms)
    if found.cluster is None:
        raise ValueError("what collectives cost among other ranks is not known: --cluster FILE says it")
    return WhatIf(on_other_ranks(job, found.cluster, other), found.what_if.rest_ms)


def _describe(groups: Groups) -> str:
    nodes = groups.world // groups.gpus_per_node
    cut = f", expert_tensor_parallel_size {groups.esp}" if groups.esp > 1 else ""
    return f"{nodes} x {groups.gpus_per_node}, ep_size {groups.ep}{cut}"


def _sizes(groups: Groups) -> dict[str, int]:
    return {"world": groups.world, "gpus_per_node": groups.gpus_per_node, "ep": groups.ep, "esp": groups.esp}


# ---- places of experts


def print_placed(found: Calibrated, args: argparse.Namespace) -> dict[str, Any] | None:
    """Print what placing experts by the routing that was recorded would have given; ``None``: there is no such thing,
    or it would change nothing."""
    from ds_fsmoe.offline.routing.page import ROUTING, has_routing

    asked = (found.run.facts.get("block", {}).get("routing") or {}).get("record")
    folder = args.loads or next(
        (each for each in (found.run.folder / ROUTING, Path(asked or ".")) if has_routing(each)), None
    )
    if folder is None:
        return None
    job = found.what_if.job
    kind = job.kinds[0]
    if kind.shape.num_tokens is None or kind.groups.ep == 1:
        print(
            f"\nrouting in {folder}: places change nothing where experts have as many slots each, or lie on every rank"
        )
        return None
    shape = SimpleNamespace(capacity_factor=None, imbalance=1.0, E=kind.shape.num_experts)
    asking = argparse.Namespace(loads=Path(folder))
    loads = read_loads(asking, {"shape": shape, "groups": kind.groups})
    assert loads is not None
    rows, data, gain_ms = [], [], 0.0
    labels = [job.labels[min(index, len(job.labels) - 1)] for index in range(len(loads.rows))]
    for label, (layer, rows_RE) in zip(labels, loads.rows.items(), strict=True):
        row = _placed(found, label, layer, rows_RE)
        gain_ms += row["now_ms"] - row["placed_ms"]
        data.append(row)
        after = row["pays_after_steps"]
        pays = "stays" if after is None else f"after {after} step{'s' * (after != 1)}"
        numbers = (f"{row[each]:.2f}" for each in ("fullest_now", "fullest_placed", "now_ms", "placed_ms"))
        rows.append((layer, *numbers, pays))
    print(f"\nexperts placed by the routing in {folder}")
    print_table(("layer", "fullest now", "placed", "layer ms now", "placed", "pays"), rows)
    step_ms = found.step_ms - gain_ms
    print(f"  a step: {step_ms:.1f} ms placed, {found.step_ms / step_ms:.2f}x over what ran")
    return {"layers": data, "step_ms": step_ms, "gain": found.step_ms / step_ms}


def _placed(found: Calibrated, label: str, layer: str, rows_RE: np.ndarray) -> dict[str, Any]:
    from ds_fsmoe.planning.expert_placement import ExpertPlacement
    from ds_fsmoe.planning.placement_costs import Seen
    from ds_fsmoe.planning.placement_policies import balanced, decide

    job = found.what_if.job
    kind = job.kind_of(label)
    groups, num_experts = kind.groups, kind.shape.num_experts
    rows_GE = rows_RE.reshape(-1, groups.ep, num_experts).mean(axis=0) if len(rows_RE) % groups.ep == 0 else None
    if rows_GE is None:
        rows_GE = np.tile(rows_RE.sum(axis=0) / groups.ep, (groups.ep, 1))
    nodes = tuple(index * groups.esp // groups.gpus_per_node for index in range(groups.ep))
    now, seen = ExpertPlacement.at_start(num_experts, groups.ep), Seen(rows_GE, nodes)
    prices = _prices(found, kind, label, rows_GE)
    decision = decide(now, seen, balanced, prices, PAYS_WITHIN, layer)
    return {
        "layer": layer,
        "fullest_now": decision.before,
        "fullest_placed": decision.after,
        "now_ms": prices.step_ms(now, seen),
        "placed_ms": prices.step_ms(decision.placement, seen),
        "pays_after_steps": decision.pays_after_steps,
        "why": decision.why,
        "placement": decision.placement.as_dict(),
    }


def _prices(found: Calibrated, kind: RecordedKind, label: str, rows_GE: np.ndarray) -> Prices:
    """Return what a layer costs as it was run, held against balanced routing."""
    from ds_fsmoe.planning.layer_plan import LayerPlan
    from ds_fsmoe.planning.placement_costs import Prices

    job, at = found.what_if.job, found.what_if.job.labels.index(label)
    name = found.ran.alltoalls[at]
    forward, backward = (each.plan() for each in found.ran.orders[at])
    shape = replace(kind.shape, capacity=max(1, round(rows_GE.sum() / kind.shape.num_experts / len(rows_GE))))
    weights = max(1, shape.num_weights * kind.groups.ep // shape.num_experts)
    # fp32 trains its weights in place, a narrower type a copy of them in fp32; both have two moments.
    states_bytes = 8 if shape.dtype_bytes == 4 else 12
    return Prices(
        shape,
        kind.groups,
        LayerPlan(forward, backward, name),
        job.costs_of(kind, name),
        moved_bytes=weights * (shape.dtype_bytes + states_bytes),
        alltoall=kind.ways[name].planned,
        contention=job.contention,
        is_serial=job.is_serial,
        micro_batches=job.micro_batches,
    )
