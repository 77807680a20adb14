# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Hugging Face models go on with a script's own optimizer, adapters, offloading and parts left out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("peft")

from ds_fsmoe.checkpoint.loading import Relaid
from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart
from ds_fsmoe.checkpoint_files.pieces import Copies, Source
from tests.hf_families import model_of
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.test_hugging_face import ds_config, engine_of
from tests.test_hugging_face_files import train


class Job(NamedTuple):
    stage: int
    ep: int = 2
    kind: str = ""
    """Words of: lora, client, frozen (all experts), offload, buffers, bf16."""


class Load(NamedTuple):
    job: Job
    options: tuple[tuple[str, Any], ...] = ()


LAX, WEIGHTS = (("load_module_strict", False),), (("load_optimizer_states", False),)
MODULE = (("load_module_only", True),)
CASES: dict[str, tuple[Job, dict[str, Any], list[Load]]] = {
    "client 3": (Job(3, kind="client"), {}, [Load(Job(3, kind="client")), Load(Job(0, 1, "client"))]),
    "client 1": (Job(1, kind="client"), {}, [Load(Job(1, kind="client")), Load(Job(3, kind="client"))]),
    "client, experts frozen": (
        Job(2, kind="client frozen"),
        {},
        [Load(Job(2, kind="client frozen")), Load(Job(3, 1, "client frozen"))],
    ),
    "lora client, frozen left out": (
        Job(2, kind="lora client"),
        {"exclude_frozen_parameters": True},
        [Load(Job(2, kind="lora client"), LAX), Load(Job(3, 1, "lora client"), LAX)],
    ),
    "lora, frozen left out": (
        Job(3, kind="lora"),
        {"exclude_frozen_parameters": True},
        [Load(Job(3, kind="lora"), LAX), Load(Job(0, kind="lora"), LAX)],
    ),
    "lora 3": (Job(3, kind="lora"), {}, [Load(Job(3, kind="lora")), Load(Job(1, 1, "lora"))]),
    "offload 3": (Job(3, kind="offload"), {}, [Load(Job(3, kind="offload")), Load(Job(2, kind="offload"))]),
    "offload 2": (Job(2, kind="offload"), {}, [Load(Job(2, kind="offload")), Load(Job(3, kind="offload"))]),
    "buffers": (Job(2, kind="buffers"), {}, [Load(Job(3, kind="buffers")), Load(Job(2, kind="buffers"))]),
    "bf16 3": (Job(3, kind="bf16"), {}, [Load(Job(2, kind="bf16")), Load(Job(3, kind="bf16"))]),
    "weights of 3": (Job(3), {}, [Load(Job(3), WEIGHTS), Load(Job(2), MODULE), Load(Job(3, 1), WEIGHTS)]),
    # The same layout, but other groups of the optimizer: ZeRO 3 has the weights in their order.
    "weights in another order": (Job(3, kind="client"), {}, [Load(Job(3), WEIGHTS), Load(Job(3), MODULE)]),
    "weights of 2": (Job(2), {}, [Load(Job(3), MODULE), Load(Job(3, 1), WEIGHTS), Load(Job(2), WEIGHTS)]),
}
SAMPLE = {"lora client, frozen left out": [1], "client, experts frozen": [0], "weights in another order": [0]}
"""Those of every run of the tests, and which of their loads."""


def make(job: Job, scale: float = 1.0) -> Any:
    """An engine whose trained weights are times a scale, with several sub-groups and groups of the optimizer."""
    import ds_fsmoe

    model: Any = model_of("deepseek_v3" if "buffers" in job.kind else "qwen3_moe")
    if "lora" in job.kind:
        from peft import LoraConfig, get_peft_model

        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        lora = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=parameters, init_lora_weights=False)
        torch.manual_seed(0)
        model = get_peft_model(model, lora)
    if "frozen" in job.kind:
        for name, each in model.named_parameters():
            each.requires_grad_(".experts." not in name)
    # A script may give its optimizer what it has frozen, too.
    trained = [each for each in model.parameters() if each.requires_grad or "frozen" in job.kind]
    with torch.no_grad():
        for each in trained:
            each.mul_(scale)
    config = ds_config(job.stage, ep_size=job.ep)
    config["bf16"] = {"enabled": "bf16" in job.kind}
    config["zero_force_ds_cpu_optimizer"] = False
    if job.stage == 3:
        config["zero_optimization"]["sub_group_size"] = 3000
    if "offload" in job.kind:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    if "client" not in job.kind:
        return engine_of(model, config, trained)
    del config["optimizer"]
    flat = [each for each in trained if each.dim() == 1]
    groups = [{"params": [each for each in trained if each.dim() > 1]}, {"params": flat, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    return ds_fsmoe.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]


def save_and_load(
    rank: int, world_size: int, name: str, loads: list[Load], folder: str
) -> tuple[list[float], list[list[float]]]:
    """The losses of the two steps after a save; the same after each load of it into an engine that is elsewhere."""
    job, options, _ = CASES[name]
    engine = make(job)
    train(engine, 0, 2)
    engine.save_checkpoint(folder, **options)
    went_on, found = train(engine, 2, 2), []
    engine.destroy()
    for load in loads:
        engine = make(load.job, scale=1.5)
        train(engine, 7, 1)
        engine.load_checkpoint(folder, **dict(load.options))
        found.append(train(engine, 2, 2))
        engine.destroy()
    return went_on, found


@sampled(
    ("name", "which"),
    [*SAMPLE.items(), *((name, [*range(len(loads))]) for name, (_, _, loads) in CASES.items())],
    kept=range(len(SAMPLE)),
)
def test_what_was_saved_goes_on(name: str, which: list[int], tmp_path: Path) -> None:
    job, _, all_loads = CASES[name]
    loads = [all_loads[each] for each in which]
    folder = tmp_path / "saved"
    went_on, found = run_on_ranks(save_and_load, 2, tmp_path, name, loads, str(folder))[0]
    for load, losses in zip(loads, found, strict=True):
        if load.options in (WEIGHTS, MODULE):
            # The first step begins from the weights that were saved; the second knows of no moments.
            assert losses[0] == pytest.approx(went_on[0], rel=1e-6), load
        elif load.job == job:
            assert losses == went_on, load
        else:
            assert losses == pytest.approx(went_on, rel=1e-5), load


def test_a_rank_s_part_of_a_checkpoint_of_another_layout_does_not_keep_the_whole_alive() -> None:
    relaid, name = Relaid.__new__(Relaid), "experts.down_proj"
    relaid._parts, relaid._live = {name: ExpertPart("stacked", 4, 2, 1)}, {name: torch.zeros(2, 3)}
    relaid._whole = SimpleNamespace(part_shape=lambda name, part: part.part_shape((4, 3)))
    relaid._sharper, relaid._rounded, relaid._copies = False, set(), Copies()
    saved = torch.arange(12.0)
    relaid._sources = lambda name, item, first, size: (Source("file", lambda: saved, 6 + at, 3) for at in (0, 3))
    found = relaid._own(name)
    relaid._copies.run()
    assert found.tolist() == [[6.0, 7.0, 8.0], [9.0, 10.0, 11.0]]
    assert found.untyped_storage().nbytes() == found.nbytes


def save_as_auto_ep(folder: Path) -> None:
    """Write what AutoEP of DeepSpeed 0.19.8 writes with transformers 5.21, with which it runs."""
    weights = model_of("qwen3_moe").state_dict()
    place = folder / "global_step1"
    place.mkdir(parents=True)
    layers = [{"moe_layer_id": each, "module_path": f"model.layers.{each}.mlp"} for each in range(2)]
    module = {name: each for name, each in weights.items() if ".mlp." not in name}
    for layer in layers:
        path, prefix = layer["module_path"], f"{layer['module_path']}.experts"
        up, down = weights[f"{prefix}.gate_up_proj"], weights[f"{prefix}.down_proj"]
        layer |= {"expert_key_prefix": prefix, "num_experts": len(up)}
        for name in ("router", "gate"):
            module[f"{path}.{name}.gate.weight"] = weights[f"{path}.gate.weight"]
        for number, (w1, w3) in enumerate(each.chunk(2) for each in up):
            kinds = {"w1": w1, "w2": down[number], "w3": w3}
            state = {f"{prefix}.{kind}.{number}": each.clone() for kind, each in kinds.items()}
            file = f"layer_{layer['moe_layer_id']}_expert_{number}_mp_rank_00_model_states.pt"
            torch.save(state, place / file)
    counts = {"global_steps": 1, "global_samples": 2, "skipped_steps": 0, "dp_world_size": 2, "mp_world_size": 1}
    others = {"optimizer": None, "lr_scheduler": None, "num_experts": [4, 4], "ds_autoep_layers": layers}
    torch.save({"module": module} | counts | others, place / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text("global_step1")


def load_auto_ep(rank: int, world_size: int, folder: str) -> list[str]:
    import ds_fsmoe

    wanted, said = model_of("qwen3_moe").state_dict(), []
    for stage in (1, 3):
        engine = make(Job(stage), scale=1.5)
        engine.load_checkpoint(folder, load_optimizer_states=False)
        found = ds_fsmoe.whole_state_dict(engine)
        if found is not None:
            said += [f"stage {stage}: {name}" for name, each in wanted.items() if not torch.equal(found[name], each)]
        engine.destroy()
    return said


def test_weights_of_auto_ep_are_a_warm_start(tmp_path: Path) -> None:
    save_as_auto_ep(tmp_path / "saved")
    assert run_on_ranks(load_auto_ep, 2, tmp_path, str(tmp_path / "saved")) == [[], []]
