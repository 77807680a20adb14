# SPDX-License-Identifier: Apache-2.0
"""What the README shows is true: its code runs, its files and errors exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ds_fsmoe.config import ConfigError, read_block

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_code_block_runs(number: int) -> None:
    exec(compile(BLOCKS[number], f"README.md, python block {number}", "exec"), {"__name__": "readme"})


def test_the_first_lines_say_that_the_block_alone_does_nothing() -> None:
    assert 'The `"fsmoe"` block in `ds_config.json` does nothing by itself' in "\n".join(README.splitlines()[:8])


def test_every_path_of_the_tree_exists() -> None:
    tree = README.split("## Where things are")[1].split("```")[1]
    for line in tree.strip().splitlines():
        folder = "ds_fsmoe/" if line.startswith("  ") else ""
        names = re.split(r"\s{2,}|\s(?=[a-z]+ )", line.strip(), maxsplit=1)[0]
        for name in re.split(r",\s|\s", names):
            assert (ROOT / folder / name).exists(), name


@pytest.mark.parametrize(
    ("block", "shown"),
    [
        ({"gat": {}}, "fsmoe.gat: unknown key; did you mean 'gate'? The keys are enabled, schedule, gate, order, "),
        (
            {"schedule": "tutel", "pipeline_degree": {"forward": 2, "backward": 3}},
            "fsmoe.pipeline_degree = 2 forward and 3 backward: must be equal with fsmoe.schedule = ",
        ),
        (
            {"autotune": {"retune_on_drift": True}},
            "fsmoe.autotune.retune_on_drift = true: ",
        ),
    ],
)
def test_an_error_reads_as_the_readme_shows_it(block: dict, shown: str) -> None:
    assert shown in README
    with pytest.raises(ConfigError) as caught:
        read_block({"fsmoe": {"enabled": True} | block})
    assert str(caught.value).startswith(shown)


def test_every_field_of_the_block_is_in_the_readme() -> None:
    from ds_fsmoe.blocks import FSMoEBlock, GateBlock

    for name in [*FSMoEBlock.model_fields, *GateBlock.model_fields]:
        assert f"`{name}`" in README, name
