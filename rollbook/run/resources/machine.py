"""What this machine offers a run: GPUs, cores, main memory. Reads the driver and the kernel; imports no torch."""

import ctypes
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

NVML = "libnvidia-ml.so.1"
TEXT_BYTES = 96
BFLOAT16_CAPABILITY = 8
"""GPUs compute in bfloat16 from this compute capability (Ampere) on."""
UNKNOWN_MEMORY_BYTES = 8 * 10**9
"""Used if the system does not report its memory."""
GB = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    number: int
    """As CUDA counts it: with CUDA_VISIBLE_DEVICES, among the visible ones."""
    name: str
    memory_bytes: int
    used_bytes: int = 0
    """By other processes, when it was read."""
    capability: int = BFLOAT16_CAPABILITY
    """Major number of the compute capability."""
    uuid: str = ""

    @property
    def has_bfloat16(self) -> bool:
        return self.capability >= BFLOAT16_CAPABILITY

    def __str__(self) -> str:
        return f"GPU {self.number}: {self.name}, {self.memory_bytes / GB:.0f} GB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    gpus: tuple[Gpu, ...] = ()
    """Visible GPUs that torch can use."""
    unusable_gpus: tuple[Gpu, ...] = ()
    unusable_because: str = ""
    cores: int = 1
    memory_bytes: int = UNKNOWN_MEMORY_BYTES


@cache
def this_machine() -> Machine:
    gpus = tuple(visible(list(driver_gpus()), os.environ.get("CUDA_VISIBLE_DEVICES")))
    fault = _torch_fault() if gpus else ""
    return Machine(
        gpus=() if fault else gpus,
        unusable_gpus=gpus if fault else (),
        unusable_because=fault,
        cores=_cores(),
        memory_bytes=_memory_bytes(),
    )


def visible(gpus: Sequence[Gpu], value: str | None) -> Iterator[Gpu]:
    """The GPUs that CUDA shows with this CUDA_VISIBLE_DEVICES, in its order. As CUDA does, stops at the first unknown entry."""
    if value is None:
        yield from gpus
        return
    for number, name in enumerate(part.strip() for part in value.split(",")):
        found = [gpu for gpu in gpus if name == str(gpu.number) or (name and gpu.uuid.startswith(name))]
        if not found:
            return
        yield replace(found[0], number=number)


class _MemoryInfo(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def driver_gpus() -> Iterator[Gpu]:
    """The GPUs that the NVIDIA driver reports; none without a driver."""
    try:
        nvml = ctypes.CDLL(NVML)
    except OSError:
        return
    if nvml.nvmlInit_v2() != 0:
        return
    try:
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for number in range(count.value):
            device, memory = ctypes.c_void_p(), _MemoryInfo()
            name, uuid = (ctypes.create_string_buffer(TEXT_BYTES) for _ in range(2))
            major, minor = ctypes.c_int(BFLOAT16_CAPABILITY), ctypes.c_int()
            if nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)) != 0:
                continue
            if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) != 0:
                continue
            nvml.nvmlDeviceGetName(device, name, TEXT_BYTES)
            nvml.nvmlDeviceGetUUID(device, uuid, TEXT_BYTES)
            nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
            yield Gpu(
                number=number,
                name=name.value.decode(errors="replace"),
                memory_bytes=memory.total,
                used_bytes=memory.used,
                capability=major.value,
                uuid=uuid.value.decode(errors="replace"),
            )
    finally:
        nvml.nvmlShutdown()


def _torch_fault() -> str:
    """Why torch cannot use a GPU, or nothing. Reads its version file: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed"
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    if re.search(r"^cuda\b.*=\s*None", text, re.MULTILINE):
        return "the installed torch is a build for CPUs; install one for CUDA"
    return ""


def _cores() -> int:
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def _memory_bytes() -> int:
    found = UNKNOWN_MEMORY_BYTES
    try:
        found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min(found, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError, AttributeError):
        return found
