"""The primitives of the Atropos dialect in dictionaries."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from rollbook.contracts.admission import RunId
from rollbook.contracts.group import GroupId
from rollbook.ledger.atropos.records import AtroposRecord, EnvRecord, Shelf, ShelvedGroup, UnansweredPost

Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row")


@dataclass(slots=True)
class AtroposRows:
    records: dict[RunId, AtroposRecord] = field(default_factory=dict)
    envs: dict[tuple[RunId, int], EnvRecord] = field(default_factory=dict)
    groups: dict[tuple[RunId, GroupId], ShelvedGroup] = field(default_factory=dict)
    unanswered: dict[tuple[RunId, str], UnansweredPost] = field(default_factory=dict)


class Put(Protocol):
    """Write a row so that it can be undone."""

    def __call__(self, table: dict[Key, Row], key: Key, row: Row) -> None: ...


class Delete(Protocol):
    def __call__(self, table: dict[Key, Row], key: Key) -> None: ...


class MemoryAtroposTables:
    """Satisfies `atropos.records.AtroposTables`."""

    def __init__(self, rows: AtroposRows, *, put: Put, delete: Delete) -> None:
        self._rows = rows
        self._put = put
        self._delete = delete

    def record(self, run_id: RunId) -> AtroposRecord | None:
        return self._rows.records.get(run_id)

    def put_record(self, record: AtroposRecord) -> None:
        self._put(self._rows.records, record.run_id, record)

    def envs(self, run_id: RunId) -> list[EnvRecord]:
        return sorted((e for e in self._rows.envs.values() if e.run_id == run_id), key=lambda e: e.env_id)

    def env(self, run_id: RunId, env_id: int) -> EnvRecord | None:
        return self._rows.envs.get((run_id, env_id))

    def put_env(self, env: EnvRecord) -> None:
        self._put(self._rows.envs, (env.run_id, env.env_id), env)

    def clear(self, run_id: RunId) -> None:
        for env_key in [key for key in self._rows.envs if key[0] == run_id]:
            self._delete(self._rows.envs, env_key)
        for group_key in [key for key in self._rows.groups if key[0] == run_id]:
            self._delete(self._rows.groups, group_key)
        for post_key in [key for key in self._rows.unanswered if key[0] == run_id]:
            self._delete(self._rows.unanswered, post_key)

    def put_shelved(self, groups: Sequence[ShelvedGroup]) -> None:
        for group in groups:
            self._put(self._rows.groups, (group.run_id, group.group_id), group)

    def shelved(self, run_id: RunId, group_id: GroupId) -> ShelvedGroup | None:
        return self._rows.groups.get((run_id, group_id))

    def take_shelved(self, groups: Sequence[ShelvedGroup]) -> None:
        for group in groups:
            self._delete(self._rows.groups, (group.run_id, group.group_id))

    def shelves(self, run_id: RunId) -> list[Shelf]:
        counted: dict[tuple[int, int], int] = {}
        for group in self._groups(run_id, lambda g: not g.is_buffered):
            counted[group.env_id, group.size] = counted.get((group.env_id, group.size), 0) + 1
        return [Shelf(env_id=env_id, size=size, num=num) for (env_id, size), num in sorted(counted.items())]

    def on_shelf(self, run_id: RunId, env_id: int, size: int, limit: int) -> list[ShelvedGroup]:
        return self._groups(run_id, lambda g: not g.is_buffered and (g.env_id, g.size) == (env_id, size))[:limit]

    def buffered(self, run_id: RunId, env_id: int) -> list[ShelvedGroup]:
        return self._groups(run_id, lambda g: g.is_buffered and g.env_id == env_id)

    def unanswered(self, run_id: RunId, digest: str) -> UnansweredPost | None:
        return self._rows.unanswered.get((run_id, digest))

    def put_unanswered(self, posts: Sequence[UnansweredPost]) -> None:
        for post in posts:
            self._put(self._rows.unanswered, (post.run_id, post.digest), post)

    def forget_unanswered(self, run_id: RunId, digests: Sequence[str]) -> None:
        for digest in digests:
            self._delete(self._rows.unanswered, (run_id, digest))

    def forget_answered(self, run_id: RunId, digests: Sequence[str]) -> None:
        for digest in digests:
            post = self._rows.unanswered.get((run_id, digest))
            if post is not None and post.num > 1:
                self._put(self._rows.unanswered, (run_id, digest), post.changed(num=post.num - 1))
            elif post is not None:
                self._delete(self._rows.unanswered, (run_id, digest))

    def forget_unanswered_before(self, run_id: RunId, at: float) -> None:
        for key in [key for key, post in self._rows.unanswered.items() if key[0] == run_id and post.at < at]:
            self._delete(self._rows.unanswered, key)

    def _groups(self, run_id: RunId, is_wanted: Callable[[ShelvedGroup], bool]) -> list[ShelvedGroup]:
        chosen = (g for g in self._rows.groups.values() if g.run_id == run_id and is_wanted(g))
        return sorted(chosen, key=lambda g: g.place)
