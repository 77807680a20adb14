# SPDX-License-Identifier: Apache-2.0
"""The baselines of ``ds_fsmoe plan``, named as the README names them.

Stock trains a Hugging Face model with every expert on every rank. AutoEP is DeepSpeed's schedule with experts spread
like ours. A model with DeepSpeed's own MoE layers is spread by its script, and its stock is DeepSpeed's schedule.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ds_fsmoe.offline.plan.fit import Needs
from ds_fsmoe.offline.plan.model import PlannedModel, is_hugging_face
from ds_fsmoe.offline.plan.stages import batch_of, is_batch

if TYPE_CHECKING:
    from ds_fsmoe.offline.plan.report import Report
    from ds_fsmoe.planning.groups import Groups


@dataclass(frozen=True)
class Baselines:
    """Knows what others are compared with."""

    groups: Groups
    stock: Report | None
    """Every expert on every rank, by DeepSpeed's schedule; ``None``: stock is that schedule in the layout at hand."""
    stock_batch_ms: float | None = None
    """The time of a batch of stock, where a whole batch is planned."""
    stock_fits: bool = True
    notes: tuple[str, ...] = ()

    def label(self, name: str) -> str:
        """Return what a row is called."""
        if name != "deepspeed":
            return name
        kind = "stock" if self.stock is None else "AutoEP"
        return f"{kind} (ep_size {self.groups.ep})"

    @property
    def stock_label(self) -> str:
        """Return the name of stock's row."""
        if self.stock is None:
            return self.label("deepspeed")
        return f"stock (ep_size 1, ZeRO {self.stock.zero.stage}{'' if self.stock_fits else ', does not fit'})"

    @property
    def other(self) -> str:
        """The other system over which ratios are printed."""
        return "tutel" if self.stock is None else "deepspeed"

    @property
    def heads(self) -> tuple[str, str]:
        """The heads of the columns of ratios."""
        return "over stock", "over tutel" if self.stock is None else "over AutoEP"

    def in_one_step(self) -> Baselines:
        """Return the same for a single micro-batch."""
        return replace(self, stock_batch_ms=None)

    def stock_ms(self, of_names: Any) -> float:
        """Return the time of stock's step; ``of_names`` has those of the other systems."""
        if self.stock is None:
            return of_names["deepspeed"]
        return sum(self.stock.times_ms["deepspeed"]) if self.stock_batch_ms is None else self.stock_batch_ms

    def ratios(self, step_ms: float, of_names: Any) -> tuple[str, str]:
        """Return how many times as fast as the baselines something is."""
        bases = self.stock_ms(of_names), of_names[self.other]
        return f"{bases[0] / step_ms:.2f}x", f"{bases[1] / step_ms:.2f}x"


def baselines_of(args: argparse.Namespace, model: PlannedModel, job: dict[str, Any]) -> Baselines:
    """Return the baselines of a job: of a Hugging Face model stock, at the lowest stage of ZeRO that it fits at, from
    the planned one upwards."""
    from ds_fsmoe.offline.plan.report import report

    groups, stage = job["groups"], job["zero"].stage
    if not is_hugging_face(args) or groups.ep * groups.esp == 1:
        return Baselines(groups, None)
    alone = replace(groups, ep=1, esp=1)
    needed, notes, fits = Needs(args, model, alone), [], True
    if needed.is_known and needed.memory_gb is not None:
        needs = needed.of_stages(early_gradients=False)
        fitting = [each for each, gb in needs.items() if each >= stage and gb <= needed.memory_gb]
        fits = bool(fitting)
        if stage in needs and fitting[:1] != [stage]:
            text = f"stock needs {needs[stage]:.1f} GB of {needed.memory_gb:g} at ZeRO {stage}"
            stage = fitting[0] if fitting else max(needs)
            end = f"its row is at ZeRO {stage}, the lowest that it fits at" if fits else "it fits at no stage"
            notes.append(f"{text}; {end}")
    zero = replace(job["zero"], stage=stage)
    changed = {"groups": alone, "alltoall": "flat", "crossings": None, "zero": zero}
    stock = report(**(job | changed), preset_name="deepspeed", names=("deepspeed",))
    found = batch_of(stock, job | changed) if is_batch(args) else None
    return Baselines(groups, stock, None if found is None else found.batch_ms("deepspeed"), fits, tuple(notes))


def other_stages(
    args: argparse.Namespace, model: PlannedModel, job: dict[str, Any], of_names: Mapping[str, float]
) -> list[str]:
    """Return which systems are faster at a higher stage of ZeRO that fits, where no stage is named.

    Args:
        args: of the command; ``named_zero`` is the stage that is named.
        model, job: what is planned.
        of_names: the time of a step by each system at the planned stage.
    """
    from ds_fsmoe.offline.plan.report import report

    needed, stage, found = Needs(args, model, job["groups"]), job["zero"].stage, []
    if args.named_zero is not None or not needed.is_known or needed.memory_gb is None or is_batch(args):
        return []
    for name, label in (("deepspeed", "AutoEP" if is_hugging_face(args) else "stock"), (args.preset, args.preset)):
        needs = needed.of_stages(early_gradients=name != "deepspeed")
        times = {}
        for other in (each for each, gb in needs.items() if each > stage and gb <= needed.memory_gb):
            zero = replace(job["zero"], stage=other)
            times[other] = sum(report(**(job | {"zero": zero}), preset_name=name, names=(name,)).times_ms[name])
        least = min(times, key=times.__getitem__, default=stage)
        if times and times[least] < 0.97 * of_names[name]:
            ratio = times[least] / of_names[args.preset]
            over = "" if name == args.preset else f"; {args.preset} at ZeRO {stage} is {ratio:.2f}x as fast as that"
            found.append(f"{label} is faster at ZeRO {least}: {times[least]:.2f} ms{over}")
    return found
