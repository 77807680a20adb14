# SPDX-License-Identifier: Apache-2.0
"""What the planner reads from configurations is what transformers builds from them, parameter by parameter."""

from __future__ import annotations

import argparse
import itertools
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
from tests.samples import draw  # noqa: E402

TINY: dict[str, Any] = {
    **{"hidden_size": 40, "intermediate_size": 24, "moe_intermediate_size": 12, "num_hidden_layers": 5},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
# What families call the sizes of their experts; of each the ones that it has.
SIZES: dict[str, Any] = {
    **{"num_local_experts": 6, "num_experts": 6, "n_routed_experts": 6, "moe_num_experts": 6},
    **{"num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 3},
    **{"shared_expert_intermediate_size": 17, "intermediate_size_mlp": 31, "block_size": 8},
}
_LATENT = {"q_lora_rank": 7, "kv_lora_rank": 6, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT | {"num_key_value_heads": 4},
    "deepseek_v3": _LATENT | {"num_key_value_heads": 4},
    "hunyuan_v1_moe": {"head_dim": 10},
}
CHANGES: dict[str, Any] = {
    **{"attention_bias": True, "qkv_bias": False, "mlp_bias": True, "lm_head_bias": True, "use_bias": True},
    **{"tie_word_embeddings": True, "use_qk_norm": True, "q_lora_rank": None, "head_dim": 6, "num_key_value_heads": 4},
    **{"sliding_window": 8, "use_sliding_window": True, "attention_chunk_size": 8, "no_rope_layers": [0] * 5},
    **{"first_k_dense_replace": 2, "mlp_only_layers": [0, 3], "decoder_sparse_step": 2, "moe_layer_interval": 2},
    **{"moe_layers": [1, 4], "interleave_moe_layer_step": 2, "n_shared_experts": 2, "moe_num_shared_experts": 0},
    **{"moe_topk": [2, 1, 2, 1, 2]},
}


def numbers_of(config: Any) -> tuple[int, int]:
    """The parameters of the model that transformers builds, and those of its experts."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    in_experts = sum(each.numel() for name, each in model.named_parameters() if ".experts." in name)
    return sum(each.numel() for each in model.parameters()), in_experts


def numbers_of_ours(architecture: Architecture) -> tuple[int, int]:
    return architecture.num_parameters, architecture.num_expert_parameters


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_model_has_the_parameters_that_transformers_builds_whatever_its_configuration_says(
    family: str, tmp_path: Path
) -> None:
    default = transformers.AutoConfig.for_model(family)
    known = {*default.to_dict(), *default.attribute_map}
    if "moe_topk" in known:  # a number for each layer, where others have one for all
        known.remove("num_experts_per_tok")
    plain = {key: value for key, value in (TINY | SIZES | OF_FAMILY.get(family, {})).items() if key in known}
    pairs = list(itertools.combinations([name for name in CHANGES if name in known], 2))
    for names in ((), *draw(f"changes of {family}", pairs, 3)):
        said = plain | {name: CHANGES[name] for name in names}
        config = transformers.AutoConfig.for_model(family, **said)
        built = numbers_of(config)
        assert 0 < built[1] < built[0]
        config.save_pretrained(tmp_path)
        of_words, of_config, of_file = (
            read_hf_config(each) for each in ({"model_type": family} | said, config.to_dict(), tmp_path)
        )
        assert numbers_of_ours(of_words) == built, names
        # What transformers makes of the words, and what it writes, is the same model in every block.
        assert of_config.blocks == of_file.blocks == of_words.blocks, names
        assert numbers_of_ours(of_config) == numbers_of_ours(of_file) == built, names
        assert of_config.is_tied == of_file.is_tied == of_words.is_tied, names


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


def test_a_name_of_the_hub_is_looked_up_by_transformers_and_a_path_is_not(monkeypatch, capsys) -> None:
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
    for path in ("nowhere/config.json", "/no/such/folder", "a/b/c"):
        with pytest.raises(ValueError, match="there is no such file or folder: give a config"):
            plan_model.model_of(argparse.Namespace(hf_config=path, model=None))
    # No code of the repository is run for it.
    assert asked == [(name, {"trust_remote_code": False}) for name in ("somebody/small", "somebody/other")]
