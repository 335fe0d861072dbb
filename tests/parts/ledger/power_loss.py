"""Power cuts without a switch: a process's diary of writes and syncs, and the disks it may leave behind.

`record` runs a small load on a SQLite ledger under a library that notes every write, truncation, sync and directory change (see the
C file beside this one). `Disk` replays that diary up to any moment. What was synced is there; of the rest a power cut may leave
nothing, everything, or any mix of torn pieces, and a new name in a directory counts only once that directory was synced.
"""

import asyncio
import os
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from rollbook.concurrency.clock import SystemClock
from rollbook.contracts.batch import BatchManifest
from rollbook.ledger.config import Durability, LedgerConfig
from rollbook.ledger.service import Ledger, open_ledger
from rollbook.ledger.stores.sqlite.segments import DIRECTORY as SEGMENTS
from rollbook.ledger.stores.sqlite.store import open_sqlite_store
from rollbook.telemetry.events import EventLog
from tests.parts.ledger.groups import RUN, group_of, settings, submission_of

ROOT = Path(__file__).parents[3]
SOURCE = Path(__file__).with_suffix(".c")
HEADER = struct.Struct("=c3xIQQ")
SECTOR = 512
ANSWERS = "answered"
DISK, LEDGER = "disk", "runs/ledger"
LANES, GROUPS_EACH, PER_STEP = 6, 12, 8


class Leaves(Enum):
    """What a power cut leaves of what was not synced."""

    NOTHING = "nothing"
    EVERYTHING = "everything"
    PIECES = "pieces"


@dataclass(frozen=True, slots=True)
class Entry:
    kind: str
    path: Path
    offset: int
    data: bytes


@dataclass(slots=True)
class _File:
    synced: bytearray = field(default_factory=bytearray)
    pending: list[Entry] = field(default_factory=list)

    def content(self, leaves: Leaves, rng: random.Random) -> bytearray:
        content = bytearray(self.synced)
        if leaves is Leaves.NOTHING:
            return content
        for entry in self.pending:
            if leaves is Leaves.EVERYTHING:
                _apply(content, entry)
            elif rng.random() < 0.5:
                _apply(content, _torn(entry, rng))
        return content

    def sync(self) -> None:
        for entry in self.pending:
            _apply(self.synced, entry)
        self.pending.clear()


def _apply(content: bytearray, entry: Entry) -> None:
    end = entry.offset + len(entry.data)
    if len(content) < end:
        content.extend(bytes(end - len(content)))
    if entry.kind == "t":
        del content[entry.offset :]
    else:
        content[entry.offset : end] = entry.data


def _torn(entry: Entry, rng: random.Random) -> Entry:
    if entry.kind == "t" or rng.random() < 0.5:
        return entry
    sectors = rng.randint(0, len(entry.data) // SECTOR)
    return Entry("w", entry.path, entry.offset, entry.data[: sectors * SECTOR])


class Disk:
    """The files as the diary leaves them at one moment."""

    def __init__(self) -> None:
        self._names: dict[Path, _File] = {}
        self._synced_names: dict[Path, _File] = {}
        self.answers: list[str] = []

    def play(self, entry: Entry) -> None:
        if entry.path.name == ANSWERS:
            if entry.kind == "w":
                self.answers += entry.data.decode().splitlines()
            return
        match entry.kind:
            case "c":
                self._names[entry.path] = _File()
            case "w" | "t":
                self._names[entry.path].pending.append(entry)
            case "u":
                del self._names[entry.path]
            case "r":
                self._names[Path(entry.data.decode())] = self._names.pop(entry.path)
            case "s" if entry.path in self._names:
                self._names[entry.path].sync()
            case "s":  # a directory
                self._synced_names = {p: f for p, f in self._synced_names.items() if p.parent != entry.path}
                self._synced_names |= {p: f for p, f in self._names.items() if p.parent == entry.path}

    def write_to(self, directory: Path, leaves: Leaves, rng: random.Random) -> None:
        """What is found when the power comes back."""
        names = dict(self._synced_names)
        if leaves is not Leaves.NOTHING:
            for path in self._names.keys() | self._synced_names.keys():
                if leaves is Leaves.EVERYTHING or rng.random() < 0.5:
                    names.pop(path, None)
                    if path in self._names:
                        names[path] = self._names[path]
        (directory / SEGMENTS).mkdir(parents=True)
        for path, file in names.items():
            # The index of the log lies in memory that a restart forgets.
            if not path.name.endswith("-shm"):
                folder = directory / SEGMENTS if path.parent.name == SEGMENTS else directory
                (folder / path.name).write_bytes(file.content(leaves, rng))


def diary(path: Path) -> Iterator[Entry]:
    with path.open("rb") as file:
        while header := file.read(HEADER.size):
            kind, path_bytes, offset, data_bytes = HEADER.unpack(header)
            yield Entry(kind.decode(), Path(file.read(path_bytes).decode()), offset, file.read(data_bytes))


def record(directory: Path, durability: Durability) -> list[Entry]:
    """Run the load in a process whose every write is noted."""
    library = directory / "power_loss.so"
    subprocess.run(
        ["gcc", "-Wall", "-Werror", "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl", "-lpthread"], check=True
    )
    disk = directory / DISK
    disk.mkdir()
    subprocess.run(
        [sys.executable, "-m", "tests.parts.ledger.power_loss", str(disk), durability.value],
        check=True,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "LD_PRELOAD": str(library),
            "WATCHED_DIRECTORY": str(disk),
            "DIARY": str(directory / "diary"),
        },
    )
    return list(diary(directory / "diary"))


# ---------------------------------------------------------------------- the process that is watched


async def _load(disk: Path, durability: Durability) -> None:
    log = EventLog("ledger", echo=sys.stdout)
    answers = os.open(disk / ANSWERS, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    async with open_sqlite_store(disk / LEDGER, durability=durability) as store:
        # Small logs, so that they are taken over into the file many times.
        await store.write(lambda tx: tx.session.write("PRAGMA wal_autocheckpoint = 60"))  # type: ignore[attr-defined]
        async with open_ledger(store, LedgerConfig(), clock=SystemClock(), log=log) as ledger:
            await _work(ledger, answers)


async def _work(ledger: Ledger, answers: int) -> None:
    await ledger.create_run(RUN, settings(per_step=PER_STEP, keep_payloads=False))
    epoch = (await ledger.take_role(RUN, restored_step=0)).epoch

    async def produce(lane: int) -> None:
        for number in range(GROUPS_EACH):
            group = group_of(f"{lane}-{number}", (-1,), samples=4)
            await ledger.submit(RUN, submission_of(group))
            os.write(answers, f"group {group.id}\n".encode())

    async def train() -> None:
        for step in range(1, LANES * GROUPS_EACH // PER_STEP + 1):
            manifest = await ledger.decide(RUN, step, epoch=epoch, wait_s=60)
            assert isinstance(manifest, BatchManifest)
            os.write(answers, f"batch {step} {manifest.digest}\n".encode())
            await ledger.acknowledge(RUN, step, f"w{step}", epoch=epoch)
            if step % 3 == 0:
                await ledger.checkpointed(RUN, step, oldest_kept=step, epoch=epoch)

    await asyncio.gather(train(), *(produce(lane) for lane in range(LANES)))


if __name__ == "__main__":
    asyncio.run(_load(Path(sys.argv[1]), Durability(sys.argv[2])))
