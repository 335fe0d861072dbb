"""Storing the groups that environments post: queued or buffered, once, even if a response is lost and the post repeated."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.group import DropKind, DropReason, GroupId, GroupState, group_id
from rollbook.contracts.group_checks import TrainingLimits, UnusableGroupError, find_obstacle, inspect_payload
from rollbook.contracts.task import TaskId
from rollbook.ledger.atropos.batch_forming import find_sum
from rollbook.ledger.atropos.models import InvalidBodyError, Registration, invalid_body
from rollbook.ledger.atropos.records import NO_ENV, EnvRecord, QueuedGroup, UnconfirmedPost
from rollbook.ledger.atropos.rules import registration_of
from rollbook.ledger.atropos.scored_data import PostedGroup
from rollbook.ledger.atropos.tables import AtroposTables
from rollbook.ledger.records import GroupRecord, Origin
from rollbook.ledger.rules.groups import QUEUE_FULL_RETRY_S, QueueFullError
from rollbook.ledger.rules.run_transaction import RunTransaction
from rollbook.ledger.store import StoreFaultError

UNKNOWN_PUBLICATION = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    max_queued: int
    max_queued_bytes: int
    retry_window_s: float
    touch_s: float
    """An environment's `last_seen` is written when it is older than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """One request: a group, or a list of them."""

    digest: str
    groups: tuple[PostedGroup, ...]
    is_list: bool


class Incoming:
    """A request that was received completely and is not parsed yet.

    Requests are parsed in the thread that stores them, one at a time: parsed data is written while it is in the processor's cache,
    and its memory is reused for the next request.
    """

    def __init__(self, read: Callable[[], Post]) -> None:
        self._read = read
        self._parsed: Post | Exception | None = None

    def parse(self) -> None:
        """Parse it now and keep the result."""
        if self._parsed is None:
            try:
                self._parsed = self._read()
            except Exception as error:
                self._parsed = error

    def require_groups(self) -> None:
        """Raise the parser's error. Also refuses a list without groups, which would create a run without data."""
        self.parse()
        if isinstance(self._parsed, Exception):
            raise self._parsed
        if self._parsed is not None and not self._parsed.groups:
            raise invalid_body("too_short", (), "List should have at least 1 item for a run that does not exist yet")

    def take(self) -> Post:
        """Return the parsed post and release it. Raises the parser's error."""
        self.parse()
        parsed = self._parsed
        assert parsed is not None
        if isinstance(parsed, Exception):
            raise parsed
        self._parsed = None
        return parsed

    def give_back(self, post: Post) -> None:
        """Keep a post that could not be stored yet."""
        self._parsed = post


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    digest: str
    answer: dict[str, Any]


Outcome = Stored | Exception


class _Summary(msgspec.Struct):
    """The fields of a stored payload that the queue needs."""

    tokens: list[msgspec.Raw]
    env_id: int | None = None


class _PostBatch:
    """Posts stored in one transaction: shared rows are read once and written once."""

    def __init__(self, run_tx: RunTransaction, in_flight: Mapping[str, int], bounds: Bounds) -> None:
        self.run_tx = run_tx
        self.bounds = bounds
        self.tables = AtroposTables(run_tx.tx)
        self.registration = registration_of(self.tables.record(run_tx.run_id))
        self.queued: list[QueuedGroup] = []
        self.latest: QueuedGroup | None = None
        self._in_flight = dict(in_flight)
        self._known: dict[str, UnconfirmedPost | None] = {}
        self._changed: set[str] = set()

    def find_repeated(self, digest: str) -> UnconfirmedPost | None:
        """If more posts of this digest are stored than are being answered, a response was lost and this is a repetition."""
        if digest not in self._known:
            self._known[digest] = self.tables.unconfirmed(self.run_tx.run_id, digest)
        known, in_flight = self._known[digest], self._in_flight.get(digest, 0)
        self._in_flight[digest] = in_flight + 1
        oldest = self.run_tx.now - self.bounds.retry_window_s
        return known if known is not None and known.num > in_flight and known.at >= oldest else None

    def count(self, digest: str, by: int, answer: str) -> None:
        known = self._known.get(digest)
        num, at = (0, self.run_tx.now) if known is None else (known.num, known.at)
        self._known[digest] = UnconfirmedPost(
            run_id=self.run_tx.run_id, digest=digest, num=num + by, at=self.run_tx.now if by > 0 else at, answer=answer
        )
        self._changed.add(digest)

    def write_queued(self) -> None:
        if self.queued:
            self.tables.put_queued(self.queued)
            self.queued = []

    def write(self) -> None:
        tables, run_id = self.tables, self.run_tx.run_id
        self.write_queued()
        changed = [post for digest in self._changed if (post := self._known[digest]) is not None]
        tables.put_unconfirmed([post for post in changed if post.num > 0])
        tables.delete_unconfirmed(run_id, [post.digest for post in changed if post.num <= 0])
        if self.latest is not None:
            tables.put_record(tables.record(run_id).changed(latest=self.latest.group_id))


def store_posts(
    run_tx: RunTransaction,
    arrived: Sequence[Incoming],
    *,
    in_flight: Mapping[str, int],
    answered: Sequence[str],
    bounds: Bounds,
) -> list[Outcome]:
    """Store posts in one transaction, each atomically, and return the outcome of each.

    `in_flight` is the number of posts of a digest that are stored and being answered; `answered` are the digests of posts whose
    responses have been delivered since.
    """
    confirm(run_tx, answered)
    batch = _PostBatch(run_tx, in_flight, bounds)
    outcomes = [_outcome_of(batch, incoming) for incoming in arrived]
    batch.write()
    return outcomes


def _outcome_of(batch: _PostBatch, incoming: Incoming) -> Outcome:
    """Each post is freed before the next one is parsed."""
    try:
        post = incoming.take()
    except Exception as error:  # must not affect the other posts
        return error
    try:
        return _store_post(batch, post)
    except InvalidBodyError as error:  # like the next one: raised before anything of this post was written
        return error
    except QueueFullError as error:
        incoming.give_back(post)
        return error


def _store_post(batch: _PostBatch, post: Post) -> Stored:
    known = batch.find_repeated(post.digest)
    if known is not None:
        batch.count(post.digest, -1, known.answer)
        return Stored(digest=post.digest, answer=json.loads(known.answer))
    _refuse_oversized(batch.registration, post)
    _refuse_untrainable(batch.run_tx, post)
    _refuse_when_full(batch.run_tx, post, batch.bounds)
    answers = [_store(batch, group) for group in post.groups]
    answer = _summary(answers) if post.is_list else answers[0]
    batch.count(post.digest, +1, msgspec.json.encode(answer).decode())
    return Stored(digest=post.digest, answer=answer)


def confirm(run_tx: RunTransaction, answered: Sequence[str]) -> None:
    """The responses of these posts were delivered: the same bytes again are another group."""
    if answered:
        AtroposTables(run_tx.tx).confirm(run_tx.run_id, answered)


def forget_unconfirmed(run_tx: RunTransaction, before: float) -> None:
    """Posts that were stored before this wall time are no longer recognised as repetitions."""
    AtroposTables(run_tx.tx).delete_unconfirmed_before(run_tx.run_id, before)


def _summary(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    buffered = [answer for answer in answers if answer["status"] == "buffered"]
    whole: dict[str, Any] = {"status": "received", "groups_processed": len(answers)}
    if buffered:
        whole |= {"buffered": len(buffered), "last_buffer_size": buffered[-1]["buffer_size"]}
    return whole


def _refuse_oversized(registration: Registration | None, post: Post) -> None:
    """An oversized group would wait forever."""
    if registration is None or registration.batch_size < 1:
        return
    for at, group in enumerate(post.groups):
        if group.size > registration.batch_size:
            message = f"the group has {group.size} sequences, a batch has {registration.batch_size}: it cannot be in any batch"
            raise invalid_body("group_too_large", (at, "tokens") if post.is_list else ("tokens",), message, group.size)


def _refuse_untrainable(run_tx: RunTransaction, post: Post) -> None:
    """Only a run that a native trainer trains has limits; then the group is decoded as that trainer will decode it.

    Other trainers have their own rules, so their groups are accepted like by the original server.
    """
    limits: TrainingLimits = run_tx.field("settings").limits
    if limits == TrainingLimits():
        return
    for at, group in enumerate(post.groups):
        if group.size:
            try:
                obstacle = find_obstacle(inspect_payload(group.payload, GroupId("post@0")), limits)
            except UnusableGroupError as error:
                obstacle = str(error)
            if obstacle is not None:
                raise invalid_body("untrainable", (at,) if post.is_list else (), f"it cannot be trained: {obstacle}")


def _refuse_when_full(run_tx: RunTransaction, post: Post, bounds: Bounds) -> None:
    num_queued, queued_bytes = run_tx.field("num_queued"), run_tx.field("queued_bytes")
    more = sum(len(group.payload) for group in post.groups)
    if num_queued and (
        num_queued + len(post.groups) > bounds.max_queued or queued_bytes + more > bounds.max_queued_bytes
    ):
        raise QueueFullError(
            f"run {run_tx.run_id}: the queue is full ({num_queued} groups, {queued_bytes} bytes); it has room again after the "
            "trainer requests a batch",
            retry_after_s=QUEUE_FULL_RETRY_S,
        )


def _store(batch: _PostBatch, group: PostedGroup) -> dict[str, Any]:
    run_tx = batch.run_tx
    env = None if group.env_id is None else batch.tables.env(run_tx.run_id, group.env_id)
    if env is not None and env.last_seen < run_tx.now - batch.bounds.touch_s:
        batch.tables.put_env(env.changed(last_seen=run_tx.now))
    if group.size == 0:
        opened = _opened(run_tx, env, GroupState.DISPATCHED)
        run_tx.open(opened, note="opened by its post", by="post")
        run_tx.drop(opened, DropReason(DropKind.INVALID, "it has no sequences"), by="post")
        return {"status": "received"}
    stored = _opened(
        run_tx,
        env,
        GroupState.QUEUED,
        publications=(UNKNOWN_PUBLICATION,),
        outcome=msgspec.json.encode(group.outcome),
        payload_digest=group.digest,
        payload_bytes=len(group.payload),
        has_payload=True,
        arrival=run_tx.count("next_arrival"),
    )
    run_tx.tx.payloads.put(run_tx.run_id, stored.group_id, group.payload, group.digest)
    run_tx.open(stored, note="posted", by="post")
    is_buffered = env is not None and group.size != env.group_size
    queued = QueuedGroup(
        run_id=run_tx.run_id,
        group_id=stored.group_id,
        place=stored.arrival or 0,
        env_id=NO_ENV if group.env_id is None else group.env_id,
        size=group.size,
        is_buffered=is_buffered,
    )
    batch.queued.append(queued)
    if is_buffered and env is not None:
        return {"status": "buffered", "buffer_size": _release_buffered(batch, env)}
    batch.latest = queued
    return {"status": "received"}


def queue_again(run_tx: RunTransaction, group: GroupRecord) -> GroupId:
    """Store a copy of a group under a new id, ahead of all groups that arrived later. Its batch was decided and not delivered."""
    payload = run_tx.tx.payloads.get(run_tx.run_id, group.group_id)
    if payload is None:
        raise StoreFaultError(f"run {run_tx.run_id}: the payload of group {group.group_id} is missing")
    posted = json_decoder(_Summary).decode(payload)
    tables = AtroposTables(run_tx.tx)
    env = None if posted.env_id is None else tables.env(run_tx.run_id, posted.env_id)
    copied = ("publications", "outcome", "payload_digest", "payload_bytes", "has_payload", "arrival")
    again = _opened(run_tx, env, GroupState.QUEUED, **{name: getattr(group, name) for name in copied})
    run_tx.tx.payloads.put(run_tx.run_id, again.group_id, payload, group.payload_digest)
    run_tx.open(again, note=f"queued again, was {group.group_id}", by="register")
    tables.put_queued(
        [
            QueuedGroup(
                run_id=run_tx.run_id,
                group_id=again.group_id,
                place=again.arrival or 0,
                env_id=NO_ENV if posted.env_id is None else posted.env_id,
                size=len(posted.tokens),
            )
        ]
    )
    return again.group_id


def _opened(run_tx: RunTransaction, env: EnvRecord | None, state: GroupState, **fields: Any) -> GroupRecord:
    sequence = run_tx.count("next_sequence")
    task_id = TaskId(env.real_name if env is not None else "atropos")
    return GroupRecord(
        run_id=run_tx.run_id,
        group_id=group_id(task_id, sequence),
        task_id=task_id,
        draw=sequence,
        position=None,
        origin=Origin.EXTERNAL,
        state=state,
        sequence=sequence,
        opened_at=run_tx.now,
        **fields,
    )


def _release_buffered(batch: _PostBatch, env: EnvRecord) -> int:
    """Queue buffered groups that add up to the environment's group size. Returns the number of sequences still buffered."""
    run_tx = batch.run_tx
    batch.write_queued()
    waiting = batch.tables.buffered(run_tx.run_id, env.env_id)
    released = [
        waiting[at].changed(is_buffered=False, place=run_tx.count("next_arrival"))
        for at in find_sum([group.size for group in waiting], env.group_size)
    ]
    if released:
        batch.tables.put_queued(released)
        batch.latest = released[-1]
    return sum(group.size for group in waiting) - sum(group.size for group in released)
