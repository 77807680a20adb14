# SPDX-License-Identifier: Apache-2.0
"""The main job says what is wrong with its input in one sentence, and draws its batches reproducibly."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
CONFIG = EXAMPLES.parent / "ds_configs" / "gpt_moe_small.json"
sys.path.insert(0, str(EXAMPLES))

from text_data import Text, draw_batch, load_text, rank_generator  # noqa: E402
from train import parse_arguments, read_config  # noqa: E402


def refused(capsys, *arguments: str) -> str:
    """The sentence with which the command line is refused."""
    with pytest.raises(SystemExit) as caught:
        parse_arguments([*arguments])
    assert caught.value.code == 2
    return capsys.readouterr().err.splitlines()[-1].split("error: ")[-1]


def with_config(*arguments: str) -> list[str]:
    return ["--deepspeed_config", str(CONFIG), *arguments]


@pytest.mark.parametrize(
    ("world_size", "arguments", "sentence"),
    [
        (2, ["--num-experts", "5"], "--num-experts 5 is not divisible by --ep-size 2"),
        (3, ["--ep-size", "2"], "--ep-size 2 does not divide the 3 ranks"),
        (1, ["--width", "30", "--heads", "4"], "--width 30 is not divisible by --heads 4"),
        (1, ["--k", "9"], "--k 9: there are only 8 experts (--num-experts)"),
        (1, ["--steps", "0"], "--steps 0: must be at least 1"),
        (1, ["--ep-size", "0"], "--ep-size 0: must be at least 1"),
        (1, ["--text", "absent.txt"], "--text absent.txt: cannot be read: No such file or directory"),
        (1, ["--text", "/"], "--text /: cannot be read: Is a directory"),
    ],
)
def test_a_wrong_size_is_one_sentence(world_size, arguments, sentence, capsys, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    assert refused(capsys, *with_config(*arguments)) == sentence


def test_a_missing_config_is_named(capsys) -> None:
    assert refused(capsys, "--deepspeed_config", "absent.json") == "--deepspeed_config absent.json: no such file"
    assert refused(capsys).startswith("--deepspeed_config FILE is needed")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [("{bad", "cannot be read as JSON: "), ("[1]", "must hold a JSON object")],
)
def test_a_config_that_is_no_json_object_is_one_sentence(content: str, sentence: str, tmp_path) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(SystemExit) as caught:
        read_config(parse_arguments(["--deepspeed_config", str(file), "--moe", "fsmoe"]))
    assert str(caught.value.code).startswith(f"train.py: error: --deepspeed_config {file}: {sentence}")


def test_a_block_that_is_no_object_is_left_for_ds_fsmoe_to_name(tmp_path) -> None:
    file = tmp_path / "block.json"
    file.write_text('{"fsmoe": true}')
    assert read_config(parse_arguments(["--deepspeed_config", str(file), "--moe", "fsmoe"]))["fsmoe"] is True


def test_an_empty_text_is_named(capsys, tmp_path) -> None:
    (tmp_path / "empty.txt").touch()
    sentence = refused(capsys, *with_config("--text", str(tmp_path / "empty.txt")))
    assert sentence == f"--text {tmp_path}/empty.txt: the file is empty"


def test_a_text_shorter_than_a_sequence_says_how_many_bytes_are_needed(capsys, tmp_path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("a" * 1289)
    sentence = refused(capsys, *with_config("--text", str(file), "--seq-len", "128"))
    assert "has 1289 bytes: too short for sequences of 128" in sentence
    assert "1290 bytes are needed" in sentence
    file.write_text("a" * 1290)
    assert len(parse_arguments(with_config("--text", str(file), "--seq-len", "128")).loaded_text.validation_L) == 129


@pytest.mark.parametrize(("moe", "enabled"), [("fsmoe", True), ("deepspeed", False)])
def test_one_flag_turns_our_layers_on_and_off(moe: str, enabled: bool) -> None:
    config = read_config(parse_arguments(with_config("--moe", moe)))
    assert config["fsmoe"]["enabled"] is enabled


def test_without_the_flag_the_config_decides(tmp_path) -> None:
    assert read_config(parse_arguments(with_config()))["fsmoe"] == {"enabled": True}
    (tmp_path / "stock.json").write_text("{}")
    assert "fsmoe" not in read_config(parse_arguments(["--deepspeed_config", str(tmp_path / "stock.json")]))


def test_the_text_of_the_standard_library_is_real_prose() -> None:
    text = load_text(None, 128)
    assert len(text.train_L) > 300_000
    assert "the" in bytes(text.train_L.tolist()).decode(errors="ignore").split()


def test_training_and_validation_do_not_overlap(tmp_path) -> None:
    (tmp_path / "text").write_bytes(bytes(i % 251 for i in range(1000)))
    text: Text = load_text(str(tmp_path / "text"), 16)
    whole = torch.cat([text.train_L, text.validation_L])
    assert whole.tolist() == [i % 251 for i in range(1000)]
    assert len(text.validation_L) == 100


def test_batches_are_reproducible_and_differ_between_ranks() -> None:
    data_L = torch.arange(997, dtype=torch.int64) % 256
    first, again, other = (draw_batch(data_L, 3, 7, rank_generator(1, rank))[0] for rank in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_target_of_a_byte_is_the_next_one_up_to_the_last() -> None:
    data_L = torch.arange(9, dtype=torch.uint8)
    starts = set()
    for seed in range(50):
        tokens_BL, targets_BL = draw_batch(data_L, 2, 7, rank_generator(seed, 0))
        assert torch.equal(targets_BL, tokens_BL + 1)
        starts |= set(tokens_BL[:, 0].tolist())
    assert starts == {0, 1}
