"""The ledger for code without `await`: notebooks, scripts, other trainers, the command line.

A thread with its own event loop runs the asynchronous client, so both behave alike. Methods may be called from several threads.
"""

import functools
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import unquote, urlsplit

from rollbook.concurrency.blocking import LoopThread
from rollbook.contracts.admission import Receipt, RunId
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import DropReason, GroupId, GroupOutcome, PromptGroup
from rollbook.contracts.group_codec import encode_group
from rollbook.ledger.client.client import LedgerClient, open_ledger_client
from rollbook.ledger.http import wire
from rollbook.ledger.http.verb import Verb
from rollbook.telemetry.events import EventLog

T = TypeVar("T")
P = ParamSpec("P")

QUERY_S = 10.0
CONNECT_S = 3.0
"""A person waits for the response: a ledger that cannot be reached is reported after this time."""


def _blocking(
    method: Callable[Concatenate[LedgerClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["SyncLedgerClient", P], T]:
    @functools.wraps(method)
    def call(self: "SyncLedgerClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.wait(method(self.client, *args, **kwargs))

    return call


class SyncLedgerClient:
    """One run of a ledger service. Created by `open_sync_ledger_client`. Its methods are those of `LedgerClient`."""

    def __init__(self, client: LedgerClient, loop: LoopThread) -> None:
        self.client = client
        self._loop = loop

    def wait(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the asynchronous client to its end."""
        return self._loop.run(call)

    def submit(
        self,
        group: PromptGroup,
        outcome: GroupOutcome,
        *,
        attempt: int = 1,
        drop: DropReason | None = None,
        producer: str | None = None,
    ) -> Receipt:
        encoded = encode_group(group, attempt=attempt, outcome=outcome, drop=drop, producer=producer)
        return self.wait(self.client.submit(encoded)).receipt

    def call(self, request: Verb[T]) -> T:
        return self.wait(self.client.call(request))

    runs = _blocking(LedgerClient.runs)
    create_run = _blocking(LedgerClient.create_run)
    status = _blocking(LedgerClient.status)
    progress = _blocking(LedgerClient.progress)
    outcomes = _blocking(LedgerClient.outcomes)
    audit = _blocking(LedgerClient.audit)
    explain = _blocking(LedgerClient.explain)
    groups = _blocking(LedgerClient.groups)
    payload = _blocking(LedgerClient.payload)
    manifest = _blocking(LedgerClient.manifest)
    steps = _blocking(LedgerClient.steps)
    actions = _blocking(LedgerClient.actions)
    act = _blocking(LedgerClient.act)
    register_producer = _blocking(LedgerClient.register_producer)
    producers = _blocking(LedgerClient.producers)
    join = _blocking(LedgerClient.join)
    open = _blocking(LedgerClient.open)
    heartbeat = _blocking(LedgerClient.heartbeat)
    close = _blocking(LedgerClient.close)
    release = _blocking(LedgerClient.release)
    exhausted = _blocking(LedgerClient.exhausted)
    take_role = _blocking(LedgerClient.take_role)
    batch = _blocking(LedgerClient.batch)
    acknowledge = _blocking(LedgerClient.acknowledge)
    register = _blocking(LedgerClient.register)
    confirm = _blocking(LedgerClient.confirm)
    checkpointed = _blocking(LedgerClient.checkpointed)
    finish = _blocking(LedgerClient.finish)


@contextmanager
def open_sync_ledger_client(
    url: str,
    run_id: str,
    *,
    request_s: float = 60.0,
    log: EventLog | None = None,
    token: str | None = None,
    is_compressed: bool = False,
) -> Iterator[SyncLedgerClient]:
    """Like `open_ledger_client`, for code without `await`: `with open_sync_ledger_client(url, "my-run") as ledger`."""
    opened = open_ledger_client(
        url,
        run_id,
        request_s=request_s,
        log=log,
        token=token,
        is_compressed=is_compressed,
    )
    with LoopThread("ledger-client") as loop:
        yield SyncLedgerClient(loop.enter(opened), loop)


def audit_at(url: str, *, token: str | None = None, full: bool = False) -> list[wire.AuditView]:
    """The audit of the run in the URL (`http://host:8000/v1/runs/RUN`), or of every run of that ledger."""
    base, run_id = split_address(url)
    run_ids = [run_id] if run_id is not None else _runs(base, token)
    reports = []
    for each in run_ids:
        with open_sync_ledger_client(base, each, request_s=QUERY_S, token=token) as client:
            reports.append(client.audit(full=full))
    return reports


def explain_at(url: str, group_id: GroupId, *, token: str | None = None) -> wire.GroupHistory:
    """The history of one group of the run in the URL, or of the only run of that ledger."""
    base, run_id = split_address(url)
    if run_id is None:
        run_ids = _runs(base, token)
        if len(run_ids) != 1:
            known = ", ".join(run_ids) or "none"
            raise RunError(f"the ledger at {base} has these runs: {known}; name one: {base}/v1/runs/RUN")
        run_id = run_ids[0]
    with open_sync_ledger_client(base, run_id, request_s=QUERY_S, token=token) as client:
        return client.explain(group_id)


def _runs(base: str, token: str | None) -> list[RunId]:
    with open_sync_ledger_client(base, RunId(""), request_s=CONNECT_S, token=token) as client:
        return [RunId(run) for run in client.runs()]


def split_address(url: str) -> tuple[str, RunId | None]:
    """The address of the ledger, and the run if the URL names one."""
    parts = urlsplit(url)
    base, _, rest = parts.path.partition("/v1/runs/")
    run = unquote(rest.split("/")[0])
    return f"{parts.scheme}://{parts.netloc}{base.rstrip('/')}", RunId(run) if run else None
