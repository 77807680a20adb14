# SPDX-License-Identifier: Apache-2.0
"""What costs speed without a word is said."""

from __future__ import annotations

from typing import Any

import pytest

from ds_fsmoe.checks.preflight import speed_warnings
from ds_fsmoe.config.blocks import FSMoEBlock

TUNED = {"enabled": True, "autotune": {"enabled": True}}


def warnings(ds_config: dict[str, Any], block: dict[str, Any] = TUNED, device: str = "cuda", **environment: str) -> str:
    return "\n".join(speed_warnings(ds_config, FSMoEBlock.model_validate(block), device, environment))


@pytest.mark.parametrize(
    ("ds_config", "block", "environment", "words"),
    [
        ({"comms_logger": {"enabled": True}}, {}, {}, "comms_logger.enabled = true"),
        ({"wall_clock_breakdown": True}, {}, {}, "wall_clock_breakdown = true"),
        ({}, {}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "CUDA_DEVICE_MAX_CONNECTIONS = 1"),
        ({}, {}, {"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING = 1: the host waits for every kernel"),
        ({}, {}, {"TORCH_NCCL_BLOCKING_WAIT": "1"}, "TORCH_NCCL_BLOCKING_WAIT = 1: the host waits for every"),
        ({}, {}, {"NCCL_BLOCKING_WAIT": "true"}, "NCCL_BLOCKING_WAIT = true"),
        ({}, {}, {"TORCH_DISTRIBUTED_DEBUG": "detail"}, "TORCH_DISTRIBUTED_DEBUG = DETAIL: the host waits in every"),
        ({}, {}, {"NCCL_LAUNCH_MODE": "GROUP"}, "NCCL_LAUNCH_MODE = GROUP"),
        ({}, {"overlap": False}, {}, "fsmoe.overlap = false"),
        ({}, {"debug": {"check_router": True}}, {}, "fsmoe.debug.check_router = true"),
        ({}, {"debug": {"check_results": True}}, {}, "fsmoe.debug.check_results = true"),
        ({}, {"autotune": False}, {}, "fsmoe.autotune.enabled = false"),
    ],
)
def test_each_is_one_line_and_its_details(
    ds_config: dict[str, Any], block: dict[str, Any], environment: dict[str, str], words: str
) -> None:
    line, _, details = warnings(ds_config, TUNED | block, **environment).partition("\n")
    assert line.startswith(words)
    assert len(line) <= 120
    assert "\n" not in details


def test_what_costs_nothing_is_not_mentioned() -> None:
    assert warnings({"comms_logger": {"enabled": False}}) == ""
    assert warnings({}, CUDA_DEVICE_MAX_CONNECTIONS="8") == ""
    assert warnings({}, device="cpu", CUDA_DEVICE_MAX_CONNECTIONS="1") == ""
    off = {"CUDA_LAUNCH_BLOCKING": "0", "TORCH_NCCL_BLOCKING_WAIT": "0", "TORCH_DISTRIBUTED_DEBUG": "INFO"}
    assert warnings({}, **off, NCCL_LAUNCH_MODE="PARALLEL") == ""
    assert warnings({}, device="cpu", CUDA_LAUNCH_BLOCKING="1", TORCH_DISTRIBUTED_DEBUG="DETAIL") == ""
    by_hand = {"enabled": True, "pipeline_degree": {"forward": 2, "backward": 2}}
    assert warnings({}, by_hand) == ""
    assert warnings({}, {"enabled": True}) == ""
    assert warnings({}, {"enabled": True, "schedule": "deepspeed"}) == ""
