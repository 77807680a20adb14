# SPDX-License-Identifier: Apache-2.0
"""Says where a rank is in a job whose model is cut into pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stages:
    """Says where this rank is in a job of pipeline stages."""

    stage: int
    """The stage that this rank runs, counted from the front."""
    num_stages: int
    num_micro_batches: int
