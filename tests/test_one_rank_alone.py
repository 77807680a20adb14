# SPDX-License-Identifier: Apache-2.0
"""One rank runs the model alone: an error by name where two forwards meet, else a report of every rank."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from tests.hf_families import batch, model_of, step
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.sgd_engines import ds_config, engine_of

EXPERTS = "model.layers.0.mlp.experts"


def evaluate(engine: Any, number: int) -> Any:
    engine.module.eval()
    with torch.no_grad():
        result = engine.module(input_ids=batch(number, 1)).logits
    engine.module.train()
    return result


def generate(engine: Any) -> None:
    engine.module.eval()
    engine.module.generate(batch(9, 1), max_new_tokens=2, do_sample=False)


def looks_soon(engine: Any) -> None:
    """From here on nothing but a hang takes so long: every rank is at the same place, and knows its communicators."""
    watchdog = engine.fsmoe.running._watchdog
    watchdog._hang_timeout_s, watchdog._is_first_use, watchdog._others._every = 4.0, False, 1
    watchdog._poll_s = 3.0  # for so long, twice, a rank that has found a hang leaves the others to find it too
    dist.barrier()


# What one rank does after two steps, and what the others do meanwhile. "later": all have evaluated before.
Act = Callable[[Any], object]
CASES: dict[str, tuple[Act, Act]] = {
    "a sample": (lambda e: evaluate(e, 3), lambda e: step(e, 3)),
    "a later sample": (lambda e: evaluate(e, 3), lambda e: step(e, 3)),
    "generate": (generate, lambda e: step(e, 3)),
    "a later batch": (lambda e: step(e, 3), lambda e: evaluate(e, 3)),
    "a batch beside a save": (lambda e: step(e, 3), lambda e: e.save_checkpoint("saved")),
}


def one_alone(rank: int, world_size: int, folder: str, name: str, alone: int, block: dict[str, Any]) -> None:
    os.chdir(folder)
    engine = engine_of(model_of("mixtral"), ds_config(1, autotune={"enabled": False}, **block))
    of_one, of_others = CASES[name]
    for number in range(2):
        step(engine, number)
    if "later" in name:
        evaluate(engine, 2)
    looks_soon(engine)
    (of_one if rank == alone else of_others)(engine)
    # The forward of the others may be over, as their experts are not shared with it.
    dist.barrier()
    raise AssertionError("it has gone on")


def errors_of(folder: Path, world_size: int, name: str, alone: int, **block: Any) -> dict[int, str]:
    """Rank -> what it said at its end."""
    with pytest.raises(RuntimeError) as caught:
        run_on_ranks(one_alone, world_size, folder / "ranks", str(folder), name, alone, block, grace_s=60)
    parts = re.split(r"(?m)^rank (\d+):$", str(caught.value))
    return {int(rank): text for rank, text in zip(parts[1::2], parts[2::2], strict=True)}


@sampled(
    ("name", "of_one", "of_others"),
    [("a later sample", "evaluation", "training"), ("a later batch", "training", "evaluation")],
)
def test_two_forwards_that_meet_are_an_error_by_name_on_every_rank(
    name: str, of_one: str, of_others: str, tmp_path: Path
) -> None:
    errors = errors_of(tmp_path, 2, name, 0)
    for rank in range(2):
        forwards = f": rank 0: forward 4 ({of_one}) of {EXPERTS}; rank 1: forward 4 ({of_others}) of {EXPERTS}. "
        assert forwards in errors[rank]
        assert "DisagreementError: ds_fsmoe: ranks that share experts are in different forwards" in errors[rank]
        assert "engine.fsmoe_dummy_forward()" in errors[rank]


@pytest.mark.daily("alone", 1)
@pytest.mark.parametrize(
    ("block", "sharing"),
    [
        ({"ep_size": 2}, [2, 3]),
        ({"ep_size": 4, "alltoall": "node_deduplicated", "topology": {"ranks_per_node": 2}}, [0, 1, 2, 3]),
    ],
    ids=["two ranks share experts", "each token crosses once to a node"],
)
def test_all_ranks_that_share_experts_with_one_alone_name_it(
    block: dict[str, Any], sharing: list[int], tmp_path: Path
) -> None:
    errors = errors_of(tmp_path, 4, "a later sample", 2, **block)
    for rank in sharing:
        assert f"rank 2: forward 4 (evaluation) of {EXPERTS}" in errors[rank]
        assert f"forward 4 (training) of {EXPERTS}" in errors[rank]
    assert not any("AssertionError" in each for each in errors.values())


@sampled(
    ("name", "waits"),
    [
        ("a sample", [f"the comparison of the batch size in {EXPERTS}", f"the exchange of counts of {EXPERTS}"]),
        ("generate", ["", ""]),
        ("a batch beside a save", [f"the exchange of counts of {EXPERTS}", "the comparison of what to save"]),
    ],
)
def test_every_rank_says_which_wait_it_is_in_and_what_the_others_did(
    name: str, waits: list[str], tmp_path: Path
) -> None:
    errors_of(tmp_path, 2, name, 0)
    for rank in range(2):
        report = (tmp_path / "fsmoe_reports" / f"rank{rank}.txt").read_text()
        assert "\nreason: hang: waits for other ranks in " in report or "\nreason: another rank hangs: " in report
        assert f"\nrank:   waits for other ranks in {waits[rank]}" in report
        assert f"\n        rank {1 - rank}: waits for other ranks in {waits[1 - rank]}" in report
        last = re.findall(r"last forward: forward \d \((?:training|evaluation)\) of [\w.]+, since [\d:]{8}", report)
        assert len(last) >= 2
        assert "; at step 2; now at " in report
