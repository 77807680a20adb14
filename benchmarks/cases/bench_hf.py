# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model, trained: AutoEP beside ours, uncut and with the schedule that the autotuner chooses.

``cluster.py up --inter 25mbit --intra 100mbit``, then ``cluster.py run -- benchmarks/cases/bench_hf.py``. The model has
the blocks of Qwen3-MoE, made from its configuration; all variants begin with the same weights, see the same tokens and
spread the experts over all ranks. AutoEP of DeepSpeed 0.19.8 needs transformers 5.22.2 or older. Rows go to
``benchmarks/results/hf.csv``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from packaging.version import Version

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ds_fsmoe
from benchmarks.harness.harness import Case, Effort, Grid, Variant, join_on_gloo, run_grid
from benchmarks.models.layer_steps import wait_for_parameters

NEWEST_FOR_AUTOEP = Version("5.22.2")
SETTLED_AFTER = 40
"""Steps until a plan has been measured, tried and kept."""


@dataclass(frozen=True)
class Model:
    """B sequences of L tokens of width M on every rank; E experts of hidden width H over all ranks; a token takes k."""

    B: int
    L: int
    M: int
    H: int
    E: int
    k: int
    layers: int
    stage: int


CASES = (
    Case("E 16, k 8, narrow", Model(B=2, L=64, M=64, H=32, E=16, k=8, layers=2, stage=2)),
    Case("E 8, k 2, wide", Model(B=2, L=64, M=64, H=1024, E=8, k=2, layers=2, stage=2)),
    Case("E 8, k 2, wide, ZeRO 3", Model(B=2, L=64, M=64, H=1024, E=8, k=2, layers=2, stage=3)),
)


class Step:
    """A step of training.

    Args:
        model: the sizes.
        more: what the config has besides.
        settled_after: the number of steps before the first that is measured; ``None``: as many as an autotuner takes.
    """

    def __init__(self, model: Model, more: dict[str, Any], settled_after: int | None = None) -> None:
        from transformers import AutoModelForCausalLM, Qwen3MoeConfig

        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            vocab_size=256,
            hidden_size=model.M,
            intermediate_size=model.H,
            moe_intermediate_size=model.H,
            num_hidden_layers=model.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=model.E,
            num_experts_per_tok=model.k,
            max_position_embeddings=model.L,
        )
        made = AutoModelForCausalLM.from_config(config)
        base = {
            "train_micro_batch_size_per_gpu": model.B,
            "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": model.stage},
            "steps_per_print": 10**9,
        }
        initialize = ds_fsmoe.initialize if "fsmoe" in more else deepspeed.initialize
        self.engine = initialize(model=made, model_parameters=list(made.parameters()), config=base | more)[0]
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        self._x = torch.randint(256, (model.B, model.L), generator=generator)
        self.close = self.engine.destroy
        if settled_after is None:
            settled_after = SETTLED_AFTER if more.get("fsmoe", {}).get("autotune") else 0
        for _ in range(settled_after):
            self()

    def __call__(self) -> None:
        loss = self.engine(input_ids=self._x, labels=self._x).loss
        self.engine.backward(loss)
        self.engine.step()

    def finish(self) -> None:
        """Wait for what the last step has left under way."""
        wait_for_parameters(self.engine)


def main() -> None:
    args = join_on_gloo(__doc__)
    found = Version(version("transformers"))
    if found > NEWEST_FOR_AUTOEP:
        raise SystemExit(f"transformers {found}: AutoEP of DeepSpeed 0.19.8 works with {NEWEST_FOR_AUTOEP} or older")
    ranks = dist.get_world_size()
    tuned = {"autotune": {"enabled": True}, "num_chunks": "auto"}
    blocks: dict[str, dict[str, Any]] = {
        "AutoEP": {"expert_parallel": {"enabled": True, "autoep_size": ranks, "preset_model": "qwen3_moe"}},
        "uncut": {"fsmoe": {"enabled": True, "ep_size": ranks, "schedule": "deepspeed"}},
        "best": {"fsmoe": {"enabled": True, "ep_size": ranks} | tuned},
    }
    variants = tuple(Variant(name, partial(Step, more=more)) for name, more in blocks.items())
    run_grid(
        Grid("hf", CASES), variants, "AutoEP", Effort(blocks=args.blocks, steps=1, in_a_row=2), results=args.results
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
