# SPDX-License-Identifier: Apache-2.0
"""Other programs make the right model of a checkpoint whose experts are spread over ranks, or it is our error."""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers")

from ds_fsmoe.checkpoint_files import guards
from ds_fsmoe.checkpoint_files.guards import guarded
from ds_fsmoe.checkpoint_files.reading import read_file
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from tests.python_path import python_path
from tests.ranks import run_on_ranks
from tests.test_hugging_face_files import Layout, make, train

SPREAD = [Layout(2, 2, 0), Layout(2, 2, 1), Layout(2, 2, 3)]
WHOLE = [Layout(2, 1, 1), Layout(2, 1, 3)]
"""With all experts on every rank nothing is spread."""


def save(rank: int, world_size: int, layouts: list[Layout], folder: str) -> list[str]:
    """Save each layout, and its whole weights; load it with stock DeepSpeed. What that says."""
    import deepspeed

    import ds_fsmoe
    from tests.hf_families import model_of
    from tests.sgd_engines import ds_config

    said = []
    for layout in layouts:
        engine = make(layout)
        train(engine, 0, 2)
        engine.save_checkpoint(f"{folder}/{layout.name}", "tag")
        whole = ds_fsmoe.whole_state_dict(engine)
        if rank == 0:
            torch.save(whole, f"{folder}/{layout.name}/whole.pt")
        engine.destroy()
        if layout.ep > 1:
            model = model_of(layout.family)
            config = {name: each for name, each in ds_config(layout.stage).items() if name != "fsmoe"}
            engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
            with pytest.raises(CheckpointError) as caught:
                engine.load_checkpoint(f"{folder}/{layout.name}", "tag", load_module_strict=False)
            said.append(str(caught.value))
            engine.destroy()
    return said


def load_otherwise(rank: int, world_size: int, layout: Layout, folder: str) -> list[str]:
    """The client state after a load by another checkpoint engine than DeepSpeed's default, which unpickles all."""
    import ds_fsmoe

    engine = make(layout, scale=1.5)
    other = type("Other", (type(engine.checkpoint_engine),), {})
    engine.checkpoint_engine.__class__ = other
    _, state = engine.load_checkpoint(f"{folder}/{layout.name}", "tag")
    found, right = ds_fsmoe.whole_state_dict(engine), torch.load(f"{folder}/{layout.name}/whole.pt")
    assert rank > 0 or all(torch.equal(found[name], each) for name, each in right.items())
    engine.destroy()
    return list(state)


def names_the_command(error: BaseException | str) -> bool:
    return "ds_fsmoe convert" in str(error) and "--to fp32" in str(error)


def fp32(folder: Path) -> dict[str, torch.Tensor]:
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    convert_zero_checkpoint_to_fp32_state_dict(str(folder), str(folder / "files"), safe_serialization=True, tag="tag")
    return load_file(folder / "files" / "model.safetensors")


def universal(folder: Path) -> dict[str, torch.Tensor]:
    from deepspeed.checkpoint.ds_to_universal import main

    workers = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
    options = workers | {"strict": True, "inject_missing_state": True}
    places = {"input_folder": str(folder / "tag"), "output_folder": str(folder / "universal")}
    main(argparse.Namespace(**places, **options))
    found = {}
    for each in (folder / "universal" / "zero").glob("*/fp32.pt"):
        state = torch.load(each, weights_only=False)
        found[each.parent.name] = state["param"] if isinstance(state, dict) else state
    return found


READERS: tuple[Callable[[Path], dict[str, torch.Tensor]], ...] = (fp32, universal)


def check_refused(saved: Path, layout: Layout) -> None:
    for read in READERS:
        with pytest.raises(CheckpointError) as caught:
            read(saved / layout.name)
        assert names_the_command(caught.value), (layout, read, caught.value)
    assert not list((saved / layout.name).glob("universal/zero/*"))
    for path in (saved / layout.name / "tag").glob("[!f]*.pt"):  # not fsmoe_rank_00000.pt
        with pytest.raises(CheckpointError):
            torch.load(path, weights_only=False)
        with pytest.raises(pickle.UnpicklingError, match="use_ds_fsmoe_convert"):
            torch.load(path, weights_only=True)


def check_script(folder: Path) -> None:
    """The script beside the checkpoint writes the right weights, as the sentence's command does."""
    assert os.access(folder / "zero_to_fp32.py", os.X_OK)
    (folder / "latest").write_text("tag")
    command = [sys.executable, "zero_to_fp32.py", ".", "out", "-t", "tag", "--safe_serialization"]
    environment = os.environ | {"PYTHONPATH": python_path()}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found, right = load_file(folder / "out" / "model.safetensors"), torch.load(folder / "whole.pt")
    assert found.keys() == right.keys()
    assert all(torch.equal(found[name], each) for name, each in right.items())


@pytest.mark.long
def test_deepspeeds_readers_refuse_spread_experts_with_the_command_and_read_whole_ones(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    said = run_on_ranks(save, 2, tmp_path / "ranks", SPREAD + WHOLE, str(saved))
    assert len(said[0]) == len(SPREAD)
    assert all(names_the_command(each) for every in said for each in every)
    for layout in SPREAD:
        check_refused(saved, layout)
    check_script(saved / SPREAD[-1].name)
    for layout in WHOLE:
        for read in READERS if layout.stage == 3 else (universal,):
            found, right = read(saved / layout.name), torch.load(saved / layout.name / "whole.pt")
            assert found.keys() >= right.keys()
            for name, each in right.items():
                assert torch.equal(found[name].reshape(-1), each.reshape(-1)), (read, name)
    with pytest.raises(CheckpointError) as caught:
        fp32(saved / WHOLE[0].name)
    assert names_the_command(caught.value)
    states = run_on_ranks(load_otherwise, 2, tmp_path / "others", SPREAD[-1], str(saved))
    assert guards.KEY not in states[0]


def test_a_guard_is_an_error_before_any_tensor_is_read_and_our_reader_passes_it_over(tmp_path: Path) -> None:
    state = {"module": {"w": torch.arange(3.0)}, "mine": [1, 2]}
    torch.save(guarded(state), tmp_path / "guarded.pt")
    found = read_file(tmp_path / "guarded.pt")
    assert found.keys() == state.keys()
    assert torch.equal(found["module"]["w"], state["module"]["w"])
    read: list[Any] = []

    def note(storage: Any, location: str) -> Any:
        read.append(location)
        return storage

    with pytest.raises(CheckpointError, match="ds_fsmoe convert CHECKPOINTS FOLDER --to fp32"):
        torch.load(tmp_path / "guarded.pt", map_location=note, weights_only=False)
    assert read == []
    assert guards.KEY not in state
