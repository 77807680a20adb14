# SPDX-License-Identifier: Apache-2.0
"""Three entry points, one mechanism: initialize, install, and run for a script that stays untouched."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.moe.sharded_moe import MOELayer as StockMOELayer
from deepspeed.moe.sharded_moe import TopKGate as StockTopKGate

import ds_fsmoe
from ds_fsmoe import run
from ds_fsmoe.engine import compat, entry_points
from tests.ranks import run_on_ranks
from tests.scripts import ROOT, START, Start, launch
from tests.small_model import Case, SmallModel, batch

UNTOUCHED_SCRIPT = """
import argparse
import deepspeed, torch
from deepspeed.moe.layer import MoE
from neighbour import WIDTH

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int)
parser.add_argument("--say")
args = parser.parse_args()
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
model = MoE(WIDTH, torch.nn.Linear(WIDTH, WIDTH), num_experts=2, ep_size=2)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=list(model.parameters()))
print(f"rank {args.local_rank} says {args.say}: {type(engine).__name__}, {type(model.deepspeed_moe).__name__}")
"""


MODEL_FOR_LIBRARIES = """
import ds_fsmoe

ds_fsmoe.install()
import deepspeed, torch
from deepspeed.moe.layer import MoE

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = MoE(7, torch.nn.Linear(7, 7), num_experts=4, ep_size=2)

    def forward(self, x):
        y, aux_loss, _ = self.moe(x)
        return {"loss": y.square().mean() + aux_loss}


def say(engine):
    rank = torch.distributed.get_rank()
    print(f"rank {rank}: {type(engine).__name__}, {type(engine.module.moe.deepspeed_moe).__name__}")


config = {"train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 1}
# Their word, in our block.
config["fsmoe"] = {"enabled": True, "order": "auto", "alltoall": "auto", "pipeline_degree": {"forward": "auto"}}
"""
TRAIN_WITH = {
    "accelerate": """
from accelerate import Accelerator, DeepSpeedPlugin

config |= {"zero_optimization": {"stage": 0}, "zero_allow_untested_optimizer": True}
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(20, 7), batch_size=5)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x in loader:
    accelerator.backward(model(x)["loss"])
    optimizer.step()
say(model)
""",
    "trainer": """
from transformers import Trainer, TrainingArguments

config |= {"zero_optimization": {"stage": 1}, "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}
data = [{"x": row} for row in torch.randn(20, 7)]
quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
args = TrainingArguments("out", per_device_train_batch_size=5, num_train_epochs=1, deepspeed=config, **quiet)
trainer = Trainer(model=Model(), args=args, train_dataset=data)
trainer.train()
say(trainer.deepspeed)
""",
}


@pytest.fixture
def installed():
    ds_fsmoe.install()
    yield
    ds_fsmoe.uninstall()


def test_initialize_takes_the_arguments_of_deepspeed() -> None:
    ours, stocks = inspect.signature(ds_fsmoe.initialize), inspect.signature(deepspeed.initialize)
    assert [(p.name, p.default, p.kind) for p in ours.parameters.values()] == [
        (p.name, p.default, p.kind) for p in stocks.parameters.values()
    ]


def test_install_replaces_what_other_libraries_call(installed) -> None:
    assert deepspeed.initialize is ds_fsmoe.initialize


def test_uninstall_restores_stock() -> None:
    stock = deepspeed.initialize
    ds_fsmoe.install()
    ds_fsmoe.install()
    ds_fsmoe.uninstall()
    assert deepspeed.initialize is stock


def test_install_refuses_to_be_gone_past(monkeypatch) -> None:
    early = types.ModuleType("early_bird")
    early.ds_init = deepspeed.initialize
    monkeypatch.setitem(sys.modules, "early_bird", early)
    with pytest.raises(RuntimeError, match=r"early_bird imported deepspeed\.initialize before .* as ds_init"):
        ds_fsmoe.install()


def look_through_every_entry_point(rank: int, world_size: int) -> dict[str, tuple[str, str, str, bool]]:
    """Entry point -> the classes of engine, inner layer and gate, and whether the engine says that it is on."""

    def look(name: str, initialize, moe_class: type, **blocks) -> None:
        case = Case(ep_size=2, stage=1)
        model = SmallModel(case, rank, moe_class)
        config = case.ds_config(**blocks)
        engine, optimizer, loader, scheduler = initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        assert optimizer is engine.optimizer
        assert (loader, scheduler) == (None, None)
        assert isinstance(engine, deepspeed.DeepSpeedEngine)
        inner = model.moes[1].deepspeed_moe
        assert isinstance(inner, StockMOELayer)
        assert isinstance(inner.gate, StockTopKGate)
        loss, _ = engine(*batch(0, rank, torch.float32))
        engine.backward(loss)
        engine.step()
        state = getattr(engine, "fsmoe", None)
        assert state is None or state.num_layers == 2
        seen[name] = type(engine).__name__, type(inner).__name__, type(inner.gate).__name__, state is not None

    seen: dict[str, tuple[str, str, str, bool]] = {}
    stock = deepspeed.moe.layer.MoE
    look("enabled", ds_fsmoe.initialize, stock, fsmoe={"enabled": True})
    look("disabled", ds_fsmoe.initialize, stock, fsmoe={"enabled": False})
    look("no block", ds_fsmoe.initialize, stock)
    look("block without an entry point", deepspeed.initialize, stock, fsmoe={"enabled": True})
    look("our MoE, disabled", ds_fsmoe.initialize, ds_fsmoe.MoE, fsmoe={"enabled": False})
    look("our MoE, no block", ds_fsmoe.initialize, ds_fsmoe.MoE)
    look("our MoE, no entry point", deepspeed.initialize, ds_fsmoe.MoE)
    ds_fsmoe.install()
    look("installed, enabled", deepspeed.initialize, stock, fsmoe={"enabled": True})
    look("installed, no block", deepspeed.initialize, stock)
    return seen


OURS = ("FSMoEEngine", "FSMoELayer", "FSMoEGate", True)
STOCK = ("DeepSpeedEngine", "MOELayer", "TopKGate", False)


def test_every_entry_point_leads_to_our_layer_exactly_when_the_block_is_enabled(tmp_path: Path) -> None:
    for seen in run_on_ranks(look_through_every_entry_point, 2, tmp_path):
        assert seen == {
            "enabled": OURS,
            "disabled": STOCK,
            "no block": STOCK,
            "block without an entry point": STOCK,
            "our MoE, disabled": STOCK,
            "our MoE, no block": STOCK,
            "our MoE, no entry point": ("DeepSpeedEngine", "FSMoELayer", "FSMoEGate", False),
            "installed, enabled": OURS,
            "installed, no block": STOCK,
        }


@START
def test_an_untouched_script_trains_with_our_layer_through_run(start: Start, tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(UNTOUCHED_SCRIPT)
    (tmp_path / "scripts" / "neighbour.py").write_text("WIDTH = 7\n")
    config = tmp_path / "ds_config.json"
    config.write_text(
        '{"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"torch_adam": true}},\n'
        ' // DeepSpeed reads comments, and so do we\n "fsmoe": {"enabled": true}}'
    )
    run = ("--module", "ds_fsmoe.run") if start is launch else (str(ROOT / "ds_fsmoe" / "run.py"),)
    said = start(tmp_path, *run, "scripts/train.py", "--say", "hello", "--deepspeed_config", str(config))
    for rank in range(2):
        assert f"rank {rank} says hello: FSMoEEngine, FSMoELayer" in said
    assert "is on for 1 MoE layer(s)" in said


def narrow(model):
    return deepspeed.initialize(model=model)


def forgetful(**arguments):
    return "an engine of its own"


def look_through_wrappers(rank: int, world_size: int) -> dict[str, Any]:
    """For each call the class of the engine and the wrappers that it went through."""
    from deepspeed.moe.layer import MoE

    stock = deepspeed.initialize
    config = {"train_micro_batch_size_per_gpu": 1, "fsmoe": {"enabled": True}}
    called: list[str] = []
    found: dict[str, Any] = {}

    def wrap(name: str) -> None:
        wrapped = deepspeed.initialize

        @functools.wraps(stock)
        def tracked(*args, **options):
            called.append(name)
            return wrapped(*args, **options)

        deepspeed.initialize = tracked

    def look(name: str, initialize: Any = None) -> None:
        called.clear()
        model = MoE(7, torch.nn.Linear(7, 7))
        try:
            engine, *_ = (initialize or deepspeed.initialize)(model=model, config=config)
            found[name] = type(engine).__name__, *called
            engine.destroy()
        except compat.IncompatibleError as error:
            found[name] = str(error)

    wrap("before")
    look("by itself")
    look("called directly", ds_fsmoe.initialize)
    ds_fsmoe.install()
    look("before install")
    wrap("after")
    look("after install")
    ds_fsmoe.install()
    look("install once more")
    below = deepspeed.initialize
    deepspeed.initialize = lambda model, config: below(model=model, config=config)
    wrap("last")
    ds_fsmoe.install()
    ds_fsmoe.install()
    look("and once more")
    ds_fsmoe.uninstall()
    look("uninstalled")
    for wrapper in (narrow, forgetful):
        deepspeed.initialize = wrapper
        look(wrapper.__name__, ds_fsmoe.initialize)
    deepspeed.initialize = stock
    ds_fsmoe.install()
    found["left"] = len(entry_points._wrapped_functions)
    return found


def test_wrappers_of_other_libraries_are_called_once_each_or_named(tmp_path: Path) -> None:
    (found,) = run_on_ranks(look_through_wrappers, 1, tmp_path)
    refused = {name: found.pop(name) for name in ("narrow", "forgetful")}
    assert found == {
        "by itself": ("DeepSpeedEngine", "before"),
        "called directly": ("FSMoEEngine", "before"),
        "before install": ("FSMoEEngine", "before"),
        "after install": ("FSMoEEngine", "after", "before"),
        "install once more": ("FSMoEEngine", "after", "before"),
        "and once more": ("FSMoEEngine", "last", "after", "before"),
        "uninstalled": ("DeepSpeedEngine", "before"),
        "left": 1,
    }
    for name, sentence in (
        ("narrow", "and does not accept its arguments: it takes (model) ("),
        ("forgetful", "and has not returned an engine of ds_fsmoe"),
    ):
        line = inspect.getsourcelines(globals()[name])[1]
        start = f"{name} ({__file__}, line {line}) replaces deepspeed.initialize "
        assert refused[name].startswith(start + sentence)


def test_install_looks_past_the_module_that_wraps_and_at_no_other(monkeypatch) -> None:
    library = types.ModuleType("library")
    exec("def outer(*a, **k): return inner(*a, **k)", vars(library))
    library.inner = deepspeed.initialize
    monkeypatch.setitem(sys.modules, "library", library)
    monkeypatch.setattr(deepspeed, "initialize", library.outer)
    ds_fsmoe.install()
    ds_fsmoe.uninstall()
    assert deepspeed.initialize is library.outer
    script = types.ModuleType("script")
    script.start = library.outer
    monkeypatch.setitem(sys.modules, "script", script)
    with pytest.raises(RuntimeError, match=r"script imported deepspeed\.initialize before .* as start"):
        ds_fsmoe.install()


@START
@pytest.mark.parametrize("library", TRAIN_WITH)
def test_a_library_that_calls_deepspeed_trains_with_our_layer_after_install(
    library: str, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(MODEL_FOR_LIBRARIES + TRAIN_WITH[library])
    said = start(tmp_path, "train.py", ACCELERATE_USE_DEEPSPEED="true")
    for rank in range(2):
        assert f"rank {rank}: FSMoEEngine, FSMoELayer" in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "no script given"),
        (["absent.py"], "absent.py: no such file"),
        (["--module"], "no module given"),
        (["--module", "no.such"], "no.such: no such module"),
    ],
)
def test_run_says_what_is_missing(arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run", "--local_rank=0", *arguments])
    with pytest.raises(SystemExit) as caught:
        run.main()
    assert str(caught.value).startswith(f"ds_fsmoe.run: {sentence}\nusage: deepspeed --module ds_fsmoe.run")
    assert deepspeed.initialize is not ds_fsmoe.initialize
