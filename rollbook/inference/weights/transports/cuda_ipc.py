"""Weights in the memory of one GPU that trainer and replica share: the replica maps the trainer's buffer and copies from it.

No data passes through host memory.
"""

import asyncio
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from rollbook.contracts.errors import RunError
from rollbook.contracts.policy import Publication
from rollbook.contracts.weights import Adapter, TensorSource, WeightsError
from rollbook.inference.weights.transport import TransportOptions, update_message
from rollbook.inference.wire.weights import UpdateInfo
from rollbook.shared_weights.gpu_handles import opened, share
from rollbook.shared_weights.packing import PackedWeights, TensorHeader, header_fields, headers_of, pack, unpack_views


def open_transport(_name: str, _options: TransportOptions) -> "CudaIpcTransport":
    if not torch.cuda.is_available():
        raise RunError(
            "transfer = 'cuda_ipc' needs a CUDA GPU that trainer and policy share; remove inference.transfer, or set it to 'auto'"
        )
    return CudaIpcTransport()


def _packed_on(device: str, weights: Mapping[str, Tensor]) -> Tensor:
    """The block of packed weights. Others are packed, on a separate stream, so that this does not wait for the step that trains
    meanwhile. The weights are complete copies."""
    if isinstance(weights, PackedWeights) and weights.block.device.type == torch.device(device).type:
        return weights.block
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    with torch.cuda.stream(stream):
        packed = pack(weights, device=device)
    # Other processes read without this stream, so the copy must be complete.
    stream.synchronize()
    return packed


class CudaIpcTransport:
    """The trainer's end. Keeps packed weights on the GPU, so that training can continue while replicas read."""

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
        return update_message(publication, "cuda_ipc", handles=[share(packed)], **header_fields(headers))

    async def close(self) -> None:
        self._stored.clear()


def received_tensors(info: UpdateInfo) -> Mapping[str, TensorSource]:
    """The replica's end: views into the trainer's memory, from which the engine copies."""
    headers = info.tensor_headers()
    if not info.handles or len(info.handles) != 1:
        raise WeightsError("handles: exactly one handle is needed, for the packed weights")
    return unpack_views(opened(info.handles[0]), headers)
