"""The small operations of a decoder layer over slots, in plain torch: for a CPU, and where Triton is not installed.

`SlotStep` holds the data that all layers of one forward share. `packed.py` has the operations over blocks.
"""

# M tokens of a forward, N rows, C tokens a row, S slots, H key/value heads, G query heads a key/value head, Q = H x G, T positions,
# D head size, X = Q + 2H heads of a fused projection

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from rollbook.inference.engines.embedded.model.forward import PrefillPositions
from rollbook.inference.engines.embedded.slot_cache import SlotCache


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    queries: int
    keys: int
    size: int

    @property
    def group(self) -> int:
        return self.queries // self.keys

    @property
    def fused(self) -> int:
        return self.queries + 2 * self.keys


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """Weights of the norms over each query head and each key head (Qwen3)."""

    queries_D: Tensor
    keys_D: Tensor
    epsilon: float


def normed_heads(fused_MXD: Tensor, heads: HeadShape, norms: HeadNorms) -> None:
    """Normalise every query head and every key head in place."""
    for start, end, weight_D in (
        (0, heads.queries, norms.queries_D),
        (heads.queries, heads.queries + heads.keys, norms.keys_D),
    ):
        part_MXD = fused_MXD[:, start:end]
        part_MXD.copy_(F.rms_norm(part_MXD, weight_D.shape, weight_D, norms.epsilon))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStep:
    """Shared by all layers of one forward: rotary factors (cosines and signed sines, M x 1 x D) and target slots of its tokens."""

    cosines_M1D: Tensor
    sines_M1D: Tensor
    write_at: Tensor
    """(M x 2 x H) indices into a layer's slots, viewed as rows of D numbers."""
    mask: Tensor | None
    """Additive. None: causal attention among the tokens of this forward."""
    length: int


class TorchOps:
    """The only state is the tables of the rotary embedding."""

    def __init__(self, heads: HeadShape, *, cosines_TD: Tensor, sines_TD: Tensor) -> None:
        self._heads = heads
        self._cosines_TD = cosines_TD
        half = heads.size // 2
        # The table includes the sign of the rotation, so that rotating only swaps the halves.
        self._signed_sines_TD = torch.cat((-sines_TD[:, :half], sines_TD[:, half:]), dim=1)

    def decode_step(self, positions_N: Tensor, slots: SlotCache, *, length: int) -> SlotStep:
        count = len(positions_N)
        rows_N = torch.arange(count, device=positions_N.device)
        is_future_NT = torch.arange(length, device=positions_N.device) > positions_N[:, None]
        mask_NT = torch.zeros(is_future_NT.shape, dtype=self._cosines_TD.dtype, device=positions_N.device)
        mask_NT.masked_fill_(is_future_NT, float("-inf"))
        return self._step(positions_N, rows_N, positions_N, slots, mask=mask_NT[:, None, None], length=length)

    def prefill_step(self, positions: PrefillPositions, slots: SlotCache) -> SlotStep:
        positions_M = positions.positions_NC.flatten()
        mask = None if positions.is_fresh else positions.mask_N1CT(self._cosines_TD.dtype)
        return self._step(
            positions_M,
            positions.write_rows_NC.flatten(),
            positions.write_at_NC.flatten(),
            slots,
            mask=mask,
            length=positions.attention_length,
        )

    def norm(self, x_ME: Tensor, weight_E: Tensor, epsilon: float) -> Tensor:
        return F.rms_norm(x_ME, weight_E.shape, weight_E, epsilon)

    def rotate_and_store(self, fused_MX: Tensor, step: SlotStep, joint: Tensor, norms: HeadNorms | None) -> None:
        """Rotate queries and keys in place, and write keys and values to the slots."""
        heads = self._heads
        fused_MXD = fused_MX.view(len(fused_MX), heads.fused, heads.size)
        if norms is not None:
            normed_heads(fused_MXD, heads, norms)
        rotated_MRD = fused_MXD[:, : heads.queries + heads.keys]
        first, second = rotated_MRD.chunk(2, dim=-1)
        swapped_MRD = torch.cat((second, first), dim=-1)
        rotated_MRD.mul_(step.cosines_M1D).addcmul_(swapped_MRD, step.sines_M1D)
        joint.view(-1, heads.size).index_copy_(0, step.write_at, fused_MXD[:, heads.queries :].reshape(-1, heads.size))

    def attend_one(self, fused_NX: Tensor, step: SlotStep, joint: Tensor) -> Tensor:
        """One query per row, over the row's slot. Queries that share keys form one block, so keys are not repeated."""
        heads, count = self._heads, len(fused_NX)
        queries_NHGD = fused_NX.view(count, heads.fused, heads.size)[:, : heads.queries].view(
            count, heads.keys, heads.group, heads.size
        )
        keys_NHTD, values_NHTD = joint[0, :count, :, : step.length], joint[1, :count, :, : step.length]
        attended = F.scaled_dot_product_attention(queries_NHGD, keys_NHTD, values_NHTD, attn_mask=step.mask)
        return attended.reshape(count, heads.queries * heads.size)

    def attend_many(self, fused_MX: Tensor, step: SlotStep, joint: Tensor, positions: PrefillPositions) -> Tensor:
        heads = self._heads
        rows, tokens = positions.positions_NC.shape
        fused_NXCD = fused_MX.view(rows, tokens, heads.fused, heads.size).transpose(1, 2)
        queries = fused_NXCD[:, : heads.queries]
        if step.mask is None:
            keys, values = fused_NXCD[:, heads.queries :].chunk(2, dim=1)
        else:
            keys, values = joint[:, positions.rows_N, :, : step.length]
        is_fused = queries.device.type == "cuda" and queries.dtype != torch.float32
        if heads.group > 1 and not is_fused:
            keys, values = keys.repeat_interleave(heads.group, dim=1), values.repeat_interleave(heads.group, dim=1)
        attended_NQCD = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=step.mask,
            is_causal=step.mask is None,
            enable_gqa=heads.group > 1 and is_fused,
        )
        return attended_NQCD.transpose(1, 2).reshape(rows * tokens, heads.queries * heads.size)

    def gate(self, both_MF: Tensor) -> Tensor:
        gates, ups = both_MF.chunk(2, dim=-1)
        return F.silu(gates).mul_(ups)

    def _step(
        self,
        positions_M: Tensor,
        rows_M: Tensor,
        write_at_M: Tensor,
        slots: SlotCache,
        *,
        mask: Tensor | None,
        length: int,
    ) -> SlotStep:
        device, keys = positions_M.device, self._heads.keys
        joint = slots.joint[0]
        kinds_2, heads_H = torch.arange(2, device=device), torch.arange(keys, device=device)
        slot_M2 = kinds_2 * joint.shape[1] + rows_M[:, None]
        write_at_M2H = (slot_M2[:, :, None] * keys + heads_H) * joint.shape[3] + write_at_M[:, None, None]
        return SlotStep(
            cosines_M1D=self._cosines_TD[positions_M][:, None],
            sines_M1D=self._signed_sines_TD[positions_M][:, None],
            write_at=write_at_M2H.flatten(),
            mask=mask,
            length=length,
        )
