"""Weights in the memory of one GPU that trainer and replica share: the replica maps the trainer's buffer and copies from it.

No data passes through host memory. Handles are plain JSON; nothing is unpickled. A handle names the GPU by its UUID, because the
device index can differ between processes.
"""

import asyncio
import base64
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollbook.contracts.errors import RunError
from rollbook.contracts.policy import Publication
from rollbook.contracts.weights import Adapter, TensorSource, WeightsError
from rollbook.inference.weights.transport import TransportOptions, update_message
from rollbook.inference.weights.transports.packing import TensorHeader, header_fields, headers_of, pack, unpack_views
from rollbook.inference.wire.weights import UpdateInfo


def open_transport(_name: str, _options: TransportOptions) -> "CudaIpcTransport":
    if not torch.cuda.is_available():
        raise RunError(
            "transfer = 'cuda_ipc' needs a CUDA GPU that trainer and policy share; remove inference.transfer, or set it to 'auto'"
        )
    return CudaIpcTransport()


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
        raise WeightsError(f"weights were offered in the memory of GPU {gpu}; this server sees {', '.join(local_gpus)}")
    try:
        parts = [
            base64.b64decode(part["bytes"], validate=True) if "bytes" in part else part["value"]
            for part in handle["parts"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"the handle of the weights cannot be read: {error}") from error
    return [local_gpus[str(gpu)], *parts[1:]]


def _packed_on(device: str, weights: Mapping[str, Tensor]) -> Tensor:
    """Pack on a separate stream, so that this does not wait for the step that trains meanwhile. The weights are complete copies."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    with torch.cuda.stream(stream):
        packed = pack(weights, device=device)
    # Other processes read without this stream, so the copy must be complete.
    stream.synchronize()
    return packed


def _share(packed: Tensor) -> Sequence[Any]:
    parts: Sequence[Any] = packed.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return parts


def local_gpus() -> dict[str, int]:
    return {str(torch.cuda.get_device_properties(index).uuid): index for index in range(torch.cuda.device_count())}


class CudaIpcTransport:
    """The trainer's end. Keeps packed copies on the GPU, so that training can continue while replicas read."""

    takes_gpu_weights = True

    def __init__(self) -> None:
        self._stored: dict[str, tuple[list[TensorHeader], Tensor]] = {}

    async def put(
        self, publication: Publication, weights: Mapping[str, Tensor], *, adapter: Adapter | None = None
    ) -> str:
        location = f"cuda_ipc:{publication.id}"
        # Weights in main memory, as after a restart, are uploaded as one block.
        device = str(next(iter(weights.values())).device)
        packed = await asyncio.to_thread(_packed_on, device if device.startswith("cuda") else "cuda", weights)
        self._stored[location] = (headers_of(weights), packed)
        return location

    async def keep_only(self, locations: Collection[str]) -> None:
        self._stored = {location: stored for location, stored in self._stored.items() if location in locations}

    def update_info(self, publication: Publication, location: str) -> UpdateInfo:
        headers, packed = self._stored[location]
        gpu = str(torch.cuda.get_device_properties(packed.device).uuid)
        handles = [encode_handle(_share(packed), gpu=gpu)]
        return update_message(publication, "cuda_ipc", handles=handles, **header_fields(headers))

    async def close(self) -> None:
        self._stored.clear()


def received_tensors(info: UpdateInfo) -> Mapping[str, TensorSource]:
    """The replica's end: views into the trainer's memory, from which the engine copies."""
    if not torch.cuda.is_available():
        raise WeightsError("weights were offered in GPU memory, but this server has no CUDA GPU")
    headers = info.tensor_headers()
    if not info.handles or len(info.handles) != 1:
        raise WeightsError("handles: exactly one handle is needed, for the packed weights")
    parts = decode_handle(info.handles[0], local_gpus=local_gpus())
    storage = torch.UntypedStorage._new_shared_cuda(*parts)
    packed = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return unpack_views(packed, headers)
