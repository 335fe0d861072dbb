"""The policy network: token ids in, log-probabilities of chosen tokens out. It can be sharded as one module.

Probes with a few tokens at load time find out whether sequences can be packed, and whether the logits are a plain linear map of the
last hidden state. So there is no list of supported model families.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from rollbook.trainer.data.prefixes import prefix_tree
from rollbook.trainer.model.gather import Gather
from rollbook.trainer.model.packed_attention import NAME as PACKED_ATTENTION
from rollbook.trainer.model.packed_attention import Packing
from rollbook.trainer.model.token_head import token_head

PROBE = (7, 6, 5)
SHARED = (0, 4, 0)
"""Lengths of the probe's sequences, and how many tokens each shares with the one before."""
CLOSE = 1e-4


class PolicyNetwork(nn.Module):
    """A Hugging Face causal LM that returns log-probabilities of chosen tokens."""

    def __init__(self, language_model: Any, *, max_logits_bytes: int, has_plain_head: bool) -> None:
        super().__init__()
        self.language_model: Any = language_model
        self._max_logits_bytes = max_logits_bytes
        self._has_plain_head = has_plain_head

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
        inputs: dict[str, Any] = {"input_ids": inputs_BT, "use_cache": False}
        if packing is not None:
            inputs |= {"position_ids": packing.positions_T.unsqueeze(0), "packing": packing}
        if self._has_plain_head:
            hidden_BTH: Tensor = _body(self.language_model)(**inputs).last_hidden_state
            head = self.language_model.get_output_embeddings()
            return token_head(
                predictions(hidden_BTH.flatten(0, 1)),
                head.weight,
                head.bias,
                targets_N,
                temperatures_N,
                max_bytes=self._max_logits_bytes,
                is_entropy_trained=is_entropy_trained,
            )
        logits_BTV: Tensor = self.language_model(**inputs).logits
        logits_NV = predictions(logits_BTV.flatten(0, 1)).float()
        if temperatures_N is not None:
            logits_NV = logits_NV / temperatures_N.unsqueeze(-1)
        logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
        with torch.set_grad_enabled(is_entropy_trained and torch.is_grad_enabled()):
            entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1)
        return logprobs_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1), entropy_N


@torch.no_grad()
def has_plain_head(language_model: Any) -> bool:
    """Whether the logits are a linear map of the last hidden state: no scaling, no soft cap, no adapter."""
    head = language_model.get_output_embeddings()
    if type(head) is not nn.Linear or _body(language_model) is _inner(language_model):
        return False
    ids_BT = _probe_ids(language_model)[:1]
    hidden_BTH = _body(language_model)(input_ids=ids_BT, use_cache=False).last_hidden_state
    return _is_close(head(hidden_BTH), language_model(input_ids=ids_BT, use_cache=False).logits)


@torch.no_grad()
def make_packable(language_model: Any) -> bool:
    """Switch the model to packed attention. False, with the model unchanged, where that gives other numbers."""
    if not _has_full_attention(language_model.config.get_text_config()):
        return False
    before = language_model.config._attn_implementation
    sequences, indices = prefix_tree(PROBE, SHARED)
    ids_1T = _probe_ids(language_model)[:, : sequences.num_computed]
    alone = [language_model(input_ids=ids_1T[:, index], use_cache=False).logits[0] for index in indices]
    packing = Packing.of(sequences, ids_1T.device)
    try:
        language_model.set_attn_implementation(PACKED_ATTENTION)
        together = language_model(
            input_ids=ids_1T, position_ids=packing.positions_T.unsqueeze(0), packing=packing, use_cache=False
        ).logits[0]
        if all(_is_close(together[index], expected) for index, expected in zip(indices, alone, strict=True)):
            return True
    except (TypeError, ValueError, AttributeError):
        # Its layers do not forward unknown arguments, or need attention features that packing does not support.
        pass
    language_model.set_attn_implementation(before)
    return False


def _has_full_attention(config: Any) -> bool:
    """No window, chunk or sparse attention, which a probe of a few tokens would not detect, and no recurrent state."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


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
    norms: list[Any] = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    fusable = [norm for norm in norms if hasattr(norm, "variance_epsilon") and _is_plain_rms_norm(norm)]
    for norm in fusable:
        norm.forward = MethodType(_fused_rms_norm, norm)
    return len(fusable)


def _fused_rms_norm(norm: Any, hidden_states: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(hidden_states, norm.weight.shape, norm.weight, norm.variance_epsilon)


@torch.no_grad()
def _is_plain_rms_norm(norm: Any) -> bool:
    probe = torch.linspace(-2, 3, 3 * norm.weight.shape[-1], device=norm.weight.device).view(3, -1)
    original = norm.weight.data
    # Compare in float32 whatever the weights' dtype: the question is which formula it is.
    norm.weight.data = original.float() + 0.25
    try:
        return torch.allclose(norm(probe), _fused_rms_norm(norm, probe), rtol=1e-5, atol=1e-5)
    finally:
        norm.weight.data = original
