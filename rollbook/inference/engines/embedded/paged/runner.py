"""Runs packed steps: decoding rows and pieces of prompts in one forward, captured as CUDA graphs.

A new shape first runs directly and is captured afterwards, so that the capture does not repeat the step's work. Graphs hold the
addresses of the blocks and of the adapters: when either move, everything is captured again. An adapter that is updated in place
needs no new graphs.
"""

# S rows, N rows that sample, V vocabulary

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollbook.contracts.policy import MAX_TOP_LOGPROBS
from rollbook.inference.engines.embedded.adapters import Kind
from rollbook.inference.engines.embedded.model.capture import Capture, Operation
from rollbook.inference.engines.embedded.model.llama import LlamaForward
from rollbook.inference.engines.embedded.paged.block_cache import BlockCache
from rollbook.inference.engines.embedded.paged.step_input import (
    FEW_ROWS,
    ROW_BUCKETS,
    TABLE_CHANGES,
    TOKEN_BUCKETS,
    PromptSlice,
    StepShape,
    bucket,
    chunk_length,
    item_counts,
    layout_of,
)
from rollbook.inference.engines.embedded.row_table import DecodeLines, RowTable
from rollbook.inference.engines.embedded.runner import PendingResults, Sampler
from rollbook.inference.engines.embedded.sampling import constrained, most_likely
from rollbook.numerics.operations import CHUNK


@dataclass(frozen=True, slots=True)
class _CapturedStep:
    replay: Operation
    block: Tensor
    """The input that the graph reads."""


class PackedRunner:
    """Owns the rows' last tokens on the device. Used by one thread."""

    def __init__(
        self,
        model: LlamaForward,
        cache: BlockCache,
        *,
        max_rows: int,
        max_tokens: int,
        sampler: Sampler,
        capture: Capture,
        draft_tokens: int = 0,
    ) -> None:
        """`max_tokens`: of one step. `draft_tokens`: most that a row computes ahead."""
        self.model = model
        self.cache = cache
        self.forwards = self.captures = 0
        self._sampler = sampler
        self._capture = capture
        self._device = model.device
        self._max_rows, self._max_tokens = max_rows, max_tokens
        # A column for each row, and one for padding; then as many for each drafted token. Tokens and logprobs are in one tensor, so
        # that one transfer brings both to the host.
        columns = (max_rows + 1) * (1 + draft_tokens)
        self._max_lines = max_rows * (1 + draft_tokens)
        self._depth = 1
        self._results_2S = torch.zeros((2, columns), dtype=torch.int32, device=self._device)
        self._tokens_S = self._results_2S[0]
        self._logprobs_S = self._results_2S[1].view(torch.float32)
        num_tops = min(MAX_TOP_LOGPROBS, model.vocab_size)
        self._top_tokens_SK = torch.zeros(columns, num_tops, dtype=torch.int32, device=self._device)
        self._top_logprobs_SK = torch.zeros(columns, num_tops, dtype=torch.float32, device=self._device)
        self._steps: dict[tuple[StepShape, bool, bool, Kind], _CapturedStep] = {}
        self._generation = (-1, -1)

    @property
    def query_tile(self) -> int:
        return self.model.packed_ops.query_tile

    def warm_up(self) -> None:
        """Capture the common shapes before the first request."""
        self._drop_stale_graphs()
        keys = self.model.heads.keys
        shapes = [
            StepShape.decode(rows, key_heads=keys, is_split=bool(parts), parts=parts)
            for rows in self._decode_rows()
            for parts in self._usual_parts(rows)
        ]
        shapes += [
            StepShape.mixed(tokens, rows, key_heads=keys, query_tile=self.query_tile, is_split=bool(parts), parts=parts)
            for tokens in [
                *(tokens for tokens in TOKEN_BUCKETS if tokens < self._max_tokens),
                bucket(self._max_tokens, TOKEN_BUCKETS),
            ]
            for rows in self._mixed_rows()
            for parts in self._usual_parts(rows)
        ]
        table = RowTable(self._max_rows)
        nothing = DecodeLines.undrafted(np.empty(0, dtype=np.int64), table)
        kind = self.model.adapters.kind(table.adapters)
        for shape in shapes:
            layout = layout_of(shape)
            block = np.zeros(layout.length, dtype=np.int32)
            layout.fill(block, table, nothing, [], changes=self.cache.take_changes(0), chunk=1, query_tile=1)
            self._run(shape, torch.from_numpy(block), is_truncated=False, has_tops=False, kind=kind)

    def _decode_rows(self) -> list[int]:
        """The sizes of decode steps: of all rows, and of all rows with drafts."""
        most = min(self._max_tokens, self._max_lines)
        sizes = {rows for rows in ROW_BUCKETS if rows < most} | {self._max_rows}
        return sorted(sizes | {bucket(most, ROW_BUCKETS)} if most > self._max_rows else sizes)

    def _usual_parts(self, rows: int) -> list[int]:
        """The numbers of parts that steps of so many rows usually have; 0: no row is split."""
        if not self.model.is_exact:
            return [0, 1]  # chunks are as long as the parts of a batch require
        if self.model.max_model_len <= CHUNK:
            return [0]
        # Rows that share blocks may have more.
        known = self.cache.num_blocks * self.cache.block_size // CHUNK + rows
        most = min(rows * -(-self.model.max_model_len // CHUNK), known)
        return [0, *item_counts(rows, self.model.heads.keys, most)]

    def run(self, table: RowTable, lines: DecodeLines, pieces: Sequence[PromptSlice]) -> None:
        """Sample a token after each of `lines`, and in each row whose prompt is complete after its piece."""
        self._drop_stale_graphs()
        changes = self.cache.take_changes(TABLE_CHANGES)
        self._depth, count = lines.depth, len(lines.rows)
        keys, tile = self.model.heads.keys, self.query_tile
        lengths = lines.positions + 1
        if pieces:
            fitting = (rows for rows in self._mixed_rows() if count + len(pieces) <= rows)
            rows = next(fitting, bucket(count + len(pieces), ROW_BUCKETS))
        else:
            rows = bucket(count, ROW_BUCKETS)
            rows = min(self._max_rows, rows) if count <= self._max_rows else rows
        chunk = CHUNK if self.model.is_exact else chunk_length(lengths, rows=rows, key_heads=keys)
        is_split, parts = int(lengths.max(initial=0)) > chunk, int((-(-lengths // chunk)).sum())
        if pieces:
            tokens = bucket(count + sum(len(piece.tokens) for piece in pieces), TOKEN_BUCKETS)
            shape = StepShape.mixed(tokens, rows, key_heads=keys, query_tile=tile, is_split=is_split, parts=parts)
        else:
            shape = StepShape.decode(rows, key_heads=keys, is_split=is_split, parts=parts)
        layout = layout_of(shape)
        block = torch.empty(layout.length, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        layout.fill(block.numpy(), table, lines, pieces, changes=changes, chunk=chunk, query_tile=tile)
        kind = self.model.adapters.kind(table.owned_adapters)
        self._run(
            shape, block, is_truncated=table.is_truncated, has_tops=table.has_tops, kind=kind, masks=table.masks()
        )
        self.forwards += 1

    def collect(self, *, has_tops: bool = False) -> PendingResults:
        """Start the transfer of the rows' tokens and logprobs to the host."""
        used, rows = self._depth * (self._max_rows + 1), self._max_rows
        tensors = [self._results_2S[:, :used], *([self._top_tokens_SK, self._top_logprobs_SK] if has_tops else [])]
        on_device = [tensors[0].contiguous(), *(tensor[:used] for tensor in tensors[1:])]
        arrived = None
        if self._device.type == "cuda":
            host = [torch.empty_like(t, device="cpu", pin_memory=True).copy_(t, non_blocking=True) for t in on_device]
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            arrived.record()
        else:
            host = [tensor.clone() for tensor in on_device]
        # (2, offsets, rows), without the row for padding.
        results_2DS = host[0].view(2, self._depth, rows + 1)[:, :, :-1]
        tops = [tensor.view(self._depth, rows + 1, -1)[:, :-1] for tensor in host[1:]]
        self._depth = 1
        return PendingResults(results_2DS[0], results_2DS[1].view(torch.float32), arrived, *tops)

    def _run(
        self,
        shape: StepShape,
        host_block: Tensor,
        *,
        is_truncated: bool,
        has_tops: bool,
        kind: Kind,
        masks: Mapping[int, NDArray[np.uint8]] | None = None,
    ) -> None:
        """`masks`: the tokens that may come next in constrained rows. They change with every token: such a step is not captured."""
        known = self._steps.get((shape, is_truncated, has_tops, kind))
        if known is not None and not masks:
            known.block.copy_(host_block, non_blocking=True)
            known.replay()
            return
        layout = layout_of(shape)
        block = torch.empty(layout.length, dtype=torch.int32, device=self._device)
        block.copy_(host_block, non_blocking=True)
        # Scaled and greedy rows cost almost nothing on a GPU: one graph covers all of them.
        sampling = layout.sampling(block, is_scaled=True, is_truncated=is_truncated, is_any_greedy=True)
        rows_N = layout.sample_rows(block)
        sampling_rows = layout.sample_rows(host_block).tolist() if masks else []
        line_masks = {line: masks[row] for line, row in enumerate(sampling_rows) if masks and row in masks}

        def operation() -> None:
            adapters = self.model.adapters.rows_of_kind(kind, layout.adapters(block))
            step = layout.step(block, last_tokens_S=self._tokens_S, tables_SP=self.cache.tables_SP, adapters=adapters)
            logits_NV = constrained(self.model.packed(step, self.cache.layers, self.cache.routes), line_masks)
            tokens_N, logprobs_N = self._sampler(logits_NV, sampling)
            self._tokens_S[rows_N] = tokens_N.to(torch.int32)
            self._logprobs_S[rows_N] = logprobs_N
            if has_tops:
                top_tokens_NK, top_logprobs_NK = most_likely(logits_NV, sampling, self._top_tokens_SK.shape[1])
                self._top_tokens_SK[rows_N] = top_tokens_NK.to(torch.int32)
                self._top_logprobs_SK[rows_N] = top_logprobs_NK

        operation()
        if masks:
            return
        self._steps[shape, is_truncated, has_tops, kind] = _CapturedStep(self._capture(operation), block)
        self.captures += 1

    def _mixed_rows(self) -> list[int]:
        return [FEW_ROWS, self._max_rows] if self._max_rows > FEW_ROWS else [self._max_rows]

    def forget_graphs(self) -> None:
        """Free the memory of all captured steps. They are captured again when they are used."""
        self._steps.clear()

    def _drop_stale_graphs(self) -> None:
        generation = (self.cache.generation, self.model.adapters.generation)
        if self._generation != generation:
            self._steps.clear()
            self._generation = generation


def packed_error(model: LlamaForward, module: nn.Module, *, block_size: int, seed: int = 0) -> float:
    """The largest error of prefill, continued prefill and decode: root mean square difference from the module's logits, divided
    by their standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    # With windows, longer than what attention reads at once: then it skips keys.
    count = min(9 * block_size if model.has_windows else 2 * block_size + 6, model.max_model_len - 1)
    tokens = torch.randint(0, model.vocab_size, (count + 1,), generator=generator, dtype=torch.int32)
    cache = BlockCache(
        model.shapes[0],
        num_layers=len(model.shapes),
        block_size=block_size,
        max_rows=1,
        max_length=count + 1,
        dtype=model.cache_dtype,
        device=model.device,
    )
    width = cache.tables_SP.shape[1]
    cache.resize(width + 1)
    # In reverse, so that a block is not found by chance.
    cache.set_blocks(np.zeros(width, dtype=np.int64), np.arange(width), np.arange(width, 0, -1))
    table = RowTable(1)
    last_tokens_S = tokens[-1:].to(model.device).repeat(2)
    first = max(1, block_size + 3 if count > block_size + 3 else count // 2)
    errors: list[Tensor] = []
    with torch.inference_mode():
        expected_TV = module(input_ids=tokens[None].long().to(model.device), use_cache=False).logits[0].float()
        deviation = float(expected_TV.std()) + 1e-6
        for start, end in ((0, first), (first, count), (count, count + 1)):
            table.positions[0] = start
            is_decode = end > count
            keys, tile = model.heads.keys, model.packed_ops.query_tile
            pieces = [] if is_decode else [PromptSlice(0, start, tokens[start:end].numpy(), is_last=True)]
            for shape in (
                [StepShape.decode(1, key_heads=keys, is_split=is_split) for is_split in (False, True)]
                if is_decode
                else [StepShape.mixed(end - start, 1, key_heads=keys, query_tile=tile)]
            ):
                layout = layout_of(shape)
                block = torch.empty(layout.length, dtype=torch.int32)
                lines = DecodeLines.undrafted(np.arange(1 if is_decode else 0), table)
                changes = cache.take_changes(TABLE_CHANGES)
                layout.fill(block.numpy(), table, lines, pieces, changes=changes, chunk=block_size, query_tile=tile)
                step = layout.step(block.to(model.device), last_tokens_S=last_tokens_S, tables_SP=cache.tables_SP)
                logits_V = model.packed(step, cache.layers)[0].float()
                errors.append((logits_V - expected_TV[end - 1]).square().mean().sqrt())
        # torch's maximum, not Python's, because it returns NaN if any error is NaN.
        return float(torch.stack(errors).amax()) / deviation
