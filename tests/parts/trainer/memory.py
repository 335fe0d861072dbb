"""Memory of tests: its peak in this process, and a device with little of it, where large passes fail as on a full GPU."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rollbook.trainer.data.passes import Microbatch
from rollbook.trainer.model.policy_model import PolicyModel


@contextmanager
def small_device(
    max_tokens: int, *, fits_first: int = 0, before_pass: Callable[[Microbatch], None] = lambda micro: None
) -> Iterator[list[int]]:
    """Passes of more than `max_tokens` tokens run out of memory, after `fits_first` that fit. Yields the sizes of all passes.

    `before_pass` is called before each pass that fits.
    """
    sizes: list[int] = []
    compute = PolicyModel.token_logprobs

    def token_logprobs(model: PolicyModel, micro: Microbatch, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append(micro.inputs_BT.size)
        if micro.inputs_BT.size > max_tokens and len(sizes) > fits_first:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {micro.inputs_BT.size}.00 MiB")
        before_pass(micro)
        return compute(model, micro, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PolicyModel, "token_logprobs", token_logprobs)
        yield sizes


class PeakMemory:
    """Samples the memory of this process, without the pages of mapped files, which the kernel can drop."""

    def __enter__(self) -> "PeakMemory":
        self.start = self.peak = self._now()
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_done.set()
        self._thread.join()

    @property
    def rise(self) -> int:
        return self.peak - self.start

    def _sample(self) -> None:
        while not self._is_done.wait(0.001):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> int:
        _, resident, of_files, *_ = Path("/proc/self/statm").read_text(encoding="utf-8").split()
        return (int(resident) - int(of_files)) * os.sysconf("SC_PAGE_SIZE")
