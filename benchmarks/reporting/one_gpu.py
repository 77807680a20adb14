# SPDX-License-Identifier: Apache-2.0
"""What README and benchmarks/notes/gpus.md say of a GPU, with the rows that stages of ``benchmarks/gpu`` made there."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from benchmarks.reporting.figures import Claim, Figure, Results

PAGE = "benchmarks/notes/gpus.md"
LAYERS = {
    "Qwen3-30B-A3B, 2048/768/128/8": "qwen3-30b-a3b",
    "OLMoE-1B-7B, 2048/1024/64/8": "olmoe-1b-7b",
    "Mixtral-8x7B, 4096/14336/8/2": "mixtral-8x7b",
}
DEEPSEEK = "DeepSeek-V2-Lite, 2048/1408/64/6"
MODELS = {"OLMoE, 5 layers, 8192 tokens": "olmoe, 5 of 16 layers"}
MODELS |= {"Qwen3-30B-A3B, 3 layers, 8192 tokens": "qwen3-30b-a3b, 3 of 48 layers"}
EIGHTH = "olmoe's shape at an eighth, 24 layers"
WIDTHS = {"Mixtral": "M 4096 H 14336", "Qwen3": "M 2048 H 768", "OLMoE": "M 2048 H 1024", "DeepSeek": "M 2048 H 1408"}
PRESETS = ("deepspeed", "tutel", "lina", "fsmoe_no_iio", "fsmoe", "best")


def claims(of: Results, readme: str) -> Iterator[Claim]:
    """All of them.

    Args:
        of: the rows.
        readme: the page README.

    Raises:
        NoRowError: a figure has no row.
    """
    shares = {case: _share(of, case) for case in LAYERS.values()}
    ends = sorted(shares.values(), key=lambda each: float(each.text))
    yield Claim(readme, "a layer in {} to {} of the time of Hugging Face's `grouped_mm`", (ends[0], ends[-1]))
    ways = (("ours, autotune off", "compiled"), ("stock, grouped_mm", ""))
    times = tuple(_model(of, "olmoe, 5 of 16 layers", "step_ms", ".0f", *way) for way in ways)
    yield Claim(readme, "a step of OLMoE with 5 layers in {} ms, stock in {} ms", times)
    for shown, case in LAYERS.items():
        ways = {"eager": "", "grouped_mm": "", "stock deepspeed": "", "ours": "reference"}
        times = [_layer(of, case, "ms", ".1f", way, ops) for way, ops in ways.items()]
        times += [_layer(of, case, "ms", ".1f", "ours", "compiled"), shares[case]]
        yield Claim(PAGE, f"| {shown} |" + " {} |" * 6, tuple(times))
        both = [("grouped_mm", ""), ("ours", "compiled")]
        cells = [_layer(of, case, each, ".1f", *way) for way in both for each in ("device_ms", "host_ms")]
        cells += [_layer(of, case, "peak_mib", ".0f", *way) for way in both]
        yield Claim(PAGE, f"| {shown.partition(',')[0]} | {{}} | {{}} | {{}} | {{}} | {{}} / {{}} |", tuple(cells))
    ways = (("eager", ""), ("grouped_mm", ""), ("ours", "reference"))
    times = tuple(_layer(of, "deepseek-v2-lite", "ms", ".1f", *way) for way in ways)
    yield Claim(PAGE, f"| {DEEPSEEK} | {{}} | {{}} | - | {{}} | not measured | |", times)
    for shown, case in MODELS.items():
        ways = (("stock, grouped_mm", ""), ("ours, autotune off", "reference"), ("ours, autotune off", "compiled"))
        cells = [_model(of, case, "step_ms", ".0f", *way) for way in ways]
        cells += [_model(of, case, "peak_gib", ".1f", *way) for way in (ways[0], ways[2])]
        yield Claim(PAGE, f"| {shown} | {{}} | {{}} | {{}} | {{}} / {{}} |", tuple(cells))
    cells = [_model(of, EIGHTH, "step_ms", ".0f", *way) for way in (("stock, grouped_mm", ""), ways[1])]
    cells += [_model(of, EIGHTH, "peak_gib", ".1f", *way) for way in (("stock, grouped_mm", ""), ways[1])]
    yield Claim(PAGE, "24 layers, 2048 tokens | {} | {} | not measured | {} / {} |", tuple(cells))
    for shown in WIDTHS:
        at = {"configuration": _emulated(shown), "phase": "step"}
        cells = [
            of.cell("gpu_links", column, ".1f", preset=preset, **at)
            for preset in PRESETS
            for column in ("predicted", "measured")
        ]
        yield Claim(PAGE, f"| {shown} |" + " {} / {} |" * len(PRESETS), tuple(cells))
    rows = tuple(row for row in of.rows("gpu_links") if row["phase"] == "step")
    off = [abs(float(row["off"])) for row in rows]
    figures = [Figure(f"{each(off):.1%}", "gpu_links", rows, "off its prediction") for each in (median, max)]
    best = of.cell("gpu_links", "ratio", ".2f", preset="best", phase="step", configuration=_emulated("Mixtral"))
    yield Claim(PAGE, "In Mixtral's layer `best` is {} times as fast as stock's order", (best,))
    yield Claim(PAGE, "a step is off its prediction by {} in the middle and {} at the most", tuple(figures))


def _layer(of: Results, case: str, column: str, form: str, variant: str, ops: str) -> Figure:
    return of.cell("gpu_layer", column, form, case=case, variant=variant, ops=ops)


def _model(of: Results, case: str, column: str, form: str, variant: str, ops: str) -> Figure:
    return of.cell("gpu_model", column, form, case=case, variant=variant, ops=ops)


def _emulated(shown: str) -> str:
    return f"modern: mixtral B 8 L 4096 {WIDTHS[shown]} f 1"


def _share(of: Results, case: str) -> Figure:
    """Return the time of ours over that of grouped_mm in the same run."""
    ours = of.find("gpu_layer", case=case, variant="ours", ops="compiled")
    theirs = of.find("gpu_layer", case=case, variant="grouped_mm", arch_list=ours["arch_list"])
    return Figure(
        f"{float(ours['ms']) / float(theirs['ms']):.2f}", "gpu_layer", (ours, theirs), f"{case}: ours over grouped_mm"
    )
