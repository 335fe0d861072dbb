"""Runs the forwards of a round on the device and transfers the sampled tokens to the host.

`Runner` calls the model directly: on a CPU, and for models that cannot be captured. `CapturedRunner` (`captured_runner.py`) replays
captured decode steps of other Hugging Face modules. `PackedRunner` (`paged/runner.py`) captures steps of the fast forward, with
prompts. On a GPU all of them only enqueue work; the host waits in `PendingResults.wait`.
"""

# S slots, N rows, C tokens a row, V vocabulary, D drafted tokens and one more

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollbook.contracts.policy import MAX_TOP_LOGPROBS
from rollbook.inference.engines.embedded.adapters import AdapterRows
from rollbook.inference.engines.embedded.model.forward import PrefillInput, SlotModel
from rollbook.inference.engines.embedded.row_table import DecodeLines, RowTable, Tops
from rollbook.inference.engines.embedded.sampling import RowSampling, constrained, most_likely, sample
from rollbook.inference.engines.embedded.slot_cache import RowMemory, to_device

Sampler = Callable[[Tensor, RowSampling], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class PendingResults:
    """Tokens and logprobs of every row, in transfer to the host. Rows that sampled nothing are included.

    After the sampled tokens, those that follow the first drafted token of each row, and so on.
    """

    tokens_DS: Tensor
    logprobs_DS: Tensor
    arrived: torch.cuda.Event | None
    top_tokens_DSK: Tensor | None = None
    top_logprobs_DSK: Tensor | None = None

    def wait(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.tokens_DS.numpy(), self.logprobs_DS.numpy()

    def tops(self, offset: int) -> Tops | None:
        """The most likely tokens of every row, if any row requested them. Call after `wait`."""
        if self.top_tokens_DSK is None or self.top_logprobs_DSK is None:
            return None
        return self.top_tokens_DSK[offset].numpy(), self.top_logprobs_DSK[offset].numpy()


class Runner:
    """Owns the rows' state on the device. Used by one thread."""

    forward_cost_tokens = 64

    def __init__(
        self, model: SlotModel, slots: RowMemory, *, max_rows: int, sampler: Sampler = sample, draft_tokens: int = 0
    ) -> None:
        """`draft_tokens`: most that a row computes ahead."""
        self.model = model
        self.slots = slots
        self.forwards = 0
        self.masks: Mapping[int, NDArray[np.uint8]] = {}
        """The tokens that may come next in each constrained row, as bits. Set before each round."""
        self._sampler = sampler
        self._device = model.device
        # Exact sampling needs float64, which Apple GPUs do not support: there, tokens are sampled on the CPU.
        self._sampling_device = torch.device("cpu") if model.device.type == "mps" else model.device
        # A column for each row, and one for padding; then as many for each drafted token.
        columns = (max_rows + 1) * (1 + draft_tokens)
        self._depth = 1
        self._tokens_S = torch.zeros(columns, dtype=torch.long, device=self._device)
        self._logprobs_S = torch.zeros(columns, dtype=torch.float32, device=self._device)
        self._max_rows = max_rows
        self._num_tops = min(MAX_TOP_LOGPROBS, model.vocab_size)
        self._top_tokens_SK = torch.zeros(columns, self._num_tops, dtype=torch.int32, device=self._device)
        self._top_logprobs_SK = torch.zeros(columns, self._num_tops, dtype=torch.float32, device=self._device)

    def warm_up(self) -> None:
        """Direct calls need no preparation."""

    def is_smaller(self, fewer: int, rows: int) -> bool:
        """Whether a step over fewer rows costs less."""
        return self.model.is_dense and fewer < rows

    def decode(self, table: RowTable, count: int, *, length: int) -> None:
        """Sample one token in each of the first `count` rows, or in those that decode. `length`: the number of positions attention
        reads."""
        state = self._state(table)
        rows: Sequence[int] = range(count)
        index: slice | Tensor = slice(0, count)
        adapters = table.adapters[:count]
        decoding = np.flatnonzero(table.is_active[:count])
        self.slots.before_decode(decoding.tolist())
        if not self.model.is_dense:
            rows, adapters = decoding.tolist(), adapters[decoding]
            index = to_device(torch.from_numpy(decoding), self._device)
        logits_NV = self.model.decode(
            self._tokens_S[index],
            state.positions_S[index].long(),
            self.slots,
            rows=rows,
            length=length,
            adapters=self.model.adapters.rows(adapters),
        )
        logits_NV = constrained(logits_NV, {i: self.masks[row] for i, row in enumerate(rows) if row in self.masks})
        sampling = state.sampling(table, index)
        tokens_N, logprobs_N = self._sampled(logits_NV, sampling)
        self._tokens_S[index] = tokens_N
        self._logprobs_S[index] = logprobs_N
        if table.has_tops:
            self._store_tops(index, logits_NV, sampling)
        self.forwards += 1

    def decode_lines(self, table: RowTable, lines: DecodeLines) -> None:
        """Sample a token after each of the lines, of which a row may have several."""
        assert lines.tokens is not None, "drafts are made on the host"
        self._depth = lines.depth
        rows: list[int] = lines.rows.tolist()
        tokens_N, positions_N, keys_N, columns_N = (
            to_device(torch.from_numpy(array), self._device)
            for array in (lines.tokens, lines.positions, lines.keys, lines.columns)
        )
        logits_NV = self.model.decode(
            tokens_N.long(),
            positions_N.long(),
            self.slots,
            rows=rows,
            length=int(lines.positions.max()) + 1,
            adapters=self.model.adapters.rows(table.adapters[lines.rows]),
        )
        # A row with a mask has no draft.
        logits_NV = constrained(logits_NV, {i: self.masks[row] for i, row in enumerate(rows) if row in self.masks})
        sampling = self._state(table).sampling(table, to_device(torch.from_numpy(lines.rows), self._device))
        sampling = replace(sampling, keys_N=keys_N)
        self._tokens_S[columns_N], self._logprobs_S[columns_N] = self._sampled(logits_NV, sampling)
        if table.has_tops:
            self._store_tops(columns_N, logits_NV, sampling)
        self.forwards += 1

    def prefill(
        self,
        rows: Sequence[int],
        pieces: Sequence[Sequence[int]],
        starts: Sequence[int],
        *,
        is_fresh: bool,
        adapters_N: NDArray[np.int32],
    ) -> Tensor:
        """Logits (N, V) after the last token of each piece. Piece i is written to `rows[i]` from position `starts[i]`."""
        adapters = self.model.adapters.rows(adapters_N)
        inputs = self._prefill_input(
            rows, pieces, starts, is_fresh=is_fresh, width=max(map(len, pieces)), adapters=adapters
        )
        self.forwards += 1
        return self.model.prefill(inputs, self.slots)

    def sample_first_tokens(
        self, table: RowTable, rows: Sequence[int], logits_MV: Tensor, sources: Sequence[int]
    ) -> None:
        """Sample the first token of each row from line `sources[i]` of `logits_MV`."""
        state = self._state(table)
        rows_N = to_device(torch.tensor(rows), self._device)
        if list(sources) != list(range(len(logits_MV))):
            logits_MV = logits_MV[to_device(torch.tensor(sources), self._device)]
        sampling = state.sampling(table, rows_N)
        logits_MV = constrained(logits_MV, {i: self.masks[row] for i, row in enumerate(rows) if row in self.masks})
        tokens_N, logprobs_N = self._sampled(logits_MV, sampling)
        self._tokens_S[rows_N] = tokens_N
        self._logprobs_S[rows_N] = logprobs_N
        if table.has_tops:
            self._store_tops(rows_N, logits_MV, sampling)

    def set_tokens(self, rows: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        """The last tokens of these rows, after drafts were accepted."""
        self._tokens_S[to_device(torch.from_numpy(rows), self._device)] = to_device(
            torch.from_numpy(tokens), self._device
        ).long()

    def move_tokens(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        sources_N = to_device(torch.tensor(sources), self._device)
        self._tokens_S[to_device(torch.tensor(targets), self._device)] = self._tokens_S[sources_N]

    def collect(self, *, has_tops: bool = False) -> PendingResults:
        """Start the transfer of the rows' tokens and logprobs to the host."""
        used = self._depth * (self._max_rows + 1)
        tensors = [self._tokens_S.to(torch.int32), self._logprobs_S]
        tensors += [self._top_tokens_SK, self._top_logprobs_SK] if has_tops else []
        arrived = None
        if self._device.type == "cuda":
            host = [
                torch.empty_like(t[:used], device="cpu", pin_memory=True).copy_(t[:used], non_blocking=True)
                for t in tensors
            ]
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            arrived.record()
        else:
            host = [tensor[:used].to("cpu", copy=True) for tensor in tensors]
        found = [tensor.view(self._depth, self._max_rows + 1, *tensor.shape[1:])[:, :-1] for tensor in host]
        self._depth = 1
        return PendingResults(found[0], found[1], arrived, *found[2:])

    def _store_tops(self, rows: slice | Tensor, logits_NV: Tensor, sampling: RowSampling) -> None:
        tokens_NK, logprobs_NK = most_likely(logits_NV, sampling, self._num_tops)
        self._top_tokens_SK[rows] = tokens_NK.to(torch.int32)
        self._top_logprobs_SK[rows] = logprobs_NK

    def _state(self, table: RowTable) -> "DeviceRows":
        return DeviceRows.of(to_device(torch.from_numpy(table.packed), self._device), table.max_rows)

    def _sampled(self, logits_NV: Tensor, rows: RowSampling) -> tuple[Tensor, Tensor]:
        if self._sampling_device == self._device:
            return self._sampler(logits_NV, rows)
        tokens_N, logprobs_N = self._sampler(logits_NV.to(self._sampling_device), rows.to(self._sampling_device))
        return tokens_N.to(self._device), logprobs_N.to(self._device)

    def _prefill_input(
        self,
        rows: Sequence[int],
        pieces: Sequence[Sequence[int]],
        starts: Sequence[int],
        *,
        is_fresh: bool,
        width: int,
        adapters: AdapterRows | None,
    ) -> PrefillInput:
        packed = packed_prefill(pieces, rows, starts, count=len(rows), width=width, scratch_row=self.slots.scratch_row)
        attention_length = min(self.slots.length, max(starts) + width)
        return unpacked_prefill(
            to_device(torch.from_numpy(packed), self._device),
            attention_length=attention_length,
            is_fresh=is_fresh,
            adapters=adapters,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRows:
    """The columns of `RowTable.packed` on the device."""

    keys_S: Tensor
    positions_S: Tensor
    temperatures_S: Tensor
    top_k_S: Tensor
    top_p_S: Tensor

    @classmethod
    def of(cls, packed: Tensor, max_rows: int) -> "DeviceRows":
        blocks = packed.view(6, max_rows)
        return cls(
            keys_S=packed[: 2 * max_rows].view(torch.int64),
            positions_S=blocks[2],
            temperatures_S=blocks[3].view(torch.float32),
            top_k_S=blocks[4],
            top_p_S=blocks[5].view(torch.float32),
        )

    def sampling(self, table: RowTable, rows: slice | Tensor) -> RowSampling:
        return self.sampling_with(
            rows, is_scaled=table.is_scaled, is_truncated=table.is_truncated, is_any_greedy=table.is_any_greedy
        )

    def sampling_with(
        self, rows: slice | Tensor, *, is_scaled: bool, is_truncated: bool, is_any_greedy: bool
    ) -> RowSampling:
        return RowSampling(
            keys_N=self.keys_S[rows],
            temperatures_N=self.temperatures_S[rows],
            top_k_N=self.top_k_S[rows],
            top_p_N=self.top_p_S[rows],
            is_scaled=is_scaled,
            is_truncated=is_truncated,
            is_any_greedy=is_any_greedy,
        )


def packed_prefill(
    pieces: Sequence[Sequence[int]],
    rows: Sequence[int],
    starts: Sequence[int],
    *,
    count: int,
    width: int,
    scratch_row: int,
) -> NDArray[np.int64]:
    """One line per piece: tokens padded to `width`, then row, start and last index. Extra lines use the scratch row."""
    packed = np.zeros((count, width + 3), dtype=np.int64)
    packed[:, width] = scratch_row
    for line, piece in enumerate(pieces):
        packed[line, : len(piece)] = piece
        # Padded with a token of the piece: any id works, and some models warn about their pad token.
        packed[line, len(piece) : width] = piece[-1]
        packed[line, width:] = (rows[line], starts[line], len(piece) - 1)
    return packed


def unpacked_prefill(
    packed: Tensor, *, attention_length: int, is_fresh: bool, adapters: AdapterRows | None
) -> PrefillInput:
    return PrefillInput(
        tokens_NC=packed[:, :-3],
        rows_N=packed[:, -3],
        starts_N=packed[:, -2],
        lasts_N=packed[:, -1],
        attention_length=attention_length,
        is_fresh=is_fresh,
        adapters=adapters,
    )
