"""How much memory the cache may take: what the operator said, or a share of what is free."""

import os
from pathlib import Path

import torch

GPU_SHARE = 0.85
"""Of what is free once the weights are loaded; the rest is for activations, logits and captured graphs."""
HOST_SHARE = 0.5
"""A CPU engine shares its memory with everybody else on the machine."""
UNKNOWN_BYTES = 2 << 30
"""Where the system does not tell."""


def cache_bytes(device: torch.device, kv_memory_mb: float | str) -> int:
    """Bytes of keys and values at most. They are taken as they are needed, not at once."""
    if not isinstance(kv_memory_mb, str):
        return int(kv_memory_mb * 1_000_000)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * GPU_SHARE)
    return int(available_host_bytes() * HOST_SHARE)


def available_host_bytes() -> int:
    """What could be taken without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError, AttributeError):
        return UNKNOWN_BYTES
