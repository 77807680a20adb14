# SPDX-License-Identifier: Apache-2.0
"""The shapes of a run's files, as far as a page reads them."""

from __future__ import annotations

from ds_fsmoe.files.json_shapes import Map, Shape, is_number, is_text, is_whole, or_none, some

_BOTH = {"predicted_ms": is_number, "measured_ms": is_number}


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


_LOAD = {
    "tokens_E": some(is_number),
    "dropped_share": is_number,
    "aux_loss": is_number,
    "entropy": or_none(is_number),
}

STEP: Shape = {
    "step": is_whole,
    "loss?": or_none(is_number),
    **{f"{part}_ms?": is_number for part in ("step", "forward", "backward", "optimizer")},
    **{f"{name}?": is_whole for name in ("samples", "tokens_of_rank", "memory_bytes", "memory_peak_bytes")},
    "is_tuning?": _is_flag,
}
ROUTER: Shape = {"step": is_whole, "layers": Map(_LOAD)}
COMPARED: Shape = {
    "step": is_whole,
    "whole": _BOTH,
    "rest": _BOTH,
    "phases": Map(_BOTH),
    "busy?": Map(is_number),
}


def _is_expert(value: object) -> bool:
    return type(value) is int and value >= -1  # -1: an empty place


_PLACES = {"before": some(_is_expert), "after": some(_is_expert), "node_of_rank": some(is_whole)}
PLACEMENT: Shape = {
    "step": is_whole,
    "layer": is_text,
    "rows_E": some(is_number),
    "balance": is_number,
    "expected_balance": is_number,
    "num_swaps": is_whole,
    "num_replicas?": is_whole,  # of runs of version 0.2.0
    "gain_ms": or_none(is_number),
    "why": is_text,
    "places?": _PLACES,
}

_CHOICE = {
    "layers": some(is_text),
    "phase": is_text,
    "degree": is_whole,
    "asked": or_none(is_whole),
    "order": is_text,
    "predicted_ms": is_number,
    "runner_up": lambda value: value is None or is_whole(value) or is_text(value),
    "runner_up_ms": or_none(is_number),
    "uncut_ms": is_number,
    "bound_by?": is_text,
}
_FIT = {
    "operation": is_text,
    "unit": is_text,
    **{name: [is_number] for name in ("sizes", "times_ms", "line_ms")},
    "lines": [{"alpha_ms": is_number, "beta_ms": is_number}],
    "typical_share": is_number,
    "worst_share": is_number,
    "is_good": _is_flag,
}
_TRIED = {
    "name": is_text,
    "step_ms": is_number,
    "num_steps": is_whole,
    "is_kept": _is_flag,
    "is_baseline?": _is_flag,
    "times_ms?": [is_number],
}
_PREDICTED = ("chosen_ms", "deepspeed_ms", "bound_ms", "gradients_ms", "exposed_ms")

# Field -> its shape. Any field may be absent.
PLANS: dict[str, Shape] = {
    "settled_at": is_whole,
    "chosen": Map(is_text),
    "choices": [_CHOICE],
    "layers": [{"layer": is_text, "phase": is_text, "degree": is_whole, "order": is_text}],
    "step": or_none({**dict.fromkeys(_PREDICTED, is_number), "is_bound?": _is_flag}),
    **dict.fromkeys(("num_measured", "num_plans", "num_steps"), is_whole),
    "took_s": is_number,
    "is_stock": _is_flag,
    "fits": [_FIT],
    "trials": [[_TRIED]],
    "gain": or_none({"ratio": is_number, "low": is_number, "high": is_number, "num_turns": is_whole}),
    "hints": [is_text],
}
FACTS: dict[str, Shape] = {
    "schedule": is_text,
    "layers": lambda value: isinstance(value, dict),
    "batch": lambda value: isinstance(value, dict),
    "chosen": Map(is_text),
    "config": lambda value: isinstance(value, dict),
    "block": lambda value: isinstance(value, dict),
    "command": [is_text],
    "commit": or_none(is_text),
    "memory": is_text,
    "cwd": is_text,
    "token_ranks": is_whole,
}
