# SPDX-License-Identifier: Apache-2.0
"""``ds_fsmoe convert``: what is written is what was trained, in each form, and comes back."""

from __future__ import annotations

import json
import shutil
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from ds_fsmoe.checkpoint_files.convert import _write_experts
from ds_fsmoe.checkpoint_files.huggingface import CONFIG, _empty_model, config_text
from ds_fsmoe.checkpoint_files.numbering import ExpertName, from_huggingface, to_huggingface
from ds_fsmoe.checkpoint_files.pieces import MASTER
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.checkpoint_files.whole import Whole
from ds_fsmoe.cli import main
from ds_fsmoe.components.experts.mixtral import MixtralFeedForward
from ds_fsmoe.untrusted import MOST_LAYERS
from tests import hf_families
from tests.hurry import hurry
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.small_model import EXPERTS, WIDTH, Case, SmallModel, scaled, small_engine, train_steps

EXPERTS["mixtral"] = lambda: MixtralFeedForward(WIDTH, 28)
PLAIN, CUT = Case(ep_size=2, stage=1, dtype="bf16", expert="mixtral"), Case(stage=2, expert="gpt")
STEPS = 2


def make(rank: int, case: Case, esp: int, scale: float = 1.0) -> Any:
    """Ours; stock's for ``esp = 0``."""
    EXPERTS["mixtral"] = lambda: MixtralFeedForward(WIDTH, 28)
    model = SmallModel(case, rank, lambda *args, **options: _stock(*args, use_rts=False, **options))
    adam = {"type": "Adam", "params": {"lr": 0.02, "torch_adam": True}}
    return small_engine(case, rank, {"esp_size": esp} if esp else None, scaled(model, scale), optimizer=adam)


def _stock(*args: Any, **options: Any) -> Any:
    from deepspeed.moe.layer import MoE

    return MoE(*args, **options)


def train(engine: Any, rank: int, first: int) -> list[float]:
    return train_steps(engine, rank, range(first, first + STEPS))


def save(rank: int, world_size: int, folder: str) -> dict[str, list[float]]:
    hurry()
    losses = {}
    for name, case, esp in (("plain", PLAIN, 1), ("cut", CUT, 2)):
        engine = make(rank, case, esp)
        train(engine, rank, 0)
        engine.save_checkpoint(f"{folder}/{name}", "step2")
        losses[name] = train(engine, rank, STEPS)
        engine.destroy()
    return losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    root = tmp_path_factory.mktemp("convert")
    return root, run_on_ranks(save, 2, root / "ranks", str(root))[0]


def test_fp32_is_what_the_optimizer_has_whole_and_under_the_models_names(
    saved: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("plain", "cut"):
        whole = Whole(saved[0] / name / "step2")
        assert main(["convert", str(saved[0] / name), str(tmp_path / name), "--to", "fp32"]) == 0
        assert "model.safetensors" in capsys.readouterr().out
        found = load_file(tmp_path / name / "model.safetensors")
        assert sorted(found) == sorted(whole.names())
        for parameter, values in found.items():
            assert values.dtype == torch.float32
            assert torch.equal(values, whole.part(parameter, MASTER))
    model = SmallModel(Case(expert="gpt"), 0)
    model.load_state_dict(load_file(tmp_path / "cut" / "model.safetensors"))


def test_large_models_come_in_parts_with_an_index(saved: tuple[Path, Any], tmp_path: Path) -> None:
    source, target = str(saved[0] / "cut"), tmp_path / "parts"
    assert main(["convert", source, str(target), "--to", "fp32", "--max-file-gb", "1e-5"]) == 0
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = sorted(each.name for each in target.glob("*.safetensors"))
    assert len(files) > 2
    assert files == sorted(set(index["weight_map"].values()))
    whole, total = Whole(saved[0] / "cut" / "step2"), 0
    for file in files:
        for name, values in load_file(target / file).items():
            assert index["weight_map"][name] == file
            assert torch.equal(values, whole.part(name, MASTER))
            total += values.numel() * values.itemsize
    assert total == index["metadata"]["total_size"]


def load_again(rank: int, world_size: int, folder: str) -> dict[str, list[float]]:
    """Load what came back, by stock and ours, and save it again; go on as stock with what was converted for it."""
    hurry()
    elsewhere = replace(PLAIN, ep_size=1)
    for name, case, esp in (("stock", PLAIN, 0), ("ours", PLAIN, 1), ("other ep", elsewhere, 1), ("cut", CUT, 2)):
        engine = make(rank, case, esp, scale=0.3)
        came_back = f"{folder}/back {'cut' if name == 'cut' else 'plain'}"
        assert engine.load_checkpoint(came_back, load_module_only=True)[0] is not None
        engine.save_checkpoint(f"{folder}/again {name}", "tag")
        engine.destroy()
    losses = {}
    for name, case, weights_alone in (("plain", PLAIN, False), ("cut", CUT, True)):
        engine = make(rank, case, 0, scale=0.3)
        engine.load_checkpoint(f"{folder}/stock {name}", load_module_only=weights_alone)
        losses[name] = train(engine, rank, STEPS)
        engine.destroy()
    return losses


@pytest.fixture(scope="module")
def again(saved: tuple[Path, Any]) -> tuple[Path, dict[str, list[float]]]:
    """What was converted, there and back and for stock, and what became of it."""
    root = saved[0] / "converted"
    for name, suffix in (("plain", "w2.weight"), ("cut", "fc1.bias")):
        source, there, back = str(saved[0] / name), str(root / f"hf {name}"), str(root / f"back {name}")
        renames = ["--rename", r"^moes\.(\d+)=model.layers.\1.block_sparse_moe"]
        assert main(["convert", source, there, "--to", "huggingface", *renames]) == 0
        names = set(load_file(f"{there}/model.safetensors"))
        assert f"model.layers.1.block_sparse_moe.experts.3.{suffix}" in names
        assert "model.layers.0.block_sparse_moe.gate.weight" in names
        undo = ["--rename", r"^model\.layers\.(\d+)\.block_sparse_moe=moes.\1"]
        assert main(["convert", there, back, "--to", "deepspeed", *undo]) == 0
        assert main(["convert", source, str(root / f"stock {name}"), "--to", "stock"]) == 0
        assert not list((root / f"stock {name}" / "step2").glob("fsmoe*"))
    return root, run_on_ranks(load_again, 2, root / "ranks", str(root))[0]


def test_to_huggingface_and_back_is_the_same_model_in_any_layout(
    saved: tuple[Path, Any], again: tuple[Path, Any]
) -> None:
    for name, there in (("plain", "stock"), ("plain", "ours"), ("plain", "other ep"), ("cut", "cut")):
        was, now = Whole(saved[0] / name / "step2"), Whole(again[0] / f"again {there}" / "tag")
        assert sorted(was.names()) == sorted(now.names())
        for parameter in was.names():
            assert torch.equal(was.weights(parameter), now.weights(parameter)), (there, parameter)


def test_stock_goes_on_from_what_was_converted_for_it(saved: tuple[Path, Any], again: tuple[Path, Any]) -> None:
    losses = again[1]
    assert losses["plain"] == saved[1]["plain"]
    # Of weights alone the first loss follows; the next depends on the optimizer.
    assert losses["cut"][0] == pytest.approx(saved[1]["cut"][0], rel=1e-6)


def test_a_mixtral_of_transformers_comes_back_as_it_was(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"num_hidden_layers": 11, "num_local_experts": 3, "vocab_size": 31}
    model = MixtralForCausalLM(MixtralConfig(**sizes)).eval()
    model.save_pretrained(tmp_path / "theirs")
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--to", "deepspeed"]) == 0
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "again"), "--to", "huggingface"]) == 0
    was, now = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "again"))
    assert sorted(was) == sorted(now)
    assert all(torch.equal(was[name], now[name]) for name in was)
    # Layer 2 before layer 10, as a model has them.
    whole = Whole(tmp_path / "ours" / "converted")
    assert [layer.split(".")[2] for layer in whole.numbering] == [str(layer) for layer in range(11)]
    shutil.copy(tmp_path / "theirs" / "config.json", tmp_path / "again")
    tokens = torch.arange(7)[None]
    loaded = MixtralForCausalLM.from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_the_file_of_an_expert_is_as_large_as_that_expert(tmp_path: Path) -> None:
    """Its weights may be read as views of those of all experts, of which torch would write all memory."""
    weights = torch.arange(8 * 4096.0).view(8, 4096)
    reads = {ExpertName("moe", at, "w1.weight"): partial(weights.__getitem__, at) for at in range(8)}
    written = dict(_write_experts(tmp_path, reads, lambda layer, number: f"{number}.pt"))
    for at, (name, read) in enumerate(reads.items()):
        assert torch.equal(torch.load(tmp_path / f"{at}.pt", weights_only=True)[str(name)], read())
        assert written[f"{at}.pt"] == 4 * 4096
        assert (tmp_path / f"{at}.pt").stat().st_size < 2 * written[f"{at}.pt"]


def test_names_there_and_back_are_inverse() -> None:
    names = {
        "a.mlp.deepspeed_moe.gate.wg.weight": "a.mlp.gate.weight",
        "a.mlp.deepspeed_moe.gate.e_score_correction_bias": "a.mlp.gate.e_score_correction_bias",
        "a.mlp.deepspeed_moe.experts.deepspeed_experts.11.w1.weight": "a.mlp.experts.11.w1.weight",
        "a.attention.gate.weight": "a.attention.gate.weight",
        "lm_head.weight": "lm_head.weight",
    }
    assert [to_huggingface(each) for each in names] == list(names.values())
    assert list(from_huggingface(list(names.values())).values()) == list(names)
    assert list(from_huggingface(list(names)).values()) == list(names)


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["convert", *arguments]) == 2
    return capsys.readouterr().err


def test_what_is_wrong_is_one_sentence_and_nothing_is_left_behind(
    saved: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, target = str(saved[0] / "plain"), str(tmp_path / "target")
    damaged = tmp_path / "damaged"
    shutil.copytree(saved[0] / "plain", damaged)
    file = damaged / "step2" / "layer_1_expert_2_mp_rank_00_model_states.pt"
    file.write_bytes(file.read_bytes()[:-7])
    (tmp_path / "empty").mkdir()
    odd = tmp_path / "odd.safetensors"
    save_file({"a.experts.0.w1.weight": torch.ones(2), "a.experts.2.w1.weight": torch.ones(2)}, odd)
    dense = tmp_path / "dense.safetensors"
    save_file({"a.weight": torch.ones(2)}, dense)
    (tmp_path / "cut.safetensors").write_bytes(odd.read_bytes()[:30])
    for arguments, words in {
        (str(damaged), target, "--to", "fp32"): "layer_1_expert_2_mp_rank_00_model_states.pt",
        (plain, target, "--to", "fp32", "--tag", "step9"): "step9: no such checkpoint",
        (str(tmp_path / "empty"), target, "--to", "fp32"): "has neither a latest nor a mp_rank_00",
        (plain, str(damaged), "--to", "stock"): "exists and is not empty",
        (plain, target, "--to", "huggingface", "--rename", "weight"): "must be PATTERN=REPLACEMENT",
        (plain, target, "--to", "huggingface", "--rename", "(=x"): "is not a regular expression",
        (plain, target, "--to", "huggingface", "--rename", r"a=\3"): "invalid group reference",
        (plain, target, "--to", "huggingface", "--rename", ".*=x"): "which another parameter has",
        (plain, target, "--to", "stock", "--dtype", "float16"): "have no effect with --to stock",
        (plain, target, "--to", "fp32", "--max-file-gb", "0"): "must be more than 0",
        (plain, target, "--to", "stock", "--tag", "../esc"): "--tag",
        (str(odd), target, "--to", "deepspeed", "--tag", "../esc"): "--tag",
        (str(odd), target, "--to", "deepspeed"): "a has 2 experts, but no w1.weight of [1]",
        (str(dense), target, "--to", "deepspeed"): "has no experts: no name like",
        (str(tmp_path / "empty"), target, "--to", "deepspeed"): "contains no .safetensors files",
        (str(tmp_path / "cut.safetensors"), target, "--to", "deepspeed"): "cut.safetensors cannot be read",
    }.items():
        assert words in refusal(list(arguments), capsys), arguments
        assert not Path(target).exists()
    assert not (tmp_path / "esc").exists()


def test_a_checkpoint_is_converted_from_within_its_own_folder(
    saved: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(saved[0] / "plain" / "step2")
    assert main(["convert", ".", str(tmp_path / "one"), "--to", "stock"]) == 0
    (tmp_path / "two" / "three").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "two" / "three")
    assert main(["convert", str(saved[0] / "plain"), ".", "--to", "stock"]) == 0
    for folder in (tmp_path / "one", tmp_path / "two" / "three"):
        assert (folder / "latest").read_text() == "step2"
        assert (folder / "step2" / "mp_rank_00_model_states.pt").is_file()
    assert [each.name for each in (tmp_path / "two").iterdir()] == ["three"]


def test_numbers_of_any_length_and_script_are_names_or_said_to_be_none(tmp_path: Path, capsys) -> None:
    target = str(tmp_path / "target")
    names = ["layers.1²2", "layers.10", "layers.2", "layers.007", f"layers.{'7' * 5000}", "layers.\u0661"]
    source = tmp_path / "their.safetensors"
    save_file({f"{name}.experts.0.w1.weight": torch.ones(2) for name in names}, source)
    assert main(["convert", str(source), target, "--to", "deepspeed"]) == 0
    found, usual = list(Whole(tmp_path / "target" / "converted").numbering), ["layers.2", "layers.007", "layers.10"]
    assert [each for each in found if each in usual] == usual
    assert found[-1] == names[4] or len(found) == len(names)
    for number in ("7" * 5000, "1²"):
        save_file({f"layers.0.experts.{number}.w1.weight": torch.ones(2)}, source)
        said = refusal([str(source), str(tmp_path / "other"), "--to", "deepspeed"], capsys)
        assert "has no experts: no name like" in said


# ---- models that are built of a config that is not trusted


def written(folder: Path, **changed: Any) -> Path:
    said = json.loads(config_text(hf_families.model_of("qwen3_moe")))
    (folder / CONFIG).write_text(json.dumps(said | changed))
    return folder / CONFIG


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The hosts that somebody has looked for."""
    found: list[Any] = []

    def look(*args: Any, **options: Any) -> Any:
        found.append(args)
        raise OSError("no network here")

    monkeypatch.setattr(socket, "getaddrinfo", look)
    return found


@sampled("family", hf_families.families(), drawn=3)
def test_the_empty_model_has_the_tensors_of_the_model(family: str, tmp_path: Path) -> None:
    if hf_families.why_not(family):
        pytest.skip(hf_families.why_not(family))
    model = hf_families.model_of(family)
    (tmp_path / CONFIG).write_text(config_text(model))
    found = _empty_model(tmp_path / CONFIG, len(model.state_dict()))
    shapes = {name: each.shape for name, each in model.state_dict().items()}
    assert {name: each.shape for name, each in found.state_dict().items()} == shapes
    assert all(each.is_meta for each in found.parameters())


def test_a_model_without_experts_is_not_built_and_the_network_is_not_asked(tmp_path: Path, asked: list[Any]) -> None:
    detr = {"model_type": "detr", "architectures": ["DetrForObjectDetection"], "use_timm_backbone": False}
    backbone = {"backbone": "attacker/backbone", "use_pretrained_backbone": True, "backbone_config": None}
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    for said in (detr | backbone, llama):
        path = written(tmp_path)
        path.write_text(json.dumps(said))
        with pytest.raises(CheckpointError, match=r"cannot build it: .*"):
            _empty_model(path, 10)
    with pytest.raises(CheckpointError, match="its experts do not follow transformers' contract"):
        _empty_model(path, 10)
    assert asked == []


def test_kernels_that_a_config_names_are_not_looked_for_and_the_network_may_be_asked_again_afterwards(
    tmp_path: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    names = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
    model = _empty_model(written(tmp_path, **dict.fromkeys(names, "attacker/kernel")), 100)
    assert "attacker" not in str(model.config._attn_implementation)
    assert asked == []
    assert constants.HF_HUB_OFFLINE is False


def test_a_config_with_far_more_layers_than_the_checkpoint_has_tensors_is_refused_before_it_is_built(
    tmp_path: Path,
) -> None:
    many = MOST_LAYERS + 1
    with pytest.raises(CheckpointError, match=rf"num_hidden_layers = {many}: must be at most {MOST_LAYERS}"):
        _empty_model(written(tmp_path, num_hidden_layers=many), 100)
    with pytest.raises(CheckpointError, match="it has more than 10020 modules, far more than the checkpoint has"):
        _empty_model(written(tmp_path, num_hidden_layers=1000, layer_types=None), 1)


def test_what_is_no_config_is_one_sentence(tmp_path: Path) -> None:
    for text in ("[" * 100_000, "[]", "{}", '{"model_type": []}', '{"model_type": "qwen3_moe"}', "x"):
        (tmp_path / CONFIG).write_text(text)
        with pytest.raises(CheckpointError, match="cannot build it: "):
            _empty_model(tmp_path / CONFIG, 100)
