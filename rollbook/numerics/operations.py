"""The operations of a Llama-like decoder whose results on a GPU are the same bits in the sampler and in the trainer.

A row has the same bits whatever the other rows of its batch are, whether it is decoded alone, prefilled in pieces or trained in a
packed pass: every sum has one order, which depends on positions and the model's shape only. So products are not split along the
summed dimension (`unsplit_products`), and attention adds keys in blocks of 64 from the start of the sequence. If Triton cannot be
imported, `kernels_missing` says why.
"""

# M tokens, K summed dimension, N outputs, E hidden size, F feed-forward size, V vocabulary, T tiles of the vocabulary, R heads,
# D head size, W rotated width

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rollbook.numerics.module_parts import Activation
from rollbook.numerics.recipe import Norm

try:
    from rollbook.numerics import triton_attention, triton_logprobs, triton_rows
except ImportError as error:
    kernels_missing: str | None = f"Triton cannot be imported: {error}"
else:
    kernels_missing = None

CHUNK = 512
"""Keys that one program of the sampler reads at most. Longer rows are joined from parts of this length."""
EXACT_DTYPES = (torch.bfloat16, torch.float16)
TILE_LINES = 128
"""Queries of a program of packed attention: tokens times the heads that share keys."""
LARGE_HEAD = 128
DEEP = 3
"""A product sums over this many times more numbers than it has outputs: cuBLAS is slow for few rows if it may not split them."""
FEW_ROWS, FEW_ROWS_OF_ADAPTERS, NARROW = 128, 512, 64
"""Up to this many rows our own kernel computes deep products: more rows if there are few outputs, as in adapters."""


def set_unsplit_products(*, is_unsplit: bool) -> None:
    """Whether cuBLAS may divide the sum of a product among several programs. It decides so by the number of rows."""
    backend: Any = torch.backends.cuda
    backend.preferred_blas_library("cublaslt" if is_unsplit else "default")
    # The second value is for split sums; the first must be False too.
    backend.matmul.allow_bf16_reduced_precision_reduction = (False, False) if is_unsplit else True
    backend.matmul.allow_fp16_reduced_precision_reduction = (False, False) if is_unsplit else True


@cache
def why_not_here() -> str | None:
    """Why this machine cannot compute the same bits whatever the batch; None if it can."""
    if kernels_missing is not None:
        return kernels_missing
    try:
        with unsplit_products():
            return None
    except (RuntimeError, TypeError, AttributeError) as error:  # PyTorch before 2.10, or built for another vendor
        return f"PyTorch {torch.__version__} cannot forbid split products: {error}"


@contextmanager
def unsplit_products() -> Iterator[None]:
    """For a forward pass. Gradients of weights sum over all tokens: they would be slow without splitting."""
    backend: Any = torch.backends.cuda
    matmul = backend.matmul
    library = backend.preferred_blas_library()
    bfloat16, float16 = (
        (
            getattr(matmul, f"allow_{kind}_reduced_precision_reduction"),
            getattr(matmul, f"allow_{kind}_reduced_precision_reduction_split_k"),
        )
        for kind in ("bf16", "fp16")
    )
    try:
        set_unsplit_products(is_unsplit=True)
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = bfloat16
        matmul.allow_fp16_reduced_precision_reduction = float16
        backend.preferred_blas_library(library)


def product(x_MK: Tensor, weight_KN: Tensor) -> Tensor:
    """x @ weight, while products are unsplit. `weight_KN` is the transposed view of a weight."""
    rows, (deep, width) = len(x_MK), weight_KN.shape
    most = FEW_ROWS_OF_ADAPTERS if width <= NARROW else FEW_ROWS
    if rows > most or deep < DEEP * width or weight_KN.stride(0) != 1:
        return x_MK @ weight_KN
    out_MN = torch.empty((rows, width), dtype=x_MK.dtype, device=x_MK.device)
    triton_rows.launch_product(x_MK, weight_KN, out_MN)
    return out_MN


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_E: Tensor, norm: Norm) -> Tensor:
        x_ME = x.reshape(-1, x.shape[-1]).contiguous()
        ctx.save_for_backward(x_ME, weight_E)
        ctx.norm = norm
        return _normed(x_ME, norm).view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x_ME, weight_E = ctx.saved_tensors
        to_x, to_weight = triton_rows.launch_rms_norm_gradient(
            x_ME, replace(ctx.norm, weight_E=weight_E), gradient.reshape(x_ME.shape).contiguous()
        )
        return to_x.view(gradient.shape), to_weight if ctx.needs_input_grad[1] else None, None


def _normed(x_ME: Tensor, norm: Norm) -> Tensor:
    out_ME = torch.empty_like(x_ME)
    triton_rows.launch_rms_norm(x_ME, norm, out_ME)
    return out_ME


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """Over the last dimension. Has a gradient."""
    if not torch.is_grad_enabled():
        return _normed(x.reshape(-1, x.shape[-1]).contiguous(), norm).view(x.shape)
    normed: Tensor = _RmsNorm.apply(x, norm.weight_E, norm)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return normed


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_1RMD: Tensor, cosines_MW: Tensor, sines_MW: Tensor) -> Tensor:
        ctx.save_for_backward(cosines_MW, sines_MW)
        return _turned(x_1RMD, cosines_MW, sines_MW, is_gradient=False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _turned(gradient, *ctx.saved_tensors, is_gradient=True), None, None


def _turned(x_1RMD: Tensor, cosines_MW: Tensor, sines_MW: Tensor, *, is_gradient: bool) -> Tensor:
    x_MRD = x_1RMD[0].transpose(0, 1).contiguous()
    out_MRD = torch.empty_like(x_MRD)
    triton_rows.launch_rotate(x_MRD, cosines_MW, sines_MW, out_MRD, is_gradient=is_gradient)
    return out_MRD.transpose(0, 1).unsqueeze(0)


def rotated(x_1RMD: Tensor, cosines_1MW: Tensor, sines_1MW: Tensor) -> Tensor:
    """Heads of one packed row, rotated in halves as by `apply_rotary_pos_emb` of most families. Has a gradient for the heads."""
    turned: Tensor = _Rotation.apply(x_1RMD, cosines_1MW[0].contiguous(), sines_1MW[0].contiguous())  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return turned


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gates: Tensor, ups: Tensor, activation: Activation) -> Tensor:
        gates, ups = gates.contiguous(), ups.contiguous()
        ctx.save_for_backward(gates, ups)
        ctx.activation = activation
        width = gates.shape[-1]
        out = torch.empty_like(gates)
        triton_rows.launch_gate(gates.view(-1, width), ups.view(-1, width), out.view(-1, width), activation)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gates, ups = ctx.saved_tensors
        return *triton_rows.launch_gate_gradient(gates, ups, gradient.contiguous(), ctx.activation), None


def gate(gates: Tensor, ups: Tensor, activation: Activation) -> Tensor:
    """activation(gates) * ups. Has a gradient."""
    gated: Tensor = _Gate.apply(gates, ups, activation)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return gated


def tokens_per_tile(*, heads: int, key_heads: int, size: int) -> int:
    """Queries that `attention` computes together. `size`: of a head."""
    return max(1, _lines_of_tile(size) // (heads // key_heads))


def _lines_of_tile(size: int) -> int:
    """Large heads leave room for half as many in the memory of a program on a card of 24 GB."""
    return TILE_LINES if size <= LARGE_HEAD else TILE_LINES // 2


def attention(
    query_THD: Tensor,
    key_FKD: Tensor,
    value_FKD: Tensor,
    tiles_4B: Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Causal attention over packed sequences. Without a gradient: see `gradients.with_torch_gradient`.

    `tiles_4B`: of each tile its first query, its number of tokens, the position of its first query in its sequence, and the first
    key of that sequence.
    """
    out_THD = torch.empty(query_THD.shape, dtype=query_THD.dtype, device=query_THD.device)
    triton_attention.launch_packed(
        query_THD.contiguous(),
        key_FKD.contiguous(),
        value_FKD.contiguous(),
        tiles_4B,
        out_THD,
        scale=scale,
        window=window,
        chunk=CHUNK,
        lines=_lines_of_tile(query_THD.shape[2]),
    )
    return out_THD


def float32_logits(hidden_NE: Tensor, head_VE: Tensor) -> Tensor:
    """On a GPU in float32 whatever the type of the inputs: in bfloat16, logits between 16 and 32 would be multiples of 0.125.

    A CPU has no such product, so its logits are rounded.
    """
    if hidden_NE.is_cuda and hidden_NE.dtype in EXACT_DTYPES:
        return torch.mm(hidden_NE, head_VE.t(), out_dtype=torch.float32)
    return F.linear(hidden_NE, head_VE)


def token_logprobs(logits_NV: Tensor, targets_N: Tensor, temperatures_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each target, entropy of its distribution, and the logarithm of the sum that normalises it.

    The first has the bits of the sampler. Without a gradient.
    """
    peaks_NT, totals_NT, moments_NT = triton_logprobs.launch_reduce(logits_NV, temperatures_N)
    logprobs_N = torch.empty(len(logits_NV), dtype=torch.float32, device=logits_NV.device)
    triton_logprobs.launch_score(logits_NV, temperatures_N, (peaks_NT, totals_NT), targets_N, logprobs_N)
    cold_N1 = 1.0 / temperatures_N[:, None]
    peak_N1 = peaks_NT.amax(dim=1, keepdim=True)
    above_NT = (peaks_NT - peak_N1) * cold_N1
    share_NT = above_NT.exp()
    total_N = (totals_NT * share_NT).sum(dim=1)
    mean_N = (share_NT * (moments_NT + totals_NT * above_NT)).sum(dim=1) / total_N
    log_total_N = total_N.log()
    return logprobs_N, log_total_N - mean_N, peak_N1[:, 0] * cold_N1[:, 0] + log_total_N
