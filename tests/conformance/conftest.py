"""The stores that every conformance test of a store runs on."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from rollbook.ledger.config import Durability
from rollbook.ledger.store import Store
from rollbook.ledger.stores.postgres.store import open_postgres_store
from rollbook.ledger.stores.sqlite.store import open_memory_store, open_sqlite_store
from tests.parts.ledger.postgres import shared_server

Opener = Callable[[Path], AbstractAsyncContextManager[Store]]


@asynccontextmanager
async def memory(_: Path) -> AsyncIterator[Store]:
    async with open_memory_store() as store:
        yield store


@asynccontextmanager
async def sqlite_power_loss(directory: Path) -> AsyncIterator[Store]:
    async with open_sqlite_store(directory) as store:
        yield store


@asynccontextmanager
async def sqlite_process_crash(directory: Path) -> AsyncIterator[Store]:
    async with open_sqlite_store(directory, durability=Durability.PROCESS_CRASH) as store:
        yield store


@asynccontextmanager
async def postgres(_: Path) -> AsyncIterator[Store]:
    async with open_postgres_store(shared_server().fresh_url()) as store:
        yield store


@asynccontextmanager
async def postgres_with_objects(directory: Path) -> AsyncIterator[Store]:
    async with open_postgres_store(shared_server().fresh_url(), payloads=str(directory)) as store:
        yield store


@pytest.fixture(params=[memory, sqlite_power_loss, sqlite_process_crash, postgres, postgres_with_objects])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    opener: Opener = request.param
    async with opener(tmp_path) as opened:
        yield opened
