# SPDX-License-Identifier: Apache-2.0
"""Made-up links, what a choice of ``ep_size`` depends on, and steps of which a run sees the batches."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.distributed.topology import topology_of_size
from ds_fsmoe.engine.auto_ep_size import AutoEpSize, choice_of
from ds_fsmoe.engine.convert_experts import find_experts, fitting_ep_sizes
from ds_fsmoe.tuning.predicted_ep_size import BatchLengths
from tests.hf_families import NUM_EXPERTS, model_of
from tests.planning.measured_layers import cluster
from tests.sgd_engines import ds_config

SLOW, FAST = 1e-3, 1e-4
"""The ms of a byte."""
links = partial(cluster, start_ms=0.01)


def choice(block: dict[str, Any], **changes: Any) -> AutoEpSize:
    """What a choice depends on, of a small model on nodes of two ranks."""
    model, written, topology = model_of("olmoe"), FSMoEBlock(**block), topology_of_size(4, 2)
    given = {"ds_config": ds_config(1), "model": model, "cautious": 2, "topology": topology}
    given |= {"fitting": fitting_ep_sizes(written, [NUM_EXPERTS], 4), "modules": list(find_experts(model).values())}
    return AutoEpSize(written, device=torch.device("cpu"), dtype=None, **(given | changes))


def chosen(block: dict[str, Any], **changes: Any) -> tuple[int, str]:
    """The size, and the words about it."""
    made = choice(block, **changes)
    return made.choose(), choice_of(made.modules).reason


def run_steps(watched: BatchLengths, count: int, *of_batches: int | tuple[int, ...], is_tuned: bool = True) -> None:
    """Steps of forwards, each with a batch of one part or of several."""
    for _ in range(count):
        for parts in of_batches:
            watched.begin_forward(has_batch=True)
            for tokens in (parts,) if isinstance(parts, int) else parts:
                call(watched, tokens)
            watched.end_forward()
        if watched.step_is_over(is_tuned):
            watched.compare()


def call(watched: BatchLengths, tokens: int, label: str = "L00", is_training: bool = True) -> None:
    watched.watch(SimpleNamespace(is_training=is_training, label=label, x=torch.empty(1, tokens, 1)))
