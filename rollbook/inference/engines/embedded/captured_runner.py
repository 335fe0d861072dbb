"""Decode steps of Hugging Face modules, captured: one launch for the host instead of a thousand (decision 0054).

A step computes the first N rows over T positions; both are rounded up, and each pair is captured when it is first needed. Its
inputs are in one block on the device. Rows that do not decode are computed, too: their next prefill overwrites what they hold.
Prefills are called directly. Weights and adapters are updated in place, so a publication needs no new capture.
"""

# S rows of the table, N rows of a step, V vocabulary

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rollbook.inference.engines.embedded.adapters import Kind
from rollbook.inference.engines.embedded.model.capture import Capture, HostWaits, Operation
from rollbook.inference.engines.embedded.model.forward import PrefillInput, SlotModel
from rollbook.inference.engines.embedded.paged.step_input import ROW_BUCKETS, bucket
from rollbook.inference.engines.embedded.row_table import RowTable
from rollbook.inference.engines.embedded.runner import DeviceRows, Runner, Sampler
from rollbook.inference.engines.embedded.sampling import constrained, sample
from rollbook.inference.engines.embedded.slot_cache import RowMemory, host_copy

SPAN_BUCKETS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768)
"""Numbers of positions that attention reads. Masked positions take their part of the time: at most half of it."""
COLUMNS = 7
"""Of the table, on the device: those of `RowTable.packed`, and the adapter."""


@dataclass(frozen=True, slots=True)
class StepKey:
    """Steps with equal keys run the same operations."""

    rows: int
    span: int
    is_truncated: bool
    has_tops: bool
    adapters: Kind


class CapturedRunner(Runner):
    def __init__(
        self, model: SlotModel, slots: RowMemory, *, max_rows: int, capture: Capture, sampler: Sampler = sample
    ) -> None:
        super().__init__(model, slots, max_rows=max_rows, sampler=sampler)
        self.captures = 0
        self._capture = capture
        self._block = torch.zeros(COLUMNS * max_rows, dtype=torch.int32, device=self._device)
        self._steps: dict[StepKey, Operation] = {}
        self._generation = (-1, -1)

    def is_smaller(self, fewer: int, rows: int) -> bool:
        return bucket(fewer, ROW_BUCKETS) < bucket(rows, ROW_BUCKETS)

    def decode(self, table: RowTable, count: int, *, length: int) -> None:
        self._drop_stale_graphs()
        self.slots.before_decode(np.flatnonzero(table.is_active[:count]).tolist())
        key = StepKey(
            rows=min(bucket(count, ROW_BUCKETS), self.slots.rows),
            span=min(bucket(length, SPAN_BUCKETS), self.slots.length),
            is_truncated=table.is_truncated,
            has_tops=table.has_tops,
            adapters=self.model.adapters.kind(table.owned_adapters),
        )
        host = torch.from_numpy(np.concatenate([table.packed, table.adapters]))
        self._block.copy_(host_copy(host, self._device), non_blocking=True)
        self.forwards += 1
        if self.masks:
            # They change with every token: such a step is not captured.
            self._step(key)
        elif (replay := self._steps.get(key)) is not None:
            replay()
        else:
            # A new shape runs directly first, so that the capture repeats no work.
            self._step(key)
            self._steps[key] = self._capture(lambda: self._step(key))
            self.captures += 1

    def _step(self, key: StepKey) -> None:
        # Scaled and greedy rows cost almost nothing on a GPU: one graph covers all of them.
        rows = slice(0, key.rows)
        state = DeviceRows.of(self._block[: -self._max_rows], self._max_rows)
        adapters_N = self._block[-self._max_rows :][rows]
        sampling = state.sampling_with(rows, is_scaled=True, is_truncated=key.is_truncated, is_any_greedy=True)
        logits_NV = self.model.decode(
            self._tokens_S[rows],
            state.positions_S[rows].long(),
            self.slots,
            rows=range(key.rows),
            length=key.span,
            adapters=self.model.adapters.rows_of_kind(key.adapters, adapters_N),
        )
        logits_NV = constrained(logits_NV, {row: mask for row, mask in self.masks.items() if row < key.rows})
        self._tokens_S[rows], self._logprobs_S[rows] = self._sampler(logits_NV, sampling)
        if key.has_tops:
            self._store_tops(rows, logits_NV, sampling)

    def _drop_stale_graphs(self) -> None:
        generation = (self.slots.generation, self.model.adapters.generation)
        if self._generation != generation:
            self._steps.clear()
            self._generation = generation


def captured_error(model: SlotModel, module: nn.Module, capture: Capture, *, seed: int = 0) -> float:
    """The largest error of a captured step and of its repetition, for two rows of different lengths: root mean square difference
    from the module's logits, divided by their standard deviation. Raises `HostWaitError` if no graph can contain the step."""
    generator = torch.Generator().manual_seed(seed)
    count = min(12, model.max_model_len - 3)
    tokens_2T = torch.randint(0, model.vocab_size, (2, count + 3), generator=generator).to(model.device)
    # Row 1 has half the tokens of row 0.
    starts = (count, max(1, count // 2))
    slots = model.new_memory()
    slots.resize(2, min(64, model.max_model_len))
    lines_2 = torch.arange(2, device=model.device)
    inputs_2, positions_2 = torch.zeros_like(lines_2), torch.tensor(starts, device=model.device)
    logits_2V = torch.zeros((2, model.vocab_size), device=model.device)

    def operation() -> None:
        # A range, as in a step: the numbers of a list would be copied to the device, which no graph can contain.
        logits_2V.copy_(model.decode(inputs_2, positions_2, slots, rows=range(2), length=slots.length))

    def directly() -> None:
        with HostWaits():
            operation()

    with torch.inference_mode():
        expected = [
            module(input_ids=tokens_2T[row : row + 1, : start + 3], use_cache=False).logits[0].float()
            for row, start in enumerate(starts)
        ]
        for row, start in enumerate(starts):
            row_1 = lines_2[row : row + 1]
            prompt = PrefillInput(
                tokens_NC=tokens_2T[row : row + 1, :start],
                rows_N=row_1,
                starts_N=torch.zeros_like(row_1),
                lasts_N=torch.full_like(row_1, start - 1),
                attention_length=start,
                is_fresh=True,
            )
            model.prefill(prompt, slots)
        errors: list[Tensor] = []
        replay: Callable[[], None] = directly
        for step in range(3):
            places = [start + step for start in starts]
            positions_2.copy_(torch.tensor(places))
            inputs_2.copy_(torch.stack([tokens_2T[row, place] for row, place in enumerate(places)]))
            slots.before_decode([0, 1])
            replay()
            wanted_2V = torch.stack([expected[row][place] for row, place in enumerate(places)])
            errors += list((logits_2V - wanted_2V).square().mean(dim=-1).sqrt())
            if step == 0:
                replay = capture(operation)
        # torch's maximum, not Python's, because it returns NaN if any error is NaN.
        return float(torch.stack(errors).amax()) / (float(expected[0].std()) + 1e-6)
