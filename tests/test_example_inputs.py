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
        (1, ["--ep-size", "0"], "--ep-size 0: must be at least 1"),
        (1, ["--text", "absent.txt"], "--text absent.txt: cannot be read: No such file or directory"),
    ],
)
def test_a_wrong_size_is_one_sentence(world_size, arguments, sentence, capsys, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    assert refused(capsys, *with_config(*arguments)) == sentence


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(None, "no such file"), ("{bad", "cannot be read as JSON: "), ("[1]", "must hold a JSON object")],
)
def test_a_config_that_is_not_there_or_no_json_object_is_one_sentence(content, sentence: str, tmp_path, capsys) -> None:
    file = tmp_path / "bad.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit) as caught:
        read_config(parse_arguments(["--deepspeed_config", str(file), "--moe", "fsmoe"]))
    said = f"{caught.value.code}{capsys.readouterr().err}"
    assert f"error: --deepspeed_config {file}: {sentence}" in said
    assert refused(capsys).startswith("--deepspeed_config FILE is needed")


def test_a_text_shorter_than_a_sequence_says_how_many_bytes_are_needed(capsys, tmp_path) -> None:
    file = tmp_path / "short.txt"
    words = with_config("--text", str(file), "--seq-len", "128")
    file.touch()
    assert refused(capsys, *words) == f"--text {file}: the file is empty"
    file.write_text("a" * 1289)
    sentence = refused(capsys, *words)
    assert "has 1289 bytes: too short for sequences of 128" in sentence
    assert "1290 bytes are needed" in sentence
    file.write_text("a" * 1290)
    assert len(parse_arguments(words).loaded_text.validation_L) == 129


def test_one_flag_turns_our_layers_on_and_off_and_without_it_the_config_decides(tmp_path) -> None:
    for moe, enabled in (("fsmoe", True), ("deepspeed", False)):
        assert read_config(parse_arguments(with_config("--moe", moe)))["fsmoe"]["enabled"] is enabled
    assert read_config(parse_arguments(with_config()))["fsmoe"] == {"enabled": True}
    (file := tmp_path / "own.json").write_text("{}")
    assert "fsmoe" not in read_config(parse_arguments(["--deepspeed_config", str(file)]))
    file.write_text('{"fsmoe": true}')  # left for ds_fsmoe to name
    assert read_config(parse_arguments(["--deepspeed_config", str(file), "--moe", "fsmoe"]))["fsmoe"] is True


def test_training_and_validation_do_not_overlap_and_the_text_of_the_standard_library_is_prose(tmp_path) -> None:
    (tmp_path / "text").write_bytes(bytes(i % 251 for i in range(1000)))
    text: Text = load_text(str(tmp_path / "text"), 16)
    assert torch.cat([text.train_L, text.validation_L]).tolist() == [i % 251 for i in range(1000)]
    assert len(text.validation_L) == 100
    text = load_text(None, 128)
    assert len(text.train_L) > 300_000
    assert "the" in bytes(text.train_L.tolist()).decode(errors="ignore").split()


def test_batches_are_reproducible_differ_between_ranks_and_a_bytes_target_is_the_next_one() -> None:
    data_L = torch.arange(997, dtype=torch.int64) % 256
    first, again, other = (draw_batch(data_L, 3, 7, rank_generator(1, rank))[0] for rank in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    starts = set()
    for seed in range(50):
        tokens_BL, targets_BL = draw_batch(torch.arange(9, dtype=torch.uint8), 2, 7, rank_generator(seed, 0))
        assert torch.equal(targets_BL, tokens_BL + 1)
        starts |= set(tokens_BL[:, 0].tolist())
    assert starts == {0, 1}, "up to the last"
