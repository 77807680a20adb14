# SPDX-License-Identifier: Apache-2.0
"""A layer that exchanges nothing goes a short way: the bits of the general way, fewer operators, calls and bytes.

Everything here is counted on a CPU. Calls and operators are those of one step of a block, forward and backward, the
third of its kind, with gradients of the parameters already there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402

from tests.call_counts import ON_A_GPU, Launches, num_calls  # noqa: E402
from tests.hf_families import batch, families, loss_of, model_of, why_not  # noqa: E402
from tests.live_memory import LiveMemory  # noqa: E402
from tests.ranks import run_on_ranks  # noqa: E402
from tests.samples import draw, sampled  # noqa: E402
from tests.sgd_engines import ds_config  # noqa: E402

BLOCK = {"enabled": True, "autotune": False, "overlap": False}


def config_of(ops: str, **block: Any) -> dict[str, Any]:
    return ds_config(0, lr=0.1, **BLOCK | {"ops": ops} | block) | {"steps_per_print": 10**9}


def qwen3(dtype: torch.dtype = torch.bfloat16, width: int = 64, hidden: int = 32, experts: int = 16, k: int = 4) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=width,
        moe_intermediate_size=hidden,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=experts,
        num_experts_per_tok=k,
        norm_topk_prob=True,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def engine_of(model: nn.Module, ops: str = "required", **block: Any) -> Any:
    import ds_fsmoe

    return ds_fsmoe.initialize(model=model, config=config_of(ops, **block))[0]


@contextmanager
def without_short_way() -> Iterator[None]:
    from ds_fsmoe.layer.experts_state import FastPath

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FastPath, "takes", lambda *_: False)
        yield


@contextmanager
def counting_ways(taken: list[str]) -> Iterator[None]:
    from ds_fsmoe.layer.experts_state import FastPath

    run = FastPath.run

    def counted(self: Any, *args: Any) -> Any:
        taken.append(self.pipeline.label)
        return run(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FastPath, "run", counted)
        yield


class OurLaunches(Launches):
    """Counts an operator of ours as the kernels, memsets and copies of its CUDA form."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "fsmoe":
            self.number += ON_A_GPU[func._schema.name.removeprefix("fsmoe::")] - 1
        return result


def numbers_of(block: nn.Module) -> dict[str, int]:
    """Return what the third step of a block takes."""
    x = torch.randn(1, 24, 64, dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn_like(x)

    def step() -> None:
        block(x).backward(dy)

    step()
    step()
    found = {"calls": num_calls(step, ("call",))}
    for name, mode in (("operators", Launches()), ("launches", OurLaunches())):
        with mode:
            step()
        found[name] = mode.number
    return found


def counted(rank: int, world_size: int) -> list[dict[str, int]]:
    theirs = qwen3()
    theirs.set_experts_implementation("grouped_mm")
    models = [engine_of(qwen3(), "plain").module, engine_of(qwen3()).module, theirs]
    return [numbers_of(each.model.layers[0].mlp) for each in models]


def test_a_step_of_a_block_asks_little_of_the_host_and_plain_operators_need_no_loop_over_choices(
    tmp_path: Path,
) -> None:
    plain, ours, theirs = run_on_ranks(counted, 1, tmp_path)[0]
    assert plain["operators"] <= 70
    assert ours["operators"] <= 42
    assert ours["calls"] <= 150
    assert ours["launches"] <= 65
    assert ours["operators"] < theirs["operators"]


def checkpointed() -> list[str]:
    """What differs under activation checkpointing, in the first step and in the second."""
    engines = [engine_of(qwen3(torch.float32)) for _ in range(2)]
    engines[0].module.gradient_checkpointing_enable({"use_reentrant": False})
    ids, said = torch.arange(12)[None], []
    for step in range(2):
        for engine in engines:
            engine.backward(engine(input_ids=ids, labels=ids).loss)
        pairs = zip(*(engine.module.named_parameters() for engine in engines), strict=True)
        said += [f"{step}: {name} differs" for (name, a), (_, b) in pairs if not torch.equal(a.grad, b.grad)]
        for engine in engines:
            engine.step()
    return said


def both_ways(dtype: torch.dtype, ops: str) -> list[str]:
    """What differs, bit by bit, between the short way and the general one."""
    said = []
    engine = engine_of(qwen3(dtype), ops)
    block = engine.module.model.layers[0].mlp
    experts = block.experts
    torch.manual_seed(1)
    x = torch.randn(1, 37, 64, dtype=dtype)
    dy = torch.randn_like(x)
    index = torch.randint(0, 17, (37, 4))  # of 16 experts, so that some choices are of none
    weights = torch.rand(37, 4, dtype=dtype)
    named = dict(experts.named_parameters())

    def run(needs: str) -> dict[str, Any]:
        for name, each in named.items():
            each.grad, each.requires_grad = None, name not in needs
        leaf, leaf_weights = (each.clone().requires_grad_("input" not in needs) for each in (x, weights))
        y = experts(leaf, index, leaf_weights)
        if y.requires_grad:
            y.backward(dy)
        found = {"y": y.detach(), "x": leaf.grad, "weights": leaf_weights.grad}
        return found | {name: None if each.grad is None else each.grad.clone() for name, each in named.items()}

    run("")
    for needs in ("", "gate_up_proj", "down_proj", "gate_up_proj down_proj", "input", "gate_up_proj down_proj input"):
        taken: list[str] = []
        with counting_ways(taken):
            short = run(needs)
        with without_short_way():
            general = run(needs)
        if len(taken) != 1:
            said.append(f"{needs}: {len(taken)} short ways")
        for name, one in short.items():
            other = general[name]
            if (one is None) != (other is None) or (one is not None and not torch.equal(one, other)):
                said.append(f"without gradients of {needs or 'none'}: {name} differs")
        with torch.no_grad():
            if not torch.equal(experts(x, index, weights), short["y"]):
                said.append("without gradients the result differs")
    return said


def on_one_rank(rank: int, world_size: int) -> list[list[str]]:
    """What is wrong with numbers, and what is said of a choice out of range."""
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    cases = [*((each, "required") for each in dtypes), *((torch.bfloat16, each) for each in ("plain", "reference"))]
    wrong = [f"{case}: {each}" for case in cases for each in both_ways(*case)]
    experts = engine_of(qwen3()).module.model.layers[0].mlp.experts
    x, weights = torch.randn(1, 5, 64, dtype=torch.bfloat16), torch.rand(5, 4, dtype=torch.bfloat16)
    index = torch.randint(0, 16, (5, 4))
    experts(x, index, weights)
    index[2, 1] = 18
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        experts(x, index, weights)
    return [wrong + checkpointed(), [f"{caught.type.__name__}: {caught.value}"]]


def test_the_short_way_has_the_bits_of_the_general_one_also_where_a_call_is_computed_again(tmp_path: Path) -> None:
    wrong, (refused,) = run_on_ranks(on_one_rank, 1, tmp_path)[0]
    assert wrong == []
    assert refused.startswith("RoutingError: model.layers.0.mlp.experts: the gate's result on rank 0: slots_KS must be")


GENERAL = {"gpt_oss": "biases", "openai_privacy_filter": "biases", "muse_spark": "a norm of results"}
"""The families of which all layers take the general way, and why."""


def ways(rank: int, world_size: int, names: list[str]) -> dict[str, str]:
    """For each family why its layers take the general way; "" where all take the short one, in training and without."""
    found = {}
    for family in names:
        engine = engine_of(model_of(family))
        x = batch(3, 1)
        loss_of(engine, x)
        layers = [*engine.fsmoe.layers.values()]
        taken: list[str] = []
        with counting_ways(taken):
            engine.backward(loss_of(engine, x))
            with torch.no_grad():
                loss_of(engine, x)
        # Some are for pictures, and run when there are any.
        run = [each.fsmoe for each in layers if each.fsmoe.fast_path is not None]
        assert run
        reasons = {each.fast_path.why_general for each in run}
        short = [each.label for each in run if not each.fast_path.why_general]
        assert sorted(taken) == sorted(2 * short), (family, taken, reasons)
        found[family] = ", ".join(sorted(reasons))
        engine.destroy()
    return found


@pytest.mark.long
@pytest.mark.parametrize("count", [8, pytest.param(1000, marks=pytest.mark.slow)])
def test_each_family_takes_the_way_that_is_expected(count: int, tmp_path: Path) -> None:
    names = draw("ways of families", [each for each in families() if not why_not(each)], count)
    (found,) = run_on_ranks(ways, 1, tmp_path, names)
    assert found == {name: GENERAL.get(name, "") for name in names}


# Rows, widths and experts in the proportions of one layer at 8192 tokens, a 512th of it: (M, H, E, k, S).
PROPORTIONS = {
    "Qwen3-30B-A3B": (256, 96, 16, 8, 128),
    "OLMoE-1B-7B": (256, 128, 8, 8, 128),
    "Mixtral-8x7B": (256, 896, 8, 2, 512),
    "DeepSeek-V2-Lite": (256, 176, 8, 6, 128),
}


def peaks(rank: int, world_size: int, sizes: tuple[int, ...]) -> tuple[int, int]:
    """The most bytes of tensors that live in a step of ours and of Hugging Face's grouped_mm."""
    width, hidden, experts, k, tokens = sizes
    x = torch.randn(1, tokens, width, dtype=torch.bfloat16).requires_grad_()
    dy, found = torch.randn(1, tokens, width, dtype=torch.bfloat16), []
    model = qwen3(torch.bfloat16, width, hidden, experts, k)
    theirs = copy.deepcopy(model)
    theirs.set_experts_implementation("grouped_mm")
    for block in (engine_of(model).module.model.layers[0].mlp, theirs.model.layers[0].mlp):
        for _ in range(3):
            x.grad = None
            with LiveMemory() as memory:
                block(x).backward(dy)
        found.append(memory.peak)
    return found[0], found[1]


@sampled("sizes", [*PROPORTIONS.values()], kept=[-1], ids=PROPORTIONS)
def test_a_step_of_a_block_needs_no_more_memory_than_hugging_faces(sizes: tuple[int, ...], tmp_path: Path) -> None:
    ours, theirs = run_on_ranks(peaks, 1, tmp_path, sizes)[0]
    assert ours <= theirs
