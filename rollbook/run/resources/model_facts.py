"""The dimensions of a model, from its config.json and the headers of its weight files. Loads no weights and imports no torch."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import load_on_demand
from rollbook.contracts.policy import routes_dtype
from rollbook.run.directory import model_directory
from rollbook.run.resources.cache_facts import CacheLayer, cache_layers, first, has_attention, listed_kinds, num_layers
from rollbook.trainer.config import LoraSettings
from rollbook.trainer.model_config import ModelBuildConfig, ModelConfig

MAX_HEADER_BYTES = 100 * 2**20
INDEX = "model.safetensors.index.json"
HUB_S = 3.0
"""Time limit for a request to the hub."""
GATED = ("qwen3_next", "qwen3_5", "qwen4_exp")
"""Their `q_proj` gives a gate for each number of the queries too. No field of their config.json says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    parameters: int
    """Tied embeddings count once."""
    layers: int
    hidden: int
    intermediate: int
    """Width of the feed-forward part that a token passes; with experts, of all experts it uses. The widest layer's."""
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    context: int | None
    """Longest sequence, if the config states it."""
    experts: int = 0
    """In each layer; 0: it is no mixture of experts."""
    experts_per_token: int = 0
    expert_layers: int = 0
    expert_width: int = 0
    cache: tuple[CacheLayer, ...]
    """What the engine keeps of a row, by layer."""
    delta: "DeltaFacts | None" = None
    """Sizes of its gated delta layers; None without such layers."""
    is_gated: bool = False
    """Whether the results of attention are multiplied by gates, which come from `q_proj`."""

    @property
    def head_parameters(self) -> int:
        """Of the output embedding."""
        return self.vocabulary * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Of the matrices that a token passes in one layer."""
        return self.hidden * (2 * self.query_width + self.gate_width + 2 * self.key_width + 3 * self.intermediate)

    @property
    def active_parameters(self) -> int:
        """Without the experts that a token does not use."""
        unused = self.expert_layers * (self.experts - self.experts_per_token)
        return self.parameters - 3 * unused * self.hidden * self.expert_width

    @property
    def route_bytes_per_token(self) -> int:
        """The experts of a token, with router replay, before compression."""
        return self.expert_layers * self.experts_per_token * routes_dtype(self.experts + 1).itemsize

    @property
    def query_width(self) -> int:
        return self.heads * self.head_width

    @property
    def gate_width(self) -> int:
        return self.query_width if self.is_gated else 0

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.head_width

    def adapter_parameters(self, lora: LoraSettings) -> int:
        """Parameters of low-rank adapters at the layers that `lora.targets` names, and of each expert. Unknown names count as all
        linear layers."""
        attending = self.layers - (self.delta.layers if self.delta else 0)
        sizes = {
            "q_proj": attending * (self.hidden + self.query_width + self.gate_width),
            "k_proj": attending * (self.hidden + self.key_width),
            "v_proj": attending * (self.hidden + self.key_width),
            "o_proj": attending * (self.hidden + self.query_width),
            "gate_proj": self.layers * (self.hidden + self.intermediate),
            "up_proj": self.layers * (self.hidden + self.intermediate),
            "down_proj": self.layers * (self.hidden + self.intermediate),
        }
        if self.delta is not None:
            sizes |= {name: self.delta.layers * (self.hidden + width) for name, width in self.delta.projections.items()}
        named = [] if isinstance(lora.targets, str) else [size for name, size in sizes.items() if name in lora.targets]
        # Gate and up projections of an expert are one matrix.
        of_expert = 2 * self.hidden + 3 * self.expert_width
        of_experts = self.expert_layers * self.experts * of_expert if lora.experts else 0
        return lora.rank * (sum(named or sizes.values()) + of_experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaFacts:
    """The dimensions of gated delta layers."""

    layers: int
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    is_grouped: bool

    @classmethod
    def of(cls, table: Mapping[str, Any], layers: int) -> "DeltaFacts | None":
        if not table.get("linear_key_head_dim") or not layers:
            return None
        return cls(
            layers=layers,
            key_heads=int(table["linear_num_key_heads"]),
            value_heads=int(table["linear_num_value_heads"]),
            key_size=int(table["linear_key_head_dim"]),
            value_size=int(table["linear_value_head_dim"]),
            is_grouped=str(table.get("model_type", "")).startswith("qwen3_next"),
        )

    @property
    def projections(self) -> dict[str, int]:
        """Width of each projection, of its results or of its inputs, whichever is not the residual stream."""
        convolved, values = 2 * self.key_heads * self.key_size + self.values, self.values
        if self.is_grouped:
            return {"in_proj_qkvz": convolved + values, "in_proj_ba": 2 * self.value_heads, "out_proj": values}
        of_heads = {"in_proj_b": self.value_heads, "in_proj_a": self.value_heads}
        return {"in_proj_qkv": convolved, "in_proj_z": values, **of_heads, "out_proj": values}

    @property
    def values(self) -> int:
        return self.value_heads * self.value_size


def model_facts(config: ModelConfig, source_dir: Path, *, may_download: bool = False) -> ModelFacts | None:
    """None if the model is not there yet, or its config has unknown fields: then nothing can be planned.

    `may_download`: the config.json of a model on the hub, if it is not in the hub's cache.
    """
    if config.build is not None:
        return _built_facts(config.build)
    directory = model_directory(config, source_dir) or _hub_directory(str(config.path), may_download=may_download)
    return None if directory is None else facts_of(text_config(directory), counted_parameters(directory))


def _built_facts(build: ModelBuildConfig) -> ModelFacts:
    table = {
        "hidden_size": build.hidden_size,
        "num_hidden_layers": build.layers,
        "num_attention_heads": build.heads,
        "num_key_value_heads": build.kv_heads,
        "intermediate_size": build.intermediate_size,
        "max_position_embeddings": build.max_position_embeddings,
        "vocab_size": build.vocab_size,
        "tie_word_embeddings": build.tie_embeddings,
    }
    found = facts_of(table, None)
    assert found is not None
    return found


def facts_of(table: Mapping[str, Any], parameters: int | None) -> ModelFacts | None:
    """From the fields of a config.json. Without a count, the parameters are those of a Llama with these dimensions."""
    try:
        hidden, vocabulary = int(table["hidden_size"]), int(table["vocab_size"])
        kinds, layers = listed_kinds(table), num_layers(table)
        heads = int(table["num_attention_heads"]) if has_attention(table) else 0
        kv_heads = int(table.get("num_key_value_heads") or heads)
        head_width = int(table.get("head_dim") or hidden // heads) if heads else 0
        experts = int(first(table, "num_experts", "num_local_experts", "n_routed_experts") or 0)
        used = int(first(table, "num_experts_per_tok", "num_experts_per_token", "top_k_experts") or 1) if experts else 1
        widths = (experts and table.get("moe_intermediate_size")) or table.get("intermediate_size")
        # Recurrent layers without a feed-forward part expand to twice the width.
        width = max(widths) if isinstance(widths, list) else int(widths or table.get("expand", 2) * hidden)
        context = first(table, "max_position_embeddings", "model_max_length")
        cache = cache_layers(table)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    delta = DeltaFacts.of(table, sum(layer.recurrent > 0 for layer in cache))
    is_gated = str(table.get("model_type", "")).startswith(GATED)
    attention = hidden * head_width * ((3 if is_gated else 2) * heads + 2 * kv_heads)
    of_mixers = layers * attention
    if delta is not None:
        of_mixers = (layers - delta.layers) * attention + delta.layers * hidden * sum(delta.projections.values())
        of_mixers += sum(
            layer.convolutions for layer in cache
        )  # the state of a convolution has as many numbers as its weight
    # With experts: each one, the router, and the expert that every token uses, with its gate.
    shared = int(table.get("shared_expert_intermediate_size") or 0) if experts else 0
    of_feed_forward = hidden * (3 * width * max(1, experts) + experts + (3 * shared + 1 if shared else 0))
    in_layers = of_mixers + layers * (of_feed_forward + 2 * hidden)
    embeddings = vocabulary * hidden * (1 if table.get("tie_word_embeddings", True) else 2)
    return ModelFacts(
        parameters=parameters or in_layers + embeddings + hidden,
        layers=layers,
        hidden=hidden,
        intermediate=used * width,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        vocabulary=vocabulary,
        context=context if isinstance(context, int) else None,
        experts=experts,
        experts_per_token=used if experts else 0,
        expert_layers=_expert_layers(table, kinds, layers) if experts else 0,
        expert_width=width if experts else 0,
        cache=cache,
        delta=delta,
        is_gated=is_gated,
    )


def _expert_layers(table: Mapping[str, Any], kinds: Sequence[str], layers: int) -> int:
    listed = table.get("mlp_layer_types") or kinds
    if found := sum(kind in {"sparse", "moe", "E"} for kind in listed):
        return found
    return layers - int(table.get("first_k_dense_replace") or 0)


def text_config(directory: Path) -> dict[str, Any]:
    """The language model's part of config.json; empty if it cannot be read."""
    try:
        found = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    inner = found.get("text_config") if isinstance(found, dict) else None
    return inner if isinstance(inner, dict) else found if isinstance(found, dict) else {}


def counted_parameters(directory: Path) -> int | None:
    """Of the tensors in the safetensors files; None if there are none or one is damaged."""
    shapes: dict[str, list[int]] = {}
    files = sorted(directory.glob("*.safetensors"))
    try:
        index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
        files = [directory / name for name in sorted(set(index["weight_map"].values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # one file, without an index
    for file in files:
        try:
            with file.open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                if not 0 < length <= MAX_HEADER_BYTES:
                    return None
                header = json.loads(opened.read(length))
            shapes |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
    if text_config(directory).get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)
    return sum(math.prod(shape) for shape in shapes.values()) or None


def _hub_directory(name: str, *, may_download: bool) -> Path | None:
    """The cached snapshot of a model on the hub, possibly with its config.json alone. None without a network or the library."""
    try:
        download = load_on_demand("huggingface_hub:hf_hub_download")
    except RunError:
        return None
    for is_local in (True, False) if may_download else (True,):
        with suppress(Exception):  # the hub client raises many unrelated types
            return Path(download(name, "config.json", local_files_only=is_local, etag_timeout=HUB_S)).parent
    return None
