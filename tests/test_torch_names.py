# SPDX-License-Identifier: Apache-2.0
"""Private names of torch stand in one list that is checked at start, and what is replaced is what torch calls."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.utils.checkpoint as torch_checkpoint  # noqa: E402

from ds_fsmoe.distributed import fail_together, nccl  # noqa: E402
from ds_fsmoe.engine import compat  # noqa: E402
from ds_fsmoe.engine.compat import OPTIONAL, TORCH_NAMES  # noqa: E402
from ds_fsmoe.layer import replay  # noqa: E402
from tests import sources  # noqa: E402
from tests.sources import tree  # noqa: E402

FILES = [*sources.FILES, *(sources.ROOT / "op_builder").rglob("*.py")]
LISTED = {word for name in (*TORCH_NAMES, *OPTIONAL) for word in name.replace(":", ".").replace("()", "").split(".")}


def is_private(word: str) -> bool:
    return word.startswith("_") and not word.startswith("__")


def torchs_private_names(source: ast.Module) -> Iterator[str]:
    """Words that a source looks up privately: in torch's modules, and on others where torch's classes have them."""
    modules: dict[str, str] = {}
    own = {"self", "cls"}
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            found = {(each.asname or each.name.partition(".")[0]): each.name for each in node.names}
            modules |= {name: full for name, full in found.items() if full.partition(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            modules |= {(each.asname or each.name): f"{node.module}.{each.name}" for each in node.names}
            yield from (
                word for each in node.names for word in f"{node.module}.{each.name}".split(".") if is_private(word)
            )
    classes = (torch.nn.Module(), torch.Tensor, dist.ProcessGroup)
    for node in ast.walk(source):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            name = root.id if isinstance(root, ast.Name) else ""
            if name in modules or (name not in own and any(hasattr(each, node.attr) for each in classes)):
                yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            looked_in, word = node.args[0], node.args[1]
            is_torchs = (
                isinstance(looked_in, ast.Name | ast.Attribute) and ast.unparse(looked_in).partition(".")[0] in modules
            )
            if is_torchs and isinstance(word, ast.Constant) and is_private(str(word.value)):
                yield word.value


def test_every_private_name_of_torch_that_is_used_is_listed() -> None:
    ours = {"_ds_fsmoe_tapes", "_ds_fsmoe_checked"}  # put there by us
    used = {(word, file.name) for file in FILES for word in torchs_private_names(tree(file)) if word not in ours}
    assert {each for each in used if each[0] not in LISTED} == set()
    assert {word for word, _ in used} >= {
        "_parameters",
        "_current_graph_task_id",
        "_BatchNorm",
        "_world",
        "_get_backend",
    }


def test_every_listed_name_is_there_or_optional_and_one_that_torch_moved_is_named() -> None:
    compat.check_private_names(TORCH_NAMES)
    with pytest.raises(compat.IncompatibleError, match=r"torch .* has no torch\.nn:Module\(\)\._gone"):
        compat.check_private_names({"torch.nn:Module()._gone": None})


@pytest.fixture
def untaped(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Torch's checkpointing as if nothing had been put in its place."""
    monkeypatch.setattr(torch_checkpoint, "_ds_fsmoe_tapes", False, raising=False)
    forward = torch_checkpoint.CheckpointFunction.forward
    monkeypatch.setattr(torch_checkpoint.CheckpointFunction, "forward", staticmethod(inspect.unwrap(forward)))
    for name in replay._GENERATORS:
        if hasattr(torch_checkpoint, name):
            monkeypatch.setattr(torch_checkpoint, name, inspect.unwrap(getattr(torch_checkpoint, name)))
    return monkeypatch


def test_a_seam_that_is_there_and_that_torch_does_not_call_is_refused_by_name(untaped: pytest.MonkeyPatch) -> None:
    """So is one that is gone; with those of today, both kinds of checkpointing have tapes."""
    generators = replay._GENERATORS

    def shim(fn, preserve_rng_state=True, context_fn=torch_checkpoint.noop_context_fn):
        raise AssertionError("nobody calls it")

    untaped.setattr(replay, "_GENERATORS", ("left_over",))
    untaped.setattr(torch_checkpoint, "left_over", shim, raising=False)
    with pytest.raises(RuntimeError, match=r"checkpoint\.left_over is not called by checkpoint\(use_reentrant=False\)"):
        replay.tape_torchs_functions()
    assert not torch_checkpoint._ds_fsmoe_tapes
    assert torch_checkpoint.left_over is shim
    untaped.setattr(replay, "_GENERATORS", ("gone",))
    with pytest.raises(RuntimeError, match=r"torch .*: torch\.utils\.checkpoint\.gone takes no context_fn"):
        replay.tape_torchs_functions()
    untaped.setattr(replay, "_GENERATORS", generators)
    replay.tape_torchs_functions()
    assert replay._has_tape(use_reentrant=True)
    assert replay._has_tape(use_reentrant=False)


def test_every_name_of_nccl_is_known_and_ranks_compare_its_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    class ProcessGroupNCCL2: ...

    class Group:
        def _get_backend(self, device: torch.device) -> object:
            assert device.type == "cuda"
            return ProcessGroupNCCL2()

    assert nccl.facts() == {}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for backend in ("nccl", "nccl-legacy", "nccl2", "nccl-lazy"):
        monkeypatch.setattr(dist, "get_backend", lambda group=None, name=backend: name)
        monkeypatch.setattr(dist, "get_backend_config", lambda group=None, name=backend: f"cuda:{name}")
        assert fail_together.device_of(None) == torch.device("cuda", 3)
        assert nccl.is_used()
    monkeypatch.setattr(nccl, "world_size_now", lambda: 2)
    monkeypatch.setattr(nccl, "version", lambda: (2, 30, 1))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", Group)
    assert nccl.facts() == {"NCCL": "ProcessGroupNCCL2 2.30.1"}
