# SPDX-License-Identifier: Apache-2.0
"""Lets ranks that share experts notice that they are in different forwards, before they compute with each other's rows.

A rank that runs the model alone meets whatever forward the others run next: the exchange of counts pairs what comes
first. So the kind and the number of a forward travel with the counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist

from ds_fsmoe.distributed import waits
from ds_fsmoe.distributed.agreement import DisagreementError, in_words
from ds_fsmoe.execution.row_sizes import RowBlock

_FAULT_BITS, _KIND_BITS, _NUMBER_BITS, _NAME_BITS = 2, 2, 26, 32
_KINDS = ("evaluation", "training", "evaluation, computed again", "training, computed again")
_names: dict[int, str] = {}


@dataclass(frozen=True)
class Forward:
    """One forward of a layer."""

    name: int
    """The checksum of the layer's name, which is the same on every rank."""
    number: int
    """The number of the layer's forwards up to this one."""
    kind: int
    """The place in :data:`_KINDS`."""

    @property
    def header(self) -> int:
        """The number that travels, to which a fault of 0 to 3 is added."""
        number = self.number % (1 << _NUMBER_BITS)
        return ((self.name << _NUMBER_BITS | number) << _KIND_BITS | self.kind) << _FAULT_BITS

    @classmethod
    def of(cls, header: int) -> Forward:
        """Return the forward of a header."""
        rest, kind = divmod(header >> _FAULT_BITS, 1 << _KIND_BITS)
        name, number = divmod(rest, 1 << _NUMBER_BITS)
        return cls(name, number, kind)

    def __str__(self) -> str:
        return f"forward {self.number} ({_KINDS[self.kind]}) of {_names.get(self.name, 'another layer')}"


def headed(fault: torch.Tensor, forward: Forward | None) -> torch.Tensor:
    """Return the header that travels with a fault."""
    return fault if forward is None else fault + forward.header


class Forwards:
    """Counts the forwards of one layer.

    Args:
        name: the name of the layer, the same on every rank.
    """

    def __init__(self, name: str) -> None:
        self._name, self._number = crc32(name.encode()), 0
        _names[self._name] = name

    def begin(self, is_training: bool, is_again: bool) -> Forward:
        """Begin the next one.

        Args:
            is_training: the mode of the layer.
            is_again: whether it is computed again within the backward, and so is none of its own.
        """
        self._number += not is_again
        forward = Forward(self._name, self._number, is_training + 2 * is_again)
        waits.forward_begins(forward)
        return forward


def faults_of(headers_N: np.ndarray, block: RowBlock) -> np.ndarray:
    """Return the fault of each source, once all are known to be in the same forward.

    Args:
        headers_N: the header of each source.
        block: the ranks that share the experts.

    Raises:
        DisagreementError: ranks are in different forwards; on every one of them, with the same message.
    """
    forwards_N = headers_N >> _FAULT_BITS
    if (forwards_N != forwards_N[0]).any():
        ranks_of: dict[str, list[int]] = {}
        for source, header in enumerate(headers_N.tolist()):
            index = block.sources[source]
            rank = index if block.group is None else dist.get_global_rank(block.group, index)
            ranks_of.setdefault(str(Forward.of(header)), []).append(rank)
        parts = sorted(f"{in_words(sorted(ranks))}: {forward}" for forward, ranks in ranks_of.items())
        raise DisagreementError(
            f"ds_fsmoe: ranks that share experts are in different forwards: {'; '.join(parts)}. Every forward of a "
            "model with experts on several ranks (an evaluation, generate, one more batch) has to run on all of them: "
            "run it on every rank, or call engine.fsmoe_dummy_forward() on those without a batch"
        )
    return headers_N & ((1 << _FAULT_BITS) - 1)
