"""The sending side of one way to move weights. The files in `transfer/` are the ways; `OPENERS` names them.

A way satisfies `ports.WeightStage` (the trainer puts weights there) and tells replicas where to find them. Ways over files need
nothing else; ways over a process group also send while the replicas take.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from rollbook.contracts.adapter import Adapter
from rollbook.contracts.plugin import load_on_demand
from rollbook.contracts.policy import Publication
from rollbook.inference.wire.weights import Backend, InitInfo, UpdateInfo


class TransferWay(Protocol):
    @property
    def backend(self) -> Backend: ...

    async def put(self, publication: Publication, weights: Mapping[str, Any], *, adapter: Adapter | None = None) -> str:
        """Keep these weights where replicas can take them; gives their location. The caller's tensors may change afterwards.

        With `adapter` they are its tensors. A way over files writes them as PEFT does.
        """

    async def keep_only(self, locations: Collection[str]) -> None:
        """Everything else may be let go."""

    @property
    def is_group(self) -> bool:
        """Whether replicas must join before the first update, and take all at once."""

    def invitations(self, world_sizes: Sequence[int]) -> Sequence[InitInfo]:
        """What each replica is told to join, in their order. `world_sizes`: the processes each of them brings."""

    async def assemble(self, world_size: int) -> None:
        """Form the group, while the replicas join by their invitations. Called again when the replicas in service change."""

    def update_info(self, publication: Publication, location: str) -> UpdateInfo:
        """What a replica needs to take them."""

    async def send(self, location: str) -> None:
        """Move them, while the replicas take. Returns when they are out."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WayPlace:
    """Where this host may keep weights."""

    directory: str
    """On disk, in the run directory."""
    host: str = "127.0.0.1"
    """Under which replicas reach the trainer."""
    timeout_s: float = 60.0


OPENERS: dict[str, str] = {
    "directory": "rollbook.inference.weights.transports.files:open_way",
    "shared_memory": "rollbook.inference.weights.transports.files:open_way",
    "gloo": "rollbook.inference.weights.transports.gloo:open_way",
    "cuda_ipc": "rollbook.inference.weights.transports.cuda_ipc:open_way",
    "nccl": "rollbook.inference.weights.transports.nccl:open_way",
}


def open_way(name: str, place: WayPlace) -> TransferWay:
    """Imported only where it was chosen. Raises `RunError` where this machine cannot go it."""
    return cast(TransferWay, load_on_demand(OPENERS[name])(name, place))


def message(publication: Publication, backend: Backend, **rest: Any) -> UpdateInfo:
    return UpdateInfo(
        publication=publication.id,
        step=publication.step,
        epoch=publication.epoch,
        digest=publication.digest,
        backend=backend,
        **rest,
    )
