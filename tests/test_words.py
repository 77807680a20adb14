# SPDX-License-Identifier: Apache-2.0
"""A field has the word of its field of research and the one it had before; both mean the same, errors name the one that
was written, and blocks may be written short."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel

import ds_fsmoe
from ds_fsmoe import registry
from ds_fsmoe.config.blocks import FSMoEBlock, GateBlock
from ds_fsmoe.config.reading import ConfigError, read_block
from ds_fsmoe.config.schema import schema
from ds_fsmoe.config.words import words_of
from ds_fsmoe.shapes import shape_in, words_for
from tests.hurry import hurry
from tests.logged import heard
from tests.ranks import run_on_ranks
from tests.small_model import Case, SmallModel, small_engine

TUNED = {"autotune": {"enabled": True}}
# Later words are in tests/data/before/blocks.json.
BOTH = [
    ({"num_chunks": {"forward": 2, "max": 8}, **TUNED}, {"pipeline_degree": {"forward": 2, "max": 8}, **TUNED}),
    ({"expert_tensor_parallel_size": 2}, {"esp_size": 2}),
    ({"gate": {"type": "deepseek", "top_k": 2}}, {"gate": {"type": "deepseek", "k": 2}}),
]
SHORT = [
    ({"placement": "balanced"}, {"placement": {"policy": "balanced"}}),
    ({"gate": "mixtral"}, {"gate": {"type": "mixtral"}}),
    ({"autotune": True}, {"autotune": {"enabled": True}}),
    ({"autotune": False}, {"autotune": {"enabled": False}}),
    ({"trace": True}, {"trace": {"enabled": True}}),
    ({"num_chunks": 4}, {"num_chunks": {"forward": 4, "backward": 4}}),
    ({"pipeline_degree": 4.0}, {"num_chunks": {"forward": 4, "backward": 4}}),
    ({"num_chunks": "auto"}, {"num_chunks": {"forward": "auto", "backward": "auto"}}),
    ({"num_chunks": None}, {"num_chunks": {"forward": "auto", "backward": "auto"}}),
    ({"gradient_partition": {"chunk_bytes": 3e7}}, {"gradient_partition": {"chunk_bytes": 30000000}}),
    ({"max_ctas": 8.0, "metrics_every": 2e1}, {"max_ctas": 8, "metrics_every": 20}),
    ({"gate": {"capacity_factor": None}}, {"gate": {"drop_tokens": False}}),
    (
        {"gate": {"capacity_factor": None, "eval_capacity_factor": 2}},
        {"gate": {"drop_tokens": False, "eval_capacity_factor": 2}},
    ),
]


def read(written: dict[str, Any]) -> FSMoEBlock:
    return read_block({"fsmoe": {"enabled": True} | written})


def refused(written: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        read(written)
    return str(caught.value)


@pytest.mark.parametrize(("one", "other"), [*BOTH, *SHORT], ids=str)
def test_two_ways_to_write_a_block_give_the_same_one_and_are_recorded_in_todays_words(one: dict, other: dict) -> None:
    assert read(one) == read(other)
    assert read(one).alike() == read(other).alike(), "ranks that write it differently agree"
    before = read(one).model_dump(exclude_unset=True)
    assert before == read(other).model_dump(exclude_unset=True), "records are the same"
    recorded = json.loads(json.dumps(read(one).model_dump(exclude_unset=True, by_alias=True)))
    assert words_of(recorded).old == []
    assert read_block({"fsmoe": recorded}) == read(one)
    assert words_of(json.loads(json.dumps(before))).normalized == recorded, "records of before compare as equal"


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        (
            {"esp_size": 2, "expert_tensor_parallel_size": 4},
            "fsmoe.expert_tensor_parallel_size = 4 and fsmoe.esp_size = 2: must be one of the two, which are names of "
            "the same key; remove fsmoe.esp_size",
        ),
        ({"gate": {"k": 2, "top_k": 2}}, "fsmoe.gate.top_k = 2 and fsmoe.gate.k = 2: must be one of the two"),
    ],
)
def test_both_words_at_once_are_an_error_that_names_both(written: dict, sentence: str) -> None:
    assert refused(written).startswith(sentence)


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ({"pipeline_degree": {"forwards": 2}}, "fsmoe.pipeline_degree.forwards: unknown key; did you mean 'forward'?"),
        ({"wires": {"combine": "fp4"}}, "fsmoe.wires.combine = \"fp4\": unknown value; did you mean 'fp8'"),
        ({"esp_size": 0}, "fsmoe.esp_size = 0: must be greater than or equal to 1"),
        ({"gate": {"k": "2"}}, 'fsmoe.gate.k = "2": must be an integer'),
        ({"num_chunks": 0}, "fsmoe.num_chunks = 0: must be greater than or equal to 1 or 'auto'"),
        ({"pipeline_degree": "x"}, "fsmoe.pipeline_degree = \"x\": must be an integer or 'auto'"),
        ({"num_chunks": [2]}, 'fsmoe.num_chunks = [2]: must be an object or a number or "auto"'),
        (
            {"pipeline_degree": "auto", "schedule": "fsmoe", "autotune": {"enabled": False}},
            'fsmoe.pipeline_degree = "auto" with fsmoe.schedule = "fsmoe": must be a number, or fsmoe.autotune.enabled',
        ),
        (
            {"num_chunks": {"max": 8}, "autotune": False},
            'fsmoe.num_chunks.max = 8: only with fsmoe.autotune = true or "auto", and it is false; remove it',
        ),
        (
            {"gate": {"capacity_factor": None, "drop_tokens": True}},
            "fsmoe.gate.capacity_factor = null: must be a number with fsmoe.gate.drop_tokens = true; null drops no",
        ),
        ({"gradient_partition": {"chunk_bytes": 1.5}}, "fsmoe.gradient_partition.chunk_bytes = 1.5: must be an int"),
    ],
    ids=str,
)
def test_an_error_names_the_path_that_was_written(written: dict, sentence: str) -> None:
    assert refused(written).startswith(sentence)
    assert "\n" not in refused(written)


@pytest.mark.parametrize("word", ["k", "top_k"])
def test_an_error_that_needs_the_model_names_the_path_that_was_written(word: str) -> None:
    config = Case().ds_config(fsmoe={"enabled": True, "gate": {word: 7}})
    with pytest.raises(
        ConfigError, match=rf"fsmoe\.gate\.{word} = 7: must be between 1 and num_experts \(4 in moes\.0\)"
    ):
        ds_fsmoe.initialize(model=SmallModel(Case(), rank=0), config=config)


class GateOfAUser(ds_fsmoe.GateBase):
    """A gate that has ``top_k`` in its signature itself."""

    def __init__(self, top_k: int = 1) -> None:
        super().__init__()
        self.top_k = top_k

    def build(self, model_dim: int, num_experts: int) -> None:
        self.wg = torch.nn.Linear(model_dim, num_experts, bias=False)


def test_a_gate_of_a_user_may_have_either_word_in_its_signature(monkeypatch) -> None:
    from ds_fsmoe.engine.convert_layers import convert
    from ds_fsmoe.layer.parts import choose_parts

    monkeypatch.setitem(registry._PARTS["gate"], "of a user", GateOfAUser)
    block = read({"gate": {"type": "of a user", "top_k": 3}})
    layer = SmallModel(Case(k=2), rank=0).moes[0]
    convert(layer, choose_parts(block, "cpu"), block.gate)
    assert layer.deepspeed_moe.gate.top_k == 3


def words_stand_for_one_field(block: type[BaseModel]) -> None:
    words = [word for name, field in block.model_fields.items() for word in words_for(name, field)]
    assert len(words) == len(set(words))
    for inner in filter(None, map(shape_in, block.model_fields.values())):
        words_stand_for_one_field(inner)


def test_the_schema_knows_both_words_and_the_short_forms_and_no_word_stands_for_two_fields() -> None:
    words_stand_for_one_field(FSMoEBlock)
    assert shape_in(FSMoEBlock.model_fields["gate"]) is GateBlock
    block = schema()["properties"]["fsmoe"]["properties"]
    gate = schema()["$defs"]["GateBlock"]["properties"]
    placement = schema()["$defs"]["PlacementBlock"]["properties"]
    pairs = [("pipeline_degree", block), ("esp_size", block), ("k", gate), ("wires", block), ("split_batch", block)]
    for name, words in [*pairs, ("split_blocks", block), ("pays_within", placement)]:
        assert words[name]["deprecated"] is True
    assert {"num_chunks", "expert_tensor_parallel_size"} < set(block)
    assert {"enum": ["rows", "slots"], "deprecated": True} in block["dispatch"]["anyOf"]
    assert "top_k" in gate
    assert {"type": "string"} in block["gate"]["anyOf"]
    assert {"type": "boolean"} in block["autotune"]["anyOf"]
    assert {"type": "integer", "minimum": 1, "maximum": 256} in block["num_chunks"]["anyOf"]


def said_at_start(rank: int, world_size: int, blocks: list[dict[str, Any]]) -> list[str]:
    """What is logged, but for the table, at the start of an engine whose block this rank writes like that."""
    said = heard()
    hurry()
    small_engine(Case(expert="gpt"), rank, blocks[rank])
    return [each for each in said.lines if "called" in each]


def test_an_engine_says_on_rank_0_what_has_another_name_by_now_and_ranks_may_differ_in_names(tmp_path: Path) -> None:
    blocks = [{"esp_size": 2, "pipeline_degree": {"forward": 2, "backward": 2}}]
    blocks += [{"expert_tensor_parallel_size": 2, "num_chunks": 2}]
    assert run_on_ranks(said_at_start, 2, tmp_path, blocks) == [
        [
            "fsmoe.esp_size is now called fsmoe.expert_tensor_parallel_size; both work",
            "fsmoe.pipeline_degree is now called fsmoe.num_chunks; both work",
        ],
        [],
    ]
