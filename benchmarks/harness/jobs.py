# SPDX-License-Identifier: Apache-2.0
"""What ``make bench`` and ``make bench-full`` run: one command after another, on the bed it is for or by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.bed.bed import Bed

# In --full without the arguments, which make them short.
_ON_THE_BED = (
    ("cases/bench_operations.py", "--steps 3 --only 0"),
    ("cases/bench_layer.py", "--blocks 2 --only 0"),
)
NUM_LAYERS, NUM_LAYERS_LIKE_TABLE_2, NUM_MANY, NUM_CHOICES, NUM_INFERENCE, NUM_SUB_BATCHES = 24, 12, 8, 5, 6, 7
JUDGED_LAYERS = (2, 4, 6, 9, 13, 15, 20, 23)
"""As in ``cases/bench_layer.py``, which takes torch to read."""
STAGES = ("gpt2", "gpt2-long", "mixtral")
ONE_WORD = ("gpt", "mixtral", "olmoe", "qwen3", "qwen3-zero3")
MODELS = ("gpt2", "mixtral", "short", "long")
_WHOLE: dict[str, Any] = {"inter": "100mbit", "intra": "400mbit"}
_ALONE: dict[str, Any] = {"nodes": 4, "ranks_per_node": 1, "inter": "50mbit"}
_ONLY_IN_FULL = (
    *(f"cases/bench_models.py --judged --only {name}" for name in MODELS),
    *(f"cases/bench_layer.py --best-layout --judged --sweep --only {number}" for number in JUDGED_LAYERS),
    *("cases/bench_layer.py --ablation --only 1 4 13", "cases/bench_layer.py --skew --only 2"),
    *("cases/bench_gates.py", "cases/bench_rows.py", "cases/bench_bed.py", "cases/bench_once.py"),
    *("cases/bench_levels.py", "cases/bench_fp8.py", "cases/bench_lina.py", "cases/bench_hf.py"),
    *(f"cases/bench_layer.py --many --judged --only {number}" for number in range(NUM_MANY)),
    *(f"cases/bench_choice.py --only {number}" for number in range(NUM_CHOICES)),
    *(f"cases/bench_choice.py --old-grid --only {number}" for number in range(NUM_LAYERS)),
)
_ON_OTHER_BEDS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"mode": "shared"}, "cases/bench_layer.py --only 1 4 13"),
    *(({"mode": "shared"}, f"cases/bench_choice.py --only {number}") for number in range(NUM_CHOICES)),
    ({"nodes": 3}, "cases/bench_models.py --only mixtral"),
    ({"nodes": 4}, "cases/bench_models.py --only mixtral"),
    *((_ALONE | {"inter": "100mbit"}, f"cases/bench_stages.py --only {name}") for name in STAGES),
    *(
        ({"inter": "100mbit", "intra": "400mbit"}, f"cases/bench_one_word.py --sweep --only {name}")
        for name in ONE_WORD
    ),
    *(({"inter": "100mbit", "intra": "400mbit"}, f"cases/bench_ladder.py --only {name}") for name in ONE_WORD),
    *(({"inter": "100mbit", "intra": "400mbit"}, f"cases/bench_parts.py --only {name}") for name in ("gpt", "olmoe")),
    *(
        ({"intra": "50mbit"}, f"cases/bench_layer.py --table2 --only {number}")
        for number in range(NUM_LAYERS_LIKE_TABLE_2)
    ),
    *(
        (_ALONE | {"inter": "100mbit", "intra": "400mbit"}, f"cases/bench_placement.py --only 0 --routing {name}")
        for name in ("hot_rank", "zipf_1.5", "rotating", "olmoe")
    ),
    *((_ALONE | {"nodes": 2, "inter": "100mbit"}, f"cases/bench_halves.py --only {n}") for n in range(NUM_SUB_BATCHES)),
    *((_ALONE | {"nodes": 2, "inter": "100mbit"}, f"cases/bench_schedule.py --only {n}") for n in ONE_WORD[:-1]),
    *((_ALONE | {"nodes": 2, "inter": "25mbit"}, f"cases/bench_schedule.py --only {n}") for n in JUDGED_LAYERS),
    (_ALONE | {"nodes": 2, "inter": "25mbit"}, "cases/bench_timeline.py"),
    *((_ALONE, f"cases/bench_inference.py --only {number}") for number in range(NUM_INFERENCE)),
)
"""Only in --full: links that contend, 6 and 8 ranks, pipeline stages, long traffic inside nodes, nodes of one rank."""
_BY_THEMSELVES = (
    ("cases/bench_ops.py", "--tokens 2048 --choices 2 --blocks 4"),
    ("cases/bench_split_plan.py", "--quick"),
    ("cases/bench_proportions.py", ""),
    ("cases/bench_lora.py", "--tiny --blocks 2"),
    ("cases/bench_lora.py --ranks 2", "--tiny --blocks 2"),
)


@dataclass(frozen=True)
class Job:
    """One command, and where it runs.

    Attributes:
        command: the script, below ``benchmarks/``, and its arguments.
        bed: of which shape the bed is; ``None``: none is needed.
    """

    command: str
    bed: Bed | None = None

    @property
    def script(self) -> str:
        """The script alone."""
        return self.command.split()[0]

    @property
    def where(self) -> str:
        """The bed in words."""
        return "no bed" if self.bed is None else str(self.bed)


def jobs(is_full: bool) -> tuple[Job, ...]:
    """All of them, those of one bed one after another; few and short ones unless all cases are wanted."""
    return tuple(_jobs(is_full))


def _jobs(is_full: bool) -> Iterator[Job]:
    on_the_bed = [name if is_full else f"{name} {short}".strip() for name, short in _ON_THE_BED]
    if is_full:
        # A job for each case, because of what the groups of earlier ones would cost.
        on_the_bed.remove("cases/bench_layer.py")
        for number in range(NUM_LAYERS):
            on_the_bed.append(f"cases/bench_layer.py {'--judged --sweep ' * (number in JUDGED_LAYERS)}--only {number}")
        on_the_bed += _ONLY_IN_FULL
    for command in on_the_bed:
        yield Job(command, _bed())
    for options, command in _ON_OTHER_BEDS if is_full else ():
        yield Job(command, _bed(**options))
    for name, short in _BY_THEMSELVES:
        yield Job(name if is_full else f"{name} {short}".strip())


def _bed(**options: Any) -> Bed:
    return Bed("bench", **{"inter": "25mbit", "intra": "100mbit"} | options)
