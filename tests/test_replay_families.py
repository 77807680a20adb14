# SPDX-License-Identifier: Apache-2.0
"""Routers of Hugging Face models go by a choice that is given, and weigh it by their own scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from ds_fsmoe.layer.replay import ReplayError
from tests import hf_families
from tests.hf_families import NUM_CHOICES, NUM_EXPERTS, UNTRIED, batch, families, loss_of
from tests.ranks import run_on_ranks
from tests.samples import draw
from tests.test_hugging_face import ds_config, engine_of

TOKENS = 16
# What a router's class calls the number of its choices.
WORDS = ("top_k", "num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "num_experts_per_token", "k")
# Their routers choose otherwise than by topk: phimoe's by noise around the largest, and some layers by a table.
BY_THEMSELVES = ("phimoe", "deepseek_v4")

# Its router weighs shared experts too, among those chosen, so what comes to a layer depends on choices before it.
WEIGHS_SHARED = ("inkling",)


class Seen:
    """What experts are called with, in the last forward, by layer."""

    def __init__(self, engine: Any) -> None:
        self.calls: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for label, layer in engine.fsmoe.inner_layers.items():
            layer.register_forward_pre_hook(lambda _, args, label=label: self.see(label, args))

    def see(self, label: str, args: Any) -> None:
        index_SK, weights_SK = (each.detach().reshape(TOKENS, -1).clone() for each in args[1:])
        self.calls[label] = index_SK, weights_SK.float()


def silence(engine: Any) -> None:
    """Let experts return zeros, so that what comes to a layer does not depend on the choices before it."""
    for layer in engine.fsmoe.inner_layers.values():
        for each in layer.parameters():
            each.data.zero_()


def all_weights(family: str, make: Any) -> dict[str, torch.Tensor]:
    """Label -> [S, E], what each expert would weigh for each token if a token chose all of them."""
    engine = make(family)
    silence(engine)
    for module in engine.module.modules():
        for word in WORDS:
            if type(getattr(module, word, None)) is int and getattr(module, word) == NUM_CHOICES:
                setattr(module, word, NUM_EXPERTS)
    seen = Seen(engine)
    engine.eval()
    with torch.no_grad():
        loss_of(engine, batch(1, 1, TOKENS))
    engine.destroy()
    return {
        label: torch.zeros(TOKENS, NUM_EXPERTS).scatter_(1, index_SK, weights_SK)
        for label, (index_SK, weights_SK) in seen.calls.items()
        if index_SK.shape[1] == NUM_EXPERTS
    }


def plain(family: str) -> Any:
    return engine_of(hf_families.model_of(family), ds_config(0))


def grouped(family: str) -> Any:
    """Two groups of experts, of which a token keeps one: scores of the other are zero for the choice."""
    config = hf_families.config_of(family)
    config.n_group, config.topk_group = 2, 1
    if family == "deepseek_v2":
        config.topk_method = "group_limited_greedy"
    torch.manual_seed(0)
    model = hf_families._class_of(family, config)(config).float()
    with torch.no_grad():
        for each in model.parameters():
            if each.dim() > 1:
                nn.init.normal_(each, std=0.1)
    model.set_experts_implementation("eager")
    return engine_of(model, ds_config(0))


def weighs(family: str, is_grouped: bool) -> list[str]:
    """What is not as it should be of a family."""
    said, make = [], grouped if is_grouped else plain
    # Without groups, since a choice of all experts is not one of some groups.
    whole = {} if is_grouped else all_weights(family, make)
    engine = make(family)
    engine.eval()
    seen, x = Seen(engine), batch(1, 1, TOKENS)
    loss_of(engine, x)
    own = dict(seen.calls)
    (k,) = {index_SK.shape[1] for index_SK, _ in own.values()}
    nothing = torch.full((TOKENS, k), -1)
    engine.fsmoe.replay([own.get(label, (nothing, None))[0] for label in engine.fsmoe.inner_layers])
    loss_of(engine, x)
    if any(not torch.equal(weights, own[label][1]) for label, (_, weights) in seen.calls.items()):
        said.append("other weights by its own choice")

    order = np.random.default_rng(7).random((TOKENS, len(own), NUM_EXPERTS))
    drifted = order.argsort(axis=-1)[..., :k]
    used = np.array([label in seen.calls for label in engine.fsmoe.inner_layers])
    every = np.full((TOKENS, len(used), k), -1)
    every[:, used] = drifted
    engine.fsmoe.replay(every)
    engine.backward(loss_of(engine, x))
    said += [f"{name} has no gradient" for name in _without_gradient(engine)]
    silence(engine)
    engine.fsmoe.replay(every)
    loss_of(engine, x)
    for number, (label, (index_SK, weights_SK)) in enumerate(seen.calls.items()):
        if not np.array_equal(index_SK.numpy(), drifted[:, number]):
            said.append(f"{label}: not the choice that was given")
        if not (weights_SK.abs() > 0).all():
            said.append(f"{label}: {int((weights_SK == 0).sum())} weights are zero")
        if label in whole and not (family in WEIGHS_SHARED and number):
            # Weights may be over the sum of those chosen, or times a constant: their shares are the same.
            wanted = whole[label].gather(1, index_SK)
            shares, has = (each / each.sum(1, keepdim=True) for each in (wanted, weights_SK))
            if not torch.allclose(shares, has, rtol=1e-4, atol=1e-6):
                said.append(f"{label}: weights are off by {(shares - has).abs().max():.1e}")
    engine.destroy()
    return [f"{family}: {each}" for each in said]


def refuses(family: str) -> None:
    """Give a family whose router does not choose by topk another choice than its own."""
    engine = plain(family)
    seen, x = Seen(engine), batch(1, 1, TOKENS)
    engine.eval()
    loss_of(engine, x)
    engine.fsmoe.replay([(index_SK + 1) % NUM_EXPERTS for index_SK, _ in seen.calls.values()])
    with pytest.raises(ReplayError, match=r"does not choose 2 experts per token by torch\.topk"):
        loss_of(engine, x)
    engine.destroy()


def _without_gradient(engine: Any) -> list[str]:
    """Routers: matrices with a row for each expert and a column for each number of a token."""
    return [
        name
        for name, each in engine.module.named_parameters()
        # A model of text does not run its experts for pictures.
        if tuple(each.shape) == (NUM_EXPERTS, 32) and "experts" not in name and "vision" not in name
        if each.grad is None or not each.grad.abs().max() > 0
    ]


TRIED = [each for each in families() if each not in (*UNTRIED, *BY_THEMSELVES)]
TODAYS = draw("families whose routers are given a choice", TRIED, 3)


def differ(rank: int, world_size: int, names: list[str], others: bool) -> list[str]:
    said = [each for family in names for each in weighs(family, False)]
    if others:
        # Weights of experts whose group is out are their scores, and not zero.
        said += [each for family in ("deepseek_v2", "deepseek_v3") for each in weighs(family, True)]
        for family in BY_THEMSELVES:
            refuses(family)
    return said


@pytest.mark.parametrize(
    ("names", "others"),
    [(TODAYS, True), *(pytest.param([each], False, marks=pytest.mark.slow) for each in TRIED if each not in TODAYS)],
    ids=str,
)
def test_a_router_weighs_the_choice_that_is_given_by_its_own_scores_or_refuses_it(
    names: list[str], others: bool, tmp_path: Path
) -> None:
    assert run_on_ranks(differ, 1, tmp_path, names, others)[0] == []
