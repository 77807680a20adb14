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

IN_BLOCK: list[tuple[dict[str, Any], str]] = [
    # Misspelt keys.
    ({"shedule": "best"}, "fsmoe.shedule: unknown key; did you mean 'schedule'?"),
    ({"autotune": {"enable": True}}, "fsmoe.autotune.enable: unknown key; did you mean 'enabled'?"),
    ({"foo": 1}, "fsmoe.foo: unknown key; docs/config.md describes all keys"),
    (
        {"record": {"directory": "x"}},
        "fsmoe.record.directory: unknown key; the keys are dir, stop_after, stop_after_settled",
    ),
    ({"capacity_factor": 1.2}, "fsmoe.capacity_factor: unknown key; write it as fsmoe.gate.capacity_factor"),
    (
        {"gate": {"type": "deepseek", "num_group": 4}},
        "fsmoe.gate.num_group = 4: the gate \"deepseek\" has no such option; did you mean 'num_groups'?",
    ),
    # Misspelt names.
    ({"schedule": "lena"}, "fsmoe.schedule = \"lena\": unknown value; did you mean 'lina'?"),
    (
        {"schedule": "zzz"},
        'fsmoe.schedule = "zzz": must be "best", or a system of docs/schedules.md to compare with',
    ),
    ({"alltoall": "3dh"}, "fsmoe.alltoall = \"3dh\": no such part; did you mean '2dh'?"),
    (
        {"placement": {"policy": "my.module.place"}},
        "fsmoe.placement.policy = \"my.module.place\": cannot be imported: No module named 'my'; write it as "
        "package.module.name",
    ),
    (
        {"trace": {"cluster": "testbed_c"}},
        "fsmoe.trace.cluster = \"testbed_c\": no cluster or file 'testbed_c': did you mean 'testbed_b'?",
    ),
    # Wrong types and numbers.
    ({"num_chunks": "four"}, "fsmoe.num_chunks = \"four\": must be an integer or 'auto', for example 2"),
    ({"recompute": "yes"}, 'fsmoe.recompute = "yes": must be a boolean, for example false'),
    ({"plugins": "my.gates"}, 'fsmoe.plugins = "my.gates": must be a list, for example ["my_package.my_parts"]'),
    # Keys that conflict.
    (
        {"placement": {"policy": "lina"}, "ep_size": 4},
        'fsmoe.ep_size = 4: must be "auto" with fsmoe.placement.policy = "lina", which chooses it at the start; remove '
        "one of them",
    ),
    (
        {"deterministic": True, "autotune": True},
        "fsmoe.autotune = true and fsmoe.deterministic = true: tuning depends on timings; remove one of them",
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
FILES = {
    "misspelt.json": '{"name": "x", "num_node": 2}',
    "model.json": '{"model_type": "mixtrl"}',
    "loads.json": '{"a": [[1, 2]]}',
}
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
    ("plan", "--cluster is missing: a name or a file of a cluster, or --from-trace with the folder of a run"),
    ("plan --cluster testbed_c", "no cluster or file 'testbed_c': did you mean 'testbed_b'?"),
    ("plan --cluster misspelt.json", "cluster file misspelt.json: num_node: unknown key; did you mean 'num_nodes'?"),
    (
        "plan --cluster testbed_a --hf-config model.json",
        "model.json: model_type = \"mixtrl\": unknown family: did you mean 'mixtral'?",
    ),
    (f"{OF_MODEL} --top-k 99", "--top-k = 99: must be at most the number of experts, 8; --experts sets it"),
    (f"{OF_MODEL} --preset fsmo", "unknown preset 'fsmo': did you mean 'fsmoe'?"),
    (f"{OF_MODEL} --loads loads.json", "--loads = loads.json: layer a has 2 experts, and the model 8: "),
    ("plan --from-trace .", ".: no run has been recorded here: run.json, steps.jsonl and traces are missing (found: "),
    ("convert nope out --to fp32", "nope has neither a latest nor a mp_rank_00_model_states.pt: there is no such "),
    ("compare", "no training command: ds_fsmoe compare [OPTIONS] -- deepspeed train.py ..."),
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
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    assert cli.main(line.split()) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == "", "the mistake is found before anything is planned"
