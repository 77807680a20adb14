# SPDX-License-Identifier: Apache-2.0
"""The public names: which they are, and that each says what it is, takes, returns and raises."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import doctest
import importlib
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_fsmoe
from ds_fsmoe.components.gate import SettingsGate
from tests.ranks import run_on_ranks

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


def test_nothing_else_in_the_package_looks_public() -> None:
    import types

    others = {name for name, value in vars(ds_fsmoe).items() if not isinstance(value, types.ModuleType)}
    assert {name for name in others - set(NAMES) if not name.startswith("_")} <= {
        "annotations",
        "TYPE_CHECKING",
        "Any",
        "BFloat16Wire",  # a name of version 0.2.0
    }


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


@pytest.mark.parametrize("name", OBJECTS)
def test_a_public_name_says_what_it_is_where_it_is_defined(name: str) -> None:
    summary, *_ = docstring_of(name).split("\n\n")
    assert len(summary.split()) > 3
    said = section(name, "Args")
    if "Options that are not listed here are those of :class:`TokenChoiceGate`" in docstring_of(name):
        said += section("TokenChoiceGate", "Args")
    for parameter in parameters(getattr(ds_fsmoe, name)) if name not in OF_DEEPSPEED else ():
        assert re.search(rf"(?m)^    {parameter}: ", said), f"{name} does not say what {parameter} is"


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


# What takes or gives tensors, and so says of which shapes.
SHAPED = [
    name
    for name in OBJECTS
    if name.endswith(("Gate", "GateBase", "Order", "OrderBase", "AllToAll", "AllToAllBase", "Routing", "RoutingBase"))
    or name.endswith(("FeedForward", "ExpertBase", "ExpertArgs", "Wire", "FramesAsTokens", "CallbackBase", "Layer"))
    or name in ("MoE", "MoEOutput", "make_whole", "read_routing", "whole_state_dict")
]


@pytest.mark.parametrize("name", SHAPED)
def test_what_moves_tensors_says_of_which_shapes(name: str) -> None:
    assert re.search(r"\[(\.\.\.|[A-Z][\w* ]*)(, ?[\w.*+ ]+)*\]", docstring_of(name))


class Checker(doctest.OutputChecker):
    """Lets be what a line prints by the way, such as DeepSpeed's messages, where the example shows no result."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return want == "" or super().check_output(want, got, optionflags)


def failures_of(names: list[str]) -> dict[str, str]:
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
    "gradient_norm",
    "inference",
    "initialize",
    "install",
    "make_whole",
    "own_experts",
    "uninstall",
    "whole_parameters",
    "whole_state_dict",
]


@pytest.mark.parametrize("name", sorted({*OBJECTS} - {*NEED_A_RANK}))
def test_the_example_of_a_public_name_runs(name: str, monkeypatch) -> None:
    from ds_fsmoe import registry

    # What an example registers is not there for other tests.
    # All that is ours is on the shelf before it is copied: an import puts a part there once.
    for kind in registry._PARTS:
        registry.known(kind)
    monkeypatch.setattr(registry, "_PARTS", {kind: dict(parts) for kind, parts in registry._PARTS.items()})
    assert failures_of([name]) == {}


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


REFERENCE = (Path(__file__).resolve().parents[1] / "docs" / "api.md").read_text()


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
            if not hasattr(found, part):
                lacks.append(word)
                break
            found = getattr(found, part)
        else:
            if "(" in word and not callable(found):
                lacks.append(word)
    return lacks


def test_an_engine_has_what_the_reference_says(tmp_path: Path) -> None:
    table = REFERENCE.split("| `engine.fsmoe` | what it is |")[1].split("\n\n")[0]
    words = [word for row in re.findall(r"(?m)^\| (`.*?`) \|", table) for word in re.findall(r"`([^`]+)`", row)]
    assert len(words) > 8
    assert run_on_ranks(what_an_engine_lacks, 2, tmp_path, words) == [[], []]


def failures_on_a_rank(rank: int, world_size: int, names: list[str]) -> dict[str, str]:
    return failures_of(names)


def test_the_examples_with_an_engine_run_on_one_rank(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert run_on_ranks(failures_on_a_rank, 1, tmp_path, NEED_A_RANK) == [{}]


def test_an_example_that_is_wrong_or_missing_is_found(monkeypatch) -> None:
    monkeypatch.setattr(ds_fsmoe.SwitchGate, "__doc__", "A gate.\n\nExamples:\n    >>> 1 + 1\n    3\n")
    monkeypatch.setattr(ds_fsmoe.MixtralGate, "__doc__", "A gate.")
    found = failures_of(["SwitchGate", "MixtralGate"])
    assert "Got:\n    2" in found["SwitchGate"]
    assert found["MixtralGate"] == "there is no example"


@pytest.mark.parametrize("name", [name for name in OBJECTS if name.endswith("Gate")])
def test_a_gates_options_are_typed_keywords_in_its_signature(name: str) -> None:
    options = inspect.signature(getattr(ds_fsmoe, name)).parameters.values()
    assert options
    for option in options:
        assert option.kind is option.KEYWORD_ONLY
        assert option.annotation is not option.empty
        assert option.default is not option.empty
