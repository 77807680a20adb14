# SPDX-License-Identifier: Apache-2.0
"""How the time of a step with stock's schedule, one task after another, divides among five parts, as in Table 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Shares:
    """The parts of a step, which sum to 1."""

    all_to_all: float
    ag_rs: float
    """All-gathers and reduce-scatters of model and expert parallelism, inside nodes."""
    experts: float
    gradients: float
    """The sum of gradients over ranks; what ZeRO gathers of parameters for it among it, where it was measured."""
    rest: float
    """Attention, routing, order, layers without experts; the optimizer where it was measured."""

    @classmethod
    def of(cls, times_ms: Mapping[str, float]) -> Shares:
        """Return the shares of times that are given by the names of the parts; a part that is lacking took none."""
        total_ms = sum(times_ms.values())
        return cls(**{name: times_ms.get(name, 0.0) / total_ms for name in PARTS})

    @property
    def communication(self) -> float:
        """The share of all that is sent."""
        return self.all_to_all + self.ag_rs + self.gradients

    @property
    def a2a_over_experts(self) -> float:
        """It goes as 1 / (bandwidth * H): bytes as tokens * k * M, products as tokens * k * M * H."""
        return self.all_to_all / self.experts

    @property
    def gradients_over_a2a(self) -> float | None:
        """It goes as M / (tokens * k) where every expert is on one rank; ``None``: there is no all-to-all."""
        return self.gradients / self.all_to_all if self.all_to_all else None

    def distance(self, other: Shares) -> float:
        """The share of a step that would have to be spent on something else to give the other: half the sum of what the
        shares differ by, from 0 to 1."""
        return sum(abs(getattr(self, name) - getattr(other, name)) for name in PARTS) / 2

    @property
    def gradients_over_experts(self) -> float:
        """Where every rank has all experts, whose gradients are the most, it goes as E / (bandwidth * tokens * k)."""
        return self.gradients / self.experts

    def matched_to(self, other: Shares) -> Shares:
        """The same step on faster links, with wider experts and with more tokens, so that its all-to-alls, if it has
        any, and its gradients are to its experts as in the other; what else there is stays as it is beside experts."""
        all_to_all = other.a2a_over_experts if self.all_to_all else 0.0
        ag_rs, rest = self.ag_rs / self.experts, self.rest / self.experts
        gradients = other.gradients_over_experts
        return Shares.of(
            {"all_to_all": all_to_all, "ag_rs": ag_rs, "experts": 1.0, "gradients": gradients, "rest": rest}
        )

    def change_to(self, other: Shares) -> tuple[float | None, float]:
        """Return how many times bandwidth * H has to be what it is for that, ``None`` where there is no all-to-all, and
        how many times tokens * k, all else as it is."""
        if not self.all_to_all:
            return None, self.gradients_over_experts / other.gradients_over_experts
        # Both are sent over the same links, so faster ones change nothing of the second.
        of_other = other.gradients / other.all_to_all
        return self.a2a_over_experts / other.a2a_over_experts, self.gradients / self.all_to_all / of_other


PARTS = tuple(field.name for field in fields(Shares))
