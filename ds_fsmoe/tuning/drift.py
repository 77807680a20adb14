# SPDX-License-Identifier: Apache-2.0
"""Compares predictions with what happens during training: of every n-th step, by phase of a layer and by kind of task.

The engine calls it at the end of every optimizer step, or of every batch through pipeline stages. The experts' parts of
the layers are predicted, for the schedules and sizes that were really run, with the gradients in them. The rest of a
step (dense layers, gates, losses, gradients that are sent after the backward, waiting for slower ranks) is not
predicted: it is taken as it was in the first steps compared. The expected time of a step is the rest and its predicted
phases. Ranks share their numbers, so all that follows from them is the same on all. Of a batch through pipeline stages
the work of the slowest stage is predicted; bubbles, sends and the optimizer belong to the rest.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch.distributed as dist

from ds_fsmoe.config.blocks import AutotuneBlock
from ds_fsmoe.distributed.topology import Stages
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.observing.predicted import Predictors
from ds_fsmoe.observing.step_timer import MeasuredStep, StepClock, most_of
from ds_fsmoe.planning.decide.step_time import StageTimes
from ds_fsmoe.planning.schedule import DEQUANTISING, EXPERT, GRADIENT_TASKS, HOLD, QUANTISING, Lane
from ds_fsmoe.planning.timeline import Timeline
from ds_fsmoe.planning.workload import stage_kinds
from ds_fsmoe.tuning.tuned_model import OfStages

IN_A_ROW = 3
"""The number of compared steps in a row that have to differ before anything is said."""
BEFORE_NEXT = 10
"""The number of compared steps after a new plan before drift may ask for another one."""
REFERENCES = 3
"""The number of compared steps whose lower median is the rest of a step, as one may have been disturbed."""
_LANES = tuple(str(lane) for lane in Lane)
_PHASES = ("forward", "backward")
_WORST = 3


def _kinds() -> tuple[str, ...]:
    """Return the kinds of tasks that are compared, the same on every rank."""
    return (*stage_kinds(), *GRADIENT_TASKS)


@dataclass(frozen=True)
class Compared:
    """Holds the predicted and the measured milliseconds in one optimizer step."""

    predicted_ms: float
    measured_ms: float

    @property
    def off_ms(self) -> float:
        """Return the difference between the two in milliseconds."""
        return abs(self.measured_ms - self.predicted_ms)


@dataclass(frozen=True)
class StepComparison:
    """Compares one step, the same on every rank: forwards and backwards of all micro batches, without the optimizer; in
    pipeline stages the whole batch with it."""

    step: int
    whole: Compared
    rest: Compared
    """The time outside of phases; its "predicted" is what it was before."""
    phases: Mapping[str, Compared]
    """"L03/backward" -> all its runs together. Of ranks that exchange tokens it is measured on the one that waits
    least, because that one comes last. In pipeline stages "stage1/backward" -> all of that stage, on its slowest
    rank."""
    kinds: Mapping[str, Compared]
    """Kind of task -> all of them together: computed on the slowest rank, sent by the rank that waits least."""
    lanes: Mapping[str, Compared]
    """Lane -> all tasks on it together, by the same ranks as ``kinds``."""
    load: float = 1.0
    """The rows of the fullest rank over those that the layers were planned for, as a mean over runs."""

    @property
    def drift(self) -> float:
        """Return the share of the prediction by which the step differs from it; below 0 the step was faster."""
        predicted = self.whole.predicted_ms
        return (self.whole.measured_ms - predicted) / predicted if predicted > 0 else math.inf

    @property
    def busy(self) -> dict[str, float]:
        """Return lane -> its measured share of the phases."""
        phases_ms = sum(each.measured_ms for each in self.phases.values())
        return {lane: each.measured_ms / phases_ms for lane, each in self.lanes.items() if phases_ms}

    def values(self, is_detailed: bool) -> dict[str, float]:
        """Return milliseconds by name, for monitors.

        Args:
            is_detailed: include each phase and each kind of task, and not only sums over layers.
        """
        named = {"step": self.whole, "rest": self.rest}
        for direction in _PHASES:
            of_layers = [each for label, each in self.phases.items() if label.endswith(f"/{direction}")]
            if of_layers:
                named[direction] = Compared(
                    sum(each.predicted_ms for each in of_layers), sum(each.measured_ms for each in of_layers)
                )
        if is_detailed:
            named |= {**self.phases, **{f"tasks/{kind}": each for kind, each in self.kinds.items()}}
        found = {
            f"{name}/{which}": getattr(each, which)
            for name, each in named.items()
            for which in ("predicted_ms", "measured_ms")
        }
        return found | {f"busy/{lane}": share for lane, share in self.busy.items()}

    def worst(self) -> str:
        """Describe in words what differs most."""
        named = {"the rest of the model": self.rest, **self.phases, **self.kinds}
        # What hardly differs says nothing.
        telling = {name: each for name, each in named.items() if each.off_ms >= self.whole.off_ms / 10}
        found = sorted(telling.items(), key=lambda item: -item[1].off_ms)[:_WORST]
        return ", ".join(f"{name} {each.predicted_ms:.4g} and {each.measured_ms:.4g} ms" for name, each in found)


class PredictionWatch:
    """Compares measured optimizer steps with their prediction, and asks for a new plan if they differ too much.

    There is one for each engine. Every rank reports the end of every optimizer step to it.

    Which steps are compared follows from their number alone, and at the end of such a step all ranks communicate once,
    whatever each of them has run in it.

    Args:
        block: how often to compare, and what differs too much.
        clock: the clock that is started for the steps that are compared.
        labels: the labels of the layers, the same on every rank.
        predictors: the predictors of the layers; the time of layers without one counts as the rest of the step.
        plan_again: called with the reason, on all ranks in the same step; later the layers are measured and planned
            again, and then :meth:`plans_changed` is called.
        group: the ranks; ``None``: all.
    """

    def __init__(
        self,
        block: AutotuneBlock,
        clock: StepClock,
        labels: Iterable[str],
        predictors: Predictors,
        plan_again: Callable[[str], None],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._block = block
        self._clock = clock
        self._names = tuple(f"{label}/{direction}" for label, direction in product(labels, _PHASES))
        self._predictors = predictors
        self._plan_again = plan_again
        self._group = group
        self.last: StepComparison | None = None
        self._is_sampling = False
        self._has_warned = False
        self._wait = 0
        """The number of steps to compare before a new plan may be asked for."""
        self.plans_changed()

    def plans_changed(self) -> None:
        """Start again with the predictions of other plans, by which layers run from now on. The step that is running
        is not compared. Call it on every rank at the same step."""
        if self._is_sampling:
            self._is_sampling = False
            self._clock.stop()
        self._rests: dict[tuple[int, int], list[float]] = {}
        """(forwards, backwards) of a step -> the times outside of phases."""
        self._in_a_row = 0
        self._is_reported = False

    def step_is_over(self, next_step: int) -> StepComparison | None:
        """End an optimizer step; collective if it is compared.

        Args:
            next_step: the number of the next one.

        Returns:
            The comparison, if one was made.
        """
        found = None
        if self._is_sampling:
            found = self._compare(next_step - 1)
            self._clock.stop()
        every = self._block.watch_every
        self._is_sampling = every > 0 and next_step % every == 0 and self._is_predicted()
        if self._is_sampling:
            self._clock.start()
        if found is not None:
            self.last = found
            self._judge(found)
        return found

    def _is_predicted(self) -> bool:
        """Return True if there are predictions. They come on all ranks together, as plans do."""
        return bool(self._predictors())

    def _compare(self, step: int) -> StepComparison | None:
        own = self._clock.read()
        names, problem = (*self._names, *_kinds(), *_LANES), ""
        runs: _Runs = defaultdict(list)
        try:
            if own is not None:
                self._add_up(own, runs)
        except ValueError as error:
            own, problem = None, f": {error}"
        head = [1.0, 0.0, 0.0, 0.0, 0.0]
        if own is not None:
            whole_ms = own.forward_ms + own.backward_ms
            head = [0.0, own.num_forwards, own.num_backwards, whole_ms, self._load(own)]
        numbers = most_of([*head, *_numbers(names, runs)], self._clock.device, self._group)
        lacks, num_forwards, num_backwards, whole_ms, load = numbers[: len(head)]
        if lacks:
            self._warn(step, problem)
        if lacks or not num_forwards:
            return None
        compared = _compared(names, numbers[len(head) :])
        phases = {name: compared[name] for name in self._names if name in compared}
        rest_ms = whole_ms - sum(each.measured_ms for each in phases.values())
        rest = self._rest((int(num_forwards), int(num_backwards)), rest_ms)
        whole = Compared(rest.predicted_ms + sum(each.predicted_ms for each in phases.values()), whole_ms)
        kinds, lanes = ({name: compared[name] for name in of if name in compared} for of in (_kinds(), _LANES))
        return StepComparison(step, whole, rest, phases, kinds, lanes, load)

    def _rest(self, counts: tuple[int, int], rest_ms: float) -> Compared:
        """Return the time outside of phases beside what it was in the first steps of so many forwards and backwards."""
        rests = self._rests.setdefault(counts, [])
        if len(rests) < REFERENCES:
            rests.append(rest_ms)
        return Compared(statistics.median_low(rests), rest_ms)

    def _load(self, own: MeasuredStep) -> float:
        """Return the rows that came to the experts of this rank over those of the plan, as a mean over runs."""
        predictors, shares = self._predictors(), []
        for run in own.runs:
            label, _, sizes = run.about
            planned = getattr(predictors.get(label), "capacity", None)
            if planned and sizes is not None and sizes.num_tokens is not None:
                shares.append(sizes.capacity / planned)
        return statistics.fmean(shares) if shares else 1.0

    def _add_up(self, own: MeasuredStep, runs: _Runs) -> None:
        predictors = self._predictors()
        for run in own.runs:
            label, plan, sizes = run.about
            if label not in predictors:
                continue
            predicted = predictors[label].timeline(run.schedule, plan, sizes)
            # With nobody to exchange tokens with, nobody is waited for.
            waits = any(task.lane is not Lane.COMPUTE for task in plan.schedule.tasks)
            runs[run.label].append((waits, predicted.makespan_ms, run.timeline.makespan_ms))
            expected = _busy_ms(predicted)
            for name, measured_ms in _busy_ms(run.timeline).items():
                sent = name not in (EXPERT, Lane.COMPUTE, *QUANTISING, *DEQUANTISING)
                runs[name].append((sent, expected.get(name, 0.0), measured_ms))

    def _warn(self, step: int, problem: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        log_on_rank_0(
            f"drift: step {step} cannot be compared with its prediction{problem}",
            logging.WARNING,
            "On some rank a forward or a backward bypassed the engine, failed, or has no prediction",
        )

    def _judge(self, found: StepComparison) -> None:
        self._wait = max(0, self._wait - 1)
        if max(abs(found.drift), abs(found.load - 1)) <= self._block.drift_threshold:
            self._in_a_row, self._is_reported = 0, False
            return
        self._in_a_row += 1
        if self._in_a_row < IN_A_ROW:
            return
        plans = self._block.retune_on_drift and not self._wait
        if not self._is_reported or plans:
            self._is_reported = True
            log_on_rank_0(
                f"drift: {self._reason(found)}; {self._advice(plans)}",
                logging.WARNING,
                f"The {self._in_a_row - 1} compared steps before it differed as well; largest difference, predicted "
                f"and measured: {found.worst()}. Check what else runs on these machines, or whether batches changed",
            )
        if plans:
            self._wait = BEFORE_NEXT
            self._plan_again(self._reason(found))

    def _reason(self, found: StepComparison) -> str:
        if abs(found.drift) <= self._block.drift_threshold:
            return f"in step {found.step} the fullest rank had {found.load:.2f} times the planned rows"
        return (
            f"step {found.step} took {found.whole.measured_ms:.4g} ms, predicted {found.whole.predicted_ms:.4g} ms "
            f"({found.drift:+.0%})"
        )

    def _advice(self, plans: bool) -> str:
        if plans:
            return "measuring and planning again"
        if self._block.retune_on_drift:
            return f"new plans follow after {self._wait} more such comparisons"
        return "fsmoe.autotune.retune_on_drift = true plans again"


class BatchWatch(PredictionWatch):
    """Compares batches through stages, for one engine. Every rank of the job reports the end of every batch to it.

    Args:
        block: how often to compare, and what differs too much.
        clock: the clock that is started for the batches that are compared.
        stages: where this rank is.
        of_stages: returns what runs, the same on every rank; ``None`` until something is planned.
        plan_again: see :class:`PredictionWatch`.
    """

    def __init__(
        self,
        block: AutotuneBlock,
        clock: StepClock,
        stages: Stages,
        of_stages: Callable[[], OfStages | None],
        plan_again: Callable[[str], None],
    ) -> None:
        self._stages = stages
        self._of_stages = of_stages
        super().__init__(block, clock, (), dict, plan_again)

    def _is_predicted(self) -> bool:
        return self._of_stages() is not None

    def _compare(self, step: int) -> StepComparison | None:
        own, of_stages = self._clock.read(), self._of_stages()
        assert of_stages is not None
        phases_ms = [0.0] * (2 * self._stages.num_stages)
        lacks, batch_ms = 1.0, 0.0
        if own is not None and own.batch_ms is not None and own.has_both:
            lacks, batch_ms = 0.0, own.batch_ms
            phases_ms[2 * self._stages.stage], phases_ms[2 * self._stages.stage + 1] = own.forward_ms, own.backward_ms
        # A stage takes as long as its slowest rank; other stages have nothing to say of it.
        lacks, batch_ms, *phases_ms = most_of([lacks, batch_ms, *phases_ms], self._clock.device)
        if lacks:
            self._warn(step, "")
            return None
        rest_ms = batch_ms - of_stages.step.chosen_ms
        rest = self._rest((0, 0), rest_ms)
        whole = Compared(of_stages.step.chosen_ms + rest.predicted_ms, batch_ms)
        names = [f"stage{stage}/{phase}" for stage, phase in product(range(self._stages.num_stages), _PHASES)]
        pairs = zip(self._predicted_ms(of_stages.times), phases_ms, strict=True)
        phases = {name: Compared(*each) for name, each in zip(names, pairs, strict=True)}
        return StepComparison(step, whole, rest, phases, {}, {})

    def _predicted_ms(self, stages: Sequence[StageTimes]) -> list[float]:
        """Return the times of all forwards and of all backwards of each stage in a batch."""
        found = []
        for each in stages:
            count = self._stages.num_micro_batches
            found += [count * each.forward_ms, (count - 1) * each.backward_ms + each.last_backward_ms]
        return found


def _busy_ms(timeline: Timeline) -> dict[str, float]:
    """Return kind of task or lane -> the time of such a task."""
    found: dict[str, float] = {}
    for span in timeline.spans:
        if span.task.kind != HOLD:
            for name in (span.task.kind, str(span.task.lane)):
                found[name] = found.get(name, 0.0) + span.end_ms - span.start_ms
    return found


_Runs = dict[str, list[tuple[bool, float, float]]]
"""Name -> of each of its runs on this rank, whether its time includes waiting for other ranks, and the predicted and
measured milliseconds."""


def _numbers(names: Sequence[str], runs: _Runs) -> list[float]:
    """Return the numbers by which ranks share their runs: equally many on every rank, for the largest of each. They are
    means, because ranks may differ in their runs; negative ones find the least."""
    found: list[float] = []
    for name in names:
        if not runs[name]:
            found += [0.0, 0.0, *(-math.inf,) * 3]
            continue
        waits, predicted_ms, measured_ms = zip(*runs[name], strict=True)
        mean_ms = statistics.fmean(measured_ms)
        found += [len(waits), waits[0], statistics.fmean(predicted_ms), mean_ms, -mean_ms]
    return found


def _compared(names: Sequence[str], numbers: Sequence[float]) -> dict[str, Compared]:
    """Return the comparison of each name that any rank has run."""
    found = {}
    for at, name in enumerate(names):
        count, waits, predicted_ms, most_ms, negative_least_ms = numbers[5 * at : 5 * at + 5]
        if count:
            found[name] = Compared(count * predicted_ms, count * (-negative_least_ms if waits else most_ms))
    return found
