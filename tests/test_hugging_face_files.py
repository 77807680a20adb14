# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Hugging Face models go on to the bit, move to other layouts, and give whole weights: with a script's
own optimizer, adapters, offloading, frozen parts and parts left out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

pytest.importorskip("peft")

from ds_fsmoe.checkpoint.loading import Relaid
from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart
from ds_fsmoe.checkpoint_files.pieces import Copies, Source
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.checkpoint_files.whole import Whole
from ds_fsmoe.cli import main
from tests.hf_families import batch, model_of
from tests.ranks import run_on_ranks
from tests.samples import draw, sampled
from tests.sgd_engines import ds_config, engine_of

SEQUENCES = 4
"""Of all ranks, in every step."""


class Layout(NamedTuple):
    world: int
    ep: int
    stage: int
    dtype: str = "float32"
    family: str = "olmoe"
    frozen: str = ""
    """What is not trained: parameters with this in their names."""
    esp: int = 1
    kind: str = ""
    """Words of: lora, client (an optimizer and a schedule of the script's own), offload."""

    @property
    def name(self) -> str:
        return "-".join(map(str, self))


def make(layout: Layout, scale: float = 1.0) -> Any:
    """An engine whose trained weights are those of the model, times a scale: what is loaded must replace them."""
    import ds_fsmoe

    model: Any = model_of(layout.family)
    if "lora" in layout.kind:
        from peft import LoraConfig, get_peft_model

        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        lora = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=parameters, init_lora_weights=False)
        torch.manual_seed(0)
        model = get_peft_model(model, lora)
    for name, each in model.named_parameters():
        if layout.frozen and layout.frozen in name:
            each.requires_grad_(False)
    # A script may give its optimizer what it has frozen, too.
    trained = [each for each in model.parameters() if each.requires_grad or layout.frozen]
    with torch.no_grad():
        for each in trained:
            each.mul_(scale)
    cut = {"expert_tensor_parallel_size": layout.esp} if layout.esp > 1 else {}
    config = ds_config(layout.stage, ep_size=layout.ep, **cut)
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    config["bf16"] = {"enabled": layout.dtype == "bfloat16"}
    if layout.stage == 3:
        config["zero_optimization"]["sub_group_size"] = 3000  # several of them
    if "offload" in layout.kind:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    if "client" not in layout.kind:
        return engine_of(model, config, trained)
    del config["optimizer"]
    flat = [each for each in trained if each.dim() == 1]
    groups = [{"params": [each for each in trained if each.dim() > 1]}, {"params": flat, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    return ds_fsmoe.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]


def train(engine: Any, first: int, steps: int) -> list[float]:
    """Train some steps on the same sequences whatever the layout; the losses over all ranks."""
    losses = []
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(first, first + steps):
        x = batch(step, SEQUENCES).view(world, SEQUENCES // world, -1)[rank]
        loss = engine(input_ids=x, labels=x).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone().float()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses


# ---- a run goes on

Options = dict[str, bool]
Case = tuple[Layout, Options, list[tuple[Layout, Options]]]
"""What is saved and how, and into what it is loaded and how."""
LAX, MODULE = {"load_module_strict": False}, {"load_module_only": True}
WEIGHTS = {"load_optimizer_states": False, "load_lr_scheduler_states": False}
PARTLY = {"family": "gpt_oss", "frozen": "layers.0."}
TWO = [
    *(Layout(2, 2, 0), Layout(2, 2, 2), Layout(2, 2, 3), Layout(2, 1, 3), Layout(2, 2, 3, "bfloat16")),
    *(Layout(2, 2, 2, **PARTLY), Layout(2, 2, 3, **PARTLY), Layout(2, 1, 2, family="gpt_oss", esp=2)),
]
FOUR = [
    *(Layout(4, 2, 0), Layout(4, 4, 1), Layout(4, 2, 3), Layout(4, 4, 2, "bfloat16")),
    *(Layout(4, 2, 2, **PARTLY), Layout(4, 2, 3, **PARTLY), Layout(4, 2, 1, family="gpt_oss", esp=2)),
    Layout(4, 4, 3, family="gpt_oss"),
]
# To other numbers of ranks: to four in one or two ways, and to one.
TARGETS = ((1,), (2,), (0,), (2,), (3,), (5, 4), (4, 5), (6, 7))


def of_qwen(stage: int, ep: int = 2, kind: str = "", **more: Any) -> Layout:
    return Layout(2, ep, stage, **({"family": "qwen3_moe", "kind": kind} | more))


def case_of(source: Layout, *targets: Layout, options: Options | None = None, **loaded: bool) -> Case:
    return source, options or {}, [(each, loaded) for each in (source, *targets)]


FROZEN, BUFFERS, HALF = {"frozen": ".experts."}, {"family": "deepseek_v3"}, {"dtype": "bfloat16"}
LEFT_OUT = {"exclude_frozen_parameters": True}
CASES: dict[str, Case] = {
    # The only one in which a schedule of the learning rate moves.
    "lora client, frozen left out": (of_qwen(2, kind="lora client"), LEFT_OUT, [(of_qwen(3, 1, "lora client"), LAX)]),
    "lora client, frozen left out, in place": case_of(of_qwen(2, kind="lora client"), options=LEFT_OUT, **LAX),
    "lora, frozen left out": case_of(of_qwen(3, kind="lora"), of_qwen(0, kind="lora"), options=LEFT_OUT, **LAX),
    "lora": case_of(of_qwen(3, kind="lora"), of_qwen(1, 1, "lora")),
    "client 3": case_of(of_qwen(3, kind="client"), of_qwen(0, 1, "client")),
    "client 1": case_of(of_qwen(1, kind="client"), of_qwen(3, kind="client")),
    "client, experts frozen": case_of(of_qwen(2, kind="client", **FROZEN), of_qwen(3, 1, "client", **FROZEN)),
    "offload 3": case_of(of_qwen(3, kind="offload"), of_qwen(2, kind="offload")),
    "offload 2": case_of(of_qwen(2, kind="offload"), of_qwen(3, kind="offload")),
    # ZeRO 3 saves buffers whole, and all else in pieces.
    "buffers": case_of(of_qwen(3, **BUFFERS), of_qwen(2, **BUFFERS)),
    "bf16 3": case_of(of_qwen(3, **HALF), of_qwen(2, **HALF)),
    "weights of 3": (of_qwen(3), {}, [(of_qwen(3), WEIGHTS), (of_qwen(2), MODULE), (of_qwen(3, 1), WEIGHTS)]),
    # The same layout, but other groups of the optimizer: ZeRO 3 has the weights in their order.
    "weights in another order": (of_qwen(3, kind="client"), {}, [(of_qwen(3), WEIGHTS), (of_qwen(3), MODULE)]),
    "weights of 2": (of_qwen(2), {}, [(of_qwen(3), MODULE), (of_qwen(3, 1), WEIGHTS), (of_qwen(2), WEIGHTS)]),
    **{
        f"{source.name} over ranks": case_of(
            source, *(FOUR[each] for each in TARGETS[at]), Layout(1, 1, at % 4, *source[3:6])
        )
        for at, source in enumerate(TWO)
    },
}


def save(rank: int, world_size: int, layouts: list[Layout], options: Options, folder: str) -> dict[str, list[float]]:
    """Save after two steps; the losses of the next two."""
    found = {}
    for layout in layouts:
        engine = make(layout)
        train(engine, 0, 2)
        engine.save_checkpoint(f"{folder}/{layout.name}", client_state={"seen": 17}, **options)
        if layout in TWO:
            assert engine.save_16bit_model(f"{folder}/{layout.name}-16bit")
        found[layout.name] = train(engine, 2, 2)
        engine.destroy()
    return found


def save_and_load(
    rank: int, world_size: int, source: Layout, options: Options, loads: list[tuple[Layout, Options]], folder: str
) -> tuple[list[float], list[list[float]]]:
    went_on = save(rank, world_size, [source], options, folder)[source.name]
    return went_on, load(rank, world_size, loads, f"{folder}/{source.name}")


def load(rank: int, world_size: int, loads: list[tuple[Layout, Options]], folder: str) -> list[list[float]]:
    """Load into engines that are elsewhere; the losses of the next two steps."""
    found = []
    for layout, options in loads:
        engine = make(layout, scale=1.5)
        train(engine, 7, 1)
        _, client_state = engine.load_checkpoint(folder, **options)
        assert options == MODULE or (client_state["seen"], engine.global_steps) == (17, 2)
        found.append(train(engine, 2, 2))
        engine.destroy()
    return found


@sampled("name", list(CASES), kept=[list(CASES).index("buffers")])
def test_a_run_goes_on_in_its_own_layout_to_the_bit_and_in_any_other(name: str, tmp_path: Path) -> None:
    source, options, loads = CASES[name]
    here = [each for each in loads if each[0].world == 2]
    went_on, found = run_on_ranks(save_and_load, 2, tmp_path / "ranks", source, options, here, str(tmp_path))[0]
    after = list(zip(here, found, strict=True))
    for world in sorted({target.world for target, _ in loads} - {2}):
        there = [each for each in loads if each[0].world == world]
        found = run_on_ranks(load, world, tmp_path / f"ranks{world}", there, str(tmp_path / source.name))[0]
        after += zip(there, found, strict=True)
    for (target, how), losses in after:
        if how in (WEIGHTS, MODULE):
            # The first step begins from the weights that were saved; the second knows of no moments.
            assert losses[0] == pytest.approx(went_on[0], rel=1e-6), target
        elif target == source:
            assert losses == went_on, target
        else:
            rel = 1e-2 if target.dtype == "bfloat16" and target.world != source.world else 1e-5
            assert losses == pytest.approx(went_on, rel=rel), target


# ---- whole weights


@pytest.mark.long
@sampled("layouts", [draw("layouts of two ranks", TWO, 2), TWO], kept=[0], drawn=0, ids=["a sample", "all"])
def test_weights_in_one_file_and_converted_ones_are_those_of_the_checkpoint_in_the_models_own_form(
    layouts: list[Layout], tmp_path: Path
) -> None:
    run_on_ranks(save, 2, tmp_path / "ranks", layouts, {}, str(tmp_path))
    for layout in layouts:
        saved, out = tmp_path / layout.name, tmp_path / f"converted {layout.name}"
        weights = torch.load(tmp_path / f"{layout.name}-16bit" / "pytorch_model.bin", weights_only=True)
        whole, model = Whole(saved / "global_step2"), model_of(layout.family).to(getattr(torch, layout.dtype))
        assert list(weights) == list(model.state_dict())
        assert set(whole.names()) == set(weights)
        assert [name for name, each in weights.items() if not torch.equal(whole.weights(name), each)] == []
        # What convert writes is what save_pretrained of the whole model writes.
        model.load_state_dict(weights)
        model.save_pretrained(out / "theirs")
        assert main(["convert", str(saved), str(out / "ours"), "--to", "huggingface"]) == 0
        theirs, ours = (load_file(out / each / "model.safetensors") for each in ("theirs", "ours"))
        assert {name: each.dtype for name, each in ours.items()} == {name: each.dtype for name, each in theirs.items()}
        assert [name for name, each in theirs.items() if not torch.equal(ours[name], each)] == []
        loaded, said = type(model).from_pretrained(out / "ours", output_loading_info=True)
        assert not said["missing_keys"]
        assert [name for name, each in weights.items() if not torch.equal(loaded.state_dict()[name], each)] == []
        # From the folder of one tag, in a type that is asked for, which the config names then.
        asked = "float32" if layout.dtype == "bfloat16" else "bfloat16"
        arguments = [str(saved / "global_step2"), str(out / asked), "--to", "huggingface", "--dtype", asked]
        assert main(["convert", *arguments]) == 0
        loaded = type(model).from_pretrained(out / asked)
        assert {each.dtype for each in loaded.parameters()} == {getattr(torch, asked)}
        for name, each in loaded.named_parameters():
            assert torch.equal(each, whole.part(name, "fp32").to(each.dtype)), name


# ---- what others have saved


def save_stock(rank: int, world_size: int, folder: str, stages: list[int]) -> None:
    """Save with DeepSpeed alone, with nothing of ours, after two steps."""
    import deepspeed

    for stage in stages:
        model = model_of("olmoe")
        model.model.layers[0].mlp.experts.requires_grad_(False)
        config = {key: each for key, each in ds_config(stage).items() if key != "fsmoe"}
        engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
        train(engine, 0, 2)
        engine.save_checkpoint(f"{folder}/stock{stage}", client_state={"seen": 17})
        with deepspeed.zero.GatheredParameters(list(model.parameters()) if stage == 3 else []):
            if rank == 0:
                torch.save(model.state_dict(), f"{folder}/stock{stage}.pt")
        engine.destroy()


def load_stock(rank: int, world_size: int, folder: str, stages: list[tuple[int, int]]) -> list[str]:
    """What differs, in whole weights, after a warm start from what stock DeepSpeed has saved."""
    import ds_fsmoe

    said = []
    for source, target in stages:
        layout = Layout(4, 2, target)
        engine = make(layout, scale=1.5)
        with pytest.raises(CheckpointError, match="load_optimizer_states=False"):
            engine.load_checkpoint(f"{folder}/stock{source}")
        _, client_state = engine.load_checkpoint(f"{folder}/stock{source}", load_optimizer_states=False)
        if (client_state["seen"], engine.global_steps) != (17, 2):
            said.append(f"{source} to {target}: {client_state['seen']}, {engine.global_steps}")
        weights = ds_fsmoe.whole_state_dict(engine)
        if rank == 0:
            wanted = torch.load(f"{folder}/stock{source}.pt", weights_only=True)
            said += [f"{source} to {target}: {each}" for each in wanted if not torch.equal(wanted[each], weights[each])]
        engine.destroy()
    return said


STAGES = [(3, 2), (0, 0), (0, 3), (2, 2), (3, 3), (3, 1)]


@pytest.mark.long
@sampled("stages", [draw("stages of a warm start", STAGES, 1), STAGES], kept=[0], drawn=0, ids=["a sample", "all"])
def test_weights_of_stock_deepspeed_are_a_warm_start_at_every_stage(
    stages: list[tuple[int, int]], tmp_path: Path
) -> None:
    folders = tmp_path / "first", tmp_path / "second"
    for each in folders:
        each.mkdir()
    run_on_ranks(save_stock, 2, folders[0], str(tmp_path), sorted({source for source, _ in stages}))
    found = run_on_ranks(load_stock, 4, folders[1], str(tmp_path), stages)
    assert [each for of_rank in found for each in of_rank] == []


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
        engine = make(Layout(2, 2, stage, family="qwen3_moe"), scale=1.5)
        engine.load_checkpoint(folder, load_optimizer_states=False)
        found = ds_fsmoe.whole_state_dict(engine)
        if found is not None:
            said += [f"stage {stage}: {name}" for name, each in wanted.items() if not torch.equal(found[name], each)]
        engine.destroy()
    return said


def test_weights_of_auto_ep_are_a_warm_start(tmp_path: Path) -> None:
    save_as_auto_ep(tmp_path / "saved")
    assert run_on_ranks(load_auto_ep, 2, tmp_path, str(tmp_path / "saved")) == [[], []]


# ---- a checkpoint of another model is refused on all ranks, before anything of the model has changed

# What the model has otherwise than the one that was saved (a smaller one could take the beginning of each piece), how
# it is loaded, and what the error says.
WIDER = r"experts.gate_up_proj has shape \[4, 48, 32\] there"
OTHERS: list[tuple[str, dict[str, int], dict[str, bool], str]] = [
    ("qwen3_moe", {"moe_intermediate_size": 16}, {}, rf"{WIDER} and \[4, 32, 32\]"),
    ("qwen3_moe", {"moe_intermediate_size": 16}, WEIGHTS, WIDER),
    ("qwen3_moe", {"moe_intermediate_size": 32}, WEIGHTS | LAX, WIDER),
    ("qwen3_moe", {"vocab_size": 64}, MODULE, r"embed_tokens.weight has shape \[128, 32\] there and \[64, 32\] here"),
    ("qwen3_moe", {"num_experts": 8}, WEIGHTS, "4 experts in model.layers.0.mlp.experts.gate_up_proj, and the model"),
    ("qwen3_moe", {"num_hidden_layers": 3}, {}, "parameters with optimizer states in the job only: model.layers.2"),
    ("qwen3_moe", {"num_hidden_layers": 3}, WEIGHTS, "model.layers.2.* is here and not there"),
    ("qwen3_moe", {"num_hidden_layers": 1}, MODULE, "model.layers.1.* is there and not here"),
    ("olmoe", {}, {}, "was saved from another model: "),
]


def other(family: str, sizes: dict[str, int], stage: int, seed: int = 1) -> Any:
    ds = ds_config(stage, ep_size=2)
    ds["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    return engine_of(model_of(family, seed, **sizes), ds)


def load_others(rank: int, world_size: int, folder: str, saved: int, stage: int, others: list[Any]) -> list[str]:
    import ds_fsmoe

    said = []
    engine = other("qwen3_moe", {}, saved, seed=0)
    engine.save_checkpoint(folder)
    engine.destroy()
    for family, sizes, options, error in others:
        engine = other(family, sizes, stage)
        before = ds_fsmoe.whole_state_dict(engine)
        with pytest.raises(CheckpointError, match=error):
            engine.load_checkpoint(folder, **options)
        after = ds_fsmoe.whole_state_dict(engine)
        changed = [] if before is None else [name for name in before if not torch.equal(before[name], after[name])]
        said += [f"{family} {sizes} {options} from {saved} to {stage}: {each}" for each in changed]
        engine.destroy()
    return said


PAIRS = [(3, 3), (3, 0), (2, 2), (2, 3), (0, 0), (0, 3)]


# What is drawn is another third of the models at each pair of stages.
@sampled(("saved", "stage", "third"), [(*stages, third) for stages in PAIRS for third in range(3)])
def test_a_checkpoint_of_another_model_changes_nothing(saved: int, stage: int, third: int, tmp_path: Path) -> None:
    found = run_on_ranks(load_others, 2, tmp_path / "ranks", str(tmp_path / "saved"), saved, stage, OTHERS[third::3])
    assert [each for of_rank in found for each in of_rank] == []


# ---- memory


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
