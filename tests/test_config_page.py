# SPDX-License-Identifier: Apache-2.0
"""The reference of the block in docs/config.md is made from its fields, and says of each what it takes."""

from __future__ import annotations

import json
import re

import pytest
from pydantic import Field, create_model

from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.shapes import shape_in, words_for
from tools import config_page
from tools.config_page import PAGE, page

TEXT = PAGE.read_text()
FIELDS = {words_for(name, field)[0]: field for name, field in FSMoEBlock.model_fields.items()}


def section(word: str, text: str = TEXT) -> str:
    return text.split(config_page.BEGIN.format(word))[1].split(config_page.END.format(word))[0]


def test_the_page_is_that_of_the_fields() -> None:
    assert page(TEXT) == TEXT, "python -m tools.config_page writes it again"


@pytest.mark.parametrize("word", FIELDS)
def test_every_field_has_a_section_that_says_what_it_takes_with_examples_and_a_row_that_leads_there(word: str) -> None:
    own, block = section(word), shape_in(FIELDS[word])
    assert f"### {word}\n" in own
    assert "Takes " in own
    assert TEXT.count(f"### {word}\n") == 1
    assert f"| [`{word}`](#{word}) | " in section(config_page.OVERVIEW)
    words = [words_for(name, field)[0] for name, field in block.model_fields.items()] if block else []
    if block:
        assert re.findall(r"(?m)^\| `(\w+)`(?: \(before: `\w+`\))? \|", own) == words
    (whole,) = re.findall(r"Example: `(.*)`\.", own)
    inside = re.findall(r"(?m)^\| .* \| `(\{.*\})` \|$", own)
    assert len(inside) == len(words)
    for example in (json.loads(whole), *({word: json.loads(each)} for each in inside)):
        read = FSMoEBlock.model_validate(example)
        assert read != FSMoEBlock() or example[word] == {"path": "fsmoe_trace"}, "what holds anyway is no example"


def test_a_new_field_gets_a_section_at_its_place_and_what_is_written_by_hand_stays(monkeypatch) -> None:
    more = create_model("More", __base__=FSMoEBlock, colour=(bool, Field(False, description="paint it")))
    block = config_page.SCHEMA["properties"]["fsmoe"]["properties"]
    monkeypatch.setitem(block, "colour", more.model_json_schema()["properties"]["colour"])
    monkeypatch.setattr(config_page, "FSMoEBlock", more)
    text = page(TEXT)
    assert 'Paint it.\n\n- Takes `true` or `false`.\n- Default: `false`.\n- Example: `{"colour": true}`.' in text
    assert text.index("end of debug") < text.index("### colour") < text.index("## Words and older names")
    assert page(text) == text
    by_hand = re.sub(r"(?s)<!-- (.*?): made.*?<!-- end of \1 -->\s*", "", text)
    assert by_hand.split() == re.sub(r"(?s)<!-- (.*?): made.*?<!-- end of \1 -->\s*", "", TEXT).split()


def test_options_of_gates_are_ones_that_the_block_takes() -> None:
    from ds_fsmoe.config.reading import read_block

    rows = re.findall(r"(?m)^\| (`.*?`) \| `(\w+)` \| `(.*?)` \|", section(config_page.GATES))
    assert len(rows) > 10
    described = re.findall(r"(?m)^\| `.*?` \| `(\w+)` \| `.*?` \| (.*?) *\|$", section(config_page.GATES))
    assert len(described) == len(rows)
    assert [option for option, does in described if not does] == [], "Args: in the gate's docstring says what it does"
    for types, option, default in rows:
        for gate in re.findall(r"`(\w+)`", types):
            read_block({"fsmoe": {"enabled": True, "gate": {"type": gate, option: json.loads(default)}}})
