"""The operations of `torch_ops.py` and the sampling of `sampling.py` as Triton kernels, for a GPU.

Attention reads each row up to its own length, which only the device knows: there are no masks, captured graphs do not depend on a
length, and free rows cost nothing. Queries that share keys form one block of a matrix product, so keys and values are read once.
Long rows of a small batch are split over several programs and joined afterwards. If Triton cannot be imported, `kernels_missing`
says why.
"""

# M tokens, N rows, S slots, H key/value heads, G query heads a key/value head, T positions, D head size, V vocabulary

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollbook.inference.engines.embedded.model.forward import PrefillPositions
from rollbook.inference.engines.embedded.model.torch_ops import HeadShape, TorchOps
from rollbook.inference.engines.embedded.sampling import RowSampling, truncated
from rollbook.inference.engines.embedded.slot_cache import SlotCache

try:
    from rollbook.inference.engines.embedded.model import triton_kernels
except ImportError as error:
    kernels_missing: str | None = f"Triton cannot be imported: {error}"
else:
    kernels_missing = None

PROGRAMS_WANTED = 528
"""Number of attention programs that fills a GPU of 132 multiprocessors four times."""
MAX_SPLITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelStep:
    """Shared by all layers of one forward: the positions of its tokens and where they are written."""

    positions_M: Tensor
    write_rows_M: Tensor
    write_at_M: Tensor
    torch_step: Any = None
    """For attention over several tokens per row; None when decoding."""


class KernelOps(TorchOps):
    """Prefill attention is torch's (flash attention); everything else is a Triton kernel."""

    needs_length = False

    def __init__(self, heads: HeadShape, *, cosines_TD: Tensor, sines_TD: Tensor) -> None:
        super().__init__(heads, cosines_TD=cosines_TD, sines_TD=sines_TD)
        half = heads.size // 2
        self._cosines_TF = cosines_TD[:, :half].contiguous()
        self._sines_TF = sines_TD[:, :half].contiguous()

    def decode_step(self, positions_N: Tensor, slots: SlotCache, *, length: int) -> KernelStep:  # type: ignore[override]
        rows_N = torch.arange(len(positions_N), device=positions_N.device, dtype=torch.int32)
        return KernelStep(positions_M=positions_N, write_rows_M=rows_N, write_at_M=positions_N)

    def prefill_step(self, positions: PrefillPositions, slots: SlotCache) -> KernelStep:  # type: ignore[override]
        return KernelStep(
            positions_M=positions.positions_NC.flatten(),
            write_rows_M=positions.write_rows_NC.flatten(),
            write_at_M=positions.write_at_NC.flatten(),
            torch_step=_AttentionStep(
                mask=None if positions.is_fresh else positions.mask_N1CT(self._cosines_TD.dtype),
                length=positions.attention_length,
            ),
        )

    def norm(self, x_ME: Tensor, weight_E: Tensor, epsilon: float) -> Tensor:
        out_ME = torch.empty_like(x_ME)
        triton_kernels.launch_rms_norm(x_ME, weight_E, out_ME, epsilon)
        return out_ME

    def rotate_and_store(self, fused_MX: Tensor, step: KernelStep, joint: Tensor) -> None:  # type: ignore[override]
        triton_kernels.launch_rotate_and_store(
            fused_MX,
            self._cosines_TF,
            self._sines_TF,
            positions_M=step.positions_M,
            write_rows_M=step.write_rows_M,
            write_at_M=step.write_at_M,
            joint=joint,
            heads=self._heads,
        )

    def attend_one(self, fused_NX: Tensor, step: KernelStep, joint: Tensor) -> Tensor:  # type: ignore[override]
        count = len(fused_NX)
        splits = max(1, min(MAX_SPLITS, PROGRAMS_WANTED // max(1, count * self._heads.keys)))
        # Splitting needs a second kernel, so it pays for long rows only.
        if joint.shape[3] <= 512:
            splits = 1
        out_NX = torch.empty(
            (count, self._heads.queries * self._heads.size), dtype=fused_NX.dtype, device=fused_NX.device
        )
        triton_kernels.launch_attend_one(fused_NX, joint, step.positions_M, out_NX, heads=self._heads, splits=splits)
        return out_NX

    def attend_many(  # type: ignore[override]
        self, fused_MX: Tensor, step: KernelStep, joint: Tensor, positions: PrefillPositions
    ) -> Tensor:
        return super().attend_many(fused_MX, step.torch_step, joint, positions)

    def gate(self, both_MF: Tensor) -> Tensor:
        out_MF = torch.empty((len(both_MF), both_MF.shape[1] // 2), dtype=both_MF.dtype, device=both_MF.device)
        triton_kernels.launch_gate(both_MF, out_MF)
        return out_MF


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttentionStep:
    """The part of `torch_ops.Step` that attention over several tokens reads."""

    mask: Tensor | None
    length: int


def sample_with_kernels(logits_NV: Tensor, rows: RowSampling) -> tuple[Tensor, Tensor]:
    """As `sampling.sample`, with Gumbel noise for each token, drawn from the row's key, so one pass over the logits is enough."""
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
    triton_kernels.launch_sample(logits_NV, temperatures_N, rows.keys_N, tokens_N, logprobs_N)
    return tokens_N, logprobs_N
