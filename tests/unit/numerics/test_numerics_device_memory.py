"""The limit of memory that a process sets for its GPU."""

from types import SimpleNamespace

import pytest
import torch
from torch.cuda._utils import _get_device_index

from rollbook.contracts.errors import RunError, is_out_of_memory
from rollbook.numerics.device_memory import limit_memory


@pytest.mark.parametrize(("device", "index"), [("cuda", 3), ("cuda:1", 1), (torch.device("cuda", 2), 2)])
def test_the_limit_is_set_for_the_device_by_its_number(
    monkeypatch: pytest.MonkeyPatch, device: str | torch.device, index: int
) -> None:
    limits = {}

    def set_fraction(fraction: float, of: torch.device | int | None = None) -> None:
        limits[_get_device_index(of)] = fraction  # refuses a device without a number, as torch does

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 10**9))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_fraction)
    limit_memory(device, 20.0)
    assert limits == {index: 0.25}
    limit_memory(device, 100.0)
    assert limits == {index: 1.0}


def test_nothing_is_limited_without_a_limit_or_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *_: pytest.fail("was limited"))
    limit_memory("cuda", None)
    limit_memory("cpu", 1.0)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("no memory for 5 blocks"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes"), True),
        (RunError("publication 3 was refused: CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ChildProcessError("step 1 does not fit: CUDA out of memory. The trainer is restarted"), False),
        (None, False),
    ],
)
def test_a_full_device_is_recognised_however_it_is_reported(error: BaseException | None, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
