"""What decides the last bits of a computation besides its settings: the processor or GPU, and the libraries that compute on it."""

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

DRIVER = "driver"
DRIVER_FILE = Path("/proc/driver/nvidia/version")
CUBLAS = ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cublas-cu13")
"""The packages that contain it, by version of CUDA. A build of torch with its own copy has none of them."""


def machine_of_bits(device: str) -> dict[str, str]:
    """Equal machines compute the same bits from the same steps."""
    found = {"torch": str(torch.__version__)}
    if device != "cuda":
        return {**found, "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"}
    found["GPU"] = torch.cuda.get_device_properties(torch.cuda.current_device()).name
    driver = re.search(r"\d+\.[\d.]+", DRIVER_FILE.read_text(encoding="utf-8")) if DRIVER_FILE.exists() else None
    installed = {
        "Triton": _version_of("triton"),
        "cuBLAS": next(filter(None, map(_version_of, CUBLAS)), None) or torch.version.cuda,
        DRIVER: None if driver is None else driver.group(),
    }
    return found | {name: number for name, number in installed.items() if number is not None}


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """What differs, in words, of what is known of both."""
    names = [name for name in here if there.get(name, here[name]) != here[name]]
    return [f"{name} {there[name]} instead of {here[name]}" for name in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedAnswer:
    """What a sampler drew to show which bits it computes on this machine."""

    how: str
    """The batch, in words."""
    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    temperature: float
