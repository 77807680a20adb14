# SPDX-License-Identifier: Apache-2.0
"""Chooses numbers of chunks for the machine at hand: measure, search, apply, and try.

One forward in training runs uncut and tells the sizes of each layer; another shows what the rest of the model takes.
These are the first two; where nobody has asked for measuring, the first of them is repeated after some steps. At the
start of the next forward, where all ranks are together and no layer is under way, the costs of the layers' tasks are
measured; the planner makes plans from them; the best are tried for some steps, if asked for.
"""

from __future__ import annotations

import atexit
import logging
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.distributed.agreement import DisagreementError
from ds_fsmoe.distributed.fail_together import MeasuringError, from_first_rank, on_every_rank, raise_on_all_ranks
from ds_fsmoe.distributed.topology import Stages, rank_now, world_size_now
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.observing.predicted import MeasuredPredictor
from ds_fsmoe.observing.step_timer import DenseTimes
from ds_fsmoe.planning.call_shape import CallShape
from ds_fsmoe.planning.decide.model_plan import ModelPlan
from ds_fsmoe.planning.decide.presets import BEST
from ds_fsmoe.planning.decide.step_time import StepTimes
from ds_fsmoe.planning.job.recorded_costs import RecordedJob
from ds_fsmoe.tuning.measure import Measured, gradients_of, measure, tensors_of
from ds_fsmoe.tuning.summary import IN_EVALUATION, Outcome, headline, hints, summarize, too_short
from ds_fsmoe.tuning.table import Row, Told, describe_rows, rows_of_plan
from ds_fsmoe.tuning.trial_rounds import TrialRounds
from ds_fsmoe.tuning.trials import Tried
from ds_fsmoe.tuning.tuned_model import (
    Candidate,
    OfStages,
    TunedModel,
    candidates_of_all_stages,
    rows_of_all_stages,
    windows_of,
)
from ds_fsmoe.tuning.when import STEPS_BEFORE, needs_numbers

if TYPE_CHECKING:
    from ds_fsmoe.gradients.reduction import Reduction
    from ds_fsmoe.layer.runtime import LayerRuntime
    from ds_fsmoe.layer.stock_layer import FSMoELayer

_T = TypeVar("_T")
_FAILED = "measuring failed"
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
        self._forwards_left: int | None = None
        self._is_wanted = block.autotune.enabled is True
        self._steps_before = 0 if self._is_wanted else STEPS_BEFORE
        """The optimizer steps until the stage asks for itself to be run."""
        self._steps_since = 0
        """The optimizer steps since plans were settled, or since the job began."""
        self._why_without = ""
        """The reason why there is nothing to wait for, though nothing was measured; empty: there is."""
        self._says = rank_now() == 0
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
        self.trials: TrialRounds | None = None
        """The trials under way, until which plans are not settled."""
        self.tried: list[list[Tried]] = []
        """Rounds of trials -> what each plan took: they decide what is run."""
        self.outcome = Outcome()
        """What was gained, and what finding it took."""
        self._told: Told | None = None
        self.hints: list[str] = []
        """What to do next, once plans are settled."""
        self.predictors: dict[str, MeasuredPredictor] = {}
        """Label of a layer -> the predictor of its phases, since the stage has run."""
        self.shapes: dict[str, CallShape] = {}
        """Label of a layer -> the sizes of a call that were measured, since the stage has run."""
        self.measured: Measured | None = None
        """What was measured, since the stage has run."""
        self.job: RecordedJob | None = None
        """What plans are made from, since the stage has run."""
        self.dense_ms: DenseTimes | None = None
        """What the rest of the model takes, as it was told."""
        self.stages: Stages | None = None
        """Where this rank is in a pipeline of stages; ``None``: there are none."""
        self.of_stages: OfStages | None = None
        """What all stages run now."""

    def counts_forward(self, num_before: int = FORWARDS_BEFORE) -> bool:
        """Count a forward in training, and tell whether the stage is due ahead of it: the same on every rank."""
        self._forwards_left = (num_before if self._forwards_left is None else self._forwards_left) - 1
        return self._is_wanted and self._forwards_left < 0

    @property
    def is_waiting(self) -> bool:
        """Whether the stage has not begun, as nobody has asked for it and the job is young."""
        return self._steps_before > 0

    @property
    def is_measuring(self) -> bool:
        """Whether the forwards before the measuring are watched, which have to be whole."""
        return self._is_wanted

    @property
    def is_settled(self) -> bool:
        """Whether plans are chosen and tried, or nothing will be measured any more."""
        return self.trials is None and bool(self.rows or self._why_without)

    @property
    def has_chosen(self) -> bool:
        """Whether the plans that run are ones that were chosen by measuring, here or ahead of a checkpoint."""
        return self.is_settled and self._why_without != _FAILED

    def step_is_over(self) -> bool:
        """Take note that an optimizer step is over, outside of trials; tell whether the stage asks for itself now. The
        same on every rank."""
        self._steps_since += 1
        if self._steps_since == 1 and self._forwards_left is None:
            log_on_rank_0(IN_EVALUATION, logging.WARNING)
        if not self._steps_before:
            return False
        self._steps_before -= 1
        if not self._steps_before:
            # A layer that is left out of one forward may be in the other.
            self.request_again(None, num_watched=2)
        return not self._steps_before

    def close(self) -> None:
        """Say so if the job has been too short for measuring to pay. A second call says nothing."""
        atexit.unregister(self._at_exit)
        if self._is_closed:
            return
        self._is_closed = True
        is_waiting = not (self.rows or self._why_without or self.trials)
        said = too_short(self.outcome, self._steps_since, is_waiting, self.trials is not None)
        # By then groups may be gone, and a job that has failed was not too short.
        if said and self._says and getattr(sys, "last_value", None) is None:
            log_on_rank_0(said)

    def need_not_run(self, why: str = "plans came from a checkpoint") -> None:
        """Take note that nothing has to be measured.

        Args:
            why: the reason.
        """
        self._is_wanted, self.trials = False, None
        self._steps_before = 0
        self._why_without = why

    def request_again(self, reason: str | None, num_watched: int = 1) -> None:
        """Measure and plan again, so many training forwards from now. Every rank asks for it at the same step.

        Args:
            reason: the reason, logged when it is done; ``None``: it is the first time.
            num_watched: the forwards that are watched before.
        """
        self._is_wanted, self._why_again, self._why_without = True, reason, ""
        self._forwards_left = num_watched
        self.trials = None
        self._running.first_forwards.watch_again()

    def run(
        self,
        layers: Mapping[str, FSMoELayer],
        reduction: Reduction | None = None,
        dense_ms: DenseTimes | None = None,
        can_split: bool = False,
        num_micro_batches: int = 1,
    ) -> bool:
        """Measure, search, and apply what was found. Collective over all ranks, between forwards.

        Args:
            layers: the engine's layers, by label, in the order of the forward.
            reduction: the reduction of its gradients, if we do it.
            dense_ms: what the rest of the model takes.
            can_split: whether batches may be cut into halves.
            num_micro_batches: of an optimizer step, where there are no stages.

        Returns:
            Whether plans were made; where nobody has asked for them, it may fail, and training goes on as it was.

        Raises:
            MeasuringError: on every rank, if one has failed.
            DisagreementError: on every rank, if they have run different layers.
        """
        self._is_wanted = False
        if self._block.autotune.enabled is True:
            self._run(layers, reduction, dense_ms, can_split, num_micro_batches)
            return True
        before = {label: layer.fsmoe.plan for label, layer in layers.items()}
        try:
            self._run(layers, reduction, dense_ms, can_split, num_micro_batches)
        except (MeasuringError, DisagreementError) as error:
            if needs_numbers(self._block):
                raise
            for label, layer in layers.items():
                layer.fsmoe.apply(before[label])
            if reduction is not None:
                reduction.go_on()
            self.need_not_run(_FAILED)
            self._running.first_forwards.calls.clear()
            log_on_rank_0(
                'autotune: this job could not be measured, and goes on as it was ("autotune": false says so from the '
                f"start): {error}",
                logging.WARNING,
            )
            return False
        return True

    def _run(
        self,
        layers: Mapping[str, FSMoELayer],
        reduction: Reduction | None,
        dense_ms: DenseTimes | None,
        can_split: bool,
        num_micro_batches: int,
    ) -> None:
        start_s = time.perf_counter()
        reads_cache, stages = self._why_again is None, self.stages
        measured = measure(self._running, layers, reduction, self._group, reads_cache=reads_cache)
        of_gradients = gradients_of(reduction), tensors_of(reduction)
        count = num_micro_batches if stages is None else stages.num_micro_batches
        how = dense_ms, can_split, count, stages is not None, reduction is not None and reduction.sums_each
        model = TunedModel(self._block, self._running, layers, measured, *of_gradients, *how)
        self.measured, self.job, self.dense_ms = measured, model.job, dense_ms
        stage = None if stages is None else stages.stage
        plans = self._together(model, self._on_first(lambda: model.search.to_try(stage)))
        if len(plans) > 2 and stages is not None and plans[0].of_stages == plans[1].of_stages:
            # Where sending late changes nothing on any stage, the second is the first.
            del plans[1]
        others = self._on_first(model.other_layouts) if stages is None else ({}, {})
        self.num_measured = measured.num_measured
        self._reduction = reduction
        self.outcome = Outcome()
        self.trials = self._start(model, plans)
        if not self.rows:
            self._why_without = "no layer was called"
        self.took_s = self.outcome.took_s = time.perf_counter() - start_s
        self._tell(measured, *others)

    def trial_is_over(self) -> bool:
        """Take note that an optimizer step of a trial is over; tell whether a plan is settled on. Collective."""
        assert self.trials is not None
        start_s = time.perf_counter()
        is_settled = self.trials.step_is_over()
        self.outcome.took_s += time.perf_counter() - start_s
        if is_settled:
            self.tried, self.trials = self.trials.rounds, None
            self.step = self.outcome.seen(self.step)
            self._summarize()
        return is_settled

    def _apply(self, model: TunedModel, candidate: Candidate) -> None:
        """Run layers by a plan from now on."""
        plan, self.of_stages = candidate.plan, candidate.of_stages
        model.apply(plan, self.predictors)
        self.shapes = {label: model.measured.kind_of[label].sizes for label in model.labels}
        self.step = model.predict(plan) if self.of_stages is None else self.of_stages.step
        asked = tuple(None if each is None else each.degree for each in model.search.request.space.asked)
        self.rows = rows_of_plan(model.measured, model.labels, plan, asked)

    def _start(self, model: TunedModel, plans: Sequence[Candidate]) -> TrialRounds | None:
        """Apply the first plan; try it and the others, if trials are asked for. The last is DeepSpeed's schedule."""
        self._apply(model, plans[0])
        block, clock = self._block, self._running.step_clock
        in_stages = self._group is not None
        has_layers = any(on_every_rank(bool(model.labels))) if in_stages else bool(model.labels)
        if not block.autotune.trials or clock is None or not has_layers or len(plans) < 2:
            if self._reduction is not None:
                self._reduction.try_windows(windows_of(plans[0].plan))
            return None
        is_open = model.search.request.space.asked == (None, None)
        return TrialRounds(
            model,
            plans,
            block.autotune.trials,
            clock,
            lambda candidate: self._apply(model, candidate),
            self._on_first,
            partial(self._together, model),
            self._reduction,
            self.outcome,
            may_keep_stock=block.schedule == BEST and is_open,
            can_refine=is_open,
            # The batch ends when the last stage is ready; what a stage's forwards take, its own ranks say.
            phase_group=self._group,
            has_details=block.autotune.details,
        )

    def _together(self, model: TunedModel, plans: Sequence[ModelPlan]) -> list[Candidate]:
        """Return plans to try, DeepSpeed's schedule last. Of these every stage of a pipeline has as many: stages try
        each in the same batches. Collective over all ranks where there are stages."""
        if self.stages is None:
            return [Candidate(each) for each in plans]
        return candidates_of_all_stages(plans, model, self.stages)

    def _on_first(self, decide: Callable[[], _T]) -> _T:
        """Return what the first rank that runs these layers decides. Collective over all ranks, and raises on all."""
        decided: list[_T] = []
        with raise_on_all_ranks(None, "choosing num_chunks"):
            if world_size_now() == 1 or dist.get_rank(self._group) == 0:
                decided = [decide()]
        return from_first_rank(decided, self._group)[0]

    def _tell(self, measured: Measured, sharded: Mapping[int, float], spread: Mapping[int, float]) -> None:
        assert self.step is not None
        self._told = Told(
            step=self.step,
            slowed=measured.slowed,
            sharded_ms=sharded,
            spread_ms=spread,
            esp_size=self._block.esp_size,
            why_again=self._why_again,
            is_tried=self.trials is not None,
        )
        source = measured.source or f"measured {self.num_measured} operations"
        if self._block.autotune.details and self.rows:
            log_on_rank_0(describe_rows(self.rows, self._told, self.took_s, source))
        if self.trials is None:
            self._summarize()
        else:
            again = f", again because {self._why_again}" if self._why_again else ""
            log_on_rank_0(
                f"autotune{again}: {source} in {self.took_s:.3g} s; trials begin with "
                f"{len(self.trials.trials.names)} plans in turns"
            )
        self._why_again = None

    def _summarize(self) -> None:
        self._steps_since = 0
        rows = self.rows if self.stages is None else rows_of_all_stages(self.rows, self.stages)
        if not rows:
            return
        assert self._told is not None
        assert self.step is not None
        self._told = replace(self._told, step=self.step)
        self.hints = hints(rows, self._told, self.outcome)
        log_on_rank_0(summarize(rows, self._told, self.outcome))

    def describe(self) -> str:
        """Describe in one line what was chosen and what it gains, or when that will be known."""
        if self.is_waiting:
            return f"starts after {self._steps_before} more steps"
        if self.trials is not None:
            return f"tries {len(self.trials.trials.names)} plans"
        if self._why_without:
            return f"not measured: {self._why_without}"
        if self._told is None:
            return "measures in one of the next forwards"
        return headline(self.rows, self._told, self.outcome)


def _at_exit(stage: weakref.ref[Autotune]) -> None:
    found = stage()
    if found is not None:
        found.close()
