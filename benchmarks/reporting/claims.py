# SPDX-License-Identifier: Apache-2.0
"""What README and the pages of docs/ say of measurements, each figure with the row that it is read from."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.reporting import lora, one_gpu, one_layer, proportions, whole_models
from benchmarks.reporting.figures import Claim, Excuse, Figure, Results
from benchmarks.reporting.rows import newest

README, PAGE, ROWS = "README.md", "benchmarks/notes/figures.md", "benchmarks/notes/dispatch.md"
DISPATCH, SCHEDULES, NOTES = "docs/dispatch.md", "docs/schedules.md", "benchmarks/notes/schedules.md"
LORA = "docs/lora.md"
TWO_BATCH = "benchmarks/notes/two-batch-overlap.md"


_OF_TODAY = "buckets of a packet"
"""Of the hardware of rows: the bed as it is now, which no longer favours schedules that pause."""


def claims(of: Results) -> Iterator[Claim]:
    """All of them.

    Args:
        of: the rows.

    Raises:
        NoRowError: a figure has no row.
    """
    yield from whole_models.claims(of, README, PAGE)
    yield from one_layer.claims(of, PAGE)
    yield from _about_the_figures(of)
    yield from _halves(of)
    yield from _rows(of)
    yield from _stages(of)
    yield from _others(of)
    yield from proportions.claims(of, PAGE)
    yield from lora.claims(of, README, LORA)
    yield from one_gpu.claims(of, README)


def _about_the_figures(of: Results) -> Iterator[Claim]:
    layers = "mixtral B 4 L 64 M 64 H {} no drop{}, all ranks"
    wide, narrow = ("64M", "1M E 16 k 8")
    cases = [layers.format(size, skew) for size in (wide, narrow) for skew in ("", ", hot expert")]
    cases.append(layers.format("1M E 32 k 8", ""))
    figures = [each("layer_many", case, "best") for case in cases for each in (of.ratio, of.interval)]
    yield Claim(
        PAGE,
        "ours is {} times as fast (95%: {}) with 4 wide experts and k = 2, {} times ({}) with a hot one among them, "
        "{} times ({}) with 16 narrow experts and k = 8, {} times ({}) with a hot one among these, and {} times ({}) "
        "with 32",
        tuple(figures),
    )
    rows = [row for row in newest(of.rows("models_loss"), ("case", "variant", "step")) if _OF_TODAY in row["hardware"]]
    losses = {(row["case"], row["variant"], row["step"]): float(row["loss"]) for row in rows}
    off = max(
        abs(loss / losses[case, "stock, best layout", step] - 1)
        for (case, variant, step), loss in losses.items()
        if variant == "stock"
    )
    figure = Figure(
        f"{off:.0%}", "models_loss", tuple(rows), "stock in the layout of the paper, off its other layout at most"
    )
    yield Claim(PAGE, "trains to other losses (by up to {})", (figure,))
    yield Claim(
        PAGE,
        "{} times as fast as our own padded layer with 4 balanced experts, {} with 16 experts and mild skew, "
        "{} with 128",
        (
            of.ratio("rows", "E 4, k 2, balanced", "rows"),
            *(of.ratio("rows", f"E {E}, k 8, sigma 0.6", "rows", ".1f") for E in (16, 128)),
        ),
    )
    ops = of.of_cases("ops", "ours")
    ends = tuple(
        of.computed(value, ".1f", "ops", "ours over stock, all cases", {"ours"}) for value in (min(ops), max(ops))
    )
    yield Claim(PAGE, "are {} to {} times as fast as stock's functions in CPU time", ends)


def _halves(of: Results) -> Iterator[Claim]:
    for shown, case, settings in (
        ("Qwen3-MoE, k = 2", "attention a fifth", {}),
        ("OLMoE, k = 2, 640 positions, routers' own choices", "attention a half", {}),
        ("OLMoE with its head, k = 4", "olmoe", {"L": 512}),
        ("Mixtral with its head, k = 2", "mixtral", {}),
    ):
        share, gain = (of.cell("halves_predicted", column, form, case=case) for column, form in _PREDICTED)
        ratios = (of.ratio_in("halves", case, variant, **settings) for variant in ("in halves", "kept"))
        yield Claim(TWO_BATCH, f"| {shown} | {{}} | {{}} | {{}} | {{}} |", (share, *ratios, gain))
    case = "attention a fifth, checkpointed"
    ratios = tuple(of.ratio_in("halves", case, variant) for variant in ("in halves", "kept"))
    yield Claim(TWO_BATCH, "| the first one, its blocks checkpointed | | {} | {} | |", ratios)
    share, gain = (of.cell("halves_predicted", column, form, case="short") for column, form in _PREDICTED)
    short = of.ratio_in("halves", "short", "in halves")
    yield Claim(
        TWO_BATCH, "| Mixtral of two layers and 64 tokens | {} | {} | the whole batch | {} |", (share, short, gain)
    )
    long = next(row for row in of.rows("halves_predicted") if row["case"] == "olmoe")
    at = {"case": "olmoe", "date": long["date"]}
    share, gain = (of.cell("halves_predicted", column, form, **at) for column, form in _PREDICTED)
    ratios = (of.ratio_in("halves", "olmoe", variant, L=256) for variant in ("in halves", "kept"))
    shown = "OLMoE with its head, k = 4, 256 positions, routers' own choices"
    yield Claim(TWO_BATCH, f"| {shown} | {{}} | {{}} | {{}} | {{}} |", (share, *ratios, gain))
    ends = ("attention a fifth", "attention a half")
    kept = (of.ratio("halves", case, "kept") for case in ends)
    shares = (of.cell("halves_predicted", *_PREDICTED[0], case=case) for case in ends)
    yield Claim(SCHEDULES, "{} to {} times as fast as the best plan without it", tuple(kept))
    yield Claim(SCHEDULES, "outside of MoE layers take {} to {} of the step", tuple(shares))
    again = of.ratio("halves", "attention a fifth, checkpointed", "kept")
    few = of.ratio("halves", "olmoe", "kept", L=256), share
    yield Claim(SCHEDULES, "{} times where they take {}; {} times with checkpointed blocks", (*few, again))


def _stages(of: Results) -> Iterator[Claim]:
    short, long, mixtral = (
        "GPT2-like, 2 stages",
        "GPT2-like, longer, 2 stages",
        "Mixtral-like, two blocks a stage",
    )
    ratios = [of.ratio_in("stages", mixtral, variant) for variant in ("fsmoe", "best", "tutel")]
    yield Claim(
        PAGE,
        "`fsmoe` {} times as fast as stock, `best` {}, `tutel` {}, our layers with stock's schedule {}, since",
        (*ratios, of.ratio("stages", mixtral, "deepspeed")),
    )
    ratios = [of.ratio_in("stages", case, variant) for variant in ("best", "fsmoe") for case in (short, long)]
    yield Claim(PAGE, "`best` {}, and {} with longer sequences; `fsmoe` {} and {}. With one", tuple(ratios))


_PREDICTED = (("dense_share", ".0%"), ("gain", ".2f"))


def _rows(of: Results) -> Iterator[Claim]:
    dropping = (
        of.ratio("rows", case, "rows") for case in ("E 16, k 2, sigma 1, factor 2", "E 4, k 2, sigma 0, factor 1")
    )
    first = of.ratio("rows", "E 16, k 2, sigma 0, factor 1.25", "rows")
    yield Claim(ROWS, "is {} times as fast as padded with 16 experts", (first,))
    yield Claim(ROWS, "{} times at a factor of 2 with skew, and {} times with 4 experts", tuple(dropping))
    variants = ("flat, 2 chunks", "once, uncut", "once, 4 chunks, reduces first")
    for width in (512, 1024):
        case = f"k 8 of 64, width {width}"
        sent = (
            of.cell("once_counted", "row_bytes", ".2f", 1e-6, case=case, variant=variant)
            for variant in ("flat, uncut", "once, uncut")
        )
        ratios = (of.ratio("once", case, variant) for variant in variants)
        yield Claim(ROWS, f"| width {width} | {{}} MB | {{}} MB | {{}}x | {{}}x | {{}}x |", (*sent, *ratios))
    again = tuple(of.ratio("once", f"k 8 of 64, width {width}", "A/A") for width in (512, 1024))
    yield Claim(ROWS, "ten blocks of one step in turns; A/A {} and {}", again)
    for shown, B, E, k in (
        ("k 8 of 64", 2, 64, 8),
        ("k 8 of 16", 2, 16, 8),
        ("k 4 of 16", 4, 16, 4),
        ("k 2 of 8", 4, 8, 2),
        ("k 1 of 8", 8, 8, 1),
    ):
        case = f"mixtral B {B} L 64 M 512 H 1M E {E} k {k} no drop, no attention, all ranks"
        ratios = (of.ratio_in("choice", case, variant) for variant in ("once", "chosen", "AutoEP"))
        yield Claim(ROWS, f"| {shown} | {{}} | {{}} | {{}} | {{}} |", (of.ratio("choice", case, "A/A"), *ratios))
    cases = ("B 2 L 64 M 512 H 1M E 64 k 8", "B 4 L 64 M 512 H 1M E 8 k 2")
    gains = [of.ratio("choice", f"mixtral {case} no drop, no attention, all ranks", "once") for case in cases]
    shown = "{} times as fast as flat with 8 of 64 experts per token, {} times with 2 of 8, and no difference"
    yield Claim(DISPATCH, shown, tuple(gains))
    case = "mixtral B 2 L 64 M 512 H 1M E 64 k 8 no drop, no attention, all ranks, shared links"
    shared = tuple(each("choice_shared", case, "once") for each in (of.ratio, of.interval))
    yield Claim(ROWS, "share a port, it was {} times ({}) as fast as flat with k = 8 of 64", shared)
    for shown, k in (("64 experts, k = 8", "8 of 64"), ("8 experts, k = 2", "2 of 8")):
        case = f"k {k}, width 512"
        at = {"case": case, "variant": "flat, fp8"}
        parts = ("of_output", "of_tokens_gradient", "of_weights_gradient")
        errors = (of.cell("fp8_error", part, ".1%", **at) for part in parts)
        ratios = (of.ratio("fp8", case, "flat, fp8"), of.over("fp8", case, "once, fp8", "once"))
        yield Claim(ROWS, f"| {shown} | {{}}x | {{}}x | {{}} | {{}} | {{}} |", (*ratios, *errors))
    case, at = "k 8 of 64, width 512", {"case": "k 8 of 64, width 512", "variant": "flat, fp8"}
    yield Claim(DISPATCH, "is {} times as fast as bf16 with 8 of 64", (of.ratio("fp8", case, "flat, fp8"),))
    errors = [of.cell("fp8_error", part, ".1%", **at) for part in ("of_output", "of_weights_gradient")]
    yield Claim(DISPATCH, "is off by {} of its norm, and the weights' gradients by {}.", tuple(errors))


def _others(of: Results) -> Iterator[Claim]:
    case = "dense a third of the traffic"
    yield Claim(
        NOTES,
        "are {} times ({}) as fast as stock's (`benchmarks/cases/bench_levels.py`, ten blocks, A/A {})",
        (
            of.ratio("levels", case, "by one word"),
            of.interval("levels", case, "by one word"),
            of.ratio("levels", case, "A/A"),
        ),
    )
    narrow, wide, sharded = "E 16, k 8, narrow", "E 8, k 2, wide", "E 8, k 2, wide, ZeRO 3"
    yield Claim(
        "benchmarks/notes/huggingface.md",
        "{} times as fast with 16 narrow experts and k = 8 with the schedule that is chosen (95%: {}), {} with 8 wide "
        "ones and k = 2 ({} at ZeRO 3), and {}, {} and {} in one chunk",
        (
            *(each("hf", narrow, "best") for each in (of.ratio, of.interval)),
            *(of.ratio("hf", each, "best") for each in (wide, sharded)),
            *(of.ratio("hf", each, "uncut") for each in (narrow, wide, sharded)),
        ),
    )
    found = [of.ratio("layer_many", each, "best") for each in of.comparison("layer_many").cases]
    ends = min(found, key=lambda each: float(each.text)), max(found, key=lambda each: float(each.text))
    yield Claim("docs/faq.md", "single layers of ours are {} to {} times as fast as AutoEP's ([five cases]", ends)
    wide = {"case": "E 16, k 2, wide"}
    steps = (
        of.cell("lina_alltoalls", "step_ms", ".2f", 1e-3, **wide, variant="lina, not packed"),
        of.cell("lina_alltoalls", "step_ms", ".0f", 1e-3, **wide, variant="lina"),
    )
    yield Claim(NOTES, "one model took {} s a step unpacked and {} s packed onto single ranks", steps)


SIMULATED = "simulated, by a command that the page names"
OF_OTHERS = "of others: said by whoever is named, or a version, a setting, a rule"
NOT_MEASURED = (
    Excuse(README, "# How much on my cluster?", SIMULATED),
    Excuse(README, "# Install and turn on", OF_OTHERS),
    Excuse(PAGE, "(the paper: 1.18 and 1.22)", "the paper's Table 5"),
    Excuse(PAGE, "over `deepspeed`, kappa 0.45 | over `tutel`, kappa 0.45", SIMULATED),
    Excuse(PAGE, "where the goals were 10 and 20%", "a goal"),
    Excuse(PAGE, "The goals, 1.35 over stock and 1.15 over `tutel`, are missed.", "goals"),
    Excuse(PAGE, "The goals were 1.1, 1.5, 2 and 1.5 by lower ends: with k = 2 both are missed.", "goals"),
    Excuse(PAGE, "had `best` behind it by 3 to 6%", "benchmarks/LOG.md, of a version that is gone"),
    Excuse(
        PAGE, "if the two links do not know of each other (kappa 0) and if they slow each other down (0.45)", SIMULATED
    ),
    Excuse(PAGE, "experts 64 to 128 times as wide as tokens (in today's models 0.3 to 4 times)", "sizes of models"),
    Excuse("docs/autotuner.md", "more than 10% slower than the fastest", OF_OTHERS),
    Excuse("docs/autotuner.md", "# How it chooses", OF_OTHERS),
    Excuse("docs/autotuner.md", "# Watch: drift", OF_OTHERS),
    Excuse("benchmarks/notes/autotuner.md", "# Predict and choose", OF_OTHERS),
    Excuse("benchmarks/notes/autotuner.md", "# Try", OF_OTHERS),
    Excuse("docs/ep-size.md", "# How well it chooses", "of five blocks and so without intervals, in benchmarks/LOG.md"),
    Excuse("docs/ep-size.md", "# Try it with your script", "printed by a run of 2026-11-30, in benchmarks/LOG.md"),
    Excuse("docs/compatibility.md", "# Versions", OF_OTHERS),
    Excuse("docs/qwen3.md", "# 2. Does it fit, and what is the speedup?", SIMULATED),
    Excuse("docs/qwen3.md", "# What was tried", OF_OTHERS),
    Excuse(
        "docs/faq.md", "7 of the 44 families of transformers 5.21, others by hand; a `TypeError` with 5.23", OF_OTHERS
    ),
    Excuse("docs/troubleshooting.md", "with NCCL older than 2.26", OF_OTHERS),
    Excuse("docs/troubleshooting.md", "or NCCL 2.26 or later", OF_OTHERS),
    Excuse("docs/troubleshooting.md", "is 0 | NCCL 2.26 or later", OF_OTHERS),
    Excuse("docs/troubleshooting.md", "NCCL is older than 2.26 or was started too early", OF_OTHERS),
    Excuse("docs/troubleshooting.md", "meets transformers 5.23", OF_OTHERS),
    Excuse("benchmarks/notes/gpus.md", "# NCCL", OF_OTHERS),
    Excuse(
        "benchmarks/notes/gpus.md",
        "driver 580.159, 16 cores, Python 3.12.3, torch 2.11.0 for CUDA 13, transformers 5.17",
        OF_OTHERS,
    ),
    Excuse("benchmarks/notes/gpus.md", "copies at 3.0 TB/s", "of the card, measured beside the stages"),
    Excuse(NOTES, "# Two levels", "bytes, by the formulas in the table's head"),
    Excuse(NOTES, "# Clipping", "bytes"),
    Excuse(NOTES, "holds 0.88 to 1.02 times stock's tensors", "counted by the test that is named there"),
    Excuse(SCHEDULES, "# The presets", OF_OTHERS),
    Excuse(SCHEDULES, "with 2 nodes of 8 ranks 0.53 of an all-reduce's bytes", "bytes, by a formula in the notes"),
    Excuse(SCHEDULES, "# Clipping without ZeRO", OF_OTHERS),
    Excuse(SCHEDULES, "of transformers 5.23 or later", OF_OTHERS),
    Excuse(TWO_BATCH, "# What it looks like", SIMULATED),
    Excuse(TWO_BATCH, "# The order", SIMULATED),
    Excuse(TWO_BATCH, "# What it gives", SIMULATED),
    Excuse(TWO_BATCH, "(0.9 ms a character;", "the scale of a picture"),
    Excuse("benchmarks/notes/huggingface.md", "# Trained beside one process", OF_OTHERS),
    Excuse("docs/huggingface.md", "# Loading", OF_OTHERS),
    Excuse("docs/huggingface.md", "# Families", OF_OTHERS),
    Excuse("docs/install.md", "# What you need", OF_OTHERS),
    Excuse("docs/install.md", "# From a checkout", OF_OTHERS),
    Excuse("docs/launchers.md", "# Docker", OF_OTHERS),
    Excuse("docs/launchers.md", "the schemas of Kubernetes 1.37", OF_OTHERS),
    Excuse("docs/launchers.md", "# NCCL settings", OF_OTHERS),
    Excuse("docs/memory.md", "# What ds_fsmoe needs beside stock", OF_OTHERS),
    Excuse("docs/memory.md", "# Offloaded and 8-bit optimizer states", OF_OTHERS),
    Excuse("docs/memory.md", "# Predict it", "bytes, counted by tests/test_memory_plans.py in every run of it"),
    Excuse("benchmarks/notes/memory.md", "# The formulas", OF_OTHERS),
    Excuse("benchmarks/notes/memory.md", "# Measured", "bytes, counted by tests/test_memory_plans.py in every run"),
    Excuse("benchmarks/notes/memory.md", "# Limits", OF_OTHERS),
    Excuse(LORA, "(torch 2.13, peft 0.21, transformers 5.24, TRL 1.16)", OF_OTHERS),
    Excuse("docs/llamafactory.md", "# LLaMA-Factory", OF_OTHERS),
    Excuse("docs/llamafactory.md", "# What was tried", OF_OTHERS),
    Excuse("docs/monitor.md", "# Compare two runs", OF_OTHERS),
    Excuse(
        "docs/placement.md",
        "# Expert placement",
        "reported by others, and drawn by tools/draw_placement.py: rows, no times",
    ),
    Excuse("docs/placement.md", "the fullest rank has to get at least 10% less", "a setting"),
    Excuse("benchmarks/notes/planning.md", "# Solvers and defaults", SIMULATED),
    Excuse("benchmarks/notes/planning.md", "# The paper's evaluation", SIMULATED),
    Excuse("docs/planning.md", "if communication takes 20% of your step", "arithmetic: 1 / (1 - 0.2)"),
    Excuse(
        "docs/planning.md", "hiding all of it makes the step at most 1.25 times as fast", "arithmetic: 1 / (1 - 0.2)"
    ),
    Excuse("docs/planning.md", "it can be up to 10% too long", "of the sum that is planned, simulated"),
    Excuse("docs/planning.md", "a capacity factor of 1.2", "a capacity factor"),
    Excuse("docs/planning.md", "3 times the forward of attention's scores", "a definition"),
    Excuse(SCHEDULES, "at its peak 0.88 to 1.02 times stock's tensors", "counted by the test that is named there"),
    Excuse("docs/gates-and-alltoalls.md", "# Replay", OF_OTHERS),
    Excuse(
        "benchmarks/notes/architecture.md",
        "# Synthetic routing",
        "loads, counted in the recordings beside the benchmarks",
    ),
    Excuse("docs/trainer.md", "# What was tried", OF_OTHERS),
    Excuse(ROWS, "at a factor of 1.25", "a capacity factor"),
    Excuse(ROWS, "of compute capability 9.0 and later", OF_OTHERS),
    Excuse(DISPATCH, "GPU of compute capability 9.0 or later", OF_OTHERS),
    Excuse(DISPATCH, "GPUs of compute capability 9.0 or later", OF_OTHERS),
    Excuse("benchmarks/notes/scale.md", "# What it says", SIMULATED),
    Excuse("benchmarks/notes/scale.md", "# What limits", SIMULATED),
    Excuse("benchmarks/notes/scale.md", "# Systems", SIMULATED),
    Excuse(
        "benchmarks/notes/scale.md",
        "# What computing takes",
        "one card's, measured outside of the benchmarks; and simulated",
    ),
    Excuse("benchmarks/notes/scale.md", "# What is assumed", OF_OTHERS),
)
