# SPDX-License-Identifier: Apache-2.0
"""Whole models as users write them, and a step of one: with stock DeepSpeed at any of its settings, and with ours."""

from __future__ import annotations

import functools
import itertools
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import deepspeed
from gpt_moe import GPTMoE, Sizes

import ds_fsmoe
from benchmarks.harness.harness import Case
from benchmarks.models.hugging_face import Model, made
from benchmarks.models.layer_steps import wait_for_parameters
from benchmarks.models.layers import StockGroups
from benchmarks.models.operations import COMMUNICATION, OTHER, Operations

OPERATIONS = (*COMMUNICATION, "experts", "attention", "routing", OTHER)
IN_A_ROW = 2
MOST_STEPS = 200
"""Until plans have to be settled."""
DEFAULT_BUCKET = 500_000_000


@dataclass(frozen=True)
class Setting:
    """What a user of DeepSpeed can set that changes the time of a step and no result."""

    stage: int = 1
    """Of ZeRO."""
    bucket: int = DEFAULT_BUCKET
    """The elements of a message of gradients, of parameters and of ZeRO 3's prefetch."""
    overlap: bool = False
    """``overlap_comm``."""

    def __str__(self) -> str:
        bucket = "default buckets" if self.bucket == DEFAULT_BUCKET else f"buckets of {self.bucket}"
        return f"ZeRO {self.stage}, {bucket}{', overlap_comm' if self.overlap else ''}"

    def zero(self) -> dict[str, Any]:
        """Return the block ``zero_optimization``."""
        names = ["reduce_bucket_size", "allgather_bucket_size", *(["stage3_prefetch_bucket_size"] * (self.stage == 3))]
        return {"stage": self.stage, "overlap_comm": self.overlap, **dict.fromkeys(names, self.bucket)}


@dataclass(frozen=True)
class Whole(Model):
    """A whole model. ``family`` may be ``"gpt"``: DeepSpeed's own layers, over all ranks."""

    stages: tuple[int, ...] = (0, 1, 2, 3)
    """Of ZeRO, from which its user may choose."""
    micro_batches: int = 1
    """Of a step, whose gradients are added up before they are sent."""
    capacity_factor: float = 1.25
    """Of the GPT; the others drop nothing."""

    def settings(self) -> tuple[Setting, ...]:
        """Return all settings that are tried. ZeRO 0 has none but itself."""
        stages = [stage for stage in self.stages if stage]
        some = (1 << 17, 1 << 20, DEFAULT_BUCKET)
        found = itertools.starmap(Setting, itertools.product(stages, some, (False, True)))
        return (*([Setting(0)] if 0 in self.stages else []), *found)


_QWEN3 = Whole("qwen3", 2, B=4, L=128, M=128, H=96, E=32, k=8, micro_batches=2)
CASES = {
    "gpt": Case(
        "GPT, k 2, H 4 M", Whole("gpt", 3, B=2, L=128, M=256, H=1024, E=8, k=2, vocabulary=256, stages=(0, 1, 2))
    ),
    "mixtral": Case("Mixtral, k 2, H 7/2 M", Whole("mixtral", 2, B=4, L=128, M=128, H=448, E=8, k=2, micro_batches=2)),
    "olmoe": Case("OLMoE, k 8, H 1/2 M", Whole("olmoe", 2, B=4, L=128, M=128, H=64, E=64, k=8, micro_batches=2)),
    "qwen3": Case("Qwen3, k 8, H 3/4 M", _QWEN3),
    "qwen3-zero3": Case("Qwen3, k 8, H 3/4 M, ZeRO 3", replace(_QWEN3, stages=(3,))),
}
"""The last is for users whose model fits in no other stage."""


def tiny(case: Case) -> Case:
    """Return a case as small as it can be, at its last stage, to see that all runs."""
    stages = case.settings.stages[-1:]
    return Case("tiny", replace(case.settings, L=16, M=32, H=32, layers=1, stages=stages))


@functools.cache
def _groups(kind: str) -> StockGroups:
    """Return what DeepSpeed keeps of the groups of one kind of engines: ours make a group once for all of theirs."""
    return StockGroups()


class Training:
    """An engine over a model as a user has it, and a step of it.

    Args:
        model: the sizes.
        setting: of DeepSpeed.
        more: what the config has besides.
        name: of the variant.
    """

    def __init__(self, model: Whole, setting: Setting, more: dict[str, Any], name: str) -> None:
        is_ours = more.get("fsmoe", {}).get("enabled", False)
        self.groups = _groups("ours" if is_ours else name.partition(",")[0])
        self.groups.put()
        self._model = model
        module = self._module()
        base = {
            "train_micro_batch_size_per_gpu": model.B,
            "gradient_accumulation_steps": model.micro_batches,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_optimization": setting.zero(),
            "steps_per_print": 1_000_000,
        }
        parameters = [each for each in module.parameters() if each.requires_grad]
        initialize: Any = ds_fsmoe.initialize if "fsmoe" in more else deepspeed.initialize
        self.engine = initialize(model=module, model_parameters=parameters, config=base | more)[0]
        self.groups.take()
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        self._ids = torch.randint(model.vocabulary, (model.B, model.L), generator=generator)
        for _ in range(MOST_STEPS):
            self()
            if self._is_settled():
                break
        else:
            raise RuntimeError(f"{name}: no plan was settled in {MOST_STEPS} steps")

    def _module(self) -> torch.nn.Module:
        model = self._model
        if model.family != "gpt":
            return made(model)
        torch.manual_seed(0)
        of_gpt = model.M, model.layers, model.heads, model.L, model.E, dist.get_world_size(), model.k
        return GPTMoE(Sizes(*of_gpt, model.capacity_factor))

    def _is_settled(self) -> bool:
        tuner = getattr(getattr(self.engine, "fsmoe", None), "autotune", None)
        lengths = getattr(getattr(self.engine, "fsmoe", None), "lengths", None)
        return (tuner is None or tuner.is_settled) and (lengths is None or lengths.has_compared)

    def __call__(self) -> None:
        self.groups.put()
        for _ in range(self._model.micro_batches):
            self.engine.backward(self._loss())
            self.engine.step()

    def finish(self) -> None:
        """Wait for what the last step has left under way."""
        wait_for_parameters(self.engine)

    def _loss(self) -> torch.Tensor:
        if self._model.family == "gpt":
            loss, aux_loss = self.engine(self._ids, self._ids)
            return loss + 0.01 * aux_loss
        return self.engine(input_ids=self._ids, labels=self._ids).loss

    def operations_ms(self, num_steps: int = 3) -> dict[str, float]:
        """Return what a step spends its time on, the mean over ranks of the median over steps. Collective."""
        of_classes = {"Experts": "experts", "Attention": "attention", "Gate": "routing", "Router": "routing"}
        operation_of = {
            module: next(word for end, word in of_classes.items() if type(module).__name__.endswith(end))
            for module in self.engine.module.modules()
            if type(module).__name__.endswith(tuple(of_classes))
        }
        found = []
        self.groups.put()
        for _ in range(num_steps):
            operations = Operations()
            dist.barrier()
            with operations.watched(operation_of):
                for _ in range(self._model.micro_batches):
                    with operations.phase("forward"):
                        loss = self._loss()
                    with operations.phase("backward"):
                        self.engine.backward(loss)
                    with operations.phase("step"):
                        self.engine.step()
            found.append([operations.of(name) for name in OPERATIONS])
        times_s = torch.tensor(found, dtype=torch.float64)
        dist.all_reduce(times_s)
        median_ms = (times_s / dist.get_world_size()).median(dim=0).values * 1e3
        return dict(zip(OPERATIONS, median_ms.tolist(), strict=True))

    def close(self) -> None:
        """End the engine."""
        self.engine.destroy()
