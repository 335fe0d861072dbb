"""How a decoder computes where families differ, read from its Hugging Face module instead of from a list of families.

Formulas are found by comparison: a norm, an activation or a rotation is called with a few numbers, and must give the bits of one of
the formulas that are known here. What has other parts, or other formulas, is refused with the reason. Works on modules without
weights, and with adapters.
"""

# M tokens, R heads, T positions, D head size, E width of a norm, F half of the rotated width, W = 2F

import inspect
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rollbook.numerics.delta import DeltaLayer
from rollbook.numerics.experts import INEXACT, Experts, check_mixture, compare, is_mixture, shared_of
from rollbook.numerics.module_parts import (
    GATE_PARTS,
    QUERY_PARTS,
    Activation,
    UnsupportedModelError,
    activation_of,
    parts_of,
    refuse_other_parts,
)

BODY_PARTS = {"embed_tokens", "layers", "norm"}
FEED_FORWARD = ("mlp", "block_sparse_moe")
DELTA = "linear_attn"
LAYER_PARTS = {
    "self_attn",
    DELTA,
    *FEED_FORWARD,
    "input_layernorm",
    "post_attention_layernorm",
    "post_self_attn_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "post_mlp_layernorm",
}
ATTENTION_PARTS = {"o_proj", "q_norm", "k_norm", "query_layernorm", "key_layernorm"}
SINKS = "sinks"
BY_LENGTH = ("dynamic", "longrope")
WINDOWED_CACHES = {"DynamicLayer", "DynamicSlidingWindowLayer"}
STATE_CACHE = "LinearAttentionLayer"


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A root mean square norm."""

    weight_E: Tensor
    epsilon: float
    adds_one: bool = False
    """The factor is 1 + weight, as in Gemma."""
    rounds_once: bool = False
    """The result is rounded after the factor only, not before it, too."""

    @classmethod
    def of(cls, module: Any) -> "Norm":
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if epsilon is None or [name for name, _ in module.named_parameters()] != ["weight"]:
            raise UnsupportedModelError(f"its norms are of type {type(module).__name__}")
        x = torch.linspace(-2, 3, 24).view(3, 8).bfloat16()
        weight = torch.linspace(0.3, 1.7, 8).bfloat16()
        try:
            found = torch.func.functional_call(module, {"weight": weight}, (x,))
        except (TypeError, ValueError, RuntimeError) as error:
            raise UnsupportedModelError(f"its norms of type {type(module).__name__} need other inputs") from error
        for adds_one, rounds_once in ((False, False), (False, True), (True, True)):
            probed = cls(weight, epsilon, adds_one, rounds_once)
            if torch.equal(found, probed.reference(x)):
                return cls(module.weight, epsilon, adds_one, rounds_once)
        raise UnsupportedModelError(f"its norms have the formula of {type(module).__name__}")

    def reference(self, x: Tensor) -> Tensor:
        """The formula, with the roundings of the Hugging Face modules."""
        normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.epsilon)
        factor = self.weight_E.float() + self.adds_one
        return (normed * factor).to(x.dtype) if self.rounds_once else normed.to(x.dtype) * factor.to(x.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """With PyTorch's kernel. Has a gradient."""
        if not self.adds_one:
            return F.rms_norm(x, self.weight_E.shape, self.weight_E, self.epsilon)
        factor_E = self.weight_E.float() + 1.0
        return F.rms_norm(x.float(), factor_E.shape, factor_E, self.epsilon).to(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """Norms of queries and keys: over each head, or over all of them, as the sizes of the weights tell."""

    queries: Norm
    keys: Norm
    is_after_rotation: bool = False

    @classmethod
    def of(cls, attention: Any) -> "HeadNorms | None":
        if getattr(attention, "query_layernorm", None) is not None:
            return cls(Norm.of(attention.query_layernorm), Norm.of(attention.key_layernorm), True)
        if getattr(attention, "q_norm", None) is None:
            return None
        return cls(Norm.of(attention.q_norm), Norm.of(attention.k_norm))


@dataclass(frozen=True, kw_only=True, eq=False)
class Rotary:
    """What the position of a token does to its queries and keys."""

    cosines_TF: Tensor
    sines_TF: Tensor
    """In float32 for a model in half precision: rotated in float32 and rounded once."""
    is_paired: bool
    """Neighbours are rotated, (0, 1), (2, 3) and so on; otherwise the halves of the rotated width, (0, F), (1, F + 1) and so on."""
    query_scales_T: Tensor | None = None
    """A factor of the rotated queries."""

    @property
    def width(self) -> int:
        """The first numbers of a head are rotated, the others are not."""
        return 2 * self.cosines_TF.shape[1]

    @cached_property
    def tables_TW(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines for each number of the rotated width. The sines include the sign of the rotation."""
        if self.is_paired:
            signed_TF2 = torch.stack((-self.sines_TF, self.sines_TF), dim=-1)
            return self.cosines_TF.repeat_interleave(2, dim=1), signed_TF2.flatten(1)
        return self.cosines_TF.repeat(1, 2), torch.cat((-self.sines_TF, self.sines_TF), dim=1)

    def rotate(self, heads_MRD: Tensor, cosines_M1W: Tensor, sines_M1W: Tensor) -> None:
        """In place, with rows of `tables_TW`."""
        width = cosines_M1W.shape[-1]
        turned_MRW = heads_MRD if width == heads_MRD.shape[-1] else heads_MRD[..., :width]
        swapped_MRW = self._swapped(turned_MRW)
        if cosines_M1W.dtype == turned_MRW.dtype:
            turned_MRW.mul_(cosines_M1W).addcmul_(swapped_MRW, sines_M1W)
        else:
            turned_MRW.copy_(turned_MRW * cosines_M1W + swapped_MRW * sines_M1W)

    def reference(self, heads: Tensor, *, is_wide: bool) -> Tensor:
        """Heads (..., T, D) rotated at the positions of the tables, with the roundings of the Hugging Face modules: of each
        product, or once."""
        turned, rest = heads[..., : self.width], heads[..., self.width :]
        cosines_TW, sines_TW = self.tables_TW
        if is_wide:
            turned, cosines_TW, sines_TW = turned.float(), cosines_TW.float(), sines_TW.float()
        rotated = turned * cosines_TW + self._swapped(turned) * sines_TW
        return torch.cat((rotated.to(heads.dtype), rest), dim=-1)

    def _swapped(self, turned: Tensor) -> Tensor:
        """The other number of each pair."""
        if self.is_paired:
            return turned.reshape(*turned.shape[:-1], -1, 2).flip(-1).flatten(-2)
        return torch.cat(turned.chunk(2, dim=-1)[::-1], dim=-1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attention:
    """Of one layer."""

    scale: float
    """Of the scores."""
    rotary: Rotary | None = None
    """None: positions do not matter."""
    norms: HeadNorms | None = None
    window: int | None = None
    """A token sees so many tokens, itself included. None: all before it."""
    cap: float | None = None
    """Scores are replaced by cap x tanh(score / cap)."""
    sinks_R: Tensor | None = None
    """A score of each query head that has no key: it takes its part of the weights, and adds nothing."""
    is_gated: bool = False
    """After each query head comes a gate: the result of the head is multiplied by its sigmoid."""

    @property
    def is_plain(self) -> bool:
        """Whether weights are the softmax of the products."""
        return self.cap is None and self.sinks_R is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """What is done to the product of the last hidden state and the output embedding."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> "Logits":
        divisor = getattr(config, "logits_scaling", None)
        scale = 1 / divisor if divisor else getattr(config, "logit_scale", None)
        return cls(scale=float(scale or 1.0), cap=getattr(config, "final_logit_softcapping", None) or None)

    @property
    def is_plain(self) -> bool:
        return self.scale == 1.0 and self.cap is None

    def applied(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelRecipe:
    """The computation of a decoder whose layers consist of attention, or a gated delta part, and a gated feed-forward part, or a
    mixture of them."""

    attention: tuple[Attention | None, ...]
    """By layer; None: it has a gated delta part."""
    delta: tuple[DeltaLayer | None, ...]
    """By layer; None: it has attention."""
    activation: Activation
    """Of gates that are no experts'."""
    experts: tuple[Experts | None, ...]
    """Of each layer; None: one feed-forward part for all tokens."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """A factor of what a layer adds to the residual stream."""
    logits: Logits = Logits()

    @classmethod
    def of(cls, model: Any, *, max_model_len: int, caches: Sequence[Any]) -> "ModelRecipe":
        """`caches`: an empty cache layer of transformers for each layer. Raises `UnsupportedModelError`."""
        check_parts(model)
        body, config = model.model, model.config.get_text_config()
        windows = windows_of(config, caches, others={STATE_CACHE} if _has_delta(body) else set())
        if windows is None:
            raise UnsupportedModelError("its layers do not all have full attention or a sliding window")
        kinds = getattr(config, "layer_types", None) or [None] * len(windows)
        rotaries: dict[str | None, Rotary] = {}
        attention: list[Attention | None] = []
        for layer, kind, window in zip(body.layers, kinds, windows, strict=True):
            if hasattr(layer, DELTA):
                attention.append(None)
                continue
            part = layer.self_attn
            of = kind if _has_layer_types(body.rotary_emb) else None
            if _is_rotated(part) and of not in rotaries:
                rotaries[of] = _rotary_of(model, part, of, max_model_len=max_model_len)
            attention.append(
                Attention(
                    scale=float(part.scaling),
                    rotary=rotaries[of] if _is_rotated(part) else None,
                    norms=HeadNorms.of(part),
                    window=None if window is None or window >= max_model_len else window,
                    cap=getattr(part, "attn_logit_softcapping", None) or None,
                    sinks_R=getattr(part, SINKS, None),
                    is_gated=_is_gated(part),
                )
            )
        blocks = [feed_forward_of(layer)[1] for layer in body.layers]
        experts = [Experts.of(block) if is_mixture(block) else None for block in blocks]
        mixtures = {type(block): (own, block) for own, block in zip(experts, blocks, strict=True) if own is not None}
        for own, block in mixtures.values():
            compare(own, block)
        return cls(
            attention=tuple(attention),
            delta=tuple(DeltaLayer.of(layer.linear_attn) if hasattr(layer, DELTA) else None for layer in body.layers),
            activation=_only({*map(activation_of, filter(None, map(dense_part, blocks)))} or {"silu"}, "activations"),
            experts=tuple(experts),
            embedding_scale=_embedding_scale(body),
            residual_scale=_only(
                {float(getattr(layer, "residual_multiplier", 1.0)) for layer in body.layers}, "residual multipliers"
            ),
            logits=Logits.of(config),
        )

    @property
    def inexact_because(self) -> str | None:
        """Why sampler and trainer do not compute the same bits; None: they can."""
        if any(self.experts):
            return INEXACT
        if any(self.delta):
            return "the trainer computes gated delta layers in chunks, the sampler in steps"
        if any(attention is not None and attention.sinks_R is not None for attention in self.attention):
            return "attention sinks have no kernel in the trainer"
        return None


def feed_forward_of(layer: Any) -> tuple[str, Any]:
    """Name and module of the part after attention."""
    for name in FEED_FORWARD:
        if hasattr(layer, name):
            return name, getattr(layer, name)
    raise UnsupportedModelError("some layers have no feed-forward part")


def dense_part(block: Any) -> Any:
    """What computes all tokens in a feed-forward part, which may be a mixture; None if there is nothing."""
    if not is_mixture(block):
        return block
    shared = shared_of(block)
    return None if shared is None else shared[1]


def layer_norms(layer: Any) -> dict[str, Any]:
    """The norms before and after attention and the feed-forward part, where the layer has them. Families use the same names for
    different places."""
    places = {
        "before_attention": "input_layernorm",
        "after_attention": "post_self_attn_layernorm",
        "before_mlp": "post_attention_layernorm",
        "after_mlp": "post_mlp_layernorm",
    }
    if hasattr(layer, "post_feedforward_layernorm"):
        places |= {
            "after_attention": "post_attention_layernorm",
            "before_mlp": "pre_feedforward_layernorm",
            "after_mlp": "post_feedforward_layernorm",
        }
    return {place: norm for place, name in places.items() if (norm := getattr(layer, name, None)) is not None}


def check_parts(model: Any) -> None:
    """Raises `UnsupportedModelError` if the model has parts that are not known here."""
    body = getattr(model, "model", None)
    if body is None or not hasattr(body, "rotary_emb"):
        raise UnsupportedModelError("it is not built like a Llama")
    refuse_other_parts("model", body, BODY_PARTS)
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise UnsupportedModelError("its output embedding has a bias")
    Norm.of(body.norm)
    sizes = set()
    for layer in body.layers:
        refuse_other_parts("layers", layer, LAYER_PARTS)
        _, block = feed_forward_of(layer)
        if not hasattr(layer, "self_attn") and not hasattr(layer, DELTA):
            raise UnsupportedModelError("some layers have no attention")
        if not hasattr(layer, DELTA):
            _check_attention(layer.self_attn)
            sizes.add(
                sum(len(getattr(layer.self_attn, name).weight) for name in parts_of(layer.self_attn, QUERY_PARTS))
            )
        if is_mixture(block):
            check_mixture(block)
        else:
            refuse_other_parts("feed-forward part", block, {"down_proj"} | parts_of(block, GATE_PARTS))
        for norm in layer_norms(layer).values():
            Norm.of(norm)
    if not sizes:
        raise UnsupportedModelError("no layer has attention")
    if len(sizes) > 1:
        raise UnsupportedModelError("its layers have different numbers of heads")


def _check_attention(attention: Any) -> None:
    known = ATTENTION_PARTS | parts_of(attention, QUERY_PARTS)
    refuse_other_parts("attention", attention, known, parameters={SINKS})
    if getattr(attention, "is_causal", True) is False:
        raise UnsupportedModelError("its attention is not causal")


def windows_of(config: Any, caches: Sequence[Any], *, others: Collection[str] = ()) -> list[int | None] | None:
    """The window of each layer, None where it has full attention. None if a layer has neither, or keys of another layer.

    `caches`: an empty cache layer of transformers for each layer that has keys. `others`: more classes of them, without a window.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    is_chunked = "chunked_attention" in kinds or (not kinds and getattr(config, "attention_chunk_size", None))
    if (
        is_chunked
        or len(caches) != config.num_hidden_layers
        or {type(c).__name__ for c in caches}
        - {
            *WINDOWED_CACHES,
            *others,
        }
    ):
        return None
    return [getattr(cache, "sliding_window", None) for cache in caches]


@contextmanager
def short_windows(model: Any, size: int) -> Iterator[None]:
    """Within the context, the windows of a module have this size, so that a probe of a few tokens shows what they do."""
    config = model.config.get_text_config()
    holders = [part for part in (config, *model.modules()) if isinstance(getattr(part, "sliding_window", None), int)]
    before = [holder.sliding_window for holder in holders]
    try:
        for holder in holders:
            holder.sliding_window = size
        yield
    finally:
        for holder, window in zip(holders, before, strict=True):
            holder.sliding_window = window


def _is_rotated(attention: Any) -> bool:
    if hasattr(attention, "use_rope"):
        return bool(attention.use_rope)
    # EXAONE 4: positions matter in layers with a window only.
    return getattr(attention, "sliding_window", None) is None or getattr(attention, "is_sliding", True)


def rotation_by_length(config: Any) -> tuple[str, int] | None:
    """The kind of a rotary embedding that changes with the longest sequence of a batch, and the length above which it does."""
    rope = getattr(config, "rope_parameters", None) or {}
    # One for all layers, or one for each kind of layer.
    parts = [*rope.values()] if rope and all(isinstance(own, dict) for own in rope.values()) else [rope]
    found = [
        (part["rope_type"], int(part.get("original_max_position_embeddings") or config.max_position_embeddings))
        for part in parts
        if part.get("rope_type") in BY_LENGTH
    ]
    return min(found, key=itemgetter(1), default=None)


def _has_delta(body: Any) -> bool:
    return any(hasattr(layer, DELTA) for layer in body.layers)


def _is_gated(attention: Any) -> bool:
    """Whether the projection of queries has twice as many numbers as the heads give."""
    projection = getattr(attention, QUERY_PARTS[0], None)
    return projection is not None and len(projection.weight) == 2 * attention.o_proj.weight.shape[1]


def _has_layer_types(rotary: Any) -> bool:
    return "layer_type" in inspect.signature(rotary.forward).parameters


def _rotary_of(model: Any, attention: Any, kind: str | None, *, max_model_len: int) -> Rotary:
    embedding, config = model.get_input_embeddings().weight, model.config.get_text_config()
    if (changing := rotation_by_length(config)) is not None and max_model_len > changing[1]:
        name, length = changing
        raise UnsupportedModelError(f"its rotary embedding ({name}) depends on the length above {length} tokens")
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get(kind, {}) if kind is not None else rope
    is_paired, is_wide = _rotation_of(model, attention, kind)
    # A module without weights has no frequencies.
    rotary = type(model.model.rotary_emb)(config=config) if embedding.is_meta else model.model.rotary_emb
    x = torch.empty(1, dtype=embedding.dtype, device="cpu" if embedding.is_meta else embedding.device)
    positions_1T = torch.arange(max_model_len, device=x.device)[None]
    with torch.inference_mode():
        tables = _tables_of(rotary, x, positions_1T, kind)
    cosines_TF, sines_TF = (table.float() if is_wide else table.to(embedding.dtype) for table in tables)
    scales_T = None
    scale_of = getattr(sys.modules[type(attention).__module__], "get_llama_4_attn_scale", None)
    if scale_of is not None and (beta := rope.get("llama_4_scaling_beta")):
        scales_T = scale_of(positions_1T, beta, rope["original_max_position_embeddings"]).flatten().to(embedding.dtype)
    return Rotary(cosines_TF=cosines_TF, sines_TF=sines_TF, is_paired=is_paired, query_scales_T=scales_T)


def _tables_of(rotary: Any, x: Tensor, positions_1T: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, F). In most families, their second half repeats the first."""
    tables = rotary(x, positions_1T) if kind is None else rotary(x, positions_1T, kind)
    first, second = tables[0].chunk(2, dim=-1)
    width = first.shape[-1] if torch.equal(first, second) else tables[0].shape[-1]
    cosines, sines = (table[0, :, :width].contiguous() for table in tables)
    return cosines, sines


def _rotation_of(model: Any, attention: Any, kind: str | None) -> tuple[bool, bool]:
    """Whether neighbours are rotated, and whether the result is rounded once."""
    rotate = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    rotary = type(model.model.rotary_emb)(config=model.config.get_text_config())
    positions_1T = torch.arange(1, 6)[None]
    x = torch.linspace(-2, 3, 5 * attention.head_dim).view(1, 1, 5, -1).bfloat16()
    tables = rotary(x, positions_1T) if kind is None else rotary(x, positions_1T, kind)
    found = x if rotate is None else rotate(x, x, *tables)[0]
    cosines_TF, sines_TF = _tables_of(rotary, x, positions_1T, kind)
    for is_paired, is_wide in product((False, True), repeat=2):
        if not is_wide and cosines_TF.dtype != x.dtype:
            continue
        probed = Rotary(cosines_TF=cosines_TF, sines_TF=sines_TF, is_paired=is_paired)
        if rotate is not None and torch.equal(found, probed.reference(x, is_wide=is_wide)):
            return is_paired, is_wide
    raise UnsupportedModelError("its rotary embedding has another formula")


def _embedding_scale(body: Any) -> float:
    embedding = body.embed_tokens
    scale = getattr(embedding, "embed_scale", None)
    # Rounded to the type of the weights, as in the module.
    of_module = 1.0 if scale is None else float(torch.as_tensor(scale).to(embedding.weight.dtype))
    return of_module * float(getattr(body, "embedding_multiplier", 1.0))


def _only(found: set[Any], what: str) -> Any:
    if len(found) != 1:
        raise UnsupportedModelError(f"its layers have different {what}")
    return found.pop()
