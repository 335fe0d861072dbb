"""Log-probabilities and entropies from hidden states, without holding the logits of all tokens at once.

Logits are computed in chunks of at most `rows` tokens, discarded, and recomputed in the backward pass. With a vocabulary of 150,000
the logits of a token take 600 kB: a pass of 16,000 tokens would need 10 GB for them, and as much again for their gradient.
"""

from typing import Any

import torch
from torch import Tensor


# N tokens, H hidden width, V vocabulary, C tokens of a chunk
class _TokenHead(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  # torch passes positional arguments only
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperatures_N: Tensor | None,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        count = len(targets_N)
        logprobs_N = torch.empty(count, dtype=torch.float32, device=hidden_NH.device)
        entropy_N = torch.empty_like(logprobs_N)
        for start in range(0, count, rows):
            chunk = slice(start, min(start + rows, count))
            log_probs_CV = _log_probs(hidden_NH[chunk], weight_VH, bias_V, _chunk_of(temperatures_N, chunk))
            logprobs_N[chunk] = log_probs_CV.gather(-1, targets_N[chunk].unsqueeze(-1)).squeeze(-1)
            # A batched dot product: the sum of p * log p without another C x V tensor.
            probs_CV = torch.exp(log_probs_CV)
            entropy_N[chunk] = -torch.bmm(probs_CV.unsqueeze(1), log_probs_CV.unsqueeze(2)).flatten()
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, temperatures_N, entropy_N)
        ctx.rows = rows
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_logprobs_N: Tensor | None, grad_entropy_N: Tensor | None) -> Any:
        hidden_NH, weight_VH, bias_V, targets_N, temperatures_N, entropy_N = ctx.saved_tensors
        grad_hidden_NH = torch.empty_like(hidden_NH)
        grad_weight_VH = None
        if ctx.needs_input_grad[1]:
            # In float32 also for bfloat16 weights: small chunks added to a large sum would be rounded away.
            grad_weight_VH = torch.zeros(weight_VH.shape, dtype=torch.float32, device=weight_VH.device)
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        for start in range(0, len(targets_N), ctx.rows):
            chunk = slice(start, min(start + ctx.rows, len(targets_N)))
            temperatures_C = _chunk_of(temperatures_N, chunk)
            grad_CV = _grad_logits(
                _log_probs(hidden_NH[chunk], weight_VH, bias_V, temperatures_C),
                targets_N[chunk],
                _chunk_of(grad_logprobs_N, chunk),
                _chunk_of(grad_entropy_N, chunk),
                entropy_N[chunk],
            )
            if temperatures_C is not None:
                grad_CV.div_(temperatures_C.unsqueeze(-1))
            narrow_CV = grad_CV.to(weight_VH.dtype)
            grad_hidden_NH[chunk] = narrow_CV @ weight_VH
            if grad_weight_VH is not None and weight_VH.dtype == torch.float32:
                grad_weight_VH.addmm_(narrow_CV.t(), hidden_NH[chunk])
            elif grad_weight_VH is not None:
                grad_weight_VH.add_(narrow_CV.t() @ hidden_NH[chunk])
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
    temperatures_N: Tensor | None,
    *,
    max_bytes: int,
    is_entropy_trained: bool,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target at its temperature (None: 1), and the entropy of its distribution.

    The entropy has a gradient only with `is_entropy_trained`.
    """
    rows = max(1, max_bytes // (4 * weight_VH.shape[0]))
    logprobs_N, entropy_N = _TokenHead.apply(hidden_NH, weight_VH, bias_V, targets_N, temperatures_N, rows)  # type: ignore[no-untyped-call]
    return logprobs_N, entropy_N if is_entropy_trained else entropy_N.detach()


def _chunk_of(values_N: Tensor | None, chunk: slice) -> Tensor | None:
    return None if values_N is None else values_N[chunk]


def _log_probs(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperatures_C: Tensor | None) -> Tensor:
    logits_CV = torch.nn.functional.linear(hidden_CH, weight_VH, bias_V)
    if temperatures_C is not None:
        logits_CV = logits_CV.float().div_(temperatures_C.unsqueeze(-1))
    # Cast inside the kernel: it reads bfloat16 logits and writes float32 in one pass.
    return torch.log_softmax(logits_CV, dim=-1, dtype=torch.float32)


def _grad_logits(
    log_probs_CV: Tensor,
    targets_C: Tensor,
    grad_logprobs_C: Tensor | None,
    grad_entropy_C: Tensor | None,
    entropy_C: Tensor,
) -> Tensor:
    """The gradient of the logits, mostly in place: d log p(target) = onehot - p, dH = -p * (log p + H)."""
    probs_CV = torch.exp(log_probs_CV)
    if grad_entropy_C is None and grad_logprobs_C is None:
        return probs_CV.zero_()
    if grad_entropy_C is None:
        factor_CV: Tensor = -grad_logprobs_C.unsqueeze(-1)  # type: ignore[union-attr]  # one of them is not None
    else:
        factor_CV = log_probs_CV.add_(entropy_C.unsqueeze(-1)).mul_(-grad_entropy_C.unsqueeze(-1))
        if grad_logprobs_C is not None:
            factor_CV.sub_(grad_logprobs_C.unsqueeze(-1))
    grad_CV = probs_CV.mul_(factor_CV)
    if grad_logprobs_C is not None:
        grad_CV.scatter_add_(-1, targets_C.unsqueeze(-1), grad_logprobs_C.unsqueeze(-1))
    return grad_CV
