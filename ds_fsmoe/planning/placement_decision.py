# SPDX-License-Identifier: Apache-2.0
"""Whether experts move: only where a policy's placement pays within so many steps, and said in one line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_fsmoe.planning.expert_placement import ExpertPlacement, fullest_over_mean
from ds_fsmoe.planning.placement_costs import Prices, Seen
from ds_fsmoe.planning.placement_policies import Allowed, Policy

LEAST_BY_ROWS = 0.1
"""Of the mean, how much the rows of the fullest rank must fall by where nothing is known of times."""
HOMES_ALONE = Allowed()


@dataclass(frozen=True)
class Decision:
    """What was decided for one layer. Where it stays as it is, there is no gain and nothing to pay."""

    placement: ExpertPlacement
    gain_ms_per_step: float | None
    """How much shorter a step gets, replicas paid for; ``None``: nothing is known of times."""
    moves_ms: float | None
    """How long the experts are on their way, once."""
    pays_after_steps: int | None
    """The steps after which the gain is more than that; ``None``: not known, or nothing changes."""
    before: float
    """The rows of the fullest rank over the mean."""
    after: float
    why: str
    """The reason in one line, for the log."""


@dataclass(frozen=True)
class _Option:
    """A placement that might be taken."""

    placement: ExpertPlacement
    num_moved: int
    over_mean: float
    gain_ms: float = 0.0
    step_ms: float = 0.0
    moves_ms: float = 0.0

    @property
    def changes(self) -> str:
        """What happens, in words."""
        experts, replicas = self.num_moved, self.placement.num_replicas
        return (
            f"{experts} expert{'s' * (experts != 1)} move{'s' * (experts == 1)}, "
            f"{replicas} replica{'s' * (replicas != 1)}"
        )

    @property
    def pays_after(self) -> float:
        """The steps after which it has paid."""
        return max(1, math.ceil(self.moves_ms / self.gain_ms)) if self.gain_ms > 0 else math.inf


def decide(
    now: ExpertPlacement,
    seen: Seen,
    policy: Policy,
    prices: Prices | None,
    pays_within_steps: int,
    allowed: Allowed = HOMES_ALONE,
    layer: str = "",
) -> Decision:
    """Decide whether a layer gets another placement.

    The policy is asked for homes alone, for replicas alone, for both, and for neither, which is the homes of now
    without replicas. Of what pays within the stated number of steps the one is taken that has saved most by then.
    A gain below what the costs are uncertain by counts as none.

    Args:
        now: the placement now.
        seen: what was measured of the layer.
        policy: says what would be best.
        prices: what the layer, replicas and moves cost; ``None``: nothing was measured, or what runs must not depend on
            measured times. Then rows decide alone: they must fall by a tenth of the mean at the fullest rank.
        pays_within_steps: the steps within which what is moved has to pay.
        allowed: what the policy may change.
        layer: the name of the layer, for the line.

    Raises:
        ValueError: the policy gives no placement of the same sizes, or more replicas than are allowed.
    """
    options = [_option(now, each, seen) for each in _asked(now, seen, policy, allowed)]
    before = _over_mean(now, seen)
    if not options:
        why = f"stays: the fullest rank has {before:.2f} times the mean, and nothing better was found"
        return _stays(now, before, prices, _line(layer, why))
    if prices is None:
        return _by_rows(now, options, before, layer)
    now_ms = prices.step_ms(now, seen)
    priced = [_priced(each, now, now_ms, seen, prices) for each in options]
    worth = [each for each in priced if each.gain_ms > prices.costs.relative_residual * now_ms]
    paying = [each for each in worth if each.pays_after <= pays_within_steps]
    best = max(paying or priced, key=lambda each: each.gain_ms * pays_within_steps - each.moves_ms)
    what = (
        f"{best.changes}: the fullest rank {before:.2f} -> {best.over_mean:.2f} times the mean, "
        f"{_ms(now_ms)} -> {_ms(best.step_ms)} ms a step, {_ms(best.moves_ms, 10)} ms to move"
    )
    if not paying:
        if worth:
            reason = f"would pay after {min(each.pays_after for each in worth)} steps, not within {pays_within_steps}"
        else:
            reason = "gains nothing that these costs could tell"
        return _stays(now, before, prices, _line(layer, f"stays: {what}: {reason}"))
    after = int(best.pays_after)
    why = f"{what}: pays after {after} step{'s' * (after != 1)}"
    return Decision(best.placement, best.gain_ms, best.moves_ms, after, before, best.over_mean, _line(layer, why))


def _asked(now: ExpertPlacement, seen: Seen, policy: Policy, allowed: Allowed) -> list[ExpertPlacement]:
    """Return the different placements that a policy gives, without the one of now."""
    found = []
    for homes in dict.fromkeys((allowed.homes, False)):
        for num_replicas in dict.fromkeys((allowed.num_replicas, 0)):
            given = policy(now, seen, replace(allowed, homes=homes, num_replicas=num_replicas))
            if not isinstance(given, ExpertPlacement):
                raise ValueError(f"the policy gives {given!r}: must be an ExpertPlacement")
            sizes, own = ((each.num_experts, each.num_ranks, each.num_spare) for each in (given, now))
            if sizes != own:
                raise ValueError(
                    f"the policy gives a placement of {sizes[0]} experts on {sizes[1]} rank(s) with {sizes[2]} spare "
                    f"place(s): must be of {own[0]} on {own[1]} with {own[2]}"
                )
            # A policy that leaves all as it is may leave replicas, too.
            if given.num_replicas > num_replicas and given != now:
                raise ValueError(f"the policy gives {given.num_replicas} replicas: must be at most {num_replicas}")
            found.append(given)
    return [each for each in dict.fromkeys(found) if each != now]


def _over_mean(placement: ExpertPlacement, seen: Seen) -> float:
    return fullest_over_mean(placement.rows_between(seen.rows_GE, seen.node_of_rank).sum(axis=0))


def _option(now: ExpertPlacement, wanted: ExpertPlacement, seen: Seen) -> _Option:
    homes = zip(now.home_of_expert, wanted.home_of_expert, strict=True)
    num_moved = sum(now.rank_of_place(old) != now.rank_of_place(new) for old, new in homes)
    return _Option(wanted, num_moved, _over_mean(wanted, seen))


def _priced(option: _Option, now: ExpertPlacement, now_ms: float, seen: Seen, prices: Prices) -> _Option:
    step_ms = prices.step_ms(option.placement, seen)
    moves_ms = prices.moves_ms(now, option.placement, seen)
    return replace(option, gain_ms=now_ms - step_ms, step_ms=step_ms, moves_ms=moves_ms)


def _by_rows(now: ExpertPlacement, options: Sequence[_Option], before: float, layer: str) -> Decision:
    """Decide where no times are known: by the fullest rank, and of what is as good by what changes less."""
    least = min(each.over_mean for each in options)
    near = [each for each in options if each.over_mean <= least + LEAST_BY_ROWS / 2]
    best = min(near, key=lambda each: (each.placement.num_replicas, each.num_moved, each.over_mean))
    what = f"{best.changes}: the fullest rank {before:.2f} -> {best.over_mean:.2f} times the mean"
    if before - best.over_mean < LEAST_BY_ROWS:
        why = f"stays: {what}: by rows alone it has to fall by {LEAST_BY_ROWS:g}"
        return _stays(now, before, None, _line(layer, why))
    why = f"{what}: decided by rows alone, without times"
    return Decision(best.placement, None, None, None, before, best.over_mean, _line(layer, why))


def _stays(now: ExpertPlacement, before: float, prices: Prices | None, why: str) -> Decision:
    none_ms = None if prices is None else 0.0
    return Decision(now, none_ms, none_ms, None, before, before, why)


def _line(layer: str, why: str) -> str:
    return f"{layer}: {why}" if layer else why


def _ms(time_ms: float, whole_from: float = 1e3) -> str:
    """Return a time with one digit behind the point, none from so much on, and two that count where it is small."""
    if time_ms >= whole_from or time_ms == 0:
        return f"{time_ms:.0f}"
    return f"{time_ms:.1f}" if time_ms >= 1 else f"{time_ms:.2g}"
