"""Finished groups come in: one in a request or many, through the framework or past it, judged by the same rules.

Groups of one request share a transaction, so that a busy producer costs the ledger a fraction of what the same groups cost one by
one. Each has its own answer: one that is refused keeps none of the others out.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from rollbook.concurrency.clock import Clock
from rollbook.contracts.admission import RunId
from rollbook.contracts.errors import RollbookError, RunError
from rollbook.contracts.group import DropReason, GroupId
from rollbook.contracts.group_codec import check_frame, payload_digest
from rollbook.contracts.task import TaskId
from rollbook.ledger.http import wire
from rollbook.ledger.http.auth import Keys
from rollbook.ledger.http.errors import KNOWN, refusal, status_of
from rollbook.ledger.http.fast_path import Asked, HotConnection, HotReply, HotRoute
from rollbook.ledger.http.metrics import RequestNumbers
from rollbook.ledger.http.routes import PRODUCER
from rollbook.ledger.rules.groups import Submission
from rollbook.ledger.service import Ledger


class Submitting:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def one(self, run_id: RunId, asked: wire.Submit) -> wire.Receipted:
        return wire.Receipted(receipt=await self._ledger.submit_encoded(run_id, submission_of(asked)))

    async def many(self, run_id: RunId, asked: wire.SubmitMany) -> wire.SubmittedMany:
        """An answer for each group, in the order of the request."""
        answers: dict[int, wire.SubmitAnswer] = {}
        good: dict[int, Submission] = {}
        for at, one in enumerate(asked.groups):
            try:
                good[at] = submission_of(one)
            except RunError as error:
                answers[at] = _refused(error)
        outcomes = await self._ledger.submit_many_encoded(run_id, list(good.values()))
        for at, outcome in zip(good, outcomes, strict=True):
            if isinstance(outcome, RollbookError):
                answers[at] = _refused(outcome)
            else:
                answers[at] = wire.SubmitAnswer(receipt=outcome)
        return wire.SubmittedMany(answers=tuple(answers[at] for at in range(len(asked.groups))))

    def hot_routes(self, keys: Keys, *, clock: Clock, numbers: RequestNumbers, body_s: float) -> Sequence[HotRoute]:
        """The same without a framework around it."""

        def route(name: str, expected: Any, submit: Callable[[RunId, Any], Awaitable[wire.Message]]) -> HotRoute:
            decode = msgspec.msgpack.Decoder(expected).decode
            encode = msgspec.msgpack.Encoder().encode

            async def answer(asked: Asked, body: memoryview, connection: HotConnection) -> None:
                started = clock.now()
                try:
                    authorization = asked.headers.get(b"authorization")
                    keys.require(None if authorization is None else authorization.decode("latin-1"), PRODUCER)
                    told = await submit(RunId(asked.run), decode(body))
                    answered = HotReply(body=encode(told), content_type=wire.CONTENT_TYPE)
                except KNOWN as error:
                    answered = HotReply.of(refusal(error))
                connection.send(answered)
                numbers.add(name, answered.status, clock.now() - started)

            return HotRoute(
                before=b"POST /v1/runs/",
                after=f"/{name} HTTP/1.1".encode(),
                content_types=frozenset({wire.CONTENT_TYPE.encode()}),
                encodings=frozenset({b""}),
                answer=answer,
                refuse=refusal,
                body_s=body_s,
                is_native=True,
            )

        return route("submit", wire.SubmitView, self.one), route("submit_many", wire.SubmitManyView, self.many)


def submission_of(asked: wire.Submit) -> Submission:
    """What is stored of a group, once its payload has been looked at. Raises `RunError` for one that no trainer could read."""
    found = payload_digest(asked.payload)
    if found != asked.payload_digest:
        raise RunError(f"group {asked.group_id}: its payload has digest {found}, not {asked.payload_digest}: damaged")
    check_frame(asked.payload, group_id=asked.group_id)
    return Submission(
        group_id=GroupId(asked.group_id),
        task_id=TaskId(asked.task_id),
        draw=asked.draw,
        attempt=asked.attempt,
        publications=asked.publications,
        outcome=asked.outcome,
        payload=asked.payload,
        payload_digest=asked.payload_digest,
        drop=None if asked.drop is None else drop_reason(asked.drop),
        producer=asked.producer,
    )


def drop_reason(text: str) -> DropReason:
    try:
        return DropReason.parse(text)
    except ValueError as error:
        raise RunError(f"{text!r} is no drop reason: {error}") from error


def _refused(error: RollbookError) -> wire.SubmitAnswer:
    told = wire.Refused(
        status=status_of(error).value,
        kind=type(error).__name__,
        message=str(error),
        retry_after_s=getattr(error, "retry_after_s", None),
    )
    return wire.SubmitAnswer(refused=told)
