"""From hidden states to the log-probabilities of tokens and their entropy, never holding logits of all tokens at once.

Logits are made in pieces of at most `rows` tokens and thrown away; the backward pass makes them again. For a vocabulary of 150,000
a token's logits are 600 kB: a pass of 16,000 tokens would need 10 GB for them, and as much again for their gradient.
"""

from typing import Any

import torch
from torch import Tensor


# N tokens, H hidden width, V vocabulary, C tokens of a piece
class _TokenHead(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  # torch hands over positional arguments only
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperatures_N: Tensor,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        count = len(targets_N)
        logprobs_N = torch.empty(count, dtype=torch.float32, device=hidden_NH.device)
        entropy_N = torch.empty_like(logprobs_N)
        normalisers_N = torch.empty_like(logprobs_N)
        for start in range(0, count, rows):
            piece = slice(start, min(start + rows, count))
            logits_CV = _logits(hidden_NH[piece], weight_VH, bias_V, temperatures_N[piece])
            normaliser_C = torch.logsumexp(logits_CV, dim=-1)
            chosen_C = logits_CV.gather(-1, targets_N[piece].unsqueeze(-1)).squeeze(-1)
            logprobs_N[piece] = chosen_C - normaliser_C
            # H = log Z - sum p * logit, with p made in place of nothing that is still needed
            probs_CV = torch.exp(logits_CV - normaliser_C.unsqueeze(-1))
            entropy_N[piece] = normaliser_C - probs_CV.mul_(logits_CV).sum(dim=-1)
            normalisers_N[piece] = normaliser_C
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, temperatures_N, normalisers_N, entropy_N)
        ctx.rows = rows
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_logprobs_N: Tensor | None, grad_entropy_N: Tensor | None) -> Any:
        hidden_NH, weight_VH, bias_V, targets_N, temperatures_N, normalisers_N, entropy_N = ctx.saved_tensors
        grad_hidden_NH = torch.empty_like(hidden_NH)
        grad_weight_VH = None
        if ctx.needs_input_grad[1]:
            # In float32 however narrow the weights: small pieces added to a large sum would round away.
            grad_weight_VH = torch.zeros(weight_VH.shape, dtype=torch.float32, device=weight_VH.device)
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        for start in range(0, len(targets_N), ctx.rows):
            piece = slice(start, min(start + ctx.rows, len(targets_N)))
            logits_CV = _logits(hidden_NH[piece], weight_VH, bias_V, temperatures_N[piece])
            log_probs_CV = logits_CV.sub_(normalisers_N[piece].unsqueeze(-1))
            probs_CV = torch.exp(log_probs_CV)
            grad_CV = torch.zeros_like(probs_CV)
            if grad_logprobs_N is not None:
                grad_C1 = grad_logprobs_N[piece].unsqueeze(-1)
                grad_CV.sub_(probs_CV * grad_C1)
                grad_CV.scatter_add_(-1, targets_N[piece].unsqueeze(-1), grad_C1)
            if grad_entropy_N is not None:
                # dH/dlogit = -p * (log p + H)
                spread_CV = log_probs_CV.add_(entropy_N[piece].unsqueeze(-1)).mul_(probs_CV)
                grad_CV.sub_(spread_CV * grad_entropy_N[piece].unsqueeze(-1))
            grad_CV.div_(temperatures_N[piece].unsqueeze(-1))
            narrow_CV = grad_CV.to(weight_VH.dtype)
            grad_hidden_NH[piece] = narrow_CV @ weight_VH
            if grad_weight_VH is not None and weight_VH.dtype == torch.float32:
                grad_weight_VH.addmm_(narrow_CV.t(), hidden_NH[piece])
            elif grad_weight_VH is not None:
                grad_weight_VH.add_(narrow_CV.t() @ hidden_NH[piece])
            if grad_bias_V is not None:
                grad_bias_V.add_(grad_CV.sum(dim=0))
        grad_weight = None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype)
        grad_bias = None if grad_bias_V is None or bias_V is None else grad_bias_V.to(bias_V.dtype)
        return grad_hidden_NH, grad_weight, grad_bias, None, None, None


def token_head(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperatures_N: Tensor,
    *,
    max_bytes: int,
    is_entropy_trained: bool,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target at its own temperature, and the entropy where it was predicted.

    The entropy carries a gradient only if it is trained.
    """
    rows = max(1, max_bytes // (4 * weight_VH.shape[0]))
    logprobs_N, entropy_N = _TokenHead.apply(hidden_NH, weight_VH, bias_V, targets_N, temperatures_N, rows)  # type: ignore[no-untyped-call]
    return logprobs_N, entropy_N if is_entropy_trained else entropy_N.detach()


def _logits(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperatures_C: Tensor) -> Tensor:
    logits_CV = torch.nn.functional.linear(hidden_CH, weight_VH, bias_V).float()
    return logits_CV.div_(temperatures_C.unsqueeze(-1))
