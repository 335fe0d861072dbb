"""The result of a chaos run: faults with their times to heal, what was trained, and the page docs/results/chaos.md.

`make chaos` with `--write` adds its result to docs/results/chaos.json, `make chaos-cluster` to cluster-chaos.json;
`python -m tests.faults.chaos_report` prints the page. Both files are lists, newest first.
"""

import itertools
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks.report import machine

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "chaos.json"
CLUSTER_RESULTS = RESULTS.with_name("cluster-chaos.json")


class Kind(StrEnum):
    KILL = "kill"
    SEVERAL = "several at once"
    TWICE = "killed again while it starts"
    TERMINATE = "terminated by another program"
    STOP = "stopped for longer than every lease"
    START = "killed while the run starts"
    DRAIN = "killed while the run drains"
    ACTION = "killed when an operator acts on the run"
    DISK = "full disk"
    CLOCK = "clock jump"
    NODE = "machine lost"
    HEAD = "head lost and started again"
    LINK = "link cut for 2 to 30 s"
    SLOW_LINK = "200 ms latency and 5 % loss"
    DATABASE = "database restarted"
    DATABASE_KILL = "database killed"
    FAIL_OVER = "database lost, fail-over to its standby"
    NODE_DISK = "full disk of one machine"


@dataclass
class Fault:
    kind: Kind
    role: str
    kills: int = 0
    heal_s: float | None = None


@dataclass
class Report:
    seed: int
    env: str
    runs: int = 1
    faults: list[Fault] = field(default_factory=list)
    steps: int = 0
    trained: int = 0
    """Entries of the batches: groups, or parts of groups with batch policy `parts`. The audit checks the samples of the parts."""
    duplicates: int = 0
    losses: int = 0
    scored: int = 0
    """Samples of runs in which every episode does the right thing."""
    wrong_rewards: int = 0
    """Those whose reward is not that of a right episode: infrastructure was scored."""
    dropped: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    replays: int = 0
    """Runs whose replay gave the same bits."""
    seconds: float = 0.0

    @property
    def kills(self) -> int:
        """Processes that were killed or stopped."""
        return sum(fault.kills for fault in self.faults)

    @property
    def is_replayed(self) -> bool:
        return self.replays == self.runs

    @property
    def ok(self) -> bool:
        return not (self.duplicates or self.losses or self.wrong_rewards or self.violations) and self.is_replayed

    def heal_times(self, name: str) -> dict[str, list[float]]:
        """Times to heal by `kind` or `role`."""
        found: dict[str, list[float]] = {}
        for fault in self.faults:
            if fault.heal_s is not None:
                found.setdefault(str(getattr(fault, name)), []).append(fault.heal_s)
        return found

    def row(self) -> dict[str, Any]:
        return {
            "date": time.strftime("%Y-%m-%d"),
            "commit": machine()["commit"],
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[2], 1),
            "seed": self.seed,
            "env": self.env,
            "runs": self.runs,
            "kills": self.kills,
            "faults": len(self.faults),
            "seconds": round(self.seconds),
            "steps": self.steps,
            "trained_groups": self.trained,
            "duplicates": self.duplicates,
            "losses": self.losses,
            "scored": self.scored,
            "wrong_rewards": self.wrong_rewards,
            "dropped": self.dropped,
            "violations": self.violations,
            "replays": self.replays,
            "heal_s_by_kind": _summary(self.heal_times("kind")),
            "heal_s_by_role": _summary(self.heal_times("role")),
            "ok": self.ok,
        }

    def table(self) -> str:
        lines = []
        for name in ("kind", "role"):
            lines.append(f"{name:<40}{'faults':>7}{'median s':>10}{'worst s':>10}")
            for key, found in sorted(self.heal_times(name).items()):
                lines.append(f"{key:<40}{len(found):>7}{statistics.median(found):>10.2f}{max(found):>10.2f}")
        lines.append(
            f"{self.kills} kills in {self.seconds:.0f} s, steps {self.steps}, trained groups or parts {self.trained}, duplicates "
            f"{self.duplicates}, losses {self.losses}"
        )
        if self.scored:
            lines.append(f"rewards: {self.scored}, of them wrong because of a fault: {self.wrong_rewards}")
        lines.append(f"dropped by reason: {self.dropped}")
        audit = "; ".join(self.violations) or "ok"
        lines.append(f"audit: {audit}; replay: {'same bits' if self.is_replayed else 'DIFFERS'}")
        return "\n".join(lines)


def merge(reports: Sequence[Report]) -> Report:
    """One report of several runs at the same time."""
    return Report(
        seed=reports[0].seed,
        env=", ".join(sorted({report.env for report in reports})),
        runs=len(reports),
        faults=[fault for report in reports for fault in report.faults],
        steps=sum(report.steps for report in reports),
        trained=sum(report.trained for report in reports),
        duplicates=sum(report.duplicates for report in reports),
        losses=sum(report.losses for report in reports),
        scored=sum(report.scored for report in reports),
        wrong_rewards=sum(report.wrong_rewards for report in reports),
        dropped=dict(sum((Counter(report.dropped) for report in reports), Counter[str]())),
        violations=[f"seed {report.seed}: {text}" for report in reports for text in report.violations],
        replays=sum(report.replays for report in reports),
        seconds=max(report.seconds for report in reports),
    )


def record(file: Path, row: Mapping[str, Any]) -> None:
    """Add a result to a file. It replaces one of the same commit, seed and number of cores."""
    same = ("commit", "seed", "cores")
    rows = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    kept = [one for one in rows if any(one[name] != row[name] for name in same)]
    file.write_text(json.dumps([row, *kept], indent=2) + "\n", encoding="utf-8")


def page() -> str:
    """docs/results/chaos.md: the recorded chaos runs."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    return "\n".join(
        [
            "# Times to heal",
            "",
            "What each fault does is in [failures](../failures.md). This page has the measured times; `make docs` writes it from",
            "`chaos.json` and `cluster-chaos.json`.",
            "",
            "`make chaos` measures the time from a fault until the process is ready again. Simulators, command lines and reward",
            "processes count when their replacement has started; faults of the whole run, of sandboxes, verifiers and agents, when",
            "the next step is trained.",
            "",
            *itertools.chain.from_iterable(_session(row) for row in rows),
            *_cluster_section(),
        ]
    )


def _session(row: Mapping[str, Any]) -> Sequence[str]:
    """One chaos session: several runs at the same time on one machine and one commit."""
    return [
        f"## {row['kills']} kills on {row['cores']} cores",
        "",
        f"Commit {row['commit']}, {row['date']}, seed {row['seed']}, load average {row['load']}: {row['faults']} faults of",
        f"{row['runs']} runs ({row['env']}) in {row['seconds']} s.",
        *_totals(row),
        "",
        *_rows("fault", row["heal_s_by_kind"]),
        "",
        *_rows("process", row["heal_s_by_role"]),
        "",
    ]


def _cluster_section() -> Sequence[str]:
    """The recorded chaos runs on several machines."""
    rows = json.loads(CLUSTER_RESULTS.read_text(encoding="utf-8"))
    return [
        "## On several machines",
        "",
        "`make chaos-cluster` runs three machines in network namespaces, the ledger in PostgreSQL with a synchronous standby, and",
        "a policy server and a dispatcher that joined from other machines. The time counts from the end of a fault of links,",
        "disks, database or head until the next step is trained; for a lost machine, until its process has joined again; for a",
        "single process, until its replacement is ready.",
        "",
        *itertools.chain.from_iterable(_cluster_session(row) for row in rows),
    ]


def _cluster_session(row: Mapping[str, Any]) -> Sequence[str]:
    return [
        f"Commit {row['commit']}, {row['date']}, seed {row['seed']}: {row['faults']} faults in {row['seconds']} s on",
        f"{row['cores']} cores, load average {row['load']}.",
        *_totals(row),
        "",
        *_rows("fault", row["heal_s_by_kind"]),
        "",
    ]


def _totals(row: Mapping[str, Any]) -> Sequence[str]:
    return [
        f"{row['trained_groups']} groups or parts of groups were trained in {row['steps']} steps, {row['losses']} lost,",
        f"{row['duplicates']} twice.",
        *([f"{row['wrong_rewards']} of {row['scored']} rewards were lowered by a fault."] if row.get("scored") else []),
        f"The replay of {row['replays']} of {row['runs']} runs gave the same bits.",
        f"Violations: {'; '.join(row['violations']) or 'none'}.",
    ]


def _rows(title: str, summary: Mapping[str, Mapping[str, float]]) -> Sequence[str]:
    lines = [f"| {title} | times | median s | worst s |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {one['times']} | {one['median']:.1f} | {one['worst']:.1f} |" for name, one in summary.items()
    ]
    return lines


def _summary(times: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    return {
        name: {"times": len(found), "median": round(statistics.median(found), 2), "worst": round(max(found), 2)}
        for name, found in sorted(times.items())
    }


if __name__ == "__main__":
    sys.stdout.write(page())
