# SPDX-License-Identifier: Apache-2.0
"""What costs speed without a word is said."""

from __future__ import annotations

from typing import Any

import pytest

from ds_fsmoe.blocks import FSMoEBlock
from ds_fsmoe.speed_warnings import speed_warnings

TUNED = {"enabled": True, "autotune": {"enabled": True}}


def warnings(ds_config: dict[str, Any], block: dict[str, Any] = TUNED, device: str = "cuda", **environment: str) -> str:
    return "\n".join(speed_warnings(ds_config, FSMoEBlock.model_validate(block), device, environment))


@pytest.mark.parametrize(
    ("ds_config", "block", "environment", "words"),
    [
        ({"comms_logger": {"enabled": True}}, TUNED, {}, "comms_logger.enabled = true"),
        ({"wall_clock_breakdown": True}, TUNED, {}, "wall_clock_breakdown = true"),
        ({}, TUNED, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "CUDA_DEVICE_MAX_CONNECTIONS = 1"),
        ({}, TUNED | {"overlap": False}, {}, "fsmoe.overlap = false"),
        ({}, TUNED | {"debug": {"check_router": True}}, {}, "fsmoe.debug.check_router = true"),
        ({}, TUNED | {"debug": {"check_results": True}}, {}, "fsmoe.debug.check_results = true"),
        ({}, {"enabled": True}, {}, "fsmoe.autotune.enabled = false"),
    ],
)
def test_each_is_one_sentence(
    ds_config: dict[str, Any], block: dict[str, Any], environment: dict[str, str], words: str
) -> None:
    said = warnings(ds_config, block, **environment)
    assert said.startswith(words)
    assert "\n" not in said


def test_what_costs_nothing_is_not_mentioned() -> None:
    assert warnings({"comms_logger": {"enabled": False}}) == ""
    assert warnings({}, CUDA_DEVICE_MAX_CONNECTIONS="8") == ""
    assert warnings({}, device="cpu", CUDA_DEVICE_MAX_CONNECTIONS="1") == ""
    by_hand = {"enabled": True, "pipeline_degree": {"forward": 2, "backward": 2}}
    assert warnings({}, by_hand) == ""
    assert warnings({}, {"enabled": True, "schedule": "deepspeed"}) == ""
