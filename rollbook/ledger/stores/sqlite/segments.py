"""Payloads in files beside the embedded store: append-only segments, one write for all payloads of a commit.

Inside SQLite a payload goes through the log and then once more, at a checkpoint, into the file: two writes, a read, and checksums
of every page. Here it is written once. The rows that say where it lies (`payload_places`) are in SQLite, so a transaction decides
what counts: bytes that no row points to are nothing.

Order is everything. A segment is synced before a commit that must survive a power cut, so that a row on the disk has its bytes
there, too. Commits that need only survive the process sync nothing; for them the store remembers how far a segment is on the disk,
and what lies behind that mark is compared with its digest when the store is opened (`segment_recovery`).
"""

import fcntl
import math
import os
import re
import time
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from rollbook.ledger.store import StoreFaultError

DIRECTORY = "payloads"
SEGMENT_BYTES = 64_000_000
"""Large enough that a file is made every few hundred groups, small enough that one group kept for long holds little else."""
EVERYTHING = 1 << 62
"""The mark of a segment that is on the disk to its end."""
SYNC_AFTER_S = 45.0
"""A full segment that no commit had to wait for is synced this much later: by then the system has written most of it by itself."""
WRITTEN_TOGETHER = 262_144
"""Bytes: a fraction of what a processor keeps at hand, so that writing need not fetch them from memory again."""
BUFFERS_IN_ONE_WRITE = 512
"""Below the system's limit of 1024."""
_NAME = re.compile(r"(\d{8,})\.seg")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a payload lies, and its digest."""

    segment: int
    place: int
    size: int
    digest: int


def digest_of(body: bytes | memoryview, told: str | None = None) -> int:
    """64 of the 128 bits of a payload's XXH3, as the signed number that a database can hold; taken from `told` if it is known."""
    found = int((told or xxhash.xxh3_128_hexdigest(body))[-16:], 16)
    return found - (1 << 64) if found >= 1 << 63 else found


def segment_path(directory: Path, segment: int) -> Path:
    return directory / DIRECTORY / f"{segment:08d}.seg"


def segments_in(directory: Path) -> list[int]:
    """The segments of a ledger's directory that exist as files, oldest first."""
    try:
        names = [path.name for path in (directory / DIRECTORY).iterdir()]
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def read_payload(directory: Path, place: Place) -> bytes:
    """The payload, whole and undamaged, or `StoreFaultError`."""
    body = _bytes(directory, place)
    if body is not None and len(body) == place.size and digest_of(body) == place.digest:
        return body
    found = "is missing" if body is None else "is damaged"
    raise StoreFaultError(
        f"{segment_path(directory, place.segment)}: the payload at {place.place} of {place.size} bytes {found}; "
        "restore the ledger's directory from a copy"
    )


def read_payloads(directory: Path, places: Sequence[Place]) -> dict[Place, memoryview]:
    """The same for several. Those that were written one behind the other are read in one go: for the groups of a batch, which
    came in its order, that is one reading instead of a dozen."""
    found: dict[Place, memoryview] = {}
    for row in _in_rows(places):
        first, last = row[0], row[-1]
        whole = _bytes(directory, Place(first.segment, first.place, last.place + last.size - first.place, 0))
        view = memoryview(whole or b"")
        for place in row:
            body = view[place.place - first.place :][: place.size]
            # A damaged one is read once more by itself, which says what is wrong with it.
            is_good = len(body) == place.size and digest_of(body) == place.digest
            found[place] = body if is_good else memoryview(read_payload(directory, place))
    return found


def _in_rows(places: Sequence[Place]) -> list[list[Place]]:
    """Places that lie one behind the other, together."""
    rows: list[list[Place]] = []
    for place in sorted(places, key=lambda place: (place.segment, place.place)):
        before = rows[-1][-1] if rows else None
        if before is not None and (before.segment, before.place + before.size) == (place.segment, place.place):
            rows[-1].append(place)
        else:
            rows.append([place])
    return rows


def is_whole(directory: Path, place: Place) -> bool:
    body = _bytes(directory, place)
    return body is not None and len(body) == place.size and digest_of(body) == place.digest


def _bytes(directory: Path, place: Place) -> bytes | None:
    # Opened anew each time: it costs a twentieth of the reading, and no descriptor outlives its file.
    try:
        handle = os.open(segment_path(directory, place.segment), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return os.pread(handle, place.size, place.place)
    finally:
        os.close(handle)


class SegmentWriter:
    """Appends payloads, from one thread. A segment is written by one process in one life, and locked as long as that may go on."""

    def __init__(
        self, directory: Path, *, first: int, is_always_synced: bool, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self._directory = directory
        self._is_always_synced = is_always_synced
        """Every commit syncs first: then all that ever counts is on the disk, and one mark says so for good."""
        self._segment_bytes = segment_bytes
        self._next = first
        self._current: _Segment | None = None
        self._left: list[tuple[_Segment, float, Future[None] | None]] = []
        """Full ones, when they were left, and their way to the disk once it has begun."""
        self._marks: dict[int, int] = {}
        self._recorded: dict[int, int] = {}
        self._syncing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger-segments")

    @property
    def active(self) -> set[int]:
        """Segments that may be written or synced at this moment."""
        current = () if self._current is None else (self._current.number,)
        return {*current, *(segment.number for segment, _, _ in self._left)}

    def append(self, body: bytes | memoryview, digest: str | None = None) -> Place:
        """Put a payload, with its digest if it is known, behind the others. It counts once a committed row points to it.

        It is in the hands of the system after `flush`, or before: payloads are written while the processor still has them at hand,
        a few small ones together.
        """
        segment = self._with_room()
        place = Place(segment.number, segment.end, len(body), digest_of(body, digest))
        segment.take(body)
        if segment.waiting_bytes >= WRITTEN_TOGETHER or len(segment.waiting) >= BUFFERS_IN_ONE_WRITE:
            self.flush()
        return place

    def flush(self) -> None:
        """Write what was appended, so that others can read it."""
        segment = self._current
        if segment is not None and segment.waiting:
            with _explained(segment.path):
                segment.write()

    def sync(self, only: Set[int] | None = None) -> None:
        """Bring everything appended so far to the disk, or what is in some segments."""
        self.flush()
        self._await_left(only)
        segment = self._current
        if segment is not None and segment.end > segment.synced and (only is None or segment.number in only):
            with _explained(segment.path):
                segment.sync()
            self._marks[segment.number] = EVERYTHING if self._is_always_synced else segment.synced

    def marks(self) -> dict[int, int]:
        """How far segments are on the disk, as far as no commit has recorded it."""
        if self._left:
            self._sync_left(left_before=time.monotonic() - SYNC_AFTER_S)
        return {number: mark for number, mark in self._marks.items() if self._recorded.get(number) != mark}

    def _sync_left(self, *, left_before: float, only: Set[int] | None = None) -> None:
        """Begin to sync the segments that were left long enough ago, and note those that are done."""
        for at, (segment, since, syncing) in reversed(list(enumerate(self._left))):
            if syncing is None and since <= left_before and (only is None or segment.number in only):
                self._left[at] = segment, since, self._syncing.submit(segment.sync_and_close)
            elif syncing is not None and syncing.done():
                del self._left[at]
                with _explained(segment.path):
                    syncing.result()
                self._marks[segment.number] = EVERYTHING

    def keep(self, recorded: Mapping[int, int]) -> None:
        """A commit has made what was appended count, and recorded these marks."""
        self._recorded.update(recorded)
        if self._current is not None:
            self._current.committed = self._current.end

    def roll_back(self) -> None:
        """What was appended since `keep` never counted: write over it."""
        segment = self._current
        if segment is not None:
            segment.waiting.clear()
            segment.waiting_bytes = 0
            segment.end = segment.committed
            segment.synced = min(segment.synced, segment.end)
            self._marks.pop(segment.number, None)

    def close(self) -> dict[int, int]:
        """Bring all to the disk. Returns the marks that hold then."""
        try:
            self.sync()
        finally:
            self._syncing.shutdown()
        if self._current is not None:
            self._marks[self._current.number] = EVERYTHING
            self._current.close()
            self._current = None
        return self.marks()

    def _with_room(self) -> "_Segment":
        segment = self._current
        if segment is not None and segment.end >= self._segment_bytes:
            self.flush()
            self._left.append((segment, time.monotonic(), None))
            segment = self._current = None
        if segment is None:
            segment = self._current = self._begin()
        return segment

    def _await_left(self, only: Set[int] | None) -> None:
        self._sync_left(left_before=math.inf, only=only)
        for segment, _, syncing in self._left:
            if syncing is not None and (only is None or segment.number in only):
                wait([syncing])
        self._sync_left(left_before=math.inf, only=only)

    def _begin(self) -> "_Segment":
        """Make a file of a new name, and bring the name to the disk: rows will point to it."""
        folder = self._directory / DIRECTORY
        with _explained(folder):
            if not folder.is_dir():
                folder.mkdir(exist_ok=True)
                sync_directory(self._directory)
            number = max((self._next - 1, *segments_in(self._directory))) + 1
            while True:
                try:
                    segment = _Segment(number, segment_path(self._directory, number))
                    break
                except FileExistsError:  # another process, in the same moment
                    number += 1
            self._next = number + 1
            sync_directory(folder)
        return segment


class _Segment:
    def __init__(self, number: int, path: Path) -> None:
        self.number = number
        self.path = path
        self.end = self.committed = self.synced = 0
        self.waiting: list[bytes | memoryview] = []
        """Appended, and not written yet."""
        self.waiting_bytes = 0
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._handle, fcntl.LOCK_EX)

    def take(self, body: bytes | memoryview) -> None:
        self.waiting.append(body)
        self.waiting_bytes += len(body)
        self.end += len(body)

    def write(self) -> None:
        """What waits, in one go."""
        bodies, at = self.waiting, self.end - self.waiting_bytes
        written = os.pwritev(self._handle, bodies, at)
        if written < self.waiting_bytes:  # a signal, or the last of the room: the next call says which
            rest = memoryview(b"".join(bodies))[written:]
            while rest:
                more = os.pwrite(self._handle, rest, at + written)
                written += more
                rest = rest[more:]
        self.waiting, self.waiting_bytes = [], 0

    def sync(self) -> None:
        os.fdatasync(self._handle)
        self.synced = self.end

    def sync_and_close(self) -> None:
        try:
            self.sync()
        finally:
            self.close()

    def close(self) -> None:
        os.close(self._handle)


class _explained:
    """Turn an error of the disk into a fault that says what to do. A class, because it stands on the hottest path."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise StoreFaultError(
                f"{self._path}: {error.strerror}; if the disk is full make room, else check it, and start again: nothing that "
                "was answered is lost"
            ) from error


def sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_segment(directory: Path, segment: int) -> None:
    with segment_path(directory, segment).open("rb+") as file:
        os.fsync(file.fileno())


def is_written(directory: Path, segment: int) -> bool:
    """Whether some process still writes it, this one or another."""
    try:
        handle = os.open(segment_path(directory, segment), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def remove_segment(directory: Path, segment: int) -> None:
    """Should the power be cut now, the file is there again, no row points to it, and the next start removes it."""
    with suppress(FileNotFoundError):
        segment_path(directory, segment).unlink()
