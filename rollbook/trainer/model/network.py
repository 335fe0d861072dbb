"""The policy network: token ids in, log-probabilities of chosen tokens out. It can be sharded as one module.

Probes with a few tokens at load time find out whether sequences can be packed, and how the logits are computed from the last hidden
state. So there is no list of supported model families.
"""

import math
import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from rollbook.numerics import operations
from rollbook.numerics.experts import INEXACT, is_mixture
from rollbook.numerics.module_parts import Activation, UnsupportedModelError, activation_of
from rollbook.numerics.recipe import STATE_CACHE, Logits, ModelRecipe, Norm, short_windows, windows_of
from rollbook.trainer.data.prefixes import prefix_tree
from rollbook.trainer.model.gather import Gather
from rollbook.trainer.model.packed_attention import HAS_VARLEN, Packing
from rollbook.trainer.model.packed_attention import NAME as PACKED_ATTENTION
from rollbook.trainer.model.packed_delta import convolution_width, use_module_delta, use_packed_delta
from rollbook.trainer.model.token_head import gathered_targets, token_head

PROBE = (7, 6, 5)
SHARED = (0, 4, 0)
"""Lengths of the probe's sequences, and how many tokens each shares with the one before."""
PROBED_WINDOW, PROBED_LENGTH = 3, 8
CLOSE = 1e-4


class PolicyNetwork(nn.Module):
    """A Hugging Face causal LM that returns log-probabilities of chosen tokens."""

    def __init__(
        self, language_model: Any, *, max_logits_bytes: int, logits: Logits | None, is_exact: bool = False
    ) -> None:
        """`logits`: see `logits_of`. `is_exact`: logprobs have the bits of the sampler; see `make_exact`."""
        super().__init__()
        self._is_exact = is_exact
        self.language_model: Any = language_model
        self._max_logits_bytes = max_logits_bytes
        self._logits = logits

    # B rows of T inputs (one row of all where they are packed), N positions to predict from, H hidden width, V vocabulary
    def forward(
        self,
        inputs_BT: Tensor,
        packing: Packing | None,
        *,
        predictions: Gather,
        targets_N: Tensor,
        temperatures_N: Tensor | None,
        is_entropy_trained: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each target at its temperature, and the entropy of its distribution.

        `predictions` selects the N positions; sequences that share tokens may predict several targets from one position. No
        attention mask is needed: padding comes after all tokens that are read.
        """
        with operations.unsplit_products() if self._is_exact else nullcontext():
            return self._forward(
                inputs_BT,
                packing,
                predictions=predictions,
                targets_N=targets_N,
                temperatures_N=temperatures_N,
                is_entropy_trained=is_entropy_trained,
            )

    def _forward(
        self,
        inputs_BT: Tensor,
        packing: Packing | None,
        *,
        predictions: Gather,
        targets_N: Tensor,
        temperatures_N: Tensor | None,
        is_entropy_trained: bool,
    ) -> tuple[Tensor, Tensor]:
        inputs: dict[str, Any] = {"input_ids": inputs_BT, "use_cache": False}
        if packing is not None:
            inputs |= {"position_ids": packing.positions_T.unsqueeze(0), "packing": packing}
        if self._logits is not None:
            hidden_BTH: Tensor = _body(self.language_model)(**inputs).last_hidden_state
            head = self.language_model.get_output_embeddings()
            return token_head(
                predictions(hidden_BTH.flatten(0, 1)).to(head.weight.dtype),  # Mamba's last norm returns float32
                head.weight,
                head.bias,
                targets_N,
                temperatures_N,
                max_bytes=self._max_logits_bytes,
                is_entropy_trained=is_entropy_trained,
                is_exact=self._is_exact,
                logits=self._logits,
            )
        logits_BTV: Tensor = self.language_model(**inputs).logits
        logits_NV = predictions(logits_BTV.flatten(0, 1)).float()
        if temperatures_N is not None:
            logits_NV = logits_NV / temperatures_N.unsqueeze(-1)
        logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
        with torch.set_grad_enabled(is_entropy_trained and torch.is_grad_enabled()):
            entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1)
        return gathered_targets(logprobs_NV, targets_N), entropy_N


@torch.no_grad()
def logits_of(language_model: Any) -> Logits | None:
    """What the model does to the product of the last hidden state and the output embedding. None if it is something else."""
    head = language_model.get_output_embeddings()
    if type(head) is not nn.Linear or _body(language_model) is _inner(language_model):
        return None
    ids_BT = _probe_ids(language_model)[:1]
    hidden_BTH = _body(language_model)(input_ids=ids_BT, use_cache=False).last_hidden_state
    logits = Logits.of(language_model.config.get_text_config())
    expected_BTV = language_model(input_ids=ids_BT, use_cache=False).logits
    return logits if _is_close(logits.applied(head(hidden_BTH)), expected_BTV) else None


@torch.no_grad()
def make_packable(language_model: Any) -> bool:
    """Switch the model to packed attention. False, with the model unchanged, where that gives other numbers."""
    windows = attention_windows(language_model)
    if windows is None:
        return False
    before = language_model.config._attn_implementation
    sequences, indices = prefix_tree(PROBE, SHARED)
    ids_1T = _probe_ids(language_model)[:, : sequences.num_computed]
    packing = Packing.of(sequences, ids_1T.device, convolution=convolution_width(language_model))
    with short_windows(language_model, PROBED_WINDOW) if any(windows) else nullcontext():
        alone = [language_model(input_ids=ids_1T[:, index], use_cache=False).logits[0] for index in indices]
        try:
            use_packed(language_model)
            together = language_model(
                input_ids=ids_1T, position_ids=packing.positions_T.unsqueeze(0), packing=packing, use_cache=False
            ).logits[0]
            if all(_is_close(together[index], expected) for index, expected in zip(indices, alone, strict=True)):
                return True
        except (TypeError, ValueError, AttributeError, UnsupportedModelError):
            # Its layers do not forward unknown arguments, or need attention features that packing does not support.
            pass
    language_model.set_attn_implementation(before)
    use_module_delta(language_model)
    return False


def use_packed(language_model: Any) -> None:
    """Compute packed rows, see `make_packable`."""
    use_packed_delta(language_model)
    language_model.set_attn_implementation(PACKED_ATTENTION)


def attention_windows(language_model: Any) -> list[int | None] | None:
    """The window of each layer, None for full attention or a gated delta layer. None if layers have chunks, sparse attention or
    another recurrent state: a probe of a few tokens would not detect them."""
    config = language_model.config.get_text_config()
    states = {STATE_CACHE} if convolution_width(language_model) else set()
    return windows_of(config, DynamicCache(config=config).layers, others=states)


def _body(language_model: Any) -> Any:
    """The model without its output embedding; the model itself where transformers does not know its body."""
    return _inner(language_model).base_model


def _inner(language_model: Any) -> Any:
    """PEFT wraps the model one level deeper."""
    return language_model.get_base_model() if hasattr(language_model, "get_base_model") else language_model


def _probe_ids(language_model: Any) -> Tensor:
    embedding = language_model.get_input_embeddings().weight
    ids_T: Tensor = torch.arange(sum(PROBE), device=embedding.device) * 7919 % embedding.shape[0]
    return ids_T.unsqueeze(0)


def _is_close(found: Tensor, expected: Tensor) -> bool:
    # Relative to the usual size of a logit: initial logits may all be tiny.
    scale = float(expected.float().std()) + 1e-12
    return float((found.float() - expected.float()).abs().max()) <= CLOSE * scale * 10


def fuse_norms(model: nn.Module) -> int:
    """Replace every RMS norm by PyTorch's fused kernel, where a probe shows that it computes the same. Returns how many.

    Written out in Python operations, as models have it, a norm makes nine passes over memory: a third of the step of a small model.
    """
    count = 0
    for part in model.modules():
        with suppress(UnsupportedModelError):
            if type(part).__name__.endswith("RMSNorm"):
                norm = Norm.of(part)
                part.forward = MethodType(partial(_fused_rms_norm, norm), part)
                count += 1
    return count


def why_not_exact(model: Any, *, logits: Logits | None) -> str | None:
    """Why the logprobs of a packed model cannot have the bits of the sampler; None if they can."""
    if (reason := operations.why_not_here()) is not None:
        return reason
    if not HAS_VARLEN:
        return "this version of PyTorch has no attention for sequences of different lengths"
    if logits is None or model.get_output_embeddings().bias is not None:
        return "its logits are not computed from a plain product"
    inner = _inner(model)
    # Before the recipe is read, which calls experts with weights as the sampler has them.
    if any(map(is_mixture, inner.modules())):
        return INEXACT
    try:
        recipe = _short_recipe(inner)
    except UnsupportedModelError as unsupported:
        return f"the fast forward of the sampler does not support it: {unsupported}"
    if recipe.inexact_because is not None:
        return recipe.inexact_because
    # PEFT's layers have the scale of each adapter by name.
    scalings = [part.scaling for part in model.modules() if isinstance(getattr(part, "scaling", None), dict)]
    scales = {scale for by_name in scalings for scale in by_name.values()}
    if any(math.frexp(scale)[0] != 0.5 for scale in scales):
        return "alpha / rank of its adapters is not a power of two"
    return None


def _short_recipe(model: Any) -> ModelRecipe:
    caches = DynamicCache(config=model.config.get_text_config()).layers
    return ModelRecipe.of(model, max_model_len=PROBED_LENGTH, caches=caches)


def make_exact(model: Any) -> None:
    """Compute norms and gates with the kernels of the sampler, and rotations in one kernel with the same bits as in ten."""
    body = _inner(model).model
    _fuse_rotations(_inner(model))
    for part in body.modules():
        if type(part).__name__.endswith("RMSNorm"):
            part.forward = MethodType(partial(_exact_rms_norm, Norm.of(part)), part)
    for layer in body.layers:
        layer.mlp.forward = MethodType(partial(_exact_mlp, activation_of(layer.mlp)), layer.mlp)


def _fuse_rotations(model: Any) -> None:
    """Layers call the rotation as a function of their family, so it is replaced there: other models of this process get it too."""
    recipe = _short_recipe(model)
    embedding = model.get_input_embeddings().weight
    rotaries = [attention.rotary for attention in recipe.attention if attention is not None and attention.rotary]
    if any(rotary.is_paired or rotary.cosines_TF.dtype != embedding.dtype for rotary in rotaries):
        return
    families: set[Any] = {sys.modules[type(layer.self_attn).__module__] for layer in model.model.layers}
    for family in families:
        if not isinstance(family.apply_rotary_pos_emb, _FusedRotation):
            family.apply_rotary_pos_emb = _FusedRotation(family.apply_rotary_pos_emb, embedding.device.type)


@dataclass(frozen=True, slots=True)
class _FusedRotation:
    plain: Any
    """What it replaces, and what it calls for other devices, dtypes and batches."""
    device: str

    def __call__(self, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor, *args: Any, **options: Any) -> Any:
        is_like_packed = len(query) == 1 and query.dtype == cosines.dtype and not args and not options
        if not is_like_packed or query.device.type != self.device:
            return self.plain(query, key, cosines, sines, *args, **options)
        return tuple(operations.rotated(heads, cosines, sines) for heads in (query, key))


def _exact_rms_norm(norm: Norm, module: Any, hidden_states: Tensor) -> Tensor:
    return operations.rms_norm(hidden_states, replace(norm, weight_E=module.weight))


def _exact_mlp(activation: Activation, mlp: Any, x: Tensor) -> Tensor:
    if hasattr(mlp, "gate_up_proj"):
        gates, ups = mlp.gate_up_proj(x).chunk(2, dim=-1)
    else:
        gates, ups = mlp.gate_proj(x), mlp.up_proj(x)
    projected: Tensor = mlp.down_proj(operations.gate(gates, ups, activation))
    return projected


def _fused_rms_norm(norm: Norm, module: Any, hidden_states: Tensor) -> Tensor:
    return replace(norm, weight_E=module.weight)(hidden_states)
