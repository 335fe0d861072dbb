"""What the engine keeps of each row, layer by layer, from the fields of a config.json: keys and values of all positions or of the
last window, what they are computed from, or a recurrent state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FLOAT32 = 4
NO_CACHE = frozenset({"-", "E", "mlp", "moe", "dense", "sparse"})
"""Layers that keep nothing: the feed-forward parts of Nemotron-H."""
STATES = frozenset({"M", "mamba", "linear_attention", "conv", "recurrent"})
BOTH = "hybrid"
"""A layer with a recurrent state and with attention."""
UNIFORM = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayer:
    """Numbers that one layer keeps of a row."""

    values: int = 0
    """Of each position, in the dtype of the model."""
    window: int | None = None
    """The last positions that are kept; None: all."""
    convolutions: int = 0
    """Whatever its length, in the dtype of the model."""
    recurrent: int = 0
    """Whatever its length, in float32."""

    def num_bytes(self, itemsize: int, length: int) -> int:
        """Of a row with so many positions. `itemsize`: of the model's dtype."""
        kept = length if self.window is None else min(length, self.window)
        return itemsize * (self.values * kept + self.convolutions) + FLOAT32 * self.recurrent


def cache_layers(table: Mapping[str, Any]) -> tuple[CacheLayer, ...]:
    """Raises `KeyError`, `TypeError` or `ValueError` for fields that are not known here.

    The engine computes models with equal layers itself, and keeps all positions, even outside of windows.
    """
    kinds = [*_kinds(table)]
    shared = int(table.get("num_kv_shared_layers") or 0)
    kinds = kinds[: len(kinds) - shared]
    found = [_of_layer(table, number, kind) for number, kind in enumerate(kinds)]
    is_uniform = not shared and set(kinds) <= UNIFORM and len({layer.values for layer in found}) == 1
    return tuple(CacheLayer(values=layer.values) if is_uniform else layer for layer in found)


def listed_kinds(table: Mapping[str, Any]) -> Sequence[str]:
    """The kind of each layer; empty if the config does not list them."""
    # Nemotron-H: M for Mamba, * for attention, - for a feed-forward part, E for experts.
    return list(first(table, "layer_types", "layers_block_type", "hybrid_override_pattern") or [])


def num_layers(table: Mapping[str, Any]) -> int:
    """Layers with attention or a state of their own: LongCat has two in each of its blocks."""
    return int(table.get("num_hidden_layers") or len(listed_kinds(table)) or 2 * int(table.get("num_layers") or 0))


def first(table: Mapping[str, Any], *names: str) -> Any:
    return next((value for name in names if (value := table.get(name))), None)


def _kinds(table: Mapping[str, Any]) -> Sequence[str]:
    if kinds := listed_kinds(table):
        return kinds
    count = num_layers(table)
    attending: set[int] | None = None
    if listed := first(table, "full_attn_idxs", "attn_layer_indices"):
        attending = set(listed)
    elif listed := (table.get("linear_attn_config") or {}).get("full_attn_layers"):
        attending = {number - 1 for number in listed}
    elif period := table.get("full_attention_interval"):
        attending = set(range(period - 1, count, period))
    elif period := table.get("attn_layer_period"):
        attending = set(range(int(table.get("attn_layer_offset") or 0), count, period))
    elif not has_attention(table):
        attending = set()
    elif "mamba_d_ssm" in table:  # Falcon-H1
        return [BOTH] * count
    if attending is None:
        return ["full_attention"] * count
    return ["full_attention" if number in attending else "linear_attention" for number in range(count)]


def has_attention(table: Mapping[str, Any]) -> bool:
    """A model with recurrent states only has no heads."""
    return bool(table.get("num_attention_heads", 0) if "state_size" in table else table["num_attention_heads"])


def _of_layer(table: Mapping[str, Any], number: int, kind: str) -> CacheLayer:
    if kind in NO_CACHE:
        return CacheLayer()
    convolutions, recurrent = _state(table) if kind in STATES or kind == BOTH else (0, 0)
    if kind in STATES:
        return CacheLayer(convolutions=convolutions, recurrent=recurrent)
    window = None
    if kind == "sliding_attention":
        window = int(table["sliding_window"])
    elif kind == "chunked_attention":
        window = int(table["attention_chunk_size"])
    values = _values(table, number, kind)
    # DeepSeek V4 keeps a window, and less than one entry for each position.
    if "compressed" in kind:
        values *= 2
    return CacheLayer(values=values, window=window, convolutions=convolutions, recurrent=recurrent)


def _values(table: Mapping[str, Any], number: int, kind: str) -> int:
    """Numbers of one position: keys and values, or what they are computed from (multi-head latent attention)."""
    if latent := table.get("kv_lora_rank"):
        of_keys = int(latent) + int(table["qk_rope_head_dim"])
    else:
        heads, of_key, of_value = _heads(table, number, kind)
        of_keys = heads * (of_key + of_value)
    return of_keys + (int(table.get("index_head_dim") or 0) if table.get("index_topk") else 0)


def _heads(table: Mapping[str, Any], number: int, kind: str) -> tuple[int, int, int]:
    """Key and value heads of a layer, and their widths."""
    own = {**table, **((table.get("per_layer_config") or {}).get(str(number)) or {})}
    width = int(first(own, "head_dim", "attention_head_dim") or table["hidden_size"] // table["num_attention_heads"])
    heads = int(own.get("num_key_value_heads") or table["num_attention_heads"])
    of_value = int(own.get("v_head_dim") or width)
    if kind == "full_attention" and (of_all := table.get("global_head_dim")):  # Gemma 4
        width = of_value = int(of_all)
        if table.get("attention_k_eq_v", True):
            heads = int(table.get("num_global_key_value_heads") or heads)
    elif kind == "sliding_attention" and table.get("swa_num_key_value_heads"):  # MiMo
        heads = int(table["swa_num_key_value_heads"])
        width = int(table.get("swa_head_dim") or width)
        of_value = int(table.get("swa_v_head_dim") or of_value)
    return heads, width, of_value


def _state(table: Mapping[str, Any]) -> tuple[int, int]:
    """Numbers of the convolutions and of the recurrent state of one layer."""
    hidden = int(table["hidden_size"])
    if kept := table.get("conv_L_cache"):  # LFM2
        return hidden * int(kept), 0
    if width := table.get("linear_key_head_dim"):  # gated delta
        heads, of_value = int(table["linear_num_value_heads"]), int(table["linear_value_head_dim"])
        convolved = 2 * int(table["linear_num_key_heads"]) * int(width) + heads * of_value
        return convolved * int(table.get("linear_conv_kernel_dim") or 4), heads * int(width) * of_value
    linear = table.get("linear_attn_config") or {}
    if heads := int(linear.get("num_heads") or table.get("linear_num_heads") or 0):  # Kimi delta
        width = int(linear.get("head_dim") or table["linear_head_dim"])
        kernel = int(linear.get("short_conv_kernel_size") or table.get("linear_conv_kernel_dim") or 4)
        return 3 * heads * width * kernel, heads * width * width
    size = int(first(table, "mamba_d_state", "ssm_state_size", "state_size") or 0)
    kernel = int(first(table, "mamba_d_conv", "conv_kernel") or 4)
    inner = int(first(table, "mamba_expand", "expand") or 2) * hidden
    named = first(table, "mamba_n_heads", "n_mamba_heads", "mamba_num_heads")
    heads = int(named or (0 if "num_attention_heads" in table else table.get("num_heads") or 0))
    if heads:  # Mamba 2
        width = first(table, "mamba_d_head", "mamba_headdim", "mamba_head_dim", "head_dim")
        of_all = heads * (width if isinstance(width, int) else inner // heads)
        groups = int(first(table, "mamba_n_groups", "mamba_ngroups", "n_groups") or 1)
        return (of_all + 2 * groups * size) * kernel, of_all * size
    if "mamba_expand" not in table and table.get("intermediate_size"):  # Falcon Mamba
        inner = int(table["intermediate_size"])
    return inner * kernel, inner * size
