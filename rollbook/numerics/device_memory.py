"""The memory of a device that engine and trainer share: a limit for this process, and what it holds but does not use."""

import gc

import torch


def limit_memory(device: str | torch.device, most_gb: float | None) -> None:
    """On a GPU: beyond the limit torch first returns cached memory, then raises `OutOfMemoryError`. None: no limit."""
    device = torch.device(device)
    if most_gb is None or device.type != "cuda":
        return
    # `cuda` means the current device, and the limit is set by number.
    index = torch.cuda.current_device() if device.index is None else device.index  # type: ignore[redundant-expr]  # torch's type
    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, most_gb * 1e9 / total), index)


def release_memory() -> None:
    """Free tensors that only reference cycles hold, and return cached memory to the device."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.cuda.empty_cache()
