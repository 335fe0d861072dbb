"""A lean forward for decoders shaped like Llama: fused projections, few operations, slots read and written in place.

The weights stay those of the Hugging Face module: its projections become views of the fused ones, so updates and digests see the
names they know. Before it is used it must prove itself against the module's own forward.
"""

# M tokens of a forward, N rows, C tokens a row, T positions, V vocabulary, E hidden size, X fused projection, D head size

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rollbook.inference.engines.embedded.cache.slot_cache import LayerShape, SlotCache
from rollbook.inference.engines.embedded.model.forward import PrefillInput, PrefillPlaces
from rollbook.inference.engines.embedded.model.torch_ops import HeadShape, TorchOps

LEAN_KINDS = frozenset({"llama", "mistral", "qwen2"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    before_attention_E: Tensor
    fused_XE: Tensor
    fused_bias_X: Tensor | None
    out_DE: Tensor
    before_mlp_E: Tensor
    gate_up_FE: Tensor
    down_FE: Tensor


def why_not_lean(model: Any) -> str | None:
    """What keeps a module from the lean forward. None: nothing does."""
    config = model.config
    if config.model_type not in LEAN_KINDS:
        return f"models of kind {config.model_type} run through their own module"
    if getattr(config, "hidden_act", None) != "silu":
        return f"its activation is {getattr(config, 'hidden_act', None)}, not silu"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") in ("dynamic", "longrope"):
        return f"its rotary embedding ({rope['rope_type']}) depends on the length"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "its rotary embedding covers a part of each head only"
    attention = model.model.layers[0].self_attn
    if attention.o_proj.bias is not None or model.model.layers[0].mlp.down_proj.bias is not None:
        return "its output projections have biases"
    return None


class LeanLM:
    """Not thread-safe: one engine thread owns it."""

    def __init__(self, model: Any, *, max_model_len: int, ops: TorchOps | None = None) -> None:
        config = model.config
        self.vocab_size: int = config.vocab_size
        self.max_model_len = max_model_len
        parameter: Tensor = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        keys = int(config.num_key_value_heads)
        size = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self.heads = HeadShape(queries=int(config.num_attention_heads), keys=keys, size=size)
        self.shapes = [LayerShape(keys, size, size)] * int(config.num_hidden_layers)
        self._epsilon: float = config.rms_norm_eps
        self._embedding_VE: Tensor = model.model.embed_tokens.weight
        self._head_VE: Tensor = model.get_output_embeddings().weight
        self._last_norm_E: Tensor = model.model.norm.weight
        self._layers = [_fused_layer(layer) for layer in model.model.layers]
        self.ops = ops or TorchOps(self.heads, **self.rotary_tables(model))

    def rotary_tables(self, model: Any) -> dict[str, Tensor]:
        positions_1T = torch.arange(self.max_model_len, device=self.device)[None]
        with torch.inference_mode():
            cosines_1TD, sines_1TD = model.model.rotary_emb(self._embedding_VE[:1], positions_1T)
        return {"cosines_TD": cosines_1TD[0].contiguous(), "sines_TD": sines_1TD[0].contiguous()}

    def prefill(self, given: PrefillInput, slots: SlotCache) -> Tensor:
        places = PrefillPlaces.of(given, scratch_row=slots.scratch_row, max_model_len=self.max_model_len)
        step = self.ops.prefill_step(places, slots)
        hidden_ME = F.embedding(given.tokens_NC.flatten(), self._embedding_VE)
        for layer, joint in zip(self._layers, slots.joint, strict=True):
            normed_ME = self.ops.norm(hidden_ME, layer.before_attention_E, self._epsilon)
            fused_MX = F.linear(normed_ME, layer.fused_XE, layer.fused_bias_X)
            self.ops.rotate_and_store(fused_MX, step, joint)
            hidden_ME.addmm_(self.ops.attend_many(fused_MX, step, joint, places), layer.out_DE)
            self._mlp(hidden_ME, layer)
        rows, tokens = given.tokens_NC.shape
        last_N = torch.arange(rows, device=hidden_ME.device) * tokens + given.lasts_N
        return self._logits(hidden_ME[last_N])

    def decode(self, tokens_N: Tensor, positions_N: Tensor, slots: SlotCache, *, length: int) -> Tensor:
        step = self.ops.decode_step(positions_N, slots, length=length)
        hidden_NE = F.embedding(tokens_N, self._embedding_VE)
        for layer, joint in zip(self._layers, slots.joint, strict=True):
            normed_NE = self.ops.norm(hidden_NE, layer.before_attention_E, self._epsilon)
            fused_NX = F.linear(normed_NE, layer.fused_XE, layer.fused_bias_X)
            self.ops.rotate_and_store(fused_NX, step, joint)
            hidden_NE.addmm_(self.ops.attend_one(fused_NX, step, joint), layer.out_DE)
            self._mlp(hidden_NE, layer)
        return self._logits(hidden_NE)

    def _mlp(self, hidden_ME: Tensor, layer: _Layer) -> None:
        """Added in place: the residual stream is one tensor from the embedding to the head."""
        normed_ME = self.ops.norm(hidden_ME, layer.before_mlp_E, self._epsilon)
        hidden_ME.addmm_(self.ops.gate(F.linear(normed_ME, layer.gate_up_FE)), layer.down_FE)

    def _logits(self, hidden_NE: Tensor) -> Tensor:
        return F.linear(self.ops.norm(hidden_NE, self._last_norm_E, self._epsilon), self._head_VE)


def disagreement(lean: LeanLM, model: nn.Module) -> float:
    """How far the lean forward's logits are from the module's (root of the mean square), as a share of their spread: prefill,
    continued prefill, decode, the worst of them."""
    generator = torch.Generator().manual_seed(0)
    count = min(12, lean.max_model_len - 1)
    tokens_1T = torch.randint(0, lean.vocab_size, (1, count + 1), generator=generator).to(lean.device)
    first = max(1, count // 2)
    slots = SlotCache(lean.shapes, dtype=lean.dtype, device=lean.device)
    slots.resize(1, lean.max_model_len if lean.max_model_len < 64 else 64)
    row_1 = torch.zeros(1, dtype=torch.long, device=lean.device)
    off: list[Tensor] = []
    with torch.inference_mode():
        expected_TV = model(input_ids=tokens_1T, use_cache=False).logits[0].float()
        spread = float(expected_TV.std()) + 1e-6
        for start, end in ((0, first), (first, count)):
            if start < end:
                given = PrefillInput(
                    tokens_NC=tokens_1T[:, start:end],
                    rows_N=row_1,
                    starts_N=row_1 + start,
                    lasts_N=row_1 + (end - start - 1),
                    reach=end,
                    is_fresh=start == 0,
                )
                logits_V = lean.prefill(given, slots)[0].float()
                off.append((logits_V - expected_TV[end - 1]).square().mean().sqrt())
        logits_V = lean.decode(tokens_1T[0, count:], row_1 + count, slots, length=count + 1)[0].float()
        off.append((logits_V - expected_TV[count]).square().mean().sqrt())
        # torch's maximum, not Python's: one that is not a number must show.
        return float(torch.stack(off).amax()) / spread


def _fused_layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    fused, bias = _fuse([attention.q_proj, attention.k_proj, attention.v_proj])
    gate_up, gate_up_bias = _fuse([mlp.gate_proj, mlp.up_proj])
    if gate_up_bias is not None:
        raise ValueError("the lean forward knows no biases in the feed-forward part")
    return _Layer(
        before_attention_E=layer.input_layernorm.weight,
        fused_XE=fused,
        fused_bias_X=bias,
        out_DE=attention.o_proj.weight.t(),
        before_mlp_E=layer.post_attention_layernorm.weight,
        gate_up_FE=gate_up,
        down_FE=mlp.down_proj.weight.t(),
    )


def _fuse(parts: list[Any]) -> tuple[Tensor, Tensor | None]:
    """One weight (and bias) for several projections of the same input; theirs become views of it."""
    weight = torch.cat([part.weight.data for part in parts])
    bias = None if parts[0].bias is None else torch.cat([part.bias.data for part in parts])
    start = 0
    for part in parts:
        end = start + part.weight.shape[0]
        part.weight.data = weight[start:end]
        if bias is not None:
            part.bias.data = bias[start:end]
        start = end
    return weight, bias
