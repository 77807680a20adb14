# SPDX-License-Identifier: Apache-2.0
"""Finds, for ``fsmoe.debug.check_results``, which expert of which layer first made nan or infinity of finite numbers.

The engine's state attaches it. One such number is on every rank after the next all-to-all, and gradients hide its
origin. So each expert's output rows are checked on the device, without waiting for it. All ranks compare the findings
once before each optimizer step.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.expert_call import CallRows, ExpertCall
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.execution.pipeline import WholeExperts
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.observing.instruments import LayerCall

_MOST = 8  # that a message names
_GIVEN, _MADE = 1, 2


class ExpertResultError(RuntimeError):
    """Says that an expert has made nan or infinity. The message, the same on all ranks, names layer, experts and
    step."""


class ExpertResults:
    """Checks the experts' results in the layers of one engine.

    Args:
        group: the ranks that run the same layers; ``None``: all.
        is_scaled: whether losses are scaled (fp16), so that an overflow is no error: DeepSpeed skips such a step on all
            ranks, and lowers the scale.
    """

    def __init__(self, group: dist.ProcessGroup | None, is_scaled: bool) -> None:
        self._group = group
        self._is_scaled = is_scaled
        self._found_E: dict[str, torch.Tensor] = {}
        self._here: dict[str, torch.Tensor] = {}

    def add(self, path: str, num_experts: int, experts: Sequence[int], device: torch.device) -> None:
        """Add a layer, in the order in which layers are run.

        Args:
            path: the path of the layer in the model.
            num_experts: E, over all ranks.
            experts: [e]: the expert in each place of this rank.
            device: the device of the layer's experts.
        """
        self._found_E[path] = torch.zeros(num_experts, dtype=torch.int32, device=device)
        self.place(path, experts)

    def place(self, path: str, experts: Sequence[int]) -> None:
        """Set the experts that this rank computes from now on.

        Args:
            path: the path of the layer in the model.
            experts: [e]: the expert in each place of this rank.
        """
        if path in self._found_E:
            self._here[path] = torch.tensor([*experts], dtype=torch.int64, device=self._found_E[path].device)

    def watch(self, call: LayerCall) -> None:
        """Check the outputs of a layer's experts in training."""
        if not call.is_training:
            return
        if isinstance(call.experts, WholeExperts):
            call.experts = replace(call.experts, module=self._checked(call.experts.module, call.path))
        else:
            call.experts = _Watched(call.experts, self, call.path)  # type: ignore[assignment]

    def _checked(self, module: Callable[[torch.Tensor], Any], path: str) -> Callable[[torch.Tensor], Any]:
        def looked_at(x_NeCM: torch.Tensor) -> Any:
            y = module(x_NeCM)
            if isinstance(y, torch.Tensor) and y.numel() == x_NeCM.numel():
                self.check(path, x_NeCM, y.reshape(x_NeCM.shape))
            return y

        return looked_at

    def check(self, path: str, x_NeCM: torch.Tensor, y_NeCM: torch.Tensor) -> None:
        """Check the inputs and outputs of this rank's experts."""
        self._note(path, _is_bad(x_NeCM), _is_bad(y_NeCM))

    def _note(self, path: str, given_e: torch.Tensor, made_e: torch.Tensor) -> None:
        states_e = torch.where(given_e, _GIVEN, _MADE * made_e.int())
        self._found_E[path].scatter_reduce_(0, self._here[path], states_e.to(torch.int32), "amax")

    def check_rows(self, path: str, x_RM: torch.Tensor, y_RM: torch.Tensor, sizes: list[int]) -> None:
        """Check rows that are sorted by expert, with ``sizes`` rows for each."""
        self._note(path, _is_bad_row(x_RM, sizes), _is_bad_row(y_RM, sizes))

    def before_step(self, step: int) -> None:
        """Share the findings since the last step with all ranks. Collective.

        Raises:
            ExpertResultError: raised on every rank, if there is a finding and losses are not scaled.
        """
        if not self._found_E:
            return
        found = torch.cat(list(self._found_E.values()))
        if world_size_now() > 1:
            with waiting("the check of experts' results"):
                dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        states = found.split([len(each) for each in self._found_E.values()])
        for each in self._found_E.values():
            each.zero_()
        rows = ((path, each.tolist()) for path, each in zip(self._found_E, states, strict=True))
        path, row = next(((path, row) for path, row in rows if any(row)), ("", []))
        if not row:
            return
        made = [expert for expert, state in enumerate(row) if state == _MADE]
        if made:
            named = ", ".join(map(str, made[:_MOST])) + (f" and {len(made) - _MOST} more" if len(made) > _MOST else "")
            said = f"{path}, step {step}: expert {named} returned nan or infinity for finite rows"
        else:
            said = (
                f"{path}, step {step}: the input of the experts has nan or infinity; check the layers before this one"
            )
        if not self._is_scaled:
            raise ExpertResultError(f"{said}; the optimizer step was skipped")
        log_on_rank_0(said, logging.WARNING)


def _is_bad_row(rows_RM: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Return True for each expert whose rows have nan or infinity, [e]; rows are sorted by expert, with ``sizes`` rows
    each."""
    bad_R = ~torch.isfinite(rows_RM.detach()).flatten(1).all(dim=1)
    return torch.stack([of_expert.any() for of_expert in bad_R.split(sizes)])


def _is_bad(rows_NeCM: torch.Tensor) -> torch.Tensor:
    """Return True for each expert whose rows have nan or infinity, [e]."""
    return ~torch.isfinite(rows_NeCM.detach()).all(dim=3).all(dim=2).all(dim=0)


class _Watched:
    """Wraps an :class:`ExpertSet` so that its calls are checked; the rest is unchanged."""

    def __init__(self, experts: ExpertSet, results: ExpertResults, path: str) -> None:
        self._experts, self._results, self._path = experts, results, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)

    def call(self, needs_backward: bool, rows: CallRows | None = None, *args: Any, **options: Any) -> ExpertCall:
        """Return an :class:`ExpertCall` whose forward is checked."""
        call = self._experts.call(needs_backward, rows, *args, **options)
        forward, sizes = call.forward, {}
        if rows is not None:
            sizes = dict(zip(itertools.pairwise(rows.forward.places), rows.forward.of_experts, strict=True))

        def watched(start: int, stop: int, x: torch.Tensor) -> torch.Tensor:
            y = forward(start, stop, x)
            if rows is None:
                self._results.check(self._path, x, y)
            else:
                self._results.check_rows(self._path, x, y, sizes[start, stop])
            return y

        call.forward = watched  # type: ignore[method-assign]
        return call
