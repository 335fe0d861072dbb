"""What a forward is given: tokens, and where in the slots they stand. Shared by every way a model can be run."""

# N rows, C tokens a row, V vocabulary

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rollbook.inference.engines.embedded.cache.slot_cache import LayerShape, SlotCache


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillInput:
    """C tokens in each of N rows, padded on the right. Row i goes on at position `starts[i]`; its last real token is `lasts[i]`."""

    tokens_NC: Tensor
    rows_N: Tensor
    starts_N: Tensor
    lasts_N: Tensor
    reach: int
    """Positions that attention must see: the largest start plus C, at most the slots' length."""
    is_fresh: bool
    """Every row starts at 0: attention needs nothing but this forward's own tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlaces:
    """Where every token of a prefill stands, and where its keys and values are written: padding goes to the scratch row."""

    rows_N: Tensor
    positions_NC: Tensor
    write_rows_NC: Tensor
    write_at_NC: Tensor
    reach: int
    is_fresh: bool

    @classmethod
    def of(cls, given: PrefillInput, *, scratch_row: int, max_model_len: int) -> "PrefillPlaces":
        steps_C = torch.arange(given.tokens_NC.shape[1], device=given.tokens_NC.device)
        positions_NC = given.starts_N[:, None] + steps_C
        is_padding_NC = steps_C > given.lasts_N[:, None]
        return cls(
            rows_N=given.rows_N,
            positions_NC=positions_NC.clamp(max=max_model_len - 1),
            write_rows_NC=torch.where(is_padding_NC, scratch_row, given.rows_N[:, None]),
            write_at_NC=positions_NC.masked_fill(is_padding_NC, 0),
            reach=given.reach,
            is_fresh=given.is_fresh,
        )

    def mask_N1CT(self, dtype: torch.dtype) -> Tensor:
        """Additive: a token sees positions up to its own. Only for what is not fresh."""
        seen_T = torch.arange(self.reach, device=self.positions_NC.device)
        is_future_NCT = seen_T > self.positions_NC[:, :, None]
        mask_NCT = torch.zeros(is_future_NCT.shape, dtype=dtype, device=seen_T.device)
        return mask_NCT.masked_fill_(is_future_NCT, float("-inf"))[:, None]


class SlotModel(Protocol):
    """A model that reads and writes slots. Owned by one thread."""

    vocab_size: int
    max_model_len: int
    device: torch.device
    dtype: torch.dtype

    @property
    def shapes(self) -> Sequence[LayerShape]: ...

    def prefill(self, given: PrefillInput, slots: SlotCache) -> Tensor:
        """Logits (N, V) after the last real token of each row; all keys and values are in the slots."""

    def decode(self, tokens_N: Tensor, positions_N: Tensor, slots: SlotCache, *, length: int) -> Tensor:
        """Logits (N, V) after one more token in each of the first N slots. `length`: positions attention must see."""
