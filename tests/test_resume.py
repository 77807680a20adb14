# SPDX-License-Identifier: Apache-2.0
"""A run that was stopped goes on to the bit; a checkpoint that cannot be trusted is an error on every rank."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_fsmoe.checkpoint_files.manifest import sum_of
from tests.hurry import hurry
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.small_model import Case, SmallModel, batch

pytestmark = pytest.mark.long

BEFORE, AFTER = 3, 2
CUT = {"enabled": True, "pipeline_degree": {"forward": 2, "backward": 3}}
CASES = [
    (Case(2, 0, "fp32", 1, 2, True), CUT),
    (Case(2, 1, "fp32", 2, 1, True), CUT),
    (Case(2, 2, "bf16", 1, 2, False), CUT),
    (Case(2, 0, "fp32", 1, 2, True), CUT | {"gate": {"type": "deepseek", "k": 2, "bias_update_speed": 0.1}}),
    (Case(2, 1, "bf16", 1, 2, True), {"enabled": True, "gate": {"type": "gshard", "k": 2, "noise": True}}),
]


class WithDropout(nn.Module):
    """Draws from torch's generator in every forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.inner(x), 0.2, self.training)


def make(rank: int, case: Case, block: dict[str, Any], scale: float = 1.0) -> Any:
    import ds_fsmoe

    torch.manual_seed(rank)
    model = SmallModel(case, rank)
    model.first = WithDropout(model.first)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    blocks: dict[str, Any] = {"optimizer": {"type": "Adam", "params": {"lr": 0.02, "torch_adam": True}}}
    blocks["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 20}}
    config = case.ds_config(fsmoe=block, **blocks)
    return ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def train(engine: Any, rank: int, case: Case, first: int, steps: int) -> list[float]:
    """No seed is set: what is drawn follows from what was drawn before."""
    dtype, losses = next(engine.module.parameters()).dtype, []
    for step in range(first * case.accumulation, (first + steps) * case.accumulation):
        loss, _ = engine(*batch(step, rank, dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def stop_and_go_on(rank: int, world_size: int, numbers: list[int], folder: str) -> list[str]:
    hurry()
    found = []
    for number in numbers:
        case, block = CASES[number]
        place = f"{folder}/{number}"
        engine = make(rank, case, block)
        train(engine, rank, case, 0, BEFORE)
        engine.save_checkpoint(place, client_state={"mine": 7})
        expected = train(engine, rank, case, BEFORE, AFTER)
        engine.destroy()
        engine = make(rank, case, block, scale=0.3)
        path, state = engine.load_checkpoint(place)
        assert path is not None
        assert state["mine"] == 7
        if train(engine, rank, case, BEFORE, AFTER) != expected:
            found.append(f"case {number}")
        engine.destroy()
    return found


# In the sample every stage, both precisions, and gates that remember and that draw.
@sampled("numbers", [[2, 3, 4], [*range(len(CASES))]], kept=[0], ids=["a sample", "all"])
def test_losses_after_a_resume_are_those_of_the_run_that_went_on(numbers: list[int], tmp_path: Path) -> None:
    for found in run_on_ranks(stop_and_go_on, 2, tmp_path, numbers, str(tmp_path / "saved")):
        assert not found


def tuned_and_resumed(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    hurry()
    case = Case(2, 0, "fp32", 1, 2, True, expert="gpt")
    block = {"enabled": True, "autotune": {"enabled": True, "trials": 1}, "pipeline_degree": {"max": 3}}
    engine = make(rank, case, block)
    early = f"{folder}/early"
    train(engine, rank, case, 0, 1)
    engine.save_checkpoint(early)
    train(engine, rank, case, 1, 30)
    assert engine.fsmoe.autotune.trials is None
    engine.save_checkpoint(folder)
    plans = dict(engine.fsmoe.facts())
    expected = train(engine, rank, case, 31, AFTER)
    gradients = engine.fsmoe.reduction.reducer.plan
    engine.destroy()

    engine = make(rank, case, block, scale=0.3)
    engine.load_checkpoint(folder)
    same = dict(engine.fsmoe.facts()) == plans and engine.fsmoe.reduction.reducer.plan == gradients
    losses = train(engine, rank, case, 31, AFTER)
    measured = engine.fsmoe.autotune.result.num_measured
    engine.destroy()

    engine = make(rank, case, block)
    engine.load_checkpoint(early)
    train(engine, rank, case, 1, 4)
    measured_early = engine.fsmoe.autotune.result.num_measured
    engine.destroy()
    return {"same": same, "equal": losses == expected, "measured": measured, "early": measured_early}


def test_plans_are_taken_from_the_checkpoint_and_not_measured_again(tmp_path: Path) -> None:
    for found in run_on_ranks(tuned_and_resumed, 2, tmp_path, str(tmp_path / "saved")):
        assert found["same"]
        assert found["equal"]
        assert found["measured"] == 0
        # Saved before there was a plan, it has to be made.
        assert found["early"] > 0


DAMAGES: dict[str, Any] = {
    "generator of torch": lambda state: state["random"].update(torch=torch.zeros(3, dtype=torch.uint8)),
    # Of the three, torch's are set last: those before must not be either.
    "generator of numpy": lambda state: state["random"]["numpy"].update(keys=torch.zeros(3, dtype=torch.int64)),
    "generator of Python": lambda state: state["random"].pop("python"),
    "format": lambda state: state.update(format=99),
    "plans": lambda state: state.update(plans='{"layers": {}}'),
}


def refused(rank: int, world_size: int, folder: str) -> dict[str, str]:
    from ds_fsmoe.checkpoint_files.tags import CheckpointError

    hurry()
    case, block = CASES[0]
    engine = make(rank, case, block)
    train(engine, rank, case, 0, 2)
    engine.save_checkpoint(folder, "good")
    engine.save_checkpoint(folder, "bad")
    place, said = Path(folder) / "bad", {}
    expert = next(iter(sorted(place.glob("layer_*_expert_*"))))
    whole = expert.read_bytes()

    def attempt(name: str, change: Any) -> None:
        torch.distributed.barrier()
        if rank == 0:
            change()
        torch.distributed.barrier()
        try:
            engine.load_checkpoint(folder)
            said[name] = "nothing"
        except CheckpointError as error:
            said[name] = str(error)

    def rewrite(**changes: Any) -> None:
        path = place / "fsmoe.json"
        found = json.loads(path.read_text())
        found["sizes"] |= changes
        path.write_text(json.dumps(found))

    attempt("whole", lambda: None)
    attempt("changed", lambda: expert.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1])))
    attempt("short", lambda: expert.write_bytes(whole[:100]))
    attempt("missing", expert.unlink)
    attempt("restored", lambda: expert.write_bytes(whole))
    attempt("layout", lambda: rewrite(mp=2, world=8))
    attempt("esp", lambda: rewrite(mp=1, world=2, esp=2))
    rewrite_back = partial(rewrite, mp=1, world=2, esp=1)
    attempt("layout restored", rewrite_back)
    # With checksums that fit, so that only what is in it can tell.
    own, kept = place / "fsmoe_rank_00001.pt", (place / "fsmoe_rank_00001.pt").read_bytes()
    with torch.no_grad():
        engine.module.middle.weight.fill_(0.5)
    drawn = torch.get_rng_state()
    for name, change in DAMAGES.items():

        def damage(change: Any = change) -> None:
            own.write_bytes(kept)
            state = torch.load(own, weights_only=True)
            change(state)
            torch.save(state, own)
            found = json.loads((place / "fsmoe.json").read_text())
            found["files"][own.name] = asdict(sum_of(own))
            (place / "fsmoe.json").write_text(json.dumps(found))

        attempt(name, damage)
        assert bool((engine.module.middle.weight == 0.5).all()), f"{name}: weights were changed"
        assert torch.equal(torch.get_rng_state(), drawn), f"{name}: a generator was changed"
    attempt("manifest", lambda: (place / "fsmoe.json").write_text("{"))
    attempt("latest", lambda: (Path(folder) / "latest").write_text("gone"))
    assert engine.load_checkpoint(folder, "good")[0] is not None
    engine.destroy()
    return said


def test_what_cannot_be_trusted_is_named_on_every_rank_and_the_good_tag_can_be_read(tmp_path: Path) -> None:
    first, second = run_on_ranks(refused, 2, tmp_path, str(tmp_path / "saved"))
    assert first == second
    assert first["whole"] == first["restored"] == "nothing"
    told = dict.fromkeys(DAMAGES, "fsmoe_rank_00001.pt") | {
        "changed": "is not what was saved: its checksum differs",
        "short": "has 100 bytes and should have",
        "missing": "is missing",
        "layout": "was saved in another layout (world 8 -> 2; mp 2 -> 1) and cannot be converted",
        "esp": "has 4 files of experts of moes.0, and should have 8",
        "manifest": "fsmoe.json cannot be read",
        "latest": "gone: no such checkpoint; there are: bad, good",
        "layout restored": "nothing",
        "format": "has format 99",
    }
    for name, words in told.items():
        assert words in first[name], (name, first[name])
        if name.startswith(("generator", "plans")):
            assert "fsmoe_rank_00001.pt failed" in first[name], (name, first[name])
        if name in ("changed", "short", "missing"):
            assert "layer_0_expert_0" in first[name]


def other_layouts(rank: int, world_size: int, folder: str) -> None:
    hurry()
    case, block = CASES[0]
    engine = make(rank, case, block)
    train(engine, rank, case, 0, 1)
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = make(rank, replace(case, ep_size=1), block)
    path, _ = engine.load_checkpoint(folder, load_optimizer_states=False, load_lr_scheduler_states=False)
    assert path is not None
    engine.destroy()


def test_weights_alone_are_taken_into_another_ep_size(tmp_path: Path) -> None:
    run_on_ranks(other_layouts, 2, tmp_path, str(tmp_path / "saved"))
