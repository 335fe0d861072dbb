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
LOCAL: Mapping[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED: Mapping[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
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
YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 256,
}
LONGROPE: Mapping[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 3.0],
}
"""Half of each head is rotated, slower in long sequences."""
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
            model: Any = AutoModelForCausalLM.from_config(self.config(), dtype=torch.float32)
            with torch.no_grad():
                for parameter in model.parameters():
                    # Norms and biases, which would be 1 or 0.
                    if parameter.ndim == 1:
                        parameter.add_(0.1 * torch.randn_like(parameter))
            return model.eval()


FAMILIES = (
    Family("Llama 3", "llama"),
    Family("Mistral", "mistral", {"sliding_window": None}),
    Family("Mistral with a window", "mistral", {"sliding_window": WINDOW}),
    Family("Ministral", "ministral", WINDOWED),
    Family("Ministral 3", "ministral3", {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.4}}),
    Family("Mixtral", "mixtral", {**LOCAL, "sliding_window": None}),
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
    Family("gpt-oss", "gpt_oss", {**WINDOWED, **LOCAL}),
    Family(
        "Gemma 2",
        "gemma2",
        {**WINDOWED, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    Family("Gemma 3 (text)", "gemma3_text", {**WINDOWED, "query_pre_attn_scalar": 16}),
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
    Family("GLM 4", "glm4", {"attention_bias": True}),
    Family(
        "GLM 4.5 (MoE)",
        "glm4_moe",
        ROUTED,
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
    Family("MiniMax M2", "minimax_m2", LOCAL),
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
    Family("Phi 3 and 4", "phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256}),
    Family("Phi 3.5 MoE", "phimoe", LOCAL),
    Family(
        "Granite 3",
        "granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 0.5,
        },
    ),
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
    Family("Seed-OSS", "seed_oss", {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True}),
    Family("ERNIE 4.5", "ernie4_5"),
    Family(
        "Hunyuan",
        "hunyuan_v1_dense",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 9.0}},
    ),
    Family("StarCoder 2", "starcoder2", {"sliding_window": None}),
    Family("AFM", "afmoe", {**EXPERTS, **WINDOWED, "num_dense_layers": 1}),
    Family("Apertus", "apertus"),
    Family("Arcee", "arcee"),
    Family("Bailing hybrid", "bailing_hybrid", EXPERTS),
    Family("Bamba", "bamba", {**MAMBA, "attn_layer_indices": [1]}),
    Family("BitNet", "bitnet"),
    Family("Code World Model", "cwm", WINDOWED),
    Family("Cohere Command R", "cohere"),
    Family("Cohere 2 MoE", "cohere2_moe", {**EXPERTS, **WINDOWED}),
    Family("DeepSeek V2", "deepseek_v2", {**LATENT, "first_k_dense_replace": 1}),
    Family("dots.llm1", "dots1", {**ROUTED, "n_shared_experts": 1}),
    Family(
        "ERNIE 4.5 MoE",
        "ernie4_5_moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
        },
    ),
    Family("EXAONE MoE", "exaone_moe", {**EXPERTS, **WINDOWED, "n_group": 1, "topk_group": 1}),
    Family(
        "Falcon Mamba",
        "falcon_mamba",
        {"state_size": 8},
        ("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "head_dim"),
    ),
    Family("FlexOlmo", "flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    Family("Gemma", "gemma"),
    Family("GLM 4 9B", "glm"),
    Family("Granite 3 MoE", "granitemoe", LOCAL),
    Family("Granite 3 MoE, shared", "granitemoeshared", {**LOCAL, "shared_intermediate_size": 24}),
    Family("Helium", "helium"),
    Family("Hunyuan MoE", "hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2}),
    Family("Hunyuan 3", "hy_v3", EXPERTS),
    Family("Jais 2", "jais2"),
    Family("Laguna", "laguna", EXPERTS),
    Family(
        "LongCat Flash",
        "longcat_flash",
        {
            **LATENT,
            "num_layers": 1,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 24,
            "moe_topk": 2,
            "zero_expert_num": 1,
        },
    ),
    Family("Mellum", "mellum", LOCAL),
    Family("MiniCPM 3", "minicpm3", LATENT),
    Family("MiniMax Text", "minimax", {**LOCAL, "layer_types": ["linear_attention", "full_attention"]}),
    Family("NanoChat", "nanochat"),
    Family("Nemotron", "nemotron"),
    Family("OLMo", "olmo"),
    Family("Qwen1.5-MoE", "qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 24}),
    Family("Solar Open", "solar_open", ROUTED),
    Family("StableLM 2", "stablelm"),
    Family("VaultGemma", "vaultgemma", {**WINDOWED, "query_pre_attn_scalar": 8}),
    Family("Youtu", "youtu", {name: value for name, value in LATENT.items() if "expert" not in name}),
    Family(
        "Zamba 2",
        "zamba2",
        {
            "layers_block_type": ["mamba", "hybrid"],
            "hybrid_layer_ids": [1],
            "num_mem_blocks": 1,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "mamba_d_state": 8,
            "mamba_ngroups": 1,
            "chunk_size": 8,
        },
    ),
)


def _types(text: str) -> frozenset[str]:
    return frozenset(text.split())


OLDER = _types(
    """
    bart beam bert bert-generation big_bird bigbird_pegasus biogpt blenderbot blenderbot-small bloom blt camembert codegen
    cpmant ctrl data2vec-text dbrx diffllama doge electra ernie falcon git gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox
    gpt_neox_japanese gptj jetmoe mamba marian mbart megatron-bert modernbert-decoder mpt mvp openai-gpt opt pegasus
    persimmon phi plbart prophetnet recurrent_gemma reformer rembert roberta roberta-prelayernorm roc_bert roformer rwkv
    trocr whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xmod zamba
    """
)
"""Older than three years, encoders, translators, or replaced by a successor in the table."""
MULTIMODAL = _types(
    """
    aria_text emu3 fuyu gemma3 gemma3n gemma4 gemma4_assistant gemma4_unified gemma4_unified_assistant gemma4_unified_text
    got_ocr2 llama4 minimax_m3_vl_text mllama moshi moss_transcribe_diarize musicgen musicgen_melody phi4_multimodal qwen3_5
    qwen3_5_moe
    """
)
"""With images or sound. Those whose text part is in the table load as text models."""
NOT_MEASURED = _types(
    """
    axk1 axk2 cohere_compass_text flint granite_swa granitemoe_swa hrm_text hy_v4 hyperclovax inkling_text kolibri1
    qwen4_exp qwen4_exp_text xlstm zaya
    """
)
"""There is no tiny model of them yet."""


def family(model_type: str) -> Family:
    """The first of this type."""
    return next(found for found in FAMILIES if found.model_type == model_type)
