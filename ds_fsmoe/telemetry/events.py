# SPDX-License-Identifier: Apache-2.0
"""Builds named numbers for DeepSpeed's monitors (TensorBoard, W&B, CSV, Comet)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ds_fsmoe.telemetry.routers import LayerLoad

Event = tuple[str, float, int]
"""An event: (name, value, samples trained with)."""


def of_routers(loads: Mapping[str, LayerLoad], is_detailed: bool) -> dict[str, float]:
    """Return the numbers of routers over all layers, and each layer's own if details are asked for.

    ``expert_tokens_mean`` is over all experts of all layers, ``expert_tokens_max`` the fullest of them,
    ``expert_tokens_cv`` the mean over layers of standard deviation over mean, ``dropped_share`` is of all choices,
    ``aux_loss`` the sum over layers, ``router_entropy`` (nats) the mean over the layers whose gates report it.
    """
    if not loads:
        return {}
    layers = list(loads.values())
    found = {
        "expert_tokens_mean": sum(each.mean for each in layers) / len(layers),
        "expert_tokens_max": max(each.most for each in layers),
        "expert_tokens_cv": sum(each.variation for each in layers) / len(layers),
        "dropped_share": sum(each.dropped for each in layers) / max(1.0, sum(each.asked for each in layers)),
        "aux_loss": sum(each.aux_loss for each in layers),
    }
    entropies = [each.entropy for each in layers if each.entropy is not None]
    if entropies:
        found["router_entropy"] = sum(entropies) / len(entropies)
    if is_detailed:
        for name, load in loads.items():
            found |= {f"{name}/{what}": value for what, value in of_routers({name: load}, False).items()}
    return found


def of_placement(rows: Sequence[Mapping[str, Any]], is_detailed: bool) -> dict[str, float]:
    """Return the numbers of one decision about where experts are, and each layer's own if details are asked for.

    ``balance`` is the rows of the fullest rank over the mean, and ``expected_balance`` the same with what was decided,
    both of the layer where it is highest; ``moved`` is the number of exchanges of two experts, ``gain_ms`` what a step
    is predicted to become shorter by: sums over layers, the last one left out where nothing is known of times.

    Args:
        rows: a row of the record for each layer.
        is_detailed: include each layer's own.
    """
    if not rows:
        return {}
    found = {
        "placement/balance": max(row["balance"] for row in rows),
        "placement/expected_balance": max(row["expected_balance"] for row in rows),
        "placement/moved": sum(row["num_swaps"] for row in rows),
    }
    gains_ms = [row["gain_ms"] for row in rows if row["gain_ms"] is not None]
    if gains_ms:
        found["placement/gain_ms"] = sum(gains_ms)
    if is_detailed:
        for row in rows:
            found |= {f"{row['layer']}/{what}": value for what, value in of_placement([row], False).items()}
    return found


def named(values: Mapping[str, float], num_samples: int) -> list[Event]:
    """Turn values into events, with ``fsmoe/`` before each name."""
    return [(f"fsmoe/{name}", float(value), num_samples) for name, value in values.items()]
