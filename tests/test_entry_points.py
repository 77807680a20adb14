# SPDX-License-Identifier: Apache-2.0
"""Every entry point, one mechanism: initialize, install, and run for a script that stays untouched; a block in the
config or from outside; and the examples of parts of one's own, each named in the config and nothing else edited."""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
import types
from argparse import Namespace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer as StockMOELayer
from deepspeed.moe.sharded_moe import TopKGate as StockTopKGate

import ds_fsmoe
from ds_fsmoe import ConfigError, run
from ds_fsmoe.cli import main
from ds_fsmoe.engine import compat, entry_points
from ds_fsmoe.engine.command_line import read_given, take_option
from ds_fsmoe.offline.commands.training_command import find_given
from tests.logged import heard
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.scripts import ROOT, START, Start, launch
from tests.small_model import Case, SmallModel, batch

ENABLED = '{"enabled": true}'
UNTOUCHED_SCRIPT = """
import argparse
import deepspeed, torch
from deepspeed.moe.layer import MoE
from neighbour import WIDTH

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int)
parser.add_argument("--fsmoe")
args = parser.parse_args()
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}
own = config | {"fsmoe": {"enabled": True, "order": "sparse"}}
for where in ({"args": args}, {"config": config}, {"config": own}):
    model = MoE(WIDTH, torch.nn.Linear(WIDTH, WIDTH), num_experts=2, ep_size=2)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), **where)
    order = engine.fsmoe.block.order if hasattr(engine, "fsmoe") else "stock"
    kinds = type(engine).__name__, type(model.deepspeed_moe).__name__
    assert (kinds == ("FSMoEEngine", "FSMoELayer")) == (order != "stock"), kinds
    print(f"rank {args.local_rank}: {order}, its own argument is {args.fsmoe}", flush=True)
torch.distributed.destroy_process_group()  # with those of gloo a process may abort at its exit
"""


def test_initialize_takes_the_arguments_of_deepspeed() -> None:
    ours, stocks = inspect.signature(ds_fsmoe.initialize), inspect.signature(deepspeed.initialize)
    assert [(p.name, p.default, p.kind) for p in ours.parameters.values()] == [
        (p.name, p.default, p.kind) for p in stocks.parameters.values()
    ]


OURS = ("FSMoEEngine", "FSMoELayer", "FSMoEGate", True)
STOCK = ("DeepSpeedEngine", "MOELayer", "TopKGate", False)
WAYS = [
    ("initialize", MoE, True, OURS),
    ("initialize", MoE, False, STOCK),
    ("initialize", MoE, None, STOCK),
    ("deepspeed", MoE, True, STOCK),
    ("initialize", ds_fsmoe.MoE, False, STOCK),
    ("initialize", ds_fsmoe.MoE, None, STOCK),
    ("deepspeed", ds_fsmoe.MoE, None, ("DeepSpeedEngine", "FSMoELayer", "FSMoEGate", False)),
    ("install", MoE, True, OURS),
    ("install", MoE, None, STOCK),
]
"""The entry point, the class of layers, whether the block says enabled, and then the classes of engine, inner layer and
gate, and whether the engine says that it is on."""


def look_through_every_entry_point(rank: int, world_size: int) -> list[Any]:
    seen = []
    for entry_point, moe_class, is_enabled, _ in WAYS:
        if entry_point == "install":
            ds_fsmoe.install()
        case = Case(ep_size=2, stage=1)
        model = SmallModel(case, rank, moe_class)
        initialize = ds_fsmoe.initialize if entry_point == "initialize" else deepspeed.initialize
        config = case.ds_config(**({} if is_enabled is None else {"fsmoe": {"enabled": is_enabled}}))
        engine, optimizer, *others = initialize(model=model, model_parameters=model.parameters(), config=config)
        assert optimizer is engine.optimizer
        assert others == [None, None]
        inner = model.moes[1].deepspeed_moe
        assert isinstance(engine, deepspeed.DeepSpeedEngine)
        assert isinstance(inner, StockMOELayer)
        assert isinstance(inner.gate, StockTopKGate)
        loss, _ = engine(*batch(0, rank, torch.float32))
        engine.backward(loss)
        engine.step()
        state = getattr(engine, "fsmoe", None)
        assert state is None or state.num_layers == 2
        seen.append((*(type(each).__name__ for each in (engine, inner, inner.gate)), state is not None))
    return seen


def test_every_entry_point_leads_to_our_layer_exactly_when_the_block_is_enabled(tmp_path: Path) -> None:
    for seen in run_on_ranks(look_through_every_entry_point, 2, tmp_path):
        assert seen == [wanted for *_, wanted in WAYS]


@START
@sampled(
    ("given", "orders"),
    [(None, ["auto", "stock", "sparse"]), (ENABLED, ["auto"] * 3), ('{"enabled": false}', ["stock"] * 3)],
    kept=[0, 1],
)
def test_an_untouched_script_trains_through_run_by_the_block_of_its_config_or_the_one_that_is_given(
    given: str | None, orders: list[str], start: Start, tmp_path: Path
) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(UNTOUCHED_SCRIPT)
    (tmp_path / "scripts" / "neighbour.py").write_text("WIDTH = 7\n")
    config = tmp_path / "ds_config.json"
    config.write_text(
        '{"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"torch_adam": true}},\n'
        ' // DeepSpeed reads comments, and so do we\n "fsmoe": {"enabled": true}}'
    )
    runner = ["--module", "ds_fsmoe.run"] if start is launch else [str(ROOT / "ds_fsmoe" / "run.py")]
    from_outside = [] if given is None else ["--fsmoe", given]
    own = ["--fsmoe", "mine", "--deepspeed_config", str(config)]
    said = start(tmp_path, *runner, *from_outside, "scripts/train.py", *own)
    for rank in range(2):
        assert re.findall(rf"rank {rank}: (\w+), its own argument is mine", said) == orders
    assert ("is on for 1 MoE layer(s)" in said) == (orders[0] != "stock")


def narrow(model):
    return deepspeed.initialize(model=model)


def forgetful(**arguments):
    return "an engine of its own"


def look_through_wrappers() -> None:
    stock = deepspeed.initialize
    config = {"train_micro_batch_size_per_gpu": 1, "fsmoe": {"enabled": True}}
    called: list[str] = []

    def wrap(name: str) -> None:
        wrapped = deepspeed.initialize

        @functools.wraps(stock)
        def tracked(*args, **options):
            called.append(name)
            return wrapped(*args, **options)

        deepspeed.initialize = tracked

    def look(*wanted: str, initialize: Any = None) -> None:
        """Call it, which goes through these wrappers to such an engine."""
        called.clear()
        engine, *_ = (initialize or deepspeed.initialize)(model=MoE(7, torch.nn.Linear(7, 7)), config=config)
        assert (type(engine).__name__, *called) == wanted
        engine.destroy()

    wrap("before")
    look("DeepSpeedEngine", "before")
    look("FSMoEEngine", "before", initialize=ds_fsmoe.initialize)
    ds_fsmoe.install()
    look("FSMoEEngine", "before")
    wrap("after")
    look("FSMoEEngine", "after", "before")
    ds_fsmoe.install()
    look("FSMoEEngine", "after", "before")
    below = deepspeed.initialize
    deepspeed.initialize = lambda model, config: below(model=model, config=config)
    wrap("last")
    ds_fsmoe.install()
    ds_fsmoe.install()
    look("FSMoEEngine", "last", "after", "before")
    ds_fsmoe.uninstall()
    look("DeepSpeedEngine", "before")
    for wrapper, sentence in (
        (narrow, "and does not accept its arguments: it takes (model) ("),
        (forgetful, "and has not returned an engine of ds_fsmoe"),
    ):
        deepspeed.initialize = wrapper
        line = inspect.getsourcelines(wrapper)[1]
        words = f"{wrapper.__name__} ({__file__}, line {line}) replaces deepspeed.initialize {sentence}"
        with pytest.raises(compat.IncompatibleError, match=re.escape(words)):
            ds_fsmoe.initialize(model=MoE(7, torch.nn.Linear(7, 7)), config=config)
    deepspeed.initialize = functools.partial(narrow)
    with pytest.raises(compat.IncompatibleError, match=r"partial.*narrow.* replaces deepspeed\.init"):
        ds_fsmoe.initialize(model=MoE(7, torch.nn.Linear(7, 7)), config=config)
    deepspeed.initialize = stock
    ds_fsmoe.install()
    assert len(entry_points._wrapped_functions) == 1


def give_from_outside(folder: str) -> None:
    def look(wanted: str, model: torch.nn.Module | None = None, **where: Any) -> None:
        """Make an engine of a config that is there, which has this order, or is stock's."""
        made, *_ = deepspeed.initialize(model=MoE(7, torch.nn.Linear(7, 7)) if model is None else model, **where)
        assert (made.fsmoe.block.order if hasattr(made, "fsmoe") else "stock") == wanted
        made.destroy()

    plain: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
    own = plain | {"fsmoe": {"enabled": True, "order": "sparse"}}
    file = Path(folder, "ds_config.json")
    file.write_text(json.dumps(plain))
    listening = heard()

    ds_fsmoe.install({"enabled": True, "order": "einsum"})
    entry_points.warn_if_unused()
    assert "was not used" in listening.lines.pop()
    look("stock", torch.nn.Linear(7, 7), config=own)
    entry_points.warn_if_unused()
    said = "Linear is trained by stock DeepSpeed (the model has no MoE layers for the command line's fsmoe block)"
    assert [said in listening.lines[0], "was not used" in listening.lines[1]] == [True, True]
    args = Namespace(deepspeed_config=str(file))
    for where in ({"config": plain}, {"config": own}, {"config_params": plain}, {"config": str(file)}, {"args": args}):
        look("einsum", **where)
    assert any("replaces the one in the script's config" in each for each in listening.lines)
    assert args.deepspeed_config == str(file)
    assert (plain, own["fsmoe"]) == ({"train_micro_batch_size_per_gpu": 1}, {"enabled": True, "order": "sparse"})
    ds_fsmoe.install()
    look("einsum", config=plain)
    listening.lines.clear()
    entry_points.warn_if_unused()
    assert not listening.lines
    ds_fsmoe.install({"enabled": False})
    look("stock", config=own)
    ds_fsmoe.uninstall()
    ds_fsmoe.install()
    look("sparse", config=own)
    ds_fsmoe.uninstall()


def look_from_outside(rank: int, world_size: int, folder: str) -> None:
    give_from_outside(folder)
    look_through_wrappers()


def test_a_block_from_outside_takes_the_place_of_every_other_and_wrappers_are_called_once_each_or_named(
    tmp_path: Path,
) -> None:
    run_on_ranks(look_from_outside, 1, tmp_path / "rank", str(tmp_path))


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


# ---- a block from outside


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        (["train.py", "--fsmoe", "x"], (None, [], ["train.py", "--fsmoe", "x"])),
        (["--fsmoe", "a.json", "train.py", "--fsmoe=x"], ("a.json", [], ["train.py", "--fsmoe=x"])),
        (["--local_rank=1", f"--fsmoe={ENABLED}", "train.py"], (ENABLED, ["--local_rank=1"], ["train.py"])),
        (["--fsmoe", "a=b.json", "--local-rank=0", "train.py"], ("a=b.json", ["--local-rank=0"], ["train.py"])),
        (["--fsmoe-like", "train.py"], (None, ["--fsmoe-like"], ["train.py"])),
        ([], (None, [], [])),
    ],
)
def test_only_what_stands_in_front_of_the_script_is_taken(arguments: list[str], taken: tuple) -> None:
    assert take_option(arguments) == taken


def test_a_block_is_read_from_a_file_or_as_json(tmp_path: Path) -> None:
    file = tmp_path / "block.json"
    file.write_text('{"enabled": true, // as DeepSpeed reads it\n "order": "sparse"}')
    assert read_given(str(file)) == {"enabled": True, "order": "sparse"}
    file.write_text('{"zero_optimization": {"stage": 1}, "fsmoe": {"enabled": false}}')
    assert read_given(str(file)) == {"enabled": False}
    assert read_given(f" {ENABLED}") == {"enabled": True}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("absent.json", "--fsmoe absent.json: no such file; the value is a file, or a JSON object such as"),
        ("broken.json", "--fsmoe broken.json: cannot be read as JSON: "),
        ("list.json", "--fsmoe list.json: holds [1]; the block is an object"),
        ("inner.json", "--fsmoe inner.json: holds true; the block is an object"),
        ('{"enabled": tru}', '--fsmoe {"enabled": tru}: is not JSON: '),
        ("", "--fsmoe : no such file"),
    ],
)
def test_what_is_no_block_is_refused_with_what_was_given(
    text: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, written in {"broken": '{"enabled": ', "list": "[1]", "inner": '{"fsmoe": true}'}.items():
        Path(f"{name}.json").write_text(written)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        read_given(text)


def test_run_and_install_refuse_what_they_cannot_run_before_the_script_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise AssertionError('the script has begun')")
    usage = "\nusage: deepspeed --module ds_fsmoe.run"
    for arguments, sentence in (
        (["--fsmoe", '{"enabled": true, "gat": 1}', str(script)], '"gat": 1}: fsmoe.gat: unknown key; did you mean'),
        (["--fsmoe", "{}", str(script)], 'ds_fsmoe.run: --fsmoe {}: fsmoe.enabled is missing: write "enabled": true'),
        (["--fsmoe", "absent.json", str(script)], "absent.json: no such file"),
        (["--fsmoe", ENABLED, "--fsmoe", ENABLED, str(script)], "--fsmoe is given twice"),
        (["--fsmoe"], "--fsmoe needs a value"),
        (["--fsmoe", ENABLED], "no script given"),
        (["--local_rank=0"], f"ds_fsmoe.run: no script given{usage}"),
        (["--local_rank=0", "absent.py"], f"ds_fsmoe.run: absent.py: no such file{usage}"),
        (["--local_rank=0", "--module"], f"ds_fsmoe.run: no module given{usage}"),
        (["--local_rank=0", "--module", "no.such"], f"ds_fsmoe.run: no.such: no such module{usage}"),
    ):
        monkeypatch.setattr("sys.argv", ["run", *arguments])
        monkeypatch.setattr("sys.path", ["", str(ROOT)])
        with pytest.raises(SystemExit, match=re.escape(sentence)):
            run.main()
    ds_fsmoe.uninstall()
    with pytest.raises(ConfigError, match="unknown key"):
        ds_fsmoe.install({"enabled": True, "gat": 1})
    assert deepspeed.initialize is not ds_fsmoe.initialize
    found = run.split_arguments(["--local_rank=0", str(script), "--fsmoe", "x"])
    assert found[1:] == (False, ["--local_rank=0", "--fsmoe", "x"], None)


# ---- compare


def test_compare_hands_its_block_to_run_in_front_of_the_script() -> None:
    start = ["deepspeed", "--num_gpus", "2", "--module", "ds_fsmoe.run"]
    subject = find_given([*start, "train.py", "--fsmoe", "mine"], ENABLED)
    assert subject is not None
    assert subject.config == {"fsmoe": {"enabled": True}}
    assert subject.command_with(Path("out.json")) == [*start, "--fsmoe", "out.json", "train.py", "--fsmoe", "mine"]
    in_command = find_given([*start, f"--fsmoe={ENABLED}", "train.py"], None)
    assert in_command is not None
    assert in_command.command_with(Path("out.json")) == [*start, "--fsmoe", "out.json", "train.py"]
    assert find_given([*start, "train.py", "--fsmoe", "mine"], None) is None
    assert find_given(["deepspeed", "train.py"], None) is None


@pytest.mark.parametrize(
    ("given", "command", "sentence"),
    [
        (["--fsmoe", ENABLED], ["deepspeed", "train.py"], "ds_fsmoe.run, which is not in the command"),
        (
            ["--fsmoe", ENABLED],
            ["-m", "ds_fsmoe.run", "--fsmoe", ENABLED, "train.py"],
            "is given twice, also in the command",
        ),
        ([], ["-m", "ds_fsmoe.run", "--fsmoe", "absent.json", "train.py"], "--fsmoe absent.json: no such file"),
        ([], ["-m", "ds_fsmoe.run", "train.py"], "for a script whose config is inside it, give the block with --fsmoe"),
    ],
)
def test_compare_says_why_a_block_cannot_be_handed_on(
    given: list[str], command: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "--out", str(tmp_path), *given, "--", *command]) == 2
    assert sentence in capsys.readouterr().err


# ---- parts of one's own

KINDS = ("gate", "order", "alltoall", "expert", "hook")


@START
@sampled("kinds", [*((kind,) for kind in KINDS), KINDS], ids=" ".join)
def test_a_model_learns_with_each_kind_of_part_of_ones_own(
    kinds: tuple[str, ...], start: Start, tmp_path: Path
) -> None:
    printed = start(tmp_path, str(ROOT / "examples" / "extend.py"), *kinds)
    for kind in kinds:
        found = re.search(rf"^{kind} .*: loss ([\d.]+) -> ([\d.]+)$", printed, re.MULTILINE)
        assert found, printed[-2000:]
        assert float(found[2]) < 0.8 * float(found[1]), kind
    if "hook" not in kinds:
        return
    sent = re.search(r"forward: ([\d.]+) kB sent, backward: ([\d.]+) kB sent", printed)
    assert sent, printed[-2000:]
    assert float(sent[1]) == float(sent[2]) > 0
