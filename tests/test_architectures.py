# SPDX-License-Identifier: Apache-2.0
"""What the planner reads from configurations is what transformers builds from them, parameter by parameter."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ds_fsmoe import cli  # noqa: E402
from ds_fsmoe.offline.models.architecture import Architecture  # noqa: E402
from ds_fsmoe.offline.models.hf_config import read_hf_config  # noqa: E402
from ds_fsmoe.offline.models.hf_families import FAMILIES  # noqa: E402
from ds_fsmoe.offline.models.known import PAPER, load_model, model_names  # noqa: E402
from ds_fsmoe.offline.plan import model as plan_model  # noqa: E402
from ds_fsmoe.offline.plan.command import add_arguments  # noqa: E402

TINY: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT: dict[str, Any] = {
    **{"q_lora_rank": 7, "kv_lora_rank": 6, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5},
    **{"num_key_value_heads": 4, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 3},
    **{"n_group": 2, "topk_group": 1},
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {"num_local_experts": 6}),
    ("mixtral", {"num_local_experts": 3, "head_dim": 6, "tie_word_embeddings": True, "sliding_window": 16}),
    ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "attention_bias": True, "num_key_value_heads": 4}),
    ("qwen2_moe", {"num_experts": 6, "shared_expert_intermediate_size": 17}),
    ("qwen2_moe", {"num_experts": 6, "decoder_sparse_step": 2, "qkv_bias": False, "use_sliding_window": True}),
    ("qwen2_moe", {"num_experts": 6, "mlp_only_layers": [0, 3], "use_sliding_window": True, "max_window_layers": 2}),
    ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 2}),
    ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "mlp_only_layers": [1]}),
    ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 2, "attention_bias": True, "tie_word_embeddings": True}),
    ("deepseek_v2", LATENT | {"first_k_dense_replace": 1}),
    ("deepseek_v2", LATENT | {"q_lora_rank": None, "attention_bias": True, "topk_method": "group_limited_greedy"}),
    ("deepseek_v2", LATENT | {"first_k_dense_replace": 2, "mlp_bias": True}),
    ("deepseek_v3", LATENT),
    ("deepseek_v3", LATENT | {"attention_bias": True, "first_k_dense_replace": 1}),
    ("deepseek_v3", LATENT | {"q_lora_rank": None, "attention_bias": True, "tie_word_embeddings": True}),
    ("gpt_oss", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    ("gpt_oss", {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 6, "attention_bias": False}),
    ("phimoe", {"num_local_experts": 6}),
    ("phimoe", {"num_local_experts": 6, "attention_bias": True, "lm_head_bias": True, "sliding_window": 8}),
    ("granitemoe", {"num_local_experts": 6}),
    ("granitemoe", {"num_local_experts": 6, "attention_bias": True, "tie_word_embeddings": True}),
    ("glm4_moe", {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 2}),
    ("glm4_moe", {"n_routed_experts": 6, "num_experts_per_tok": 2, "use_qk_norm": True, "attention_bias": True}),
    ("glm4_moe", {"n_routed_experts": 6, "num_experts_per_tok": 2, "num_attention_heads": 6, "n_shared_experts": 2}),
    ("llama4_text", {"num_local_experts": 6, "head_dim": 6, "intermediate_size_mlp": 31}),
    ("llama4_text", {"num_local_experts": 6, "interleave_moe_layer_step": 2, "attention_chunk_size": 8}),
    ("llama4_text", {"num_local_experts": 6, "moe_layers": [1, 4], "attention_bias": True, "no_rope_layers": [0] * 5}),
    ("ernie4_5_moe", {"moe_num_experts": 6, "moe_k": 2}),
    ("ernie4_5_moe", {"moe_num_experts": 6, "moe_k": 2, "use_bias": True, "moe_layer_interval": 2}),
    ("ernie4_5_moe", {"moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 0, "tie_word_embeddings": False}),
    ("minimax", {"num_local_experts": 6, "block_size": 8}),
    ("minimax", {"num_local_experts": 6, "layer_types": ["linear_attention"] * 4 + ["full_attention"], "head_dim": 6}),
    ("minimax_m2", {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 6}),
    ("minimax_m2", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    ("dots1", {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1}),
    (
        "dots1",
        {
            **{"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2, "attention_bias": True},
            **{"first_k_dense_replace": 2, "max_window_layers": 3, "sliding_window": 8},
        },
    ),
    ("hunyuan_v1_moe", {"num_experts": 6, "moe_topk": 2, "head_dim": 10}),
    ("hunyuan_v1_moe", {"num_experts": 6, "moe_topk": [2, 1, 2, 1, 2], "head_dim": 6, "attention_bias": True}),
]


def numbers_of(config: Any) -> tuple[int, int]:
    """The parameters of the model that transformers builds, and those of its experts."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    in_experts = sum(each.numel() for name, each in model.named_parameters() if ".experts." in name)
    return sum(each.numel() for each in model.parameters()), in_experts


def numbers_of_ours(architecture: Architecture) -> tuple[int, int]:
    return architecture.num_parameters, architecture.num_expert_parameters


@pytest.mark.parametrize(("family", "fields"), CASES)
def test_a_model_has_the_parameters_that_transformers_builds(
    family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    said = TINY | fields
    config = transformers.AutoConfig.for_model(family, **said)
    built = numbers_of(config)
    assert 0 < built[1] < built[0]
    config.save_pretrained(tmp_path)
    of_words, of_config, of_file = (
        read_hf_config(each) for each in ({"model_type": family} | said, config.to_dict(), tmp_path)
    )
    assert numbers_of_ours(of_words) == built
    # What transformers makes of the words, and what it writes, is the same model in every block.
    assert of_config.blocks == of_file.blocks == of_words.blocks
    assert numbers_of_ours(of_config) == numbers_of_ours(of_file) == built
    assert of_config.is_tied == of_file.is_tied == of_words.is_tied


def test_every_family_is_built() -> None:
    assert {family for family, _ in CASES} == set(FAMILIES)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_a_file_lacks_is_what_transformers_takes(family: str) -> None:
    # Two families have no defaults for these.
    needed = {"num_experts_per_tok": 2, "n_routed_experts": 8, "n_shared_experts": 1}
    fields = needed if family in ("dots1", "deepseek_v2") else {}
    ours = read_hf_config({"model_type": family} | fields)
    theirs = read_hf_config(transformers.AutoConfig.for_model(family, **fields).to_dict())
    assert ours.blocks == theirs.blocks
    sizes = [(each.M, each.vocab, each.is_tied, each.max_length, each.num_other) for each in (ours, theirs)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("name", sorted({*model_names()} - {*PAPER}))
def test_a_model_that_comes_with_the_package_is_the_one_that_transformers_builds(name: str) -> None:
    file = Path(cli.__file__).parent / "offline" / "models" / "configs" / f"{name}.json"
    data = {key: value for key, value in json.loads(file.read_text()).items() if key != "_source"}
    config = transformers.AutoConfig.for_model(**data)
    assert numbers_of_ours(load_model(name)) == numbers_of(config)


def test_a_name_of_the_hub_is_looked_up_by_transformers(monkeypatch, capsys) -> None:
    config = transformers.AutoConfig.for_model("mixtral", **TINY, num_local_experts=8)
    asked = []

    def found(name: str, **how: Any) -> Any:
        asked.append((name, how))
        if name != "somebody/small":
            raise OSError(f"{name} is not a valid name\nand more")
        return config

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", found)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    planned = plan_model.model_of(parser.parse_args(["--cluster", "testbed_b", "--hf-config", "somebody/small"]))
    assert numbers_of_ours(planned.architecture) == numbers_of(config)
    assert planned.architecture.source == "the configuration of somebody/small on the Hugging Face Hub"
    assert planned.notes == ("length 64 (default; the model supports 64)",)
    assert cli.main(["plan", "--cluster", "testbed_b", "--hf-config", "somebody/other"]) == 2
    sentence = "transformers found no configuration of that name: somebody/other is not a valid name\n"
    assert sentence in capsys.readouterr().err
    # No code of the repository is run for it.
    assert asked == [(name, {"trust_remote_code": False}) for name in ("somebody/small", "somebody/other")]


def test_a_path_is_not_looked_up(monkeypatch) -> None:
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("looked up"))
    for path in ("nowhere/config.json", "/no/such/folder", "a/b/c"):
        with pytest.raises(ValueError, match="there is no such file or folder: give a config"):
            plan_model.model_of(argparse.Namespace(hf_config=path, model=None))
