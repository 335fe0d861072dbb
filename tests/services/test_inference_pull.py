"""Weights that replicas fetch over HTTP: once for each machine, from the trainer or from each other, only what changed."""

import asyncio
import os
import secrets
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.access.server import serve_app
from rollbook.access.tokens import Secret, bearer_token
from rollbook.concurrency.sockets import listening_socket
from rollbook.contracts.errors import TransientError
from rollbook.contracts.policy import Publication, PublicationId
from rollbook.contracts.weights import WeightsError
from rollbook.inference.server.routes.responses import Handler
from rollbook.inference.weights import node_copies, range_client
from rollbook.inference.weights.node_copies import NodeCopies
from rollbook.inference.weights.range_client import RangeClient
from rollbook.inference.weights.ranges import DATA_ROUTE, MANIFEST_ROUTE, Find, RangeRoutes, manifest_of
from rollbook.inference.wire.weights import RangeManifest

RANGE = 64
SIZE = 40 * RANGE + 7


class Server:
    """A server of ranges: the trainer, or a replica."""

    def __init__(self, find: Find, token: str) -> None:
        self.find = find
        self.url = ""
        self.served = 0
        """Requests for data."""
        self.secret = Secret(token)

    @web.middleware
    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not self.secret.matches(bearer_token(request.headers.get("Authorization"))):
            raise web.HTTPUnauthorized
        self.served += request.path.endswith("/data")
        return await handler(request)


@asynccontextmanager
async def serving(find: Find, token: str) -> AsyncIterator[Server]:
    server = Server(find, token)
    routes = RangeRoutes(find)
    app = web.Application(middlewares=[server.check])
    app.add_routes([web.get(MANIFEST_ROUTE, routes.manifest), web.get(DATA_ROUTE, routes.data)])
    async with serve_app(app, listening_socket("127.0.0.1", 0)) as server.url:
        yield server


class Trainer:
    """Published files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files: dict[int, tuple[RangeManifest, Path]] = {}

    def publish(self, number: int, content: bytes) -> Publication:
        path = self.directory / f"published-{number}"
        path.write_bytes(content)
        digest = f"digest-{number}"
        self.files[number] = (manifest_of(path, number, digest, range_bytes=RANGE), path)
        return Publication(id=PublicationId(number), epoch=1, step=number, digest=digest)


@pytest.fixture
def token() -> str:
    return secrets.token_hex(16)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


Nodes = Callable[[str], NodeCopies]


@pytest.fixture
def nodes(tmp_path: Path, token: str) -> Iterator[Nodes]:
    """Opens the copies of a replica on the machine with this name."""
    with ExitStack() as stack:

        def open_node(name: str) -> NodeCopies:
            (tmp_path / name).mkdir(exist_ok=True)
            return stack.enter_context(closing(NodeCopies(token, parent=tmp_path / name)))

        yield open_node


async def test_replicas_of_one_machine_fetch_a_publication_once(nodes: Nodes, trainer: Trainer, token: str) -> None:
    content = os.urandom(SIZE)
    published = trainer.publish(1, content)
    replicas = [nodes("node") for _ in range(3)]
    async with serving(trainer.files.get, token) as server:
        paths = [await replica.fetch(published, [server.url]) for replica in replicas]
    assert len(set(paths)) == 1
    assert paths[0].read_bytes() == content
    assert sorted(replica.fetched_bytes for replica in replicas) == [0, 0, SIZE]
    for replica in replicas:
        assert paths[0].exists()
        replica.close()
    assert not paths[0].exists()


async def test_a_machine_that_has_a_publication_serves_it_when_the_trainer_is_gone(
    nodes: Nodes, trainer: Trainer, token: str
) -> None:
    content = os.urandom(SIZE)
    published = trainer.publish(1, content)
    first, second = nodes("first"), nodes("second")
    async with serving(first.find, token) as peer:
        async with serving(trainer.files.get, token) as server:
            await first.fetch(published, [server.url])
        path = await second.fetch(published, [server.url, peer.url])
        assert path.read_bytes() == content
        assert peer.served == len(trainer.files[1][0].digests)
        third = nodes("third")
    with pytest.raises(TransientError, match="no source has publication 1"):
        await third.fetch(published, [server.url, peer.url])


async def test_sources_that_appear_during_a_fetch_are_used(nodes: Nodes, trainer: Trainer, token: str) -> None:
    published = trainer.publish(1, os.urandom(SIZE))
    first, second = nodes("first"), nodes("second")
    async with serving(trainer.files.get, token) as server, serving(first.find, token) as peer:
        await first.fetch(published, [server.url])
        trainer.files[1][0].copies.append(peer.url)
        await second.fetch(published, [server.url])
        assert peer.served > 0


async def test_damaged_ranges_of_a_replica_are_fetched_elsewhere_and_those_of_the_trainer_are_refused(
    nodes: Nodes, trainer: Trainer, token: str
) -> None:
    content = os.urandom(SIZE)
    published = trainer.publish(1, content)
    first, second, third = (nodes(name) for name in ("first", "second", "third"))
    async with serving(trainer.files.get, token) as server, serving(first.find, token) as peer:
        damaged = await first.fetch(published, [server.url])
        damaged.write_bytes(os.urandom(SIZE))
        path = await second.fetch(published, [server.url, peer.url])
        assert path.read_bytes() == content
        trainer.files[1][1].write_bytes(os.urandom(SIZE))
        with pytest.raises(WeightsError, match="announced with"):
            await third.fetch(published, [server.url])
        assert third.find(1) is None


async def test_a_wrong_token_gets_nothing(nodes: Nodes, trainer: Trainer, token: str) -> None:
    published = trainer.publish(1, os.urandom(SIZE))
    async with serving(trainer.files.get, "token-of-another-run") as server:
        with pytest.raises(TransientError, match="401"):
            await nodes("node").fetch(published, [server.url])
        async with aiohttp.ClientSession() as session, session.get(f"{server.url}/published_weights/1") as response:
            assert response.status == 401


async def test_copies_of_killed_replicas_are_removed_by_the_next_one(
    nodes: Nodes, trainer: Trainer, token: str
) -> None:
    published = trainer.publish(1, os.urandom(SIZE))
    parent = trainer.directory / "node"
    parent.mkdir()
    code = "import sys, pathlib; from rollbook.inference.weights.node_copies import NodeCopies\n"
    code += "copies = NodeCopies(sys.argv[1], parent=pathlib.Path(sys.argv[2])); copies._folder(7).mkdir()\n"
    code += "import os; os.kill(os.getpid(), 9)"
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", code, token, str(parent))
    assert await killed.wait() == -signal.SIGKILL
    assert list(parent.glob("*/publication-*7"))
    replica = nodes("node")
    assert not list(parent.glob("*/publication-*7"))
    async with serving(trainer.files.get, token) as server:
        assert (await replica.fetch(published, [server.url])).exists()


@settings(max_examples=10)
@given(changes=st.lists(st.sets(st.integers(0, SIZE - 1), max_size=5), min_size=1, max_size=4))
async def test_only_ranges_that_changed_are_fetched(
    tmp_path_factory: pytest.TempPathFactory, changes: list[set[int]]
) -> None:
    tmp_path, token = tmp_path_factory.mktemp("ranges"), secrets.token_hex(16)
    trainer, replica = Trainer(tmp_path), NodeCopies(token, parent=tmp_path)
    content = bytearray(os.urandom(SIZE))
    async with serving(trainer.files.get, token) as server:
        await replica.fetch(trainer.publish(1, bytes(content)), [server.url])
        for number, positions in enumerate(changes, start=2):
            for position in positions:
                content[position] ^= 1
            before = replica.fetched_bytes
            path = await replica.fetch(trainer.publish(number, bytes(content)), [server.url])
            assert path.read_bytes() == content
            ranges = {position // RANGE for position in positions}
            expected = sum(min(RANGE, SIZE - index * RANGE) for index in ranges)
            assert replica.fetched_bytes - before == expected
    replica.close()


async def test_a_publication_that_was_replaced_under_its_number_is_not_loaded(
    nodes: Nodes, trainer: Trainer, token: str
) -> None:
    published = trainer.publish(1, os.urandom(SIZE))
    old = Publication(id=published.id, epoch=1, step=1, digest="another digest")
    async with serving(trainer.files.get, token) as server:
        with pytest.raises(TransientError, match="other weights with the number 1"):
            await nodes("node").fetch(old, [server.url])
        async with RangeClient(1, [server.url], token=token) as client:
            assert (await client.manifest()).size == SIZE


@pytest.mark.parametrize("step", ["make_private_directory", "has_locked"])
async def test_a_replica_that_opens_while_the_last_one_closes_can_fetch(
    nodes: Nodes, trainer: Trainer, token: str, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    published = trainer.publish(1, os.urandom(SIZE))
    last = [nodes("node")]
    original = getattr(node_copies, step)

    def while_the_last_one_closes(*arguments: Any) -> Any:
        if step == "make_private_directory":
            original(*arguments)
        while last:
            last.pop().close()
        return original(*arguments) if step == "has_locked" else None

    monkeypatch.setattr(node_copies, step, while_the_last_one_closes)
    replica = nodes("node")
    async with serving(trainer.files.get, token) as server:
        assert (await replica.fetch(published, [server.url])).exists()


async def test_a_source_that_does_not_respond_is_used_last(
    nodes: Nodes, trainer: Trainer, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_client, "RANGE_S", 0.5)
    content = os.urandom(SIZE)
    published = trainer.publish(1, content)
    requests = []

    async def hang(request: web.Request) -> web.Response:
        requests.append(request.path)
        await asyncio.Event().wait()
        return web.Response()

    app = web.Application()
    app.router.add_get("/{path:.*}", hang)
    async with (
        serving(trainer.files.get, token) as server,
        serve_app(app, listening_socket("127.0.0.1", 0)) as hanging_url,
    ):
        path = await nodes("node").fetch(published, [server.url, hanging_url])
    assert path.read_bytes() == content
    assert len(requests) <= range_client.CONCURRENT_RANGES


async def test_ranges_of_a_damaged_copy_are_not_reused(nodes: Nodes, trainer: Trainer, token: str) -> None:
    content = os.urandom(SIZE)
    replica = nodes("node")
    async with serving(trainer.files.get, token) as server:
        damaged = await replica.fetch(trainer.publish(1, content), [server.url])
        damaged.write_bytes(b"\0" * RANGE + content[RANGE:])
        path = await replica.fetch(trainer.publish(2, content), [server.url])
    assert path.read_bytes() == content
    assert replica.fetched_bytes == SIZE + RANGE


async def test_a_fetch_that_fails_writes_to_no_other_file(
    trainer: Trainer, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.publish(1, os.urandom(2 * RANGE))
    manifest, _ = trainer.files[1]
    manifest.digests[1] = "not the digest of this range"
    is_writing, may_write = threading.Event(), threading.Event()
    write_at = range_client._write_at

    def slow_write(descriptor: int, data: bytes, start: int) -> None:
        is_writing.set()
        may_write.wait(2)
        write_at(descriptor, data, start)

    monkeypatch.setattr(range_client, "_write_at", slow_write)
    async with serving(trainer.files.get, token) as server, RangeClient(1, [server.url], token=token) as client:
        with pytest.raises(WeightsError, match="announced with"):
            await client.fetch(manifest, tmp_path / "fetched", reusable={})
        assert is_writing.is_set()
        with ExitStack() as stack:
            # One of these files gets the descriptor of the closed one.
            others = [stack.enter_context((tmp_path / f"other-{n}").open("wb")) for n in range(8)]
            may_write.set()
            await asyncio.sleep(0.5)
        assert [Path(other.name).stat().st_size for other in others] == [0] * 8
