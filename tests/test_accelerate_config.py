# SPDX-License-Identifier: Apache-2.0
"""The word "auto" in our block, which Accelerate and the Trainer of Hugging Face take for theirs.

The package here is a stand-in that looks at a config as theirs does, so neither has to be installed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import ds_fsmoe
from ds_fsmoe.config.accelerate import _finder, leave_block_alone, watch_block_again
from ds_fsmoe.config.reading import read_block

NAME = "accelerate.utils.dataclasses"
STAND_IN = """
class DeepSpeedPlugin:
    def __init__(self, config):
        self.config = config

    def fill_match(self, ds_key_long, mismatches=None, must_match=True, **kwargs):
        *nodes, key = ds_key_long.split(".")
        block = self.config
        for node in nodes:
            block = block[node]
        if block.get(key) == "auto":
            if ds_key_long not in kwargs:
                raise ValueError(f"`{ds_key_long}` not found in kwargs")
            block[key] = kwargs[ds_key_long]

    def deepspeed_config_process(self, prefix="", config=None, **kwargs):
        for key, value in (self.config if config is None else config).items():
            if isinstance(value, dict):
                self.deepspeed_config_process(prefix + key + ".", value, **kwargs)
            else:
                self.fill_match(prefix + key, **kwargs)
"""
EVERY_AUTO = {
    "enabled": True,
    "order": "auto",
    "alltoall": "auto",
    "ops": "auto",
    "pipeline_degree": {"forward": "auto", "backward": "auto"},
    "gradient_partition": {"mode": "auto"},
    "topology": {"ranks_per_node": "auto"},
}


def is_of_accelerate(name: str) -> bool:
    return name.split(".")[0] == "accelerate"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put it in the place of Accelerate; gives its file."""
    file = tmp_path / "accelerate" / "utils" / "dataclasses.py"
    file.parent.mkdir(parents=True)
    for folder in file.parents[:2]:
        (folder / "__init__.py").write_text("")
    file.write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    for name in filter(is_of_accelerate, list(sys.modules)):
        monkeypatch.delitem(sys.modules, name)
    yield file
    watch_block_again()
    for name in filter(is_of_accelerate, list(sys.modules)):
        del sys.modules[name]


def look_at(module: ModuleType, config: dict, **kwargs: object) -> dict:
    module.DeepSpeedPlugin(config).deepspeed_config_process(**kwargs)
    return config


@pytest.mark.parametrize("is_imported_first", [True, False])
def test_every_auto_of_our_block_goes_past_accelerate_and_no_other(stand_in: Path, is_imported_first: bool) -> None:
    theirs = importlib.import_module(NAME) if is_imported_first else None
    leave_block_alone()
    leave_block_alone()
    theirs = theirs or importlib.import_module(NAME)
    config = look_at(theirs, {"train_batch_size": "auto", "fsmoe": EVERY_AUTO}, train_batch_size=8)
    assert config == {"train_batch_size": 8, "fsmoe": EVERY_AUTO}
    with pytest.raises(ValueError, match=r"`zero_optimization\.stage` not found"):
        look_at(theirs, {"zero_optimization": {"stage": "auto"}})
    with pytest.raises(ValueError, match="`fsmoe_like` not found"):
        look_at(theirs, {"fsmoe_like": "auto"})


def test_uninstall_gives_accelerate_its_own_check_back(stand_in: Path) -> None:
    theirs = importlib.import_module(NAME)
    own = theirs.DeepSpeedPlugin.fill_match
    ds_fsmoe.install()
    assert theirs.DeepSpeedPlugin.fill_match is not own
    ds_fsmoe.uninstall()
    assert theirs.DeepSpeedPlugin.fill_match is own
    assert _finder not in sys.meta_path
    with pytest.raises(ValueError, match=r"`fsmoe\.order` not found"):
        look_at(theirs, {"fsmoe": EVERY_AUTO})


@pytest.mark.parametrize("source", ["", "class DeepSpeedPlugin: pass", "DeepSpeedPlugin = None"])
def test_an_accelerate_that_does_it_another_way_is_left_as_it_is(stand_in: Path, source: str) -> None:
    stand_in.write_text(source)
    theirs = importlib.import_module(NAME)
    own = dict(vars(theirs)) | dict(vars(getattr(theirs, "DeepSpeedPlugin", None) or object))
    leave_block_alone()
    assert dict(vars(theirs)) | dict(vars(getattr(theirs, "DeepSpeedPlugin", None) or object)) == own
    watch_block_again()


def test_without_accelerate_nothing_is_found(stand_in: Path) -> None:
    stand_in.unlink()
    importlib.import_module(NAME.rpartition(".")[0])
    leave_block_alone()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(NAME)
    assert importlib.util.find_spec(NAME) is None


@pytest.mark.parametrize(
    ("block", "length", "expected"),
    [
        ({"enabled": True}, 77, 77),
        ({"enabled": True, "sequence_length": 5}, 77, 5),
        ({"enabled": True}, None, None),
        (None, 77, None),
    ],
)
def test_the_length_of_trls_samples_is_that_of_the_block_unless_it_has_one(
    block: dict[str, object] | None, length: int | None, expected: int | None
) -> None:
    pytest.importorskip("trl")
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig
    from trl import SFTConfig

    own, config = HfTrainerDeepSpeedConfig.trainer_config_process, {"train_micro_batch_size_per_gpu": "auto"}
    written = config if block is None else config | {"fsmoe": block}
    args, made = SFTConfig(output_dir="nowhere", max_length=length, use_cpu=True), HfTrainerDeepSpeedConfig(written)
    leave_block_alone()
    try:
        made.trainer_config_process(args)
    finally:
        watch_block_again()
    assert HfTrainerDeepSpeedConfig.trainer_config_process is own
    found = made.config
    assert found.get("fsmoe", {}).get("sequence_length") == expected
    assert found["train_micro_batch_size_per_gpu"] == args.per_device_train_batch_size
    assert written.get("fsmoe") == block, "the user's own config stays as it is"


def test_null_is_auto_wherever_auto_may_stand() -> None:
    nulls = {key: dict.fromkeys(value) if isinstance(value, dict) else None for key, value in EVERY_AUTO.items()}
    assert read_block({"fsmoe": nulls | {"enabled": True}}) == read_block({"fsmoe": EVERY_AUTO})
