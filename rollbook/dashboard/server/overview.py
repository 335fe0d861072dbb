"""`/api/runs`, `/api/run`, `/api/law` and `/api/audit`: is it learning, who waits, and is everything accounted for."""

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from rollbook import __version__
from rollbook.contracts.admission import LedgerStatus
from rollbook.contracts.errors import RollbookError
from rollbook.dashboard.problems import Facts, find_problems
from rollbook.dashboard.process_files import Process, quarantined_replicas, read_processes, read_resumes
from rollbook.dashboard.run_metrics import Change, RunMetrics, StepMetrics
from rollbook.dashboard.run_view import RunPlace, RunView
from rollbook.dashboard.series import MetricSeries
from rollbook.dashboard.server.actions import action_state
from rollbook.dashboard.server.request import BusyError
from rollbook.dashboard.server.runs import OpenRuns

SPARKLINE_POINTS = 64
MAX_LISTED = 200
"""Runs of a folder, the newest."""


async def list_runs(runs: OpenRuns, _: web.Request) -> dict[str, Any]:
    places = await runs.catalog.places()
    return {
        "runs": [await _listed(runs, place) for place in places[:MAX_LISTED]],
        "target": runs.catalog.target,
        "allow_actions": runs.allows_actions,
        "version": __version__,
    }


async def _listed(runs: OpenRuns, place: RunPlace) -> dict[str, Any]:
    base = {
        "key": place.key,
        "name": place.name,
        "source": place.source,
        "path": place.path,
        "created": place.created,
        "problem": None,
    }
    try:
        view = await runs.view(place)
        status = await view.ledger.status()
        metrics = await view.metrics()
    except RollbookError as error:
        return {
            **base,
            "state": "unreadable",
            "problem": str(error),
            "last_step": None,
            "total_steps": None,
            "reward": None,
        }
    return {
        **base,
        "state": state_of(view, status),
        "last_step": status.acknowledged_step,
        "total_steps": view.details.total_steps,
        "reward": metrics.latest.reward,
    }


def state_of(view: RunView, status: LedgerStatus) -> str:
    if view.run.is_running():
        return "running"
    if view.details.source == "ledger" and not status.ended:
        return "running"
    return "finished" if status.ended else "stopped"


async def overview(view: RunView, _: web.Request) -> dict[str, Any]:
    details, problem = view.details, None
    try:
        status = await view.ledger.status()
        state = state_of(view, status)
    except RollbookError as error:
        # The files of the run can still be shown.
        status, state, problem = None, "running" if view.run.is_running() else "unreadable", str(error)
    metrics = await view.metrics()
    series = await view.series()
    processes: list[Process] = []
    replicas: list[str] = []
    resumes: list[dict[str, Any]] = []
    if view.directory is not None:
        processes = await asyncio.to_thread(read_processes, view.directory)
        replicas = await asyncio.to_thread(quarantined_replicas, view.directory)
        resumes = await asyncio.to_thread(read_resumes, view.directory)
    now = time.time()
    facts = Facts(
        state=state,
        status=status,
        metrics=metrics,
        details=details,
        processes=processes,
        quarantined_replicas=replicas,
        problem=problem,
        audit=None if view.audit is None else view.audit[2],
        notes=view.run.notes,
        now=now,
        resumed_at=resumes[-1]["at"] if resumes else None,
    )
    step = max(metrics.last_step, 0 if status is None else status.acknowledged_step)
    begin = details.created
    end = now if state == "running" else metrics.latest.time
    return {
        "key": details.key,
        "name": details.name,
        "source": details.source,
        "path": details.path,
        "state": state,
        "created": details.created,
        "now": now,
        "problem": problem,
        "progress": {
            "step": step,
            "total_steps": details.total_steps,
            "durable_step": None if status is None else status.durable_step,
            "version": None if status is None else status.version,
            "seconds_per_step": metrics.seconds_per_step,
            "eta_s": None if details.total_steps is None or state != "running" else metrics.eta_s(details.total_steps),
            "elapsed_s": max(0.0, end - begin) if begin is not None and end else None,
        },
        "learning": _learning(metrics, series),
        "flow": _flow(metrics, status),
        "freshness": {
            "bound": details.max_head_offpolicy_versions,
            "lag_max": metrics.max_lag if metrics.last_step else None,
            "lag_mean": metrics.latest.lag_mean,
            "policy": details.batch_policy,
        },
        "law": None if status is None else _law(status),
        "audit": audit_reply(view),
        "problems": find_problems(facts),
        "processes": processes,
        "sparklines": _sparklines(metrics.steps),
        "actions": action_state(status),
    }


def _learning(metrics: RunMetrics, series: MetricSeries | None) -> dict[str, Any]:
    last = metrics.latest
    has_reference_kl = last.reference_kl is not None
    changes = {
        "reward": (last.reward, "rollout/reward"),
        "solved": (last.solved, "rollout/accuracy"),
        "response_tokens": (last.response_tokens, "rollout/response_len"),
        "entropy": (last.entropy, "train/entropy"),
        "kl": (last.kl, "train/reference_kl" if has_reference_kl else "train/mean_kl"),
    }
    found: dict[str, Any] = {"has_reference_kl": has_reference_kl, "evaluation": metrics.evaluation}
    for name, (value, metric) in changes.items():
        change = Change() if series is None else series.change(metric)
        found[name] = {"last": value, "first_tenth": change.first, "last_tenth": change.last}
    return found


def _flow(metrics: RunMetrics, status: LedgerStatus | None) -> dict[str, Any]:
    busy = metrics.trainer_utilisation
    waits, sentence = None, f"{unknown_wait(status)}."
    if busy is not None:
        waits = "trainer" if busy < 0.9 else "rollout"
        sentence = (
            f"The trainer waits {1 - busy:.0%} of the time for groups."
            if waits == "trainer"
            else f"The trainer is busy {busy:.0%} of the time; the rollouts are fast enough."
        )
    return {
        "trainer_utilisation": busy,
        "tokens_per_s": metrics.tokens_per_s,
        "in_flight": None if status is None else status.counts.running,
        "queued": None if status is None else status.by_state.get("queued", 0),
        "capacity": None if status is None else status.capacity,
        "gate": None if status is None else status.gate,
        "waits": waits,
        "sentence": sentence,
    }


def unknown_wait(status: LedgerStatus | None) -> str:
    """Why it is unknown how long the trainer waited."""
    if status is None or not status.acknowledged_step:
        return "No step is trained yet"
    return "The waiting time of the trainer is unknown, because its metrics are not here"


def _law(status: LedgerStatus) -> dict[str, Any]:
    return {
        "opened": status.opened,
        "by_state": status.by_state,
        "dropped": status.dropped,
        "unusable": status.unusable,
        "samples": status.samples,
        "holds": status.opened == sum(status.by_state.values()),
    }


def _sparklines(steps: Sequence[StepMetrics]) -> dict[str, list[float | None]]:
    # Of the whole run, as the change that is printed above. From the end, so that the newest is shown.
    recent = steps[:: -max(1, math.ceil(len(steps) / SPARKLINE_POINTS))][::-1]
    return {
        "reward": [step.reward for step in recent],
        "solved": [step.solved for step in recent],
        "tokens_per_s": [step.tokens / (step.wait_s + step.train_s) if step.train_s else None for step in recent],
        "lag": [step.lag_max for step in recent],
    }


async def law(view: RunView, _: web.Request) -> dict[str, Any]:
    status = await view.ledger.status()
    # The parts of the group `dropped` are shown one by one.
    states = [(state, count) for state, count in status.by_state.items() if state != "dropped"]
    drops = sorted(status.dropped.items())
    return {
        **_law(status),
        "states": [{"state": state, "count": count, "filter": f"state={state}"} for state, count in states],
        "drops": [
            {
                "kind": kind,
                "count": count,
                "meaning": view.run.drop_meanings.get(kind, ""),
                "filter": f"state=dropped&drop={kind}",
            }
            for kind, count in drops
        ],
        "links": [
            *({"from": "opened", "to": state, "count": count} for state, count in states),
            *({"from": "opened", "to": f"dropped:{kind}", "count": count} for kind, count in drops),
        ],
        "audit": audit_reply(view),
    }


async def audit(view: RunView, _: web.Request) -> dict[str, Any] | None:
    if view.is_auditing:
        raise BusyError("an audit of this run is already running")
    view.is_auditing = True
    began = time.monotonic()
    try:
        found = await view.ledger.audit()
    finally:
        view.is_auditing = False
    view.audit = (time.time(), time.monotonic() - began, found)
    return audit_reply(view)


def audit_reply(view: RunView) -> dict[str, Any] | None:
    """The last audit: of this dashboard, or one that the run recorded."""
    recorded_at = view.run.audited_at()
    if recorded_at is not None and (view.audit is None or view.audit[0] < recorded_at):
        return {"at": recorded_at, "ok": True, "violations": []}
    if view.audit is None:
        return None
    at, seconds, found = view.audit
    return {
        "at": at,
        "ok": found.ok,
        "violations": found.violations,
        "opened": found.opened,
        "steps": found.steps,
        "max_lag": found.max_lag,
        "seconds": seconds,
    }
