"""The process group of a trainer and its vLLM replicas: when it is formed, and formed again."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rollbook.contracts.errors import EpisodeError, RunError, TransientError
from rollbook.inference.connection import PolicyConnection
from rollbook.inference.vllm.client import VllmServerApi
from rollbook.inference.weights import process_group
from rollbook.inference.weights.client import WeightTransferClient
from rollbook.inference.weights.process_group import WeightGroup
from rollbook.inference.weights.transport import update_message
from rollbook.inference.wire.weights import InitInfo, UpdateInfo
from tests.parts.inference.models import publication

INFO = update_message(publication(1, "d"), "nccl")


class Transport:
    """Records the groups that were formed and what was sent."""

    takes_gpu_weights = False

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.sent: list[str] = []

    def invitations(self, world_sizes: Sequence[int]) -> Sequence[InitInfo]:
        return [InitInfo(backend="nccl", rank_offset=1 + sum(world_sizes[:at])) for at in range(len(world_sizes))]

    async def assemble(self, world_size: int) -> None:
        self.sizes.append(world_size)

    async def send(self, location: str) -> None:
        self.sent.append(location)

    async def put(self, *_: Any, **__: Any) -> str:
        return "here"

    async def keep_only(self, _: object) -> None: ...

    def update_info(self, *_: Any) -> UpdateInfo:
        return INFO

    async def close(self) -> None: ...


class Servers(VllmServerApi):
    """Replicas with two processes each."""

    def __init__(self) -> None:
        super().__init__("nccl")
        self.members: dict[str, InitInfo] = {}
        self.refuses: Callable[[str], bool] = lambda _: False
        self.may_leave = asyncio.Event()
        self.may_leave.set()

    async def world_size(self, replica: PolicyConnection) -> int:
        return 2

    async def join(self, replica: PolicyConnection, info: InitInfo) -> None:
        self.members[replica.url] = info

    async def leave(self, replica: PolicyConnection) -> None:
        await self.may_leave.wait()
        del self.members[replica.url]

    async def update(self, replica: PolicyConnection, info: UpdateInfo) -> None:
        if self.refuses(replica.url) or replica.url not in self.members:
            raise EpisodeError("400: /init_weight_transfer_engine first")


def replicas(*names: str) -> list[PolicyConnection]:
    return [PolicyConnection(None, name) for name in names]  # type: ignore[arg-type]  # nothing is requested


async def test_a_group_is_formed_once_and_again_when_its_members_change() -> None:
    transport, servers = Transport(), Servers()
    group = WeightGroup(transport, servers)
    pair = replicas("a", "b")
    await group.send(pair, INFO, "1")
    await group.send(pair, INFO, "2")
    assert transport.sizes == [5]
    assert [servers.members[name].rank_offset for name in ("a", "b")] == [1, 3]
    await group.send(pair[:1], INFO, "3")
    assert (transport.sizes, transport.sent) == ([5, 3], ["1", "2", "3"])


async def test_a_replica_that_restarted_joins_the_group_again() -> None:
    transport, servers = Transport(), Servers()
    group = WeightGroup(transport, servers)
    pair = replicas("a", "b")
    await group.send(pair, INFO, "1")
    del servers.members["b"]
    with pytest.raises(TransientError, match="a new weight group is formed"):
        await group.send(pair, INFO, "2")
    await group.send(pair, INFO, "2")
    assert transport.sizes == [5, 5]
    assert set(servers.members) == {"a", "b"}


async def test_a_refusal_by_a_new_group_is_final() -> None:
    servers = Servers()
    servers.refuses = lambda name: name == "b"
    with pytest.raises(EpisodeError, match="400"):
        await WeightGroup(Transport(), servers).send(replicas("a", "b"), INFO, "1")


async def test_a_group_is_dissolved_although_a_member_does_not_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "LEAVE_S", 0.1)
    servers = Servers()
    group = WeightGroup(Transport(), servers)
    await group.send(replicas("a"), INFO, "1")
    servers.may_leave.clear()
    async with asyncio.timeout(20):
        await group.dissolve()


def test_servers_that_join_no_group_are_refused_with_the_transport_that_they_support() -> None:
    with pytest.raises(RunError, match="set it to 'auto'"):
        WeightTransferClient(["http://a"], request_s=1.0, transport=Transport())
