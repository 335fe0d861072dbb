"""Handles of GPU memory for other processes on the same GPU (CUDA IPC).

Handles are plain JSON; nothing is unpickled. A handle names the GPU by its UUID, because the device index can differ between
processes. It opens the whole allocation, and is valid while the process that made it lives and keeps the memory.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollbook.contracts.weights import WeightsError


def share(packed: Tensor) -> dict[str, Any]:
    """A handle of the memory of a GPU tensor."""
    parts: Sequence[Any] = packed.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return encode_handle(parts, gpu=str(torch.cuda.get_device_properties(packed.device).uuid))


def opened(handle: Mapping[str, Any]) -> Tensor:
    """The memory of a handle as bytes. Raises `WeightsError` if its GPU is not visible here."""
    if not torch.cuda.is_available():
        raise WeightsError("weights were offered in GPU memory, but this process has no CUDA GPU")
    parts = decode_handle(handle, local_gpus=local_gpus())
    storage = torch.UntypedStorage._new_shared_cuda(*parts)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def encode_handle(parts: Sequence[Any], *, gpu: str) -> dict[str, Any]:
    """The result of `UntypedStorage._share_cuda_` as JSON: numbers unchanged, bytes in base64."""
    return {
        "gpu": gpu,
        "parts": [
            {"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else {"value": part} for part in parts
        ],
    }


def decode_handle(handle: Mapping[str, Any], *, local_gpus: Mapping[str, int]) -> list[Any]:
    """The parts, with this process's index of the GPU. Raises `WeightsError` if the GPU is not visible here."""
    gpu = handle.get("gpu")
    if gpu not in local_gpus:
        raise WeightsError(
            f"weights were offered in the memory of GPU {gpu}; this process sees {', '.join(local_gpus)}"
        )
    try:
        parts = [
            base64.b64decode(part["bytes"], validate=True) if "bytes" in part else part["value"]
            for part in handle["parts"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"the handle of the weights cannot be read: {error}") from error
    return [local_gpus[str(gpu)], *parts[1:]]


def local_gpus() -> dict[str, int]:
    return {str(torch.cuda.get_device_properties(index).uuid): index for index in range(torch.cuda.device_count())}
