"""Opens the store of a URL: `sqlite:///DIRECTORY` or `postgresql://user@host/database`.

The PostgreSQL driver is optional, so its module is imported only for a URL that needs it.
"""

from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol, cast

from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import load_on_demand
from rollbook.ledger.config import Durability, StoreUrl
from rollbook.ledger.store import Reader, Store
from rollbook.ledger.stores.sqlite import store as sqlite

SQLITE = "sqlite:///"
POSTGRES = ("postgresql://", "postgres://")
POSTGRES_MODULE = "rollbook.ledger.stores.postgres.store"


class _PostgresModule(Protocol):
    def open_postgres_store(
        self, url: str, *, durability: Durability, payloads: str | None
    ) -> AbstractAsyncContextManager[Store]: ...
    def open_readonly(self, url: str) -> AbstractContextManager[Reader]: ...
    def reclaim(self, url: str) -> tuple[int, int]: ...
    def warnings(self, url: str) -> list[str]: ...


def sqlite_url(directory: Path) -> str:
    """A relative directory is relative to the working directory of the service."""
    return f"{SQLITE}{directory}"


def open_store(
    url: str, *, durability: Durability = Durability.POWER_LOSS, payloads: str | None = None
) -> AbstractAsyncContextManager[Store]:
    """`payloads`: the directory or bucket of new payloads, for PostgreSQL; None: in the store."""
    if url.startswith(SQLITE):
        if payloads is not None:
            raise RunError(
                "ledger.payloads needs a PostgreSQL store: SQLite keeps payloads in files next to it; remove it"
            )
        return sqlite.open_sqlite_store(_directory(url), durability=durability)
    return _postgres(url).open_postgres_store(url, durability=durability, payloads=payloads)


def only_service(url: str, *, wait_s: float = 0.0) -> AbstractContextManager[None]:
    """Held by a service while it uses the store. PostgreSQL: services share a database.

    SQLite: a second service is refused if the first has not ended after `wait_s`.
    """
    return sqlite.only_service(_directory(url), wait_s=wait_s) if url.startswith(SQLITE) else nullcontext()


def open_reader(url: str) -> AbstractContextManager[Reader]:
    """Open a ledger, in service or not, without locking or changing it."""
    return sqlite.open_readonly(_directory(url)) if url.startswith(SQLITE) else _postgres(url).open_readonly(url)


def reclaim(url: str) -> tuple[int, int]:
    """Return the space of deleted data to the disk. Returns the bytes before and after."""
    return sqlite.reclaim(_directory(url)) if url.startswith(SQLITE) else _postgres(url).reclaim(url)


def store_warnings(url: str) -> list[str]:
    """What an operator should know about a store before using it. Raises if the store cannot be used."""
    return [] if url.startswith(SQLITE) else _postgres(url).warnings(url)


def sqlite_directory(url: str) -> Path:
    """The directory of a SQLite store. Raises `RunError` for another one."""
    if not url.startswith(SQLITE):
        raise RunError(f"{StoreUrl(url)} is not a SQLite store: restore it from a backup of its database")
    return _directory(url)


def _directory(url: str) -> Path:
    directory = url.removeprefix(SQLITE)
    if not directory:
        raise RunError(f"{url!r} names no directory: write {SQLITE}DIRECTORY")
    return Path(directory)


def _postgres(url: str) -> _PostgresModule:
    if not url.startswith(POSTGRES):
        scheme = url.partition("://")[0]
        raise RunError(
            f"a store of scheme {scheme!r} is unknown: use {SQLITE}DIRECTORY or postgresql://USER@HOST/DATABASE"
        )
    return cast(_PostgresModule, load_on_demand(POSTGRES_MODULE))
