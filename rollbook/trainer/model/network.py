"""The model as one module from token ids to log-probabilities: what is computed in a pass, whole or sharded.

Whether sequences can be packed, and whether logits are the output embedding of the last hidden state and nothing else, is found out
by trying, on a few tokens, when the model is loaded: no list of families to keep.
"""

from typing import Any

import torch
from torch import Tensor, nn

from rollbook.trainer.model.packed_attention import NAME as PACKED_ATTENTION
from rollbook.trainer.model.packed_attention import Packing
from rollbook.trainer.model.token_head import token_head

PROBE = (5, 3, 7)
"""Lengths of the sequences that are tried."""
CLOSE = 1e-4


class PolicyNetwork(nn.Module):
    """A Hugging Face causal LM that answers with log-probabilities of chosen tokens."""

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
        predicted_at_N: Tensor,
        targets_N: Tensor,
        temperatures_N: Tensor | None,
        is_entropy_trained: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each target at its own temperature, and the entropy where it was predicted.

        No attention mask is needed: what pads a row stands behind everything that is read from it.
        """
        asked: dict[str, Any] = {"input_ids": inputs_BT, "use_cache": False}
        if packing is not None:
            asked |= {"position_ids": packing.positions_T.unsqueeze(0), "packing": packing}
        if self._has_plain_head:
            hidden_BTH: Tensor = _body(self.language_model)(**asked).last_hidden_state
            head = self.language_model.get_output_embeddings()
            return token_head(
                hidden_BTH.flatten(0, 1).index_select(0, predicted_at_N),
                head.weight,
                head.bias,
                targets_N,
                temperatures_N,
                max_bytes=self._max_logits_bytes,
                is_entropy_trained=is_entropy_trained,
            )
        logits_BTV: Tensor = self.language_model(**asked).logits
        logits_NV = logits_BTV.flatten(0, 1).index_select(0, predicted_at_N).float()
        if temperatures_N is not None:
            logits_NV = logits_NV / temperatures_N.unsqueeze(-1)
        logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
        with torch.set_grad_enabled(is_entropy_trained and torch.is_grad_enabled()):
            entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1)
        return logprobs_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1), entropy_N


@torch.no_grad()
def has_plain_head(language_model: Any) -> bool:
    """Whether the logits are a linear map of the last hidden state: no scaling, no soft cap, no adapter on it."""
    head = language_model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return False
    ids_BT = _probe_ids(language_model)[:1]
    hidden_BTH = _body(language_model)(input_ids=ids_BT, use_cache=False).last_hidden_state
    return _is_close(head(hidden_BTH), language_model(input_ids=ids_BT, use_cache=False).logits)


@torch.no_grad()
def make_packable(language_model: Any) -> bool:
    """Have the model use our attention. False, with the model as it was, where it then computes something else."""
    if not _attends_to_everything(language_model.config):
        return False
    before = language_model.config._attn_implementation
    ids_1T = _probe_ids(language_model)
    alone = [
        language_model(input_ids=piece, use_cache=False).logits[0] for piece in torch.split(ids_1T, list(PROBE), dim=1)
    ]
    packing = Packing.of(PROBE, ids_1T.device)
    try:
        language_model.set_attn_implementation(PACKED_ATTENTION)
        together = language_model(
            input_ids=ids_1T, position_ids=packing.positions_T.unsqueeze(0), packing=packing, use_cache=False
        ).logits[0]
        if _is_close(together, torch.cat(alone)):
            return True
    except (TypeError, ValueError, AttributeError):
        # Its layers do not hand on what they do not know, or ask of attention what a packed row cannot have.
        pass
    language_model.set_attn_implementation(before)
    return False


def _attends_to_everything(config: Any) -> bool:
    """No window over the last tokens, which a few tokens would not show."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    is_windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return kinds == {"full_attention"} and (not is_windowed or hasattr(config, "layer_types"))


def _body(language_model: Any) -> Any:
    """Everything below the output embedding; adapters keep theirs one level further in."""
    inner = language_model.get_base_model() if hasattr(language_model, "get_base_model") else language_model
    return inner.base_model


def _probe_ids(language_model: Any) -> Tensor:
    embedding = language_model.get_input_embeddings().weight
    ids_T: Tensor = torch.arange(sum(PROBE), device=embedding.device) * 7919 % embedding.shape[0]
    return ids_T.unsqueeze(0)


def _is_close(found: Tensor, expected: Tensor) -> bool:
    # Of the usual size of a logit: initial ones may all be tiny.
    scale = float(expected.float().std()) + 1e-12
    return float((found.float() - expected.float()).abs().max()) <= CLOSE * scale * 10
