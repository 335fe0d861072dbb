"""From a store's URL to the store: `sqlite:///DIRECTORY` or `postgresql://user@host/database`.

A driver is imported only by the process whose URL asks for it, through the table below.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Protocol, cast

from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import load_on_demand
from rollbook.ledger.config import Durability
from rollbook.ledger.store import Reader, Store
from rollbook.ledger.stores.sqlite.store import open_readonly as open_file_readonly
from rollbook.ledger.stores.sqlite.store import open_sqlite_store
from rollbook.ledger.stores.sqlite.store import reclaim as reclaim_file

SQLITE = "sqlite:///"
DATABASES = {
    "postgresql://": "rollbook.ledger.stores.postgres.store",
    "postgres://": "rollbook.ledger.stores.postgres.store",
}
EXTRA = "postgres"


class DatabaseModule(Protocol):
    def open_postgres_store(self, url: str, *, durability: Durability) -> AbstractAsyncContextManager[Store]: ...
    def open_readonly(self, url: str) -> AbstractContextManager[Reader]: ...
    def reclaim(self, url: str) -> tuple[int, int]: ...


def sqlite_url(directory: Path) -> str:
    """Three slashes and the directory: a relative one is relative to where the service is started."""
    return f"{SQLITE}{directory}"


@asynccontextmanager
async def open_store(url: str, *, durability: Durability = Durability.POWER_LOSS) -> AsyncIterator[Store]:
    if url.startswith(SQLITE):
        async with open_sqlite_store(_directory(url), durability=durability) as file:
            yield file
    else:
        async with _database(url).open_postgres_store(url, durability=durability) as database:
            yield database


@contextmanager
def open_reader(url: str) -> Iterator[Reader]:
    """To look at a ledger, served or not: nothing is locked, changed or moved on."""
    if url.startswith(SQLITE):
        with open_file_readonly(_directory(url)) as file:
            yield file
    else:
        with _database(url).open_readonly(url) as database:
            yield database


def reclaim(url: str) -> tuple[int, int]:
    """Give the room of what was deleted back to the disk. Returns the bytes before and after."""
    return reclaim_file(_directory(url)) if url.startswith(SQLITE) else _database(url).reclaim(url)


def _directory(url: str) -> Path:
    where = url.removeprefix(SQLITE)
    if not where:
        raise RunError(f"{url!r} names no directory: write {SQLITE}DIRECTORY")
    return Path(where)


def _database(url: str) -> DatabaseModule:
    module = next((module for scheme, module in DATABASES.items() if url.startswith(scheme)), None)
    if module is None:
        scheme = url.partition("://")[0]
        raise RunError(
            f"a store of scheme {scheme!r} is unknown: use {SQLITE}DIRECTORY or postgresql://USER@HOST/DATABASE"
        )
    try:
        return cast(DatabaseModule, load_on_demand(module))
    except ModuleNotFoundError as error:
        raise RunError(f"a PostgreSQL store needs {error.name}: pip install 'rollbook[{EXTRA}]'") from error
