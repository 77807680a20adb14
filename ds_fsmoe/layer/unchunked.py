# SPDX-License-Identifier: Apache-2.0
"""Finds layers that must not be cut into chunks, as they would compute something else; agrees on them and logs them.

How a layer is cut decides which collectives its ranks run, so ranks decide it together: when the engine is made, by
what modules say of themselves; at a layer's first forward in training and in evaluation, by what its experts do; and
between two steps, over all ranks that run the same layers, so that they hold the same plans.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.layer.expert_checks import LawFinding, agreed, by_class, by_trial, worst_of
from ds_fsmoe.layer.stock_layer import FSMoELayer
from ds_fsmoe.log import log_on_rank_0, logger
from ds_fsmoe.observing.step_timer import most_of


class Uncut:
    """Finds the uncut layers of one engine.

    Args:
        device: the device for what ranks exchange.
        tries: whether experts are also tried in uncut layers, and refused if they are not row-wise.
        is_tuned: whether layers may be cut later.
        is_sharded: whether experts are sharded over ranks.
        group: the ranks that run the same layers; ``None``: all.
        on_change: called when layers are run in another way from now on.
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
        # Label of a layer that is not to be cut -> why, as far as this rank knows.
        self._reasons: dict[str, str] = {}
        self._seen: set[tuple[str, bool]] = set()
        self._said: set[str] = set()
        self._late: set[str] = set()

    def begin(self, layers: Mapping[str, FSMoELayer]) -> None:
        """Check modules alone, as the engine is complete. Collective over all ranks that run the same layers.

        Args:
            layers: the layers by label.
        """
        for label, layer in layers.items():
            found = _by_modules(layer)
            if found.text and self._may_be_cut(layer):
                self._reasons[label] = found.text
        self.settle(layers)

    def look(self, layer: FSMoELayer, x: torch.Tensor) -> None:
        """Check a layer's experts before its first run in each mode. Collective then, over the ranks that run it
        together.

        Args:
            layer: the layer; its plan is changed if it may not be cut.
            x: [..., M], its input.

        Raises:
            LayerError: no way to run the experts is right, or they are not row-wise and this is checked for.
            DisagreementError: as for LayerError, where ranks have different experts.
        """
        key = layer.fsmoe.label, layer.training
        if key in self._seen:
            self._look_for_hooks(layer)
            return
        tries = self._tries and layer.training
        may_be_cut = not layer.fsmoe.why_uncut and self._may_be_cut(layer)
        if not (may_be_cut or tries or self._is_sharded):
            return
        self._seen.add(key)
        found = _by_modules(layer)
        experts = layer.local_experts()
        if experts is not None and (tries or (may_be_cut and not found.text)):
            found = worst_of(found, by_trial(experts, x))
        is_error = (
            found.kind == "shape"
            or (tries and found.kind in ("mixes", "unknown"))
            or (self._is_sharded and found.kind == "called")
        )
        # Only those that run it together are known to be here; who asks about all experts wants to hear of all ranks.
        group = self._group if tries else layer.fsmoe.capacity_group
        is_alone = world_size_now() == 1 or (group is None and not tries)
        reason = agreed(found, is_error, layer.fsmoe.path, group, is_alone, self._device)
        if reason and may_be_cut:
            self._reasons[layer.label] = reason
            self._leave_whole({layer.label: layer})

    def _look_for_hooks(self, layer: FSMoELayer) -> None:
        """Look for hooks that were put on a cut layer after it was checked."""
        if layer.pipeline is None or not layer.pipeline.is_cut or (reason := layer.why_called()) is None:
            return
        if layer.fsmoe.capacity_group is None:  # nobody has to be asked
            self._reasons[layer.label] = reason
            self._leave_whole({layer.label: layer})
        elif layer.label not in self._late:
            self._late.add(layer.label)
            logger.warning(
                "%s: %s; they were put on after its first forward, when the ranks had agreed to run it in chunks, and "
                "are not called: call engine.fsmoe.look_again() on every rank after such a change",
                layer.fsmoe.path,
                reason,
            )

    def look_again(self) -> None:
        """Check each layer again at its next forward."""
        self._seen.clear()
        self._late.clear()

    def settle(self, layers: Mapping[str, FSMoELayer]) -> None:
        """Apply on all ranks, between two steps, what some found. Collective over those that run the same layers.

        Args:
            layers: the layers by label.
        """
        if not int(most_of([float(len(self._reasons))], self._device, self._group, "which layers run in one chunk")[0]):
            return
        of_ranks = on_every_rank(self._reasons, self._group)
        # Where ranks have different reasons, the first rank's.
        self._reasons = {label: why for reasons in reversed(of_ranks) for label, why in reasons.items()}
        self._leave_whole({label: layers[label] for label in layers if label in self._reasons})

    def _may_be_cut(self, layer: FSMoELayer) -> bool:
        pipeline = layer.fsmoe.pipeline
        return self._is_tuned or (pipeline is not None and pipeline.is_cut)

    def _leave_whole(self, layers: Mapping[str, FSMoELayer]) -> None:
        """Run layers uncut from now on, where they are not uncut yet."""
        changed = {label: layer for label, layer in layers.items() if not layer.fsmoe.is_uncut}
        paths: dict[str, list[str]] = defaultdict(list)
        for label, layer in layers.items():
            layer.fsmoe.run_uncut(self._reasons[label])
        for label, layer in changed.items():
            paths[self._reasons[label]].append(layer.fsmoe.path)
        for reason, of_reason in paths.items():
            run = f"{', '.join(of_reason)} {'runs' if len(of_reason) == 1 else 'run'} in one chunk"
            why = "for the same reason" if reason in self._said else f"because more would change results: {reason}"
            log_on_rank_0(f"{run}, {why}", logging.WARNING)
            self._said.add(reason)
        if changed:
            self._on_change()


def _by_modules(layer: FSMoELayer) -> LawFinding:
    if reason := layer.why_called():
        return LawFinding("called", reason)
    experts = layer.local_experts()
    return LawFinding() if experts is None else by_class(experts)
