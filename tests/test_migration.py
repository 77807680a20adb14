# SPDX-License-Identifier: Apache-2.0
"""The scripts that the page of migration changes: both forms run, and train alike where the page says so."""

from __future__ import annotations

import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_fsmoe.config.reading import read_block
from tests.hurry import hurry
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.scripts import ROOT, on_ranks

EXAMPLES = ROOT / "examples" / "migration"
PAGE = (ROOT / "docs" / "migration.md").read_text()
SECTION = re.compile(r"(?ms)^## From ([^\n]+)\n(.*?)(?=^## |\Z)")
SECTIONS = dict(SECTION.findall(PAGE))
WHOLE = dict(SECTION.findall((EXAMPLES / "README.md").read_text()))


def diff_in(text: str) -> list[str]:
    (diff,) = re.findall(r"(?ms)^```diff\n(.*?)^```$", text)
    lines = diff.splitlines()
    assert {line[:1] for line in lines} <= {"", " ", "-", "+"}
    return lines


def forms(name: str) -> tuple[str, str]:
    """The whole script of a section, before and after the change."""
    lines = diff_in(WHOLE[name])
    before, after = ("\n".join(line[1:] for line in lines if line[:1] != sign) + "\n" for sign in ("+", "-"))
    return before, after


def losses(folder: Path, script: str, **variables: str) -> Mapping[int, list[float]]:
    """What each rank has printed as its losses."""
    folder.mkdir()
    (folder / "train.py").write_text(script)
    printed = on_ranks(folder, str(folder / "train.py"), **variables)
    found: dict[int, list[float]] = {}
    for rank, loss in re.findall(r"(?m)^loss (\d) (\S+)$", printed):
        found.setdefault(int(rank), []).append(float(loss))
    assert {rank: len(each) for rank, each in found.items()} == {0: 5, 1: 5}, printed[-2000:]
    return found


def test_each_section_with_a_script_has_it_whole_among_the_examples_and_says_what_was_run() -> None:
    assert list(SECTIONS) == ["DeepSpeed-MoE", "AutoEP", "Tutel", "Megatron"]
    assert list(WHOLE) == ["DeepSpeed-MoE", "AutoEP", "Tutel"]
    for name, text in SECTIONS.items():
        assert len(re.findall(r"(?m)^\| [^|]+ \| `?(?:ds_)?fsmoe`? \|$", text)) == 1
        assert text.count("\n**Numbers**") == text.count("\nTested: ") == 1
        assert ("was not run" in " ".join(text.split())) == (name in ("Tutel", "Megatron"))


@pytest.mark.parametrize("name", WHOLE)
def test_a_script_changes_in_the_lines_that_the_page_shows_and_both_forms_are_python(name: str) -> None:
    before, after = forms(name)
    for text in (before, after):
        compile(text, name, "exec")
    assert ("ds_fsmoe" in before, "ds_fsmoe" in after) == (False, True)
    whole = iter(diff_in(WHOLE[name]))
    assert [line for line in diff_in(SECTIONS[name]) if line not in whole] == [], "in its order"


def test_torchrun_takes_the_command_in_place_of_megatrons() -> None:
    from torch.distributed.run import get_args_parser

    (command,) = (line[1:] for line in diff_in(SECTIONS["Megatron"]) if line[:1] == "+")
    program, *words = command.split()
    assert program == "torchrun"
    assert get_args_parser().parse_args(words).training_script == "ds_fsmoe.run"


@sampled(("name", "rel"), [("DeepSpeed-MoE", 0.0), ("AutoEP", 1e-5), ("Tutel", None)])
def test_a_script_trains_as_it_did_before_where_what_it_used_is_there(
    name: str, rel: float | None, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    before, after = forms(name)
    ours = losses(tmp_path / "after", after)
    if rel is not None:
        assert losses(tmp_path / "before", before) == {
            rank: pytest.approx(each, rel=rel, abs=0.0) for rank, each in ours.items()
        }
    assert ours[0] != ours[1]
    assert name == "AutoEP" or ours[0][-1] < ours[0][0]


def test_weights_of_a_tutel_layer_compute_its_formula_in_deepspeeds() -> None:
    from deepspeed.moe.experts import Experts

    page: dict[str, Any] = runpy.run_path(str(EXAMPLES / "load_tutel.py"))
    M, H, E = 6, 10, 3
    torch.manual_seed(0)
    # As in tutel/experts/ffn.py.
    shapes = {"fc1_w": (E, H, M), "fc1_bias": (E, H), "fc2_w": (E, H, M), "fc2_bias": (E, M)}
    state = {f"moe.experts.batched_{name}": torch.randn(shape) for name, shape in shapes.items()}
    state["moe.gates.0.wg.weight"] = torch.randn(E, M)
    ffn = torch.nn.Sequential(torch.nn.Linear(M, H), torch.nn.ReLU(), torch.nn.Linear(H, M))
    gate = SimpleNamespace(wg=torch.nn.Linear(M, E, bias=False))
    moe = SimpleNamespace(deepspeed_moe=SimpleNamespace(gate=gate, experts=Experts(ffn, E)))
    page["load_tutel"](moe, state, prefix="moe.")
    x_ECM = torch.randn(E, 4, M)
    w1, b1, w2, b2 = (state[f"moe.experts.batched_{name}"] for name in shapes)
    hidden = torch.relu(torch.einsum("ecm,ehm->ech", x_ECM, w1) + b1[:, None])
    theirs = torch.einsum("ech,ehm->ecm", hidden, w2) + b2[:, None]
    experts = moe.deepspeed_moe.experts.deepspeed_experts
    ours = [expert(x) for expert, x in zip(experts, x_ECM, strict=True)]
    torch.testing.assert_close(torch.stack(ours), theirs)
    assert torch.equal(gate.wg.weight, state["moe.gates.0.wg.weight"])


def test_gates_and_options_in_the_table_of_megatron_are_ones_that_the_block_takes() -> None:
    mixtral = {"top_k": 2, "capacity_factor": 1.25, "drop_policy": "position", "z_loss_factor": 0.1}
    deepseek = {"num_groups": 4, "kept_groups": 2, "routed_scaling_factor": 2.5, "bias_update_speed": 1e-3}
    gates = {"mixtral": mixtral, "qwen": {"top_k": 2}, "deepseek": deepseek, "switch": {"jitter": 0.01}}
    for name, options in (gates | {"xmoe": {}, "gshard": {}}).items():
        read_block({"fsmoe": {"enabled": True, "gate": {"type": name, **options}}})
    for word in (*deepseek, "jitter", "z_loss_factor"):
        assert f"`{word}`" in SECTIONS["Megatron"]


def norms_of_both(rank: int, world_size: int) -> None:
    import deepspeed
    from deepspeed.moe.layer import MoE
    from deepspeed.runtime import engine as of_stock

    import ds_fsmoe

    hurry()
    norms: list[float] = []
    clip = of_stock.clip_grad_norm_
    # Stock keeps the norm by which it clips to itself.
    of_stock.clip_grad_norm_ = lambda *args, **kwargs: norms.append(float(clip(*args, **kwargs)))
    for ep_size, is_ours in ((1, False), (2, False), (2, True)):
        torch.manual_seed(0)
        ffn = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
        moe = MoE(8, ffn, num_experts=2, ep_size=ep_size, k=1, use_rts=False, drop_tokens=False)
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        config["fsmoe"] = {"enabled": is_ours, "autotune": False} if is_ours else {"enabled": False}
        initialize = ds_fsmoe.initialize if is_ours else deepspeed.initialize
        engine, *_ = initialize(model=moe, model_parameters=moe.parameters(), config=config)
        torch.manual_seed(rank)
        y, aux_loss, _ = engine(torch.randn(16, 8))
        engine.backward(y.square().mean() + aux_loss)
        engine.step()
        norms += [float(engine.get_global_grad_norm())] if is_ours else []
        engine.destroy()
    whole, stock, ours = norms
    assert ours == pytest.approx(whole, rel=1e-5)
    assert abs(stock - whole) > 1e-3 * whole


def test_without_zero_stocks_norm_depends_on_ep_size_and_ours_is_that_of_one(tmp_path: Path) -> None:
    run_on_ranks(norms_of_both, 2, tmp_path)
