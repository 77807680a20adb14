# SPDX-License-Identifier: Apache-2.0
"""Chooses numbers of chunks for the machine at hand: measure, search, apply, and try.

The engine calls it at forwards and steps in training. One forward runs unchunked and shows the sizes of each layer;
another shows the time of the rest of the model. These are the first two. Where ``autotune`` is not in the config, the
first of them is repeated after some steps. At the start of the next forward all ranks are together, and no layer runs:
then the costs of the layers' tasks are measured. The planner makes plans from them, and the best are tried for some
steps, if asked for.
"""

from __future__ import annotations

import atexit
import logging
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from ds_fsmoe.tuning.states import NEXT, Profiling, Settled, State, Trying, Waiting, Watching
from ds_fsmoe.tuning.summary import IN_EVALUATION, MOST_ROWS, Outcome, headline, hints, summarize, too_short
from ds_fsmoe.tuning.table import Row, TuningContext, describe_rows, rows_of_plan
from ds_fsmoe.tuning.trial_rounds import PLANS_OF_ONE_TURN, TrialRounds
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


@dataclass
class TuningResult:
    """Holds the last measurements and choices of the autotuner; empty before the first."""

    measured: Measured | None = None
    job: RecordedJob | None = None
    """The job that plans are made from."""
    dense_ms: DenseTimes | None = None
    """The time of the rest of the model."""
    took_s: float = 0.0
    """The seconds that measuring and searching took."""
    rows: list[Row] = field(default_factory=list)
    """The choices, layer by layer, beside what they follow from."""
    step: StepTimes | None = None
    """The predicted times of a step."""
    of_stages: OfStages | None = None
    """The plans of all pipeline stages."""
    predictors: dict[str, MeasuredPredictor] = field(default_factory=dict)
    """Label of a layer -> the predictor of its phases."""
    shapes: dict[str, CallShape] = field(default_factory=dict)
    """Label of a layer -> the sizes of a call that were measured."""
    tried: list[list[Tried]] = field(default_factory=list)
    """Rounds of trials -> the times of each plan: they decide what is run."""
    outcome: Outcome = field(default_factory=Outcome)
    """The gain, and the cost of finding it."""
    context: TuningContext | None = None
    hints: list[str] = field(default_factory=list)
    """Advice on what to change, once plans are settled."""

    @property
    def num_measured(self) -> int:
        """Return the number of operations that were timed; 0 where all was known."""
        return 0 if self.measured is None else self.measured.num_measured


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
        self.state: State = Watching() if block.autotune.enabled is True else Waiting(STEPS_BEFORE)
        """The state of tuning; it changes in :meth:`_become` only."""
        self.result = TuningResult()
        """The last measurements and choices."""
        self.stages: Stages | None = None
        """Where this rank is in a pipeline of stages; ``None``: there are none."""
        self._steps_since = 0
        """The optimizer steps since plans were settled, or since the job began."""
        self._has_trained = False
        self._logs = rank_now() == 0
        self._is_closed = False
        self._at_exit = partial(_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    def _become(self, state: State) -> None:
        """Change the state. Every rank does so at the same forward or step."""
        assert type(state) in NEXT[type(self.state)], f"{self.state} -> {state}"
        self.state = state

    @property
    def trials(self) -> TrialRounds | None:
        """Return the trials that are running; ``None`` if plans are settled or not made."""
        return self.state.rounds if isinstance(self.state, Trying) else None

    @property
    def is_waiting(self) -> bool:
        """Return True if the stage waits for the first steps of a job whose config does not ask for it."""
        return isinstance(self.state, Waiting)

    @property
    def is_measuring(self) -> bool:
        """Return True if the forwards before the measuring are watched, which have to be unchunked."""
        return isinstance(self.state, Watching)

    @property
    def is_settled(self) -> bool:
        """Return True if plans are chosen and tried, now or before they are made again, or if measuring is over."""
        return isinstance(self.state, Settled) or (self.trials is None and bool(self.result.rows))

    @property
    def has_chosen(self) -> bool:
        """Return True if the plans that run were chosen by measuring, here or ahead of a checkpoint."""
        return self.is_settled and self.state != Settled(_FAILED)

    def counts_forward(self, num_before: int = FORWARDS_BEFORE) -> bool:
        """Count a forward in training; return True if the stage is due ahead of it, the same on every rank."""
        self._has_trained = True
        if not isinstance(self.state, Watching):
            return False
        left = num_before if self.state.forwards_left is None else self.state.forwards_left
        self._become(replace(self.state, forwards_left=left - 1))
        return left <= 0

    def step_is_over(self) -> bool:
        """Count an optimizer step outside of trials; return True if the stage asks for itself now, the same on every
        rank."""
        self._steps_since += 1
        if self._steps_since == 1 and not self._has_trained:
            log_on_rank_0(IN_EVALUATION, logging.WARNING, "from_pretrained makes models in it, without dropout")
        if not isinstance(self.state, Waiting):
            return False
        left = self.state.steps_left - 1
        if left:
            self._become(Waiting(left))
        else:
            # A layer that is left out of one forward may be in the other.
            self.request_again(None, num_watched=2)
        return not left

    def close(self) -> None:
        """Log a line if the job has been too short for a gain by measuring. A second call logs nothing."""
        atexit.unregister(self._at_exit)
        if self._is_closed:
            return
        self._is_closed = True
        is_trying = self.trials is not None
        said = too_short(self.result.outcome, self._steps_since, not self.is_settled and not is_trying, is_trying)
        # By then groups may be gone, and a job that has failed was not too short.
        if said and self._logs and getattr(sys, "last_value", None) is None:
            log_on_rank_0(said)

    def need_not_run(self, why: str = "plans came from a checkpoint") -> None:
        """Skip measuring.

        Args:
            why: the reason.
        """
        self._become(Settled(why))

    def request_again(self, reason: str | None, num_watched: int = 1) -> None:
        """Measure and plan again, so many training forwards from now. Every rank asks for it at the same step.

        Args:
            reason: the reason, logged when it is done; ``None``: it is the first time.
            num_watched: the forwards that are watched before.
        """
        self._become(Watching(num_watched, reason))
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
            dense_ms: the time of the rest of the model.
            can_split: whether batches may be split into two sub-batches.
            num_micro_batches: of an optimizer step, where there are no stages.

        Returns:
            True if plans were made; where the config does not ask for them, measuring may fail, and training goes on
            by the plans that it had.

        Raises:
            MeasuringError: on every rank, if one has failed.
            DisagreementError: on every rank, if they have run different layers.
        """
        assert isinstance(self.state, Watching)
        self._become(Profiling(self.state.why_again))
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
                'autotune: measuring failed, so the schedule is unchanged ("autotune": false skips measuring): '
                f"{error}",
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
        assert isinstance(self.state, Profiling)
        why_again, stages = self.state.why_again, self.stages
        measured = measure(self._running, layers, reduction, self._group, reads_cache=why_again is None)
        of_gradients = gradients_of(reduction), tensors_of(reduction)
        count = num_micro_batches if stages is None else stages.num_micro_batches
        how = dense_ms, can_split, count, stages is not None, reduction is not None and reduction.sums_each
        model = TunedModel(self._block, self._running, layers, measured, *of_gradients, *how)
        stage = None if stages is None else stages.stage

        def to_try() -> list[ModelPlan]:
            model.search.request.check_named()
            return model.search.to_try(stage, PLANS_OF_ONE_TURN if self._block.autotune.trials == 1 else None)

        plans = self._together(model, self._on_first(to_try))
        if len(plans) > 2 and stages is not None and plans[0].of_stages == plans[1].of_stages:
            # Where sending late changes nothing on any stage, the second is the first.
            del plans[1]
        sharded_ms = self._on_first(model.sharded_ms) if stages is None else {}
        self.result = TuningResult(measured=measured, job=model.job, dense_ms=dense_ms)
        rounds = self._start(model, plans, reduction)
        self.result.took_s = self.result.outcome.took_s = time.perf_counter() - start_s
        self._become(self._settled() if rounds is None else Trying(rounds))
        self._log_result(why_again, sharded_ms)

    def _settled(self) -> Settled:
        return Settled("" if self.result.rows else "no layer was called")

    def trial_is_over(self) -> bool:
        """End an optimizer step of a trial; return whether a plan is settled on. Collective."""
        assert isinstance(self.state, Trying)
        start_s = time.perf_counter()
        rounds, result = self.state.rounds, self.result
        is_settled = rounds.step_is_over()
        result.outcome.took_s += time.perf_counter() - start_s
        if is_settled:
            result.tried, result.step = rounds.rounds, result.outcome.with_observed_rest(result.step)
            self._become(self._settled())
            self._summarize()
        return is_settled

    def _apply(self, model: TunedModel, candidate: Candidate) -> None:
        """Run layers by a plan from now on, and store its predicted step and its rows for the report."""
        plan, result = candidate.plan, self.result
        result.of_stages = candidate.of_stages
        model.apply(plan, result.predictors)
        result.shapes = {
            label: model.measured.kind_of[label].sizes_with(alltoall)
            for label, alltoall in zip(model.labels, plan.alltoalls, strict=True)
        }
        result.step = model.predict(plan) if candidate.of_stages is None else candidate.of_stages.step
        asked = tuple(None if each is None else each.degree for each in model.search.request.space.asked)
        result.rows = rows_of_plan(model.measured, model.labels, plan, asked)

    def _start(self, model: TunedModel, plans: Sequence[Candidate], reduction: Reduction | None) -> TrialRounds | None:
        """Apply the first plan; try it and the others, if trials are asked for. The last is DeepSpeed's schedule."""
        self._apply(model, plans[0])
        block, clock = self._block, self._running.step_clock
        in_stages = self._group is not None
        has_layers = any(on_every_rank(bool(model.labels))) if in_stages else bool(model.labels)
        if not block.autotune.trials or clock is None or not has_layers or len(plans) < 2:
            if reduction is not None:
                reduction.try_windows(windows_of(plans[0].plan))
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
            reduction,
            self.result.outcome,
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
        """Return the decision of the first rank with these layers. Collective over all ranks, and raises on all."""
        decided: list[_T] = []
        with raise_on_all_ranks(None, "choosing num_chunks"):
            if world_size_now() == 1 or dist.get_rank(self._group) == 0:
                decided = [decide()]
        return from_first_rank(decided, self._group)[0]

    def _log_result(self, why_again: str | None, sharded_ms: Mapping[int, float]) -> None:
        result, measured, trials = self.result, self.result.measured, self.trials
        assert result.step is not None
        assert measured is not None
        result.context = TuningContext(
            step=result.step,
            slowed=measured.slowed,
            sharded_ms=sharded_ms,
            esp_size=self._block.esp_size,
            why_again=why_again,
            is_tried=trials is not None,
        )
        source = measured.source or f"measured {measured.num_measured} operations"
        if self._block.autotune.details and result.rows:
            log_on_rank_0(describe_rows(result.rows, result.context, result.took_s, source))
        if trials is None:
            self._summarize()
        else:
            log_on_rank_0(
                f"autotune: {source} in {result.took_s:.3g} s; now trying {len(trials.trials.names)} plans",
                details=f"Measured again because {why_again}" if why_again else "",
            )

    def _summarize(self) -> None:
        self._steps_since = 0
        result = self.result
        rows = result.rows if self.stages is None else rows_of_all_stages(result.rows, self.stages)
        if not rows:
            return
        assert result.context is not None
        assert result.step is not None
        result.context = replace(result.context, step=result.step)
        result.hints = hints(rows, result.context, result.outcome)
        shown = None if self._block.autotune.details else MOST_ROWS
        log_on_rank_0(summarize(rows, result.context, result.outcome, shown))

    def describe(self) -> str:
        """Describe in one line what was chosen and what it gains, or when that will be known."""
        state, result = self.state, self.result
        if isinstance(state, Waiting):
            return f"starts after {state.steps_left} more steps"
        if isinstance(state, Trying):
            return f"tries {len(state.rounds.trials.names)} plans"
        if isinstance(state, Settled) and state.why_without:
            return f"not measured: {state.why_without}"
        if result.context is None:
            return "measures in one of the next forwards"
        return "; ".join(headline(result.rows, result.context, result.outcome))


def _at_exit(stage: weakref.ref[Autotune]) -> None:
    found = stage()
    if found is not None:
        found.close()
