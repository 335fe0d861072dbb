"""Measures the time of an operation on a device, of copies, and of the kernels of one step."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.report import print_status


def timed_ms(operation: Callable[[], None], device: str, repeats: int = 50) -> float:
    for _ in range(5):
        operation()
    if device == "cpu":
        started = time.perf_counter()
        for _ in range(repeats):
            operation()
        return (time.perf_counter() - started) / repeats * 1e3
    times = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(repeats // 5):
            operation()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / (repeats // 5))
    return float(statistics.median(times))


def kernel_split(operation: Callable[[], None]) -> dict[str, float]:
    """Milliseconds of a step by kind of kernel, from the profiler."""
    kinds = {
        "decode attention": ("_attend_decode", "_join_splits"),
        "prefill attention": ("_attend_tiles",),
        "norms": ("_rms_norm",),
        "rotary and cache write": ("_rotate_and_store",),
        "gates": ("_gate",),
        "sampling": ("_reduce_tiles", "_choose"),
        "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "splitk", "wgmma", "xmma"),
    }
    repeats = 10
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(repeats):
                operation()
            torch.cuda.synchronize()
    except RuntimeError as error:
        print_status(f"  no split of the step's time: the profiler failed: {error}")
        return {}
    split = dict.fromkeys([*kinds, "other kernels and copies"], 0.0)
    for event in profile.key_averages():
        spent = float(getattr(event, "self_device_time_total", 0.0)) / repeats / 1e3
        name = event.key.lower()
        kind = next(
            (k for k, parts in kinds.items() if any(part in name for part in parts)), "other kernels and copies"
        )
        split[kind] += spent
    split["sum of kernels"] = sum(split.values())
    return {name: round(spent, 4) for name, spent in split.items()}


def copy_limit(device: str, size: int) -> float:
    """Seconds to copy that many bytes from pinned memory to the device."""
    if device == "cpu":
        source = torch.empty(size, dtype=torch.uint8)
        started = time.perf_counter()
        source.clone()
        return time.perf_counter() - started
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    target.copy_(source)
    torch.cuda.synchronize()
    started = time.perf_counter()
    target.copy_(source)
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def copy_rate(device: str) -> float:
    """Bytes per second, reads plus writes, of a large copy within the device."""
    size = 1 << (32 if device == "cuda" else 26)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ms = timed_ms(partial(_copy, source, target), device, repeats=10)
    del source, target
    if device == "cuda":
        torch.cuda.empty_cache()
    return 2 * size / ms * 1e3
