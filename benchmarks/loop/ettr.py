"""Effective training time: steps done with one kill every 30 s over steps done without, in all and by process killed.

One run: a quarter of `--minutes` without kills, then `--minutes` with a kill every 30 s, then a quarter without. The peer is the
rate of the two quiet parts, so that other load on the machine matters less. The policy does not learn: otherwise its episodes would
get shorter, and the second quiet part would be faster than the first. The processes are killed in rounds, in random order; the
figure of a process counts the 30 s after each of its kills. Steps count once: those that a restarted trainer trains again are no
progress. The parts of an outage show where the time goes:

    start      from the kill to the first log line of the new process: the supervisor's wait, and the fork or the start of Python
    ready      from there until it is ready: imports, the model, the checkpoint
    progress   from there until the next new step: the replay since the checkpoint, and groups that are played again
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import Figure, print_figures, print_status
from rollbook.telemetry.json_tail import JsonTail
from tests.parts.run.small import SmallRun

ROLES = ("trainer", "policy", "ledger", "rollout", "worker")
KILL_EVERY_S = 30.0
QUIET_SHARE = 0.25
FLOOR = 0.7
SETTINGS = [
    "run.most_quick_deaths=1000",
    "trainer.max_steps=10000000",
    "trainer.checkpoint_every=10",
    "trainer.lr=1e-12",
    "gate.max_attempts=1000",
    "rollout.retry_budget=32",
]
LONG_S = 600.0


@dataclass
class Outages:
    """What the kills of one process cost."""

    steps: list[int] = field(default_factory=list)
    """Steps within `KILL_EVERY_S` after each kill."""
    start: list[float] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)
    progress: list[float] = field(default_factory=list)

    def medians(self) -> dict[str, float]:
        parts = {"start_s": self.start, "ready_s": self.ready, "progress_s": self.progress}
        return {name: round(statistics.median(seconds), 2) for name, seconds in parts.items() if seconds}


class Bench:
    def __init__(self, directory: Path, minutes: float, seed: int) -> None:
        self._run = SmallRun(directory, SETTINGS)
        self._seconds = minutes * 60
        self._rng = random.Random(seed)

    def measure(self, roles: list[str]) -> list[Figure]:
        self._run.start()
        try:
            self._run.until(lambda: self._run.step() >= 5, what="step 5", within_s=LONG_S)
            before = self._rate_without_kills()
            outages = {role: Outages() for role in roles}
            for _ in range(max(1, round(self._seconds / KILL_EVERY_S / len(roles)))):
                for role in self._rng.sample(roles, len(roles)):
                    self._one_outage(role, outages[role])
            after = self._rate_without_kills()
        finally:
            self._run.stop()
        print_status(f"steps per second without kills: {before:.2f} before, {after:.2f} after")
        rate = (before + after) / 2
        return [
            self._figure("all", list(outages.values()), rate),
            *(self._figure(role, [found], rate) for role, found in outages.items()),
        ]

    def _rate_without_kills(self) -> float:
        """Steps per second."""
        began, before = time.monotonic(), self._run.step()
        time.sleep(self._seconds * QUIET_SHARE)
        return (self._run.step() - before) / (time.monotonic() - began)

    def _one_outage(self, role: str, outages: Outages) -> None:
        """Kill the process, and measure the steps and the parts of the outage until the next kill."""
        run, reached = self._run, self._run.step()
        log = JsonTail(run.directory / "logs" / f"{'rollout' if role == 'worker' else role}.jsonl")
        event = "rollout.worker_ready" if role == "worker" else "process.started"
        list(log.poll())
        killed, pid = time.monotonic(), run.kill(role)
        until, mark = killed + KILL_EVERY_S, killed
        parts: list[tuple[Callable[[], bool], list[float]]] = [
            (lambda: any(row["event"] == event for row in log.poll()), outages.start),
            (lambda: run.pid(role) not in (None, pid), outages.ready),
            (lambda: run.step() > reached, outages.progress),
        ]
        for is_reached, part in parts:
            while time.monotonic() < until and not is_reached():
                time.sleep(0.05)
            part.append(time.monotonic() - mark)
            mark = time.monotonic()
        time.sleep(max(0.0, until - time.monotonic()))
        outages.steps.append(run.step() - reached)
        print_status(f"{role}: {outages.steps[-1]} steps in {KILL_EVERY_S:g} s after its kill")

    def _figure(self, name: str, outages: list[Outages], rate: float) -> Figure:
        kills = sum(len(one.steps) for one in outages)
        peer = rate * KILL_EVERY_S * kills
        steps = sum(sum(one.steps) for one in outages)
        return Figure(
            name=f"ettr_{name}",
            ours=steps,
            peer=peer,
            unit="steps",
            ratio=steps / max(1.0, peer),
            # The floor is for kills of any process; those of one process are few.
            floor=FLOOR if name == "all" else None,
            more={"kills": kills, **(outages[0].medians() if len(outages) == 1 else {})},
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes with kills")
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=list(ROLES))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollbook-ettr-") as directory:
        figures = Bench(Path(directory), args.minutes, args.seed).measure(args.roles)
    return print_figures(figures, minutes=args.minutes, kill_every_s=KILL_EVERY_S)


if __name__ == "__main__":
    sys.exit(main())
