# SPDX-License-Identifier: Apache-2.0
"""The public names: which they are, that each says what it is, takes, returns and raises, and how users are typed."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import doctest
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_fsmoe
from ds_fsmoe.components.gate import SettingsGate
from tests.ranks import run_on_ranks

ROOT = Path(__file__).resolve().parents[1]
# A name leaves this list only with a major version; one that is added here is promised.
PROMISED = (
    "AllToAllBase BFloat16Communication CallbackArgs CallbackBase Config ConfigError DeepSeekGate "
    "DenseOrder DenseRouting "
    "EinsumOrder ExpertArgs ExpertBase ExpertChoiceGate FSMoELayer FlatAllToAll FramesAsTokens "
    "GPTFeedForward GShardGate GateBase LayerError LinearGate MOELayer MixtralFeedForward MixtralGate MoE "
    "MoEOutput OptionError OrderBase QwenGate Routing RoutingBase SigmoidGate SimpleOrder SlotRouting "
    "SoftMoEGate SwitchGate TokenChoiceGate XMoEGate __version__ gradient_norm inference initialize install load_ops "
    "make_whole own_experts own_experts_of own_part read_routing register_alltoall register_expert register_gate "
    "register_order uninstall update_gates whole_parameters whole_state_dict whole_weight"
)
NAMES = PROMISED.split(" ")
OBJECTS = [name for name in NAMES if name != "__version__"]
OF_DEEPSPEED = {"FSMoELayer"}
"""Made by DeepSpeed's own arguments, which it documents."""


def test_the_public_names_are_the_promised_ones() -> None:
    assert sorted(ds_fsmoe.__all__) == sorted(NAMES)
    assert set(dir(ds_fsmoe)) == set(ds_fsmoe.__all__)


def docstring_of(name: str) -> str:
    """Of the place where it is defined; a parent's does not count."""
    public = getattr(ds_fsmoe, name)
    own = vars(public).get("__doc__") if isinstance(public, type) else public.__doc__
    return inspect.cleandoc(own or "")


def section(name: str, title: str) -> str:
    """What stands in a docstring below ``title``."""
    found = re.search(rf"(?ms)^{title}:\n(.*?)(?=^\S|\Z)", docstring_of(name))
    return found[1] if found else ""


def parameters(public: Any) -> list[str]:
    """The names of what a user passes."""
    if isinstance(public, type):
        if dataclasses.is_dataclass(public):
            return [each.name for each in dataclasses.fields(public)]
        if issubclass(public, SettingsGate):
            return [each.name for each in dataclasses.fields(public.Settings)]
        if "__init__" not in vars(public):
            return []
        public = public.__init__
    return [each for each in inspect.signature(public).parameters if each != "self"]


def is_shaped(name: str) -> bool:
    """Whether it takes or gives tensors, and so says of which shapes."""
    ends = ("Gate", "GateBase", "Order", "OrderBase", "AllToAll", "AllToAllBase", "Routing", "RoutingBase", "Layer")
    ends += ("FeedForward", "ExpertBase", "ExpertArgs", "Wire", "FramesAsTokens", "CallbackBase")
    return name.endswith(ends) or name in ("MoE", "MoEOutput", "make_whole", "read_routing", "whole_state_dict")


@pytest.mark.parametrize("name", OBJECTS)
def test_a_public_name_says_where_it_is_defined_what_it_is_and_takes_and_of_which_shapes(name: str) -> None:
    summary, *_ = docstring_of(name).split("\n\n")
    assert len(summary.split()) > 3
    said = section(name, "Args")
    if "Options that are not listed here are those of :class:`TokenChoiceGate`" in docstring_of(name):
        said += section("TokenChoiceGate", "Args")
    for parameter in parameters(getattr(ds_fsmoe, name)) if name not in OF_DEEPSPEED else ():
        assert re.search(rf"(?m)^    {parameter}: ", said), f"{name} does not say what {parameter} is"
    assert re.search(r"\[(\.\.\.|[A-Z][\w* ]*)(, ?[\w.*+ ]+)*\]", docstring_of(name)) or not is_shaped(name)
    for option in inspect.signature(getattr(ds_fsmoe, name)).parameters.values() if name.endswith("Gate") else ():
        assert option.kind is option.KEYWORD_ONLY
        assert option.empty not in (option.annotation, option.default)


@pytest.mark.parametrize("name", OBJECTS)
def test_a_public_name_says_what_it_returns_and_raises(name: str) -> None:
    public = getattr(ds_fsmoe, name)
    body: ast.AST = ast.parse(textwrap.dedent(inspect.getsource(public))).body[0]
    does = {type(each) for each in ast.walk(body)}
    if isinstance(body, ast.FunctionDef):
        gives = "Yields" if ast.Yield in does else "Returns"
        if ast.unparse(body.returns) != "None":
            assert section(name, gives), f"{name} does not say what it {gives.lower()}"
    else:
        methods = [each for each in body.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        does = {type(each) for method in methods for each in ast.walk(method)}
        does |= {ast.Raise} if issubclass(public, (SettingsGate, ds_fsmoe.Config)) else set()
    if ast.Raise in does:
        assert section(name, "Raises"), f"{name} does not say what it raises"


class Checker(doctest.OutputChecker):
    """Lets be what a line prints by the way, such as DeepSpeed's messages, where the example shows no result."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return want == "" or super().check_output(want, got, optionflags)


def failures_of(rank: int, world_size: int, names: list[str]) -> dict[str, str]:
    """Runs examples; name -> what went wrong."""
    found = {}
    for name in names:
        shown = doctest.DocTestParser().get_doctest(docstring_of(name), {}, name, None, 0)
        said: list[str] = []
        runner = doctest.DocTestRunner(Checker(), verbose=False, optionflags=doctest.ELLIPSIS)
        runner.run(shown, out=said.append)
        if said or not shown.examples:
            found[name] = "".join(said) or "there is no example"
    return found


NEED_A_RANK = [
    *("gradient_norm", "inference", "initialize", "install", "make_whole", "own_experts", "uninstall"),
    *("whole_parameters", "whole_state_dict"),
]


@pytest.mark.parametrize("name", sorted({*OBJECTS} - {*NEED_A_RANK}))
def test_the_example_of_a_public_name_runs(name: str, monkeypatch) -> None:
    from ds_fsmoe import registry

    # What an example registers is not there for other tests. All that is ours is there before it is copied.
    for kind in registry._PARTS:
        registry.known(kind)
    monkeypatch.setattr(registry, "_PARTS", {kind: dict(parts) for kind, parts in registry._PARTS.items()})
    assert failures_of(0, 1, [name]) == {}


# What a subclass of a public class defines, or a user calls.
DEFINED = [
    *[(name, method) for name in ("GateBase", "TokenChoiceGate") for method in ("build", "forward")],
    *[("GateBase", "build_once"), ("GateBase", "after_optimizer_step")],
    *[("TokenChoiceGate", "score"), ("TokenChoiceGate", "weigh"), ("ExpertBase", "do_experts")],
    *[("OrderBase", "arrange"), ("OrderBase", "restore")],
    *[("AllToAllBase", "exchange"), ("AllToAllBase", "exchange_rows")],
    *[("MOELayer", "forward"), ("FSMoELayer", "forward")],
]


@pytest.mark.parametrize(("name", "method"), DEFINED, ids=[".".join(each) for each in DEFINED])
def test_a_method_that_users_define_or_call_says_what_it_is_given(name: str, method: str) -> None:
    public = getattr(ds_fsmoe, name)
    shown = inspect.getdoc(getattr(public, method)) or ""  # that of the parent, where a class defines it again
    given = re.search(r"(?ms)^Args:\n(.*?)(?=^\S|\Z)", shown)
    for parameter in list(inspect.signature(getattr(public, method)).parameters)[1:]:
        assert given, f"{name}.{method}"
        assert re.search(rf"(?m)^    {parameter}: ", given[1]), f"{name}.{method} does not say what {parameter} is"


REFERENCE = (ROOT / "docs" / "api.md").read_text()


def test_errors_in_the_reference_are_of_the_kinds_that_stand_beside_them() -> None:
    rows = re.findall(r"(?m)^\| (?:\[`\w+`\]\[ds_fsmoe\.(\w+)\]|`ds_fsmoe\.([\w.]+)`) \| `(\w+)` \|", REFERENCE)
    assert len(rows) > 8
    for public, path, kind in rows:
        module, _, name = path.rpartition(".")
        error = getattr(ds_fsmoe, public) if public else getattr(importlib.import_module(f"ds_fsmoe.{module}"), name)
        assert issubclass(error, getattr(builtins, kind)), error
    assert {public for public, _, _ in rows} - {""} == {name for name in NAMES if name.endswith("Error")}


def what_an_engine_lacks(rank: int, world_size: int, words: list[str]) -> list[str]:
    model = ds_fsmoe.MoE(8, torch.nn.Linear(8, 8), num_experts=4, ep_size=world_size, k=2)
    block = {"enabled": True, "ops": "reference", "autotune": True, "placement": "balanced"}
    ds_config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = ds_fsmoe.initialize(
        model=model, model_parameters=model.parameters(), config=ds_config | {"fsmoe": block}
    )
    assert callable(engine.fsmoe_dummy_forward)
    lacks = []
    for word in words:
        found = engine.fsmoe
        for part in re.sub(r"\(.*\)", "", word).split("."):
            found = getattr(found, part, lacks)
        if found is lacks or ("(" in word and not callable(found)):
            lacks.append(word)
    return lacks


def test_an_engine_has_what_the_reference_says(tmp_path: Path) -> None:
    table = REFERENCE.split("| `engine.fsmoe` | what it is |")[1].split("\n\n")[0]
    words = [word for row in re.findall(r"(?m)^\| (`.*?`) \|", table) for word in re.findall(r"`([^`]+)`", row)]
    assert len(words) > 8
    assert run_on_ranks(what_an_engine_lacks, 2, tmp_path, words) == [[], []]


def test_the_examples_with_an_engine_run_on_one_rank(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert run_on_ranks(failures_of, 1, tmp_path, NEED_A_RANK) == [{}]


def test_an_example_that_is_wrong_or_missing_is_found(monkeypatch) -> None:
    monkeypatch.setattr(ds_fsmoe.SwitchGate, "__doc__", "A gate.\n\nExamples:\n    >>> 1 + 1\n    3\n")
    monkeypatch.setattr(ds_fsmoe.MixtralGate, "__doc__", "A gate.")
    found = failures_of(0, 1, ["SwitchGate", "MixtralGate"])
    assert "Got:\n    2" in found["SwitchGate"]
    assert found["MixtralGate"] == "there is no example"


# ---- types

SCRIPT = ROOT / "tests" / "typed_user_script.py"
# What the package stands on is not looked into: it takes minutes, and its types are not ours.
CONFIG = """
[mypy]
python_version = 3.11
follow_imports = silent
check_untyped_defs = True
warn_unused_ignores = True
"""
OTHERS = ("torch", "deepspeed", "pydantic", "pydantic_core", "numpy", "scipy", "safetensors", "rich", "packaging")


@pytest.mark.long
def test_mistakes_in_a_users_script_are_reported_and_nothing_else_is(tmp_path: Path) -> None:
    config = tmp_path / "mypy.ini"
    skipped = (f"[mypy-{name}.*]\nfollow_imports = skip\nignore_missing_imports = True\n" for name in OTHERS)
    config.write_text(CONFIG + "".join(skipped))
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [*command, "--no-error-summary", "--hide-error-context", str(SCRIPT)], cwd=ROOT, capture_output=True, text=True
    )
    reported = {(int(line), code) for line, code in re.findall(r"script\.py:(\d+): error: .*\[([\w-]+)\]", done.stdout)}
    expected = {
        (number, found[1])
        for number, line in enumerate(SCRIPT.read_text().splitlines(), start=1)
        if (found := re.search(r"# wrong: ([\w-]+)$", line))
    }
    assert len(expected) > 15
    assert reported == expected, done.stdout + done.stderr
