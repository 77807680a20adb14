# SPDX-License-Identifier: Apache-2.0
"""Checks that experts are row-wise, and finds layers that must run in one chunk to keep their results.

A result's row must depend on the same row of the input alone (the experts' law). The chunks of a layer decide the
collectives of its ranks, so ranks agree on each finding. The engine checks at three times: at its start, by what
modules declare; at a layer's first forward in training and in evaluation, by a trial; and between two steps, over all
ranks that run the same layers.
"""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ds_fsmoe.components.expert_compute.autograd_call import RandomState, buffers_kept
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.manual_ffn import manual_form
from ds_fsmoe.distributed.agreement import check_agreement
from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.layer.parts import LayerError
from ds_fsmoe.layer.state import ConvertedLayer
from ds_fsmoe.log import log_line, log_on_rank_0
from ds_fsmoe.observing.step_timer import most_of

# ---- A trial of one expert


_RANKS, _SLOTS = 2, 5


class NotRowWiseError(ValueError):
    """Reports an expert whose result rows depend on more than the same input row. The message gives the dependency."""


class RowShapeError(ValueError):
    """Reports an expert that changes the number of rows, or their width."""


def check_row_wise(
    expert: nn.Module,
    model_dim: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    keep_expert_dim: bool = False,
) -> bool:
    """Try an expert on a few random rows, in its present mode and through ``module(...)``.

    All rows but one are changed, and the result of that row must stay the same. Then, unless the expert draws random
    numbers, the rows are split, and each result must stay the same. Random-number generators, gradients and buffers are
    restored.

    Args:
        expert: the module.
        model_dim: M.
        dtype, device: of the rows; by default those of the expert's first floating-point parameter.
        keep_expert_dim: call the module with [N, 1, c, M], as stock does, instead of [N, c, M].

    Returns:
        True if the expert draws random numbers: it is then row-wise for equal numbers, and other chunks draw others.

    Raises:
        RowShapeError: the expert changes the number of rows or their width.
        NotRowWiseError: the expert is not row-wise.
    """
    like = next((each for each in expert.parameters() if each.is_floating_point()), torch.empty(0))
    dtype, device = dtype or like.dtype, torch.device(device or like.device)
    generator = torch.Generator().manual_seed(0)
    x_NcM = torch.randn(_RANKS, _SLOTS, model_dim, generator=generator).to(device, dtype)
    other_NcM = torch.randn(_RANKS, _SLOTS, model_dim, generator=generator).to(device, dtype)

    call = partial(_called, expert, keep_expert_dim)
    differs = partial(_differs, dtype)
    state = RandomState.now(device)
    with torch.no_grad(), buffers_kept(expert), state.replayed():
        y_NcM = call(x_NcM)
        # Draws from torch's generators change the next draws of others, even where they change no result here. Draws
        # from other generators show in another result.
        draws = not state.is_now() or differs(call(x_NcM), y_NcM)
        # For the middle row, rows change before it, after it, and in the other rank's block.
        for rank, slot in ((0, _SLOTS // 2), (1, 0), (_RANKS - 1, _SLOTS - 1)):
            changed_NcM = other_NcM.clone()
            changed_NcM[rank, slot] = x_NcM[rank, slot]
            with state.replayed():  # the same numbers: dropout drops the same elements
                if differs(call(changed_NcM)[rank, slot], y_NcM[rank, slot]):
                    raise _not_row_wise(expert, "a row of its result changes when other rows do")
        for start, stop in () if draws else ((0, 2), (2, _SLOTS)):
            if differs(call(x_NcM[:, start:stop]), y_NcM[:, start:stop]):
                raise _not_row_wise(
                    expert, ("a row of its result depends on the row's position or on the number of rows")
                )
    return draws


def _called(expert: nn.Module, keep_expert_dim: bool, x_NcM: torch.Tensor) -> torch.Tensor:
    x = (x_NcM.unsqueeze(1) if keep_expert_dim else x_NcM).clone()
    y = expert(x)
    y = y[0] if isinstance(y, tuple) else y
    if y.shape != x.shape:
        raise RowShapeError(
            f"expert {type(expert).__name__} returned {tuple(y.shape)} for {tuple(x.shape)}: an expert must return "
            "a row of the same width for every row"
        )
    return y.squeeze(1) if keep_expert_dim else y


def _differs(dtype: torch.dtype, one: torch.Tensor, other: torch.Tensor) -> bool:
    # Products with another number of rows add in another order: only rounding differences are allowed.
    tolerance = min(1000 * max(torch.finfo(each).eps for each in (dtype, one.dtype)), 0.02)
    one, other = one.double(), other.double()
    largest = float(one.nan_to_num().abs().max())
    return not torch.allclose(one, other, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def _not_row_wise(expert: nn.Module, why: str) -> NotRowWiseError:
    return NotRowWiseError(
        f"expert {type(expert).__name__} is not row-wise: {why}. Rows are computed in chunks, so each row of the "
        "result may depend on the same row of the input alone"
    )


# ---- The experts of a layer


Kind = Literal["none", "draws", "called", "mixes", "unknown", "shape"]


@dataclass(frozen=True)
class ChunkingFinding:
    """Holds a reason against running the experts of a layer in chunks, if there is one."""

    kind: Kind = "none"
    """The kind of the reason. "shape": the experts are wrong without chunks too; "unknown": the trial failed."""
    text: str = ""
    """The reason in words, such as "expert 1: ..."; empty if there is none."""


def by_class(experts: ExpertSet) -> ChunkingFinding:
    """Return the finding that the experts' modules declare, in their present mode, without a computation."""
    for index, expert in enumerate(experts.experts):
        for name, module in expert.named_modules():
            what = f"expert {index}: {name or 'the expert itself'}, a {type(module).__name__},"
            if _draws(module):
                return ChunkingFinding("draws", f"{what} draws random numbers, and in chunks it would draw others")
            if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
                return ChunkingFinding("mixes", f"{what} is not row-wise: it normalises over all rows")
    return ChunkingFinding()


def _draws(module: nn.Module) -> bool:
    if not module.training:
        return False
    if isinstance(module, nn.RReLU):
        return module.lower != module.upper
    return isinstance(module, _DropoutNd) and 0 < module.p < 1


def by_trial(experts: ExpertSet, x: torch.Tensor) -> ChunkingFinding:
    """Return the worst finding of a trial on random rows, the same on every rank, of experts not known to be row-wise.

    Args:
        experts: the experts of this rank, in the mode in which they are to run.
        x: [..., M], whose width, dtype and device the rows have.
    """
    if getattr(experts, "is_row_wise", False):
        return ChunkingFinding()
    found = [
        _tried(index, expert, x, experts.keep_expert_dim)
        for index, expert in enumerate(experts.experts)
        if manual_form(expert) is None
    ]
    return worst_of(ChunkingFinding(), *found)


def worst_of(*found: ChunkingFinding) -> ChunkingFinding:
    """Return the first of the worst findings."""
    return max(found, key=lambda each: get_args(Kind).index(each.kind))


def _tried(index: int, expert: nn.Module, x: torch.Tensor, keep_expert_dim: bool) -> ChunkingFinding:
    kind = type(expert).__name__
    try:
        with uncompiled():
            draws = check_row_wise(expert, x.shape[-1], dtype=x.dtype, device=x.device, keep_expert_dim=keep_expert_dim)
    except RowShapeError as error:
        return ChunkingFinding("shape", f"expert {index}: {error}")
    except NotRowWiseError as error:
        return ChunkingFinding("mixes", f"expert {index}: {error}")
    except Exception as error:  # any error that an expert raises for so few rows
        said = f"{type(error).__name__}: {error}".split("\n")[0]
        return ChunkingFinding("unknown", f"expert {index}: expert {kind} could not be tried on a few rows ({said})")
    if draws:
        return ChunkingFinding(
            "draws", f"expert {index}: expert {kind} draws random numbers, and in chunks it would draw others"
        )
    return ChunkingFinding()


def uncompiled(is_wanted: bool = True) -> AbstractContextManager:
    """Return a context without torch.compile: compiled code is skipped, and nothing is compiled, if torch supports
    it."""
    # If nothing has been compiled this would import the compiler, which takes seconds.
    is_wanted = is_wanted and "torch._dynamo" in sys.modules
    set_stance = getattr(torch.compiler, "set_stance", None) if is_wanted else None
    return nullcontext() if set_stance is None else set_stance("force_eager")


def agreed(
    found: ChunkingFinding,
    is_error: bool,
    path: str,
    group: dist.ProcessGroup | None,
    is_alone: bool,
    device: torch.device,
) -> str:
    """Return the first finding of any rank; empty if there is none. Collective, unless this rank is alone.

    Args:
        found: the finding on this rank.
        is_error: whether the finding is an error that cannot be avoided.
        path: the path of the layer, for messages.
        group: the ranks; ``None``: all.
        is_alone: whether the finding concerns this rank only.
        device: the device for the numbers that ranks exchange.

    Raises:
        LayerError, DisagreementError: on every rank, if the finding is an error on any rank.
    """
    worst, texts = 2 if is_error else int(bool(found.text)), [found.text]
    if not is_alone:
        worst = int(most_of([float(worst)], device, group, f"the first look at the experts of {path}")[0])
        if worst:
            texts = on_every_rank(found.text, group)
    if worst == 2:
        problem = f"{path}: {found.text}" if is_error else "row-wise"
        if not is_alone:
            check_agreement({f"experts of {path}": problem}, group, what="whether experts are row-wise")
        raise LayerError(problem)
    return next((text for text in texts if text), "")


# ---- The layers of an engine that must run in one chunk


class ChunkGuard:
    """Finds the layers of one engine that must run in one chunk, agrees on them and logs them.

    Args:
        device: the device for the data that ranks exchange.
        tries: whether experts are also tried in unchunked layers, and refused if they are not row-wise.
        is_tuned: whether layers may run in chunks later.
        is_sharded: whether experts are sharded over ranks.
        group: the ranks that run the same layers; ``None``: all.
        on_change: called when the number of chunks of a layer changes.
    """

    def __init__(
        self,
        device: torch.device,
        tries: bool,
        is_tuned: bool,
        is_sharded: bool,
        group: dist.ProcessGroup | None,
        on_change: Callable[[], None],
    ) -> None:
        self._device = device
        self._tries = tries
        self._is_tuned = is_tuned
        self._is_sharded = is_sharded
        self._group = group
        self._on_change = on_change
        # Label of a layer that must run in one chunk -> the reason that this rank has found.
        self._reasons: dict[str, str] = {}
        self._checked: set[tuple[str, bool]] = set()
        self._logged: set[str] = set()
        self._late: set[str] = set()

    def begin(self, layers: Mapping[str, ConvertedLayer]) -> None:
        """Check modules by their declarations, when the engine is complete. Collective over ranks with the same layers.

        Args:
            layers: the layers by label.
        """
        for label, layer in layers.items():
            found = _by_modules(layer)
            if found.text and self._may_be_chunked(layer):
                self._reasons[label] = found.text
        self.settle(layers)

    def check(self, layer: ConvertedLayer, x: torch.Tensor) -> None:
        """Check a layer's experts before its first run in each mode. Then collective over the ranks that run it
        together.

        Args:
            layer: the layer; its plan is changed if it must run in one chunk.
            x: [..., M], its input.

        Raises:
            LayerError: the experts change shapes; they are not row-wise and the check is on; or they are sharded, and
                their module must be called itself.
            DisagreementError: as for LayerError, where ranks have different experts.
        """
        key = layer.fsmoe.label, layer.training
        if key in self._checked:
            self._check_hooks(layer)
            return
        tries = self._tries and layer.training
        may_be_cut = not layer.fsmoe.why_unchunked and self._may_be_chunked(layer)
        if not (may_be_cut or tries or self._is_sharded):
            return
        self._checked.add(key)
        found = _by_modules(layer)
        experts = layer.local_experts()
        if experts is not None and (tries or (may_be_cut and not found.text)):
            found = worst_of(found, by_trial(experts, x))
        is_error = (
            found.kind == "shape"
            or (tries and found.kind in ("mixes", "unknown"))
            or (self._is_sharded and found.kind == "called")
        )
        # Only the ranks that run the layer together are known to be in this call; a check of all experts needs all
        # ranks.
        group = self._group if tries else layer.fsmoe.capacity_group
        is_alone = world_size_now() == 1 or (group is None and not tries)
        reason = agreed(found, is_error, layer.fsmoe.path, group, is_alone, self._device)
        if reason and may_be_cut:
            self._reasons[layer.label] = reason
            self._leave_whole({layer.label: layer})

    def _check_hooks(self, layer: ConvertedLayer) -> None:
        """Check for hooks that were put on a chunked layer after it was checked."""
        if layer.pipeline is None or not layer.pipeline.is_chunked or (reason := layer.why_called()) is None:
            return
        if layer.fsmoe.capacity_group is None:  # no other rank is concerned
            self._reasons[layer.label] = reason
            self._leave_whole({layer.label: layer})
        elif layer.label not in self._late:
            self._late.add(layer.label)
            log_line(
                f"{layer.fsmoe.path}: {reason}; not called until every rank calls engine.fsmoe.recheck_chunking()",
                details="They were registered after its first forward, when the ranks had agreed to run it in chunks",
            )

    def recheck(self) -> None:
        """Check each layer again at its next forward."""
        self._checked.clear()
        self._late.clear()

    def settle(self, layers: Mapping[str, ConvertedLayer]) -> None:
        """Apply the findings of any rank on all ranks, between two steps. Collective over ranks with the same layers.

        Args:
            layers: the layers by label.
        """
        if not int(most_of([float(len(self._reasons))], self._device, self._group, "which layers run in one chunk")[0]):
            return
        of_ranks = on_every_rank(self._reasons, self._group)
        # Where ranks have different reasons, the first rank's.
        self._reasons = {label: why for reasons in reversed(of_ranks) for label, why in reasons.items()}
        self._leave_whole({label: layers[label] for label in layers if label in self._reasons})

    def _may_be_chunked(self, layer: ConvertedLayer) -> bool:
        pipeline = layer.fsmoe.pipeline
        return self._is_tuned or (pipeline is not None and pipeline.is_chunked)

    def _leave_whole(self, layers: Mapping[str, ConvertedLayer]) -> None:
        """Run layers in one chunk from now on."""
        changed = {label: layer for label, layer in layers.items() if not layer.fsmoe.is_unchunked}
        paths: dict[str, list[str]] = defaultdict(list)
        for label, layer in layers.items():
            layer.fsmoe.run_unchunked(self._reasons[label])
        for label, layer in changed.items():
            paths[self._reasons[label]].append(layer.fsmoe.path)
        for reason, of_reason in paths.items():
            others = f" and {len(of_reason) - 1} more run" if len(of_reason) > 1 else " runs"
            why = "for the same reason" if reason in self._logged else reason
            log_on_rank_0(
                f"{of_reason[0]}{others} in one chunk ({why})",
                logging.WARNING,
                f"More chunks would change results; layers: {', '.join(of_reason)}",
            )
            self._logged.add(reason)
        if changed:
            self._on_change()


def _by_modules(layer: ConvertedLayer) -> ChunkingFinding:
    if reason := layer.why_called():
        return ChunkingFinding("called", reason)
    experts = layer.local_experts()
    return ChunkingFinding() if experts is None else by_class(experts)
