"""The operations of `packed.py` and the sampling of `sampling.py` as Triton kernels, for a GPU.

Attention reads each row up to its own length, which only the device knows: there are no masks, and captured graphs do not depend
on a length. Queries that share keys form one block of a matrix product, so keys and values are read once. Long rows are split over
several programs and joined afterwards. If Triton cannot be imported, `kernels_missing` says why.
"""

# M tokens, N rows, H key/value heads, D head size, T positions, V vocabulary

import torch
from torch import Tensor

from rollbook.inference.engines.embedded.model.packed import PackedStep
from rollbook.inference.engines.embedded.model.torch_ops import HeadNorms, HeadShape
from rollbook.inference.engines.embedded.sampling import RowSampling, truncated

try:
    from rollbook.inference.engines.embedded.model import triton_kernels, triton_sampling
except ImportError as error:
    kernels_missing: str | None = f"Triton cannot be imported: {error}"
else:
    kernels_missing = None


class KernelOps:
    """Implements `packed.PackedOps`. The only state is the tables of the rotary embedding."""

    def __init__(self, heads: HeadShape, *, cosines_TD: Tensor, sines_TD: Tensor) -> None:
        self._heads = heads
        self.query_tile = triton_kernels.query_tile(heads)
        half = heads.size // 2
        self._cosines_TF = cosines_TD[:, :half].contiguous()
        self._sines_TF = sines_TD[:, :half].contiguous()

    def norm(self, x_ME: Tensor, weight_E: Tensor, epsilon: float) -> Tensor:
        out_ME = torch.empty_like(x_ME)
        triton_kernels.launch_rms_norm(x_ME, weight_E, out_ME, epsilon)
        return out_ME

    def rotate_and_store(self, fused_MX: Tensor, step: PackedStep, blocks: Tensor, norms: HeadNorms | None) -> None:
        triton_kernels.launch_rotate_and_store(
            fused_MX, self._cosines_TF, self._sines_TF, step=step, blocks=blocks, heads=self._heads, norms=norms
        )

    def attend(self, fused_MX: Tensor, step: PackedStep, blocks: Tensor) -> Tensor:
        shape = (len(fused_MX), self._heads.queries * self._heads.size)
        out_MX = torch.empty(shape, dtype=fused_MX.dtype, device=fused_MX.device)
        triton_kernels.launch_attention(fused_MX, step, blocks, out_MX, heads=self._heads)
        return out_MX

    def gate(self, both_MF: Tensor) -> Tensor:
        out_MF = torch.empty((len(both_MF), both_MF.shape[1] // 2), dtype=both_MF.dtype, device=both_MF.device)
        triton_kernels.launch_gate(both_MF, out_MF)
        return out_MF


def sample_with_kernels(logits_NV: Tensor, rows: RowSampling) -> tuple[Tensor, Tensor]:
    """Does what `sampling.sample` does: the same tokens and logprobs, except for rounding."""
    temperatures_N = rows.temperatures_N
    is_greedy_N = temperatures_N == 0
    if rows.is_truncated:
        scale_N1 = torch.where(is_greedy_N, 1.0, temperatures_N)[:, None]
        logits_NV = logits_NV.float()
        logits_NV = (logits_NV - logits_NV.amax(dim=-1, keepdim=True)) / scale_N1
        logits_NV = truncated(logits_NV, rows)
        temperatures_N = torch.where(is_greedy_N, 0.0, 1.0)
    tokens_N = torch.empty(len(logits_NV), dtype=torch.long, device=logits_NV.device)
    logprobs_N = torch.empty(len(logits_NV), dtype=torch.float32, device=logits_NV.device)
    triton_sampling.launch_sample(logits_NV, temperatures_N, rows.keys_N, tokens_N, logprobs_N)
    return tokens_N, logprobs_N
