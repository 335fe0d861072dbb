"""Storing what environments post: queued or buffered, once, however often its answer was lost."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from rollbook.contracts.group import DropKind, DropReason, GroupState, group_id
from rollbook.contracts.task import TaskId
from rollbook.ledger.atropos.forming import find_sum
from rollbook.ledger.atropos.models import Refusal, Registration, refusal
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A post to be stored, and how many with the very same bytes are being answered right now."""

    post: Post
    in_flight: int


Outcome = dict[str, Any] | Refusal | QueueFullError


def store_posts(
    book: RunBook, arrivals: Sequence[Arrival], *, answered: Sequence[str], bounds: Bounds
) -> list[Outcome]:
    """Store what has come in together, each post all or not at all, and say what became of each.

    `answered` are digests of posts whose answer has been delivered since.
    """
    forget(book, answered)
    registration = registration_of(record_of(book.tx, book.run_id))
    latest: list[ShelvedGroup] = []
    outcomes: list[Outcome] = []
    for arrival in arrivals:
        try:
            outcomes.append(_store_post(book, arrival, registration, bounds, latest))
        except (Refusal, QueueFullError) as error:  # raised before anything of this post was written
            outcomes.append(error)
    if latest:
        record = record_of(book.tx, book.run_id)
        book.tx.atropos.put_record(replace(record, latest=latest[-1].group_id))
    return outcomes


def _store_post(
    book: RunBook, arrival: Arrival, registration: Registration | None, bounds: Bounds, latest: list[ShelvedGroup]
) -> dict[str, Any]:
    post = arrival.post
    known = book.tx.atropos.unanswered(book.run_id, post.digest)
    # More in the table than are being answered: the answer of one was lost, and this is its repetition.
    if known is not None and known.num > arrival.in_flight and known.at >= book.now - bounds.retry_window_s:
        forget(book, [post.digest])
        found: dict[str, Any] = json.loads(known.answer)
        return found
    _refuse_oversized(registration, post)
    _refuse_when_full(book, post, bounds)
    answers = [_store(book, group, bounds, latest) for group in post.groups]
    answer = _summary(answers) if post.is_list else answers[0]
    num = 1 if known is None else known.num + 1
    book.tx.atropos.put_unanswered(
        UnansweredPost(run_id=book.run_id, digest=post.digest, num=num, at=book.now, answer=json.dumps(answer))
    )
    return answer


def forget(book: RunBook, answered: Sequence[str]) -> None:
    """Posts whose answers were delivered: the same bytes again are another group."""
    for digest in answered:
        known = book.tx.atropos.unanswered(book.run_id, digest)
        if known is not None and known.num > 1:
            book.tx.atropos.put_unanswered(replace(known, num=known.num - 1))
        elif known is not None:
            book.tx.atropos.forget_unanswered(book.run_id, digest)


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
            raise refusal("group_too_large", (at, "tokens") if post.is_list else ("tokens",), message, group.size)


def _refuse_when_full(book: RunBook, post: Post, bounds: Bounds) -> None:
    run, more = book.run, sum(len(group.payload) for group in post.groups)
    if run.num_queued and (
        run.num_queued + len(post.groups) > bounds.max_queued or run.queued_bytes + more > bounds.max_queued_bytes
    ):
        raise QueueFullError(
            f"run {run.run_id}: {run.num_queued} groups are queued, {run.queued_bytes} bytes in all, no more is taken until the "
            "trainer asks for a batch",
            retry_after_s=QUEUE_FULL_RETRY_S,
        )


def _store(book: RunBook, group: PostedGroup, bounds: Bounds, latest: list[ShelvedGroup]) -> dict[str, Any]:
    env = None if group.env_id is None else book.tx.atropos.env(book.run_id, group.env_id)
    if env is not None and env.last_seen < book.now - bounds.touch_s:
        book.tx.atropos.put_env(replace(env, last_seen=book.now))
    opened = _opened(book, group, env)
    if group.size == 0:
        book.begin(opened, note=OPENED, by="post")
        book.drop(opened, DropReason(DropKind.INVALID, "it has no sequences"), by="post")
        return {"status": "received"}
    stored = replace(
        opened,
        state=GroupState.QUEUED,
        publications=(UNKNOWN_PUBLICATION,),
        outcome=msgspec.json.encode(group.outcome),
        payload_digest=group.digest,
        payload_bytes=len(group.payload),
        has_payload=True,
        arrival=book.count("next_arrival"),
    )
    book.tx.put_payload(book.run_id, stored.group_id, group.payload, group.digest)
    book.enter(stored, opened=OPENED, note="posted", by="post")
    is_buffered = env is not None and group.size != env.group_size
    shelved = ShelvedGroup(
        run_id=book.run_id,
        group_id=stored.group_id,
        place=stored.arrival or 0,
        env_id=NO_ENV if group.env_id is None else group.env_id,
        size=group.size,
        is_buffered=is_buffered,
    )
    book.tx.atropos.put_shelved(shelved)
    if is_buffered and env is not None:
        return {"status": "buffered", "buffer_size": _release_buffered(book, env, latest)}
    latest.append(shelved)
    return {"status": "received"}


def _opened(book: RunBook, group: PostedGroup, env: EnvRecord | None) -> GroupRecord:
    sequence = book.count("next_sequence")
    task_id = TaskId(env.real_name if env is not None else "atropos")
    return GroupRecord(
        run_id=book.run_id,
        group_id=group_id(task_id, sequence),
        task_id=task_id,
        draw=sequence,
        position=None,
        origin=Origin.EXTERNAL,
        state=GroupState.DISPATCHED,
        sequence=sequence,
        opened_at=book.now,
    )


def _release_buffered(book: RunBook, env: EnvRecord, latest: list[ShelvedGroup]) -> int:
    """Queue the buffered groups that add up to the environment's group size. Returns the sequences that still wait."""
    waiting = book.tx.atropos.buffered(book.run_id, env.env_id)
    together = [waiting[at] for at in find_sum([group.size for group in waiting], env.group_size)]
    for group in together:
        released = replace(group, is_buffered=False, place=book.count("next_arrival"))
        book.tx.atropos.put_shelved(released)
        latest.append(released)
    return sum(group.size for group in waiting) - sum(group.size for group in together)
