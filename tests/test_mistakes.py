# SPDX-License-Identifier: Apache-2.0
"""Mistakes that people make, in the block and on the command line: a message has path, value and remedy.

A misspelt word is answered with the nearest one, and not with a list of all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_fsmoe import cli
from ds_fsmoe.config.reading import ConfigError, read_block

# Those of other kinds are in tests/test_config.py, tests/test_words.py and tests/planning/test_commands.py.
IN_BLOCK: list[tuple[dict[str, Any], str]] = [
    ({"shedule": "best"}, "fsmoe.shedule: unknown key; did you mean 'schedule'?"),
    ({"schedule": "lena"}, "fsmoe.schedule = \"lena\": unknown value; did you mean 'lina'?"),
    ({"schedule": "zzz"}, 'fsmoe.schedule = "zzz": must be "best", or a system of docs/schedules.md to compare with'),
    ({"recompute": "yes"}, 'fsmoe.recompute = "yes": must be a boolean, for example false'),
    ({"plugins": "my.gates"}, 'fsmoe.plugins = "my.gates": must be a list, for example ["my_package.my_parts"]'),
    (
        {"placement": {"policy": "lina"}, "ep_size": 4},
        'fsmoe.ep_size = 4: must be "auto" with fsmoe.placement.policy = "lina", which chooses it at the start; remove '
        "one of them",
    ),
    (
        {"placement": {"policy": "balanced"}, "expert_tensor_parallel_size": 2},
        'fsmoe.placement.policy = "balanced": sharded experts cannot move; use fsmoe.expert_tensor_parallel_size = 1, '
        'or the policy "off"',
    ),
    (
        {"gradient_partition": {"collective": "reduce_scatter"}},
        'fsmoe.gradient_partition.collective = "reduce_scatter": every rank needs all gradients at '
        'zero_optimization.stage = 0; use "auto" or "all_reduce", or stage 1 or 2',
    ),
]
OF_MODEL = "plan --cluster testbed_a --model mixtral-8x7b"
ON_COMMAND_LINE: list[tuple[str, str]] = [
    ("plna", "ds_fsmoe plna: error: unknown command; did you mean 'plan'?"),
    (
        "foo",
        "unknown command; the choices are clusters, compare, convert, env, plan, profile, remembered, report, tune",
    ),
    ("clusters zzz", "zzz: unknown argument; run ds_fsmoe clusters --help for all options"),
    ("report nope", "ds_fsmoe report: error: nope: no such folder"),
    ("plan --cluster testbed_a", "missing: --width, --hidden, --length, --layers; or name a model with --model ("),
    (f"{OF_MODEL} --ep-size 3", "ep_size = 3: must divide the 8 experts"),
    (f"{OF_MODEL} --lora -1", "--lora = -1: must be at least 0, the rank of adapters"),
    (f"{OF_MODEL} --nodse 2", "ds_fsmoe plan: error: --nodse: unknown argument; did you mean '--nodes'?"),
    ("plan --cluster mine.json", "cluster file mine.json: num_node: unknown key; did you mean 'num_nodes'?"),
]


@pytest.mark.parametrize(("block", "message"), IN_BLOCK, ids=[json.dumps(block) for block, _ in IN_BLOCK])
def test_a_mistake_in_the_block_has_path_value_and_remedy(block: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_block({"fsmoe": {"enabled": True, **block}})
    assert str(caught.value) == message


@pytest.mark.parametrize(("line", "message"), ON_COMMAND_LINE, ids=[line for line, _ in ON_COMMAND_LINE])
def test_a_mistake_on_the_command_line_has_option_value_and_remedy(
    line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.json").write_text('{"name": "x", "num_node": 2}')
    assert cli.main(line.split()) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == "", "the mistake is found before anything is planned"
