# SPDX-License-Identifier: Apache-2.0
"""Saves a process's random generators as plain numbers and tensors, so that a run goes on drawing where it stopped."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """Return the states of Python, numpy, torch, and the GPUs that this process uses."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "name": name,
            "keys": torch.from_numpy(keys.astype(np.int64)),
            "position": position,
            "has_gauss": has_gauss,
            "cached": cached,
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Restore the states that :func:`random_states` returned.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: the states have another form.
    """
    python, numpy = states["python"], states["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def check_random_states(states: dict[str, Any]) -> None:
    """Check that :func:`set_random_states` would succeed; every generator keeps its state.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: the generators do not take them.
    """
    before = random_states()
    try:
        set_random_states(states)
    finally:
        set_random_states(before)
