# SPDX-License-Identifier: Apache-2.0
"""Engines of whatever models, with SGD and without clipping, and their configs."""

from __future__ import annotations

from typing import Any

from torch import nn


def stock_config(stage: int = 0, lr: float = 0.5, samples: int = 1) -> dict[str, Any]:
    """A config of DeepSpeed's alone."""
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        # Or tiny parameters stay whole.
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    return {
        "train_micro_batch_size_per_gpu": samples,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": lr}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }


def ds_config(stage: int, lr: float = 0.5, **block: Any) -> dict[str, Any]:
    """A config with our block."""
    return stock_config(stage, lr) | {"fsmoe": {"enabled": True} | block}


def engine_of(model: nn.Module, config: dict[str, Any], parameters: Any = None) -> Any:
    """An engine of ours."""
    import ds_fsmoe

    return ds_fsmoe.initialize(model=model, model_parameters=parameters or list(model.parameters()), config=config)[0]
