"""Steps as captured graphs: shapes are rounded up to buckets, and each bucket is captured once.

A shape that is met for the first time runs directly and is captured right after, so capturing never repeats what a step did.
Addresses are those of the slots at that time: when the slots have moved, everything is captured again.
"""

# S slots, N rows, C tokens a row

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rollbook.inference.engines.embedded.cache.slot_cache import SlotCache, on_device, settled
from rollbook.inference.engines.embedded.model.forward import SlotModel
from rollbook.inference.engines.embedded.row_table import RowTable
from rollbook.inference.engines.embedded.runner import DeviceRows, Runner, Sampler, packed_prefill, unpacked_prefill

Act = Callable[[], None]
Capture = Callable[[Act], Act]
"""Gives something that does the same again, faster. May be the identity."""

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
PREFILL_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SMALLEST_WIDTH = 16
LENGTH_BUCKET = 256
"""Where attention must be told how far to read, it is told a multiple of this."""


def bucket(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `size`; beyond them all, a multiple of the last."""
    for edge in buckets:
        if size <= edge:
            return edge
    return -(-size // buckets[-1]) * buckets[-1]


class CudaCapture:
    """Captures into one pool of memory: graphs are replayed one after the other, never side by side."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, act: Act) -> Act:
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread may be staging weights meanwhile, and that must not spoil the capture.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        ):
            act()
        replay: Act = graph.replay
        return replay


class GraphRunner(Runner):
    """For models whose forward launches the same kernels for the same shapes."""

    # A forward is launched at once, whatever its size: padding is cheaper than another forward.
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
        self._decodes: dict[tuple[int, int, bool, bool], Act] = {}
        self._prefills: dict[tuple[int, int], tuple[Act, Tensor, list[Tensor]]] = {}
        self._generation = -1
        self.captures = 0

    def warm_up(self) -> None:
        """Capture every decode bucket, before anything runs."""
        self._forget_outdated()
        reach = min(self.slots.length, LENGTH_BUCKET) if self._needs_length else 0
        most = min(self._max_rows, self.slots.rows)
        for rows in ROW_BUCKETS:
            self._decode_bucket(min(rows, most), reach, is_truncated=False, has_tops=False)
            if rows >= most:
                break

    def is_smaller(self, fewer: int, rows: int) -> bool:
        return bucket(fewer, ROW_BUCKETS) < bucket(rows, ROW_BUCKETS)

    def decode(self, table: RowTable, count: int, *, length: int) -> None:
        self._forget_outdated()
        self._upload(table)
        rows = min(self._max_rows, self.slots.rows, bucket(count, ROW_BUCKETS))
        reach = min(self.slots.length, -(-length // LENGTH_BUCKET) * LENGTH_BUCKET) if self._needs_length else 0
        self._decode_bucket(rows, reach, is_truncated=table.is_truncated, has_tops=table.has_tops)
        self.forwards += 1

    def prefill(
        self, rows: Sequence[int], pieces: Sequence[Sequence[int]], starts: Sequence[int], *, is_fresh: bool
    ) -> Tensor:
        width = bucket(max(map(len, pieces)), _widths(self.slots.length))
        if not is_fresh or width > self.slots.length:
            return super().prefill(rows, pieces, starts, is_fresh=is_fresh)
        self._forget_outdated()
        count = bucket(len(rows), PREFILL_ROWS)
        packed = packed_prefill(pieces, rows, starts, count=count, width=width, scratch_row=self.slots.scratch_row)
        staged = on_device(torch.from_numpy(packed), self._device)
        self.forwards += 1
        known = self._prefills.get((count, width))
        if known is not None:
            replay, given_packed, held = known
            given_packed.copy_(staged)
            replay()
            return held[0][: len(rows)]
        given = unpacked_prefill(staged, reach=width, is_fresh=True)
        held = []

        def act() -> None:
            held[:] = [self.model.prefill(given, self.slots)]

        act()
        logits_NV = held[0]
        self._prefills[count, width] = (self._captured(act), staged, held)
        return logits_NV[: len(rows)]

    def _decode_bucket(self, rows: int, reach: int, *, is_truncated: bool, has_tops: bool) -> None:
        known = self._decodes.get((rows, reach, is_truncated, has_tops))
        if known is not None:
            known()
            return
        # Scaling and greedy rows cost next to nothing on a GPU: one graph serves them all.
        sampling = self._rows.sampling_as(slice(0, rows), is_scaled=True, is_truncated=is_truncated, is_any_greedy=True)

        def act() -> None:
            logits_NV = self.model.decode(
                self._tokens_S[:rows], self._rows.positions_S[:rows], self.slots, length=reach
            )
            tokens_N, logprobs_N = self._sampled(logits_NV, sampling)
            self._tokens_S[:rows] = tokens_N
            self._logprobs_S[:rows] = logprobs_N
            if has_tops:
                self._note_tops(slice(0, rows), logits_NV, sampling)

        act()
        self._decodes[rows, reach, is_truncated, has_tops] = self._captured(act)

    def _captured(self, act: Act) -> Act:
        self.captures += 1
        return self._capture(act)

    def _upload(self, table: RowTable) -> None:
        self._packed.copy_(settled(torch.from_numpy(table.packed), self._device), non_blocking=True)

    def _state(self, table: RowTable) -> DeviceRows:
        self._upload(table)
        return self._rows

    def _forget_outdated(self) -> None:
        if self._generation != self.slots.generation:
            self._decodes.clear()
            self._prefills.clear()
            self._generation = self.slots.generation


def _widths(longest: int) -> list[int]:
    widths = [SMALLEST_WIDTH]
    while widths[-1] < longest:
        widths.append(widths[-1] * 2)
    return widths
