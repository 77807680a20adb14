# SPDX-License-Identifier: Apache-2.0
"""What is done to the module ``deepspeed_moe.experts`` does what it does in DeepSpeed's own layer."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.moe.experts import Experts
from torch import nn

from tests.logged import heard
from tests.ranks import run_on_ranks
from tests.samples import draw
from tests.small_model import EXPERT_WIDTH, WIDTH, Case, SmallModel, batch, small_engine

Change = Callable[[SmallModel, nn.Module, list], None]
"""(model, layer, what is seen) -> the layer's experts module is changed."""


def note(seen: list, *tensors: Any) -> None:
    seen.append([each.detach().clone() for each in tensors if each is not None])


def looks(model: SmallModel, layer: nn.Module, seen: list) -> None:
    layer.experts.register_forward_hook(lambda module, args, out: note(seen, *args, out))
    layer.experts.register_forward_pre_hook(lambda module, args, kwargs: note(seen, *args), with_kwargs=True)


def changes_rows(model: SmallModel, layer: nn.Module, seen: list) -> None:
    layer.experts.register_forward_pre_hook(lambda module, args: (args[0] + 0.25 * args[0].mean(dim=2, keepdim=True),))


def changes_gradients(model: SmallModel, layer: nn.Module, seen: list) -> None:
    def hook(module: nn.Module, given: Any, got: Any) -> Any:
        note(seen, *given, *got)
        return tuple(None if each is None else 0.5 * each for each in given)

    layer.experts.register_full_backward_hook(hook)
    layer.experts.register_full_backward_pre_hook(lambda module, got: tuple(2.0 * each for each in got))


def takes_parameters_from_elsewhere(model: SmallModel, layer: nn.Module, seen: list) -> None:
    layer.experts.register_forward_hook(lambda module, args, out: out + model.middle(args[0]))


def keeps_results_for_the_loss(model: SmallModel, layer: nn.Module, seen: list) -> None:
    kept: list[torch.Tensor] = []
    layer.experts.register_forward_hook(lambda module, args, out: kept.append(out))
    model.register_forward_hook(lambda module, args, out: (out[0] + kept.pop().square().mean(), out[1]))


def cuts_the_graph(model: SmallModel, layer: nn.Module, seen: list) -> None:
    layer.experts.register_forward_hook(lambda module, args, out: out.detach())


def on_one_rank_alone(model: SmallModel, layer: nn.Module, seen: list) -> None:
    if torch.distributed.get_rank() == 1:
        looks(model, layer, seen)
        layer.experts.register_forward_hook(lambda module, args, out: out + torch.tanh(args[0]))


def own_forward_on_the_object(model: SmallModel, layer: nn.Module, seen: list) -> None:
    kept = layer.experts.forward
    layer.experts.forward = lambda x: 1.5 * kept(x)


class Halves(Experts):
    """A container that does something to what its experts return."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().forward(inputs) + inputs.mean(dim=2, keepdim=True)


def subclass(model: SmallModel, layer: nn.Module, seen: list) -> None:
    layer.experts.__class__ = Halves


class Stacked(nn.Module):
    """Another module: all experts of the rank in one product, in a shape of its own."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.up = nn.Parameter(torch.randn(num_experts, WIDTH, EXPERT_WIDTH, generator=generator) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, EXPERT_WIDTH, WIDTH, generator=generator) / WIDTH**0.5)
        for parameter in self.parameters():
            parameter.allreduce, parameter.group_name = False, "ep_size_2"

    def forward(self, x_GecM: torch.Tensor) -> torch.Tensor:
        x_eRM = x_GecM.transpose(0, 1).reshape(len(self.up), -1, WIDTH)
        y_eRM = torch.relu(x_eRM @ self.up) @ self.down
        return y_eRM.view(len(self.up), x_GecM.shape[0], -1, WIDTH).transpose(0, 1).reshape(-1, WIDTH)


def another_module(model: SmallModel, layer: nn.Module, seen: list) -> None:
    layer.experts = Stacked(layer.num_local_experts)


HOOKS = [
    *(looks, changes_rows, changes_gradients, takes_parameters_from_elsewhere),
    *(keeps_results_for_the_loss, cuts_the_graph, on_one_rank_alone, own_forward_on_the_object),
]
CLASSES = [subclass, another_module]
CASE = Case(ep_size=2, stage=1, k=2)
CUT = {"pipeline_degree": {"forward": 2, "backward": 3}}
BLOCKS = [
    {"autotune": False},
    CUT,
    CUT | {"recompute": True},
    CUT | {"overlap": False, "gradient_partition": {"mode": "off"}},
]


Trained = tuple[list[list[torch.Tensor]], list[str], list[tuple[int, int]]]
"""What is seen and computed in three steps and an evaluation; what is said; the degrees of both layers."""


def trained(rank: int, block: dict | None, change: Change, early: bool, case: Case = CASE) -> Trained:
    """Train a model of which the second layer is changed; without a block by DeepSpeed alone."""
    said = heard()
    model, seen = SmallModel(case, rank), []
    layer = model.moes[1].deepspeed_moe
    if early:
        change(model, layer, seen)
    engine = small_engine(case, rank, block, model)
    if not early:
        change(model, layer, seen)
    torch.manual_seed(rank)
    for step in range(3):
        loss, y_BLM = engine(*batch(step, rank, torch.float32))
        engine.backward(loss)
        engine.step()
        note(seen, loss, y_BLM)
    engine.eval()
    with torch.no_grad():
        note(seen, engine(*batch(7, rank, torch.float32))[0])
    note(seen, *model.parameters(), *model.buffers())
    degrees = []
    if block is not None:
        said.lines.append(f"degrees {engine.fsmoe.chosen()['num_chunks']}")
        degrees = [each.deepspeed_moe.pipeline.degrees for each in model.moes]
    engine.destroy()
    said.end()
    return seen, said.lines, degrees


def alike(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]], rtol: float = 1e-5) -> bool:
    """Whether as many tensors were seen each time, of the same numbers."""
    if [len(each) for each in one] != [len(each) for each in other]:
        return False
    pairs = zip(itertools.chain(*one), itertools.chain(*other), strict=True)
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=rtol, atol=1e-6) for a, b in pairs)


def compared(rank: int, world_size: int, pairs: list[tuple[Change, dict]]) -> None:
    for number, (change, block) in enumerate(pairs):
        early, name = change in CLASSES or number % 2 == 0, f"{change.__name__}, {block}"
        expected, *_ = trained(rank, None, change, early)
        seen, said, degrees = trained(rank, block, change, early)
        if block.get("recompute") and change in (looks, changes_gradients, on_one_rank_alone):
            seen, expected = seen[-5:], expected[-5:]  # hooks are called once more
        assert alike(seen, expected), name
        if "pipeline_degree" in block:
            assert degrees[1] == (1, 1), name
            assert said[-1] == "degrees forward 2, backward 3; forward 1, backward 1", name
        if rank == 0:
            assert sum("in one chunk (" in each for each in said) == int("pipeline_degree" in block), name


# A hook, or another module, with each block.
PAIRS = [(change, block) for change in (*HOOKS, *CLASSES) for block in BLOCKS]


@pytest.mark.parametrize("count", [5, pytest.param(len(PAIRS), marks=pytest.mark.slow)])
def test_what_is_done_to_the_experts_module_does_what_it_does_in_stock(count: int, tmp_path: Path) -> None:
    # Of these a chunked layer, or an experts module that is left out, would show the most.
    most = [(changes_gradients, CUT), (keeps_results_for_the_loss, BLOCKS[0])]
    run_on_ranks(compared, 2, tmp_path, most + draw("changes of experts", PAIRS, count))


def step_of(engine: Any, number: int, rank: int) -> None:
    engine.backward(engine(*batch(number, rank, torch.float32))[0])
    engine.step()


def late(rank: int, world_size: int) -> dict[str, Any]:
    """A hook that rank 1 puts on after a step, in a layer that is cut; then it asks for another look, with rank 0."""
    said = heard()
    found: dict[str, Any] = {"calls": [], "degrees": []}
    case = Case(ep_size=world_size)
    model, seen = SmallModel(case, rank), []
    engine = small_engine(case, rank, CUT | {"debug": {"check_every": 1}}, model)
    for step in range(6):
        if step == 2 and rank == world_size - 1:
            looks(model, model.moes[0].deepspeed_moe, seen)
        if step == 4:
            engine.fsmoe.recheck_chunking()
        step_of(engine, step, rank)
        found["calls"].append(len(seen) // 2)
        found["degrees"].append(model.moes[0].deepspeed_moe.pipeline.degrees)
    engine.destroy()
    return found | {"said": [each for each in said.lines if "recheck_chunking" in each]}


class FailsOfItsOwn(nn.Module):
    """An experts module that DeepSpeed does not know, whose own rows do not fit."""

    def __init__(self, deepspeed_experts: nn.ModuleList) -> None:
        super().__init__()
        self.deepspeed_experts, self.num_local_experts = deepspeed_experts, len(deepspeed_experts)

    def forward(self, x_PeCM: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the size of tensor a must be a size of its own")


def late_alone(rank: int, world_size: int) -> tuple[dict[str, Any], str]:
    """The same on one rank; and what is said where an experts module fails."""
    found, case = late(rank, world_size), Case()
    engine = small_engine(case, rank, {"autotune": False})
    inner = engine.module.moes[0].deepspeed_moe
    inner.experts = FailsOfItsOwn(inner.experts.deepspeed_experts)
    with pytest.raises(RuntimeError) as caught:
        engine(*batch(0, rank, torch.float32))
    return found, str(caught.value)


def late_and_watched(rank: int, world_size: int, folder: str) -> tuple[dict[str, Any], list[bool]]:
    """The same; and of a step that is traced whether DeepSpeed finds times of a layer with hooks on its experts."""
    found, case = late(rank, world_size), Case(ep_size=2)
    model = SmallModel(case, rank)
    inner = model.moes[1].deepspeed_moe
    looks(model, inner, [])
    trace = {"enabled": True, "start_step": 0, "num_steps": 1, "path": folder}
    engine = small_engine(case, rank, {"trace": trace}, model, wall_clock_breakdown=True)
    step_of(engine, 0, rank)
    engine.destroy()
    return found, [inner.time_moe > 0, inner.time_falltoall > 0, inner.time_salltoall > 0]


def test_a_hook_that_comes_late_is_called_at_once_or_when_the_ranks_have_looked_again_and_shown_as_any_other(
    tmp_path: Path,
) -> None:
    (first, times), (second, _) = run_on_ranks(late_and_watched, 2, tmp_path / "two", str(tmp_path / "trace"))
    assert first["degrees"] == second["degrees"] == [(2, 3)] * 4 + [(1, 1)] * 2
    assert (first["calls"], second["calls"]) == ([0] * 6, [0, 0, 0, 0, 1, 2])
    assert (first["said"], len(second["said"])) == ([], 1)
    assert second["said"][0].startswith("moes.0: hooks on its experts module need all rows in one call")
    ((alone, error),) = run_on_ranks(late_alone, 1, tmp_path / "one")
    assert alone == {"calls": [0, 0, 1, 2, 3, 4], "degrees": [(2, 3)] * 2 + [(1, 1)] * 4, "said": []}
    # Its experts are not tried one by one, as its rows need not be theirs.
    assert error == "the size of tensor a must be a size of its own"

    assert times == [True] * 3
    events = json.loads((tmp_path / "trace" / "rank0.json").read_text())["traceEvents"]
    about = [each["args"] for each in events if each["ph"] == "X"]
    tasks = [
        sorted((each["phase"], each["kind"]) for each in about if each["layer"] == label) for label in ("L00", "L01")
    ]
    kinds = ("A2A_IN", "EXPERT", "A2A_OUT")
    assert tasks[0] == tasks[1] == sorted((phase, kind) for phase in ("fwd", "bwd") for kind in kinds)
