"""Weights in the memory of one GPU that trainer and replica share: the replica maps the trainer's buffer and copies out of it.

Nothing crosses the host. Handles travel as plain JSON; nothing is unpickled. They name a GPU by its own id, since the same card may
have another number in the other process.
"""

import asyncio
import base64
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollbook.contracts.adapter import Adapter
from rollbook.contracts.errors import RunError
from rollbook.contracts.policy import Publication
from rollbook.inference.engine import TensorSource, WeightsError
from rollbook.inference.weights.transport import WayPlace, message
from rollbook.inference.weights.transports.packing import Head, heads_of, pack, unpack_views
from rollbook.inference.wire.weights import Backend, InitInfo, UpdateInfo


def open_way(_name: str, _place: WayPlace) -> "CudaIpcWay":
    if not torch.cuda.is_available():
        raise RunError("transfer = 'cuda_ipc' needs a CUDA GPU that trainer and policy share; use 'shared_memory'")
    return CudaIpcWay()


def open_receiver(_info: InitInfo) -> "CudaIpcReceiver":
    if not torch.cuda.is_available():
        raise WeightsError("weights were offered in GPU memory, and this server sees no CUDA GPU")
    return CudaIpcReceiver()


def encode_handle(parts: Sequence[Any], *, gpu: str) -> dict[str, Any]:
    """What `UntypedStorage._share_cuda_` gives, as JSON: numbers as they are, bytes in base64."""
    return {
        "gpu": gpu,
        "parts": [
            {"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else {"value": part} for part in parts
        ],
    }


def decode_handle(handle: Mapping[str, Any], *, local_gpus: Mapping[str, int]) -> list[Any]:
    """The parts again, with the GPU's number as this process counts. Raises `WeightsError` for a GPU that is not here."""
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
    """On a stream of its own, so that it waits for nothing that the trainer computes meanwhile."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    if str(next(iter(weights.values())).device).startswith("cuda"):
        stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        packed = pack(weights, device=device)
    # Other processes read without our stream: everything must have arrived.
    stream.synchronize()
    return packed


def _shared(packed: Tensor) -> Sequence[Any]:
    parts: Sequence[Any] = packed.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return parts


def local_gpus() -> dict[str, int]:
    return {str(torch.cuda.get_device_properties(at).uuid): at for at in range(torch.cuda.device_count())}


class CudaIpcWay:
    """The sender: keeps packed copies on the GPU, so training may go on while replicas read."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[list[Head], Tensor]] = {}

    @property
    def backend(self) -> Backend:
        return "cuda_ipc"

    async def put(
        self, publication: Publication, weights: Mapping[str, Tensor], *, adapter: Adapter | None = None
    ) -> str:
        location = f"cuda_ipc:{publication.id}"
        # The trainer hands over copies in main memory, which stay as they are while it learns on; they go up again in one piece.
        device = str(next(iter(weights.values())).device)
        packed = await asyncio.to_thread(_packed_on, device if device.startswith("cuda") else "cuda", weights)
        self._kept[location] = (heads_of(weights), packed)
        return location

    async def keep_only(self, locations: Collection[str]) -> None:
        self._kept = {location: kept for location, kept in self._kept.items() if location in locations}

    @property
    def is_group(self) -> bool:
        return False

    def invitations(self, world_sizes: Sequence[int]) -> Sequence[InitInfo]:
        return ()

    async def assemble(self, world_size: int) -> None:
        return None

    def update_info(self, publication: Publication, location: str) -> UpdateInfo:
        heads, packed = self._kept[location]
        gpu = str(torch.cuda.get_device_properties(packed.device).uuid)
        return message(
            publication,
            "cuda_ipc",
            names=[name for name, _, _ in heads],
            dtype_names=[dtype for _, dtype, _ in heads],
            shapes=[list(shape) for _, _, shape in heads],
            handles=[encode_handle(_shared(packed), gpu=gpu)],
        )

    async def send(self, location: str) -> None:
        return None

    async def close(self) -> None:
        self._kept.clear()


class CudaIpcReceiver:
    """A replica's end: views into the trainer's memory, which the engine copies out of."""

    async def take(self, info: UpdateInfo) -> Mapping[str, TensorSource]:
        heads = info.tensor_heads()
        if not info.handles or len(info.handles) != 1:
            raise WeightsError("handles: one handle is needed, of the packed weights")
        parts = decode_handle(info.handles[0], local_gpus=local_gpus())
        storage = torch.UntypedStorage._new_shared_cuda(*parts)
        packed = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return unpack_views(packed, heads)

    async def close(self) -> None:
        return None
