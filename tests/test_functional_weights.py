# SPDX-License-Identifier: Apache-2.0
"""Weights that a script gives to one call are the ones that it runs and differentiates, as in Hugging Face's model."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402

from tests.hf_families import batch, model_of, why_not  # noqa: E402
from tests.ranks import run_on_ranks  # noqa: E402
from tests.test_one_rank import engine_of, without_short_way  # noqa: E402


def gradients(model: nn.Module, make: Any, x: Any, frozen: str, only: str = "") -> dict[str, torch.Tensor | None]:
    """The gradients of half as large weights that only a call was given, and under "x" what the call returned."""
    torch.manual_seed(0)
    given = {name: make(each.detach() * 0.5) for name, each in model.named_parameters() if only in name}
    for name, each in given.items():
        if frozen and frozen in name:
            each.requires_grad_(False)
    result = torch.func.functional_call(model, given, kwargs=x)[0]
    result.square().mean().backward()
    return {"x": result.detach()} | {name: each.grad for name, each in given.items()}


def against_hugging_face(rank: int, world_size: int) -> None:
    # Families without and with biases, and with a norm of experts' results.
    for family, block in (("qwen3_moe", {}), ("gpt_oss", {"num_chunks": 2}), ("muse_spark", {"num_chunks": 2})):
        if why_not(family):
            continue
        model = model_of(family)
        theirs = copy.deepcopy(model)
        x = batch(3, 1)
        x = {name: each for name, each in x.items() if name != "labels"} if isinstance(x, dict) else {"input_ids": x}
        ours = engine_of(model, **block).module
        for make in (nn.Parameter, lambda tensor: tensor.clone().requires_grad_()):
            for frozen, only in (("", ""), (".experts.", ""), ("", ".experts."), ("", "norm")):
                expected = gradients(theirs, make, x, frozen, only)
                found = [gradients(ours, make, x, frozen, only)]
                with without_short_way():
                    found.append(gradients(ours, make, x, frozen, only))
                for name, each in expected.items():
                    for of_ours in (every[name] for every in found):
                        assert (each is None) == (of_ours is None), (family, frozen, only, name)
                        assert each is None or (of_ours - each).abs().max() <= 1e-5 * each.abs().max() + 1e-7, name
        for each in (*ours.parameters(), *theirs.parameters()):
            each.grad = None
    assert left_behind() == 0


def left_behind() -> int:
    """How many of the experts' weights that two different calls were given, all or some, live on after them."""
    ours = engine_of(model_of("qwen3_moe")).module
    ids = torch.randint(3, 100, (1, 8))
    ours(input_ids=ids)
    seen = []
    for only, factor in itertools.product(("", "down_proj"), (0.5, 2.0)):
        given = {name: each.detach() * factor for name, each in ours.named_parameters() if only in name}
        torch.func.functional_call(ours, given, kwargs={"input_ids": ids})
        seen += [weakref.ref(each) for name, each in given.items() if ".experts." in name]
        del given
    gc.collect()
    return sum(each() is not None for each in seen)


def test_weights_given_to_a_call_are_run_get_its_gradients_and_go_with_it(tmp_path: Path) -> None:
    run_on_ranks(against_hugging_face, 1, tmp_path)
