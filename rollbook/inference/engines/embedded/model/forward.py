"""The input of a forward: tokens, and their positions in the slots. Shared by all implementations of `SlotModel`."""

# N rows, C tokens a row, V vocabulary

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rollbook.inference.engines.embedded.adapters import AdapterBank, AdapterRows
from rollbook.inference.engines.embedded.slot_cache import RowMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillInput:
    """C tokens in each of N rows, padded on the right. Row i starts at position `starts[i]`; its last real token is `lasts[i]`."""

    tokens_NC: Tensor
    rows_N: Tensor
    starts_N: Tensor
    lasts_N: Tensor
    attention_length: int
    """The number of positions attention reads: the largest start plus C, at most the slots' length."""
    is_fresh: bool
    """Every row starts at 0, so attention needs only the tokens of this forward."""
    adapters: AdapterRows | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPositions:
    """The position of every token of a prefill, and where its keys and values are written: padding into the scratch row."""

    rows_N: Tensor
    positions_NC: Tensor
    write_rows_NC: Tensor
    write_at_NC: Tensor
    attention_length: int
    is_fresh: bool

    @classmethod
    def of(cls, inputs: PrefillInput, *, scratch_row: int, max_model_len: int) -> "PrefillPositions":
        steps_C = torch.arange(inputs.tokens_NC.shape[1], device=inputs.tokens_NC.device)
        positions_NC = inputs.starts_N[:, None] + steps_C
        is_padding_NC = steps_C > inputs.lasts_N[:, None]
        return cls(
            rows_N=inputs.rows_N,
            positions_NC=positions_NC.clamp(max=max_model_len - 1),
            write_rows_NC=torch.where(is_padding_NC, scratch_row, inputs.rows_N[:, None]),
            write_at_NC=positions_NC.masked_fill(is_padding_NC, 0),
            attention_length=inputs.attention_length,
            is_fresh=inputs.is_fresh,
        )

    def mask_N1CT(self, dtype: torch.dtype) -> Tensor:
        """An additive mask: a token attends to positions up to its own. Not needed for a fresh prefill."""
        seen_T = torch.arange(self.attention_length, device=self.positions_NC.device)
        is_future_NCT = seen_T > self.positions_NC[:, :, None]
        mask_NCT = torch.zeros(is_future_NCT.shape, dtype=dtype, device=seen_T.device)
        return mask_NCT.masked_fill_(is_future_NCT, float("-inf"))[:, None]


class SlotModel(Protocol):
    """A model that reads and writes the memory that it made. Used by one thread."""

    is_dense: bool
    """Whether a decode step computes all of the first N rows; otherwise only those that decode."""

    vocab_size: int
    max_model_len: int
    device: torch.device
    dtype: torch.dtype
    adapters: AdapterBank

    def new_memory(self) -> RowMemory: ...

    def bytes_per_row(self) -> tuple[int, int]:
        """What a row takes for each position, and whatever its length."""

    def prefill(self, inputs: PrefillInput, slots: Any) -> Tensor:
        """Logits (N, V) after the last real token of each row. Writes all keys, values and states to the memory."""

    def decode(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        slots: Any,
        *,
        rows: Sequence[int],
        length: int,
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        """Logits (N, V) after one more token in each of these rows: the first N where the model is dense. `LlamaForward` also
        computes several tokens of a row, if `rows` is not a range.

        `length`: the number of positions attention reads.
        """
