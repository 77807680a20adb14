# SPDX-License-Identifier: Apache-2.0
"""``ds_fsmoe.Config`` builds the block that a dict would be, and knows no key that the block does not have."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from ds_fsmoe import Config, ConfigError
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.hints import class_name, stub
from ds_fsmoe.config.reading import read_block
from ds_fsmoe.shapes import example_of, shape_in, words_for

ROOT = Path(__file__).resolve().parents[1]
FIELDS = {words_for(name, field)[0]: field for name, field in FSMoEBlock.model_fields.items()}
PARTS = {word: block for word, field in FIELDS.items() if (block := shape_in(field))}
BLOCK = {
    "enabled": True,
    "gate": {"type": "topk", "top_k": 2},
    "num_chunks": {"forward": 2, "backward": 4},
    "hooks": ["ds_fsmoe.BFloat16Communication"],
}


def built() -> Config:
    gate = Config.Gate(type="topk", top_k=2)
    return Config(gate=gate, num_chunks={"forward": 2, "backward": 4}, hooks=["ds_fsmoe.BFloat16Communication"])


def test_it_is_the_block_that_was_written_and_nothing_more_wherever_it_goes() -> None:
    block = built()
    assert block == BLOCK
    assert json.loads(json.dumps(block)) == BLOCK
    assert read_block({"fsmoe": block}) == read_block({"fsmoe": BLOCK})
    assert Config().as_dict() == {"enabled": True}
    assert Config(enabled=False).as_dict() == {"enabled": False}
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert other == BLOCK
        assert (type(other), type(other["gate"])) == (Config, Config.Gate)
    # Its dict is plain, and its own.
    plain = block.as_dict()
    assert [type(plain), type(plain["gate"]), type(plain["num_chunks"])] == [dict] * 3
    plain["gate"]["top_k"] = 7
    plain["hooks"].append("x")
    assert block == BLOCK


def test_deepspeed_and_install_take_it_as_a_dict() -> None:
    pytest.importorskip("deepspeed")
    import ds_fsmoe
    from ds_fsmoe.engine import compat, entry_points

    read = compat.load_ds_config({"train_batch_size": 8, "fsmoe": built()})
    assert read["fsmoe"] == BLOCK
    assert read_block(read) == read_block({"fsmoe": BLOCK})
    ds_fsmoe.install(built())
    try:
        assert entry_points._given.block == BLOCK
    finally:
        ds_fsmoe.uninstall()


def test_every_block_in_the_block_has_a_class_whose_signature_has_every_key() -> None:
    assert list(inspect.signature(Config).parameters) == list(FIELDS)
    for word, block in PARTS.items():
        part = getattr(Config, class_name(word))
        assert part() == {}
        assert part.__doc__
        keys = [words_for(name, field)[0] for name, field in block.model_fields.items()]
        assert list(inspect.signature(part).parameters)[: len(keys)] == keys
        assert part(**example_of(FIELDS[word])) == example_of(FIELDS[word])


def test_the_hints_for_editors_are_of_this_version() -> None:
    assert (ROOT / "ds_fsmoe" / "config" / "builder.pyi").read_text() == stub()


@pytest.mark.parametrize(
    "written",
    [
        {"gat": "mixtral", "ops": "torch", "order": "einsun"},
        {"schedule": "tutel", "num_chunks": {"forward": 2, "backward": 3}},
    ],
)
def test_a_mistake_is_told_at_once_and_as_initialize_tells_it(written: dict) -> None:
    with pytest.raises(ConfigError) as by_reading:
        read_block({"fsmoe": {"enabled": True} | written})
    with pytest.raises(ConfigError) as at_once:
        Config(**written)
    assert str(at_once.value) == str(by_reading.value)


def test_a_mistake_in_a_part_is_told_where_the_part_is_built() -> None:
    with pytest.raises(ConfigError, match=r'^fsmoe\.gate\.top_k = "2": must be an integer, for example 2$'):
        Config.Gate(top_k="2")
    with pytest.raises(ConfigError, match=r"^fsmoe\.num_chunks\.forwards: unknown key; did you mean 'forward'\?"):
        Config.NumChunks(forwards=2)
    # What another gate than the layers' own takes is asked when the whole block is there.
    assert Config.Gate(type="deepseek", num_groups=2) == {"type": "deepseek", "num_groups": 2}
    with pytest.raises(ConfigError, match=r'fsmoe\.gate\.num_groupss = 2: the gate "deepseek" has no such option'):
        Config(gate=Config.Gate(type="deepseek", num_groupss=2))


def test_building_a_block_loads_no_torch_where_no_part_is_named() -> None:
    code = "import sys, ds_fsmoe; ds_fsmoe.Config(num_chunks=4, schedule='tutel'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "False", done.stderr


def test_where_there_is_no_torch_names_of_parts_are_taken_as_they_are(monkeypatch) -> None:
    from ds_fsmoe.config import reading

    monkeypatch.setattr(reading.importlib.util, "find_spec", lambda name: None)
    assert Config(gate={"type": "of another machine", "sharpness": 2}, order="of another machine")["enabled"]
