"""The operations of `packed.py` and the sampling of `sampling.py` as Triton kernels, for a GPU.

Attention reads each row up to its own length, which only the device knows: there are no masks, and captured graphs do not depend
on a length. Queries that share keys form one block of a matrix product, so keys and values are read once. Long rows are split over
several programs and joined afterwards. If Triton cannot be imported, `kernels_missing` says why.
"""

# M tokens, N rows, H key/value heads, D head size, T positions, V vocabulary; of gated delta layers see `numerics/delta.py`

import torch
from torch import Tensor

from rollbook.inference.engines.embedded.model import eight_bits
from rollbook.inference.engines.embedded.model.packed import PackedStep
from rollbook.inference.engines.embedded.model.torch_ops import HeadShape, TorchOps
from rollbook.inference.engines.embedded.sampling import RowSampling, truncated
from rollbook.numerics.delta import DeltaLayer
from rollbook.numerics.module_parts import Activation
from rollbook.numerics.operations import CHUNK, kernels_missing, rms_norm
from rollbook.numerics.recipe import Attention, Norm

if kernels_missing is None:
    from rollbook.inference.engines.embedded.model import triton_delta, triton_kernels, triton_sampling
    from rollbook.numerics import triton_rows


class KernelOps:
    """Implements `packed.PackedOps`."""

    def __init__(self, heads: HeadShape, activation: Activation) -> None:
        self._heads = heads
        self._activation = activation
        self.query_tile = triton_kernels.query_tile(heads)

    def norm(self, x_ME: Tensor, norm: Norm) -> Tensor:
        return rms_norm(x_ME, norm)

    def add_and_norm(self, hidden_ME: Tensor, added_ME: Tensor, norm: Norm) -> Tensor:
        return _normed_sum(hidden_ME, added_ME, norm)

    def rotate_and_store(self, fused_MX: Tensor, step: PackedStep, blocks: Tensor, attention: Attention) -> None:
        heads, norms, rotary = self._heads, attention.norms, attention.rotary
        if norms is not None and norms.is_after_rotation:
            triton_kernels.launch_rotate_and_store(fused_MX, rotary, step=step, blocks=None, heads=heads)
            rotary = None
        if norms is not None:
            ends = heads.queries * heads.size, (heads.queries + heads.keys) * heads.size
            queries_MX, keys_MX = fused_MX[:, : ends[0]], fused_MX[:, ends[0] : ends[1]]
            triton_rows.launch_rms_norm(queries_MX, norms.queries, queries_MX)
            triton_rows.launch_rms_norm(keys_MX, norms.keys, keys_MX)
        triton_kernels.launch_rotate_and_store(fused_MX, rotary, step=step, blocks=blocks, heads=heads)

    def attend(self, fused_MX: Tensor, step: PackedStep, blocks: Tensor, attention: Attention) -> Tensor:
        shape = (len(fused_MX), self._heads.queries * self._heads.size)
        out_MX = torch.empty(shape, dtype=fused_MX.dtype, device=fused_MX.device)
        triton_kernels.launch_attention(fused_MX, step, blocks, out_MX, heads=self._heads, of=attention, chunk=CHUNK)
        return out_MX

    def gate(self, both_MF: Tensor) -> Tensor:
        return _gated(both_MF, self._activation)

    def scaled(self, x_ME: Tensor) -> eight_bits.Scaled:
        return triton_kernels.launch_scaled_lines(x_ME)


class SlotKernelOps(TorchOps):
    """Over slots with recurrent states: the state of a row is read and written once in a step. Attention is that of torch."""

    def __init__(self, heads: HeadShape, activation: Activation) -> None:
        super().__init__(heads, activation)
        self._name: Activation = activation

    def norm(self, x_ME: Tensor, norm: Norm) -> Tensor:
        return rms_norm(x_ME, norm)

    def add_and_norm(self, hidden_ME: Tensor, added_ME: Tensor, norm: Norm) -> Tensor:
        return _normed_sum(hidden_ME, added_ME, norm)

    def delta_step(
        self, fused_NX: Tensor, delta: DeltaLayer, inputs_NCK: Tensor, state_NHDV: Tensor, is_added_N: Tensor
    ) -> Tensor:
        new = delta.moved(fused_NX, inputs_NCK, is_added_N)
        out_ND = fused_NX.new_empty(len(fused_NX), delta.value_heads * delta.value_size)
        triton_delta.launch_step(delta, new, inputs_NCK, state_NHDV, is_added_N, out_ND=out_ND)
        return out_ND

    def gate(self, both_MF: Tensor) -> Tensor:
        return _gated(both_MF, self._name)

    def scaled(self, x_ME: Tensor) -> eight_bits.Scaled:
        return triton_kernels.launch_scaled_lines(x_ME)


def _normed_sum(hidden_ME: Tensor, added_ME: Tensor, norm: Norm) -> Tensor:
    out_ME = torch.empty_like(hidden_ME)
    triton_rows.launch_rms_norm(hidden_ME, norm, out_ME, added_ME=added_ME)
    return out_ME


def _gated(both_MF: Tensor, activation: Activation) -> Tensor:
    out_MF = torch.empty((len(both_MF), both_MF.shape[1] // 2), dtype=both_MF.dtype, device=both_MF.device)
    gates_MF, ups_MF = both_MF.chunk(2, dim=1)
    triton_rows.launch_gate(gates_MF, ups_MF, out_MF, activation)
    return out_MF


def sample_with_kernels(logits_NV: Tensor, rows: RowSampling) -> tuple[Tensor, Tensor]:
    """Does what `sampling.sample` does: the same tokens and logprobs, except for rounding."""
    temperatures_N = rows.temperatures_N
    is_greedy_N = temperatures_N == 0
    if rows.is_truncated:
        # The others keep their logits: with scaled ones, their logprobs would have other bits than in a batch of their own.
        is_truncated_N = ~is_greedy_N & ((rows.top_k_N > 0) | (rows.top_p_N < 1.0))
        scale_N1 = torch.where(is_greedy_N, 1.0, temperatures_N)[:, None]
        logits_NV = logits_NV.float()
        scaled_NV = truncated((logits_NV - logits_NV.amax(dim=-1, keepdim=True)) / scale_N1, rows)
        logits_NV = torch.where(is_truncated_N[:, None], scaled_NV, logits_NV)
        temperatures_N = torch.where(is_truncated_N, 1.0, temperatures_N)
    tokens_N = torch.empty(len(logits_NV), dtype=torch.long, device=logits_NV.device)
    logprobs_N = torch.empty(len(logits_NV), dtype=torch.float32, device=logits_NV.device)
    triton_sampling.launch_sample(logits_NV, temperatures_N, rows.keys_N, tokens_N, logprobs_N)
    return tokens_N, logprobs_N
