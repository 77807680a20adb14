# SPDX-License-Identifier: Apache-2.0
"""Say in ``ds_fsmoe plan`` whether a model fits, what a rank needs of memory, and what changes with ZeRO and ep.

Where no stage of ZeRO is named, the lowest one that fits is planned.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ds_fsmoe.offline.models.training import GB
from ds_fsmoe.offline.plan.model import PlannedModel, is_hugging_face
from ds_fsmoe.terminal.tables import print_table

if TYPE_CHECKING:
    from ds_fsmoe.offline.models.architecture import Architecture
    from ds_fsmoe.offline.models.memory import LayoutMemory, Memory
    from ds_fsmoe.offline.models.training import Training
    from ds_fsmoe.planning.groups import Groups
    from ds_fsmoe.planning.workload import Shape


def add_memory(parser: Any) -> None:
    """Add the arguments about memory."""
    memory = parser.add_argument_group(
        "the memory of a rank (of real models; the micro-batch is --samples of --length)"
    )
    memory.add_argument("--zero", type=int, choices=(0, 1, 2, 3), help="the stage of ZeRO (the lowest that fits)")
    memory.add_argument(
        "--optimizer",
        choices=("adam", "torch_adam", "adam8bit", "momentum", "sgd"),
        default="adam",
        help="adam: DeepSpeed's fused; adam8bit: bitsandbytes'",
    )
    memory.add_argument("--offload-optimizer", choices=("cpu",), help="the optimizer's states are on the host")
    memory.add_argument("--lora", type=int, default=0, metavar="RANK", help="adapters alone are trained")
    memory.add_argument(
        "--lora-targets",
        choices=("attention", "all"),
        default="attention",
        help="what has adapters: attention's projections, or experts as well (attention)",
    )
    memory.add_argument("--grad-accum-fp32", action="store_true", help="data_types.grad_accum_dtype is fp32")
    memory.add_argument("--activation-checkpointing", action="store_true", help="every block is checkpointed")
    memory.add_argument("--memory-gb", type=float, metavar="GB", help="of a GPU, in 10^9 bytes (the cluster's)")
    memory.add_argument("--reduce-bucket-size", type=float, metavar="N", help="DeepSpeed's, in elements (5e8)")


def print_memory(
    args: argparse.Namespace, architecture: Architecture | None, groups: Groups, shape: Shape | None
) -> dict[str, Any]:
    """Print what a rank needs of memory; return it as plain data.

    Raises:
        ValueError: something that DeepSpeed or ds_fsmoe refuses, or the memory of a GPU for layers in numbers.
    """
    from ds_fsmoe.offline.models.memory import largest_batch, memory_of, on_cards, other_memories

    if architecture is None or shape is None or groups.mp > 1:
        if args.memory_gb is not None:
            raise ValueError(f"--memory-gb = {args.memory_gb:g}: goes with a real model and mp = 1 only")
        return {}
    training = _training(args, architecture, shape)
    memory_gb = _memory_gb(args)
    memory = memory_of(architecture, groups, training)
    most = None if memory_gb is None else largest_batch(architecture, groups, training, memory_gb)
    _print_items(memory, training)
    if most is not None:
        print(f"largest micro-batch in {memory_gb:g} GB: {most or 'not even one sample fits'}")
    halves = None
    if args.halves and training.samples > 1:
        halves = memory_of(architecture, groups, replace(training, in_halves=True))
        print(f"two halves that take turns: {halves.total / GB:.2f} GB, at its fullest: {halves.peak.name}")
    choices = other_memories(architecture, groups, training, memory_gb)
    _print_choices(choices, training, groups)
    cards = on_cards(architecture, training, memory_gb)
    _print_cards(cards)
    return {
        "memory": {
            "peak_bytes": round(memory.total),
            "host_bytes": round(sum(memory.host.values())),
            "moment": memory.peak.name,
            "items_bytes": {item: round(size) for item, size in memory.peak.items.items()},
            "largest_samples": most,
            "peak_bytes_in_halves": None if halves is None else round(halves.total),
            "choices": [
                {
                    "zero": each.zero,
                    "ep": each.groups.ep,
                    "esp": each.groups.esp,
                    "peak_bytes": round(each.memory.total),
                    "largest_samples": each.largest_batch,
                }
                for each in choices
            ],
            "cards": [
                {"gpus": gpus, "zero": each.zero, "ep": each.groups.ep, "peak_bytes": round(each.memory.total)}
                | {"host_bytes": round(sum(each.memory.host.values())), "largest_samples": each.largest_batch}
                for gpus, each in cards
            ],
        }
    }


def _training(args: argparse.Namespace, architecture: Architecture, shape: Shape) -> Training:
    from ds_fsmoe.offline.models.training import Training

    asked = Training(
        samples=shape.B,
        length=shape.L,
        zero=args.zero,
        dtype=args.dtype or architecture.dtype,
        accumulation="fp32" if args.grad_accum_fp32 else None,
        optimizer=args.optimizer,
        checkpointing=args.activation_checkpointing,
        recompute=args.recompute,
        load=args.imbalance or 1.0,
        lora=args.lora,
        lora_targets=args.lora_targets,
        offload=args.offload_optimizer is not None,
    )
    bucket = args.reduce_bucket_size
    return asked if bucket is None else replace(asked, reduce_bucket=int(bucket))


def _memory_gb(args: argparse.Namespace) -> float | None:
    from ds_fsmoe.planning.cluster import load_cluster

    if args.memory_gb is not None:
        if args.memory_gb <= 0:
            raise ValueError(f"--memory-gb = {args.memory_gb:g}: must be above 0")
        return args.memory_gb
    return load_cluster(args.cluster).memory_gb


def _print_items(memory: Memory, training: Training) -> None:
    words = [f"ZeRO {training.zero}", training.dtype, training.optimizer]
    words += ["checkpointed"] * training.checkpointing + ["recompute"] * training.recompute
    words += [f"LoRA {training.lora} on {training.lora_targets}"] * bool(training.lora)
    words += ["states on the host"] * training.offload
    print(f"\nmemory of a rank: {', '.join(words)}; B = {training.samples}, L = {training.length}")
    rows = sorted(memory.peak.items.items(), key=lambda each: -each[1])
    table = [(item, f"{size / GB:.2f}", f"{100 * size / memory.total:.0f}%") for item, size in rows]
    table.append(("all", f"{memory.total / GB:.2f}", ""))
    print_table((f"at its fullest: {memory.peak.name}", "GB", "of all"), table)
    fullest: dict[str, float] = {}
    for moment in memory.moments:
        name = "backward of a block" if moment.name.startswith("backward of block") else moment.name
        fullest[name] = max(fullest.get(name, 0.0), moment.total)
    if memory.host:
        print(f"on the host: {sum(memory.host.values()) / GB:.2f} GB a rank")
    if training.lora:
        print("times above are those of training all weights")
    print("moments: " + ", ".join(f"{name} {size / GB:.2f}" for name, size in fullest.items()))


def _print_choices(choices: list[LayoutMemory], training: Training, groups: Groups) -> None:
    print(f"\non the same {groups.world} ranks, GB of a rank (<: as asked)")
    asked = training.zero, groups.ep, groups.esp
    heads = ("ZeRO", "ep_size", "expert tensor parallel", "GB", "largest B", "fullest", "")
    rows = [
        (
            each.zero,
            each.groups.ep,
            each.groups.esp,
            f"{each.memory.total / GB:.1f}",
            "" if each.largest_batch is None else each.largest_batch or "0",
            each.memory.peak.name,
            "<" * ((each.zero, each.groups.ep, each.groups.esp) == asked),
        )
        for each in choices
    ]
    print_table(heads, rows)


def _print_cards(cards: list[tuple[int, LayoutMemory]]) -> None:
    print("\ndoes it fit on one node of so many GPUs, with the stage and ep that need least")
    heads = ("GPUs", "ZeRO", "ep", "GB", "on the host", "largest B", "fits")
    rows = [
        (
            gpus,
            each.zero,
            each.groups.ep,
            f"{each.memory.total / GB:.1f}",
            f"{gpus * sum(each.memory.host.values()) / GB:.1f}" if each.memory.host else "",
            "" if each.largest_batch is None else each.largest_batch,
            {None: "", True: "yes", False: "no"}[each.fits],
        )
        for gpus, each in cards
    ]
    print_table(heads, rows)


STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class MemoryFit:
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


def fit_of(args: argparse.Namespace, model: PlannedModel, groups: Groups) -> MemoryFit:
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
        return MemoryFit(args.zero or 0, f"memory is not predicted for {why}; ZeRO {args.zero or 0} is planned", None)
    at = f"ep_size {groups.ep}"
    if needed.memory_gb is None:
        stage = args.zero or 0
        line = f"memory of a GPU is not known (--memory-gb): {needed.gb(stage):.4g} GB are needed at ZeRO {stage}, {at}"
        return MemoryFit(stage, line, None)
    needs = needed.of_stages()
    if not needs:  # whatever is refused at every stage is refused with its reason where it is planned
        return MemoryFit(args.zero or 0, "no stage of ZeRO takes this layout", None)
    lowest = needed.lowest(needs)
    of = f"GB of {needed.memory_gb:g}"
    if args.zero is not None:
        gb = needed.gb(args.zero)
        if gb <= needed.memory_gb:
            return MemoryFit(args.zero, f"fits: {_gb(gb)} {of} at ZeRO {args.zero}, {at}", True)
        then = _helps(needed, groups, needs)
        if lowest is not None:
            then = f"the lowest stage that fits is ZeRO {lowest} ({_gb(needs[lowest])} GB)"
        return MemoryFit(args.zero, f"does not fit: {_gb(gb)} {of} at ZeRO {args.zero}, {at}; {then}", False)
    if lowest is None:
        least = min(needs, key=needs.__getitem__)
        line = f"does not fit at any stage: at least {_gb(needs[least])} {of}, at ZeRO {least}, {at}"
        return MemoryFit(least, f"{line}; {_helps(needed, groups, needs)}", False)
    lower = max((stage for stage in needs if stage < lowest), default=None)
    more = "" if lower is None else f"; the lowest stage that fits, as ZeRO {lower} needs {_gb(needs[lower])} GB"
    return MemoryFit(lowest, f"fits: {_gb(needs[lowest])} {of} at ZeRO {lowest}, {at}{more}", True)


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
