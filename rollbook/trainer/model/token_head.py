"""Log-probabilities and entropies from hidden states, without holding the logits of all tokens at once.

Logits are computed in chunks of at most `rows` tokens, discarded, and recomputed in the backward pass. With a vocabulary of 150,000
the logits of a token take 600 kB: a pass of 16,000 tokens would need 10 GB for them, and as much again for their gradient.
"""

from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rollbook.numerics import operations
from rollbook.numerics.recipe import Logits

PLAIN = Logits()


# N tokens, H hidden width, V vocabulary, C tokens of a chunk. Targets may have a second dimension: several for each token.
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
        is_exact: bool,
        logits: Logits,
    ) -> tuple[Tensor, Tensor]:
        values_of = _exact_values if is_exact else _for_device(_chunk_values, is_cuda=hidden_NH.is_cuda)
        chunks = [
            values_of(
                _chunk_of(hidden_NH, chunk),
                weight_VH,
                bias_V,
                _chunk_of(targets_N, chunk),
                _chunk_of(temperatures_N, chunk),
                logits,
            )
            for chunk in _chunks(len(targets_N), rows)
        ]
        logprobs_N, entropy_N, normaliser_N = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, temperatures_N, entropy_N, normaliser_N)
        ctx.rows, ctx.logits = rows, logits
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_logprobs_N: Tensor | None, grad_entropy_N: Tensor | None) -> Any:
        hidden_NH, weight_VH, bias_V, targets_N, temperatures_N, entropy_N, normaliser_N = ctx.saved_tensors
        grad_of = _for_device(_chunk_grad, is_cuda=hidden_NH.is_cuda)
        grad_hidden_NH = torch.empty_like(hidden_NH)
        grad_weight_VH = None
        if ctx.needs_input_grad[1]:
            # In float32 even for bfloat16 weights: small chunks added to a large sum would be rounded away.
            grad_weight_VH = torch.zeros(weight_VH.shape, dtype=torch.float32, device=weight_VH.device)
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        for chunk in _chunks(len(targets_N), ctx.rows):
            grad_CV = grad_of(
                _chunk_of(hidden_NH, chunk),
                weight_VH,
                bias_V,
                _chunk_of(targets_N, chunk),
                _chunk_of(temperatures_N, chunk),
                _chunk_of(normaliser_N, chunk),
                _chunk_of(entropy_N, chunk),
                _chunk_of(grad_logprobs_N, chunk),
                _chunk_of(grad_entropy_N, chunk),
                ctx.logits,
            )
            grad_hidden_NH[chunk] = grad_CV @ weight_VH
            if grad_weight_VH is not None and weight_VH.dtype == torch.float32:
                grad_weight_VH.addmm_(grad_CV.t(), hidden_NH[chunk])
            elif grad_weight_VH is not None:
                grad_weight_VH.add_(grad_CV.t() @ hidden_NH[chunk])
            if grad_bias_V is not None:
                grad_bias_V.add_(grad_CV.sum(dim=0, dtype=torch.float32))
        grad_weight = None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype)
        grad_bias = None if grad_bias_V is None or bias_V is None else grad_bias_V.to(bias_V.dtype)
        return grad_hidden_NH, grad_weight, grad_bias, *(None for _ in range(5))


def token_head(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperatures_N: Tensor | None,
    *,
    max_bytes: int,
    is_entropy_trained: bool,
    is_exact: bool = False,
    logits: Logits = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target at its temperature (None: 1), and the entropy of its distribution.

    Several targets of a token that have a gradient must differ, except from the first one. The entropy has a gradient only with
    `is_entropy_trained`. `is_exact`: log-probabilities of the first targets have the bits of the sampler. `logits`: what the model
    does to the product of hidden states and weights.
    """
    rows = max(1, max_bytes // (4 * weight_VH.shape[0]))
    logprobs_N, entropy_N = _TokenHead.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        hidden_NH, weight_VH, bias_V, targets_N, temperatures_N, rows, is_exact, logits
    )
    return logprobs_N, entropy_N if is_entropy_trained else entropy_N.detach()


def _chunks(count: int, rows: int) -> list[slice]:
    """Slices of `rows` tokens. A single last token joins the slice before it: torch compiles a chunk of one token separately."""
    starts = list(range(0, count, rows))
    if len(starts) > 1 and rows > 1 and count % rows == 1:
        starts.pop()
    return [slice(start, stop) for start, stop in pairwise([*starts, count])]


def _chunk_of(values_N: Tensor | None, chunk: slice) -> Any:
    """Detached, because compiled code is only valid for one relation of a view's size to its base's size."""
    return None if values_N is None else values_N[chunk].detach()


@cache
def _for_device(function: Any, *, is_cuda: bool) -> Any:
    """On a GPU these functions only read and write memory; compiled into one kernel they touch the logits twice, not ten times."""
    return torch.compile(function, dynamic=True) if is_cuda else function


def _logits(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, logits: Logits) -> Tensor:
    if hidden_CH.is_cuda and hidden_CH.dtype in (torch.bfloat16, torch.float16):
        # In bfloat16, logits between 16 and 32 would be multiples of 0.125. The engine does the same.
        logits_CV = torch.mm(hidden_CH, weight_VH.t(), out_dtype=torch.float32)
        logits_CV = logits_CV if bias_V is None else logits_CV + bias_V
    else:
        logits_CV = torch.nn.functional.linear(hidden_CH, weight_VH, bias_V).float()
    return logits.applied(logits_CV)


def _cooled(logits_CV: Tensor, temperatures_C: Tensor | None) -> Tensor:
    return logits_CV if temperatures_C is None else logits_CV / temperatures_C.unsqueeze(-1)


def _chunk_values(  # noqa: PLR0917  # one call, in the order of the forward pass
    hidden_CH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_C: Tensor,
    temperatures_C: Tensor | None,
    logits: Logits,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the targets, entropies, and the logarithms of the sums that normalise the distributions."""
    logits_CV = _cooled(_logits(hidden_CH, weight_VH, bias_V, logits), temperatures_C)
    normaliser_C = torch.logsumexp(logits_CV, dim=-1)
    log_probs_CV = logits_CV - normaliser_C.unsqueeze(-1)
    return (
        gathered_targets(log_probs_CV, targets_C),
        -torch.linalg.vecdot(log_probs_CV.exp(), log_probs_CV),
        normaliser_C,
    )


def gathered_targets(values_NV: Tensor, targets_N: Tensor) -> Tensor:
    """The values of the targets, in the shape of the targets."""
    if targets_N.dim() == 2:
        return values_NV.gather(-1, targets_N)
    return values_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1)


def _exact_values(  # one call, in the order of the forward pass
    hidden_CH: Tensor,
    weight_VH: Tensor,
    _bias: Tensor | None,
    targets_C: Tensor,
    temperatures_C: Tensor | None,
    logits: Logits,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with the kernels of the sampler, which have no bias."""
    logits_CV = logits.applied(operations.float32_logits(hidden_CH, weight_VH))
    if temperatures_C is None:
        temperatures_C = torch.ones(len(targets_C), dtype=torch.float32, device=hidden_CH.device)
    firsts_C = targets_C if targets_C.dim() == 1 else targets_C[:, 0].contiguous()
    logprobs_C, entropy_C, normaliser_C = operations.token_logprobs(logits_CV, firsts_C, temperatures_C)
    if targets_C.dim() == 1:
        return logprobs_C, entropy_C, normaliser_C
    others = gathered_targets(logits_CV, targets_C[:, 1:]) / temperatures_C[:, None] - normaliser_C[:, None]
    return torch.cat([logprobs_C[:, None], others], dim=1), entropy_C, normaliser_C


def _chunk_grad(  # noqa: PLR0917  # one call, in the order of the forward pass
    hidden_CH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_C: Tensor,
    temperatures_C: Tensor | None,
    normaliser_C: Tensor,
    entropy_C: Tensor,
    grad_logprobs_C: Tensor | None,
    grad_entropy_C: Tensor | None,
    logits: Logits,
) -> Tensor:
    """The gradient of the product of hidden states and weights, in the type of the weights: d log p(target) = onehot - p,
    dH = -p * (log p + H)."""
    logits_CV = _logits(hidden_CH, weight_VH, bias_V, logits)
    slope_CV = logits.scale if logits.cap is None else logits.scale * (1 - (logits_CV / logits.cap).square())
    log_probs_CV = _cooled(logits_CV, temperatures_C) - normaliser_C.unsqueeze(-1)
    del logits_CV
    factor_CV = torch.zeros_like(entropy_C).unsqueeze(-1)
    if grad_logprobs_C is not None:
        sums_C = grad_logprobs_C if grad_logprobs_C.dim() == 1 else grad_logprobs_C.sum(-1)
        factor_CV = factor_CV - sums_C.unsqueeze(-1)
    if grad_entropy_C is not None:
        factor_CV = factor_CV - (log_probs_CV + entropy_C.unsqueeze(-1)) * grad_entropy_C.unsqueeze(-1)
    grad_CV = log_probs_CV.exp() * factor_CV
    if grad_logprobs_C is not None:
        if targets_C.dim() == 2:
            # The first target may be one of the others: added apart, the order of additions is always the same.
            grad_CV = grad_CV.scatter_add(-1, targets_C[:, 1:], grad_logprobs_C[:, 1:])
            targets_C, grad_logprobs_C = targets_C[:, 0], grad_logprobs_C[:, 0]
        # Not a scatter: compiled, it would need another pass over the logits.
        is_target_CV = torch.arange(grad_CV.shape[-1], device=grad_CV.device) == targets_C.unsqueeze(-1)
        grad_CV = torch.where(is_target_CV, grad_CV + grad_logprobs_C.unsqueeze(-1), grad_CV)
    grad_CV = _cooled(grad_CV, temperatures_C)
    return (grad_CV if logits.is_plain else grad_CV * slope_CV).to(weight_VH.dtype)
