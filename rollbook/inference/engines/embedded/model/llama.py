"""A fast forward for Llama-like decoders: fused projections, few operations, slots read and written in place.

The fused projections own the weights; the projections of the Hugging Face module are views into them, so updates and digests use
the module's names. Before it is used, its logits are compared with those of the module. Adapters are added to the output of each
projection.
"""

# M tokens of a forward, N rows, C tokens a row, T positions, V vocabulary, E hidden size, X fused projection, D head size

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rollbook.inference.engines.embedded.adapters import AdapterBank, AdapterRows
from rollbook.inference.engines.embedded.model.forward import PrefillInput, PrefillPositions, SlotModel
from rollbook.inference.engines.embedded.model.packed import PackedOps, PackedStep, PackedTorchOps
from rollbook.inference.engines.embedded.model.torch_ops import HeadNorms, HeadShape, TorchOps
from rollbook.inference.engines.embedded.slot_cache import LayerShape, SlotCache

HEAD = "lm_head"
SUPPORTED_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    name: str
    before_attention_E: Tensor
    fused_XE: Tensor
    fused_bias_X: Tensor | None
    head_norms: HeadNorms | None
    out_DE: Tensor
    before_mlp_E: Tensor
    gate_up_FE: Tensor
    down_FE: Tensor

    @property
    def fused_name(self) -> str:
        return f"{self.name}.self_attn.qkv"

    @property
    def out_name(self) -> str:
        return f"{self.name}.self_attn.o_proj"

    @property
    def gate_up_name(self) -> str:
        return f"{self.name}.mlp.gate_up"

    @property
    def down_name(self) -> str:
        return f"{self.name}.mlp.down_proj"


def unsupported_reason(model: Any, *, max_model_len: int) -> str | None:
    """Why this forward does not support a module; None if it does."""
    config = model.config
    if config.model_type not in SUPPORTED_TYPES:
        return f"model type {config.model_type} is not supported"
    if getattr(config, "hidden_act", None) != "silu":
        return f"its activation is {getattr(config, 'hidden_act', None)}, not silu"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") in ("dynamic", "longrope"):
        return f"its rotary embedding ({rope['rope_type']}) depends on the length"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "its rotary embedding covers only a part of each head"
    if (window := getattr(config, "sliding_window", None)) is not None and window < max_model_len:
        kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
        if kinds != {"full_attention"}:
            return f"its attention has a window of {window} tokens"
    attention = model.model.layers[0].self_attn
    if attention.o_proj.bias is not None or model.model.layers[0].mlp.down_proj.bias is not None:
        return "its output projections have biases"
    return None


class LlamaForward:
    """Not thread-safe."""

    is_dense = True

    def __init__(self, model: Any, *, max_model_len: int) -> None:
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
        self._layers = [_fused_layer(f"model.layers.{at}", layer) for at, layer in enumerate(model.model.layers)]
        self.adapters = AdapterBank(model, fused=_fused_names(self._layers))
        tables = self.rotary_tables(model)
        self.ops = TorchOps(self.heads, **tables)
        self.packed_ops: PackedOps = PackedTorchOps(self.heads, **tables)

    def rotary_tables(self, model: Any) -> dict[str, Tensor]:
        positions_1T = torch.arange(self.max_model_len, device=self.device)[None]
        with torch.inference_mode():
            cosines_1TD, sines_1TD = model.model.rotary_emb(self._embedding_VE[:1], positions_1T)
        return {"cosines_TD": cosines_1TD[0].contiguous(), "sines_TD": sines_1TD[0].contiguous()}

    def new_memory(self) -> SlotCache:
        return SlotCache(self.shapes, dtype=self.dtype, device=self.device)

    def bytes_per_row(self) -> tuple[int, int]:
        return SlotCache.bytes_per_token(self.shapes, self.dtype), 0

    def prefill(self, inputs: PrefillInput, slots: SlotCache) -> Tensor:
        positions = PrefillPositions.of(inputs, scratch_row=slots.scratch_row, max_model_len=self.max_model_len)
        step = self.ops.prefill_step(positions, slots)
        hidden_ME = F.embedding(inputs.tokens_NC.flatten(), self._embedding_VE)
        adapters = inputs.adapters
        for layer, joint in zip(self._layers, slots.joint, strict=True):
            normed_ME = self.ops.norm(hidden_ME, layer.before_attention_E, self._epsilon)
            fused_MX = self._fused(normed_ME, layer, adapters)
            self.ops.rotate_and_store(fused_MX, step, joint, layer.head_norms)
            attended_MD = self.ops.attend_many(fused_MX, step, joint, positions)
            self._add(hidden_ME, attended_MD, layer.out_DE, layer.out_name, adapters)
            self._mlp(hidden_ME, layer, self.ops, adapters)
        rows, tokens = inputs.tokens_NC.shape
        last_N = torch.arange(rows, device=hidden_ME.device) * tokens + inputs.lasts_N
        return self._logits(hidden_ME[last_N], self.ops, adapters)

    def decode(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        slots: SlotCache,
        *,
        rows: Sequence[int],
        length: int,
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        step = self.ops.decode_step(positions_N, slots, length=length)
        hidden_NE = F.embedding(tokens_N, self._embedding_VE)
        for layer, joint in zip(self._layers, slots.joint, strict=True):
            normed_NE = self.ops.norm(hidden_NE, layer.before_attention_E, self._epsilon)
            fused_NX = self._fused(normed_NE, layer, adapters)
            self.ops.rotate_and_store(fused_NX, step, joint, layer.head_norms)
            self._add(hidden_NE, self.ops.attend_one(fused_NX, step, joint), layer.out_DE, layer.out_name, adapters)
            self._mlp(hidden_NE, layer, self.ops, adapters)
        return self._logits(hidden_NE, self.ops, adapters)

    def packed(self, step: PackedStep, layers: Sequence[Tensor]) -> Tensor:
        """Logits (N, V) of the sampled tokens of a packed step. `layers`: the cache blocks of each layer."""
        ops, adapters = self.packed_ops, step.adapters
        hidden_ME = F.embedding(step.tokens_M, self._embedding_VE)
        for layer, blocks in zip(self._layers, layers, strict=True):
            normed_ME = ops.norm(hidden_ME, layer.before_attention_E, self._epsilon)
            fused_MX = self._fused(normed_ME, layer, adapters)
            ops.rotate_and_store(fused_MX, step, blocks, layer.head_norms)
            self._add(hidden_ME, ops.attend(fused_MX, step, blocks), layer.out_DE, layer.out_name, adapters)
            self._mlp(hidden_ME, layer, ops, adapters)
        sampled = None if adapters is None else adapters.of_tokens(step.samples_N)
        return self._logits(hidden_ME[step.samples_N], ops, sampled)

    def _fused(self, normed_ME: Tensor, layer: _Layer, adapters: AdapterRows | None) -> Tensor:
        fused_MX = F.linear(normed_ME, layer.fused_XE, layer.fused_bias_X)
        self.adapters.add(layer.fused_name, fused_MX, normed_ME, adapters)
        return fused_MX

    def _mlp(self, hidden_ME: Tensor, layer: _Layer, ops: TorchOps | PackedOps, adapters: AdapterRows | None) -> None:
        """Adds to the residual stream in place."""
        normed_ME = ops.norm(hidden_ME, layer.before_mlp_E, self._epsilon)
        both_MF = F.linear(normed_ME, layer.gate_up_FE)
        self.adapters.add(layer.gate_up_name, both_MF, normed_ME, adapters)
        self._add(hidden_ME, ops.gate(both_MF), layer.down_FE, layer.down_name, adapters)

    def _add(self, hidden_ME: Tensor, x_MD: Tensor, weight_DE: Tensor, name: str, adapters: AdapterRows | None) -> None:
        """Add a projection to the residual stream in place."""
        if not self.adapters.has(name, adapters):
            hidden_ME.addmm_(x_MD, weight_DE)
            return
        # The sum of base and adapter is rounded before it is added, as in the trainer.
        projected_ME = x_MD @ weight_DE
        self.adapters.add(name, projected_ME, x_MD, adapters)
        hidden_ME.add_(projected_ME)

    def _logits(self, hidden_NE: Tensor, ops: TorchOps | PackedOps, adapters: AdapterRows | None) -> Tensor:
        normed_NE = ops.norm(hidden_NE, self._last_norm_E, self._epsilon)
        logits_NV = float32_logits(normed_NE, self._head_VE)
        self.adapters.add(HEAD, logits_NV, normed_NE, adapters)
        return logits_NV


def float32_logits(hidden_NE: Tensor, head_VE: Tensor) -> Tensor:
    """On a GPU in float32 whatever the type of the inputs: in bfloat16, logits between 16 and 32 would be multiples of 0.125.

    A CPU has no such product, so its logits are rounded. The head of the trainer does the same (`token_head.py`).
    """
    if hidden_NE.is_cuda and hidden_NE.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(hidden_NE, head_VE.t(), out_dtype=torch.float32)
    return F.linear(hidden_NE, head_VE)


def relative_error(forward: SlotModel, model: nn.Module) -> float:
    """The largest error of prefill, continued prefill and a decode step of two rows of different lengths: root mean square
    difference from the module's logits, divided by their standard deviation."""
    generator = torch.Generator().manual_seed(0)
    count = min(12, forward.max_model_len - 1)
    tokens_1T = torch.randint(0, forward.vocab_size, (1, count + 1), generator=generator).to(forward.device)
    first = max(1, count // 2)
    slots = forward.new_memory()
    slots.resize(2, forward.max_model_len if forward.max_model_len < 64 else 64)
    row_1 = torch.zeros(1, dtype=torch.long, device=forward.device)
    errors: list[Tensor] = []
    with torch.inference_mode():
        expected_TV = model(input_ids=tokens_1T, use_cache=False).logits[0].float()
        deviation = float(expected_TV.std()) + 1e-6
        # Row 0 in two pieces, then row 1.
        for row, start, end in ((0, 0, first), (0, first, count), (1, 0, first)):
            if start < end:
                inputs = PrefillInput(
                    tokens_NC=tokens_1T[:, start:end],
                    rows_N=row_1 + row,
                    starts_N=row_1 + start,
                    lasts_N=row_1 + (end - start - 1),
                    attention_length=end,
                    is_fresh=start == 0,
                )
                logits_V = forward.prefill(inputs, slots)[0].float()
                errors.append((logits_V - expected_TV[end - 1]).square().mean().sqrt())
        positions_2 = torch.tensor([count, first], device=forward.device)
        logits_2V = forward.decode(tokens_1T[0, positions_2], positions_2, slots, rows=[0, 1], length=count + 1).float()
        errors += list((logits_2V - expected_TV[positions_2]).square().mean(dim=-1).sqrt())
        # torch's maximum, not Python's, because it returns NaN if any error is NaN.
        return float(torch.stack(errors).amax()) / deviation


def _fused_names(layers: Sequence[_Layer]) -> dict[str, Sequence[str]]:
    names: dict[str, Sequence[str]] = {}
    for layer in layers:
        names[layer.fused_name] = [f"{layer.name}.self_attn.{part}_proj" for part in "qkv"]
        names[layer.gate_up_name] = [f"{layer.name}.mlp.{part}_proj" for part in ("gate", "up")]
    return names


def _fused_layer(name: str, layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    fused, bias = _fuse([attention.q_proj, attention.k_proj, attention.v_proj])
    gate_up, gate_up_bias = _fuse([mlp.gate_proj, mlp.up_proj])
    if gate_up_bias is not None:
        raise ValueError("biases in the feed-forward part are not supported")
    return _Layer(
        name=name,
        before_attention_E=layer.input_layernorm.weight,
        fused_XE=fused,
        fused_bias_X=bias,
        head_norms=_head_norms(attention),
        out_DE=attention.o_proj.weight.t(),
        before_mlp_E=layer.post_attention_layernorm.weight,
        gate_up_FE=gate_up,
        down_FE=mlp.down_proj.weight.t(),
    )


def _head_norms(attention: Any) -> HeadNorms | None:
    if getattr(attention, "q_norm", None) is None:
        return None
    queries, keys = attention.q_norm, attention.k_norm
    return HeadNorms(queries_D=queries.weight, keys_D=keys.weight, epsilon=queries.variance_epsilon)


def _fuse(parts: list[Any]) -> tuple[Tensor, Tensor | None]:
    """One weight (and bias) for several projections of the same input; their weights become views into it."""
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
