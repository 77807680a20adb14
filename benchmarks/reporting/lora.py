# SPDX-License-Identifier: Apache-2.0
"""What the pages say of LoRA on experts: steps and memory, beside PEFT under stock DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.reporting.figures import Claim, Figure, Results

FILE, MEMORY = "lora", "lora_memory"
_ONE = ("M 256, 64 tokens, r 8", "M 256, 512 tokens, r 8", "M 256, 512 tokens, r 32")
_ONE += ("M 768, 64 tokens, r 8", "M 768, 512 tokens, r 8", "M 768, 512 tokens, r 32")
_TWO = tuple(each for each in _ONE if each.endswith("512 tokens, r 8"))


def claims(of: Results, readme: str, page: str) -> Iterator[Claim]:
    """All of them.

    Args:
        of: the rows.
        readme: the front page's file.
        page: that of the page about LoRA.

    Raises:
        NoRowError: a figure has no row.
    """
    gains = sorted((of.ratio(FILE, _on(case, 1), "ours") for case in _ONE), key=lambda each: float(each.text))
    above = _above(of, _on(_ONE[3], 1))
    yield Claim(page, "is {} to {} times as fast as with PEFT's `target_parameters`", (gains[0], gains[-1]))
    yield Claim(page, "needs {} MB above the weights where that needs {}", above[::-1])
    yield Claim(
        readme,
        "over PEFT with `grouped_mm` | its best | {} to {} | - | - |",
        (gains[0], gains[-1]),
    )
    for case in _ONE:
        name = _on(case, 1)
        figures = (_ms(of, name), of.ratio_in(FILE, name, "ours"), *_above(of, name))
        yield Claim(page, f"| {case} | {{}} ms | {{}} | {{}} / {{}} MB |", figures)
    eager = (of.cell(FILE, "p50", ".0f", case=_on(_ONE[0], 1), variant=each) for each in ("eager", "stock"))
    yield Claim(page, "(`eager`) takes {} ms in the first case, where `grouped_mm` takes {} ms", tuple(eager))
    for case in _TWO:
        name = _on(case, 2)
        ours = [of.ratio_in(FILE, name, each) for each in ("ours", "ours, ep_size 1")]
        held = (of.cell(MEMORY, "held", ".0f", case=name, variant=each) for each in ("stock", "ours"))
        figures = (_ms(of, name), *ours, *_above(of, name), *held)
        yield Claim(page, f"| {case} | {{}} ms | {{}} | {{}} | {{}} / {{}} MB | {{}} / {{}} MB |", figures)


def _on(case: str, ranks: int) -> str:
    return f"{case}, {ranks} rank{'s' * (ranks > 1)}"


def _ms(of: Results, case: str) -> Figure:
    return of.cell(FILE, "p50", ".0f", case=case, variant="stock")


def _above(of: Results, case: str) -> tuple[Figure, ...]:
    """Return stock's and ours: the most in a step above what lives between steps."""
    return tuple(of.cell(MEMORY, "above", ".0f", case=case, variant=each) for each in ("stock", "ours"))
