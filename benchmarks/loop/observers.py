"""What is observed of a run while it lasts: memory of the GPU, where groups are, and what kills do."""

import json
import os
import signal
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollbook.contracts.errors import RollbookError
from rollbook.contracts.group import GroupState
from rollbook.run.directory import RunDirectory
from rollbook.run.reader import open_run
from rollbook.run.resources.machine import driver_gpus

KILLED = ("policy", "trainer")
WATCHED = (*KILLED, "base", "mps")
"""Processes that use the GPU."""


class GpuMemory:
    """The largest memory that processes of a run had on the first GPU, read about once a second."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        """`names`: of the processes that use the GPU."""
        self.total = 0
        self.by_process: dict[str, int] = {}
        self._directory = directory
        self._names = names

    def read(self, _supervisor: int, _steps: int) -> None:
        gpus = list(driver_gpus())
        if not gpus:
            return
        self.total = max(self.total, gpus[0].used_bytes)
        query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        try:
            rows = subprocess.run(query, capture_output=True, text=True, timeout=5, check=False).stdout.splitlines()
            found = json.loads((self._directory / "processes.json").read_text(encoding="utf-8"))["processes"]
        except (OSError, ValueError, subprocess.TimeoutExpired):
            return
        split = [row.replace(" ", "").split(",") for row in rows]
        used = {int(pid): int(mib) << 20 for pid, mib in split if pid.isdigit() and mib.isdigit()}
        pids = {name: row["pid"] for name, row in found.items() if name in self._names and row.get("pid")}
        for name, num_bytes in used_by(pids, used).items():
            self.by_process[name] = max(self.by_process.get(name, 0), num_bytes)


def used_by(pids: Mapping[str, int], used: Mapping[int, int]) -> dict[str, int]:
    """Memory by name. In a container the driver may know processes by other numbers, which have the same order. Empty if processes
    cannot be distinguished, for example while some of them start."""
    if set(pids.values()) >= set(used):
        return {name: used[pid] for name, pid in pids.items() if pid in used}
    if len(pids) != len(used):
        return {}
    return dict(zip(sorted(pids, key=pids.__getitem__), [used[pid] for pid in sorted(used)], strict=True))


class GroupPlaces:
    """How many groups are played, wait in the queue, and belong to decided batches, read about once a second."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen: dict[str, list[int]] = defaultdict(list)

    def read(self, _supervisor: int, steps: int) -> None:
        if steps == 0:
            return
        try:
            with open_run(self._directory) as run:
                found = run.status().by_state
        except RollbookError:
            return  # the ledger is being restarted
        for state in (GroupState.DISPATCHED, GroupState.QUEUED, GroupState.BATCHED):
            self._seen[state].append(found.get(state, 0))

    def means(self) -> dict[str, float]:
        return {str(state): round(statistics.fmean(counts), 1) for state, counts in self._seen.items()}


class Kills:
    """Kills the policy server and the trainer in turn, `rounds` times each, with at least a step between two kills."""

    def __init__(self, directory: Path, rounds: int) -> None:
        self._file = RunDirectory(directory).processes_file
        self._rounds = rounds
        self._steps = 0
        self._last: tuple[str, dict[str, Any]] | None = None
        """The role that was killed last, and the restarts of all before that."""
        self.done = 0
        self.alone = 0
        """Kills after which no other process had to be restarted."""
        self.others: list[str] = []
        """What happened to other processes."""

    def next(self, _supervisor: int, steps: int) -> None:
        if self._rounds == 0 or steps <= self._steps:
            return
        try:
            rows = json.loads(self._file.read_text(encoding="utf-8"))["processes"]
        except (OSError, ValueError):
            return
        watched = {role: rows[role] for role in WATCHED if role in rows}
        if not all(row["ready"] and row["pid"] is not None for row in watched.values()):
            return
        self._judge(watched)
        if self.done < 2 * self._rounds:
            role = KILLED[self.done % 2]
            self._last = role, watched
            os.kill(watched[role]["pid"], signal.SIGKILL)
            self.done += 1
            self._steps = steps

    def _judge(self, rows: Mapping[str, Any]) -> None:
        """Whether the last kill ended its victim only."""
        if self._last is None:
            return
        (victim, before), self._last = self._last, None
        ended = [role for role in rows if role != victim and rows[role]["restarts"] != before[role]["restarts"]]
        self.alone += not ended
        self.others += [f"{role} after kill {self.done} ({victim})" for role in ended]
