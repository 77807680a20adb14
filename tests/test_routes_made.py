# SPDX-License-Identifier: Apache-2.0
"""Made-up routing has the skew that its name says, and is the same wherever it is made."""

from __future__ import annotations

import subprocess
import sys
import zlib

import numpy as np
import pytest

from ds_fsmoe.routes.made import DRIFT_STEPS, HOT_SHARE, NAMES, choices

S, E, K, EP = 4099, 32, 4, 8


def counts(name: str, num_experts: int = E, k: int = K, **more: int) -> np.ndarray:
    made = choices(name, num_tokens=S, num_experts=num_experts, k=k, **{"ep_size": EP} | more)
    return np.bincount(made.reshape(-1), minlength=num_experts)


def skew(counts_E: np.ndarray) -> float:
    return counts_E.max() / counts_E.mean()


def distance(first: np.ndarray, second: np.ndarray) -> float:
    """Total variation between two loads."""
    return np.abs(first / first.sum() - second / second.sum()).sum() / 2


@pytest.mark.parametrize("name", NAMES)
def test_tokens_choose_different_experts_in_range(name: str) -> None:
    for num_tokens, num_experts, k in ((0, 5, 2), (1, 1, 1), (17, 7, 7), (23, 6, 1), (101, 64, 8)):
        made = choices(name, num_tokens=num_tokens, num_experts=num_experts, k=k, step=3, rank=2)
        assert (made.shape, made.dtype) == ((num_tokens, k), np.int64)
        assert ((made >= 0) & (made < num_experts)).all()
        assert (np.diff(np.sort(made, axis=1), axis=1) > 0).all()


def test_each_has_the_skew_that_its_name_says() -> None:
    for num_experts, k in ((32, 4), (7, 3), (5, 5), (64, 8)):
        balanced = counts("balanced", num_experts, k, ep_size=1)
        assert balanced.max() - balanced.min() <= 1
    hot_expert = counts("hot_expert")
    hot = hot_expert.argmax()
    # Of the tokens that are not given it, k / E choose it by themselves; others are chosen evenly.
    assert hot_expert[hot] / S == pytest.approx(HOT_SHARE + (1 - HOT_SHARE) * K / E, abs=0.03)
    assert skew(np.delete(hot_expert, hot)) < 1.2
    # A hot rank gets all choices of its share of tokens.
    of_ranks = counts("hot_rank").reshape(EP, -1).sum(axis=1)
    assert of_ranks.max() / of_ranks.sum() == pytest.approx(HOT_SHARE + (1 - HOT_SHARE) / EP, abs=0.03)
    for exponent in (1.0, 1.5):
        zipf = np.sort(counts(f"zipf_{exponent}", k=1))[::-1]
        assert zipf[0] / zipf[3] == pytest.approx(4**exponent, rel=0.3)
    assert skew(counts("zipf_1.5")) > skew(counts("zipf_1.0")) > 2


def test_drifting_moves_a_little_in_a_step_and_to_another_expert_in_time() -> None:
    first, next_step, later = (counts("drifting", step=step) for step in (0, 1, 3 * DRIFT_STEPS))
    noise = distance(first, counts("drifting", rank=1))
    assert distance(first, next_step) < noise + 0.03
    assert distance(first, later) > 5 * noise
    assert first.argmax() != later.argmax()


def test_rotating_has_another_hot_expert_in_every_step_and_all_in_turn() -> None:
    assert {counts("rotating", step=step).argmax() for step in range(E)} == set(range(E))


def test_ranks_steps_layers_and_seeds_differ_and_the_same_numbers_give_the_same_in_another_process_too() -> None:
    size = {"num_tokens": 97, "num_experts": E, "k": K, "ep_size": EP}
    made = {name: choices(name, **size) for name in NAMES}
    for name, other in ((name, {each: 1}) for name in NAMES for each in ("rank", "step", "layer", "seed")):
        assert not np.array_equal(made[name], choices(name, **size, **other))
    code = (
        "from ds_fsmoe.routes.made import *; import zlib;"
        "print([zlib.crc32(choices(n, num_tokens=97, num_experts=32, k=4, ep_size=8).tobytes()) for n in NAMES])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert found.strip() == str([zlib.crc32(made[name].tobytes()) for name in NAMES])


@pytest.mark.parametrize(
    ("name", "sizes", "error"),
    [
        ("zipf", {}, "unknown routing 'zipf': did you mean 'zipf_1"),
        ("balanced", {"k": 33}, "k = 33: must be between 1 and the 32 experts"),
        ("hot_rank", {"ep_size": 5}, "ep_size = 5: must divide the 32 experts"),
    ],
)
def test_what_cannot_be_is_an_error_that_names_the_choices(name: str, sizes: dict[str, int], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        choices(name, **{"num_tokens": 5, "num_experts": E, "k": K} | sizes)
