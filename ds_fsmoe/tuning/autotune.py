# SPDX-License-Identifier: Apache-2.0
"""Chooses degrees for the machine at hand: measure, search, apply, and try.

One forward in training runs uncut and tells the sizes of each layer; another shows what the rest of the model takes.
These are the first two; where nobody has asked for measuring, the first of them is repeated after some steps. At the
start of the next forward, where all ranks are together and no layer is under way, the costs of the layers' tasks are
measured; the planner makes plans from them; the best are tried for some steps, if asked for.
"""

from __future__ import annotations

import atexit
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.distributed.agreement import DisagreementError
from ds_fsmoe.distributed.fail_together import MeasuringError, from_first_rank, raise_on_all_ranks
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.observing.predicted import MeasuredPredictor
from ds_fsmoe.planning.call_shape import CallShape
from ds_fsmoe.planning.candidates import Search
from ds_fsmoe.planning.model_plan import ModelPlan
from ds_fsmoe.planning.presets import BEST
from ds_fsmoe.planning.step_time import StepTimes
from ds_fsmoe.tuning.measure import Measured, gradients_of, measure, tensors_of
from ds_fsmoe.tuning.summary import Outcome, headline, hints, summarize, too_short
from ds_fsmoe.tuning.table import Row, Told, describe, describe_plan, rows_of
from ds_fsmoe.tuning.trials import Trials, Tried
from ds_fsmoe.tuning.tuned_model import TunedModel, windows_of
from ds_fsmoe.tuning.when import STEPS_BEFORE

if TYPE_CHECKING:
    from ds_fsmoe.gradients.reduction import Reduction
    from ds_fsmoe.layer.runtime import LayerRuntime
    from ds_fsmoe.layer.stock_layer import FSMoELayer

_T = TypeVar("_T")
STOCK = "DeepSpeed's schedule"
"""The name of the plan that the others are compared with."""
FORWARDS_BEFORE = 2
"""The forwards in training before the measuring: one is slow, one shows what the rest of the model takes."""


class Autotune:
    """Runs the autotuning stage, for one engine.

    Args:
        block: the options of the stage.
        running: the lanes and groups of its layers.
        group: the ranks that run the same layers; ``None``: all of the job.
    """

    def __init__(self, block: FSMoEBlock, running: LayerRuntime, group: dist.ProcessGroup | None = None) -> None:
        self._block = block
        self._running = running
        self._group = group
        self._num_forwards = 0
        self._is_wanted = block.autotune.enabled is True
        self._steps_before = 0 if self._is_wanted else STEPS_BEFORE
        """The optimizer steps until the stage asks for itself to be run."""
        self._steps_since = 0
        """The optimizer steps since plans were settled, or since the job began."""
        self._why_again: str | None = None
        self._is_closed = False
        self._at_exit = partial(_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)
        self._reduction: Reduction | None = None
        self.took_s = 0.0
        """The seconds that the stage took when it ran last."""
        self.num_measured = 0
        """The number of operations that were timed; 0 where all was known."""
        self.rows: list[Row] = []
        """The rows of what was measured and chosen."""
        self.step: StepTimes | None = None
        """The times that a step is predicted to take."""
        self.trials: Trials | None = None
        """The trials under way, until which plans are not settled."""
        self.tried: list[list[Tried]] = []
        """Rounds of trials -> what each plan took: they decide what is run."""
        self.outcome = Outcome()
        """What was gained, and what finding it took."""
        self._told: Told | None = None
        self.hints: list[str] = []
        """What to do next, once plans are settled."""
        self._refine: Callable[[int, tuple[int, int]], Trials | None] | None = None
        """Makes the next round: plan that is kept, and those of the fastest phases -> what is tried beside it."""
        self.predictors: dict[str, MeasuredPredictor] = {}
        """Label of a layer -> the predictor of its phases, since the stage has run."""
        self.shapes: dict[str, CallShape] = {}
        """Label of a layer -> the sizes of a call that were measured, since the stage has run."""
        self.measured: Measured | None = None
        """What was measured, since the stage has run."""
        self.search: Search | None = None
        """The choices from which plans are made, since the stage has run."""
        self.dense_ms: tuple[float, float] | None = None
        """What the rest of the model takes, forward and backward, as it was told."""

    def counts_forward(self) -> bool:
        """Count a forward in training that is about to begin, and tell whether the stage is due ahead of it: the same
        on every rank."""
        self._num_forwards += 1
        return self._is_wanted and self._num_forwards > FORWARDS_BEFORE

    @property
    def is_waiting(self) -> bool:
        """Whether the stage has not begun, as nobody has asked for it and the job is young."""
        return self._steps_before > 0

    @property
    def is_settled(self) -> bool:
        """Whether plans are chosen and tried."""
        return bool(self.rows and self.trials is None)

    def step_is_over(self) -> None:
        """Take note that an optimizer step is over, outside of trials. The same on every rank."""
        self._steps_since += 1
        if not self._steps_before:
            return
        self._steps_before -= 1
        if not self._steps_before:
            self._ask(None)

    def close(self) -> None:
        """Say so if the job has been too short for measuring to pay. A second call says nothing."""
        atexit.unregister(self._at_exit)
        if self._is_closed:
            return
        self._is_closed = True
        said = too_short(self.outcome, self._steps_since, self.is_waiting, self.trials is not None)
        if said:
            log_on_rank_0(said)

    def need_not_run(self) -> None:
        """Take note that plans came from somewhere else."""
        self._is_wanted, self.trials, self._refine = False, None, None
        self._steps_before = 0

    def request_again(self, reason: str) -> None:
        """Measure and plan again, one training forward from now. Every rank asks for it at the same step.

        Args:
            reason: the reason, logged when it is done.
        """
        self._ask(reason)

    def _ask(self, reason: str | None) -> None:
        self._is_wanted, self._why_again = True, reason
        self._num_forwards = FORWARDS_BEFORE - 1
        self.trials = self._refine = None
        self._running.first_forwards.watch_again()

    def run(
        self,
        layers: Mapping[str, FSMoELayer],
        reduction: Reduction | None = None,
        dense_ms: tuple[float, float] | None = None,
    ) -> bool:
        """Measure, search, and apply what was found. Collective over all ranks, between forwards.

        Args:
            layers: the engine's layers, by label, in the order of the forward.
            reduction: the reduction of its gradients, if we do it.
            dense_ms: what the rest of the model takes, forward and backward.

        Returns:
            Whether plans were made; where nobody has asked for them, it may fail, and training goes on as it was.

        Raises:
            MeasuringError: on every rank, if one has failed.
            DisagreementError: on every rank, if they have run different layers.
        """
        self._is_wanted = False
        if self._block.autotune.enabled is True:
            self._run(layers, reduction, dense_ms)
            return True
        try:
            self._run(layers, reduction, dense_ms)
        except (MeasuringError, DisagreementError) as error:
            self.need_not_run()
            self._running.first_forwards.calls.clear()
            log_on_rank_0(
                "autotune: this job could not be measured, and goes on as it was, with layers that are not cut "
                f'("autotune": false says so from the start): {error}',
                logging.WARNING,
            )
            return False
        return True

    def _run(
        self,
        layers: Mapping[str, FSMoELayer],
        reduction: Reduction | None,
        dense_ms: tuple[float, float] | None,
    ) -> None:
        start_s = time.perf_counter()
        measured = measure(self._running, layers, reduction, self._group, reads_cache=self._why_again is None)
        of_gradients = gradients_of(reduction), tensors_of(reduction)
        model = TunedModel(self._block, self._running, layers, measured, *of_gradients, dense_ms)
        self.measured, self.search, self.dense_ms = measured, model.search, dense_ms
        plans = self._on_first(lambda: [*model.search.candidates(), model.search.stock()])
        sharded = self._on_first(model.other_esp_sizes)
        self.num_measured = measured.num_measured
        self._reduction = reduction
        self.trials = self._start(model, plans)
        can_refine = self.trials is not None and model.search.space.asked == (None, None)
        self._refine = (lambda kept, halves: self._start_again(model, plans, kept, halves)) if can_refine else None
        self.tried.clear()
        self.took_s = time.perf_counter() - start_s
        self.outcome = Outcome(self.took_s)
        self._tell(measured, sharded)

    def trial_is_over(self) -> bool:
        """Take note that an optimizer step of a trial is over; tell whether a plan is settled on. Collective."""
        assert self.trials is not None
        kept = self.trials.step_is_over()
        if kept is None:
            return False
        trials, outcome = self.trials, self.outcome
        self.tried.append(trials.results(kept))
        outcome.num_plans += len(trials.names)
        outcome.num_steps += trials.num_steps
        outcome.lost_s += trials.lost_ms(kept) / 1e3
        outcome.gain, outcome.tried = trials.gain(kept), self.tried[-1]
        if self._block.autotune.details:
            log_on_rank_0(trials.describe(kept))
        halves, refine = trials.fastest_phases(kept), self._refine
        self._refine = None
        self.trials = None if refine is None else refine(kept, halves)
        if self.trials is None:
            self._summarize()
        return self.trials is None

    def _apply(self, model: TunedModel, plan: ModelPlan) -> None:
        """Run layers by a plan from now on."""
        model.apply(plan, self.predictors)
        self.shapes = {label: model.measured.kind_of[label].sizes for label in model.labels}
        self.step = model.predict(plan)
        asked = tuple(None if each is None else each.degree for each in model.search.space.asked)
        self.rows = rows_of(model.measured, model.labels, plan, asked)

    def _start(self, model: TunedModel, plans: Sequence[ModelPlan]) -> Trials | None:
        """Apply the first plan; try the others in turns, if there are others and trials are asked for. The last one is
        DeepSpeed's schedule."""
        self._apply(model, plans[0])
        rounds, clock = self._block.autotune.trials, self._running.step_clock
        if not rounds or clock is None or not model.labels or len(plans) < 3:
            return None
        names = [*(describe_plan(model.labels, plan) for plan in plans[:-1]), STOCK]

        def use(number: int) -> None:
            self._apply(model, plans[number])
            if self._reduction is not None:
                self._reduction.try_windows(windows_of(plans[number]))

        if self._reduction is not None:
            self._reduction.try_windows(windows_of(plans[0]))
        may_keep = self._block.schedule == BEST and model.search.space.asked == (None, None)
        return Trials(names, rounds, use, clock, self._group, len(plans) - 1, may_keep)

    def _start_again(
        self, model: TunedModel, plans: Sequence[ModelPlan], kept: int, halves: tuple[int, int]
    ) -> Trials | None:
        forward, backward = (plans[number] for number in halves)
        near = self._on_first(lambda: [*model.search.refinements(plans[kept], forward, backward), plans[-1]])
        return self._start(model, near)

    def _on_first(self, decide: Callable[[], _T]) -> _T:
        """Return what the stage's first rank decides. Collective over the stage, and raises on all of its ranks."""
        decided: list[_T] = []
        with raise_on_all_ranks(self._group, "choosing degrees"):
            if world_size_now() == 1 or dist.get_rank(self._group) == 0:
                decided = [decide()]
        return from_first_rank(decided, self._group)[0]

    def _tell(self, measured: Measured, sharded: Mapping[int, float]) -> None:
        assert self.step is not None
        self._told = Told(
            step=self.step,
            slowed=measured.slowed,
            sharded_ms=sharded,
            esp_size=self._block.esp_size,
            schedule=self._block.schedule,
            why_again=self._why_again,
            is_tried=self.trials is not None,
        )
        source = measured.source or f"measured {self.num_measured} operations"
        if self._block.autotune.details:
            log_on_rank_0(describe(self.rows, self._told, self.took_s, source))
        if self.trials is None:
            self._summarize()
        else:
            again = f", again because {self._why_again}" if self._why_again else ""
            log_on_rank_0(
                f"autotune{again}: {source} in {self.took_s:.3g} s; the next steps train with each of "
                f"{len(self.trials.names)} plans in turns"
            )
        self._why_again = None

    def _summarize(self) -> None:
        self._steps_since = 0
        assert self._told is not None
        assert self.step is not None
        self._told = replace(self._told, step=self.step)
        self.hints = hints(self.rows, self._told, self.outcome)
        log_on_rank_0(summarize(self.rows, self._told, self.outcome))

    def describe(self) -> str:
        """Describe in one line what was chosen and what it gains, or when that will be known."""
        if self.is_waiting:
            return f"begins after {self._steps_before} more steps"
        if self.trials is not None:
            return f"tries {len(self.trials.names)} plans"
        if self._told is None:
            return "measures in the third forward" if self._is_wanted else "not measured: plans came from a checkpoint"
        return headline(self.rows, self._told, self.outcome)


def _at_exit(stage: weakref.ref[Autotune]) -> None:
    found = stage()
    if found is not None:
        found.close()
