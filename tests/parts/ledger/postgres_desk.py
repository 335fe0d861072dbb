"""The PostgreSQL store without its threads: what a state machine can drive."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from rollbook.ledger.store import Transaction
from rollbook.ledger.stores.postgres.store import open_readonly
from rollbook.ledger.stores.postgres.writer import PostgresWriter
from rollbook.ledger.stores.sql.committer import Operation

T = TypeVar("T")


class PostgresNow:
    """Satisfies `ledger_desk.NowStore` with the writing session of the real store."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._writer = PostgresWriter(url)
        self._writer.prepare()
        self._loop = asyncio.new_event_loop()

    def write_now(self, work: Callable[[Transaction], T]) -> T:
        operation = Operation(work, self._loop.create_future())
        self._writer.commit([operation])
        if operation.error is not None:
            raise operation.error
        result: T = operation.result
        return result

    def read_now(self, work: Callable[[Transaction], T]) -> T:
        with open_readonly(self.url) as database:
            return database.read_now(work)

    def close(self) -> None:
        self._writer.close()
        self._loop.close()
