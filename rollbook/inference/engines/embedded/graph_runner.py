"""Runs steps as captured CUDA graphs: shapes are rounded up to buckets, and each bucket is captured once.

A new shape first runs directly and is captured afterwards, so that the capture does not repeat the step's work. Graphs hold the
addresses of the slots: when the slots move, everything is captured again.
"""

# S slots, N rows, C tokens a row

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rollbook.inference.engines.embedded.model.forward import SlotModel
from rollbook.inference.engines.embedded.row_table import RowTable
from rollbook.inference.engines.embedded.runner import DeviceRows, Runner, Sampler, packed_prefill, unpacked_prefill
from rollbook.inference.engines.embedded.slot_cache import SlotCache, host_copy, to_device

Operation = Callable[[], None]
Capture = Callable[[Operation], Operation]
"""Returns a function that repeats the operation, faster. May be the identity."""

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
PREFILL_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SMALLEST_WIDTH = 16
LENGTH_BUCKET = 256
"""Where attention needs to know how many positions to read, the number is rounded up to a multiple of this."""


def bucket(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `size`; above the largest, a multiple of it."""
    for limit in buckets:
        if size <= limit:
            return limit
    return -(-size // buckets[-1]) * buckets[-1]


class CudaCapture:
    """Captures into one memory pool: graphs are replayed one after the other, never concurrently."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, operation: Operation) -> Operation:
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread may stage weights at the same time, which must not break the capture.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        ):
            operation()
        replay: Operation = graph.replay
        return replay


class GraphRunner(Runner):
    """For models whose forward launches the same kernels for the same shapes."""

    # A forward is a single launch, whatever its size: padding is cheaper than another forward.
    forward_cost_tokens = 4096

    def __init__(
        self,
        model: SlotModel,
        slots: SlotCache,
        *,
        max_rows: int,
        sampler: Sampler,
        capture: Capture,
        needs_length: bool,
    ) -> None:
        super().__init__(model, slots, max_rows=max_rows, sampler=sampler)
        self._capture = capture
        self._needs_length = needs_length
        self._packed = torch.zeros(6 * max_rows, dtype=torch.int32, device=model.device)
        self._rows = DeviceRows.of(self._packed, max_rows)
        self._decodes: dict[tuple[int, int, bool, bool], Operation] = {}
        self._prefills: dict[tuple[int, int], tuple[Operation, Tensor, list[Tensor]]] = {}
        self._generation = -1
        self.captures = 0

    def warm_up(self) -> None:
        """Capture every decode bucket before the first request."""
        self._drop_stale_graphs()
        attention_length = min(self.slots.length, LENGTH_BUCKET) if self._needs_length else 0
        most = min(self._max_rows, self.slots.rows)
        for rows in ROW_BUCKETS:
            self._decode_bucket(min(rows, most), attention_length, is_truncated=False, has_tops=False)
            if rows >= most:
                break

    def is_smaller(self, fewer: int, rows: int) -> bool:
        return bucket(fewer, ROW_BUCKETS) < bucket(rows, ROW_BUCKETS)

    def decode(self, table: RowTable, count: int, *, length: int) -> None:
        if self.masks:
            # Masks change with every token, so these steps are not captured.
            super().decode(table, count, length=length)
            return
        self._drop_stale_graphs()
        self._upload(table)
        rows = min(self._max_rows, self.slots.rows, bucket(count, ROW_BUCKETS))
        attention_length = (
            min(self.slots.length, -(-length // LENGTH_BUCKET) * LENGTH_BUCKET) if self._needs_length else 0
        )
        self._decode_bucket(rows, attention_length, is_truncated=table.is_truncated, has_tops=table.has_tops)
        self.forwards += 1

    def prefill(
        self, rows: Sequence[int], pieces: Sequence[Sequence[int]], starts: Sequence[int], *, is_fresh: bool
    ) -> Tensor:
        width = bucket(max(map(len, pieces)), _widths(self.slots.length))
        if not is_fresh or width > self.slots.length:
            return super().prefill(rows, pieces, starts, is_fresh=is_fresh)
        self._drop_stale_graphs()
        count = bucket(len(rows), PREFILL_ROWS)
        packed = packed_prefill(pieces, rows, starts, count=count, width=width, scratch_row=self.slots.scratch_row)
        staged = to_device(torch.from_numpy(packed), self._device)
        self.forwards += 1
        known = self._prefills.get((count, width))
        if known is not None:
            replay, packed_input, output = known
            packed_input.copy_(staged)
            replay()
            return output[0][: len(rows)]
        inputs = unpacked_prefill(staged, attention_length=width, is_fresh=True)
        output = []

        def prefill() -> None:
            output[:] = [self.model.prefill(inputs, self.slots)]

        prefill()
        logits_NV = output[0]
        self._prefills[count, width] = (self._captured(prefill), staged, output)
        return logits_NV[: len(rows)]

    def _decode_bucket(self, rows: int, attention_length: int, *, is_truncated: bool, has_tops: bool) -> None:
        known = self._decodes.get((rows, attention_length, is_truncated, has_tops))
        if known is not None:
            known()
            return
        # Scaled and greedy rows cost almost nothing on a GPU: one graph covers all of them.
        sampling = self._rows.sampling_with(
            slice(0, rows), is_scaled=True, is_truncated=is_truncated, is_any_greedy=True
        )

        def decode() -> None:
            logits_NV = self.model.decode(
                self._tokens_S[:rows], self._rows.positions_S[:rows], self.slots, length=attention_length
            )
            tokens_N, logprobs_N = self._sampled(logits_NV, sampling)
            self._tokens_S[:rows] = tokens_N
            self._logprobs_S[:rows] = logprobs_N
            if has_tops:
                self._store_tops(slice(0, rows), logits_NV, sampling)

        decode()
        self._decodes[rows, attention_length, is_truncated, has_tops] = self._captured(decode)

    def _captured(self, operation: Operation) -> Operation:
        self.captures += 1
        return self._capture(operation)

    def _upload(self, table: RowTable) -> None:
        self._packed.copy_(host_copy(torch.from_numpy(table.packed), self._device), non_blocking=True)

    def _state(self, table: RowTable) -> DeviceRows:
        self._upload(table)
        return self._rows

    def _drop_stale_graphs(self) -> None:
        if self._generation != self.slots.generation:
            self._decodes.clear()
            self._prefills.clear()
            self._generation = self.slots.generation


def _widths(longest: int) -> list[int]:
    widths = [SMALLEST_WIDTH]
    while widths[-1] < longest:
        widths.append(widths[-1] * 2)
    return widths
