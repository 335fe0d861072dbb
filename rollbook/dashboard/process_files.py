"""The processes of a run, their events and their last output, from the files that they write."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rollbook.contracts.decoding import json_decoder
from rollbook.telemetry.events import read_json_lines

TAIL_BYTES = 1 << 18
"""Read from the end of each log."""
STDERR_LINES = 40
LEVELS = ("warning", "error")
MAX_EVENTS = 200
MAX_TEXT = 2000


class Process(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    role: str
    pid: int | None
    state: str
    restarts: int
    ready: bool
    alive: bool
    memory_bytes: int | None = None
    cpu_s: float | None = None
    node: str | None = None
    """The machine of a process that joined the run."""
    address: str | None = None
    problems: tuple[str, ...] = ()
    """What it waits for in vain, and why."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    time: float
    level: str
    process: str
    event: str
    text: str


def read_processes(run_dir: Path) -> list[Process]:
    """The processes that the supervisor last recorded, with their present state in the kernel, then those that joined the run."""
    try:
        recorded = json.loads((run_dir / "processes.json").read_text(encoding="utf-8"))
        rows = recorded["processes"].items()
        members = recorded.get("members", {}).items()
        is_current = isinstance(recorded.get("supervisor"), int) and _usage(recorded["supervisor"])[0] is not None
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return []
    found = [_process(str(name), row) for name, row in rows if isinstance(row, dict)]
    return found + [_member(str(name), row, is_current) for name, row in members if isinstance(row, dict)]


def _member(name: str, row: dict[str, Any], is_current: bool) -> Process:
    """`is_current`: the supervisor that recorded it is running."""
    return Process(
        name=name,
        role=str(row.get("role")),
        pid=None,
        state="running" if is_current else "unknown",
        restarts=0,
        ready=bool(row.get("in_service")),
        alive=is_current,
        node=str(row.get("node")),
        address=str(row.get("address") or "") or None,
    )


def _process(name: str, row: dict[str, Any]) -> Process:
    pid = row.get("pid") if isinstance(row.get("pid"), int) else None
    memory, cpu_s = (None, None) if pid is None else _usage(pid)
    restarts = row.get("restarts")
    problems = row["problems"] if isinstance(row.get("problems"), dict) else {}
    return Process(
        name=name,
        role=name.partition("-")[0],
        pid=pid,
        state=str(row.get("state", "unknown")),
        restarts=restarts if isinstance(restarts, int) else 0,
        ready=bool(row.get("ready")),
        alive=memory is not None,
        memory_bytes=memory,
        cpu_s=cpu_s,
        problems=tuple(f"waits for {awaited}: {cause}"[:MAX_TEXT] for awaited, cause in problems.items()),
    )


def _usage(pid: int) -> tuple[int | None, float | None]:
    """Resident memory and CPU seconds of a process of this package; None if it does not run (here)."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None, None
    # The pid now belongs to another program, or this is a copy of the run on another machine.
    if b"rollbook" not in command or fields[0] == "Z":
        return None, None
    ticks = os.sysconf("SC_CLK_TCK")
    return int(fields[21]) * os.sysconf("SC_PAGE_SIZE"), (int(fields[11]) + int(fields[12])) / ticks


def read_resumes(run_dir: Path) -> list[dict[str, Any]]:
    """When the run was resumed, oldest first, and which settings changed: path, old value, new value."""
    return [
        {"at": row["time"], "changed": row["changed"]}
        for row in read_json_lines(run_dir / "resumes.jsonl")
        if isinstance(row.get("changed"), dict) and isinstance(row.get("time"), int | float)
    ]


def read_events(run_dir: Path, *, levels: Iterable[str] = LEVELS, name: str | None = None) -> list[dict[str, Any]]:
    """The newest events of these levels of all processes, or those of one name, newest first."""
    wanted = frozenset(levels)
    found = [
        row
        for path in _logs(run_dir, "*.jsonl")
        for row in _json_lines(_tail(path).splitlines())
        if row.get("level") in wanted and name in (None, row["event"])
    ]
    found.sort(key=lambda row: row["time"], reverse=True)
    return found[:MAX_EVENTS]


def last_events(run_dir: Path) -> dict[str, dict[str, Any]]:
    """The newest event of each process."""
    found: dict[str, dict[str, Any]] = {}
    for path in _logs(run_dir, "*.jsonl"):
        newest = next(_json_lines(reversed(_tail(path).splitlines())), None)
        if newest is not None:
            found[path.stem] = newest
    return found


def quarantined_replicas(run_dir: Path) -> list[str]:
    """Addresses of the policy servers that the trainer stopped sending weights to, and that did not come back."""
    is_quarantined: dict[str, bool] = {}
    for path in _logs(run_dir, "trainer*.jsonl"):
        for row in _json_lines(line for line in _tail(path).splitlines() if b'"policy.replica_' in line):
            if row["event"] in ("policy.replica_quarantined", "policy.replica_back"):
                is_quarantined[str(row.get("url"))] = row["event"] == "policy.replica_quarantined"
    return [url for url, is_out in is_quarantined.items() if is_out]


def described(row: dict[str, Any]) -> Event:
    known = ("time", "level", "process", "event", "stack")
    text = " ".join(f"{name}={value}" for name, value in row.items() if name not in known)
    return Event(
        time=row["time"],
        level=str(row.get("level")),
        process=str(row.get("process")),
        event=str(row.get("event")),
        text=text[:MAX_TEXT],
    )


def last_output(run_dir: Path) -> list[tuple[str, list[str]]]:
    """The last lines that each process wrote to stderr; processes without output are left out."""
    found = []
    for path in _logs(run_dir, "*.stderr"):
        lines = _tail(path).decode(errors="replace").splitlines()[-STDERR_LINES:]
        if lines:
            found.append((path.stem, [line[:MAX_TEXT] for line in lines]))
    return found


def _logs(run_dir: Path, pattern: str) -> list[Path]:
    return sorted((run_dir / "logs").glob(pattern))


def _tail(path: Path) -> bytes:
    """The end of a log. A full log is renamed to `.1`: its end is read if the next one is still short."""
    newest = _end(path, TAIL_BYTES)
    return _end(path.with_name(f"{path.name}.1"), TAIL_BYTES - len(newest)) + newest


def _end(path: Path, num_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - num_bytes))
            return file.read(num_bytes)
    except OSError:
        return b""


def _json_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Events with a time. Lines that are cut or damaged are skipped."""
    for line in lines:
        try:
            row = json_decoder(Any).decode(line)
        except msgspec.DecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get("time"), int | float) and isinstance(row.get("event"), str):
            yield row
