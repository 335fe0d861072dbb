"""The journal of a store: a second copy of its rows, from which a damaged database is rebuilt (`tools/rebuild.py`).

An entry is appended when a step is acknowledged, at each training checkpoint and at the end of a run: the rows that changed since
the previous entry, as JSON lines, in one gzip member. `zcat journal.jsonl.gz` shows them. Payloads are not copied; an entry says
where they are.

`journal.json` is replaced after each entry. It has the length of the journal and, for each run, the last move that it contains. An
entry is written after its rows were synced in the database, so a database that is behind its journal has lost commits.
"""

import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from rollbook.contracts.admission import RunId
from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.group import GroupId
from rollbook.ledger.record_lines import (
    FORMAT,
    ActionLine,
    AnyLine,
    BatchLine,
    GroupLine,
    PublicationLine,
    RunLine,
    StepLine,
)
from rollbook.ledger.records import MoveRecord
from rollbook.ledger.rules.run_transaction import find_run
from rollbook.ledger.store import StoreFaultError, Transaction

JOURNAL = "journal.jsonl.gz"
MARKS = "journal.json"
LEVEL = 1
"""Higher levels cost several times as much and save little."""
MEMBER = b"\x1f\x8b\x08"
"""How a gzip member begins."""
CHUNK = 65_536
UNCONFIRMED = 4
"""Publications before the newest one that may still be confirmed; they are written again."""
Places = Callable[[RunId, Sequence[GroupId]], Mapping[GroupId, tuple[int, int]]]
"""Segment and offset of the payloads of some groups."""


class JournalMark(msgspec.Struct, frozen=True, kw_only=True):
    """What the journal has of a run."""

    number: int = 0
    """The last move."""
    epoch: int = -1
    acknowledged: int = 0
    """The last step that the trainer of this epoch acknowledged."""
    decided: int = 0
    publications: int = 0
    actions: int = 0


class JournalMarks(msgspec.Struct, frozen=True, kw_only=True):
    length: int = 0
    """Bytes of the journal. Bytes behind it belong to an entry that was interrupted."""
    runs: dict[RunId, JournalMark] = {}


def read_marks(directory: Path) -> JournalMarks:
    """Empty if there is no journal."""
    path = directory / MARKS
    try:
        return json_decoder(JournalMarks).decode(path.read_bytes())
    except FileNotFoundError:
        return JournalMarks()
    except (OSError, msgspec.MsgspecError) as error:
        raise StoreFaultError(
            f"{path} cannot be read ({error}); if the database is intact, delete the file, and the journal is written again"
        ) from error


def changes_since(
    tx: Transaction, run_id: RunId, mark: JournalMark, places: Places
) -> tuple[list[AnyLine], JournalMark]:
    """The rows that changed since the mark, and the next mark."""
    run = find_run(tx, run_id)
    numbered = tx.history.records_after(run_id, mark.number)
    moves: dict[GroupId, list[MoveRecord]] = {}
    for _, move in numbered:
        moves.setdefault(move.group_id, []).append(move)
    # A new trainer may demote publications of its predecessor, and with them queued groups, until it decides its own batches.
    is_settled = mark.epoch == run.epoch and run.epoch_acknowledged > run.decided_at_takeover + 1
    if not is_settled:
        for group in tx.groups.queued(run_id):
            moves.setdefault(group.group_id, [])
    groups = tx.groups.find(run_id, list(moves))
    found = places(run_id, [group.group_id for group in groups.values() if group.has_payload])
    lines: list[AnyLine] = [
        RunLine(
            format=FORMAT,
            record=run,
            drops=tx.runs.drops(run_id),
            missing=tx.runs.missing(run_id),
            positions=tx.positions.all(run_id),
            owners=tx.owners.alive(run_id),
            producers=tx.producers.all(run_id),
        )
    ]
    lines += [
        GroupLine(record=groups[group_id], moves=made, place=found.get(group_id))
        for group_id, made in moves.items()
        if group_id in groups
    ]
    new_actions = tx.actions.page(run_id, start=mark.actions, limit=max(run.next_action - mark.actions, 0))
    lines += [ActionLine(record=action) for action in new_actions]
    lines += [BatchLine(record=batch) for batch in tx.batches.each(run_id, after=mark.decided)]
    acknowledged = mark.acknowledged if mark.epoch == run.epoch else min(run.restored_step, mark.acknowledged)
    lines += [StepLine(record=step) for step in tx.steps.each(run_id, after=acknowledged)]
    first = max(0, mark.publications - UNCONFIRMED) if is_settled else 0
    lines += [PublicationLine(record=publication) for publication in tx.publications.each(run_id, start=first)]
    return lines, JournalMark(
        number=numbered[-1][0] if numbered else mark.number,
        epoch=run.epoch,
        acknowledged=run.epoch_acknowledged,
        decided=run.last_decided,
        publications=run.next_publication,
        actions=run.next_action,
    )


class Journal:
    """Appends entries. One process writes it, the one that writes the store."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._marks: JournalMarks | None = None

    def append(
        self,
        run_id: RunId,
        read: Callable[[Callable[[Transaction], tuple[list[AnyLine], JournalMark]]], tuple[list[AnyLine], JournalMark]],
        *,
        places: Callable[[Transaction], Places],
        sync_store: Callable[[], None],
        is_synced: bool,
    ) -> None:
        """`read` runs a function on a consistent state of the store; `sync_store` syncs that state to the disk."""
        with self._lock:
            marks = self._known()
            mark = marks.runs.get(run_id, JournalMark())
            lines, new = read(lambda tx: changes_since(tx, run_id, mark, places(tx)))
            sync_store()
            length = write_entry(self._directory / JOURNAL, lines, at=marks.length, is_synced=is_synced)
            self._marks = JournalMarks(length=length, runs={**marks.runs, run_id: new})
            write_marks(self._directory, self._marks)

    def _known(self) -> JournalMarks:
        if self._marks is None:
            marks, path = read_marks(self._directory), self._directory / JOURNAL
            length = path.stat().st_size if path.exists() else 0
            # A journal that lost its end is continued by complete entries.
            self._marks = marks if marks.length <= length else JournalMarks(length=length)
        return self._marks


def rewrite_journal(directory: Path, tx: Transaction, *, places: Callable[[Transaction], Places]) -> None:
    """Replace the journal by one complete entry for each of its runs: payloads have moved, and old entries take space."""
    marks = read_marks(directory)
    if not marks.runs:
        return
    unfinished, length, runs = directory / f"{JOURNAL}.tmp", 0, dict[RunId, JournalMark]()
    for run_id in marks.runs:
        lines, runs[run_id] = changes_since(tx, run_id, JournalMark(), places(tx))
        length = write_entry(unfinished, lines, at=length, is_synced=True)
    unfinished.replace(directory / JOURNAL)
    write_marks(directory, JournalMarks(length=length, runs=runs))


def write_entry(path: Path, lines: Iterable[AnyLine], *, at: int, is_synced: bool) -> int:
    """Write an entry at this offset; later bytes are cut off. Returns the offset behind it."""
    encoder = msgspec.json.Encoder()
    text = b"".join(encoder.encode(line) + b"\n" for line in lines)
    compressor = zlib.compressobj(LEVEL, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    body = compressor.compress(text) + compressor.flush()
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(handle, at)
            rest = memoryview(body)
            while rest:
                rest = rest[os.pwrite(handle, rest, at + len(body) - len(rest)) :]
            if is_synced:
                os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise StoreFaultError(
            f"{path}: {error.strerror}; if the disk is full, free some space, else check it, then start again; no "
            "acknowledged data is lost"
        ) from error
    return at + len(body)


def write_marks(directory: Path, marks: JournalMarks) -> None:
    path = directory / MARKS
    unfinished = path.with_suffix(".json.tmp")
    try:
        with unfinished.open("wb") as file:
            file.write(msgspec.json.encode(marks) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise StoreFaultError(
            f"{path}: {error.strerror}; free some space or check the disk, then start again"
        ) from error


def read_journal(directory: Path) -> Iterator[AnyLine]:
    """All lines, oldest first. A later line about the same row replaces an earlier one; damaged entries are left out."""
    path, decoder = directory / JOURNAL, json_decoder(AnyLine)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreFaultError(f"{path} cannot be read: {error.strerror}") from error
    at = 0
    while 0 <= at < len(data):
        try:
            text, end = _member(data, at)
            lines = [decoder.decode(line) for line in text.splitlines()]
        except (zlib.error, EOFError, msgspec.MsgspecError):
            at = data.find(MEMBER, at + 1)
            continue
        yield from lines
        at = end


def _member(data: bytes, at: int) -> tuple[bytes, int]:
    """Decompress the member at this offset. Returns the offset behind it, too."""
    member, pieces = zlib.decompressobj(zlib.MAX_WBITS | 16), list[bytes]()
    while not member.eof:
        piece = data[at : at + CHUNK]
        if not piece:
            raise EOFError
        pieces.append(member.decompress(piece))
        at += len(piece) - len(member.unused_data)
    return b"".join(pieces), at
