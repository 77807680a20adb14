# SPDX-License-Identifier: Apache-2.0
"""What README and docs/benchmarks.md say of whole models by one word, and of what each part is worth in two of them."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from benchmarks.reporting.figures import Claim, Figure, Results, mean
from benchmarks.reporting.rows import newest

_WHOLE = {
    "gpt": "GPT, k 2, H 4 M",
    "mixtral": "Mixtral, k 2, H 7/2 M",
    "olmoe": "OLMoE, k 8, H 1/2 M",
    "qwen3": "Qwen3, k 8, H 3/4 M",
}
_OVER_ALL = "ours, over all ranks"
_AUTO_EP = "AutoEP over 4"
_IN_ROWS = "ours, rows"
_WITH_AUTO_EP = ("mixtral", "qwen3")
"""The models that it takes."""


def claims(of: Results, readme: str, page: str) -> Iterator[Claim]:
    """All of them.

    Args:
        of: the rows.
        readme: the front page's file.
        page: that of the page of benchmarks.

    Raises:
        NoRowError: a figure has no row.
    """
    yield from _front_page(of, readme)
    yield from _page(of, page)
    yield from _memory(of, page)
    yield from _parts(of, page)


def _front_page(of: Results, readme: str) -> Iterator[Claim]:
    ours = of.of_cases("one_word", "ours")
    gain = of.computed(mean(ours), ".2f", "one_word", "ours over stock: geometric mean of four models", {"ours"})
    yield Claim(readme, "**With one word in the config, for the same model: {} times**", (gain,))
    yield Claim(readme, "the gain is {}, the geometric mean of four models", (gain,))
    for shown, short in (
        ("GPT, stock's MoE layers | 1", "gpt"),
        ("Mixtral | 1", "mixtral"),
        ("OLMoE | 2", "olmoe"),
        ("Qwen3 | 3", "qwen3"),
    ):
        case = _WHOLE[short]
        columns = {"ours": True, _OVER_ALL: short != "gpt", _AUTO_EP: short in _WITH_AUTO_EP}
        figures = [of.ratio_in("one_word", case, each) for each, is_there in columns.items() if is_there]
        cells = " | ".join("{}" if is_there else "-" for is_there in columns.values())
        yield Claim(readme, f"| {shown} | {cells} | {{}} |", (*figures, _communication(of, case)))


def _page(of: Results, page: str) -> Iterator[Claim]:
    for short, case in _WHOLE.items():
        asked = ["ours", *([_OVER_ALL] if short != "gpt" else []), "tutel", "pipemoe_lina", "fsmoe"]
        asked += [_AUTO_EP] if short in _WITH_AUTO_EP else []
        again = of.ratio("one_word", case, "A/A")
        yield Claim(
            page,
            f"| {case} | {{}} | {{}} | {'{}' if short != 'gpt' else '-'} | {{}} | {{}} | {{}} | "
            f"{'{}' if _AUTO_EP in asked else '-'} | {{}} |",
            (_communication(of, case), *(of.ratio_in("one_word", case, each) for each in asked), again),
        )
    over = tuple(of.over("one_word", case, "ours", "tutel") for case in _WHOLE.values())
    yield Claim(page, "by one word is {}, {}, {} and {} times as fast as `tutel`", over)
    over = tuple(of.over("one_word", _WHOLE[name], _OVER_ALL, _AUTO_EP) for name in ("mixtral", "qwen3"))
    yield Claim(page, "{} (Mixtral) and {} times (Qwen3) as fast as AutoEP over the same four ranks", over)
    rows = of.ratio_in("one_word", _WHOLE["gpt"], _IN_ROWS)
    yield Claim(page, '`"dispatch": "rows"` GPT gains {}', (rows,))
    tuned = [row for row in newest(of.rows("one_word_tuning"), ("case", "variant")) if row["variant"] != "fsmoe"]
    off = [abs(float(row["predicted_ms"]) / float(row["in_trials_ms"]) - 1) for row in tuned]
    low, high = (format(end(float(row["measured_s"]) for row in tuned), ".0f") for end in (min, max))
    few, many = (format(end(int(row["steps_of_trials"]) for row in tuned), "d") for end in (min, max))
    figures = [
        Figure(text, "one_word_tuning", tuple(tuned), f"best, all models: {what}")
        for text, what in (
            (low, "seconds of measuring, the least"),
            (high, "seconds of measuring, the most"),
            (few, "steps of trials, the fewest"),
            (many, "steps of trials, the most"),
            (format(fmean(off), ".0%"), "off its prediction, on average"),
            (format(max(off), ".0%"), "off its prediction, at worst"),
        )
    ]
    yield Claim(page, "takes {} to {} s of measuring and {} to {} steps of trials", tuple(figures[:4]))
    yield Claim(page, "a step is off its prediction by {} on average and {} at worst", tuple(figures[4:]))
    below = max(1 - float(row["in_trials_ms"]) / float(row["bound_ms"]) for row in tuned)
    what = Figure(format(below, ".0%"), "one_word_tuning", tuple(tuned), "best, all models: below its bound, at most")
    yield Claim(page, "was shorter than its bound by {}", (what,))


def _memory(of: Results, page: str) -> Iterator[Claim]:
    asked = (("gpt", "ours"), ("olmoe", "ours"), ("olmoe", _OVER_ALL))
    cells = (of.cell("one_word_memory", "times_stock", ".2f", case=_WHOLE[name], variant=each) for name, each in asked)
    yield Claim(
        page, "a step holds {} times stock's tensors in GPT, and {} times in OLMoE, {} times with", tuple(cells)
    )
    asked = tuple((name, each) for name in ("mixtral", "qwen3") for each in ("ours", _OVER_ALL))
    cells = (of.cell("one_word_memory", "times_stock", ".2f", case=_WHOLE[name], variant=each) for name, each in asked)
    yield Claim(page, "in Mixtral {} and {} times, in Qwen3 {} and {} times", tuple(cells))


def _communication(of: Results, case: str) -> Figure:
    rows = newest([row for row in of.rows("one_word_operations") if row["case"] == case], ("operation",))
    share = sum(float(row["share"]) for row in rows if row["operation"] in _SENT)
    return Figure(f"{share:.0%}", "one_word_operations", tuple(rows), f"{case}: communication of stock's step")


_SENT = ("all-to-all", "all-reduce", "all-gather", "reduce-scatter", "reduce", "broadcast")


_SHARED = ("chunks", "gradients in windows")
"""The parts that both models have and that can be alone."""
_OF_ROWS = ("once per node", "halves")
"""Those that only layers with rows have."""
_WAYS = (
    *("a number per phase", "both links at once", "weight gradients later", "gradients in two levels"),
    "parameters under the forward",
)
"""Those that are ways in which others are done, so never alone."""


def _parts(of: Results, page: str) -> Iterator[Claim]:
    olmoe, gpt = _WHOLE["olmoe"], _WHOLE["gpt"]

    def without(part: str, case: str) -> Figure:
        return of.ratio_in("parts", case, f"without {part}", over="")

    def alone(part: str, case: str) -> Figure:
        return of.ratio_in("parts", case, f"{part} alone", over="nothing")

    for part in _SHARED:
        figures = (without(part, olmoe), alone(part, olmoe), without(part, gpt), alone(part, gpt))
        yield Claim(page, f"| {part} | {{}} | {{}} | {{}} | {{}} |", figures)
    for part in _OF_ROWS:
        yield Claim(page, f"| {part} | {{}} | {{}} | - | - |", (without(part, olmoe), alone(part, olmoe)))
    for part in _WAYS:
        yield Claim(page, f"| {part} | {{}} | - | {{}} | - |", (without(part, olmoe), without(part, gpt)))
    cells = [of.ratio_in("parts", case, "nothing", over="") for case in (olmoe, gpt)]
    again = [of.ratio_in("parts", case, "A/A", over=over) for case in (olmoe, gpt) for over in ("", "nothing")]
    yield Claim(page, "| all of them | {} | - | {} | - |", tuple(cells))
    yield Claim(page, "| A/A | {} | {} | {} | {} |", tuple(again))
