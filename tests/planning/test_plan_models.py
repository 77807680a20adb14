# SPDX-License-Identifier: Apache-2.0
"""``ds_fsmoe plan`` of real models and of one's own: all of it from a name or a configuration, no torch at hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_fsmoe import cli
from ds_fsmoe.offline.models.hf_config import read_hf_config
from ds_fsmoe.offline.models.hf_families import FAMILIES
from ds_fsmoe.offline.models.known import PAPER, PlannedModel, load_model, model_names
from ds_fsmoe.offline.models.model_layers import commonest_moe, moe_shape
from ds_fsmoe.offline.plan.report import PlannedJob, report
from ds_fsmoe.planning.cluster import load_cluster
from ds_fsmoe.planning.decide.plan import Settings
from ds_fsmoe.planning.groups import Groups

TINY: dict[str, Any] = {
    **{"model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 40},
    **{"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 211},
    **{"num_experts": 12, "num_experts_per_tok": 3, "max_position_embeddings": 128, "mlp_only_layers": [0, 3]},
    "torch_dtype": "float16",
}
PLAN = ["plan", "--cluster", "testbed_b", "--max-degree", "3"]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with the configuration of a small model."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def test_a_model_of_ones_own_is_planned_from_its_configuration_alone(own: Path, capsys) -> None:
    assert cli.main([*PLAN, "--hf-config", str(own), "--json", str(own / "plan.json")]) == 0
    said = capsys.readouterr().out
    assert f"\nmodel    {own.name}: {own / 'config.json'}\n" in said
    assert "\nblocks   6, 4 of them with experts, the others 96 wide, M = 64, 211 words; 0.0 B parameters" in said
    assert "\nexperts  E = 12, k = 3, H = 40\n" in said
    assert "\nheads    4 heads of 16, 2 of keys and values\n" in said
    assert "\nstep     B = 1, L = 128, nothing dropped, 16-bit\n" in said
    assert (
        "\ndefault  --samples 1 --length 128 --dtype fp16 --mp 1 --expert-tensor-parallel-size 1 --ep-size 4\n" in said
    )
    assert "length 128 (default; the model supports 128)\n" in said
    assert "ep_size 4 (default: as many ranks of a node as divide the experts, as in training)\n" in said
    found = json.loads((own / "plan.json").read_text())
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


@pytest.mark.parametrize("cluster", ["testbed_a", "testbed_b"])
@pytest.mark.parametrize("nodes", ["1", "3", "16"])
def test_a_known_model_is_the_same_on_every_cluster(cluster: str, nodes: str, capsys) -> None:
    step = ["--length", "64", "--layers", "2", "--max-degree", "2"]
    assert cli.main(["plan", "--cluster", cluster, "--model", "mixtral-8x7b", "--nodes", nodes, *step]) == 0
    said = capsys.readouterr().out
    assert "\nexperts  E = 8, k = 2, H = 14336\n" in said
    gpus = {"testbed_a": 8, "testbed_b": 4}[cluster]
    assert f"\ndefault  --samples 1 --dtype bf16 --mp 1 --expert-tensor-parallel-size 1 --ep-size {gpus}\n" in said
    assert f"groups   {gpus * int(nodes)} ranks" in said


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ([], "--mp 1 --expert-tensor-parallel-size 1 --ep-size 4"),
        (["--experts", "9"], "--mp 1 --expert-tensor-parallel-size 1 --ep-size 1"),
        (["--experts", "6"], "--mp 1 --expert-tensor-parallel-size 1 --ep-size 2"),
        (["--esp", "2"], "--mp 1 --ep-size 2"),
        (["--mp", "2"], "--expert-tensor-parallel-size 1 --ep-size 4"),
        (["--dp", "8"], "--mp 4 --expert-tensor-parallel-size 1 --ep-size 4"),
        (["--pp", "2"], "--mp 1 --expert-tensor-parallel-size 1 --ep-size 4"),
        (["--ep", "12", "--nodes", "3"], "--mp 1 --expert-tensor-parallel-size 1"),
    ],
)
def test_groups_of_a_real_model_are_what_training_takes_by_itself(
    own: Path, options: list[str], sizes: str, capsys
) -> None:
    assert cli.main([*PLAN, "--hf-config", str(own), *options]) == 0
    (default,) = re.findall(r"\ndefault  .*? --dtype fp16 (.*)\n", capsys.readouterr().out)
    assert default == sizes


def test_a_stage_of_a_pipeline_is_planned_and_said_to_be_the_one_that_computes_the_most(own: Path, capsys) -> None:
    assert cli.main([*PLAN, "--hf-config", str(own), "--pp", "4", "--preset", "fsmoe"]) == 0
    said = capsys.readouterr().out
    assert "\nstages   4 of 1 or 2 blocks; the layers below are those of stage " in said
    assert "), which computes the most\n" in said
    assert cli.main([*PLAN, "--hf-config", str(own), "--pp", "8"]) == 2
    assert "pp = 8: must be at most the number of blocks, 6" in capsys.readouterr().err


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
    files = [word for name in ("png", "trace") for word in (f"--{name}", str(own / f"out.{name}"))]
    assert cli.main([*PLAN, "--hf-config", str(own), "--gantt", *files, "--recompute"]) == 0
    assert "picture of a step of 3 layer(s)" in capsys.readouterr().out
    assert (own / "out.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    events = json.loads((own / "out.trace").read_text())["traceEvents"]
    kinds = {each["name"].split("/")[1] for each in events if each["ph"] == "X"}
    assert {"DENSE", "ATTENTION", "EXPERT"} <= kinds


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--model", "olmoe"], "--hf-config = {own}: cannot be combined with --model"),
        (["--width", "64"], "--width = 64: {name} has its own; remove --width, or give all sizes"),
        (["--heads", "8"], "--heads = 8: {name} has its own"),
        (["--kv-heads", "8"], "--kv-heads = 8: {name} has its own"),
        (["--ffn", "gpt"], "--ffn = gpt: {name} has its own"),
        (["--layers", "1"], "layers = 1: must be at least 2, since the first 1 of {name} have no experts"),
        (["--layers", "7"], "layers = 7: must be from 1 to the 6 of {name}"),
        (["--top-k", "13"], "--top-k = 13: must be at most the number of experts, 12; --experts sets it"),
        (["--samples", "0"], "B = 0: must be a whole number of at least 1"),
        (["--ep", "8"], "ep_size = 8: must divide the 12 experts"),
        (["--imbalance", "0.5"], "imbalance = 0.5: must be a number of at least 1"),
    ],
)
def test_what_does_not_go_with_a_model_of_its_own_is_refused(
    own: Path, options: list[str], sentence: str, capsys
) -> None:
    assert cli.main([*PLAN, "--hf-config", str(own), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"ds_fsmoe plan: error: {sentence.format(own=own, name=own.name)}")


def test_a_dense_model_is_refused_by_its_file(own: Path, capsys) -> None:
    (own / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    assert cli.main([*PLAN, "--hf-config", str(own)]) == 2
    assert "has no experts, so there is nothing to plan" in capsys.readouterr().err


def test_a_name_of_the_hub_without_transformers_is_answered_with_what_is_missing() -> None:
    arguments = [*PLAN, "--hf-config", "mistralai/Mixtral-8x7B-v0.1"]
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; from ds_fsmoe.cli import main; "
        f"raise SystemExit(main({arguments!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert "there is no such file or folder, and transformers (for names of the Hugging Face Hub)" in done.stderr
    assert "pip install 'ds_fsmoe[hf]', or give the path of a config.json" in done.stderr


def test_known_models_are_planned_without_torch_and_transformers() -> None:
    arguments = [*PLAN, "--model", "olmoe", "--length", "128"]
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; from ds_fsmoe.cli import main; "
        f"raise SystemExit(main({arguments!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "\nmodel    olmoe: config.json of allenai/OLMoE-1B-7B-0924\n" in done.stdout


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
    page = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text()
    section = page.split("## Your own model")[1].split("\n## ")[0]
    (known,) = re.findall(r"\*\*Known by name\*\* are (.*?)\.\n- ", section, flags=re.DOTALL)
    assert set(re.findall(r"`([^`]+)`", known)) == {*model_names()} - {*PAPER}
    (read,) = re.findall(r"\*\*Families that are read\*\*: (.*?)\. Any other", section, flags=re.DOTALL)
    assert set(re.findall(r"\w+", read)) - {"and"} == {*FAMILIES, *(each for f in FAMILIES.values() for each in f.also)}
