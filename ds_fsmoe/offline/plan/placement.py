# SPDX-License-Identifier: Apache-2.0
"""Say in ``ds_fsmoe plan`` what it would give to place experts by the rows that they got."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ds_fsmoe.terminal.tables import print_table
from ds_fsmoe.untrusted import read_json

if TYPE_CHECKING:
    from ds_fsmoe.offline.plan.report import Report
    from ds_fsmoe.planning.placement_costs import Prices
    from ds_fsmoe.planning.workload import Shape
    from ds_fsmoe.routes.recorded import Recording

PAYS_WITHIN = 1000
"""The steps within which a move has to pay here, as many as in training by default."""


@dataclass(frozen=True, eq=False)
class RecordedLoads:
    """The rows that experts got, as a file says."""

    path: Path
    rows: dict[str, np.ndarray]
    """Layer -> [R, E], the rows of each rank that it was measured on for each expert."""


def add_loads(how: Any) -> None:
    """Add the arguments about loads and where they would put experts."""
    how.add_argument(
        "--loads", type=Path, metavar="FILE", help="a recorded routing, or JSON, by which experts would be placed"
    )
    how.add_argument("--spare-experts", action=_Gone, help=argparse.SUPPRESS)


class _Gone(argparse.Action):
    """Says that an option of version 0.2.0 means nothing any more."""

    def __call__(self, parser: argparse.ArgumentParser, args: Any, value: Any, option: str | None = None) -> None:
        why = "means nothing any more, as experts have no replicas in training: leave it out"
        print(f"{parser.prog}: {option} {value}: {why}", file=sys.stderr)


def read_loads(args: argparse.Namespace, job: dict[str, Any]) -> RecordedLoads | None:
    """Return the loads that the arguments name, checked against the model; ``None``: they name none.

    Raises:
        ValueError: no such file, one of another model, or arguments that do not go with it.
    """
    if args.loads is None:
        return None
    shape, groups = job["shape"], job["groups"]
    if shape.capacity_factor is not None:
        raise ValueError(
            f"--loads = {args.loads}: only where no token is dropped (--capacity-factor none), since otherwise every "
            "expert has as many slots"
        )
    if shape.imbalance > 1:
        raise ValueError(f"--imbalance = {shape.imbalance:g}: not with --loads, which says how full ranks are")
    if groups.ep == 1:
        raise ValueError(f"--loads = {args.loads}: only where experts lie on several ranks (--ep 2 or more)")
    rows = _of_json(args.loads) if args.loads.suffix == ".json" else _of_recording(args.loads)
    for layer, rows_RE in rows.items():
        if rows_RE.shape[1] != shape.E:
            raise ValueError(
                f"--loads = {args.loads}: layer {layer} has {rows_RE.shape[1]} experts, and the model {shape.E}: the "
                f"choices are a file of this model, or --experts {rows_RE.shape[1]}"
            )
    return RecordedLoads(args.loads, rows)


def print_placement(loads: RecordedLoads | None, result: Report, job: dict[str, Any]) -> dict[str, Any]:
    """Print what placing experts by loads would give; return it as plain data, nothing without loads."""
    if loads is None:
        return {}
    groups = result.groups
    prices = _prices(result, job)
    found = [place(layer, on_ranks(rows_RE, groups.ep), prices) for layer, rows_RE in loads.rows.items()]
    print(f"\nexperts placed by {loads.path}: balanced, on {groups.ep} ranks")
    heads = ("layer", "fullest now", "placed", "experts move", "layer ms now", "placed", "move ms", "pays")
    print_table(heads, [_cells(each) for each in found])
    print("  fullest: the rows of the fullest rank over the mean; layer ms: dispatch, experts, combine, both phases")
    balanced_ms, now_ms, placed_ms = step_ms = _steps_ms(found, prices, result)
    print(
        f"  a step of {result.preset_name}: {now_ms:.2f} ms with these loads, {placed_ms:.2f} ms placed "
        f"({now_ms / placed_ms:.2f}x), {balanced_ms:.2f} ms if all experts got as much"
    )
    size = f"{prices.moved_bytes / 1e6:.1f} MB, its weights and Adam's states"
    print(f"  an expert that moves takes {size}; a move has to pay within {PAYS_WITHIN} steps")
    if any(len(each) % groups.ep for each in loads.rows.values()):
        print(f"  the file is of other ranks than {groups.ep}: their rows are spread evenly over these")
    steps = dict(zip(("balanced", "now", "placed"), step_ms, strict=True))
    return {"placement": {"loads": str(loads.path), "layers": found, "step_ms": steps}}


def place(layer: str, rows_GE: np.ndarray, prices: Prices) -> dict[str, Any]:
    """Return where the experts of a layer would be placed by the rows that they got, and what that gives, as plain
    data."""
    from ds_fsmoe.planning.expert_placement import ExpertPlacement
    from ds_fsmoe.planning.placement_costs import Seen
    from ds_fsmoe.planning.placement_policies import balanced, decide

    groups = prices.groups
    now = ExpertPlacement.at_start(rows_GE.shape[1], groups.ep)
    seen = Seen(rows_GE, tuple(index * groups.esp // groups.gpus_per_node for index in range(groups.ep)))
    decision = decide(now, seen, balanced, prices, PAYS_WITHIN, layer)
    return {
        "layer": layer,
        "fullest_now": decision.before,
        "fullest_placed": decision.after,
        "experts_move": now.num_moved(decision.placement),
        "now_ms": prices.step_ms(now, seen),
        "placed_ms": prices.step_ms(decision.placement, seen),
        "moves_ms": decision.moves_ms,
        "pays_after_steps": decision.pays_after_steps,
        "why": decision.why,
        "placement": decision.placement.as_dict(),
    }


def pays_words(placed: Mapping[str, Any]) -> str:
    """Say after how many steps a move has paid."""
    after = placed["pays_after_steps"]
    return "stays" if after is None else f"after {after} step{'s' * (after != 1)}"


def moved_bytes(weights: int, dtype_bytes: int) -> int:
    """Return the bytes of an expert that moves, by the elements of its weights: fp32 trains them in place, a narrower
    type a copy of them in fp32; both have two moments."""
    return weights * (dtype_bytes + (8 if dtype_bytes == 4 else 12))


def _prices(result: Report, job: dict[str, Any]) -> Prices:
    """Return what a layer of the plan that is shown costs."""
    from ds_fsmoe.planning.block import LayerPlan
    from ds_fsmoe.planning.cost import LayerCosts
    from ds_fsmoe.planning.placement_costs import Prices
    from ds_fsmoe.planning.workload import GEMMS

    shape, groups, settings = result.shape, result.groups, result.settings
    forward, backward = result.plan.blocks(len(result.layers) // 2)
    weights = GEMMS[shape.ffn] * shape.M * shape.H // groups.esp
    return Prices(
        _call(shape, groups.mp, weights, shape.E // groups.ep, job),
        groups,
        LayerPlan(forward, backward, job["alltoall"]),
        LayerCosts.written(result.costs, settings.host_ms),
        moved_bytes=moved_bytes(weights, shape.dtype_bytes),
        alltoall=job["alltoall"],
        contention=settings.contention,
        recompute=job["recompute"],
    )


def _call(shape: Shape, mp: int, weights: int, num_local: int, job: dict[str, Any]) -> Any:
    """Return the sizes of a call of the layer that is planned."""
    from ds_fsmoe.planning.call_shape import CallShape
    from ds_fsmoe.planning.groups import Crossings
    from ds_fsmoe.planning.workload import GEMMS

    tokens_S = shape.B * shape.L / mp
    crossings = job["crossings"]
    return CallShape(
        num_experts=shape.E,
        capacity=max(1, round(shape.K * tokens_S / shape.E)),
        width=shape.M,
        dtype_bytes=shape.dtype_bytes,
        num_products=GEMMS[shape.ffn] * num_local,
        num_weights=weights * num_local,
        num_tokens=max(1, round(tokens_S)),
        crossings=crossings and Crossings(crossings.nodes / shape.K, crossings.ranks / shape.K),
    )


def _steps_ms(found: list[dict[str, Any]], prices: Prices, result: Report) -> tuple[float, float, float]:
    """Return the time of a step with balanced routing, with these loads, and with these loads and experts placed.

    The layers of the file stand for those of the model, whose number may be another.
    """
    from ds_fsmoe.planning.placement_costs import BALANCED

    even_ms = prices.layer_ms(BALANCED)
    step_ms = sum(result.times_ms[result.preset_name])
    now_ms, placed_ms = (
        step_ms + len(result.layers) * float(np.mean([each[name] - even_ms for each in found]))
        for name in ("now_ms", "placed_ms")
    )
    return step_ms, now_ms, placed_ms


def on_ranks(rows_RE: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return [G, E]: of ranks at the same index the mean, or of others than these ranks all rows spread evenly."""
    if len(rows_RE) % num_ranks == 0:
        return rows_RE.reshape(-1, num_ranks, rows_RE.shape[1]).mean(axis=0)
    return np.tile(rows_RE.sum(axis=0) / num_ranks, (num_ranks, 1))


def _cells(placed: Mapping[str, Any]) -> tuple[object, ...]:
    fullest = (f"{placed[each]:.2f}" for each in ("fullest_now", "fullest_placed"))
    times_ms = (f"{placed[each]:.3f}" for each in ("now_ms", "placed_ms"))
    return (
        placed["layer"],
        *fullest,
        placed["experts_move"],
        *times_ms,
        f"{placed['moves_ms'] or 0:.2f}",
        pays_words(placed),
    )


def _of_recording(path: Path) -> dict[str, np.ndarray]:
    """Return layer -> [R, E], the mean rows per step of a recording, ranks of an EP group in its order."""
    from ds_fsmoe.routes.recorded import read_routing

    recording = read_routing(path)
    rows = {layer.path: _mean_rows(recording, layer.path) for layer in recording.layers}
    if not any(each.sum() for each in rows.values()):
        raise ValueError(f"--loads = {path}: no token chose an expert there")
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


def _of_json(path: Path) -> dict[str, np.ndarray]:
    """Return layer -> [R, E] of ``{"layer": [[rows of rank 0 for each expert], ...]}``."""
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
