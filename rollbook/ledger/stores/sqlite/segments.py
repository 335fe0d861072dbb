"""Payload files of the SQLite store: append-only segments, one write for all payloads of a commit.

Inside SQLite a payload would be written to the log and, at a checkpoint, again to the file: two writes, a read, and checksums of
every page. A segment writes it once. The rows that refer to it (`payload_places`) are in SQLite, so a transaction decides which
bytes are valid; bytes not referenced by a row are ignored.

A segment is synced before a commit that must survive a power failure, so that a row on the disk always has its bytes. Commits that
only need to survive the process sync nothing. For them the store records a mark, the number of synced bytes of a segment; payloads
behind the mark are compared with their digests when the store is opened (`segment_upkeep`).
"""

import fcntl
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import xxhash

from rollbook.ledger.store import StoreFaultError

DIRECTORY = "payloads"
SEGMENT_BYTES = 64_000_000
"""A new file every few hundred groups, yet small enough that one old payload does not keep much else on the disk."""
EVERYTHING = 1 << 62
"""The mark of a segment that is synced completely."""
SYNC_AFTER_S = 45.0
"""A full segment that no commit has to wait for is synced this much later; the system has written most of it by then."""
WRITE_BYTES = 262_144
"""Bytes of one write: a fraction of a processor cache, so that writing does not read them from memory again."""
MAX_WRITE_BUFFERS = 512
"""Below the system's limit of 1024."""
_NAME = re.compile(r"(\d{8,})\.seg")


class SegmentPlace(NamedTuple):
    """The location of a payload, and its digest."""

    segment: int
    place: int
    size: int
    digest: int


def digest_of(body: bytes | memoryview, hexdigest: str | None = None) -> int:
    """64 of the 128 bits of a payload's XXH3, as a signed 64-bit number; taken from `hexdigest` if it is given."""
    digest = int((hexdigest or xxhash.xxh3_128_hexdigest(body))[-16:], 16)
    return digest - (1 << 64) if digest >= 1 << 63 else digest


def segment_path(directory: Path, segment: int) -> Path:
    return directory / DIRECTORY / f"{segment:08d}.seg"


def segments_in(directory: Path) -> list[int]:
    """The numbers of the segment files in a ledger directory, oldest first."""
    try:
        names = [path.name for path in (directory / DIRECTORY).iterdir()]
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def read_payload(directory: Path, place: SegmentPlace) -> bytes:
    """Read and verify a payload; raises `StoreFaultError` if it is missing or damaged."""
    body = _bytes(directory, place)
    if body is not None and len(body) == place.size and digest_of(body) == place.digest:
        return body
    problem = "is missing" if body is None else "is damaged"
    raise StoreFaultError(
        f"{segment_path(directory, place.segment)}: the payload at {place.place} of {place.size} bytes {problem}; "
        "restore the ledger's directory from a copy"
    )


def read_payloads(directory: Path, places: Sequence[SegmentPlace]) -> dict[SegmentPlace, memoryview]:
    """Read several payloads. Adjacent ones are read in one call: for the groups of a batch, that is one read instead of a dozen."""
    found: dict[SegmentPlace, memoryview] = {}
    for segment, of_segment in groupby(sorted(places), key=attrgetter("segment")):
        with _opened(directory, segment) as handle:
            for run in _adjacent(of_segment):
                start, end = run[0].place, run[-1].place + run[-1].size
                view = memoryview(b"" if handle is None else os.pread(handle, end - start, start))
                for place in run:
                    body = view[place.place - start : place.place - start + place.size]
                    # A damaged one is read again, which raises the right error.
                    is_good = len(body) == place.size and digest_of(body) == place.digest
                    found[place] = body if is_good else memoryview(read_payload(directory, place))
    return found


def _adjacent(places: Iterable[SegmentPlace]) -> list[list[SegmentPlace]]:
    """Group places of one segment that follow each other."""
    runs: list[list[SegmentPlace]] = []
    end = -1
    for place in places:
        if place.place == end:
            runs[-1].append(place)
        else:
            runs.append([place])
        end = place.place + place.size
    return runs


def is_intact(directory: Path, place: SegmentPlace) -> bool:
    body = _bytes(directory, place)
    return body is not None and len(body) == place.size and digest_of(body) == place.digest


def _bytes(directory: Path, place: SegmentPlace) -> bytes | None:
    with _opened(directory, place.segment) as handle:
        return None if handle is None else os.pread(handle, place.size, place.place)


@contextmanager
def _opened(directory: Path, segment: int) -> Iterator[int | None]:
    """A descriptor of the file; None if it is missing. Opened for each read, so that no descriptor outlives its file."""
    try:
        handle = os.open(segment_path(directory, segment), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)


class SegmentWriter:
    """Appends payloads, from one thread. Each segment is written by one process, which holds a lock on it while it may write."""

    def __init__(
        self, directory: Path, *, first: int, is_always_synced: bool, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self._directory = directory
        self._is_always_synced = is_always_synced
        """Every commit syncs first, so every referenced byte is on the disk, and one mark suffices."""
        self._segment_bytes = segment_bytes
        self._next = first
        self._current: _Segment | None = None
        self._full: list[tuple[_Segment, float, Future[None] | None]] = []
        """Full segments, the time they became full, and their sync once it has started."""
        self._marks: dict[int, int] = {}
        self._recorded: dict[int, int] = {}
        self._syncing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger-segments")

    @property
    def active(self) -> set[int]:
        """Segments that may be being written or synced."""
        current = () if self._current is None else (self._current.number,)
        return {*current, *(segment.number for segment, _, _ in self._full)}

    def append(self, body: bytes | memoryview, digest: str | None = None) -> SegmentPlace:
        """Append a payload, with its digest if it is known. It becomes valid when a row that refers to it is committed.

        It is written to the file by `flush` at the latest; small payloads are written together.
        """
        segment = self._writable()
        place = SegmentPlace(segment.number, segment.end, len(body), digest_of(body, digest))
        segment.append(body)
        if segment.pending_bytes >= WRITE_BYTES or len(segment.pending) >= MAX_WRITE_BUFFERS:
            self.flush()
        return place

    def flush(self) -> None:
        """Write the appended payloads to the file, so that readers see them."""
        segment = self._current
        if segment is not None and segment.pending:
            with _explained(segment.path):
                segment.write()

    def sync(self, only: Set[int] | None = None) -> None:
        """Sync all appended payloads, or those of some segments, to the disk."""
        self.flush()
        self._await_full(only)
        segment = self._current
        if segment is not None and segment.end > segment.synced and (only is None or segment.number in only):
            with _explained(segment.path):
                segment.sync()
            self._marks[segment.number] = EVERYTHING if self._is_always_synced else segment.synced

    def marks(self) -> dict[int, int]:
        """Synced bytes by segment, where no commit has recorded them yet."""
        if self._full:
            self._sync_full(full_before=time.monotonic() - SYNC_AFTER_S)
        return {number: mark for number, mark in self._marks.items() if self._recorded.get(number) != mark}

    def _sync_full(self, *, full_before: float, only: Set[int] | None = None) -> None:
        """Start to sync the segments that were full before that time, and mark those that are done."""
        for at, (segment, since, syncing) in reversed(list(enumerate(self._full))):
            if syncing is None and since <= full_before and (only is None or segment.number in only):
                self._full[at] = segment, since, self._syncing.submit(segment.sync_and_close)
            elif syncing is not None and syncing.done():
                del self._full[at]
                with _explained(segment.path):
                    syncing.result()
                self._marks[segment.number] = EVERYTHING

    def keep(self, recorded: Mapping[int, int]) -> None:
        """A commit has made the appended payloads valid, and recorded these marks."""
        self._recorded.update(recorded)
        if self._current is not None:
            self._current.committed = self._current.end

    def roll_back(self) -> None:
        """Discard the payloads appended since `keep`; later ones overwrite them."""
        segment = self._current
        if segment is not None:
            segment.pending.clear()
            segment.pending_bytes = 0
            segment.end = segment.committed
            segment.synced = min(segment.synced, segment.end)
            self._marks.pop(segment.number, None)

    def close(self) -> dict[int, int]:
        """Sync everything. Returns the marks to record."""
        try:
            self.sync()
        finally:
            self._syncing.shutdown()
        if self._current is not None:
            self._marks[self._current.number] = EVERYTHING
            self._current.close()
            self._current = None
        return self.marks()

    def _writable(self) -> "_Segment":
        segment = self._current
        if segment is not None and segment.end >= self._segment_bytes:
            self.flush()
            self._full.append((segment, time.monotonic(), None))
            segment = self._current = None
        if segment is None:
            segment = self._current = self._create()
        return segment

    def _await_full(self, only: Set[int] | None) -> None:
        self._sync_full(full_before=math.inf, only=only)
        for segment, _, syncing in self._full:
            if syncing is not None and (only is None or segment.number in only):
                wait([syncing])
        self._sync_full(full_before=math.inf, only=only)

    def _create(self) -> "_Segment":
        """Create a new file, and sync its directory, since rows will refer to it."""
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
                except FileExistsError:  # another process created it
                    number += 1
            self._next = number + 1
            sync_directory(folder)
        return segment


class _Segment:
    def __init__(self, number: int, path: Path) -> None:
        self.number = number
        self.path = path
        self.end = self.committed = self.synced = 0
        self.pending: list[bytes | memoryview] = []
        """Appended, not written yet."""
        self.pending_bytes = 0
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._handle, fcntl.LOCK_EX)

    def append(self, body: bytes | memoryview) -> None:
        self.pending.append(body)
        self.pending_bytes += len(body)
        self.end += len(body)

    def write(self) -> None:
        """Write the pending payloads in one call."""
        bodies, at = self.pending, self.end - self.pending_bytes
        written = os.pwritev(self._handle, bodies, at)
        if written < self.pending_bytes:  # interrupted by a signal, or the disk is full: the next call shows which
            rest = memoryview(b"".join(bodies))[written:]
            while rest:
                more = os.pwrite(self._handle, rest, at + written)
                written += more
                rest = rest[more:]
        self.pending, self.pending_bytes = [], 0

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
    """Turn a disk error into `StoreFaultError` with advice. A class, because it is faster than a generator on the hottest path."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise StoreFaultError(
                f"{self._path}: {error.strerror}; if the disk is full, free some space, else check it, then start again; no "
                "acknowledged data is lost"
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


def is_writable(directory: Path, segment: int) -> bool:
    """Whether a process, this one or another, may still write it."""
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
    """If the file reappears after a power failure, no row refers to it and the next start removes it."""
    with suppress(FileNotFoundError):
        segment_path(directory, segment).unlink()
