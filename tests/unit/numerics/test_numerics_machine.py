"""What a replay compares with the machine that trained the steps."""

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rollbook.numerics import machine
from rollbook.numerics.machine import differences, machine_of_bits


def test_this_machine_has_a_version_of_torch_and_a_processor() -> None:
    assert machine_of_bits("cpu").keys() == {"torch", "processor"}


def test_on_a_gpu_the_libraries_that_compute_products_and_kernels_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue Jan 1\n", encoding="utf-8")
    installed = {"triton": "3.4.0", "nvidia-cublas-cu12": "12.8.4.1"}

    def version(package: str) -> str:
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(machine, "DRIVER_FILE", driver)
    monkeypatch.setattr(machine, "version", version)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="NVIDIA H200"))
    here = machine_of_bits("cuda")
    assert here == {
        "torch": torch.__version__,
        "GPU": "NVIDIA H200",
        "Triton": "3.4.0",
        "cuBLAS": "12.8.4.1",
        "driver": "570.86.15",
    }
    installed["triton"] = "3.5.0"
    assert differences(machine_of_bits("cuda"), here) == ["Triton 3.4.0 instead of 3.5.0"]
    assert differences(here, {"torch": str(torch.__version__)}) == [], "an earlier version recorded less"
