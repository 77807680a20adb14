# SPDX-License-Identifier: Apache-2.0
"""Whatever stands in a config or a file, it is read, or refused in words: no error from inside. Whatever the sizes of a
layer, it computes what a loop over tokens does."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ds_fsmoe
from ds_fsmoe.checkpoint_files import pieces
from ds_fsmoe.checkpoint_files.manifest import FileSum, LayerSizes, Manifest, Sizes, read_manifest
from ds_fsmoe.checkpoint_files.pieces import Group, Index, Piece, read_index
from ds_fsmoe.checkpoint_files.reading import read_file
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.reading import ConfigError, read_block
from ds_fsmoe.measuring.cache import Measurements, UselessFileError, read_measurements, write_measurements
from ds_fsmoe.planning.cluster import cluster_as_json, load_cluster
from ds_fsmoe.planning.job.measured import Timing
from tests.reference import LayerSettings, moe_layer

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 17, 10**30, 0.0, 1.5, -0.25, float("nan"), float("inf"), 1e-300),
    *("", "auto", "a", "fsmoe", "0", "best", "../..", "os.system", "ds_fsmoe", "\udcff", "a" * 5000, "∞"),
    *([], [1], ["a"], [[]], [None], {}, {"a": 1}, {"": None}, {"enabled": True}),
)


def some_value(draw: random.Random, depth: int = 3) -> Any:
    """Odd, or odd things in lists and objects."""
    if depth and draw.random() < 0.2:
        return {draw.choice(("enabled", "type", "k", "max", "x")): some_value(draw, depth - 1) for _ in range(2)}
    if depth and draw.random() < 0.1:
        return [some_value(draw, depth - 1) for _ in range(draw.randint(0, 3))]
    return draw.choice(ODD)


def spoilt(value: Any, draw: random.Random) -> Any:
    """The same but for one place somewhere in it: changed, left out, or added."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        name = draw.choice(list(value))
        changed = dict(value)
        way = draw.random()
        if way < 0.7:
            changed[name] = spoilt(value[name], draw)
        elif way < 0.85:
            del changed[name]
        else:
            changed[draw.choice(("x", name + "s", ""))] = some_value(draw)
        return changed
    if isinstance(value, list) and value and draw.random() < 0.8:
        at = draw.randrange(len(value))
        return [*value[:at], spoilt(value[at], draw), *value[at + 1 :]]
    return some_value(draw)


def whole_block() -> dict[str, Any]:
    found = json.loads(FSMoEBlock(enabled=True).model_dump_json())
    return found | {"gate": {"type": "gshard", "k": 2}, "metrics": "off", "schedule": "fsmoe"}


def test_a_block_is_read_or_refused_in_words() -> None:
    refused = read = 0
    for seed in range(3000):
        draw = random.Random(seed)
        block: Any = whole_block()
        if draw.random() < 0.3:
            block = {"enabled": True}
        for _ in range(draw.randint(1, 3)):
            block = spoilt(block, draw)
        try:
            read_block({"train_batch_size": 8, "fsmoe": block})
            read += 1
        except ConfigError as error:
            refused += 1
            text = str(error)
            assert "fsmoe" in text, block
            assert "Traceback" not in text
            assert len(text) < 50_000
    assert read > 20
    assert refused > 1000


def spoilt_file(text: str, draw: random.Random) -> bytes:
    """With other values in it, cut short, or with other bytes."""
    if draw.random() < 0.7:
        found = json.loads(text)
        for _ in range(draw.randint(1, 2)):
            found = spoilt(found, draw)
        return json.dumps(found).encode("utf-8", "surrogatepass")
    data = bytearray(text.encode())
    if draw.random() < 0.5:
        return bytes(data[: draw.randrange(len(data))])
    for _ in range(4):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data)


def test_a_cluster_file_is_read_or_refused_in_words(tmp_path: Path) -> None:
    text, file, refused = json.dumps(cluster_as_json(load_cluster("testbed_a"))), tmp_path / "cluster.json", []
    for seed in range(600):
        file.write_bytes(spoilt_file(text, random.Random(seed)))
        try:
            load_cluster(str(file))
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > 300
    assert all(str(file) in each for each in refused)


def test_a_cache_is_read_or_passed_over_in_words(tmp_path: Path) -> None:
    fingerprint, refused = {"device": "cpu"}, 0
    file = tmp_path / "cache.json"
    timings = {"gemm": Timing("flop", (1.0, 2.0, 4.0), (0.5, 0.7, 1.1))}
    write_measurements(file, fingerprint, Measurements(timings, {"a number": 1.5}), load_cluster("testbed_a"))
    text = file.read_text()
    for seed in range(400):
        file.write_bytes(spoilt_file(text, random.Random(seed)))
        try:
            read_measurements(file, fingerprint)
        except UselessFileError:
            refused += 1
    assert refused > 200


MANIFEST = Manifest(
    Sizes(world=2, mp=1, pp=1, zero_stage=1, esp=1, dtype="float32"),
    (LayerSizes("a.moe", 4, 2, {"fc1.weight": 0, "fc2.bias": "first"}),),
    {"torch": "2.13"},
    {"x.pt": FileSum(70, "00")},
)
INDEX = Index(
    "Adam",
    (
        Group(
            "x.pt", {"fp32": ("a", 0), "exp_avg": ("b", "state", 1)}, {"step": 3.0}, {"lr": 0.1}, (Piece("w", 0, 4, 2),)
        ),
    ),
    {"cur_scale": 1.0},
)


def test_a_manifest_is_read_or_refused_in_words(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path)
    check_reading(MANIFEST, read_manifest, tmp_path)


def test_an_index_is_read_or_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / pieces.NAME).write_text(INDEX.as_json())
    check_reading(INDEX, lambda folder: read_index(folder, None), tmp_path)


def check_reading(what: Any, read: Any, tmp_path: Path) -> None:
    assert read(tmp_path) == what
    (file,) = tmp_path.iterdir()
    text, refused = file.read_text(), []
    for seed in range(800):
        file.write_bytes(spoilt_file(text, random.Random(seed)))
        try:
            read(tmp_path)
        except CheckpointError as error:
            refused.append(str(error))
    assert len(refused) > 300
    assert all(str(file) in each for each in refused)


def test_a_file_of_a_checkpoint_is_read_or_refused_in_words(tmp_path: Path) -> None:
    file = tmp_path / "x.pt"
    torch.save({"module": {"w": torch.ones(5)}, "num_experts": [4], "text": "x" * 50}, file)
    data, refused = file.read_bytes(), []
    for seed in range(300):
        draw, changed = random.Random(seed), bytearray(data)
        if draw.random() < 0.3:
            changed = changed[: draw.randrange(len(data))]
        for _ in range(draw.choice((0, 1, 5, 40))):
            if changed:
                changed[draw.randrange(len(changed))] = draw.randrange(256)
        file.write_bytes(bytes(changed))
        try:
            read_file(file)
        except CheckpointError as error:
            refused.append(str(error))
    assert len(refused) > 50
    assert all(str(file) in each for each in refused)


@pytest.mark.parametrize("seed", range(40))
def test_a_layer_of_any_sizes_is_a_loop_over_its_tokens(seed: int) -> None:
    draw = random.Random(seed)
    num_experts, width = draw.randint(1, 7), draw.randint(1, 9)
    k = draw.randint(1, min(2, num_experts))
    tokens, hidden = draw.randint(1, 23), draw.randint(1, 11)
    # With k = 1 the caller of the loop has to say who stays.
    factor, drops = draw.choice((0.25, 0.75, 1.0, 2.0)), k == 2 and draw.random() < 0.7
    degrees = draw.randint(1, 5), draw.randint(1, 5)
    torch.manual_seed(seed)
    options = {"capacity_factor": factor, "drop_tokens": drops, "min_capacity": draw.choice((0, 1, 4))}
    gate = ds_fsmoe.LinearGate(k=k, use_rts=False, top2_2nd_expert_sampling=False, **options)
    layer = ds_fsmoe.MOELayer(
        gate, ds_fsmoe.SimpleOrder(), model_dim=width, num_experts=num_experts, expert_dim=hidden,
        pipeline_degree=degrees, overlap=draw.random() < 0.5,
    )  # fmt: skip
    layer.double()
    x_SM = torch.randn(tokens, width, dtype=torch.float64, requires_grad=True)
    target_SM = torch.randn_like(x_SM)
    y_SM = layer(x_SM)
    (y_SM * target_SM).sum().backward()
    found = x_SM.grad.clone(), [each.grad for each in layer.experts.parameters()]
    x_SM.grad = None
    layer.zero_grad()
    experts: list[nn.Module] = list(layer.experts.experts)
    settings = LayerSettings(k=k, **options)
    (expected,) = moe_layer([x_SM], gate.wg.weight, experts, settings)
    torch.testing.assert_close(y_SM, expected.output_SM)
    (expected.output_SM * target_SM).sum().backward()
    torch.testing.assert_close(found[0], x_SM.grad)
    for ours, parameter in zip(found[1], layer.experts.parameters(), strict=True):
        # An expert that nobody chose may have no gradient, or zeros.
        zeros = torch.zeros_like(parameter)
        theirs = zeros if parameter.grad is None else parameter.grad
        torch.testing.assert_close(zeros if ours is None else ours, theirs)
