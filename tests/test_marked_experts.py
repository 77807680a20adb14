# SPDX-License-Identifier: Apache-2.0
"""What a script does with weights of experts that are spread over ranks is what stock DeepSpeed does, or an error."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("transformers")

import ds_fsmoe
from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.layer import expert_shard
from ds_fsmoe.layer.parts import LayerError
from ds_fsmoe.planning.expert_placement import ExpertPlacement
from tests.distances import furthest
from tests.hf_families import batch, model_of, step
from tests.logged import heard
from tests.ranks import run_on_ranks
from tests.samples import draw, sampled
from tests.sgd_engines import ds_config, engine_of

DOWN = "model.layers.0.mlp.experts.down_proj"
EXPERTS = 4


def make(stage: int, ep: int, lr: float = 0.1, enabled: bool = True, **block: Any) -> Any:
    config = ds_config(stage, lr, **({"ep_size": ep} | block))
    config["fsmoe"] = config["fsmoe"] if enabled else {"enabled": False}
    return engine_of(model_of("olmoe").train(), config)


def named(engine: Any) -> dict[str, nn.Parameter]:
    return dict(engine.module.named_parameters())


def whole_of(engine: Any) -> dict[str, torch.Tensor]:
    """Whole parameters of an engine of ours or of stock's, on every rank."""
    return {name: each.clone() for name, each in ds_fsmoe.whole_parameters(engine)}


def furthest_of(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(furthest(found[name], each) for name, each in wanted.items())


# ---- gathered, rank 0 changes


def changes(rank: int, world: int, cases: list[tuple[int, int, int]]) -> None:
    from deepspeed import zero

    for stage, modifier, ep in cases:
        engine = make(stage, ep)
        before, parameters = whole_of(engine), named(engine)
        for name, parameter in parameters.items():
            with zero.GatheredParameters(parameter):
                assert type(parameter.data) is torch.Tensor
                assert torch.equal(parameter.data, before[name]), name
        # An error within leaves the part.
        with pytest.raises(RuntimeError, match="stop"), zero.GatheredParameters(parameters[DOWN], modifier_rank=0):
            raise RuntimeError("stop")
        wanted = {name: each * 0.5 for name, each in before.items() if ".experts." in name}
        wanted[DOWN][EXPERTS - 1] += 1.0
        with zero.GatheredParameters(list(parameters.values()), modifier_rank=modifier), torch.no_grad():
            assert parameters[DOWN].shape[0] == EXPERTS
            if rank == modifier:
                for each in parameters.values():
                    each.data.mul_(0.5)
                parameters[DOWN][EXPERTS - 1] += 1.0
        now = whole_of(engine)
        assert furthest_of({name: now[name] for name in wanted}, wanted) < 1e-6, (stage, modifier)
        assert named(engine)[DOWN].shape[0] in (0, EXPERTS // 2)
        step(engine, rank)
        engine.destroy()


def test_gathered_experts_are_whole_and_a_change_of_one_rank_to_them_reaches_all_ranks(tmp_path: Path) -> None:
    cases = [*draw("gathered", [(0, 3, 2), (1, 0, 2), (2, 3, 2)], 1), *draw("gathered at 3", [(3, 0, 2), (3, 3, 2)], 1)]
    cases.append((3, 2, 4))  # each expert on one rank only
    run_on_ranks(changes, 4, tmp_path, cases)


# ---- a loss on weights


def squares(name: str, weight: torch.Tensor, origin: torch.Tensor) -> torch.Tensor:
    return 0.5 * (weight - origin).pow(2).sum()


def norms(name: str, weight: torch.Tensor, origin: torch.Tensor) -> torch.Tensor:
    far = nn.functional.mse_loss(weight, origin) + nn.functional.mse_loss(weight, origin, reduction="sum")
    return weight.norm() + far + (weight * weight).mean() + torch.linalg.vector_norm(weight, 1) * 1e-3


def across(name: str, weight: torch.Tensor, origin: torch.Tensor) -> torch.Tensor:
    """Experts that are alike cost, and those whose columns have a sum: no expert's term is its own."""
    if ".experts." not in name:
        return weight.new_zeros(())
    rows = ds_fsmoe.whole_weight(weight).flatten(1)
    return 1e-2 * (rows @ rows.T).square().sum() + 1e-2 * weight.sum(dim=(0, 1)).square().sum()


def lasso(name: str, weight: torch.Tensor, origin: torch.Tensor) -> torch.Tensor:
    """Expert by expert, and all added up."""
    return weight.pow(2).sum(dim=tuple(range(1, weight.ndim))).sqrt().sum() if weight.ndim > 2 else weight.abs().sum()


Term = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]
TERMS: list[Term] = [squares, norms, across, lasso]


def train_with(engine: Any, term: Term, stage: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with a term on weights, which each rank weighs in its own way."""
    from deepspeed import zero

    losses, rank = [], dist.get_rank()
    for number in range(3):
        x = batch(10 * number + rank, 1)
        loss = engine(input_ids=x, labels=x).loss
        with zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
            for name, each in named(engine).items():
                loss = loss + (1 + rank) * term(name, each, torch.zeros_like(each))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses, whole_of(engine)


def losses_on_weights(rank: int, world: int, ep: int, stages: list[int], chunks: bool) -> None:
    block = {"num_chunks": {"forward": 2, "backward": 3}, "autotune": {"enabled": False}} if chunks else {}
    for stage, term in itertools.product(stages, TERMS):
        # A function that keeps a weight for its backward finds it shared out again there, with stock as well.
        if stage == 3 and term is not squares:
            continue
        results = []
        # With a loss on weights stock's ZeRO 3 gathers in another order on each rank, and fails here.
        for enabled, at in ((False, min(stage, 2)), (True, stage)):
            engine = make(at, ep, 0.01, enabled, **block)
            results.append(train_with(engine, term, at))
            engine.destroy()
        (stock_losses, stock), (losses, ours) = results
        assert furthest_of(ours, stock) < 2e-5, (stage, term)
        assert losses == pytest.approx(stock_losses, rel=2e-5), (stage, term)


@pytest.mark.long
@sampled(("world", "ep", "chunks"), [(2, 2, True), (4, 2, False), (2, 1, False), (4, 4, False)])
def test_a_loss_on_weights_has_the_value_and_gradient_that_stock_gives_it(
    world: int, ep: int, chunks: bool, tmp_path: Path
) -> None:
    stages = [*draw("a loss on weights", [0, 1, 2], 1), 3]
    run_on_ranks(losses_on_weights, world, tmp_path, ep, stages, chunks)


# ---- refused


def refused(engine: Any) -> dict[str, Callable[[], Any]]:
    """Uses that would take this rank's experts for all."""
    p = named(engine)[DOWN]
    slot = torch.zeros(EXPERTS, *ds_fsmoe.own_part(p).shape[1:])
    several = [named(engine)[name] for name in (DOWN, DOWN.replace("down", "gate_up"))]
    return {
        "copy a detached copy": lambda: slot.copy_(p.detach().clone().float()),
        "average": lambda: slot.mul_(0.9).add_(p.detach(), alpha=0.1),
        "average all at once": lambda: torch._foreach_lerp_([slot], [p.data], 0.1),
        "into a slice": lambda: slot.__setitem__(slice(None), p.data),
        "from all": lambda: p.data.copy_(slot),
        "set data": lambda: setattr(p, "data", slot),
        "an expert": lambda: p[EXPERTS // 2 - 1],
        "a set expert": lambda: p.data.__setitem__(0, 0.0),
        "rows of experts": lambda: p.view(EXPERTS, -1),
        "alike experts": lambda: p.flatten(1) @ p.flatten(1).T,
        "a vector of parameters": lambda: nn.utils.parameters_to_vector(several),
        "an importance of all": lambda: (slot * (p - 1.0) ** 2).sum(),
        "initialised": lambda: nn.init.normal_(p),
        "numpy": lambda: p.detach().cpu().numpy(),
        "pickle": lambda: copy.copy(p),
        "broadcast": lambda: dist.broadcast(p.data, 0),
        "all_reduce": lambda: dist.all_reduce(p.data),
        "send": lambda: dist.send(p.data, 1 - dist.get_rank()),
        "masked gradient": lambda: masked(p),
    }


def masked(p: nn.Parameter) -> None:
    handle = p.register_hook(lambda gradient: gradient * torch.ones(EXPERTS, 1, 1))
    try:
        (p * 1.0).sum().backward()
    finally:
        handle.remove()


def errors_of(rank: int, world: int) -> None:
    engine = make(*draw("errors", [0, 2], 1), 2)
    before = whole_of(engine)
    for what, use in refused(engine).items():
        with pytest.raises((LayerError, CheckpointError)) as caught:
            use()
        said = str(caught.value)
        assert DOWN in said or DOWN.replace("down", "gate_up") in said, (what, said)
        assert "ds_fsmoe." in said, (what, said)
    assert furthest_of(whole_of(engine), before) == 0
    engine.destroy()


def test_what_would_take_one_ranks_experts_for_all_is_an_error_that_names_the_parameter_and_what_to_call(
    tmp_path: Path,
) -> None:
    run_on_ranks(errors_of, 2, tmp_path)


def test_collectives_of_a_torch_that_asks_no_tensor_are_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.13 some hand a tensor to C++ without asking its class."""
    sent: list[Any] = []

    def broadcast(tensor: torch.Tensor, src: int) -> None:
        sent.append(tensor)

    monkeypatch.setattr(dist, "broadcast", broadcast)
    expert_shard.ask_in_collectives.__wrapped__()
    p = nn.Parameter(torch.ones(2, 3, 4))
    expert_shard.mark(p, expert_shard.Origin(DOWN, ExpertPart("stacked", EXPERTS, 2, 0), None))
    with pytest.raises(LayerError, match=f"broadcast.*{DOWN}"):
        dist.broadcast(p.data, 0)
    dist.broadcast(plain := torch.ones(2), src=0)
    assert [each is plain for each in sent] == [True]


def allowed(rank: int, folder: str) -> None:
    """Uses that mean the same for a part."""
    engine = make(0, 2)
    p = named(engine)[DOWN]
    part, own = ds_fsmoe.own_part(p), ds_fsmoe.own_experts_of(p)
    assert own == [2 * rank, 2 * rank + 1]
    whole = whole_of(engine)[DOWN]
    assert type(part) is torch.Tensor
    assert torch.equal(part, whole[own])
    assert furthest(p.sum(dim=(0, 1)), whole.sum(dim=(0, 1))) < 1e-6
    average = copy.deepcopy(p)
    with torch.no_grad():
        average.mul_(0.9).add_(p, alpha=0.1)
    assert torch.allclose(ds_fsmoe.own_part(average), part)
    assert torch.equal(ds_fsmoe.own_part(p.transpose(1, 2).transpose(1, 2) * torch.ones(2, 1, 1)), part)
    keys = engine.module.state_dict().keys()
    assert DOWN in keys
    with pytest.raises(LayerError, match=re.escape(DOWN)):
        nn.Parameter(torch.zeros(whole.shape)).data.copy_(engine.module.state_dict()[DOWN])
    # Every rank has the whole, and takes its own.
    engine.module.load_state_dict({DOWN: whole * 3}, strict=False)
    assert torch.allclose(ds_fsmoe.own_part(p), whole[own] * 3)
    model = engine.module
    engine.destroy()
    with pytest.raises(LayerError, match=re.escape(DOWN)):  # it is still a part
        p[0]
    assert type(dict(ds_fsmoe.make_whole(model).named_parameters())[DOWN]) is nn.Parameter
    with pytest.raises(LayerError, match=f"{re.escape(DOWN)}: this parameter is from before"):
        p.sum()


def statistics(rank: int, world: int) -> None:
    from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

    said = heard("WARNING")
    with torch.no_grad():  # a script may begin with inference; where it trains, gradients are recorded all the same
        engine = make(0, 2)
    p = named(engine)[DOWN]
    for _ in range(2):
        p.data.norm()
    x = batch(rank, 1)
    engine.backward(engine(input_ids=x, labels=x).loss)
    with pytest.raises(LayerError, match=re.escape(DOWN)):
        torch.zeros(EXPERTS, *p.shape[1:]).copy_(safe_get_full_grad(p))
    safe_set_full_grad(p, safe_get_full_grad(p) * 0.5)
    assert torch.equal(ds_fsmoe.own_part(p.grad), ds_fsmoe.own_part(safe_get_full_grad(p)))
    engine.destroy()
    (line,) = (each for each in said.lines if "torch.norm" in each)
    assert "ds_fsmoe.gradient_norm(engine)" in line


def test_a_norm_of_one_ranks_experts_is_given_with_one_warning(tmp_path: Path) -> None:
    run_on_ranks(statistics, 2, tmp_path)


# ---- saved


def saved(rank: int, folder: str) -> None:
    from safetensors.torch import save_file

    engine = make(2, 2)
    model, out = engine.module, Path(folder) / f"of{rank}"
    out.mkdir()
    good = out / "good.pt"
    good.write_text("good")
    parts = {name: each.data.cpu().clone() for name, each in model.named_parameters()}
    said = re.escape(DOWN.replace("down", "gate_up"))
    for write in (
        lambda: torch.save(model.state_dict(), good),
        lambda: torch.save({"step": 1, "model": [parts]}, good),
        lambda: save_file(parts, out / "good.safetensors"),
        lambda: model.save_pretrained(out / "hf"),
        lambda: model.save_pretrained(out / "hf", state_dict=parts),
        lambda: model.save_pretrained(
            out / "hf", state_dict={n: ds_fsmoe.own_part(p) for n, p in named(engine).items()}
        ),
        lambda: engine.module_state_dict(),
    ):
        with pytest.raises((LayerError, RuntimeError), match=said):
            write()
    assert good.read_text() == "good"
    assert [each.name for each in out.iterdir()] == ["good.pt"]
    whole = whole_of(engine)
    model.save_pretrained(out / "hf", state_dict=whole)
    engine.destroy()
    if rank == 0:  # which alone has written the weights
        again = type(model).from_pretrained(out / "hf")
        assert furthest_of(dict(again.named_parameters()), whole) == 0


# ---- what was there before initialize


def before(rank: int, folder: str) -> None:
    model = model_of("olmoe").train()
    held = dict(model.named_parameters())
    engine = engine_of(model, ds_config(1, ep_size=2))
    with pytest.raises(LayerError, match=f"{re.escape(DOWN)}.*before ds_fsmoe.initialize\\("):
        held[DOWN].pow(2).sum()
    with pytest.raises(LayerError, match=re.escape(DOWN)):
        held[DOWN].data.norm()
    assert held["model.norm.weight"] is named(engine)["model.norm.weight"]
    engine.destroy()
    model = model_of("olmoe").train()
    held = dict(model.named_parameters())
    engine = engine_of(model, ds_config(1, ep_size=1))
    assert held[DOWN] is named(engine)[DOWN]
    engine.destroy()
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        model = model_of("olmoe").train()
        getattr(dict(model.named_parameters())[DOWN], register)(lambda given: None)
        with pytest.raises(LayerError, match=f"{re.escape(DOWN)} has gradient hooks"):
            engine_of(model, ds_config(1, ep_size=2))


def masks(rank: int, stage: int, enabled: bool) -> dict[str, torch.Tensor]:
    """Train two of four experts, by a hook that is put on where the experts are known."""
    engine = make(stage, 2, enabled=enabled)
    p = named(engine)[DOWN]
    mask = torch.tensor([0.0, 1.0, 1.0, 0.0]).view(-1, 1, 1)
    own = ds_fsmoe.own_experts_of(p) or [*range(EXPERTS)]
    p.register_hook(lambda gradient: gradient * mask[own])
    for number in range(2):
        step(engine, 10 * number + rank)
    found = whole_of(engine)
    engine.destroy()
    return found


def stocks_and_ours(rank: int, world: int, stage: int) -> list[dict[str, torch.Tensor]]:
    return [masks(rank, stage, enabled) for enabled in (False, True)]


@sampled("stage", [0, 2])
def test_a_hook_on_a_part_sees_the_experts_of_this_rank(stage: int, tmp_path: Path) -> None:
    [(stock, ours), _] = run_on_ranks(stocks_and_ours, 2, tmp_path, stage)
    assert furthest_of(ours, stock) < 1e-5
    moved = (ours[DOWN] - dict(model_of("olmoe").named_parameters())[DOWN]).abs().amax(dim=(1, 2))
    assert [each > 0 for each in moved.tolist()] == [False, True, True, False]


# ---- where experts have moved


def moved(rank: int, folder: str) -> None:
    from deepspeed import zero

    engine = make(0, 2, placement={"policy": "balanced", "every": 100})
    before, p = whole_of(engine), named(engine)[DOWN]
    placements = engine.fsmoe.placement
    placements.go_to({next(iter(placements.now)): ExpertPlacement((3, 0, 1, 2), EXPERTS, 2)})
    assert ds_fsmoe.own_experts_of(p) == [[3, 0], [1, 2]][rank]
    assert torch.equal(ds_fsmoe.own_part(p), before[DOWN][ds_fsmoe.own_experts_of(p)])
    assert furthest_of(whole_of(engine), before) == 0
    with zero.GatheredParameters([p], modifier_rank=0):
        assert torch.equal(p.data, before[DOWN])
        if rank == 0:
            p.data[3] += 1
    wanted = before[DOWN].clone()
    wanted[3] += 1
    assert furthest_of({DOWN: whole_of(engine)[DOWN]}, {DOWN: wanted}) < 1e-6
    engine.destroy()


def one_after_the_other(rank: int, world: int, folder: str) -> None:
    for uses in (allowed, saved, before, moved):
        uses(rank, folder)


def test_uses_files_and_moves_of_a_part_mean_the_whole_or_are_refused_and_so_are_those_from_before(
    tmp_path: Path,
) -> None:
    run_on_ranks(one_after_the_other, 2, tmp_path / "ranks", str(tmp_path))
