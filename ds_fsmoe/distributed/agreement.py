# SPDX-License-Identifier: Apache-2.0
"""Checks that all ranks agree before they communicate: once, at little cost, naming the differences.

The engine and the layers call it. Ranks that issue other collectives than their peers do not fail, they hang. So each
rank states facts, a few short texts by name. Ranks compare one digest of all of them; only ranks that differ exchange
the texts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.distributed.fail_together import device_of, on_every_rank
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.planning.schedule import Schedule

if TYPE_CHECKING:
    from ds_fsmoe.planning.phase_plan import PhasePlan

_DIGEST_BYTES = hashlib.sha256().digest_size
# What a message holds at the most. Of a job of a thousand ranks it should still be read.
_MAX_FIELDS = 20
_MAX_VALUES = 8
_MAX_RUNS = 12
_MAX_LETTERS = 72
# The number of characters shown of the common start of shortened values.
_LEAD_LETTERS = 24


class DisagreementError(RuntimeError):
    """Says that ranks differ that have to be equal. The message, the same on all ranks, names the ranks and the
    fields."""


def check_agreement(facts: Mapping[str, str], group: dist.ProcessGroup | None = None, what: str = "the job") -> None:
    """Compare facts over all ranks of a group. Collective: each of them calls it at the same point.

    It costs one all-gather of 32 bytes, and the wait for it. The number and kind of facts do not change the message, so
    ranks with different facts cannot hang here. No schedule may be running: in a shared ``group``, this all-gather
    would come between its collectives.

    Args:
        facts: name of a field -> its value, both short, with the same text for the same thing: no addresses, no
            unordered sets.
        group: the ranks; ``None``: all. With one rank, or without a process group, the check is skipped.
        what: the thing that is compared, for the message.

    Raises:
        DisagreementError: facts differ; raised on every rank, with the same message.
    """
    if world_size_now() == 1 or dist.get_world_size(group) <= 1:  # below 1 on a rank outside of the group
        return
    stated = {str(name): str(value) for name, value in facts.items()}
    own = torch.frombuffer(bytearray(_digest(stated)), dtype=torch.uint8).to(device_of(group))
    size = dist.get_world_size(group)
    digests = own.new_empty(size, _DIGEST_BYTES)
    with waiting("the comparison of", what):
        dist.all_gather(list(digests.unbind()), own, group=group)
        # All ranks compare the same digests, so all of them take the same branch.
        is_alike = bool((digests == digests[0]).all())
    if is_alike:
        return
    ranks = list(range(size)) if group is None else dist.get_process_group_ranks(group)
    raise DisagreementError(describe_disagreement(dict(zip(ranks, on_every_rank(stated, group), strict=True)), what))


def _digest(facts: Mapping[str, str]) -> bytes:
    """Return a digest of a fixed size, the same for the same facts in any order."""
    digest = hashlib.sha256()
    for pair in sorted(facts.items()):
        for text in pair:
            encoded = text.encode("utf-8", "surrogatepass")
            # The length first, or ("ab", "c") and ("a", "bc") would look alike.
            digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.digest()


def describe_disagreement(stated_by: Mapping[int, Mapping[str, str]], what: str = "the job") -> str:
    """Return a message with the ranks of each value, for each field that differs.

    Args:
        stated_by: rank -> its facts.
        what: the thing that was compared.
    """
    fields = sorted({name for facts in stated_by.values() for name in facts})
    differing = [name for name in fields if len({facts.get(name) for facts in stated_by.values()}) > 1]
    lines = [f"the ranks disagree about {what}, and would hang if they went on:"]
    for name in differing[:_MAX_FIELDS]:
        holders: dict[str | None, list[int]] = {}
        for rank in sorted(stated_by):
            holders.setdefault(stated_by[rank].get(name), []).append(rank)
        shown = _shortened([value for value in holders if value is not None])
        parts = [
            f"{in_words(ranks)}: {'not stated' if value is None else repr(shown[value])}"
            for value, ranks in list(holders.items())[:_MAX_VALUES]
        ]
        if len(holders) > _MAX_VALUES:
            parts.append(f"and {len(holders) - _MAX_VALUES} more values")
        lines.append(f"  {name}: {'; '.join(parts)}")
    if len(differing) > _MAX_FIELDS:
        lines.append(f"  and {len(differing) - _MAX_FIELDS} more fields")
    return "\n".join(lines)


def _shortened(values: Sequence[str]) -> dict[str, str]:
    """Return value -> part of it that fits into a message and shows the difference."""
    if all(len(value) <= _MAX_LETTERS for value in values):
        return {value: value for value in values}
    # What the first and the last in order begin with, all begin with.
    lowest, highest = min(values), max(values)
    parts_at = next((at for at, (a, b) in enumerate(zip(lowest, highest, strict=False)) if a != b), len(lowest))
    start = max(0, parts_at - _LEAD_LETTERS) if lowest != highest else 0
    stop = start + _MAX_LETTERS
    return {
        value: f"{'...' if start else ''}{value[start:stop]}{'...' if len(value) > stop else ''}" for value in values
    }


def in_words(ranks: Sequence[int]) -> str:
    """Return ranks in ascending order, like ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:_MAX_RUNS]]
    if len(runs) > _MAX_RUNS:
        texts.append(f"... ({len(ranks)} ranks)")
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


# ---- what is worth stating


def text_of_schedule(schedule: Schedule) -> str:
    """Return a short text that identifies tasks, lanes and order of a schedule.

    Like ``3 chunks, 13 tasks, 0f3a9c52d1b7e846``: the last is a digest of each task's kind, chunk, layer, lane and
    needs. Sizes are left out, since they do not change the tasks.
    """
    digest = hashlib.sha256(str(schedule).encode()).hexdigest()[:16]
    chunks = len({(task.layer, task.chunk) for task in schedule.tasks})
    return f"{chunks} chunks, {len(schedule.tasks)} tasks, {digest}"


def facts_of_plan(name: str, plan: PhasePlan) -> dict[str, str]:
    """Return the facts about one phase of a layer: its tasks, and how its capacity is chunked.

    Args:
        name: the name of the layer, such as "L03".
    """
    phase = "backward" if plan.backward else "forward"
    # The text of a schedule does not tell where chunks end, and pieces of other sizes do not fit each other either.
    return {f"plan {name} {phase}": f"{text_of_schedule(plan.schedule)}"}


def facts_of_config(values: Mapping[str, object], path: str = "fsmoe") -> dict[str, str]:
    """Return one fact per option of a nested config, by its path: ``fsmoe.gate.top_k`` -> ``2``.

    Leave out values that may differ between ranks, such as folders of a node.
    """
    facts: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            facts |= facts_of_config(value, f"{path}.{key}")
        else:
            facts[f"{path}.{key}"] = str(value)
    return facts


def facts_of_layers(layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return facts about the MoE layers of a model, in the order in which they run.

    These are their number and labels, and for each the names, dtypes and shapes of its parameters. Every rank has
    equally many experts.
    """
    facts = {
        "number of MoE layers": str(len(layers)),
        "order of MoE layers": ", ".join(layers),
        "dtypes": ", ".join(
            sorted({str(each.dtype).removeprefix("torch.") for layer in layers.values() for each in layer.parameters()})
        ),
    }
    for index, layer in enumerate(layers.values()):
        facts[f"parameters of L{index:02d}"] = ", ".join(
            f"{parameter_name} {str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}"
            for parameter_name, parameter in layer.named_parameters()
        )
    return facts


def facts_of_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the installed versions, such as those of torch and deepspeed."""
    return {f"version of {package}": version_of(package) for package in packages}


@cache
def version_of(package: str) -> str:
    """Return the installed version of a package, or a text that there is none."""
    try:
        return version(package)
    except PackageNotFoundError:  # raised here, it would leave the other ranks waiting
        return "not installed"
