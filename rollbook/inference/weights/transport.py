"""Sends weights from the trainer to the replicas. Each module in `transports/` is one transport.

A transport satisfies `ports.WeightStage` (the trainer puts weights there) and describes to replicas where to read them. A
transport over a process group also sends while the replicas receive.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from rollbook.contracts.plugin import load_on_demand
from rollbook.contracts.policy import Publication
from rollbook.contracts.weights import Adapter
from rollbook.inference.wire.weights import Backend, InitInfo, UpdateInfo


class WeightTransport(Protocol):
    @property
    def takes_gpu_weights(self) -> bool:
        """Whether weights in GPU memory are sent from there."""

    async def put(self, publication: Publication, weights: Mapping[str, Any], *, adapter: Adapter | None = None) -> str:
        """Store weights, or an adapter's tensors, for the replicas. Returns their location.

        The caller may change its tensors afterwards.
        """

    async def keep_only(self, locations: Collection[str]) -> None:
        """Free the weights at all other locations."""

    def update_info(self, publication: Publication, location: str) -> UpdateInfo:
        """The update request for a replica."""

    async def close(self) -> None: ...


@runtime_checkable
class GroupTransport(WeightTransport, Protocol):
    """A transport whose replicas join a process group first, and all receive an update at the same time."""

    def invitations(self, world_sizes: Sequence[int]) -> Sequence[InitInfo]:
        """The join request for each replica, in order. `world_sizes`: the number of processes of each replica."""

    async def assemble(self, world_size: int) -> None:
        """Form the group while the replicas join. Called again when the set of replicas in service changes."""

    async def send(self, location: str) -> None:
        """Send the weights at `location` while the replicas receive them."""


@runtime_checkable
class SharingTransport(WeightTransport, Protocol):
    """A transport whose replicas may fetch weights from each other."""

    def add_copy(self, location: str, url: str) -> None:
        """The replica at `url` has loaded the weights at `location`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
    directory: str
    """Directory of weight files, in the run directory."""
    host: str = "127.0.0.1"
    """The address at which replicas reach the trainer."""
    token: str | None = None
    """Replicas send it when they fetch weights from the trainer and from each other."""


# Each module is imported only where its transport is configured.
_OPENERS = {
    "directory": "rollbook.inference.weights.transports.files:open_transport",
    "shared_memory": "rollbook.inference.weights.transports.files:open_transport",
    "cuda_ipc": "rollbook.inference.weights.transports.cuda_ipc:open_transport",
    "pull": "rollbook.inference.weights.transports.pull:open_transport",
    "nccl": "rollbook.inference.vllm.nccl:open_transport",
}


def open_transport(name: str, options: TransportOptions) -> WeightTransport:
    """Raises `RunError` if this machine does not support the transport."""
    transport: WeightTransport = load_on_demand(_OPENERS[name])(name, options)
    return transport


def update_message(publication: Publication, backend: Backend, **fields: Any) -> UpdateInfo:
    return UpdateInfo(
        publication=publication.id,
        step=publication.step,
        epoch=publication.epoch,
        digest=publication.digest,
        backend=backend,
        **fields,
    )
