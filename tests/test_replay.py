# SPDX-License-Identifier: Apache-2.0
"""Training goes by routing that was recorded or is given, on every layer and rank; routers learn from it, and those of
Hugging Face's families weigh it by their own scores."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad

from ds_fsmoe.config.reading import ConfigError
from ds_fsmoe.layer.replay import ReplayError
from ds_fsmoe.routes.recorded import read_routing
from tests import hf_families
from tests.hf_families import NUM_CHOICES, NUM_EXPERTS, batch, families, loss_of, model_of
from tests.ranks import run_on_ranks
from tests.samples import draw, sampled
from tests.sgd_engines import ds_config, engine_of
from tests.small_model import Case, SmallModel
from tests.small_model import batch as small_batch

STEPS, LENGTH, K, LAYERS, EXPERTS = 2, 16, 2, 2, 4
KINDS = ("none", "reentrant", "saved", "deepspeed")
"""Of activation checkpointing: none, torch's two, DeepSpeed's."""
Job = tuple[str, int, str]
"""Model, stage and kind of checkpointing."""


def engine(model: str, stage: int, kind: str, rank: int, accumulation: int = 1, **routing: Any) -> Any:
    """An engine of ours, its model with the same weights each time."""
    if model == "stock":
        case = Case(ep_size=2, stage=stage, k=K, accumulation=accumulation)
        torch.manual_seed(0)
        config = case.ds_config(gradient_clipping=0.0, fsmoe={"enabled": True, "num_chunks": 2, "routing": routing})
        made = engine_of(SmallModel(case, rank), config)
        if kind != "none":
            for each in made.module.moes:
                each.forward = functools.partial(_checkpointed(kind), each.forward)
        return made
    config = ds_config(stage, ep_size=2, num_chunks=2, routing=routing)
    config["gradient_accumulation_steps"] = accumulation
    whole = model_of(model)
    if kind in ("reentrant", "saved"):
        whole.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
    made = engine_of(whole.train(), config)
    if kind == "deepspeed":
        made.module._set_gradient_checkpointing(True, deepspeed.checkpointing.checkpoint)
    return made


def _checkpointed(kind: str) -> Any:
    if kind == "deepspeed":
        return deepspeed.checkpointing.checkpoint
    return functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=kind == "reentrant")


def forward(made: Any, number: int, rank: int) -> torch.Tensor:
    if isinstance(made.module, SmallModel):
        return made(*small_batch(number, rank, torch.float32))[0]
    # Other lengths on each rank.
    return loss_of(made, batch(100 * number + rank, 1 + rank, LENGTH - 3 * rank))


def num_tokens(model: str, rank: int) -> int:
    return 21 if model == "stock" else (1 + rank) * (LENGTH - 3 * rank)


def train(made: Any, rank: int, steps: int = STEPS) -> list[float]:
    losses = []
    for number in range(steps * made.gradient_accumulation_steps()):
        loss = forward(made, number, rank)
        made.backward(loss)
        made.step()
        losses.append(loss.item())
    return losses


def some_choice(seed: int, tokens: int, layers: int = LAYERS) -> np.ndarray:
    return np.random.default_rng(seed).random((tokens, layers, EXPERTS)).argsort(axis=-1)[..., :K]


ROUTERS = ("mlp.gate.weight", "gate.wg.weight")


def replays(rank: int, world_size: int, folder: str, job: Job) -> None:
    made = engine(*job, rank, accumulation=2, record=f"{folder}/first", weights=True)
    recorded = train(made, rank)
    made.destroy()
    made = engine(*job, rank, accumulation=2, replay=f"{folder}/first", record=f"{folder}/again")
    found = train(made, rank)
    made.destroy()
    assert found == recorded, (found, recorded)
    first, again = read_routing(f"{folder}/first"), read_routing(f"{folder}/again")
    assert (first.steps, first.micro_batches(1, rank), len(first.problems)) == ((0, 1), 2, 0), first.problems
    mine = [key for key in first if key[0] == rank]
    assert len(mine) == STEPS * 2 * LAYERS
    assert mine == [key for key in again if key[0] == rank]
    for key in mine:
        assert np.array_equal(first.choices(*key).indices_SK, again.choices(*key).indices_SK), key
        assert first.choices(*key).weights_SK.shape == first.choices(*key).indices_SK.shape

    drifted = some_choice(rank, num_tokens(job[0], rank))
    made = engine(*job, rank, record=f"{folder}/drifted")
    made.fsmoe.replay(drifted)
    made.backward(forward(made, 0, rank))
    routers = [each for name, each in made.module.named_parameters() if name.endswith(ROUTERS)]
    assert len(routers) == LAYERS
    assert all(safe_get_full_grad(each).abs().max() > 1e-6 for each in routers), "routers learn from drifted choices"
    made.step()
    made.destroy()
    assert np.array_equal(read_routing(f"{folder}/drifted").stacked(rank, 0), drifted)


STAGES = [("stock", 0), ("stock", 2), ("qwen3_moe", 2), ("qwen3_moe", 3)]
JOBS: list[Job] = [(*each, kind) for each in STAGES for kind in KINDS]


@sampled("job", JOBS, ids=str)
def test_a_replayed_run_has_the_choices_and_losses_of_the_recorded_one_and_routers_learn(
    job: Job, tmp_path: Path
) -> None:
    run_on_ranks(replays, 2, tmp_path / "ranks", str(tmp_path), job)


def runs_again(rank: int, world_size: int, job: Job) -> None:
    """Routers are changed between a forward and its backward, so that they would choose others when they run again."""
    made = engine(*job, rank)
    seen: dict[bool, list[torch.Tensor]] = {False: [], True: []}

    def see(call: Any) -> None:
        gate = call.gate

        def told(*args: Any) -> Any:
            routing = gate(*args)
            seen[torch._C._current_graph_task_id() != -1].append(routing.chosen().clone())
            return routing

        call.gate = told

    made.fsmoe.running.instruments.append(see)
    # Two forwards before a backward: the last comes first when they run again.
    losses = [forward(made, number, rank) for number in range(2)]
    with torch.no_grad():
        for name, each in made.module.named_parameters():
            if name.endswith(ROUTERS):
                each.data = -each.data
    made.backward(sum(losses))
    made.destroy()
    first, again = seen[False], seen[True]
    assert len(first) == len(again) == 2 * LAYERS
    in_order = again[LAYERS:][::-1] + again[:LAYERS][::-1]
    assert all(map(torch.equal, first, in_order))


# At ZeRO 1 to 3 DeepSpeed takes no two forwards into one backward under reentrant checkpointing.
AGAIN: list[Job] = [(model, 0, kind) for model in ("stock", "qwen3_moe") for kind in KINDS[1:]]


@sampled("job", AGAIN, drawn=2, ids=str)
def test_a_forward_that_runs_again_routes_as_it_did_even_if_routers_have_changed_since(
    job: Job, tmp_path: Path
) -> None:
    run_on_ranks(runs_again, 2, tmp_path, job)


def sides(rank: int) -> None:
    """Uses besides the common one."""
    made = engine("qwen3_moe", 2, "none", rank)
    choices = some_choice(3, num_tokens("qwen3_moe", rank))

    def loss_by(given: Any) -> float:
        made.fsmoe.replay(given)
        return forward(made, 0, rank).item()

    by_array, live = loss_by(choices), forward(made, 0, rank).item()
    assert by_array == loss_by(torch.from_numpy(choices).to(torch.int32))
    assert by_array == loss_by([choices[:, 0], choices[:, 1].astype(np.uint8)])
    assert by_array != live == loss_by(np.full_like(choices, -1)) == loss_by(None)
    # Only one rank replays; the other takes part.
    assert (loss_by(choices if rank == 0 else None) == live) is (rank == 1)
    made.module.eval()
    with torch.no_grad():
        assert loss_by(choices) != forward(made, 0, rank).item(), "evaluation is not replayed"
    made.destroy()


def all_layers(rank: int) -> None:
    """A model whose first layer has no experts, with choices of all its layers, as sampling engines return them."""
    config = hf_families.config_of("qwen3_moe")
    config.mlp_only_layers, config.num_hidden_layers = [0], 3
    made = engine_of(model_of("qwen3_moe", config=config), ds_config(0, ep_size=2))
    choices = some_choice(3, num_tokens("qwen3_moe", rank), 3)
    choices[:, 0] = 0
    found = []
    for each in (choices, choices[:, 1:]):
        made.fsmoe.replay(each)
        found.append(forward(made, 0, rank).item())
    assert found[0] == found[1] != forward(made, 0, rank).item()
    made.destroy()


def wrong(rank: int, folder: str) -> None:
    """What is wrong on rank 1 alone ends on both."""
    for model in ("stock", "qwen3_moe"):
        made = engine(model, 0, "none", rank, record=f"{folder}/{model}")
        train(made, rank, steps=1)
        tokens = num_tokens(model, rank)
        good = some_choice(0, tokens)
        high, low, twice, part = (good.copy() for _ in range(4))
        high[tokens - 1, 1, 0], low[3, 0, 1], twice[5, 1] = EXPERTS, -2, 1
        part[2, 0, 0] = -1
        cases: list[tuple[Any, str]] = [
            (good[:, :1], rf"an array \[{num_tokens(model, 1)}, 1, 2\]: must be \[tokens, layers, k\], with 2 MoE"),
            (good[..., :1], r"the replayed routing has 1 choices per token: must be k = 2"),
            (good.astype(np.float32), "dtype float32: must be integers"),
            (good[0], r"an array \[2, 2\]: must be \[tokens, layers, k\]"),
            (high, rf"the replayed routing has expert {EXPERTS}: must be 0 to {EXPERTS - 1}"),
            (low, "the replayed routing has expert -2: must be 0 to"),
            (part, r"the replayed routing of token 2 is \[-1, \d\]: -1 must be in all its choices, or in none"),
        ]
        if model == "stock":
            cases.append((twice, r"the replayed routing of token 5 is \[1, 1\]: must be different experts"))
        for case, error in cases:
            with pytest.raises(ReplayError, match=f"rank 1: .*{error}"):
                made.fsmoe.replay(case if rank == 1 else good)
        made.fsmoe.replay(good[: tokens - 2] if rank == 1 else good)
        with pytest.raises(ReplayError, match=rf"rank 1 .*choices of \d+ tokens .* which has {num_tokens(model, 1)}"):
            forward(made, 0, rank)
        made.destroy()

        made = engine(model, 0, "none", rank, replay=f"{folder}/{model}")
        train(made, rank, steps=1)
        with pytest.raises(ReplayError, match=r"fsmoe.routing.replay = .* step 1, micro-batch 0.*steps 0 to 0"):
            forward(made, 1, rank)
        made.destroy()
    with pytest.raises(ConfigError, match=r"fsmoe\.routing\.replay = .*with another model"):
        engine("qwen3_moe", 0, "none", rank, replay=f"{folder}/stock")


def full_disk(rank: int) -> None:
    losses = []
    for routing in ({}, {"record": "/dev/null/nowhere"}):
        made = engine("stock", 0, "none", rank, **routing)
        losses.append(train(made, rank))
        made.destroy()
    assert losses[0] == losses[1]


def without_a_batch(rank: int, folder: str) -> None:
    """Rank 1 has no second batch, in a recorded run and in the replayed one."""
    losses = []
    for routing in ({"record": folder}, {"replay": folder}):
        made = engine("qwen3_moe", 0, "none", rank, **routing)
        for number in range(2):
            is_dummy = rank == 1 and number == 1
            losses.append(made.fsmoe_dummy_forward() if is_dummy else forward(made, number, rank))
            made.backward(losses[-1])
            made.step()
        made.destroy()
    assert [each.item() for each in losses[:2]] == [each.item() for each in losses[2:]]


def other_uses(rank: int, world_size: int, folder: str) -> None:
    wrong(rank, f"{folder}/wrong")
    sides(rank)
    all_layers(rank)
    without_a_batch(rank, f"{folder}/other")
    full_disk(rank)


def test_choices_come_in_any_form_and_those_that_do_not_fit_are_one_error_on_all_ranks(tmp_path: Path) -> None:
    run_on_ranks(other_uses, 2, tmp_path / "ranks", str(tmp_path))


# ---- routers of families


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
    return engine_of(model_of(family, config=config), ds_config(0))


def weighs(family: str, is_grouped: bool) -> None:
    make = grouped if is_grouped else plain
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
    assert all(torch.equal(weights, own[label][1]) for label, (_, weights) in seen.calls.items()), family

    order = np.random.default_rng(7).random((TOKENS, len(own), NUM_EXPERTS))
    drifted = order.argsort(axis=-1)[..., :k]
    used = np.array([label in seen.calls for label in engine.fsmoe.inner_layers])
    every = np.full((TOKENS, len(used), k), -1)
    every[:, used] = drifted
    engine.fsmoe.replay(every)
    engine.backward(loss_of(engine, x))
    for name, each in engine.module.named_parameters():
        # Routers have a row for each expert and a column for each number of a token. A model of text does not run its
        # experts for pictures.
        if tuple(each.shape) == (NUM_EXPERTS, 32) and "experts" not in name and "vision" not in name:
            assert each.grad is not None, (family, name)
            assert each.grad.abs().max() > 0, (family, name)
    silence(engine)
    engine.fsmoe.replay(every)
    loss_of(engine, x)
    for number, (label, (index_SK, weights_SK)) in enumerate(seen.calls.items()):
        assert np.array_equal(index_SK.numpy(), drifted[:, number]), (family, label)
        assert (weights_SK.abs() > 0).all(), (family, label)
        if label in whole and not (family in WEIGHS_SHARED and number):
            # Weights may be over the sum of those chosen, or times a constant: their shares are the same.
            wanted = whole[label].gather(1, index_SK)
            shares, has = (each / each.sum(1, keepdim=True) for each in (wanted, weights_SK))
            assert torch.allclose(shares, has, rtol=1e-4, atol=1e-6), (family, label, shares, has)
    engine.destroy()


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


TRIED = [each for each in families() if each not in BY_THEMSELVES]
TODAYS = draw("families whose routers are given a choice", TRIED, 3)


def weigh(rank: int, world_size: int, names: list[str], others: bool) -> None:
    for family in names:
        weighs(family, False)
    if others:
        # Weights of experts whose group is out are their scores, and not zero.
        for family in ("deepseek_v2", "deepseek_v3"):
            weighs(family, True)
        for family in BY_THEMSELVES:
            refuses(family)


@pytest.mark.parametrize(
    ("names", "others"),
    [(TODAYS, True), *(pytest.param([each], False, marks=pytest.mark.slow) for each in TRIED if each not in TODAYS)],
    ids=str,
)
def test_a_router_weighs_the_choice_that_is_given_by_its_own_scores_or_refuses_it(
    names: list[str], others: bool, tmp_path: Path
) -> None:
    run_on_ranks(weigh, 1, tmp_path, names, others)
