"""Storing what environments post: queued or buffered, once, however often its answer was lost."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rollbook.contracts.group import DropKind, DropReason, GroupState, group_id
from rollbook.contracts.task import TaskId
from rollbook.ledger.atropos.batch_forming import find_sum
from rollbook.ledger.atropos.models import InvalidBodyError, Registration, invalid_body
from rollbook.ledger.atropos.records import NO_ENV, EnvRecord, ShelvedGroup, UnansweredPost
from rollbook.ledger.atropos.rules import record_of, registration_of
from rollbook.ledger.atropos.scored_data import PostedGroup
from rollbook.ledger.records import GroupRecord, Origin
from rollbook.ledger.rules.book import RunBook
from rollbook.ledger.rules.groups import QUEUE_FULL_RETRY_S, QueueFullError

UNKNOWN_PUBLICATION = -1
OPENED = "opened by its post"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    max_queued: int
    max_queued_bytes: int
    retry_window_s: float
    touch_s: float
    """An environment's sign of life is written when the last one is older than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """One request: a group, or a list of them."""

    digest: str
    groups: tuple[PostedGroup, ...]
    is_list: bool


class Incoming:
    """A request that was received to its end, and that nobody has looked into yet.

    It is looked at in the thread that stores it, one at a time: what was unpacked and checked is written while the processor has
    it at hand, and its memory serves the next one.
    """

    def __init__(self, read: Callable[[], Post]) -> None:
        self._read = read
        self._found: Post | Exception | None = None

    def look(self) -> None:
        """Read it now, and remember what came of it."""
        if self._found is None:
            try:
                self._found = self._read()
            except Exception as error:
                self._found = error

    def take(self) -> Post:
        """What is in it; not remembered any longer. Raises what reading it raised."""
        self.look()
        found = self._found
        assert found is not None
        if isinstance(found, Exception):
            raise found
        self._found = None
        return found

    def give_back(self, post: Post) -> None:
        """It could not be stored yet."""
        self._found = post


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    digest: str
    answer: dict[str, Any]


Outcome = Stored | Exception


class _Together:
    """Posts that are stored in one transaction: what they share is looked up once and written once."""

    def __init__(self, book: RunBook, in_flight: Mapping[str, int], bounds: Bounds) -> None:
        self.book = book
        self.bounds = bounds
        self.registration = registration_of(record_of(book.tx, book.run_id))
        self.shelved: list[ShelvedGroup] = []
        self.latest: ShelvedGroup | None = None
        self._in_flight = dict(in_flight)
        self._known: dict[str, UnansweredPost | None] = {}
        self._changed: set[str] = set()

    def lost_answer(self, digest: str) -> UnansweredPost | None:
        """More are stored than are being answered: the answer of one was lost, and this is its repetition."""
        if digest not in self._known:
            self._known[digest] = self.book.tx.atropos.unanswered(self.book.run_id, digest)
        known, in_flight = self._known[digest], self._in_flight.get(digest, 0)
        self._in_flight[digest] = in_flight + 1
        is_lost = known is not None and known.num > in_flight
        return (
            known if is_lost and known is not None and known.at >= self.book.now - self.bounds.retry_window_s else None
        )

    def count(self, digest: str, by: int, answer: str) -> None:
        known = self._known.get(digest)
        num, at = (0, self.book.now) if known is None else (known.num, known.at)
        self._known[digest] = UnansweredPost(
            run_id=self.book.run_id, digest=digest, num=num + by, at=self.book.now if by > 0 else at, answer=answer
        )
        self._changed.add(digest)

    def write_shelved(self) -> None:
        if self.shelved:
            self.book.tx.atropos.put_shelved(self.shelved)
            self.shelved = []

    def write(self) -> None:
        tables, run_id = self.book.tx.atropos, self.book.run_id
        self.write_shelved()
        changed = [post for digest in self._changed if (post := self._known[digest]) is not None]
        tables.put_unanswered([post for post in changed if post.num > 0])
        tables.forget_unanswered(run_id, [post.digest for post in changed if post.num <= 0])
        if self.latest is not None:
            tables.put_record(record_of(self.book.tx, run_id).changed(latest=self.latest.group_id))


def store_posts(
    book: RunBook, arrived: Sequence[Incoming], *, in_flight: Mapping[str, int], answered: Sequence[str], bounds: Bounds
) -> list[Outcome]:
    """Store what has come in together, each post all or not at all, and say what became of each.

    `in_flight` tells how many posts of a digest are stored and being answered right now; `answered` are digests of posts whose
    answer has been delivered since.
    """
    forget(book, answered)
    together = _Together(book, in_flight, bounds)
    outcomes = [_outcome_of(together, incoming) for incoming in arrived]
    together.write()
    return outcomes


def _outcome_of(together: _Together, incoming: Incoming) -> Outcome:
    """What was read of it is let go before the next one is looked at."""
    try:
        post = incoming.take()
    except Exception as error:  # whatever it is: it harms no other
        return error
    try:
        return _store_post(together, post)
    except InvalidBodyError as error:  # like the next: raised before anything of this post was written
        return error
    except QueueFullError as error:
        incoming.give_back(post)
        return error


def _store_post(together: _Together, post: Post) -> Stored:
    known = together.lost_answer(post.digest)
    if known is not None:
        together.count(post.digest, -1, known.answer)
        return Stored(digest=post.digest, answer=json.loads(known.answer))
    _refuse_oversized(together.registration, post)
    _refuse_when_full(together.book, post, together.bounds)
    answers = [_store(together, group) for group in post.groups]
    answer = _summary(answers) if post.is_list else answers[0]
    together.count(post.digest, +1, msgspec.json.encode(answer).decode())
    return Stored(digest=post.digest, answer=answer)


def forget(book: RunBook, answered: Sequence[str]) -> None:
    """Posts whose answers were delivered: the same bytes again are another group."""
    if answered:
        book.tx.atropos.forget_answered(book.run_id, answered)


def _summary(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    buffered = [answer for answer in answers if answer["status"] == "buffered"]
    whole: dict[str, Any] = {"status": "received", "groups_processed": len(answers)}
    if buffered:
        whole |= {"buffered": len(buffered), "last_buffer_size": buffered[-1]["buffer_size"]}
    return whole


def _refuse_oversized(registration: Registration | None, post: Post) -> None:
    """It would wait for ever, and everything behind it."""
    if registration is None or registration.batch_size < 1:
        return
    for at, group in enumerate(post.groups):
        if group.size > registration.batch_size:
            message = f"the group has {group.size} sequences, a batch {registration.batch_size}: it would fit into none"
            raise invalid_body("group_too_large", (at, "tokens") if post.is_list else ("tokens",), message, group.size)


def _refuse_when_full(book: RunBook, post: Post, bounds: Bounds) -> None:
    num_queued, queued_bytes = book.number("num_queued"), book.number("queued_bytes")
    more = sum(len(group.payload) for group in post.groups)
    if num_queued and (
        num_queued + len(post.groups) > bounds.max_queued or queued_bytes + more > bounds.max_queued_bytes
    ):
        raise QueueFullError(
            f"run {book.run_id}: {num_queued} groups are queued, {queued_bytes} bytes in all, no more is taken until the "
            "trainer asks for a batch",
            retry_after_s=QUEUE_FULL_RETRY_S,
        )


def _store(together: _Together, group: PostedGroup) -> dict[str, Any]:
    book = together.book
    env = None if group.env_id is None else book.tx.atropos.env(book.run_id, group.env_id)
    if env is not None and env.last_seen < book.now - together.bounds.touch_s:
        book.tx.atropos.put_env(env.changed(last_seen=book.now))
    if group.size == 0:
        opened = _opened(book, env, GroupState.DISPATCHED)
        book.begin(opened, note=OPENED, by="post")
        book.drop(opened, DropReason(DropKind.INVALID, "it has no sequences"), by="post")
        return {"status": "received"}
    stored = _opened(
        book,
        env,
        GroupState.QUEUED,
        publications=(UNKNOWN_PUBLICATION,),
        outcome=msgspec.json.encode(group.outcome),
        payload_digest=group.digest,
        payload_bytes=len(group.payload),
        has_payload=True,
        arrival=book.count("next_arrival"),
    )
    book.tx.put_payload(book.run_id, stored.group_id, group.payload, group.digest)
    book.enter(stored, note="posted", by="post")
    is_buffered = env is not None and group.size != env.group_size
    shelved = ShelvedGroup(
        run_id=book.run_id,
        group_id=stored.group_id,
        place=stored.arrival or 0,
        env_id=NO_ENV if group.env_id is None else group.env_id,
        size=group.size,
        is_buffered=is_buffered,
    )
    together.shelved.append(shelved)
    if is_buffered and env is not None:
        return {"status": "buffered", "buffer_size": _release_buffered(together, env)}
    together.latest = shelved
    return {"status": "received"}


def _opened(book: RunBook, env: EnvRecord | None, state: GroupState, **fields: Any) -> GroupRecord:
    sequence = book.count("next_sequence")
    task_id = TaskId(env.real_name if env is not None else "atropos")
    return GroupRecord(
        run_id=book.run_id,
        group_id=group_id(task_id, sequence),
        task_id=task_id,
        draw=sequence,
        position=None,
        origin=Origin.EXTERNAL,
        state=state,
        sequence=sequence,
        opened_at=book.now,
        **fields,
    )


def _release_buffered(together: _Together, env: EnvRecord) -> int:
    """Queue the buffered groups that add up to the environment's group size. Returns the sequences that still wait."""
    book = together.book
    together.write_shelved()
    waiting = book.tx.atropos.buffered(book.run_id, env.env_id)
    released = [
        waiting[at].changed(is_buffered=False, place=book.count("next_arrival"))
        for at in find_sum([group.size for group in waiting], env.group_size)
    ]
    if released:
        book.tx.atropos.put_shelved(released)
        together.latest = released[-1]
    return sum(group.size for group in waiting) - sum(group.size for group in released)
