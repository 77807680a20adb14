# SPDX-License-Identifier: Apache-2.0
"""Scripts with Trainer, TRL and Accelerate, in which nothing is ours, train, save and resume as on one process."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

pytest.importorskip("trl")

from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.scripts import ROOT, free_port, launch

SCRIPTS = ROOT / "examples" / "hf"
EVERYWHERE = ("--logging_steps=1", "--report_to=none", "--learning_rate=1e-2", "--disable_tqdm=true")
Run = tuple[str, ...]


def be_scripts(rank: int, world_size: int, folder: str, runs: list[Run], port: int) -> None:
    """Run scripts one after the other as ``deepspeed --module ds_fsmoe.run`` would, in a process that is a rank."""
    import transformers.training_args
    from accelerate.state import AcceleratorState, GradientState, PartialState

    dist.barrier()
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HF_HUB_OFFLINE": "1"}
    os.chdir(folder)
    runpy.run_path(str(ROOT / "examples" / "on_cpu" / "sitecustomize.py"))
    # Trainer asks a GPU whether it knows bf16.
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    for script, *arguments in runs:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        sys.argv = ["ds_fsmoe.run", f"--local_rank={rank}", str(SCRIPTS / script), *arguments]
        runpy.run_module("ds_fsmoe.run", run_name="__main__", alter_sys=True)
        for each in (AcceleratorState, GradientState, PartialState):
            each._reset_state()


def be_plain(rank: int, world_size: int, folder: str, runs: list[Run]) -> None:
    """Run scripts in one process, with nothing of DeepSpeed's or ours."""
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.chdir(folder)
    for script, *arguments in runs:
        sys.argv = [script, *arguments]
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def on_ranks(folder: Path, world_size: int, runs: list[Run]) -> None:
    ranks = folder / f"ranks{len(list(folder.glob('ranks*')))}"
    run_on_ranks(be_scripts, world_size, ranks, str(folder), runs, free_port())


def in_one_process(folder: Path, runs: list[Run]) -> None:
    run_on_ranks(be_plain, 1, folder / f"ranks{len(list(folder.glob('ranks*')))}", str(folder), runs)


def history(folder: Path) -> list[dict[str, float]]:
    return json.loads((folder / "history.json").read_text())


def assert_alike(found: Path, wanted: Path, rel: float = 2e-5) -> list[dict[str, float]]:
    ours, theirs = history(found), history(wanted)
    assert [list(each) for each in ours] == [list(each) for each in theirs]
    for of_ours, of_theirs in zip(ours, theirs, strict=True):
        assert of_ours == pytest.approx(of_theirs, rel=rel)
    return ours


def trainer(out: str, world: int, *more: str, stage: int | None = 3, steps: int = 4) -> Run:
    on = ("--use_cpu",) if stage is None else (f"--deepspeed={SCRIPTS}/zero{stage}.json",)
    batch = f"--per_device_train_batch_size={4 // world}", f"--per_device_eval_batch_size={8 // world}"
    given = "--model=base", f"--output_dir={out}", f"--max_steps={steps}", "--eval_strategy=steps", "--eval_steps=2"
    return ("trainer.py", *given, *batch, *EVERYWHERE, *on, *more)


LORA = ("--lora=experts", "--save_steps=2")
FULL = ("--max_grad_norm=0.1", "--gradient_accumulation_steps=2", "--save_steps=2")
CHECKPOINTING = ("--gradient_checkpointing", '--gradient_checkpointing_kwargs={"use_reentrant": true}')


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    runs = [
        ("make_model.py", "base"),
        trainer("plain", 1, "--max_grad_norm=0.1", "--gradient_accumulation_steps=2", stage=None),
        trainer("plain-lora", 1, *LORA, stage=None),
        ("accelerate_loop.py", "--model=base", "--batch=4", "--save=plain-accelerate"),
    ]
    in_one_process(folder, runs)
    return folder


@pytest.fixture(scope="module")
def trained(base: Path) -> Path:
    """What two ranks train in one start, and what goes on from two steps in, on as many ranks started anew."""
    two = json.loads((SCRIPTS / "zero2.json").read_text())
    # The word that Accelerate takes for its own, in our block.
    written = two | {"fsmoe": two["fsmoe"] | {"alltoall": "auto", "num_chunks": {"forward": "auto"}}}
    (base / "auto.json").write_text(json.dumps(written))
    accelerate = ("accelerate_loop.py", "--model=base", "--deepspeed=auto.json", "--save=accelerate")
    full = trainer("full", 2, *FULL, *CHECKPOINTING, stage=2)
    on_ranks(base, 2, [trainer("lora", 2, *LORA), full, accelerate])
    for name, then in (("lora", "moved"), ("full", "again")):
        (base / then).mkdir()
        (base / name / "checkpoint-2").rename(base / then / "checkpoint-2")
    # With another stage and all experts on each rank.
    (base / "whole.json").write_text(json.dumps(two | {"fsmoe": two["fsmoe"] | {"ep_size": 1}}))
    moved = (*trainer("moved", 2, *LORA, stage=2), "--resume=true", "--deepspeed=whole.json")
    on_ranks(base, 2, [moved, trainer("again", 2, *FULL, *CHECKPOINTING, "--resume=true", stage=2)])
    return base


@pytest.mark.daily("hugging face", 2)
def test_lora_on_experts_is_trained_at_stage_3_resumed_elsewhere_merged_and_read_by_transformers(trained: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = trained
    assert_alike(base / "lora", base / "plain-lora")
    assert_alike(base / "moved", base / "plain-lora")
    theirs = load_file(base / "plain-lora" / "adapter_model.safetensors")
    for name in ("lora", "moved"):
        ours = load_file(base / name / "adapter_model.safetensors")
        assert {key: each.shape for key, each in ours.items()} == {key: each.shape for key, each in theirs.items()}
        for key, each in theirs.items():
            torch.testing.assert_close(ours[key], each, rtol=1e-3, atol=1e-4)
    merged = {}
    for name in ("lora", "plain-lora"):
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base / "base"), base / name)
        model.merge_and_unload().save_pretrained(base / f"{name}-merged")
        merged[name] = AutoModelForCausalLM.from_pretrained(base / f"{name}-merged")
    x = torch.arange(24).view(2, 12)
    with torch.no_grad():
        wanted = merged["plain-lora"](input_ids=x).logits
        torch.testing.assert_close(merged["lora"](input_ids=x).logits, wanted, rtol=1e-3, atol=1e-3)


def assert_same_weights(found: Path, wanted: Path) -> None:
    ours, theirs = (load_file(each / "model.safetensors") for each in (found, wanted))
    assert ours.keys() == theirs.keys()
    for key, each in theirs.items():
        torch.testing.assert_close(ours[key], each, rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_trainers_own_optimizer_clips_accumulates_evaluates_saves_and_resumes_and_accelerate_saves_as_on_one_process(
    trained: Path,
) -> None:
    assert sum("eval_loss" in each for each in assert_alike(trained / "full", trained / "plain")) == 2
    assert_same_weights(trained / "full", trained / "plain")
    assert history(trained / "again") == history(trained / "full")
    full, again = ((trained / name / "model.safetensors").read_bytes() for name in ("full", "again"))
    assert full == again
    # Accelerate saves the weights that one process trains.
    assert_same_weights(trained / "accelerate", trained / "plain-accelerate")


@pytest.mark.daily("hugging face", 2)
def test_trainers_own_optimizer_clips_accumulates_and_evaluates_at_stage_3_as_on_one_process(base: Path) -> None:
    on_ranks(base, 2, [trainer("full3", 2, *FULL)])
    assert sum("eval_loss" in each for each in assert_alike(base / "full3", base / "plain")) == 2
    assert_same_weights(base / "full3", base / "plain")


def stock_and_ours(base: Path, name: str, stage: int, run: Callable[[str, str], Run], rel: float = 2e-5) -> None:
    """Run a script with stock DeepSpeed and with ours, by what it is to write and its config, and compare them."""
    off = json.loads((SCRIPTS / f"zero{stage}.json").read_text()) | {"fsmoe": {"enabled": False}}
    (base / "off.json").write_text(json.dumps(off))
    ours = run(name, f"--deepspeed={SCRIPTS}/zero{stage}.json")
    on_ranks(base, 2, [run(f"{name}-stock", "--deepspeed=off.json"), ours])
    assert_alike(base / name, base / f"{name}-stock", rel)


def of_trl(script: str, out: str, *more: str) -> Run:
    words = ("--max_length=64", "--bf16=false", "--gradient_checkpointing=false", "--per_device_train_batch_size=2")
    return (script, "--model_name_or_path=base", f"--output_dir={out}", "--max_steps=4", *words, *EVERYWHERE, *more)


@pytest.mark.daily("hugging face", 2)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("lora", [False, True])
def test_trl_trains_as_with_stock_deepspeed(stage: int, lora: bool, base: Path) -> None:
    # Beside one process the auxiliary loss differs, which each rank has of its own part of the batch.
    of_lora = ("--use_peft", "--lora_r=4", "--lora_target_modules", "q_proj", "v_proj") if lora else ()
    stock_and_ours(base, f"sft{stage}{lora}", stage, lambda out, config: of_trl("sft.py", out, config, *of_lora))


@sampled("stage", [2, 3])
@pytest.mark.long
def test_a_reference_that_trl_lets_follow_the_policy_is_that_of_stock(stage: int, base: Path) -> None:
    follows = ("--sync_ref_model=true", "--ref_model_sync_steps=2")
    stock_and_ours(base, f"dpo{stage}", stage, lambda out, config: of_trl("dpo.py", out, config, *follows))
    stock, ours = (torch.load(base / f"dpo{stage}{each}" / "reference.pt") for each in ("-stock", ""))
    assert ours.keys() == stock.keys()
    for name, each in stock.items():
        torch.testing.assert_close(ours[name], each, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.daily("hugging face", 2)
def test_bf16_is_trained_as_stock_deepspeed_trains_it(base: Path) -> None:
    stock_and_ours(base, "bf16", 2, lambda out, config: (*trainer(out, 2, "--bf16", stage=2), config), rel=2e-2)


@pytest.mark.daily("hugging face", 2)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("lora", ["attention", "experts"])
@pytest.mark.parametrize("reentrant", ["true", "false"])
def test_lora_with_checkpointing_trains_as_on_one_process(stage: int, lora: str, reentrant: str, base: Path) -> None:
    out = f"lora{stage}{lora}{reentrant}"
    kind = json.dumps({"use_reentrant": reentrant == "true"})
    more = (f"--lora={lora}", "--gradient_checkpointing", f"--gradient_checkpointing_kwargs={kind}")
    in_one_process(base, [trainer(f"{out}-plain", 1, *more, stage=None)])
    on_ranks(base, 2, [trainer(out, 2, *more, stage=stage)])
    assert_alike(base / out, base / f"{out}-plain")


@pytest.mark.daily("hugging face", 2)
def test_the_launcher_runs_an_untouched_script(base: Path) -> None:
    variables = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "examples" / "on_cpu")))}
    script, *arguments = trainer("launched", 2, "--max_grad_norm=0.1", "--gradient_accumulation_steps=2")
    launch(base, "--module", "ds_fsmoe.run", str(SCRIPTS / script), *arguments, **variables)
    assert_alike(base / "launched", base / "plain")
