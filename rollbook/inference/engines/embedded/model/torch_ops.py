"""The small operations of a decoder layer over slots, in plain torch: for a CPU, and where Triton is not installed.

`SlotStep` holds the data that all layers of one forward share. `packed.py` has the operations over blocks.
"""

# M tokens of a forward, N rows, C tokens a row, S slots, H key/value heads, G query heads a key/value head, Q = H x G, T positions,
# D head size, X = Q + 2H heads of a fused projection

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from rollbook.inference.engines.embedded.model import eight_bits
from rollbook.inference.engines.embedded.model.forward import PrefillPositions
from rollbook.inference.engines.embedded.slot_cache import SlotCache
from rollbook.numerics.delta import DeltaLayer
from rollbook.numerics.module_parts import ACTIVATIONS, Activation
from rollbook.numerics.recipe import Attention, HeadNorms, Norm, Rotary


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


def normed_heads(fused_MX: Tensor, heads: HeadShape, norms: HeadNorms) -> None:
    """Normalise queries and keys in place."""
    starts = 0, heads.queries * heads.size, (heads.queries + heads.keys) * heads.size
    for start, end, norm in ((starts[0], starts[1], norms.queries), (starts[1], starts[2], norms.keys)):
        part_MRE = fused_MX[:, start:end].view(len(fused_MX), -1, len(norm.weight_E))
        part_MRE.copy_(norm(part_MRE))


def turned_heads(
    fused_MX: Tensor, heads: HeadShape, attention: Attention, rotation: tuple[Tensor, Tensor, Tensor | None] | None
) -> Tensor:
    """Normalise and rotate queries and keys in place, as the layer does it. Returns all heads (M, X, D).

    `rotation`: cosines and sines (M, 1, W) of the tokens, and factors of their queries (M, 1, 1).
    """
    fused_MXD = fused_MX.view(len(fused_MX), heads.fused, heads.size)
    norms, rotary = attention.norms, attention.rotary
    if norms is not None and not norms.is_after_rotation:
        normed_heads(fused_MX, heads, norms)
    if rotary is not None and rotation is not None:
        cosines_M1W, sines_M1W, scales_M11 = rotation
        rotary.rotate(fused_MXD[:, : heads.queries + heads.keys], cosines_M1W, sines_M1W)
        if scales_M11 is not None:
            fused_MXD[:, : heads.queries].mul_(scales_M11)
    if norms is not None and norms.is_after_rotation:
        normed_heads(fused_MX, heads, norms)
    return fused_MXD


def rotation_at(rotary: Rotary, positions_M: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """For `turned_heads`."""
    cosines_TW, sines_TW = rotary.tables_TW
    scales_T = rotary.query_scales_T
    scales_M11 = None if scales_T is None else scales_T[positions_M][:, None, None]
    return cosines_TW[positions_M][:, None], sines_TW[positions_M][:, None], scales_M11


def hidden_keys(positions: Tensor, seen_T: Tensor, window: int | None) -> Tensor:
    """Which keys a token does not see. `positions`: (..., 1)."""
    is_future = seen_T > positions
    return is_future if window is None else is_future | (seen_T <= positions - window)


def read_slots(joint: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys and values (2, ..., D), whatever they are stored as."""
    return eight_bits.decoded(joint, dtype) if joint.dtype in eight_bits.LARGEST else joint


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, attention: Attention) -> Tensor:
    """Over heads (..., queries, D). `mask`: additive; None: causal, with as many queries as keys."""
    if attention.is_plain:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=mask is None, scale=attention.scale
        )
    assert mask is not None, "capped scores and sinks need a mask"
    scores = (query @ keys.transpose(-1, -2)).float() * attention.scale
    if attention.cap is not None:
        scores = torch.tanh(scores / attention.cap) * attention.cap
    scores = scores + mask
    if attention.sinks_R is not None:
        # (heads, 1, 1), or for queries that share keys (key heads, queries, 1).
        sinks = attention.sinks_R.float().view(query.shape[1], -1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[-2]]
    return weights.to(values.dtype) @ values


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStep:
    """Shared by all layers of one forward."""

    positions_NC: Tensor
    write_at: Tensor
    """(M x 2 x H) indices into a layer's slots, viewed as vectors."""
    length: int
    """Attention reads so many positions of the slots."""
    is_fresh: bool
    """Every row starts at 0: attention may read the tokens of this forward only."""
    rows_N: Tensor | None = None
    """The row of each decoding token. None: the first ones, each once."""
    rotations: dict[Rotary, tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=dict)
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    """Additive, (N, 1, C, T), by window."""

    def rotation(self, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor | None] | None:
        if rotary is not None and rotary not in self.rotations:
            self.rotations[rotary] = rotation_at(rotary, self.positions_NC.flatten())
        return None if rotary is None else self.rotations[rotary]

    def mask(self, attention: Attention, dtype: torch.dtype) -> Tensor | None:
        """None: causal attention among the tokens of this forward."""
        window = None if attention.window is None or attention.window >= self.length else attention.window
        if self.is_fresh and window is None and attention.is_plain:
            return None
        if window not in self.masks:
            seen_T = torch.arange(self.length, device=self.positions_NC.device)
            # Padding may have positions that are not read.
            positions_NC = self.positions_NC.clamp(max=self.length - 1)
            is_hidden_NCT = hidden_keys(positions_NC[:, :, None], seen_T, window)
            mask_NCT = torch.zeros(is_hidden_NCT.shape, dtype=dtype, device=seen_T.device)
            self.masks[window] = mask_NCT.masked_fill_(is_hidden_NCT, float("-inf"))[:, None]
        return self.masks[window]


class TorchOps:
    def __init__(self, heads: HeadShape, activation: Activation) -> None:
        self._heads = heads
        self._activation = ACTIVATIONS[activation]

    def decode_step(
        self, positions_N: Tensor, slots: SlotCache, *, length: int, rows_N: Tensor | None = None
    ) -> SlotStep:
        first_N = torch.arange(len(positions_N), device=positions_N.device)
        return SlotStep(
            rows_N=rows_N,
            positions_NC=positions_N[:, None],
            write_at=self._write_at(first_N if rows_N is None else rows_N, positions_N, slots),
            length=length,
            is_fresh=False,
        )

    def prefill_step(self, positions: PrefillPositions, slots: SlotCache) -> SlotStep:
        return SlotStep(
            positions_NC=positions.positions_NC,
            write_at=self._write_at(positions.write_rows_NC.flatten(), positions.write_at_NC.flatten(), slots),
            length=positions.attention_length,
            is_fresh=positions.is_fresh,
        )

    def norm(self, x_ME: Tensor, norm: Norm) -> Tensor:
        return norm(x_ME)

    def add_and_norm(self, hidden_ME: Tensor, added_ME: Tensor, norm: Norm) -> Tensor:
        return norm(hidden_ME.add_(added_ME))

    def rotate_and_store(self, fused_MX: Tensor, step: SlotStep, joint: Tensor, attention: Attention) -> None:
        """Rotate queries and keys in place, and write keys and values to the slots."""
        heads = self._heads
        fused_MXD = turned_heads(fused_MX, heads, attention, step.rotation(attention.rotary))
        vectors = fused_MXD[:, heads.queries :].reshape(-1, heads.size)
        if joint.dtype in eight_bits.LARGEST:
            vectors = eight_bits.encoded(vectors, joint.dtype)
            # A fresh prefill attends to what it stores, as later tokens do.
            read_MXD = eight_bits.decoded(vectors, fused_MX.dtype).view(len(fused_MX), -1, heads.size)
            fused_MXD[:, heads.queries :] = read_MXD
        joint.view(-1, joint.shape[-1]).index_copy_(0, step.write_at, vectors)

    def attend_one(self, fused_NX: Tensor, step: SlotStep, joint: Tensor, attention: Attention) -> Tensor:
        """One query per token, over the slot of its row. Queries that share keys form one block, so keys are not repeated."""
        heads, count = self._heads, len(fused_NX)
        queries_NHGD = fused_NX.view(count, heads.fused, heads.size)[:, : heads.queries].view(
            count, heads.keys, heads.group, heads.size
        )
        rows = slice(0, count) if step.rows_N is None else step.rows_N
        keys_NHTD, values_NHTD = read_slots(joint[:, rows, :, : step.length], fused_NX.dtype)
        attended = attend(queries_NHGD, keys_NHTD, values_NHTD, step.mask(attention, fused_NX.dtype), attention)
        return attended.reshape(count, heads.queries * heads.size)

    def attend_many(
        self, fused_MX: Tensor, step: SlotStep, joint: Tensor, attention: Attention, rows_N: Tensor
    ) -> Tensor:
        heads = self._heads
        rows, tokens = step.positions_NC.shape
        mask = step.mask(attention, fused_MX.dtype)
        fused_NXCD = fused_MX.view(rows, tokens, heads.fused, heads.size).transpose(1, 2)
        queries = fused_NXCD[:, : heads.queries]
        if mask is None:
            keys, values = fused_NXCD[:, heads.queries :].chunk(2, dim=1)
        else:
            keys, values = read_slots(joint[:, rows_N, :, : step.length], fused_MX.dtype)
        is_fused = queries.device.type == "cuda" and queries.dtype != torch.float32 and attention.is_plain
        if heads.group > 1 and not is_fused:
            keys, values = keys.repeat_interleave(heads.group, dim=1), values.repeat_interleave(heads.group, dim=1)
        if heads.group > 1 and is_fused:
            attended_NQCD = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=attention.scale, enable_gqa=True
            )
        else:
            attended_NQCD = attend(queries, keys, values, mask, attention)
        return attended_NQCD.transpose(1, 2).reshape(rows * tokens, heads.queries * heads.size)

    def delta_step(
        self, fused_NX: Tensor, delta: DeltaLayer, inputs_NCK: Tensor, state_NHDV: Tensor, is_added_N: Tensor
    ) -> Tensor:
        return delta.step(fused_NX, inputs_NCK, state_NHDV, is_added_N)

    def gate(self, both_MF: Tensor) -> Tensor:
        gates, ups = both_MF.chunk(2, dim=-1)
        gated: Tensor = self._activation(gates).mul_(ups)
        return gated

    def scaled(self, x_ME: Tensor) -> eight_bits.Scaled:
        return eight_bits.scaled_lines(x_ME)

    def _write_at(self, rows_M: Tensor, at_M: Tensor, slots: SlotCache) -> Tensor:
        device, keys = at_M.device, self._heads.keys
        joint = slots.joint[0]
        kinds_2, heads_H = torch.arange(2, device=device), torch.arange(keys, device=device)
        slot_M2 = kinds_2 * joint.shape[1] + rows_M[:, None]
        write_at_M2H = (slot_M2[:, :, None] * keys + heads_H) * joint.shape[3] + at_M[:, None, None]
        return write_at_M2H.flatten()
