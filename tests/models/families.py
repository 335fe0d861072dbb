"""Recent families of causal language models, each as a tiny model with random weights: a few layers, the classes of the large ones.

The settings keep what makes a family special (windows shorter than the tests' sequences, several kinds of layers, experts), so that
a wrong cache, mask or name shows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 128
WINDOW = 8
COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
"""Multi-head latent attention with experts, as in DeepSeek V3."""
DELTA: Mapping[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
"""Gated delta layers."""
WINDOWED: Mapping[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
MAMBA: Mapping[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    """As people say it."""
    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    """Common settings that its configuration does not have."""

    def config(self) -> Any:
        kept = {name: value for name, value in COMMON.items() if name not in self.without}
        return AutoConfig.for_model(self.model_type, **{**kept, **self.settings})

    @property
    def has_experts(self) -> bool:
        return any("expert" in name for name in self.settings)

    def model(self, seed: int = 0) -> Any:
        """Float32 weights that depend on the seed only."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: Any = AutoModelForCausalLM.from_config(self.config(), dtype=torch.float32)  # type: ignore[no-untyped-call]
            return model.eval()


FAMILIES = (
    Family("Llama 3", "llama"),
    Family("Mistral", "mistral", {"sliding_window": None}),
    Family("Mistral with a window", "mistral", {"sliding_window": WINDOW}),
    Family("Ministral", "ministral", WINDOWED),
    Family("Ministral 3", "ministral3"),
    Family("Mixtral", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    Family(
        "Llama 4 (text)",
        "llama4_text",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": WINDOW,
            "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"],
            "moe_layers": [1],
        },
    ),
    Family("Qwen2.5", "qwen2"),
    Family("Qwen3", "qwen3"),
    Family("Qwen3-MoE", "qwen3_moe", EXPERTS),
    Family("Qwen3-Next", "qwen3_next", {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 24}),
    Family("Qwen3.5", "qwen3_5_text", DELTA),
    Family(
        "Qwen3.5-MoE",
        "qwen3_5_moe_text",
        {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 24},
        ("intermediate_size",),
    ),
    Family("gpt-oss", "gpt_oss", {**WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("Gemma 2", "gemma2", {**WINDOWED, "query_pre_attn_scalar": 8}),
    Family("Gemma 3 (text)", "gemma3_text", {**WINDOWED, "query_pre_attn_scalar": 8}),
    Family(
        "Gemma 3n (text)",
        "gemma3n_text",
        {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "intermediate_size": [48] * 4,
            "activation_sparsity_pattern": [0.0] * 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "laurel_rank": 4,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "altup_num_inputs": 2,
        },
    ),
    Family(
        "Gemma 4 (text)",
        "gemma4_text",
        {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
        },
    ),
    Family("GLM 4", "glm4"),
    Family(
        "GLM 4.5 (MoE)",
        "glm4_moe",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    Family("GLM 4.7 Flash", "glm4_moe_lite", {**LATENT, "mlp_layer_types": ["dense", "sparse"]}),
    Family(
        "GLM 5",
        "glm_moe_dsa",
        {
            **LATENT,
            "mlp_layer_types": ["dense", "sparse"],
            "index_topk": 16,
            "index_head_dim": 8,
            "index_n_heads": 32,
            "layer_types": ["indexed_attention"] * 2,
            "indexer_types": ["full"] * 2,
        },
    ),
    Family("DeepSeek V3", "deepseek_v3", {**LATENT, "first_k_dense_replace": 1}),
    Family(
        "DeepSeek V3.2",
        "deepseek_v32",
        {
            **LATENT,
            "mlp_layer_types": ["dense", "sparse"],
            "index_topk": 16,
            "index_head_dim": 8,
            "index_n_heads": 32,
            "layer_types": ["indexed_attention"] * 2,
        },
    ),
    Family(
        "DeepSeek V4",
        "deepseek_v4",
        {
            "num_key_value_heads": 1,
            "q_lora_rank": 16,
            "moe_intermediate_size": 24,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
            "mlp_layer_types": ["moe"] * 3,
            "sliding_window": WINDOW,
            "o_groups": 2,
            "o_lora_rank": 8,
            "index_n_heads": 32,
            "index_head_dim": 8,
            "index_topk": 4,
            "hc_mult": 2,
            "qk_rope_head_dim": 4,
            "partial_rotary_factor": 0.5,
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        },
        ("intermediate_size",),
    ),
    Family(
        "Kimi Linear",
        "kimi_linear",
        {
            **LATENT,
            "q_lora_rank": None,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "model_max_length": 256,
        },
        ("max_position_embeddings",),
    ),
    Family("MiniMax M2", "minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family(
        "MiMo V2 Flash",
        "mimo_v2_flash",
        {
            **WINDOWED,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_layer_types": ["dense", "sparse"],
            "v_head_dim": 8,
        },
    ),
    Family("Phi 3 and 4", "phi3"),
    Family("Phi 3.5 MoE", "phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("Granite 3", "granite"),
    Family(
        "Granite 4 hybrid",
        "granitemoehybrid",
        {
            **MAMBA,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
            "layer_types": ["mamba", "attention"],
            "position_embedding_type": "rope",
        },
    ),
    Family(
        "Nemotron-H",
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            "conv_kernel": 4,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 24,
        },
        ("num_hidden_layers",),
    ),
    Family("Falcon-H1", "falcon_h1", {**MAMBA, "mamba_d_ssm": 64}),
    Family("LFM2", "lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    Family("LFM2-MoE", "lfm2_moe", {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    Family(
        "Jamba",
        "jamba",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    Family(
        "Mamba 2",
        "mamba2",
        {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
        ("max_position_embeddings", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    ),
    Family("OLMo 2", "olmo2"),
    Family("OLMo 3", "olmo3", WINDOWED),
    Family("OLMo hybrid", "olmo_hybrid", {**DELTA, "linear_num_key_heads": 4}),
    Family("OLMoE", "olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    Family("SmolLM3", "smollm3", {"no_rope_layers": [1, 0]}),
    Family("Cohere Command A", "cohere2", WINDOWED),
    Family("EXAONE 4", "exaone4", WINDOWED),
    Family("Seed-OSS", "seed_oss"),
    Family("ERNIE 4.5", "ernie4_5"),
    Family("Hunyuan", "hunyuan_v1_dense"),
    Family("StarCoder 2", "starcoder2", {"sliding_window": None}),
)


def family(model_type: str) -> Family:
    """The first of this type."""
    return next(found for found in FAMILIES if found.model_type == model_type)
