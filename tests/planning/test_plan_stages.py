# SPDX-License-Identifier: Apache-2.0
"""``ds_fsmoe plan --pp``: a batch through all stages, by every preset, in words and for programs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ds_fsmoe import cli
from ds_fsmoe.offline.models.pipeline import batch_ms
from ds_fsmoe.planning.decide.presets import NAMES
from ds_fsmoe.planning.decide.step_time import StageTimes

TINY: dict[str, Any] = {
    **{"model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 40},
    **{"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 211},
    **{"num_experts": 12, "num_experts_per_tok": 3, "max_position_embeddings": 128, "mlp_only_layers": [0, 1]},
    "torch_dtype": "float16",
}
PLAN = ["plan", "--cluster", "testbed_b", "--max-degree", "3"]


def planned(folder: Path, capsys, *options: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    """What the command says, and what it writes."""
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    written = folder / "plan.json"
    assert cli.main([*PLAN, "--hf-config", str(folder), "--json", str(written), *options]) == 0
    return capsys.readouterr().out, json.loads(written.read_text())


def test_every_preset_has_a_batch_and_every_stage_a_row(tmp_path: Path, capsys) -> None:
    said, found = planned(tmp_path, capsys, "--pp", "4")
    assert (
        "\none batch of 16 micro-batches (--micro-batches 16, the default) through 4 stages, in DeepSpeed's order, "
        "without the optimizer\n"
    ) in said
    batch = found["batch"]
    assert list(batch["presets"]) == list(NAMES)
    for name, preset in batch["presets"].items():
        label = r"AutoEP \(ep_size 4\)" if name == "deepspeed" else name
        assert re.search(rf"\n{label} +{preset['batch_ms']:.2f} ", said)
        assert batch["lower_bound_ms"] <= preset["batch_ms"]
        assert [each["blocks"] for each in preset["stages"]] == [[0, 1], [2, 3], [4, 4], [5, 5]]
        for stage in preset["stages"]:
            own_ms = 16 * stage["forward_ms"] + 15 * stage["backward_ms"] + stage["last_backward_ms"]
            all_ms = own_ms + stage["gradients_ms"] + stage["sends_ms"] + stage["bubbles_ms"]
            assert all_ms == pytest.approx(preset["batch_ms"])
            assert 0 < stage["bubble_share"] < 1
            assert stage["bubble_share"] == pytest.approx(stage["bubbles_ms"] / preset["batch_ms"])
        shares = [stage["bubble_share"] for stage in preset["stages"]]
        assert preset["bubble_share"] == pytest.approx(sum(shares) / 4)
    table = said.split("\nthe stages by best: ")[1].split("\n\n")[0].splitlines()
    assert [line.split()[:2] for line in table[3:7]] == [["1", "0-1"], ["2", "2-3"], ["3", "4-4"], ["4", "5-5"]]
    assert "over the inter-node link" in table[-1]


def test_the_batch_is_the_closed_form_of_what_its_stages_take(tmp_path: Path, capsys) -> None:
    _, found = planned(tmp_path, capsys, "--pp", "4", "--micro-batches", "5")
    batch = found["batch"]
    names = ("forward_ms", "backward_ms", "last_backward_ms", "gradients_ms")
    sends_ms = [each["send_ms"] for each in batch["links"]]
    for preset in batch["presets"].values():
        times = [StageTimes(*(stage[name] for name in names)) for stage in preset["stages"]]
        assert batch_ms(times, 5, sends_ms) == pytest.approx(preset["batch_ms"])


def test_a_stage_without_experts_is_in_the_batch(tmp_path: Path, capsys) -> None:
    said, found = planned(tmp_path, capsys, "--pp", "4", "--preset", "fsmoe")
    dense, *others = found["batch"]["presets"]["fsmoe"]["stages"]
    assert dense["hidden_gradient_bytes"] == 0
    assert dense["later_gradient_bytes"] > 0
    assert 0 < dense["forward_ms"] < min(each["forward_ms"] for each in others)
    assert "\nthe stages by fsmoe: " in said


def test_the_layers_that_are_shown_are_planned_as_they_run_in_the_batch(tmp_path: Path, capsys) -> None:
    for preset in ("best", "fsmoe", "tutel_improved"):
        said, found = planned(tmp_path, capsys, "--pp", "2", "--preset", preset)
        number = int(re.findall(r"\nthe last micro-batch on stage (\d) ", said)[0])
        stage = found["batch"]["presets"][preset]["stages"][number - 1]
        assert found["plan"]["tail_bytes"] == stage["later_gradient_bytes"]
        shown = found["presets"][preset]
        assert shown["forward_ms"] == pytest.approx(stage["forward_ms"])
        assert shown["backward_ms"] == pytest.approx(stage["last_backward_ms"] + stage["gradients_ms"])


def test_without_stages_a_batch_is_micro_batches_one_after_the_other(tmp_path: Path, capsys) -> None:
    said, found = planned(tmp_path, capsys, "--micro-batches", "3")
    assert "\none batch of 3 micro-batches (--micro-batches 3), without the optimizer\n" in said
    for preset in found["batch"]["presets"].values():
        (stage,) = preset["stages"]
        assert stage["bubble_share"] == stage["sends_ms"] == 0
        times_ms = 3 * stage["forward_ms"] + 2 * stage["backward_ms"] + stage["last_backward_ms"]
        assert preset["batch_ms"] == pytest.approx(times_ms + stage["gradients_ms"])


def test_without_stages_and_micro_batches_nothing_is_said_of_batches(tmp_path: Path, capsys) -> None:
    said, found = planned(tmp_path, capsys)
    assert "\none step (forward, backward, sums of gradients; without the optimizer)\n" in said
    assert "batch of" not in said
    assert "batch" not in found


def test_what_stages_share_is_said_and_summed_at_the_end(tmp_path: Path, capsys) -> None:
    said, found = planned(tmp_path, capsys, "--pp", "2", tie_word_embeddings=True)
    assert (
        "\n  the first and the last stage share the embedding: DeepSpeed reduces its gradients after all "
        "backwards" in said
    )
    assert found["batch"]["tied_ms"] > 0
    untied = planned(tmp_path, capsys, "--pp", "2")[1]
    assert untied["batch"]["tied_ms"] == 0


def test_equal_layers_of_numbers_are_divided_over_stages(capsys, tmp_path: Path) -> None:
    written = tmp_path / "plan.json"
    model = ["--model", "mixtral-7b", "--layers", "4", "--length", "256"]
    assert cli.main([*PLAN, *model, "--pp", "2", "--json", str(written)]) == 0
    assert "\nthe last micro-batch on stage 1 (" in capsys.readouterr().out
    stages = json.loads(written.read_text())["batch"]["presets"]["deepspeed"]["stages"]
    assert [each["blocks"] for each in stages] == [[0, 1], [2, 3]]
    assert stages[0]["forward_ms"] == stages[1]["forward_ms"]


def test_a_batch_of_nothing_is_refused(capsys) -> None:
    assert cli.main([*PLAN, "--model", "gpt2-xl", "--micro-batches", "0"]) == 2
    assert "--micro-batches = 0: must be at least 1" in capsys.readouterr().err
