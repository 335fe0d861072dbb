"""A fast forward for Llama-like decoders, some of whose layers may be gated delta layers: fused projections, few operations, slots
read and written in place.

What differs between families is read from the module (`rollbook.numerics.recipe`). The fused projections own the weights; the
projections of the Hugging Face module are views into them, so updates and digests use the module's names. Before it is used, its
logits are compared with those of the module. Adapters are added to the output of each projection.
"""

# M tokens of a forward, N rows, C tokens a row, T positions, V vocabulary, E hidden size, X fused projection, D head size, O output
# of a projection, F feed-forward size, L layers with experts, K experts of a token

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rollbook.inference.engines.embedded.adapters import AdapterBank, AdapterRows
from rollbook.inference.engines.embedded.model import eight_bits
from rollbook.inference.engines.embedded.model.forward import PrefillInput, PrefillPositions, SlotModel
from rollbook.inference.engines.embedded.model.packed import PackedOps, PackedStep, PackedTorchOps
from rollbook.inference.engines.embedded.model.row_states import new_layers
from rollbook.inference.engines.embedded.model.torch_ops import HeadShape, TorchOps
from rollbook.inference.engines.embedded.routes import RouteShape
from rollbook.inference.engines.embedded.slot_cache import LayerShape, SlotCache, StateShape
from rollbook.numerics.delta import DeltaLayer
from rollbook.numerics.experts import SHARED_GATE, Experts, shared_of
from rollbook.numerics.module_parts import DELTA_PARTS, GATE_PARTS, GROUPED_DELTA_PARTS, QUERY_PARTS
from rollbook.numerics.operations import float32_logits, product
from rollbook.numerics.recipe import DELTA, Attention, ModelRecipe, Norm, feed_forward_of, layer_norms, short_windows

HEAD = "lm_head"
PROBED_WINDOW = 4
Ops = TorchOps | PackedOps


@dataclass(frozen=True, slots=True, kw_only=True)
class _Projection:
    """Its adapters have the name."""

    name: str
    weight_OE: Tensor
    weight_EO: Tensor
    bias_O: Tensor | None
    norm: Norm | None
    """Of the result."""

    @classmethod
    def of(cls, name: str, weight_OE: Tensor, bias_O: Tensor | None, norm: Norm | None = None) -> "_Projection":
        return cls(name=name, weight_OE=weight_OE, weight_EO=weight_OE.t(), bias_O=bias_O, norm=norm)


class _ResidualStream:
    """The residual stream of one forward. The kernel of the next norm performs the last addition."""

    def __init__(self, hidden_ME: Tensor, ops: Ops) -> None:
        self._hidden_ME = hidden_ME
        self._ops = ops
        self._added_ME: Tensor | None = None

    def add(self, result_ME: Tensor) -> None:
        self._added_ME = result_ME

    def add_product(self, x_MD: Tensor, weight_DE: Tensor) -> None:
        """In one operation, which rounds the sum only."""
        self._hidden_ME.addmm_(x_MD, weight_DE)

    def normed(self, norm: Norm | None) -> Tensor:
        if norm is None or self._added_ME is None:
            return self.whole() if norm is None else self._ops.norm(self._hidden_ME, norm)
        added_ME, self._added_ME = self._added_ME, None
        return self._ops.add_and_norm(self._hidden_ME, added_ME, norm)

    def whole(self) -> Tensor:
        if self._added_ME is not None:
            self._hidden_ME.add_(self._added_ME)
            self._added_ME = None
        return self._hidden_ME


@dataclass(frozen=True, slots=True, kw_only=True)
class _FeedForward:
    gate_up: _Projection
    down: _Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mixture:
    experts: Experts
    shared_gate: _Projection | None
    """Of what the layer's feed-forward part adds to the experts."""
    norm: Norm | None
    """Of the sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    attention: Attention | None
    delta: DeltaLayer | None
    """In place of attention."""
    place: int
    """Position of its memory among the layers with keys, or among those with states."""
    fused: _Projection
    """Queries, keys and values, or the inputs of a gated delta part."""
    out: _Projection
    mlp: _FeedForward | None
    """None: nothing computes all tokens."""
    mixture: _Mixture | None
    before_attention: Norm | None
    before_mlp: Norm | None


class LlamaForward:
    """Not thread-safe."""

    is_dense = True

    def __init__(self, model: Any, *, max_model_len: int, records_routes: bool = False) -> None:
        """Raises `UnsupportedModelError`. Then the module is unchanged. `records_routes`: keep the chosen experts of each position
        with its keys."""
        config = model.config.get_text_config()
        self.recipe = ModelRecipe.of(model, max_model_len=max_model_len, caches=new_layers(config))
        self.route_shape = RouteShape.of_experts(list(filter(None, self.recipe.experts))) if records_routes else None
        """None: chosen experts are not recorded, or there are none."""
        self.vocab_size: int = config.vocab_size
        self.max_model_len = max_model_len
        parameter: Tensor = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        attending = [layer.self_attn for layer in model.model.layers if hasattr(layer, "self_attn")]
        keys, size = int(config.num_key_value_heads), int(attending[0].head_dim)
        self.heads = HeadShape(queries=int(config.num_attention_heads), keys=keys, size=size)
        self.shapes = [LayerShape(keys, size, size)] * len(attending)
        self.cache_dtype = self.dtype
        """The dtype of stored keys and values."""
        self._fp8_weights: dict[str, eight_bits.Fp8Weight] = {}
        """By the name of the projection, if products have 8 bits."""
        self.states = [StateShape(*delta.state_sizes) for delta in self.recipe.delta if delta is not None]
        self._embedding_VE: Tensor = model.model.embed_tokens.weight
        self._head_VE: Tensor = model.get_output_embeddings().weight
        self._last_norm = Norm.of(model.model.norm)
        groups: dict[str, Sequence[str]] = {}
        self._layers = [_layer_of(at, layer, self.recipe, groups) for at, layer in enumerate(model.model.layers)]
        self.adapters = AdapterBank(model, fused=groups)
        self._rounds_products = any(self.recipe.delta) and self.dtype is not torch.float32
        """Whether to round products before they are added, as the module in the trainer does: its bits are not reached, but the
        difference of logprobs is several times smaller."""
        self.is_exact = False
        """Whether packed steps have the bits of the trainer. Set by `use_exact_products`."""
        self.ops = TorchOps(self.heads, self.recipe.activation)
        self.packed_ops: PackedOps = PackedTorchOps(self.heads, self.recipe.activation)

    def use_exact_products(self, *, is_exact: bool) -> None:
        """Whether to compute products and sums as the trainer does. The kernels must be exact too."""
        self.is_exact = self.adapters.is_exact = is_exact

    def store_eight_bits(self, kv_dtype: str) -> None:
        """Store keys and values with 8 bits a number: `fp8` or `int8`. For memory that is made from now on."""
        assert not self.states, "states have the dtype of the model"
        self.cache_dtype, width = eight_bits.FORMATS[kv_dtype], self.heads.size + eight_bits.EXPONENT_BYTES
        self.shapes = [LayerShape(self.heads.keys, width, width)] * len(self.shapes)

    @property
    def projections(self) -> Iterator[_Projection]:
        """Those that all tokens pass."""
        for layer in self._layers:
            yield from (layer.fused, layer.out)
            if layer.mlp is not None:
                yield from (layer.mlp.gate_up, layer.mlp.down)

    @property
    def has_fp8_weights(self) -> bool:
        return bool(self._fp8_weights)

    def use_fp8_weights(self) -> None:
        self._fp8_weights = {each.name: eight_bits.Fp8Weight.of(each.weight_OE) for each in self.projections}
        self.renew_copies()

    def renew_copies(self) -> None:
        """Call after the weights were replaced."""
        for weight in self._fp8_weights.values():
            weight.renew(self.packed_ops.scaled)

    @property
    def has_windows(self) -> bool:
        return any(attention is not None and attention.window is not None for attention in self.recipe.attention)

    @contextmanager
    def short_windows(self, module: Any) -> Iterator[None]:
        """Within the context, windows of this forward and of the module are so short that a comparison over a few tokens shows
        them."""
        layers = self._layers
        self._layers = [
            layer
            if layer.attention is None or layer.attention.window is None
            else replace(layer, attention=replace(layer.attention, window=PROBED_WINDOW))
            for layer in layers
        ]
        try:
            with short_windows(module, PROBED_WINDOW) if self.has_windows else nullcontext():
                yield
        finally:
            self._layers = layers

    def row_operations(self) -> Iterator[tuple[str, int, Callable[[Tensor], Tensor]]]:
        """The operations of the first layer that compute each row by itself: name, width of their input, and the operation."""
        layer, ops, head_EV = self._layers[0], self.packed_ops, self._head_VE.t()
        wide = len(head_EV)

        def added(projection: _Projection) -> Callable[[Tensor], Tensor]:
            def operation(x_MD: Tensor) -> Tensor:
                stream = _ResidualStream(torch.zeros(len(x_MD), wide, dtype=self.dtype, device=self.device), ops)
                self._add(stream, x_MD, projection, ops, None)
                return stream.whole()

            return operation

        yield "norm", wide, lambda x_ME: ops.norm(x_ME, self._last_norm)
        yield "sum and norm", wide, lambda x_ME: ops.add_and_norm(x_ME.clone(), x_ME, self._last_norm)
        yield f"product {layer.fused.name}", wide, lambda x_ME: self._projected(x_ME, layer.fused, ops, None)
        yield f"product {layer.out.name}", layer.out.weight_OE.shape[1], added(layer.out)
        if (mlp := layer.mlp) is not None:
            yield f"product {mlp.gate_up.name}", wide, lambda x_ME: self._projected(x_ME, mlp.gate_up, ops, None)
            yield "gate", len(mlp.gate_up.weight_OE), ops.gate
            yield f"product {mlp.down.name}", mlp.down.weight_OE.shape[1], added(mlp.down)
        yield f"product {HEAD}", wide, lambda x_ME: float32_logits(x_ME, self._head_VE)

    def new_memory(self) -> SlotCache:
        return SlotCache(
            self.shapes, dtype=self.cache_dtype, device=self.device, routes=self.route_shape, states=self.states
        )

    def bytes_per_row(self) -> tuple[int, int]:
        routes = 0 if self.route_shape is None else self.route_shape.num_bytes
        per_token = SlotCache.bytes_per_token(self.shapes, self.cache_dtype) + routes
        return per_token, sum(shape.num_bytes(self.dtype) for shape in self.states)

    def prefill(self, inputs: PrefillInput, slots: SlotCache) -> Tensor:
        positions = PrefillPositions.of(inputs, scratch_row=slots.scratch_row, max_model_len=self.max_model_len)
        step, ops, adapters = self.ops.prefill_step(positions, slots), self.ops, inputs.adapters
        stream, chosen = _ResidualStream(self._embedded(inputs.tokens_NC.flatten()), ops), list[Tensor]()
        for layer in self._layers:
            fused_MX = self._fused(stream, layer, ops, adapters)
            if layer.attention is None:
                result_MD = _continued(fused_MX, layer, inputs, slots)
            else:
                joint = slots.joint[layer.place]
                fused_MX, gates_MD = self._without_gates(fused_MX, layer.attention)
                ops.rotate_and_store(fused_MX, step, joint, layer.attention)
                attended_MD = ops.attend_many(fused_MX, step, joint, layer.attention, positions.rows_N)
                result_MD = _gated(attended_MD, gates_MD)
            self._add(stream, result_MD, layer.out, ops, adapters)
            self._mlp(stream, layer, ops, adapters, chosen)
        rows, tokens = inputs.tokens_NC.shape
        if slots.routes is not None and self.route_shape is not None:
            at = positions.write_rows_NC.flatten(), positions.write_at_NC.flatten()
            slots.routes[at] = self.route_shape.stacked(chosen)
        last_N = torch.arange(rows, device=self.device) * tokens + inputs.lasts_N
        return self._logits(stream.whole()[last_N], ops, adapters)

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
        rows_N = None if isinstance(rows, range) else torch.tensor(rows, device=self.device)
        step, ops = self.ops.decode_step(positions_N, slots, rows_N=rows_N, length=length), self.ops
        stream, chosen = _ResidualStream(self._embedded(tokens_N), ops), list[Tensor]()
        for layer in self._layers:
            fused_NX = self._fused(stream, layer, ops, adapters)
            if layer.attention is None:
                result_ND = _advanced(fused_NX, layer, slots, ops)
            else:
                joint = slots.joint[layer.place]
                fused_NX, gates_ND = self._without_gates(fused_NX, layer.attention)
                ops.rotate_and_store(fused_NX, step, joint, layer.attention)
                result_ND = _gated(ops.attend_one(fused_NX, step, joint, layer.attention), gates_ND)
            self._add(stream, result_ND, layer.out, ops, adapters)
            self._mlp(stream, layer, ops, adapters, chosen)
        if slots.routes is not None and self.route_shape is not None:
            rows_N = torch.arange(len(tokens_N), device=self.device) if rows_N is None else rows_N
            slots.routes[rows_N, positions_N] = self.route_shape.stacked(chosen)
        return self._logits(stream.whole(), ops, adapters)

    def packed(self, step: PackedStep, layers: Sequence[Tensor], routes: Tensor | None = None) -> Tensor:
        """Logits (N, V) of the sampled tokens of a packed step. `layers`: the cache blocks of each layer. `routes`: blocks for the
        chosen experts, if they are recorded."""
        ops, adapters = self.packed_ops, step.adapters
        stream, chosen = _ResidualStream(self._embedded(step.tokens_M), ops), list[Tensor]()
        for layer, blocks in zip(self._layers, layers, strict=True):
            assert layer.attention is not None, "recurrent layers have no blocks"
            fused_MX, gates_MD = self._without_gates(self._fused(stream, layer, ops, adapters), layer.attention)
            ops.rotate_and_store(fused_MX, step, blocks, layer.attention)
            attended_MD = _gated(ops.attend(fused_MX, step, blocks, layer.attention), gates_MD)
            self._add(stream, attended_MD, layer.out, ops, adapters)
            self._mlp(stream, layer, ops, adapters, chosen)
        if routes is not None and self.route_shape is not None:
            routes[step.places(routes.shape[1])] = self.route_shape.stacked(chosen)
        sampled = None if adapters is None else adapters.of_tokens(step.samples_N)
        return self._logits(stream.whole()[step.samples_N], ops, sampled)

    def _embedded(self, tokens_M: Tensor) -> Tensor:
        hidden_ME = F.embedding(tokens_M, self._embedding_VE)
        return hidden_ME if self.recipe.embedding_scale == 1.0 else hidden_ME.mul_(self.recipe.embedding_scale)

    def _fused(self, stream: _ResidualStream, layer: _Layer, ops: Ops, adapters: AdapterRows | None) -> Tensor:
        return self._projected(stream.normed(layer.before_attention), layer.fused, ops, adapters)

    def _without_gates(self, fused_MX: Tensor, attention: Attention) -> tuple[Tensor, Tensor | None]:
        """Queries, keys and values, and the gates of the results."""
        if not attention.is_gated:
            return fused_MX, None
        heads, ends = self.heads, self.heads.queries * self.heads.size
        both_M2QD = fused_MX[:, : 2 * ends].view(-1, heads.queries, 2, heads.size).transpose(1, 2)
        queries_MD, gates_MD = (part.reshape(-1, ends) for part in both_M2QD.unbind(dim=1))
        return torch.cat((queries_MD, fused_MX[:, 2 * ends :]), dim=1), gates_MD

    def _projected(self, x_ME: Tensor, projection: _Projection, ops: Ops, adapters: AdapterRows | None) -> Tensor:
        if (weight := self._fp8_weights.get(projection.name)) is None:
            projected_MO = F.linear(x_ME, projection.weight_OE, projection.bias_O)
        else:
            projected_MO = weight.product(ops.scaled(x_ME), projection.bias_O, x_ME.dtype)
        self.adapters.add(projection.name, projected_MO, x_ME, adapters)
        return projected_MO

    def _mlp(
        self,
        stream: _ResidualStream,
        layer: _Layer,
        ops: Ops,
        adapters: AdapterRows | None,
        chosen: list[Tensor],
    ) -> None:
        """Adds to the residual stream. The chosen experts of a mixture are appended to `chosen`."""
        mixture, mlp = layer.mixture, layer.mlp
        normed_ME = stream.normed(layer.before_mlp)
        gated_MF = None if mlp is None else ops.gate(self._projected(normed_ME, mlp.gate_up, ops, adapters))
        if mixture is None:
            assert mlp is not None, "a layer has a feed-forward part, or experts"
            assert gated_MF is not None, "a layer has a feed-forward part, or experts"
            self._add(stream, gated_MF, mlp.down, ops, adapters)
            return
        # A router may have layers with adapters of its own.
        with self.adapters.in_module(adapters):
            chosen_MK, weights_MK = mixture.experts.routed(normed_ME)
        chosen.append(chosen_MK)
        mixed_ME = mixture.experts(normed_ME, chosen_MK, weights_MK, gate=ops.gate)
        if mlp is not None and gated_MF is not None:
            shared_ME = self._projected(gated_MF, mlp.down, ops, adapters)
            if mixture.shared_gate is not None:
                shared_ME.mul_(torch.sigmoid(self._projected(normed_ME, mixture.shared_gate, ops, adapters)))
            mixed_ME += shared_ME
        self._add_result(stream, mixed_ME, mixture.norm, ops)

    def _add(
        self, stream: _ResidualStream, x_MD: Tensor, projection: _Projection, ops: Ops, adapters: AdapterRows | None
    ) -> None:
        """Add a projection, normalised and scaled, to the residual stream."""
        is_plain, norm, scale = projection.bias_O is None, projection.norm, self.recipe.residual_scale
        is_alone = norm is None and scale == 1.0 and not self.adapters.has(projection.name, adapters)
        if is_plain and is_alone and not (self.is_exact or self._rounds_products or self._fp8_weights):
            stream.add_product(x_MD, projection.weight_EO)
            return
        # The product, and the sum of base and adapter, are rounded before they are added, as in the trainer.
        if is_plain and self.is_exact:
            projected_ME = product(x_MD, projection.weight_EO)
            self.adapters.add(projection.name, projected_ME, x_MD, adapters)
        else:
            projected_ME = self._projected(x_MD, projection, ops, adapters)
        self._add_result(stream, projected_ME, norm, ops)

    def _add_result(self, stream: _ResidualStream, result_ME: Tensor, norm: Norm | None, ops: Ops) -> None:
        if norm is not None:
            result_ME = ops.norm(result_ME, norm)
        if self.recipe.residual_scale != 1.0:
            result_ME.mul_(self.recipe.residual_scale)
        stream.add(result_ME)

    def _logits(self, hidden_NE: Tensor, ops: Ops, adapters: AdapterRows | None) -> Tensor:
        normed_NE = ops.norm(hidden_NE, self._last_norm)
        logits_NV = float32_logits(normed_NE, self._head_VE)
        self.adapters.add(HEAD, logits_NV, normed_NE, adapters)
        return self.recipe.logits.applied(logits_NV)


def relative_error(forward: SlotModel, model: nn.Module, *, seed: int = 0) -> float:
    """The largest error of prefill, continued prefill and a decode step of two rows of different lengths: root mean square
    difference from the module's logits, divided by their standard deviation."""
    generator = torch.Generator().manual_seed(seed)
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
        slots.before_decode([0, 1])
        logits_2V = forward.decode(tokens_1T[0, positions_2], positions_2, slots, rows=[0, 1], length=count + 1).float()
        errors += list((logits_2V - expected_TV[positions_2]).square().mean(dim=-1).sqrt())
        # torch's maximum, not Python's, because it returns NaN if any error is NaN.
        return float(torch.stack(errors).amax()) / deviation


def _gated(result_MD: Tensor, gates_MD: Tensor | None) -> Tensor:
    return result_MD if gates_MD is None else result_MD.mul_(gates_MD.sigmoid())


def _continued(fused_MX: Tensor, layer: _Layer, inputs: PrefillInput, slots: SlotCache) -> Tensor:
    """The results of the gated delta part for the tokens of a prefill, from the states of their rows or from the start."""
    assert layer.delta is not None, "a layer has attention, or a gated delta part"
    rows_N = inputs.rows_N
    held = slots.states.layers[layer.place]
    before, memory = (
        states.new_zeros(len(rows_N), *states.shape[1:]) if inputs.is_fresh else states[rows_N] for states in held
    )
    fused_NCX = fused_MX.view(*inputs.tokens_NC.shape, -1)
    result_NCD, *after = layer.delta.chunked(fused_NCX, before, memory, inputs.lasts_N + 1)
    for states, new in zip(held, after, strict=True):
        states[rows_N] = new
    return result_NCD.flatten(0, 1)


def _advanced(fused_NX: Tensor, layer: _Layer, slots: SlotCache, ops: TorchOps) -> Tensor:
    """The same for one token in each of the first rows."""
    assert layer.delta is not None, "a layer has attention, or a gated delta part"
    count = len(fused_NX)
    before, memory = slots.states.layers[layer.place]
    return ops.delta_step(fused_NX, layer.delta, before[:count], memory[:count], slots.states.is_decoding_S[:count])


def _layer_of(at: int, layer: Any, recipe: ModelRecipe, groups: dict[str, Sequence[str]]) -> _Layer:
    """Fuses projections of the same input. `groups` gets the names of those that are fused."""
    name, experts, delta = f"model.layers.{at}", recipe.experts[at], recipe.delta[at]
    norms = {place: Norm.of(norm) for place, norm in layer_norms(layer).items()}
    if delta is None:
        mixing, mixer = f"{name}.self_attn", layer.self_attn
        fused = _fused(mixing, "qkv", mixer, QUERY_PARTS, groups)
        out = "o_proj"
    else:
        mixing, mixer = f"{name}.{DELTA}", getattr(layer, DELTA)
        fused = _fused(mixing, "in", mixer, GROUPED_DELTA_PARTS if delta.is_grouped else DELTA_PARTS, groups)
        out = "out_proj"
    block_name, block = feed_forward_of(layer)
    feeding = f"{name}.{block_name}"
    mlp = mixture = None
    if experts is None:
        mlp = _feed_forward(feeding, block, groups, norms.get("after_mlp"))
    else:
        if (shared := shared_of(block)) is not None:
            mlp = _feed_forward(f"{feeding}.{shared[0]}", shared[1], groups)
        gate = _projection(feeding, SHARED_GATE, block) if hasattr(block, SHARED_GATE) else None
        mixture = _Mixture(experts=experts, shared_gate=gate, norm=norms.get("after_mlp"))
    return _Layer(
        attention=recipe.attention[at],
        delta=delta,
        place=sum((other is None) == (delta is None) for other in recipe.delta[:at]),
        fused=fused,
        out=_projection(mixing, out, mixer, norms.get("after_attention")),
        mlp=mlp,
        mixture=mixture,
        before_attention=norms.get("before_attention"),
        before_mlp=norms.get("before_mlp"),
    )


def _feed_forward(name: str, module: Any, groups: dict[str, Sequence[str]], norm: Norm | None = None) -> _FeedForward:
    return _FeedForward(
        gate_up=_fused(name, "gate_up", module, GATE_PARTS, groups), down=_projection(name, "down_proj", module, norm)
    )


def _projection(owner: str, name: str, module: Any, norm: Norm | None = None) -> _Projection:
    layer = getattr(module, name)
    return _Projection.of(f"{owner}.{name}", layer.weight, layer.bias, norm)


def _fused(owner: str, name: str, module: Any, names: Sequence[str], groups: dict[str, Sequence[str]]) -> _Projection:
    """One weight (and bias) for several projections of the same input; their weights are views into it."""
    found = [part for part in (f"{name}_proj", *names) if hasattr(module, part)]
    if found == [f"{name}_proj"]:
        return _projection(owner, f"{name}_proj", module)
    groups[f"{owner}.{name}"] = [f"{owner}.{part}" for part in found]
    parts = [getattr(module, part) for part in found]
    weight = _joined([part.weight for part in parts])
    bias = None if parts[0].bias is None else _joined([part.bias for part in parts])
    return _Projection.of(f"{owner}.{name}", weight, bias)


def _joined(parts: list[nn.Parameter]) -> Tensor:
    """Without a copy, if they are next to each other in memory already. Otherwise they become views into one copy."""
    ends = [part.data_ptr() + part.nbytes for part in parts]
    is_one = len({part.untyped_storage().data_ptr() for part in parts}) == 1 and all(p.is_contiguous() for p in parts)
    if is_one and [part.data_ptr() for part in parts[1:]] == ends[:-1]:
        first = parts[0].data
        return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
    whole = torch.cat([part.data for part in parts])
    for part, rows in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
        part.data = rows
    return whole
