# SPDX-License-Identifier: Apache-2.0
"""What README and the notes on figures say of whole models: one word, what each thing adds, the schedule by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from benchmarks.reporting.figures import Claim, Figure, Results, mean
from benchmarks.reporting.rows import newest

_WHOLE = {
    "gpt": "GPT, k 2, H 4 M",
    "mixtral": "Mixtral, k 2, H 7/2 M",
    "olmoe": "OLMoE, k 8, H 1/2 M",
    "qwen3": "Qwen3, k 8, H 3/4 M",
}
"""The models of the mean."""
_AT_ZERO_3 = "Qwen3, k 8, H 3/4 M, ZeRO 3"
_EVERY = (*_WHOLE.values(), _AT_ZERO_3)
_GPT = _WHOLE["gpt"]
_OVER_ALL = "ours, over all ranks"
_CHOSEN = "ours, chosen"
_LIGHT = "stock, no more memory"
_AUTO_EP = "AutoEP over 4"
_IN_ROWS = "ours, rows"


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
    yield from _faq(of)
    yield from _page(of, page)
    yield from _memory(of, page)
    yield from _ladder(of, page)
    yield from _schedule(of, page)
    yield from _parts(of, page)


def _front_page(of: Results, readme: str) -> Iterator[Claim]:
    gain = _mean(of, "ours", "ours over the fastest stock")
    chosen = _mean(of, _CHOSEN, 'with `"sequence_length"` over the fastest stock')
    words = (
        'The geometric mean of the four at ZeRO 0 is {} with `"enabled": true` alone and {} with `"sequence_length"`'
    )
    yield Claim(readme, words, (gain, chosen))
    assert {_stage(of, case) for case in _WHOLE.values()} == {"0"}
    shown = ("GPT with DeepSpeed's MoE layers", "Mixtral", "OLMoE", "Qwen3", "Qwen3 at ZeRO 3")
    for name, case in zip(shown, _EVERY, strict=True):
        variants = ("ours",) if case == _GPT else ("ours", _CHOSEN, _AUTO_EP)
        cells = [*(of.ratio("whole", case, each) for each in variants), "-", "-"][:3]
        yield _line(readme, f"| {name} | {_stage(of, case)}", (), cells)


def _faq(of: Results) -> Iterator[Claim]:
    gain = _mean(of, "ours", "ours over the fastest stock")
    chosen = _mean(of, _CHOSEN, 'with `"sequence_length"` over the fastest stock')
    said = 'were {} times as fast as the fastest stock DeepSpeed with `"enabled": true` alone, and {} times with'
    yield Claim("docs/faq.md", said, (gain, chosen))


def _page(of: Results, page: str) -> Iterator[Claim]:
    for case in _EVERY:
        chosen, over_all, auto_ep = _others(of, case)
        cells = [_communication(of, case), of.ratio_in("whole", case, "ours"), _over_light(of, case) or "the same"]
        cells += [chosen, over_all, *(of.ratio_in("whole", case, each) for each in ("tutel", "pipemoe_lina"))]
        cells += [auto_ep, of.ratio("whole", case, "A/A")]
        yield _line(page, f"| {case} | {_stage(of, case)}", (), cells)
    over = tuple(of.over("whole", case, "ours", "tutel") for case in _WHOLE.values())
    yield Claim(page, "by one word is {}, {}, {} and {} times as fast as `tutel`", over)
    over = tuple(of.over("whole", _WHOLE[name], _OVER_ALL, _AUTO_EP) for name in ("mixtral", "olmoe", "qwen3"))
    yield Claim(page, "{} (Mixtral), {} (OLMoE) and {} times (Qwen3) as fast as AutoEP over the same four ranks", over)
    of_sizes = ("ours, ep_size 1", "ours", _OVER_ALL)
    cells = tuple(of.ratio("whole", _WHOLE[name], each) for each in of_sizes for name in ("mixtral", "olmoe", "qwen3"))
    said = (
        "{}, {} and {} times as fast as stock, with 2 {}, {} and {}, with 4 {}, {} and {}, and the choice is 4 in each"
    )
    yield Claim(page, said, cells)
    yield Claim(page, '`"dispatch": "unpadded"` GPT gains {}', (of.ratio_in("whole", _GPT, _IN_ROWS),))
    yield from _tuning(of, page)


def _tuning(of: Results, page: str) -> Iterator[Claim]:
    file = "whole_tuning"
    tuned = newest([row for row in of.rows(file) if row["case"] in _EVERY], ("case", "variant"))
    off = [abs(float(row["predicted_ms"]) / float(row["in_trials_ms"]) - 1) for row in tuned]
    low, high = (format(end(float(row["measured_s"]) for row in tuned), ".0f") for end in (min, max))
    few, many = (format(end(int(row["steps_of_trials"]) for row in tuned), "d") for end in (min, max))
    figures = [
        Figure(text, file, tuple(tuned), f"best, all models: {what}")
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
    yield Claim("docs/autotuner.md", "| measures for | {} to {} s on the", tuple(figures[:2]))
    yield Claim(page, "a step is off its prediction by {} on average and {} at worst", tuple(figures[4:]))
    yield Claim("docs/planning.md", "was {} off its prediction on average and {} at worst", tuple(figures[4:]))


def _memory(of: Results, page: str) -> Iterator[Claim]:
    def times(short: str, variant: str) -> Figure:
        return of.cell("whole_memory", "times_stock", ".2f", case=_WHOLE[short], variant=variant)

    cells = (times("gpt", "ours"), times("olmoe", "ours"), times("olmoe", _OVER_ALL))
    yield Claim(page, "a step holds {} times stock's tensors in GPT, and {} times in OLMoE, {} times with", cells)
    cells = tuple(times(name, each) for name in ("mixtral", "qwen3") for each in ("ours", _OVER_ALL))
    yield Claim(page, "in Mixtral {} and {} times, in Qwen3 {} and {} times", cells)


_RUNGS = ("ep_size", "once per node", "windows", "schedule")


def _ladder(of: Results, page: str) -> Iterator[Claim]:
    """Each rung over the rung before, and the last one over stock."""
    for case in of.comparison("ladder").cases:
        there = [each for each in _RUNGS if any(_is(row, case, each) for row in of.rows("ladder"))]
        below = dict(zip(there, ("", *there[:-1]), strict=True))
        figures = [of.ratio_in("ladder", case, each, over=below[each]) for each in there]
        figures += [of.ratio_in("ladder", case, there[-1], over=""), of.ratio("ladder", case, "A/A", over="")]
        cells = " | ".join("{}" if each in there else "-" for each in _RUNGS)
        yield Claim(page, f"| {case} | {cells} | {{}} | {{}} |", tuple(figures))


def _schedule(of: Results, page: str) -> Iterator[Claim]:
    """All cases of the file: whole models and layers."""
    file = "schedule"
    found = of.comparison(file)
    for case in found.cases:
        figures = (of.ratio_in(file, case, "windows"), of.ratio_in(file, case, "best"), of.ratio(file, case, "A/A"))
        # The name of a layer has numbers, too.
        name = Figure(case.removesuffix(", all ranks"), file, figures[0].rows, "the case")
        yield Claim(page, "| {} | {} | {} | {} |", (name, *figures))
    models = [each for each in found.cases if each in _EVERY]
    layers = [each for each in found.cases if each not in _EVERY]
    for cases, words in ((models, "whole models"), (layers, "layers of the paper's grid")):
        gain = of.computed(
            mean([found.ratio(each, "best") for each in cases]),
            ".2f",
            file,
            f"best over our serial schedule: geometric mean of {words}",
            {"best"},
        )
        yield Claim(page, f"geometric mean of {words}: {{}}", (gain,))


def _line(page: str, head: str, of_head: tuple[Figure, ...], cells: Sequence[Figure | str]) -> Claim:
    """Return a line of a table, whose further cells are figures or words."""
    shown = " | ".join(each if isinstance(each, str) else "{}" for each in cells)
    figures = (each for each in cells if isinstance(each, Figure))
    return Claim(page, f"{head} | {shown} |", (*of_head, *figures))


def _is(row: dict[str, str], case: str, variant: str) -> bool:
    return (row["case"], row["variant"]) == (case, variant)


def _mean(of: Results, variant: str, what: str) -> Figure:
    """Of the four models. GPT has its experts over all ranks in any case."""
    names = {case: "ours" if case == _GPT else variant for case in _WHOLE.values()}
    rows = tuple(of.find("whole", case=case, variant=name, over="") for case, name in names.items())
    gains = [float(row["ratio"]) for row in rows]
    return Figure(format(mean(gains), ".2f"), "whole", rows, f"{what}: geometric mean of four models")


def _others(of: Results, case: str) -> tuple[Figure | str, ...]:
    """Return ours with a chosen size, over all ranks and AutoEP over them, or dashes where none differs from ours."""
    if case == _GPT:
        return "-", "-", "-"
    return tuple(of.ratio_in("whole", case, each) for each in (_CHOSEN, _OVER_ALL, _AUTO_EP))


def _over_light(of: Results, case: str) -> Figure | None:
    """Ours over the fastest stock with no more memory; ``None``: that is the fastest of all."""
    if not any(_is(row, case, "ours") and row["over"] == _LIGHT for row in of.rows("whole")):
        return None
    return of.ratio_in("whole", case, "ours", over=_LIGHT)


def _stage(of: Results, case: str) -> str:
    """Of ZeRO, of the fastest stock."""
    stock = [row for row in of.rows("whole_sweep") if _is(row, case, "stock")]
    rows = newest(stock, ("stage", "bucket", "overlap"))
    return min(rows, key=lambda row: float(row["ms"]))["stage"]


def _communication(of: Results, case: str) -> Figure:
    rows = newest([row for row in of.rows("whole_operations") if row["case"] == case], ("operation",))
    share = sum(float(row["share"]) for row in rows if row["operation"] in _SENT)
    return Figure(f"{share:.0%}", "whole_operations", tuple(rows), f"{case}: communication of stock's step")


_SENT = ("all-to-all", "all-reduce", "all-gather", "reduce-scatter", "reduce", "broadcast")


_SHARED = ("chunks", "gradients in windows")
"""The parts that both models have and that can be alone."""
_OF_ROWS = ("once per node", "halves")
"""Those that only layers with rows have."""
_WAYS = (
    *("a number per phase", "both links at once", "gradients in two levels"),
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
