# SPDX-License-Identifier: Apache-2.0
"""Holds the choices by which the layers of an engine are to route in the next forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ds_fsmoe.components.gate import in_backward
from ds_fsmoe.components.routing import Given
from ds_fsmoe.distributed.fail_together import raise_on_all_ranks
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.distributed.waits import waiting


class ReplayError(ValueError):
    """Choices do not fit what is to go by them. Raised on every rank."""


class Replay:
    """Hands out choices, a forward at a time.

    All ranks are armed for the same forwards; the first layer of such a forward looks on all ranks whether the choices
    are for as many tokens as there are.
    """

    def __init__(self) -> None:
        self._choices: dict[str, Given | None] | None = None
        self._names: dict[str, str] = {}
        self._is_checked = False
        self._has_any = False
        self._replayed: set[str] = set()
        self._control: dist.ProcessGroup | None = None
        self._has_control = False

    @property
    def is_armed(self) -> bool:
        """Whether the next forward, or the one that is under way, is one of those that are replayed."""
        return self._choices is not None

    def control_group(self) -> dist.ProcessGroup | None:
        """Return the ranks of the job, in a group that does not wait for devices. Collective the first time."""
        if not self._has_control:
            self._has_control = True
            if world_size_now() > 1 and dist.get_backend() != dist.Backend.GLOO:
                with waiting("a new process group"):
                    self._control = dist.new_group(backend="gloo")
        return self._control

    def arm(self, choices: Mapping[str, Given | None] | None, names: Mapping[str, str]) -> None:
        """Replay the next forward; the same on every rank, whatever each has.

        Args:
            choices: label of a layer -> its choices, ``None`` if it chooses by itself; ``None`` in place of all: the
                layers of this rank do.
            names: label -> path of every layer, for messages.
        """
        self._choices = dict(choices or {})
        self._has_any = bool(choices)
        self._names = dict(names)
        self._is_checked = False

    def disarm(self) -> None:
        """Let layers choose by themselves again."""
        self._choices = None

    def finish(self) -> None:
        """End a forward that was replayed.

        Raises:
            ReplayError: a layer did not run in it.
        """
        choices, self._choices = self._choices, None
        left = [label for label, given in (choices or {}).items() if given is not None]
        if left:
            names = ", ".join(self._names[label] for label in left)
            raise ReplayError(f"routing was to be replayed in {names}, which did not run in this forward")

    def take(self, label: str) -> Given | None:
        """Return the choices of a layer in this forward.

        Raises:
            ReplayError: the layer has run in this forward before, or runs again within the backward in a way that is
                not known here.
        """
        if in_backward():
            if label in self._replayed:
                raise ReplayError(
                    f"{self._names[label]} is computed again within the backward, by another activation checkpointing "
                    "than torch's and DeepSpeed's: its routing was replayed in the forward, and would be the router's "
                    "own now"
                )
            return None
        self._replayed.discard(label)
        if self._choices is None or not self._has_any:
            return None
        if label not in self._choices:
            raise ReplayError(f"{self._names[label]} runs twice in a forward, and there is one choice to be replayed")
        given = self._choices.pop(label)
        if given is not None:
            self._replayed.add(label)
        return given

    def check(self, label: str, given: Given | None, num_tokens: int) -> None:
        """Look whether a layer's choices are for its tokens. Collective at the first layer of a forward.

        Raises:
            ReplayError: they are not, on any rank.
        """
        if self._choices is None or in_backward():
            return
        is_first, self._is_checked = not self._is_checked, True
        problem = None
        if given is not None and given.experts_KS is not None and given.experts_KS.shape[1] != num_tokens:
            problem = ReplayError(
                f"choices of {given.experts_KS.shape[1]} tokens were given for {self._names[label]}, which has "
                f"{num_tokens} tokens in this forward (all those of a batch, padding too)"
            )
        if is_first:
            with raise_on_all_ranks(self.control_group(), "routing was replayed", ReplayError):
                _raise(problem)
        _raise(problem)


def _raise(problem: Exception | None) -> None:
    if problem is not None:
        raise problem


def choices_of(array: Any, device: torch.device, num_experts: list[int], is_own: bool = False) -> list[Given | None]:
    """Return the choices of layers, on a device; ``None`` for one in which all tokens choose by themselves.

    Args:
        array: [S, L, k] integers on the host.
        device: the device of the layers.
        num_experts: E of each of the L layers.
        is_own: whether routers of these layers made the choices, which may then be of classes beyond E.
    """
    on_host = torch.as_tensor(array).permute(1, 2, 0).to(torch.int64).contiguous()
    leaves = [
        bool((each < 0).any() or (not is_own and (each >= E).any()))
        for each, E in zip(on_host, num_experts, strict=True)
    ]
    # Without tokens there is nothing that they say.
    alone, sizes = [bool((each < 0).all()) for each in on_host], [each.shape[-1] for each in on_host]
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    on_device = on_host.to(device, non_blocking=True)
    return [
        None if tokens and is_live else Given(each, leaves_some=some)
        for each, some, is_live, tokens in zip(on_device, leaves, alone, sizes, strict=True)
    ]
