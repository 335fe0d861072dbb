"""What is wrong with a run, in words. Each problem says what to do or where to look."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from rollbook.contracts.admission import AuditReport, GateState, LedgerStatus
from rollbook.dashboard.learning_problems import FEW_GROUPS, ProblemKind
from rollbook.dashboard.process_files import Process
from rollbook.dashboard.run_metrics import RunMetrics
from rollbook.dashboard.run_view import RunDetails

MANY = 0.5
SOME = 0.2
"""Shares of filtered, unscorable or truncated work above which it is worth a look."""
QUIET_S = 120.0
"""A running run that has trained nothing for this long, and for ten times its usual step, may be stuck."""


class FoundProblem(msgspec.Struct, frozen=True, kw_only=True):
    severity: str
    """`error`, `warning` or `info`."""
    kind: str
    text: str
    link: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    state: str
    status: LedgerStatus | None
    metrics: RunMetrics
    details: RunDetails
    processes: Sequence[Process]
    quarantined_replicas: Sequence[str]
    problem: str | None
    audit: AuditReport | None
    notes: Sequence[str]
    """What could not be read."""
    now: float
    resumed_at: float | None = None
    """When the run was last resumed."""


def find_problems(facts: Facts) -> list[FoundProblem]:
    """The worst first."""
    order = {"error": 0, "warning": 1, "info": 2}
    parts = (_state, _integrity, _processes, _learning, _samples, _freshness)
    found = [problem for part in parts for problem in part(facts)]
    return sorted(found, key=lambda problem: order[problem.severity])


def _state(facts: Facts) -> Iterator[FoundProblem]:
    if facts.problem is not None:
        yield FoundProblem(severity="error", kind="ledger", text=f"The ledger cannot be read: {facts.problem}")
    for note in facts.notes:
        yield FoundProblem(severity="warning", kind="unreadable", text=note)
    if facts.details.unconfined:
        text = f"Code of the policy runs unconfined, with all rights of its process: {', '.join(facts.details.unconfined)}."
        yield FoundProblem(severity="warning", kind="unconfined", text=text, link="/config")
    gate = None if facts.status is None else facts.status.gate
    if gate is GateState.PAUSED:
        text = "An operator paused admission: no group starts until it is resumed."
        yield FoundProblem(severity="info", kind="paused", text=text, link="/actions")
    elif gate is GateState.DRAINING:
        text = "An operator drains the run: when what was started is trained, it stops with a checkpoint."
        yield FoundProblem(severity="info", kind="draining", text=text, link="/actions")
    if facts.status is not None and facts.status.quarantined:
        text = f"Tasks in quarantine: {', '.join(facts.status.quarantined[:3])}"
        rest = len(facts.status.quarantined) - 3
        text += f" and {rest} more." if rest > 0 else "."
        yield FoundProblem(severity="info", kind="quarantined", text=text, link="/actions")
    if facts.state == "stopped":
        yield FoundProblem(
            severity="warning",
            kind="stopped",
            text="The run is not finished and no process trains it. `rollbook train` on its directory resumes it.",
            link="/health",
        )
    latest, pace = facts.metrics.latest.time, facts.metrics.seconds_per_step
    quiet_s = facts.now - max(latest, facts.resumed_at or 0.0)
    if facts.state == "running" and latest and quiet_s > max(QUIET_S, 10 * (pace or 0.0)):
        yield FoundProblem(
            severity="warning", kind="silent", text=f"No step was trained for {quiet_s:.0f} s.", link="/health"
        )


def _integrity(facts: Facts) -> Iterator[FoundProblem]:
    status = facts.status
    if status is not None and status.opened != sum(status.by_state.values()):
        yield FoundProblem(
            severity="error",
            kind="law",
            text=f"The conservation law does not hold: {status.opened} groups were opened, and "
            f"{sum(status.by_state.values())} are accounted for.",
            link="/law",
        )
    if facts.audit is not None and not facts.audit.ok:
        yield FoundProblem(
            severity="error",
            kind="audit",
            text=f"The audit found {len(facts.audit.violations)} violations.",
            link="/law",
        )
    if status is not None and status.unusable:
        yield FoundProblem(
            severity="warning",
            kind="unusable",
            text=f"{status.unusable} groups could not be trained and had weight 0.",
            link="/rollouts",
        )


def _processes(facts: Facts) -> Iterator[FoundProblem]:
    for process in facts.processes:
        if process.state == "failed":
            yield FoundProblem(
                severity="error", kind="failed", text=f"The process {process.name} failed.", link="/health"
            )
        elif facts.state == "running" and process.state == "running" and not process.alive:
            yield FoundProblem(
                severity="warning", kind="silent", text=f"The process {process.name} does not run.", link="/health"
            )
        for problem in process.problems if facts.state == "running" and process.alive else ():
            text = f"{process.name} {problem}"
            yield FoundProblem(severity="warning", kind="waits", text=text, link="/health")
    if facts.state == "running" and facts.quarantined_replicas:
        urls = ", ".join(facts.quarantined_replicas)
        text = (
            f"Policy servers in quarantine: {urls}. They did not confirm new weights and get no requests until they do."
        )
        yield FoundProblem(severity="warning", kind="replicas", text=text, link="/fleet")
    restarts = [f"{process.name} {process.restarts}" for process in facts.processes if process.restarts]
    if restarts:
        yield FoundProblem(
            severity="info", kind="restarts", text=f"Restarted processes: {', '.join(restarts)}.", link="/health"
        )
    deaths = facts.metrics.totals.worker_deaths
    if deaths:
        yield FoundProblem(
            severity="info",
            kind="restarts",
            text=f"{deaths:.0f} workers died. Their groups were played again.",
            link="/health",
        )


def _learning(facts: Facts) -> Iterator[FoundProblem]:
    for text in facts.metrics.problems:
        yield FoundProblem(severity="warning", kind="learning", text=f"{text[:1].upper()}{text[1:]}.", link="/metrics")


def _samples(facts: Facts) -> Iterator[FoundProblem]:
    totals, last = facts.metrics.totals, facts.metrics.latest
    is_reported = any(text.startswith(ProblemKind.FILTERED) for text in facts.metrics.problems)
    if totals.groups >= FEW_GROUPS and (totals.filtered_share or 0.0) >= MANY and not is_reported:
        yield FoundProblem(
            severity="warning",
            kind="filtered",
            text=f"{totals.filtered_share:.0%} of the groups were filtered: there was nothing to learn in them.",
            link="/rollouts?state=dropped&drop=filtered",
        )
    if totals.groups >= FEW_GROUPS and (totals.failed_share or 0.0) >= SOME / 2:
        yield FoundProblem(
            severity="warning",
            kind="invalid",
            text=f"{totals.failed_share:.0%} of the groups failed: too few of their samples could be scored.",
            link="/rollouts?state=dropped&drop=invalid",
        )
    if totals.episodes >= FEW_GROUPS and (totals.unscorable_share or 0.0) >= SOME / 4:
        yield FoundProblem(
            severity="warning",
            kind="unscorable",
            text=f"{totals.unscorable_share:.0%} of the episodes could not be scored.",
            link="/health",
        )
    if (last.truncated or 0.0) >= SOME:
        yield FoundProblem(
            severity="info",
            kind="truncated",
            text=f"{last.truncated:.0%} of the samples of the last step ended by a limit of tokens, turns or time.",
            link="/rollouts?end=max_tokens",
        )


def _freshness(facts: Facts) -> Iterator[FoundProblem]:
    bound = facts.details.max_head_offpolicy_versions
    if bound is not None and facts.metrics.max_lag > bound:
        yield FoundProblem(
            severity="error",
            kind="lag",
            text=f"A trained token was {facts.metrics.max_lag} versions old; the staleness bound is {bound}.",
            link="/freshness",
        )
    status = facts.status
    stale = 0 if status is None else status.dropped.get("stale", 0)
    if status is not None and status.opened >= FEW_GROUPS and stale / status.opened >= SOME / 2:
        yield FoundProblem(
            severity="warning",
            kind="stale",
            text=f"{stale / status.opened:.0%} of the groups were dropped because they were too old.",
            link="/rollouts?state=dropped&drop=stale",
        )
    if facts.metrics.gauges.get("fairness/biased_measures"):
        measures = ("tokens", "seconds", "reward")
        worst = max(measures, key=lambda name: facts.metrics.gauges.get(f"fairness/ks_{name}", 0.0))
        yield FoundProblem(
            severity="warning",
            kind="bias",
            text=f"The trained groups differ from all dispatched groups in {worst}.",
            link="/freshness",
        )
