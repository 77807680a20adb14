# SPDX-License-Identifier: Apache-2.0
"""``ds_fsmoe plan`` of real models and of one's own, in stages or not: all of it from a name or a configuration, in
words and for programs, no torch at hand; and what the front page and the page about planning say of it."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_fsmoe import cli
from ds_fsmoe.offline.models.architecture import describe_model
from ds_fsmoe.offline.models.hf_config import read_hf_config
from ds_fsmoe.offline.models.hf_families import FAMILIES
from ds_fsmoe.offline.models.known import PAPER, PlannedModel, load_model, model_names
from ds_fsmoe.offline.models.model_layers import commonest_moe, moe_shape
from ds_fsmoe.offline.models.pipeline import batch_ms
from ds_fsmoe.offline.plan.report import PlannedJob, report
from ds_fsmoe.planning.cluster import load_cluster
from ds_fsmoe.planning.decide.plan import Settings
from ds_fsmoe.planning.decide.presets import NAMES
from ds_fsmoe.planning.decide.step_time import StageTimes
from ds_fsmoe.planning.groups import Groups

TINY: dict[str, Any] = {
    **{"model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 40},
    **{"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 211},
    **{"num_experts": 12, "num_experts_per_tok": 3, "max_position_embeddings": 128, "mlp_only_layers": [0, 3]},
    "torch_dtype": "float16",
}
PLAN = ["plan", "--cluster", "testbed_b", "--max-degree", "2"]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with the configuration of a small model."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


@functools.cache
def planned(*options: str, dense: tuple[int, ...] = (0, 1), is_tied: bool = False) -> tuple[str, dict[str, Any]]:
    """What the command says of a small model, and what it writes."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said):
        changes = {"mlp_only_layers": list(dense), "tie_word_embeddings": is_tied}
        (Path(folder) / "config.json").write_text(json.dumps(TINY | changes))
        written = Path(folder) / "plan.json"
        assert cli.main([*PLAN, "--hf-config", folder, "--json", str(written), *options]) == 0
        return said.getvalue(), json.loads(written.read_text())


def test_a_model_of_ones_own_is_planned_from_its_configuration_alone() -> None:
    said, found = planned(dense=(0, 3))
    for line in (
        "blocks   6, 4 of them with experts, the others 96 wide, M = 64, 211 words; 0.0 B parameters",
        "experts  E = 12, k = 3, H = 40\n",
        "heads    4 heads of 16, 2 of keys and values\n",
        "step     B = 1, L = 128, nothing dropped, 16-bit\n",
        "default  --samples 1 --length 128 --dtype fp16 --mp 1 --expert-tensor-parallel-size 1 --ep-size 4\n",
    ):
        assert f"\n{line}" in said
    assert "length 128 (default; the model supports 128)\n" in said
    assert "ep_size 4 (default: as many ranks of a node as divide the experts, as in training)\n" in said
    model = read_hf_config(TINY)
    assert found["model"]["num_parameters"] == model.num_parameters
    assert found["model"]["num_expert_parameters"] == model.num_expert_parameters
    # Layers are numbered as blocks are.
    assert found["model"]["moe_blocks"] == [1, 2, 4, 5]
    assert [each["layer"] for each in found["plan"]["layers"]] == [1, 2, 4, 5, 5, 4, 2, 1]
    # All gradients of a rank are sent: of all that is dense, and of its quarter of the experts.
    sent = sum(each["moe_bytes"] + each["dense_bytes"] for each in found["plan"]["layers"])
    on_a_rank = model.num_parameters - model.num_expert_parameters * 3 // 4
    assert sent + found["plan"]["tail_bytes"] == pytest.approx(2 * on_a_rank)
    # Without stages and micro-batches nothing is said of batches.
    assert "batch of" not in said
    assert "batch" not in found


def test_widths_of_dense_blocks_are_named_from_the_least() -> None:
    model = read_hf_config(TINY | {"mlp_only_layers": [0, 1, 2]})
    wide = [replace(each, dense_H=width) for each, width in zip(model.blocks[:3], (4096, 2049, 96), strict=True)]
    said = dict(describe_model(replace(model, blocks=(*wide, *model.blocks[3:]))))
    assert ", the others 96 or 2049 or 4096 wide, " in said["blocks"]


def test_what_is_given_replaces_what_the_configuration_says(own: Path, capsys) -> None:
    given = ["--experts", "24", "--top-k", "5", "--hidden", "80", "--capacity-factor", "1.5", "--layers", "4"]
    step = ["--samples", "2", "--length", "256", "--dtype", "fp32", "--mp", "1", "--esp", "2", "--ep", "4"]
    assert cli.main([*PLAN, "--hf-config", str(own / "config.json"), *given, *step]) == 0
    said = capsys.readouterr().out
    assert "\nexperts  E = 24, k = 5, H = 80\n" in said
    assert "\nblocks   4, 2 of them with experts" in said
    assert "\nstep     B = 2, L = 256, capacity factor 1.5, 32-bit\n" in said
    assert "length 256 is above 128, the most that the model supports\n" in said
    assert "layers: the first 4 of 6, with embedding and head\n" in said
    assert "given instead of the model's: E = 24, K = 5, H = 80, capacity_factor = 1.5\n" in said
    assert "\ndefault" not in said


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ("--experts 9", "--mp 1 --expert-tensor-parallel-size 1 --ep-size 1"),
        ("--experts 6", "--mp 1 --expert-tensor-parallel-size 1 --ep-size 2"),
        ("--esp 2", "--mp 1 --ep-size 2"),
        ("--mp 2", "--expert-tensor-parallel-size 1 --ep-size 4"),
        ("--dp 8", "--mp 4 --expert-tensor-parallel-size 1 --ep-size 4"),
        ("--pp 2", "--mp 1 --expert-tensor-parallel-size 1 --ep-size 4"),
        ("--ep 12 --nodes 3", "--mp 1 --expert-tensor-parallel-size 1"),
    ],
)
def test_groups_of_a_real_model_are_what_training_takes_by_itself(own: Path, options: str, sizes: str, capsys) -> None:
    few = ["--layers", "2", "--max-degree", "1"]
    assert cli.main([*PLAN, "--hf-config", str(own), *few, *options.split()]) == 0
    (default,) = re.findall(r"\ndefault  .*? --dtype fp16 (.*)\n", capsys.readouterr().out)
    assert default == sizes


def test_the_groups_of_experts_that_a_model_chooses_from_are_counted(capsys) -> None:
    """Of DeepSeek-V3's 8 groups a token takes 4: on 8 nodes its experts lie on 4 at the most, in one group each."""
    step = ["--layers", "4", "--length", "64", "--nodes", "8", "--ep", "32", "--max-degree", "1"]
    crossed = {}
    for more in ([], ["--expert-groups", "1"]):
        assert cli.main(["plan", "--cluster", "testbed_b", "--model", "deepseek-v3", *step, *more]) == 0
        (line,) = re.findall(r"\nnode_deduplicated +([\d.]+)", capsys.readouterr().out)
        crossed[len(more)] = float(line)
    assert crossed[0] < 4 < crossed[2]


def test_drawing_and_tracing_take_a_model_of_unequal_layers(own: Path, capsys) -> None:
    files = ["--png", str(own / "out.png"), "--trace", str(own / "out.trace")]
    few = ["--layers", "4", "--preset", "deepspeed", "--max-degree", "1"]
    assert cli.main([*PLAN, "--hf-config", str(own), "--gantt", *files, "--recompute", *few]) == 0
    assert "picture of a step of 2 layer(s)" in capsys.readouterr().out
    assert (own / "out.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    events = json.loads((own / "out.trace").read_text())["traceEvents"]
    assert {"DENSE", "ATTENTION", "EXPERT"} <= {each["name"].split("/")[1] for each in events if each["ph"] == "X"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--model", "olmoe"], "--hf-config = {own}: cannot be combined with --model"),
        (["--width", "64"], "--width = 64: {name} has its own; remove --width, or give all sizes"),
        (["--kv-heads", "8"], "--kv-heads = 8: {name} has its own"),
        (["--layers", "1"], "layers = 1: must be at least 2, since the first 1 of {name} have no experts"),
        (["--layers", "7"], "layers = 7: must be from 1 to the 6 of {name}"),
        (["--top-k", "13"], "--top-k = 13: must be at most the number of experts, 12; --experts sets it"),
        (["--samples", "0"], "B = 0: must be a whole number of at least 1"),
        (["--ep", "8"], "ep_size = 8: must divide the 12 experts"),
        (["--imbalance", "0.5"], "imbalance = 0.5: must be a number of at least 1"),
        (["--pp", "8"], "pp = 8: must be at most the number of blocks, 6"),
        (["--micro-batches", "0"], "--micro-batches = 0: must be at least 1"),
    ],
)
def test_what_does_not_go_with_a_model_of_its_own_is_refused(
    own: Path, options: list[str], sentence: str, capsys
) -> None:
    assert cli.main([*PLAN, "--hf-config", str(own), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"ds_fsmoe plan: error: {sentence.format(own=own, name=own.name)}")


def test_without_torch_and_transformers_known_models_are_planned_and_names_of_the_hub_need_what_is_missing() -> None:
    few, unknown = ["--model", "olmoe", "--length", "128", "--layers", "2"], ["--hf-config", "mistralai/Mixtral-8x7B"]
    code = (
        "import sys; sys.modules['torch'] = sys.modules['deepspeed'] = sys.modules['transformers'] = None; "
        f"from ds_fsmoe.cli import main; print(main({[*PLAN, *few]!r}), 'altair' in sys.modules, "
        f"main({[*PLAN, *unknown]!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert "\nmodel    olmoe: config.json of allenai/OLMoE-1B-7B-0924\n" in done.stdout, done.stderr
    assert done.stdout.endswith("\n0 False 2\n")
    assert "there is no such file or folder, and transformers (for names of the Hugging Face Hub)" in done.stderr


def test_a_report_of_so_many_layers_is_that_of_the_first_ones() -> None:
    model, cluster = load_model("deepseek-v2-lite").first(6), load_cluster("testbed_b")
    shape = moe_shape(model, commonest_moe(model), 1, 128, 2)
    settings = Settings(cluster.contention, max_degree=2)
    job = PlannedJob(cluster, Groups(16, 4, ep=4), PlannedModel(shape, 6, model), settings)
    whole, few = (report(job, "best", max_layers=each) for each in (None, 2))
    assert list(whole.places) == [1, 2, 3, 4, 5]
    assert list(few.places) == [1, 2]
    assert few.layers == whole.layers[:2]
    assert sum(few.times_ms["best"]) < sum(whole.times_ms["best"])


def test_the_page_about_planning_names_all_models_and_families() -> None:
    page = (ROOT / "docs" / "planning.md").read_text()
    section = page.split("## Your own model")[1].split("\n## ")[0]
    (known,) = re.findall(r"\*\*Known by name\*\* are (.*?)\.\n- ", section, flags=re.DOTALL)
    assert set(re.findall(r"`([^`]+)`", known)) == {*model_names()} - {*PAPER}
    (read,) = re.findall(r"\*\*Families that are read\*\*: (.*?)\. Any other", section, flags=re.DOTALL)
    assert set(re.findall(r"\w+", read)) - {"and"} == {*FAMILIES, *(each for f in FAMILIES.values() for each in f.also)}


# ---- stages of a pipeline, and batches of several micro-batches


def test_every_preset_has_a_batch_and_every_stage_a_row() -> None:
    said, found = planned("--pp", "4")
    assert "\none batch of 16 micro-batches (--micro-batches 16, the default) through 4 stages, in DeepSpeed's" in said
    assert "\nstages   4 of 1 or 2 blocks; the layers below are those of stage " in said
    batch = found["batch"]
    sends_ms = [each["send_ms"] for each in batch["links"]]
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
        assert preset["bubble_share"] == pytest.approx(sum(stage["bubble_share"] for stage in preset["stages"]) / 4)
        # A batch is the closed form of what its stages take.
        names = ("forward_ms", "backward_ms", "last_backward_ms", "gradients_ms")
        times = [StageTimes(*(stage[each] for each in names)) for stage in preset["stages"]]
        assert batch_ms(times, 16, sends_ms) == pytest.approx(preset["batch_ms"])
        # A stage without experts is in it.
        dense, *others = preset["stages"]
        assert dense["hidden_gradient_bytes"] == 0 < dense["later_gradient_bytes"]
        assert 0 < dense["forward_ms"] < min(each["forward_ms"] for each in others)
    table = said.split("\nthe stages by best: ")[1].split("\n\n")[0].splitlines()
    assert [line.split()[:2] for line in table[3:7]] == [["1", "0-1"], ["2", "2-3"], ["3", "4-4"], ["4", "5-5"]]


@pytest.mark.parametrize("preset", ["best", "fsmoe", "tutel_improved"])
def test_the_layers_that_are_shown_are_planned_as_they_run_in_the_batch(preset: str) -> None:
    said, found = planned("--pp", "2", "--preset", preset, is_tied=preset == "best")
    number = int(re.findall(r"\nthe last micro-batch on stage (\d) ", said)[0])
    stage = found["batch"]["presets"][preset]["stages"][number - 1]
    assert f"\nthe stages by {preset}: " in said
    assert found["plan"]["tail_bytes"] == stage["later_gradient_bytes"]
    shown = found["presets"][preset]
    assert shown["forward_ms"] == pytest.approx(stage["forward_ms"])
    assert shown["backward_ms"] == pytest.approx(stage["last_backward_ms"] + stage["gradients_ms"])
    # What stages share is said, and summed at the end.
    shares = "\n  the first and the last stage share the embedding: DeepSpeed reduces its gradients after all backwards"
    assert (shares in said) is (found["batch"]["tied_ms"] > 0) is (preset == "best")


def test_without_stages_a_batch_is_micro_batches_one_after_the_other() -> None:
    said, found = planned("--micro-batches", "3")
    assert "\none batch of 3 micro-batches (--micro-batches 3), without the optimizer\n" in said
    for preset in found["batch"]["presets"].values():
        (stage,) = preset["stages"]
        assert stage["sends_ms"] == 0
        assert stage["bubble_share"] == pytest.approx(0, abs=1e-12)
        times_ms = 3 * stage["forward_ms"] + 2 * stage["backward_ms"] + stage["last_backward_ms"]
        assert preset["batch_ms"] == pytest.approx(times_ms + stage["gradients_ms"])


ROOT = Path(__file__).resolve().parents[2]
SECTION = (ROOT / "README.md").read_text().split("## How much on my cluster?")[1].split("\n## ")[0]


def of_the_page(tmp_path: Path, *args: str) -> tuple[dict[str, Any], dict[str, float]]:
    """Run the command of the front page with more arguments; return what it writes, and the ms of each lane in a step
    of DeepSpeed's order.
    """
    (command,) = re.findall(r"`ds_fsmoe (plan --model [^`]+)`", " ".join(SECTION.split()))
    files = ["--json", str(tmp_path / "plan.json"), "--trace", str(tmp_path / "trace.json")]
    assert cli.main([*command.split(), *args, "--preset", "deepspeed", *files]) == 0
    spans = [each for each in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if each["ph"] == "X"]
    lanes = ("compute", "inter", "intra")
    lanes_ms = {lane: sum(each["dur"] for each in spans if each["tid"] == lane) / 1e3 for lane in lanes}
    return json.loads((tmp_path / "plan.json").read_text()), lanes_ms


@pytest.mark.parametrize("stage", [1, 3])
def test_a_line_of_the_front_pages_table_is_what_the_planner_says(stage: int, tmp_path: Path) -> None:
    # Side by side, computation and traffic slow each other down; the three numbers are those of each by itself.
    _, lanes_ms = of_the_page(tmp_path, "--zero", str(stage), "--contention", "ideal")
    plan, _ = of_the_page(tmp_path, "--zero", str(stage))
    step_ms, best_ms = (plan["presets"][name]["step_ms"] for name in ("deepspeed", "best"))
    bound = step_ms / max(lanes_ms.values())
    cells = [f"{each:.0f} ms" for each in (*lanes_ms.values(), step_ms)]
    row = " | ".join([f"| ZeRO {stage}", *cells, f"{bound:.2f}", f"{step_ms / best_ms:.2f} |"])
    assert row in SECTION
    assert step_ms / sum(plan["lower_bound_ms"].values()) <= bound + 0.01
    assert (plan["groups"]["ep"], plan["zero"], plan["stock"]["zero"]) == (8, stage, 3)
    if stage == 1:
        assert sum(lanes_ms.values()) == pytest.approx(step_ms), "nothing is overlapped: the formula of the page"
    stock_ms = plan["stock"]["step_ms"]
    said = " ".join(SECTION.split())
    assert f"It takes {stock_ms:.0f} ms, so ours gains {stock_ms / best_ms:.2f}." in said
    assert plan["shape"]["B"] == 1
