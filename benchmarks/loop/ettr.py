"""Effective training time: steps done with one kill every 30 s over steps done without, for each process that is killed.

One run is observed for `--minutes` for each process, and for a quarter of that without kills before and after it: the peer is the
rate of those two, so that other load on the machine matters less. Steps count once: those that a restarted trainer trains again
are no progress. The parts of an outage show where the time goes:

    start      from the kill to the first log line of the new process: the supervisor's wait and the start of Python
    ready      from there until it is ready: imports, the model, the checkpoint
    progress   from there until the next new step: the replay since the checkpoint, and groups that are played again
"""

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import Figure, print_figures, print_status
from rollbook.telemetry.events import read_json_lines
from tests.parts.run.small import SmallRun

ROLES = ("trainer", "policy", "ledger", "rollout", "worker")
KILL_EVERY_S = 30.0
QUIET_SHARE = 0.25
FLOOR = 0.7
SETTINGS = [
    "run.most_quick_deaths=1000",
    "trainer.max_steps=10000000",
    "trainer.checkpoint_every=10",
    "gate.max_attempts=1000",
    "rollout.retry_budget=32",
]
LONG_S = 600.0


@dataclass
class Outages:
    start: list[float] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)
    progress: list[float] = field(default_factory=list)

    def medians(self) -> dict[str, float]:
        parts = {"start_s": self.start, "ready_s": self.ready, "progress_s": self.progress}
        found = {name: round(statistics.median(seconds), 2) for name, seconds in parts.items() if seconds}
        # Of the time between two kills. It depends less on other load than the steps do.
        return {**found, "share_without_outage": round(1 - sum(found.values()) / KILL_EVERY_S, 3)}


class Bench:
    def __init__(self, directory: Path, minutes: float) -> None:
        self._run = SmallRun(directory, SETTINGS)
        self._seconds = minutes * 60

    def measure(self, roles: list[str]) -> list[Figure]:
        self._run.start()
        try:
            self._run.until(lambda: self._run.step() >= 5, what="step 5", within_s=LONG_S)
            figures, before = [], self._rate_without_kills()
            for role in roles:
                steps, kills, outages = self._steps_with_kills(role)
                after = self._rate_without_kills()
                peer = (before + after) / 2 * self._seconds
                print_status(f"{role}: {steps} steps with {kills} kills, {peer:.0f} without, {outages.medians()}")
                figures.append(
                    Figure(
                        name=f"ettr_{role}",
                        ours=steps,
                        peer=peer,
                        unit="steps",
                        ratio=steps / max(1.0, peer),
                        floor=FLOOR,
                        more={"kills": kills, **outages.medians()},
                    )
                )
                before = after
            return figures
        finally:
            self._run.stop()

    def _rate_without_kills(self) -> float:
        """Steps per second."""
        began, before = time.monotonic(), self._run.step()
        time.sleep(self._seconds * QUIET_SHARE)
        return (self._run.step() - before) / (time.monotonic() - began)

    def _steps_with_kills(self, role: str) -> tuple[int, int, Outages]:
        began, before, outages, kills = time.monotonic(), self._run.step(), Outages(), 0
        while (left := began + self._seconds - time.monotonic()) > 0:
            kills += 1
            next_kill = time.monotonic() + min(KILL_EVERY_S, left)
            self._one_outage(role, outages, until=next_kill)
            time.sleep(max(0.0, next_kill - time.monotonic()))
        steps = self._run.step() - before
        # The next process starts from a run that works.
        reached = self._run.step()
        self._run.until(lambda: self._run.step() > reached, what="a step after the last kill", within_s=LONG_S)
        return steps, kills, outages

    def _one_outage(self, role: str, outages: Outages, *, until: float) -> None:
        """Kill the process, and measure the parts of the outage that end before `until`."""
        reached = self._run.step()
        log = self._run.directory / "logs" / f"{'rollout' if role == 'worker' else role}.jsonl"
        event = "rollout.worker_ready" if role == "worker" else "process.started"
        num_before = _count(log, event)
        killed, pid = time.monotonic(), self._run.kill(role)

        def has_started() -> bool:
            return _count(log, event) > num_before

        def is_ready() -> bool:
            return self._run.pid(role) not in (None, pid)

        marks = [killed]
        for is_reached, part in (
            (has_started, outages.start),
            (is_ready, outages.ready),
            (lambda: self._run.step() > reached, outages.progress),
        ):
            while not is_reached():
                if time.monotonic() > until:
                    return
                time.sleep(0.05)
            marks.append(time.monotonic())
            part.append(marks[-1] - marks[-2])


def _count(log: Path, event: str) -> int:
    return len([row for row in read_json_lines(log) if row["event"] == event])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes for each process")
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=list(ROLES))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollbook-ettr-") as directory:
        figures = Bench(Path(directory), args.minutes).measure(args.roles)
    return print_figures(figures, minutes=args.minutes, kill_every_s=KILL_EVERY_S)


if __name__ == "__main__":
    sys.exit(main())
