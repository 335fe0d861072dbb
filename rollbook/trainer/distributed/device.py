"""What is asked of the device itself: its peak, and how much memory was held."""

import resource
import sys

import torch

from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.flops import peak_flops


def devices_peak_flops(config: TrainerConfig) -> float | None:
    """Of all devices that train; None where the peak is not known, as of a CPU, or not the one for this precision."""
    if config.device != "cuda" or config.compute_dtype != "bfloat16":
        return None
    one = peak_flops(torch.cuda.get_device_name())
    return None if one is None else one * config.ranks


def peak_memory_gb(device: str) -> float:
    """The most that was held at a time, by tensors on a GPU, or by this process on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    # Kilobytes everywhere but on macOS.
    unit = 1.0 if sys.platform == "darwin" else 1024.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
