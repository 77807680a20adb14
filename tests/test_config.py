# SPDX-License-Identifier: Apache-2.0
"""The fsmoe block: strict, complete, and every mistake is one sentence with path, value and choices."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ds_fsmoe
from ds_fsmoe import Config, registry
from ds_fsmoe.checks.preflight import check_deepspeed_blocks, check_experts, untested
from ds_fsmoe.components.orders.sparse import SimpleOrder
from ds_fsmoe.config.blocks import FSMoEBlock, GateBlock
from ds_fsmoe.config.hints import class_name, stub
from ds_fsmoe.config.reading import CHECKS, Asked, ConfigError, read_block
from ds_fsmoe.config.words import words_of
from ds_fsmoe.planning.decide.presets import NAMES
from ds_fsmoe.shapes import example_of, shape_in, words_for

PACKAGE = Path(ds_fsmoe.__file__).parent
WHOLE_BLOCK = json.loads(FSMoEBlock(enabled=True).model_dump_json()) | {
    "gate": {"type": "topk", "k": 3, "capacity_factor": 1.2, "eval_capacity_factor": 1.2, "min_capacity": 4}
}
"""Every field, in the words and values of its default."""


def test_a_block_may_be_one_word_or_whole_and_one_that_is_disabled_is_not_asked_what_this_version_can_do() -> None:
    assert read_block({"fsmoe": {"enabled": True}}) == FSMoEBlock(enabled=True)
    assert read_block({"fsmoe": WHOLE_BLOCK}).gate.k == 3
    assert read_block({"train_batch_size": 8}) is None
    of_a_plugin = {"type": "one of a plugin", "an option of its": 1}
    block = {"enabled": False, "schedule": "tutel", "order": "einsum", "gate": of_a_plugin}
    assert read_block({"fsmoe": block}).enabled is False


def test_a_mistyped_switch_does_not_turn_us_off_in_silence() -> None:
    assert lines_of({"enable": True})[0].startswith("fsmoe.enable: unknown key; did you mean 'enabled'?")
    assert lines_of({})[0].startswith('fsmoe.enabled is missing: write "enabled": true, or false for stock DeepSpeed')


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        # The mistakes of test_mistakes.py are not repeated.
        ({"enabled": False, "schedule": "a newer one"}, 'fsmoe.schedule = "a newer one": must be'),
        ({"enabled": 1}, "fsmoe.enabled = 1: must be a boolean"),
        ({"debug": {"zzz": 1}}, "fsmoe.debug.zzz: unknown key; the keys are check_every, hang_timeout_s"),
        ({"gate": {"topk": 2}}, "fsmoe.gate.topk: unknown key; write it as fsmoe.gate.top_k"),
        ({"pipeline_degre": 2}, "fsmoe.pipeline_degre: unknown key; did you mean 'num_chunks'?"),
        (
            {"gate": {"type": "deepseek", "num_experts_per_tok": 2}},
            'fsmoe.gate.num_experts_per_tok = 2: the gate "deepseek" has no such option; write it as fsmoe.gate.top_k',
        ),
        ({"gate": {"esp_size": 2}}, "fsmoe.gate.esp_size: unknown key; write it as fsmoe.expert_tensor_parallel_size"),
        ({"cache_dir": "x"}, "fsmoe.cache_dir: unknown key; write it as fsmoe.autotune.cache_dir"),
        ({"gate": {"enabled": True}}, "fsmoe.gate.enabled: unknown key; the keys are type, top_k, capacity_factor"),
        ({"ops": "torch"}, "fsmoe.ops = \"torch\": must be 'auto', 'plain', 'reference' or 'required'"),
        ({"esp_size": True}, "fsmoe.esp_size = true: must be an integer"),
        ({"gate": {"capacity_factor": float("inf")}}, "fsmoe.gate.capacity_factor = Infinity: must be a finite number"),
        ({"gate": {"drop_tokens": None}}, "fsmoe.gate.drop_tokens = null: must be a boolean"),
        ({"gate": {"type": "auto"}}, 'fsmoe.gate.type = "auto": no such part; the choices are deepseek, expert'),
        ({"plugins": [""]}, 'fsmoe.plugins = "": cannot be imported'),
        ({"gate": 3}, 'fsmoe.gate = 3: must be an object or the name of a gate, for example {"type": "mixtral"}'),
        ({"num_chunks": [2]}, ', for example {"forward": 2, "backward": 4}'),
        ({"plugins": [3]}, ', for example "my_package.my_parts"'),
        # Nearly a word of before is answered with today's.
        ({"dispatch": "slot"}, "did you mean 'padded'?"),
        ({"alltoall": "once_per_nod"}, "did you mean 'node_deduplicated'?"),
        ({"autotune": 1}, 'fsmoe.autotune = 1: must be an object or "auto", true or false'),
        ({"autotune": "on"}, "fsmoe.autotune = \"on\": must be a boolean or 'auto'"),
        ({"debug": True}, "fsmoe.debug = true: must be an object"),
        ({"pipeline_degree": {"max": 1000}}, "fsmoe.pipeline_degree.max = 1000: must be less than or equal to 256"),
        (
            {"schedule": "tutel", "pipeline_degree": {"forward": 2, "backward": 3}},
            'fsmoe.pipeline_degree = 2 forward and 3 backward: must be equal with fsmoe.schedule = "tutel"',
        ),
        (
            {"schedule": "fsmoe", "pipeline_degree": {"backward": 3}, "autotune": False},
            'fsmoe.pipeline_degree.forward = "auto" with fsmoe.schedule = "fsmoe": must be a number',
        ),
        (
            {"schedule": "fsmoe", "num_chunks": {"backward": 3}, "deterministic": True},
            'fsmoe.num_chunks.forward = "auto" with fsmoe.schedule = "fsmoe": must be a number, or '
            "fsmoe.deterministic be false",
        ),
        # An option of another mode is never ignored.
        (
            {"gradient_partition": {"mode": "adaptive", "chunk_bytes": 1000}},
            'fsmoe.gradient_partition.chunk_bytes = 1000: only with mode = "fixed_chunk" or "micro_ops", and it is '
            '"adaptive"',
        ),
        (
            {"autotune": {"enabled": False, "cache_dir": "x"}},
            'fsmoe.autotune.cache_dir = "x": only with fsmoe.autotune.enabled = true or "auto", and it is false',
        ),
        (
            {"autotune": {"enabled": False, "watch_every": 5}},
            "fsmoe.autotune.watch_every = 5: only with fsmoe.autotune.enabled = true",
        ),
        (
            {"autotune": {"enabled": True, "retune_on_drift": True, "watch_every": 0}},
            "fsmoe.autotune.retune_on_drift = true: only with fsmoe.autotune.watch_every above 0, and it is 0",
        ),
        ({"num_chunks": {"max": 8}, "autotune": {"enabled": False}}, "fsmoe.num_chunks.max = 8: only with"),
        ({"deterministic": True, "autotune": {"trials": 5}}, "deterministic = true measures nothing"),
        # What lina chooses is not given by hand as well.
        (
            {"schedule": "lina", "num_chunks": {"forward": 2}},
            'fsmoe.num_chunks = 2 forward and auto backward: must be equal with fsmoe.schedule = "lina"',
        ),
    ],
)
def test_a_mistake_is_named_with_path_value_and_choices_when_it_is_read_or_built(written: dict, sentence: str) -> None:
    block = {"enabled": True} | written
    (said,) = lines_of(block)
    assert said.startswith(sentence) if sentence.startswith("fsmoe") else sentence in said
    with pytest.raises(ConfigError) as at_once:
        Config(**block)
    assert str(at_once.value) == said


@pytest.mark.parametrize("solver", ["exact", "slsqp"])
def test_the_solver_of_earlier_versions_changes_nothing_and_gets_one_line(solver: str) -> None:
    written = {"enabled": True, "solver": solver}
    assert read_block({"fsmoe": written}) == FSMoEBlock(enabled=True)
    assert words_of(written).old == [f'fsmoe.solver = "{solver}" has no effect any more: remove it']
    assert read_block({"fsmoe": {"enabled": False, "solver": solver}}) == FSMoEBlock(enabled=False)


@pytest.mark.parametrize("schedule", NAMES)
def test_with_the_autotuner_every_schedule_may_have_its_degrees_chosen(schedule: str) -> None:
    written = {"enabled": True, "schedule": schedule, "autotune": {"enabled": True}, "pipeline_degree": {"max": 8}}
    assert read_block({"fsmoe": written}).pipeline_degree.max == 8


def test_lina_needs_no_numbers_and_keeps_to_its_bounds() -> None:
    block = read_block({"fsmoe": {"enabled": True, "schedule": "lina", "num_chunks": {"max": 3}}})
    assert (block.pipeline_degree.forward, block.pipeline_degree.max) == ("auto", 3)
    assert block.gradient_partition.asked_bytes is None
    # Its micro-ops are all-to-alls too, whoever reduces gradients.
    partition = {"mode": "off", "chunk_bytes": 1e6}
    block = read_block({"fsmoe": {"enabled": True, "schedule": "lina", "gradient_partition": partition}})
    assert block.gradient_partition.asked_bytes == 1_000_000


def test_every_field_is_read_somewhere() -> None:
    """A field that nothing reads would be ignored in silence: a file outside config/ has its name and its block's."""
    texts = [each.read_text() for each in PACKAGE.rglob("*.py") if each.parent.name != "config"]

    def unread(block: Any, of_block: tuple[str, ...]) -> list[str]:
        found = []
        for name, field in block.model_fields.items():
            names = [re.compile(rf"(\.|[\"'])_?{each}\b") for each in (*of_block, name)]
            if not any(all(each.search(text) for each in names) for text in texts):
                found.append(".".join((*of_block, name)))
            if shape := shape_in(field):
                found += unread(shape, (name,))
        return found

    assert unread(FSMoEBlock, ()) == []


def test_no_hint_names_a_field_that_is_not_there() -> None:
    from ds_fsmoe.config.words import _ELSEWHERE

    for name, hint in _ELSEWHERE.items():
        for path in re.findall(r"fsmoe\.[\w.]+", hint):
            assert path in words_of({}).paths
        with pytest.raises(ConfigError, match=f"fsmoe.{name}: unknown key; "):
            read_block({"fsmoe": {"enabled": True, name: 1}})


def test_the_largest_degree_is_the_planners() -> None:
    from ds_fsmoe.config.blocks import MOST_CHUNKS
    from ds_fsmoe.planning.decide.plan import MAX_DEGREE

    assert MOST_CHUNKS == MAX_DEGREE


def test_half_precision_on_a_cpu_is_said_to_be_untested() -> None:
    half, autocast = {"fp16": {"enabled": True}}, {"torch_autocast": {"enabled": True, "dtype": "float16"}}
    assert [each.split(" on a ")[0] for each in untested(half, "cpu")] == ["fp16.enabled = true"]
    assert [each.split(" on a ")[0] for each in untested(autocast, "cpu")] == ["torch_autocast.dtype = float16"]
    bfloat16 = {"bf16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    assert [*untested(half, "cuda"), *untested(bfloat16, "cpu")] == []


@pytest.mark.parametrize("key", ["fsMoE", "fs-moe", "fsmeo", "fmoe", "ds_fsmoe", "fsmoe_config"])
def test_a_misspelt_block_is_an_error_and_one_that_is_no_object(key: str) -> None:
    with pytest.raises(ConfigError, match='did you mean "fsmoe"'):
        read_block({key: {"enabled": True}})
    for written in (3, [key], None):
        with pytest.raises(ConfigError, match=r'^fsmoe = .*: must be an object, for example \{"enabled": true\}'):
            read_block({"fsmoe": written})


def test_no_key_of_deepspeed_is_taken_for_a_misspelt_block() -> None:
    from deepspeed.runtime import config, constants

    words = set(re.findall(r'"([a-z][a-z0-9_]+)"', inspect.getsource(config) + inspect.getsource(constants)))
    assert {"fp16", "zero_optimization", "wandb"} - words <= {"wandb"}
    read_block(dict.fromkeys(words))


def test_a_plugin_brings_its_part(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_order_plugin.py").write_text(
        "from ds_fsmoe import SimpleOrder, register_order\n@register_order('mine')\nclass Mine(SimpleOrder): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    block = read_block({"fsmoe": {"enabled": True, "plugins": ["my_order_plugin"], "order": "mine"}})
    assert issubclass(registry.lookup("order", block.order), SimpleOrder)
    registry._PARTS["order"].pop("mine")


def layer(num_experts: int = 8, ep_size: int = 2, k: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        num_experts=num_experts, ep_size=ep_size, deepspeed_moe=SimpleNamespace(gate=SimpleNamespace(k=k))
    )


@pytest.mark.parametrize(
    ("gate", "made", "sentence"),
    [
        ({"k": 0}, layer(), "fsmoe.gate.top_k = 0: must be between 1 and num_experts (8 in h.0)"),
        ({"drop_policy": "probs"}, layer(k=2), 'fsmoe.gate.drop_policy = "probs": for k >= 3 only; k = 2 in h.0'),
        ({}, layer(ep_size=8), "h.0.ep_size = 8: must divide the 4 ranks; for 8 experts the choices are 1, 2, 4"),
    ],
)
def test_a_block_that_does_not_fit_the_model_is_refused(gate: dict, made: SimpleNamespace, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_experts({"h.0": made}, 4, GateBlock(**gate))
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("blocks", "sentence"),
    [
        ({"fp16": {"enabled": True}}, "use stage 1 or 2, or bf16"),
        ({"zero_optimization": {"stage": 1, "contiguous_gradients": False}}, "contiguous_gradients = false"),
        ({"expert_parallel": {"enabled": True}}, "expert_parallel.enabled = true: AutoEP"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size: DeepSpeed would split the layers"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile = true"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine.enabled = true"),
        ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "zero_optimization.zenflow"),
    ],
)
def test_blocks_of_deepspeed_that_clash_are_refused(blocks: dict, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_deepspeed_blocks(blocks)
    assert sentence in str(caught.value)
    assert str(caught.value).startswith("with fsmoe.enabled = true: ")


def test_blocks_of_deepspeed_that_go_along_are_not_refused() -> None:
    for blocks in (
        {"zero_optimization": True},
        {"tensor_parallel": {"autotp_size": 1}},
        {"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    ):
        check_deepspeed_blocks(blocks)


def lines_of(written: dict[str, Any], **beside: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_block({"fsmoe": written} | beside)
    return str(caught.value).splitlines()


def test_mistakes_of_every_kind_are_told_in_one_error_with_a_line_each() -> None:
    written = {
        "enabled": True,
        "gat": "mixtral",
        "ops": "torch",
        "order": "einsun",
        "gate": {"k": 2, "top_k": 2},
        "esp_size": "2",
        "plugins": ["no.such"],
        "gradient_partition": {"mode": "off", "solver": "de"},
        "trace": {"cluster": "nowhere"},
        "debug": {"check_every": "often", "zzz": 1},
    }
    heading, *lines = lines_of(written, autotune={"enabled": True})
    assert heading == f"{len(lines)} problems:"
    starts = [re.match(r"[\w.]+", line)[0].removeprefix("fsmoe.") for line in lines]
    expected = ["autotune", "gat", "ops", "gate.top_k", "esp_size", "plugins", "gradient_partition.solver"]
    expected += ["trace.cluster", "debug.check_every", "debug.zzz"]
    # Which orders there are is not known before the plugin that may bring one can be imported.
    assert sorted(starts) == sorted(expected)
    assert [*lines_of(written | {"plugins": []}, autotune={})[1:]] != lines
    assert any(line.startswith("fsmoe.order") for line in lines_of(written | {"plugins": []}))


def test_a_mistake_hides_none_of_its_neighbours_and_known_keys_are_listed_once() -> None:
    gate = {"k": 2, "top_k": 2, "capacity_factor": None, "drop_tokens": True, "min_capacity": "few", "drop_policy": "x"}
    starts = [line.split(" ")[0] for line in lines_of({"enabled": True, "gate": gate, "plugins": ["no.a", "no.b"]})]
    assert starts[1:] == [
        *("fsmoe.gate.top_k", "fsmoe.gate.capacity_factor", "fsmoe.gate.min_capacity", "fsmoe.gate.drop_policy"),
        *("fsmoe.plugins", "fsmoe.plugins"),
    ]
    heading, *lines = lines_of({"schedule": "fsmoo", "max_ctas": 0})
    assert heading == "3 problems:"
    assert [line.split(" ")[0] for line in lines] == ["fsmoe.enabled", "fsmoe.schedule", "fsmoe.max_ctas"]
    said = "\n".join(lines_of({"enabled": True, "zzz": 1, "yyy": 2, "num_experts": 3, "debug": {"xxx": 1}}))
    assert said.count("docs/config.md describes all keys") == said.count("check_every, hang_timeout_s") == 1
    assert "\nfsmoe.yyy: unknown key\n" in said


def test_nothing_is_asked_of_a_field_whose_value_nobody_knows() -> None:
    """A schedule named "linaa" may have been one that needs no number, and a policy of 3 any."""
    written = {"enabled": True, "schedule": "linaa", "autotune": False, "num_chunks": {"max": 8}}
    assert [line.split(" ")[0] for line in lines_of(written)] == ["fsmoe.schedule"]
    assert len(lines_of({"enabled": True, "placement": {"policy": 3, "every": 10}})) == 1
    assert len(lines_of({"enabled": "yes", "order": "einsun"})) == 1, "stock's, perhaps"


class Spy:
    """A block that notes which of its fields are read."""

    def __init__(self, block: FSMoEBlock) -> None:
        self.block, self.read = block, set()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.block, name)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_check_of_fields_together_reads_what_it_says_and_nothing_else(check: Any) -> None:
    blocks: list[dict] = [{}, {"deterministic": True}, {"autotune": False}, {"schedule": "tutel", "num_chunks": 2}]
    blocks += [{"schedule": "lina", "placement": "lina", "ep_size": 2}, {"schedule": "deepspeed", "num_chunks": 3}]
    blocks += [{"gradient_partition": {"collective": "reduce_scatter"}}, {"gate": "mixtral"}, {"gate": {"top_k": 2}}]
    blocks += [{"placement": {"policy": "balanced"}}, {"order": "x", "alltoall": "x"}]
    blocks += [{"trace": {"cluster": "testbed_a"}}]
    read = set()
    for each in blocks:
        spy = Spy(FSMoEBlock(enabled=True, **each))
        check(Asked(spy, each.get("gate"), 0))
        read |= spy.read
    # Which parts there are depends on the plugins, too.
    assert read == set(CHECKS[check]) - {"plugins"}


def test_every_example_is_one() -> None:
    def look(block: Any, around: Any) -> None:
        for name, field in block.model_fields.items():
            word = words_for(name, field)[0]
            FSMoEBlock.model_validate({"enabled": True} | around({word: example_of(field)}))
            assert example_of(field) is not None, f"{word} has no example"
            assert json.loads(json.dumps(example_of(field))) == example_of(field), f"{word} cannot be written like that"
            if inner := shape_in(field):
                look(inner, lambda value, word=word: around({word: value}))

    look(FSMoEBlock, lambda value: value)


@pytest.mark.parametrize("key", ["autotune", "auto_tuner"])
def test_our_autotuner_and_deepspeeds_are_told_apart(key: str) -> None:
    (line,) = lines_of({"enabled": True}, **{key: {"enabled": True}})
    assert line.startswith(f"{key} = ...: no such block in a DeepSpeed config; write it as fsmoe.autotune")
    assert "is the key autotuning" in line
    assert read_block({key: {"enabled": True}}) is None, "without our block it is no business of ours"
    (line,) = lines_of({"enabled": True, "autotuning": {"enabled": True}})
    assert line.startswith("fsmoe.autotuning: unknown key; write it as fsmoe.autotune, which chooses how layers run")
    assert "DeepSpeed's autotuning, which searches batch sizes and ZeRO settings, is a key beside fsmoe" in line
    assert read_block({"fsmoe": {"enabled": True}, "autotuning": {"enabled": True}}).enabled


# ---- ds_fsmoe.Config builds the block that a dict would be, and knows no key that the block does not have

FIELDS = {words_for(name, field)[0]: field for name, field in FSMoEBlock.model_fields.items()}
PARTS = {word: block for word, field in FIELDS.items() if (block := shape_in(field))}
BUILT = {
    "enabled": True,
    "gate": {"type": "topk", "top_k": 2},
    "num_chunks": {"forward": 2, "backward": 4},
    "hooks": ["ds_fsmoe.BFloat16Communication"],
}


def built() -> Config:
    gate = Config.Gate(type="topk", top_k=2)
    return Config(gate=gate, num_chunks={"forward": 2, "backward": 4}, hooks=["ds_fsmoe.BFloat16Communication"])


def test_it_is_the_block_that_was_written_and_nothing_more_wherever_it_goes() -> None:
    block = built()
    assert block == BUILT
    assert json.loads(json.dumps(block)) == BUILT
    assert read_block({"fsmoe": block}) == read_block({"fsmoe": BUILT})
    assert Config().as_dict() == {"enabled": True}
    assert Config(enabled=False).as_dict() == {"enabled": False}
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert other == BUILT
        assert (type(other), type(other["gate"])) == (Config, Config.Gate)
    # Its dict is plain, and its own.
    plain = block.as_dict()
    assert [type(plain), type(plain["gate"]), type(plain["num_chunks"])] == [dict] * 3
    plain["gate"]["top_k"] = 7
    plain["hooks"].append("x")
    assert block == BUILT


def test_deepspeed_and_install_take_it_as_a_dict() -> None:
    from ds_fsmoe.engine import compat, entry_points

    read = compat.load_ds_config({"train_batch_size": 8, "fsmoe": built()})
    assert read["fsmoe"] == BUILT
    assert read_block(read) == read_block({"fsmoe": BUILT})
    ds_fsmoe.install(built())
    try:
        assert entry_points._given.block == BUILT
    finally:
        ds_fsmoe.uninstall()


def test_every_block_in_the_block_has_a_class_whose_signature_has_every_key() -> None:
    assert list(inspect.signature(Config).parameters) == list(FIELDS)
    for word, block in PARTS.items():
        part = getattr(Config, class_name(word))
        assert part() == {}
        assert part.__doc__
        keys = [words_for(name, field)[0] for name, field in block.model_fields.items()]
        assert list(inspect.signature(part).parameters)[: len(keys)] == keys
        assert part(**example_of(FIELDS[word])) == example_of(FIELDS[word])


def test_the_hints_for_editors_are_of_this_version() -> None:
    assert (PACKAGE / "config" / "builder.pyi").read_text() == stub()


def test_a_mistake_in_a_part_is_told_where_the_part_is_built() -> None:
    with pytest.raises(ConfigError, match=r'^fsmoe\.gate\.top_k = "2": must be an integer, for example 2$'):
        Config.Gate(top_k="2")
    with pytest.raises(ConfigError, match=r"^fsmoe\.num_chunks\.forwards: unknown key; did you mean 'forward'\?"):
        Config.NumChunks(forwards=2)
    # What another gate than the layers' own takes is asked when the whole block is there.
    assert Config.Gate(type="deepseek", num_groups=2) == {"type": "deepseek", "num_groups": 2}
    with pytest.raises(ConfigError, match=r'fsmoe\.gate\.num_groupss = 2: the gate "deepseek" has no such option'):
        Config(gate=Config.Gate(type="deepseek", num_groupss=2))


def test_building_a_block_loads_no_torch_where_no_part_is_named() -> None:
    code = "import sys, ds_fsmoe; ds_fsmoe.Config(num_chunks=4, schedule='tutel'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "False", done.stderr


def test_where_there_is_no_torch_names_of_parts_are_taken_as_they_are(monkeypatch) -> None:
    from ds_fsmoe.config import reading

    monkeypatch.setattr(reading.importlib.util, "find_spec", lambda name: None)
    assert Config(gate={"type": "of another machine", "sharpness": 2}, order="of another machine")["enabled"]
