# SPDX-License-Identifier: Apache-2.0
"""Prints in ``ds_fsmoe plan`` the predicted gain of placing experts by measured rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ds_fsmoe.offline.plan.report import PlannedJob, Report
from ds_fsmoe.planning.block import LayerPlan
from ds_fsmoe.planning.call_shape import CallShape
from ds_fsmoe.planning.cost import LayerCosts
from ds_fsmoe.planning.expert_placement import ExpertPlacement
from ds_fsmoe.planning.groups import Fanout
from ds_fsmoe.planning.placement_costs import BALANCED, ObservedRouting, Prices
from ds_fsmoe.planning.placement_policies import balanced, decide
from ds_fsmoe.planning.workload import GEMMS
from ds_fsmoe.routes.recorded import Recording, read_routing
from ds_fsmoe.terminal.tables import print_table
from ds_fsmoe.untrusted import read_json

BREAK_EVEN_WITHIN = 1000
"""The steps within which a move has to pay here, as many as in training by default."""


Loads = Mapping[str, np.ndarray]
"""The rows that experts got: layer -> [R, E], the rows of each rank that it was measured on for each expert."""


def check_loads(path: Path, job: PlannedJob) -> None:
    """Check that loads match the planned job.

    Raises:
        ValueError: the arguments do not match the loads.
    """
    shape = job.model.shape
    if shape.capacity_factor is not None:
        raise ValueError(
            f"--loads = {path}: needs --capacity-factor none; otherwise all experts have equally many slots"
        )
    if shape.imbalance > 1:
        raise ValueError(f"--imbalance = {shape.imbalance:g}: cannot be combined with --loads")
    if job.groups.ep == 1:
        raise ValueError(f"--loads = {path}: needs experts on several ranks (--ep 2 or more)")


def read_loads(path: Path, num_experts: int) -> Loads:
    """Read loads of a model with ``num_experts`` experts.

    Raises:
        ValueError: the file does not exist, or is of another model.
    """
    loads = _of_json(path) if path.suffix == ".json" else _of_recording(path)
    for layer, rows_RE in loads.items():
        if rows_RE.shape[1] != num_experts:
            raise ValueError(
                f"--loads = {path}: layer {layer} has {rows_RE.shape[1]} experts, and the model {num_experts}: the "
                f"choices are a file of this model, or --experts {rows_RE.shape[1]}"
            )
    return loads


def print_placement(path: Path, loads: Loads, result: Report) -> dict[str, Any]:
    """Print the gain of placing experts by the loads of a file; return it as plain data."""
    groups, prices = result.job.groups, _prices(result)
    found = [place(layer, on_ranks(rows_RE, groups.ep), prices) for layer, rows_RE in loads.items()]
    print(f"\nexperts placed by {path}: balanced, on {groups.ep} ranks")
    print_layers(found)
    even_ms = prices.layer_ms(BALANCED)
    balanced_ms = result.step_ms(result.preset_name)
    # The layers of the file stand for those of the model, whose number may be another.
    now_ms, placed_ms = (
        balanced_ms + len(result.layers) * float(np.mean([each[name] - even_ms for each in found]))
        for name in ("now_ms", "placed_ms")
    )
    print(
        f"  a step of {result.preset_name}: {now_ms:.2f} ms with these loads, {placed_ms:.2f} ms placed "
        f"({now_ms / placed_ms:.2f}x), {balanced_ms:.2f} ms if all experts got as much"
    )
    size = f"{prices.moved_bytes / 1e6:.1f} MB, its weights and Adam's states"
    print(f"  moving an expert sends {size}; it has to break even within {BREAK_EVEN_WITHIN} steps")
    if any(len(each) % groups.ep for each in loads.values()):
        print(f"  the file is for another number of ranks than {groups.ep}: its rows are distributed evenly over these")
    steps_ms = {"balanced": balanced_ms, "now": now_ms, "placed": placed_ms}
    return {"placement": {"loads": str(path), "layers": found, "step_ms": steps_ms}}


def place(layer: str, rows_GE: np.ndarray, prices: Prices) -> dict[str, Any]:
    """Return the placement of a layer's experts by their rows, and its gain, as plain data."""
    groups = prices.groups
    now = ExpertPlacement.at_start(rows_GE.shape[1], groups.ep)
    seen = ObservedRouting(rows_GE, tuple(index * groups.esp // groups.gpus_per_node for index in range(groups.ep)))
    decision = decide(now, seen, balanced, prices, BREAK_EVEN_WITHIN, layer)
    return {
        "layer": layer,
        "fullest_now": decision.before,
        "fullest_placed": decision.after,
        "experts_move": now.num_moved(decision.placement),
        "now_ms": prices.step_ms(now, seen),
        "placed_ms": prices.step_ms(decision.placement, seen),
        "moves_ms": decision.moves_ms,
        "pays_after_steps": decision.breaks_even_after,
        "why": decision.why,
        "placement": decision.placement.as_dict(),
    }


def print_layers(found: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of the results of :func:`place` for each layer."""
    heads = ("layer", "fullest now", "placed", "experts move", "layer ms now", "placed", "move ms", "pays")
    rows = []
    for each in found:
        after = each["pays_after_steps"]
        rows.append(
            (
                each["layer"],
                f"{each['fullest_now']:.2f}",
                f"{each['fullest_placed']:.2f}",
                each["experts_move"],
                f"{each['now_ms']:.3f}",
                f"{each['placed_ms']:.3f}",
                f"{each['moves_ms'] or 0:.2f}",
                "stays" if after is None else f"after {after} step{'s' * (after != 1)}",
            )
        )
    print_table(heads, rows)
    print("  fullest: the rows of the fullest rank over the mean; layer ms: dispatch, experts, combine, both phases")


def moved_bytes(weights: int, dtype_bytes: int) -> int:
    """Return the bytes of an expert that moves, from the elements of its weights. Weights in fp32 are trained in
    place; narrower ones have a copy in fp32. Both have two moments.
    """
    return weights * (dtype_bytes + (8 if dtype_bytes == 4 else 12))


def _prices(result: Report) -> Prices:
    """Return the costs of a layer of the shown plan."""
    job, shape, settings = result.job, result.job.model.shape, result.planner.settings
    forward, backward = result.plan.blocks(len(result.layers) // 2)
    products, num_local = GEMMS[shape.ffn], shape.E // job.groups.ep
    weights = products * shape.M * shape.H // job.groups.esp
    tokens_S, fanout = shape.B * shape.L / job.groups.mp, job.fanout
    call = CallShape(
        num_experts=shape.E,
        capacity=max(1, round(shape.K * tokens_S / shape.E)),
        width=shape.M,
        dtype_bytes=shape.dtype_bytes,
        num_products=products * num_local,
        num_weights=weights * num_local,
        num_tokens=max(1, round(tokens_S)),
        crossings=fanout and Fanout(fanout.nodes / shape.K, fanout.ranks / shape.K),
    )
    return Prices(
        call,
        job.groups,
        LayerPlan(forward, backward, job.alltoall),
        LayerCosts.written(result.planner.costs, settings.host_ms),
        moved_bytes=moved_bytes(weights, shape.dtype_bytes),
        alltoall=job.alltoall,
        contention=settings.contention,
        recompute=job.recompute,
    )


def on_ranks(rows_RE: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return the rows on ``num_ranks`` ranks, [G, E]: the mean over ranks with the same index, or else all rows
    spread evenly.
    """
    if len(rows_RE) % num_ranks == 0:
        return rows_RE.reshape(-1, num_ranks, rows_RE.shape[1]).mean(axis=0)
    return np.tile(rows_RE.sum(axis=0) / num_ranks, (num_ranks, 1))


def _of_recording(path: Path) -> Loads:
    """Return layer -> the mean rows per step of a recording, [R, E], with ranks of an EP group in its order."""
    recording = read_routing(path)
    rows = {layer.path: _mean_rows(recording, layer.path) for layer in recording.layers}
    if not any(each.sum() for each in rows.values()):
        raise ValueError(f"--loads = {path}: contains no choices of tokens")
    return rows


def _mean_rows(recording: Recording, path: str) -> np.ndarray:
    counts_RE = sum(recording.counts(path, step) for step in recording.steps) / max(1, len(recording.steps))
    # Ranks that share experts come one after another, group by group.
    groups = {
        rank: layer.ep_ranks for rank, facts in recording.ranks.items() for layer in facts.layers if layer.path == path
    }
    ordered = [rank for group in dict.fromkeys(groups.values()) for rank in group if groups.get(rank) == group]
    row_of_rank = {rank: row for row, rank in enumerate(recording.ranks)}
    return counts_RE[[row_of_rank[rank] for rank in ordered]]


def _of_json(path: Path) -> Loads:
    """Return layer -> rows, [R, E], from ``{"layer": [[rows of rank 0 for each expert], ...]}``."""
    try:
        said = read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"--loads = {path}: cannot be read as JSON: {error}") from error
    wrong = 'must be {"layer": [[rows of rank 0 for each expert], ...]}, numbers of at least 0'
    if not isinstance(said, dict) or not said:
        raise ValueError(f"--loads = {path}: {wrong}")
    found = {}
    for layer, rows in said.items():
        try:
            rows_RE = np.array(rows)
        except (ValueError, OverflowError):  # ranks differ in experts
            rows_RE = np.empty(0)
        is_table = rows_RE.ndim == 2 and rows_RE.size > 0 and rows_RE.dtype.kind in "iuf"
        if not is_table or not (np.isfinite(rows_RE) & (rows_RE >= 0)).all():
            raise ValueError(f"--loads = {path}: layer {layer}: {wrong}")
        found[layer] = rows_RE.astype(float)
    return found
