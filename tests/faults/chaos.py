"""Kill random processes of a run and check that no group is lost: `make chaos SEED=1 KILLS=100`.

The run has every kind of process: ledger, policy server, environment server with simulators, trainer, dispatcher, worker. A seed
determines the moments and the victims, one to three at a time, also while others restart. Then the run is drained, resumed,
finished, audited and replayed. The report lists kills, recovery times by role, trained groups, duplicates and losses.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from rollbook.run.record import open_run
from rollbook.telemetry.events import read_json_lines
from tests.parts.run.small import CONFIG, REPOSITORY, SmallRun, rollbook

AWS = REPOSITORY / "examples" / "02_aws_cli_agent"
SETTINGS = [
    "run.most_quick_deaths=1000",
    "trainer.max_steps=1000000",
    "trainer.checkpoint_every=5",
    "gate.max_attempts=1000",
    "rollout.retry_budget=32",
    "rollout.max_seconds=60.0",
    "gate.group_deadline_s=120.0",
]
ENVIRONMENTS: dict[str, list[str]] = {
    "guessing": [*SETTINGS, "env.pool_size=32", "env.args.step_s=0.05", "inference.max_queued=64"],
    "aws": [*SETTINGS, "env.pool_size=4", "rollout.completions_per_prompt=2", "rollout.max_turns=6"],
}
ROLES = ("trainer", "worker", "policy", "ledger", "env", "rollout")
RECOVERY_S = 240.0
"""Limit from a kill to the recovery of the role, on a busy machine."""
AFTER_STEPS = 3


@dataclass
class Kill:
    role: str
    pid: int
    at: float
    recovery_s: float | None = None
    simulators: int = 0
    """Number of simulators before the kill."""


@dataclass
class Report:
    kills: list[Kill] = field(default_factory=list)
    steps: int = 0
    trained: int = 0
    duplicates: int = 0
    losses: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    is_replayed: bool = False

    @property
    def ok(self) -> bool:
        return not (self.duplicates or self.losses or self.violations) and self.is_replayed

    def row(self) -> dict[str, Any]:
        return {
            "kills": len(self.kills),
            "steps": self.steps,
            "trained_groups": self.trained,
            "duplicates": self.duplicates,
            "losses": self.losses,
            "dropped": self.dropped,
            "violations": self.violations,
            "replayed": self.is_replayed,
            "recovery_s": {role: round(statistics.median(found), 2) for role, found in self._recovery_times().items()},
            "ok": self.ok,
        }

    def table(self) -> str:
        lines = [f"{'role':<12}{'kills':>7}{'median s':>10}{'slowest s':>11}"]
        for role, found in sorted(self._recovery_times().items()):
            lines.append(f"{role:<12}{len(found):>7}{statistics.median(found):>10.2f}{max(found):>11.2f}")
        lines.append(
            f"steps {self.steps}, trained groups {self.trained}, duplicates {self.duplicates}, losses {self.losses}"
        )
        lines.append(f"dropped by reason: {self.dropped}")
        audit = "; ".join(self.violations) or "ok"
        lines.append(f"audit: {audit}; replay: {'same bits' if self.is_replayed else 'DIFFERS'}")
        return "\n".join(lines)

    def _recovery_times(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for kill in self.kills:
            if kill.recovery_s is not None:
                found.setdefault(kill.role, []).append(kill.recovery_s)
        return found


class Chaos:
    def __init__(self, directory: Path, *, seed: int, kills: int, env: str, log: Any = lambda text: None) -> None:
        self._rng = random.Random(seed)
        self._kills = kills
        self._roles = (*ROLES, "simulator") if env == "aws" else ROLES
        self._pool_size = 4
        self._log = log
        self.report = Report()
        config = (AWS / "run.toml").read_text(encoding="utf-8") if env == "aws" else CONFIG
        self.run = SmallRun(directory, ENVIRONMENTS[env], config=config)
        if env == "aws":
            (directory / "aws_reference.py").write_text(
                (AWS / "aws_reference.py").read_text(encoding="utf-8"), encoding="utf-8"
            )

    def run_all(self) -> Report:
        self.run.start()
        try:
            self.run.until(lambda: self.run.step() >= 2, what="step 2", within_s=RECOVERY_S)
            while len(self.report.kills) < self._kills:
                self._kill_some()
            self.run.until(self._has_trained_since, what="a step after the last kill", within_s=RECOVERY_S)
            self._finish()
        finally:
            self.run.stop()
        self._check()
        return self.report

    def _kill_some(self) -> None:
        """Kill one to three processes and wait until all have recovered; sometimes pause before the next kill."""
        wanted = min(self._rng.choice((1, 1, 2, 3)), self._kills - len(self.report.kills))
        killed: list[Kill] = []
        for role in self._rng.sample(self._roles, wanted):
            pid = self.run.until(partial(self._pid, role), what=f"{role} was up", within_s=RECOVERY_S)
            simulators = len(self._simulators()) if role == "simulator" else 0
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it ended with an earlier victim
            killed.append(Kill(role, pid, time.time(), simulators=simulators))
        self.report.kills += killed
        waiting = list(killed)
        while waiting:
            self.run.until(
                lambda: any(self._has_recovered(kill) for kill in waiting),
                what=f"{waiting} recovered",
                within_s=RECOVERY_S,
            )
            for kill in [kill for kill in waiting if self._has_recovered(kill)]:
                kill.recovery_s = time.time() - kill.at
                self._log(f"{kill.role:<10} recovered after {kill.recovery_s:6.2f} s, at step {self.run.step()}")
                waiting.remove(kill)
        if self._rng.random() < 0.7:
            time.sleep(self._rng.uniform(0, 1.5))

    def _pid(self, role: str) -> int | None:
        if role == "simulator":
            found = [p.pid for p in self._simulators()]
            return self._rng.choice(found) if found else None
        return self.run.pid(role)

    def _has_recovered(self, kill: Kill) -> bool:
        """A new process has replaced it and reported that it is ready."""
        if kill.role == "simulator":
            alive = {process.pid for process in self._simulators()}
            return kill.pid not in alive and len(alive) >= min(kill.simulators, self._pool_size)
        if kill.role == "worker":
            log = read_json_lines(self.run.directory / "logs" / "rollout.jsonl")
            return any(event["event"] == "rollout.worker_ready" and event["time"] > kill.at for event in log[-400:])
        pid = self.run.pid(kill.role)
        return pid is not None and pid != kill.pid

    def _simulators(self) -> list[psutil.Process]:
        env = self.run.pid("env")
        found = []
        try:
            family = psutil.Process(env).children(recursive=True) if env else []
        except psutil.NoSuchProcess:
            return []
        for process in family:
            try:
                if "rollbook.envs.builtin.awscli.cloud.simulator_process" in process.cmdline():
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def _has_trained_since(self) -> bool:
        return self._last_step_time() > self.report.kills[-1].at

    def _last_step_time(self) -> float:
        rows = [json.loads(line) for line in self._tail(self.run.directory / "metrics.jsonl")]
        return max((row["time"] for row in rows if row.get("process") == "trainer"), default=0.0)

    def _tail(self, path: Path, size: int = 65_536) -> list[str]:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return [line for line in file.read().decode(errors="replace").splitlines()[1:] if line.endswith("}")]

    def _finish(self) -> None:
        """Drain, then resume and run to a regular end."""
        self.run.process.send_signal(signal.SIGINT)
        drained = self.run.wait(RECOVERY_S)
        assert drained["exit_code"] == 0, drained["stderr"][-3000:]
        self.run.overrides.append(f"trainer.max_steps={drained['steps'] + AFTER_STEPS}")
        ended = self.run.start().wait(RECOVERY_S)
        assert (ended["exit_code"], ended["end"]) == (0, "finished"), ended["stderr"][-3000:]
        self.report.steps = ended["steps"]

    def _check(self) -> None:
        report = self.report
        audit = json.loads(rollbook("audit", str(self.run.directory), "--json").stdout)
        report.violations = list(audit["violations"])
        report.dropped = dict(audit["dropped"])
        with open_run(self.run.directory) as record:
            acknowledged = {step.step for step in record.steps() if step.receipt == "acknowledged"}
            trained = [group.id for batch in record.batches(report.steps) for group in batch.groups]
        report.trained = len(set(trained))
        report.duplicates = len(trained) - report.trained
        # A loss is a step that was not trained, or an opened group without an outcome.
        law = audit["law"]
        unexplained = audit["opened"] - sum(law.values())
        report.losses = abs(unexplained) + len(set(range(1, report.steps + 1)) - acknowledged)
        replayed = rollbook("replay", str(self.run.directory), "--verify")
        report.is_replayed = replayed.returncode == 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="chaos")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--env", choices=sorted(ENVIRONMENTS), default="aws")
    args = parser.parse_args(argv)

    def write_line(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    with tempfile.TemporaryDirectory(prefix="rollbook-chaos-") as directory:
        report = Chaos(Path(directory), seed=args.seed, kills=args.kills, env=args.env, log=write_line).run_all()
    write_line(report.table())
    write_line(json.dumps(report.row()))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
