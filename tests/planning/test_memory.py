# SPDX-License-Identifier: Apache-2.0
"""What a rank needs of memory: parameters add up, ZeRO cuts what it should, and the largest micro-batch is one."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest

from ds_fsmoe import cli
from ds_fsmoe.offline.models import memory_states as kept
from ds_fsmoe.offline.models.architecture import Architecture, Attention, BlockExperts, ModelBlock
from ds_fsmoe.offline.models.known import load_model, model_names
from ds_fsmoe.offline.models.memory import (
    COMMUNICATOR_BYTES,
    COMMUNICATORS,
    CONTEXT_BYTES,
    GB,
    largest_batch,
    memory_of,
)
from ds_fsmoe.offline.models.memory_activations import (
    ROUTER,
    attention_keeps,
    block_keeps,
    head_needs,
    is_eager,
    layer_rows,
)
from ds_fsmoe.offline.models.memory_states import Parameters, most_in_partition, states_of
from ds_fsmoe.offline.models.training import Training
from ds_fsmoe.planning.groups import Groups

MODELS = model_names()
ATTENTION = Attention(heads=5, kv_heads=5, head_dim=7, value_dim=7)
DENSE = ModelBlock(ATTENTION, dense_H=33, num_norms=70)
EXPERTS = BlockExperts(E=6, K=2, H=11)
SPARSE = ModelBlock(ATTENTION, EXPERTS, num_norms=70)
TINY = Architecture("tiny", "this test", M=35, vocab=101, is_tied=False, max_length=64, blocks=(DENSE, SPARSE, SPARSE))
STATES = (kept.PARAMETERS, kept.MASTERS, kept.OPTIMIZER, kept.GRADIENTS)
EIGHT = Groups(world=8, gpus_per_node=4, ep=2)
OF_TINY = Parameters.of(TINY, TINY.blocks, EIGHT)


@pytest.mark.parametrize("name", MODELS)
def test_the_tensors_of_all_ranks_and_of_all_stages_are_the_model(name: str) -> None:
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
    alone = Groups(world=4, gpus_per_node=4)
    stages = (model.blocks[:1], (True, False)), (model.blocks[1:], (False, True))
    parts = [Parameters.of(replace(model, is_tied=False), blocks, alone, ends) for blocks, ends in stages]
    assert sum(each.num_dense + each.num_experts for each in parts) == replace(model, is_tied=False).num_parameters


def test_the_fullest_part_of_a_group_has_every_tensor_that_touches_it() -> None:
    for sizes, parts in product(([3, 5, 1, 7], [10], [1, 1, 1], [4, 4]), (1, 2, 3, 5)):
        cut = -(-sum(sizes) // parts)
        owners = [
            (tensor, place // cut) for place, tensor in enumerate(n for n, s in enumerate(sizes) for _ in range(s))
        ]
        touched = [{tensor for tensor, owner in owners if owner == part} for part in range(parts)]
        fullest = max(sum(sizes[each] for each in tensors) for tensors in touched)
        assert most_in_partition(sizes, parts) == fullest, (sizes, parts)
    assert most_in_partition([], 3) == 0


def test_experts_are_cut_over_their_replicas_and_all_else_over_all_ranks() -> None:
    dense, experts = OF_TINY.num_dense, OF_TINY.num_experts
    for zero, dtype in product((0, 1, 2, 3), ("fp32", "bf16")):
        a = {"fp32": 4, "bf16": 2}[dtype]
        rest = states_of(OF_TINY, EIGHT, Training(1, 16, zero, dtype)).rest
        updated = dense + experts if zero == 0 else dense / 8 + experts / 4
        stored = dense / 8 + experts / 4 if zero == 3 else dense + experts
        assert rest[kept.PARAMETERS] == pytest.approx(a * stored)
        assert rest[kept.OPTIMIZER] == pytest.approx(2 * 4 * updated)
        has_masters = dtype == "bf16" or zero in (1, 2)
        assert rest.get(kept.MASTERS, 0) == pytest.approx(4 * updated if has_masters else 0)
        assert rest.get(kept.GRADIENTS, 0) == pytest.approx(a * updated if zero == 3 else 0)


def test_at_stage_2_a_rank_keeps_its_own_part_of_gradients_and_what_waits_in_a_bucket() -> None:
    blocks = TINY.blocks * 6
    parameters = Parameters.of(replace(TINY, blocks=blocks), blocks, EIGHT)
    dense, experts = parameters.num_dense, parameters.num_experts
    of_zero = {
        zero: states_of(parameters, EIGHT, Training(1, 16, zero, "fp32", reduce_bucket=64)).behind[0][kept.GRADIENTS]
        for zero in (1, 2)
    }
    # When the experts of the first block have their gradients, the rest of it and the embedding have none.
    come = dense + experts - parameters.dense_of_block[0] - parameters.num_embedding
    own = (dense / 8 + experts / 4) / (dense + experts)
    waiting = 64 + max(map(sum, zip(parameters.experts_of_block, parameters.dense_of_block, strict=True)))
    assert waiting < come
    assert of_zero == pytest.approx({1: 4 * come, 2: 4 * (waiting + (come - waiting) * own)})
    # At the end it has, of each tensor of its part, the sum and a copy; at stage 1 all gradients before that.
    part = most_in_partition(parameters.dense, 8) + most_in_partition(parameters.experts, 4)
    for zero, there in ((1, dense + experts), (2, 2 * part)):
        ends = states_of(parameters, EIGHT, Training(1, 16, zero, "fp32", reduce_bucket=64)).after
        assert ends[kept.GRADIENTS] == pytest.approx(4 * there)


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


def test_attention_keeps_its_input_whatever_its_kind_and_a_router_that_chooses_ahead_of_its_softmax_no_scores() -> None:
    training = Training(2, 64)
    for attention in (ATTENTION, Attention(5, 5, 7, 7, "latent", query_rank=9, kv_rank=6, rope_dim=3)):
        narrow, wide = (attention_keeps(attention, M, training) for M in (35, 36))
        assert wide - narrow == 2 * training.tokens
    scored, chosen = (
        block_keeps(replace(SPARSE, experts=replace(EXPERTS, has_bias=each)), 35, EIGHT, training)[ROUTER]
        for each in (False, True)
    )
    assert scored - chosen == 4 * training.tokens * EXPERTS.E


def test_ranks_that_share_experts_gather_rows_and_cut_hidden_layers() -> None:
    training = Training(2, 64)
    whole = layer_rows(EXPERTS, EIGHT, training)
    cut = layer_rows(EXPERTS, replace(EIGHT, esp=2), training)
    assert (cut.sent, cut.here, cut.hidden) == (whole.sent, 2 * whole.here, whole.hidden / 2)
    assert layer_rows(EXPERTS, EIGHT, replace(training, load=1.5)).here == 1.5 * whole.here


def test_the_loss_is_computed_in_fp32() -> None:
    for dtype in ("fp32", "bf16"):
        forward, backward = head_needs(35, 100_000, Training(1, 64, dtype=dtype))
        logits = 64 * 100_000
        a = {"fp32": 4, "bf16": 2}[dtype]
        # Logits, the same in fp32, and logarithms; then logarithms and two gradients.
        assert sum(forward.values()) == pytest.approx((a + 4 + (4 if a == 2 else 0)) * logits, rel=0.01)
        assert max(sum(each.values()) for each in backward) == pytest.approx(12 * logits, rel=0.01)


def test_the_peak_is_that_of_one_moment_and_checkpointing_chunks_and_recompute_take_less() -> None:
    for zero, checkpointing in product((0, 1, 2, 3), (False, True)):
        training = Training(4, 64, zero, checkpointing=checkpointing, device="cpu", reduce_bucket=1000)
        memory = memory_of(TINY, EIGHT, training)
        assert memory.total == max(sum(each.items.values()) for each in memory.moments)
        assert {each.name for each in memory.moments} > {"end of the forward", "optimizer step", "backward of block 0"}
        assert min(min(each.items.values()) for each in memory.moments) >= 0
    training = Training(64, 64, 1, device="cpu", reduce_bucket=1000)
    checkpointed = replace(training, checkpointing=True)
    total, of_checkpointed = (memory_of(TINY, EIGHT, each).total for each in (training, checkpointed))
    assert max(of_checkpointed, memory_of(TINY, EIGHT, replace(training, recompute=True)).total) < total
    assert memory_of(TINY, EIGHT, replace(checkpointed, degree=4)).total <= of_checkpointed


def test_two_halves_take_what_two_chunks_take_unless_blocks_are_checkpointed() -> None:
    """Then the second half is still in the block behind."""
    for checkpointing in (False, True):
        training = Training(64, 64, checkpointing=checkpointing)
        chunks = memory_of(TINY, EIGHT, replace(training, degree=2))
        assert (memory_of(TINY, EIGHT, replace(training, is_two_batch=True)) == chunks) == (not checkpointing)


def test_one_rank_alone_has_no_room_for_gradients_that_are_sent() -> None:
    for zero in (0, 1, 2, 3):
        one = [memory_of(TINY, Groups(1, 1), Training(1, 16, zero, early_gradients=each)) for each in (False, True)]
        assert one[0] == one[1]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_update_by_torchs_adam_takes_two_numbers_for_each_that_is_updated_at_a_time(zero: int, dtype: str) -> None:
    """Tensor by tensor without ZeRO, a group's part with it."""
    most = {}
    for optimizer in ("torch_adam", "momentum"):
        steps = states_of(OF_TINY, EIGHT, Training(1, 16, zero, dtype, optimizer=optimizer)).steps
        most[optimizer] = max(each[kept.STEP] for each in steps)
    dense, experts = OF_TINY.num_dense / 8, OF_TINY.num_experts / 4
    updated = max(dense, experts) if zero else max(*OF_TINY.dense, *OF_TINY.experts)
    # Beside them, gradients in fp32: of all parameters without ZeRO, which is none where they are fp32 as they are.
    beside = 4 * (updated if zero else dtype == "bf16" and OF_TINY.num_dense + OF_TINY.num_experts)
    assert most["torch_adam"] == pytest.approx(beside + 8 * updated)
    # At stages 1 and 2 in bf16 they were copied from gradients in bf16, which lie end to end beside; at 3 as well.
    copied = 2 * updated if dtype == "bf16" and zero else 0
    assert most["momentum"] == pytest.approx(beside + copied)


def test_at_stage_3_small_parameters_stay_and_a_billion_are_updated_at_a_time() -> None:
    head = []
    for persistence in (0, 100, 10_000):
        states = states_of(OF_TINY, EIGHT, Training(1, 16, 3, "bf16", persistence=persistence))
        stays = 2 * sum(each for each in OF_TINY.dense if each < persistence)
        assert states.rest[kept.GATHERED] == stays
        head.append(states.head[kept.GATHERED] + stays)
    assert len(set(head)) == 1
    large = load_model("mixtral-8x7b")
    of_large = Parameters.of(large, large.blocks, EIGHT)
    steps = states_of(of_large, EIGHT, Training(1, 16, 3, "bf16", optimizer="torch_adam")).steps
    assert of_large.num_experts / EIGHT.edp > 10**9
    assert max(each[kept.STEP] for each in steps) == 12 * 10**9


@pytest.mark.parametrize(
    ("groups", "zero", "count"),
    [
        (Groups(1, 1), 1, 0),
        (Groups(8, 4), 3, 1 + 2),
        (Groups(8, 4), 1, 1 + 2 + 3),
        (Groups(12, 3, ep=6), 1, 1 + 3 + 1 + 2 + 4),
        (Groups(16, 4, ep=2, pp=2), 1, 1 + 3 + 2 + 1 + 5),
    ],
)
def test_a_gpu_holds_the_default_groups_communicator_and_those_that_the_engine_makes(
    groups: Groups, zero: int, count: int
) -> None:
    """DeepSpeed's, its pipeline's, ours for tokens, and for gradients where they are ours to send."""
    peak = memory_of(TINY, groups, Training(1, 16, zero)).peak
    assert peak.items[COMMUNICATORS] == CONTEXT_BYTES + count * COMMUNICATOR_BYTES
    assert COMMUNICATORS not in memory_of(TINY, groups, Training(1, 16, device="cpu")).peak.items


@pytest.mark.parametrize("message", [0, 500, 10_000])
def test_at_stage_3_a_message_that_is_sent_ahead_is_held_beside_what_was_gathered(message: int) -> None:
    whole = OF_TINY.num_dense + OF_TINY.num_experts
    for prefetch, ahead in ((message, message), (10**9, whole)):
        states = states_of(OF_TINY, EIGHT, Training(1, 16, 3, "bf16", persistence=0, prefetch_bucket=prefetch))
        assert sum(states.head.values()) == 2 * (whole + ahead)
        # In the backward of a block what lies behind it has gone.
        of_blocks = zip(OF_TINY.experts_of_block, OF_TINY.dense_of_block, strict=True)
        there = OF_TINY.num_embedding
        for found, of_block in zip(states.before, of_blocks, strict=True):
            there += sum(of_block)
            assert sum(found.values()) == 2 * (there + ahead)
            assert there < whole


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    training = Training(1, 64, 1, device="cpu", reduce_bucket=1000)
    assert largest_batch(TINY, EIGHT, training, 0.0005) == 0
    for samples in (1, 2, 3, 7, 8, 38):
        takes, more = (memory_of(TINY, EIGHT, replace(training, samples=each)).total for each in (samples, samples + 1))
        assert takes < more
        for limit in (takes + 1, more - 1):
            assert largest_batch(TINY, EIGHT, training, limit / GB) == samples


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_backward_of_a_checkpointed_block_takes_what_it_takes_otherwise_and_what_it_ran_again_from(
    dtype: str,
) -> None:
    """Its choices; and its input, which in fp32 is the input of its first norm."""
    for place in (1, 2):
        totals = []
        for checkpointing in (False, True):
            training = Training(3, 17, dtype=dtype, checkpointing=checkpointing)
            last = replace(TINY, blocks=TINY.blocks[: place + 1])
            moments = memory_of(last, EIGHT, training).moments
            of_block = [sum(each.items.values()) for each in moments if each.name == f"backward of block {place}"]
            totals.append(max(of_block) - kept_before(last, place, training))
        tokens, choices = 3 * 17, 3 * 17 * EXPERTS.K * 4
        assert totals[1] - totals[0] == choices + (2 * tokens * TINY.M if dtype == "bf16" else 0)


def kept_before(model: Architecture, place: int, training: Training) -> float:
    """What the blocks before one keep: all that they need, or their inputs and choices."""
    blocks = model.blocks[:place]
    if not training.checkpointing:
        return sum(sum(block_keeps(each, model.M, EIGHT, training).values()) for each in blocks)
    choices = sum(4 * training.tokens * each.experts.K for each in blocks if each.experts)
    return choices + len(blocks) * training.number_bytes * training.tokens * model.M


def test_the_first_stage_of_a_pipeline_keeps_more_batches() -> None:
    deep = replace(TINY, vocab=2, blocks=(SPARSE,) * 8)
    totals, held = {}, {}
    for pp, last in ((1, 7), (4, 1)):
        memory = memory_of(deep, Groups(world=4, gpus_per_node=4, pp=pp), Training(16, 64, 0, device="cpu"))
        # What blocks have kept when the backward of the last one begins.
        moment = next(each for each in memory.moments if each.name == f"backward of block {last}")
        totals[pp], held[pp] = memory.total, sum(size for item, size in moment.items.items() if item not in STATES)
    # A quarter of the blocks, four times.
    assert held[4] == held[1]
    assert totals[4] < totals[1]


@pytest.mark.parametrize(
    ("groups", "training", "said"),
    [
        ({"ep": 4, "world": 8}, {}, "must divide the 6 experts"),
        ({"esp": 2}, {"zero": 3}, "not supported at ZeRO 3"),
        ({"pp": 8, "ep": 1}, {}, "has 3 blocks"),
        ({"pp": 2, "ep": 1}, {"zero": 2}, "ZeRO 0 and 1 only"),
        ({"mp": 2}, {}, "have no model parallelism here"),
        ({}, {"zero": 4}, "zero"),
        ({}, {"dtype": "fp8"}, "dtype"),
        ({}, {"optimizer": "lion"}, "optimizer"),
        ({}, {"samples": 0}, "samples"),
        ({}, {"zero": 0, "accumulation": "fp32"}, "accumulation"),
        ({}, {"zero": 0, "offload": True}, "on the host"),
        ({}, {"zero": 3, "offload": True}, "on the host"),
        ({}, {"zero": 1, "offload": True, "optimizer": "adam8bit"}, "on the host"),
    ],
)
def test_what_cannot_be_is_refused(groups: dict, training: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        memory_of(TINY, replace(EIGHT, **groups), Training(**{"samples": 1, "length": 16} | training))


def test_a_plan_says_what_a_rank_needs_and_which_batch_fits(capsys, tmp_path) -> None:
    file = tmp_path / "plan.json"
    asked = ["plan", "--cluster", "h100_400", "--nodes", "8", "--model", "olmoe", "--max-degree", "1"]
    more = ["--zero", "1", "--activation-checkpointing", "--memory-gb", "40", "--json", str(file)]
    assert cli.main([*asked, *more]) == 0
    text = capsys.readouterr().out
    assert "memory of a rank: ZeRO 1, bf16, adam, checkpointed" in text
    assert "DeepSpeed's buckets" in text
    memory = json.loads(file.read_text())["memory"]
    assert sum(memory["items_bytes"].values()) == pytest.approx(memory["peak_bytes"], abs=10)
    assert f"largest micro-batch in 40 GB: {memory['largest_samples']}" in text
    asked_for = [each for each in memory["choices"] if (each["zero"], each["ep"], each["esp"]) == (1, 8, 1)]
    assert [each["peak_bytes"] for each in asked_for] == [memory["peak_bytes"]]
    numbers = ["plan", "--cluster", "testbed_b", "--width", "64", "--hidden", "192", "--length", "60", "--layers", "3"]
    assert cli.main([*numbers, "--heads", "8", "--memory-gb", "80"]) != 0
    assert "needs --model or --hf-config, and mp = 1" in capsys.readouterr().err


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
    assert rest[kept.PARAMETERS] == 2 * (found.num_dense + found.num_experts)
    assert rest[kept.FROZEN] == 2 * (whole.num_dense + whole.num_experts)
    assert rest[kept.OPTIMIZER] == pytest.approx(8 * (found.num_dense / 8 + found.num_experts))
    cut = states_of(found, groups, Training(1, 16, 3)).rest
    assert cut[kept.FROZEN] == pytest.approx(2 * (whole.num_dense / 8 + whole.num_experts))


def test_states_of_eight_bits_and_states_on_the_host() -> None:
    held = OF_TINY.num_dense / 8 + OF_TINY.num_experts / 4
    eight = states_of(OF_TINY, EIGHT, Training(1, 16, 1, optimizer="adam8bit")).rest
    assert eight[kept.OPTIMIZER] == pytest.approx(2 * (1 + 4 / 256) * held)
    for zero in (1, 2):
        states = states_of(OF_TINY, EIGHT, Training(1, 16, zero, offload=True))
        assert not {kept.MASTERS, kept.OPTIMIZER} & states.rest.keys()
        largest = max(*OF_TINY.dense, *OF_TINY.experts)
        # Masters, their gradients, two moments, and what is copied back; room for one gradient.
        assert sum(states.host.values()) == pytest.approx((4 + 4 + 8 + 2) * held + 2 * largest)


@pytest.mark.parametrize("given", ["--lora 16", "--zero 2 --offload-optimizer cpu"])
def test_a_plan_says_on_how_many_cards_it_fits(given: str, capsys, tmp_path) -> None:
    asked = ["plan", "--cluster", "h100_400", "--nodes", "1", "--model", "qwen3-30b-a3b", "--max-degree", "1"]
    file, offload, model = tmp_path / "plan.json", "offload" in given, load_model("qwen3-30b-a3b")
    assert cli.main([*asked, *given.split(), "--json", str(file)]) == 0
    assert "does it fit on one node of N GPUs" in capsys.readouterr().out
    cards = json.loads(file.read_text())["memory"]["cards"]
    assert [each["gpus"] for each in cards] == [1, 2, 4, 8]
    assert offload or [each["gpus"] for each in cards if each["largest_samples"]] == [2, 4, 8]
    for each in cards:
        assert (each["host_bytes"] > 0) == offload
        training = Training(1, 4096, each["zero"], lora=0 if offload else 16, offload=offload)
        memory = memory_of(model, Groups(each["gpus"], each["gpus"], ep=each["ep"]), training)
        assert each["peak_bytes"] == round(memory.total)
