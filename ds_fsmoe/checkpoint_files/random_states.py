# SPDX-License-Identifier: Apache-2.0
"""The generators of random numbers of a process, as plain numbers and tensors: to go on drawing where a run stopped."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """Python's, numpy's, torch's, and those of the GPUs this process uses."""
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
    """Go on from :func:`random_states`.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: they are not that.
    """
    python, numpy = states["python"], states["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def check_random_states(states: dict[str, Any]) -> None:
    """Try :func:`set_random_states`, and leave every generator as it is.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: the generators do not take them.
    """
    before = random_states()
    try:
        set_random_states(states)
    finally:
        set_random_states(before)
