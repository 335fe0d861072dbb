"""The dimensions of a model that the memory plan reads: they are those that the engine allocates, for every kind of layer."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollbook.inference.engines.embedded.model.module import StateForward
from rollbook.run.resources.model_facts import ModelFacts, facts_of, text_config
from rollbook.trainer.config import LoraSettings
from rollbook.trainer.model.policy_model import PolicyModel
from tests.models.families import FAMILIES, family
from tests.parts.trainer.batches import quick

BASE = {"hidden_size": 32, "vocab_size": 64, "num_attention_heads": 4, "intermediate_size": 64}


def known(table: dict[str, Any]) -> ModelFacts:
    found = facts_of(table, None)
    assert found is not None
    return found


def test_every_family_has_a_memory_plan() -> None:
    assert [one.name for one in FAMILIES if facts_of(json.loads(one.config().to_json_string()), None) is None] == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind", ["qwen3", "qwen3_5_text", "kimi_linear", "nemotron_h", "mamba2", "glm_moe_dsa", "deepseek_v3", "jamba"]
)
def test_the_cache_of_a_token_is_as_large_as_in_the_engine(kind: str) -> None:
    config, engine = family(kind).config(), StateForward(family(kind).model(), max_model_len=160)
    assert 4 * known(json.loads(config.to_json_string())).kv_values_per_token == engine.bytes_per_row()[0]


@pytest.mark.parametrize(
    ("table", "layers"),
    [
        ({"num_hidden_layers": 48, "full_attention_interval": 4}, 12),  # Qwen3-Next
        ({"num_hidden_layers": 32, "attn_layer_period": 8, "attn_layer_offset": 4}, 4),  # Jamba
        ({"num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14]}, 6),  # LFM2
        ({"num_hidden_layers": 27, "linear_attn_config": {"full_attn_layers": [4, 8, 12]}}, 3),  # Kimi Linear
        ({"num_hidden_layers": 8, "hybrid_override_pattern": "M-M*-MEE"}, 1),  # Nemotron-H
        ({"num_hidden_layers": 30, "num_kv_shared_layers": 10}, 20),  # Gemma 3n
    ],
)
def test_layers_without_keys_of_their_own_are_not_counted(table: dict[str, Any], layers: int) -> None:
    assert known({**BASE, **table}).kv_values_per_token == layers * 2 * 32


def test_experts_that_kimi_linear_uses_are_counted() -> None:
    kimi = known(json.loads(family("kimi_linear").config().to_json_string()))
    assert (kimi.experts, kimi.experts_per_token, kimi.expert_layers) == (4, 2, 1)


def test_adapters_of_experts_are_counted(tmp_path: Path) -> None:
    family("qwen3_moe").model().save_pretrained(tmp_path)
    found = known(text_config(tmp_path))
    both = [LoraSettings(rank=2, experts=are_adapted) for are_adapted in (False, True)]
    planned = [found.adapter_parameters(lora) for lora in both]
    trained = [
        sum(weight.numel() for weight in PolicyModel.load(tmp_path, quick(lora=lora)).checkpointed_weights().values())
        for lora in both
    ]
    assert planned[1] - planned[0] == trained[1] - trained[0]
