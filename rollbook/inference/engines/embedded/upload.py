"""Copies tensors from main memory to a GPU while other threads launch work there.

Allocations of pinned memory, and of many blocks of GPU memory, would stop those launches. So the tensors become one block, and
their bytes pass through two windows of pinned memory: one is filled while the other is transferred.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rollbook.contracts.weights import RawTensor
from rollbook.inference.weights.transports.packing import layout, unpack_views

WINDOW_BYTES = 16 << 20


class Upload:
    """On another device than a GPU, the same without pinned memory."""

    def __init__(self, device: torch.device, *, window_bytes: int = WINDOW_BYTES) -> None:
        self._device = device
        self._window_bytes = window_bytes
        is_gpu = device.type == "cuda"
        self._windows = [torch.empty(window_bytes, dtype=torch.uint8, pin_memory=is_gpu) for _ in range(2)]
        self._transferred = [torch.cuda.Event() for _ in self._windows] if is_gpu else []  # type: ignore[no-untyped-call]

    def __call__(self, tensors: Sequence[RawTensor]) -> dict[str, Tensor]:
        """The tensors on the device, by name. Complete when the current stream is."""
        headers = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
        ranges, size = layout(headers)
        bodies = [np.frombuffer(tensor.data or b"", dtype=np.uint8) for tensor in tensors]
        block = torch.empty(size, dtype=torch.uint8, device=self._device)
        first = 0
        for number, start in enumerate(range(0, size, self._window_bytes)):
            end = min(start + self._window_bytes, size)
            window = self._windows[number % 2]
            if self._transferred and number >= 2:
                self._transferred[number % 2].synchronize()
            filled = window.numpy()
            while first < len(ranges) and ranges[first].end <= start:
                first += 1
            for part, body in zip(ranges[first:], bodies[first:], strict=True):
                if part.start >= end:
                    break
                begin, stop = max(part.start, start), min(part.end, end)
                filled[begin - start : stop - start] = body[begin - part.start : stop - part.start]
            block[start:end].copy_(window[: end - start], non_blocking=True)
            if self._transferred:
                self._transferred[number % 2].record()
        return unpack_views(block, headers)
