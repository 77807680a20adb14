# SPDX-License-Identifier: Apache-2.0
"""What a rank needs of memory: parameters add up, ZeRO cuts what it should, and the largest micro-batch is one."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest

from ds_fsmoe import cli
from ds_fsmoe.planning.architecture import Architecture, Attention, Block, Experts
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.memory import GB, choices_of, largest_batch, memory_of
from ds_fsmoe.planning.memory_activations import attention_keeps, block_keeps, head_needs, is_eager, rows_of
from ds_fsmoe.planning.memory_parameters import Parameters
from ds_fsmoe.planning.memory_states import (
    FROZEN,
    MASTERS,
    OPTIMIZER,
    OUR_GRADIENTS,
    PARAMETERS,
    in_partition,
    states_of,
)
from ds_fsmoe.planning.models import load_model
from ds_fsmoe.planning.training import Training

MODELS = ("mixtral-8x7b", "olmoe", "qwen3-30b-a3b", "deepseek-v3", "deepseek-v2-lite", "gpt-oss-20b", "phi-3.5-moe")
ATTENTION = Attention(heads=5, kv_heads=5, head_dim=7, value_dim=7)
DENSE = Block(ATTENTION, dense_H=33, num_norms=70)
EXPERTS = Experts(E=6, K=2, H=11)
SPARSE = Block(ATTENTION, EXPERTS, num_norms=70)
TINY = Architecture("tiny", "this test", M=35, vocab=101, is_tied=False, max_length=64, blocks=(DENSE, SPARSE, SPARSE))
EIGHT = Groups(world=8, gpus_per_node=4, ep=2)


@pytest.mark.parametrize("name", MODELS)
def test_the_tensors_of_all_ranks_are_the_model(name: str) -> None:
    model = load_model(name)
    for ep, esp in product((1, 2), (1, 2)):
        groups = Groups(world=8, gpus_per_node=8, ep=ep, esp=esp)
        parameters = Parameters.of(model, model.blocks, groups)
        shards_share = sum(
            each.experts.E * model.M for each in model.blocks if each.experts is not None and each.experts.has_bias
        )
        # The bias behind the last product is whole in every shard.
        whole = ep * (esp * parameters.num_experts - (esp - 1) * shards_share // ep)
        assert parameters.num_dense + whole == model.num_parameters, (ep, esp)
        assert sum(parameters.experts_of_block) == parameters.num_experts


def test_stages_of_a_pipeline_are_the_model() -> None:
    groups = Groups(world=4, gpus_per_node=4)
    first = Parameters.of(TINY, TINY.blocks[:1], groups, (True, False))
    last = Parameters.of(TINY, TINY.blocks[1:], groups, (False, True))
    assert first.num_dense + first.num_experts + last.num_dense + last.num_experts == TINY.num_parameters


def test_a_part_of_a_group_has_every_tensor_that_touches_it() -> None:
    for sizes, parts in product(([3, 5, 1, 7], [10], [1, 1, 1], [4, 4]), (1, 2, 3, 5)):
        cut = -(-sum(sizes) // parts)
        owners = [
            (tensor, place // cut) for place, tensor in enumerate(n for n, s in enumerate(sizes) for _ in range(s))
        ]
        for part in range(parts):
            touched = {tensor for tensor, owner in owners if owner == part}
            assert in_partition(sizes, parts, part) == sum(sizes[each] for each in touched), (sizes, parts, part)


def test_experts_are_cut_over_their_replicas_and_all_else_over_all_ranks() -> None:
    parameters = Parameters.of(TINY, TINY.blocks, EIGHT)
    dense, experts = parameters.num_dense, parameters.num_experts
    for zero, dtype in product((0, 1, 2, 3), ("fp32", "bf16")):
        a = {"fp32": 4, "bf16": 2}[dtype]
        rest = states_of(parameters, EIGHT, Training(1, 16, zero, dtype)).rest
        updated = dense + experts if zero == 0 else dense / 8 + experts / 4
        stored = dense / 8 + experts / 4 if zero == 3 else dense + experts
        assert rest[PARAMETERS] == pytest.approx(a * stored)
        assert rest[OPTIMIZER] == pytest.approx(2 * 4 * updated)
        has_masters = dtype == "bf16" or zero in (1, 2)
        assert rest.get(MASTERS, 0) == pytest.approx(4 * updated if has_masters else 0)
        assert rest.get(OUR_GRADIENTS, 0) == pytest.approx(a * (dense + experts) if zero < 3 else 0)


def test_experts_that_nobody_shares_are_not_in_our_buffers() -> None:
    alone = replace(EIGHT, ep=8, world=8)
    blocks = (replace(SPARSE, experts=replace(EXPERTS, E=8)),)
    parameters = Parameters.of(replace(TINY, blocks=blocks), blocks, alone)
    rest = states_of(parameters, alone, Training(1, 16, 1, "fp32")).rest
    assert rest[OUR_GRADIENTS] == 4 * parameters.num_dense
    off = states_of(parameters, alone, Training(1, 16, 1, "fp32", early_gradients=False)).rest
    assert OUR_GRADIENTS not in off or off[OUR_GRADIENTS] == 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_block_keeps_its_tensors_one_by_one(dtype: str) -> None:
    training = Training(3, 17, dtype=dtype)
    S, M, a, K, H = 51, 35, training.number_bytes, 2, 11
    norm = S * M * 4 + S * M * a + S * 4  # what went in, in fp32; what is scaled; a root per token
    read_by_projections, result, logarithms = a * S * M, a * S * 35, 4 * S * 5
    queries_keys_values = 3 * a * S * 35
    attention = read_by_projections + queries_keys_values + result + logarithms
    assert attention_keeps(ATTENTION, M, training) == attention
    kept = block_keeps(SPARSE, M, EIGHT, training)
    rows_back, rows_here, first_products = a * S * K * M, a * S * K * M, a * S * K * 2 * H
    router = 4 * S * 6 + S * K * (2 * 8 + 2 * 4) + 8 * S * K
    assert sum(kept.values()) == attention + 2 * norm + a * S * M + rows_back + rows_here + first_products + router
    dense = block_keeps(DENSE, M, EIGHT, training)
    assert sum(dense.values()) == attention + 2 * norm + a * S * M + 4 * a * S * 33


def test_scores_are_kept_by_eager_attention_alone() -> None:
    training = Training(2, 64)
    eager = replace(training, attention="eager")
    scores = 2 * 5 * 64 * 64
    lse = 4 * 2 * 64 * 5
    assert attention_keeps(ATTENTION, 35, eager) - attention_keeps(ATTENTION, 35, training) == 6 * scores - lse
    gpt_oss = load_model("gpt-oss-20b")
    assert all(is_eager(each.attention, gpt_oss.M, training) for each in gpt_oss.blocks)
    for name in MODELS:
        model = load_model(name)
        assert is_eager(model.blocks[-1].attention, model.M, training) == name.startswith("gpt-oss"), name


def test_ranks_that_share_experts_gather_rows_and_cut_hidden_layers() -> None:
    training = Training(2, 64)
    whole = rows_of(EXPERTS, 35, EIGHT, training)
    cut = rows_of(EXPERTS, 35, replace(EIGHT, esp=2), training)
    assert (cut.sent, cut.here, cut.hidden) == (whole.sent, 2 * whole.here, whole.hidden / 2)
    assert rows_of(EXPERTS, 35, EIGHT, replace(training, load=1.5)).here == 1.5 * whole.here


def test_the_loss_is_computed_in_fp32() -> None:
    for dtype in ("fp32", "bf16"):
        forward, backward = head_needs(35, 100_000, Training(1, 64, dtype=dtype))
        logits = 64 * 100_000
        a = {"fp32": 4, "bf16": 2}[dtype]
        # Logits, the same in fp32, and logarithms; then logarithms and two gradients.
        assert sum(forward.values()) == pytest.approx((a + 4 + (4 if a == 2 else 0)) * logits, rel=0.01)
        assert max(sum(each.values()) for each in backward) == pytest.approx(12 * logits, rel=0.01)


def test_the_peak_is_that_of_one_moment() -> None:
    for zero, checkpointing in product((0, 1, 2, 3), (False, True)):
        training = Training(4, 64, zero, checkpointing=checkpointing, device="cpu", reduce_bucket=1000)
        memory = memory_of(TINY, EIGHT, training)
        assert memory.total == max(sum(each.items.values()) for each in memory.moments)
        assert {each.name for each in memory.moments} > {"end of the forward", "optimizer step", "backward of block 0"}
        assert min(min(each.items.values()) for each in memory.moments) >= 0


def test_checkpointing_chunks_and_recompute_take_less() -> None:
    training = Training(64, 64, 1, device="cpu", reduce_bucket=1000)
    total = memory_of(TINY, EIGHT, training).total
    for less in (replace(training, checkpointing=True), replace(training, recompute=True)):
        assert memory_of(TINY, EIGHT, less).total < total, less
    checkpointed = replace(training, checkpointing=True)
    assert memory_of(TINY, EIGHT, replace(checkpointed, degree=4)).total <= memory_of(TINY, EIGHT, checkpointed).total


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    training = Training(1, 64, 1, device="cpu", reduce_bucket=1000)
    for memory_gb in (0.0005, 0.003, 0.007, 0.02):
        most = largest_batch(TINY, EIGHT, training, memory_gb)
        fitting = [
            samples
            for samples in range(1, 200)
            if memory_of(TINY, EIGHT, replace(training, samples=samples)).total <= memory_gb * GB
        ]
        assert most == max(fitting, default=0), memory_gb
    assert most > 3


def test_the_first_stage_of_a_pipeline_keeps_more_batches() -> None:
    deep = replace(TINY, vocab=2, blocks=(SPARSE,) * 8)
    training = Training(16, 64, 0, device="cpu")
    one, four = (memory_of(deep, Groups(world=4, gpus_per_node=4, pp=pp), training) for pp in (1, 4))
    # A quarter of the blocks, four times.
    assert four.total == pytest.approx(one.total, rel=0.35)
    last = memory_of(deep, Groups(world=4, gpus_per_node=4, pp=4), replace(training, samples=4))
    assert last.total < 0.5 * one.total


@pytest.mark.parametrize(
    ("groups", "training", "said"),
    [
        ({"ep": 4, "world": 8}, {}, "must divide the 6 experts"),
        ({"esp": 2}, {"zero": 3}, "is refused"),
        ({"pp": 8, "ep": 1}, {}, "has 3 blocks"),
        ({"pp": 2, "ep": 1}, {"zero": 2}, "ZeRO 0 and 1 only"),
        ({"mp": 2}, {}, "not cut over model-parallel"),
    ],
)
def test_what_cannot_be_is_refused(groups: dict, training: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        memory_of(TINY, replace(EIGHT, **groups), Training(1, 16, **training))


@pytest.mark.parametrize(
    "wrong",
    [
        {"zero": 4},
        {"dtype": "fp8"},
        {"optimizer": "lion"},
        {"samples": 0},
        {"accumulation": "fp16"},
        {"accumulation": "fp32"},
    ],
)
def test_a_training_that_does_not_exist_is_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Training(**{"samples": 1, "length": 16, "zero": 0} | wrong)


def test_choices_are_on_the_same_ranks_and_include_the_one_asked_for() -> None:
    found = choices_of(TINY, EIGHT, Training(1, 64), 80.0)
    assert {each.zero for each in found} == {0, 1, 2, 3}
    assert all(6 % each.ep == 0 and 8 % (each.ep * each.esp) == 0 for each in found)
    assert (0, 2, 1) in {(each.zero, each.ep, each.esp) for each in found}
    assert not any(each.esp > 1 for each in found if each.zero == 3)
    assert min(each.largest_batch or 0 for each in found) >= 1


def test_a_plan_says_what_a_rank_needs_and_which_batch_fits(capsys, tmp_path) -> None:
    file = tmp_path / "plan.json"
    asked = ["plan", "--cluster", "h100_400", "--nodes", "8", "--model", "olmoe", "--max-degree", "1"]
    more = ["--zero", "1", "--activation-checkpointing", "--memory-gb", "40", "--json", str(file)]
    assert cli.main([*asked, *more]) == 0
    text = capsys.readouterr().out
    assert "memory of a rank: ZeRO 1, bf16, adam, checkpointed" in text
    assert "gradient buffers of ds_fsmoe" in text
    memory = json.loads(file.read_text())["memory"]
    assert sum(memory["items_bytes"].values()) == pytest.approx(memory["peak_bytes"], abs=10)
    assert f"largest micro-batch in 40 GB: {memory['largest_samples']}" in text
    asked_for = [each for each in memory["choices"] if (each["zero"], each["ep"], each["esp"]) == (1, 8, 1)]
    assert [each["peak_bytes"] for each in asked_for] == [memory["peak_bytes"]]


def test_memory_of_layers_in_numbers_is_not_told(capsys) -> None:
    asked = ["plan", "--cluster", "testbed_b", "--width", "64", "--hidden", "192", "--length", "60", "--layers", "3"]
    assert cli.main([*asked, "--heads", "8", "--max-degree", "1"]) == 0
    assert "memory of a rank" not in capsys.readouterr().out
    assert cli.main([*asked, "--heads", "8", "--memory-gb", "80"]) != 0
    assert "goes with a real model" in capsys.readouterr().err


def test_adapters_alone_have_gradients_masters_and_states() -> None:
    model, groups = load_model("qwen3-30b-a3b"), Groups(world=8, gpus_per_node=8, ep=8)
    blocks, rank = model.blocks, 16
    whole = Parameters.of(model, blocks, groups)
    found = whole.adapters(blocks, model.M, groups, rank, "all")
    # Queries of 4096, keys and values of 512; 16 experts here, whose first products are one matrix.
    attention = rank * (2048 + 4096 + 2 * (2048 + 512) + 4096 + 2048)
    experts = 16 * rank * (2048 + 2 * 768 + 768 + 2048)
    assert (found.num_dense, found.num_experts) == (48 * attention, 48 * experts)
    assert whole.adapters(blocks, model.M, groups, rank, "attention").num_experts == 0
    rest = states_of(found, groups, Training(1, 16, 1)).rest
    assert rest[PARAMETERS] == 2 * (found.num_dense + found.num_experts)
    assert rest[FROZEN] == 2 * (whole.num_dense + whole.num_experts)
    assert rest[OPTIMIZER] == pytest.approx(8 * (found.num_dense / 8 + found.num_experts))
    cut = states_of(found, groups, Training(1, 16, 3)).rest
    assert cut[FROZEN] == pytest.approx(2 * (whole.num_dense / 8 + whole.num_experts))


def test_states_of_eight_bits_and_states_on_the_host() -> None:
    parameters = Parameters.of(TINY, TINY.blocks, EIGHT)
    held = parameters.num_dense / 8 + parameters.num_experts / 4
    eight = states_of(parameters, EIGHT, Training(1, 16, 1, optimizer="adam8bit")).rest
    assert eight[OPTIMIZER] == pytest.approx(2 * (1 + 4 / 256) * held)
    for zero in (1, 2):
        states = states_of(parameters, EIGHT, Training(1, 16, zero, offload=True))
        assert not {MASTERS, OPTIMIZER} & states.rest.keys()
        largest = max(*parameters.dense, *parameters.experts)
        # Masters, their gradients, two moments, and what is copied back; room for one gradient.
        assert sum(states.host.values()) == pytest.approx((4 + 4 + 8 + 2) * held + 2 * largest)


@pytest.mark.parametrize("training", [{"zero": 0}, {"zero": 3}, {"zero": 1, "optimizer": "adam8bit"}])
def test_an_optimizer_that_cannot_be_on_the_host_is_refused(training: dict) -> None:
    with pytest.raises(ValueError, match="on the host"):
        Training(1, 16, offload=True, **training)


def test_a_plan_says_on_how_many_cards_it_fits(capsys, tmp_path) -> None:
    asked = ["plan", "--cluster", "h100_400", "--nodes", "1", "--model", "qwen3-30b-a3b", "--max-degree", "1"]
    file = tmp_path / "plan.json"
    for given, fitting in (([], ()), (["--lora", "16"], (2, 4, 8)), (["--offload-optimizer", "cpu"], ())):
        zero = ["--zero", "2"] if "--offload-optimizer" in given else []
        assert cli.main([*asked, *given, *zero, "--json", str(file)]) == 0
        text = capsys.readouterr().out
        assert "does it fit on one node of so many GPUs" in text
        cards = json.loads(file.read_text())["memory"]["cards"]
        assert [each["gpus"] for each in cards] == [1, 2, 4, 8]
        if not zero:
            assert tuple(each["gpus"] for each in cards if each["largest_samples"]) == fitting
        assert all((each["host_bytes"] > 0) == bool(zero) for each in cards)
        model = load_model("qwen3-30b-a3b")
        for each in cards:
            training = Training(1, 4096, each["zero"], lora=16 if "--lora" in given else 0, offload=bool(zero))
            memory = memory_of(model, Groups(each["gpus"], each["gpus"], ep=each["ep"]), training)
            assert each["peak_bytes"] == round(memory.total)
