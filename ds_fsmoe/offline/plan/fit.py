# SPDX-License-Identifier: Apache-2.0
"""Say first in ``ds_fsmoe plan`` whether a model fits, and choose the stage of ZeRO where none is named."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ds_fsmoe.offline.plan.memory import GB, _memory_gb, _training
from ds_fsmoe.offline.plan.model import PlannedModel, is_hugging_face

if TYPE_CHECKING:
    from ds_fsmoe.offline.models.training import Training
    from ds_fsmoe.planning.groups import Groups

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Fit:
    """Holds whether a job fits, and at which stage of ZeRO it is planned."""

    stage: int
    line: str
    fits: bool | None
    """``None``: nobody knows how much memory there is, or is needed."""


class Needs:
    """Knows how much memory a rank of a job needs at each stage of ZeRO.

    Args:
        args: of the command.
        model: what is planned.
        groups: the ranks.
    """

    def __init__(self, args: argparse.Namespace, model: PlannedModel, groups: Groups) -> None:
        self.memory_gb = _memory_gb(args)
        self._args, self._model, self._groups = args, model, groups
        self.is_known = model.architecture is not None and groups.mp == 1

    def training(self, stage: int) -> Training:
        """Return how the job is trained at a stage.

        Raises:
            ValueError: something that DeepSpeed refuses there.
        """
        assert self._model.architecture is not None
        args = argparse.Namespace(**vars(self._args) | {"zero": stage})
        return _training(args, self._model.architecture, self._model.shape)

    def gb(self, stage: int, groups: Groups | None = None, **changes: object) -> float:
        """Return the need at a stage in 10^9 bytes, with other groups or another training if they are given.

        Raises:
            ValueError: something that DeepSpeed or ds_fsmoe refuses.
        """
        from ds_fsmoe.offline.models.memory import memory_of

        assert self._model.architecture is not None
        training = replace(self.training(stage), **changes)  # type: ignore[arg-type]
        return memory_of(self._model.architecture, groups or self._groups, training).total / GB

    def of_stages(self, groups: Groups | None = None, **changes: object) -> dict[int, float]:
        """Return the need at each stage that is not refused; see :meth:`gb`."""
        found = {}
        for stage in STAGES:
            try:
                found[stage] = self.gb(stage, groups, **changes)
            except ValueError:
                continue
        return found

    def lowest(self, needs: dict[int, float]) -> int | None:
        """Return the lowest stage that fits."""
        assert self.memory_gb is not None
        return next((stage for stage, gb in needs.items() if gb <= self.memory_gb), None)


def fit_of(args: argparse.Namespace, model: PlannedModel, groups: Groups) -> Fit:
    """Return whether a job fits, and the stage that is planned: the named one, or the lowest one that fits.

    Raises:
        ValueError: the named stage is refused.
    """
    needed = Needs(args, model, groups)
    if args.zero == 3 and not is_hugging_face(args):
        raise ValueError("--zero = 3: DeepSpeed refuses its own MoE layers there; 0, 1 and 2 are possible")
    if (args.zero or 0) > 1 and groups.pp > 1:
        raise ValueError(f"--zero = {args.zero}: DeepSpeed's pipelines take ZeRO 0 and 1 only")
    if not needed.is_known:
        why = "a model in numbers" if model.architecture is None else f"mp = {groups.mp}"
        return Fit(args.zero or 0, f"memory is not predicted for {why}; ZeRO {args.zero or 0} is planned", None)
    at = f"ep_size {groups.ep}"
    if needed.memory_gb is None:
        stage = args.zero or 0
        line = f"memory of a GPU is not known (--memory-gb): {needed.gb(stage):.4g} GB are needed at ZeRO {stage}, {at}"
        return Fit(stage, line, None)
    needs = needed.of_stages()
    if not needs:  # whatever is refused at every stage is refused with its reason where it is planned
        return Fit(args.zero or 0, "no stage of ZeRO takes this layout", None)
    lowest = needed.lowest(needs)
    of = f"GB of {needed.memory_gb:g}"
    if args.zero is not None:
        gb = needed.gb(args.zero)
        if gb <= needed.memory_gb:
            return Fit(args.zero, f"fits: {_gb(gb)} {of} at ZeRO {args.zero}, {at}", True)
        then = _helps(needed, groups, needs)
        if lowest is not None:
            then = f"the lowest stage that fits is ZeRO {lowest} ({_gb(needs[lowest])} GB)"
        return Fit(args.zero, f"does not fit: {_gb(gb)} {of} at ZeRO {args.zero}, {at}; {then}", False)
    if lowest is None:
        least = min(needs, key=needs.__getitem__)
        line = f"does not fit at any stage: at least {_gb(needs[least])} {of}, at ZeRO {least}, {at}"
        return Fit(least, f"{line}; {_helps(needed, groups, needs)}", False)
    lower = max((stage for stage in needs if stage < lowest), default=None)
    more = "" if lower is None else f"; the lowest stage that fits, as ZeRO {lower} needs {_gb(needs[lower])} GB"
    return Fit(lowest, f"fits: {_gb(needs[lowest])} {of} at ZeRO {lowest}, {at}{more}", True)


def _helps(needed: Needs, groups: Groups, needs: dict[int, float]) -> str:
    """Return what makes a job fit that does not at any stage, or else what comes nearest."""
    training = needed.training(max(needs))
    larger = [groups] if groups.pp > 1 else larger_layouts(groups, needed._model)
    checkpointed: dict[str, object] = {} if training.checkpointing else {"checkpointing": True}
    tried = []
    for of_training in ({}, checkpointed):
        for of_groups in (groups, *larger):
            flags = ["--activation-checkpointing"] * bool(of_training)
            flags += [f"--ep-size {of_groups.ep}"] * (of_groups != groups)
            found = needed.of_stages(of_groups, **of_training)
            if not flags or not found:
                continue
            lowest = needed.lowest(found)
            if lowest is not None:
                return f"with {' '.join(flags)} it fits: {_gb(found[lowest])} GB at ZeRO {lowest}"
            tried.append((min(found.values()), " ".join(flags)))
    nearest = f" ({_gb(min(tried)[0])} GB with {min(tried)[1]})" if tried else ""
    return f"more GPUs (--nodes) or a shorter --length would help{nearest}"


def larger_layouts(groups: Groups, model: PlannedModel) -> list[Groups]:
    """Return the same ranks with experts spread over more of them."""
    experts = model.shape.E if model.architecture is None else model.architecture.num_experts
    sizes = range(groups.ep + 1, groups.stage // groups.esp + 1)
    fitting = [ep for ep in sizes if experts % ep == 0 and groups.stage % (ep * groups.esp) == 0]
    return [replace(groups, ep=ep) for ep in fitting]


def _gb(size: float) -> str:
    return f"{size:.1f}"
